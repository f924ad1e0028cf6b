//! Writes, counts, refusals, messages and bounds, while nothing fails.

use std::sync::Arc;
use std::time::Duration;

use kvasir_transfer::{
    PageSide, Refusal, RegionDesc, Source, SubmitError, Write, WriteError, WritePaged, checksum,
};

use crate::fabric::{Fabric, LONG, fill, pattern, read, whole};

pub(crate) fn a_write_lands_and_is_counted(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(10_000);
    let (target, descriptor) = b.region(20_000);
    let bytes = fill(&source, 1);
    let reached = b.expect(5, 2);
    let peer = a.connect(b);
    let source_part = Source::Region { handle: source.clone(), offset: 100, bytes: 300 };
    let write =
        Write { target_offset: 777, source: source_part, ..whole(peer, &source, descriptor, 5) };
    let first = a.write(write.clone());
    assert_eq!(fabric.outcome(&first), Ok(()));
    assert_eq!(reached.get(), None, "one of two");
    assert_eq!(read(&target, 777, 300), bytes[100..400]);
    let inline = Write { source: Source::Inline(vec![9; 50]), target_offset: 0, ..write };
    a.write(inline);
    assert_eq!(fabric.outcome(&reached), Ok(()));
    assert_eq!(read(&target, 0, 51), [[9; 50].as_slice(), &[0]].concat());
}

pub(crate) fn a_count_is_reached_only_after_the_last_byte(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(1 << 20);
    let (target, descriptor) = b.region(1 << 20);
    let peer = a.connect(b);
    for round in 0..30u32 {
        let bytes = fill(&source, round as u8);
        let reached = b.expect(round, 1);
        let written = a.write(whole(peer, &source, descriptor, round));
        assert_eq!(fabric.outcome(&reached), Ok(()));
        assert!(read(&target, 0, 1 << 20) == bytes, "every byte is there when the count is");
        assert_eq!(fabric.outcome(&written), Ok(()));
    }
}

fn paged(fabric: &Fabric, indices: [Vec<u32>; 2], page_bytes: usize) -> (WritePaged, Parts) {
    let (source, _) = fabric.a.region(64 << 10);
    let (target, descriptor) = fabric.b.region(64 << 10);
    let bytes = fill(&source, 3);
    let [source_indices, target_indices] = indices;
    let write = WritePaged {
        peer: fabric.a.connect(&fabric.b),
        source,
        source_pages: PageSide { offset: 16, stride: 1000, indices: source_indices },
        target: descriptor,
        target_pages: PageSide { offset: 40, stride: 900, indices: target_indices },
        page_bytes,
        imm: Some(8),
        checksums: Vec::new(),
        group: 0,
        deadline: LONG,
    };
    (write, Parts { bytes, target })
}

/// Pages of one region of `a` to one of `b`.
pub(crate) fn pages(fabric: &Fabric, indices: [Vec<u32>; 2], page_bytes: usize) -> WritePaged {
    paged(fabric, indices, page_bytes).0
}

struct Parts {
    bytes: Vec<u8>,
    target: kvasir_transfer::RegionHandle,
}

pub(crate) fn pages_land_where_each_side_says(fabric: &Fabric) {
    let indices = [vec![5, 0, 60, 7], vec![1, 70, 2, 0]];
    let (write, Parts { bytes, target }) = paged(fabric, indices.clone(), 800);
    let reached = fabric.b.expect(8, 4);
    let written = fabric.a.write_paged(write);
    assert_eq!(fabric.outcome(&reached), Ok(()), "each page is one count");
    assert_eq!(fabric.outcome(&written), Ok(()));
    let [from, to] = indices;
    for (from, to) in from.into_iter().zip(to) {
        let (from, to) = (16 + from as usize * 1000, 40 + to as usize * 900);
        assert_eq!(read(&target, to, 800), bytes[from..from + 800], "page at {from}");
    }
    assert_eq!(read(&target, 0, 40), [0; 40], "nothing before the first page");
    assert_eq!(read(&target, 840, 100), [0; 100], "nothing between pages");
}

