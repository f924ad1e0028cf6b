//! One request: read for its model and its prompt, changed in what is the server's to say, sent on.

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value};
use tokio::time::{Instant, timeout_at};

use super::backend::Flight;
use super::{Nobody, Pool, Proxies, passing};
use crate::http::Front;
use crate::openai::{ApiError, Arrival, off_reactor_when_large};
use crate::serve::Failure;

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
    Responses,
    Embeddings,
}

impl Endpoint {
    fn path(self) -> &'static str {
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

/// Passes a request on to a server of its model. The answer is the server's own, good or bad.
///
/// # Errors
/// [`ApiError`] when no server could be asked, or none has answered by the deadline.
pub(crate) async fn forward(
    front: &Front,
    arrival: Arrival,
    endpoint: Endpoint,
    model: &str,
    body: &Bytes,
) -> Result<Response, ApiError> {
    let proxies = &front.proxies;
    let pool = proxies.models.get(model).ok_or_else(|| ApiError::model_not_found(model))?;
    let parse = |body: &[u8]| {
        let fields = serde_json::from_slice::<Map<String, Value>>(body);
        fields.map_err(|error| {
            ApiError::invalid("body", format!("The body is no JSON object: {error}."))
        })
    };
    let mut fields = off_reactor_when_large(front, body.clone(), parse).await?;
    if !arrival.tenant_salt.is_empty() {
        // Servers that know it keep tenants' caches apart by it; it is not the client's to choose.
        fields.insert("cache_salt".to_owned(), Value::from(&*arrival.tenant_salt));
    }
    let prompt = fields.get(endpoint.prompt()).map(Value::to_string).unwrap_or_default();
    let pieces = pool.affinity.pieces(&arrival.tenant_salt, prompt.as_bytes());
    let deadline = arrival.at + front.request_deadline;
    let mut tried = Vec::new();
    let mut last = None;
    loop {
        let (at, flight) = match pool.choose(&pieces, &tried) {
            Ok(chosen) => chosen,
            Err(nobody) => {
                return last.map_or_else(|| Err(refusal(front, pool, nobody)), Ok);
            }
        };
        // What was answered before is let go only now that somebody else is asked.
        drop(last.take());
        tried.push(at);
        fields.insert("model".to_owned(), Value::from(flight.backend().model()));
        match send(proxies, &arrival, endpoint, &fields, &flight, deadline).await {
            Ok(answer) => {
                let status = answer.status();
                count(proxies, model, status.as_str());
                let elsewhere = ELSEWHERE.contains(&status);
                let response = pass(answer, flight, &arrival, deadline);
                if !elsewhere {
                    return Ok(response);
                }
                last = Some(response);
            }
            Err(Lost::Late) => {
                count(proxies, model, "late");
                return Err(Failure::Deadline { phase: "waiting for a back end" }.into());
            }
            Err(Lost::Unreached(why)) => {
                count(proxies, model, "unreached");
                tracing::warn!(url = flight.backend().url(), why, "a back end did not answer");
                flight.backend().lost();
            }
        }
    }
}

fn count(proxies: &Proxies, model: &str, result: &str) {
    proxies.counts.requests.with_label_values(&[model, result]).inc();
}

enum Lost {
    Late,
    Unreached(String),
}

async fn send(
    proxies: &Proxies,
    arrival: &Arrival,
    endpoint: Endpoint,
    fields: &Map<String, Value>,
    flight: &Flight,
    deadline: Instant,
) -> Result<reqwest::Response, Lost> {
    let url = format!("{}{}", flight.backend().url(), endpoint.path());
    let mut request = proxies.client.post(url).json(fields);
    request = request.header("x-request-id", &*arrival.request_id);
    if let Some(trace) = &arrival.trace {
        request = request.header("traceparent", trace.child());
    }
    let sent = timeout_at(deadline, flight.backend().authorized(request).send()).await;
    let answered = sent.map_err(|_| Lost::Late)?;
    answered.map_err(|error| Lost::Unreached(error.without_url().to_string()))
}

/// Status, body, and what else the client needs of the head.
fn pass(
    answer: reqwest::Response,
    flight: Flight,
    arrival: &Arrival,
    deadline: Instant,
) -> Response {
    let status = answer.status();
    let mut headers = HeaderMap::new();
    for name in [header::CONTENT_TYPE, header::RETRY_AFTER, header::CACHE_CONTROL] {
        if let Some(value) = answer.headers().get(&name) {
            headers.insert(name, value.clone());
        }
    }
    headers.entry(header::CONTENT_TYPE).or_insert(HeaderValue::from_static("application/json"));
    let body = passing::body(answer.bytes_stream(), flight, arrival.admission.clone(), deadline);
    (status, headers, body).into_response()
}

fn refusal(front: &Front, pool: &Pool, nobody: Nobody) -> ApiError {
    match nobody {
        Nobody::Full => Failure::Overloaded {
            reason: "all back ends of the model have as many requests as they may".to_owned(),
            retry_after_ms: front.cluster.requests_end_in_ms(1),
        }
        .into(),
        Nobody::NoneAnswers => ApiError::unavailable(format!(
            "None of the {} back ends of the model answers.",
            pool.backends.len()
        )),
    }
}
