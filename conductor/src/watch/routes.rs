//! What is answered where. All of it is read, nothing is changed; there are no keys, so that the
//! address should be one that only operators reach.

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde::Deserialize;
use serde_json::{Value, json};

use super::recent::recent;
use crate::http::Front;
use crate::openai::shown;
use crate::serve::{Record, Recorder, unix_ms};

/// Decisions in a list, unless it is asked for more.
const LISTED: usize = 50;
/// What the page may load: itself.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'";
const PAGE: &str = include_str!("page.html");

/// What is shown.
#[derive(Debug)]
pub(crate) struct Watch {
    pub front: Arc<Front>,
    pub started: Instant,
}

impl Watch {
    fn recorder(&self) -> &Recorder {
        self.front.serving.recorder()
    }
}

type Shared = State<Arc<Watch>>;

pub(crate) fn router(watch: Arc<Watch>) -> Router {
    Router::new()
        .route("/", get(page))
        .route("/state", get(state))
        .route("/decisions", get(decisions))
        .route("/decisions/{request_id}", get(decision))
        .route("/decisions/{request_id}/inputs", get(inputs))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(|State(watch): Shared| async move { watch.front.readiness() }))
        .route("/metrics", get(|State(watch): Shared| async move { watch.front.metrics_text() }))
        .fallback(nothing)
        .with_state(watch)
}

async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    (headers, PAGE).into_response()
}

async fn state(State(watch): Shared) -> axum::Json<Value> {
    let records = watch.recorder().latest();
    let now = unix_ms();
    let metrics = &watch.front.metrics;
    let tokens = |kind| metrics.tokens.with_label_values(&[kind]).get();
    axum::Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "at_unix_ms": now,
        "uptime_seconds": watch.started.elapsed().as_secs(),
        "ready": watch.front.unready().is_none(),
        "choices_in_flight": metrics.choices_in_flight.get(),
        "choices_queued": metrics.waiting_now(),
        "tokens": {
            "prompt": tokens("prompt"),
            "cached": tokens("cached"),
            "generated": tokens("generated"),
        },
        "recent": recent(&records, watch.recorder().kept(), now),
        "cluster": watch.front.cluster.overview(),
        "backends": watch.front.proxies.overview(),
    }))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    /// So many of the latest.
    last: Option<usize>,
    /// With all candidates.
    #[serde(default)]
    full: bool,
}

async fn decisions(
    State(watch): Shared,
    asked: Result<Query<Asked>, QueryRejection>,
) -> Result<axum::Json<Value>, Response> {
    let Query(Asked { last, full }) = asked.map_err(|rejection| {
        let why = format!(
            "{}; `last` must be a number, `full` must be true or false",
            rejection.body_text()
        );
        refuse(StatusCode::BAD_REQUEST, &why)
    })?;
    let records = watch.recorder().latest();
    let show = |record: &Arc<Record>| if full { record.full() } else { record.summary() };
    let shown: Vec<Value> = records.iter().take(last.unwrap_or(LISTED)).map(show).collect();
    Ok(axum::Json(json!({ "history_max": watch.recorder().kept(), "decisions": shown })))
}

async fn decision(
    State(watch): Shared,
    request_id: Result<Path<String>, PathRejection>,
) -> Result<axum::Json<Value>, Response> {
    let Path(request_id) =
        request_id.map_err(|rejection| refuse(StatusCode::BAD_REQUEST, &rejection.body_text()))?;
    let records = watch.recorder().latest();
    let found: Vec<Value> = of_request(&records, &request_id).map(Record::full).collect();
    if found.is_empty() {
        let why = format!(
            "no decision for the request {:?} is among the latest {}: it is older, another \
             conductor served it, or it was refused before it was placed",
            shown(&request_id),
            records.len(),
        );
        return Err(refuse(StatusCode::NOT_FOUND, &why));
    }
    Ok(axum::Json(json!({ "decisions": found })))
}

/// Of each decision for a request what it was taken from, as `kvasir replay --decision` reads it.
async fn inputs(
    State(watch): Shared,
    request_id: Result<Path<String>, PathRejection>,
) -> Result<axum::Json<Value>, Response> {
    let Path(request_id) =
        request_id.map_err(|rejection| refuse(StatusCode::BAD_REQUEST, &rejection.body_text()))?;
    let records = watch.recorder().latest();
    let found: Vec<_> = of_request(&records, &request_id).filter_map(Record::recorded).collect();
    if found.is_empty() {
        let why = format!(
            "the inputs of decisions for the request {:?} are not recorded: set \
             `decision_inputs_bytes_max` of the conductor",
            shown(&request_id),
        );
        return Err(refuse(StatusCode::NOT_FOUND, &why));
    }
    Ok(axum::Json(json!({ "decisions": found })))
}

/// The decisions for a request, in the order in which they were taken.
fn of_request<'a>(
    latest_first: &'a [Arc<Record>],
    request_id: &'a str,
) -> impl Iterator<Item = &'a Record> {
    let in_order = latest_first.iter().rev().map(|record| &**record);
    in_order.filter(move |record| *record.asked.request_id == *request_id)
}

async fn nothing(request: Request) -> Response {
    let path = shown(request.uri().path());
    refuse(StatusCode::NOT_FOUND, &format!("the path {path:?} does not exist; see /"))
}

fn refuse(status: StatusCode, why: &str) -> Response {
    (status, axum::Json(json!({ "error": why }))).into_response()
}
