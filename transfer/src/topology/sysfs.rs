//! Reads the matrix from `/sys`: RDMA devices below `class/infiniband`, GPUs among the PCI devices,
//! NUMA nodes. Nothing here fails: what cannot be read is not there.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Location, Preference, Topology};

const NVIDIA: &str = "0x10de";
/// PCI classes of graphics (0x03…): VGA controllers and 3D controllers.
const GRAPHICS: &str = "0x03";

/// A device with its place in the machine.
#[derive(Debug)]
struct Placed {
    name: String,
    /// None where the firmware does not say, as on machines with one node.
    node: Option<u32>,
    /// The bridges above it and itself, from the root complex down.
    pci: Vec<String>,
}

pub(super) fn read(root: &Path) -> Topology {
    let devices = rdma_devices(root);
    if devices.is_empty() {
        return Topology::default();
    }
    let cpus = numa_nodes(root).into_iter().map(|node| {
        let is_near = |device: &Placed| device.node.is_none_or(|of| of == node);
        (Location::Cpu { node }, split(&devices, is_near))
    });
    let gpus = gpus(root);
    let gpus = gpus.iter().zip(0u32..).map(|(gpu, index)| {
        let nearest = devices.iter().map(|device| nearness(gpu, device)).max();
        let is_near = |device: &Placed| Some(nearness(gpu, device)) == nearest;
        (Location::Gpu { index }, split(&devices, is_near))
    });
    Topology { locations: cpus.chain(gpus).collect() }
}

fn split(devices: &[Placed], is_near: impl Fn(&Placed) -> bool) -> Preference {
    let (near, far): (Vec<_>, Vec<_>) = devices.iter().partition(|device| is_near(device));
    let names = |devices: Vec<&Placed>| devices.iter().map(|of| of.name.clone()).collect();
    Preference { preferred: names(near), secondary: names(far) }
}

/// The greater the nearer: first whether both hang on the same NUMA node, then how many bridges they
/// share.
fn nearness(gpu: &Placed, device: &Placed) -> (bool, usize) {
    let shared = gpu.pci.iter().zip(&device.pci).take_while(|(a, b)| a == b).count();
    (gpu.node == device.node, shared)
}

fn rdma_devices(root: &Path) -> Vec<Placed> {
    let class = root.join("sys/class/infiniband");
    entries(&class)
        .into_iter()
        .map(|name| placed(&class.join(&name).join("device"), name))
        .collect()
}

fn gpus(root: &Path) -> Vec<Placed> {
    let bus = root.join("sys/bus/pci/devices");
    let is_gpu = |address: &String| {
        let says = |file: &str| word(&bus.join(address).join(file)).unwrap_or_default();
        says("vendor") == NVIDIA && says("class").starts_with(GRAPHICS)
    };
    let addresses = entries(&bus).into_iter().filter(is_gpu);
    addresses.map(|address| placed(&bus.join(&address), address)).collect()
}

fn placed(device: &Path, name: String) -> Placed {
    let node = word(&device.join("numa_node")).and_then(|node| node.parse::<u32>().ok());
    let real = device.canonicalize().unwrap_or_default();
    let pci = real.components().map(|part| part.as_os_str().to_string_lossy().into_owned());
    Placed { name, node, pci: pci.filter(|part| is_pci(part)).collect() }
}

/// `pci0000:00` (a root complex) or `0000:3b:00.0`.
fn is_pci(part: &str) -> bool {
    part.contains(':')
}

pub(super) fn numa_nodes(root: &Path) -> Vec<u32> {
    let number = |name: &String| name.strip_prefix("node")?.parse().ok();
    let mut nodes: Vec<u32> =
        entries(&root.join("sys/devices/system/node")).iter().filter_map(number).collect();
    nodes.sort_unstable();
    if nodes.is_empty() { vec![0] } else { nodes }
}

fn entries(folder: &Path) -> Vec<String> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let name = |path: PathBuf| Some(path.file_name()?.to_string_lossy().into_owned());
    let mut names: Vec<String> = paths.filter_map(name).collect();
    names.sort();
    names
}

fn word(file: &Path) -> Option<String> {
    Some(fs::read_to_string(file).ok()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine whose `/sys` lies below a temporary folder.
    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new(nodes: u32) -> Self {
            let machine = Machine(tempfile::tempdir().unwrap());
            for node in 0..nodes {
                fs::create_dir_all(machine.path(&format!("sys/devices/system/node/node{node}")))
                    .unwrap();
            }
            machine
        }

        fn path(&self, below: &str) -> PathBuf {
            self.0.path().join(below)
        }

        fn pci(&self, bridges: &str, address: &str, facts: &[(&str, &str)]) -> PathBuf {
            let device = self.path(&format!("sys/devices/{bridges}/{address}"));
            fs::create_dir_all(&device).unwrap();
            for (file, text) in facts {
                fs::write(device.join(file), format!("{text}\n")).unwrap();
            }
            let bus = self.path("sys/bus/pci/devices");
            fs::create_dir_all(&bus).unwrap();
            std::os::unix::fs::symlink(&device, bus.join(address)).unwrap();
            device
        }

        fn nic(&self, name: &str, bridges: &str, address: &str, node: &str) {
            let facts = [("vendor", "0x15b3"), ("class", "0x020700"), ("numa_node", node)];
            let device = self.pci(bridges, address, &facts);
            let class = self.path(&format!("sys/class/infiniband/{name}"));
            fs::create_dir_all(&class).unwrap();
            std::os::unix::fs::symlink(device, class.join("device")).unwrap();
        }

        fn gpu(&self, bridges: &str, address: &str, node: &str) {
            let facts = [("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", node)];
            self.pci(bridges, address, &facts);
        }

        fn check(&self, expected: &str) {
            assert_eq!(read(self.0.path()).to_json(), expected);
        }
    }

    #[test]
    fn a_machine_without_rdma_devices_has_an_empty_matrix() {
        Machine::new(2).check("{}");
    }

    #[test]
    fn devices_of_the_same_node_come_first() {
        let machine = Machine::new(2);
        machine.nic("mlx5_0", "pci0000:00", "0000:01:00.0", "0");
        machine.nic("mlx5_1", "pci0000:80", "0000:81:00.0", "1");
        machine.check(
            r#"{"cpu:0":{"preferred":["mlx5_0"],"secondary":["mlx5_1"]},"cpu:1":{"preferred":["mlx5_1"],"secondary":["mlx5_0"]}}"#,
        );
    }

    #[test]
    fn a_device_without_a_node_is_near_all() {
        let machine = Machine::new(1);
        machine.nic("rxe0", "virtual:net", "0000:01:00.0", "-1");
        machine.check(r#"{"cpu:0":{"preferred":["rxe0"],"secondary":[]}}"#);
    }

    #[test]
    fn a_gpu_prefers_the_device_behind_its_own_bridge() {
        let machine = Machine::new(1);
        machine.nic("mlx5_0", "pci0000:00/0000:00:01.0", "0000:01:00.0", "0");
        machine.nic("mlx5_1", "pci0000:00/0000:00:02.0", "0000:02:00.0", "0");
        machine.gpu("pci0000:00/0000:00:02.0", "0000:03:00.0", "0");
        machine.check(
            r#"{"cpu:0":{"preferred":["mlx5_0","mlx5_1"],"secondary":[]},"cuda:0":{"preferred":["mlx5_1"],"secondary":["mlx5_0"]}}"#,
        );
    }
}
