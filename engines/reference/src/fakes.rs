//! A node and a model for tests. The model is a chain of hashes whose rows lie in slots like those
//! of a real one, so a row that is missing, or read at a wrong place, gives another answer or a
//! panic.

#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use kvasir_proto::v1::engine_to_node::Message as ToNode;
use kvasir_proto::v1::node_to_engine::Message as ToEngine;
use kvasir_proto::{Share, SlotIndex, v1};

use crate::model::{SequenceStep, Splice, SpliceError, StepError};
use crate::ports::{CachePort, Compute, PortLost};
use crate::routes::RoutedHoles;
use crate::text::Vocabulary;
use crate::worker::WaitPort;

pub(crate) const VOCAB: u32 = 64;
pub(crate) const LAYERS: usize = 3;

/// Token 0 is special; the others are letters and digits, each its own text.
pub(crate) fn vocabulary() -> Arc<Vocabulary> {
    let letters: Vec<[u8; 1]> = (0..VOCAB as u8).map(|id| [b'0' + id]).collect();
    let tokens: Vec<&[u8]> = letters.iter().map(|letter| &letter[..]).collect();
    Arc::new(Vocabulary::of_tokens(&tokens))
}

/// The text of tokens of [`vocabulary`].
pub(crate) fn text_of(tokens: &[u32]) -> String {
    tokens.iter().filter(|&&token| token != 0).map(|&token| (b'0' + token as u8) as char).collect()
}

/// What a node heard, in order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Heard {
    Message(ToNode),
    Progress { step: u32, layers_done: u16 },
}

#[derive(Debug, Default)]
pub(crate) struct NodeState {
    pub heard: Vec<Heard>,
    pub says: VecDeque<ToEngine>,
    pub load: v1::InstanceLoad,
    pub lost: bool,
    pub awake: bool,
    /// Slots that `Grow` is answered with; `None` leaves it to the test.
    pub grows_from: Option<u32>,
}

/// Both ends of a fake node: the test holds one clone, the scheduler another.
#[derive(Debug, Clone, Default)]
pub(crate) struct FakeNode {
    state: Arc<(Mutex<NodeState>, Condvar)>,
}

impl FakeNode {
    pub(crate) const SLOTS: u32 = 1000;

    pub(crate) fn state(&self) -> MutexGuard<'_, NodeState> {
        self.state.0.lock().expect("tests that panic are over")
    }

    pub(crate) fn say(&self, message: ToEngine) {
        self.state().says.push_back(message);
        self.wake();
    }

    pub(crate) fn wake(&self) {
        self.state().awake = true;
        self.state.1.notify_all();
    }

    pub(crate) fn lose(&self) {
        self.state().lost = true;
        self.wake();
    }

    /// Messages so far that are not progress.
    pub(crate) fn messages(&self) -> Vec<ToNode> {
        let messages = |heard: &Heard| match heard {
            Heard::Message(message) => Some(message.clone()),
            Heard::Progress { .. } => None,
        };
        self.state().heard.iter().filter_map(messages).collect()
    }

    pub(crate) fn releases(&self) -> Vec<Share> {
        let release = |message: ToNode| match message {
            ToNode::Release(v1::Release { tx, side }) => {
                Some(Share::from_wire(tx, side).expect("a share"))
            }
            _ => None,
        };
        self.messages().into_iter().filter_map(release).collect()
    }
}

impl CachePort for FakeNode {
    fn send(&mut self, message: ToNode) -> Result<(), PortLost> {
        let mut state = self.state();
        if state.lost {
            return Err(PortLost("lost".into()));
        }
        if let (ToNode::Grow(grow), Some(from)) = (&message, state.grows_from) {
            let slots = (from..from + grow.page_count).collect();
            state.grows_from = Some(from + grow.page_count);
            let grown = v1::Grown { tx: grow.tx, side: grow.side, slots };
            state.says.push_back(ToEngine::Grown(grown));
        }
        state.heard.push(Heard::Message(message));
        Ok(())
    }

    fn try_recv(&mut self) -> Result<Option<ToEngine>, PortLost> {
        Ok(self.state().says.pop_front())
    }

    fn progress(&self, step: u32, layers_done: u16) {
        self.state().heard.push(Heard::Progress { step, layers_done });
    }

    fn publish_load(&self, load: &v1::InstanceLoad) {
        self.state().load = *load;
    }

    fn is_connected(&self) -> bool {
        !self.state().lost
    }

    fn slots_total(&self) -> u32 {
        FakeNode::SLOTS
    }
}

impl WaitPort for FakeNode {
    fn wait(&mut self, timeout: Duration) -> Result<(), PortLost> {
        let (lock, changed) = &*self.state;
        let state = lock.lock().expect("tests that panic are over");
        let (mut state, _) = changed
            .wait_timeout_while(state, timeout, |state| !state.awake)
            .expect("tests that panic are over");
        state.awake = false;
        if state.lost { Err(PortLost("lost".into())) } else { Ok(()) }
    }
}

