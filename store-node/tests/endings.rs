//! However a share ends, nothing is left behind: no slot, pin, quarantine, counter or tail room.

use crate::common::*;
use kvasir_proto::{Share, Side, v1};
use kvasir_store_node::config::Config;

const P: fn(u64) -> Share = |serial| share(serial, Side::Prefill);
const D: fn(u64) -> Share = |serial| share(serial, Side::Decode);

struct Pair {
    prefill: TestNode,
    decode: TestNode,
    prefill_engine: FakeEngine,
    decode_engine: FakeEngine,
    prompt: Vec<u32>,
}

/// How far a request is when it is aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Allocated,
    Bound,
    Armed,
    HalfPushed,
    Finished,
    Ready,
}

const PHASES: [Phase; 6] = [
    Phase::Allocated,
    Phase::Bound,
    Phase::Armed,
    Phase::HalfPushed,
    Phase::Finished,
    Phase::Ready,
];

impl Pair {
    async fn start(domain: Domain) -> Self {
        let (prefill, decode) = (TestNode::start(domain).await, TestNode::start(domain).await);
        let prefill_engine = FakeEngine::attach(&prefill).await;
        let decode_engine = FakeEngine::attach(&decode).await;
        let prompt = prompt(1, 3 * BLOCK_TOKENS + 20);
        Pair { prefill, decode, prefill_engine, decode_engine, prompt }
    }

    async fn allocate(&mut self, serial: u64, lease_ms: u64) -> v1::WriteTargets {
        let writer_endpoint = self.prefill.endpoint().await;
        let request = v1::TxAllocateRequest { lease_ms, ..allocate(P(serial), &self.prompt) };
        self.prefill.allocate(request).await.expect("room");
        let request = v1::TxAllocateRequest {
            writer_endpoint,
            lease_ms,
            ..allocate(D(serial), &self.prompt)
        };
        self.decode.allocate(request).await.expect("room").targets.expect("targets")
    }

    /// Brings a request as far as `phase`.
    async fn bring_to(&mut self, serial: u64, phase: Phase, lease_ms: u64) {
        let targets = self.allocate(serial, lease_ms).await;
        if phase < Phase::Bound {
            return;
        }
        let bound = self.prefill_engine.bind(P(serial)).await;
        self.decode_engine.bind(D(serial)).await;
        if phase < Phase::Armed {
            return;
        }
        self.prefill.push(P(serial), Some(targets)).await.expect("armed");
        if phase < Phase::HalfPushed {
            return;
        }
        let first = bound.cached_tokens / BLOCK_TOKENS;
        let prompt = self.prompt.clone();
        self.prefill_engine.compute(P(serial), &prompt, &bound.slots, first..first + 1);
        if phase < Phase::Finished {
            return;
        }
        self.prefill_engine.compute(P(serial), &prompt, &bound.slots, first + 1..4);
        self.prefill_engine.finish(P(serial), b"tail");
        if phase < Phase::Ready {
            return;
        }
        self.decode_engine.ready(D(serial)).await;
        self.decode_engine.grow(D(serial), 2).await;
    }

    /// What engines do when they are told to stop.
    async fn obey(&mut self, serial: u64) {
        self.prefill_engine.stopped(P(serial)).await;
        self.prefill_engine.release(P(serial));
        self.decode_engine.stopped(D(serial)).await;
        self.decode_engine.release(D(serial));
    }

    async fn is_quiet(&self) {
        self.prefill.is_quiet().await;
        self.decode.is_quiet().await;
    }
}

