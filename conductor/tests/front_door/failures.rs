//! Instances that fail: other ones are tried as long as nothing was sent.

use futures::future::join_all;
use kvasir_proto::Side;
use serde_json::json;
use tonic::Code;

use crate::support::{
    Happened, Harness, Leg, Pair, Reply, Response, Role, Script, World, config, shares_aborted,
    shares_asked,
};

const COMPLETIONS: &str = "/v1/completions";

async fn nodes(world: &World, prefills: [Script; 2], decodes: [Script; 2]) -> (Vec<Pair>, Harness) {
    let [p1, p2] = prefills;
    let [d1, d2] = decodes;
    let pairs = vec![
        Pair::start(world, "p1", Role::Prefill, p1).await,
        Pair::start(world, "p2", Role::Prefill, p2).await,
        Pair::start(world, "d1", Role::Decode, d1).await,
        Pair::start(world, "d2", Role::Decode, d2).await,
    ];
    let harness = Harness::start(config(&pairs.iter().collect::<Vec<_>>())).await;
    (pairs, harness)
}

fn body() -> serde_json::Value {
    json!({"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3, "seed": 9})
}

/// Requests at once: what is placed on one instance makes the other one cheaper, so that all are
/// tried, whatever was drawn for equals or learned of who answers.
const AT_ONCE: usize = 6;

/// Whatever one of two prefill and one of two decode instances do wrong, requests are answered,
/// and what the failed attempts held is given back.
async fn check(what: &str, bad_prefill: Script, bad_decode: Script) {
    let restarted = [("p1", bad_prefill.restarted), ("d1", bad_decode.restarted)];
    let scripts = [("p1", &bad_prefill), ("d1", &bad_decode)];
    let bad = scripts.map(|(node, script)| (*script != Script::default()).then_some(node));
    let world = World::default();
    let prefills = [bad_prefill, Script::default()];
    let decodes = [bad_decode, Script::default()];
    let (_pairs, harness) = nodes(&world, prefills, decodes).await;
    // Three attempts are enough for one bad one a side.
    for _ in 0..20 {
        let responses = join_all((0..AT_ONCE).map(|_| harness.ask(COMPLETIONS, body()))).await;
        for response in responses {
            assert_eq!(response.status, 200, "{what}: {response:?}");
            assert_eq!(response.json()["choices"][0]["text"], " s9t0 s9t1 s9t2", "{what}");
        }
        if bad.into_iter().flatten().all(|node| tried(&world, node)) {
            break;
        }
    }
    world
        .until("all shares of failed attempts are aborted", |log| {
            let mut open = shares_asked(log);
            let aborted = shares_aborted(log);
            let answered = |tx: u64| {
                log.iter().any(|happened| match happened {
                    Happened::GenerateOver {
                        tx: at,
                        leg: kvasir_proto::v1::Phase::Decode,
                        finished,
                        ..
                    } => *at == tx && *finished,
                    _ => false,
                })
            };
            open.retain(|share| !answered(share.1) && !aborted.contains(share));
            open.is_empty()
        })
        .await;
    for bad in bad.into_iter().flatten() {
        assert!(tried(&world, bad), "{what}: {bad} was never tried");
    }
    for (bad, _) in restarted.into_iter().filter(|(_, restarted)| *restarted) {
        let served = |h: &Happened| matches!(h, Happened::Generate { node, .. } if *node == bad);
        assert_eq!(world.count(served), 0, "{what}: what its peers were told of it is wrong");
    }
}

fn tried(world: &World, name: &str) -> bool {
    world.count(|h| matches!(h, Happened::Allocate { node, .. } if *node == name)) > 0
}

#[tokio::test]
async fn a_leg_that_fails_before_text_was_sent_is_made_good_elsewhere() {
    let normal = Script::default;
    let prefill = |leg| Script { prefill: leg, ..normal() };
    let decode = |leg| Script { decode: leg, ..normal() };
    check("prefill unavailable", prefill(Leg::Fail(Code::Unavailable)), normal()).await;
    check("prefill ends without a word", prefill(Leg::End), normal()).await;
    check("prefill gone", prefill(Leg::Fail(Code::NotFound)), normal()).await;
    check("decode unavailable", normal(), decode(Leg::Fail(Code::Unavailable))).await;
    check("decode fails later", normal(), decode(Leg::FailAfter(0, Code::Aborted))).await;
    check("decode ends without a word", normal(), decode(Leg::End)).await;
    let both = (prefill(Leg::Fail(Code::Internal)), decode(Leg::Fail(Code::Internal)));
    check("both fail", both.0, both.1).await;
    let allocate = |code| Script { allocate: Reply::Fail(code), ..normal() };
    check("no room to prefill", allocate(Code::ResourceExhausted), normal()).await;
    check("no room to decode", normal(), allocate(Code::ResourceExhausted)).await;
    check("node aborted", allocate(Code::Aborted), normal()).await;
    check("node draining", normal(), allocate(Code::FailedPrecondition)).await;
    let restarted = || Script { restarted: true, ..normal() };
    check("prefill node restarted", restarted(), normal()).await;
    check("decode node restarted", normal(), restarted()).await;
    let wrong = Script { allocate: Reply::Fail(Code::InvalidArgument), ..normal() };
    check("a node's refusal is not the client's fault", wrong, normal()).await;
    let push = Script { push: Reply::Fail(Code::Aborted), ..normal() };
    check("push refused", push, normal()).await;
}

#[tokio::test]
async fn a_node_that_is_dead_is_made_good_elsewhere() {
    let world = World::default();
    let scripts = || [Script::default(), Script::default()];
    let (mut pairs, harness) = nodes(&world, scripts(), scripts()).await;
    drop(pairs.remove(2));
    drop(pairs.remove(0));
    for _ in 0..6 {
        let response = harness.ask(COMPLETIONS, body()).await;
        assert_eq!(response.status, 200, "{response:?}");
    }
}

#[tokio::test]
async fn nobody_with_room_is_429_with_retry_after() {
    let full = || Script { allocate: Reply::Fail(Code::ResourceExhausted), ..Script::default() };
    let world = World::default();
    let (_pairs, harness) = nodes(&world, [full(), full()], [full(), full()]).await;
    let response = harness.ask(COMPLETIONS, body()).await;
    assert_eq!(response.status, 429, "{response:?}");
    let seconds: u64 =
        response.headers["retry-after"].to_str().expect("text").parse().expect("a number");
    assert!(seconds >= 1);
    let error = &response.json()["error"];
    assert_eq!(error["code"], "rate_limit_exceeded");
    assert_eq!(
        (&error["type"], &error["reason"]),
        (&json!("rate_limit_error"), &json!("no_capacity"))
    );
    world.until_all_shares_are_aborted().await;
    let attempts = world.count(|h| matches!(h, Happened::Allocate { node: "p1" | "p2", .. }));
    assert!(attempts <= 3, "{attempts} attempts");
    // Streamed requests get the status too.
    let mut streamed = body();
    streamed["stream"] = true.into();
    assert_eq!(harness.ask(COMPLETIONS, streamed).await.status, 429);
}

#[tokio::test]
async fn all_instances_failing_is_503() {
    let dead = || Script { prefill: Leg::Fail(Code::Unavailable), ..Script::default() };
    let world = World::default();
    let scripts = [Script::default(), Script::default()];
    let (_pairs, harness) = nodes(&world, [dead(), dead()], scripts).await;
    let response = harness.ask(COMPLETIONS, body()).await;
    assert_eq!(response.status, 503, "{response:?}");
    let error = &response.json()["error"];
    assert_eq!(error["code"], "no_instance");
    let message = error["message"].as_str().expect("text");
    assert!(message.contains("engine-p") && message.contains("does not answer"), "{message}");
    assert!(!message.contains("Unavailable") && !message.contains("script"), "{message}");
    world.until_all_shares_are_aborted().await;
}

#[tokio::test]
async fn what_an_engine_calls_wrong_is_400_and_not_tried_again() {
    let strict = || Script { decode: Leg::Fail(Code::InvalidArgument), ..Script::default() };
    let world = World::default();
    let scripts = [Script::default(), Script::default()];
    let (_pairs, harness) = nodes(&world, scripts, [strict(), strict()]).await;
    let response = harness.ask(COMPLETIONS, body()).await;
    assert_eq!(response.status, 400, "{response:?}");
    world.until_all_shares_are_aborted().await;
    assert_eq!(world.count(|h| matches!(h, Happened::Allocate { .. })), 2, "one attempt");
}

#[tokio::test]
async fn after_text_was_sent_a_failure_ends_a_streamed_answer() {
    let broken = || Script { decode: Leg::FailAfter(2, Code::Unavailable), ..Script::default() };
    let world = World::default();
    let scripts = [Script::default(), Script::default()];
    let (_pairs, harness) = nodes(&world, scripts, [broken(), broken()]).await;
    let mut streamed = body();
    streamed["stream"] = true.into();
    let response = harness.ask(COMPLETIONS, streamed).await;
    assert_eq!(response.status, 200);
    let events = response.events();
    let (last, text) = events.split_last().expect("events");
    assert_eq!(last["error"]["code"], "instance_failed");
    let text: String = text.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, " s9t0 s9t1");
    world.until_all_shares_are_aborted().await;
    assert_eq!(world.count(|h| matches!(h, Happened::Allocate { .. })), 2, "one attempt");
    // One that is not streamed is tried elsewhere, and nowhere it comes to its end.
    let response = harness.ask(COMPLETIONS, body()).await;
    assert_eq!(response.status, 503, "{response:?}");
    assert_eq!(response.headers["retry-after"], "1");
    assert!(world.count(|h| matches!(h, Happened::Allocate { .. })) > 4, "further attempts");
}

#[tokio::test]
async fn an_answer_that_is_not_streamed_is_made_anew_when_its_instance_is_lost() {
    for code in [Code::Unavailable, Code::ResourceExhausted, Code::Aborted] {
        let broken = Script { decode: Leg::FailAfter(2, code), ..Script::default() };
        let world = World::default();
        let scripts = [Script::default(), Script::default()];
        let (_pairs, harness) = nodes(&world, scripts, [broken, Script::default()]).await;
        for _ in 0..20 {
            let mut body = body();
            body["logprobs"] = 0.into();
            let asking = (0..AT_ONCE).map(|_| harness.ask(COMPLETIONS, body.clone()));
            for response in join_all(asking).await {
                assert_eq!(response.status, 200, "{code:?} {response:?}");
                let choice = &response.json()["choices"][0];
                assert_eq!(choice["text"], " s9t0 s9t1 s9t2", "{code:?}");
                let tokens = choice["logprobs"]["tokens"].as_array().map(Vec::len);
                assert_eq!(tokens, Some(3), "{code:?}: nothing is there twice");
                assert_eq!(response.json()["usage"]["completion_tokens"], 3, "{code:?}");
            }
            if tried(&world, "d1") {
                break;
            }
        }
        let retries = "kvasir_conductor_retries_total{phase=\"decoding\"}";
        assert!(harness.metric(retries).await >= 1.0, "{code:?}");
        let answers = harness.metric("kvasir_conductor_choices_total{outcome=\"ok\"}").await;
        let first_tokens = harness.metric("kvasir_conductor_ttft_seconds_count").await;
        assert_eq!(first_tokens, answers, "{code:?}: an answer has one first token");
    }
}

#[tokio::test]
async fn no_room_for_the_rest_of_an_answer_is_told_as_such() {
    let full = Script { decode: Leg::FailAfter(2, Code::ResourceExhausted), ..Script::default() };
    let world = World::default();
    let scripts = [Script::default(), Script::default()];
    let (_pairs, harness) = nodes(&world, scripts, [full.clone(), full]).await;
    let response = harness.ask(COMPLETIONS, body()).await;
    assert_eq!(response.status, 429, "{response:?}");
    assert_eq!(response.json()["error"]["code"], "rate_limit_exceeded");
    let seconds: u64 =
        response.headers["retry-after"].to_str().expect("text").parse().expect("a number");
    assert!((1..=60).contains(&seconds), "{seconds}");
    let mut streamed = body();
    streamed["stream"] = true.into();
    let response = harness.ask(COMPLETIONS, streamed).await;
    assert_eq!(response.status, 200);
    let events = response.events();
    let error = &events.last().expect("events")["error"];
    assert_eq!(error["code"], "rate_limit_exceeded", "{error}");
    assert_eq!(error["reason"], "no_capacity", "{error}");
    assert!(
        error["message"].as_str().expect("text").contains("no capacity for the rest of the answer"),
        "{error}"
    );
}

#[tokio::test]
async fn a_node_that_answers_no_renewal_before_the_hand_over_is_made_good_elsewhere() {
    let check = async |bad: &'static str, bad_prefill: Script, bad_decode: Script| {
        let world = World::default();
        let (prefills, decodes) =
            ([bad_prefill, Script::default()], [bad_decode, Script::default()]);
        let pairs = [
            Pair::start(&world, "p1", Role::Prefill, prefills[0].clone()).await,
            Pair::start(&world, "p2", Role::Prefill, prefills[1].clone()).await,
            Pair::start(&world, "d1", Role::Decode, decodes[0].clone()).await,
            Pair::start(&world, "d2", Role::Decode, decodes[1].clone()).await,
        ];
        let mut config = config(&pairs.iter().collect::<Vec<_>>());
        config.lease_ms = 1_000;
        config.request_timeout_ms = 30_000;
        let harness = Harness::start(config).await;
        let responses = join_all((0..AT_ONCE).map(|_| harness.ask(COMPLETIONS, body()))).await;
        for response in responses {
            assert_eq!(response.status, 200, "{bad}: {response:?}");
        }
        assert!(tried(&world, bad), "{bad} was never tried");
        assert!(harness.metric("kvasir_conductor_lease_renewals_failed_total").await >= 1.0);
        let retries = "kvasir_conductor_retries_total{phase=\"prefilling\"}";
        assert!(harness.metric(retries).await >= 1.0, "{bad}");
    };
    let hung = |unrenewed| Script {
        prefill: Leg::Hang,
        decode: Leg::Hang,
        unrenewed: Some(unrenewed),
        ..Script::default()
    };
    let checks = (
        check("p1", hung(Side::Prefill), Script::default()),
        check("d1", Script::default(), hung(Side::Decode)),
    );
    tokio::join!(checks.0, checks.1);
}

