//! What concerns RDMA only. Where a test needs a device and there is none, it is skipped.

use std::io::{Read, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, CompletionFuture, Domain, Endpoint, Expect, Handlers, Handshake, Outcome, PeerId,
    Refusal, RegionDesc, RegionHandle, Source, StartError, TransferConfig, TransferEngine,
    VerbsConfig, Write, WriteError,
};

use crate::device;
use crate::engine::{counter, start, tcp_config};
use crate::hostile::pass_greeting;

pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) fn config(change: impl FnOnce(&mut VerbsConfig)) -> Option<TransferConfig> {
    let mut verbs = device::named()?.clone();
    change(&mut verbs);
    let config = TransferConfig { preferred: Domain::Verbs, verbs: Some(verbs), ..tcp_config() };
    Some(config)
}

pub(crate) struct Side {
    pub engine: TransferEngine,
    pub registry: prometheus::Registry,
}

impl Side {
    pub(crate) fn new(config: TransferConfig) -> Self {
        let (engine, registry) = start(config);
        Side { engine, registry }
    }

    pub(crate) fn region(&self, bytes: usize) -> (RegionHandle, RegionDesc) {
        let memory = SharedMemory::create("t", bytes, Prefault::No).expect("memory");
        self.engine.register(Arc::new(memory)).expect("room")
    }

    pub(crate) fn peer(&self, to: &Side) -> PeerId {
        let endpoint = to.engine.endpoint().to_bytes();
        let endpoint = Endpoint::from_bytes(&endpoint).expect("it survives the wire");
        self.engine.connect(&endpoint).expect("reachable")
    }

    pub(crate) fn write(&self, write: Write) -> CompletionFuture {
        let (done, written) = Completion::future();
        self.engine.write(write, done).expect("accepted");
        written
    }

    pub(crate) fn expect(&self, imm: u32, count: u64) -> CompletionFuture {
        let (done, reached) = Completion::future();
        self.engine.expect_imm(Expect { imm, count, deadline: None }, done).expect("accepted");
        reached
    }

    pub(crate) fn revoke(&self, region: &RegionHandle) {
        let (done, revoked) = Completion::future();
        self.engine.revoke(region, done).expect("accepted");
        assert_eq!(outcome(&revoked), Ok(()));
    }

    pub(crate) fn closed(&self, reason: &str) -> f64 {
        self.closed_by("verbs", reason)
    }

    pub(crate) fn closed_by(&self, domain: &str, reason: &str) -> f64 {
        let labels = [domain, reason];
        counter(&self.registry, "kvasir_transfer_connections_closed_total", &labels)
    }

    /// How often a way was left alone for a moment, because it had ended again and again.
    pub(crate) fn paused(&self, domain: Domain) -> f64 {
        counter(&self.registry, "kvasir_transfer_paths_paused_total", &[domain.label()])
    }

    pub(crate) fn sent(&self, domain: Domain) -> f64 {
        counter(&self.registry, "kvasir_transfer_bytes_total", &[domain.label(), "sent"])
    }
}

pub(crate) fn outcome(future: &CompletionFuture) -> Outcome {
    future.wait_timeout(LONG).expect("every operation ends")
}

pub(crate) fn inline(peer: PeerId, target: RegionDesc, bytes: Vec<u8>, imm: u32) -> Write {
    Write {
        peer,
        source: Source::Inline(bytes),
        target,
        target_offset: 0,
        imm: Some(imm),
        checksum: None,
        group: 0,
        deadline: LONG,
    }
}

pub(crate) fn read(region: &RegionHandle, offset: usize, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; bytes];
    region.memory().copy_to(offset, &mut copy).expect("it fits");
    copy
}

#[test]
fn without_the_device_an_engine_says_in_a_sentence_what_is_missing() {
    let devices = vec!["no-such-device".parse().expect("a name")];
    let verbs = VerbsConfig { devices, ..VerbsConfig::default() };
    let start = |config| {
        TransferEngine::start(config, Handlers::default(), &prometheus::Registry::new())
            .expect_err("it cannot start")
    };
    let config = TransferConfig { verbs: Some(verbs.clone()), ..tcp_config() };
    let error = start(config);
    assert!(matches!(error, StartError::Card("verbs", _)), "{error:?}");
    let said = error.to_string();
    assert!(said.contains("libibverbs") || said.contains("`no-such-device`"), "{said}");
    let alone = TransferConfig { verbs: Some(verbs), ..TransferConfig::default() };
    let run_dir = tempfile::tempdir().expect("a directory");
    let alone = TransferConfig { run_dir: Some(run_dir.path().to_owned()), ..alone };
    assert!(matches!(start(alone), StartError::RdmaWithoutTcp));
}

