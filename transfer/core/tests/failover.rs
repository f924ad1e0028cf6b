//! Sessions of several paths, driven by hand: what is on a path that fails is sent again only when it is
//! certain that it did not land, and everything ends once.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;

use kvasir_transfer_core::signal::Ordering;
use kvasir_transfer_core::{
    Action, Body, CloseRequest, CloseVerdict, Counted, Frame, FrameKind, GivenUp, Heartbeats,
    Limits, Next, Operation, Outcome, Pages, PathIndex, PathLimits, Rail, Rails, Sender, SessionId,
    Settled, Shape, Target, WriteError,
};
use proptest::prelude::*;

const S: SessionId = SessionId(1);
const A: PathIndex = PathIndex(0);
const B: PathIndex = PathIndex(1);
const LATE: u64 = u64::MAX;
const GONE: Outcome = Err(WriteError::PeerGone);
const CANCELLED: Outcome = Err(WriteError::Cancelled);
const LIMITS: PathLimits = PathLimits {
    slice_bytes: 1000,
    frames_max: 100,
    ordering: Ordering::WhenPlaced,
    queue_pairs: NonZeroU32::MIN,
    rail: Rail(0),
};
const TIMEOUT_US: u64 = 1_000_000;
const GRACE_US: u64 = 200_000;

type Tested = Sender<&'static str, u32>;

fn sender(path_imms_max: usize) -> Tested {
    let (send_bytes_per_s_max, peer_timeout_us, grace_us) = (0, TIMEOUT_US, GRACE_US);
    let heartbeats = Heartbeats { interval_us: u64::MAX, timeout_us: u64::MAX, always: false };
    Sender::new(Limits {
        send_bytes_per_s_max,
        peer_timeout_us,
        grace_us,
        path_imms_max,
        heartbeats,
    })
}

/// With one operation begun and two paths up.
fn two_paths(body: Body) -> Tested {
    let mut sender = sender(1000);
    begin(&mut sender, 1, body, LATE);
    assert_eq!(sender.poll_action(), Some(Action::Connect(S)));
    sender.path_up(S, A, LIMITS, 0);
    sender.path_up(S, B, LIMITS, 0);
    sender
}

fn target(group: u64) -> Target {
    Target { incarnation: 1, key: group }
}

fn write(bytes: u64, imm: Option<u32>) -> Body {
    let shape = Shape::Single { source_offset: 0, target_offset: 0, bytes, checksum: Some(5) };
    Body::Write { shape, target: target(3), imm, group: 3 }
}

fn paged(pages: u32, imm: u32) -> Body {
    let side = Pages { offset: 0, stride: 10, indices: (0..pages).collect() };
    let (from, to) = (side.clone(), side);
    let shape = Shape::Paged { source: from, target: to, page_bytes: 10, checksums: Vec::new() };
    Body::Write { shape, target: target(3), imm: Some(imm), group: 3 }
}

fn begin(sender: &mut Tested, done: u32, body: Body, deadline_us: u64) {
    let operation =
        Operation { session: S, deadline_us, payload: "bytes", body, rails: Rails::ANY, done };
    sender.begin(operation, 0);
}

fn next(sender: &mut Tested, path: PathIndex) -> Option<Frame<&'static str>> {
    match sender.next_frame(S, path, 0) {
        Next::Frame(frame) => Some(frame),
        Next::Wait { .. } | Next::Nothing => None,
    }
}

fn frame(sender: &mut Tested, path: PathIndex) -> Frame<&'static str> {
    next(sender, path).expect("something to send")
}

fn landed(sender: &mut Tested, path: PathIndex, frame: &Frame<&'static str>) {
    assert!(sender.settle(S, path, frame.sequence, Settled::Landed, 0));
}

fn actions(sender: &mut Tested) -> Vec<Action<u32>> {
    std::iter::from_fn(|| sender.poll_action()).collect()
}

fn completed(sender: &mut Tested) -> Vec<(u32, Outcome)> {
    let done = |action| match action {
        Action::Complete(done, outcome) => Some((done, outcome)),
        _ => None,
    };
    actions(sender).into_iter().filter_map(done).collect()
}

