//! Carries out copies of blocks to other nodes, and looks which nodes could take some: calls that the
//! node's thread cannot wait for. It decides nothing; what it met is told as commands.
//!
//! A copy is a transaction like any fetch. The share of the prefill side there reserves what it lacks,
//! the share of the source side here pins what is sent and pushes it, and the other side commits. A long
//! chain goes in pieces, each a transaction of its own, so that what has arrived stays when the next
//! piece fails.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvasir_blocks::{CopyError, CopyPlan, Peer, PeerView};
use kvasir_proto::{BlockKey, Side, SlotLayout, TxId, v1};
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use v1::store_node_client::StoreNodeClient;

use super::SERIALS_OF_COPIES;
use super::command::{Command, NodeHandle, Refused};
use super::inbox::NotTaken;

/// Blocks that one transaction copies at most, beside those that the other node has.
const PIECE_BLOCKS: usize = 64;
/// A call that only asks must be answered within this time.
const CALL: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(2);
/// A node whose queue is full is told again.
const AGAIN: Duration = Duration::from_millis(20);
/// A copy's leases, at most; they are renewed three times as often.
const LEASE_MS: u64 = 10_000;

/// What a copier knows of the node it works for.
#[derive(Debug, Clone)]
pub struct Own {
    pub incarnation: u64,
    /// Where it writes from, as other nodes know it.
    pub endpoint: Vec<u8>,
    pub layout: Arc<SlotLayout>,
}

/// See the module.
#[derive(Debug)]
pub struct Copier {
    runtime: Handle,
    node: NodeHandle,
    lease_ms: u64,
    serial: Arc<AtomicU64>,
    /// Connections are made on first use, and anew when they broke.
    clients: HashMap<Peer, StoreNodeClient<Channel>>,
}

impl Copier {
    pub fn new(runtime: Handle, node: NodeHandle, lease_ms_max: u64) -> Self {
        Copier {
            runtime,
            node,
            lease_ms: LEASE_MS.min(lease_ms_max),
            serial: Arc::new(AtomicU64::new(SERIALS_OF_COPIES)),
            clients: HashMap::new(),
        }
    }

    /// Makes one copy; [`Command::Copied`] tells of its end.
    pub fn copy(&mut self, plan: CopyPlan, own: Own) {
        let copy = plan.copy;
        let client = self.client(&plan.to);
        let node = self.node.clone();
        let (lease_ms, serial) = (self.lease_ms, Arc::clone(&self.serial));
        self.runtime.spawn(async move {
            let result = match client {
                Ok(client) => {
                    let job = Job { plan, own, node: node.clone(), client, lease_ms, serial };
                    job.run().await
                }
                Err(error) => Err(error),
            };
            tell(&node, || Command::Copied(copy, result.clone())).await;
        });
    }

    /// Asks these nodes what they are; [`Command::PeersSeen`] tells which of them could take blocks.
    pub fn look(&mut self, peers: Vec<Peer>, own: Option<Own>) {
        let clients: Vec<_> = peers
            .into_iter()
            .filter_map(|peer| Some((peer.clone(), self.client(&peer).ok()?)))
            .collect();
        let node = self.node.clone();
        self.runtime.spawn(async move {
            let mut seen = Vec::new();
            if let Some(own) = own {
                let looks = clients.into_iter().map(|(peer, client)| look_at(peer, client, &own));
                seen = futures::future::join_all(looks).await.into_iter().flatten().collect();
            }
            tell(&node, || Command::PeersSeen(seen.clone())).await;
        });
    }

    fn client(&mut self, peer: &Peer) -> Result<StoreNodeClient<Channel>, CopyError> {
        if let Some(client) = self.clients.get(peer) {
            return Ok(client.clone());
        }
        let endpoint = Endpoint::from_shared(format!("http://{peer}"));
        let endpoint = endpoint.map_err(|error| CopyError::Refused {
            peer: peer.clone(),
            why: format!("that is no address: {error}"),
        })?;
        // A lazy connection belongs to the runtime.
        let _entered = self.runtime.enter();
        let endpoint = endpoint.connect_timeout(CONNECT).tcp_nodelay(true);
        let client = StoreNodeClient::new(endpoint.connect_lazy());
        self.clients.insert(peer.clone(), client.clone());
        Ok(client)
    }
}