#[tokio::test]
async fn leases_are_renewed_until_the_hand_over_and_not_after() {
    let world = World::default();
    let prefill = Script { prefill: Leg::Hold, ..Script::default() };
    let decode = Script { decode: Leg::HangAfter(1), ..Script::default() };
    let prefill = Pair::start(&world, "p", Role::Prefill, prefill).await;
    let decode = Pair::start(&world, "d", Role::Decode, decode).await;
    let mut config = config(&[&prefill, &decode]);
    config.lease_ms = 1_000;
    let harness = Harness::start(config).await;
    let mut streamed = body();
    streamed["stream"] = true.into();
    let open = harness.open(COMPLETIONS, streamed.to_string());
    let release = async {
        for node in ["p", "d"] {
            world
                .until("three renewals on each node", |log| {
                    let of = |h: &&Happened| matches!(h, Happened::Renew { node: at, .. } if *at == node);
                    log.iter().filter(of).count() >= 3
                })
                .await;
        }
        prefill.change(|script| script.prefill = Leg::Do);
    };
    let (response, ()) = tokio::join!(open, release);
    assert_eq!(response.status().as_u16(), 200, "the first token is there");
    let renewals = || world.count(|h| matches!(h, Happened::Renew { .. }));
    // One may have been on its way.
    tokio::time::sleep(std::time::Duration::from_millis(60)).await;
    let before = renewals();
    tokio::time::sleep(std::time::Duration::from_millis(800)).await;
    assert_eq!(renewals(), before);
}

