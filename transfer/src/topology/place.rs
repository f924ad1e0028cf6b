//! On which NUMA node memory of this process lies, as `/proc/self/numa_maps` says it. Walking that file
//! costs time in proportion to what is mapped; it is read when memory is registered, never on a hot path,
//! and not at all where there is one node.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use super::{Location, sysfs};
use crate::memory::SharedMemory;

/// `None` when the system does not say, or pages of the memory lie on several nodes, or none is present.
pub(crate) fn location_of(memory: &SharedMemory) -> Option<Location> {
    let nodes = sysfs::numa_nodes(Path::new("/"));
    if let [node] = nodes.as_slice() {
        return Some(Location::Cpu { node: *node });
    }
    let maps = BufReader::new(File::open("/proc/self/numa_maps").ok()?);
    let node = node_of(maps, memory.as_ptr() as usize)?;
    Some(Location::Cpu { node })
}

/// The one node on which all present pages of the mapping that begins at `base` lie.
fn node_of(maps: impl BufRead, base: usize) -> Option<u32> {
    let begins_at = |line: &String| {
        let address = line.split(' ').next()?;
        Some(usize::from_str_radix(address, 16).ok()? == base)
    };
    let line = maps.lines().map_while(Result::ok).find(|line| begins_at(line) == Some(true))?;
    // `N1=4096` is how many pages lie on node 1.
    let on_node = |word: &str| {
        let (node, pages) = word.strip_prefix('N')?.split_once('=')?;
        (pages != "0").then_some(node.parse().ok()?)
    };
    let mut nodes = line.split(' ').filter_map(on_node);
    let first = nodes.next()?;
    nodes.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_lies_on_a_node_when_all_of_its_pages_do() {
        let maps = "\
7f0000000000 default file=/memfd:a\\040(deleted) dirty=3 N0=3 kernelpagesize_kB=4
7f0000100000 default file=/memfd:b dirty=8 N0=2 N1=6 kernelpagesize_kB=4
7f0000200000 default file=/memfd:c
7f0000300000 bind:1 file=/memfd:d dirty=512 N1=512 kernelpagesize_kB=2048
";
        let check = |base, expected| assert_eq!(node_of(maps.as_bytes(), base), expected);
        check(0x7f00_0000_0000, Some(0));
        check(0x7f00_0010_0000, None);
        check(0x7f00_0020_0000, None);
        check(0x7f00_0030_0000, Some(1));
        check(0x7f00_0040_0000, None);
    }
}
