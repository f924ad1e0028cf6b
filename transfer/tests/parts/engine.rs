//! An engine by itself: starting, stopping, choosing a domain, watching words, resting.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kvasir_transfer::doorbell::Ringer;
use kvasir_transfer::memory::{Access, Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, ConnectError, Domain, Endpoint, Expect, Handlers, PeerEvent, Raised, RegisterError,
    Source, StartError, SubmitError, TransferConfig, TransferEngine, Watch, WordMemory, Write,
    WriteError,
};

const LONG: Duration = Duration::from_secs(30);

pub(crate) fn tcp_config() -> TransferConfig {
    let tcp_listen = Some(([127, 0, 0, 1], 0).into());
    TransferConfig { preferred: Domain::Tcp, tcp_listen, ..TransferConfig::default() }
}

pub(crate) fn start(config: TransferConfig) -> (TransferEngine, prometheus::Registry) {
    let registry = prometheus::Registry::new();
    let engine = TransferEngine::start(config, Handlers::default(), &registry).expect("started");
    (engine, registry)
}

pub(crate) fn counter(registry: &prometheus::Registry, name: &str, labels: &[&str]) -> f64 {
    let families = registry.gather();
    let family = families.iter().find(|family| family.name() == name).expect("registered");
    let wanted = family.get_metric().iter().filter(|metric| {
        labels.iter().all(|wanted| metric.get_label().iter().any(|label| label.value() == *wanted))
    });
    wanted.map(|metric| metric.get_counter().get_value() + metric.get_gauge().get_value()).sum()
}

pub(crate) fn region(bytes: usize) -> Arc<SharedMemory> {
    Arc::new(SharedMemory::create("test", bytes, Prefault::No).expect("memory"))
}

#[test]
fn a_configuration_that_cannot_be_is_refused() {
    let start = |config| {
        let registry = prometheus::Registry::new();
        TransferEngine::start(config, Handlers::default(), &registry).map(|_| ()).unwrap_err()
    };
    assert!(matches!(start(TransferConfig::default()), StartError::NoDomain));
    let unspecified = Some(([0, 0, 0, 0], 0).into());
    let config = TransferConfig { tcp_listen: unspecified, ..tcp_config() };
    assert!(matches!(start(config), StartError::Advertise(_)));
    for config in [
        TransferConfig { operations_max: 0, ..tcp_config() },
        TransferConfig { slice_bytes: 100, ..tcp_config() },
        TransferConfig { slice_bytes_of: [(Domain::Tcp, 100)].into(), ..tcp_config() },
        TransferConfig { worker_core: Some(usize::MAX), ..tcp_config() },
        TransferConfig { message_bytes_max: 0, ..tcp_config() },
        TransferConfig { early_imms_max: 0, ..tcp_config() },
        TransferConfig { peer_timeout_ms: 0, ..tcp_config() },
        TransferConfig { connections_max: 0, ..tcp_config() },
        TransferConfig { connections_max: 3000, ..tcp_config() },
    ] {
        assert!(matches!(start(config), StartError::Config(_)));
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let tcp_listen = Some(taken.local_addr().expect("its address"));
    let error = start(TransferConfig { tcp_listen, ..tcp_config() });
    assert!(matches!(error, StartError::Listen { .. }), "{error}");
    let run_dir = Some("/nonexistent".into());
    let error = start(TransferConfig { run_dir, ..TransferConfig::default() });
    assert!(matches!(error, StartError::Listen { .. }), "{error}");
}

#[test]
fn an_advertised_address_is_what_peers_are_told() {
    let tcp_advertise = Some(([10, 1, 2, 3], 4567).into());
    let tcp_listen = Some(([0, 0, 0, 0], 0).into());
    let (engine, _) = start(TransferConfig { tcp_listen, tcp_advertise, ..tcp_config() });
    assert_eq!(engine.endpoint().tcp, tcp_advertise);
}

#[test]
fn endpoints_survive_the_wire_and_nothing_else_is_one() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let config = TransferConfig { run_dir: Some(run_dir.path().to_owned()), ..tcp_config() };
    let (engine, _) = start(config);
    let endpoint = engine.endpoint();
    let bytes = endpoint.to_bytes();
    assert_eq!(Endpoint::from_bytes(&bytes).expect("it is one"), endpoint);
    assert!(Endpoint::from_bytes(&bytes[..bytes.len() - 3]).is_err());
    assert!(Endpoint::from_bytes(b"").is_err());
    let shown = format!("{endpoint:?}");
    assert!(!shown.contains("cookie: ["), "the cookie is not for logs: {shown}");
}

