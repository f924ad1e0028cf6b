//! The same with a real second process, which is killed while it writes.

use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, Command, Stdio};

use kvasir_transfer::{Endpoint, Loss, RegionDesc, Source, SubmitError, Write, WriteError};

use rustix::process::Signal;

use crate::device;
use crate::fabric::{Fabric, Kind, LONG, Options, provider_of, read};

const BYTES: usize = 256 << 10;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.trim().as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).expect("ascii"), 16);
    digits.map(|pair| byte(pair).expect("hex")).collect()
}

/// The second process: this test binary, running `write_until_killed` only.
fn spawn(kind: Kind, endpoint: &Endpoint, target: &RegionDesc) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this binary"));
    let test = match kind {
        Kind::Shm | Kind::ShmDriven => "two_processes::write_until_killed_by_shm",
        Kind::Tcp | Kind::TcpTls | Kind::TcpDriven | Kind::Sim => {
            "two_processes::write_until_killed_by_tcp"
        }
        Kind::Verbs | Kind::VerbsUd => "two_processes::write_until_killed_by_verbs",
        Kind::EfaTcp => "two_processes::write_until_killed_by_efa_tcp",
        Kind::EfaShm => unreachable!("its processes must not be killed: see below"),
    };
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn().expect("spawned");
    let input = child.stdin.as_mut().expect("piped");
    writeln!(input, "{}\n{}", hex(&endpoint.to_bytes()), hex(&target.to_bytes())).expect("written");
    child
}

fn kill(child: &mut Child) {
    child.kill().expect("killed");
    child.wait().expect("reaped");
    // What libfabric's provider `shm` leaves behind when its process is killed.
    let of_child = format!("{}:", child.id());
    for file in std::fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        if file.file_name().to_str().is_some_and(|name| name.starts_with(&of_child)) {
            std::fs::remove_file(file.path()).expect("it is this test's");
        }
    }
}

