//! The picture follows the nodes' events, and starts anew when anything is amiss.

use kvasir_placement::Missing;
use kvasir_proto::v1::node_event::Event;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::cluster::ClusterError;

#[tokio::test]
async fn it_is_ready_once_both_roles_are_there_and_every_snapshot_is_taken_in() {
    let (mut p, mut d) = (node("p", v1::Role::Prefill).await, node("d", v1::Role::Decode).await);
    let world = World::of(&[&p, &d]);
    let (to_p, to_d) = (p.subscription().await, d.subscription().await);
    assert_eq!(to_p.request, v1::EventsRequest::default(), "from a snapshot");
    eventually("both engines are known", || world.metric("kvasir_conductor_instances") == 2.0)
        .await;
    assert!(!world.is_ready());
    to_p.snapshot(0, &[]).await;
    to_d.part(0, &prompt_keys()[..5], true, false).await;
    eventually("one is warm", || world.metric("kvasir_conductor_nodes_synced") == 1.0).await;
    assert!(!world.is_ready());
    to_d.part(0, &prompt_keys()[5..], false, true).await;
    eventually("ready", || world.is_ready()).await;
    assert_eq!(world.metric("kvasir_conductor_index_entries"), 10.0);
    let models = world.cluster.models();
    let model = &models[0];
    assert_eq!((models.len(), &*model.name, model.ready), (1, "tiny", true));
    assert_eq!((model.context_tokens, model.block_tokens), (4_096, BLOCK_TOKENS));
    assert_eq!((model.vocab_size, model.fingerprint), (1_000, [7; 32]));
}

#[tokio::test]
async fn a_node_that_cannot_be_reached_does_not_hold_up_the_others() {
    let mut b = node("b", v1::Role::Both).await;
    let gone = node("gone", v1::Role::Both).await.address;
    let world = World::with(vec![b.address.to_string(), gone.to_string()], |_| {});
    let _events = followed(&mut b).await;
    eventually("ready", || world.is_ready()).await;
}

#[tokio::test]
async fn one_role_alone_is_not_ready() {
    let mut p = node("p", v1::Role::Prefill).await;
    let world = World::of(&[&p]);
    let _events = followed(&mut p).await;
    eventually("it is warm", || world.metric("kvasir_conductor_nodes_synced") == 1.0).await;
    assert!(!world.is_ready());
    let want = Refusal::NoInstance { model: "tiny".to_string(), missing: Missing::Decode };
    assert_eq!(world.plan().expect_err("nobody decodes"), want);
}

#[tokio::test]
async fn changes_are_applied_in_order_after_the_snapshot() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let events = b.subscription().await;
    let keys = prompt_keys();
    events.snapshot(40, &keys[..3]).await;
    eventually("the snapshot", || world.held() == Some(3)).await;
    let added: Vec<_> = keys[3..8].iter().map(|key| (false, *key)).collect();
    events.changes(41, &added).await;
    eventually("five more", || world.held() == Some(8)).await;
    // Comes, goes, comes; goes, comes, goes.
    let (a, b) = (keys[8], keys[7]);
    let changes = [(false, a), (true, a), (false, a), (true, b), (false, b), (true, a), (true, b)];
    events.changes(46, &changes).await;
    eventually("one less", || world.held() == Some(7)).await;
    // The end of the last batch once more, and one new change.
    events.changes(51, &[(true, a), (true, b), (false, b)]).await;
    eventually("one more", || world.held() == Some(8)).await;
    assert_eq!(world.metric("kvasir_conductor_index_changes_total"), 13.0);
    assert_eq!(world.metric("kvasir_conductor_node_disconnects_total"), 0.0);
}

