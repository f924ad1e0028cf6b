//! Doorbells: nobody sleeps through work, nobody rings a waking sleeper, and nothing that the holder of
//! one end does makes the holder of the other one wait.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use kvasir_transfer::doorbell::{Bell, Ringer, announce_sleep, awake, pair, sleep};
use rustix::fs::OFlags;
use rustix::net::{RecvFlags, SendFlags, Shutdown};

const LONG: Duration = Duration::from_secs(20);

fn rings(bell: &Bell) -> bool {
    sleep(&[bell.as_fd()], Duration::ZERO) == 1
}

#[test]
fn a_bell_rings_for_a_sleeper_only_and_stops_when_cleared() {
    let (bell, ringer) = pair().expect("descriptors");
    let sleeping = AtomicU32::new(0);
    ringer.ring_if(&sleeping);
    assert!(!rings(&bell));
    announce_sleep(&sleeping);
    ringer.ring_if(&sleeping);
    ringer.ring_if(&sleeping);
    assert!(rings(&bell));
    bell.clear();
    assert!(!rings(&bell));
    awake(&sleeping);
    ringer.ring_if(&sleeping);
    assert!(!rings(&bell));
}

#[test]
fn a_sleeper_without_work_sleeps_until_the_timeout_and_wakes_for_one_bell_of_several() {
    let ((bell, ringer), (other, _ringer)) = (pair().expect("fds"), pair().expect("fds"));
    let began = Instant::now();
    assert_eq!(sleep(&[other.as_fd(), bell.as_fd()], Duration::from_millis(20)), 0);
    assert!(began.elapsed() >= Duration::from_millis(20));
    ringer.ring();
    assert_eq!(sleep(&[other.as_fd(), bell.as_fd()], LONG), 0b10);
}

#[test]
fn no_work_is_slept_through() {
    let (bell, ringer) = pair().expect("descriptors");
    let shared = Arc::new((AtomicU64::new(0), AtomicU64::new(0), AtomicU32::new(0)));
    let stop = Arc::new(AtomicBool::new(false));
    let worker = {
        let (shared, stop) = (Arc::clone(&shared), Arc::clone(&stop));
        std::thread::spawn(move || {
            let (word, answer, sleeping) = &*shared;
            while !stop.load(Ordering::Acquire) {
                let seen = answer.load(Ordering::Relaxed);
                announce_sleep(sleeping);
                if word.load(Ordering::Acquire) == seen {
                    // A doorbell that can be missed makes this wait its full length.
                    sleep(&[bell.as_fd()], LONG);
                }
                bell.clear();
                awake(sleeping);
                answer.store(word.load(Ordering::Acquire), Ordering::Release);
            }
        })
    };
    let (word, answer, sleeping) = &*shared;
    let began = Instant::now();
    let rounds = 20_000u64;
    for round in 1..=rounds {
        word.store(round, Ordering::Release);
        ringer.ring_if(sleeping);
        while answer.load(Ordering::Acquire) < round {
            assert!(began.elapsed() < LONG, "slept through round {round}");
            std::hint::spin_loop();
        }
    }
    stop.store(true, Ordering::Release);
    word.store(rounds + 1, Ordering::Release);
    ringer.ring_if(sleeping);
    worker.join().expect("the sleeper");
}

/// Runs `calls` and fails when it does not come back.
fn does_not_wait(what: &str, calls: impl FnOnce() + Send + 'static) {
    let (tell, told) = sync_channel(1);
    std::thread::spawn(move || {
        calls();
        tell.send(()).expect("the test waits");
    });
    assert!(told.recv_timeout(LONG).is_ok(), "{what} waits");
}

/// What a hostile process can do to its own end, which it got as a descriptor of its own.
fn let_calls_wait(fd: &OwnedFd) {
    let flags = rustix::fs::fcntl_getfl(fd).expect("flags");
    rustix::fs::fcntl_setfl(fd, flags - OFlags::NONBLOCK).expect("flags");
}

fn fill(fd: &OwnedFd) {
    rustix::net::sockopt::set_socket_send_buffer_size(fd, 1 << 30).expect("set");
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    while rustix::net::send(fd, &[0; 4096], flags).is_ok() {}
    while rustix::net::send(fd, &[0; 1], flags).is_ok() {}
}

#[test]
fn whoever_holds_the_ringer_cannot_make_the_sleeper_wait() {
    let (bell, ringer) = pair().expect("descriptors");
    let theirs = ringer.as_fd().try_clone_to_owned().expect("a descriptor");
    drop(ringer);
    let_calls_wait(&theirs);
    let ours = rustix::fs::fcntl_getfl(bell.as_fd()).expect("flags");
    assert!(ours.contains(OFlags::NONBLOCK), "the flags of one end are not those of the other");
    // Even a bell whose own flags were changed (this process handed it on) does not wait.
    rustix::fs::fcntl_setfl(bell.as_fd(), ours - OFlags::NONBLOCK).expect("flags");
    fill(&theirs);
    assert!(rings(&bell));
    let bell = Arc::new(bell);
    let own = Arc::clone(&bell);
    does_not_wait("the sleeper", move || {
        // A flood costs the sleeper some turns, and then it sleeps again.
        for _ in 0..10_000 {
            own.clear();
        }
    });
    assert!(!rings(&bell));
    rustix::net::shutdown(&theirs, Shutdown::Both).expect("shut down");
    assert!(!rings(&bell), "an end that was shut down does not keep the sleeper awake");
    drop(theirs);
    assert!(!rings(&bell), "nor does one that was closed");
    does_not_wait("the sleeper", move || bell.clear());
}

#[test]
fn whoever_holds_the_bell_cannot_make_the_ringer_wait() {
    let (bell, ringer) = pair().expect("descriptors");
    let theirs = bell.as_fd().try_clone_to_owned().expect("a descriptor");
    drop(bell);
    let_calls_wait(&theirs);
    let ours = rustix::fs::fcntl_getfl(ringer.as_fd()).expect("flags");
    rustix::fs::fcntl_setfl(ringer.as_fd(), ours - OFlags::NONBLOCK).expect("flags");
    let ringer = Arc::new(ringer);
    let ring_often = |ringer: &Arc<Ringer>| {
        let ringer = Arc::clone(ringer);
        does_not_wait("the ringer", move || (0..100_000).for_each(|_| ringer.ring()));
    };
    // Nobody takes the rings.
    ring_often(&ringer);
    fill(&theirs);
    ring_often(&ringer);
    let mut ring = [0; 8];
    let taken = rustix::net::recv(&theirs, &mut ring, RecvFlags::DONTWAIT);
    assert!(taken.is_ok_and(|(_, bytes)| bytes == 1), "the first of them is there");
    rustix::net::shutdown(&theirs, Shutdown::Both).expect("shut down");
    ring_often(&ringer);
    drop(theirs);
    ring_often(&ringer);
}
