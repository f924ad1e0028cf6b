//! Seeds of the cluster simulation. `KVASIR_SIM_SEED=7 KVASIR_SIM_SEEDS=1` runs the seed 7, as a failure
//! says it; without them a small fixed number is run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kvasir_cluster_sim::run_seed;
use kvasir_cluster_sim::world::Summary;

const SEEDS: u64 = 150;

/// What these seeds must meet, at least once each: every fault, and what seldom comes of them.
const COVERED: [&str; 77] = [
    "a call comes twice",
    "a call is lost",
    "a call is tried again",
    "a chain moves that nobody was promised",
    "a client dies while it reads",
    "a client dies with a half-written object",
    "a client dies",
    "a client is expelled",
    "a clock jumps back",
    "a clock jumps forward",
    "a conductor crashes",
    "a context gets another time",
    "a context is dropped",
    "a context is kept on two nodes",
    "a copy of a context is made",
    "a copy of a context is made that nobody waits for",
    "a copy is not sent whole",
    "a copy is refused",
    "a copy out of a pool ends for nobody",
    "a copy out of a pool fails",
    "a copy that was asked for is made",
    "a disk hangs",
    "a disk is full",
    "a disk is lost",
    "a disk is slow",
    "a disk lies",
    "a disk rots",
    "a drain is given up",
    "a drained node leaves",
    "a draining node takes no work",
    "a fetch is settled with less",
    "a hint is followed",
    "a hint is refused",
    "a host crashes",
    "a hot chain is copied",
    "a kept block is asked for",
    "a kept chain moves",
    "a node is drained",
    "a node is killed",
    "a node is not reachable",
    "a node stands still",
    "a pair is on one node",
    "a node starts without all of its disk",
    "a part of a disk cannot be read",
    "a prompt is computed in a pool",
    "a push was stopped before it began",
    "a put has lost its lease",
    "a put is refused",
    "a receiver is told that a push has failed",
    "a source sends while its SSD reads",
    "a tombstone is left",
    "a tombstone is met",
    "a writer is not there any more",
    "an allocation comes twice",
    "an engine crashes",
    "an engine dies beside another one",
    "an engine stands still",
    "an engine waits for its slots",
    "an ephemeral object goes with its client",
    "an ephemeral object is removed by another client",
    "an object is got",
    "an object is kept",
    "a name stands for other bytes",
    "an object is gone for good",
    "an object is put twice",
    "an object is read from the SSD",
    "an object is read on without a pin",
    "an object that was read on had gone",
    "cutting off fails",
    "memory rots",
    "reads of a disk fail",
    "syncs of a disk fail",
    "the end of a push is unsure",
    "the receiver of a copy is lost",
    "two nodes are parted",
    "what was said to be rotten is dropped",
    "writes of a disk fail",
];

fn setting(name: &str, otherwise: u64) -> u64 {
    #[allow(
        clippy::disallowed_methods,
        reason = "a test, and how many seeds it runs, is set by hand"
    )]
    let text = std::env::var(name).ok();
    text.map_or(otherwise, |text| text.parse().expect("a number"))
}

/// Assertions are caught, many times while a failure is shrunk, and told in its story: those of the
/// workers, which have no names, are not printed as well.
fn be_quiet() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name().is_some() {
            before(info);
        }
    }));
}

#[test]
fn whatever_fails_nothing_happens_that_must_not() {
    be_quiet();
    let first = setting("KVASIR_SIM_SEED", 0);
    let seeds = setting("KVASIR_SIM_SEEDS", SEEDS);
    let shrinks = setting("KVASIR_SIM_SHRINK", 1) > 0;
    let (next, failed) = (AtomicU64::new(first), AtomicBool::new(false));
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
    let worker = || {
        let mut sum = Summary::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= first + seeds || failed.load(Ordering::Relaxed) {
                return Ok(sum);
            }
            match run_seed(seed, shrinks) {
                Ok(summary) => sum.add(&summary),
                Err(story) => {
                    failed.store(true, Ordering::Relaxed);
                    return Err(story);
                }
            }
        }
    };
    let results: Vec<Result<Summary, String>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().map(|worker| worker.join().expect("failures are caught")).collect()
    });
    let mut sum = Summary::default();
    for result in results {
        match result {
            Ok(summary) => sum.add(&summary),
            Err(story) => panic!("{story}"),
        }
    }
    #[allow(clippy::print_stdout, reason = "what a run of many seeds met, for whoever started it")]
    {
        println!("{seeds} seeds: {sum:?}");
    }
    // A simulation in which nothing happens proves nothing.
    if seeds >= SEEDS {
        assert!(sum.answered > 5 * seeds && sum.committed > 20 * seeds, "{sum:?}");
        assert!(sum.evicted > seeds && sum.risen > 0 && sum.kept > 0 && sum.fetched > 0, "{sum:?}");
        assert!(sum.ssd_evicted > seeds && sum.moved > seeds, "{sum:?}");
        assert!(sum.leases_over > 0 && sum.cut_off > 0 && sum.crashes > 0, "{sum:?}");
        let missing: Vec<&str> =
            COVERED.into_iter().filter(|what| !sum.covered.contains_key(what)).collect();
        assert!(missing.is_empty(), "never happened: {missing:?}, of {sum:?}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = |seed| run_seed(seed, true).expect("nothing happens that must not");
    let first: Vec<Summary> = (0..3).map(run).collect();
    let again: Vec<Summary> = (0..3).map(run).collect();
    assert_eq!(first, again);
    assert!(first.windows(2).all(|pair| pair[0].trace != pair[1].trace), "{first:?}");
}
