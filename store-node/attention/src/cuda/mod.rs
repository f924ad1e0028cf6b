//! Partial attention on NVIDIA GPUs, over rows in device memory where they lie.
//!
//! Reading path:
//! 1. [`variant`]: which kernels there are, and what each needs of a GPU
//! 2. [`job`]: a query and its rows, by addresses of the device
//! 3. [`plan`]: which CTA takes which query rows and cached rows; no device needed
//! 4. `layout.cu`, `machine.cu`, `partial.cu`, `merge.cu`: the kernels, one source for sm_80 and sm_90
//! 5. [`compile`]: NVRTC, opened at run time
//! 6. [`attend`]: jobs by device addresses, in order on one stream
//!
//! Nothing is linked: a host without a driver or NVRTC gets a sentence, [`CudaError`]. Products are
//! of bf16 or f16 and sums of f32 ([`Precision::Bf16`](crate::Precision)). Results are bit-equal for
//! the same kernel, GPU and plan: parts are merged in one order.

mod attend;
pub mod compile;
mod job;
pub mod plan;
pub mod variant;

pub use attend::CudaAttention;
pub use job::{CudaJob, DeviceJob};

use kvasir_cuda::DriverError;

use crate::pages::RowDtype;

/// Why a GPU does not compute. Its text is a sentence for the person who runs the host.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// NVIDIA's driver, or its compiler, is missing or has failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("no kernel supports compute capability {major}.{minor}; supported: 8.0, 8.7 and 9.0")]
    Capability { major: u32, minor: u32 },
    #[error("the kernel needs {needed} bytes of shared memory, but a block has {limit}")]
    SharedMemory { needed: usize, limit: usize },
    #[error("cannot compile the kernel source:\n{log}")]
    Compile { log: String },
    #[error("no tensor-core kernel supports {0:?} rows")]
    Dtype(RowDtype),
    #[error("no kernel for {dtype:?} rows supports values of {d_v} in rows of {d_qk}")]
    Widths { dtype: RowDtype, d_qk: usize, d_v: usize },
    #[error("job {job}: {what} is not a multiple of 16 bytes")]
    Unaligned { job: usize, what: &'static str },
    #[error("job {job}: {what}")]
    Job { job: usize, what: &'static str },
}
