//! Decisions that are written down and taken again.

use crate::support::World;
use kvasir_placement::attend::{Constants, Way};
use kvasir_placement::{
    Admission, BookingId, Inputs, NodeIndex, Objectives, PlaceRequest, Policy, PrefixMatch,
    RecordedDecision, RecordedError, RoutedRows, Routing, Selection, Steering, place,
};
use kvasir_proto::InstanceId;
use proptest::prelude::*;
use serde_json::Value;

/// What happens to a cluster before a decision.
#[derive(Debug, Clone, Copy)]
enum Step {
    Report {
        which: u8,
        waiting_tokens: u64,
        running: u32,
        slots: u32,
        draining: bool,
    },
    Book {
        prompt_tokens: u32,
    },
    Prefilled {
        which: u8,
        took_us: u64,
    },
    Fetched {
        which: u8,
        took_us: u64,
    },
    Grew {
        which: u8,
        tokens: u32,
    },
    Stepped {
        which: u8,
        took_us: u64,
    },
    Ended {
        which: u8,
        tokens: Option<u32>,
    },
    Failed {
        which: u8,
    },
    Routed {
        which: u8,
        took_us: u64,
    },
    /// Answers come and go, from which the time between tokens is learned.
    Taught {
        took_us: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let took_us = 1u64..1_000_000;
    prop_oneof![
        2 => (any::<u8>(), 0u64..50_000, 0u32..14, 0u32..200, prop::bool::weighted(0.1)).prop_map(
            |(which, waiting_tokens, running, slots, draining)| Step::Report {
                which, waiting_tokens, running, slots, draining,
            }
        ),
        6 => (1u32..5_000).prop_map(|prompt_tokens| Step::Book { prompt_tokens }),
        3 => (any::<u8>(), took_us.clone())
            .prop_map(|(which, took_us)| Step::Prefilled { which, took_us }),
        2 => (any::<u8>(), took_us.clone())
            .prop_map(|(which, took_us)| Step::Fetched { which, took_us }),
        2 => (any::<u8>(), 1u32..500).prop_map(|(which, tokens)| Step::Grew { which, tokens }),
        2 => (any::<u8>(), took_us.clone())
            .prop_map(|(which, took_us)| Step::Stepped { which, took_us }),
        2 => (any::<u8>(), prop::option::of(1u32..500))
            .prop_map(|(which, tokens)| Step::Ended { which, tokens }),
        1 => any::<u8>().prop_map(|which| Step::Failed { which }),
        1 => (any::<u8>(), took_us).prop_map(|(which, took_us)| Step::Routed { which, took_us }),
        1 => (500u64..5_000).prop_map(|took_us| Step::Taught { took_us }),
    ]
}

fn policy() -> impl Strategy<Value = Policy> {
    let selection = prop_oneof![
        3 => Just(Selection::LeastCost),
        1 => prop::sample::select(&Selection::ALL[..]),
    ];
    let admission = prop_oneof![
        3 => Just(Admission::Calibrated),
        1 => prop::sample::select(&Admission::ALL[..]),
    ];
    (selection, any::<bool>(), 0.0..4.0, prop::option::of(any::<bool>()), admission).prop_map(
        |(selection, always_fetch, shortest_prefill_first_factor, always, admission)| Policy {
            admission,
            selection,
            always_fetch,
            shortest_prefill_first_factor,
            routing: always.map(|always| Routing { constants: constants(), always }),
            ..Policy::default()
        },
    )
}

fn constants() -> Constants {
    let fabric = include_str!("../../../configs/fabrics/one-host-shm.toml");
    let kernel = include_str!("../../../configs/kernels/xeon-avx512.toml");
    let kernel = toml::from_str(kernel).expect("a kernel");
    Constants { fabric: toml::from_str(fabric).expect("a fabric"), holder: kernel, local: kernel }
}

const ROWS: RoutedRows =
    RoutedRows { heads: 16, query_bytes: 1_152, partial_bytes: 1_032, layers: 27 };

/// A cluster with a past, now.
fn world(names: &[&str], policy: Policy, steps: &[Step]) -> (World, u64) {
    shared(names, 1, policy, steps)
}

fn shared(names: &[&str], per_node: usize, policy: Policy, steps: &[Step]) -> (World, u64) {
    let mut world = World::shared(names, per_node, policy);
    for name in names {
        world = world.reports(name, |report| report.model.routed = Some(ROWS));
    }
    world.model = world.view.instances()[0].model();
    let mut booked: Vec<BookingId> = Vec::new();
    let of = |which: u8, booked: &[BookingId]| {
        (!booked.is_empty()).then(|| booked[usize::from(which) % booked.len()])
    };
    let mut now_us = 0;
    for (at, step) in steps.iter().enumerate() {
        now_us += 7_919;
        let view = &mut world.view;
        match *step {
            Step::Report { which, waiting_tokens, running, slots, draining } => {
                let which = usize::from(which) % names.len();
                let mut report = view.instances()[which].report().clone();
                report.load.waiting_prompt_tokens = waiting_tokens;
                report.load.running = running;
                report.slots_available = slots;
                report.draining = draining;
                report.ssd_reads.bytes_total += waiting_tokens << 10;
                report.ssd_reads.us_total += u64::from(slots) << 6;
                view.report(report, now_us);
            }
            Step::Book { prompt_tokens } => {
                let seed = at as u64;
                let placed = world.place(|request| {
                    request.prompt_tokens = prompt_tokens;
                    request.now_us = now_us;
                    request.tie_seed = seed;
                });
                if let Ok(placement) = placed {
                    booked.push(BookingId(seed));
                    world.view.book(BookingId(seed), &placement, now_us);
                }
            }
            Step::Prefilled { which, took_us } => {
                if let Some(id) = of(which, &booked) {
                    view.prefilled(id, Some((500, took_us)), now_us);
                }
            }
            Step::Fetched { which, took_us } => {
                if let Some(id) = of(which, &booked) {
                    view.fetched(id, Some((1 << 20, took_us)));
                }
            }
            Step::Grew { which, tokens } => {
                if let Some(id) = of(which, &booked) {
                    view.grew(id, tokens);
                }
            }
            Step::Stepped { which, took_us } => {
                if let Some(id) = of(which, &booked) {
                    view.stepped(id, took_us, now_us);
                }
            }
            Step::Ended { which, tokens } => {
                if let Some(id) = of(which, &booked) {
                    booked.retain(|other| *other != id);
                    view.unbook(id, tokens, now_us);
                }
            }
            Step::Failed { which } => {
                let which = names[usize::from(which) % names.len()];
                view.mark_failed(&InstanceId::from(which), now_us + 1_000);
            }
            Step::Routed { which, took_us } => {
                if let Some(id) = of(which, &booked) {
                    view.routed(id, 27, took_us);
                }
            }
            Step::Taught { took_us } => {
                for number in 0..60 {
                    let id = BookingId(1_000_000 + number);
                    let placed = world.place(|request| {
                        request.now_us = now_us;
                        request.tie_seed = number;
                    });
                    let Ok(placement) = placed else { continue };
                    world.view.book(id, &placement, now_us);
                    world.view.prefilled(id, None, now_us);
                    world.view.paced(id, took_us + 10 * number, now_us + 500_000);
                    world.view.unbook(id, Some(100), now_us);
                }
            }
        }
    }
    (world, now_us + 1_000)
}

fn record(world: &World, request: &PlaceRequest<'_>) -> RecordedDecision {
    let inputs = Inputs::capture(&world.view, &world.matched, request).expect("a known model");
    let decided = place(&world.view, &world.matched, request);
    RecordedDecision::new(&inputs, decided.as_ref())
}

/// As it is written into a file and read from it.
fn written(recorded: &RecordedDecision) -> Value {
    let text = serde_json::to_string(recorded).expect("JSON");
    serde_json::from_str(&text).expect("JSON")
}

fn request(world: &World, now_us: u64) -> PlaceRequest<'static> {
    PlaceRequest {
        model: world.model,
        prompt_tokens: 1_000,
        max_tokens: 100,
        objectives: Objectives::NONE,
        exclude: &[],
        tie_seed: u64::MAX - 1,
        now_us,
        may_route: true,
        is_endless: false,
        steering: Steering::default(),
        chunks: &[],
    }
}

