//! A store node that says what the test tells it to. It speaks the real protocol on a loopback
//! port; each subscription of events is handed to the test.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvasir_proto::v1::node_event::Event;
use kvasir_proto::v1::store_node_server::{StoreNode, StoreNodeServer};
use kvasir_proto::{BlockKey, SlotLayout, TierDigests, v1};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Request, Response, Status};

const LAYERS: usize = 2;
const ROW_BYTES: u64 = 100;
pub(super) const BLOCK_TOKENS: u32 = 64;

/// An idle engine.
pub(super) fn engine(instance_id: &str, role: v1::Role) -> v1::AttachedInstance {
    let description = v1::InstanceDescription {
        instance_id: instance_id.to_string(),
        role: role as i32,
        model: Some(v1::ModelDescription {
            name: "tiny".to_string(),
            fingerprint: vec![7; 32],
            kv_dtype: "f32".to_string(),
            vocab_size: 1_000,
            context_tokens: 4_096,
            routed: None,
        }),
        engine_address: "127.0.0.1:9".to_string(),
        attach_epoch: 1,
        running_requests_max: 8,
        current_role: 0,
        role_version: 0,
        instance_type: String::new(),
    };
    let load = Some(v1::InstanceLoad::default());
    v1::AttachedInstance { description: Some(description), load }
}

/// With its engine at work.
pub(super) fn busy(mut node: v1::NodeDescription, load: v1::InstanceLoad) -> v1::NodeDescription {
    node.instances[0].load = Some(load);
    node
}

/// What a node says of its first engine.
pub(super) fn first(node: &mut v1::NodeDescription) -> &mut v1::InstanceDescription {
    node.instances[0].description.as_mut().expect("it is described")
}

/// What the node says of itself: one engine, idle.
pub(super) fn description(node_id: &str, incarnation: u64, role: v1::Role) -> v1::NodeDescription {
    let layout = SlotLayout::layer_major(BLOCK_TOKENS, LAYERS, ROW_BYTES).expect("a layout");
    v1::NodeDescription {
        node_id: node_id.to_string(),
        incarnation,
        endpoint: format!("endpoint of {node_id}").into_bytes(),
        instances: vec![engine(&format!("engine-{node_id}"), role)],
        layout: Some(v1::SlotLayout::from(&layout)),
        slots_total: 1_000,
        slots_free: 1_000,
        draining: false,
        load_read_unix_ms: 0,
        slots_available: 1_000,
        ssd: None,
        persists_contexts: false,
    }
}

/// A running node; dropped, it is gone like a killed one.
pub(super) struct FakeNode {
    pub address: SocketAddr,
    pub described: Arc<Mutex<v1::NodeDescription>>,
    /// What it was told to read ahead.
    pub hints: Arc<Mutex<Vec<v1::PrefetchRequest>>>,
    /// What its engine was told to play.
    pub roles_set: Arc<Mutex<Vec<v1::SetRoleRequest>>>,
    subscriptions: mpsc::Receiver<Subscription>,
    _stop: DropGuard,
}

/// One conductor's subscription; dropped, the stream ends.
pub(super) struct Subscription {
    pub incarnation: u64,
    pub request: v1::EventsRequest,
    events: mpsc::Sender<Result<v1::NodeEvent, Status>>,
}

impl FakeNode {
    pub(super) async fn start(described: v1::NodeDescription) -> Self {
        FakeNode::start_at(described, "127.0.0.1:0".parse().expect("an address")).await
    }

