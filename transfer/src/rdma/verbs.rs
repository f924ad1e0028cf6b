//! A card driven through libibverbs. A pipe is a set of reliable queue pairs: one for messages, and those
//! for writes. Writes land by WRITE, and with an immediate by WRITE_WITH_IMM, which uses up a receive at the
//! peer; a peer that has none ready makes the device wait and try again for as long as the peer lives.
//!
//! Completion queues are shared by all queue pairs; another one is made only when none has room. They are
//! polled, and armed only before the worker sleeps.

mod choose;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_verbs::{
    AckTimeout, AddressHandle, Buffer, CompletionChannel, CompletionQueue, CompletionQueues,
    ConnectOptions, Context, DeviceEvent, LinkLayer, LocalPath, LocalSlice, MemoryRegion,
    Operation, Payload, ProtectionDomain, Psn, QpNum, QueuePairAddress, QueuePairOptions, RKey,
    RcQueuePair, Receive, RegionOptions, RemoteAddress, Request, Side, Template, TemplateRequest,
    Traffic, Wake, WcStatus, WorkCompletion, WorkTag,
};

use kvasir_transfer_core::signal::Ordering;

pub(crate) use choose::devices;
use choose::{Chosen, choose};

use super::config::{Handshake, VerbsConfig};
use super::datagrams::{self, Datagrams};
use super::handshake::{Handshakes, Heard, Ticket, Token, lanes_of};
use super::nic::{
    Bounds, Card, CardError, CardMemory, Event, Failure, From, MESSAGES, Opened, PipeId, Place,
    Post, To,
};
use super::seek::Seek;
use super::wire::PIECE_HEADER_BYTES;
use crate::memory::SharedMemory;

/// Pieces of messages that a target takes before this process has looked at them.
const MESSAGE_RECEIVES: u32 = 64;
/// Of one piece with its header: 256 KiB for each peer.
const RECEIVE_BYTES: usize = 4096;
/// Of one completion queue: what devices have at least, nearly.
const COMPLETIONS: u32 = 16_384;
const POLL_BATCH: usize = 64;
/// Polls of one completion queue in a row, so that others have their turn.
const POLLS_MAX: usize = 4;

// SAFETY: the mapping lives as long as the value, and its place and length never change. Nobody hands out
// slices of it but for calls whose callers promise that the bytes are at rest.
unsafe impl kvasir_transfer_verbs::Memory for SharedMemory {
    fn as_ptr(&self) -> *mut u8 {
        SharedMemory::as_ptr(self)
    }

    fn bytes(&self) -> usize {
        self.len()
    }
}

/// The registrations that the worker has not taken over yet, and what it takes to make them.
#[derive(Debug)]
struct Registry {
    pd: ProtectionDomain,
    options: RegionOptions,
    fresh: Mutex<BTreeMap<u64, MemoryRegion>>,
}

