//! Reading blocks of the SSD and of the object store ahead, on a hint that they are about to be asked for.
//!
//! A hint is a share of the node's own: it pins what of the chain is in memory and what rises after it, so
//! that the one does not go while the other comes, and ends by itself when all has come. Then nothing is held, and
//! what was read makes room for others like any block that was just brought.
//!
//! It stands little in the way of those who ask: it begins no read beyond the 32nd that is under way, leaves a
//! quarter of the slots, and makes room only where a block is on the SSD too and was not used a moment ago.

use kvasir_proto::{BlockKey, Namespace, Share, Side, SlotIndex};

use super::Blocks;
use crate::api::{Allocate, PrefetchError, Prefetched};
use crate::share::{Hold, Page, ShareRecord};
use crate::share_state::ShareState;

/// Reads under way at once of which any is of a hint. Reads are done in their order, so those of somebody who asks wait for
/// these; and while an SSD hangs, their slots are nobody's.
const HINTED_READS_MAX: usize = 32;

impl Blocks {
    /// Somebody will soon ask for these blocks: begins to read those that are not in memory. The share is
    /// drawn by the shell and never used again; it is one of the source side, of which only
    /// [`Action::Ended`](crate::Action::Ended) is heard. Without a namespace it is that of the first block.
    ///
    /// # Errors
    /// [`PrefetchError`]; then nothing is read.
    pub fn prefetch(
        &mut self,
        now_ms: u64,
        share: Share,
        namespace: Option<Namespace>,
        keys: &[BlockKey],
    ) -> Result<Prefetched, PrefetchError> {
        self.forget_until(now_ms);
        self.totals.hints += 1;
        let result = self.follow_hint(now_ms, share, namespace, keys);
        self.totals.hints_refused += u64::from(result.is_err());
        result
    }

    fn follow_hint(
        &mut self,
        now_ms: u64,
        share: Share,
        namespace: Option<Namespace>,
        keys: &[BlockKey],
    ) -> Result<Prefetched, PrefetchError> {
        if self.is_draining() {
            return Err(PrefetchError::Draining);
        }
        if !self.below_is_usable(now_ms) {
            return Err(PrefetchError::NoSsd);
        }
        let Some(namespace) = namespace.or_else(|| self.namespace_of(*keys.first()?)) else {
            return Ok(Prefetched::default());
        };
        let held = self.cache.index().prefix(Some(namespace), keys);
        let first = held.len();
        let there = self.below(now_ms, namespace, keys, first);
        let wanted = &keys[first..first + there];
        let known = Prefetched { memory_blocks: first as u32, promoting_blocks: there as u32 };
        let rises = |key: &&BlockKey| self.rises.of_key(**key).is_some();
        let rising = wanted.iter().take_while(rises).count() as u32;
        if rising as usize == wanted.len() {
            return Ok(known);
        }
        // Who looks again hears of what is read already, whether or not more can be.
        let or_rising = |why: PrefetchError| match rising {
            0 => Err(why),
            promoting_blocks => Ok(Prefetched { promoting_blocks, ..known }),
        };
        let is_full = self.shares.len() >= self.options.shares_max;
        let is_known = self.shares.contains_key(&share);
        if is_full || is_known || self.hints >= self.options.prefetch_chains_max {
            return or_rising(PrefetchError::TooMany(self.hints));
        }
        let reads_max = HINTED_READS_MAX.min(self.options.rises_max / 2);
        let reads_left = reads_max.saturating_sub(self.rises.all.len());
        let others = self.cache.slots().len() / 4;
        let slots_left = self.cache.available_beside(&held).saturating_sub(others) as usize;
        let wanted = &wanted[..there.min(reads_left).min(slots_left)];

        held.iter().for_each(|slot| self.cache.pin(*slot));
        let mut pages: Vec<Page> =
            held.iter().map(|slot| Page { slot: *slot, hold: Hold::Pinned }).collect();
        for (page, key) in (first as u32..).zip(wanted) {
            if self.rises.of_key(*key).is_none() && !self.has_unwanted_slot() {
                break;
            }
            let Some(risen) = self.rise_page(now_ms, (share, namespace), page, *key) else { break };
            pages.push(risen);
        }
        if pages.len() == first {
            held.iter().for_each(|slot| self.cache.unpin_unused(*slot));
            return or_rising(PrefetchError::NoRoom);
        }
        let promoting_blocks = (pages.len() - first) as u32;
        self.open_hint(now_ms, (share, namespace), keys, pages, held.len() as u32);
        Ok(Prefetched { promoting_blocks, ..known })
    }

    pub(super) fn namespace_of(&self, key: BlockKey) -> Option<Namespace> {
        let slot = self.cache.index().find(key);
        let in_memory = slot.and_then(|slot| self.cache.index().entry(slot));
        let in_pool = || Some(self.cache.pools().block(key)?.namespace);
        let below = || self.cache.ssd().get(key).or(self.bucket.get(key));
        let elsewhere = || in_pool().or_else(|| Some(below()?.namespace));
        in_memory.map(|entry| entry.namespace).or_else(elsewhere)
    }

    /// A slot is free, or has a block that goes next, was not used lately, and is on the SSD too: nothing is lost
    /// for what may never be asked for.
    fn has_unwanted_slot(&self) -> bool {
        let spares_ms = self.options.prefetch_protected_ms;
        let next_out_ms = self.cache.index().next_out_age_if_sunk_ms();
        self.cache.slots().tally().free > 0 || next_out_ms.is_some_and(|age_ms| age_ms >= spares_ms)
    }

    fn open_hint(
        &mut self,
        now_ms: u64,
        (share, namespace): (Share, Namespace),
        keys: &[BlockKey],
        pages: Vec<Page>,
        held_blocks: u32,
    ) {
        debug_assert_eq!(share.side, Side::Source);
        let blocks = pages.len() as u32;
        let lease_ms = self.options.lease_max_ms;
        let lease_until_ms = now_ms.saturating_add(lease_ms);
        let record = ShareRecord {
            request: Allocate {
                share,
                namespace,
                keys: keys[..pages.len()].to_vec(),
                prompt_tokens: blocks.saturating_mul(self.block_tokens),
                lease_ms,
                fetch_until_block: 0,
                has_remote_writer: false,
                is_ephemeral: false,
                leaves_ssd: false,
            },
            state: ShareState::new(false, false, true),
            held_blocks: blocks,
            cached_blocks: held_blocks,
            rising: held_blocks..blocks,
            prompt_pages: blocks,
            pages,
            targets: 0..0,
            imm: None,
            lease_until_ms,
            aborted: None,
            of_objects: false,
            is_hint: true,
            is_fill: false,
        };
        self.hints += 1;
        self.leases.insert((lease_until_ms, share));
        self.shares.insert(share, record);
    }

    /// These blocks are asked for.
    pub(super) fn note_prefetched_use(&mut self, slots: &[SlotIndex]) {
        let used = slots.iter().filter(|slot| self.cache.take_prefetched(**slot)).count();
        self.totals.prefetched_used += used as u64;
    }
}
