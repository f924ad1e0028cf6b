//! Shared memory, passing descriptors, holding processes.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvasir_transfer::descriptors::{self, DescriptorError};
use kvasir_transfer::memory::{
    Access, HUGE_PAGE_BYTES, MemoryError, Pages, Prefault, SharedMemory,
};
use kvasir_transfer::process::{Process, ProcessError};

fn memory(bytes: usize) -> SharedMemory {
    SharedMemory::create("test", bytes, Prefault::Yes).expect("memory")
}

fn dup(memory: &SharedMemory) -> OwnedFd {
    memory.fd().try_clone_to_owned().expect("a descriptor")
}

#[test]
fn two_mappings_show_the_same_bytes() {
    let one = memory(10_000);
    let two = SharedMemory::from_fd(dup(&one), 10_000, Access::ReadWrite).expect("mapped");
    one.copy_from(5_000, b"kvasir").expect("it fits");
    let mut bytes = [0; 6];
    two.copy_to(5_000, &mut bytes).expect("it fits");
    assert_eq!(&bytes, b"kvasir");
    two.atomic_u64(16).expect("aligned").store(7, Ordering::Release);
    assert_eq!(one.atomic_u64(16).expect("aligned").load(Ordering::Acquire), 7);
    one.copy_between(5_000, &two, 100, 6).expect("it fits");
    one.copy_to(100, &mut bytes).expect("it fits");
    assert_eq!(&bytes, b"kvasir");
}

#[test]
fn large_memory_lies_in_reserved_pages_where_there_are_any() {
    let bytes = 3 * HUGE_PAGE_BYTES;
    let one = SharedMemory::create_large("test", bytes).expect("memory");
    if one.pages() == Pages::Ordinary {
        let why = "the host has not three free pages of 2 MiB (`sysctl vm.nr_hugepages`)";
        writeln!(std::io::stderr(), "a test of huge pages is skipped: {why}").ok();
        return;
    }
    let two = SharedMemory::from_fd(dup(&one), bytes, Access::ReadWrite).expect("mapped");
    let reader = SharedMemory::from_fd(dup(&one), bytes, Access::ReadOnly).expect("mapped");
    assert_eq!((two.pages(), reader.pages()), (Pages::Huge, Pages::Huge));
    assert!(rustix::fs::ftruncate(one.fd(), 0).is_err(), "it cannot be truncated");
    one.copy_from(bytes - 6, b"kvasir").expect("it fits");
    two.copy_between(bytes - 6, &two, HUGE_PAGE_BYTES - 3, 6).expect("it fits");
    let mut found = [0; 6];
    reader.copy_to(HUGE_PAGE_BYTES - 3, &mut found).expect("it fits");
    assert_eq!(&found, b"kvasir");
    drop((one, two));
    reader.copy_to(bytes - 6, &mut found).expect("it lives as long as a mapping does");
    assert_eq!(&found, b"kvasir");
}

#[test]
fn large_memory_for_which_no_reserved_pages_fit_lies_in_ordinary_ones() {
    let odd = SharedMemory::create_large("test", HUGE_PAGE_BYTES + 4096).expect("memory");
    assert_eq!((odd.len(), odd.pages()), (HUGE_PAGE_BYTES + 4096, Pages::Ordinary));
    assert!(matches!(SharedMemory::create_large("test", 0), Err(MemoryError::Empty)));
    let file = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
    let reserved = std::fs::read_to_string(file).unwrap_or_default().trim().parse().unwrap_or(0);
    if reserved > 64 {
        let why = "more than this host has reserved are too many";
        writeln!(std::io::stderr(), "a test of huge pages is skipped: {why}").ok();
        return;
    }
    let more = (reserved + 1) * HUGE_PAGE_BYTES;
    let more = SharedMemory::create_large("test", more).expect("memory");
    assert_eq!(more.pages(), Pages::Ordinary);
    more.copy_from(reserved * HUGE_PAGE_BYTES, b"kvasir").expect("it fits");
}

