//! Blocks that another node holds are brought to the prefill side; a source that fails costs
//! nothing but time.

use serde_json::json;
use tonic::Code;

use crate::support::{
    BLOCK_TOKENS, Happened, Harness, Leg, Pair, Reply, Role, Script, World, config, prompt_keys,
};
use kvasir_proto::Side;

const COMPLETIONS: &str = "/v1/completions";

fn prompt() -> Vec<u32> {
    (0..400).map(|id| id % 1000).collect()
}

/// The source's script, and the settlement that the prefill side must be told, if any.
async fn check(what: &str, source: Script, commit: Option<(u32, bool)>) {
    let world = World::default();
    let source = Script { keys: prompt_keys(&prompt()), ..source };
    let pairs = [
        Pair::start(&world, "p", Role::Prefill, Script { cached_blocks: 2, ..Script::default() })
            .await,
        Pair::start(&world, "d", Role::Decode, source).await,
    ];
    let harness = Harness::start(config(&[&pairs[0], &pairs[1]])).await;
    let body = json!({"model": "tiny", "prompt": prompt(), "max_tokens": 2, "seed": 1});
    let response = harness.ask(COMPLETIONS, body).await;
    assert_eq!(response.status, 200, "{what}: {response:?}");
    let log = world.log();
    let allocate = |side: Side| {
        log.iter().find_map(|happened| match happened {
            Happened::Allocate { request, .. } if request.side == side.to_wire() => {
                Some(request.clone())
            }
            _ => None,
        })
    };
    let on_source = allocate(Side::Source).unwrap_or_else(|| panic!("{what}: no fetch: {log:#?}"));
    let until = on_source.fetch_until_block;
    // One token at least is computed, so the last block is not fetched.
    assert_eq!(until, 400 / BLOCK_TOKENS - 1, "{what}");
    assert_eq!(on_source.keys.len(), until as usize * 16, "{what}");
    let on_prefill = allocate(Side::Prefill).expect("a prefill side");
    assert_eq!(on_prefill.fetch_until_block, until, "{what}");
    assert_eq!(on_prefill.writer_endpoint, b"d", "{what}");
    let commits: Vec<(u32, bool)> = log
        .iter()
        .filter_map(|happened| match happened {
            Happened::Commit { valid_blocks, source_lost, .. } => {
                Some((*valid_blocks, *source_lost))
            }
            _ => None,
        })
        .collect();
    assert_eq!(commits, Vec::from_iter(commit), "{what}");
    if commit.is_some() {
        let released = |h: &Happened| matches!(h, Happened::Abort { side: Side::Source, .. });
        world.until("the source is let go", |log| log.iter().any(released)).await;
    }
    let others =
        |h: &Happened| matches!(h, Happened::Abort { side: Side::Prefill | Side::Decode, .. });
    assert_eq!(world.count(others), 0, "{what}");
}

#[tokio::test]
async fn what_is_held_elsewhere_is_fetched_and_what_does_not_come_is_computed() {
    let normal = Script::default;
    check("all lands", normal(), None).await;
    check("some is rotten", Script { good_blocks_max: 3, ..normal() }, Some((3, false))).await;
    let failed = Script { push: Reply::Fail(Code::Aborted), ..normal() };
    check("the source fails", failed, Some((0, true))).await;
}

#[tokio::test]
async fn a_source_that_declines_is_not_waited_for() {
    let world = World::default();
    let holder = Script {
        keys: prompt_keys(&prompt()),
        allocate: Reply::Fail(Code::Aborted),
        ..Script::default()
    };
    let pairs = [
        Pair::start(&world, "p", Role::Prefill, Script::default()).await,
        Pair::start(&world, "d", Role::Decode, Script::default()).await,
        // Out of the way for everything but its blocks: it is no decode instance that has room.
        Pair::start(&world, "h", Role::Prefill, holder).await,
    ];
    let harness = Harness::start(config(&pairs.iter().collect::<Vec<_>>())).await;
    let body = json!({"model": "tiny", "prompt": prompt(), "max_tokens": 2, "seed": 1});
    let response = harness.ask(COMPLETIONS, body).await;
    assert_eq!(response.status, 200, "{response:?}");
    assert_eq!(world.count(|h| matches!(h, Happened::Push { side: Side::Source, .. })), 0);
}

#[tokio::test]
async fn what_nodes_say_after_the_first_token_does_not_undo_the_hand_over() {
    let world = World::default();
    let source = Script {
        keys: prompt_keys(&prompt()),
        push: Reply::Hold,
        decode: Leg::HoldAfter(1),
        ..Script::default()
    };
    let pairs = [
        Pair::start(&world, "p", Role::Prefill, Script { push: Reply::Hold, ..Script::default() })
            .await,
        Pair::start(&world, "d", Role::Decode, source).await,
    ];
    let harness = Harness::start(config(&[&pairs[0], &pairs[1]])).await;
    let body = json!({"model": "tiny", "prompt": prompt(), "max_tokens": 3, "stream": true});
    let response = harness.open(COMPLETIONS, body.to_string()).await;
    assert_eq!(response.status().as_u16(), 200, "the first token is there");
    // Late: the fetch's success, the push's failure.
    pairs[0].change(|script| script.push = Reply::Fail(Code::Aborted));
    pairs[1].change(|script| script.push = Reply::Do);
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    pairs[1].change(|script| script.decode = Leg::FailAfter(1, Code::Unavailable));
    let text = response.text().await.expect("an end");
    assert!(text.contains("instance_failed"), "{text}");
    let attempts = world.count(|h| matches!(h, Happened::Allocate { node: "p", .. }));
    assert_eq!(attempts, 1, "an answer that had begun was begun again");
    world
        .until("the shares are aborted", |log| {
            let aborted = |side| {
                log.iter().any(|h| matches!(h, Happened::Abort { side: s, .. } if *s == side))
            };
            aborted(Side::Prefill) && aborted(Side::Decode)
        })
        .await;
}

#[tokio::test]
async fn a_source_that_answers_no_renewal_is_given_up() {
    let world = World::default();
    let source = Script {
        keys: prompt_keys(&prompt()),
        push: Reply::Hang,
        unrenewed: Some(Side::Source),
        ..Script::default()
    };
    // It computes when it is told that nothing comes.
    let prefill = Script { prefill: Leg::Hold, ..Script::default() };
    let pairs = [
        Pair::start(&world, "p", Role::Prefill, prefill).await,
        Pair::start(&world, "d", Role::Decode, source).await,
    ];
    let mut config = config(&[&pairs[0], &pairs[1]]);
    config.lease_ms = 1_000;
    let harness = Harness::start(config).await;
    let body = json!({"model": "tiny", "prompt": prompt(), "max_tokens": 2, "seed": 1});
    let settled = async {
        let lost = |h: &Happened| matches!(h, Happened::Commit { source_lost: true, .. });
        world.until("the prefill side is told", |log| log.iter().any(lost)).await;
        pairs[0].change(|script| script.prefill = Leg::Do);
    };
    let (response, ()) = tokio::join!(harness.ask(COMPLETIONS, body), settled);
    assert_eq!(response.status, 200, "{response:?}");
    let attempts = world.count(|h| matches!(h, Happened::Allocate { node: "p", .. }));
    assert_eq!(attempts, 1, "a lost source costs no attempt");
}
