//! The conductor's life: bind, load, serve, drain.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::cluster::{Cluster, ClusterError, Objectives, Options, Policy, scheduler_service};
use crate::config::Config;
use crate::error::Error;
use crate::http::{self, Bodies, Front, HttpOptions};
use crate::metrics::Metrics;
use crate::openai::{Limits, unix_seconds};
use crate::serve::{ServeOptions, Serving};
use crate::text::Texts;

/// Scheduler calls of one connection that are worked on at once; more wait.
const SCHEDULE_CALLS_MAX: usize = 64;
/// Scheduler calls that one connection may have open, those that wait included.
const SCHEDULE_STREAMS_MAX: u32 = 128;
/// After everything in flight has been cancelled: for telling the nodes.
const ABORTS_WITHIN: Duration = Duration::from_secs(3);
/// After draining: for clients to take the rest of their answers.
const WRITE_WITHIN: Duration = Duration::from_secs(1);

/// A conductor whose addresses are bound and whose models are loaded.
#[derive(Debug)]
pub struct Conductor {
    config: Config,
    http: TcpListener,
    grpc: TcpListener,
    texts: Texts,
}

impl Conductor {
    /// Binds the addresses and reads the models.
    ///
    /// # Errors
    /// [`Error`] when the configuration is wrong, an address is taken or a model cannot be read.
    pub async fn bind(config: Config) -> Result<Conductor, Error> {
        config.check().map_err(Error::Config)?;
        let http = listen(config.listen).await?;
        let grpc = listen(config.grpc_listen).await?;
        let (models, parallel) = (config.models.clone(), config.tokenize_parallel);
        let load = tokio::task::spawn_blocking(move || Texts::load(&models, parallel));
        let texts = load.await.map_err(|error| Error::Config(error.to_string()))??;
        Ok(Conductor { config, http, grpc, texts })
    }

    /// Where HTTP is served; the configuration may have left the port open.
    pub fn http_address(&self) -> SocketAddr {
        address_of(&self.http, self.config.listen)
    }

    /// Where gRPC is served.
    pub fn grpc_address(&self) -> SocketAddr {
        address_of(&self.grpc, self.config.grpc_listen)
    }

    /// Serves until `shutdown`, then drains.
    ///
    /// # Errors
    /// [`Error`] when the store nodes cannot be followed as configured or gRPC fails.
    pub async fn serve(self, shutdown: CancellationToken) -> Result<(), Error> {
        let (http_address, grpc_address) = (self.http_address(), self.grpc_address());
        let Conductor { config, http, grpc, texts } = self;
        let registry = Registry::new();
        let metrics = Arc::new(Metrics::new(registry.clone())?);
        // The cluster is followed until the last request has ended.
        let followed = CancellationToken::new();
        let _unfollow = followed.clone().drop_guard();
        let cluster = Cluster::start(cluster_options(&config), &registry, followed.clone())?;
        let abandon = CancellationToken::new();
        let options = serve_options(&config);
        let serving = Serving::new(cluster.clone(), options, Arc::clone(&metrics), abandon.clone());
        let serving = Arc::new(serving);
        let draining = CancellationToken::new();
        let front = Arc::new(Front {
            texts,
            serving: Arc::clone(&serving),
            cluster: cluster.clone(),
            metrics: Arc::clone(&metrics),
            bodies: Bodies::new(
                config.body_bytes_max,
                config.bodies_bytes_max,
                Duration::from_millis(config.body_read_ms),
            ),
            limits: Limits {
                choices_max: config.choices_max,
                stop_strings_max: config.stop_strings_max,
            },
            request_deadline: Duration::from_millis(config.request_deadline_ms),
            started_unix_s: unix_seconds(),
            draining: draining.clone(),
        });
        let stop = CancellationToken::new();
        let http = tokio::spawn(http::serve(
            http,
            http::router(front),
            http_options(&config),
            metrics,
            stop.clone(),
            abandon.clone(),
        ));
        let incoming = TcpListenerStream::new(grpc).inspect(|connection| {
            if let Ok(connection) = connection {
                let _ = connection.set_nodelay(true);
            }
        });
        let mut server = tokio::spawn(
            Server::builder()
                .concurrency_limit_per_connection(SCHEDULE_CALLS_MAX)
                .max_concurrent_streams(SCHEDULE_STREAMS_MAX)
                .add_service(scheduler_service(cluster))
                .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned()),
        );
        tracing::info!(http = %http_address, grpc = %grpc_address, "conductor is serving");

