//! A prefix that another node has stays there when that is cheapest, and the decision says what each way costs.

use crate::support::World;
use kvasir_placement::attend::{
    Closed, Congestion, Constants, FabricProfile, GatherProfile, KernelProfile, MergeProfile,
    SelectedProfile, SpliceProfile, Way,
};
use kvasir_placement::{
    Objectives, OverloadReason, Placement, Policy, Refusal, Role, RoutedRows, Routing, Verdict,
};

const ROUTED: Option<RoutedRows> =
    Some(RoutedRows { heads: 4, query_bytes: 1, partial_bytes: 1, layers: 1 });

/// A layer takes 20 us on the way, 10 at the holder and 5 to merge: of one layer, 35 us a step.
fn constants() -> Constants {
    let kernel = KernelProfile {
        launch_us: 10.0,
        token_us: 0.0,
        flat_rows: 1 << 20,
        row_token_us: 0.0,
        selected: SelectedProfile { base_factor: 1.0, token_factor: 0.0 },
    };
    let fabric = FabricProfile {
        probe_us: 10.0,
        turnaround_us: 10.0,
        bytes_per_us: 1e12,
        congestion: Congestion { flat_messages: 2, message_factor: 1.0 },
        concurrent_messages_max: 2,
        splice: SpliceProfile { base_us: 0.0, token_us: 0.0 },
        gather: GatherProfile { base_us: 0.0, holder_us: 0.0, rows: 1 },
        merge: MergeProfile { base_us: 5.0, part_us: 0.0 },
    };
    Constants { fabric, holder: kernel, local: kernel }
}

/// `b0` has ten blocks of the prompt, and so long a queue that `b1` is taken.
fn world(always: bool) -> World {
    world_with(constants(), always)
}

fn world_with(constants: Constants, always: bool) -> World {
    let policy = Policy { routing: Some(Routing { constants, always }), ..Policy::default() };
    World::with_policy(&["b0", "b1"], policy)
        .held(&[(0, 10)])
        .reports("b0", |report| {
            report.model.routed = ROUTED;
            report.load.waiting_prompt_tokens = 5_120;
        })
        .reports("b1", |report| report.model.routed = ROUTED)
}

fn placed(world: &World, max_tokens: u32) -> Placement {
    world.place(|request| request.max_tokens = max_tokens).expect("a placement")
}

#[test]
fn a_short_answer_leaves_the_prefix_where_it_is_and_a_long_one_fetches_it() {
    // Routed, 20 us to open it, 35 for the rest of the prompt and 35 for each token; fetched, 1,100 us and 10 for each.
    for (tokens, way) in [(1, Way::Route), (40, Way::Route), (45, Way::Fetch), (256, Way::Fetch)] {
        let placement = placed(&world(false), tokens);
        let decision = placement.attended.as_ref().expect("it was asked").decision;
        assert_eq!(decision.chosen, Some(way), "{tokens} tokens\n{decision}");
        assert_eq!(placement.route.is_some(), way == Way::Route, "{tokens} tokens");
        assert_eq!(placement.fetch.is_some(), way == Way::Fetch, "{tokens} tokens");
        assert_eq!((placement.reused_tokens, placement.compute_tokens), (640, 360));
    }
}

#[test]
fn the_decision_says_what_every_way_costs() {
    let got = placed(&world(false), 10).to_string();
    let want = "
prompt of 1000 tokens in 16 blocks
prefill b0@n0: cached 10, max(queue 61200, transfer 0) + compute 4600 = 65800 us: higher cost
prefill b1@n1: cached 0, fetch to 10 from n0, max(queue 0, transfer 1100) + compute 4600 = 5700 us: chosen
decode b0@n0: cached 10, load 0.10, wait 0 us, step 1100 us: higher cost
decode b1@n1: cached 0, load 0.10, wait 0 us, step 1100 us: chosen
prefix of 10 blocks on n0
route: setup 55.0 us, per step 35.0 us, total 405.0 us, 80 bytes; per layer: transport 20.0 us + holder 10.0 us + merge 5.0 us
fetch: setup 1100.0 us, per step 10.0 us, total 1200.0 us, 999680 bytes
gather: setup 0.0 us, per step 10.0 us, total 100.0 us, 0 bytes; unavailable: only a selection can be gathered
recompute: setup 6400.0 us, per step 10.0 us, total 6500.0 us, 0 bytes
route
full on b1, [0, 10) stay on n0, first token in 4655 us, then every 1135 us";
    assert_eq!(got, want.trim(), "\n--- got ---\n{got}\n-----------");
}

