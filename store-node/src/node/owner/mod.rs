//! The switchboard: one thread that takes whatever comes, hands it to the part it belongs to, and
//! carries out what the block core decides. It never waits for anything but its doorbells.
//!
//! - `shares`: allocate, commit, abort, renew, and the core's actions
//! - `pushes`: pages that leave
//! - `arrivals`: pages that come
//! - `stops`: making sure that nobody writes any more
//! - `failures`: telling receivers that a push to them has failed
//! - `engines`: which are attached; `engine`: what each of them says; `role`: what it plays
//! - `pools`: engines' own pages
//! - `clients` and `objects`: processes that put and get objects; `fetches`: what they want of other nodes
//! - `tiers`: what sinks to the SSD and rises from it; `bucket`: the same of the object store
//! - `routes`: queries of engines elsewhere over what is here
//! - `replicas`: copies on other nodes, draining; `copies`: contexts that are kept on several
//! - `admin`: what administrators ask for
//! - `report`: events, status, metrics

mod admin;
mod arrivals;
mod bucket;
mod clients;
mod contexts;
mod copies;
mod engine;
mod engines;
mod failures;
mod fetches;
mod objects;
mod pools;
mod pushes;
mod replicas;
mod report;
mod role;
mod routes;
mod shares;
mod stops;
mod tiers;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use kvasir_blocks::moving::sent_pushes::SentPushes;
use kvasir_blocks::moving::tail_space::TailSpace;
use kvasir_blocks::moving::writer_stops::WriterStops;
use kvasir_blocks::{AbortReason, Blocks};
use kvasir_proto::Share;
use kvasir_transfer::memory::SharedMemory;
use kvasir_transfer::spin::Spin;
use kvasir_transfer::{Driver, RegionHandle, TransferEngine, doorbell};

use self::clients::Clients;
use self::engines::{CacheShape, Engines};
pub(crate) use self::failures::Failure;
use self::fetches::Fetches;
use self::pools::Pools;
use self::replicas::Replication;
pub(crate) use self::routes::Routing;
use self::tiers::Tiers;
use super::arena::Arena;
use super::command::Command;
use super::copier::Copier;
use super::events::Events;
use super::inbox::{Bell, End, FromPeer, Inbox, Post};
use super::leg::Leg;
use super::sources::Sources;
use super::writers::Writers;
use crate::bucket::jobs::BucketTask;
use crate::clock;
use crate::config::Config;
use crate::layer_log::LayerLog;
use crate::metrics::Metrics;
use crate::ssd::thread::SsdThread;

/// How long the thread looks for work before it sleeps.
const SPIN: Duration = Duration::from_micros(30);
/// Taken of each kind before the others get their turn.
const BATCH: usize = 256;
/// How often what is not rung for is looked at: the engine's load, work that was put off.
const TICK_MS: u64 = 250;
/// While something waits for room.
const SOON_MS: u64 = 2;
/// Of the transfer engine, when the node has drained.
const LAST_TURNS_MAX: usize = 64;
/// What shutdown gives aborted shares to end.
const ABORT_MS: u64 = 1_000;

