//! What nodes are asked about contexts: each call has a deadline, and few are under way at once. What
//! a status means is decided here.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::{StreamExt, stream};
use kvasir_proto::{BlockKey, Namespace, v1};
use tonic::{Code, Response, Status};

use super::Contexts;
use super::id::ContextId;
use crate::cluster::{Keepers, NodeHandle};

/// Nodes that one request asks at once.
const ASKED_AT_ONCE: usize = 16;
/// Pages that one request takes from a node: a page is short where many of it are over.
const PAGES_MAX: usize = 16;
/// A context moves with a drain, and not again before another one.
const MOVES_MAX: usize = 3;

/// A context as nodes have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kept {
    pub blocks: u32,
    pub created_unix_ms: u64,
    pub expires_unix_ms: u64,
}

impl Kept {
    /// Of two nodes that have it: it is kept as long as one of them does.
    pub(super) fn and(self, other: Kept) -> Kept {
        Kept {
            blocks: self.blocks.max(other.blocks),
            // 0 is not known.
            created_unix_ms: match (self.created_unix_ms, other.created_unix_ms) {
                (0, since) | (since, 0) => since,
                (one, other) => one.min(other),
            },
            expires_unix_ms: self.expires_unix_ms.max(other.expires_unix_ms),
        }
    }
}

/// A chain to keep.
#[derive(Debug, Clone, Copy)]
pub(super) struct Chain<'a> {
    pub tenant: &'a str,
    pub namespace: Namespace,
    pub keys: &'a [BlockKey],
    pub ttl_ms: u64,
    /// On how many nodes.
    pub replicas: u8,
}

/// Why a node has not kept a chain, in the order of what a client is to hear when nodes differ.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum NotKept {
    /// No node was asked: nothing is kept where it lies.
    Nowhere,
    /// It cannot: nothing is kept there, or somebody else keeps it.
    Refused(String),
    /// It has not answered.
    Unanswered,
    /// Not all of it is there, or not yet.
    Lacking,
    /// It is kept just now, or a write failed.
    Busy,
    /// A quota, or the room for all that is kept.
    Full(String),
}

/// What all nodes have said that may have a context.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// Of all that have it together.
    pub kept: Option<Kept>,
    /// Nodes that have said nothing, or not what they have.
    pub unanswered: usize,
}

/// A part of a tenant's contexts.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub contexts: BTreeMap<ContextId, Kept>,
    pub unanswered: usize,
}

impl Contexts {
    /// Asks a node to keep all of a chain, or nothing of it.
    pub(super) async fn keep(&self, node: &NodeHandle, chain: Chain<'_>) -> Result<Kept, NotKept> {
        let request = v1::PersistContextRequest {
            namespace: chain.namespace.0.to_vec(),
            keys: BlockKey::concat(chain.keys),
            tenant: chain.tenant.to_owned(),
            ttl_ms: chain.ttl_ms,
            require_all_blocks: true,
            replicas: chain.replicas.into(),
            ..v1::PersistContextRequest::default()
        };
        let mut client = node.client.clone();
        // One at a time for each create, of which there are few.
        let reply = within(self.keep_within, client.persist_context(request)).await;
        let reply = reply.map_err(|status| not_kept(node, &status))?;
        let v1::PersistContextReply { persisted_blocks, created_unix_ms, expires_unix_ms } = reply;
        let kept = Kept { blocks: persisted_blocks, created_unix_ms, expires_unix_ms };
        if expires_unix_ms == 0 || persisted_blocks as usize != chain.keys.len() {
            let why =
                format!("the version of store node {} does not support contexts", node.node_id);
            return Err(NotKept::Refused(why));
        }
        Ok(kept)
    }

