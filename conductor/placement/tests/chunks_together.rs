//! What the chunks of one request cost together, and what is booked of them until they are no longer under way.

use crate::support::World;
use kvasir_placement::attend::{
    Closed, Congestion, Constants, FabricProfile, GatherProfile, KernelProfile, MergeProfile,
    SelectedProfile, SpliceProfile, Way,
};
use kvasir_placement::{
    AskedChunk, BookingId, Inputs, NodeIndex, Objectives, PlaceRequest, Placement, Policy,
    PrefixMatch, RoutedRows, Routing, Steering,
};
use serde_json::Value;

const BOOKED: BookingId = BookingId(77);

/// A routed layer takes so long; nothing else of routing costs anything, but a splice.
fn constants(layer_us: f64) -> Constants {
    let kernel = KernelProfile {
        launch_us: layer_us,
        token_us: 0.0,
        flat_rows: 1 << 20,
        row_token_us: 0.0,
        selected: SelectedProfile { base_factor: 1.0, token_factor: 0.0 },
    };
    let fabric = FabricProfile {
        probe_us: 0.0,
        turnaround_us: 0.0,
        bytes_per_us: 1e12,
        congestion: Congestion { flat_messages: 2, message_factor: 1.0 },
        concurrent_messages_max: 8,
        splice: SpliceProfile { base_us: 1_000.0, token_us: 0.0 },
        gather: GatherProfile { base_us: 0.0, holder_us: 0.0, rows: 1 },
        merge: MergeProfile { base_us: 0.0, part_us: 0.0 },
    };
    Constants { fabric, holder: kernel, local: KernelProfile { launch_us: 0.0, ..kernel } }
}

/// `b0` has what there is, and `b1` serves. One layer.
fn world(layer_us: f64) -> World {
    let routing = Some(Routing { constants: constants(layer_us), always: false });
    let policy = Policy { routing, ..Policy::default() };
    let routed = Some(RoutedRows { heads: 4, query_bytes: 1, partial_bytes: 1, layers: 1 });
    ["b0", "b1", "b2"]
        .into_iter()
        .fold(World::with_policy(&["b0", "b1", "b2"], policy), |world, name| {
            world.reports(name, |report| report.model.routed = routed)
        })
}

/// Five blocks that this node has.
fn chunk(first_position: u32, node: u16) -> AskedChunk {
    let matched = PrefixMatch::from_pairs(&[(NodeIndex(node), 5)]);
    AskedChunk { first_position, blocks: 5, matched }
}

/// On `b1`, an answer of ten tokens to a prompt of 16 blocks.
fn place<'a>(
    world: &World,
    chunks: &'a [AskedChunk],
    prefix: Option<Way>,
    change: impl FnOnce(&mut PlaceRequest<'a>),
) -> Placement {
    let model = world.view.models().last().expect("a model").0;
    let named = kvasir_proto::InstanceId::from("b1");
    let named: &'static kvasir_proto::InstanceId = Box::leak(Box::new(named));
    let placed = world.place(|request| {
        (request.model, request.max_tokens, request.chunks) = (model, 10, chunks);
        request.steering = Steering { instance: Some(named), prefix };
        change(request);
    });
    placed.expect("placed")
}

fn ways(placement: &Placement) -> Vec<&'static str> {
    placement.chunks.iter().map(|chunk| chunk.way()).collect()
}

/// What a decision would read of this instance and its node now: each has one of its own.
fn seen(world: &World, instance: usize) -> Value {
    let model = world.view.models().last().expect("a model").0;
    let mut inputs = None;
    let _ = world.place(|request| {
        request.model = model;
        inputs = Inputs::capture(&world.view, &PrefixMatch::default(), request);
    });
    let inputs = serde_json::to_value(inputs.expect("the model is known")).expect("JSON");
    let of = |list: &str| inputs[list][instance].as_object().expect("it is there").clone();
    of("instances").into_iter().chain(of("hosts")).collect()
}

#[test]
fn what_is_here_and_what_stays_elsewhere_take_no_slots_both_of_them() {
    // Three blocks of the prompt are here, and five others stay there: eight of 16 are taken.
    let mut world = world(1.0).held(&[(1, 3)]);
    let chunks = [chunk(200, 0)];
    let placed = place(&world, &chunks, Some(Way::Route), |_| ());
    assert_eq!((ways(&placed), placed.prefill().memory_blocks), (vec!["route"], 3));
    world.view.book(BOOKED, &placed, 0);
    assert_eq!(seen(&world, 1)["slots_booked"], 8);
    world.view.unbook(BOOKED, None, 1);
    assert_eq!(seen(&world, 1)["slots_booked"], 0);
}

