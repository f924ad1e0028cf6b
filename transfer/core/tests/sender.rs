//! The sending half, driven by hand: what is issued when, and that everything ends once, and rightly.

use std::num::NonZeroU32;

use kvasir_transfer_core::signal::Ordering;
use kvasir_transfer_core::{
    Action, Body, Frame, FrameKind, GivenUp, Heartbeats, Limits, Next, Operation, Outcome, Pages,
    PathIndex, PathLimits, Rail, Rails, Refusal, Sender, SessionId, Settled, Shape, Target,
    WriteError,
};

const S: SessionId = SessionId(1);
const P: PathIndex = PathIndex(0);
const TARGET: Target = Target { incarnation: 1, key: 0 };
const LATE: u64 = u64::MAX;
const TIMEOUT_US: u64 = 1_000_000;
const BEAT_US: u64 = 100_000;

type Tested = Sender<&'static str, u32>;

const LIMITS: PathLimits = PathLimits {
    slice_bytes: 1000,
    frames_max: 100,
    ordering: Ordering::WhenPlaced,
    queue_pairs: NonZeroU32::MIN,
    rail: Rail(0),
};

fn sender(send_bytes_per_s_max: u64) -> Tested {
    Sender::new(Limits {
        send_bytes_per_s_max,
        peer_timeout_us: TIMEOUT_US,
        grace_us: TIMEOUT_US / 2,
        path_imms_max: 1000,
        heartbeats: Heartbeats { interval_us: BEAT_US, timeout_us: 3 * BEAT_US, always: false },
    })
}

/// A sender whose session is up.
fn up() -> Tested {
    let mut sender = sender(0);
    begin(&mut sender, 0, message(1), LATE);
    assert_eq!(sender.poll_action(), Some(Action::Connect(S)));
    sender.path_up(S, P, LIMITS, 0);
    let hello = frame(&mut sender);
    assert!(sender.settle(S, P, hello.sequence, Settled::Landed, 0));
    assert_eq!(completed(&mut sender), [(0, Ok(()))]);
    sender
}

fn write(bytes: u64, group: u64) -> Body {
    let shape = Shape::Single { source_offset: 0, target_offset: 0, bytes, checksum: Some(5) };
    // The key names the group, so that a frame tells which group it is of.
    let target = Target { key: group, ..TARGET };
    Body::Write { shape, target, imm: Some(9), group }
}

fn paged(pages: u32, group: u64) -> Body {
    let side = Pages { offset: 0, stride: 10, indices: (0..pages).collect() };
    let (from, to) = (side.clone(), side);
    let shape = Shape::Paged { source: from, target: to, page_bytes: 10, checksums: Vec::new() };
    // The key names the group, so that a frame tells which group it is of.
    let target = Target { key: group, ..TARGET };
    Body::Write { shape, target, imm: Some(9), group }
}

fn message(bytes: u64) -> Body {
    Body::Message { bytes }
}

fn begin(sender: &mut Tested, done: u32, body: Body, deadline_us: u64) {
    let operation =
        Operation { session: S, deadline_us, payload: "bytes", body, rails: Rails::ANY, done };
    sender.begin(operation, 0);
}

fn next(sender: &mut Tested) -> Option<Frame<&'static str>> {
    match sender.next_frame(S, P, 0) {
        Next::Frame(frame) => Some(frame),
        Next::Wait { .. } | Next::Nothing => None,
    }
}

fn frame(sender: &mut Tested) -> Frame<&'static str> {
    next(sender).expect("something to send")
}

fn actions(sender: &mut Tested) -> Vec<Action<u32>> {
    std::iter::from_fn(|| sender.poll_action()).collect()
}

fn completed(sender: &mut Tested) -> Vec<(u32, Outcome)> {
    let all = actions(sender).into_iter();
    let done = all.filter_map(|action| match action {
        Action::Complete(done, outcome) => Some((done, outcome)),
        _ => None,
    });
    done.collect()
}

