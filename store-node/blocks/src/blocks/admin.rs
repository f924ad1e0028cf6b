//! What administrators ask for: lists and single blocks, pins that end by themselves, evictions.
//!
//! None of it goes past a guard: a pinned block is not evicted, a slot that a share has for itself is in no
//! index and so never met, and what a tenant was told is kept stays.

use kvasir_proto::{BlockKey, Class, Namespace, SlotIndex};

use super::{Blocks, as_u32};
use crate::admin::{
    AdminPin, AdminPinError, DramCopy, Evicted, Holder, Inspection, ListFilter, ListFrom, Listed,
    ListedBlock, PIN_MS_MAX,
};
use crate::api::Tier;
use crate::ssd::SsdBlock;

/// Places looked at by one call: a filter that finds little does not hold the node up for long.
const PLACES_MAX: u32 = 65_536;

impl Blocks {
    /// Up to `blocks_max` blocks that the filter lets through, in no order that means anything: first
    /// those in memory, then those that are on the SSD alone. It may be fewer, also none, before the end.
    pub fn list(&self, filter: &ListFilter, from: ListFrom, blocks_max: usize) -> Listed {
        let mut listed = Listed { blocks: Vec::new(), next: None };
        let (slots, ids) = (self.cache.slots().len(), self.cache.ssd().ids());
        let mut looked_at = 0;
        let mut at = from;
        loop {
            if at.tier == Tier::Dram && at.place >= slots {
                at = ListFrom { tier: Tier::Ssd, place: 0 };
            }
            if at.tier == Tier::Ssd && at.place >= ids {
                return listed;
            }
            if looked_at >= PLACES_MAX || listed.blocks.len() >= blocks_max.max(1) {
                listed.next = Some(at);
                return listed;
            }
            looked_at += 1;
            let found = match at.tier {
                // Pages of an engine's pool are not listed.
                Tier::Dram | Tier::Vram => self.listed_in_slot(SlotIndex(at.place)),
                Tier::Ssd => self.listed_on_ssd(at.place),
            };
            listed.blocks.extend(found.filter(|block| passes(block, filter)));
            at.place += 1;
        }
    }

    fn listed_in_slot(&self, slot: SlotIndex) -> Option<ListedBlock> {
        let entry = self.cache.index().entry(slot)?;
        let ssd = self.cache.ssd().get(entry.key).map(|block| block.class);
        let (key, namespace) = (entry.key, entry.namespace);
        Some(ListedBlock { key, namespace, dram: self.dram_copy(slot), ssd })
    }

    /// Those that are in memory as well were listed there.
    fn listed_on_ssd(&self, id: u32) -> Option<ListedBlock> {
        let block = self.cache.ssd().at_id(id)?;
        let alone = self.cache.index().find(block.key).is_none();
        let (key, namespace, ssd) = (block.key, block.namespace, Some(block.class));
        alone.then_some(ListedBlock { key, namespace, dram: None, ssd })
    }

    fn dram_copy(&self, slot: SlotIndex) -> Option<DramCopy> {
        let generation = self.cache.slots().generation(slot)?;
        Some(DramCopy { slot, generation, pins: self.cache.slots().state(slot)?.pins() })
    }

    /// All that is known of a block; `None` when it is in no tier.
    pub fn inspect(&self, key: BlockKey) -> Option<Inspection> {
        let slot = self.cache.index().find(key);
        let entry = slot.and_then(|slot| self.cache.index().entry(slot));
        let ssd = self.cache.ssd().get(key);
        let namespace = entry.map(|entry| entry.namespace);
        let namespace = namespace.or(ssd.as_ref().map(|block| block.namespace))?;
        let parent = match (entry, &ssd) {
            (Some(entry), _) => {
                let before = entry.parent.and_then(|parent| self.cache.index().entry(parent));
                before.map(|before| before.key)
            }
            (None, ssd) => ssd.as_ref().and_then(|block| block.parent),
        };
        Some(Inspection {
            key,
            namespace,
            parent,
            dram: slot.and_then(|slot| self.dram_copy(slot)),
            checksum: entry.map(|entry| entry.checksum),
            ssd,
            rising: self.rises.of_key(key).is_some(),
            holders: slot.map(|slot| self.holders(slot)).unwrap_or_default(),
        })
    }

    /// A block and all before it, from the first one on, with their namespace; `None` when it is in no tier.
    pub fn chain(&self, key: BlockKey) -> Option<(Namespace, Vec<BlockKey>)> {
        if let Some(slot) = self.cache.index().find(key) {
            let namespace = self.cache.index().entry(slot)?.namespace;
            return Some((namespace, self.chain_in_memory(slot)));
        }
        let ssd = self.cache.ssd();
        Some((ssd.get(key)?.namespace, ssd.chain(key)))
    }

    fn holders(&self, slot: SlotIndex) -> Vec<Holder> {
        let reads = self.shares.values().filter(|record| record.reads_slot(slot));
        let of_shares = reads.map(|record| Holder::Share {
            share: record.request.share,
            lease_until_ms: (!record.is_aborted()).then_some(record.lease_until_ms),
        });
        let of_engines = self.gets.of(slot).map(|epoch| Holder::Engine { epoch });
        let of_sinks = self.sinks.pins().filter(|of| *of == slot).map(|_| Holder::Sink);
        let of_admins = self.admin_pins.of(slot);
        let of_admins = of_admins.map(|(pin, until_ms)| Holder::Admin { pin, until_ms });
        of_shares.chain(of_engines).chain(of_sinks).chain(of_admins).collect()
    }