async fn aborts_leave_nothing(domain: Domain) {
    let mut pair = Pair::start(domain).await;
    for (serial, phase) in (1..).zip(PHASES) {
        pair.bring_to(serial, phase, 30_000).await;
        assert!(pair.decode.abort(D(serial)).await, "{phase:?}");
        assert!(pair.prefill.abort(P(serial)).await, "{phase:?}");
        if phase >= Phase::Bound {
            pair.obey(serial).await;
        }
        pair.is_quiet().await;
        let again = pair.prefill.allocate(allocate(P(serial), &pair.prompt)).await;
        assert_eq!(again.expect_err("ended").code(), tonic::Code::Aborted, "{phase:?}");
        pair.prompt = prompt(serial as u32 + 1, 3 * BLOCK_TOKENS + 20);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aborting_in_any_phase_leaves_nothing_over_shared_memory() {
    aborts_leave_nothing(Domain::Shm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aborting_in_any_phase_leaves_nothing_over_tcp() {
    aborts_leave_nothing(Domain::Tcp).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_runs_out_stops_the_engines_and_leaves_nothing() {
    let mut pair = Pair::start(Domain::Shm).await;
    for (serial, phase) in (1..).zip([Phase::Allocated, Phase::HalfPushed]) {
        pair.bring_to(serial, phase, 100).await;
        if phase >= Phase::Bound {
            assert!(pair.prefill_engine.stopped(P(serial)).await.contains("lease"));
            assert!(pair.decode_engine.stopped(D(serial)).await.contains("lease"));
            // Until the engine says so, it may still write.
            until("a quarantine", async || {
                (pair.prefill.metric("shares_aborting").await > 0.0).then_some(())
            })
            .await;
            pair.prefill_engine.release(P(serial));
            pair.decode_engine.release(D(serial));
        }
        pair.is_quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_decode_engine_keeps_its_lease_by_being_alive() {
    let mut pair = Pair::start(Domain::Shm).await;
    pair.bring_to(1, Phase::Ready, 800).await;
    pair.prefill_engine.release(P(1));
    let started = std::time::Instant::now();
    while started.elapsed().as_millis() < 1600 {
        let alive = v1::TxShare { tx: Some(tx(1).into()), side: Side::Decode.to_wire() };
        let alive = v1::KeepAlive { shares: vec![alive] };
        pair.decode_engine.send(v1::engine_to_node::Message::KeepAlive(alive));
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(pair.decode_engine.unasked(), [], "the lease is long over without the renewals");
    pair.decode_engine.release(D(1));
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_is_gone_is_cut_off_and_its_slots_come_free() {
    for domain in [Domain::Tcp, Domain::Shm] {
        let mut pair = Pair::start(domain).await;
        pair.bring_to(1, Phase::HalfPushed, 30_000).await;
        let Pair { prefill, mut decode, prefill_engine, mut decode_engine, .. } = pair;
        drop(prefill_engine);
        prefill.shut_down().await;
        decode.abort(D(1)).await;
        decode_engine.stopped(D(1)).await;
        decode_engine.release(D(1));
        decode.is_quiet().await;
        decode.shows("peer_writers_cut_off_total", 1.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_was_stopped_before_it_began_never_begins() {
    let mut pair = Pair::start(Domain::Shm).await;
    let targets = pair.allocate(1, 30_000).await;
    let slots = pair.prefill_engine.bind(P(1)).await.slots;
    pair.decode.abort(D(1)).await;
    pair.decode.is_quiet().await;
    // The slots belong to somebody else now; the call that names them comes late.
    let late = pair.prefill.push(P(1), Some(targets)).await.expect_err("refused");
    assert_eq!(late.code(), tonic::Code::Aborted);
    let prompt = pair.prompt.clone();
    pair.prefill_engine.compute(P(1), &prompt, &slots, 0..4);
    pair.prefill_engine.finish(P(1), b"tail");
    pair.prefill.abort(P(1)).await;
    pair.prefill_engine.stopped(P(1)).await;
    pair.prefill_engine.release(P(1));
    pair.is_quiet().await;
    assert_eq!(pair.prefill.metric("pushed_bytes_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_gives_up_leaves_nothing() {
    let mut pair = Pair::start(Domain::Shm).await;
    for (serial, phase) in (1..).zip([Phase::Bound, Phase::Armed, Phase::HalfPushed]) {
        pair.bring_to(serial, phase, 30_000).await;
        // Nobody aborts; the leases are long.
        pair.prefill_engine.release(P(serial));
        pair.prefill.is_quiet().await;
        pair.decode_engine.release(D(serial));
        pair.is_quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_that_comes_first_refuses_the_allocation() {
    let mut pair = Pair::start(Domain::Shm).await;
    assert!(!pair.prefill.abort(P(5)).await, "unknown");
    let refused = pair.prefill.allocate(allocate(P(5), &pair.prompt)).await.expect_err("refused");
    assert_eq!(refused.code(), tonic::Code::Aborted);
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn allocating_twice_gives_one_answer_and_too_much_is_refused_whole() {
    let mut pair = Pair::start(Domain::Shm).await;
    let writer_endpoint = pair.prefill.endpoint().await;
    let request = v1::TxAllocateRequest { writer_endpoint, ..allocate(D(1), &pair.prompt) };
    let first = pair.decode.allocate(request.clone()).await.expect("room");
    assert_eq!(pair.decode.allocate(request.clone()).await.expect("the same"), first);
    pair.decode.shows("slots{state=\"allocated\"}", 4.0).await;
    let long = prompt(2, 61 * BLOCK_TOKENS);
    let request = v1::TxAllocateRequest {
        tx: Some(tx(2).into()),
        keys: kvasir_proto::BlockKey::concat(&chain(&long)),
        prompt_tokens: long.len() as u32,
        ..request
    };
    let refused = pair.decode.allocate(request).await.expect_err("too much");
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    pair.decode.shows("slots{state=\"allocated\"}", 4.0).await;
    pair.decode.abort(D(1)).await;
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tails_take_as_much_room_as_their_shares_need() {
    const SHARES: u64 = 40;
    let mut pair = Pair::start(Domain::Shm).await;
    let writer_endpoint = pair.prefill.endpoint().await;
    for serial in 1..=SHARES {
        let request = v1::TxAllocateRequest {
            writer_endpoint: writer_endpoint.clone(),
            ..allocate(D(serial), &prompt(serial as u32, BLOCK_TOKENS))
        };
        pair.decode.allocate(request).await.expect("room");
    }
    // Checksums of one page and what its engine may say: nine granules, where 1 MiB has 1,024.
    pair.decode.shows("tail_used_bytes", SHARES as f64 * 9.0 * 1024.0).await;
    for serial in 1..=SHARES {
        pair.decode.abort(D(serial)).await;
    }
    pair.decode.is_quiet().await;
    // A fetch has no engine's part.
    let request = v1::TxAllocateRequest {
        writer_endpoint,
        fetch_until_block: 3,
        ..allocate(P(99), &pair.prompt)
    };
    pair.decode.allocate(request).await.expect("room");
    pair.decode.shows("tail_used_bytes", 1024.0).await;
    pair.decode.abort(P(99)).await;
    pair.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_under_way_stops_in_the_middle() {
    for (domain, lease_ms) in
        [(Domain::Shm, 30_000), (Domain::Tcp, 30_000), (Domain::Shm, 1_500), (Domain::Tcp, 1_500)]
    {
        let by_its_lease = lease_ms < 30_000;
        let slow = |config: &mut Config| config.send_bytes_per_s_max = 4096;
        let prefill = TestNode::start_with(domain, slow).await;
        let decode = TestNode::start(domain).await;
        let prefill_engine = FakeEngine::attach(&prefill).await;
        let decode_engine = FakeEngine::attach(&decode).await;
        let prompt = prompt(1, 16 * BLOCK_TOKENS);
        let mut pair = Pair { prefill, decode, prefill_engine, decode_engine, prompt };
        let targets = pair.allocate(1, lease_ms).await;
        pair.prefill.push(P(1), Some(targets)).await.expect("armed");
        let slots = pair.prefill_engine.bind(P(1)).await.slots;
        let prompt = pair.prompt.clone();
        pair.prefill_engine.compute(P(1), &prompt, &slots, 0..16);
        pair.decode_engine.bind(D(1)).await;
        // 64 KiB at 4 KiB a second: most of it has not left when the decode side ends.
        if !by_its_lease {
            pair.decode.abort(D(1)).await;
        }
        pair.decode_engine.stopped(D(1)).await;
        pair.decode_engine.release(D(1));
        pair.decode.is_quiet().await;
        assert_eq!(pair.decode.metric("peer_writers_cut_off_total").await, 0.0, "it answered");
        if by_its_lease {
            assert!(pair.prefill_engine.stopped(P(1)).await.contains("lease"));
        } else {
            // The prefill side may go on computing: what it holds is its own.
            assert!(pair.prefill.renew(P(1), 10_000).await);
        }
        let pushed = pair.prefill.metric("pushed_bytes_total").await;
        assert!(pushed < 65_536.0, "{domain:?}: {pushed}");
        pair.prefill_engine.finish(P(1), b"tail");
        pair.prefill_engine.release(P(1));
        pair.is_quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_push_goes_on_for_as_long_as_its_leases_are_renewed() {
    let slow = |config: &mut Config| config.send_bytes_per_s_max = 12_000;
    let prefill = TestNode::start_with(Domain::Tcp, slow).await;
    let decode = TestNode::start(Domain::Tcp).await;
    let prefill_engine = FakeEngine::attach(&prefill).await;
    let decode_engine = FakeEngine::attach(&decode).await;
    let prompt = prompt(1, 16 * BLOCK_TOKENS);
    let mut pair = Pair { prefill, decode, prefill_engine, decode_engine, prompt };
    let targets = pair.allocate(1, 1_000).await;
    pair.prefill.push(P(1), Some(targets)).await.expect("armed");
    let slots = pair.prefill_engine.bind(P(1)).await.slots;
    let prompt = pair.prompt.clone();
    pair.prefill_engine.compute(P(1), &prompt, &slots, 0..16);
    pair.prefill_engine.finish(P(1), b"tail");
    pair.prefill_engine.release(P(1));
    let slots = pair.decode_engine.bind(D(1)).await.slots;
    while pair.decode_engine.unasked().is_empty() {
        // The last write and its acknowledgement end the prefill side.
        pair.prefill.renew(P(1), 1_000).await;
        assert!(pair.decode.renew(D(1), 1_000).await);
        tokio::time::sleep(std::time::Duration::from_millis(250)).await;
    }
    pair.decode_engine.holds(&prompt, &slots, 0..16);
    pair.decode_engine.release(D(1));
    pair.is_quiet().await;
}
