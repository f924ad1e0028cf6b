//! Put-with-signal, executed and driven by hand: which signal may go when, by which path, and how
//! everything ends.

use std::num::{NonZeroU32, NonZeroUsize};

use kvasir_transfer_core::signal::{Fallback, Group, Mode, OrderedBy, Ordering};
use kvasir_transfer_core::{
    Action, Body, CloseVerdict, Frame, FrameKind, Heartbeats, Limits, Next, Operation, Outcome,
    PathIndex, PathLimits, Put, Rail, Rails, Refusal, Sender, SessionId, Settled, Shape, Signalled,
    SignalledTransfer, Target, Told, Word, WriteError,
};

const S: SessionId = SessionId(6);
const T: SessionId = SessionId(7);
const A: PathIndex = PathIndex(0);
const B: PathIndex = PathIndex(1);
const TARGET: Target = Target { incarnation: 1, key: 0 };
const LATE: u64 = u64::MAX;
const COUNTER: u32 = 9;

type Tested = Sender<&'static str, u32>;
type Ended = (u32, Outcome, Option<Told>);

fn sender() -> Tested {
    let heartbeats = Heartbeats { interval_us: 1_000, timeout_us: 1_000, always: false };
    Sender::new(Limits {
        send_bytes_per_s_max: 0,
        peer_timeout_us: 1_000_000,
        grace_us: 1_000_000,
        path_imms_max: 100,
        heartbeats,
    })
}

fn limits(ordering: Ordering) -> PathLimits {
    let queue_pairs = NonZeroU32::new(4).expect("not zero");
    PathLimits { slice_bytes: 1000, frames_max: 100, ordering, queue_pairs, rail: Rail(0) }
}

/// A transfer of puts of so many bytes. Its number tells its places and its value, and who is told.
fn transfer(number: u32, session: SessionId, puts: &[u64]) -> SignalledTransfer<&'static str, u32> {
    let put = |bytes: &u64| {
        let (source_offset, target_offset) = (0, u64::from(number) * 10_000);
        let shape = Shape::Single { source_offset, target_offset, bytes: *bytes, checksum: None };
        Put { payload: "put", shape, target: TARGET }
    };
    let (offset, value) = (u64::from(number) * 8, u64::from(number));
    let word = Word { target: TARGET, offset, value, payload: "word" };
    SignalledTransfer { session, puts: puts.iter().map(put).collect(), word, done: number }
}

fn batch(
    transfers: Vec<SignalledTransfer<&'static str, u32>>,
    ordered_by: OrderedBy,
) -> Signalled<&'static str, u32> {
    let mode = Mode::default();
    Signalled { transfers, mode, ordered_by, counter: COUNTER, group: 3, deadline_us: LATE }
}

/// A path of the first session, up, and a batch.
fn begun(ordering: Ordering, signalled: Signalled<&'static str, u32>) -> Tested {
    let mut sender = sender();
    sender.begin_signalled(signalled, 0);
    assert!(matches!(sender.poll_action(), Some(Action::Connect(_))));
    sender.path_up(S, A, limits(ordering), 0);
    sender
}

fn ended(sender: &mut Tested) -> Vec<Ended> {
    let mut ended = Vec::new();
    while let Some(action) = sender.poll_action() {
        if let Action::CompleteSignalled { done, outcome, told } = action {
            ended.push((done, outcome, told));
        }
    }
    ended
}

/// After what follows from what was said.
fn next(sender: &mut Tested, path: PathIndex) -> Option<Frame<&'static str>> {
    let mut actions = Vec::new();
    while let Some(action) = sender.poll_action() {
        actions.push(action);
    }
    assert!(actions.iter().all(|action| !matches!(action, Action::CompleteSignalled { .. })));
    match sender.next_frame(S, path, 0) {
        Next::Frame(frame) => Some(frame),
        Next::Nothing | Next::Wait { .. } => None,
    }
}

fn frames(sender: &mut Tested, path: PathIndex) -> Vec<Frame<&'static str>> {
    std::iter::from_fn(|| next(sender, path)).collect()
}

/// `p` for a put, with its transfer, and `s` for a signal; `F` for its fence.
fn words(frames: &[Frame<&'static str>]) -> Vec<String> {
    let word = |frame: &Frame<&'static str>| match frame.kind {
        FrameKind::Write { offset, .. } => format!("p{}", offset / 10_000),
        FrameKind::Signal { value, is_fenced, .. } => {
            format!("s{value}{}", if is_fenced { "F" } else { "" })
        }
        FrameKind::Seal { .. } => "seal".to_owned(),
        FrameKind::Message { .. } => "message".to_owned(),
    };
    frames.iter().map(word).collect()
}

