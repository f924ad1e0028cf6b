//! Who goes next where requests of several tenants wait.

use std::collections::BTreeMap;

use kvasir_placement::waiting::{Aside, Line, LineFull, LineOptions, Priority, Waiter, WaiterId};
use proptest::prelude::*;

const QUANTUM: u64 = 100;
const AGING_US: u64 = 1_000_000;

fn options() -> LineOptions {
    LineOptions {
        requests_max: 10_000,
        quantum_tokens: QUANTUM,
        aging_us: AGING_US,
        passed_us: 500_000,
        aside_max: 1_000,
    }
}

fn waiter(tenant: &str, cost_tokens: u64) -> Waiter {
    Waiter {
        tenant: tenant.into(),
        weight: 1,
        priority: Priority::Normal,
        cost_tokens,
        arrived_us: 0,
    }
}

/// Lets all go that wait, and says in which order.
fn drain(line: &mut Line, now_us: u64) -> Vec<u64> {
    std::iter::from_fn(|| line.next(now_us).inspect(|id| _ = line.take(*id)).map(|id| id.0))
        .collect()
}

fn push(line: &mut Line, id: u64, waiter: Waiter) {
    assert_eq!(line.push(WaiterId(id), waiter), Ok(None));
}

#[test]
fn a_tenant_with_many_requests_goes_as_often_as_one_with_few() {
    let mut line = Line::new(options());
    (0..6).for_each(|id| push(&mut line, id, waiter("many", QUANTUM)));
    (10..13).for_each(|id| push(&mut line, id, waiter("few", QUANTUM)));
    assert_eq!(drain(&mut line, 0), [0, 10, 1, 11, 2, 12, 3, 4, 5]);
    assert!(line.is_empty());
}

#[test]
fn tokens_are_shared_and_not_requests() {
    let mut line = Line::new(options());
    (0..8).for_each(|id| push(&mut line, id, waiter("short", QUANTUM / 2)));
    (10..12).for_each(|id| push(&mut line, id, waiter("long", 2 * QUANTUM)));
    assert_eq!(drain(&mut line, 0), [0, 1, 10, 2, 3, 4, 5, 11, 6, 7]);
}

#[test]
fn a_weight_of_two_is_twice_as_much() {
    let mut line = Line::new(options());
    (0..6).for_each(|id| push(&mut line, id, Waiter { weight: 2, ..waiter("two", QUANTUM) }));
    (10..13).for_each(|id| push(&mut line, id, waiter("one", QUANTUM)));
    assert_eq!(drain(&mut line, 0), [0, 1, 10, 2, 3, 11, 4, 5, 12]);
}

#[test]
fn a_higher_priority_goes_first_until_others_have_waited_long_enough() {
    let urgent = |arrived_us| Waiter {
        priority: Priority::High,
        arrived_us,
        ..waiter("urgent", 10 * QUANTUM)
    };
    let low = || Waiter { priority: Priority::Low, ..waiter("patient", QUANTUM) };
    let order = |now_us: u64| {
        let mut line = Line::new(options());
        push(&mut line, 0, low());
        (1..4).for_each(|id| push(&mut line, id, urgent(now_us)));
        drain(&mut line, now_us)
    };
    assert_eq!(order(0), [1, 2, 3, 0]);
    assert_eq!(order(2 * AGING_US - 1), [1, 2, 3, 0]);
    assert_eq!(order(2 * AGING_US), [0, 1, 2, 3], "as urgent as they by now, and cheaper");
}

#[test]
fn among_a_tenants_own_a_priority_is_worth_some_time() {
    let mut line = Line::new(options());
    let of = |priority, arrived_us| Waiter { priority, arrived_us, ..waiter("t", QUANTUM) };
    push(&mut line, 0, of(Priority::Normal, 0));
    push(&mut line, 1, of(Priority::High, AGING_US - 1));
    push(&mut line, 2, of(Priority::High, AGING_US + 1));
    push(&mut line, 3, of(Priority::Low, 0));
    assert_eq!(drain(&mut line, AGING_US + 2), [1, 0, 2, 3]);
}

#[test]
fn who_cannot_go_is_passed_and_not_for_ever() {
    let mut line = Line::new(options());
    push(&mut line, 0, waiter("a", QUANTUM));
    push(&mut line, 1, waiter("a", QUANTUM));
    push(&mut line, 2, waiter("b", QUANTUM));
    assert_eq!(line.next(0), Some(WaiterId(0)));
    line.set_aside(WaiterId(0), Aside::NoRoom, 0);
    assert_eq!(line.next(0), Some(WaiterId(1)), "its own tenant's next one");
    line.set_aside(WaiterId(1), Aside::Unfit, 0);
    assert_eq!(line.next(0), Some(WaiterId(2)));
    line.take(WaiterId(2));
    assert_eq!(line.next(0), None);
    line.resume();
    assert_eq!(line.next(0), Some(WaiterId(0)), "as if nothing had been");
    line.set_aside(WaiterId(0), Aside::Nobody, 0);
    assert_eq!(line.next(0), None);
    line.resume();
    line.set_aside(WaiterId(0), Aside::Unfit, 600_000);
    assert_eq!(line.next(0), Some(WaiterId(1)));
    line.resume();
    line.set_aside(WaiterId(0), Aside::NoRoom, 600_000);
    assert_eq!(line.next(0), None, "it has been passed for long enough");
    line.remove(WaiterId(0));
    line.resume();
    assert_eq!(drain(&mut line, 0), [1]);
}

