//! The exponential of the softmax, on vectors, and one row's softmax step.
//!
//! Arguments are never above 0. Below -87 the result is 0 and not a denormal: denormals cost ten
//! times in the products that follow, and e^-87 relative to a sum of at least 1 is nothing.

use crate::simd::Simd;

const FLUSH_BELOW: f32 = -87.0;

/// e^x for x <= 0, within 2 units in the last place; 0 below -87.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    // x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts so that r keeps its bits.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // The Taylor series of e^r to r^7: its error there is below 1e-8 relative.
    const COEFFICIENTS: [f32; 8] =
        [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let clamped = s.max(x, s.splat(FLUSH_BELOW));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    let r = s.mul_add(n, s.splat(-LN2_HIGH), clamped);
    let r = s.mul_add(n, s.splat(-LN2_LOW), r);
    let mut e = s.splat(COEFFICIENTS[0]);
    for c in &COEFFICIENTS[1..] {
        e = s.mul_add(e, r, s.splat(*c));
    }
    s.zero_below(s.scale_by_power(e, n), x, FLUSH_BELOW)
}

/// What one row of the running softmax carries.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    pub m: f32,
    pub l: f32,
}

/// Turns a group's dot products into weights relative to the new running maximum, in place. The
/// first `visible` count; the others become 0. Returns by what the former sums must be multiplied.
#[inline(always)]
pub(crate) fn softmax_step<S: Simd>(
    s: S,
    logits: &mut [f32],
    visible: usize,
    scale: f32,
    running: &mut Running,
) -> f32 {
    let (shown, hidden) = logits.split_at_mut(visible.min(logits.len()));
    hidden.fill(0.0);
    if shown.is_empty() {
        return 1.0;
    }
    let whole = shown.len() / S::LANES * S::LANES;
    let at = shown.as_mut_ptr();
    let scale_all = s.splat(scale);

    let mut largest = s.splat(f32::NEG_INFINITY);
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: `i + LANES <= whole <= shown.len()`.
        unsafe {
            let x = s.mul(s.load(at.add(i)), scale_all);
            s.store(at.add(i), x);
            largest = s.max(largest, x);
        }
    }
    let mut m = running.m.max(s.largest(largest));
    for x in &mut shown[whole..] {
        *x *= scale;
        m = m.max(*x);
    }

    let below = s.splat(-m);
    let mut sum = s.splat(0.0);
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: `i + LANES <= whole <= shown.len()`.
        unsafe {
            let p = exp(s, s.add(s.load(at.add(i)), below));
            s.store(at.add(i), p);
            sum = s.add(sum, p);
        }
    }
    let mut l = s.sum(sum);
    for x in &mut shown[whole..] {
        *x = s.largest(exp(s, s.splat(*x - m)));
        l += *x;
    }
    let correction = s.largest(exp(s, s.splat(running.m - m)));
    *running = Running { m, l: running.l * correction + l };
    correction
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Portable, Task};

    struct Check;

    impl Task for Check {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            for i in 0..20_000 {
                let x = i as f32 * -0.0043;
                let got = s.largest(exp(s, s.splat(x)));
                let want = f64::from(x).exp();
                assert!((f64::from(got) - want).abs() <= 2.5e-7 * want, "exp({x}) = {got}");
            }
            for x in [-87.1, -100.0, -1e30, f32::NEG_INFINITY] {
                assert_eq!(s.largest(exp(s, s.splat(x))), 0.0);
            }
            assert_eq!(s.largest(exp(s, s.splat(0.0))), 1.0);
        }
    }

    #[test]
    fn the_exponential_is_right_to_two_units_in_the_last_place() {
        Portable.run(Check);
        #[cfg(target_arch = "x86_64")]
        {
            crate::simd::Avx2::detect().into_iter().for_each(|s| s.run(Check));
            crate::simd::Avx512::detect().into_iter().for_each(|s| s.run(Check));
        }
    }
}
