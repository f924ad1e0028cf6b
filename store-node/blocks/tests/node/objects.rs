//! Objects of clients that are no engines: put by shares of their own, got one by one.

use kvasir_blocks::{
    AbortReason, Action, AllocateError, AttachEpoch, BucketOptions, Commit, GetError, KeepError,
    KeepRequest, ObjectAt, Options, Outcome, ReserveObjects, RiseError, ShareError, SinkError,
    SsdBlock, SsdSize, Tier,
};
use kvasir_proto::{BlockKey, Class, Mark, Share, Side, SlotIndex, Tenant, TxId};

use crate::support::{EPOCH, LEASE_MS, Node, namespace, options};

const CLIENT: AttachEpoch = AttachEpoch(1 << 31);

pub(crate) fn object(name: u8) -> BlockKey {
    BlockKey([name; 16])
}

fn share(serial: u64, side: Side) -> Share {
    Share { tx: TxId { conductor_incarnation: 9, serial }, side }
}

fn wanted(serial: u64, names: &[u8]) -> ReserveObjects {
    ReserveObjects {
        share: share(serial, Side::Prefill),
        epoch: CLIENT,
        namespace: namespace("objects"),
        keys: names.iter().copied().map(object).collect(),
        lease_ms: LEASE_MS,
    }
}

pub(crate) fn reserve(node: &mut Node, serial: u64, names: &[u8]) -> Vec<SlotIndex> {
    let slots = node.blocks.reserve_objects(node.now_ms, &wanted(serial, names));
    node.check();
    slots.expect("room")
}

pub(crate) fn commit(node: &mut Node, serial: u64, page: u32) -> Result<Commit, ShareError> {
    let commit = node.blocks.commit_page(share(serial, Side::Prefill), page, 7);
    node.check();
    commit
}

pub(crate) fn release(node: &mut Node, serial: u64) {
    node.blocks.release(node.now_ms, share(serial, Side::Prefill)).expect("an open share");
    node.check();
    while let Some(action) = node.blocks.poll_action() {
        assert!(matches!(action, Action::Ended { outcome: Outcome::Released, .. }), "{action:?}");
    }
}

pub(crate) fn put(node: &mut Node, serial: u64, names: &[u8]) {
    reserve(node, serial, names);
    for page in 0..names.len() as u32 {
        assert_eq!(commit(node, serial, page), Ok(Commit::Indexed));
    }
    release(node, serial);
}

pub(crate) fn find(node: &Node, names: &[u8]) -> Vec<Option<Tier>> {
    names.iter().map(|&name| node.blocks.find_object(namespace("objects"), object(name))).collect()
}

#[test]
fn an_object_is_found_from_its_commit_on_and_what_is_not_committed_is_given_back() {
    let mut node = Node::new(8);
    let slots = reserve(&mut node, 1, &[1, 2, 3]);
    assert_eq!(find(&node, &[1, 2, 3]), [None; 3]);
    assert_eq!(commit(&mut node, 1, 1), Ok(Commit::Indexed));
    assert_eq!(find(&node, &[1, 2, 3]), [None, Some(Tier::Dram), None]);
    release(&mut node, 1);
    let keys = [object(1), object(2), object(2)];
    let got = node.blocks.get_objects(CLIENT, 5, namespace("objects"), &keys);
    assert_eq!(got, Ok(vec![None, Some(slots[1]), Some(slots[1])]));
    node.check();
    assert_eq!(node.blocks.counts().pins, 2);
    assert!(node.blocks.unpin(CLIENT, 5));
    node.assert_idle();
    assert_eq!(node.blocks.counts().free, 7);
}

#[test]
fn objects_follow_no_other_and_each_is_evicted_by_itself() {
    let mut node = Node::new(3);
    put(&mut node, 1, &[1, 2, 3]);
    let pinned = node.blocks.get_objects(CLIENT, 1, namespace("objects"), &[object(1)]);
    assert!(pinned.is_ok_and(|slots| slots[0].is_some()));
    put(&mut node, 2, &[4, 5]);
    assert_eq!(find(&node, &[1, 4, 5]), [Some(Tier::Dram); 3]);
    let error = node.blocks.reserve_objects(node.now_ms, &wanted(3, &[6, 7, 8]));
    assert_eq!(error, Err(AllocateError::NoSpace { available: 2, wanted: 3 }));
    let error = node.blocks.reserve_objects(node.now_ms, &wanted(3, &[6, 7, 8, 9]));
    assert_eq!(error, Err(AllocateError::TooLarge { wanted: 4, slots: 3 }));
    node.check();
}

