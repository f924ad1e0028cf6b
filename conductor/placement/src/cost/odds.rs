//! How far predictions were off, as a distribution that fades: how likely the next one is off by
//! no more than so much.

pub(crate) const BINS: usize = 64;
/// How much of the distribution stays when a sample comes: about the last five hundred count.
const FADE: f64 = 0.998;

/// See the module. What is off is counted in bins of one width from the least on; what is beyond
/// an end counts as that end.
#[derive(Debug, Clone)]
pub(crate) struct Odds {
    least: f64,
    width: f64,
    /// In each bin and those below it.
    up_to: [f64; BINS],
}

impl Odds {
    pub(crate) fn new(least: f64, width: f64) -> Self {
        Odds { least, width, up_to: [0.0; BINS] }
    }

    pub(crate) fn up_to(&self) -> [f64; BINS] {
        self.up_to
    }

    /// Those that have learned this.
    pub(crate) fn learned(self, up_to: [f64; BINS]) -> Self {
        Odds { up_to, ..self }
    }

    /// How much it knows, in samples.
    pub(crate) fn samples(&self) -> f64 {
        self.up_to[BINS - 1]
    }

    /// Only such a share of what is known stays.
    pub(crate) fn forget(&mut self, stays: f64) {
        self.up_to.iter_mut().for_each(|mass| *mass *= stays);
    }

    pub(crate) fn observe(&mut self, off: f64) {
        if off.is_finite() {
            let bin = self.place(off).min(BINS as f64 - 1.0) as usize;
            self.forget(FADE);
            self.up_to[bin..].iter_mut().for_each(|mass| *mass += 1.0);
        }
    }

    /// The share that was off by no more than this; nothing before there was any.
    pub(crate) fn within(&self, off: f64) -> Option<f64> {
        let all = self.up_to[BINS - 1];
        let place = self.place(off);
        let below = |bin: usize| bin.checked_sub(1).map_or(0.0, |bin| self.up_to[bin]);
        let bin = (place as usize).min(BINS);
        let in_bin = self.up_to.get(bin).map_or(0.0, |up_to| up_to - below(bin));
        (all > 0.0).then(|| ((below(bin) + in_bin * place.fract()) / all).min(1.0))
    }

    fn place(&self, off: f64) -> f64 {
        ((off - self.least) / self.width).clamp(0.0, BINS as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_off_by_less_counts_and_the_old_fades() {
        let mut odds = Odds::new(-1.0, 0.5);
        assert_eq!(odds.within(0.0), None);
        for off in [-5.0, 0.1, 0.3, f64::NAN, 100.0] {
            odds.observe(off);
        }
        let near = |got: Option<f64>, want: f64| {
            let got = got.expect("samples");
            assert!((got - want).abs() < 0.01, "{got}, not {want}");
        };
        near(odds.within(-1.0), 0.0);
        near(odds.within(0.0), 0.25);
        near(odds.within(0.25), 0.5);
        near(odds.within(0.5), 0.75);
        near(odds.within(30.0), 0.75);
        near(odds.within(31.0), 1.0);
        near(odds.within(f64::INFINITY), 1.0);
        (0..3_000).for_each(|_| odds.observe(2.0));
        near(odds.within(1.5), 0.0);
    }
}
