//! What things take, learned from what was measured. Each model starts from a profile, refines it
//! online and stays bounded whatever it is fed. All times in microseconds.
//!
//! - Prefill: *Mooncake*'s cost of prefill, `l (a n^2 d + b n d^2)` FLOP, as a polynomial in the
//!   computed and the reused tokens, which Algorithm 1 calls `EstimatePrefillExecutionTime`.
//! - Transfer: *Mooncake* Algorithm 1's `EstimateKVCacheTransferTime`: bytes, those in flight
//!   before them, over the measured bandwidth. Where the source reads from its SSD, what that was measured to
//!   give.
//! - Decode: one step over `running` sequences, and what an answer sees of the time between tokens, for
//!   the objective on it (*Mooncake* §4.3).

pub(crate) mod fit;
mod odds;
mod tbt;
mod tenth;

use fit::Fit;
use serde::Deserialize;

pub(crate) use odds::BINS;
pub(crate) use tbt::LearnedTbt;
pub use tbt::{DecodeLoad, TbtModel};
pub use tenth::LongestTenth;

/// The longest time that any estimate gives: an hour.
const ESTIMATE_US_MAX: f64 = 3.6e9;

/// Where the models of all instances start, but of types that have an [`InstanceProfile`] of their own.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Profile {
    pub prefill: PrefillProfile,
    pub decode: DecodeProfile,
    pub link: LinkProfile,
    /// Of a node's own SSD, towards its memory.
    pub ssd: SsdProfile,
}

/// Where the models of an instance of some type start: a file like those of `configs/instances`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InstanceProfile {
    pub prefill: PrefillProfile,
    pub decode: StepProfile,
}

/// `base_us + sequence_us * running + token_us * context`, of which `context` are the cached tokens of all
/// that run.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepProfile {
    pub base_us: f64,
    pub sequence_us: f64,
    pub token_us: f64,
}

impl InstanceProfile {
    /// The field of which no model can start: not a number, negative, or more than an hour.
    pub fn flaw(&self) -> Option<&'static str> {
        let PrefillProfile { base_us, token_us, pair_us, reused_us } = self.prefill;
        let prefill = [
            ("prefill.base_us", base_us),
            ("prefill.token_us", token_us),
            ("prefill.pair_us", pair_us),
            ("prefill.reused_us", reused_us),
        ];
        let StepProfile { base_us, sequence_us, token_us } = self.decode;
        let decode = [
            ("decode.base_us", base_us),
            ("decode.sequence_us", sequence_us),
            ("decode.token_us", token_us),
        ];
        let is_flaw = |(_, value): &(&str, f64)| !(0.0..=ESTIMATE_US_MAX).contains(value);
        prefill.into_iter().chain(decode).find(is_flaw).map(|(field, _)| field)
    }
}

/// `base_us + max(token_us * n + pair_us * n (2 r + n), reused_us * r)` for `n` computed after `r`
/// reused tokens. What is reused is loaded layer by layer while others are computed, so that the
/// longer of the two counts (*Mooncake*'s condition for reuse compares the same two).
///
/// `n (2 r + n) = (r + n)^2 - r^2` is the part of the squared length that is computed here: with
/// `r = 0` this is Mooncake's formula with `pair_us = l a d / speed`, `token_us = l b d^2 / speed`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrefillProfile {
    pub base_us: f64,
    pub token_us: f64,
    pub pair_us: f64,
    /// Bringing one reused token's rows from the node's memory to where they are attended.
    pub reused_us: f64,
}

impl Default for PrefillProfile {
    /// A small model on a few CPU cores; a GPU is learned within a few prefills.
    fn default() -> Self {
        PrefillProfile { base_us: 1_000.0, token_us: 100.0, pair_us: 0.005, reused_us: 0.0 }
    }
}

/// As [`StepProfile`] has it, and how long answers are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeProfile {
    pub base_us: f64,
    pub sequence_us: f64,
    pub token_us: f64,
    /// How long an answer takes in all: the uniform decode time of *Mooncake* §4.3.
    pub answer_us: f64,
    /// How many tokens an answer has.
    pub generated_tokens: f64,
}

