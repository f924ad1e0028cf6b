//! A run, or several, as a table, as one JSON object, and as plots.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::plot;
use crate::summary::Summary;

/// As Markdown.
pub fn table(summaries: &[Summary]) -> String {
    let mut text = String::from(
        "| policy | TTFT s: mean | p50 | p90 | p99 | TBT ms: mean | p90 | block hit ratio | prefill GPU s per request | refused |\n\
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
            summary.refused,
        );
    }
    text
}

/// What became of the requests by their objectives, as Markdown; nothing where there were none.
pub fn effects(summaries: &[Summary]) -> String {
    let mut text = String::from(
        "| policy | effective | refused | dropped | missed TTFT | missed TBT | prefill GPU s wasted: all | dropped | missed | useful | \
         prefill load: mean | deviation | TBT prediction: error | bias | TBT attainment: predicted | measured | error |\n\
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
            summary.refused,
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
            effect.attainment_predicted,
            effect.attainment_measured,
            effect.attainment_calibration_error,
        );
    }
    text
}

/// Which nodes have changed what they do, and when; nothing where none could.
pub fn roles(summaries: &[Summary]) -> String {
    let mut text = String::new();
    for summary in summaries {
        let Some(told) = &summary.roles else { continue };
        let _ = write!(text, "{}: {} role changes;", summary.name(), told.changes);
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

/// All runs beside each other, as one SVG: how long they took to the first token and from token to token, what was
/// reused, and where there were objectives what became of the requests and of the prefill.
pub fn plot(summaries: &[Summary]) -> String {
    let curves = |sorted: fn(&Summary) -> &[f64]| -> Vec<plot::Curve<'_>> {
        let curve = |summary| plot::Curve { name: Summary::name(summary), sorted: sorted(summary) };
        summaries.iter().map(curve).collect()
    };
    let bars = |label: &str, of: &dyn Fn(&Summary) -> (f64, String)| {
        let bar = |summary: &Summary| {
            let (value, written) = of(summary);
            (summary.name(), value, written)
        };
        plot::bars(label, &summaries.iter().map(bar).collect::<Vec<_>>())
    };
    let count = |count: usize| (count as f64, count.to_string());
    let mut panels = vec![
        plot::distribution("time to first token, s", &curves(|summary| &summary.ttfts_s)),
        plot::distribution(
            "time between tokens, mean of the longest tenth of each request, s",
            &curves(|summary| &summary.tbts_s),
        ),
        bars("block hit ratio", &|summary| {
            (summary.block_hit_ratio, format!("{:.3}", summary.block_hit_ratio))
        }),
    ];
    if summaries.iter().all(|summary| summary.effect.is_some()) {
        let effect = |summary: &Summary| summary.effect.unwrap_or_default();
        panels.extend([
            bars("requests within their objectives", &|summary| count(effect(summary).effective)),
            bars("requests refused at arrival", &|summary| count(summary.refused)),
            bars("wasted prefill, s of one node", &|summary| {
                let wasted_s = effect(summary).wasted_prefill_gpu_s;
                (wasted_s, format!("{wasted_s:.0}"))
            }),
        ]);
    }
    plot::page(&panels)
}
