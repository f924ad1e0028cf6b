//! The cluster against nodes that say what they are told to.

mod balancing;
mod fake_node;
mod following;
mod placing;
mod scheduling;
mod several;

use std::time::Duration;

use kvasir_placement::{Objectives, Refusal, Steering};
use kvasir_proto::{BlockKey, keys, v1};
use prometheus::Registry;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Cluster, NotNow, Options, PlaceQuery, Placed, Plan};
use fake_node::{BLOCK_TOKENS, FakeNode, Subscription, busy, description, engine, first};

/// A cluster that ends with the test.
struct World {
    cluster: Cluster,
    registry: Registry,
    _stop: DropGuard,
}

impl World {
    fn of(nodes: &[&FakeNode]) -> Self {
        World::with(nodes.iter().map(|node| node.address.to_string()).collect(), |_| {})
    }

    fn with(nodes: Vec<String>, change: impl FnOnce(&mut Options)) -> Self {
        let mut options = Options {
            nodes,
            reconnect_ms_min: 5,
            reconnect_ms_max: 20,
            // No status comes by itself in most of these tests.
            silence_ms_max: 60_000,
            ..Options::default()
        };
        change(&mut options);
        let registry = Registry::new();
        let stop = CancellationToken::new();
        let cluster = Cluster::start(options, &registry, stop.clone()).expect("starts");
        World { cluster, registry, _stop: stop.drop_guard() }
    }

    fn is_ready(&self) -> bool {
        self.cluster.is_warm() && self.cluster.serves(["tiny"].into_iter())
    }

    fn plan(&self) -> Result<Plan, Refusal> {
        self.with_query(|cluster, query| cluster.plan(query).map_err(|none| none.refused.refusal))
    }

    fn place(&self) -> Result<Placed, Refusal> {
        self.with_query(|cluster, query| cluster.place(query).map_err(|none| none.refused.refusal))
    }

    fn with_query<T>(
        &self,
        ask: impl FnOnce(&Cluster, &PlaceQuery<'_>) -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let model = self.cluster.model("tiny")?;
        let query = PlaceQuery {
            model: &model,
            keys: &prompt_keys(),
            prompt_tokens: PROMPT_TOKENS,
            max_tokens: 10,
            objectives: Objectives::NONE,
            exclude: &[],
            may_route: true,
            is_endless: false,
            steering: Steering::default(),
            chunks: &[],
        };
        ask(&self.cluster, &query)
    }

    /// Leading blocks of the prompt that the prefill side is thought to hold.
    fn held(&self) -> Option<u32> {
        self.plan().ok().map(|plan| plan.prefill.cached_blocks)
    }

    /// The sum over all labels of a counter or gauge.
    fn metric(&self, name: &str) -> f64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == name);
        let values = family.iter().flat_map(|family| family.get_metric());
        values.map(|metric| metric.get_counter().get_value() + metric.get_gauge().get_value()).sum()
    }
}

/// How many digests were compared, and what came of that: alike, different, and not to be told.
fn digests(world: &World) -> [f64; 3] {
    let families = world.registry.gather();
    let family = families.iter().find(|f| f.name() == "kvasir_conductor_index_digests_total");
    ["same", "differ", "incomplete"].map(|outcome| {
        let metrics = family.iter().flat_map(|family| family.get_metric());
        let of = metrics.filter(|metric| metric.get_label()[0].value() == outcome);
        of.map(|metric| metric.get_counter().get_value()).sum()
    })
}

const PROMPT_TOKENS: u32 = 10 * BLOCK_TOKENS + 1;

fn prompt() -> Vec<u32> {
    (0..PROMPT_TOKENS).collect()
}

/// The keys of the prompt's ten full blocks.
fn prompt_keys() -> Vec<BlockKey> {
    let namespace = keys::namespace(&[7; 32], "f32", "", "");
    keys::chain(namespace, &prompt(), BLOCK_TOKENS as usize)
}

/// A node with one idle engine.
async fn node(name: &str, role: v1::Role) -> FakeNode {
    FakeNode::start(description(name, 1, role)).await
}

/// A node that is followed, with nothing in its cache.
async fn followed(node: &mut FakeNode) -> Subscription {
    let subscription = node.subscription().await;
    subscription.snapshot(0, &[]).await;
    subscription
}

async fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..2_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it never came to this: {what}");
}
