//! The end that has the rows: a thread that takes queries out of the rings that requesters write, computes
//! what has arrived together, and answers each message by one write into its requester's memory.
//!
//! Where requesters are tensor-parallel, there is such a thread for each rank, with a transfer engine of its own:
//! rank `r` of a requester, which has the query rows of its heads alone, has its sessions with rank `r` here. All ranks
//! read the same slots, since latent rows are the same for all heads.
//!
//! [`Holder`] is the handle that the store node keeps. It opens a route over slots that a lease pins, and
//! does not let the pins go before [`Holder::close_route`] has said that nobody reads the slots any more.
//!
//! - `thread`: the loop and what it owns
//! - `batch`: what is computed, and how the answers come together
//! - `select`: the same under selection, and an indexer's scores
//! - `kernels`: who computes, by the precision that a route has
//! - `rows`: slots as a list of rows; the one place with an address in it
//!
//! Bounds: sessions, routes and bytes of rings ([`HolderOptions`]); a session has a message for each slot of
//! its ring at most, so that the thread's queue is never full of them.

mod batch;
mod kernels;
mod rows;
mod select;
mod thread;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

use kvasir_attention::Precision;
use kvasir_proto::{Generation, Namespace, SlotIndex, SlotLayout};
use kvasir_transfer::memory::SharedMemory;
use kvasir_transfer::{
    Domain, Handlers, PeerEvent, StartError, TlsFiles, TransferConfig, TransferEngine,
};
use prometheus::Registry;

pub use self::rows::{RowShape, ShapeError};
use self::thread::{Input, Thread};
use crate::metrics::HolderMetrics;
use crate::requester::DEPTH_MAX;
use crate::turns::Drive;

/// Inputs that are no queries, waiting at once.
const CONTROL_MAX: usize = 1024;

/// What a holder may take on.
#[derive(Debug, Clone)]
pub struct HolderOptions {
    pub name: String,
    pub preferred: Domain,
    /// Where queries come in over TCP, of rank 0; those of others come in at the ports that follow. Port 0 takes
    /// any free ones.
    pub tcp_listen: Option<SocketAddr>,
    /// TLS for queries over TCP; then it must be on at every requester.
    pub tcp_tls: Option<TlsFiles>,
    /// The folder of the shm domain's socket.
    pub run_dir: Option<PathBuf>,
    /// What it sends in a second at most, all ranks together; 0 for no limit.
    pub send_bytes_per_s_max: u64,
    /// Messages that a rank computes at once; one that comes beside so many is refused.
    pub concurrent_messages_max: usize,
    /// Of a rank, and routes too.
    pub sessions_max: usize,
    pub routes_max: usize,
    /// Of the query rings of all sessions together.
    pub ring_bytes_max: u64,
    /// Threads that compute, for each rank.
    pub threads: usize,
}

/// Why a holder did not start.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    #[error("cannot start the transfer engine for routed queries")]
    Start(#[from] StartError),
    #[error("cannot register the metrics")]
    Metrics(#[from] prometheus::Error),
    #[error("cannot start the thread for routed queries")]
    Thread(#[from] std::io::Error),
    #[error(
        "each rank after the first listens on the next port, but there are too few ports above {0}; choose a lower port for `routes.listen`"
    )]
    Ports(SocketAddr),
}

/// Why nothing was opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Try again later, or elsewhere.
    #[error("{0}")]
    NoSpace(String),
    /// It can never be.
    #[error("{0}")]
    Invalid(String),
    #[error("the holder has no such query session; it may have ended with its requester")]
    NoSession,
    /// No kernel reads rows that lie so: fetch them.
    #[error("{0}")]
    NoKernel(#[from] ShapeError),
    /// Too much waits, or the holder is ending.
    #[error("the holder accepts no queries now; try again later")]
    Unavailable,
}

