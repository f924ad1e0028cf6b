//! What writes do: they land, then they count.

use kvasir_transfer_libfabric::completion::{Completion, Immediate, Operation, Token};
use kvasir_transfer_libfabric::endpoint::{Inject, Message, Read, Receive};
use kvasir_transfer_libfabric::error::PostError;

use crate::support::{SHM, Setting, Side, TCP, pair, pattern, post, until, write_of};

fn writes_with_an_immediate_have_landed_when_they_count(setting: Setting) {
    const BYTES: usize = 4096;
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (from, to) = (a.buffer(BYTES), b.buffer(BYTES * 64));
    let peer = a.peer(&b);
    from.pages.copy_in(0, &pattern(BYTES, 9)).expect("inside");
    for index in 0..64_u32 {
        let place = (u64::from(index) * BYTES as u64, Some(1000 + index), u64::from(index));
        let write = write_of(&peer, &from, BYTES, to.region.remote(), place);
        post(&mut a, &mut b, |a| a.post(&write));
    }
    let mut seen = 0;
    while seen < 64 {
        until(&mut a, &mut b, "another arrives", |_, b| b.told.len() > seen);
        for told in &b.told[seen..] {
            let Completion::Arrived { immediate: Immediate(immediate), .. } = told else {
                panic!("{told:?} is no arrival")
            };
            let offset = (immediate - 1000) as usize * BYTES;
            // Looked at right when it was told.
            assert_eq!(to.pages.copy_out(offset, BYTES), Ok(pattern(BYTES, 9)));
        }
        seen = b.told.len();
    }
    until(&mut a, &mut b, "all are complete", |a, _| (0..64).all(|token| a.is_done(token)));
    assert!((0..64).all(|index| b.arrivals(1000 + index) == 1), "each counts once");
    assert_eq!(a.queue.counts().outstanding, 0);
}

fn a_write_without_an_immediate_lands_and_does_not_count(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (from, to) = (a.buffer(100), b.buffer(100));
    from.pages.copy_in(0, &pattern(100, 1)).expect("inside");
    let write = write_of(&a.peer(&b), &from, 100, to.region.remote(), (0, None, 5));
    post(&mut a, &mut b, |a| a.post(&write));
    until(&mut a, &mut b, "it is complete", |a, _| a.is_done(5));
    // Complete means delivered: nothing is waited for here.
    assert_eq!(to.pages.copy_out(0, 100), Ok(pattern(100, 1)));
    assert_eq!(b.told, []);
    let done = Completion::Done { token: Token(5), operation: Operation::Write, bytes: 100 };
    assert_eq!(a.told, [done]);
}

fn a_write_is_not_complete_before_the_receiver_took_it(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (from, to) = (a.buffer(64), b.buffer(64));
    let peer = a.peer(&b);
    let write = |token| write_of(&peer, &from, 32, to.region.remote(), (0, None, token));
    // The first makes the connection, which wants both sides.
    post(&mut a, &mut b, |a| a.post(&write(0)));
    until(&mut a, &mut b, "it is complete", |a, _| a.is_done(0));
    let inject = |a: &Side, token| {
        let remote = to.region.remote().at(0, 8).expect("inside");
        let (peer, immediate, token) = (peer.clone(), None, Token(token));
        a.endpoint.inject(&Inject { peer, bytes: &[1; 8], remote, immediate, token })
    };
    for token in [1, 2] {
        post(&mut a, &mut b, |a| if token == 1 { a.post(&write(1)) } else { inject(a, 2) });
        // Only a poll of the receiver places it, and only the sender polls.
        for _ in 0..1000 {
            a.poll();
        }
        assert!(!a.is_done(token), "operation {token} is complete and not delivered");
        until(&mut a, &mut b, "it is complete", |a, _| a.is_done(token));
    }
}

fn an_empty_write_counts_and_writes_nothing(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (from, to) = (a.buffer(64), b.buffer(64));
    from.pages.copy_in(0, &[7; 64]).expect("inside");
    let write = write_of(&a.peer(&b), &from, 0, to.region.remote(), (0, Some(u32::MAX), 1));
    post(&mut a, &mut b, |a| a.post(&write));
    until(&mut a, &mut b, "it counts", |a, b| a.is_done(1) && b.arrivals(u32::MAX) == 1);
    let unsaid = write_of(&a.peer(&b), &from, 0, to.region.remote(), (0, None, 2));
    post(&mut a, &mut b, |a| a.post(&unsaid));
    until(&mut a, &mut b, "it is complete", |a, _| a.is_done(2));
    assert_eq!(to.pages.copy_out(0, 64), Ok(vec![0; 64]));
    assert_eq!(b.told.len(), 1);
}

