//! Engines with several RDMA devices each, every pair of them on a wire of its own. They need two wires,
//! which `tests/verbs-vm/run` has; elsewhere they are skipped.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::topology::{Location, Topology};
use kvasir_transfer::{
    Completion, CompletionFuture, Domain, Endpoint, Expect, Outcome, PeerId, RegionDesc,
    RegionHandle, Source, TransferConfig, TransferEngine, VerbsConfig, Write,
};

use crate::device::setting;
use crate::engine::{counter, start, tcp_config};

const LONG: Duration = Duration::from_secs(60);
const SLICE_BYTES: usize = 32 << 10;

/// What is on either end of two wires.
struct Wires {
    here: [String; 2],
    there: [String; 2],
}

fn wires() -> Option<Wires> {
    let ends = |name| {
        let setting = setting(name)?;
        let (here, there) = setting.split_once(',')?;
        Some((here.to_owned(), there.to_owned()))
    };
    let (first, second) = (ends("KVASIR_VERBS_WIRE")?, ends("KVASIR_VERBS_SECOND_WIRE")?);
    Some(Wires { here: [first.0, second.0], there: [first.1, second.1] })
}

/// Runs what whoever runs the tests has named for it.
fn run(name: &str) {
    let command = setting(name).expect("where there are wires they can be cut");
    let status = std::process::Command::new("/bin/busybox").args(["sh", "-c", &command]).status();
    assert!(status.expect("it starts").success(), "{command}");
}

/// A wire that is cut. It is mended when a test is over, however it ends: others need it.
struct Cut;

impl Cut {
    fn new() -> Self {
        run("KVASIR_VERBS_CUT");
        Cut
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        run("KVASIR_VERBS_MEND");
    }
}

struct Side {
    engine: TransferEngine,
    registry: prometheus::Registry,
}

impl Side {
    fn new(devices: &[String]) -> Self {
        // A wire that was cut is noticed within a second, and a machine that is slow is no such wire.
        Side::with(devices, VerbsConfig::default(), None)
    }

    fn with(devices: &[String], verbs: VerbsConfig, topology: Option<Topology>) -> Self {
        let devices = devices.iter().map(|name| name.parse().expect("a device's name")).collect();
        let verbs = VerbsConfig { devices, ..verbs };
        let (engine, registry) = start(TransferConfig {
            preferred: Domain::Verbs,
            verbs: Some(verbs),
            topology,
            slice_bytes_of: BTreeMap::from([(Domain::Verbs, SLICE_BYTES)]),
            ..tcp_config()
        });
        Side { engine, registry }
    }

    fn region(&self, bytes: usize, location: Option<Location>) -> (RegionHandle, RegionDesc) {
        let memory = SharedMemory::create("t", bytes, Prefault::No).expect("memory");
        self.engine.register_at(Arc::new(memory), location).expect("room")
    }

    fn peer(&self, to: &Side) -> PeerId {
        let endpoint = to.engine.endpoint().to_bytes();
        let endpoint = Endpoint::from_bytes(&endpoint).expect("it survives the wire");
        self.engine.connect(&endpoint).expect("reachable")
    }

    fn expect(&self, imm: u32, count: u64) -> CompletionFuture {
        let (done, reached) = Completion::future();
        self.engine.expect_imm(Expect { imm, count, deadline: None }, done).expect("accepted");
        reached
    }

    fn sent(&self, card: &str) -> f64 {
        let labels = ["verbs", card, "sent"];
        counter(&self.registry, "kvasir_transfer_nic_bytes_total", &labels)
    }

    fn sent_by_tcp(&self) -> f64 {
        counter(&self.registry, "kvasir_transfer_bytes_total", &["tcp", "sent"])
    }
}

fn outcome(future: &CompletionFuture) -> Outcome {
    future.wait_timeout(2 * LONG).expect("every operation ends")
}

/// From the beginning of one region to that of another one, and a count for it.
struct Way<'a> {
    from: &'a Side,
    peer: PeerId,
    source: RegionHandle,
    target: RegionDesc,
}

impl Way<'_> {
    fn write(&self, at: usize, bytes: usize, imm: u32) -> CompletionFuture {
        let (done, written) = Completion::future();
        let source = Source::Region { handle: self.source.clone(), offset: at, bytes };
        let write = Write {
            peer: self.peer,
            source,
            target: self.target,
            target_offset: at as u64,
            imm: Some(imm),
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        self.from.engine.write(write, done).expect("accepted");
        written
    }
}

