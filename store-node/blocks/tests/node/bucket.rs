//! Between a node and an object store: what is sent there and when, what rises from there and what comes of it
//! when it fails, and what is kept where there is no SSD.

use std::collections::BTreeMap;

use kvasir_blocks::{
    AbortReason, BucketOptions, ContextName, KeepError, KeepRequest, Options, ReserveObjects,
    RiseError, SinkError, SsdBlock, SsdSize, UploadFrom,
};
use kvasir_proto::{BlockKey, Class, Mark, Tenant};

use crate::support::{EPOCH, LEASE_MS, Node, chain, key, namespace, options, request, share};

const EXTENT_BYTES: u64 = 10;
const LAYOUT: u64 = 7;
const SIZE: SsdSize = SsdSize { bytes_max: 200, context_bytes_max: 100, tenant_bytes_max: 100 };
const UNTIL: u64 = 9_000;

fn with_bucket(uploads_max: usize) -> Options {
    let bucket = BucketOptions {
        uploads_max,
        timeout_ms: 500,
        retry_ms: 100,
        blocks_max: 6,
        tenant_bytes_max: 40,
        ..BucketOptions::default()
    };
    Options { bucket, demote_ahead_percent: 0, ..options(8) }
}

/// A node with an object store that is empty, and with no SSD.
fn node() -> Node {
    let mut node = Node::with(with_bucket(8));
    node.blocks.set_extents(LAYOUT, EXTENT_BYTES);
    node.blocks.bucket_listed(Vec::new(), true);
    node.blocks.set_bucket_usable(true);
    node
}

fn node_with_ssd(uploads_max: usize) -> Node {
    let mut node = Node::with(with_bucket(uploads_max));
    node.blocks.set_extents(LAYOUT, EXTENT_BYTES);
    node.blocks.ssd_ready(SIZE, Vec::new());
    node.blocks.bucket_listed(Vec::new(), true);
    node.blocks.set_bucket_usable(true);
    node
}

fn keep_until(prompt: &str, expires_unix_ms: u64) -> KeepRequest {
    KeepRequest {
        namespace: namespace(""),
        keys: chain(prompt),
        tenant: Tenant(3),
        expires_unix_ms,
        created_unix_ms: None,
        copies: 1,
    }
}

/// Keeps a chain on the SSD.
fn keep_on_ssd(node: &mut Node, prompt: &str, expires_unix_ms: u64) {
    node.blocks.keep(node.now_ms, &keep_until(prompt, expires_unix_ms)).expect("it can be kept");
    node.actions();
    while !node.sinks.is_empty() {
        let (sink, _) = node.sinks.remove(0);
        node.blocks.sunk(node.now_ms, sink, Ok(()));
        node.actions();
    }
    node.blocks.upload_ahead(node.now_ms);
    node.actions();
}

/// What is being sent, by where it comes from, and all of it arrives.
fn send_all(node: &mut Node) -> Vec<(&'static str, kvasir_proto::BlockKey)> {
    let mut sent = Vec::new();
    loop {
        node.blocks.upload_ahead(node.now_ms);
        node.actions();
        let uploads = std::mem::take(&mut node.uploads);
        if uploads.is_empty() {
            return sent;
        }
        for (upload, key, from) in uploads {
            node.blocks.uploaded(node.now_ms, upload, Ok(()));
            sent.push((from_text(from), key));
        }
    }
}

fn from_text(from: UploadFrom) -> &'static str {
    match from {
        UploadFrom::Slot { .. } => "slot",
        UploadFrom::Ssd => "SSD",
        UploadFrom::Bucket(_) => "copy",
    }
}

fn block(prompt: &str, expires_unix_ms: u64) -> SsdBlock {
    let before = &prompt[..prompt.len() - 1];
    SsdBlock {
        key: key(prompt),
        namespace: namespace(""),
        parent: (!before.is_empty()).then(|| key(before)),
        class: Class::Context { tenant: Tenant(3), expires_unix_ms },
        mark: None,
        layout: LAYOUT,
        bytes: EXTENT_BYTES,
    }
}

/// A node that has nothing, and finds these blocks in the object store.
fn node_that_finds(prompts: &[&str]) -> Node {
    let mut node = node();
    node.blocks.bucket_listed(prompts.iter().map(|prompt| block(prompt, UNTIL)).collect(), true);
    node
}

#[test]
fn what_is_kept_on_the_ssd_is_sent_and_nothing_else_is() {
    let mut node = node_with_ssd(8);
    node.fill("1p", "abc");
    assert_eq!(send_all(&mut node), []);
    keep_on_ssd(&mut node, "ab", UNTIL);
    assert_eq!(node.blocks.counts().pins, 0, "the SSD has the bytes: nothing is held for that");
    assert_eq!(send_all(&mut node), [("SSD", key("a")), ("SSD", key("ab"))]);
    let counts = node.blocks.counts();
    assert_eq!((counts.bucket_blocks, counts.bucket_bytes, counts.uploaded_total), (2, 20, 2));
    assert_eq!(send_all(&mut node), [], "nothing is sent twice");
    node.assert_idle();
}

