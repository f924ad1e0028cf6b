//! Selection over a holder's rows: its best rows are those that a scan of all rows finds, and attention
//! over chosen rows is what it is here; what may not be answered is refused by name.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use kvasir_attention::index::IndexQuery;
use kvasir_attention::{Attention, AttentionOptions, Partial, Precision, Query, Visible};
use kvasir_proto::{Generation, Namespace, SlotIndex, SlotLayout, SlotRun};
use kvasir_route::holder::{Holder, HolderOptions, OpenRoute, OpenSession, RouteOpened, RowShape};
use kvasir_route::requester::{
    DispatchError, Flight, Grant, IndexRows, IndexShape, QueryShape, Requester, RequesterOptions,
    SelectedRows, Session, SessionSize, gather,
};
use kvasir_route::wire::{Best, Part, PartStatus, WireDtype};
use kvasir_transfer::Domain;
use kvasir_transfer::memory::{Prefault, SharedMemory};
use prometheus::Registry;

const BLOCK: usize = 4;
const LAYERS: usize = 2;
const SLOTS: usize = 8;
const D_QK: usize = 12;
const D_V: usize = 8;
/// Of the indexer.
const WIDTH: usize = 6;
const INDEX_HEADS: usize = 3;
/// Of attention: query rows of a token.
const HEADS: usize = 2;
const TOPK: u32 = 3;
/// Long beyond what any machine takes: nothing here waits for it.
const DEADLINE: Duration = Duration::from_secs(60);

/// Rows, and an indexer's keys behind them, in each layer.
fn layout(keys: bool) -> Arc<SlotLayout> {
    let (rows, key_bytes) = ((BLOCK * D_QK * 4) as u64, (BLOCK * WIDTH * 4) as u64);
    let layer = |layer: u64| {
        let at = layer * (rows + key_bytes);
        let run = |offset_bytes, length_bytes| SlotRun { offset_bytes, length_bytes };
        let both = vec![run(at, rows), run(at + rows, key_bytes)];
        if keys { both } else { both[..1].to_vec() }
    };
    let layers = (0..LAYERS as u64).map(layer).collect();
    let slot_bytes = LAYERS as u64 * (rows + key_bytes);
    Arc::new(SlotLayout::new(BLOCK as u32, slot_bytes, layers).expect("a layout"))
}

/// Numbers between -1 and 1 that look random.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

struct Host {
    holder: Holder,
    memory: Arc<SharedMemory>,
    registry: Registry,
    requester: Requester,
    session: Arc<Session>,
    _dir: tempfile::TempDir,
}

impl Host {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let bytes = SLOTS * layout(true).slot_bytes() as usize;
        let memory = SharedMemory::create("slots", bytes, Prefault::Yes).expect("memory");
        let values = numbers(1, bytes / 4);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        memory.copy_from(0, &bytes).expect("it fits");
        let memory = Arc::new(memory);
        let tcp = || Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        let options = HolderOptions {
            name: "holder".into(),
            preferred: Domain::Shm,
            tcp_listen: tcp(),
            tcp_tls: None,
            run_dir: Some(dir.path().to_owned()),
            send_bytes_per_s_max: 0,
            concurrent_messages_max: 8,
            sessions_max: 3,
            routes_max: 4,
            ring_bytes_max: 1 << 20,
            threads: 1,
        };
        let registry = Registry::new();
        let holder = Holder::start(&options, &memory, &[Registry::new()], &registry);
        let options = RequesterOptions {
            name: "requester".into(),
            preferred: Domain::Shm,
            tcp_listen: tcp(),
            tcp_tls: None,
            run_dir: Some(dir.path().to_owned()),
            send_bytes_per_s_max: 0,
        };
        let requester = Requester::start(options, &Registry::new()).expect("a requester");
        let holder = holder.expect("a holder");
        let session = session(&holder, &requester);
        Host { holder, memory, registry, requester, session, _dir: dir }
    }

    fn route(&self, route: u64, slots: &[u32], keys: bool) -> RouteOpened {
        let open = OpenRoute {
            session: self.session.id(),
            route,
            namespace: Namespace([3; 16]),
            blocks: slots.iter().map(|&slot| (SlotIndex(slot), Generation(slot))).collect(),
            layout: layout(keys),
            kv_dtype: "f32".into(),
            precision: Precision::F32,
        };
        let (reply, opened) = sync_channel(1);
        self.holder.open_route(open, Box::new(move |opened| drop(reply.send(opened))));
        opened.recv().expect("an answer").expect("a route")
    }

    /// What a scan here finds.
    fn best(&self, asked: &Asked, slots: &[u32], rows: usize, layer: usize) -> Best {
        let shape = RowShape::new(&layout(true), "f32").expect("a shape");
        let slots: Vec<SlotIndex> = slots.iter().copied().map(SlotIndex).collect();
        let offsets = shape.key_offsets(layer, &slots[..rows.div_ceil(BLOCK)]);
        // SAFETY: the test writes the memory before any holder starts, and never again.
        let keys = unsafe { shape.keys(&self.memory, &offsets, rows) }.expect("keys");
        let query = IndexQuery {
            values: &asked.values,
            weights: &asked.weights,
            heads: INDEX_HEADS,
            width: WIDTH,
            visible: Visible::All,
        };
        let kernels = Attention::new(AttentionOptions::default());
        Best(kernels.candidates(&query, &keys, TOPK as usize))
    }

    /// What attention over one token's rows gives here.
    fn attended(&self, values: &[f32], slots: &[u32], selected: &[u32]) -> Partial {
        let shape = RowShape::new(&layout(true), "f32").expect("a shape");
        let slots: Vec<SlotIndex> = slots.iter().copied().map(SlotIndex).collect();
        let offsets = shape.offsets(1, &slots);
        // SAFETY: as above.
        let pages = unsafe { shape.rows(&self.memory, &offsets, slots.len() * BLOCK) };
        let pages = pages.expect("pages");
        let query = Query { values, d_qk: D_QK, d_v: D_V, scale: 0.5, visible: Visible::All };
        let mut partial = Partial::empty(values.len() / D_QK, D_V);
        let mut kernels = Attention::new(AttentionOptions::default());
        let pages = pages.select(selected).expect("rows that are there");
        kernels.attend(&query, &pages, partial.as_mut());
        partial
    }

    fn count(&self, name: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name).expect("a metric");
        family.get_metric().iter().map(|metric| metric.get_counter().get_value()).sum::<f64>()
            as u64
    }
}

