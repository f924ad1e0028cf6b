//! gRPC for conductors and administrators: each call becomes a command for the node's thread.

use std::pin::Pin;

use futures::Stream;
use kvasir_proto::refusal::{DRAINING, REFUSAL};
use kvasir_proto::v1;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status};
use v1::store_node_server::StoreNode;

use crate::node::command::{Command, NodeHandle, Refused};
use crate::node::events;

/// The longest message taken: the keys of a prompt of a million tokens fit many times.
pub(crate) const MESSAGE_BYTES_MAX: usize = 16 << 20;

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Invalid(why) => Status::invalid_argument(why),
            Refused::NoSpace(why) => Status::resource_exhausted(why),
            Refused::Ended(why) => Status::aborted(why),
            Refused::Precondition(why) => Status::failed_precondition(why),
            Refused::Draining(why) => {
                let mut status = Status::failed_precondition(why);
                status.metadata_mut().insert(REFUSAL, MetadataValue::from_static(DRAINING));
                status
            }
            Refused::NotFound(why) => Status::not_found(why),
            Refused::Unavailable(why) => Status::unavailable(why),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct NodeService {
    node: NodeHandle,
}

impl NodeService {
    pub(crate) fn new(node: NodeHandle) -> Self {
        NodeService { node }
    }
}

#[tonic::async_trait]
impl StoreNode for NodeService {
    type EventsStream = Pin<Box<dyn Stream<Item = Result<v1::NodeEvent, Status>> + Send>>;

    async fn describe(
        &self,
        _: Request<v1::DescribeRequest>,
    ) -> Result<Response<v1::NodeDescription>, Status> {
        Ok(Response::new(self.node.ask(Command::Describe).await?))
    }

    async fn tx_allocate(
        &self,
        request: Request<v1::TxAllocateRequest>,
    ) -> Result<Response<v1::TxAllocateReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::Allocate(request, reply)).await?))
    }

    async fn tx_push(
        &self,
        request: Request<v1::TxPushRequest>,
    ) -> Result<Response<v1::TxPushReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::Push(request, reply)).await?))
    }

    async fn tx_commit(
        &self,
        request: Request<v1::TxCommitRequest>,
    ) -> Result<Response<v1::TxCommitReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::Commit(request, reply)).await?))
    }

    async fn tx_abort(
        &self,
        request: Request<v1::TxAbortRequest>,
    ) -> Result<Response<v1::TxAbortReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::Abort(request, reply)).await?))
    }

    async fn renew(
        &self,
        request: Request<v1::RenewRequest>,
    ) -> Result<Response<v1::RenewReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::Renew(request, reply)).await?))
    }

    async fn events(
        &self,
        request: Request<v1::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let (queue, events) = mpsc::channel(events::QUEUE);
        let request = request.into_inner();
        self.node.ask(|reply| Command::Subscribe(request, queue, reply)).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(events).map(Ok))))
    }

    async fn persist_context(
        &self,
        request: Request<v1::PersistContextRequest>,
    ) -> Result<Response<v1::PersistContextReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::KeepContext(request, reply)).await?))
    }

    async fn holds_contexts(
        &self,
        request: Request<v1::HoldsContextsRequest>,
    ) -> Result<Response<v1::HoldsContextsReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::HoldsContexts(request, reply)).await?))
    }

    async fn list_contexts(
        &self,
        request: Request<v1::ListContextsRequest>,
    ) -> Result<Response<v1::ListContextsReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::ListContexts(request, reply)).await?))
    }

    async fn delete_context(
        &self,
        request: Request<v1::DeleteContextRequest>,
    ) -> Result<Response<v1::DeleteContextReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::DropContext(request, reply)).await?))
    }

    async fn prefetch(
        &self,
        request: Request<v1::PrefetchRequest>,
    ) -> Result<Response<v1::PrefetchReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::Prefetch(request, reply)).await?))
    }

    async fn replicate(
        &self,
        request: Request<v1::ReplicateRequest>,
    ) -> Result<Response<v1::ReplicateReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::Replicate(request, reply)).await?))
    }

    async fn set_role(
        &self,
        request: Request<v1::SetRoleRequest>,
    ) -> Result<Response<v1::SetRoleReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::SetRole(request, reply)).await?))
    }

    async fn list_blocks(
        &self,
        request: Request<v1::ListBlocksRequest>,
    ) -> Result<Response<v1::ListBlocksReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::ListBlocks(request, reply)).await?))
    }
}