impl Default for DecodeProfile {
    fn default() -> Self {
        DecodeProfile {
            base_us: 2_000.0,
            sequence_us: 500.0,
            token_us: 0.0,
            answer_us: 2_000_000.0,
            generated_tokens: 256.0,
        }
    }
}

/// `base_us + bytes / bandwidth`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkProfile {
    pub base_us: f64,
    pub bytes_per_us: f64,
}

impl Default for LinkProfile {
    /// Two calls on one host, and what one TCP stream on loopback was measured to carry.
    fn default() -> Self {
        LinkProfile { base_us: 1_000.0, bytes_per_us: 1_000.0 }
    }
}

/// `base_us + bytes / bandwidth`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SsdProfile {
    pub base_us: f64,
    pub bytes_per_us: f64,
}

impl Default for SsdProfile {
    /// One ordinary NVMe device.
    fn default() -> Self {
        SsdProfile { base_us: 200.0, bytes_per_us: 2_000.0 }
    }
}

/// What a node's SSD gives: the mean of [`LinkModel`], of what the node measured.
#[derive(Debug, Clone)]
pub struct SsdModel(LinkModel);

impl SsdModel {
    pub fn new(SsdProfile { base_us, bytes_per_us }: SsdProfile) -> Self {
        SsdModel(LinkModel::new(LinkProfile { base_us, bytes_per_us }))
    }

    /// How long it takes to read so much; nothing for nothing.
    pub fn predict_us(&self, bytes: u64) -> u64 {
        match bytes {
            0 => 0,
            _ => self.0.predict_us(bytes),
        }
    }

    /// `bytes` were read in `measured_us`, in which there was always something to read.
    pub fn observe(&mut self, bytes: u64, measured_us: u64) {
        self.0.observe(bytes, measured_us, true);
    }

    /// What it has learned so far.
    pub(crate) fn profile(&self) -> SsdProfile {
        let LinkProfile { base_us, bytes_per_us } = self.0.profile();
        SsdProfile { base_us, bytes_per_us }
    }

    /// One that has learned this.
    pub(crate) fn learned(SsdProfile { base_us, bytes_per_us }: SsdProfile) -> Self {
        SsdModel(LinkModel::learned(LinkProfile { base_us, bytes_per_us }))
    }
}

/// How long one instance takes to prefill.
#[derive(Debug, Clone)]
pub struct PrefillModel {
    fit: Fit<3>,
    reused_us: f64,
}

impl PrefillModel {
    pub fn new(profile: PrefillProfile) -> Self {
        let fit = Fit::new([profile.base_us, profile.token_us, profile.pair_us]);
        PrefillModel { fit, reused_us: profile.reused_us }
    }

    /// One that has learned this.
    pub(crate) fn learned(profile: PrefillProfile) -> Self {
        let PrefillProfile { base_us, token_us, pair_us, reused_us } = profile;
        PrefillModel { fit: Fit::learned([base_us, token_us, pair_us]), reused_us }
    }

    /// How many it has learned from.
    pub(crate) fn samples(&self) -> u32 {
        self.fit.samples()
    }

    pub fn predict_us(&self, computed_tokens: u64, reused_tokens: u64) -> u64 {
        let computing_us = self.fit.predict(features(computed_tokens, reused_tokens));
        bounded_us(computing_us.max(self.loading_us(reused_tokens)))
    }

    /// One prefill took `measured_us` of the engine's own time, without its queue.
    pub fn observe(&mut self, computed_tokens: u64, reused_tokens: u64, measured_us: u64) {
        if computed_tokens == 0 || measured_us == 0 {
            return;
        }
        let features = features(computed_tokens, reused_tokens);
        // One that waited for what it reuses says nothing of computing.
        if self.loading_us(reused_tokens) <= self.fit.predict(features) {
            self.fit.observe(features, (measured_us as f64).min(ESTIMATE_US_MAX));
        }
    }

