//! Put-with-signal: words that are never seen before their data, whatever orders them, and what the caller
//! is told of it. And counters that are mirrored for whoever polls memory.

use std::num::NonZeroUsize;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvasir_transfer::signalled::{
    Fallback, OrderedBy, Put, PutWithSignal, Signal, SignalGroup, SignalMode, SignalledPut,
};
use kvasir_transfer::{
    Completion, Mirror, PeerId, Refusal, RegionDesc, RegionHandle, Source, SubmitError, WriteError,
};

use crate::fabric::{Fabric, LONG, Node, fill, read};

const COUNTER: u32 = 40;
const DATA_BYTES: usize = 100_000;
/// Behind the data of a peer.
const WORDS_AT: usize = DATA_BYTES.next_multiple_of(8);

/// A peer with room for data and words, and a source of the data.
struct Target {
    peer: PeerId,
    region: RegionHandle,
    descriptor: RegionDesc,
    source: RegionHandle,
    bytes: Vec<u8>,
}

fn target(fabric: &Fabric, node: &Node) -> Target {
    let (source, _) = fabric.a.region(DATA_BYTES);
    let bytes = fill(&source, 5);
    let (region, descriptor) = node.region(WORDS_AT + 4096);
    Target { peer: fabric.a.connect(node), region, descriptor, source, bytes }
}

impl Target {
    fn put(&self, offset: usize, bytes: usize) -> Put {
        let source = Source::Region { handle: self.source.clone(), offset, bytes };
        Put { source, target: self.descriptor, target_offset: offset as u64 }
    }

    /// Transfer `at` of `of` that share the data, in two puts each.
    fn transfer(&self, at: usize, of: usize, value: u64) -> SignalledPut {
        let bytes = DATA_BYTES / of;
        let (from, half) = (at * bytes, bytes / 2);
        let puts = vec![self.put(from, half), self.put(from + half, bytes - half)];
        let offset = (WORDS_AT + at * 8) as u64;
        SignalledPut {
            peer: self.peer,
            puts,
            signal: Signal { target: self.descriptor, offset, value },
        }
    }

    fn word(&self, at: usize) -> u64 {
        let word = self.region.memory().atomic_u64(WORDS_AT + at * 8).expect("inside");
        word.load(Ordering::Acquire)
    }

    fn is_whole(&self, at: usize, of: usize) -> bool {
        let bytes = DATA_BYTES / of;
        read(&self.region, at * bytes, bytes) == self.bytes[at * bytes..][..bytes]
    }

    fn clear(&self) {
        let bytes = vec![0; self.region.memory().len()];
        self.region.memory().copy_from(0, &bytes).expect("it fits");
    }
}

fn call(transfers: Vec<SignalledPut>, mode: SignalMode, ordered_by: OrderedBy) -> PutWithSignal {
    PutWithSignal { transfers, mode, ordered_by, counter: COUNTER, group: 1, deadline: LONG }
}

fn modes() -> [SignalMode; 4] {
    let size = NonZeroUsize::new(3).expect("not zero");
    let group = |group| SignalMode::Decoupled { group };
    [
        SignalMode::Coupled,
        group(SignalGroup::Size(size)),
        SignalMode::default(),
        group(SignalGroup::All),
    ]
}

/// Of the domain that is tested.
fn orders_by_itself(fabric: &Fabric) -> bool {
    match fabric.domain() {
        Some(domain) => domain.traits().signals(OrderedBy::Nic).is_ok(),
        // The simulated one.
        None => false,
    }
}

const TRANSFERS: usize = 8;

