//! What the kernels reach on this machine, beside what its large products and its memory reach.
//!
//!     cargo run --release -p kvasir-attention --example kernel_time

#![allow(clippy::print_stdout)] // it is what the example is for

use std::hint::black_box;
use std::ptr::NonNull;
use std::time::Instant;

use kvasir_attention::matrix::{Into, View, ViewMut, multiply};
use kvasir_attention::{
    Attention, AttentionOptions, Kernel, PageList, PageSpec, Partial, Query, RowDtype, Visible,
};

const WIDTH: usize = 576;
const VALUE: usize = 512;
const PAGE_ROWS: usize = 64;

fn main() {
    product(256, 256, WIDTH);
    product(2048, 256, WIDTH);
    product(2048, VALUE, 256);
    product(1024, 1024, 1024);
    let memory = vec![0x3d00_3d00_3d00_3d00u64; 32 << 20];
    let best = best_ms(5, || {
        black_box(memory.iter().fold(0u64, |sum, word| sum ^ word));
    });
    println!("read 256 MiB: {:.1} GB/s", (256 << 20) as f64 / best / 1e6);
    for kernel in Kernel::available() {
        if kernel == Kernel::Scalar {
            continue;
        }
        for dtype in [RowDtype::F32, RowDtype::Bf16] {
            for (query_rows, rows) in [(4, 2048), (4, 32768), (16, 2048), (128, 2048), (2048, 4096)]
            {
                for wide_rows_min in [0, usize::MAX] {
                    let options = AttentionOptions { kernel, threads: 1, wide_rows_min };
                    attend(options, dtype, query_rows, rows);
                }
            }
        }
    }
}

fn best_ms(runs: usize, mut run: impl FnMut()) -> f64 {
    let time = |_| {
        let begin = Instant::now();
        run();
        begin.elapsed().as_secs_f64() * 1e3
    };
    (0..runs).map(time).fold(f64::INFINITY, f64::min)
}

/// rows × cols, over `depth`, the right side transposed as weights and cached rows are.
fn product(rows: usize, cols: usize, depth: usize) {
    let lhs = vec![0.03f32; rows * depth];
    let rhs = vec![0.03f32; cols * depth];
    let mut target = vec![0f32; rows * cols];
    let best = best_ms(20, || {
        let lhs = View::new(&lhs, rows, depth, depth);
        let rhs = View::new(&rhs, cols, depth, depth).transposed();
        multiply(ViewMut::new(&mut target, rows, cols, cols), Into::Replace, lhs, rhs, 1);
    });
    let operations = 2.0 * (rows * cols * depth) as f64;
    println!("product {rows} × {cols} over {depth}: {:.1} GFLOP/s", operations / best / 1e6);
}

fn attend(options: AttentionOptions, dtype: RowDtype, query_rows: usize, rows: usize) {
    let row_bytes = WIDTH * dtype.row_bytes(1);
    let len_bytes = rows * row_bytes;
    let memory = vec![0x3d00_3d00_3d00_3d00u64; len_bytes / 8];
    let offsets: Vec<usize> =
        (0..rows / PAGE_ROWS).map(|page| page * PAGE_ROWS * row_bytes).collect();
    let spec = PageSpec {
        base: NonNull::from(memory.as_slice()).cast(),
        len_bytes,
        offsets_bytes: &offsets,
        rows_per_page: PAGE_ROWS,
        row_stride_bytes: row_bytes,
        rows,
        width: WIDTH,
        dtype,
    };
    // SAFETY: the memory is this function's own and outlives the list.
    let pages = unsafe { PageList::new(spec) }.expect("pages");
    let values = vec![0.03f32; query_rows * WIDTH];
    let query =
        Query { values: &values, d_qk: WIDTH, d_v: VALUE, scale: 0.07, visible: Visible::All };
    let mut out = Partial::empty(query_rows, VALUE);
    let mut attention = Attention::new(options);
    let best = best_ms(10, || attention.attend(&query, &pages, out.as_mut()));
    let operations = 2.0 * (query_rows * rows * (WIDTH + VALUE)) as f64;
    println!(
        "{:?} {dtype:?} {:6} {query_rows:5} query rows × {rows}: {best:8.3} ms, {:6.1} GFLOP/s, {:5.1} GB/s",
        options.kernel,
        if options.wide_rows_min == 0 { "wide" } else { "narrow" },
        operations / best / 1e6,
        len_bytes as f64 / best / 1e6,
    );
}
