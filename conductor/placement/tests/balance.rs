//! How roles move with the loads of the two sides, and how little.

use kvasir_placement::balance::{Balance, BalanceOptions, Member, RatioPlan};
use kvasir_placement::{InstanceRef, Role};
use proptest::prelude::*;

const WINDOW_US: u64 = 10_000_000;
const SAMPLE_US: u64 = 500_000;

fn options() -> BalanceOptions {
    BalanceOptions { window_us: WINDOW_US, ..BalanceOptions::default() }
}

fn members(prefills: usize, decodes: usize) -> Vec<Member> {
    let member = |(at, role)| Member {
        instance: InstanceRef(at),
        role,
        can_change: true,
        open_work: at as usize,
    };
    let roles = [vec![Role::Prefill; prefills], vec![Role::Decode; decodes]].concat();
    (0..).zip(roles).map(member).collect()
}

/// The same two loads for a whole window.
fn plan(options: BalanceOptions, loads: (f64, f64), members: &[Member]) -> Option<RatioPlan> {
    let mut balance = Balance::new(options);
    for at in 0..=WINDOW_US / SAMPLE_US {
        balance.sample(at * SAMPLE_US, loads.0, loads.1);
    }
    balance.plan(members, WINDOW_US)
}

#[test]
fn the_loaded_side_gains_the_instance_with_least_to_end() {
    let planned = plan(options(), (0.2, 1.4), &members(8, 8)).expect("a window");
    assert!((planned.factor - 2.4 / 1.2).abs() < 1e-9, "{planned:?}");
    let [change] = planned.changes[..] else { panic!("one at a time: {planned:?}") };
    assert_eq!((change.instance, change.to), (InstanceRef(0), Role::Decode));
    let planned = plan(options(), (1.4, 0.2), &members(8, 8)).expect("a window");
    let [change] = planned.changes[..] else { panic!("one at a time: {planned:?}") };
    assert_eq!((change.instance, change.to), (InstanceRef(8), Role::Prefill));
    let level = plan(options(), (0.5, 0.52), &members(8, 8)).expect("a window");
    assert_eq!((level.changes.len(), level.prefills_wished, level.decodes_wished), (0, 8, 8));
}

#[test]
fn what_cannot_change_is_wished_for_and_not_done() {
    let mut fixed = members(8, 8);
    fixed.iter_mut().for_each(|member| member.can_change = false);
    let planned = plan(options(), (0.1, 0.9), &fixed).expect("a window");
    assert_eq!(planned.changes, []);
    assert!(planned.prefills_wished < 8 && planned.decodes_wished > 8, "{planned:?}");
}

#[test]
fn the_tide_takes_from_the_idle_side_and_brings_to_the_loaded_one() {
    let wished = |loads| {
        let planned = plan(options(), loads, &members(4, 4)).expect("a window");
        (planned.prefills_wished, planned.decodes_wished)
    };
    assert_eq!(wished((1.31, 1.3)), (5, 4));
    assert_eq!(wished((1.3, 1.31)), (4, 5));
    assert_eq!(wished((0.04, 0.05)), (3, 4));
    assert_eq!(wished((0.05, 0.04)), (4, 3));
    assert_eq!(wished((0.5, 0.5)), (4, 4));
    let least = plan(options(), (0.0, 0.0), &members(1, 1)).expect("a window");
    assert_eq!((least.prefills_wished, least.decodes_wished), (1, 1));
}

#[test]
fn a_tenth_of_the_samples_on_either_end_says_nothing() {
    let mut balance = Balance::new(options());
    for at in 0..20 {
        let load = if at % 10 == 3 { 1e6 } else { 0.5 };
        balance.sample(at * SAMPLE_US, load, 0.5);
    }
    let planned = balance.plan(&members(4, 4), WINDOW_US).expect("a window");
    assert!((planned.factor - 1.0).abs() < 1e-9, "{planned:?}");
}

#[test]
fn nothing_is_planned_before_a_window_is_full_or_soon_after_a_change() {
    let mut balance = Balance::new(options());
    balance.sample(0, 0.0, 2.0);
    assert_eq!(balance.plan(&members(4, 4), WINDOW_US - 1), None);
    assert!(balance.plan(&members(4, 4), WINDOW_US).is_some());
    balance.changed(WINDOW_US);
    balance.sample(WINDOW_US + 1, 0.0, 2.0);
    assert_eq!(balance.plan(&members(4, 4), 2 * WINDOW_US - 1), None);
    balance.sample(2 * WINDOW_US, f64::NAN, 2.0);
    assert!(balance.plan(&members(4, 4), 2 * WINDOW_US).is_some());
}