/// `b0` has ten blocks of the prompt, and three others may want them.
fn crowd() -> World {
    crowd_with(constants())
}

fn crowd_with(constants: Constants) -> World {
    crowd_of(&["b0", "b1", "b2", "b3"], constants).held(&[(0, 10)])
}

fn crowd_of(names: &[&str], constants: Constants) -> World {
    let policy =
        Policy { routing: Some(Routing { constants, always: false }), ..Policy::default() };
    let world = World::with_policy(names, policy);
    names
        .iter()
        .fold(world, |world, name| world.reports(name, |report| report.model.routed = ROUTED))
}

fn placed_at(world: &World, name: &str) -> Placement {
    let named = kvasir_proto::InstanceId::from(name);
    let model = world.view.models().last().expect("a model").0;
    let placement = world.place(|request| {
        (request.model, request.max_tokens) = (model, 10);
        request.steering.instance = Some(&named);
    });
    placement.expect("a placement")
}

#[test]
fn a_holder_answers_so_many_and_then_its_blocks_are_fetched() {
    let mut world = crowd();
    for (booked, name) in ["b1", "b2", "b3"].into_iter().enumerate() {
        let placement = placed_at(&world, name);
        assert_eq!(placement.route.is_some(), booked < 2, "{placement}");
        world.view.book(kvasir_placement::BookingId(booked as u64), &placement, 0);
    }
    // Who is answered already sends more in the same message.
    assert!(placed_at(&world, "b1").route.is_some());
    assert!(placed_at(&world, "b3").route.is_none());
    world.view.unbook(kvasir_placement::BookingId(0), Some(1), 0);
    assert!(placed_at(&world, "b3").route.is_some());
}

#[test]
fn who_has_a_copy_takes_what_another_holder_has_no_room_for() {
    let names = ["b0", "b1", "b2", "b3", "b4", "b5", "b6"];
    let mut world = crowd_of(&names, constants()).held(&[(0, 10), (1, 10)]);
    let mut holders = Vec::new();
    for (booked, name) in names[2..].iter().enumerate() {
        let placement = placed_at(&world, name);
        let route = placement.route.as_ref();
        holders.extend(route.map(|route| route.parts[0].source.node_id.to_string()));
        assert_eq!(route.is_some(), booked < 4, "{placement}");
        world.view.book(kvasir_placement::BookingId(booked as u64), &placement, 0);
    }
    holders.sort();
    assert_eq!(holders, ["n0", "n0", "n1", "n1"]);
    // Another request of an instance goes where its message goes.
    let placed = placed_at(&world, "b2");
    let again = placed.route.as_ref().expect("in the same message");
    world.view.unbook(kvasir_placement::BookingId(0), Some(1), 0);
    let other = if &*again.parts[0].source.node_id.0 == "n0" { "n1" } else { "n0" };
    let moved = placed_at(&world, "b6").route.expect("there is room for one");
    assert_ne!(&*moved.parts[0].source.node_id.0, other);
}

/// Over a block the holder's kernel takes 6.4 us.
fn slow_kernel() -> Constants {
    let holder = KernelProfile { token_us: 0.1, ..constants().holder };
    Constants { holder, ..constants() }
}

/// Blocks of each part, by node.
fn parts(placement: &Placement) -> Vec<(String, u32)> {
    let parts = placement.route.iter().flat_map(|route| &route.parts);
    parts.map(|part| (part.source.node_id.to_string(), part.blocks)).collect()
}

#[test]
fn several_attend_a_part_each_as_long_as_that_is_worth_it() {
    // A layer: 35 us, and 64 over ten blocks at the kernel. Of two 67 us, of four 54.2, and of eight 47.8.
    let names = ["b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8"];
    for (holders, want) in [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (8, 8)] {
        let held: Vec<(u16, u32)> = (0..holders).map(|node| (node, 10)).collect();
        let placement = placed_at(&crowd_of(&names, slow_kernel()).held(&held), "b8");
        let mut nodes = parts(&placement);
        assert_eq!(nodes.iter().map(|(_, blocks)| blocks).sum::<u32>(), 10, "{placement}");
        let (most, least) = (nodes[0].1, nodes[nodes.len() - 1].1);
        assert!(most - least <= 1 && most == 10u32.div_ceil(want), "{placement}");
        nodes.sort();
        nodes.dedup_by(|a, b| a.0 == b.0);
        assert_eq!(nodes.len(), want as usize, "each is another node\n{placement}");
    }
    let quick = placed_at(&crowd_of(&names, constants()).held(&[(0, 10), (1, 10)]), "b8");
    assert_eq!(parts(&quick).len(), 1, "{quick}");
}

