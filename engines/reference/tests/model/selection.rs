//! A model with an indexer: each token attends the rows that score best, wherever they are. It equals the
//! independent model in f64, and nobody can tell from the tokens who has which rows.

use std::ops::Range;
use std::path::Path;

use crate::arena::{self, Arena, assert_near, best, tiny};
use crate::checkpoint::{IndexerSizes, Sizes, random_checkpoint};
use crate::naive::{self, Naive, Sequence};
use kvasir_attention::Partial;
use kvasir_attention::index::{Candidate, best as best_of};
use kvasir_engine_reference::model::{
    Elsewhere, Hole, IndexQueries, KvDtype, LayerQueries, LoadOptions, Model, ModelConfig,
    SequenceStep, Splice, SpliceError, StepError, Workspace,
};
use kvasir_proto::SlotIndex;

const BLOCK_TOKENS: u32 = 16;
const TOPK: usize = 24;
const PROMPT: u32 = 130;
const STEPS: usize = 12;
/// A choice by less is one that rounding may make otherwise.
const NEAR: f64 = 1e-5;

fn sizes(yarn_and_low_rank: bool) -> Sizes {
    let indexer = Some(IndexerSizes { heads: 6, width: 24, topk: TOPK });
    let sizes = Sizes { indexer, ..Sizes::default() };
    if yarn_and_low_rank {
        return sizes;
    }
    Sizes { query_rank: None, yarn: false, groups: None, heads: 5, layers: 3, ..sizes }
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len)
        .map(|i| (seed.wrapping_mul(2_654_435_761).wrapping_add(i * 40_503) >> 7) % 1024)
        .collect()
}

struct Case {
    model: Model,
    naive: Naive,
    _dir: tempfile::TempDir,
}

fn case(seed: u64, yarn_and_low_rank: bool) -> Case {
    let dir = tempfile::tempdir().expect("a folder");
    random_checkpoint(dir.path(), seed, &sizes(yarn_and_low_rank), &tiny());
    let model = Model::load(dir.path(), LoadOptions::default()).expect("the checkpoint");
    Case { model, naive: Naive::load(dir.path()), _dir: dir }
}

/// What the independent model generates: the tokens, and the logits before each.
fn expected(naive: &Naive, prompt: &[u32]) -> (Vec<u32>, Vec<Vec<f32>>) {
    let mut sequence = Sequence::default();
    let mut logits = Vec::new();
    prompt.iter().for_each(|token| logits = naive.feed(&mut sequence, *token));
    let (mut tokens, mut all) = (Vec::new(), Vec::new());
    for _ in 0..STEPS {
        all.push(logits.iter().map(|logit| *logit as f32).collect());
        let (token, margin) = naive::best(&logits);
        assert!(margin > 1e-3, "a near tie; take another seed");
        tokens.push(token);
        logits = naive.feed(&mut sequence, token);
    }
    let nearest = sequence.choices.iter().copied().fold(f64::INFINITY, f64::min);
    assert!(sequence.choices.len() > 300, "rows were chosen in every layer");
    assert!(nearest > NEAR, "a near choice by {nearest}; take another seed");
    (tokens, all)
}

/// Where rows of positions are that are not here: copies of what the sequence itself has written elsewhere.
struct Holders<'a> {
    /// Of each layer rows and keys, by position.
    rows: &'a [Vec<Vec<f32>>],
    keys: &'a [Vec<Vec<f32>>],
    /// Of each hole who has which of its positions.
    holes: &'a [Vec<Range<u32>>],
    best: Vec<Option<Vec<Vec<Candidate>>>>,
    partials: Vec<Option<Vec<Partial>>>,
    /// Layers in which rows were chosen.
    chosen: usize,
}

impl Holders<'_> {
    fn start(&self, hole: usize) -> u32 {
        self.holes[hole][0].start
    }
}

