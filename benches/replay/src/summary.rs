//! What a run comes to.

use kvasir_placement::Objectives;
use serde::Serialize;

use crate::colocated::Chunks;
use crate::roles::RolesTold;
use crate::sim::Options;
use crate::trace::Trace;

/// What became of one request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Outcome {
    /// Refused when it came.
    pub(crate) refused: bool,
    /// Refused when its prefill had ended.
    pub(crate) dropped: bool,
    pub(crate) predicted_ttft_us: u64,
    pub(crate) predicted_tbt_us: u64,
    /// How likely it was to meet the objective between tokens.
    pub(crate) likely: Option<f64>,
    pub(crate) ttft_us: Option<u64>,
    pub(crate) tbt_us: u64,
    pub(crate) prefill_us: u64,
    pub(crate) hit_blocks: u32,
    pub(crate) fetched_bytes: u64,
    pub(crate) ended_us: Option<u64>,
}

/// A distribution, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Spread {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
}

/// Seconds of one node's time.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct GpuSeconds {
    /// For each request.
    pub mean: f64,
    /// All of it.
    pub sum: f64,
}

/// What became of the requests by their objectives.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Effect {
    /// How the decode side's load was looked at.
    pub admission: &'static str,
    /// Requests that met both objectives.
    pub effective: usize,
    /// Refused when their prefill had ended.
    pub dropped: usize,
    pub missed_ttft: usize,
    pub missed_tbt: usize,
    /// Of requests that met both objectives.
    pub useful_prefill_gpu_s: f64,
    pub dropped_prefill_gpu_s: f64,
    pub missed_prefill_gpu_s: f64,
    /// Of the two before: all that was of no use.
    pub wasted_prefill_gpu_s: f64,
    /// Of time between tokens, of those that were answered: the mean of what its prediction was
    /// off, and of how much too high it was, over the mean.
    pub tbt_prediction_error: f64,
    pub tbt_prediction_bias: f64,
    /// Of those that were let in by how likely they were in time between tokens: how likely that was in
    /// the mean, and the share that was.
    pub attainment_predicted: f64,
    pub attainment_measured: f64,
    /// In ten groups of equal size by how likely they were: the mean of what a group's share was off.
    pub attainment_calibration_error: f64,
}

/// Busy share of the nodes that prefill, by whole minutes from the second on to the one before the last
/// arrival.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct PrefillLoad {
    pub mean: f64,
    /// The standard deviation of the minutes' means.
    pub deviation: f64,
}

/// See the module. Times are of requests whose prefill was not refused.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    pub policy: &'static str,
    /// Where every node prefills and decodes: see [`crate::colocated`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub colocated: Option<Chunks>,
    pub requests: usize,
    pub completed: usize,
    pub refused: usize,
    pub ttft_s: Spread,
    /// Time between tokens: of each request the mean of its longest tenth of intervals.
    pub tbt_s: Spread,
    /// Blocks of prompts that were not computed, of all blocks of prompts.
    pub block_hit_ratio: f64,
    pub prefill_gpu_s: GpuSeconds,
    /// Of each request's predicted time to first token: the mean of what it was off, over the mean
    /// time to first token.
    pub ttft_prediction_error: f64,
    pub fetched_bytes: u64,
    pub duration_s: f64,
    pub prefill_load: PrefillLoad,
    /// Where there are objectives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<Effect>,
    /// Where nodes change what they do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roles: Option<RolesTold>,
    #[serde(skip)]
    pub ttfts_s: Vec<f64>,
    #[serde(skip)]
    pub tbts_s: Vec<f64>,
}

impl Summary {
    pub(crate) fn new(
        options: Options,
        trace: &Trace,
        outcomes: &[Outcome],
        prefill_load: PrefillLoad,
    ) -> Self {
        let done: Vec<_> =
            trace.requests.iter().zip(outcomes).filter(|(_, o)| o.ttft_us.is_some()).collect();
        let ttfts_s: Vec<f64> = sorted(done.iter().filter_map(|(_, o)| o.ttft_us));
        let tbts_s = sorted(done.iter().map(|(_, o)| o.tbt_us).filter(|us| *us > 0));
        let blocks: usize = done.iter().map(|(r, _)| r.keys.len()).sum();
        let hits: u64 = done.iter().map(|(_, o)| u64::from(o.hit_blocks)).sum();
        let gpu_s = done.iter().map(|(_, o)| o.prefill_us as f64 / 1e6).sum::<f64>();
        let off_s = done.iter().map(|(_, o)| {
            o.ttft_us.map_or(0, |ttft_us| ttft_us.abs_diff(o.predicted_ttft_us)) as f64 / 1e6
        });
        let ended_us = outcomes.iter().filter_map(|o| o.ended_us).max().unwrap_or(0);
        let began_us = trace.requests.first().map_or(0, |r| r.arrival_us);
        let per = |sum: f64, count: usize| if count == 0 { 0.0 } else { sum / count as f64 };
        let ttft_s = Spread::of(&ttfts_s);
        Summary {
            policy: options.selection.name(),
            colocated: None,
            requests: outcomes.len(),
            completed: outcomes.iter().filter(|o| o.ended_us.is_some()).count(),
            refused: outcomes.iter().filter(|o| o.refused).count(),
            ttft_s,
            tbt_s: Spread::of(&tbts_s),
            block_hit_ratio: per(hits as f64, blocks),
            prefill_gpu_s: GpuSeconds { mean: per(gpu_s, done.len()), sum: gpu_s },
            ttft_prediction_error: per(off_s.sum::<f64>(), done.len()) / ttft_s.mean.max(1e-9),
            fetched_bytes: outcomes.iter().map(|o| o.fetched_bytes).sum(),
            duration_s: ended_us.saturating_sub(began_us) as f64 / 1e6,
            prefill_load,
            effect: (options.objectives != Objectives::NONE)
                .then(|| Effect::new(options, outcomes)),
            roles: None,
            ttfts_s,
            tbts_s,
        }
    }

