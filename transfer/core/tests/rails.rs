//! Which path of a session takes which write: those on the rails that suit it, spread evenly, and any other
//! while none of these is up.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use kvasir_transfer_core::signal::Ordering;
use kvasir_transfer_core::{
    Action, Body, CloseVerdict, Frame, FrameKind, Heartbeats, Limits, Next, Operation, PathIndex,
    PathLimits, Rail, Rails, Sender, SessionId, Settled, Shape, Target,
};

const S: SessionId = SessionId(1);
const SLICE_BYTES: u64 = 1000;

struct Tested {
    sender: Sender<&'static str, u32>,
    next: u32,
}

impl Tested {
    /// A path on each of these rails.
    fn new(rails: &[Rail]) -> Self {
        let heartbeats = Heartbeats { interval_us: 1_000_000, timeout_us: 1_000, always: false };
        let sender = Sender::new(Limits {
            send_bytes_per_s_max: 0,
            peer_timeout_us: u64::MAX / 4,
            grace_us: u64::MAX / 4,
            path_imms_max: 1000,
            heartbeats,
        });
        let mut tested = Tested { sender, next: 0 };
        // The session begins with its first operation.
        tested.write(1, Rails::ANY);
        for (index, rail) in (0..).zip(rails) {
            let limits = PathLimits { rail: *rail, ..tested.limits() };
            tested.sender.path_up(S, PathIndex(index), limits, 0);
        }
        let first = (0..).map(PathIndex).find_map(|path| tested.take(path)).expect("one takes it");
        tested.settle_all(&[first]);
        tested
    }

    fn write(&mut self, bytes: u64, rails: Rails) {
        self.write_to(Target { incarnation: 1, key: 2 }, bytes, rails);
    }

    fn limits(&self) -> PathLimits {
        PathLimits {
            slice_bytes: SLICE_BYTES,
            frames_max: 1000,
            ordering: Ordering::WhenPlaced,
            queue_pairs: NonZeroU32::MIN,
            rail: Rail(0),
        }
    }

    fn write_to(&mut self, target: Target, bytes: u64, rails: Rails) {
        let (source_offset, target_offset) = (0, 0);
        let shape = Shape::Single { source_offset, target_offset, bytes, checksum: None };
        let body = Body::Write { shape, target, imm: Some(7), group: 0 };
        let (deadline_us, payload, done) = (u64::MAX, "bytes", self.next);
        self.next += 1;
        let operation = Operation { session: S, deadline_us, payload, body, rails, done };
        self.sender.begin(operation, 0);
    }

    fn take(&mut self, path: PathIndex) -> Option<(PathIndex, Frame<&'static str>)> {
        match self.sender.next_frame(S, path, 0) {
            Next::Frame(frame) => Some((path, frame)),
            Next::Nothing => None,
            Next::Wait { .. } => panic!("nothing is throttled"),
        }
    }

    /// All that the path takes in a row.
    fn take_all(&mut self, path: u32) -> Vec<(PathIndex, Frame<&'static str>)> {
        std::iter::from_fn(|| self.take(PathIndex(path))).collect()
    }

