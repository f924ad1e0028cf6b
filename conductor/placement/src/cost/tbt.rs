//! What a request will see of the time between tokens where it decodes. A step model cannot say
//! it: the objective is on the longest tenth of the intervals, and those are the ones in which
//! others join. On the published conversations nine tenths of what answers differ by is how many
//! prompt tokens join beside them for each second; what runs there when they begin says next to
//! nothing.
//!
//! So `base_us + sequence_us * running + joining_us * joining + prompt_us * prompt_tokens` is
//! fitted to what answers saw, by what joined while they ran. When one is to be placed, what will
//! join is only a guess; how far guesses were off is kept as a distribution, and answers how likely a
//! request is in time.
//!
//! What is fitted to a few answers beside each other says anything of many. So nothing is predicted
//! beyond the slowest answer of late, unless the step model says so too.

use super::fit::Fit;
use super::odds::{BINS, Odds};
use super::{DecodeProfile, bounded_us};

/// What an answer is decoded beside.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeLoad {
    /// Sequences at once, this one included.
    pub running: f64,
    /// Tokens of prompts that join, for each second, this one included.
    pub joining: f64,
    pub prompt_tokens: f64,
}

/// Before so many answers the step model is asked.
const LEARNED_AFTER: u32 = 16;

/// What a [`TbtModel`] has learned so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LearnedTbt {
    pub coefficients: [f64; 4],
    /// Of what predictions were off by: see [`Odds`].
    pub off: [f64; BINS],
    pub slowest_us: f64,
}

/// See the module.
#[derive(Debug, Clone)]
pub struct TbtModel {
    fit: Fit<4>,
    /// Of the logarithm of measured over predicted.
    off: Odds,
    /// What the slowest answer saw; forgotten like what predictions were off by.
    slowest_us: f64,
    samples: u32,
}

impl TbtModel {
    pub fn new(profile: DecodeProfile) -> Self {
        let DecodeProfile { base_us, sequence_us, .. } = profile;
        TbtModel {
            fit: Fit::new([base_us, sequence_us, base_us / 1e4, sequence_us / 1e3]),
            off: Odds::new(-3.2, 0.1),
            slowest_us: 0.0,
            samples: 0,
        }
    }

    pub(crate) fn learned(&self) -> Option<LearnedTbt> {
        (self.samples >= LEARNED_AFTER).then(|| LearnedTbt {
            coefficients: self.fit.coefficients(),
            off: self.off.up_to(),
            slowest_us: self.slowest_us,
        })
    }

    pub(crate) fn from_learned(learned: Option<LearnedTbt>) -> Self {
        let mut model = TbtModel::new(DecodeProfile::default());
        if let Some(LearnedTbt { coefficients, off, slowest_us }) = learned {
            model.fit = Fit::learned(coefficients);
            model.off = model.off.learned(off);
            model.slowest_us = slowest_us;
            model.samples = LEARNED_AFTER;
        }
        model
    }

    /// What an answer beside this would see; nothing before enough of them have taught it. `step_us` is
    /// what the step model says of the same.
    pub fn predict_us(&self, load: DecodeLoad, step_us: u64) -> Option<u64> {
        let enough = self.samples >= LEARNED_AFTER;
        let believed_us = self.slowest_us.max(step_us as f64);
        enough.then(|| bounded_us(self.fit.predict(features(load)).min(believed_us)))
    }

    /// How likely one that is placed beside this sees no more than the objective.
    pub fn in_time(&self, load: DecodeLoad, step_us: u64, objective_us: u64) -> Option<f64> {
        let predicted_us = self.predict_us(load, step_us)?.max(1);
        self.off.within((objective_us.max(1) as f64 / predicted_us as f64).ln())
    }

    /// Only such a share stays of what is known of how far predictions are off, or what a few samples say,
    /// and of how slow answers were.
    pub(crate) fn forget(&mut self, stays: f64) {
        let few = f64::from(LEARNED_AFTER) / self.off.samples().max(1.0);
        self.off.forget(stays.max(few).min(1.0));
        self.slowest_us *= stays.clamp(0.0, 1.0);
    }

    /// One that was placed when `predicted_us` was predicted of it ran beside `load` and saw so much.
    pub fn observe(&mut self, predicted_us: Option<u64>, load: DecodeLoad, measured_us: u64) {
        if measured_us == 0 {
            return;
        }
        if let Some(predicted_us) = predicted_us {
            self.off.observe((measured_us as f64 / predicted_us.max(1) as f64).ln());
        }
        self.slowest_us = self.slowest_us.max(measured_us as f64);
        self.fit.observe(features(load), measured_us as f64);
        self.samples = self.samples.saturating_add(1);
    }
}

fn features(load: DecodeLoad) -> [f64; 4] {
    [1.0, load.running, load.joining, load.prompt_tokens]
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: DecodeLoad = DecodeLoad { running: 1.0, joining: 100.0, prompt_tokens: 50.0 };
    /// A burst: nothing like it has been seen.
    const BURST: DecodeLoad = DecodeLoad { running: 24.0, joining: 50_000.0, prompt_tokens: 50.0 };
    const STEP_US: u64 = 3_000;

    fn taught(measured_us: impl Fn(DecodeLoad) -> u64, loads: &[DecodeLoad]) -> TbtModel {
        let mut model = TbtModel::new(DecodeProfile::default());
        for _ in 0..50 {
            for &load in loads {
                let predicted_us = model.predict_us(load, STEP_US);
                model.observe(predicted_us, load, measured_us(load));
            }
        }
        model
    }

    #[test]
    fn nothing_is_predicted_beyond_the_slowest_answer_and_the_step_model() {
        let busier = DecodeLoad { joining: 200.0, ..QUIET };
        let model = taught(|load| (load.joining * 50.0) as u64, &[QUIET, busier]);
        let learned = LearnedTbt { slowest_us: f64::MAX, ..model.learned().expect("taught") };
        let believes_all = TbtModel::from_learned(Some(learned));
        let wild_us = believes_all.predict_us(BURST, STEP_US).expect("taught");
        assert!(wild_us > 1_000_000, "the fit goes on as it began: {wild_us}");
        assert!(believes_all.in_time(BURST, STEP_US, 1_000_000).expect("taught") < 0.01);

        assert_eq!(model.predict_us(BURST, STEP_US), Some(10_000), "as slow as the slowest");
        assert_eq!(model.predict_us(BURST, 40_000), Some(40_000), "as slow as the steps");
        assert!(model.in_time(BURST, STEP_US, 1_000_000).expect("taught") > 0.99);
        let near = |got_us: u64, want_us: u64| got_us.abs_diff(want_us) <= want_us / 20;
        assert!(near(model.predict_us(QUIET, STEP_US).expect("taught"), 5_000));
    }

    #[test]
    fn what_was_slow_once_is_believed_for_a_while() {
        let mut model = taught(|_| 5_000, &[QUIET]);
        let predicted_us = model.predict_us(QUIET, STEP_US);
        model.observe(predicted_us, QUIET, 10_000_000);
        let burst_us = |model: &TbtModel| model.predict_us(BURST, STEP_US).expect("taught");
        let at_first_us = burst_us(&model);
        (0..10).for_each(|_| model.forget(0.5));
        assert!(burst_us(&model) <= 10_000, "{} of {at_first_us}", burst_us(&model));
        assert!(at_first_us > 10_000, "{at_first_us}");
    }
}