/// A prefill and a decode instance, and the conductor before them.
async fn lone_pair(world: &World, prefill: Script, decode: Script) -> ([Pair; 2], Harness) {
    let pairs = [
        Pair::start(world, "p", Role::Prefill, prefill).await,
        Pair::start(world, "d", Role::Decode, decode).await,
    ];
    let mut config = config(&[&pairs[0], &pairs[1]]);
    config.lease_ms = 1_000;
    (pairs, Harness::start(config).await)
}

const LOSSES: &str = "kvasir_conductor_node_disconnects_total{reason=\"ended\"}";

#[tokio::test]
async fn a_connection_that_breaks_does_not_end_the_service_of_an_only_instance() {
    let world = World::default();
    let (pairs, harness) = lone_pair(&world, Script::default(), Script::default()).await;
    for pair in &pairs {
        pair.change(|script| script.away = true);
    }
    harness.until_metric(LOSSES, |losses| losses >= 2.0).await;
    let response = harness.ask(COMPLETIONS, body()).await;
    assert_eq!(response.status, 200, "its calls go through: {response:?}");
}

#[tokio::test]
async fn a_renewal_that_breaks_with_the_connection_is_made_again() {
    let world = World::default();
    let held = Script { prefill: Leg::Hold, ..Script::default() };
    let (pairs, harness) = lone_pair(&world, held, Script::default()).await;
    let asked = |log: &[Happened]| {
        log.iter().filter(|h| matches!(h, Happened::Renew { node: "p", .. })).count()
    };
    let breaking = async {
        let generating = |h: &Happened| matches!(h, Happened::Generate { node: "p", .. });
        world.until("the prefill", |log| log.iter().any(generating)).await;
        pairs[0].change(|script| script.away = true);
        harness.until_metric(LOSSES, |losses| losses >= 1.0).await;
        pairs[0].change(|script| script.renewals = vec![Reply::Fail(Code::Unavailable)]);
        let before = asked(&world.log());
        world.until("one that fails and one more", |log| asked(log) >= before + 2).await;
        pairs[0].change(|script| script.prefill = Leg::Do);
    };
    let (response, ()) = tokio::join!(harness.ask(COMPLETIONS, body()), breaking);
    assert_eq!(response.status, 200, "{response:?}");
    assert_eq!(harness.metric("kvasir_conductor_lease_renewals_failed_total").await, 0.0);
    assert_eq!(world.count(|h| matches!(h, Happened::Allocate { .. })), 2, "one attempt");
}

