//! Instances that share a node: its slots and its ways are counted once, however many they are.

use crate::support::{World, model, report};
use kvasir_placement::{
    BookingId, IndexLimits, InstanceReport, NodeIndex, Policy, Refusal, Role, ShadowIndex, Tier,
};
use kvasir_proto::{BlockKey, InstanceId};

const PROMPT_BLOCKS: u32 = 16;

fn slots_left(world: &World, name: &str) -> u32 {
    let mut named =
        world.view.instances().iter().filter(|one| *one.report().instance_id.0 == *name);
    world.view.slots_left(named.next().expect("it is there"))
}

/// All instances of a node report that it has so many slots.
fn with_slots(mut world: World, names: &[&str], slots: u32) -> World {
    for name in names {
        world = world.reports(name, |report| {
            (report.slots_total, report.slots_available) = (slots, slots);
        });
    }
    world
}

#[test]
fn slots_that_one_instance_takes_are_gone_for_the_other() {
    let mut world = World::shared(&["b0", "b1", "b2"], 2, Policy::default());
    let others: Vec<InstanceId> = ["b1", "b2"].map(InstanceId::from).to_vec();
    let placement = world.place(|request| request.exclude = &others).expect("a placement");
    world.view.book(BookingId(7), &placement, 0);
    // The prompt, and the answer that is expected.
    let taken = 1_000 - slots_left(&world, "b0");
    assert!(taken > PROMPT_BLOCKS, "{taken}");
    assert_eq!(slots_left(&world, "b1"), 1_000 - taken);
    assert_eq!(slots_left(&world, "b2"), 1_000);
    world.view.unbook(BookingId(7), None, 0);
    assert_eq!((slots_left(&world, "b0"), slots_left(&world, "b1")), (1_000, 1_000));
    world.view.book(BookingId(8), &placement, 0);
    // Each status has all instances, and the node has counted what is there by then.
    let world = with_slots(world, &["b0", "b1"], 900);
    let left = 900 - (taken - PROMPT_BLOCKS);
    assert_eq!((slots_left(&world, "b0"), slots_left(&world, "b1")), (left, left));
}

#[test]
fn a_pair_on_one_node_sends_nothing_and_takes_room_for_both_sides() {
    let of = |world: &mut World| {
        let (_, placement) = world.book(0);
        assert!(!placement.is_whole());
        (placement.push_bytes, 1_000 - slots_left(world, "p0"), 1_000 - slots_left(world, "d0"))
    };
    let (apart_bytes, prefill, decode) = of(&mut World::new(&["p0", "d0"]));
    assert_eq!((apart_bytes, prefill), (u64::from(PROMPT_BLOCKS) * 100_000, PROMPT_BLOCKS));
    let together = prefill + decode;
    let mut world = World::shared(&["p0", "d0"], 2, Policy::default());
    assert_eq!(of(&mut world), (0, together, together));
}

#[test]
fn a_node_without_room_for_both_sides_leaves_one_of_them_to_another_node() {
    // The other node has a decode instance that is busier.
    let world = || {
        World::shared(&["p0", "d0", "d1"], 2, Policy::default())
            .reports("d1", |report| report.load.running = 3)
    };
    // So that nobody takes what is reported for old.
    let is_busy = |report: &mut InstanceReport| report.load.waiting_prompt_tokens = 1;
    let decodes_at = |world: &World| {
        let placement = world.place(|request| request.max_tokens = 1);
        placement.map(|placement| placement.decode().instance_id.to_string())
    };
    assert_eq!(decodes_at(&world().reports("p0", is_busy)).as_deref(), Ok("d0"));
    let full = with_slots(world(), &["p0", "d0"], 2 * PROMPT_BLOCKS - 1);
    assert_eq!(decodes_at(&full.reports("p0", is_busy)).as_deref(), Ok("d1"));
    let alone = World::shared(&["p0", "d0"], 2, Policy::default());
    let alone = with_slots(alone, &["p0", "d0"], 2 * PROMPT_BLOCKS - 1).reports("p0", is_busy);
    assert!(matches!(decodes_at(&alone), Err(Refusal::Overloaded { .. })));
}