fn fill(region: &RegionHandle, seed: usize) -> Vec<u8> {
    let bytes: Vec<u8> =
        (0..region.memory().len()).map(|at| (at * 31 + at / 251 + seed * 7) as u8).collect();
    region.memory().copy_from(0, &bytes).expect("it fits");
    bytes
}

fn read(region: &RegionHandle) -> Vec<u8> {
    let mut bytes = vec![0; region.memory().len()];
    region.memory().copy_to(0, &mut bytes).expect("it fits");
    bytes
}

/// Writes until both cards have carried a part of one write, the second path being made meanwhile.
fn until_both_carry(way: &Way<'_>, b: &Side, cards: &[String], imm: u32) {
    let until = Instant::now() + LONG;
    let bytes = way.source.memory().len();
    loop {
        let before = [0, 1].map(|at| way.from.sent(&cards[at]));
        let reached = b.expect(imm, 1);
        assert_eq!(outcome(&way.write(0, bytes, imm)), Ok(()));
        assert_eq!(outcome(&reached), Ok(()));
        let (done, forgotten) = Completion::future();
        b.engine.cancel_imm(imm, done).expect("accepted");
        assert_eq!(outcome(&forgotten), Ok(()));
        let carried = [0, 1].map(|at| way.from.sent(&cards[at]) - before[at]);
        if carried.iter().all(|carried| *carried >= bytes as f64 / 4.0) {
            return;
        }
        assert!(Instant::now() < until, "one card alone carries: {carried:?}");
    }
}

#[test]
fn verbs_the_slices_of_one_write_go_by_both_cards() {
    let Some(wires) = wires() else { return };
    let (a, b) = (Side::new(&wires.here), Side::new(&wires.there));
    let ((source, _), (target, descriptor)) = (a.region(1 << 20, None), b.region(1 << 20, None));
    let bytes = fill(&source, 1);
    let way = Way { from: &a, peer: a.peer(&b), source, target: descriptor };
    until_both_carry(&way, &b, &wires.here, 7);
    assert!(read(&target) == bytes);
    assert_eq!(a.sent_by_tcp(), 0.0);
}

#[test]
fn verbs_a_card_that_fails_leaves_every_count_true_and_is_tried_again() {
    let Some(wires) = wires() else { return };
    let (a, b) = (Side::new(&wires.here), Side::new(&wires.there));
    let ((source, _), (target, descriptor)) = (a.region(1 << 20, None), b.region(1 << 20, None));
    let bytes = fill(&source, 2);
    let way = Way { from: &a, peer: a.peer(&b), source, target: descriptor };
    until_both_carry(&way, &b, &wires.here, 7);
    let reached = b.expect(9, 64);
    // Longer than a slice, so that slices and seals are on both paths when one of them fails.
    let written: Vec<_> = (0..64).map(|at| way.write((at % 16) << 16, 1 << 16, 9)).collect();
    let cut = Cut::new();
    for written in &written {
        assert_eq!(outcome(written), Ok(()));
    }
    assert_eq!(outcome(&reached), Ok(()), "each is counted");
    assert!(read(&target) == bytes);
    let by_first = a.sent(&wires.here[0]);
    let again: Vec<_> = (0..16).map(|at| way.write(at << 16, 1 << 16, 10)).collect();
    assert!(again.iter().all(|written| outcome(written) == Ok(())));
    assert_eq!(a.sent(&wires.here[0]), by_first, "nothing went by a wire that is cut");
    assert_eq!(a.sent_by_tcp(), 0.0, "one card was left");
    let (done, forgotten) = Completion::future();
    b.engine.cancel_imm(9, done).expect("accepted");
    assert_eq!(outcome(&forgotten), Ok(()));
    let twice = b.expect(9, 1);
    assert_eq!(twice.wait_timeout(Duration::from_millis(50)), None, "none is counted twice");
    drop(cut);
    until_both_carry(&way, &b, &wires.here, 7);
}

