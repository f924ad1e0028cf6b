//! What is kept for a tenant, of all nodes together.

use axum::response::Response;
use serde::Deserialize;

use super::id::ContextId;
use super::nodes::{Answers, Found};
use super::shape::{ListShape, Models, Shape};
use super::{json, tenant_of};
use crate::http::Front;
use crate::openai::{ApiError, Arrival, shown};

const LISTED: usize = 20;
const LISTED_MAX: usize = 100;

/// Which part of a list is wanted.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Page {
    limit: Option<String>,
    after: Option<String>,
}

/// Answers `GET /v1/contexts`, in the order of their ids.
pub(crate) async fn list(
    front: &Front,
    arrival: Arrival,
    page: Page,
) -> Result<Response, ApiError> {
    let limit = limit_of(page.limit.as_deref())?;
    let after = page.after.as_deref().map(after_of).transpose()?;
    let (keepers, tenant) = (front.cluster.keepers(), tenant_of(&arrival.tenant_salt));
    // One more tells whether there are more.
    arrival.is_worked_for();
    let found = front.contexts.find(&keepers, tenant, after, limit + 1).await;
    let Found { contexts, unanswered } = found;
    let has_more = contexts.len() > limit;
    let models = Models::of(&front.cluster, &arrival.tenant_salt);
    let shapes = contexts.into_iter().take(limit).map(|(id, kept)| Shape::new(id, kept, &models));
    Ok(json(&ListShape::new(shapes.collect(), has_more, unanswered == 0)))
}

/// Answers `GET /v1/contexts/{id}`.
pub(crate) async fn one(front: &Front, arrival: Arrival, name: &str) -> Result<Response, ApiError> {
    let contexts = &front.contexts;
    let id = ContextId::parse(name).ok_or_else(|| contexts.not_found(name))?;
    let (keepers, tenant) = (front.cluster.keepers(), tenant_of(&arrival.tenant_salt));
    arrival.is_worked_for();
    match contexts.look(&keepers, tenant, id).await {
        Answers { kept: Some(kept), .. } => {
            let models = Models::of(&front.cluster, &arrival.tenant_salt);
            Ok(json(&Shape::new(id, kept, &models)))
        }
        Answers { unanswered: 0, .. } => Err(contexts.not_found(name)),
        Answers { unanswered, .. } => Err(contexts.unanswered(unanswered)),
    }
}

fn limit_of(limit: Option<&str>) -> Result<usize, ApiError> {
    let Some(text) = limit else { return Ok(LISTED) };
    let limit = text.parse().ok().filter(|limit| (1..=LISTED_MAX).contains(limit));
    limit.ok_or_else(|| {
        let got = shown(text);
        let message = format!("`limit` must be a number between 1 and {LISTED_MAX}, not {got:?}.");
        ApiError::invalid("limit", message)
    })
}

fn after_of(after: &str) -> Result<ContextId, ApiError> {
    ContextId::parse(after).ok_or_else(|| {
        let message = format!("`after` must be the id of a context, not {:?}.", shown(after));
        ApiError::invalid("after", message)
    })
}