#[test]
fn an_object_that_is_there_stays_as_it_is() {
    let mut node = Node::new(4);
    reserve(&mut node, 1, &[1]);
    reserve(&mut node, 2, &[1]);
    assert_eq!(commit(&mut node, 2, 0), Ok(Commit::Indexed));
    let kept = node.blocks.block(object(1)).expect("an object").slot;
    release(&mut node, 2);
    assert_eq!(commit(&mut node, 1, 0), Ok(Commit::Duplicate { kept }));
    release(&mut node, 1);
    node.assert_idle();
    assert_eq!(node.blocks.counts().committed, 1);
}

#[test]
fn objects_of_another_namespace_are_neither_found_nor_replaced() {
    let mut node = Node::new(4);
    put(&mut node, 1, &[1]);
    let other = namespace("another");
    assert_eq!(node.blocks.find_object(other, object(1)), None);
    assert_eq!(node.blocks.get_objects(CLIENT, 1, other, &[object(1)]), Ok(vec![None]));
    assert!(!node.remove(other, object(1)));
    let lying = ReserveObjects { namespace: other, ..wanted(2, &[1]) };
    node.blocks.reserve_objects(node.now_ms, &lying).expect("room");
    assert!(matches!(commit(&mut node, 2, 0), Err(ShareError::Refused(_))));
    release(&mut node, 2);
    assert_eq!(find(&node, &[1]), [Some(Tier::Dram)]);
    node.assert_idle();
}

#[test]
fn a_block_of_a_prompt_that_follows_another_is_no_object() {
    let mut node = Node::new(8);
    node.fill("1p", "ab");
    let keys = crate::support::chain("ab");
    let got = node.blocks.get_objects(EPOCH, 1, namespace(""), &keys).expect("to pin");
    assert!(got[0].is_some() && got[1].is_none());
    node.check();
}

#[test]
fn a_client_that_dies_loses_what_it_had_reserved_and_pinned() {
    let mut node = Node::new(4);
    put(&mut node, 1, &[1]);
    reserve(&mut node, 2, &[2, 3]);
    let got = node.blocks.get_objects(CLIENT, 1, namespace("objects"), &[object(1)]);
    assert!(got.is_ok());
    node.blocks.engine_gone(node.now_ms, CLIENT);
    while node.blocks.poll_action().is_some() {}
    node.assert_idle();
    assert_eq!(find(&node, &[1, 2, 3]), [Some(Tier::Dram), None, None]);
}

#[test]
fn a_lease_that_runs_out_quarantines_until_the_client_has_let_go() {
    let mut node = Node::new(4);
    reserve(&mut node, 1, &[1]);
    node.now_ms += LEASE_MS;
    node.blocks.handle_timeout(node.now_ms);
    let stop = node.blocks.poll_action();
    let of_it = |action: &Action| {
        matches!(action, Action::StopEngine { epoch: CLIENT, reason: AbortReason::LeaseOver, .. })
    };
    assert!(stop.as_ref().is_some_and(of_it), "{stop:?}");
    assert_eq!(node.blocks.counts().quarantined, 1);
    assert_eq!(commit(&mut node, 1, 0), Err(ShareError::Ending));
    node.blocks.release(node.now_ms, share(1, Side::Prefill)).expect("it ends");
    node.assert_idle();
    assert_eq!(find(&node, &[1]), [None]);
}

#[test]
fn nothing_is_remembered_of_what_was_put() {
    let mut node = Node::with(Options { finished_max: 2, ..options(4) });
    for serial in 0..10 {
        put(&mut node, serial, &[serial as u8]);
    }
    let counts = node.blocks.counts();
    assert_eq!((counts.finished, counts.finished_forgotten_total), (0, 0));
}

