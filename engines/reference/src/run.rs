//! The engine process: bind, load, attach, serve, drain.

#![forbid(unsafe_code)]

#[cfg(test)]
mod chunks;
#[cfg(test)]
mod routed;
#[cfg(test)]
mod selected;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod with_nodes;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use kvasir_attach::AttachOptions;
use kvasir_proto::v1;
use prometheus::Registry;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use crate::admission::Admission;
use crate::attach::{AttachLoop, ModelLayout, NodeAttachment};
use crate::http;
use crate::inbox::Inbox;
use crate::layer_log::{LayerLog, LayerLogWriter};
use crate::metrics::Metrics;
use crate::model::{LoadOptions, Model};
use crate::ports::Clock;
use crate::request::Limits;
use crate::routes::exchange::ExchangeOptions;
use crate::routes::{self, Router};
use crate::scheduler::{SchedulerOptions, Shared};
use crate::service::EngineService;
use crate::text::Vocabulary;
use crate::worker::Worker;
use crate::{Config, Error};

/// How long connections may take to close once every call has ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs the engine until `shutdown` is cancelled, then drains.
///
/// # Errors
/// [`Error`], in a sentence, when it cannot start or go on.
pub fn run(config: Config, shutdown: CancellationToken) -> BoxFuture<'static, Result<(), Error>> {
    // Boxed, so that its code is compiled here and not again in each program that awaits it.
    Box::pin(run_engine(config, shutdown))
}

async fn run_engine(config: Config, shutdown: CancellationToken) -> Result<(), Error> {
    if let Some(flaw) = config.flaw() {
        return Err(Error::Config(flaw));
    }
    let listen_failed = |source| Error::Listen { address: config.listen, source };
    let listener = TcpListener::bind(config.listen).await.map_err(listen_failed)?;
    let address = listener.local_addr().map_err(listen_failed)?;
    let address = config.advertise_address.clone().unwrap_or_else(|| address.to_string());
    let loaded = load(&config).await?;
    tracing::info!(
        instance_id = config.instance_id,
        address,
        model = config.model_name,
        "the engine has started"
    );
    Engine::start(config, loaded)?.serve(listener, address, shutdown).await
}

/// What is read from disk.
struct Loaded {
    model: Arc<Model>,
    vocabulary: Arc<Vocabulary>,
}

async fn load(config: &Config) -> Result<Loaded, Error> {
    let dir = config.model_dir.clone();
    let options = LoadOptions {
        threads: config.threads as usize,
        precision: config.attention_precision.of_kernels(),
    };
    let loading = tokio::task::spawn_blocking(move || load_blocking(&dir, options));
    loading.await.map_err(|_| Error::Compute)?
}

fn load_blocking(dir: &Path, options: LoadOptions) -> Result<Loaded, Error> {
    let model = Model::load(dir, options)?;
    let path = dir.join("tokenizer.json");
    let vocabulary = Vocabulary::load(&path, model.config().vocab as u32)
        .map_err(|why| Error::Tokenizer { path, why: why.to_string() })?;
    Ok(Loaded { model: Arc::new(model), vocabulary: Arc::new(vocabulary) })
}

/// The parts of a running engine.
struct Engine {
    config: Config,
    model: Arc<Model>,
    shared: Shared,
    registry: Registry,
    inbox: Arc<Inbox<NodeAttachment>>,
    lost: mpsc::Receiver<crate::ports::PortLost>,
    /// Hears when the compute thread has ended, in whatever way.
    compute_ended: oneshot::Receiver<()>,
    layer_log_writer: Option<LayerLogWriter>,
    router: Arc<Router>,
    /// Of the transfer engine for queries.
    route_registry: Registry,
}

impl Engine {
    fn start(config: Config, loaded: Loaded) -> Result<Self, Error> {
        let Loaded { model, vocabulary } = loaded;
        let (ranks, heads) = (config.routes.ranks, model.config().heads);
        if !heads.is_multiple_of(ranks as usize) {
            return Err(Error::Ranks { ranks, heads });
        }
        let registry = Registry::new();
        let metrics = Metrics::new(&registry);
        let route_registry = Registry::new();
        let router = Arc::new(Router::new(&config, model.config(), route_registry.clone()));
        let (layer_log, layer_log_writer) = start_layer_log(&config, &metrics)?.unzip();
        let requests_max = config.running_requests_max.saturating_add(config.waiting_requests_max);
        let shared = Shared {
            vocabulary,
            admission: Arc::new(Admission::new(requests_max)),
            metrics,
            clock: Clock::monotonic(),
            layer_log: layer_log.map(Arc::new),
        };
        let inbox = Arc::new(Inbox::default());
        let (lost_sender, lost) = mpsc::channel(1);
        let worker = Worker {
            inbox: Arc::clone(&inbox),
            options: scheduler_options(&config, &model),
            shared: shared.clone(),
            drain_us: u64::from(config.drain_timeout_ms) * 1_000,
            lost: lost_sender,
        };
        let (ended, compute_ended) = oneshot::channel();
        std::thread::Builder::new()
            .name("compute".into())
            .spawn(move || {
                // Dropped when the thread ends, also by a panic.
                let _ended: oneshot::Sender<()> = ended;
                worker.run();
            })
            .map_err(|source| Error::System { what: "the compute thread", source })?;
        Ok(Engine {
            config,
            model,
            shared,
            registry,
            inbox,
            lost,
            compute_ended,
            layer_log_writer,
            router,
            route_registry,
        })
    }

