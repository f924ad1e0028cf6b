//! A prefix that stays on other nodes is attended there, and nobody can tell from the tokens; whatever is lost
//! on the way, the tokens are the same.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::checkpoint::{IndexerSizes, Sizes, random_checkpoint};
use crate::support::answers::{check_many, reusable_tokens};
use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::expected::Expected;
use crate::support::peers::{Ask, LONG_LEASE_MS, Peer, tokens};
use crate::support::vectors::{Case, ROW_VALUES, Variant};
use futures::future::join_all;
use rustix::process::Signal;

/// Of both models: heads, layers, and the values of a row that are the value.
const HEADS: f64 = 4.0;
const LAYERS: f64 = 3.0;
const VALUES: f64 = 512.0;
/// No wait for a holder ends by the time in which a slow machine answers.
const PATIENT: &str = "--route-timeout-ms 600000";
const RECALLS: &str = "kvasir_engine_routed_recomputes_total";
const PUSHED: &str = "kvasir_store_pushed_bytes_total";

fn ask(serial: u64, case: &Case) -> Ask {
    let max_tokens = case.greedy.len() as u32;
    Ask { serial, prompt: case.prompt.clone(), max_tokens, lease_ms: LONG_LEASE_MS }
}

/// Those with a full block before their last token.
fn cases(variant: Variant) -> Vec<Case> {
    let mut cases = variant.cases();
    cases.retain(|case| reusable_tokens(case.prompt.len()) > 0);
    assert!(cases.len() >= 3, "the vectors have long prompts");
    cases
}

async fn start(variant: Variant, flags: &str) -> Cluster {
    start_model(&variant.model(), flags).await
}

async fn start_model(model: &Path, flags: &str) -> Cluster {
    Cluster::start(&format!("{flags} --model-dir {}", model.display())).await
}

async fn peers(cluster: &Cluster, count: usize) -> Vec<Peer> {
    let names = (1..=count).map(|number| format!("both-{number}"));
    join_all(names.map(async |name| Peer::of(cluster, &name).await)).await
}

/// Rows that a request sends to each of its holders. The last layer computes what the logits need alone.
fn query_rows(case: &Case) -> f64 {
    let after = (case.prompt.len() - reusable_tokens(case.prompt.len())) as f64;
    let decoded = case.greedy.len() as f64 - 1.0;
    HEADS * ((LAYERS - 1.0) * after + 1.0 + LAYERS * decoded)
}

