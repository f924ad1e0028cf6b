//! Partial attention of absorbed MLA over pages of latent rows, where they lie, and the merge of
//! partials. Knows nothing of networks, blocks or models.
//!
//! A cached token is one row of `d_qk` values; its first `d_v` values are also the value. A partial
//! over a set of rows is `(o, m, l)`: the normalised output, the largest logit and the softmax
//! denominator relative to it. The empty set has `m = -inf`, `l = 0`, `o = 0`.
//!
//! Reading path:
//! 1. [`pages`]: rows in memory that someone else owns; the one unsafe constructor
//! 2. [`partial`]: queries, partials and [`merge`]
//! 3. [`attend`]: chooses a kernel and a strategy, splits work over threads
//! 4. `scalar` (the reference), `narrow` (few query rows: decode), `wide` (many: prefill), `bf16`
//!    (products of bf16, in tiles or vectors)
//! 5. [`index`]: under selection, which rows a query attends
//! 6. [`cuda`]: attention over rows in a GPU's memory
//! 7. [`vectors`]: kernels against files of reference vectors
//! 8. `choice`: which kernel is fastest here
//! 9. `simd`, `exp`, `gather`, [`fp8`], [`matrix`]: what those are made of
//!
//! Results are bit-equal for the same kernel, shape, split and number of threads.

mod attend;
#[cfg(target_arch = "x86_64")]
mod bf16;
mod choice;
pub mod cuda;
mod exp;
pub mod fp8;
mod gather;
pub mod index;
pub mod matrix;
mod narrow;
mod pages;
mod partial;
mod scalar;
mod simd;
pub mod vectors;
mod wide;

pub use attend::{Attention, AttentionOptions, Job, Kernel, Precision};
pub use pages::{PageError, PageList, PageSpec, RowDtype};
pub use partial::{Partial, PartialMut, Query, Visible, merge};
