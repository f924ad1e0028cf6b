//! Put-with-signal over paths that reorder, fail, and are closed late. In a third of the runs their queue pairs
//! keep order, in another third nothing does, and in the others each lane has an order of its own, or is relaxed.
//! After each event of the network every word is looked at, as a consumer would that polls: whoever sees one
//! sees its data.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::signalled::{
    Fallback, OrderedBy, Put, PutWithSignal, Signal, SignalGroup, SignalMode, SignalOutcomes,
    SignalledPut,
};
use kvasir_transfer::sim::{SimEngine, SimNetwork, SimOrder};
use kvasir_transfer::{Completion, Handlers, Outcome, RegionDesc, RegionHandle, Source};

use crate::random::Random;
use crate::workload::config;

const RECEIVERS: usize = 3;
/// Of each receiver.
const REGIONS: usize = 2;
const BATCHES: u64 = 12;
const TRANSFERS_MAX: u64 = 6;
const SLOT_BYTES: usize = 2048;
/// Within a slot.
const WORD_AT: usize = SLOT_BYTES - 8;
const SLOTS: usize = (BATCHES * TRANSFERS_MAX) as usize;
const LONG_US: u64 = 60_000_000;

/// What came of one run, or of many.
#[derive(Debug, Default, Clone)]
pub(crate) struct Summary {
    pub signalled: u64,
    pub counted: u64,
    /// Of these, for a path whose acknowledgements say nothing of memory.
    pub unplaced: u64,
    pub failed: u64,
    pub drained: u64,
    pub paths_asked: u64,
    /// Frames that a lane gave back because it does not carry their region.
    pub untaken: u64,
    /// Puts and signals that left the path of the others.
    pub left_order: u64,
}

impl Summary {
    pub(crate) fn add(&mut self, other: &Summary) {
        self.signalled += other.signalled;
        self.counted += other.counted;
        self.unplaced += other.unplaced;
        self.failed += other.failed;
        self.drained += other.drained;
        self.paths_asked += other.paths_asked;
        self.untaken += other.untaken;
        self.left_order += other.left_order;
    }
}

struct Receiver {
    engine: SimEngine,
    /// Alike. What lanes carry differs.
    regions: [(RegionHandle, RegionDesc); REGIONS],
}

/// Which of its receiver's regions each part of a transfer goes to.
#[derive(Clone, Copy)]
struct Split {
    /// The bytes before it are the first part.
    cut: usize,
    parts: [usize; 2],
    word: usize,
}

/// One transfer and all that may be seen of it. Slots are not used twice.
struct Expected {
    receiver: usize,
    slot: usize,
    bytes: usize,
    split: Split,
    /// One of its puts may not be written.
    is_doomed: bool,
    is_seen: bool,
    outcomes: Arc<SignalOutcomes>,
    at: usize,
    /// Its batch is drained: from then on nothing is seen that was not.
    drained: Arc<Mutex<Option<Outcome>>>,
    seen_when_drained: Option<bool>,
}

struct Run {
    seed: u64,
    random: Random,
    network: SimNetwork,
    writer: SimEngine,
    source: RegionHandle,
    receivers: Vec<Receiver>,
    expected: Vec<Expected>,
    drained: u64,
}

fn byte(slot: usize, at: usize) -> u8 {
    (slot * 37 + at * 11) as u8 | 1
}

fn memory(bytes: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::create("sim", bytes, Prefault::No).expect("memory"))
}

