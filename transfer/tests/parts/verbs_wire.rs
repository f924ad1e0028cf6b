//! Put-with-signal by a card that keeps its order, across a wire that takes time. On one device nothing is
//! under way long enough to be overtaken, so this needs two with a wire between them, and a slow one to
//! show that it is the pinning that does it: `tests/verbs-vm/run` has both.

use std::io::{ErrorKind, Read, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvasir_transfer::signalled::{
    Fallback, OrderedBy, Put, PutWithSignal, Signal, SignalMode, SignalOutcomes, SignalledPut,
};
use kvasir_transfer::{
    Completion, DeviceSpec, Domain, Handshake, Outcome, PeerId, Refusal, RegionDesc, RegionHandle,
    Source, VerbsConfig, Write, WriteError,
};
use kvasir_transfer_verbs::{
    Device, Gid, Library, Lid, Mtu, ProtectionDomain, Psn, QpNum, QueuePairAddress,
};

use crate::device;
use crate::engine::tcp_config;
use crate::verbs::{LONG, Side, config, greeting, outcome};

/// More than a queue pair of `rdma_rxe` sends before it waits for an acknowledgement, which is 128 packets of
/// 4 KiB: the rest is a round trip later.
const PUT_BYTES: usize = 768 << 10;
/// One fewer than there are queue pairs: whatever takes the emptiest one takes another than its put.
const TRANSFERS: usize = 3;
const WORDS_AT: usize = TRANSFERS * PUT_BYTES;
const ROUNDS: u64 = 3;

/// As many queue pairs for each peer as a signal could go astray on.
fn end(device: &str) -> Side {
    let verbs = config(|verbs| {
        *verbs = VerbsConfig {
            devices: vec![device.parse().expect("a device's name")],
            write_queue_pairs: 4,
            // Across a wire that takes time, and where the tests are run so, loses datagrams.
            handshake: Handshake::Ud,
            relaxed_ordering: false,
            ..verbs.clone()
        };
    });
    Side::new(verbs.expect("a device was named"))
}

/// A writer, a target, and what is written.
struct Wire {
    a: Side,
    /// Keeps the target alive.
    _b: Side,
    peer: PeerId,
    source: RegionHandle,
    region: RegionHandle,
    target: RegionDesc,
}

impl Wire {
    fn new(a: Side, b: Side) -> Wire {
        let (source, _) = a.region(TRANSFERS * PUT_BYTES);
        let (region, target) = b.region(WORDS_AT + 8 * TRANSFERS);
        let peer = a.peer(&b);
        Wire { a, _b: b, peer, source, region, target }
    }

    /// Fills the source so that every byte differs from that of the round before.
    fn transfer(&self, at: usize, round: u64) -> SignalledPut {
        let offset = at * PUT_BYTES;
        let bytes = vec![round as u8; PUT_BYTES];
        self.source.memory().copy_from(offset, &bytes).expect("it fits");
        let source = Source::Region { handle: self.source.clone(), offset, bytes: PUT_BYTES };
        let put = Put { source, target: self.target, target_offset: offset as u64 };
        let offset = (WORDS_AT + 8 * at) as u64;
        let signal = Signal { target: self.target, offset, value: round };
        SignalledPut { peer: self.peer, puts: vec![put], signal }
    }

    fn submit(
        &self,
        transfers: Vec<SignalledPut>,
        ordered_by: OrderedBy,
    ) -> (kvasir_transfer::CompletionFuture, Arc<SignalOutcomes>) {
        let (done, ended) = Completion::future();
        let mode = SignalMode::default();
        let (counter, group, deadline) = (1, 0, LONG);
        let call = PutWithSignal { transfers, mode, ordered_by, counter, group, deadline };
        (ended, self.a.engine.put_with_signal(call, done).expect("accepted"))
    }

    fn word(&self, at: usize) -> u64 {
        let word = self.region.memory().atomic_u64(WORDS_AT + 8 * at).expect("inside");
        word.load(Ordering::Acquire)
    }

    fn is_whole(&self, at: usize, round: u64) -> bool {
        let mut bytes = vec![0; PUT_BYTES];
        self.region.memory().copy_to(at * PUT_BYTES, &mut bytes).expect("it fits");
        bytes.iter().all(|byte| *byte == round as u8)
    }

    /// How many signals a consumer that polls sees before their data.
    fn early(&self, round: u64) -> usize {
        let transfers = (0..TRANSFERS).map(|at| self.transfer(at, round)).collect();
        let (ended, outcomes) = self.submit(transfers, OrderedBy::Nic);
        let (mut seen, mut early) = ([false; TRANSFERS], 0);
        let started = std::time::Instant::now();
        while seen.contains(&false) {
            assert!(started.elapsed() < LONG, "round {round}: {seen:?}");
            for (at, seen) in seen.iter_mut().enumerate() {
                if !*seen && self.word(at) == round {
                    *seen = true;
                    early += usize::from(!self.is_whole(at, round));
                }
            }
            std::thread::yield_now();
        }
        assert_eq!(outcome(&ended), Ok(()));
        for at in 0..TRANSFERS {
            assert_eq!(outcomes.told(at), Some(Ok(())), "by a signal, which the card orders");
            assert!(self.is_whole(at, round), "and the data is there in the end");
        }
        early
    }
}

#[test]
fn a_signal_pinned_to_the_queue_pair_of_its_data_does_not_overtake_it() {
    let Some((a, b)) = device::wire() else { return };
    let wire = Wire::new(end(&a), end(&b));
    let early: usize = (1..=ROUNDS).map(|round| wire.early(round)).sum();
    assert_eq!(early, 0);
}

#[test]
fn a_signal_that_is_not_pinned_overtakes_its_data() {
    let Some((a, b)) = device::wire().filter(|_| device::wire_is_slow()) else { return };
    let wire = Wire::new(end(&a), end(&b));
    wire.a.engine.unpin_signals();
    // A consumer that is not scheduled in between misses it: any one round shows it.
    let early = (1..=u64::from(u8::MAX)).any(|round| wire.early(round) > 0);
    assert!(early, "the pinning makes no difference, so the test above proves nothing");
}

/// A put of which the writer cannot know that the card will refuse it takes the path along, between other puts and
/// their signals.
#[test]
fn a_path_that_fails_in_between_costs_no_signal_its_order() {
    let Some((a, b)) = device::wire() else { return };
    let (a, b) = (end(&a), end(&b));
    let (revoked, stale) = b.region(PUT_BYTES);
    b.revoke(&revoked);
    let wire = Wire::new(a, b);
    let mut transfers: Vec<_> = (0..TRANSFERS).map(|at| wire.transfer(at, 9)).collect();
    transfers[1].puts[0].target = stale;
    transfers[1].puts[0].target_offset = 0;
    let (ended, outcomes) = wire.submit(transfers, OrderedBy::Nic);
    let mut seen = [false, true, false];
    let started = std::time::Instant::now();
    while seen.contains(&false) {
        assert!(started.elapsed() < LONG, "{seen:?}");
        for (at, seen) in seen.iter_mut().enumerate() {
            if !*seen && wire.word(at) == 9 {
                *seen = true;
                assert!(wire.is_whole(at, 9), "signal {at} is early");
            }
        }
        std::thread::yield_now();
    }
    let refused: Outcome = Err(WriteError::Refused(Refusal::Revoked));
    assert_eq!(outcome(&ended), refused);
    let all: Vec<_> = (0..TRANSFERS).map(|at| outcomes.get(at).expect("definite")).collect();
    assert_eq!(all, [Ok(()), refused, Ok(())]);
    assert_eq!(wire.word(1), 0, "a refused put has no signal");
    assert_eq!(wire.a.closed("path_lost"), 1.0);
}

/// `tests/verbs-vm/run` also runs this on a wire that loses and repeats packets: see `.ci/run`.
#[test]
fn engines_shake_hands_by_datagrams_whatever_becomes_of_some() {
    let Some((a, b)) = device::wire() else { return };
    let target = end(&b);
    let (region, descriptor) = target.region(64);
    for round in 1..=8u8 {
        let writer = end(&a);
        let source = Source::Inline(vec![round; 64]);
        let write = Write {
            peer: writer.peer(&target),
            source,
            target: descriptor,
            target_offset: 0,
            imm: None,
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        let (done, written) = Completion::future();
        writer.engine.write(write, done).expect("accepted");
        assert_eq!(outcome(&written), Ok(()), "round {round}");
        let mut bytes = [0; 64];
        region.memory().copy_to(0, &mut bytes).expect("it fits");
        assert_eq!(bytes, [round; 64]);
        assert_eq!(writer.sent(Domain::Tcp), 0.0, "it did not give the card up");
    }
}

/// What the device itself says of it, without an engine.
fn takes_relaxed_ordering(device: &VerbsConfig) -> bool {
    let library = Library::open().expect("an engine has opened it");
    let is_named = |found: &Device| {
        let is_it = |spec: &DeviceSpec| matches!(spec, DeviceSpec::One { name, .. } if name == found.name());
        device.devices.is_empty() || device.devices.iter().any(is_it)
    };
    let devices = library.devices().expect("an engine has listed them");
    devices.iter().filter(|found| is_named(found)).any(|found| {
        let opened = found.open().and_then(|context| ProtectionDomain::new(&context));
        opened.and_then(|pd| pd.probe()).is_ok_and(|can| can.relaxed_ordering)
    })
}

#[test]
fn at_a_peer_whose_memory_is_written_in_any_order_puts_are_counted() {
    let Some(device) = device::named() else { return };
    let relaxed = config(|verbs| verbs.relaxed_ordering = true).expect("there is a device");
    let strict = config(|verbs| verbs.relaxed_ordering = false).expect("there is a device");
    let (a, b) = (Side::new(strict), Side::new(relaxed));
    let counted = b.expect(1, TRANSFERS as u64);
    let wire = Wire::new(a, b);
    let transfers = (0..TRANSFERS).map(|at| wire.transfer(at, 3)).collect();
    let (ended, outcomes) = wire.submit(transfers, OrderedBy::Host);
    assert_eq!(outcome(&ended), Ok(()));
    // Where the device does not know of relaxed ordering, nobody is to be told of it.
    let is_counted = takes_relaxed_ordering(device);
    let (told, word) = if is_counted { (Err(Fallback::NotPlaced), 0) } else { (Ok(()), 3) };
    if is_counted {
        assert_eq!(outcome(&counted), Ok(()));
    }
    for at in 0..TRANSFERS {
        assert_eq!(outcomes.told(at), Some(told), "{device:?}");
        assert!(wire.word(at) == word && wire.is_whole(at, 3), "{device:?}");
    }
}

/// A writer says that its card has an address on the wire that nobody has: the system asks there for a second.
/// Whoever has to do with the engine meanwhile is served.
#[test]
fn nobody_waits_while_the_way_to_another_card_is_looked_for() {
    let Some((device, _)) = device::wire() else { return };
    let target = end(&device);
    let neighbour = Side::new(tcp_config());
    let peer = neighbour.peer(&target);
    let say = || {
        let (done, told) = Completion::future();
        neighbour.engine.send(peer, b"x".to_vec(), LONG, done).expect("accepted");
        assert_eq!(outcome(&told), Ok(()));
    };
    say();
    let lane = |number| {
        let (number, psn) = (QpNum::new(number).expect("24 bits"), Psn::new(1).expect("24 bits"));
        let gid: Gid = "10.0.1.77".parse().expect("an address");
        let mtu = Mtu::from_code(3).expect("1024");
        QueuePairAddress { number, psn, gid, lid: Lid(0), mtu }.to_bytes()
    };
    let endpoint = target.engine.endpoint();
    let card = [lane(0x70_0000), lane(0x70_0001)].concat();
    // On a machine that stands still for a second the answer may be there already.
    for _ in 0..5 {
        let mut stream = TcpStream::connect(endpoint.tcp.expect("tcp")).expect("taken");
        stream.write_all(&greeting(&endpoint, 3, &card)).expect("sent");
        for _ in 0..20 {
            say();
            std::thread::sleep(Duration::from_millis(5));
        }
        stream.set_nonblocking(true).expect("set");
        let early = stream.read(&mut [0]);
        if early.is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
            stream.set_nonblocking(false).expect("set");
            stream.set_read_timeout(Some(LONG)).expect("set");
            let mut reply = Vec::new();
            stream.read_to_end(&mut reply).expect("an end, and no silence");
            // `Admission::NoCard`, as the first field.
            assert_eq!(reply.get(8..10), Some([8, 6].as_slice()), "{reply:?}");
            return;
        }
    }
    panic!("the worker does nothing else before it has answered");
}
