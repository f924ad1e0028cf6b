//! What must hold, kept apart from who does what: every transaction with its place in the receiver's
//! memory, and what was told of it when. Violations are noted as they are seen, because they are seen in
//! callbacks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};

use kvasir_transfer::memory::SharedMemory;
use kvasir_transfer::{Outcome, WriteError};

pub(crate) const SLOT_BYTES: usize = 8192;

/// Shared with the callbacks.
#[derive(Clone, Default)]
pub(crate) struct Books(Arc<Mutex<Inner>>);

#[derive(Default)]
pub(crate) struct Inner {
    pub txs: BTreeMap<u64, Tx>,
    pub ops: BTreeMap<u64, Op>,
    pub messages: BTreeMap<u64, Message>,
    pub violations: Vec<String>,
    /// How often each immediate was used.
    pub imm_uses: BTreeMap<u32, u64>,
    /// Writers that were cut off, and nothing that they began since has succeeded: with the id that was
    /// given last before. What they begin may end with the session in which they learn of it.
    pub untrusted: BTreeMap<usize, u64>,
    pub dead: BTreeSet<usize>,
    /// What was told, for comparing runs.
    pub log: Vec<(u64, u64, u64)>,
}

/// A slot in the receiver's memory.
#[derive(Clone)]
pub(crate) struct Place {
    pub memory: Arc<SharedMemory>,
    pub offset: usize,
}

impl Place {
    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; SLOT_BYTES];
        self.memory.copy_to(self.offset, &mut bytes).expect("it fits");
        bytes
    }

    pub(crate) fn fill(&self, byte: u8) {
        self.memory.copy_from(self.offset, &[byte; SLOT_BYTES]).expect("it fits");
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its writes may land.
    Open,
    /// It is being given up: nobody may use its place before that is confirmed.
    Quarantined,
    /// Its place is its owner's again, and filled with the transaction's mark.
    Over,
}

pub(crate) struct Tx {
    pub writer: usize,
    pub imm: u32,
    pub place: Place,
    /// What lies there when all has landed.
    pub whole: Vec<u8>,
    pub stage: Stage,
    /// What the expectation ended with.
    pub expectation: Option<Outcome>,
    pub is_expected: bool,
    /// One more than there are writes is expected: it must never be reached.
    pub never: bool,
    /// The receiver has asked for its end.
    pub cancelled: bool,
    pub revoked: bool,
    /// Its writer was cut off, or someone died, after it began.
    pub was_cut: bool,
}

pub(crate) struct Op {
    pub tx: u64,
    pub deadline_us: u64,
    pub is_short: bool,
    pub outcome: Option<Outcome>,
    /// Its writer's session might have been refused from the start.
    pub untrusted: bool,
    pub source: Vec<(Place, usize, usize)>,
}

pub(crate) struct Message {
    pub from: usize,
    pub is_short: bool,
    pub untrusted: bool,
    pub outcome: Option<Outcome>,
    pub delivered: u64,
}

/// The byte that a transaction leaves in its place.
pub(crate) fn mark(tx: u64) -> u8 {
    0x80 | (tx % 0x7f) as u8
}

/// Something that was begun under this id has succeeded.
fn trust(untrusted: &mut BTreeMap<usize, u64>, writer: usize, id: u64) {
    if untrusted.get(&writer).is_some_and(|last| id > *last) {
        untrusted.remove(&writer);
    }
}

/// A deadline is looked at this often.
const SLACK_US: u64 = 1_000;

fn code(outcome: Outcome) -> u64 {
    match outcome {
        Ok(()) => 0,
        Err(WriteError::Refused(refusal)) => 10 + u64::from(refusal.code()),
        Err(WriteError::Corrupt) => 1,
        Err(WriteError::PeerGone) => 2,
        Err(WriteError::DeadlineExceeded) => 3,
        Err(WriteError::Cancelled) => 4,
    }
}