fn asks(sender: &mut Tested) -> Vec<(PathIndex, CloseRequest)> {
    let ask = |action| match action {
        Action::ClosePath { through, close, .. } => Some((through, close)),
        _ => None,
    };
    actions(sender).into_iter().filter_map(ask).collect()
}

fn request(path: PathIndex, counted: &[(u32, u64, u64)], messages: &[u64]) -> CloseRequest {
    let counted =
        counted.iter().map(|&(imm, landed, undecided)| Counted { imm, landed, undecided });
    CloseRequest { path, counted: counted.collect(), messages: messages.to_vec() }
}

fn nothing_landed() -> CloseVerdict {
    CloseVerdict::default()
}

#[test]
fn whoever_has_room_takes_the_next_piece() {
    let mut sender = two_paths(paged(6, 9));
    let taken: Vec<_> =
        [A, B, B, A, B, B].map(|path| frame(&mut sender, path).source_offset).into();
    assert_eq!(taken, [0, 10, 20, 30, 40, 50]);
    assert!(next(&mut sender, A).is_none());
    assert!(sender.settle_through(S, B, 3, 0));
    assert_eq!(completed(&mut sender), []);
    assert!(sender.settle_through(S, A, 1, 0));
    assert_eq!(completed(&mut sender), [(1, Ok(()))]);
}

#[test]
fn what_was_on_a_failed_path_is_asked_about_and_only_then_sent_again() {
    let mut sender = two_paths(paged(4, 9));
    let known = frame(&mut sender, A);
    let undecided = [frame(&mut sender, A), frame(&mut sender, A)];
    landed(&mut sender, A, &known);
    sender.path_lost(S, A, 0);
    assert_eq!(asks(&mut sender), [(B, request(A, &[(9, 1, 2)], &[]))]);
    let rest = frame(&mut sender, B);
    assert_eq!(rest.source_offset, 30, "what is new goes on");
    assert!(next(&mut sender, B).is_none(), "the rest waits for the answer");
    assert!(sender.path_closed(S, (B, A), &nothing_landed(), 0));
    let again = [frame(&mut sender, B), frame(&mut sender, B)];
    let places = |frames: &[Frame<_>; 2]| frames.each_ref().map(|frame| (frame.kind, frame.bytes));
    assert_eq!(places(&again), places(&undecided));
    assert!(!sender.path_closed(S, (B, A), &nothing_landed(), 0), "it has answered");
    for frame in again.iter().chain([&rest]) {
        landed(&mut sender, B, frame);
    }
    assert_eq!(completed(&mut sender), [(1, Ok(()))]);
}

#[test]
fn what_has_landed_is_not_sent_again() {
    let mut sender = two_paths(paged(2, 9));
    begin(&mut sender, 2, Body::Message { bytes: 1 }, LATE);
    for _ in 0..3 {
        frame(&mut sender, A);
    }
    sender.path_lost(S, A, 0);
    assert_eq!(asks(&mut sender), [(B, request(A, &[(9, 0, 2)], &[0]))]);
    let verdict = CloseVerdict { landed: vec![9], delivered: vec![0], ..CloseVerdict::default() };
    sender.path_closed(S, (B, A), &verdict, 0);
    assert_eq!(completed(&mut sender), [(2, Ok(())), (1, Ok(()))]);
    assert!(next(&mut sender, B).is_none());
}

#[test]
fn of_what_nobody_knows_the_operation_fails_and_the_group_is_drained() {
    let unknown = CloseVerdict { unknown: vec![9], ..CloseVerdict::default() };
    let forgotten = CloseVerdict { forgotten: true, ..CloseVerdict::default() };
    for verdict in [unknown, forgotten] {
        let mut sender = two_paths(paged(3, 9));
        frame(&mut sender, A);
        sender.path_lost(S, A, 0);
        sender.path_closed(S, (B, A), &verdict, 0);
        assert!(next(&mut sender, B).is_none(), "neither that page nor the others");
        assert_eq!(completed(&mut sender), [(1, GONE)]);
        sender.drain_group(3, 50);
        assert_eq!(completed(&mut sender), [(50, Ok(()))], "nothing of it lands any more");
    }
}

