//! What a step promises beside its logits: when rows are there, and what it refuses.

use crate::arena::{Arena, tiny};
use kvasir_engine_reference::model::{
    Cache, CacheSpec, KvDtype, LoadOptions, Model, SequenceStep, StepError, Workspace,
};
use kvasir_proto::SlotIndex;
use std::ptr::NonNull;

fn model() -> Model {
    Model::load(&tiny(), LoadOptions::default()).expect("the checkpoint")
}

#[test]
fn a_layer_is_announced_when_its_rows_are_there_and_no_other_row_is_touched() {
    const BLOCK_TOKENS: usize = 16;
    let model = model();
    let layers = model.config().layers;
    let layout = model.config().layout(BLOCK_TOKENS as u32, KvDtype::F32);
    let slot_words = layout.slot_bytes() as usize / 4;
    let mut memory = vec![f32::NAN; slot_words * 5];
    let base = NonNull::new(memory.as_mut_ptr()).expect("an address");
    let len_bytes = memory.len() * 4;
    let spec = CacheSpec { base: base.cast(), len_bytes, layout, dtype: KvDtype::F32 };
    // SAFETY: the memory outlives the cache; `row` reads it only inside `on_layer` and between
    // steps, when nothing writes.
    let mut cache = unsafe { Cache::new(spec) };
    let page_words = slot_words / layers;
    let width = page_words / BLOCK_TOKENS;
    let row = |slot: usize, layer: usize, token: usize| -> Vec<f32> {
        let at = slot * slot_words + layer * page_words + token * width;
        // SAFETY: within the memory, see above.
        (at..at + width).map(|i| unsafe { base.add(i).read() }).collect()
    };
    let pages = [SlotIndex(3), SlotIndex(1)];
    let mut workspace = Workspace::default();
    // Positions 0..20 in two steps; the second has no wanted logits.
    for (start, end) in [(0usize, 9usize), (9, 20)] {
        let tokens: Vec<u32> = (start as u32..end as u32).collect();
        let step = SequenceStep {
            tokens: &tokens,
            start: start as u32,
            holes: &[],
            pages: &pages,
            logits: start == 0,
        };
        let mut announced = Vec::new();
        let on_layer = &mut |done: usize| {
            announced.push(done);
            for layer in 0..layers {
                for slot in 0..5 {
                    for token in 0..BLOCK_TOKENS {
                        let position = pages
                            .iter()
                            .position(|page| page.0 == slot)
                            .map(|page| page * BLOCK_TOKENS + token);
                        let limit = if layer < done { end } else { start };
                        let there = position.is_some_and(|position| position < limit);
                        let row = row(slot as usize, layer, token);
                        let what =
                            format!("slot {slot}, layer {layer}, token {token}, {done} done");
                        assert_eq!(row.iter().all(|value| value.is_finite()), there, "{what}");
                        assert!(there || row.iter().all(|value| value.is_nan()), "{what}");
                    }
                }
            }
        };
        let logits = model.forward(&mut workspace, &mut cache, &[step], on_layer);
        assert_eq!(logits.expect("a step").len(), usize::from(start == 0));
        assert_eq!(announced, [1, 2, 3]);
    }
}

#[test]
fn steps_that_cannot_be_are_refused_before_anything_is_written() {
    let model = model();
    let mut arena = Arena::new(&model, KvDtype::F32, 16, 4);
    let mut workspace = Workspace::default();
    let mut check = |start: u32, tokens: &[u32], pages: &[u32], want: StepError| {
        let pages: Vec<SlotIndex> = pages.iter().copied().map(SlotIndex).collect();
        let good = SequenceStep {
            tokens: &[1],
            start: 0,
            holes: &[],
            pages: &[SlotIndex(0)],
            logits: true,
        };
        let bad = SequenceStep { tokens, start, holes: &[], pages: &pages, logits: true };
        let mut announced = false;
        let on_layer = &mut |_| announced = true;
        let got = model.forward(&mut workspace, &mut arena.cache, &[good, bad], on_layer);
        assert_eq!(got.err(), Some(want));
        assert!(!announced);
    };
    let sequence = 1;
    check(0, &[], &[1], StepError::NoTokens { sequence });
    check(0, &[5, 1024], &[1], StepError::Token { sequence, token: 1024, vocab: 1024 });
    check(16, &[5], &[1], StepError::Pages { sequence, needed: 2, got: 1 });
    check(0, &[5], &[4], StepError::Slot { sequence, slot: 4, slots: 4 });
    check(0, &[5; 17], &[1, u32::MAX], StepError::Slot { sequence, slot: u32::MAX, slots: 4 });
    check(4096, &[5], &[1], StepError::Position { sequence, end: 4097, max: 4096 });
    let far = StepError::Position { sequence, end: u64::from(u32::MAX) + 1, max: 4096 };
    check(u32::MAX, &[5], &[1], far);
}

#[test]
fn a_cache_of_another_layout_is_refused() {
    let model = model();
    let layouts = [
        kvasir_proto::SlotLayout::layer_major(16, 2, 576 * 4).expect("a layout"),
        kvasir_proto::SlotLayout::layer_major(16, 3, 576 * 2).expect("a layout"),
        kvasir_proto::SlotLayout::layer_major(16, 3, 580 * 4).expect("a layout"),
    ];
    let mut memory = vec![0u64; 1 << 16];
    for layout in layouts {
        let base = NonNull::new(memory.as_mut_ptr().cast()).expect("an address");
        let len_bytes = memory.len() * 8;
        let spec = CacheSpec { base, len_bytes, layout, dtype: KvDtype::F32 };
        // SAFETY: the memory outlives the cache and is used through it alone.
        let mut cache = unsafe { Cache::new(spec) };
        let step = SequenceStep {
            tokens: &[1],
            start: 0,
            holes: &[],
            pages: &[SlotIndex(0)],
            logits: true,
        };
        let mut workspace = Workspace::default();
        let got = model.forward(&mut workspace, &mut cache, &[step], &mut |_| ());
        assert_eq!(got.err(), Some(StepError::Layout));
    }
}

#[test]
fn an_empty_batch_is_a_step_of_nothing() {
    let model = model();
    let mut arena = Arena::new(&model, KvDtype::Bf16, 16, 1);
    let mut workspace = Workspace::default();
    let mut layers = 0;
    let logits = model.forward(&mut workspace, &mut arena.cache, &[], &mut |_| layers += 1);
    assert!(logits.expect("a step").is_empty());
    assert_eq!(layers, 3);
}
