//! How many instances prefill and how many decode: loads are looked at now and then, what there should be of
//! each role is a metric, and, where that is on, nodes whose engines can do both are told what these play.
//!
//! Nothing is kept here. What an engine plays is its node's to say, compared and set there, and every conductor
//! follows it. Whoever else has changed something is seen like what was changed from here: all wait for a
//! window of loads after it. They choose by what nodes report, so that two that come to it at one moment
//! choose the same engine, and one of them is told that it was too late.

use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::balance::RoleChange;
use kvasir_placement::balance::roles::RolesOptions;
use kvasir_placement::{ModelIndex, Role};
use kvasir_proto::v1;
use kvasir_proto::v1::store_node_client::StoreNodeClient;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tonic::transport::Channel;

use super::state::{Shared, State};

/// A node that takes longer to answer has other worries.
const WITHIN: Duration = Duration::from_secs(2);

/// What is done about roles.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BalanceOptions {
    /// Roles are changed, not only wished for.
    pub acts: bool,
    pub sample: Duration,
    pub roles: RolesOptions,
}

/// What the engines of a model play, and what they should.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BalanceOverview {
    pub model: String,
    pub prefill_instances: usize,
    pub decode_instances: usize,
    pub both_instances: usize,
    pub prefill_instances_recommended: usize,
    pub decode_instances_recommended: usize,
    pub both_instances_recommended: usize,
    /// By what the ratio of decoding to prefilling engines is to move.
    pub adjustment_ratio: f64,
    pub prefill_load: f64,
    pub decode_load: f64,
}

/// One engine that is to play something else.
struct Order {
    model: ModelIndex,
    client: StoreNodeClient<Channel>,
    request: v1::SetRoleRequest,
}

/// Until `shutdown`.
pub(super) async fn balance(
    shared: Arc<Shared>,
    options: BalanceOptions,
    shutdown: CancellationToken,
) {
    loop {
        // Uneven, so that nothing that comes in step with it is always seen, or never.
        let pause = options.sample.mul_f64(rand::random_range(0.5..1.5));
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        for order in look(&shared, &options) {
            carry_out(&shared, order).await;
        }
    }
}

/// Takes a sample and plans. Answers with what is to be done.
fn look(shared: &Shared, options: &BalanceOptions) -> Vec<Order> {
    let now_us = shared.now_us();
    let mut state = shared.lock();
    let State { view, roles, .. } = &mut *state;
    let Some(roles) = roles else { return Vec::new() };
    roles.sample(view, now_us);
    let plans = roles.plan(view, now_us);
    let loads: Vec<_> = plans.iter().map(|(model, _)| roles.loads(*model)).collect();
    let mut orders = Vec::new();
    let mut wishes = Vec::new();
    for ((model, plan), loads) in plans.into_iter().zip(loads) {
        let count = |role| {
            let of_model = state.view.instances().iter().filter(|i| i.model() == model);
            of_model.filter(|i| i.report().playing() == role).count()
        };
        let Some(spec) = state.view.model_spec(model) else { continue };
        let loads = loads.unwrap_or_default();
        wishes.push(BalanceOverview {
            model: spec.name.to_string(),
            prefill_instances: count(Role::Prefill),
            decode_instances: count(Role::Decode),
            both_instances: count(Role::Both),
            prefill_instances_recommended: plan.prefills_wished,
            decode_instances_recommended: plan.decodes_wished,
            both_instances_recommended: plan.both_wished,
            adjustment_ratio: plan.factor,
            prefill_load: loads.prefill,
            decode_load: loads.decode,
        });
        let dwell_ms = options.roles.dwell_us / 1_000;
        let changes = plan.changes.iter().filter(|_| options.acts);
        orders.extend(changes.filter_map(|change| order(&state, model, change, dwell_ms)));
    }
    // Empty until a window after a change is full.
    if !wishes.is_empty() {
        shared.metrics.balanced(&wishes);
        state.wishes = wishes;
    }
    orders
}

fn order(state: &State, model: ModelIndex, change: &RoleChange, dwell_ms: u64) -> Option<Order> {
    let found = state.view.instances().iter().find(|i| i.reference() == change.instance)?;
    let report = found.report();
    let node = state.nodes.iter().flatten().find(|node| node.index == report.node)?;
    let engine = node.engines.get(&report.instance_id)?;
    let request = v1::SetRoleRequest {
        incarnation: node.incarnation.0,
        instance_id: report.instance_id.to_string(),
        attach_epoch: engine.attach_epoch,
        expected_version: engine.role_version,
        role: wire(change.to).into(),
        dwell_ms,
    };
    let followed = node.lost_us.is_none();
    followed.then(|| Order { model, client: node.client.clone(), request })
}

fn wire(role: Role) -> v1::Role {
    match role {
        Role::Prefill => v1::Role::Prefill,
        Role::Decode => v1::Role::Decode,
        Role::Both => v1::Role::Both,
    }
}

async fn carry_out(shared: &Shared, order: Order) {
    let Order { model, mut client, request } = order;
    let (instance, role) = (request.instance_id.clone(), request.role());
    let answer = tokio::time::timeout(WITHIN, client.set_role(request)).await;
    let outcome = match answer {
        Ok(Ok(_)) => {
            tracing::info!(
                instance,
                role = role.as_str_name(),
                "the conductor changed the role of an engine"
            );
            "changed"
        }
        // Somebody was faster, or the engine is another one by now.
        Ok(Err(status)) if matches!(status.code(), Code::Aborted | Code::NotFound) => "stale",
        Ok(Err(status)) if status.code() == Code::Unavailable => "unavailable",
        Ok(Err(status)) => {
            tracing::warn!(instance, %status, "the conductor cannot change the role of an engine");
            "failed"
        }
        Err(_) => "failed",
    };
    shared.metrics.role_changes.with_label_values(&[outcome]).inc();
    let now_us = shared.now_us();
    if let Some(roles) = &mut shared.lock().roles {
        roles.asked(model, now_us);
    }
}