impl Registry {
    fn fresh(&self) -> MutexGuard<'_, BTreeMap<u64, MemoryRegion>> {
        self.fresh.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CardMemory for Registry {
    fn register(&self, key: u64, memory: &Arc<SharedMemory>) -> Result<Place, CardError> {
        let registered = self.pd.register(
            Arc::clone(memory) as Arc<dyn kvasir_transfer_verbs::Memory>,
            0..memory.len(),
            self.options,
        );
        let region =
            registered.map_err(|error| CardError::because("cannot register memory", error))?;
        let place = place_of(&region);
        self.fresh().insert(key, region);
        Ok(place)
    }
}

fn place_of(region: &MemoryRegion) -> Place {
    Place { address: region.address(), key: region.rkey().0.into() }
}

/// Opens the devices, each with its name.
///
/// # Errors
/// A sentence for the person who runs the host. One that was named must be there.
pub(crate) fn open(config: &VerbsConfig) -> Result<Vec<(String, Opened)>, CardError> {
    let chosen = choose(&config.devices)?;
    // What one card tells does not say that what another one brought is in place.
    let may_reorder = config.relaxed_ordering && chosen.len() == 1;
    let open = |device: Chosen| {
        let name = device.info.name.clone();
        Ok((name, open_one(config, may_reorder, device)?))
    };
    chosen.into_iter().map(open).collect()
}

/// Makes what all pipes of a device share.
fn open_one(
    config: &VerbsConfig,
    may_reorder: bool,
    Chosen { context, info, path }: Chosen,
) -> Result<Opened, CardError> {
    let failed = |what: &'static str| {
        let device = context.name().to_owned();
        move |error| CardError::because(format!("cannot create {what} of {device}"), error)
    };
    let pd = ProtectionDomain::new(&context).map_err(failed("a protection domain"))?;
    let can = pd.probe().map_err(failed("a trial region"))?;
    let channel = CompletionChannel::new(&context).map_err(failed("a completion channel"))?;
    let options = RegionOptions {
        local_write: true,
        remote_write: true,
        remote_read: false,
        relaxed_ordering: may_reorder && can.relaxed_ordering,
    };
    let registry = Arc::new(Registry { pd: pd.clone(), options, fresh: Mutex::default() });
    let depth_max = info.limits.work_requests_max.saturating_sub(1).max(2);
    let port = info.ports.iter().find(|port| port.port == path.port);
    let post_bytes = port.map_or(1 << 20, |port| u64::from(port.message_bytes_max));
    let wait = Duration::from_millis(config.ack_timeout_ms);
    let connect = ConnectOptions {
        ack_timeout: AckTimeout::at_least(wait)
            .ok_or_else(|| CardError::new("`verbs.ack_timeout_ms` is too long"))?,
        retries: config.retries,
        // Nothing is READ here.
        reads_out: 0,
        reads_in: 0,
        traffic: Traffic {
            class: config.traffic_class,
            service_level: config.service_level,
            ..Traffic::default()
        },
        ..ConnectOptions::default()
    };
    tracing::info!(device = context.name(), gid = %path.gid, "the transfer engine opened an RDMA device");
    let card = VerbsCard {
        bounds: Bounds {
            lanes: 1 + config.write_queue_pairs,
            inline_bytes: config.inline_bytes.min(can.inline_bytes_max).into(),
            post_bytes: post_bytes.clamp(4096, 1 << 30),
            piece_bytes: RECEIVE_BYTES - PIECE_HEADER_BYTES,
            is_relaxed: options.relaxed_ordering,
            order: Ordering::RcQueuePair,
            tells_refusals: true,
        },
        send_depth: config.send_depth.min(depth_max),
        receive_depth: config.receive_depth.min(depth_max),
        completions: COMPLETIONS.min(info.limits.completions_max),
        connect,
        path,
        pd,
        context,
        channel,
        queues: Vec::new(),
        registry: Arc::clone(&registry),
        regions: BTreeMap::new(),
        pipes: BTreeMap::new(),
        by_number: BTreeMap::new(),
        handshake: config.handshake,
        handshakes: Handshakes::default(),
        datagrams: None,
        refused_datagrams: 0,
        template: template(),
        scratch: Scratch::default(),
    };
    Ok((Box::new(card), registry))
}

#[derive(Debug)]
struct VerbsCard {
    bounds: Bounds,
    send_depth: u32,
    receive_depth: u32,
    completions: u32,
    connect: ConnectOptions,
    path: LocalPath,
    pd: ProtectionDomain,
    context: Context,
    channel: CompletionChannel,
    queues: Vec<CompletionQueue>,
    registry: Arc<Registry>,
    regions: BTreeMap<u64, MemoryRegion>,
    pipes: BTreeMap<PipeId, Pipe>,
    /// Whose completion it is.
    by_number: BTreeMap<QpNum, (PipeId, usize)>,
    handshake: Handshake,
    handshakes: Handshakes,
    /// Made when it is first needed.
    datagrams: Option<Datagrams>,
    refused_datagrams: u64,
    template: Template,
    scratch: Scratch,
}

