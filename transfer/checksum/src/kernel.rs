//! Stripes into lanes, by what the processor has.

use std::sync::OnceLock;

use crate::secret::{self, OF_SCRAMBLE, SECRET};
use crate::{BLOCK_STRIPES, STRIPE_BYTES, Stores};

/// By which instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// What every processor has.
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Kernel {
    /// The widest of this machine.
    pub(crate) fn best() -> Kernel {
        static BEST: OnceLock<Kernel> = OnceLock::new();
        *BEST.get_or_init(|| Kernel::all().pop().unwrap_or(Kernel::Plain))
    }

    /// All of this machine, the widest last.
    pub(crate) fn all() -> Vec<Kernel> {
        let mut all = vec![Kernel::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx2") {
                all.push(Kernel::Avx2);
            }
            if std::arch::is_x86_feature_detected!("avx512f") {
                all.push(Kernel::Avx512);
            }
        }
        all
    }

    /// Lets so many stripes into the lanes, the first of them as this one of its block, and scrambles after the
    /// last one of a block. A target that is not null gets a copy.
    ///
    /// # Safety
    /// So many bytes can be read, and written at the target unless it is null; the two do not overlap. The kernel is
    /// one of [`Self::all`].
    pub(crate) unsafe fn run(
        self,
        lanes: &mut [u64; 8],
        first: usize,
        source: *const u8,
        target: *mut u8,
        stripes: usize,
        stores: Stores,
    ) {
        let is_aligned = target.addr().is_multiple_of(STRIPE_BYTES);
        let streaming = stores == Stores::Streaming && is_aligned;
        // SAFETY: the caller's promises; what the kernel needs, the processor has.
        unsafe {
            match self {
                Kernel::Plain => plain(lanes, first, source, target, stripes),
                #[cfg(target_arch = "x86_64")]
                Kernel::Avx2 if target.is_null() => {
                    x86::avx2::<{ x86::NOWHERE }>(lanes, first, source, target, stripes);
                }
                #[cfg(target_arch = "x86_64")]
                Kernel::Avx2 if streaming => {
                    x86::avx2::<{ x86::STREAMING }>(lanes, first, source, target, stripes);
                }
                #[cfg(target_arch = "x86_64")]
                Kernel::Avx2 => {
                    x86::avx2::<{ x86::CACHED }>(lanes, first, source, target, stripes);
                }
                #[cfg(target_arch = "x86_64")]
                Kernel::Avx512 if target.is_null() => {
                    x86::avx512::<{ x86::NOWHERE }>(lanes, first, source, target, stripes);
                }
                #[cfg(target_arch = "x86_64")]
                Kernel::Avx512 if streaming => {
                    x86::avx512::<{ x86::STREAMING }>(lanes, first, source, target, stripes);
                }
                #[cfg(target_arch = "x86_64")]
                Kernel::Avx512 => {
                    x86::avx512::<{ x86::CACHED }>(lanes, first, source, target, stripes);
                }
            }
        }
    }
}

