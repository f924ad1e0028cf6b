//! Finds out who answers at an address: a call that the node's thread cannot wait for.

use std::time::Duration;

use kvasir_proto::v1;
use kvasir_transfer::Endpoint;
use tokio::runtime::Handle;
use tokio::time::timeout;
use tonic::transport;
use v1::store_node_client::StoreNodeClient;

use super::command::{Command, NodeHandle, Refused};
use super::copier::tell;

const CONNECT: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug)]
pub(crate) struct Sources {
    runtime: Handle,
    node: NodeHandle,
}

impl Sources {
    pub(crate) fn new(runtime: Handle, node: NodeHandle) -> Self {
        Sources { runtime, node }
    }

    /// Asks the node at this gRPC address, "host:port"; [`Command::SourceSeen`] tells where its transfer engine is.
    pub(crate) fn look(&self, address: String) {
        let node = self.node.clone();
        self.runtime.spawn(async move {
            let silent = |why: &str| Refused::Unavailable(format!("{address}: {why}"));
            let seen = timeout(2 * CONNECT, ask(&address)).await;
            let seen = seen.unwrap_or_else(|_| Err(silent("the node does not answer")));
            tell(&node, || Command::SourceSeen(address.clone(), seen.clone())).await;
        });
    }
}

async fn ask(address: &str) -> Result<Endpoint, Refused> {
    let silent = |why: String| Refused::Unavailable(format!("{address}: {why}"));
    let to = transport::Endpoint::from_shared(format!("http://{address}"))
        .map_err(|error| Refused::Invalid(format!("invalid address `{address}`: {error}")))?
        .connect_timeout(CONNECT);
    let channel = to.connect().await.map_err(|error| silent(error.to_string()))?;
    let described = StoreNodeClient::new(channel).describe(v1::DescribeRequest {}).await;
    let description = described.map_err(|status| silent(status.message().into()))?.into_inner();
    Endpoint::from_bytes(&description.endpoint).map_err(|error| silent(error.to_string()))
}
