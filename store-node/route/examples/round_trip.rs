//! How long a routed exchange takes on one host over shared memory, requester to holder and back, with both
//! sides polling: without attention (the route is not known, so that nothing is computed), and with
//! attention over as many cached rows as are asked for.
//!
//! `cargo run --release -p kvasir-route --example round_trip -- [query rows] [cached rows]`

#![allow(clippy::print_stdout)]

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use kvasir_attention::Precision;
use kvasir_proto::{Generation, Namespace, SlotIndex, SlotLayout};
use kvasir_route::holder::{Holder, HolderOptions, OpenRoute, OpenSession};
use kvasir_route::requester::{
    Grant, PartRows, QueryShape, Requester, RequesterOptions, Session, SessionSize, gather,
};
use kvasir_route::wire;
use kvasir_route::wire::{Part, WireDtype};
use kvasir_transfer::Domain;
use kvasir_transfer::memory::{Prefault, SharedMemory};
use prometheus::Registry;

const D_QK: usize = 576;
const D_V: usize = 512;
const BLOCK: usize = 64;
const ROUNDS: usize = 20_000;

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse().expect("a number"));
    let query_rows: usize = numbers.next().unwrap_or(16);
    let cached_rows: usize = numbers.next().unwrap_or(64);
    let blocks = cached_rows.div_ceil(BLOCK).max(1);
    let dir = std::env::temp_dir();
    let layout = SlotLayout::layer_major(BLOCK as u32, 1, (D_QK * 2) as u64).expect("a layout");
    let bytes = blocks * layout.slot_bytes() as usize;
    let memory = Arc::new(SharedMemory::create("slots", bytes, Prefault::Yes).expect("memory"));
    let options = HolderOptions {
        name: "holder".into(),
        preferred: Domain::Shm,
        tcp_listen: None,
        tcp_tls: None,
        run_dir: Some(dir.clone()),
        send_bytes_per_s_max: 0,
        concurrent_messages_max: 8,
        sessions_max: 1,
        routes_max: 1,
        ring_bytes_max: 64 << 20,
        threads: 1,
    };
    let holder = Holder::start(&options, &memory, &[Registry::new()], &Registry::new());
    let holder = holder.expect("a holder");
    let options = RequesterOptions {
        name: "requester".into(),
        preferred: Domain::Shm,
        tcp_listen: None,
        tcp_tls: None,
        run_dir: Some(dir),
        send_bytes_per_s_max: 0,
    };
    let requester = Requester::start(options, &Registry::new()).expect("a requester");
    let session = open(&holder, &requester, query_rows);
    let (reply, opened) = sync_channel(1);
    let route = OpenRoute {
        session: session.id(),
        route: 1,
        namespace: Namespace([0; 16]),
        blocks: (0..blocks as u32).map(|slot| (SlotIndex(slot), Generation(1))).collect(),
        layout: Arc::new(layout),
        kv_dtype: "bf16".into(),
        precision: Precision::F32,
    };
    holder.open_route(route, Box::new(move |opened| drop(reply.send(opened))));
    let pins = opened.recv().expect("an answer").expect("a route").pins;
    let values = vec![0.5f32; query_rows * D_QK];
    println!("{query_rows} query rows of {D_QK} values in bf16");
    for (what, route) in
        [("without attention".to_owned(), 2), (format!("over {cached_rows} rows"), 1)]
    {
        let part = Part {
            route,
            pins,
            first_block: 0,
            cached_rows: cached_rows as u32,
            query_rows: query_rows as u32,
        };
        let mut times = measure(&session, &PartRows { part, values: &values });
        times.sort();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100].as_nanos() as f64 / 1e3;
        println!("{what}: p50 {:.1} us, p90 {:.1} us, p99 {:.1} us", at(50), at(90), at(99));
    }
}

fn open(holder: &Holder, requester: &Requester, query_rows: usize) -> Arc<Session> {
    let dtype = WireDtype::Bf16;
    let size = SessionSize {
        query_bytes_max: wire::query_room(1, query_rows, D_QK, dtype) as u32,
        answer_bytes_max: wire::partials_room(1, query_rows, D_V, dtype) as u32,
        depth: 2,
    };
    let prepared = requester.prepare(size).expect("memory");
    let open = OpenSession {
        rank: 0,
        endpoint: requester.endpoint(),
        answers_region: prepared.answers_region(),
        answer_bytes_max: size.answer_bytes_max,
        answer_imm: prepared.answer_imm(),
        query_bytes_max: size.query_bytes_max,
        depth: size.depth,
    };
    let (reply, opened) = sync_channel(1);
    holder.open_session(open, Box::new(move |opened| drop(reply.send(opened))));
    let opened = opened.recv().expect("an answer").expect("a session");
    let grant = Grant {
        session: opened.session,
        endpoint: opened.endpoint,
        queries_region: opened.queries_region,
        query_imm: opened.query_imm,
    };
    requester.open(prepared, &grant).expect("a session")
}

fn measure(session: &Arc<Session>, part: &PartRows<'_>) -> Vec<Duration> {
    let (d_qk, d_v) = (D_QK as u32, D_V as u32);
    let shape = QueryShape { step: 0, layer: 0, dtype: WireDtype::Bf16, d_qk, d_v, scale: 0.1 };
    let deadline = Duration::from_secs(10);
    let round = |_| {
        let begun = Instant::now();
        let flight = session.dispatch(&shape, &[*part], deadline).expect("sent");
        let answer = gather(vec![flight], begun + deadline).remove(0);
        assert_eq!(answer.expect("an answer").parts.len(), 1);
        begun.elapsed()
    };
    // The first ones connect, and warm up.
    (0..ROUNDS + 1000).map(round).skip(1000).collect()
}
