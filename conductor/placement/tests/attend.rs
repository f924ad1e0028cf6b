//! Route, fetch, gather or recompute: the figures of *Move the Query, Not the Cache* (arXiv 2606.01502)
//! come out of the profiles, and decisions turn where the formula says.

use std::path::Path;

use kvasir_placement::attend::{
    Closed, Constants, Decision, Demand, FabricProfile, Holder, KernelProfile, LayerDemand,
    MergeProfile, RouteModel, RowBytes, Span, Way, decide,
};
use proptest::prelude::*;

const FABRICS: [&str; 5] =
    ["h100-ibgda", "h100-nvlink4", "a100-nvlink3", "rtx-pro-6000-pcie5", "a40-pcie4"];

/// DeepSeek-V2-Lite in bf16.
const BYTES: RowBytes = RowBytes { query: 1_152, partial: 1_032, kv_layer: 1_152, layers: 27 };

fn config(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn fabric(name: &str) -> FabricProfile {
    toml::from_str(&config(&format!("fabrics/{name}.toml"))).expect("a profile")
}

fn h100() -> Constants {
    let kernel: KernelProfile =
        toml::from_str(&config("kernels/h100-flashmla.toml")).expect("a profile");
    Constants { fabric: fabric("h100-ibgda"), holder: kernel, local: kernel }
}

fn holder(tokens: u64) -> Holder {
    Holder { tokens, selected: 0, flows: 0, rows: 0, has_kernel: true }
}

/// One request of 16 heads, with time and room for everything.
fn demand(steps: u64) -> Demand {
    Demand {
        rows: 16,
        steps,
        overlap_us: 0.0,
        step_us: 0.0,
        step_max_us: 1e9,
        free_bytes: 1 << 40,
        recompute_us: 1e9,
    }
}

fn decide_dense(constants: &Constants, holders: &[Holder], demand: &Demand) -> Decision {
    let span = Span { holders, is_moved: false, is_selected: false };
    decide(constants, BYTES, &span, demand)
}

fn check_within(what: &str, got: f64, published: f64, tolerance: f64) {
    let off = (got / published - 1.0).abs();
    assert!(off <= tolerance, "{what}: {got:.1}, published {published}, {:.1} % off", off * 100.0);
}

// ---- the paper's figures ----

/// Payload of a row, round trip at 1,024 rows.
const TABLE_1: [(u64, f64); 4] = [(900, 62.8), (2_184, 115.8), (4_368, 207.7), (8_736, 389.1)];

#[test]
fn a_round_trip_takes_what_table_1_says() {
    let fabric = fabric("h100-ibgda");
    for (row_bytes, published_us) in TABLE_1 {
        let what = format!("1,024 rows of {row_bytes} bytes");
        check_within(&what, fabric.transport_us(1_024 * row_bytes, 0), published_us, 0.02);
    }
    check_within("4,096 rows", fabric.transport_us(4_096 * 2_184, 0), 388.0, 0.02);
    // The formula as published has no turnaround, and misses the same row by nine percent.
    let published = FabricProfile { turnaround_us: 0.0, ..fabric };
    let without_us = published.transport_us(1_024 * 2_184, 0);
    assert!((without_us - 105.5).abs() < 0.1, "{without_us}");
}

#[test]
fn what_a_profile_was_not_made_from_is_predicted_from_it() {
    // The constants of another fabric altogether, and two of the four rows.
    let profile = only_the_way(fabric("a40-pcie4"));
    let mut model = RouteModel::new(&profile);
    for _ in 0..50 {
        for (row_bytes, measured_us) in [TABLE_1[0], TABLE_1[3]] {
            model.observe_layer(carries(1_024 * row_bytes), 0, measured_us);
        }
    }
    for (row_bytes, published_us) in TABLE_1 {
        let known = model.constants(&profile);
        let predicted_us = known.fabric.transport_us(1_024 * row_bytes, 0);
        check_within(&format!("{row_bytes} bytes"), predicted_us, published_us, 0.02);
    }
}

/// Layers that take nothing but their way.
fn only_the_way(fabric: FabricProfile) -> Constants {
    let merge = MergeProfile { base_us: 0.0, part_us: 0.0 };
    let kernel = h100().holder;
    let kernel = KernelProfile { launch_us: 0.0, token_us: 0.0, row_token_us: 0.0, ..kernel };
    Constants { fabric: FabricProfile { merge, ..fabric }, holder: kernel, local: kernel }
}

fn carries(bytes: u64) -> LayerDemand {
    LayerDemand { bytes: bytes as f64, tokens: 0.0, rows: 0.0 }
}

#[test]
fn what_was_measured_beside_other_flows_is_not_priced_as_if_it_had_been_alone() {
    let profile = only_the_way(fabric("h100-ibgda"));
    let truth = FabricProfile { probe_us: 30.0, turnaround_us: 20.0, ..profile.fabric };
    let mut model = RouteModel::new(&profile);
    for round in 0..200u64 {
        let (bytes, flows) = (1_000_000 * (1 + round % 3), 3 + (round % 2) as u32);
        model.observe_layer(carries(bytes), flows, truth.transport_us(bytes, flows));
    }
    let known = model.constants(&profile).fabric;
    for flows in [0, 2, 3, 6] {
        let what = format!("{flows} flows");
        let us = truth.transport_us(2_000_000, flows);
        check_within(&what, known.transport_us(2_000_000, flows), us, 0.01);
        check_within(&what, model.layer_us(carries(2_000_000), flows), us, 0.01);
    }
}

#[test]
fn a_small_dispatch_takes_31_to_48_us_on_all_five_fabrics() {
    for name in FABRICS {
        let us = fabric(name).transport_us(256 * 2_184, 0);
        assert!((31.0..=48.0).contains(&us), "{name}: {us}");
    }
}

#[test]
fn flows_are_flat_to_two_and_the_third_doubles() {
    let fabric = fabric("h100-ibgda");
    for (rows, alone_us, third_us) in [(256, 45.6, 95.0), (1_024, 114.0, 250.0)] {
        let us = |flows| fabric.transport_us(rows * 2_184, flows);
        assert!(us(0) == us(1) && us(1) == us(2));
        check_within("alone", us(0), alone_us, 0.05);
        check_within("with three", us(3), third_us, 0.10);
        assert!(us(4) > us(3));
    }
}

#[test]
fn routing_moves_fewer_bytes_below_the_break_even() {
    assert_eq!(BYTES.break_even_rows(2_048), 1_080);
    assert_eq!(BYTES.break_even_rows(512), 270);
    let routed = BYTES.dispatch(256) as f64;
    let fetched = (2_048 * u64::from(BYTES.kv_layer)) as f64;
    check_within("fewer bytes at 256 rows", 1.0 - routed / fetched, 0.76, 0.01);
}

#[test]
fn splices_and_pulls_take_what_was_measured() {
    let fabric = fabric("h100-ibgda");
    for (tokens, published_us) in
        [(55, 2_770.0), (1_024, 2_780.0), (2_048, 2_910.0), (4_096, 3_060.0)]
    {
        check_within(&format!("{tokens} tokens"), fabric.splice.us(tokens), published_us, 0.025);
    }
    check_within("a pull of 2,048 tokens", fabric.pull_us(2_048 * BYTES.kv(), 0), 2_500.0, 0.03);
}

#[test]
fn fetching_undercuts_recomputing_from_75_to_220_tokens() {
    let mut constants = h100();
    constants.fabric.bytes_per_us = 70_000.0;
    for (token_layer_us, published) in [(1.5, 75), (0.5, 220)] {
        let turn = (1..1_000).find(|tokens| {
            let recompute_us = *tokens as f64 * f64::from(BYTES.layers) * token_layer_us;
            let demand = Demand { recompute_us, ..demand(1_000_000) };
            let holders = [holder(*tokens)];
            let span = Span { holders: &holders, is_moved: true, is_selected: false };
            decide(&constants, BYTES, &span, &demand).chosen == Some(Way::Fetch)
        });
        check_within("tokens", turn.expect("it turns") as f64, f64::from(published), 0.08);
    }
}

#[test]
fn a_gather_is_a_line_over_its_holders() {
    let gather = fabric("h100-ibgda").gather;
    check_within("one", gather.us(1, 2_048), 1_300.0, 0.01);
    check_within("seven", gather.us(7, 2_048), 3_900.0, 0.01);
    let steps = (1..7).map(|m| gather.us(m + 1, 2_048) - gather.us(m, 2_048));
    steps.for_each(|step| check_within("a step", step, 433.3, 0.01));
}

#[test]
fn a_holder_computes_as_long_as_was_measured() {
    let kernel = h100().holder;
    let us = |requesters: u64| kernel.dense_us(requesters * 128, 2_048);
    assert_eq!(us(1), us(8), "flat to eight");
    for requesters in 1..=16 {
        assert!((15.0 - 0.1..=37.0).contains(&us(requesters)), "{requesters}: {}", us(requesters));
    }
    assert!(us(16) > us(8) && us(256) <= 400.0, "{}", us(256));
    let factor = |k| kernel.selected_us(128, k) / kernel.dense_us(128, k);
    check_within("by index, 512", factor(512), 1.1, 0.02);
    assert!((2.0..=3.0).contains(&factor(2_048)), "{}", factor(2_048));
    assert!((17.0..=60.0).contains(&kernel.selected_us(128, 2_048)));
}

// ---- decisions ----

#[test]
fn few_steps_are_routed_and_many_are_fetched() {
    let constants = h100();
    let holders = [holder(2_048)];
    let at = |steps| decide_dense(&constants, &holders, &demand(steps));
    let one = at(1);
    let (route, fetch) = (one.price(Way::Route), one.price(Way::Fetch));
    assert_eq!(one.chosen, Some(Way::Route));
    // Where n steps of routing cost what the fetch and n steps of attending here do.
    let turn = (fetch.once_us - route.once_us) / (route.step_us - fetch.step_us);
    assert!(turn > 1.0, "{turn}");
    assert_eq!(at(turn.floor() as u64).chosen, Some(Way::Route));
    assert_eq!(at(turn.ceil() as u64).chosen, Some(Way::Fetch));
}

#[test]
fn moving_a_constant_moves_the_turn_as_the_formula_says() {
    let holders = [holder(2_048)];
    let turn = |constants: &Constants, demand: Demand| {
        let fetched = |steps: &u64| {
            let demand = Demand { steps: *steps, ..demand };
            decide_dense(constants, &holders, &demand).chosen == Some(Way::Fetch)
        };
        (1..100_000).find(fetched)
    };
    let constants = h100();
    let base = turn(&constants, demand(0));
    // Dearer dispatches: earlier.
    let mut slow_probe = constants;
    slow_probe.fabric.probe_us *= 4.0;
    assert!(turn(&slow_probe, demand(0)) < base);
    // A dearer fetch: later.
    let mut narrow = constants;
    narrow.fabric.bytes_per_us /= 10.0;
    assert!(turn(&narrow, demand(0)) > base);
    // A slower requester: later.
    let mut slow_here = constants;
    slow_here.local.launch_us *= 2.0;
    assert!(turn(&slow_here, demand(0)) > base);
    // More rows of co-located requests share the fetch: earlier.
    assert!(turn(&constants, Demand { rows: 512, ..demand(0) }) < base);
    // What a dispatch hides behind: as long as it is hidden, there is nothing to gain by a fetch.
    assert_eq!(turn(&constants, Demand { overlap_us: 100.0, ..demand(0) }), None);
}

#[test]
fn without_room_it_is_routed_however_many_steps() {
    let demand = Demand { free_bytes: 2_048 * BYTES.kv() - 1, ..demand(1_000_000) };
    let decision = decide_dense(&h100(), &[holder(2_048)], &demand);
    assert_eq!(decision.chosen, Some(Way::Route));
    assert_eq!(decision.price(Way::Fetch).closed, Some(Closed::NoRoom));
    assert_eq!(decision.price(Way::Recompute).closed, Some(Closed::NoRoom));
}

#[test]
fn a_step_that_would_miss_its_objective_is_not_routed() {
    let constants = h100();
    let free = decide_dense(&constants, &[holder(2_048)], &demand(1));
    let route_us = free.price(Way::Route).step_us;
    let with = |step_max_us| {
        decide_dense(
            &constants,
            &[holder(2_048)],
            &Demand { step_us: 5_000.0, step_max_us, ..demand(1) },
        )
    };
    assert_eq!(with(5_001.0 + route_us).chosen, Some(Way::Route));
    let tight = with(4_999.0 + route_us);
    assert_eq!(tight.price(Way::Route).closed, Some(Closed::TooSlow));
    assert_eq!(tight.chosen, Some(Way::Fetch));
}

#[test]
fn holders_that_are_full_or_have_no_kernel_only_serve_fetches() {
    let full = Holder { flows: 8, ..holder(2_048) };
    let decision = decide_dense(&h100(), &[full], &demand(1));
    assert_eq!(decision.price(Way::Route).closed, Some(Closed::HolderFull));
    assert_eq!(decision.chosen, Some(Way::Fetch));
    assert!(decision.replicate);
    let seven = Holder { flows: 7, ..holder(2_048) };
    assert!(!decide_dense(&h100(), &[seven], &demand(1)).replicate);
    let without = Holder { has_kernel: false, ..holder(2_048) };
    let decision = decide_dense(&h100(), &[holder(64), without], &demand(1));
    assert_eq!(decision.price(Way::Route).closed, Some(Closed::NoKernel));
    assert_eq!(decision.chosen, Some(Way::Fetch));
}

#[test]
fn several_holders_cost_the_slowest_and_one_merge() {
    let constants = h100();
    let alone = decide_dense(&constants, &[holder(2_048)], &demand(1)).route;
    let both = decide_dense(&constants, &[holder(64), holder(2_048)], &demand(1)).route;
    assert_eq!((alone.transport_us, alone.compute_us), (both.transport_us, both.compute_us));
    assert!((both.merge_us - alone.merge_us - constants.fabric.merge.part_us).abs() < 1e-9);
}

#[test]
fn changing_selections_are_routed_and_never_moved() {
    let constants = h100();
    let half = Holder { selected: 1_024, ..holder(1 << 20) };
    let holders = [half, half];
    let at = |is_moved| {
        let span = Span { holders: &holders, is_moved, is_selected: true };
        // The whole span has no room, the selection of one layer does.
        let demand = Demand { rows: 128, free_bytes: 1 << 30, ..demand(100) };
        decide(&constants, BYTES, &span, &demand)
    };
    let decision = at(false);
    assert_eq!(decision.chosen, Some(Way::Route));
    assert_eq!(decision.price(Way::Fetch).closed, Some(Closed::NoRoom));
    assert_eq!(decision.price(Way::Gather).closed, None);
    for way in [Way::Route, Way::Fetch, Way::Gather] {
        assert_eq!(at(true).price(way).closed, Some(Closed::Moved));
    }
    let dense = decide_dense(&constants, &[holder(64)], &demand(1));
    assert_eq!(dense.price(Way::Gather).closed, Some(Closed::NotSelected));
}

#[test]
fn what_nobody_has_is_recomputed_or_nothing_is_open() {
    let recomputed = decide_dense(&h100(), &[], &demand(1));
    assert_eq!(recomputed.chosen, Some(Way::Recompute));
    assert_eq!(recomputed.price(Way::Route).closed, Some(Closed::NoHolder));
    let nothing =
        decide_dense(&h100(), &[], &Demand { step_us: 2.0, step_max_us: 1.0, ..demand(1) });
    assert_eq!(nothing.chosen, None);
}

#[test]
fn a_decision_explains_itself() {
    let text = decide_dense(&h100(), &[holder(2_048)], &demand(100)).to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines,
        [
            "route: setup 0.0 us, per step 1252.7 us, total 125266.2 us, 94348800 bytes; per layer: \
             transport 26.4 us + holder 15.0 us + merge 5.0 us",
            "fetch: setup 2548.0 us, per step 404.9 us, total 43040.3 us, 63700992 bytes",
            "gather: setup 0.0 us, per step 270.0 us, total 27000.0 us, 0 bytes; unavailable: only a \
             selection can be gathered",
            "recompute: setup 1000000000.0 us, per step 404.9 us, total 1000040492.2 us, 0 bytes",
            "fetch",
        ]
    );
}