    /// The tenant's first contexts after this one, at least so many where there are as many.
    pub(super) async fn find(
        &self,
        keepers: &Keepers,
        tenant: &str,
        after: Option<ContextId>,
        count: usize,
    ) -> Found {
        let from = after.map(ContextId::to_bytes).unwrap_or_default();
        let pages = self.of_all(keepers, |node| {
            let from = from.clone();
            async move { self.pages(&node, tenant, from, count).await }
        });
        let mut found = Found { unanswered: keepers.unknown, ..Found::default() };
        for page in pages.await {
            match page {
                Ok(contexts) => {
                    for (id, kept) in contexts {
                        let merged = found.contexts.get(&id).map_or(kept, |had| had.and(kept));
                        found.contexts.insert(id, merged);
                    }
                }
                Err(_) => found.unanswered += 1,
            }
        }
        found
    }

    /// One context of the tenant.
    pub(super) async fn look(&self, keepers: &Keepers, tenant: &str, id: ContextId) -> Answers {
        self.ask_all(keepers, |node| async move {
            let first = self.pages(&node, tenant, id.just_before(), 1).await?;
            let found = first.into_iter().find(|(found, _)| *found == id);
            Ok(found.map(|(_, kept)| kept))
        })
        .await
    }

    /// Gives a context of the tenant a new time, at all nodes that have it.
    pub(super) async fn extend(
        &self,
        keepers: &Keepers,
        tenant: &str,
        id: ContextId,
        ttl_ms: u64,
    ) -> Answers {
        self.ask_all(keepers, |node| async move {
            let request = v1::PersistContextRequest {
                namespace: id.namespace.0.to_vec(),
                last_key: id.last_key.0.to_vec(),
                tenant: tenant.to_owned(),
                ttl_ms,
                ..v1::PersistContextRequest::default()
            };
            let mut client = node.client;
            let reply = self.call(client.persist_context(request)).await?;
            let v1::PersistContextReply { persisted_blocks, created_unix_ms, expires_unix_ms } =
                reply;
            Ok(Some(Kept { blocks: persisted_blocks, created_unix_ms, expires_unix_ms }))
        })
        .await
    }

    /// Ends a context of the tenant, at all nodes that have it. A node that drains may have moved it to one that did
    /// not have it when it was asked, so all of them are asked until none has it.
    pub(super) async fn end(&self, keepers: &Keepers, tenant: &str, id: ContextId) -> Answers {
        let drop_it = || {
            self.ask_all(keepers, |node| async move {
                self.drop_at(&node, tenant, id).await?;
                Ok(Some(Kept { blocks: 0, created_unix_ms: 0, expires_unix_ms: 0 }))
            })
        };
        let mut ended = drop_it().await;
        for _ in 0..MOVES_MAX {
            if ended.kept.is_none() || ended.unanswered > 0 {
                break;
            }
            let again = drop_it().await;
            ended.unanswered = again.unanswered;
            if again.kept.is_none() {
                break;
            }
        }
        ended
    }

    async fn drop_at(&self, node: &NodeHandle, tenant: &str, id: ContextId) -> Result<(), Status> {
        let request = v1::DeleteContextRequest {
            tenant: tenant.to_owned(),
            namespace: id.namespace.0.to_vec(),
            last_key: id.last_key.0.to_vec(),
        };
        let mut client = node.client.clone();
        self.call(client.delete_context(request)).await.map(drop)
    }

    /// A node's contexts after this place, at least so many where there are as many.
    async fn pages(
        &self,
        node: &NodeHandle,
        tenant: &str,
        mut from: Vec<u8>,
        count: usize,
    ) -> Result<Vec<(ContextId, Kept)>, Status> {
        let mut found = Vec::new();
        for _ in 0..PAGES_MAX {
            let lacking = count - found.len();
            let request = v1::ListContextsRequest {
                tenant: tenant.to_owned(),
                contexts_max: u32::try_from(lacking).unwrap_or(u32::MAX),
                start_at: from,
            };
            let mut client = node.client.clone();
            let page = match self.call(client.list_contexts(request)).await {
                // Of a version that knows of none.
                Err(status) if status.code() == Code::Unimplemented => return Ok(found),
                page => page?,
            };
            for one in page.contexts {
                found.push(read(&one)?);
            }
            if page.next.is_empty() || found.len() >= count {
                return Ok(found);
            }
            from = page.next;
        }
        Err(Status::internal("the list of contexts does not end"))
    }