pub(crate) fn run(seed: u64) -> Summary {
    let mut run = Run::new(seed);
    for batch in 0..BATCHES {
        let by_us = run.random.between(0, 1_500);
        run.advance(by_us);
        run.begin(batch);
        if run.random.percent(20) {
            let by_us = run.random.between(0, 500);
            run.advance(by_us);
            run.drain(batch);
        }
    }
    run.finish()
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut config = config(seed, &mut random);
        let strict = SimOrder::QueuePairs(NonZeroU32::new(4).expect("not zero"));
        for lane in &mut config.lanes {
            lane.order = match (seed % 3, random.between(0, 2)) {
                (0, _) | (2, 0) => strict,
                (1, _) | (2, 1) => SimOrder::WhenPlaced,
                _ => SimOrder::Relaxed,
            };
        }
        if config.lanes_refuse_regions && config.lanes[0].order == SimOrder::Relaxed {
            // It stands for the path without cards, which carries every region, and places it.
            config.lanes[0].order = SimOrder::WhenPlaced;
        }
        let network = SimNetwork::new(config);
        let writer = network.engine(Handlers::default());
        let (source, _) = writer.register(memory(SLOTS * SLOT_BYTES)).expect("room");
        for slot in 0..SLOTS {
            let bytes: Vec<u8> = (0..SLOT_BYTES).map(|at| byte(slot, at)).collect();
            source.memory().copy_from(slot * SLOT_BYTES, &bytes).expect("it fits");
        }
        let receivers = (0..RECEIVERS).map(|_| {
            let engine = network.engine(Handlers::default());
            let regions =
                [(); REGIONS].map(|()| engine.register(memory(SLOTS * SLOT_BYTES)).expect("room"));
            Receiver { engine, regions }
        });
        let receivers = receivers.collect();
        let expected = Vec::new();
        Run { seed, random, network, writer, source, receivers, expected, drained: 0 }
    }

    fn mode(&mut self) -> SignalMode {
        let group = match self.random.between(0, 3) {
            0 => return SignalMode::Coupled,
            1 => SignalGroup::Size(NonZeroUsize::new(2).expect("not zero")),
            2 => SignalGroup::All,
            _ => SignalGroup::PerDestination,
        };
        SignalMode::Decoupled { group }
    }

    fn begin(&mut self, batch: u64) {
        let count = self.random.between(1, TRANSFERS_MAX) as usize;
        let first = (batch * TRANSFERS_MAX) as usize;
        let (mut transfers, mut expected) = (Vec::new(), Vec::new());
        for at in 0..count {
            let slot = first + at;
            let receiver = self.random.between(0, RECEIVERS as u64 - 1) as usize;
            let bytes = self.random.between(1, WORD_AT as u64) as usize;
            let is_doomed = self.random.percent(8);
            let mut region = || self.random.between(0, REGIONS as u64 - 1) as usize;
            let (parts, word) = ([region(), region()], region());
            let cut = self.random.between(0, bytes as u64) as usize;
            let split = Split { cut, parts, word };
            transfers.push(self.transfer((slot, receiver), (bytes, split), is_doomed));
            expected.push((receiver, slot, bytes, is_doomed, split));
        }
        let (mode, is_short) = (self.mode(), self.random.percent(10));
        let ordered_by = if self.random.percent(60) { OrderedBy::Nic } else { OrderedBy::Host };
        let deadline_us = if is_short { self.random.between(50, 4_000) } else { LONG_US };
        let deadline = Duration::from_micros(deadline_us);
        let (counter, group) = (batch as u32 + 1, batch);
        let call = PutWithSignal { transfers, mode, ordered_by, counter, group, deadline };
        let outcomes = self.writer.put_with_signal(call, Completion::Ignore).expect("accepted");
        let drained = Arc::default();
        let all = expected.into_iter().enumerate();
        self.expected.extend(all.map(|(at, (receiver, slot, bytes, is_doomed, split))| Expected {
            receiver,
            slot,
            bytes,
            split,
            is_doomed,
            is_seen: false,
            outcomes: Arc::clone(&outcomes),
            at,
            drained: Arc::clone(&drained),
            seen_when_drained: None,
        }));
    }

    fn transfer(
        &mut self,
        (slot, receiver): (usize, usize),
        (bytes, split): (usize, Split),
        is_doomed: bool,
    ) -> SignalledPut {
        let Receiver { engine, regions } = &self.receivers[receiver];
        let offset = slot * SLOT_BYTES;
        let Split { cut, parts, word } = split;
        let put = |part: usize, from: usize, to: usize| Put {
            source: Source::Region {
                handle: self.source.clone(),
                offset: offset + from,
                bytes: to - from,
            },
            target: regions[parts[part]].1,
            target_offset: (offset + from) as u64,
        };
        let mut puts = vec![put(0, 0, cut), put(1, cut, bytes)];
        if is_doomed {
            let mut beyond = put(0, 0, 8);
            beyond.target_offset = (SLOTS * SLOT_BYTES) as u64;
            puts.insert(self.random.between(0, 2) as usize, beyond);
        }
        let offset = (offset + WORD_AT) as u64;
        let peer = self.writer.connect(&engine.endpoint()).expect("reachable");
        SignalledPut {
            peer,
            puts,
            signal: Signal { target: regions[word].1, offset, value: slot as u64 + 1 },
        }
    }

    fn drain(&mut self, batch: u64) {
        self.drained += 1;
        let first = (batch * TRANSFERS_MAX) as usize;
        let of_batch = self.expected.iter().find(|expected| expected.slot >= first);
        let drained = Arc::clone(&of_batch.expect("a batch has a transfer").drained);
        let done = Completion::callback(move |outcome| {
            *drained.lock().expect("not poisoned") = Some(outcome);
        });
        self.writer.drain_group(batch, done).expect("accepted");
    }

    /// Lets so much time pass, and looks after each event.
    fn advance(&mut self, by_us: u64) {
        let network = self.network.clone();
        let until_us = network.now_us() + by_us;
        network.run_until(|| {
            self.look();
            network.now_us() >= until_us
        });
        let left_us = until_us.saturating_sub(network.now_us());
        network.advance(left_us);
        self.look();
    }

    fn look(&mut self) {
        let (seed, receivers) = (self.seed, &self.receivers);
        for expected in self.expected.iter_mut().filter(|expected| !expected.is_seen) {
            let (slot, split) = (expected.slot, expected.split);
            let memory = |region: usize| receivers[expected.receiver].regions[region].0.memory();
            let word = memory(split.word).atomic_u64(slot * SLOT_BYTES + WORD_AT).expect("inside");
            let word = word.load(Ordering::Acquire);
            let drained = *expected.drained.lock().expect("not poisoned");
            if drained.is_some() && expected.seen_when_drained.is_none() {
                // What a drain could not make sure of may still come.
                expected.seen_when_drained = Some(word != 0 || drained != Some(Ok(())));
            }
            if word == 0 {
                continue;
            }
            expected.is_seen = true;
            assert_eq!(word, slot as u64 + 1, "seed {seed}: transfer {slot}: another word");
            assert!(!expected.is_doomed, "seed {seed}: transfer {slot}: a put of it was refused");
            let late = expected.seen_when_drained == Some(false);
            assert!(!late, "seed {seed}: transfer {slot}: seen after its group was drained");
            let mut bytes = vec![0; expected.bytes];
            let (first, second) = bytes.split_at_mut(split.cut);
            let [first_in, second_in] = split.parts.map(memory);
            first_in.copy_to(slot * SLOT_BYTES, first).expect("it fits");
            second_in.copy_to(slot * SLOT_BYTES + split.cut, second).expect("it fits");
            let missing = (0..expected.bytes).find(|at| bytes[*at] != byte(slot, *at));
            assert_eq!(missing, None, "seed {seed}: transfer {slot}: seen before its data");
        }
    }

    fn finish(mut self) -> Summary {
        self.network.end_faults();
        for _ in 0..20 {
            self.advance(20_000);
        }
        let mut sum = Summary { drained: self.drained, ..Summary::default() };
        for expected in &self.expected {
            let (seed, slot, is_seen) = (self.seed, expected.slot, expected.is_seen);
            let outcome = expected.outcomes.get(expected.at);
            let told = expected.outcomes.told(expected.at);
            let outcome = outcome.unwrap_or_else(|| panic!("seed {seed}: transfer {slot} is lost"));
            match (outcome, told) {
                (Ok(()), Some(Ok(()))) => {
                    assert!(is_seen, "seed {seed}: transfer {slot}: no signal");
                    sum.signalled += 1;
                }
                (Ok(()), _) => {
                    assert!(!is_seen, "seed {seed}: transfer {slot}: counted and signalled");
                    sum.counted += 1;
                    sum.unplaced += u64::from(told == Some(Err(Fallback::NotPlaced)));
                }
                (Err(_), _) => sum.failed += 1,
            }
            assert!(!expected.is_doomed || outcome.is_err(), "seed {seed}: transfer {slot}");
        }
        let counts = self.receivers.iter().map(|receiver| receiver.engine.counts());
        sum.paths_asked = counts.map(|counts| counts.paths_asked).sum();
        let own = self.writer.counts();
        (sum.untaken, sum.left_order) = (own.untaken, own.left_order);
        self.network.stop();
        sum
    }
}
