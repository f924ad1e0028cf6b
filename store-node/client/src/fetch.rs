//! Objects that lie on another node: brought to this one, each by a transaction of its own between the two
//! nodes, which the client orders over gRPC as a conductor orders the fetch of a prompt's blocks.
//!
//! The target reserves a slot and says where it is; the source pins the object and writes it there; the
//! target commits it when it is whole and its checksum is right. Whatever fails, both sides are told to end.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use kvasir_attach::line;
use kvasir_proto::{BlockKey, Namespace, Side, TxId, v1};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use tonic::{Code, Status};
use v1::store_node_client::StoreNodeClient;

use crate::error::Error;

/// Objects of one call that are moved at once.
const AT_ONCE: usize = 64;
/// How long one may take.
const DEADLINE: Duration = Duration::from_secs(20);
const CONNECT: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub(crate) struct Fetcher {
    /// `None` only while it is dropped.
    runtime: Option<tokio::runtime::Runtime>,
    attach_dir: PathBuf,
    namespace: Namespace,
    block_tokens: u32,
    lease_ms: u64,
    incarnation: u64,
    next_serial: AtomicU64,
    nodes: tokio::sync::Mutex<HashMap<String, Node>>,
}

/// A node that was called, and its address as the transfer engine knows it.
#[derive(Debug, Clone)]
struct Node {
    client: StoreNodeClient<Channel>,
    endpoint: Vec<u8>,
}

/// One object on its way.
struct Move {
    tx: TxId,
    key: BlockKey,
    namespace: Namespace,
    block_tokens: u32,
    lease_ms: u64,
}