#[tokio::test]
async fn a_gap_leads_to_a_new_snapshot() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let events = b.subscription().await;
    let keys = prompt_keys();
    events.snapshot(0, &keys[..3]).await;
    events.changes(2, &[(false, keys[3])]).await;
    events.ended().await;
    let events = b.subscription().await;
    assert_eq!(events.request, v1::EventsRequest::default());
    events.snapshot(2, &keys[..5]).await;
    eventually("the new snapshot", || world.held() == Some(5)).await;
    assert_eq!(world.metric("kvasir_conductor_node_disconnects_total"), 1.0);
}

#[tokio::test]
async fn a_snapshot_in_midstream_replaces_all_that_was_known() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let events = b.subscription().await;
    let keys = prompt_keys();
    events.snapshot(5, &keys).await;
    eventually("the first", || world.held() == Some(10)).await;
    events.part(90, &keys[..2], true, false).await;
    eventually("the second begins", || world.held() == Some(2)).await;
    events.part(90, &keys[2..4], false, true).await;
    events.changes(91, &[(false, keys[4])]).await;
    eventually("it goes on from there", || world.held() == Some(5)).await;
    assert_eq!(world.metric("kvasir_conductor_index_entries"), 5.0);
    assert_eq!(world.metric("kvasir_conductor_nodes_synced"), 1.0);
}

#[tokio::test]
async fn what_was_lost_unnoticed_shows_in_the_digests_and_is_mended() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let events = b.subscription().await;
    let keys = prompt_keys();
    events.snapshot(5, &keys[..3]).await;
    events.digests(5, &keys[..3]).await;
    eventually("they agree", || digests(&world) == [1.0, 0.0, 0.0]).await;
    // The node has a fourth block. In place of that it says once more that it has the third.
    events.changes(6, &[(false, keys[2])]).await;
    events.digests(6, &keys[..4]).await;
    let again = b.subscription().await;
    assert_eq!(again.request, v1::EventsRequest::default(), "from a snapshot");
    events.ended().await;
    assert_eq!(digests(&world), [1.0, 1.0, 0.0]);
    assert!(world.is_ready() && world.held() == Some(3), "it serves with what it knows");
    again.snapshot(6, &keys[..4]).await;
    again.digests(6, &keys[..4]).await;
    eventually("they agree again", || digests(&world) == [2.0, 1.0, 0.0]).await;
    assert_eq!(world.held(), Some(4));
    assert_eq!(world.metric("kvasir_conductor_index_snapshots_total"), 2.0);
    assert_eq!(world.metric("kvasir_conductor_node_disconnects_total"), 0.0);
}

#[tokio::test]
async fn a_block_in_another_tier_than_the_node_says_is_a_difference() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let events = b.subscription().await;
    events.snapshot_of_ssd(&prompt_keys()).await;
    events.digests(0, &prompt_keys()).await;
    let _again = b.subscription().await;
    assert_eq!(digests(&world), [0.0, 1.0, 0.0]);
}

#[tokio::test]
async fn digests_that_no_snapshot_helps_do_not_bring_one_after_the_other() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let keys = prompt_keys();
    let events = b.subscription().await;
    events.snapshot(0, &keys[..3]).await;
    events.digests(0, &keys[..4]).await;
    let events = b.subscription().await;
    events.snapshot(0, &keys[..3]).await;
    for _ in 0..5 {
        events.digests(0, &keys[..4]).await;
    }
    events.changes(1, &[(false, keys[3])]).await;
    eventually("it goes on", || world.held() == Some(4)).await;
    assert_eq!(digests(&world), [0.0, 6.0, 0.0]);
    assert_eq!(world.metric("kvasir_conductor_index_snapshots_total"), 2.0);
}

#[tokio::test]
async fn digests_are_compared_only_where_they_are_exact() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::with(vec![b.address.to_string()], |options| options.index_blocks_max = 6);
    let keys = prompt_keys();
    let events = b.subscription().await;
    events.snapshot(9, &keys[..5]).await;
    // Of a time before the snapshot.
    events.digests(8, &keys[..4]).await;
    events.digests(9, &keys[..5]).await;
    eventually("one is compared", || digests(&world) == [1.0, 0.0, 0.0]).await;
    // Some of these have no place in the index.
    let changes: Vec<_> = keys[5..].iter().map(|key| (false, *key)).collect();
    events.changes(10, &changes).await;
    events.digests(14, &keys).await;
    eventually("one cannot be", || digests(&world) == [1.0, 0.0, 1.0]).await;
    assert_eq!(world.held(), Some(6));
    assert_eq!(world.metric("kvasir_conductor_index_snapshots_total"), 1.0);
}

