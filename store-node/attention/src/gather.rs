//! Rows of any type, copied into one matrix of f32 that stays in cache: what kernels of f32 do
//! where reading a row in place would widen it again and again.

use half::{bf16, f16};

use crate::fp8;
use crate::pages::{PageList, RowDtype};
use crate::simd::Simd;

/// Copies rows `from..to` of a list.
#[inline(always)]
pub(crate) fn gather<S: Simd>(
    s: S,
    pages: &PageList<'_>,
    from: usize,
    to: usize,
    into: &mut [f32],
) {
    let width = pages.width();
    for (row, into) in (from..to).zip(into.chunks_exact_mut(width)) {
        let at = pages.row(row);
        match pages.dtype() {
            RowDtype::F32 => {
                // SAFETY: a row is `width` aligned values; `into` is another memory of that length.
                unsafe { at.cast::<f32>().copy_to_nonoverlapping(into.as_mut_ptr(), width) };
            }
            RowDtype::Bf16 => {
                let at = at.cast::<bf16>();
                // SAFETY: a row is `width` aligned values, and `widen_by` asks for no more.
                unsafe {
                    widen_by(s, into, |i| s.load_bf16(at.add(i)), |i| at.add(i).read().to_f32());
                };
            }
            RowDtype::F16 => {
                let at = at.cast::<f16>();
                // SAFETY: as for bf16.
                unsafe {
                    widen_by(s, into, |i| s.load_f16(at.add(i)), |i| at.add(i).read().to_f32());
                };
            }
            // SAFETY: a row of this type has so many bytes, and lists of it have its width.
            RowDtype::Fp8Latent => unsafe { widen_fp8(s, at, into) },
        }
    }
}

/// Fills `into` by whole vectors, then one by one.
///
/// # Safety
/// `vector(i)` is sound for `i + LANES <= into.len()`.
#[inline(always)]
unsafe fn widen_by<S: Simd>(
    s: S,
    into: &mut [f32],
    vector: impl Fn(usize) -> S::V,
    one: impl Fn(usize) -> f32,
) {
    let whole = into.len() / S::LANES * S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: `i + LANES <= into.len()`.
        unsafe { s.store(into.as_mut_ptr().add(i), vector(i)) };
    }
    for (i, value) in into.iter_mut().enumerate().skip(whole) {
        *value = one(i);
    }
}

/// # Safety
/// `fp8::ROW_BYTES` are readable at `at`, which is aligned to four; `into` has `fp8::WIDTH` values.
#[inline(always)]
unsafe fn widen_fp8<S: Simd>(s: S, at: *const u8, into: &mut [f32]) {
    let (latent, rope) = into.split_at_mut(fp8::LATENT);
    for (group, values) in latent.chunks_exact_mut(fp8::GROUP).enumerate() {
        // SAFETY: there is a scale for each group, and so many bytes of values.
        unsafe {
            let scale = s.splat(at.add(fp8::SCALES_AT).cast::<f32>().add(group).read());
            let from = at.add(group * fp8::GROUP);
            for i in (0..fp8::GROUP).step_by(S::LANES) {
                s.store(values.as_mut_ptr().add(i), s.mul(s.load_e4m3(from.add(i)), scale));
            }
        }
    }
    for i in (0..fp8::ROPE).step_by(S::LANES) {
        // SAFETY: the rotated values are the row's last 64.
        unsafe {
            s.store(
                rope.as_mut_ptr().add(i),
                s.load_bf16(at.add(fp8::ROPE_AT).cast::<bf16>().add(i)),
            );
        };
    }
}