/// Rows of all slots.
pub(crate) type Rows = Arc<Mutex<BTreeMap<(SlotIndex, u32), u64>>>;

/// What each sequence of a batch computed: positions from, and how many.
pub(crate) type Batch = Vec<(u32, usize)>;

/// The hash-chain model.
#[derive(Debug, Clone)]
pub(crate) struct ToyModel {
    pub page_tokens: u32,
    pub rows: Rows,
    pub batches: Arc<Mutex<Vec<Batch>>>,
    logits: Vec<Vec<f32>>,
}

impl ToyModel {
    pub(crate) fn new(page_tokens: u32) -> Self {
        let (rows, batches) = (Rows::default(), Arc::default());
        ToyModel { page_tokens, rows, batches, logits: Vec::new() }
    }

    pub(crate) fn batches(&self) -> Vec<Batch> {
        self.batches.lock().expect("tests that panic are over").clone()
    }

    /// Writes the rows of a prompt, as a push or a cached prefix would have.
    pub(crate) fn fill(&self, prompt: &[u32], slots: &[u32]) {
        let pages: Vec<SlotIndex> = slots.iter().copied().map(SlotIndex).collect();
        self.write_rows(&SequenceStep {
            tokens: prompt,
            start: 0,
            holes: &[],
            pages: &pages,
            logits: false,
        });
    }

    fn write_rows(&self, part: &SequenceStep<'_>) -> u64 {
        let mut rows = self.rows.lock().expect("tests that panic are over");
        let place = |at: u32| (part.pages[(at / self.page_tokens) as usize], at % self.page_tokens);
        let before = part.start.checked_sub(1);
        let mut row =
            before.map_or(0, |at| *rows.get(&place(at)).expect("the row before is there"));
        for (at, &token) in (part.start..).zip(part.tokens) {
            row = next_row(row, token);
            rows.insert(place(at), row);
        }
        row
    }
}

impl Compute for ToyModel {
    fn fill(&mut self, splice: &Splice<'_>) -> Result<(), SpliceError> {
        let end = splice.start + splice.tokens.end;
        let behind = splice.holes.iter().all(|hole| hole.positions.start >= end);
        assert!(behind && splice.tokens.start == 0, "{splice:?}");
        let size = self.page_tokens;
        let place = |pages: &[SlotIndex], at: u32| (pages[(at / size) as usize], at % size);
        let mut rows = self.rows.lock().expect("tests that panic are over");
        let of_chunk = |at: u32| *rows.get(&place(splice.chunk, at)).expect("a row of the chunk");
        let chunk: Vec<u64> = splice.tokens.clone().map(of_chunk).collect();
        let behind = splice.start..splice.start.next_multiple_of(size);
        let moved: Vec<Option<u64>> =
            behind.clone().map(|at| rows.get(&place(splice.pages, at)).copied()).collect();
        for (at, row) in behind.zip(moved) {
            let to = place(splice.pages, at + splice.tokens.end);
            row.and_then(|row| rows.insert(to, row));
        }
        for (at, row) in (splice.start..).zip(chunk) {
            rows.insert(place(splice.pages, at), row);
        }
        Ok(())
    }

    fn forward(
        &mut self,
        batch: &[SequenceStep<'_>],
        _routed: &[Option<&RoutedHoles>],
        on_layer: &mut dyn FnMut(usize),
    ) -> Result<Vec<&[f32]>, StepError> {
        let parts = batch.iter().map(|part| (part.start, part.tokens.len())).collect();
        self.batches.lock().expect("tests that panic are over").push(parts);
        self.logits.clear();
        for part in batch {
            let row = self.write_rows(part);
            if part.logits {
                self.logits.push(logits_of(row));
            }
        }
        (1..=LAYERS).for_each(on_layer);
        Ok(self.logits.iter().map(Vec::as_slice).collect())
    }
}

fn next_row(row: u64, token: u32) -> u64 {
    let mixed = (row ^ u64::from(token + 1)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed ^ (mixed >> 29)
}

/// Token 0 never comes by itself: it ends answers in tests that want it to.
fn logits_of(row: u64) -> Vec<f32> {
    let logit = |id: u32| (next_row(row, id) % 1000) as f32 / 250.0;
    (0..VOCAB).map(|id| if id == 0 { -100.0 } else { logit(id) }).collect()
}

/// The greedy answer to a prompt.
pub(crate) fn greedy(prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut row = prompt.iter().fold(0, |row, &token| next_row(row, token));
    let mut answer = Vec::new();
    for _ in 0..tokens {
        let logits = logits_of(row);
        let best =
            (0..VOCAB).rev().max_by(|&a, &b| logits[a as usize].total_cmp(&logits[b as usize]));
        let token = best.expect("a vocabulary");
        answer.push(token);
        row = next_row(row, token);
    }
    answer
}
