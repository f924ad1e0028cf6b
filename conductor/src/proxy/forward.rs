//! One request: read for its model and its prompt, changed in what is the server's to say, sent on.

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body_util::Full;
use serde::Deserialize;
use tokio::time::{Instant, timeout_at};

use super::affinity::Beginning;
use super::backend::Flight;
use super::fields::Fields;
use super::passing::{self, Held, Told, Usage};
use super::upstream::{AskError, Pieces};
use super::{Chosen, Nobody, Pool, Proxies};
use crate::http::Front;
use crate::openai::{ApiError, Arrival, off_reactor_when_large, salted};
use crate::serve::{Asked, Failure};

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
    Responses,
    Embeddings,
}

impl Endpoint {
    pub(crate) const ALL: [Endpoint; 4] =
        [Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Embeddings];

    pub(crate) fn path(self) -> &'static str {
        match self {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
            Endpoint::Responses => "/v1/responses",
            Endpoint::Embeddings => "/v1/embeddings",
        }
    }

    /// Where the prompt stands.
    fn prompt(self) -> &'static str {
        match self {
            Endpoint::Chat => "messages",
            Endpoint::Completions => "prompt",
            Endpoint::Responses | Endpoint::Embeddings => "input",
        }
    }
}

/// The model that a body asks for, if it can be read so far.
pub(crate) fn model_of(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Asked {
        model: String,
    }
    serde_json::from_slice::<Asked>(body).ok().map(|asked| asked.model)
}

/// Statuses of a server that another one may do better.
const ELSEWHERE: [StatusCode; 4] = [
    StatusCode::TOO_MANY_REQUESTS,
    StatusCode::BAD_GATEWAY,
    StatusCode::SERVICE_UNAVAILABLE,
    StatusCode::GATEWAY_TIMEOUT,
];

/// What a server that all tenants share must not be asked for: to keep something, to go on with what is kept,
/// or to work on when nobody waits.
const STATEFUL: [&str; 3] = ["background", "previous_response_id", "conversation"];
const LATE: Failure = Failure::Deadline { phase: "waiting for a backend" };
/// Of the prompt, what is looked at for the choice of a server.
const CHOSEN_BY_BYTES: usize = 256 << 10;

/// Passes a request on to a server of its model. The answer is the server's own, good or bad.
///
/// # Errors
/// [`ApiError`] when no server could be asked, none has answered by the deadline, or a quota is used up.
pub(crate) async fn forward(
    front: &Front,
    arrival: Arrival,
    endpoint: Endpoint,
    model: &str,
    body: &Bytes,
) -> Result<Response, ApiError> {
    let proxies = &front.proxies;
    let pool = proxies.models.get(model).ok_or_else(|| ApiError::model_not_found(model))?;
    let running = front.serving.running();
    let deadline = arrival.at + front.request_deadline;
    let late = || ApiError::from(LATE);
    let read = timeout_at(deadline, read(front, &arrival, endpoint, body.clone())).await;
    let mut fields = read.map_err(|_| late())??;
    let prompt = fields.get(endpoint.prompt()).unwrap_or_default().as_bytes();
    let prompt_tokens = passing::tokens_of_bytes(prompt.len() as u64);
    if let Some(admission) = &arrival.admission {
        admission.take_prompt(prompt_tokens).map_err(|over| front.over_quota(&over))?;
    }
    let seen = &prompt[..prompt.len().min(CHOSEN_BY_BYTES)];
    let key = fields.get("prompt_cache_key").filter(|key| key.starts_with('"'));
    let beginning = pool.affinity.beginning(&arrival.tenant_salt, seen, key);
    let (prompt_bytes, mut tried, mut broke, mut last) = (prompt.len(), Vec::new(), None, None);
    let trail = front.serving.recorder().trail(Asked {
        request_id: Arc::clone(&arrival.request_id),
        model: model.into(),
        prompt_tokens: u32::try_from(prompt_tokens).unwrap_or(u32::MAX),
        cache: arrival.cache,
        is_schedule_only: false,
    });
    let (answer, flight) = loop {
        let chosen = choose(pool, &beginning, &tried, broke);
        if chosen.is_ok() || last.is_none() {
            let failed: Vec<usize> = tried.iter().chain(&broke).copied().collect();
            trail.passed_on(|| {
                pool.explain(chosen.as_ref().map_err(|of| *of), &failed, prompt_bytes)
            });
        }
        let (at, flight) = match chosen {
            Ok(Chosen { at, flight, .. }) => (at, flight),
            Err(nobody) => break last.ok_or_else(|| refusal(front, pool, nobody))?,
        };
        fields.set("model", &flight.backend().model());
        let sent = send(&arrival, endpoint, fields.to_bytes(), &flight);
        match timeout_at(deadline, sent).await {
            Ok(Ok(answer)) => {
                count(proxies, model, answer.status().as_str());
                let status = answer.status();
                if !status.is_success() {
                    trail.ended(&format!("the backend returned {status}"), None);
                }
                let answered = (answer, flight);
                if !ELSEWHERE.contains(&status) {
                    break answered;
                }
                tried.push(at);
                last = Some(answered);
            }
            Ok(Err(error)) => {
                let unreached = matches!(error, AskError::Unreached(_));
                tracing::warn!(url = flight.backend().url(), %error, "a request to a backend failed");
                count(proxies, model, if unreached { "unreachable" } else { "interrupted" });
                trail.ended(&error.to_string(), None);
                if unreached {
                    flight.backend().lost();
                    tried.push(at);
                    continue;
                }
                // Servers close connections that are idle, and may do so just now; but a request that
                // brings servers down is not to meet all of them.
                if broke.replace(at).is_some() {
                    let reason = "connections to backends failed twice".to_owned();
                    return Err(Failure::Interrupted { reason }.into());
                }
            }
            Err(_) => {
                count(proxies, model, "timeout");
                trail.ended(LATE.label(), None);
                return Err(late());
            }
        }
    };
    if let Some(admission) = arrival.admission.as_ref().filter(|_| !answer.status().is_success()) {
        // As for errors of our own: it was no answer.
        admission.give_all_back();
    }
    let usage = Usage::new(arrival.admission, prompt_tokens);
    let told = Told::new(trail.latest_record(), arrival.at, is_stream(&answer));
    Ok(pass(answer, Held { _flight: flight, usage, told, _running: running }, deadline))
}