/// Whoever sees a word sees the data, with no look at anything else.
fn check_order(fabric: &Fabric, mode: SignalMode, ordered_by: OrderedBy, value: u64) {
    let targets = [target(fabric, &fabric.b), target(fabric, &fabric.a)];
    let of_both = (0..2 * TRANSFERS).map(|at| (at % 2, at / 2));
    let transfers = of_both.map(|(to, at)| targets[to].transfer(at, TRANSFERS, value)).collect();
    let (done, outcomes) = fabric.a.put_with_signal(call(transfers, mode, ordered_by));
    let mut seen = 0u32;
    fabric.until("every signal", || {
        for (to, target) in targets.iter().enumerate() {
            for at in 0..TRANSFERS {
                let bit = 1 << (to * TRANSFERS + at);
                if seen & bit == 0 && target.word(at) != 0 {
                    seen |= bit;
                    assert_eq!(target.word(at), value, "stored at once");
                    assert!(target.is_whole(at, TRANSFERS), "{mode:?}: seen before its data");
                }
            }
        }
        seen == (1 << (2 * TRANSFERS)) - 1
    });
    assert_eq!(fabric.outcome(&done), Ok(()));
    for transfer in 0..2 * TRANSFERS {
        assert_eq!(outcomes.get(transfer), Some(Ok(())));
        assert_eq!(outcomes.told(transfer), Some(Ok(())), "by its signal");
    }
}

pub(crate) fn a_signal_is_seen_only_behind_its_data(fabric: &Fabric) {
    for (value, mode) in (1..).zip(modes()) {
        check_order(fabric, mode, OrderedBy::Host, value << 32 | value);
    }
}

pub(crate) fn whoever_asks_for_the_cards_order_gets_it_or_is_told_of_the_counter(fabric: &Fabric) {
    if orders_by_itself(fabric) {
        for (value, mode) in (1..).zip(modes()) {
            check_order(fabric, mode, OrderedBy::Nic, value << 32 | value);
        }
        return;
    }
    let target = target(fabric, &fabric.b);
    let counted = fabric.b.expect(COUNTER, 2 * TRANSFERS as u64);
    let transfers = (0..TRANSFERS).map(|at| target.transfer(at, TRANSFERS, 7)).collect();
    let (done, outcomes) =
        fabric.a.put_with_signal(call(transfers, SignalMode::default(), OrderedBy::Nic));
    assert_eq!(fabric.outcome(&counted), Ok(()), "each put is one count");
    assert_eq!(fabric.outcome(&done), Ok(()));
    for at in 0..TRANSFERS {
        assert!(target.is_whole(at, TRANSFERS));
        assert_eq!(target.word(at), 0, "there is no signal");
        assert_eq!(outcomes.told(at), Some(Err(Fallback::NoFence)));
    }
}

/// Puts of many slices, of equal values again and again.
pub(crate) fn a_signal_is_behind_every_slice_of_its_data(fabric: &Fabric) {
    let target = target(fabric, &fabric.b);
    let ordered_by = if orders_by_itself(fabric) { OrderedBy::Nic } else { OrderedBy::Host };
    for round in 1..=20 {
        target.clear();
        let transfers = vec![target.transfer(0, 1, round)];
        let (done, _) =
            fabric.a.put_with_signal(call(transfers, SignalMode::default(), ordered_by));
        fabric.until("the signal", || target.word(0) == round);
        assert!(target.is_whole(0, 1), "round {round}");
        assert_eq!(fabric.outcome(&done), Ok(()));
    }
}

pub(crate) fn a_transfer_of_which_a_put_is_refused_has_no_signal(fabric: &Fabric) {
    let target = target(fabric, &fabric.b);
    let refused = WriteError::Refused(Refusal::OutOfBounds);
    for (round, ordered_by) in (1..).zip([OrderedBy::Host, OrderedBy::Nic]) {
        if ordered_by == OrderedBy::Nic && !orders_by_itself(fabric) {
            continue;
        }
        target.clear();
        let mut transfers: Vec<_> = (0..3).map(|at| target.transfer(at, 3, round)).collect();
        transfers[1].puts[1].target_offset = WORDS_AT as u64 + 4000;
        let (done, outcomes) =
            fabric.a.put_with_signal(call(transfers, SignalMode::default(), ordered_by));
        assert_eq!(fabric.outcome(&done), Err(refused));
        let all: Vec<_> = (0..3).map(|at| outcomes.get(at).expect("definite")).collect();
        assert_eq!(all, [Ok(()), Err(refused), Ok(())], "{ordered_by:?}");
        fabric.pass(Duration::from_millis(2));
        assert_eq!((0..3).map(|at| target.word(at)).collect::<Vec<_>>(), [round, 0, round]);
        assert!(target.is_whole(0, 3) && target.is_whole(2, 3));
        assert_eq!(outcomes.failed().collect::<Vec<_>>(), [(1, refused)]);
    }
}

