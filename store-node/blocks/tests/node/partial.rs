//! An SSD of which a part could not be read: what is kept there and follows what is in that part.

use kvasir_blocks::{KeepError, ShareError, SinkError, SsdBlock, SsdSize};
use kvasir_proto::BlockKey;

use crate::contexts::{
    EXTENT_BYTES, SIZE, keep, listed, name, node, request, restarted_blocks, untils, write,
};
use crate::support::{self, Node, key, namespace};

/// What is on the SSD of this node, without what no other block is before.
fn without_firsts(node: &Node) -> Vec<SsdBlock> {
    let mut rest = restarted_blocks(node);
    rest.retain(|block| block.parent.is_some());
    rest
}

/// A node whose SSD has these blocks and more that could not be read.
fn found(size: SsdSize, blocks: Vec<SsdBlock>) -> Node {
    let mut node = node();
    node.blocks.ssd_ready_in_part(size, blocks, 2_000);
    node.actions();
    node.forgotten.clear();
    node
}

/// Somebody puts the first block of "abc" in another namespace, and it is written to the SSD.
fn put_first_elsewhere(node: &mut Node) {
    let other = namespace("other");
    let mut lying = support::request("9p", "a", 1);
    lying.namespace = other;
    node.allocate(&lying).expect("there is room");
    node.blocks.bind(support::share("9p"), support::EPOCH).expect("to bind");
    node.commit("9p", 0);
    node.release("9p");
    node.blocks.sink_ahead(node.now_ms);
    write(node);
    let there = node.blocks.ssd_block(key("a")).expect("it is written");
    assert_eq!(there.namespace, other);
}

/// Its first block could not be read: the others are there when it can be.
#[test]
fn what_is_kept_stays_on_an_ssd_that_could_not_be_read_whole() {
    let mut node = node();
    node.fill("1p", "abcd");
    node.fill("2p", "xyz");
    keep(&mut node, "abc", 9_000);
    node.blocks.sink_ahead(node.now_ms);
    write(&mut node);
    let all = restarted_blocks(&node);
    let is_first = |block: &SsdBlock| block.parent.is_none();
    let (firsts, rest): (Vec<SsdBlock>, Vec<SsdBlock>) = all.iter().copied().partition(is_first);
    assert_eq!((firsts.len(), rest.len()), (2, 5));
    for is_whole in [false, true] {
        let mut again = self::node();
        match is_whole {
            true => again.blocks.ssd_ready(SIZE, rest.clone()),
            false => again.blocks.ssd_ready_in_part(SIZE, rest.clone(), 2_000),
        }
        again.actions();
        assert_eq!(again.blocks.ssd_blocks().count(), 0);
        let mut forgotten = std::mem::take(&mut again.forgotten);
        forgotten.sort();
        let kept = [key("ab"), key("abc")];
        let mut others: Vec<BlockKey> = rest.iter().map(|block| block.key).collect();
        others.retain(|key| is_whole || !kept.contains(key));
        others.sort();
        assert_eq!(forgotten, others);
        // What stays has its room.
        let fill = |again: &mut Node, shares: [&str; 3], first: u8| {
            for (at, share) in (0..).zip(shares) {
                let letters = (0..20u8).map(|letter| char::from(first + 20 * at + letter));
                again.fill(share, &letters.collect::<String>());
                again.blocks.sink_ahead(again.now_ms);
                write(again);
            }
            again.blocks.counts().ssd_bytes / EXTENT_BYTES
        };
        assert_eq!(fill(&mut again, ["3p", "4p", "5p"], b'A'), if is_whole { 40 } else { 38 });
        // Until its time is over.
        again.blocks.expire(9_000);
        again.actions();
        let mut forgotten = std::mem::take(&mut again.forgotten);
        forgotten.retain(|key| kept.contains(key));
        forgotten.sort();
        assert_eq!(
            (forgotten.len(), again.blocks.ssd_unreached().count()),
            (if is_whole { 0 } else { 2 }, 0)
        );
        assert_eq!(fill(&mut again, ["6p", "7p", "8p"], b'B'), 40);
    }
}

