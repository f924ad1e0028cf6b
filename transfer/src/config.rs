//! How a transfer engine is set up.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

pub use crate::rdma::{EfaConfig, Handshake, VerbsConfig};
pub use crate::tcp::tls::{TlsError, TlsFiles};
use crate::topology::Topology;

/// A way to reach peers.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Domain {
    /// The peer's memory is mapped here; same host only.
    Shm,
    /// TCP; everywhere.
    Tcp,
    /// RDMA: InfiniBand and RoCE, through libibverbs.
    Verbs,
    /// RDMA without order: EFA, the network of EC2's accelerator hosts, through libfabric.
    Efa,
}

impl Domain {
    /// Those in which network cards place what is written.
    pub(crate) const OF_CARDS: &[Domain] = &[Domain::Verbs, Domain::Efa];

    pub fn label(self) -> &'static str {
        match self {
            Domain::Shm => "shm",
            Domain::Tcp => "tcp",
            Domain::Verbs => "verbs",
            Domain::Efa => "efa",
        }
    }

    /// On the wire; never reused for another domain.
    pub(crate) fn code(self) -> u32 {
        match self {
            Domain::Shm => 1,
            Domain::Tcp => 2,
            Domain::Verbs => 3,
            Domain::Efa => 4,
        }
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        let all = [Domain::Shm, Domain::Tcp, Domain::Verbs, Domain::Efa];
        all.into_iter().find(|domain| domain.code() == code)
    }
}

/// Verification of the checksums of writes on arrival.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields, default)]
pub struct Verify {
    /// Over TCP, by the receiver. A flipped bit that is not detected changes an answer.
    pub tcp: bool,
    /// In shared memory, by the sender, after the copy. It detects memory corruption only.
    pub shm: bool,
    /// Over RDMA, by the sender, before it posts the write. It detects memory corruption only; NICs verify a
    /// checksum of their own.
    pub verbs: bool,
    /// Over EFA, as over RDMA.
    pub efa: bool,
}

impl Default for Verify {
    fn default() -> Self {
        Verify { tcp: true, shm: false, verbs: false, efa: false }
    }
}

impl Verify {
    pub(crate) fn by(self, domain: Domain) -> bool {
        match domain {
            Domain::Tcp => self.tcp,
            Domain::Shm => self.shm,
            Domain::Verbs => self.verbs,
            Domain::Efa => self.efa,
        }
    }
}

/// All that an engine needs to know.
#[derive(Debug, Clone)]
pub struct TransferConfig {
    /// For logs and thread names.
    pub name: String,
    /// The names of all metrics start with it. Two engines that share a registry need different ones.
    pub metrics_prefix: &'static str,
    /// Used where the peer can be reached by it; otherwise the others are, shm before verbs and efa,
    /// and these before tcp.
    pub preferred: Domain,
    /// Where TCP connections are taken; `None` for no TCP. Port 0 takes a free one.
    pub tcp_listen: Option<SocketAddr>,
    /// The address peers are told, where it differs from the one that is listened on. Needed when
    /// that one is unspecified (`0.0.0.0`).
    pub tcp_advertise: Option<SocketAddr>,
    /// TCP connections are under TLS, to and from peers that have certificates of the same authority;
    /// `None` for plain ones. An engine has connections of one kind only. What is under TLS is copied
    /// once more on either side.
    pub tcp_tls: Option<TlsFiles>,
    /// The directory of the shm domain's Unix socket; `None` for no shm.
    pub run_dir: Option<PathBuf>,
    /// The RDMA devices of the verbs domain; `None` for no RDMA. It needs `tcp_listen`, too: peers connect
    /// there first, and are reached there where the device does not reach them.
    pub verbs: Option<VerbsConfig>,
    /// The network of the efa domain; `None` for none. It needs `tcp_listen` as verbs does, and an engine
    /// has one of the two.
    pub efa: Option<EfaConfig>,
    /// Which cards are near which memory, in place of what the system says. It may only name cards that
    /// are used here; see [`crate::topology`].
    pub topology: Option<Topology>,
    /// Bytes per second that this engine sends at most, over all peers; 0 for no limit.
    pub send_bytes_per_s_max: u64,
    pub verify: Verify,
    /// Operations that are under way at once, expectations that wait, and words that are watched; beyond
    /// any of the three the call answers [`Full`](crate::SubmitError::Full).
    pub operations_max: usize,
    /// The longest message that `send` takes here, and the size of the buffers in which messages of peers
    /// are received.
    pub message_bytes_max: usize,
    /// Messages of peers that the application may hold at once; see [`crate::messages`] for what becomes
    /// of others. Their buffers are made on first use.
    pub message_buffers: usize,
    /// A longer write is sent in slices of this size, which are spread over the paths to the peer, and
    /// counted when all have landed. 1 MiB by default: with slices of 16 KiB (Mooncake's default) writes of
    /// 1 MiB reached 60 % of what they reach so over shm (9.4 of 15.8 GB/s) and 57 % over tcp (2.4 of 4.2),
    /// with 256 KiB 59 % and 89 %; longer ones gained nothing that is certain, and a path waits longer for
    /// another one's last slice. (Example `slices`, 21 November 2026, two cores that others used as well,
    /// the best of 15 rounds.) What suits cards is not measured yet.
    pub slice_bytes: usize,
    /// Immediates that nobody waits for: arrived but not expected yet, or reached but not cancelled yet.
    /// Each peer has an equal share of them, and so have those that were reached: beyond it, one that has more
    /// than its share loses its oldest.
    pub early_imms_max: usize,
    /// Connections of peers to here (ended ones included whose writer has not finished its copy), and
    /// connections from here. Beyond the first, the one that was idle for longest is closed; beyond the
    /// second, those of the session that SIEVE finds: in either case only what was idle for
    /// `peer_timeout_ms`, and otherwise the new one is closed. (Those from shm peers end with their
    /// processes.) Whoever has connected and not yet said who it is does not count: a quarter as many, and at
    /// least 16, may be about to, and take nobody's place.
    pub connections_max: usize,
    /// Of domains where another length of slices is better, in place of `slice_bytes`.
    pub slice_bytes_of: BTreeMap<Domain, usize>,
    /// How long an idle worker polls before it sleeps; `u64::MAX` for ever, where it has a core of its own.
    /// Where somebody else computes on its core it sleeps at once; see [`crate::spin`].
    pub spin_us: u64,
    /// The core that the worker is pinned to; `None` where the system chooses.
    pub worker_core: Option<usize>,
    /// A peer that acknowledges nothing for so long, while something is outstanding, is lost. It also
    /// bounds connecting.
    pub peer_timeout_ms: u64,
    /// A connection to a wanted peer (see `TransferEngine::set_wanted`) that was silent for so long is
    /// asked for a sign of life.
    pub heartbeat_interval_ms: u64,
    /// When none has come for so long, the connection is given up. So a wanted peer that has vanished is
    /// lost after the interval and this; where it has several connections, or its host still takes
    /// them, at most `failover_grace_ms` later.
    pub heartbeat_timeout_ms: u64,
    /// Heartbeats in every session that has a connection, wanted or not.
    pub heartbeat_always: bool,
    /// TCP connections to one peer. What is on one of them when it fails goes over the others; a single
    /// one is made anew. One worker drives them all, so on one link several are slower than one: two moved
    /// 3.3 GB/s where one moved 5.1 (loopback, two cores). They are for hosts with several links.
    pub tcp_lanes: usize,
    /// A peer to which every connection has failed is lost when none could be made anew for so long; at
    /// once when nobody listens there any more.
    pub failover_grace_ms: u64,
}