pub(crate) fn a_signal_that_may_not_be_stored_is_refused(fabric: &Fabric) {
    let target = target(fabric, &fabric.b);
    let (revoked, revoked_descriptor) = fabric.b.region(4096);
    assert_eq!(fabric.outcome(&fabric.b.revoke(&revoked)), Ok(()));
    let mut transfers: Vec<_> = (0..3).map(|at| target.transfer(at, 3, 5)).collect();
    transfers[0].signal.offset = target.region.memory().len().next_multiple_of(8) as u64;
    transfers[1].signal.target = revoked_descriptor;
    transfers[1].signal.offset = 0;
    let (done, outcomes) =
        fabric.a.put_with_signal(call(transfers, SignalMode::Coupled, OrderedBy::Host));
    assert!(fabric.outcome(&done).is_err());
    let refused = |refusal| Some(Err(WriteError::Refused(refusal)));
    assert_eq!(outcomes.get(0), refused(Refusal::OutOfBounds));
    assert_eq!(outcomes.get(1), refused(Refusal::Revoked));
    assert_eq!(outcomes.get(2), Some(Ok(())), "its neighbour is unharmed");
    assert_eq!((target.word(0), target.word(1), target.word(2)), (0, 0, 5));
    assert!(fabric.refused_and_corrupt().0 >= 2, "refusals are counted");
}

pub(crate) fn a_batch_of_which_a_peer_is_lost_goes_on_with_the_others(fabric: &Fabric) {
    let gone = fabric.node();
    let (target, lost) = (target(fabric, &fabric.b), target(fabric, &gone));
    fabric.kill(&gone);
    let transfers = vec![lost.transfer(0, 2, 3), target.transfer(0, 2, 3)];
    let (done, outcomes) =
        fabric.a.put_with_signal(call(transfers, SignalMode::default(), OrderedBy::Host));
    assert_eq!(fabric.outcome(&done), Err(WriteError::PeerGone));
    assert_eq!(outcomes.get(0), Some(Err(WriteError::PeerGone)));
    assert_eq!((outcomes.get(1), target.word(0)), (Some(Ok(())), 3));
}

pub(crate) fn a_drained_batch_signals_nothing_afterwards(fabric: &Fabric) {
    let target = target(fabric, &fabric.b);
    // 100 ms of bytes at the throttle's rate.
    let transfers = (0..TRANSFERS).map(|at| target.transfer(at, TRANSFERS, 9)).collect();
    let (done, outcomes) =
        fabric.a.put_with_signal(call(transfers, SignalMode::Coupled, OrderedBy::Host));
    fabric.until("the first signal", || target.word(0) == 9);
    assert_eq!(fabric.outcome(&fabric.a.drain_group(1)), Ok(()));
    let words: Vec<_> = (0..TRANSFERS).map(|at| target.word(at)).collect();
    assert_eq!(fabric.outcome(&done), Err(WriteError::Cancelled));
    target.clear();
    fabric.pass(Duration::from_millis(20));
    assert_eq!((0..TRANSFERS).map(|at| target.word(at)).max(), Some(0), "nothing came later");
    for (at, word) in words.iter().enumerate() {
        let outcome = outcomes.get(at).expect("definite");
        assert!(outcome != Ok(()) || *word == 9, "transfer {at}: {outcome:?}");
    }
    assert_eq!(outcomes.get(TRANSFERS - 1), Some(Err(WriteError::Cancelled)));
}

pub(crate) fn a_batch_ends_by_its_deadline(fabric: &Fabric) {
    let target = target(fabric, &fabric.b);
    let transfers = (0..2).map(|at| target.transfer(at, 2, 9)).collect();
    let deadline = Duration::from_millis(30);
    let call = call(transfers, SignalMode::default(), OrderedBy::Host);
    let (done, outcomes) = fabric.a.put_with_signal(PutWithSignal { deadline, ..call });
    let late = Err(WriteError::DeadlineExceeded);
    assert_eq!(fabric.outcome(&done), late);
    assert_eq!((outcomes.get(0), outcomes.get(1)), (Some(late), Some(late)));
    fabric.pass(Duration::from_millis(200));
    assert_eq!((target.word(0), target.word(1)), (0, 0), "the puts were not even all issued");
}

