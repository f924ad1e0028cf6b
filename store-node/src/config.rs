//! The store node's configuration: one typed struct, read once. Refuses what cannot work, in a
//! sentence that says what to set.

mod object_store;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use kvasir_blocks::Eviction;
use kvasir_transfer::{Domain, EfaConfig, TransferTls, VerbsConfig, Verify};

pub use self::object_store::{Keys, ObjectStore};

/// Fewer slots than this serve nobody: an engine whose blocks are too large for the arena to hold
/// as many is refused.
pub const ARENA_SLOTS_MIN: u32 = 8;

/// No host has GPUs for more engines; each costs descriptors, a ring and a look at every turn of the node.
const ENGINES_MOST: u32 = 64;

/// Settings of one store node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The node's name, unique in the cluster. It appears in events, logs and metrics.
    pub node_id: String,
    /// Address of gRPC and of the HTTP paths /metrics, /healthz and /readyz.
    pub listen: SocketAddr,
    /// Directory of the sockets `attach.sock` and `descriptors.sock`, which engines and clients open. The node
    /// creates it. The length of a Unix socket address limits its path to about 90 bytes.
    pub attach_dir: PathBuf,
    /// DRAM for the cache. The node takes it at the start. The node uses huge pages if the size is a multiple of 2
    /// MiB and the host has enough of them free (`vm.nr_hugepages`).
    pub dram_bytes: u64,
    /// Memory for the tails of pushes: checksums and the engine's data that follow the pages. A share that another
    /// node writes takes 64 bytes, 8 bytes for each missing page, and on the decode side 8 KiB more, rounded up to
    /// 1 KiB. If the space is full, the node refuses further shares. 16 MiB hold 1,800 short prompts at once, or
    /// 1,600 prompts of 8,192 tokens with pages of 64 tokens.
    pub tail_bytes: u64,
    /// Host memory for all KV pools that engines create in the node when they attach. 0 refuses such pools.
    pub engine_pool_bytes_max: u64,
    /// Attached engines. They share the cache, so they must serve one model with one KV type and one block layout.
    pub engines_max: u32,
    /// NVIDIA's driver library. The node opens it when an engine attaches with a pool in GPU memory. The default is
    /// the system's libcuda.so.1.
    pub cuda_library: Option<PathBuf>,
    /// The preferred transport to other nodes: shared memory on one host, TCP, the RDMA devices of `verbs`, or the
    /// network of `efa`. For peers that it does not reach, the node uses shared memory on one host and TCP between
    /// hosts.
    pub transport: Domain,
    /// The thread that drives the transfer engine: "dedicated", a thread of its own; "shared", the node's main
    /// thread, which saves two wake-ups at each end of a transfer; "auto", the shared thread on a host with at most
    /// four cores, else the dedicated one.
    pub transfer_thread: TransferThread,
    /// Address at which this node accepts writes of peers over TCP. Port 0 takes any free port.
    pub transfer_listen: SocketAddr,
    /// TLS for writes over TCP. It is on when the three files are set. All nodes must agree.
    pub transfer_tls: TransferTls,
    /// The longest lease that a conductor may request, in milliseconds.
    pub lease_max_ms: u64,
    /// Push the pages of prefill shares. false is for tests of a decode side that waits for its pages.
    pub push_enabled: bool,
    /// Transports over which the checksums of received pages are verified.
    pub verify: Verify,
    /// Limit of the bytes per second that this node sends to all peers together. 0 is no limit. It emulates a slow
    /// network in measurements.
    pub send_bytes_per_s_max: u64,
    /// File to which the node writes a line for each pushed layer, with the times of issue and completion.
    pub layer_log_file: Option<PathBuf>,
    /// Timeout, in milliseconds, of a request to a peer to stop writing. After it the peer is cut off.
    pub peer_stop_timeout_ms: u64,
    /// Timeout, in milliseconds, of a request to an engine to stop working on a share. After it the engine is
    /// detached: it gets no more work, and its slots are freed when its process ends. The time stands still while
    /// the engine finishes, layer by layer, the step in which it was told.
    pub engine_stop_timeout_ms: u64,
    /// The block that is evicted from DRAM first: "hit-density", the one with the lowest predicted hits per second;
    /// "lru", the least recently used one.
    #[schemars(with = "String")]
    pub eviction_policy: Eviction,
    /// The SSD tier.
    pub ssd: Ssd,
    /// The object store that the nodes share.
    pub object_store: ObjectStore,
    /// The callers that may administer the node over gRPC (list, inspect, pin, evict, replicate, drain):
    /// "disabled", "loopback" (callers on this host), or "any" (every caller that reaches `listen`).
    pub admin_access: AdminAccess,
    /// Replication of blocks to other nodes.
    pub replication: Replication,
    /// Routed attention: this node answers queries of engines on other nodes over its blocks.
    pub routes: Routes,
    /// Time, in milliseconds, that a shutdown waits for open shares.
    pub drain_timeout_ms: u64,
    /// The RDMA devices, for `transport = "verbs"`. The node does not start if a device is missing.
    pub verbs: VerbsConfig,
    /// EFA, for `transport = "efa"`. The node does not start if the device or libfabric is missing.
    pub efa: EfaConfig,
    /// File that replaces the detected topology of NICs and memory. It contains JSON of the form {"cpu:0":
    /// {"preferred": ["mlx5_0"], "secondary": ["mlx5_1"]}} and may name only NICs in use. `kvasir doctor` prints
    /// the detected topology.
    pub topology_file: Option<PathBuf>,
}

