//! Hours of requests and faults: at the end of each hour, when nothing was asked for a minute, nothing is
//! held any more, and nothing has grown. One hour with few requests by default; a day is
//! `KVASIR_SIM_HOURS=24 cargo test --release -p kvasir-cluster-sim --test soak -- --nocapture`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvasir_cluster_sim::plan::{HOUR_US, Plan};
use kvasir_cluster_sim::world::World;

/// Counts the bytes that are allocated now.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: what the system's allocator does; only numbers are added.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What may be there at rest: as many as there are of each, whatever the hour. Everything else is
/// gone.
const AT_REST: [(&str, usize); 5] = [
    // A tick for each node, a poll for each conductor, and what an engine or a disk has planned.
    ("events", 16),
    // A node remembers those that write to it, up to a bound.
    ("writers", 51),
    // Four engines, as two conductors know them.
    ("instances", 8),
    // Two conductors; the slots of three nodes and what two disks hold.
    ("index keys", 1_200),
    // Three nodes, each of which asks the two others two things now and then.
    ("questions", 12),
];

/// What may be there beside that while a context has fewer copies than it was promised: its node looks for one that takes
/// it now and then, and whom it has asked remembers for a time that this has ended.
const WHILE_SHORT: [(&str, usize); 2] = [("finished", 200), ("tombstones", 20)];

/// Of each hour, what comes after all that is asked.
const REST_US: u64 = 60_000_000;

/// And requests an hour.
fn hours() -> (u64, u64) {
    #[allow(clippy::disallowed_methods, reason = "a test, and how long it runs, is set by hand")]
    let text = std::env::var("KVASIR_SIM_HOURS").ok();
    text.map_or((1, 300), |text| (text.parse().expect("a number"), 2_000))
}

/// Of this process; 0 where that cannot be read.
fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1_024
}

/// What was seen last.
fn trace(world: &World) -> String {
    world.context.books.trace(100).join("\n")
}

#[test]
fn hours_of_requests_and_faults_leave_nothing_behind() {
    let (hours, requests) = hours();
    let mut world = World::new(Plan::soak(24, hours, requests));
    for hour in 1..=hours {
        let asked = world.run_until(hour * HOUR_US - REST_US);
        assert!(asked.is_ok(), "hour {hour}: {asked:?}\n{}", trace(&world));
        world.set_clocks();
        let result = world.run_until(hour * HOUR_US - 1_000_000);
        assert!(result.is_ok(), "hour {hour}: {result:?}\n{}", trace(&world));
        let rest = world.let_disks_rest();
        assert!(rest.is_ok(), "hour {hour}: {rest:?}\n{}", trace(&world));
        let kept = world.kept();
        let at_rest = world.show_at_rest();
        assert!(at_rest.is_ok(), "hour {hour}: {at_rest:?}\n{}", trace(&world));
        let summary = world.summary();
        #[allow(clippy::print_stdout, reason = "what a long run is like, for whoever started it")]
        {
            let (rss, answered) = (resident_mib(), summary.answered);
            let kib = ALLOCATED.load(Ordering::Relaxed) >> 10;
            println!(
                "hour {hour}: {answered} answered, {kib} KiB allocated, {rss} MiB resident, at rest \
                 {kept:?}"
            );
        }
        let mut bounds = BTreeMap::from(AT_REST);
        if world.contexts_short() > 0 {
            bounds.extend(WHILE_SHORT);
        }
        for (name, count) in &kept {
            let bound = bounds.get(name).copied().unwrap_or(0);
            assert!(*count <= bound, "hour {hour}: {count} {name} at rest, of {kept:?}");
        }
        assert!(summary.answered > hour * requests / 3, "hour {hour}: {summary:?}");
    }
    let result = world.run();
    assert!(result.is_ok(), "{result:?}\n{}", trace(&world));
}