/// Every wire fails, and TCP is what is left; it is left again when a wire is there.
#[test]
fn verbs_tcp_is_used_only_while_no_card_works() {
    let Some(wires) = wires() else { return };
    let (a, b) = (Side::new(&wires.here[..1]), Side::new(&wires.there[..1]));
    let ((source, _), (target, descriptor)) = (a.region(1 << 16, None), b.region(1 << 16, None));
    let bytes = fill(&source, 3);
    let way = Way { from: &a, peer: a.peer(&b), source, target: descriptor };
    assert_eq!(outcome(&way.write(0, 1 << 16, 1)), Ok(()));
    assert!(read(&target) == bytes);
    let cut = Cut::new();
    assert_eq!(outcome(&way.write(0, 1 << 16, 2)), Ok(()));
    assert!(a.sent_by_tcp() > 0.0);
    drop(cut);
    let (until, by_card) = (Instant::now() + LONG, a.sent(&wires.here[0]));
    while a.sent(&wires.here[0]) == by_card {
        assert_eq!(outcome(&way.write(0, 1 << 16, 3)), Ok(()));
        assert!(Instant::now() < until, "the card is not tried again");
    }
}

#[test]
fn verbs_writes_go_by_the_cards_that_are_near() {
    let Some(wires) = wires() else { return };
    let matrix = |cards: &[String]| -> Topology {
        let [first, second] = [&cards[0], &cards[1]];
        let text = format!(
            r#"{{"cpu:0": {{"preferred": ["{first}"], "secondary": ["{second}"]}},
                 "cuda:3": {{"preferred": ["{second}"], "secondary": ["{first}"]}}}}"#
        );
        text.parse().expect("a matrix")
    };
    // Patient, so that a machine that is slow loses no path: what is sent again goes by the other card.
    let patient = VerbsConfig { ack_timeout_ms: 500, ..VerbsConfig::default() };
    let side = |cards: &[String]| Side::with(cards, patient.clone(), Some(matrix(cards)));
    let (a, b) = (side(&wires.here), side(&wires.there));
    let (node, gpu) = (Some(Location::Cpu { node: 0 }), Some(Location::Gpu { index: 3 }));
    // One that no row names. Without any the system would be asked, which knows where the pages are.
    let any = Some(Location::Cpu { node: 9 });
    let ((source, _), (_far, target)) = (a.region(1 << 20, any), b.region(1 << 20, any));
    until_both_carry(&Way { from: &a, peer: a.peer(&b), source, target }, &b, &wires.here, 7);
    for (at, location) in [(0, node), (1, gpu)] {
        for (of_source, of_target) in [(location, location), (location, any), (any, location)] {
            let (source, _) = a.region(1 << 20, of_source);
            let (target, descriptor) = b.region(1 << 20, of_target);
            let bytes = fill(&source, at);
            let way = Way { from: &a, peer: a.peer(&b), source, target: descriptor };
            let before = [0, 1].map(|card| a.sent(&wires.here[card]));
            assert_eq!(outcome(&way.write(0, 1 << 20, 8)), Ok(()));
            let carried = [0, 1].map(|card| a.sent(&wires.here[card]) - before[card]);
            assert_eq!(carried[at], f64::from(1 << 20), "{of_source:?} {of_target:?}");
            assert_eq!(carried[1 - at], 0.0, "{of_source:?} {of_target:?}");
            assert!(read(&target) == bytes);
        }
    }
}

/// The second card here is paired with the first one there too, and does not reach it.
#[test]
fn verbs_sides_with_unequal_numbers_of_cards_use_those_that_reach_each_other() {
    let Some(wires) = wires() else { return };
    for (here, there) in
        [(&wires.here[..], &wires.there[..1]), (&wires.here[..1], &wires.there[..])]
    {
        let (a, b) = (Side::new(here), Side::new(there));
        let ((source, _), (target, descriptor)) =
            (a.region(1 << 20, None), b.region(1 << 20, None));
        let bytes = fill(&source, 4);
        let way = Way { from: &a, peer: a.peer(&b), source, target: descriptor };
        let reached = b.expect(5, 1);
        assert_eq!(outcome(&way.write(0, 1 << 20, 5)), Ok(()));
        assert_eq!(outcome(&reached), Ok(()));
        assert!(read(&target) == bytes);
        assert_eq!((a.sent(&here[0]), a.sent_by_tcp()), (f64::from(1 << 20), 0.0));
    }
}
