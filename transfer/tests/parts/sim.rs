//! The simulated domain under faults, over many seeds: what the sender believes is never more than
//! what has landed, counts are exact, and the same seed gives the same run.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::sim::{SimConfig, SimEngine, SimNetwork};
use kvasir_transfer::{
    Completion, CompletionFlag, Expect, Handlers, PeerId, RegionDesc, RegionHandle, Source, Write,
    WriteError,
};

const WRITES: usize = 40;
const BYTES: usize = 1000;

struct Pair {
    network: SimNetwork,
    a: SimEngine,
    b: SimEngine,
    source: RegionHandle,
    target: RegionHandle,
    descriptor: RegionDesc,
    peer: PeerId,
}

fn pair(seed: u64) -> Pair {
    let config = SimConfig { seed, bytes_per_s: 100_000_000, ..SimConfig::default() };
    let network = SimNetwork::new(config);
    let (a, b) = (network.engine(Handlers::default()), network.engine(Handlers::default()));
    let memory = || {
        let memory = SharedMemory::create("sim", WRITES * BYTES, Prefault::No).expect("memory");
        Arc::new(memory)
    };
    let (source, _) = a.register(memory()).expect("room");
    let (target, descriptor) = b.register(memory()).expect("room");
    source.memory().copy_from(0, &[1; WRITES * BYTES]).expect("it fits");
    let peer = a.connect(&b.endpoint()).expect("reachable");
    Pair { network, a, b, source, target, descriptor, peer }
}

impl Pair {
    fn write(&self, at: usize) -> Arc<CompletionFlag> {
        let (done, flag) = Completion::flag();
        let write = Write {
            peer: self.peer,
            source: Source::Region {
                handle: self.source.clone(),
                offset: at * BYTES,
                bytes: BYTES,
            },
            target: self.descriptor,
            target_offset: (at * BYTES) as u64,
            imm: Some(7),
            checksum: None,
            group: 3,
            deadline: Duration::from_secs(100),
        };
        self.a.write(write, done).expect("accepted");
        flag
    }

    fn landed(&self, at: usize) -> bool {
        let mut bytes = [0; BYTES];
        self.target.memory().copy_to(at * BYTES, &mut bytes).expect("it fits");
        bytes == [1; BYTES]
    }

    fn expect(&self, count: u64) -> Arc<CompletionFlag> {
        let (done, flag) = Completion::flag();
        self.b.expect_imm(Expect { imm: 7, count, deadline: None }, done).expect("accepted");
        flag
    }

    fn outcome(&self, flag: &CompletionFlag) -> Result<(), WriteError> {
        assert!(self.network.run_until(|| flag.get().is_some()), "it ends");
        flag.get().expect("just seen")
    }
}

#[test]
fn writes_overtake_each_other_and_all_are_counted() {
    let mut overtaken = 0;
    for seed in 0..50 {
        let pair = pair(seed);
        let order = Arc::new(Mutex::new(Vec::new()));
        for at in 0..WRITES {
            let order = Arc::clone(&order);
            let write = Write {
                peer: pair.peer,
                source: Source::Inline(vec![1; BYTES]),
                target: pair.descriptor,
                target_offset: (at * BYTES) as u64,
                imm: Some(7),
                checksum: None,
                group: 0,
                deadline: Duration::from_secs(100),
            };
            let done = Completion::callback(move |_| order.lock().expect("order").push(at));
            pair.a.write(write, done).expect("accepted");
        }
        let reached = pair.expect(WRITES as u64);
        assert_eq!(pair.outcome(&reached), Ok(()), "seed {seed}");
        assert!((0..WRITES).all(|at| pair.landed(at)), "seed {seed}");
        pair.network.run_until(|| order.lock().expect("order").len() == WRITES);
        let order = order.lock().expect("order");
        overtaken += usize::from(order.windows(2).any(|pair| pair[0] > pair[1]));
    }
    assert_eq!(overtaken, 50, "the network reorders");
}