fn post(sender: &mut Tested, path: PathIndex, frames: &[Frame<&'static str>]) {
    frames.iter().for_each(|frame| sender.posted(S, path, frame.sequence));
}

fn land(sender: &mut Tested, path: PathIndex, frames: &[Frame<&'static str>]) {
    for frame in frames {
        assert!(sender.settle(S, path, frame.sequence, Settled::Landed, 0));
    }
}

#[test]
fn where_queue_pairs_keep_order_a_signal_goes_when_its_puts_have_their_place() {
    let transfers = vec![transfer(1, S, &[10, 10]), transfer(2, S, &[10])];
    let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Nic));
    let puts = frames(&mut sender, A);
    assert_eq!(words(&puts), ["p1", "p1", "p2"], "no signal while a put may still be overtaken");
    post(&mut sender, A, &puts[..1]);
    assert!(next(&mut sender, A).is_none());
    post(&mut sender, A, &puts[1..2]);
    let first = frames(&mut sender, A);
    assert_eq!(words(&first), ["s1F"], "nobody waits for an acknowledgement");
    post(&mut sender, A, &puts[2..]);
    let second = frames(&mut sender, A);
    assert_eq!(words(&second), ["s2"], "one fence for each group and peer");
    let pins: Vec<_> = puts.iter().chain(&first).chain(&second).map(|frame| frame.pin).collect();
    assert_eq!(pins, [Some(6 % 4); 5], "the session's number modulo its queue pairs");
    for frames in [&puts, &first, &second] {
        land(&mut sender, A, frames);
    }
    assert_eq!(ended(&mut sender), [(1, Ok(()), Some(Ok(()))), (2, Ok(()), Some(Ok(())))]);
    assert!(sender.is_idle(S));
}

#[test]
fn a_put_of_several_slices_is_ahead_when_all_of_them_are() {
    let transfers = vec![transfer(1, S, &[2500])];
    let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Nic));
    let slices = frames(&mut sender, A);
    assert_eq!(words(&slices), ["p1", "p1", "p1"]);
    post(&mut sender, A, &slices[..2]);
    assert!(next(&mut sender, A).is_none());
    post(&mut sender, A, &slices[2..]);
    assert_eq!(words(&frames(&mut sender, A)), ["s1F"]);
}

#[test]
fn where_nothing_is_ordered_puts_are_counted_and_the_caller_is_told() {
    let transfers = vec![transfer(1, S, &[10]), transfer(2, S, &[10])];
    let mut sender = begun(Ordering::WhenPlaced, batch(transfers, OrderedBy::Nic));
    let puts = frames(&mut sender, A);
    assert_eq!(words(&puts), ["p1", "p2"]);
    for put in &puts {
        assert!(matches!(put.kind, FrameKind::Write { imm: Some(COUNTER), .. }));
    }
    post(&mut sender, A, &puts);
    assert!(next(&mut sender, A).is_none(), "no signal");
    land(&mut sender, A, &puts);
    let counted = Some(Err(Fallback::NoFence));
    assert_eq!(ended(&mut sender), [(1, Ok(()), counted), (2, Ok(()), counted)]);
}

#[test]
fn the_host_waits_for_every_put_of_a_group() {
    let two = Mode::Decoupled { group: Group::Size(NonZeroUsize::new(2).expect("not zero")) };
    let check = |mode, groups: &[&[u32]]| {
        let transfers = (1..=3).map(|number| transfer(number, S, &[10])).collect();
        let signalled = Signalled { mode, ..batch(transfers, OrderedBy::Host) };
        let mut sender = begun(Ordering::WhenPlaced, signalled);
        let mut signals = Vec::new();
        for group in groups {
            // The signals of the group before, and the puts of this one.
            let mut puts = frames(&mut sender, A);
            signals.extend(puts.extract_if(.., |of| matches!(of.kind, FrameKind::Signal { .. })));
            assert_eq!(words(&puts), group.iter().map(|n| format!("p{n}")).collect::<Vec<_>>());
            post(&mut sender, A, &puts);
            land(&mut sender, A, &puts[1..]);
            assert!(next(&mut sender, A).is_none(), "one is not acknowledged");
            land(&mut sender, A, &puts[..1]);
        }
        signals.extend(frames(&mut sender, A));
        assert_eq!(words(&signals), ["s1", "s2", "s3"], "no fence: the host has waited");
        land(&mut sender, A, &signals);
        assert_eq!(ended(&mut sender).len(), 3);
    };
    check(Mode::Coupled, &[&[1], &[2], &[3]]);
    check(two, &[&[1, 2], &[3]]);
    check(Mode::default(), &[&[1, 2, 3]]);
}