#[test]
fn nothing_is_said_of_a_path_that_was_not_asked_about() {
    let mut sender = two_paths(paged(1, 9));
    frame(&mut sender, A);
    assert!(!sender.path_closed(S, (B, A), &nothing_landed(), 0), "it is up");
    sender.path_lost(S, B, 0);
    sender.path_lost(S, A, 0);
    assert_eq!(asks(&mut sender), [(A, request(B, &[], &[]))], "the first was asked through A");
    assert!(!sender.path_closed(S, (B, A), &nothing_landed(), 0), "nobody could be asked yet");
    assert!(!sender.path_closed(S, (B, PathIndex(7)), &nothing_landed(), 0));
}

#[test]
fn a_path_that_comes_up_later_is_asked_through_and_another_when_that_one_fails() {
    let mut sender = two_paths(paged(1, 9));
    frame(&mut sender, A);
    sender.path_lost(S, B, 0);
    sender.path_lost(S, A, 0);
    actions(&mut sender);
    for later in [PathIndex(2), PathIndex(3)] {
        sender.path_up(S, later, LIMITS, 0);
        let asked = asks(&mut sender);
        assert!(asked.contains(&(later, request(A, &[(9, 0, 1)], &[]))), "{asked:?}");
        assert!(next(&mut sender, later).is_none());
        sender.path_lost(S, later, 0);
    }
    sender.path_up(S, PathIndex(4), LIMITS, 0);
    // An answer to the first question may come late.
    assert!(sender.path_closed(S, (PathIndex(4), A), &nothing_landed(), 0));
    let again = frame(&mut sender, PathIndex(4));
    landed(&mut sender, PathIndex(4), &again);
    assert_eq!(completed(&mut sender), [(1, Ok(()))]);
}

#[test]
fn slices_differ_with_their_paths_and_the_seal_waits_for_every_byte() {
    let mut sender = sender(1000);
    begin(&mut sender, 1, write(2500, Some(9)), LATE);
    sender.path_up(S, A, LIMITS, 0);
    sender.path_up(S, B, PathLimits { slice_bytes: 700, ..LIMITS }, 0);
    let slices = [(A, 1000), (B, 700), (B, 700), (A, 100)].map(|(path, bytes)| {
        let slice = frame(&mut sender, path);
        let FrameKind::Write { imm, checksum, .. } = slice.kind else { panic!("{slice:?}") };
        assert_eq!((imm, checksum, slice.bytes), (None, None, bytes));
        (path, slice)
    });
    // The first slice did not land, and goes through B in pieces of B's size.
    sender.path_lost(S, A, 0);
    assert_eq!(asks(&mut sender), [(B, request(A, &[], &[]))], "slices are not counted");
    landed(&mut sender, B, &slices[1].1);
    landed(&mut sender, B, &slices[2].1);
    sender.path_closed(S, (B, A), &nothing_landed(), 0);
    let again: Vec<_> = (0..3).map(|_| frame(&mut sender, B)).collect();
    let ranges: Vec<_> = again.iter().map(|slice| (slice.source_offset, slice.bytes)).collect();
    assert_eq!(ranges, [(0, 700), (700, 300), (2400, 100)]);
    for slice in &again {
        assert!(next(&mut sender, B).is_none(), "not sealed yet");
        landed(&mut sender, B, slice);
    }
    let seal = frame(&mut sender, B);
    assert!(matches!(seal.kind, FrameKind::Seal { imm: Some(9), whole_bytes: 2500, .. }));
    landed(&mut sender, B, &seal);
    assert_eq!(completed(&mut sender), [(1, Ok(()))]);
}

#[test]
fn a_whole_write_is_split_when_the_other_path_takes_less_at_once() {
    let mut sender = two_paths(write(1000, Some(9)));
    frame(&mut sender, A);
    sender.path_lost(S, A, 0);
    sender.path_lost(S, B, 0);
    sender.path_up(S, PathIndex(2), PathLimits { slice_bytes: 600, ..LIMITS }, 0);
    sender.path_closed(S, (PathIndex(2), A), &nothing_landed(), 0);
    let slices = [frame(&mut sender, PathIndex(2)), frame(&mut sender, PathIndex(2))];
    assert_eq!(slices.each_ref().map(|slice| slice.bytes), [600, 400]);
    for slice in &slices {
        assert!(matches!(slice.kind, FrameKind::Write { imm: None, checksum: None, .. }));
        assert!(next(&mut sender, PathIndex(2)).is_none());
        landed(&mut sender, PathIndex(2), slice);
    }
    let seal = frame(&mut sender, PathIndex(2));
    assert!(matches!(seal.kind, FrameKind::Seal { imm: Some(9), checksum: Some(5), .. }));
}