#[test]
fn what_landed_without_an_acknowledgement_is_undecided_to_the_sender() {
    for seed in 0..50 {
        let pair = pair(seed);
        let first = pair.write(0);
        assert_eq!(pair.outcome(&first), Ok(()));
        pair.network.lose_acknowledgements(&pair.a);
        let rest: Vec<_> = (1..WRITES).map(|at| pair.write(at)).collect();
        let reached = pair.expect(WRITES as u64);
        assert_eq!(pair.outcome(&reached), Ok(()), "seed {seed}: all have landed");
        for flag in &rest {
            assert_eq!(pair.outcome(flag), Err(WriteError::PeerGone), "seed {seed}");
        }
        let (done, drained) = Completion::flag();
        pair.a.drain_group(3, done).expect("accepted");
        let undecided = Err(WriteError::PeerGone);
        assert_eq!(pair.outcome(&drained), undecided, "seed {seed}: only the receiver can be sure");
    }
}

#[test]
fn a_receiver_that_dies_at_any_moment_leaves_every_write_definite() {
    for seed in 0..100 {
        let pair = pair(seed);
        let written: Vec<_> = (0..WRITES).map(|at| pair.write(at)).collect();
        pair.network.advance(seed * 7);
        pair.network.kill(&pair.b);
        for (at, flag) in written.iter().enumerate() {
            match pair.outcome(flag) {
                Ok(()) => {
                    assert!(pair.landed(at), "seed {seed}: write {at} is said to have landed");
                }
                Err(error) => assert_eq!(error, WriteError::PeerGone, "seed {seed}"),
            }
        }
    }
}

#[test]
fn a_cut_off_at_any_moment_holds() {
    for seed in 0..100 {
        let pair = pair(seed);
        let written: Vec<_> = (0..WRITES).map(|at| pair.write(at)).collect();
        pair.network.advance(seed * 7);
        let back = pair.b.connect(&pair.a.endpoint()).expect("reachable");
        let (done, cut) = Completion::flag();
        pair.b.cut_off(back, done).expect("accepted");
        assert_eq!(pair.outcome(&cut), Ok(()));
        let clean = vec![9; WRITES * BYTES];
        pair.target.memory().copy_from(0, &clean).expect("it fits");
        pair.b.cancel_imm(7, Completion::Ignore).expect("accepted");
        let counted = pair.expect(1);
        for flag in &written {
            pair.outcome(flag).ok();
        }
        pair.network.advance(10_000);
        let mut after = vec![0; WRITES * BYTES];
        pair.target.memory().copy_to(0, &mut after).expect("it fits");
        assert!(after == clean, "seed {seed}: something landed");
        assert_eq!(counted.get(), None, "seed {seed}: something was counted");
    }
}

#[test]
fn a_drain_at_any_moment_is_the_truth() {
    for seed in 0..100 {
        let pair = pair(seed);
        let written: Vec<_> = (0..WRITES).map(|at| pair.write(at)).collect();
        pair.network.advance(seed * 7);
        let (done, drained) = Completion::flag();
        pair.a.drain_group(3, done).expect("accepted");
        assert_eq!(pair.outcome(&drained), Ok(()));
        let before: Vec<bool> = (0..WRITES).map(|at| pair.landed(at)).collect();
        for (at, flag) in written.iter().enumerate() {
            match flag.get() {
                Some(Ok(())) => assert!(before[at], "seed {seed}: write {at}"),
                Some(Err(WriteError::Cancelled)) => assert!(!before[at], "seed {seed}: write {at}"),
                other => panic!("seed {seed}: write {at}: {other:?}"),
            }
        }
        pair.network.advance(1_000_000);
        let after: Vec<bool> = (0..WRITES).map(|at| pair.landed(at)).collect();
        assert_eq!(before, after, "seed {seed}: nothing lands after a drain");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| {
        let pair = pair(seed);
        let log = Arc::new(Mutex::new(Vec::new()));
        for at in 0..WRITES {
            let (log, network) = (Arc::clone(&log), pair.network.clone());
            let done = Completion::callback(move |outcome| {
                log.lock().expect("log").push((at, network.now_us(), outcome));
            });
            let write = Write {
                peer: pair.peer,
                source: Source::Inline(vec![1; BYTES]),
                target: pair.descriptor,
                target_offset: 0,
                imm: Some(7),
                checksum: None,
                group: 0,
                deadline: Duration::from_secs(1),
            };
            pair.a.write(write, done).expect("accepted");
        }
        pair.network.run_until(|| log.lock().expect("log").len() == WRITES);
        std::mem::take(&mut *log.lock().expect("log"))
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
}
