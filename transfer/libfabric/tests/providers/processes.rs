//! A peer in another process, and what is told when it is killed. Provider `shm` cannot be asked this
//! within one process: there it keeps pointing into the memory of an endpoint that was closed (seen
//! with 1.17).

use std::io::{BufRead, BufReader, Read, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use kvasir_transfer_libfabric::address::EndpointName;
use kvasir_transfer_libfabric::completion::Completion;
use kvasir_transfer_libfabric::error::{OperationError, PostError};
use kvasir_transfer_libfabric::queue::QueueOptions;
use kvasir_transfer_libfabric::region::RemoteRegion;

use crate::support::{SHM, Setting, Side, TCP, side, write_of};

const MARK: &str = "reach me: ";
const BYTES: usize = 4096;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hexadecimal");
    (0..text.len()).step_by(2).map(digit).collect()
}

/// The other process: says how to reach it, and polls until its standard input closes.
fn be_a_peer(setting: Setting) {
    let Some(mut own) = side(setting, QueueOptions::default()) else { return };
    let target = own.buffer(BYTES);
    let name = hex(&own.endpoint.name().0);
    let region = hex(&target.region.remote().to_bytes());
    writeln!(std::io::stdout(), "\n{MARK}{name} {region}").expect("standard output is open");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            is_over.store(true, Ordering::Relaxed);
        });
        while !is_over.load(Ordering::Relaxed) {
            own.poll();
        }
    });
}

/// Not a test: what [`start_peer`] runs.
#[test]
#[ignore = "the other process of the tests here"]
fn peer_over_tcp() {
    be_a_peer(TCP);
}

/// As above.
#[test]
#[ignore = "the other process of the tests here"]
fn peer_over_shm() {
    be_a_peer(SHM);
}

fn start_peer(setting: Setting) -> (Child, EndpointName, RemoteRegion) {
    let role = format!("processes::peer_over_{}", setting.provider);
    let mut child = Command::new(std::env::current_exe().expect("this test has a path"))
        .args([role.as_str(), "--exact", "--ignored", "--no-capture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this test can be started");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    let line = output
        .lines()
        .map(|line| line.expect("text"))
        .find_map(|line| line.strip_prefix(MARK).map(String::from))
        .expect("it says how to reach it");
    let (name, region) = line.split_once(' ').expect("two words");
    let region = from_hex(region).try_into().expect("as long as a region's description");
    (child, EndpointName(from_hex(name)), RemoteRegion::from_bytes(region))
}

/// What provider `shm` leaves behind when its process is killed.
fn remove_shared_memory_of(process: u32) {
    let left = |name: &str| name.starts_with(&format!("{process}:"));
    for file in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        if file.file_name().to_str().is_some_and(left) {
            std::fs::remove_file(file.path()).expect("it is this test's");
        }
    }
}

fn poll_until(own: &mut Side, is_so: impl Fn(&Side) -> bool) {
    let started = std::time::Instant::now();
    while !is_so(own) {
        own.poll();
        assert!(started.elapsed().as_secs() < 30, "hangs; told {:?}", own.told);
    }
}

fn a_peer_that_is_killed_is_an_error_and_never_a_success(setting: Setting) {
    let Some(mut own) = side(setting, QueueOptions::default()) else { return };
    let from = own.buffer(BYTES);
    let (mut child, name, region) = start_peer(setting);
    let peer = own.peers.insert(&name).expect("inserted");
    let write = |token| write_of(&peer, &from, BYTES, region, (0, None, token));
    while let Err(error) = own.post(&write(1)) {
        assert!(matches!(error, PostError::Busy(_)), "{error:?}");
        own.poll();
    }
    poll_until(&mut own, |own| own.is_done(1));
    child.kill().expect("killed");
    child.wait().expect("gone");
    remove_shared_memory_of(child.id());
    let late = loop {
        match own.post(&write(2)) {
            Err(PostError::Busy(_)) if setting.tells_of_lost_peers => own.poll(),
            other => break other,
        }
    };
    if !setting.tells_of_lost_peers {
        // Nothing is told, and so nothing that is not so. The deadline is the caller's.
        for _ in 0..10_000 {
            own.poll();
        }
        assert!(!own.is_done(2));
        return;
    }
    match late {
        Ok(()) => poll_until(&mut own, |own| own.has_failed(2)),
        Err(PostError::PeerGone(_)) => return,
        Err(error) => panic!("{error:?}"),
    }
    let is_gone = |told: &Completion| {
        matches!(told, Completion::Failed { error: OperationError::PeerGone(_), .. })
    };
    assert!(own.told.iter().any(is_gone), "{:?}", own.told);
}

over!(over_tcp, TCP, a_peer_that_is_killed_is_an_error_and_never_a_success);
over!(over_shm, SHM, a_peer_that_is_killed_is_an_error_and_never_a_success);
