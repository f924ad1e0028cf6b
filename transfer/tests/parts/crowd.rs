//! More peers than there is room for: whoever is idle makes room, whoever is not keeps its place, and
//! the next try finds room again.

use std::path::Path;
use std::time::{Duration, Instant};

use kvasir_transfer::{Completion, Domain, Outcome, TransferConfig, TransferEngine, WriteError};

use crate::engine::{counter, start, tcp_config};

const LONG: Duration = Duration::from_secs(30);
const IDLE: Duration = Duration::from_millis(40);
/// Of a receiver, which gives a greeting as long: more than a busy machine takes for it.
const PATIENT: Duration = Duration::from_millis(500);

fn config(domain: Domain, run_dir: &Path, peer_timeout: Duration) -> TransferConfig {
    let peer_timeout_ms = peer_timeout.as_millis() as u64;
    let few = TransferConfig {
        connections_max: 2,
        peer_timeout_ms,
        tcp_lanes: 1,
        ..TransferConfig::default()
    };
    match domain {
        Domain::Tcp | Domain::Verbs | Domain::Efa => {
            TransferConfig { tcp_listen: tcp_config().tcp_listen, ..few }
        }
        Domain::Shm => TransferConfig { run_dir: Some(run_dir.to_owned()), ..few },
    }
}

fn send(from: &TransferEngine, to: &TransferEngine) -> Outcome {
    let peer = from.connect(&to.endpoint()).expect("reachable");
    let (done, sent) = Completion::future();
    from.send(peer, b"hello".to_vec(), LONG, done).expect("accepted");
    sent.wait()
}

/// Whoever was closed may have to learn it first, and whoever makes room may take its time.
fn send_in_the_end(from: &TransferEngine, to: &TransferEngine) {
    let until = Instant::now() + LONG;
    while send(from, to).is_err() {
        assert!(Instant::now() < until, "there is room");
    }
}

fn closed(registry: &prometheus::Registry, domain: Domain, reason: &str) -> f64 {
    let labels = [domain.label(), reason];
    counter(registry, "kvasir_transfer_connections_closed_total", &labels)
}

/// A receiver may acknowledge what a newcomer has sent before it closes another one for it.
fn idle_are_closed(registry: &prometheus::Registry, domain: Domain, so_many: f64) {
    let until = Instant::now() + LONG;
    while closed(registry, domain, "idle") < so_many && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(closed(registry, domain, "idle"), so_many);
}

#[test]
fn the_writer_that_was_idle_for_longest_makes_room_for_another() {
    // Of shm peers none is closed: for them what they push has landed.
    let domain = Domain::Tcp;
    let dir = tempfile::tempdir().expect("a directory");
    let (receiver, registry) = start(config(domain, dir.path(), PATIENT));
    let senders: Vec<_> = (0..3).map(|_| start(config(domain, dir.path(), LONG)).0).collect();
    assert_eq!(send(&senders[0], &receiver), Ok(()));
    assert_eq!(send(&senders[1], &receiver), Ok(()));
    std::thread::sleep(PATIENT + PATIENT / 2);
    assert_eq!(send(&senders[0], &receiver), Ok(()));
    assert_eq!(send(&senders[2], &receiver), Ok(()), "the second one has made room");
    idle_are_closed(&registry, domain, 1.0);
    assert_eq!(send(&senders[0], &receiver), Ok(()), "whoever was active keeps its place");
    std::thread::sleep(PATIENT + PATIENT / 2);
    send_in_the_end(&senders[1], &receiver);
    idle_are_closed(&registry, domain, 2.0);
    assert_eq!(closed(&registry, domain, "not_admitted"), 0.0);
}

#[test]
fn while_nobody_is_idle_one_more_writer_is_turned_away() {
    for domain in [Domain::Tcp, Domain::Shm] {
        let dir = tempfile::tempdir().expect("a directory");
        let (receiver, registry) = start(config(domain, dir.path(), LONG));
        let mut senders: Vec<_> =
            (0..3).map(|_| start(config(domain, dir.path(), LONG)).0).collect();
        assert_eq!(send(&senders[0], &receiver), Ok(()));
        assert_eq!(send(&senders[1], &receiver), Ok(()));
        assert_eq!(send(&senders[2], &receiver), Err(WriteError::PeerGone));
        assert_eq!(closed(&registry, domain, "not_admitted"), 1.0);
        senders.remove(0);
        // As soon as one has gone there is room.
        send_in_the_end(&senders[1], &receiver);
    }
}

