//! Decisions as text, and the refusals. Prices are those of `support`.

use crate::support::{World, report};
use kvasir_placement::{
    BookingId, Missing, Objectives, OverloadReason, PlaceRequest, Policy, Refusal, Role, Selection,
};
use kvasir_proto::InstanceId;

fn check(world: &World, want: &str) {
    let got = world.place(|_| {}).expect("a placement").to_string();
    assert_eq!(got, want.trim(), "\n--- got ---\n{got}\n-----------");
}

#[test]
fn an_idle_pair_takes_the_request() {
    check(
        &World::new(&["p0", "d0"]),
        "
prompt of 1000 tokens in 16 blocks
prefill p0@n0: cached 0, max(queue 0, transfer 0) + compute 11000 = 11000 us: chosen
decode d0@n1: cached 0, load 0.10, wait 0 us, step 1100 us: chosen
split p0 -> d0, first token in 11000 us, then every 1100 us",
    );
}

#[test]
fn one_that_does_both_serves_it_whole() {
    check(
        &World::new(&["b0"]).held(&[(0, 10)]),
        "
prompt of 1000 tokens in 16 blocks
prefill b0@n0: cached 10, max(queue 0, transfer 0) + compute 4600 = 4600 us: chosen
decode b0@n0: cached 10, load 0.10, wait 0 us, step 1100 us: chosen
full on b0, first token in 4600 us, then every 1100 us",
    );
}

#[test]
fn the_longest_prefix_wins_among_the_idle() {
    check(
        &World::new(&["p0", "p1", "d0"]).held(&[(0, 12), (1, 8)]),
        "
prompt of 1000 tokens in 16 blocks
prefill p0@n0: cached 12, max(queue 0, transfer 0) + compute 3320 = 3320 us: chosen
prefill p1@n1: cached 8, fetch to 12 from n0, max(queue 0, transfer 500) + compute 3320 = 3820 us: higher cost
decode d0@n2: cached 0, load 0.10, wait 0 us, step 1100 us: chosen
split p0 -> d0, first token in 3320 us, then every 1100 us",
    );
}

#[test]
fn a_busy_holder_gives_its_blocks_to_an_idle_instance() {
    let busy = World::new(&["p0", "p1", "d0"])
        .held(&[(0, 12), (1, 2)])
        .reports("p0", |report| report.load.waiting_prompt_tokens = 5_120);
    check(
        &busy,
        "
prompt of 1000 tokens in 16 blocks
prefill p0@n0: cached 12, max(queue 61200, transfer 0) + compute 3320 = 64520 us: higher cost
prefill p1@n1: cached 2, fetch to 12 from n0, max(queue 0, transfer 1100) + compute 3320 = 4420 us: chosen
decode d0@n2: cached 0, load 0.10, wait 0 us, step 1100 us: chosen
split p1 -> d0, fetch [2, 12) from n0, first token in 4420 us, then every 1100 us",
    );
}

#[test]
fn queue_and_transfer_overlap() {
    // Both are busy, the holder more so: its blocks travel while p1 works on its queue.
    let busy = World::new(&["p0", "p1", "d0"])
        .held(&[(0, 12)])
        .reports("p0", |report| report.load.waiting_prompt_tokens = 5_120)
        .reports("p1", |report| report.load.waiting_prompt_tokens = 512);
    check(
        &busy,
        "
prompt of 1000 tokens in 16 blocks
prefill p0@n0: cached 12, max(queue 61200, transfer 0) + compute 3320 = 64520 us: higher cost
prefill p1@n1: cached 0, fetch to 12 from n0, max(queue 6120, transfer 1300) + compute 3320 = 9440 us: chosen
decode d0@n2: cached 0, load 0.10, wait 0 us, step 1100 us: chosen
split p1 -> d0, fetch [0, 12) from n0, first token in 9440 us, then every 1100 us",
    );
}

#[test]
fn the_decode_side_can_be_the_source() {
    let world = World::new(&["p0", "d0"]).held(&[(1, 15)]);
    let placement = world.place(|_| {}).expect("a placement");
    let fetch = placement.fetch.as_ref().expect("a fetch");
    assert_eq!((fetch.from_block, fetch.until_block, fetch.bytes), (0, 15, 1_500_000));
    assert_eq!(fetch.source.instance_id, placement.decode().instance_id);
    assert_eq!((placement.reused_tokens, placement.compute_tokens), (960, 40));
}

