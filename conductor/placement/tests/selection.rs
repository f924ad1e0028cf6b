//! The policies beside one another: what each of them looks at. Prices are those of `support`.

use crate::support::World;
use kvasir_placement::{
    IndexLimits, InstanceReport, Placement, Policy, PrefixMatch, Selection, ShadowIndex, SsdReads,
    Tier,
};
use kvasir_proto::BlockKey;

fn policy(selection: Selection) -> Policy {
    Policy { selection, kvcache_balancing_threshold: 2.0, ..Policy::default() }
}

/// p0 holds most and has 3 s of queue; p1 holds some and has a little; p2 is idle and has nothing.
fn world(policy: Policy) -> World {
    World::with_policy(&["p0", "p1", "p2", "d0"], policy)
        .held(&[(0, 14), (1, 6)])
        .reports("p0", |report| report.load.waiting_prompt_tokens = 256_000)
        .reports("p1", |report| report.load.waiting_prompt_tokens = 512)
}

fn prefill(placement: &Placement) -> String {
    placement.prefill().instance_id.to_string()
}

#[test]
fn each_policy_looks_at_what_it_is_named_for() {
    let check = |selection: Selection, want: &str, fetches: bool, ttft_us: u64| {
        let placement = world(policy(selection)).place(|_| {}).expect("a placement");
        assert_eq!(prefill(&placement), want, "{selection}\n{placement}");
        assert_eq!(placement.fetch.is_some(), fetches, "{selection}");
        assert_eq!(placement.predicted_ttft_us, ttft_us, "{selection}\n{placement}");
    };
    check(Selection::LeastLoaded, "p2", false, 11_000);
    check(Selection::LongestPrefix, "p0", false, 3_062_040);
    // p1: 6,120 us of queue, and 616 tokens to compute.
    check(Selection::CacheAware, "p2", false, 11_000);
    // Fourteen blocks in 1,500 us, then 104 tokens.
    check(Selection::KvcacheCentric, "p2", true, 1_500 + 2_040);
    check(Selection::LeastCost, "p2", true, 1_500 + 2_040);
}

#[test]
fn local_takes_a_short_queue_for_a_long_prefix() {
    let world = World::with_policy(&["p0", "p1", "d0"], policy(Selection::CacheAware))
        .held(&[(0, 14)])
        .reports("p0", |report| report.load.waiting_prompt_tokens = 512);
    let placement = world.place(|_| {}).expect("a placement");
    assert_eq!((prefill(&placement).as_str(), placement.predicted_ttft_us), ("p0", 8_160));
}

#[test]
fn algorithm_1_adds_queue_and_transfer_and_ours_overlaps_them() {
    let ttft_us = |selection| {
        let world = World::with_policy(&["p0", "p1", "d0"], policy(selection))
            .held(&[(0, 14)])
            .reports("p0", |report| report.load.waiting_prompt_tokens = 5_120)
            .reports("p1", |report| report.load.waiting_prompt_tokens = 512);
        let placement = world.place(|_| {}).expect("a placement");
        assert_eq!(prefill(&placement), "p1");
        (placement.predicted_ttft_us, placement.to_string())
    };
    let (global_us, explained) = ttft_us(Selection::KvcacheCentric);
    assert_eq!(global_us, 6_120 + 1_500 + 2_040);
    assert!(
        explained.contains("queue 6120 + transfer 1500 + compute 2040 = 9660 us"),
        "{explained}"
    );
    assert_eq!(ttft_us(Selection::LeastCost).0, 6_120 + 2_040);
}

#[test]
fn ours_fetches_below_the_threshold_where_that_is_cheaper() {
    let fetches = |selection| {
        let world = World::with_policy(&["p0", "p1", "d0"], policy(selection))
            .held(&[(0, 14), (1, 10)])
            .reports("p0", |report| report.load.waiting_prompt_tokens = 5_120);
        world.place(|_| {}).expect("a placement").fetch.is_some()
    };
    assert!(!fetches(Selection::KvcacheCentric));
    assert!(fetches(Selection::LeastCost));
}

#[test]
fn random_takes_every_instance_alike_and_follows_its_seed() {
    let mut counts = [0; 3];
    for seed in 0..600 {
        let world = world(policy(Selection::Random));
        let first = world.place(|request| request.tie_seed = seed).expect("a placement");
        let again = world.place(|request| request.tie_seed = seed).expect("a placement");
        assert_eq!(first, again);
        counts[usize::from(first.prefill().node.0)] += 1;
    }
    assert!(counts.iter().all(|count| (150..250).contains(count)), "{counts:?}");
}

#[test]
fn ties_go_by_number_in_the_baselines_and_are_spread_in_ours() {
    for selection in Selection::ALL {
        let world = World::with_policy(&["p0", "p1", "p2", "d0"], policy(selection));
        let taken: std::collections::BTreeSet<String> = (0..50)
            .map(|seed| prefill(&world.place(|r| r.tie_seed = seed).expect("a placement")))
            .collect();
        let spreads = matches!(selection, Selection::Random | Selection::LeastCost);
        assert_eq!(taken.len(), if spreads { 3 } else { 1 }, "{selection}: {taken:?}");
        assert!(taken.contains("p0"));
    }
}

