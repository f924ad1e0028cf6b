//! The store node's configuration: one typed struct, read once. Refuses what cannot work, in a
//! sentence that says what to set.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use kvasir_transfer::TlsFiles;
pub use kvasir_transfer::{Domain, VerbsConfig, Verify};

/// Fewer slots than this serve nobody: an engine whose blocks are too large for the arena to hold
/// as many is refused.
pub const ARENA_SLOTS_MIN: u32 = 8;

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
    /// Bytes of memory for the cache: taken, and touched once, when the node starts.
    pub arena_bytes: u64,
    /// Bytes for what follows the pages of a push (checksums and the engine's tail). Each share that
    /// another node writes takes 8 bytes for each tensor of each layer of each page that it lacks,
    /// and on the decode side 8 KiB more, in steps of 1 KiB. Without room for it a share is refused
    /// until others have ended: 16 MiB are room for 1,800 short prompts at once, or for 230 of
    /// 8,192 tokens of a model with 60 layers in pages of 64 tokens.
    pub tail_bytes: u64,
    /// How this node writes to others, where they can be reached so: through shared memory on one
    /// host, over TCP, or by the RDMA device of `verbs`. Otherwise it is shared memory on one host,
    /// and TCP between hosts.
    pub domain: Domain,
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
    /// The SSD tier.
    pub ssd: Ssd,
    /// How long a shutdown waits for the shares that are under way, in milliseconds.
    pub drain_ms: u64,
    /// The RDMA device. Only used when `domain` is "verbs"; then it must be there.
    pub verbs: VerbsConfig,
}

/// Certificates of a node towards other nodes, in PEM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TransferTls {
    /// This node's certificate, and those between it and the authority.
    pub certificate: Option<PathBuf>,
    /// The certificate's private key.
    pub key: Option<PathBuf>,
    /// Certificates of the authorities that nodes of this cluster have theirs from.
    pub authority: Option<PathBuf>,
    /// The DNS name that the certificate of every node is valid for.
    pub name: String,
}

impl Default for TransferTls {
    fn default() -> Self {
        TransferTls { certificate: None, key: None, authority: None, name: "kvasir".into() }
    }
}

impl TransferTls {
    /// What the transfer engine needs; `None` when it is off.
    ///
    /// # Errors
    /// A sentence, when only some of the files are set.
    pub fn files(&self) -> Result<Option<TlsFiles>, String> {
        let TransferTls { certificate, key, authority, name } = self.clone();
        match (certificate, key, authority) {
            (None, None, None) => Ok(None),
            (Some(certificate), Some(key), Some(authority)) => {
                Ok(Some(TlsFiles { certificate, key, authority, name }))
            }
            _ => {
                Err("`transfer_tls` needs `certificate`, `key` and `authority`, or none of them"
                    .into())
            }
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
            domain: Domain::Shm,
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
            ssd: Ssd::default(),
        }
    }
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
        for (name, ms) in [
            ("lease_ms_max", self.lease_ms_max),
            ("stop_timeout_ms", self.stop_timeout_ms),
            ("engine_stop_timeout_ms", self.engine_stop_timeout_ms),
        ] {
            if ms == 0 {
                return Err(format!("`{name}` must be above zero"));
            }
        }
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
            (with_ssd(|ssd| ssd.bytes = 1 << 20), "ssd.bytes"),
            (with_ssd(|ssd| ssd.bytes += 1), "ssd.bytes"),
            (with_ssd(|ssd| ssd.segment_bytes = 4096), "ssd.segment_bytes"),
            (with_ssd(|ssd| ssd.context_percent = 101), "ssd.context_percent"),
            (with_ssd(|ssd| ssd.timeout_ms = 0), "ssd.timeout_ms"),
        ] {
            let refused = config.check().expect_err("a refusal");
            assert!(refused.contains(word), "{refused}");
        }
    }
}