/// On a host with at most this many cores a further thread costs more than it saves.
const FEW_CORES: usize = 4;

/// The thread that drives a node's transfer engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TransferThread {
    Auto,
    Dedicated,
    Shared,
}

impl TransferThread {
    pub(crate) fn is_shared(self) -> bool {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        match self {
            TransferThread::Auto => cores <= FEW_CORES,
            TransferThread::Dedicated => false,
            TransferThread::Shared => true,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            node_id: "node".into(),
            listen: (Ipv4Addr::LOCALHOST, 7401).into(),
            attach_dir: "/run/kvasir/node".into(),
            dram_bytes: 1 << 30,
            tail_bytes: 16 << 20,
            engine_pool_bytes_max: 64 << 30,
            engines_max: 8,
            cuda_library: None,
            transport: Domain::Shm,
            transfer_thread: TransferThread::Auto,
            transfer_listen: (Ipv4Addr::LOCALHOST, 0).into(),
            transfer_tls: TransferTls::default(),
            lease_max_ms: 60_000,
            push_enabled: true,
            verify: Verify::default(),
            send_bytes_per_s_max: 0,
            layer_log_file: None,
            peer_stop_timeout_ms: 1_000,
            engine_stop_timeout_ms: 30_000,
            drain_timeout_ms: 5_000,
            verbs: VerbsConfig::default(),
            efa: EfaConfig::default(),
            topology_file: None,
            eviction_policy: Eviction::default(),
            ssd: Ssd::default(),
            object_store: ObjectStore::default(),
            admin_access: AdminAccess::default(),
            replication: Replication::default(),
            routes: Routes::default(),
        }
    }
}

/// The callers that may administer a node.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum AdminAccess {
    Disabled,
    /// Callers on this host, over any of its addresses.
    #[default]
    Loopback,
    /// Every caller that reaches the node's gRPC address.
    Any,
}

/// Routed attention: engines send queries to this node, and it sends partial results back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Routes {
    /// Answer queries. If false, other nodes can still fetch the blocks.
    pub enabled: bool,
    /// Address for queries over TCP. Port 0 takes any free port. `transfer_tls` protects it too. The ranks after
    /// the first one use the ports that follow.
    pub listen: SocketAddr,
    /// Tensor-parallel ranks that answer: queries of rank `r` of an engine go to rank `r` modulo this number. Each
    /// rank has its own threads and transfer engine. If an engine has more ranks than the node, several of them
    /// share one rank and each counts towards the limits below. If it has fewer, it gets only their part of
    /// `send_bytes_per_s_max`.
    pub ranks: u32,
    /// Messages of engines that a rank computes at once. A further message is refused, and its engine sends it
    /// again until its timeout. At about eight, a replica of the blocks on another node is worth its cost.
    pub concurrent_messages_max: u32,
    /// Engines with a query ring at one rank.
    pub sessions_max: u32,
    /// Sequences of engines that attend blocks at one rank at once.
    pub routes_max: u32,
    /// Memory for the query rings of all engines together. The node takes it when engines open sessions.
    pub ring_bytes_max: u64,
    /// Compute threads of each rank.
    pub threads: u32,
}

impl Default for Routes {
    fn default() -> Self {
        Routes {
            enabled: true,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            ranks: 1,
            concurrent_messages_max: 8,
            sessions_max: 64,
            routes_max: 4096,
            ring_bytes_max: 256 << 20,
            threads: 1,
        }
    }
}

/// Each has two threads.
const RANKS_MAX: u32 = 64;

