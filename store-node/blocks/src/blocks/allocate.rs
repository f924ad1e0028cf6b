//! Reserving and pinning, whole or not at all: a plan that changes nothing, then its execution.

use std::ops::Range;

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{Share, Side, SlotIndex};

use super::Blocks;
use crate::api::{Allocate, AllocateError, Allocated, Outcome, ShareError};
use crate::share::{Hold, Page, ShareRecord};
use crate::share_state::{Phase, ShareState};

/// What an allocation will take.
#[derive(Debug)]
pub(super) struct Plan {
    /// Committed blocks to pin.
    held: Vec<SlotIndex>,
    /// Pages in all, the held ones among them.
    pages: u32,
    /// Pages to read from the SSD, right after the held ones.
    rising: u32,
    targets: Range<u32>,
    has_remote_writer: bool,
}

impl Plan {
    pub(super) fn pages(&self) -> u32 {
        self.pages
    }
}

impl Blocks {
    /// Reserves and pins for a share, whole or not at all. The same request again gives the same
    /// answer and changes nothing.
    ///
    /// What follows the committed prefix on the SSD is read into slots and counts as held, except on
    /// the decode side (what it lacks is on its way anyhow), where a fetch brings more, and where the
    /// request says that it is to be left there.
    ///
    /// - Prefill: pins the committed prefix but leaves at least one token to compute into a private
    ///   slot; reserves every other page. With `fetch_until_block` beyond what is held, the pages
    ///   between are the targets of a fetch.
    /// - Decode: pins the committed prefix, reserves the rest; all of the rest is target.
    /// - Source: pins the committed prefix of `keys`, reserves nothing.
    ///
    /// # Errors
    /// [`AllocateError`]; then nothing was taken.
    pub fn allocate(
        &mut self,
        now_ms: u64,
        request: &Allocate,
    ) -> Result<Allocated, AllocateError> {
        self.forget_until(now_ms);
        if let Some(record) = self.shares.get(&request.share) {
            return repeated(record, request);
        }
        match self.finished.get(request.share).or(self.tombstones.get(request.share)) {
            Some(Outcome::Released) => return Err(AllocateError::Finished),
            Some(Outcome::Aborted) => return Err(AllocateError::Tombstoned),
            None => {}
        }
        let plan = self.plan(now_ms, request).inspect_err(|error| {
            let no_space = matches!(error, AllocateError::NoSpace { .. });
            self.totals.refused_no_space += u64::from(no_space);
        })?;
        Ok(self.take(now_ms, request, plan))
    }

    /// The share may hold what it holds for `lease_ms` from now (at most `lease_max_ms`). Never
    /// shortens.
    ///
    /// # Errors
    /// [`ShareError`] when it is not alive here any more.
    pub fn renew(&mut self, now_ms: u64, share: Share, lease_ms: u64) -> Result<(), ShareError> {
        self.open(share)?;
        let until_ms = now_ms.saturating_add(lease_ms.min(self.options.lease_max_ms));
        if let Some(record) = self.shares.get_mut(&share)
            && record.lease_until_ms < until_ms
        {
            self.leases.remove(&(record.lease_until_ms, share));
            if !mutated(Mutation::RenewedLeaseNeverExpires) {
                self.leases.insert((until_ms, share));
            }
            record.lease_until_ms = until_ms;
        }
        Ok(())
    }

    pub(super) fn plan(&self, now_ms: u64, request: &Allocate) -> Result<Plan, AllocateError> {
        self.check(request)?;
        let plan = match request.share.side {
            Side::Source => self.plan_source(now_ms, request),
            Side::Prefill => self.plan_prefill(now_ms, request)?,
            Side::Decode => self.plan_decode(request),
        };
        let slots = self.cache.slots().len();
        if plan.pages > slots {
            return Err(AllocateError::TooLarge { wanted: plan.pages, slots });
        }
        let wanted = plan.pages - plan.held.len() as u32;
        let available = self.cache.available_beside(&plan.held);
        if wanted > available {
            return Err(AllocateError::NoSpace { available, wanted });
        }
        Ok(plan)
    }

    /// What must hold of any request before it is looked at.
    fn check(&self, request: &Allocate) -> Result<(), AllocateError> {
        if self.shares.len() >= self.options.shares_max {
            return Err(AllocateError::TooManyShares(self.shares.len()));
        }
        if self.block_tokens == 0 {
            return Err(AllocateError::BadRequest("the node has no block size yet"));
        }
        let is_refused = self.is_draining() && !mutated(Mutation::DrainingNodeAcceptsWork);
        if is_refused && request.share.side != Side::Source {
            return Err(AllocateError::Draining);
        }
        if request.lease_ms == 0 || request.lease_ms > self.options.lease_max_ms {
            return Err(AllocateError::BadRequest("the lease is zero or longer than allowed"));
        }
        if request.share.side == Side::Source {
            return Ok(());
        }
        if request.prompt_tokens == 0 {
            return Err(AllocateError::BadRequest("the prompt is empty"));
        }
        if request.keys.len() as u64 != u64::from(request.prompt_tokens / self.block_tokens) {
            return Err(AllocateError::BadRequest("there must be one key for each full block"));
        }
        if request.share.side == Side::Decode && !request.has_remote_writer {
            return Err(AllocateError::BadRequest("the decode side needs a remote writer"));
        }
        Ok(())
    }

