//! Carries out copies of blocks to other nodes, and looks which nodes could take some: calls that the
//! node's thread cannot wait for. It decides nothing; what it met is told as commands.
//!
//! What a copy is, and when it counts, is the block core's matter
//! ([`Copying`](kvasir_blocks::moving::copying::Copying)).

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvasir_blocks::moving::copying::{CopyAnswer, CopyStep, Copying};
use kvasir_blocks::{CopiedContext, CopyError, CopyPlan, HeldCopies, Peer, PeerCopies, PeerView};
use kvasir_proto::{BlockKey, Mark, Side, SlotLayout, TxId, v1};
use tokio::runtime::Handle;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};
use v1::store_node_client::StoreNodeClient;

use super::SERIALS_OF_COPIES;
use super::command::{Command, NodeHandle, Refused};
use super::inbox::NotTaken;

/// Blocks that one transaction copies at most, beside those that the other node has.
const PIECE_BLOCKS: u32 = 64;
/// A call that only asks must be answered within this time.
const CALL: Duration = Duration::from_secs(10);
const CONNECT: Duration = Duration::from_secs(2);
/// A node whose queue is full is told again.
const AGAIN: Duration = Duration::from_millis(20);
/// A copy's leases, at most; they are renewed three times as often.
const LEASE_MS: u64 = 10_000;

/// What a copier knows of the node it works for.
#[derive(Debug, Clone)]
pub(crate) struct Own {
    pub incarnation: u64,
    /// Where it writes from, as other nodes know it.
    pub endpoint: Vec<u8>,
    pub layout: Arc<SlotLayout>,
}

/// Connections that are kept: whoever asks for a copy names the address.
const CLIENTS_MAX: usize = 256;

/// See the module.
#[derive(Debug)]
pub(crate) struct Copier {
    runtime: Handle,
    node: NodeHandle,
    lease_ms: u64,
    serial: Arc<AtomicU64>,
    /// Connections are made on first use, and anew when they broke.
    clients: HashMap<Peer, StoreNodeClient<Channel>>,
}

impl Copier {
    pub(crate) fn new(runtime: Handle, node: NodeHandle, lease_max_ms: u64) -> Self {
        Copier {
            runtime,
            node,
            lease_ms: LEASE_MS.min(lease_max_ms),
            serial: Arc::new(AtomicU64::new(SERIALS_OF_COPIES)),
            clients: HashMap::new(),
        }
    }