/// Used anew by each call, kept for its memory.
#[derive(Debug, Default)]
struct Scratch {
    slices: Vec<Option<LocalSlice>>,
    completions: Vec<WorkCompletion>,
    /// Receives, by pipe, lane and index.
    used: Vec<(PipeId, usize, u32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Writer,
    Target,
}

#[derive(Debug)]
struct Pipe {
    lanes: Vec<RcQueuePair>,
    /// Of a target: where pieces of messages land.
    messages: Option<Receives>,
    is_cut: bool,
    /// The device did not even take the cut: nothing more is waited for.
    is_lost: bool,
}

#[derive(Debug)]
struct Receives {
    buffer: Arc<Buffer>,
    region: MemoryRegion,
}

impl Receives {
    fn slice(&self, index: u32) -> Option<LocalSlice> {
        self.region.slice(index as usize * RECEIVE_BYTES, RECEIVE_BYTES).ok()
    }
}

/// As it travels: the layer of the link, and the device's own GID.
fn link_layer_code(layer: LinkLayer) -> u8 {
    match layer {
        LinkLayer::InfiniBand => 1,
        LinkLayer::Ethernet => 2,
        LinkLayer::Other(_) => 0,
    }
}

fn broken(what: &'static str) -> impl FnOnce(kvasir_transfer_verbs::VerbsError) -> CardError {
    move |error| CardError::because(what, error)
}

impl VerbsCard {
    /// A completion queue with room for so many more.
    fn queue(&mut self, wanted: u32) -> Result<CompletionQueue, CardError> {
        if let Some(queue) = self.queues.iter().find(|queue| queue.free() >= wanted) {
            return Ok(queue.clone());
        }
        let completions = self.completions.max(wanted);
        let queue = CompletionQueue::new(&self.context, completions, Some(&self.channel))
            .map_err(broken("cannot create a completion queue"))?;
        self.queues.push(queue.clone());
        Ok(queue)
    }

    fn options(&self, role: Role, lane: usize) -> QueuePairOptions {
        let (send_depth, receive_depth) = match (role, lane) {
            (Role::Writer, _) => (self.send_depth, 1),
            (Role::Target, MESSAGES) => (1, MESSAGE_RECEIVES),
            (Role::Target, _) => (1, self.receive_depth),
        };
        let inline_bytes = match role {
            Role::Writer => u32::try_from(self.bounds.inline_bytes).unwrap_or(0),
            Role::Target => 0,
        };
        // Nobody writes through a pipe that we write through: a peer that is cut off here could otherwise, for as
        // long as we write to it.
        let is_written_to = role == Role::Target;
        let depths = QueuePairOptions { send_depth, receive_depth, ..QueuePairOptions::default() };
        QueuePairOptions { inline_bytes, is_written_to, is_read_from: false, ..depths }
    }

    fn make_pipe(&mut self, role: Role, lanes: usize) -> Result<Pipe, CardError> {
        let options: Vec<_> = (0..lanes).map(|lane| self.options(role, lane)).collect();
        // One more for each lane than it holds: what the layer posts itself.
        let wanted = options.iter().map(|of| of.send_depth + of.receive_depth + 2).sum();
        let queue = self.queue(wanted)?;
        let queues = CompletionQueues { send: &queue, receive: &queue };
        let mut made = Vec::with_capacity(lanes);
        for of_lane in options {
            let psn = Psn::from_random(rand::random());
            let lane = RcQueuePair::new(&self.pd, &self.path, queues, psn, of_lane);
            made.push(lane.map_err(broken("cannot create a queue pair"))?);
        }
        let messages = match role {
            Role::Writer => None,
            Role::Target => Some(self.receives()?),
        };
        let mut pipe = Pipe { lanes: made, messages, is_cut: false, is_lost: false };
        if role == Role::Target {
            let pieces: Vec<u32> = (0..MESSAGE_RECEIVES).collect();
            pipe.receive_pieces(&pieces)?;
            for lane in 1..lanes {
                pipe.receive_imms(lane, self.receive_depth as usize)?;
            }
        }
        Ok(pipe)
    }