#[test]
fn the_preferred_domain_is_used_where_it_can_be_and_the_other_one_elsewhere() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let both = |preferred| TransferConfig {
        preferred,
        run_dir: Some(run_dir.path().to_owned()),
        ..tcp_config()
    };
    let (receiver, _) = start(both(Domain::Shm));
    let other_host = {
        let mut endpoint = receiver.endpoint();
        endpoint.shm.as_mut().expect("it has shm").host_id = "another".into();
        endpoint
    };
    let broken_socket = {
        let mut endpoint = receiver.endpoint();
        endpoint.shm.as_mut().expect("it has shm").socket = "/nonexistent".into();
        endpoint
    };
    let broken_port = {
        let mut endpoint = receiver.endpoint();
        // Nobody answers there: no test listens elsewhere than at 127.0.0.1.
        endpoint.tcp = Some(([127, 0, 0, 2], 4567).into());
        endpoint
    };
    for (config, endpoint, expected) in [
        (both(Domain::Tcp), broken_port, "shm"),
        (both(Domain::Shm), receiver.endpoint(), "shm"),
        (both(Domain::Tcp), receiver.endpoint(), "tcp"),
        (both(Domain::Shm), other_host, "tcp"),
        (both(Domain::Shm), broken_socket, "tcp"),
        (tcp_config(), receiver.endpoint(), "tcp"),
    ] {
        let (sender, registry) = start(config);
        let peer = sender.connect(&endpoint).expect("reachable");
        let (done, sent) = Completion::future();
        sender.send(peer, b"hello".to_vec(), LONG, done).expect("accepted");
        assert_eq!(sent.wait(), Ok(()));
        let by = |domain| counter(&registry, "kvasir_transfer_messages_total", &[domain, "sent"]);
        let expected = if expected == "shm" { (1.0, 0.0) } else { (0.0, 1.0) };
        assert_eq!((by("shm"), by("tcp")), expected);
    }
    let run_dir = Some(run_dir.path().to_owned());
    let (shm_only, _) = start(TransferConfig { run_dir, ..TransferConfig::default() });
    let (tcp_only, _) = start(tcp_config());
    let unreachable = tcp_only.connect(&shm_only.endpoint());
    assert_eq!(unreachable, Err(ConnectError::Unreachable));
}

#[test]
fn read_only_memory_is_no_target() {
    let (engine, _) = start(tcp_config());
    let memory = region(4096);
    let fd = memory.fd().try_clone_to_owned().expect("a descriptor");
    let reader = SharedMemory::from_fd(fd, 4096, Access::ReadOnly).expect("mapped");
    assert!(matches!(engine.register(Arc::new(reader)), Err(RegisterError::ReadOnly)));
}

#[test]
fn regions_are_bounded_and_revoking_makes_room() {
    let (engine, _) = start(tcp_config());
    let memory = region(4096);
    let mut regions = Vec::new();
    while let Ok((handle, _)) = engine.register(Arc::clone(&memory)) {
        regions.push(handle);
        assert!(regions.len() <= 1024);
    }
    let (done, revoked) = Completion::future();
    engine.revoke(&regions[0], done).expect("accepted");
    assert_eq!(revoked.wait(), Ok(()));
    engine.register(memory).expect("there is room again");
}