#[test]
fn what_is_found_again_on_the_ssd_is_sent_with_what_is_before_it() {
    let mut node = node_with_ssd(8);
    node.fill("1p", "abc");
    keep_on_ssd(&mut node, "abc", UNTIL);
    let blocks: Vec<SsdBlock> = node.blocks.ssd_blocks().collect();
    let rest = blocks.into_iter().filter(|block| block.parent.is_some()).collect();
    let mut again = Node::with(Options { demote_ahead_percent: 100, ..with_bucket(8) });
    again.blocks.set_extents(LAYOUT, EXTENT_BYTES);
    again.blocks.ssd_ready_in_part(SIZE, rest, 2_000);
    again.blocks.bucket_listed(Vec::new(), true);
    again.blocks.set_bucket_usable(true);
    assert_eq!(send_all(&mut again), []);
    again.fill("1p", "a");
    again.blocks.sink_ahead(again.now_ms);
    again.actions();
    let sinks = std::mem::take(&mut again.sinks);
    assert_eq!(sinks.len(), 1);
    again.blocks.sunk(again.now_ms, sinks[0].0, Ok(()));
    let sent = send_all(&mut again);
    assert_eq!(sent, [("SSD", key("a")), ("SSD", key("ab")), ("SSD", key("abc"))]);
}

#[test]
fn what_only_the_object_store_has_is_kept_there_for_longer_also_where_there_is_an_ssd() {
    let mut node = node_with_ssd(8);
    node.blocks.bucket_listed(vec![block("a", UNTIL), block("ab", UNTIL)], true);
    assert_eq!(node.blocks.keepable(node.now_ms, namespace(""), &chain("abc")), 2);
    node.blocks.keep(node.now_ms, &keep_until("abc", UNTIL + 500)).expect("it is there");
    assert_eq!(send_all(&mut node), [("copy", key("a")), ("copy", key("ab"))]);
    node.blocks.keep(node.now_ms, &keep_until("abc", UNTIL + 400)).expect("it is there");
    assert_eq!(send_all(&mut node), [], "it is kept so long");
    node.blocks.set_bucket_usable(false);
    let refused = node.blocks.keep(node.now_ms, &keep_until("abc", UNTIL + 900));
    assert_eq!(refused, Err(KeepError::NotHere));
}

#[test]
fn a_block_that_is_kept_for_longer_is_copied_where_it_is() {
    let mut node = node_with_ssd(8);
    node.fill("1p", "ab");
    keep_on_ssd(&mut node, "ab", UNTIL);
    send_all(&mut node);
    keep_on_ssd(&mut node, "a", UNTIL + 500);
    assert_eq!(send_all(&mut node), [("copy", key("a"))]);
    assert_eq!(node.discards, [], "the copy has taken the place of the other");
    assert_eq!(node.blocks.bucket_block(key("a")), Some(block("a", UNTIL + 500)));
    keep_on_ssd(&mut node, "ab", UNTIL - 500);
    assert_eq!(send_all(&mut node), [], "it is kept that long");
}

#[test]
fn a_copy_of_what_is_not_there_any_more_is_sent_anew() {
    let mut node = node_with_ssd(8);
    node.fill("1p", "a");
    keep_on_ssd(&mut node, "a", UNTIL);
    send_all(&mut node);
    keep_on_ssd(&mut node, "a", UNTIL + 500);
    let (upload, _, from) = node.uploads.pop().expect("it is copied");
    assert_eq!(from_text(from), "copy");
    node.blocks.uploaded(node.now_ms, upload, Err(SinkError::Gone));
    assert_eq!(send_all(&mut node), [("SSD", key("a"))]);
    assert_eq!(node.blocks.counts().bucket_lost_total, 1);
}

#[test]
fn few_are_sent_at_once_and_after_a_failure_none_for_a_while() {
    let mut node = node_with_ssd(2);
    node.fill("1p", "abc");
    keep_on_ssd(&mut node, "abc", UNTIL);
    let [(first, ..), (second, ..)] = node.uploads[..] else { panic!("{:?}", node.uploads) };
    node.uploads.clear();
    node.blocks.uploaded(node.now_ms, first, Err(SinkError::Failed));
    node.blocks.uploaded(node.now_ms, second, Ok(()));
    assert_eq!(send_all(&mut node), []);
    node.now_ms += 100;
    assert_eq!(send_all(&mut node), [("SSD", key("abc")), ("SSD", key("a"))]);
    assert_eq!(node.blocks.counts().uploads_failed_total, 1);
}

#[test]
fn nothing_is_sent_before_what_is_there_is_known() {
    let mut node = Node::with(with_bucket(8));
    node.blocks.set_extents(LAYOUT, EXTENT_BYTES);
    node.blocks.ssd_ready(SIZE, Vec::new());
    node.fill("1p", "ab");
    keep_on_ssd(&mut node, "ab", UNTIL);
    assert_eq!(send_all(&mut node), []);
    // Another node, or this one before it was started again, has sent it.
    node.blocks.bucket_listed(vec![block("a", UNTIL)], true);
    node.blocks.set_bucket_usable(true);
    assert_eq!(send_all(&mut node), [("SSD", key("ab"))]);
    // An SSD that comes back has it still.
    node.blocks.bucket_listed(vec![], true);
    assert_eq!(send_all(&mut node), [("SSD", key("a")), ("SSD", key("ab"))]);
}

