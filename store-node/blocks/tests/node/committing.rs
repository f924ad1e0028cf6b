//! Sealing pages under keys.

use kvasir_blocks::{Commit, GrowError, ShareError};

use crate::support::{EPOCH, Node, chain, key, namespace, request, share, sums};

#[test]
fn committed_blocks_are_found_by_the_next_request_and_stay_after_the_release() {
    let mut node = Node::new(8);
    node.open("1p", "ab", 1);
    assert_eq!(node.commit("1p", 0), Commit::Indexed);
    // While the first still computes the rest.
    assert_eq!(node.open("2p", "ab", 1).held_blocks, 1);
    assert_eq!(node.commit("1p", 1), Commit::Indexed);
    assert_eq!(node.commit("1p", 1), Commit::Indexed, "again");
    node.release("1p");
    assert_eq!(node.actions(), "Released(1p)");
    assert_eq!(node.open("3p", "abc", 1).held_blocks, 2);
    assert_eq!(node.blocks.checksum_of(node.slot("ab")), Some(1));
}

#[test]
fn a_key_that_is_there_keeps_its_first_copy() {
    let mut node = Node::new(8);
    node.open("1p", "ab", 1);
    node.open("2p", "ab", 1);
    node.commit("1p", 0);
    let kept = node.slot("a");
    assert_eq!(node.commit("2p", 0), Commit::Duplicate { kept });
    assert_eq!(node.commit("2p", 0), Commit::Duplicate { kept }, "again");
    // The second share commits on, after the copy of the first.
    node.release("1p");
    assert_eq!(node.commit("2p", 1), Commit::Indexed);
    assert_eq!(node.slot("a"), kept);
    let own = node.blocks.page_slot(share("2p"), 0).expect("a page").0;
    assert_ne!(own, kept);
    // The kept copy cannot be evicted under the chain that was built on it.
    assert_eq!(node.blocks.block(key("a")).map(|block| block.pins), Some(1));
    assert_eq!(node.blocks.counts().duplicates_total, 1);
    node.release("2p");
    node.actions();
    node.assert_idle();
    assert_eq!(node.blocks.counts().free, 6);
}

#[test]
fn a_page_after_one_that_nobody_can_find_stays_private() {
    let mut node = Node::new(8);
    node.open("1p", "abc", 1);
    assert_eq!(node.commit("1p", 1), Commit::NoParent, "out of order");
    assert!(!node.has("ab"));
    node.commit("1p", 0);
    assert_eq!(node.commit("1p", 1), Commit::Indexed);
    node.release("1p");
    assert_eq!(node.cached("a ab abc"), "a ab");
}

#[test]
fn only_the_sharer_that_works_on_a_full_page_may_commit_it() {
    let mut node = Node::new(16);
    node.allocate(&request("1p", "ab", 1)).expect("there is room");
    let check = |node: &mut Node, name: &str, page, want: &str| {
        let before = node.blocks.snapshot();
        let refused = node.blocks.commit_page(share(name), page, 0).expect_err("refused");
        assert!(refused.to_string().contains(want), "{name} page {page}: {refused}");
        assert_eq!(node.blocks.snapshot(), before);
        node.check();
    };
    check(&mut node, "1p", 0, "no engine has bound the share");
    node.blocks.bind(share("1p"), EPOCH).expect("to bind");
    check(&mut node, "1p", 2, "the page has no key");
    check(&mut node, "1p", 9, "the page has no key");
    check(&mut node, "2p", 0, "no such share");
    // The decode engine may not seal what another node still writes.
    node.open("3d", "ab", 1);
    check(&mut node, "3d", 0, "remote writer may still write");
    node.blocks.arrived(0, share("3d"), sums(3)).expect("all arrived");
    node.release("3d");
    check(&mut node, "3d", 0, "the share has ended");
    node.blocks.abort(0, share("1p"), kvasir_blocks::AbortReason::LeaseOver);
    check(&mut node, "1p", 0, "ending");
}

#[test]
fn the_answers_blocks_are_committed_under_keys_the_engine_knows() {
    let mut node = Node::new(16);
    node.open("1p", "a", 1);
    node.commit("1p", 0);
    let grown = node.blocks.grow(share("1p"), 2).expect("to grow");
    let mut extra = |page, prompt: &str| {
        let done = node.blocks.commit_extra(share("1p"), page, key(prompt), 7);
        node.check();
        done
    };
    assert_eq!(extra(2, "abc"), Ok(Commit::NoParent), "out of order");
    assert_eq!(extra(1, "ab"), Ok(Commit::Indexed));
    assert_eq!(extra(1, "ab"), Ok(Commit::Indexed), "again");
    assert_eq!(extra(1, "ax"), Err(ShareError::Refused("the page has another key")));
    assert_eq!(extra(0, "x"), Err(ShareError::Refused("the page has another key")));
    assert_eq!(extra(2, "abc"), Ok(Commit::Indexed));
    assert_eq!(extra(4, "abcd"), Err(ShareError::Refused("the share has no such page")));
    assert_eq!(node.slot("abc"), grown[0]);
    node.release("1p");
    assert_eq!(node.open("2p", "abcx", 1).held_blocks, 3);
}