#[test]
fn a_region_is_known_as_soon_as_it_is_registered() {
    let ((sender, _), (receiver, _)) = (start(tcp_config()), start(tcp_config()));
    let (_, target) = receiver.register(region(1 << 20)).expect("room");
    let peer = sender.connect(&receiver.endpoint()).expect("reachable");
    let write = |target, bytes, done| {
        let write = Write {
            peer,
            source: Source::Inline(vec![1; bytes]),
            target,
            target_offset: 0,
            imm: None,
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        sender.write(write, done).expect("accepted");
    };
    // The receiver is busy with the long write when the region is registered, and reads the short
    // one in the same turn.
    for round in 0..600 {
        let (done, long) = Completion::future();
        write(target, 1 << 20, done);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_micros(round) {
            std::hint::spin_loop();
        }
        let (handle, fresh) = receiver.register(region(4096)).expect("room");
        let (done, short) = Completion::future();
        write(fresh, 8, done);
        assert_eq!(short.wait(), Ok(()), "round {round}");
        assert_eq!(long.wait(), Ok(()));
        receiver.revoke(&handle, Completion::Ignore).expect("accepted");
    }
}

#[test]
fn what_is_under_way_is_cancelled_when_the_engine_stops() {
    let (engine, _) = start(tcp_config());
    let (done, waiting) = Completion::future();
    engine.expect_imm(Expect { imm: 1, count: 1, deadline: None }, done).expect("accepted");
    let told = Arc::new(Mutex::new(None));
    let heard = Arc::clone(&told);
    let done = Completion::callback(move |outcome| {
        *heard.lock().expect("told") = Some(outcome);
    });
    engine.expect_imm(Expect { imm: 2, count: 1, deadline: None }, done).expect("accepted");
    drop(engine);
    assert_eq!(waiting.wait(), Err(WriteError::Cancelled));
    assert_eq!(*told.lock().expect("told"), Some(Err(WriteError::Cancelled)));
}

#[test]
fn the_end_of_a_worker_is_told_and_nothing_is_accepted_afterwards() {
    let (engine, _) = start(tcp_config());
    let (done, ended) = Completion::future();
    engine.when_ended(done);
    assert_eq!(ended.wait_timeout(Duration::from_millis(5)), None, "it runs");
    drop(engine);
    assert_eq!(ended.wait(), Ok(()), "it was dropped");

    let (engine, _) = start(tcp_config());
    let (done, ended) = Completion::future();
    engine.when_ended(done);
    let (done, told) = Completion::future();
    engine.when_ended(Completion::callback(move |outcome| done.complete(outcome)));
    let (done, waiting) = Completion::future();
    engine.expect_imm(Expect { imm: 1, count: 1, deadline: None }, done).expect("accepted");
    let dies = Completion::callback(|_| panic!("a bug in a callback, as this test wants it"));
    engine.cancel_imm(2, dies).expect("accepted");
    for ended in [ended, told, waiting] {
        assert_eq!(ended.wait(), Err(WriteError::Cancelled));
    }
    assert_eq!(engine.cancel_imm(3, Completion::Ignore), Err(SubmitError::Stopped));
    let peer = engine.connect(&engine.endpoint()).expect("reachable");
    let (done, sent) = Completion::future();
    assert_eq!(engine.send(peer, b"x".to_vec(), LONG, done), Err(SubmitError::Stopped));
    assert_eq!(sent.wait(), Err(WriteError::Cancelled));
    let (done, ended) = Completion::future();
    engine.when_ended(done);
    assert_eq!(ended.wait(), Err(WriteError::Cancelled), "also for whoever asks late");
}

#[test]
fn a_callback_may_submit_and_may_drop_the_engine() {
    let (engine, _) = start(tcp_config());
    let engine = Arc::new(Mutex::new(Some(engine)));
    let (done, dropped) = Completion::future();
    let inner = Arc::clone(&engine);
    let callback = Completion::callback(move |outcome| {
        assert_eq!(outcome, Ok(()));
        let own = inner.lock().expect("the engine").take().expect("it is there");
        own.drain_group(1, Completion::Ignore).expect("accepted");
        drop(own);
        done.complete(Ok(()));
    });
    let held = engine.lock().expect("the engine");
    held.as_ref().expect("it is there").cancel_imm(5, callback).expect("accepted");
    drop(held);
    assert_eq!(dropped.wait(), Ok(()));
}

/// Lets a worker that does not spin come more or less far on its way to sleep.
fn falling_asleep(round: u64) {
    for _ in 0..round % 97 * 8 {
        std::hint::spin_loop();
    }
}

#[test]
fn nothing_is_slept_through() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let config = |spin_us| TransferConfig {
        spin_us,
        run_dir: Some(run_dir.path().to_owned()),
        ..TransferConfig::default()
    };
    // The sender stays awake, so that its writes come while the receiver is about to sleep.
    let ((sender, _), (receiver, _)) = (start(config(1_000)), start(config(0)));
    let (_, target) = receiver.register(region(4096)).expect("room");
    let peer = sender.connect(&receiver.endpoint()).expect("reachable");
    // This thread sleeps between, so that it often comes into the way of the receiver's worker just
    // when that one is about to sleep, while the sender's goes on.
    for round in 0..4000u64 {
        let (done, reached) = Completion::future();
        let expect = Expect { imm: round as u32, count: 1, deadline: None };
        // A command, which also may come at any moment.
        receiver.expect_imm(expect, done).expect("accepted");
        falling_asleep(round);
        let write = Write {
            peer,
            source: Source::Inline(vec![1; 8]),
            target,
            target_offset: 0,
            imm: Some(round as u32),
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        sender.write(write, Completion::Ignore).expect("accepted");
        let slept_through = "a write or a command was slept through";
        assert_eq!(reached.wait_timeout(LONG).expect(slept_through), Ok(()), "round {round}");
        let (done, cancelled) = Completion::future();
        receiver.cancel_imm(round as u32, done).expect("accepted");
        assert_eq!(cancelled.wait_timeout(LONG).expect(slept_through), Ok(()), "round {round}");
    }
}

#[test]
fn a_write_that_comes_while_the_receiver_falls_asleep_is_seen() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let config = |spin_us| TransferConfig {
        spin_us,
        run_dir: Some(run_dir.path().to_owned()),
        ..TransferConfig::default()
    };
    // Each count, told on the receiver's worker, leads to the next write: the sender, which stays
    // awake, pushes it a moment later, while the receiver is on its way to sleep, and nothing else
    // would wake it. The moment is up to some microseconds, in steps of some nanoseconds.
    let (sender, _) = start(config(1_000_000));
    let (sender, (receiver, _)) = (Arc::new(sender), start(config(0)));
    let (_, target) = receiver.register(region(4096)).expect("room");
    let peer = sender.connect(&receiver.endpoint()).expect("reachable");
    let write = move |imm| Write {
        peer,
        source: Source::Inline(vec![1; 8]),
        target,
        target_offset: 0,
        imm: Some(imm),
        checksum: None,
        group: 0,
        deadline: LONG,
    };
    let rounds = 20_000;
    let (done, last) = Completion::future();
    receiver.expect_imm(Expect { imm: rounds, count: 1, deadline: None }, done).expect("accepted");
    for round in 0..rounds {
        let sender = Arc::clone(&sender);
        let next = Completion::callback(move |outcome| {
            assert_eq!(outcome, Ok(()));
            let own = Arc::clone(&sender);
            let push = Completion::callback(move |_| {
                (0..round % 89).for_each(|_| std::hint::spin_loop());
                own.write(write(round + 1), Completion::Ignore).expect("accepted");
            });
            sender.cancel_imm(0, push).expect("accepted");
        });
        receiver
            .expect_imm(Expect { imm: round, count: 1, deadline: None }, next)
            .expect("accepted");
    }
    sender.write(write(0), Completion::Ignore).expect("accepted");
    assert_eq!(last.wait_timeout(LONG).expect("a write was slept through"), Ok(()));
}

