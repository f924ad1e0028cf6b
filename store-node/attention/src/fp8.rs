//! A cached row in 656 bytes, as DeepSeek ships it for its sparse attention: 512 values of e4m3 in
//! four groups of 128, a scale in f32 for each group, then the 64 rotated values in bf16.

use half::bf16;

/// Values of a row.
pub const WIDTH: usize = LATENT + ROPE;
/// Bytes of a row.
pub const ROW_BYTES: usize = ROPE_AT + ROPE * size_of::<bf16>();

pub(crate) const LATENT: usize = 512;
pub(crate) const ROPE: usize = 64;
/// Values that share a scale.
pub(crate) const GROUP: usize = 128;
pub(crate) const GROUPS: usize = LATENT / GROUP;
/// Where the scales begin.
pub(crate) const SCALES_AT: usize = LATENT;
/// Where the rotated values begin.
pub(crate) const ROPE_AT: usize = SCALES_AT + GROUPS * size_of::<f32>();

/// A value of e4m3: sign, four bits of exponent with bias 7, three of fraction. There is no
/// infinity; all ones is not a number.
pub(crate) fn decode(byte: u8) -> f32 {
    let (exponent, fraction) = (i32::from(byte >> 3 & 0xf), f32::from(byte & 7));
    let magnitude = match (byte & 0x7f, exponent) {
        (0x7f, _) => f32::NAN,
        (_, 0) => fraction * 2f32.powi(-9),
        (_, exponent) => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The scale of a group.
pub(crate) fn scale(row: &[u8; ROW_BYTES], group: usize) -> f32 {
    let (scales, _) = row[SCALES_AT..ROPE_AT].as_chunks::<4>();
    f32::from_le_bytes(scales[group])
}

/// The row's values in f32.
pub(crate) fn widen(row: &[u8; ROW_BYTES], into: &mut [f32]) {
    let (latent, rope) = into.split_at_mut(LATENT);
    for (i, value) in latent.iter_mut().enumerate() {
        *value = decode(row[i]) * scale(row, i / GROUP);
    }
    let (stored, _) = row[ROPE_AT..].as_chunks::<2>();
    rope.iter_mut()
        .zip(stored)
        .for_each(|(value, bytes)| *value = bf16::from_le_bytes(*bytes).to_f32());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Portable, Simd, Task};

    struct Check;

    impl Task for Check {
        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let bytes: Vec<u8> = (0..=255).collect();
            for from in (0..256).step_by(S::LANES) {
                let mut got = [0f32; 16];
                // SAFETY: `LANES` divides 256 and is at most 16.
                unsafe { s.store(got.as_mut_ptr(), s.load_e4m3(bytes.as_ptr().add(from))) };
                for (got, &byte) in got.iter().zip(&bytes[from..from + S::LANES]) {
                    let want = decode(byte);
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    assert!(same, "{byte:#x} is {got}, not {want}");
                }
            }
        }
    }

    #[test]
    fn every_byte_decodes_alike_on_every_instruction_set() {
        Portable.run(Check);
        #[cfg(target_arch = "x86_64")]
        {
            crate::simd::Avx2::detect().into_iter().for_each(|s| s.run(Check));
            crate::simd::Avx512::detect().into_iter().for_each(|s| s.run(Check));
        }
    }

    #[test]
    fn bytes_mean_what_the_format_says() {
        for (byte, value) in [
            (0x38, 1.0),
            (0x7e, 448.0),
            (0x01, 1.0 / 512.0),
            (0x08, 1.0 / 64.0),
            (0xc0, -2.0),
            (0x3b, 1.375),
        ] {
            assert_eq!(decode(byte), value, "{byte:#x}");
        }
        assert!(decode(0x7f).is_nan() && decode(0xff).is_nan());
    }
}
