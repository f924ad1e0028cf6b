//! A shm peer that does what it likes with what it was given: the receiver survives, nobody else is
//! harmed, and nobody is told that nothing more lands while a copy is under way.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvasir_transfer::descriptors::{self, DescriptorError};
use kvasir_transfer::memory::{Access, Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, CompletionFlag, Domain, Handlers, Loss, PeerEvent, PeerId, RegionHandle, Source,
    TransferConfig, TransferEngine, Write,
};
use rustix::fs::OFlags;
use rustix::net::{AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType};

use crate::engine::counter;

const LONG: Duration = Duration::from_secs(30);
/// Where the words of a link's memory lie.
const EPOCH: usize = 0;
const CUT: usize = 64;

fn config(run_dir: &Path) -> TransferConfig {
    TransferConfig { run_dir: Some(run_dir.to_owned()), spin_us: 0, ..TransferConfig::default() }
}

struct Receiver {
    engine: TransferEngine,
    registry: prometheus::Registry,
    events: Arc<Mutex<Vec<PeerEvent>>>,
    run_dir: tempfile::TempDir,
}

impl Receiver {
    fn start() -> Self {
        Receiver::with_room_for(TransferConfig::default().connections_max)
    }

    fn with_room_for(connections_max: usize) -> Self {
        let run_dir = tempfile::tempdir().expect("a directory");
        let (registry, events) = (prometheus::Registry::new(), Arc::new(Mutex::new(Vec::new())));
        let heard = Arc::clone(&events);
        let handlers = Handlers {
            on_peer: Box::new(move |event| heard.lock().expect("events").push(event)),
            ..Handlers::default()
        };
        let config = TransferConfig { connections_max, ..config(run_dir.path()) };
        let engine = TransferEngine::start(config, handlers, &registry);
        Receiver { engine: engine.expect("started"), registry, events, run_dir }
    }

    fn events(&self) -> Vec<PeerEvent> {
        self.events.lock().expect("events").clone()
    }

    fn region(&self) -> RegionHandle {
        let memory = SharedMemory::create("region", 4096, Prefault::No).expect("memory");
        self.engine.register(Arc::new(memory)).expect("room").0
    }
}

/// A writer without an engine behind it: it has what an admitted one has.
struct Raw {
    socket: OwnedFd,
    link: SharedMemory,
    ringer: OwnedFd,
    /// Whose hello it used.
    incarnation: u64,
    /// The session of the receiver with it.
    peer: PeerId,
}

fn seqpacket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .expect("a socket")
}

impl Raw {
    /// Takes the hello of an engine that thinks it connects to the receiver.
    fn admitted(receiver: &Receiver) -> Self {
        let tap_path = receiver.run_dir.path().join("tap.sock");
        let tap = seqpacket();
        rustix::net::bind(&tap, &SocketAddrUnix::new(&tap_path).expect("short")).expect("bound");
        rustix::net::listen(&tap, 1).expect("listening");
        let registry = prometheus::Registry::new();
        let config = config(receiver.run_dir.path());
        let sender =
            TransferEngine::start(config, Handlers::default(), &registry).expect("started");
        let mut endpoint = receiver.engine.endpoint();
        endpoint.shm.as_mut().expect("it has shm").socket = tap_path.clone();
        let to_tap = sender.connect(&endpoint).expect("reachable");
        sender.send(to_tap, b"x".to_vec(), LONG, Completion::Ignore).expect("accepted");
        let from_sender = rustix::net::accept(&tap).expect("the sender");
        let mut bytes = [0; 4096];
        let (length, _) = descriptors::recv(&from_sender, &mut bytes).expect("a hello");
        std::fs::remove_file(&tap_path).expect("it is ours");

        let socket = seqpacket();
        let path = receiver.engine.endpoint().shm.expect("it has shm").socket;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path).expect("short")).expect("there");
        descriptors::send(&socket, &bytes[..length], &[]).expect("sent");
        let (_, fds) = descriptors::recv(&socket, &mut bytes).expect("an answer");
        let [link, _directory, ringer] = <[OwnedFd; 3]>::try_from(fds).expect("it is admitted");
        let link_bytes = rustix::fs::fstat(&link).expect("its size").st_size as usize;
        let link = SharedMemory::from_fd(link, link_bytes, Access::ReadWrite).expect("mapped");
        let peer = receiver.engine.connect(&sender.endpoint()).expect("reachable");
        Raw { socket, link, ringer, incarnation: sender.incarnation(), peer }
    }

    fn set_epoch(&self, epoch: u64) {
        self.link.atomic_u64(EPOCH).expect("aligned").store(epoch, Ordering::SeqCst);
    }

    fn is_cut(&self) -> bool {
        self.link.atomic_u32(CUT).expect("aligned").load(Ordering::SeqCst) != 0
    }

    /// It asks for a region, as a writer does before it copies there for the first time.
    fn given(&self, receiver: &Receiver) -> RegionHandle {
        let region = receiver.region();
        let question = [&[1], region.descriptor().key.to_le_bytes().as_slice()].concat();
        descriptors::send(&self.socket, &question, &[]).expect("sent");
        let (_, fds) = descriptors::recv(&self.socket, &mut [0; 64]).expect("an answer");
        assert_eq!(fds.len(), 1, "it may write there");
        region
    }

    /// Says what cannot be: the receiver ends the connection, while this side would go on.
    fn say_rubbish(&self) {
        descriptors::send(&self.socket, b"rubbish", &[]).expect("sent");
        let mut bytes = [0; 16];
        let ended = descriptors::recv(&self.socket, &mut bytes);
        assert!(matches!(ended, Err(DescriptorError::Closed)), "{ended:?}");
    }
}