/// What is computed anew is kept as what could be read of it was.
#[test]
fn what_is_written_in_the_place_of_what_cannot_be_found_is_kept_as_long() {
    let mut node = node();
    node.fill("1p", "abc");
    keep(&mut node, "abc", 9_000);
    let rest = without_firsts(&node);
    let mut again = found(SIZE, rest);
    assert_eq!(again.blocks.ssd_unreached().count(), 2);
    assert_eq!(listed(&again, &["a", "ab", "abc"]), []);
    again.fill("1p", "abc");
    for prompt in ["ab", "abc"] {
        let refused = again.blocks.keep(again.now_ms, &request(prompt, 2, 9_000));
        assert_eq!(refused, Err(KeepError::OtherTenant));
    }
    again.blocks.sink_ahead(again.now_ms);
    write(&mut again);
    assert_eq!(untils(&again, &["a", "ab", "abc"]), [9_000; 3]);
    assert_eq!(listed(&again, &["a", "ab", "abc"]), [(3, 9_000)]);
    assert_eq!(again.blocks.ssd_unreached().count(), 0);
}

/// What follows it is as good as ever, whether or not that is computed too.
#[test]
fn what_could_not_be_found_is_found_when_what_it_follows_is_there_again() {
    let mut node = node();
    node.fill("1p", "abcd");
    keep(&mut node, "abc", 9_000);
    let rest = without_firsts(&node);
    for fails in [true, false] {
        let mut again = self::node();
        again.blocks.ssd_ready_in_part(SIZE, rest.clone(), 2_000);
        // Blocks lie otherwise now.
        again.blocks.set_extents(8, EXTENT_BYTES);
        again.fill("1p", "ab");
        again.blocks.sink_ahead(again.now_ms);
        again.actions();
        // The first one may fail: the next one replaces what waits, and waits as that did.
        for (sink, of) in std::mem::take(&mut again.sinks) {
            let result = if fails && of == key("a") { Err(SinkError::Failed) } else { Ok(()) };
            again.blocks.sunk(again.now_ms, sink, result);
        }
        again.actions();
        assert_eq!(again.forgotten.iter().filter(|of| **of != key("a")).count(), 0);
        assert_eq!(again.blocks.ssd_unreached().count(), if fails { 2 } else { 0 });
        if fails {
            again.now_ms += 60_000;
            again.blocks.sink_ahead(again.now_ms);
            write(&mut again);
        }
        assert_eq!(untils(&again, &["a", "ab", "abc"]), [9_000; 3], "{fails}");
        assert_eq!(listed(&again, &["a", "ab", "abc"]), [(3, 9_000)]);
    }
}

/// It is not removed by who names its key, nor written over from another namespace.
#[test]
fn what_cannot_be_found_is_nobody_elses() {
    let mut node = node();
    node.fill("1p", "abc");
    keep(&mut node, "abc", 9_000);
    let rest = without_firsts(&node);
    let mut again = found(SIZE, rest);
    let other = namespace("other");
    let removed = again.blocks.remove_objects(again.now_ms, other, &[key("ab"), key("abc")]);
    assert_eq!(removed, Ok((0, None)));
    let mut lying = support::request("2p", "abc", 1);
    lying.namespace = other;
    again.allocate(&lying).expect("there is room");
    again.blocks.bind(support::share("2p"), support::EPOCH).expect("to bind");
    again.commit("2p", 0);
    let refused = again.blocks.commit_page(support::share("2p"), 1, 0);
    assert_eq!(refused, Err(ShareError::Refused("the key belongs to another block")));
}

/// Also what cannot be found is its tenant's.
#[test]
fn a_quota_is_of_what_cannot_be_found_too() {
    let mut node = node();
    node.fill("1p", "abcdefghijklmnopqrst");
    keep(&mut node, "abcdefghijklmnopqrst", 9_000);
    let rest = without_firsts(&node);
    assert_eq!(rest.len(), 19);
    let mut again = found(SIZE, rest);
    again.fill("1p", "ABC");
    let kept = again.blocks.keep(again.now_ms, &request("ABC", 1, 9_000));
    assert!(matches!(kept, Err(KeepError::OverQuota { taken_bytes: 190, .. })), "{kept:?}");
    again.blocks.keep(again.now_ms, &request("ABC", 2, 9_000)).expect("another tenant's");
    // As long as it is kept.
    again.blocks.expire(9_000);
    again.fill("2p", "DEF");
    again.blocks.keep(again.now_ms, &request("DEF", 1, 19_000)).expect("there is nothing else");
}

