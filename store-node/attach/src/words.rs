//! The words that a node and the processes on its host read of each other without a message: how far an engine is,
//! how often a slot has been used, whether somebody sleeps.

use kvasir_blocks::moving::engine_stops::Progress;

use crate::sync::{AtomicU32, AtomicU64, Ordering, announce_sleep, awake, fence};

/// Raises an engine's progress word: attach epoch 16 bits, step 32 bits, layers done 16 bits, high to low.
/// Everything that this thread wrote before is visible to whoever reads it.
pub(crate) fn set_progress(word: &AtomicU64, epoch: u32, progress: Progress) {
    let raised = u64::from(epoch as u16) << 48
        | u64::from(progress.step) << 16
        | u64::from(progress.layers_done);
    word.store(raised, Ordering::Release);
}

/// What an engine has finished, or `None` when its word is of another attach or untouched.
pub(crate) fn progress(word: &AtomicU64, epoch: u32) -> Option<Progress> {
    let word = word.load(Ordering::Acquire);
    let progress = Progress { step: (word >> 16) as u32, layers_done: word as u16 };
    (word >> 48 == u64::from(epoch as u16) && word != 0).then_some(progress)
}

/// A slot has come free, and nobody was told yet that he may write there.
pub fn set_generation(word: &AtomicU32, generation: u32) {
    word.store(generation, Ordering::Release);
}

/// Whether what was read of a slot before this was asked is what lay there in that generation: whoever has
/// written there since was told so after the word was raised.
pub fn is_generation(word: &AtomicU32, generation: u32) -> bool {
    // After all reads before it; the counterpart of the fence in `may_write`.
    fence(Ordering::Acquire);
    word.load(Ordering::Relaxed) == generation
}

/// To be called by whoever was told that he may write a slot, before he does: who sees something of what he
/// writes sees that the slot was given out.
pub(crate) fn may_write() {
    fence(Ordering::Release);
}

/// Sleeps by `sleep` unless there is work once others know that this thread sleeps. Whoever has work for it
/// puts that where `has_work` looks, and then asks whether it is to be woken.
pub(crate) fn sleep_unless(
    sleeping: &AtomicU32,
    has_work: impl FnOnce() -> bool,
    sleep: impl FnOnce(),
) {
    announce_sleep(sleeping);
    if !has_work() {
        sleep();
    }
    awake(sleeping);
}
