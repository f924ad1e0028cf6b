//! Sessions whose connections fail one after the other, through a proxy that cuts them or falls silent:
//! everything arrives, and is counted once.

use std::collections::BTreeSet;
use std::io::{Read, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, Domain, Endpoint, Expect, Handlers, Loss, PageSide, PeerEvent, Source,
    TransferConfig, TransferEngine, Verify, Write, WriteError, WritePaged, checksum,
};

const LONG: Duration = Duration::from_secs(30);
const BYTES: usize = 8 << 20;
const PAGE: usize = 32 << 10;

/// Forwards connections to a receiver, until they are cut.
struct Proxy {
    address: SocketAddr,
    pipes: Arc<Mutex<Vec<Arc<Pipe>>>>,
    /// Connections are taken, and end at once.
    is_closed: Arc<AtomicBool>,
    /// Connections come up, and end when the sender puts something on them.
    is_breaking: Arc<AtomicBool>,
    fault: Arc<Fault>,
}

/// What becomes of connections that have carried so much.
struct Fault {
    of: What,
    after_bytes: usize,
    /// So many connections more.
    left: AtomicUsize,
}

enum What {
    Cut,
    /// What they carry lands, and nobody hears of it.
    Deafen,
}

impl Fault {
    fn new(of: What, after_bytes: usize, connections: usize) -> Self {
        Fault { of, after_bytes, left: AtomicUsize::new(connections) }
    }

    fn is_due(&self, carried_bytes: usize) -> bool {
        let one_less = |left: usize| left.checked_sub(1);
        carried_bytes >= self.after_bytes
            && self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less).is_ok()
    }
}

struct Pipe {
    ends: [TcpStream; 2],
    /// Nothing goes back to the sender.
    is_deaf: AtomicBool,
    /// The receiver has said something.
    is_answered: AtomicBool,
    is_breaking: Arc<AtomicBool>,
    fault: Arc<Fault>,
}