/// Work of both sides, spread over those that there are.
fn follow(
    options: BalanceOptions,
    mut members: Vec<Member>,
    seconds: u64,
    work: impl Fn(u64) -> (f64, f64),
) -> Vec<(u64, usize, usize, Role)> {
    let mut balance = Balance::new(options);
    let mut log = Vec::new();
    let count = |members: &[Member], role| members.iter().filter(|m| m.role == role).count();
    for at in 0..seconds * 1_000_000 / SAMPLE_US {
        let now_us = at * SAMPLE_US;
        let (prefill, decode) = work(at);
        let over = |work: f64, role| work / count(&members, role).max(1) as f64;
        balance.sample(now_us, over(prefill, Role::Prefill), over(decode, Role::Decode));
        let Some(plan) = balance.plan(&members, now_us) else { continue };
        assert!(plan.changes.len() <= options.concurrent_role_changes_max, "{plan:?}");
        for change in &plan.changes {
            let found = members.iter_mut().find(|m| m.instance == change.instance);
            let member = found.expect("one of them");
            assert!(member.can_change && member.role != change.to, "{plan:?}");
            member.role = change.to;
        }
        if let Some(change) = plan.changes.first() {
            balance.changed(now_us);
            let [prefills, decodes] =
                [Role::Prefill, Role::Decode].map(|role| count(&members, role));
            log.push((now_us, prefills, decodes, change.to));
        }
    }
    log
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..Default::default() })]

    #[test]
    fn under_a_constant_load_roles_move_one_way_and_come_to_rest(
        prefills in 1usize..20, decodes in 1usize..20,
        prefill_work in 0.0..30.0, decode_work in 0.0..30.0,
        concurrent_role_changes_max in 1usize..4, minimum in 1usize..4,
    ) {
        let options = BalanceOptions { concurrent_role_changes_max, prefill_instances_min: minimum, decode_instances_min: minimum, ..options() };
        let log = follow(options, members(prefills, decodes), 600, |_| (prefill_work, decode_work));
        prop_assert!(log.iter().all(|change| change.3 == log[0].3), "{log:?}");
        prop_assert!(log.last().is_none_or(|last| last.0 < 500_000_000), "{log:?}");
    }

    #[test]
    fn under_any_load_changes_are_a_window_apart_and_neither_side_falls_below_its_least(
        prefills in 1usize..12, decodes in 1usize..12,
        loads in prop::collection::vec((0.0..20.0, 0.0..20.0), 1..40),
        concurrent_role_changes_max in 1usize..4, prefill_instances_min in 1usize..5, decode_instances_min in 1usize..5,
        unable: u16,
    ) {
        let options = BalanceOptions { concurrent_role_changes_max, prefill_instances_min, decode_instances_min, ..options() };
        let mut all = members(prefills, decodes);
        for (at, member) in all.iter_mut().enumerate() {
            member.can_change = unable & (1 << (at % 16)) == 0;
        }
        let log = follow(options, all, 400, |at| loads[at as usize / 8 % loads.len()]);
        for pair in log.windows(2) {
            prop_assert!(pair[1].0 - pair[0].0 >= WINDOW_US, "{log:?}");
        }
        for &(_, p, d, _) in &log {
            prop_assert!(p >= prefill_instances_min.min(prefills) && d >= decode_instances_min.min(decodes), "{log:?}");
            prop_assert_eq!(p + d, prefills + decodes);
        }
    }
}

#[test]
fn those_that_play_both_are_divided_under_load_by_what_there_is_to_do() {
    let both = |count: u64| -> Vec<Member> {
        let member = |at| Member {
            instance: InstanceRef(at),
            role: Role::Both,
            can_change: true,
            open_work: 0,
        };
        (0..count).map(member).collect()
    };
    let divided = |loads, members: &[Member]| {
        let planned = plan(options(), loads, members).expect("a window");
        let change = planned.changes.first().map(|change| change.to);
        (planned.prefills_wished, planned.decodes_wished, planned.both_wished, change)
    };
    assert_eq!(divided((0.5, 0.5), &both(4)), (2, 2, 0, Some(Role::Prefill)));
    assert_eq!(divided((0.6, 0.2), &both(4)), (3, 1, 0, Some(Role::Prefill)));
    assert_eq!(divided((0.2, 0.6), &both(4)), (1, 3, 0, Some(Role::Decode)));
    assert_eq!(divided((0.05, 0.05), &both(4)).3, None, "idle, they stay as they are");
    assert_eq!(divided((0.9, 0.3), &both(1)), (0, 0, 1, None), "one alone does both");
    // One after the other, and each side has one in the end.
    let mut members = both(2);
    members[0].role = Role::Decode;
    assert_eq!(divided((0.2, 0.4), &members), (1, 1, 0, Some(Role::Prefill)));
}

#[test]
fn a_side_that_nobody_plays_is_filled_whatever_the_loads() {
    let planned = plan(options(), (0.0, 0.5), &members(0, 3)).expect("a window");
    let [change] = planned.changes[..] else { panic!("one: {planned:?}") };
    assert_eq!(change.to, Role::Prefill);
    let planned = plan(options(), (0.5, 0.0), &members(3, 0)).expect("a window");
    let [change] = planned.changes[..] else { panic!("one: {planned:?}") };
    assert_eq!(change.to, Role::Decode);
    let last = plan(options(), (0.0, 0.5), &members(0, 1)).expect("a window");
    assert_eq!(last.changes, [], "the last one has nobody to leave its work to");
}