/// The last of five engines answers; the others have the prompts.
async fn check_ways(model: &Path, cases: &[Case], domain: &str, is_dense: bool) {
    let flags = format!("--both 5 --routes {PATIENT} --transport {domain} --dram-bytes 32MiB");
    let cluster = start_model(model, &flags).await;
    let peers = peers(&cluster, 5).await;
    let (engine, holders) = peers.split_last().expect("five");
    let mut serial = 0;
    let mut next = |case: &Case| {
        serial += 1;
        ask(serial, case)
    };
    for holder in holders {
        for case in cases {
            assert_eq!(holder.here(&next(case)).await, case.greedy, "computed");
        }
    }
    for case in cases {
        assert_eq!(holders[0].here(&next(case)).await, case.greedy, "local");
    }
    // One holder and four; all cases at once, so that messages carry several sequences.
    let mut rows = 0.0;
    for count in [1, 4] {
        let holders: Vec<&Peer> = holders[..count].iter().collect();
        let asks: Vec<Ask> = cases.iter().map(&mut next).collect();
        let answers = join_all(asks.iter().map(async |ask| {
            let events = engine.routed(&holders, ask).await.expect("it is taken");
            tokens(events, async || ()).await
        }))
        .await;
        for ((case, ask), tokens) in cases.iter().zip(&asks).zip(answers) {
            let length = case.prompt.len();
            assert_eq!(tokens, case.greedy, "{length} tokens, {count} holders, {domain}");
            let each = ask.blocks().div_ceil(count as u32);
            rows += query_rows(case) * f64::from(ask.blocks().div_ceil(each));
        }
    }
    let near = |got: f64, rows: f64, row_bytes: f64, what: &str| {
        let want = rows * row_bytes;
        assert!((got - want).abs() <= 0.05 * want, "{got} bytes of {what}, {want} were expected");
    };
    let queries = cluster.sum("-node", "kvasir_route_query_bytes_total", &[]).await;
    let partials = cluster.sum("-node", "kvasir_route_partial_bytes_total", &[]).await;
    if is_dense {
        near(queries, rows, ROW_VALUES as f64 * 4.0, "queries");
        near(partials, rows, VALUES * 4.0 + 8.0, "partials");
    }
    assert!(queries > 0.0 && partials > 0.0, "holders were asked");
    assert_eq!(cluster.sum("-node", PUSHED, &[]).await, 0.0, "a routed prefix does not move");
    assert_eq!(cluster.sum("both-5", RECALLS, &[]).await, 0.0);

    for case in cases {
        let tokens = engine.fetched(&holders[1], &next(case)).await;
        assert_eq!(tokens, case.greedy, "fetched");
    }
    assert!(cluster.sum("-node", PUSHED, &[]).await > 0.0);
    // Mixed: what the engine's own node has, and what others have, in one prompt; and beside that others.
    let mixed = [engine, &holders[2]];
    let asks: Vec<(usize, Ask)> = cases.iter().map(&mut next).enumerate().collect();
    let answers = join_all(asks.iter().map(async |(index, ask)| match index % 3 {
        0 => engine.here(ask).await,
        1 => tokens(engine.routed(&mixed, ask).await.expect("taken"), async || ()).await,
        _ => tokens(engine.routed(&mixed[1..], ask).await.expect("taken"), async || ()).await,
    }))
    .await;
    for (case, tokens) in cases.iter().zip(answers) {
        assert_eq!(tokens, case.greedy, "mixed, {} tokens", case.prompt.len());
    }
    eventually("no share is left", async || {
        cluster.sum("-node", "kvasir_store_shares", &[]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_prefix_local_routed_to_one_and_to_four_fetched_and_mixed_gives_the_same_tokens() {
    for (variant, domain) in [(Variant::Plain, "shm"), (Variant::YarnQlora, "tcp")] {
        check_ways(&variant.model(), &cases(variant), domain, true).await;
    }
}

#[tokio::test]
async fn rows_are_selected_wherever_they_are_and_give_the_same_tokens() {
    let model = tempfile::tempdir().expect("a folder");
    let indexer = Some(IndexerSizes { heads: 8, width: 32, topk: 40 });
    let sizes = Sizes { indexer, layers: 2, dense_layers: 1, heads: 4, ..Sizes::default() };
    random_checkpoint(model.path(), 20, &sizes, &Variant::Plain.model());
    let expected = Expected::of(model.path());
    let case = |length: u32| {
        let token = |i: u32| (i * 7919 + length * 104_729 + i * i) % 1000;
        let prompt: Vec<u32> = (0..length).map(token).collect();
        let greedy = expected.greedy(&prompt, 16);
        assert!(greedy.len() >= 8, "{} tokens are far from a tie", greedy.len());
        Case { prompt, greedy }
    };
    let cases = [70, 200, 290].map(case);
    for domain in ["shm", "tcp"] {
        check_ways(model.path(), &cases, domain, false).await;
    }
}

/// One engine whose node has a prompt, another one, and that one's long answer to it.
struct Pair {
    cluster: Cluster,
    holder: Peer,
    engine: Peer,
    case: Case,
    expected: Vec<u32>,
}

impl Pair {
    /// Two serials are used up.
    async fn start(flags: &str) -> Pair {
        let cluster = start(Variant::Plain, &format!("--both 2 --routes {flags}")).await;
        let [holder, engine] = ["both-1", "both-2"].map(|name| Peer::of(&cluster, name));
        let (holder, engine) = (holder.await, engine.await);
        let case = Variant::Plain.longest();
        assert_eq!(holder.here(&ask(1, &case)).await, case.greedy);
        let expected = engine.here(&long(2, &case)).await;
        Pair { cluster, holder, engine, case, expected }
    }
}

fn long(serial: u64, case: &Case) -> Ask {
    Ask { max_tokens: 600, ..ask(serial, case) }
}

/// A long answer whose holder comes to grief after the first token, and is asked again when that is over.
async fn check_grief(
    flags: &str,
    grief: impl AsyncFn(&Cluster, &Peer, &Ask),
    undo: impl Fn(&Cluster, &Peer),
) {
    let Pair { cluster, holder, engine, case, expected } = &Pair::start(flags).await;
    // On a machine that is busy enough an answer may be over before its grief.
    for serial in 3..20 {
        let asked = long(serial, case);
        let events = engine.routed(&[holder], &asked).await.expect("it is taken");
        let got = tokens(events, async || grief(cluster, holder, &asked).await).await;
        undo(cluster, holder);
        assert_eq!(got, *expected);
        if cluster.sum("both-2", RECALLS, &[]).await > 0.0 {
            break;
        }
    }
    assert_eq!(cluster.sum("both-2", RECALLS, &[]).await, 1.0, "its prefix was computed again");
    let events = engine.routed(&[holder], &ask(20, case)).await.expect("it is taken");
    assert_eq!(tokens(events, async || ()).await, case.greedy);
}

#[tokio::test]
async fn a_lease_that_is_lost_in_mid_generation_costs_no_token() {
    check_grief(PATIENT, async |_, holder, ask| holder.lose_lease(ask).await, |_, _| ()).await;
}

#[tokio::test]
async fn a_route_outlives_its_lease_for_as_long_as_the_answer_lasts() {
    let Pair { cluster, holder, engine, case, .. } = &Pair::start(PATIENT).await;
    let lease = Duration::from_secs(1);
    // As many tokens as the model has positions for: the answer is given up when its lease would have run out twice.
    let lease_ms = lease.as_millis() as u64;
    let asked = Ask { max_tokens: 3_500, lease_ms, ..ask(3, case) };
    let mut events = engine.routed(&[holder], &asked).await.expect("it is taken");
    let began = Instant::now();
    while began.elapsed() < 3 * lease {
        let event = events.message().await.expect("no error");
        assert!(event.is_some(), "the answer is longer than its leases");
    }
    assert_eq!(cluster.sum("both-2", RECALLS, &[]).await, 0.0, "the prefix stayed where it is");
    drop(events);
    eventually("what it held is let go", async || {
        cluster.sum("-node", "kvasir_store_shares", &[]).await == 0.0
    })
    .await;
}

#[tokio::test]
async fn a_holder_that_has_no_room_is_asked_again() {
    let cluster = start(
        Variant::Plain,
        &format!("--both 5 --routes --route-concurrent-messages-max 1 {PATIENT}"),
    )
    .await;
    let peers = peers(&cluster, 5).await;
    let (holder, engines) = peers.split_first().expect("five");
    let case = Variant::Plain.longest();
    assert_eq!(holder.here(&ask(1, &case)).await, case.greedy);
    let expected = holder.here(&long(2, &case)).await;
    let answers = join_all(engines.iter().enumerate().map(async |(at, engine)| {
        let asked = long(3 + at as u64, &case);
        let events = engine.routed(&[holder], &asked).await.expect("it is taken");
        tokens(events, async || ()).await
    }));
    assert_eq!(answers.await, vec![expected; engines.len()]);
    let refused = [("outcome", "busy")];
    let refused = cluster.sum("both-1-node", "kvasir_route_messages_total", &refused).await;
    assert!(refused > 0.0, "four engines ask at once");
    for engine in 2..=5 {
        let recalls = cluster.sum(&format!("both-{engine}"), RECALLS, &[]).await;
        assert_eq!(recalls, 0.0, "the prefix stayed where it is");
    }
}

#[tokio::test]
async fn a_holder_that_is_late_costs_no_token() {
    // It stands still, so that neither queries nor partials come on, until the answer has ended.
    check_grief(
        "--route-timeout-ms 2000",
        async |cluster, holder, _| cluster.signal(&holder.node_name, Signal::STOP),
        |cluster, holder| cluster.signal(&holder.node_name, Signal::CONT),
    )
    .await;
}

#[tokio::test]
async fn a_holder_that_is_killed_in_mid_generation_costs_no_token() {
    let Pair { cluster, holder, engine, case, expected } = &Pair::start(PATIENT).await;
    let asked = long(3, case);
    let events = engine.routed(&[holder], &asked).await.expect("it is taken");
    let got = tokens(events, async || cluster.kill(&holder.node_name)).await;
    assert_eq!(got, *expected);
    assert!(cluster.sum("both-2", RECALLS, &[]).await <= 1.0);
    assert_eq!(engine.here(&ask(4, case)).await, case.greedy);
}

/// As it is priced, or wherever it can be.
#[tokio::test]
async fn the_conductor_lets_a_prefix_stay_and_says_why() {
    const AT_ONCE: usize = 8;
    let variant = Variant::Plain;
    let flags = format!("--both 2 --routes --always-route {PATIENT} --dram-bytes 192MiB");
    let cluster = start(variant, &flags).await;
    check_many(&cluster, &variant.longest(), AT_ONCE).await;
    let of_conductor = async |metric: &str, label: (&str, &str)| {
        cluster.sum("conductor", &format!("kvasir_conductor_{metric}"), &[label]).await
    };
    let routed = of_conductor("placements_total", ("kind", "full_route")).await;
    assert!(routed > 0.0, "nothing was routed");
    assert_eq!(of_conductor("prefix_decisions_total", ("action", "route")).await, routed);
    assert_eq!(of_conductor("placements_total", ("kind", "full_fetch")).await, 0.0);
    let queries = cluster.sum("-node", "kvasir_route_query_bytes_total", &[]).await;
    assert!(queries > 0.0, "no query was sent");
    assert_eq!(cluster.sum("-node", PUSHED, &[]).await, 0.0, "a routed prefix does not move");
}
