//! Who computes: a route has the precision of its requester, so that an answer does not depend on where its rows are.

use kvasir_attention::{Attention, AttentionOptions, Job, Kernel, Precision};

#[derive(Debug)]
pub struct Kernels {
    exact: Attention,
    /// With products of bf16, where this processor is faster by that.
    rounded: Attention,
}

impl Kernels {
    /// Each with so many threads.
    pub fn new(threads: usize) -> Self {
        let of = |precision| {
            let kernel = Kernel::best(precision);
            Attention::new(AttentionOptions { kernel, threads, ..AttentionOptions::default() })
        };
        Kernels { exact: of(Precision::F32), rounded: of(Precision::Bf16) }
    }

    /// For scores, which are never rounded.
    pub fn exact(&self) -> &Attention {
        &self.exact
    }

    /// All jobs, each in its precision.
    pub fn attend_all(&mut self, jobs: Vec<(Precision, Job<'_>)>) {
        let (exact, rounded): (Vec<_>, Vec<_>) =
            jobs.into_iter().partition(|(precision, _)| *precision == Precision::F32);
        let of = |jobs: Vec<(Precision, _)>| jobs.into_iter().map(|(_, job)| job).collect();
        self.exact.attend_all(of(exact));
        self.rounded.attend_all(of(rounded));
    }
}