fn closed(receiver: &Receiver, reason: &str) -> f64 {
    counter(&receiver.registry, "kvasir_transfer_connections_closed_total", &["shm", reason])
}

/// Whoever has the path of the socket and nothing else, and whoever says what is no hello.
#[test]
fn strangers_and_hellos_cut_short_are_not_admitted_and_counted() {
    let receiver = Receiver::start();
    let neighbour = Raw::admitted(&receiver);
    // The endpoint with one bit of the cookie changed: 16 bytes after their tag and length.
    let mut bytes = receiver.engine.endpoint().to_bytes();
    let cookie = bytes.windows(2).position(|pair| pair == [0x1a, 16]).expect("the cookie's field");
    bytes[cookie + 2] ^= 1;
    let endpoint = kvasir_transfer::Endpoint::from_bytes(&bytes).expect("still an endpoint");
    let registry = prometheus::Registry::new();
    let config = config(receiver.run_dir.path());
    let stranger = TransferEngine::start(config, Handlers::default(), &registry).expect("started");
    let peer = stranger.connect(&endpoint).expect("reachable");
    let (done, sent) = Completion::future();
    stranger.send(peer, b"x".to_vec(), LONG, done).expect("accepted");
    assert_eq!(sent.wait(), Err(kvasir_transfer::WriteError::PeerGone));
    assert_eq!(closed(&receiver, "not_admitted"), 1.0);
    let path = receiver.engine.endpoint().shm.expect("it has shm").socket;
    let hello = receiver.engine.endpoint().to_bytes();
    for (hello, reason) in
        [(&hello[..5], "not_admitted"), (&[0xff; 40], "not_admitted"), (&[1; 9000], "malformed")]
    {
        let before = closed(&receiver, reason);
        let socket = seqpacket();
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path).expect("short")).expect("there");
        descriptors::send(&socket, hello, &[]).expect("sent");
        let mut answer = [0; 64];
        let ended = descriptors::recv(&socket, &mut answer);
        assert!(matches!(ended, Err(DescriptorError::Closed)), "{ended:?}");
        assert_eq!(closed(&receiver, reason), before + 1.0, "{} bytes", hello.len());
    }
    assert!(!neighbour.is_cut(), "its neighbours are not meant");
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LONG, "never: {what}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn ends(what: &str, flag: &CompletionFlag) {
    until(what, || flag.get().is_some());
    assert_eq!(flag.get(), Some(Ok(())), "{what}");
}

fn cut_off(receiver: &Receiver, peer: PeerId) -> Arc<CompletionFlag> {
    let (done, flag) = Completion::flag();
    receiver.engine.cut_off(peer, done).expect("accepted");
    flag
}

fn revoke(receiver: &Receiver, region: &RegionHandle) -> Arc<CompletionFlag> {
    let (done, flag) = Completion::flag();
    receiver.engine.revoke(region, done).expect("accepted");
    flag
}

#[test]
fn a_copy_is_waited_for_when_the_receiver_has_ended_the_connection() {
    let receiver = Receiver::start();
    let raw = Raw::admitted(&receiver);
    let given = raw.given(&receiver);
    raw.set_epoch(1);
    raw.say_rubbish();
    until("the connection is cut", || raw.is_cut());
    let revoked = revoke(&receiver, &given);
    let waiting = [cut_off(&receiver, raw.peer), revoked, cut_off(&receiver, raw.peer)];
    std::thread::sleep(Duration::from_millis(20));
    for flag in &waiting {
        assert_eq!(flag.get(), None, "its bytes may still land");
    }
    assert_eq!(receiver.events(), [], "nobody is told that nothing more arrives");
    raw.set_epoch(2);
    waiting.iter().for_each(|flag| ends("it has ended", flag));
    let lost = PeerEvent::WriterLost {
        incarnation: raw.incarnation,
        domain: Some(Domain::Shm),
        why: Loss::Misbehaved,
    };
    until("the event", || receiver.events() == [lost]);
    ends("nothing is under way any more", &revoke(&receiver, &given));
}

