//! Pages of an engine's own pool: what is announced, copied into slots, filled, and given back.

use std::collections::BTreeMap;

use kvasir_blocks::{
    AbortReason, AttachEpoch, Eviction, Options, PoolError, RiseError, Tier, WritePageError,
};
use kvasir_proto::{BlockKey, SlotIndex};

use crate::checker::tiers;
use crate::support::{EPOCH, Node, chain, chain_in, key, namespace, options, share, sums};

struct Pool {
    node: Node,
    serial: u64,
}

impl Pool {
    fn new(slots: u32, pages: u32) -> Self {
        let mut node = Node::new(slots);
        node.blocks.open_pool(EPOCH, pages);
        Pool { node, serial: 100 }
    }

    /// Says that pages from this one on hold a prompt's blocks from this one on.
    fn hold(&mut self, prompt: &str, first: usize, page: u32) -> Result<(), PoolError> {
        let keys = chain(prompt);
        let parent = first.checked_sub(1).map(|before| keys[before]);
        let pages: Vec<u32> = (page..).take(keys.len() - first).collect();
        let now_ms = self.node.now_ms;
        let of = (namespace(""), parent);
        let held = self.node.blocks.hold_pages(now_ms, EPOCH, of, &keys[first..], &pages);
        self.node.check();
        held
    }

    fn drop(&mut self, handle: u64, pages: &[u32]) -> String {
        self.node
            .blocks
            .drop_pages(self.node.now_ms, (EPOCH, handle), pages)
            .expect("pages to drop");
        self.node.actions()
    }

    /// Fills pages from this one on with the blocks of a prompt from this one on.
    fn fill(&mut self, handle: u64, prompt: &str, first: usize, page: u32) -> String {
        self.serial += 1;
        let keys = chain(prompt);
        let pages: Vec<u32> = (page..).take(keys.len() - first).collect();
        let share = share(&format!("{}s", self.serial));
        let now_ms = self.node.now_ms;
        let asked = self.node.blocks.fill_pages(now_ms, (share, EPOCH, handle), &keys, &pages);
        asked.expect("pages to fill");
        self.node.actions()
    }

    /// The copies into slots that were asked for last have ended.
    fn read(&mut self) -> String {
        for (rise, page) in std::mem::take(&mut self.node.reads) {
            self.node.blocks.risen(self.node.now_ms, rise, Ok(u64::from(page)));
            self.node.check();
        }
        self.node.actions()
    }

    fn written(&mut self, result: Result<(), WritePageError>) -> String {
        let (copy, _) = self.node.writes.remove(0);
        self.node.blocks.page_written(self.node.now_ms, copy, result);
        self.node.actions()
    }

    fn tiers(&self) -> BTreeMap<BlockKey, Tier> {
        tiers(&self.node.blocks.snapshot())
    }

    fn tier(&self, prompt: &str) -> Option<Tier> {
        self.tiers().get(&key(prompt)).copied()
    }
}

#[test]
fn held_blocks_are_announced_and_copied_into_slots_in_the_order_of_their_chain() {
    let mut pool = Pool::new(64, 16);
    pool.hold("abc", 0, 4).expect("held");
    assert_eq!(pool.tier("ab"), Some(Tier::Vram));
    assert_eq!(pool.node.actions(), "");
    assert_eq!(pool.node.reads.iter().map(|(_, page)| *page).collect::<Vec<_>>(), [4, 5, 6]);
    pool.read();
    assert_eq!(pool.node.cached("a ab abc"), "a ab abc");
    // They are in the pool still, which is where they can be had fastest.
    assert_eq!(pool.tier("abc"), Some(Tier::Vram));
    assert_eq!(pool.drop(1, &[6, 5]), "Dropped(1)");
    assert_eq!((pool.tier("abc"), pool.tier("a")), (Some(Tier::Dram), Some(Tier::Vram)));
    pool.node.assert_idle();
    // What a change says is what a snapshot says.
    let changes = pool.node.blocks.changes_since(0, 100).expect("all of them").changes;
    let mut told: BTreeMap<BlockKey, Tier> = BTreeMap::new();
    for change in changes {
        let before = match change.removed {
            true => told.remove(&change.key),
            false => told.insert(change.key, change.tier),
        };
        assert_ne!(before, Some(change.tier).filter(|_| !change.removed), "told twice");
    }
    assert_eq!(told, pool.tiers());
}

