//! Kernels against files of reference vectors, as `tests/data/mla_partial` has them and
//! `generate.py` beside them makes more of.
//!
//! A file is one case: queries, rows, the partial over all of them, and the partials of holders that
//! share the rows. Every part is computed over the pages where the rows lie, by selection, as a
//! holder would, and the parts are merged. What a file holds is checked before it is used: a broken
//! one is an error that says what is wrong with it.

use std::ptr::NonNull;

use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};

use crate::attend::{Attention, AttentionOptions, Precision};
use crate::fp8;
use crate::pages::{PageError, PageList, PageSpec, RowDtype};
use crate::partial::{Partial, Query, Visible, merge};

/// Why a file is no case.
#[derive(Debug, thiserror::Error)]
pub enum CaseError {
    #[error("not a safetensors file: {0}")]
    Format(#[from] safetensors::SafeTensorError),
    #[error("tensor `{0}` is missing")]
    Missing(&'static str),
    #[error("tensor `{name}` is {dtype:?} of shape {shape:?}, not {wanted}")]
    Tensor { name: &'static str, dtype: Dtype, shape: Vec<usize>, wanted: String },
    #[error("metadata `{0}` is missing or not a number in its range")]
    Metadata(&'static str),
    #[error("`{name}` contains {found}, but the limit is {limit}")]
    Beyond { name: &'static str, found: i32, limit: usize },
    #[error(transparent)]
    Pages(#[from] PageError),
}

/// Queries, rows and what attention over them is.
#[derive(Debug)]
pub struct Case {
    q: Vec<f32>,
    rows: Vec<u64>,
    dtype: RowDtype,
    tokens: usize,
    queries: usize,
    heads: usize,
    d_qk: usize,
    d_v: usize,
    scale: f32,
    /// For each query the rows it attends, where it does not attend all.
    index: Option<Vec<Vec<u32>>>,
    /// Which holder has each row.
    split: Vec<u32>,
    whole: Partial,
    parts: Vec<Partial>,
}

/// Largest differences between what a kernel gave and what the file says.
#[derive(Debug, Clone, Copy, Default)]
pub struct Errors {
    /// Of `o`, relative to its largest value.
    pub o: f64,
    /// Of `o`, absolute.
    pub o_absolute: f64,
    /// Of `o`, as Frobenius norms: of the difference over that of the file's.
    pub o_norm: f64,
    /// Of `m`, over 1 + |m| / 100: both tolerances of `m` grow with it so.
    pub m: f64,
    /// Of the logarithm of `l`.
    pub l: f64,
    /// Whether one side had an empty set where the other had none, or a value is no number.
    pub is_broken: bool,
}

/// What a kernel made of a case.
#[derive(Debug, Clone, Copy)]
pub struct Verdict {
    pub errors: Errors,
    pub passed: bool,
}

impl Case {
    /// Reads a file's bytes.
    ///
    /// # Errors
    /// [`CaseError`] says what is missing or wrong.
    pub fn parse(bytes: &[u8]) -> Result<Case, CaseError> {
        let (_, header) = SafeTensors::read_metadata(bytes)?;
        let file = File(SafeTensors::deserialize(bytes)?);
        let metadata = |name: &'static str| {
            let text = header.metadata().as_ref().and_then(|entries| entries.get(name));
            text.ok_or(CaseError::Metadata(name))
        };
        let scale: f32 = metadata("scale")?.parse().map_err(|_| CaseError::Metadata("scale"))?;
        if !(scale > 0.0 && scale.is_finite()) {
            return Err(CaseError::Metadata("scale"));
        }
        let holders: usize =
            metadata("holders")?.parse().map_err(|_| CaseError::Metadata("holders"))?;
        if !(1..=4096).contains(&holders) {
            return Err(CaseError::Metadata("holders"));
        }
        let [queries, heads, d_qk] = file.dimensions("q", "queries × heads × d_qk")?;
        let [o_queries, o_heads, d_v] = file.dimensions("o", "queries × heads × d_v")?;
        if (o_queries, o_heads) != (queries, heads) || d_v == 0 || d_v > d_qk || heads == 0 {
            let wanted = format!("{queries} × {heads} × at most {d_qk}");
            return Err(file.wrong("o", wanted));
        }
        let [tokens, stored] = file.dimensions("ckv", "tokens × d_qk, or × 656 bytes")?;
        let dtype = match file.tensor("ckv")?.dtype() {
            Dtype::F32 => RowDtype::F32,
            Dtype::BF16 => RowDtype::Bf16,
            Dtype::F16 => RowDtype::F16,
            Dtype::U8 => RowDtype::Fp8Latent,
            _ => return Err(file.wrong("ckv", "f32, bf16, f16 or u8".into())),
        };
        let width = if dtype == RowDtype::Fp8Latent { fp8::ROW_BYTES } else { d_qk };
        if stored != width {
            return Err(file.wrong("ckv", format!("{tokens} × {width}")));
        }
        let rows_of = queries * heads;
        let partial = |o: &'static str, m: &'static str, l: &'static str, lead: &[usize]| {
            let shape = |last: &[usize]| [lead, &[queries, heads], last].concat();
            Ok::<_, CaseError>((
                file.floats(o, &shape(&[d_v]))?,
                file.floats(m, &shape(&[]))?,
                file.floats(l, &shape(&[]))?,
            ))
        };
        let (o, m, l) = partial("o", "m", "l", &[])?;
        let whole = Partial { o, m, l };
        let (o, m, l) = partial("part_o", "part_m", "part_l", &[holders])?;
        let parts = (0..holders)
            .map(|holder| Partial {
                o: o[holder * rows_of * d_v..][..rows_of * d_v].to_vec(),
                m: m[holder * rows_of..][..rows_of].to_vec(),
                l: l[holder * rows_of..][..rows_of].to_vec(),
            })
            .collect();
        let split = file.ints("split", &[tokens])?;
        let split = split.into_iter().map(|holder| below("split", holder, holders));
        let split = split.collect::<Result<_, _>>()?;
        let index = match file.0.tensor("index") {
            Err(_) => None,
            Ok(tensor) => {
                let k = tensor.shape().get(1).copied().unwrap_or(0);
                let all = file.ints("index", &[queries, k])?;
                let of = |query: usize| {
                    let named = all[query * k..][..k].iter().filter(|&&row| row != -1);
                    named.map(|&row| below("index", row, tokens)).collect()
                };
                Some((0..queries).map(of).collect::<Result<_, _>>()?)
            }
        };
        let mut rows = vec![0u64; file.tensor("ckv")?.data().len().div_ceil(8)];
        for (word, bytes) in rows.iter_mut().zip(file.tensor("ckv")?.data().chunks(8)) {
            let mut whole = [0; 8];
            whole[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_ne_bytes(whole);
        }
        let q = file.floats("q", &[queries, heads, d_qk])?;
        Ok(Case {
            q,
            rows,
            dtype,
            tokens,
            queries,
            heads,
            d_qk,
            d_v,
            scale,
            index,
            split,
            whole,
            parts,
        })
    }

    /// How the file's rows are stored.
    pub fn dtype(&self) -> RowDtype {
        self.dtype
    }

    /// Values of a row.
    pub fn d_qk(&self) -> usize {
        self.d_qk
    }

    /// Values of an output.
    pub fn d_v(&self) -> usize {
        self.d_v
    }

    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The rows as they are stored, one after another.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        let words: &[u64] = &self.rows;
        // SAFETY: the same memory, borrowed for as long, as bytes.
        let bytes =
            unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), words.len() * 8) };
        bytes.chunks_exact(self.dtype.row_bytes(self.d_qk)).take(self.tokens)
    }

    /// Computes the whole, every holder's part and their merge by `kernel`, in pages of
    /// `rows_per_page` rows.
    ///
    /// # Errors
    /// [`CaseError::Pages`] when the file's rows make no pages.
    pub fn check(
        &self,
        options: AttentionOptions,
        rows_per_page: usize,
    ) -> Result<Verdict, CaseError> {
        let kernel = options.kernel;
        let row_bytes = self.dtype.row_bytes(self.d_qk);
        let offsets: Vec<usize> = (0..self.tokens.div_ceil(rows_per_page))
            .map(|page| page * rows_per_page * row_bytes)
            .collect();
        let spec = PageSpec {
            base: NonNull::from(self.rows.as_slice()).cast(),
            len_bytes: self.rows.len() * 8,
            offsets_bytes: &offsets,
            rows_per_page,
            row_stride_bytes: row_bytes,
            rows: self.tokens,
            width: self.d_qk,
            dtype: self.dtype,
        };
        // SAFETY: the memory is the case's own and borrowed for as long as the list is used.
        let pages = unsafe { PageList::new(spec) }?;
        let mut attention = Attention::new(options);
        self.check_by(kernel.precision(), |values, selected| {
            let pages = match selected {
                Some(rows) => pages.select(rows)?,
                None => pages,
            };
            let query = Query {
                values,
                d_qk: self.d_qk,
                d_v: self.d_v,
                scale: self.scale,
                visible: Visible::All,
            };
            let mut out = Partial::empty(query.rows(), self.d_v);
            attention.attend(&query, &pages, out.as_mut());
            Ok(out)
        })
    }

    /// As [`Case::check`], where `attend` computes: the partial of some query rows over the rows that
    /// are selected, or over all of [`Case::rows`].
    ///
    /// # Errors
    /// What `attend` returns.
    pub fn check_by<E>(
        &self,
        precision: Precision,
        mut attend: impl FnMut(&[f32], Option<&[u32]>) -> Result<Partial, E>,
    ) -> Result<Verdict, E> {
        let whole = self.attend(&mut attend, |_| true)?;
        let mut errors = Errors::between(&whole, &self.whole);
        let mut parts = Vec::new();
        for (holder, want) in self.parts.iter().enumerate() {
            let mine = |row: u32| self.split[row as usize] as usize == holder;
            let part = self.attend(&mut attend, mine)?;
            errors.add(&part, want);
            parts.push(part);
        }
        errors.add(&merge(&parts, self.d_v), &self.whole);
        Ok(Verdict { errors, passed: errors.are_within(precision) })
    }

    /// The merge of the file's own parts, which must be its whole as far as f32 carries.
    pub fn check_merge(&self) -> Verdict {
        let errors = Errors::between(&merge(&self.parts, self.d_v), &self.whole);
        Verdict { errors, passed: errors.are_within(Precision::F32) }
    }

    fn attend<E>(
        &self,
        attend: &mut impl FnMut(&[f32], Option<&[u32]>) -> Result<Partial, E>,
        keep: impl Fn(u32) -> bool,
    ) -> Result<Partial, E> {
        let mut all = Partial::empty(self.queries * self.heads, self.d_v);
        let every: Vec<u32> = (0..self.tokens as u32).collect();
        let step = if self.index.is_some() { 1 } else { self.queries };
        for first in (0..self.queries).step_by(step.max(1)) {
            let seen = self.index.as_ref().map_or(&every, |index| &index[first]);
            let kept: Vec<u32> = seen.iter().copied().filter(|&row| keep(row)).collect();
            let selected = (kept != every).then_some(kept.as_slice());
            let rows = first * self.heads..(first + step) * self.heads;
            let out = attend(&self.q[rows.start * self.d_qk..rows.end * self.d_qk], selected)?;
            all.o[rows.start * self.d_v..rows.end * self.d_v].copy_from_slice(&out.o);
            all.m[rows.clone()].copy_from_slice(&out.m);
            all.l[rows].copy_from_slice(&out.l);
        }
        Ok(all)
    }
}

impl Errors {
    /// How far a partial is from what it should be.
    pub fn between(got: &Partial, want: &Partial) -> Errors {
        let mut errors = Errors::default();
        errors.add(got, want);
        errors
    }

