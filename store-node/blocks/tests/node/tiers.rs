//! Between DRAM and SSD: what sinks and when, what rises and what comes of it when it fails, and
//! what is kept for tenants.

use kvasir_blocks::{
    Binding, Commit, KeepError, KeepRequest, Options, RiseError, SinkError, SsdSize,
};
use kvasir_proto::{BlockKey, Class, Tenant};

use crate::support::{BLOCK_TOKENS, EPOCH, Node, chain, key, namespace, options, request, share};

const EXTENT_BYTES: u64 = 10;
const SIZE: SsdSize = SsdSize { bytes_max: 100, context_bytes_max: 60, tenant_bytes_max: 40 };

/// Eight slots, all of which shall be free or clean, so that what is idle sinks at once.
fn node() -> Node {
    let mut node = Node::with(Options { demote_ahead_percent: 100, ..options(8) });
    node.blocks.set_extents(7, EXTENT_BYTES);
    node.blocks.ssd_ready(SIZE, Vec::new());
    node
}

/// Everything sinks that can.
fn sink_all(node: &mut Node) -> Vec<kvasir_proto::BlockKey> {
    let mut sunk = Vec::new();
    loop {
        node.actions();
        if node.sinks.is_empty() {
            node.blocks.sink_ahead(node.now_ms);
            node.actions();
        }
        if node.sinks.is_empty() {
            return sunk;
        }
        for (sink, key) in std::mem::take(&mut node.sinks) {
            node.blocks.sunk(node.now_ms, sink, Ok(()));
            sunk.push(key);
        }
        assert!(sunk.len() < 1_000, "it sinks for ever");
        node.actions();
    }
}

/// A node on whose SSD the blocks `a`, `ab`, `abc` are, and in whose slots none is.
fn node_with_abc_on_ssd() -> Node {
    let mut node = node();
    node.fill("1p", "abc");
    sink_all(&mut node);
    // Something else needs all slots.
    let allocated = node.open("2p", "ABCDEFG", 1);
    assert_eq!(allocated.held_blocks, 0);
    node.release("2p");
    node.actions();
    assert_eq!(node.cached("a ab abc"), "");
    node
}

/// It would be the next to sink, and so on for ever.
#[test]
fn what_is_in_memory_too_is_not_driven_from_a_small_ssd_by_what_sinks() {
    let mut node = node();
    node.blocks.ssd_ready(SsdSize { bytes_max: 3 * EXTENT_BYTES, ..SIZE }, Vec::new());
    for (at, prompt) in ["A", "B", "C", "D", "E", "F"].into_iter().enumerate() {
        node.fill(&format!("{}p", at + 1), prompt);
    }
    assert_eq!(sink_all(&mut node).len(), 3);
    // Others take the places of those that are in memory no more.
    let allocated = node.open("7p", "XYZUV", 1);
    assert_eq!(allocated.held_blocks, 0);
    node.release("7p");
    let sunk = sink_all(&mut node);
    assert_eq!(sunk.len(), 2, "{sunk:?}");
}

#[test]
fn chains_sink_from_their_first_block_on() {
    let mut node = node();
    node.fill("1p", "abc");
    assert_eq!(sink_all(&mut node), ["a", "ab", "abc"].map(key));
    let counts = node.blocks.counts();
    assert_eq!((counts.ssd_blocks, counts.ssd_bytes, counts.sunk_total), (3, 30, 3));
    assert_eq!(sink_all(&mut node), [], "nothing sinks twice");
    node.assert_idle();
}

#[test]
fn nothing_sinks_while_enough_is_free() {
    let mut node = Node::with(Options { demote_ahead_percent: 25, ..options(8) });
    node.blocks.set_extents(7, EXTENT_BYTES);
    node.blocks.ssd_ready(SIZE, Vec::new());
    node.fill("1p", "abcde");
    assert_eq!(sink_all(&mut node), []);
    node.fill("2p", "AB");
    assert!(!sink_all(&mut node).is_empty());
}