#[test]
fn nothing_is_issued_before_the_session_is_up() {
    let mut sender = sender(0);
    begin(&mut sender, 1, write(10, 0), LATE);
    assert!(next(&mut sender).is_none());
    assert_eq!(actions(&mut sender), [Action::Connect(S)]);
    begin(&mut sender, 2, write(10, 0), LATE);
    assert_eq!(actions(&mut sender), [], "one connection is enough");
    sender.path_up(S, P, LIMITS, 0);
    assert!(next(&mut sender).is_some());
}

#[test]
fn messages_go_before_writes() {
    let mut sender = up();
    begin(&mut sender, 1, paged(3, 0), LATE);
    frame(&mut sender);
    begin(&mut sender, 2, message(5), LATE);
    assert_eq!(frame(&mut sender).kind, FrameKind::Message { id: 1 });
    assert!(matches!(frame(&mut sender).kind, FrameKind::Write { .. }));
}

#[test]
fn a_long_write_is_sealed_when_every_slice_has_landed() {
    let mut sender = up();
    begin(&mut sender, 1, write(2500, 0), LATE);
    let slices: Vec<_> = (0..3).map(|_| frame(&mut sender)).collect();
    for slice in &slices {
        let FrameKind::Write { imm, checksum, .. } = slice.kind else { panic!("{slice:?}") };
        assert_eq!((imm, checksum), (None, None));
    }
    for slice in [2, 0] {
        sender.settle(S, P, slices[slice].sequence, Settled::Landed, 0);
        assert!(next(&mut sender).is_none(), "not all have landed");
    }
    sender.settle(S, P, slices[1].sequence, Settled::Landed, 0);
    let seal = frame(&mut sender);
    let kind = FrameKind::Seal {
        target: TARGET,
        offset: 0,
        whole_bytes: 2500,
        imm: Some(9),
        checksum: Some(5),
    };
    assert_eq!((seal.kind, seal.bytes), (kind, 0));
    assert_eq!(completed(&mut sender), []);
    sender.settle(S, P, seal.sequence, Settled::Landed, 0);
    assert_eq!(completed(&mut sender), [(1, Ok(()))]);
}

#[test]
fn a_refused_slice_ends_the_write_without_a_seal() {
    let mut sender = up();
    begin(&mut sender, 1, write(2500, 0), LATE);
    let slices: Vec<_> = (0..3).map(|_| frame(&mut sender)).collect();
    sender.settle(S, P, slices[0].sequence, Settled::Refused(Refusal::Revoked), 0);
    assert!(sender.settle_through(S, P, slices[2].sequence, 0));
    assert!(next(&mut sender).is_none());
    let refused = Err(WriteError::Refused(Refusal::Revoked));
    assert_eq!(completed(&mut sender), [(1, refused)]);
}

#[test]
fn a_refusal_stops_the_pages_and_corruption_does_not() {
    for (settled, frames) in [(Settled::Refused(Refusal::Revoked), 1), (Settled::Corrupt, 5)] {
        let mut sender = up();
        begin(&mut sender, 1, paged(5, 0), LATE);
        let first = frame(&mut sender);
        sender.settle(S, P, first.sequence, settled, 0);
        let mut sent = 1;
        while let Some(frame) = next(&mut sender) {
            sent += 1;
            sender.settle(S, P, frame.sequence, Settled::Landed, 0);
        }
        assert_eq!(sent, frames, "after {settled:?}");
        let ended = completed(&mut sender);
        assert!(matches!(ended.as_slice(), [(1, Err(_))]), "{ended:?}");
    }
}

#[test]
fn an_operation_is_over_when_its_last_frame_is_settled() {
    let mut sender = up();
    begin(&mut sender, 1, paged(3, 0), LATE);
    let frames: Vec<_> = (0..3).map(|_| frame(&mut sender)).collect();
    sender.settle(S, P, frames[2].sequence, Settled::Landed, 0);
    sender.settle(S, P, frames[0].sequence, Settled::Landed, 0);
    assert_eq!(completed(&mut sender), []);
    assert!(sender.settle(S, P, frames[1].sequence, Settled::Landed, 0));
    assert_eq!(completed(&mut sender), [(1, Ok(()))]);
    assert!(!sender.settle(S, P, frames[1].sequence, Settled::Landed, 0), "once");
    assert!(!sender.settle_through(S, P, frames[2].sequence + 1, 0), "it was never issued");
}

