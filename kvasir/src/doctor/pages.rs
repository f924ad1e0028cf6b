//! Pages that memory shared between processes lies in: reserved ones, those that the kernel makes by itself, and
//! what the arenas of this host have.

use std::collections::BTreeSet;
use std::path::Path;

use kvasir_transfer::memory::{HUGE_PAGE_BYTES, Pages, SharedMemory};

use super::files::{entries, folders, word};
use super::report::Finding;

/// The folder of the pages that are used.
const USED: &str = "hugepages-2048kB";
/// As `/proc/PID/maps` has the memory of a store node.
const ARENA: &str = "memfd:kvasir-slots";

pub(super) fn findings(root: &Path) -> Vec<Finding> {
    let mut findings = vec![reserved(root, one_page), by_themselves(root)];
    findings.extend(arenas(root));
    findings
}

/// Whether this process gets one.
fn one_page() -> bool {
    SharedMemory::create_large("kvasir-doctor", HUGE_PAGE_BYTES)
        .is_ok_and(|memory| memory.pages() == Pages::Huge)
}

fn reserved(root: &Path, is_given_one: impl FnOnce() -> bool) -> Finding {
    let mut counts = Vec::new();
    let mut left = None;
    for folder in folders(&root.join("sys/kernel/mm/hugepages"), "hugepages-") {
        let read = |file: &str| -> u64 {
            let path = format!("sys/kernel/mm/hugepages/{folder}/{file}");
            word(&root.join(path)).and_then(|text| text.parse().ok()).unwrap_or(0)
        };
        let (all, free) = (read("nr_hugepages"), read("free_hugepages"));
        if all > 0 {
            let size = folder.trim_start_matches("hugepages-");
            counts.push(format!("{free} of {all} pages of {size} are free"));
        }
        if all > 0 && folder == USED {
            // Some that are free are set aside for memory that exists.
            left = Some(free.saturating_sub(read("resv_hugepages")));
        }
    }
    let counts = counts.join(", ");
    match left {
        None => {
            let says = "no pages of 2 MiB are reserved: the DRAM cache uses ordinary pages, and a NIC must map many of \
                        them; before the store node starts, reserve `dram_bytes` / 2 MiB pages with \
                        `sysctl vm.nr_hugepages=N`";
            Finding::absent("hugepages", says)
        }
        Some(0) => Finding::good("hugepages", counts),
        Some(_) if !is_given_one() => Finding::advice(
            "hugepages",
            format!(
                "{counts}, but this process cannot allocate one: the limit of its cgroup (`hugetlb.2MB.max`) is \
                 too low, and a DRAM cache in this cgroup would use ordinary pages"
            ),
        ),
        Some(pages) => {
            let mib = pages * (HUGE_PAGE_BYTES as u64 >> 20);
            let says = format!(
                "{counts}: a DRAM cache of up to {mib} MiB uses them if its size is a multiple of 2 MiB"
            );
            Finding::good("hugepages", says)
        }
    }
}

fn by_themselves(root: &Path) -> Finding {
    let mode =
        word(&root.join("sys/kernel/mm/transparent_hugepage/shmem_enabled")).unwrap_or_default();
    let chosen = mode.split(['[', ']']).nth(1).unwrap_or("unknown");
    match chosen {
        "always" | "within_size" | "advise" | "force" => {
            Finding::good("large pages", format!("enabled for shared memory ({chosen})"))
        }
        _ => Finding::advice(
            "large pages",
            "disabled for shared memory; enable them with `echo advise > \
             /sys/kernel/mm/transparent_hugepage/shmem_enabled`, or reserve huge pages",
        ),
    }
}

/// What the arenas of store nodes that run here lie in, as far as this user may look into processes. Engines and
/// clients map the arena too: each is told once.
fn arenas(root: &Path) -> Option<Finding> {
    let mut seen = BTreeSet::new();
    let mut found = Vec::new();
    let mut processes: Vec<u32> =
        entries(&root.join("proc")).iter().filter_map(|name| name.parse().ok()).collect();
    processes.sort_unstable();
    for process in processes {
        let of = root.join("proc").join(process.to_string());
        // What is cheap to read first: the other file counts pages.
        if word(&of.join("maps")).is_some_and(|maps| maps.contains(ARENA)) {
            let maps = word(&of.join("smaps")).unwrap_or_default();
            let new = mappings(&maps).filter(|arena| seen.insert(arena.inode.clone()));
            found.extend(new.map(|arena| {
                let Mapping { kib, page_kib, .. } = arena;
                format!("{kib} kB in pages of {page_kib} kB (process {process})")
            }));
        }
    }
    (!found.is_empty()).then(|| Finding::good("arenas", found.join(", ")))
}

