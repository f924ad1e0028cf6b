//! Pins of engines, corrupt copies, events, another layout.

use kvasir_blocks::{AttachEpoch, BlockChange, Busy, Commit, GetError, Options, Tier};
use kvasir_proto::Generation;

use crate::support::{EPOCH, Node, chain, chain_in, key, namespace, options, request, share, sums};

#[test]
fn an_engine_pins_the_longest_prefix_by_a_name_of_its_own() {
    let mut node = Node::new(8);
    node.fill("1p", "ab");
    let slots = [node.slot("a"), node.slot("ab")];
    assert_eq!(node.blocks.get(EPOCH, 1, &chain("abc")), Ok(slots.to_vec()));
    assert_eq!(node.blocks.get(EPOCH, 1, &chain("abc")), Err(GetError::HandleInUse));
    assert_eq!(node.blocks.get(AttachEpoch(2), 1, &chain("a")), Ok(slots[..1].to_vec()));
    assert_eq!(node.blocks.get(EPOCH, 2, &chain("x")), Ok(vec![]));
    node.check();
    let counts = node.blocks.counts();
    assert_eq!((counts.get_pins, counts.pins, counts.evictable), (3, 3, 0));
    assert!(node.blocks.unpin(EPOCH, 1));
    assert!(!node.blocks.unpin(EPOCH, 1));
    assert!(!node.blocks.unpin(EPOCH, 2), "an empty answer holds nothing");
    assert!(node.blocks.unpin(AttachEpoch(2), 1));
    node.assert_idle();
}

#[test]
fn the_keys_of_another_namespace_pin_nothing_even_where_they_go_on_from_a_chain_that_is_here() {
    let mut node = Node::new(8);
    node.fill("1p", "abc");
    let tenant = chain_in("tenant", "abc");
    assert_eq!(node.blocks.get(EPOCH, 1, &tenant), Ok(vec![]));
    let mixed = [&chain("ab")[..], &tenant[2..]].concat();
    assert_eq!(node.blocks.get(EPOCH, 2, &mixed).expect("to pin").len(), 2);
    // Nor does a block of another namespace ever follow one of this: it would be found here.
    let mut lying = request("2p", "abcd", 1);
    lying.namespace = namespace("tenant");
    node.allocate(&lying).expect("there is room");
    node.blocks.bind(share("2p"), EPOCH).expect("to bind");
    for page in 0..4 {
        let _ = node.blocks.commit_page(share("2p"), page, 1);
    }
    assert_eq!(node.blocks.get(EPOCH, 3, &chain("abcd")).expect("to pin").len(), 3);
    node.check();
}

#[test]
fn the_pins_of_one_engine_are_bounded() {
    let mut node = Node::with(Options { get_pins_max: 3, ..options(8) });
    node.fill("1p", "ab");
    assert!(node.blocks.get(EPOCH, 1, &chain("ab")).is_ok());
    assert_eq!(node.blocks.get(EPOCH, 2, &chain("ab")), Err(GetError::TooManyPins(3)));
    assert_eq!(node.blocks.counts().get_pins, 2);
    assert!(node.blocks.get(AttachEpoch(2), 2, &chain("ab")).is_ok());
    assert!(node.blocks.get(EPOCH, 3, &chain("a")).is_ok());
    assert!(node.blocks.unpin(EPOCH, 1));
    assert!(node.blocks.get(EPOCH, 4, &chain("ab")).is_ok());
    node.check();
}

fn generation(node: &Node, prompt: &str) -> Generation {
    node.blocks.block(key(prompt)).expect("a cached block").generation
}

#[test]
fn a_corrupt_copy_leaves_the_index_with_all_that_follows_it() {
    let mut node = Node::new(16);
    node.fill("1p", "abc");
    node.fill("2p", "abd");
    node.blocks.get(EPOCH, 1, &chain("abc")).expect("to pin");
    let (slot, at) = (node.slot("ab"), generation(&node, "ab"));
    let sequence = node.blocks.sequence();
    assert_eq!(node.blocks.drop_corrupt(0, slot, Generation(at.0 + 1)), 0, "another generation");
    assert_eq!(node.blocks.drop_corrupt(0, slot, at), 3);
    node.check();
    assert_eq!(node.cached("a ab abc abd"), "a");
    let changes = node.blocks.changes_since(sequence, 9).expect("they are in the log").changes;
    assert!(changes.iter().all(|change| change.removed));
    assert_eq!(changes.len(), 3);
    assert_eq!(changes[2].key, key("ab"), "children first");
    // The engine still reads two of them.
    let counts = node.blocks.counts();
    assert_eq!((counts.leaving, counts.committed, counts.dropped_total), (2, 1, 3));
    assert_eq!(node.blocks.checksum_of(slot), None);
    assert_eq!(node.blocks.generation(slot), Some(at));
    assert_eq!(node.blocks.drop_corrupt(0, slot, at), 0, "again");
    node.blocks.unpin(EPOCH, 1);
    assert_eq!(node.blocks.generation(slot), Some(Generation(at.0 + 1)));
    node.assert_idle();
}

#[test]
fn shares_that_read_a_corrupt_copy_are_aborted_but_not_its_source() {
    let mut node = Node::new(16);
    node.fill("1p", "ab");
    node.open("2p", "abc", 1);
    node.open("3s", "ab", 0);
    node.open("4p", "xy", 1);
    node.open("5p", "a", 1);
    let (slot, at) = (node.slot("ab"), generation(&node, "ab"));
    assert_eq!(node.blocks.drop_corrupt(0, slot, at), 1);
    assert_eq!(node.actions(), "StopEngine(2p)");
    node.release("2p");
    node.release("3s");
    node.release("4p");
    node.release("5p");
    assert_eq!(node.actions(), "Aborted(2p) Released(3s) Released(4p) Released(5p)");
    node.assert_idle();
}

