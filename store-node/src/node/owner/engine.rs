//! The attached engine: taking it on, acting on what it says, and seeing to its end.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvasir_blocks::moving::tail;
use kvasir_blocks::{AbortReason, AttachEpoch, Busy, GrowError, ShareError};
use kvasir_proto::{BlockKey, FieldError, Share, Side, SlotIndex, SlotLayout, v1};
use v1::engine_to_node::Message as FromEngine;
use v1::node_to_engine::Message as ToEngine;

use super::{BATCH, Owner};
use crate::attach::handover::Token;
use crate::clock;
use crate::config::ARENA_SLOTS_MIN;
use crate::node::command::Refused;
use crate::node::line::{Broken, Presence};
use crate::node::session::Session;
use crate::node::steps::{Finished, PlannedPages};
use crate::pool::Pool;

/// Turns of the ring that an engine's last words are given, more than it holds: an engine that
/// said goodbye and talks on is not listened to for ever.
const GOODBYE_TURNS: usize = 1_024;
/// How long a token may be shown.
const PENDING_MS: u64 = 10_000;
/// Writes that one page may take; far more than any model has layers and tensors.
const RUNS_MAX: usize = 16_384;
/// Of the name of an instance's type.
const TYPE_BYTES_MAX: usize = 128;

/// What the blocks in the arena are: an engine that agrees finds them, another one clears them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheShape {
    pub layout: Arc<SlotLayout>,
    pub fingerprint: Vec<u8>,
    pub kv_dtype: String,
}

impl CacheShape {
    /// Stands for the model where slots were made for objects and no engine is.
    pub const OBJECTS: &[u8] = b"kvasir objects";
}

/// An engine that was given a token and has not shown it yet.
#[derive(Debug)]
pub struct PendingAttach {
    token: Token,
    instance: v1::InstanceDescription,
    shape: CacheShape,
    pool: Option<Arc<Pool>>,
    until_ms: u64,
}

impl From<FieldError> for Broken {
    fn from(error: FieldError) -> Self {
        Broken(error.to_string())
    }
}

impl Owner {
    pub(super) fn attach_begin(
        &mut self,
        request: v1::AttachRequest,
        pool: Option<Arc<Pool>>,
    ) -> Result<v1::AttachReply, Refused> {
        if self.drain_until_ms.is_some() {
            return Err(Refused::Unavailable("the node is draining".into()));
        }
        self.look_after_engine();
        if let Some(session) = &self.session {
            let (instance, process) = (&session.instance.instance_id, session.line.process_id());
            return Err(Refused::Unavailable(format!(
                "engine `{instance}` (process {process}) is attached to this node; it must end first"
            )));
        }
        let (shape, instance) = self.check_attach(request)?;
        if self.cache.as_ref() != Some(&shape) {
            self.check_unused()?;
        }
        let slots_total = self.arena.slots(shape.layout.slot_bytes());
        if pool.is_some() {
            let failed = |error| Refused::Unavailable(format!("no thread to copy pages: {error}"));
            self.start_page_copier().map_err(failed)?;
        }
        let pool_memory = pool.as_ref().and_then(|pool| pool.memory.shared());
        let pool_memory_bytes = pool_memory.map_or(0, |memory| memory.len() as u64);
        let token: Token = rand::random();
        self.attach_epoch = instance.attach_epoch;
        let until_ms = clock::now_ms() + PENDING_MS;
        self.pending_attach = Some(PendingAttach { token, instance, shape, pool, until_ms });
        Ok(v1::AttachReply {
            token: token.to_vec(),
            descriptor_socket: crate::attach_server::DESCRIPTORS_SOCKET.into(),
            attach_epoch: self.attach_epoch,
            slot_memory_bytes: self.arena.memory().len() as u64,
            slots_total,
            control_memory_bytes: crate::attach::control::CONTROL_BYTES as u64,
            pool_memory_bytes,
        })
    }