        let failed = tokio::select! {
            () = shutdown.cancelled() => None,
            ended = &mut server => Some(ended),
        };
        // From here on new requests are answered with 503; those in flight go on.
        tracing::info!("conductor is draining");
        draining.cancel();
        let drain = Duration::from_millis(config.drain_ms);
        if tokio::time::timeout(drain, serving.finished()).await.is_err() {
            tracing::warn!("requests in flight are cancelled: draining took too long");
        }
        stop.cancel();
        // What is ready is written; then connections are closed whatever they do.
        let mut http = http;
        let written = tokio::time::timeout(WRITE_WITHIN, &mut http).await;
        abandon.cancel();
        if written.is_err() {
            let _ = http.await;
        }
        let _ = tokio::time::timeout(ABORTS_WITHIN, serving.finished()).await;
        match failed {
            Some(ended) => flatten(ended),
            None => match tokio::time::timeout(ABORTS_WITHIN, server).await {
                Ok(ended) => flatten(ended),
                Err(_) => Ok(()),
            },
        }
    }
}

/// Serves until `shutdown` is cancelled, then drains and returns.
///
/// # Errors
/// [`Error`] when the configuration is wrong, an address is taken or a model cannot be read.
pub async fn run(config: Config, shutdown: CancellationToken) -> Result<(), Error> {
    Conductor::bind(config).await?.serve(shutdown).await
}

async fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address).await.map_err(|source| Error::Bind { address, source })
}

fn address_of(listener: &TcpListener, configured: SocketAddr) -> SocketAddr {
    listener.local_addr().unwrap_or(configured)
}

fn flatten(
    ended: Result<Result<(), tonic::transport::Error>, tokio::task::JoinError>,
) -> Result<(), Error> {
    match ended {
        Ok(ended) => ended.map_err(Error::Grpc),
        Err(error) => Err(Error::Config(format!("the gRPC server ended: {error}"))),
    }
}

fn cluster_options(config: &Config) -> Options {
    Options {
        nodes: config.nodes.clone(),
        policy: Policy {
            selection: config.policy.into(),
            kvcache_balancing_threshold: config.kvcache_balancing_threshold,
            always_fetch: config.always_fetch,
            rank_stretch: config.rank_stretch,
            ..Policy::default()
        },
        ..Options::default()
    }
}

fn serve_options(config: &Config) -> ServeOptions {
    ServeOptions {
        objectives: Objectives {
            ttft_us: config.ttft_objective_ms.saturating_mul(1_000),
            tbt_us: config.tbt_objective_ms.saturating_mul(1_000),
        },
        lease: Duration::from_millis(config.lease_ms),
        attempts_max: config.attempts_max,
        choices_running_max: config.choices_running_max,
        write_stall: Duration::from_millis(config.write_stall_ms),
    }
}

fn http_options(config: &Config) -> HttpOptions {
    HttpOptions {
        connections_max: config.connections_max,
        header_read: Duration::from_millis(config.header_read_ms),
        write_stall: Duration::from_millis(config.write_stall_ms),
    }
}

impl From<ClusterError> for Error {
    fn from(error: ClusterError) -> Error {
        match error {
            ClusterError::Metrics(error) => Error::Metrics(error),
            other => Error::Config(format!("`nodes`: {other}")),
        }
    }
}