/// What the owner is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub config: Config,
    pub incarnation: u64,
    pub blocks: Blocks,
    pub arena: Arena,
    /// The arena, as pushes read it.
    pub arena_region: RegionHandle,
    pub tails: Arc<SharedMemory>,
    pub writers: Writers,
    pub transfer: TransferEngine,
    /// Where the transfer engine has no thread of its own.
    pub driver: Option<Driver>,
    pub inbox: Inbox,
    pub post: Post,
    pub metrics: Metrics,
    pub layer_log: Option<LayerLog>,
    pub ssd: Option<SsdThread>,
    pub bucket: Option<BucketTask>,
    pub copier: Copier,
    pub lookups: Sources,
    pub routing: Option<Routing>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Owner {
    config: Config,
    incarnation: u64,
    blocks: Blocks,
    arena: Arena,
    arena_region: RegionHandle,
    tails: Arc<SharedMemory>,
    tail_space: TailSpace,
    legs: BTreeMap<Share, Leg>,
    /// Stops that peers have been asked for.
    stops: WriterStops,
    writers: Writers,
    sent: SentPushes,
    transfer: TransferEngine,
    driver: Option<Driver>,
    engines: Engines,
    clients: Clients,
    cache: Option<CacheShape>,
    /// What is below memory.
    tiers: Tiers,
    pools: Pools,
    replication: Replication,
    fetches: Fetches,
    /// Answers routed queries, where that is on.
    routing: Option<Routing>,
    events: Events,
    report: report::Reported,
    inbox: Inbox,
    post: Post,
    metrics: Metrics,
    layer_log: Option<LayerLog>,
    next_push: u64,
    writes_in_flight: usize,
    /// A push has more to issue than may be under way at once.
    push_waits: bool,
    /// Failures that receivers are being told of.
    failures_under_way: usize,
    /// Set while draining: when open shares are aborted.
    drain_until_ms: Option<u64>,
}

