//! A chunk in the middle of a prompt, used again at another offset: spliced into the sequence, or
//! attended where it lies by queries that are turned. Both give the same tokens.

use std::ops::Range;
use std::path::Path;

use crate::arena::{self, Arena, assert_near, best, generate};
use crate::naive::{self, Naive};
use crate::vectors::load;
use kvasir_attention::Partial;
use kvasir_engine_reference::model::{
    Elsewhere, Hole, KvDtype, LayerQueries, Model, SequenceStep, Splice, StepError, Workspace,
};
use kvasir_proto::SlotIndex;

const BLOCK_TOKENS: u32 = 64;
const STEPS: usize = 24;

/// A chunk that was computed alone.
struct Chunk {
    tokens: Vec<u32>,
    slots: Vec<SlotIndex>,
    /// Of each layer, a row for each token.
    rows: Vec<Vec<Vec<f32>>>,
}

impl Chunk {
    fn new(model: &Model, arena: &mut Arena, tokens: &[u32]) -> Chunk {
        let slots = arena.slots_for(tokens.len());
        generate(model, arena, &slots, (tokens, 0), 512, 1);
        let mut chunk = Chunk { tokens: tokens.to_vec(), slots, rows: Vec::new() };
        chunk.rows = chunk.read(model, arena);
        chunk
    }

    fn read(&self, model: &Model, arena: &Arena) -> Vec<Vec<Vec<f32>>> {
        let row = |layer: usize, token: usize| {
            let mut row = vec![0.0; model.config().row_width()];
            let block_tokens = BLOCK_TOKENS as usize;
            let slot = self.slots[token / block_tokens];
            arena.cache.read_row(slot, layer, token % block_tokens, &mut row);
            row
        };
        let layer = |layer| (0..self.tokens.len()).map(|token| row(layer, token)).collect();
        (0..model.config().layers).map(layer).collect()
    }
}

/// What a prompt is made of. Tokens are of the one chunk.
#[derive(Clone)]
enum Piece {
    Text(Vec<u32>),
    Spliced(Range<u32>),
    /// Each part is one holder's.
    Routed(Vec<Range<u32>>),
}

/// One sequence on its way.
struct Sequence {
    tokens: Vec<u32>,
    pages: Vec<SlotIndex>,
    holes: Vec<Hole>,
    /// Of each hole, what its holders attend.
    parts: Vec<Vec<Range<u32>>>,
    /// Where the last text begins.
    question: usize,
}

impl Sequence {
    /// All but the last text is there when it returns.
    fn new(model: &Model, arena: &mut Arena, chunk: &Chunk, pieces: &[Piece]) -> Sequence {
        let mut sequence = Sequence {
            tokens: Vec::new(),
            pages: arena.slots_for(prompt(chunk, pieces).len() + STEPS),
            holes: Vec::new(),
            parts: Vec::new(),
            question: 0,
        };
        for piece in pieces {
            if let Piece::Routed(parts) = piece {
                let tokens = parts[0].start..parts[parts.len() - 1].end;
                let start = sequence.len_of(pieces, chunk, piece);
                let moved = start - tokens.start;
                let positions = start..start + tokens.len() as u32;
                sequence.holes.push(Hole { positions, moved });
                sequence.parts.push(parts.clone());
            }
        }
        for (n, piece) in pieces.iter().enumerate() {
            let start = sequence.tokens.len();
            match piece {
                Piece::Text(text) => {
                    sequence.tokens.extend(text);
                    sequence.question = start;
                    if n + 1 < pieces.len() {
                        for from in (start..sequence.tokens.len()).step_by(100) {
                            let to = (from + 100).min(sequence.tokens.len());
                            step(model, arena, chunk, &[(&sequence, from..to, false)]);
                        }
                    }
                }
                Piece::Spliced(tokens) => {
                    let splice = Splice {
                        chunk: &chunk.slots,
                        tokens: tokens.clone(),
                        start: start as u32,
                        holes: &sequence.holes,
                        pages: &sequence.pages,
                    };
                    model.splice(&mut arena.cache, &splice).expect("a splice");
                    sequence.tokens.extend(tokens_of(chunk, tokens));
                }
                Piece::Routed(parts) => {
                    parts.iter().for_each(|part| sequence.tokens.extend(tokens_of(chunk, part)));
                }
            }
        }
        sequence
    }

