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
            summary.name(),
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

/// What became of the requests by their objectives, as Markdown; nothing where there were none.
pub fn effects(summaries: &[Summary]) -> String {
    let mut text = String::from(
        "| policy | effective | refused | dropped | late | slow | prefill GPU s wasted: all | dropped | missed | useful | \
         prefill load: mean | deviation | TBT prediction: error | bias | likely: predicted | measured | error |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for summary in summaries {
        let Some(effect) = summary.effect else { return String::new() };
        let load = summary.prefill_load;
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {:.0} | {:.0} | {:.0} | {:.0} | {:.3} | {:.4} | {:.2} | {:+.2} | {:.3} | {:.3} | {:.3} |",
            summary.name(),
            effect.effective,
            summary.rejected,
            effect.dropped,
            effect.missed_ttft,
            effect.missed_tbt,
            effect.wasted_prefill_gpu_s,
            effect.dropped_prefill_gpu_s,
            effect.missed_prefill_gpu_s,
            effect.useful_prefill_gpu_s,
            load.mean,
            load.deviation,
            effect.tbt_prediction_error,
            effect.tbt_prediction_bias,
            effect.likely_predicted,
            effect.likely_measured,
            effect.likely_error,
        );
    }
    text
}

/// Which nodes have changed what they do, and when; nothing where none could.
pub fn roles(summaries: &[Summary]) -> String {
    let mut text = String::new();
    for summary in summaries {
        let Some(told) = &summary.roles else { continue };
        let _ = write!(text, "{}: {} changes of role;", summary.name(), told.changes);
        for (at_s, prefills, decodes) in &told.steps {
            let _ = write!(text, " {at_s:.0} s: {prefills} + {decodes},");
        }
        text.pop();
        text.push('\n');
    }
    text
}

/// One run as an object; of several, an object `policies` with one of each.
pub fn json(summaries: &[Summary]) -> Value {
    match summaries {
        [one] => json!(one),
        several => {
            let named = several.iter().map(|s| (s.name(), json!(s)));
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