    /// Widens to what another partial is off by.
    fn add(&mut self, got: &Partial, want: &Partial) {
        let largest =
            want.o.iter().fold(0f64, |largest, value| largest.max(f64::from(value.abs())));
        let (mut difference, mut norm) = (0f64, 0f64);
        for (got, want) in got.o.iter().zip(&want.o) {
            let (got, want) = (f64::from(*got), f64::from(*want));
            let off = (got - want).abs();
            self.is_broken |= off.is_nan();
            self.o_absolute = self.o_absolute.max(off);
            if off > 0.0 {
                self.o = self.o.max(off / largest);
            }
            difference += off * off;
            norm += want * want;
        }
        if difference > 0.0 {
            self.o_norm = self.o_norm.max((difference / norm).sqrt());
        }
        for ((got_m, want_m), (got_l, want_l)) in
            got.m.iter().zip(&want.m).zip(got.l.iter().zip(&want.l))
        {
            let is_empty = [
                *got_l == 0.0,
                *want_l == 0.0,
                *got_m == f32::NEG_INFINITY,
                *want_m == f32::NEG_INFINITY,
            ];
            if is_empty.contains(&true) {
                self.is_broken |= is_empty.contains(&false);
                continue;
            }
            let (got_m, want_m) = (f64::from(*got_m), f64::from(*want_m));
            let m = (got_m - want_m).abs() / (1.0 + 1e-2 * want_m.abs());
            let l = (f64::from(*got_l).ln() - f64::from(*want_l).ln()).abs();
            self.is_broken |= m.is_nan() || l.is_nan();
            self.m = self.m.max(m);
            self.l = self.l.max(l);
        }
    }

