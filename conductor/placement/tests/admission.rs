//! Refusing before prefill by what decoding will be like, and by what is still to pass a prefill.

use crate::support::World;
use kvasir_placement::{Admission, BookingId, Objectives, OverloadReason, Policy, Refusal};

fn world(admission: Admission) -> World {
    let policy = Policy { admission, ..Policy::default() };
    World::with_policy(&["p0", "d0"], policy)
        .reports("p0", |report| report.slots_available = 1_000_000)
        .reports("d0", |report| {
            (report.slots_total, report.slots_available) = (1_000_000, 1_000_000);
            report.running_requests_max = 1_000;
        })
}

/// Teaches that a token that joins within the second of an answer costs each of its tenth longest
/// intervals 2 us, on 2,000 us. Answers with the time when that is over.
fn teach(world: &mut World) -> u64 {
    let mut now_us = 0;
    for round in 0..60 {
        let together = 1 + round % 5;
        let ids: Vec<BookingId> = (0..together).map(|_| world.book(now_us).0).collect();
        now_us += 100_000;
        ids.iter().for_each(|id| _ = world.view.prefilled(*id, None, now_us));
        now_us += 1_000_000;
        for (id, joined_after) in ids.into_iter().zip((0..together).rev()) {
            world.view.paced(id, 2_000 + 2_000 * joined_after, now_us);
            world.view.unbook(id, Some(256), now_us);
        }
    }
    now_us + 20_000_000
}

fn asks(world: &World, prompt_tokens: u32, tbt_us: u64, now_us: u64) -> Result<(), Refusal> {
    let placed = world.place(|request| {
        request.prompt_tokens = prompt_tokens;
        request.objectives = Objectives { tbt_us, ..Objectives::NONE };
        request.now_us = now_us;
    });
    placed.map(|_| ())
}

#[test]
fn what_was_sent_to_decode_a_moment_ago_refuses_and_what_was_sent_long_ago_does_not() {
    let mut world = world(Admission::Calibrated);
    let now_us = teach(&mut world);
    let mut sent = 0;
    while asks(&world, 1_000, 8_000, now_us).is_ok() {
        world.book(now_us);
        sent += 1;
        assert!(sent < 20, "three others join within what the objective allows");
    }
    assert!(sent >= 2, "one that joins is within it: {sent}");
    assert!(asks(&world, 1_000, 8_000, now_us + 10_000_000).is_ok());
}

#[test]
fn a_long_prompt_is_refused_where_a_short_one_is_let_in() {
    let mut world = world(Admission::Calibrated);
    let now_us = teach(&mut world);
    world.book(now_us);
    assert!(asks(&world, 500, 8_000, now_us).is_ok());
    assert!(matches!(asks(&world, 8_000, 8_000, now_us), Err(Refusal::Overloaded { .. })));
    assert!(asks(&world, 8_000, u64::MAX, now_us).is_ok(), "it is the objective that refuses");
}

#[test]
fn each_admission_looks_at_another_moment() {
    let refused = |admission, handed_over: bool| {
        let mut world = world(admission);
        let now_us = teach(&mut world);
        let ids: Vec<BookingId> = (0..12).map(|_| world.book(now_us).0).collect();
        if handed_over {
            ids.iter().for_each(|id| _ = world.view.prefilled(*id, None, now_us));
        }
        asks(&world, 1_000, 8_000, now_us).is_err()
    };
    assert!(!refused(Admission::Late, true), "it looks when the prefill has ended");
    assert!(refused(Admission::Early, true));
    assert!(!refused(Admission::Early, false), "those on their way are not seen");
    assert!(refused(Admission::Predicted, false), "their prefills will have ended");
    assert!(refused(Admission::Calibrated, false));
}

#[test]
fn a_second_look_sees_what_decodes_by_then() {
    let mut world = world(Admission::Late);
    let now_us = teach(&mut world);
    let (first, _) = world.book(now_us);
    let alone_us = world.view.look_again(first, now_us).expect("it is booked");
    let ids: Vec<BookingId> = (0..12).map(|_| world.book(now_us).0).collect();
    assert_eq!(world.view.look_again(first, now_us), Some(alone_us), "none of them decodes");
    ids.iter().for_each(|id| _ = world.view.prefilled(*id, None, now_us));
    let crowded_us = world.view.look_again(first, now_us).expect("it is booked");
    assert!(crowded_us > alone_us + 4_000, "{crowded_us} after {alone_us}");
    assert_eq!(world.view.look_again(BookingId(9_999), now_us), None);
}

