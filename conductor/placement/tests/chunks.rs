//! Chunks of a prompt that were computed at another offset: whence they come, what that costs, and who may serve
//! a request with them.

use crate::support::World;
use kvasir_placement::attend::{
    Congestion, Constants, FabricProfile, GatherProfile, KernelProfile, MergeProfile,
    SelectedProfile, SpliceProfile, Way,
};
use kvasir_placement::{
    AskedChunk, Inputs, Missing, NodeIndex, Placement, Policy, PrefixMatch, RecordedDecision,
    Refusal, RoutedRows, Routing, Steering,
};

fn constants(step_us: f64) -> Constants {
    let selected = SelectedProfile { base_factor: 1.0, token_factor: 0.0 };
    let kernel = KernelProfile {
        launch_us: step_us,
        token_us: 0.0,
        flat_rows: 1 << 20,
        row_token_us: 0.0,
        selected,
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

/// `b0` and `b1`; a routed layer takes so long, and there is one layer.
fn world(step_us: f64) -> World {
    let routing = Some(Routing { constants: constants(step_us), always: false });
    let policy = Policy { routing, ..Policy::default() };
    let routed = Some(RoutedRows { heads: 4, query_bytes: 1, partial_bytes: 1, layers: 1 });
    World::with_policy(&["b0", "b1"], policy)
        .reports("b0", |report| report.model.routed = routed)
        .reports("b1", |report| report.model.routed = routed)
}

/// Five blocks from position 100 on, of which these nodes hold so many.
fn chunk(first_position: u32, held: &[(u16, u32)]) -> AskedChunk {
    let held: Vec<_> = held.iter().map(|(node, blocks)| (NodeIndex(*node), *blocks)).collect();
    AskedChunk { first_position, blocks: 5, matched: PrefixMatch::from_pairs(&held) }
}

fn place(
    world: &World,
    chunks: &[AskedChunk],
    (instance, prefix): (&str, Option<Way>),
) -> Result<Placement, Refusal> {
    let model = world.view.models().last().expect("a model").0;
    let named = instance.into();
    world.place(|request| {
        request.model = model;
        request.max_tokens = 10;
        request.chunks = chunks;
        request.steering = Steering { instance: Some(&named), prefix };
    })
}

fn ways(placement: &Placement) -> Vec<&'static str> {
    placement.chunks.iter().map(|chunk| chunk.way()).collect()
}

#[test]
fn a_chunk_comes_the_cheapest_way_and_its_copy_costs_the_splice_too() {
    let chunks = [chunk(100, &[(0, 5)])];
    for (step_us, want) in [(1.0, "route"), (100_000.0, "fetch")] {
        let placed = place(&world(step_us), &chunks, ("b1", None)).expect("placed");
        assert_eq!(ways(&placed), [want], "{placed}");
        let decision = placed.chunks[0].decision.expect("prices");
        let fetch = decision.price(Way::Fetch);
        assert!(fetch.once_us >= 1_000.0, "{fetch}");
        assert_eq!((placed.reused_tokens, placed.compute_tokens), (320, 680));
        assert!(placed.to_string().contains(&format!("chunk of 5 blocks at 100: {want}, ")));
        assert_eq!(placed.explain().chunks[0].action, want);
    }
    for (way, want) in [(Way::Route, "route"), (Way::Fetch, "fetch"), (Way::Recompute, "recompute")]
    {
        let placed = place(&world(1.0), &chunks, ("b1", Some(way))).expect("placed");
        assert_eq!(ways(&placed), [want], "asked for");
    }
}

#[test]
fn who_has_a_chunk_is_preferred_and_nothing_is_asked() {
    let chunks = [chunk(100, &[(1, 5)])];
    let world = world(1.0);
    let model = world.view.models().last().expect("a model").0;
    let placed = world.place(|request| (request.model, request.chunks) = (model, &chunks));
    let placed = placed.expect("placed");
    assert_eq!((&*placed.prefill().instance_id.0, ways(&placed)), ("b1", vec!["local"]));
    assert_eq!(placed.chunks[0].decision, None);
}

#[test]
fn a_part_of_a_chunk_is_nothing_and_so_many_stay_elsewhere_at_most() {
    let placed = place(&world(1.0), &[chunk(100, &[(0, 4)])], ("b1", None)).expect("placed");
    assert_eq!((ways(&placed), placed.reused_tokens), (vec!["recompute"], 0));
    let many: Vec<AskedChunk> =
        (0..6).map(|at| AskedChunk { blocks: 1, ..chunk(100 + at * 64, &[(0, 5)]) }).collect();
    let placed = place(&world(1.0), &many, ("b1", Some(Way::Route))).expect("placed");
    let routed = ways(&placed).into_iter().filter(|way| *way == "route").count();
    assert_eq!(routed, kvasir_placement::ROUTED_MAX);
    let unrouted = world(1.0);
    let model = unrouted.view.models().last().expect("a model").0;
    let one = [chunk(100, &[(0, 5)])];
    let b1 = "b1".into();
    let placed = unrouted.place(|request| {
        (request.model, request.chunks, request.may_route) = (model, &one, false);
        request.steering = Steering { instance: Some(&b1), prefix: Some(Way::Route) };
    });
    assert_ne!(ways(&placed.expect("placed")), ["route"]);
}

#[test]
fn only_who_prefills_and_decodes_serves_a_request_with_chunks() {
    let chunks = [chunk(100, &[])];
    let world = World::new(&["p0", "d0"]);
    let refused = world.place(|request| request.chunks = &chunks).expect_err("nobody does both");
    let Refusal::NoInstance { missing, .. } = refused else { panic!("{refused}") };
    assert_eq!(missing, Missing::Whole);
    assert!(world.place(|_| ()).is_ok());
}

#[test]
fn attending_chunks_counts_for_who_does_it_until_the_request_is_over() {
    let mut world = world(1.0);
    let chunks = [chunk(100, &[(0, 5)]), chunk(420, &[(0, 5)])];
    let placed = place(&world, &chunks, ("b1", Some(Way::Route))).expect("placed");
    let id = kvasir_placement::BookingId(77);
    world.view.book(id, &placed, 0);
    // With one more the holder is as full as it may be.
    let flows = |world: &World| {
        let inputs = inputs(world, &chunks);
        serde_json::to_value(inputs).expect("JSON")["hosts"][0]["routes_out"].clone()
    };
    assert_eq!(flows(&world)[0][1], 2);
    world.view.unbook(id, None, 1);
    assert_eq!(flows(&world), serde_json::json!([]));
}

fn inputs(world: &World, chunks: &[AskedChunk]) -> Inputs {
    let model = world.view.models().last().expect("a model").0;
    let mut inputs = None;
    // What is captured is what the request says.
    let _ = world.place(|request| {
        (request.model, request.chunks, request.max_tokens) = (model, chunks, 10);
        inputs = Inputs::capture(&world.view, &PrefixMatch::default(), request);
    });
    inputs.expect("the model is known")
}

#[test]
fn a_recorded_decision_with_chunks_is_taken_again_as_it_was() {
    let world = world(1.0);
    let chunks = [chunk(100, &[(0, 5), (1, 2)]), chunk(420, &[])];
    let inputs = inputs(&world, &chunks);
    let model = world.view.models().last().expect("a model").0;
    let placed = world.place(|request| {
        (request.model, request.chunks, request.max_tokens) = (model, &chunks, 10);
    });
    let placed = placed.expect("placed");
    let recorded = RecordedDecision::new(&inputs, Ok(&placed));
    let text = serde_json::to_string(&recorded).expect("JSON");
    let again = RecordedDecision::read(serde_json::from_str(&text).expect("JSON")).expect("read");
    assert_eq!(again, recorded);
    assert_eq!(again.replay(), []);
    assert_eq!(again.explain(), placed.to_string());
}