    fn receives(&self) -> Result<Receives, CardError> {
        let bytes = MESSAGE_RECEIVES as usize * RECEIVE_BYTES;
        let buffer = Buffer::new(bytes)
            .map_err(|error| CardError::because("cannot allocate memory for messages", error))?;
        let buffer = Arc::new(buffer);
        let owner = Arc::clone(&buffer) as Arc<dyn kvasir_transfer_verbs::Memory>;
        let options = RegionOptions { local_write: true, ..RegionOptions::SOURCE };
        let region = self
            .pd
            .register(owner, 0..bytes, options)
            .map_err(broken("cannot register memory for messages"))?;
        Ok(Receives { buffer, region })
    }

    /// From now on its completions are told. Returns what the peer must know.
    fn keep(&mut self, id: PipeId, pipe: Pipe) -> Vec<u8> {
        for (lane, qp) in pipe.lanes.iter().enumerate() {
            self.by_number.insert(qp.number(), (id, lane));
        }
        let addresses = pipe.addresses().iter().flat_map(QueuePairAddress::to_bytes).collect();
        self.pipes.insert(id, pipe);
        addresses
    }

    /// Takes what one completion says. What is used up of receives is noted.
    fn take(
        &mut self,
        completion: &WorkCompletion,
        events: &mut Vec<(PipeId, Event)>,
        used: &mut Vec<(PipeId, usize, u32)>,
    ) {
        if let Some(datagrams) = &mut self.datagrams
            && datagrams.number() == completion.qp_num()
        {
            if let Some((from, said)) = datagrams.take(completion) {
                self.hear(from, &said, events);
            }
            return;
        }
        // Of a pipe that was discarded.
        let Some((id, lane)) = self.by_number.get(&completion.qp_num()).copied() else { return };
        let Some(pipe) = self.pipes.get_mut(&id) else { return };
        if pipe.lanes[lane].retire(completion) == 0 {
            return;
        }
        let tag = completion.tag().map(|tag| tag.0);
        let event = match (completion.side(), completion.is_success()) {
            (Side::Send, true) => tag.map(|tag| Event::Done { lane, tag }),
            (Side::Receive, true) => {
                let piece = tag.filter(|_| lane == MESSAGES);
                used.push((id, lane, piece.unwrap_or(0)));
                match (completion.imm(), piece) {
                    (Some(imm), None) => {
                        Some(Event::Landed { imm, bytes: completion.bytes().into() })
                    }
                    (None, Some(index)) => pipe.piece(index, completion.bytes()).map(Event::Piece),
                    // A message where writes are expected, or the other way round: hostile.
                    _ => Some(Event::Failed { lane, tag: None, failure: Failure::Broken }),
                }
            }
            // What is flushed tells nothing: the failure that it follows was told.
            (Side::Receive, false) if pipe.is_cut => None,
            (_, false) if completion.status() == WcStatus::Flushed && pipe.is_cut => None,
            (side, false) => {
                let refused = completion.status() == WcStatus::RemoteAccess;
                let failure = if refused { Failure::Refused } else { Failure::Broken };
                let tag = tag.filter(|_| side == Side::Send);
                tracing::debug!(lane, status = %completion.status(), "a queue pair failed");
                Some(Event::Failed { lane, tag, failure })
            }
        };
        events.extend(event.map(|event| (id, event)));
    }

    // ---- handshakes by datagrams ----

    fn datagrams(&mut self) -> Result<&mut Datagrams, CardError> {
        if self.datagrams.as_ref().is_none_or(Datagrams::is_broken) {
            let queue = self.queue(datagrams::COMPLETIONS)?;
            self.datagrams = Some(Datagrams::new(&self.pd, &self.path, &queue)?);
        }
        self.datagrams
            .as_mut()
            .ok_or_else(|| CardError::new("there is no queue pair for datagrams"))
    }

    /// What the peer's end of a pipe with so many lanes is told in the greeting.
    fn ticket(&mut self, lanes: usize) -> Result<Ticket, CardError> {
        let (gid, lid, token) = (self.path.gid, self.path.lid, Token(rand::random()));
        let datagrams = self.datagrams()?;
        let (number, key) = (datagrams.number(), datagrams.key());
        Ok(Ticket { number, key, gid, lid, lanes, token })
    }

