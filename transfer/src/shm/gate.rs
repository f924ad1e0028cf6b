//! What lets a receiver be sure that a sender copies no more, though the sender asks nobody before it
//! copies.
//!
//! The sender raises its epoch to an odd number, fences, looks whether it may copy, copies, and raises
//! the epoch to the next even number. The receiver forbids (cuts the link, or withdraws the region),
//! fences, and looks at the epoch. One of the two sees the other: either the sender sees that it may
//! not, or the receiver sees the odd epoch of a copy that is under way, and waits until the epoch is
//! another one. An even epoch means that every copy that did not see the prohibition has ended, and
//! that its bytes are visible.

use kvasir_mutation::{Mutation, mutated};

use crate::sync::{AtomicU64, Ordering, fence};

/// Announces a copy; `epoch` is odd. Whether it may be made must be looked at afterwards. (Release,
/// because a receiver that waits for the copy before may see this epoch next.)
pub(crate) fn enter(word: &AtomicU64, epoch: u64) {
    word.store(epoch, Ordering::Release);
    let is_late = mutated(Mutation::CopyNotAnnouncedFirst);
    fence(if is_late { Ordering::Release } else { Ordering::SeqCst });
}

/// The copy has ended, or was not made; `epoch` is even.
pub(crate) fn leave(word: &AtomicU64, epoch: u64) {
    word.store(epoch, Ordering::Release);
}

/// The epoch of the copy that is under way, if one is. To be asked after copies were forbidden.
pub(crate) fn under_way(word: &AtomicU64) -> Option<u64> {
    fence(Ordering::SeqCst);
    let epoch = word.load(Ordering::Acquire);
    (epoch % 2 == 1).then_some(epoch)
}

/// Whether the copy of that epoch has ended.
pub(crate) fn is_over(word: &AtomicU64, epoch: u64) -> bool {
    word.load(Ordering::Acquire) != epoch
}
