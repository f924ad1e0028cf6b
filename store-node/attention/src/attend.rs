//! Attention over page lists: which kernel, which strategy, which thread.

#[cfg(target_arch = "x86_64")]
use crate::bf16;
use crate::choice;
use crate::narrow::{self, Narrow};
use crate::pages::{PageList, RowDtype};
use crate::partial::{PartialMut, Query};
use crate::scalar;
use crate::simd::{Portable, Simd, Task};
use crate::wide::{self, Wide};

/// An instruction set that partial attention is written for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// The reference, in f64.
    Scalar,
    /// Any processor.
    Portable,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512F.
    Avx512,
    /// x86-64 with AVX-512 BF16. Products of bf16, sums of f32: for rows of bf16.
    Avx512Bf16,
    /// x86-64 with tiles of bf16. Products and sums as those of [`Kernel::Avx512Bf16`].
    Amx,
}

/// What products are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// As f32 has it: queries and weights keep their bits.
    #[default]
    F32,
    /// Queries and weights may be rounded to bf16, where a kernel gains by it.
    Bf16,
}

impl Kernel {
    pub const ALL: [Kernel; 6] = [
        Kernel::Scalar,
        Kernel::Portable,
        Kernel::Avx2,
        Kernel::Avx512,
        Kernel::Avx512Bf16,
        Kernel::Amx,
    ];

    /// Those that this processor runs, the oldest first.
    pub fn available() -> Vec<Kernel> {
        Kernel::ALL.into_iter().filter(|kernel| kernel.runs_here()).collect()
    }

    /// The fastest on this processor of those that round to no less than this, over rows of bf16. Where it runs several
    /// they are measured, once in a process.
    pub fn best(precision: Precision) -> Kernel {
        choice::fastest(precision)
    }