    fn learn_way(&mut self, pipe: PipeId, peer: &Ticket) -> Result<(), CardError> {
        let (pd, path, traffic) = (self.pd.clone(), self.path, self.connect.traffic);
        self.datagrams()?.learn_way(pipe, (&pd, &path), (peer, traffic))
    }

    fn say(&mut self, pipe: PipeId) {
        if let (Some((to, datagram)), Some(datagrams)) =
            (self.handshakes.say(pipe), &mut self.datagrams)
        {
            datagrams.send(pipe, &to, &datagram);
        }
    }

    fn hear(&mut self, from: Option<QpNum>, said: &[u8], events: &mut Vec<(PipeId, Event)>) {
        match self.handshakes.hear(from, said) {
            Heard::Connect { pipe, lanes } => {
                let Some(of) = self.pipes.get_mut(&pipe) else { return };
                let is_target = of.messages.is_some();
                if let Err(error) = of.connect(&lanes, &self.connect) {
                    tracing::warn!(%error, "the handshake of a new RDMA connection failed");
                    let failure = Failure::Broken;
                    events.push((pipe, Event::Failed { lane: MESSAGES, tag: None, failure }));
                } else if is_target {
                    self.say(pipe);
                }
            }
            Heard::Again { pipe } => self.say(pipe),
            Heard::Known => {}
            Heard::Refused => {
                tracing::debug!("received a datagram that belongs to no handshake");
                self.refused_datagrams += 1;
            }
        }
    }

    /// Makes anew the receives that were used up.
    fn replenish(&mut self, used: &mut Vec<(PipeId, usize, u32)>) {
        used.sort_unstable();
        for of_lane in used.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
            let (id, lane, _) = of_lane[0];
            let Some(pipe) = self.pipes.get_mut(&id) else { continue };
            if pipe.is_cut || pipe.lanes[lane].is_broken() {
                continue;
            }
            let posted = if lane == MESSAGES {
                let pieces: Vec<u32> = of_lane.iter().map(|(_, _, index)| *index).collect();
                pipe.receive_pieces(&pieces)
            } else {
                pipe.receive_imms(lane, of_lane.len())
            };
            // Its failure is told by what is flushed.
            if let Err(error) = posted {
                tracing::debug!(%error, "the transfer engine cannot post receives to a queue pair");
            }
        }
        used.clear();
    }
}

impl Pipe {
    fn addresses(&self) -> Vec<QueuePairAddress> {
        self.lanes.iter().map(RcQueuePair::address).collect()
    }

    fn connect(
        &mut self,
        peers: &[QueuePairAddress],
        options: &ConnectOptions,
    ) -> Result<(), CardError> {
        for (lane, peer) in self.lanes.iter_mut().zip(peers) {
            lane.connect(peer, options).map_err(broken("cannot connect a queue pair"))?;
        }
        Ok(())
    }

    fn piece(&self, index: u32, bytes: u32) -> Option<Vec<u8>> {
        let receives = self.messages.as_ref()?;
        receives.buffer.read(index as usize * RECEIVE_BYTES, bytes as usize).ok()
    }

    fn receive_pieces(&mut self, pieces: &[u32]) -> Result<(), CardError> {
        let Some(receives) = &self.messages else { return Ok(()) };
        let slices: Vec<LocalSlice> =
            pieces.iter().filter_map(|index| receives.slice(*index)).collect();
        let receives = slices.chunks(1).zip(pieces);
        let posts: Vec<Receive<'_>> =
            receives.map(|(into, index)| Receive { into, tag: WorkTag(*index) }).collect();
        self.lanes[MESSAGES]
            .post_receives(&posts)
            .map_err(|error| CardError::because("cannot post receives", error))
    }

    fn receive_imms(&mut self, lane: usize, count: usize) -> Result<(), CardError> {
        let receive = Receive { into: &[], tag: WorkTag(0) };
        self.lanes[lane]
            .post_receives(&vec![receive; count])
            .map_err(|error| CardError::because("cannot post receives", error))
    }
}

