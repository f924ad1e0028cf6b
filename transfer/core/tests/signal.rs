//! Put-with-signal: plans are right, the NIC model delivers them in order under every reordering that
//! the domain allows, and their costs relate as expected. Taking out a rule is noticed.

use std::collections::BTreeSet;
use std::num::{NonZeroU32, NonZeroUsize};

use kvasir_transfer_core::signal::check::early_signals;
use kvasir_transfer_core::signal::nic::{NicModel, Run};
use kvasir_transfer_core::signal::{
    Fallback, Group, Mode, Options, OrderedBy, Ordering, Peer, Plan, Planned, QueuePair, Request,
    SignalWord, Step, TRANSFERS_MAX, TooMany, Transfer, Work, plan, plan_puts_only,
};
use proptest::prelude::*;

const PEERS: u32 = 8;
const TRANSFERS: u32 = 96;
const PER_PEER: u32 = TRANSFERS / PEERS;
const SEEDS: u64 = 64;

const PER_DESTINATION: Mode = Mode::Decoupled { group: Group::PerDestination };
const ALL: Mode = Mode::Decoupled { group: Group::All };

fn size(transfers: usize) -> Mode {
    Mode::Decoupled { group: Group::Size(NonZeroUsize::new(transfers).expect("not zero")) }
}

fn modes() -> [Mode; 5] {
    [Mode::Coupled, size(5), size(12), PER_DESTINATION, ALL]
}

fn options(mode: Mode, ordered_by: OrderedBy, ordering: Ordering) -> Options {
    let queue_pairs = NonZeroU32::new(PEERS).expect("not zero");
    Options { mode, ordered_by, ordering, queue_pairs }
}

fn transfers(bytes: u64) -> Vec<Transfer> {
    (0..TRANSFERS).map(|at| transfer(at / PER_PEER, bytes, at)).collect()
}

fn in_turn(bytes: u64) -> Vec<Transfer> {
    (0..TRANSFERS).map(|at| transfer(at % PEERS, bytes, at)).collect()
}

fn transfer(peer: u32, bytes: u64, at: u32) -> Transfer {
    Transfer { peer: Peer(peer), bytes, signal: SignalWord(u64::from(at)) }
}

#[track_caller]
fn signals(transfers: &[Transfer], options: Options) -> Plan {
    match plan(transfers, options).expect("few transfers") {
        Planned::Signals(plan) => plan,
        Planned::Counters { reason, .. } => panic!("counted: {reason}"),
    }
}

/// Throughput as a share of that of the puts alone.
fn relative(model: &NicModel, bytes: u64, mode: Mode, ordered_by: OrderedBy) -> f64 {
    let transfers = transfers(bytes);
    let options = options(mode, ordered_by, Ordering::FencePerPeer);
    let puts = plan_puts_only(&transfers, options.queue_pairs).expect("few transfers");
    let with_signals = signals(&transfers, options);
    model.run(&puts).finished_ps() as f64 / model.run(&with_signals).finished_ps() as f64
}

fn shaken(ordering: Ordering, seed: u64) -> NicModel {
    NicModel { ordering, jitter_ns: 30_000, seed, ..NicModel::default() }
}

fn early_under_some_seed(plan: &Plan, ordering: Ordering) -> bool {
    (0..SEEDS).any(|seed| !early_signals(&shaken(ordering, seed).run(plan)).is_empty())
}

fn change(plan: &Plan, mut to: impl FnMut(usize, &mut Request)) -> Plan {
    let mut plan = plan.clone();
    let requests = plan.steps.iter_mut().filter_map(|step| match step {
        Step::Post(request) => Some(request),
        Step::Wait => None,
    });
    requests.enumerate().for_each(|(at, request)| to(at, request));
    plan
}