    /// Whether the reference vectors' tolerances for such a kernel hold.
    pub fn are_within(&self, precision: Precision) -> bool {
        !self.is_broken
            && match precision {
                Precision::F32 => self.o <= 1e-5 && self.m <= 1e-4 && self.l <= 1e-4,
                Precision::Bf16 => {
                    self.o_absolute <= 2e-2
                        && self.o_norm <= 1e-2
                        && self.m <= 1e-2
                        && self.l <= 1e-2
                }
            }
    }
}

fn below(name: &'static str, found: i32, limit: usize) -> Result<u32, CaseError> {
    let fits = u32::try_from(found).ok().filter(|&found| (found as usize) < limit);
    fits.ok_or(CaseError::Beyond { name, found, limit })
}

/// A file's tensors with errors that name them.
struct File<'a>(SafeTensors<'a>);

impl File<'_> {
    fn tensor(&self, name: &'static str) -> Result<safetensors::tensor::TensorView<'_>, CaseError> {
        self.0.tensor(name).map_err(|_| CaseError::Missing(name))
    }

    fn wrong(&self, name: &'static str, wanted: String) -> CaseError {
        match self.tensor(name) {
            Err(error) => error,
            Ok(tensor) => {
                let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
                CaseError::Tensor { name, dtype, shape, wanted }
            }
        }
    }

    fn dimensions<const N: usize>(
        &self,
        name: &'static str,
        wanted: &str,
    ) -> Result<[usize; N], CaseError> {
        let tensor = self.tensor(name)?;
        <[usize; N]>::try_from(tensor.shape()).map_err(|_| self.wrong(name, wanted.into()))
    }

    /// Values of f32, or of a type that f32 holds.
    fn floats(&self, name: &'static str, shape: &[usize]) -> Result<Vec<f32>, CaseError> {
        let tensor = self.tensor(name)?;
        let (pairs, _) = tensor.data().as_chunks::<2>();
        let (words, _) = tensor.data().as_chunks::<4>();
        match tensor.dtype() {
            _ if tensor.shape() != shape => Err(self.wrong(name, format!("{shape:?}"))),
            Dtype::F32 => Ok(words.iter().map(|word| f32::from_le_bytes(*word)).collect()),
            Dtype::BF16 => {
                Ok(pairs.iter().map(|pair| bf16::from_le_bytes(*pair).to_f32()).collect())
            }
            Dtype::F16 => Ok(pairs.iter().map(|pair| f16::from_le_bytes(*pair).to_f32()).collect()),
            _ => Err(self.wrong(name, "f32, bf16 or f16".into())),
        }
    }

    fn ints(&self, name: &'static str, shape: &[usize]) -> Result<Vec<i32>, CaseError> {
        let tensor = self.tensor(name)?;
        if tensor.dtype() != Dtype::I32 || tensor.shape() != shape {
            return Err(self.wrong(name, format!("i32 of {shape:?}")));
        }
        Ok(tensor.data().as_chunks::<4>().0.iter().map(|word| i32::from_le_bytes(*word)).collect())
    }
}