    /// Where a piece begins.
    fn len_of(&self, pieces: &[Piece], chunk: &Chunk, piece: &Piece) -> u32 {
        let before = pieces.iter().take_while(|other| !std::ptr::eq(*other, piece));
        before.map(|piece| prompt(chunk, std::slice::from_ref(piece)).len() as u32).sum()
    }
}

fn tokens_of<'a>(chunk: &'a Chunk, tokens: &Range<u32>) -> &'a [u32] {
    &chunk.tokens[tokens.start as usize..tokens.end as usize]
}

fn prompt(chunk: &Chunk, pieces: &[Piece]) -> Vec<u32> {
    let tokens = pieces.iter().flat_map(|piece| match piece {
        Piece::Text(text) => text.clone(),
        Piece::Spliced(tokens) => tokens_of(chunk, tokens).to_vec(),
        Piece::Routed(parts) => {
            tokens_of(chunk, &(parts[0].start..parts[parts.len() - 1].end)).to_vec()
        }
    });
    tokens.collect()
}

/// Those who attend parts of the chunk where it lies, in f64.
struct Holders<'a> {
    chunk: &'a Chunk,
    /// Of each sequence of the batch and each of its holes.
    parts: Vec<&'a [Vec<Range<u32>>]>,
    sent: Vec<Option<Vec<Partial>>>,
}

impl Elsewhere for Holders<'_> {
    fn send(&mut self, queries: &LayerQueries<'_>) {
        assert!(self.sent.is_empty(), "one layer at a time");
        let rows = &self.chunk.rows[queries.layer];
        for asked in queries.sequences {
            let parts = self.parts[asked.sequence][asked.hole].iter();
            let attend = |part: &Range<u32>| {
                attend(queries, asked.values, &rows[part.start as usize..part.end as usize])
            };
            self.sent.push(Some(parts.map(attend).collect()));
        }
    }

    fn receive(&mut self, _: &LayerQueries<'_>) -> Vec<Option<Vec<Partial>>> {
        std::mem::take(&mut self.sent)
    }
}

fn attend(queries: &LayerQueries<'_>, values: &[f32], rows: &[Vec<f32>]) -> Partial {
    let d_v = queries.d_v;
    let mut partial = Partial::empty(values.len() / queries.d_qk, d_v);
    for (n, query) in values.chunks(queries.d_qk).enumerate() {
        let product = |row: &Vec<f32>| -> f64 {
            query.iter().zip(row).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
        };
        let logits: Vec<f64> =
            rows.iter().map(|row| product(row) * f64::from(queries.scale)).collect();
        let m = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let l: f64 = logits.iter().map(|logit| (logit - m).exp()).sum();
        let mut o = vec![0.0; d_v];
        for (logit, row) in logits.iter().zip(rows) {
            let weight = (logit - m).exp() / l;
            o.iter_mut().zip(row).for_each(|(o, value)| *o += weight * f64::from(*value));
        }
        let out = o.iter().map(|value| *value as f32).collect::<Vec<_>>();
        partial.o[n * d_v..][..d_v].copy_from_slice(&out);
        (partial.m[n], partial.l[n]) = (m as f32, l as f32);
    }
    partial
}

/// Computes some tokens of sequences; logits of those that want them.
fn step(
    model: &Model,
    arena: &mut Arena,
    chunk: &Chunk,
    batch: &[(&Sequence, Range<usize>, bool)],
) -> Vec<Vec<f32>> {
    let steps: Vec<SequenceStep<'_>> = batch
        .iter()
        .map(|(sequence, positions, logits)| SequenceStep {
            tokens: &sequence.tokens[positions.clone()],
            start: positions.start as u32,
            holes: &sequence.holes,
            pages: &sequence.pages,
            logits: *logits,
        })
        .collect();
    let parts = batch.iter().map(|(sequence, _, _)| &sequence.parts[..]).collect();
    let mut holders = Holders { chunk, parts, sent: Vec::new() };
    let mut workspace = Workspace::default();
    let cache = &mut arena.cache;
    let logits = model.forward_with(&mut workspace, cache, &steps, &mut holders, &mut |_| ());
    logits.expect("a step").rows().map(<[f32]>::to_vec).collect()
}

