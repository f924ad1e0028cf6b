//! Objects of clients that are no engines: put by shares of their own, got one by one.

use kvasir_blocks::{
    AbortReason, Action, AllocateError, AttachEpoch, Commit, GetError, KeepRequest, Options,
    Outcome, ReserveObjects, ShareError, SsdSize, Tier,
};
use kvasir_proto::{BlockKey, Share, Side, SlotIndex, Tenant, TxId};

use crate::support::{EPOCH, LEASE_MS, Node, namespace, options};

const CLIENT: AttachEpoch = AttachEpoch(1 << 31);

fn object(name: u8) -> BlockKey {
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

fn reserve(node: &mut Node, serial: u64, names: &[u8]) -> Vec<SlotIndex> {
    let slots = node.blocks.reserve_objects(node.now_ms, &wanted(serial, names));
    node.check();
    slots.expect("room")
}

fn commit(node: &mut Node, serial: u64, page: u32) -> Result<Commit, ShareError> {
    let commit = node.blocks.commit_page(share(serial, Side::Prefill), page, vec![7]);
    node.check();
    commit
}

fn release(node: &mut Node, serial: u64) {
    node.blocks.release(node.now_ms, share(serial, Side::Prefill)).expect("an open share");
    node.check();
    while let Some(action) = node.blocks.poll_action() {
        assert!(matches!(action, Action::Ended { outcome: Outcome::Released, .. }), "{action:?}");
    }
}

fn put(node: &mut Node, serial: u64, names: &[u8]) {
    reserve(node, serial, names);
    for page in 0..names.len() as u32 {
        assert_eq!(commit(node, serial, page), Ok(Commit::Indexed));
    }
    release(node, serial);
}

fn find(node: &Node, names: &[u8]) -> Vec<Option<Tier>> {
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
    assert!(!node.blocks.remove_object(node.now_ms, other, object(1)));
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
    assert!(node.blocks.remove_object(node.now_ms, namespace("objects"), object(1)));
    assert!(node.blocks.remove_object(node.now_ms, namespace("objects"), object(2)));
    assert!(!node.blocks.remove_object(node.now_ms, namespace("objects"), object(2)));
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
    node.blocks.remove_object(node.now_ms, namespace("objects"), object(1));
    let freed = node.blocks.poll_freed().expect("a slot");
    assert_eq!(freed.0, slot);
    assert_ne!(freed.1, generation);
    assert_eq!(node.blocks.poll_freed(), None);
}

/// One object on the SSD, and in no slot.
fn node_with_one_on_ssd() -> Node {
    let mut node = Node::with(Options { sink_ahead_percent: 100, ..options(2) });
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
    node.blocks.risen(node.now_ms, rise, Ok(vec![7]));
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
fn what_is_removed_from_the_ssd_is_forgotten_there() {
    let mut node = node_with_one_on_ssd();
    assert!(node.blocks.remove_object(node.now_ms, namespace("objects"), object(1)));
    node.actions();
    assert_eq!(node.forgotten, [object(1)]);
    assert_eq!(find(&node, &[1]), [None]);
    node.assert_idle();
}

#[test]
fn what_a_tenant_was_told_is_kept_does_not_go_with_the_client_that_had_put_it() {
    let mut node = Node::with(Options { sink_ahead_percent: 0, ..options(4) });
    node.blocks.set_extents(7, 10);
    let (bytes_max, context_bytes_max, tenant_bytes_max) = (100, 100, 100);
    node.blocks.ssd_ready(SsdSize { bytes_max, context_bytes_max, tenant_bytes_max }, Vec::new());
    put(&mut node, 1, &[1, 2, 3]);
    let keep = |node: &mut Node, name: u8| {
        let wanted = KeepRequest {
            namespace: namespace("objects"),
            keys: vec![object(name)],
            tenant: Tenant(1),
            until_unix_ms: 9_000,
            since_unix_ms: None,
        };
        node.blocks.keep(node.now_ms, &wanted).expect("room");
        node.actions();
        std::mem::take(&mut node.sinks)
    };
    for (sink, _) in keep(&mut node, 1) {
        node.blocks.sunk(node.now_ms, sink, Ok(()));
    }
    node.actions();
    // Another one is being written.
    let sinks = keep(&mut node, 2);
    assert_eq!(sinks.len(), 1);
    let end = |node: &mut Node, name: u8| {
        node.blocks.end_object(node.now_ms, namespace("objects"), object(name))
    };
    assert_eq!([1, 2, 3].map(|name| end(&mut node, name)), [false, false, true]);
    for (sink, _) in sinks {
        node.blocks.sunk(node.now_ms, sink, Ok(()));
    }
    node.actions();
    assert_eq!(find(&node, &[1, 2, 3]), [Some(Tier::Dram), Some(Tier::Dram), None]);
    assert!(
        node.blocks.ssd_block(object(1)).is_some() && node.blocks.ssd_block(object(2)).is_some()
    );
}
