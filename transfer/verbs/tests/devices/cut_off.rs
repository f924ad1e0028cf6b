//! After a cut-off everything has come back, and nothing arrives any more.

use std::time::Duration;

use kvasir_transfer_verbs::{
    AckTimeout, ConnectOptions, Operation, Payload, PostError, QueuePairOptions, QueuePairState,
    Request, Side, WcStatus, WorkTag,
};

use crate::support::{End, Lab, assert_success, pair, wire};

#[test]
fn a_cut_off_brings_back_everything_that_was_posted() {
    let Some(lab) = Lab::open() else { return };
    let options =
        QueuePairOptions { send_depth: 8, receive_depth: 16, ..QueuePairOptions::default() };
    let (mut a, mut b) = pair(&lab, &lab, options);
    b.expect_imms(16);
    a.qp.post(&[Request::new(Operation::Imm { imm: 1 }, WorkTag(1)); 8]).expect("posted");
    let before = b.wait(Side::Receive, 8);
    assert_success(&before);
    b.expect_imms(8);

    b.qp.cut_off().expect("cut off");
    assert!(!b.qp.is_drained(), "nothing was polled yet");
    let flushed = b.drain();
    assert_eq!(b.qp.outstanding(Side::Receive), 0);
    assert_eq!(b.qp.outstanding(Side::Send), 0);
    let statuses: Vec<WcStatus> = flushed.iter().map(|ended| ended.status()).collect();
    assert_eq!(statuses, [WcStatus::Flushed; 16]);
    assert_eq!(b.qp.state().expect("answers"), QueuePairState::Error);
    b.qp.cut_off().expect("again, to no effect");
    assert!(b.qp.is_drained());
    let refused = b.qp.post(&[Request::new(Operation::Imm { imm: 1 }, WorkTag(1))]);
    assert!(matches!(refused, Err(PostError::Broken)), "{refused:?}");
}

#[test]
fn a_cut_off_flushes_what_is_on_the_way() {
    let Some((left, right)) = wire() else { return };
    let (mut a, mut b) = pair(&left, &right, QueuePairOptions::default());
    let (source, target) = (left.memory(64 * 1024), right.memory(64 * 1024));
    let slices = [source.slice(0, 64 * 1024)];
    let to = target.at(0, 64 * 1024);
    let write = Operation::Write { from: Payload::Slices(&slices), to };
    b.expect_imms(1);
    // Silent ones too come back, each with the failure that it had.
    let requests = vec![Request::new(write, WorkTag(1)).unsignalled(); a.qp.send_room()];
    a.qp.post(&requests).expect("posted");
    // The queue is full: the marker finds room all the same.
    a.qp.cut_off().expect("cut off");
    let ended = a.drain();
    assert_eq!(a.qp.outstanding(Side::Send), 0);
    assert!(ended.iter().any(|ended| ended.status() == WcStatus::Flushed));
}

#[test]
fn what_ended_in_silence_before_a_cut_off_is_counted_off_by_it() {
    let Some(lab) = Lab::open() else { return };
    let (mut a, mut b) = pair(&lab, &lab, QueuePairOptions::default());
    let (source, target) = (lab.memory(64), lab.memory(64));
    let slices = [source.slice(0, 64)];
    let write = Operation::Write { from: Payload::Slices(&slices), to: target.at(0, 64) };
    let told = Request::new(Operation::Imm { imm: 1 }, WorkTag(2));
    b.expect_imms(1);
    a.qp.post(&[told.unsignalled(), Request::new(write, WorkTag(1)).unsignalled()])
        .expect("posted");
    assert_success(&b.wait(Side::Receive, 1));
    assert_eq!(a.qp.outstanding(Side::Send), 2);
    a.qp.cut_off().expect("cut off");
    a.drain();
    assert_eq!(a.qp.outstanding(Side::Send), 0);
}

#[test]
fn nothing_arrives_after_a_cut_off() {
    let Some(lab) = Lab::open() else { return };
    let options = ConnectOptions {
        ack_timeout: AckTimeout::at_least(Duration::from_millis(4)).expect("in range"),
        retries: 2,
        ..ConnectOptions::default()
    };
    let mut a = End::new(&lab, QueuePairOptions::default());
    let mut b = End::new(&lab, QueuePairOptions::default());
    let (to_a, to_b) = (a.qp.address(), b.qp.address());
    a.qp.connect(&to_b, &options).expect("connected");
    b.qp.connect(&to_a, &options).expect("connected");
    let (source, target) = (lab.memory(4096), lab.memory(4096));
    source.fill(7);
    b.qp.cut_off().expect("cut off");
    assert!(b.qp.is_drained(), "nothing was outstanding");
    let refused = b.qp.post(&[Request::new(Operation::Imm { imm: 1 }, WorkTag(1))]);
    assert!(matches!(refused, Err(PostError::Broken)), "{refused:?}");

    let slices = [source.slice(0, 4096)];
    let write = Operation::Write { from: Payload::Slices(&slices), to: target.at(0, 4096) };
    a.qp.post(&[Request::new(write, WorkTag(1))]).expect("posted");
    let ended = a.wait(Side::Send, 1);
    assert!(!ended[0].is_success());
    assert_eq!(target.all(), [0; 4096]);
}

#[test]
fn a_queue_pair_that_failed_can_still_be_drained() {
    let Some(lab) = Lab::open() else { return };
    let (mut a, mut b) = pair(&lab, &lab, QueuePairOptions::default());
    b.expect_imms(1);
    a.expect_imms(3);
    let (source, target) = (lab.memory(64), lab.memory(64));
    let slices = [source.slice(0, 64)];
    let to = target.at(1, 0);
    let write = Operation::Write { from: Payload::Slices(&slices), to };
    a.qp.post(&[Request::new(write, WorkTag(1))]).expect("posted");
    assert_eq!(a.wait(Side::Send, 1)[0].status(), WcStatus::RemoteAccess);
    a.qp.cut_off().expect("cut off");
    a.drain();
    assert_eq!((a.qp.outstanding(Side::Send), a.qp.outstanding(Side::Receive)), (0, 0));
}

#[test]
fn a_queue_pair_without_a_peer_sends_nothing_and_can_be_cut_off() {
    let Some(lab) = Lab::open() else { return };
    let mut a = End::new(&lab, QueuePairOptions::default());
    a.expect_imms(3);
    let refused = a.qp.post(&[Request::new(Operation::Imm { imm: 1 }, WorkTag(1))]);
    assert!(matches!(refused, Err(PostError::NotConnected)), "{refused:?}");
    a.qp.cut_off().expect("cut off");
    let statuses: Vec<WcStatus> = a.drain().iter().map(|ended| ended.status()).collect();
    assert_eq!(statuses, [WcStatus::Flushed; 3]);
}
