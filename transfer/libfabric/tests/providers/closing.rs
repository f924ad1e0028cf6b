//! What ends, in whatever order, ends well: regions, peers, endpoints.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_transfer_libfabric::completion::Token;
use kvasir_transfer_libfabric::endpoint::{Endpoint, Placement, Receive};
use kvasir_transfer_libfabric::error::PostError;
use kvasir_transfer_libfabric::memory::{Memory, Pages};
use kvasir_transfer_libfabric::region::{Access, CloseError, Closed};

use crate::support::{SHM, Setting, Side, TCP, pair, pattern, post, settle, until, write_of};

/// Pages that say when they are freed.
struct Watched {
    pages: Pages,
    is_freed: Arc<AtomicBool>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.is_freed.store(true, Ordering::Relaxed);
    }
}

// SAFETY: that of the pages, which live as long.
unsafe impl Memory for Watched {
    fn as_ptr(&self) -> *mut u8 {
        self.pages.as_ptr()
    }

    fn bytes(&self) -> usize {
        self.pages.bytes()
    }
}

fn a_late_write_to_a_closed_region_is_refused(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (from, to) = (a.buffer(4096), b.buffer(4096));
    from.pages.copy_in(0, &pattern(4096, 1)).expect("inside");
    let remote = to.region.remote();
    let peer = a.peer(&b);
    let early = write_of(&peer, &from, 4096, remote, (0, Some(1), 1));
    post(&mut a, &mut b, |a| a.post(&early));
    until(&mut a, &mut b, "it counts", |a, b| b.arrivals(1) == 1 && a.is_done(1));
    // These providers' code places what arrives, so an endpoint that is open leaves a doubt.
    assert_eq!(b.endpoint.placement(), Placement::Software);
    assert_eq!(to.region.close().expect("closed"), Closed::WhenEndpointsClose);
    to.pages.copy_in(0, &[0; 4096]).expect("inside");
    let late = write_of(&peer, &from, 4096, remote, (0, Some(2), 2));
    post(&mut a, &mut b, |a| a.post(&late));
    if setting.tells_of_refusals {
        until(&mut a, &mut b, "it is refused", |a, _| a.has_failed(2));
    } else {
        settle(&mut a, &mut b);
    }
    assert_eq!(b.arrivals(2), 0);
    assert_eq!(to.pages.copy_out(0, 4096), Ok(vec![0; 4096]));
    // The next region of the same memory has another key.
    let again = b.domain.register(to.pages, Access::TARGET).expect("registered");
    assert_ne!(again.remote().key, remote.key);
}

fn memory_outlives_its_region_while_an_endpoint_could_place_into_it(setting: Setting) {
    let Some((_, b)) = pair(setting) else { return };
    let is_freed = Arc::new(AtomicBool::new(false));
    let watched = Watched { pages: Pages::new(100), is_freed: is_freed.clone() };
    let region = b.domain.register(Arc::new(watched), Access::TARGET).expect("registered");
    assert_eq!(region.close().expect("closed"), Closed::WhenEndpointsClose);
    assert_eq!(b.domain.memories_held(), 1);
    assert!(!is_freed.load(Ordering::Relaxed));
    let Side { domain, queue, peers, endpoint, .. } = b;
    drop(endpoint);
    assert!(is_freed.load(Ordering::Relaxed));
    assert_eq!(domain.memories_held(), 0);
    // With no endpoint there is no doubt.
    let region = domain.register(Arc::new(Pages::new(100)), Access::TARGET).expect("registered");
    assert_eq!(region.close().expect("closed"), Closed::Certain);
    drop((domain, queue, peers));
}

fn a_region_in_use_is_not_closed(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let buffer = a.buffer(512);
    let local = buffer.region.span(0, 512).expect("inside");
    a.endpoint.receive(&Receive { local, token: Token(1) }).expect("posted");
    let Err(CloseError::InUse(in_use)) = buffer.region.close() else {
        panic!("a receive waits for a message in it")
    };
    let from = b.buffer(8);
    let message = kvasir_transfer_libfabric::endpoint::Message {
        peer: b.peer(&a),
        local: from.region.span(0, 8).expect("inside"),
        token: Token(2),
    };
    post(&mut b, &mut a, |b| b.endpoint.send(&message));
    until(&mut a, &mut b, "it is received", |a, b| a.is_done(1) && b.is_done(2));
    assert!(in_use.0.close().is_ok());
}

fn an_endpoint_that_closes_lets_go_of_what_it_had_under_way(setting: Setting) {
    let Some((a, _b)) = pair(setting) else { return };
    let is_freed = Arc::new(AtomicBool::new(false));
    let watched = Watched { pages: Pages::new(4096), is_freed: is_freed.clone() };
    let region = a.domain.register(Arc::new(watched), Access::ALL).expect("registered");
    for token in 0..3 {
        let local = region.span(0, 64).expect("inside");
        a.endpoint.receive(&Receive { local, token: Token(token) }).expect("posted");
    }
    drop(region);
    assert_eq!(a.queue.counts().outstanding, 3);
    assert!(!is_freed.load(Ordering::Relaxed), "the receives hold it");
    let Side { queue, endpoint, .. } = a;
    drop(endpoint);
    assert!(is_freed.load(Ordering::Relaxed));
    assert_eq!(queue.counts().outstanding, 0);
    let mut told = Vec::new();
    queue.poll(&mut told, 16).expect("the queue works");
    assert_eq!(told, [], "nothing is told of them");
}