    /// What it is called beside others.
    pub fn name(&self) -> String {
        match (self.colocated, self.effect) {
            (Some(Chunks::Whole), _) => format!("{}/colocated", self.policy),
            (Some(Chunks::Tokens(tokens)), _) => format!("{}/colocated-{tokens}", self.policy),
            (None, Some(effect)) => format!("{}/{}", self.policy, effect.admission),
            (None, None) => self.policy.to_owned(),
        }
    }
}

impl Effect {
    fn new(options: Options, outcomes: &[Outcome]) -> Effect {
        let Objectives { ttft_us, tbt_us } = options.objectives;
        let answered = || outcomes.iter().filter(|o| o.ended_us.is_some() && !o.dropped);
        let late = |o: &Outcome| o.ttft_us.is_some_and(|us| us > ttft_us);
        let slow = |o: &Outcome| o.tbt_us > tbt_us;
        let gpu_s = |of: &dyn Fn(&Outcome) -> bool| {
            outcomes.iter().filter(|o| of(o)).fold(0.0, |sum, o| sum + o.prefill_us as f64 / 1e6)
        };
        let useful_prefill_gpu_s =
            gpu_s(&|o| o.ended_us.is_some() && !o.dropped && !late(o) && !slow(o));
        let dropped_prefill_gpu_s = gpu_s(&|o| o.dropped);
        let wasted_prefill_gpu_s = gpu_s(&|_| true) - useful_prefill_gpu_s;
        let paced = || answered().filter(|o| o.tbt_us > 0);
        let sum_us: f64 = paced().map(|o| o.tbt_us as f64).sum();
        let off_us = |o: &Outcome| o.predicted_tbt_us as f64 - o.tbt_us as f64;
        let over = |sum: f64, of: f64| if of > 0.0 { sum / of } else { 0.0 };
        let mut likely: Vec<(f64, bool)> =
            paced().filter_map(|o| Some((o.likely?, !slow(o)))).collect();
        likely.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (attainment_predicted, attainment_measured) = means(&likely);
        let groups = likely.chunks(likely.len().div_ceil(10).max(1));
        let off = groups.clone().map(|group| {
            let (predicted, measured) = means(group);
            (predicted - measured).abs()
        });
        Effect {
            admission: options.admission.name(),
            effective: answered().filter(|o| !late(o) && !slow(o)).count(),
            dropped: outcomes.iter().filter(|o| o.dropped).count(),
            missed_ttft: answered().filter(|o| late(o)).count(),
            missed_tbt: answered().filter(|o| slow(o)).count(),
            useful_prefill_gpu_s,
            dropped_prefill_gpu_s,
            missed_prefill_gpu_s: wasted_prefill_gpu_s - dropped_prefill_gpu_s,
            wasted_prefill_gpu_s,
            tbt_prediction_error: over(paced().map(|o| off_us(o).abs()).sum(), sum_us),
            tbt_prediction_bias: over(paced().map(off_us).sum(), sum_us),
            attainment_predicted,
            attainment_measured,
            attainment_calibration_error: over(off.sum(), groups.len() as f64),
        }
    }
}

/// Of how likely it was, and of what came of it.
fn means(likely: &[(f64, bool)]) -> (f64, f64) {
    let count = likely.len().max(1) as f64;
    let predicted = likely.iter().fold(0.0, |sum, (likely, _)| sum + likely);
    let measured = likely.iter().filter(|(_, in_time)| *in_time).count() as f64;
    (predicted / count, measured / count)
}

impl PrefillLoad {
    /// From what the nodes worked together in each minute.
    pub(crate) fn new(busy_us: &[u64], nodes: usize, minute_us: u64) -> PrefillLoad {
        let all_us = (nodes as u64 * minute_us).max(1) as f64;
        let shares: Vec<f64> = busy_us.iter().map(|us| *us as f64 / all_us).collect();
        let count = shares.len().max(1) as f64;
        let mean = shares.iter().sum::<f64>() / count;
        let variance = shares.iter().map(|share| (share - mean).powi(2)).sum::<f64>() / count;
        PrefillLoad { mean, deviation: variance.sqrt() }
    }
}

impl Spread {
    /// Of values in rising order.
    fn of(sorted: &[f64]) -> Spread {
        let Some(last) = sorted.len().checked_sub(1) else { return Spread::default() };
        let at = |share: f64| sorted[(last as f64 * share).round() as usize];
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        Spread { mean, p50: at(0.5), p90: at(0.9), p99: at(0.99) }
    }
}

/// Microseconds as seconds, in rising order.
fn sorted(us: impl Iterator<Item = u64>) -> Vec<f64> {
    let mut seconds: Vec<f64> = us.map(|us| us as f64 / 1e6).collect();
    seconds.sort_by(f64::total_cmp);
    seconds
}
