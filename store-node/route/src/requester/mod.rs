//! The end that owns queries. A [`Requester`] is one for an engine process; a [`Session`] is its line to
//! one holder: a ring of query slots there, a ring of answer slots here. A [`Flight`] is one exchange.
//!
//! - Slot `i` of the query ring may be written when slot `i` of the answer ring is free: then the holder has
//!   done with the query before. So the two rings need no other hand-shake.
//! - An answer is taken whole or not at all, and a flight that was given up leaves its slot in quarantine
//!   ([`slot`]) until the answer has come or the session is over.
//! - Any thread may dispatch; [`gather`] waits on one.
//! - Under selection a layer is two exchanges ([`selection`]).

mod gate;
mod selection;
mod session;
mod slot;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use dashmap::DashMap;
use kvasir_transfer::memory::{MemoryError, Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, ConnectError, Domain, Endpoint, Handlers, PeerEvent, PeerId, RegionDesc,
    RegionHandle, RegisterError, StartError, TlsFiles, TransferConfig, TransferEngine, WireError,
    WriteError,
};
use prometheus::Registry;

use self::gate::Gate;
pub use self::selection::{IndexRows, IndexShape, SelectedRows};
use self::session::{Core, Rings};
pub use self::session::{
    DispatchError, Flight, FlightError, PartRows, QueryShape, Session, gather,
};
use crate::metrics::RequesterMetrics;
use crate::turns::Drive;

/// Slots of a session's rings at most. One exchange is under way at a time in one step of a model; the
/// others are room for those that were given up.
pub const DEPTH_MAX: u32 = 16;

/// How a requester is reached by holders, and reaches them.
#[derive(Debug, Clone)]
pub struct RequesterOptions {
    /// For logs and thread names.
    pub name: String,
    pub preferred: Domain,
    /// Where answers come in over TCP; port 0 takes any free one.
    pub tcp_listen: Option<SocketAddr>,
    /// TLS over TCP; then it must be on at every holder.
    pub tcp_tls: Option<TlsFiles>,
    /// The folder of the shm domain's socket.
    pub run_dir: Option<PathBuf>,
    /// What it sends in a second at most; 0 for no limit.
    pub send_bytes_per_s_max: u64,
}

