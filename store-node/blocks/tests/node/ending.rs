//! Aborts, leases, releases, engines that are gone: who must confirm before a slot is free.

use kvasir_blocks::{
    AbortOutcome, AbortReason, Action, AllocateError, AttachEpoch, BindError, Options, ShareError,
};

use crate::support::{EPOCH, LEASE_MS, Node, namespace, options, request, share};

fn abort(node: &mut Node, name: &str) {
    let outcome = node.blocks.abort(node.now_ms, share(name), AbortReason::Asked("test".into()));
    assert_eq!(outcome, AbortOutcome::Aborting);
    node.check();
}

#[test]
fn slots_are_free_only_when_everyone_who_may_touch_them_has_confirmed() {
    // (share, bound, reading, confirmations in order) -> (actions, quarantined before each).
    let check = |name: &str, bound, reading, confirm: &[&str], want: &str, quarantined: &[u32]| {
        let mut node = Node::new(8);
        node.allocate(&request(name, "ab", 1)).expect("there is room");
        if bound {
            node.blocks.bind(share(name), EPOCH).expect("to bind");
        }
        if reading {
            node.blocks.read_begin(share(name)).expect("open");
        }
        abort(&mut node, name);
        assert_eq!(node.actions(), want, "{name} {bound} {reading}");
        for (confirmation, &quarantined) in confirm.iter().zip(quarantined) {
            let counts = node.blocks.counts();
            assert_eq!((counts.quarantined, counts.aborting), (quarantined, 1), "{confirmation}");
            assert_eq!(node.actions(), "", "not over before {confirmation}");
            match *confirmation {
                "release" => node.blocks.release(0, share(name)).expect("open"),
                "engine gone" => node.blocks.engine_gone(0, EPOCH),
                "writer stopped" => node.blocks.writer_stopped(0, share(name)),
                "writer cut off" => node.blocks.writer_cut_off(0, share(name)),
                "push stopped" => node.blocks.push_stopped(0, share(name)),
                "read end" => node.blocks.read_end(0, share(name)).expect("a read"),
                other => panic!("what is {other}?"),
            }
            node.check();
        }
        assert_eq!(node.actions(), format!("Aborted({name})"));
        node.assert_idle();
        assert_eq!(node.blocks.counts().free, 8);
    };
    let stop = "StopEngine(1p)";
    check("1p", true, false, &["release"], stop, &[3]);
    check("1p", true, false, &["engine gone"], stop, &[3]);
    let stop = "StopEngine(1p) StopPush(1p)";
    check("1p", true, true, &["release", "push stopped"], stop, &[3, 3]);
    check("1p", true, true, &["read end", "release"], stop, &[3, 3]);
    check("1p", false, true, &["push stopped"], "StopPush(1p)", &[3]);
    let stop = "StopWriter(1d) CancelImm(1d)";
    check("1d", false, false, &["writer stopped"], stop, &[3]);
    check("1d", false, false, &["writer cut off"], stop, &[3]);
    let stop = "StopEngine(1d) StopWriter(1d) CancelImm(1d)";
    check("1d", true, false, &["release", "writer stopped"], stop, &[3, 3]);
    check("1d", true, false, &["writer cut off", "engine gone"], stop, &[3, 3]);
}

fn ended_now(node: &mut Node) -> bool {
    node.actions().contains("Aborted")
}

#[test]
fn an_unbound_share_without_writers_ends_at_once() {
    let mut node = Node::new(8);
    node.allocate(&request("1p", "ab", 1)).expect("there is room");
    abort(&mut node, "1p");
    assert!(ended_now(&mut node));
    node.assert_idle();
}

