//! The attached engines: taking them on, hearing all of them, and seeing to their ends. What one says is acted on in
//! `engine`.
//!
//! All of them share one arena and with it one shape of slots. Everything else is each engine's own: its line and
//! control memory, its steps, what it was told to stop, its pool and its role; so that what ends one of them ends nothing
//! of another.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvasir_attach::handover::Token;
use kvasir_blocks::{AbortReason, AttachEpoch, Busy};
use kvasir_proto::{FieldError, Share, SlotLayout, v1};
use kvasir_transfer::doorbell;
use v1::node_to_engine::Message as ToEngine;

use super::Owner;
use crate::clock;
use crate::config::ARENA_SLOTS_MIN;
use crate::node::command::Refused;
use crate::node::line::{Broken, LineError, Presence};
use crate::node::session::Session;
use crate::node::watch::Watch;
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
pub(super) struct CacheShape {
    pub layout: Arc<SlotLayout>,
    pub fingerprint: Vec<u8>,
    pub kv_dtype: String,
}

impl CacheShape {
    /// Stands for the model where slots were made for objects and no engine is.
    pub(super) const OBJECTS: &[u8] = b"kvasir objects";

    /// In words, what is not the same here and there.
    fn differs_in(&self, other: &CacheShape) -> &'static str {
        match () {
            () if self.fingerprint != other.fingerprint => "model",
            () if self.kv_dtype != other.kv_dtype => "KV type",
            () => "layout of blocks",
        }
    }
}

/// All engines, and those that are about to come.
#[derive(Debug, Default)]
pub(super) struct Engines {
    sessions: BTreeMap<AttachEpoch, Session>,
    pending: Vec<Pending>,
    watch: Option<Watch>,
    last_epoch: u32,
}

/// An engine that was given a token and has not shown it yet.
#[derive(Debug)]
struct Pending {
    token: Token,
    instance: v1::InstanceDescription,
    shape: CacheShape,
    pool: Option<Arc<Pool>>,
    until_ms: u64,
}

impl Engines {
    /// Those that are listened to.
    pub(super) fn heard(&self) -> impl Iterator<Item = &Session> {
        self.sessions.values().filter(|session| !session.line.is_expelled())
    }

    /// One that is listened to.
    pub(super) fn get(&self, epoch: AttachEpoch) -> Option<&Session> {
        self.sessions.get(&epoch).filter(|session| !session.line.is_expelled())
    }

    pub(super) fn get_mut(&mut self, epoch: AttachEpoch) -> Option<&mut Session> {
        self.sessions.get_mut(&epoch).filter(|session| !session.line.is_expelled())
    }

    /// None is attached, not even one that is not listened to any more.
    pub(super) fn is_empty(&self) -> bool {
        self.sessions.is_empty()
    }

    /// The one that attached next after this one: all of them in turn, while any of them may end.
    fn after(&self, epoch: Option<AttachEpoch>) -> Option<AttachEpoch> {
        let from = epoch.map_or(Unbounded, Excluded);
        self.sessions.range((from, Unbounded)).next().map(|(epoch, _)| *epoch)
    }

    /// A share is over, or its engine has let go of it.
    pub(super) fn let_go(&mut self, share: Share) {
        self.sessions.values_mut().for_each(|session| session.stops.let_go(share));
    }

    pub(super) fn have_pools(&self) -> bool {
        self.sessions.values().any(|session| session.pool.is_some())
    }

    /// Ready when an engine rings; and when one may have gone.
    pub(super) fn fds(&self) -> Option<[BorrowedFd<'_>; 2]> {
        self.watch.as_ref().map(Watch::fds)
    }

    pub(super) fn announce_sleep(&self) {
        for session in self.sessions.values() {
            doorbell::announce_sleep(session.line.control().node_sleeps());
        }
    }

    pub(super) fn awake(&self) {
        for session in self.sessions.values() {
            session.line.clear_bell();
            doorbell::awake(session.line.control().node_sleeps());
        }
    }

    fn insert(&mut self, session: Session) -> Result<(), LineError> {
        let watch = match self.watch.take() {
            Some(watch) => watch,
            None => Watch::new()?,
        };
        self.watch.insert(watch).add(&session.line)?;
        self.sessions.insert(session.line.epoch(), session);
        Ok(())
    }
}