#[test]
fn short_prefills_pass_long_ones_that_came_a_little_earlier() {
    let policy = |shortest_prefill_first_factor| Policy {
        shortest_prefill_first_factor,
        ..policy(Selection::LeastCost)
    };
    let price = |shortest_prefill_first_factor: f64, now_us: u64| {
        let mut world = World::with_policy(&["p0", "d0"], policy(shortest_prefill_first_factor));
        // 11 ms run, and 11 ms wait.
        world.book(0);
        world.book(0);
        let placement = world.place(|request| {
            request.prompt_tokens = 64;
            request.now_us = now_us;
        });
        let placement = placement.expect("a placement");
        let [candidate] = &placement.considered.prefill_candidates[..] else { panic!("one") };
        (candidate.queue_us, candidate.ttft_us, candidate.cost_us - candidate.ttft_us)
    };
    assert_eq!(price(0.0, 0), (22_000, 23_640, 0), "first come, first served");
    assert_eq!(price(2.0, 0), (0, 1_640, 2 * 1_640), "it passes both, and they wait for it");
    // Ranks: 1,000 us of the first are left, so that it is due at 22,000 less twice what is done;
    // the second is due at 22,000, and this one at 10,000 and twice 1,640 us.
    assert_eq!(price(2.0, 10_000), (1_000, 2_640, 1_640));
    assert_eq!(price(2.0, 20_000).0, 11_000, "it comes too late");
}

#[test]
fn a_prefill_that_is_passed_is_counted_by_what_is_left_of_it() {
    let policy = Policy { shortest_prefill_first_factor: 2.0, ..policy(Selection::LeastCost) };
    let mut world = World::with_policy(&["p0", "d0"], policy);
    world.book(0);
    let short = world.place(|request| {
        request.prompt_tokens = 64;
        request.now_us = 1_000;
    });
    let id = kvasir_placement::BookingId(100);
    world.view.book(id, &short.expect("a placement"), 1_000);
    let queue_us = |world: &World, now_us: u64| {
        let placement = world.place(|request| {
            request.prompt_tokens = 5_000;
            request.now_us = now_us;
        });
        placement.expect("a placement").queue_us
    };
    assert_eq!(queue_us(&world, 1_000), 10_000 + 1_640);
    world.view.prefilled(id, None, 2_640);
    assert_eq!(queue_us(&world, 2_640), 10_000);
    assert_eq!(queue_us(&world, 3_640), 9_000);
}

#[test]
fn what_lies_on_ssd_is_read_only_where_that_is_cheaper() {
    let keys: Vec<BlockKey> = (1..=15u8).map(|n| BlockKey([n; 16])).collect();
    let matched = |in_memory: usize| -> PrefixMatch {
        let mut index = ShadowIndex::new(IndexLimits::default());
        let node = index.add_node().expect("room");
        index.insert(node, Tier::Dram, &keys[..in_memory]);
        index.insert(node, Tier::Ssd, &keys[in_memory..]);
        index.match_prefix(&keys)
    };
    // A block is computed in 640 us and read in 500.
    let mut world = World::new(&["p0", "d0"]);
    world.matched = matched(5);
    let placement = world.place(|_| {}).expect("a placement");
    assert_eq!((placement.reused_tokens, placement.transfer_us), (960, 5_000));
    // From elsewhere in 100 us and 100 us a block, unless it must be read there.
    let mut busy = World::new(&["p0", "p1", "d0"])
        .reports("p0", |report| report.load.waiting_prompt_tokens = 256_000);
    busy.matched = matched(15);
    assert_eq!(busy.place(|_| {}).expect("a placement").transfer_us, 1_600);
    busy.matched = matched(5);
    assert_eq!(busy.place(|_| {}).expect("a placement").transfer_us, 5_000);
}

#[test]
fn an_ssd_is_priced_as_its_node_has_measured_it() {
    let read = |bytes: u64, us: u64| {
        move |report: &mut InstanceReport| {
            report.ssd_reads.bytes_total += bytes;
            report.ssd_reads.us_total += us;
        }
    };
    let transfer_us = |world: &mut World, held: [(usize, usize); 2]| {
        world.matched = on_two(held);
        world.place(|_| {}).expect("a placement").transfer_us
    };
    const ON_FIRST: [(usize, usize); 2] = [(0, 10), (0, 0)];
    // 200 bytes/us by the profile, and 1,000 as measured.
    let mut world = World::new(&["p0", "p1", "d0"]);
    assert_eq!(transfer_us(&mut world, ON_FIRST), 5_000);
    for _ in 0..30 {
        world = world.reports("p0", read(10_000_000, 10_000));
    }
    let measured_us = transfer_us(&mut world, ON_FIRST);
    assert!((990..1_050).contains(&measured_us), "{measured_us}");
    assert_eq!(transfer_us(&mut world, [(0, 0), (0, 10)]), 5_000, "the other one's is its own");
    // What is said again was counted.
    world = world.reports("p0", read(0, 0));
    assert_eq!(transfer_us(&mut world, ON_FIRST), measured_us);
    // A node that was started anew begins at nothing, and has become slower.
    let anew = SsdReads { bytes_total: 4_000_000, us_total: 8_000 };
    world = world.reports("p0", |report| report.ssd_reads = anew);
    let slower_us = transfer_us(&mut world, ON_FIRST);
    assert!((measured_us + 50..2_000).contains(&slower_us), "{slower_us}");
    // Where another node has it and sends it that one's counts.
    for name in ["p0", "d0"] {
        world = world.reports(name, |report| report.load.waiting_prompt_tokens = 256_000);
    }
    let fetched_us = transfer_us(&mut world, [(0, 15), (0, 0)]);
    assert!((slower_us..slower_us * 2).contains(&fetched_us), "{fetched_us}");
}

