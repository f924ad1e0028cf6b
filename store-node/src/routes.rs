//! gRPC for engines that send queries here: sessions and routes, as commands for the node's thread.

use kvasir_proto::v1;
use kvasir_route::holder::OpenError;
use tonic::{Request, Response, Status};
use v1::routes_server::Routes;

use crate::node::command::{Command, NodeHandle, Refused};

impl From<OpenError> for Refused {
    fn from(error: OpenError) -> Self {
        let why = error.to_string();
        match error {
            OpenError::NoSpace(_) => Refused::NoSpace(why),
            OpenError::Invalid(_) => Refused::Invalid(why),
            OpenError::NoSession => Refused::NotFound(why),
            OpenError::NoKernel(_) => Refused::Precondition(why),
            OpenError::Unavailable => Refused::Unavailable(why),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct RoutesService {
    node: NodeHandle,
}

impl RoutesService {
    pub(crate) fn new(node: NodeHandle) -> Self {
        RoutesService { node }
    }
}

#[tonic::async_trait]
impl Routes for RoutesService {
    async fn open_session(
        &self,
        request: Request<v1::OpenRouteSessionRequest>,
    ) -> Result<Response<v1::OpenRouteSessionReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::OpenRouteSession(request, reply)).await?))
    }

    async fn open_route(
        &self,
        request: Request<v1::OpenRouteRequest>,
    ) -> Result<Response<v1::OpenRouteReply>, Status> {
        let request = request.into_inner();
        Ok(Response::new(self.node.ask(|reply| Command::OpenRoute(request, reply)).await?))
    }

    async fn close_session(
        &self,
        request: Request<v1::CloseRouteSessionRequest>,
    ) -> Result<Response<v1::CloseRouteSessionReply>, Status> {
        self.node.tell(Command::CloseRouteSession(request.into_inner()))?;
        Ok(Response::new(v1::CloseRouteSessionReply {}))
    }
}
