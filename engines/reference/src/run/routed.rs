//! Engines that attend the beginning of prompts on other nodes, with this test in the conductor's place:
//! the tokens are those of the reference vectors, whoever attends what, and whatever is lost on the way.

use std::ops::Range;

use futures::future::join_all;
use kvasir_proto::refusal::{REFUSAL, UNROUTED};
use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::{BlockKey, keys};
use kvasir_transfer::TransferTls;

use super::with_nodes::{Ask, BLOCK, Case, Host, LEASE_MS, cases};
use super::*;
use crate::config::Role;

/// Of the model: heads, layers, values of a row, leading ones that are the value.
const HEADS: u64 = 4;
pub(super) const LAYERS: u64 = 3;
const D_QK: u64 = 576;
const D_V: u64 = 512;

/// Cases with at least so many full blocks before their last token.
fn long_cases(blocks: usize) -> Vec<Case> {
    cases().into_iter().filter(|case| (case.prompt.len() - 1) / BLOCK >= blocks).collect()
}

fn ask(serial: u64, case: &Case) -> Ask {
    Ask { serial, prompt: case.prompt.clone(), max_tokens: case.greedy.len() as u32 }
}

impl Host {
    /// Pins the first blocks of a prompt here, for somebody who sends queries.
    async fn pin(&self, ask: &Ask, blocks: u32) {
        let keys = keys::chain(self.namespace, &ask.prompt, BLOCK);
        let request = v1::TxAllocateRequest {
            tx: Some(ask.tx()),
            side: v1::Side::Source.into(),
            namespace: self.namespace.0.to_vec(),
            keys: BlockKey::concat(&keys[..blocks as usize]),
            prompt_tokens: blocks * BLOCK as u32,
            lease_ms: LEASE_MS,
            ..v1::TxAllocateRequest::default()
        };
        let reply = self.node_client.clone().tx_allocate(request).await.expect("pinned");
        assert_eq!(reply.into_inner().cached_blocks, blocks, "they were computed here before");
    }

    /// Reserves slots for what is not in these blocks.
    async fn reserve_without(&self, ask: &Ask, away: Range<u32>) -> u32 {
        let mut keys = keys::chain(self.namespace, &ask.prompt, BLOCK);
        keys.drain(away.start as usize..away.end as usize);
        let request = v1::TxAllocateRequest {
            tx: Some(ask.tx()),
            side: v1::Side::Prefill.into(),
            namespace: self.namespace.0.to_vec(),
            keys: BlockKey::concat(&keys),
            prompt_tokens: (ask.prompt.len() - away.len() * BLOCK) as u32,
            lease_ms: LEASE_MS,
            generated_tokens_max: ask.max_tokens,
            cache_class: v1::CacheClass::Ephemeral.into(),
            ..v1::TxAllocateRequest::default()
        };
        let reply = self.node_client.clone().tx_allocate(request).await.expect("room");
        reply.into_inner().cached_blocks
    }

    fn span(&self, ask: &Ask, blocks: Range<u32>) -> v1::RoutedSpan {
        v1::RoutedSpan {
            node_address: self.node.address().to_string(),
            tx: Some(ask.tx()),
            lease_ms: LEASE_MS,
            first_block: blocks.start,
            blocks: blocks.end - blocks.start,
        }
    }

    pub(super) async fn abort_source(&self, ask: &Ask) {
        let (tx, side) = (Some(ask.tx()), v1::Side::Source.into());
        let request = v1::TxAbortRequest { tx, side, reason: "a test".into() };
        self.node_client.clone().tx_abort(request).await.expect("aborted");
    }
}

/// Begins an answer of `engine` with the prompt's full blocks attended by `holders`, in equal parts.
pub(super) async fn begin(
    engine: &Host,
    holders: &[&Host],
    ask: &Ask,
) -> tonic::Streaming<v1::GenerateEvent> {
    let blocks = ((ask.prompt.len() - 1) / BLOCK) as u32;
    begin_behind(engine, holders, ask, 0..blocks).await
}