#[test]
fn a_part_is_with_the_same_node_for_every_request() {
    let names = ["b0", "b1", "b2", "b3", "b4", "b5"];
    let world = crowd_of(&names, slow_kernel()).held(&[(0, 10), (1, 10)]);
    for name in &names[2..] {
        let placement = placed_at(&world, name);
        assert_eq!(parts(&placement), [("n0".to_owned(), 5), ("n1".to_owned(), 5)], "{placement}");
    }
}

#[test]
fn as_many_are_asked_as_the_objective_needs() {
    let names = ["b0", "b1", "b2", "b3", "b4"];
    let held = [(0, 10), (1, 10), (2, 10), (3, 10)];
    let world = crowd_of(&names, slow_kernel()).held(&held);
    let instance = kvasir_proto::InstanceId::from("b4");
    let model = world.view.models().last().expect("a model").0;
    // A step is 1,100 us, and with a routed layer of one holder 1,199, of two 1,167, of four 1,154.
    for (tbt_us, want) in [(1_160, 4), (1_150, 0)] {
        let placement = world.place(|request| {
            (request.model, request.max_tokens) = (model, 10);
            request.steering.instance = Some(&instance);
            request.objectives = Objectives { tbt_us, ..Objectives::NONE };
        });
        let placement = placement.expect("a placement");
        assert_eq!(parts(&placement).len(), want, "{placement}");
    }
}

#[test]
fn every_holder_of_a_part_answers_so_many_and_is_free_after_them() {
    let names = ["b0", "b1", "b2", "b3", "b4", "b5"];
    let mut world = crowd_of(&names, slow_kernel()).held(&[(0, 10), (1, 10)]);
    let ids: Vec<_> = (0..2).map(kvasir_placement::BookingId).collect();
    for (id, name) in ids.iter().zip(&names[2..]) {
        let placement = placed_at(&world, name);
        assert_eq!(parts(&placement).len(), 2, "{placement}");
        world.view.book(*id, &placement, 0);
    }
    assert!(placed_at(&world, "b4").route.is_none(), "both answer two");
    // Not attended after all: neither is asked any more.
    world.view.unrouted(ids[0]);
    assert_eq!(parts(&placed_at(&world, "b4")).len(), 2);
    world.view.unbook(ids[1], Some(1), 0);
    world.view.unbook(ids[0], Some(1), 0);
    for name in &names[2..4] {
        let placement = placed_at(&world, name);
        assert_eq!(parts(&placement).len(), 2, "{placement}");
        world.view.book(kvasir_placement::BookingId(9), &placement, 0);
        world.view.unbook(kvasir_placement::BookingId(9), Some(1), 0);
    }
}

#[test]
fn two_engines_of_one_node_are_one_holder() {
    let policy = Policy {
        routing: Some(Routing { constants: slow_kernel(), always: false }),
        ..Policy::default()
    };
    let names = ["b0", "b1", "b2", "b3"];
    let world = World::shared(&names, 2, policy);
    let world = names
        .iter()
        .fold(world, |world, name| world.reports(name, |report| report.model.routed = ROUTED));
    let placement = placed_at(&world.held(&[(0, 10)]), "b3");
    assert_eq!(parts(&placement), [("n0".to_owned(), 10)], "{placement}");
}

#[test]
fn what_routed_layers_take_replaces_the_profile() {
    let mut world = world(false);
    let placement = placed(&world, 10);
    let id = kvasir_placement::BookingId(1);
    world.view.book(id, &placement, 0);
    for _ in 0..50 {
        // Ten times as long as was thought.
        world.view.routed(id, 100, 35_000);
    }
    world.view.unbook(id, Some(10), 0);
    let decision = placed(&world, 10).attended.expect("it was asked").decision;
    let step_us = decision.price(Way::Route).step_us;
    assert!((330.0..=360.0).contains(&step_us), "{step_us}");
    assert_eq!(decision.chosen, Some(Way::Fetch), "{decision}");
}

