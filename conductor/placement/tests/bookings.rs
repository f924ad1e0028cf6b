//! What is booked counts at once, and only as long as it lasts.

use crate::support::World;
use kvasir_placement::{
    BookingId, IndexLimits, InstanceReport, NodeIndex, Objectives, OverloadReason, PrefixMatch,
    Refusal, ShadowIndex, Tier,
};
use kvasir_proto::BlockKey;

#[test]
fn equal_requests_spread_over_equal_instances() {
    let mut world = World::new(&["p0", "p1", "p2", "p3", "d0", "d1"]);
    let mut prefills = Vec::new();
    let mut decodes = Vec::new();
    for _ in 0..8 {
        let (_, placement) = world.book(0);
        prefills.push(placement.prefill().instance_id.clone());
        decodes.push(placement.decode().instance_id.clone());
    }
    for instance in world.view.instances() {
        let id = &instance.report().instance_id;
        let booked = prefills.iter().chain(&decodes).filter(|taken| *taken == id).count();
        let want = if instance.report().role.prefills() { 2 } else { 4 };
        assert!(booked.abs_diff(want) <= 1, "{id}: {booked} of 8");
    }
}

#[test]
fn a_queue_drains_as_time_goes_and_when_work_ends() {
    let mut world = World::new(&["p0", "d0"]);
    let queue = |world: &World, now_us: u64| {
        world.place(|request| request.now_us = now_us).expect("a placement").queue_us
    };
    let (first, _) = world.book(0);
    let (second, _) = world.book(0);
    assert_eq!(queue(&world, 0), 22_000);
    assert_eq!(queue(&world, 5_000), 17_000);
    assert_eq!(queue(&world, 50_000), 11_000, "one that overruns counts as about to end");
    world.view.prefilled(first, None, 60_000);
    assert_eq!(queue(&world, 61_000), 10_000);
    world.view.revise(second, 960);
    assert_eq!(queue(&world, 60_000), 1_400, "its node held more than was known");
    world.view.unbook(second, None, 62_000);
    assert_eq!(queue(&world, 62_000), 0);
    world.view.unbook(first, Some(100), 70_000);
    assert_eq!(world.view.bookings(), 0);
}

#[test]
fn work_that_was_reported_is_not_counted_twice() {
    let mut world = World::new(&["p0", "d0"]);
    world.book(0);
    let load = |report: &mut kvasir_placement::InstanceReport, tokens| {
        report.load.waiting_prompt_tokens = tokens;
        report.load.running = 1;
    };
    let own = world.reports("p0", |report| load(report, 1_000)).reports("d0", |r| load(r, 0));
    let placement = own.place(|_| {}).expect("a placement");
    assert_eq!(placement.queue_us, 11_000);
    assert!((placement.considered.decode_candidates[0].load - 0.2).abs() < 1e-9);
    let others = own.reports("p0", |report| load(report, 1_512));
    assert_eq!(others.place(|_| {}).expect("a placement").queue_us, 11_000 + 6_120);
}

#[test]
fn own_work_that_ends_is_not_taken_for_that_of_others() {
    let mut world = World::new(&["p0", "d0"]);
    let (id, _) = world.book(0);
    let mut world = world.reports("p0", |report| report.load.waiting_prompt_tokens = 1_000);
    world.view.unbook(id, None, 0);
    assert_eq!(world.place(|_| {}).expect("a placement").queue_us, 0);
}

#[test]
fn decode_load_is_that_of_the_time_when_the_prefill_ends() {
    // Ten answers of one second each, handed over at once.
    let mut world = World::new(&["p0", "d0"]);
    for _ in 0..10 {
        let (id, _) = world.book(0);
        world.view.prefilled(id, None, 0);
    }
    let wait = |world: &World, now_us| {
        let placement = world.place(|request| request.now_us = now_us).expect("a placement");
        (placement.considered.decode_candidates[0].load, placement.decode_wait_us)
    };
    assert_eq!(wait(&world, 0), (1.1, 100_000), "one too many for a while");
    assert_eq!(wait(&world, 988_999), (1.1, 100_000));
    assert_eq!(wait(&world, 989_000), (0.1, 0), "all will have ended 11 ms later");
    // They overrun: the longer, the less is known of when they end.
    let (load, _) = wait(&world, 1_500_000);
    assert!((1.0..1.1).contains(&load), "{load}");
}