impl Pipe {
    fn cut(&self) {
        for end in &self.ends {
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}

impl Proxy {
    fn before(receiver: SocketAddr) -> Self {
        Self::with_fault(receiver, Fault::new(What::Cut, usize::MAX, 0))
    }

    fn with_fault(receiver: SocketAddr, fault: Fault) -> Self {
        let fault = Arc::new(fault);
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let pipes: Arc<Mutex<Vec<Arc<Pipe>>>> = Arc::default();
        let is_closed = Arc::new(AtomicBool::new(false));
        let is_breaking = Arc::new(AtomicBool::new(false));
        let (all, closed) = (Arc::clone(&pipes), Arc::clone(&is_closed));
        let (breaking, faulty) = (Arc::clone(&is_breaking), Arc::clone(&fault));
        std::thread::spawn(move || {
            for from in listener.incoming() {
                if closed.load(Ordering::Relaxed) {
                    continue;
                }
                let (Ok(from), Ok(to)) = (from, TcpStream::connect(receiver)) else { return };
                let ends = [from, to];
                let [is_deaf, is_answered] = [(); 2].map(|()| AtomicBool::new(false));
                let (is_breaking, fault) = (Arc::clone(&breaking), Arc::clone(&faulty));
                let pipe = Arc::new(Pipe { ends, is_deaf, is_answered, is_breaking, fault });
                all.lock().expect("pipes").push(Arc::clone(&pipe));
                for back in [false, true] {
                    let pipe = Arc::clone(&pipe);
                    std::thread::spawn(move || forward(&pipe, back));
                }
            }
        });
        Proxy { address, pipes, is_closed, is_breaking, fault }
    }

    fn pipes(&self) -> Vec<Arc<Pipe>> {
        self.pipes.lock().expect("pipes").clone()
    }
}

fn forward(pipe: &Pipe, back: bool) {
    let [sender, receiver] = &pipe.ends;
    let (mut from, mut to) = if back { (receiver, sender) } else { (sender, receiver) };
    let mut buffer = vec![0; 64 << 10];
    let mut carried_bytes = 0;
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        let breaks = pipe.is_breaking.load(Ordering::Relaxed);
        if !back && breaks && pipe.is_answered.load(Ordering::Acquire) {
            break;
        }
        if back {
            pipe.is_answered.store(true, Ordering::Release);
        } else if !pipe.is_deaf.load(Ordering::Relaxed) && pipe.fault.is_due(carried_bytes) {
            match pipe.fault.of {
                What::Cut => break,
                What::Deafen => pipe.is_deaf.store(true, Ordering::Relaxed),
            }
        }
        carried_bytes += bytes;
        let swallowed = back && pipe.is_deaf.load(Ordering::Relaxed);
        if !swallowed && to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    pipe.cut();
}

fn start(config: TransferConfig, handlers: Handlers) -> (TransferEngine, prometheus::Registry) {
    let registry = prometheus::Registry::new();
    (TransferEngine::start(config, handlers, &registry).expect("started"), registry)
}

fn config(tcp_lanes: usize) -> TransferConfig {
    TransferConfig {
        preferred: Domain::Tcp,
        tcp_listen: Some(([127, 0, 0, 1], 0).into()),
        slice_bytes: 100_000,
        tcp_lanes,
        verify: Verify { tcp: true, shm: true, verbs: false, efa: false },
        ..TransferConfig::default()
    }
}

/// The sum of a metric over all labels that contain `label`.
fn metric(registry: &prometheus::Registry, name: &str, label: &str) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name).expect("it is registered");
    let labelled = family.get_metric().iter().filter(|metric| {
        label.is_empty() || metric.get_label().iter().any(|pair| pair.value() == label)
    });
    labelled.map(|metric| metric.get_counter().get_value() + metric.get_gauge().get_value()).sum()
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LONG, "not in time: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// What is written while connections fail.
struct Traffic {
    sender: TransferEngine,
    sent: prometheus::Registry,
    receiver: TransferEngine,
    received: prometheus::Registry,
    target: Arc<SharedMemory>,
    source: Arc<SharedMemory>,
    messages: Arc<Mutex<Vec<Vec<u8>>>>,
    ended: Arc<AtomicUsize>,
    failed: Arc<Mutex<Vec<WriteError>>>,
}

const ROUNDS: u32 = 24;
const MESSAGES: u32 = 200;

impl Traffic {
    fn new(sender: TransferConfig, receiver: TransferConfig) -> Self {
        let messages: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let heard = Arc::clone(&messages);
        let handlers = Handlers {
            on_message: Box::new(move |_, bytes| {
                heard.lock().expect("messages").push(bytes.to_vec());
            }),
            ..Handlers::default()
        };
        let (receiver, received) = start(receiver, handlers);
        let (sender, sent) = start(sender, Handlers::default());
        let memory =
            || Arc::new(SharedMemory::create("lanes", BYTES, Prefault::No).expect("memory"));
        let (target, source) = (memory(), memory());
        let bytes: Vec<u8> = (0..BYTES).map(|at| (at * 7 + (at >> 9)) as u8).collect();
        source.copy_from(0, &bytes).expect("it fits");
        let (ended, failed) = (Arc::default(), Arc::default());
        Traffic { sender, sent, receiver, received, target, source, messages, ended, failed }
    }

    fn done(&self) -> Completion {
        let (ended, failed) = (Arc::clone(&self.ended), Arc::clone(&self.failed));
        Completion::callback(move |outcome| {
            if let Err(error) = outcome {
                failed.lock().expect("failed").push(error);
            }
            ended.fetch_add(1, Ordering::Release);
        })
    }

    /// Writes everything many times, each time under another immediate, in pages and in long writes.
    fn run(&self, endpoint: &Endpoint) {
        let (handle, _) = self.sender.register(Arc::clone(&self.source)).expect("room");
        let (_region, target) = self.receiver.register(Arc::clone(&self.target)).expect("room");
        let peer = self.sender.connect(endpoint).expect("reachable");
        let half = BYTES / 2;
        let pages = (half / PAGE) as u32;
        let mut whole = vec![0; half];
        self.source.copy_to(half, &mut whole).expect("it fits");
        let sum = checksum(&whole);
        for round in 0..ROUNDS {
            let indices: Vec<u32> = (0..pages).rev().collect();
            let side = PageSide { offset: 0, stride: PAGE as u64, indices };
            let paged = WritePaged {
                peer,
                source: handle.clone(),
                source_pages: side.clone(),
                target,
                target_pages: side,
                page_bytes: PAGE,
                imm: Some(round),
                checksums: Vec::new(),
                group: u64::from(round),
                deadline: LONG,
            };
            self.sender.write_paged(paged, self.done()).expect("accepted");
            let long = Write {
                peer,
                source: Source::Region { handle: handle.clone(), offset: half, bytes: half },
                target,
                target_offset: half as u64,
                imm: Some(round),
                checksum: Some(sum),
                group: u64::from(round),
                deadline: LONG,
            };
            self.sender.write(long, self.done()).expect("accepted");
        }
        for message in 0..MESSAGES {
            let bytes = message.to_le_bytes().to_vec();
            self.sender.send(peer, bytes, LONG, self.done()).expect("accepted");
        }
        let all = (2 * ROUNDS + MESSAGES) as usize;
        until("every operation", || self.ended.load(Ordering::Acquire) == all);
        assert_eq!(*self.failed.lock().expect("failed"), []);
        self.check_counts(u64::from(pages) + 1);
        self.check_messages();
    }