    pub(super) async fn start_at(described: v1::NodeDescription, address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let described = Arc::new(Mutex::new(described));
        let (subscribed, subscriptions) = mpsc::channel(64);
        let stop = CancellationToken::new();
        let (hints, roles_set) = (Arc::default(), Arc::default());
        let service = Service {
            described: described.clone(),
            subscribed,
            hints: Arc::clone(&hints),
            roles_set: Arc::clone(&roles_set),
        };
        let stopped = stop.clone();
        tokio::spawn(async move {
            let server = tonic::transport::Server::builder()
                .add_service(StoreNodeServer::new(service))
                .serve_with_incoming(TcpListenerStream::new(listener));
            // Not a graceful end: connections break.
            tokio::select! {
                served = server => served.expect("serves"),
                () = stopped.cancelled() => {}
            }
        });
        FakeNode { address, described, hints, roles_set, subscriptions, _stop: stop.drop_guard() }
    }

    pub(super) async fn subscription(&mut self) -> Subscription {
        tokio::time::timeout(Duration::from_secs(10), self.subscriptions.recv())
            .await
            .expect("a conductor subscribes in time")
            .expect("the node is there")
    }
}

impl Subscription {
    pub(super) async fn send(&self, event: Event) {
        let event = v1::NodeEvent { incarnation: self.incarnation, event: Some(event) };
        // A conductor that has gone away is not the node's trouble.
        let _ = self.events.send(Ok(event)).await;
    }

    pub(super) async fn status(&self, status: v1::NodeDescription) {
        self.send(Event::Status(status)).await;
    }

    pub(super) async fn snapshot(&self, sequence: u64, keys: &[BlockKey]) {
        self.part(sequence, keys, true, true).await;
    }

    /// These are on its SSD, and nothing is in memory.
    pub(super) async fn snapshot_of_ssd(&self, keys: &[BlockKey]) {
        let keys = BlockKey::concat(keys);
        let tier = v1::Tier::Ssd.into();
        let snapshot = v1::Snapshot { sequence: 0, first: true, last: true, keys, tier };
        self.send(Event::Snapshot(snapshot)).await;
    }

    pub(super) async fn part(&self, sequence: u64, keys: &[BlockKey], first: bool, last: bool) {
        let keys = BlockKey::concat(keys);
        self.send(Event::Snapshot(v1::Snapshot { sequence, first, last, keys, tier: 0 })).await;
    }

    /// `(removed, key)` from this sequence on.
    pub(super) async fn changes(&self, sequence: u64, changes: &[(bool, BlockKey)]) {
        let change = |&(removed, key): &(bool, BlockKey)| v1::BlockChange {
            removed,
            key: key.0.to_vec(),
            tier: 0,
        };
        let changes = changes.iter().map(change).collect();
        self.batch(v1::BlockChanges { sequence, changes, digests: None }).await;
    }

    pub(super) async fn batch(&self, batch: v1::BlockChanges) {
        self.send(Event::Changes(batch)).await;
    }

    /// After everything up to `sequence` it has these blocks, all in DRAM.
    pub(super) async fn digests(&self, sequence: u64, keys: &[BlockKey]) {
        let digests = TierDigests { dram: keys.iter().collect(), ..TierDigests::default() };
        let (sequence, digests) = (sequence + 1, Some(digests.to_wire()));
        self.batch(v1::BlockChanges { sequence, changes: Vec::new(), digests }).await;
    }

    /// Waits until the conductor has ended this subscription.
    pub(super) async fn ended(&self) {
        tokio::time::timeout(Duration::from_secs(10), self.events.closed())
            .await
            .expect("the conductor gives the stream up in time");
    }
}

struct Service {
    described: Arc<Mutex<v1::NodeDescription>>,
    subscribed: mpsc::Sender<Subscription>,
    hints: Arc<Mutex<Vec<v1::PrefetchRequest>>>,
    roles_set: Arc<Mutex<Vec<v1::SetRoleRequest>>>,
}

impl Service {
    fn described(&self) -> v1::NodeDescription {
        self.described.lock().expect("no test panicked with it").clone()
    }
}