/// What its prompt behind the prefix asks in a layer is so much more than a step that a step tells little of it.
#[test]
fn what_layers_of_prompts_take_replaces_the_profile_too() {
    let holder = KernelProfile { flat_rows: 4, row_token_us: 1e-5, ..constants().holder };
    let mut world = world_with(Constants { holder, ..constants() }, false);
    let once_us = |world: &World| {
        let decision = placed(world, 10).attended.expect("it was asked").decision;
        decision.price(Way::Route).once_us
    };
    let before_us = once_us(&world);
    assert!((60.0..70.0).contains(&before_us), "{before_us}");
    let placement = placed(&world, 10);
    let id = kvasir_placement::BookingId(1);
    world.view.book(id, &placement, 0);
    for _ in 0..100 {
        world.view.routed(id, 100, 3_500);
        // Two layers of 360 tokens, a hundred times as long as was thought beyond what is fixed.
        world.view.prompt_routed(id, 2, 720, 2 * 954);
    }
    world.view.unbook(id, Some(10), 0);
    let (after_us, decision) =
        (once_us(&world), placed(&world, 10).attended.expect("asked").decision);
    assert!((900.0..1_050.0).contains(&after_us), "{after_us}");
    let step_us = decision.price(Way::Route).step_us;
    assert!((33.0..38.0).contains(&step_us), "steps are as they were: {step_us}");
}

#[test]
fn what_no_prompt_can_have_asked_is_not_learned() {
    let mut world = world(false);
    let price = |world: &World| placed(world, 10).attended.expect("it was asked").decision;
    let before = price(&world);
    let placement = placed(&world, 10);
    let id = kvasir_placement::BookingId(1);
    world.view.book(id, &placement, 0);
    // Of 1,000 tokens: none, more than there are, and in no layer at all.
    for (layers, queries) in [(10, 0), (10, 10_001), (10, u64::MAX), (0, 0), (0, 5)] {
        world.view.prompt_routed(id, layers, queries, 1_000_000);
    }
    world.view.prompt_routed(kvasir_placement::BookingId(2), 10, 10, 1_000_000);
    world.view.unbook(id, Some(10), 0);
    assert_eq!(price(&world), before);
}

/// What the rest of a prompt attends here is part of fetching and of computing it again, and none of leaving it there:
/// there it is in the layers that are asked.
#[test]
fn attending_a_prefix_here_is_not_free() {
    let mut profile = crate::support::profile();
    profile.prefill.pair_us = 0.01;
    let policy = Policy {
        routing: Some(Routing { constants: constants(), always: false }),
        ..Policy::default()
    };
    let world = World::with_profile(&["b0", "b1"], 1, policy, profile).held(&[(0, 10)]);
    let world = world
        .reports("b0", |report| {
            report.model.routed = ROUTED;
            report.load.waiting_prompt_tokens = 5_120;
        })
        .reports("b1", |report| report.model.routed = ROUTED);
    let placement = placed(&world, 100);
    let decision = placement.attended.as_ref().expect("it was asked").decision;
    // Of 360 tokens 0.01 us for each pair with 640 of the prefix, twice; a fetch takes 1,100 us, and 640 tokens
    // 6,400 and 0.01 for each pair of theirs.
    let attend_us = 0.01 * 360.0 * 2.0 * 640.0;
    let once_us = |way: Way| decision.price(way).once_us;
    let near = |got: f64, want: f64| (got - want).abs() <= 2.0;
    assert!(near(once_us(Way::Fetch), 1_100.0 + attend_us), "{placement}");
    assert!(
        near(once_us(Way::Recompute), 6_400.0 + 0.01 * 640.0 * 640.0 + attend_us),
        "{placement}"
    );
    assert!(near(once_us(Way::Route), 55.0), "{placement}");
    // Fetching would be the cheapest for so many tokens if attending were free.
    assert_eq!(decision.chosen, Some(Way::Route), "{placement}");
    // 1,000 us, 10 for each of 360 tokens, 0.01 for each pair of theirs, and what is asked elsewhere.
    let first_us = 1_000.0 + 3_600.0 + 0.01 * 360.0 * 360.0 + 55.0;
    assert!(near(placement.predicted_ttft_us as f64, first_us), "{placement}");
}

#[test]
fn what_opening_a_route_takes_is_learned_and_counted_once() {
    let mut world = world(false);
    assert!(placed(&world, 10).route.is_some());
    for _ in 0..50 {
        world.view.opened(1_500);
    }
    let placement = placed(&world, 10);
    let decision = placement.attended.as_ref().expect("it was asked").decision;
    let price = decision.price(Way::Route);
    assert!((1_500.0..1_600.0).contains(&price.once_us), "{price}");
    assert!((price.total_us - price.once_us - 350.0).abs() < 1.0, "{price}");
    // So much is not won back by leaving it there.
    assert_eq!(decision.chosen, Some(Way::Fetch), "{decision}");
    assert!(placement.route.is_none());
}