#[test]
fn a_transfer_of_which_a_put_fails_has_no_signal() {
    let refused = WriteError::Refused(Refusal::OutOfBounds);
    for ordered_by in [OrderedBy::Host, OrderedBy::Nic] {
        let transfers = vec![transfer(1, S, &[10, 10]), transfer(2, S, &[10])];
        let mut sender = begun(Ordering::RcQueuePair, batch(transfers, ordered_by));
        let puts = frames(&mut sender, A);
        let settled = Settled::Refused(Refusal::OutOfBounds);
        assert!(sender.settle(S, A, puts[1].sequence, settled, 0));
        post(&mut sender, A, &puts);
        land(&mut sender, A, &[puts[0].clone(), puts[2].clone()]);
        assert_eq!(ended(&mut sender), [(1, Err(refused), Some(Ok(())))], "{ordered_by:?}");
        let signals = frames(&mut sender, A);
        assert_eq!(words(&signals).len(), 1, "that of the other one");
        assert!(matches!(signals[0].kind, FrameKind::Signal { value: 2, .. }));
        land(&mut sender, A, &signals);
        assert_eq!(ended(&mut sender), [(2, Ok(()), Some(Ok(())))]);
    }
}

#[test]
fn all_of_a_session_goes_by_one_path_while_it_lasts() {
    let transfers = (1..=4).map(|number| transfer(number, S, &[10])).collect();
    let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Nic));
    sender.path_up(S, B, limits(Ordering::RcQueuePair), 0);
    let first = next(&mut sender, B).expect("a put");
    assert!(next(&mut sender, A).is_none(), "the other one has taken the first");
    assert_eq!(words(&frames(&mut sender, B)), ["p2", "p3", "p4"]);
    sender.path_lost(S, B, 0);
    assert!(next(&mut sender, A).is_none(), "nobody knows what has landed");
    assert!(sender.path_closed(S, (A, B), &CloseVerdict::default(), 0));
    let again = frames(&mut sender, A);
    assert_eq!(words(&again), ["p1", "p2", "p3", "p4"]);
    assert_eq!((first.pin, again[0].pin), (Some(2), None));
}

/// The rule that everything else is for.
#[test]
fn after_a_failover_a_signal_waits_until_what_was_sent_again_is_acknowledged() {
    for signal_was_sent in [false, true] {
        let transfers = vec![transfer(1, S, &[10])];
        let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Nic));
        let puts = frames(&mut sender, A);
        if signal_was_sent {
            post(&mut sender, A, &puts);
            assert_eq!(words(&frames(&mut sender, A)), ["s1F"]);
        }
        sender.path_lost(S, A, 0);
        sender.path_up(S, B, limits(Ordering::RcQueuePair), 0);
        assert!(next(&mut sender, B).is_none(), "before the receiver has closed the failed one");
        assert!(sender.path_closed(S, (B, A), &CloseVerdict::default(), 0));
        let again = frames(&mut sender, B);
        assert_eq!(words(&again), ["p1"]);
        post(&mut sender, B, &again);
        assert!(next(&mut sender, B).is_none(), "what is sent again has lost its place");
        land(&mut sender, B, &again);
        let signal = frames(&mut sender, B);
        assert_eq!(words(&signal), ["s1F"]);
        land(&mut sender, B, &signal);
        assert_eq!(ended(&mut sender), [(1, Ok(()), Some(Ok(())))]);
    }
}

/// The other peer is not there yet, or owes an acknowledgement, in every kind of group.
#[test]
fn a_peer_that_is_slow_holds_up_its_own_transfers_only() {
    let pairs = Mode::Decoupled { group: Group::Size(NonZeroUsize::new(2).expect("not zero")) };
    let all = Mode::Decoupled { group: Group::All };
    for mode in [Mode::Coupled, pairs, all, Mode::default()] {
        for is_there in [false, true] {
            let transfers =
                [(1, T), (2, S), (3, T), (4, S)].map(|(number, of)| transfer(number, of, &[10]));
            let signalled = Signalled { mode, ..batch(transfers.into(), OrderedBy::Host) };
            let mut sender = begun(Ordering::WhenPlaced, signalled);
            if is_there {
                sender.path_up(T, A, limits(Ordering::WhenPlaced), 0);
            }
            let mut ended_here = Vec::new();
            for _ in 0..4 {
                let frames = frames(&mut sender, A);
                post(&mut sender, A, &frames);
                land(&mut sender, A, &frames);
                ended_here.append(&mut ended(&mut sender));
            }
            let own = [(2, Ok(()), Some(Ok(()))), (4, Ok(()), Some(Ok(())))];
            assert_eq!(ended_here, own, "{mode:?} {is_there}");
            assert!(!sender.is_idle(T));
            sender.session_lost(T);
            let lost = ended(&mut sender);
            let lost: Vec<_> = lost.iter().map(|(who, outcome, _)| (*who, *outcome)).collect();
            assert_eq!(lost, [1, 3].map(|who| (who, Err(WriteError::PeerGone))), "{mode:?}");
        }
    }
}

