//! What a run comes to.

use kvasir_placement::Selection;
use serde::Serialize;

use crate::trace::Trace;

/// What became of one request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Outcome {
    pub(crate) rejected: bool,
    pub(crate) predicted_ttft_us: u64,
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

/// See the module. Times are of requests that were not refused.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    pub policy: &'static str,
    pub requests: usize,
    pub completed: usize,
    pub rejected: usize,
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
    #[serde(skip)]
    pub ttfts_s: Vec<f64>,
}

impl Summary {
    pub(crate) fn new(selection: Selection, trace: &Trace, outcomes: &[Outcome]) -> Self {
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
            policy: selection.name(),
            requests: outcomes.len(),
            completed: outcomes.iter().filter(|o| o.ended_us.is_some()).count(),
            rejected: outcomes.iter().filter(|o| o.rejected).count(),
            ttft_s,
            tbt_s: Spread::of(&tbts_s),
            block_hit_ratio: per(hits as f64, blocks),
            prefill_gpu_s: GpuSeconds { mean: per(gpu_s, done.len()), sum: gpu_s },
            ttft_prediction_error: per(off_s.sum::<f64>(), done.len()) / ttft_s.mean.max(1e-9),
            fetched_bytes: outcomes.iter().map(|o| o.fetched_bytes).sum(),
            duration_s: ended_us.saturating_sub(began_us) as f64 / 1e6,
            ttfts_s,
        }
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