impl Owner {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts {
            config,
            incarnation,
            blocks,
            arena,
            arena_region,
            tails,
            writers,
            transfer,
            driver,
            inbox,
            post,
            metrics,
            layer_log,
            ssd,
            bucket,
            copier,
            lookups,
            routing,
        } = parts;
        Owner {
            tail_space: TailSpace::new(tails.len() as u64),
            replication: Replication::new(copier, &config.replication.peers),
            fetches: Fetches::new(lookups),
            config,
            incarnation,
            blocks,
            arena,
            arena_region,
            tails,
            legs: BTreeMap::new(),
            stops: WriterStops::default(),
            writers,
            sent: SentPushes::default(),
            transfer,
            driver,
            engines: Engines::default(),
            clients: Clients::new(),
            cache: None,
            tiers: Tiers::new(ssd, bucket),
            pools: Pools::new(),
            routing,
            events: Events::new(incarnation),
            report: report::Reported::default(),
            inbox,
            post,
            metrics,
            layer_log,
            next_push: 1,
            writes_in_flight: 0,
            push_waits: false,
            failures_under_way: 0,
            drain_until_ms: None,
        }
    }

    /// Runs until it is drained.
    pub(crate) fn run(mut self) {
        let mut spin =
            Spin::new(self.driver.as_ref().map_or(SPIN, |driver| SPIN.max(driver.spin())));
        let mut tick_ms = 0;
        while !self.is_drained() {
            let mut worked = self.take_all();
            let now_ms = clock::now_ms();
            if now_ms >= tick_ms {
                self.tick(now_ms);
                tick_ms = now_ms + TICK_MS;
                worked = true;
            }
            if self.blocks.poll_timeout().is_some_and(|due_ms| due_ms <= now_ms) {
                self.blocks.handle_timeout(now_ms);
                self.run_actions();
                worked = true;
            }
            let behind = self.catch_up(now_ms, worked);
            if worked {
                spin.worked();
            } else if !spin.wait() {
                // Not in the middle of work: setting them all costs microseconds.
                if std::mem::take(&mut self.report.gauges_stale) {
                    self.set_gauges(now_ms);
                }
                let due_ms = self.blocks.poll_timeout().unwrap_or(u64::MAX).min(tick_ms);
                let due_ms = if behind { due_ms.min(now_ms + SOON_MS) } else { due_ms };
                self.sleep(Duration::from_millis(due_ms.saturating_sub(now_ms)));
                spin.worked();
            }
        }
        // What was said last leaves too.
        if let Some(driver) = &mut self.driver {
            let _ = (0..LAST_TURNS_MAX).take_while(|_| driver.turn()).count();
        }
        tracing::info!(node = %self.config.node_id, "the store node has drained");
    }

    /// Everything that has come in. Answers whether there was anything.
    fn take_all(&mut self) -> bool {
        let mut worked = self.driver.as_mut().is_some_and(Driver::turn);
        for _ in 0..BATCH {
            let Ok(end) = self.inbox.ends.try_recv() else { break };
            self.take_end(end);
            worked = true;
        }
        worked |= self.take_engines();
        worked |= self.take_clients();
        worked |= self.take_ssd();
        worked |= self.take_bucket();
        for _ in 0..BATCH {
            let Ok(command) = self.inbox.commands.try_recv() else { break };
            self.take_command(command);
            worked = true;
        }
        for _ in 0..BATCH {
            let Ok(message) = self.inbox.messages.try_recv() else { break };
            match message {
                FromPeer::Message(peer, bytes) => self.take_message(peer, &bytes),
                FromPeer::Event(event) => self.take_peer_event(event),
            }
            worked = true;
        }
        worked
    }

    fn take_end(&mut self, end: End) {
        match end {
            End::Group(end) => self.group_done(&end),
            End::Tail { share, push, outcome } => self.tail_done(share, push, outcome),
            End::Drained { share, push, outcome } => self.push_drained(share, push, outcome),
            End::Counted { share, imm, outcome } => self.counted(share, imm, outcome),
            End::Cut { writer, round, outcome } => self.writer_cut(writer, round, outcome),
            End::Sent { share, outcome } => self.stop_sent(share, outcome),
            End::Probed { writer, outcome } => self.writer_probed(writer, outcome),
            End::Ordered { fetch, outcome } => self.ordered(fetch, outcome),
            End::Told { failure, outcome } => self.failure_told(failure, outcome),
            End::RoutesClosed { share } => self.routes_closed(share),
            End::PagesCopied(copied) => self.pages_copied(copied),
            End::SessionUnwanted { session } => {
                self.close_route_session(&kvasir_proto::v1::CloseRouteSessionRequest { session });
            }
        }
        self.run_actions();
    }

    fn take_command(&mut self, command: Command) {
        // Whoever asked may have gone: then nobody wants the answer.
        match command {
            Command::Describe(reply) => drop(reply.send(Ok(self.describe()))),
            Command::ObjectStore(reply) => drop(reply.send(Ok(self.bucket_state()))),
            Command::Allocate(request, reply) => drop(reply.send(self.allocate(request))),
            Command::Push(request, reply) => self.push(request, reply),
            Command::Commit(request, reply) => self.commit(&request, reply),
            Command::Abort(request, reply) => drop(reply.send(self.abort(request))),
            Command::Renew(request, reply) => drop(reply.send(self.renew(&request))),
            Command::KeepContext(request, reply) => self.persist_context(&request, reply),
            Command::HoldsContexts(request, reply) => {
                drop(reply.send(self.holds_contexts(&request)));
            }
            Command::ListContexts(request, reply) => {
                drop(reply.send(self.list_contexts(&request)));
            }
            Command::DropContext(request, reply) => self.delete_context(&request, reply),
            Command::Prefetch(request, reply) => drop(reply.send(self.prefetch(&request))),
            Command::OpenRouteSession(request, reply) => self.open_route_session(request, reply),
            Command::CloseRouteSession(request) => self.close_route_session(&request),
            Command::OpenRoute(request, reply) => self.open_route(&request, reply),
            Command::SetRole(request, reply) => drop(reply.send(self.set_role(&request))),
            Command::ListBlocks(request, reply) => drop(reply.send(self.list_blocks(&request))),
            Command::Replicate(request, reply) => self.replicate(&request, reply),
            Command::Copied(copy, result) => self.copied(copy, result),
            Command::SourceSeen(address, seen) => self.source_seen(&address, seen),
            Command::PeersSeen(peers) => self.peers_seen(peers),
            Command::CopiesSeen(contexts, peers) => self.copies_seen(&contexts, &peers),
            Command::PeerIsItself(peer) => self.replication.is_no_peer(&peer),
            Command::Admin(command) => self.take_admin(command),
            Command::Subscribe(request, queue, reply) => {
                let status = self.describe();
                drop(reply.send(self.events.subscribe(&request, queue, status)));
            }
            Command::AttachCheck(request, reply) => {
                drop(reply.send(self.attach_check(request).map(|_| ())));
            }
            Command::AttachBegin(request, pool, reply) => {
                drop(reply.send(self.attach_begin(request, pool)));
            }
            Command::ClientOpen(request, reply) => drop(reply.send(self.client_open(request))),
            Command::AttachComplete(token, stream) => {
                if let Some(stream) = self.client_complete(token, stream) {
                    self.attach_complete(token, stream);
                }
            }
            Command::Drain => {
                let until_ms = clock::now_ms() + self.config.drain_timeout_ms;
                self.drain_until_ms.get_or_insert(until_ms);
                self.report.dirty = true;
            }
        }
        self.run_actions();
    }

    /// What happens now and then.
    fn tick(&mut self, now_ms: u64) {
        self.look_after_engines();
        self.look_after_engine_stops(now_ms);
        self.look_after_clients(now_ms);
        self.look_after_stops(now_ms);
        self.tick_tiers();
        if self.drain_until_ms.is_some_and(|until_ms| now_ms >= until_ms) {
            self.blocks.abort_all(now_ms, &AbortReason::Draining);
        }
        self.run_actions();
        self.make_awaited();
        self.plan_copies(now_ms);
        self.report_status(now_ms);
        self.set_gauges(now_ms);
    }

    /// Sends on what had no room. Answers whether something still has none.
    fn catch_up(&mut self, now_ms: u64, worked: bool) -> bool {
        if self.push_waits {
            self.pump_all();
            self.run_actions();
        }
        let outbox = self.flush_engines() | self.flush_clients() | self.flush_tiers();
        let outbox = outbox | self.pools.flush();
        let current = self.events.advance(now_ms, &self.blocks);
        self.report.gauges_stale |= worked;
        if self.report.dirty || self.events.lacks_status() {
            self.report_status(now_ms);
        }
        outbox || !current || self.push_waits
    }

    fn sleep(&mut self, timeout: Duration) {
        let bell: Arc<Bell> = Arc::clone(&self.inbox.bell);
        doorbell::announce_sleep(&bell.sleeping);
        self.engines.announce_sleep();
        self.clients.announce_sleep();
        if let Some(driver) = &mut self.driver {
            driver.announce_sleep();
        }
        // The last look takes what it finds, so that nothing is found and then slept on.
        if !self.take_all() {
            self.sleep_on(&bell, timeout);
        }
        if let Some(driver) = &mut self.driver {
            driver.awake();
        }
        bell.bell.clear();
        doorbell::awake(&bell.sleeping);
        self.engines.awake();
        self.clients.awake();
    }

    fn sleep_on(&mut self, bell: &Bell, timeout: Duration) {
        let patience = self.driver.as_mut().and_then(Driver::patience);
        let timeout = patience.map_or(timeout, |patience| timeout.min(patience));
        let (engines, clients) = (self.engines.fds(), self.clients.fds());
        let mut fds = vec![bell.bell.as_fd()];
        fds.extend(engines.iter().flatten());
        let engine_ends = engines.map_or(0, |_| 1 << (fds.len() - 1));
        fds.extend(clients.iter().flatten());
        let client_ends = clients.map_or(0, |_| 1 << (fds.len() - 1));
        fds.extend(self.driver.as_ref().and_then(Driver::wake_fd));
        let ready = doorbell::sleep(&fds, timeout);
        if ready & engine_ends != 0 {
            self.look_after_engines();
        }
        if ready & client_ends != 0 {
            self.look_after_clients(clock::now_ms());
        }
    }

    fn is_drained(&self) -> bool {
        let Some(until_ms) = self.drain_until_ms else { return false };
        let now_ms = clock::now_ms();
        if now_ms >= until_ms + ABORT_MS {
            return true;
        }
        // Who waits until something is durable hears of it, as long as there is time.
        let is_awaited = !self.tiers.keeps.is_empty()
            || !self.clients.keeps.is_empty()
            || !self.clients.removals.is_empty()
            || !self.replication.awaited.is_empty();
        self.blocks.counts().shares == 0 && (now_ms >= until_ms || !is_awaited)
    }
}