#[test]
fn a_peer_that_is_lost_before_it_was_there_ends_its_own_transfers_only() {
    let transfers = vec![transfer(1, S, &[10]), transfer(2, T, &[10])];
    let mut sender = sender();
    sender.begin_signalled(batch(transfers, OrderedBy::Host), 0);
    assert!(!sender.is_idle(S), "it is needed");
    sender.session_lost(T);
    assert_eq!(ended(&mut sender), [(2, Err(WriteError::PeerGone), None)]);
    sender.path_up(S, A, limits(Ordering::WhenPlaced), 0);
    let puts = frames(&mut sender, A);
    assert_eq!(words(&puts), ["p1"]);
    land(&mut sender, A, &puts);
    assert_eq!(words(&frames(&mut sender, A)), ["s1"]);
    sender.session_lost(S);
    assert_eq!(ended(&mut sender), [(1, Err(WriteError::PeerGone), Some(Ok(())))]);
}

/// Of what a peer is sent, the order of the groups holds as in a plan for all.
#[test]
fn a_group_of_several_peers_is_one_group_at_each_of_them() {
    let pairs = Mode::Decoupled { group: Group::Size(NonZeroUsize::new(2).expect("not zero")) };
    let transfers = [(1, T), (2, S), (3, S), (4, S), (5, S)];
    let transfers = transfers.map(|(number, of)| transfer(number, of, &[10]));
    let signalled = Signalled { mode: pairs, ..batch(transfers.into(), OrderedBy::Host) };
    let mut sender = begun(Ordering::WhenPlaced, signalled);
    for wanted in [&["p2"][..], &["s2", "p3", "p4"], &["s3", "s4", "p5"], &["s5"]] {
        let frames = frames(&mut sender, A);
        assert_eq!(words(&frames), wanted);
        land(&mut sender, A, &frames);
        let _ = ended(&mut sender);
    }
}

/// A card did not take the region: what goes there waits for no card, and no signal is taken to be behind what
/// another path carries. Whatever goes elsewhere keeps its card, and the order that it has there.
#[test]
fn puts_leave_a_path_that_does_not_carry_their_region_and_those_behind_them_stay() {
    let other = Target { incarnation: 1, key: 5 };
    let mut second = transfer(2, S, &[10]);
    second.puts[0].target = other;
    let transfers = vec![transfer(1, S, &[10]), second, transfer(3, S, &[10])];
    let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Nic));
    let puts = frames(&mut sender, A);
    assert_eq!(words(&puts), ["p1", "p2", "p3"]);
    post(&mut sender, A, &puts[..1]);
    post(&mut sender, A, &puts[2..]);
    sender.unsuited(S, A, (other, &[puts[1].sequence]), 0);
    let signals = frames(&mut sender, A);
    assert_eq!(words(&signals), ["s1F", "s3"], "the third waits for nothing of the second");
    let tcp = PathLimits { rail: Rail::LAST, ..limits(Ordering::WhenPlaced) };
    sender.path_up(S, B, tcp, 0);
    let again = frames(&mut sender, B);
    assert_eq!(words(&again), ["p2"], "by the path that is used for nothing else");
    // What begins meanwhile overlaps with it.
    let mut fifth = transfer(5, S, &[1500]);
    fifth.puts[0].target = other;
    let more = vec![transfer(4, S, &[10]), fifth, transfer(6, S, &[10])];
    sender.begin_signalled(batch(more, OrderedBy::Nic), 0);
    let later = frames(&mut sender, A);
    assert_eq!(words(&later), ["p4", "p6"], "as before");
    post(&mut sender, A, &later);
    let aside = frames(&mut sender, B);
    assert_eq!(words(&aside), ["p5", "p5"]);
    assert!(aside.iter().all(|frame| frame.pin.is_none()), "they have no place in any order");
    post(&mut sender, B, &aside);
    let more_signals = frames(&mut sender, A);
    assert_eq!(words(&more_signals), ["s4F", "s6"]);
    land(&mut sender, B, &again);
    let second_signal = frames(&mut sender, A);
    assert_eq!(
        words(&second_signal),
        ["s2"],
        "its word is in a region that the first path carries"
    );
    land(&mut sender, B, &aside);
    let seal = frames(&mut sender, B);
    assert_eq!(words(&seal), ["seal"]);
    assert!(next(&mut sender, A).is_none(), "the fifth has not landed");
    land(&mut sender, B, &seal);
    let last = frames(&mut sender, A);
    assert_eq!(words(&last), ["s5"]);
    for frames in [&puts[..1], &puts[2..], &signals, &later, &more_signals, &second_signal, &last] {
        land(&mut sender, A, frames);
    }
    assert_eq!(ended(&mut sender).len(), 6);
    assert!(sender.is_idle(S));
}

