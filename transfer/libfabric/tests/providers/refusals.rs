//! What must not land does not, and what cannot be done is said.

use std::time::Instant;

use kvasir_transfer_libfabric::address::{EndpointName, InsertError};
use kvasir_transfer_libfabric::completion::{Immediate, Token};
use kvasir_transfer_libfabric::endpoint::{Message, Read, Receive, Write};
use kvasir_transfer_libfabric::error::{Busy, PostError};
use kvasir_transfer_libfabric::queue::QueueOptions;
use kvasir_transfer_libfabric::region::{Access, RemoteKey, RemotePlace, RemoteRegion};

use crate::support::{
    Buffer, HANGS, SHM, Setting, Side, TCP, pair, pattern, post, settle, side, until, write_of,
};

/// The middle of three regions that lie side by side in memory is aimed at, and missed.
fn check_refused(
    setting: Setting,
    access: Access,
    aim: impl Fn(RemoteRegion) -> RemotePlace,
    bytes: usize,
) {
    const BYTES: usize = 4096;
    let Some((mut a, mut b)) = pair(setting) else { return };
    let from = a.buffer(BYTES);
    from.pages.copy_in(0, &[0xff; BYTES]).expect("inside");
    // One owner, three registrations.
    let Buffer { pages, region: _whole } = b.buffer_for(3 * BYTES, Access::SOURCE);
    let target = b.domain.register_range(pages.clone(), BYTES, BYTES, access).expect("registered");
    let write = Write {
        peer: a.peer(&b),
        local: from.region.span(0, bytes).expect("inside"),
        remote: aim(target.remote()),
        immediate: Some(Immediate(4)),
        token: Token(4),
    };
    post(&mut a, &mut b, |a| a.post(&write));
    if setting.tells_of_refusals {
        until(&mut a, &mut b, "the sender is told", |a, _| a.has_failed(4));
        assert!(!a.is_done(4), "{:?}", a.told);
    } else {
        settle(&mut a, &mut b);
    }
    assert_eq!(b.arrivals(4), 0);
    assert_eq!(pages.copy_out(0, 3 * BYTES), Ok(vec![0; 3 * BYTES]), "no byte changed");
}

fn a_write_beyond_its_region_is_refused_and_neighbours_are_unharmed(setting: Setting) {
    let beyond =
        |region: RemoteRegion| RemotePlace { address: region.base + 4000, key: region.key };
    check_refused(setting, Access::TARGET, beyond, 200);
    let before = |region: RemoteRegion| RemotePlace {
        address: region.base.wrapping_sub(8),
        key: region.key,
    };
    check_refused(setting, Access::TARGET, before, 16);
}

fn a_write_with_a_wrong_key_is_refused(setting: Setting) {
    let wrong = |region: RemoteRegion| RemotePlace {
        address: region.base,
        key: RemoteKey(region.key.0 ^ 0x5555),
    };
    check_refused(setting, Access::TARGET, wrong, 100);
}

fn a_region_that_is_not_for_peers_is_not_written(setting: Setting) {
    let right = |region: RemoteRegion| RemotePlace { address: region.base, key: region.key };
    check_refused(setting, Access::SOURCE, right, 100);
}

fn after_a_refusal_other_writes_land(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (from, to) = (a.buffer(100), b.buffer(100));
    from.pages.copy_in(0, &pattern(100, 8)).expect("inside");
    let peer = a.peer(&b);
    let mut wrong = write_of(&peer, &from, 100, to.region.remote(), (0, Some(1), 1));
    wrong.remote.key = RemoteKey(wrong.remote.key.0 ^ 1);
    post(&mut a, &mut b, |a| a.post(&wrong));
    until(&mut a, &mut b, "it is refused", |a, _| a.has_failed(1));
    // The refusal broke the connection. What is posted before both ends know it fails too.
    let started = Instant::now();
    let mut token = 2;
    while !a.is_done(token) {
        assert!(started.elapsed() < HANGS, "none lands; told {:?}", a.told.last());
        token += 1;
        let place = (0, Some(2), token);
        let right = write_of(&peer, &from, 100, to.region.remote(), place);
        post(&mut a, &mut b, |a| a.post(&right));
        until(&mut a, &mut b, "it ends", |a, _| a.has_failed(token) || a.is_done(token));
    }
    until(&mut a, &mut b, "it counts", |a, b| b.arrivals(2) == 1 && a.is_done(token));
    assert_eq!(to.pages.copy_out(0, 100), Ok(pattern(100, 8)));
    assert_eq!(b.arrivals(1), 0);
}

