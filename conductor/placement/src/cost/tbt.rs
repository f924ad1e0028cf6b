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
}

/// See the module.
#[derive(Debug, Clone)]
pub struct TbtModel {
    fit: Fit<4>,
    /// Of the logarithm of measured over predicted.
    off: Odds,
    samples: u32,
}

impl TbtModel {
    pub fn new(profile: DecodeProfile) -> Self {
        let DecodeProfile { base_us, sequence_us, .. } = profile;
        TbtModel {
            fit: Fit::new([base_us, sequence_us, base_us / 1e4, sequence_us / 1e3]),
            off: Odds::new(-3.2, 0.1),
            samples: 0,
        }
    }

    pub(crate) fn learned(&self) -> Option<LearnedTbt> {
        (self.samples >= LEARNED_AFTER)
            .then(|| LearnedTbt { coefficients: self.fit.coefficients(), off: self.off.up_to() })
    }

    pub(crate) fn from_learned(learned: Option<LearnedTbt>) -> Self {
        let mut model = TbtModel::new(DecodeProfile::default());
        if let Some(LearnedTbt { coefficients, off }) = learned {
            model.fit = Fit::learned(coefficients);
            model.off = model.off.learned(off);
            model.samples = LEARNED_AFTER;
        }
        model
    }

    /// What an answer beside this would see; nothing before enough of them have taught it.
    pub fn predict_us(&self, load: DecodeLoad) -> Option<u64> {
        let enough = self.samples >= LEARNED_AFTER;
        enough.then(|| bounded_us(self.fit.predict(features(load))))
    }

    /// How likely one that is placed beside this sees no more than the objective.
    pub fn in_time(&self, load: DecodeLoad, objective_us: u64) -> Option<f64> {
        let predicted_us = self.predict_us(load)?.max(1);
        self.off.within((objective_us.max(1) as f64 / predicted_us as f64).ln())
    }

    /// Only such a share stays of what is known of how far predictions are off, or what a few samples say.
    pub(crate) fn forget(&mut self, stays: f64) {
        let few = f64::from(LEARNED_AFTER) / self.off.samples().max(1.0);
        self.off.forget(stays.max(few).min(1.0));
    }

    /// One that was placed beside `guessed` ran beside `load` and saw so much.
    pub fn observe(&mut self, guessed: DecodeLoad, load: DecodeLoad, measured_us: u64) {
        if measured_us == 0 {
            return;
        }
        if let Some(predicted_us) = self.predict_us(guessed) {
            self.off.observe((measured_us as f64 / predicted_us.max(1) as f64).ln());
        }
        self.fit.observe(features(load), measured_us as f64);
        self.samples = self.samples.saturating_add(1);
    }
}

fn features(load: DecodeLoad) -> [f64; 4] {
    [1.0, load.running, load.joining, load.prompt_tokens]
}