    fn plan_source(&self, now_ms: u64, request: &Allocate) -> Plan {
        let held = self.cache.index().prefix(Some(request.namespace), &request.keys);
        let rising = self.could_rise(now_ms, request.namespace, &request.keys, held.len());
        let rising = rising.min(self.cache.available_beside(&held));
        let pages = held.len() as u32 + rising;
        Plan { held, pages, rising, targets: 0..0, has_remote_writer: false }
    }

    fn plan_prefill(&self, now_ms: u64, request: &Allocate) -> Result<Plan, AllocateError> {
        // At least one token is computed, and never into a committed or fetched page.
        let reuse_max = (request.prompt_tokens - 1) / self.block_tokens;
        let keys = &request.keys[..request.keys.len().min(reuse_max as usize)];
        let held = self.cache.index().prefix(Some(request.namespace), keys);
        let first = held.len() as u32;
        let targets = first..request.fetch_until_block.min(reuse_max).max(first);
        let rising = match request.leaves_ssd {
            true => 0,
            false => self.could_rise(now_ms, request.namespace, keys, held.len()),
        };
        // One of the two: what comes from elsewhere could not follow blocks that never rise.
        let (rising, targets) = match targets.len() as u32 > rising {
            true => (0, targets),
            false => (rising, first..first),
        };
        let has_remote_writer = !targets.is_empty();
        if has_remote_writer && !request.has_remote_writer {
            return Err(AllocateError::BadRequest("a fetch needs a remote writer"));
        }
        let pages = request.prompt_tokens.div_ceil(self.block_tokens);
        Ok(Plan { held, pages, rising, targets, has_remote_writer })
    }

    fn plan_decode(&self, request: &Allocate) -> Plan {
        let held = self.cache.index().prefix(Some(request.namespace), &request.keys);
        let pages = request.prompt_tokens.div_ceil(self.block_tokens);
        let targets = held.len() as u32..pages;
        Plan { held, pages, rising: 0, targets, has_remote_writer: true }
    }

    pub(super) fn take(&mut self, now_ms: u64, request: &Allocate, plan: Plan) -> Allocated {
        let share = request.share;
        // Pinned before anything is evicted, so that room is not made of what is reused.
        self.note_prefetched_use(&plan.held);
        plan.held.iter().for_each(|&slot| self.cache.pin(slot));
        let cached_blocks = plan.held.len() as u32;
        let mut pages: Vec<Page> =
            plan.held.iter().map(|&slot| Page { slot, hold: Hold::Pinned }).collect();
        let held_blocks = cached_blocks + plan.rising;
        for page in cached_blocks..held_blocks {
            let key = request.keys[page as usize];
            let risen = self.rise_page(now_ms, (share, request.namespace), page, key);
            pages.push(risen.expect("the plan found it below memory, and room for it"));
        }
        self.cache.make_room(plan.pages - held_blocks);
        for _ in held_blocks..plan.pages {
            let slot = self.cache.reserve(share).expect("the plan counted the available slots");
            pages.push(Page { slot, hold: Hold::Private });
        }
        let lease_until_ms = now_ms.saturating_add(request.lease_ms);
        let record = ShareRecord {
            request: request.clone(),
            state: ShareState::new(
                plan.has_remote_writer,
                share.side == Side::Prefill,
                plan.rising > 0,
            ),
            held_blocks,
            cached_blocks,
            rising: cached_blocks..held_blocks,
            prompt_pages: plan.pages,
            pages,
            targets: plan.targets,
            imm: plan.has_remote_writer.then(|| self.imms.take()),
            lease_until_ms,
            aborted: None,
            of_objects: false,
            is_hint: false,
            is_fill: false,
        };
        let allocated = record.allocated();
        self.leases.insert((lease_until_ms, share));
        self.shares.insert(share, record);
        allocated
    }
}

/// The answer when the share is here already.
fn repeated(record: &ShareRecord, request: &Allocate) -> Result<Allocated, AllocateError> {
    match record.state.phase {
        Phase::Aborted => Err(AllocateError::Tombstoned),
        Phase::Released => Err(AllocateError::Finished),
        Phase::Live if record.request == *request => Ok(record.allocated()),
        Phase::Live => {
            Err(AllocateError::BadRequest("the share was already allocated with other parameters"))
        }
    }
}