#[test]
fn queries_of_others_at_the_holder_make_its_kernel_slower() {
    let holder = KernelProfile { flat_rows: 64, row_token_us: 1e-4, ..constants().holder };
    let mut world = crowd_with(Constants { holder, ..constants() });
    let compute_us = |world: &World, name: &str| {
        placed_at(world, name).attended.expect("it was asked").decision.route.compute_us
    };
    let alone_us = compute_us(&world, "b2");
    let placement = placed_at(&world, "b1");
    for booked in 0..100 {
        world.view.book(kvasir_placement::BookingId(booked), &placement, 0);
    }
    assert!(compute_us(&world, "b2") > 2.0 * alone_us, "{alone_us}");
}

/// An answer to a prompt of so many tokens on `b1`, all of it there, that tells how long its steps are.
fn decodes(world: &mut World, serial: u64, prompt_tokens: u32, step_us: u64) {
    let model = world.view.models().last().expect("a model").0;
    let placement = world.place(|request| {
        (request.model, request.may_route) = (model, false);
        request.prompt_tokens = prompt_tokens;
    });
    let id = kvasir_placement::BookingId(serial);
    world.view.book(id, &placement.expect("a placement"), 0);
    world.view.prefilled(id, None, 0);
    world.view.stepped(id, step_us, 0);
    world.view.unbook(id, Some(100), 0);
}

#[test]
fn what_steps_over_rows_that_are_here_take_replaces_the_profile() {
    let local = KernelProfile { token_us: 0.01, ..constants().local };
    let mut world = world_with(Constants { local, ..constants() }, false);
    let decision = placed(&world, 256).attended.expect("it was asked").decision;
    assert_eq!(decision.chosen, Some(Way::Fetch), "{decision}");
    // A step takes 500 us, and half a microsecond for each row.
    for serial in 0..100 {
        let tokens = [64, 640, 6_400][serial as usize % 3];
        decodes(&mut world, serial, tokens, 500 + u64::from(tokens) / 2);
    }
    let decision = placed(&world, 256).attended.expect("it was asked").decision;
    let step_us = decision.price(Way::Fetch).step_us;
    assert!((310.0..=330.0).contains(&step_us), "640 rows: {step_us}");
    assert_eq!(decision.chosen, Some(Way::Route), "{decision}");
}

#[test]
fn requests_of_one_instance_share_a_message() {
    let mut world = world(false);
    let transport_us = |placement: &Placement| {
        placement.attended.as_ref().expect("asked").decision.route.transport_us
    };
    for booked in 0..5 {
        let placement = placed(&world, 10);
        assert!(placement.route.is_some(), "{placement}");
        // As many others that the holder answers would make the way three times as long.
        assert!((transport_us(&placement) - 20.0).abs() < 1e-3, "{placement}");
        world.view.book(kvasir_placement::BookingId(booked), &placement, 0);
    }
}

#[test]
fn a_prefix_only_stays_where_the_request_and_the_objectives_allow_it() {
    let world = world(true);
    assert!(placed(&world, 256).route.is_some(), "whatever it costs");
    let model = world.view.models().last().expect("a model").0;
    let with = |may_route, tbt_us| {
        let placement = world.place(|request| {
            request.model = model;
            request.may_route = may_route;
            request.objectives = Objectives { tbt_us, ..Objectives::NONE };
        });
        placement.expect("a placement").route.is_some()
    };
    assert_eq!([with(true, 1_136), with(true, 1_134), with(false, 1_136)], [true, false, false]);
}

#[test]
fn a_prefix_does_not_stay_where_that_misses_an_objective_that_is_met_otherwise() {
    let mut world = world(true);
    let placement = placed(&world, 10);
    let id = kvasir_placement::BookingId(1);
    world.view.book(id, &placement, 0);
    for _ in 0..200 {
        // A thousand times as long as was thought.
        world.view.routed(id, 1, 35_000);
    }
    world.view.unbook(id, Some(10), 0);
    let model = world.view.models().last().expect("a model").0;
    let with = |ttft_us| {
        let placement = world.place(|request| {
            request.model = model;
            request.objectives = Objectives { ttft_us, ..Objectives::NONE };
        });
        placement.expect("a placement")
    };
    // To compute takes 4,600 us, and its queries 35,000; to fetch and compute 5,700.
    let in_time = with(40_000);
    assert!(in_time.route.is_some(), "{in_time}");
    assert!((39_000..=39_700).contains(&in_time.predicted_ttft_us), "{in_time}");
    let late = with(39_000);
    assert!(late.route.is_none() && late.fetch.is_some(), "{late}");
    assert_eq!(late.predicted_ttft_us, 5_700);
    // What no way meets is not a reason: here it is refused before.
    assert!(with(5_700).fetch.is_some());
}