#[test]
fn a_chunk_that_is_not_attended_after_all_frees_its_holder_and_takes_room_here() {
    let mut world = world(1.0);
    let chunks = [chunk(100, 0), chunk(420, 2)];
    let placed = place(&world, &chunks, Some(Way::Route), |_| ());
    assert_eq!(ways(&placed), ["route", "route"]);
    world.view.book(BOOKED, &placed, 0);
    let state = |world: &World| {
        let flows =
            |instance: usize| seen(world, instance)["routes_out"].as_array().expect("a list").len();
        (flows(0), flows(2), seen(world, 1)["slots_booked"].as_u64().expect("a number"))
    };
    assert_eq!(state(&world), (1, 1, 6));
    world.view.unrouted_chunk(BOOKED, 1);
    assert_eq!(state(&world), (1, 0, 11), "the other one stays");
    // Said again, or of one that never was, it changes nothing.
    world.view.unrouted_chunk(BOOKED, 1);
    world.view.unrouted_chunk(BOOKED, 2);
    world.view.unrouted(BOOKED);
    assert_eq!(state(&world), (1, 0, 11));
    // It is computed: that is what is said of the prefill too.
    world.view.revise(BOOKED, 320);
    assert_eq!(seen(&world, 1)["prefills"]["first"]["predicted_us"], 1_000 + 680 * 10);
    world.view.unbook(BOOKED, None, 1);
    assert_eq!(state(&world), (0, 0, 0));
}

#[test]
fn steps_are_prolonged_by_all_chunks_that_stay_elsewhere() {
    // A step takes 1,100 us, and 100 more for each of them.
    let chunks = [chunk(10, 0), chunk(330, 2), chunk(650, 0)];
    for (tbt_us, want) in [
        (1_399, ["route", "route", "fetch"]),
        (1_401, ["route", "route", "route"]),
        (1_250, ["route", "fetch", "fetch"]),
        (1_150, ["fetch", "fetch", "fetch"]),
    ] {
        let placed = place(&world(100.0), &chunks, None, |request| {
            request.objectives = Objectives { tbt_us, ..Objectives::NONE };
        });
        assert_eq!(ways(&placed), want, "{tbt_us}: {placed}");
        assert!(placed.predicted_tbt_us <= tbt_us, "{placed}");
    }
}

#[test]
fn what_misses_the_objective_whichever_way_it_comes_comes_the_cheapest_way() {
    let chunks = [chunk(10, 0)];
    // It is let in as a probe.
    let placed = place(&world(100.0), &chunks, None, |request| {
        request.objectives = Objectives { tbt_us: 1_000, ..Objectives::NONE };
    });
    let decision = placed.chunks[0].decision.expect("prices");
    let closed = |way| decision.price(way).closed;
    assert_eq!([Way::Route, Way::Fetch, Way::Recompute].map(closed), [Some(Closed::TooSlow); 3]);
    assert_eq!((placed.probe, ways(&placed)), (true, vec!["fetch"]));
}

#[test]
fn chunks_have_the_room_that_those_before_them_leave() {
    // Rows of its own and a copy: two take 20 of 22 slots.
    let world = world(1.0).reports("b1", |report| report.slots_available = 22);
    let chunks = [chunk(10, 0), chunk(330, 0), chunk(650, 0)];
    let placed = place(&world, &chunks, Some(Way::Fetch), |_| ());
    assert_eq!(ways(&placed), ["fetch", "fetch", "route"], "{placed}");
    let closed = |at: usize| placed.chunks[at].decision.expect("prices").price(Way::Fetch).closed;
    assert_eq!([0, 1, 2].map(closed), [None, None, Some(Closed::NoRoom)]);
}

#[test]
fn chunks_at_one_holder_share_its_messages() {
    let chunks = [chunk(10, 0), chunk(330, 0), chunk(650, 2)];
    let placed = place(&world(1.0), &chunks, Some(Way::Route), |_| ());
    let bytes = |at: usize| {
        let decision = placed.chunks[at].decision.expect("prices");
        decision.price(Way::Route).moved_bytes
    };
    assert_eq!([bytes(1), bytes(2)], [2 * bytes(0), bytes(0)]);
}

