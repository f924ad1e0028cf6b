//! What must hold for any shape, split and order.

mod support;

use kvasir_attention::vectors::Errors;
use kvasir_attention::{
    Job, Kernel, PageError, PageList, PageSpec, Partial, PartialMut, Precision, Query, RowDtype,
    Visible, merge,
};
use proptest::prelude::*;
use support::{Paged, TOLERANCE, Way, assert_close, assert_within, query};

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

#[derive(Debug, Clone)]
struct Shape {
    seed: u64,
    query_rows: usize,
    rows: usize,
    d_v: usize,
    rope: usize,
    rows_per_page: usize,
    dtype: RowDtype,
    scale: f32,
}

fn shapes() -> impl Strategy<Value = Shape> {
    (
        1u64..,
        1usize..90,
        0usize..400,
        1usize..70,
        0usize..20,
        1usize..70,
        prop::sample::select(&RowDtype::ALL[..]),
        0.1f32..4.0,
    )
        .prop_map(|(seed, query_rows, rows, d_v, rope, rows_per_page, dtype, scale)| {
            let fp8 = dtype == RowDtype::Fp8Latent;
            // Rows of fp8 have one width, and many of them would take long. They are so wide that a
            // larger scale would leave one row alone.
            let scale = if fp8 { scale / 8.0 } else { scale };
            let (d_v, rope) = if fp8 { (512, 64) } else { (d_v, rope) };
            let (query_rows, rows) =
                if fp8 { (query_rows % 20 + 1, rows % 90) } else { (query_rows, rows) };
            Shape { seed, query_rows, rows, d_v, rope, rows_per_page, dtype, scale }
        })
}

impl Shape {
    fn d_qk(&self) -> usize {
        self.d_v + self.rope
    }

    fn q(&self) -> Vec<f32> {
        values(self.seed, self.query_rows * self.d_qk())
    }

    fn rows(&self) -> Vec<f32> {
        values(self.seed ^ 0xabcd, self.rows * self.d_qk())
    }

    fn paged(&self, rows: &[f32]) -> Paged {
        let rows: Vec<&[f32]> = rows.chunks_exact(self.d_qk()).collect();
        Paged::new(&rows, self.d_qk(), self.rows_per_page, self.dtype)
    }
}

/// What every way should give, computed in f64 from the values as they are stored.
fn exact(query: &Query<'_>, pages: &PageList<'_>) -> Partial {
    let d_v = query.d_v;
    let mut read = vec![0f32; query.d_qk];
    let rows: Vec<Vec<f64>> = (0..pages.rows())
        .map(|row| {
            pages.read_row(row, &mut read);
            read.iter().copied().map(f64::from).collect()
        })
        .collect();
    let mut partial = Partial::empty(query.rows(), d_v);
    for (at, q) in query.values.chunks_exact(query.d_qk).enumerate() {
        let seen = match query.visible {
            Visible::All => rows.len(),
            Visible::First(counts) => counts[at].min(rows.len()),
        };
        if seen == 0 {
            continue;
        }
        let score = |row: &Vec<f64>| {
            let dot: f64 = q.iter().zip(row).map(|(a, b)| f64::from(*a) * b).sum();
            dot * f64::from(query.scale)
        };
        let scores: Vec<f64> = rows[..seen].iter().map(score).collect();
        let m = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - m).exp()).collect();
        let l: f64 = weights.iter().sum();
        for (lane, o) in partial.o[at * d_v..][..d_v].iter_mut().enumerate() {
            let sum: f64 = weights.iter().zip(&rows).map(|(weight, row)| weight * row[lane]).sum();
            *o = (sum / l) as f32;
        }
        (partial.m[at], partial.l[at]) = (m as f32, l as f32);
    }
    partial
}

/// The values that a kernel of bf16 is given, so that it need not round them.
fn rounded(values: &[f32]) -> Vec<f32> {
    values.iter().map(|value| half::bf16::from_f32(*value).to_f32()).collect()
}

/// How far outputs may be off: the reference vectors' tolerance, but no less than what f32 leaves of
/// the greatest score. A score is off by about an epsilon of the products it sums, and an
/// exponential's relative error is its argument's absolute one, above and below the fraction line.
fn attainable(query: &Query<'_>, rows: &[f32]) -> f32 {
    let mut greatest = 0f32;
    for q in query.values.chunks_exact(query.d_qk) {
        for row in rows.chunks_exact(query.d_qk) {
            let summed: f32 = q.iter().zip(row).map(|(a, b)| (a * b).abs()).sum();
            greatest = greatest.max(summed * query.scale);
        }
    }
    TOLERANCE.max(2.0 * f32::EPSILON * greatest)
}

