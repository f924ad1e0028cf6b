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
    /// Where gRPC and the HTTP paths /metrics, /healthz and /readyz are served.
    pub listen: SocketAddr,
    /// The directory in which engines find `attach.sock` and `descriptors.sock`. It is made when it
    /// is not there. Its path is limited by the length of a Unix socket address (about 90 bytes).
    pub attach_dir: PathBuf,
    /// Bytes of memory for the cache: taken, and touched once, when the node starts. When they are a multiple of
    /// 2 MiB, and the host has so many bytes of reserved pages free (`vm.nr_hugepages`), they lie in those.
    pub arena_bytes: u64,
    /// Bytes for what follows the pages of a push (checksums and the engine's tail). Each share that
    /// another node writes takes 8 bytes for each tensor of each layer of each page that it lacks,
    /// and on the decode side 8 KiB more, in steps of 1 KiB. Without room for it a share is refused
    /// until others have ended: 16 MiB are room for 1,800 short prompts at once, or for 230 of
    /// 8,192 tokens of a model with 60 layers in pages of 64 tokens.
    pub tail_bytes: u64,
    /// The most bytes of all pools of pages together that engines have made in memory of the host when they attach: taken,
    /// and touched once, then. 0 refuses such pools.
    pub pool_bytes_max: u64,
    /// Engines that may be attached at once. All of them share the cache, so that they serve one model with one KV type
    /// and one layout of blocks.
    pub engines_max: u32,
    /// The library of NVIDIA's driver, which is opened when an engine attaches with a pool in a GPU's memory. Without
    /// this it is the system's libcuda.so.1.
    pub cuda_library: Option<PathBuf>,
    /// How this node writes to others, where they can be reached so: through shared memory on one
    /// host, over TCP, by the RDMA devices of `verbs`, or by the network of `efa`. Otherwise it is
    /// shared memory on one host, and TCP between hosts.
    pub domain: Domain,
    /// Who takes the turns of the transfer engine: "own", a thread of its own; "node", the node's thread beside its
    /// other work, which spares two wake-ups at each end of a transfer; "auto", the node's thread on a host of at most four cores, where
    /// there is none to spare.
    pub transfer_thread: TransferThread,
    /// Where this node takes writes of peers over TCP. Port 0 takes any free port.
    pub transfer_listen: SocketAddr,
    /// TLS for writes over TCP: on when its three files are set, and then it must be on at every node.
    pub transfer_tls: TransferTls,
    /// The longest lease that a conductor may ask for, in milliseconds.
    pub lease_ms_max: u64,
    /// Whether a prefill share pushes its pages. Off only in tests that show that decoding waits
    /// for the push.
    pub push: bool,
    /// Over which domains pages that arrive are checked against their checksums.
    pub verify: Verify,
    /// The most bytes per second that this node sends, all peers together; 0 is no limit. Stands
    /// for a slow network in measurements.
    pub throttle_bytes_per_s: u64,
    /// A file that gets a line for each layer pushed: when it was issued and when it landed.
    pub layer_log: Option<PathBuf>,
    /// How long a peer that was asked to stop writing may take to answer, in milliseconds, before
    /// it is cut off.
    pub stop_timeout_ms: u64,
    /// How long an engine that was told to stop working on a share may take to let go of it, in
    /// milliseconds, before it is detached: it gets no more work, and its slots come free when its
    /// process ends. The time does not run while the engine finishes, layer by layer, the step in
    /// which it was told.
    pub engine_stop_timeout_ms: u64,
    /// Which block makes room for others in memory: "hit-density", the one that is least likely to be
    /// used again soon by what was seen of others, or "lru", the one that was used longest ago.
    #[schemars(with = "String")]
    pub eviction: Eviction,
    /// The SSD tier.
    pub ssd: Ssd,
    /// The object store that nodes share.
    pub object_store: ObjectStore,
    /// Who may administer the node over gRPC (list, inspect, pin, evict, replicate, drain): "loopback", callers on
    /// this host, over any address of it; "anyone" who reaches `listen`; "nobody".
    pub admin: AdminAccess,
    /// Copies of blocks on other nodes.
    pub replicas: Replicas,
    /// Attention over blocks of this node for queries that engines elsewhere send.
    pub routes: Routes,
    /// How long a shutdown waits for the shares that are under way, in milliseconds.
    pub drain_ms: u64,
    /// The RDMA devices. Only used when `domain` is "verbs"; then they must be there.
    pub verbs: VerbsConfig,
    /// EFA. Only used when `domain` is "efa"; then it must be there, and libfabric too.
    pub efa: EfaConfig,
    /// Which network cards are near which memory, in place of what the system says: a file with JSON
    /// of the form {"cpu:0": {"preferred": ["mlx5_0"], "secondary": ["mlx5_1"]}}. It may name only
    /// cards that are used. `kvasir doctor` prints what the system says.
    pub topology: Option<PathBuf>,
}