#[test]
fn an_idle_session_makes_room_for_one_with_another_peer() {
    for domain in [Domain::Tcp, Domain::Shm] {
        let dir = tempfile::tempdir().expect("a directory");
        let (sender, registry) = start(config(domain, dir.path(), IDLE));
        let (patient, _) = start(config(domain, dir.path(), LONG));
        let peers: Vec<_> = (0..3).map(|_| start(config(domain, dir.path(), LONG)).0).collect();
        for peer in &peers[..2] {
            assert_eq!(send(&sender, peer), Ok(()));
            assert_eq!(send(&patient, peer), Ok(()));
        }
        assert_eq!(send(&patient, &peers[2]), Err(WriteError::PeerGone), "both were used just now");
        std::thread::sleep(IDLE + IDLE / 2);
        assert_eq!(send(&sender, &peers[1]), Ok(()));
        assert_eq!(send(&sender, &peers[2]), Ok(()));
        assert_eq!(closed(&registry, domain, "idle"), 1.0);
        assert_eq!(send(&sender, &peers[1]), Ok(()), "the session that was used is still there");
        assert_eq!(closed(&registry, domain, "idle"), 1.0);
    }
}

#[test]
fn a_session_that_is_wanted_keeps_its_place_however_idle_it_is() {
    for domain in [Domain::Tcp, Domain::Shm] {
        let dir = tempfile::tempdir().expect("a directory");
        let (sender, registry) = start(config(domain, dir.path(), IDLE));
        let peers: Vec<_> = (0..4).map(|_| start(config(domain, dir.path(), LONG)).0).collect();
        let wanted = sender.connect(&peers[0].endpoint()).expect("reachable");
        sender.set_wanted(wanted, true).expect("it is current");
        for peer in &peers {
            assert_eq!(send(&sender, peer), Ok(()));
            std::thread::sleep(IDLE + IDLE / 2);
        }
        assert_eq!(closed(&registry, domain, "idle"), 2.0, "the second one, and the third");
        assert_eq!(sender.connect(&peers[0].endpoint()), Ok(wanted), "its session goes on");
        sender.set_wanted(wanted, false).expect("it is current");
        assert_eq!(send(&sender, &peers[1]), Ok(()));
        std::thread::sleep(IDLE + IDLE / 2);
        assert_eq!(send(&sender, &peers[2]), Ok(()));
        let now = sender.connect(&peers[0].endpoint()).expect("reachable");
        assert_ne!(now, wanted, "and has to go when nobody wants it any more");
    }
}

/// Connections of whoever only knows the port.
#[test]
fn strangers_take_nobodys_place() {
    let dir = tempfile::tempdir().expect("a directory");
    let (receiver, registry) = start(config(Domain::Tcp, dir.path(), PATIENT));
    let senders: Vec<_> = (0..2).map(|_| start(config(Domain::Tcp, dir.path(), LONG)).0).collect();
    for sender in &senders {
        assert_eq!(send(sender, &receiver), Ok(()));
    }
    // Both could be made to leave from now on, by another peer.
    std::thread::sleep(PATIENT + PATIENT / 2);
    let address = receiver.endpoint().tcp.expect("tcp");
    let connect = || std::net::TcpStream::connect(address).expect("taken");
    let strangers: Vec<_> = (0..40).map(|_| connect()).collect();
    for sender in &senders {
        assert_eq!(send(sender, &receiver), Ok(()));
    }
    assert_eq!(closed(&registry, Domain::Tcp, "idle"), 0.0);
    drop(strangers);
}

#[test]
fn of_too_many_strangers_those_that_take_longest_are_closed() {
    let dir = tempfile::tempdir().expect("a directory");
    // It would wait for their greetings for longer than this test does.
    let (receiver, _) = start(config(Domain::Tcp, dir.path(), 10 * LONG));
    let address = receiver.endpoint().tcp.expect("tcp");
    let connect = || std::net::TcpStream::connect(address).expect("taken");
    let mut strangers: Vec<_> = (0..40).map(|_| connect()).collect();
    let last = strangers.split_off(24);
    for mut stranger in strangers {
        stranger.set_read_timeout(Some(LONG)).expect("set");
        let ended = std::io::Read::read(&mut stranger, &mut [0]);
        assert!(matches!(ended, Ok(0)), "closed in favour of later ones: {ended:?}");
    }
    let (sender, _) = start(config(Domain::Tcp, dir.path(), LONG));
    assert_eq!(send(&sender, &receiver), Ok(()));
    drop(last);
}
