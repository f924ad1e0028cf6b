//! Attention over blocks that other nodes hold ("move the query, not the cache").
//!
//! - [`Router`]: sessions with holders, and the routes of a request; on the reactor
//! - `leases`: a request's shares at its holders are renewed while it lasts, and end with it
//! - [`exchange`]: one layer's queries out, partials in; on the compute thread
//!
//! What must hold: the partials of a sequence are used all or none. A sequence that lacks one computes
//! the holders' blocks itself ([`crate::scheduler`]) and goes on without them.

#![forbid(unsafe_code)]

pub(crate) mod exchange;
mod leases;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dashmap::DashMap;
use futures::future::join_all;
use kvasir_attach::with_causes;
use kvasir_proto::v1::routes_client::RoutesClient;
use kvasir_proto::{Namespace, TxId, v1};
use kvasir_route::requester::{
    Grant, Requester, RequesterError, RequesterOptions, Session, SessionSize,
};
use kvasir_route::wire;
use kvasir_route::wire::WireDtype;
use kvasir_transfer::Domain;
use prometheus::Registry;
use tokio::sync::OnceCell;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use self::leases::Leases;
use crate::config::Config;
use crate::model::{IndexerConfig, ModelConfig};

/// Parts of one prompt that are attended elsewhere, at most: a message has room for the queries of so many.
pub(crate) const HOLES_MAX: usize = kvasir_proto::ROUTED_CHUNKS_MAX;

/// Exchanges of one session: one at a time, and room for one that was given up.
const DEPTH: u32 = 2;

/// What a request asks for, checked as far as it can be here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SpanRequest {
    pub node: String,
    pub tx: TxId,
    pub lease_ms: u64,
    pub first_block: u32,
    pub blocks: u32,
}

/// Blocks that one holder attends.
#[derive(Debug)]
pub(crate) struct RoutedSpan {
    /// Of each tensor-parallel rank the way to the holder's.
    pub ranks: Vec<RankRoute>,
    pub first_block: u32,
    pub rows: u32,
}

/// Where one rank sends the query rows of its heads.
#[derive(Debug)]
pub(crate) struct RankRoute {
    pub session: Arc<Session>,
    pub route: u64,
    pub pins: u64,
    /// The session was made for it, or meanwhile.
    pub is_first: bool,
}

/// What of a prompt is attended elsewhere: its beginning, or chunks of it. The shares that pin it end when it
/// is dropped.
#[derive(Debug)]
pub(crate) struct RoutedHoles {
    /// In the order of the prompt; the spans of each in order too.
    pub holes: Vec<Vec<RoutedSpan>>,
    /// How long it took until all of them answered.
    opening_us: u64,
    _leases: Leases,
}

impl RoutedHoles {
    /// How long it took until all holders answered, in microseconds, and whether sessions were made for it.
    pub(crate) fn opening(&self) -> (u64, bool) {
        let mut ways = self.holes.iter().flatten().flat_map(|span| &span.ranks);
        (self.opening_us, ways.any(|way| way.is_first))
    }
}

