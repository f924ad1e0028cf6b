//! Connections from whoever finds the port: each can at worst end itself.

use std::io::{Read, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::{Completion, RegionDesc, Source, TransferConfig, TransferEngine, Write};
use rand::{Rng, SeedableRng};

use crate::engine::{counter, start, tcp_config};

const LONG: Duration = Duration::from_secs(30);

struct Receiver {
    engine: TransferEngine,
    registry: prometheus::Registry,
    target: Arc<SharedMemory>,
    descriptor: RegionDesc,
}

fn receiver() -> Receiver {
    let (engine, registry) = start(TransferConfig { peer_timeout_ms: 2_000, ..tcp_config() });
    let target = Arc::new(SharedMemory::create("t", 4096, Prefault::No).expect("memory"));
    let (_, descriptor) = engine.register(Arc::clone(&target)).expect("room");
    Receiver { engine, registry, target, descriptor }
}

impl Receiver {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.engine.endpoint().tcp.expect("tcp")).expect("taken");
        stream.set_read_timeout(Some(LONG)).expect("set");
        stream
    }

    fn closed(&self, reason: &str) -> f64 {
        let labels = ["tcp", reason];
        counter(&self.registry, "kvasir_transfer_connections_closed_total", &labels)
    }

    fn is_closed(&self, mut stream: TcpStream) {
        let mut rest = Vec::new();
        // An end or a reset, but no silence.
        if let Err(error) = stream.read_to_end(&mut rest) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
        }
    }

    /// Someone well-behaved still gets through.
    fn still_works(&self) {
        let (sender, _) = start(tcp_config());
        let peer = sender.connect(&self.engine.endpoint()).expect("reachable");
        let (done, written) = Completion::future();
        let write = Write {
            peer,
            source: Source::Inline(b"well-behaved".to_vec()),
            target: self.descriptor,
            target_offset: 0,
            imm: None,
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        sender.write(write, done).expect("accepted");
        assert_eq!(written.wait(), Ok(()));
        let mut bytes = [0; 12];
        self.target.copy_to(0, &mut bytes).expect("it fits");
        assert_eq!(&bytes, b"well-behaved");
    }
}

fn greeting(body: &[u8]) -> Vec<u8> {
    [b"KVT1".as_slice(), &(body.len() as u32).to_le_bytes(), body].concat()
}