#[test]
fn what_is_removed_is_found_no_more_and_stays_for_who_reads_it() {
    let mut node = Node::new(4);
    put(&mut node, 1, &[1, 2]);
    let got = node.blocks.get_objects(CLIENT, 1, namespace("objects"), &[object(1)]);
    assert!(got.is_ok());
    assert!(node.remove(namespace("objects"), object(1)));
    assert!(node.remove(namespace("objects"), object(2)));
    assert!(!node.remove(namespace("objects"), object(2)));
    node.check();
    let counts = node.blocks.counts();
    assert_eq!((counts.leaving, counts.free, counts.dropped_total), (1, 3, 0));
    assert_eq!(find(&node, &[1, 2]), [None, None]);
    assert!(node.blocks.unpin(CLIENT, 1));
    node.assert_idle();
    put(&mut node, 2, &[1]);
}

#[test]
fn the_pins_of_a_client_are_bounded() {
    let mut node = Node::with(Options { get_pins_max: 1, ..options(4) });
    put(&mut node, 1, &[1, 2]);
    let keys = [object(1), object(2)];
    let error = node.blocks.get_objects(CLIENT, 1, namespace("objects"), &keys);
    assert_eq!(error, Err(GetError::TooManyPins(1)));
    node.assert_idle();
}

#[test]
fn slots_that_come_free_are_told_with_their_new_generation() {
    let mut node = Node::new(2);
    assert_eq!(node.blocks.poll_freed(), None);
    node.blocks.note_freed();
    put(&mut node, 1, &[1]);
    assert_eq!(node.blocks.poll_freed(), None, "it is committed");
    let before = node.blocks.block(object(1)).expect("an object");
    let (slot, generation) = (before.slot, before.generation);
    node.remove(namespace("objects"), object(1));
    let freed = node.blocks.poll_freed().expect("a slot");
    assert_eq!(freed.0, slot);
    assert_ne!(freed.1, generation);
    assert_eq!(node.blocks.poll_freed(), None);
}

/// One object on the SSD, and in no slot.
fn node_with_one_on_ssd() -> Node {
    let mut node = Node::with(Options { demote_ahead_percent: 100, ..options(2) });
    node.blocks.set_extents(7, 10);
    let size = SsdSize { bytes_max: 100, context_bytes_max: 60, tenant_bytes_max: 40 };
    node.blocks.ssd_ready(size, Vec::new());
    put(&mut node, 1, &[1]);
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let (sink, key) = node.sinks.pop().expect("it sinks");
    assert_eq!(key, object(1));
    node.blocks.sunk(node.now_ms, sink, Ok(()));
    reserve(&mut node, 2, &[2, 3]);
    release(&mut node, 2);
    node
}

#[test]
fn an_object_that_is_only_on_the_ssd_rises_and_is_got_then() {
    let mut node = node_with_one_on_ssd();
    assert_eq!(find(&node, &[1]), [Some(Tier::Ssd)]);
    let request = ReserveObjects { share: share(3, Side::Source), ..wanted(3, &[1]) };
    assert!(node.blocks.raise_object(node.now_ms, &request));
    node.actions();
    let (rise, key) = node.rises.pop().expect("it is read");
    assert_eq!(key, object(1));
    node.blocks.risen(node.now_ms, rise, Ok(7));
    assert_eq!(node.actions(), "Risen/1(3s)");
    let got = node.blocks.get_objects(CLIENT, 1, namespace("objects"), &[object(1)]);
    assert!(got.is_ok_and(|slots| slots[0].is_some()));
    node.blocks.release(node.now_ms, request.share).expect("an open share");
    assert!(node.blocks.unpin(CLIENT, 1));
    assert_eq!(node.actions(), "Released(3s)");
    node.assert_idle();
    let again = ReserveObjects { share: share(4, Side::Source), ..wanted(4, &[1]) };
    assert!(!node.blocks.raise_object(node.now_ms, &again), "it is here");
    let absent = ReserveObjects { share: share(5, Side::Source), ..wanted(5, &[9]) };
    assert!(!node.blocks.raise_object(node.now_ms, &absent), "it is nowhere");
}