/// A server that has not been tried; the one that broke off is asked again only when there is no other.
fn choose(
    pool: &Pool,
    beginning: &Beginning,
    tried: &[usize],
    broke: Option<usize>,
) -> Result<Chosen, Nobody> {
    if let Some(broke) = broke {
        let others = [tried, &[broke]].concat();
        if let Ok(chosen) = pool.choose(beginning, &others) {
            return Ok(chosen);
        }
    }
    pool.choose(beginning, tried)
}

/// Its first piece is its first token.
fn is_stream(answer: &Response<Pieces>) -> bool {
    let kind = answer.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// The request as it is passed on, but for its model.
async fn read(
    front: &Front,
    arrival: &Arrival,
    endpoint: Endpoint,
    body: Bytes,
) -> Result<Fields, ApiError> {
    let parse = |body: &[u8]| {
        let fields = serde_json::from_slice::<Fields>(body);
        fields.map_err(|error| {
            ApiError::invalid("body", format!("The body is not a JSON object: {error}."))
        })
    };
    let mut fields = off_reactor_when_large(front, body, parse).await?;
    if endpoint == Endpoint::Responses {
        if let Some(name) = STATEFUL.into_iter().find(|name| fields.has(name)) {
            let neutral = name == "background" && fields.get(name) == Some("false");
            if !neutral {
                let why = format!("Responses are not stored, so `{name}` is not supported.");
                return Err(ApiError::unsupported(name, why));
            }
        }
        fields.set("store", &false);
    }
    if !arrival.tenant_salt.is_empty() {
        // Servers that know it keep caches apart by it: what the client chooses is within its tenant's.
        let own = fields.get("cache_salt").and_then(|own| serde_json::from_str::<String>(own).ok());
        let salt = salted(&arrival.tenant_salt, own.as_deref().filter(|own| !own.is_empty()));
        fields.set("cache_salt", &&*salt);
    }
    Ok(fields)
}

fn count(proxies: &Proxies, model: &str, result: &str) {
    proxies.counts.requests.with_label_values(&[model, result]).inc();
}

async fn send(
    arrival: &Arrival,
    endpoint: Endpoint,
    body: Bytes,
    flight: &Flight,
) -> Result<Response<Pieces>, AskError> {
    let mut request = Request::new(Full::new(body));
    *request.method_mut() = Method::POST;
    *request.uri_mut() = flight.backend().uri(endpoint).clone();
    let headers = request.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Ok(id) = HeaderValue::from_str(&arrival.request_id) {
        headers.insert("x-request-id", id);
    }
    if let Some(trace) = &arrival.trace
        && let Ok(child) = HeaderValue::from_str(&trace.child())
    {
        headers.insert("traceparent", child);
    }
    if let Some(key) = flight.backend().authorization() {
        headers.insert(header::AUTHORIZATION, key.clone());
    }
    flight.backend().upstream().ask(request).await
}

/// Status, body, and what else the client needs of the head.
fn pass(answer: Response<Pieces>, held: Held, deadline: Instant) -> Response {
    let (head, pieces) = answer.into_parts();
    let mut headers = HeaderMap::new();
    for name in [header::CONTENT_TYPE, header::RETRY_AFTER, header::CACHE_CONTROL] {
        if let Some(value) = head.headers.get(&name) {
            headers.insert(name, value.clone());
        }
    }
    headers.entry(header::CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
    (head.status, headers, passing::body(pieces, held, deadline)).into_response()
}

fn refusal(front: &Front, pool: &Pool, nobody: Nobody) -> ApiError {
    match nobody {
        Nobody::Full => {
            let reason = "all backends of the model are at `running_requests_max`".to_owned();
            Failure::too_many(reason, front.cluster.requests_end_in_ms(1)).into()
        }
        Nobody::NoneAnswers => ApiError::unavailable(format!(
            "None of the {} backends of the model answers.",
            pool.backends.len()
        )),
    }
}
