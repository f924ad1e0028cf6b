//! Roles that are wished for, set, and followed.

use std::time::Duration;

use kvasir_placement::Objectives;
use kvasir_placement::balance::roles::RolesOptions;
use kvasir_proto::v1;

use super::*;
use crate::cluster::BalanceOptions;

const WISHED: &str = "kvasir_conductor_balance_instances_recommended";
const CHANGES: &str = "kvasir_conductor_role_changes_total";

fn options(acts: bool) -> BalanceOptions {
    let window_us = 50_000;
    let balance = kvasir_placement::balance::BalanceOptions { window_us, ..Default::default() };
    let objectives = Objectives { ttft_us: 1_000_000, tbt_us: 1_000_000 };
    let roles = RolesOptions { balance, objectives, dwell_us: 60_000_000 };
    BalanceOptions { acts, sample: Duration::from_millis(5), roles }
}

async fn two() -> [FakeNode; 2] {
    [node("a", v1::Role::Both).await, node("b", v1::Role::Both).await]
}

fn world(nodes: &[FakeNode; 2], acts: bool) -> World {
    let addresses = nodes.iter().map(|node| node.address.to_string()).collect();
    World::with(addresses, |changed| changed.balance = Some(options(acts)))
}

fn told(node: &FakeNode) -> Vec<v1::SetRoleRequest> {
    node.roles_set.lock().expect("no test panicked with it").clone()
}

/// Both report so much to do.
async fn are_busy(nodes: &[FakeNode; 2], events: &[Subscription; 2]) {
    for (node, events) in nodes.iter().zip(events) {
        // In one step: a role may be set at any time.
        let status = {
            let mut described = node.described.lock().expect("no test panicked with it");
            described.instances[0].load = Some(v1::InstanceLoad {
                running_requests: 4,
                waiting_prompt_tokens: 5_000,
                ..v1::InstanceLoad::default()
            });
            described.clone()
        };
        events.status(status).await;
    }
}

fn is_whole(world: &World) -> Option<bool> {
    Some(world.plan().ok()?.placement.is_whole())
}

/// Nobody does both any more.
fn is_divided(world: &World) -> bool {
    let nodes = world.cluster.overview().nodes;
    nodes.iter().flat_map(|node| &node.instances).all(|instance| instance.current_role != "both")
}

#[tokio::test]
async fn engines_that_do_both_are_divided_and_the_conductor_follows_what_their_nodes_say() {
    let mut nodes = two().await;
    let world = world(&nodes, true);
    let [a, b] = &mut nodes;
    let events = [followed(a).await, followed(b).await];
    eventually("both are there", || world.metric("kvasir_conductor_instances") == 2.0).await;
    assert_eq!(is_whole(&world), Some(true));
    are_busy(&nodes, &events).await;
    eventually("one is told", || told(&nodes[0]).len() == 1).await;
    assert_eq!(is_whole(&world), Some(true), "its node has not said so yet");
    are_busy(&nodes, &events).await;
    eventually("the other one is told", || told(&nodes[1]).len() == 1).await;
    are_busy(&nodes, &events).await;
    eventually("each has its side", || is_whole(&world) == Some(false)).await;
    let roles: Vec<v1::Role> = nodes.iter().map(|node| told(node)[0].role()).collect();
    assert!(roles.contains(&v1::Role::Prefill) && roles.contains(&v1::Role::Decode), "{roles:?}");
    for node in &nodes {
        let request = &told(node)[0];
        assert_eq!((request.incarnation, request.attach_epoch), (1, 1));
        assert_eq!((request.expected_version, request.dwell_ms), (0, 60_000));
    }
    eventually("both are counted", || world.metric(CHANGES) == 2.0).await;
    // An engine that attaches anew plays both, and the other one helps out until it has a role again.
    let mut status = nodes[0].described.lock().expect("no test panicked with it").clone();
    let instance = first(&mut status);
    (instance.current_role, instance.role_version, instance.attach_epoch) = (0, 0, 2);
    *nodes[0].described.lock().expect("no test panicked with it") = status.clone();
    events[0].status(status).await;
    eventually("it is told again", || told(&nodes[0]).len() == 2).await;
    assert_eq!(told(&nodes[0])[1].attach_epoch, 2);
}

#[tokio::test]
async fn what_is_only_wished_for_is_a_metric_and_nobody_is_told() {
    let mut nodes = two().await;
    let world = world(&nodes, false);
    let [a, b] = &mut nodes;
    let events = [followed(a).await, followed(b).await];
    are_busy(&nodes, &events).await;
    eventually("there is a wish", || world.metric(WISHED) > 0.0).await;
    eventually("people see it", || !world.cluster.overview().balance.is_empty()).await;
    eventually("they would be divided", || {
        world.cluster.overview().balance[0].prefill_instances_recommended > 0
    })
    .await;
    let seen = &world.cluster.overview().balance[0];
    assert_eq!(
        (&*seen.model, seen.prefill_instances, seen.decode_instances, seen.both_instances),
        ("tiny", 0, 0, 2)
    );
    assert!(
        seen.decode_instances_recommended > 0 && seen.both_instances_recommended == 0,
        "{seen:?}"
    );
    // Several windows later.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(told(&nodes[0]).is_empty() && told(&nodes[1]).is_empty());
    assert_eq!(world.metric(CHANGES), 0.0);
}

#[tokio::test]
async fn of_two_conductors_one_is_too_late_and_both_follow_the_other() {
    let mut nodes = two().await;
    let worlds = [world(&nodes, true), world(&nodes, true)];
    let mut events = Vec::new();
    for _ in 0..2 {
        let [a, b] = &mut nodes;
        events.push([followed(a).await, followed(b).await]);
    }
    eventually("both follow both", || {
        worlds.iter().all(|world| world.metric("kvasir_conductor_instances") == 2.0)
    })
    .await;
    let busy = async || {
        for events in &events {
            are_busy(&nodes, events).await;
        }
    };
    for _ in 0..400 {
        busy().await;
        if worlds.iter().all(is_divided) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(worlds.iter().all(is_divided), "they agree");
    let plays = |node: &FakeNode| {
        let mut described = node.described.lock().expect("no test panicked with it");
        first(&mut described).current_role()
    };
    assert_ne!(plays(&nodes[0]), plays(&nodes[1]));
}
