//! One session with one peer, on the sending side: what is queued for it, and which frames are on the
//! wire.

use std::collections::VecDeque;

use crate::sender::OpId;

/// Names a session. Chosen by the shell, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// What the shell has made of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionState {
    /// The shell was asked to connect. Becomes `Up`, or the session is lost.
    Connecting,
    /// Frames may be issued. Lost in the end.
    Up,
}

#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) state: SessionState,
    /// Go first: they are short, and someone waits for them.
    pub(crate) messages: VecDeque<OpId>,
    pub(crate) writes: VecDeque<OpId>,
    /// Seals of split writes whose slices have all landed.
    pub(crate) seals: VecDeque<Seal>,
    pub(crate) wire: Wire,
    /// The last time that the peer showed life, or that it began to owe us something.
    pub(crate) heard_us: u64,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Seal {
    pub(crate) op: OpId,
    pub(crate) write: usize,
}

impl Session {
    pub(crate) fn new(now_us: u64) -> Self {
        Session {
            state: SessionState::Connecting,
            messages: VecDeque::new(),
            writes: VecDeque::new(),
            seals: VecDeque::new(),
            wire: Wire::default(),
            heard_us: now_us,
        }
    }

    /// Whether the peer owes something: an answer to the connection, or an acknowledgement.
    pub(crate) fn is_owed(&self) -> bool {
        self.state == SessionState::Connecting || self.wire.outstanding > 0
    }

    /// Whether nothing is queued and nothing is owed.
    pub(crate) fn is_idle(&self) -> bool {
        let queued = self.messages.len() + self.writes.len() + self.seals.len();
        queued == 0 && !self.is_owed()
    }
}

/// Frames that were issued and not settled, by sequence.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    frames: VecDeque<Option<OnWire>>,
    /// The sequence of the first of `frames`.
    first: u64,
    pub(crate) outstanding: usize,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct OnWire {
    pub(crate) op: OpId,
    pub(crate) write: usize,
}

impl Wire {
    pub(crate) fn issue(&mut self, frame: OnWire) -> u64 {
        let sequence = self.first + self.frames.len() as u64;
        self.frames.push_back(Some(frame));
        self.outstanding += 1;
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
        while let Some(None) = self.frames.front() {
            self.frames.pop_front();
            self.first += 1;
        }
        Some(frame)
    }

    /// The oldest unsettled frame, if its sequence is at most `sequence`.
    pub(crate) fn settle_oldest_through(&mut self, sequence: u64) -> Option<OnWire> {
        if self.frames.is_empty() || self.first > sequence {
            return None;
        }
        self.settle(self.first)
    }

    pub(crate) fn drain(&mut self) -> Vec<OnWire> {
        self.outstanding = 0;
        std::mem::take(&mut self.frames).into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(write: usize) -> OnWire {
        OnWire { op: OpId::default(), write }
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
        assert_eq!((wire.outstanding, wire.span()), (1, 1));
        assert_eq!(wire.issue(frame(4)), 4);
        assert_eq!(wire.drain().len(), 2);
    }
}