pub(crate) fn what_cannot_be_put_with_a_signal_is_not_accepted(fabric: &Fabric) {
    let target = target(fabric, &fabric.b);
    let refused = |change: fn(&mut SignalledPut)| {
        let mut transfer = target.transfer(0, 1, 1);
        change(&mut transfer);
        let call = call(vec![transfer], SignalMode::default(), OrderedBy::Host);
        let refused = fabric.a.try_put_with_signal(call, Completion::Ignore);
        assert!(matches!(refused, Err(SubmitError::Invalid(_))), "{refused:?}");
    };
    refused(|of| of.signal.offset += 4);
    refused(|of| of.signal.offset = u64::MAX - 7);
    refused(|of| of.puts.clear());
    refused(|of| of.puts[0].target_offset = u64::MAX);
    refused(|of| of.puts = vec![of.puts[0].clone(); 1025]);
    let many = (0..40).map(|_| target.transfer(0, 1, 1)).collect();
    let many = call(many, SignalMode::default(), OrderedBy::Host);
    let refused = fabric.a.try_put_with_signal(many, Completion::Ignore);
    assert!(matches!(refused, Err(SubmitError::Invalid(_))), "more than there may be at once");
    let none = call(Vec::new(), SignalMode::default(), OrderedBy::Host);
    let (done, outcomes) = fabric.a.put_with_signal(none);
    assert_eq!((fabric.outcome(&done), outcomes.len()), (Ok(()), 0), "nothing to do is done");
}

pub(crate) fn a_count_that_is_reached_is_mirrored(fabric: &Fabric) {
    let target = target(fabric, &fabric.b);
    let mirror = |offset| Mirror { memory: target.region.memory().clone().into(), offset };
    let word = |at: usize| target.word(at);
    let reached = fabric.b.expect_mirrored(70, 3, mirror(WORDS_AT)).expect("accepted");
    let never = fabric.b.expect_mirrored(71, 1, mirror(WORDS_AT + 8)).expect("accepted");
    for _ in 0..2 {
        let write = crate::fabric::whole(target.peer, &target.source, target.descriptor, 70);
        assert_eq!(fabric.outcome(&fabric.a.write(write)), Ok(()));
    }
    fabric.pass(Duration::from_millis(2));
    assert_eq!(word(0), 0, "two of three: counts on the way may be taken back");
    let write = crate::fabric::whole(target.peer, &target.source, target.descriptor, 70);
    fabric.a.write(write);
    fabric.until("the count", || word(0) != 0);
    assert_eq!(word(0), 3);
    assert!(target.is_whole(0, 1), "its bytes are there");
    assert_eq!(fabric.outcome(&reached), Ok(()));
    assert_eq!(fabric.outcome(&fabric.b.cancel_imm(71)), Ok(()));
    assert_eq!((never.get(), word(1)), (Some(Err(WriteError::Cancelled)), 0));
    for offset in [WORDS_AT + 4, WORDS_AT + 4096] {
        let refused = fabric.b.expect_mirrored(72, 1, mirror(offset));
        assert!(matches!(refused, Err(SubmitError::Invalid(_))), "{offset}");
    }
}

/// They take turns on the same connections.
pub(crate) fn puts_and_other_writes_do_not_hold_up_each_other(fabric: &Fabric) {
    let target = target(fabric, &fabric.b);
    let (other, descriptor) = fabric.b.region(DATA_BYTES);
    let reached = fabric.b.expect(3, 50);
    for round in 1..=50 {
        let transfers = vec![target.transfer(0, 1, round)];
        let call = call(transfers, SignalMode::Coupled, OrderedBy::Host);
        let (done, _) = fabric.a.put_with_signal(call);
        fabric.a.write(crate::fabric::whole(target.peer, &target.source, descriptor, 3));
        assert_eq!(fabric.outcome(&done), Ok(()));
        assert_eq!(target.word(0), round);
    }
    assert_eq!(fabric.outcome(&reached), Ok(()));
    assert!(read(&other, 0, DATA_BYTES) == target.bytes);
}
