//! A context's new time, and its end before that.

use axum::response::Response;
use bytes::Bytes;

use super::id::ContextId;
use super::nodes::Answers;
use super::shape::{DeletedShape, Models, Shape};
use super::{json, tenant_of};
use crate::http::Front;
use crate::openai::{ApiError, Arrival, ExtendRequest};

/// Answers `POST /v1/contexts/{id}`. It is kept as long as one node has promised, so that one that has
/// promised is enough.
pub(crate) async fn extend(
    front: &Front,
    arrival: Arrival,
    name: &str,
    body: Bytes,
) -> Result<Response, ApiError> {
    let contexts = &front.contexts;
    let _running = front.serving.running();
    let ExtendRequest { ttl_ms } = ExtendRequest::parse(&body, contexts.ttl)?;
    let id = ContextId::parse(name).ok_or_else(|| contexts.not_found(name))?;
    let (keepers, tenant) = (front.cluster.keepers(), tenant_of(&arrival.tenant_salt));
    arrival.is_worked_for();
    match contexts.extend(&keepers, tenant, id, ttl_ms).await {
        Answers { kept: Some(kept), .. } => {
            contexts.did("extended");
            let models = Models::of(&front.cluster, &arrival.tenant_salt);
            Ok(json(&Shape::new(id, kept, &models)))
        }
        Answers { unanswered: 0, .. } => Err(contexts.not_found(name)),
        Answers { unanswered, .. } => Err(contexts.unanswered(unanswered)),
    }
}

/// Answers `DELETE /v1/contexts/{id}`. It has ended when no node has it any more.
pub(crate) async fn remove(
    front: &Front,
    arrival: Arrival,
    name: &str,
) -> Result<Response, ApiError> {
    let contexts = &front.contexts;
    let _running = front.serving.running();
    let id = ContextId::parse(name).ok_or_else(|| contexts.not_found(name))?;
    let (keepers, tenant) = (front.cluster.keepers(), tenant_of(&arrival.tenant_salt));
    arrival.is_worked_for();
    match contexts.end(&keepers, tenant, id).await {
        Answers { kept: Some(_), unanswered: 0 } => {
            contexts.did("deleted");
            Ok(json(&DeletedShape::new(id)))
        }
        Answers { kept: None, unanswered: 0 } => Err(contexts.not_found(name)),
        Answers { unanswered, .. } => Err(contexts.unanswered(unanswered)),
    }
}
