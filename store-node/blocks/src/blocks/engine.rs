//! What the local engine asks for: taking a share over, growing it, committing what it wrote, and
//! pins of its own.

use kvasir_proto::{BlockKey, Share, Side, SlotIndex};

use super::{Blocks, Totals};
use crate::api::{AttachEpoch, BindError, Binding, Commit, GetError, GrowError, ShareError};
use crate::cache::Cache;
use crate::index::Entry;
use crate::share::{Hold, Page, ShareRecord};
use crate::share_state::{Engine, Phase, Refusal, ShareEvent};

impl Blocks {
    /// The engine takes the share over.
    ///
    /// # Errors
    /// [`BindError::Gone`] and [`BindError::Taken`].
    pub fn bind(&mut self, share: Share, epoch: AttachEpoch) -> Result<Binding, BindError> {
        let record = self.shares.get_mut(&share).ok_or(BindError::Gone)?;
        if share.side == Side::Source {
            return Err(BindError::Gone);
        }
        record.state.on(ShareEvent::Bind(epoch)).map_err(|refusal| match refusal {
            Refusal::Taken => BindError::Taken,
            _ => BindError::Gone,
        })?;
        match record.state.engine {
            Engine::Waiting(_) => Ok(Binding::Waiting),
            _ => Ok(Binding::Bound(record.bound(self.block_tokens))),
        }
    }

    /// Adds private pages to the end of a bound share, evicting if it must. Whole or nothing.
    ///
    /// # Errors
    /// [`GrowError::NoSpace`] when nothing was taken.
    pub fn grow(&mut self, share: Share, pages: u32) -> Result<Vec<SlotIndex>, GrowError> {
        must_be_bound(self.open(share)?)?;
        let available = self.cache.available();
        if pages > available {
            self.totals.refused_no_space += 1;
            return Err(GrowError::NoSpace { available, wanted: pages });
        }
        self.cache.make_room(pages);
        let reserve = |_| self.cache.reserve(share).expect("there are that many");
        let slots: Vec<SlotIndex> = (0..pages).map(reserve).collect();
        if let Some(record) = self.shares.get_mut(&share) {
            record.pages.extend(slots.iter().map(|&slot| Page { slot, hold: Hold::Private }));
        }
        Ok(slots)
    }

    /// Seals a full page of the prompt, whose key came with `allocate`; all its layers are written.
    /// Its checksum is kept with it as it is. Doing it again changes nothing.
    ///
    /// # Errors
    /// [`ShareError`] when it is not the share's to commit: no such page, not full, or a remote
    /// writer may still write it.
    pub fn commit_page(
        &mut self,
        share: Share,
        page: u32,
        checksum: u64,
    ) -> Result<Commit, ShareError> {
        let record = self.open(share)?;
        must_be_bound_or_released(record)?;
        let key = record.key_of_prompt(page).ok_or(ShareError::Refused("the page has no key"))?;
        if self.carries.lacks((share, page)) {
            return Err(ShareError::Refused("layers of the page are not in its slot yet"));
        }
        let is_object = record.of_objects;
        let namespace = record.request.namespace;
        if is_object
            && record.page(page).is_some_and(|page| page.hold == Hold::Private)
            && self.cache.index().find(key).is_none()
            && self.is_on_ssd(namespace, key)
        {
            return Ok(Commit::OnSsd);
        }
        let sealed = self.seal_page(share, page, key, checksum);
        if is_object && sealed == Ok(Commit::Indexed) {
            self.unseen.put(key);
        }
        sealed
    }

    /// Seals a page that the answer filled, under a key that the engine computed.
    ///
    /// # Errors
    /// As [`Self::commit_page`], and when the key is in the index under another parent or
    /// namespace.
    pub fn commit_extra(
        &mut self,
        share: Share,
        page: u32,
        key: BlockKey,
        checksum: u64,
    ) -> Result<Commit, ShareError> {
        let record = self.open(share)?;
        must_be_bound_or_released(record)?;
        if record.key_of_prompt(page).is_some_and(|known| known != key) {
            return Err(ShareError::Refused("the page has another key"));
        }
        if self.carries.pages.contains_key(&(share, page)) {
            return Err(ShareError::Refused("the page is computed in the engine's pool"));
        }
        self.seal_page(share, page, key, checksum)
    }