/// # Safety
/// As [`Kernel::run`].
unsafe fn plain(
    lanes: &mut [u64; 8],
    first: usize,
    source: *const u8,
    target: *mut u8,
    stripes: usize,
) {
    for at in 0..stripes {
        let mut stripe = [0; STRIPE_BYTES];
        // SAFETY: the caller's promise.
        unsafe {
            let from = source.add(at * STRIPE_BYTES);
            std::ptr::copy_nonoverlapping(from, stripe.as_mut_ptr(), STRIPE_BYTES);
            if !target.is_null() {
                let to = target.add(at * STRIPE_BYTES);
                std::ptr::copy_nonoverlapping(stripe.as_ptr(), to, STRIPE_BYTES);
            }
        }
        let place = (first + at) % BLOCK_STRIPES;
        secret::mix(lanes, &stripe, 8 * place);
        if place + 1 == BLOCK_STRIPES {
            secret::scramble(lanes);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK_STRIPES, OF_SCRAMBLE, SECRET, STRIPE_BYTES, secret};

    /// Where the copy goes.
    pub(super) const NOWHERE: u8 = 0;
    pub(super) const CACHED: u8 = 1;
    pub(super) const STREAMING: u8 = 2;

    /// # Safety
    /// As [`super::Kernel::run`]; the target is aligned to a stripe where stores are streaming.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn avx512<const TO: u8>(
        lanes: &mut [u64; 8],
        first: usize,
        source: *const u8,
        target: *mut u8,
        stripes: usize,
    ) {
        // SAFETY: all places lie in the caller's memory, in the lanes, or in the secret.
        unsafe {
            let key = |at: usize| _mm512_loadu_si512(SECRET.as_ptr().add(at).cast());
            let scrambler = _mm512_set1_epi64(secret::SCRAMBLER as i64);
            let mut sums = _mm512_loadu_si512(lanes.as_ptr().cast());
            let (mut at, mut place) = (0, first);
            while at < stripes {
                let now = (stripes - at).min(BLOCK_STRIPES - place);
                for _ in 0..now {
                    let stripe = _mm512_loadu_si512(source.add(at * STRIPE_BYTES).cast());
                    match TO {
                        STREAMING => {
                            _mm512_stream_si512(target.add(at * STRIPE_BYTES).cast(), stripe);
                        }
                        CACHED => {
                            _mm512_storeu_si512(target.add(at * STRIPE_BYTES).cast(), stripe);
                        }
                        _ => {}
                    }
                    let keyed = _mm512_xor_si512(stripe, key(8 * place));
                    let product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
                    let swapped = _mm512_shuffle_epi32(stripe, 0x4e);
                    sums = _mm512_add_epi64(sums, _mm512_add_epi64(product, swapped));
                    (at, place) = (at + 1, place + 1);
                }
                if place == BLOCK_STRIPES {
                    let shifted = _mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47));
                    let keyed = _mm512_xor_si512(shifted, key(OF_SCRAMBLE));
                    let low = _mm512_mul_epu32(keyed, scrambler);
                    let high = _mm512_mul_epu32(_mm512_srli_epi64(keyed, 32), scrambler);
                    sums = _mm512_add_epi64(low, _mm512_slli_epi64(high, 32));
                    place = 0;
                }
            }
            _mm512_storeu_si512(lanes.as_mut_ptr().cast(), sums);
            if TO == STREAMING {
                // Such stores are ordered with no others: what is said of them afterwards must not come first.
                _mm_sfence();
            }
        }
    }

    /// # Safety
    /// As [`avx512`].
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn avx2<const TO: u8>(
        lanes: &mut [u64; 8],
        first: usize,
        source: *const u8,
        target: *mut u8,
        stripes: usize,
    ) {
        const HALF: usize = STRIPE_BYTES / 2;
        // SAFETY: as above.
        unsafe {
            let key = |at: usize| _mm256_loadu_si256(SECRET.as_ptr().add(at).cast());
            let scrambler = _mm256_set1_epi64x(secret::SCRAMBLER as i64);
            let lanes: *mut __m256i = lanes.as_mut_ptr().cast();
            let mut sums = [_mm256_loadu_si256(lanes), _mm256_loadu_si256(lanes.add(1))];
            let (mut at, mut place) = (0, first);
            while at < stripes {
                let now = (stripes - at).min(BLOCK_STRIPES - place);
                for _ in 0..now {
                    for (half, sum) in sums.iter_mut().enumerate() {
                        let offset = at * STRIPE_BYTES + half * HALF;
                        let part = _mm256_loadu_si256(source.add(offset).cast());
                        match TO {
                            STREAMING => _mm256_stream_si256(target.add(offset).cast(), part),
                            CACHED => _mm256_storeu_si256(target.add(offset).cast(), part),
                            _ => {}
                        }
                        let keyed = _mm256_xor_si256(part, key(8 * place + half * HALF));
                        let product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
                        let swapped = _mm256_shuffle_epi32(part, 0x4e);
                        *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(product, swapped));
                    }
                    (at, place) = (at + 1, place + 1);
                }
                if place == BLOCK_STRIPES {
                    for (half, sum) in sums.iter_mut().enumerate() {
                        let shifted = _mm256_xor_si256(*sum, _mm256_srli_epi64(*sum, 47));
                        let keyed = _mm256_xor_si256(shifted, key(OF_SCRAMBLE + half * HALF));
                        let low = _mm256_mul_epu32(keyed, scrambler);
                        let high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), scrambler);
                        *sum = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
                    }
                    place = 0;
                }
            }
            _mm256_storeu_si256(lanes, sums[0]);
            _mm256_storeu_si256(lanes.add(1), sums[1]);
            if TO == STREAMING {
                // As above.
                _mm_sfence();
            }
        }
    }
}
