//! The conductor's life: bind, load, serve, drain.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::BoxFuture;
use kvasir_placement::attend::Constants;
use kvasir_placement::balance::roles::RolesOptions;
use kvasir_placement::waiting::LineOptions;
use kvasir_placement::{
    InstanceProfile, LinkProfile, Objectives, Policy, Profile, Routing, SsdProfile,
};
use prometheus::Registry;
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::access::{Access, Tenants};
use crate::cluster::{BalanceOptions, Cluster, ClusterError, Options};
use crate::config::{
    AdmissionQueueConfig, BalanceConfig, BalanceMode, Config, ProfileConfig, RoutesConfig,
};
use crate::contexts::Contexts;
use crate::error::Error;
use crate::http::{
    self, Bodies, Door, Front, HttpOptions, ObjectiveBounds, Tls, TlsBytes, TlsFiles,
};
use crate::metrics::Metrics;
use crate::openai::{Limits, unix_seconds};
use crate::proxy::Proxies;
use crate::serve::{ServeOptions, Serving, WaitOptions, scheduler_service};
use crate::text::{Memo, Texts};
use crate::watch::{self, Watch};

/// Scheduler calls of one connection that are worked on at once; more wait.
const SCHEDULE_CALLS_MAX: usize = 64;
/// Scheduler calls that one connection may have open, those that wait included.
const SCHEDULE_STREAMS_MAX: u32 = 128;
/// Connections of those who look.
const WATCHERS_MAX: usize = 64;
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
    watch: TcpListener,
    texts: Texts,
    proxies: Arc<Proxies>,
    metrics: Arc<Metrics>,
    /// With what was read for it.
    access: Option<(Access, Tenants)>,
    tls: Option<(Tls, TlsBytes)>,
}

