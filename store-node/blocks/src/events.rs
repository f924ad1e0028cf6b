//! The log of block changes for subscribers: bounded, in sequence.
//!
//! The first change has sequence 1. A subscriber that fell behind further than the log reaches
//! takes a snapshot instead.

use std::collections::VecDeque;

use crate::api::{BlockChange, Changes};

#[derive(Debug)]
pub(crate) struct EventLog {
    log: VecDeque<BlockChange>,
    log_max: usize,
    /// Of the latest change.
    sequence: u64,
}

impl EventLog {
    pub(crate) fn new(log_max: usize) -> Self {
        EventLog { log: VecDeque::new(), log_max, sequence: 0 }
    }

    pub(crate) fn push(&mut self, change: BlockChange) {
        self.sequence += 1;
        self.log.push_back(change);
        while self.log.len() > self.log_max {
            self.log.pop_front();
        }
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn since(&self, sequence: u64, changes_max: usize) -> Option<Changes> {
        let missed = self.sequence.checked_sub(sequence)?;
        let skip = (self.log.len() as u64).checked_sub(missed)?;
        let skip = usize::try_from(skip).ok()?;
        let changes = self.log.iter().skip(skip).take(changes_max).copied().collect();
        Some(Changes { first_sequence: sequence + 1, changes })
    }
}

#[cfg(test)]
mod tests {
    use kvasir_proto::BlockKey;

    use super::*;
    use crate::api::Tier;

    #[test]
    fn changes_are_given_from_where_a_subscriber_stands_or_not_at_all() {
        let mut log = EventLog::new(3);
        for n in 1..=5 {
            log.push(BlockChange { key: BlockKey([n; 16]), removed: false, tier: Tier::Dram });
        }
        let check = |from: u64, max: usize, want: Option<(u64, &[u8])>| {
            let got = log.since(from, max);
            let got = got.map(|got| {
                (got.first_sequence, got.changes.iter().map(|c| c.key.0[0]).collect::<Vec<_>>())
            });
            assert_eq!(got, want.map(|(first, keys)| (first, keys.to_vec())), "from {from}");
        };
        check(0, 9, None);
        check(1, 9, None);
        check(2, 9, Some((3, &[3, 4, 5])));
        check(2, 2, Some((3, &[3, 4])));
        check(4, 9, Some((5, &[5])));
        check(5, 9, Some((6, &[])));
        check(6, 9, None);
    }

    #[test]
    fn a_fresh_log_starts_at_zero() {
        let log = EventLog::new(0);
        assert_eq!(log.since(0, 9), Some(Changes { first_sequence: 1, changes: vec![] }));
        assert_eq!(log.sequence(), 0);
    }
}
