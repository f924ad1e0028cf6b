//! Placed requests carry what is needed to serve them, and their work counts while it lasts.

use std::time::Duration;

use kvasir_placement::{LinkProfile, OverloadReason};
use kvasir_proto::InstanceId;

use super::*;

#[tokio::test]
async fn a_placed_request_has_the_handles_of_what_was_chosen() {
    let (mut p, mut d) = (node("p", v1::Role::Prefill).await, node("d", v1::Role::Decode).await);
    let world = World::of(&[&p, &d]);
    let _to_p = followed(&mut p).await;
    let to_d = d.subscription().await;
    to_d.snapshot(0, &prompt_keys()).await;
    eventually("placed with a fetch", || world.plan().is_ok_and(|plan| plan.fetch.is_some())).await;
    let placed = world.place().expect("placed");
    assert_eq!(&*placed.prefill.instance_id.0, "engine-p");
    assert_eq!(&placed.prefill.node.endpoint[..], b"endpoint of p");
    assert_eq!(*placed.prefill.node.address, p.address.to_string());
    let decode = placed.decode.as_ref().expect("a pair");
    assert_eq!((&*decode.node.node_id.0, decode.cached_blocks), ("d", 10));
    let fetch = placed.fetch.as_ref().expect("a fetch");
    assert_eq!((&*fetch.node.node_id.0, fetch.from_block, fetch.until_block), ("d", 0, 10));
    assert_eq!(fetch.bytes, 10 * 64 * 100 * 2);
    assert!(placed.placement.to_string().contains("split engine-p -> engine-d, fetch [0, 10)"));
    // What was predicted of it is compared with what it took; of a queue behind it nothing was.
    let error = |of: &str| {
        let families = world.registry.gather();
        let name = "kvasir_conductor_prediction_error_ratio";
        let mut metrics =
            families.iter().filter(|one| one.name() == name).flat_map(|one| one.get_metric());
        let of_it = metrics.find(|metric| metric.get_label()[0].value() == of);
        of_it.map(|metric| metric.get_gauge().get_value())
    };
    placed.booking.queued(1_000);
    placed.booking.fetched(Some((fetch.bytes, 2 * placed.placement.transfer_us)));
    assert_eq!((error("fetch"), error("queue")), (Some(0.5), None));
    // The handle works.
    let mut client = placed.prefill.node.client.clone();
    let described = client.describe(v1::DescribeRequest {}).await.expect("answers");
    assert_eq!(described.into_inner().node_id, "p");
}

/// Until the first fetch has been measured the profile is all there is: where it says too little, nothing would ever
/// be fetched.
#[tokio::test]
async fn what_the_network_is_said_to_carry_decides_the_first_fetch() {
    for (bytes_per_us, fetches) in [(0.5, false), (10_000.0, true)] {
        let mut p = node("p", v1::Role::Prefill).await;
        let mut d = node("d", v1::Role::Decode).await;
        let nodes = vec![p.address.to_string(), d.address.to_string()];
        let world = World::with(nodes, |options| {
            options.profile.link = LinkProfile { base_us: 10.0, bytes_per_us };
        });
        let _to_p = followed(&mut p).await;
        let to_d = d.subscription().await;
        to_d.snapshot(0, &prompt_keys()).await;
        let knows_d = |plan: Plan| plan.decode.is_some_and(|decode| decode.cached_blocks == 10);
        eventually("the prompt is seen on d", || world.plan().is_ok_and(knows_d)).await;
        let plan = world.plan().expect("placed");
        assert_eq!(plan.fetch.is_some(), fetches, "{}", plan.placement);
    }
}

#[tokio::test]
async fn a_booking_counts_until_it_is_dropped() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let _events = followed(&mut b).await;
    eventually("placed", || world.plan().is_ok()).await;
    let queue_us = || world.plan().expect("placed").placement.queue_us;
    assert_eq!(queue_us(), 0, "a plan books nothing");
    let mut first = world.place().expect("placed");
    let second = world.place().expect("placed");
    assert!(second.placement.queue_us > 0);
    let two_us = queue_us();
    second.booking.revise(PROMPT_TOKENS - 1);
    assert!(queue_us() < two_us, "nearly all of the second is held");
    first.booking.first_token();
    first.booking.first_token();
    first.booking.prefilled(Some((PROMPT_TOKENS, 1_000)));
    let decoding = world.plan().expect("placed").placement.considered.decode_candidates[0].load;
    first.booking.stepped(1_000);
    first.booking.complete(10);
    drop(second);
    assert_eq!(queue_us(), 0);
    assert!(
        world.plan().expect("placed").placement.considered.decode_candidates[0].load < decoding
    );
    assert_eq!(world.metric("kvasir_conductor_placements_total"), 2.0);
    let families = world.registry.gather();
    let real = families.iter().find(|f| f.name() == "kvasir_conductor_ttft_measured_seconds");
    let count = real.expect("registered").get_metric()[0].get_histogram().get_sample_count();
    assert_eq!(count, 1, "the first token comes once");
}