/// All ways, all rows visible and under causal limits.
fn check_against_exact(shape: &Shape, tolerance: impl Fn(&Query<'_>, &[f32]) -> f32) {
    let (q, rows) = (shape.q(), shape.rows());
    let q_rounded = rounded(&q);
    let paged = shape.paged(&rows);
    let pages = paged.list();
    let counts: Vec<usize> = values(shape.seed ^ 1, shape.query_rows)
        .iter()
        .map(|v| ((v + 1.0) * 0.6 * shape.rows as f32) as usize)
        .collect();
    for visible in [Visible::All, Visible::First(&counts)] {
        for (precision, q) in [(Precision::F32, &q), (Precision::Bf16, &q_rounded)] {
            let has_precision = |way: &Way| way.precision(shape.dtype) == precision;
            let ways: Vec<Way> = Way::all().into_iter().filter(has_precision).collect();
            if ways.is_empty() {
                continue;
            }
            let query = Query { visible, ..query(q, shape.d_qk(), shape.d_v, shape.scale) };
            let want = exact(&query, &pages);
            let tolerance = tolerance(&query, &rows);
            for way in ways {
                let got = way.attend(&query, &pages);
                let what = format!("{way:?}, {visible:?}, {shape:?}");
                match precision {
                    Precision::F32 => assert_within(tolerance, &got, &want, &what),
                    Precision::Bf16 => {
                        let errors = Errors::between(&got, &want);
                        assert!(errors.are_within(precision), "{what}: {errors:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn every_way_is_exact_where_tiles_and_strategies_change() {
    for query_rows in [1, 2, 3, 4, 5, 8, 9, 63, 64, 65, 257] {
        for (rows, rows_per_page) in [(1, 64), (63, 64), (64, 64), (300, 64), (300, 15), (40, 1)] {
            for (d_v, rope) in [(64, 16), (512, 64), (33, 4)] {
                if query_rows > 65 && d_v > 64 {
                    continue;
                }
                for dtype in RowDtype::ALL {
                    if dtype == RowDtype::Fp8Latent && (d_v != 512 || query_rows > 9) {
                        continue;
                    }
                    let scale = if dtype == RowDtype::Fp8Latent { 0.07 } else { 0.7 };
                    let seed = query_rows as u64;
                    let shape =
                        Shape { seed, query_rows, rows, d_v, rope, rows_per_page, dtype, scale };
                    check_against_exact(&shape, |_, _| TOLERANCE);
                }
            }
        }
    }
}

/// Two f32 computations differed here by more than either may be off.
#[test]
fn every_way_is_exact_where_scores_are_far_apart() {
    let (seed, scale) = (1192491117814095600, 3.6359212);
    let (query_rows, rows, d_v, rope, rows_per_page) = (63, 261, 56, 14, 1);
    let dtype = RowDtype::F32;
    let shape = Shape { seed, query_rows, rows, d_v, rope, rows_per_page, dtype, scale };
    check_against_exact(&shape, attainable);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_way_is_exact_on_any_shape(shape in shapes()) {
        check_against_exact(&shape, attainable);
    }

    /// Each holder attends the rows that it has where they lie, among those of others.
    #[test]
    fn random_rows_of_up_to_sixteen_holders_merge_to_the_whole_in_any_order(
        shape in shapes(),
        holders in 1usize..=16,
        order in Just((0..16).collect::<Vec<usize>>()).prop_shuffle(),
    ) {
        let rows = shape.rows();
        let paged = shape.paged(&rows);
        let pages = paged.list();
        let owner = values(shape.seed ^ 2, shape.rows);
        let mut shares: Vec<Vec<u32>> = vec![Vec::new(); holders];
        for (row, owner) in owner.iter().enumerate() {
            let holder = ((owner + 1.0) / 2.0 * holders as f32) as usize;
            shares[holder.min(holders - 1)].push(row as u32);
        }
        let (q, q_rounded) = (shape.q(), rounded(&shape.q()));
        for way in [Way::best(), Way { kernel: Kernel::best(Precision::Bf16), ..Way::best() }] {
            let precision = way.precision(shape.dtype);
            let q = if precision == Precision::F32 { &q } else { &q_rounded };
            let query = query(q, shape.d_qk(), shape.d_v, shape.scale);
            let parts: Vec<Partial> = (shares.iter())
                .map(|share| way.attend(&query, &pages.select(share).expect("rows of these pages")))
                .collect();
            let want = exact(&query, &pages);
            let tolerance = attainable(&query, &rows);
            let check = |merged: &Partial, what: &str| match precision {
                Precision::F32 => assert_within(tolerance, merged, &want, what),
                Precision::Bf16 => {
                    let errors = Errors::between(merged, &want);
                    assert!(errors.are_within(precision), "{what}: {errors:?}");
                }
            };
            let merged = merge(&parts, shape.d_v);
            check(&merged, "in the order of the holders");
            prop_assert_eq!(&merged, &merge(&parts, shape.d_v), "the same bits again");
            let in_order = order.iter().filter(|at| **at < holders);
            let shuffled: Vec<Partial> = in_order.map(|at| parts[*at].clone()).collect();
            prop_assert_eq!(shuffled.len(), holders);
            check(&merge(&shuffled, shape.d_v), "in another order");
        }
    }

    #[test]
    fn two_parts_merge_to_the_same_bits_either_way_round(shape in shapes(), cut in any::<prop::sample::Index>()) {
        let (q, rows) = (shape.q(), shape.rows());
        let paged = shape.paged(&rows);
        let query = query(&q, shape.d_qk(), shape.d_v, shape.scale);
        let all: Vec<u32> = (0..shape.rows as u32).collect();
        let (left, right) = all.split_at(cut.index(shape.rows + 1));
        let part = |rows: &[u32]| {
            Way::best().attend(&query, &paged.list().select(rows).expect("rows of these pages"))
        };
        let (left, right) = (part(left), part(right));
        let one_way = merge(&[left.clone(), right.clone()], shape.d_v);
        prop_assert_eq!(one_way, merge(&[right, left], shape.d_v));
    }

    /// A selection in any order, with rows named twice, is a list of those rows.
    #[test]
    fn selected_rows_are_attended_as_if_they_lay_together(shape in shapes(), picks in prop::collection::vec(any::<prop::sample::Index>(), 0..80)) {
        let rows = shape.rows();
        if shape.rows == 0 {
            return Ok(());
        }
        let paged = shape.paged(&rows);
        let picks: Vec<u32> = picks.iter().map(|pick| pick.index(shape.rows) as u32).collect();
        let together: Vec<&[f32]> =
            picks.iter().map(|&row| &rows[row as usize * shape.d_qk()..][..shape.d_qk()]).collect();
        let together = Paged::new(&together, shape.d_qk(), 1, shape.dtype);
        let q = shape.q();
        let query = query(&q, shape.d_qk(), shape.d_v, shape.scale);
        for way in Way::all() {
            let got = way.attend(&query, &paged.list().select(&picks).expect("rows of these pages"));
            prop_assert_eq!(got, way.attend(&query, &together.list()), "{:?}", way);
        }
    }
}

#[test]
fn empty_parts_change_no_bit_and_one_part_comes_out_as_it_went_in() {
    let rows = values(3, 40 * 24);
    let q = values(4, 5 * 24);
    let rows: Vec<&[f32]> = rows.chunks_exact(24).collect();
    let paged = Paged::new(&rows, 24, 7, RowDtype::F32);
    let query = query(&q, 24, 16, 1.7);
    let way = Way::best();
    let part = way.attend(&query, &paged.list());
    let other = way.attend(&query, &Paged::new(&rows[..9], 24, 3, RowDtype::F32).list());
    let empty = Partial::empty(5, 16);
    assert_eq!(merge(std::slice::from_ref(&part), 16), part);
    assert_eq!(merge(&[empty.clone(), part.clone(), empty.clone()], 16), part);
    let both = merge(&[part.clone(), other.clone()], 16);
    assert_eq!(merge(&[empty.clone(), part, empty.clone(), other, empty.clone()], 16), both);
    assert_eq!(merge(&[empty.clone(), empty.clone()], 16), empty);
}

#[test]
fn a_query_that_sees_nothing_gives_the_empty_partial() {
    let q = values(5, 3 * 20);
    let rows = values(6, 10 * 20);
    let rows: Vec<&[f32]> = rows.chunks_exact(20).collect();
    for way in Way::all() {
        let none = Paged::new(&[], 20, 4, RowDtype::F32);
        assert_eq!(way.attend(&query(&q, 20, 20, 1.0), &none.list()), Partial::empty(3, 20));
        let some = Paged::new(&rows, 20, 4, RowDtype::F32);
        let blind = Query { visible: Visible::First(&[0, 0, 0]), ..query(&q, 20, 20, 1.0) };
        assert_eq!(way.attend(&blind, &some.list()), Partial::empty(3, 20));
    }
}

#[test]
fn equal_work_gives_equal_bits_and_jobs_do_not_disturb_each_other() {
    let rows = values(7, 700 * 80);
    let rows: Vec<&[f32]> = rows.chunks_exact(80).collect();
    let paged =
        [Paged::new(&rows, 80, 64, RowDtype::F32), Paged::new(&rows[..99], 80, 16, RowDtype::Bf16)];
    let q = values(8, 300 * 80);
    let queries = [query(&q, 80, 64, 1.0), query(&q[..4 * 80], 80, 64, 1.0)];
    for way in Way::all() {
        let alone: Vec<Partial> =
            queries.iter().zip(&paged).map(|(q, p)| way.attend(q, &p.list())).collect();
        let mut attention = way.attention();
        for _ in 0..2 {
            let mut out: Vec<Partial> =
                queries.iter().map(|query| Partial::empty(query.rows(), 64)).collect();
            let jobs = queries.iter().zip(&paged).zip(&mut out);
            let jobs = jobs.map(|((query, paged), out)| Job {
                query: *query,
                pages: paged.list(),
                out: PartialMut { o: &mut out.o, m: &mut out.m, l: &mut out.l },
            });
            attention.attend_all(jobs.collect());
            if way.threads == 1 {
                assert_eq!(out, alone, "{way:?}");
            }
            for (got, want) in out.iter().zip(&alone) {
                assert_close(got, want, &format!("{way:?}"));
            }
        }
    }
}

/// Why a list over `paged`'s memory is refused after a change to its description.
fn refusal<'a>(paged: &'a Paged, change: impl FnOnce(&mut PageSpec<'a>)) -> Option<PageError> {
    let mut spec = paged.spec();
    change(&mut spec);
    // SAFETY: the memory is `paged`'s own; a description that leaves it must be refused.
    unsafe { PageList::new(spec) }.err()
}

#[test]
fn pages_that_do_not_lie_in_the_memory_are_refused() {
    let paged = Paged::new(&[[1.0; 8].as_slice(); 10], 8, 4, RowDtype::F32);
    let len_bytes = paged.spec().len_bytes;
    let check = |change: fn(&mut PageSpec<'_>)| refusal(&paged, change);
    assert_eq!(check(|_| ()), None);
    assert!(matches!(check(|s| s.len_bytes -= 64), Some(PageError::OutOfMemory { page: 0, .. })));
    for (page, far) in [(1, [0, len_bytes - 4, 0]), (0, [usize::MAX - 3, 0, 0])] {
        let refused = refusal(&paged, |spec| spec.offsets_bytes = &far);
        assert!(matches!(refused, Some(PageError::OutOfMemory { page: at, .. }) if at == page));
    }
    let count = PageError::Count { rows: 13, needed: 4, got: 3 };
    assert_eq!(check(|s| s.rows = 13), Some(count));
    assert!(matches!(check(|s| s.row_stride_bytes = 28), Some(PageError::Stride { .. })));
    assert_eq!(check(|s| s.row_stride_bytes = 42), Some(PageError::Unaligned));
    assert_eq!(check(|s| s.offsets_bytes = &[2, 0, 0]), Some(PageError::Unaligned));
    assert_eq!(check(|s| s.rows_per_page = 0), Some(PageError::Empty));
    assert_eq!(check(|s| s.width = 0), Some(PageError::Empty));
    let width = PageError::Width { width: 8 };
    assert_eq!(check(|s| s.dtype = RowDtype::Fp8Latent), Some(width));
    assert!(paged.list().select(&[9, 0]).is_ok());
    let beyond = PageError::Selected { row: 10, rows: 10 };
    assert_eq!(paged.list().select(&[9, 10]).err(), Some(beyond));
}

#[test]
fn kernels_that_lose_precision_leave_other_rows_to_those_that_do_not() {
    let rows = values(11, 70 * 96);
    let rows: Vec<&[f32]> = rows.chunks_exact(96).collect();
    let q = values(12, 20 * 96);
    for dtype in [RowDtype::F32, RowDtype::F16] {
        let paged = Paged::new(&rows, 96, 64, dtype);
        let query = query(&q, 96, 64, 1.0);
        let want = exact(&query, &paged.list());
        for kernel in Kernel::available() {
            let way = Way { kernel, ..Way::best() };
            assert_close(&way.attend(&query, &paged.list()), &want, &format!("{way:?}, {dtype:?}"));
        }
    }
}