#[test]
fn a_page_that_is_read_goes_back_when_that_is_over() {
    let mut pool = Pool::new(64, 16);
    pool.hold("ab", 0, 0).expect("held");
    pool.node.actions();
    assert_eq!(pool.drop(7, &[0, 1, 2]), "");
    assert_eq!(pool.tier("a"), None, "it is announced no more");
    let (first, page) = pool.node.reads.remove(0);
    pool.node.blocks.risen(pool.node.now_ms, first, Ok(page.into()));
    assert_eq!(pool.node.actions(), "", "the other one is still read");
    let again = pool.node.blocks.drop_pages(0, (EPOCH, 8), &[0]).expect_err("it is being dropped");
    assert_eq!(again, PoolError::Taken { page: 0, state: "being dropped" });
    assert_eq!(pool.read(), "Dropped(7)");
    assert_eq!(pool.tier("ab"), Some(Tier::Dram));
    pool.node.assert_idle();
}

#[test]
fn pages_that_are_wanted_back_are_copied_first_if_there_is_room_at_once() {
    // Two copies at once, ahead of need; four times as many under pressure.
    let mut pool = Pool::new(16, 16);
    pool.hold("abcdefghij", 0, 0).expect("held");
    pool.node.actions();
    assert_eq!(pool.node.reads.len(), 2);
    assert_eq!(pool.drop(1, &[2, 3]), "");
    assert_eq!(pool.node.reads.len(), 4);
    // Too far from what is here.
    assert_eq!(pool.drop(2, &[9]), "Dropped(2)");
    assert_eq!(pool.node.blocks.counts().pool_dropped_unsunk_total, 1);
    assert_eq!(pool.read(), "Dropped(1)");
    assert_eq!(pool.node.cached("abc abcd"), "abc abcd");
}

#[test]
fn nothing_that_was_used_since_makes_room() {
    let options = Options { eviction: Eviction::Lru, ..options(8) };
    let mut pool = Pool { node: Node::with(options), serial: 100 };
    pool.node.blocks.open_pool(EPOCH, 4);
    for (at, prompt) in ["a", "b", "c", "d", "e", "f", "g"].into_iter().enumerate() {
        pool.node.fill(&format!("{}p", at + 1), prompt);
    }
    pool.node.now_ms += 10;
    pool.hold("xyz", 0, 0).expect("held");
    pool.node.now_ms += 10;
    // All but the first are used again; one slot is free.
    for (handle, prompt) in (1..).zip(["b", "c", "d", "e", "f", "g"]) {
        let got = pool.node.blocks.get(EPOCH, handle, &chain(prompt)).expect("pinned");
        assert_eq!(got.len(), 1);
    }
    for handle in 1..=6 {
        assert!(pool.node.blocks.unpin(EPOCH, handle));
    }
    pool.node.now_ms += 10;
    pool.node.actions();
    while !pool.node.reads.is_empty() {
        pool.read();
    }
    assert_eq!(pool.node.cached("a b c d e f g x xy xyz"), "b c d e f g x xy");
    pool.node.assert_idle();
    // What has no slot now is copied when there is one.
    pool.node.remove(namespace(""), key("b"));
    pool.node.actions();
    pool.read();
    assert_eq!(pool.node.cached("b xyz"), "xyz");
}

#[test]
fn a_block_waits_for_the_one_before_it_and_is_not_copied_without() {
    let mut pool = Pool::new(64, 16);
    pool.hold("abc", 1, 1).expect("held");
    pool.node.actions();
    assert_eq!(pool.node.reads, [], "the first block is nowhere");
    assert_eq!(pool.tier("abc"), Some(Tier::Vram));
    pool.node.fill("1p", "a");
    // Asked back, it is copied, and what is before it.
    assert_eq!(pool.drop(1, &[2]), "");
    assert_eq!(pool.node.reads.iter().map(|(_, page)| *page).collect::<Vec<_>>(), [1, 2]);
    // The second comes before the first.
    pool.node.reads.reverse();
    let (rise, _) = pool.node.reads.remove(0);
    pool.node.blocks.risen(pool.node.now_ms, rise, Ok(2));
    assert_eq!(pool.node.actions(), "Dropped(1)");
    assert_eq!(pool.node.cached("ab abc"), "");
    pool.read();
    assert_eq!(pool.node.cached("ab abc"), "ab abc");
}

