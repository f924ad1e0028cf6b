//! SwiGLU: down(silu(gate(x)) · up(x)).

#![forbid(unsafe_code)]

use super::math::{Matrix, gated, scratch};

#[derive(Debug)]
pub(super) struct Mlp {
    /// Both projections as one matrix: gate's rows, then up's.
    pub gate_up: Matrix,
    pub down: Matrix,
}

/// Memory that calls reuse.
#[derive(Debug, Default)]
pub(super) struct MlpScratch {
    gate_up: Vec<f32>,
    gated: Vec<f32>,
}

impl Mlp {
    /// `target += mlp(x)` for `rows` rows.
    pub(super) fn apply_add(
        &self,
        x: &[f32],
        rows: usize,
        target: &mut [f32],
        memory: &mut MlpScratch,
        threads: usize,
    ) {
        let width = self.down.inputs;
        let gate_up = scratch(&mut memory.gate_up, rows * 2 * width);
        self.gate_up.apply(x, rows, gate_up, threads);
        let hidden = scratch(&mut memory.gated, rows * width);
        gated(gate_up, hidden, width);
        self.down.apply_add(hidden, rows, target, threads);
    }
}
