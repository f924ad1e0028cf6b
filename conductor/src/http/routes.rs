//! What is answered where.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use bytes::Bytes;
use serde_json::json;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::body::Bodies;
use super::class::class_of;
use super::identity::{RequestId, identify};
use super::objectives::ObjectiveBounds;
use super::priority::claim_of;
use super::steering::steered;
use super::trace::Trace;
use crate::access::{Access, Admission, Caller, OverQuota};
use crate::cluster::Cluster;
use crate::contexts::{self, Contexts};
use crate::metrics::Metrics;
use crate::openai::{self, ApiError, Arrival, Limits, shown};
use crate::openapi::openapi_document;
use crate::proxy::{self, Endpoint, Proxies};
use crate::serve::{CacheClass, Failure, Serving};
use crate::text::Texts;

/// What the routes work with.
#[derive(Debug)]
pub(crate) struct Front {
    pub texts: Texts,
    pub proxies: Arc<Proxies>,
    pub serving: Arc<Serving>,
    pub cluster: Cluster,
    pub metrics: Arc<Metrics>,
    pub contexts: Contexts,
    pub bodies: Bodies,
    pub limits: Limits,
    pub request_deadline: Duration,
    pub objectives: ObjectiveBounds,
    pub steering_enabled: bool,
    pub chunk_reuse_enabled: bool,
    pub started_unix_s: u64,
    /// Absent where everybody is answered.
    pub access: Option<Arc<Access>>,
    /// Cancelled when the conductor shuts down: no new requests.
    pub draining: CancellationToken,
}

impl Front {
    /// A tenant has used up a quota.
    pub(crate) fn over_quota(&self, over: &OverQuota) -> ApiError {
        self.metrics.over_quota.with_label_values(&[over.label()]).inc();
        ApiError::over_quota(over, self.cluster.requests_end_in_ms(1))
    }

    /// Why no request should come now. As long as nodes are still saying what they hold, a request
    /// for what they serve would be computed anew: that backends answer for other models does not
    /// help it. Once they have, one model that is served is enough, whoever serves it.
    pub(crate) fn unready(&self) -> Option<&'static str> {
        if self.draining.is_cancelled() {
            return Some("shutting down");
        }
        if !self.cluster.is_warm() {
            return Some("waiting for the snapshots of the store nodes");
        }
        let served = self.cluster.serves(self.texts.names()) || self.proxies.is_ready();
        (!served).then_some(
            "no configured model is available: attach engines that prefill and decode, or start a backend",
        )
    }

    /// For probes.
    pub(crate) fn readiness(&self) -> Response {
        match self.unready() {
            None => "ready\n".into_response(),
            Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
        }
    }

    /// For Prometheus.
    pub(crate) fn metrics_text(&self) -> Response {
        let held = i64::try_from(self.bodies.held_bytes()).unwrap_or(i64::MAX);
        self.metrics.bodies_bytes.set(held);
        let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
        ([(header::CONTENT_TYPE, kind)], self.metrics.text()).into_response()
    }

    /// Whose request it is, where keys are asked for.
    fn caller(&self, headers: &HeaderMap) -> Result<Option<Caller>, ApiError> {
        self.access.as_ref().map(|access| access.caller(headers)).transpose()
    }
}

type Shared = State<Arc<Front>>;

pub(crate) fn router(front: Arc<Front>) -> Router {
    let metrics = Arc::clone(&front.metrics);
    let routes = routes().into_iter();
    routes
        .fold(Router::new(), |router, (path, route)| router.route(path, route))
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(metrics, identify))
        .with_state(front)
}

