//! A holder and requesters in one process, over both domains: what comes back is what attention over the
//! same rows gives, and what may not be answered is refused by name.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use kvasir_attention::{Attention, AttentionOptions, Partial, Precision, Query, Visible, merge};
use kvasir_proto::{Generation, Namespace, SlotIndex, SlotLayout};
use kvasir_route::holder::{
    Holder, HolderOptions, OpenError, OpenRoute, OpenSession, RouteOpened, RowShape,
};
use kvasir_route::requester::{
    DispatchError, Flight, FlightError, Grant, PartRows, QueryShape, Requester, RequesterOptions,
    Session, SessionSize, gather,
};
use kvasir_route::wire;
use kvasir_route::wire::{MessageStatus, Part, PartStatus, WireDtype};
use kvasir_transfer::Domain;
use kvasir_transfer::memory::{Prefault, SharedMemory};
use prometheus::Registry;

const BLOCK: usize = 4;
const LAYERS: usize = 2;
const D_QK: usize = 12;
const D_V: usize = 8;
const SLOTS: usize = 8;
const NAMESPACE: Namespace = Namespace([3; 16]);
/// Long beyond what any machine takes: nothing here waits for it.
const DEADLINE: Duration = Duration::from_secs(60);

fn layout() -> Arc<SlotLayout> {
    let row_bytes = (D_QK * 4) as u64;
    Arc::new(SlotLayout::layer_major(BLOCK as u32, LAYERS, row_bytes).expect("a layout"))
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
    holder: Option<Holder>,
    memory: Arc<SharedMemory>,
    registry: Registry,
    domain: Domain,
    _dir: tempfile::TempDir,
}