#[test]
fn a_slower_kernel_is_learned() {
    let profile = h100();
    let slower = 3.0;
    let mut model = RouteModel::new(&profile);
    for round in 0..200u64 {
        let (rows, tokens) = (128 << (round % 6), 512 << (round % 4));
        let demand =
            LayerDemand { bytes: (rows * 2_184) as f64, tokens: tokens as f64, rows: rows as f64 };
        let way_us = profile.fabric.transport_us(rows * 2_184, 0) + profile.fabric.merge.us(2);
        let measured_us = way_us + slower * profile.holder.dense_us(rows, tokens);
        model.observe_layer(demand, 0, measured_us);
    }
    let known = model.constants(&profile);
    let of = |kernel: &KernelProfile| kernel.dense_us(4_096, 512) - kernel.launch_us;
    check_within("another shape", of(&known.holder), slower * of(&profile.holder), 0.05);
    model.observe_layer(carries(1), 0, f64::NAN);
    model.observe_layer(carries(0), 0, f64::INFINITY);
    assert!(model.constants(&profile).holder.dense_us(1, 1).is_finite());
}

#[test]
fn what_opening_takes_is_learned() {
    let mut model = RouteModel::new(&h100());
    check_within("before", model.open_us(), 25.0, 0.01);
    for _ in 0..50 {
        model.observe_opening(900);
    }
    model.observe_opening(0);
    check_within("measured", model.open_us(), 900.0, 0.05);
}

