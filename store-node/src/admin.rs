//! gRPC for administrators: who is answered, and each call as a command for the node's thread.

use std::net::SocketAddr;

use kvasir_proto::v1;
use tonic::{Request, Response, Status};
use v1::admin_server::Admin;

use crate::config::AdminAccess;
use crate::node::command::{AdminCommand, Command, NodeHandle, Reply};

/// See the module.
#[derive(Debug)]
pub(crate) struct AdminService {
    node: NodeHandle,
    access: AdminAccess,
}

impl AdminService {
    pub(crate) fn new(node: NodeHandle, access: AdminAccess) -> Self {
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
        let is_local = is_of_this_host(request.remote_addr(), request.local_addr());
        match self.access {
            AdminAccess::Any => Ok(request.into_inner()),
            AdminAccess::Loopback if is_local => Ok(request.into_inner()),
            AdminAccess::Loopback => Err(Status::permission_denied(
                "this node accepts administrative calls only from its own host: call it there, or \
                 set `admin_access` to \"any\" in its configuration",
            )),
            AdminAccess::Disabled => Err(Status::permission_denied(
                "`admin_access` is \"disabled\" in this node's configuration",
            )),
        }
    }
}

/// Whether a call came from the host that it came to: over a loopback address, or over one that both ends have,
/// as from the host to itself. Nobody else can have that: answers to it do not leave the host.
fn is_of_this_host(from: Option<SocketAddr>, to: Option<SocketAddr>) -> bool {
    // Of a socket of IPv6 that is called over IPv4 they are IPv4's addresses in IPv6's form.
    let host = |address: SocketAddr| address.ip().to_canonical();
    let Some(from) = from.map(host) else { return false };
    from.is_loopback() || to.map(host) == Some(from)
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

    async fn replicate(
        &self,
        request: Request<v1::ReplicateBlockRequest>,
    ) -> Result<Response<v1::ReplicateReply>, Status> {
        let request = self.check(request)?;
        self.ask(|reply| AdminCommand::Replicate(request, reply)).await
    }

    async fn drain(
        &self,
        request: Request<v1::DrainRequest>,
    ) -> Result<Response<v1::DrainStatus>, Status> {
        let request = self.check(request)?;
        self.ask(|reply| AdminCommand::Drain(request, reply)).await
    }

    async fn cancel_drain(
        &self,
        request: Request<v1::CancelDrainRequest>,
    ) -> Result<Response<v1::DrainStatus>, Status> {
        self.check(request)?;
        self.ask(AdminCommand::StopDrain).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(from: &str, to: &str, is_local: bool) {
        let address = |text: &str| Some(text.parse().expect("an address"));
        assert_eq!(is_of_this_host(address(from), address(to)), is_local, "{from} to {to}");
    }

    #[test]
    fn a_call_of_this_host_comes_over_loopback_or_from_the_address_that_it_goes_to() {
        check("127.0.0.1:40000", "127.0.0.1:7401", true);
        check("127.0.0.2:40000", "127.0.0.1:7401", true);
        check("[::1]:40000", "[::1]:7401", true);
        check("[::ffff:127.0.0.1]:40000", "[::ffff:127.0.0.1]:7401", true);
        check("10.0.0.7:40000", "10.0.0.7:7401", true);
        check("[::ffff:10.0.0.7]:40000", "10.0.0.7:7401", true);
        check("[fd00::7]:40000", "[fd00::7]:7401", true);
        check("10.0.0.8:40000", "10.0.0.7:7401", false);
        check("10.0.0.8:7401", "10.0.0.7:7401", false);
        check("[fd00::8]:40000", "[fd00::7]:7401", false);
    }

    #[test]
    fn a_call_of_nobody_knows_where_is_not_of_this_host() {
        let here = Some(([10, 0, 0, 7], 7401).into());
        assert!(!is_of_this_host(None, None));
        assert!(!is_of_this_host(None, here));
        assert!(!is_of_this_host(here, None));
    }
}