/// Tells the node's thread, however long its queue is.
pub async fn tell(node: &NodeHandle, command: impl Fn() -> Command) {
    while let Err(NotTaken::Busy) = node.post(command()) {
        sleep(AGAIN).await;
    }
}

async fn look_at(peer: Peer, mut client: StoreNodeClient<Channel>, own: &Own) -> Option<PeerView> {
    let node = match timeout(CALL, client.describe(v1::DescribeRequest {})).await {
        Ok(Ok(reply)) => reply.into_inner(),
        Ok(Err(status)) => {
            tracing::debug!(%peer, %status, "a node that could take blocks does not answer");
            return None;
        }
        Err(_) => return None,
    };
    let layout = node.layout.as_ref().map(SlotLayout::try_from);
    let same_layout = layout.is_some_and(|layout| layout.is_ok_and(|of| of == *own.layout));
    let takes = node.incarnation != own.incarnation && !node.draining && same_layout;
    let keeps = node.ssd.is_some_and(|ssd| ssd.usable);
    takes.then_some(PeerView { peer, available: node.slots_available, keeps })
}

/// One copy.
struct Job {
    plan: CopyPlan,
    own: Own,
    node: NodeHandle,
    client: StoreNodeClient<Channel>,
    lease_ms: u64,
    serial: Arc<AtomicU64>,
}

impl Job {
    async fn run(self) -> Result<(), CopyError> {
        let blocks = self.plan.keys.len();
        let mut until = 0;
        while until < blocks {
            until = (until + PIECE_BLOCKS).min(blocks);
            let serial = self.serial.fetch_add(1, Ordering::Relaxed);
            let tx = TxId { conductor_incarnation: self.own.incarnation, serial };
            let piece = self.piece(tx, until).await;
            if piece.is_err() {
                self.abort(tx).await;
            }
            piece?;
        }
        self.keep().await
    }

    fn peer_says(&self, status: &Status) -> CopyError {
        let (peer, why) = (self.plan.to.clone(), status.message().to_owned());
        match status.code() {
            Code::ResourceExhausted => CopyError::NoRoom { peer, why },
            Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Cancelled => {
                CopyError::PeerLost { peer, why }
            }
            _ => CopyError::Refused { peer, why },
        }
    }

    async fn ask_peer<T>(
        &self,
        call: impl Future<Output = Result<tonic::Response<T>, Status>>,
    ) -> Result<T, CopyError> {
        match timeout(CALL, call).await {
            Ok(Ok(reply)) => Ok(reply.into_inner()),
            Ok(Err(status)) => Err(self.peer_says(&status)),
            Err(_) => Err(self.peer_says(&Status::deadline_exceeded("no answer in time"))),
        }
    }

    fn allocation(&self, tx: TxId, side: Side, until: usize) -> v1::TxAllocateRequest {
        v1::TxAllocateRequest {
            tx: Some(tx.into()),
            side: side.to_wire(),
            namespace: self.plan.namespace.0.to_vec(),
            keys: BlockKey::concat(&self.plan.keys[..until]),
            lease_ms: self.lease_ms,
            ..v1::TxAllocateRequest::default()
        }
    }