/// What a requester asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenSession {
    /// Of its engine's tensor-parallel ranks the one that asks: the rank of that number answers, or where there are
    /// fewer, of its remainder.
    pub rank: u32,
    /// The requester's transfer address and the region of its answer ring, serialised.
    pub endpoint: Vec<u8>,
    pub answers_region: Vec<u8>,
    pub answer_bytes_max: u32,
    pub answer_imm: u32,
    pub query_bytes_max: u32,
    pub depth: u32,
}

/// What it gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionOpened {
    pub session: u64,
    pub endpoint: Vec<u8>,
    pub queries_region: Vec<u8>,
    pub query_imm: u32,
}

/// Slots that a session may attend from now on.
#[derive(Debug, Clone)]
pub struct OpenRoute {
    pub session: u64,
    /// Its name, which the caller never uses again: one of [`Holder::route_name`].
    pub route: u64,
    pub namespace: Namespace,
    /// In the order of the chain; pinned until the route is closed.
    pub blocks: Vec<(SlotIndex, Generation)>,
    pub layout: Arc<SlotLayout>,
    /// The dtype of the rows, by its name.
    pub kv_dtype: String,
    /// What its requester rounds products to where it computes them itself.
    pub precision: Precision,
}

/// What a requester must know beside the route's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteOpened {
    /// Stands for the namespace, the slots and their generations.
    pub pins: u64,
    /// Values of a row.
    pub d_qk: u32,
}

/// An answer to the caller, given on the holder's thread: short, and never waiting.
pub type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// See the module.
#[derive(Debug)]
pub struct Holder {
    /// By number.
    ranks: Vec<Rank>,
}

#[derive(Debug)]
struct Rank {
    inputs: SyncSender<Input>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Holder {
    /// Starts a rank for each of these registries, where its transfer engine counts, over the node's slot memory.
    ///
    /// # Errors
    /// [`HolderError`].
    ///
    /// # Panics
    /// Without a registry.
    pub fn start(
        options: &HolderOptions,
        slots: &Arc<SharedMemory>,
        registries: &[Registry],
        metrics_registry: &Registry,
    ) -> Result<Self, HolderError> {
        assert!(!registries.is_empty(), "a holder has at least one rank");
        let metrics = HolderMetrics::new(metrics_registry)?;
        let shared = Shared { slots: Arc::clone(slots), ring_bytes: Arc::default(), metrics };
        let start = |(number, registry): (usize, &Registry)| {
            let place = Place { number, of: registries.len() };
            Rank::start(place.options(options)?, place, shared.clone(), registry)
        };
        let ranks = registries.iter().enumerate().map(start).collect::<Result<_, HolderError>>()?;
        Ok(Holder { ranks })
    }

    /// The first name for a route of this session from this one on: routes are known by it to be of the session's
    /// rank.
    pub fn route_name(&self, session: u64, from: u64) -> u64 {
        let ranks = self.ranks.len() as u64;
        name_with(session % ranks, ranks, from)
    }

    /// Makes a query ring for a requester.
    pub fn open_session(
        &self,
        request: OpenSession,
        reply: Reply<Result<SessionOpened, OpenError>>,
    ) {
        let rank = u64::from(request.rank);
        self.of(rank).ask(Input::OpenSession(Box::new(request), reply));
    }

    /// Ends a session and its routes. Nothing that its requester writes lands any more.
    pub fn close_session(&self, session: u64) {
        self.of(session).ask(Input::CloseSession(session));
    }

    /// Lets a session attend slots, which must stay as they are until the route is closed.
    pub fn open_route(&self, request: OpenRoute, reply: Reply<Result<RouteOpened, OpenError>>) {
        debug_assert_eq!(self.route_name(request.session, request.route), request.route);
        self.of(request.session).ask(Input::OpenRoute(Box::new(request), reply));
    }

    /// Ends a route. When `done` is called nobody reads its slots, and nobody will; also when there is no such
    /// route (any more), and when the holder has ended.
    pub fn close_route(&self, route: u64, done: Reply<()>) {
        self.of(route).ask(Input::CloseRoute(route, done));
    }

    /// Numbers of ranks, and names of their sessions and routes, all have the rank as their remainder.
    fn of(&self, name: u64) -> &Rank {
        &self.ranks[(name % self.ranks.len() as u64) as usize]
    }
}

/// The first number from this one on that has such a remainder; beyond the last there is, the first of all.
fn name_with(remainder: u64, of: u64, from: u64) -> u64 {
    from.checked_add((remainder + of - from % of) % of).unwrap_or(remainder)
}

/// What all ranks have in common.
#[derive(Debug, Clone)]
struct Shared {
    slots: Arc<SharedMemory>,
    /// Taken by query rings.
    ring_bytes: Arc<AtomicU64>,
    metrics: HolderMetrics,
}

impl Shared {
    /// Takes so many bytes for a ring, unless that is more than there may be: then it answers what is taken.
    fn take_ring(&self, bytes: u64, max: u64) -> Result<RingBytes, u64> {
        let beside = |taken: u64| taken.checked_add(bytes).filter(|all| *all <= max);
        self.ring_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, beside)?;
        Ok(RingBytes { bytes, of: Arc::clone(&self.ring_bytes) })
    }
}

