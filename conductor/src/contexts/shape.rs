//! How a context looks to a client.

use serde::Serialize;

use super::id::ContextId;
use super::nodes::Kept;
use crate::cluster::{Cluster, ServedModel};

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Shape {
    id: String,
    object: &'static str,
    /// Absent while no engine serves it: a node knows hashes, not names.
    model: Option<String>,
    /// Of its whole blocks.
    tokens: Option<u64>,
    /// Of the prompt that it was made of, which is not kept: only who makes it is told.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u64>,
    created_at: u64,
    expires_at: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct ListShape {
    object: &'static str,
    data: Vec<Shape>,
    first_id: Option<String>,
    last_id: Option<String>,
    has_more: bool,
    /// All nodes that may keep contexts have said which.
    complete: bool,
}

#[derive(Debug, Serialize)]
pub(super) struct DeletedShape {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// The models that are served now, by the hash that stands in a tenant's contexts.
pub(super) struct Models<'a> {
    served: Vec<ServedModel>,
    tenant_salt: &'a str,
}

impl<'a> Models<'a> {
    pub(super) fn of(cluster: &Cluster, tenant_salt: &'a str) -> Models<'a> {
        Models { served: cluster.models(), tenant_salt }
    }

    fn of_id(&self, id: ContextId) -> Option<&ServedModel> {
        self.served.iter().find(|model| model.namespace(self.tenant_salt) == id.namespace)
    }
}

impl Shape {
    pub(super) fn new(id: ContextId, kept: Kept, models: &Models<'_>) -> Shape {
        let model = models.of_id(id);
        let tokens = model.map(|model| u64::from(model.block_tokens) * u64::from(kept.blocks));
        Shape {
            id: id.to_string(),
            object: "context",
            model: model.map(|model| model.name.to_string()),
            tokens,
            prompt_tokens: None,
            created_at: kept.created_unix_ms / 1_000,
            // Rounded down: it is kept at least so long.
            expires_at: kept.expires_unix_ms / 1_000,
        }
    }

    pub(super) fn made_of(self, prompt_tokens: u32) -> Shape {
        Shape { prompt_tokens: Some(prompt_tokens.into()), ..self }
    }
}

impl ListShape {
    pub(super) fn new(data: Vec<Shape>, has_more: bool, complete: bool) -> ListShape {
        let id = |shape: Option<&Shape>| shape.map(|shape| shape.id.clone());
        let (first_id, last_id) = (id(data.first()), id(data.last()));
        ListShape { object: "list", data, first_id, last_id, has_more, complete }
    }
}

impl DeletedShape {
    pub(super) fn new(id: ContextId) -> DeletedShape {
        DeletedShape { id: id.to_string(), object: "context.deleted", deleted: true }
    }
}