#[test]
fn nothing_is_committed_after_a_block_that_was_dropped() {
    let mut node = Node::new(16);
    node.open("1p", "abc", 1);
    node.commit("1p", 0);
    node.open("2p", "abc", 1);
    assert_eq!(node.blocks.bind(share("2p"), EPOCH), Err(kvasir_blocks::BindError::Taken));
    // A reader that is released already and pushes is aborted too.
    node.blocks.read_begin(share("2p")).expect("open");
    node.release("2p");
    let (slot, at) = (node.slot("a"), generation(&node, "a"));
    assert_eq!(node.blocks.drop_corrupt(0, slot, at), 1);
    assert_eq!(node.actions(), "StopEngine(1p) StopPush(2p)");
    // The block comes back in another slot; a chain on the old copy does not continue it.
    node.fill("3p", "a");
    assert_ne!(node.slot("a"), slot);
    assert!(node.blocks.commit_page(share("1p"), 1, 0).is_err());
    assert_eq!(node.cached("a ab"), "a");
}

#[test]
fn a_source_share_can_tell_that_a_block_it_pinned_was_dropped() {
    let mut node = Node::new(8);
    node.fill("1p", "a");
    let source = node.open("2s", "a", 0);
    node.blocks.drop_corrupt(0, source.pages[0], generation(&node, "a"));
    assert_eq!(node.blocks.checksum_of(source.pages[0]), None);
    node.release("2s");
    assert_eq!(node.actions(), "Released(2s)");
    node.assert_idle();
}

#[test]
fn a_snapshot_and_the_changes_after_it_give_the_same_keys() {
    let mut node = Node::with(Options { event_log_max: 6, ..options(5) });
    let start = node.blocks.snapshot();
    assert_eq!((start.sequence, start.keys.len()), (0, 0));
    node.fill("1p", "ab");
    let changes = node.blocks.changes_since(0, 9).expect("a log that begins here");
    let added = |prompt| BlockChange { key: key(prompt), removed: false, tier: Tier::Dram };
    assert_eq!((changes.first_sequence, changes.changes), (1, vec![added("a"), added("ab")]));
    node.fill("2p", "xyz");
    // Three were free: the fourth page cost "ab".
    let changes = node.blocks.changes_since(2, 9).expect("a log that reaches back").changes;
    assert_eq!(changes.iter().filter(|change| change.removed).count(), 1);
    assert_eq!(node.blocks.sequence(), 6);
    assert!(node.blocks.changes_since(0, 9).is_some());
    node.fill("3p", "q");
    assert_eq!(node.blocks.changes_since(0, 9), None, "the log has six");
    assert_eq!(node.blocks.changes_since(99, 9), None, "of another incarnation");
    let mut keys = node.blocks.snapshot().keys;
    keys.sort();
    let mut listed: Vec<_> = node.blocks.blocks().map(|block| block.key).collect();
    listed.sort();
    assert_eq!(keys, listed);
}

#[test]
fn another_layout_waits_until_nothing_is_held_and_then_forgets_every_block() {
    let mut node = Node::new(8);
    node.fill("1p", "ab");
    let sequence = node.blocks.sequence();
    node.open("2s", "ab", 0);
    assert_eq!(node.blocks.reset(4, 8), Err(Busy { shares: 1, pins: 2 }));
    node.release("2s");
    node.blocks.get(EPOCH, 1, &chain("a")).expect("to pin");
    assert_eq!(node.blocks.reset(4, 8), Err(Busy { shares: 0, pins: 1 }));
    node.blocks.engine_gone(0, EPOCH);
    node.actions();
    let slot = node.slot("ab");
    let before = node.blocks.generation(slot).expect("a slot");
    assert_eq!(node.blocks.reset(4, 8), Ok(()));
    node.assert_idle();
    assert_eq!(node.blocks.counts().free, 4);
    let changes = node.blocks.changes_since(sequence, 9).expect("they are in the log").changes;
    assert_eq!(
        changes.iter().map(|c| (c.key, c.removed)).collect::<Vec<_>>(),
        [(key("ab"), true), (key("a"), true)]
    );
    assert!(node.blocks.generation(slot).is_some_and(|now| now > before), "never seen before");
    // Ended shares are still known; new ones count in the new unit.
    assert!(node.allocate(&request("1p", "ab", 1)).is_err());
    let mut wide = request("3p", "a", 0);
    wide.prompt_tokens = 8;
    assert_eq!(node.allocate(&wide).map(|got| got.pages.len()), Ok(1));
}

#[test]
fn a_block_says_where_it_is_and_who_holds_it() {
    let mut node = Node::new(8);
    node.fill("1p", "a");
    node.open("2d", "ab", 0);
    node.blocks.arrived(0, share("2d"), sums(1)).expect("all arrived");
    let block = node.blocks.block(key("ab")).expect("it is cached");
    assert_eq!((block.pins, block.checksum), (1, 100));
    assert_eq!(block.namespace, crate::support::namespace(""));
    assert_eq!(node.blocks.page_slot(share("2d"), 1), Some((block.slot, block.generation)));
    assert_eq!(node.blocks.commit_page(share("2d"), 1, 0), Ok(Commit::Indexed));
    assert_eq!(node.blocks.blocks().count(), 2);
    let view = node.blocks.share(share("2d")).expect("it is open");
    assert!(view.settled && view.bound_to == Some(EPOCH) && view.slots.len() == 2);
}