/// The first of a batch decides nothing for the others.
#[test]
fn a_put_that_no_card_carries_takes_no_other_with_it_when_it_is_the_first() {
    let other = Target { incarnation: 1, key: 5 };
    let mut first = transfer(1, S, &[10]);
    first.puts[0].target = other;
    let transfers = vec![first, transfer(2, S, &[10])];
    let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Nic));
    let tcp = PathLimits { rail: Rail::LAST, ..limits(Ordering::WhenPlaced) };
    sender.path_up(S, B, tcp, 0);
    sender.unsuited(S, A, (other, &[]), 0);
    assert_eq!(words(&frames(&mut sender, B)), ["p1"], "whichever path is asked first");
    let by_card = frames(&mut sender, A);
    assert_eq!(words(&by_card), ["p2"]);
    assert_eq!(by_card[0].pin, Some(6 % 4));
    // Where one of two cards carries it, it is that one.
    let mut first = transfer(1, S, &[10]);
    first.puts[0].target = other;
    let transfers = vec![first, transfer(2, S, &[10])];
    let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Nic));
    sender.path_up(S, B, PathLimits { rail: Rail(1), ..limits(Ordering::RcQueuePair) }, 0);
    sender.unsuited(S, A, (other, &[]), 0);
    assert!(next(&mut sender, A).is_none());
    let by_card = frames(&mut sender, B);
    assert_eq!(words(&by_card), ["p1", "p2"]);
    assert!(by_card.iter().all(|frame| frame.pin.is_some()), "and they have their order");
}

/// Those that are counted go by a path whose acknowledgements say nothing of memory; a signal that was planned
/// before there was one does not wait behind them for ever.
#[test]
fn a_signal_leaves_a_path_that_does_not_place_what_it_follows() {
    let transfers = vec![transfer(1, S, &[10])];
    let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Host));
    let puts = frames(&mut sender, A);
    assert_eq!(words(&puts), ["p1"]);
    let relaxed = PathLimits { rail: Rail(1), ..limits(Ordering::None) };
    sender.path_up(S, B, relaxed, 0);
    sender.begin_signalled(batch(vec![transfer(2, S, &[10])], OrderedBy::Host), 0);
    sender.path_lost(S, A, 0);
    assert!(sender.path_closed(S, (B, A), &CloseVerdict::default(), 0));
    assert_eq!(words(&frames(&mut sender, B)), ["p2"], "a counted one");
    let anew = PathIndex(2);
    sender.path_up(S, anew, limits(Ordering::RcQueuePair), 0);
    for wanted in ["p1", "s1"] {
        let frames = frames(&mut sender, anew);
        assert_eq!(words(&frames), [wanted]);
        land(&mut sender, anew, &frames);
    }
    assert_eq!(ended(&mut sender), [(1, Ok(()), Some(Ok(())))]);
}

#[test]
fn a_signal_whose_word_its_path_does_not_carry_goes_by_another_when_its_puts_have_landed() {
    let other = Target { incarnation: 1, key: 5 };
    let with_word = |number| {
        let mut transfer = transfer(number, S, &[10]);
        transfer.word.target = other;
        transfer
    };
    let mut sender = begun(Ordering::RcQueuePair, batch(vec![with_word(1)], OrderedBy::Nic));
    sender.path_up(S, B, PathLimits { rail: Rail(1), ..limits(Ordering::RcQueuePair) }, 0);
    sender.unsuited(S, A, (other, &[]), 0);
    let puts = frames(&mut sender, A);
    assert_eq!(words(&puts), ["p1"]);
    post(&mut sender, A, &puts);
    assert!(next(&mut sender, A).is_none(), "its word is not carried");
    assert!(next(&mut sender, B).is_none(), "its put is on another path");
    land(&mut sender, A, &puts);
    let signal = frames(&mut sender, B);
    assert_eq!(words(&signal), ["s1F"]);
    land(&mut sender, B, &signal);
    assert_eq!(ended(&mut sender), [(1, Ok(()), Some(Ok(())))]);
}

/// A seal has no place in the order of the others, and the path that it needs may never come up.
#[test]
fn a_signal_does_not_stand_in_the_way_while_the_seal_of_its_put_waits_for_another_path() {
    let other = Target { incarnation: 1, key: 5 };
    let mut first = transfer(1, S, &[2500]);
    first.puts[0].target = other;
    let transfers = vec![first, transfer(2, S, &[10])];
    let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Nic));
    let puts = frames(&mut sender, A);
    assert_eq!(words(&puts), ["p1", "p1", "p1", "p2"]);
    let (first, second) = puts.split_at(3);
    // It has landed before its signal could go, and its region has left the card since.
    land(&mut sender, A, first);
    sender.unsuited(S, A, (other, &[]), 0);
    post(&mut sender, A, second);
    let signal = frames(&mut sender, A);
    assert_eq!(words(&signal).len(), 1, "the first one is not in its way");
    assert!(matches!(signal[0].kind, FrameKind::Signal { value: 2, .. }));
    land(&mut sender, A, second);
    land(&mut sender, A, &signal);
    assert_eq!(ended(&mut sender), [(2, Ok(()), Some(Ok(())))]);
    sender.path_up(S, B, PathLimits { rail: Rail(1), ..limits(Ordering::RcQueuePair) }, 0);
    let seal = frames(&mut sender, B);
    assert_eq!(words(&seal), ["seal"]);
    assert!(next(&mut sender, A).is_none(), "its put has not landed");
    land(&mut sender, B, &seal);
    let signal = frames(&mut sender, A);
    assert!(matches!(signal[..], [Frame { kind: FrameKind::Signal { value: 1, .. }, .. }]));
    land(&mut sender, A, &signal);
    assert_eq!(ended(&mut sender), [(1, Ok(()), Some(Ok(())))]);
}

