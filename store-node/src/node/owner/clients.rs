//! Clients of objects: taking them on, hearing all of them, and seeing to their ends. What they ask for
//! is in `objects`.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvasir_attach::control::CONTROL_BYTES;
use kvasir_attach::handover::Token;
use kvasir_blocks::{AbortReason, AttachEpoch};
use kvasir_proto::{Namespace, Share, Tenant, TxId, objects, v1};
use kvasir_transfer::doorbell;

use super::engines::CacheShape;
use super::{BATCH, Owner};
use crate::clock;
use crate::config::ARENA_SLOTS_MIN;
use crate::node::SERIALS_OF_CLIENTS;
use crate::node::client::{Client, OWN_NUMBERS};
use crate::node::command::Refused;
use crate::node::generations::Generations;
use crate::node::line::{Broken, Line, Presence};
use crate::node::watch::Watch;

/// Clients at once, and tokens given to others.
const CLIENTS_MAX: usize = 64;
/// How long a token may be shown.
const PENDING_MS: u64 = 10_000;
/// Turns of the ring that a client's last words are given, more than it holds.
const GOODBYE_TURNS: usize = 1_024;
/// The attach epochs of clients; those of engines are below.
const FIRST_EPOCH: u32 = 1 << 31;

/// All clients, and what is under way for them.
#[derive(Debug)]
pub(super) struct Clients {
    pub(super) list: Vec<Client>,
    pending: Vec<Pending>,
    watch: Option<Watch>,
    pub(super) generations: Option<Generations>,
    next_epoch: u32,
    next_serial: u64,
    next_number: u64,
    /// What each share of objects is for.
    pub(super) shares: BTreeMap<Share, ShareOf>,
    /// What waits for objects to be durable.
    pub(super) keeps: BTreeMap<u64, KeepOf>,
    /// What waits until no restart brings objects back that were removed.
    pub(super) removals: BTreeMap<u64, RemovalOf>,
    /// Blocks that were found rotten, when it was last looked whether clients hold some of them.
    dropped: u64,
}

/// A share is a client's: of a put, or of a get (the number of its request) that reads the SSD.
#[derive(Debug, Clone, Copy)]
pub(super) struct ShareOf {
    pub(super) epoch: AttachEpoch,
    pub(super) request: u64,
}

/// An object that is being kept, by its commit and its position there.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeepOf {
    pub(super) epoch: AttachEpoch,
    pub(super) request: u64,
    pub(super) position: usize,
}

/// Objects that were removed, so many by one request.
#[derive(Debug, Clone, Copy)]
pub(super) struct RemovalOf {
    pub(super) epoch: AttachEpoch,
    pub(super) request: u64,
    pub(super) count: u32,
}

/// A client that was given a token and has not shown it yet.
#[derive(Debug)]
struct Pending {
    token: Token,
    epoch: u32,
    name: String,
    namespace: Namespace,
    tenant: Option<Tenant>,
    shape: CacheShape,
    until_ms: u64,
}