    async fn serve(
        self,
        listener: TcpListener,
        address: String,
        shutdown: CancellationToken,
    ) -> Result<(), Error> {
        let Engine { config, model, shared, registry, inbox, lost, mut compute_ended, .. } = self;
        let (router, registries) = (self.router, vec![registry, self.route_registry]);
        let attach_loop = AttachLoop {
            options: attach_options(&config, &model, address),
            layout: ModelLayout { block_tokens: config.block_tokens, kv_dtype: config.kv_dtype },
            inbox: Arc::clone(&inbox),
            exchange: ExchangeOptions {
                dtype: routes::wire_dtype(&config),
                heads_of_rank: routes::heads_of_rank(&config, model.config()),
                deadline: Duration::from_millis(config.routes.answer_timeout_ms.into()),
            },
            lost,
            metrics: shared.metrics.clone(),
            model: Arc::clone(&model),
        };
        let (refuse, refused) = oneshot::channel();
        let until = shutdown.clone();
        let attaching = tokio::spawn(async move {
            if let Err(error) = attach_loop.run(until).await {
                // Nobody listens only when the engine ends for another reason.
                let _ = refuse.send(error);
            }
        });
        let limits = limits(&config, &model);
        let router = Some(router);
        let service = EngineService { limits, shared, inbox: Arc::clone(&inbox), router };
        let drained = CancellationToken::new();
        let mut server = tokio::spawn(http::serve(listener, service, registries, drained.clone()));
        let ended = tokio::select! {
            () = shutdown.cancelled() => Ok(()),
            _ = &mut compute_ended => Err(Error::Compute),
            Ok(error) = refused => Err(error),
            served = &mut server => return served.map_err(|_| Error::Compute)?.map_err(Error::from),
        };
        inbox.stop();
        if ended.is_ok() {
            // The compute thread ends when its sequences have, or when the time for that is over.
            let _ = compute_ended.await;
        }
        drained.cancel();
        let _ = attaching.await;
        if tokio::time::timeout(CLOSE_TIMEOUT, &mut server).await.is_err() {
            server.abort();
            let _ = server.await;
        }
        if let Some(writer) = self.layer_log_writer {
            let _ = tokio::task::spawn_blocking(move || writer.join()).await;
        }
        tracing::info!(instance_id = config.instance_id, "the engine has stopped");
        ended
    }
}

fn start_layer_log(
    config: &Config,
    metrics: &Metrics,
) -> Result<Option<(LayerLog, LayerLogWriter)>, Error> {
    let Some(path) = &config.layer_log_file else { return Ok(None) };
    let started = LayerLog::start(path, metrics.layer_log_dropped.clone());
    started.map(Some).map_err(|source| Error::LayerLog { path: path.clone(), source })
}

fn scheduler_options(config: &Config, model: &Model) -> SchedulerOptions {
    SchedulerOptions {
        prefill_chunk_tokens: config.prefill_chunk_tokens,
        block_tokens: config.block_tokens,
        running_requests_max: config.running_requests_max,
        grow_wait_us: u64::from(config.slot_wait_timeout_ms) * 1_000,
        vocab: model.config().vocab as u32,
    }
}

fn limits(config: &Config, model: &Model) -> Limits {
    Limits {
        role: config.role,
        vocab: model.config().vocab as u32,
        context_tokens: model.config().positions_max,
        end_tokens: model.config().eos.clone(),
        block_tokens: config.block_tokens,
        selects: model.config().indexer.is_some(),
    }
}

fn attach_options(config: &Config, model: &Model, engine_address: String) -> AttachOptions {
    AttachOptions {
        attach_dir: config.attach_dir.clone(),
        instance_id: config.instance_id.clone(),
        instance_type: config.instance_type.clone(),
        role: config.role.to_wire(),
        model: v1::ModelDescription {
            name: config.model_name.clone(),
            fingerprint: config
                .attention_precision
                .fingerprint_of_rows(model.fingerprint())
                .to_vec(),
            kv_dtype: config.kv_dtype.name().to_owned(),
            vocab_size: model.config().vocab as u32,
            context_tokens: model.config().positions_max,
            routed: Some(routes::routed_rows(config, model.config())),
        },
        layout: model.config().layout(config.block_tokens, config.kv_dtype),
        engine_address,
        running_requests_max: config.running_requests_max,
        pool: None,
    }
}