#[tokio::test]
async fn an_only_instance_that_broke_off_is_tried_again_once_it_is_back() {
    let world = World::default();
    let held = Script { prefill: Leg::Hold, ..Script::default() };
    let (pairs, harness) = lone_pair(&world, held, Script::default()).await;
    let breaking = async {
        let generating = |h: &Happened| matches!(h, Happened::Generate { node: "p", .. });
        world.until("the prefill", |log| log.iter().any(generating)).await;
        pairs[0].change(|script| script.away = true);
        harness.until_metric(LOSSES, |losses| losses >= 1.0).await;
        pairs[0].change(|script| script.prefill = Leg::Fail(Code::Unavailable));
        let over = |h: &Happened| matches!(h, Happened::Abort { node: "p", .. });
        world.until("the first attempt's end", |log| log.iter().any(over)).await;
        pairs[0].change(|script| (script.prefill, script.away) = (Leg::Do, false));
    };
    let (response, ()) = tokio::join!(harness.ask(COMPLETIONS, body()), breaking);
    assert_eq!(response.status, 200, "{response:?}");
}

#[tokio::test]
async fn one_renewal_that_hangs_does_not_use_up_the_lease() {
    let world = World::default();
    let renewals = vec![Reply::Hang];
    let prefill = Script { prefill: Leg::Hold, renewals, ..Script::default() };
    let prefill = Pair::start(&world, "p", Role::Prefill, prefill).await;
    let decode = Pair::start(&world, "d", Role::Decode, Script::default()).await;
    let mut config = config(&[&prefill, &decode]);
    config.lease_ms = 1_500;
    let harness = Harness::start(config).await;
    let release = async {
        let asked = |h: &&Happened| matches!(h, Happened::Renew { node: "p", .. });
        world.until("more renewals", |log| log.iter().filter(asked).count() >= 3).await;
        prefill.change(|script| script.prefill = Leg::Do);
    };
    let (response, ()) = tokio::join!(harness.ask(COMPLETIONS, body()), release);
    assert_eq!(response.status, 200, "{response:?}");
    assert_eq!(world.count(|h| matches!(h, Happened::RanOut { .. })), 0, "{:#?}", world.log());
}