/// The same for some of its blocks; those before them are here.
pub(super) async fn begin_behind(
    engine: &Host,
    holders: &[&Host],
    ask: &Ask,
    away: Range<u32>,
) -> tonic::Streaming<v1::GenerateEvent> {
    let each = (away.len() as u32).div_ceil(holders.len() as u32);
    let mut spans = Vec::new();
    for (holder, first) in holders.iter().zip(away.clone().step_by(each as usize)) {
        let end = (first + each).min(away.end);
        holder.pin(ask, end).await;
        spans.push(holder.span(ask, first..end));
    }
    engine.reserve_without(ask, away).await;
    engine.call_routed(ask, v1::Phase::Full, spans).await.expect("taken")
}

/// The tokens up to the end, with `meanwhile` after the first ones.
pub(super) async fn tokens(
    events: tonic::Streaming<v1::GenerateEvent>,
    meanwhile: impl AsyncFnOnce(),
) -> Vec<u32> {
    tokens_and_end(events, meanwhile).await.0
}

async fn tokens_and_end(
    mut events: tonic::Streaming<v1::GenerateEvent>,
    meanwhile: impl AsyncFnOnce(),
) -> (Vec<u32>, v1::Finished) {
    let (mut tokens, mut meanwhile) = (Vec::new(), Some(meanwhile));
    let mut end = v1::Finished::default();
    while let Some(event) = events.message().await.expect("no error") {
        match event.event {
            Some(Event::Tokens(more)) => {
                tokens.extend(more.tokens.iter().map(|token| token.id));
                if let Some(meanwhile) = meanwhile.take() {
                    meanwhile().await;
                }
            }
            Some(Event::Finished(finished)) => {
                let opening_us = finished.route_opening_us;
                assert!(opening_us > 0 && opening_us <= finished.queue_us, "{finished:?}");
                end = finished;
            }
            _ => {}
        }
    }
    (tokens, end)
}

pub(super) async fn routed(engine: &Host, holders: &[&Host], ask: &Ask) -> Vec<u32> {
    tokens(begin(engine, holders, ask).await, async || ()).await
}

/// A metric of a node.
pub(super) async fn metric(host: &Host, name: &str) -> u64 {
    let page = super::tests::get(host.node.address(), "/metrics").await;
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} is not in {page}")).trim().parse().expect("a number")
}