    /// `scalar`, `portable`, `avx2`, `avx512`, `avx512_bf16` or `amx`.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Scalar => "scalar",
            Kernel::Portable => "portable",
            Kernel::Avx2 => "avx2",
            Kernel::Avx512 => "avx512",
            Kernel::Avx512Bf16 => "avx512_bf16",
            Kernel::Amx => "amx",
        }
    }

    pub fn precision(self) -> Precision {
        match self {
            Kernel::Scalar | Kernel::Portable | Kernel::Avx2 | Kernel::Avx512 => Precision::F32,
            Kernel::Avx512Bf16 | Kernel::Amx => Precision::Bf16,
        }
    }

    /// Itself, or in the place of one that rounds the best of those that do not.
    pub(crate) fn exact(self) -> Kernel {
        match self.precision() {
            Precision::F32 => self,
            Precision::Bf16 => Kernel::best(Precision::F32),
        }
    }

    /// Whether the kernel computes over rows of this type without losing more than its precision
    /// says. [`Attention`] gives the others to the best kernel of f32.
    pub fn takes(self, dtype: RowDtype) -> bool {
        match self.precision() {
            Precision::F32 => true,
            Precision::Bf16 => dtype == RowDtype::Bf16,
        }
    }

    /// What a processor that does not run it lacks.
    pub fn needs(self) -> &'static str {
        match self {
            Kernel::Scalar | Kernel::Portable => "nothing",
            Kernel::Avx2 => "AVX2, FMA and F16C",
            Kernel::Avx512 => "AVX-512F",
            Kernel::Avx512Bf16 => "AVX-512 F, BW and BF16",
            Kernel::Amx => {
                "AMX with bf16, AVX-512 with bf16, and permission from Linux to use tiles"
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    pub fn runs_here(self) -> bool {
        use crate::simd::{Avx2, Avx512};
        match self {
            Kernel::Scalar | Kernel::Portable => true,
            Kernel::Avx2 => Avx2::detect().is_some(),
            Kernel::Avx512 => Avx512::detect().is_some(),
            Kernel::Avx512Bf16 => bf16::Avx512Bf16::detect().is_some(),
            Kernel::Amx => bf16::Amx::detect().is_some(),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn runs_here(self) -> bool {
        matches!(self, Kernel::Scalar | Kernel::Portable)
    }

    /// Runs a task on the instruction set, or on the next best where it is missing.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn run(self, task: impl Task) {
        use crate::simd::{Avx2, Avx512};
        match (self, Avx512::detect(), Avx2::detect()) {
            (Kernel::Scalar | Kernel::Portable, ..) => Portable.run(task),
            (Kernel::Avx512 | Kernel::Avx512Bf16 | Kernel::Amx, Some(simd), _) => simd.run(task),
            (_, _, Some(simd)) => simd.run(task),
            _ => Portable.run(task),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub(crate) fn run(self, task: impl Task) {
        Portable.run(task);
    }
}

/// How [`Attention`] works.
#[derive(Debug, Clone, Copy)]
pub struct AttentionOptions {
    pub kernel: Kernel,
    /// Threads of one call; 1 starts none.
    pub threads: usize,
    /// Query rows from which the large products pay.
    pub wide_rows_min: usize,
}

impl Default for AttentionOptions {
    fn default() -> Self {
        AttentionOptions { kernel: Kernel::best(Precision::F32), threads: 1, wide_rows_min: 64 }
    }
}

/// One query over one page list; rows of `out` are the query's.
#[derive(Debug)]
pub struct Job<'a> {
    pub query: Query<'a>,
    pub pages: PageList<'a>,
    pub out: PartialMut<'a>,
}

impl<'a> Job<'a> {
    /// Products of pairs (query row, cached row).
    fn work(&self) -> usize {
        let rows = self.query.rows();
        let pairs = |row| self.query.visible.of(row, self.pages.rows());
        (0..rows).map(pairs).sum()
    }

    fn split_at(self, rows: usize) -> (Job<'a>, Job<'a>) {
        let Job { query, pages, out } = self;
        let (out, out_rest) = out.split_at(rows, query.d_v);
        let rest = Job { query: query.slice(rows, query.rows()), pages, out: out_rest };
        (Job { query: query.slice(0, rows), pages, out }, rest)
    }
}

/// Pairs below which another thread costs more than it brings: some 100 µs of one core, computing in
/// f32.
const THREAD_WORK_MIN: usize = 16 * 1024;
/// A job is cut at multiples of so many query rows, each part reading all its cached rows.
const SPLIT_ROWS: usize = 64;

/// The kernels with the memory that they reuse.
#[derive(Debug)]
pub struct Attention {
    options: AttentionOptions,
    scratch: Vec<Scratch>,
}

#[derive(Debug, Default)]
struct Scratch {
    narrow: narrow::Scratch,
    wide: wide::Scratch,
    #[cfg(target_arch = "x86_64")]
    bf16: bf16::Scratch,
}

impl Attention {
    pub fn new(options: AttentionOptions) -> Self {
        let threads = options.threads.max(1);
        Attention { options, scratch: (0..threads).map(|_| Scratch::default()).collect() }
    }

    pub(crate) fn kernel(&self) -> Kernel {
        self.options.kernel
    }

    pub(crate) fn threads(&self) -> usize {
        self.scratch.len()
    }

    /// The partial of `query` over `pages`, into `out`.
    ///
    /// # Panics
    /// When shapes disagree, which is the caller's mistake.
    pub fn attend(&mut self, query: &Query<'_>, pages: &PageList<'_>, out: PartialMut<'_>) {
        self.attend_all(vec![Job { query: *query, pages: *pages, out }]);
    }

    /// Several queries, each over its own pages.
    ///
    /// # Panics
    /// As [`Attention::attend`].
    pub fn attend_all(&mut self, jobs: Vec<Job<'_>>) {
        for job in &jobs {
            job.query.check();
            job.out.check(&job.query);
            assert_eq!(job.pages.width(), job.query.d_qk, "query and cached rows differ in width");
        }
        let options = self.options;
        let work: usize = jobs.iter().map(Job::work).sum();
        let work_min = match options.kernel {
            Kernel::Amx => 16 * THREAD_WORK_MIN,
            Kernel::Avx512Bf16 => 2 * THREAD_WORK_MIN,
            _ => THREAD_WORK_MIN,
        };
        let threads = self.scratch.len().min((work / work_min).max(1));
        if threads == 1 {
            jobs.into_iter().for_each(|job| run(options, job, &mut self.scratch[0]));
            return;
        }
        let mut shares = share(jobs, threads, work.div_ceil(threads)).into_iter();
        let mine = shares.next().unwrap_or_default();
        let (scratch, others) = self.scratch.split_first_mut().expect("at least one thread");
        std::thread::scope(|scope| {
            for (share, scratch) in shares.zip(others) {
                scope.spawn(move || share.into_iter().for_each(|job| run(options, job, scratch)));
            }
            mine.into_iter().for_each(|job| run(options, job, scratch));
        });
    }
}

fn run(mut options: AttentionOptions, job: Job<'_>, scratch: &mut Scratch) {
    let Job { query, pages, out } = job;
    if !options.kernel.takes(pages.dtype()) || query.scale <= 0.0 {
        options.kernel = options.kernel.exact();
    }
    #[cfg(target_arch = "x86_64")]
    match options.kernel {
        Kernel::Amx => {
            if let Some(amx) = bf16::Amx::detect() {
                return bf16::attend_in_tiles(amx, &query, &pages, out, &mut scratch.bf16);
            }
        }
        Kernel::Avx512Bf16 => {
            if let Some(unit) = bf16::Avx512Bf16::detect() {
                return bf16::attend_in_dots(unit, &query, &pages, out, &mut scratch.bf16);
            }
        }
        _ => {}
    }
    if options.kernel == Kernel::Scalar {
        scalar::attend(&query, &pages, out);
    } else if query.rows() >= options.wide_rows_min {
        let scratch = &mut scratch.wide;
        options.kernel.run(Wide { query: &query, pages: &pages, out, scratch });
    } else {
        let scratch = &mut scratch.narrow;
        options.kernel.run(Narrow { query: &query, pages: &pages, out, scratch });
    }
}

/// Deals jobs out to threads in order, cutting where one thread has its share.
fn share(jobs: Vec<Job<'_>>, threads: usize, goal: usize) -> Vec<Vec<Job<'_>>> {
    let mut shares: Vec<Vec<Job<'_>>> = vec![Vec::new()];
    let mut filled = 0;
    for mut job in jobs {
        while shares.len() < threads && filled + job.work() > goal {
            let mut rows = 0;
            let mut taken = 0;
            while rows < job.query.rows() && filled + taken < goal {
                let next = (rows + SPLIT_ROWS).min(job.query.rows());
                taken += (rows..next)
                    .map(|row| job.query.visible.of(row, job.pages.rows()))
                    .sum::<usize>();
                rows = next;
            }
            let (now, later) = job.split_at(rows);
            shares.last_mut().expect("never empty").push(now);
            shares.push(Vec::new());
            filled = 0;
            job = later;
        }
        filled += job.work();
        shares.last_mut().expect("never empty").push(job);
    }
    shares
}