fn tcp() -> Option<SocketAddr> {
    Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

impl Host {
    fn start(domain: Domain, concurrent_messages_max: usize) -> Self {
        Host::of_ranks(1, domain, concurrent_messages_max, 1 << 20)
    }

    fn of_ranks(
        ranks: usize,
        domain: Domain,
        concurrent_messages_max: usize,
        ring_bytes_max: u64,
    ) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let bytes = SLOTS * layout().slot_bytes() as usize;
        let memory = SharedMemory::create("slots", bytes, Prefault::Yes).expect("memory");
        let values = numbers(1, bytes / 4);
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        memory.copy_from(0, &bytes).expect("it fits");
        let memory = Arc::new(memory);
        let registry = Registry::new();
        let options = HolderOptions {
            name: "holder".into(),
            preferred: domain,
            tcp_listen: tcp(),
            tcp_tls: None,
            run_dir: (domain == Domain::Shm).then(|| dir.path().to_owned()),
            send_bytes_per_s_max: 0,
            concurrent_messages_max,
            sessions_max: 3,
            routes_max: 4,
            ring_bytes_max,
            threads: 1,
        };
        let transfers: Vec<Registry> = (0..ranks).map(|_| Registry::new()).collect();
        let holder = Holder::start(&options, &memory, &transfers, &registry);
        let holder = Some(holder.expect("a holder"));
        Host { holder, memory, registry, domain, _dir: dir }
    }

    fn holder(&self) -> &Holder {
        self.holder.as_ref().expect("it runs")
    }

    fn requester(&self) -> Requester {
        let options = RequesterOptions {
            name: "requester".into(),
            preferred: self.domain,
            tcp_listen: tcp(),
            tcp_tls: None,
            run_dir: (self.domain == Domain::Shm).then(|| self._dir.path().to_owned()),
            send_bytes_per_s_max: 0,
        };
        Requester::start(options, &Registry::new()).expect("a requester")
    }

    fn session(&self, requester: &Requester) -> Result<Arc<Session>, OpenError> {
        self.session_of(0, requester)
    }

    fn session_of(&self, rank: u32, requester: &Requester) -> Result<Arc<Session>, OpenError> {
        let size = SessionSize { query_bytes_max: 8192, answer_bytes_max: 8192, depth: 2 };
        let prepared = requester.prepare(size).expect("memory");
        let open = OpenSession {
            rank,
            endpoint: requester.endpoint(),
            answers_region: prepared.answers_region(),
            answer_bytes_max: size.answer_bytes_max,
            answer_imm: prepared.answer_imm(),
            query_bytes_max: size.query_bytes_max,
            depth: size.depth,
        };
        let (reply, opened) = sync_channel(1);
        self.holder().open_session(open, Box::new(move |opened| drop(reply.send(opened))));
        let opened = opened.recv().expect("an answer")?;
        let grant = Grant {
            session: opened.session,
            endpoint: opened.endpoint,
            queries_region: opened.queries_region,
            query_imm: opened.query_imm,
        };
        Ok(requester.open(prepared, &grant).expect("a session"))
    }

    fn route(&self, session: u64, route: u64, slots: &[u32]) -> Result<RouteOpened, OpenError> {
        self.route_in(Precision::F32, session, route, slots)
    }

    fn route_in(
        &self,
        precision: Precision,
        session: u64,
        route: u64,
        slots: &[u32],
    ) -> Result<RouteOpened, OpenError> {
        let open = OpenRoute {
            session,
            route,
            namespace: NAMESPACE,
            blocks: slots.iter().map(|&slot| (SlotIndex(slot), Generation(slot))).collect(),
            layout: layout(),
            kv_dtype: "f32".into(),
            precision,
        };
        let (reply, opened) = sync_channel(1);
        self.holder().open_route(open, Box::new(move |opened| drop(reply.send(opened))));
        opened.recv().expect("an answer")
    }

    fn close_route(&self, route: u64) {
        let (done, closed) = sync_channel(1);
        self.holder()
            .close_route(route, Box::new(move |()| done.send(()).expect("somebody waits")));
        closed.recv().expect("it is closed");
    }

    /// What attention over these rows gives here.
    fn expected(&self, values: &[f32], slots: &[u32], rows: usize, layer: usize) -> Partial {
        let shape = RowShape::new(&layout(), "f32").expect("a shape");
        let slots: Vec<SlotIndex> = slots.iter().copied().map(SlotIndex).collect();
        let offsets = shape.offsets(layer, &slots[..rows.div_ceil(BLOCK)]);
        // SAFETY: the test writes the memory before any holder starts, and never again.
        let pages = unsafe { shape.rows(&self.memory, &offsets, rows) }.expect("pages");
        let query = Query { values, d_qk: D_QK, d_v: D_V, scale: 0.5, visible: Visible::All };
        let mut partial = Partial::empty(values.len() / D_QK, D_V);
        let mut kernels = Attention::new(AttentionOptions::default());
        kernels.attend(&query, &pages, partial.as_mut());
        partial
    }

    fn count(&self, name: &str) -> f64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name).expect("a metric");
        family.get_metric().iter().map(|metric| metric.get_counter().get_value()).sum()
    }
}

fn shape(layer: u32) -> QueryShape {
    let (d_qk, d_v) = (D_QK as u32, D_V as u32);
    QueryShape { step: 5, layer, dtype: WireDtype::F32, d_qk, d_v, scale: 0.5 }
}

fn part(route: u64, opened: RouteOpened, cached_rows: u32, values: &[f32]) -> PartRows<'_> {
    let query_rows = (values.len() / D_QK) as u32;
    let part = Part { route, pins: opened.pins, first_block: 0, cached_rows, query_rows };
    PartRows { part, values }
}