#[test]
fn a_prefix_that_is_not_attended_after_all_frees_its_holder_and_takes_room_here() {
    // Room for the prompt beside what follows the prefix, 16 blocks and 6, and not beside another whole one.
    let mut world = world(false).reports("b1", |report| report.slots_available = 28);
    let placement = placed(&world, 10);
    assert!(placement.route.is_some(), "{placement}");
    let (first, second) = (kvasir_placement::BookingId(0), kvasir_placement::BookingId(1));
    world.view.book(first, &placement, 0);
    let fits_here = |world: &World| &*placed(world, 10).prefill().instance_id.0 == "b1";
    assert!(fits_here(&world));
    world.view.unrouted(first);
    assert!(!fits_here(&world));
    // Its slots are those of the whole prompt now, and come back with its end.
    world.view.unbook(first, Some(1), 0);
    assert!(fits_here(&world));

    let mut world = crowd();
    for (id, name) in [(first, "b1"), (second, "b2")] {
        let placement = placed_at(&world, name);
        world.view.book(id, &placement, 0);
    }
    assert!(placed_at(&world, "b3").route.is_none(), "the holder answers two");
    // Said again, it changes nothing.
    world.view.unrouted(first);
    world.view.unrouted(first);
    assert!(placed_at(&world, "b3").route.is_some());
    world.view.unbook(first, Some(1), 0);
    assert!(placed_at(&world, "b3").route.is_some());
    assert!(placed_at(&world, "b2").route.is_some());
    world.view.unbook(second, Some(1), 0);
    for (id, name) in [(2, "b1"), (3, "b2")] {
        let placement = placed_at(&world, name);
        assert!(placement.route.is_some(), "{name}");
        world.view.book(kvasir_placement::BookingId(id), &placement, 0);
    }
    assert!(placed_at(&world, "b3").route.is_none());
}

#[test]
fn what_is_here_is_attended_here_and_what_follows_it_elsewhere() {
    let world = world(false).held(&[(0, 10), (1, 4)]);
    for (tokens, way) in [(25, Way::Route), (26, Way::Fetch)] {
        let placement = placed(&world, tokens);
        let decision = placement.attended.as_ref().expect("it was asked").decision;
        assert_eq!(decision.chosen, Some(way), "{tokens} tokens\n{decision}");
        assert_eq!((placement.reused_tokens, placement.compute_tokens), (640, 360));
        // Six blocks are priced, not ten.
        assert!((decision.price(Way::Fetch).once_us - 700.0).abs() < 1e-3, "{decision}");
        let recompute_us = decision.price(Way::Recompute).once_us;
        assert!((recompute_us - 3_840.0).abs() < 1e-3, "{decision}");
        match (&placement.route, &placement.fetch) {
            (Some(route), None) if way == Way::Route => {
                assert_eq!((route.first_block, route.blocks()), (4, 6));
            }
            (None, Some(fetch)) if way == Way::Fetch => assert_eq!(fetch.from_block, 4),
            other => panic!("{other:?}"),
        }
    }
    let got = placed(&world, 25).to_string();
    for line in ["blocks [4, 10) on n0", "full on b1, [4, 10) stay on n0, first token in 4655 us"] {
        assert!(got.lines().any(|of| of.starts_with(line)), "{line} is not in\n{got}");
    }
    let explained = placed(&world, 25).explain();
    assert_eq!(
        explained.prefix.as_ref().map(|prefix| (prefix.first_block, prefix.blocks)),
        Some((4, 6))
    );
    assert!(
        explained.cache_summary.contains("4 of 16 blocks are local, and 6 stay on n0"),
        "{explained:?}"
    );
    // Over several holders too, part after part.
    let names = ["b0", "b1", "b2", "b3"];
    let world = crowd_of(&names, slow_kernel()).held(&[(0, 10), (1, 10), (3, 2)]);
    let placement = placed_at(&world, "b3");
    assert_eq!(parts(&placement), [("n0".to_owned(), 4), ("n1".to_owned(), 4)], "{placement}");
    assert_eq!(placement.route.expect("routed").first_block, 2);
}

