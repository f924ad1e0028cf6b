//! Which kernels there are, and what each needs of a GPU.

use super::CudaError;
use crate::fp8;
use crate::pages::RowDtype;

/// The kernels' source, for NVRTC.
pub const SOURCE: &str = concat!(
    include_str!("layout.cu"),
    include_str!("machine.cu"),
    include_str!("partial.cu"),
    include_str!("merge.cu"),
);
/// Query rows of one CTA.
pub const QUERY_ROWS: usize = 64;
/// Threads of one CTA of `kvasir_partial` that attend, and those that copy for them where they do not
/// themselves.
const ATTENDING: u32 = 256;
const COPYING: u32 = 128;
/// Threads of one CTA of a merge.
pub const MERGE_THREADS: u32 = 128;
/// What every address and stride on the device is a multiple of.
pub const ALIGN_BYTES: usize = 16;

/// Values of 16 bits that one line of a tile holds: 128 bytes.
const COLUMN: usize = 64;
const LINE_BYTES: usize = 128;
/// Outputs are dealt to four warps in pairs of eight, and stay in their registers.
const D_V_MAX: usize = 512;

/// A GPU's generation: what it computes, and how much shared memory a block may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    /// A100, and Orin.
    Sm80,
    /// H100 and H200.
    Sm90,
}

impl Arch {
    pub const ALL: [Arch; 2] = [Arch::Sm80, Arch::Sm90];

    /// The one whose code a GPU of this compute capability runs, and whose shared memory it has.
    ///
    /// # Errors
    /// [`CudaError::Capability`] where there is none.
    pub fn of(major: u32, minor: u32) -> Result<Arch, CudaError> {
        match (major, minor) {
            (8, 0 | 7) => Ok(Arch::Sm80),
            (9, 0) => Ok(Arch::Sm90),
            _ => Err(CudaError::Capability { major, minor }),
        }
    }

    /// The one of this GPU.
    ///
    /// # Errors
    /// [`CudaError::Capability`] where there is none.
    pub fn of_device(device: &kvasir_cuda::Device) -> Result<Arch, CudaError> {
        let (major, minor) = device.capability();
        Arch::of(major, minor)
    }

    /// As compilers name it.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Sm80 => "sm_80",
            // With the instructions of warpgroups, which no later generation has.
            Arch::Sm90 => "sm_90a",
        }
    }

    /// Bytes of shared memory that one block may have: 163 and 227 KiB.
    pub fn shared_bytes_max(self) -> usize {
        match self {
            Arch::Sm80 => 163 << 10,
            Arch::Sm90 => 227 << 10,
        }
    }

    /// Cached rows that a CTA takes at a time: as many as two tiles and the queries leave room for.
    pub fn tile_rows(self) -> usize {
        match self {
            Arch::Sm80 => 32,
            Arch::Sm90 => 64,
        }
    }
}

/// A kernel: one way to compile the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    dtype: RowDtype,
    d_qk: usize,
    d_v: usize,
    tile_rows: usize,
}

impl Variant {
    /// The kernel for rows of `d_qk` values, of which the first `d_v` are the value too.
    ///
    /// # Errors
    /// [`CudaError`] where tensor cores do not take such rows, or no block has room for them.
    pub fn new(dtype: RowDtype, d_qk: usize, d_v: usize, arch: Arch) -> Result<Variant, CudaError> {
        let widths_fit = match dtype {
            RowDtype::F32 => return Err(CudaError::Dtype(dtype)),
            RowDtype::Bf16 | RowDtype::F16 => d_v > 0 && d_v <= d_qk && d_v <= D_V_MAX,
            RowDtype::Fp8Latent => d_qk == fp8::WIDTH && d_v == fp8::LATENT,
        };
        // A row that has room for no tile anyway is refused before its size is computed.
        if !widths_fit || d_qk > 1 << 16 {
            return Err(CudaError::Widths { dtype, d_qk, d_v });
        }
        let variant = Variant { dtype, d_qk, d_v, tile_rows: arch.tile_rows() };
        let (needed, limit) = (variant.shared_bytes(), arch.shared_bytes_max());
        if needed > limit {
            return Err(CudaError::SharedMemory { needed, limit });
        }
        Ok(variant)
    }

    pub fn dtype(&self) -> RowDtype {
        self.dtype
    }

    pub fn d_qk(&self) -> usize {
        self.d_qk
    }

    pub fn d_v(&self) -> usize {
        self.d_v
    }

    /// Cached rows that a CTA takes at a time.
    pub fn tile_rows(&self) -> usize {
        self.tile_rows
    }

    /// Threads of one CTA of `kvasir_partial`.
    pub fn threads(&self) -> u32 {
        if self.by_warpgroups() { ATTENDING + COPYING } else { ATTENDING }
    }

