//! Two engines with pages of their own: each has to do with its own pool, and what both hold is one block.

use std::collections::BTreeMap;

use kvasir_blocks::{AttachEpoch, PoolError, Tier};
use kvasir_proto::BlockKey;

use crate::checker::tiers;
use crate::support::{EPOCH, Node, chain, chain_in, key, namespace, share};

const OTHER: AttachEpoch = AttachEpoch(2);

fn two(slots: u32, pages: u32) -> Node {
    let mut node = Node::new(slots);
    node.blocks.open_pool(EPOCH, pages);
    node.blocks.open_pool(OTHER, pages);
    node
}

/// Pages from this one on hold a prompt's blocks from this one on.
fn hold(
    node: &mut Node,
    epoch: AttachEpoch,
    prompt: &str,
    first: usize,
    page: u32,
) -> Result<(), PoolError> {
    let keys = chain(prompt);
    let parent = first.checked_sub(1).map(|before| keys[before]);
    let pages: Vec<u32> = (page..).take(keys.len() - first).collect();
    let of = (namespace(""), parent);
    let held = node.blocks.hold_pages(node.now_ms, epoch, of, &keys[first..], &pages);
    node.check();
    held
}

/// All copies into slots that are asked for end.
fn read_all(node: &mut Node) {
    node.actions();
    while !node.reads.is_empty() {
        for (rise, page) in std::mem::take(&mut node.reads) {
            node.blocks.risen(node.now_ms, rise, Ok(page.into()));
        }
        node.actions();
    }
}

fn tier(node: &Node, prompt: &str) -> Option<Tier> {
    tiers(&node.blocks.snapshot()).get(&key(prompt)).copied()
}

#[test]
fn a_block_that_two_pools_hold_is_announced_once_and_until_the_last_has_let_go() {
    let mut node = two(64, 8);
    hold(&mut node, EPOCH, "ab", 0, 0).expect("held");
    hold(&mut node, OTHER, "abc", 0, 0).expect("held");
    read_all(&mut node);
    assert_eq!(node.cached("a ab abc"), "a ab abc", "the chain is made of both pools");
    node.blocks.drop_pages(node.now_ms, (EPOCH, 1), &[0, 1]).expect("its pages");
    assert_eq!(node.actions(), "Dropped(1)");
    assert_eq!(tier(&node, "ab"), Some(Tier::Vram), "the other one has it");
    node.blocks.engine_gone(node.now_ms, OTHER);
    assert_eq!((tier(&node, "ab"), tier(&node, "abc")), (Some(Tier::Dram), Some(Tier::Dram)));
    let mut told: BTreeMap<BlockKey, Tier> = BTreeMap::new();
    for change in node.blocks.changes_since(0, 100).expect("all of them").changes {
        let before = told.insert(change.key, change.tier);
        assert!(!change.removed && before != Some(change.tier), "told twice: {change:?}");
    }
    assert_eq!(told, tiers(&node.blocks.snapshot()));
    node.assert_idle();
}

#[test]
fn what_only_the_pool_of_one_engine_has_rises_from_there_for_the_other() {
    let mut node = two(64, 8);
    hold(&mut node, EPOCH, "ab", 0, 3).expect("held");
    let keys = chain("ab");
    let filled = node.blocks.fill_pages(0, (share("9s"), OTHER, 7), &keys, &[5, 6]);
    filled.expect("pages of its own");
    assert_eq!(node.actions(), "");
    for (rise, page) in std::mem::take(&mut node.reads) {
        assert_eq!(node.blocks.rises_from(rise), Some(EPOCH));
        assert!([3, 4].contains(&page), "{page}");
        node.blocks.risen(0, rise, Ok(page.into()));
    }
    let mut said = node.actions();
    while let Some((copy, page)) = node.writes.pop() {
        assert!([5, 6].contains(&page), "{page}");
        node.blocks.page_written(0, copy, Ok(()));
        said.push_str(&node.actions());
    }
    assert_eq!(said, "Filled/2(7)");
    node.assert_idle();
}

#[test]
fn an_engine_that_is_gone_ends_nothing_of_the_other() {
    let mut node = two(64, 8);
    node.fill("1p", "wxyz");
    hold(&mut node, OTHER, "ab", 0, 0).expect("held");
    let keys = chain("wxyz");
    node.blocks.fill_pages(0, (share("8s"), EPOCH, 3), &keys, &[0, 1]).expect("pages");
    node.blocks.fill_pages(0, (share("9s"), OTHER, 4), &keys, &[6, 7]).expect("pages");
    node.actions();
    node.blocks.engine_gone(node.now_ms, EPOCH);
    read_all(&mut node);
    let mut said = String::new();
    while let Some((copy, _)) = node.writes.pop() {
        node.blocks.page_written(0, copy, Ok(()));
        said.push_str(&node.actions());
    }
    assert_eq!(said, "Filled/2(4)", "its own fill is over as ever, and the dead one's is nobody's");
    assert_eq!((node.cached("a ab"), tier(&node, "b")), ("a ab".to_owned(), None));
    assert_eq!(tier(&node, "ab"), Some(Tier::Vram));
    node.assert_idle();
}

#[test]
fn an_engine_has_only_to_do_with_its_own_pages() {
    let mut node = two(64, 2);
    hold(&mut node, EPOCH, "ab", 0, 0).expect("held");
    // The same pages of the other one are free.
    node.blocks.drop_pages(0, (OTHER, 1), &[0]).expect("its own page, with nothing in it");
    assert_eq!(node.actions(), "Dropped(1)");
    assert_eq!(tier(&node, "a"), Some(Tier::Vram));
    let of = (namespace("tenant"), Some(key("a")));
    let refused = node.blocks.hold_pages(0, OTHER, of, &chain_in("tenant", "b"), &[0]);
    assert_eq!(refused, Err(PoolError::OtherBlock(key("a"))), "a block is one in all pools");
    let gone = AttachEpoch(3);
    assert_eq!(node.blocks.drop_pages(0, (gone, 1), &[0]), Err(PoolError::NoPool));
    read_all(&mut node);
    node.assert_idle();
}