#[test]
fn a_dear_fetch_is_left_unless_the_policy_insists() {
    // 10 bytes a microsecond: 100,000 us for ten blocks that take 6,400 us to compute.
    for always_fetch in [false, true] {
        let policy = Policy { always_fetch, ..Policy::default() };
        let mut world = World::with_policy(&["p0", "d0"], policy).held(&[(1, 10)]);
        assert!(world.place(|_| {}).expect("a placement").fetch.is_some());
        for _ in 0..100 {
            let (id, _) = world.book(0);
            world.view.fetched(id, Some((1_000_000, 100_000)));
            world.view.unbook(id, None, 0);
            world = world.reports("p0", |_| {}).reports("d0", |_| {});
        }
        assert_eq!(world.place(|_| {}).expect("a placement").fetch.is_some(), always_fetch);
    }
}

#[test]
fn the_threshold_decides_whether_a_fetch_is_looked_at() {
    let fetches = |threshold: f64, held: &[(u16, u32)]| {
        let policy = Policy {
            selection: Selection::KvcacheCentric,
            kvcache_balancing_threshold: threshold,
            always_fetch: true,
            ..Policy::default()
        };
        let world = World::with_policy(&["p0", "d0"], policy).held(held);
        let fetches = |tie_seed| {
            let placement = world.place(|request| request.tie_seed = tie_seed);
            placement.expect("a placement").fetch.is_some()
        };
        assert!((1..20).all(|seed| fetches(seed) == fetches(0)));
        fetches(0)
    };
    assert!(!fetches(2.0, &[(0, 5), (1, 10)]), "twice as long is not above two");
    assert!(fetches(2.0, &[(0, 5), (1, 11)]));
    assert!(fetches(1000.0, &[(1, 1)]), "no hit counts as above it");
    assert!(!fetches(0.0, &[(0, 5), (1, 5)]), "there is nothing to bring");
    assert!(!fetches(0.0, &[(0, 5)]), "it is the best holder itself");
}

#[test]
fn at_least_one_token_is_computed() {
    let world = World::new(&["p0", "d0"]).held(&[(0, 15), (1, 15)]);
    for (prompt_tokens, computed) in [(960, 64), (961, 1), (1, 1), (64, 64), (65, 1), (1_000, 40)] {
        let placement = world.place(|request| request.prompt_tokens = prompt_tokens);
        assert_eq!(placement.expect("a placement").compute_tokens, computed, "{prompt_tokens}");
    }
}

#[test]
fn decode_goes_where_there_is_least_load_then_most_prefix() {
    let decode =
        |world: &World| world.place(|_| {}).expect("a placement").decode().instance_id.to_string();
    let world = World::new(&["p0", "d0", "d1", "d2"]).held(&[(2, 3), (3, 5)]);
    assert_eq!(decode(&world), "d2");
    let world = world.reports("d2", |report| report.load.running = 1);
    assert_eq!(decode(&world), "d2", "a tenth more load is nearly as idle");
    let world = world.reports("d2", |report| report.load.running = 2);
    assert_eq!(decode(&world), "d1");
    let world = world.reports("d1", |report| report.load.waiting = 8);
    assert_eq!(decode(&world), "d0");
    let world = world.reports("d0", |report| report.slots_available = 16);
    assert_eq!(decode(&world), "d2", "the prompt and one more block must fit");
    let world = World::new(&["p0", "d0", "d1"])
        .held(&[(1, 3)])
        .reports("d0", |report| report.slots_available = 17);
    assert_eq!(decode(&world), "d1", "the whole answer would not fit on d0");
}

#[test]
fn instances_of_another_model_or_layout_are_never_mixed() {
    let mut world = World::new(&["p0"]);
    let mut other = report("d0", 1, Role::Decode);
    other.model.layout_hash += 1;
    world.view.report(other, 0);
    let want = Refusal::NoInstance { model: "tiny".to_string(), missing: Missing::Decode };
    assert_eq!(world.place(|_| {}), Err(want));
    assert!(!world.view.serves(world.model));
    let mut holder = report("p1", 2, Role::Prefill);
    holder.model.fingerprint[0] += 1;
    world.view.report(holder, 0);
    world.view.report(report("d1", 3, Role::Decode), 0);
    let placement = world.held(&[(2, 15)]).place(|_| {}).expect("a placement");
    assert_eq!(placement.considered.prefill_candidates.len(), 1);
    assert_eq!(placement.fetch, None, "blocks of another model are no hit");
}