#[test]
fn no_more_frames_wait_for_settlement_than_allowed() {
    let mut sender = sender(0);
    begin(&mut sender, 1, paged(5, 0), LATE);
    sender.path_up(S, P, PathLimits { frames_max: 2, ..LIMITS }, 0);
    let first = frame(&mut sender);
    frame(&mut sender);
    assert!(next(&mut sender).is_none());
    sender.settle(S, P, first.sequence, Settled::Landed, 0);
    assert!(next(&mut sender).is_some());
}

#[test]
fn the_throttle_says_when_to_go_on() {
    let mut sender = sender(1_000_000);
    begin(&mut sender, 1, write(1_000_000, 0), LATE);
    begin(&mut sender, 2, write(1, 0), LATE);
    sender.path_up(S, P, PathLimits { slice_bytes: 1_000_000, ..LIMITS }, 0);
    frame(&mut sender);
    begin(&mut sender, 3, message(1), LATE);
    assert_eq!(frame(&mut sender).kind, FrameKind::Message { id: 0 }, "messages are not held back");
    let Next::Wait { until_us } = sender.next_frame(S, P, 0) else { panic!("it must wait") };
    assert!(matches!(sender.next_frame(S, P, until_us), Next::Frame(_)));
}

#[test]
fn what_runs_out_unissued_is_told_and_never_sent() {
    let mut sender = up();
    begin(&mut sender, 1, write(10, 0), 5_000);
    sender.handle_time(4_999);
    assert_eq!(completed(&mut sender), []);
    assert!(sender.next_time_us() <= 5_500);
    sender.handle_time(6_000);
    assert_eq!(completed(&mut sender), [(1, Err(WriteError::DeadlineExceeded))]);
    assert!(next(&mut sender).is_none());
    begin(&mut sender, 2, write(10, 0), 0);
    assert_eq!(completed(&mut sender), [(2, Err(WriteError::DeadlineExceeded))]);
}

#[test]
fn what_runs_out_on_the_wire_is_detached_first_and_drained_later() {
    let mut sender = up();
    begin(&mut sender, 1, write(10, 7), 5_000);
    let issued = frame(&mut sender);
    sender.handle_time(6_000);
    let expected = [
        Action::Detach { session: S, op: issued.op },
        Action::Complete(1, Err(WriteError::DeadlineExceeded)),
    ];
    assert_eq!(actions(&mut sender), expected);
    sender.drain_group(7, 50);
    assert_eq!(completed(&mut sender), [], "its fate is not known yet");
    sender.settle(S, P, issued.sequence, Settled::Landed, 6_000);
    assert_eq!(completed(&mut sender), [(50, Ok(()))]);
}

#[test]
fn draining_takes_back_what_is_not_issued_and_waits_for_the_rest() {
    let mut sender = up();
    begin(&mut sender, 1, write(10, 7), LATE);
    begin(&mut sender, 2, paged(3, 7), LATE);
    begin(&mut sender, 3, write(10, 7), LATE);
    begin(&mut sender, 4, write(10, 8), LATE);
    let issued = [frame(&mut sender), frame(&mut sender)];
    sender.drain_group(7, 50);
    assert_eq!(completed(&mut sender), [(3, Err(WriteError::Cancelled))]);
    begin(&mut sender, 5, write(10, 7), LATE);
    assert_eq!(completed(&mut sender), [(5, Err(WriteError::Cancelled))], "while it drains");
    sender.settle(S, P, issued[1].sequence, Settled::Landed, 0);
    assert_eq!(completed(&mut sender), [(2, Err(WriteError::Cancelled))]);
    sender.settle(S, P, issued[0].sequence, Settled::Landed, 0);
    assert_eq!(completed(&mut sender), [(1, Ok(())), (50, Ok(()))]);
    let other = frame(&mut sender);
    assert!(next(&mut sender).is_none());
    sender.settle(S, P, other.sequence, Settled::Landed, 0);
    assert_eq!(completed(&mut sender), [(4, Ok(()))], "another group goes on");
    sender.drain_group(7, 51);
    assert_eq!(completed(&mut sender), [(51, Ok(()))]);
    begin(&mut sender, 6, write(10, 7), LATE);
    assert!(next(&mut sender).is_some(), "a drained group may begin anew");
}

