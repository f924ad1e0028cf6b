//! What those do that can do both: as it was said, unless nobody is left for the other role; and what
//! the balance of a view makes of its loads.

use crate::support::*;
use kvasir_placement::balance::roles::{Roles, RolesOptions};
use kvasir_placement::balance::{BalanceOptions, RatioPlan};
use kvasir_placement::{NodeIndex, Objectives, OverloadReason, Role};

const WINDOW_US: u64 = 10_000_000;

fn options() -> RolesOptions {
    RolesOptions {
        balance: BalanceOptions { window_us: WINDOW_US, ..BalanceOptions::default() },
        objectives: Objectives { ttft_us: 10_000_000, tbt_us: 100_000 },
        dwell_us: 3 * WINDOW_US,
    }
}

fn roles(world: &World) -> Vec<Role> {
    world.view.instances().iter().map(|instance| instance.role()).collect()
}

/// Of a whole window of samples, each followed by decisions.
fn planned(
    roles: &mut Roles,
    world: &World,
    from_us: u64,
    refused: Option<OverloadReason>,
) -> Option<RatioPlan> {
    for at in 0..=20 {
        roles.sample(&world.view, from_us + at * WINDOW_US / 20);
        roles.decided(world.model, refused);
    }
    let mut plans = roles.plan(&world.view, from_us + WINDOW_US);
    assert!(plans.len() <= 1);
    plans.pop().map(|(_, plan)| plan)
}

#[test]
fn a_role_that_was_set_holds_while_others_play_the_other_one() {
    let both = World::new(&["b0", "b1", "b2"]);
    assert_eq!(roles(&both), [Role::Both; 3]);
    let one = both.reports("b0", |report| report.current_role = Some(Role::Prefill));
    assert_eq!(roles(&one), [Role::Prefill, Role::Both, Role::Both]);
    let two = one.reports("b1", |report| report.current_role = Some(Role::Decode));
    assert_eq!(roles(&two), [Role::Prefill, Role::Decode, Role::Both]);
    let all = two.reports("b2", |report| report.current_role = Some(Role::Decode));
    assert_eq!(roles(&all), [Role::Prefill, Role::Decode, Role::Decode]);
    let placed = all.place(|_| {}).expect("a placement");
    assert_eq!((&*placed.prefill().instance_id.0, placed.is_whole()), ("b0", false));
    // The only one that prefills drains: the others do both until it is back.
    let drains = all.reports("b0", |report| report.draining = true);
    assert_eq!(roles(&drains), [Role::Both; 3]);
    assert!(drains.place(|_| {}).expect("a placement").is_whole());
    let back = drains.reports("b0", |report| report.draining = false);
    assert_eq!(roles(&back), [Role::Prefill, Role::Decode, Role::Decode]);
    let mut gone = back;
    gone.view.remove_instances(NodeIndex(0), &[]);
    assert_eq!(roles(&gone), [Role::Both; 2]);
}

#[test]
fn what_was_booked_stays_when_a_role_changes() {
    let mut world = World::new(&["b0", "b1"]);
    let (id, placement) = world.book(0);
    let name = placement.prefill().instance_id.to_string();
    let mut world = world.reports(&name, |report| report.current_role = Some(Role::Decode));
    let work: Vec<usize> = world.view.instances().iter().map(|i| i.open_work(0).prefills).collect();
    assert_eq!((work.iter().sum::<usize>(), world.view.bookings()), (1, 1));
    // Nothing more is changed before it has ended.
    let mut balance = Roles::new(options());
    let plan = planned(&mut balance, &world, 0, Some(OverloadReason::Ttft)).expect("a window");
    assert_eq!(plan.changes, []);
    world.view.unbook(id, Some(1), 0);
    let plans = balance.plan(&world.view, WINDOW_US);
    assert_eq!(plans[0].1.changes.len(), 1);
}

#[test]
fn what_is_fixed_has_its_role_whatever_is_said() {
    let world = World::new(&["p0", "d0"]);
    let world = world.reports("p0", |report| report.current_role = Some(Role::Decode));
    assert_eq!(roles(&world), [Role::Decode, Role::Prefill]);
}

#[test]
fn refusals_for_a_side_move_roles_to_it() {
    let world = World::new(&["b0", "b1", "b2", "b3"]);
    let set =
        |world: World, name, role| world.reports(name, |report| report.current_role = Some(role));
    let world = ["b0", "b1"].into_iter().fold(world, |w, name| set(w, name, Role::Prefill));
    let world = ["b2", "b3"].into_iter().fold(world, |w, name| set(w, name, Role::Decode));
    let plan = |refused| {
        planned(&mut Roles::new(options()), &world, 0, refused).expect("a window").changes
    };
    assert_eq!(plan(None), []);
    let [change] = plan(Some(OverloadReason::Tbt))[..] else { panic!("one at a time") };
    assert_eq!(change.to, Role::Decode);
    let [change] = plan(Some(OverloadReason::Ttft))[..] else { panic!("one at a time") };
    assert_eq!(change.to, Role::Prefill);
}

#[test]
fn a_change_of_anybody_begins_a_new_window_and_the_changed_one_stays_for_a_while() {
    let world = World::new(&["b0", "b1", "b2"]);
    let mut balance = Roles::new(options());
    let full = Some(OverloadReason::Tbt);
    let plan = planned(&mut balance, &world, 0, full).expect("a window");
    let [change] = plan.changes[..] else { panic!("one at a time: {plan:?}") };
    assert_eq!((change.instance, change.to), (world.view.instances()[0].reference(), Role::Decode));
    // Somebody else was faster.
    let world = world.reports("b1", |report| report.current_role = Some(Role::Decode));
    balance.sample(&world.view, WINDOW_US + 1);
    assert_eq!(balance.plan(&world.view, WINDOW_US + 1), []);
    let world = world.reports("b2", |report| report.current_role = Some(Role::Prefill));
    let world = world.reports("b0", |report| report.current_role = Some(Role::Prefill));
    let later = planned(&mut balance, &world, 2 * WINDOW_US, full).expect("a window");
    assert_eq!(later.changes, [], "all of them have changed a moment ago");
    let later = planned(&mut balance, &world, 6 * WINDOW_US, full).expect("a window");
    assert_eq!(later.changes.len(), 1);
}

#[test]
fn an_instance_that_prefills_is_loaded_while_it_is_busy() {
    let mut world = World::new(&["p0", "d0"]);
    let mut balance = Roles::new(options());
    balance.sample(&world.view, 0);
    let idle = balance.loads(world.model).expect("a model");
    assert_eq!((idle.prefill, idle.decode), (0.0, 0.0));
    world.book(0);
    balance.sample(&world.view, 0);
    let busy = balance.loads(world.model).expect("a model");
    assert!(busy.prefill > 1.0 && busy.decode > 0.0 && busy.decode < 1.0, "{busy:?}");
}