#[tokio::test]
async fn who_only_said_no_is_tried_again_when_there_is_nobody_else() {
    let check = async |prefill: Leg, decode: Leg, status: u16| {
        let world = World::default();
        let pairs = [
            Pair::start(&world, "p", Role::Prefill, Script { prefill, ..Script::default() }).await,
            Pair::start(&world, "d", Role::Decode, Script { decode, ..Script::default() }).await,
        ];
        let harness = Harness::start(config(&[&pairs[0], &pairs[1]])).await;
        let response = harness.ask(COMPLETIONS, body()).await;
        assert_eq!(response.status, status, "{prefill:?} {decode:?} {response:?}");
    };
    check(Leg::FailFirst(Code::Aborted), Leg::Do, 200).await;
    check(Leg::Do, Leg::FailFirst(Code::AlreadyExists), 200).await;
    // Who broke off is tried once more.
    check(Leg::Do, Leg::FailFirst(Code::Unavailable), 200).await;
    check(Leg::Do, Leg::Fail(Code::Unavailable), 503).await;
    check(Leg::Fail(Code::Aborted), Leg::Do, 503).await;
}

#[tokio::test]
async fn an_instance_counts_as_failed_until_its_next_first_token() {
    let check = async |decode: Leg, want: f64| {
        let world = World::default();
        let script = Script { decode, ..Script::default() };
        let (_pairs, harness) = lone_pair(&world, Script::default(), script).await;
        harness.ask(COMPLETIONS, body()).await;
        let failed = harness.metric("kvasir_conductor_instances_unhealthy").await;
        assert_eq!(failed, want, "{decode:?}");
    };
    check(Leg::Do, 0.0).await;
    check(Leg::Fail(Code::Unavailable), 1.0).await;
    check(Leg::FailFirst(Code::Unavailable), 0.0).await;
}