/// Logits after the prompt and after each token: of `follow`, or the best one.
fn answer(
    model: &Model,
    arena: &mut Arena,
    chunk: &Chunk,
    pieces: &[Piece],
    follow: Option<&[u32]>,
) -> Vec<Vec<f32>> {
    let mut sequence = Sequence::new(model, arena, chunk, pieces);
    let mut from = sequence.question;
    let mut answer: Vec<Vec<f32>> = Vec::new();
    while answer.len() < STEPS {
        let end = sequence.tokens.len();
        let logits = step(model, arena, chunk, &[(&sequence, from..end, true)]).remove(0);
        let token = follow.map_or_else(|| best(&logits), |follow| follow[answer.len()]);
        sequence.tokens.push(token);
        answer.push(logits);
        from = end;
    }
    answer
}

fn tokens(answer: &[Vec<f32>]) -> Vec<u32> {
    answer.iter().map(|logits| best(logits)).collect()
}

struct Texts {
    chunk: Vec<u32>,
    before: Vec<u32>,
    question: Vec<u32>,
}

fn texts(variant: &str) -> (Model, Texts) {
    let (model, cases) = load(variant, 1);
    let chunk = cases[8].prompt[300..492].to_vec();
    (model, Texts { chunk, before: cases[7].prompt.clone(), question: cases[10].prompt.clone() })
}

fn is_near(got: &[f32], want: &[f32], tolerance: f32) -> bool {
    let largest = want.iter().fold(0f32, |largest, want| largest.max(want.abs()));
    got.iter().zip(want).all(|(got, want)| (got - want).abs() <= tolerance * largest)
}

/// The chunk spliced and the chunk routed, everything else alike: so many of an answer's steps.
fn check(variant: &str, dtype: KvDtype, tolerance: f32, alike_min: usize) {
    let (model, texts) = texts(variant);
    let text = |range: Range<usize>| Piece::Text(texts.before[range].to_vec());
    let question = vec![Piece::Text(texts.question.clone())];
    let one = |tokens: Range<u32>| Piece::Routed(vec![tokens]);
    let two = |tokens: Range<u32>, at: u32| Piece::Routed(vec![tokens.start..at, at..tokens.end]);
    let spliced = Piece::Spliced;
    let cases = [
        (vec![text(0..128), spliced(0..192)], vec![text(0..128), one(0..192)]),
        (vec![text(0..100), spliced(0..192)], vec![text(0..100), one(0..192)]),
        (vec![text(0..100), spliced(0..192)], vec![text(0..100), two(0..192, 128)]),
        // Some tokens of it, and local text right behind.
        (
            vec![text(0..517), spliced(64..130), text(20..30)],
            vec![text(0..517), two(64..130, 65), text(20..30)],
        ),
        // Twice, with text before, between and after; one of them as a block of this very prompt.
        (
            vec![spliced(0..64), text(0..70), spliced(0..192), text(7..20), spliced(10..20)],
            vec![one(0..64), text(0..70), two(0..192, 64), text(7..20), one(10..20)],
        ),
        (
            vec![spliced(0..64), text(0..70), spliced(0..192), text(7..20), spliced(10..20)],
            vec![one(0..64), text(0..70), spliced(0..192), text(7..20), one(10..20)],
        ),
    ];
    for (n, (spliced, routed)) in cases.into_iter().enumerate() {
        let what = format!("{variant}, {dtype:?}, case {n}");
        let mut arena = Arena::new(&model, dtype, BLOCK_TOKENS, 40);
        let chunk = Chunk::new(&model, &mut arena, &texts.chunk);
        let [spliced, routed] = [spliced, routed].map(|pieces| [pieces, question.clone()].concat());
        let spliced = answer(&model, &mut arena, &chunk, &spliced, None);
        if dtype == KvDtype::F32 {
            let free = answer(&model, &mut arena, &chunk, &routed, None);
            assert_eq!(tokens(&free), tokens(&spliced), "{what}");
        }
        // Both answers go on with the same tokens, so that a near tie ends nothing.
        let follow = tokens(&spliced);
        let routed = answer(&model, &mut arena, &chunk, &routed, Some(&follow));
        let near = routed.iter().zip(&spliced).filter(|(a, b)| is_near(a, b, tolerance)).count();
        let same = tokens(&routed).iter().zip(&follow).filter(|(a, b)| a == b).count();
        assert!(near.min(same) >= alike_min, "{what}: {near} steps are near, {same} tokens equal");
        assert_eq!(chunk.read(&model, &arena), chunk.rows, "{what}: the chunk has changed");
    }
}

