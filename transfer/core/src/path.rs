//! One path of a session, on the sending side: which frames are on it, and what it is known to have
//! counted.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU32;

use kvasir_mutation::{Mutation, mutated};

use crate::close::{CloseRequest, Counted, PathIndex};
use crate::op::OpId;
use crate::rails::Rail;
use crate::signal::Ordering;

/// What the path's domain allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathLimits {
    pub slice_bytes: u64,
    /// Frames on the wire.
    pub frames_max: usize,
    /// What it promises of the order of frames that have the same [`crate::Frame::pin`].
    pub ordering: Ordering,
    /// How many pins it tells apart.
    pub queue_pairs: NonZeroU32,
    pub rail: Rail,
}

#[derive(Debug)]
pub(crate) struct Path {
    pub(crate) limits: PathLimits,
    pub(crate) wire: Wire,
    pub(crate) ledger: Ledger,
    /// By how much puts and signals are ahead of other writes: see [`crate::issue`].
    pub(crate) ahead_bytes: u64,
    /// The last of those puts and signals was one that has no order.
    pub(crate) was_aside: bool,
    /// The last time that the peer showed life here, or that it began to owe us something.
    pub(crate) heard_us: u64,
    /// The last time that the peer showed life here.
    pub(crate) alive_us: u64,
    /// When it was asked for a heartbeat that has not come.
    pub(crate) asked_us: Option<u64>,
    /// The shell has been asked to close it.
    pub(crate) given_up: bool,
    /// Something that was put on it has landed.
    pub(crate) has_landed: bool,
}

/// One frame that was issued.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OnWire {
    pub(crate) op: OpId,
    pub(crate) write: usize,
    pub(crate) part: Part,
    pub(crate) bytes: u64,
    /// Where it is counted when it has landed.
    pub(crate) entry: Option<usize>,
    pub(crate) has_pin: bool,
    /// It has its place in the order of its pin.
    pub(crate) is_posted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    Slice { start: u64, bytes: u64 },
    Seal,
    Message { id: u64 },
    Signal,
}

impl Path {
    pub(crate) fn new(limits: PathLimits, now_us: u64) -> Self {
        Path {
            limits,
            wire: Wire::default(),
            ledger: Ledger::default(),
            ahead_bytes: 0,
            was_aside: false,
            heard_us: now_us,
            alive_us: now_us,
            asked_us: None,
            given_up: false,
            has_landed: false,
        }
    }

    /// The peer shows life.
    pub(crate) fn heard(&mut self, now_us: u64) {
        (self.heard_us, self.alive_us) = (now_us, now_us);
    }

    /// What is to be asked about the frames that were on it.
    pub(crate) fn request(&self, index: PathIndex, frames: &[OnWire]) -> CloseRequest {
        let mut undecided: BTreeMap<usize, u64> = BTreeMap::new();
        let mut messages = Vec::new();
        for frame in frames {
            if let Some(entry) = frame.entry {
                *undecided.entry(entry).or_default() += 1;
            }
            if let Part::Message { id } = frame.part {
                messages.push(id);
            }
        }
        let counted = undecided.into_iter().map(|(entry, undecided)| {
            let (imm, landed) = self.ledger.entries[entry];
            let landed = if mutated(Mutation::AcknowledgedCountsOmitted) { 0 } else { landed };
            Counted { imm, landed, undecided }
        });
        CloseRequest { path: index, counted: counted.collect(), messages }
    }
}

/// How often each immediate is known to have landed through one path.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    entries: Vec<(u32, u64)>,
    by_imm: BTreeMap<u32, usize>,
    /// The entry that was asked for last: frames of one immediate come in a row.
    last: usize,
}

impl Ledger {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn entry(&mut self, imm: u32) -> usize {
        if self.entries.get(self.last).is_some_and(|(of, _)| *of == imm) {
            return self.last;
        }
        let entries = &mut self.entries;
        self.last = *self.by_imm.entry(imm).or_insert_with(|| {
            entries.push((imm, 0));
            entries.len() - 1
        });
        self.last
    }

    pub(crate) fn landed(&mut self, entry: usize) {
        self.entries[entry].1 += 1;
    }

    pub(crate) fn imm(&self, entry: usize) -> u32 {
        self.entries[entry].0
    }
}

