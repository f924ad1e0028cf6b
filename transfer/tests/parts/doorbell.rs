//! Doorbells: nobody sleeps through work, and nobody rings a waking sleeper.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvasir_transfer::SharedMemory;
use kvasir_transfer::doorbell::Doorbell;
use kvasir_transfer::memory::Prefault;

fn pair() -> (Arc<SharedMemory>, Doorbell, Doorbell) {
    let memory = Arc::new(SharedMemory::create("bell", 4096, Prefault::No).expect("memory"));
    let sleeper = Doorbell::create(&memory, 8).expect("a doorbell");
    let event = sleeper.fd().try_clone_to_owned().expect("a descriptor");
    let ringer = Doorbell::from_fd(event, &memory, 8).expect("a doorbell");
    (memory, sleeper, ringer)
}

#[test]
fn a_sleeper_without_work_sleeps_until_the_timeout() {
    let (_memory, sleeper, ringer) = pair();
    // It was awake, so this leaves no trace.
    ringer.ring();
    let began = Instant::now();
    assert!(!sleeper.wait(Duration::from_millis(20), || false));
    assert!(began.elapsed() >= Duration::from_millis(20));
    assert!(sleeper.wait(Duration::from_secs(100), || true), "there was work after all");
}

#[test]
fn no_work_is_slept_through() {
    let (memory, sleeper, ringer) = pair();
    let stop = Arc::new(AtomicBool::new(false));
    let rounds = 20_000u64;
    let worker = {
        let (memory, stop) = (Arc::clone(&memory), Arc::clone(&stop));
        std::thread::spawn(move || {
            let word = memory.atomic_u64(64).expect("aligned");
            let answer = memory.atomic_u64(128).expect("aligned");
            while !stop.load(Ordering::Acquire) {
                let seen = answer.load(Ordering::Relaxed);
                let has_work = || word.load(Ordering::Acquire) > seen;
                // A doorbell that can be missed makes this wait its full length.
                sleeper.wait(Duration::from_secs(20), has_work);
                answer.store(word.load(Ordering::Acquire), Ordering::Release);
            }
        })
    };
    let word = memory.atomic_u64(64).expect("aligned");
    let answer = memory.atomic_u64(128).expect("aligned");
    let began = Instant::now();
    for round in 1..=rounds {
        word.store(round, Ordering::Release);
        ringer.ring();
        while answer.load(Ordering::Acquire) < round {
            assert!(began.elapsed() < Duration::from_secs(15), "slept through round {round}");
            std::hint::spin_loop();
        }
    }
    stop.store(true, Ordering::Release);
    word.store(rounds + 1, Ordering::Release);
    ringer.ring();
    worker.join().expect("the sleeper");
}

#[test]
fn a_flag_that_does_not_fit_is_an_error() {
    let (memory, ..) = pair();
    assert!(Doorbell::create(&memory, 4096).is_err());
    assert!(Doorbell::create(&memory, 2).is_err());
}
