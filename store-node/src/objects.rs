//! Objects that lie on another node: brought here, each by a transaction of its own between the two nodes, as
//! a conductor brings the blocks of a prompt. What differs is who orders it: the node that wants them, for a
//! client of its own, in one call for a whole batch, so that one object costs one round trip and the writing.
//!
//! The node reserves slots and says where they are; the source pins each object and writes it there, and
//! unpins it; when it is whole and its checksum is right it is committed, whether or not the source has said
//! that it is done. Whatever fails, both sides end what they hold.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;
use kvasir_proto::{BlockKey, Namespace, Side, TxId, v1};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};
use v1::object_source_client::ObjectSourceClient;
use v1::object_source_server::ObjectSource;
use v1::store_node_client::StoreNodeClient;

use crate::node::command::{Command, FetchName, NodeHandle, Refused};
use crate::node::copier::tell;

/// Objects that are moved at once.
const AT_ONCE: usize = 64;
/// How long that may take.
const DEADLINE: Duration = Duration::from_secs(20);
const CONNECT: Duration = Duration::from_secs(5);
/// Nodes whose connections are kept.
const SOURCES_MAX: usize = 256;

/// A node that was called.
#[derive(Debug, Clone)]
struct Source {
    client: ObjectSourceClient<Channel>,
    incarnation: u64,
    /// Where it writes from.
    endpoint: Vec<u8>,
}

/// Objects that are not here, and where they are.
#[derive(Debug)]
pub struct Wanted {
    pub namespace: Namespace,
    pub keys: Vec<BlockKey>,
    /// Of this node's slots.
    pub block_tokens: u32,
    /// The gRPC address of the other node, "host:port".
    pub source: String,
}

/// Brings objects here. See the module.
#[derive(Debug)]
pub struct Fetcher {
    runtime: Handle,
    node: NodeHandle,
    lease_ms: u64,
    incarnation: u64,
    next_serial: AtomicU64,
    sources: Mutex<HashMap<String, Source>>,
}

/// One object that comes.
struct Coming {
    /// Where it stands among those that are wanted.
    at: usize,
    tx: TxId,
    targets: v1::WriteTargets,
}

impl Fetcher {
    pub fn new(runtime: Handle, node: NodeHandle, lease_ms_max: u64) -> Self {
        Fetcher {
            runtime,
            node,
            lease_ms: (DEADLINE.as_millis() as u64).min(lease_ms_max),
            incarnation: rand::random(),
            next_serial: AtomicU64::new(1),
            sources: Mutex::default(),
        }
    }

    /// Brings what can be had; [`Command::Fetched`] tells of the end.
    pub fn fetch(self: &Arc<Self>, name: FetchName, wanted: Wanted) {
        let this = Arc::clone(self);
        self.runtime.spawn(async move {
            let fetched = this.fetch_all(&wanted).await;
            tell(&this.node, || Command::Fetched(name, fetched.clone())).await;
        });
    }

    async fn fetch_all(&self, wanted: &Wanted) -> Result<(), Status> {
        for keys in wanted.keys.chunks(AT_ONCE) {
            let part =
                Part { namespace: wanted.namespace, keys, block_tokens: wanted.block_tokens };
            self.fetch_part(&part, &wanted.source).await?;
        }
        Ok(())
    }

    async fn fetch_part(&self, part: &Part<'_>, address: &str) -> Result<(), Status> {
        let source = self.source(address).await?;
        match self.bring(part, &source).await {
            Ok(Met::Source) => Ok(()),
            // It has started anew since, and what it wrote was not taken.
            Ok(Met::Another) => {
                self.forget(address);
                let source = self.source(address).await?;
                self.bring(part, &source).await.map(|_| ())
            }
            Err(status) => {
                if status.code() == Code::Unavailable {
                    self.forget(address);
                }
                Err(status)
            }
        }
    }

