//! What the engine's own pool has to do with its shares: pages that it computes there, and pages that are filled from them.

use kvasir_proto::{BlockKey, Share, Side, SlotIndex};

use super::{Engine, Open, World};

/// A page of a share, its slot, and the key of its block, if it is full.
pub(super) type Writable = (Share, u32, SlotIndex, Option<BlockKey>);

impl World {
    /// Of one of the engine's shares of the prefill side: the next pages of its prompt that the engine is to write,
    /// which it now does not.
    pub(crate) fn take_writable(&mut self, nth: usize, pages_max: usize) -> Option<Vec<Writable>> {
        let epoch = self.epoch;
        let of_engine = |open: &&mut Open| {
            let prompt_pages = open.allocated.pages.len() as u32;
            open.engine == Engine::Working(epoch)
                && open.request.share.side == Side::Prefill
                && open.writable.first().is_some_and(|page| *page < prompt_pages)
        };
        let count = self.open.values_mut().filter(of_engine).count();
        let open = self.open.values_mut().filter(of_engine).nth(nth % count.max(1))?;
        let (share, prompt_pages) = (open.request.share, open.allocated.pages.len() as u32);
        if open.aborted || pages_max == 0 {
            return None;
        }
        let page = |at: u32| {
            let key = open.request.keys.get(at as usize).copied();
            (share, at, open.slots[at as usize], key)
        };
        let first = open.writable[0];
        let next = open.writable.iter().zip(first..prompt_pages).take(pages_max);
        let next = next.take_while(|(page, at)| *page == at).map(|(_, at)| at);
        let pages: Vec<_> = next.map(page).collect();
        open.writable.drain(..pages.len());
        self.pool.computed_total += pages.len() as u64;
        Some(pages)
    }

    /// Layers have come from the pool: as if the engine had written them.
    pub(crate) fn carried(&mut self, share: Share, page: u32, is_whole: bool) {
        let open = self.open.get_mut(&share).expect("an open share");
        let key = open.request.keys.get(page as usize).copied();
        if is_whole {
            open.written.push(page);
        }
        if let Some(key) = key.filter(|_| is_whole) {
            self.commit(share, page, key);
        }
    }

    pub(crate) fn parent(&self, key: BlockKey) -> Option<BlockKey> {
        self.parents[&key]
    }

    /// Of the nth of the engine's shares: itself, and the blocks of its prompt.
    pub(crate) fn prompt_of_engine(&self, nth: usize) -> Option<(Share, Vec<BlockKey>)> {
        let of_engine = |open: &&Open| matches!(open.engine, Engine::Working(epoch) | Engine::Waiting(epoch) if epoch == self.epoch);
        let open = self.open.values().filter(of_engine).nth(nth)?;
        Some((open.request.share, open.request.keys.clone()))
    }
}