fn session(holder: &Holder, requester: &Requester) -> Arc<Session> {
    let size = SessionSize { query_bytes_max: 8192, answer_bytes_max: 2048, depth: 2 };
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

struct Asked {
    values: Vec<f32>,
    weights: Vec<f32>,
}

impl Asked {
    fn new(seed: u64, tokens: usize) -> Self {
        let weights = numbers(seed, tokens * INDEX_HEADS);
        Asked { values: numbers(seed + 1, weights.len() * WIDTH), weights }
    }

    fn part(&self, route: u64, opened: RouteOpened, cached_rows: u32) -> IndexRows<'_> {
        let query_rows = self.weights.len() as u32;
        let part = Part { route, pins: opened.pins, first_block: 0, cached_rows, query_rows };
        IndexRows { part, values: &self.values, weights: &self.weights }
    }
}

fn index(layer: u32) -> IndexShape {
    let (heads, width) = (INDEX_HEADS as u32, WIDTH as u32);
    IndexShape { step: 5, layer, heads, width, topk: TOPK }
}

fn shape(dtype: WireDtype) -> QueryShape {
    QueryShape { step: 5, layer: 1, dtype, d_qk: D_QK as u32, d_v: D_V as u32, scale: 0.5 }
}

fn wait<R: kvasir_route::wire::Reply>(flight: Flight<R>) -> Vec<Result<R, PartStatus>> {
    gather(vec![flight], Instant::now() + DEADLINE).remove(0).expect("an answer").parts
}

#[test]
fn a_holder_finds_the_rows_that_a_scan_of_its_keys_finds() {
    let host = Host::start();
    let one = host.route(1, &[2, 0, 5], true);
    let two = host.route(2, &[7], true);
    let (first, second) = (Asked::new(2, 4), Asked::new(4, 1));
    for layer in 0..LAYERS as u32 {
        // The last part has fewer rows than are wanted.
        let parts = [first.part(1, one, 10), second.part(2, two, 4), second.part(2, two, 2)];
        let sent = host.session.dispatch_scores(&index(layer), &parts, DEADLINE).expect("sent");
        let got = wait(sent);
        let layer = layer as usize;
        assert_eq!(got[0], Ok(host.best(&first, &[2, 0, 5], 10, layer)));
        assert_eq!(got[1], Ok(host.best(&second, &[7], 4, layer)));
        assert_eq!(got[2], Ok(host.best(&second, &[7], 2, layer)));
        assert_eq!(got[2].as_ref().map(|best| best.0[0].len()), Ok(2));
    }
    let layers = LAYERS as u64;
    let query_bytes = layers * (6 * INDEX_HEADS * (WIDTH + 1) * 4) as u64;
    let best_bytes = layers * (4 * 3 + 3 + 2) * 8;
    assert_eq!(host.count("kvasir_route_query_bytes_total"), query_bytes);
    assert_eq!(host.count("kvasir_route_partial_bytes_total"), best_bytes);
    let sent = host.requester.metrics();
    assert_eq!((sent.query_bytes.get(), sent.partial_bytes.get()), (query_bytes, best_bytes));
}