#[test]
fn a_copy_that_fails_leaves_nothing() {
    let mut pool = Pool::new(64, 16);
    pool.hold("a", 0, 0).expect("held");
    pool.node.actions();
    let (rise, _) = pool.node.reads.remove(0);
    pool.node.blocks.risen(pool.node.now_ms, rise, Err(RiseError::Failed));
    assert_eq!(pool.node.actions(), "");
    assert_eq!(pool.node.blocks.counts().pool_sinks_failed_total, 1);
    assert_eq!((pool.node.cached("a"), pool.tier("a")), (String::new(), Some(Tier::Vram)));
    pool.node.assert_idle();
}

#[test]
fn who_wants_a_block_of_the_pool_gets_it_through_a_slot() {
    let mut pool = Pool::new(64, 16);
    pool.hold("abc", 0, 0).expect("held");
    // Before anything was copied.
    let allocated = pool.node.open("1p", "abc", 1);
    assert_eq!((allocated.held_blocks, allocated.promoting_blocks), (3, 3));
    assert_eq!(pool.node.actions(), "");
    assert_eq!(pool.node.reads.len(), 3);
    assert_eq!(pool.read(), "Bound/12(1p)");
    pool.node.release("1p");
    pool.node.actions();
    pool.node.assert_idle();
}

#[test]
fn pages_are_filled_with_what_is_here() {
    let mut pool = Pool::new(64, 16);
    pool.node.fill("1p", "abcd");
    assert_eq!(pool.fill(5, "abcd", 1, 8), "");
    assert_eq!(pool.node.writes.iter().map(|(_, page)| *page).collect::<Vec<_>>(), [8, 9, 10]);
    let held = pool.hold("x", 0, 9).expect_err("it is being filled");
    assert_eq!(held, PoolError::Taken { page: 9, state: "being filled" });
    assert_eq!(pool.written(Ok(())), "");
    assert_eq!(pool.written(Ok(())), "");
    assert_eq!(pool.written(Ok(())), "Filled/3(5)");
    pool.node.assert_idle();
    // Nothing is held by that, and the pages are the engine's.
    assert_eq!(pool.tier("abcd"), Some(Tier::Dram));
    pool.hold("abcd", 1, 8).expect("held");
    assert_eq!(pool.tier("abcd"), Some(Tier::Vram));
    // More than there is, and nothing at all.
    assert_eq!(pool.fill(6, "abcdef", 3, 0), "");
    assert_eq!(pool.written(Ok(())), "Filled/1(6)");
    assert_eq!(pool.fill(7, "zz", 0, 0), "Filled/0(7)");
    assert_eq!(pool.fill(8, "abcdef", 4, 0), "Filled/0(8)");
    pool.node.assert_idle();
}

#[test]
fn a_rotten_slot_ends_a_fill_and_is_dropped() {
    let mut pool = Pool::new(64, 16);
    pool.node.fill("1p", "abc");
    assert_eq!(pool.fill(1, "abc", 0, 0), "");
    assert_eq!(pool.written(Ok(())), "");
    assert_eq!(pool.written(Err(WritePageError::Corrupt)), "");
    assert_eq!(pool.node.cached("a ab abc"), "a");
    assert_eq!(pool.written(Ok(())), "Filled/1(1)");
    pool.node.assert_idle();
}

#[test]
fn a_block_that_was_dropped_meanwhile_is_not_copied() {
    let mut pool = Pool::new(16, 16);
    pool.node.fill("1p", "abcd");
    assert_eq!(pool.fill(1, "abcd", 0, 0), "");
    assert_eq!(pool.node.writes.len(), 2, "so many at once");
    let third = pool.node.blocks.block(key("abc")).expect("a cached block");
    let (slot, generation) = (third.slot, third.generation);
    assert_eq!(pool.node.blocks.drop_corrupt(pool.node.now_ms, slot, generation), 2);
    assert_eq!(pool.written(Ok(())), "");
    assert_eq!(pool.written(Ok(())), "Filled/2(1)");
    assert_eq!(pool.node.writes, []);
    pool.node.assert_idle();
}

#[test]
fn a_fill_is_given_up_page_by_page() {
    let mut pool = Pool::new(16, 16);
    pool.node.fill("1p", "abcd");
    assert_eq!(pool.fill(1, "abcd", 0, 0), "");
    assert_eq!(pool.node.writes.len(), 2, "so many at once");
    // One that is written now, and one that is not yet.
    assert_eq!(pool.drop(2, &[1, 2]), "");
    assert_eq!(pool.written(Ok(())), "");
    assert_eq!(pool.written(Ok(())), "Dropped(2) Filled/1(1)");
    pool.node.assert_idle();
    assert_eq!(pool.drop(3, &[0, 1, 2, 3]), "Dropped(3)");
}