impl Default for TransferConfig {
    fn default() -> Self {
        TransferConfig {
            name: "transfer".into(),
            metrics_prefix: "kvasir_transfer",
            preferred: Domain::Shm,
            tcp_listen: None,
            tcp_advertise: None,
            tcp_tls: None,
            run_dir: None,
            verbs: None,
            efa: None,
            topology: None,
            send_bytes_per_s_max: 0,
            verify: Verify::default(),
            operations_max: 65_536,
            message_bytes_max: 64 << 10,
            message_buffers: 1024,
            slice_bytes: 1 << 20,
            early_imms_max: 65_536,
            connections_max: 2048,
            slice_bytes_of: BTreeMap::new(),
            spin_us: 50,
            worker_core: None,
            peer_timeout_ms: 10_000,
            heartbeat_interval_ms: 1_000,
            heartbeat_timeout_ms: 3_000,
            heartbeat_always: false,
            tcp_lanes: 1,
            failover_grace_ms: 2_000,
        }
    }
}

/// Certificates for connections between nodes, and between engines and nodes. Part of the configuration of both.
#[derive(
    Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields, default)]
pub struct TransferTls {
    /// Certificate chain in PEM: the certificate, then its intermediates.
    pub certificate_file: Option<PathBuf>,
    /// Private key of the certificate in PEM.
    pub key_file: Option<PathBuf>,
    /// CA certificates in PEM that verify the certificates of the other nodes.
    pub ca_file: Option<PathBuf>,
    /// DNS name for which the certificate of every node is valid.
    pub server_name: String,
}

impl Default for TransferTls {
    fn default() -> Self {
        TransferTls {
            certificate_file: None,
            key_file: None,
            ca_file: None,
            server_name: "kvasir".into(),
        }
    }
}

impl TransferTls {
    /// The files for the transfer engine; `None` if TLS is off.
    ///
    /// # Errors
    /// A sentence, when only some of the files are set.
    pub fn files(&self) -> Result<Option<TlsFiles>, String> {
        let TransferTls { certificate_file, key_file, ca_file, server_name } = self.clone();
        match (certificate_file, key_file, ca_file) {
            (None, None, None) => Ok(None),
            (Some(certificate), Some(key), Some(authority)) => {
                Ok(Some(TlsFiles { certificate, key, authority, name: server_name }))
            }
            _ => Err("`transfer_tls` needs all of `certificate_file`, `key_file` and `ca_file`, or none of them".into()),
        }
    }
}