impl Elsewhere for Holders<'_> {
    fn score(&mut self, queries: &IndexQueries<'_>) {
        assert!(self.best.is_empty(), "one layer at a time");
        let keys = &self.keys[queries.layer];
        for asked in queries.sequences {
            let tokens = asked.weights.len() / queries.heads;
            let mut all: Vec<Vec<Candidate>> = vec![Vec::new(); tokens];
            for part in &self.holes[asked.hole] {
                for (token, all) in all.iter_mut().enumerate() {
                    let score = |key: &Vec<f32>| {
                        let head = |head: usize| {
                            let at = token * queries.heads + head;
                            let query = &asked.values[at * queries.width..][..queries.width];
                            let dot: f64 = (query.iter().zip(key))
                                .map(|(q, k)| f64::from(*q) * f64::from(*k))
                                .sum();
                            f64::from(asked.weights[at]) * dot.max(0.0)
                        };
                        (0..queries.heads).map(head).sum::<f64>() as f32
                    };
                    let candidate = |position: u32| Candidate {
                        row: position - self.start(asked.hole),
                        score: score(&keys[position as usize]),
                    };
                    all.extend(best_of(part.clone().map(candidate).collect(), queries.topk));
                }
            }
            self.best.push(Some(all));
        }
    }

    fn best(&mut self, _: &IndexQueries<'_>) -> Vec<Option<Vec<Vec<Candidate>>>> {
        self.chosen += 1;
        std::mem::take(&mut self.best)
    }

    fn send(&mut self, queries: &LayerQueries<'_>) {
        let rows = &self.rows[queries.layer];
        for asked in queries.sequences {
            let tokens = asked.selected.map(<[_]>::len);
            let attend = |part: &Range<u32>| {
                let mut partial = Partial::empty(asked.values.len() / queries.d_qk, queries.d_v);
                let heads = tokens.map_or(1, |tokens| partial.m.len() / tokens);
                for row in 0..partial.m.len() {
                    let attended: Vec<&Vec<f32>> = part
                        .clone()
                        .filter(|position| {
                            let row_of_hole = position - self.start(asked.hole);
                            asked.selected.is_none_or(|all| all[row / heads].contains(&row_of_hole))
                        })
                        .map(|position| &rows[position as usize])
                        .collect();
                    attend(queries, asked.values, &attended, row, &mut partial);
                }
                partial
            };
            self.partials.push(Some(self.holes[asked.hole].iter().map(attend).collect()));
        }
    }

    fn receive(&mut self, _: &LayerQueries<'_>) -> Vec<Option<Vec<Partial>>> {
        std::mem::take(&mut self.partials)
    }
}

fn attend(
    queries: &LayerQueries<'_>,
    values: &[f32],
    rows: &[&Vec<f32>],
    n: usize,
    partial: &mut Partial,
) {
    if rows.is_empty() {
        return;
    }
    let (d_qk, d_v) = (queries.d_qk, queries.d_v);
    let query = &values[n * d_qk..][..d_qk];
    let logit = |row: &&Vec<f32>| {
        let dot: f64 = query.iter().zip(*row).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
        dot * f64::from(queries.scale)
    };
    let logits: Vec<f64> = rows.iter().map(logit).collect();
    let m = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let l: f64 = logits.iter().map(|logit| (logit - m).exp()).sum();
    let mut o = vec![0.0; d_v];
    for (logit, row) in logits.iter().zip(rows) {
        let weight = (logit - m).exp() / l;
        o.iter_mut().zip(*row).for_each(|(o, value)| *o += weight * f64::from(*value));
    }
    let o: Vec<f32> = o.iter().map(|value| *value as f32).collect();
    partial.o[n * d_v..][..d_v].copy_from_slice(&o);
    (partial.m[n], partial.l[n]) = (m as f32, l as f32);
}

/// Rows and keys of all layers, by position.
fn read(model: &Model, arena: &Arena, pages: &[SlotIndex], tokens: u32) -> [Vec<Vec<Vec<f32>>>; 2] {
    let config = model.config();
    let of = |width: usize, is_key: bool| -> Vec<Vec<Vec<f32>>> {
        let row = |layer: usize, at: u32| {
            let mut row = vec![0.0; width];
            let (slot, token) = (pages[(at / BLOCK_TOKENS) as usize], (at % BLOCK_TOKENS) as usize);
            match is_key {
                false => arena.cache.read_row(slot, layer, token, &mut row),
                true => arena.cache.read_key(slot, layer, token, &mut row),
            }
            row
        };
        let layer = |layer: usize| (0..tokens).map(|at| row(layer, at)).collect();
        (0..config.layers).map(layer).collect()
    };
    [of(config.row_width(), false), of(config.indexer.expect("an indexer").width, true)]
}