#[test]
fn a_page_that_was_given_up_may_be_filled_anew_before_the_first_fill_is_over() {
    let mut pool = Pool::new(16, 16);
    pool.node.fill("1p", "abcd");
    pool.node.fill("2p", "wx");
    pool.fill(1, "abcd", 0, 0);
    assert_eq!(pool.drop(2, &[2]), "Dropped(2)");
    assert_eq!(pool.fill(3, "w", 0, 2), "");
    let written = |pool: &Pool| pool.node.writes.iter().map(|(_, page)| *page).collect::<Vec<_>>();
    assert_eq!(written(&pool), [0, 1], "so many at once");
    assert_eq!(pool.written(Ok(())), "");
    assert_eq!(pool.written(Ok(())), "Filled/2(1)", "and no others, though it is the same page");
    assert_eq!(written(&pool), [2]);
    assert_eq!(pool.drop(4, &[2]), "", "the second one fills it still");
    assert_eq!(pool.written(Ok(())), "Dropped(4) Filled/0(3)");
    assert_eq!(pool.drop(5, &[0, 1, 2, 3]), "Dropped(5)");
    pool.node.assert_idle();
}

#[test]
fn pages_of_a_share_are_named_late() {
    let mut pool = Pool::new(64, 16);
    pool.node.open("7d", "abc", 1);
    // Before anything has come; the last page is not full.
    pool.node.blocks.fill_from_share((share("7d"), 1), (EPOCH, 5), &[8, 9, 10]).expect("pages");
    assert_eq!((pool.node.actions(), pool.node.writes.len()), (String::new(), 0));
    pool.node.blocks.arrived(pool.node.now_ms, share("7d"), sums(4)).expect("settled");
    assert_eq!(pool.node.actions(), "");
    assert_eq!(pool.node.writes.iter().map(|(_, page)| *page).collect::<Vec<_>>(), [8, 9, 10]);
    // A release waits for the copies.
    pool.node.release("7d");
    assert_eq!((pool.written(Ok(())), pool.written(Ok(()))), (String::new(), String::new()));
    assert_eq!(pool.written(Ok(())), "Filled/3(5) Released(7d)");
    pool.node.assert_idle();
    // After it; and what is to be computed is not there.
    pool.node.open("8p", "abcd", 1);
    pool.node.blocks.fill_from_share((share("8p"), 2), (EPOCH, 6), &[0, 1]).expect("pages");
    pool.node.actions();
    assert_eq!(pool.written(Ok(())), "Filled/1(6)");
    let refused = pool.node.blocks.fill_from_share((share("8p"), 4), (EPOCH, 6), &[0, 1]);
    assert_eq!(refused, Err(PoolError::NotOfShare { pages: 5 }));
    pool.node.release("8p");
    pool.node.blocks.fill_from_share((share("8p"), 0), (EPOCH, 7), &[0]).expect("pages");
    assert_eq!(pool.node.actions(), "Released(8p) Filled/0(7)");
    pool.node.assert_idle();
}

#[test]
fn a_share_that_is_aborted_ends_when_no_copy_reads_it() {
    let mut pool = Pool::new(64, 16);
    pool.node.fill("1p", "ab");
    pool.node.open("7p", "ab", 1);
    pool.node.blocks.fill_from_share((share("7p"), 0), (EPOCH, 5), &[0, 1]).expect("pages");
    pool.node.actions();
    assert_eq!(pool.node.writes.len(), 2);
    pool.node.blocks.abort(pool.node.now_ms, share("7p"), AbortReason::PeerLost);
    assert_eq!(pool.node.actions(), "StopEngine(7p) StopPush(7p)");
    pool.node.blocks.push_stopped(pool.node.now_ms, share("7p"));
    pool.node.release("7p");
    assert_eq!(pool.node.actions(), "");
    assert_eq!(pool.node.blocks.counts().pins, 2, "the copies read them");
    assert_eq!(pool.written(Ok(())), "");
    assert_eq!(pool.written(Ok(())), "Filled/2(5) Aborted(7p)");
    pool.node.assert_idle();
}

