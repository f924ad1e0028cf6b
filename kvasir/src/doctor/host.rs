//! The host itself: cores, memory, limits of this process, what the kernel allows.

use std::io;
use std::path::Path;

use kvasir_store_node::try_io_uring;
use rustix::process::{Resource, getrlimit};

use super::files::{folders, word};
use super::pages;
use super::report::{Finding, Section};
use crate::memory;

/// Descriptors that a daemon with its connections may need.
const FILES_WANTED: u64 = 4096;

pub(super) fn section(root: &Path) -> Section {
    let mut findings = vec![kernel(root), cores(root), memory_left()];
    findings.extend(pages::findings(root));
    findings.push(locked_memory(getrlimit(Resource::Memlock).current));
    findings.push(open_files(getrlimit(Resource::Nofile).current));
    findings.push(io_uring(root, try_io_uring()));
    Section { title: "host", findings }
}

fn kernel(root: &Path) -> Finding {
    let release = word(&root.join("proc/sys/kernel/osrelease")).unwrap_or_else(|| "unknown".into());
    Finding::good("kernel", format!("Linux {release}"))
}

fn cores(root: &Path) -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let nodes = folders(&root.join("sys/devices/system/node"), "node").len().max(1);
    let says = format!("{cores} usable, {nodes} NUMA node{}", if nodes == 1 { "" } else { "s" });
    if cores < 2 {
        return Finding::advice(
            "cores",
            format!("{says}; a store node and an engine need one each"),
        );
    }
    Finding::good("cores", says)
}

fn memory_left() -> Finding {
    match memory::available_bytes() {
        u64::MAX => Finding::advice("memory", "the system does not report the available memory"),
        bytes => Finding::good("memory", format!("{:.1} GiB available", gib(bytes))),
    }
}

fn locked_memory(limit: Option<u64>) -> Finding {
    match limit {
        None => Finding::good("locked memory", "unlimited"),
        Some(bytes) => Finding::advice(
            "locked memory",
            format!(
                "{} KiB: RDMA devices need the whole DRAM cache locked; set `ulimit -l unlimited` or \
                 LimitMEMLOCK=infinity",
                bytes >> 10
            ),
        ),
    }
}

fn open_files(limit: Option<u64>) -> Finding {
    match limit {
        Some(files) if files < FILES_WANTED => Finding::advice(
            "open files",
            format!("{files}: many connections need more; set `ulimit -n {FILES_WANTED}` or more"),
        ),
        Some(files) => Finding::good("open files", files.to_string()),
        None => Finding::good("open files", "unlimited"),
    }
}

/// What a store node will find: it asks in the same way.
fn io_uring(root: &Path, tried: io::Result<()>) -> Finding {
    const PLAIN: &str = "the store node accesses the SSD with blocking calls, one at a time";
    let Err(error) = tried else {
        return Finding::good("io_uring", "allowed: the store node uses it for the SSD");
    };
    match word(&root.join("proc/sys/kernel/io_uring_disabled")).as_deref() {
        // Kernels that have it may lack this file, but then they do not refuse it in this way.
        None if error.kind() == io::ErrorKind::Unsupported => {
            Finding::absent("io_uring", format!("this kernel does not support it: {PLAIN}"))
        }
        Some("1" | "2") => Finding::advice(
            "io_uring",
            format!("disabled: {PLAIN}; enable it with `sysctl kernel.io_uring_disabled=0`"),
        ),
        _ => Finding::advice(
            "io_uring",
            format!(
                "denied to this process ({error}), although the kernel has not disabled it: {PLAIN}; a seccomp \
                 profile such as RuntimeDefault of Kubernetes does this"
            ),
        ),
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1u32 << 30)
}

#[cfg(test)]
mod tests {
    use super::super::files::root_with as machine;
    use super::super::report::FindingStatus;
    use super::*;

    fn check(finding: Finding, standing: FindingStatus, word: &str) {
        assert_eq!(finding.status, standing, "{finding:?}");
        assert!(finding.detail.contains(word), "{finding:?}");
    }

    #[test]
    fn limits_that_are_too_low_say_how_to_raise_them() {
        check(locked_memory(Some(65_536)), FindingStatus::Advice, "64 KiB");
        check(locked_memory(None), FindingStatus::Good, "unlimited");
        check(open_files(Some(1024)), FindingStatus::Advice, "ulimit -n 4096");
        check(open_files(Some(1 << 20)), FindingStatus::Good, "1048576");
    }

    #[test]
    fn io_uring_is_what_this_process_gets_and_not_what_the_kernel_allows() {
        let refused = |number| Err(io::Error::from_raw_os_error(number));
        let (not_permitted, no_such_call) = (1, 38);
        let old: io::Result<()> = Err(io::ErrorKind::Unsupported.into());
        let of = |switch| machine(&[("proc/sys/kernel/io_uring_disabled", switch)]);
        let (without, on, off) = (machine(&[]), of("0\n"), of("2\n"));
        check(io_uring(without.path(), Ok(())), FindingStatus::Good, "allowed");
        check(io_uring(on.path(), Ok(())), FindingStatus::Good, "allowed");
        check(io_uring(off.path(), refused(not_permitted)), FindingStatus::Advice, "sysctl");
        check(io_uring(on.path(), refused(not_permitted)), FindingStatus::Advice, "seccomp");
        check(io_uring(on.path(), refused(no_such_call)), FindingStatus::Advice, "seccomp");
        check(io_uring(without.path(), refused(not_permitted)), FindingStatus::Advice, "seccomp");
        check(
            io_uring(without.path(), refused(no_such_call)),
            FindingStatus::Absent,
            "blocking calls",
        );
        check(io_uring(without.path(), old), FindingStatus::Absent, "blocking calls");
    }
}
