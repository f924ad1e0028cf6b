//! The state of a cluster as text.

use serde_json::Value;

use super::table::{Align, plain, table};

const HEAD: [(&str, Align); 13] = [
    ("NODE", Align::Left),
    ("ENGINE", Align::Left),
    ("ROLE", Align::Left),
    ("RUNNING", Align::Right),
    ("WAITING", Align::Right),
    ("QUEUE", Align::Right),
    ("FREE", Align::Right),
    ("AVAILABLE", Align::Right),
    ("VRAM", Align::Right),
    ("DRAM", Align::Right),
    ("SSD", Align::Right),
    ("SSD USED", Align::Left),
    ("STATE", Align::Left),
];

const BACKENDS_HEAD: [(&str, Align); 4] = [
    ("BACKEND", Align::Left),
    ("MODEL", Align::Left),
    ("RUNNING", Align::Right),
    ("STATE", Align::Left),
];

/// Totals, then nodes and engines, then servers that requests are passed on to.
pub(super) fn text(state: &Value) -> String {
    let recent = &state["recent"];
    let ready = if state["ready"] == true { "ready" } else { "NOT READY" };
    let window = match recent["truncated"] == true {
        true => "latest decisions".to_owned(),
        false => format!("last {} s", number(&recent["window_ms"], 1e3, 0)),
    };
    let ratio = |value: &Value| {
        value.as_f64().map_or_else(|| "-".to_owned(), |ratio| format!("{:.1} %", ratio * 100.0))
    };
    format!(
        "kvasir {}, up {} s, {ready}, {} answers in flight, {} queued, {} blocks in the index ({} MiB)\n\
         {window}: {} requests, {} refused, {} failed, {} of prompt tokens cached, TTFT p50 {} ms, p99 {} ms\n{}\n{}{}",
        state["version"].as_str().unwrap_or("?"),
        number(&state["uptime_seconds"], 1.0, 0),
        number(&state["choices_in_flight"], 1.0, 0),
        number(&state["choices_queued"], 1.0, 0),
        number(&state["cluster"]["index_entries"], 1.0, 0),
        number(&state["cluster"]["index_bytes"], 1024.0 * 1024.0, 1),
        number(&recent["requests"], 1.0, 0),
        number(&recent["refused"], 1.0, 0),
        number(&recent["failed"], 1.0, 0),
        ratio(&recent["hit_ratio"]),
        number(&recent["ttft_p50_ms"], 1.0, 1),
        number(&recent["ttft_p99_ms"], 1.0, 1),
        balance(&state["cluster"]["balance"]),
        nodes(&state["cluster"]["nodes"]),
        backends(&state["backends"]),
    )
}

/// One line for each model; nothing while no window of loads was seen.
fn balance(models: &Value) -> String {
    let line = |one: &Value| {
        let count = |name: &str| number(&one[name], 1.0, 0);
        format!(
            "{}: {} prefill engines, {} decode, {} both; recommended {}, {}, {}; load {} and {}\n",
            plain(one["model"].as_str().unwrap_or("?")),
            count("prefill_instances"),
            count("decode_instances"),
            count("both_instances"),
            count("prefill_instances_recommended"),
            count("decode_instances_recommended"),
            count("both_instances_recommended"),
            number(&one["prefill_load"], 1.0, 2),
            number(&one["decode_load"], 1.0, 2),
        )
    };
    models.as_array().map(Vec::as_slice).unwrap_or_default().iter().map(line).collect()
}

fn nodes(nodes: &Value) -> String {
    let nodes = nodes.as_array().map(Vec::as_slice).unwrap_or_default();
    let rows: Vec<Vec<String>> = nodes.iter().flat_map(rows).collect();
    table(&HEAD, &rows)
}

/// Nothing where there are none.
fn backends(backends: &Value) -> String {
    let backends = backends.as_array().map(Vec::as_slice).unwrap_or_default();
    let said = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let row = |one: &Value| {
        let state = if one["healthy"] == true { "healthy" } else { "unhealthy" };
        vec![
            said(&one["url"]),
            said(&one["model"]),
            number(&one["running_requests"], 1.0, 0),
            state.to_owned(),
        ]
    };
    match backends {
        [] => String::new(),
        some => {
            let rows: Vec<_> = some.iter().map(row).collect();
            format!("\n{}", table(&BACKENDS_HEAD, &rows))
        }
    }
}