#[test]
fn only_so_many_are_tried() {
    let mut line = Line::new(LineOptions { aside_max: 2, ..options() });
    (0..5).for_each(|id| push(&mut line, id, waiter("a", QUANTUM)));
    for id in 0..2 {
        assert_eq!(line.next(0), Some(WaiterId(id)));
        line.set_aside(WaiterId(id), Aside::Unfit, 0);
    }
    assert_eq!(line.next(0), None);
    line.remove(WaiterId(0));
    assert_eq!(line.next(0), Some(WaiterId(2)), "one of them has gone");
}

#[test]
fn one_who_came_after_what_the_clock_says_has_its_turn_too() {
    let mut line = Line::new(options());
    push(&mut line, 1, Waiter { arrived_us: 101, ..waiter("a", QUANTUM) });
    assert_eq!(line.next(100), Some(WaiterId(1)));
    // Beside one of a higher priority, which goes first.
    push(
        &mut line,
        2,
        Waiter { arrived_us: 102, priority: Priority::High, ..waiter("b", QUANTUM) },
    );
    assert_eq!(drain(&mut line, 100), [2, 1]);
}

#[test]
fn a_tenant_whose_requests_cannot_go_leaves_tries_for_others() {
    let mut line = Line::new(LineOptions { aside_max: 8, ..options() });
    let urgent = || Waiter { priority: Priority::High, ..waiter("stuck", QUANTUM) };
    (0..20).for_each(|id| push(&mut line, id, urgent()));
    push(&mut line, 100, waiter("other", QUANTUM));
    for tried in 0..4 {
        assert_eq!(line.next(0), Some(WaiterId(tried)));
        line.set_aside(WaiterId(tried), Aside::Unfit, 0);
    }
    assert_eq!(line.next(0), Some(WaiterId(100)), "though it is less urgent");
}

#[test]
fn what_is_urgent_to_a_tenant_takes_the_place_of_what_is_not() {
    let mut line = Line::new(LineOptions { requests_max: 2, ..options() });
    let low = || Waiter { priority: Priority::Low, ..waiter("one", QUANTUM) };
    (0..2).for_each(|id| push(&mut line, id, low()));
    assert_eq!(line.push(WaiterId(2), low()), Err(LineFull { waiting: 2 }));
    assert_eq!(line.push(WaiterId(3), waiter("one", QUANTUM)), Ok(Some(WaiterId(1))));
}

#[test]
fn a_full_line_takes_from_whom_has_most_for_its_weight() {
    let mut line = Line::new(LineOptions { requests_max: 4, ..options() });
    let heavy = || Waiter { weight: 4, ..waiter("heavy", 1) };
    push(&mut line, 0, heavy());
    push(&mut line, 1, heavy());
    push(&mut line, 2, waiter("many", 1));
    push(&mut line, 3, waiter("many", 1));
    let full = Err(LineFull { waiting: 4 });
    assert_eq!(line.push(WaiterId(4), waiter("many", 1)), full);
    assert_eq!(line.push(WaiterId(5), waiter("few", 1)), Ok(Some(WaiterId(3))), "the last one");
    assert_eq!(line.push(WaiterId(6), waiter("few", 1)), full, "it would have more than others");
    assert_eq!(line.push(WaiterId(0), heavy()), Ok(None), "it waits already");
    assert_eq!(line.len(), 4);
    let none = Line::new(LineOptions { requests_max: 0, ..options() }).push(WaiterId(0), heavy());
    assert_eq!(none, Err(LineFull { waiting: 0 }));
}

/// Tenants with so many tokens for each request, one after another and again, and their weights.
fn tenants() -> impl Strategy<Value = Vec<(u32, Vec<u64>)>> {
    prop::collection::vec((1u32..6, prop::collection::vec(1u64..1_000, 1..5)), 2..6)
}

