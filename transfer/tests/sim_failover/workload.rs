//! One run: two writers and a receiver, transactions of several writes each, and all that can happen to
//! them. Everything follows from the seed.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::scatter::{GroupMember, Scatter, ScatterSlice};
use kvasir_transfer::sim::{SimConfig, SimEngine, SimFaults, SimLane, SimNetwork, SimOrder};
use kvasir_transfer::{
    Completion, Expect, Handlers, Outcome, PageSide, PeerEvent, PeerId, RegionDesc, RegionHandle,
    Source, Write, WritePaged, checksum,
};

use crate::books::{Books, Inner, Message, Op, Place, SLOT_BYTES, Stage, Tx};
use crate::random::Random;

const WRITERS: usize = 2;
const SLOTS: usize = 10;
const STEPS: u64 = 120;
const LONG_US: u64 = 60_000_000;

/// What came of one run, or of many.
#[derive(Debug, Default, Clone)]
pub(crate) struct Summary {
    pub trace: u64,
    pub reached: u64,
    pub confirmed: u64,
    pub reused_imms: u64,
    pub delivered: u64,
    pub paths_asked: u64,
    pub imms_landed: u64,
    pub imms_unknown: u64,
}

impl Summary {
    pub(crate) fn add(&mut self, other: &Summary) {
        self.trace ^= other.trace;
        self.reached += other.reached;
        self.confirmed += other.confirmed;
        self.reused_imms += other.reused_imms;
        self.delivered += other.delivered;
        self.paths_asked += other.paths_asked;
        self.imms_landed += other.imms_landed;
        self.imms_unknown += other.imms_unknown;
    }
}

struct Writer {
    engine: SimEngine,
    sources: RegionHandle,
    /// Which transaction uses each slot of the sources.
    slots: [Option<u64>; SLOTS],
}

struct Run {
    seed: u64,
    random: Random,
    network: SimNetwork,
    books: Books,
    writers: Vec<Writer>,
    receiver: SimEngine,
    target: RegionHandle,
    target_desc: RegionDesc,
    /// Which transaction uses or used each slot of the target.
    slots: [Option<u64>; SLOTS],
    /// Regions of their own, to be revoked.
    own_regions: Vec<(u64, RegionHandle)>,
    next_id: u64,
    next_imm: u32,
    free_imms: Vec<u32>,
    /// Writers of which the receiver has heard that they are gone.
    gone: Arc<Mutex<Vec<u64>>>,
}

pub(crate) fn run(seed: u64) -> Summary {
    let mut run = Run::new(seed);
    for _ in 0..STEPS {
        let by_us = run.random.between(0, 300);
        run.network.advance(by_us);
        run.follow_up();
        run.act();
        run.check();
    }
    run.finish()
}

pub(crate) fn config(seed: u64, random: &mut Random) -> SimConfig {
    let lane = |random: &mut Random| SimLane {
        latency_us: random.between(1, 50),
        jitter_us: random.between(0, 200),
        bytes_per_s: random.between(20, 500) * 1_000_000,
        slice_bytes: random.between(300, 4000) as usize,
        frames_max: random.between(2, 40) as usize,
        order: SimOrder::default(),
    };
    let lanes = random.between(1, 3);
    SimConfig {
        seed,
        lanes: (0..lanes).map(|_| lane(random)).collect(),
        writes_prefer_lanes: seed % 3 == 1,
        lanes_refuse_regions: seed % 5 == 2,
        peer_timeout_us: random.between(3_000, 9_000),
        grace_us: 1_000_000,
        // In some runs everybody is asked for signs of life all the time, and given up for want of them.
        heartbeat_always: seed % 4 == 1,
        heartbeat_interval_us: 400,
        heartbeat_timeout_us: 2_000,
        path_imms_max: random.between(4, 60) as usize,
        faults: SimFaults {
            path_life_us: random.between(300, 6_000),
            deaf_percent: random.between(0, 100),
            deaf_us: random.between(1, 6_000),
            notice_percent: random.between(0, 100),
            outage_us: random.between(1, 3_000),
            drain_us: random.between(0, 500),
            linger_us: random.between(0, 8_000),
            wrong_one_in: 0,
        },
        ..SimConfig::default()
    }
}

fn memory(bytes: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::create("sim", bytes, Prefault::No).expect("memory"))
}

