//! The vector operations that the kernels are written in, and their instruction sets.
//!
//! A type that implements [`Simd`] is a token: it exists only where its instructions do, so its
//! methods need no further check. They inline into the one function that enables the instructions
//! ([`Simd::run`]); called elsewhere they would be right but slow.

use half::{bf16, f16};

/// What a kernel does on one instruction set. A closure, with its environment spelled out, so that
/// it can be generic.
pub(crate) trait Task {
    fn run<S: Simd>(self, simd: S);
}

/// Vectors of `LANES` values.
pub(crate) trait Simd: Copy {
    const LANES: usize;
    /// Query rows × cached rows that a tile of logits holds in registers.
    const LOGIT_ROWS: usize;
    /// Vectors of output a tile holds for each of its query rows.
    const OUTPUT_VECTORS: usize;
    type V: Copy;

    /// Runs a task with the instructions enabled.
    fn run(self, task: impl Task);
    fn splat(self, value: f32) -> Self::V;
    /// # Safety
    /// `from` is readable for `LANES` values.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// # Safety
    /// `from` is readable for `LANES` values.
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V;
    /// # Safety
    /// `from` is readable for `LANES` values.
    unsafe fn load_f16(self, from: *const f16) -> Self::V;
    /// Values of e4m3, as [`fp8::decode`](crate::fp8::decode) has them.
    ///
    /// # Safety
    /// `from` is readable for `LANES` bytes.
    unsafe fn load_e4m3(self, from: *const u8) -> Self::V;
    /// # Safety
    /// `to` is writable for `LANES` values.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`, rounded once where the instruction set can.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// To the nearest whole number, as a float.
    fn round(self, a: Self::V) -> Self::V;
    /// `a · 2^n` for whole `n` in -126..=0.
    fn scale_by_power(self, a: Self::V, n: Self::V) -> Self::V;
    /// 0 in the lanes where `x < limit`, `a` in the others.
    fn zero_below(self, a: Self::V, x: Self::V, limit: f32) -> Self::V;
    /// Asks for a line of memory before it is needed; any address will do.
    fn prefetch(self, at: *const u8);
    fn sum(self, a: Self::V) -> f32;
    fn largest(self, a: Self::V) -> f32;
}

/// Arrays of eight, for any processor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

impl Portable {
    #[inline(always)]
    fn zip(a: [f32; 8], b: [f32; 8], f: impl Fn(f32, f32) -> f32) -> [f32; 8] {
        std::array::from_fn(|i| f(a[i], b[i]))
    }
}

impl Simd for Portable {
    const LANES: usize = 8;
    const LOGIT_ROWS: usize = 2;
    const OUTPUT_VECTORS: usize = 2;
    type V = [f32; 8];