#[test]
fn an_undecided_seal_is_counted_once() {
    for (verdict, again) in [
        (nothing_landed(), true),
        (CloseVerdict { landed: vec![9], ..CloseVerdict::default() }, false),
    ] {
        let mut sender = two_paths(write(1500, Some(9)));
        let slices = [frame(&mut sender, A), frame(&mut sender, B)];
        landed(&mut sender, A, &slices[0]);
        landed(&mut sender, B, &slices[1]);
        frame(&mut sender, A);
        sender.path_lost(S, A, 0);
        assert_eq!(asks(&mut sender), [(B, request(A, &[(9, 0, 1)], &[]))]);
        sender.path_closed(S, (B, A), &verdict, 0);
        let seal = next(&mut sender, B);
        assert_eq!(seal.is_some(), again);
        if let Some(seal) = seal {
            landed(&mut sender, B, &seal);
        }
        assert_eq!(completed(&mut sender), [(1, Ok(()))]);
    }
}

#[test]
fn what_has_ended_is_not_sent_again_but_holds_its_group_until_its_fate_is_known() {
    // By its deadline, and by draining.
    for drained in [false, true] {
        let mut sender = sender(1000);
        begin(&mut sender, 1, write(10, Some(9)), 5_000);
        sender.path_up(S, A, LIMITS, 0);
        sender.path_up(S, B, LIMITS, 0);
        frame(&mut sender, A);
        sender.path_lost(S, A, 0);
        if !drained {
            sender.handle_time(6_000);
            assert_eq!(completed(&mut sender), [(1, Err(WriteError::DeadlineExceeded))]);
        }
        sender.drain_group(3, 50);
        assert_eq!(completed(&mut sender), [], "it may have landed, and may yet");
        sender.path_closed(S, (B, A), &nothing_landed(), 6_000);
        assert!(next(&mut sender, B).is_none());
        let ended = if drained { vec![(1, CANCELLED), (50, Ok(()))] } else { vec![(50, Ok(()))] };
        assert_eq!(completed(&mut sender), ended);
    }
}

#[test]
fn a_drained_group_takes_back_what_was_to_be_sent_again() {
    let mut sender = two_paths(paged(2, 9));
    frame(&mut sender, A);
    let other = frame(&mut sender, B);
    sender.path_lost(S, A, 0);
    sender.path_closed(S, (B, A), &nothing_landed(), 0);
    sender.drain_group(3, 50);
    assert!(next(&mut sender, B).is_none());
    landed(&mut sender, B, &other);
    assert_eq!(completed(&mut sender), [(1, CANCELLED), (50, Ok(()))]);
}

#[test]
fn a_lost_session_leaves_what_nobody_was_asked_about_undecided() {
    let mut sender = two_paths(write(10, Some(9)));
    frame(&mut sender, A);
    sender.path_lost(S, A, 0);
    sender.drain_group(3, 50);
    sender.session_lost(S);
    assert_eq!(completed(&mut sender), [(1, GONE), (50, GONE)]);
}

#[test]
fn a_session_without_paths_is_given_up_after_its_grace() {
    let mut sender = two_paths(write(10, Some(9)));
    sender.path_lost(S, A, 1_000);
    sender.path_lost(S, B, 2_000);
    actions(&mut sender);
    assert_eq!(sender.next_time_us(), 2_000 + GRACE_US);
    sender.handle_time(1_999 + GRACE_US);
    assert_eq!(actions(&mut sender), []);
    sender.handle_time(2_600 + GRACE_US);
    assert_eq!(actions(&mut sender), [Action::GiveUpSession(S)]);
}

#[test]
fn a_path_that_does_not_answer_is_given_up_and_takes_no_more() {
    let mut sender = two_paths(paged(3, 9));
    frame(&mut sender, A);
    sender.path_lost(S, A, 0);
    actions(&mut sender);
    sender.handle_time(TIMEOUT_US - 1);
    assert_eq!(actions(&mut sender), []);
    // Nothing is on it but the question.
    sender.handle_time(TIMEOUT_US + 600);
    assert_eq!(
        actions(&mut sender),
        [Action::GiveUpPath { session: S, path: B, why: GivenUp::Silent }]
    );
    assert!(next(&mut sender, B).is_none());
}

