//! Where the pages of an engine's own pool lie, checked once at the edge.

use crate::v1;

/// Where one run of every page lies: that of page `i` begins at `base_bytes + i * stride_bytes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolRun {
    pub base_bytes: u64,
    pub stride_bytes: u64,
    pub length_bytes: u64,
}

/// The layout of a pool. Guaranteed by construction: a page has the runs of a slot, of the same lengths and in the same
/// order, all of them lie in the pool's memory, and no two overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolLayout {
    pages: u32,
    runs: Vec<PoolRun>,
}

/// Why a layout was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolLayoutError {
    #[error("a pool must have at least one page")]
    NoPages,
    #[error("the pool has {got} layers, but a slot has {want}")]
    Layers { got: usize, want: usize },
    #[error("layer {layer} has {got} runs in the pool, but {want} in a slot")]
    Runs { layer: usize, got: usize, want: usize },
    #[error("run {run} of layer {layer} has {got} bytes in the pool, but {want} in a slot")]
    Length { layer: usize, run: usize, got: u64, want: u64 },
    #[error("a page of the pool has {0} runs; the limit is {RUNS_MAX}")]
    TooManyRuns(usize),
    #[error("run {run} of layer {layer} ends at byte {end}, beyond the {bytes} bytes of the pool")]
    OutOfPool { layer: usize, run: usize, end: u64, bytes: u64 },
    #[error("two runs overlap at byte {at}")]
    Overlap { at: u64 },
    #[error("two interleaved runs have different strides, {one} and {other}")]
    Strides { one: u64, other: u64 },
}

/// Every two of them are compared.
const RUNS_MAX: usize = 4_096;

impl PoolLayout {
    /// Checks and makes the layout of a pool with so many bytes, for slots of this layout.
    ///
    /// # Errors
    /// [`PoolLayoutError`] names the first rule that is broken.
    pub fn new(
        pages: u32,
        bytes: u64,
        layers: &[Vec<PoolRun>],
        slot: &crate::SlotLayout,
    ) -> Result<Self, PoolLayoutError> {
        if pages == 0 {
            return Err(PoolLayoutError::NoPages);
        }
        if layers.len() != slot.layers() {
            return Err(PoolLayoutError::Layers { got: layers.len(), want: slot.layers() });
        }
        if slot.runs_per_page() > RUNS_MAX {
            return Err(PoolLayoutError::TooManyRuns(slot.runs_per_page()));
        }
        for (layer, runs) in layers.iter().enumerate() {
            let wanted = slot.runs(layer);
            if runs.len() != wanted.len() {
                let (got, want) = (runs.len(), wanted.len());
                return Err(PoolLayoutError::Runs { layer, got, want });
            }
            for (run, (of, wanted)) in runs.iter().zip(wanted).enumerate() {
                let (got, want) = (of.length_bytes, wanted.length_bytes);
                if got != want {
                    return Err(PoolLayoutError::Length { layer, run, got, want });
                }
                let end = of.end(pages);
                if end > bytes {
                    return Err(PoolLayoutError::OutOfPool { layer, run, end, bytes });
                }
            }
        }
        let runs: Vec<PoolRun> = layers.iter().flatten().copied().collect();
        for (at, one) in runs.iter().enumerate() {
            one.check_itself(pages)?;
            runs[at + 1..].iter().try_for_each(|other| one.check_beside(other, pages))?;
        }
        Ok(PoolLayout { pages, runs })
    }

    /// Checks what came over the wire.
    ///
    /// # Errors
    /// As [`PoolLayout::new`].
    pub fn from_wire(
        pages: u32,
        bytes: u64,
        layers: &[v1::PoolLayer],
        slot: &crate::SlotLayout,
    ) -> Result<Self, PoolLayoutError> {
        let run = |run: &v1::PoolRun| PoolRun {
            base_bytes: run.base_bytes,
            stride_bytes: run.stride_bytes,
            length_bytes: run.length_bytes,
        };
        let layers: Vec<Vec<PoolRun>> =
            layers.iter().map(|layer| layer.runs.iter().map(run).collect()).collect();
        PoolLayout::new(pages, bytes, &layers, slot)
    }

    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// The runs of a page, layer by layer: where each begins, and its length.
    pub fn runs(&self, page: u32) -> impl Iterator<Item = (u64, u64)> + '_ {
        assert!(page < self.pages, "there is no page {page}");
        self.runs
            .iter()
            .map(move |run| (run.base_bytes + u64::from(page) * run.stride_bytes, run.length_bytes))
    }
}

impl PoolRun {
    /// Where the last page's ends.
    fn end(&self, pages: u32) -> u64 {
        self.stride_bytes
            .saturating_mul(u64::from(pages - 1))
            .saturating_add(self.base_bytes)
            .saturating_add(self.length_bytes)
    }

    fn check_itself(&self, pages: u32) -> Result<(), PoolLayoutError> {
        match pages > 1 && self.stride_bytes < self.length_bytes {
            true => Err(PoolLayoutError::Overlap { at: self.base_bytes + self.stride_bytes }),
            false => Ok(()),
        }
    }