impl Fetcher {
    pub(crate) fn new(
        attach_dir: PathBuf,
        namespace: Namespace,
        block_tokens: u32,
        lease_max: Duration,
    ) -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kvasir-fetch")
            .enable_all()
            .build()
            .map_err(|error| Error::Unreachable(error.to_string()))?;
        Ok(Fetcher {
            runtime: Some(runtime),
            attach_dir,
            namespace,
            block_tokens,
            lease_ms: DEADLINE.min(lease_max).as_millis() as u64,
            incarnation: rand::random(),
            next_serial: AtomicU64::new(1),
            nodes: tokio::sync::Mutex::default(),
        })
    }

    /// Answers of each object whether it is on this node now. Blocks.
    pub(crate) fn fetch(
        self: &std::sync::Arc<Self>,
        keys: &[BlockKey],
        source: &str,
    ) -> Result<Vec<bool>, Error> {
        let ended = || Error::Unreachable("the fetching thread has ended".into());
        let (this, keys, source) = (std::sync::Arc::clone(self), keys.to_vec(), source.to_owned());
        let (done, outcome) = sync_channel(1);
        // Not blocked on here: the caller's thread may belong to another runtime.
        self.runtime.as_ref().ok_or_else(ended)?.spawn(async move {
            let _ = done.send(this.fetch_all(&keys, &source).await);
        });
        outcome.recv().map_err(|_| ended())?
    }

    async fn fetch_all(&self, keys: &[BlockKey], source: &str) -> Result<Vec<bool>, Error> {
        let local = self.node(None).await?;
        let from = self.node(Some(source)).await?;
        let mut here = vec![false; keys.len()];
        for (part, keys) in keys.chunks(AT_ONCE).enumerate() {
            let mut moves = JoinSet::new();
            for (position, &key) in keys.iter().enumerate() {
                let serial = self.next_serial.fetch_add(1, Ordering::Relaxed);
                let this = Move {
                    tx: TxId { conductor_incarnation: self.incarnation, serial },
                    key,
                    namespace: self.namespace,
                    block_tokens: self.block_tokens,
                    lease_ms: self.lease_ms,
                };
                let (local, from) = (local.clone(), from.clone());
                let at = part * AT_ONCE + position;
                moves.spawn(async move { (at, this.run(local.client, from).await) });
            }
            while let Some(moved) = moves.join_next().await {
                let Ok((at, moved)) = moved else { continue };
                here[at] = match moved {
                    Ok(moved) => moved,
                    Err(status) => self.missed(source, &status).await?,
                };
            }
        }
        Ok(here)
    }

    /// What did not come is a miss, unless it never will, or the source is not to be reached.
    async fn missed(&self, source: &str, status: &Status) -> Result<bool, Error> {
        match status.code() {
            Code::InvalidArgument | Code::FailedPrecondition => {
                Err(Error::Refused(status.message().into()))
            }
            Code::Unavailable => {
                // It may have started anew, with another endpoint.
                self.nodes.lock().await.remove(source);
                Err(Error::Unreachable(format!("{source}: {}", status.message())))
            }
            _ => Ok(false),
        }
    }

    /// This host's own node, or another one.
    async fn node(&self, address: Option<&str>) -> Result<Node, Error> {
        let name = address.unwrap_or_default();
        let mut nodes = self.nodes.lock().await;
        if let Some(node) = nodes.get(name) {
            return Ok(node.clone());
        }
        let channel = match address {
            None => line::channel(&self.attach_dir.join("attach.sock")).await?,
            Some(address) => {
                let unreachable = |error: tonic::transport::Error| {
                    Error::Unreachable(format!("{address}: {error}"))
                };
                tonic::transport::Endpoint::from_shared(format!("http://{address}"))
                    .map_err(|error| Error::Invalid(format!("`{address}`: {error}")))?
                    .connect_timeout(CONNECT)
                    .tcp_nodelay(true)
                    .connect()
                    .await
                    .map_err(unreachable)?
            }
        };
        let mut client = StoreNodeClient::new(channel);
        let described = client.describe(v1::DescribeRequest {}).await;
        let described = described.map_err(|status| Error::Unreachable(status.message().into()))?;
        let node = Node { client, endpoint: described.into_inner().endpoint };
        nodes.insert(name.to_owned(), node.clone());
        Ok(node)
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        // Dropped plainly it would wait, which a thread of another runtime must not.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Move {
    async fn run(self, mut local: StoreNodeClient<Channel>, from: Node) -> Result<bool, Status> {
        let mut source = from.client.clone();
        let moved = tokio::time::timeout(DEADLINE, self.moved(&mut local, from)).await;
        // Both may still hold something, whatever came of it. An end that is over already is none.
        for (node, side) in [(&mut source, Side::Source), (&mut local, Side::Prefill)] {
            let (tx, side) = (Some(self.tx.into()), side.to_wire());
            let abort = v1::TxAbortRequest { tx, side, reason: "the fetch is over".into() };
            let _ = tokio::time::timeout(CONNECT, node.tx_abort(abort)).await;
        }
        moved.unwrap_or_else(|_| Err(Status::deadline_exceeded("the fetch took too long")))
    }

    fn allocate(&self, side: Side) -> v1::TxAllocateRequest {
        v1::TxAllocateRequest {
            tx: Some(self.tx.into()),
            side: side.to_wire(),
            namespace: self.namespace.0.to_vec(),
            keys: self.key.0.to_vec(),
            lease_ms: self.lease_ms,
            ..v1::TxAllocateRequest::default()
        }
    }

    async fn moved(
        &self,
        local: &mut StoreNodeClient<Channel>,
        from: Node,
    ) -> Result<bool, Status> {
        let Node { client: mut source, endpoint } = from;
        let held = source.tx_allocate(self.allocate(Side::Source)).await?.into_inner();
        if held.held_blocks == 0 {
            return Ok(false);
        }
        // To the node it is the first block of a prompt that goes on for one token more.
        let prompt_tokens = self.block_tokens.saturating_add(1);
        let mut keys = self.key.0.to_vec();
        keys.resize(16 * (prompt_tokens / self.block_tokens.max(1)) as usize, 0);
        let wanted = v1::TxAllocateRequest {
            keys,
            prompt_tokens,
            fetch_until_block: 1,
            writer_endpoint: endpoint,
            ..self.allocate(Side::Prefill)
        };
        let Some(targets) = local.tx_allocate(wanted).await?.into_inner().targets else {
            return Ok(true);
        };
        let (tx, side) = (Some(self.tx.into()), Side::Source.to_wire());
        let push = v1::TxPushRequest { tx, side, targets: Some(targets) };
        let good_blocks = source.tx_push(push).await?.into_inner().good_blocks;
        let side = Side::Prefill.to_wire();
        let commit = v1::TxCommitRequest { tx, side, good_blocks, source_lost: false };
        Ok(local.tx_commit(commit).await?.into_inner().held_blocks > 0)
    }
}