/// Who ends the last path of a session that has no use for it ends the session.
#[test]
fn a_path_that_has_counted_enough_is_kept_as_long_as_there_is_nothing_to_send() {
    let mut sender = sender(1);
    begin(&mut sender, 1, write(10, Some(1)), LATE);
    sender.path_up(S, A, LIMITS, 0);
    let only = frame(&mut sender, A);
    landed(&mut sender, A, &only);
    actions(&mut sender);
    assert!(next(&mut sender, A).is_none());
    assert_eq!(actions(&mut sender), []);
    assert!(sender.is_idle(S));
    begin(&mut sender, 2, write(10, Some(2)), LATE);
    assert!(next(&mut sender, A).is_none());
    let replace = Action::GiveUpPath { session: S, path: A, why: GivenUp::WornOut };
    assert_eq!(actions(&mut sender), [replace]);
    assert!(!sender.is_idle(S));
}

#[test]
fn a_path_that_has_counted_enough_immediates_is_replaced_when_it_is_empty() {
    let mut sender = sender(2);
    for imm in 0..3 {
        begin(&mut sender, imm, write(10, Some(imm)), LATE);
    }
    sender.path_up(S, A, LIMITS, 0);
    let frames = [frame(&mut sender, A), frame(&mut sender, A)];
    assert!(next(&mut sender, A).is_none(), "no third immediate");
    landed(&mut sender, A, &frames[0]);
    assert!(next(&mut sender, A).is_none());
    actions(&mut sender);
    landed(&mut sender, A, &frames[1]);
    assert!(next(&mut sender, A).is_none());
    let replace = Action::GiveUpPath { session: S, path: A, why: GivenUp::WornOut };
    assert_eq!(actions(&mut sender), [Action::Complete(1, Ok(())), replace]);
    sender.path_lost(S, A, 0);
    sender.path_up(S, B, LIMITS, 0);
    assert_eq!(asks(&mut sender), [(B, request(A, &[], &[]))], "nothing is undecided");
    assert!(next(&mut sender, B).is_some());
}

#[test]
fn a_session_whose_paths_fail_without_end_is_given_up() {
    let mut sender = two_paths(write(10, Some(9)));
    for index in 2..200 {
        sender.path_up(S, PathIndex(index), LIMITS, 0);
        sender.path_lost(S, PathIndex(index), 0);
        if actions(&mut sender).contains(&Action::GiveUpSession(S)) {
            return;
        }
    }
    panic!("so many failed paths are remembered");
}

/// What a random run does next.
#[derive(Debug, Clone)]
enum Step {
    Write {
        bytes: u64,
        group: u64,
        deadline_us: u64,
    },
    Paged {
        pages: u32,
        group: u64,
    },
    Message,
    Issue {
        path: prop::sample::Index,
    },
    Settle {
        at: prop::sample::Index,
    },
    /// It lands, and nobody is told.
    Land {
        at: prop::sample::Index,
    },
    Up {
        slice_bytes: u64,
    },
    LosePath {
        path: prop::sample::Index,
    },
    Answer,
    Drain {
        group: u64,
    },
    Time {
        by_us: u64,
    },
    LoseSession,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = any::<prop::sample::Index>;
    let step = prop_oneof![
        4 => (0u64..300, 0u64..3, 1u64..30_000).prop_map(|(bytes, group, deadline_us)| {
            Step::Write { bytes, group, deadline_us }
        }),
        2 => (0u32..6, 0u64..3).prop_map(|(pages, group)| Step::Paged { pages, group }),
        1 => Just(Step::Message),
        14 => index().prop_map(|path| Step::Issue { path }),
        8 => index().prop_map(|at| Step::Settle { at }),
        4 => index().prop_map(|at| Step::Land { at }),
        2 => (20u64..200).prop_map(|slice_bytes| Step::Up { slice_bytes }),
        2 => index().prop_map(|path| Step::LosePath { path }),
        4 => Just(Step::Answer),
        1 => (0u64..3).prop_map(|group| Step::Drain { group }),
        1 => (0u64..3_000).prop_map(|by_us| Step::Time { by_us }),
        1 => Just(Step::LoseSession),
    ];
    prop::collection::vec(step, 1..160)
}