#[test]
fn a_block_that_is_being_written_is_pinned_and_what_fails_stays_as_it_was() {
    let mut node = node();
    node.fill("1p", "a");
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let (sink, _) = node.sinks.pop().expect("it sinks");
    assert_eq!(node.blocks.counts().pins, 1);
    node.blocks.sunk(node.now_ms, sink, Err(SinkError::Failed));
    assert_eq!(node.cached("a"), "a");
    assert_eq!(node.blocks.counts().ssd_blocks, 0);
    // Later it is tried again.
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    assert!(node.sinks.is_empty());
    node.now_ms += 1_000;
    assert_eq!(sink_all(&mut node), [key("a")]);
    node.assert_idle();
}

#[test]
fn a_block_whose_bytes_are_rotten_does_not_sink_and_is_dropped() {
    let mut node = node();
    node.fill("1p", "ab");
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let (sink, first) = node.sinks.remove(0);
    assert_eq!(first, key("a"));
    node.blocks.sunk(node.now_ms, sink, Err(SinkError::Corrupt));
    let (sink, _) = node.sinks.remove(0);
    node.blocks.sunk(node.now_ms, sink, Ok(()));
    node.actions();
    assert_eq!(node.cached("a ab"), "");
    assert_eq!(node.blocks.counts().ssd_blocks, 0);
    assert_eq!(node.forgotten, [key("ab")], "what was written of it is not kept");
    node.assert_idle();
}

#[test]
fn what_is_dropped_before_its_turn_is_not_written() {
    let mut node = node();
    node.fill("1p", "abcd");
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let written: Vec<BlockKey> = node.sinks.iter().map(|(_, key)| *key).collect();
    assert_eq!(written, [key("a"), key("ab")], "two at once");
    let third = node.blocks.block(key("abc")).expect("it is there");
    assert_eq!(node.blocks.drop_corrupt(node.now_ms, third.slot, third.generation), 2);
    assert_eq!(sink_all(&mut node), [key("a"), key("ab")]);
    let counts = node.blocks.counts();
    assert_eq!((counts.sunk_total, counts.dropped_total), (2, 2));
    node.assert_idle();
}

#[test]
fn a_prefill_share_waits_for_the_ssd_and_computes_what_is_left() {
    let mut node = node_with_abc_on_ssd();
    let allocated = node.allocate(&request("3p", "abcd", 1)).expect("room");
    assert_eq!(allocated.held_blocks, 3);
    assert_eq!(node.blocks.bind(share("3p"), EPOCH), Ok(Binding::Waiting));
    assert_eq!(node.actions(), "");
    let rises = std::mem::take(&mut node.rises);
    assert_eq!(rises.iter().map(|(_, key)| *key).collect::<Vec<_>>(), ["a", "ab", "abc"].map(key));
    // In any order.
    for (rise, of) in [rises[2], rises[0], rises[1]] {
        assert_eq!(node.actions(), "", "{of:?}");
        node.blocks.risen(node.now_ms, rise, Ok(9));
    }
    assert_eq!(node.actions(), "Bound/12(3p)");
    assert_eq!(node.cached("a ab abc"), "a ab abc");
    assert_eq!(node.commit("3p", 3), Commit::Indexed);
    node.release("3p");
    node.actions();
    node.assert_idle();
}

#[test]
fn two_shares_wait_for_one_read() {
    let mut node = node_with_abc_on_ssd();
    node.allocate(&request("3p", "a", 1)).expect("room");
    node.allocate(&request("4p", "a", 1)).expect("room");
    node.actions();
    assert_eq!(node.rises.len(), 1);
    for name in ["3p", "4p"] {
        assert_eq!(node.blocks.bind(share(name), EPOCH), Ok(Binding::Waiting));
    }
    let (rise, _) = node.rises.remove(0);
    node.blocks.risen(node.now_ms, rise, Ok(9));
    assert_eq!(node.actions(), "Bound/4(3p) Bound/4(4p)");
}