fn send(session: &Arc<Session>, parts: &[PartRows<'_>]) -> Flight {
    session.dispatch(&shape(1), parts, DEADLINE).expect("sent")
}

fn wait(flights: Vec<Flight>) -> Vec<Vec<Result<Partial, PartStatus>>> {
    let answers = gather(flights, Instant::now() + DEADLINE);
    answers.into_iter().map(|answer| answer.expect("an answer").parts).collect()
}

/// Equal but for the order in which a batch may add up.
fn close(got: &Partial, expected: &Partial) {
    let near = |got: &[f32], expected: &[f32]| {
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(expected) {
            assert!((got - expected).abs() <= 1e-5 * expected.abs().max(1.0), "{got} {expected}");
        }
    };
    near(&got.o, &expected.o);
    near(&got.m, &expected.m);
    near(&got.l, &expected.l);
}

fn check_parts_come_back(domain: Domain) {
    let host = Host::start(domain, 8);
    let requester = host.requester();
    let session = host.session(&requester).expect("a session");
    assert_eq!(host.route(session.id(), 1, &[2, 0, 5]).expect("a route").d_qk, D_QK as u32);
    let one = host.route(session.id(), 1, &[2, 0, 5]).expect("a route");
    let two = host.route(session.id(), 2, &[7]).expect("a route");
    let (first, second) = (numbers(2, 3 * D_QK), numbers(3, D_QK));
    for _ in 0..5 {
        let parts = [part(1, one, 10, &first), part(2, two, 4, &second)];
        let answers = wait(vec![send(&session, &parts)]);
        close(answers[0][0].as_ref().expect("computed"), &host.expected(&first, &[2, 0, 5], 10, 1));
        close(answers[0][1].as_ref().expect("computed"), &host.expected(&second, &[7], 4, 1));
    }
    let rows = 5 * 4;
    assert_eq!(host.count("kvasir_route_query_bytes_total"), (rows * D_QK * 4) as f64);
    assert_eq!(host.count("kvasir_route_partial_bytes_total"), (rows * (D_V * 4 + 8)) as f64);
    let metrics = requester.metrics();
    assert_eq!(metrics.query_bytes.get(), (rows * D_QK * 4) as u64);
    assert_eq!(metrics.partial_bytes.get(), (rows * (D_V * 4 + 8)) as u64);
}

#[test]
fn partials_come_back_as_attention_gives_them_over_shm() {
    check_parts_come_back(Domain::Shm);
}

#[test]
fn partials_come_back_as_attention_gives_them_over_tcp() {
    check_parts_come_back(Domain::Tcp);
}

#[test]
fn partials_of_several_holders_merge_to_attention_over_all_rows() {
    let hosts = [Host::start(Domain::Shm, 8), Host::start(Domain::Shm, 8)];
    let requester = hosts[0].requester();
    let values = numbers(4, 2 * D_QK);
    let mut flights = Vec::new();
    for (host, slots) in hosts.iter().zip([[1u32, 2], [3, 4]]) {
        let session = host.session(&requester).expect("a session");
        let route = host.route(session.id(), 1, &slots).expect("a route");
        flights.push(send(&session, &[part(1, route, 8, &values)]));
    }
    let partials: Vec<Partial> = wait(flights)
        .into_iter()
        .map(|mut parts| parts.pop().expect("one part").expect("computed"))
        .collect();
    // Both have the same bytes in their slots.
    close(&merge(&partials, D_V), &hosts[0].expected(&values, &[1, 2, 3, 4], 16, 1));
}

#[test]
fn a_part_that_may_not_be_answered_is_refused_by_name_and_the_others_are_not() {
    let host = Host::start(Domain::Shm, 8);
    let requester = host.requester();
    let session = host.session(&requester).expect("a session");
    let other = host.session(&requester).expect("a session");
    let mine = host.route(session.id(), 1, &[2, 0]).expect("a route");
    let theirs = host.route(other.id(), 2, &[3]).expect("a route");
    let values = numbers(5, D_QK);
    let stale = RouteOpened { pins: mine.pins ^ 1, ..mine };
    let parts = [
        part(1, mine, 8, &values),
        part(2, theirs, 4, &values),
        part(9, mine, 4, &values),
        part(1, stale, 4, &values),
        part(1, mine, 9, &values),
    ];
    let answers = wait(vec![send(&session, &parts)]).remove(0);
    assert!(answers[0].is_ok());
    let refused: Vec<PartStatus> = answers[1..].iter().filter_map(|a| a.clone().err()).collect();
    let expected =
        [PartStatus::NoRoute, PartStatus::NoRoute, PartStatus::OtherPins, PartStatus::OutOfRange];
    assert_eq!(refused, expected);
    let deep = QueryShape { layer: LAYERS as u32, ..shape(0) };
    let flight = session.dispatch(&deep, &[part(1, mine, 4, &values)], DEADLINE).expect("sent");
    assert_eq!(wait(vec![flight])[0][0], Err(PartStatus::OutOfRange));
    let narrow = QueryShape { d_qk: 6, d_v: 4, ..shape(0) };
    let half = PartRows {
        part: Part { query_rows: 2, ..part(1, mine, 4, &values).part },
        values: &values,
    };
    let flight = session.dispatch(&narrow, &[half], DEADLINE).expect("sent");
    assert_eq!(wait(vec![flight])[0][0], Err(PartStatus::OtherShape));

    // A lease that is over: the route is closed, and what comes later is refused.
    host.close_route(1);
    let answers = wait(vec![send(&session, &[part(1, mine, 4, &values)])]);
    assert_eq!(answers[0][0], Err(PartStatus::NoRoute));
}

#[test]
fn rings_of_running_ranks_have_one_budget() {
    // A ring has two slots of 8 KiB.
    let host = Host::of_ranks(2, Domain::Shm, 8, 40 << 10);
    let requester = host.requester();
    let first = host.session_of(0, &requester).expect("a session");
    let second = host.session_of(1, &requester).expect("a session");
    for rank in 0..2 {
        let third = host.session_of(rank, &requester);
        assert!(matches!(third, Err(OpenError::NoSpace(_))), "rank {rank}");
    }
    // What one rank gives back the other may have.
    host.holder().close_session(first.id());
    let end = Instant::now() + DEADLINE;
    let again = loop {
        match host.session_of(1, &requester) {
            Ok(session) => break session,
            // Each rank has a thread of its own.
            Err(OpenError::NoSpace(_)) if Instant::now() < end => std::thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    };
    assert_ne!(again.id(), second.id());
}

#[test]
fn what_does_not_fit_is_not_opened_and_not_sent() {
    let host = Host::start(Domain::Shm, 8);
    let requester = host.requester();
    let session = host.session(&requester).expect("a session");
    assert!(matches!(host.route(session.id() + 77, 1, &[0]), Err(OpenError::NoSession)));
    for route in 0..4 {
        host.route(session.id(), route, &[0]).expect("a route");
    }
    assert!(matches!(host.route(session.id(), 9, &[0]), Err(OpenError::NoSpace(_))));
    for _ in 0..2 {
        host.session(&requester).expect("a session");
    }
    assert!(matches!(host.session(&requester), Err(OpenError::NoSpace(_))));
    host.holder().close_session(session.id());
    host.session(&requester).expect("there is room again");

    let mine = host.route(session.id(), 1, &[0]);
    assert!(matches!(mine, Err(OpenError::NoSession)), "its session is closed");
    let rows = numbers(6, 1000 * D_QK);
    let opened = RouteOpened { pins: 0, d_qk: D_QK as u32 };
    let long = session.dispatch(&shape(0), &[part(1, opened, 4, &rows)], DEADLINE);
    assert!(matches!(long, Err(DispatchError::TooLong { .. })));
}

#[test]
fn a_holder_past_its_limit_says_so() {
    // No flow at all, so that it does not depend on what arrives together.
    let host = Host::start(Domain::Shm, 0);
    let requester = host.requester();
    let session = host.session(&requester).expect("a session");
    let route = host.route(session.id(), 1, &[0]).expect("a route");
    let values = numbers(7, D_QK);
    let flight = send(&session, &[part(1, route, 4, &values)]);
    let answer = gather(vec![flight], Instant::now() + DEADLINE).remove(0).expect("an answer");
    assert_eq!((answer.status, answer.parts.len()), (MessageStatus::Busy, 0));
}

#[test]
fn a_lost_holder_ends_what_is_under_way() {
    let mut host = Host::start(Domain::Shm, 8);
    let requester = host.requester();
    let session = host.session(&requester).expect("a session");
    let route = host.route(session.id(), 1, &[0]).expect("a route");
    let values = numbers(8, D_QK);
    // It is known, and then gone.
    assert!(wait(vec![send(&session, &[part(1, route, 4, &values)])])[0][0].is_ok());
    host.holder = None;
    let lost = match session.dispatch(&shape(1), &[part(1, route, 4, &values)], DEADLINE) {
        Ok(flight) => gather(vec![flight], Instant::now() + DEADLINE).remove(0).err(),
        Err(DispatchError::Lost) => Some(FlightError::Lost),
        Err(other) => panic!("{other}"),
    };
    assert_eq!(lost, Some(FlightError::Lost));
    assert!(session.is_lost());
}

#[test]
fn the_loss_of_a_holder_is_noticed_between_two_queries() {
    let mut host = Host::start(Domain::Shm, 8);
    let requester = host.requester();
    let (one, other) = (host.session(&requester), host.session(&requester));
    let sessions = [one.expect("a session"), other.expect("a session")];
    let route = host.route(sessions[0].id(), 1, &[0]).expect("a route");
    let values = numbers(10, D_QK);
    assert!(wait(vec![send(&sessions[0], &[part(1, route, 4, &values)])])[0][0].is_ok());
    host.holder = None;
    let begun = Instant::now();
    while !sessions.iter().all(|session| session.is_lost()) {
        assert!(begun.elapsed() < DEADLINE, "the loss is not noticed");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn who_does_not_wait_gets_no_answer_and_its_slot_is_used_again_only_afterwards() {
    let host = Host::start(Domain::Shm, 8);
    let requester = host.requester();
    let session = host.session(&requester).expect("a session");
    let route = host.route(session.id(), 1, &[0]).expect("a route");
    let values = numbers(9, D_QK);
    for _ in 0..20 {
        // The time is over at once: whether the answer has come by then or not, the next exchanges work.
        let flights = vec![send(&session, &[part(1, route, 4, &values)])];
        match gather(flights, Instant::now()).remove(0) {
            Ok(answer) => assert!(answer.parts[0].is_ok()),
            Err(error) => assert_eq!(error, FlightError::Late),
        }
        let begun = Instant::now();
        let flight = loop {
            match session.dispatch(&shape(1), &[part(1, route, 4, &values)], DEADLINE) {
                Ok(flight) => break flight,
                Err(error) => assert_eq!(error, DispatchError::Full),
            }
            assert!(begun.elapsed() < DEADLINE, "no slot comes free");
            std::thread::yield_now();
        };
        let answer = wait(vec![flight]).remove(0).remove(0).expect("computed");
        close(&answer, &host.expected(&values, &[0], 4, 1));
    }
}

#[test]
fn what_is_asked_in_another_precision_is_computed_apart() {
    let host = Host::start(Domain::Shm, 8);
    let requester = host.requester();
    let session = host.session(&requester).expect("a session");
    let values = numbers(11, 2 * D_QK);
    let precisions = [Precision::F32, Precision::F32, Precision::Bf16];
    let routes = (1..).zip(precisions).map(|(name, precision)| {
        let opened = host.route_in(precision, session.id(), name, &[0, 1]).expect("a route");
        part(name, opened, 8, &values)
    });
    let parts: Vec<PartRows<'_>> = routes.collect();
    let answers = wait(vec![send(&session, &parts)]).remove(0);
    for answer in answers {
        // Rows of f32 are rounded by nobody.
        close(&answer.expect("computed"), &host.expected(&values, &[0, 1], 8, 1));
    }
    assert_eq!(host.count("kvasir_route_groups_total"), 2.0);
}

#[test]
fn rows_on_the_wire_may_be_rounded() {
    let host = Host::start(Domain::Shm, 8);
    let requester = host.requester();
    let session = host.session(&requester).expect("a session");
    let route = host.route(session.id(), 1, &[0, 1]).expect("a route");
    let values = numbers(10, 2 * D_QK);
    let rounded = QueryShape { dtype: WireDtype::Bf16, ..shape(0) };
    let flight = session.dispatch(&rounded, &[part(1, route, 8, &values)], DEADLINE).expect("sent");
    let partial = wait(vec![flight]).remove(0).remove(0).expect("computed");
    let expected = host.expected(&values, &[0, 1], 8, 0);
    for (got, expected) in partial.o.iter().zip(&expected.o) {
        assert!((got - expected).abs() < 0.02, "{got} {expected}");
    }
    let bytes = wire::query_bytes(2, D_QK, WireDtype::Bf16) as u64;
    assert_eq!(requester.metrics().query_bytes.get(), bytes);
}