fn operations_beyond_the_bound_are_busy_until_others_complete(setting: Setting) {
    let options = QueueOptions { operations_max: 4, ..QueueOptions::default() };
    let Some(mut a) = side(setting, options) else { return };
    let Some(mut b) = side(setting, QueueOptions::default()) else { return };
    let (to, from) = (a.buffer(64), b.buffer(64));
    let receive = |token| {
        let local = to.region.span(0, 64).expect("inside");
        a.endpoint.receive(&Receive { local, token: Token(token) })
    };
    for token in 0..4 {
        receive(token).expect("posted");
    }
    assert_eq!(receive(4), Err(PostError::Busy(Busy::Outstanding)));
    let counts = a.queue.counts();
    assert_eq!((counts.outstanding, counts.busy), (4, 1));
    let message = Message {
        peer: b.peer(&a),
        local: from.region.span(0, 8).expect("inside"),
        token: Token(9),
    };
    post(&mut b, &mut a, |b| b.endpoint.send(&message));
    until(&mut a, &mut b, "one is received", |a, _| a.queue.counts().outstanding == 3);
    let local = to.region.span(0, 64).expect("inside");
    a.endpoint.receive(&Receive { local, token: Token(5) }).expect("there is room again");
}

fn operations_that_write_here_need_a_region_for_it(setting: Setting) {
    let Some((a, b)) = pair(setting) else { return };
    let source = a.buffer_for(64, Access::SOURCE);
    let local = source.region.span(0, 64).expect("inside");
    let receive = Receive { local: local.clone(), token: Token(1) };
    assert_eq!(a.endpoint.receive(&receive), Err(PostError::Access));
    let remote = b.buffer(64).region.remote().at(0, 64).expect("inside");
    let read = Read { peer: a.peer(&b), local, remote, token: Token(2) };
    assert_eq!(a.endpoint.read(&read), Err(PostError::Access));
    assert!(source.region.span(1, 64).is_err());
    assert_eq!(a.queue.counts().outstanding, 0);
}

fn a_name_of_another_provider_is_no_peer(setting: Setting) {
    let Some(a) = side(setting, QueueOptions::default()) else { return };
    for name in [vec![], vec![1; 300]] {
        let bytes = name.len();
        let refused = a.peers.insert(&EndpointName(name));
        assert_eq!(refused.err(), Some(InsertError::NoName { bytes }));
    }
    if setting.source.is_some() {
        let refused = a.peers.insert(&EndpointName(b"fi_shm://1".to_vec()));
        assert_eq!(refused.err(), Some(InsertError::NoName { bytes: 10 }));
    }
    assert_eq!(a.peers.peers(), 0);
}

fn one_name_is_one_peer_and_goes_with_its_last_holder(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (first, second) = (a.peer(&b), a.peer(&b));
    assert_eq!(first, second);
    drop(first);
    assert_eq!(a.peers.peers(), 1);
    let (from, to) = (a.buffer(64), b.buffer(64));
    let write = write_of(&second, &from, 64, to.region.remote(), (0, Some(3), 3));
    drop(second);
    post(&mut a, &mut b, |a| a.post(&write));
    drop(write);
    // The operation holds its peer, until it is told that it is complete.
    assert_eq!(a.peers.peers(), a.queue.counts().outstanding);
    until(&mut a, &mut b, "it is complete", |a, b| a.is_done(3) && b.arrivals(3) == 1);
    assert_eq!(a.peers.peers(), 0);
    let again = a.peer(&b);
    let write = write_of(&again, &from, 64, to.region.remote(), (0, Some(4), 4));
    post(&mut a, &mut b, |a| a.post(&write));
    until(&mut a, &mut b, "it counts", |_, b| b.arrivals(4) == 1);
}

fn the_vector_takes_no_more_peers_than_it_was_opened_for(setting: Setting) {
    use kvasir_transfer_libfabric::address::AddressVector;
    let Some((a, b)) = pair(setting) else { return };
    let Some(c) = side(setting, QueueOptions::default()) else { return };
    let narrow = AddressVector::open(&a.domain, 1).expect("opened");
    let name = |side: &Side| side.endpoint.name().clone();
    let first = narrow.insert(&name(&b)).expect("room for one");
    assert_eq!(narrow.insert(&name(&c)).err(), Some(InsertError::Full { peers_max: 1 }));
    drop(first);
    assert!(narrow.insert(&name(&c)).is_ok());
}

over!(over_tcp, TCP,
    a_write_beyond_its_region_is_refused_and_neighbours_are_unharmed
    a_write_with_a_wrong_key_is_refused
    a_region_that_is_not_for_peers_is_not_written
    after_a_refusal_other_writes_land
    operations_beyond_the_bound_are_busy_until_others_complete
    operations_that_write_here_need_a_region_for_it
    a_name_of_another_provider_is_no_peer
    one_name_is_one_peer_and_goes_with_its_last_holder
    the_vector_takes_no_more_peers_than_it_was_opened_for
);
over!(over_shm, SHM,
    a_write_beyond_its_region_is_refused_and_neighbours_are_unharmed
    a_write_with_a_wrong_key_is_refused
    a_region_that_is_not_for_peers_is_not_written
    operations_beyond_the_bound_are_busy_until_others_complete
    operations_that_write_here_need_a_region_for_it
    a_name_of_another_provider_is_no_peer
    one_name_is_one_peer_and_goes_with_its_last_holder
    the_vector_takes_no_more_peers_than_it_was_opened_for
);
