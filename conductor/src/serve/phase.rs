//! Where a request is. One way forward, and out of every phase into the end:
//!
//! ```text
//! [Waiting ->] Placing [-> Awaiting] -> Allocating -> [Fetching ->] Prefilling -> Decoding -> Ended
//!                 ^_________________________|_____________|_____________|_ _ _ _ _ _ _|   (another attempt)
//! ```
//!
//! From Decoding only an answer that is not streamed goes back: nothing of it was sent.
//!
//! | phase | held on nodes | renewed by |
//! | --- | --- | --- |
//! | Waiting | nothing; it has a place in a line | |
//! | Placing | nothing | |
//! | Awaiting | nothing; another request brings what it needs | |
//! | Allocating | perhaps a share on each node | |
//! | Fetching | prefill, decode and source share | conductor |
//! | Prefilling | prefill and decode share | conductor |
//! | Decoding | decode share (whole: prefill share) | the engine that decodes |
//! | Ended | nothing | |

use std::sync::atomic::{AtomicU8, Ordering};

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Phase {
    Waiting,
    Placing,
    Awaiting,
    Allocating,
    Fetching,
    Prefilling,
    Decoding,
    Ended,
}

impl Phase {
    const ALL: [Phase; 8] = [
        Phase::Waiting,
        Phase::Placing,
        Phase::Awaiting,
        Phase::Allocating,
        Phase::Fetching,
        Phase::Prefilling,
        Phase::Decoding,
        Phase::Ended,
    ];

    /// For labels and messages.
    pub(super) fn name(self) -> &'static str {
        match self {
            Phase::Waiting => "queued",
            Phase::Placing => "placing",
            Phase::Awaiting => "coalescing",
            Phase::Allocating => "allocating",
            Phase::Fetching => "fetching",
            Phase::Prefilling => "prefilling",
            Phase::Decoding => "decoding",
            Phase::Ended => "finished",
        }
    }
}

/// The phase of one choice: written by its task, read also after an attempt was dropped.
#[derive(Debug)]
pub(super) struct PhaseCell(AtomicU8);

impl PhaseCell {
    pub(super) fn new() -> PhaseCell {
        PhaseCell(AtomicU8::new(Phase::Placing as u8))
    }

    pub(super) fn get(&self) -> Phase {
        Phase::ALL[usize::from(self.0.load(Ordering::Relaxed))]
    }

    pub(super) fn set(&self, phase: Phase) {
        self.0.store(phase as u8, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cell_gives_back_the_phase_that_was_set() {
        let cell = PhaseCell::new();
        assert_eq!(cell.get(), Phase::Placing);
        for phase in Phase::ALL {
            cell.set(phase);
            assert_eq!(cell.get(), phase);
        }
    }
}