/// Three blocks rise, and the one in the middle fails.
fn check_failed_rise(error: RiseError, left_on_ssd: u32) {
    let mut node = node_with_abc_on_ssd();
    let allocated = node.allocate(&request("3p", "abc", 1)).expect("room");
    node.blocks.bind(share("3p"), EPOCH).expect("nobody has it");
    node.actions();
    let rises = std::mem::take(&mut node.rises);
    node.blocks.risen(node.now_ms, rises[1].0, Err(error));
    node.check();
    node.blocks.risen(node.now_ms, rises[0].0, Ok(9));
    assert_eq!(node.actions(), "Bound/4(3p)", "{error:?}");
    let slots = node.blocks.share(share("3p")).expect("open").slots;
    assert_eq!((slots.len(), slots[0]), (4, allocated.pages[0]));
    assert_ne!(slots[1], allocated.pages[1], "that one may still be written");
    node.blocks.risen(node.now_ms, rises[2].0, Ok(9));
    assert_eq!(node.commit("3p", 1), Commit::Indexed);
    node.release("3p");
    node.actions();
    assert_eq!(node.blocks.counts().ssd_blocks, left_on_ssd, "{error:?}");
    node.assert_idle();
}

#[test]
fn what_does_not_rise_is_computed() {
    check_failed_rise(RiseError::Failed, 3);
    check_failed_rise(RiseError::Gone, 1);
}

#[test]
fn a_disk_that_hangs_is_waited_for_so_long_and_then_not_used_until_it_answers() {
    let mut node = node_with_abc_on_ssd();
    node.allocate(&request("3p", "ab", 1)).expect("room");
    node.blocks.bind(share("3p"), EPOCH).expect("nobody has it");
    node.actions();
    assert_eq!(node.blocks.poll_timeout(), Some(node.now_ms + 2_000));
    node.now_ms += 2_000;
    node.blocks.handle_timeout(node.now_ms);
    assert_eq!(node.actions(), "Bound/0(3p)");
    let counts = node.blocks.counts();
    assert_eq!((counts.rising, counts.rises_late), (2, 2), "nobody may use those slots yet");
    assert!(!node.blocks.ssd_is_usable(node.now_ms));
    let allocated = node.allocate(&request("4s", "ab", 0)).expect("room");
    assert_eq!(allocated.held_blocks, 0);
    for (rise, _) in std::mem::take(&mut node.rises) {
        node.blocks.risen(node.now_ms, rise, Ok(9));
    }
    node.actions();
    assert!(node.blocks.ssd_is_usable(node.now_ms));
    assert_eq!(node.blocks.counts().rising, 0);
    assert_eq!(node.cached("a ab"), "a ab");
}

#[test]
fn a_source_learns_what_it_has_to_send() {
    let check = |fails: Option<usize>, want: &str| {
        let mut node = node_with_abc_on_ssd();
        let allocated = node.allocate(&request("3s", "abcd", 0)).expect("room");
        assert_eq!((allocated.held_blocks, allocated.pages.len()), (3, 3));
        node.actions();
        for (at, (rise, _)) in std::mem::take(&mut node.rises).into_iter().enumerate() {
            let result = if Some(at) == fails { Err(RiseError::Gone) } else { Ok(9) };
            node.blocks.risen(node.now_ms, rise, result);
        }
        assert_eq!(node.actions(), want);
        node.release("3s");
        node.actions();
        node.assert_idle();
    };
    check(None, "Rises/1(3s) Rises/2(3s) Risen/3(3s)");
    check(Some(0), "Risen/0(3s)");
    check(Some(2), "Rises/1(3s) Rises/2(3s) Risen/2(3s)");
}

#[test]
fn a_share_that_leaves_the_ssd_computes_or_fetches() {
    let mut node = node_with_abc_on_ssd();
    let leaves =
        |name: &str| kvasir_blocks::Allocate { leaves_ssd: true, ..request(name, "abcd", 1) };
    let allocated = node.allocate(&leaves("3p")).expect("room");
    assert_eq!((allocated.held_blocks, allocated.targets), (0, 0..0));
    node.blocks.abort(node.now_ms, share("3p"), kvasir_blocks::AbortReason::LeaseOver);
    node.actions();
    assert_eq!(node.rises, []);
    let fetches =
        kvasir_blocks::Allocate { fetch_until_block: 3, has_remote_writer: true, ..leaves("4p") };
    let allocated = node.allocate(&fetches).expect("room");
    assert_eq!((allocated.held_blocks, allocated.targets), (0, 0..3));
}