impl Card for VerbsCard {
    fn address(&self) -> Vec<u8> {
        [&[link_layer_code(self.path.link_layer)], self.path.gid.0.as_slice()].concat()
    }

    fn may_reach(&self, peer: &[u8]) -> bool {
        peer.len() == 17 && peer[0] == link_layer_code(self.path.link_layer)
    }

    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn adopt(&mut self, key: u64) {
        let region = self.registry.fresh().remove(&key);
        self.regions.extend(region.map(|region| (key, region)));
    }

    fn place(&self, key: u64) -> Option<Place> {
        self.regions.get(&key).map(place_of)
    }

    fn forget(&mut self, key: u64) -> Option<Box<dyn Send>> {
        self.adopt(key);
        self.regions.remove(&key).map(|region| Box::new(region) as Box<dyn Send>)
    }

    fn seek(&self, peer: &[u8]) -> Option<Seek> {
        let is_blocking = mutated(Mutation::WorkerBlocksOnAddressLookup);
        if self.path.link_layer != LinkLayer::Ethernet || is_blocking {
            return None;
        }
        // What makes no sense is refused when it is to be used.
        let (gid, lid) = if Ticket::is_one(peer) {
            Ticket::from_bytes(peer).map(|ticket| (ticket.gid, ticket.lid))?
        } else {
            lanes_of(peer).ok()?.first().map(|lane| (lane.gid, lane.lid))?
        };
        let (pd, path, traffic) = (self.pd.clone(), self.path, self.connect.traffic);
        // An address handle is what the system makes of an address when it knows the way.
        Some(Box::new(move || {
            AddressHandle::new(&pd, &path, gid, lid, traffic)
                .map(drop)
                .map_err(broken("cannot reach the peer's device"))
        }))
    }

    fn open(&mut self, pipe: PipeId) -> Result<Vec<u8>, CardError> {
        let made = self.make_pipe(Role::Writer, self.bounds.lanes)?;
        if self.handshake == Handshake::Tcp {
            return Ok(self.keep(pipe, made));
        }
        let (ticket, own) = (self.ticket(made.lanes.len())?, made.addresses());
        self.keep(pipe, made);
        self.handshakes.offer(pipe, ticket.token, own);
        Ok(ticket.to_bytes())
    }

    /// With as many queue pairs as the writer has.
    fn accept(&mut self, pipe: PipeId, writer: &[u8]) -> Result<Vec<u8>, CardError> {
        if Ticket::is_one(writer) {
            let senseless = || {
                CardError::new(
                    "the peer sent a malformed handshake; run the same version of Kvasir on both nodes",
                )
            };
            let writer = Ticket::from_bytes(writer).ok_or_else(senseless)?;
            let made = self.make_pipe(Role::Target, writer.lanes)?;
            let (ticket, own) = (self.ticket(writer.lanes)?, made.addresses());
            self.learn_way(pipe, &writer)?;
            self.keep(pipe, made);
            self.handshakes.expect(pipe, ticket.token, (own, writer));
            return Ok(ticket.to_bytes());
        }
        let peers = lanes_of(writer)?;
        let mut made = self.make_pipe(Role::Target, peers.len())?;
        made.connect(&peers, &self.connect)?;
        Ok(self.keep(pipe, made))
    }

    fn connect(&mut self, pipe: PipeId, target: &[u8]) -> Result<(), CardError> {
        if self.handshake == Handshake::Ud {
            let target = Ticket::from_bytes(target).filter(|of| self.handshakes.meet(pipe, *of));
            let senseless = || {
                CardError::new(
                    "the peer did not answer with a handshake by datagrams; run the same version of Kvasir on both nodes",
                )
            };
            self.learn_way(pipe, &target.ok_or_else(senseless)?)?;
            self.say(pipe);
            return Ok(());
        }
        let peers = lanes_of(target)?;
        match self.pipes.get_mut(&pipe) {
            Some(pipe) if pipe.lanes.len() == peers.len() => pipe.connect(&peers, &self.connect),
            _ => Err(CardError::new(
                "the peer answered with another number of queue pairs; run the same version of Kvasir on both nodes",
            )),
        }
    }