#[test]
fn no_more_blocks_are_known_than_may_be() {
    let mut node = node_with_ssd(8);
    node.blocks
        .bucket_listed((b'A'..=b'F').map(|c| block(&(c as char).to_string(), 1)).collect(), true);
    node.fill("1p", "a");
    keep_on_ssd(&mut node, "a", UNTIL);
    assert_eq!(send_all(&mut node), []);
    assert_eq!(node.blocks.counts().uploads_refused_total, 1);
    // Their time is over.
    node.blocks.expire(1);
    keep_on_ssd(&mut node, "a", UNTIL + 1);
    assert_eq!(send_all(&mut node), [("SSD", key("a"))]);
}

#[test]
fn a_share_waits_for_the_object_store_and_computes_what_is_left() {
    let mut node = node_that_finds(&["a", "ab"]);
    let allocated = node.allocate(&request("1p", "abc", 1)).expect("room");
    assert_eq!((allocated.held_blocks, allocated.promoting_blocks), (2, 2));
    node.blocks.bind(share("1p"), EPOCH).expect("nobody bound it before");
    assert_eq!(node.actions(), "");
    let downloads = std::mem::take(&mut node.downloads);
    assert_eq!(downloads.iter().map(|(_, key)| *key).collect::<Vec<_>>(), ["a", "ab"].map(key));
    for (rise, _) in downloads {
        node.blocks.risen(node.now_ms, rise, Ok(1));
    }
    assert_eq!(node.actions(), "Bound/8(1p)");
    assert_eq!(node.cached("a ab abc"), "a ab");
    node.release("1p");
    node.actions();
    node.assert_idle();
}

#[test]
fn a_chain_rises_from_both_tiers() {
    let mut node = node_with_ssd(8);
    node.blocks.ssd_ready(SIZE, vec![block("a", UNTIL)]);
    node.blocks.bucket_listed(vec![block("ab", UNTIL)], true);
    let allocated = node.allocate(&request("1p", "ab", 1)).expect("room");
    assert_eq!(allocated.held_blocks, 2);
    node.actions();
    assert_eq!((node.rises.len(), node.downloads.len()), (1, 1));
    // The second one is there first, and waits for the first.
    node.blocks.risen(node.now_ms, node.downloads[0].0, Ok(1));
    assert_eq!(node.cached("a ab"), "");
    node.blocks.risen(node.now_ms, node.rises[0].0, Ok(1));
    assert_eq!(node.cached("a ab"), "a ab");
}

#[test]
fn blocks_of_another_namespace_or_layout_or_parent_are_no_hit() {
    let check = |of: SsdBlock, hit: u32| {
        let mut node = node();
        node.blocks.bucket_listed(vec![of], true);
        let allocated = node.allocate(&request("1p", "ab", 1)).expect("room");
        assert_eq!(allocated.held_blocks, hit, "{of:?}");
    };
    let good = block("a", UNTIL);
    check(good, 1);
    check(SsdBlock { namespace: namespace("other"), ..good }, 0);
    check(SsdBlock { layout: LAYOUT + 1, ..good }, 0);
    check(SsdBlock { parent: Some(key("b")), ..good }, 0);
}

#[test]
fn a_block_that_is_missing_or_wrong_is_a_miss_and_forgotten() {
    let mut node = node_that_finds(&["a", "ab"]);
    node.open("1p", "ab", 1);
    node.actions();
    let [(first, _), (second, _)] = node.downloads[..] else { panic!("{:?}", node.downloads) };
    node.blocks.risen(node.now_ms, first, Err(RiseError::Gone));
    node.blocks.risen(node.now_ms, second, Ok(1));
    assert_eq!(node.actions(), "Bound/0(1p)", "it computes all of it");
    let counts = node.blocks.counts();
    assert_eq!((counts.bucket_blocks, counts.bucket_lost_total), (1, 1));
    assert_eq!((counts.downloads_failed_total, counts.ssd_lost_total), (1, 0));
    node.release("1p");
    node.actions();
    node.assert_idle();
}

#[test]
fn a_read_that_takes_too_long_is_not_waited_for_and_hinders_no_other_tier() {
    let mut node = node_with_ssd(8);
    node.blocks.bucket_listed(vec![block("a", UNTIL)], true);
    node.open("1p", "a", 1);
    node.actions();
    node.now_ms += 499;
    node.blocks.handle_timeout(node.now_ms);
    assert_eq!(node.actions(), "");
    assert_eq!(node.blocks.poll_timeout(), Some(node.now_ms + 1));
    node.now_ms += 1;
    node.blocks.handle_timeout(node.now_ms);
    assert_eq!(node.actions(), "Bound/0(1p)");
    assert!(node.blocks.ssd_is_usable(node.now_ms), "that is no fault of the SSD");
    let counts = node.blocks.counts();
    assert_eq!((counts.rising, counts.downloads_late_total, counts.rises_late), (1, 1, 0));
    let (rise, _) = node.downloads[0];
    node.blocks.risen(node.now_ms, rise, Ok(1));
    assert_eq!(node.blocks.counts().rising, 0);
}

