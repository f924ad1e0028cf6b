//! What gRPC asks of the node's thread, and how it answers.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvasir_attach::handover::Token;
use kvasir_blocks::{AttachEpoch, CopiedContext, CopyError, Peer, PeerCopies, PeerView};
use kvasir_proto::v1;
use kvasir_transfer::Endpoint;
use tokio::sync::{mpsc, oneshot};

use super::inbox::{NotTaken, Post};
use crate::pool::Pool;

pub(crate) type Reply<T> = oneshot::Sender<Result<T, Refused>>;

/// Why a call was refused, by what the caller can do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The request cannot be right.
    #[error("{0}")]
    Invalid(String),
    /// No room: nothing was taken.
    #[error("{0}")]
    NoSpace(String),
    /// The id was aborted or has finished.
    #[error("{0}")]
    Ended(String),
    /// The node as it stands cannot do this.
    #[error("{0}")]
    Precondition(String),
    /// The node takes no new work: another one does.
    #[error("{0}")]
    Draining(String),
    #[error("{0}")]
    NotFound(String),
    /// Try again a little later.
    #[error("{0}")]
    Unavailable(String),
}

/// Of a fetch: the client that asked, and the number of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FetchName {
    pub epoch: AttachEpoch,
    pub request: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) enum Command {
    Describe(Reply<v1::NodeDescription>),
    /// In words whether the object store can be used; nothing on a node that has none.
    ObjectStore(Reply<Option<String>>),
    Allocate(v1::TxAllocateRequest, Reply<v1::TxAllocateReply>),
    Push(v1::TxPushRequest, Reply<v1::TxPushReply>),
    Commit(v1::TxCommitRequest, Reply<v1::TxCommitReply>),
    Abort(v1::TxAbortRequest, Reply<v1::TxAbortReply>),
    Renew(v1::RenewRequest, Reply<v1::RenewReply>),
    /// Answered when it is durable.
    KeepContext(v1::PersistContextRequest, Reply<v1::PersistContextReply>),
    HoldsContexts(v1::HoldsContextsRequest, Reply<v1::HoldsContextsReply>),
    ListContexts(v1::ListContextsRequest, Reply<v1::ListContextsReply>),
    /// Answered when that is durable.
    DropContext(v1::DeleteContextRequest, Reply<v1::DeleteContextReply>),
    /// A hint: answered at once.
    Prefetch(v1::PrefetchRequest, Reply<v1::PrefetchReply>),
    SetRole(v1::SetRoleRequest, Reply<v1::SetRoleReply>),
    ListBlocks(v1::ListBlocksRequest, Reply<v1::ListBlocksReply>),
    /// Answered on the thread that answers queries, as the next one is.
    OpenRouteSession(v1::OpenRouteSessionRequest, Reply<v1::OpenRouteSessionReply>),
    OpenRoute(v1::OpenRouteRequest, Reply<v1::OpenRouteReply>),
    CloseRouteSession(v1::CloseRouteSessionRequest),
    /// Answered when the copy is there.
    Replicate(v1::ReplicateRequest, Reply<v1::ReplicateReply>),
    /// A copy has ended.
    Copied(u64, Result<(), CopyError>),
    /// Where the transfer engine of the node at this gRPC address is.
    SourceSeen(String, Result<Endpoint, Refused>),
    /// Which other nodes could take blocks.
    PeersSeen(Vec<PeerView>),
    /// What other nodes have of these contexts.
    CopiesSeen(Vec<CopiedContext>, Vec<PeerCopies>),
    /// What the configuration calls another node is this one.
    PeerIsItself(Peer),
    Admin(AdminCommand),
    Subscribe(v1::EventsRequest, mpsc::Sender<v1::NodeEvent>, Reply<()>),
    /// Whether an engine could attach now. What is slow, like making its pool, comes after that.
    AttachCheck(v1::AttachRequest, Reply<()>),
    /// First half of an attach, with the pool that was made for the engine: checked, and given a token.
    AttachBegin(v1::AttachRequest, Option<Arc<Pool>>, Reply<v1::AttachReply>),
    /// The same for a client of objects.
    ClientOpen(v1::OpenRequest, Reply<v1::OpenReply>),
    /// Second half of either: a process showed the token on this connection.
    AttachComplete(Token, UnixStream),
    /// Refuse new work, wait for what is open, then end.
    Drain,
}

/// What administrators ask for.
#[derive(Debug)]
pub(crate) enum AdminCommand {
    Status(Reply<v1::AdminStatus>),
    List(v1::ListRequest, Reply<v1::ListReply>),
    Inspect(v1::InspectRequest, Reply<v1::BlockInspection>),
    Pin(v1::PinRequest, Reply<v1::PinReply>),
    Unpin(v1::UnpinRequest, Reply<v1::UnpinReply>),
    Evict(v1::EvictRequest, Reply<v1::EvictReply>),
    /// Answered when the copy is there.
    Replicate(v1::ReplicateBlockRequest, Reply<v1::ReplicateReply>),
    Drain(v1::DrainRequest, Reply<v1::DrainStatus>),
    StopDrain(Reply<v1::DrainStatus>),
}

/// The node, as gRPC sees it.
#[derive(Debug, Clone)]
pub(crate) struct NodeHandle {
    post: Post,
}

impl NodeHandle {
    pub(crate) fn new(post: Post) -> Self {
        NodeHandle { post }
    }

    /// Asks and waits for the answer.
    ///
    /// # Errors
    /// What the node says, or [`Refused::Unavailable`] when it is overloaded or ending.
    pub(crate) async fn ask<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, Refused> {
        let (reply, answer) = oneshot::channel();
        self.tell(command(reply))?;
        answer
            .await
            .unwrap_or_else(|_| Err(Refused::Unavailable("the node is shutting down".into())))
    }

    /// # Errors
    /// [`NotTaken`].
    pub(crate) fn post(&self, command: Command) -> Result<(), NotTaken> {
        self.post.command(command)
    }

    /// # Errors
    /// [`Refused::Unavailable`] when the node is overloaded or ending.
    pub(crate) fn tell(&self, command: Command) -> Result<(), Refused> {
        self.post.command(command).map_err(|not_taken| {
            let why = match not_taken {
                NotTaken::Busy => "too many calls are queued at this node; try again later",
                NotTaken::Ended => "the node is shutting down",
            };
            Refused::Unavailable(why.into())
        })
    }
}
