//! How much memory there is for a cluster: the least of what the machine and every control group
//! around this process have left. Page cache that can be dropped does not count as used.

use std::path::{Path, PathBuf};

/// A machine that does not say has enough: the arena is touched at the start, and its failure is
/// said there.
pub(crate) fn available_bytes() -> u64 {
    available_below(Path::new("/")).unwrap_or(u64::MAX)
}

/// Reserved pages of 2 MiB that nobody has, which arenas take first and which do not count as available.
pub(crate) fn reserved_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    reserved_in(&text)
}

fn reserved_in(meminfo: &str) -> u64 {
    let field = |key: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let pages = || Some(field("HugePages_Free:")?.saturating_sub(field("HugePages_Rsvd:")?));
    // Those of the host's usual size for them; reserved pages of another size are not used.
    let is_used = field("Hugepagesize:") == Some(2048);
    if is_used { pages().unwrap_or(0).saturating_mul(2 << 20) } else { 0 }
}

fn available_below(root: &Path) -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(root.join(path)).ok();
    let machine = read("proc/meminfo").and_then(|text| meminfo_bytes(&text, "MemAvailable:"));
    let groups = read("proc/self/cgroup").unwrap_or_default();
    let groups =
        groups.lines().flat_map(|line| match line.splitn(3, ':').collect::<Vec<_>>()[..] {
            ["0", "", path] => folders(&root.join("sys/fs/cgroup"), path, &VERSION_2),
            [_, controllers, path] if controllers.split(',').any(|name| name == "memory") => {
                folders(&root.join("sys/fs/cgroup/memory"), path, &VERSION_1)
            }
            _ => Vec::new(),
        });
    machine.into_iter().chain(groups.filter_map(|(folder, files)| files.left(&folder))).min()
}

/// The group and all groups around it. In a container the path may be that of the host, of which
/// only the mount's root is to be seen.
fn folders<'a>(mount: &Path, path: &str, files: &'a Files) -> Vec<(PathBuf, &'a Files)> {
    let path = Path::new(path.trim_start_matches('/'));
    path.ancestors().map(|ancestor| (mount.join(ancestor), files)).collect()
}

/// Where the two versions of control groups say the same things.
struct Files {
    limit: &'static str,
    used: &'static str,
    dropped_first: [&'static str; 2],
}

const VERSION_1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    dropped_first: ["total_inactive_file ", "total_active_file "],
};
const VERSION_2: Files = Files {
    limit: "memory.max",
    used: "memory.current",
    dropped_first: ["inactive_file ", "active_file "],
};

impl Files {
    /// None where there is no such group, or no limit.
    fn left(&self, folder: &Path) -> Option<u64> {
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
        let limit: u64 = read(self.limit)?.trim().parse().ok()?;
        let used: u64 = read(self.used)?.trim().parse().ok()?;
        let stat = read("memory.stat").unwrap_or_default();
        let cache = stat
            .lines()
            .filter_map(|line| self.dropped_first.iter().find_map(|key| line.strip_prefix(key)))
            .filter_map(|bytes| bytes.trim().parse::<u64>().ok())
            .fold(0, u64::saturating_add);
        Some(limit.saturating_sub(used.saturating_sub(cache)))
    }
}

fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 24 kB\nMemAvailable: 12 kB\n");

    fn check(files: &[(&str, &str)], expected: Option<u64>) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        assert_eq!(available_below(root.path()), expected, "{files:?}");
    }

    #[test]
    fn reserved_pages_that_nobody_has_are_counted() {
        let text =
            "HugePages_Total: 9\nHugePages_Free:     5\nHugePages_Rsvd:     2\nHugepagesize:";
        assert_eq!(reserved_in(&format!("{text}   2048 kB\n")), 6 << 20);
        assert_eq!(reserved_in(&format!("{text}   1048576 kB\n")), 0);
        assert_eq!(reserved_in("MemTotal: 24 kB\n"), 0);
    }

    #[test]
    fn without_groups_the_machine_decides() {
        check(&[], None);
        check(&[MEMINFO], Some(12 * 1024));
        check(&[MEMINFO, ("proc/self/cgroup", "0::/\n")], Some(12 * 1024));
        let unlimited = ("sys/fs/cgroup/memory.max", "max\n");
        check(&[MEMINFO, ("proc/self/cgroup", "0::/\n"), unlimited], Some(12 * 1024));
    }

    #[test]
    fn the_tightest_group_around_the_process_decides() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/pod/container\n"),
            ("sys/fs/cgroup/pod/memory.max", "5000"),
            ("sys/fs/cgroup/pod/memory.current", "1000"),
            ("sys/fs/cgroup/pod/container/memory.max", "8000"),
            ("sys/fs/cgroup/pod/container/memory.current", "1000"),
        ];
        check(&files, Some(4000));
    }

    #[test]
    fn page_cache_is_not_used_memory() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "0::/\n"),
            ("sys/fs/cgroup/memory.max", "9000"),
            ("sys/fs/cgroup/memory.current", "8000"),
            ("sys/fs/cgroup/memory.stat", "anon 1000\ninactive_file 4000\nactive_file 3000\n"),
        ];
        check(&files, Some(8000));
    }

    #[test]
    fn the_first_version_of_control_groups_is_read_too() {
        let files = [
            MEMINFO,
            ("proc/self/cgroup", "9:cpu,memory:/host/path\n1:cpuset:/\n0::/\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9000"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "8000"),
            ("sys/fs/cgroup/memory/memory.stat", "inactive_file 1\ntotal_inactive_file 4000\n"),
        ];
        check(&files, Some(5000));
    }
}
