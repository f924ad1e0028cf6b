//! A request that says where it goes and what becomes of its prefix goes there, and nothing else is different.

use crate::support::World;
use kvasir_placement::attend::Way;
use kvasir_placement::{BookingId, Missing, Placement, Policy, Refusal, Steering};
use kvasir_proto::InstanceId;

/// `b0` has ten of the fifteen blocks that can be reused; to fetch them takes less than to compute them.
fn world(policy: Policy) -> World {
    World::with_policy(&["b0", "b1", "b2", "d3"], policy).held(&[(0, 10)])
}

fn steered(
    world: &World,
    instance: Option<&str>,
    prefix: Option<Way>,
) -> Result<Placement, Refusal> {
    let instance = instance.map(InstanceId::from);
    let found = world.decide(|request| {
        request.steering = Steering { instance: instance.as_ref(), prefix };
    });
    found.map_err(|refused| refused.refusal)
}

#[test]
fn the_instance_that_is_named_computes_the_prompt_whoever_has_its_prefix() {
    let world = world(Policy::default());
    let to = |name: &str| steered(&world, Some(name), None).expect("it is there");
    assert_eq!(&*steered(&world, None, None).expect("a placement").prefill().instance_id.0, "b0");
    for name in ["b0", "b1", "b2"] {
        let placement = to(name);
        assert_eq!(&*placement.prefill().instance_id.0, name);
        assert_eq!(placement.fetch.is_some(), name != "b0", "{placement}");
    }
    let said = to("b2").to_string();
    assert!(
        said.contains("prefill b0@n0") && said.contains("another instance was requested"),
        "{said}"
    );
    for name in ["b9", "d3"] {
        let model = "tiny".to_owned();
        let none = Refusal::NoInstance { model, missing: Missing::Named };
        assert_eq!(steered(&world, Some(name), None), Err(none), "{name}");
    }
}

#[test]
fn what_is_named_is_waited_for_as_anything_is() {
    let world = world(Policy::default()).reports("b1", |report| report.draining = true);
    let named = steered(&world, Some("b1"), None);
    assert!(
        matches!(named, Err(Refusal::NoInstance { missing: Missing::Prefill, .. })),
        "{named:?}"
    );
}

#[test]
fn a_prefix_is_fetched_or_computed_as_it_is_asked_for() {
    for always_fetch in [false, true] {
        let world = world(Policy { always_fetch, ..Policy::default() });
        let to = |way| steered(&world, Some("b1"), Some(way)).expect("it is there");
        let fetched = to(Way::Fetch);
        assert_eq!(fetched.fetch.as_ref().map(|fetch| fetch.until_block), Some(10));
        let computed = to(Way::Recompute);
        assert_eq!((computed.reused_tokens, computed.fetch.is_some()), (0, false), "{computed}");
        // Nobody routes here, so that it goes as others do.
        assert_eq!(
            to(Way::Route).fetch.is_some(),
            steered(&world, Some("b1"), None).unwrap().fetch.is_some()
        );
    }
    // What the node has itself it uses.
    let world = world(Policy::default());
    let local = steered(&world, Some("b0"), Some(Way::Recompute)).expect("it is there");
    assert_eq!(local.reused_tokens, 640);
}

#[test]
fn what_is_slow_to_fetch_is_fetched_when_it_is_asked_for() {
    let mut world = world(Policy::default());
    let to = |world: &World, way| steered(world, Some("b1"), way).expect("it is there");
    for serial in 0..60 {
        let placement = to(&world, Some(Way::Fetch));
        world.view.book(BookingId(serial), &placement, 0);
        // A byte a microsecond, a thousandth of what was thought.
        world.view.fetched(BookingId(serial), Some((1_000_000, 1_000_000)));
        world.view.unbook(BookingId(serial), Some(1), 0);
    }
    assert!(to(&world, None).fetch.is_none(), "it is computed");
    assert!(to(&world, Some(Way::Fetch)).fetch.is_some());
}
