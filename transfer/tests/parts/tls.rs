//! TCP under TLS: who has no certificate of the authority is nobody, and nothing can be read on the wire.

use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvasir_transfer::{
    Completion, Handlers, Loss, Outcome, PeerEvent, Source, StartError, TlsError, TlsFiles,
    TransferConfig, TransferEngine, Write, WriteError,
};

use crate::certificates::Authority;
use crate::engine::{counter, region, start, tcp_config};

const LONG: Duration = Duration::from_secs(30);

fn secured(files: TlsFiles) -> TransferConfig {
    TransferConfig { tcp_tls: Some(files), ..tcp_config() }
}

fn send(from: &TransferEngine, to: &TransferEngine, message: &[u8]) -> Outcome {
    let peer = from.connect(&to.endpoint()).expect("reachable");
    let (done, sent) = Completion::future();
    from.send(peer, message.to_vec(), LONG, done).expect("accepted");
    sent.wait()
}

fn is_closed(registry: &prometheus::Registry, reason: &str) {
    let began = Instant::now();
    let name = "kvasir_transfer_connections_closed_total";
    while counter(registry, name, &["tcp", reason]) == 0.0 {
        assert!(began.elapsed() < LONG, "none is counted as {reason}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Case {
    dir: tempfile::TempDir,
    ours: Authority,
    theirs: Authority,
}

impl Case {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        Case { dir, ours: Authority::new(), theirs: Authority::new() }
    }

    fn folder(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }
}

#[test]
fn peers_of_one_authority_talk_and_others_do_not() {
    let case = Case::new();
    let (receiver, counted) = start(secured(case.ours.files(&case.folder("receiver"))));
    let (friend, _) = start(secured(case.ours.files(&case.folder("friend"))));
    assert_eq!(send(&friend, &receiver, b"hello"), Ok(()));

    let (stranger, counted_there) = start(secured(case.theirs.files(&case.folder("stranger"))));
    assert_eq!(send(&stranger, &receiver, b"hello"), Err(WriteError::PeerGone));
    is_closed(&counted_there, "untrusted");
    is_closed(&counted, "untrusted");
    assert_eq!(send(&receiver, &stranger, b"hello"), Err(WriteError::PeerGone));
    assert_eq!(send(&friend, &receiver, b"hello"), Ok(()), "the others are not troubled");
}

#[test]
fn a_peer_that_only_knows_our_authority_is_not_admitted() {
    let case = Case::new();
    let (receiver, counted) = start(secured(case.ours.files(&case.folder("receiver"))));
    // It believes us, and has nothing that we believe.
    let ours = case.ours.files(&case.folder("ours"));
    let theirs = case.theirs.files(&case.folder("theirs"));
    let files = TlsFiles { authority: ours.authority, ..theirs };
    let lost = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::clone(&lost);
    let on_peer = Box::new(move |event| told.lock().expect("events").push(event));
    let handlers = Handlers { on_peer, ..Handlers::default() };
    let registry = prometheus::Registry::new();
    let stranger = TransferEngine::start(secured(files), handlers, &registry).expect("started");
    assert_eq!(send(&stranger, &receiver, b"hello"), Err(WriteError::PeerGone));
    is_closed(&counted, "untrusted");
    let events = lost.lock().expect("events").clone();
    let [PeerEvent::SessionLost { why, .. }] = events[..] else { panic!("{events:?}") };
    assert_eq!(why, Loss::Misbehaved, "it is told that it is not trusted");
}

#[test]
fn a_certificate_for_another_name_is_not_enough() {
    let case = Case::new();
    let files = case.ours.files_for("web.test", &case.folder("web"));
    let (receiver, _) = start(secured(files));
    let (sender, counted) = start(secured(case.ours.files(&case.folder("sender"))));
    assert_eq!(send(&sender, &receiver, b"hello"), Err(WriteError::PeerGone));
    is_closed(&counted, "untrusted");
}

#[test]
fn plain_and_secured_engines_do_not_talk() {
    let case = Case::new();
    let (secured, counted) = start(secured(case.ours.files(&case.folder("secured"))));
    let (plain, counted_plain) = start(tcp_config());
    assert_eq!(send(&plain, &secured, b"hello"), Err(WriteError::PeerGone));
    is_closed(&counted, "untrusted");
    assert_eq!(send(&secured, &plain, b"hello"), Err(WriteError::PeerGone));
    is_closed(&counted_plain, "malformed");
}

#[test]
fn files_that_are_of_no_use_are_said_to_be() {
    let case = Case::new();
    let folder = case.folder("engine");
    let files = case.ours.files(&folder);
    let check = |files: TlsFiles| {
        let registry = prometheus::Registry::new();
        let started = TransferEngine::start(secured(files), Handlers::default(), &registry);
        match started.expect_err("it cannot start") {
            StartError::Tls(error) => error,
            other => panic!("{other:?}"),
        }
    };
    let missing = folder.join("missing.pem");
    let error = check(TlsFiles { certificate: missing.clone(), ..files.clone() });
    assert!(matches!(error, TlsError::File { path, .. } if path == missing));
    let error = check(TlsFiles { authority: files.key.clone(), ..files.clone() });
    assert!(matches!(error, TlsError::Empty { path } if path == files.key));
    let error = check(TlsFiles { key: files.certificate.clone(), ..files.clone() });
    assert!(matches!(error, TlsError::File { .. }));
    let error = check(TlsFiles { name: "no name".into(), ..files.clone() });
    assert!(matches!(error, TlsError::Name(_)));
    let other = case.ours.files(&case.folder("other"));
    let error = check(TlsFiles { key: other.key, ..files });
    assert!(matches!(error, TlsError::Refused(_)), "the key is another certificate's");
}

/// Forwards one connection; `hear` is given what goes there.
fn listen_in(to: SocketAddr, hear: impl Fn(&[u8]) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        let (from, to) = (listener.accept().expect("taken").0, TcpStream::connect(to).expect("up"));
        let (back_from, back_to) =
            (to.try_clone().expect("a copy"), from.try_clone().expect("one"));
        std::thread::spawn(move || forward(back_from, back_to, |_| {}));
        forward(from, to, hear);
    });
    address
}