    fn forget(&self, address: &str) {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner).remove(address);
    }

    async fn source(&self, address: &str) -> Result<Source, Status> {
        let known =
            self.sources.lock().unwrap_or_else(PoisonError::into_inner).get(address).cloned();
        if let Some(source) = known {
            return Ok(source);
        }
        let silent = |why: String| Status::unavailable(format!("{address}: {why}"));
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| Status::invalid_argument(format!("`{address}`: {error}")))?
            .connect_timeout(CONNECT)
            .tcp_nodelay(true);
        let asked = async {
            let channel = endpoint.connect().await.map_err(|error| silent(error.to_string()))?;
            let mut node = StoreNodeClient::new(channel.clone());
            let described = node.describe(v1::DescribeRequest {}).await;
            let v1::NodeDescription { incarnation, endpoint, .. } =
                described.map_err(|status| silent(status.message().into()))?.into_inner();
            Ok(Source { client: ObjectSourceClient::new(channel), incarnation, endpoint })
        };
        let asked = tokio::time::timeout(2 * CONNECT, asked).await;
        let source = asked.unwrap_or_else(|_| Err(silent("it does not answer".into())))?;
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if sources.len() >= SOURCES_MAX {
            sources.clear();
        }
        sources.insert(address.to_owned(), source.clone());
        Ok(source)
    }

    async fn bring(&self, part: &Part<'_>, source: &Source) -> Result<Met, Status> {
        let coming = self.reserve(part, source).await?;
        if coming.is_empty() {
            return Ok(Met::Source);
        }
        let mut sending = self.ask_to_send(part, source, &coming);
        let commits = join_all(coming.iter().map(|coming| self.commit(coming.tx)));
        tokio::pin!(commits);
        let mut met = Ok(Met::Source);
        // What has come is here, whether or not the source has said so.
        tokio::select! {
            biased;
            _ = &mut commits => return met,
            sent = &mut sending => {
                match sent.unwrap_or_else(|_| Err(Status::internal("the call has died"))) {
                    Ok(v1::SendObjectsReply { incarnation, sent }) => {
                        // It says none when it could begin nothing.
                        if incarnation != 0 && incarnation != source.incarnation {
                            met = Ok(Met::Another);
                        }
                        let is_lost = |position: &usize| !sent.get(*position).is_some_and(|sent| *sent);
                        let lost = (0..coming.len()).filter(is_lost);
                        lost.for_each(|position| self.give_up(coming[position].tx));
                    }
                    Err(status) => {
                        coming.iter().for_each(|coming| self.give_up(coming.tx));
                        met = if never_comes(&status) { Err(status) } else { met };
                    }
                }
            }
            () = tokio::time::sleep(DEADLINE) => {
                coming.iter().for_each(|coming| self.give_up(coming.tx));
                sending.abort();
            }
        }
        // What was given up has ended, too.
        commits.await;
        met
    }

    /// Slots for what is not here yet.
    async fn reserve(&self, part: &Part<'_>, source: &Source) -> Result<Vec<Coming>, Status> {
        let first = self.next_serial.fetch_add(part.keys.len() as u64, Ordering::Relaxed);
        let tx =
            |at: usize| TxId { conductor_incarnation: self.incarnation, serial: first + at as u64 };
        let allocations = part.keys.iter().enumerate().map(|(at, key)| {
            // To the node it is the first block of a prompt that goes on for one token more.
            let prompt_tokens = part.block_tokens.saturating_add(1);
            let mut keys = key.0.to_vec();
            keys.resize(16 * (prompt_tokens / part.block_tokens) as usize, 0);
            let request = v1::TxAllocateRequest {
                tx: Some(tx(at).into()),
                side: Side::Prefill.to_wire(),
                namespace: part.namespace.0.to_vec(),
                keys,
                prompt_tokens,
                lease_ms: self.lease_ms,
                fetch_until_block: 1,
                writer_endpoint: source.endpoint.clone(),
                replica: true,
                ..v1::TxAllocateRequest::default()
            };
            self.node.ask(|reply| Command::Allocate(request, reply))
        });
        let (mut coming, mut refused) = (Vec::new(), None);
        for (at, allocated) in join_all(allocations).await.into_iter().enumerate() {
            match allocated {
                Ok(v1::TxAllocateReply { targets: Some(targets), .. }) => {
                    coming.push(Coming { at, tx: tx(at), targets });
                }
                Ok(_) => {}
                Err(why) => {
                    let status = Status::from(why);
                    refused = refused.or(never_comes(&status).then_some(status));
                }
            }
        }
        match refused {
            Some(status) => {
                coming.iter().for_each(|coming| self.give_up(coming.tx));
                Err(status)
            }
            None => Ok(coming),
        }
    }

    /// Not stopped when nobody waits for its answer any more.
    fn ask_to_send(
        &self,
        part: &Part<'_>,
        source: &Source,
        coming: &[Coming],
    ) -> JoinHandle<Result<v1::SendObjectsReply, Status>> {
        let object = |coming: &Coming| v1::SendObject {
            tx: Some(coming.tx.into()),
            key: part.keys[coming.at].0.to_vec(),
            targets: Some(coming.targets.clone()),
        };
        let request = v1::SendObjectsRequest {
            namespace: part.namespace.0.to_vec(),
            lease_ms: self.lease_ms,
            objects: coming.iter().map(object).collect(),
        };
        let mut client = source.client.clone();
        tokio::spawn(async move { Ok(client.send(request).await?.into_inner()) })
    }

    /// Waits until all of it has come or its share has ended.
    async fn commit(&self, tx: TxId) {
        let request = v1::TxCommitRequest {
            tx: Some(tx.into()),
            side: Side::Prefill.to_wire(),
            good_blocks: 1,
            source_lost: false,
        };
        if let Err(refused) = self.node.ask(|reply| Command::Commit(request, reply)).await {
            tracing::debug!(%tx, %refused, "an object has not come");
        }
    }

    fn give_up(&self, tx: TxId) {
        abort(&self.node, tx, Side::Prefill, "the fetch is over");
    }
}