pub(crate) fn a_page_may_be_sent_to_many_places_and_no_pages_are_done(fabric: &Fabric) {
    let (mut write, Parts { bytes, target }) = paged(fabric, [vec![9; 20], (0..20).collect()], 700);
    // Wherever the index points, it is the same page.
    write.source_pages.stride = 0;
    let reached = fabric.b.expect(8, 20);
    assert_eq!(fabric.outcome(&fabric.a.write_paged(write.clone())), Ok(()));
    assert_eq!(fabric.outcome(&reached), Ok(()));
    for page in 0..20 {
        assert_eq!(read(&target, 40 + page * 900, 700), bytes[16..716], "page {page}");
        assert_eq!(read(&target, 740 + page * 900, 200), [0; 200], "behind page {page}");
    }
    let none = PageSide { indices: Vec::new(), ..write.source_pages };
    let nothing = WritePaged { source_pages: none.clone(), target_pages: none, ..write };
    assert_eq!(fabric.outcome(&fabric.a.write_paged(nothing)), Ok(()));
}

pub(crate) fn a_page_that_may_not_be_written_is_refused(fabric: &Fabric) {
    // The last page of the target lies outside: its index is the target's own.
    let (write, Parts { target, .. }) = paged(fabric, [vec![1, 2], vec![0, 73]], 800);
    let refused = Err(WriteError::Refused(Refusal::OutOfBounds));
    assert_eq!(fabric.outcome(&fabric.a.write_paged(write.clone())), refused);
    assert_eq!(read(&target, 65_000, 536), [0; 536]);
    let mut overflows = write;
    overflows.target_pages = PageSide { offset: u64::MAX - 10, stride: 1, indices: vec![5, 11] };
    let refused = fabric.a.try_write_paged(overflows);
    assert!(matches!(refused, Err(SubmitError::Invalid(_))));
}

pub(crate) fn counts_before_and_after_the_expectation_are_alike(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(100);
    let (_target, descriptor) = b.region(100);
    let peer = a.connect(b);
    let early: Vec<_> = (0..3).map(|_| a.write(whole(peer, &source, descriptor, 6))).collect();
    for written in early {
        assert_eq!(fabric.outcome(&written), Ok(()));
    }
    let reached = b.expect(6, 4);
    let other = b.expect(7, 1);
    fabric.pass(Duration::from_millis(2));
    assert_eq!(reached.get(), None);
    a.write(whole(peer, &source, descriptor, 6));
    assert_eq!(fabric.outcome(&reached), Ok(()));
    assert_eq!(other.get(), None, "each immediate has its own count");
}

pub(crate) fn a_cancelled_immediate_never_completes(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(100);
    let (_target, descriptor) = b.region(100);
    let peer = a.connect(b);
    let reached = b.expect(6, 2);
    assert_eq!(fabric.outcome(&a.write(whole(peer, &source, descriptor, 6))), Ok(()));
    assert_eq!(fabric.outcome(&b.cancel_imm(6)), Ok(()));
    assert_eq!(reached.get(), Some(Err(WriteError::Cancelled)));
    assert_eq!(fabric.outcome(&a.write(whole(peer, &source, descriptor, 6))), Ok(()));
    fabric.pass(Duration::from_millis(2));
    assert_eq!(reached.get(), Some(Err(WriteError::Cancelled)));
    assert_eq!(fabric.outcome(&b.cancel_imm(6)), Ok(()));
    let anew = b.expect(6, 1);
    fabric.pass(Duration::from_millis(2));
    assert_eq!(anew.get(), None, "what was counted is forgotten");
}

pub(crate) fn an_expectation_ends_at_its_deadline(fabric: &Fabric) {
    let waiting = fabric.b.expect_within(6, 1, Some(Duration::from_millis(5)));
    assert_eq!(fabric.outcome(&waiting), Err(WriteError::DeadlineExceeded));
}

pub(crate) fn an_immediate_has_one_waiter(fabric: &Fabric) {
    let first = fabric.b.expect(6, 1);
    let second = fabric.b.expect(6, 1);
    let taken = Err(WriteError::Refused(Refusal::AlreadyExpected));
    assert_eq!(fabric.outcome(&second), taken);
    assert_eq!(first.get(), None);
}

