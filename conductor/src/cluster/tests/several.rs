//! Several engines on one node.

use super::*;

/// A node with these engines, each idle.
fn described(engines: &[(&str, v1::Role)]) -> v1::NodeDescription {
    let instances = (1..).zip(engines).map(|(epoch, (name, role))| {
        let mut attached = engine(name, *role);
        attached.description.as_mut().expect("set").attach_epoch = epoch;
        attached
    });
    let one = description("n", 1, v1::Role::Both);
    v1::NodeDescription { instances: instances.collect(), ..one }
}

#[tokio::test]
async fn prefill_and_decode_of_one_node_make_a_pair_that_sends_nothing() {
    let pair = described(&[("p", v1::Role::Prefill), ("d", v1::Role::Decode)]);
    let mut node = FakeNode::start(pair).await;
    let world = World::of(&[&node]);
    let _events = followed(&mut node).await;
    eventually("both are there", || world.metric("kvasir_conductor_instances") == 2.0).await;
    let placed = world.place().expect("placed");
    let decode = placed.decode.as_ref().expect("a pair");
    assert_eq!((&*placed.prefill.instance_id.0, placed.prefill.attach_epoch), ("p", 1));
    assert_eq!((&*decode.instance_id.0, decode.attach_epoch), ("d", 2));
    assert_eq!(placed.prefill.node.node_id, decode.node.node_id);
    assert_eq!((placed.placement.push_bytes, placed.fetch.is_none()), (0, true));
    assert!(placed.placement.to_string().contains("split p -> d"), "{}", placed.placement);
    let overview = world.cluster.overview();
    let seen: Vec<(&str, &str)> =
        overview.nodes[0].instances.iter().map(|one| (&*one.instance, one.current_role)).collect();
    assert_eq!(seen, [("d", "decode"), ("p", "prefill")]);
}

#[tokio::test]
async fn one_that_goes_or_comes_anew_changes_nothing_of_the_other() {
    let all = [("one", v1::Role::Both), ("two", v1::Role::Both)];
    let mut node = FakeNode::start(described(&all)).await;
    let world = World::of(&[&node]);
    let events = followed(&mut node).await;
    eventually("both are there", || world.metric("kvasir_conductor_instances") == 2.0).await;
    let placed = world.place().expect("placed");
    let (stays, goes) = match &*placed.prefill.instance_id.0 {
        "one" => (all[0], "two"),
        _ => (all[1], "one"),
    };
    let queue_us = |world: &World, name: &str| {
        let nodes = world.cluster.overview().nodes;
        nodes[0].instances.iter().find(|one| one.instance == name).map(|one| one.queue_us)
    };
    let before_us = queue_us(&world, stays.0).expect("it is there");
    assert!(before_us > 0 && queue_us(&world, goes) == Some(0));
    let mut alone = described(&all);
    alone
        .instances
        .retain(|one| one.description.as_ref().is_some_and(|i| i.instance_id == stays.0));
    events.status(alone).await;
    eventually("it has gone", || queue_us(&world, goes).is_none()).await;
    assert!(queue_us(&world, stays.0).is_some_and(|us| us > 0), "its work is booked on");
    let mut anew = described(&all);
    let named = anew.instances.iter_mut().filter_map(|one| one.description.as_mut());
    named.filter(|one| one.instance_id == goes).for_each(|one| one.attach_epoch = 3);
    events.status(anew).await;
    eventually("it is back", || queue_us(&world, goes) == Some(0)).await;
    assert!(queue_us(&world, stays.0).is_some_and(|us| us > 0));
    world.cluster.mark_failed(&placed.prefill.instance_id);
    let next = world.plan().expect("the other one is there").prefill;
    assert_eq!((&*next.instance_id.0, next.attach_epoch), (goes, 3), "only one is avoided");
}

#[tokio::test]
async fn two_engines_of_one_name_on_a_node_cannot_be_told_apart() {
    let mut node = FakeNode::start(described(&[("a", v1::Role::Both)])).await;
    let world = World::of(&[&node]);
    let events = followed(&mut node).await;
    eventually("it is there", || world.plan().is_ok()).await;
    events.status(described(&[("a", v1::Role::Both), ("a", v1::Role::Both)])).await;
    events.ended().await;
    let _again = node.subscription().await;
    assert_eq!(world.metric("kvasir_conductor_node_disconnects_total"), 1.0);
}