impl Books {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("nothing panics while it holds the books")
    }

    // ---- what is told ----

    /// The receiver is told that its count is reached, or not.
    pub(crate) fn expectation_ended(&self, now_us: u64, id: u64, outcome: Outcome) {
        let mut books = self.lock();
        books.log.push((now_us, id, code(outcome)));
        let Some(tx) = books.txs.get_mut(&id) else { return };
        let former = tx.expectation.replace(outcome);
        let mut wrong = Vec::new();
        if former.is_some() {
            wrong.push(format!("tx {id}: its expectation ended twice"));
        }
        if outcome == Ok(()) {
            if tx.never {
                wrong.push(format!("tx {id}: more was counted than was written"));
            }
            if tx.stage == Stage::Over {
                wrong.push(format!("tx {id}: reached after its end was confirmed"));
            } else {
                let now = tx.place.read();
                if let Some(at) = (0..SLOT_BYTES).find(|at| now[*at] != tx.whole[*at]) {
                    wrong.push(format!("tx {id}: reached while byte {at} is not there"));
                }
                // Everything has landed: the place may be used for something else from now on.
                tx.place.fill(mark(id));
                tx.stage = Stage::Over;
            }
        }
        books.violations.extend(wrong);
    }

    pub(crate) fn op_ended(&self, now_us: u64, id: u64, outcome: Outcome) {
        let mut books = self.lock();
        let Inner { ops, txs, violations, imm_uses, untrusted, dead, log, .. } = &mut *books;
        log.push((now_us, id, code(outcome)));
        let Some(op) = ops.get_mut(&id) else { return };
        let Some(tx) = txs.get(&op.tx) else { return };
        let mut wrong = |what: &str| violations.push(format!("op {id} of tx {}: {what}", op.tx));
        if op.outcome.replace(outcome).is_some() {
            wrong("it ended twice");
        }
        if now_us > op.deadline_us + SLACK_US {
            wrong("it ended long after its deadline");
        }
        // Whoever waited for the end may use the source again.
        for (source, offset, bytes) in &op.source {
            let scribble = vec![0x55; *bytes];
            source.memory.copy_from(source.offset + offset, &scribble).expect("it fits");
        }
        let reused = imm_uses.get(&tx.imm).is_some_and(|uses| *uses > 1);
        // A revocation cancels the immediate, too.
        let given_up = tx.cancelled || tx.revoked;
        let may_be_gone = tx.was_cut || op.untrusted || reused || given_up;
        let anyone_died = !dead.is_empty();
        let fine = match outcome {
            Ok(()) => {
                trust(untrusted, tx.writer, id);
                true
            }
            Err(WriteError::PeerGone) => may_be_gone || anyone_died,
            Err(WriteError::DeadlineExceeded) => op.is_short || anyone_died,
            Err(WriteError::Cancelled) => tx.cancelled,
            Err(WriteError::Refused(_)) => tx.revoked,
            // Bytes of a place that was given up, and of a source that is somebody else's.
            Err(WriteError::Corrupt) => tx.stage != Stage::Open,
        };
        if !fine {
            wrong(&format!("{outcome:?} though nothing happened that could end it so"));
        }
    }

    /// Nothing of the transaction lands any more: its place is used for something else.
    pub(crate) fn confirmed(&self, id: u64) {
        let mut books = self.lock();
        let Some(tx) = books.txs.get_mut(&id) else { return };
        if tx.stage != Stage::Over {
            tx.place.fill(mark(id));
            tx.stage = Stage::Over;
        }
    }

    /// The receiver has cancelled the immediate, and is told that this is done.
    pub(crate) fn imm_cancelled(&self, id: u64) {
        let mut books = self.lock();
        let Some(tx) = books.txs.get(&id) else { return };
        if tx.is_expected && tx.expectation.is_none() {
            books.violations.push(format!("tx {id}: cancelled, and it can still be reached"));
        }
    }

    pub(crate) fn message_delivered(&self, now_us: u64, id: u64) {
        let mut books = self.lock();
        books.log.push((now_us, id, 99));
        let Some(message) = books.messages.get_mut(&id) else {
            books.violations.push(format!("message {id} was never sent"));
            return;
        };
        message.delivered += 1;
        if message.delivered > 1 {
            books.violations.push(format!("message {id} was delivered twice"));
        }
    }

    pub(crate) fn message_ended(&self, now_us: u64, id: u64, outcome: Outcome) {
        let mut books = self.lock();
        books.log.push((now_us, id, code(outcome)));
        let Inner { messages, violations, dead, untrusted, .. } = &mut *books;
        let Some(message) = messages.get_mut(&id) else { return };
        let died = !dead.is_empty();
        let fine = match outcome {
            Ok(()) => {
                trust(untrusted, message.from, id);
                message.delivered == 1 || died
            }
            Err(WriteError::DeadlineExceeded) => message.is_short || died,
            Err(WriteError::PeerGone) => message.untrusted || died,
            Err(_) => false,
        };
        if !fine || message.outcome.replace(outcome).is_some() {
            let delivered = message.delivered;
            violations.push(format!("message {id}: {outcome:?}, delivered {delivered} times"));
        }
    }

    // ---- what must hold at any time ----

    /// Whether nothing has landed in a place that is its owner's again.
    pub(crate) fn check_place(&self, id: u64) {
        let mut books = self.lock();
        let Some(tx) = books.txs.get(&id).filter(|tx| tx.stage == Stage::Over) else { return };
        if let Some(at) = tx.place.read().iter().position(|byte| *byte != mark(id)) {
            let what = format!("tx {id}: something landed at {at} after its end was confirmed");
            books.violations.push(what);
        }
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.lock().violations.clone()
    }
}