impl Conductor {
    /// Binds the addresses and reads the models.
    ///
    /// Public futures of this crate are boxed, so that their code is compiled here and not again in each program
    /// that awaits them.
    ///
    /// # Errors
    /// [`Error`] when the configuration is wrong, an address is taken or a model cannot be read.
    pub fn bind(config: Config) -> BoxFuture<'static, Result<Conductor, Error>> {
        Box::pin(Conductor::bind_and_load(config))
    }

    async fn bind_and_load(config: Config) -> Result<Conductor, Error> {
        config.check().map_err(Error::Config)?;
        if config.api_keys_file.is_some() && !config.grpc_listen.ip().is_loopback() {
            tracing::warn!(
                grpc = %config.grpc_listen,
                "the gRPC scheduler does not check API keys; restrict access to `grpc_listen`"
            );
        }
        let http = listen(config.listen).await?;
        let grpc = listen(config.grpc_listen).await?;
        let watch = listen(config.monitor_listen).await?;
        let metrics = Arc::new(Metrics::new(Registry::new())?);
        let (access, tls) = load_guards(&config, &metrics).await?;
        let (models, parallel) = (config.models.clone(), config.concurrent_tokenizations_max);
        let memo = Memo::new(config.tokenizer_cache_bytes_max, metrics.registry())?;
        let load = tokio::task::spawn_blocking(move || Texts::load(&models, parallel, memo));
        let texts = load.await.map_err(|error| Error::Config(error.to_string()))??;
        let (backends, counts) = (config.backends.clone(), metrics.proxied.clone());
        let load = tokio::task::spawn_blocking(move || Proxies::load(&backends, counts));
        let proxies = load.await.map_err(|error| Error::Config(error.to_string()))?;
        let proxies = Arc::new(proxies.map_err(Error::Config)?);
        Ok(Conductor { config, http, grpc, watch, texts, proxies, metrics, access, tls })
    }

    /// Where HTTP is served; the configuration may have left the port open.
    pub fn http_address(&self) -> SocketAddr {
        address_of(&self.http, self.config.listen)
    }

    /// Where gRPC is served.
    pub fn engine_address(&self) -> SocketAddr {
        address_of(&self.grpc, self.config.grpc_listen)
    }

    /// Where operators look.
    pub fn watch_address(&self) -> SocketAddr {
        address_of(&self.watch, self.config.monitor_listen)
    }

    /// Serves until `shutdown`, then drains.
    ///
    /// # Errors
    /// [`Error`] when the store nodes cannot be followed as configured or gRPC fails.
    pub fn serve(self, shutdown: CancellationToken) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(self.serve_and_drain(shutdown))
    }

    async fn serve_and_drain(self, shutdown: CancellationToken) -> Result<(), Error> {
        let (http_address, engine_address) = (self.http_address(), self.engine_address());
        let watch_address = self.watch_address();
        let Conductor { config, http, grpc, watch, texts, proxies, metrics, access, tls } = self;
        // The cluster is followed until the last request has ended.
        let followed = CancellationToken::new();
        let _unfollow = followed.clone().drop_guard();
        let cluster =
            Cluster::start(cluster_options(&config)?, metrics.registry(), followed.clone())?;
        let abandon = CancellationToken::new();
        let options = serve_options(&config);
        let serving = Serving::new(cluster.clone(), options, Arc::clone(&metrics), abandon.clone());
        let serving = Arc::new(serving);
        let reload_every = Duration::from_millis(config.reload_interval_ms);
        let access = access.map(|(access, first)| {
            let access = Arc::new(access);
            let reloads = metrics.reloads_of("api_keys");
            let following =
                Arc::clone(&access).follow(first, reload_every, reloads, followed.clone());
            tokio::spawn(following);
            access
        });
        let tls = tls.map(|(tls, first)| {
            let tls = Arc::new(tls);
            let reloads = metrics.reloads_of("certificate");
            let following = Arc::clone(&tls).follow(first, reload_every, reloads, followed.clone());
            tokio::spawn(following);
            tls
        });
        tokio::spawn(Arc::clone(&serving).call_waiting(followed.clone()));
        tokio::spawn(Arc::clone(&proxies).follow(followed.clone()));
        let draining = CancellationToken::new();
        let front = Arc::new(Front {
            texts,
            proxies,
            serving: Arc::clone(&serving),
            cluster: cluster.clone(),
            metrics: Arc::clone(&metrics),
            contexts: Contexts::new(&config.contexts, Arc::clone(&metrics)),
            bodies: Bodies::new(
                config.body_bytes_max,
                config.buffered_bodies_bytes_max,
                Duration::from_millis(config.body_read_timeout_ms),
            ),
            limits: Limits {
                choices_per_request_max: config.choices_per_request_max,
                stop_strings_max: config.stop_strings_max,
            },
            request_deadline: Duration::from_millis(config.request_timeout_ms),
            objectives: objectives(&config),
            steering_enabled: config.steering_enabled,
            chunk_reuse_enabled: config.chunk_reuse_enabled,
            started_unix_s: unix_seconds(),
            access,
            draining: draining.clone(),
        });
        let stop = CancellationToken::new();
        let door = Door {
            router: http::router(Arc::clone(&front)),
            options: http_options(&config),
            tls,
            places: metrics.connections.clone(),
            slow_readers_cut: metrics.slow_readers_cut.clone(),
            stop: stop.clone(),
            abandon: abandon.clone(),
        };
        let http = tokio::spawn(http::serve(http, door));
        let watched = Door {
            router: watch::router(Arc::new(Watch { front, started: Instant::now() })),
            options: HttpOptions { connections_max: WATCHERS_MAX, ..http_options(&config) },
            tls: None,
            places: metrics.watchers.clone(),
            slow_readers_cut: metrics.slow_readers_cut.clone(),
            stop: stop.clone(),
            abandon: abandon.clone(),
        };
        let watched = tokio::spawn(http::serve(watch, watched));
        let incoming = TcpListenerStream::new(grpc).inspect(|connection| {
            if let Ok(connection) = connection {
                let _ = connection.set_nodelay(true);
            }
        });
        let mut server = tokio::spawn(
            Server::builder()
                .concurrency_limit_per_connection(SCHEDULE_CALLS_MAX)
                .max_concurrent_streams(SCHEDULE_STREAMS_MAX)
                .add_service(scheduler_service(cluster, Arc::clone(serving.recorder())))
                .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned()),
        );
        tracing::info!(http = %http_address, grpc = %engine_address, monitor = %watch_address, "the conductor is serving");

        let failed = tokio::select! {
            () = shutdown.cancelled() => None,
            ended = &mut server => Some(ended),
        };
        // From here on new requests are answered with 503; those in flight go on.
        tracing::info!("the conductor is draining");
        draining.cancel();
        let drain = Duration::from_millis(config.drain_timeout_ms);
        if tokio::time::timeout(drain, serving.finished()).await.is_err() {
            tracing::warn!(
                "the conductor did not drain within `drain_timeout_ms`; cancelling the requests in flight"
            );
        }
        stop.cancel();
        // What is ready is written; then connections are closed whatever they do.
        let mut http = http;
        let written = tokio::time::timeout(WRITE_WITHIN, &mut http).await;
        abandon.cancel();
        if written.is_err() {
            let _ = http.await;
        }
        let _ = watched.await;
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
pub fn run(config: Config, shutdown: CancellationToken) -> BoxFuture<'static, Result<(), Error>> {
    Box::pin(async { Conductor::bind(config).await?.serve(shutdown).await })
}

