//! The two sockets through which engines attach and clients of objects open: gRPC on `attach.sock`, descriptors on
//! `descriptors.sock`. Both only carry what they are told to the node's thread, which decides.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvasir_attach::handover;
use kvasir_proto::{SlotLayout, v1};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use v1::attach_server::{Attach, AttachServer};
use v1::objects_server::{Objects, ObjectsServer};
use v1::store_node_server::StoreNodeServer;

use crate::Error;
use crate::grpc::NodeService;
use crate::node::command::{Command, NodeHandle, Refused};
use crate::pool::{Pool, Pools};

pub(crate) const ATTACH_SOCKET: &str = "attach.sock";
pub(crate) const DESCRIPTORS_SOCKET: &str = "descriptors.sock";

/// The kernel's limit, without the zero at the end.
const SOCKET_PATH_MAX: usize = 107;
/// Connections whose token is waited for at once; more wait in the socket's queue.
const HANDOVERS_MAX: usize = 8;
const TOKEN_TIMEOUT: Duration = Duration::from_secs(5);
/// Calls open at once on one connection: an engine has one, a client that fetches objects many.
const STREAMS_MAX: u32 = 256;

/// Both sockets, bound.
#[derive(Debug)]
pub(crate) struct AttachSockets {
    attach: UnixListener,
    descriptors: UnixListener,
    paths: [PathBuf; 2],
}

impl AttachSockets {
    /// Makes the directory, readable by its owner only, and binds both sockets in it.
    ///
    /// # Errors
    /// One sentence, also when another node serves this directory.
    pub(crate) fn bind(dir: &Path) -> Result<Self, Error> {
        let failed = |what: String| move |source| Error::Io { what, source };
        let name = dir.display();
        std::fs::create_dir_all(dir)
            .map_err(failed(format!("cannot create `attach_dir` {name}")))?;
        let owner_only = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(dir, owner_only)
            .map_err(failed(format!("cannot restrict the permissions of `attach_dir` {name}")))?;
        let [attach, descriptors] = [ATTACH_SOCKET, DESCRIPTORS_SOCKET].map(|name| dir.join(name));
        Ok(AttachSockets {
            attach: bind(&attach)?,
            descriptors: bind(&descriptors)?,
            paths: [attach, descriptors],
        })
    }

    /// Serves both until `stop` is cancelled, then removes them.
    ///
    /// # Errors
    /// When the gRPC server fails.
    pub(crate) async fn serve(
        self,
        node: NodeHandle,
        pools: Arc<Pools>,
        stop: CancellationToken,
    ) -> Result<(), tonic::transport::Error> {
        let service = AttachService { node: node.clone(), pools };
        let handovers = tokio::spawn(take_handovers(self.descriptors, node, stop.clone()));
        let served = tonic::transport::Server::builder()
            .max_concurrent_streams(STREAMS_MAX)
            .add_service(StoreNodeServer::new(NodeService::new(service.node.clone())))
            .add_service(ObjectsServer::new(service.clone()))
            .add_service(AttachServer::new(service))
            .serve_with_incoming_shutdown(
                UnixListenerStream::new(self.attach),
                stop.cancelled_owned(),
            )
            .await;
        handovers.abort();
        for path in &self.paths {
            // Somebody may have tidied up already.
            let _ = std::fs::remove_file(path);
        }
        served
    }
}

/// Binds a socket; one that a dead node left behind is replaced.
fn bind(path: &Path) -> Result<UnixListener, Error> {
    let failed = |reason: &str, source| Error::Io {
        what: format!("cannot bind the socket {}{reason}", path.display()),
        source,
    };
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        let source = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(failed(": its path is too long; choose a shorter `attach_dir`", source));
    }
    match std::os::unix::net::UnixStream::connect(path) {
        Ok(_) => {
            let source = io::Error::from(io::ErrorKind::AddrInUse);
            Err(failed(": another node serves it; choose another `attach_dir`", source))
        }
        Err(error) => {
            if error.kind() == io::ErrorKind::ConnectionRefused {
                std::fs::remove_file(path)
                    .map_err(|source| failed(": cannot remove the stale socket", source))?;
            }
            UnixListener::bind(path).map_err(|source| failed("", source))
        }
    }
}

#[derive(Debug, Clone)]
struct AttachService {
    node: NodeHandle,
    pools: Arc<Pools>,
}

impl AttachService {
    /// The pool that an engine asks for. The node's thread has no time to make it.
    async fn pool(&self, request: &v1::AttachRequest) -> Result<Option<Pool>, Refused> {
        let (Some(pool), Some(layout)) = (request.pool.clone(), &request.layout) else {
            return Ok(None);
        };
        let layout = SlotLayout::try_from(layout)
            .map_err(|error| Refused::Invalid(format!("field `layout`: {error}")))?;
        let asked = request.clone();
        self.node.ask(|reply| Command::AttachCheck(asked, reply)).await?;
        let pools = Arc::clone(&self.pools);
        let made = tokio::task::spawn_blocking(move || pools.open(&pool, &layout));
        let failed = |error| Refused::Unavailable(format!("cannot create the pool: {error}"));
        Ok(Some(made.await.map_err(failed)??))
    }
}

#[tonic::async_trait]
impl Attach for AttachService {
    async fn attach(
        &self,
        request: Request<v1::AttachRequest>,
    ) -> Result<Response<v1::AttachReply>, Status> {
        let request = request.into_inner();
        let pool = self.pool(&request).await?.map(Arc::new);
        let given = pool.clone();
        let reply = self.node.ask(|reply| Command::AttachBegin(request, given, reply)).await;
        // One that was not taken is let go here: that takes long.
        tokio::task::spawn_blocking(move || drop(pool));
        Ok(Response::new(reply?))
    }
}

#[tonic::async_trait]
impl Objects for AttachService {
    async fn open(
        &self,
        request: Request<v1::OpenRequest>,
    ) -> Result<Response<v1::OpenReply>, Status> {
        let request = request.into_inner();
        let reply = self.node.ask(|reply| Command::ClientOpen(request, reply)).await?;
        Ok(Response::new(reply))
    }
}

/// Reads the token of each connection and gives both to the node.
async fn take_handovers(listener: UnixListener, node: NodeHandle, stop: CancellationToken) {
    let slots = Arc::new(Semaphore::new(HANDOVERS_MAX));
    while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = stop.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let node = node.clone();
                tokio::task::spawn_blocking(move || {
                    if let Err(error) = take_handover(stream, &node) {
                        tracing::warn!(%error, "a process connected to the attach socket but presented no token");
                    }
                    drop(slot);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "the store node cannot accept a connection on the attach socket; retrying");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn take_handover(stream: UnixStream, node: &NodeHandle) -> io::Result<()> {
    let mut stream = stream.into_std()?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(TOKEN_TIMEOUT))?;
    let token = handover::read_token(&mut stream)?;
    node.tell(Command::AttachComplete(token, stream)).map_err(io::Error::other)
}