/// What the model's rows are.
#[derive(Debug, Clone)]
struct Shape {
    block_tokens: u32,
    d_qk: u32,
    kv_dtype: &'static str,
    precision: v1::Precision,
    size: SessionSize,
    ranks: u32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Router {
    options: RequesterOptions,
    registry: Registry,
    /// Started by the first request that needs it.
    requester: OnceCell<Requester>,
    shape: Shape,
    call_timeout: Duration,
    /// By the holder's address.
    places: DashMap<String, Arc<Place>>,
}

/// One holder.
#[derive(Debug)]
struct Place {
    channel: Channel,
    /// Of each rank, if there is one. One request at a time opens it, and those that want another holder do not wait
    /// for it.
    sessions: Vec<tokio::sync::Mutex<Option<Arc<Session>>>>,
}

impl Place {
    /// Whether a session is open, as far as that can be seen without waiting.
    fn has_live_session(&self) -> bool {
        self.sessions.iter().any(|session| {
            let session = session.try_lock();
            session.is_ok_and(|it| it.as_ref().is_some_and(|session| !session.is_lost()))
        })
    }
}

/// Room for a step of so many sequences and tokens, of the heads of one rank.
fn session_size(
    (parts, tokens, heads): (usize, usize, usize),
    model: &ModelConfig,
    dtype: WireDtype,
) -> SessionSize {
    let rows = tokens * heads;
    let mut query = wire::query_room(parts, rows, model.row_width(), dtype);
    let mut answer = wire::partials_room(parts, rows, model.rank, dtype);
    if let Some(IndexerConfig { heads, width, topk }) = model.indexer {
        // A token attends no more rows than that, wherever they are.
        let topk = topk.min(model.positions_max as usize);
        query += tokens * (1 + topk) * size_of::<u32>();
        let weights = tokens * heads * size_of::<f32>();
        query = query.max(wire::query_room(parts, tokens * heads, width, WireDtype::F32) + weights);
        answer = answer.max(wire::partials_room(parts, 0, 0, dtype) + tokens * topk * 8);
    }
    // A step of which more would travel at once is computed here.
    let size = |bytes: usize| bytes.min(wire::MESSAGE_BYTES_MAX) as u32;
    SessionSize { query_bytes_max: size(query), answer_bytes_max: size(answer), depth: DEPTH }
}

/// How the engine reaches holders, from its configuration.
fn options(config: &Config) -> RequesterOptions {
    let routes = &config.routes;
    let is_tcp = routes.transport == Domain::Tcp;
    RequesterOptions {
        name: format!("{}-routes", config.instance_id),
        preferred: routes.transport,
        tcp_listen: Some(routes.listen),
        // Half of it is a flaw of the configuration.
        tcp_tls: config.transfer_tls.files().unwrap_or_default(),
        send_bytes_per_s_max: routes.send_bytes_per_s_max,
        run_dir: (!is_tcp).then(|| PathBuf::from(&config.attach_dir)),
    }
}

impl Router {
    /// Nothing is started before a request needs it.
    pub(crate) fn new(config: &Config, model: &ModelConfig, registry: Registry) -> Self {
        let dtype = wire_dtype(config);
        // Each hole of a sequence has its own part and queries, turned its own way. Prompt tokens are counted for
        // each when a step is planned, and one more may be taken than there is budget for.
        let parts = config.running_requests_max as usize * HOLES_MAX;
        let tokens = config.prefill_chunk_tokens as usize + parts + HOLES_MAX;
        let shape = Shape {
            block_tokens: config.block_tokens,
            d_qk: model.row_width() as u32,
            kv_dtype: config.kv_dtype.name(),
            precision: config.attention_precision.to_wire(),
            size: session_size((parts, tokens, heads_of_rank(config, model)), model, dtype),
            ranks: config.routes.ranks,
        };
        let (requester, places) = (OnceCell::new(), DashMap::new());
        let call_timeout = Duration::from_millis(config.routes.call_timeout_ms.into());
        Router { options: options(config), registry, requester, shape, call_timeout, places }
    }

    async fn requester(&self) -> Result<&Requester, RequesterError> {
        let start = || async { Requester::start(self.options.clone(), &self.registry) };
        self.requester.get_or_try_init(start).await
    }

    /// Opens what a request wants to attend elsewhere: of each hole its spans, all at the same time.
    ///
    /// # Errors
    /// A status that says which holder refused, and why. The shares at the holders are given up then.
    pub(crate) async fn open(
        &self,
        namespace: Namespace,
        wanted: Vec<Vec<SpanRequest>>,
    ) -> Result<RoutedHoles, Status> {
        let began = Instant::now();
        let mut leases = Leases::default();
        let mut opening = Vec::with_capacity(wanted.len());
        for hole in &wanted {
            let mut spans = Vec::with_capacity(hole.len());
            for request in hole {
                let place = self.place(&request.node)?;
                leases.add(place.channel.clone(), request);
                spans.push(self.open_span(place, namespace, request));
            }
            opening.push(join_all(spans));
        }
        // One may take longer to be opened than the lease of another lasts.
        leases.renew();
        // All are waited for: a session that is being opened is not left half open.
        let holes = join_all(opening).await;
        let holes = holes.into_iter().map(|spans| spans.into_iter().collect());
        let holes = holes.collect::<Result<_, Status>>()?;
        let opening_us = began.elapsed().as_micros() as u64;
        Ok(RoutedHoles { holes, opening_us, _leases: leases })
    }