/// Query rows that a request sends to each holder. The last layer computes what the logits need alone.
fn query_rows(case: &Case) -> u64 {
    let after = (case.prompt.len() - (case.prompt.len() - 1) / BLOCK * BLOCK) as u64;
    let decoded = case.greedy.len() as u64 - 1;
    HEADS * ((LAYERS - 1) * after + 1 + LAYERS * decoded)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queries_and_partials_in_bf16_give_the_tokens_of_a_cache_in_bf16() {
    let start = async || {
        let bf16 = crate::model::KvDtype::Bf16;
        Host::start_changed(Role::Both, |_, engine| engine.kv_dtype = bf16).await
    };
    let (holder, engine) = (start().await, start().await);
    for (serial, case) in (0..).step_by(2).zip(long_cases(2)) {
        let whole = holder.whole(&ask(serial, &case)).await.tokens;
        let before = metric(&holder, "kvasir_route_query_bytes_total").await;
        assert_eq!(routed(&engine, &[&holder], &ask(serial + 1, &case)).await, whole);
        let sent = metric(&holder, "kvasir_route_query_bytes_total").await - before;
        // Half of what they have in f32, and what says whose they are.
        let values = query_rows(&case) * D_QK;
        assert!((values * 2..values * 3).contains(&sent), "{sent} bytes of {values} values");
    }
    assert_eq!(engine.metrics.recalls.get(), 0);
    for host in [holder, engine] {
        host.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queries_go_under_tls_to_a_node_that_wants_it_and_not_without() {
    let dir = tempfile::tempdir().expect("a folder");
    let tls = certificate(dir.path());
    let start = async |tls_of_engine: &TransferTls| {
        Host::start_changed(Role::Both, |node, engine| {
            node.transport = kvasir_transfer::Domain::Tcp;
            node.transfer_tls = tls.clone();
            engine.routes.transport = kvasir_transfer::Domain::Tcp;
            engine.transfer_tls = tls_of_engine.clone();
            engine.routes.call_timeout_ms = 2_000;
        })
        .await
    };
    let (holder, engine) = (start(&tls).await, start(&tls).await);
    let plain = start(&TransferTls::default()).await;
    let case = long_cases(2).remove(0);
    assert_eq!(holder.whole(&ask(1, &case)).await.tokens, case.greedy);
    assert_eq!(routed(&engine, &[&holder], &ask(2, &case)).await, case.greedy);
    assert!(metric(&holder, "kvasir_route_query_bytes_total").await > 0);
    assert_eq!(engine.metrics.recalls.get(), 0);
    let asked = metric(&holder, "kvasir_route_query_bytes_total").await;
    // What cannot be asked is refused before anything is computed.
    let asks = ask(3, &case);
    let blocks = ((case.prompt.len() - 1) / BLOCK) as u32;
    holder.pin(&asks, blocks).await;
    plain.reserve_without(&asks, 0..blocks).await;
    let spans = vec![holder.span(&asks, 0..blocks)];
    let refused = plain.call_routed(&asks, v1::Phase::Full, spans).await.expect_err("refused");
    assert_eq!(refused.code(), tonic::Code::Unavailable);
    assert!(
        refused.message().contains("cannot send queries to the holder"),
        "{}",
        refused.message()
    );
    assert_eq!(metric(&holder, "kvasir_route_query_bytes_total").await, asked);
    for host in [holder, engine, plain] {
        host.end().await;
    }
}

/// One that is its own authority, for all nodes.
fn certificate(dir: &Path) -> TransferTls {
    let key = rcgen::KeyPair::generate().expect("a key");
    let params = rcgen::CertificateParams::new(vec!["kvasir".into()]).expect("a name");
    let certificate = params.self_signed(&key).expect("signed").pem();
    let write = |file: &str, text: &str| {
        std::fs::write(dir.join(file), text).expect("written");
        Some(dir.join(file))
    };
    TransferTls {
        certificate_file: write("certificate.pem", &certificate),
        key_file: write("key.pem", &key.serialize_pem()),
        ca_file: write("authority.pem", &certificate),
        ..TransferTls::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_are_the_reference_s_with_the_prefix_on_one_node_and_over_several() {
    let (first, second) = (Host::start(Role::Both).await, Host::start(Role::Both).await);
    let engine = Host::start(Role::Both).await;
    let cases = long_cases(1);
    assert!(cases.len() >= 3, "the vectors have long prompts");
    for holder in [&first, &second] {
        let asks = cases.iter().zip(1..).map(|(case, serial)| ask(serial, case));
        let answers = join_all(asks.map(async |ask| holder.whole(&ask).await.tokens)).await;
        assert!(answers.iter().zip(&cases).all(|(tokens, case)| *tokens == case.greedy));
    }
    // All of them in one batch, so that dispatches to a holder carry several sequences.
    let (mut rows, mut serial) = (0, 100);
    for holders in [&[&first][..], &[&second, &first]] {
        let asks: Vec<Ask> = cases
            .iter()
            .map(|case| {
                serial += 1;
                ask(serial, case)
            })
            .collect();
        let answers = join_all(asks.iter().map(|ask| routed(&engine, holders, ask))).await;
        for (case, tokens) in cases.iter().zip(answers) {
            assert_eq!(
                tokens,
                case.greedy,
                "{} tokens, {} holders",
                case.prompt.len(),
                holders.len()
            );
            let blocks = (case.prompt.len() - 1) / BLOCK;
            rows += query_rows(case) * blocks.min(holders.len()) as u64;
        }
    }
    assert_eq!(engine.metrics.recalls.get(), 0);
    // A query row and a partial for each row, layer and step, and no row of the cache.
    let (queries, partials) = (rows * D_QK * 4, rows * (D_V * 4 + 8));
    let sent = engine.router.metrics();
    assert_eq!((sent.query_bytes.get(), sent.partial_bytes.get()), (queries, partials));
    let of_holders = async |name: &str| metric(&first, name).await + metric(&second, name).await;
    assert_eq!(of_holders("kvasir_route_query_bytes_total").await, queries);
    assert_eq!(of_holders("kvasir_route_partial_bytes_total").await, partials);
    assert_eq!(of_holders("kvasir_store_pushed_bytes_total").await, 0);
    assert_eq!(metric(&engine, "kvasir_store_pushed_bytes_total").await, 0);
    // The requests are over, and so are their leases.
    while of_holders("kvasir_store_shares").await > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    for host in [engine, first, second] {
        host.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_is_lost_in_mid_answer_costs_time_and_no_token() {
    let (holder, engine) = (Host::start(Role::Both).await, Host::start(Role::Both).await);
    let case = long_cases(2).remove(0);
    holder.whole(&ask(1, &case)).await;
    let ask = ask(2, &case);
    let events = begin(&engine, &[&holder], &ask).await;
    let tokens = tokens(events, async || holder.abort_source(&ask).await).await;
    assert_eq!(tokens, case.greedy);
    // It may have been at its end when the lease was lost.
    assert!(engine.metrics.recalls.get() <= 1);
    engine.end().await;
    holder.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_is_gone_in_mid_answer_costs_time_and_no_token() {
    let (mut holder, engine) = (Host::start(Role::Both).await, Host::start(Role::Both).await);
    let case = long_cases(2).remove(0);
    holder.whole(&ask(1, &case)).await;
    // A long answer, so that it is still under way when the holder is gone.
    let long = Ask { max_tokens: 400, ..ask(2, &case) };
    let expected = engine.whole(&Ask { serial: 3, ..long.clone() }).await.tokens;
    let events = begin(&engine, &[&holder], &long).await;
    let tokens = tokens(events, async || holder.node.shut_down().await).await;
    assert_eq!(tokens, expected);
    assert!(engine.metrics.recalls.get() <= 1);
    engine.end().await;
    holder.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partials_that_are_late_are_done_without() {
    let holder = Host::start(Role::Both).await;
    let engine = Host::start_with(Role::Both, 0).await;
    let cases = long_cases(2);
    for (case, serial) in cases.iter().zip(1..) {
        holder.whole(&ask(serial, case)).await;
        let tokens = routed(&engine, &[&holder], &ask(100 + serial, case)).await;
        assert_eq!(tokens, case.greedy, "{} tokens", case.prompt.len());
    }
    assert_eq!(engine.metrics.recalls.get(), cases.len() as u64);
    engine.end().await;
    holder.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_holder_has_not_pinned_is_refused_before_anything_is_computed() {
    let (holder, engine) = (Host::start(Role::Both).await, Host::start(Role::Both).await);
    let case = long_cases(2).remove(0);
    holder.whole(&ask(1, &case)).await;
    let call = async |ask: &Ask, span: v1::RoutedSpan| {
        engine.reserve_without(ask, 0..1).await;
        let called = engine.call_routed(ask, v1::Phase::Full, vec![span]).await;
        called.expect_err("refused").code()
    };
    let unpinned = ask(2, &case);
    assert_eq!(call(&unpinned, holder.span(&unpinned, 0..1)).await, tonic::Code::NotFound);
    let fewer = ask(3, &case);
    holder.pin(&fewer, 1).await;
    let more = v1::RoutedSpan { blocks: 2, ..holder.span(&fewer, 0..1) };
    assert_eq!(call(&fewer, more).await, tonic::Code::FailedPrecondition);
    let nobody = v1::RoutedSpan { node_address: "127.0.0.1:1".into(), ..holder.span(&fewer, 0..1) };
    assert_eq!(call(&ask(4, &case), nobody).await, tonic::Code::Unavailable);
    engine.end().await;
    holder.end().await;
}

/// The first blocks of a prompt, as another prompt whose blocks they are.
fn beginning(serial: u64, case: &Case, blocks: usize) -> Ask {
    Ask { serial, prompt: case.prompt[..blocks * BLOCK + 1].to_vec(), max_tokens: 1 }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_are_here_are_attended_here_and_those_behind_them_elsewhere() {
    let (first, second) = (Host::start(Role::Both).await, Host::start(Role::Both).await);
    let engine = Host::start(Role::Both).await;
    let cases = long_cases(3);
    let (mut serial, mut rows) = (0, 0);
    let mut next = || {
        serial += 1;
        serial
    };
    for case in &cases {
        engine.whole(&beginning(next(), case, 1)).await;
        for holder in [&first, &second] {
            assert_eq!(holder.whole(&ask(next(), case)).await.tokens, case.greedy);
        }
    }
    for holders in [&[&first][..], &[&second, &first]] {
        for case in &cases {
            let blocks = ((case.prompt.len() - 1) / BLOCK) as u32;
            let events = begin_behind(&engine, holders, &ask(next(), case), 1..blocks).await;
            assert_eq!(tokens(events, async || ()).await, case.greedy);
            rows += query_rows(case) * holders.len() as u64;
        }
    }
    assert_eq!(engine.metrics.recalls.get(), 0);
    assert_eq!(engine.router.metrics().query_bytes.get(), rows * D_QK * 4);
    // Those behind what is elsewhere are not looked for: they are computed, though they are here.
    let case = &cases[0];
    engine.whole(&ask(next(), case)).await;
    let asks = ask(next(), case);
    first.pin(&asks, 2).await;
    assert_eq!(engine.reserve_without(&asks, 1..2).await, 1);
    let spans = vec![first.span(&asks, 1..2)];
    let events = engine.call_routed(&asks, v1::Phase::Full, spans).await.expect("taken");
    assert_eq!(tokens(events, async || ()).await, case.greedy);
    for host in [engine, first, second] {
        host.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_come_back_are_computed_behind_those_that_are_here() {
    let holder = Host::start(Role::Both).await;
    // Every partial is late.
    let engine = Host::start_with(Role::Both, 0).await;
    let cases = long_cases(3);
    for (case, serial) in cases.iter().zip((0..).step_by(3)) {
        engine.whole(&beginning(serial, case, 1)).await;
        holder.whole(&ask(serial + 1, case)).await;
        let blocks = ((case.prompt.len() - 1) / BLOCK) as u32;
        let asks = ask(serial + 2, case);
        let events = begin_behind(&engine, &[&holder], &asks, 1..blocks).await;
        assert_eq!(tokens(events, async || ()).await, case.greedy);
    }
    assert_eq!(engine.metrics.recalls.get(), cases.len() as u64);
    // And where those are gone, it is said before anything is computed.
    let case = &cases[0];
    let fresh = Host::start(Role::Both).await;
    let asks = ask(1000, case);
    let mut events = begin_behind(&fresh, &[&holder], &asks, 1..2).await;
    let refused = events.message().await.expect_err("refused");
    assert_eq!(refused.code(), tonic::Code::FailedPrecondition);
    assert_eq!(refused.metadata().get(REFUSAL).expect("a word of its own"), UNROUTED);
    for host in [engine, holder, fresh] {
        host.end().await;
    }
}

async fn of_ranks(here: u32, asks: u32) -> Host {
    Host::start_changed(Role::Both, |node, engine| {
        (node.routes.ranks, engine.routes.ranks) = (here, asks);
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensor_parallel_ranks_send_the_rows_of_their_heads_to_the_ranks_of_a_holder() {
    let (first, second) = (of_ranks(2, 1).await, of_ranks(1, 1).await);
    let cases = long_cases(2);
    for (case, serial) in cases.iter().zip((0..).step_by(2)) {
        for (holder, serial) in [(&first, serial), (&second, serial + 1)] {
            assert_eq!(holder.whole(&ask(serial, case)).await.tokens, case.greedy);
        }
    }
    let mut serial = 1_000;
    for ranks in [2, 4] {
        let engine = of_ranks(1, ranks).await;
        for holders in [&[&first][..], &[&second, &first]] {
            for case in &cases {
                serial += 1;
                let answer = routed(&engine, holders, &ask(serial, case)).await;
                assert_eq!(answer, case.greedy, "{ranks} ranks, {} holders", holders.len());
            }
        }
        assert_eq!(engine.metrics.recalls.get(), 0);
        let rows: u64 = cases.iter().map(|case| 3 * query_rows(case)).sum();
        let sent = engine.router.metrics();
        // Together as much as one would send.
        assert_eq!(sent.query_bytes.get(), rows * D_QK * 4);
        assert_eq!(sent.partial_bytes.get(), rows * (D_V * 4 + 8));
        // A ring for each rank that asks, with the holder's rank of its remainder.
        assert_eq!(metric(&first, "kvasir_route_query_sessions").await, u64::from(ranks));
        engine.end().await;
        while metric(&first, "kvasir_route_query_sessions").await > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
    // Each rank of the holder has answered as much as the other, on its own way.
    let written = async |rank: u32| {
        let name = "kvasir_route_transfer_bytes_total";
        let page = super::tests::get(first.node.address(), "/metrics").await;
        let of_rank = format!("rank=\"{rank}\"");
        let lines = page.lines().filter(|line| line.starts_with(name) && line.contains(&of_rank));
        let number = |line: &str| line.rsplit(' ').next().and_then(|n| n.parse::<u64>().ok());
        lines.filter_map(number).sum::<u64>()
    };
    let (one, other) = (written(0).await, written(1).await);
    assert!(one > 0 && one == other, "{one} and {other} bytes");
    // Shares end when both have let go of their slots.
    while metric(&first, "kvasir_store_shares").await > 0 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    first.end().await;
    second.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_whose_partials_are_late_costs_time_and_no_token() {
    let holder = of_ranks(2, 1).await;
    let engine = Host::start_changed(Role::Both, |_, engine| {
        (engine.routes.ranks, engine.routes.answer_timeout_ms) = (2, 0);
    })
    .await;
    let case = long_cases(2).remove(0);
    holder.whole(&ask(1, &case)).await;
    assert_eq!(routed(&engine, &[&holder], &ask(2, &case)).await, case.greedy);
    assert_eq!(engine.metrics.recalls.get(), 1);
    engine.end().await;
    holder.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_connection_to_a_holder_is_said_to_be_one() {
    let (holder, engine) = (Host::start(Role::Both).await, Host::start(Role::Both).await);
    let other = Host::start(Role::Both).await;
    let case = long_cases(2).remove(0);
    for (host, serial) in [(&holder, 1), (&other, 2)] {
        host.whole(&ask(serial, &case)).await;
    }
    for (serial, holders, is_first) in [
        (3, &[&holder][..], true),
        (4, &[&holder], false),
        (5, &[&holder, &other], true),
        (6, &[&holder, &other], false),
    ] {
        let events = begin(&engine, holders, &ask(serial, &case)).await;
        let (_, end) = tokens_and_end(events, async || ()).await;
        assert_eq!(end.route_connection_opened, is_first, "request {serial}");
    }
    for host in [engine, holder, other] {
        host.end().await;
    }
}

/// Who comes while a connection is made waits for it as long as who makes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_for_a_first_connection_of_somebody_else_says_so() {
    let holder = Host::start(Role::Both).await;
    let case = long_cases(2).remove(0);
    holder.whole(&ask(1, &case)).await;
    // Whether the second one comes in time is chance: a new engine tries it again.
    for serial in (2..42).step_by(2) {
        let engine = Host::start(Role::Both).await;
        let end = async |serial: u64| {
            let events = begin(&engine, &[&holder], &ask(serial, &case)).await;
            tokens_and_end(events, async || ()).await.1
        };
        let (one, other) = tokio::join!(end(serial), end(serial + 1));
        engine.end().await;
        assert!(
            one.route_connection_opened || other.route_connection_opened,
            "one of them made it"
        );
        if one.route_connection_opened && other.route_connection_opened {
            holder.end().await;
            return;
        }
    }
    panic!("no engine whose second request waited for the first one's connection");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_prompt_asked_of_holders_is_told_apart_from_its_answer() {
    let (holder, engine) = (Host::start(Role::Both).await, Host::start(Role::Both).await);
    let case = long_cases(2).remove(0);
    holder.whole(&ask(1, &case)).await;
    // All but the last of its full blocks.
    let away = ((case.prompt.len() - 1) / BLOCK - 1) as u32;
    let events = begin_behind(&engine, &[&holder], &ask(2, &case), 0..away).await;
    let (_, end) = tokens_and_end(events, async || ()).await;
    let after = (case.prompt.len() - away as usize * BLOCK) as u64;
    assert!(after > BLOCK as u64);
    // The last layer computes what the logits need alone.
    let queries = (LAYERS - 1) * after + 1;
    assert_eq!(u64::from(end.routed_prompt_layers), LAYERS, "{end:?}");
    assert_eq!((end.routed_prompt_queries, end.routed_prompt_us > 0), (queries, true), "{end:?}");
    let decoded = case.greedy.len() as u64 - 1;
    assert_eq!(u64::from(end.routed_layers), LAYERS * decoded, "{end:?}");
    for host in [engine, holder] {
        host.end().await;
    }
}

/// What came back together says nothing of either of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_prompt_asked_beside_others_is_not_told() {
    let (holder, engine) = (Host::start(Role::Both).await, Host::start(Role::Both).await);
    let case = long_cases(2).remove(0);
    holder.whole(&ask(1, &case)).await;
    let alone = async |serial: u64, max_tokens: u32| {
        let ask = Ask { max_tokens, ..ask(serial, &case) };
        let events = begin(&engine, &[&holder], &ask).await;
        tokens_and_end(events, async || ()).await.1.routed_prompt_queries
    };
    let own = alone(2, 1).await;
    assert!(own > 0);
    let mut beside = 0;
    // The second one comes while the first one's answer is made, if not always.
    for serial in (3..43).step_by(2) {
        let max_tokens = case.greedy.len() as u32;
        let (one, other) = tokio::join!(alone(serial, max_tokens), alone(serial + 1, max_tokens));
        for queries in [one, other] {
            assert!(queries == own || queries == 0, "{queries} and not {own}");
            beside += u32::from(queries == 0);
        }
    }
    assert!(beside > 0, "they were never computed together");
    for host in [engine, holder] {
        host.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_says_that_rows_of_another_precision_are_others() {
    let fingerprint = async |precision| {
        let host = Host::start_changed(Role::Both, |_, engine| {
            engine.kv_dtype = crate::model::KvDtype::Bf16;
            engine.attention_precision = precision;
        })
        .await;
        let described = host.node_client.clone().describe(v1::DescribeRequest {}).await;
        let instances = described.expect("described").into_inner().instances;
        host.end().await;
        let description = instances[0].description.clone().expect("described");
        description.model.expect("a model").fingerprint
    };
    use crate::config::Precision;
    let (exact, rounded) = (fingerprint(Precision::F32).await, fingerprint(Precision::Bf16).await);
    assert_ne!(exact, rounded);
}