fn check_refusal(world: &World, objectives: Objectives, want: Refusal) {
    assert_eq!(world.place(|request| request.objectives = objectives), Err(want));
}

#[test]
fn a_request_that_cannot_meet_its_objectives_is_refused_with_the_time_to_wait() {
    let objectives = |ttft_us, tbt_us| Objectives { ttft_us, tbt_us };
    let overloaded = |predicted_ttft_us, retry_after_ms, reason| Refusal::Overloaded {
        predicted_ttft_us,
        retry_after_ms,
        reason,
    };
    // 256,000 tokens wait: 500 times 6,120 us.
    let busy = World::new(&["p0", "d0"])
        .reports("p0", |report| report.load.waiting_prompt_tokens = 256_000);
    assert!(busy.place(|request| request.objectives = objectives(3_071_000, 1_100)).is_ok());
    let want = overloaded(3_071_000, 2_071, OverloadReason::Ttft);
    check_refusal(&busy, objectives(1_000_000, u64::MAX), want);
    // No shorter queue helps its own 11 ms: it is tried when there is none.
    let want = overloaded(3_071_000, 3_060, OverloadReason::Ttft);
    check_refusal(&busy, objectives(1_000, u64::MAX), want);
    // 12 run and this one: three over ten wait for three tenths of an answer, after 11 ms in
    // which 0.13 of the twelve will have ended.
    let full = World::new(&["p0", "d0"]).reports("d0", |report| report.load.running = 12);
    let want = overloaded(297_800, 1_000, OverloadReason::Ttft);
    check_refusal(&full, objectives(100_000, u64::MAX), want);
    let no_room = World::new(&["p0", "d0"]).reports("d0", |report| {
        report.slots_available = 16;
        report.load.running = 1;
    });
    let want = overloaded(11_000, 1_000, OverloadReason::NoRoom);
    check_refusal(&no_room, Objectives::NONE, want);
}

#[test]
fn a_refusal_shows_what_everybody_would_have_cost_and_why_nobody_was_taken() {
    let check = |world: &World, change: fn(&mut PlaceRequest<'_>), want: &[&str]| {
        let refused = world.decide(change).expect_err("refused");
        assert_eq!(refused.to_string().lines().collect::<Vec<_>>(), want);
        let explained = refused.explain();
        assert_eq!(
            (explained.reason, explained.message),
            (refused.refusal.label(), refused.refusal.to_string())
        );
        let lines = explained.prefill_candidates.len() + explained.decode_candidates.len();
        assert_eq!(lines, want.len() - 2);
    };
    let slow = |request: &mut PlaceRequest<'_>| request.objectives.ttft_us = 1_000_000;
    let world = World::new(&["p0", "p1", "d0", "d1"])
        .held(&[(1, 15)])
        .reports("p0", |report| report.load.waiting_prompt_tokens = 256_000)
        .reports("p1", |report| report.draining = true)
        .reports("d1", |report| {
            report.slots_available = 0;
            report.load.running = 1;
        });
    check(
        &world,
        slow,
        &[
            "prompt of 1000 tokens in 16 blocks",
            "prefill p0@n0: cached 0, max(queue 3060000, transfer 0) + compute 11000 = 3071000 us: misses the TTFT objective",
            "prefill p1@n1: cached 15, max(queue 0, transfer 0) + compute 1400 = 1400 us: draining",
            "decode d0@n2: cached 0, load 0.10, wait 0 us, step 1100 us: no prefill instance in time",
            "decode d1@n3: cached 0, load 0.10, wait 0 us, step 1100 us: no capacity",
            "refused: no instance can meet the TTFT objective; predicted time to first token 3071000 us; retry after 2071 ms",
        ],
    );
    let small = World::new(&["p0", "d0"]).reports("d0", |report| {
        report.slots_total = 16;
        report.slots_available = 16;
    });
    check(
        &small,
        |_| {},
        &[
            "prompt of 1000 tokens in 16 blocks",
            "prefill p0@n0: cached 0, max(queue 0, transfer 0) + compute 11000 = 11000 us: no decode instance",
            "decode d0@n1: cached 0, load 0.10, wait 0 us, step 1100 us: no capacity",
            "refused: it needs 16 cache blocks, and an instance has at most 15",
        ],
    );
    check(
        &World::new(&["d0"]),
        |_| {},
        &[
            "prompt of 1000 tokens in 16 blocks",
            "decode d0@n0: cached 0, load 0.10, wait 0 us, step 1100 us: no prefill instance in time",
            "refused: no prefill instance of model `tiny` is available",
        ],
    );
}