#[test]
fn whoever_is_no_peer_is_closed_and_counted() {
    let receiver = receiver();
    let cases: [(&[u8], &str); 4] = [
        (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (&[0; 100], "malformed"),
        (b"KVT1\xff\xff\xff\xff", "malformed"),
        (&greeting(&[0xff; 100]), "not_admitted"),
    ];
    for (bytes, reason) in cases {
        let before = receiver.closed(reason);
        let mut stream = receiver.connect();
        stream.write_all(bytes).expect("sent");
        receiver.is_closed(stream);
        assert_eq!(receiver.closed(reason), before + 1.0, "{bytes:?} is {reason}");
    }
    receiver.still_works();
}

#[test]
fn whoever_has_another_cookie_is_not_admitted() {
    let receiver = receiver();
    // The endpoint's bytes with one bit of the cookie changed: 16 bytes after their tag and length.
    let mut bytes = receiver.engine.endpoint().to_bytes();
    let cookie = bytes.windows(2).position(|pair| pair == [0x1a, 16]).expect("the cookie's field");
    bytes[cookie + 2] ^= 1;
    let endpoint = kvasir_transfer::Endpoint::from_bytes(&bytes).expect("still an endpoint");
    let (sender, _) = start(tcp_config());
    let peer = sender.connect(&endpoint).expect("reachable");
    let (done, sent) = Completion::future();
    sender.send(peer, b"x".to_vec(), LONG, done).expect("accepted");
    assert_eq!(sent.wait(), Err(kvasir_transfer::WriteError::PeerGone));
    assert_eq!(receiver.closed("not_admitted"), 1.0);
    receiver.still_works();
}

#[test]
fn whoever_says_nothing_is_closed_after_a_while() {
    let (engine, _) = start(TransferConfig { peer_timeout_ms: 30, ..tcp_config() });
    let mut stream = TcpStream::connect(engine.endpoint().tcp.expect("tcp")).expect("taken");
    stream.write_all(b"KVT").expect("sent");
    stream.set_read_timeout(Some(LONG)).expect("set");
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(bytes) => assert_eq!(bytes, 0),
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
}

/// Forwards a greeting, or the answer to one.
pub(crate) fn pass_greeting(from: &mut TcpStream, to: &mut TcpStream) {
    let mut prefix = [0; 8];
    from.read_exact(&mut prefix).expect("a greeting");
    let length = u32::from_le_bytes([prefix[4], prefix[5], prefix[6], prefix[7]]) as usize;
    let mut body = vec![0; length];
    from.read_exact(&mut body).expect("a greeting");
    to.write_all(&[prefix.as_slice(), &body].concat()).expect("passed on");
}

/// A wire tap: forwards a greeting between a sender and the receiver, then sends what it likes.
fn admitted_stream(receiver: &Receiver) -> TcpStream {
    let tap = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let (sender, _) = start(tcp_config());
    let mut endpoint = receiver.engine.endpoint();
    endpoint.tcp = Some(tap.local_addr().expect("its address"));
    let peer = sender.connect(&endpoint).expect("reachable");
    sender.send(peer, b"x".to_vec(), LONG, Completion::Ignore).expect("accepted");
    let (mut from_sender, _) = tap.accept().expect("the sender");
    let mut stream = receiver.connect();
    pass_greeting(&mut from_sender, &mut stream);
    pass_greeting(&mut stream, &mut from_sender);
    stream
}

#[test]
fn an_admitted_peer_that_sends_rubbish_ends_only_itself() {
    let receiver = receiver();
    let mut random = rand::rngs::StdRng::seed_from_u64(1);
    for round in 0..20 {
        let mut stream = admitted_stream(&receiver);
        let mut rubbish = vec![0; random.random_range(64..5000)];
        random.fill(rubbish.as_mut_slice());
        stream.write_all(&rubbish).expect("sent");
        receiver.is_closed(stream);
        assert_eq!(receiver.closed("malformed"), f64::from(round) + 1.0);
    }
    receiver.still_works();
}

#[test]
fn a_frame_that_is_cut_short_is_not_counted() {
    let receiver = receiver();
    let tap = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let (sender, _) = start(tcp_config());
    let mut endpoint = receiver.engine.endpoint();
    endpoint.tcp = Some(tap.local_addr().expect("its address"));
    let (done, reached) = Completion::future();
    let expect = kvasir_transfer::Expect { imm: 7, count: 1, deadline: None };
    receiver.engine.expect_imm(expect, done).expect("accepted");
    let peer = sender.connect(&endpoint).expect("reachable");
    let (done, written) = Completion::future();
    let write = Write {
        peer,
        source: Source::Inline(vec![5; 4096]),
        target: receiver.descriptor,
        target_offset: 0,
        imm: Some(7),
        checksum: None,
        group: 0,
        deadline: LONG,
    };
    sender.write(write, done).expect("accepted");
    // Everything is passed on but the last byte of the payload.
    let (mut from_sender, _) = tap.accept().expect("the sender");
    let mut stream = receiver.connect();
    pass_greeting(&mut from_sender, &mut stream);
    pass_greeting(&mut stream, &mut from_sender);
    let mut frame = vec![0; 64 + 4096];
    from_sender.read_exact(&mut frame).expect("a frame");
    stream.write_all(&frame[..64 + 4095]).expect("sent");
    let began = Instant::now();
    let mut byte = [0];
    while byte == [0] {
        assert!(began.elapsed() < LONG, "what was sent has landed");
        receiver.target.copy_to(4094, &mut byte).expect("it fits");
    }
    drop(stream);
    drop(from_sender);
    assert_eq!(written.wait(), Err(kvasir_transfer::WriteError::PeerGone));
    receiver.still_works();
    assert_eq!(reached.wait_timeout(Duration::from_millis(5)), None);
}

#[test]
fn a_source_is_let_go_of_when_its_write_runs_out_of_time() {
    const BYTES: usize = 1 << 20;
    let receiver = receiver();
    let tap = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let (sender, _) = start(tcp_config());
    let mut endpoint = receiver.engine.endpoint();
    endpoint.tcp = Some(tap.local_addr().expect("its address"));
    let memory = Arc::new(SharedMemory::create("s", BYTES, Prefault::No).expect("memory"));
    memory.copy_from(0, &vec![1; BYTES]).expect("it fits");
    let (handle, _) = sender.register(Arc::clone(&memory)).expect("room");
    let peer = sender.connect(&endpoint).expect("reachable");
    let mut flags = Vec::new();
    // More than any socket holds, so that one is stuck half written.
    for _ in 0..32 {
        let (done, flag) = Completion::flag();
        let write = Write {
            peer,
            source: Source::Region { handle: handle.clone(), offset: 0, bytes: BYTES },
            target: receiver.descriptor,
            target_offset: 0,
            imm: None,
            checksum: None,
            group: 0,
            deadline: Duration::from_millis(300),
        };
        sender.write(write, done).expect("accepted");
        flags.push(flag);
    }
    let (mut from_sender, _) = tap.accept().expect("the sender");
    let mut stream = receiver.connect();
    pass_greeting(&mut from_sender, &mut stream);
    pass_greeting(&mut stream, &mut from_sender);
    let began = Instant::now();
    for flag in &flags {
        while flag.get().is_none() {
            assert!(began.elapsed() < LONG, "every write ends");
            std::thread::yield_now();
        }
        assert_eq!(flag.get(), Some(Err(kvasir_transfer::WriteError::DeadlineExceeded)));
    }
    // The source is ours again: what is still to come was copied from it before.
    memory.copy_from(0, &vec![2; BYTES]).expect("it fits");
    from_sender.set_read_timeout(Some(Duration::from_millis(300))).expect("set");
    let mut received = Vec::new();
    let _ = from_sender.read_to_end(&mut received);
    assert!(received.len() > BYTES, "something was on its way");
    for frame in received.chunks(64 + BYTES) {
        let payload = &frame[64.min(frame.len())..];
        assert!(payload.iter().all(|byte| *byte == 1), "nothing that came after the end");
    }
}

/// A frame's header with nothing in it but what a message has.
fn message_header(length: u64) -> [u8; 64] {
    let mut header = [0; 64];
    header[..2].copy_from_slice(&0x4b56u16.to_le_bytes());
    header[2] = 3;
    header[40..48].copy_from_slice(&length.to_le_bytes());
    let hash = kvasir_transfer::checksum(&header[..56]);
    header[56..].copy_from_slice(&hash.to_le_bytes());
    header
}

#[test]
fn a_message_that_is_too_long_is_refused_and_one_longer_than_any_ends_the_connection() {
    let receiver = receiver();
    let max = TransferConfig::default().message_bytes_max as u64;
    let mut fine = admitted_stream(&receiver);
    fine.write_all(&message_header(max)).expect("sent");
    fine.write_all(&vec![0; max as usize]).expect("sent");
    let mut ack = [0; 16];
    fine.read_exact(&mut ack).expect("it is taken");
    // It is skipped, and the connection goes on.
    let mut long = admitted_stream(&receiver);
    long.write_all(&message_header(max + 1)).expect("sent");
    long.write_all(&vec![0; max as usize + 1]).expect("sent");
    long.read_exact(&mut ack).expect("it is refused");
    assert_eq!((ack[0], ack[1]), (2, kvasir_transfer::Refusal::TooLong.code()));
    let longer_than_any = kvasir_transfer::MESSAGE_BYTES_MAX as u64 + 1;
    let mut stream = admitted_stream(&receiver);
    stream.write_all(&message_header(longer_than_any)).expect("sent");
    receiver.is_closed(stream);
    assert_eq!(receiver.closed("malformed"), 1.0);
    receiver.still_works();
}

/// The header of a question about a failed path, whose body is so long.
fn question_header(length: u64) -> [u8; 64] {
    let mut header = message_header(length);
    header[2] = 4;
    let hash = kvasir_transfer::checksum(&header[..56]);
    header[56..].copy_from_slice(&hash.to_le_bytes());
    header
}

#[test]
fn questions_that_nobody_asks_end_the_connection() {
    let receiver = receiver();
    // About a path that it does not have: it is told so, and goes on.
    let mut fine = admitted_stream(&receiver);
    fine.write_all(&[question_header(2).as_slice(), &[8, 7]].concat()).expect("sent");
    let mut answer = [0; 16];
    fine.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer[0], 4);
    // About the path that it comes through, then no question at all, then one without end.
    let cases = [
        question_header(0).to_vec(),
        [question_header(3).as_slice(), &[0xff; 3]].concat(),
        question_header(1 << 40).to_vec(),
    ];
    for (counted, bytes) in cases.into_iter().enumerate() {
        let mut stream = admitted_stream(&receiver);
        stream.write_all(&bytes).expect("sent");
        receiver.is_closed(stream);
        assert_eq!(receiver.closed("malformed"), counted as f64 + 1.0);
    }
    receiver.still_works();
}

