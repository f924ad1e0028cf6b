//! Who computes: a route has the precision of its requester, so that an answer does not depend on where its rows are.

use kvasir_attention::{Attention, AttentionOptions, Job, Kernel, Precision};

#[derive(Debug)]
pub(super) struct Kernels {
    exact: Attention,
    /// With products of bf16, where this processor is faster by that.
    rounded: Attention,
}

impl Kernels {
    /// Each with so many threads.
    pub(super) fn new(threads: usize) -> Self {
        Kernels::of(Kernel::best(Precision::F32), Kernel::best(Precision::Bf16), threads)
    }

    fn of(exact: Kernel, rounded: Kernel, threads: usize) -> Self {
        let with = |kernel| {
            Attention::new(AttentionOptions { kernel, threads, ..AttentionOptions::default() })
        };
        Kernels { exact: with(exact), rounded: with(rounded) }
    }

    /// For scores, which are never rounded.
    pub(super) fn exact(&self) -> &Attention {
        &self.exact
    }

    /// All jobs, each in its precision.
    pub(super) fn attend_all(&mut self, jobs: Vec<(Precision, Job<'_>)>) {
        let (exact, rounded): (Vec<_>, Vec<_>) =
            jobs.into_iter().partition(|(precision, _)| *precision == Precision::F32);
        let of = |jobs: Vec<(Precision, _)>| jobs.into_iter().map(|(_, job)| job).collect();
        self.exact.attend_all(of(exact));
        self.rounded.attend_all(of(rounded));
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;

    use kvasir_attention::{PageList, PageSpec, Partial, PartialMut, Query, RowDtype, Visible};

    use super::*;

    #[test]
    fn each_job_is_computed_in_its_precision() {
        let rows: Vec<f32> = (0..64).map(|n| (n as f32 * 0.37).sin()).collect();
        let values: Vec<f32> = (0..8).map(|n| (n as f32 * 0.71).cos()).collect();
        let spec = PageSpec {
            base: NonNull::from(rows.as_slice()).cast(),
            len_bytes: size_of_val(rows.as_slice()),
            offsets_bytes: &[0],
            rows_per_page: 8,
            row_stride_bytes: 32,
            rows: 8,
            width: 8,
            dtype: RowDtype::F32,
        };
        // SAFETY: the rows outlive the pages and are not written.
        let pages = unsafe { PageList::new(spec) }.expect("pages");
        let query = Query { values: &values, d_qk: 8, d_v: 4, scale: 0.5, visible: Visible::All };
        let alone = |kernel| {
            let mut partial = Partial::empty(1, 4);
            let options = AttentionOptions { kernel, threads: 1, ..AttentionOptions::default() };
            Attention::new(options).attend(&query, &pages, partial.as_mut());
            partial
        };
        // Two whose bits differ.
        let (exact, rounded) = (alone(Kernel::Scalar), alone(Kernel::Portable));
        assert_ne!(exact, rounded);
        let mut kernels = Kernels::of(Kernel::Scalar, Kernel::Portable, 1);
        let precisions = [Precision::Bf16, Precision::F32, Precision::Bf16];
        let mut partials = vec![Partial::empty(1, 4); precisions.len()];
        let jobs = precisions.iter().zip(&mut partials).map(|(precision, partial)| {
            let Partial { o, m, l } = partial;
            (*precision, Job { query, pages, out: PartialMut { o, m, l } })
        });
        kernels.attend_all(jobs.collect());
        assert_eq!(partials, [rounded.clone(), exact, rounded]);
    }
}