/// Whoever asks for a card where there is none, or says nothing that makes sense of its own, is told no,
/// and its neighbours go on.
#[test]
fn a_greeting_for_a_card_that_is_not_there_is_declined() {
    for side in [Some(tcp_config()), config(|_| {})].into_iter().flatten().map(Side::new) {
        let (region, descriptor) = side.region(64);
        let endpoint = side.engine.endpoint();
        for (domain, card) in
            [(3, vec![0xff; 56]), (3, Vec::new()), (2, vec![0; 56]), (99, vec![1])]
        {
            let mut stream = TcpStream::connect(endpoint.tcp.expect("tcp")).expect("taken");
            stream.set_read_timeout(Some(LONG)).expect("set");
            stream.write_all(&greeting(&endpoint, domain, &card)).expect("sent");
            let mut reply = Vec::new();
            stream.read_to_end(&mut reply).expect("an end, and no silence");
            // `Admission::NoCard`, as the first field.
            assert_eq!(reply.get(8..10), Some([8, 6].as_slice()), "{domain}: {reply:?}");
        }
        let other = Side::new(tcp_config());
        let write = inline(other.peer(&side), descriptor, b"well".to_vec(), 1);
        assert_eq!(outcome(&other.write(write)), Ok(()));
        assert_eq!(read(&region, 0, 4), b"well");
    }
}

/// A wire tap, behind which a writer has a pipe: what it says beside it ends its own path, and is counted.
#[test]
fn rubbish_beside_a_pipe_ends_its_path_and_nothing_else() {
    let Some(config) = config(|_| {}) else { return };
    let b = Side::new(config.clone());
    let (region, descriptor) = b.region(64);
    let neighbour = Side::new(config.clone());
    let to_b = neighbour.peer(&b);
    let write = |bytes: &[u8]| inline(to_b, descriptor, bytes.to_vec(), 1);
    assert_eq!(outcome(&neighbour.write(write(b"before"))), Ok(()));
    // A length that nothing has, what cannot be decoded, and what only a target says.
    let said: [&[u8]; 3] = [&[0xff; 4], &[2, 0, 0, 0, 0xff, 0xff], &[2, 0, 0, 0, 0x18, 1]];
    for (counted, said) in (1..).zip(said) {
        let tap = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let writer = Side::new(config.clone());
        let mut tapped = b.engine.endpoint();
        tapped.tcp = Some(tap.local_addr().expect("its address"));
        let peer = writer.engine.connect(&tapped).expect("reachable");
        writer.engine.send(peer, b"x".to_vec(), LONG, Completion::Ignore).expect("accepted");
        let (mut from_writer, _) = tap.accept().expect("the writer");
        let to = b.engine.endpoint().tcp.expect("tcp");
        let mut stream = TcpStream::connect(to).expect("taken");
        stream.set_read_timeout(Some(LONG)).expect("set");
        pass_greeting(&mut from_writer, &mut stream);
        pass_greeting(&mut stream, &mut from_writer);
        stream.write_all(said).expect("sent");
        let mut rest = Vec::new();
        // An end or a reset, but no silence.
        if let Err(error) = stream.read_to_end(&mut rest) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
        assert_eq!(b.closed("malformed"), f64::from(counted), "{said:?}");
    }
    assert_eq!(outcome(&neighbour.write(write(b"after"))), Ok(()));
    assert_eq!(read(&region, 0, 5), b"after");
    assert_eq!(neighbour.sent(Domain::Tcp), 0.0);
}

/// The greeting of an engine that wants a card for its writes.
pub(crate) fn greeting(to: &Endpoint, domain: u8, card: &[u8]) -> Vec<u8> {
    start(tcp_config()).0.greeting(to, domain.into(), card.to_vec())
}