/// A part of the budget of rings, until it is dropped.
#[derive(Debug)]
struct RingBytes {
    bytes: u64,
    of: Arc<AtomicU64>,
}

impl Drop for RingBytes {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Which of how many ranks one is.
#[derive(Debug, Clone, Copy)]
struct Place {
    number: usize,
    of: usize,
}

impl Place {
    fn options(self, all: &HolderOptions) -> Result<HolderOptions, HolderError> {
        let own = all.clone();
        if self.of == 1 {
            return Ok(own);
        }
        let beside = |listen: SocketAddr| {
            let port = match listen.port() {
                0 => Some(0),
                port => u16::try_from(self.number).ok().and_then(|rank| port.checked_add(rank)),
            };
            let port = port.ok_or(HolderError::Ports(listen))?;
            Ok::<_, HolderError>(SocketAddr::new(listen.ip(), port))
        };
        Ok(HolderOptions {
            name: format!("{}-{}", all.name, self.number),
            tcp_listen: all.tcp_listen.map(beside).transpose()?,
            send_bytes_per_s_max: all.send_bytes_per_s_max.div_ceil(self.of as u64),
            ..own
        })
    }
}

impl Rank {
    fn start(
        options: HolderOptions,
        place: Place,
        shared: Shared,
        registry: &Registry,
    ) -> Result<Self, HolderError> {
        let (inputs, queue) = sync_channel(options.sessions_max * DEPTH_MAX as usize + CONTROL_MAX);
        let lost = inputs.clone();
        let handlers = Handlers {
            on_peer: Box::new(move |event| {
                let input = match event {
                    PeerEvent::SessionLost { peer, .. } => Input::PeerLost(peer.incarnation()),
                    PeerEvent::WriterLost { incarnation, .. } => Input::PeerLost(incarnation),
                };
                // When it is full, the sessions are closed by their own failing answers.
                let _ = lost.try_send(input);
            }),
            ..Handlers::default()
        };
        let transfer = TransferConfig {
            metrics_prefix: "kvasir_route_transfer",
            name: options.name.clone(),
            preferred: options.preferred,
            tcp_listen: options.tcp_listen,
            tcp_tls: options.tcp_tls.clone(),
            run_dir: options.run_dir.clone(),
            send_bytes_per_s_max: options.send_bytes_per_s_max,
            ..TransferConfig::default()
        };
        let (transfer, driver) = TransferEngine::start_driven(transfer, handlers, registry)?;
        let drive = Drive::start(driver, &options.name)?;
        let thread = Thread::new(options, place, shared, transfer, inputs.clone());
        let thread = std::thread::Builder::new()
            .name("route-holder".into())
            .spawn(move || thread.run(&queue, &drive))?;
        Ok(Rank { inputs, thread: Some(thread) })
    }