#[test]
fn an_answer_lasts_from_its_first_hand_over() {
    let mut world = World::new(&["p0", "d0"]);
    let (id, _) = world.book(0);
    world.view.prefilled(id, None, 0);
    world.view.prefilled(id, Some((1_000, 11_000)), 900_000);
    let placement = world.place(|request| request.now_us = 990_000).expect("a placement");
    assert!(
        (placement.considered.decode_candidates[0].load - 0.1).abs() < 1e-9,
        "it ends at one second"
    );
    world.view.unbook(id, Some(100), 4_000_000);
    // The profile's one second and the four that it took, in the mean.
    let (id, _) = world.book(0);
    world.view.prefilled(id, None, 0);
    let load = |now_us| {
        let placement = world.place(|request| request.now_us = now_us).expect("a placement");
        placement.considered.decode_candidates[0].load
    };
    assert!((load(2_480_000) - 0.2).abs() < 1e-9);
    assert!((load(2_495_000) - 0.1).abs() < 1e-9);
}

/// Of twenty requests that come at once, for ten seats, those that are let in.
fn burst(world: &mut World, now_us: u64) -> Vec<BookingId> {
    let mut booked = Vec::new();
    for number in 0..20 {
        let id = BookingId(now_us + number);
        let placed = world.place(|request| {
            request.now_us = now_us;
            request.max_tokens = 10_000;
            request.objectives = Objectives { ttft_us: 2_000_000, ..Objectives::NONE };
        });
        match placed {
            Ok(placement) => {
                world.view.book(id, &placement, now_us);
                world.view.prefilled(id, None, now_us);
                booked.push(id);
            }
            Err(Refusal::Overloaded { reason: OverloadReason::Ttft, .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
    booked
}

#[test]
fn answers_that_all_break_off_at_a_deadline_let_fewer_in_until_they_end_sooner_again() {
    let mut world = World::new(&["p0", "d0"]);
    let mut now_us = 0;
    let first = burst(&mut world, now_us);
    assert_eq!(first.len(), 20, "answers of a second: the last one waits for as long");
    now_us += 60_000_000;
    for id in first {
        world.view.grew(id, 400);
        world.view.unbook(id, None, now_us);
    }
    let mut admitted = burst(&mut world, now_us);
    assert_eq!(admitted.len(), 10, "as many as there are seats");
    let mut bursts = 0;
    while admitted.len() < 20 {
        now_us += 1_000_000;
        for id in admitted {
            world.view.unbook(id, Some(100), now_us);
        }
        admitted = burst(&mut world, now_us);
        bursts += 1;
        assert!(bursts < 10, "it still lets in only {}", admitted.len());
    }
}

#[test]
fn an_answer_that_broke_off_was_longer_than_it_got_and_an_early_end_says_nothing() {
    // The next one's wait for a seat, in ms, and whether it is expected to fit into 40 slots. By
    // the profile an answer takes a second and has 256 tokens.
    let check = |end_us: u64, tokens: u32, handed_over: bool, want: (u64, bool)| {
        let mut world = World::new(&["p0", "d0"]);
        let (id, _) = world.book(0);
        if handed_over {
            world.view.prefilled(id, None, 0);
        }
        world.view.grew(id, tokens);
        world.view.unbook(id, None, end_us);
        for _ in 0..10 {
            let (id, _) = world.book(end_us);
            world.view.prefilled(id, None, end_us);
        }
        let placement = world.place(|request| request.now_us = end_us).expect("a placement");
        let world = world.reports("d0", |report| report.slots_available = 60);
        let fits = world.place(|request| request.max_tokens = 100_000).is_ok();
        let got = (placement.decode_wait_us / 1_000, fits);
        assert_eq!(got, want, "{end_us} us, {tokens} tokens, handed over: {handed_over}");
    };
    check(10_000, 1, true, (100, true));
    check(1_000_000, 256, true, (100, true));
    check(10_000, 8_000, true, (100, false));
    check(9_000_000, 1, true, (500, true));
    check(9_000_000, 0, false, (100, true));
}

#[test]
fn models_that_nobody_serves_are_forgotten_when_there_are_too_many() {
    let mut world = World::new(&["b0", "d1"]);
    for version in 0..600u32 {
        world = world.reports("d1", |report| {
            report.model.fingerprint[..4].copy_from_slice(&version.to_le_bytes());
        });
    }
    assert_eq!(world.view.models().count(), 256);
    assert!(world.place(|_| {}).is_ok(), "what is served stays");
}

#[test]
fn bytes_on_their_way_make_the_next_transfer_dearer_until_they_arrive() {
    let transfer = |world: &World| world.place(|_| {}).expect("a placement").transfer_us;
    let mut world = World::new(&["p0", "d0"]).held(&[(1, 10)]);
    assert_eq!(transfer(&world), 1_100);
    let (first, _) = world.book(0);
    let (second, _) = world.book(0);
    assert_eq!(transfer(&world), 3_100);
    world.view.fetched(first, None);
    assert_eq!(transfer(&world), 2_100);
    world.view.fetched(first, None);
    assert_eq!(transfer(&world), 2_100, "it ends once");
    world.view.unbook(second, None, 0);
    world.view.unbook(first, None, 0);
    assert_eq!(transfer(&world), 1_100);
}

#[test]
fn only_a_fetch_that_was_alone_makes_the_way_look_slow() {
    let transfer = |world: &World| world.place(|_| {}).expect("a placement").transfer_us;
    // Ten times as long as it is predicted to take.
    let slow = Some((1_000_000, 11_000));
    let mut world = World::new(&["p0", "d0"]).held(&[(1, 10)]);
    let (first, _) = world.book(0);
    let (second, _) = world.book(0);
    for id in [first, second] {
        world.view.fetched(id, slow);
        world.view.unbook(id, None, 0);
    }
    assert_eq!(transfer(&world), 1_100, "each may have waited for the other");
    let (third, _) = world.book(0);
    world.view.fetched(third, slow);
    world.view.unbook(third, None, 0);
    let learned_us = transfer(&world);
    assert!(learned_us > 1_500, "{learned_us}");
    let (fourth, _) = world.book(0);
    let (fifth, _) = world.book(0);
    for id in [fourth, fifth] {
        world.view.fetched(id, Some((1_000_000, 1_100)));
        world.view.unbook(id, None, 0);
    }
    assert!(transfer(&world) < learned_us, "whatever is faster shows what the way carries");
}

#[test]
fn a_fetch_that_the_source_reads_from_its_ssd_does_not_make_the_way_look_slow() {
    let keys: Vec<BlockKey> = (1..=15u8).map(|n| BlockKey([n; 16])).collect();
    let link = |tier: Tier| {
        let mut world = World::new(&["p0", "p1", "d0"])
            .reports("p0", |report| report.load.waiting_prompt_tokens = 256_000);
        let mut index = ShadowIndex::new(IndexLimits::default());
        let node = index.add_node().expect("room");
        index.insert(node, Tier::Dram, &keys[..14]);
        index.insert(node, tier, &keys[14..]);
        world.matched = index.match_prefix(&keys);
        let (id, placement) = world.book(0);
        assert!(placement.fetch.is_some(), "{placement}");
        world.view.fetched(id, Some((1_500_000, 3_100)));
        world.view.unbook(id, None, 0);
        world.matched = PrefixMatch::from_pairs(&[(NodeIndex(0), 14)]);
        world.place(|_| {}).expect("a placement").transfer_us
    };
    let (from_memory, from_ssd) = (link(Tier::Dram), link(Tier::Ssd));
    assert_eq!(from_ssd, 1_500);
    assert!(from_memory > 1_600, "{from_memory}");
}

#[test]
fn slots_are_taken_until_the_node_reports_them() {
    let mut world = World::new(&["p0", "d0"])
        .reports("p0", |report| report.slots_available = 40)
        .held(&[(0, 4)]);
    world.book(0);
    world.book(0);
    world.book(0);
    assert!(world.place(|_| {}).is_err(), "3 x 12 of 40 are taken");
    let world = world.reports("p0", |report| report.slots_available = 12);
    assert!(world.place(|_| {}).is_ok());
}

#[test]
fn slots_are_given_back_when_their_request_ends_and_not_when_a_report_comes() {
    // 60 slots, of which each request takes 16 and its answer two; one stays all the time, so that
    // neither side is ever idle.
    let available = |slots: u32| move |report: &mut InstanceReport| report.slots_available = slots;
    let mut world =
        World::new(&["p0", "d0"]).reports("p0", available(60)).reports("d0", available(60));
    world.book(0);
    for _ in 0..30 {
        let (id, _) = world.book(0);
        world.view.prefilled(id, None, 0);
        world.view.prefilled(id, None, 0);
        world.view.grew(id, 100);
        world.view.unbook(id, Some(100), 0);
    }
    for _ in 0..30 {
        let (id, _) = world.book(0);
        world.view.unbook(id, None, 0);
    }
    // The node has counted the slots of what ends after its report itself.
    let (first, _) = world.book(0);
    let mut world = world.reports("p0", available(60)).reports("d0", available(37));
    world.book(0);
    world.view.unbook(first, None, 0);
    assert!(world.place(|_| {}).is_err(), "37 less 16, less two for each of two answers");
}

#[test]
fn an_idle_cluster_does_not_refuse_for_want_of_room() {
    let mut world = World::new(&["p0", "d0"]);
    let (id, _) = world.book(0);
    // The node's last word was said while this request had its slots.
    let left = |report: &mut InstanceReport| {
        report.slots_total = 37;
        report.slots_available = 3;
    };
    let mut world = world.reports("p0", left).reports("d0", left);
    let no_room =
        |placed| matches!(placed, Err(Refusal::Overloaded { reason: OverloadReason::NoRoom, .. }));
    assert!(no_room(world.place(|_| {})));
    world.view.unbook(id, Some(100), 0);
    assert!(world.place(|_| {}).is_ok(), "its node decides");
    // Where somebody has room by what is known, that one is taken.
    world.view.report(crate::support::report("d1", 2, kvasir_placement::Role::Decode), 0);
    let world = world.reports("d1", |report| report.load.running = 9);
    let placement = world.place(|_| {}).expect("a placement");
    assert_eq!(&*placement.decode().instance_id.0, "d1");
    // What others run there is work, too, whoever has booked it.
    let world = world
        .reports("d0", |report| report.load.running = 1)
        .reports("d1", |report| report.slots_available = 3);
    assert!(no_room(world.place(|_| {})));
}

#[test]
fn slots_that_answers_will_take_are_kept_for_them() {
    // 100 tokens after 1,000 take two blocks more; the profile's mean is above that.
    let mut world = World::new(&["p0", "d0"]).reports("d0", |report| report.slots_available = 36);
    let fits = |world: &World, max_tokens| {
        let placement = world.place(|request| request.max_tokens = max_tokens);
        match placement {
            Ok(_) => true,
            Err(Refusal::Overloaded { reason: OverloadReason::NoRoom, .. }) => false,
            other => panic!("{other:?}"),
        }
    };
    assert!(fits(&world, 100_000), "one that is alone has all the room there is");
    let (first, _) = world.book(0);
    assert!(fits(&world, 100), "two need 36");
    assert!(!fits(&world, 100_000), "it is expected to be as long as answers are");
    // The node has given out the prompt's 16; the answer's two are still to come.
    let world = world.reports("d0", |report| report.slots_available = 20);
    assert!(fits(&world, 100));
    let mut world = world.reports("d0", |report| report.slots_available = 19);
    assert!(!fits(&world, 100));
    world.view.grew(first, 25);
    assert!(!fits(&world, 100), "one is taken, one expected");
    let mut world = world.reports("d0", |report| report.slots_available = 19);
    assert!(fits(&world, 100), "what was taken is in the report");
    world.view.grew(first, 75);
    let mut world = world.reports("d0", |report| report.slots_available = 17);
    assert!(!fits(&world, 100));
    // It ends, and teaches that answers are short.
    world.view.prefilled(first, None, 0);
    for _ in 0..60 {
        world.view.unbook(first, Some(1), 0);
        let all = |report: &mut InstanceReport| report.slots_available = 1_000;
        world = world.reports("p0", all).reports("d0", all);
        let placement = world.place(|_| {}).expect("idle");
        world.view.book(first, &placement, 0);
        world.view.prefilled(first, None, 0);
    }
    let world = world.reports("d0", |report| report.slots_available = 18);
    assert!(fits(&world, 100), "one block each is enough for answers of one token");
}

#[test]
fn an_engine_that_comes_back_has_an_empty_queue_and_the_speed_it_had() {
    let mut world = World::new(&["p0", "d0"]);
    let (id, _) = world.book(0);
    world.view.prefilled(id, Some((1_000, 55_000)), 0);
    world.book(0);
    let mut again = world.reports("p0", |report| report.attachment = (1, 2));
    let placement = again.place(|_| {}).expect("a placement");
    assert_eq!(placement.queue_us, 0);
    assert!(placement.compute_us > 40_000, "{}", placement.compute_us);
    // What was booked on the one before is over, and its end changes nothing.
    again.view.unbook(BookingId(2), None, 0);
    assert_eq!(again.place(|_| {}).expect("a placement").queue_us, 0);
    let mut other = again;
    for name in ["p0", "d0"] {
        other = other.reports(name, |report| report.model.fingerprint[0] += 1);
    }
    assert_eq!(other.view.models().count(), 2);
    other.model = other.view.models().last().expect("two").0;
    let placement = other.place(|_| {}).expect("a placement");
    assert_eq!(placement.compute_us, 11_000, "another model starts from the profile");
}

#[test]
fn an_instance_learns_from_its_own_prefills() {
    let mut world = World::new(&["p0", "p1", "d0"]);
    for _ in 0..10 {
        let (id, placement) = world.book(0);
        // p0 is ten times as slow as the profile says.
        let slow = &*placement.prefill().instance_id.0 == "p0";
        let us = if slow { 110_000 } else { 11_000 };
        world.view.prefilled(id, Some((1_000, us)), 0);
        world.view.unbook(id, Some(100), 0);
    }
    for tie_seed in 0..20 {
        let placement = world.place(|request| request.tie_seed = tie_seed).expect("a placement");
        assert_eq!(&*placement.prefill().instance_id.0, "p1");
    }
}

#[test]
fn a_node_under_another_number_keeps_its_instance() {
    let mut world = World::new(&["p0", "d0"]).held(&[(0, 15)]);
    assert_eq!(world.place(|_| {}).expect("a placement").prefill().cached_blocks, 15);
    world.view.renumber_node(kvasir_placement::NodeIndex(0), kvasir_placement::NodeIndex(5));
    assert_eq!(world.place(|_| {}).expect("a placement").prefill().cached_blocks, 0);
    world.matched = PrefixMatch::from_pairs(&[(kvasir_placement::NodeIndex(5), 15)]);
    assert_eq!(world.place(|_| {}).expect("a placement").prefill().cached_blocks, 15);
}

#[test]
fn when_requests_end_is_read_off_their_bookings() {
    let mut world = World::new(&["p0", "d0"]);
    assert_eq!(world.view.requests_end_in_us(1, 0), 0);
    // Booked half a second apart: 11 ms to the first token, then a second.
    let (first, _) = world.book(0);
    world.book(500_000);
    let ends = |world: &World, count, now_us| world.view.requests_end_in_us(count, now_us);
    assert_eq!((ends(&world, 1, 600_000), ends(&world, 2, 600_000)), (411_000, 911_000));
    assert_eq!(ends(&world, 3, 600_000), 911_000, "there are no three: the last");
    assert_eq!(ends(&world, 1, 1_100_000), 411_000, "one overruns: half an answer time");
    assert_eq!(ends(&world, 2, 1_100_000), 500_000);
    world.view.unbook(first, None, 600_000);
    assert_eq!(ends(&world, 1, 600_000), 911_000);
}

#[test]
fn when_slots_come_free_is_read_off_the_bookings_of_their_instance() {
    let mut world = World::new(&["p0", "d0"]);
    let frees =
        |world: &World, name: &str, slots| world.view.slots_free_in_us(&name.into(), slots, 0);
    assert_eq!(frees(&world, "d0", 1), 1_000_000, "others have them: as long as an answer takes");
    let (first, _) = world.book(0);
    world.book(0);
    // 16 slots of the prompt here and there; an answer's two are with its decode side.
    assert_eq!((frees(&world, "p0", 16), frees(&world, "p0", 17)), (11_000, 22_000));
    assert_eq!((frees(&world, "d0", 18), frees(&world, "d0", 19)), (1_011_000, 1_022_000));
    assert_eq!(frees(&world, "d0", 37), 1_022_000, "others have the rest");
    assert_eq!(frees(&world, "nobody", 1), 0);
    world.view.prefilled(first, None, 0);
    assert_eq!((frees(&world, "p0", 16), frees(&world, "d0", 18)), (22_000, 1_000_000));
}
