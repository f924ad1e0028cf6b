//! The end that has the rows: one thread that takes queries out of the rings that requesters write, computes
//! what has arrived together, and answers each message by one write into its requester's memory.
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
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};

pub use kvasir_attention::Precision;
use kvasir_proto::{Generation, Namespace, SlotIndex, SlotLayout};
use kvasir_transfer::{
    Domain, Handlers, PeerEvent, SharedMemory, StartError, TlsFiles, TransferConfig, TransferEngine,
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
    /// Where queries come in over TCP; port 0 takes any free one.
    pub tcp_listen: Option<SocketAddr>,
    /// TLS for queries over TCP; then it must be on at every requester.
    pub tcp_tls: Option<TlsFiles>,
    /// The folder of the shm domain's socket.
    pub run_dir: Option<PathBuf>,
    /// What it sends in a second at most; 0 for no limit.
    pub throttle_bytes_per_s: u64,
    /// Messages that are computed at once; one that comes beside so many is refused.
    pub flows_max: usize,
    pub sessions_max: usize,
    pub routes_max: usize,
    /// Of the query rings of all sessions together.
    pub ring_bytes_max: u64,
    /// Threads that compute.
    pub threads: usize,
}

/// Why a holder did not start.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    #[error("the transfer engine for routed queries did not start")]
    Start(#[from] StartError),
    #[error("the metrics cannot be registered")]
    Metrics(#[from] prometheus::Error),
    #[error("the thread for routed queries cannot be started")]
    Thread(#[from] std::io::Error),
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
    #[error("no such session; it may have ended with its requester")]
    NoSession,
    /// No kernel reads rows that lie so: fetch them.
    #[error("{0}")]
    NoKernel(#[from] ShapeError),
    /// Too much waits, or the holder is ending.
    #[error("the holder takes nothing now; try again")]
    Unavailable,
}

/// What a requester asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenSession {
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
    /// Its name, which the caller never uses again.
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
    inputs: SyncSender<Input>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Holder {
    /// Starts the thread and its transfer engine, over the node's slot memory.
    ///
    /// # Errors
    /// [`HolderError`].
    pub fn start(
        options: HolderOptions,
        slots: Arc<SharedMemory>,
        registry: &Registry,
        metrics_registry: &Registry,
    ) -> Result<Self, HolderError> {
        let metrics = HolderMetrics::new(metrics_registry)?;
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
            name: options.name.clone(),
            preferred: options.preferred,
            tcp_listen: options.tcp_listen,
            tcp_tls: options.tcp_tls.clone(),
            run_dir: options.run_dir.clone(),
            throttle_bytes_per_s: options.throttle_bytes_per_s,
            ..TransferConfig::default()
        };
        let (transfer, driver) = TransferEngine::start_driven(transfer, handlers, registry)?;
        let drive = Drive::start(driver, &options.name)?;
        let thread = Thread::new(options, slots, transfer, inputs.clone(), metrics);
        let thread = std::thread::Builder::new()
            .name("route-holder".into())
            .spawn(move || thread.run(&queue, &drive))?;
        Ok(Holder { inputs, thread: Some(thread) })
    }

    /// Makes a query ring for a requester.
    pub fn open_session(
        &self,
        request: OpenSession,
        reply: Reply<Result<SessionOpened, OpenError>>,
    ) {
        self.ask(Input::OpenSession(Box::new(request), reply));
    }

    /// Ends a session and its routes. Nothing that its requester writes lands any more.
    pub fn close_session(&self, session: u64) {
        self.ask(Input::CloseSession(session));
    }

    /// Lets a session attend slots, which must stay as they are until the route is closed.
    pub fn open_route(&self, request: OpenRoute, reply: Reply<Result<RouteOpened, OpenError>>) {
        self.ask(Input::OpenRoute(Box::new(request), reply));
    }

    /// Ends a route. When `done` is called nobody reads its slots, and nobody will; also when there is no such
    /// route (any more), and when the holder has ended.
    pub fn close_route(&self, route: u64, done: Reply<()>) {
        self.ask(Input::CloseRoute(route, done));
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

impl Drop for Holder {
    /// When it is dropped nobody reads slots any more.
    fn drop(&mut self) {
        // Waits for room, as for a route: the thread takes all that is there.
        let _ = self.inputs.send(Input::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for routed queries has panicked");
        }
    }
}