#[test]
fn the_time_to_wait_is_when_what_is_booked_makes_room() {
    let ms = |world: &World, now_us, change: fn(&mut PlaceRequest<'_>)| {
        let placed = world.place(|request| {
            request.now_us = now_us;
            change(request);
        });
        match placed {
            Err(Refusal::Overloaded { retry_after_ms, reason, .. }) => (retry_after_ms, reason),
            other => panic!("{other:?}"),
        }
    };
    // Answers of 5 s in the mean; six, begun half a second apart, of which the first ends at 5 s.
    let mut world = World::new(&["p0", "d0"]);
    let (id, _) = world.book(0);
    world.view.prefilled(id, None, 0);
    world.view.unbook(id, Some(100), 9_000_000);
    for half_seconds in 0..6 {
        let (id, _) = world.book(half_seconds * 500_000);
        world.view.prefilled(id, None, half_seconds * 500_000);
    }
    // One more makes seven, in steps of 1,700 us.
    let tbt = OverloadReason::Tbt;
    assert_eq!(ms(&world, 3_800_000, |r| r.objectives.tbt_us = 1_600), (1_200, tbt), "one ends");
    assert_eq!(ms(&world, 3_800_000, |r| r.objectives.tbt_us = 1_400), (2_200, tbt), "three");
    assert_eq!(ms(&world, 3_800_000, |r| r.objectives.tbt_us = 1_099), (3_700, tbt), "all");
    assert_eq!(ms(&world, 4_800_000, |r| r.objectives.tbt_us = 1_600), (1_000, tbt), "at least");
    // Each is to take two slots yet; one is left then, of the 18 that are needed.
    let world = world.reports("d0", |report| report.slots_available = 13);
    assert_eq!(ms(&world, 3_800_000, |_| {}), (1_200, OverloadReason::NoRoom));
}

#[test]
fn what_only_estimates_forbid_is_tried_one_at_a_time_on_each_idle_instance() {
    let objectives = |ttft_us, tbt_us| Objectives { ttft_us, tbt_us };
    let check = |names: &[&str], objectives: Objectives, at_once: usize| {
        let mut world = World::new(names);
        for number in 0..at_once {
            let placement = world.place(|request| request.objectives = objectives);
            let placement = placement.unwrap_or_else(|e| panic!("{names:?} {number}: {e}"));
            assert!(placement.probe, "{placement}");
            assert!(placement.to_string().ends_with("a probe: not within the objectives"));
            world.view.book(BookingId(100 + number as u64), &placement, 0);
        }
        let refused = world.place(|request| request.objectives = objectives);
        assert!(matches!(refused, Err(Refusal::Overloaded { .. })), "{names:?} {refused:?}");
    };
    check(&["p0", "d0"], objectives(10_999, u64::MAX), 1);
    check(&["p0", "d0"], objectives(u64::MAX, 1_099), 1);
    check(&["p0", "d0"], objectives(0, 0), 1);
    check(&["b0"], objectives(10_999, 1_100), 1);
    check(&["p0", "p1", "d0"], objectives(10_999, u64::MAX), 2);
    check(&["p0", "p1", "d0", "d1"], objectives(u64::MAX, 1_099), 2);
    check(&["p0", "d0", "d1"], objectives(u64::MAX, 1_099), 2);
    check(&["b0", "b1"], objectives(0, 0), 2);
    let placement = World::new(&["p0", "d0"]).place(|r| r.objectives = objectives(11_000, 1_100));
    assert!(!placement.expect("within the objectives").probe);
}

#[test]
fn queues_are_never_doubted() {
    let strict = Objectives { ttft_us: 10_999, tbt_us: 1_099 };
    let check = |name: &str, change: fn(&mut kvasir_placement::InstanceReport)| {
        let world = World::new(&["p0", "d0"]).reports(name, change);
        let refused = world.place(|request| request.objectives = strict);
        assert!(matches!(refused, Err(Refusal::Overloaded { .. })), "{name} {refused:?}");
    };
    check("p0", |report| report.load.waiting_prompt_tokens = 1);
    check("p0", |report| report.load.running = 1);
    check("d0", |report| report.load.running = 1);
    check("d0", |report| report.load.waiting = 1);
    // A fetch behind others' from the same node, which alone would be worth it.
    let mut world = World::new(&["p0", "p1", "d0"]).held(&[(2, 15)]);
    let ttft = Objectives { ttft_us: 1_000, ..Objectives::NONE };
    let (id, first) = world.book(0);
    assert!(first.fetch.is_some());
    let placed = world.place(|request| request.objectives = ttft);
    assert!(matches!(placed, Err(Refusal::Overloaded { .. })), "{placed:?}");
    world.view.fetched(id, None);
    assert!(world.place(|request| request.objectives = ttft).expect("a probe").probe);
}