const SPLIT: [&str; 6] = ["p0", "p1", "p2", "d0", "d1", "d2"];
const BOTH: [&str; 3] = ["b0", "b1", "b2"];

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn a_decision_that_was_written_down_is_taken_again_as_it_was(
        policy in policy(),
        both: bool,
        per_node in 1usize..4,
        steps in prop::collection::vec(step(), 0..60),
        held in prop::collection::vec((0u32..20, 0u32..20), 6),
        prompt_tokens in 1u32..5_000,
        ttft_us in prop_oneof![Just(u64::MAX), 0u64..500_000],
        tbt_us in prop_oneof![Just(u64::MAX), 1_000u64..4_000],
        tie_seed: u64,
        excluded in prop::option::weighted(0.2, 0usize..3),
        named in prop::option::weighted(0.3, 0usize..3),
        prefix in prop::option::weighted(
            0.5,
            prop::sample::select(vec![Way::Route, Way::Fetch, Way::Recompute]),
        ),
        is_endless: bool,
    ) {
        let names: &[&str] = if both { &BOTH } else { &SPLIT };
        let named = named.map(|at| InstanceId::from(names[at]));
        let (mut world, now_us) = shared(names, per_node, policy, &steps);
        let held = (0..).map(NodeIndex).zip(held);
        let held: Vec<_> = held.map(|(node, (all, part))| (node, all, part.min(all))).collect();
        world.matched = PrefixMatch::from_memory_and_all(&held);
        let exclude: Vec<InstanceId> =
            excluded.iter().map(|at| InstanceId::from(names[*at])).collect();
        let recorded = record(&world, &PlaceRequest {
            is_endless,
            steering: Steering { instance: named.as_ref(), prefix },
            prompt_tokens,
            objectives: Objectives { ttft_us, tbt_us },
            exclude: &exclude,
            tie_seed,
            ..request(&world, now_us)
        });
        let read = RecordedDecision::read(written(&recorded)).expect("it can be read");
        prop_assert_eq!(&read, &recorded);
        prop_assert_eq!(read.replay(), vec![]);
        prop_assert!(read.fields() > 5);
    }
}

