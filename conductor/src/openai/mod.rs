//! The OpenAI API: requests in, answers out. What a request asks for is checked here, completely
//! and before anything is reserved for it; how it is served is `crate::serve`'s affair.
//!
//! - [`common`], [`chat`], [`completions`], [`responses`], [`contexts`]: requests, on top of [`fields`]
//! - [`prepare`]: from a checked request to prompts of tokens and jobs
//! - [`answer`], [`logprobs`], [`response`]: shapes of answers, behind one [`writer`]
//! - [`stream`], [`whole`]: from the pieces of the choices to a response
//! - [`error`]: errors as clients know them

mod answer;
mod chat;
mod chunks;
mod common;
mod completions;
mod contexts;
#[cfg(test)]
mod document_tests;
mod error;
mod fields;
mod logprobs;
mod prepare;
mod response;
mod responses;
mod stream;
mod whole;
mod writer;

use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use bytes::Bytes;
use tokio::time::Instant;

pub(crate) use chat::ChatRequest;
pub(crate) use common::{Limits, salted};
pub(crate) use completions::CompletionRequest;
pub(crate) use contexts::{ContextRequest, ExtendRequest, TtlLimits};
pub(crate) use error::{ApiError, shown};
use kvasir_placement::Objectives;
pub(crate) use prepare::{context_job, keyed_now, take_prompt, unix_seconds};

use crate::access::Admission;
use crate::http::{Front, Trace};
use crate::serve::{CacheClass, Claim, Failure, Job, Progress, Prompt, Steered};
use response::ResponseWriter;
use responses::ResponseRequest;
use writer::Writer;

impl Arrival {
    /// Nodes and engines work for it: it counts in its tenant's quotas, whatever comes of it.
    pub(crate) fn is_worked_for(&self) {
        if let Some(admission) = &self.admission {
            admission.is_spent();
        }
    }
}

/// When and under which name a request came in.
#[derive(Debug, Clone)]
pub(crate) struct Arrival {
    pub request_id: Arc<str>,
    pub at: Instant,
    /// The response is to say where the request went and why.
    pub explain: bool,
    pub objectives: Objectives,
    pub steering: Steered,
    /// What becomes of its blocks when it is over.
    pub cache: CacheClass,
    pub trace: Option<Trace>,
    /// Absent where no keys are asked for.
    pub admission: Option<Arc<Admission>>,
    /// Separates the blocks of tenants; empty where no keys are asked for.
    pub tenant_salt: Arc<str>,
    /// What it may claim where requests wait; absent where no keys are asked for.
    pub claim: Option<Claim>,
}

/// Answers `/v1/chat/completions`.
pub(crate) async fn chat(
    front: &Front,
    arrival: Arrival,
    body: Bytes,
) -> Result<Response, ApiError> {
    let limits = front.limits;
    let parse = move |body: &[u8]| ChatRequest::parse(body, &limits);
    let prepared = before_deadline(front, &arrival, READING, async {
        let request = off_reactor_when_large(front, body, parse).await?;
        let stream = request.common.stream;
        let prepared = prepare::chat(front, &arrival, request).await;
        let (answer, jobs) = prepared.map_err(|error| error.blaming("messages"))?;
        Ok((answer, jobs, stream))
    });
    let (answer, jobs, stream) = prepared.await?;
    let answered = respond(front, Writer::Choices(answer), jobs, stream).await;
    answered.map_err(|error| error.blaming("messages"))
}

/// Answers `/v1/completions`.
pub(crate) async fn complete(
    front: &Front,
    arrival: Arrival,
    body: Bytes,
) -> Result<Response, ApiError> {
    let limits = front.limits;
    let parse = move |body: &[u8]| CompletionRequest::parse(body, &limits);
    let prepared = before_deadline(front, &arrival, READING, async {
        let request = off_reactor_when_large(front, body, parse).await?;
        let stream = request.common.stream;
        let (answer, jobs) = prepare::completion(front, &arrival, request).await?;
        Ok((answer, jobs, stream))
    });
    let (answer, jobs, stream) = prepared.await?;
    respond(front, Writer::Choices(answer), jobs, stream).await
}