fn forward(mut from: TcpStream, mut to: TcpStream, keep: impl Fn(&[u8])) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        keep(&buffer[..bytes]);
        if to.write_all(&buffer[..bytes]).is_err() {
            return;
        }
    }
}

#[test]
fn what_is_on_the_wire_cannot_be_read() {
    let secret = b"nobody but the receiver shall read this";
    let can_be_read = |config: &dyn Fn(&Path) -> TransferConfig| {
        let dir = tempfile::tempdir().expect("a directory");
        let (receiver, _) = start(config(&dir.path().join("receiver")));
        let (sender, _) = start(config(&dir.path().join("sender")));
        let mut endpoint = receiver.endpoint();
        let heard: Arc<Mutex<Vec<u8>>> = Arc::default();
        let keeps = Arc::clone(&heard);
        let keep = move |bytes: &[u8]| keeps.lock().expect("heard").extend_from_slice(bytes);
        endpoint.tcp = Some(listen_in(endpoint.tcp.expect("tcp"), keep));
        let peer = sender.connect(&endpoint).expect("reachable");
        let (done, sent) = Completion::future();
        sender.send(peer, secret.to_vec(), LONG, done).expect("accepted");
        assert_eq!(sent.wait(), Ok(()));
        let heard = heard.lock().expect("heard").clone();
        heard.windows(secret.len()).any(|window| window == secret)
    };
    assert!(can_be_read(&|_| tcp_config()), "it is seen that one would see it");
    let ours = Authority::new();
    assert!(!can_be_read(&|folder| secured(ours.files(folder))));
}

#[test]
fn what_was_encrypted_and_found_no_room_in_the_socket_goes_on_when_there_is_some() {
    let ours = Authority::new();
    let dir = tempfile::tempdir().expect("a directory");
    let config = |name: &str| TransferConfig {
        slice_bytes: 64 << 20,
        ..secured(ours.files(&dir.path().join(name)))
    };
    let (receiver, _) = start(config("receiver"));
    let (sender, _) = start(config("sender"));
    let bytes_max = 12 << 20;
    let (handle, _) = sender.register(region(bytes_max)).expect("room");
    let (_, target) = receiver.register(region(bytes_max)).expect("room");
    let is_held = Arc::new(AtomicBool::new(false));
    let held = Arc::clone(&is_held);
    let hold = move |_: &[u8]| {
        while held.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let mut endpoint = receiver.endpoint();
    endpoint.tcp = Some(listen_in(endpoint.tcp.expect("tcp"), hold));
    let peer = sender.connect(&endpoint).expect("reachable");
    // One frame each, so that nothing comes back before the last byte is there. What the sockets hold is
    // the system's secret: one of these lengths is a little more.
    for bytes in (1 << 20..bytes_max).step_by(384 << 10) {
        is_held.store(true, Ordering::Release);
        let (done, written) = Completion::future();
        let write = Write {
            peer,
            source: Source::Region { handle: handle.clone(), offset: 0, bytes },
            target,
            target_offset: 0,
            imm: None,
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        sender.write(write, done).expect("accepted");
        std::thread::sleep(Duration::from_millis(10));
        is_held.store(false, Ordering::Release);
        assert_eq!(written.wait(), Ok(()), "{bytes} bytes");
    }
}