/// On how many cores a thread more costs more than it does.
const FEW_CORES: usize = 4;

/// Whose thread takes the turns of a node's transfer engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TransferThread {
    Auto,
    Own,
    Node,
}

impl TransferThread {
    pub(crate) fn is_the_nodes(self) -> bool {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        match self {
            TransferThread::Auto => cores <= FEW_CORES,
            TransferThread::Own => false,
            TransferThread::Node => true,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            node_id: "node".into(),
            listen: (Ipv4Addr::LOCALHOST, 7401).into(),
            attach_dir: "/run/kvasir/node".into(),
            arena_bytes: 1 << 30,
            tail_bytes: 16 << 20,
            pool_bytes_max: 64 << 30,
            engines_max: 8,
            cuda_library: None,
            domain: Domain::Shm,
            transfer_thread: TransferThread::Auto,
            transfer_listen: (Ipv4Addr::LOCALHOST, 0).into(),
            transfer_tls: TransferTls::default(),
            lease_ms_max: 60_000,
            push: true,
            verify: Verify::default(),
            throttle_bytes_per_s: 0,
            layer_log: None,
            stop_timeout_ms: 1_000,
            engine_stop_timeout_ms: 30_000,
            drain_ms: 5_000,
            verbs: VerbsConfig::default(),
            efa: EfaConfig::default(),
            topology: None,
            eviction: Eviction::default(),
            ssd: Ssd::default(),
            object_store: ObjectStore::default(),
            admin: AdminAccess::default(),
            replicas: Replicas::default(),
            routes: Routes::default(),
        }
    }
}

/// Who may administer a node.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum AdminAccess {
    /// Callers on this host, over any address of it.
    #[default]
    Loopback,
    /// Whoever reaches the node's gRPC address.
    Anyone,
    Nobody,
}

/// Routed attention: queries come here, and partial results go back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Routes {
    /// Whether this node answers queries at all. One that does not still lets its blocks be fetched.
    pub enabled: bool,
    /// Where queries come in over TCP; port 0 takes any free port. With `transfer_tls` they are under TLS. Ranks
    /// other than the first one have the ports that follow.
    pub listen: SocketAddr,
    /// Tensor-parallel ranks of engines that ask, each of which has the query rows of its heads: rank `r` is answered
    /// by rank `r` of so many here, with threads and a transfer engine of its own. Of an engine that has more, several
    /// come to one here, and each takes a place of the limits below; one that has fewer has only the share of
    /// `throttle_bytes_per_s` of as many.
    pub ranks: u32,
    /// Messages of engines that a rank computes at once; one that comes beside so many is refused, and its
    /// engine sends it again for as long as it would have waited for the answer. From about eight on a copy of the blocks on another node is worth it.
    pub flows_max: u32,
    /// Engines that may have a ring for queries with one rank here.
    pub sessions_max: u32,
    /// Sequences of engines that may attend blocks at one rank here at once.
    pub routes_max: u32,
    /// Bytes of memory for the query rings of all engines together. They are taken as engines come.
    pub ring_bytes_max: u64,
    /// Threads that compute, for each rank.
    pub threads: u32,
}

impl Default for Routes {
    fn default() -> Self {
        Routes {
            enabled: true,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            ranks: 1,
            flows_max: 8,
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
            ("flows_max", self.flows_max),
            ("sessions_max", self.sessions_max),
            ("routes_max", self.routes_max),
            ("threads", self.threads),
            ("ranks", self.ranks),
        ] {
            if number == 0 {
                return Err(format!("`routes.{name}` must be above zero"));
            }
        }
        if self.ranks > RANKS_MAX {
            return Err(format!("`routes.ranks` must be {RANKS_MAX} at most"));
        }
        if self.sessions_max > 1024 {
            return Err("`routes.sessions_max` must be 1024 at most".into());
        }
        if self.ring_bytes_max == 0 {
            return Err("`routes.ring_bytes_max` must be above zero".into());
        }
        Ok(())
    }
}

