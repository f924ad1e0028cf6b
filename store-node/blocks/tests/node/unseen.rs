//! Objects that are put while it is not known what the SSD or the object store has under their names.

use kvasir_blocks::{BucketOptions, Commit, Options, SsdBlock, Tier};
use kvasir_proto::BlockKey;

use crate::objects::{
    SIZE, ask_to_keep, at, commit, end, extent, find, node_that_keeps, object, put, release,
    reserve, sent,
};
use crate::support::{Node, namespace, options};

#[test]
fn what_was_put_before_the_ssd_was_known_is_not_taken_for_what_it_has_under_that_name() {
    let mut node = Node::with(Options { demote_ahead_percent: 0, ..options(4) });
    node.blocks.expect_ssd();
    node.blocks.set_extents(7, 10);
    // All but the last four make room meanwhile.
    put(&mut node, 1, &[1, 2]);
    put(&mut node, 2, &[3, 4, 5, 6]);
    let all =
        [1, 2, 3, 4, 7, 8].map(|name| extent(name, [2, 4, 8].contains(&name).then_some(9_000)));
    node.blocks.ssd_ready(SIZE, all.to_vec());
    node.check();
    let (dram, ssd) = (Some(Tier::Dram), Some(Tier::Ssd));
    // What is kept stays, and so does what nobody has put anything for.
    assert_eq!(find(&node, &[1, 2, 3, 4, 5, 6]), [None, ssd, dram, ssd, dram, dram]);
    assert_eq!(find(&node, &[7, 8]), [ssd, ssd]);
    assert_eq!(node.blocks.counts().dropped_total, 1, "whoever holds it learns that");
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let erased: Vec<BlockKey> = node.erased.iter().map(|(_, key)| *key).collect();
    assert_eq!(erased, [object(1), object(3)]);
    for (sink, _) in std::mem::take(&mut node.erased) {
        node.blocks.sunk(node.now_ms, sink, Ok(()));
    }
    node.check();
    // Nothing is remembered of what was put when it is known.
    node.blocks.ssd_ready(SIZE, vec![extent(1, None)]);
    assert_eq!(find(&node, &[1]), [ssd]);
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    assert!(node.erased.is_empty(), "{:?}", node.erased);
}

#[test]
fn what_is_put_while_the_ssd_fails_is_not_taken_for_what_it_has_under_that_name() {
    let mut node = node_that_keeps();
    node.blocks.ssd_ready(SIZE, vec![extent(1, None), extent(2, None)]);
    node.blocks.ssd_gone();
    assert_eq!(find(&node, &[1, 2]), [None, None]);
    put(&mut node, 1, &[1]);
    node.blocks.ssd_ready(SIZE, vec![extent(1, None), extent(2, None)]);
    node.check();
    assert_eq!(find(&node, &[1, 2]), [Some(Tier::Dram), Some(Tier::Ssd)]);
    reserve(&mut node, 2, &[10, 11, 12, 13]);
    assert_eq!(find(&node, &[1, 2]), [None, Some(Tier::Ssd)]);
}

#[test]
fn what_was_put_while_the_ssd_was_known_stays_there_whatever_is_not_known_of_the_object_store() {
    let bucket = BucketOptions { uploads_max: 1, tenant_bytes_max: 40, ..BucketOptions::default() };
    let mut node = Node::with(Options { bucket, demote_ahead_percent: 0, ..options(8) });
    node.blocks.set_extents(7, 10);
    node.blocks.ssd_ready(SIZE, Vec::new());
    put(&mut node, 1, &[1]);
    ask_to_keep(&mut node, 1);
    let (sink, _) = node.sinks.pop().expect("it is being written");
    node.blocks.sunk(node.now_ms, sink, Ok(()));
    // The log is recovered once more.
    node.blocks.ssd_gone();
    node.blocks.ssd_ready(SIZE, vec![extent(1, Some(9_000))]);
    node.check();
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    assert_eq!((node.erased.len(), node.forgotten.len()), (0, 0));
    assert_eq!(find(&node, &[1]), [Some(Tier::Dram)]);
}