#[tokio::test]
async fn a_node_of_which_nothing_had_room_is_compared_again_after_a_snapshot() {
    let (mut a, mut b) = (node("a", v1::Role::Both).await, node("b", v1::Role::Both).await);
    let nodes = vec![a.address.to_string(), b.address.to_string()];
    let world = World::with(nodes, |options| options.index_blocks_max = 3);
    let keys = prompt_keys();
    let to_a = a.subscription().await;
    to_a.snapshot(0, &keys[..3]).await;
    let entries = |count: f64| world.metric("kvasir_conductor_index_entries") == count;
    eventually("the index is full", || entries(3.0)).await;
    let to_b = b.subscription().await;
    to_b.snapshot(5, &keys[3..5]).await;
    to_b.digests(5, &keys[3..5]).await;
    eventually("it cannot be compared", || digests(&world) == [0.0, 0.0, 1.0]).await;
    assert!(entries(3.0), "nothing of it had room");
    let gone: Vec<_> = keys[..3].iter().map(|key| (true, *key)).collect();
    to_a.changes(1, &gone).await;
    eventually("there is room", || entries(0.0)).await;
    to_b.snapshot(5, &keys[3..5]).await;
    to_b.digests(5, &keys[3..5]).await;
    eventually("it is compared", || digests(&world) == [1.0, 0.0, 1.0]).await;
    assert!(entries(2.0));
}

#[tokio::test]
async fn another_incarnation_starts_from_nothing() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let mut events = b.subscription().await;
    events.snapshot(0, &prompt_keys()).await;
    eventually("the snapshot", || world.held() == Some(10)).await;
    b.described.lock().expect("free").incarnation = 2;
    events.incarnation = 2;
    events.changes(1, &[]).await;
    events.ended().await;
    let events = b.subscription().await;
    eventually("nothing is held", || world.held() == Some(0)).await;
    events.snapshot(0, &prompt_keys()[..1]).await;
    eventually("the new one's snapshot", || world.held() == Some(1)).await;
    assert_eq!(world.plan().expect("placed").prefill.node.incarnation.0, 2);
}

#[tokio::test]
async fn a_lost_node_is_gone_soon_and_comes_back() {
    let mut p = node("p", v1::Role::Prefill).await;
    let mut d = node("d", v1::Role::Decode).await;
    let world = World::of(&[&p, &d]);
    p.subscription().await.snapshot(0, &prompt_keys()).await;
    // Its subscription is dropped: the stream has ended, and it subscribes again.
    let to_p = p.subscription().await;
    to_p.snapshot(0, &prompt_keys()).await;
    let to_d = followed(&mut d).await;
    eventually("both", || world.held() == Some(10)).await;
    let address = p.address;
    drop((p, to_p));
    eventually("it is gone", || world.plan().is_err()).await;
    assert_eq!(world.metric("kvasir_conductor_index_entries"), 0.0);
    assert_eq!(world.metric("kvasir_conductor_nodes_connected"), 1.0);
    assert!(!world.is_ready());
    assert!(world.cluster.model("tiny").is_ok(), "it is known, but not served now");
    let mut p = FakeNode::start_at(description("p", 2, v1::Role::Prefill), address).await;
    let _to_p = followed(&mut p).await;
    eventually("it is back", || world.held() == Some(0)).await;
    drop(to_d);
}