    fn settle_all(&mut self, frames: &[(PathIndex, Frame<&'static str>)]) {
        for (path, frame) in frames {
            assert!(self.sender.settle(S, *path, frame.sequence, Settled::Landed, 0));
        }
    }
}

fn only(rail: u8, else_rail: u8) -> Rails {
    Rails::new([Rail(rail)], [Rail(else_rail)])
}

#[test]
fn the_slices_of_one_write_are_spread_whichever_path_is_asked_first() {
    let mut tested = Tested::new(&[Rail(0), Rail(1), Rail(2)]);
    tested.write(90 * SLICE_BYTES, Rails::ANY);
    let mut taken = [0, 0, 0];
    loop {
        let before = taken;
        for path in [0, 1, 2] {
            taken[path as usize] += tested.take_all(path).len();
        }
        let (least, most) = (taken.iter().min().unwrap(), taken.iter().max().unwrap());
        assert!(most - least <= 2, "{taken:?}");
        if taken == before {
            break;
        }
    }
    assert_eq!(taken.iter().sum::<usize>(), 90);
}

#[test]
fn a_path_that_is_slow_gets_less_and_holds_up_nobody() {
    let mut tested = Tested::new(&[Rail(0), Rail(1)]);
    tested.write(100 * SLICE_BYTES, Rails::ANY);
    let slow = tested.take_all(1);
    let mut fast = 0;
    loop {
        // What it has taken lands at once, and nothing of the other one does.
        let taken = tested.take_all(0);
        if taken.is_empty() {
            break;
        }
        fast += taken.len();
        tested.settle_all(&taken);
    }
    assert!(slow.len() < 4 && fast + slow.len() == 100, "{} {fast}", slow.len());
}

#[test]
fn a_write_goes_by_the_rail_that_suits_it_though_others_are_idle() {
    let mut tested = Tested::new(&[Rail(0), Rail(1)]);
    for _ in 0..5 {
        tested.write(10, only(1, 0));
    }
    tested.write(20, only(0, 1));
    let first: Vec<u64> = tested.take_all(0).iter().map(|(_, frame)| frame.bytes).collect();
    assert_eq!(first, [20]);
    assert_eq!(tested.take_all(1).len(), 5);
}

#[test]
fn a_rail_that_is_lost_is_replaced_by_the_next_best() {
    let mut tested = Tested::new(&[Rail(0), Rail(1), Rail(2), Rail(3)]);
    tested.sender.path_lost(S, PathIndex(1), 0);
    tested.write(10, only(1, 2));
    assert!(tested.take_all(0).is_empty() && tested.take_all(3).is_empty());
    assert_eq!(tested.take_all(2).len(), 1);
    tested.sender.path_lost(S, PathIndex(2), 0);
    tested.write(10, only(1, 2));
    assert!(!tested.take_all(0).is_empty(), "any rail is better than none");
}

#[test]
fn the_last_rail_is_idle_while_there_is_another() {
    let mut tested = Tested::new(&[Rail::LAST, Rail(0)]);
    tested.write(10 * SLICE_BYTES, Rails::ANY);
    assert!(tested.take_all(0).is_empty());
    let taken = tested.take_all(1);
    assert_eq!(taken.len(), 10);
    tested.settle_all(&taken);
    tested.sender.path_lost(S, PathIndex(1), 0);
    tested.write(10, Rails::ANY);
    assert!(!tested.take_all(0).is_empty());
}

#[test]
fn writes_of_one_rail_do_not_wait_behind_those_of_another() {
    let mut tested = Tested::new(&[Rail(0), Rail(1)]);
    tested.write(1000 * SLICE_BYTES, only(0, 1));
    tested.write(30, only(1, 0));
    tested.write(40, Rails::ANY);
    let by_second: Vec<u64> = tested.take_all(1).iter().map(|(_, frame)| frame.bytes).collect();
    assert_eq!(by_second, [30, 40]);
}

// ---- regions that a rail does not carry ----

/// No path of rail 0 carries it.
const OTHER: Target = Target { incarnation: 1, key: 3 };

impl Tested {
    /// Says of what the path has taken for the region that it does not carry it.
    fn refuse(&mut self, path: u32, region: Target) -> usize {
        let mut taken = self.take_all(path);
        let is_for = |frame: &Frame<&'static str>| match frame.kind {
            FrameKind::Write { target, .. } | FrameKind::Seal { target, .. } => target == region,
            FrameKind::Message { .. } | FrameKind::Signal { .. } => false,
        };
        let refused: Vec<u64> = taken
            .extract_if(.., |(_, frame)| is_for(frame))
            .map(|(_, frame)| frame.sequence)
            .collect();
        self.settle_all(&taken);
        self.sender.unsuited(S, PathIndex(path), (region, &refused), 0);
        refused.len()
    }

    /// Lets everything land, and says how many bytes each path has carried for each region.
    fn carried(&mut self, paths: u32) -> Vec<(u32, u64, u64)> {
        let mut carried = BTreeMap::new();
        loop {
            let taken: Vec<_> = (0..paths).flat_map(|path| self.take_all(path)).collect();
            if taken.is_empty() {
                return carried
                    .into_iter()
                    .map(|((path, key), bytes)| (path, key, bytes))
                    .collect();
            }
            for (path, frame) in &taken {
                let key = match frame.kind {
                    FrameKind::Write { target, .. } | FrameKind::Seal { target, .. } => target.key,
                    FrameKind::Message { .. } | FrameKind::Signal { .. } => 0,
                };
                *carried.entry((path.0, key)).or_default() += frame.bytes;
            }
            self.settle_all(&taken);
        }
    }

    fn ended(&mut self) -> usize {
        let actions = std::iter::from_fn(|| self.sender.poll_action());
        actions.filter(|action| matches!(action, Action::Complete(_, Ok(())))).count()
    }
}

#[test]
fn a_region_that_a_rail_does_not_carry_goes_by_others_and_all_else_by_that_one_as_before() {
    let mut tested = Tested::new(&[Rail(0), Rail(1)]);
    tested.write_to(OTHER, 20 * SLICE_BYTES, Rails::ANY);
    tested.write_to(OTHER, 10, only(0, 1));
    assert!(tested.refuse(0, OTHER) > 0);
    tested.write(20 * SLICE_BYTES, Rails::ANY);
    let carried = tested.carried(2);
    let of = |path, key| {
        let found = carried.iter().find(|of| (of.0, of.1) == (path, key));
        found.map_or(0, |of| of.2)
    };
    assert_eq!((of(0, OTHER.key), of(1, OTHER.key)), (0, 20 * SLICE_BYTES + 10));
    assert!(of(0, 2) > 5 * SLICE_BYTES && of(1, 2) > 5 * SLICE_BYTES, "{carried:?}");
    assert_eq!(tested.ended(), 4, "with the one that it began with");
    // What begins later does not try it again.
    tested.write_to(OTHER, 10, only(0, 1));
    assert!(tested.take_all(0).is_empty() && tested.take_all(1).len() == 1);
}

#[test]
fn a_region_that_the_only_path_does_not_carry_waits_for_one_that_does() {
    let mut tested = Tested::new(&[Rail(0)]);
    tested.write_to(OTHER, 2 * SLICE_BYTES + 1, Rails::ANY);
    tested.write(1, Rails::ANY);
    assert_eq!(tested.refuse(0, OTHER), 3);
    assert!(tested.take_all(0).is_empty());
    tested.write(1, Rails::ANY);
    assert_eq!(tested.take_all(0).len(), 1, "others do not wait behind it");
    // One of another rail that is used only while nothing else is up, or for want of anything else.
    let (ordering, rail) = (Ordering::WhenPlaced, Rail::LAST);
    let limits = PathLimits { ordering, rail, ..tested.limits() };
    tested.sender.path_up(S, PathIndex(1), limits, 0);
    let slices = tested.take_all(1);
    assert_eq!(slices.len(), 3);
    tested.settle_all(&slices);
    assert!(tested.take_all(0).is_empty(), "nor its seal");
    assert_eq!(tested.carried(2).len(), 1);
}

#[test]
fn a_path_made_anew_on_the_rail_does_not_carry_the_region_either() {
    let mut tested = Tested::new(&[Rail(0), Rail(1)]);
    tested.write_to(OTHER, 10, only(0, 1));
    assert_eq!(tested.refuse(0, OTHER), 1);
    tested.sender.path_lost(S, PathIndex(0), 0);
    let limits = PathLimits { rail: Rail(0), ..tested.limits() };
    tested.sender.path_up(S, PathIndex(2), limits, 0);
    tested.write_to(OTHER, 10, only(0, 1));
    assert!(tested.take_all(2).is_empty());
    assert_eq!(tested.take_all(1).len(), 2);
}

/// Its connections may be taken for other peers then, and are not made anew.
#[test]
fn what_has_ended_where_no_path_takes_it_keeps_no_session_busy() {
    let mut tested = Tested::new(&[Rail(0)]);
    tested.write_to(OTHER, 2 * SLICE_BYTES, Rails::ANY);
    assert_eq!(tested.refuse(0, OTHER), 2);
    tested.write_to(OTHER, 1, only(0, 1));
    assert!(tested.take_all(0).is_empty());
    assert!(!tested.sender.is_idle(S));
    tested.sender.drain_group(0, 99);
    assert_eq!(tested.ended(), 2, "the one that it began with, and the drain");
    assert!(tested.sender.is_idle(S));
}

/// Who makes the paths is to know that one beside them is needed.
#[test]
fn that_a_region_is_kept_off_some_rail_is_known_longer_than_its_paths_last() {
    let mut tested = Tested::new(&[Rail(0)]);
    tested.write_to(OTHER, 10, Rails::ANY);
    assert!(!tested.sender.has_unsuited(S));
    assert_eq!(tested.refuse(0, OTHER), 1);
    assert!(tested.sender.has_unsuited(S));
    tested.sender.path_lost(S, PathIndex(0), 0);
    assert!(tested.sender.has_unsuited(S));
    tested.sender.session_lost(S);
    assert!(!tested.sender.has_unsuited(S));
}

/// It has brought some of it, and what others tell does not say that it is in place.
#[test]
fn what_is_cut_is_counted_by_a_card_that_reorders_or_when_that_has_ended() {
    let mut tested = Tested::new(&[Rail(0)]);
    let limits = PathLimits { ordering: Ordering::None, rail: Rail(1), ..tested.limits() };
    tested.sender.path_up(S, PathIndex(1), limits, 0);
    let bring = |tested: &mut Tested| {
        tested.write(4 * SLICE_BYTES, Rails::ANY);
        let mut slices = Vec::new();
        for _ in 0..4 {
            slices
                .extend([PathIndex(0), PathIndex(1)].into_iter().filter_map(|of| tested.take(of)));
        }
        assert!(slices.iter().any(|(path, _)| *path == PathIndex(1)));
        tested.settle_all(&slices);
        assert!(tested.take_all(0).is_empty());
    };
    bring(&mut tested);
    let sealed = tested.take_all(1);
    assert!(matches!(sealed[..], [(_, Frame { kind: FrameKind::Seal { .. }, .. })]));
    tested.settle_all(&sealed);

    bring(&mut tested);
    tested.sender.path_lost(S, PathIndex(1), 0);
    assert!(tested.take_all(0).is_empty(), "it may be on its way to memory still");
    let verdict = CloseVerdict::default();
    assert!(tested.sender.path_closed(S, (PathIndex(0), PathIndex(1)), &verdict, 0));
    let sealed = tested.take_all(0);
    assert!(matches!(sealed[..], [(_, Frame { kind: FrameKind::Seal { .. }, .. })]));
}