#[test]
fn what_had_made_room_on_the_ssd_and_is_there_again_is_not_taken_for_what_was_put_since() {
    let mut node = node_that_keeps();
    put(&mut node, 1, &[1]);
    node.blocks.ssd_gone();
    node.blocks.ssd_ready(SIZE, vec![extent(1, None)]);
    node.check();
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let erased: Vec<BlockKey> = node.erased.iter().map(|(_, key)| *key).collect();
    assert_eq!(erased, [object(1)]);
    assert_eq!(find(&node, &[1]), [Some(Tier::Dram)]);
}

#[test]
fn what_has_come_from_another_node_before_the_ssd_was_known_is_as_if_it_had_been_put() {
    let mut node = node_that_keeps();
    node.blocks.ssd_gone();
    put(&mut node, 1, &[1]);
    node.blocks.ssd_ready(SIZE, Vec::new());
    node.blocks.ssd_gone();
    node.blocks.object_has_come(namespace("objects"), object(1));
    node.blocks.object_has_come(namespace("objects"), object(2));
    node.blocks.ssd_ready(SIZE, vec![extent(1, None), extent(2, None)]);
    node.check();
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let erased: Vec<BlockKey> = node.erased.iter().map(|(_, key)| *key).collect();
    assert_eq!(erased, [object(1)], "the other one is not here");
}

/// Who keeps it then keeps that, and is told that it was there.
#[test]
fn what_is_being_put_when_the_ssd_becomes_known_makes_way_for_what_is_there() {
    let mut node = node_that_keeps();
    node.blocks.ssd_gone();
    reserve(&mut node, 1, &[1, 2, 3]);
    assert_eq!(commit(&mut node, 1, 2), Ok(Commit::Indexed));
    node.blocks.ssd_ready(SIZE, vec![extent(1, Some(9_000)), extent(2, None)]);
    for page in [0, 1] {
        assert_eq!(commit(&mut node, 1, page), Ok(Commit::OnSsd));
        assert_eq!(commit(&mut node, 1, page), Ok(Commit::OnSsd), "again");
    }
    assert_eq!(commit(&mut node, 1, 2), Ok(Commit::Indexed), "it was put before");
    release(&mut node, 1);
    node.actions();
    assert_eq!(find(&node, &[1, 2, 3]), [Some(Tier::Ssd), Some(Tier::Ssd), Some(Tier::Dram)]);
    node.assert_idle();
}

#[test]
fn what_is_being_put_while_another_one_is_kept_and_makes_room_makes_way_for_it() {
    let mut node = node_that_keeps();
    reserve(&mut node, 1, &[1]);
    put(&mut node, 2, &[1]);
    ask_to_keep(&mut node, 1);
    let (sink, _) = node.sinks.pop().expect("it is being written");
    node.blocks.sunk(node.now_ms, sink, Ok(()));
    node.actions();
    let slots = node.blocks.available();
    reserve(&mut node, 3, &(10..10 + slots as u8).collect::<Vec<u8>>());
    assert_eq!(find(&node, &[1]), [Some(Tier::Ssd)], "memory needs its slot");
    assert_eq!(commit(&mut node, 1, 0), Ok(Commit::OnSsd));
    release(&mut node, 1);
    assert_eq!(find(&node, &[1]), [Some(Tier::Ssd)]);
}

#[test]
fn what_was_put_before_the_object_store_was_listed_makes_way_for_what_is_kept_there() {
    let bucket = BucketOptions { uploads_max: 1, tenant_bytes_max: 40, ..BucketOptions::default() };
    let mut node = Node::with(Options { bucket, demote_ahead_percent: 0, ..options(8) });
    node.blocks.set_extents(7, 10);
    put(&mut node, 1, &[1, 2]);
    node.blocks.bucket_listed(vec![extent(1, Some(9_000))], true);
    node.blocks.set_bucket_usable(true);
    node.check();
    assert_eq!(find(&node, &[1, 2]), [Some(Tier::Ssd), Some(Tier::Dram)]);
    assert_eq!(node.blocks.counts().dropped_total, 1, "whoever holds it learns that");
    // Another one's, put elsewhere since: both stand for the same bytes, or that one is to blame.
    node.blocks.bucket_listed(vec![extent(1, Some(9_000)), extent(2, Some(9_000))], true);
    assert_eq!(find(&node, &[1, 2]), [Some(Tier::Ssd), Some(Tier::Dram)]);
}