    fn check_counts(&self, count: u64) {
        for round in 0..ROUNDS {
            let (done, reached) = Completion::future();
            let expect = Expect { imm: round, count, deadline: None };
            self.receiver.expect_imm(expect, done).expect("accepted");
            assert_eq!(reached.wait_timeout(LONG), Some(Ok(())), "round {round}");
        }
        until("the gauges", || metric(&self.received, "kvasir_transfer_imm_counters", "") > 0.0);
        assert_eq!(
            metric(&self.received, "kvasir_transfer_imm_excess_total", ""),
            0.0,
            "none too many"
        );
        let read = |memory: &SharedMemory| {
            let mut bytes = vec![0; BYTES];
            memory.copy_to(0, &mut bytes).expect("it fits");
            bytes
        };
        assert!(read(&self.target) == read(&self.source), "every byte is there");
    }

    fn check_messages(&self) {
        let messages = self.messages.lock().expect("messages");
        let different: BTreeSet<&Vec<u8>> = messages.iter().collect();
        assert_eq!((messages.len(), different.len()), (MESSAGES as usize, MESSAGES as usize));
    }

    fn paths_lost(&self) -> f64 {
        metric(&self.sent, "kvasir_transfer_connections_closed_total", "path_lost")
    }

    fn sessions_lost(&self) -> f64 {
        metric(&self.sent, "kvasir_transfer_connections_closed_total", "session_lost")
    }
}

/// The receiver's endpoint, with the proxy before it.
fn behind(proxy: &Proxy, receiver: &TransferEngine) -> Endpoint {
    let mut endpoint = receiver.endpoint();
    endpoint.tcp = Some(proxy.address);
    endpoint
}

#[test]
fn connections_that_are_cut_lose_nothing_and_count_nothing_twice() {
    for lanes in [1, 2, 4] {
        let traffic = Traffic::new(config(lanes), config(1));
        // All cuts together, and what the last connections carry at most without one, are less than there is to
        // carry. So each is in the middle.
        let (cuts, after_bytes) = (12, 8 << 20);
        assert!((cuts + lanes) * after_bytes < ROUNDS as usize * BYTES);
        let fault = Fault::new(What::Cut, after_bytes, cuts);
        let proxy = Proxy::with_fault(traffic.receiver.endpoint().tcp.expect("tcp"), fault);
        let endpoint = behind(&proxy, &traffic.receiver);
        traffic.run(&endpoint);
        assert_eq!(proxy.fault.left.load(Ordering::Relaxed), 0, "{lanes} lanes");
        assert!(traffic.paths_lost() >= cuts as f64, "{lanes} lanes");
        assert_eq!(traffic.sessions_lost(), 0.0);
    }
}

#[test]
fn a_connection_that_falls_silent_is_given_up_and_loses_nothing() {
    let sender = TransferConfig { peer_timeout_ms: 100, ..config(2) };
    let traffic = Traffic::new(sender, config(1));
    let fault = Fault::new(What::Deafen, 8 << 20, 2);
    let proxy = Proxy::with_fault(traffic.receiver.endpoint().tcp.expect("tcp"), fault);
    let endpoint = behind(&proxy, &traffic.receiver);
    traffic.run(&endpoint);
    assert_eq!(proxy.fault.left.load(Ordering::Relaxed), 0);
    assert!(traffic.paths_lost() >= 2.0);
    assert_eq!(traffic.sessions_lost(), 0.0);
}

#[test]
fn a_session_is_lost_when_no_connection_comes_back_in_its_grace() {
    let sender = TransferConfig { failover_grace_ms: 100, peer_timeout_ms: 30_000, ..config(2) };
    let (sender, registry) = start(sender, Handlers::default());
    let (receiver, _) = start(config(1), Handlers::default());
    let proxy = Proxy::before(receiver.endpoint().tcp.expect("tcp"));
    let peer = sender.connect(&behind(&proxy, &receiver)).expect("reachable");
    let send = || {
        let (done, sent) = Completion::future();
        sender.send(peer, b"x".to_vec(), LONG, done).expect("accepted");
        sent
    };
    assert_eq!(send().wait(), Ok(()));
    until("both lanes", || proxy.pipes().len() == 2 || send().wait().is_err());
    for pipe in proxy.pipes() {
        pipe.is_deaf.store(true, Ordering::Relaxed);
    }
    let undecided = send();
    assert_eq!(undecided.wait_timeout(Duration::from_millis(20)), None, "nobody says anything");
    proxy.is_closed.store(true, Ordering::Relaxed);
    proxy.pipes().iter().for_each(|pipe| pipe.cut());
    assert_eq!(undecided.wait(), Err(WriteError::PeerGone));
    let closed = "kvasir_transfer_connections_closed_total";
    assert_eq!(metric(&registry, closed, "session_lost"), 1.0);
}

#[test]
fn a_way_that_comes_up_and_fails_before_anything_lands_is_avoided_for_a_while() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let both = || TransferConfig { run_dir: Some(run_dir.path().to_owned()), ..config(1) };
    let (sender, _) = start(both(), Handlers::default());
    let (receiver, received) = start(both(), Handlers::default());
    let proxy = Proxy::before(receiver.endpoint().tcp.expect("tcp"));
    proxy.is_breaking.store(true, Ordering::Relaxed);
    let endpoint = behind(&proxy, &receiver);
    let send = || {
        let peer = sender.connect(&endpoint).expect("reachable");
        let (done, sent) = Completion::future();
        sender.send(peer, b"hello".to_vec(), LONG, done).expect("accepted");
        sent.wait()
    };
    assert_eq!(send(), Ok(()), "by the other domain");
    assert_eq!(proxy.pipes().len(), 2, "once may be chance");
    let messages = "kvasir_transfer_messages_total";
    assert_eq!(metric(&received, messages, "shm"), 1.0);
    // Later sessions try it again, and it is well by then.
    proxy.is_breaking.store(false, Ordering::Relaxed);
    until("another attempt", || {
        let (done, cut) = Completion::future();
        let back = receiver.connect(&sender.endpoint()).expect("reachable");
        receiver.cut_off(back, done).expect("accepted");
        assert_eq!(cut.wait(), Ok(()));
        until("the first one hears of the cut-off", || send().is_ok());
        metric(&received, messages, "tcp") >= 1.0
    });
}