/// The prompt from `holes` on and the answer, with everything before and between attended elsewhere by
/// `holders`; in chunks.
fn answer(
    model: &Model,
    arena: &mut Arena,
    prompt: &[u32],
    holes: &[Vec<Range<u32>>],
    [rows, keys]: &[Vec<Vec<Vec<f32>>>; 2],
    chunk: usize,
) -> (Vec<u32>, Vec<Vec<f32>>) {
    let whole = |parts: &Vec<Range<u32>>| parts[0].start..parts[parts.len() - 1].end;
    let holes_of: Vec<Hole> =
        holes.iter().map(|parts| Hole { positions: whole(parts), moved: 0 }).collect();
    let pages = arena.slots_for(prompt.len() + STEPS);
    let mut holders =
        Holders { rows, keys, holes, best: Vec::new(), partials: Vec::new(), chosen: 0 };
    let mut workspace = Workspace::default();
    let (mut tokens, mut all) = (prompt.to_vec(), Vec::new());
    let mut at = 0;
    while all.len() < STEPS {
        if let Some(hole) = holes_of.iter().find(|hole| hole.positions.start as usize == at) {
            at = hole.positions.end as usize;
            continue;
        }
        let next =
            holes_of.iter().map(|hole| hole.positions.start as usize).find(|&hole| hole > at);
        let end = (at + chunk).min(next.unwrap_or(tokens.len())).min(tokens.len());
        let step = SequenceStep {
            tokens: &tokens[at..end],
            start: at as u32,
            holes: &holes_of,
            pages: &pages,
            logits: end == tokens.len(),
        };
        let cache = &mut arena.cache;
        let logits = model.forward_with(&mut workspace, cache, &[step], &mut holders, &mut |_| ());
        let logits = logits.expect("a step").rows().next().map(<[f32]>::to_vec);
        at = end;
        if let Some(logits) = logits {
            tokens.push(best(&logits));
            all.push(logits);
        }
    }
    assert_eq!(holders.chosen > 0, !holes.is_empty());
    (tokens[prompt.len()..].to_vec(), all)
}

fn check(seed: u64, yarn_and_low_rank: bool) {
    let Case { model, naive, .. } = case(seed, yarn_and_low_rank);
    let prompt = prompt(seed as u32, PROMPT);
    let (tokens, logits) = expected(&naive, &prompt);
    let what = |way: &str| format!("seed {seed}, {way}");
    let nothing = [Vec::new(), Vec::new()];
    for chunk in [7, 50, 512] {
        let mut arena = Arena::new(&model, KvDtype::F32, BLOCK_TOKENS, 40);
        let (got, all) = answer(&model, &mut arena, &prompt, &[], &nothing, chunk);
        assert_eq!(got, tokens, "{}", what("local"));
        for (got, want) in all.iter().zip(&logits) {
            assert_near(got, want, 1e-4, &what("local"));
        }
    }
    let mut arena = Arena::new(&model, KvDtype::F32, BLOCK_TOKENS, 40);
    let pages = arena.slots_for(prompt.len() + STEPS);
    arena::generate(&model, &mut arena, &pages, (&prompt, 0), 64, STEPS);
    let there = read(&model, &arena, &pages, PROMPT);
    for (way, holes) in [
        ("one holder", vec![vec![0..128]]),
        ("four holders", vec![vec![0..32, 32..64, 64..96, 96..128]]),
        ("a prefix shorter than a choice", vec![vec![0..16]]),
        ("mixed", vec![vec![16..48, 48..64], vec![96..112]]),
    ] {
        for chunk in [7, 512] {
            let mut arena = Arena::new(&model, KvDtype::F32, BLOCK_TOKENS, 40);
            let (got, all) = answer(&model, &mut arena, &prompt, &holes, &there, chunk);
            assert_eq!(got, tokens, "{}", what(way));
            for (got, want) in all.iter().zip(&logits) {
                assert_near(got, want, 1e-4, &what(way));
            }
        }
    }
}

#[test]
fn tokens_are_the_naive_model_s_wherever_rows_are_attended() {
    check(29, true);
    check(4, false);
}