impl Routes {
    fn check(&self) -> Result<(), String> {
        for (name, number) in [
            ("concurrent_messages_max", self.concurrent_messages_max),
            ("sessions_max", self.sessions_max),
            ("routes_max", self.routes_max),
            ("threads", self.threads),
            ("ranks", self.ranks),
        ] {
            if number == 0 {
                return Err(format!("`routes.{name}` must be above 0"));
            }
        }
        if self.ranks > RANKS_MAX {
            return Err(format!("`routes.ranks` must be at most {RANKS_MAX}"));
        }
        if self.sessions_max > 1024 {
            return Err("`routes.sessions_max` must be at most 1024".into());
        }
        if self.ring_bytes_max == 0 {
            return Err("`routes.ring_bytes_max` must be above 0".into());
        }
        Ok(())
    }
}

/// When and to which nodes blocks are replicated.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Replication {
    /// gRPC addresses of the nodes that may hold replicas of this node's blocks. The list may contain this node.
    pub peers: Vec<String>,
    /// Copies in flight.
    pub concurrent_copies_max: u32,
    /// A chain of blocks is replicated to one of `peers` if other nodes request it this often within ten seconds,
    /// while at least `hot_pushes_min` pushes are in flight. 0 disables the replication of hot blocks.
    pub hot_requests_min: u32,
    /// Pushes to other nodes that must be in flight for the replication of hot blocks.
    pub hot_pushes_min: u32,
    /// Interval, in milliseconds, at which the node asks `peers` for the replicas of contexts and creates missing
    /// ones.
    pub check_interval_ms: u64,
    /// A node that does not answer for this time, in milliseconds, counts as lost: its contexts are replicated to
    /// another node. Set it longer than a restart takes.
    pub node_lost_after_ms: u64,
    /// During a drain: the number of bytes of blocks outside contexts that are copied. The blocks with the highest
    /// predicted reuse move first.
    pub drain_hot_bytes_max: u64,
}

impl Default for Replication {
    fn default() -> Self {
        Replication {
            peers: Vec::new(),
            concurrent_copies_max: 2,
            hot_requests_min: 8,
            hot_pushes_min: 4,
            check_interval_ms: 5_000,
            node_lost_after_ms: 60_000,
            drain_hot_bytes_max: 1 << 30,
        }
    }
}

impl Replication {
    fn check(&self) -> Result<(), String> {
        if self.concurrent_copies_max == 0 {
            return Err("`replication.concurrent_copies_max` must be above 0".into());
        }
        if self.check_interval_ms == 0 || self.node_lost_after_ms <= self.check_interval_ms {
            return Err("`replication.check_interval_ms` must be above 0, and `replication.node_lost_after_ms` must be longer".into());
        }
        match self.peers.iter().find(|peer| !is_address(peer)) {
            Some(wrong) => Err(format!(
                "`replication.peers` contains {wrong:?}; write addresses as in \"10.0.0.7:7401\""
            )),
            None => Ok(()),
        }
    }
}

/// A host and a port, and nothing else.
pub fn is_address(text: &str) -> bool {
    let is_host = |host: &str| {
        !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || "-._:[]".contains(c))
    };
    text.rsplit_once(':')
        .is_some_and(|(host, port)| is_host(host) && port.parse::<u16>().is_ok_and(|port| port > 0))
}

/// The SSD tier: demoted blocks and durable contexts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Ssd {
    /// Directory of the SSD tier, on a local disk, used by this node alone. The node creates it. Without it there
    /// is no SSD tier.
    pub dir: Option<PathBuf>,
    /// Disk space for blocks. The node takes it at the start. Extents fill at most about three quarters of it; the
    /// rest is headroom for cleaning.
    pub capacity_bytes: u64,
    /// Size of the log's segments, the unit of reclamation. At least eight times the size of a block. An existing
    /// log keeps its own size.
    pub segment_bytes: u64,
    /// Share of the extents' space that contexts may take, in percent.
    pub context_percent: u32,
    /// Bytes of contexts of one tenant.
    pub tenant_bytes_max: u64,
    /// Share of the slots, in percent, that the node keeps free or immediately evictable because the SSD has a
    /// copy. The node demotes blocks ahead of need to reach it.
    pub demote_ahead_percent: u32,
    /// Chains of blocks that are promoted to DRAM at once on hints of conductors and lookups of engines. At most
    /// 1024; 0 disables prefetching.
    pub prefetch_chains_max: u32,
    /// Blocks that were used within this time, in milliseconds, are not evicted for prefetched blocks.
    pub prefetch_protected_ms: u64,
    /// Timeout, in milliseconds, of an SSD operation. After it requests recompute their blocks, and the node starts
    /// no SSD operation until the late one ends.
    pub timeout_ms: u64,
    /// How the node accesses the disk. `auto`: io_uring without the page cache if the host allows it, else as
    /// `plain`. `plain`: blocking calls through the page cache.
    pub io: SsdIo,
    /// For tests: file with the names of the faults to inject: `wrong`, `full`, `read-errors`, `hang`.
    pub faults_file: Option<PathBuf>,
}