/// The rules of a plan, read off its steps.
fn check_plan(transfers: &[Transfer], options: Options) {
    let plan = signals(transfers, options);
    let mut put: BTreeSet<usize> = BTreeSet::new();
    let mut signalled: BTreeSet<usize> = BTreeSet::new();
    // Puts whose signal needs a wait or a fence still.
    let mut loose: BTreeSet<usize> = BTreeSet::new();
    let mut awaited: BTreeSet<usize> = BTreeSet::new();
    for step in &plan.steps {
        let Step::Post(request) = step else {
            assert_eq!(options.ordered_by, OrderedBy::Host, "the NIC's order waits for nothing");
            loose.retain(|at| !awaited.contains(at));
            continue;
        };
        let at = request.transfer;
        assert_eq!(request.peer, transfers[at].peer);
        assert_eq!(request.queue_pair, QueuePair(request.peer.0 % options.queue_pairs), "pinned");
        match request.work {
            Work::Put { bytes, counted } => {
                assert_eq!((bytes, counted, request.fenced), (transfers[at].bytes, false, false));
                assert!(put.insert(at), "{at} is put twice");
                loose.insert(at);
                if request.awaited {
                    awaited.extend(spoken_for(&loose, request, transfers, options));
                }
            }
            Work::Signal(word) => {
                assert_eq!((word, request.awaited), (transfers[at].signal, false));
                assert!(put.contains(&at), "{at} is signalled before its put");
                assert!(signalled.insert(at), "{at} is signalled twice");
                if request.fenced {
                    assert_eq!(options.ordered_by, OrderedBy::Nic);
                    loose.retain(|other| transfers[*other].peer != request.peer);
                }
                assert!(!loose.contains(&at), "nothing keeps the signal of {at} behind its put");
            }
        }
    }
    assert_eq!((put.len(), signalled.len()), (transfers.len(), transfers.len()));
}

/// Which puts an acknowledgement is about.
fn spoken_for(
    loose: &BTreeSet<usize>,
    request: &Request,
    transfers: &[Transfer],
    options: Options,
) -> Vec<usize> {
    if options.ordering != Ordering::RcQueuePair {
        return vec![request.transfer];
    }
    let queue_pair = |at: &usize| QueuePair(transfers[*at].peer.0 % options.queue_pairs);
    loose.iter().copied().filter(|at| queue_pair(at) == request.queue_pair).collect()
}

#[test]
fn every_signal_follows_its_put_on_its_queue_pair_behind_a_wait_or_a_fence() {
    for ordering in [Ordering::RcQueuePair, Ordering::FencePerPeer] {
        for ordered_by in [OrderedBy::Host, OrderedBy::Nic] {
            for mode in modes() {
                for queue_pairs in [1, 3, 8, 16] {
                    let mut options = options(mode, ordered_by, ordering);
                    options.queue_pairs = NonZeroU32::new(queue_pairs).expect("not zero");
                    check_plan(&transfers(4096), options);
                    check_plan(&in_turn(4096), options);
                }
            }
        }
    }
}

#[test]
fn a_group_has_one_wait_of_the_host_or_one_fence_for_each_of_its_peers() {
    let check = |transfers: &[Transfer], mode, waits, fences| {
        let host = signals(transfers, options(mode, OrderedBy::Host, Ordering::FencePerPeer));
        let nic = signals(transfers, options(mode, OrderedBy::Nic, Ordering::FencePerPeer));
        assert_eq!((host.waits(), host.fences()), (waits, 0), "{mode:?}");
        assert_eq!((nic.waits(), nic.fences()), (0, fences), "{mode:?}");
    };
    check(&transfers(4096), Mode::Coupled, 96, 96);
    check(&transfers(4096), size(4), 24, 24);
    check(&transfers(4096), size(12), 8, 8);
    check(&transfers(4096), PER_DESTINATION, 8, 8);
    check(&transfers(4096), ALL, 1, 8);
    check(&in_turn(4096), size(12), 8, 64);
    check(&in_turn(4096), PER_DESTINATION, 8, 8);
    check(&[], PER_DESTINATION, 0, 0);
}

#[test]
fn one_group_per_destination_of_a_small_case_reads_so() {
    let transfers = [transfer(1, 10, 0), transfer(0, 20, 1), transfer(1, 30, 2)];
    let mut options = options(PER_DESTINATION, OrderedBy::Nic, Ordering::RcQueuePair);
    options.queue_pairs = NonZeroU32::new(2).expect("not zero");
    let plan = signals(&transfers, options);
    let words: Vec<String> = plan.requests().map(word).collect();
    assert_eq!(
        words,
        ["q1 put 0", "q1 put 2", "q1 signal 0 F", "q1 signal 2", "q0 put 1", "q0 signal 1 F"]
    );
    assert_eq!(plan.queue(QueuePair(0)).count(), 2);
}