/// A frame on a path, with what the receiver has of it.
#[derive(Debug, Clone)]
struct InFlight {
    path: PathIndex,
    frame: Frame<&'static str>,
    has_landed: bool,
}

impl InFlight {
    fn group(&self) -> Option<u64> {
        match self.frame.kind {
            FrameKind::Write { target, .. } | FrameKind::Seal { target, .. } => Some(target.key),
            FrameKind::Message { .. } | FrameKind::Signal { .. } => None,
        }
    }
}

/// A random run, with books of its own: the receiver never finishes an immediate, so it takes back
/// whatever it is asked about.
struct Run {
    sender: Tested,
    now_us: u64,
    session: u64,
    next_path: u32,
    paths: Vec<PathIndex>,
    next_done: u32,
    /// With the group of those that wait for a drain.
    pending: BTreeMap<u32, Option<u64>>,
    in_flight: Vec<InFlight>,
    undecided: BTreeSet<u64>,
    asked: Vec<(PathIndex, CloseRequest)>,
    delivered: BTreeSet<u64>,
}

impl Run {
    fn id(&self) -> SessionId {
        SessionId(self.session)
    }

    fn begin(&mut self, body: Body, deadline_us: u64) {
        let done = self.next_done;
        self.next_done += 1;
        self.pending.insert(done, None);
        let operation = Operation {
            session: self.id(),
            deadline_us,
            payload: "bytes",
            body,
            rails: Rails::ANY,
            done,
        };
        self.sender.begin(operation, self.now_us);
        self.act();
    }

    fn act(&mut self) {
        while let Some(action) = self.sender.poll_action() {
            match action {
                Action::Complete(done, outcome) => self.complete(done, outcome),
                Action::ClosePath { through, close, .. } => self.asked.push((through, close)),
                Action::GiveUpPath { path, .. } => self.lose_path(path),
                Action::GiveUpSession(_) => self.lose_session(),
                Action::Connect(_) => self.up(100),
                Action::Detach { .. }
                | Action::Heartbeat { .. }
                | Action::CompleteSignalled { .. }
                | Action::Offer(_) => {}
            }
        }
    }

    fn complete(&mut self, done: u32, outcome: Outcome) {
        let drained = self.pending.remove(&done).expect("told once");
        let Some(group) = drained else { return };
        let open = self.in_flight.iter().any(|flight| flight.group() == Some(group));
        assert!(!open, "group {group} is drained while something of it may land");
        assert_eq!(outcome.is_err(), self.undecided.contains(&group), "group {group}");
    }

    fn up(&mut self, slice_bytes: u64) {
        let path = PathIndex(self.next_path);
        self.next_path += 1;
        let limits = PathLimits { slice_bytes, frames_max: 8, ..LIMITS };
        self.sender.path_up(self.id(), path, limits, self.now_us);
        self.paths.push(path);
    }

    fn lose_path(&mut self, path: PathIndex) {
        self.paths.retain(|up| *up != path);
        self.sender.path_lost(self.id(), path, self.now_us);
        self.act();
    }

    /// The receiver closes the path: what has not landed never will.
    fn answer(&mut self) {
        let Some((through, close)) = self.asked.pop() else { return };
        let of_path: Vec<_> =
            self.in_flight.extract_if(.., |flight| flight.path == close.path).collect();
        let delivered = close.messages.iter().copied().filter(|id| self.delivered.contains(id));
        let verdict = CloseVerdict { delivered: delivered.collect(), ..CloseVerdict::default() };
        let known =
            self.sender.path_closed(self.id(), (through, close.path), &verdict, self.now_us);
        assert!(known || of_path.is_empty(), "an answer is taken once");
        self.act();
    }

    fn lose_session(&mut self) {
        for flight in self.in_flight.drain(..) {
            self.undecided.extend(flight.group());
        }
        self.sender.session_lost(self.id());
        self.session += 1;
        self.paths.clear();
        self.asked.clear();
        self.delivered.clear();
        self.act();
    }

    fn land(&mut self, at: usize) {
        let flight = &mut self.in_flight[at];
        flight.has_landed = true;
        if let FrameKind::Message { id } = flight.frame.kind {
            self.delivered.insert(id);
        }
    }