impl Owner {
    pub(super) fn attach_begin(
        &mut self,
        request: v1::AttachRequest,
        pool: Option<Arc<Pool>>,
    ) -> Result<v1::AttachReply, Refused> {
        let (shape, instance) = self.attach_check(request)?;
        let slots_total = self.arena.slots(shape.layout.slot_bytes());
        if pool.is_some() {
            let failed = |error| {
                Refused::Unavailable(format!("cannot start the thread that copies pages: {error}"))
            };
            self.start_page_copier().map_err(failed)?;
        }
        let pool_memory = pool.as_ref().and_then(|pool| pool.memory.shared());
        let pool_memory_bytes = pool_memory.map_or(0, |memory| memory.len() as u64);
        let token: Token = rand::random();
        let attach_epoch = instance.attach_epoch;
        self.engines.last_epoch = attach_epoch;
        let until_ms = clock::now_ms() + PENDING_MS;
        self.engines.pending.push(Pending { token, instance, shape, pool, until_ms });
        Ok(v1::AttachReply {
            token: token.to_vec(),
            descriptor_socket: crate::attach_server::DESCRIPTORS_SOCKET.into(),
            attach_epoch,
            slot_memory_bytes: self.arena.memory().len() as u64,
            slots_total,
            control_memory_bytes: kvasir_attach::control::CONTROL_BYTES as u64,
            pool_memory_bytes,
        })
    }

    /// Whether it could be attached now, and as what: nothing is taken yet.
    pub(super) fn attach_check(
        &mut self,
        request: v1::AttachRequest,
    ) -> Result<(CacheShape, v1::InstanceDescription), Refused> {
        if self.drain_until_ms.is_some() {
            return Err(Refused::Unavailable("the node is draining".into()));
        }
        self.look_after_engines();
        self.admit(&request.instance_id)?;
        let (shape, instance) = self.check_attach(request)?;
        self.check_alike(&shape)?;
        if self.cache.as_ref() != Some(&shape) {
            self.check_unused()?;
        }
        Ok((shape, instance))
    }

    /// Whether there is a place for one more engine of this name.
    fn admit(&mut self, instance_id: &str) -> Result<(), Refused> {
        // Whoever begins anew has lost its token, or never had it.
        self.engines.pending.retain(|pending| pending.instance.instance_id != instance_id);
        let named = |session: &&Session| session.instance.instance_id == instance_id;
        if let Some(session) = self.engines.sessions.values().find(named) {
            let process = session.line.process_id();
            return Err(Refused::Unavailable(format!(
                "engine `{instance_id}` (process {process}) is attached to this node; stop it \
                 first, or set another `instance_id`"
            )));
        }
        let taken = self.engines.sessions.len() + self.engines.pending.len();
        let engines_max = self.config.engines_max;
        if taken >= engines_max as usize {
            return Err(Refused::Unavailable(format!(
                "{taken} engines are attached to this node, and `engines_max` is {engines_max}: \
                 stop one of them, or raise `engines_max`"
            )));
        }
        Ok(())
    }