#[test]
fn the_ssd_drops_its_eldest_leaves_when_it_is_full() {
    let mut node = node();
    for (name, prompt) in [("1p", "abcd"), ("2p", "ABCD"), ("3p", "xyz")] {
        node.fill(name, prompt);
        sink_all(&mut node);
    }
    let counts = node.blocks.counts();
    assert_eq!((counts.ssd_bytes, counts.ssd_evicted_total), (100, 1));
    assert_eq!(node.forgotten, [key("abcd")]);
}

fn keep(prompt: &str, tenant: u64, expires_unix_ms: u64) -> KeepRequest {
    KeepRequest {
        namespace: namespace(""),
        keys: chain(prompt),
        tenant: Tenant(tenant),
        expires_unix_ms,
        created_unix_ms: None,
        copies: 1,
    }
}

#[test]
fn a_chain_is_kept_when_all_of_it_is_durable_and_no_sooner() {
    let mut node = node();
    node.fill("1p", "ab");
    let number = node.blocks.keep(node.now_ms, &keep("abX", 1, 9_000)).expect("kept");
    node.actions();
    let [(first, _), (second, _)] = node.sinks[..] else { panic!("two sink") };
    node.blocks.sunk(node.now_ms, first, Ok(()));
    node.actions();
    assert_eq!(node.kept, []);
    node.blocks.sunk(node.now_ms, second, Ok(()));
    node.actions();
    assert_eq!(node.kept, [(number, Some(2))]);
    let class = Class::Context { tenant: Tenant(1), expires_unix_ms: 9_000 };
    assert!(node.blocks.ssd_blocks().all(|block| block.class == class));
    // What is kept so long already is kept at once; longer costs a new extent.
    node.kept.clear();
    let again = node.blocks.keep(node.now_ms, &keep("ab", 1, 8_000)).expect("kept");
    node.actions();
    assert_eq!(node.kept, [(again, Some(2))]);
    node.sinks.clear();
    node.blocks.keep(node.now_ms, &keep("ab", 1, 9_500)).expect("kept");
    node.actions();
    assert_eq!(node.sinks.len(), 1, "the last block says until when all of it is kept");
}

#[test]
fn a_chain_whose_write_fails_is_not_kept() {
    let mut node = node();
    node.fill("1p", "ab");
    let number = node.blocks.keep(node.now_ms, &keep("ab", 1, 9_000)).expect("kept");
    node.actions();
    for ((sink, _), result) in
        std::mem::take(&mut node.sinks).into_iter().zip([Ok(()), Err(SinkError::Failed)])
    {
        node.blocks.sunk(node.now_ms, sink, result);
    }
    node.actions();
    assert_eq!(node.kept, [(number, None)]);
    node.assert_idle();
}

#[test]
fn a_kept_block_stays_kept_when_its_copy_is_dropped_while_it_is_kept_for_longer() {
    let mut node = node();
    node.fill("1p", "ab");
    node.blocks.keep(node.now_ms, &keep("ab", 1, 9_000)).expect("kept");
    sink_all(&mut node);
    node.kept.clear();
    let number = node.blocks.keep(node.now_ms, &keep("ab", 1, 9_500)).expect("kept");
    node.actions();
    assert_eq!(node.sinks.len(), 1);
    let first = node.blocks.blocks().find(|block| block.key == key("a")).expect("in memory");
    assert_eq!(node.blocks.drop_corrupt(node.now_ms, first.slot, first.generation), 2);
    for (sink, _) in std::mem::take(&mut node.sinks) {
        node.blocks.sunk(node.now_ms, sink, Ok(()));
    }
    node.actions();
    assert_eq!(node.cached("a ab"), "");
    assert_eq!(node.forgotten, [], "the new extent has taken the place of the kept one");
    assert_eq!(node.kept, [(number, Some(2))]);
    let class = Class::Context { tenant: Tenant(1), expires_unix_ms: 9_500 };
    assert_eq!(node.blocks.ssd_blocks().filter(|block| block.class == class).count(), 2);
    node.assert_idle();
}