fn word(request: &Request) -> String {
    let kind = match request.work {
        Work::Put { .. } => "put",
        Work::Signal(_) => "signal",
    };
    let fence = if request.fenced { " F" } else { "" };
    format!("q{} {kind} {}{fence}", request.queue_pair.0, request.transfer)
}

#[test]
fn groups_of_one_are_coupled() {
    for ordered_by in [OrderedBy::Host, OrderedBy::Nic] {
        let of = |mode| signals(&transfers(1), options(mode, ordered_by, Ordering::FencePerPeer));
        assert_eq!(of(size(1)), of(Mode::Coupled));
    }
}

#[test]
fn where_a_domain_cannot_order_puts_are_counted_and_the_caller_is_told() {
    let check = |ordering, ordered_by, told: Option<Fallback>| {
        let planned = plan(&transfers(4096), options(PER_DESTINATION, ordered_by, ordering));
        let planned = planned.expect("few transfers");
        let reason = match &planned {
            Planned::Signals(_) => None,
            Planned::Counters { reason, .. } => Some(*reason),
        };
        assert_eq!(reason, told, "{ordering:?} {ordered_by:?}");
        let counted = |request: &&Request| matches!(request.work, Work::Put { counted: true, .. });
        let signal = |request: &&Request| matches!(request.work, Work::Signal(_));
        let expected = if told.is_some() { (96, 0) } else { (0, 96) };
        let requests = || planned.plan().requests();
        assert_eq!(
            (requests().filter(counted).count(), requests().filter(signal).count()),
            expected
        );
    };
    check(Ordering::RcQueuePair, OrderedBy::Nic, None);
    check(Ordering::RcQueuePair, OrderedBy::Host, None);
    check(Ordering::FencePerPeer, OrderedBy::Nic, None);
    check(Ordering::FencePerPeer, OrderedBy::Host, None);
    check(Ordering::WhenPlaced, OrderedBy::Nic, Some(Fallback::NoFence));
    check(Ordering::WhenPlaced, OrderedBy::Host, None);
    check(Ordering::None, OrderedBy::Nic, Some(Fallback::NotPlaced));
    check(Ordering::None, OrderedBy::Host, Some(Fallback::NotPlaced));
}

#[test]
fn a_plan_of_too_many_transfers_is_refused() {
    let many = vec![transfer(0, 1, 0); TRANSFERS_MAX + 1];
    let options = options(ALL, OrderedBy::Nic, Ordering::RcQueuePair);
    assert_eq!(plan(&many, options), Err(TooMany { transfers: TRANSFERS_MAX + 1 }));
    assert!(plan_puts_only(&many, options.queue_pairs).is_err());
    assert!(plan(&many[1..], options).is_ok());
}

#[test]
fn no_signal_lands_before_its_put_under_any_reordering_that_the_domain_allows() {
    let cases = [
        (Ordering::RcQueuePair, OrderedBy::Nic),
        (Ordering::RcQueuePair, OrderedBy::Host),
        (Ordering::FencePerPeer, OrderedBy::Nic),
        (Ordering::FencePerPeer, OrderedBy::Host),
        (Ordering::WhenPlaced, OrderedBy::Host),
    ];
    for (ordering, ordered_by) in cases {
        for mode in modes() {
            for queue_pairs in [2, 8] {
                let mut options = options(mode, ordered_by, ordering);
                options.queue_pairs = NonZeroU32::new(queue_pairs).expect("not zero");
                let plan = signals(&in_turn(4096), options);
                assert!(!early_under_some_seed(&plan, ordering), "{options:?}");
            }
        }
    }
}

#[test]
fn without_the_pinning_signals_overtake_their_puts() {
    for ordering in [Ordering::RcQueuePair, Ordering::FencePerPeer] {
        for mode in modes() {
            let plan = signals(&transfers(4096), options(mode, OrderedBy::Nic, ordering));
            let spread = change(&plan, |at, request| {
                // In turn, over 7: no group is a multiple of it.
                request.queue_pair = QueuePair(at as u32 % 7);
            });
            assert!(early_under_some_seed(&spread, ordering), "{ordering:?} {mode:?}");
        }
    }
}

#[test]
fn without_the_fence_signals_overtake_their_puts() {
    for mode in modes() {
        let options = options(mode, OrderedBy::Nic, Ordering::FencePerPeer);
        let plan = signals(&transfers(4096), options);
        let bare = change(&plan, |_, request| request.fenced = false);
        assert!(early_under_some_seed(&bare, Ordering::FencePerPeer), "{mode:?}");
    }
}

