//! What a request's headers ask for: objectives of its own, the trace that it belongs to, and what
//! becomes of its blocks.

use kvasir_proto::{Side, v1};
use serde_json::json;

use crate::support::{Happened, Harness, Leg, Pair, Response, Role, Script, World, config};

async fn cluster() -> (World, Vec<Pair>, Harness) {
    let world = World::default();
    let pairs = vec![
        Pair::start(&world, "p", Role::Prefill, Script::default()).await,
        Pair::start(&world, "d", Role::Decode, Script::default()).await,
    ];
    let config = kvasir_conductor::Config {
        request_timeout_ms: 90_000,
        ttft_objective_max_ms: Some(90_000),
        tbt_objective_max_ms: Some(60_000),
        tbt_objective_min_ms: 2,
        ..config(&[&pairs[0], &pairs[1]])
    };
    let harness = Harness::start(config).await;
    (world, pairs, harness)
}

async fn ask(harness: &Harness, headers: &[(&str, &str)]) -> Response {
    let body = json!({"model": "tiny", "prompt": vec![1; 200], "max_tokens": 2});
    let mut request = harness.client.post(format!("{}/v1/completions", harness.url));
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    Response::read(request.body(body.to_string()).send().await.expect("an answer")).await
}

#[tokio::test]
async fn a_request_may_have_objectives_of_its_own_within_bounds() {
    let (world, pairs, harness) = cluster().await;
    const TTFT: &str = "x-llm-d-slo-ttft-ms";
    const TPOT: &str = "x-llm-d-slo-tpot-ms";
    assert_eq!(ask(&harness, &[(TTFT, "90000"), (TPOT, "60000")]).await.status, 200);
    // An idle cluster refuses nobody: there is no better place or time.
    pairs[0].change(|script| script.prefill = Leg::Hold);
    let held = harness.client.post(format!("{}/v1/completions", harness.url));
    let held = held.body(json!({"model": "tiny", "prompt": [1], "max_tokens": 2}).to_string());
    let held = tokio::spawn(held.send());
    let generating = |h: &Happened| matches!(h, Happened::Generate { .. });
    world
        .until("the held legs begin", |log| log.iter().filter(|h| generating(h)).count() == 4)
        .await;
    let reserved = || world.count(|happened| matches!(happened, Happened::Allocate { .. }));
    let before = reserved();
    // A step is predicted to take longer: the profile says so.
    let refused = ask(&harness, &[(TPOT, "2")]).await;
    assert_eq!(refused.status, 429, "{refused:?}");
    assert!(refused.text.contains("can meet the TBT objective"), "{refused:?}");
    assert_eq!(refused.json()["error"]["reason"], "tbt");
    assert!(refused.headers.contains_key("retry-after"), "{refused:?}");
    for (name, value) in [
        (TTFT, "0"),
        (TTFT, "90001"),
        (TTFT, "-1"),
        (TTFT, "1.5"),
        (TTFT, "soon"),
        (TTFT, ""),
        (TPOT, "1"),
        (TPOT, "60001"),
        (TPOT, "99999999999999999999"),
    ] {
        let refused = ask(&harness, &[(name, value)]).await;
        assert_eq!(refused.status, 400, "{name}: {value}: {refused:?}");
        assert_eq!(refused.json()["error"]["param"], name);
    }
    assert_eq!(reserved(), before, "nothing was reserved for any of them");
    pairs[0].change(|script| script.prefill = Leg::Do);
    let held = held.await.expect("no panic").expect("an answer");
    assert_eq!(held.status().as_u16(), 200);
}

#[tokio::test]
async fn a_trace_is_passed_on_to_both_legs_with_a_span_for_each() {
    let (world, _pairs, harness) = cluster().await;
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let parent = format!("00-{trace}-00f067aa0ba902b7-01");
    assert_eq!(ask(&harness, &[("traceparent", &parent)]).await.status, 200);
    let legs = |world: &World| -> Vec<Option<String>> {
        let leg = |happened| match happened {
            Happened::Generate { traceparent, .. } => Some(traceparent),
            _ => None,
        };
        world.log().into_iter().filter_map(leg).collect()
    };
    let named: Vec<String> = legs(&world).into_iter().map(|leg| leg.expect("a trace")).collect();
    assert_eq!(named.len(), 2);
    for leg in &named {
        assert!(leg.starts_with(&format!("00-{trace}-")) && leg.ends_with("-01"), "{leg}");
        assert_ne!(*leg, parent, "the caller's span is not the leg's");
    }
    assert_ne!(named[0], named[1]);
    for other in ["nonsense", ""] {
        assert_eq!(ask(&harness, &[("traceparent", other)]).await.status, 200);
    }
    assert_eq!(legs(&world)[2..], [None, None, None, None]);
}

/// The sides of the only transaction, with the class that each node was told.
fn classes(world: &World) -> Vec<(Side, v1::CacheClass)> {
    let allocation = |happened| match happened {
        Happened::Allocate { request, .. } => {
            Some((Side::from_wire(request.side).expect("a side"), request.cache_class()))
        }
        _ => None,
    };
    let mut classes: Vec<_> = world.log().into_iter().filter_map(allocation).collect();
    classes.sort();
    classes
}

#[tokio::test]
async fn a_request_says_whether_its_blocks_are_kept_and_both_nodes_hear_of_it() {
    const CACHE: &str = "x-kvasir-cache-class";
    use v1::CacheClass::{Ephemeral, Normal};
    for (headers, want) in [
        (&[][..], Normal),
        (&[(CACHE, "normal")][..], Normal),
        (&[(CACHE, "ephemeral")][..], Ephemeral),
    ] {
        let (world, _pairs, harness) = cluster().await;
        assert_eq!(ask(&harness, headers).await.status, 200);
        assert_eq!(classes(&world), [(Side::Prefill, want), (Side::Decode, want)]);
    }
    let (world, _pairs, harness) = cluster().await;
    for wrong in ["", "context", "Ephemeral", "ephemeral, normal"] {
        let refused = ask(&harness, &[(CACHE, wrong)]).await;
        assert_eq!(refused.status, 400, "{wrong:?}: {refused:?}");
        let error = &refused.json()["error"];
        assert_eq!(error["param"], CACHE);
        assert_eq!(error["message"], "`x-kvasir-cache-class` must be `normal` or `ephemeral`.");
    }
    assert_eq!(classes(&world), [], "nothing was reserved for any of them");
}