    async fn open_span(
        &self,
        place: Arc<Place>,
        namespace: Namespace,
        request: &SpanRequest,
    ) -> Result<RoutedSpan, Status> {
        self.opened(&place, namespace, request).await.map_err(|status| {
            let why =
                format!("cannot route queries to the node {}: {}", request.node, status.message());
            Status::new(status.code(), why)
        })
    }

    async fn opened(
        &self,
        place: &Place,
        namespace: Namespace,
        request: &SpanRequest,
    ) -> Result<RoutedSpan, Status> {
        let ranks = join_all(
            (0..self.shape.ranks).map(|rank| self.on_rank(place, rank, namespace, request)),
        );
        let ranks = ranks.await.into_iter().collect::<Result<_, Status>>()?;
        let rows = request.blocks * self.shape.block_tokens;
        Ok(RoutedSpan { ranks, first_block: request.first_block, rows })
    }

    /// Opens it for one rank.
    async fn on_rank(
        &self,
        place: &Place,
        rank: u32,
        namespace: Namespace,
        request: &SpanRequest,
    ) -> Result<RankRoute, Status> {
        let (session, is_first) = self.session(place, rank).await?;
        let open = v1::OpenRouteRequest {
            session: session.id(),
            tx: Some(request.tx.into()),
            namespace: namespace.0.to_vec(),
            precision: self.shape.precision.into(),
        };
        let opened = RoutesClient::new(place.channel.clone()).open_route(open).await?.into_inner();
        let Shape { block_tokens, d_qk, kv_dtype, .. } = self.shape;
        if (opened.block_tokens, opened.d_qk, opened.kv_dtype.as_str())
            != (block_tokens, d_qk, kv_dtype)
        {
            let why = "the rows of its blocks differ in shape from the rows of this engine";
            return Err(Status::failed_precondition(why));
        }
        let end = request.first_block.saturating_add(request.blocks);
        if opened.blocks < end {
            let held = opened.blocks;
            let why = format!("it holds only {held} of the {end} requested blocks");
            return Err(Status::failed_precondition(why));
        }
        Ok(RankRoute { session, route: opened.route, pins: opened.pins_digest, is_first })
    }

    /// A rank's session with a node: the one that is there, unless it is lost; and whether that was waited
    /// for.
    async fn session(&self, place: &Place, rank: u32) -> Result<(Arc<Session>, bool), Status> {
        let channel = &place.channel;
        let session = &place.sessions[rank as usize];
        // Who waits for one that is being made waits as long as who makes it.
        let (mut place, is_first) = match session.try_lock() {
            Ok(free) => (free, false),
            Err(_) => (session.lock().await, true),
        };
        match place.take() {
            Some(session) if !session.is_lost() => {
                return Ok((Arc::clone(place.insert(session)), is_first));
            }
            Some(lost) => close(channel.clone(), lost.id()),
            None => {}
        }
        let failed = |error: RequesterError| Status::unavailable(with_causes(&error));
        let requester = self.requester().await.map_err(failed)?;
        let prepared = requester.prepare(self.shape.size).map_err(failed)?;
        let SessionSize { query_bytes_max, answer_bytes_max, depth } = prepared.size();
        let open = v1::OpenRouteSessionRequest {
            endpoint: requester.endpoint(),
            answers_region: prepared.answers_region(),
            answer_bytes_max,
            answer_imm: prepared.answer_imm(),
            query_bytes_max,
            depth,
            rank,
        };
        let opened = RoutesClient::new(channel.clone()).open_session(open).await?.into_inner();
        let grant = Grant {
            session: opened.session,
            endpoint: opened.endpoint,
            queries_region: opened.queries_region,
            query_imm: opened.query_imm,
        };
        let reached = async {
            let session = requester.open(prepared, &grant)?;
            session.reach(self.call_timeout).await?;
            Ok(session)
        };
        let session = reached.await.map_err(|error| {
            close(channel.clone(), grant.session);
            failed(error)
        })?;
        Ok((Arc::clone(place.insert(session)), true))
    }

