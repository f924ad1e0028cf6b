//! Slot memory of a test's own, and generation over it.

use std::path::PathBuf;
use std::ptr::NonNull;

use kvasir_engine_reference::model::{Cache, CacheSpec, KvDtype, Model, SequenceStep, Workspace};
use kvasir_proto::SlotIndex;

/// The repository's root.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The model that comes with the repository.
pub(crate) fn tiny() -> PathBuf {
    root().join("configs/models/tiny-deepseek-v2")
}

/// A cache over memory that begins as NaN, so that a row read before it is written shows.
pub(crate) struct Arena {
    pub cache: Cache,
    pub slots: u32,
    taken: u32,
    /// What `cache` lies in; never touched but through it.
    _memory: Vec<u64>,
}

impl Arena {
    pub(crate) fn new(model: &Model, dtype: KvDtype, block_tokens: u32, slots: u32) -> Arena {
        let layout = model.config().layout(block_tokens, dtype);
        let len_bytes = layout.slot_bytes() as usize * slots as usize;
        let mut memory = vec![u64::MAX; len_bytes.div_ceil(8)];
        let base = NonNull::new(memory.as_mut_ptr().cast()).expect("an address");
        // SAFETY: the memory lives as long as the arena and is used through the cache alone.
        let cache = unsafe { Cache::new(CacheSpec { base, len_bytes, layout, dtype }) };
        Arena { cache, slots, taken: 0, _memory: memory }
    }

    /// Slots for so many tokens, no two neighbours.
    pub(crate) fn slots_for(&mut self, tokens: usize) -> Vec<SlotIndex> {
        let count = self.cache.layout().pages_for(tokens as u32);
        let from = self.taken;
        self.taken += count;
        assert!(self.taken <= self.slots, "the test's memory is too small");
        // Times a number that shares no divisor with the count, so that slots are scattered.
        let stride = (7..).find(|n| gcd(*n, self.slots) == 1).expect("one exists");
        (from..self.taken).map(|i| SlotIndex(i * stride % self.slots)).collect()
    }
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The place of the largest logit.
pub(crate) fn best(logits: &[f32]) -> u32 {
    let best = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (1..logits.len()).fold(0, best) as u32
}

/// One sequence alone: its prompt in chunks from `start` on, then greedy tokens. Returns the
/// logits after the prompt and the tokens.
pub(crate) fn generate(
    model: &Model,
    arena: &mut Arena,
    pages: &[SlotIndex],
    (prompt, start): (&[u32], usize),
    chunk: usize,
    steps: usize,
) -> (Vec<f32>, Vec<u32>) {
    let mut workspace = Workspace::default();
    let mut at = start;
    let mut logits = Vec::new();
    for tokens in prompt[start..].chunks(chunk) {
        let end = at + tokens.len();
        let step = SequenceStep {
            tokens,
            start: at as u32,
            holes: &[],
            pages,
            logits: end == prompt.len(),
        };
        let out = model.forward(&mut workspace, &mut arena.cache, &[step], &mut |_| ());
        let out = out.expect("a step");
        assert_eq!(out.len(), usize::from(end == prompt.len()));
        logits = out.rows().next().map(<[f32]>::to_vec).unwrap_or_default();
        at = end;
    }
    let mut tokens = vec![best(&logits)];
    while tokens.len() < steps {
        let last = [tokens[tokens.len() - 1]];
        let step =
            SequenceStep { tokens: &last, start: at as u32, holes: &[], pages, logits: true };
        let out = model.forward(&mut workspace, &mut arena.cache, &[step], &mut |_| ());
        tokens.push(best(out.expect("a step").row(0)));
        at += 1;
    }
    (logits, tokens)
}

/// Compares logits, relative to the largest.
pub(crate) fn assert_near(got: &[f32], want: &[f32], tolerance: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let largest = want.iter().fold(0f32, |largest, want| largest.max(want.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let near = (got - want).abs() <= tolerance * largest;
        assert!(near, "{what}: logit {i} is {got}, not {want}; the largest is {largest}");
    }
}