#[tokio::test]
async fn a_node_whose_stream_ends_is_kept_and_goes_on_where_it_was() {
    let mut b = node("b", v1::Role::Both).await;
    let world =
        World::with(vec![b.address.to_string()], |options| options.lost_keep_ms = 3_600_000);
    let events = b.subscription().await;
    events.snapshot(0, &prompt_keys()).await;
    eventually("the snapshot", || world.held() == Some(10)).await;
    let member = || world.plan().expect("placed").placement.prefill().instance;
    let before = member();
    drop(events);
    eventually("lost", || world.metric("kvasir_conductor_node_disconnects_total") == 1.0).await;
    assert!(world.is_ready());
    let events = b.subscription().await;
    assert_eq!(world.held(), Some(10), "until it says what it holds");
    events.snapshot(0, &prompt_keys()[..3]).await;
    eventually("the new snapshot", || world.held() == Some(3)).await;
    assert_eq!(member(), before, "what is booked there still counts");
    assert_eq!(world.metric("kvasir_conductor_nodes_connected"), 1.0);
    // Another incarnation is another node.
    b.described.lock().expect("free").incarnation = 2;
    drop(events);
    let _events = b.subscription().await;
    eventually("the new one", || world.held() == Some(0)).await;
    assert_eq!(world.plan().expect("placed").prefill.node.incarnation.0, 2);
    assert_eq!(world.metric("kvasir_conductor_instances"), 1.0);
}

#[tokio::test]
async fn others_are_preferred_to_a_node_whose_stream_has_ended() {
    let (mut a, mut b) = (node("a", v1::Role::Both).await, node("b", v1::Role::Both).await);
    let nodes = vec![a.address.to_string(), b.address.to_string()];
    let world = World::with(nodes, |options| options.lost_keep_ms = 3_600_000);
    let to_a = a.subscription().await;
    to_a.snapshot(0, &prompt_keys()).await;
    let _to_b = followed(&mut b).await;
    let chosen = || world.plan().ok().map(|plan| plan.prefill.instance_id.to_string());
    eventually("both", || world.is_ready()).await;
    assert_eq!(chosen().as_deref(), Some("engine-a"));
    drop((a, to_a));
    eventually("the other one", || chosen().as_deref() == Some("engine-b")).await;
    assert!(!world.cluster.is_followed(&"engine-a".into()));
    assert!(world.cluster.is_followed(&"engine-b".into()));
}

#[tokio::test]
async fn a_node_that_has_restarted_is_not_kept() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::with(vec![b.address.to_string()], |options| {
        options.lost_keep_ms = 3_600_000;
        (options.reconnect_ms_min, options.reconnect_ms_max) = (3_600_000, 3_600_000);
    });
    let mut events = followed(&mut b).await;
    eventually("served", || world.plan().is_ok()).await;
    events.incarnation = 2;
    events.changes(1, &[]).await;
    eventually("gone", || world.plan().is_err()).await;
}

#[tokio::test]
async fn a_silent_node_is_lost() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::with(vec![b.address.to_string()], |options| options.silence_ms_max = 100);
    let events = followed(&mut b).await;
    events.ended().await;
    eventually("counted", || world.metric("kvasir_conductor_node_disconnects_total") >= 1.0).await;
    let _again = b.subscription().await;
}