struct Part<'a> {
    namespace: Namespace,
    keys: &'a [BlockKey],
    block_tokens: u32,
}

/// Who was met at an address.
enum Met {
    Source,
    /// Another process than it was taken for.
    Another,
}

/// Refused for good, or nobody is there: it is no mere miss.
fn never_comes(status: &Status) -> bool {
    matches!(status.code(), Code::InvalidArgument | Code::FailedPrecondition | Code::Unavailable)
}

/// As well as it can: what is not told runs into the end of its lease.
fn abort(node: &NodeHandle, tx: TxId, side: Side, reason: &str) {
    let request =
        v1::TxAbortRequest { tx: Some(tx.into()), side: side.to_wire(), reason: reason.into() };
    let (reply, _) = tokio::sync::oneshot::channel();
    if let Err(refused) = node.tell(Command::Abort(request, reply)) {
        tracing::debug!(%tx, %refused, "a share ends by its lease");
    }
}

/// Sends objects to nodes that ask for them. See the module.
#[derive(Debug)]
pub struct SourceService {
    node: NodeHandle,
}

impl SourceService {
    pub fn new(node: NodeHandle) -> Self {
        SourceService { node }
    }
}

#[tonic::async_trait]
impl ObjectSource for SourceService {
    async fn send(
        &self,
        request: Request<v1::SendObjectsRequest>,
    ) -> Result<Response<v1::SendObjectsReply>, Status> {
        let v1::SendObjectsRequest { namespace, lease_ms, objects } = request.into_inner();
        if objects.len() > AT_ONCE {
            let why = format!("{} objects in one call, which takes {AT_ONCE}", objects.len());
            return Err(Status::invalid_argument(why));
        }
        let node = self.node.clone();
        // Goes on when its caller goes: each share is ended.
        let sent = tokio::spawn(async move {
            join_all(objects.into_iter().map(|object| send(&node, &namespace, lease_ms, object)))
                .await
        });
        let sent = sent.await.map_err(|_| Status::internal("the sending has died"))?;
        let mut reply = v1::SendObjectsReply::default();
        for sent in sent {
            match sent.map_err(Status::from) {
                Ok(Sent { incarnation, is_whole }) => {
                    reply.incarnation = incarnation;
                    reply.sent.push(is_whole);
                }
                Err(status) if never_comes(&status) => return Err(status),
                Err(_) => reply.sent.push(false),
            }
        }
        Ok(Response::new(reply))
    }
}

struct Sent {
    incarnation: u64,
    is_whole: bool,
}

async fn send(
    node: &NodeHandle,
    namespace: &[u8],
    lease_ms: u64,
    object: v1::SendObject,
) -> Result<Sent, Refused> {
    let v1::SendObject { tx, key, targets } = object;
    let named = tx.ok_or_else(|| Refused::Invalid("field `tx` is missing".into()))?;
    let side = Side::Source.to_wire();
    let allocate = v1::TxAllocateRequest {
        tx: Some(named),
        side,
        namespace: namespace.to_vec(),
        keys: key,
        lease_ms,
        ..v1::TxAllocateRequest::default()
    };
    let push = v1::TxPushRequest { tx: Some(named), side, targets };
    // One after the other, and neither waited for alone: the node's thread is woken once.
    let (allocated, pushed) = tokio::join!(
        node.ask(|reply| Command::Allocate(allocate, reply)),
        node.ask(|reply| Command::Push(push, reply)),
    );
    let allocated = allocated?;
    abort(node, TxId::from(named), Side::Source, "it was sent");
    // What is not here cannot be pushed, wherever to.
    let is_whole = allocated.held_blocks > 0 && pushed?.good_blocks > 0;
    Ok(Sent { incarnation: allocated.incarnation, is_whole })
}