#[test]
fn a_chunk_that_is_spliced_and_one_that_is_routed_give_the_same_tokens() {
    check("plain", KvDtype::F32, 1e-4, STEPS);
    check("yarn_qlora", KvDtype::F32, 1e-4, STEPS);
}

/// A key that is moved is rounded once more. Where that makes a token choose another expert, logits jump, as
/// they do between caches of bf16 and of f32: so not all steps are near.
#[test]
fn they_are_alike_in_bf16_but_for_its_rounding() {
    check("plain", KvDtype::Bf16, 2e-2, STEPS - 4);
    check("yarn_qlora", KvDtype::Bf16, 2e-2, STEPS - 4);
}

/// The independent model is told that a chunk's tokens attend nothing before the chunk; all else, their
/// positions too, is as in any prompt.
fn check_naive(variant: &str, dir: &Path) {
    let (model, texts) = texts(variant);
    let (before, prefill_chunk_tokens) = (&texts.before[..37], &texts.chunk[..100]);
    let naive = Naive::load(dir);
    let mut sequence = naive::Sequence::default();
    let mut wanted = Vec::new();
    for (tokens, attends_from) in
        [(before, 0), (prefill_chunk_tokens, before.len()), (&texts.question[..], 0)]
    {
        sequence.attends_from = attends_from;
        for token in tokens {
            wanted = naive.feed(&mut sequence, *token);
        }
    }
    let mut arena = Arena::new(&model, KvDtype::F32, BLOCK_TOKENS, 20);
    let chunk = Chunk::new(&model, &mut arena, prefill_chunk_tokens);
    for middle in [Piece::Spliced(0..100), Piece::Routed(vec![0..64, 64..100])] {
        let pieces = [Piece::Text(before.to_vec()), middle, Piece::Text(texts.question.clone())];
        let got = answer(&model, &mut arena, &chunk, &pieces, None);
        let (mut sequence, mut wanted) = (sequence.clone(), wanted.clone());
        for (n, got) in got.iter().enumerate() {
            let want: Vec<f32> = wanted.iter().map(|logit| *logit as f32).collect();
            assert_near(got, &want, 1e-4, &format!("{variant}, token {n}"));
            wanted = naive.feed(&mut sequence, best(got));
        }
    }
}

#[test]
fn a_reused_chunk_is_one_that_has_not_seen_what_comes_before_it_and_nothing_else() {
    check_naive("plain", &arena::tiny());
    let yarn = arena::root().join("tests/data/deepseek_v2/yarn_qlora/model");
    check_naive("yarn_qlora", &yarn);
}

#[test]
fn sequences_with_other_holes_in_one_batch_do_not_disturb_each_other() {
    let (model, texts) = texts("yarn_qlora");
    let text = |range: Range<usize>| Piece::Text(texts.before[range].to_vec());
    let question = |tokens: usize| Piece::Text(texts.question[..tokens].to_vec());
    let routed = |tokens: Range<u32>| Piece::Routed(vec![tokens]);
    let prompts = [
        vec![text(0..30), routed(0..192), question(9)],
        vec![text(0..50), Piece::Spliced(0..100), question(3)],
        vec![text(0..64), routed(5..90), text(3..9), routed(0..70), question(17)],
        vec![routed(0..64), question(5)],
    ];
    let mut arena = Arena::new(&model, KvDtype::F32, BLOCK_TOKENS, 70);
    let chunk = Chunk::new(&model, &mut arena, &texts.chunk);
    let sequences = prompts.map(|pieces| Sequence::new(&model, &mut arena, &chunk, &pieces));
    let all = |sequence: &Sequence| sequence.question..sequence.tokens.len();
    let alone: Vec<Vec<f32>> = sequences
        .iter()
        .map(|sequence| step(&model, &mut arena, &chunk, &[(sequence, all(sequence), true)]))
        .map(|mut logits| logits.remove(0))
        .collect();
    for silent in 0..sequences.len() {
        let batch: Vec<_> = sequences
            .iter()
            .enumerate()
            .map(|(n, sequence)| (sequence, all(sequence), n != silent))
            .collect();
        let mut together = step(&model, &mut arena, &chunk, &batch).into_iter();
        for (n, alone) in alone.iter().enumerate().filter(|(n, _)| *n != silent) {
            let logits = together.next().expect("logits");
            assert_near(&logits, alone, 1e-5, &format!("sequence {n}, without {silent}"));
        }
    }
}