#[test]
fn what_one_instance_fetches_is_in_the_way_of_the_other() {
    // The last node has the whole prompt, and is busy with long ones.
    let mut world = World::shared(&["b0", "b1", "b2"], 2, Policy::default()).held(&[(1, 15)]);
    let place = |world: &World, not: &str| {
        let exclude = [InstanceId::from(not)];
        world.place(|request| {
            request.exclude = &exclude;
            request.steering.prefix = Some(kvasir_placement::attend::Way::Fetch);
        })
    };
    world = world.reports("b2", |report| report.load.waiting_prompt_tokens = 100_000);
    let first = place(&world, "b1").expect("a placement");
    let fetch = first.fetch.as_ref().expect("the other node has it");
    assert_eq!((&*first.prefill().instance_id.0, fetch.source.node), ("b0", NodeIndex(1)));
    world.view.book(BookingId(1), &first, 0);
    let second = place(&world, "b0").expect("a placement");
    assert_eq!(&*second.prefill().instance_id.0, "b1");
    assert!(second.transfer_us > first.transfer_us, "{} us", second.transfer_us);
}

#[test]
fn nobody_fetches_from_its_own_node() {
    // Its SSD is as near to the one instance as to the other.
    let mut index = ShadowIndex::new(IndexLimits::default());
    let node = index.add_node().expect("room");
    let keys: Vec<BlockKey> = (1..=15).map(|at| BlockKey([at; 16])).collect();
    index.insert(node, Tier::Ssd, &keys);
    let matched = index.reader().match_prefix(&keys);
    assert_eq!((node, matched.cached_blocks(node)), (NodeIndex(0), 15));
    for policy in [Policy::default(), Policy { always_fetch: true, ..Policy::default() }] {
        let mut world = World::shared(&["b0", "b1"], 2, policy);
        world.matched = index.reader().match_prefix(&keys);
        let placement = world.place(|_| {}).expect("a placement");
        assert!(placement.fetch.is_none(), "{placement}");
    }
}

#[test]
fn an_instance_that_goes_leaves_the_node_to_the_other_and_the_last_one_takes_it_with_it() {
    let mut world = World::shared(&["b0", "b1"], 2, Policy::default());
    let (id, placement) = world.book(0);
    let stays: InstanceId = match &*placement.prefill().instance_id.0 {
        "b0" => "b1".into(),
        _ => "b0".into(),
    };
    let left = slots_left(&world, &stays.0);
    world.view.remove_instances(NodeIndex(0), std::slice::from_ref(&stays));
    assert_eq!(slots_left(&world, &stays.0), left, "what is booked is held until it is over");
    world.view.unbook(id, None, 0);
    assert_eq!(slots_left(&world, &stays.0), 1_000);
    world.view.remove_instances(NodeIndex(0), &[]);
    assert!(world.view.instances().is_empty());
    world.view.report(report("b0", 0, Role::Both), 0);
    assert_eq!(slots_left(&world, "b0"), 1_000);
}

#[test]
fn a_node_is_idle_when_all_of_its_instances_are() {
    // No slot is left by the report, which may be old where nothing runs; it is not where another instance is busy.
    let world = World::shared(&["b0", "b1"], 2, Policy::default());
    let world = with_slots(world, &["b0", "b1"], 1_000);
    let no_room = |report: &mut InstanceReport| report.slots_available = 0;
    let world = world.reports("b0", no_room).reports("b1", no_room);
    assert!(world.place(|_| {}).is_ok(), "nothing is booked that could hold them");
    let busy = world.reports("b1", |report| report.load.running = 2);
    assert!(matches!(busy.place(|_| {}), Err(Refusal::Overloaded { .. })));
    // The same where the busy one serves another model.
    let mut other = World::shared(&["b0"], 1, Policy::default()).reports("b0", no_room);
    let second = InstanceReport { model: model("other"), ..report("x1", 0, Role::Both) };
    let mut second = InstanceReport { slots_available: 0, ..second };
    second.load.running = 2;
    other.view.report(second, 0);
    assert!(matches!(other.place(|_| {}), Err(Refusal::Overloaded { .. })));
}
