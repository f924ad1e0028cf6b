//! Reading ahead on hints: what is read, what it must not cost others, and that nothing stays behind.

use kvasir_blocks::{AbortReason, Options, PrefetchError, Prefetched, RiseError, SsdSize};

use crate::support::{BLOCK_TOKENS, EPOCH, Node, chain, key, namespace, options, request, share};

const SIZE: SsdSize = SsdSize { bytes_max: 1_000, context_bytes_max: 600, tenant_bytes_max: 400 };

/// Twelve slots, all of which shall be free or clean, and the chain `a`, `ab`, ... on the SSD alone.
/// The slots have others' blocks, which were used just now and are on the SSD as well.
fn node_with_on_ssd(prompt: &str, change: impl FnOnce(&mut Options)) -> Node {
    let mut options = Options { demote_ahead_percent: 100, ..options(12) };
    change(&mut options);
    let mut node = Node::with(options);
    node.blocks.set_extents(7, 10);
    node.blocks.ssd_ready(SIZE, Vec::new());
    // A chain that is most of the memory would not sink whole: others are to find room meanwhile.
    for (name, prompt) in [("1p", prompt), ("2p", "ABCDEFGHI"), ("6p", "JK")] {
        node.fill(name, prompt);
        sink_all(&mut node);
    }
    assert_eq!(node.cached("a ab abc"), "", "there was no room for both");
    node
}

fn sink_all(node: &mut Node) {
    loop {
        node.blocks.sink_ahead(node.now_ms);
        node.actions();
        if node.sinks.is_empty() {
            return;
        }
        for (sink, _) in std::mem::take(&mut node.sinks) {
            node.blocks.sunk(node.now_ms, sink, Ok(()));
        }
    }
}

fn hint(node: &mut Node, name: &str, prompt: &str) -> Result<Prefetched, PrefetchError> {
    let namespace = Some(namespace(""));
    let result = node.blocks.prefetch(node.now_ms, share(name), namespace, &chain(prompt));
    node.check();
    result
}

fn reads(memory_blocks: u32, promoting_blocks: u32) -> Result<Prefetched, PrefetchError> {
    Ok(Prefetched { memory_blocks, promoting_blocks })
}

/// The reads that are under way end well, in this order of them.
fn land(node: &mut Node, order: impl Fn(&mut Vec<(u64, kvasir_proto::BlockKey)>)) -> String {
    node.actions();
    let mut rises = std::mem::take(&mut node.rises);
    order(&mut rises);
    let mut said = String::new();
    for (rise, _) in rises {
        node.blocks.risen(node.now_ms, rise, Ok(9));
        said += &node.actions();
    }
    said
}

/// Long enough that what was used at the beginning may make room.
const LATER_MS: u64 = 1_000;

#[test]
fn what_is_hinted_at_is_in_memory_when_it_is_asked_for_and_nothing_is_held() {
    let mut node = node_with_on_ssd("abc", |_| {});
    node.now_ms += LATER_MS;
    assert_eq!(hint(&mut node, "7s", "abcd"), reads(0, 3));
    assert_eq!(land(&mut node, |rises| rises.rotate_left(1)), "Released(7s)");
    node.assert_idle();
    assert_eq!(node.cached("a ab abc"), "a ab abc");
    let counts = node.blocks.counts();
    assert_eq!((counts.hints_total, counts.prefetched_total, counts.risen_total), (1, 3, 3));
    assert_eq!((counts.finished, counts.prefetched_used_total), (3, 0), "hints are not remembered");
    // The request finds it without a read.
    let allocated = node.allocate(&request("3p", "abcd", 1)).expect("room");
    assert_eq!((allocated.held_blocks, allocated.promoting_blocks), (3, 0));
    assert_eq!(node.blocks.counts().prefetched_used_total, 3);
    // The same once more has nothing to do.
    assert_eq!(hint(&mut node, "8s", "abcd"), reads(3, 0));
}

#[test]
fn what_was_counted_stays_counted_when_blocks_lie_otherwise() {
    let mut node = node_with_on_ssd("abc", |_| {});
    node.now_ms += LATER_MS;
    assert_eq!(hint(&mut node, "7s", "abc"), reads(0, 3));
    land(&mut node, |_| {});
    for _ in 0..2 {
        node.blocks.reset(12, BLOCK_TOKENS).expect("nothing is held");
        assert_eq!(node.blocks.counts().prefetched_unused_total, 3, "nobody has asked for them");
    }
}