type Guards = (Option<(Access, Tenants)>, Option<(Tls, TlsBytes)>);

/// What is to keep the HTTP API for those it is meant for.
async fn load_guards(config: &Config, metrics: &Arc<Metrics>) -> Result<Guards, Error> {
    let (keys, metrics) = (config.api_keys_file.clone(), Arc::clone(metrics));
    let within = Duration::from_millis(config.tls.handshake_timeout_ms);
    let files = config.tls.certificate_file.clone().zip(config.tls.key_file.clone());
    let files = files.map(|(certificate, key)| TlsFiles { certificate, key });
    let load = tokio::task::spawn_blocking(move || {
        let access = keys.map(|keys| Access::load(keys, metrics.unauthenticated.clone()));
        let access = access.transpose().map_err(|error| Error::ApiKeys(error.to_string()))?;
        let tls = files.map(|files| Tls::load(files, within, metrics.handshakes_failed.clone()));
        let tls = tls.transpose().map_err(|error| Error::Tls(error.to_string()))?;
        Ok((access, tls))
    });
    load.await.map_err(|error| Error::Config(error.to_string()))?
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

fn cluster_options(config: &Config) -> Result<Options, Error> {
    Ok(Options {
        nodes: config.nodes.clone(),
        policy: Policy {
            selection: config.policy.into(),
            kvcache_balancing_threshold: config.kvcache_balancing_threshold,
            always_fetch: config.always_fetch,
            shortest_prefill_first_factor: config.shortest_prefill_first_factor,
            routing: routing(&config.routes)?,
            ..Policy::default()
        },
        profile: Profile {
            link: LinkProfile {
                base_us: config.network.latency_us as f64,
                bytes_per_us: config.network.bytes_per_s as f64 / 1e6,
            },
            ssd: SsdProfile {
                base_us: config.ssd.latency_us as f64,
                bytes_per_us: config.ssd.bytes_per_s as f64 / 1e6,
            },
            ..Profile::default()
        },
        profiles: profiles(&config.instance_profiles)?,
        balance: balance_options(config),
        index_blocks_max: config.index_blocks_max,
        captures_inputs: config.decision_history_max > 0 && config.decision_inputs_bytes_max > 0,
        ..Options::default()
    })
}

fn balance_options(config: &Config) -> Option<BalanceOptions> {
    let BalanceConfig {
        mode,
        sample_interval_ms,
        window_ms,
        dwell_ms,
        concurrent_role_changes_max,
        margin,
        ..
    } = config.balance;
    let BalanceConfig { prefill_instances_min, decode_instances_min, load_high, load_low, .. } =
        config.balance;
    let balance = kvasir_placement::balance::BalanceOptions {
        window_us: window_ms.saturating_mul(1_000),
        concurrent_role_changes_max,
        margin,
        prefill_instances_min,
        decode_instances_min,
        load_high,
        load_low,
    };
    let roles = RolesOptions {
        balance,
        objectives: objectives(config).default,
        dwell_us: dwell_ms.saturating_mul(1_000),
    };
    let sample = Duration::from_millis(sample_interval_ms);
    (mode != BalanceMode::Off).then_some(BalanceOptions {
        acts: mode == BalanceMode::Auto,
        sample,
        roles,
    })
}

/// Of the machine that configs/fabrics/one-host-shm.toml names.
const FABRIC: &str = include_str!("../../configs/fabrics/one-host-shm.toml");
const KERNEL: &str = include_str!("../../configs/kernels/xeon-avx512.toml");

/// The prices that routing begins with, when it is on.
fn routing(routes: &RoutesConfig) -> Result<Option<Routing>, Error> {
    if !routes.enabled {
        return Ok(None);
    }
    let fabric = profile("routes.fabric_file", routes.fabric_file.as_deref(), FABRIC)?;
    let kernel = profile("routes.kernel_file", routes.kernel_file.as_deref(), KERNEL)?;
    let constants = Constants { fabric, holder: kernel, local: kernel };
    Ok(Some(Routing { constants, always: routes.always }))
}

/// What engines of some types cost at first.
fn profiles(configured: &[ProfileConfig]) -> Result<Vec<(String, InstanceProfile)>, Error> {
    let of = |of: &ProfileConfig| {
        let field = format!("instance_profiles: {}", of.instance_type);
        let profile: InstanceProfile = profile(&field, Some(&of.file), "")?;
        match profile.flaw() {
            Some(flaw) => {
                let why = format!("`{field}`: {:?}: `{flaw}` must be from 0 to one hour", of.file);
                Err(Error::Config(why))
            }
            None => Ok((of.instance_type.clone(), profile)),
        }
    };
    configured.iter().map(of).collect()
}

fn profile<T: DeserializeOwned>(
    field: &str,
    file: Option<&Path>,
    default: &str,
) -> Result<T, Error> {
    let text = file.map_or_else(|| Ok(default.to_owned()), std::fs::read_to_string);
    let text = text.map_err(|error| Error::Config(format!("`{field}`: {error}")))?;
    toml::from_str(&text).map_err(|error| Error::Config(format!("`{field}`: {error}")))
}

fn serve_options(config: &Config) -> ServeOptions {
    ServeOptions {
        lease: Duration::from_millis(config.lease_ms),
        attempts_max: config.attempts_max,
        running_choices_max: config.running_choices_max,
        write_stall: Duration::from_millis(config.write_stall_timeout_ms),
        decision_history_max: config.decision_history_max,
        decision_inputs_bytes_max: config.decision_inputs_bytes_max,
        wait: wait_options(config),
    }
}

/// Where no keys are asked for there is nobody to take turns.
fn wait_options(config: &Config) -> Option<WaitOptions> {
    let AdmissionQueueConfig { choices_max, dispatch_ahead_ms, quantum_tokens, aging_ms } =
        config.admission_queue;
    let line = LineOptions {
        requests_max: choices_max,
        quantum_tokens,
        aging_us: aging_ms.saturating_mul(1_000),
        passed_us: aging_ms.saturating_mul(1_000),
        ..LineOptions::default()
    };
    let options = WaitOptions { line, ahead: Duration::from_millis(dispatch_ahead_ms) };
    (config.api_keys_file.is_some() && choices_max > 0).then_some(options)
}

fn objectives(config: &Config) -> ObjectiveBounds {
    ObjectiveBounds {
        default: Objectives {
            ttft_us: config.ttft_objective_ms.saturating_mul(1_000),
            tbt_us: config.tbt_objective_ms.saturating_mul(1_000),
        },
        ttft_ms: config.ttft_objective_min_ms..=config.ttft_ms_max(),
        tpot_ms: config.tbt_objective_min_ms..=config.tbt_ms_max(),
    }
}

fn http_options(config: &Config) -> HttpOptions {
    HttpOptions {
        connections_max: config.connections_max,
        header_read: Duration::from_millis(config.header_read_timeout_ms),
        keep_alive: Duration::from_millis(config.keep_alive_timeout_ms),
        write_stall: Duration::from_millis(config.write_stall_timeout_ms),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{NetworkConfig, SsdConfig};

    #[test]
    fn what_is_said_of_ways_and_of_the_index_is_where_costs_begin() {
        let config = Config {
            network: NetworkConfig { latency_us: 7, bytes_per_s: 12_500_000_000 },
            ssd: SsdConfig { latency_us: 8, bytes_per_s: 6_000_000 },
            index_blocks_max: 4_096,
            ..Config::default()
        };
        let options = cluster_options(&config).expect("it can be followed");
        let Profile { link, ssd, .. } = options.profile;
        assert_eq!(link, LinkProfile { base_us: 7.0, bytes_per_us: 12_500.0 });
        assert_eq!(ssd, SsdProfile { base_us: 8.0, bytes_per_us: 6.0 });
        assert_eq!(options.index_blocks_max, 4_096);
        let options = cluster_options(&Config::default()).expect("it can be followed");
        assert_eq!(options.profile, Profile::default(), "both defaults are one");
    }
}