#[test]
fn while_it_cannot_be_used_its_blocks_are_no_hit() {
    let mut node = node_that_finds(&["a"]);
    node.blocks.set_bucket_usable(false);
    assert_eq!(node.allocate(&request("1p", "a", 1)).expect("room").held_blocks, 0);
    node.blocks.set_bucket_usable(true);
    assert_eq!(node.allocate(&request("2p", "a", 1)).expect("room").held_blocks, 1);
}

#[test]
fn a_block_is_no_hit_when_its_time_is_over() {
    let mut node = node_that_finds(&["a"]);
    node.blocks.expire(UNTIL - 1);
    assert_eq!(node.allocate(&request("1p", "a", 1)).expect("room").held_blocks, 1);
    let mut node = node_that_finds(&["a"]);
    node.blocks.expire(UNTIL);
    assert_eq!(node.allocate(&request("1p", "a", 1)).expect("room").held_blocks, 0);
    assert_eq!(node.blocks.counts().bucket_bytes, 0);
}

#[test]
fn without_an_ssd_a_chain_is_kept_when_all_of_it_is_there() {
    let mut node = node();
    node.fill("1p", "abc");
    let keep = node.blocks.keep(node.now_ms, &keep_until("abc", UNTIL)).expect("it can be kept");
    node.actions();
    assert!(node.blocks.counts().pins > 0, "what is sent stays as it is");
    assert_eq!(node.blocks.keep(node.now_ms, &keep_until("ab", UNTIL)), Err(KeepError::Busy));
    let uploads = std::mem::take(&mut node.uploads);
    for (upload, _, from) in uploads {
        assert!(node.kept.is_empty());
        assert_eq!(from_text(from), "slot");
        node.blocks.uploaded(node.now_ms, upload, Ok(()));
        node.actions();
    }
    assert_eq!(node.kept, [(keep, Some(3))]);
    node.assert_idle();
    // What is there already is kept at once.
    let again = node.blocks.keep(node.now_ms, &keep_until("ab", UNTIL)).expect("it can be kept");
    node.actions();
    assert_eq!(node.kept[1], (again, Some(2)));
    let over = node.blocks.keep(node.now_ms, &keep_until("x", UNTIL));
    assert_eq!(over, Err(KeepError::NotHere));
    node.fill("2p", "uvw");
    let over = node.blocks.keep(node.now_ms, &keep_until("uvw", UNTIL));
    let quota = KeepError::OverQuota { wanted_bytes: 30, taken_bytes: 30, tenant_bytes_max: 40 };
    assert_eq!(over, Err(quota));
}

#[test]
fn who_waits_for_what_could_not_be_sent_is_told() {
    let mut node = Node::with(with_bucket(1));
    node.blocks.set_extents(LAYOUT, EXTENT_BYTES);
    node.blocks.bucket_listed(Vec::new(), true);
    node.blocks.set_bucket_usable(true);
    node.fill("1p", "ab");
    let keep = node.blocks.keep(node.now_ms, &keep_until("ab", UNTIL)).expect("it can be kept");
    node.actions();
    // One is on its way, the other waits.
    node.blocks.set_bucket_usable(false);
    assert_eq!(node.actions(), "");
    assert_eq!(node.kept, []);
    node.blocks.uploaded(node.now_ms, node.uploads[0].0, Err(SinkError::Failed));
    node.actions();
    assert_eq!(node.kept, [(keep, None)]);
    let refused = node.blocks.keep(node.now_ms, &keep_until("ab", UNTIL));
    assert_eq!(refused, Err(KeepError::NoSsd));
    node.assert_idle();
}

#[test]
fn a_block_whose_bytes_are_rotten_is_not_sent_and_dropped() {
    let mut node = node();
    node.fill("1p", "a");
    node.blocks.keep(node.now_ms, &keep_until("a", UNTIL)).expect("it can be kept");
    node.actions();
    let (upload, ..) = node.uploads.pop().expect("it is sent");
    node.blocks.uploaded(node.now_ms, upload, Err(SinkError::Corrupt));
    node.actions();
    assert_eq!(node.cached("a"), "");
    assert_eq!(node.blocks.counts().bucket_blocks, 0);
    node.assert_idle();
}

/// Asks for the removal of an object, which somebody waits for.
fn ask_to_remove(node: &mut Node, prompt: &str) -> Option<u64> {
    let removed = node.blocks.remove_objects(node.now_ms, namespace(""), &[key(prompt)]);
    node.check();
    node.actions();
    removed.expect("it can be removed").1
}

/// What was to be gone from the object store is, or is not.
fn discarded(node: &mut Node, is_gone: bool) {
    let (discard, _) = node.discards.pop().expect("it is being removed");
    node.blocks.discarded(node.now_ms, discard, is_gone);
    node.check();
    node.actions();
}