#[tokio::test]
async fn what_cannot_be_read_ends_the_stream_and_nothing_else() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let short = v1::BlockChange { removed: false, key: vec![1; 15], tier: 0 };
    let mut odd_role = description("b", 1, v1::Role::Both);
    first(&mut odd_role).role = 77;
    let mut odd_model = description("b", 1, v1::Role::Both);
    first(&mut odd_model).model.as_mut().expect("set").fingerprint = vec![1];
    let mut odd_layout = description("b", 1, v1::Role::Both);
    odd_layout.layout.as_mut().expect("set").layers.clear();
    let mut odd_address = description("b", 1, v1::Role::Both);
    first(&mut odd_address).engine_address = "no address".to_string();
    let renamed = description("c", 1, v1::Role::Both);
    let short_sum = v1::BlockSetDigest { blocks: 1, key_sum: vec![1; 15] };
    let short_sum = v1::TierDigests { ssd: Some(short_sum), ..v1::TierDigests::default() };
    for event in [
        Event::Snapshot(v1::Snapshot { keys: vec![1; 17], ..v1::Snapshot::default() }),
        Event::Changes(v1::BlockChanges { sequence: 1, changes: vec![short], digests: None }),
        Event::Changes(v1::BlockChanges { sequence: u64::MAX, changes: vec![], digests: None }),
        Event::Changes(v1::BlockChanges { sequence: 1, changes: vec![], digests: Some(short_sum) }),
        Event::Status(odd_role),
        Event::Status(odd_model),
        Event::Status(odd_layout),
        Event::Status(odd_address),
        Event::Status(renamed),
    ] {
        let events = followed(&mut b).await;
        events.send(event).await;
        events.ended().await;
    }
    // Changes without any snapshot before them.
    let events = b.subscription().await;
    events.changes(1, &[(false, prompt_keys()[0])]).await;
    events.ended().await;
    let _events = followed(&mut b).await;
    eventually("it goes on", || world.held() == Some(0)).await;
    assert_eq!(world.metric("kvasir_conductor_node_disconnects_total"), 10.0);
}

#[tokio::test]
async fn an_engine_that_attaches_again_has_a_new_channel_and_one_that_detaches_is_gone() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let events = followed(&mut b).await;
    eventually("attached", || world.plan().is_ok()).await;
    let target = world.plan().expect("placed").prefill;
    assert_eq!((target.attach_epoch, &*target.engine_address), (1, "127.0.0.1:9"));
    let mut status = description("b", 1, v1::Role::Both);
    first(&mut status).attach_epoch = 2;
    first(&mut status).engine_address = "127.0.0.1:10".to_string();
    events.status(status.clone()).await;
    eventually("the new one", || world.plan().is_ok_and(|plan| plan.prefill.attach_epoch == 2))
        .await;
    assert_eq!(&*world.plan().expect("placed").prefill.engine_address, "127.0.0.1:10");
    status.instances.clear();
    events.status(status).await;
    eventually("detached", || world.plan().is_err()).await;
    assert_eq!(world.metric("kvasir_conductor_nodes_connected"), 1.0);
}

#[tokio::test]
async fn a_node_that_is_listed_under_two_addresses_counts_once() {
    let mut b = node("b", v1::Role::Both).await;
    let by_name = format!("localhost:{}", b.address.port());
    let world = World::with(vec![b.address.to_string(), by_name], |_| {});
    let _events = followed(&mut b).await;
    eventually("the second is refused", || {
        world.metric("kvasir_conductor_node_disconnects_total") >= 1.0
    })
    .await;
    assert_eq!(world.metric("kvasir_conductor_nodes_connected"), 1.0);
}

#[tokio::test]
async fn what_does_not_fit_into_the_index_is_left_out_and_counted() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::with(vec![b.address.to_string()], |options| options.index_blocks_max = 6);
    let events = b.subscription().await;
    events.snapshot(0, &prompt_keys()).await;
    eventually("six of ten", || world.held() == Some(6)).await;
    assert_eq!(world.metric("kvasir_conductor_index_dropped_blocks_total"), 4.0);
}

#[tokio::test]
async fn options_that_cannot_be_right_are_refused() {
    let start = |nodes: &[&str]| {
        let nodes = nodes.iter().map(|node| (*node).to_string()).collect();
        let options = Options { nodes, ..Options::default() };
        Cluster::start(options, &Registry::new(), CancellationToken::new())
    };
    assert!(matches!(start(&["not an address"]), Err(ClusterError::Address { .. })));
    assert!(matches!(start(&["a:1", "b:1", "a:1"]), Err(ClusterError::Twice { .. })));
    let many: Vec<String> = (0..1_025).map(|at| format!("n{at}:1")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(matches!(start(&many), Err(ClusterError::TooMany { .. })));
}