#[tokio::test]
async fn an_instance_that_failed_is_avoided_until_its_next_good_status() {
    let (mut a, mut b) = (node("a", v1::Role::Both).await, node("b", v1::Role::Both).await);
    let nodes = vec![a.address.to_string(), b.address.to_string()];
    let world = World::with(nodes, |options| options.failed_avoid_ms = 20);
    let to_a = a.subscription().await;
    to_a.snapshot(0, &prompt_keys()).await;
    let _to_b = followed(&mut b).await;
    let chosen = || world.plan().ok().map(|plan| plan.prefill.instance_id.to_string());
    eventually("a holds the prompt", || chosen().as_deref() == Some("engine-a")).await;
    eventually("both are there", || world.metric("kvasir_conductor_instances") == 2.0).await;
    world.cluster.mark_failed(&"engine-a".into());
    assert_eq!(chosen().as_deref(), Some("engine-b"));
    tokio::time::sleep(Duration::from_millis(30)).await;
    assert_eq!(chosen().as_deref(), Some("engine-b"), "it has not spoken since");
    to_a.status(description("a", 1, v1::Role::Both)).await;
    eventually("it is asked again", || chosen().as_deref() == Some("engine-a")).await;
}

#[tokio::test]
async fn an_instance_that_fails_again_is_avoided_for_longer_until_it_has_served() {
    let (mut a, mut b) = (node("a", v1::Role::Both).await, node("b", v1::Role::Both).await);
    let nodes = vec![a.address.to_string(), b.address.to_string()];
    let world = World::with(nodes, |options| {
        (options.failed_avoid_ms, options.failed_avoid_ms_max) = (20, 3_600_000);
    });
    let to_a = a.subscription().await;
    to_a.snapshot(0, &prompt_keys()).await;
    let _to_b = followed(&mut b).await;
    let chosen = || world.plan().ok().map(|plan| plan.prefill.instance_id.to_string());
    eventually("both are there", || world.metric("kvasir_conductor_instances") == 2.0).await;
    eventually("a holds the prompt", || chosen().as_deref() == Some("engine-a")).await;
    let a_id = InstanceId::from("engine-a");
    // Its node goes on to report for it.
    let reports = async || {
        for _ in 0..20 {
            to_a.status(description("a", 1, v1::Role::Both)).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    for _ in 0..30 {
        world.cluster.mark_failed(&a_id);
    }
    tokio::time::sleep(Duration::from_millis(30)).await;
    reports().await;
    eventually("failures at once are one", || chosen().as_deref() == Some("engine-a")).await;
    // Each time that it is tried it fails, and is left alone for twice as long.
    let mut tries = 0;
    for _ in 0..8 {
        if chosen().as_deref() == Some("engine-a") {
            tries += 1;
            world.cluster.mark_failed(&a_id);
        }
        reports().await;
    }
    assert!((2..=5).contains(&tries), "{tries} tries in eight tenths of a second");
    world.cluster.mark_served(&[&a_id]);
    world.cluster.mark_failed(&a_id);
    tokio::time::sleep(Duration::from_millis(30)).await;
    reports().await;
    eventually("it begins anew", || chosen().as_deref() == Some("engine-a")).await;
}

#[tokio::test]
async fn a_model_that_nobody_ever_served_is_unknown() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let _events = followed(&mut b).await;
    let want = Refusal::UnknownModel { model: "other".to_string() };
    assert_eq!(world.cluster.model("other").expect_err("unknown"), want);
    assert_eq!(world.metric("kvasir_conductor_refusals_total"), 1.0);
}

#[tokio::test]
async fn only_models_that_are_asked_for_make_it_ready() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let _events = followed(&mut b).await;
    eventually("tiny is served", || world.is_ready()).await;
    assert!(!world.cluster.serves(["other"].into_iter()));
    assert!(world.cluster.serves(["other", "tiny"].into_iter()));
    assert!(!world.cluster.serves(std::iter::empty()));
}

#[tokio::test]
async fn who_is_refused_is_told_when_what_is_placed_will_have_ended() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let _events = followed(&mut b).await;
    eventually("placed", || world.plan().is_ok()).await;
    assert_eq!(world.cluster.requests_end_in_ms(1), 1_000, "nothing is placed: at least so long");
    let placed = [world.place().expect("placed"), world.place().expect("placed")];
    // Prefills of 65 ms, answers of two seconds: as the profile has them.
    let first_ms = world.cluster.requests_end_in_ms(1);
    assert!((1_001..=2_100).contains(&first_ms), "{first_ms}");
    let second_ms = world.cluster.requests_end_in_ms(2);
    assert!((first_ms..=2_200).contains(&second_ms), "{second_ms}");
    let room_ms = world.cluster.room_in_ms(&"engine-b".into(), PROMPT_TOKENS, BLOCK_TOKENS);
    assert!((1_001..=2_200).contains(&room_ms), "{room_ms}");
    drop(placed);
    assert_eq!(world.cluster.requests_end_in_ms(1), 1_000);
}