/// Answers `/v1/responses`.
pub(crate) async fn create_response(
    front: &Front,
    arrival: Arrival,
    body: Bytes,
) -> Result<Response, ApiError> {
    let limits = front.limits;
    let parse = move |body: &[u8]| ResponseRequest::parse(body, &limits);
    let prepared = before_deadline(front, &arrival, READING, async {
        let ResponseRequest { chat, echo } = off_reactor_when_large(front, body, parse).await?;
        let stream = chat.common.stream;
        let prepared = prepare::chat(front, &arrival, chat).await;
        let (answer, jobs) = prepared.map_err(|error| error.blaming("input"))?;
        Ok((ResponseWriter::new(answer, echo), jobs, stream))
    });
    let (response, jobs, stream) = prepared.await?;
    let writer = Writer::Response(Box::new(response));
    respond(front, writer, jobs, stream).await.map_err(|error| error.blaming("input"))
}

/// What a request does before it is served.
pub(crate) const READING: &str = "reading the prompt";

/// A context that is asked for.
#[derive(Debug)]
pub(crate) struct AskedContext {
    pub model: String,
    pub prompt: Prompt,
    /// What errors call the prompt.
    pub param: &'static str,
    pub ttl_ms: u64,
    pub replicas: u8,
}

/// Reads a request for a context, as far as its tokens.
pub(crate) async fn ask_context(
    front: &Front,
    arrival: &Arrival,
    body: Bytes,
) -> Result<AskedContext, ApiError> {
    let limits = front.contexts.ttl;
    let parse = move |body: &[u8]| ContextRequest::parse(body, limits);
    let request = off_reactor_when_large(front, body, parse).await?;
    let (model, param) = (request.model.clone(), request.source.param());
    let (ttl_ms, replicas) = (request.ttl_ms, request.replicas);
    let prompt = prepare::context(front, arrival, request).await;
    let prompt = prompt.map_err(|error| error.blaming(param))?;
    Ok(AskedContext { model, prompt, param, ttl_ms, replicas })
}

/// Parsing and tokenizing wait for a thread when many do. What a thread has begun it ends, for
/// nobody.
pub(crate) async fn before_deadline<T>(
    front: &Front,
    arrival: &Arrival,
    phase: &'static str,
    work: impl Future<Output = Result<T, ApiError>>,
) -> Result<T, ApiError> {
    let deadline = arrival.at + front.request_deadline;
    match tokio::time::timeout_at(deadline, work).await {
        Ok(prepared) => prepared,
        Err(_) => Err(Failure::Deadline { phase }.into()),
    }
}

/// A body of this size takes a fraction of a millisecond to parse.
const PARSE_INLINE_BYTES_MAX: usize = 64 << 10;

/// Parses here, or on a thread that may take its time.
pub(crate) async fn off_reactor_when_large<T: Send + 'static>(
    front: &Front,
    body: Bytes,
    parse: impl FnOnce(&[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if body.len() <= PARSE_INLINE_BYTES_MAX {
        return parse(&body);
    }
    front.texts.run(move || parse(&body)).await?
}

/// Starts the jobs and waits for the first thing that happens, so that a request that fails before
/// its first token gets the status that says why, streamed or not.
async fn respond(
    front: &Front,
    writer: Writer,
    jobs: Vec<Job>,
    stream: bool,
) -> Result<Response, ApiError> {
    let mut outputs = front.serving.start(jobs)?;
    let mut placements = Vec::new();
    let first = loop {
        let output = outputs.next().await.ok_or_else(Failure::vanished)?;
        match output.progress {
            Progress::Placed(why) => placements.push(why),
            Progress::Failed(failure) => return Err(failure.into()),
            Progress::Tokens(_) | Progress::Anew | Progress::Ended { .. } => break output,
        }
    };
    let mut response = if stream {
        stream::respond(writer, first, outputs)
    } else {
        whole::respond(writer, first, outputs).await?
    };
    for why in placements {
        explain(response.headers_mut(), &why);
    }
    Ok(response)
}

const PLACEMENT: HeaderName = HeaderName::from_static("x-kvasir-placement");
/// Proxies on the way accept headers of about this size.
const PLACEMENT_BYTES_MAX: usize = 4 << 10;

/// One header for each attempt of each choice, its lines separated by bars.
fn explain(headers: &mut HeaderMap, why: &str) {
    let line = why.lines().collect::<Vec<_>>().join(" | ");
    let end = line.floor_char_boundary(PLACEMENT_BYTES_MAX);
    // A name that does not fit into a header leaves the header out, not the answer.
    if let Ok(value) = HeaderValue::from_str(&line[..end]) {
        headers.append(PLACEMENT, value);
    }
}