#[test]
fn a_path_is_taken_once() {
    let receiver = receiver();
    let tap = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let (sender, _) = start(tcp_config());
    let mut endpoint = receiver.engine.endpoint();
    endpoint.tcp = Some(tap.local_addr().expect("its address"));
    let peer = sender.connect(&endpoint).expect("reachable");
    sender.send(peer, b"x".to_vec(), LONG, Completion::Ignore).expect("accepted");
    let (mut from_sender, _) = tap.accept().expect("the sender");
    let mut hello = vec![0; 8];
    from_sender.read_exact(&mut hello).expect("a greeting");
    let length = u32::from_le_bytes([hello[4], hello[5], hello[6], hello[7]]) as usize;
    hello.resize(8 + length, 0);
    from_sender.read_exact(&mut hello[8..]).expect("a greeting");
    let mut first = receiver.connect();
    first.write_all(&hello).expect("sent");
    first.read_exact(&mut [0; 8]).expect("it is admitted");
    let mut second = receiver.connect();
    second.write_all(&hello).expect("sent");
    receiver.is_closed(second);
    assert_eq!(receiver.closed("not_admitted"), 1.0);
    receiver.still_works();
}

#[test]
fn an_acknowledgement_of_what_was_not_sent_ends_the_connection() {
    // More than any socket holds: while nothing reads it, it is never written in full.
    const BYTES: usize = 32 << 20;
    let receiver = receiver();
    let tap = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let (sender, _) = start(TransferConfig { slice_bytes: BYTES, ..tcp_config() });
    let mut endpoint = receiver.engine.endpoint();
    endpoint.tcp = Some(tap.local_addr().expect("its address"));
    let peer = sender.connect(&endpoint).expect("reachable");
    let (done, written) = Completion::future();
    let write = Write {
        peer,
        source: Source::Inline(vec![1; BYTES]),
        target: receiver.descriptor,
        target_offset: 0,
        imm: None,
        checksum: None,
        group: 0,
        deadline: LONG,
    };
    sender.write(write, done).expect("accepted");
    let (mut from_sender, _) = tap.accept().expect("the sender");
    let mut stream = receiver.connect();
    pass_greeting(&mut from_sender, &mut stream);
    pass_greeting(&mut stream, &mut from_sender);
    let mut header = [0; 64];
    from_sender.read_exact(&mut header).expect("it has begun");
    let mut ack = [0; 16];
    ack[0] = 1;
    from_sender.write_all(&ack).expect("sent");
    assert_eq!(written.wait(), Err(kvasir_transfer::WriteError::PeerGone));
}