const DEAREST: u64 = 1_000;

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn who_waits_all_the_time_is_served_by_weight(
        tenants in tenants(),
        from in 0usize..300,
        step_us in 0u64..200_000,
    ) {
        let mut line = Line::new(options());
        let name = |at: usize| format!("t{at}");
        let mut pushed = vec![0; tenants.len()];
        let mut owner = BTreeMap::new();
        let mut add = |line: &mut Line, owner: &mut BTreeMap<u64, usize>, at: usize, now_us| {
            let (weight, costs) = &tenants[at];
            let id = owner.len() as u64;
            owner.insert(id, at);
            let cost = costs[pushed[at] % costs.len()];
            pushed[at] += 1;
            let comes = waiter(&name(at), cost);
            push(line, id, Waiter { weight: *weight, arrived_us: now_us, ..comes });
        };
        for at in 0..tenants.len() {
            (0..2).for_each(|_| add(&mut line, &mut owner, at, 0));
        }
        let mut served = vec![0u64; tenants.len()];
        let mut before = served.clone();
        for step in 0..600 {
            if step == from {
                before.clone_from(&served);
            }
            // Those with little weight are the oldest.
            let now_us = step as u64 * step_us;
            let id = line.next(now_us).expect("all wait");
            let taken = line.take(id).expect("it waits");
            let at = owner[&id.0];
            served[at] += taken.cost_tokens;
            add(&mut line, &mut owner, at, now_us);
        }
        let share = |at: usize| (served[at] - before[at]) as f64 / f64::from(tenants[at].0);
        for a in 0..tenants.len() {
            for b in 0..a {
                let weights = [a, b].map(|at| f64::from(tenants[at].0));
                let bound = 2.0 * QUANTUM as f64
                    + weights.iter().map(|weight| DEAREST as f64 / weight).sum::<f64>();
                let apart = (share(a) - share(b)).abs();
                prop_assert!(apart < bound, "{apart} of {bound}: {served:?} {tenants:?}");
            }
        }
    }

    /// However much others have waiting and bring, of whatever priority.
    #[test]
    fn nobody_waits_for_more_than_so_much_once_it_has_aged(
        tenants in tenants(),
        weight in 1u32..6,
        cost in 1u64..1_000,
        priority in prop::sample::select(&Priority::ALL[..]),
        step_us in 1u64..100_000,
    ) {
        let mut line = Line::new(options());
        push(&mut line, 0, Waiter { weight, priority, ..waiter("one", cost) });
        let (mut id, mut now_us, mut served) = (0, 0, BTreeMap::<usize, u64>::new());
        let mut owner = BTreeMap::new();
        let mut pushed = 0;
        let aged_us = priority as u64 * AGING_US;
        loop {
            // There is always somebody else of the highest priority, of each tenant.
            for (at, (weight, costs)) in tenants.iter().enumerate() {
                if owner.values().filter(|own| **own == at).count() < 3 {
                    id += 1;
                    pushed += 1;
                    owner.insert(id, at);
                    let other = Waiter {
                        weight: *weight,
                        priority: Priority::High,
                        arrived_us: now_us,
                        ..waiter(&format!("t{at}"), costs[pushed % costs.len()])
                    };
                    push(&mut line, id, other);
                }
            }
            let next = line.next(now_us).expect("all wait");
            let taken = line.take(next).expect("it waits");
            let Some(at) = owner.remove(&next.0) else { break };
            if now_us >= aged_us {
                *served.entry(at).or_default() += taken.cost_tokens;
            }
            now_us += step_us;
            let rounds = cost.div_ceil(QUANTUM * u64::from(weight)) + 1;
            for (at, tokens) in &served {
                let bound = rounds * QUANTUM * u64::from(tenants[*at].0) + 2 * DEAREST;
                prop_assert!(*tokens <= bound, "{tokens} of {bound}");
            }
        }
    }

    #[test]
    fn whatever_happens_nobody_is_lost_or_goes_twice(
        steps in prop::collection::vec((0u8..6, any::<u8>(), 1u64..5_000), 0..300)
    ) {
        let mut line = Line::new(LineOptions { requests_max: 20, aside_max: 5, ..options() });
        let mut waits = std::collections::BTreeSet::new();
        for (at, (what, which, cost)) in steps.into_iter().enumerate() {
            let (id, now_us) = (at as u64, at as u64 * 50_000);
            let other = waits.iter().nth(usize::from(which) % waits.len().max(1)).copied();
            match what {
                0 | 1 => {
                    let priority = Priority::ALL[usize::from(which) % 3];
                    let tenant = format!("t{}", which % 5);
                    let comes = Waiter { priority, arrived_us: now_us, ..waiter(&tenant, cost) };
                    if let Ok(displaced) = line.push(WaiterId(id), comes) {
                        prop_assert!(displaced.is_none_or(|WaiterId(id)| waits.remove(&id)));
                        waits.insert(id);
                    }
                }
                2 => if let Some(next) = line.next(now_us) {
                    prop_assert!(line.take(next).is_some());
                    prop_assert!(waits.remove(&next.0));
                },
                3 => if let Some(next) = line.next(now_us) {
                    let why = [Aside::Nobody, Aside::NoRoom, Aside::Unfit][usize::from(which) % 3];
                    line.set_aside(next, why, now_us);
                    prop_assert_ne!(line.next(now_us), Some(next));
                },
                4 => if let Some(other) = other {
                    prop_assert!(line.remove(WaiterId(other)).is_some());
                    waits.remove(&other);
                },
                _ => line.resume(),
            }
            prop_assert_eq!(line.len(), waits.len());
            prop_assert!(line.len() <= 20);
        }
        line.resume();
        let mut left = drain(&mut line, u64::MAX / 2);
        left.sort_unstable();
        prop_assert_eq!(left, waits.into_iter().collect::<Vec<_>>());
    }
}