/// The writer has its descriptor of the revoked region by heart, and no connection by which it would have
/// been told: the card is the last line. It ends the path, and what else was on it is counted exactly.
#[test]
fn what_the_card_refuses_ends_its_path_and_nothing_else() {
    let Some(config) = config(|_| {}) else { return };
    let b = Side::new(config.clone());
    for round in 0..10 {
        let a = Side::new(config.clone());
        let (good, good_descriptor) = b.region(40 * 64);
        let (bad, bad_descriptor) = b.region(64);
        b.revoke(&bad);
        let peer = a.peer(&b);
        let reached = b.expect(round, 40);
        let mut neighbours = Vec::new();
        let mut refused = Vec::new();
        for at in 0..40u8 {
            let write = inline(peer, good_descriptor, vec![at + 1; 64], round);
            neighbours.push(a.write(Write { target_offset: u64::from(at) * 64, ..write }));
            if at == 20 {
                refused.push(a.write(inline(peer, bad_descriptor, vec![9; 64], 77)));
            }
        }
        for written in &refused {
            let revoked = WriteError::Refused(Refusal::Revoked);
            assert_eq!(outcome(written), Err(revoked), "the reason is asked for");
        }
        for written in &neighbours {
            assert_eq!(outcome(written), Ok(()));
        }
        assert_eq!(outcome(&reached), Ok(()), "each is counted");
        for at in 0..40u8 {
            assert_eq!(read(&good, usize::from(at) * 64, 64), [at + 1; 64]);
        }
        let (done, forgotten) = Completion::future();
        b.engine.cancel_imm(round, done).expect("accepted");
        assert_eq!(outcome(&forgotten), Ok(()));
        let twice = b.expect(round, 1);
        assert_eq!(twice.wait_timeout(Duration::from_millis(3)), None, "none is counted twice");
        assert_eq!(a.closed("path_lost"), 1.0, "the card refused it, and was not tried again");
        assert_eq!(a.sent(Domain::Tcp), 0.0);
    }
}

#[test]
fn a_writer_that_is_told_of_a_revocation_does_not_try_the_card() {
    let Some(config) = config(|_| {}) else { return };
    let (a, b) = (Side::new(config.clone()), Side::new(config));
    let (region, descriptor) = b.region(64);
    let peer = a.peer(&b);
    let write = || outcome(&a.write(inline(peer, descriptor, vec![1; 64], 1)));
    assert_eq!(write(), Ok(()));
    b.revoke(&region);
    // It is told by the connection beside the pipe, before it is told what has become of a message.
    let (done, sent) = Completion::future();
    a.engine.send(peer, b"anything".to_vec(), LONG, done).expect("accepted");
    assert_eq!(outcome(&sent), Ok(()));
    assert_eq!(write(), Err(WriteError::Refused(Refusal::Revoked)));
    assert_eq!(a.closed("path_lost"), 0.0);
}

/// Not one byte of what the caller puts there afterwards may arrive.
#[test]
fn a_source_is_not_read_after_its_write_ran_out_of_time() {
    let Some(config) = config(|_| {}) else { return };
    let (a, b) = (Side::new(config.clone()), Side::new(config));
    let bytes = 32 << 20;
    let (source, _) = a.region(bytes);
    let (target, descriptor) = b.region(bytes);
    let peer = a.peer(&b);
    assert_eq!(outcome(&a.write(inline(peer, descriptor, vec![0; 8], 1))), Ok(()));
    let deadline = Duration::from_millis(15);
    let whole = Source::Region { handle: source.clone(), offset: 0, bytes };
    let write = Write { source: whole, deadline, ..inline(peer, descriptor, Vec::new(), 2) };
    assert_eq!(outcome(&a.write(write)), Err(WriteError::DeadlineExceeded));
    source.memory().copy_from(0, &vec![0xee; bytes]).expect("it fits");
    // A later write shows that whatever was on the wire has passed.
    assert_eq!(outcome(&a.write(inline(peer, descriptor, vec![0; 8], 3))), Ok(()));
    std::thread::sleep(Duration::from_millis(200));
    assert!(!read(&target, 0, bytes).contains(&0xee), "it was read after the caller was told");
}