#[test]
fn what_is_removed_is_erased_from_the_ssd_and_who_asked_hears_when_it_is() {
    let mut node = node_with_one_on_ssd();
    assert!(node.remove(namespace("objects"), object(1)));
    node.actions();
    let [(sink, key)] = node.erased[..] else { panic!("{:?}", node.erased) };
    assert_eq!(key, object(1));
    assert_eq!(find(&node, &[1]), [None]);
    assert!(node.kept.is_empty(), "it may come back still");
    node.blocks.sunk(node.now_ms, sink, Ok(()));
    node.actions();
    assert!(matches!(node.kept[..], [(_, Some(0))]), "{:?}", node.kept);
    assert!(node.forgotten.is_empty());
    node.assert_idle();
}

#[test]
fn a_removal_that_is_not_written_is_told_so() {
    let mut node = node_with_one_on_ssd();
    assert!(node.remove(namespace("objects"), object(1)));
    node.actions();
    let (sink, _) = node.erased.pop().expect("it is being erased");
    node.blocks.sunk(node.now_ms, sink, Err(SinkError::Failed));
    node.actions();
    assert!(matches!(node.kept[..], [(_, None)]), "{:?}", node.kept);
    assert_eq!(node.forgotten, [object(1)], "it is not found until a restart");
}

#[test]
fn what_has_made_room_on_the_ssd_is_erased_too_and_what_is_another_ones_is_not() {
    let mut node = node_with_one_on_ssd();
    assert!(!node.remove(namespace("another"), object(1)), "it is not theirs");
    assert!(!node.remove(namespace("objects"), object(9)), "it is not there");
    node.actions();
    let erased: Vec<BlockKey> = node.erased.iter().map(|(_, key)| *key).collect();
    assert_eq!(erased, [object(9)]);
    assert_eq!(find(&node, &[1]), [Some(Tier::Ssd)]);
}

#[test]
fn nothing_is_removed_while_one_of_them_is_written_anew_from_the_ssd() {
    let mut node = node_with_one_on_ssd();
    ask_to_keep(&mut node, 1);
    let keys = [object(2), object(1)];
    let removed = node.blocks.remove_objects(node.now_ms, namespace("objects"), &keys);
    assert_eq!(removed, Err(KeepError::Busy));
    let (sink, _) = node.sinks.pop().expect("it is written anew");
    node.blocks.sunk(node.now_ms, sink, Ok(()));
    node.actions();
    assert!(node.remove(namespace("objects"), object(1)));
}

#[test]
fn what_is_read_of_an_object_that_was_removed_meanwhile_counts_for_nothing() {
    for (result, is_late) in
        [(Ok(7), false), (Err(RiseError::Gone), false), (Ok(7), true), (Err(RiseError::Gone), true)]
    {
        let mut node = node_with_one_on_ssd();
        let request = ReserveObjects { share: share(3, Side::Source), ..wanted(3, &[1]) };
        assert!(node.blocks.raise_object(node.now_ms, &request));
        node.actions();
        let (rise, _) = node.rises.pop().expect("it is read");
        if is_late {
            node.now_ms += Options::default().ssd_timeout_ms;
            node.blocks.handle_timeout(node.now_ms);
        }
        assert!(node.remove(namespace("objects"), object(1)));
        node.actions();
        put(&mut node, 4, &[1]);
        let new = at(&node, 1);
        node.blocks.risen(node.now_ms, rise, result);
        node.actions();
        assert_eq!(at(&node, 1), new, "{result:?}");
        assert!(node.forgotten.is_empty(), "an extent of the new one would be forgotten");
    }
}

#[test]
fn a_removed_object_is_not_read_into_memory_again() {
    let mut node = node_with_one_on_ssd();
    let request = ReserveObjects { share: share(3, Side::Source), ..wanted(3, &[1]) };
    assert!(node.blocks.raise_object(node.now_ms, &request));
    node.actions();
    let (rise, _) = node.rises.pop().expect("it is read");
    assert!(node.remove(namespace("objects"), object(1)));
    node.blocks.risen(node.now_ms, rise, Ok(7));
    node.actions();
    assert_eq!(find(&node, &[1]), [None]);
    node.check();
}