impl Clients {
    pub(super) fn new() -> Self {
        Clients {
            list: Vec::new(),
            pending: Vec::new(),
            watch: None,
            generations: None,
            next_epoch: FIRST_EPOCH,
            next_serial: SERIALS_OF_CLIENTS,
            next_number: OWN_NUMBERS,
            shares: BTreeMap::new(),
            keeps: BTreeMap::new(),
            removals: BTreeMap::new(),
            dropped: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn at(&self, epoch: AttachEpoch) -> Option<usize> {
        self.list.iter().position(|client| client.line.epoch() == epoch)
    }

    /// A transaction that this node begins itself.
    pub(super) fn next_tx(&mut self, incarnation: u64) -> TxId {
        self.next_serial += 1;
        TxId { conductor_incarnation: incarnation, serial: self.next_serial }
    }

    pub(super) fn next_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Ready when a client rings; and when one may have gone.
    pub(super) fn fds(&self) -> Option<[BorrowedFd<'_>; 2]> {
        self.watch.as_ref().map(Watch::fds)
    }

    pub(super) fn announce_sleep(&self) {
        for client in &self.list {
            doorbell::announce_sleep(client.line.control().node_sleeps());
        }
    }

    pub(super) fn awake(&self) {
        for client in &self.list {
            client.line.clear_bell();
            doorbell::awake(client.line.control().node_sleeps());
        }
    }
}

impl Owner {
    pub(super) fn client_open(
        &mut self,
        request: v1::OpenRequest,
    ) -> Result<v1::OpenReply, Refused> {
        if self.drain_until_ms.is_some() {
            return Err(Refused::Unavailable("the node is draining".into()));
        }
        self.look_after_clients(clock::now_ms());
        let now_ms = clock::now_ms();
        self.clients.pending.retain(|pending| pending.until_ms >= now_ms);
        if self.clients.list.len() + self.clients.pending.len() >= CLIENTS_MAX {
            let why = format!("this node already has {CLIENTS_MAX} clients, the maximum");
            return Err(Refused::Unavailable(why));
        }
        let shape = self.shape_for(request.object_bytes_max)?;
        if self.cache.as_ref() != Some(&shape) {
            self.check_unused()?;
        }
        let layout = Arc::clone(&shape.layout);
        let slots_total = self.arena.slots(layout.slot_bytes());
        let namespace = objects::namespace(&request.tenant, &request.namespace);
        let named = !request.tenant.is_empty();
        let tenant = named.then(|| Tenant(kvasir_transfer::checksum(request.tenant.as_bytes())));
        let (token, epoch): (Token, u32) = (rand::random(), self.clients.next_epoch);
        self.clients.next_epoch = epoch.checked_add(1).unwrap_or(FIRST_EPOCH);
        self.clients.pending.push(Pending {
            token,
            epoch,
            name: request.client,
            namespace,
            tenant,
            shape,
            until_ms: now_ms + PENDING_MS,
        });
        Ok(v1::OpenReply {
            token: token.to_vec(),
            descriptor_socket: crate::attach_server::DESCRIPTORS_SOCKET.into(),
            attach_epoch: epoch,
            slot_memory_bytes: self.arena.memory().len() as u64,
            control_memory_bytes: CONTROL_BYTES as u64,
            generations_bytes: 4 * u64::from(slots_total),
            slots_total,
            layout: Some((&*layout).into()),
            namespace: namespace.0.to_vec(),
            objects_max: super::objects::OBJECTS_MAX as u32,
            keys_max: super::objects::KEYS_MAX as u32,
            lease_max_ms: self.config.lease_max_ms,
        })
    }

    /// Slots as they are, or as they must be for objects of this size.
    fn shape_for(&self, object_bytes_max: u64) -> Result<CacheShape, Refused> {
        let as_it_is = self.cache.as_ref();
        let pending = self.clients.pending.last().map(|pending| &pending.shape);
        if let Some(shape) = as_it_is.or(pending) {
            let Some(capacity) = objects::capacity(&shape.layout) else {
                return Err(Refused::Precondition(
                    "the runs of this node's slots leave gaps, so a slot cannot hold a contiguous \
                     object: use another node"
                        .into(),
                ));
            };
            if object_bytes_max <= capacity {
                return Ok(shape.clone());
            }
            if shape.fingerprint != CacheShape::OBJECTS || self.check_unused().is_err() {
                return Err(Refused::Precondition(format!(
                    "objects of {object_bytes_max} bytes do not fit the slots of this node, which \
                     hold {capacity} bytes; the slots can grow only while no engine and no client \
                     uses them"
                )));
            }
        }
        if object_bytes_max == 0 {
            return Err(Refused::Precondition(
                "the size of this node's slots is not set yet: set `object_bytes_max`, or attach \
                 an engine first"
                    .into(),
            ));
        }
        let too_large =
            || Refused::Invalid(format!("objects of {object_bytes_max} bytes are too large"));
        let layout = objects::layout(object_bytes_max).ok_or_else(too_large)?;
        let (slot_bytes, dram_bytes) = (layout.slot_bytes(), self.arena.memory().len() as u64);
        if self.arena.slots(slot_bytes) < ARENA_SLOTS_MIN {
            let wanted = slot_bytes.saturating_mul(ARENA_SLOTS_MIN.into());
            return Err(Refused::Precondition(format!(
                "`dram_bytes` is {dram_bytes}, too small for {ARENA_SLOTS_MIN} objects of \
                 {object_bytes_max} bytes: set it to {} or more",
                wanted.next_multiple_of(4096)
            )));
        }
        Ok(CacheShape {
            layout: Arc::new(layout),
            fingerprint: CacheShape::OBJECTS.to_vec(),
            kv_dtype: String::new(),
        })
    }

    /// The second half of an opening, when the token is a client's.
    pub(super) fn client_complete(
        &mut self,
        token: Token,
        connection: UnixStream,
    ) -> Option<UnixStream> {
        let now_ms = clock::now_ms();
        let is_its = |pending: &Pending| pending.token == token && pending.until_ms >= now_ms;
        let Some(at) = self.clients.pending.iter().position(is_its) else {
            return Some(connection);
        };
        let pending = self.clients.pending.swap_remove(at);
        let name = pending.name.clone();
        if let Err(why) = self.take_client(pending, connection) {
            tracing::warn!(
                client = name,
                reason = why,
                "the store node cannot accept an object client; the client must try again"
            );
        }
        self.metrics.clients.set(self.clients.list.len() as i64);
        None
    }

    fn take_client(&mut self, pending: Pending, connection: UnixStream) -> Result<(), String> {
        let Pending { epoch, name, namespace, tenant, shape, .. } = pending;
        self.take_shape(&shape).map_err(|busy| busy.to_string())?;
        if self.clients.generations.is_none() {
            let slots = self.blocks.counts().slots;
            let made = Generations::create(&self.blocks, slots);
            self.clients.generations = Some(made.map_err(|error| error.to_string())?);
            self.blocks.note_freed();
        }
        if self.clients.watch.is_none() {
            self.clients.watch = Some(Watch::new().map_err(|error| error.to_string())?);
        }
        let Clients { generations: Some(generations), watch: Some(watch), .. } = &self.clients
        else {
            return Err("a bug: the generations or the watch are missing".into());
        };
        let memory = [self.arena.memory().fd(), generations.fd()];
        let line = Line::open(epoch, &memory, connection).map_err(|error| error.to_string())?;
        watch.add(&line).map_err(|error| error.to_string())?;
        tracing::info!(
            client = name,
            epoch,
            process_id = line.process_id(),
            "object client attached"
        );
        self.clients.list.push(Client::new(name, namespace, tenant, line));
        Ok(())
    }

    /// Everything that clients have said. Answers whether there was anything.
    pub(super) fn take_clients(&mut self) -> bool {
        let mut worked = false;
        for at in 0..self.clients.list.len() {
            worked |= self.take_client_words(at);
        }
        worked
    }

    fn take_client_words(&mut self, at: usize) -> bool {
        let mut worked = false;
        for _ in 0..BATCH {
            let Some(client) = self.clients.list.get_mut(at) else { break };
            match client.next() {
                Ok(None) => break,
                Ok(Some((request, message))) => {
                    worked = true;
                    if let Err(broken) = self.take_client_message(at, request, message) {
                        self.expel_client(at, &broken);
                    }
                    self.run_actions();
                }
                Err(broken) => {
                    worked = true;
                    self.expel_client(at, &broken);
                }
            }
        }
        worked
    }

    /// What had no room in a client's ring goes on. Answers whether something still has none.
    pub(super) fn flush_clients(&mut self) -> bool {
        let mut waits = false;
        for at in 0..self.clients.list.len() {
            let line = &mut self.clients.list[at].line;
            if !line.has_outbox() {
                continue;
            }
            match line.flush() {
                Ok(()) => waits |= line.has_outbox(),
                Err(broken) => self.expel_client(at, &broken),
            }
        }
        waits
    }

    /// The client broke the protocol, or does not let go: it is not listened to any more. What it can
    /// still write or read stays as it is until its end.
    pub(super) fn expel_client(&mut self, at: usize, broken: &Broken) {
        let Some(client) = self.clients.list.get(at).filter(|c| !c.line.is_expelled()) else {
            return;
        };
        tracing::error!(client = client.name, epoch = client.line.epoch().0, reason = %broken, "object client detached");
        self.metrics.expelled.with_label_values(&["object_client"]).inc();
        self.leave_client(at);
    }

    fn leave_client(&mut self, at: usize) {
        let client = &mut self.clients.list[at];
        if let Some(watch) = &self.clients.watch {
            watch.forget_connection(&client.line);
        }
        client.line.expel();
        client.stopping.clear();
        let shares: Vec<Share> = client.puts.values().filter_map(|put| put.share).collect();
        for share in shares {
            self.blocks.abort(clock::now_ms(), share, AbortReason::EngineGone);
        }
        self.end_client_waits(at);
    }

    /// Looks whether clients are still there, and whether they have let go of what they were told to.
    pub(super) fn look_after_clients(&mut self, now_ms: u64) {
        for at in (0..self.clients.list.len()).rev() {
            let client = &self.clients.list[at];
            let timeout_ms = self.config.engine_stop_timeout_ms;
            let late = client.stopping.values().any(|told_ms| now_ms >= told_ms + timeout_ms);
            match client.line.presence() {
                Presence::There if late => self.expel_client(
                    at,
                    &Broken(format!(
                        "the client did not commit or drop a reservation within {timeout_ms} ms \
                         after its lease expired"
                    )),
                ),
                Presence::There => {}
                Presence::Unreachable if client.line.is_expelled() => {}
                Presence::Unreachable => {
                    tracing::warn!(
                        client = client.name,
                        "the object client closed its connection, but its process is still running; the store node detaches it"
                    );
                    self.leave_client(at);
                }
                Presence::Gone => self.client_gone(at),
            }
        }
        let dropped = self.blocks.counts().dropped_total;
        if std::mem::replace(&mut self.clients.dropped, dropped) != dropped {
            self.let_go_of_dropped();
        }
        self.run_actions();
    }

    fn client_gone(&mut self, at: usize) {
        // What it said before its end still counts; it cannot have said more than the ring holds.
        for _ in 0..GOODBYE_TURNS {
            if !self.take_client_words(at) {
                break;
            }
        }
        self.end_client_waits(at);
        let now_ms = clock::now_ms();
        let client = self.clients.list.swap_remove(at);
        let epoch = client.line.epoch();
        tracing::info!(client = client.name, epoch = epoch.0, "object client exited");
        for held in client.ephemeral.values() {
            self.blocks.end_object(now_ms, &held.object);
        }
        self.blocks.engine_gone(now_ms, epoch);
        self.metrics.clients.set(self.clients.list.len() as i64);
    }

    /// Nobody waits any more for what this client had asked for.
    fn end_client_waits(&mut self, at: usize) {
        let client = &mut self.clients.list[at];
        let epoch = client.line.epoch();
        client.commits.clear();
        let gets = std::mem::take(&mut client.gets);
        self.clients.keeps.retain(|_, keep| keep.epoch != epoch);
        self.clients.removals.retain(|_, removal| removal.epoch != epoch);
        let now_ms = clock::now_ms();
        for share in gets.into_values().flat_map(|get| get.rising.into_iter().chain(get.risen)) {
            self.clients.shares.remove(&share);
            let _ = self.blocks.release(now_ms, share);
        }
    }

    /// Slots have come free: whoever was told of them with their generation sees that. To be called before
    /// anybody is told of a slot to write there, and once nothing more is to be done.
    pub(super) fn publish_freed(&mut self) {
        while let Some((slot, generation)) = self.blocks.poll_freed() {
            if let Some(generations) = &self.clients.generations {
                generations.set(slot, generation);
            }
        }
    }
}