#[test]
fn what_a_writer_had_written_before_its_end_is_counted() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let config =
        || TransferConfig { run_dir: Some(run_dir.path().to_owned()), ..TransferConfig::default() };
    // The receiver's worker is held by a message until the writer is gone.
    let (release, held) = std::sync::mpsc::sync_channel::<()>(1);
    let handlers = Handlers {
        on_message: Box::new(move |_, _| held.recv().expect("released")),
        ..Handlers::default()
    };
    let registry = prometheus::Registry::new();
    let receiver = TransferEngine::start(config(), handlers, &registry).expect("started");
    let (_, target) = receiver.register(region(4096)).expect("room");
    let (sender, _) = start(config());
    let peer = sender.connect(&receiver.endpoint()).expect("reachable");
    let write = || Write {
        peer,
        source: Source::Inline(vec![1; 8]),
        target,
        target_offset: 0,
        imm: Some(5),
        checksum: None,
        group: 0,
        deadline: LONG,
    };
    // The region is mapped before the receiver is held.
    let (done, written) = Completion::future();
    sender.write(write(), done).expect("accepted");
    assert_eq!(written.wait(), Ok(()));
    sender.send(peer, b"hold".to_vec(), LONG, Completion::Ignore).expect("accepted");
    let written: Vec<_> = (0..3000)
        .map(|_| {
            let (done, written) = Completion::future();
            sender.write(write(), done).expect("accepted");
            written
        })
        .collect();
    for written in written {
        assert_eq!(written.wait(), Ok(()));
    }
    drop(sender);
    release.send(()).expect("it waits");
    let (done, reached) = Completion::future();
    let expect = Expect { imm: 5, count: 3001, deadline: None };
    receiver.expect_imm(expect, done).expect("accepted");
    assert_eq!(reached.wait_timeout(LONG), Some(Ok(())));
}