#[test]
fn an_engine_that_looks_need_not_know_the_namespace() {
    let mut node = node_with_on_ssd("abc", |_| {});
    node.now_ms += LATER_MS;
    assert_eq!(node.blocks.get(EPOCH, 1, &chain("abc")), Ok(vec![]));
    let result = node.blocks.prefetch(node.now_ms, share("7s"), None, &chain("abc"));
    assert_eq!(result, reads(0, 3));
    land(&mut node, |_| {});
    assert_eq!(node.blocks.get(EPOCH, 1, &chain("abc")).map(|slots| slots.len()), Ok(3));
    assert_eq!(node.blocks.counts().prefetched_used_total, 3);
    // Nobody knows of these.
    assert_eq!(node.blocks.prefetch(node.now_ms, share("8s"), None, &chain("xyz")), reads(0, 0));
}

#[test]
fn a_request_that_comes_meanwhile_waits_for_the_same_reads() {
    let mut node = node_with_on_ssd("abc", |_| {});
    node.now_ms += LATER_MS;
    assert_eq!(hint(&mut node, "7s", "abc"), reads(0, 3));
    // The same hint again begins nothing.
    assert_eq!(hint(&mut node, "8s", "abc"), reads(0, 3));
    assert_eq!(node.blocks.counts().shares, 1);
    let allocated = node.allocate(&request("3p", "abc", 1)).expect("room");
    assert_eq!(allocated.promoting_blocks, 3);
    node.blocks.bind(share("3p"), EPOCH).expect("nobody has it");
    node.actions();
    assert_eq!(node.rises.len(), 3);
    assert_eq!(land(&mut node, |_| {}), "Released(7s) Bound/12(3p)");
}

#[test]
fn what_was_used_a_moment_ago_makes_no_room_for_a_hint() {
    let mut node = node_with_on_ssd("abc", |options| options.prefetch_protected_ms = 500);
    node.now_ms += 499;
    // One slot was never taken.
    assert_eq!(hint(&mut node, "7s", "abc"), reads(0, 1));
    land(&mut node, |_| {});
    assert_eq!(hint(&mut node, "8s", "abc"), Err(PrefetchError::NoRoom));
    node.now_ms += 1;
    assert_eq!(hint(&mut node, "9s", "abc"), reads(1, 2));
    assert_eq!(land(&mut node, |_| {}), "Released(9s)");
    // The end of the other chain went, and what was read is not what goes for the next hint.
    assert_eq!(node.cached("a ab abc"), "a ab abc");
    assert!(!node.has("ABCDEFGHI"));
    node.assert_idle();
}

#[test]
fn what_is_nowhere_else_makes_no_room_for_a_hint() {
    let mut node = Node::with(Options { demote_ahead_percent: 100, ..options(12) });
    node.blocks.set_extents(7, 10);
    node.blocks.ssd_ready(SIZE, Vec::new());
    node.fill("1p", "abc");
    sink_all(&mut node);
    // Nothing of this is written yet, and one slot was never taken.
    node.fill("2p", "ABCDEFGHIJK");
    node.now_ms += LATER_MS;
    assert_eq!(hint(&mut node, "7s", "abc"), reads(0, 1));
    assert!(node.has("ABCDEFGHIJK"));
}

#[test]
fn a_quarter_of_the_slots_is_left_to_those_who_ask() {
    let mut node = node_with_on_ssd("abcdefghijk", |_| {});
    node.now_ms += LATER_MS;
    // Of 12, and 11 blocks are wanted.
    assert_eq!(hint(&mut node, "7s", "abcdefghijk"), reads(0, 9));
    node.actions();
    assert_eq!(node.rises.len(), 9);
    assert_eq!(node.blocks.available(), 3);
    node.allocate(&request("3p", "xyz", 0)).expect("there is room for a request");
}

#[test]
fn pinned_blocks_make_no_room() {
    let mut node = node_with_on_ssd("abc", |_| {});
    node.now_ms += LATER_MS;
    let others = node.allocate(&request("4s", "JK", 0)).expect("all of it");
    let pinned = node.allocate(&request("3s", "ABCDEFGHI", 0)).expect("all of it");
    assert_eq!(others.held_blocks, 2);
    assert_eq!(pinned.held_blocks, 9);
    assert_eq!(hint(&mut node, "7s", "abc"), Err(PrefetchError::NoRoom));
    assert_eq!(node.blocks.counts().hints_refused_total, 1);
}

