//! Making a failing run smaller: whatever can be left out of its plan so that the same checker still finds
//! something is left out, requests and faults by halves, then one by one, then what the network does by
//! itself.

use crate::plan::Plan;
use crate::{Failure, try_plan};

/// Runs that shrinking may take.
const RUNS_MAX: usize = 300;

/// The smallest plan that was found, and how it fails.
pub fn shrink(plan: &Plan, failure: Failure) -> (Plan, Failure) {
    let mut shrinking = Shrinking { plan: plan.clone(), failure, runs: 0 };
    shrinking.shorten(|plan| &mut plan.faults);
    shrinking.shorten(|plan| &mut plan.clients);
    shrinking.shorten(|plan| &mut plan.requests);
    shrinking.shorten(|plan| &mut plan.faults);
    shrinking.change(|plan| plan.network = crate::plan::NetworkPlan::default());
    shrinking.change(|plan| plan.lost_percent = 0);
    shrinking.change(|plan| plan.twice_percent = 0);
    shrinking.change(|plan| plan.conductors = 1);
    for node in (2..plan.nodes.len()).rev() {
        shrinking.change(|plan| plan.drop_node(node));
    }
    shrinking.shorten(|plan| &mut plan.requests);
    (shrinking.plan, shrinking.failure)
}

struct Shrinking {
    plan: Plan,
    failure: Failure,
    runs: usize,
}

impl Shrinking {
    /// Keeps the change when the same checker still finds something.
    fn change(&mut self, change: impl FnOnce(&mut Plan)) -> bool {
        if self.runs >= RUNS_MAX {
            return false;
        }
        self.runs += 1;
        let mut smaller = self.plan.clone();
        change(&mut smaller);
        match try_plan(&smaller) {
            Err(failure) if failure.violation.checker == self.failure.violation.checker => {
                (self.plan, self.failure) = (smaller, failure);
                true
            }
            _ => false,
        }
    }

    /// Leaves out parts of a list, the larger ones first.
    fn shorten<T>(&mut self, list: impl Fn(&mut Plan) -> &mut Vec<T>) {
        let mut part = list(&mut self.plan).len();
        while part > 0 {
            let mut start = 0;
            while start < list(&mut self.plan).len() {
                let end = (start + part).min(list(&mut self.plan).len());
                let shorter = self.change(|plan| {
                    list(plan).drain(start..end);
                });
                if !shorter {
                    start = end;
                }
            }
            part /= 2;
        }
    }
}
