//! A run, or several, as a table, as one JSON object, and as plots.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::plot;
use crate::summary::Summary;

/// As Markdown.
pub fn table(summaries: &[Summary]) -> String {
    let mut text = String::from(
        "| policy | TTFT s: mean | p50 | p90 | p99 | TBT ms: mean | p90 | block hit ratio | prefill GPU s per request | rejected |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for summary in summaries {
        let (ttft, tbt) = (summary.ttft_s, summary.tbt_s);
        let _ = writeln!(
            text,
            "| {} | {:.3} | {:.3} | {:.2} | {:.2} | {:.0} | {:.0} | {:.3} | {:.3} | {} |",
            summary.policy,
            ttft.mean,
            ttft.p50,
            ttft.p90,
            ttft.p99,
            tbt.mean * 1e3,
            tbt.p90 * 1e3,
            summary.block_hit_ratio,
            summary.prefill_gpu_s.mean,
            summary.rejected,
        );
    }
    text
}

/// One run as an object; of several, an object `policies` with one of each.
pub fn json(summaries: &[Summary]) -> Value {
    match summaries {
        [one] => json!(one),
        several => {
            let named = several.iter().map(|s| (s.policy.to_string(), json!(s)));
            json!({ "policies": named.collect::<serde_json::Map<_, _>>() })
        }
    }
}

/// The distribution of the time to first token, one curve for each run, as SVG.
pub fn ttft_plot(summaries: &[Summary]) -> String {
    let curves: Vec<plot::Curve<'_>> = summaries
        .iter()
        .map(|summary| plot::Curve { name: summary.policy, sorted: &summary.ttfts_s })
        .collect();
    plot::distribution("time to first token, s", &curves)
}
