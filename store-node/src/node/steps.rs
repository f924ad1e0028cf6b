//! From plans and the progress word to layers that are finished.
//!
//! The engine sends a plan before each step and then raises the progress word; the node sees only
//! the newest value of the word. Whatever the jump, every layer of every planned page comes out of
//! here once, in order. Pure: what it is told was read from the engine and is checked.

use std::collections::VecDeque;
use std::ops::Range;

use kvasir_proto::Share;

use kvasir_blocks::moving::engine_stops::Progress;

/// Plans that may wait for their step; an engine is at most a step or two ahead.
const PLANS_MAX: usize = 256;

/// Pages of one share that one step finishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedPages {
    pub share: Share,
    pub pages: Range<u32>,
    /// They are computed in the engine's pool, and not written into slots.
    pub in_pool: bool,
}

/// Layers of some pages of one share are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finished {
    pub share: Share,
    pub step: u32,
    pub pages: Range<u32>,
    pub layers: Range<u16>,
    pub in_pool: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StepError {
    #[error("the plan of step {step} arrived after the plan of step {last}")]
    Order { step: u32, last: u32 },
    #[error("more than {PLANS_MAX} plans wait for their steps")]
    TooMany,
    #[error("{got} layers are reported as done, but the layout has {layers}")]
    Layers { got: u16, layers: u16 },
}

/// The steps of one attach.
#[derive(Debug)]
pub(crate) struct Steps {
    layers: u16,
    plans: VecDeque<Plan>,
    last_step: Option<u32>,
    seen: Option<Progress>,
}

#[derive(Debug)]
struct Plan {
    step: u32,
    pages: Vec<PlannedPages>,
    layers_done: u16,
}

impl Steps {
    pub(crate) fn new(layers: u16) -> Self {
        Steps { layers, plans: VecDeque::new(), last_step: None, seen: None }
    }

    /// A step that is about to begin.
    ///
    /// # Errors
    /// [`StepError`] when the engine does not keep the order.
    pub(crate) fn plan(&mut self, step: u32, pages: Vec<PlannedPages>) -> Result<(), StepError> {
        if let Some(last) = self.last_step.filter(|last| *last >= step) {
            return Err(StepError::Order { step, last });
        }
        if self.plans.len() >= PLANS_MAX {
            return Err(StepError::TooMany);
        }
        self.last_step = Some(step);
        self.plans.push_back(Plan { step, pages, layers_done: 0 });
        Ok(())
    }

    /// The progress word, as it was before the plans known here were read from the ring. Adds what
    /// is newly finished, oldest step first.
    ///
    /// # Errors
    /// [`StepError::Layers`] when the word cannot be true.
    pub(crate) fn progress(
        &mut self,
        progress: Progress,
        finished: &mut Vec<Finished>,
    ) -> Result<(), StepError> {
        let Progress { step, layers_done } = progress;
        if layers_done > self.layers {
            return Err(StepError::Layers { got: layers_done, layers: self.layers });
        }
        if self.seen == Some(progress) && self.plans.is_empty() {
            return Ok(());
        }
        self.seen = Some(progress);
        while let Some(plan) = self.plans.front_mut().filter(|plan| plan.step <= step) {
            let done = if plan.step < step { self.layers } else { layers_done };
            plan.raise(done, finished);
            if plan.layers_done < self.layers {
                break;
            }
            self.plans.pop_front();
        }
        Ok(())
    }
}

impl Plan {
    fn raise(&mut self, done: u16, finished: &mut Vec<Finished>) {
        if done <= self.layers_done {
            return;
        }
        let layers = self.layers_done..done;
        self.layers_done = done;
        finished.extend(self.pages.iter().map(|planned| Finished {
            share: planned.share,
            step: self.step,
            pages: planned.pages.clone(),
            layers: layers.clone(),
            in_pool: planned.in_pool,
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_proto::{Side, TxId};

    fn share(serial: u64) -> Share {
        Share { tx: TxId { conductor_incarnation: 1, serial }, side: Side::Prefill }
    }

    fn planned(serial: u64, pages: Range<u32>) -> PlannedPages {
        PlannedPages { share: share(serial), pages, in_pool: false }
    }

    /// Feeds plans first and then each word; answers as (step, share, layers) lines.
    fn check(plans: &[(u32, &[u64])], words: &[(u32, u16)]) -> Vec<(u32, u64, Range<u16>)> {
        let mut steps = Steps::new(4);
        for (step, shares) in plans {
            let pages = shares.iter().map(|serial| planned(*serial, 0..1)).collect();
            steps.plan(*step, pages).expect("in order");
        }
        let mut finished = Vec::new();
        for &(step, layers_done) in words {
            steps.progress(Progress { step, layers_done }, &mut finished).expect("true");
        }
        finished.iter().map(|f| (f.step, f.share.tx.serial, f.layers.clone())).collect()
    }

    #[test]
    fn a_jump_gives_all_layers_between_once() {
        assert_eq!(check(&[(1, &[5])], &[(1, 0)]), []);
        assert_eq!(check(&[(1, &[5])], &[(1, 1), (1, 1), (1, 4)]), [(1, 5, 0..1), (1, 5, 1..4)]);
        assert_eq!(check(&[(1, &[5, 6])], &[(1, 2)]), [(1, 5, 0..2), (1, 6, 0..2)]);
    }

    #[test]
    fn a_later_step_finishes_all_steps_before_it() {
        assert_eq!(
            check(&[(1, &[5]), (2, &[6]), (7, &[5])], &[(1, 3), (7, 1)]),
            [(1, 5, 0..3), (1, 5, 3..4), (2, 6, 0..4), (7, 5, 0..1)]
        );
        assert_eq!(check(&[(1, &[5]), (2, &[6])], &[(9, 1)]), [(1, 5, 0..4), (2, 6, 0..4)]);
    }

    #[test]
    fn a_word_that_goes_back_gives_nothing_twice() {
        assert_eq!(check(&[(1, &[5]), (2, &[6])], &[(2, 2), (1, 4), (2, 1)]).len(), 2);
    }

    #[test]
    fn an_engine_that_does_not_keep_the_order_is_an_error() {
        let mut steps = Steps::new(4);
        steps.plan(3, Vec::new()).expect("in order");
        assert_eq!(steps.plan(3, Vec::new()), Err(StepError::Order { step: 3, last: 3 }));
        let word = Progress { step: 3, layers_done: 5 };
        let error = StepError::Layers { got: 5, layers: 4 };
        assert_eq!(steps.progress(word, &mut Vec::new()), Err(error));
        for step in 4..4 + PLANS_MAX as u32 - 1 {
            steps.plan(step, Vec::new()).expect("room");
        }
        assert_eq!(steps.plan(9999, Vec::new()), Err(StepError::TooMany));
    }
}
