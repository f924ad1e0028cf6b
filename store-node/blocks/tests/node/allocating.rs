//! Reserving and pinning.

use kvasir_blocks::{AllocateError, Options, ShareError};
use kvasir_proto::SlotIndex;

use crate::support::{LEASE_MS, Node, chain_in, namespace, options, request, share};

#[test]
fn each_side_holds_and_reserves_what_it_should() {
    // (side, prompt, tokens after its full blocks, fetch until) -> (held, pages, targets, imm).
    let check = |name: &str, prompt: &str, rest, fetch_until_block, want: (u32, usize, _, bool)| {
        let mut node = Node::new(16);
        node.fill("1p", "ab");
        let mut request = request(name, prompt, rest);
        request.fetch_until_block = fetch_until_block;
        request.has_remote_writer |= fetch_until_block > 0;
        let got = node.allocate(&request).expect("there is room");
        let got = (got.held_blocks, got.pages.len(), got.targets, got.imm.is_some());
        assert_eq!(got, want, "{name} {prompt}+{rest} fetch until {fetch_until_block}");
    };
    check("7p", "abcd", 1, 0, (2, 5, 2..2, false));
    check("7p", "xy", 1, 0, (0, 3, 0..0, false));
    check("7p", "", 3, 0, (0, 1, 0..0, false));
    // At least one token is computed, into a slot of its own.
    check("7p", "ab", 0, 0, (1, 2, 1..1, false));
    check("7p", "ab", 1, 0, (2, 3, 2..2, false));
    check("7p", "a", 0, 0, (0, 1, 0..0, false));
    // A fetch brings what is not held, and leaves a token to compute as well.
    check("7p", "abcd", 1, 3, (2, 5, 2..3, true));
    check("7p", "abcd", 1, 4, (2, 5, 2..4, true));
    check("7p", "abcd", 0, 4, (2, 4, 2..3, true));
    check("7p", "abcd", 1, 99, (2, 5, 2..4, true));
    check("7p", "abcd", 1, 2, (2, 5, 2..2, false));
    check("7p", "xyz", 1, 2, (0, 4, 0..2, true));
    // The decode side computes nothing, so it may hold everything; its tail still comes.
    check("7d", "abcd", 1, 0, (2, 5, 2..5, true));
    check("7d", "ab", 0, 0, (2, 2, 2..2, true));
    check("7d", "ab", 3, 0, (2, 3, 2..3, true));
    // A source sends what it has and takes no room.
    check("7s", "abcd", 0, 0, (2, 2, 0..0, false));
    check("7s", "xy", 0, 0, (0, 0, 0..0, false));
}

#[test]
fn a_request_that_cannot_be_is_refused() {
    let check = |name: &str, spoil: fn(&mut kvasir_blocks::Allocate), want: &str| {
        let mut node = Node::new(8);
        let mut request = request(name, "ab", 1);
        spoil(&mut request);
        let got = node.allocate(&request).expect_err("it should be refused").to_string();
        assert!(got.contains(want), "{got}");
        node.assert_idle();
    };
    check("1p", |r| r.prompt_tokens = 0, "empty");
    check("1p", |r| r.prompt_tokens = 12, "one key for each full block");
    check("1d", |r| r.keys.clear(), "one key for each full block");
    check("1p", |r| r.lease_ms = 0, "lease");
    check("1s", |r| r.lease_ms = 60_001, "lease");
    check("1d", |r| r.has_remote_writer = false, "decode side needs a remote writer");
    check("1p", |r| r.fetch_until_block = 1, "fetch needs a remote writer");
    check(
        "1p",
        |r| {
            r.prompt_tokens = 9 * 4;
            r.keys = crate::support::chain("abcdefghi");
        },
        "9 slots are needed, but this node has 8",
    );
}

#[test]
fn without_a_layout_nothing_is_allocated() {
    let mut node = Node::with(Options::default());
    let refused = node.allocate(&request("1p", "a", 1));
    assert!(matches!(refused, Err(AllocateError::BadRequest(_))), "{refused:?}");
}

#[test]
fn it_succeeds_whole_or_takes_nothing() {
    let mut node = Node::new(6);
    node.fill("1p", "ab");
    node.open("2p", "xy", 1);
    let before = (node.blocks.counts(), node.blocks.snapshot());
    // Three are to be had (one free, two cached), and the two cached ones are what it reuses.
    let refused = node.allocate(&request("3p", "abc", 1));
    assert_eq!(refused, Err(AllocateError::NoSpace { available: 1, wanted: 2 }));
    let after = node.blocks.counts();
    assert_eq!(after.refused_no_space_total, 1);
    let after = kvasir_blocks::Counts { refused_no_space_total: 0, ..after };
    assert_eq!((after, node.blocks.snapshot()), before);
    // What is left can still be had.
    assert_eq!(node.open("4p", "ab", 1).held_blocks, 2);
    assert_eq!(node.blocks.available(), 0);
}

#[test]
fn what_an_allocation_reuses_is_not_evicted_to_make_room_for_it() {
    let mut node = Node::new(4);
    node.fill("1p", "ab");
    node.fill("2p", "x");
    // "ab" is older than "x", and is pinned by this very allocation.
    let got = node.open("3p", "abc", 1);
    assert_eq!((got.held_blocks, node.cached("a ab x")), (2, "a ab".to_owned()));
    assert_eq!(got.pages[..2], [node.slot("a"), node.slot("ab")]);
}

