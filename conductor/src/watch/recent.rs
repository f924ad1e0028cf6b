//! What the recorded decisions of the last minute say together.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::Serialize;

use crate::serve::{Decision, Record};

const WINDOW_MS: u64 = 60_000;

/// Of requests that were decided within the window, as far as they are still recorded.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(super) struct Recent {
    pub window_ms: u64,
    pub requests: u64,
    pub refused: u64,
    /// Plans for callers with a front door of their own, refusals included; they are no requests here.
    pub schedule_calls: u64,
    /// Answered to their end.
    pub answered: u64,
    /// Ended without an answer though they were placed.
    pub failed: u64,
    /// Tokens of answered prompts that were not computed, over all of them.
    pub hit_ratio: Option<f64>,
    pub ttft_p50_ms: Option<f64>,
    pub ttft_p99_ms: Option<f64>,
    pub generated_tokens: u64,
    /// The record is too short for the window: it was full, and its oldest decision is younger.
    pub truncated: bool,
}

/// `records` with the latest first.
pub(super) fn recent(records: &[Arc<Record>], kept: usize, now_unix_ms: u64) -> Recent {
    let since = now_unix_ms.saturating_sub(WINDOW_MS);
    let within = records.iter().take_while(|record| record.at_unix_ms >= since);
    let mut recent = Recent { window_ms: WINDOW_MS, ..Recent::default() };
    let (mut prompt, mut cached, mut ttfts) = (0u64, 0u64, Vec::new());
    let (mut seen, mut looked_at) = (BTreeSet::new(), 0);
    for record in within {
        looked_at += 1;
        if record.asked.is_schedule_only {
            recent.schedule_calls += 1;
            continue;
        }
        // Of several attempts at a request the last one stands for it; several answers to one prompt
        // count as one request.
        let first = seen.insert(Arc::clone(&record.asked.request_id));
        recent.requests += u64::from(first);
        let is_refused = match &record.decision {
            Decision::Refused(_) => true,
            Decision::PassedOn(passed) => passed.forwarded_to.is_none(),
            Decision::Placed(_) => false,
        };
        if is_refused {
            recent.refused += u64::from(first);
            continue;
        }
        if let Some(outcome) = record.outcome() {
            let ok = outcome.result == "ok";
            recent.answered += u64::from(ok);
            recent.failed += u64::from(!ok && first);
            recent.generated_tokens += u64::from(outcome.generated_tokens.unwrap_or(0));
            if let Some(tokens) = outcome.cached_tokens {
                prompt += u64::from(record.asked.prompt_tokens);
                cached += u64::from(tokens);
            }
        }
        if first {
            ttfts.extend(record.ttft_ms());
        }
    }
    recent.truncated = looked_at == kept && kept > 0;
    recent.hit_ratio = (prompt > 0).then(|| cached as f64 / prompt as f64);
    ttfts.sort_by(f64::total_cmp);
    recent.ttft_p50_ms = percentile(&ttfts, 50);
    recent.ttft_p99_ms = percentile(&ttfts, 99);
    recent
}

/// The least value that so many percent do not exceed.
fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_one_of_the_values() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(percentile(&values, 50), Some(100.0));
        assert_eq!(percentile(&values, 99), Some(198.0));
        assert_eq!(percentile(&values[..1], 99), Some(1.0));
        assert_eq!(percentile(&[], 50), None);
    }
}