#[test]
fn grown_and_held_pages_do_not_wait_for_the_remote_writer() {
    let mut node = Node::new(8);
    node.fill("1p", "a");
    node.open("2d", "ab", 1);
    node.blocks.grow(share("2d"), 2).expect("to grow");
    abort(&mut node, "2d");
    let counts = node.blocks.counts();
    assert_eq!((counts.quarantined, counts.pins), (4, 1));
    node.release("2d");
    // The two targets are left: the engine is done with the others.
    let counts = node.blocks.counts();
    assert_eq!((counts.quarantined, counts.pins, counts.imms), (2, 0, 1));
    node.blocks.release(0, share("2d")).expect("still known");
    node.check();
    assert_eq!(node.blocks.counts().quarantined, 2);
    node.blocks.writer_cut_off(0, share("2d"));
    node.actions();
    node.assert_idle();
}

#[test]
fn a_quarantined_slot_is_given_to_nobody() {
    let mut node = Node::new(3);
    node.allocate(&request("1d", "ab", 1)).expect("there is room");
    abort(&mut node, "1d");
    let refused = node.allocate(&request("2p", "", 1));
    assert_eq!(refused, Err(AllocateError::NoSpace { available: 0, wanted: 1 }));
    node.blocks.writer_stopped(0, share("1d"));
    assert!(node.allocate(&request("2p", "", 1)).is_ok());
}

#[test]
fn a_release_waits_for_pushes_that_are_under_way() {
    let mut node = Node::new(8);
    node.open("1p", "a", 1);
    node.commit("1p", 0);
    node.blocks.read_begin(share("1p")).expect("open");
    node.blocks.read_begin(share("1p")).expect("open");
    node.release("1p");
    assert_eq!(node.actions(), "");
    let counts = node.blocks.counts();
    assert_eq!((counts.allocated, counts.pins, counts.shares), (1, 1, 1));
    node.blocks.read_end(0, share("1p")).expect("a read");
    assert_eq!(node.actions(), "");
    node.blocks.read_end(0, share("1p")).expect("a read");
    assert_eq!(node.actions(), "Released(1p)");
    node.assert_idle();
    assert_eq!(node.blocks.read_end(0, share("1p")), Err(ShareError::Finished));
}

#[test]
fn a_push_goes_only_to_where_blocks_of_its_namespace_are_wanted() {
    let mut node = Node::new(8);
    for name in ["1p", "2s"] {
        assert_eq!(node.blocks.may_go_to(share(name), namespace("")), Err(ShareError::Unknown));
        node.allocate(&request(name, "a", 1)).expect("there is room");
        assert_eq!(node.blocks.may_go_to(share(name), namespace("")), Ok(()));
        let other = node.blocks.may_go_to(share(name), namespace("another tenant"));
        assert!(
            matches!(other, Err(ShareError::Refused(why)) if why.contains("another namespace"))
        );
        node.release(name);
        let over = node.blocks.may_go_to(share(name), namespace(""));
        assert_eq!(over, Err(ShareError::Finished));
    }
}

#[test]
fn a_push_that_is_never_taken_up_ends_with_the_lease() {
    let mut node = Node::new(8);
    node.open("1p", "a", 1);
    node.blocks.read_begin(share("1p")).expect("open");
    node.release("1p");
    node.blocks.handle_timeout(node.now_ms + LEASE_MS);
    assert_eq!(node.actions(), "StopPush(1p)");
    assert_eq!(node.blocks.read_begin(share("1p")), Err(ShareError::Ending));
    node.blocks.push_stopped(0, share("1p"));
    assert_eq!(node.actions(), "Aborted(1p)");
    node.assert_idle();
}

#[test]
fn a_release_before_the_pages_arrived_asks_the_writer_to_stop() {
    let mut node = Node::new(8);
    node.open("1d", "ab", 1);
    node.release("1d");
    assert_eq!(node.actions(), "StopWriter(1d) CancelImm(1d)");
    assert_eq!(node.blocks.counts().quarantined, 3);
    node.blocks.writer_stopped(0, share("1d"));
    assert_eq!(node.actions(), "Aborted(1d)");
    node.assert_idle();
}