/// How the node accesses the disk.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum SsdIo {
    /// io_uring without the page cache if the host allows it, else `plain`.
    #[default]
    Auto,
    /// Blocking calls through the page cache.
    Plain,
}

impl Default for Ssd {
    fn default() -> Self {
        Ssd {
            dir: None,
            capacity_bytes: 16 << 30,
            segment_bytes: 32 << 20,
            context_percent: 50,
            tenant_bytes_max: 1 << 30,
            demote_ahead_percent: 25,
            prefetch_chains_max: 16,
            prefetch_protected_ms: 1_000,
            timeout_ms: 2_000,
            io: SsdIo::Auto,
            faults_file: None,
        }
    }
}

impl Ssd {
    fn check(&self) -> Result<(), String> {
        // As many segments as a log has at least, and its first two pages.
        let least = self.segment_bytes.saturating_mul(8).saturating_add(2 * HOST_PAGE_BYTES);
        for (name, bytes) in
            [("ssd.capacity_bytes", self.capacity_bytes), ("ssd.segment_bytes", self.segment_bytes)]
        {
            if bytes == 0 || !bytes.is_multiple_of(HOST_PAGE_BYTES) {
                return Err(format!(
                    "`{name}` is {bytes}; it must be a multiple of {HOST_PAGE_BYTES}"
                ));
            }
        }
        if self.segment_bytes < 32 * HOST_PAGE_BYTES {
            return Err(format!("`ssd.segment_bytes` must be at least {}", 32 * HOST_PAGE_BYTES));
        }
        if self.capacity_bytes < least {
            return Err(format!(
                "`ssd.capacity_bytes` must be at least {least}: the log needs 8 segments"
            ));
        }
        for (name, percent) in [
            ("ssd.context_percent", self.context_percent),
            ("ssd.demote_ahead_percent", self.demote_ahead_percent),
        ] {
            if percent > 100 {
                return Err(format!("`{name}` is {percent}; it must be at most 100"));
            }
        }
        if self.prefetch_chains_max > 1024 {
            return Err("`ssd.prefetch_chains_max` must be at most 1024".into());
        }
        if self.timeout_ms == 0 {
            return Err("`ssd.timeout_ms` must be above 0".into());
        }
        Ok(())
    }
}

/// Memory is taken in whole pages of the host.
const HOST_PAGE_BYTES: u64 = 4096;