/// All there are; each is in the OpenAPI document.
fn routes() -> [(&'static str, MethodRouter<Arc<Front>>); 13] {
    [
        ("/v1/chat/completions", post(chat)),
        ("/v1/completions", post(complete)),
        ("/v1/responses", post(create_response)),
        ("/v1/embeddings", post(embed)),
        ("/v1/contexts", get(list_contexts).post(create_context)),
        ("/v1/contexts/{id}", get(context).post(extend_context).delete(delete_context)),
        ("/v1/models", get(models)),
        ("/v1/models/{*name}", get(model)),
        ("/healthz", get(|| async { "ok\n" })),
        ("/readyz", get(readyz)),
        ("/metrics", get(metrics_text)),
        ("/version", get(version)),
        ("/openapi.json", get(openapi)),
    ]
}

async fn chat(State(front): Shared, request: Request) -> Result<Response, ApiError> {
    let (arrival, body, _permits) = admit(&front, request).await?;
    let admission = arrival.admission.clone();
    let answered = match proxied(&front, &body).await? {
        Some(model) => proxy::forward(&front, arrival, Endpoint::Chat, &model, &body).await,
        None => openai::chat(&front, arrival, body).await,
    };
    settle(admission.as_deref(), answered)
}

async fn complete(State(front): Shared, request: Request) -> Result<Response, ApiError> {
    let (arrival, body, _permits) = admit(&front, request).await?;
    let admission = arrival.admission.clone();
    let answered = match proxied(&front, &body).await? {
        Some(model) => proxy::forward(&front, arrival, Endpoint::Completions, &model, &body).await,
        None => openai::complete(&front, arrival, body).await,
    };
    settle(admission.as_deref(), answered)
}

async fn create_response(State(front): Shared, request: Request) -> Result<Response, ApiError> {
    let (arrival, body, _permits) = admit(&front, request).await?;
    let admission = arrival.admission.clone();
    let answered = match proxied(&front, &body).await? {
        Some(model) => proxy::forward(&front, arrival, Endpoint::Responses, &model, &body).await,
        None => openai::create_response(&front, arrival, body).await,
    };
    settle(admission.as_deref(), answered)
}

async fn embed(State(front): Shared, request: Request) -> Result<Response, ApiError> {
    let (arrival, body, _permits) = admit(&front, request).await?;
    let admission = arrival.admission.clone();
    let answered = match proxied(&front, &body).await? {
        Some(model) => proxy::forward(&front, arrival, Endpoint::Embeddings, &model, &body).await,
        None => Err(no_embeddings(&front, &body)),
    };
    settle(admission.as_deref(), answered)
}

fn no_embeddings(front: &Front, body: &[u8]) -> ApiError {
    match proxy::model_of(body) {
        None => ApiError::invalid("model", "The body must be a JSON object with a `model`."),
        Some(model) if front.texts.model(&model).is_some() => ApiError::unsupported(
            "model",
            "This model generates text; it does not support embeddings.",
        ),
        Some(model) => ApiError::model_not_found(&model),
    }
}

/// The model that is asked for, if it is one that others serve.
async fn proxied(front: &Front, body: &Bytes) -> Result<Option<String>, ApiError> {
    if front.proxies.is_empty() {
        return Ok(None);
    }
    let parse = |body: &[u8]| Ok(proxy::model_of(body));
    let model = openai::off_reactor_when_large(front, body.clone(), parse).await?;
    Ok(model.filter(|model| front.proxies.has(model)))
}

/// A request that may be served, with its body. The permits hold the body's place until the request
/// is answered or streams.
async fn admit(front: &Front, request: Request) -> Result<Admitted, ApiError> {
    let (parts, body) = request.into_parts();
    let arrival = match arrive(front, &parts) {
        Ok(arrival) => arrival,
        Err(error) => return Err(front.bodies.refuse(body, error).await),
    };
    let read = front.bodies.read(&parts.headers, body).await;
    let (body, permits) = settle(arrival.admission.as_deref(), read)?;
    Ok((arrival, body, permits))
}

/// What gets an error in place of an answer uses no quota. One whose client has left is not heard of
/// here: what was done for it counts.
fn settle<T>(admission: Option<&Admission>, result: Result<T, ApiError>) -> Result<T, ApiError> {
    if let (Some(admission), Err(_)) = (admission, &result) {
        admission.give_all_back();
    }
    result
}

type Admitted = (Arrival, Bytes, Option<OwnedSemaphorePermit>);

fn arrive(front: &Front, request: &Parts) -> Result<Arrival, ApiError> {
    if front.draining.is_cancelled() {
        return Err(Failure::Draining.into());
    }
    let caller = front.caller(&request.headers)?;
    let objectives = front.objectives.of(&request.headers)?;
    let steering = steered(&request.headers, front.steering_enabled)?;
    let default = caller.as_ref().map_or(CacheClass::default(), |caller| caller.cache_class);
    let cache = class_of(&request.headers, default)?;
    let tenant = caller.map(|caller| caller.tenant);
    let tenant_salt = tenant.as_ref().map_or_else(|| "".into(), |tenant| tenant.salt());
    let claim = tenant.as_ref().map(|tenant| claim_of(&request.headers, tenant)).transpose()?;
    let admission = tenant.map(|tenant| tenant.admit()).transpose();
    let admission = admission.map_err(|over| front.over_quota(&over))?.map(Arc::new);
    let trace = request.extensions.get::<Trace>().cloned();
    let id = request.extensions.get::<RequestId>();
    let request_id = id.map_or_else(|| "".into(), |id| Arc::clone(&id.0));
    let explain = request.headers.contains_key("x-kvasir-explain");
    let at = Instant::now();
    Ok(Arrival {
        request_id,
        at,
        explain,
        objectives,
        steering,
        cache,
        trace,
        admission,
        tenant_salt,
        claim,
    })
}

async fn create_context(State(front): Shared, request: Request) -> Result<Response, ApiError> {
    let (arrival, body, _permits) = admit(&front, request).await?;
    let admission = arrival.admission.clone();
    let answered = match proxied(&front, &body).await? {
        Some(_) => Err(ApiError::unsupported(
            "model",
            "A backend serves this model; contexts need a model of attached engines.",
        )),
        None => Box::pin(contexts::create(&front, arrival, body)).await,
    };
    settle(admission.as_deref(), answered)
}

async fn list_contexts(
    State(front): Shared,
    page: Result<Query<contexts::Page>, QueryRejection>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrival = arrive(&front, &request.into_parts().0)?;
    let admission = arrival.admission.clone();
    let answered = match page {
        Ok(Query(page)) => contexts::list(&front, arrival, page).await,
        Err(rejection) => {
            let why = rejection.body_text();
            let message =
                format!("{}: the supported parameters are `limit` and `after`.", shown(&why));
            Err(ApiError::new(StatusCode::BAD_REQUEST, "unknown_parameter", message))
        }
    };
    settle(admission.as_deref(), answered)
}

async fn context(
    State(front): Shared,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrival = arrive(&front, &request.into_parts().0)?;
    let admission = arrival.admission.clone();
    let answered = contexts::one(&front, arrival, &name_of(id)).await;
    settle(admission.as_deref(), answered)
}

async fn extend_context(
    State(front): Shared,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Response, ApiError> {
    let (arrival, body, _permits) = admit(&front, request).await?;
    let admission = arrival.admission.clone();
    let answered = contexts::extend(&front, arrival, &name_of(id), body).await;
    settle(admission.as_deref(), answered)
}

async fn delete_context(
    State(front): Shared,
    id: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Response, ApiError> {
    let arrival = arrive(&front, &request.into_parts().0)?;
    let admission = arrival.admission.clone();
    let answered = contexts::remove(&front, arrival, &name_of(id)).await;
    settle(admission.as_deref(), answered)
}

/// A name that is no UTF-8 is nobody's.
fn name_of(path: Result<Path<String>, PathRejection>) -> String {
    path.map_or_else(|_| "\u{fffd}".to_owned(), |Path(name)| name)
}

async fn models(State(front): Shared, headers: HeaderMap) -> Result<Response, ApiError> {
    front.caller(&headers)?;
    let names = front.texts.names().chain(front.proxies.names());
    let data: Vec<_> = names.map(|name| describe(&front, name)).collect();
    Ok(axum::Json(json!({"object": "list", "data": data})).into_response())
}

async fn model(
    State(front): Shared,
    headers: HeaderMap,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    front.caller(&headers)?;
    let name = name_of(name);
    if front.texts.model(&name).is_none() && !front.proxies.has(&name) {
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
    front.readiness()
}

async fn metrics_text(State(front): Shared) -> Response {
    front.metrics_text()
}

async fn version() -> Response {
    axum::Json(json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

async fn openapi() -> Response {
    let kind = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, kind)], openapi_document()).into_response()
}

async fn not_found(request: Request) -> ApiError {
    let path = shown(request.uri().path());
    ApiError::new(
        StatusCode::NOT_FOUND,
        "unknown_url",
        format!("The path {path:?} does not exist."),
    )
}

async fn wrong_method(method: Method, request: Request) -> ApiError {
    let (method, path) = (shown(method.as_str()), shown(request.uri().path()));
    let message = format!("The method {method} is not allowed for {path:?}.");
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_routes_are_those_of_the_document() {
        let document: serde_json::Value =
            serde_json::from_str(openapi_document()).expect("the document is JSON");
        let paths = document["paths"].as_object().expect("paths");
        let documented: BTreeSet<&str> = paths.keys().map(String::as_str).collect();
        let served: Vec<String> =
            routes().iter().map(|(path, _)| path.replace("{*", "{")).collect();
        assert_eq!(served.iter().map(String::as_str).collect::<BTreeSet<_>>(), documented);
    }
}