#[test]
fn an_idle_instance_that_seems_too_slow_is_tried_before_a_request_is_refused_for_a_busy_one() {
    let mut world = World::new(&["p0", "d0"]);
    let (id, _) = world.book(0);
    for _ in 0..50 {
        world.view.stepped(id, 50_000, 0);
    }
    world.view.unbook(id, None, 0);
    // Its steps are short, but there is no place at once.
    world.view.report(report("d1", 2, Role::Decode), 0);
    let world = world.reports("d1", |report| report.load.running = 12);
    let objectives = Objectives { ttft_us: 100_000, tbt_us: 10_000 };
    let placement = world.place(|request| request.objectives = objectives).expect("a probe");
    assert!(placement.probe);
    assert_eq!(&*placement.decode().instance_id.0, "d0");
    let patient = Objectives { ttft_us: 1_000_000, ..objectives };
    let placement = world.place(|request| request.objectives = patient).expect("a placement");
    assert!(!placement.probe);
    assert_eq!(&*placement.decode().instance_id.0, "d1");
}

#[test]
fn a_cluster_whose_estimates_are_far_too_high_finds_its_speed_again() {
    // Slots play no part: nobody reports them.
    let mut world = World::new(&["p0", "d0"])
        .reports("p0", |report| report.slots_available = 100_000)
        .reports("d0", |report| report.slots_available = 100_000);
    // A stopped machine: a minute for each prefill, a second for each step.
    for _ in 0..100 {
        let (id, _) = world.book(0);
        world.view.prefilled(id, Some((1_000, 60_000_000)), 0);
        world.view.stepped(id, 1_000_000, 0);
        world.view.unbook(id, Some(100), 0);
    }
    let objectives = Objectives { ttft_us: 30_000, tbt_us: 2_000 };
    let mut probes = 0;
    loop {
        let placement = world.place(|request| request.objectives = objectives);
        let placement = placement.expect("an idle cluster never refuses");
        if !placement.probe {
            break;
        }
        probes += 1;
        assert!(probes < 200, "still a probe: {placement}");
        let id = BookingId(1_000 + probes);
        world.view.book(id, &placement, 0);
        world.view.prefilled(id, Some((1_000, 11_000)), 0);
        world.view.stepped(id, 1_100, 0);
        world.view.unbook(id, Some(100), 0);
    }
    assert!(probes > 0);
}