    /// Copies what the other node lacks of the first `until` blocks.
    async fn piece(&self, tx: TxId, until: usize) -> Result<(), CopyError> {
        let blocks = u32::try_from(until).unwrap_or(u32::MAX);
        let prompt_tokens = blocks.saturating_mul(self.own.layout.block_tokens()).saturating_add(1);
        let request = v1::TxAllocateRequest {
            prompt_tokens,
            fetch_until_block: blocks,
            writer_endpoint: self.own.endpoint.clone(),
            replica: true,
            ..self.allocation(tx, Side::Prefill, until)
        };
        let mut client = self.client.clone();
        let reply = self.ask_peer(client.tx_allocate(request)).await?;
        // It has them all, or will in a moment.
        let Some(targets) = reply.targets else { return Ok(()) };
        let wanted = u32::try_from(targets.slots.len()).unwrap_or(u32::MAX);
        let not_here = |refused: Refused| CopyError::NotHere(refused.to_string());
        let source = self.allocation(tx, Side::Source, until);
        self.node.ask(|reply| Command::Allocate(source, reply)).await.map_err(not_here)?;
        let good_blocks = self.push(tx, targets).await?;
        let commit = v1::TxCommitRequest {
            tx: Some(tx.into()),
            side: Side::Prefill.to_wire(),
            good_blocks,
            source_lost: false,
        };
        let held = self.ask_peer(client.tx_commit(commit)).await?.held_blocks;
        if good_blocks < wanted {
            let why = format!("{good_blocks} of {wanted} blocks were sent whole");
            return Err(CopyError::NotHere(why));
        }
        if held < blocks {
            let why = format!("it holds {held} blocks of {blocks} that were sent");
            return Err(CopyError::Refused { peer: self.plan.to.clone(), why });
        }
        Ok(())
    }

    /// Sends, and renews the leases of both sides meanwhile.
    async fn push(&self, tx: TxId, targets: v1::WriteTargets) -> Result<u32, CopyError> {
        let request = v1::TxPushRequest {
            tx: Some(tx.into()),
            side: Side::Source.to_wire(),
            targets: Some(targets),
        };
        let push = self.node.ask(|reply| Command::Push(request, reply));
        tokio::pin!(push);
        loop {
            tokio::select! {
                pushed = &mut push => {
                    let pushed = pushed.map_err(|refused| CopyError::NotHere(refused.to_string()))?;
                    return Ok(pushed.good_blocks);
                }
                () = sleep(Duration::from_millis(self.lease_ms / 3 + 1)) => self.renew(tx).await?,
            }
        }
    }

    async fn renew(&self, tx: TxId) -> Result<(), CopyError> {
        let request = |side: Side| {
            let share = v1::TxShare { tx: Some(tx.into()), side: side.to_wire() };
            v1::RenewRequest { shares: vec![share], lease_ms: self.lease_ms }
        };
        let mut client = self.client.clone();
        let theirs = self.ask_peer(client.renew(request(Side::Prefill))).await?;
        if !theirs.unknown.is_empty() {
            return Err(self.peer_says(&Status::aborted("it has given the copy up")));
        }
        let ours = self.node.ask(|reply| Command::Renew(request(Side::Source), reply)).await;
        match ours {
            Ok(_) => Ok(()),
            Err(refused) => Err(CopyError::NotHere(refused.to_string())),
        }
    }

    /// As well as it can: what is not told runs into the end of its lease.
    async fn abort(&self, tx: TxId) {
        let request = |side: Side| v1::TxAbortRequest {
            tx: Some(tx.into()),
            side: side.to_wire(),
            reason: "the copy failed".into(),
        };
        let ours = self.node.ask(|reply| Command::Abort(request(Side::Source), reply)).await;
        let mut client = self.client.clone();
        let theirs = self.ask_peer(client.tx_abort(request(Side::Prefill))).await;
        if let (Err(refused), Err(error)) = (ours, theirs) {
            tracing::debug!(%tx, %refused, %error, "a copy ends by its leases");
        }
    }

    /// What was promised here is promised there, for as long, and durable.
    async fn keep(&self) -> Result<(), CopyError> {
        let Some(kept) = self.plan.kept else { return Ok(()) };
        let request = v1::KeepContextRequest {
            namespace: self.plan.namespace.0.to_vec(),
            keys: BlockKey::concat(&self.plan.keys),
            tenant_hash: kept.tenant.0,
            until_unix_ms: kept.until_unix_ms,
            since_unix_ms: kept.since_unix_ms.unwrap_or(0),
            ..v1::KeepContextRequest::default()
        };
        let mut client = self.client.clone();
        // It waits for a disk, and whoever waits for nothing more asks again.
        let kept_blocks = self.ask_peer(client.keep_context(request)).await?.kept_blocks as usize;
        let blocks = self.plan.keys.len();
        if kept_blocks < blocks {
            let why = format!("it kept {kept_blocks} blocks of {blocks}");
            return Err(CopyError::NoRoom { peer: self.plan.to.clone(), why });
        }
        Ok(())
    }
}
