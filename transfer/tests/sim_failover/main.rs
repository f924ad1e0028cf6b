//! Failover under seeds: engines with several paths each, whose paths fail, fall silent, come back and are
//! closed late, while writes, messages, expectations, cancellations, drains, cut-offs and revocations go
//! on. `workload` does things, `books` knows what must hold, and neither looks inside the engines.
//!
//! One seed: `KVASIR_SIM_SEED=7 KVASIR_SIM_SEEDS=1 cargo test -p kvasir-transfer --test sim_failover`.

mod books;
mod random;
mod signals;
mod workload;

use std::sync::atomic::{AtomicU64, Ordering};

use workload::{Summary, run};

const SEEDS: u64 = 300;

fn setting(name: &str, otherwise: u64) -> u64 {
    #[allow(
        clippy::disallowed_methods,
        reason = "a test, and how many seeds it runs, is set by hand"
    )]
    let text = std::env::var(name).ok();
    text.map_or(otherwise, |text| text.parse().expect("a number"))
}

#[test]
fn whatever_fails_counts_are_true_and_nothing_lands_where_it_may_not() {
    let first = setting("KVASIR_SIM_SEED", 0);
    let seeds = setting("KVASIR_SIM_SEEDS", SEEDS);
    let next = AtomicU64::new(first);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let summaries: Vec<Summary> = std::thread::scope(|scope| {
        let worker = || {
            let mut sum = Summary::default();
            loop {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                if seed >= first + seeds {
                    return sum;
                }
                sum.add(&run(seed));
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("its seed is printed above"))
            .collect()
    });
    let mut sum = Summary::default();
    for summary in &summaries {
        sum.add(summary);
    }
    #[allow(clippy::print_stdout, reason = "what a run of many seeds met, for whoever started it")]
    {
        println!("{seeds} seeds: {sum:?}");
    }
    // A suite in which nothing fails proves nothing.
    if seeds >= SEEDS {
        assert!(sum.paths_asked > 5 * seeds && sum.imms_landed > seeds, "{sum:?}");
        assert!(sum.reached > 5 * seeds && sum.confirmed > 2 * seeds, "{sum:?}");
        assert!(sum.reused_imms > seeds && sum.delivered > seeds, "{sum:?}");
    }
}

#[test]
fn whatever_fails_no_signal_is_seen_before_its_data() {
    let first = setting("KVASIR_SIM_SEED", 0);
    let seeds = setting("KVASIR_SIM_SEEDS", SEEDS);
    let mut sum = signals::Summary::default();
    for seed in first..first + seeds {
        sum.add(&signals::run(seed));
    }
    #[allow(clippy::print_stdout, reason = "what a run of many seeds met, for whoever started it")]
    {
        println!("{seeds} seeds: {sum:?}");
    }
    if seeds >= SEEDS {
        assert!(sum.signalled > 15 * seeds && sum.counted > seeds, "{sum:?}");
        assert!(sum.unplaced > seeds, "{sum:?}");
        // A fifth of the runs have lanes that refuse regions, if they have more than one.
        assert!(sum.untaken > seeds / 4 && sum.left_order > seeds, "{sum:?}");
        assert!(
            sum.paths_asked > seeds && sum.failed > seeds && sum.drained > seeds / 4,
            "{sum:?}"
        );
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let traces: Vec<u64> = (0..5).map(|seed| run(seed).trace).collect();
    let again: Vec<u64> = (0..5).map(|seed| run(seed).trace).collect();
    assert_eq!(traces, again);
    assert!(traces.windows(2).all(|pair| pair[0] != pair[1]), "{traces:?}");
}