#[test]
fn a_wanted_peer_behind_a_black_hole_is_lost() {
    let lost = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&lost);
    let on_peer = Box::new(move |event| told.lock().expect("events").push(event));
    let sender =
        TransferConfig { heartbeat_interval_ms: 20, heartbeat_timeout_ms: 100, ..config(1) };
    let (sender, registry) = start(sender, Handlers { on_peer, ..Handlers::default() });
    let (receiver, _) = start(config(1), Handlers::default());
    let proxy = Proxy::before(receiver.endpoint().tcp.expect("tcp"));
    let peer = sender.connect(&behind(&proxy, &receiver)).expect("reachable");
    sender.set_wanted(peer, true).expect("it is current");
    let (done, sent) = Completion::future();
    sender.send(peer, b"x".to_vec(), LONG, done).expect("accepted");
    assert_eq!(sent.wait(), Ok(()));
    proxy.pipes().iter().for_each(|pipe| pipe.is_deaf.store(true, Ordering::Relaxed));
    until("the event", || !lost.lock().expect("events").is_empty());
    let (incarnation, domain, why) = (peer.incarnation(), Some(Domain::Tcp), Loss::Silent);
    let expected = PeerEvent::SessionLost { peer, incarnation, domain, why };
    assert_eq!(*lost.lock().expect("events"), [expected]);
    let closed = "kvasir_transfer_connections_closed_total";
    assert_eq!(metric(&registry, closed, "silent"), 1.0);
}

