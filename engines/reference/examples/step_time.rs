//! How long steps of a model take: prefill chunks behind a context, and decode batches.
//!
//!     cargo run --release -p kvasir-engine-reference --example step_time -- MODEL [f32|bf16] [THREADS]
//!
//! Reports the median of several runs, and for attention the share of arithmetic: the products of
//! query rows with cached rows, `2 (d_qk + d_v)` operations a pair.

#![allow(clippy::print_stdout)] // it is what the example is for

use std::path::PathBuf;
use std::ptr::NonNull;
use std::time::Instant;

use kvasir_engine_reference::model::{
    Cache, CacheSpec, KvDtype, LoadOptions, Model, SequenceStep, Workspace,
};
use kvasir_proto::SlotIndex;

const BLOCK_TOKENS: u32 = 64;

/// A step shape: so many sequences, each with so many tokens behind so much context.
struct Shape {
    sequences: u32,
    tokens: u32,
    context: u32,
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let dir =
        arguments.next().map_or_else(|| "configs/models/tiny-deepseek-v2".into(), PathBuf::from);
    let dtype = match arguments.next().as_deref() {
        Some("bf16") => KvDtype::Bf16,
        _ => KvDtype::F32,
    };
    let threads = arguments.next().and_then(|threads| threads.parse().ok()).unwrap_or(1);
    let model =
        Model::load(&dir, LoadOptions { threads, ..LoadOptions::default() }).expect("a model");
    println!(
        "{dtype:?}, {threads} threads, {:?}",
        kvasir_attention::AttentionOptions::default().kernel
    );
    for shape in [
        Shape { sequences: 1, tokens: 512, context: 0 },
        Shape { sequences: 1, tokens: 512, context: 3500 },
        Shape { sequences: 1, tokens: 16, context: 3500 },
        Shape { sequences: 1, tokens: 1, context: 2000 },
        Shape { sequences: 8, tokens: 1, context: 2000 },
        Shape { sequences: 32, tokens: 1, context: 500 },
    ] {
        measure(&model, dtype, &shape);
    }
}

fn measure(model: &Model, dtype: KvDtype, shape: &Shape) {
    let layout = model.config().layout(BLOCK_TOKENS, dtype);
    let pages_each = layout.pages_for(shape.context + shape.tokens);
    let slots = pages_each * shape.sequences;
    let len_bytes = layout.slot_bytes() as usize * slots as usize;
    // Small normal numbers, so that no value is special.
    let mut memory = vec![0x3d00_3d00_3d00_3d00u64; len_bytes / 8];
    let base = NonNull::new(memory.as_mut_ptr().cast()).expect("an address");
    // SAFETY: the memory outlives the cache and is used through it alone.
    let mut cache = unsafe { Cache::new(CacheSpec { base, len_bytes, layout, dtype }) };
    let pages: Vec<Vec<SlotIndex>> = (0..shape.sequences)
        .map(|s| (0..pages_each).map(|p| SlotIndex(s * pages_each + p)).collect())
        .collect();
    let tokens: Vec<u32> = (0..shape.tokens).map(|i| 5 + i % 900).collect();
    let batch: Vec<SequenceStep<'_>> = pages
        .iter()
        .map(|pages| SequenceStep {
            tokens: &tokens,
            start: shape.context,
            holes: &[],
            pages,
            logits: true,
        })
        .collect();
    let mut workspace = Workspace::default();
    let mut layers = Vec::new();
    let mut times: Vec<f64> = (0..9)
        .map(|_| {
            let begin = Instant::now();
            layers.clear();
            let on_layer = &mut |_| layers.push(begin.elapsed().as_secs_f64() * 1e3);
            model.forward(&mut workspace, &mut cache, &batch, on_layer).expect("a step");
            begin.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    times.sort_by(f64::total_cmp);
    let config = model.config();
    let per_layer = f64::from(shape.tokens)
        * (f64::from(shape.context) + f64::from(shape.tokens) / 2.0)
        * config.heads as f64;
    // The last layer computes one token of each sequence.
    let last = f64::from(shape.context + shape.tokens) * config.heads as f64;
    let pairs = f64::from(shape.sequences) * (per_layer * (config.layers - 1) as f64 + last);
    let operations = pairs * 2.0 * (config.row_width() + config.rank) as f64;
    println!(
        "{:3} × {:3} tokens behind {:4}: {:8.3} ms (best {:8.3}), {:6.1} GFLOP/s of attention, rows of layers written at {layers:.2?} ms",
        shape.sequences,
        shape.tokens,
        shape.context,
        times[times.len() / 2],
        times[0],
        operations / times[0] / 1e6,
    );
}