#[test]
fn a_writer_that_stands_still_in_a_copy_keeps_back_what_it_was_given_and_nothing_else() {
    let receiver = Receiver::start();
    let raw = Raw::admitted(&receiver);
    let (given, given_too) = (raw.given(&receiver), raw.given(&receiver));
    ends("nothing is under way", &revoke(&receiver, &raw.given(&receiver)));
    raw.set_epoch(1);
    let mut waiting = vec![revoke(&receiver, &given), revoke(&receiver, &given)];
    ends("it was never given that one", &revoke(&receiver, &receiver.region()));
    raw.say_rubbish();
    until("the connection is cut", || raw.is_cut());
    waiting.extend([revoke(&receiver, &given_too), revoke(&receiver, &given)]);
    ends("nor this one", &revoke(&receiver, &receiver.region()));
    std::thread::sleep(Duration::from_millis(20));
    for flag in &waiting {
        assert_eq!(flag.get(), None, "its bytes may still land");
    }
    raw.set_epoch(2);
    waiting.iter().for_each(|flag| ends("it has ended", flag));
}

#[test]
fn a_copy_is_waited_for_by_everyone_who_asks_after_a_cut_off() {
    let receiver = Receiver::start();
    let raw = Raw::admitted(&receiver);
    let given = raw.given(&receiver);
    raw.set_epoch(7);
    let first = cut_off(&receiver, raw.peer);
    until("the connection is cut", || raw.is_cut());
    let waiting = [first, cut_off(&receiver, raw.peer), revoke(&receiver, &given)];
    std::thread::sleep(Duration::from_millis(20));
    for flag in &waiting {
        assert_eq!(flag.get(), None, "its bytes may still land");
    }
    raw.set_epoch(8);
    waiting.iter().for_each(|flag| ends("it has ended", flag));
    ends("it is not waited for any more", &revoke(&receiver, &given));
}

#[test]
fn a_connection_that_ended_in_the_middle_of_a_copy_keeps_its_place_until_the_copy_has_ended() {
    let receiver = Receiver::with_room_for(1);
    let raw = Raw::admitted(&receiver);
    raw.set_epoch(1);
    raw.say_rubbish();
    let registry = prometheus::Registry::new();
    let config = config(receiver.run_dir.path());
    let other = TransferEngine::start(config, Handlers::default(), &registry).expect("started");
    let send = || {
        let peer = other.connect(&receiver.engine.endpoint()).expect("reachable");
        let (done, sent) = Completion::future();
        other.send(peer, b"hello".to_vec(), LONG, done).expect("accepted");
        sent.wait()
    };
    assert_eq!(send(), Err(kvasir_transfer::WriteError::PeerGone));
    raw.set_epoch(2);
    until("there is room", || send().is_ok());
}

#[test]
fn an_engine_that_stops_cuts_its_writers() {
    let receiver = Receiver::start();
    let raw = Raw::admitted(&receiver);
    assert!(!raw.is_cut());
    drop(receiver.engine);
    assert!(raw.is_cut());
}

#[test]
fn a_writer_that_spoils_its_ringer_neither_stops_the_receiver_nor_silences_others() {
    let receiver = Receiver::start();
    let raw = Raw::admitted(&receiver);
    let flags = rustix::fs::fcntl_getfl(&raw.ringer).expect("flags");
    rustix::fs::fcntl_setfl(&raw.ringer, flags - OFlags::NONBLOCK).expect("flags");
    rustix::net::sockopt::set_socket_send_buffer_size(&raw.ringer, 1 << 30).expect("set");
    let send = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    for _ in 0..100_000 {
        let _ = rustix::net::send(&raw.ringer, &[0; 64], send);
    }
    rustix::net::shutdown(raw.ringer.as_fd(), Shutdown::Both).expect("shut down");

    let memory = SharedMemory::create("region", 4096, Prefault::No).expect("memory");
    let (_, target) = receiver.engine.register(Arc::new(memory)).expect("room");
    let registry = prometheus::Registry::new();
    let config = config(receiver.run_dir.path());
    let other = TransferEngine::start(config, Handlers::default(), &registry).expect("started");
    let peer = other.connect(&receiver.engine.endpoint()).expect("reachable");
    for imm in 0..200 {
        let (done, reached) = Completion::future();
        let expect = kvasir_transfer::Expect { imm, count: 1, deadline: None };
        receiver.engine.expect_imm(expect, done).expect("accepted");
        let write = Write {
            peer,
            source: Source::Inline(vec![1; 8]),
            target,
            target_offset: 0,
            imm: Some(imm),
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        other.write(write, Completion::Ignore).expect("accepted");
        assert_eq!(reached.wait_timeout(LONG), Some(Ok(())), "write {imm} was slept through");
    }
    let closed = ["shm", "malformed"];
    assert_eq!(
        counter(&receiver.registry, "kvasir_transfer_connections_closed_total", &closed),
        0.0
    );
}

#[test]
fn a_writer_that_asks_and_does_not_listen_is_not_read_from() {
    let receiver = Receiver::start();
    let raw = Raw::admitted(&receiver);
    // A heartbeat each: their answers must not be kept without end.
    let ask = || rustix::net::send(&raw.socket, &[4], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    let mut refused_since = Instant::now();
    for _ in 0..1_000_000 {
        if ask().is_ok() {
            refused_since = Instant::now();
        } else if refused_since.elapsed() > Duration::from_millis(200) {
            // And nobody else is harmed.
            ends("a revocation", &revoke(&receiver, &receiver.region()));
            return;
        } else {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    panic!("whatever it asks is answered, though it takes no answer");
}