fn an_injected_write_needs_its_bytes_only_until_it_is_posted(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let to = b.buffer(4096);
    let peer = a.peer(&b);
    let most = a.endpoint.inject_bytes_max().min(4096);
    assert!(most > 0, "{} injects", setting.provider);
    let remote = to.region.remote().at(0, most as u64).expect("inside");
    let mut bytes = pattern(most, 3);
    for immediate in [Some(Immediate(77)), None] {
        let token = Token(u64::from(immediate.is_some()));
        post(&mut a, &mut b, |a| {
            let (peer, bytes) = (peer.clone(), bytes.as_slice());
            a.endpoint.inject(&Inject { peer, bytes, remote, immediate, token })
        });
        bytes.fill(0);
        until(&mut a, &mut b, "it is complete", |a, _| a.is_done(token.0));
        if immediate.is_some() {
            until(&mut a, &mut b, "it counts", |_, b| b.arrivals(77) == 1);
            assert_eq!(to.pages.copy_out(0, most), Ok(pattern(most, 3)));
        }
        bytes = pattern(most, 4);
    }
    until(&mut a, &mut b, "the second lands", |_, _| {
        to.pages.copy_out(0, most) == Ok(pattern(most, 4))
    });
    let bytes = vec![0; a.endpoint.inject_bytes_max() + 1];
    let long = Inject { peer, bytes: &bytes, remote, immediate: None, token: Token(9) };
    let refused = PostError::TooLong { bytes: bytes.len(), bytes_max: bytes.len() - 1 };
    assert_eq!(a.endpoint.inject(&long), Err(refused));
}

fn a_large_write_lands_whole_at_an_odd_place(setting: Setting) {
    const BYTES: usize = (32 << 20) + 13;
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (from, to) = (a.buffer(BYTES), b.buffer(BYTES + 100));
    from.pages.copy_in(0, &pattern(BYTES, 5)).expect("inside");
    let write = write_of(&a.peer(&b), &from, BYTES, to.region.remote(), (51, Some(8), 8));
    post(&mut a, &mut b, |a| a.post(&write));
    until(&mut a, &mut b, "it counts", |a, b| b.arrivals(8) == 1 && a.is_done(8));
    let landed = to.pages.copy_out(0, BYTES + 100).expect("inside");
    assert!(landed[51..51 + BYTES] == pattern(BYTES, 5), "the bytes are those that were sent");
    assert!(landed[..51].iter().chain(&landed[51 + BYTES..]).all(|byte| *byte == 0));
}

fn a_read_brings_the_peers_bytes(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (to, from) = (a.buffer(70_000), b.buffer(70_000));
    from.pages.copy_in(0, &pattern(70_000, 6)).expect("inside");
    let read = Read {
        peer: a.peer(&b),
        local: to.region.span(0, 70_000).expect("inside"),
        remote: from.region.remote().at(0, 70_000).expect("inside"),
        token: Token(3),
    };
    post(&mut a, &mut b, |a| a.endpoint.read(&read));
    until(&mut a, &mut b, "it is complete", |a, _| a.is_done(3));
    assert_eq!(to.pages.copy_out(0, 70_000), Ok(pattern(70_000, 6)));
}

fn a_message_says_how_long_it_was(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (from, to) = (a.buffer(64), b.buffer(512));
    from.pages.copy_in(0, &pattern(64, 2)).expect("inside");
    let local = to.region.span(0, 512).expect("inside");
    b.endpoint.receive(&Receive { local, token: Token(21) }).expect("posted");
    let message = Message {
        peer: a.peer(&b),
        local: from.region.span(0, 40).expect("inside"),
        token: Token(20),
    };
    post(&mut a, &mut b, |a| a.endpoint.send(&message));
    until(&mut a, &mut b, "it is received", |a, b| a.is_done(20) && b.is_done(21));
    let received = Completion::Done { token: Token(21), operation: Operation::Receive, bytes: 40 };
    assert!(b.told.contains(&received), "{:?}", b.told);
    assert_eq!(to.pages.copy_out(0, 40), Ok(pattern(40, 2)));
}

over!(over_tcp, TCP,
    writes_with_an_immediate_have_landed_when_they_count
    a_write_without_an_immediate_lands_and_does_not_count
    a_write_is_not_complete_before_the_receiver_took_it
    an_empty_write_counts_and_writes_nothing
    an_injected_write_needs_its_bytes_only_until_it_is_posted
    a_large_write_lands_whole_at_an_odd_place
    a_read_brings_the_peers_bytes
    a_message_says_how_long_it_was
);
over!(over_shm, SHM,
    writes_with_an_immediate_have_landed_when_they_count
    a_write_without_an_immediate_lands_and_does_not_count
    a_write_is_not_complete_before_the_receiver_took_it
    an_empty_write_counts_and_writes_nothing
    an_injected_write_needs_its_bytes_only_until_it_is_posted
    a_large_write_lands_whole_at_an_odd_place
    a_read_brings_the_peers_bytes
    a_message_says_how_long_it_was
);
