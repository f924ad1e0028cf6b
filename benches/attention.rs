//! Partial attention by each kernel of this processor, as a share of what the machine allows.
//!
//! `cargo bench -p kvasir-attention --bench attention` measures, on one thread, the peaks of the units
//! and the rate of reading, then each kernel over 2,048 rows of 576 bf16 values with 16 and 128 heads and
//! batches of queries for the same rows. The floor of a case is the larger of its bytes over the rate at
//! which memory in that state is read, and its operations over the peak of the unit. `hot` attends the
//! same rows again and again, `cold` rows that were not read for a while. Each figure is the best of
//! `ROUNDS` rounds that take turns, so that a machine that slows down slows all of them.
//!
//! `--case HEADS BATCH` prints the best time in microseconds of one case and kernel, and nothing else:
//! `benches/peers/attention/run` takes turns with it.
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::hint::black_box;
use std::ptr::NonNull;
use std::time::Instant;

use kvasir_attention::{
    Attention, AttentionOptions, Kernel, PageList, PageSpec, Partial, Precision, Query, RowDtype,
    Visible,
};

const ROWS: usize = 2048;
const WIDTH: usize = 576;
const VALUE: usize = 512;
const PAGE_ROWS: usize = 64;
const ROW_BYTES: usize = WIDTH * 2;
const BYTES: usize = ROWS * ROW_BYTES;
/// Sets of rows that cold rounds go through: more than a processor's caches hold.
const SETS: usize = 96;
const ROUNDS: usize = 24;

/// Seconds of the fastest of some runs.
fn best(runs: usize, mut run: impl FnMut(usize)) -> f64 {
    let time = |round| {
        let begun = Instant::now();
        run(round);
        begun.elapsed().as_secs_f64()
    };
    (0..runs).map(time).fold(f64::INFINITY, f64::min)
}

/// Rows of bf16 in -1..1, the same in each set.
struct Memory {
    words: Vec<u64>,
    offsets: Vec<usize>,
}

impl Memory {
    fn new() -> Memory {
        let mut state = 1u64;
        let mut value = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            // Sign, one of four exponents up to that of 1/2, seven bits of fraction.
            let bits = (state >> 33) as u16;
            bits & 0x807f | (0x3d80 + (bits & 0x0180)).min(0x3f00)
        };
        let one: Vec<u64> = (0..BYTES / 8)
            .map(|_| (0..4).fold(0, |word, _| word << 16 | u64::from(value())))
            .collect();
        let words = one.iter().copied().cycle().take(SETS * BYTES / 8).collect();
        Memory {
            words,
            offsets: (0..ROWS / PAGE_ROWS).map(|page| page * PAGE_ROWS * ROW_BYTES).collect(),
        }
    }

    fn pages(&self, set: usize) -> PageList<'_> {
        let spec = PageSpec {
            base: NonNull::from(&self.words[set * BYTES / 8..][..BYTES / 8]).cast(),
            len_bytes: BYTES,
            offsets_bytes: &self.offsets,
            rows_per_page: PAGE_ROWS,
            row_stride_bytes: ROW_BYTES,
            rows: ROWS,
            width: WIDTH,
            dtype: RowDtype::Bf16,
        };
        // SAFETY: the memory is this value's own and borrowed for as long as the list.
        unsafe { PageList::new(spec) }.expect("pages within the memory")
    }

    /// Bytes a second, read in order, eight streams of vectors at once.
    fn read_rate(&self, sets: usize) -> f64 {
        let read = |set: usize| {
            let words = &self.words[set % SETS * BYTES / 8..][..BYTES / 8];
            let sums = words.chunks_exact(64).fold([0u64; 64], |mut sums, line| {
                sums.iter_mut().zip(line).for_each(|(sum, word)| *sum ^= word);
                sums
            });
            black_box(sums);
        };
        BYTES as f64 / best(4 * SETS, |round| read(round % sets))
    }
}

/// What the units do in registers, in operations a second.
struct Peaks {
    f32_avx2: f64,
    f32_avx512: f64,
    dot_bf16: f64,
    tiles: f64,
    /// With one tile loaded from the first-level cache for each product, as any product of large
    /// matrices in eight tiles needs.
    tiles_loaded: f64,
}

#[cfg(target_arch = "x86_64")]
mod peaks {
    use std::arch::asm;
    use std::arch::x86_64::*;

    use super::{Kernel, Peaks, best, black_box};

    const STEPS: usize = 4096;

