//! Objects that lie on another node: the client asks its own node for them, which brings them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use kvasir_attach::line;
use kvasir_proto::{BlockKey, Namespace, v1};
use tokio::sync::OnceCell;
use tonic::transport::Channel;
use tonic::{Code, Status};
use v1::objects_client::ObjectsClient;

use crate::error::Error;

/// Calls of the node, from any thread.
#[derive(Debug)]
pub(crate) struct Fetcher {
    /// `None` only while it is dropped.
    runtime: Option<tokio::runtime::Runtime>,
    attach_dir: PathBuf,
    namespace: Namespace,
    block_tokens: u32,
    node: OnceCell<ObjectsClient<Channel>>,
}

impl Fetcher {
    pub(crate) fn new(
        attach_dir: PathBuf,
        namespace: Namespace,
        block_tokens: u32,
    ) -> Result<Self, Error> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("kvasir-fetch")
            .enable_all()
            .build()
            .map_err(|error| Error::Unreachable(error.to_string()))?;
        let (runtime, node) = (Some(runtime), OnceCell::new());
        Ok(Fetcher { runtime, attach_dir, namespace, block_tokens, node })
    }

    /// Answers of each object whether it is on this node now. Blocks.
    pub(crate) fn fetch(
        self: &Arc<Self>,
        keys: &[BlockKey],
        source: &str,
    ) -> Result<Vec<bool>, Error> {
        let ended = || Error::Unreachable("the fetching thread has ended".into());
        let (this, count) = (Arc::clone(self), keys.len());
        let request = v1::FetchObjectsRequest {
            namespace: self.namespace.0.to_vec(),
            keys: BlockKey::concat(keys),
            source: source.into(),
            block_tokens: self.block_tokens,
        };
        let (done, outcome) = sync_channel(1);
        // Not blocked on here: the caller's thread may belong to another runtime.
        self.runtime.as_ref().ok_or_else(ended)?.spawn(async move {
            let _ = done.send(this.ask(request).await);
        });
        let here = outcome.recv().map_err(|_| ended())??;
        match here.len() == count {
            true => Ok(here),
            false => Err(Error::Protocol("an answer about other objects".into())),
        }
    }

    async fn ask(&self, request: v1::FetchObjectsRequest) -> Result<Vec<bool>, Error> {
        let connect = async || {
            let channel = line::channel(&self.attach_dir.join("attach.sock")).await?;
            Ok::<_, Error>(ObjectsClient::new(channel))
        };
        let mut node = self.node.get_or_try_init(connect).await?.clone();
        match node.fetch(request).await {
            Ok(reply) => Ok(reply.into_inner().here),
            Err(status) => Err(failed(&status)),
        }
    }
}

fn failed(status: &Status) -> Error {
    let why = status.message().to_owned();
    match status.code() {
        Code::InvalidArgument => Error::Invalid(why),
        Code::FailedPrecondition | Code::Unimplemented => Error::Refused(why),
        _ => Error::Unreachable(why),
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        // Dropped plainly it would wait, which a thread of another runtime must not.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
