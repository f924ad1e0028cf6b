//! Rows of a chunk at another place: what they equal, and that the chunk stays as it was.

use std::ops::Range;

use crate::arena::{Arena, generate};
use crate::vectors::load;
use kvasir_engine_reference::model::{Hole, KvDtype, Model, Splice, SpliceError};
use kvasir_proto::SlotIndex;

const BLOCK_TOKENS: usize = 64;

/// One layer's rows of some positions.
fn rows(
    model: &Model,
    arena: &Arena,
    pages: &[SlotIndex],
    layer: usize,
    positions: Range<usize>,
) -> Vec<Vec<f32>> {
    let row = |position: usize| {
        let mut row = vec![0.0; model.config().row_width()];
        let slot = pages[position / BLOCK_TOKENS];
        arena.cache.read_row(slot, layer, position % BLOCK_TOKENS, &mut row);
        row
    };
    positions.map(row).collect()
}

fn all_rows(model: &Model, arena: &Arena, pages: &[SlotIndex], tokens: usize) -> Vec<Vec<f32>> {
    let layers = 0..model.config().layers;
    layers.flat_map(|layer| rows(model, arena, pages, layer, 0..tokens)).collect()
}

/// Each value is as near as `error` of its pair's length, which a rotation leaves as it is.
fn assert_rows_near(got: &[Vec<f32>], want: &[Vec<f32>], error: f32, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (token, (got, want)) in got.iter().zip(want).enumerate() {
        for (i, (got, want)) in got.chunks(2).zip(want.chunks(2)).enumerate() {
            let near = error * want[0].hypot(want[1]);
            let off = (got[0] - want[0]).abs().max((got[1] - want[1]).abs());
            assert!(off <= near, "{what}, token {token}, pair {i}: {got:?}, not {want:?}");
        }
    }
}

/// A chunk that was computed alone, and room for a sequence.
struct Chunk {
    tokens: Vec<u32>,
    slots: Vec<SlotIndex>,
    before: Vec<u32>,
}

fn chunk(model: &Model, arena: &mut Arena, prompts: &[Vec<u32>]) -> Chunk {
    let longest = prompts.iter().max_by_key(|prompt| prompt.len()).expect("prompts");
    let tokens = longest[300..450].to_vec();
    let slots = arena.slots_for(tokens.len());
    generate(model, arena, &slots, (&tokens, 0), 512, 1);
    Chunk { tokens, slots, before: [&longest[..], &longest[..]].concat() }
}

/// By what two keys of bf16 differ: each was rounded to 8 bits, and the one that was moved twice.
const BF16_TWICE: f32 = 3.05 / 256.0;

fn check_first_layer(variant: &str, dtype: KvDtype, error: f32, back_error: f32) {
    let (model, cases) = load(variant, 1);
    let prompts: Vec<Vec<u32>> = cases.into_iter().map(|case| case.prompt).collect();
    let mut arena = Arena::new(&model, dtype, BLOCK_TOKENS as u32, 260);
    let chunk = chunk(&model, &mut arena, &prompts);
    let original = all_rows(&model, &arena, &chunk.slots, chunk.tokens.len());
    let rank = model.config().rank;
    for offset in [1, 37, 64, 700, 3900] {
        let what = format!("{variant}, {dtype:?}, moved by {offset}");
        let positions = offset..offset + chunk.tokens.len();
        let prompt = [&chunk.before[..offset], &chunk.tokens].concat();
        let computed = arena.slots_for(prompt.len());
        generate(&model, &mut arena, &computed, (&prompt, 0), 512, 1);
        let pages = arena.slots_for(prompt.len());
        let tokens = 0..chunk.tokens.len() as u32;
        let splice = Splice {
            chunk: &chunk.slots,
            tokens: tokens.clone(),
            start: offset as u32,
            holes: &[],
            pages: &pages,
        };
        model.splice(&mut arena.cache, &splice).expect("a splice");
        let got = rows(&model, &arena, &pages, 0, positions.clone());
        let want = rows(&model, &arena, &computed, 0, positions.clone());
        assert_rows_near(&got, &want, error, &what);

        // Back again, through all layers. The latents have not changed by a bit.
        let back = arena.slots_for(chunk.tokens.len());
        for (token, position) in tokens.zip(offset as u32..) {
            let splice = Splice {
                chunk: &pages,
                tokens: position..position + 1,
                start: token,
                holes: &[],
                pages: &back,
            };
            model.splice(&mut arena.cache, &splice).expect("a splice");
        }
        let got = all_rows(&model, &arena, &back, chunk.tokens.len());
        assert_rows_near(&got, &original, back_error, &format!("{what} and back"));
        let latents =
            |rows: &[Vec<f32>]| rows.iter().flat_map(|row| row[..rank].to_vec()).collect();
        let (got, want): (Vec<f32>, Vec<f32>) = (latents(&got), latents(&original));
        assert_eq!(got, want, "{what}");
        let now = all_rows(&model, &arena, &chunk.slots, chunk.tokens.len());
        assert_eq!(now, original, "{what}: the chunk has changed");
    }
}