#[test]
fn nothing_more_of_an_aborted_share_is_copied() {
    // Two copies at once.
    let mut pool = Pool::new(16, 16);
    pool.node.fill("1p", "abcd");
    pool.node.open("7p", "abcd", 1);
    pool.node.blocks.fill_from_share((share("7p"), 0), (EPOCH, 5), &[0]).expect("pages");
    pool.node.blocks.fill_from_share((share("7p"), 1), (EPOCH, 6), &[1, 2, 3]).expect("pages");
    pool.node.actions();
    assert_eq!(pool.node.writes.len(), 2, "one of each");
    pool.node.blocks.abort(pool.node.now_ms, share("7p"), AbortReason::PeerLost);
    pool.node.actions();
    assert_eq!(pool.written(Ok(())), "Filled/1(5)");
    assert_eq!(pool.node.writes.len(), 1, "the other one's");
    pool.node.blocks.push_stopped(pool.node.now_ms, share("7p"));
    pool.node.release("7p");
    assert_eq!(pool.written(Ok(())), "Filled/1(6) Aborted(7p)");
    pool.node.assert_idle();
}

#[test]
fn an_engine_that_is_gone_leaves_nothing_announced_and_frees_all() {
    let mut pool = Pool::new(64, 16);
    pool.node.fill("1p", "wxyz");
    pool.hold("abc", 0, 0).expect("held");
    pool.fill(1, "wxyz", 0, 8);
    assert_eq!((pool.node.reads.len(), pool.node.writes.len()), (3, 4));
    pool.drop(2, &[0]);
    pool.node.blocks.engine_gone(pool.node.now_ms, EPOCH);
    assert_eq!(pool.node.actions(), "");
    assert_eq!((pool.tier("b"), pool.tier("wxyz")), (None, Some(Tier::Dram)));
    // Another one comes while copies are under way.
    pool.node.blocks.open_pool(AttachEpoch(2), 4);
    let reset = pool.node.blocks.reset(8, 4).expect_err("copies are under way");
    assert_eq!(reset.shares, 1);
    assert_eq!(pool.read(), "");
    assert_eq!(pool.node.cached("a ab abc"), "", "nobody knows what became of those pages");
    while !pool.node.writes.is_empty() {
        assert_eq!(pool.written(Ok(())), "");
    }
    pool.node.assert_idle();
}

#[test]
fn what_an_engine_cannot_mean_is_refused() {
    let mut pool = Pool::new(64, 4);
    let of = (namespace(""), None);
    let (blocks, keys) = (&mut pool.node.blocks, chain("ab"));
    let refused = blocks.hold_pages(0, EPOCH, of, &keys, &[1]).expect_err("a page is missing");
    assert_eq!(refused, PoolError::Count { keys: 2, pages: 1 });
    let refused = blocks.hold_pages(0, EPOCH, of, &keys, &[3, 4]).expect_err("no such page");
    assert_eq!(refused, PoolError::NoSuchPage { page: 4, pages: 4 });
    blocks.hold_pages(0, EPOCH, of, &keys, &[0, 1]).expect("held");
    // Known after another block, or in another namespace.
    let refused = blocks.hold_pages(0, EPOCH, of, &keys[1..], &[2]).expect_err("another parent");
    assert_eq!(refused, PoolError::OtherBlock(keys[1]));
    let other = (namespace("tenant"), Some(keys[0]));
    let refused = blocks.hold_pages(0, EPOCH, other, &chain_in("tenant", "b"), &[2]);
    assert_eq!(refused, Err(PoolError::OtherBlock(keys[0])));
    let fills = (share("9s"), EPOCH, 1);
    let refused = blocks.fill_pages(0, fills, &keys, &[2, 3, 0]).expect_err("too many pages");
    assert_eq!(refused, PoolError::Taken { page: 0, state: "held" });
    let refused = blocks.fill_pages(0, fills, &keys[..1], &[2, 3]).expect_err("too many pages");
    assert_eq!(refused, PoolError::Count { keys: 1, pages: 2 });
    pool.node.fill("1p", "q");
    assert_eq!(pool.node.slot("q"), SlotIndex(0));
    let (blocks, q) = (&mut pool.node.blocks, chain("q"));
    let refused = blocks.hold_pages(0, EPOCH, (namespace(""), Some(keys[0])), &q, &[2]);
    assert_eq!(refused, Err(PoolError::OtherBlock(q[0])));
    let refused = Node::new(8).blocks.drop_pages(0, (EPOCH, 1), &[0]).expect_err("no pool");
    assert_eq!(refused, PoolError::NoPool);
}