/// A path remembers each immediate as long as it lasts, so it does not last for ever.
fn more_immediates_than_a_path_remembers(
    sender: TransferConfig,
    receiver: TransferConfig,
    socket: bool,
) {
    const WRITES: u32 = 70_000;
    let (receiver, received) = start(receiver, Handlers::default());
    let (sender, sent) = start(sender, Handlers::default());
    let memory = Arc::new(SharedMemory::create("lanes", 4096, Prefault::No).expect("memory"));
    let (_region, target) = receiver.register(memory).expect("room");
    let peer = sender.connect(&receiver.endpoint()).expect("reachable");
    let failed = Arc::new(Mutex::new(Vec::new()));
    let ended = Arc::new(AtomicUsize::new(0));
    for imm in 0..WRITES {
        if imm == WRITES / 2 && socket {
            let shm = receiver.endpoint().shm.expect("shm");
            std::fs::remove_file(shm.socket).expect("it is there");
        }
        let write = || Write {
            peer,
            source: Source::Inline(vec![1]),
            target,
            target_offset: 0,
            imm: Some(imm),
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        let done = || {
            let (failed, ended) = (Arc::clone(&failed), Arc::clone(&ended));
            Completion::callback(move |outcome| {
                failed.lock().expect("failed").extend(outcome.err());
                ended.fetch_add(1, Ordering::Release);
            })
        };
        while sender.write(write(), done()).is_err() {
            std::thread::yield_now();
        }
    }
    until("every write", || ended.load(Ordering::Acquire) == WRITES as usize);
    assert_eq!(*failed.lock().expect("failed"), []);
    let closed = "kvasir_transfer_connections_closed_total";
    assert!(metric(&sent, closed, "path_lost") >= 1.0);
    assert_eq!(metric(&sent, closed, "session_lost"), 0.0);
    let writes = "kvasir_transfer_writes_total";
    // By shm a write has landed before its receiver has counted it.
    until("every count", || metric(&received, writes, "received") >= f64::from(WRITES));
    if socket {
        assert!(metric(&sent, writes, "tcp") > 0.0, "the rest went by tcp");
    }
}

fn shm_config(run_dir: &Path) -> TransferConfig {
    TransferConfig { run_dir: Some(run_dir.to_owned()), preferred: Domain::Shm, ..config(1) }
}

#[test]
fn a_path_that_has_counted_enough_is_replaced_unnoticed() {
    more_immediates_than_a_path_remembers(config(1), config(1), false);
    let run_dir = tempfile::tempdir().expect("a directory");
    let only_shm = || TransferConfig { tcp_listen: None, ..shm_config(run_dir.path()) };
    more_immediates_than_a_path_remembers(only_shm(), only_shm(), false);
}

#[test]
fn a_session_that_cannot_go_on_by_shm_goes_on_by_tcp() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let both = || shm_config(run_dir.path());
    more_immediates_than_a_path_remembers(both(), both(), true);
}

/// The receiver learns of the end of a ring in many ways, one of them that an answer cannot be sent.
#[test]
fn what_was_pushed_into_a_ring_is_counted_though_its_writer_has_gone_on() {
    // Whether the receiver finds the message together with the question is a matter of chance.
    for _ in 0..5 {
        fill_and_leave_a_ring();
    }
}

fn fill_and_leave_a_ring() {
    // As many immediates as a path remembers, and then more.
    const FIRST: u32 = 8_192;
    const ALL: u32 = 30_000;
    let run_dir = tempfile::tempdir().expect("a directory");
    let only_shm = || TransferConfig { tcp_listen: None, ..shm_config(run_dir.path()) };
    // While the receiver is busy with the message, the second ring is filled and left as well.
    let busy = Handlers {
        on_message: Box::new(|_, _| std::thread::sleep(Duration::from_millis(100))),
        ..Handlers::default()
    };
    // A receiver that sleeps at once wakes for the question, and finds the message behind it.
    let (receiver, received) = start(TransferConfig { spin_us: 0, ..only_shm() }, busy);
    let (sender, _) = start(only_shm(), Handlers::default());
    let memory = Arc::new(SharedMemory::create("lanes", 4096, Prefault::No).expect("memory"));
    let (_region, target) = receiver.register(memory).expect("room");
    let peer = sender.connect(&receiver.endpoint()).expect("reachable");
    let ended = Arc::new(AtomicUsize::new(0));
    let write = |imm: u32| {
        let write = Write {
            peer,
            source: Source::Inline(vec![1]),
            target,
            target_offset: 0,
            imm: Some(imm),
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        let ended = Arc::clone(&ended);
        let done = Completion::callback(move |outcome| {
            assert_eq!(outcome, Ok(()));
            ended.fetch_add(1, Ordering::Release);
        });
        sender.write(write, done).expect("accepted");
    };
    (0..FIRST).for_each(write);
    until("the first path is used up", || ended.load(Ordering::Acquire) == FIRST as usize);
    sender.send(peer, b"be busy".to_vec(), LONG, Completion::Ignore).expect("accepted");
    (FIRST..ALL).for_each(write);
    until("every write", || ended.load(Ordering::Acquire) == ALL as usize);
    let writes = || metric(&received, "kvasir_transfer_writes_total", "received");
    until("every count", || writes() >= f64::from(ALL));
}