/// Who asks paths in turn and sleeps when none has anything would sleep over it.
#[test]
fn what_leaves_the_order_is_offered_to_paths_that_were_asked_before_it_did() {
    let [other, nowhere] = [5, 6].map(|key| Target { incarnation: 1, key });
    let mut sender =
        begun(Ordering::RcQueuePair, batch(vec![transfer(1, S, &[10])], OrderedBy::Nic));
    sender.path_up(S, B, PathLimits { rail: Rail(1), ..limits(Ordering::RcQueuePair) }, 0);
    let put = frames(&mut sender, A);
    assert_eq!(words(&put), ["p1"]);
    post(&mut sender, A, &put);
    assert_eq!(words(&frames(&mut sender, A)), ["s1F"], "and nothing has landed yet");
    for (path, region) in [(A, other), (A, nowhere), (B, nowhere)] {
        sender.unsuited(S, path, (region, &[]), 0);
    }
    for (number, region) in [(2, nowhere), (3, other)] {
        let mut transfer = transfer(number, S, &[10]);
        transfer.puts[0].target = region;
        sender.begin_signalled(batch(vec![transfer], OrderedBy::Nic), 0);
    }
    assert!(next(&mut sender, B).is_none(), "the signal of the first one is ahead");
    assert_eq!(sender.poll_action(), Some(Action::Offer(S)), "its put has left");
    assert!(!matches!(sender.next_frame(S, A, 0), Next::Frame(_)));
    let offers = std::iter::from_fn(|| sender.poll_action()).collect::<Vec<_>>();
    assert_eq!(offers, [Action::Offer(S)]);
    assert_eq!(words(&frames(&mut sender, B)), ["p3"]);
}

fn write(bytes: u64) -> Operation<&'static str, u32> {
    let (source_offset, target_offset, checksum) = (0, 900_000, None);
    let shape = Shape::Single { source_offset, target_offset, bytes, checksum };
    let body = Body::Write { shape, target: TARGET, imm: None, group: 4 };
    let (rails, payload) = (Rails::ANY, "write");
    Operation { session: S, deadline_us: LATE, payload, body, rails, done: 99 }
}

#[test]
fn puts_go_first_and_let_other_writes_pass_after_each_slice() {
    let check = |put_bytes: u64, in_a_row: usize| {
        let transfers = (1..=60).map(|number| transfer(number, S, &[put_bytes])).collect();
        let mut sender = begun(Ordering::WhenPlaced, batch(transfers, OrderedBy::Host));
        sender.begin(write(3_000), 0);
        let frames = frames(&mut sender, A);
        assert_eq!(frames.len(), 63, "each path takes both");
        let others: Vec<usize> = (0..63).filter(|at| frames[*at].payload == "write").collect();
        let wanted = [0, 1, 2].map(|turn| (turn + 1) * in_a_row + turn);
        assert_eq!(others, wanted, "puts of {put_bytes}");
    };
    // Slices are of 1000 bytes.
    check(1000, 1);
    check(500, 2);
    check(1, 16);
}

/// Both are measured in bytes, and short frames of both cost as much.
#[test]
fn as_many_bytes_of_others_pass_as_of_puts_however_short_their_writes_are() {
    let check = |put_bytes: u64, other_bytes: u64, others_in_a_row: usize| {
        let transfers = (1..=3).map(|number| transfer(number, S, &[put_bytes])).collect();
        let mut sender = begun(Ordering::WhenPlaced, batch(transfers, OrderedBy::Host));
        (0..60).for_each(|_| sender.begin(write(other_bytes), 0));
        let frames = frames(&mut sender, A);
        assert_eq!(frames.len(), 63, "each path takes both");
        let puts: Vec<usize> = (0..63).filter(|at| frames[*at].payload == "put").collect();
        // The first of the others have it that puts are ahead.
        assert_eq!(puts[..2], [0, 2], "writes of {other_bytes}");
        assert_eq!(puts[2] - puts[1] - 1, others_in_a_row, "writes of {other_bytes}");
    };
    check(1000, 500, 2);
    check(1000, 250, 4);
    check(1000, 125, 8);
    // However short they are, as of puts.
    check(1000, 1, 15);
}

