//! Starting and ending a store node: ports first, then memory, then the node's thread.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use kvasir_blocks::{Blocks, BucketOptions, ReplicaOptions};
use kvasir_proto::v1::admin_server::AdminServer;
use kvasir_proto::v1::routes_server::RoutesServer;
use kvasir_proto::v1::store_node_server::StoreNodeServer;
use kvasir_route::holder::{Holder, HolderOptions};
use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::topology::{Topology, TopologyError};
use kvasir_transfer::{
    Completion, CompletionFuture, Domain, Driver, Handlers, TransferConfig, TransferEngine,
};
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;

use crate::Error;
use crate::admin::AdminService;
use crate::attach_server::AttachSockets;
use crate::bucket;
use crate::bucket::jobs::BucketTask;
use crate::config::Config;
use crate::grpc::{MESSAGE_BYTES_MAX, NodeService};
use crate::http;
use crate::layer_log::LayerLog;
use crate::metrics::Metrics;
use crate::node::arena::Arena;
use crate::node::command::{Command, NodeHandle};
use crate::node::copier::Copier;
use crate::node::copier::tell;
use crate::node::inbox::{FromPeer, Inbox, Post, inbox};
use crate::node::owner::{Owner, Parts, Routing};
use crate::node::sources::Sources;
use crate::node::writers::{Memories, Writers};
use crate::node::{OPERATIONS_MAX, SHARES_MAX};
use crate::pool::Pools;
use crate::pool::cuda::Slots;
use crate::routes::RoutesService;
use crate::ssd::thread::SsdThread;

/// What open connections get to end after the node has drained.
const CONNECTIONS_END: Duration = Duration::from_secs(2);

/// Calls open at once on one connection: a conductor has a few for each request that is under way.
/// One more waits at the caller.
const STREAMS_MAX: u32 = 1_024;
/// A connection that is silent for so long is asked whether it lives, and has so long to answer: a
/// conductor that hangs or is cut off holds no streams here for ever.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// A node that runs.
#[derive(Debug)]
pub struct Running {
    address: SocketAddr,
    node: NodeHandle,
    ended: oneshot::Receiver<()>,
    transfer_ended: CompletionFuture,
    servers: Vec<JoinHandle<Result<(), tonic::transport::Error>>>,
    stop: CancellationToken,
}

/// Runs a store node until `shutdown` is cancelled; then it drains and ends.
///
/// # Errors
/// When it cannot start or its thread ends before its time; each error is one sentence.
pub fn run(config: Config, shutdown: CancellationToken) -> BoxFuture<'static, Result<(), Error>> {
    Box::pin(async move {
        let mut running = start(config).await?;
        tokio::select! {
            () = shutdown.cancelled() => running.shut_down().await,
            error = running.died() => return Err(error),
        }
        Ok(())
    })
}

/// Starts a store node.
///
/// Public futures of this crate are boxed, so that their code is compiled here and not again in each program that
/// awaits them.
///
/// # Errors
/// When it cannot start; each error is one sentence.
pub fn start(config: Config) -> BoxFuture<'static, Result<Running, Error>> {
    Box::pin(start_node(config))
}