/// Frames that were issued and not settled, by sequence.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    frames: VecDeque<Option<OnWire>>,
    /// The sequence of the first of `frames`.
    first: u64,
    pub(crate) outstanding: usize,
    /// Of what is outstanding.
    pub(crate) outstanding_bytes: u64,
}

impl Wire {
    pub(crate) fn issue(&mut self, frame: OnWire) -> u64 {
        let sequence = self.next_sequence();
        self.frames.push_back(Some(frame));
        self.outstanding += 1;
        self.outstanding_bytes += frame.bytes;
        sequence
    }

    /// The sequence that the next frame will have.
    pub(crate) fn next_sequence(&self) -> u64 {
        self.first + self.frames.len() as u64
    }

    /// How many sequences are between the oldest unsettled frame and the next one.
    pub(crate) fn span(&self) -> usize {
        self.frames.len()
    }

    pub(crate) fn settle(&mut self, sequence: u64) -> Option<OnWire> {
        let at = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        let frame = self.frames.get_mut(at)?.take()?;
        self.outstanding -= 1;
        self.outstanding_bytes -= frame.bytes;
        while let Some(None) = self.frames.front() {
            self.frames.pop_front();
            self.first += 1;
        }
        Some(frame)
    }

    pub(crate) fn get_mut(&mut self, sequence: u64) -> Option<&mut OnWire> {
        let at = usize::try_from(sequence.checked_sub(self.first)?).ok()?;
        self.frames.get_mut(at)?.as_mut()
    }

    /// The oldest unsettled frame, if its sequence is at most `sequence`.
    pub(crate) fn settle_oldest_through(&mut self, sequence: u64) -> Option<OnWire> {
        if self.frames.is_empty() || self.first > sequence {
            return None;
        }
        self.settle(self.first)
    }

    pub(crate) fn drain(&mut self) -> Vec<OnWire> {
        (self.outstanding, self.outstanding_bytes) = (0, 0);
        std::mem::take(&mut self.frames).into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(write: usize) -> OnWire {
        OnWire {
            op: OpId::default(),
            write,
            part: Part::Whole,
            bytes: 10,
            entry: None,
            has_pin: false,
            is_posted: false,
        }
    }

    #[test]
    fn frames_settle_in_any_order_and_once() {
        let mut wire = Wire::default();
        let sequences: Vec<u64> = (0..4).map(|write| wire.issue(frame(write))).collect();
        assert_eq!(sequences, [0, 1, 2, 3]);
        assert_eq!(wire.settle(2).map(|frame| frame.write), Some(2));
        assert!(wire.settle(2).is_none());
        assert!(wire.settle(9).is_none());
        assert_eq!(wire.settle_oldest_through(2).map(|frame| frame.write), Some(0));
        assert_eq!(wire.settle_oldest_through(2).map(|frame| frame.write), Some(1));
        assert!(wire.settle_oldest_through(2).is_none());
        assert_eq!((wire.outstanding, wire.outstanding_bytes, wire.span()), (1, 10, 1));
        assert_eq!(wire.issue(frame(4)), 4);
        assert_eq!(wire.drain().len(), 2);
    }

    #[test]
    fn what_is_asked_names_each_immediate_once_with_what_is_known() {
        let (ordering, queue_pairs) = (Ordering::WhenPlaced, NonZeroU32::MIN);
        let rail = Rail(0);
        let limits = PathLimits { slice_bytes: 1, frames_max: 1, ordering, queue_pairs, rail };
        let mut path = Path::new(limits, 0);
        let (seven, nine) = (path.ledger.entry(7), path.ledger.entry(9));
        assert_eq!(path.ledger.entry(7), seven);
        path.ledger.landed(nine);
        path.ledger.landed(nine);
        let counted = |entry| OnWire { entry: Some(entry), ..frame(0) };
        let message = OnWire { part: Part::Message { id: 4 }, ..frame(0) };
        let frames = [counted(nine), counted(seven), frame(1), counted(nine), message];
        let request = path.request(PathIndex(2), &frames);
        let asked = [
            Counted { imm: 7, landed: 0, undecided: 1 },
            Counted { imm: 9, landed: 2, undecided: 2 },
        ];
        let expected =
            CloseRequest { path: PathIndex(2), counted: asked.to_vec(), messages: vec![4] };
        assert_eq!(request, expected);
    }
}
