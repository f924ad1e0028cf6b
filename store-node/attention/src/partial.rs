//! Queries, partials, and the merge of partials over parts of one set.

/// Which rows of a list a query row attends: always a prefix, as causal attention has it.
#[derive(Debug, Clone, Copy)]
pub enum Visible<'a> {
    All,
    /// Query row `i` attends the first `counts[i]` rows.
    First(&'a [usize]),
}

impl<'a> Visible<'a> {
    /// How many of `rows` rows the query row attends.
    pub(crate) fn of(&self, query_row: usize, rows: usize) -> usize {
        match self {
            Visible::All => rows,
            Visible::First(counts) => counts[query_row].min(rows),
        }
    }

    pub(crate) fn slice(&self, from: usize, to: usize) -> Visible<'a> {
        match self {
            Visible::All => Visible::All,
            Visible::First(counts) => Visible::First(&counts[from..to]),
        }
    }
}

/// Query rows (tokens × heads) in absorbed form.
#[derive(Debug, Clone, Copy)]
pub struct Query<'a> {
    /// `rows × d_qk`, one row after another.
    pub values: &'a [f32],
    pub d_qk: usize,
    pub d_v: usize,
    /// Applied to the dot product in f32, never folded into the query.
    pub scale: f32,
    pub visible: Visible<'a>,
}

impl<'a> Query<'a> {
    pub fn rows(&self) -> usize {
        self.values.len() / self.d_qk
    }

    pub(crate) fn row(&self, row: usize) -> &'a [f32] {
        &self.values[row * self.d_qk..][..self.d_qk]
    }

    pub(crate) fn slice(&self, from: usize, to: usize) -> Query<'a> {
        Query {
            values: &self.values[from * self.d_qk..to * self.d_qk],
            visible: self.visible.slice(from, to),
            ..*self
        }
    }

    pub(crate) fn check(&self) {
        assert!(self.d_v > 0 && self.d_v <= self.d_qk, "the value is a prefix of the row");
        assert!(self.values.len().is_multiple_of(self.d_qk), "a query row is incomplete");
        if let Visible::First(counts) = self.visible {
            assert_eq!(counts.len(), self.rows(), "each query row has its count");
        }
    }
}

/// A partial that owns its numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Partial {
    /// `rows × d_v`, normalised.
    pub o: Vec<f32>,
    /// The largest logit of each row, `-inf` over an empty set.
    pub m: Vec<f32>,
    /// The softmax denominator of each row relative to `m`, 0 over an empty set.
    pub l: Vec<f32>,
}

impl Partial {
    /// The partial over the empty set.
    pub fn empty(rows: usize, d_v: usize) -> Self {
        Partial { o: vec![0.0; rows * d_v], m: vec![f32::NEG_INFINITY; rows], l: vec![0.0; rows] }
    }

    pub fn as_mut(&mut self) -> PartialMut<'_> {
        PartialMut { o: &mut self.o, m: &mut self.m, l: &mut self.l }
    }
}

/// A partial in the caller's memory; kernels overwrite it.
#[derive(Debug)]
pub struct PartialMut<'a> {
    pub o: &'a mut [f32],
    pub m: &'a mut [f32],
    pub l: &'a mut [f32],
}

impl<'a> PartialMut<'a> {
    pub(crate) fn check(&self, query: &Query<'_>) {
        let rows = query.rows();
        assert_eq!(self.o.len(), rows * query.d_v, "o has another shape than the query");
        assert!(self.m.len() == rows && self.l.len() == rows, "m or l has another length");
    }

    pub(crate) fn clear(&mut self) {
        self.o.fill(0.0);
        self.m.fill(f32::NEG_INFINITY);
        self.l.fill(0.0);
    }

    /// Divides by the denominators: from running sums to the normalised output.
    pub(crate) fn normalise(&mut self, d_v: usize) {
        for (o, &l) in self.o.chunks_exact_mut(d_v).zip(&*self.l) {
            if l > 0.0 {
                let inverse = 1.0 / l;
                o.iter_mut().for_each(|value| *value *= inverse);
            }
        }
    }

    pub(crate) fn split_at(self, rows: usize, d_v: usize) -> (PartialMut<'a>, PartialMut<'a>) {
        let (o, o_rest) = self.o.split_at_mut(rows * d_v);
        let (m, m_rest) = self.m.split_at_mut(rows);
        let (l, l_rest) = self.l.split_at_mut(rows);
        (PartialMut { o, m, l }, PartialMut { o: o_rest, m: m_rest, l: l_rest })
    }
}

/// Merges partials over disjoint sets into the partial over their union.
///
/// Parts are taken in the order given, so equal parts in equal order give equal bits. Parts over
/// the empty set change nothing, not even a bit, and one part alone comes out as it went in.
pub fn merge(parts: &[Partial], d_v: usize) -> Partial {
    let Some(first) = parts.first() else { return Partial::empty(0, d_v) };
    let rows = first.m.len();
    for part in parts {
        let same = part.m.len() == rows && part.l.len() == rows && part.o.len() == rows * d_v;
        assert!(same, "parts of one merge have one shape");
    }
    let mut merged = Partial::empty(rows, d_v);
    for row in 0..rows {
        let o = &mut merged.o[row * d_v..][..d_v];
        (merged.m[row], merged.l[row]) = merge_row(parts, row, o);
    }
    merged
}

/// One row of [`merge`] into zeroed `o`; returns `(m, l)`.
fn merge_row(parts: &[Partial], row: usize, o: &mut [f32]) -> (f32, f32) {
    let d_v = o.len();
    let mut held = parts.iter().filter(|part| part.l[row] > 0.0);
    let Some(first) = held.next() else { return (f32::NEG_INFINITY, 0.0) };
    if held.clone().next().is_none() {
        o.copy_from_slice(&first.o[row * d_v..][..d_v]);
        return (first.m[row], first.l[row]);
    }
    let held = || parts.iter().filter(|part| part.l[row] > 0.0);
    let m = held().map(|part| part.m[row]).fold(f32::NEG_INFINITY, f32::max);
    let weight = |part: &Partial| part.l[row] * (part.m[row] - m).exp();
    let l: f32 = held().map(weight).sum();
    for part in held() {
        let share = weight(part) / l;
        let values = &part.o[row * d_v..][..d_v];
        o.iter_mut().zip(values).for_each(|(sum, value)| *sum += share * value);
    }
    (m, l)
}