#[test]
fn keeping_is_refused_by_what_stands_against_it() {
    let mut node = node();
    node.fill("1p", "abcde");
    let check = |node: &mut Node, request: KeepRequest, want: KeepError| {
        assert_eq!(node.blocks.keep(node.now_ms, &request), Err(want), "{request:?}");
        node.check();
    };
    check(&mut node, keep("X", 1, 9_000), KeepError::NotHere);
    let over = KeepError::OverQuota { wanted_bytes: 50, taken_bytes: 0, tenant_bytes_max: 40 };
    check(&mut node, keep("abcde", 1, 9_000), over);
    node.blocks.keep(node.now_ms, &keep("abc", 1, 9_000)).expect("kept");
    check(&mut node, keep("abcd", 1, 9_000), KeepError::Busy);
    // What is on its way counts.
    node.fill("2p", "AB");
    let over = KeepError::OverQuota { wanted_bytes: 20, taken_bytes: 30, tenant_bytes_max: 40 };
    check(&mut node, keep("AB", 1, 9_000), over);
    node.actions();
    sink_all(&mut node);
    check(&mut node, keep("abc", 2, 9_000), KeepError::OtherTenant);
    node.blocks.keep(node.now_ms, &keep("AB", 2, 9_000)).expect("kept");
    node.fill("3p", "XY");
    check(&mut node, keep("XY", 3, 9_000), KeepError::NoRoom);
    node.blocks.ssd_gone();
    check(&mut node, keep("XY", 3, 9_000), KeepError::NoSsd);
}

#[test]
fn context_blocks_outlive_pressure_until_their_time_is_over() {
    let mut node = node();
    node.fill("1p", "ab");
    node.blocks.keep(node.now_ms, &keep("ab", 1, 9_000)).expect("kept");
    sink_all(&mut node);
    for (name, prompt) in [("2p", "ABCD"), ("3p", "xyz"), ("4p", "klmn")] {
        node.fill(name, prompt);
        sink_all(&mut node);
    }
    assert!(node.blocks.ssd_block(key("ab")).is_some());
    assert!(node.blocks.counts().ssd_evicted_total > 0);
    node.blocks.expire(9_000);
    assert_eq!(node.blocks.counts().context_bytes, 0);
    for (name, prompt) in [("5p", "opqr"), ("6p", "stuv")] {
        node.fill(name, prompt);
        sink_all(&mut node);
    }
    assert!(node.blocks.ssd_block(key("ab")).is_none());
}

#[test]
fn an_ephemeral_share_leaves_nothing_behind() {
    let mut node = node();
    node.fill("1p", "a");
    let mut ephemeral = request("2p", "ab", 1);
    ephemeral.is_ephemeral = true;
    let allocated = node.allocate(&ephemeral).expect("room");
    assert_eq!(allocated.held_blocks, 1, "it may use what is there");
    node.blocks.bind(share("2p"), EPOCH).expect("nobody has it");
    assert_eq!(node.commit("2p", 1), Commit::Ephemeral);
    node.release("2p");
    node.actions();
    assert_eq!(node.cached("a ab"), "a");
    node.assert_idle();
}

#[test]
fn a_restart_finds_whole_chains_and_forgets_the_rest() {
    let mut node = node_with_abc_on_ssd();
    node.actions();
    let mut blocks: Vec<_> = node.blocks.ssd_blocks().collect();
    blocks.retain(|block| block.key != key("ab"));
    let mut again = self::node();
    again.blocks.ssd_ready(SIZE, blocks);
    again.actions();
    assert_eq!(again.blocks.counts().ssd_blocks, 1);
    assert_eq!(again.forgotten, [key("abc")]);
    let allocated = again.allocate(&request("1p", "abc", 1)).expect("room");
    assert_eq!(allocated.held_blocks, 1);
    // Blocks of another layout are of no use.
    let mut other = self::node();
    other.blocks.ssd_ready(SIZE, node.blocks.ssd_blocks().collect());
    other.blocks.set_extents(8, EXTENT_BYTES);
    let allocated = other.allocate(&request("1p", "abc", 1)).expect("room");
    assert_eq!(allocated.held_blocks, 0);
    assert_eq!(BLOCK_TOKENS, 4);
}