#[test]
fn copies_of_chunks_are_under_way_until_they_have_come() {
    let mut world = world(1.0);
    let chunks = [chunk(10, 0), chunk(330, 0), chunk(650, 2)];
    let placed = place(&world, &chunks, Some(Way::Fetch), |_| ());
    assert_eq!(ways(&placed), ["fetch"; 3]);
    let under_way = |world: &World| {
        let bytes = |instance, way: &str| seen(world, instance)[way].as_u64().expect("a number");
        [bytes(0, "bytes_out"), bytes(2, "bytes_out"), bytes(1, "bytes_in")]
    };
    let fetched_us = |world: &World| {
        let placed = place(world, &chunks, Some(Way::Fetch), |_| ());
        placed.chunks[0].once_us
    };
    let before_us = fetched_us(&world);
    world.view.book(BOOKED, &placed, 0);
    assert_eq!(under_way(&world), [1_000_000, 500_000, 1_500_000]);
    assert_eq!(fetched_us(&world), before_us + 1_500, "others wait for them");
    assert_eq!(world.view.chunk_fetched(BOOKED, 1), 500_000);
    assert_eq!(world.view.chunk_fetched(BOOKED, 1), 0);
    assert_eq!(under_way(&world), [500_000, 500_000, 1_000_000]);
    world.view.fetched(BOOKED, None);
    assert_eq!(under_way(&world), [500_000, 500_000, 1_000_000], "that is the prefix");
    let way = |world: &World| seen(world, 1)["link"].clone();
    let before = way(&world);
    world.view.moved(BOOKED, 500_000, 50_000);
    assert_ne!(way(&world), before, "it is learned what the way carries");
    world.view.prefilled(BOOKED, None, 1);
    assert_eq!(under_way(&world), [0; 3]);
    world.view.unbook(BOOKED, None, 1);
    assert_eq!(under_way(&world), [0; 3]);
}

#[test]
fn a_prefill_waits_for_the_copies_of_its_chunks() {
    let mut world = world(1.0);
    let chunks = [chunk(10, 0)];
    let queue_us =
        |world: &World| place(world, &[], None, |request| request.may_route = false).queue_us;
    let computed = place(&world, &chunks, Some(Way::Recompute), |_| ());
    world.view.book(BOOKED, &computed, 0);
    let alone_us = queue_us(&world);
    world.view.unbook(BOOKED, None, 0);
    let fetched = place(&world, &chunks, Some(Way::Fetch), |_| ());
    world.view.book(BOOKED, &fetched, 0);
    // What comes is not computed; until it has come nothing is.
    let spared_us = computed.compute_us - fetched.compute_us;
    assert_eq!(queue_us(&world), alone_us - spared_us + fetched.chunks[0].once_us);
}

#[test]
fn a_part_that_is_here_already_is_not_sent() {
    let world = world(1.0);
    let matched = PrefixMatch::from_pairs(&[(NodeIndex(0), 5), (NodeIndex(1), 2)]);
    let partly = [AskedChunk { first_position: 10, blocks: 5, matched }];
    let whole = [chunk(10, 0)];
    let once_us = |chunks| place(&world, chunks, Some(Way::Fetch), |_| ()).chunks[0].once_us;
    assert_eq!(once_us(&partly), once_us(&whole) - 200);
}

#[test]
fn layers_of_chunks_that_stay_elsewhere_teach_what_routing_takes() {
    let step_us = |world: &World| {
        let placed = place(world, &[chunk(10, 0)], Some(Way::Route), |_| ());
        placed.chunks[0].decision.expect("prices").price(Way::Route).step_us
    };
    for chunks in [vec![chunk(10, 0)], vec![chunk(10, 0), chunk(330, 0), chunk(650, 2)]] {
        let mut world = world(100.0);
        assert!((step_us(&world) - 100.0).abs() < 1.0, "{}", step_us(&world));
        let placed = place(&world, &chunks, Some(Way::Route), |_| ());
        world.view.book(BOOKED, &placed, 0);
        for _ in 0..50 {
            // Ten times as long as was thought.
            world.view.routed(BOOKED, 100, 100_000);
        }
        world.view.unbook(BOOKED, Some(10), 0);
        assert!(step_us(&world) > 300.0, "{} chunks: {}", chunks.len(), step_us(&world));
    }
    // Of a request of which nothing stays elsewhere nothing is learned.
    let mut world = world(100.0);
    let placed = place(&world, &[chunk(10, 0)], Some(Way::Route), |_| ());
    world.view.book(BOOKED, &placed, 0);
    world.view.unrouted_chunk(BOOKED, 0);
    world.view.routed(BOOKED, 100, 100_000);
    assert!((step_us(&world) - 100.0).abs() < 1.0);
}