#[test]
fn a_progress_word_is_told_awake_and_asleep() {
    let (engine, _) = start(TransferConfig { spin_us: 0, ..tcp_config() });
    let memory = region(4096);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let steps = Arc::clone(&seen);
    let watch = |offset| Watch {
        memory: Arc::clone(&memory).into(),
        offset,
        raised: Raised::WithBell { sleeping_offset: 64 },
        on_progress: Box::new({
            let steps = Arc::clone(&steps);
            move |former, now| steps.lock().expect("steps").push((former, now))
        }),
    };
    assert!(matches!(engine.watch(watch(4)), Err(SubmitError::Invalid(_))));
    let id = engine.watch(watch(8)).expect("accepted");
    let word = memory.atomic_u64(8).expect("aligned");
    let ringer = Ringer::from_fd(engine.wake_fd().try_clone_to_owned().expect("a descriptor"));
    let sleeping = memory.atomic_u32(64).expect("aligned");
    let until = |wanted: u64| {
        let began = Instant::now();
        while seen.lock().expect("steps").last().is_none_or(|step| step.1 != wanted) {
            assert!(began.elapsed() < LONG, "never told of {wanted}");
            std::thread::yield_now();
        }
    };
    for value in 1..=3000u64 {
        word.store(value, Ordering::Release);
        ringer.ring_if(sleeping);
        until(value);
        falling_asleep(value);
    }
    let told = seen.lock().expect("steps").clone();
    assert_eq!(told[0].0, 0);
    assert!(told.windows(2).all(|pair| pair[0].1 == pair[1].0), "each step begins where one ended");
    let (done, unwatched) = Completion::future();
    engine.unwatch(id, done).expect("accepted");
    assert_eq!(unwatched.wait(), Ok(()));
    let before = seen.lock().expect("steps").len();
    word.store(999, Ordering::Release);
    ringer.ring_if(sleeping);
    std::thread::sleep(Duration::from_millis(2));
    assert_eq!(seen.lock().expect("steps").len(), before);
}

#[test]
fn no_more_words_are_watched_than_may() {
    let (engine, _) = start(TransferConfig { operations_max: 2, ..tcp_config() });
    let memory = region(4096);
    let watch = |offset| Watch {
        memory: Arc::clone(&memory).into(),
        offset,
        raised: Raised::WithBell { sleeping_offset: 64 },
        on_progress: Box::new(|_, _| {}),
    };
    let first = engine.watch(watch(0)).expect("accepted");
    engine.watch(watch(8)).expect("accepted");
    assert!(matches!(engine.watch(watch(16)), Err(SubmitError::Full)));
    let (done, unwatched) = Completion::future();
    engine.unwatch(first, done).expect("accepted");
    assert_eq!(unwatched.wait(), Ok(()));
    engine.watch(watch(16)).expect("there is room again");
}