async fn start_node(config: Config) -> Result<Running, Error> {
    config.check().map_err(Error::Config)?;
    let failed = |what: String| move |source| Error::Io { what, source };
    let listener = TcpListener::bind(config.listen)
        .await
        .map_err(failed(format!("cannot listen on `listen` {}", config.listen)))?;
    let address =
        listener.local_addr().map_err(failed("cannot read the address of the listener".into()))?;
    let sockets = AttachSockets::bind(&config.attach_dir)?;

    let registry = Registry::new();
    let route_registries = route_registries(config.routes.ranks)?;
    let metrics = Metrics::new(&registry)?;
    let (post, inbox) = inbox(metrics.messages_dropped.clone())
        .map_err(failed("cannot create the node's doorbell".into()))?;
    let parts = {
        let (config, post) = (config.clone(), post.clone());
        let registries = (registry.clone(), route_registries.clone());
        // Touching the arena takes half a second for each GiB.
        let made = tokio::task::spawn_blocking(move || {
            make_parts(config, &registries, metrics, post, inbox)
        });
        made.await.map_err(|_| Error::Ended)??
    };
    let (incarnation, pages) = (parts.incarnation, parts.arena.memory().pages());
    let pools = Arc::new(Pools {
        bytes_max: config.engine_pool_bytes_max,
        given: Arc::default(),
        cuda_library: config.cuda_library.clone(),
        slots: Arc::new(Slots::new(Arc::clone(parts.arena.memory()))),
    });
    let (end, ended) = oneshot::channel();
    let (done, transfer_ended) = Completion::future();
    parts.transfer.when_ended(done);
    std::thread::Builder::new()
        .name("store-node".into())
        .spawn(move || {
            Owner::new(parts).run();
            // Nobody may wait any more.
            let _ = end.send(());
        })
        .map_err(failed("cannot start the node's thread".into()))?;

    let (node, stop) = (NodeHandle::new(post), CancellationToken::new());
    let service = StoreNodeServer::new(NodeService::new(node.clone()))
        .max_decoding_message_size(MESSAGE_BYTES_MAX);
    let admin = AdminServer::new(AdminService::new(node.clone(), config.admin_access));
    let router = tonic::service::Routes::new(service)
        .add_service(admin)
        .add_service(RoutesServer::new(RoutesService::new(node.clone())))
        .into_axum_router()
        // Unknown paths are 404 for everyone; gRPC clients read that as "unimplemented".
        .reset_fallback()
        .merge(http::router(node.clone(), [vec![registry], route_registries].concat()));
    let serving = tonic::transport::Server::builder()
        .accept_http1(true)
        .max_concurrent_streams(STREAMS_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_routes(router.into())
        .serve_with_incoming_shutdown(
            // On the builder it would be for listeners of its own only, and answers that are smaller
            // than a segment would wait 40 ms for an acknowledgement.
            TcpIncoming::from(listener).with_nodelay(Some(true)),
            stop.clone().cancelled_owned(),
        );
    let servers =
        vec![tokio::spawn(serving), tokio::spawn(sockets.serve(node.clone(), pools, stop.clone()))];
    tracing::info!(
        node = %config.node_id, %address, attach_dir = %config.attach_dir.display(),
        dram_bytes = config.dram_bytes, dram_pages = %pages, incarnation, "store node ready"
    );
    Ok(Running { address, node, ended, transfer_ended, servers, stop })
}

impl Running {
    /// Where gRPC and HTTP are served.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until something that the node cannot do without has ended before its time.
    async fn died(&mut self) -> Error {
        tokio::select! {
            _ = &mut self.ended => Error::Ended,
            // Its proper end comes with that of the node's thread.
            Err(_) = &mut self.transfer_ended => Error::TransferEnded,
        }
    }

    /// Drains and ends. Once it has, again does nothing.
    pub fn shut_down(&mut self) -> BoxFuture<'_, ()> {
        Box::pin(self.drain_and_end())
    }

    async fn drain_and_end(&mut self) {
        // When it takes no commands any more it has ended.
        tell(&self.node, || Command::Drain).await;
        if !self.ended.is_terminated() {
            let _ = (&mut self.ended).await;
        }
        self.stop.cancel();
        for server in self.servers.drain(..) {
            let abort = server.abort_handle();
            match tokio::time::timeout(CONNECTIONS_END, server).await {
                Ok(Ok(Err(error))) => {
                    tracing::warn!(%error, "a gRPC or HTTP server of the store node ended with an error");
                }
                Ok(_) => {}
                Err(_) => abort.abort(),
            }
        }
    }
}

impl Drop for Running {
    /// Who drops it without waiting still ends the node.
    fn drop(&mut self) {
        let _ = self.node.tell(Command::Drain);
        self.stop.cancel();
    }
}