/// What was refused or has lost its peer may be told as an error when its endpoint is closed already, by which some
/// providers look up what the error is called.
fn a_queue_may_be_polled_when_its_only_endpoint_is_closed(setting: Setting) {
    for leave_after in 0..12 {
        let Some((mut a, mut b)) = pair(setting) else { return };
        let (from, to) = (a.buffer(256 << 10), b.buffer(256 << 10));
        let peer = a.peer(&b);
        let write = |token| write_of(&peer, &from, 256 << 10, to.region.remote(), (0, None, token));
        post(&mut a, &mut b, |a| a.post(&write(0)));
        until(&mut a, &mut b, "it is done", |a, _| a.is_done(0));
        for token in 1..8 {
            if a.post(&write(token)).is_err() {
                break;
            }
        }
        let Side { endpoint, .. } = b;
        drop(endpoint);
        let Side { mut told, queue, endpoint, .. } = a;
        // However much of it has been told by then.
        for _ in 0..leave_after {
            queue.poll(&mut told, 1).expect("the queue works");
        }
        drop(endpoint);
        while queue.poll(&mut told, 16).expect("the queue works") > 0 {}
        assert_eq!(queue.counts().outstanding, 0);
    }
}

fn everything_closes_in_whatever_order_it_is_dropped(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let (from, to) = (a.buffer(64), b.buffer(64));
    let peer = a.peer(&b);
    let write = write_of(&peer, &from, 64, to.region.remote(), (0, Some(1), 1));
    post(&mut a, &mut b, |a| a.post(&write));
    until(&mut a, &mut b, "it counts", |_, b| b.arrivals(1) == 1);
    let Side { domain, queue, peers, endpoint, .. } = a;
    // The worst order: what is held by others goes first.
    drop(domain);
    drop(queue);
    drop(peers);
    drop(endpoint);
    drop(from);
    drop(peer);
    drop(write);
    drop(to);
    drop(b);
}

/// Not over `shm`, which crashes within one process: see `processes.rs`.
fn closing_the_endpoint_of_one_peer_cuts_off_that_peer_only(setting: Setting) {
    let Some((mut a, mut b)) = pair(setting) else { return };
    let Some((mut c, _)) = pair(setting) else { return };
    let to = b.buffer(128);
    let own = Endpoint::open(&b.domain, &b.queue, &b.peers).expect("opened");
    let (from_a, from_c) = (a.buffer(64), c.buffer(64));
    from_a.pages.copy_in(0, &[1; 64]).expect("inside");
    from_c.pages.copy_in(0, &[2; 64]).expect("inside");
    let to_own = a.peers.insert(own.name()).expect("inserted");
    let to_shared = c.peer(&b);
    let of_a = |token| write_of(&to_own, &from_a, 64, to.region.remote(), (0, Some(1), token));
    let of_c = |token| write_of(&to_shared, &from_c, 64, to.region.remote(), (64, Some(2), token));
    post(&mut a, &mut b, |a| a.post(&of_a(1)));
    until(&mut a, &mut b, "it counts", |a, b| b.arrivals(1) == 1 && a.is_done(1));
    post(&mut c, &mut b, |c| c.post(&of_c(1)));
    until(&mut c, &mut b, "it counts", |c, b| b.arrivals(2) == 1 && c.is_done(1));

    drop(own);
    to.pages.copy_in(0, &[0; 128]).expect("inside");
    // It may be refused when it is posted or fail later.
    let is_posted = loop {
        match a.post(&of_a(2)) {
            Err(PostError::Busy(_)) => a.poll(),
            result => break result.is_ok(),
        }
    };
    until(&mut a, &mut b, "it fails", |a, _| !is_posted || a.has_failed(2));
    post(&mut c, &mut b, |c| c.post(&of_c(2)));
    until(&mut c, &mut b, "it counts", |c, b| b.arrivals(2) == 2 && c.is_done(2));
    assert_eq!(b.arrivals(1), 1);
    assert_eq!(to.pages.copy_out(0, 64), Ok(vec![0; 64]));
    assert_eq!(to.pages.copy_out(64, 64), Ok(vec![2; 64]));
}

over!(over_tcp, TCP,
    a_late_write_to_a_closed_region_is_refused
    memory_outlives_its_region_while_an_endpoint_could_place_into_it
    closing_the_endpoint_of_one_peer_cuts_off_that_peer_only
    a_region_in_use_is_not_closed
    an_endpoint_that_closes_lets_go_of_what_it_had_under_way
    a_queue_may_be_polled_when_its_only_endpoint_is_closed
    everything_closes_in_whatever_order_it_is_dropped
);
over!(over_shm, SHM,
    a_late_write_to_a_closed_region_is_refused
    memory_outlives_its_region_while_an_endpoint_could_place_into_it
    a_region_in_use_is_not_closed
    an_endpoint_that_closes_lets_go_of_what_it_had_under_way
    everything_closes_in_whatever_order_it_is_dropped
);