/// When blocks are copied to other nodes, and where to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Replicas {
    /// gRPC addresses of nodes that may take blocks of this one. This node itself may be among them.
    pub peers: Vec<String>,
    /// Copies under way at once.
    pub copies_max: u32,
    /// A chain of blocks that other nodes ask for so often within ten seconds is copied to one of `peers`,
    /// while `hot_pushes` pushes are under way at least. 0 copies none.
    pub hot_asks: u32,
    /// Pushes of blocks to other nodes that must be under way for that.
    pub hot_pushes: u32,
    /// How often the others of `peers` are asked for contexts that are to be kept on several nodes, in
    /// milliseconds. One that lacks copies gets them then.
    pub check_ms: u64,
    /// A node that has not answered for so long, in milliseconds, has lost the contexts that it kept: they are
    /// copied to another one. Longer than a restart takes.
    pub gone_after_ms: u64,
    /// When the node is drained: the most bytes of blocks that move though nobody was promised them, those
    /// first that are most likely to be used again.
    pub drain_hot_bytes_max: u64,
}

impl Default for Replicas {
    fn default() -> Self {
        Replicas {
            peers: Vec::new(),
            copies_max: 2,
            hot_asks: 8,
            hot_pushes: 4,
            check_ms: 5_000,
            gone_after_ms: 60_000,
            drain_hot_bytes_max: 1 << 30,
        }
    }
}

