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
    pub(super) fn new(config: &RopeConfig, dims: usize) -> Self {
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
    pub(super) fn turn_len(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Fills one position's row of the table: cosine and sine of each pair in turn.
    pub(super) fn turns(&self, position: u32, row: &mut [f32]) {
        for (pair, frequency) in row.chunks_exact_mut(2).zip(&self.frequencies) {
            let (sin, cos) = angle(position, *frequency).sin_cos();
            pair[0] = (cos * self.amplitude) as f32;
            pair[1] = (sin * self.amplitude) as f32;
        }
    }

    /// Fills a row by which a key that was turned for position `old` becomes one for `new`.
    ///
    /// A pure rotation: the key has its amplitude already. Each angle is rounded as [`Rope::turns`]
    /// rounds it, and then the difference is taken. One angle for `new - old` would lack those
    /// roundings, which are some 10^-4 near position 4,000.
    pub(super) fn delta_turns(&self, old: u32, new: u32, row: &mut [f32]) {
        for (pair, frequency) in row.chunks_exact_mut(2).zip(&self.frequencies) {
            let (sin, cos) = (angle(new, *frequency) - angle(old, *frequency)).sin_cos();
            pair[0] = cos as f32;
            pair[1] = sin as f32;
        }
    }
}

/// Of one pair at a position: a product in f32, see [`Rope`].
fn angle(position: u32, frequency: f32) -> f64 {
    f64::from(position as f32 * frequency)
}

/// Turns the pairs (2i, 2i + 1) of `values` in place.
pub(super) fn rotate(values: &mut [f32], turns: &[f32]) {
    for (pair, turn) in values.chunks_exact_mut(2).zip(turns.chunks_exact(2)) {
        let (x, y) = (pair[0], pair[1]);
        pair[0] = x * turn[0] - y * turn[1];
        pair[1] = x * turn[1] + y * turn[0];
    }
}

/// Turns the pairs (i, i + half) of `values` in place: as an indexer has them.
pub(super) fn rotate_halves(values: &mut [f32], turns: &[f32]) {
    let (first, second) = values.split_at_mut(values.len() / 2);
    for ((x, y), turn) in first.iter_mut().zip(second).zip(turns.chunks_exact(2)) {
        (*x, *y) = (*x * turn[0] - *y * turn[1], *x * turn[1] + *y * turn[0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIMS: usize = 64;

    fn ropes() -> [Rope; 2] {
        let yarn = Yarn {
            factor: 8.0,
            original_positions: 512.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: Some(1.0),
            mscale_all_dims: Some(0.707),
            attention_factor: None,
        };
        [None, Some(yarn)].map(|yarn| Rope::new(&RopeConfig { theta: 1e4, yarn }, DIMS))
    }

    fn turned(rope: &Rope, position: u32) -> Vec<f32> {
        let mut key: Vec<f32> = (0..DIMS).map(|i| (i as f32 * 0.7 + 0.3).sin()).collect();
        let mut turns = vec![0.0; rope.turn_len()];
        rope.turns(position, &mut turns);
        rotate(&mut key, &turns);
        key
    }

    fn moved(rope: &Rope, key: &[f32], old: u32, new: u32) -> Vec<f32> {
        let mut key = key.to_vec();
        let mut turns = vec![0.0; rope.turn_len()];
        rope.delta_turns(old, new, &mut turns);
        rotate(&mut key, &turns);
        key
    }

    /// Values of a pair are about 1; a rotation rounds each a few times.
    fn assert_near(got: &[f32], want: &[f32], what: &str) {
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{what}: {got}, not {want}");
        }
    }

    const MOVES: [(u32, u32); 8] =
        [(0, 1), (0, 3971), (13, 77), (64, 4001), (4001, 64), (1023, 100), (7, 0), (5, 131_071)];

    #[test]
    fn a_key_that_is_moved_is_the_key_of_the_other_position() {
        for rope in ropes() {
            for (old, new) in MOVES {
                let got = moved(&rope, &turned(&rope, old), old, new);
                assert_near(&got, &turned(&rope, new), &format!("{old} to {new}"));
            }
        }
    }

    #[test]
    fn a_key_that_is_moved_back_is_itself() {
        for rope in ropes() {
            for (old, new) in MOVES {
                let key = turned(&rope, old);
                let back = moved(&rope, &moved(&rope, &key, old, new), new, old);
                assert_near(&back, &key, &format!("{old} to {new} and back"));
                assert_eq!(moved(&rope, &key, old, old), key, "by nothing");
            }
        }
    }
}
