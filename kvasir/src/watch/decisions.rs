//! Decisions as text.

use serde_json::Value;

use super::table::{Align, plain, table};

const HEAD: [(&str, Align); 10] = [
    ("AGO", Align::Right),
    ("REQUEST", Align::Left),
    ("PROMPT", Align::Right),
    ("REUSED", Align::Right),
    ("PREFILL", Align::Left),
    ("DECODE", Align::Left),
    ("PREDICTED", Align::Right),
    ("TTFT", Align::Right),
    ("OUTCOME", Align::Left),
    ("REASON", Align::Left),
];

/// A line each.
pub(super) fn list(decisions: &[Value]) -> String {
    let now = decisions.iter().filter_map(|one| one["at_unix_ms"].as_u64()).max().unwrap_or(0);
    let rows: Vec<Vec<String>> = decisions.iter().map(|one| row(one, now)).collect();
    table(&HEAD, &rows)
}

fn row(one: &Value, latest: u64) -> Vec<String> {
    let at = one["at_unix_ms"].as_u64().unwrap_or(latest);
    let refused = one["refused"].as_str();
    let why = refused.or(one["cache_summary"].as_str()).or(one["message"].as_str()).unwrap_or("");
    let forwarded_to = &one["forwarded_to"];
    let prefill = if forwarded_to.is_string() { forwarded_to } else { &one["prefill"] };
    vec![
        format!("{:.1}s", latest.saturating_sub(at) as f64 / 1e3),
        word(&one["request_id"]),
        number(&one["prompt_tokens"]),
        number(&one["reused_tokens"]),
        word(prefill),
        word(&one["decode"]),
        milliseconds(&one["predicted_ttft_ms"]),
        milliseconds(&one["ttft_ms"]),
        outcome(one),
        why.to_owned(),
    ]
}

/// Each with all that is known of it, in the order in which they were taken.
pub(super) fn whole(decisions: &[Value]) -> String {
    let several = decisions.len() > 1;
    let one = |(at, decision): (usize, &Value)| {
        let attempt = if several { format!(", decision {}", at + 1) } else { String::new() };
        let mut text = format!(
            "request {}{attempt}: {} tokens for {}{}\n",
            word(&decision["request_id"]),
            number(&decision["prompt_tokens"]),
            word(&decision["model"]),
            if decision["cache_class"] == "ephemeral" { ", ephemeral" } else { "" },
        );
        match decision["refused"].as_str() {
            // The text ends with it.
            Some(_) if decision["text"].is_string() => {}
            Some(why) => text += &format!("refused: {}\n", plain(why)),
            None if decision["backend_choice"].is_object() => {}
            None => {
                let cache = decision["placement"]["cache_summary"].as_str().unwrap_or_default();
                text += &format!("cache: {}\n", plain(cache));
            }
        }
        for line in decision["text"].as_str().unwrap_or_default().lines() {
            text += &format!("  {}\n", plain(line));
        }
        let came = &decision["outcome"];
        text += &format!("outcome: {}", plain(&outcome(decision)));
        if let Some(after) = came["duration_ms"].as_u64() {
            text += &format!(" after {after} ms");
        }
        if let Some(ttft) = decision["ttft_ms"].as_f64() {
            let predicted = decision["placement"]["predicted_ttft_us"].as_f64();
            let predicted = predicted.map(|us| format!(", predicted {:.1} ms", us / 1e3));
            text += &format!("; first token after {ttft:.1} ms{}", predicted.unwrap_or_default());
        }
        if let Some(tbt_us) = came["tbt_us"].as_f64() {
            let predicted = decision["placement"]["predicted_tbt_us"].as_f64();
            let predicted = predicted.map(|us| format!(", predicted {:.1} ms", us / 1e3));
            let predicted = predicted.unwrap_or_default();
            text += &format!("; time between tokens {:.1} ms{predicted}", tbt_us / 1e3);
        }
        if let (Some(cached), Some(answer)) =
            (came["cached_tokens"].as_u64(), came["generated_tokens"].as_u64())
        {
            text += &format!("; {cached} cached tokens, {answer} generated tokens");
        }
        text + "\n"
    };
    decisions.iter().enumerate().map(one).collect::<Vec<_>>().join("\n")
}

fn outcome(one: &Value) -> String {
    if one["refused"].is_string() {
        return "refused".to_owned();
    }
    let how = if one["is_schedule_only"] == true { "scheduled" } else { "running" };
    one["outcome"]["result"].as_str().unwrap_or(how).to_owned()
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| "-".to_owned(), plain)
}

fn number(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".to_owned(), |number| number.to_string())
}

fn milliseconds(value: &Value) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1}ms"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_decision_says_why_and_what_came_of_it() {
        let decision = json!({
            "at_unix_ms": 5, "request_id": "abc", "model": "m", "prompt_tokens": 130, "ttft_ms": 12.5,
            "outcome": {"result": "ok", "duration_ms": 40, "cached_tokens": 64, "generated_tokens": 7, "tbt_us": 2_500},
            "placement": {"cache_summary": "1 blocks are reused", "predicted_ttft_us": 11_000, "predicted_tbt_us": 2_400},
            "text": "prompt of 130 tokens\nsplit p -> d",
        });
        assert_eq!(
            whole(&[decision]),
            "request abc: 130 tokens for m\ncache: 1 blocks are reused\n  prompt of 130 tokens\n  \
             split p -> d\noutcome: ok after 40 ms; first token after 12.5 ms, predicted 11.0 ms; \
             time between tokens 2.5 ms, predicted 2.4 ms; 64 cached tokens, 7 generated tokens\n"
        );
        let refused =
            json!({"request_id": "x", "model": "m", "prompt_tokens": 1, "refused": "no room"});
        assert!(
            whole(std::slice::from_ref(&refused)).contains("refused: no room\noutcome: refused\n")
        );
        assert!(list(&[refused]).contains("no room"));
        let refused = json!({
            "request_id": "x", "model": "m", "prompt_tokens": 1, "refused": "no room",
            "text": "prefill p@n: no room\nrefused: no room",
        });
        assert_eq!(
            whole(&[refused]),
            "request x: 1 tokens for m\n  prefill p@n: no room\n  refused: no room\noutcome: refused\n"
        );
        let passed = json!({
            "request_id": "x", "model": "m", "prompt_tokens": 9, "backend_choice": {},
            "text": "passed on to http://a: reason", "outcome": {"result": "ok", "duration_ms": 3},
        });
        assert_eq!(
            whole(&[passed]),
            "request x: 9 tokens for m\n  passed on to http://a: reason\noutcome: ok after 3 ms\n"
        );
        let passed =
            json!({"request_id": "x", "forwarded_to": "http://a", "message": "for its key"});
        let line = list(&[passed]);
        assert!(line.contains("http://a") && line.contains("for its key"), "{line}");
        let plan = json!({"request_id": "x", "is_schedule_only": true, "text": "split p -> d"});
        assert!(whole(&[plan]).ends_with("outcome: scheduled\n"));
        let ephemeral = json!({
            "request_id": "x", "model": "m", "prompt_tokens": 7, "cache_class": "ephemeral",
        });
        assert!(whole(&[ephemeral]).starts_with("request x: 7 tokens for m, ephemeral\n"));
    }
}