#[test]
fn a_prefill_that_many_will_pass_is_held_against_its_objective_as_if_they_had() {
    let ask = |admission| {
        let policy = Policy { admission, shortest_prefill_first_factor: 5.0, ..Policy::default() };
        let mut world = World::with_policy(&["p0", "d0"], policy)
            .reports("p0", |report| report.slots_available = 1_000_000)
            .reports("d0", |report| report.slots_available = 1_000_000);
        // Half a second of long prompts, all of which rank later.
        for number in 0..10 {
            let long = world.place(|request| request.prompt_tokens = 5_000).expect("a placement");
            world.view.book(BookingId(1_000 + number), &long, 0);
        }
        let placed = world.place(|request| {
            request.prompt_tokens = 4_000;
            request.objectives = Objectives { ttft_us: 150_000, ..Objectives::NONE };
        });
        placed.map(|placement| placement.predicted_ttft_us)
    };
    let soon_us = ask(Admission::Early).expect("nothing goes before it now");
    assert!(soon_us < 150_000, "{soon_us}");
    let refused = ask(Admission::Calibrated);
    assert!(matches!(refused, Err(Refusal::Overloaded { .. })), "{refused:?}");
}

/// Whether a request is let in beside so many others that decode, sent long ago, and how likely it is in
/// time; by objectives between tokens, the shortest first.
fn by_objective(others: usize, prompt_tokens: u32) -> Vec<(u64, bool, f64)> {
    let mut world = world(Admission::Calibrated);
    let booked_us = teach(&mut world);
    for _ in 0..others {
        let (id, _) = world.book(booked_us);
        world.view.prefilled(id, None, booked_us);
    }
    let decide = |tbt_us| {
        let placed = world.decide(|request| {
            request.prompt_tokens = prompt_tokens;
            request.objectives = Objectives { tbt_us, ..Objectives::NONE };
            request.now_us = booked_us + 20_000_000;
        });
        let (is_in, considered) = match placed {
            Ok(placement) => (true, placement.considered),
            Err(refused) => (false, refused.considered),
        };
        (tbt_us, is_in, considered.decode_candidates[0].likely.expect("it has been learned"))
    };
    (1_000..40_000).step_by(100).map(decide).collect()
}

#[test]
fn a_request_that_is_not_likely_in_time_is_refused_though_it_harms_nobody() {
    let decided = by_objective(1, 1);
    let unlikely = || decided.iter().filter(|(_, _, likely)| *likely < 0.8);
    assert!(unlikely().any(|(_, _, likely)| *likely > 0.5), "{decided:?}");
    assert!(unlikely().all(|(_, is_in, _)| !is_in), "{decided:?}");
    assert!(decided.iter().any(|(_, is_in, _)| *is_in), "{decided:?}");
}

#[test]
fn a_likely_request_that_makes_more_others_miss_than_it_is_worth_is_refused() {
    let refused_though_likely = |others| {
        let decided = by_objective(others, 1_500);
        decided.into_iter().filter(|(_, is_in, likely)| !is_in && *likely > 0.86).count()
    };
    assert_eq!(refused_though_likely(1), 0);
    assert!(refused_though_likely(60) > 0);
}

#[test]
fn beside_another_conductor_each_learns_what_both_send() {
    let mut world = world(Admission::Calibrated);
    // Both send alike; of the other one's answers only the number is reported. What joins costs 2 us a token.
    let mut now_us = 0;
    for round in 0..60_u64 {
        let together = 1 + round % 5;
        let ids: Vec<BookingId> = (0..together).map(|_| world.book(now_us).0).collect();
        world = world.reports("d0", |report| report.load.running = 2 * together as u32);
        now_us += 100_000;
        ids.iter().for_each(|id| _ = world.view.prefilled(*id, None, now_us));
        now_us += 1_000_000;
        for (id, joined_after) in ids.into_iter().zip((0..together).rev()) {
            world.view.paced(id, 2_000 + 2_000 * (joined_after + together), now_us);
            world.view.unbook(id, Some(256), now_us);
        }
        now_us += 10_000_000;
    }
    for _ in 0..2 {
        world.book(now_us);
    }
    let world = world.reports("d0", |report| report.load.running = 4);
    let placed = world.decide(|request| request.now_us = now_us).expect("no objective is set");
    // Five thousand tokens in the second of an answer: two of ours before, two of theirs, this one.
    let tbt_us = placed.considered.decode_candidates[0].tbt_us;
    assert!((9_500..15_000).contains(&tbt_us), "{tbt_us} in place of 12000");
}