impl Config {
    /// Refuses settings that cannot work.
    ///
    /// # Errors
    /// A sentence that names the setting and what it may be.
    pub fn check(&self) -> Result<(), String> {
        if self.node_id.is_empty() {
            return Err("`node_id` is empty; set a name that is unique in the cluster".into());
        }
        self.transfer_tls.files()?;
        for (name, bytes) in [("dram_bytes", self.dram_bytes), ("tail_bytes", self.tail_bytes)] {
            if bytes < HOST_PAGE_BYTES || !bytes.is_multiple_of(HOST_PAGE_BYTES) {
                return Err(format!(
                    "`{name}` is {bytes}; it must be a multiple of {HOST_PAGE_BYTES} and above 0"
                ));
            }
        }
        for (name, number) in [
            ("lease_max_ms", self.lease_max_ms),
            ("peer_stop_timeout_ms", self.peer_stop_timeout_ms),
            ("engine_stop_timeout_ms", self.engine_stop_timeout_ms),
            ("engines_max", self.engines_max.into()),
        ] {
            if number == 0 {
                return Err(format!("`{name}` must be above 0"));
            }
        }
        if self.engines_max > ENGINES_MOST {
            return Err(format!("`engines_max` must be at most {ENGINES_MOST}"));
        }
        self.replication.check()?;
        self.routes.check()?;
        self.object_store.check()?;
        self.ssd.check()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_ssd(change: impl FnOnce(&mut Ssd)) -> Config {
        let mut config = Config::default();
        change(&mut config.ssd);
        config
    }

    fn with_store(change: impl FnOnce(&mut ObjectStore)) -> Config {
        let mut config = Config::default();
        change(&mut config.object_store);
        config
    }

    #[test]
    fn a_url_names_a_bucket_and_a_prefix() {
        let place = |url: &str| {
            let url = Some(url.to_owned());
            ObjectStore { url, ..ObjectStore::default() }.place().expect("a place")
        };
        let of = |bucket: &str, prefix: &str| Some((bucket.to_owned(), prefix.to_owned()));
        assert_eq!(place("s3://b"), of("b", ""));
        assert_eq!(place("s3://b/"), of("b", ""));
        assert_eq!(place("s3://my-b.1/p/q/"), of("my-b.1", "p/q"));
        assert_eq!(ObjectStore::default().place(), Ok(None));
    }

    fn with_replicas(change: impl FnOnce(&mut Replication)) -> Config {
        let mut config = Config::default();
        change(&mut config.replication);
        config
    }

    fn with_routes(change: impl FnOnce(&mut Routes)) -> Config {
        let mut config = Config::default();
        change(&mut config.routes);
        config
    }

    #[test]
    fn addresses_have_a_host_and_a_port() {
        for good in ["10.0.0.7:7401", "node-1.example.org:1", "[::1]:7401"] {
            assert!(is_address(good), "{good}");
        }
        for wrong in
            ["", "node", "node:", "node:0", ":1", "a/b:1", "http://a:1", "a b:1", "a:99999"]
        {
            assert!(!is_address(wrong), "{wrong}");
        }
    }

    #[test]
    fn settings_that_cannot_work_are_refused_by_name() {
        assert_eq!(Config::default().check(), Ok(()));
        let half = TransferTls { key_file: Some("key.pem".into()), ..TransferTls::default() };
        for (config, word) in [
            (Config { node_id: String::new(), ..Config::default() }, "node_id"),
            (Config { dram_bytes: 0, ..Config::default() }, "dram_bytes"),
            (Config { dram_bytes: 4097, ..Config::default() }, "dram_bytes"),
            (Config { tail_bytes: 1, ..Config::default() }, "tail_bytes"),
            (Config { transfer_tls: half, ..Config::default() }, "transfer_tls"),
            (Config { lease_max_ms: 0, ..Config::default() }, "lease_max_ms"),
            (Config { engine_stop_timeout_ms: 0, ..Config::default() }, "engine_stop_timeout_ms"),
            (Config { engines_max: 0, ..Config::default() }, "engines_max"),
            (Config { engines_max: 65, ..Config::default() }, "engines_max"),
            (with_replicas(|replicas| replicas.concurrent_copies_max = 0), "concurrent_copies_max"),
            (with_replicas(|replicas| replicas.peers = vec!["node".into()]), "peers"),
            (with_replicas(|replicas| replicas.peers = vec!["http://a:1".into()]), "peers"),
            (
                with_routes(|routes| routes.concurrent_messages_max = 0),
                "routes.concurrent_messages_max",
            ),
            (with_routes(|routes| routes.ranks = 0), "routes.ranks"),
            (with_routes(|routes| routes.ranks = 65), "routes.ranks"),
            (with_routes(|routes| routes.sessions_max = 2000), "routes.sessions_max"),
            (with_routes(|routes| routes.ring_bytes_max = 0), "routes.ring_bytes_max"),
            (with_store(|store| store.url = Some("http://b".into())), "object_store.url"),
            (with_store(|store| store.url = Some("s3:///p".into())), "object_store.url"),
            (with_store(|store| store.url = Some("s3://b//p".into())), "object_store.url"),
            (with_store(|store| store.endpoint = Some("host:1".into())), "object_store.endpoint"),
            (
                with_store(|store| store.in_flight_requests_max = 1),
                "object_store.in_flight_requests_max",
            ),
            (with_store(|store| store.read_timeout_ms = 0), "object_store.read_timeout_ms"),
            (with_store(|store| store.blocks_max = 0), "object_store.blocks_max"),
            (with_ssd(|ssd| ssd.capacity_bytes = 1 << 20), "ssd.capacity_bytes"),
            (with_ssd(|ssd| ssd.capacity_bytes += 1), "ssd.capacity_bytes"),
            (with_ssd(|ssd| ssd.segment_bytes = 4096), "ssd.segment_bytes"),
            (with_ssd(|ssd| ssd.context_percent = 101), "ssd.context_percent"),
            (with_ssd(|ssd| ssd.timeout_ms = 0), "ssd.timeout_ms"),
            (with_ssd(|ssd| ssd.prefetch_chains_max = 1025), "ssd.prefetch_chains_max"),
        ] {
            let refused = config.check().expect_err("a refusal");
            assert!(refused.contains(word), "{refused}");
        }
    }
}
