//! The port: gRPC and, beside it, `/metrics`, `/healthz` and `/readyz`.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::get;
use kvasir_proto::v1::engine_server::EngineServer;
use prometheus::{Registry, TextEncoder};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

use crate::inbox::Inbox;
use crate::service::EngineService;

/// Calls that one connection may have open beyond those that the engine admits, so that who comes
/// when it is full is told so, and does not wait unseen for a stream.
const SPARE_STREAMS: u32 = 256;
/// A connection that is silent for so long is asked whether it lives, and has so long to answer: a
/// conductor that hangs or is cut off leaves no requests running for ever.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Serves until `stopped`.
///
/// # Errors
/// When the listener fails.
pub(crate) async fn serve<A: Send + 'static>(
    listener: TcpListener,
    service: EngineService<A>,
    registries: Vec<Registry>,
    stopped: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let streams_max = service.shared.admission.requests_max().saturating_add(SPARE_STREAMS);
    let pages = pages(Arc::clone(&service.inbox), registries);
    let grpc = Routes::new(EngineServer::new(service)).into_axum_router();
    // A token is a small message: it must not wait for the next one.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    Server::builder()
        .accept_http1(true)
        .max_concurrent_streams(streams_max)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .add_routes(Routes::from(grpc.merge(pages)))
        .serve_with_incoming_shutdown(incoming, stopped.cancelled_owned())
        .await
}

fn pages<A: Send + 'static>(inbox: Arc<Inbox<A>>, registries: Vec<Registry>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz::<A>).with_state(inbox))
        .route("/metrics", get(metrics).with_state(registries))
}

async fn readyz<A>(State(inbox): State<Arc<Inbox<A>>>) -> (StatusCode, &'static str) {
    if inbox.is_stopping() {
        (StatusCode::SERVICE_UNAVAILABLE, "the engine is stopping\n")
    } else if inbox.is_attached() {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the engine is not attached to a store node\n")
    }
}

async fn metrics(State(registries): State<Vec<Registry>>) -> impl IntoResponse {
    let families: Vec<_> = registries.iter().flat_map(Registry::gather).collect();
    let encoded = TextEncoder::new().encode_to_string(&families);
    encoded.map_err(|error| (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}