#[test]
fn ranges_outside_are_errors() {
    let memory = memory(4096);
    for (offset, bytes) in [(4096, 1), (4000, 97), (usize::MAX, 2), (0, 4097)] {
        assert!(memory.check(offset, bytes).is_err(), "{offset} + {bytes}");
        assert!(memory.copy_from(offset, &vec![0; bytes]).is_err(), "{offset} + {bytes}");
        assert!(memory.copy_to(offset, &mut vec![0; bytes]).is_err(), "{offset} + {bytes}");
    }
    assert!(memory.check(4096, 0).is_ok());
    for offset in [1, 4, 4096, usize::MAX] {
        assert!(memory.atomic_u64(offset).is_err(), "{offset}");
    }
    assert!(memory.atomic_u32(4).is_ok() && memory.atomic_u32(6).is_err());
}

#[test]
fn a_descriptor_must_hold_what_was_announced_and_never_shrink() {
    let memory = memory(4096);
    let wrong = SharedMemory::from_fd(dup(&memory), 8192, Access::ReadOnly);
    assert!(matches!(wrong, Err(MemoryError::Size { actual: 4096, wanted: 8192 })));
    let empty = SharedMemory::from_fd(dup(&memory), 0, Access::ReadOnly);
    assert!(matches!(empty, Err(MemoryError::Empty)));
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let loose = rustix::fs::memfd_create("loose", flags).expect("memfd");
    rustix::fs::ftruncate(&loose, 4096).expect("sized");
    let unsealed = SharedMemory::from_fd(loose, 4096, Access::ReadOnly);
    assert!(matches!(unsealed, Err(MemoryError::NotSealed)));
    assert!(rustix::fs::ftruncate(memory.fd(), 0).is_err(), "ours cannot be truncated");
}

#[test]
fn memory_for_readers_can_be_written_by_its_maker_only() {
    let own = SharedMemory::create_for_readers("test", 4096).expect("memory");
    own.copy_from(0, b"x").expect("ours");
    assert!(SharedMemory::from_fd(dup(&own), 4096, Access::ReadWrite).is_err());
    let reader = SharedMemory::from_fd(dup(&own), 4096, Access::ReadOnly).expect("mapped");
    let mut byte = [0];
    reader.copy_to(0, &mut byte).expect("it fits");
    assert_eq!(&byte, b"x");
    assert!(reader.copy_from(0, b"y").is_err(), "an error, not a fault");
}

#[test]
fn descriptors_travel_with_their_payload() {
    let (here, there) = UnixStream::pair().expect("sockets");
    let (one, two) = (memory(4096), memory(8192));
    one.copy_from(0, b"one").expect("it fits");
    descriptors::send(&here, b"hello", &[one.fd(), two.fd()]).expect("sent");
    let mut payload = [0; 64];
    let (bytes, fds) = descriptors::recv(&there, &mut payload).expect("received");
    assert_eq!(&payload[..bytes], b"hello");
    let [first, _]: [OwnedFd; 2] = fds.try_into().expect("two");
    let copy = SharedMemory::from_fd(first, 4096, Access::ReadOnly).expect("mapped");
    let mut bytes = [0; 3];
    copy.copy_to(0, &mut bytes).expect("it fits");
    assert_eq!(&bytes, b"one");

    assert!(matches!(descriptors::send(&here, b"", &[]), Err(DescriptorError::Empty)));
    let many = vec![one.fd(); 17];
    assert!(matches!(descriptors::send(&here, b"x", &many), Err(DescriptorError::TooMany(17))));
    there.set_nonblocking(true).expect("set");
    let nothing = descriptors::recv(&there, &mut payload);
    assert!(matches!(nothing, Err(DescriptorError::WouldBlock)));
    drop(here);
    let closed = descriptors::recv(&there, &mut payload);
    assert!(matches!(closed, Err(DescriptorError::Closed)));
}

#[test]
fn the_end_of_a_process_is_seen() {
    let mut child = Command::new("sleep").arg("100").spawn().expect("spawned");
    let process = Process::open(child.id()).expect("alive");
    assert_eq!(process.id(), child.id());
    assert!(!process.has_exited());
    child.kill().expect("killed");
    assert!(process.wait_exit(Duration::from_secs(10)));
    child.wait().expect("reaped");
    assert!(process.has_exited(), "also when nothing is left of it");
    assert!(matches!(Process::open(child.id()), Err(ProcessError::Gone)));
    assert!(matches!(Process::open(0), Err(ProcessError::BadId(0))));
    assert!(matches!(Process::open(u32::MAX), Err(ProcessError::BadId(u32::MAX))));
    let _ = process.fd().as_fd();
}