/// One that sinks by itself while it is removed, and another one of its name that is kept then.
/// Its removal is being written between them.
fn node_with_two_extents() -> (Node, [u64; 3]) {
    let mut node = Node::with(Options { demote_ahead_percent: 100, ..options(24) });
    node.blocks.set_extents(7, 10);
    let (bytes_max, context_bytes_max, tenant_bytes_max) = (100, 100, 100);
    node.blocks.ssd_ready(SsdSize { bytes_max, context_bytes_max, tenant_bytes_max }, Vec::new());
    put(&mut node, 1, &[1]);
    node.blocks.sink_ahead(node.now_ms);
    node.actions();
    let (first, _) = node.sinks.pop().expect("it sinks");
    assert!(node.remove(namespace("objects"), object(1)));
    node.actions();
    let (removal, _) = node.erased.pop().expect("it is being erased");
    put(&mut node, 2, &[1]);
    ask_to_keep(&mut node, 1);
    let (second, _) = node.sinks.pop().expect("it is being written");
    (node, [first, removal, second])
}

#[test]
fn what_is_kept_under_the_name_of_a_removed_object_stays() {
    let (mut node, sinks) = node_with_two_extents();
    for sink in sinks {
        node.blocks.sunk(node.now_ms, sink, Ok(()));
        node.actions();
        assert!(node.forgotten.is_empty(), "that may be the new one by now");
    }
    assert!(matches!(node.kept[..], [(_, Some(0)), (_, Some(1))]), "{:?}", node.kept);
    // It is all that is there when it has left memory.
    reserve(&mut node, 3, &(10..34).collect::<Vec<u8>>());
    assert_eq!(find(&node, &[1]), [Some(Tier::Ssd)]);
}

#[test]
fn the_former_extent_is_forgotten_when_the_new_one_is_not_written() {
    let (mut node, [first, removal, second]) = node_with_two_extents();
    node.blocks.sunk(node.now_ms, first, Ok(()));
    node.blocks.sunk(node.now_ms, removal, Err(SinkError::Failed));
    node.actions();
    assert!(node.forgotten.is_empty(), "the new one would go with it");
    node.blocks.sunk(node.now_ms, second, Err(SinkError::Failed));
    node.actions();
    assert_eq!(node.forgotten, [object(1)]);
}

pub(crate) const SIZE: SsdSize =
    SsdSize { bytes_max: 100, context_bytes_max: 100, tenant_bytes_max: 100 };

/// What the SSD has under a name, as it is found at a start.
pub(crate) fn extent(name: u8, expires_unix_ms: Option<u64>) -> SsdBlock {
    let mark = |expires_unix_ms| Mark {
        tenant: Tenant(1),
        expires_unix_ms,
        created_unix_ms: None,
        copies: 1,
    };
    SsdBlock {
        key: object(name),
        namespace: namespace("objects"),
        parent: None,
        class: expires_unix_ms.map_or(Class::Normal, |expires_unix_ms| Class::Context {
            tenant: Tenant(1),
            expires_unix_ms,
        }),
        mark: expires_unix_ms.map(mark),
        layout: 7,
        bytes: 10,
    }
}

#[test]
fn what_the_ssd_has_of_another_namespace_is_not_replaced_and_not_removed() {
    let mut node = node_that_keeps();
    let theirs = SsdBlock { namespace: namespace("another"), ..extent(1, Some(9_000)) };
    node.blocks.ssd_ready(SIZE, vec![theirs]);
    reserve(&mut node, 1, &[1]);
    assert!(matches!(commit(&mut node, 1, 0), Err(ShareError::Refused(_))));
    release(&mut node, 1);
    assert!(!node.remove(namespace("objects"), object(1)));
    // Nobody could know it yet.
    node.blocks.ssd_gone();
    put(&mut node, 2, &[1]);
    node.blocks.ssd_ready(SIZE, vec![theirs]);
    node.check();
    node.remove(namespace("objects"), object(1));
    assert!(node.erased.is_empty() && node.forgotten.is_empty());
    assert_eq!(node.blocks.find_object(namespace("another"), object(1)), Some(Tier::Ssd));
    node.assert_idle();
}

