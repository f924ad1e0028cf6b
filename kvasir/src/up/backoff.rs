//! When a child that ended is started again: soon the first time, then ever later, until it has
//! lived long enough to be trusted again.

const FIRST_MS: u64 = 200;
const LONGEST_MS: u64 = 10_000;
/// A child that lived this long starts from the beginning.
const TRUSTED_AFTER_MS: u64 = 30_000;

#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Backoff {
    ends_in_a_row: u32,
}

impl Backoff {
    /// Tells how long to wait before the next start.
    pub(super) fn ended_after(&mut self, lived_ms: u64) -> u64 {
        if lived_ms >= TRUSTED_AFTER_MS {
            self.ends_in_a_row = 0;
        }
        let wait = FIRST_MS.saturating_mul(1 << self.ends_in_a_row.min(16)).min(LONGEST_MS);
        self.ends_in_a_row += 1;
        wait
    }

    pub(super) fn ends_in_a_row(self) -> u32 {
        self.ends_in_a_row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_up_to_its_bound_and_starts_over_after_a_long_life() {
        let mut backoff = Backoff::default();
        let waits: Vec<u64> = (0..8).map(|_| backoff.ended_after(0)).collect();
        assert_eq!(waits, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(backoff.ends_in_a_row(), 8);
        assert_eq!(backoff.ended_after(TRUSTED_AFTER_MS), 200);
        assert_eq!(backoff.ended_after(TRUSTED_AFTER_MS - 1), 400);
    }
}