#[test]
fn a_word_that_nobody_rings_for_is_looked_at_as_often_as_was_asked() {
    let (engine, _) = start(TransferConfig { spin_us: 0, ..tcp_config() });
    // As a device would have it: not shared memory, and nobody who rings.
    let words: Arc<[AtomicU64; 2]> = Arc::default();
    let base = std::ptr::NonNull::from(words.as_ref()).cast();
    // SAFETY: the array lives as long as its owner, and is made of atomics.
    let memory = unsafe { WordMemory::mapped(base, 16, Arc::clone(&words) as _) };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let steps = Arc::clone(&seen);
    let watch = Watch {
        memory,
        offset: 8,
        raised: Raised::Silently { poll_every: Duration::from_millis(1) },
        on_progress: Box::new(move |former, now| steps.lock().expect("steps").push((former, now))),
    };
    let id = engine.watch(watch).expect("accepted");
    for value in 1..=20u64 {
        // The worker sleeps by now, and nothing wakes it.
        std::thread::sleep(Duration::from_millis(3));
        words[1].store(value, Ordering::Release);
        let began = Instant::now();
        while seen.lock().expect("steps").last().is_none_or(|step| step.1 != value) {
            assert!(began.elapsed() < LONG, "never told of {value}");
            std::thread::yield_now();
        }
    }
    let told = seen.lock().expect("steps").clone();
    assert_eq!(told, (1..=20).map(|value| (value - 1, value)).collect::<Vec<_>>());
    let (done, unwatched) = Completion::future();
    engine.unwatch(id, done).expect("accepted");
    assert_eq!(unwatched.wait(), Ok(()));
    drop(engine);
    assert_eq!(Arc::strong_count(&words), 1, "the memory is let go");
}

/// Time on a core of the thread with this name, in clock ticks of 10 ms.
fn ticks_of_thread(name: &str) -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("proc");
    for task in tasks {
        let path = task.expect("a task").path();
        let comm = std::fs::read_to_string(path.join("comm")).unwrap_or_default();
        if comm.trim() == name {
            let stat = std::fs::read_to_string(path.join("stat")).expect("its numbers");
            let after = stat.rsplit(')').next().expect("the name is in brackets");
            let fields: Vec<&str> = after.split_whitespace().collect();
            return fields[11].parse::<u64>().expect("utime")
                + fields[12].parse::<u64>().expect("stime");
        }
    }
    panic!("no thread {name}");
}

#[test]
fn a_worker_is_pinned_to_the_core_that_was_asked_for() {
    let (engine, _) =
        start(TransferConfig { name: "pinned".into(), worker_core: Some(0), ..tcp_config() });
    let (done, told) = Completion::future();
    engine.cancel_imm(1, done).expect("accepted");
    assert_eq!(told.wait(), Ok(()));
    let tasks = std::fs::read_dir("/proc/self/task").expect("proc");
    let allowed: Vec<String> = tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("status")).ok())
        .filter(|status| status.contains("xfer-pinned"))
        .filter_map(|status| {
            let line = status.lines().find(|line| line.starts_with("Cpus_allowed_list"))?;
            Some(line.split_whitespace().last()?.to_owned())
        })
        .collect();
    assert_eq!(allowed, ["0"]);
    let registry = prometheus::Registry::new();
    let config = TransferConfig { worker_core: Some(1000), ..tcp_config() };
    let refused = TransferEngine::start(config, Handlers::default(), &registry);
    assert!(matches!(refused, Err(StartError::System { .. })), "there is no such core");
}

#[test]
fn a_domain_that_has_failed_is_avoided_for_a_while() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let both = || TransferConfig {
        preferred: Domain::Shm,
        run_dir: Some(run_dir.path().to_owned()),
        ..tcp_config()
    };
    // Whoever listens where the peer's shm should be takes connections and says nothing.
    let silent = run_dir.path().join("silent.sock");
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let kind = rustix::net::SocketType::SEQPACKET;
    let listener = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, kind, flags, None);
    let listener = listener.expect("a socket");
    let address = rustix::net::SocketAddrUnix::new(&silent).expect("short");
    rustix::net::bind(&listener, &address).expect("bound");
    rustix::net::listen(&listener, 16).expect("listening");
    let (sender, _) = start(TransferConfig { peer_timeout_ms: 100, ..both() });
    let (receiver, received) = start(both());
    let mut endpoint = receiver.endpoint();
    endpoint.shm.as_mut().expect("it has shm").socket = silent;
    let send = || {
        let peer = sender.connect(&endpoint).expect("reachable");
        let (done, sent) = Completion::future();
        sender.send(peer, b"hello".to_vec(), LONG, done).expect("accepted");
        sent.wait()
    };
    let asked = || {
        let mut times = 0;
        let ready = |times: &mut u32| {
            let fd = std::os::fd::AsFd::as_fd(&listener);
            if kvasir_transfer::doorbell::sleep(&[fd], Duration::ZERO) == 0 {
                return false;
            }
            drop(rustix::net::accept(&listener).expect("one that waits"));
            *times += 1;
            true
        };
        while ready(&mut times) {}
        times
    };
    assert_eq!(send(), Ok(()), "by the other domain");
    assert_eq!(asked(), 1);
    // A new session does not try it again so soon.
    let (done, cut) = Completion::future();
    let back = receiver.connect(&sender.endpoint()).expect("reachable");
    receiver.cut_off(back, done).expect("accepted");
    assert_eq!(cut.wait(), Ok(()));
    let until = Instant::now() + LONG;
    while send().is_err() {
        assert!(Instant::now() < until, "it hears of the cut-off");
    }
    assert_eq!(asked(), 0);
    let messages = "kvasir_transfer_messages_total";
    assert!(counter(&received, messages, &["tcp", "received"]) >= 2.0);
}