#[tonic::async_trait]
impl StoreNode for Service {
    type EventsStream = ReceiverStream<Result<v1::NodeEvent, Status>>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::NodeDescription>, Status> {
        Ok(Response::new(self.described()))
    }

    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let (events, stream) = mpsc::channel(64);
        let incarnation = self.described().incarnation;
        let subscription = Subscription { incarnation, request: request.into_inner(), events };
        self.subscribed.send(subscription).await.map_err(|_| Status::unavailable("stopped"))?;
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn tx_allocate(
        &self,
        _: Request<v1::TxAllocateRequest>,
    ) -> Result<Response<v1::TxAllocateReply>, Status> {
        Err(Status::unimplemented("following a node allocates nothing"))
    }

    async fn tx_push(
        &self,
        _: Request<v1::TxPushRequest>,
    ) -> Result<Response<v1::TxPushReply>, Status> {
        Err(Status::unimplemented("following a node pushes nothing"))
    }

    async fn tx_commit(
        &self,
        _: Request<v1::TxCommitRequest>,
    ) -> Result<Response<v1::TxCommitReply>, Status> {
        Err(Status::unimplemented("following a node commits nothing"))
    }

    async fn tx_abort(
        &self,
        _: Request<v1::TxAbortRequest>,
    ) -> Result<Response<v1::TxAbortReply>, Status> {
        Err(Status::unimplemented("following a node aborts nothing"))
    }

    async fn renew(
        &self,
        _: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewReply>, Status> {
        Err(Status::unimplemented("following a node renews nothing"))
    }

    async fn persist_context(
        &self,
        _: Request<v1::PersistContextRequest>,
    ) -> Result<Response<v1::PersistContextReply>, Status> {
        Err(Status::unimplemented("it keeps nothing"))
    }

    async fn holds_contexts(
        &self,
        _: Request<v1::HoldsContextsRequest>,
    ) -> Result<Response<v1::HoldsContextsReply>, Status> {
        Err(Status::unimplemented("it keeps nothing"))
    }

    async fn list_contexts(
        &self,
        _: Request<v1::ListContextsRequest>,
    ) -> Result<Response<v1::ListContextsReply>, Status> {
        Err(Status::unimplemented("it keeps nothing"))
    }

    async fn delete_context(
        &self,
        _: Request<v1::DeleteContextRequest>,
    ) -> Result<Response<v1::DeleteContextReply>, Status> {
        Err(Status::unimplemented("it keeps nothing"))
    }

    async fn prefetch(
        &self,
        request: Request<v1::PrefetchRequest>,
    ) -> Result<Response<v1::PrefetchReply>, Status> {
        let blocks = request.get_ref().keys.len() as u32 / 16;
        self.hints.lock().expect("no test panicked with it").push(request.into_inner());
        Ok(Response::new(v1::PrefetchReply { dram_blocks: 0, promoting_blocks: blocks }))
    }

    async fn replicate(
        &self,
        _: Request<v1::ReplicateRequest>,
    ) -> Result<Response<v1::ReplicateReply>, Status> {
        Err(Status::unimplemented("following a node copies nothing"))
    }

    async fn set_role(
        &self,
        request: Request<v1::SetRoleRequest>,
    ) -> Result<Response<v1::SetRoleReply>, Status> {
        let request = request.into_inner();
        let mut described = self.described.lock().expect("no test panicked with it");
        let descriptions = described.instances.iter_mut().filter_map(|i| i.description.as_mut());
        let mut named = descriptions.filter(|i| i.instance_id == request.instance_id);
        let instance = named.next().ok_or_else(|| Status::not_found("no such engine"))?;
        if instance.role_version != request.expected_version {
            return Err(Status::aborted("another version"));
        }
        instance.current_role = request.role;
        instance.role_version += 1;
        let role_version = instance.role_version;
        drop(described);
        self.roles_set.lock().expect("no test panicked with it").push(request);
        Ok(Response::new(v1::SetRoleReply { role_version }))
    }

    async fn list_blocks(
        &self,
        _: Request<v1::ListBlocksRequest>,
    ) -> Result<Response<v1::ListBlocksReply>, Status> {
        Err(Status::unimplemented("following a node lists nothing"))
    }
}