    /// What all nodes say of one context.
    async fn ask_all<F>(&self, keepers: &Keepers, ask: impl Fn(NodeHandle) -> F) -> Answers
    where
        F: Future<Output = Result<Option<Kept>, Status>>,
    {
        let answers = self.of_all(keepers, |node| {
            let asked = ask(node);
            async move {
                match asked.await {
                    Err(status) if has_none(&status) => Ok(None),
                    answer => answer,
                }
            }
        });
        let mut all = Answers { unanswered: keepers.unknown, ..Answers::default() };
        for answer in answers.await {
            match answer {
                Ok(None) => {}
                Ok(Some(kept)) => all.kept = Some(all.kept.map_or(kept, |had| had.and(kept))),
                Err(_) => all.unanswered += 1,
            }
        }
        all
    }

    /// Asks all of them, a few at once.
    async fn of_all<T, F>(
        &self,
        keepers: &Keepers,
        ask: impl Fn(NodeHandle) -> F,
    ) -> Vec<Result<T, Status>>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let ask = |node: &NodeHandle| {
            let (name, asked) = (node.node_id.clone(), ask(node.clone()));
            async move {
                asked.await.inspect_err(|status| {
                    tracing::info!(node = %name, %status, "a context call of the conductor to a store node failed");
                })
            }
        };
        let asked: Vec<_> = keepers.nodes.iter().map(ask).collect();
        stream::iter(asked).buffer_unordered(ASKED_AT_ONCE).collect().await
    }

    /// A call that is soon answered, when one of the few may be made.
    async fn call<T>(
        &self,
        call: impl Future<Output = Result<Response<T>, Status>>,
    ) -> Result<T, Status> {
        within(self.call_within, async {
            let permit = self.calls.acquire().await;
            let _permit = permit.map_err(|_| {
                Status::cancelled("the conductor makes no more calls to store nodes")
            })?;
            call.await
        })
        .await
    }
}

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T, Status> {
    match tokio::time::timeout(limit, call).await {
        Ok(reply) => reply.map(Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded("the node did not answer in time")),
    }
}

fn read(kept: &v1::PersistedContext) -> Result<(ContextId, Kept), Status> {
    let wrong = |_| Status::internal("a listed context has a hash that is not 16 bytes long");
    let namespace = kept.namespace.as_slice().try_into().map(Namespace).map_err(wrong)?;
    let last_key = kept.last_key.as_slice().try_into().map(BlockKey).map_err(wrong)?;
    let v1::PersistedContext { blocks, created_unix_ms, expires_unix_ms, .. } = *kept;
    Ok((ContextId { namespace, last_key }, Kept { blocks, created_unix_ms, expires_unix_ms }))
}

/// The node has no such context.
fn has_none(status: &Status) -> bool {
    matches!(status.code(), Code::NotFound | Code::Unimplemented)
}

fn not_kept(node: &NodeHandle, status: &Status) -> NotKept {
    tracing::info!(node = %node.node_id, %status, "a store node did not persist a context");
    match status.code() {
        Code::NotFound => NotKept::Lacking,
        Code::ResourceExhausted => NotKept::Full(status.message().to_owned()),
        Code::FailedPrecondition | Code::InvalidArgument | Code::Unimplemented => NotKept::Refused(
            format!("store node {} refused it: {}", node.node_id, status.message()),
        ),
        // Or it was not reached: what such a status says is about connections.
        Code::Unavailable => NotKept::Busy,
        _ => NotKept::Unanswered,
    }
}