/// What two nodes hold of 15 blocks: so many in memory, and so many in all.
fn on_two(of: [(usize, usize); 2]) -> PrefixMatch {
    let keys: Vec<BlockKey> = (1..=15u8).map(|n| BlockKey([n; 16])).collect();
    let mut index = ShadowIndex::new(IndexLimits::default());
    for (in_memory, in_all) in of {
        let node = index.add_node().expect("room");
        index.insert(node, Tier::Dram, &keys[..in_memory]);
        index.insert(node, Tier::Ssd, &keys[in_memory..in_all]);
    }
    index.match_prefix(&keys)
}

#[test]
fn of_equal_prefixes_the_one_in_memory_is_fetched_even_where_the_ssd_has_it_too() {
    let mut world = World::new(&["p0", "p1", "d0"])
        .reports("p0", |report| report.load.waiting_prompt_tokens = 256_000);
    // 15 blocks are read in 7,500 us and sent in 1,600.
    world.matched = on_two([(15, 15), (0, 15)]);
    let placement = world.place(|_| {}).expect("a placement");
    let fetch = placement.fetch.as_ref().expect("a fetch");
    assert_eq!((&*fetch.source.node_id.0, fetch.from_block, fetch.until_block), ("n0", 0, 15));
    assert_eq!((placement.transfer_us, placement.leaves_ssd), (1_600, true));
    // Where nobody has it in memory it is read where it is used.
    world.matched = on_two([(0, 15), (0, 15)]);
    let placement = world.place(|_| {}).expect("a placement");
    assert_eq!((placement.fetch.is_none(), placement.transfer_us), (true, 7_500));
    assert!(!placement.leaves_ssd);
}

#[test]
fn a_shorter_prefix_in_memory_is_fetched_where_the_longest_one_is_slow_to_read() {
    let mut world = World::new(&["p0", "p1", "p2", "d0"]);
    for busy in ["p0", "p1"] {
        world = world.reports(busy, |report| report.load.waiting_prompt_tokens = 256_000);
    }
    // Node 0 has one block more than node 1, all on its SSD.
    world.matched = on_two([(0, 15), (14, 14)]);
    let fetch = world.place(|_| {}).expect("a placement").fetch.expect("a fetch");
    assert_eq!((&*fetch.source.node_id.0, fetch.until_block), ("n1", 14));
}

#[test]
fn a_source_reads_also_what_the_target_has() {
    let mut world = World::new(&["p0", "p1", "d0"])
        .reports("p0", |report| report.load.waiting_prompt_tokens = 256_000);
    // Ten blocks are here; the source has them on its SSD, and those that follow: 15 to read, 5 to send.
    world.matched = on_two([(0, 15), (10, 10)]);
    let placement = world.place(|_| {}).expect("a placement");
    // 5 blocks are computed in 3,200 us.
    assert!(placement.fetch.is_none(), "{placement}");
    assert_eq!(placement.reused_tokens, 640);
}

#[test]
fn what_lies_on_ssd_takes_slots_as_what_is_computed_does() {
    // The prompt has 16 blocks.
    let place = |slots: u32, in_memory: usize, on: &str| {
        let mut world = World::new(&["p0", "d0"]).reports(on, |report| {
            report.slots_available = slots;
            // It is not idle, so that its report decides.
            report.load.running = 1;
        });
        world.matched = match on {
            "p0" => on_two([(in_memory, 15), (0, 0)]),
            _ => on_two([(0, 0), (in_memory, 15)]),
        };
        world.place(|_| {}).is_ok()
    };
    assert!(place(1, 15, "p0") && !place(1, 14, "p0") && place(2, 14, "p0"));
    // What the decode side has on its SSD is sent to it.
    assert!(!place(8, 0, "d0") && place(100, 0, "d0"));
}

#[test]
fn a_policy_is_known_by_its_name() {
    for selection in Selection::ALL {
        assert_eq!(selection.name().parse(), Ok(selection));
    }
    assert!("kvasirr".parse::<Selection>().is_err());
}