#[test]
fn an_object_that_is_removed_is_gone_from_there_before_it_is_said() {
    let mut node = node_that_finds(&["a"]);
    let object = ReserveObjects {
        share: share("9s"),
        epoch: EPOCH,
        namespace: namespace(""),
        keys: chain("a"),
        lease_ms: LEASE_MS,
    };
    assert!(node.blocks.raise_object(node.now_ms, &object));
    node.actions();
    assert_eq!(node.downloads.len(), 1);
    let keep = ask_to_remove(&mut node, "a").expect("it is there");
    assert_eq!(node.blocks.find_object(namespace(""), key("a")), None);
    assert_eq!((node.discards.len(), node.kept.len(), node.blocks.counts().discarding), (1, 0, 1));
    // Who asks once more waits for the same.
    let again = ask_to_remove(&mut node, "a").expect("it is there still");
    assert_eq!(node.discards.len(), 1);
    // A list that was begun before shows it.
    node.blocks.bucket_listed(vec![block("a", UNTIL)], true);
    assert_eq!(node.blocks.bucket_block(key("a")), None);
    discarded(&mut node, true);
    assert_eq!(node.kept, [(keep, Some(0)), (again, Some(0))]);
    assert_eq!(ask_to_remove(&mut node, "a"), None, "nothing brings it back");
}

#[test]
fn a_read_from_there_is_void_though_a_list_does_not_show_what_is_removed_any_more() {
    let mut node = node_that_finds(&["a"]);
    let object = ReserveObjects {
        share: share("9s"),
        epoch: EPOCH,
        namespace: namespace(""),
        keys: chain("a"),
        lease_ms: LEASE_MS,
    };
    assert!(node.blocks.raise_object(node.now_ms, &object));
    node.actions();
    let (rise, _) = node.downloads.pop().expect("it is read");
    node.blocks.bucket_listed(Vec::new(), true);
    assert_eq!(ask_to_remove(&mut node, "a"), None, "it is nowhere");
    node.blocks.risen(node.now_ms, rise, Ok(1));
    node.check();
    node.actions();
    assert_eq!(node.cached("a"), "", "it was removed");
}

#[test]
fn an_object_that_is_removed_while_it_is_sent_is_removed_when_that_has_ended_however_it_did() {
    for sent in [Ok(()), Err(SinkError::Failed), Err(SinkError::Gone)] {
        let mut node = node();
        node.fill("1p", "a");
        node.blocks.keep(node.now_ms, &keep_until("a", UNTIL)).expect("it can be kept");
        node.actions();
        let keep = ask_to_remove(&mut node, "a").expect("it may be there soon");
        assert_eq!(node.discards, [], "it would come after that");
        let (upload, ..) = node.uploads.pop().expect("it is sent");
        node.blocks.uploaded(node.now_ms, upload, sent);
        node.actions();
        let kept = std::mem::take(&mut node.kept);
        assert!(matches!(kept[..], [(_, None)]), "{sent:?}: {kept:?}");
        discarded(&mut node, true);
        assert_eq!(node.kept, [(keep, Some(0))]);
        assert_eq!(node.blocks.counts().bucket_blocks, 0);
        node.assert_idle();
    }
}

#[test]
fn a_name_is_not_sent_before_what_was_removed_under_it_is_gone() {
    let mut node = node_that_finds(&["a"]);
    ask_to_remove(&mut node, "a").expect("it is there");
    node.fill("1p", "a");
    node.blocks.keep(node.now_ms, &keep_until("a", UNTIL)).expect("it can be kept");
    node.actions();
    assert_eq!(node.uploads, [], "it would be removed with the former one");
    discarded(&mut node, true);
    assert_eq!(send_all(&mut node), [("slot", key("a"))]);
    assert!(node.blocks.bucket_block(key("a")).is_some());
    node.actions();
    node.assert_idle();
}

#[test]
fn a_removal_that_fails_there_is_said_to_have_failed_and_made_good_when_it_is_listed() {
    let mut node = node_that_finds(&["a"]);
    let keep = ask_to_remove(&mut node, "a").expect("it is there");
    discarded(&mut node, false);
    assert_eq!(node.kept, [(keep, None)]);
    assert_eq!(node.blocks.find_object(namespace(""), key("a")), None);
    // Nothing else is kept under the name: it would be beside the former one.
    node.fill("1p", "a");
    let refused = node.blocks.keep(node.now_ms, &keep_until("a", UNTIL)).expect("it is begun");
    node.now_ms += 1_000;
    node.blocks.upload_ahead(node.now_ms);
    node.actions();
    assert_eq!(node.uploads, []);
    discarded(&mut node, false);
    assert_eq!(node.kept.pop(), Some((refused, None)));
    node.blocks.bucket_listed(vec![block("a", UNTIL)], true);
    node.actions();
    assert_eq!(node.blocks.bucket_block(key("a")), None, "it is found no more");
    discarded(&mut node, false);
    // Who asks again is not told that nothing is there.
    let again = ask_to_remove(&mut node, "a").expect("it may be there");
    discarded(&mut node, true);
    assert_eq!(node.kept.pop(), Some((again, Some(0))));
    node.blocks.bucket_listed(Vec::new(), true);
    assert_eq!(ask_to_remove(&mut node, "a"), None);
    node.assert_idle();
}