#[test]
fn holes_that_cannot_be_are_refused() {
    let (model, _) = texts("plain");
    let mut arena = Arena::new(&model, KvDtype::F32, 16, 4);
    let pages = arena.slots_for(64);
    let mut check = |holes: &[(Range<u32>, u32)], start: u32, taken: bool| {
        let hole = |(positions, moved): &(Range<u32>, u32)| Hole {
            positions: positions.clone(),
            moved: *moved,
        };
        let holes: Vec<Hole> = holes.iter().map(hole).collect();
        let tokens = &[1, 2];
        let step = SequenceStep { tokens, start, holes: &holes, pages: &pages, logits: false };
        let mut workspace = Workspace::default();
        let got = model.forward(&mut workspace, &mut arena.cache, &[step], &mut |_| ());
        let refused = StepError::Elsewhere { sequence: 0 };
        assert_eq!(got.err(), (!taken).then_some(refused), "{holes:?} from {start}");
    };
    // What comes later is nobody's yet.
    check(&[(2..10, 1)], 0, true);
    check(&[(2..10, 2), (32..48, 0)], 0, true);
    // Nobody attends it.
    check(&[(0..16, 0)], 16, false);
    // A step is before a hole or behind it.
    check(&[(1..10, 1)], 0, false);
    check(&[(2..10, 1)], 9, false);
    check(&[(2..10, 1)], 5, false);
    // It begins before the chunk does, is in no order, holds nothing, or is no whole page.
    check(&[(2..10, 3)], 0, false);
    check(&[(20..30, 1), (2..10, 1)], 0, false);
    check(&[(2..10, 1), (9..12, 1)], 0, false);
    check(&[(10..10, 1)], 0, false);
    check(&[(16..31, 0)], 0, false);
}

/// Of each long prompt the half in the middle is computed alone and spliced, and its answer followed.
#[test]
#[ignore = "measures, for docs/decisions/0049-reusable-chunks-by-key-rotation.md"]
#[allow(clippy::print_stdout)] // it is what it is for
fn what_reuse_costs_in_accuracy() {
    for variant in ["plain", "yarn_qlora"] {
        for dtype in [KvDtype::F32, KvDtype::Bf16] {
            let (model, cases) = load(variant, 1);
            for case in cases.iter().filter(|case| case.prompt.len() >= 64) {
                let (from, to) = (case.prompt.len() / 4, case.prompt.len() * 3 / 4);
                let text = |range: Range<usize>| Piece::Text(case.prompt[range].to_vec());
                let mut arena = Arena::new(&model, dtype, BLOCK_TOKENS, 100);
                let chunk = Chunk::new(&model, &mut arena, &case.prompt[from..to]);
                let whole = [text(0..case.prompt.len())];
                let whole = answer(&model, &mut arena, &chunk, &whole, Some(&case.greedy));
                let spliced = Piece::Spliced(0..(to - from) as u32);
                let spliced = [text(0..from), spliced, text(to..case.prompt.len())];
                let spliced = answer(&model, &mut arena, &chunk, &spliced, Some(&case.greedy));
                let all = || whole.iter().flatten().zip(spliced.iter().flatten());
                let off = all().map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let largest = all().map(|(a, _)| a.abs()).fold(0.0, f32::max);
                let (a, b) = (tokens(&whole), tokens(&spliced));
                let differ = a.iter().zip(&b).filter(|(a, b)| a != b).count();
                println!(
                    "{variant}, {dtype:?}: {} tokens, {} of them reused: logits differ by at most {off:.3} \
                     (the largest is {largest:.1}), {differ} of {STEPS} greedy tokens differ",
                    case.prompt.len(),
                    to - from,
                );
            }
        }
    }
}