fn make_parts(
    config: Config,
    (registry, route_registries): &(Registry, Vec<Registry>),
    metrics: Metrics,
    post: Post,
    inbox: Inbox,
) -> Result<Parts, Error> {
    let layer_log = match &config.layer_log_file {
        Some(path) => {
            let started = LayerLog::start(path, metrics.layer_lines_dropped.clone());
            let what = format!("cannot write `layer_log_file` {}", path.display());
            Some(started.map_err(|source| Error::Io { what, source })?)
        }
        None => None,
    };
    let arena = Arena::create(config.dram_bytes).map_err(Error::Memory)?;
    let tail_bytes = usize::try_from(config.tail_bytes).unwrap_or(usize::MAX);
    let tails = SharedMemory::create("kvasir-tails", tail_bytes, Prefault::Yes);
    let tails = Arc::new(tails.map_err(Error::Memory)?);
    let (transfer, driver) = start_transfer(&config, registry, &post)?;
    let ssd = start_ssd(&config, &arena, &post)?;
    let bucket = start_bucket(&config, &arena, &post)?;
    let routing = start_routing(&config, &arena, registry, route_registries)?;
    let (arena_region, _) = transfer.register(Arc::clone(arena.memory()))?;
    let mut blocks = Blocks::new(kvasir_blocks::Options {
        imm_seed: rand::random(),
        lease_max_ms: config.lease_max_ms,
        shares_max: SHARES_MAX,
        eviction: config.eviction_policy,
        ssd_timeout_ms: config.ssd.timeout_ms,
        demote_ahead_percent: config.ssd.demote_ahead_percent,
        prefetch_chains_max: config.ssd.prefetch_chains_max as usize,
        prefetch_protected_ms: config.ssd.prefetch_protected_ms,
        bucket: bucket_options(&config),
        replicas: ReplicaOptions {
            concurrent_copies_max: config.replication.concurrent_copies_max as usize,
            hot_requests_min: config.replication.hot_requests_min,
            hot_pushes_min: config.replication.hot_pushes_min as usize,
            node_lost_after_ms: config.replication.node_lost_after_ms,
            ..ReplicaOptions::default()
        },
        ..kvasir_blocks::Options::default()
    });
    if ssd.is_some() {
        blocks.expect_ssd();
    }
    let memories = Memories { slots: Arc::clone(arena.memory()), tails: Arc::clone(&tails) };
    let handle = NodeHandle::new(post.clone());
    let (runtime, lease_max_ms) = (tokio::runtime::Handle::current(), config.lease_max_ms);
    let lookups = Sources::new(runtime.clone(), handle.clone());
    let copier = Copier::new(runtime, handle, lease_max_ms);
    Ok(Parts {
        routing,
        copier,
        lookups,
        config,
        incarnation: rand::random::<u64>().max(1),
        blocks,
        arena,
        arena_region,
        tails,
        writers: Writers::new(memories),
        transfer,
        driver,
        inbox,
        post,
        metrics,
        layer_log,
        ssd,
        bucket,
    })
}

/// Registries of the transfer engines for queries, one for each rank.
fn route_registries(ranks: u32) -> Result<Vec<Registry>, prometheus::Error> {
    let label = |rank: u32| (ranks > 1).then(|| [("rank".into(), rank.to_string())].into());
    (0..ranks).map(|rank| Registry::new_custom(None, label(rank))).collect()
}

/// Queries have a transfer engine of their own: they do not wait behind pages that are pushed.
fn start_routing(
    config: &Config,
    arena: &Arena,
    registry: &Registry,
    route_registries: &[Registry],
) -> Result<Option<Routing>, Error> {
    let routes = &config.routes;
    if !routes.enabled {
        return Ok(None);
    }
    let options = HolderOptions {
        name: format!("{}-routes", config.node_id),
        preferred: if config.transport == Domain::Tcp { Domain::Tcp } else { Domain::Shm },
        tcp_listen: Some(routes.listen),
        tcp_tls: config.transfer_tls.files().map_err(Error::Config)?,
        run_dir: Some(config.attach_dir.clone()),
        send_bytes_per_s_max: config.send_bytes_per_s_max,
        concurrent_messages_max: routes.concurrent_messages_max as usize,
        sessions_max: routes.sessions_max as usize,
        routes_max: routes.routes_max as usize,
        ring_bytes_max: routes.ring_bytes_max,
        threads: routes.threads as usize,
    };
    let holder = Holder::start(&options, arena.memory(), route_registries, registry)?;
    Ok(Some(Routing::new(holder, rand::random(), routes.routes_max)))
}

/// The SSD is opened by its own thread: a node is ready before its disk is.
fn start_ssd(config: &Config, arena: &Arena, post: &Post) -> Result<Option<SsdThread>, Error> {
    if config.ssd.dir.is_none() {
        return Ok(None);
    }
    let (post, slots) = (post.clone(), Arc::clone(arena.memory()));
    let started =
        SsdThread::start(config.ssd.clone(), slots, rand::random(), move |report| post.ssd(report));
    let failed = |source| Error::Io { what: "cannot start the SSD's thread".into(), source };
    Ok(Some(started.map_err(failed)?))
}