struct Mapping {
    inode: String,
    kib: u64,
    page_kib: u64,
}

/// The arenas among what `/proc/PID/smaps` says.
fn mappings(smaps: &str) -> impl Iterator<Item = Mapping> {
    let is_head = |line: &&str| line.contains(ARENA);
    let heads = smaps.lines().enumerate().filter(move |(_, line)| is_head(line));
    heads.filter_map(|(at, head)| {
        let number = |name: &str| -> Option<u64> {
            let line = smaps.lines().skip(at + 1).find_map(|line| line.strip_prefix(name))?;
            line.trim().trim_end_matches("kB").trim().parse().ok()
        };
        let inode = head.split_whitespace().nth(4)?.to_owned();
        Some(Mapping { inode, kib: number("Size:")?, page_kib: number("KernelPageSize:")? })
    })
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

    fn pages(counts: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = "sys/kernel/mm/hugepages/hugepages-2048kB";
        let files: Vec<(String, &str)> =
            counts.iter().map(|(file, text)| (format!("{folder}/{file}"), *text)).collect();
        let files: Vec<(&str, &str)> =
            files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        machine(&files)
    }

    #[test]
    fn reserved_pages_are_counted_by_size() {
        check(reserved(pages(&[]).path(), || true), FindingStatus::Absent, "vm.nr_hugepages");
        let root = pages(&[("nr_hugepages", "8\n"), ("free_hugepages", "5\n")]);
        check(reserved(root.path(), || true), FindingStatus::Good, "5 of 8 pages of 2048kB");
        check(reserved(root.path(), || true), FindingStatus::Good, "up to 10 MiB");
        check(reserved(root.path(), || false), FindingStatus::Advice, "cgroup");
        let aside = [("nr_hugepages", "8"), ("free_hugepages", "5"), ("resv_hugepages", "4")];
        check(reserved(pages(&aside).path(), || true), FindingStatus::Good, "up to 2 MiB");
        let taken = [("nr_hugepages", "8"), ("free_hugepages", "0")];
        check(reserved(pages(&taken).path(), || false), FindingStatus::Good, "0 of 8");
    }

    #[test]
    fn pages_of_another_size_are_of_no_use() {
        let path = "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages";
        let root = machine(&[(path, "8\n")]);
        check(reserved(root.path(), || true), FindingStatus::Absent, "no pages of 2 MiB");
    }

    #[test]
    fn whether_shared_memory_gets_large_pages_is_read() {
        let path = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
        let root = machine(&[(path, "always within_size [advise] never deny force\n")]);
        check(by_themselves(root.path()), FindingStatus::Good, "advise");
        let root = machine(&[(path, "always within_size advise [never] deny force\n")]);
        check(by_themselves(root.path()), FindingStatus::Advice, "shmem_enabled");
    }

    #[test]
    fn each_arena_is_told_once_with_its_pages() {
        assert_eq!(arenas(machine(&[("proc/7/maps", "")]).path()), None);
        let head = |inode: u32| {
            format!("7f0-7f8 rw-s 00000000 00:01 {inode}   /memfd:kvasir-slots (deleted)\n")
        };
        let of = |inode, page: u32| {
            let other = "7a0-7a1 rw-p 0 00:00 0\nSize: 4 kB\nKernelPageSize: 8 kB\n";
            let (head, sizes) =
                (head(inode), format!("Size:  4096 kB\nKernelPageSize:  {page} kB"));
            format!("{other}{head}{sizes}\n{other}")
        };
        let root = machine(&[
            ("proc/12/maps", &head(1)),
            ("proc/12/smaps", &of(1, 2048)),
            ("proc/9/maps", &head(1)),
            ("proc/9/smaps", &of(1, 2048)),
            ("proc/self/maps", &head(3)),
            ("proc/13/maps", &head(2)),
            ("proc/13/smaps", &of(2, 4)),
        ]);
        let found = arenas(root.path()).unwrap();
        let says = "4096 kB in pages of 2048 kB (process 9), 4096 kB in pages of 4 kB (process 13)";
        assert_eq!(found, Finding::good("arenas", says));
    }
}