    fn loading_us(&self, reused_tokens: u64) -> f64 {
        match reused_tokens {
            0 => 0.0,
            _ => self.fit.coefficients()[0] + self.reused_us * reused_tokens as f64,
        }
    }

    /// What it has learned so far.
    pub fn profile(&self) -> PrefillProfile {
        let [base_us, token_us, pair_us] = self.fit.coefficients();
        PrefillProfile { base_us, token_us, pair_us, reused_us: self.reused_us }
    }
}

fn features(computed_tokens: u64, reused_tokens: u64) -> [f64; 3] {
    let (n, r) = (computed_tokens as f64, reused_tokens as f64);
    [1.0, n, n * (2.0 * r + n)]
}

/// What one pair of nodes moves: an exponentially weighted mean of the bandwidth. It is geometric,
/// for the reason that [`DecodeModel::observe_step`] has.
#[derive(Debug, Clone)]
pub struct LinkModel {
    base_us: f64,
    bytes_per_us: f64,
    samples: u32,
}

impl LinkModel {
    pub fn new(profile: LinkProfile) -> Self {
        LinkModel {
            base_us: profile.base_us,
            bytes_per_us: profile.bytes_per_us.max(0.1),
            samples: 0,
        }
    }

    /// How long `bytes` take on a free way.
    pub fn predict_us(&self, bytes: u64) -> u64 {
        bounded_us(self.base_us + bytes as f64 / self.bytes_per_us)
    }

    /// How long `bytes` keep the way from others.
    pub fn occupied_us(&self, bytes: u64) -> u64 {
        bounded_us(bytes as f64 / self.bytes_per_us)
    }

    /// `bytes` took `measured_us`, calls included. Small ones say nothing of the bandwidth. What was `alone` on its
    /// way from memory to memory shows what that carries, and anything else only what it carries at least.
    pub fn observe(&mut self, bytes: u64, measured_us: u64, alone: bool) {
        const BYTES_MIN: u64 = 64 << 10;
        if bytes < BYTES_MIN || measured_us == 0 {
            return;
        }
        let moving_us = (measured_us as f64 - self.base_us).max(measured_us as f64 / 2.0);
        let sample = (bytes as f64 / moving_us).clamp(0.1, 1e6);
        if !alone && sample <= self.bytes_per_us {
            return;
        }
        self.bytes_per_us *= (sample / self.bytes_per_us).powf(weight(&mut self.samples));
    }

    pub fn bytes_per_us(&self) -> f64 {
        self.bytes_per_us
    }

    /// What it has learned so far.
    pub(crate) fn profile(&self) -> LinkProfile {
        LinkProfile { base_us: self.base_us, bytes_per_us: self.bytes_per_us }
    }

    /// One that has learned this.
    pub(crate) fn learned(profile: LinkProfile) -> Self {
        let LinkProfile { base_us, bytes_per_us } = profile;
        LinkModel { base_us, bytes_per_us, samples: 0 }
    }
}

/// What a [`DecodeModel`] has learned so far.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LearnedDecode {
    pub base_us: f64,
    pub sequence_us: f64,
    pub token_us: f64,
    /// Measured over predicted.
    pub scale: f64,
    pub answer_us: f64,
    pub generated_tokens: f64,
}

/// How long one decode step of an instance takes, how long an answer lasts and how long it is.
#[derive(Debug, Clone)]
pub struct DecodeModel {
    profile: DecodeProfile,
    /// Measured over predicted.
    scale: f64,
    scale_samples: u32,
    answer_us: f64,
    generated_tokens: f64,
    answer_samples: u32,
}

impl DecodeModel {
    pub fn new(profile: DecodeProfile) -> Self {
        let DecodeProfile { answer_us, generated_tokens, .. } = profile;
        DecodeModel {
            profile,
            scale: 1.0,
            scale_samples: 0,
            answer_us,
            generated_tokens,
            answer_samples: 0,
        }
    }