#[test]
fn domains_that_order_and_others_are_planned_apart() {
    let transfers = vec![transfer(1, S, &[10]), transfer(2, T, &[10])];
    let mut sender = begun(Ordering::RcQueuePair, batch(transfers, OrderedBy::Nic));
    sender.path_up(T, A, limits(Ordering::WhenPlaced), 0);
    let puts = frames(&mut sender, A);
    assert!(matches!(puts[0].kind, FrameKind::Write { imm: None, .. }));
    let Next::Frame(other) = sender.next_frame(T, A, 0) else { panic!("the other put") };
    assert!(matches!(other.kind, FrameKind::Write { imm: Some(COUNTER), .. }));
    assert!(sender.settle(T, A, other.sequence, Settled::Landed, 0));
    assert_eq!(ended(&mut sender), [(2, Ok(()), Some(Err(Fallback::NoFence)))]);
}

#[test]
fn nothing_is_signalled_after_the_group_was_drained() {
    // Before the puts are issued, when they are on the wire, and between them and the signals.
    for (issued, landed) in [(false, false), (true, false), (true, true)] {
        let transfers = vec![transfer(1, S, &[10])];
        let mut sender = begun(Ordering::WhenPlaced, batch(transfers, OrderedBy::Host));
        let puts = if issued { frames(&mut sender, A) } else { Vec::new() };
        if landed {
            land(&mut sender, A, &puts);
        }
        sender.drain_group(3, 77);
        if !landed {
            land(&mut sender, A, &puts);
        }
        let mut told = Vec::new();
        while let Some(action) = sender.poll_action() {
            match action {
                Action::Complete(who, outcome) => told.push((who, outcome)),
                Action::CompleteSignalled { done, outcome, .. } => told.push((done, outcome)),
                _ => {}
            }
        }
        told.sort_by_key(|(who, _)| *who);
        assert_eq!(told, [(1, Err(WriteError::Cancelled)), (77, Ok(()))], "{issued} {landed}");
        assert!(next(&mut sender, A).is_none(), "no signal");
    }
}

#[test]
fn every_transfer_ends_by_its_deadline() {
    for step in 0..3 {
        let transfers = vec![transfer(1, S, &[10]), transfer(2, S, &[10])];
        let signalled = Signalled { deadline_us: 5_000, ..batch(transfers, OrderedBy::Host) };
        let mut sender = sender();
        sender.begin_signalled(signalled, 0);
        if step > 0 {
            sender.path_up(S, A, limits(Ordering::WhenPlaced), 0);
            let puts = frames(&mut sender, A);
            land(&mut sender, A, &puts[..step - 1]);
        }
        assert!(sender.next_time_us() <= 5_000, "step {step}");
        sender.handle_time(5_000);
        let late = Err(WriteError::DeadlineExceeded);
        let mut ended = ended(&mut sender);
        ended.sort_by_key(|(who, _, _)| *who);
        let outcomes: Vec<_> = ended.iter().map(|(who, outcome, _)| (*who, *outcome)).collect();
        assert_eq!(outcomes, [(1, late), (2, late)], "step {step}");
        assert!(!matches!(sender.next_frame(S, A, 5_000), Next::Frame(_)), "step {step}");
    }
}

#[test]
fn what_a_stopping_engine_has_begun_is_cancelled() {
    let transfers = vec![transfer(1, S, &[10]), transfer(2, S, &[10])];
    let mut sender = begun(Ordering::WhenPlaced, batch(transfers, OrderedBy::Host));
    let _ = frames(&mut sender, A);
    sender.shut_down();
    let all = ended(&mut sender);
    let outcomes: Vec<_> = all.iter().map(|(who, outcome, _)| (*who, *outcome)).collect();
    assert_eq!(outcomes, [(1, Err(WriteError::Cancelled)), (2, Err(WriteError::Cancelled))]);
}

/// A path that is used only while no other is up, and one whose acknowledgements say nothing of memory.
fn tcp_and_relaxed_card() -> (PathLimits, PathLimits) {
    let tcp = PathLimits { rail: Rail::LAST, ..limits(Ordering::WhenPlaced) };
    (tcp, limits(Ordering::None))
}

/// Lets everything land that goes by these paths. What has ended then.
fn land_all(sender: &mut Tested, paths: u32) -> Vec<Ended> {
    let mut all_ended = ended(sender);
    for _ in 0..3 {
        for path in (0..paths).map(PathIndex) {
            let mut all = Vec::new();
            while let Next::Frame(frame) = sender.next_frame(S, path, 0) {
                all.push(frame);
            }
            post(sender, path, &all);
            land(sender, path, &all);
            all_ended.append(&mut ended(sender));
        }
    }
    all_ended
}