#[test]
fn what_the_ssd_has_is_removed_though_blocks_of_now_are_too_large_for_it() {
    let mut node = node_that_keeps();
    node.blocks.ssd_ready(SIZE, vec![extent(1, None)]);
    node.blocks.set_extents(8, 0);
    let removed = node.blocks.remove_objects(node.now_ms, namespace("objects"), &[object(1)]);
    let (count, keep) = removed.expect("nothing is in its way");
    node.actions();
    let (removal, of) = node.erased.pop().expect("it is erased");
    assert_eq!((count, of, node.kept.len()), (1, object(1), 0));
    node.blocks.sunk(node.now_ms, removal, Ok(()));
    node.actions();
    assert_eq!(node.kept, [(keep.expect("it is waited for"), Some(0))]);
}

#[test]
fn what_is_coming_of_a_removed_object_from_another_node_counts_for_nothing() {
    let mut node = Node::new(8);
    let coming = |serial: u64, name: u8, of: &str| kvasir_blocks::Allocate {
        share: share(serial, Side::Prefill),
        namespace: namespace(of),
        keys: vec![object(name)],
        prompt_tokens: crate::support::BLOCK_TOKENS + 1,
        lease_ms: LEASE_MS,
        fetch_until_block: 1,
        has_remote_writer: true,
        is_ephemeral: false,
        leaves_ssd: false,
    };
    for (serial, name, of) in [(1, 1, "objects"), (2, 2, "objects"), (3, 1, "another")] {
        node.blocks.allocate(node.now_ms, &coming(serial, name, of)).expect("room");
    }
    node.remove(namespace("objects"), object(1));
    node.check();
    let is_aborted =
        |serial: u64| node.blocks.share(share(serial, Side::Prefill)).is_none_or(|of| of.aborting);
    assert_eq!([1, 2, 3].map(is_aborted), [true, false, false]);
}

#[test]
fn what_is_kept_in_another_layout_replaces_what_the_ssd_had_and_can_be_had() {
    let mut node = node_that_keeps();
    node.blocks.ssd_ready(SIZE, vec![extent(1, Some(9_000)), extent(2, None), extent(3, None)]);
    node.blocks.set_extents(8, 20);
    assert_eq!(find(&node, &[1, 2]), [None, None], "it has another layout");
    node.check();
    put(&mut node, 1, &[1, 2]);
    ask_to_keep(&mut node, 1);
    let sinks = std::mem::take(&mut node.sinks);
    assert_eq!(sinks.len(), 1, "it is written anew");
    node.blocks.sunk(node.now_ms, sinks[0].0, Ok(()));
    node.check();
    let counts = node.blocks.counts();
    assert_eq!((counts.ssd_bytes, counts.context_bytes), (40, 20));
    node.actions();
    reserve(&mut node, 2, &[10, 11, 12, 13]);
    assert_eq!(find(&node, &[1, 2]), [Some(Tier::Ssd), None]);
    release(&mut node, 2);
    let wanted = ReserveObjects { share: share(3, Side::Source), ..wanted(3, &[1]) };
    assert!(node.blocks.raise_object(node.now_ms, &wanted));
    // What nobody can have now is removed for those who could have it later.
    let (count, keep) = node
        .blocks
        .remove_objects(node.now_ms, namespace("objects"), &[object(3)])
        .expect("nothing is in its way");
    assert!((count, keep.is_some()) == (1, true));
    assert_eq!(node.blocks.counts().ssd_bytes, 30);
    node.check();
}

pub(crate) fn at(node: &Node, name: u8) -> ObjectAt {
    node.blocks.object_at(namespace("objects"), object(name)).expect("it is in memory")
}

/// The client that has put it for as long as it lives has ended.
pub(crate) fn end(node: &mut Node, object: &ObjectAt) -> bool {
    let gone = node.blocks.end_object(node.now_ms, object);
    node.check();
    gone
}

pub(crate) fn ask_to_keep(node: &mut Node, name: u8) {
    let wanted = KeepRequest {
        namespace: namespace("objects"),
        keys: vec![object(name)],
        tenant: Tenant(1),
        expires_unix_ms: 9_000,
        created_unix_ms: None,
        copies: 1,
    };
    node.blocks.keep(node.now_ms, &wanted).expect("room");
    node.actions();
}