#[test]
fn what_is_in_another_namespace_is_not_what_it_follows() {
    let mut node = node();
    node.fill("1p", "abc");
    keep(&mut node, "abc", 9_000);
    let rest = without_firsts(&node);
    let mut again = found(SIZE, rest.clone());
    put_first_elsewhere(&mut again);
    assert_eq!(again.blocks.ssd_unreached().count(), 2);
    assert_eq!(untils(&again, &["a", "ab", "abc"]), [0; 3]);
    // Nor at the next start.
    let mut all = rest;
    all.extend(again.blocks.ssd_block(key("a")));
    let mut whole = self::node();
    whole.blocks.ssd_ready(SIZE, all);
    assert_eq!(untils(&whole, &["a", "ab", "abc"]), [0; 3]);
    assert_eq!(whole.blocks.ssd_blocks().count(), 1);
}

#[test]
fn what_cannot_be_found_is_not_forgotten_while_the_ssd_is_looked_at_anew() {
    let mut node = node();
    node.fill("1p", "abc");
    keep(&mut node, "abc", 9_000);
    let mut again = found(SIZE, without_firsts(&node));
    again.blocks.ssd_gone();
    assert_eq!(again.blocks.ssd_unreached().count(), 0);
    // A newer extent may be found, which is kept for longer.
    again.blocks.expire(9_000);
    again.actions();
    assert_eq!(again.forgotten, []);
}

#[test]
fn what_is_kept_anew_in_its_own_place_needs_no_more_room() {
    let mut node = node();
    node.fill("1p", "abcd");
    keep(&mut node, "abcd", 9_000);
    let size = SsdSize { bytes_max: 40, context_bytes_max: 40, tenant_bytes_max: 40 };
    let mut again = found(size, without_firsts(&node));
    again.fill("1p", "abcd");
    keep(&mut again, "abcd", 9_500);
    assert_eq!(listed(&again, &["abcd"]), [(4, 9_500)]);
    assert_eq!(again.blocks.counts().ssd_bytes, 40);
    // Nor while it is written.
    let size = SsdSize { bytes_max: 50, context_bytes_max: 50, tenant_bytes_max: 50 };
    let mut again = found(size, without_firsts(&node));
    again.fill("1p", "abcd");
    again.fill("2p", "x");
    again.blocks.keep(again.now_ms, &request("abcd", 1, 9_500)).expect("it can be kept");
    keep(&mut again, "x", 9_500);
    assert_eq!(listed(&again, &["x", "abcd"]), [(1, 9_500), (4, 9_500)]);
}

#[test]
fn a_context_that_is_over_is_over_also_where_it_cannot_be_found() {
    let mut node = node();
    node.fill("1p", "abcd");
    keep(&mut node, "abcd", 9_000);
    keep(&mut node, "ab", 5_000);
    let mut again = found(SIZE, without_firsts(&node));
    again.blocks.expire(5_000);
    again.actions();
    assert_eq!((again.forgotten.len(), again.blocks.ssd_unreached().count()), (0, 3));
    again.fill("1p", "a");
    again.blocks.sink_ahead(again.now_ms);
    write(&mut again);
    assert_eq!(listed(&again, &["abcd"]), [(4, 9_000)]);
}

/// What could not be read may be newer, and say that the last block is not kept or that the first one was removed.
#[test]
fn what_is_kept_is_written_anew_where_a_part_could_not_be_read() {
    let mut node = node();
    node.fill("1p", "abc");
    keep(&mut node, "abc", 9_000);
    let all = restarted_blocks(&node);
    for is_whole in [true, false] {
        let mut again = match is_whole {
            true => self::node(),
            false => found(SIZE, all.clone()),
        };
        if is_whole {
            again.blocks.ssd_ready(SIZE, all.clone());
        }
        let written = |again: &Node| again.blocks.counts().sunk_total;
        let once = if is_whole { 0 } else { 2 };
        keep(&mut again, "abc", 8_000);
        assert_eq!(written(&again), once);
        again.blocks.extend_context(again.now_ms, &name("abc", 1), 9_000).expect("it is there");
        write(&mut again);
        assert_eq!(written(&again), 2 * once);
        assert_eq!(listed(&again, &["abc"]), [(3, 9_000)]);
        again.blocks.ssd_gone();
        again.blocks.ssd_ready(SIZE, all.clone());
        keep(&mut again, "abc", 8_000);
        assert_eq!(written(&again), 2 * once, "all of it could be read");
    }
}