#[test]
fn a_fence_for_one_peer_does_not_do_for_another_on_the_same_queue_pair() {
    let mut options = options(ALL, OrderedBy::Nic, Ordering::FencePerPeer);
    options.queue_pairs = NonZeroU32::new(1).expect("not zero");
    let plan = signals(&transfers(4096), options);
    assert!(!early_under_some_seed(&plan, Ordering::FencePerPeer));
    let first_only = change(&plan, |_, request| request.fenced &= request.peer == Peer(0));
    assert!(early_under_some_seed(&first_only, Ordering::FencePerPeer));
}

#[test]
fn without_the_wait_signals_overtake_their_puts() {
    for mode in modes() {
        let options = options(mode, OrderedBy::Host, Ordering::WhenPlaced);
        let mut plan = signals(&transfers(4096), options);
        plan.steps.retain(|step| *step != Step::Wait);
        assert!(early_under_some_seed(&plan, Ordering::WhenPlaced), "{mode:?}");
    }
}

#[test]
fn without_completions_of_the_puts_a_wait_keeps_nothing_back() {
    let options = options(PER_DESTINATION, OrderedBy::Host, Ordering::WhenPlaced);
    let plan = signals(&transfers(4096), options);
    let unasked = change(&plan, |_, request| request.awaited &= request.transfer % 12 == 11);
    assert!(early_under_some_seed(&unasked, Ordering::WhenPlaced));
}

#[test]
fn waiting_does_not_do_where_an_acknowledgement_says_nothing_of_the_data() {
    let options = options(PER_DESTINATION, OrderedBy::Host, Ordering::WhenPlaced);
    let plan = signals(&transfers(4096), options);
    assert!(early_under_some_seed(&plan, Ordering::None));
}

#[test]
fn a_signal_whose_put_was_never_sent_is_early() {
    let mut plan = signals(&transfers(1), options(ALL, OrderedBy::Nic, Ordering::RcQueuePair));
    plan.steps.remove(0);
    let early = early_signals(&NicModel::default().run(&plan));
    assert_eq!(early.iter().map(|early| early.transfer).collect::<Vec<_>>(), [0]);
    assert_eq!(early[0].put_landed_ps, None);
}

#[test]
fn one_model_and_one_plan_give_one_run() {
    for mode in modes() {
        let options = options(mode, OrderedBy::Nic, Ordering::FencePerPeer);
        let run = |seed| -> Run {
            shaken(Ordering::FencePerPeer, seed).run(&signals(&in_turn(4096), options))
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8), "the seed matters");
    }
}

#[test]
fn a_single_put_costs_what_the_constants_say() {
    let model = NicModel::default();
    let one = [transfer(0, 25_000, 0)];
    let options = options(Mode::Coupled, OrderedBy::Host, Ordering::FencePerPeer);
    let puts = plan_puts_only(&one, options.queue_pairs).expect("one");
    // 70 and 80 to post, 1,000 on the wire, 5,000 there and back.
    assert_eq!(model.run(&puts).finished_ps(), 6_150_000);
    // Then 860 to notice, 150 to post the signal, 5 in the NIC, 5,000 there and back.
    assert_eq!(model.run(&signals(&one, options)).finished_ps(), 12_165_000);
    // With the NIC's order the signal is posted with the put, and starts at its acknowledgement.
    let nic = Options { ordered_by: OrderedBy::Nic, ..options };
    let run = model.run(&signals(&one, nic));
    assert_eq!(run.sent[1].started_ps, run.sent[0].acknowledged_ps);
    // Where the fence waits for reads only, it waits for nothing here.
    let rc = NicModel { ordering: Ordering::RcQueuePair, ..model };
    let run = rc.run(&signals(&one, nic));
    assert_eq!(run.sent[1].started_ps, run.sent[0].started_ps + 1_000_000);
}

#[test]
fn coupled_signals_of_4_kib_leave_a_few_percent() {
    let share = relative(&NicModel::default(), 4096, Mode::Coupled, OrderedBy::Host);
    assert!((0.01..0.06).contains(&share), "{share}");
}

#[test]
fn decoupled_signals_that_the_nic_orders_recover_about_three_quarters_at_4_kib() {
    let share = relative(&NicModel::default(), 4096, PER_DESTINATION, OrderedBy::Nic);
    assert!((0.65..0.85).contains(&share), "{share}");
}