proptest! {
    /// The chosen way is the cheapest of those that keep every constraint, priced by hand.
    #[test]
    fn the_cheapest_open_way_is_taken(
        rows in 1u64..5_000,
        steps in 0u64..10_000,
        tokens in prop::collection::vec(1u64..100_000, 0..5),
        overlap_us in 0f64..200.0,
        step_max_us in 0f64..50_000.0,
        free_tokens in 0u64..200_000,
        recompute_us in 0f64..1e6,
        flows in 0u32..10,
    ) {
        let constants = h100();
        let holders: Vec<Holder> =
            tokens.iter().map(|tokens| Holder { flows, ..holder(*tokens) }).collect();
        let free_bytes = free_tokens * BYTES.kv();
        let demand =
            Demand { rows, steps, overlap_us, step_us: 100.0, step_max_us, free_bytes, recompute_us };
        let decision = decide_dense(&constants, &holders, &demand);

        let all: u64 = tokens.iter().sum();
        let layers = f64::from(BYTES.layers);
        let fabric = constants.fabric;
        let factor = 1.0 + 1.19 * f64::from(flows.saturating_sub(2));
        let longest = tokens.iter().map(|tokens| constants.holder.dense_us(rows, *tokens));
        let longest_us = longest.fold(0.0, f64::max);
        let wire_us = (16.0 + 9.0 + (rows * 2_184) as f64 / 25_000.0) * factor;
        let merge_us = 5.0 + 3.3 * (tokens.len() as f64 - 1.0);
        let route_step = layers * (wire_us + longest_us + merge_us - overlap_us).max(0.0);
        let local_step = layers * constants.local.dense_us(rows, all);
        let fetch_once = (all * BYTES.kv()) as f64 / fabric.bytes_per_us * factor;
        let has_room = all <= free_tokens;
        let in_time = |step_us: f64| 100.0 + step_us <= step_max_us;
        let route_open = !tokens.is_empty() && flows < 8 && in_time(route_step);
        let n = steps as f64;
        let mut open = Vec::new();
        if route_open { open.push((Way::Route, n * route_step)); }
        if !tokens.is_empty() && has_room && in_time(local_step) {
            open.push((Way::Fetch, fetch_once + n * local_step));
        }
        if has_room && in_time(local_step) { open.push((Way::Recompute, recompute_us + n * local_step)); }
        let best = open.iter().map(|(_, us)| *us).fold(f64::INFINITY, f64::min);
        match decision.chosen {
            None => prop_assert!(open.is_empty(), "{open:?}"),
            Some(way) => {
                let of = open.iter().find(|(open, _)| *open == way);
                prop_assert!(of.is_some(), "{way} is not open: {open:?}");
                prop_assert!(of.is_some_and(|(_, us)| *us <= best * (1.0 + 1e-9) + 1e-6), "{way} of {open:?}");
            }
        }
    }

    #[test]
    fn whatever_was_measured_prices_stay_finite(samples in prop::collection::vec((0u64..1 << 40, 0u32..20, any::<f64>()), 0..30)) {
        let profile = h100();
        let mut model = RouteModel::new(&profile);
        for (bytes, flows, us) in samples {
            model.observe_layer(carries(bytes), flows, us);
        }
        let us = model.constants(&profile).fabric.transport_us(1 << 20, 3);
        prop_assert!(us.is_finite() && us >= 0.0, "{us}");
    }
}
