//! The HTTP paths on the same port as gRPC: liveness, readiness, metrics.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::proto::MetricFamily;
use prometheus::{Encoder, Registry, TextEncoder};

use crate::node::command::{Command, NodeHandle};

#[derive(Debug, Clone)]
struct Paths {
    node: NodeHandle,
    registries: Vec<Registry>,
}

/// `/metrics`, `/healthz` and `/readyz`.
pub(crate) fn router(node: NodeHandle, registries: Vec<Registry>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthy))
        .route("/readyz", get(ready))
        .with_state(Paths { node, registries })
}

async fn metrics(State(paths): State<Paths>) -> Response {
    let mut text = Vec::new();
    let mut families: BTreeMap<String, MetricFamily> = BTreeMap::new();
    for mut family in paths.registries.iter().flat_map(Registry::gather) {
        // Ranks count the same things, which stand there once.
        match families.entry(family.name().to_owned()) {
            Entry::Vacant(entry) => drop(entry.insert(family)),
            Entry::Occupied(mut entry) => entry.get_mut().mut_metric().extend(family.take_metric()),
        }
    }
    let families: Vec<MetricFamily> = families.into_values().collect();
    match TextEncoder::new().encode(&families, &mut text) {
        Ok(()) => text.into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// The node's thread answers.
async fn healthy(State(paths): State<Paths>) -> Response {
    match paths.node.ask(Command::Describe).await {
        Ok(_) => "ok\n".into_response(),
        Err(refused) => (StatusCode::SERVICE_UNAVAILABLE, refused.to_string()).into_response(),
    }
}

/// The node takes requests: it is not draining. An engine need not be attached: without one it
/// still serves what it holds; with an SSD or an object store that has failed it serves as well, and says so.
async fn ready(State(paths): State<Paths>) -> Response {
    let unready = |why: String| (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    match paths.node.ask(Command::Describe).await {
        Ok(description) if description.draining => unready("draining\n".into()),
        Ok(description) => {
            let object_store = paths.node.ask(Command::ObjectStore).await.ok().flatten();
            let tiers =
                [("ssd", description.ssd.map(|ssd| ssd.state)), ("object store", object_store)];
            let mut text = "ok\n".to_owned();
            for (tier, state) in tiers {
                text.extend(state.map(|state| format!("{tier}: {state}\n")));
            }
            text.into_response()
        }
        Err(refused) => unready(refused.to_string()),
    }
}