#[test]
fn what_the_requester_s_own_ssd_has_is_not_attended_elsewhere() {
    let world = world(true).held_in_memory(&[(0, 10, 10), (1, 4, 3)]);
    assert!(placed(&world, 10).attended.is_none());
    let world = world.held_in_memory(&[(0, 10, 10), (1, 4, 4)]);
    assert!(placed(&world, 10).route.is_some());
}

#[test]
fn who_has_room_for_the_rest_alone_routes_when_nobody_has_room_for_all() {
    // `b1` has the room of the six blocks that follow, and of one for the answer.
    let with = |world: World, slots: u32| {
        world.reports("b1", |report| {
            (report.slots_total, report.slots_available) = (slots, slots);
        })
    };
    let world = with(world(false), 7);
    let instance = |placement: &Placement| placement.prefill().instance_id.to_string();
    // It is long in the queue of the one that has room for all, but in time there.
    let waits = placed(&world, 10);
    assert_eq!((instance(&waits), waits.route.is_some()), ("b0".to_owned(), false), "{waits}");
    let in_time = |world: &World, ttft_us| {
        let model = world.view.models().last().expect("a model").0;
        world.decide(|request| {
            (request.model, request.max_tokens) = (model, 10);
            request.objectives = Objectives { ttft_us, ..Objectives::NONE };
        })
    };
    let routed = in_time(&world, 60_000).expect("routed");
    assert_eq!(instance(&routed), "b1", "{routed}");
    assert_eq!(routed.route.as_ref().map(|route| route.blocks()), Some(10), "{routed}");
    assert_eq!(routed.predicted_ttft_us, 4_655);
    let decision = routed.attended.as_ref().expect("asked").decision;
    for way in [Way::Fetch, Way::Recompute] {
        assert_eq!(decision.price(way).closed, Some(Closed::NoRoom), "{decision}");
    }
    let b1 = routed.considered.prefill_candidates[1].clone();
    assert_eq!((b1.used_blocks, b1.transfer_us, b1.compute_us), (10, 0, 4_655), "{routed}");
    // It is in time or not, as any other: where it is idle, late is a probe.
    for (ttft_us, late) in [(4_655, false), (4_654, true)] {
        let placement = in_time(&world, ttft_us).expect("routed");
        assert_eq!((placement.probe, placement.route.is_some()), (late, true), "{placement}");
    }
    // One slot less than it takes.
    let fuller = with(world, 6);
    let none = in_time(&fuller, 60_000).expect_err("no room");
    assert!(none.considered.prefill_candidates[1].verdict == Verdict::NoCapacity, "{none}");
}

#[test]
fn a_prompt_that_no_node_could_hold_is_served_where_a_part_of_it_may_stay_elsewhere() {
    let small = |world: World, slots: u32| {
        world.reports("b1", |report| {
            (report.slots_total, report.slots_available) = (slots, slots);
        })
    };
    let smaller = |world: World| {
        // What it holds fills it.
        world.reports("b0", |report| (report.slots_total, report.slots_available) = (12, 0))
    };
    let place = |world: &World, may_route: bool| {
        let model = world.view.models().last().expect("a model").0;
        world.decide(|request| {
            (request.model, request.max_tokens, request.may_route) = (model, 10, may_route);
        })
    };
    let world_of = |slots| smaller(small(world(false), slots));
    let routed = place(&world_of(7), true).expect("routed");
    assert_eq!(
        (&*routed.prefill().instance_id.0, routed.route.is_some()),
        ("b1", true),
        "{routed}"
    );
    for (slots, may_route) in [(7, false), (6, true)] {
        let refused = place(&world_of(slots), may_route).expect_err("too large");
        assert!(
            matches!(refused.refusal, Refusal::TooLarge { .. }),
            "{slots} {may_route} {refused}"
        );
    }
    // It could, were the holder to answer one more: that is a matter of time.
    let mut busy = world_of(7);
    let instances = ["b2", "b3"].map(|name| crate::support::report(name, 7, Role::Both));
    for (at, report) in instances.into_iter().enumerate() {
        let model = kvasir_placement::ModelSpec { routed: ROUTED, ..report.model.clone() };
        busy.view.report(kvasir_placement::InstanceReport { model, ..report }, 0);
        let id = kvasir_placement::BookingId(at as u64);
        let placement = placed_at(&busy, ["b2", "b3"][at]);
        assert!(placement.route.is_some(), "{placement}");
        busy.view.book(id, &placement, 0);
    }
    for name in ["b2", "b3"] {
        busy = busy.reports(name, |report| (report.slots_total, report.slots_available) = (1, 0));
    }
    let later = place(&busy, true).expect_err("not now");
    assert!(
        matches!(later.refusal, Refusal::Overloaded { reason: OverloadReason::NoRoom, .. }),
        "{later}"
    );
}