    /// Pins the longest committed prefix of a chain for an engine, under a name it chose. An empty
    /// answer holds nothing.
    ///
    /// It names no namespace because the keys do: a chain begins at the hash of its namespace, so
    /// whoever can name a key of it knows the namespace (or reads this node's events, which are not
    /// for tenants). And the blocks of one chain are of one namespace: none is sealed after a block
    /// of another one.
    ///
    /// # Errors
    /// [`GetError`]; then nothing was pinned.
    pub fn get(
        &mut self,
        epoch: AttachEpoch,
        handle: u64,
        keys: &[BlockKey],
    ) -> Result<Vec<SlotIndex>, GetError> {
        let slots = self.cache.index().prefix(None, keys);
        self.gets.check(epoch, handle, slots.len())?;
        if !slots.is_empty() {
            self.note_prefetched_use(&slots);
            slots.iter().for_each(|&slot| self.cache.pin(slot));
            self.gets.insert(epoch, handle, slots.clone());
        }
        Ok(slots)
    }

    /// Drops the pins of a handle; false when there are none.
    pub fn unpin(&mut self, epoch: AttachEpoch, handle: u64) -> bool {
        let Some(slots) = self.gets.remove(epoch, handle) else { return false };
        slots.iter().for_each(|&slot| self.cache.unpin(slot));
        true
    }

    pub(super) fn seal_page(
        &mut self,
        share: Share,
        page: u32,
        key: BlockKey,
        checksum: u64,
    ) -> Result<Commit, ShareError> {
        let record = self.shares.get_mut(&share).ok_or(ShareError::Unknown)?;
        if record.may_be_written_remotely(page) {
            return Err(Refusal::MayStillWrite.into());
        }
        let held = record.page(page).ok_or(ShareError::Refused("the share has no such page"))?;
        if record.request.is_ephemeral && held.hold == Hold::Private {
            return Ok(Commit::Ephemeral);
        }
        let unreached = self.ssd_unreached.get(key);
        let of_other = unreached.is_some_and(|block| block.namespace != record.request.namespace);
        match held.hold {
            Hold::Pinned => sealed_before(&self.cache, held.slot, key),
            Hold::Duplicate { kept } => Ok(Commit::Duplicate { kept }),
            Hold::Private if of_other => {
                Err(ShareError::Refused("the key belongs to another block"))
            }
            Hold::Private => seal(&mut self.cache, &mut self.totals, record, page, key, checksum),
        }
    }
}

fn must_be_bound(record: &ShareRecord) -> Result<(), ShareError> {
    match record.state.engine {
        Engine::Bound(_) => Ok(()),
        _ => Err(ShareError::Refused("no engine has bound the share")),
    }
}

/// The last commits of an engine may come after its release, while pushes hold the pages.
fn must_be_bound_or_released(record: &ShareRecord) -> Result<(), ShareError> {
    if record.state.phase == Phase::Released { Ok(()) } else { must_be_bound(record) }
}

fn sealed_before(cache: &Cache, slot: SlotIndex, key: BlockKey) -> Result<Commit, ShareError> {
    match cache.index().entry(slot) {
        Some(entry) if entry.key == key => Ok(Commit::Indexed),
        _ => Err(ShareError::Refused("the page has another key")),
    }
}

fn seal(
    cache: &mut Cache,
    totals: &mut Totals,
    record: &mut ShareRecord,
    page: u32,
    key: BlockKey,
    checksum: u64,
) -> Result<Commit, ShareError> {
    // What an open share has pinned is in the index: had it been dropped, the share were aborted.
    let parent = match page.checked_sub(1) {
        _ if record.of_objects => None,
        None => None,
        Some(before) => match record.page(before).and_then(Page::pinned) {
            Some(parent) => Some(parent),
            None => return Ok(Commit::NoParent),
        },
    };
    let namespace = record.request.namespace;
    let at = &mut record.pages[page as usize];
    if let Some(kept) = cache.index().find(key) {
        let entry = cache.index().entry(kept);
        if entry.is_none_or(|entry| entry.parent != parent || entry.namespace != namespace) {
            return Err(ShareError::Refused("the key belongs to another block"));
        }
        cache.pin(kept);
        at.hold = Hold::Duplicate { kept };
        totals.duplicates += 1;
        return Ok(Commit::Duplicate { kept });
    }
    // It would take that one's place there, with what was promised of it.
    if cache.ssd().get(key).is_some_and(|block| block.namespace != namespace) {
        return Err(ShareError::Refused("the key belongs to another block"));
    }
    cache.seal(at.slot, Entry { key, namespace, parent, checksum });
    at.hold = Hold::Pinned;
    totals.committed += 1;
    Ok(Commit::Indexed)
}