    fn check_attach(
        &self,
        request: v1::AttachRequest,
    ) -> Result<(CacheShape, v1::InstanceDescription), Refused> {
        let missing = |field| Refused::from(FieldError::Missing(field));
        let model = request.model.ok_or_else(|| missing("model"))?;
        let layout = request.layout.ok_or_else(|| missing("layout"))?;
        let layout = SlotLayout::try_from(&layout)
            .map_err(|error| Refused::Invalid(format!("the layout: {error}")))?;
        if request.instance_id.is_empty() {
            return Err(missing("instance_id"));
        }
        if request.instance_type.len() > TYPE_BYTES_MAX {
            let bytes = request.instance_type.len();
            let why = format!(
                "field `instance_type` has {bytes} bytes; at most {TYPE_BYTES_MAX} are taken"
            );
            return Err(Refused::Invalid(why));
        }
        if matches!(v1::Role::try_from(request.role), Err(_) | Ok(v1::Role::Unspecified)) {
            return Err(Refused::Invalid(format!("field `role` is {}", request.role)));
        }
        if layout.layers() > usize::from(u16::MAX) || layout.runs_per_page() > RUNS_MAX {
            let why = format!("the layout has {} layers; that is too many", layout.layers());
            return Err(Refused::Invalid(why));
        }
        let (slot_bytes, arena_bytes) = (layout.slot_bytes(), self.arena.memory().len() as u64);
        let slots = self.arena.slots(slot_bytes);
        if slots < ARENA_SLOTS_MIN {
            let wanted = slot_bytes.saturating_mul(ARENA_SLOTS_MIN.into()).next_multiple_of(4096);
            return Err(Refused::Precondition(format!(
                "`arena_bytes` is {arena_bytes}, which gives {slots} slots of {slot_bytes} bytes; \
                 an engine needs {ARENA_SLOTS_MIN} at least: set `arena_bytes` to {wanted} or more"
            )));
        }
        let shape = CacheShape {
            layout: Arc::new(layout),
            fingerprint: model.fingerprint.clone(),
            kv_dtype: model.kv_dtype.clone(),
        };
        let instance = v1::InstanceDescription {
            instance_id: request.instance_id,
            role: request.role,
            model: Some(model),
            grpc_address: request.grpc_address,
            attach_epoch: self.attach_epoch + 1,
            max_running: request.max_running,
            plays: v1::Role::Unspecified.into(),
            role_version: 0,
            instance_type: request.instance_type,
        };
        Ok((shape, instance))
    }

    /// Another layout or model clears the cache, which nobody may be using then.
    pub(super) fn check_unused(&self) -> Result<(), Refused> {
        let counts = self.blocks.counts();
        if !self.clients.is_empty() {
            return Err(Refused::Unavailable(
                "clients have objects here in slots of another size; they must close first".into(),
            ));
        }
        // Those of administrators end with what they hold.
        if counts.shares == 0 && counts.pins == self.blocks.admin_pinned_blocks() {
            return Ok(());
        }
        Err(Refused::Unavailable(format!(
            "the engine has another model, KV type or layout than the blocks here, and {} shares \
             and {} pins are still open; try again when they have ended",
            counts.shares, counts.pins
        )))
    }

    pub(super) fn attach_complete(&mut self, token: Token, connection: UnixStream) {
        let now_ms = clock::now_ms();
        let pending = self.pending_attach.take_if(|pending| {
            pending.token == token && pending.until_ms >= now_ms && self.session.is_none()
        });
        let Some(PendingAttach { instance, shape, pool, .. }) = pending else {
            tracing::warn!("an engine showed a token that is not valid (any more)");
            return;
        };
        if let Err(busy) = self.take_shape(&shape) {
            tracing::warn!(%busy, "the cache is in use; the engine must attach again");
            return;
        }
        let mut memory = vec![self.arena.memory().fd()];
        memory.extend(pool.as_ref().and_then(|pool| pool.memory.fd()));
        match Session::open(instance, &shape.layout, &memory, connection) {
            Ok(session) => {
                let instance = &session.instance;
                tracing::info!(
                    instance = instance.instance_id,
                    epoch = instance.attach_epoch,
                    process = session.line.process_id(),
                    slots = self.blocks.counts().slots,
                    pool_pages = pool.as_ref().map_or(0, |pool| pool.layout.pages()),
                    "engine attached"
                );
                self.metrics.attach_epoch.set(instance.attach_epoch.into());
                let epoch = session.line.epoch();
                self.session = Some(session);
                if let Some(pool) = pool {
                    self.open_pool(epoch, pool);
                }
                self.report.dirty = true;
            }
            Err(error) => tracing::warn!(%error, "the engine could not be attached"),
        }
    }

    /// Slots are to be so: others are cleared, when nobody uses them.
    pub(super) fn take_shape(&mut self, shape: &CacheShape) -> Result<(), Busy> {
        if self.cache.as_ref() == Some(shape) {
            return Ok(());
        }
        let counts = self.blocks.counts();
        if !self.clients.is_empty() {
            return Err(Busy { shares: counts.shares, pins: counts.pins });
        }
        let slots = self.arena.slots(shape.layout.slot_bytes());
        self.blocks.reset(slots, shape.layout.block_tokens())?;
        self.clients.generations = None;
        self.cache = Some(shape.clone());
        self.shape_tiers(&shape.layout);
        Ok(())
    }