#[tokio::test]
async fn an_incarnation_of_a_node_is_followed_until_it_is_lost() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let events = followed(&mut b).await;
    eventually("placed", || world.plan().is_ok()).await;
    let node = world.plan().expect("placed").prefill.node;
    assert!(world.cluster.follows(&node));
    let mut other = node.clone();
    other.incarnation.0 += 1;
    assert!(!world.cluster.follows(&other));
    drop((b, events));
    eventually("it is lost", || !world.cluster.follows(&node)).await;
}

#[tokio::test]
async fn what_is_placed_takes_its_room_until_it_ends() {
    // A prompt has 11 blocks and its answer ends within the last of them: two requests need 22.
    let mut described = description("b", 1, v1::Role::Both);
    described.slots_available = 21;
    let mut b = FakeNode::start(described).await;
    let world = World::of(&[&b]);
    let _events = followed(&mut b).await;
    eventually("placed", || world.plan().is_ok()).await;
    let placed = world.place().expect("placed");
    assert!(matches!(world.plan(), Err(Refusal::Overloaded { .. })));
    drop(placed);
    assert!(world.plan().is_ok());
}

#[tokio::test]
async fn what_answers_saw_refuses_by_the_time_between_tokens() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let _events = followed(&mut b).await;
    eventually("placed", || world.plan().is_ok()).await;
    let answer = |tbt_us, tokens| {
        let mut placed = world.place().expect("placed");
        placed.booking.first_token();
        let prefill = placed.booking.prefilled(Some((PROMPT_TOKENS, 1_000)));
        assert_eq!(prefill.map(|prefill| prefill.measured_us), Some(1_000));
        placed.booking.paced(tbt_us, tokens);
        placed.booking.complete(tokens);
    };
    let asks = || {
        let objectives = Objectives { tbt_us: 100_000, ..Objectives::NONE };
        world.with_query(|cluster, query| {
            let query = PlaceQuery { objectives, ..query.clone() };
            cluster.plan(&query).map_err(|none| none.refused.refusal)
        })
    };
    // Beside one that decodes: alone it would be a probe.
    let mut other = world.place().expect("placed");
    other.booking.first_token();
    other.booking.prefilled(None);
    assert!(asks().is_ok(), "by the profile a step is short");
    (0..60).for_each(|_| answer(900_000, 63));
    assert!(asks().is_ok(), "short answers teach nothing of it");
    (0..60).for_each(|_| answer(900_000, 64));
    let refused = asks().expect_err("nine times as long as it may be");
    assert!(
        matches!(refused, Refusal::Overloaded { reason: OverloadReason::Tbt, .. }),
        "{refused:?}"
    );
    let samples = |name: &str| {
        let families = world.registry.gather();
        let family = families.iter().find(|family| family.name() == name).expect("registered");
        family.get_metric()[0].get_histogram().get_sample_count()
    };
    assert_eq!(samples("kvasir_conductor_tbt_measured_seconds"), 120);
    assert_eq!(samples("kvasir_conductor_tbt_measured_to_predicted_ratio"), 120);
    assert_eq!(samples("kvasir_conductor_prefill_measured_to_predicted_ratio"), 120);
    let error = |of: &str| {
        let families = world.registry.gather();
        let name = "kvasir_conductor_prediction_error_ratio";
        let family = families.iter().find(|family| family.name() == name).expect("registered");
        let mut metrics = family.get_metric().iter();
        let of_it = metrics.find(|metric| metric.get_label()[0].value() == of);
        of_it.map(|metric| metric.get_gauge().get_value())
    };
    assert!(error("tbt").is_some_and(|error| error > 0.0), "the first ones were off");
    assert!(error("ttft").is_some() && error("prefill").is_some());
    assert!(error("queue").is_none(), "no engine has said how long anything waited");
    other.booking.queued(1_000);
    assert!(error("queue").is_some() && error("fetch").is_none());
}

#[tokio::test]
async fn who_may_wait_here_is_placed_when_its_prefill_would_begin_soon() {
    let mut b = node("b", v1::Role::Both).await;
    let world = World::of(&[&b]);
    let _events = followed(&mut b).await;
    eventually("placed", || world.plan().is_ok()).await;
    let within = |ahead_us| {
        world.with_query(|cluster, query| match cluster.place_within(query, ahead_us) {
            Ok(placed) => Ok(Some(placed)),
            Err(NotNow::Queues { placement }) => {
                assert!(placement.queue_us > ahead_us);
                Ok(None)
            }
            Err(NotNow::Refused(none)) => Err(none.refused.refusal),
        })
    };
    let first = within(0).expect("a place").expect("nothing is before it");
    assert!(within(0).expect("a place").is_none(), "it would wait for the first");
    let second = within(3_600_000_000).expect("a place").expect("not for that long");
    assert_eq!(world.metric("kvasir_conductor_placements_total"), 2.0);
    drop((first, second));
    assert!(within(0).expect("a place").is_some());
    assert_eq!(world.metric("kvasir_conductor_refusals_total"), 0.0, "waiting is no refusal");
}
