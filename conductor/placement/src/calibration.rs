//! How true predictions were: what was predicted, held against what came. The latest count most, about five
//! hundred of them.

/// How much of what is known stays when a sample comes.
const FADE: f64 = 0.998;
/// Likelihoods are told apart by so many groups of equal width.
const GROUPS: usize = 10;

/// Of predicted times.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TimeError {
    real_us: f64,
    off_us: f64,
    over_us: f64,
}

impl TimeError {
    /// So much was predicted, and so much came.
    pub fn came(&mut self, predicted_us: u64, real_us: u64) {
        let off_us = predicted_us as f64 - real_us as f64;
        self.real_us = FADE * self.real_us + real_us as f64;
        self.off_us = FADE * self.off_us + off_us.abs();
        self.over_us = FADE * self.over_us + off_us;
    }

    /// The mean of what they were off, over the mean of what came; nothing before anything did.
    pub fn error(&self) -> Option<f64> {
        (self.real_us > 0.0).then(|| self.off_us / self.real_us)
    }

    /// The same with its sign: above 0 more was predicted than came.
    pub fn bias(&self) -> Option<f64> {
        (self.real_us > 0.0).then(|| self.over_us / self.real_us)
    }
}

/// Of predicted likelihoods.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LikelyError {
    groups: [Group; GROUPS],
}

#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Group {
    count: f64,
    likely: f64,
    came_true: f64,
}

impl LikelyError {
    /// Something was so likely, and came true or did not.
    pub fn came(&mut self, likely: f64, came_true: bool) {
        if !(0.0..=1.0).contains(&likely) {
            return;
        }
        for group in &mut self.groups {
            let Group { count, likely, came_true } = *group;
            *group =
                Group { count: FADE * count, likely: FADE * likely, came_true: FADE * came_true };
        }
        let group = &mut self.groups[((likely * GROUPS as f64) as usize).min(GROUPS - 1)];
        group.count += 1.0;
        group.likely += likely;
        group.came_true += f64::from(u8::from(came_true));
    }

    /// How likely they were in the mean.
    pub fn predicted(&self) -> Option<f64> {
        self.over_count(self.groups.iter().map(|group| group.likely).sum())
    }

    /// The share of them that came true.
    pub fn measured(&self) -> Option<f64> {
        self.over_count(self.groups.iter().map(|group| group.came_true).sum())
    }

    /// The mean of what groups that were about equally likely were off (the expected calibration error).
    pub fn error(&self) -> Option<f64> {
        self.over_count(
            self.groups.iter().map(|group| (group.likely - group.came_true).abs()).sum(),
        )
    }

    fn over_count(&self, sum: f64) -> Option<f64> {
        let count: f64 = self.groups.iter().map(|group| group.count).sum();
        (count > 0.0).then(|| sum / count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(got: Option<f64>, want: f64) {
        let got = got.expect("there were some");
        assert!((got - want).abs() < 0.02, "{got}, not {want}");
    }

    #[test]
    fn times_that_are_off_both_ways_have_an_error_and_no_bias() {
        let mut error = TimeError::default();
        assert_eq!((error.error(), error.bias()), (None, None));
        for at in 0..100 {
            error.came(if at % 2 == 0 { 1_500 } else { 500 }, 1_000);
        }
        near(error.error(), 0.5);
        near(error.bias(), 0.0);
        (0..5_000).for_each(|_| error.came(1_200, 1_000));
        near(error.error(), 0.2);
        near(error.bias(), 0.2);
    }

    #[test]
    fn groups_that_are_off_do_not_make_up_for_each_other() {
        let mut error = LikelyError::default();
        assert_eq!(error.error(), None);
        for at in 0..100 {
            // Never true, and always.
            error.came(0.25, false);
            error.came(0.75, true);
            // Half of them are, as was said.
            error.came(0.5, at % 2 == 0);
        }
        near(error.predicted(), 0.5);
        near(error.measured(), 0.5);
        near(error.error(), 0.5 / 3.0);
        error.came(f64::NAN, true);
        error.came(1.0, true);
        assert!(error.error().is_some_and(f64::is_finite));
    }
}