    /// Queries are of f16 for rows of f16, and of bf16 else.
    pub fn query_dtype(&self) -> RowDtype {
        if self.dtype == RowDtype::F16 { RowDtype::F16 } else { RowDtype::Bf16 }
    }

    /// Bytes of shared memory of a CTA: the query rows, two tiles of cached rows (of fp8 one, and
    /// the next one's bytes with the scales of this one), the weights, a maximum for each query row
    /// and warp, for each row of two tiles whether it is attended, and for warpgroups the arrivals of
    /// those that have copied and those that have read either tile.
    pub fn shared_bytes(&self) -> usize {
        let query_columns = self.d_qk.div_ceil(COLUMN);
        let columns = query_columns.max(self.d_v.div_ceil(COLUMN));
        let tile = columns * self.tile_rows * LINE_BYTES;
        let tiles = match self.dtype {
            RowDtype::Fp8Latent => {
                tile + self.tile_rows * (fp8::ROW_BYTES + fp8::GROUPS * size_of::<f32>())
            }
            _ => 2 * tile,
        };
        let weights = QUERY_ROWS * self.tile_rows * 2;
        let exchange = 4 * QUERY_ROWS * size_of::<f32>();
        let attended = 2 * self.tile_rows / 4;
        let arrivals = if self.by_warpgroups() { 2 * 2 * 2 * size_of::<u64>() } else { 0 };
        query_columns * QUERY_ROWS * LINE_BYTES + tiles + weights + exchange + attended + arrivals
    }

    /// Whether products are those of warpgroups (`wgmma`), which read all from shared memory. Rows of
    /// fp8 have scales that go to weights of one half of the outputs and not of the other, and
    /// narrow values would need instructions of another size.
    pub fn by_warpgroups(&self) -> bool {
        self.tile_rows == Arch::Sm90.tile_rows()
            && self.dtype != RowDtype::Fp8Latent
            && self.d_v == D_V_MAX
    }

    /// Whether the merge may be launched while what it merges still runs, for which it waits.
    pub fn overlaps(&self) -> bool {
        self.tile_rows == Arch::Sm90.tile_rows()
    }

    /// What the source asks its compiler to define, as `NAME=VALUE`.
    pub fn defines(&self) -> Vec<String> {
        let dtype = match self.dtype {
            RowDtype::Bf16 | RowDtype::F32 => 0,
            RowDtype::F16 => 1,
            RowDtype::Fp8Latent => 2,
        };
        vec![
            format!("D_QK={}", self.d_qk),
            format!("D_V={}", self.d_v),
            format!("ROWS={}", self.tile_rows),
            format!("DTYPE={dtype}"),
            format!("WGMMA={}", u8::from(self.by_warpgroups())),
            format!("OVERLAPS={}", u8::from(self.overlaps())),
            format!("SHARED={}", self.shared_bytes()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_the_models_fit_a_block_of_either_generation() {
        for arch in Arch::ALL {
            for dtype in [RowDtype::Bf16, RowDtype::F16, RowDtype::Fp8Latent] {
                let variant = Variant::new(dtype, 576, 512, arch).expect("a kernel");
                assert!(variant.shared_bytes() <= arch.shared_bytes_max());
                // One CTA on a multiprocessor: another would not fit beside it.
                assert!(2 * variant.shared_bytes() > arch.shared_bytes_max());
            }
        }
    }

    #[test]
    fn what_tensor_cores_do_not_take_is_refused_with_a_sentence() {
        let says = |dtype, d_qk, d_v, part: &str| {
            let error = Variant::new(dtype, d_qk, d_v, Arch::Sm90).expect_err("no kernel");
            assert!(error.to_string().contains(part), "{error}");
        };
        says(RowDtype::F32, 576, 512, "no tensor-core kernel supports");
        says(RowDtype::Bf16, 576, 577, "577");
        says(RowDtype::Bf16, 1024, 513, "513");
        says(RowDtype::Bf16, usize::MAX, 512, "rows of");
        says(RowDtype::Bf16, 1024, 512, "shared memory");
        says(RowDtype::Fp8Latent, 576, 256, "256");
    }

    #[test]
    fn generations_follow_compute_capabilities() {
        for (major, minor, arch) in [(8, 0, Arch::Sm80), (8, 7, Arch::Sm80), (9, 0, Arch::Sm90)] {
            assert_eq!(Arch::of(major, minor).expect("a kernel"), arch);
        }
        // 8.9 has too little shared memory, and 10.0 runs no code of 9.0.
        for (major, minor) in [(7, 5), (8, 9), (9, 1), (10, 0)] {
            let error = Arch::of(major, minor).expect_err("no kernel");
            assert!(error.to_string().contains(&format!("{major}.{minor}")), "{error}");
        }
    }
}