    /// Everything the engine has said, and how far it is. Answers whether there was anything.
    pub(super) fn take_engine(&mut self) -> bool {
        let Some(session) = &self.session else { return false };
        if session.line.is_expelled() {
            return false;
        }
        let mut worked = false;
        for _ in 0..BATCH {
            match self.take_engine_one() {
                Ok(true) => worked = true,
                Ok(false) => break,
                Err(broken) => {
                    self.expel(&broken);
                    worked = true;
                    break;
                }
            }
        }
        if worked {
            self.run_actions();
        }
        worked
    }

    /// One message, after the progress that was made before it was sent.
    fn take_engine_one(&mut self) -> Result<bool, Broken> {
        let Some(session) = &mut self.session else { return Ok(false) };
        let message = session.next()?;
        let mut finished = Vec::new();
        if let Some(progress) = session.progress() {
            session
                .steps
                .progress(progress, &mut finished)
                .map_err(|error| Broken(error.to_string()))?;
        }
        let worked = message.is_some() || !finished.is_empty();
        let epoch = session.line.epoch();
        for layers in finished {
            self.layers_finished(&layers);
        }
        if let Some(message) = message {
            self.take_engine_message(epoch, message)?;
            self.run_actions();
        }
        Ok(worked)
    }

    /// Layers are written: hash them, push them, and commit what is whole.
    fn layers_finished(&mut self, finished: &Finished) {
        let Finished { share, step, ref pages, ref layers } = *finished;
        // The share may have ended meanwhile.
        let Some(leg) = self.legs.get_mut(&share) else { return };
        let layout = Arc::clone(leg.pages.layout());
        let prompt_pages = pages.start..pages.end.min(leg.pages.count());
        let arena = &self.arena;
        let mut whole = Vec::new();
        for page in prompt_pages {
            let hash = |slot: SlotIndex, run| arena.checksum(&layout, slot, run);
            if share.side != Side::Prefill || page < leg.cached_pages {
                continue;
            }
            let known = leg.pages.finish_layers(page, step, layers.clone(), hash);
            if known && leg.pages.is_whole(page) && page < leg.keyed_pages {
                whole.push((page, leg.pages.checksums(page).to_vec()));
            }
        }
        self.pump(share);
        for (page, checksums) in whole {
            if let Err(error) = self.blocks.commit_page(share, page, checksums) {
                tracing::debug!(%share, page, %error, "a page was not committed");
            }
        }
    }