    fn place(&self, node: &str) -> Result<Arc<Place>, Status> {
        // A holder that is gone leaves nothing behind.
        self.places.retain(|of, place| {
            of == node || Arc::strong_count(place) > 1 || place.has_live_session()
        });
        let place = self.places.entry(node.to_owned()).or_try_insert_with(|| {
            let channel = connect(node, self.call_timeout)?;
            let sessions = (0..self.shape.ranks).map(|_| tokio::sync::Mutex::default()).collect();
            Ok::<_, Status>(Arc::new(Place { channel, sessions }))
        })?;
        Ok(Arc::clone(&place))
    }

    /// Query and partial bytes, as they were counted here.
    #[cfg(test)]
    pub(crate) fn metrics(&self) -> &kvasir_route::metrics::RequesterMetrics {
        self.requester.get().expect("something was routed").metrics()
    }
}

/// Whose query rows go in one message.
pub(crate) fn heads_of_rank(config: &Config, model: &ModelConfig) -> usize {
    model.heads / config.routes.ranks as usize
}

/// Queries and outputs travel as the cache holds its rows.
pub(crate) fn wire_dtype(config: &Config) -> WireDtype {
    WireDtype::named(config.kv_dtype.name()).expect("the cache's types travel")
}

/// Tells a holder of a session that is lost on this side. Should it not hear of it, it ends the session when
/// it loses this engine.
fn close(channel: Channel, session: u64) {
    tokio::spawn(async move {
        let request = v1::CloseRouteSessionRequest { session };
        let _ = RoutesClient::new(channel).close_session(request).await;
    });
}

/// What the engine says of its queries. Under selection a token brings its indexer's queries too and the numbers
/// of its rows, and rows and scores come back: each query row has its share of that.
pub(crate) fn routed_rows(config: &Config, model: &ModelConfig) -> v1::RoutedRows {
    let dtype = wire_dtype(config);
    let share = |bytes: usize| bytes.div_ceil(heads_of_rank(config, model));
    let (query, partial) = match model.indexer {
        None => (0, 0),
        Some(IndexerConfig { heads, width, topk }) => {
            let topk = topk.min(model.positions_max as usize);
            let scores = heads * (width + 1) * size_of::<f32>();
            (share(scores + topk * size_of::<u32>()), share(topk * 8))
        }
    };
    v1::RoutedRows {
        heads: heads_of_rank(config, model) as u32,
        query_bytes: (wire::query_bytes(1, model.row_width(), dtype) + query) as u32,
        partial_bytes: (wire::partial_bytes(1, model.rank, dtype) + partial) as u32,
    }
}

fn connect(node: &str, timeout: Duration) -> Result<Channel, Status> {
    let endpoint = Endpoint::from_shared(format!("http://{node}")).map_err(|error| {
        Status::invalid_argument(format!("invalid node address {node:?}: {error}"))
    })?;
    Ok(endpoint.connect_timeout(timeout).timeout(timeout).connect_lazy())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[tokio::test]
    async fn a_holder_that_no_request_uses_is_forgotten() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models");
        let model = ModelConfig::read(&folder.join("tiny-deepseek-v2")).expect("the bundled model");
        let router = Router::new(&Config::default(), &model, Registry::new());
        let place = |node| router.place(node).expect("an address");
        let first = place("127.0.0.1:1");
        assert!(Arc::ptr_eq(&first, &place("127.0.0.1:1")), "a holder has one place");
        drop(place("127.0.0.1:2"));
        drop(place("127.0.0.1:3"));
        assert!(router.places.contains_key("127.0.0.1:1"), "a request uses it");
        assert!(!router.places.contains_key("127.0.0.1:2"));
        drop(first);
        drop(place("127.0.0.1:3"));
        assert_eq!(router.places.len(), 1);
    }
}