#[test]
fn what_was_sent_and_failed_may_be_there_until_a_later_list_says_otherwise() {
    let mut node = node();
    node.fill("1p", "a");
    node.blocks.keep(node.now_ms, &keep_until("a", UNTIL)).expect("it can be kept");
    node.actions();
    let (upload, ..) = node.uploads.pop().expect("it is sent");
    node.blocks.uploaded(node.now_ms, upload, Err(SinkError::Failed));
    // This one may have been begun before.
    node.blocks.bucket_listed(Vec::new(), true);
    ask_to_remove(&mut node, "a").expect("it may have come there");
    discarded(&mut node, true);
    assert_eq!(ask_to_remove(&mut node, "a"), None);

    node.fill("2p", "b");
    node.now_ms += 1_000;
    node.blocks.keep(node.now_ms, &keep_until("b", UNTIL)).expect("it can be kept");
    node.actions();
    let (upload, ..) = node.uploads.pop().expect("it is sent");
    node.blocks.uploaded(node.now_ms, upload, Err(SinkError::Failed));
    node.blocks.bucket_listed(Vec::new(), true);
    node.blocks.bucket_listed(Vec::new(), true);
    assert_eq!(ask_to_remove(&mut node, "b"), None);
    node.actions();
    node.assert_idle();
}

#[test]
fn a_list_that_was_under_way_when_a_later_try_failed_says_nothing_of_it() {
    let mut node = node();
    node.fill("1p", "a");
    let try_to_send = |node: &mut Node| {
        node.now_ms += 1_000;
        node.blocks.keep(node.now_ms, &keep_until("a", UNTIL)).expect("it can be kept");
        node.actions();
        let (upload, ..) = node.uploads.pop().expect("it is sent");
        node.blocks.uploaded(node.now_ms, upload, Err(SinkError::Failed));
        node.actions();
    };
    try_to_send(&mut node);
    node.blocks.bucket_listed(Vec::new(), true);
    try_to_send(&mut node);
    node.blocks.bucket_listed(Vec::new(), true);
    ask_to_remove(&mut node, "a").expect("it may have come there");
    discarded(&mut node, true);
}

#[test]
fn what_could_not_be_removed_and_is_shown_no_more_is_left_to_who_keeps_it_later() {
    let mut node = node_that_finds(&["a"]);
    ask_to_remove(&mut node, "a").expect("it is there");
    discarded(&mut node, false);
    // The first of them may have been begun before.
    node.blocks.bucket_listed(Vec::new(), true);
    node.blocks.bucket_listed(vec![block("a", UNTIL)], true);
    node.actions();
    discarded(&mut node, false);
    node.blocks.bucket_listed(Vec::new(), true);
    node.blocks.bucket_listed(Vec::new(), true);
    // Another node has kept it since.
    node.blocks.bucket_listed(vec![block("a", UNTIL)], true);
    node.actions();
    assert_eq!(node.discards, []);
    assert!(node.blocks.bucket_block(key("a")).is_some());
}

#[test]
fn where_the_object_store_has_more_than_is_known_removals_ask_it() {
    // A list that left some out, and one more than is listed.
    let mut node = node_that_finds(&[]);
    node.blocks.bucket_listed(Vec::new(), false);
    ask_to_remove(&mut node, "a").expect("it may be there");
    discarded(&mut node, true);
    node.blocks.bucket_listed(Vec::new(), true);
    assert_eq!(ask_to_remove(&mut node, "a"), None);
    let blocks_max = with_bucket(8).bucket.blocks_max;
    let all = (0..=blocks_max).map(|at| {
        let key = BlockKey((at as u128 + 1).to_le_bytes());
        SsdBlock { key, ..block("a", UNTIL) }
    });
    node.blocks.bucket_listed(all.collect(), true);
    ask_to_remove(&mut node, "b").expect("it may be there");
}

#[test]
fn an_object_that_goes_with_its_client_takes_nothing_of_others_with_it() {
    let mut node = node_that_finds(&[]);
    node.blocks.bucket_listed(Vec::new(), false);
    node.fill("1p", "a");
    let object = node.blocks.object_at(namespace(""), key("a")).expect("it is in memory");
    assert!(node.blocks.end_object(node.now_ms, &object));
    node.actions();
    assert_eq!(node.discards, [], "another node may keep it there");
    // What this one could not remove is not removed for ever, also where lists leave some out.
    ask_to_remove(&mut node, "b").expect("it may be there");
    discarded(&mut node, false);
    node.blocks.bucket_listed(Vec::new(), false);
    node.blocks.bucket_listed(Vec::new(), false);
    node.blocks.bucket_listed(vec![block("b", UNTIL)], false);
    node.actions();
    assert_eq!(node.discards, []);
    // Nor what was not where another node had it.
    let mut node = node_that_finds(&["a"]);
    assert_eq!(node.open("1p", "a", 1).promoting_blocks, 1);
    node.actions();
    let (rise, _) = node.downloads.pop().expect("it is read");
    node.blocks.risen(node.now_ms, rise, Err(RiseError::Gone));
    node.actions();
    node.blocks.abort(node.now_ms, share("1p"), AbortReason::Asked(String::new()));
    node.fill("2p", "a");
    let object = node.blocks.object_at(namespace(""), key("a")).expect("it is in memory");
    assert!(node.blocks.end_object(node.now_ms, &object));
    node.actions();
    assert_eq!(node.discards, []);
}