    fn take_engine_message(
        &mut self,
        epoch: AttachEpoch,
        message: FromEngine,
    ) -> Result<(), Broken> {
        let now_ms = clock::now_ms();
        match message {
            FromEngine::Bind(v1::Bind { tx, side }) => {
                self.bind(Share::from_wire(tx, side)?, epoch);
            }
            FromEngine::Plan(plan) => self.plan(epoch, plan)?,
            FromEngine::Grow(grow) => self.grow(epoch, &grow)?,
            FromEngine::Commit(commit) => self.commit_blocks(epoch, &commit)?,
            FromEngine::FinishPrefill(v1::FinishPrefill { tx, tail }) => {
                let share = Share { tx: tx.try_into()?, side: Side::Prefill };
                if tail.len() > tail::ENGINE_BYTES_MAX {
                    return Err(Broken(format!("a tail of {} bytes", tail.len())));
                }
                if self.is_its_own(epoch, share)? {
                    self.finish_prefill(share, tail);
                }
            }
            FromEngine::Release(v1::Release { tx, side }) => {
                let share = Share::from_wire(tx, side)?;
                if self.is_its_own(epoch, share)? {
                    self.released(share);
                }
            }
            FromEngine::Get(v1::GetBlocks { handle, keys, memory_only }) => {
                let keys = BlockKey::list(&keys)?;
                let got = self.blocks.get(epoch, handle, &keys);
                let slots = got.unwrap_or_else(|error| {
                    tracing::warn!(handle, %error, "the engine's lookup was refused");
                    Vec::new()
                });
                // What it has not found it may find when it looks again.
                let rising_blocks = match !memory_only && slots.len() < keys.len() {
                    true => self.read_ahead(None, &keys).map_or(0, |ahead| ahead.rising_blocks),
                    false => 0,
                };
                let slots = slots.iter().map(|slot| slot.0).collect();
                self.tell_engine(ToEngine::Got(v1::GotBlocks { handle, slots, rising_blocks }));
            }
            FromEngine::HoldPages(hold) => self.hold_pages(&hold)?,
            FromEngine::DropPages(drop) => self.drop_pages(&drop)?,
            FromEngine::FillPages(fill) => self.fill_pages(epoch, &fill)?,
            FromEngine::Unpin(v1::UnpinBlocks { handle }) => {
                self.blocks.unpin(epoch, handle);
            }
            FromEngine::Alive(v1::Alive { shares }) => {
                for v1::TxShareRef { tx, side } in shares {
                    let share = Share::from_wire(tx, side)?;
                    if let Some(lease_ms) = self.legs.get(&share).map(|leg| leg.lease_ms) {
                        // It may be ending; the engine is told by other means.
                        let _ = self.blocks.renew(now_ms, share, lease_ms);
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether an open share is this engine's. False when it has ended, which the engine need not
    /// know yet.
    pub(super) fn is_its_own(&self, epoch: AttachEpoch, share: Share) -> Result<bool, Broken> {
        match self.blocks.share(share) {
            None => Ok(false),
            Some(view) if view.bound_to == Some(epoch) => Ok(true),
            Some(_) => Err(Broken(format!("share {share} is not bound to it"))),
        }
    }

    fn plan(&mut self, epoch: AttachEpoch, plan: v1::StepPlan) -> Result<(), Broken> {
        let mut planned = Vec::new();
        for v1::StepPages { tx, side, first_page, page_count } in plan.pages {
            let share = Share::from_wire(tx, side)?;
            if !self.is_its_own(epoch, share)? {
                continue;
            }
            let Some(leg) = self.legs.get(&share) else { continue };
            let (writable, end) = (leg.writable_pages(), first_page.checked_add(page_count));
            let Some(end) = end.filter(|end| *end <= writable.end && first_page >= writable.start)
            else {
                return Err(Broken(format!(
                    "it plans to write {page_count} pages from page {first_page} of {share}; \
                     pages {writable:?} are its own"
                )));
            };
            planned.push(PlannedPages { share, pages: first_page..end });
        }
        let session = self.session.as_mut().ok_or_else(|| Broken("it is gone".into()))?;
        session.steps.plan(plan.step, planned).map_err(|error| Broken(error.to_string()))
    }

    fn grow(&mut self, epoch: AttachEpoch, grow: &v1::Grow) -> Result<(), Broken> {
        let share = Share::from_wire(grow.tx, grow.side)?;
        let slots = if self.is_its_own(epoch, share)? {
            match self.blocks.grow(share, grow.page_count) {
                Ok(slots) => slots,
                Err(GrowError::NoSpace { available, wanted }) => {
                    tracing::debug!(%share, available, wanted, "no room to grow");
                    Vec::new()
                }
                Err(GrowError::Share(ShareError::Refused(why))) => {
                    return Err(Broken(format!("it grows {share}: {why}")));
                }
                // Ending; a stop is on its way.
                Err(GrowError::Share(_)) => Vec::new(),
            }
        } else {
            Vec::new()
        };
        if let Some(leg) = self.legs.get_mut(&share) {
            leg.grown_pages += slots.len() as u32;
        }
        let slots = slots.iter().map(|slot| slot.0).collect();
        self.tell_engine(ToEngine::Grown(v1::Grown { tx: grow.tx, side: grow.side, slots }));
        Ok(())
    }

    /// Blocks that the answer filled; their keys come from the engine.
    fn commit_blocks(
        &mut self,
        epoch: AttachEpoch,
        commit: &v1::CommitBlocks,
    ) -> Result<(), Broken> {
        let share = Share::from_wire(commit.tx, commit.side)?;
        let keys = BlockKey::list(&commit.keys)?;
        if !self.is_its_own(epoch, share)? {
            return Ok(());
        }
        let Some(leg) = self.legs.get(&share) else { return Ok(()) };
        let (writable, layout) = (leg.writable_pages(), Arc::clone(leg.pages.layout()));
        let count = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        let end = commit.first_page.checked_add(count);
        if commit.first_page < writable.start || end.is_none_or(|end| end > writable.end) {
            let first = commit.first_page;
            return Err(Broken(format!(
                "it commits {count} pages from page {first} of {share}; pages {writable:?} are \
                 its own"
            )));
        }
        for (page, key) in (commit.first_page..).zip(keys) {
            let Some((slot, _)) = self.blocks.page_slot(share, page) else { break };
            let checksums = self.arena.checksums(&layout, slot);
            if let Err(error) = self.blocks.commit_extra(share, page, key, checksums) {
                tracing::debug!(%share, page, %error, "a block of the answer was not committed");
                break;
            }
        }
        Ok(())
    }

    fn released(&mut self, share: Share) {
        self.engine_stops.let_go(share);
        if let Some(leg) = self.legs.get(&share)
            && !leg.finished
        {
            // It gives up: the rest of the prompt will never be there to push.
            self.halt_push(share);
        }
        if let Err(error) = self.blocks.release(clock::now_ms(), share) {
            tracing::debug!(%share, %error, "released after its end");
        }
    }

    pub(super) fn stop_engine(&mut self, share: Share, epoch: AttachEpoch, reason: &AbortReason) {
        if self.stop_client(share) {
            return;
        }
        let listens =
            |session: &Session| session.line.epoch() == epoch && !session.line.is_expelled();
        if self.session.as_ref().is_some_and(listens) {
            tracing::info!(%share, %reason, "the engine is told to stop");
            let progress = self.session.as_ref().and_then(Session::progress);
            self.engine_stops.told(share, clock::now_ms(), progress);
            self.tell_engine(ToEngine::Stop(v1::Stop {
                tx: Some(share.tx.into()),
                side: share.side.to_wire(),
                reason: reason.to_string(),
            }));
        }
    }

    /// An engine that does not let go of what it was told to stop may write there for ever, and
    /// whatever else it is given it will hold as well: it is expelled.
    pub(super) fn look_after_engine_stops(&mut self, now_ms: u64) {
        let progress = self.session.as_ref().and_then(Session::progress);
        let timeout_ms = self.config.engine_stop_timeout_ms;
        if let Some(share) = self.engine_stops.late(now_ms, timeout_ms, progress) {
            self.expel(&Broken(format!(
                "it was told to stop {share} and has not released it in {timeout_ms} ms; its slots \
                 come free when its process ends"
            )));
        }
    }

    pub(super) fn tell_engine(&mut self, message: ToEngine) {
        if let Some(session) = &mut self.session
            && let Err(broken) = session.send(message)
        {
            self.expel(&broken);
        }
    }

    /// Answers whether messages still wait for room.
    pub(super) fn flush_engine(&mut self) -> bool {
        let Some(session) = &mut self.session else { return false };
        match session.line.flush() {
            Ok(()) => session.line.has_outbox(),
            Err(broken) => {
                self.expel(&broken);
                false
            }
        }
    }

    /// The engine broke the protocol: it is not listened to any more. What it can still write is
    /// quarantined until its end.
    fn expel(&mut self, broken: &Broken) {
        let Some(session) = self.session.as_mut().filter(|session| !session.line.is_expelled())
        else {
            return;
        };
        let instance = &session.instance.instance_id;
        tracing::error!(instance, epoch = session.line.epoch().0, reason = %broken, "engine detached");
        self.metrics.expelled.inc();
        self.leave_engine();
    }

    fn leave_engine(&mut self) {
        let Some(session) = &mut self.session else { return };
        let epoch = session.line.epoch();
        session.line.expel();
        self.engine_stops.clear();
        self.close_pool();
        let bound = |share: &Share| {
            self.blocks.share(*share).is_some_and(|view| view.bound_to == Some(epoch))
        };
        let shares: Vec<Share> = self.blocks.shares().filter(bound).collect();
        for share in shares {
            self.blocks.abort(clock::now_ms(), share, AbortReason::EngineGone);
        }
        self.report.dirty = true;
    }

    /// Looks whether the engine is still there.
    pub(super) fn look_after_engine(&mut self) {
        let now_ms = clock::now_ms();
        self.pending_attach.take_if(|pending| pending.until_ms < now_ms);
        let Some(session) = &self.session else { return };
        let epoch = session.line.epoch();
        match session.line.presence() {
            Presence::There => {}
            Presence::Unreachable if session.line.is_expelled() => {}
            Presence::Unreachable => {
                tracing::warn!(
                    epoch = epoch.0,
                    "the engine has closed its connection and lives on"
                );
                self.leave_engine();
            }
            Presence::Gone => {
                // What it said before its end still counts; it cannot have said more than the ring
                // holds.
                for _ in 0..GOODBYE_TURNS {
                    let listens = self.session.as_ref().is_some_and(|s| !s.line.is_expelled());
                    if !listens || !self.take_engine() {
                        break;
                    }
                }
                tracing::info!(epoch = epoch.0, "engine gone");
                self.close_pool();
                self.blocks.engine_gone(clock::now_ms(), epoch);
                self.session = None;
                self.engine_stops.clear();
                self.report.dirty = true;
            }
        }
        self.run_actions();
    }
}