#[test]
fn a_lease_that_runs_out_aborts() {
    let mut node = Node::new(16);
    node.open("1p", "a", 1);
    node.open("2d", "x", 1);
    node.open("3s", "a", 0);
    let over_ms = node.now_ms + LEASE_MS;
    node.blocks.renew(node.now_ms, share("2d"), 2 * LEASE_MS).expect("open");
    node.blocks.handle_timeout(over_ms - 1);
    assert_eq!(node.actions(), "");
    node.blocks.handle_timeout(over_ms);
    assert_eq!(node.actions(), "StopEngine(1p) Aborted(3s)");
    assert_eq!(node.blocks.renew(0, share("1p"), 1), Err(ShareError::Ending));
    assert_eq!(node.blocks.renew(0, share("3s"), 1), Err(ShareError::Finished));
    assert_eq!(node.blocks.poll_timeout(), Some(over_ms + LEASE_MS));
    node.blocks.handle_timeout(over_ms + LEASE_MS);
    assert_eq!(node.actions(), "StopEngine(2d) StopWriter(2d) CancelImm(2d)");
    let counts = node.blocks.counts();
    assert_eq!((counts.leases_over_total, counts.aborts_total), (3, 3));
    assert_eq!(counts.aborting_since_ms, Some(over_ms));
}

#[test]
fn the_reason_of_an_abort_reaches_the_engine() {
    let mut node = Node::new(8);
    node.open("1p", "a", 1);
    abort(&mut node, "1p");
    let reason = AbortReason::Asked("test".into());
    let stop = Action::StopEngine { share: share("1p"), epoch: EPOCH, reason };
    assert_eq!(node.blocks.poll_action(), Some(stop));
}

#[test]
fn an_engine_that_is_gone_releases_its_shares_and_pins_and_no_others() {
    let mut node = Node::new(24);
    node.fill("1p", "ab");
    let other = AttachEpoch(2);
    node.open("2p", "ab", 1);
    node.open("3d", "xy", 1);
    node.allocate(&request("4p", "q", 1)).expect("there is room");
    node.allocate(&request("5p", "r", 1)).expect("there is room");
    node.blocks.bind(share("5p"), other).expect("to bind");
    node.blocks.get(EPOCH, 1, &crate::support::chain("ab")).expect("to pin");
    node.blocks.get(other, 1, &crate::support::chain("a")).expect("to pin");
    node.blocks.engine_gone(0, EPOCH);
    assert_eq!(node.actions(), "Aborted(2p) StopWriter(3d) CancelImm(3d)");
    let counts = node.blocks.counts();
    assert_eq!((counts.shares, counts.get_pins, counts.pins), (3, 1, 1));
    node.blocks.engine_gone(0, EPOCH);
    assert_eq!(node.actions(), "");
    node.blocks.writer_stopped(0, share("3d"));
    node.blocks.abort_all(0, &AbortReason::Draining);
    assert_eq!(node.actions(), "Aborted(3d) Aborted(4p) StopEngine(5p)");
    node.blocks.engine_gone(0, other);
    node.actions();
    node.assert_idle();
}

#[test]
fn an_abort_of_an_unknown_share_refuses_it_when_it_comes_and_for_a_while() {
    let mut node = Node::with(Options { tombstone_ms: 1_000, ..options(8) });
    let abort = |node: &mut Node| {
        node.blocks.abort(node.now_ms, share("1p"), AbortReason::Asked(String::new()))
    };
    assert_eq!(abort(&mut node), AbortOutcome::Tombstoned);
    assert_eq!(abort(&mut node), AbortOutcome::Tombstoned);
    assert_eq!(node.allocate(&request("1p", "a", 1)), Err(AllocateError::Tombstoned));
    assert_eq!(node.blocks.bind(share("1p"), EPOCH), Err(BindError::Gone));
    assert_eq!(node.blocks.poll_timeout(), Some(node.now_ms + 1_000));
    // The other side of the same transaction is another share.
    assert!(node.allocate(&request("1d", "a", 1)).is_ok());
    node.now_ms += 1_000;
    assert!(node.allocate(&request("1p", "a", 1)).is_ok());
}