#[test]
fn a_page_of_the_prompt_is_committed_under_the_key_it_was_allocated_with() {
    let mut node = Node::new(8);
    node.open("1p", "ab", 1);
    let refused = node.blocks.commit_extra(share("1p"), 0, key("x"), 0);
    assert_eq!(refused, Err(ShareError::Refused("the page has another key")));
    assert_eq!(node.cached("a x"), "");
    let same = node.blocks.commit_extra(share("1p"), 0, key("a"), 0);
    assert_eq!(same, Ok(Commit::Indexed));
    node.check();
}

#[test]
fn a_key_that_belongs_elsewhere_is_refused() {
    let mut node = Node::new(16);
    node.fill("1p", "ab");
    // A chain whose second key is that of another chain's second block.
    let mut lying = request("2p", "xy", 1);
    lying.keys[1] = key("ab");
    node.allocate(&lying).expect("there is room");
    node.blocks.bind(share("2p"), EPOCH).expect("to bind");
    node.commit("2p", 0);
    let refused = node.blocks.commit_page(share("2p"), 1, 0);
    assert_eq!(refused, Err(ShareError::Refused("the key belongs to another block")));
    // The same keys in another namespace.
    let mut lying = request("3p", "ab", 1);
    lying.namespace = namespace("tenant");
    node.allocate(&lying).expect("there is room");
    node.blocks.bind(share("3p"), EPOCH).expect("to bind");
    let refused = node.blocks.commit_page(share("3p"), 0, 0);
    assert_eq!(refused, Err(ShareError::Refused("the key belongs to another block")));
    node.check();
    // A chain that repeats a key does not follow itself.
    let mut lying = request("4p", "qq", 1);
    lying.keys[1] = lying.keys[0];
    node.allocate(&lying).expect("there is room");
    node.blocks.bind(share("4p"), EPOCH).expect("to bind");
    node.commit("4p", 0);
    let refused = node.blocks.commit_page(share("4p"), 1, 0);
    assert_eq!(refused, Err(ShareError::Refused("the key belongs to another block")));
    node.check();
}

#[test]
fn growing_takes_all_or_nothing_and_evicts_if_it_must() {
    let mut node = Node::new(5);
    node.fill("1p", "abc");
    node.open("2p", "", 1);
    let no_space = Err(GrowError::NoSpace { available: 4, wanted: 5 });
    assert_eq!(node.blocks.grow(share("2p"), 5), no_space);
    assert_eq!(node.cached("a ab abc"), "a ab abc");
    assert_eq!(node.blocks.grow(share("2p"), 2).map(|slots| slots.len()), Ok(2));
    assert_eq!(node.cached("a ab abc"), "a ab");
    node.check();
    let unbound = Err(ShareError::Refused("no engine has bound the share").into());
    node.allocate(&request("3s", "a", 0)).expect("there is room");
    assert_eq!(node.blocks.grow(share("3s"), 1), unbound);
    assert_eq!(node.blocks.grow(share("4p"), 1), Err(ShareError::Unknown.into()));
}

#[test]
fn a_slot_that_was_freed_has_another_generation() {
    let mut node = Node::new(1);
    node.fill("1p", "");
    let slot = kvasir_proto::SlotIndex(0);
    let first = node.blocks.generation(slot);
    node.open("2p", "a", 0);
    node.commit("2p", 0);
    node.release("2p");
    assert_eq!(node.blocks.generation(slot), first, "committed, not freed");
    node.open("3p", "", 1);
    assert!(node.blocks.generation(slot) > first, "evicted");
    assert_eq!(node.blocks.generation(kvasir_proto::SlotIndex(1)), None);
}

#[test]
fn commits_may_follow_the_release_while_a_push_holds_the_pages() {
    let mut node = Node::new(8);
    node.open("1p", "a", 1);
    node.blocks.read_begin(share("1p")).expect("open");
    node.release("1p");
    assert_eq!(node.commit("1p", 0), Commit::Indexed);
    node.blocks.read_end(0, share("1p")).expect("a read");
    assert_eq!(node.actions(), "Released(1p)");
    assert_eq!(node.cached("a"), "a");
    assert_eq!(chain("a").len(), 1);
}