pub(crate) fn a_long_write_is_one_count(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(4096 * 20 + 17);
    let (target, descriptor) = b.region(4096 * 21);
    let bytes = fill(&source, 2);
    let peer = a.connect(b);
    let reached = b.expect(6, 1);
    let written = a.write(whole(peer, &source, descriptor, 6));
    assert_eq!(fabric.outcome(&reached), Ok(()));
    assert!(read(&target, 0, bytes.len()) == bytes);
    assert_eq!(fabric.outcome(&written), Ok(()));
    assert_eq!(fabric.outcome(&b.cancel_imm(6)), Ok(()));
    let again = b.expect(6, 1);
    fabric.pass(Duration::from_millis(2));
    assert_eq!(again.get(), None, "its slices were not counted");
}

pub(crate) fn an_empty_write_is_counted(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(8);
    let (_target, descriptor) = b.region(8);
    let peer = a.connect(b);
    let reached = b.expect(6, 1);
    let nothing = Source::Inline(Vec::new());
    let written = a.write(Write { source: nothing, ..whole(peer, &source, descriptor, 6) });
    assert_eq!(fabric.outcome(&written), Ok(()));
    assert_eq!(fabric.outcome(&reached), Ok(()));
}

pub(crate) fn what_may_not_be_written_is_refused_and_counted(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(100);
    let (target, descriptor) = b.region(1000);
    fill(&source, 9);
    let (revoked, revoked_descriptor) = b.region(1000);
    assert_eq!(fabric.outcome(&b.revoke(&revoked)), Ok(()));
    let peer = a.connect(b);
    let reached = b.expect(6, 1);
    let valid = whole(peer, &source, descriptor, 6);
    let wrong_key = RegionDesc { key: descriptor.key ^ 1, ..descriptor };
    let stale = RegionDesc { incarnation: descriptor.incarnation ^ 1, ..descriptor };
    let lie = RegionDesc { length_bytes: u64::MAX, ..descriptor };
    let cases = [
        (descriptor, 901, Refusal::OutOfBounds),
        (lie, 1 << 40, Refusal::OutOfBounds),
        (lie, u64::MAX - 100, Refusal::OutOfBounds),
        (wrong_key, 0, Refusal::UnknownRegion),
        (stale, 0, Refusal::StaleIncarnation),
        (revoked_descriptor, 0, Refusal::Revoked),
    ];
    for (counted, (target, target_offset, refusal)) in cases.into_iter().enumerate() {
        let written = a.write(Write { target, target_offset, ..valid.clone() });
        assert_eq!(fabric.outcome(&written), Err(WriteError::Refused(refusal)));
        assert_eq!(fabric.refused_and_corrupt().0, counted as u64 + 1, "{refusal} is counted");
    }
    assert_eq!(reached.get(), None);
    assert_eq!(read(&target, 0, 1000), [0; 1000], "nothing landed");
    assert_eq!(fabric.outcome(&a.write(valid)), Ok(()), "the connection still works");
    assert_eq!(fabric.outcome(&reached), Ok(()));
}

pub(crate) fn nothing_lands_after_a_revocation(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(256 << 10);
    let (target, descriptor) = b.region(256 << 10);
    fill(&source, 1);
    let peer = a.connect(b);
    assert_eq!(fabric.outcome(&a.write(whole(peer, &source, descriptor, 6))), Ok(()));
    let written: Vec<_> = (0..200).map(|_| a.write(whole(peer, &source, descriptor, 6))).collect();
    assert_eq!(fabric.outcome(&b.revoke(&target)), Ok(()));
    target.memory().copy_from(0, &vec![0; 256 << 10]).expect("it fits");
    for written in written {
        let outcome = fabric.outcome(&written);
        let refused = Err(WriteError::Refused(Refusal::Revoked));
        assert!(outcome == Ok(()) || outcome == refused, "{outcome:?}");
    }
    assert!(read(&target, 0, 256 << 10).iter().all(|byte| *byte == 0), "not a byte");
}

