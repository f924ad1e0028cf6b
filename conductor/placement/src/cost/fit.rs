//! A small robust regression: a few coefficients, none negative, fitted to a fading memory of
//! samples by relative error, pulled gently to where they started.
//!
//! One measurement that is far from what is predicted is not believed: beside many short prompts, one
//! long one that was computed on a stopped machine would decide alone what all long ones cost. It is
//! held back until others are off by as much, as they are where something has changed.
//!
//! Not more than that: no history is kept but the sums and what is held back. Whatever it is fed,
//! coefficients stay finite and not negative.

use std::collections::VecDeque;

/// How much of the memory stays when a sample comes: about the last hundred count.
const FADE: f64 = 0.99;
/// The pull to the prior, of each coefficient's relative deviation. So weak that it only decides
/// what samples leave open, as they do when all are of one length.
const RIDGE: f64 = 1e-6;
/// So many times more or less than predicted is far.
const FAR: f64 = 4.0;
/// Before so many samples nothing is far: the prior may be of another machine.
const LEARNED_AFTER: u32 = 8;
/// So many far ones that agree with each other are believed.
const BELIEVED: usize = 3;
/// They agree when the largest is off by at most so many times as much as the smallest.
const AGREEING: f64 = 2.0;

#[derive(Debug, Clone)]
pub(crate) struct Fit<const N: usize> {
    prior: [f64; N],
    coefficients: [f64; N],
    /// Faded sums of `w x x^T` and `w x y`, with each feature in units of its prior term.
    products: [[f64; N]; N],
    targets: [f64; N],
    samples: u32,
    /// Features and what was measured, of the last that were far, at most [`BELIEVED`].
    held: VecDeque<([f64; N], f64)>,
}

impl<const N: usize> Fit<N> {
    pub(crate) fn new(prior: [f64; N]) -> Self {
        let prior = prior.map(|value| if value.is_finite() { value.max(1e-9) } else { 1e-9 });
        Fit {
            prior,
            coefficients: prior,
            products: [[0.0; N]; N],
            targets: [0.0; N],
            samples: 0,
            held: VecDeque::new(),
        }
    }

    /// One that has learned these.
    pub(crate) fn learned(coefficients: [f64; N]) -> Self {
        Fit { coefficients, ..Fit::new(coefficients) }
    }

    /// How many were taken.
    pub(crate) fn samples(&self) -> u32 {
        self.samples
    }

    pub(crate) fn coefficients(&self) -> [f64; N] {
        self.coefficients
    }

    pub(crate) fn predict(&self, features: [f64; N]) -> f64 {
        (0..N).map(|i| self.coefficients[i] * features[i]).sum()
    }

    pub(crate) fn observe(&mut self, features: [f64; N], measured: f64) {
        if self.samples < LEARNED_AFTER || !is_far(self.off(features, measured)) {
            self.take(features, measured);
            return;
        }
        if self.held.len() == BELIEVED {
            self.held.pop_front();
        }
        self.held.push_back((features, measured));
        let off = || self.held.iter().map(|(features, measured)| self.off(*features, *measured));
        let (least, most) = (off().fold(f64::MAX, f64::min), off().fold(0.0, f64::max));
        if self.held.len() == BELIEVED && most <= AGREEING * least {
            for (features, measured) in std::mem::take(&mut self.held) {
                self.take(features, measured);
            }
        }
    }

    /// Measured over predicted.
    fn off(&self, features: [f64; N], measured: f64) -> f64 {
        measured / self.predict(features).max(1e-3)
    }

    fn take(&mut self, features: [f64; N], measured: f64) {
        self.samples = self.samples.saturating_add(1);
        let predicted = self.predict(features).max(1e-3);
        // The relative error, over the larger of the two: one measurement that is far off, either
        // way, then moves little.
        let weight = 1.0 / measured.max(predicted).powi(2);
        let scaled: [f64; N] = std::array::from_fn(|i| features[i] * self.prior[i]);
        for i in 0..N {
            for j in 0..N {
                self.products[i][j] = FADE * self.products[i][j] + weight * scaled[i] * scaled[j];
            }
            self.targets[i] = FADE * self.targets[i] + weight * scaled[i] * measured;
        }
        self.solve();
    }

    /// The best coefficients of which none is negative: the best of all choices of which ones are
    /// held at zero.
    fn solve(&mut self) {
        let mut best: Option<(f64, [f64; N])> = None;
        for held_at_zero in 0..1u8 << N {
            let free: [bool; N] = std::array::from_fn(|i| held_at_zero & (1 << i) == 0);
            let Some(factors) = self.solve_for(free) else { continue };
            let error = self.error(factors);
            if best.is_none_or(|(least, _)| error < least) {
                best = Some((error, factors));
            }
        }
        if let Some((_, factors)) = best {
            self.coefficients = std::array::from_fn(|i| factors[i] * self.prior[i]);
        }
    }

    /// Coefficients over their priors, by elimination; `None` when one comes out negative.
    fn solve_for(&self, free: [bool; N]) -> Option<[f64; N]> {
        // Each row is an equation: its factors, and what they come to.
        let mut rows: [([f64; N], f64); N] = std::array::from_fn(|i| {
            if !free[i] {
                // An equation that says "this one is zero".
                return (std::array::from_fn(|j| if i == j { 1.0 } else { 0.0 }), 0.0);
            }
            let row = std::array::from_fn(|j| match free[j] {
                true => self.products[i][j] + if i == j { RIDGE } else { 0.0 },
                false => 0.0,
            });
            (row, self.targets[i] + RIDGE)
        });
        // Symmetric and positive definite, so no pivoting is needed.
        for i in 0..N {
            let (pivot, pivot_target) = rows[i];
            for (j, (row, target)) in rows.iter_mut().enumerate() {
                if j != i {
                    let factor = row[i] / pivot[i];
                    for (value, above) in row.iter_mut().zip(pivot) {
                        *value -= factor * above;
                    }
                    *target -= factor * pivot_target;
                }
            }
        }
        let factors: [f64; N] = std::array::from_fn(|i| rows[i].1 / rows[i].0[i]);
        factors.iter().all(|factor| factor.is_finite() && *factor >= 0.0).then_some(factors)
    }

    fn error(&self, factors: [f64; N]) -> f64 {
        let mut error = 0.0;
        for i in 0..N {
            let product: f64 = (0..N).map(|j| self.products[i][j] * factors[j]).sum();
            error += factors[i] * (product - 2.0 * self.targets[i]);
            error += RIDGE * (factors[i] - 1.0).powi(2);
        }
        error
    }
}

fn is_far(off: f64) -> bool {
    !(1.0 / FAR..=FAR).contains(&off)
}