pub(crate) fn node_that_keeps() -> Node {
    let mut node = Node::with(Options { demote_ahead_percent: 0, ..options(4) });
    node.blocks.set_extents(7, 10);
    let (bytes_max, context_bytes_max, tenant_bytes_max) = (100, 100, 100);
    node.blocks.ssd_ready(SsdSize { bytes_max, context_bytes_max, tenant_bytes_max }, Vec::new());
    node
}

/// A node without an SSD, whose object store takes one block at a time.
fn node_with_bucket() -> Node {
    let bucket = BucketOptions { uploads_max: 1, tenant_bytes_max: 40, ..BucketOptions::default() };
    let mut node = Node::with(Options { bucket, demote_ahead_percent: 0, ..options(8) });
    node.blocks.set_extents(7, 10);
    node.blocks.bucket_listed(Vec::new(), true);
    node.blocks.set_bucket_usable(true);
    node
}

pub(crate) fn sent(node: &mut Node, name: u8, result: Result<(), SinkError>) {
    let (upload, key, _) = node.uploads.pop().expect("it is being sent");
    assert_eq!(key, object(name));
    node.blocks.uploaded(node.now_ms, upload, result);
    node.actions();
}

#[test]
fn what_a_tenant_was_told_is_kept_does_not_go_with_the_client_that_had_put_it() {
    let mut node = node_that_keeps();
    put(&mut node, 1, &[1, 2, 3]);
    ask_to_keep(&mut node, 1);
    for (sink, _) in std::mem::take(&mut node.sinks) {
        node.blocks.sunk(node.now_ms, sink, Ok(()));
    }
    node.actions();
    // Another one is being written.
    ask_to_keep(&mut node, 2);
    let sinks = std::mem::take(&mut node.sinks);
    assert_eq!(sinks.len(), 1);
    let ended = [1, 2, 3].map(|name| {
        let object = at(&node, name);
        end(&mut node, &object)
    });
    assert_eq!(ended, [false, false, true]);
    for (sink, _) in sinks {
        node.blocks.sunk(node.now_ms, sink, Ok(()));
    }
    node.actions();
    assert_eq!(find(&node, &[1, 2, 3]), [Some(Tier::Dram), Some(Tier::Dram), None]);
    assert!(
        node.blocks.ssd_block(object(1)).is_some() && node.blocks.ssd_block(object(2)).is_some()
    );
}

#[test]
fn what_others_have_put_since_does_not_go_with_the_client_that_had_put_the_former_one() {
    for is_pinned in [true, false] {
        let mut node = Node::new(2);
        node.fill("1p", "a");
        put(&mut node, 1, &[1]);
        let first = at(&node, 1);
        assert!(node.blocks.is_there(&first));
        let keys = if is_pinned { vec![object(1)] } else { Vec::new() };
        node.blocks.get_objects(CLIENT, 1, namespace("objects"), &keys).expect("room");
        assert!(node.remove(namespace("objects"), object(1)));
        assert!(!node.blocks.is_there(&first));
        put(&mut node, 2, &[1]);
        let second = at(&node, 1);
        assert_eq!(second.slot != first.slot, is_pinned, "a pin holds the slot");
        assert!(!end(&mut node, &first), "it is another's");
        assert_eq!(find(&node, &[1]), [Some(Tier::Dram)]);
        assert!(end(&mut node, &second));
        assert_eq!(find(&node, &[1]), [None]);
    }
}

#[test]
fn what_was_being_kept_when_its_client_ended_goes_when_that_fails() {
    let mut node = node_that_keeps();
    put(&mut node, 1, &[1, 2]);
    for (name, result, stays) in [(1, Err(SinkError::Failed), false), (2, Ok(()), true)] {
        ask_to_keep(&mut node, name);
        let (sink, _) = node.sinks.pop().expect("it is being written");
        let object = at(&node, name);
        assert!(!end(&mut node, &object), "somebody waits for it");
        assert_eq!(find(&node, &[name]), [Some(Tier::Dram)]);
        node.blocks.sunk(node.now_ms, sink, result);
        node.actions();
        node.now_ms += Options::default().sink_retry_ms;
        assert_eq!(find(&node, &[name]), [stays.then_some(Tier::Dram)]);
    }
    node.assert_idle();
}