    fn is_connected(&self, pipe: PipeId) -> bool {
        !self.handshakes.is_open(pipe)
    }

    fn ask_again(&mut self, pipe: PipeId) {
        self.say(pipe);
    }

    fn take_refused_datagrams(&mut self) -> u64 {
        std::mem::take(&mut self.refused_datagrams)
    }

    fn room(&self, pipe: PipeId, lane: usize) -> usize {
        self.pipes.get(&pipe).map_or(0, |pipe| {
            if pipe.lanes[lane].is_broken() { 0 } else { pipe.lanes[lane].send_room() }
        })
    }

    fn post(&mut self, pipe: PipeId, lane: usize, posts: &[Post]) -> Result<(), CardError> {
        let Some(pipe) = self.pipes.get_mut(&pipe) else {
            return Err(CardError::new(
                "the connection to the peer was closed before the write was posted",
            ));
        };
        // What pages are: counted writes out of registered memory. Their requests are built already.
        let mut posts = posts;
        while let Some((chain, rest)) = posts.split_at_checked(TEMPLATE_REQUESTS)
            && fill(&mut self.template, &self.regions, chain)?
        {
            pipe.lanes[lane]
                .post_template(&mut self.template, TEMPLATE_REQUESTS)
                .map_err(|error| CardError::because("cannot post work requests", error))?;
            posts = rest;
        }
        if posts.is_empty() {
            return Ok(());
        }
        let slices = &mut self.scratch.slices;
        slices.clear();
        for post in posts {
            slices.push(match &post.from {
                From::Region { key, offset, bytes } => {
                    Some(slice_of(&self.regions, *key, (*offset, *bytes))?)
                }
                From::Nothing | From::Inline { .. } => None,
            });
        }
        let requests: Vec<Request<'_>> =
            posts.iter().zip(slices.iter()).map(|(post, slice)| request(post, slice)).collect();
        pipe.lanes[lane]
            .post(&requests)
            .map_err(|error| CardError::because("cannot post work requests", error))
    }

    fn cut(&mut self, pipe: PipeId) {
        let Some(pipe) = self.pipes.get_mut(&pipe) else { return };
        pipe.is_cut = true;
        for lane in &mut pipe.lanes {
            if let Err(error) = lane.cut_off() {
                tracing::warn!(%error, "the transfer engine cannot cut off a queue pair; destroying it");
                pipe.is_lost = true;
            }
        }
    }

    fn is_drained(&self, pipe: PipeId) -> bool {
        let drained = |pipe: &Pipe| pipe.is_lost || pipe.lanes.iter().all(RcQueuePair::is_drained);
        self.pipes.get(&pipe).is_none_or(drained)
    }

    fn discard(&mut self, pipe: PipeId) {
        self.handshakes.forget(pipe);
        if let Some(datagrams) = &mut self.datagrams {
            datagrams.forget(pipe);
        }
        let Some(gone) = self.pipes.remove(&pipe) else { return };
        for lane in &gone.lanes {
            self.by_number.remove(&lane.number());
        }
        // Destroys the queue pairs, and then lets go of the memory for messages.
        drop(gone.lanes);
        drop(gone.messages);
    }

    fn poll(&mut self, events: &mut Vec<(PipeId, Event)>) -> Result<bool, CardError> {
        let mut any = false;
        let mut used = std::mem::take(&mut self.scratch.used);
        let mut batch = std::mem::take(&mut self.scratch.completions);
        batch.resize_with(POLL_BATCH, WorkCompletion::default);
        for at in 0..self.queues.len() {
            let queue = self.queues[at].clone();
            for _ in 0..POLLS_MAX {
                let found =
                    queue.poll(&mut batch).map_err(broken("the device no longer responds"))?;
                any |= !found.is_empty();
                found.iter().for_each(|completion| self.take(completion, events, &mut used));
                if found.len() < POLL_BATCH {
                    break;
                }
            }
        }
        self.scratch.completions = batch;
        self.replenish(&mut used);
        self.scratch.used = used;
        Ok(any)
    }

