//! The host itself: cores, memory, limits of this process, what the kernel allows.

use std::path::Path;

use rustix::process::{Resource, getrlimit};

use super::files::{folders, word};
use super::pages;
use super::report::{Finding, Section};
use crate::memory;

/// Descriptors that a daemon with its connections may need.
const FILES_WANTED: u64 = 4096;

pub fn section(root: &Path) -> Section {
    let mut findings = vec![kernel(root), cores(root), memory_left()];
    findings.extend(pages::findings(root));
    findings.push(locked_memory(getrlimit(Resource::Memlock).current));
    findings.push(open_files(getrlimit(Resource::Nofile).current));
    findings.push(io_uring(root));
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
            format!("{says}; a store node and an engine want one each"),
        );
    }
    Finding::good("cores", says)
}

fn memory_left() -> Finding {
    match memory::available_bytes() {
        u64::MAX => Finding::advice("memory", "the system does not say how much is available"),
        bytes => Finding::good("memory", format!("{:.1} GiB available", gib(bytes))),
    }
}

fn locked_memory(limit: Option<u64>) -> Finding {
    match limit {
        None => Finding::good("locked memory", "unlimited"),
        Some(bytes) => Finding::advice(
            "locked memory",
            format!(
                "{} KiB: RDMA devices need the whole arena locked; set `ulimit -l unlimited` or \
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

fn io_uring(root: &Path) -> Finding {
    match word(&root.join("proc/sys/kernel/io_uring_disabled")).as_deref() {
        None => Finding::absent(
            "io_uring",
            "this kernel does not say that it has it: reads and writes of an SSD are plain calls",
        ),
        Some("0") => Finding::good("io_uring", "allowed by the kernel"),
        Some(_) => Finding::advice(
            "io_uring",
            "switched off: an SSD is slower with plain calls; allow it with `sysctl \
             kernel.io_uring_disabled=0`",
        ),
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1u32 << 30)
}

#[cfg(test)]
mod tests {
    use super::super::files::root_with as machine;
    use super::super::report::Standing;
    use super::*;

    fn check(finding: Finding, standing: Standing, word: &str) {
        assert_eq!(finding.standing, standing, "{finding:?}");
        assert!(finding.says.contains(word), "{finding:?}");
    }

    #[test]
    fn limits_that_are_too_low_say_how_to_raise_them() {
        check(locked_memory(Some(65_536)), Standing::Advice, "64 KiB");
        check(locked_memory(None), Standing::Good, "unlimited");
        check(open_files(Some(1024)), Standing::Advice, "ulimit -n 4096");
        check(open_files(Some(1 << 20)), Standing::Good, "1048576");
    }

    #[test]
    fn what_the_kernel_allows_is_read() {
        let path = "proc/sys/kernel/io_uring_disabled";
        check(io_uring(machine(&[]).path()), Standing::Absent, "plain calls");
        check(io_uring(machine(&[(path, "0\n")]).path()), Standing::Good, "allowed");
        check(io_uring(machine(&[(path, "2\n")]).path()), Standing::Advice, "sysctl");
    }
}