    /// Makes one copy; [`Command::Copied`] tells of its end.
    pub(crate) fn copy(&mut self, plan: CopyPlan, own: Own) {
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
    pub(crate) fn look(&mut self, peers: Vec<Peer>, own: Option<Own>) {
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

    /// Asks these nodes which of these contexts they keep; [`Command::CopiesSeen`] tells. `own` is the
    /// incarnation of this node, which may be among them.
    pub(crate) fn ask_for(&mut self, peers: Vec<Peer>, contexts: Vec<CopiedContext>, own: u64) {
        let clients: Vec<_> =
            peers.into_iter().map(|peer| (self.client(&peer).ok(), peer)).collect();
        let node = self.node.clone();
        self.runtime.spawn(async move {
            let request =
                v1::HoldsContextsRequest { contexts: contexts.iter().map(asked).collect() };
            let asks = clients.into_iter().map(|(client, peer)| holds(peer, client, &request));
            let seen = futures::future::join_all(asks).await;
            let is_other =
                |of: &PeerCopies| of.answer.as_ref().is_none_or(|held| held.incarnation != own);
            let (others, itself): (Vec<_>, Vec<_>) = seen.into_iter().partition(is_other);
            for PeerCopies { peer, .. } in itself {
                tell(&node, || Command::PeerIsItself(peer.clone())).await;
            }
            tell(&node, || Command::CopiesSeen(contexts.clone(), others.clone())).await;
        });
    }

    fn client(&mut self, peer: &Peer) -> Result<StoreNodeClient<Channel>, CopyError> {
        if let Some(client) = self.clients.get(peer) {
            return Ok(client.clone());
        }
        let endpoint = Endpoint::from_shared(format!("http://{peer}"));
        let endpoint = endpoint.map_err(|error| CopyError::Refused {
            peer: peer.clone(),
            why: format!("invalid address: {error}"),
        })?;
        // A lazy connection belongs to the runtime.
        let _entered = self.runtime.enter();
        let endpoint = endpoint.connect_timeout(CONNECT).tcp_nodelay(true);
        let client = StoreNodeClient::new(endpoint.connect_lazy());
        if self.clients.len() >= CLIENTS_MAX {
            self.clients.clear();
        }
        self.clients.insert(peer.clone(), client.clone());
        Ok(client)
    }
}

/// Tells the node's thread, however long its queue is.
pub(crate) async fn tell(node: &NodeHandle, command: impl Fn() -> Command) {
    while let Err(NotTaken::Busy) = node.post(command()) {
        sleep(AGAIN).await;
    }
}

async fn look_at(peer: Peer, mut client: StoreNodeClient<Channel>, own: &Own) -> Option<PeerView> {
    let node = match timeout(CALL, client.describe(v1::DescribeRequest {})).await {
        Ok(Ok(reply)) => reply.into_inner(),
        Ok(Err(status)) => {
            tracing::debug!(%peer, %status, "a possible target node of copies does not answer");
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

fn asked(context: &CopiedContext) -> v1::HeldContext {
    v1::HeldContext {
        tenant_hash: context.tenant.0,
        namespace: context.namespace.0.to_vec(),
        last_key: context.last.0.to_vec(),
        expires_unix_ms: context.expires_unix_ms,
        replicas: context.copies.into(),
    }
}

async fn holds(
    peer: Peer,
    client: Option<StoreNodeClient<Channel>>,
    request: &v1::HoldsContextsRequest,
) -> PeerCopies {
    let call = async {
        let reply = timeout(CALL, client?.holds_contexts(request.clone())).await.ok()?;
        let reply = reply.inspect_err(|status| {
            tracing::debug!(%peer, %status, "the store node cannot query the contexts of another node");
        });
        let v1::HoldsContextsReply { incarnation, holds } = reply.ok()?.into_inner();
        Some(HeldCopies { incarnation, holds })
    };
    let answer = call.await;
    PeerCopies { peer, answer }
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

/// The transaction of the piece that is being copied.
struct Piece {
    tx: TxId,
    targets: Option<v1::WriteTargets>,
}

impl Job {
    async fn run(self) -> Result<(), CopyError> {
        let block_tokens = self.own.layout.block_tokens();
        let mut copying = Copying::new(&self.plan, block_tokens, PIECE_BLOCKS);
        let mut piece = Piece { tx: self.next_tx(), targets: None };
        loop {
            let answer = match copying.step() {
                CopyStep::Reserve { blocks, prompt_tokens } => {
                    piece = Piece { tx: self.next_tx(), targets: None };
                    self.reserve(&mut piece, blocks, prompt_tokens).await
                }
                CopyStep::Pin { blocks } => self.pin(piece.tx, blocks).await,
                CopyStep::Push => self.push(&mut piece).await,
                CopyStep::Commit { valid_blocks } => self.commit(piece.tx, valid_blocks).await,
                CopyStep::Keep(mark) => self.keep(mark).await,
                CopyStep::Abort => {
                    self.abort(piece.tx).await;
                    Ok(CopyAnswer::Aborted)
                }
                CopyStep::End(result) => return result,
            };
            copying.answer(answer.unwrap_or_else(CopyAnswer::Failed));
        }
    }

    fn next_tx(&self) -> TxId {
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        TxId { conductor_incarnation: self.own.incarnation, serial }
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
            Err(_) => {
                Err(self.peer_says(&Status::deadline_exceeded("the node did not answer in time")))
            }
        }
    }

    fn allocation(&self, tx: TxId, side: Side, blocks: u32) -> v1::TxAllocateRequest {
        v1::TxAllocateRequest {
            tx: Some(tx.into()),
            side: side.to_wire(),
            namespace: self.plan.namespace.0.to_vec(),
            keys: BlockKey::concat(&self.plan.keys[..blocks as usize]),
            lease_ms: self.lease_ms,
            ..v1::TxAllocateRequest::default()
        }
    }

    async fn reserve(
        &self,
        piece: &mut Piece,
        blocks: u32,
        prompt_tokens: u32,
    ) -> Result<CopyAnswer, CopyError> {
        let request = v1::TxAllocateRequest {
            prompt_tokens,
            fetch_until_block: blocks,
            writer_endpoint: self.own.endpoint.clone(),
            replica: true,
            ..self.allocation(piece.tx, Side::Prefill, blocks)
        };
        let mut client = self.client.clone();
        piece.targets = self.ask_peer(client.tx_allocate(request)).await?.targets;
        let slots = |targets: &v1::WriteTargets| u32::try_from(targets.slots.len());
        let targets = piece.targets.as_ref().map(|targets| slots(targets).unwrap_or(u32::MAX));
        Ok(CopyAnswer::Reserved { targets })
    }

    async fn pin(&self, tx: TxId, blocks: u32) -> Result<CopyAnswer, CopyError> {
        let source = self.allocation(tx, Side::Source, blocks);
        let pinned = self.node.ask(|reply| Command::Allocate(source, reply)).await;
        pinned.map_err(not_here)?;
        Ok(CopyAnswer::Pinned)
    }

    /// Sends, and renews the leases of both sides meanwhile.
    async fn push(&self, piece: &mut Piece) -> Result<CopyAnswer, CopyError> {
        let tx = piece.tx;
        let request = v1::TxPushRequest {
            tx: Some(tx.into()),
            side: Side::Source.to_wire(),
            targets: piece.targets.take(),
        };
        let push = self.node.ask(|reply| Command::Push(request, reply));
        tokio::pin!(push);
        loop {
            tokio::select! {
                pushed = &mut push => {
                    let valid_blocks = pushed.map_err(not_here)?.valid_blocks;
                    return Ok(CopyAnswer::Pushed { valid_blocks });
                }
                () = sleep(Duration::from_millis(self.lease_ms / 3 + 1)) => self.renew(tx).await?,
            }
        }
    }

    async fn commit(&self, tx: TxId, valid_blocks: u32) -> Result<CopyAnswer, CopyError> {
        let commit = v1::TxCommitRequest {
            tx: Some(tx.into()),
            side: Side::Prefill.to_wire(),
            valid_blocks,
            source_lost: false,
        };
        let mut client = self.client.clone();
        let held_blocks = self.ask_peer(client.tx_commit(commit)).await?.cached_blocks;
        Ok(CopyAnswer::Committed { held_blocks })
    }

    async fn renew(&self, tx: TxId) -> Result<(), CopyError> {
        let request = |side: Side| {
            let share = v1::TxShare { tx: Some(tx.into()), side: side.to_wire() };
            v1::RenewRequest { shares: vec![share], lease_ms: self.lease_ms }
        };
        let mut client = self.client.clone();
        let theirs = self.ask_peer(client.renew(request(Side::Prefill))).await?;
        if !theirs.unknown.is_empty() {
            return Err(self.peer_says(&Status::aborted("the node aborted the copy")));
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
            tracing::debug!(
                %tx, %refused, %error,
                "the store node cannot abort a copy; it ends when its leases expire"
            );
        }
    }

    /// What was promised here shall be promised there, for as long, and durable.
    async fn keep(&self, kept: Mark) -> Result<CopyAnswer, CopyError> {
        let request = v1::PersistContextRequest {
            namespace: self.plan.namespace.0.to_vec(),
            keys: BlockKey::concat(&self.plan.keys),
            tenant_hash: kept.tenant.0,
            expires_unix_ms: kept.expires_unix_ms,
            created_unix_ms: kept.created_unix_ms.unwrap_or(0),
            replicas: kept.copies.into(),
            // A beginning of it would be another context, which nobody asked for.
            require_all_blocks: true,
            ..v1::PersistContextRequest::default()
        };
        let mut client = self.client.clone();
        // It waits for a disk, and whoever waits for nothing more asks again.
        let kept_blocks = self.ask_peer(client.persist_context(request)).await?.persisted_blocks;
        Ok(CopyAnswer::Kept { kept_blocks })
    }
}

fn not_here(refused: Refused) -> CopyError {
    CopyError::NotHere(refused.to_string())
}

#[cfg(test)]
mod tests {
    use prometheus::IntCounter;

    use super::*;
    use crate::node::inbox::inbox;

    /// Nobody takes a turn of it.
    fn node() -> (NodeHandle, crate::node::inbox::Inbox) {
        let dropped = IntCounter::new("dropped", "Messages.").expect("a name");
        let (post, inbox) = inbox(dropped).expect("descriptors");
        (NodeHandle::new(post), inbox)
    }

    #[tokio::test]
    async fn what_finds_a_full_queue_is_told_when_there_is_room() {
        let (node, inbox) = node();
        while node.post(Command::PeersSeen(Vec::new())).is_ok() {}
        let teller = node.clone();
        let told = tokio::spawn(async move { tell(&teller, || Command::Drain).await });
        sleep(2 * AGAIN).await;
        assert!(!told.is_finished(), "there is no room");
        assert!(matches!(inbox.commands.recv(), Ok(Command::PeersSeen(_))));
        told.await.expect("told");
        assert!(matches!(inbox.commands.try_iter().last(), Some(Command::Drain)));
        while node.post(Command::Drain).is_ok() {}
        drop(inbox);
        // Nor does it wait for a node that has ended.
        tell(&node, || Command::Drain).await;
    }

    #[tokio::test]
    async fn connections_to_whatever_addresses_are_named_are_bounded() {
        let (node, _inbox) = node();
        let mut copier = Copier::new(Handle::current(), node, LEASE_MS);
        for port in 1..=2 * CLIENTS_MAX {
            copier.client(&Peer(format!("127.0.0.1:{port}").into())).expect("an address");
            assert!(copier.clients.len() <= CLIENTS_MAX);
        }
        copier.client(&Peer("no address".into())).expect_err("that is none");
    }
}
