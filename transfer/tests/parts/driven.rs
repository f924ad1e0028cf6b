//! Engines without threads of their own: nothing happens but in turns, whoever sleeps is woken, and both handles
//! end them.

use std::time::Duration;

use kvasir_transfer::{
    Completion, Domain, Driver, Expect, Handlers, SubmitError, TransferConfig, TransferEngine,
    WriteError, doorbell,
};

use crate::engine::tcp_config;

const LONG: Duration = Duration::from_secs(30);

fn driven(config: TransferConfig) -> (TransferEngine, Driver) {
    let registry = prometheus::Registry::new();
    TransferEngine::start_driven(config, Handlers::default(), &registry).expect("started")
}

/// Takes turns until it is so, and sleeps whenever there is nothing to do. Whoever is not woken is late.
fn until(driver: &mut Driver, done: impl Fn() -> bool) {
    loop {
        while driver.turn() {}
        if done() {
            return;
        }
        driver.announce_sleep();
        let patience = driver.patience().unwrap_or(LONG);
        doorbell::sleep(&[driver.wake_fd().expect("it runs")], patience);
        driver.awake();
    }
}

#[test]
fn what_was_submitted_leaves_in_a_turn_and_wakes_who_has_announced_sleep() {
    let (sender, mut of_sender) = driven(tcp_config());
    let (receiver, mut of_receiver) = driven(tcp_config());
    until(&mut of_sender, || true);
    let peer = sender.connect(&receiver.endpoint()).expect("reachable");
    let (done, flag) = Completion::flag();
    of_sender.announce_sleep();
    sender.send(peer, b"hello".to_vec(), LONG, done).expect("accepted");
    assert_eq!(of_sender.patience(), Some(Duration::ZERO), "there is something to do");
    assert_ne!(doorbell::sleep(&[of_sender.wake_fd().expect("it runs")], LONG), 0);
    of_sender.awake();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(flag.get(), None, "nobody has taken a turn");
    // Two who sleep wake each other.
    let stop = Completion::flag();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            until(&mut of_receiver, || stop.1.get().is_some());
        });
        until(&mut of_sender, || flag.get().is_some());
        stop.0.complete(Ok(()));
        // What wakes it.
        receiver.cancel_imm(1, Completion::Ignore).expect("accepted");
    });
    assert_eq!(flag.get(), Some(Ok(())));
}

#[test]
fn a_deadline_bounds_the_sleep() {
    let (engine, mut driver) = driven(tcp_config());
    let (done, flag) = Completion::flag();
    let deadline = Some(Duration::from_millis(50));
    engine.expect_imm(Expect { imm: 1, count: 1, deadline }, done).expect("accepted");
    while driver.turn() {}
    driver.announce_sleep();
    let patience = driver.patience().expect("bounded");
    assert!(!patience.is_zero() && patience <= Duration::from_millis(50), "{patience:?}");
    driver.awake();
    until(&mut driver, || flag.get().is_some());
    assert_eq!(flag.get(), Some(Err(WriteError::DeadlineExceeded)));
}

#[test]
fn the_engine_ends_with_its_handle_in_the_next_turn() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let config = TransferConfig {
        preferred: Domain::Shm,
        run_dir: Some(run_dir.path().to_owned()),
        ..TransferConfig::default()
    };
    let (engine, mut driver) = driven(config);
    let (done, under_way) = Completion::flag();
    engine.expect_imm(Expect { imm: 1, count: 1, deadline: None }, done).expect("accepted");
    let (ended, has_ended) = Completion::flag();
    engine.when_ended(ended);
    driver.announce_sleep();
    drop(engine);
    assert_eq!(driver.patience(), Some(Duration::ZERO), "the end is something to do");
    driver.awake();
    assert!(driver.turn());
    assert_eq!(under_way.get(), Some(Err(WriteError::Cancelled)));
    assert_eq!(has_ended.get(), Some(Ok(())));
    assert!(driver.wake_fd().is_none() && !driver.turn(), "once");
    assert_eq!(std::fs::read_dir(run_dir.path()).expect("there").count(), 0, "its socket is gone");
}

#[test]
fn the_engine_ends_with_its_driver() {
    let (engine, driver) = driven(tcp_config());
    let (done, under_way) = Completion::flag();
    engine.expect_imm(Expect { imm: 1, count: 1, deadline: None }, done).expect("accepted");
    drop(driver);
    assert_eq!(under_way.get(), Some(Err(WriteError::Cancelled)));
    let refused = engine.cancel_imm(1, Completion::Ignore);
    assert_eq!(refused, Err(SubmitError::Stopped));
}

#[test]
fn a_callback_that_panics_ends_the_engine_with_its_driver() {
    let (engine, mut driver) = driven(tcp_config());
    let (ended, has_ended) = Completion::flag();
    engine.when_ended(ended);
    let panics = Completion::callback(|_| panic!("on purpose"));
    engine.cancel_imm(1, panics).expect("accepted");
    let turned = std::thread::spawn(move || while driver.turn() {}).join();
    assert!(turned.is_err());
    assert_eq!(has_ended.get(), Some(Err(WriteError::Cancelled)));
    assert_eq!(engine.cancel_imm(1, Completion::Ignore), Err(SubmitError::Stopped));
}