#[test]
fn half_of_the_reads_and_so_many_chains_are_for_hints() {
    let mut node = node_with_on_ssd("abc", |options| {
        (options.rises_max, options.prefetch_chains_max) = (4, 1);
    });
    node.now_ms += LATER_MS;
    assert_eq!(hint(&mut node, "7s", "abc"), reads(0, 2));
    // The third would be of a second hint, which begins nothing; what is read is said all the same.
    assert_eq!(hint(&mut node, "8s", "abc"), reads(0, 2));
    assert_eq!(node.blocks.counts().shares, 1);
    let allocated = node.allocate(&request("3p", "abc", 1)).expect("room");
    assert_eq!(
        allocated.promoting_blocks, 2,
        "the SSD has the third, and that read is one too many"
    );
    land(&mut node, |_| {});
    let mut off = node_with_on_ssd("abc", |options| options.prefetch_chains_max = 0);
    off.now_ms += LATER_MS;
    assert_eq!(hint(&mut off, "7s", "abc"), Err(PrefetchError::TooMany(0)));
}

#[test]
fn a_hint_ends_whatever_becomes_of_its_reads() {
    let check = |fails: usize, cached: &str| {
        let mut node = node_with_on_ssd("abc", |_| {});
        node.now_ms += LATER_MS;
        assert_eq!(hint(&mut node, "7s", "abc"), reads(0, 3));
        node.actions();
        let mut said = String::new();
        for (at, (rise, _)) in std::mem::take(&mut node.rises).into_iter().enumerate() {
            let result = if at == fails { Err(RiseError::Failed) } else { Ok(9) };
            node.blocks.risen(node.now_ms, rise, result);
            said += &node.actions();
        }
        assert_eq!((&*said, &*node.cached("a ab abc")), ("Released(7s)", cached));
        node.assert_idle();
    };
    check(0, "");
    check(1, "a");
    check(2, "a ab");
}

#[test]
fn a_hint_does_not_wait_for_a_disk_that_hangs() {
    let mut node = node_with_on_ssd("abc", |_| {});
    node.now_ms += LATER_MS;
    assert_eq!(hint(&mut node, "7s", "abc"), reads(0, 3));
    node.actions();
    node.now_ms += 2_000;
    node.blocks.handle_timeout(node.now_ms);
    assert_eq!(node.actions(), "Released(7s)");
    assert_eq!(hint(&mut node, "8s", "abc"), Err(PrefetchError::NoSsd));
    assert_eq!(land(&mut node, |_| {}), "");
    node.assert_idle();
}

#[test]
fn nothing_is_read_ahead_without_an_ssd_or_while_a_node_drains() {
    let mut node = node_with_on_ssd("abc", |_| {});
    node.now_ms += LATER_MS;
    node.blocks.drain(
        node.now_ms,
        kvasir_blocks::DrainRequest { targets: Vec::new(), hot_blocks_max: 0, has_ssd: true },
    );
    assert_eq!(hint(&mut node, "7s", "abc"), Err(PrefetchError::Draining));
    node.blocks.stop_draining();
    node.blocks.ssd_gone();
    assert_eq!(hint(&mut node, "7s", "abc"), Err(PrefetchError::NoSsd));
    assert_eq!(
        Node::new(4).blocks.prefetch(0, share("7s"), None, &[key("a")]),
        Err(PrefetchError::NoSsd)
    );
}

#[test]
fn what_was_read_in_vain_is_counted_and_goes_like_any_other_block() {
    let mut node = node_with_on_ssd("abc", |_| {});
    node.now_ms += LATER_MS;
    hint(&mut node, "7s", "abc").expect("read");
    land(&mut node, |_| {});
    let all = node.allocate(&request("3p", "nopqrstuvwx", 1)).expect("all slots");
    assert_eq!(all.pages.len(), 12);
    let counts = node.blocks.counts();
    assert_eq!((counts.prefetched_unused_total, counts.prefetched_used_total), (3, 0));
}

#[test]
fn an_end_of_everything_ends_hints_too() {
    let mut node = node_with_on_ssd("abc", |_| {});
    node.now_ms += LATER_MS;
    hint(&mut node, "7s", "abc").expect("read");
    node.actions();
    node.blocks.abort_all(node.now_ms, &AbortReason::Draining);
    assert_eq!(node.actions(), "Aborted(7s)");
    land(&mut node, |_| {});
    node.assert_idle();
}