impl Replicas {
    fn check(&self) -> Result<(), String> {
        if self.copies_max == 0 {
            return Err("`replicas.copies_max` must be above zero".into());
        }
        if self.check_ms == 0 || self.gone_after_ms <= self.check_ms {
            return Err("`replicas.check_ms` must be above zero, and `gone_after_ms` longer".into());
        }
        match self.peers.iter().find(|peer| !is_address(peer)) {
            Some(wrong) => Err(format!(
                "`replicas.peers` has {wrong:?}; it must have addresses as in \"10.0.0.7:7401\""
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

/// Where blocks go that memory has no room for, and where the context cache is durable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Ssd {
    /// A directory of this node alone, on a local disk. It is made when it is not there. Without it
    /// there is no SSD tier.
    pub dir: Option<PathBuf>,
    /// Bytes of the disk that are taken, at once, for blocks. Extents may fill about three quarters
    /// of them; the rest is what cleaning works with.
    pub bytes: u64,
    /// Bytes that are reclaimed together; at least eight times what a block takes. Of a new log only:
    /// one that is there keeps its own.
    pub segment_bytes: u64,
    /// The part of what extents may fill that the context cache may have, in percent.
    pub context_percent: u32,
    /// Bytes of context cache that one tenant may have.
    pub tenant_bytes_max: u64,
    /// The part of the slots that shall be free, or be had at once because the SSD has the block as
    /// well, in percent: blocks are written ahead of need.
    pub sink_ahead_percent: u32,
    /// Chains that are read into memory ahead of need at once, on hints of conductors and lookups of engines: 1024
    /// at most, 0 for none.
    pub prefetch_chains_max: u32,
    /// What was used within this time, in milliseconds, makes no room for what is read ahead.
    pub prefetch_spares_ms: u64,
    /// An operation that takes longer, in milliseconds, is not waited for: requests compute what they
    /// lack, and nothing is begun with the SSD until it has ended.
    pub timeout_ms: u64,
    /// How the disk is driven.
    pub io: SsdIo,
    /// For tests: a file that says what the disk does wrong, as words: `wrong`, `full`,
    /// `read-errors`, `hang`.
    pub faults: Option<PathBuf>,
}

/// How the disk is driven.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum SsdIo {
    /// By io_uring past the page cache where the host allows it, otherwise by plain calls.
    #[default]
    Auto,
    /// By plain calls through the page cache.
    Plain,
}

impl Default for Ssd {
    fn default() -> Self {
        Ssd {
            dir: None,
            bytes: 16 << 30,
            segment_bytes: 32 << 20,
            context_percent: 50,
            tenant_bytes_max: 1 << 30,
            sink_ahead_percent: 25,
            prefetch_chains_max: 16,
            prefetch_spares_ms: 1_000,
            timeout_ms: 2_000,
            io: SsdIo::Auto,
            faults: None,
        }
    }
}

impl Ssd {
    fn check(&self) -> Result<(), String> {
        // As many segments as a log has at least, and its first two pages.
        let least = self.segment_bytes.saturating_mul(8).saturating_add(2 * HOST_PAGE_BYTES);
        for (name, bytes) in [("ssd.bytes", self.bytes), ("ssd.segment_bytes", self.segment_bytes)]
        {
            if bytes == 0 || !bytes.is_multiple_of(HOST_PAGE_BYTES) {
                return Err(format!(
                    "`{name}` is {bytes}; it must be a multiple of {HOST_PAGE_BYTES}"
                ));
            }
        }
        if self.segment_bytes < 32 * HOST_PAGE_BYTES {
            return Err(format!("`ssd.segment_bytes` must be {} at least", 32 * HOST_PAGE_BYTES));
        }
        if self.bytes < least {
            return Err(format!("`ssd.bytes` must be {least} at least, for 8 segments"));
        }
        for (name, percent) in [
            ("ssd.context_percent", self.context_percent),
            ("ssd.sink_ahead_percent", self.sink_ahead_percent),
        ] {
            if percent > 100 {
                return Err(format!("`{name}` is {percent}; it is a percentage"));
            }
        }
        if self.prefetch_chains_max > 1024 {
            return Err("`ssd.prefetch_chains_max` must be 1024 at most".into());
        }
        if self.timeout_ms == 0 {
            return Err("`ssd.timeout_ms` must be above zero".into());
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
            return Err("`node_id` is empty; give the node a name that is unique".into());
        }
        self.transfer_tls.files()?;
        for (name, bytes) in [("arena_bytes", self.arena_bytes), ("tail_bytes", self.tail_bytes)] {
            if bytes < HOST_PAGE_BYTES || !bytes.is_multiple_of(HOST_PAGE_BYTES) {
                return Err(format!(
                    "`{name}` is {bytes}; it must be a multiple of {HOST_PAGE_BYTES} above zero"
                ));
            }
        }
        for (name, number) in [
            ("lease_ms_max", self.lease_ms_max),
            ("stop_timeout_ms", self.stop_timeout_ms),
            ("engine_stop_timeout_ms", self.engine_stop_timeout_ms),
            ("engines_max", self.engines_max.into()),
        ] {
            if number == 0 {
                return Err(format!("`{name}` must be above zero"));
            }
        }
        if self.engines_max > ENGINES_MOST {
            return Err(format!("`engines_max` must be {ENGINES_MOST} at most"));
        }
        self.replicas.check()?;
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

    fn with_replicas(change: impl FnOnce(&mut Replicas)) -> Config {
        let mut config = Config::default();
        change(&mut config.replicas);
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
        let half = TransferTls { key: Some("key.pem".into()), ..TransferTls::default() };
        for (config, word) in [
            (Config { node_id: String::new(), ..Config::default() }, "node_id"),
            (Config { arena_bytes: 0, ..Config::default() }, "arena_bytes"),
            (Config { arena_bytes: 4097, ..Config::default() }, "arena_bytes"),
            (Config { tail_bytes: 1, ..Config::default() }, "tail_bytes"),
            (Config { transfer_tls: half, ..Config::default() }, "transfer_tls"),
            (Config { lease_ms_max: 0, ..Config::default() }, "lease_ms_max"),
            (Config { engine_stop_timeout_ms: 0, ..Config::default() }, "engine_stop_timeout_ms"),
            (Config { engines_max: 0, ..Config::default() }, "engines_max"),
            (Config { engines_max: 65, ..Config::default() }, "engines_max"),
            (with_replicas(|replicas| replicas.copies_max = 0), "copies_max"),
            (with_replicas(|replicas| replicas.peers = vec!["node".into()]), "peers"),
            (with_replicas(|replicas| replicas.peers = vec!["http://a:1".into()]), "peers"),
            (with_routes(|routes| routes.flows_max = 0), "routes.flows_max"),
            (with_routes(|routes| routes.ranks = 0), "routes.ranks"),
            (with_routes(|routes| routes.ranks = 65), "routes.ranks"),
            (with_routes(|routes| routes.sessions_max = 2000), "routes.sessions_max"),
            (with_routes(|routes| routes.ring_bytes_max = 0), "routes.ring_bytes_max"),
            (with_store(|store| store.url = Some("http://b".into())), "object_store.url"),
            (with_store(|store| store.url = Some("s3:///p".into())), "object_store.url"),
            (with_store(|store| store.url = Some("s3://b//p".into())), "object_store.url"),
            (with_store(|store| store.endpoint = Some("host:1".into())), "object_store.endpoint"),
            (with_store(|store| store.requests_max = 1), "object_store.requests_max"),
            (with_store(|store| store.timeout_ms = 0), "object_store.timeout_ms"),
            (with_store(|store| store.blocks_max = 0), "object_store.blocks_max"),
            (with_ssd(|ssd| ssd.bytes = 1 << 20), "ssd.bytes"),
            (with_ssd(|ssd| ssd.bytes += 1), "ssd.bytes"),
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