    /// Pins a block and all before it for so long, or until [`Self::admin_unpin`].
    ///
    /// # Errors
    /// [`AdminPinError`]; then nothing is pinned.
    pub fn admin_pin(
        &mut self,
        now_ms: u64,
        key: BlockKey,
        ttl_ms: u64,
    ) -> Result<AdminPin, AdminPinError> {
        if ttl_ms == 0 || ttl_ms > PIN_MS_MAX {
            return Err(AdminPinError::BadTime);
        }
        let Some(slot) = self.cache.index().find(key) else {
            let on_ssd = self.cache.ssd().contains(key);
            return Err(if on_ssd { AdminPinError::OnSsdOnly } else { AdminPinError::NotHere });
        };
        let path = self.cache.index().path(slot);
        // The other half is for requests.
        let most = self.cache.slots().len() / 2;
        let wanted = as_u32(self.admin_pins.blocks() + path.len());
        if wanted > most {
            return Err(AdminPinError::TooMany { wanted, most });
        }
        self.cache.set_now(now_ms);
        path.iter().for_each(|slot| self.cache.pin(*slot));
        let (blocks, until_ms) = (as_u32(path.len()), now_ms.saturating_add(ttl_ms));
        let pin = self.admin_pins.insert(path, until_ms);
        Ok(AdminPin { pin, blocks, until_ms })
    }

    /// Ends an administrator's pin; false when there is none of that number.
    pub fn admin_unpin(&mut self, pin: u64) -> bool {
        let Some(path) = self.admin_pins.remove(pin) else { return false };
        // To be pinned by hand is no use of a block.
        path.into_iter().for_each(|slot| self.cache.unpin_unused(slot));
        true
    }

    /// Ends those whose time is over.
    pub(super) fn end_admin_pins(&mut self, now_ms: u64) {
        while let Some((until_ms, pin)) = self.admin_pins.next_end()
            && until_ms <= now_ms
        {
            self.admin_unpin(pin);
        }
    }

    /// Blocks that administrators' pins hold.
    pub fn admin_pinned_blocks(&self) -> u32 {
        as_u32(self.admin_pins.blocks())
    }

    /// Evicts a block and all after it from all tiers, as far as nobody holds them; `None` when it is in
    /// no tier.
    pub fn admin_evict(&mut self, now_ms: u64, key: BlockKey) -> Option<Evicted> {
        let slot = self.cache.index().find(key);
        if slot.is_none() && !self.cache.ssd().contains(key) {
            return None;
        }
        self.cache.set_now(now_ms);
        Some(self.evict_from(now_ms, slot, Some(key)))
    }

    /// The same for every chain of a namespace.
    pub fn admin_evict_namespace(&mut self, now_ms: u64, namespace: Namespace) -> Evicted {
        self.cache.set_now(now_ms);
        let firsts = self.cache.index().iter().filter_map(|(slot, entry)| {
            (entry.parent.is_none() && entry.namespace == namespace).then_some(slot)
        });
        let firsts: Vec<SlotIndex> = firsts.collect();
        let on_ssd = self.cache.ssd().iter().filter_map(|block| {
            (block.parent.is_none() && block.namespace == namespace).then_some(block.key)
        });
        let on_ssd: Vec<BlockKey> = on_ssd.collect();
        let mut evicted = Evicted::default();
        firsts.into_iter().for_each(|slot| evicted += self.evict_from(now_ms, Some(slot), None));
        on_ssd.into_iter().for_each(|key| evicted += self.evict_from(now_ms, None, Some(key)));
        evicted
    }

    /// What begins a chain on the SSD is removed from the log too, so that no restart brings it back, nor what
    /// follows it.
    fn evict_from(
        &mut self,
        now_ms: u64,
        slot: Option<SlotIndex>,
        on_ssd: Option<BlockKey>,
    ) -> Evicted {
        // What is read of it now would be appended after that: it counts as kept, for that is why it is written anew.
        let is_rewritten = on_ssd.is_some_and(|key| self.sinks.rewrites(key));
        let (dram, pinned) = slot.map_or((0, 0), |slot| self.cache.evict_subtree(slot));
        let block = on_ssd.and_then(|key| self.cache.ssd().get(key));
        let first = block.filter(|block| block.parent.is_none());
        let (gone, kept) = match on_ssd {
            Some(key) if is_rewritten => (Vec::new(), self.cache.ssd().subtree(key).len() as u32),
            Some(key) => self.cache.unstore_idle(key),
            None => (Vec::new(), 0),
        };
        let evicted = Evicted {
            dram_blocks: dram,
            ssd_blocks: as_u32(gone.len()),
            pinned_blocks: pinned,
            kept_blocks: kept,
        };
        for key in gone {
            match first {
                Some(SsdBlock { namespace, key: of, .. }) if of == key => {
                    self.erase_extent(now_ms, (namespace, key));
                }
                _ => self.forget_extent(key, false),
            }
        }
        evicted
    }
}

fn passes(block: &ListedBlock, filter: &ListFilter) -> bool {
    let is_kept = matches!(block.ssd, Some(Class::Context { .. }));
    let in_tier = match filter.tier {
        None => true,
        Some(Tier::Vram) => false,
        Some(Tier::Dram) => block.dram.is_some(),
        Some(Tier::Ssd) => block.ssd.is_some(),
    };
    in_tier
        && filter.kept.is_none_or(|kept| kept == is_kept)
        && filter.namespace.is_none_or(|namespace| namespace == block.namespace)
}