#[test]
fn an_indexer_that_takes_all_rows_changes_nothing() {
    let all = IndexerSizes { heads: 6, width: 24, topk: 4096 };
    let dir = tempfile::tempdir().expect("a folder");
    random_checkpoint(dir.path(), 5, &Sizes { indexer: Some(all), ..sizes(true) }, &tiny());
    let with = Model::load(dir.path(), LoadOptions::default()).expect("the checkpoint");
    // The same weights, without a word of the indexer.
    let config = std::fs::read(dir.path().join("config.json")).expect("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("config.json");
    for key in ["index_n_heads", "index_head_dim", "index_topk"] {
        config.as_object_mut().expect("an object").remove(key);
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("written");
    let without = Model::load(dir.path(), LoadOptions::default()).expect("the checkpoint");
    assert_ne!(with.fingerprint(), without.fingerprint());
    let prompt = prompt(3, 100);
    let [with, without] = [with, without].map(|model| {
        let mut arena = Arena::new(&model, KvDtype::F32, BLOCK_TOKENS, 20);
        let pages = arena.slots_for(120);
        arena::generate(&model, &mut arena, &pages, (&prompt, 0), 64, 8)
    });
    assert_eq!(with, without, "to the bit");
}

#[test]
fn keys_lie_behind_the_rows_of_their_layer() {
    let Case { model, .. } = case(5, true);
    let config: &ModelConfig = model.config();
    let layout = config.layout(BLOCK_TOKENS, KvDtype::Bf16);
    let (rows, keys) = (16 * config.row_width() as u64 * 2, 16 * 24 * 2);
    assert_eq!(layout.slot_bytes(), config.layers as u64 * (rows + keys));
    assert_eq!(layout.runs_per_page(), 2 * config.layers);
    let runs = layout.runs(1);
    assert_eq!((runs[0].offset_bytes, runs[0].length_bytes), (rows + keys, rows));
    assert_eq!((runs[1].offset_bytes, runs[1].length_bytes), (2 * rows + keys, keys));
}

#[test]
fn rows_of_another_position_are_refused_under_selection() {
    let Case { model, .. } = case(5, true);
    let mut arena = Arena::new(&model, KvDtype::F32, BLOCK_TOKENS, 20);
    let (chunk, pages) = (arena.slots_for(32), arena.slots_for(128));
    let splice = Splice { chunk: &chunk, tokens: 0..32, start: 40, holes: &[], pages: &pages };
    assert_eq!(model.splice(&mut arena.cache, &splice), Err(SpliceError::Selects));
    let holes = [Hole { positions: 40..72, moved: 40 }];
    let step =
        SequenceStep { tokens: &[1], start: 100, holes: &holes, pages: &pages, logits: true };
    let nothing = [Vec::new(), Vec::new()];
    let mut holders = Holders {
        rows: &nothing[0],
        keys: &nothing[1],
        holes: &[],
        best: Vec::new(),
        partials: Vec::new(),
        chosen: 0,
    };
    let mut workspace = Workspace::default();
    let cache = &mut arena.cache;
    let got = model.forward_with(&mut workspace, cache, &[step], &mut holders, &mut |_| ());
    assert_eq!(got.err(), Some(StepError::Elsewhere { sequence: 0 }));
}

#[test]
fn an_indexer_that_is_half_described_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    random_checkpoint(dir.path(), 5, &sizes(true), &tiny());
    let read = |change: &dyn Fn(&mut serde_json::Value)| {
        let config = std::fs::read(dir.path().join("config.json")).expect("config.json");
        let mut config: serde_json::Value = serde_json::from_slice(&config).expect("config.json");
        change(&mut config);
        let other = tempfile::tempdir().expect("a folder");
        std::fs::write(other.path().join("config.json"), config.to_string()).expect("written");
        let read = |dir: &Path| ModelConfig::read(dir).map(|config| config.indexer.is_some());
        read(other.path()).map_err(|error| error.to_string())
    };
    assert_eq!(read(&|_| ()), Ok(true));
    let without = |key: &'static str| {
        move |config: &mut serde_json::Value| config[key] = serde_json::Value::Null
    };
    for key in ["index_n_heads", "index_head_dim", "index_topk"] {
        let why = read(&without(key)).expect_err("refused");
        assert!(why.contains(&format!("`{key}` is missing")), "{why}");
    }
    let narrow = read(&|config| config["index_head_dim"] = 8.into()).expect_err("refused");
    assert!(narrow.contains("at least `qk_rope_head_dim`, 16"), "{narrow}");
    let zero = read(&|config| config["index_topk"] = 0.into()).expect_err("refused");
    assert!(zero.contains("`index_topk` is 0"), "{zero}");
}