    #[target_feature(enable = "avx2,fma")]
    fn avx2() -> __m256 {
        let (a, mut sums) = (_mm256_set1_ps(black_box(0.5)), [_mm256_setzero_ps(); 12]);
        for _ in 0..STEPS {
            sums.iter_mut().for_each(|sum| *sum = _mm256_fmadd_ps(a, *sum, a));
        }
        sums.into_iter().fold(a, |x, y| _mm256_add_ps(x, y))
    }

    #[target_feature(enable = "avx512f")]
    fn avx512() -> __m512 {
        let (a, mut sums) = (_mm512_set1_ps(black_box(0.5)), [_mm512_setzero_ps(); 16]);
        for _ in 0..STEPS {
            sums.iter_mut().for_each(|sum| *sum = _mm512_fmadd_ps(a, *sum, a));
        }
        sums.into_iter().fold(a, |x, y| _mm512_add_ps(x, y))
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn dot() -> __m512 {
        let a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(black_box(0.5)), _mm512_set1_ps(0.25));
        let mut sums = [_mm512_setzero_ps(); 16];
        for _ in 0..STEPS {
            sums.iter_mut().for_each(|sum| *sum = _mm512_dpbf16_ps(*sum, a, a));
        }
        sums.into_iter().fold(_mm512_setzero_ps(), |x, y| _mm512_add_ps(x, y))
    }

    #[repr(C, align(64))]
    struct Config([u8; 64]);

    #[repr(C, align(64))]
    struct Tile([u8; 4096]);