#[test]
fn what_could_not_be_removed_and_is_in_no_list_that_was_cut_is_removed_before_its_name_is_used_again()
 {
    let mut node = node_that_finds(&[]);
    node.blocks.bucket_listed(Vec::new(), false);
    ask_to_remove(&mut node, "a").expect("it may be there");
    discarded(&mut node, false);
    (0..3).for_each(|_| node.blocks.bucket_listed(Vec::new(), false));
    node.fill("1p", "a");
    node.blocks.keep(node.now_ms, &keep_until("a", UNTIL)).expect("room");
    node.actions();
    assert_eq!((node.discards.len(), node.uploads.len()), (1, 0), "what may be there goes first");
    discarded(&mut node, true);
    node.actions();
    assert_eq!(node.uploads.len(), 1);
}

#[test]
fn what_a_read_does_not_find_there_may_be_there_under_another_name() {
    let mut node = node_that_finds(&["a"]);
    assert_eq!(node.open("1p", "a", 1).promoting_blocks, 1);
    node.actions();
    let (rise, _) = node.downloads.pop().expect("it is read");
    node.blocks.risen(node.now_ms, rise, Err(RiseError::Gone));
    assert_eq!(node.blocks.bucket_block(key("a")), None);
    ask_to_remove(&mut node, "a").expect("it may be there");
}

#[test]
fn nothing_is_removed_while_the_object_store_may_have_it_and_does_not_answer() {
    let remove =
        |node: &mut Node| node.blocks.remove_objects(node.now_ms, namespace(""), &[key("a")]);
    let mut node = Node::with(with_bucket(8));
    node.blocks.set_extents(LAYOUT, EXTENT_BYTES);
    node.fill("1p", "a");
    assert_eq!(remove(&mut node), Err(KeepError::NoBucket), "nobody knows what is there");
    assert_eq!(node.cached("a"), "a");
    node.blocks.bucket_listed(vec![block("a", UNTIL)], true);
    node.blocks.set_bucket_usable(true);
    node.blocks.set_bucket_usable(false);
    assert_eq!(remove(&mut node), Err(KeepError::NoBucket));
    node.blocks.bucket_listed(Vec::new(), true);
    assert_eq!(remove(&mut node), Ok((1, None)), "it is not there");
    node.assert_idle();
}

#[test]
fn blocks_rise_from_there_on_a_hint() {
    let mut node = node_that_finds(&["a", "ab"]);
    let ahead = node.blocks.prefetch(node.now_ms, share("8s"), Some(namespace("")), &chain("ab"));
    assert_eq!(ahead.map(|ahead| ahead.promoting_blocks), Ok(2));
    node.actions();
    assert_eq!(node.downloads.len(), 2);
}

/// A node without an SSD, and a context that it has sent to the object store.
fn node_with_context(prompt: &str) -> (Node, ContextName) {
    let mut node = node();
    node.fill("1p", prompt);
    let request = KeepRequest { created_unix_ms: Some(5), ..keep_until(prompt, UNTIL) };
    node.blocks.keep(node.now_ms, &request).expect("it can be kept");
    send_all(&mut node);
    let name = ContextName { tenant: Tenant(3), namespace: namespace(""), last: key(prompt) };
    (node, name)
}

#[test]
fn a_context_is_dropped_there_by_another_name_of_its_last_block() {
    let (mut node, name) = node_with_context("ab");
    let listed = |node: &Node| {
        let all = node.blocks.contexts(Tenant(3), None, 9, 0);
        all.iter().map(|it| (it.last, it.blocks, it.expires_unix_ms)).collect::<Vec<_>>()
    };
    assert_eq!(listed(&node), [(key("ab"), 2, UNTIL)]);
    // An earlier time: the block stays as long as it was given.
    node.blocks.extend_context(node.now_ms, &name, UNTIL - 500).expect("it is there");
    assert_eq!(send_all(&mut node), [("copy", key("ab"))]);
    assert_eq!(listed(&node), [(key("ab"), 2, UNTIL - 500)]);
    let mark = Mark {
        tenant: Tenant(3),
        expires_unix_ms: UNTIL - 500,
        created_unix_ms: Some(5),
        copies: 1,
    };
    let marked = SsdBlock { mark: Some(mark), ..block("ab", UNTIL) };
    assert_eq!(node.blocks.bucket_block(key("ab")), Some(marked));
    // Nothing is dropped that was not renamed.
    node.kept.clear();
    let drop = node.blocks.delete_context(node.now_ms, &name).expect("it is there");
    let busy = node.blocks.delete_context(node.now_ms, &name);
    assert_eq!(busy, Err(KeepError::Busy));
    node.actions();
    let (upload, ..) = node.uploads.pop().expect("it is renamed");
    node.blocks.uploaded(node.now_ms, upload, Err(SinkError::Failed));
    node.actions();
    assert_eq!(node.kept, [(drop, None)]);
    assert_eq!(listed(&node).len(), 1);
    node.blocks.set_bucket_usable(false);
    let refused = node.blocks.delete_context(node.now_ms, &name);
    assert_eq!(refused, Err(KeepError::NoBucket));
    node.blocks.set_bucket_usable(true);
    node.now_ms += 1_000;
    node.blocks.delete_context(node.now_ms, &name).expect("it is there");
    assert_eq!(send_all(&mut node), [("copy", key("ab"))]);
    assert_eq!(listed(&node), []);
    assert_eq!(node.blocks.bucket_block(key("ab")), Some(block("ab", UNTIL)));
    // Its chain is not whole any more: it is of no use to anybody.
    node.blocks.bucket_listed(vec![marked], true);
    assert_eq!(listed(&node), []);
    node.blocks.bucket_listed(vec![block("a", UNTIL), marked], true);
    assert_eq!(listed(&node).len(), 1);
    node.blocks.expire(UNTIL - 500);
    assert_eq!((listed(&node).len(), node.blocks.counts().bucket_blocks), (0, 2));
    node.assert_idle();
}

