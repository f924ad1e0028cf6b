//! A whole cluster in virtual time, under one seed: the shipped cores (`kvasir-blocks`, `kvasir-log`,
//! `kvasir-placement`, and `kvasir-transfer-core` by the `sim` domain) with simulated disks, network,
//! clocks and engines, faults of all of them, and checkers of what must never happen (DESIGN §7).
//!
//! Nothing of the cores is compiled differently for it. What stands around them here in place of the
//! shells is in `node` and `conductor`; it does what the shells do and decides nothing.
//!
//! Reading path:
//! 1. [`plan`]: what a run will try, drawn from its seed
//! 2. [`world`]: what happens next; [`context`]: what everybody has at hand
//! 3. [`node`], [`conductor`], [`engine`], [`client`]: who it happens to; [`calls`]: what they say to each other
//! 4. [`content`]: what every byte must be; [`seen`]: what an observer sees; [`checkers`]: what must
//!    never be seen, one module for each invariant
//! 5. [`shrink`]: making a failing run smaller

#![forbid(unsafe_code)]

pub mod calls;
pub mod checkers;
pub mod client;
pub mod conductor;
pub mod content;
pub mod context;
pub mod engine;
pub mod node;
pub mod plan;
pub mod random;
pub mod seen;
pub mod shrink;
pub mod world;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use checkers::Violation;
use plan::Plan;
use world::{Summary, World};

/// Lines of the trace that a failure shows.
const TRACE_LINES: usize = 120;

/// A run in which something happened that must not.
#[derive(Debug, Clone)]
pub struct Failure {
    pub violation: Violation,
    pub trace: Vec<String>,
}

/// Runs a plan to its end.
///
/// # Errors
/// [`Failure`].
pub fn try_plan(plan: &Plan) -> Result<Summary, Failure> {
    let mut world = match catch_unwind(|| World::new(plan.clone())) {
        Ok(world) => world,
        Err(panic) => {
            return Err(Failure { violation: assertion(panic.as_ref(), 0), trace: Vec::new() });
        }
    };
    let result = catch_unwind(AssertUnwindSafe(|| world.run()));
    let violation = match result {
        Ok(Ok(summary)) => return Ok(summary),
        Ok(Err(violation)) => violation,
        Err(panic) => assertion(panic.as_ref(), world.context.now_us),
    };
    Err(Failure { violation, trace: world.context.books.trace(TRACE_LINES) })
}

fn assertion(panic: &(dyn Any + Send), at_us: u64) -> Violation {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
    Violation { checker: "assertion", at_us, what: text.unwrap_or_default() }
}

/// Runs a seed; a failure is told in full, and first shrunk if so wanted.
///
/// # Errors
/// The whole story as text: the seed, the checker, the shrunk plan and its trace.
pub fn run_seed(seed: u64, shrinks: bool) -> Result<Summary, String> {
    let plan = Plan::new(seed);
    let failure = match try_plan(&plan) {
        Ok(summary) => return Ok(summary),
        Err(failure) => failure,
    };
    let first = failure.violation.clone();
    let (small, failure) = match shrinks {
        true => shrink::shrink(&plan, failure),
        false => (plan.clone(), failure),
    };
    let Violation { checker, at_us, what } = &failure.violation;
    Err(format!(
        "seed {seed}: {} at {} us: {}\n\
         shrunk from {} requests and {} faults to {} and {}, on {} nodes: {checker} at {at_us} us: \
         {what}\n\
         faults: {:#?}\nrequests: {:?}\ntrace:\n{}\n\
         again: KVASIR_SIM_SEED={seed} KVASIR_SIM_SEEDS=1",
        first.checker,
        first.at_us,
        first.what,
        plan.requests.len(),
        plan.faults.len(),
        small.requests.len(),
        small.faults.len(),
        small.nodes.len(),
        small.faults,
        small.requests,
        failure.trace.join("\n"),
    ))
}