#[test]
fn writers_with_any_number_of_queue_pairs_are_served() {
    // Deep enough for chains of work requests that are built once, and not.
    for (write_queue_pairs, send_depth) in [(1, 8), (4, 64)] {
        let changed = config(|verbs| {
            verbs.write_queue_pairs = write_queue_pairs;
            verbs.send_depth = send_depth;
            verbs.inline_bytes = 0;
        });
        let (Some(changed), Some(plain)) = (changed, config(|_| {})) else { return };
        let (a, b) = (Side::new(changed), Side::new(plain));
        let (source, _) = a.region(300 << 10);
        let bytes: Vec<u8> = (0..300 << 10).map(|at: u32| (at * 31 + at / 251) as u8).collect();
        source.memory().copy_from(0, &bytes).expect("it fits");
        let (target, descriptor) = b.region(300 << 10);
        let peer = a.peer(&b);
        let reached = b.expect(5, 300);
        let written: Vec<_> = (0..300usize)
            .map(|at| {
                let from = Source::Region { handle: source.clone(), offset: at << 10, bytes: 1024 };
                let write = inline(peer, descriptor, Vec::new(), 5);
                a.write(Write { source: from, target_offset: (at as u64) << 10, ..write })
            })
            .collect();
        for written in &written {
            assert_eq!(outcome(written), Ok(()));
        }
        assert_eq!(outcome(&reached), Ok(()));
        assert!(read(&target, 0, 300 << 10) == bytes);
        assert_eq!(a.sent(Domain::Tcp), 0.0);
    }
}

/// Each writer says how its cards shake hands; whoever is written to follows.
#[test]
fn engines_that_shake_hands_differently_reach_each_other() {
    for handshakes in [[Handshake::Ud; 2], [Handshake::Ud, Handshake::Tcp]] {
        let sides = handshakes.map(|handshake| {
            config(|verbs| (verbs.handshake, verbs.write_queue_pairs) = (handshake, 3))
        });
        let [Some(a), Some(b)] = sides else { return };
        let (a, b) = (Side::new(a), Side::new(b));
        for (from, to) in [(&a, &b), (&b, &a)] {
            let (region, descriptor) = to.region(64);
            let reached = to.expect(1, 1);
            let write = inline(from.peer(to), descriptor, b"hands".to_vec(), 1);
            assert_eq!(outcome(&from.write(write)), Ok(()), "{handshakes:?}");
            assert_eq!(outcome(&reached), Ok(()));
            assert_eq!(read(&region, 0, 5), b"hands");
            assert_eq!(from.sent(Domain::Tcp), 0.0, "by the card");
        }
    }
}

#[test]
fn a_source_that_is_not_registered_goes_through_memory_that_is() {
    let Some(config) = config(|verbs| verbs.bounce_bytes = 256 << 10) else { return };
    let (a, b) = (Side::new(config.clone()), Side::new(config));
    let bytes: Vec<u8> = (0..3_000_001u32).map(|at| (at * 7 + at / 509) as u8).collect();
    let (target, descriptor) = b.region(bytes.len());
    let reached = b.expect(5, 1);
    let write = inline(a.peer(&b), descriptor, bytes.clone(), 5);
    assert_eq!(outcome(&a.write(write)), Ok(()));
    assert_eq!(outcome(&reached), Ok(()));
    assert!(read(&target, 0, bytes.len()) == bytes, "more than there is room for at once");
}

#[test]
fn a_peer_without_a_device_is_written_to_by_tcp() {
    let Some(config) = config(|_| {}) else { return };
    let (a, b) = (Side::new(config), Side::new(tcp_config()));
    let (_region, descriptor) = b.region(64);
    assert_eq!(descriptor.rdma, None);
    assert_eq!(outcome(&a.write(inline(a.peer(&b), descriptor, vec![1; 64], 1))), Ok(()));
    assert_eq!((a.sent(Domain::Verbs), a.sent(Domain::Tcp)), (0.0, 64.0));
}

#[test]
fn sleeping_engines_are_woken_by_the_card() {
    let Some(config) = config(|_| {}) else { return };
    let never_polls = TransferConfig { spin_us: 0, ..config };
    let (a, b) = (Side::new(never_polls.clone()), Side::new(never_polls));
    let (_region, descriptor) = b.region(64);
    let peer = a.peer(&b);
    for round in 0..20 {
        std::thread::sleep(Duration::from_millis(2));
        let reached = b.expect(round, 1);
        assert_eq!(outcome(&a.write(inline(peer, descriptor, vec![1; 64], round))), Ok(()));
        assert_eq!(outcome(&reached), Ok(()));
    }
}