#[test]
fn a_longer_time_there_is_one_of_all_blocks_of_the_context() {
    let (mut node, name) = node_with_context("abc");
    node.blocks.extend_context(node.now_ms, &name, UNTIL + 500).expect("it is there");
    let sent: Vec<_> = send_all(&mut node).into_iter().map(|(_, key)| key).collect();
    assert_eq!(sent.len(), 3, "{sent:?}");
    node.blocks.expire(UNTIL + 100);
    let of = |prompt: &str| node.blocks.bucket_block(key(prompt)).map(|block| block.class);
    let longer = Class::Context { tenant: Tenant(3), expires_unix_ms: UNTIL + 500 };
    assert_eq!(["a", "ab", "abc"].map(of), [Some(longer); 3]);
    assert_eq!(node.blocks.contexts(Tenant(3), None, 9, UNTIL + 100).len(), 1);
    // Of a chain that is not whole there is nothing to promise.
    let rest =
        ["a", "abc"].map(|prompt| node.blocks.bucket_block(key(prompt)).expect("it is there"));
    node.blocks.bucket_listed(rest.to_vec(), true);
    let gap = node.blocks.extend_context(node.now_ms, &name, UNTIL + 900);
    assert_eq!(gap, Err(KeepError::NoContext));
    node.assert_idle();
}

#[test]
fn contexts_that_go_on_from_one_another_are_each_as_long_as_they_are() {
    let mut node = node();
    let mark = |expires_unix_ms| Mark {
        tenant: Tenant(3),
        expires_unix_ms,
        created_unix_ms: Some(5),
        copies: 1,
    };
    let marked = |prompt| SsdBlock { mark: Some(mark(UNTIL)), ..block(prompt, UNTIL) };
    // Of the last one a block is missing, and two are each other's beginning.
    let bites = |prompt, tail| SsdBlock { parent: Some(key(tail)), ..marked(prompt) };
    node.blocks.bucket_listed(
        vec![
            block("a", UNTIL),
            marked("ab"),
            marked("abc"),
            marked("abcd"),
            marked("abcdef"),
            bites("x", "xy"),
            bites("xy", "x"),
        ],
        true,
    );
    let all = node.blocks.contexts(Tenant(3), None, 9, 0);
    let found: BTreeMap<BlockKey, u32> = all.iter().map(|it| (it.last, it.blocks)).collect();
    let wanted = [("ab", 2), ("abc", 3), ("abcd", 4)].map(|(prompt, blocks)| (key(prompt), blocks));
    assert_eq!(found, BTreeMap::from(wanted));
}

#[test]
fn what_another_node_has_renamed_already_is_dropped_and_not_forgotten() {
    let (mut node, name) = node_with_context("ab");
    let drop = node.blocks.delete_context(node.now_ms, &name).expect("it is there");
    node.actions();
    let (upload, ..) = node.uploads.pop().expect("it is renamed");
    node.kept.clear();
    node.blocks.uploaded(node.now_ms, upload, Err(SinkError::Gone));
    node.actions();
    assert_eq!(node.kept, [(drop, Some(2))]);
    assert_eq!(node.blocks.bucket_block(key("ab")), Some(block("ab", UNTIL)));
    node.assert_idle();
}

#[test]
fn a_rename_that_waited_finds_what_was_done_meanwhile() {
    let (mut node, name) = node_with_context("ab");
    // It fails first, so that the next one waits.
    node.blocks.delete_context(node.now_ms, &name).expect("it is there");
    node.actions();
    let (upload, ..) = node.uploads.pop().expect("it is renamed");
    node.blocks.uploaded(node.now_ms, upload, Err(SinkError::Failed));
    node.actions();
    node.kept.clear();
    let drop = node.blocks.delete_context(node.now_ms, &name).expect("it is there");
    node.actions();
    assert!(node.uploads.is_empty() && node.kept.is_empty(), "it waits");
    // Another node has dropped it, and keeps a longer chain through it for longer.
    let renamed = [block("a", UNTIL + 9), block("ab", UNTIL + 9)];
    node.blocks.bucket_listed(renamed.to_vec(), true);
    node.now_ms += 1_000;
    assert_eq!(send_all(&mut node), []);
    assert_eq!(node.kept, [(drop, Some(2))]);
    assert_eq!(node.blocks.bucket_block(key("ab")), Some(renamed[1]));
    node.assert_idle();
}