    fn ask(&self, input: Input) {
        let input = match self.inputs.try_send(input) {
            Ok(()) => return,
            Err(TrySendError::Full(input) | TrySendError::Disconnected(input)) => input,
        };
        match input {
            Input::OpenSession(_, reply) => reply(Err(OpenError::Unavailable)),
            Input::OpenRoute(_, reply) => reply(Err(OpenError::Unavailable)),
            // It must not be lost: slots are given to others after it. The thread computes for a bounded
            // time between two looks at its queue; one that has ended gives it back.
            Input::CloseRoute(..) => {
                if let Err(error) = self.inputs.send(input)
                    && let Input::CloseRoute(_, done) = error.0
                {
                    done(());
                }
            }
            Input::CloseSession(_) | Input::Arrived { .. } | Input::PeerLost(_) | Input::Stop => {}
        }
    }
}

impl Drop for Rank {
    /// When it is dropped nobody reads slots any more.
    fn drop(&mut self) {
        // Waits for room, as for a route: the thread takes all that is there.
        let _ = self.inputs.send(Input::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!(
                "the store node's thread for routed queries panicked; restart the node"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_their_rank_as_remainder_and_none_comes_twice() {
        for (rank, of, from, want) in [
            (0, 1, 7, 7),
            (1, 2, 7, 7),
            (0, 2, 7, 8),
            (2, 3, 9, 11),
            (0, 3, 11, 12),
            (0, 1, u64::MAX, u64::MAX),
            (0, 2, u64::MAX, 0),
        ] {
            assert_eq!(name_with(rank, of, from), want, "{rank} of {of} from {from}");
        }
    }

    #[test]
    fn rings_of_all_ranks_take_from_one_budget() {
        let metrics = HolderMetrics::new(&Registry::new()).expect("registers");
        let memory = SharedMemory::create("slots", 4096, kvasir_transfer::memory::Prefault::Yes);
        let slots = Arc::new(memory.expect("memory"));
        let (one, max) = (Shared { slots, ring_bytes: Arc::default(), metrics }, 10);
        let other = one.clone();
        let first = one.take_ring(6, max).expect("room");
        assert_eq!(other.take_ring(5, max).err(), Some(6));
        assert_eq!(other.take_ring(u64::MAX, max).err(), Some(6));
        let _second = other.take_ring(4, max).expect("room");
        assert_eq!(one.take_ring(1, max).err(), Some(10));
        drop(first);
        assert!(other.take_ring(6, max).is_ok());
    }

    #[test]
    fn each_rank_has_a_name_and_a_port_of_its_own() {
        let all = |port| HolderOptions {
            name: "n".into(),
            preferred: Domain::Tcp,
            tcp_listen: Some(SocketAddr::from(([127, 0, 0, 1], port))),
            tcp_tls: None,
            run_dir: None,
            send_bytes_per_s_max: 1_001,
            concurrent_messages_max: 8,
            sessions_max: 4,
            routes_max: 16,
            ring_bytes_max: 1 << 20,
            threads: 1,
        };
        let of = |port, number, of| {
            let own = Place { number, of }.options(&all(port))?;
            let port = own.tcp_listen.map(|listen| listen.port());
            Ok::<_, HolderError>((own.name, port, own.send_bytes_per_s_max))
        };
        type Own = (String, Option<u16>, u64);
        let is = |got: Result<Own, HolderError>, (name, port, bytes): (&str, u16, u64)| {
            assert_eq!(got.expect("it has a place"), (name.to_owned(), Some(port), bytes));
        };
        is(of(7000, 0, 1), ("n", 7000, 1_001));
        is(of(7000, 1, 2), ("n-1", 7001, 501));
        is(of(0, 1, 2), ("n-1", 0, 501));
        assert!(matches!(of(u16::MAX, 1, 2), Err(HolderError::Ports(_))));
    }
}