/// The same bytes at the same place, and yet another region.
pub(crate) fn an_old_descriptor_of_memory_that_is_registered_again_is_refused(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(100);
    let (old, old_descriptor) = b.region(100);
    let peer = a.connect(b);
    fill(&source, 1);
    assert_eq!(fabric.outcome(&a.write(whole(peer, &source, old_descriptor, 6))), Ok(()));
    assert_eq!(fabric.outcome(&b.revoke(&old)), Ok(()));
    let (new, new_descriptor) = b.register(Arc::clone(old.memory()));
    assert_ne!(new_descriptor.key, old_descriptor.key);
    let bytes = fill(&source, 2);
    let written = a.write(whole(peer, &source, new_descriptor, 6));
    assert_eq!(fabric.outcome(&written), Ok(()));
    fill(&source, 3);
    let counted = fabric.refused_and_corrupt().0;
    let written = a.write(whole(peer, &source, old_descriptor, 6));
    assert_eq!(fabric.outcome(&written), Err(WriteError::Refused(Refusal::Revoked)));
    assert_eq!(fabric.refused_and_corrupt().0, counted + 1, "it is counted");
    assert_eq!(read(&new, 0, 100), bytes, "nothing landed by it");
}

pub(crate) fn a_region_registered_later_can_be_written(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(100);
    let peer = a.connect(b);
    for round in 0..20 {
        let bytes = fill(&source, round);
        let (target, descriptor) = b.region(100);
        let written = a.write(whole(peer, &source, descriptor, 6));
        assert_eq!(fabric.outcome(&written), Ok(()));
        assert_eq!(read(&target, 0, 100), bytes);
        if round % 2 == 0 {
            assert_eq!(fabric.outcome(&b.revoke(&target)), Ok(()));
        }
    }
}

pub(crate) fn messages_arrive_and_can_be_answered(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let peer = a.connect(b);
    let longest = pattern(1, 64 << 10);
    let mut sent: Vec<Vec<u8>> = (0..50u8).map(|at| vec![at; usize::from(at)]).collect();
    sent.push(longest);
    for message in &sent {
        let flag = a.send(peer, message).expect("accepted");
        assert_eq!(fabric.outcome(&flag), Ok(()));
    }
    fabric.until("all messages", || b.messages.lock().expect("messages").len() == sent.len());
    let received = b.messages.lock().expect("messages").clone();
    let mut bytes: Vec<Vec<u8>> = received.iter().map(|(_, message)| message.clone()).collect();
    bytes.sort();
    sent.sort();
    assert!(bytes == sent, "each once, in any order");
    let (back, _) = received[0];
    let flag = b.send(back, b"answer").expect("accepted");
    assert_eq!(fabric.outcome(&flag), Ok(()));
    fabric.until("the answer", || !a.messages.lock().expect("messages").is_empty());
    assert_eq!(a.messages.lock().expect("messages")[0].1, b"answer");
}

pub(crate) fn wrong_bytes_are_corrupt_and_not_counted(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(10_000);
    let (_target, descriptor) = b.region(10_000);
    let bytes = fill(&source, 1);
    let peer = a.connect(b);
    let reached = b.expect(6, 1);
    let right = checksum(&bytes);
    let write = |checksum| Write { checksum, ..whole(peer, &source, descriptor, 6) };
    let wrong = a.write(write(Some(right ^ 1)));
    assert_eq!(fabric.outcome(&wrong), Err(WriteError::Corrupt));
    assert_eq!(fabric.refused_and_corrupt().1, 1);
    fabric.pass(Duration::from_millis(2));
    assert_eq!(reached.get(), None);
    assert_eq!(fabric.outcome(&a.write(write(Some(right)))), Ok(()));
    assert_eq!(fabric.outcome(&reached), Ok(()));
}