    pub(crate) fn learned(&self) -> LearnedDecode {
        let DecodeProfile { base_us, sequence_us, token_us, .. } = self.profile;
        let DecodeModel { scale, answer_us, generated_tokens, .. } = *self;
        LearnedDecode { base_us, sequence_us, token_us, scale, answer_us, generated_tokens }
    }

    /// One that has learned this.
    pub(crate) fn from_learned(learned: LearnedDecode) -> Self {
        let LearnedDecode { base_us, sequence_us, token_us, scale, answer_us, generated_tokens } =
            learned;
        let profile = DecodeProfile { base_us, sequence_us, token_us, answer_us, generated_tokens };
        DecodeModel { scale, ..DecodeModel::new(profile) }
    }

    /// How many steps it has learned from.
    pub(crate) fn samples(&self) -> u32 {
        self.scale_samples
    }

    /// The time between tokens with `running` sequences of so many cached tokens in all.
    pub fn predict_step_us(&self, running: u32, context_tokens: f64) -> u64 {
        bounded_us(self.scale * self.unscaled(running, context_tokens))
    }

    /// The mean time between tokens was `measured_us` while `running` sequences ran, of so many cached
    /// tokens in all.
    ///
    /// The mean is geometric: a step that took a thousand times as long (a stopped machine) at
    /// most doubles what many have taught, and an estimate that is far too high comes down within
    /// tens of samples; an arithmetic mean needs as many as made it.
    pub fn observe_step(&mut self, running: u32, context_tokens: f64, measured_us: u64) {
        if measured_us > 0 {
            let unscaled = self.unscaled(running, context_tokens).max(1e-3);
            let sample = (measured_us as f64 / unscaled).clamp(1e-3, 1e3);
            self.scale *= (sample / self.scale).powf(weight(&mut self.scale_samples));
        }
    }

    /// How long an answer takes from the hand-over to its end.
    pub fn answer_us(&self) -> u64 {
        bounded_us(self.answer_us)
    }

    /// How many tokens an answer has, in the mean.
    pub fn generated_tokens(&self) -> u32 {
        // `as` turns what is no number into 0.
        self.generated_tokens.round() as u32
    }

    /// One answer took this long and had so many tokens.
    pub fn observe_answer(&mut self, measured_us: u64, tokens: u32) {
        let sample_us = (measured_us as f64).clamp(1.0, ESTIMATE_US_MAX);
        let weight = weight(&mut self.answer_samples);
        self.answer_us += weight * (sample_us - self.answer_us);
        self.generated_tokens += weight * (f64::from(tokens) - self.generated_tokens);
    }

    /// An answer broke off after this long, with so many tokens: it would have been that long at
    /// least. Only one that goes beyond the mean says something, so that clients which go away early
    /// do not make answers seem short; were none to count, answers that all end at a deadline would
    /// teach nothing, and as many would be let in again.
    pub fn observe_broken_off(&mut self, lasted_us: u64, tokens: u32) {
        let (mean_us, mean_tokens) = (self.answer_us(), self.generated_tokens());
        if lasted_us > mean_us || tokens > mean_tokens {
            self.observe_answer(lasted_us.max(mean_us), tokens.max(mean_tokens));
        }
    }

    fn unscaled(&self, running: u32, context_tokens: f64) -> f64 {
        let DecodeProfile { base_us, sequence_us, token_us, .. } = self.profile;
        base_us + sequence_us * f64::from(running.max(1)) + token_us * context_tokens
    }
}

/// The weight of the next sample: a plain mean of the first few, then a slow one.
pub(crate) fn weight(samples: &mut u32) -> f64 {
    const WEIGHT_MIN: f64 = 0.1;
    *samples = samples.saturating_add(1);
    // The profile counts as one sample, so that the first measurement is worth a half.
    (1.0 / f64::from(samples.saturating_add(1))).max(WEIGHT_MIN)
}

fn bounded_us(us: f64) -> u64 {
    // `as` turns what is no number into 0.
    us.clamp(0.0, ESTIMATE_US_MAX) as u64
}