    fn settle(&mut self, at: usize) {
        self.land(at);
        let InFlight { path, frame, .. } = self.in_flight.swap_remove(at);
        let (id, sequence) = (self.id(), frame.sequence);
        assert!(self.sender.settle(id, path, sequence, Settled::Landed, self.now_us));
        self.act();
    }

    fn issue(&mut self, path: PathIndex) {
        let Next::Frame(frame) = self.sender.next_frame(self.id(), path, self.now_us) else {
            return;
        };
        for other in &self.in_flight {
            let both = (frame.kind, other.frame.kind);
            if let (FrameKind::Message { id }, FrameKind::Message { id: on_wire }) = both {
                assert_ne!(id, on_wire, "sent again while the first may still be delivered");
            }
            let same = (frame.op, frame.source_offset, frame.bytes)
                == (other.frame.op, other.frame.source_offset, other.frame.bytes);
            let is_page = matches!(both, (FrameKind::Write { .. }, FrameKind::Write { .. }));
            assert!(!(same && is_page), "sent again while the first may still land");
        }
        if let FrameKind::Message { id } = frame.kind {
            assert!(!self.delivered.contains(&id), "it was delivered");
        }
        self.in_flight.push(InFlight { path, frame, has_landed: false });
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Write { bytes, group, deadline_us } => {
                let shape =
                    Shape::Single { source_offset: 0, target_offset: 0, bytes, checksum: None };
                let body = Body::Write { shape, target: target(group), imm: Some(9), group };
                self.begin(body, self.now_us + deadline_us);
            }
            Step::Paged { pages, group } => {
                let Body::Write { shape, imm, .. } = paged(pages, 9) else { return };
                self.begin(Body::Write { shape, imm, target: target(group), group }, LATE);
            }
            Step::Message => self.begin(Body::Message { bytes: 1 }, LATE),
            Step::Issue { path } if !self.paths.is_empty() => {
                self.issue(self.paths[path.index(self.paths.len())]);
            }
            Step::Settle { at } if !self.in_flight.is_empty() => {
                let at = at.index(self.in_flight.len());
                if self.paths.contains(&self.in_flight[at].path) {
                    self.settle(at);
                }
            }
            Step::Land { at } if !self.in_flight.is_empty() => {
                self.land(at.index(self.in_flight.len()));
            }
            // A session is used before it is given paths.
            Step::Up { slice_bytes } if !self.sender.is_idle(self.id()) => {
                self.up(slice_bytes);
                self.act();
            }
            Step::LosePath { path } if !self.paths.is_empty() => {
                self.lose_path(self.paths[path.index(self.paths.len())]);
            }
            Step::Answer => self.answer(),
            Step::Drain { group } => {
                let done = self.next_done;
                self.next_done += 1;
                self.pending.insert(done, Some(group));
                self.sender.drain_group(group, done);
                self.act();
            }
            Step::Time { by_us } => {
                self.now_us += by_us;
                self.sender.handle_time(self.now_us);
                self.act();
            }
            Step::LoseSession => self.lose_session(),
            _ => {}
        }
    }

    /// Everything that can go on does.
    fn settle_all(&mut self) {
        self.begin(Body::Message { bytes: 1 }, LATE);
        self.up(100);
        self.act();
        for _ in 0..10_000 {
            self.answer();
            for path in self.paths.clone() {
                self.issue(path);
            }
            let up = |flight: &InFlight| self.paths.contains(&flight.path);
            if let Some(at) = self.in_flight.iter().position(up) {
                self.settle(at);
            }
            if self.pending.is_empty() {
                return;
            }
        }
        panic!("something never ends: {:?}", self.pending);
    }
}

proptest! {
    #[test]
    fn everything_ends_once_and_nothing_is_sent_twice_at_a_time(steps in steps()) {
        let mut run = Run {
            sender: sender(1000),
            now_us: 1,
            session: 1,
            next_path: 0,
            paths: Vec::new(),
            next_done: 0,
            pending: BTreeMap::new(),
            in_flight: Vec::new(),
            undecided: BTreeSet::new(),
            asked: Vec::new(),
            delivered: BTreeSet::new(),
        };
        for step in steps {
            run.step(step);
        }
        run.settle_all();
    }
}