fn start_bucket(config: &Config, arena: &Arena, post: &Post) -> Result<Option<BucketTask>, Error> {
    let (runtime, slots) = (tokio::runtime::Handle::current(), Arc::clone(arena.memory()));
    bucket::start(&runtime, &config.object_store, slots, post.bucket()).map_err(Error::Config)
}

fn bucket_options(config: &Config) -> BucketOptions {
    let store = &config.object_store;
    if store.url.is_none() {
        return BucketOptions::default();
    }
    BucketOptions {
        uploads_max: store.in_flight_requests_max as usize / 2,
        upload_bytes_max: store.in_flight_bytes_max / 2,
        timeout_ms: store.read_timeout_ms,
        blocks_max: store.blocks_max as usize,
        tenant_bytes_max: store.tenant_bytes_max,
        ..BucketOptions::default()
    }
}

fn read_topology(file: &std::path::Path) -> Result<Topology, Error> {
    let wrong = |why: String| {
        Error::Config(format!("cannot use `topology_file` {}: {why}", file.display()))
    };
    let text = std::fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    text.parse().map_err(|error: TopologyError| wrong(error.to_string()))
}

fn start_transfer(
    config: &Config,
    registry: &Registry,
    post: &Post,
) -> Result<(TransferEngine, Option<Driver>), Error> {
    let (messages, events) = (post.clone(), post.clone());
    let handlers = Handlers {
        on_message: Box::new(move |peer, bytes| {
            // Copied, so that its buffer goes round: this queue has its own bound.
            messages.peer(FromPeer::Message(peer, bytes.to_vec()));
        }),
        on_peer: Box::new(move |event| events.peer(FromPeer::Event(event))),
    };
    let transfer = TransferConfig {
        name: config.node_id.clone(),
        preferred: config.transport,
        tcp_listen: Some(config.transfer_listen),
        tcp_tls: config.transfer_tls.files().map_err(Error::Config)?,
        run_dir: Some(config.attach_dir.clone()),
        verbs: (config.transport == Domain::Verbs).then(|| config.verbs.clone()),
        efa: (config.transport == Domain::Efa).then(|| config.efa.clone()),
        topology: config.topology_file.as_deref().map(read_topology).transpose()?,
        send_bytes_per_s_max: config.send_bytes_per_s_max,
        verify: config.verify,
        operations_max: OPERATIONS_MAX,
        ..TransferConfig::default()
    };
    if config.transfer_thread.is_shared() {
        let (transfer, driver) = TransferEngine::start_driven(transfer, handlers, registry)?;
        return Ok((transfer, Some(driver)));
    }
    Ok((TransferEngine::start(transfer, handlers, registry)?, None))
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn started(attach_dir: &std::path::Path) -> Running {
        let any_port = ([127, 0, 0, 1], 0).into();
        let config = Config {
            node_id: "n".into(),
            listen: any_port,
            transfer_listen: any_port,
            attach_dir: attach_dir.to_owned(),
            dram_bytes: 1 << 20,
            tail_bytes: 1 << 20,
            ..Config::default()
        };
        start(config).await.expect("started")
    }

    #[tokio::test]
    async fn a_node_ends_with_an_error_when_its_transfer_engine_dies() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut running = started(dir.path()).await;
        let living = tokio::time::timeout(Duration::from_millis(20), running.died()).await;
        assert!(living.is_err(), "it runs until then");
        // The worker's death, as the transfer engine tells it: the completion is dropped.
        let (died, transfer_ended) = Completion::future();
        drop(died);
        running.transfer_ended = transfer_ended;
        assert!(matches!(running.died().await, Error::TransferEnded));
        running.shut_down().await;
    }

    #[tokio::test]
    async fn the_end_of_a_node_that_was_shut_down_is_no_death_of_its_transfer_engine() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut running = started(dir.path()).await;
        running.shut_down().await;
        assert_eq!((&mut running.transfer_ended).await, Ok(()));
    }

    #[tokio::test]
    async fn a_node_that_has_ended_can_be_shut_down_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut running = started(dir.path()).await;
        running.shut_down().await;
        running.shut_down().await;
    }
}
