//! What is answered where.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::Bodies;
use super::identity::{RequestId, identify};
use crate::cluster::Cluster;
use crate::metrics::Metrics;
use crate::openai::{self, ApiError, Arrival, Limits};
use crate::serve::{Failure, Serving};
use crate::text::Texts;

/// What the routes work with.
#[derive(Debug)]
pub(crate) struct Front {
    pub texts: Texts,
    pub serving: Arc<Serving>,
    pub cluster: Cluster,
    pub metrics: Arc<Metrics>,
    pub bodies: Bodies,
    pub limits: Limits,
    pub request_deadline: Duration,
    pub started_unix_s: u64,
    /// Cancelled when the conductor shuts down: no new requests.
    pub draining: CancellationToken,
}

type Shared = State<Arc<Front>>;

pub(crate) fn router(front: Arc<Front>) -> Router {
    let metrics = Arc::clone(&front.metrics);
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(complete))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics_text))
        .route("/version", get(version))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(metrics, identify))
        .with_state(front)
}

async fn chat(State(front): Shared, request: Request) -> Result<Response, ApiError> {
    let (arrival, request) = admit(&front, request)?;
    let (parts, body) = request.into_parts();
    // The permits hold the body's place until the request is answered or streams.
    let (body, _permits) = front.bodies.read(&parts.headers, body).await?;
    openai::chat(&front, arrival, body).await
}

async fn complete(State(front): Shared, request: Request) -> Result<Response, ApiError> {
    let (arrival, request) = admit(&front, request)?;
    let (parts, body) = request.into_parts();
    let (body, _permits) = front.bodies.read(&parts.headers, body).await?;
    openai::complete(&front, arrival, body).await
}

fn admit(front: &Front, request: Request<Body>) -> Result<(Arrival, Request<Body>), ApiError> {
    if front.draining.is_cancelled() {
        return Err(Failure::Draining.into());
    }
    let id = request.extensions().get::<RequestId>();
    let request_id = id.map_or_else(|| "".into(), |id| Arc::clone(&id.0));
    let explain = request.headers().contains_key("x-kvasir-explain");
    Ok((Arrival { request_id, at: Instant::now(), explain }, request))
}

async fn models(State(front): Shared) -> Response {
    let data: Vec<_> = front.texts.names().map(|name| describe(&front, name)).collect();
    axum::Json(json!({"object": "list", "data": data})).into_response()
}

async fn model(State(front): Shared, Path(name): Path<String>) -> Result<Response, ApiError> {
    if front.texts.model(&name).is_none() {
        return Err(ApiError::model_not_found(&name));
    }
    Ok(axum::Json(describe(&front, &name)).into_response())
}

fn describe(front: &Front, name: &str) -> serde_json::Value {
    let served = front.cluster.models().into_iter().find(|served| &*served.name == name);
    json!({
        "id": name,
        "object": "model",
        "created": front.started_unix_s,
        "owned_by": "kvasir",
        "max_model_len": served.map(|served| served.context_tokens),
    })
}

async fn readyz(State(front): Shared) -> Response {
    let not_ready = |why: String| (StatusCode::SERVICE_UNAVAILABLE, why + "\n").into_response();
    if front.draining.is_cancelled() {
        return not_ready("shutting down".to_owned());
    }
    if !front.cluster.is_ready(front.texts.names()) {
        let why = "no model of the configuration is served: engines to prefill and decode it must be attached";
        return not_ready(why.to_owned());
    }
    "ready\n".into_response()
}

async fn metrics_text(State(front): Shared) -> Response {
    let held = i64::try_from(front.bodies.held_bytes()).unwrap_or(i64::MAX);
    front.metrics.bodies_bytes.set(held);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], front.metrics.text()).into_response()
}

async fn version() -> Response {
    axum::Json(json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

async fn not_found(request: Request) -> ApiError {
    let path = request.uri().path();
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", format!("There is nothing at {path:?}."))
}

async fn wrong_method(method: Method, request: Request) -> ApiError {
    let message = format!("{method} is not allowed at {:?}.", request.uri().path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}