fn write_until_killed(kind: Kind) {
    let mut lines =
        BufReader::new(std::io::stdin()).lines().map(|line| unhex(&line.expect("text")));
    let endpoint = Endpoint::from_bytes(&lines.next().expect("an endpoint")).expect("an endpoint");
    let target = RegionDesc::from_bytes(&lines.next().expect("a region")).expect("a region");
    let fabric = Fabric::new(kind, Options { operations_max: 64, ..Options::default() });
    let peer = fabric.a.connect_to(&endpoint);
    fabric.a.send(peer, b"here I am").expect("accepted");
    for round in 0u32.. {
        let write = Write {
            peer,
            source: Source::Inline(vec![round as u8; BYTES]),
            target,
            target_offset: 0,
            imm: Some(1),
            checksum: None,
            group: 0,
            deadline: LONG,
        };
        match fabric.a.try_write(write) {
            Ok(flag) => assert_ne!(flag.get(), Some(Err(WriteError::PeerGone))),
            Err(SubmitError::Full) => std::thread::yield_now(),
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
#[ignore = "the second process of the tests below"]
fn write_until_killed_by_shm() {
    write_until_killed(Kind::Shm);
}

#[test]
#[ignore = "the second process of the tests below"]
fn write_until_killed_by_tcp() {
    write_until_killed(Kind::Tcp);
}

#[test]
#[ignore = "the second process of the tests below"]
fn write_until_killed_by_verbs() {
    write_until_killed(Kind::Verbs);
}

#[test]
#[ignore = "the second process of the tests below"]
fn write_until_killed_by_efa_tcp() {
    write_until_killed(Kind::EfaTcp);
}

fn a_killed_writer_is_lost_and_can_be_cut_off(kind: Kind) {
    let fabric = Fabric::new(kind, Options::default());
    let (target, descriptor) = fabric.b.region(BYTES);
    let reached = fabric.b.expect(1, 20);
    let mut child = spawn(kind, &fabric.b.endpoint(), &descriptor);
    assert_eq!(fabric.outcome(&reached), Ok(()));
    kill(&mut child);
    fabric.until("the event", || fabric.b.lost_writers().len() == 1);
    // The writer can be cut off though we never had a session with it.
    let incarnation = fabric.b.lost_writers()[0];
    let mut writer = fabric.a.endpoint();
    writer.incarnation = incarnation;
    let writer = fabric.b.connect_to(&writer);
    assert_eq!(fabric.outcome(&fabric.b.cut_off(writer)), Ok(()));
    target.memory().copy_from(0, &[7; BYTES]).expect("it fits");
    fabric.pass(std::time::Duration::from_millis(5));
    assert!(read(&target, 0, BYTES).iter().all(|byte| *byte == 7), "not a byte");
}

/// Its host is there and keeps its connections; it says nothing more.
fn a_wanted_process_that_is_stopped_is_lost(kind: Kind) {
    let fabric = Fabric::new(kind, crate::lively(20, 100));
    let (_target, descriptor) = fabric.b.region(BYTES);
    let mut child = spawn(kind, &fabric.b.endpoint(), &descriptor);
    fabric.until("its message", || !fabric.b.messages.lock().expect("messages").is_empty());
    let (peer, _) = fabric.b.messages.lock().expect("messages")[0].clone();
    assert_eq!(fabric.b.set_wanted(peer, true), Ok(()));
    assert_eq!(fabric.outcome(&fabric.b.send(peer, b"hello").expect("accepted")), Ok(()));
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::STOP)
        .expect("stopped");
    fabric.until("the event", || !fabric.b.losses().is_empty());
    assert_eq!(fabric.b.losses(), [(peer, Loss::Silent)]);
    kill(&mut child);
}

#[test]
fn a_wanted_process_that_is_stopped_is_lost_by_shm() {
    a_wanted_process_that_is_stopped_is_lost(Kind::Shm);
}

#[test]
fn a_wanted_process_that_is_stopped_is_lost_by_tcp() {
    a_wanted_process_that_is_stopped_is_lost(Kind::Tcp);
}

#[test]
fn a_killed_writer_is_lost_and_can_be_cut_off_by_shm() {
    a_killed_writer_is_lost_and_can_be_cut_off(Kind::Shm);
}

#[test]
fn a_killed_writer_is_lost_and_can_be_cut_off_by_tcp() {
    a_killed_writer_is_lost_and_can_be_cut_off(Kind::Tcp);
}

#[test]
fn a_killed_writer_is_lost_and_can_be_cut_off_by_verbs() {
    if device::named().is_some() {
        a_killed_writer_is_lost_and_can_be_cut_off(Kind::Verbs);
    }
}

#[test]
fn a_killed_writer_is_lost_and_can_be_cut_off_by_efa_tcp() {
    if provider_of(Kind::EfaTcp).is_some() {
        a_killed_writer_is_lost_and_can_be_cut_off(Kind::EfaTcp);
    }
}

// Not by efa over `shm`: a process that is killed or stopped there may hold the lock of its peer's shared memory, and
// the provider (seen with 1.17) then spins for ever. The cards of EFA have no such lock, and neither has `tcp`.

#[test]
fn a_wanted_process_that_is_stopped_is_lost_by_efa_tcp() {
    if provider_of(Kind::EfaTcp).is_some() {
        a_wanted_process_that_is_stopped_is_lost(Kind::EfaTcp);
    }
}

/// A writer that does not say that what it had posted is done is cut off instead, and not waited for.
#[test]
fn a_revocation_does_not_wait_for_a_writer_that_is_stopped_by_efa_tcp() {
    if provider_of(Kind::EfaTcp).is_none() {
        return;
    }
    let fabric = Fabric::new(Kind::EfaTcp, Options::default());
    let (target, descriptor) = fabric.b.region(BYTES);
    let reached = fabric.b.expect(1, 20);
    let mut child = spawn(Kind::EfaTcp, &fabric.b.endpoint(), &descriptor);
    assert_eq!(fabric.outcome(&reached), Ok(()));
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::STOP)
        .expect("stopped");
    assert_eq!(fabric.outcome(&fabric.b.revoke(&target)), Ok(()));
    target.memory().copy_from(0, &[7; BYTES]).expect("it fits");
    rustix::process::kill_process(rustix::process::Pid::from_child(&child), Signal::CONT)
        .expect("it goes on");
    fabric.pass(std::time::Duration::from_millis(50));
    assert!(read(&target, 0, BYTES).iter().all(|byte| *byte == 7), "not a byte");
    kill(&mut child);
}