#[test]
fn an_idle_engine_sleeps() {
    let run_dir = tempfile::tempdir().expect("a directory");
    let config = |name: &str| TransferConfig {
        name: name.into(),
        run_dir: Some(run_dir.path().to_owned()),
        ..tcp_config()
    };
    let (idle, _) = start(config("idle"));
    let (other, _) = start(config("other"));
    let peer = other.connect(&idle.endpoint()).expect("reachable");
    let (done, sent) = Completion::future();
    other.send(peer, b"hello".to_vec(), LONG, done).expect("accepted");
    assert_eq!(sent.wait(), Ok(()));
    let (before_idle, before_other) = (ticks_of_thread("xfer-idle"), ticks_of_thread("xfer-other"));
    std::thread::sleep(Duration::from_millis(500));
    // Spinning, it would have used 50 ticks.
    assert!(ticks_of_thread("xfer-idle") - before_idle <= 2);
    assert!(ticks_of_thread("xfer-other") - before_other <= 2);

    // A peer that is asked for signs of life hardly costs more.
    let config = TransferConfig { heartbeat_interval_ms: 50, ..config("wants") };
    let (wants, _) = start(config);
    let peer = wants.connect(&idle.endpoint()).expect("reachable");
    wants.set_wanted(peer, true).expect("it is current");
    let (done, sent) = Completion::future();
    wants.send(peer, b"hello".to_vec(), LONG, done).expect("accepted");
    assert_eq!(sent.wait(), Ok(()));
    let (before_idle, before_wants) = (ticks_of_thread("xfer-idle"), ticks_of_thread("xfer-wants"));
    std::thread::sleep(Duration::from_millis(500));
    assert!(ticks_of_thread("xfer-idle") - before_idle <= 2);
    assert!(ticks_of_thread("xfer-wants") - before_wants <= 2);
}

#[test]
fn a_peer_that_stops_reading_is_given_up() {
    // A listener that never answers the hello.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let events = Arc::new(AtomicU64::new(0));
    let lost = Arc::clone(&events);
    let handlers = Handlers {
        on_peer: Box::new(move |event| {
            if matches!(event, PeerEvent::SessionLost { .. }) {
                lost.fetch_add(1, Ordering::Release);
            }
        }),
        ..Handlers::default()
    };
    let registry = prometheus::Registry::new();
    let config = TransferConfig { peer_timeout_ms: 50, ..tcp_config() };
    let engine = TransferEngine::start(config, handlers, &registry).expect("started");
    let mut endpoint = engine.endpoint();
    endpoint.incarnation ^= 1;
    endpoint.tcp = Some(silent.local_addr().expect("its address"));
    let (handle, target) = engine.register(region(4096)).expect("room");
    let peer = engine.connect(&endpoint).expect("reachable");
    let (done, written) = Completion::future();
    let write = Write {
        peer,
        source: Source::Region { handle, offset: 0, bytes: 4096 },
        target,
        target_offset: 0,
        imm: None,
        checksum: None,
        group: 1,
        deadline: LONG,
    };
    engine.write(write, done).expect("accepted");
    assert_eq!(written.wait(), Err(WriteError::PeerGone));
    // What was never issued has certainly not landed.
    let (done, drained) = Completion::future();
    engine.drain_group(1, done).expect("accepted");
    assert_eq!(drained.wait(), Ok(()));
    assert_eq!(events.load(Ordering::Acquire), 1);
}