#[test]
fn the_same_request_again_gives_the_same_answer_and_takes_nothing_more() {
    let mut node = Node::new(16);
    node.fill("1p", "ab");
    let check = |node: &mut Node, name: &str| {
        let first = node.allocate(&request(name, "abcd", 1)).expect("there is room");
        let counts = node.blocks.counts();
        assert_eq!(node.allocate(&request(name, "abcd", 1)), Ok(first), "{name}");
        assert_eq!(node.blocks.counts(), counts, "{name}");
        let other = node.allocate(&request(name, "abce", 1));
        assert!(matches!(other, Err(AllocateError::BadRequest(_))), "{other:?}");
    };
    check(&mut node, "7p");
    check(&mut node, "7d");
    check(&mut node, "7s");

    // Also after it has grown and committed.
    let first = node.allocate(&request("7p", "abcd", 1));
    node.blocks.bind(share("7p"), crate::support::EPOCH).expect("to bind");
    node.commit("7p", 2);
    node.blocks.grow(share("7p"), 2).expect("to grow");
    assert_eq!(node.allocate(&request("7p", "abcd", 1)), first);
}

#[test]
fn a_block_of_another_namespace_never_matches() {
    let mut node = Node::new(16);
    node.fill("1p", "ab");
    let mut other = request("2p", "ab", 1);
    other.namespace = namespace("tenant");
    // Even when a caller names the very keys of the other namespace.
    assert_eq!(node.allocate(&other).expect("there is room").held_blocks, 0);
    let mut other = request("3s", "ab", 0);
    other.namespace = namespace("tenant");
    assert_eq!(node.allocate(&other).expect("there is room").held_blocks, 0);
    let mut own = request("4p", "ab", 1);
    own.keys = chain_in("tenant", "ab");
    assert_eq!(node.allocate(&own).expect("there is room").held_blocks, 0);
    assert_eq!(node.open("5p", "ab", 1).held_blocks, 2);
}

#[test]
fn leaves_are_evicted_first_and_what_was_used_longest_ago() {
    let mut node = Node::new(6);
    node.fill("1p", "abc");
    node.fill("2p", "abd");
    node.fill("3p", "x");
    assert_eq!(node.cached("a ab abc abd x"), "a ab abc abd x");
    // One slot is free. Each further page costs the eldest leaf.
    let check = |node: &mut Node, name: &str, prompt: &str, want: &str| {
        node.open(name, prompt, 1);
        assert_eq!(node.cached("a ab abc abd x"), want, "{name}");
    };
    check(&mut node, "4p", "", "a ab abc abd x");
    check(&mut node, "5p", "", "a ab abd x");
    check(&mut node, "6p", "", "a ab x");
    // Leaves first: "ab" was used when "abd" was, "x" after that.
    check(&mut node, "7p", "q", "x");
    check(&mut node, "8p", "", "");
    let refused = node.allocate(&request("9p", "", 1));
    assert_eq!(refused, Err(AllocateError::NoSpace { available: 0, wanted: 1 }));
    assert_eq!(node.blocks.counts().evicted_total, 5);
}

#[test]
fn use_makes_a_chain_young_again() {
    let mut node = Node::new(4);
    node.fill("1p", "a");
    node.fill("2p", "b");
    node.open("3s", "a", 0);
    node.release("3s");
    node.open("4p", "xy", 1);
    assert_eq!(node.cached("a b"), "a");
}

#[test]
fn a_pinned_block_is_never_evicted() {
    let mut node = Node::new(3);
    node.fill("1p", "ab");
    node.open("2s", "a", 0);
    // "ab" may go, "a" may not.
    assert_eq!(node.blocks.available(), 2);
    let refused = node.allocate(&request("3p", "xy", 1));
    assert_eq!(refused, Err(AllocateError::NoSpace { available: 2, wanted: 3 }));
    node.open("4p", "x", 1);
    assert_eq!(node.cached("a ab"), "a");
}

#[test]
fn too_many_shares_are_refused() {
    let mut node = Node::with(Options { shares_max: 1, ..options(8) });
    node.open("1s", "a", 0);
    assert_eq!(node.allocate(&request("2s", "a", 0)), Err(AllocateError::TooManyShares(1)));
    assert!(node.allocate(&request("1s", "a", 0)).is_ok());
}

#[test]
fn immediates_are_fresh_and_come_back_only_when_the_share_is_over() {
    let mut node = Node::with(Options { imm_seed: u32::MAX, ..options(8) });
    let imm = |node: &mut Node, name: &str| {
        node.open(name, "a", 0).imm.expect("the decode side has one").0
    };
    assert_eq!(imm(&mut node, "1d"), u32::MAX);
    assert_eq!(imm(&mut node, "2d"), 1);
    node.release("1d");
    assert_eq!(node.blocks.counts().imms, 2, "its writer may still use it");
    node.blocks.writer_stopped(0, share("1d"));
    assert_eq!(node.blocks.counts().imms, 1);
    assert_eq!(imm(&mut node, "3d"), 2);
}

#[test]
fn a_lease_is_renewed_and_never_shortened() {
    let mut node = Node::new(8);
    node.open("1p", "a", 0);
    assert_eq!(node.blocks.poll_timeout(), Some(1_000 + LEASE_MS));
    let check = |node: &mut Node, lease_ms, want| {
        assert_eq!(node.blocks.renew(2_000, share("1p"), lease_ms), Ok(()));
        assert_eq!(node.blocks.poll_timeout(), Some(want), "{lease_ms}");
        node.check();
    };
    check(&mut node, 100, 6_000);
    check(&mut node, 7_000, 9_000);
    check(&mut node, 1, 9_000);
    check(&mut node, u64::MAX, 62_000);
    assert_eq!(node.blocks.renew(0, share("2p"), 1), Err(ShareError::Unknown));
}

#[test]
fn slots_of_a_fresh_node_are_used_from_the_first_on() {
    let mut node = Node::new(8);
    assert_eq!(node.open("1p", "ab", 1).pages, [SlotIndex(0), SlotIndex(1), SlotIndex(2)]);
}
