//! Contexts: prompts whose blocks a tenant was promised for a time. Nothing of them is kept here: the
//! store nodes are asked each time, so that every conductor answers alike.
//!
//! Reading path:
//! 1. [`create`]: its steps, from a prompt to blocks that a node has promised to keep
//! 2. [`listed`]: what is kept, of all nodes together; [`change`]: a new time, or the end
//! 3. [`nodes`]: what nodes are asked, within bounds
//! 4. [`id`], [`shape`]: names of contexts, and how they look

mod change;
mod create;
mod id;
mod listed;
mod nodes;
mod shape;

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

pub(crate) use change::{extend, remove};
pub(crate) use create::create;
pub(crate) use listed::{Page, list, one};

use crate::config::ContextsConfig;
use crate::metrics::Metrics;
use crate::openai::{ApiError, TtlLimits, shown};

/// The tenant of callers without an API key, as store nodes know it. The keys file rejects this name.
pub(crate) const ANONYMOUS: &str = "(anonymous)";

/// The bounds, shared by all requests.
#[derive(Debug)]
pub(crate) struct Contexts {
    pub ttl: TtlLimits,
    creates: Arc<Semaphore>,
    /// Calls to nodes under way, but those that keep: each create makes one at a time.
    calls: Semaphore,
    call_within: Duration,
    keep_within: Duration,
    metrics: Arc<Metrics>,
}

impl Contexts {
    pub(crate) fn new(config: &ContextsConfig, metrics: Arc<Metrics>) -> Contexts {
        let ContextsConfig {
            ttl_default_ms,
            ttl_max_ms,
            node_call_timeout_ms,
            persist_timeout_ms,
            replicas_default,
            ..
        } = *config;
        let places = |count: usize| count.min(Semaphore::MAX_PERMITS);
        Contexts {
            ttl: TtlLimits { default_ms: ttl_default_ms, ms_max: ttl_max_ms, replicas_default },
            creates: Arc::new(Semaphore::new(places(config.concurrent_creates_max))),
            calls: Semaphore::new(places(config.concurrent_node_calls_max)),
            call_within: Duration::from_millis(node_call_timeout_ms),
            keep_within: Duration::from_millis(persist_timeout_ms),
            metrics,
        }
    }

    /// A place among the contexts that are being made.
    fn place(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        Arc::clone(&self.creates).try_acquire_owned().map_err(|_| {
            let message = "Too many contexts are being created; try again.";
            let error =
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message);
            let reason = Some("too_many_contexts");
            self.refused("too_many", ApiError { reason, retry_after_s: Some(1), ..error })
        })
    }

    fn did(&self, what: &str) {
        self.metrics.contexts.with_label_values(&[what]).inc();
    }

    fn refused(&self, why: &str, error: ApiError) -> ApiError {
        self.metrics.contexts_refused.with_label_values(&[why]).inc();
        error
    }

    /// 404: no node keeps it for this tenant.
    fn not_found(&self, id: &str) -> ApiError {
        let message = format!("The context {:?} does not exist.", shown(id));
        let error = ApiError::new(StatusCode::NOT_FOUND, "context_not_found", message);
        self.refused("not_found", ApiError { param: Some("id".to_owned()), ..error })
    }

    /// 503: nodes that may have it say nothing.
    fn unanswered(&self, nodes: usize) -> ApiError {
        let message = match nodes {
            1 => "A store node that may hold this context does not answer; try again.".to_owned(),
            _ => {
                format!("{nodes} store nodes that may hold this context do not answer; try again.")
            }
        };
        let error = ApiError { code: "node_unavailable", ..ApiError::unavailable(message) };
        self.refused("node_unavailable", error)
    }
}

/// By what name nodes know whose request it is.
fn tenant_of(salt: &str) -> &str {
    // No tenant's name is empty.
    if salt.is_empty() { ANONYMOUS } else { salt }
}

fn json(value: &impl serde::Serialize) -> Response {
    axum::Json(value).into_response()
}
