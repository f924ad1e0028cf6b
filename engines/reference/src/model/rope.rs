//! Rotary positions, with YaRN: angles, and the rotation of interleaved pairs.

#![forbid(unsafe_code)]

/// How positions become angles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    pub theta: f64,
    pub yarn: Option<Yarn>,
}

/// YaRN, which stretches the slow frequencies; applied at every length.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    /// Positions of the training before the stretch.
    pub original_positions: f64,
    pub beta_fast: f64,
    pub beta_slow: f64,
    /// `None` when absent or zero.
    pub mscale: Option<f64>,
    /// `None` when absent or zero.
    pub mscale_all_dims: Option<f64>,
    pub attention_factor: Option<f64>,
}

/// mscale(f, m) = 0.1 m ln f + 1, and 1 when nothing is stretched.
fn magnitude(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

impl Yarn {
    /// By what cosines and sines are multiplied.
    fn amplitude(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dims) {
            (Some(factor), _, _) => factor,
            (None, Some(mscale), Some(all)) => {
                magnitude(self.factor, mscale) / magnitude(self.factor, all)
            }
            _ => magnitude(self.factor, 1.0),
        }
    }

    /// Where on the ramp from kept (0) to stretched (1) a frequency lies.
    fn ramp(&self, theta: f64, dims: usize, i: usize) -> f64 {
        let dims = dims as f64;
        let dim_of = |rotations: f64| {
            dims * (self.original_positions / (rotations * std::f64::consts::TAU)).ln()
                / (2.0 * theta.ln())
        };
        let low = dim_of(self.beta_fast).floor().max(0.0);
        let high = dim_of(self.beta_slow).ceil().min(dims - 1.0);
        let high = if low == high { high + 0.001 } else { high };
        ((i as f64 - low) / (high - low)).clamp(0.0, 1.0)
    }
}

/// What the softmax's scale is multiplied by.
pub(super) fn softmax_factor(config: &RopeConfig) -> f64 {
    config.yarn.map_or(1.0, |yarn| {
        yarn.mscale_all_dims.map_or(1.0, |all| magnitude(yarn.factor, all).powi(2))
    })
}

/// The angles' frequencies, once per model.
#[derive(Debug)]
pub(super) struct Rope {
    /// One for each pair. In f32, as is the product with the position: trained models have seen
    /// those roundings, and at position 10^5 they are a hundredth of a turn.
    frequencies: Vec<f32>,
    amplitude: f64,
}

impl Rope {
    pub fn new(config: &RopeConfig, dims: usize) -> Self {
        let frequency = |i: usize| {
            let plain = config.theta.powf(-2.0 * i as f64 / dims as f64);
            let stretch = config.yarn.map_or(1.0, |yarn| {
                let ramp = yarn.ramp(config.theta, dims, i);
                ramp / yarn.factor + 1.0 - ramp
            });
            (plain * stretch) as f32
        };
        let frequencies = (0..dims / 2).map(frequency).collect();
        Rope { frequencies, amplitude: config.yarn.map_or(1.0, |yarn| yarn.amplitude()) }
    }

    /// Values that one position takes in a table of turns.
    pub fn turn_len(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Fills one position's row of the table: cosine and sine of each pair in turn.
    pub fn turns(&self, position: u32, row: &mut [f32]) {
        for (pair, frequency) in row.chunks_exact_mut(2).zip(&self.frequencies) {
            let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
            pair[0] = (cos * self.amplitude) as f32;
            pair[1] = (sin * self.amplitude) as f32;
        }
    }
}

/// Turns the pairs (2i, 2i + 1) of `values` in place.
pub(super) fn rotate(values: &mut [f32], turns: &[f32]) {
    for (pair, turn) in values.chunks_exact_mut(2).zip(turns.chunks_exact(2)) {
        let (x, y) = (pair[0], pair[1]);
        pair[0] = x * turn[0] - y * turn[1];
        pair[1] = x * turn[1] + y * turn[0];
    }
}