#[test]
fn tombstones_are_bounded_and_the_loss_is_counted() {
    let mut node = Node::with(Options { tombstones_max: 2, ..options(8) });
    for name in ["1p", "2p", "3p"] {
        node.blocks.abort(0, share(name), AbortReason::LeaseOver);
    }
    let counts = node.blocks.counts();
    assert_eq!((counts.tombstones, counts.tombstones_forgotten_total), (2, 1));
    assert!(node.allocate(&request("1p", "a", 1)).is_ok());
    assert_eq!(node.allocate(&request("2p", "a", 1)), Err(AllocateError::Tombstoned));
}

#[test]
fn what_comes_after_the_end_is_told_so() {
    let mut node = Node::with(Options { finished_ms: 10_000, ..options(8) });
    node.open("1p", "a", 1);
    node.release("1p");
    node.open("2p", "a", 1);
    abort(&mut node, "2p");
    assert_eq!(node.allocate(&request("2p", "a", 1)), Err(AllocateError::Tombstoned), "ending");
    node.release("2p");
    assert_eq!(node.allocate(&request("1p", "a", 1)), Err(AllocateError::Finished));
    assert_eq!(node.allocate(&request("2p", "a", 1)), Err(AllocateError::Tombstoned));
    for name in ["1p", "2p"] {
        let share = share(name);
        assert_eq!(node.blocks.bind(share, EPOCH), Err(BindError::Gone));
        assert_eq!(node.blocks.release(0, share), Err(ShareError::Finished));
        assert_eq!(node.blocks.renew(0, share, 1), Err(ShareError::Finished));
        assert_eq!(node.blocks.read_begin(share), Err(ShareError::Finished));
        assert_eq!(node.blocks.stop_writer(share), Err(ShareError::Finished));
        let outcome = node.blocks.abort(node.now_ms, share, AbortReason::LeaseOver);
        assert_eq!(outcome, AbortOutcome::AlreadyEnded);
        node.blocks.writer_stopped(0, share);
        node.blocks.push_stopped(0, share);
    }
    assert_eq!(node.blocks.counts().tombstones, 0);
    node.now_ms += 10_000;
    assert!(node.allocate(&request("1p", "a", 1)).is_ok(), "forgotten in the end");
}

#[test]
fn no_engine_takes_the_source_side() {
    let mut node = Node::new(8);
    node.open("1s", "a", 0);
    assert_eq!(node.blocks.bind(share("1s"), EPOCH), Err(BindError::Gone));
}

#[test]
fn a_share_that_waits_for_its_pushes_is_finished_to_an_allocation() {
    let mut node = Node::new(8);
    node.open("1p", "a", 1);
    node.blocks.read_begin(share("1p")).expect("open");
    node.release("1p");
    assert_eq!(node.allocate(&request("1p", "a", 1)), Err(AllocateError::Finished));
    assert_eq!(node.blocks.bind(share("1p"), AttachEpoch(2)), Err(BindError::Gone));
}

#[test]
fn finished_shares_are_bounded_and_the_loss_is_counted() {
    let mut node = Node::with(Options { finished_max: 1, ..options(8) });
    node.fill("1p", "a");
    node.fill("2p", "a");
    let counts = node.blocks.counts();
    assert_eq!((counts.finished, counts.finished_forgotten_total), (1, 1));
    assert_eq!(node.blocks.renew(0, share("1p"), 1), Err(ShareError::Unknown));
}

#[test]
fn an_aborted_share_neither_grows_nor_is_found_by_page() {
    let mut node = Node::new(8);
    node.open("1p", "a", 1);
    assert!(node.blocks.page_slot(share("1p"), 1).is_some());
    abort(&mut node, "1p");
    assert_eq!(node.blocks.grow(share("1p"), 1), Err(ShareError::Ending.into()));
    assert_eq!(node.blocks.page_slot(share("1p"), 1), None);
    let again = node.blocks.abort(0, share("1p"), AbortReason::LeaseOver);
    assert_eq!(again, AbortOutcome::AlreadyAborting);
    assert_eq!(node.blocks.shares().collect::<Vec<_>>(), [share("1p")]);
    assert!(node.blocks.share(share("1p")).is_some_and(|view| view.aborting));
}
