//! The log of block changes for subscribers: bounded, in sequence. And a digest of all that it has
//! ever said, by which a subscriber sees whether it has all of it.
//!
//! The first change has sequence 1. A subscriber that fell behind further than the log reaches
//! takes a snapshot instead.

use std::collections::VecDeque;

use kvasir_proto::{BlockSetDigest, TierDigests};

use crate::api::{BlockChange, Changes, Tier};

#[derive(Debug)]
pub(crate) struct EventLog {
    log: VecDeque<BlockChange>,
    log_max: usize,
    /// Of the latest change.
    sequence: u64,
    /// Of the blocks as they are after it.
    digests: TierDigests,
}

impl EventLog {
    pub(crate) fn new(log_max: usize) -> Self {
        EventLog { log: VecDeque::new(), log_max, sequence: 0, digests: TierDigests::default() }
    }

    /// A change of a block that could be had in the tier `was` until now, if at all.
    pub(crate) fn push(&mut self, change: BlockChange, was: Option<Tier>) {
        if let Some(tier) = was {
            self.digest_mut(tier).remove(&change.key);
        }
        if !change.removed {
            self.digest_mut(change.tier).add(&change.key);
        }
        self.sequence += 1;
        self.log.push_back(change);
        while self.log.len() > self.log_max {
            self.log.pop_front();
        }
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn digests(&self) -> TierDigests {
        self.digests
    }

    fn digest_mut(&mut self, tier: Tier) -> &mut BlockSetDigest {
        match tier {
            Tier::Vram => &mut self.digests.vram,
            Tier::Dram => &mut self.digests.dram,
            Tier::Ssd => &mut self.digests.ssd,
        }
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
            let key = BlockKey([n; 16]);
            log.push(BlockChange { key, removed: false, tier: Tier::Dram }, None);
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
    fn the_digests_are_of_all_that_was_said_also_of_what_is_not_kept() {
        let mut log = EventLog::new(1);
        let key = |n: u8| BlockKey([n; 16]);
        let set = |ns: &[u8]| -> BlockSetDigest {
            ns.iter().map(|n| key(*n)).collect::<Vec<_>>().iter().collect()
        };
        for (n, was, to) in [
            (1, None, Some(Tier::Dram)),
            (2, None, Some(Tier::Vram)),
            (3, None, Some(Tier::Dram)),
            (4, None, Some(Tier::Dram)),
            (1, Some(Tier::Dram), Some(Tier::Ssd)),
            (2, Some(Tier::Vram), Some(Tier::Dram)),
            (4, Some(Tier::Dram), None),
        ] {
            let tier = to.unwrap_or(Tier::Dram);
            log.push(BlockChange { key: key(n), removed: to.is_none(), tier }, was);
        }
        let want = TierDigests { vram: set(&[]), dram: set(&[2, 3]), ssd: set(&[1]) };
        assert_eq!(log.digests(), want);
    }

    #[test]
    fn a_fresh_log_starts_at_zero() {
        let log = EventLog::new(0);
        assert_eq!(log.since(0, 9), Some(Changes { first_sequence: 1, changes: vec![] }));
        assert_eq!(log.sequence(), 0);
    }
}
