//! What goes wrong is told by what can be done about it, and ends the connection.

use std::time::Duration;

use kvasir_transfer_verbs::{
    AckTimeout, ConnectOptions, Operation, Payload, PostError, QueuePairOptions, QueuePairState,
    RKey, ReceiverRetries, RegionOptions, Remedy, RemoteAddress, Request, Side, WcStatus, WorkTag,
};

use crate::support::{End, Lab, Registered, assert_success, pair};

/// Writes all of `source` to a place that the peer must refuse.
fn check_refused(lab: &Lab, source: &Registered, to: RemoteAddress) {
    let (mut a, mut b) = pair(lab, lab, QueuePairOptions::default());
    b.expect_imms(1);
    let slices = [source.slice(0, source.region.bytes())];
    let write = Operation::WriteImm { from: Payload::Slices(&slices), to, imm: 1 };
    let request = Request::new(write, WorkTag(1));
    // The second is behind the first when that fails.
    a.qp.post(&[request.unsignalled(), Request { tag: WorkTag(2), ..request }]).expect("posted");
    let ended = a.wait(Side::Send, 2);
    let statuses: Vec<WcStatus> = ended.iter().map(|ended| ended.status()).collect();
    assert_eq!(statuses, [WcStatus::RemoteAccess, WcStatus::Flushed]);
    assert_eq!(ended[0].status().remedy(), Some(Remedy::AskPeerAgain));
    assert_eq!(ended[0].tag(), Some(WorkTag(1)), "a failure is told without a signal");
    assert_eq!(a.qp.outstanding(Side::Send), 0);
    assert!(a.qp.is_broken());
    let refused = a.qp.post(&[request]);
    assert!(matches!(refused, Err(PostError::Broken)), "{refused:?}");
    assert_eq!(a.qp.state().expect("answers"), QueuePairState::Error);
}

#[test]
fn a_wrong_key_is_refused() {
    let Some(lab) = Lab::open() else { return };
    let (source, target) = (lab.memory(4096), lab.memory(4096));
    let right = target.at(0, 4096);
    check_refused(&lab, &source, RemoteAddress { rkey: RKey(right.rkey.0 ^ 0xff), ..right });
    assert_eq!(target.all(), [0; 4096]);
}

#[test]
fn a_write_past_the_end_of_the_region_is_refused() {
    let Some(lab) = Lab::open() else { return };
    let (source, target) = (lab.memory(4096), lab.memory(4096));
    source.fill(7);
    check_refused(&lab, &source, target.at(1, 0));
    assert_eq!(target.all(), [0; 4096]);
}

#[test]
fn a_region_that_peers_may_not_write_is_not_written() {
    let Some(lab) = Lab::open() else { return };
    let (source, target) = (lab.memory(4096), lab.memory(4096));
    source.fill(7);
    let options = RegionOptions { remote_write: false, ..RegionOptions::SHARED };
    let owner = std::sync::Arc::clone(&target.buffer);
    let readable = lab.pd.register(owner, 0..4096, options).expect("registered");
    check_refused(&lab, &source, readable.remote().at(0, 4096).expect("within"));
    assert_eq!(target.all(), [0; 4096]);
}

#[test]
fn memory_registered_again_has_a_new_key_and_the_old_one_is_refused() {
    let Some(lab) = Lab::open() else { return };
    let (source, target) = (lab.memory(4096), lab.memory(4096));
    source.fill(7);
    let old = target.at(0, 4096);
    let buffer = std::sync::Arc::clone(&target.buffer);
    drop(target.region);
    let owner = std::sync::Arc::clone(&buffer);
    let again = lab.pd.register(owner, 0..4096, RegionOptions::SHARED).expect("registered");
    let new = again.remote().at(0, 4096).expect("within");
    assert_ne!(new.rkey, old.rkey);
    check_refused(&lab, &source, old);
    assert_eq!(buffer.read(0, 4096).expect("within"), [0; 4096]);

    let (mut a, mut b) = pair(&lab, &lab, QueuePairOptions::default());
    b.expect_imms(1);
    let slices = [source.slice(0, 4096)];
    let write = Operation::WriteImm { from: Payload::Slices(&slices), to: new, imm: 1 };
    a.qp.post(&[Request::new(write, WorkTag(1))]).expect("posted");
    assert_success(&b.wait(Side::Receive, 1));
    assert_eq!(buffer.read(0, 4096).expect("within"), [7; 4096]);
}

#[test]
fn a_slice_of_a_region_that_is_gone_is_not_read() {
    let Some(lab) = Lab::open() else { return };
    let (mut a, _b) = pair(&lab, &lab, QueuePairOptions::default());
    let (source, target) = (lab.memory(4096), lab.memory(4096));
    source.fill(7);
    let slices = [source.slice(0, 4096)];
    drop(source);
    let write = Operation::Write { from: Payload::Slices(&slices), to: target.at(0, 4096) };
    a.qp.post(&[Request::new(write, WorkTag(1))]).expect("posted");
    let ended = a.wait(Side::Send, 1);
    assert_eq!(ended[0].status().remedy(), Some(Remedy::MendRequest), "{}", ended[0].status());
    assert_eq!(target.all(), [0; 4096]);
}

#[test]
fn a_peer_that_is_gone_is_noticed() {
    let Some(lab) = Lab::open() else { return };
    let mut a = End::new(&lab, QueuePairOptions::default());
    let b = End::new(&lab, QueuePairOptions::default());
    let options = ConnectOptions {
        ack_timeout: AckTimeout::at_least(Duration::from_millis(4)).expect("in range"),
        retries: 2,
        ..ConnectOptions::default()
    };
    a.qp.connect(&b.qp.address(), &options).expect("nothing is sent yet");
    drop(b);
    a.qp.post(&[Request::new(Operation::Imm { imm: 1 }, WorkTag(1)); 2]).expect("posted");
    let ended = a.wait(Side::Send, 2);
    assert_eq!(ended[0].status(), WcStatus::RetriesExceeded);
    assert_eq!(ended[0].status().remedy(), Some(Remedy::Reconnect));
    assert_eq!(ended[1].status(), WcStatus::Flushed);
}

#[test]
fn a_peer_without_receives_is_told_from_one_that_is_gone() {
    let Some(lab) = Lab::open() else { return };
    let mut a = End::new(&lab, QueuePairOptions::default());
    let mut b = End::new(&lab, QueuePairOptions::default());
    let (to_a, to_b) = (a.qp.address(), b.qp.address());
    let options = ConnectOptions {
        receiver_retries: ReceiverRetries::Times(1),
        receiver_not_ready_code: 1,
        ..ConnectOptions::default()
    };
    a.qp.connect(&to_b, &options).expect("connected");
    b.qp.connect(&to_a, &options).expect("connected");
    a.qp.post(&[Request::new(Operation::Imm { imm: 1 }, WorkTag(1))]).expect("posted");
    let ended = a.wait(Side::Send, 1);
    assert_eq!(ended[0].status(), WcStatus::ReceiverNotReady);
    assert_eq!(ended[0].status().remedy(), Some(Remedy::WaitForPeer));
}