    /// Products of tiles, a tile loaded before each when `loads`.
    fn tiles(loads: bool) {
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for tile in 0..8 {
            config.0[16 + 2 * tile] = 64;
            config.0[48 + tile] = 16;
        }
        let operand = Tile([0x3d; 4096]);
        // SAFETY: asked for only where `Kernel::Amx` runs; the operand is four tiles.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly));
            if loads {
                asm!(
                    "2:",
                    "tileloadd tmm4, [{a} + {s}]", "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm6, [{a} + {s} + 1024]", "tdpbf16ps tmm1, tmm4, tmm6",
                    "tileloadd tmm5, [{a} + {s} + 2048]", "tdpbf16ps tmm2, tmm5, tmm6",
                    "tileloadd tmm7, [{a} + {s} + 3072]", "tdpbf16ps tmm3, tmm5, tmm7",
                    "dec {n}", "jnz 2b",
                    a = in(reg) &raw const operand, s = in(reg) 64usize,
                    n = inout(reg) STEPS / 4 => _, options(nostack, readonly),
                );
            } else {
                asm!(
                    "2:",
                    "tdpbf16ps tmm0, tmm4, tmm6", "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
                    "dec {n}", "jnz 2b", n = inout(reg) STEPS / 4 => _, options(nostack, nomem),
                );
            }
            asm!("tilerelease", options(nostack, nomem));
        }
    }

    pub(crate) fn measure() -> Peaks {
        let rate = |exists: bool, operations: usize, run: &dyn Fn()| {
            if exists { operations as f64 / best(400, |_| run()) } else { f64::NAN }
        };
        let has_dot = Kernel::Avx512Bf16.runs_here();
        let amx = Kernel::Amx.runs_here();
        Peaks {
            // SAFETY: run only where the kernel of these instructions does.
            f32_avx2: rate(Kernel::Avx2.runs_here(), STEPS * 12 * 8 * 2, &|| unsafe {
                _ = black_box(avx2());
            }),
            // SAFETY: as above.
            f32_avx512: rate(Kernel::Avx512.runs_here(), STEPS * 16 * 16 * 2, &|| unsafe {
                _ = black_box(avx512());
            }),
            // SAFETY: as above.
            dot_bf16: rate(has_dot, STEPS * 16 * 32 * 2, &|| unsafe {
                _ = black_box(dot());
            }),
            tiles: rate(amx, STEPS * 16 * 16 * 32 * 2, &|| tiles(false)),
            tiles_loaded: rate(amx, STEPS * 16 * 16 * 32 * 2, &|| tiles(true)),
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod peaks {
    pub fn measure() -> super::Peaks {
        let none = f64::NAN;
        super::Peaks {
            f32_avx2: none,
            f32_avx512: none,
            dot_bf16: none,
            tiles: none,
            tiles_loaded: none,
        }
    }
}

/// One kernel on one problem.
struct Case {
    kernel: Kernel,
    heads: usize,
    batch: usize,
    values: Vec<f32>,
    out: Partial,
    attention: Attention,
    hot: f64,
    cold: f64,
}

impl Case {
    fn new(kernel: Kernel, heads: usize, batch: usize) -> Case {
        let rows = heads * batch;
        let values = (0..rows * WIDTH).map(|i| ((i * 37 % 97) as f32 - 48.0) / 64.0).collect();
        let options = AttentionOptions { kernel, ..AttentionOptions::default() };
        let (out, attention) = (Partial::empty(rows, VALUE), Attention::new(options));
        Case {
            kernel,
            heads,
            batch,
            values,
            out,
            attention,
            hot: f64::INFINITY,
            cold: f64::INFINITY,
        }
    }

    fn attend(&mut self, pages: &PageList<'_>) -> f64 {
        let query = Query {
            values: &self.values,
            d_qk: WIDTH,
            d_v: VALUE,
            scale: 0.072,
            visible: Visible::All,
        };
        best(1, |_| self.attention.attend(&query, pages, self.out.as_mut()))
    }

    fn operations(&self) -> f64 {
        2.0 * (self.heads * self.batch * ROWS * (WIDTH + VALUE)) as f64
    }

    /// A kernel whose one call takes long is measured less often.
    fn round(&mut self, memory: &Memory, round: usize) {
        let rate = match self.kernel {
            Kernel::Amx => 4e11,
            Kernel::Avx512Bf16 => 1e11,
            _ => 4e10,
        };
        let long = self.operations() / rate;
        if round > 2 && long > 0.05 && !round.is_multiple_of(8) {
            return;
        }
        let set = round * 7 % SETS;
        self.cold = self.cold.min(self.attend(&memory.pages(set)));
        for _ in 0..if long > 0.01 { 1 } else { 10 } {
            self.hot = self.hot.min(self.attend(&memory.pages(set)));
        }
    }
}

fn main() {
    let arguments: Vec<usize> =
        std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    let memory = Memory::new();
    if let [heads, batch] = arguments[..] {
        let mut case = Case::new(Kernel::best(Precision::Bf16), heads, batch);
        (0..8).for_each(|round| case.round(&memory, round));
        println!("{:.1} {:.1}", case.hot * 1e6, case.cold * 1e6);
        return;
    }
    let peaks = peaks::measure();
    let (hot_rate, cold_rate) = (memory.read_rate(1), memory.read_rate(SETS));
    println!("| unit | GFLOP/s |\n| --- | ---: |");
    for (unit, peak) in [
        ("f32 FMA, 256 bits", peaks.f32_avx2),
        ("f32 FMA, 512 bits", peaks.f32_avx512),
        ("bf16 dot products, 512 bits", peaks.dot_bf16),
        ("bf16 tiles in registers", peaks.tiles),
        ("bf16 tiles, one loaded from L1 for each product", peaks.tiles_loaded),
    ] {
        println!("| {unit} | {:.0} |", peak / 1e9);
    }
    println!(
        "\nReading {BYTES} bytes: hot {:.1} GB/s, cold {:.1} GB/s.\n",
        hot_rate / 1e9,
        cold_rate / 1e9
    );
    let mut cases = Vec::new();
    for heads in [16, 128] {
        for batch in [1, 4, 16, 64] {
            for kernel in [Kernel::Avx2, Kernel::Avx512, Kernel::Avx512Bf16, Kernel::Amx] {
                // Products of large matrices come from a crate that picks instructions itself.
                let of_others = kernel == Kernel::Avx2 && heads * batch >= 64;
                if kernel.runs_here() && !of_others {
                    cases.push(Case::new(kernel, heads, batch));
                }
            }
        }
    }
    for round in 0..ROUNDS {
        cases.iter_mut().for_each(|case| case.round(&memory, round));
    }
    println!(
        "| heads | batch | kernel | hot us | of the roofline | cold us | of the roofline | GFLOP/s |"
    );
    println!("| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |");
    for case in &cases {
        let peak = match case.kernel {
            Kernel::Avx2 => peaks.f32_avx2,
            Kernel::Avx512 => peaks.f32_avx512,
            Kernel::Avx512Bf16 => peaks.dot_bf16,
            _ => peaks.tiles,
        };
        let share = |rate: f64, time: f64| {
            (BYTES as f64 / rate).max(case.operations() / peak) / time * 100.0
        };
        println!(
            "| {} | {} | {} | {:.0} | {:.0} % | {:.0} | {:.0} % | {:.0} |",
            case.heads,
            case.batch,
            case.kernel.name(),
            case.hot * 1e6,
            share(hot_rate, case.hot),
            case.cold * 1e6,
            share(cold_rate, case.cold),
            case.operations() / case.hot / 1e9,
        );
    }
}