    fn run(self, task: impl Task) {
        task.run(self);
    }
    #[inline(always)]
    fn splat(self, value: f32) -> [f32; 8] {
        [value; 8]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> [f32; 8] {
        // SAFETY: readable for eight values, by the caller's word.
        unsafe { from.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> [f32; 8] {
        // SAFETY: readable for eight values, by the caller's word.
        unsafe { from.cast::<[bf16; 8]>().read_unaligned() }.map(bf16::to_f32)
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> [f32; 8] {
        // SAFETY: readable for eight values, by the caller's word.
        unsafe { from.cast::<[f16; 8]>().read_unaligned() }.map(f16::to_f32)
    }
    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8) -> [f32; 8] {
        // SAFETY: readable for eight bytes, by the caller's word.
        unsafe { from.cast::<[u8; 8]>().read() }.map(crate::fp8::decode)
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: [f32; 8]) {
        // SAFETY: writable for eight values, by the caller's word.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(v) }
    }
    #[inline(always)]
    fn add(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Portable::zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn mul(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Portable::zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn max(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Portable::zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn mul_add(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        // Not `f32::mul_add`: without the instruction that is a call for each lane.
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn round(self, a: [f32; 8]) -> [f32; 8] {
        // Adding and taking away 1.5 · 2^23 leaves no bits behind the point; for |a| < 2^22.
        const SHIFT: f32 = 12_582_912.0;
        a.map(|a| (a + SHIFT) - SHIFT)
    }
    #[inline(always)]
    fn scale_by_power(self, a: [f32; 8], n: [f32; 8]) -> [f32; 8] {
        Portable::zip(a, n, |a, n| a * f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn zero_below(self, a: [f32; 8], x: [f32; 8], limit: f32) -> [f32; 8] {
        Portable::zip(a, x, |a, x| if x < limit { 0.0 } else { a })
    }
    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}
    #[inline(always)]
    fn sum(self, a: [f32; 8]) -> f32 {
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }
    #[inline(always)]
    fn largest(self, a: [f32; 8]) -> f32 {
        a.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Every method here is sound because the token exists: `detect` saw the instructions.

    use std::arch::x86_64::*;

    use super::{Simd, Task, bf16, f16};

    /// 256-bit vectors with fused multiply-add and f16.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Avx2(());

    /// 512-bit vectors.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct Avx512(());

    impl Avx2 {
        pub(crate) fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c"))
            .then_some(Avx2(()))
        }
    }

    impl Avx512 {
        pub(crate) fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx512f") && Avx2::detect().is_some()).then_some(Avx512(()))
        }
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    fn run_avx2(simd: Avx2, task: impl Task) {
        task.run(simd);
    }

    #[target_feature(enable = "avx512f,avx2,fma,f16c")]
    fn run_avx512(simd: Avx512, task: impl Task) {
        task.run(simd);
    }

    impl Simd for Avx2 {
        const LANES: usize = 8;
        const LOGIT_ROWS: usize = 2;
        const OUTPUT_VECTORS: usize = 2;
        type V = __m256;

        fn run(self, task: impl Task) {
            // SAFETY: the token proves that the processor has the instructions.
            unsafe { run_avx2(self, task) }
        }
        #[inline(always)]
        fn splat(self, value: f32) -> __m256 {
            // SAFETY: the token.
            unsafe { _mm256_set1_ps(value) }
        }
        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> __m256 {
            // SAFETY: the token; readable for eight values, by the caller's word.
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn load_bf16(self, from: *const bf16) -> __m256 {
            // SAFETY: the token; readable for eight values of two bytes, by the caller's word.
            unsafe {
                let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        unsafe fn load_f16(self, from: *const f16) -> __m256 {
            // SAFETY: the token; readable for eight values of two bytes, by the caller's word.
            unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        }
        #[inline(always)]
        unsafe fn load_e4m3(self, from: *const u8) -> __m256 {
            // SAFETY: the token; readable for eight bytes, by the caller's word.
            unsafe {
                let wide = _mm_cvtepu8_epi16(_mm_loadl_epi64(from.cast()));
                // The same bits in f16 are 2^-8 of the value, as the exponents' biases differ.
                let sign = _mm_and_si128(_mm_slli_epi16::<8>(wide), _mm_set1_epi16(i16::MIN));
                let rest = _mm_and_si128(wide, _mm_set1_epi16(0x7f));
                let half = _mm_or_si128(sign, _mm_slli_epi16::<7>(rest));
                let value = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0));
                let is_nan = _mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7f));
                _mm256_or_ps(value, _mm256_castsi256_ps(_mm256_cvtepi16_epi32(is_nan)))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32, v: __m256) {
            // SAFETY: the token; writable for eight values, by the caller's word.
            unsafe { _mm256_storeu_ps(to, v) }
        }
        #[inline(always)]
        fn add(self, a: __m256, b: __m256) -> __m256 {
            // SAFETY: the token.
            unsafe { _mm256_add_ps(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: __m256, b: __m256) -> __m256 {
            // SAFETY: the token.
            unsafe { _mm256_mul_ps(a, b) }
        }
        #[inline(always)]
        fn max(self, a: __m256, b: __m256) -> __m256 {
            // SAFETY: the token.
            unsafe { _mm256_max_ps(a, b) }
        }
        #[inline(always)]
        fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
            // SAFETY: the token.
            unsafe { _mm256_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn round(self, a: __m256) -> __m256 {
            // SAFETY: the token.
            unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        }
        #[inline(always)]
        fn scale_by_power(self, a: __m256, n: __m256) -> __m256 {
            // SAFETY: the token.
            unsafe {
                let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent)))
            }
        }
        #[inline(always)]
        fn zero_below(self, a: __m256, x: __m256, limit: f32) -> __m256 {
            // SAFETY: the token.
            unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(limit)), a) }
        }
        #[inline(always)]
        fn prefetch(self, at: *const u8) {
            // SAFETY: a prefetch reads nothing and faults on no address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
        #[inline(always)]
        fn sum(self, a: __m256) -> f32 {
            // SAFETY: the token.
            unsafe {
                let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
                _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
            }
        }
        #[inline(always)]
        fn largest(self, a: __m256) -> f32 {
            // SAFETY: the token.
            unsafe {
                let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
                let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
                _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
            }
        }
    }

    impl Simd for Avx512 {
        const LANES: usize = 16;
        const LOGIT_ROWS: usize = 4;
        const OUTPUT_VECTORS: usize = 4;
        type V = __m512;

        fn run(self, task: impl Task) {
            // SAFETY: the token proves that the processor has the instructions.
            unsafe { run_avx512(self, task) }
        }
        #[inline(always)]
        fn splat(self, value: f32) -> __m512 {
            // SAFETY: the token.
            unsafe { _mm512_set1_ps(value) }
        }
        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> __m512 {
            // SAFETY: the token; readable for sixteen values, by the caller's word.
            unsafe { _mm512_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
            // SAFETY: the token; readable for sixteen values of two bytes, by the caller's word.
            unsafe {
                let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
            }
        }
        #[inline(always)]
        unsafe fn load_f16(self, from: *const f16) -> __m512 {
            // SAFETY: the token; readable for sixteen values of two bytes, by the caller's word.
            unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        }
        #[inline(always)]
        unsafe fn load_e4m3(self, from: *const u8) -> __m512 {
            // SAFETY: the token; readable for sixteen bytes, by the caller's word.
            unsafe {
                let wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
                // The same bits in f16 are 2^-8 of the value, as the exponents' biases differ.
                let sign =
                    _mm256_and_si256(_mm256_slli_epi16::<8>(wide), _mm256_set1_epi16(i16::MIN));
                let rest = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
                let half = _mm256_or_si256(sign, _mm256_slli_epi16::<7>(rest));
                let value = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0));
                let is_nan = _mm256_cmpeq_epi16(rest, _mm256_set1_epi16(0x7f));
                let is_nan = _mm512_cvtepi16_epi32(is_nan);
                _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(value), is_nan))
            }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32, v: __m512) {
            // SAFETY: the token; writable for sixteen values, by the caller's word.
            unsafe { _mm512_storeu_ps(to, v) }
        }
        #[inline(always)]
        fn add(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the token.
            unsafe { _mm512_add_ps(a, b) }
        }
        #[inline(always)]
        fn mul(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the token.
            unsafe { _mm512_mul_ps(a, b) }
        }
        #[inline(always)]
        fn max(self, a: __m512, b: __m512) -> __m512 {
            // SAFETY: the token.
            unsafe { _mm512_max_ps(a, b) }
        }
        #[inline(always)]
        fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
            // SAFETY: the token.
            unsafe { _mm512_fmadd_ps(a, b, c) }
        }
        #[inline(always)]
        fn round(self, a: __m512) -> __m512 {
            // SAFETY: the token.
            unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a) }
        }
        #[inline(always)]
        fn scale_by_power(self, a: __m512, n: __m512) -> __m512 {
            // SAFETY: the token.
            unsafe { _mm512_scalef_ps(a, n) }
        }
        #[inline(always)]
        fn zero_below(self, a: __m512, x: __m512, limit: f32) -> __m512 {
            // SAFETY: the token.
            unsafe {
                let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit));
                _mm512_maskz_mov_ps(keep, a)
            }
        }
        #[inline(always)]
        fn prefetch(self, at: *const u8) {
            // SAFETY: a prefetch reads nothing and faults on no address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
        #[inline(always)]
        fn sum(self, a: __m512) -> f32 {
            // SAFETY: the token.
            unsafe { _mm512_reduce_add_ps(a) }
        }
        #[inline(always)]
        fn largest(self, a: __m512) -> f32 {
            // SAFETY: the token.
            unsafe { _mm512_reduce_max_ps(a) }
        }
    }
}
