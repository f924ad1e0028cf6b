//! The rows that an indexer chooses are those of the definition, however the keys are cut and whoever
//! scores them.

#[path = "support/paged.rs"]
mod paged;

use kvasir_attention::index::{Candidate, IndexQuery, best};
use kvasir_attention::{Attention, AttentionOptions, Kernel, RowDtype, Visible};
use paged::Paged;

const HEADS: usize = 3;
const WIDTH: usize = 37;

/// Values in -1..1 from a seed.
fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

struct Asked {
    values: Vec<f32>,
    weights: Vec<f32>,
}

impl Asked {
    fn new(seed: u64, tokens: usize) -> Self {
        let values_of = values(seed, tokens * HEADS * WIDTH);
        Asked { values: values_of, weights: values(seed + 1, tokens * HEADS) }
    }

    fn query<'a>(&'a self, visible: Visible<'a>) -> IndexQuery<'a> {
        let Asked { values, weights } = self;
        IndexQuery { values, weights, heads: HEADS, width: WIDTH, visible }
    }

    /// As the definition has it.
    fn score(&self, token: usize, key: &[f32]) -> f64 {
        let head = |head: usize| {
            let at = token * HEADS + head;
            let query = &self.values[at * WIDTH..][..WIDTH];
            let dot: f64 = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            f64::from(self.weights[at]) * dot.max(0.0)
        };
        (0..HEADS).map(head).sum()
    }
}

fn attention(kernel: Kernel, threads: usize) -> Attention {
    Attention::new(AttentionOptions { kernel, threads, ..AttentionOptions::default() })
}

fn paged(keys: &[Vec<f32>], rows_per_page: usize, dtype: RowDtype) -> Paged {
    let keys: Vec<&[f32]> = keys.iter().map(Vec::as_slice).collect();
    Paged::new(&keys, WIDTH, rows_per_page, dtype)
}

fn keys(seed: u64, rows: usize) -> Vec<Vec<f32>> {
    values(seed, rows * WIDTH).chunks_exact(WIDTH).map(<[f32]>::to_vec).collect()
}

#[test]
fn the_rows_that_score_best_are_found_in_the_order_of_rows() {
    // Work enough for three threads.
    let keys = keys(1, 1_500);
    let asked = Asked::new(2, 21);
    let visible: Vec<usize> = (0..21).map(|token| token * 75).collect();
    for kernel in Kernel::available() {
        for threads in [1, 3] {
            let pages = paged(&keys, 7, RowDtype::F32);
            let query = asked.query(Visible::First(&visible));
            let got = attention(kernel, threads).candidates(&query, &pages.list(), 40);
            for (token, got) in got.iter().enumerate() {
                let scores = keys[..visible[token]].iter().map(|key| asked.score(token, key));
                let mut ranked: Vec<(usize, f64)> = scores.enumerate().collect();
                ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
                ranked.truncate(40);
                ranked.sort_by_key(|(row, _)| *row);
                let want: Vec<usize> = ranked.iter().map(|(row, _)| *row).collect();
                let rows: Vec<usize> = got.iter().map(|candidate| candidate.row as usize).collect();
                assert_eq!(rows, want, "token {token}, {}, {threads} threads", kernel.name());
                assert!(got.capacity() <= 40, "nothing is kept of the others");
                for (got, (_, want)) in got.iter().zip(&ranked) {
                    assert!((f64::from(got.score) - want).abs() < 1e-5, "{got:?}, {want}");
                }
            }
        }
    }
}

#[test]
fn the_best_of_parts_are_the_best_of_the_whole_to_the_bit() {
    let keys = keys(3, 500);
    let asked = Asked::new(4, 5);
    let query = asked.query(Visible::All);
    for kernel in Kernel::available() {
        for dtype in [RowDtype::F32, RowDtype::Bf16] {
            let whole = attention(kernel, 1);
            let whole = whole.candidates(&query, &paged(&keys, 64, dtype).list(), 50);
            for parts in [2, 3, 7, 500] {
                let each = keys.len().div_ceil(parts);
                let mut merged: Vec<Vec<Candidate>> = vec![Vec::new(); 5];
                for (part, keys) in keys.chunks(each).enumerate() {
                    let pages = paged(keys, 1 + part % 9, dtype);
                    let found = attention(kernel, 1).candidates(&query, &pages.list(), 50);
                    for (merged, found) in merged.iter_mut().zip(found) {
                        let row = |row: u32| row + (part * each) as u32;
                        merged.extend(found.iter().map(|c| Candidate { row: row(c.row), ..*c }));
                    }
                }
                let merged: Vec<_> = merged.into_iter().map(|all| best(all, 50)).collect();
                assert_eq!(merged, whole, "{parts} parts, {}", kernel.name());
            }
        }
    }
}

#[test]
fn of_equal_scores_the_lower_rows_are_taken() {
    // One key again and again: every score is the same; and with no weight every score is 0, whatever
    // the sign of what it counts for nothing.
    let keys = vec![values(5, WIDTH); 20];
    let mut asked = Asked::new(6, 2);
    asked.weights[HEADS..].copy_from_slice(&[-0.0, 0.0, -0.0]);
    let pages = paged(&keys, 16, RowDtype::F32);
    let kernels = attention(Kernel::Portable, 1);
    for found in kernels.candidates(&asked.query(Visible::All), &pages.list(), 6) {
        let rows: Vec<u32> = found.iter().map(|candidate| candidate.row).collect();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5]);
    }
    let zero = |row: u32, score: f32| Candidate { row, score };
    let mixed = vec![zero(9, 1.0), zero(2, 1.0), zero(5, 3.0), zero(1, 0.5)];
    assert_eq!(best(mixed, 2), [zero(2, 1.0), zero(5, 3.0)]);
}

#[test]
fn where_there_are_fewer_rows_all_are_taken() {
    let asked = Asked::new(7, 3);
    let visible = [0, 2, 5];
    let pages = paged(&keys(8, 5), 2, RowDtype::F32);
    let query = asked.query(Visible::First(&visible));
    let found = attention(Kernel::Portable, 1).candidates(&query, &pages.list(), 5);
    let rows = |token: usize| found[token].iter().map(|c| c.row).collect::<Vec<_>>();
    assert_eq!([rows(0), rows(1), rows(2)], [vec![], vec![0, 1], vec![0, 1, 2, 3, 4]]);
}