/// Why a requester did not start or a session was not opened.
#[derive(Debug, thiserror::Error)]
pub enum RequesterError {
    #[error("cannot start the transfer engine for routed queries")]
    Start(#[from] StartError),
    #[error("cannot register the metrics")]
    Metrics(#[from] prometheus::Error),
    #[error("cannot allocate memory for answers")]
    Memory(#[from] MemoryError),
    #[error("cannot start the thread for routed queries")]
    Thread(#[from] std::io::Error),
    #[error("cannot register the memory for answers")]
    Register(#[from] RegisterError),
    #[error("cannot reach the holder")]
    Connect(#[from] ConnectError),
    /// Nothing that was sent to it has landed.
    #[error("cannot send queries to the holder: {0}")]
    Unreached(#[source] WriteError),
    /// The holder said what cannot be.
    #[error("invalid reply of the holder: {0}")]
    Reply(String),
}

/// What a session is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionSize {
    pub query_bytes_max: u32,
    pub answer_bytes_max: u32,
    /// 1 to [`DEPTH_MAX`].
    pub depth: u32,
}

/// Memory that answers of one holder will be written to: what the holder is told of it. Dropped, alone or
/// with its session, nothing lands in it any more.
#[derive(Debug)]
pub struct Prepared {
    core: Arc<Core>,
    size: SessionSize,
    answers: RegionHandle,
    answer_imm: u32,
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let transfer = &self.core.transfer;
        // The memory goes when this is done.
        let _ = transfer.revoke(&self.answers, Completion::Ignore);
        for slot in 0..self.size.depth {
            let _ = transfer.cancel_imm(self.answer_imm + slot, Completion::Ignore);
        }
    }
}

impl Prepared {
    pub fn size(&self) -> SessionSize {
        self.size
    }

    /// The region of the answer ring, serialised.
    pub fn answers_region(&self) -> Vec<u8> {
        self.answers.descriptor().to_bytes()
    }

    /// Slot `i`'s answers carry this plus `i`.
    pub fn answer_imm(&self) -> u32 {
        self.answer_imm
    }
}

/// What a holder has granted.
#[derive(Debug, Clone)]
pub struct Grant {
    pub session: u64,
    /// The holder's transfer address, serialised.
    pub endpoint: Vec<u8>,
    /// The region of the query ring, serialised.
    pub queries_region: Vec<u8>,
    pub query_imm: u32,
}

/// The sessions with each holder. The transfer engine's thread removes those of a lost holder.
type Sessions = DashMap<PeerId, Vec<Weak<Rings>>>;

/// See the module.
#[derive(Debug)]
pub struct Requester {
    core: Arc<Core>,
    sessions: Arc<Sessions>,
    next_imm: AtomicU32,
}

impl Requester {
    /// # Errors
    /// [`RequesterError::Start`], [`RequesterError::Metrics`] and [`RequesterError::Thread`].
    pub fn start(options: RequesterOptions, registry: &Registry) -> Result<Self, RequesterError> {
        let sessions: Arc<Sessions> = Arc::default();
        let gate = Arc::new(Gate::default());
        let (lost_sessions, lost_gate) = (Arc::clone(&sessions), Arc::clone(&gate));
        let handlers = Handlers {
            on_peer: Box::new(move |event| {
                let PeerEvent::SessionLost { peer, .. } = event else { return };
                let lost = lost_sessions.remove(&peer).map(|(_, lost)| lost).unwrap_or_default();
                for rings in lost.iter().filter_map(Weak::upgrade) {
                    rings.lose();
                }
                lost_gate.open();
            }),
            ..Handlers::default()
        };
        let config = TransferConfig {
            name: options.name.clone(),
            preferred: options.preferred,
            tcp_listen: options.tcp_listen,
            tcp_tls: options.tcp_tls,
            run_dir: options.run_dir,
            send_bytes_per_s_max: options.send_bytes_per_s_max,
            ..TransferConfig::default()
        };
        let metrics = RequesterMetrics::new(registry)?;
        let (transfer, driver) = TransferEngine::start_driven(config, handlers, registry)?;
        let core = Core { drive: Drive::start(driver, &options.name)?, transfer, gate, metrics };
        Ok(Requester { core: Arc::new(core), sessions, next_imm: AtomicU32::new(1) })
    }

    /// Where holders write answers to, serialised.
    pub fn endpoint(&self) -> Vec<u8> {
        self.core.transfer.endpoint().to_bytes()
    }

    pub fn metrics(&self) -> &RequesterMetrics {
        &self.core.metrics
    }

    /// Makes room for answers of one holder.
    ///
    /// # Errors
    /// [`RequesterError::Memory`] and [`RequesterError::Register`].
    ///
    /// # Panics
    /// When the depth is 0 or more than [`DEPTH_MAX`].
    pub fn prepare(&self, size: SessionSize) -> Result<Prepared, RequesterError> {
        assert!((1..=DEPTH_MAX).contains(&size.depth), "a depth of {}", size.depth);
        let bytes = size.answer_bytes_max as usize * size.depth as usize;
        let memory = SharedMemory::create("kvasir-answers", bytes, Prefault::Yes)?;
        let (answers, _) = self.core.transfer.register(Arc::new(memory))?;
        // A process would have to open sessions for years before one comes again.
        let answer_imm = self.next_imm.fetch_add(size.depth, Ordering::Relaxed);
        Ok(Prepared { core: Arc::clone(&self.core), size, answers, answer_imm })
    }

    /// A session that a holder has granted for what was prepared.
    ///
    /// # Errors
    /// [`RequesterError::Connect`] and [`RequesterError::Reply`].
    pub fn open(&self, prepared: Prepared, grant: &Grant) -> Result<Arc<Session>, RequesterError> {
        let wrong = |what: &str, error: WireError| {
            RequesterError::Reply(format!("field `{what}`: {error}"))
        };
        let endpoint =
            Endpoint::from_bytes(&grant.endpoint).map_err(|error| wrong("endpoint", error))?;
        let queries = RegionDesc::from_bytes(&grant.queries_region)
            .map_err(|error| wrong("queries_region", error))?;
        let size = prepared.size;
        if queries.length_bytes < u64::from(size.query_bytes_max) * u64::from(size.depth) {
            return Err(RequesterError::Reply("the query ring is smaller than requested".into()));
        }
        let peer = self.core.transfer.connect(&endpoint)?;
        let rings = Arc::new(Rings::new(size.depth));
        {
            let mut of_peer = self.sessions.entry(peer).or_default();
            of_peer.retain(|rings| rings.strong_count() > 0);
            of_peer.push(Arc::downgrade(&rings));
        }
        // From now on its loss is noticed, also between two queries.
        if self.core.transfer.set_wanted(peer, true).is_err() {
            rings.lose();
        }
        Ok(Arc::new(Session::new(prepared, rings, peer, grant, queries)))
    }
}