#[tokio::test]
async fn a_failed_instance_is_not_counted_after_its_node_has_left() {
    let world = World::default();
    let script = Script { decode: Leg::Fail(Code::Unavailable), ..Script::default() };
    let (pairs, harness) = lone_pair(&world, Script::default(), script).await;
    harness.ask(COMPLETIONS, body()).await;
    assert_eq!(harness.metric("kvasir_conductor_instances_unhealthy").await, 1.0);
    pairs[1].change(|script| script.away = true);
    harness.until_metric("kvasir_conductor_instances_unhealthy", |count| count == 0.0).await;
    assert_eq!(harness.metric("kvasir_conductor_instances").await, 1.0);
}

#[tokio::test]
async fn who_only_said_no_is_tried_again_when_the_others_have_no_room() {
    let world = World::default();
    let refuses = Script { decode: Leg::FailFirst(Code::Aborted), ..Script::default() };
    let full = Script { full: true, ..Script::default() };
    let prefills = [Script::default(), Script::default()];
    let (_pairs, harness) = nodes(&world, prefills, [refuses, full]).await;
    let response = harness.ask(COMPLETIONS, body()).await;
    assert_eq!(response.status, 200, "{response:?}");
    let tried = world.count(|h| matches!(h, Happened::Allocate { node: "d1", .. }));
    assert_eq!(tried, 2, "{:#?}", world.log());
}

#[tokio::test]
async fn a_node_that_misses_an_abort_is_told_again() {
    let world = World::default();
    let decode =
        Script { decode: Leg::Fail(Code::InvalidArgument), aborts_to_fail: 2, ..Script::default() };
    let pairs = [
        Pair::start(&world, "p", Role::Prefill, Script::default()).await,
        Pair::start(&world, "d", Role::Decode, decode).await,
    ];
    let harness = Harness::start(config(&[&pairs[0], &pairs[1]])).await;
    assert_eq!(harness.ask(COMPLETIONS, body()).await.status, 400);
    world.until_all_shares_are_aborted().await;
    let told = "kvasir_conductor_abort_calls_total{outcome=\"confirmed\"}";
    harness.until_metric(told, |count| count >= 2.0).await;
    assert_eq!(harness.metric("kvasir_conductor_abort_calls_in_flight").await, 0.0);
}

#[tokio::test]
async fn another_attempt_has_the_keys_of_the_model_as_it_is_then() {
    let world = World::default();
    let script = Script { decode: Leg::Hold, ..Script::default() };
    let pair = Pair::start(&world, "b", Role::Both, script).await;
    let harness = Harness::start(config(&[&pair])).await;
    let prompt: Vec<u32> = (0..40).collect();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 2});
    let asking = harness.ask(COMPLETIONS, body);
    let replacing = async {
        let generating = |h: &Happened| matches!(h, Happened::Generate { .. });
        world.until("the first attempt", |log| log.iter().any(generating)).await;
        pair.change(|script| (script.fingerprint, script.context_tokens) = (8, 256));
        let replaced = |models: &Response| models.json()["data"][0]["max_model_len"] == 256;
        harness.until("/v1/models", replaced).await;
        pair.change(|script| script.decode = Leg::FailAfter(0, Code::Aborted));
    };
    let (response, ()) = tokio::join!(asking, replacing);
    assert_eq!(response.status, 503, "{response:?}");
    let keys: Vec<Vec<u8>> = world
        .log()
        .into_iter()
        .filter_map(|happened| match happened {
            Happened::Allocate { request, .. } => Some(request.keys),
            _ => None,
        })
        .collect();
    assert_eq!(keys[0], crate::support::prompt_keys(&prompt));
    assert!(keys.len() > 1 && keys[1].len() == keys[0].len());
    assert_ne!(keys[1], keys[0], "blocks of two models must never share a key");
}