#[test]
fn tokens_attend_the_rows_that_were_chosen_for_them_and_no_others() {
    let host = Host::start();
    let (slots, other) = ([2, 0, 5], [7]);
    let routes = [host.route(1, &slots, true), host.route(2, &other, true)];
    let values = numbers(6, 3 * HEADS * D_QK);
    let lists: [&[u32]; 3] = [&[0, 11], &[3], &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]];
    let of = |route: usize, cached_rows, tokens: std::ops::Range<usize>| {
        let query_rows = (tokens.len() * HEADS) as u32;
        let (route, pins) = (route as u64 + 1, routes[route].pins);
        let part = Part { route, pins, first_block: 0, cached_rows, query_rows };
        let values = &values[tokens.start * HEADS * D_QK..tokens.end * HEADS * D_QK];
        SelectedRows { part, values, selected: &lists[tokens] }
    };
    let parts = [of(0, 12, 0..3), of(1, 4, 1..2)];
    for dtype in [WireDtype::F32, WireDtype::Bf16] {
        let shape = shape(dtype);
        let sent = host.session.dispatch_selected(&shape, HEADS as u32, &parts, DEADLINE);
        let got = wait(sent.expect("sent"));
        let tolerance = if dtype == WireDtype::F32 { 1e-6 } else { 0.02 };
        let near = |got: &[f32], want: &[f32]| {
            let near =
                |(got, want): (&f32, &f32)| (got - want).abs() <= tolerance * want.abs().max(1.0);
            assert!(got.len() == want.len() && got.iter().zip(want).all(near), "{got:?}, {want:?}");
        };
        let check = |part: usize, place: usize, token: usize, slots: &[u32]| {
            let query = &values[token * HEADS * D_QK..][..HEADS * D_QK];
            let want = host.attended(query, slots, lists[token]);
            let got = got[part].as_ref().expect("computed");
            near(&got.o[place * HEADS * D_V..][..HEADS * D_V], &want.o);
            near(&got.m[place * HEADS..][..HEADS], &want.m);
            near(&got.l[place * HEADS..][..HEADS], &want.l);
        };
        (0..3).for_each(|token| check(0, token, token, &slots));
        check(1, 0, 1, &other);
    }
}

#[test]
fn what_may_not_be_scored_is_refused_by_name_and_the_rest_is_not() {
    let host = Host::start();
    let (mine, plain) = (host.route(1, &[2, 0], true), host.route(2, &[3], false));
    let asked = Asked::new(8, 1);
    let stale = RouteOpened { pins: mine.pins ^ 1, ..mine };
    let parts = [
        asked.part(1, mine, 8),
        asked.part(2, plain, 4),
        asked.part(9, mine, 4),
        asked.part(1, stale, 4),
        asked.part(1, mine, 9),
    ];
    let sent = host.session.dispatch_scores(&index(0), &parts, DEADLINE).expect("sent");
    let got = wait(sent);
    assert!(got[0].is_ok());
    let refused: Vec<PartStatus> = got[1..].iter().filter_map(|part| part.clone().err()).collect();
    let expected = [
        PartStatus::OtherShape,
        PartStatus::NoRoute,
        PartStatus::OtherPins,
        PartStatus::OutOfRange,
    ];
    assert_eq!(refused, expected);
    let deep = host.session.dispatch_scores(&index(LAYERS as u32), &parts[..1], DEADLINE);
    assert_eq!(wait(deep.expect("sent")), [Err(PartStatus::OutOfRange)]);
    let wide = IndexShape { width: D_QK as u32, ..index(0) };
    let other = IndexRows { values: &numbers(9, INDEX_HEADS * D_QK), ..asked.part(1, mine, 4) };
    let sent = host.session.dispatch_scores(&wide, &[other], DEADLINE).expect("sent");
    assert_eq!(wait(sent), [Err(PartStatus::OtherShape)]);
    // A row that a part does not have: nothing of the message is answered.
    let query = numbers(10, HEADS * D_QK);
    let part = Part { query_rows: HEADS as u32, ..asked.part(1, mine, 8).part };
    let beyond = SelectedRows { part, values: &query, selected: &[&[3, 8]] };
    let sent =
        host.session.dispatch_selected(&shape(WireDtype::F32), HEADS as u32, &[beyond], DEADLINE);
    let answer = gather(vec![sent.expect("sent")], Instant::now() + DEADLINE).remove(0);
    assert_eq!(answer.expect("an answer").status, kvasir_route::wire::MessageStatus::Malformed);
}

#[test]
fn more_than_a_ring_has_room_for_is_not_sent() {
    let host = Host::start();
    let route = host.route(1, &[0, 1, 2, 3, 4, 5, 6, 7], true);
    let asked = Asked::new(11, 16);
    // 16 tokens of 32 rows each: more than 2,048 bytes of rows and scores.
    let all = IndexShape { topk: 32, ..index(0) };
    let long = host.session.dispatch_scores(&all, &[asked.part(1, route, 32)], DEADLINE);
    assert!(matches!(long, Err(DispatchError::TooLong { .. })));
    let sent = host.session.dispatch_scores(&index(0), &[asked.part(1, route, 32)], DEADLINE);
    assert!(wait(sent.expect("sent"))[0].is_ok());
}