    fn check_beside(&self, other: &PoolRun, pages: u32) -> Result<(), PoolLayoutError> {
        let (low, high) = match self.base_bytes <= other.base_bytes {
            true => (self, other),
            false => (other, self),
        };
        if high.base_bytes >= low.end(pages) {
            return Ok(());
        }
        if low.stride_bytes != high.stride_bytes {
            let (one, other) = (low.stride_bytes, high.stride_bytes);
            return Err(PoolLayoutError::Strides { one, other });
        }
        // That of the last page of `low` that begins at or before `high`, and that of the page after it.
        let apart = high.base_bytes - low.base_bytes;
        let page = (apart / low.stride_bytes.max(1)).min(u64::from(pages - 1));
        let before = low.base_bytes + page * low.stride_bytes;
        let after = before + low.stride_bytes;
        let reaches_after = page + 1 < u64::from(pages);
        if before + low.length_bytes > high.base_bytes
            || (reaches_after && high.base_bytes + high.length_bytes > after)
        {
            return Err(PoolLayoutError::Overlap { at: high.base_bytes });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SlotLayout;

    fn run(base_bytes: u64, stride_bytes: u64, length_bytes: u64) -> PoolRun {
        PoolRun { base_bytes, stride_bytes, length_bytes }
    }

    /// Three pages beside slots of two layers of ten bytes, in a hundred bytes.
    fn check(layers: &[&[PoolRun]]) -> Result<PoolLayout, PoolLayoutError> {
        let slot = SlotLayout::layer_major(5, 2, 2).expect("a layout");
        let layers: Vec<Vec<PoolRun>> = layers.iter().map(|runs| runs.to_vec()).collect();
        PoolLayout::new(3, 100, &layers, &slot)
    }

    #[test]
    fn pages_may_lie_one_after_another_or_layer_by_layer() {
        let by_page = check(&[&[run(0, 20, 10)], &[run(10, 20, 10)]]).expect("a layout");
        assert_eq!(by_page.runs(2).collect::<Vec<_>>(), [(40, 10), (50, 10)]);
        let by_layer = check(&[&[run(0, 10, 10)], &[run(30, 10, 10)]]).expect("a layout");
        assert_eq!(by_layer.runs(2).collect::<Vec<_>>(), [(20, 10), (50, 10)]);
        assert!(check(&[&[run(70, 10, 10)], &[run(0, 30, 10)]]).is_ok());
    }

    #[test]
    fn what_does_not_fit_or_overlaps_is_refused() {
        let ten = run(0, 20, 10);
        assert_eq!(check(&[&[ten]]), Err(PoolLayoutError::Layers { got: 1, want: 2 }));
        let runs = PoolLayoutError::Runs { layer: 1, got: 2, want: 1 };
        assert_eq!(check(&[&[ten], &[ten, ten]]), Err(runs));
        let length = PoolLayoutError::Length { layer: 1, run: 0, got: 9, want: 10 };
        assert_eq!(check(&[&[ten], &[run(10, 20, 9)]]), Err(length));
        let out = PoolLayoutError::OutOfPool { layer: 1, run: 0, end: 101, bytes: 100 };
        assert_eq!(check(&[&[ten], &[run(51, 20, 10)]]), Err(out));
        let out = PoolLayoutError::OutOfPool { layer: 0, run: 0, end: u64::MAX, bytes: 100 };
        assert_eq!(check(&[&[run(9, u64::MAX, 10)], &[ten]]), Err(out));
        // Of one run, of two, and of the next page.
        let at = |at| Err(PoolLayoutError::Overlap { at });
        assert_eq!(check(&[&[run(0, 9, 10)], &[run(60, 10, 10)]]), at(9));
        assert_eq!(check(&[&[ten], &[run(9, 20, 10)]]), at(9));
        assert_eq!(check(&[&[ten], &[run(11, 20, 10)]]), at(11));
        assert_eq!(check(&[&[ten], &[run(31, 20, 10)]]), at(31));
        assert_eq!(check(&[&[ten], &[run(0, 20, 10)]]), at(0));
        let strides = PoolLayoutError::Strides { one: 20, other: 30 };
        assert_eq!(check(&[&[ten], &[run(10, 30, 10)]]), Err(strides));
        assert!(check(&[&[ten], &[run(50, 20, 10)]]).is_ok(), "after the last page's");
        let slot = SlotLayout::layer_major(5, 2, 2).expect("a layout");
        assert_eq!(PoolLayout::new(0, 100, &[], &slot), Err(PoolLayoutError::NoPages));
    }

    #[test]
    fn every_layout_that_passes_has_no_byte_twice_and_every_one_that_fails_has() {
        let slot = SlotLayout::layer_major(1, 2, 3).expect("a layout");
        for base in 0..40 {
            for stride in 3..12 {
                let layers = [vec![run(base, stride, 3)], vec![run(14, stride, 3)]];
                let passes = PoolLayout::new(3, 1_000, &layers, &slot).is_ok();
                let bytes = |of: &PoolRun| {
                    let (base, stride) = (of.base_bytes, of.stride_bytes);
                    (0..3).flat_map(move |page| (0..3).map(move |at| base + page * stride + at))
                };
                let mut seen = std::collections::BTreeSet::new();
                let apart = layers.iter().flatten().flat_map(bytes).all(|byte| seen.insert(byte));
                assert_eq!(passes, apart, "base {base}, stride {stride}");
            }
        }
    }
}
