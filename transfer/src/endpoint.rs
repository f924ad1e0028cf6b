//! The address of an engine, as it is handed to peers: who it is, what admits a connection, and where
//! each domain listens.

use std::net::SocketAddr;
use std::path::PathBuf;

use prost::Message;

use crate::rdma::RdmaAddress;

/// Where and how an engine can be reached. Whoever has it may connect: it carries the cookie.
#[derive(Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Drawn anew each time an engine starts.
    pub incarnation: u64,
    pub(crate) cookie: [u8; 16],
    pub shm: Option<ShmAddress>,
    pub tcp: Option<SocketAddr>,
    /// Its network cards, where it has any. Peers connect to `tcp` first.
    pub rdma: Option<RdmaAddress>,
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Endpoint { incarnation, cookie: _, shm, tcp, rdma } = self;
        f.debug_struct("Endpoint")
            .field("incarnation", &format_args!("{incarnation:016x}"))
            .field("shm", shm)
            .field("tcp", tcp)
            .field("rdma", rdma)
            .finish_non_exhaustive()
    }
}

/// The shm domain: only reachable from the same host, and with the same view of its processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShmAddress {
    pub host_id: String,
    pub socket: PathBuf,
}

/// Bytes that are not what they should be.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error(
        "the endpoint has version {got}, but this program supports version {known}; use one version on all hosts"
    )]
    Version { got: u32, known: u32 },
    #[error("field `{0}` of the endpoint is malformed")]
    Field(&'static str),
    #[error(transparent)]
    Decode(#[from] prost::DecodeError),
}

/// 2: several cards, and which memory each is near.
const VERSION: u32 = 2;

#[derive(Clone, PartialEq, Message)]
struct EndpointWire {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(fixed64, tag = "2")]
    incarnation: u64,
    #[prost(bytes = "vec", tag = "3")]
    cookie: Vec<u8>,
    #[prost(string, tag = "4")]
    shm_host_id: String,
    #[prost(string, tag = "5")]
    shm_socket: String,
    #[prost(string, tag = "6")]
    tcp: String,
    // 7 and 8 were of version 1.
    /// Messages, decoded when their number is known to be bounded.
    #[prost(bytes = "vec", repeated, tag = "9")]
    cards: Vec<Vec<u8>>,
    #[prost(bytes = "vec", repeated, tag = "10")]
    nearness: Vec<Vec<u8>>,
}

impl Endpoint {
    /// Both can map each other's memory.
    pub(crate) fn is_on_host_of(&self, other: &Endpoint) -> bool {
        match (&self.shm, &other.shm) {
            (Some(here), Some(there)) => here.host_id == there.host_id,
            _ => false,
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let (shm_host_id, shm_socket) = match &self.shm {
            Some(shm) => (shm.host_id.clone(), shm.socket.to_string_lossy().into_owned()),
            None => Default::default(),
        };
        let rdma = self.rdma.as_ref().map(RdmaAddress::to_wire);
        let (cards, nearness) = rdma.unwrap_or_default();
        EndpointWire {
            version: VERSION,
            incarnation: self.incarnation,
            cookie: self.cookie.to_vec(),
            shm_host_id,
            shm_socket,
            tcp: self.tcp.map(|address| address.to_string()).unwrap_or_default(),
            cards,
            nearness,
        }
        .encode_to_vec()
    }

    /// # Errors
    /// [`WireError`] when the bytes are not an endpoint of a version known here.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, WireError> {
        let wire = EndpointWire::decode(bytes)?;
        if wire.version != VERSION {
            return Err(WireError::Version { got: wire.version, known: VERSION });
        }
        let cookie = wire.cookie.try_into().map_err(|_| WireError::Field("cookie"))?;
        let shm = (!wire.shm_socket.is_empty()).then(|| ShmAddress {
            host_id: wire.shm_host_id,
            socket: PathBuf::from(wire.shm_socket),
        });
        let tcp = match wire.tcp.as_str() {
            "" => None,
            text => Some(text.parse().map_err(|_| WireError::Field("tcp"))?),
        };
        let rdma = RdmaAddress::from_wire(&(wire.cards, wire.nearness))?;
        Ok(Endpoint { incarnation: wire.incarnation, cookie, shm, tcp, rdma })
    }
}
