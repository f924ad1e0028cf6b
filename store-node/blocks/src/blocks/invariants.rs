//! What must hold between any two calls, checked from the whole table.

use std::collections::BTreeMap;

use kvasir_proto::{Share, Side, SlotIndex, TierDigests};

use super::Blocks;
use crate::share_state::Phase;
use crate::slot_state::SlotState;

impl Blocks {
    /// Checks everything that must hold between two calls; for tests and simulations.
    ///
    /// # Errors
    /// A sentence about the first thing that does not hold.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.cache.slots().check()?;
        self.cache.index().check(|slot| self.committed_pins(slot))?;
        self.cache.ssd().check()?;
        self.bucket.check()?;
        self.check_tiers()?;
        self.check_pool()?;
        self.check_carries()?;
        self.check_indexed()?;
        self.check_digests()?;
        self.check_private_slots()?;
        self.check_pins()?;
        self.check_imms()?;
        self.check_times()?;
        if self.hints != self.shares.values().filter(|record| record.is_hint).count() {
            return Err("the number of hints is wrong".to_owned());
        }
        self.shares.keys().try_for_each(|&share| self.check_share(share))
    }

    fn committed_pins(&self, slot: SlotIndex) -> Option<u32> {
        match self.cache.slots().state(slot) {
            Some(SlotState::Committed { pins }) => Some(pins),
            _ => None,
        }
    }

    /// The index has no slot that is not committed (checked there), and misses none that is.
    fn check_indexed(&self) -> Result<(), String> {
        let indexed = self.cache.index().iter().count();
        if indexed != self.cache.slots().tally().committed as usize {
            return Err(format!("{indexed} slots are indexed, but the committed slots differ"));
        }
        Ok(())
    }

    /// What changes have said is what a snapshot would say.
    fn check_digests(&self) -> Result<(), String> {
        let snapshot = self.snapshot();
        let (vram, rest) = snapshot.keys.split_at(snapshot.vram_keys);
        let (dram, ssd) = rest.split_at(snapshot.dram_keys);
        let [vram, dram, ssd] = [vram, dram, ssd].map(|keys| keys.iter().collect());
        let (told, have) = (self.digests(), TierDigests { vram, dram, ssd });
        match told == have {
            true => Ok(()),
            false => {
                Err(format!("the reported changes give {told:?}, but the tiers hold {have:?}"))
            }
        }
    }

    /// A block counts as sunk exactly when the SSD has it as it is in slots; each rising slot is one read's.
    fn check_tiers(&self) -> Result<(), String> {
        for (slot, entry) in self.cache.index().iter() {
            if self.cache.index().is_sunk(slot) != self.cache.is_on_ssd(entry.key) {
                return Err(format!("slot {slot} has a wrong SSD flag"));
            }
        }
        let mut reads: Vec<SlotIndex> = self.rises.all.values().map(|rise| rise.slot).collect();
        reads.sort();
        let rising =
            |(_, state): &(SlotIndex, SlotState)| matches!(state, SlotState::Rising { .. });
        let rising = self.cache.slots().iter().filter(rising).map(|(slot, _)| slot);
        if !rising.eq(reads) {
            return Err("the promoting slots differ from the slots of the reads".to_owned());
        }
        let bytes: u64 = self.sinks.iter().map(|sink| sink.bytes).sum();
        if bytes != self.sinks.bytes {
            return Err("the demoting bytes differ from the sum of the demotions".to_owned());
        }
        Ok(())
    }

    /// Every private slot is one page of one share, and is quarantined exactly when that is
    /// aborted.
    fn check_private_slots(&self) -> Result<(), String> {
        let mut owners: BTreeMap<SlotIndex, Share> = BTreeMap::new();
        for (&share, record) in &self.shares {
            for slot in record.pages.iter().filter_map(|page| page.private()) {
                if let Some(other) = owners.insert(slot, share) {
                    return Err(format!("slot {slot} belongs to {other} and to {share}"));
                }
            }
        }
        for (slot, state) in self.cache.slots().iter() {
            let owner = owners.remove(&slot);
            let aborted = owner.and_then(|share| self.shares.get(&share)).map(|r| r.is_aborted());
            let good = match state {
                SlotState::Allocated(share) => owner == Some(share) && aborted == Some(false),
                SlotState::Quarantined(share) => owner == Some(share) && aborted == Some(true),
                SlotState::Free
                | SlotState::Rising { .. }
                | SlotState::Committed { .. }
                | SlotState::Leaving { .. } => owner.is_none(),
            };
            if !good {
                return Err(format!("slot {slot} is {state:?} and belongs to {owner:?}"));
            }
        }
        Ok(())
    }

    /// The pins of every slot are those that shares and engines hold.
    fn check_pins(&self) -> Result<(), String> {
        let mut pins: BTreeMap<SlotIndex, u32> = BTreeMap::new();
        let of_shares = self.shares.values().flat_map(|record| &record.pages);
        for slot in of_shares
            .filter_map(|page| page.pinned())
            .chain(self.gets.iter())
            .chain(self.sinks.pins())
            .chain(self.bucket.pins())
            .chain(self.admin_pins.slots())
        {
            *pins.entry(slot).or_insert(0) += 1;
        }
        for (slot, state) in self.cache.slots().iter() {
            let held = pins.get(&slot).copied().unwrap_or(0);
            if state.pins() != held {
                return Err(format!("slot {slot} is {state:?} and {held} pins are held"));
            }
        }
        Ok(())
    }

    /// The held immediates are those of the open shares, each of one.
    fn check_imms(&self) -> Result<(), String> {
        let mut of_shares: Vec<_> = self.shares.values().filter_map(|record| record.imm).collect();
        of_shares.sort();
        if !self.imms.held().iter().eq(of_shares.iter()) {
            return Err(format!(
                "the shares have {of_shares:?}, but {:?} are held",
                self.imms.held()
            ));
        }
        Ok(())
    }

    /// Every share has either a lease or a time since when it is aborting.
    fn check_times(&self) -> Result<(), String> {
        if self.leases.len() + self.aborting.len() != self.shares.len() {
            return Err("a lease or an abort has no share".to_owned());
        }
        for (&share, record) in &self.shares {
            let timed = match (&record.aborted, record.state.phase) {
                (None, Phase::Live | Phase::Released) => {
                    self.leases.contains(&(record.lease_until_ms, share))
                }
                (Some(aborted), Phase::Aborted) => {
                    self.aborting.contains(&(aborted.since_ms, share))
                }
                _ => false,
            };
            if !timed {
                return Err(format!("{share} has neither a lease nor is it aborting"));
            }
        }
        Ok(())
    }

    fn check_share(&self, share: Share) -> Result<(), String> {
        let Some(record) = self.shares.get(&share) else { return Ok(()) };
        if record.state.over() {
            return Err(format!("{share} has ended but is still stored"));
        }
        if self.finished.get(share).is_some() || self.tombstones.get(share).is_some() {
            return Err(format!("{share} is open but recorded as ended"));
        }
        let reads_dropped =
            record.pages.iter().filter_map(|page| page.pinned()).any(|slot| {
                matches!(self.cache.slots().state(slot), Some(SlotState::Leaving { .. }))
            });
        if reads_dropped && !record.is_aborted() && share.side != Side::Source {
            return Err(format!("{share} reads a dropped block but is not aborted"));
        }
        let has_pins = record.pages.iter().any(|page| page.pinned().is_some());
        if record.state.locally_over() && has_pins {
            return Err(format!("{share} waits only for its remote writer but holds pins"));
        }
        Ok(())
    }
}