/// A session with these paths, in which a batch has ended already.
fn connected(paths: &[PathLimits]) -> Tested {
    let mut sender = sender();
    sender.begin_signalled(batch(vec![transfer(9, S, &[10])], OrderedBy::Host), 0);
    sender.path_up(S, A, paths[0], 0);
    assert_eq!(land_all(&mut sender, 1).len(), 1, "{paths:?}");
    for (at, of) in (0u32..).zip(paths).skip(1) {
        sender.path_up(S, PathIndex(at), *of, 0);
    }
    sender
}

#[test]
fn what_orders_least_of_the_paths_that_are_used_decides() {
    let (tcp, card) = tcp_and_relaxed_card();
    let check = |paths: &[PathLimits], ordered_by, want: Told| {
        let mut sender = connected(paths);
        sender.begin_signalled(batch(vec![transfer(1, S, &[10])], ordered_by), 0);
        let ended = land_all(&mut sender, paths.len() as u32);
        assert_eq!(ended, [(1, Ok(()), Some(want))], "{paths:?}");
    };
    let not_placed = Err(Fallback::NotPlaced);
    let strict = limits(Ordering::RcQueuePair);
    check(&[tcp], OrderedBy::Host, Ok(()));
    check(&[tcp, strict], OrderedBy::Nic, Ok(()));
    check(&[tcp, card], OrderedBy::Host, not_placed);
    check(&[card, tcp], OrderedBy::Host, not_placed);
    check(&[strict, card], OrderedBy::Nic, not_placed);
}

#[test]
fn neither_puts_nor_signals_take_a_path_that_does_not_place_them() {
    let (tcp, card) = tcp_and_relaxed_card();
    for failed in [false, true] {
        let mut sender = connected(&[tcp]);
        let transfers = vec![transfer(1, S, &[10, 10])];
        let signalled = Signalled { deadline_us: 5_000, ..batch(transfers, OrderedBy::Host) };
        sender.begin_signalled(signalled, 0);
        let first = next(&mut sender, A).expect("a put");
        sender.path_up(S, B, card, 0);
        if failed {
            sender.path_lost(S, A, 0);
            assert!(sender.path_closed(S, (B, A), &CloseVerdict::default(), 0));
        } else {
            land(&mut sender, A, &[first]);
        }
        assert!(next(&mut sender, B).is_none(), "failed {failed}");
        // Who makes the paths is to know that one more is needed.
        assert_eq!(sender.has_unplaced(S), failed);
        sender.handle_time(5_000);
        let ended = ended(&mut sender);
        assert_eq!(ended[0].1, Err(WriteError::DeadlineExceeded), "failed {failed}");
        assert!(!sender.has_unplaced(S), "nobody waits for it any more");
    }
}

/// A path that is used only while no other is up carries what the others do not place.
#[test]
fn what_must_be_placed_goes_by_the_last_path_when_no_better_one_places_it() {
    let (tcp, card) = tcp_and_relaxed_card();
    for was_issued in [false, true] {
        let mut sender = connected(&[tcp]);
        sender.begin_signalled(batch(vec![transfer(1, S, &[10])], OrderedBy::Host), 0);
        assert!(ended(&mut sender).is_empty());
        if was_issued {
            assert_eq!(words(&frames(&mut sender, A)), ["p1"]);
        }
        sender.path_up(S, B, card, 0);
        sender.path_lost(S, A, 0);
        assert!(sender.path_closed(S, (B, A), &CloseVerdict::default(), 0));
        assert!(next(&mut sender, B).is_none(), "nothing is placed there");
        let anew = PathIndex(2);
        sender.path_up(S, anew, tcp, 0);
        for wanted in ["p1", "s1"] {
            assert!(next(&mut sender, B).is_none(), "{wanted} {was_issued}");
            let frames = frames(&mut sender, anew);
            assert_eq!(words(&frames), [wanted], "issued {was_issued}");
            land(&mut sender, anew, &frames);
        }
        assert_eq!(ended(&mut sender), [(1, Ok(()), Some(Ok(())))], "issued {was_issued}");
    }
}

#[test]
fn puts_return_to_a_better_path_when_nothing_holds_them_to_the_other() {
    let (tcp, _) = tcp_and_relaxed_card();
    let mut sender = connected(&[tcp]);
    for path in [A, B] {
        if path == B {
            sender.path_up(S, B, limits(Ordering::RcQueuePair), 0);
        }
        sender.begin_signalled(batch(vec![transfer(1, S, &[10])], OrderedBy::Host), 0);
        for wanted in ["p1", "s1"] {
            let frames = frames(&mut sender, path);
            assert_eq!(words(&frames), [wanted], "{path:?}");
            post(&mut sender, path, &frames);
            land(&mut sender, path, &frames);
        }
        assert_eq!(ended(&mut sender), [(1, Ok(()), Some(Ok(())))]);
    }
}
