//! The receiver's side of an end: which writers have been asked to stop, until when their answer is
//! waited for, and what a share does when its writer has been cut off. A writer that does not answer,
//! or is not sure, is cut off; only what it says for sure, or the cut, lets slots be used again.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{Share, Side};

/// See the module.
#[derive(Debug, Default)]
pub struct WriterStops {
    /// When the writer of a share is cut off instead.
    due_ms: BTreeMap<Share, u64>,
}

/// What becomes of a share whose writer has been cut off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterCut {
    /// It was being waited for: nothing of it can land any more.
    Stopped,
    /// What is missing will never come, and nobody has asked yet: abort.
    Abort,
    /// Nothing was to come. A fetch that waits is settled when its conductor gives it up: what it
    /// does not bring is computed.
    Nothing,
}

impl WriterStops {
    /// The writer of a share is asked to stop, and is cut off when it has not answered by then.
    pub fn ask(&mut self, share: Share, due_ms: u64) {
        self.due_ms.insert(share, due_ms);
    }

    /// Nothing is waited for any more: all arrived, the writer answered, or the share is over.
    pub fn forget(&mut self, share: Share) {
        self.due_ms.remove(&share);
    }

    pub fn waits(&self, share: Share) -> bool {
        self.due_ms.contains_key(&share)
    }

    /// Every share whose writer is waited for.
    pub fn shares(&self) -> impl Iterator<Item = Share> + '_ {
        self.due_ms.keys().copied()
    }

    /// Shares whose writers have not answered in time, each once.
    pub fn take_late(&mut self, now_ms: u64) -> Vec<Share> {
        let late = self.due_ms.iter_mut().filter(|(_, due_ms)| **due_ms <= now_ms);
        late.map(|(share, due_ms)| {
            *due_ms = u64::MAX;
            *share
        })
        .collect()
    }

    /// The writer of a share has been cut off. `waiting`: not all of what it was to write has arrived.
    pub fn cut(&mut self, share: Share, waiting: bool) -> AfterCut {
        if self.due_ms.remove(&share).is_some() {
            match mutated(Mutation::CutWriterNotReported) {
                true => AfterCut::Nothing,
                false => AfterCut::Stopped,
            }
        } else if waiting && share.side == Side::Decode {
            AfterCut::Abort
        } else {
            AfterCut::Nothing
        }
    }
}

#[cfg(test)]
mod tests {
    use kvasir_proto::TxId;

    use super::*;

    fn share(serial: u64, side: Side) -> Share {
        Share { tx: TxId { conductor_incarnation: 1, serial }, side }
    }

    #[test]
    fn a_writer_that_does_not_answer_is_late_once() {
        let mut stops = WriterStops::default();
        stops.ask(share(1, Side::Decode), 100);
        stops.ask(share(2, Side::Decode), 200);
        assert_eq!(stops.take_late(99), []);
        assert_eq!(stops.take_late(100), [share(1, Side::Decode)]);
        assert_eq!(stops.take_late(150), []);
        assert!(stops.waits(share(1, Side::Decode)), "it waits for the cut");
        stops.forget(share(2, Side::Decode));
        assert_eq!(stops.take_late(1_000), []);
    }

    #[test]
    fn a_cut_ends_what_was_waited_for_and_aborts_what_will_never_be_whole() {
        let mut stops = WriterStops::default();
        let (asked, other, fetch) =
            (share(1, Side::Decode), share(2, Side::Decode), share(3, Side::Prefill));
        stops.ask(asked, 100);
        assert_eq!(stops.cut(asked, true), AfterCut::Stopped);
        assert_eq!(stops.cut(other, true), AfterCut::Abort);
        assert_eq!(stops.cut(other, false), AfterCut::Nothing);
        assert_eq!(stops.cut(fetch, true), AfterCut::Nothing);
    }
}