#[test]
fn what_counted_as_kept_because_of_a_chain_goes_when_that_is_not_kept_after_all() {
    let mut node = node_that_keeps();
    node.fill("1p", "ab");
    let keys = crate::support::chain("ab");
    let first = node.blocks.object_at(namespace(""), keys[0]).expect("it is in memory");
    let wanted = KeepRequest {
        namespace: namespace(""),
        keys,
        tenant: Tenant(1),
        expires_unix_ms: 9_000,
        created_unix_ms: None,
        copies: 1,
    };
    node.blocks.keep(node.now_ms, &wanted).expect("room");
    node.actions();
    let [(sink, _), (next, _)] = node.sinks[..] else { panic!("{:?}", node.sinks) };
    node.sinks.clear();
    node.blocks.sunk(node.now_ms, sink, Ok(()));
    assert!(!end(&mut node, &first), "somebody waits for the chain");
    node.blocks.sunk(node.now_ms, next, Err(SinkError::Failed));
    node.actions();
    assert_eq!(node.blocks.find_object(namespace(""), first.key), None);
    node.assert_idle();
}

#[test]
fn what_is_put_anew_stays_when_keeping_the_former_one_fails() {
    let mut node = node_that_keeps();
    put(&mut node, 1, &[1]);
    ask_to_keep(&mut node, 1);
    let (sink, _) = node.sinks.pop().expect("it is being written");
    let object = at(&node, 1);
    assert!(!end(&mut node, &object));
    assert!(node.remove(namespace("objects"), object.key));
    node.actions();
    let (removal, _) = node.erased.pop().expect("it is being erased");
    put(&mut node, 2, &[1]);
    node.blocks.sunk(node.now_ms, sink, Err(SinkError::Failed));
    node.blocks.sunk(node.now_ms, removal, Ok(()));
    node.actions();
    assert_eq!(find(&node, &[1]), [Some(Tier::Dram)]);
    node.assert_idle();
}

#[test]
fn what_the_object_store_keeps_does_not_go_with_the_client_that_had_put_it() {
    let mut node = node_with_bucket();
    put(&mut node, 1, &[1]);
    ask_to_keep(&mut node, 1);
    sent(&mut node, 1, Ok(()));
    let object = at(&node, 1);
    assert!(!end(&mut node, &object), "a tenant was told that it is kept");
    node.actions();
    assert_eq!(node.discards, []);
    assert_eq!(find(&node, &[1]), [Some(Tier::Dram)]);
    assert!(node.blocks.bucket_block(object.key).is_some());
    node.assert_idle();
}

#[test]
fn what_somebody_waits_for_in_the_object_store_stays_until_that_fails() {
    let mut node = node_with_bucket();
    put(&mut node, 1, &[1, 2, 3]);
    // One is being sent, and the others wait for that.
    [1, 2, 3].into_iter().for_each(|name| ask_to_keep(&mut node, name));
    assert_eq!(node.uploads.len(), 1);
    for name in [1, 2, 3] {
        let object = at(&node, name);
        assert!(!end(&mut node, &object), "somebody waits for it");
    }
    assert_eq!(find(&node, &[1, 2, 3]), [Some(Tier::Dram); 3]);
    sent(&mut node, 1, Err(SinkError::Failed));
    assert_eq!(find(&node, &[1, 2, 3]), [None, Some(Tier::Dram), Some(Tier::Dram)]);
    node.now_ms += BucketOptions::default().retry_ms;
    node.blocks.upload_ahead(node.now_ms);
    node.actions();
    sent(&mut node, 2, Ok(()));
    assert_eq!(find(&node, &[1, 2, 3]), [None, Some(Tier::Dram), Some(Tier::Dram)]);
    node.blocks.set_bucket_usable(false);
    node.blocks.upload_ahead(node.now_ms);
    node.actions();
    assert_eq!(find(&node, &[1, 2]), [None, Some(Tier::Dram)]);
    node.uploads.clear();
}