/// What a transaction writes.
fn pattern(tx: u64, at: usize) -> u8 {
    (tx.wrapping_mul(31) as usize + at * 7 + (at >> 8) * 13) as u8 & 0x7f
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let network = SimNetwork::new(config(seed, &mut random));
        let books = Books::default();
        let gone = Arc::new(Mutex::new(Vec::new()));
        let handlers = |gone: Option<Arc<Mutex<Vec<u64>>>>| {
            let (books, told) = (books.clone(), network.clone());
            Handlers {
                on_message: Box::new(move |_, bytes| {
                    let id = (*bytes).try_into().map(u64::from_le_bytes).unwrap_or(u64::MAX);
                    books.message_delivered(told.now_us(), id);
                }),
                on_peer: Box::new(move |event| {
                    if let (PeerEvent::WriterLost { incarnation, .. }, Some(gone)) = (event, &gone)
                    {
                        gone.lock().expect("gone").push(incarnation);
                    }
                }),
            }
        };
        let writer = |_| {
            let engine = network.engine(handlers(None));
            let (sources, _) = engine.register(memory(SLOTS * SLOT_BYTES)).expect("room");
            Writer { engine, sources, slots: [None; SLOTS] }
        };
        let writers: Vec<Writer> = (0..WRITERS).map(writer).collect();
        let receiver = network.engine(handlers(Some(Arc::clone(&gone))));
        let (target, target_desc) = receiver.register(memory(SLOTS * SLOT_BYTES)).expect("room");
        Run {
            seed,
            random,
            network,
            books,
            writers,
            receiver,
            target,
            target_desc,
            slots: [None; SLOTS],
            own_regions: Vec::new(),
            next_id: 0,
            next_imm: 0,
            free_imms: Vec::new(),
            gone,
        }
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    // ---- what is done ----

    fn act(&mut self) {
        match self.random.between(0, 99) {
            0..50 => self.begin_tx(),
            50..65 => self.send_message(),
            65..78 => self.give_up_one(),
            78..81 => {
                let writer = self.random.between(0, WRITERS as u64 - 1) as usize;
                self.cut_off(writer);
            }
            81..84 => self.revoke_one(),
            84 if self.seed % 8 == 3 => self.kill_someone(),
            _ => {}
        }
    }

    fn begin_tx(&mut self) {
        let writer = self.random.between(0, WRITERS as u64 - 1) as usize;
        if self.books.lock().dead.contains(&writer) || self.receiver_is_dead() {
            return;
        }
        let Some(source_slot) = self.writers[writer].slots.iter().position(Option::is_none) else {
            return;
        };
        let own_region = self.random.percent(8);
        let id = self.id();
        let Some((place, target)) = self.place(id, own_region) else { return };
        let imm = self.imm();
        let former = place.read();
        let bytes = self.random.between(1, SLOT_BYTES as u64) as usize;
        let mut whole = former;
        for (at, byte) in whole.iter_mut().enumerate().take(bytes) {
            *byte = pattern(id, at);
        }
        self.writers[writer].slots[source_slot] = Some(id);
        let tx = Tx {
            writer,
            imm,
            place: place.clone(),
            whole,
            stage: Stage::Open,
            expectation: None,
            is_expected: false,
            never: self.random.percent(6),
            cancelled: false,
            revoked: false,
            was_cut: false,
        };
        *self.books.lock().imm_uses.entry(imm).or_default() += 1;
        self.books.lock().txs.insert(id, tx);
        let parts = self.cut(bytes);
        let count: u64 = parts.iter().map(|part| part.pages as u64).sum();
        let before = self.random.percent(50);
        if before {
            self.expect(id, count);
        }
        let short = self.random.percent(10);
        for part in parts {
            let deadline_us = if short { self.random.between(50, 4_000) } else { LONG_US };
            let from = (source_slot, place.offset);
            self.write(id, &part, from, target, deadline_us);
        }
        if !before {
            let by_us = self.random.between(0, 600);
            self.network.advance(by_us);
            self.expect(id, count);
        }
    }

    /// A slot of the receiver's memory that is free, and filled with what its last user left.
    fn place(&mut self, id: u64, own_region: bool) -> Option<(Place, RegionDesc)> {
        if own_region {
            let memory = memory(SLOT_BYTES);
            let (handle, descriptor) = self.receiver.register(Arc::clone(&memory)).ok()?;
            self.own_regions.push((id, handle));
            return Some((Place { memory, offset: 0 }, descriptor));
        }
        let slot = (0..SLOTS).find(|slot| {
            let Some(former) = self.slots[*slot] else { return true };
            self.books.lock().txs.get(&former).is_none_or(|tx| tx.stage == Stage::Over)
        })?;
        if let Some(former) = self.slots[slot].replace(id) {
            self.books.check_place(former);
        }
        let place = Place { memory: Arc::clone(self.target.memory()), offset: slot * SLOT_BYTES };
        Some((place, self.target_desc))
    }

    /// Sometimes one that was used before.
    fn imm(&mut self) -> u32 {
        if !self.free_imms.is_empty() && self.random.percent(30) {
            let at = self.random.between(0, self.free_imms.len() as u64 - 1) as usize;
            return self.free_imms.swap_remove(at);
        }
        self.next_imm += 1;
        self.next_imm
    }

    /// Divides so many bytes among writes, singles and pages.
    fn cut(&mut self, bytes: usize) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut offset = 0;
        while offset < bytes {
            let left = bytes - offset;
            let paged = left > 64 && self.random.percent(40);
            let part = if paged {
                let pages = self.random.between(2, 8) as usize;
                let page_bytes = self.random.between(1, (left / pages) as u64) as usize;
                Part { offset, pages, page_bytes }
            } else {
                let page_bytes = self.random.between(1, left as u64) as usize;
                Part { offset, pages: 1, page_bytes }
            };
            offset += part.pages * part.page_bytes;
            parts.push(part);
            // The last one takes what is left, so that there are not too many.
            if parts.len() == 5 && offset < bytes {
                parts.push(Part { offset, pages: 1, page_bytes: bytes - offset });
                return parts;
            }
        }
        parts
    }

    fn write(
        &mut self,
        tx: u64,
        part: &Part,
        (source_slot, target_offset): (usize, usize),
        target: RegionDesc,
        deadline_us: u64,
    ) {
        let id = self.id();
        let writer = self.books.lock().txs[&tx].writer;
        let order = self.random.shuffled(part.pages);
        let with_checksum = self.random.percent(50);
        let Writer { engine, sources, .. } = &self.writers[writer];
        let source_offset = source_slot * SLOT_BYTES;
        let mut checksums = Vec::new();
        for (from, to) in order.iter().enumerate() {
            let page: Vec<u8> = (0..part.page_bytes)
                .map(|at| pattern(tx, part.offset + *to as usize * part.page_bytes + at))
                .collect();
            checksums.push(checksum(&page));
            let at = source_offset + part.offset + from * part.page_bytes;
            sources.memory().copy_from(at, &page).expect("it fits");
        }
        let untrusted = self.books.lock().untrusted.contains_key(&writer);
        let source = Place { memory: Arc::clone(sources.memory()), offset: source_offset };
        let range = (source, part.offset, part.pages * part.page_bytes);
        let op = Op {
            tx,
            deadline_us: self.network.now_us() + deadline_us,
            is_short: deadline_us < LONG_US,
            outcome: None,
            untrusted,
            source: vec![range],
        };
        self.books.lock().ops.insert(id, op);
        let (books, network) = (self.books.clone(), self.network.clone());
        let done = Completion::callback(move |outcome| {
            books.op_ended(network.now_us(), id, outcome);
        });
        let peer = engine.connect(&self.receiver.endpoint()).expect("reachable");
        let imm = Some(self.books.lock().txs[&tx].imm);
        let deadline = Duration::from_micros(deadline_us);
        let at = (target_offset + part.offset) as u64;
        if part.pages == 1 && self.random.percent(80) {
            let source = Source::Region {
                handle: sources.clone(),
                offset: source_offset + part.offset,
                bytes: part.page_bytes,
            };
            let checksum = with_checksum.then_some(checksums[0]);
            let write = Write {
                peer,
                source,
                target,
                target_offset: at,
                imm,
                checksum,
                group: tx,
                deadline,
            };
            engine.write(write, done).expect("accepted");
        } else if !with_checksum && id.is_multiple_of(3) {
            // The same as a scatter to one member: each slice is a write of its own.
            let slices = order.iter().enumerate().map(|(from, to)| ScatterSlice {
                member: 0,
                source_offset: (source_offset + part.offset + from * part.page_bytes) as u64,
                target_offset: at + u64::from(*to) * part.page_bytes as u64,
                bytes: part.page_bytes as u64,
                imm,
            });
            let peers = engine.register_group(vec![GroupMember { peer, target }]).expect("one");
            let (source, slices) = (sources.clone(), slices.collect());
            let scatter = Scatter { peers, source, slices, group: tx, deadline };
            engine.scatter(scatter, done).expect("accepted");
        } else {
            let stride = part.page_bytes as u64;
            let side = |offset, indices| PageSide { offset, stride, indices };
            let write = WritePaged {
                peer,
                source: sources.clone(),
                source_pages: side(
                    (source_offset + part.offset) as u64,
                    (0..part.pages as u32).collect(),
                ),
                target,
                target_pages: side(at, order),
                page_bytes: part.page_bytes,
                imm,
                checksums: if with_checksum { checksums } else { Vec::new() },
                group: tx,
                deadline,
            };
            engine.write_paged(write, done).expect("accepted");
        }
    }

    fn expect(&mut self, id: u64, count: u64) {
        let (imm, never) = {
            let mut books = self.books.lock();
            let Some(tx) = books.txs.get_mut(&id).filter(|tx| !tx.cancelled) else { return };
            tx.is_expected = true;
            (tx.imm, tx.never)
        };
        let (books, network) = (self.books.clone(), self.network.clone());
        let done = Completion::callback(move |outcome: Outcome| {
            books.expectation_ended(network.now_us(), id, outcome);
        });
        let expect = Expect { imm, count: count + u64::from(never), deadline: None };
        self.receiver.expect_imm(expect, done).expect("accepted");
    }

    fn send_message(&mut self) {
        let writer = self.random.between(0, WRITERS as u64 - 1) as usize;
        let id = self.id();
        let is_short = self.random.percent(10);
        let deadline_us = if is_short { self.random.between(20, 2_000) } else { LONG_US };
        let untrusted = self.books.lock().untrusted.contains_key(&writer);
        if self.books.lock().dead.contains(&writer) {
            return;
        }
        let message = Message { from: writer, is_short, untrusted, outcome: None, delivered: 0 };
        self.books.lock().messages.insert(id, message);
        let (books, network) = (self.books.clone(), self.network.clone());
        let done = Completion::callback(move |outcome| {
            books.message_ended(network.now_us(), id, outcome);
        });
        let engine = &self.writers[writer].engine;
        let peer = engine.connect(&self.receiver.endpoint()).expect("reachable");
        let deadline = Duration::from_micros(deadline_us);
        engine.send(peer, id.to_le_bytes().to_vec(), deadline, done).expect("accepted");
    }

    fn open_txs(&self) -> Vec<u64> {
        let books = self.books.lock();
        let open = books.txs.iter().filter(|(_, tx)| tx.stage == Stage::Open && !tx.cancelled);
        open.map(|(id, _)| *id).collect()
    }

    fn give_up_one(&mut self) {
        let open = self.open_txs();
        if !open.is_empty() {
            let at = self.random.between(0, open.len() as u64 - 1) as usize;
            self.give_up(open[at]);
        }
    }

    /// The receiver cancels the immediate, and asks the writer to stop; where that one cannot be sure,
    /// it is cut off.
    fn give_up(&mut self, id: u64) {
        let (imm, writer) = {
            let mut books = self.books.lock();
            let Some(tx) = books.txs.get_mut(&id) else { return };
            tx.cancelled = true;
            tx.stage = Stage::Quarantined;
            (tx.imm, tx.writer)
        };
        self.cancel_imm(id, imm);
        if self.books.lock().dead.contains(&writer) {
            self.cut_off(writer);
            return;
        }
        let (books, gone) = (self.books.clone(), Arc::clone(&self.gone));
        let incarnation = self.writers[writer].engine.endpoint().incarnation;
        let done = Completion::callback(move |outcome: Outcome| match outcome {
            Ok(()) => books.confirmed(id),
            Err(_) => gone.lock().expect("gone").push(incarnation),
        });
        self.writers[writer].engine.drain_group(id, done).expect("accepted");
    }

    fn cancel_imm(&self, id: u64, imm: u32) {
        let books = self.books.clone();
        let done = Completion::callback(move |_| books.imm_cancelled(id));
        self.receiver.cancel_imm(imm, done).expect("accepted");
    }

    fn cut_off(&mut self, writer: usize) {
        if self.receiver_is_dead() {
            return;
        }
        let of_writer: Vec<u64> = {
            let mut books = self.books.lock();
            books.untrusted.insert(writer, self.next_id);
            for message in books.messages.values_mut().filter(|message| message.from == writer) {
                message.untrusted = true;
            }
            let open = books.txs.iter_mut().filter(|(_, tx)| tx.writer == writer);
            let open = open.filter(|(_, tx)| tx.stage != Stage::Over);
            open.map(|(id, tx)| {
                tx.was_cut = true;
                *id
            })
            .collect()
        };
        // What is over may still have operations that are not told so.
        for tx in self.books.lock().txs.values_mut().filter(|tx| tx.writer == writer) {
            tx.was_cut = true;
        }
        let books = self.books.clone();
        let cut = of_writer.clone();
        let done = Completion::callback(move |_| {
            for id in &cut {
                books.confirmed(*id);
            }
        });
        let peer: PeerId =
            self.receiver.connect(&self.writers[writer].engine.endpoint()).expect("reachable");
        // First the counters, so that nothing is reached in a place that was given up.
        for id in of_writer {
            let imm = {
                let mut books = self.books.lock();
                let Some(tx) = books.txs.get_mut(&id) else { continue };
                tx.stage = Stage::Quarantined;
                tx.cancelled = true;
                tx.imm
            };
            self.cancel_imm(id, imm);
        }
        self.receiver.cut_off(peer, done).expect("accepted");
    }

    fn revoke_one(&mut self) {
        if self.own_regions.is_empty() || self.receiver_is_dead() {
            return;
        }
        let at = self.random.between(0, self.own_regions.len() as u64 - 1) as usize;
        let (id, region) = self.own_regions.swap_remove(at);
        if let Some(tx) = self.books.lock().txs.get_mut(&id) {
            tx.revoked = true;
        }
        let books = self.books.clone();
        let imm = self.books.lock().txs.get(&id).map(|tx| (tx.imm, tx.stage));
        if let Some((imm, stage)) = imm
            && stage != Stage::Over
        {
            self.cancel_imm(id, imm);
        }
        let done = Completion::callback(move |_| books.confirmed(id));
        self.receiver.revoke(&region, done).expect("accepted");
    }

    fn kill_someone(&mut self) {
        let who = self.random.between(0, 2 * WRITERS as u64) as usize;
        if !self.books.lock().dead.is_empty() {
            return;
        }
        self.books.lock().dead.insert(who.min(WRITERS));
        let engine = self.writers.get(who).map_or(&self.receiver, |writer| &writer.engine);
        self.network.kill(engine);
    }

    fn receiver_is_dead(&self) -> bool {
        self.receiver_died(&self.books.lock())
    }

    fn receiver_died(&self, books: &Inner) -> bool {
        books.dead.contains(&WRITERS)
    }

    // ---- what follows ----

    fn follow_up(&mut self) {
        self.cut_off_the_gone();
        self.give_up_the_failed();
        self.free_sources();
        self.free_finished_imms();
    }

    /// Those that cannot say what became of their writes, and those that died.
    fn cut_off_the_gone(&mut self) {
        let gone: Vec<u64> = std::mem::take(&mut *self.gone.lock().expect("gone"));
        for incarnation in gone {
            let writer = self
                .writers
                .iter()
                .position(|writer| writer.engine.endpoint().incarnation == incarnation);
            let Some(writer) = writer else { continue };
            let dead = self.books.lock().dead.contains(&writer);
            // One whose last path has failed may come back: only who was asked in vain is cut off.
            let asked =
                self.books.lock().txs.values().any(|tx| {
                    tx.writer == writer && tx.cancelled && tx.stage == Stage::Quarantined
                });
            if dead || asked {
                self.cut_off(writer);
            }
        }
    }

    /// Of which a write has failed: it will never be whole.
    fn give_up_the_failed(&mut self) {
        let failed: Vec<u64> = {
            let books = self.books.lock();
            let failed = books.ops.values().filter(|op| matches!(op.outcome, Some(Err(_))));
            let all = failed.map(|op| op.tx).collect::<std::collections::BTreeSet<u64>>();
            all.into_iter().collect()
        };
        let open = self.open_txs();
        for id in failed.into_iter().filter(|id| open.contains(id)) {
            self.give_up(id);
        }
    }

    fn free_sources(&mut self) {
        let books = self.books.lock();
        for writer in &mut self.writers {
            for slot in &mut writer.slots {
                let used =
                    |id: u64| books.ops.values().any(|op| op.tx == id && op.outcome.is_none());
                if slot.is_some_and(|id| !used(id)) {
                    *slot = None;
                }
            }
        }
    }

    /// The immediates of those that are over are cancelled, and may then be used again.
    fn free_finished_imms(&mut self) {
        if self.receiver_is_dead() {
            return;
        }
        let over: Vec<(u64, u32)> = {
            let mut books = self.books.lock();
            let over = books.txs.iter_mut().filter(|(_, tx)| tx.stage == Stage::Over);
            over.filter(|(_, tx)| tx.imm != 0)
                .map(|(id, tx)| {
                    // A transaction that ended without being expected may be late with that.
                    tx.cancelled = true;
                    (*id, std::mem::take(&mut tx.imm))
                })
                .collect()
        };
        for (id, imm) in over {
            self.cancel_imm(id, imm);
            if self.random.percent(60) {
                self.free_imms.push(imm);
            }
        }
    }

    // ---- what must hold ----

    fn check(&self) {
        let violations = self.books.violations();
        assert!(violations.is_empty(), "seed {}: {violations:#?}", self.seed);
    }

    /// Nothing fails any more: all that can end does, and rightly.
    fn finish(mut self) -> Summary {
        self.network.end_faults();
        self.network.advance(20_000);
        self.follow_up();
        for _ in 0..20 {
            self.network.advance(20_000);
            self.follow_up();
        }
        self.check();
        self.check_the_end();
        let counts = self.receiver.counts();
        let books = self.books.clone();
        let books = books.lock();
        let over = |reached: bool| {
            let over = books.txs.values().filter(|tx| tx.stage == Stage::Over);
            over.filter(|tx| (tx.expectation == Some(Ok(()))) == reached).count() as u64
        };
        let mut hasher = DefaultHasher::new();
        (self.network.trace(), &books.log).hash(&mut hasher);
        Summary {
            trace: hasher.finish(),
            reached: over(true),
            confirmed: over(false),
            reused_imms: books.imm_uses.values().map(|uses| uses - 1).sum(),
            delivered: books.messages.values().map(|message| message.delivered).sum(),
            paths_asked: counts.paths_asked,
            imms_landed: counts.imms_landed,
            imms_unknown: counts.imms_unknown,
        }
    }

    fn check_the_end(&self) {
        let seed = self.seed;
        for id in self.slots.iter().flatten() {
            self.books.check_place(*id);
        }
        self.check();
        let books = self.books.lock();
        let anyone_died = !books.dead.is_empty();
        for (id, op) in &books.ops {
            let told = op.outcome.is_some() || books.dead.contains(&books.txs[&op.tx].writer);
            // A receiver that died leaves whoever has not noticed it waiting for the deadline.
            assert!(told || anyone_died, "seed {seed}: op {id} of tx {} is lost", op.tx);
        }
        for (id, tx) in &books.txs {
            let whole = !tx.cancelled && !tx.revoked && !tx.never && !anyone_died;
            let reached = tx.expectation == Some(Ok(()));
            assert!(!whole || reached, "seed {seed}: tx {id} was never reached");
            // A drain, a cut-off or a revocation always comes to an end.
            let over = tx.stage == Stage::Over || self.receiver_died(&books);
            assert!(!tx.cancelled || over, "seed {seed}: tx {id} is in quarantine for ever");
        }
        for (id, message) in &books.messages {
            let told = message.outcome.is_some() || anyone_died;
            assert!(told, "seed {seed}: message {id} is lost");
        }
        let excess = self.receiver.counts().excess;
        assert_eq!(excess, 0, "seed {seed}: more was counted than was written");
    }
}

/// Handlers and callbacks hold the network, which holds them.
impl Drop for Run {
    fn drop(&mut self) {
        self.network.stop();
    }
}

/// A part of a transaction's bytes: one write, or equal pages.
struct Part {
    offset: usize,
    pages: usize,
    page_bytes: usize,
}