    fn arm(&mut self) -> Result<(), CardError> {
        for queue in &self.queues {
            queue.arm(Wake::Any).map_err(broken("the device no longer responds"))?;
        }
        Ok(())
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }

    fn clear_wake(&mut self) {
        // As many as there are queues, each of which is armed once.
        for _ in 0..=self.queues.len() {
            if !matches!(self.channel.next_event(), Ok(Some(_))) {
                break;
            }
        }
    }

    fn report_fd(&self) -> BorrowedFd<'_> {
        self.context.events_fd()
    }

    fn look_at_reports(&mut self) -> Result<(), CardError> {
        while let Some(event) =
            self.context.next_event().map_err(broken("cannot read the events of the device"))?
        {
            match event {
                DeviceEvent::DeviceFailed | DeviceEvent::CompletionQueueFailed(_) => {
                    return Err(CardError::new(format!(
                        "the device reported {event:?}; a restart of the node opens it again"
                    )));
                }
                // Their pipes fail by what is flushed, or when retries are used up.
                event => tracing::debug!(
                    device = self.context.name(),
                    ?event,
                    "an RDMA device reported an event"
                ),
            }
        }
        Ok(())
    }
}

/// Of one chain. Longer ones are several chains, shorter ones are built one by one.
const TEMPLATE_REQUESTS: usize = 16;

/// Counted writes, of which the last one's end is told.
fn template() -> Template {
    let request = |is_signalled| TemplateRequest { has_imm: true, is_signalled, is_fenced: false };
    let mut requests = [request(false); TEMPLATE_REQUESTS];
    requests[TEMPLATE_REQUESTS - 1] = request(true);
    Template::new(&requests)
}

/// Whether all of these posts are such as the template has; then it is filled with them.
fn fill(
    template: &mut Template,
    regions: &BTreeMap<u64, MemoryRegion>,
    posts: &[Post],
) -> Result<bool, CardError> {
    for (at, post) in posts.iter().enumerate() {
        let (From::Region { key, offset, bytes }, To::Memory(place), Some(imm)) =
            (&post.from, post.to, post.imm)
        else {
            return Ok(false);
        };
        let slice = slice_of(regions, *key, (*offset, *bytes))?;
        template.set(at, Some(slice), remote(place));
        template.set_imm(at, imm);
        template.set_tag(at, WorkTag(post.tag));
    }
    Ok(true)
}

fn slice_of(
    regions: &BTreeMap<u64, MemoryRegion>,
    key: u64,
    (offset, bytes): (u64, u64),
) -> Result<LocalSlice, CardError> {
    let region = regions.get(&key).ok_or_else(|| CardError::new("a region no longer exists"))?;
    let slice = region.slice(offset as usize, bytes as usize);
    slice.map_err(|error| CardError::because("a source is outside its region", error))
}

/// A post as the device takes it.
fn request<'a>(post: &'a Post, slice: &'a Option<LocalSlice>) -> Request<'a> {
    let from = match (&post.from, slice) {
        (From::Inline { payload, offset, bytes }, _) => {
            Payload::Inline(payload.bytes(*offset as usize, *bytes as usize))
        }
        (_, slice) => Payload::Slices(slice.as_slice()),
    };
    let operation = match (post.to, post.imm, &post.from) {
        (To::Message, imm, _) => Operation::Send { from, imm },
        (To::Nowhere, ..) => Operation::Write { from, to: remote(Place { address: 0, key: 0 }) },
        (To::Memory(_), Some(imm), From::Nothing) => Operation::Imm { imm },
        (To::Memory(place), Some(imm), _) => Operation::WriteImm { from, to: remote(place), imm },
        (To::Memory(place), None, _) => Operation::Write { from, to: remote(place) },
    };
    let request = Request::new(operation, WorkTag(post.tag));
    let request = if post.is_fenced { request.fenced() } else { request };
    if post.is_told { request } else { request.unsignalled() }
}

fn remote(place: Place) -> RemoteAddress {
    // A key that a descriptor claims and no device gives: the peer's device refuses it.
    RemoteAddress { address: place.address, rkey: RKey(place.key as u32) }
}