#[test]
fn what_was_changed_is_found() {
    let (world, now_us) = world(&SPLIT, Policy::default(), &[Step::Book { prompt_tokens: 900 }; 5]);
    let world = world.held(&[(1, 9)]);
    let whole = written(&record(&world, &request(&world, now_us)));
    let differences = |path: &str, value: Value| {
        let mut changed = whole.clone();
        *changed.pointer_mut(path).expect("it is there") = value;
        assert_ne!(changed, whole, "{path}");
        let read = RecordedDecision::read(changed).expect("it can be read");
        read.replay().into_iter().map(|difference| difference.field).collect::<Vec<_>>()
    };
    let found = |path: &str, value: Value, field: &str| {
        let fields = differences(path, value);
        assert!(fields.iter().any(|found| found == field), "{path}: {fields:?} lacks {field}");
    };
    found("/inputs/request/prompt_tokens", 3_000.into(), "prompt_blocks");
    found("/inputs/instances/3/prefill/token_us", "10.5".into(), "prefill_candidates.0.compute_us");
    found("/inputs/hosts/4/cached_blocks", 3.into(), "prefill_candidates.1.cached_blocks");
    found("/inputs/instances/0/draining", true.into(), "decode_candidates.0.verdict");
    found("/inputs/hosts/0/slots_available", 0.into(), "decode_candidates.0.verdict");
    found("/inputs/request/ttft_objective_us", 1.into(), "prefill_candidates.0.verdict");
    let instances = whole["inputs"]["instances"].as_array().expect("a list");
    let chosen = whole["decision"]["prefill_instance"].as_str().expect("every digit of it");
    let is_chosen = |one: &Value| one["reference"].as_u64() == chosen.parse().ok();
    let chosen = instances.iter().position(is_chosen).expect("it is one of them");
    found(&format!("/inputs/instances/{chosen}/reference"), 77.into(), "prefill_instance");
    assert_eq!(differences("/decision/predicted_ttft_us", "7".into()), ["predicted_ttft_us"]);
}

#[test]
fn what_is_no_recorded_decision_is_refused_and_says_why() {
    let (world, now_us) = world(&SPLIT, Policy::default(), &[Step::Book { prompt_tokens: 900 }; 5]);
    let whole = written(&record(&world, &request(&world, now_us)));
    let check = |path: &str, value: Value, want: &str| {
        let mut changed = whole.clone();
        *changed.pointer_mut(path).expect("it is there") = value;
        let error: RecordedError = RecordedDecision::read(changed).expect_err("refused");
        assert!(error.to_string().contains(want), "{error} lacks {want}");
    };
    check("/format_version", 1.into(), "format 1; this version reads format 12");
    check("/format_version", "x".into(), "format \"x\"");
    check("/inputs/request", Value::Null, "not a recorded decision");
    check("/inputs/hosts/0/in_free_us", u64::MAX.into(), "`in_free_us` is out of range");
    check("/inputs/instances/0/host", 6.into(), "`host` is out of range");
    check("/inputs/instances/0/prefill/token_us", "NaN".into(), "`prefill` is out of range");
    check("/inputs/instances/0/prefill/token_us", "a".into(), "\"a\" is not a number");
    check(
        "/inputs/instances/0/running_requests_max",
        u32::MAX.into(),
        "`running_requests_max` is out of range",
    );
    check(
        "/inputs/policy/shortest_prefill_first_factor",
        "-1".into(),
        "`shortest_prefill_first_factor` is out of range",
    );
    assert!(RecordedDecision::read(Value::Null).is_err());
}

#[test]
fn nothing_of_the_prompt_is_written() {
    let (world, now_us) = world(&SPLIT, Policy::default(), &[]);
    let request = request(&world, now_us);
    let text = written(&record(&world, &request)).to_string();
    assert!(!text.contains("fingerprint"), "it is in {text}");
}