#[test]
fn decoupled_signals_that_the_nic_orders_recover_about_all_from_64_kib() {
    for bytes in [64 << 10, 256 << 10, 1 << 20] {
        let share = relative(&NicModel::default(), bytes, PER_DESTINATION, OrderedBy::Nic);
        assert!((0.95..=1.0).contains(&share), "{bytes}: {share}");
    }
}

#[test]
fn the_knee_of_the_group_size_is_at_one_group_per_destination() {
    let model = NicModel::default();
    let share = |mode| relative(&model, 4096, mode, OrderedBy::Nic);
    let knee = share(size(PER_PEER as usize));
    assert!((share(PER_DESTINATION) - knee).abs() < 1e-9);
    for (smaller, larger) in [(1, 2), (2, 3), (3, 4), (4, 6), (6, 12)] {
        let (before, after) = (share(size(smaller)), share(size(larger)));
        assert!(after > 1.08 * before, "{smaller}: {before}, {larger}: {after}");
    }
    for larger in [24, 48, 96] {
        let after = share(size(larger));
        assert!(after < 1.07 * knee, "{larger}: {after}, one destination: {knee}");
    }
}

#[test]
fn no_group_size_tells_consumers_sooner_than_one_group_per_destination() {
    let told = |mode| {
        let options = options(mode, OrderedBy::Nic, Ordering::FencePerPeer);
        let run = NicModel::default().run(&signals(&transfers(4096), options));
        run.mean_signal_ps().expect("has signals") as f64
    };
    let best = told(PER_DESTINATION);
    for other in [1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 96] {
        assert!(best < told(size(other)), "{other}");
    }
    assert!(1.08 * best < told(ALL));
    assert!(1.5 * best < told(Mode::Coupled));
}

#[test]
fn whatever_the_constants_decoupling_helps_and_the_order_of_the_nic_helps_more() {
    for round_trip_ns in [2_000, 5_000, 10_000, 20_000] {
        for (post_ns, doorbell_ns, nic_request_ns) in [(35, 40, 2), (70, 80, 5), (140, 160, 10)] {
            for wire_gbps in [100, 200, 400] {
                let model = NicModel {
                    round_trip_ns,
                    post_ns,
                    doorbell_ns,
                    nic_request_ns,
                    wire_gbps,
                    ..NicModel::default()
                };
                let coupled = relative(&model, 4096, Mode::Coupled, OrderedBy::Host);
                let host = relative(&model, 4096, PER_DESTINATION, OrderedBy::Host);
                let nic = relative(&model, 4096, PER_DESTINATION, OrderedBy::Nic);
                assert!(coupled < 0.15, "{model:?}: {coupled}");
                assert!(host > 3.0 * coupled, "{model:?}: {coupled} {host}");
                assert!(nic > 1.2 * host, "{model:?}: {host} {nic}");
            }
        }
    }
}

fn any_options() -> impl Strategy<Value = Options> {
    let group = prop_oneof![
        Just(Mode::Coupled),
        (1usize..20).prop_map(size),
        Just(PER_DESTINATION),
        Just(ALL),
    ];
    let order = prop_oneof![
        Just((OrderedBy::Nic, Ordering::RcQueuePair)),
        Just((OrderedBy::Host, Ordering::RcQueuePair)),
        Just((OrderedBy::Nic, Ordering::FencePerPeer)),
        Just((OrderedBy::Host, Ordering::WhenPlaced)),
    ];
    (group, order, 1u32..10).prop_map(|(mode, (ordered_by, ordering), queue_pairs)| Options {
        mode,
        ordered_by,
        ordering,
        queue_pairs: NonZeroU32::new(queue_pairs).expect("from 1"),
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_of_any_transfers_are_right_and_in_order(
        sizes in prop::collection::vec((0u32..12, 0u64..100_000), 0..60),
        options in any_options(),
        seed: u64,
    ) {
        let transfers: Vec<Transfer> = (0u32..).zip(sizes).map(|(at, (peer, bytes))| transfer(peer, bytes, at)).collect();
        check_plan(&transfers, options);
        let plan = signals(&transfers, options);
        let run = shaken(options.ordering, seed).run(&plan);
        prop_assert_eq!(run.sent.len(), 2 * transfers.len());
        prop_assert_eq!(early_signals(&run), vec![]);
    }
}
