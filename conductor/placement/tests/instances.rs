//! What an instance that comes is taken to be like.

use crate::support::{World, model, profile, report};
use kvasir_placement::{
    ClusterView, InstanceProfile, InstanceReport, NodeIndex, Policy, PrefillProfile, Role,
    StepProfile,
};

const TOKENS: u64 = 1_000;

fn of_type(name: &str, node: u16, instance_type: &str) -> InstanceReport {
    InstanceReport { instance_type: instance_type.into(), ..report(name, node, Role::Both) }
}

/// What a prefill of [`TOKENS`] is predicted to take on the instance of a node.
fn prefill_us(view: &ClusterView, node: u16) -> u64 {
    let is_on = |instance: &&kvasir_placement::Instance| instance.report().node == NodeIndex(node);
    let instance = view.instances().iter().find(is_on).expect("it is there");
    instance.prefill_model().predict_us(TOKENS, 0)
}

#[test]
fn one_of_a_known_type_starts_with_its_profile_and_others_with_the_common_one() {
    let mut view = ClusterView::new(Policy::default(), profile());
    let prefill = PrefillProfile { base_us: 5.0, token_us: 2.0, pair_us: 0.0, reused_us: 0.0 };
    let decode = StepProfile { base_us: 7.0, sequence_us: 1.0, token_us: 0.5 };
    view.know("fast", InstanceProfile { prefill, decode });
    view.report(of_type("a", 0, "fast"), 0);
    view.report(of_type("b", 1, "unheard-of"), 0);
    view.report(of_type("c", 2, ""), 0);
    assert_eq!([0, 1, 2].map(|node| prefill_us(&view, node)), [2_005, 11_000, 11_000]);
}

#[test]
fn one_that_comes_later_starts_with_what_others_of_its_type_have_taught() {
    let mut world =
        World::new(&["b0"]).reports("b0", |report| report.instance_type = "slow".into());
    assert_eq!(prefill_us(&world.view, 0), 11_000);
    for _ in 0..50 {
        let (id, _) = world.book(0);
        world.view.prefilled(id, Some((TOKENS as u32, 77_000)), 0);
        world.view.stepped(id, 5_000, 0);
        world.view.unbook(id, Some(10), 0);
    }
    let learned_us = prefill_us(&world.view, 0);
    assert!((76_000..78_000).contains(&learned_us), "{learned_us}");

    let other_model = InstanceReport { model: model("other"), ..of_type("d", 4, "slow") };
    for report in
        [of_type("a", 1, "slow"), of_type("b", 2, "another"), of_type("c", 3, ""), other_model]
    {
        world.view.report(report, 0);
    }
    let started_us = [1, 2, 3, 4].map(|node| prefill_us(&world.view, node));
    assert_eq!(started_us, [learned_us, 11_000, 11_000, 11_000]);

    // What it learns is its own.
    world.view.remove_instances(NodeIndex(0), &[]);
    world.view.report(of_type("a", 1, "slow"), 1);
    assert_eq!(prefill_us(&world.view, 1), learned_us);
    let moved = InstanceReport { attachment: (2, 1), ..of_type("a", 1, "another") };
    world.view.report(moved, 1);
    assert_eq!(prefill_us(&world.view, 1), 11_000, "it runs on something else now");
}

#[test]
fn those_of_no_type_are_not_taken_to_be_alike() {
    let mut world = World::new(&["b0"]);
    for _ in 0..50 {
        let (id, _) = world.book(0);
        world.view.prefilled(id, Some((TOKENS as u32, 77_000)), 0);
        world.view.unbook(id, Some(10), 0);
    }
    world.view.report(of_type("a", 1, ""), 0);
    assert!(prefill_us(&world.view, 0) > 70_000);
    assert_eq!(prefill_us(&world.view, 1), 11_000);
}