pub(crate) fn a_long_write_with_wrong_bytes_is_corrupt(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(50_000);
    let (_target, descriptor) = b.region(50_000);
    let bytes = fill(&source, 1);
    let peer = a.connect(b);
    let reached = b.expect(6, 1);
    let right = checksum(&bytes);
    let write = |checksum| Write { checksum, ..whole(peer, &source, descriptor, 6) };
    assert_eq!(fabric.outcome(&a.write(write(Some(right ^ 1)))), Err(WriteError::Corrupt));
    fabric.pass(Duration::from_millis(2));
    assert_eq!(reached.get(), None);
    assert_eq!(fabric.outcome(&a.write(write(Some(right)))), Ok(()));
    assert_eq!(fabric.outcome(&reached), Ok(()));
}

pub(crate) fn a_corrupt_page_does_not_keep_the_others(fabric: &Fabric) {
    let indices: Vec<u32> = (0..10).collect();
    let (mut write, Parts { bytes, .. }) = paged(fabric, [indices.clone(), indices], 800);
    let page = |at: usize| &bytes[16 + at * 1000..16 + at * 1000 + 800];
    write.checksums = (0..10).map(|at| checksum(page(at))).collect();
    write.checksums[4] ^= 1;
    let reached = fabric.b.expect(8, 9);
    let written = fabric.a.write_paged(write);
    assert_eq!(fabric.outcome(&written), Err(WriteError::Corrupt));
    assert_eq!(fabric.outcome(&reached), Ok(()), "nine of ten");
}

pub(crate) fn a_full_queue_says_so_and_recovers(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(4 << 20);
    let (_target, descriptor) = b.region(4 << 20);
    let peer = a.connect(b);
    let mut accepted = Vec::new();
    // So many writes of this size cannot all end while they are submitted.
    let full = (0..10_000).any(|_| match a.try_write(whole(peer, &source, descriptor, 6)) {
        Ok(flag) => {
            accepted.push(flag);
            false
        }
        Err(error) => {
            assert_eq!(error, SubmitError::Full);
            true
        }
    });
    assert!(full, "the fifth at once is one too many");
    for flag in &accepted {
        assert_eq!(fabric.outcome(flag), Ok(()));
    }
    assert_eq!(fabric.outcome(&a.write(whole(peer, &source, descriptor, 6))), Ok(()));
    let reached = b.expect(6, accepted.len() as u64 + 1);
    assert_eq!(fabric.outcome(&reached), Ok(()), "exactly what was accepted");
}

pub(crate) fn no_more_expectations_wait_than_may(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let waiting: Vec<_> = (0..4).map(|imm| b.expect(imm, 1)).collect();
    assert!(matches!(b.try_expect(4, 1), Err(SubmitError::Full)), "the fifth at once");
    // One that is reached makes room, and so does one that is taken back.
    let (source, _) = a.region(100);
    let (_target, descriptor) = b.region(100);
    let peer = a.connect(b);
    assert_eq!(fabric.outcome(&a.write(whole(peer, &source, descriptor, 0))), Ok(()));
    assert_eq!(fabric.outcome(&waiting[0]), Ok(()));
    assert_eq!(fabric.outcome(&b.cancel_imm(1)), Ok(()));
    assert_eq!(fabric.outcome(&waiting[1]), Err(WriteError::Cancelled));
    let room = |imm| b.try_expect(imm, 1).is_ok();
    fabric.until("room for two", || room(4));
    fabric.until("room for another", || room(5));
    assert!(!room(6), "and for no more");
}

pub(crate) fn what_cannot_be_sent_is_not_accepted(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(100);
    let (_target, descriptor) = b.region(100);
    let peer = a.connect(b);
    let write = whole(peer, &source, descriptor, 6);
    let beyond = Source::Region { handle: source, offset: 50, bytes: 51 };
    let refused = a.try_write(Write { source: beyond, ..write });
    assert!(matches!(refused, Err(SubmitError::Invalid(_))));
    let (pages, _) = paged(fabric, [vec![0, 1], vec![0]], 800);
    assert!(matches!(a.try_write_paged(pages), Err(SubmitError::Invalid(_))));
    let (pages, _) = paged(fabric, [vec![64], vec![0]], 1800);
    assert!(matches!(a.try_write_paged(pages), Err(SubmitError::Invalid(_))));
    let too_long = a.send(peer, &vec![0; (64 << 10) + 1]);
    assert!(matches!(too_long, Err(SubmitError::Invalid(_))));
}