#[test]
fn what_a_machine_taught_that_stood_still_is_forgotten_with_time() {
    let refused_after = |half_life_us: Option<u64>| {
        let mut world = world(Admission::Calibrated);
        half_life_us.into_iter().for_each(|us| world.view.forget_in(us));
        let mut now_us = teach(&mut world);
        let mut answer = |world: &mut World, tbt_us| {
            let (id, _) = world.book(now_us);
            world.view.prefilled(id, None, now_us);
            now_us += 1_000_000;
            world.view.paced(id, tbt_us, now_us);
            world.view.unbook(id, Some(256), now_us);
            now_us += 9_000_000;
            now_us
        };
        for _ in 0..60 {
            answer(&mut world, 12_000);
        }
        let now_us = (0..40).map(|_| answer(&mut world, 2_000)).last().expect("forty");
        // Beside one that decodes, so that it is no probe.
        let (id, _) = world.book(now_us - 8_000_000);
        world.view.prefilled(id, None, now_us - 8_000_000);
        asks(&world, 1_000, 10_000, now_us).is_err()
    };
    assert!(refused_after(None));
    assert!(!refused_after(Some(10_000_000)));
}

#[test]
fn who_is_refused_between_tokens_is_told_when_what_was_sent_joins_no_more() {
    let policy = Policy { retry_after_ms_min: 1, ..Policy::default() };
    let mut world = World::with_policy(&["p0", "d0"], policy)
        .reports("p0", |report| report.slots_available = 1_000_000)
        .reports("d0", |report| {
            (report.slots_total, report.slots_available) = (1_000_000, 1_000_000);
            report.running_requests_max = 1_000;
        });
    let now_us = teach(&mut world);
    (0..4).for_each(|_| _ = world.book(now_us));
    let refused = asks(&world, 1_000, 8_000, now_us).expect_err("four were sent");
    let Refusal::Overloaded { retry_after_ms, reason: OverloadReason::Tbt, .. } = refused else {
        panic!("{refused:?}")
    };
    let in_us = retry_after_ms * 1_000;
    assert!(in_us < 800_000, "before they have ended: after {in_us} us");
    assert!(asks(&world, 1_000, 8_000, now_us + in_us).is_ok(), "after {in_us} us");
    assert!(asks(&world, 1_000, 8_000, now_us + in_us / 4).is_err(), "before {in_us} us");
}

#[test]
fn a_decode_side_that_is_full_is_not_taken_for_what_it_holds() {
    let roomy = |report: &mut kvasir_placement::InstanceReport| {
        (report.slots_total, report.slots_available) = (1_000_000, 1_000_000);
    };
    let mut world = World::new(&["p0", "d0", "d1"])
        .reports("p0", roomy)
        .reports("d0", roomy)
        .reports("d1", roomy);
    let now_us = teach(&mut world);
    let mut world = world.held(&[(1, 10)]);
    let mut sent_to = |number| {
        let placed = world.decide(|request| {
            request.now_us = now_us;
            request.objectives = Objectives { tbt_us: 10_000_000, ..Objectives::NONE };
        });
        let placed = placed.expect("a placement");
        assert!(placed.likely().is_some(), "both have learned");
        world.view.book(BookingId(5_000 + number), &placed, now_us);
        placed.decode().instance_id.to_string()
    };
    let decodes: Vec<String> = (0..13_u64).map(&mut sent_to).collect();
    assert_eq!(decodes[0], "d0", "it holds a part of the prompt");
    let there = decodes.iter().filter(|decode| *decode == "d0").count();
    assert!((6..=9).contains(&there), "all are in time, and they are spread: {decodes:?}");
}