#[test]
fn a_lost_session_ends_everything_and_is_remembered_by_its_groups() {
    let mut sender = up();
    begin(&mut sender, 1, write(10, 7), LATE);
    begin(&mut sender, 2, write(10, 8), LATE);
    begin(&mut sender, 3, message(1), LATE);
    frame(&mut sender);
    frame(&mut sender);
    sender.drain_group(7, 50);
    sender.session_lost(S);
    let mut ended = completed(&mut sender);
    ended.sort_by_key(|(done, _)| *done);
    let gone = Err(WriteError::PeerGone);
    assert_eq!(ended, [(1, gone), (2, gone), (3, gone), (50, gone)]);
    sender.drain_group(7, 51);
    sender.drain_group(8, 52);
    // Group 8 had nothing on the wire.
    assert_eq!(completed(&mut sender), [(51, gone), (52, Ok(()))]);
}

#[test]
fn a_silent_peer_is_given_up_only_while_it_owes_something() {
    let mut sender = up();
    sender.handle_time(2 * TIMEOUT_US);
    assert_eq!(actions(&mut sender), [], "nothing is owed");
    begin(&mut sender, 1, paged(2, 0), LATE);
    let Next::Frame(first) = sender.next_frame(S, P, 3 * TIMEOUT_US) else { panic!("a frame") };
    sender.next_frame(S, P, 3 * TIMEOUT_US);
    sender.settle(S, P, first.sequence, Settled::Landed, 3 * TIMEOUT_US + 500_000);
    assert_eq!(sender.next_time_us(), 4 * TIMEOUT_US + 500_000);
    sender.handle_time(4 * TIMEOUT_US + 400_000);
    assert_eq!(actions(&mut sender), [], "it showed life");
    sender.handle_time(4 * TIMEOUT_US + 500_000);
    assert_eq!(actions(&mut sender), [SILENT]);
}

const SILENT: Action<u32> = Action::GiveUpPath { session: S, path: P, why: GivenUp::Silent };
const BEAT: Action<u32> = Action::Heartbeat { session: S, path: P };

#[test]
fn nobody_is_asked_for_heartbeats_whom_nobody_wants() {
    let mut sender = up();
    assert_eq!(sender.next_time_us(), u64::MAX, "nothing is waited for");
    sender.handle_time(50 * BEAT_US);
    assert_eq!(actions(&mut sender), []);
}

#[test]
fn a_wanted_peer_is_asked_when_it_was_silent_and_given_up_when_it_stays_so() {
    let mut sender = up();
    sender.set_wanted(S, true, 0);
    assert_eq!(actions(&mut sender), [], "it is connected already");
    assert_eq!(sender.next_time_us(), BEAT_US);
    sender.handle_time(BEAT_US - 1);
    assert_eq!(actions(&mut sender), []);
    sender.handle_time(BEAT_US + 500);
    assert_eq!(actions(&mut sender), [BEAT]);
    sender.handle_time(3 * BEAT_US);
    assert_eq!(actions(&mut sender), [], "it is asked once");
    assert!(sender.heartbeat_answered(S, P, 3 * BEAT_US));
    assert!(!sender.heartbeat_answered(S, P, 3 * BEAT_US), "it was asked once");
    assert!(sender.is_idle(S), "a heartbeat is nothing that is under way");
    assert_eq!(sender.next_time_us(), 4 * BEAT_US);
    sender.handle_time(4 * BEAT_US);
    assert_eq!(actions(&mut sender), [BEAT]);
    assert_eq!(sender.next_time_us(), 7 * BEAT_US);
    sender.handle_time(7 * BEAT_US - 1);
    assert_eq!(actions(&mut sender), []);
    sender.handle_time(7 * BEAT_US + 500);
    assert_eq!(actions(&mut sender), [SILENT]);
}

