//! Norms, the gated activation, and products with weights.

#![forbid(unsafe_code)]

use kvasir_attention::matrix::{Into, View, ViewMut, multiply};

/// A weight matrix as checkpoints have it: one row for each output.
#[derive(Debug)]
pub(super) struct Matrix {
    pub values: Vec<f32>,
    pub outputs: usize,
    pub inputs: usize,
}

impl Matrix {
    /// `target = x · Wᵀ` for `rows` rows of contiguous `x`.
    pub(super) fn apply(&self, x: &[f32], rows: usize, target: &mut [f32], threads: usize) {
        self.product(x, rows, target, Into::Replace, threads);
    }

    /// `target += x · Wᵀ`.
    pub(super) fn apply_add(&self, x: &[f32], rows: usize, target: &mut [f32], threads: usize) {
        self.product(x, rows, target, Into::Add, threads);
    }

    fn product(&self, x: &[f32], rows: usize, target: &mut [f32], into: Into, threads: usize) {
        let x = View::new(x, rows, self.inputs, self.inputs);
        let weights = View::new(&self.values, self.outputs, self.inputs, self.inputs);
        let target = ViewMut::new(target, rows, self.outputs, self.outputs);
        multiply(target, into, x, weights.transposed(), threads);
    }
}

/// The sum of squares over the length, in eight running sums so that the loop vectorises.
fn mean_square(values: &[f32]) -> f32 {
    let (eights, rest) = values.as_chunks::<8>();
    let mut sums = [0f32; 8];
    for eight in eights {
        for (sum, value) in sums.iter_mut().zip(eight) {
            *sum += value * value;
        }
    }
    let rest: f32 = rest.iter().map(|value| value * value).sum();
    (sums.iter().sum::<f32>() + rest) / values.len() as f32
}

/// RMSNorm of one row, in place.
pub(super) fn rms_norm_in_place(row: &mut [f32], weight: &[f32], epsilon: f32) {
    let scale = 1.0 / (mean_square(row) + epsilon).sqrt();
    for (value, weight) in row.iter_mut().zip(weight) {
        *value = *value * scale * weight;
    }
}

/// RMSNorm of each row of `x` into `target`.
pub(super) fn rms_norm(x: &[f32], weight: &[f32], epsilon: f32, target: &mut [f32]) {
    target.copy_from_slice(x);
    for row in target.chunks_exact_mut(weight.len()) {
        rms_norm_in_place(row, weight, epsilon);
    }
}

/// LayerNorm of one row, in place.
pub(super) fn layer_norm_in_place(row: &mut [f32], weight: &[f32], bias: &[f32], epsilon: f32) {
    let mean = row.iter().sum::<f32>() / row.len() as f32;
    row.iter_mut().for_each(|value| *value -= mean);
    let scale = 1.0 / (mean_square(row) + epsilon).sqrt();
    for ((value, weight), bias) in row.iter_mut().zip(weight).zip(bias) {
        *value = *value * scale * weight + bias;
    }
}

/// silu(gate) · up of rows `[gate, up]` into rows of half the width.
pub(super) fn gated(gate_up: &[f32], target: &mut [f32], width: usize) {
    for (row, target) in gate_up.chunks_exact(2 * width).zip(target.chunks_exact_mut(width)) {
        let (gate, up) = row.split_at(width);
        for ((target, gate), up) in target.iter_mut().zip(gate).zip(up) {
            *target = gate / (1.0 + (-gate).exp()) * up;
        }
    }
}

/// The first `len` values of a buffer that grows when it must, to no more than that, and never shrinks: steps are
/// bounded, and the largest one should not leave room for two.
pub(super) fn scratch(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.reserve_exact(len - buffer.len());
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}