    /// All engines share one arena and the blocks in it.
    fn check_alike(&self, shape: &CacheShape) -> Result<(), Refused> {
        // What an attached one has is what the node has.
        let attached = self.engines.sessions.values().next().zip(self.cache.as_ref());
        if let Some((session, has)) = attached.filter(|(_, has)| *has != shape) {
            let (other, what) = (&session.instance.instance_id, has.differs_in(shape));
            return Err(Refused::Precondition(format!(
                "engine `{other}` is attached to this node, and this one has another {what}: \
                 engines share a node's cache only if they agree in it; use another node, or stop \
                 that engine first"
            )));
        }
        let other = self.engines.pending.iter().find(|pending| pending.shape != *shape);
        other.map_or(Ok(()), |pending| {
            let (other, what) = (&pending.instance.instance_id, pending.shape.differs_in(shape));
            Err(Refused::Unavailable(format!(
                "engine `{other}` is attaching to this node, and this one has another {what}"
            )))
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
            .map_err(|error| Refused::Invalid(format!("field `layout`: {error}")))?;
        if request.instance_id.is_empty() {
            return Err(missing("instance_id"));
        }
        if request.instance_type.len() > TYPE_BYTES_MAX {
            let bytes = request.instance_type.len();
            let why = format!(
                "field `instance_type` has {bytes} bytes; it must have at most {TYPE_BYTES_MAX}"
            );
            return Err(Refused::Invalid(why));
        }
        if matches!(v1::Role::try_from(request.role), Err(_) | Ok(v1::Role::Unspecified)) {
            return Err(Refused::Invalid(format!(
                "field `role` has the unknown value {}",
                request.role
            )));
        }
        if layout.layers() > usize::from(u16::MAX) || layout.runs_per_page() > RUNS_MAX {
            let why = format!("the layout has too many layers ({}) or runs", layout.layers());
            return Err(Refused::Invalid(why));
        }
        let (slot_bytes, dram_bytes) = (layout.slot_bytes(), self.arena.memory().len() as u64);
        let slots = self.arena.slots(slot_bytes);
        if slots < ARENA_SLOTS_MIN {
            let wanted = slot_bytes.saturating_mul(ARENA_SLOTS_MIN.into()).next_multiple_of(4096);
            return Err(Refused::Precondition(format!(
                "`dram_bytes` is {dram_bytes}, which gives {slots} slots of {slot_bytes} bytes; an \
                 engine needs at least {ARENA_SLOTS_MIN}: set `dram_bytes` to {wanted} or more"
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
            engine_address: request.engine_address,
            attach_epoch: self.engines.last_epoch + 1,
            running_requests_max: request.running_requests_max,
            current_role: v1::Role::Unspecified.into(),
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
                "clients hold objects on this node in slots of another size; close the clients \
                 first"
                    .into(),
            ));
        }
        // Those of administrators end with what they hold.
        if counts.shares == 0 && counts.pins == self.blocks.admin_pinned_blocks() {
            return Ok(());
        }
        Err(Refused::Unavailable(format!(
            "the engine's model, KV type or layout differs from the blocks of this node, and {} \
             shares and {} pins are still open; try again when they have ended",
            counts.shares, counts.pins
        )))
    }

    pub(super) fn attach_complete(&mut self, token: Token, connection: UnixStream) {
        let now_ms = clock::now_ms();
        let is_its = |pending: &Pending| pending.token == token && pending.until_ms >= now_ms;
        let Some(at) = self.engines.pending.iter().position(is_its) else {
            tracing::warn!("a process presented an invalid or expired token; it must attach again");
            return;
        };
        let pending = self.engines.pending.swap_remove(at);
        let instance = pending.instance.instance_id.clone();
        if let Err(why) = self.take_engine_on(pending, connection) {
            tracing::warn!(
                instance,
                reason = why,
                "the store node cannot attach the engine; the engine must try again"
            );
        }
    }

    fn take_engine_on(&mut self, pending: Pending, connection: UnixStream) -> Result<(), String> {
        let Pending { instance, shape, pool, .. } = pending;
        self.take_shape(&shape).map_err(|busy| busy.to_string())?;
        let mut memory = vec![self.arena.memory().fd()];
        memory.extend(pool.as_ref().and_then(|pool| pool.memory.fd()));
        let session = Session::open(instance, &shape.layout, &memory, connection);
        let session = session.map_err(|error| error.to_string())?;
        let (epoch, process) = (session.line.epoch(), session.line.process_id());
        tracing::info!(
            instance = session.instance.instance_id,
            epoch = epoch.0,
            process_id = process,
            slots = self.blocks.counts().slots,
            pool_pages = pool.as_ref().map_or(0, |pool| pool.layout.pages()),
            "engine attached"
        );
        self.engines.insert(session).map_err(|error| error.to_string())?;
        self.metrics.attach_epoch.set(epoch.0.into());
        if let Some(pool) = pool {
            self.open_pool(epoch, pool);
        }
        self.report.dirty = true;
        Ok(())
    }

    /// Slots are to be so: others are cleared, when nobody uses them.
    pub(super) fn take_shape(&mut self, shape: &CacheShape) -> Result<(), Busy> {
        if self.cache.as_ref() == Some(shape) {
            return Ok(());
        }
        let counts = self.blocks.counts();
        if !self.clients.is_empty() || !self.engines.is_empty() {
            return Err(Busy { shares: counts.shares, pins: counts.pins });
        }
        let slots = self.arena.slots(shape.layout.slot_bytes());
        self.blocks.reset(slots, shape.layout.block_tokens())?;
        self.clients.generations = None;
        self.cache = Some(shape.clone());
        self.shape_tiers(&shape.layout);
        Ok(())
    }

    /// Everything that engines have said, and how far they are. Answers whether there was anything.
    pub(super) fn take_engines(&mut self) -> bool {
        let (mut worked, mut last) = (false, None);
        while let Some(epoch) = self.engines.after(last) {
            worked |= self.take_engine(epoch);
            last = Some(epoch);
        }
        worked
    }

    /// An engine that does not let go of what it was told to stop may write there for ever, and
    /// whatever else it is given it will hold as well: it is expelled.
    pub(super) fn look_after_engine_stops(&mut self, now_ms: u64) {
        let timeout_ms = self.config.engine_stop_timeout_ms;
        let mut last = None;
        while let Some(epoch) = self.engines.after(last) {
            last = Some(epoch);
            let Some(session) = self.engines.get_mut(epoch) else { continue };
            let progress = session.progress();
            if let Some(share) = session.stops.late(now_ms, timeout_ms, progress) {
                let why = format!(
                    "the engine was told to stop {share} and did not release it within \
                     {timeout_ms} ms; its slots are freed when its process exits"
                );
                self.expel(epoch, &Broken(why));
            }
        }
    }

    pub(super) fn tell_engine(&mut self, epoch: AttachEpoch, message: ToEngine) {
        if let Some(session) = self.engines.get_mut(epoch)
            && let Err(broken) = session.send(message)
        {
            self.expel(epoch, &broken);
        }
    }

    /// What had no room in an engine's ring goes on. Answers whether something still has none.
    pub(super) fn flush_engines(&mut self) -> bool {
        let (mut waits, mut last) = (false, None);
        while let Some(epoch) = self.engines.after(last) {
            last = Some(epoch);
            let Some(session) = self.engines.get_mut(epoch) else { continue };
            if !session.line.has_outbox() {
                continue;
            }
            match session.line.flush() {
                Ok(()) => waits |= session.line.has_outbox(),
                Err(broken) => self.expel(epoch, &broken),
            }
        }
        waits
    }

    /// The engine broke the protocol: it is not listened to any more. What it can still write is
    /// quarantined until its end. The others go on.
    pub(super) fn expel(&mut self, epoch: AttachEpoch, broken: &Broken) {
        let Some(session) = self.engines.get(epoch) else { return };
        let instance = &session.instance.instance_id;
        tracing::error!(instance, epoch = epoch.0, reason = %broken, "engine detached");
        self.metrics.expelled.with_label_values(&["engine"]).inc();
        self.leave_engine(epoch);
    }

    fn leave_engine(&mut self, epoch: AttachEpoch) {
        self.close_pool(epoch);
        let Engines { sessions, watch, .. } = &mut self.engines;
        let Some(session) = sessions.get_mut(&epoch) else { return };
        if let Some(watch) = watch {
            watch.forget_connection(&session.line);
        }
        session.line.expel();
        session.stops.clear();
        let bound = |share: &Share| {
            self.blocks.share(*share).is_some_and(|view| view.bound_to == Some(epoch))
        };
        let shares: Vec<Share> = self.blocks.shares().filter(bound).collect();
        for share in shares {
            self.blocks.abort(clock::now_ms(), share, AbortReason::EngineGone);
        }
        self.report.dirty = true;
    }

    /// Looks whether the engines are still there.
    pub(super) fn look_after_engines(&mut self) {
        let now_ms = clock::now_ms();
        self.engines.pending.retain(|pending| pending.until_ms >= now_ms);
        let mut last = None;
        while let Some(epoch) = self.engines.after(last) {
            self.look_after_engine(epoch);
            last = Some(epoch);
        }
    }

    /// Looks whether one of them is still there.
    pub(super) fn look_after_engine(&mut self, epoch: AttachEpoch) {
        let Some(session) = self.engines.sessions.get(&epoch) else { return };
        match session.line.presence() {
            Presence::There => {}
            Presence::Unreachable if session.line.is_expelled() => {}
            Presence::Unreachable => {
                tracing::warn!(
                    instance = session.instance.instance_id,
                    epoch = epoch.0,
                    "the engine closed its connection, but its process is still running; the store node detaches it"
                );
                self.leave_engine(epoch);
            }
            Presence::Gone => {
                // What it said before its end still counts; it cannot have said more than the ring
                // holds.
                for _ in 0..GOODBYE_TURNS {
                    if !self.take_engine(epoch) {
                        break;
                    }
                }
                tracing::info!(epoch = epoch.0, "engine exited");
                self.close_pool(epoch);
                self.blocks.engine_gone(clock::now_ms(), epoch);
                self.engines.sessions.remove(&epoch);
                self.report.dirty = true;
            }
        }
        self.run_actions();
    }
}