#[test]
fn a_wanted_peer_is_noticed_to_be_gone_while_it_owes_something_too() {
    let mut sender = up();
    sender.set_wanted(S, true, 0);
    begin(&mut sender, 1, paged(2, 0), LATE);
    let first = frame(&mut sender);
    frame(&mut sender);
    sender.handle_time(BEAT_US);
    assert_eq!(actions(&mut sender), [BEAT]);
    // Any sign of life will do.
    sender.settle(S, P, first.sequence, Settled::Landed, 3 * BEAT_US);
    sender.handle_time(5 * BEAT_US);
    assert_eq!(actions(&mut sender), []);
    sender.handle_time(6 * BEAT_US);
    assert_eq!(actions(&mut sender), [SILENT], "and long before the time of what it owes");
}

#[test]
fn who_is_wanted_no_more_is_asked_no_more() {
    let mut sender = up();
    sender.set_wanted(S, true, 0);
    assert!(sender.is_wanted(S));
    sender.set_wanted(S, false, 0);
    sender.handle_time(50 * BEAT_US);
    assert_eq!(actions(&mut sender), []);
    assert_eq!(sender.next_time_us(), u64::MAX);
}

#[test]
fn a_peer_that_is_wanted_is_connected() {
    let mut sender = sender(0);
    sender.set_wanted(S, true, 0);
    assert_eq!(actions(&mut sender), [Action::Connect(S)]);
    sender.handle_time(TIMEOUT_US);
    assert_eq!(actions(&mut sender), [Action::GiveUpSession(S)]);
    sender.session_lost(S);
    assert!(!sender.is_wanted(S), "who wants it again says so");
}

#[test]
fn a_connection_that_does_not_come_up_is_given_up() {
    let mut sender = sender(0);
    begin(&mut sender, 1, write(10, 0), LATE);
    sender.handle_time(TIMEOUT_US);
    assert_eq!(actions(&mut sender), [Action::Connect(S), Action::GiveUpSession(S)]);
}

#[test]
fn shutting_down_ends_everything() {
    let mut sender = up();
    begin(&mut sender, 1, write(10, 7), LATE);
    frame(&mut sender);
    begin(&mut sender, 2, message(1), LATE);
    sender.drain_group(7, 50);
    sender.shut_down();
    let cancelled = Err(WriteError::Cancelled);
    assert_eq!(completed(&mut sender), [(1, cancelled), (2, cancelled), (50, cancelled)]);
}

/// Writes that are accepted together have the same time. As the wire takes them steadily, those that
/// it reaches in that time land, and only those behind them run out.
#[test]
fn a_queue_that_drains_steadily_fails_only_what_it_does_not_reach_in_time() {
    let mut sender = up();
    let writes = 100u32;
    let deadline_us = 600_000;
    for done in 1..=writes {
        begin(&mut sender, done, write(10, 0), deadline_us);
    }
    let mut ended = Vec::new();
    // One each 10 ms.
    for turn in 1..=u64::from(writes) {
        let now_us = turn * 10_000;
        sender.handle_time(now_us);
        if let Next::Frame(frame) = sender.next_frame(S, P, now_us) {
            assert!(sender.settle(S, P, frame.sequence, Settled::Landed, now_us));
        }
        ended.extend(completed(&mut sender));
    }
    ended.sort_unstable_by_key(|(done, _)| *done);
    assert_eq!(ended.len(), writes as usize, "each in a definite state");
    let landed = ended.iter().take_while(|(_, outcome)| outcome.is_ok()).count();
    assert!((59..=60).contains(&landed), "{landed} landed");
    let late = &ended[landed..];
    assert!(late.iter().all(|(_, outcome)| *outcome == Err(WriteError::DeadlineExceeded)));
}