/// `b0` holds ten blocks and has room for no more; of the other instance its room is given.
fn full(other: &str, slots: u32) -> World {
    let policy = Policy {
        routing: Some(Routing { constants: constants(), always: false }),
        ..Policy::default()
    };
    World::with_policy(&["b0", other], policy)
        .held(&[(0, 10)])
        .reports("b0", |report| {
            report.model.routed = ROUTED;
            (report.slots_total, report.slots_available) = (12, 0);
        })
        .reports(other, |report| {
            report.model.routed = ROUTED;
            (report.slots_total, report.slots_available) = (slots, slots);
        })
}

fn with_answer(world: &World, max_tokens: u32) -> Result<Placement, Refusal> {
    let model = world.view.models().last().expect("a model").0;
    world.place(|request| (request.model, request.max_tokens) = (model, max_tokens))
}

#[test]
fn more_room_that_is_not_enough_for_all_does_not_close_the_way_that_is_left() {
    // Beside what follows there would be room for the prefix from 17 slots on.
    for slots in 7..17 {
        let placement = with_answer(&full("b1", slots), 256).expect("routed");
        assert!(placement.route.is_some(), "{slots} slots\n{placement}");
        let decision = placement.attended.as_ref().expect("asked").decision;
        assert_eq!(decision.price(Way::Fetch).closed, Some(Closed::NoRoom), "{slots} slots");
    }
    let placement = with_answer(&full("b1", 17), 256).expect("it fits");
    assert!(placement.fetch.is_some(), "{placement}");
}

#[test]
fn what_cannot_be_routed_is_too_large_where_no_node_could_hold_it() {
    let too_large = |refused: Result<Placement, Refusal>, what: &str| {
        assert!(matches!(refused, Err(Refusal::TooLarge { .. })), "{what}: {refused:?}");
    };
    assert!(with_answer(&full("b1", 8), 10).is_ok());
    too_large(with_answer(&full("p1", 8), 10), "it does not decode");
    let on_ssd = full("b1", 8).held_in_memory(&[(0, 10, 10), (1, 2, 1)]);
    too_large(with_answer(&on_ssd, 10), "a part of it is on its own SSD");
    let world = full("b1", 8);
    let model = world.view.models().last().expect("a model").0;
    let fetched = world.place(|request| {
        request.model = model;
        request.steering.prefix = Some(Way::Fetch);
    });
    too_large(fetched, "it is to be fetched");
}

#[test]
fn who_failed_a_moment_ago_does_not_route_for_want_of_room() {
    let mut world = full("b1", 8).reports("b0", |report| {
        (report.slots_total, report.slots_available) = (100, 0);
        report.load.running = 1;
    });
    assert!(with_answer(&world, 10).expect("routed").route.is_some());
    world.view.mark_failed(&kvasir_proto::InstanceId::from("b1"), 1_000);
    let refused = with_answer(&world, 10).expect_err("nobody else");
    assert!(matches!(refused, Refusal::Overloaded { .. }), "{refused}");
}

#[test]
fn engines_with_other_numbers_of_ranks_serve_one_model_each_with_its_own_price() {
    let half = ROUTED.map(|rows| RoutedRows { heads: rows.heads / 2, ..rows });
    let mut world = crowd().reports("b2", |report| report.model.routed = half);
    world = world.reports("b3", |report| report.model.routed = None);
    let model = world.view.models().last().expect("a model").0;
    assert!(world.view.instances().iter().all(|instance| instance.model() == model));
    // Of one query row and one partial a byte each, over ten steps.
    let bytes = |name: &str| {
        let asked = placed_at(&world, name).attended;
        asked.map(|asked| asked.decision.price(Way::Route).moved_bytes)
    };
    assert_eq!((bytes("b1"), bytes("b2"), bytes("b3")), (Some(80), Some(40), None));
}