#[test]
fn rows_moved_by_a_difference_are_those_of_that_place_in_the_first_layer_and_come_back() {
    check_first_layer("plain", KvDtype::F32, 1e-5, 5e-7);
    check_first_layer("yarn_qlora", KvDtype::F32, 1e-5, 5e-7);
}

#[test]
fn rows_of_bf16_are_moved_and_come_back_within_their_rounding() {
    check_first_layer("plain", KvDtype::Bf16, BF16_TWICE, 2.05 / 256.0);
    check_first_layer("yarn_qlora", KvDtype::Bf16, BF16_TWICE, 2.05 / 256.0);
}

#[test]
fn some_tokens_of_a_chunk_go_into_their_places_and_nowhere_else() {
    let (model, cases) = load("yarn_qlora", 1);
    let prompts: Vec<Vec<u32>> = cases.into_iter().map(|case| case.prompt).collect();
    let mut arena = Arena::new(&model, KvDtype::F32, BLOCK_TOKENS as u32, 20);
    let chunk = chunk(&model, &mut arena, &prompts);
    let pages = arena.slots_for(300);
    let splice =
        Splice { chunk: &chunk.slots, tokens: 70..140, start: 101, holes: &[], pages: &pages };
    model.splice(&mut arena.cache, &splice).expect("a splice");
    let rank = model.config().rank;
    for layer in 0..model.config().layers {
        let from = rows(&model, &arena, &chunk.slots, layer, 70..140);
        let to = rows(&model, &arena, &pages, layer, 0..pages.len() * BLOCK_TOKENS);
        for (position, row) in to.iter().enumerate() {
            match position.checked_sub(101).and_then(|token| from.get(token)) {
                Some(from) => assert_eq!(row[..rank], from[..rank], "position {position}"),
                None => assert!(row.iter().all(|value| value.is_nan()), "position {position}"),
            }
        }
    }
}

#[test]
fn splices_that_cannot_be_are_refused_before_anything_is_written() {
    let (model, _) = load("yarn_qlora", 1);
    let mut arena = Arena::new(&model, KvDtype::F32, BLOCK_TOKENS as u32, 8);
    let slots = |slots: &[u32]| slots.iter().copied().map(SlotIndex).collect::<Vec<_>>();
    let mut check = |tokens: Range<u32>, start: u32, pages: &[u32], want: SpliceError| {
        let (chunk, pages) = (slots(&[0, 1]), slots(pages));
        let splice = Splice { chunk: &chunk, tokens, start, holes: &[], pages: &pages };
        assert_eq!(model.splice(&mut arena.cache, &splice), Err(want));
        let row = &rows(&model, &arena, &slots(&[4]), 0, 0..1)[0];
        assert!(row.iter().all(|value| value.is_nan()));
    };
    check(5..5, 0, &[4], SpliceError::NoTokens);
    check(0..129, 0, &[4, 5, 6], SpliceError::Chunk { needed: 3, got: 2 });
    check(0..100, 40, &[4, 5], SpliceError::Pages { needed: 3, got: 2 });
    check(0..1, 700, &[4, 5], SpliceError::Pages { needed: 11, got: 2 });
    check(0..64, 3, &[4, 8], SpliceError::Slot { slot: 8, slots: 8 });
    check(0..10, 60, &[4, 1], SpliceError::Committed { slot: 1 });
    check(0..64, 4040, &[4], SpliceError::Position { end: 4104, max: 4096 });
    let end = u64::from(u32::MAX) + 64;
    check(0..64, u32::MAX, &[4], SpliceError::Position { end, max: 4096 });
    check(
        u32::MAX - 1..u32::MAX,
        0,
        &[4],
        SpliceError::Position { end: u32::MAX.into(), max: 4096 },
    );
    let hole = [Hole { positions: 70..80, moved: 70 }];
    let (chunk, pages) = (slots(&[0, 1]), slots(&[4, 5]));
    for start in [10, 75] {
        let splice = Splice { chunk: &chunk, tokens: 0..64, start, holes: &hole, pages: &pages };
        assert_eq!(model.splice(&mut arena.cache, &splice), Err(SpliceError::Hole));
    }
}