#[test]
fn the_wait_of_a_refused_caller_is_bounded() {
    let world = World::new(&["p0", "d0"])
        .reports("p0", |report| report.load.waiting_prompt_tokens = u64::MAX);
    let objectives = Objectives { ttft_us: 1, tbt_us: u64::MAX };
    match world.place(|request| request.objectives = objectives) {
        Err(Refusal::Overloaded { retry_after_ms, .. }) => assert_eq!(retry_after_ms, 60_000),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_refusal_says_who_is_missing() {
    let none = |missing| Refusal::NoInstance { model: "tiny".to_string(), missing };
    let check = |names: &[&str], missing| {
        check_refusal(&World::new(names), Objectives::NONE, none(missing));
    };
    check(&["d0"], Missing::Prefill);
    check(&["p0"], Missing::Decode);
    let mut gone = World::new(&["b0"]);
    gone.view.remove_instances(kvasir_placement::NodeIndex(0), &[]);
    check_refusal(&gone, Objectives::NONE, none(Missing::Prefill));
    let drained = World::new(&["p0", "d0"]).reports("p0", |report| report.draining = true);
    check_refusal(&drained, Objectives::NONE, none(Missing::Prefill));
    let drained = World::new(&["p0", "d0"]).reports("d0", |report| report.draining = true);
    check_refusal(&drained, Objectives::NONE, none(Missing::Decode));
    let small = World::new(&["p0", "d0"]).reports("d0", |report| report.slots_total = 15);
    let too_large = |blocks_max| Refusal::TooLarge { prompt_blocks: 16, blocks_max };
    check_refusal(&small, Objectives::NONE, too_large(14));
    // Without a block for its answer it would wait for ever.
    let exact = |name: &str, slots_total| {
        World::new(&["p0", "d0"]).reports(name, |report| {
            report.slots_total = slots_total;
            report.slots_available = slots_total;
        })
    };
    check_refusal(&exact("d0", 16), Objectives::NONE, too_large(15));
    assert!(exact("d0", 17).place(|_| {}).is_ok());
    assert!(exact("p0", 16).place(|_| {}).is_ok(), "it decodes nothing");
    check_refusal(&exact("p0", 15), Objectives::NONE, too_large(15));
    let both = |slots_total| {
        World::new(&["b0"]).reports("b0", |report| {
            report.slots_total = slots_total;
            report.slots_available = slots_total;
        })
    };
    check_refusal(&both(16), Objectives::NONE, too_large(15));
    assert!(both(17).place(|_| {}).is_ok());
    let mut unknown = World::new(&["b0"]);
    unknown.model = kvasir_placement::ModelIndex(9);
    assert!(matches!(unknown.place(|_| {}), Err(Refusal::UnknownModel { .. })));
}

#[test]
fn an_instance_that_failed_the_request_is_not_asked_again() {
    let world = World::new(&["p0", "p1", "d0", "d1"]).held(&[(0, 15), (2, 15)]);
    let exclude = [InstanceId::from("p0"), InstanceId::from("d0")];
    let placement = world.place(|request| request.exclude = &exclude).expect("a placement");
    assert_eq!(&*placement.prefill().instance_id.0, "p1");
    assert_eq!(&*placement.decode().instance_id.0, "d1");
    assert_eq!(placement.fetch, None, "nor is it a source");
    let exclude = ["p0", "p1"].map(InstanceId::from);
    let want = Refusal::NoInstance { model: "tiny".to_string(), missing: Missing::Prefill };
    assert_eq!(world.place(|request| request.exclude = &exclude), Err(want));
}

#[test]
fn an_instance_that_failed_is_avoided_until_a_later_report() {
    let mut world = World::new(&["p0", "p1", "d0"]).held(&[(0, 15)]);
    let prefill =
        |world: &World| world.place(|_| {}).expect("a placement").prefill().instance_id.to_string();
    world.view.mark_failed(&InstanceId::from("p0"), 100);
    assert_eq!(prefill(&world), "p1");
    world.view.report(report("p0", 0, Role::Prefill), 99);
    assert_eq!(prefill(&world), "p1", "that report may have been under way");
    world.view.mark_failed(&InstanceId::from("p1"), 200);
    assert_eq!(prefill(&world), "p0", "better than nobody");
    world.view.report(report("p0", 0, Role::Prefill), 100);
    world.view.report(report("p1", 1, Role::Prefill), 200);
    assert_eq!(prefill(&world), "p0");
    world.view.report(report("d1", 3, Role::Decode), 0);
    world = world.reports("d1", |report| report.load.running = 9);
    world.view.mark_failed(&InstanceId::from("d0"), 300);
    let placement = world.place(|_| {}).expect("a placement");
    assert_eq!(&*placement.decode().instance_id.0, "d1", "for decode as for prefill");
    world.view.mark_failed(&InstanceId::from("d1"), 300);
    assert!(world.place(|_| {}).is_ok(), "nor does a lone decode instance end the service");
}

#[test]
fn a_decode_instance_that_is_too_slow_is_left_for_a_busier_one() {
    let mut world = World::new(&["p0", "d0"]);
    let (id, _) = world.book(0);
    for _ in 0..50 {
        world.view.stepped(id, 50_000, 0);
    }
    world.view.unbook(id, None, 0);
    world.view.report(report("d1", 2, Role::Decode), 0);
    let world = world.reports("d1", |report| report.load.running = 7);
    let decode = |tbt_us| {
        let objectives = Objectives { tbt_us, ..Objectives::NONE };
        let placement = world.place(|request| request.objectives = objectives);
        placement.map(|placement| placement.decode().instance_id.to_string())
    };
    assert_eq!(decode(u64::MAX).as_deref(), Ok("d0"));
    assert_eq!(decode(10_000).as_deref(), Ok("d1"));
    assert_eq!(decode(1_000).as_deref(), Ok("d0"), "idle, and perhaps not that slow any more");
}