/// One for each engine; one for a node that has none.
fn rows(node: &Value) -> Vec<Vec<String>> {
    let engines = node["instances"].as_array().map(Vec::as_slice).unwrap_or_default();
    match engines {
        [] => vec![row(node, &Value::Null)],
        engines => engines.iter().map(|engine| row(node, engine)).collect(),
    }
}

fn row(node: &Value, engine: &Value) -> Vec<String> {
    let said = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let has = !engine.is_null();
    let of = |left: &Value, right: &Value| match has {
        true => format!("{}/{}", number(left, 1.0, 0), number(right, 1.0, 0)),
        false => "-".to_owned(),
    };
    let state = match () {
        () if node["connected"] != true => "disconnected",
        () if !has => "no engine",
        () if engine["draining"] == true => "draining",
        () if engine["healthy"] == false => "unhealthy",
        () => "serving",
    };
    vec![
        said(if node["node"].is_string() { &node["node"] } else { &node["address"] }),
        said(&engine["instance"]),
        said(&engine["current_role"]),
        of(&engine["running_requests"], &engine["running_requests_max"]),
        number(&engine["waiting_requests"], 1.0, 0),
        match has {
            true => number(&engine["queue_us"], 1e3, 1) + "ms",
            false => "-".to_owned(),
        },
        of(&node["slots_free"], &engine["slots_total"]),
        number(&engine["slots_available"], 1.0, 0),
        number(&node["tiers"]["vram"], 1.0, 0),
        number(&node["tiers"]["dram"], 1.0, 0),
        number(&node["tiers"]["ssd"], 1.0, 0),
        disk(&node["ssd"]),
        state.to_owned(),
    ]
}

fn disk(ssd: &Value) -> String {
    const GIB: f64 = (1u64 << 30) as f64;
    if ssd.is_null() {
        return "-".to_owned();
    }
    let room = format!(
        "{}/{}GiB",
        number(&ssd["used_bytes"], GIB, 1),
        number(&ssd["capacity_bytes"], GIB, 1)
    );
    match ssd["usable"] == true {
        true => room,
        false => format!("{room}, {}", ssd["state"].as_str().unwrap_or("unusable")),
    }
}

/// In units of `unit`.
fn number(value: &Value, unit: f64, digits: usize) -> String {
    value.as_f64().map_or_else(|| "-".to_owned(), |value| format!("{:.digits$}", value / unit))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_node_has_a_line_and_says_what_is_wrong_with_it() {
        let engine = json!({
            "instance": "e", "current_role": "decode", "running_requests": 2, "running_requests_max": 8, "waiting_requests": 1,
            "queue_us": 1_500, "slots_total": 64, "slots_available": 60, "draining": true,
        });
        let state = json!({
            "version": "1", "ready": false, "recent": {"hit_ratio": 0.5, "window_ms": 60_000},
            "cluster": {"balance": [
                {"model": "m", "prefill_instances": 1, "decode_instances": 2, "both_instances": 0, "prefill_instances_recommended": 2,
                 "decode_instances_recommended": 2, "both_instances_recommended": 0, "prefill_load": 1.25, "decode_load": 0.5},
            ], "nodes": [
                {"address": "a:1", "connected": false, "instances": []},
                {"address": "b:1", "node": "b", "connected": true, "slots_free": 3, "blocks": 9,
                 "tiers": {"vram": 123, "dram": 456, "ssd": 789}, "instances": [engine],
                 "ssd": {"usable": false, "state": "full", "used_bytes": 0, "capacity_bytes": 1u64 << 30}},
            ]},
            "backends": [
                {"url": "http://c:1", "model": "other", "healthy": true, "running_requests": 7},
                {"url": "http://d:1", "model": "other", "healthy": false, "running_requests": 0},
            ],
        });
        let text = text(&state);
        assert!(text.contains("NOT READY") && text.contains("50.0 % of prompt tokens"), "{text}");
        let wish =
            "m: 1 prefill engines, 2 decode, 0 both; recommended 2, 2, 0; load 1.25 and 0.50";
        assert!(text.contains(wish), "{text}");
        let line = |name: &str| text.lines().find(|line| line.starts_with(name)).expect("a line");
        assert!(line("a:1").ends_with("disconnected"), "{text}");
        for part in ["2/8", "1.5ms", "3/64", "123", "456", "789", "0.0/1.0GiB, full", "draining"] {
            assert!(line("b ").contains(part), "{part} in {text}");
        }
        assert!(line("http://c:1").ends_with("7  healthy"), "{text}");
        assert!(line("http://d:1").ends_with("0  unhealthy"), "{text}");
    }
}