#[test]
fn what_the_ssd_keeps_stays_when_the_object_store_was_listed_first_and_has_it_too() {
    let bucket = BucketOptions { uploads_max: 1, tenant_bytes_max: 40, ..BucketOptions::default() };
    for is_there_still in [true, false] {
        let mut node =
            Node::with(Options { bucket: bucket.clone(), demote_ahead_percent: 0, ..options(8) });
        node.blocks.expect_ssd();
        node.blocks.set_extents(7, 10);
        put(&mut node, 1, &[1]);
        if !is_there_still {
            put(&mut node, 2, &[2, 3, 4, 5, 6, 7, 8, 9]);
        }
        node.blocks.bucket_listed(vec![extent(1, Some(5_000))], true);
        node.blocks.ssd_ready(SIZE, vec![extent(1, Some(9_000))]);
        node.check();
        node.blocks.sink_ahead(node.now_ms);
        node.actions();
        assert_eq!((node.erased.len(), node.forgotten.len()), (0, 0));
        assert_eq!(find(&node, &[1]), [Some(Tier::Ssd)], "kept for longer there");
    }
}

#[test]
fn what_the_object_store_has_of_another_namespace_says_nothing_of_what_was_put() {
    let bucket = BucketOptions { uploads_max: 1, tenant_bytes_max: 40, ..BucketOptions::default() };
    let mut node = Node::with(Options { bucket, demote_ahead_percent: 0, ..options(8) });
    node.blocks.expect_ssd();
    node.blocks.set_extents(7, 10);
    put(&mut node, 1, &[1]);
    let theirs = SsdBlock { namespace: namespace("another"), ..extent(1, Some(5_000)) };
    node.blocks.bucket_listed(vec![theirs], true);
    node.blocks.ssd_ready(SIZE, vec![extent(1, None)]);
    node.check();
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let erased: Vec<BlockKey> = node.erased.iter().map(|(_, key)| *key).collect();
    assert_eq!((erased, find(&node, &[1])), (vec![object(1)], vec![Some(Tier::Dram)]));
}

#[test]
fn what_is_kept_in_the_object_store_since_replaces_what_the_ssd_had() {
    let bucket = BucketOptions { uploads_max: 1, tenant_bytes_max: 40, ..BucketOptions::default() };
    let mut node = Node::with(Options { bucket, demote_ahead_percent: 0, ..options(8) });
    node.blocks.expect_ssd();
    node.blocks.set_extents(7, 10);
    node.blocks.bucket_listed(Vec::new(), true);
    node.blocks.set_bucket_usable(true);
    put(&mut node, 1, &[1]);
    ask_to_keep(&mut node, 1);
    sent(&mut node, 1, Ok(()));
    assert_eq!(node.kept.len(), 1);
    node.blocks.ssd_ready(SIZE, vec![extent(1, Some(9_000))]);
    node.check();
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let erased: Vec<BlockKey> = node.erased.iter().map(|(_, key)| *key).collect();
    assert_eq!((erased, find(&node, &[1])), (vec![object(1)], vec![Some(Tier::Dram)]));
}

#[test]
fn an_object_that_goes_while_the_ssd_fails_is_not_there_again_with_it() {
    let mut node = node_that_keeps();
    put(&mut node, 1, &[1, 2]);
    let ends = at(&node, 1);
    ask_to_keep(&mut node, 1);
    let (sink, _) = node.sinks.pop().expect("it is being written");
    node.blocks.sunk(node.now_ms, sink, Ok(()));
    // Its time is over.
    node.blocks.expire(9_001);
    node.blocks.ssd_gone();
    assert!(end(&mut node, &ends));
    node.blocks.ssd_ready(SIZE, vec![extent(1, None)]);
    node.check();
    assert_eq!(find(&node, &[1, 2]), [None, Some(Tier::Dram)]);
    node.blocks.set_extents(8, 0);
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    assert!(
        node.erased.iter().any(|(_, key)| *key == object(1)),
        "also where blocks are too large"
    );
}
