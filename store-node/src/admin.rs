//! gRPC for administrators: who is answered, and each call as a command for the node's thread.

use kvasir_proto::v1;
use tonic::{Request, Response, Status};
use v1::admin_server::Admin;

use crate::config::AdminAccess;
use crate::node::command::{AdminCommand, Command, NodeHandle, Reply};

/// See the module.
#[derive(Debug)]
pub struct AdminService {
    node: NodeHandle,
    access: AdminAccess,
}

impl AdminService {
    pub fn new(node: NodeHandle, access: AdminAccess) -> Self {
        AdminService { node, access }
    }

    async fn ask<T>(
        &self,
        command: impl FnOnce(Reply<T>) -> AdminCommand,
    ) -> Result<Response<T>, Status> {
        let answer = self.node.ask(|reply| Command::Admin(command(reply))).await?;
        Ok(Response::new(answer))
    }

    /// # Errors
    /// `PERMISSION_DENIED`, with what to do about it.
    fn check<T>(&self, request: Request<T>) -> Result<T, Status> {
        let is_local = request.remote_addr().is_some_and(|from| {
            // As an address of IPv4 that came over a socket of IPv6.
            from.ip().to_canonical().is_loopback()
        });
        match self.access {
            AdminAccess::Anyone => Ok(request.into_inner()),
            AdminAccess::Loopback if is_local => Ok(request.into_inner()),
            AdminAccess::Loopback => Err(Status::permission_denied(
                "this node is administered from its own host only: call it there over a loopback \
                 address, or set `admin` to \"anyone\" in its configuration",
            )),
            AdminAccess::Nobody => {
                Err(Status::permission_denied("`admin` is \"nobody\" in this node's configuration"))
            }
        }
    }
}

#[tonic::async_trait]
impl Admin for AdminService {
    async fn status(
        &self,
        request: Request<v1::AdminStatusRequest>,
    ) -> Result<Response<v1::AdminStatus>, Status> {
        self.check(request)?;
        self.ask(AdminCommand::Status).await
    }

    async fn list(
        &self,
        request: Request<v1::ListRequest>,
    ) -> Result<Response<v1::ListReply>, Status> {
        let request = self.check(request)?;
        self.ask(|reply| AdminCommand::List(request, reply)).await
    }

    async fn inspect(
        &self,
        request: Request<v1::InspectRequest>,
    ) -> Result<Response<v1::BlockInspection>, Status> {
        let request = self.check(request)?;
        self.ask(|reply| AdminCommand::Inspect(request, reply)).await
    }

    async fn pin(
        &self,
        request: Request<v1::PinRequest>,
    ) -> Result<Response<v1::PinReply>, Status> {
        let request = self.check(request)?;
        self.ask(|reply| AdminCommand::Pin(request, reply)).await
    }

    async fn unpin(
        &self,
        request: Request<v1::UnpinRequest>,
    ) -> Result<Response<v1::UnpinReply>, Status> {
        let request = self.check(request)?;
        self.ask(|reply| AdminCommand::Unpin(request, reply)).await
    }

    async fn evict(
        &self,
        request: Request<v1::EvictRequest>,
    ) -> Result<Response<v1::EvictReply>, Status> {
        let request = self.check(request)?;
        self.ask(|reply| AdminCommand::Evict(request, reply)).await
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainStatus>, Status> {
        let request = self.check(request)?;
        self.ask(|reply| AdminCommand::Drain(request, reply)).await
    }

    async fn stop_drain(
        &self,
        request: Request<v1::StopDrainRequest>,
    ) -> Result<Response<v1::DrainStatus>, Status> {
        self.check(request)?;
        self.ask(AdminCommand::StopDrain).await
    }
}
