//! Network cards that write into memory, and GPUs, as `/sys` and `/proc` know them.

use std::fs;
use std::path::Path;

use kvasir_transfer::topology::{Location, Preference, Topology};

use super::files::{entries, word};
use super::report::{Finding, Section};

/// Where `/sys` names what a port's first address is good for on Ethernet.
const ROUTABLE: &str = "RoCE v2";

#[derive(Debug, Default)]
pub(super) struct Devices {
    pub rdma: Vec<RdmaDevice>,
    pub gpus: Vec<String>,
    /// Whether network cards can reach into GPU memory through the module for it.
    pub peer_memory: bool,
    pub topology: Topology,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct RdmaDevice {
    pub name: String,
    /// The kernel's driver: `mlx5_core`, `efa`, `rdma_rxe`, …
    pub driver: String,
    pub ports: Vec<Port>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Port {
    pub number: u32,
    pub is_active: bool,
    pub link_layer: String,
    pub rate: String,
    /// The index and the text of the address that a connection would use.
    pub gid: Option<(u32, String)>,
}

pub(super) fn read(root: &Path) -> Devices {
    Devices {
        rdma: rdma_devices(root),
        gpus: gpus(root),
        peer_memory: root.join("sys/module/nvidia_peermem").exists(),
        topology: Topology::read(root),
    }
}

pub(super) fn section(root: &Path, found: &Devices) -> Section {
    let mut findings: Vec<Finding> = found.rdma.iter().map(told).collect();
    if found.rdma.is_empty() {
        let says = "none: other hosts are reached over TCP";
        findings.push(Finding::absent("RDMA", says));
    }
    findings.extend(found.gpus.iter().map(|name| Finding::good("GPU", name.as_str())));
    if found.gpus.is_empty() {
        findings.push(Finding::absent("GPU", "none: the cache is in host memory"));
    } else {
        findings.push(cuda(root));
    }
    Section { title: "devices", findings }
}

/// Which cards are near which memory, as a matrix, and how to write another one.
pub(super) fn topology(found: &Devices) -> Section {
    let row = |(location, near): (Location, &Preference)| {
        let mut says = format!("preferred {}", list(&near.preferred));
        if !near.secondary.is_empty() {
            says.push_str(&format!(", else {}", list(&near.secondary)));
        }
        Finding::good(location.to_string(), says)
    };
    let mut findings: Vec<Finding> = found.topology.locations().map(row).collect();
    if findings.is_empty() {
        let says = "none: this host has no RDMA devices";
        findings.push(Finding::absent("matrix", says));
    } else {
        let says = format!(
            "to replace it, set `topology_file` of the store node to a file with JSON like this: {}",
            found.topology.to_json()
        );
        findings.push(Finding::good("as JSON", says));
    }
    Section { title: "topology: NICs near each memory", findings }
}

fn list(names: &[String]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn told(device: &RdmaDevice) -> Finding {
    let ports: Vec<String> = device.ports.iter().map(Port::told).collect();
    let says = format!("{}; {}", device.driver, ports.join("; "));
    if device.ports.iter().any(|port| port.is_active) {
        return Finding::good(&device.name, says);
    }
    Finding::advice(&device.name, format!("{says}; the transfer engine needs an active port"))
}

impl Port {
    fn told(&self) -> String {
        let state = if self.is_active { "active" } else { "down" };
        let gid = match &self.gid {
            Some((index, text)) => format!("GID {index} {text}"),
            None => "no GID".to_owned(),
        };
        format!("port {} {state}, {}, {}, {gid}", self.number, self.link_layer, self.rate)
    }
}

fn cuda(root: &Path) -> Finding {
    match word(&root.join("proc/driver/nvidia/version")) {
        Some(text) => {
            Finding::good("GPU driver", text.lines().next().unwrap_or_default().to_owned())
        }
        None => Finding::absent("GPU driver", "not loaded: install NVIDIA's driver"),
    }
}

fn rdma_devices(root: &Path) -> Vec<RdmaDevice> {
    let class = root.join("sys/class/infiniband");
    let device = |name: String| {
        let folder = class.join(&name);
        let driver = fs::canonicalize(folder.join("device/driver")).ok();
        let driver = driver.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
        let numbers = entries(&folder.join("ports")).into_iter().filter_map(|n| n.parse().ok());
        let ports = numbers.map(|number| port(&folder.join(format!("ports/{number}")), number));
        RdmaDevice {
            ports: ports.collect(),
            driver: driver.unwrap_or_else(|| "a software device".to_owned()),
            name,
        }
    };
    entries(&class).into_iter().map(device).collect()
}

fn port(folder: &Path, number: u32) -> Port {
    let says = |file: &str| word(&folder.join(file)).unwrap_or_else(|| "unknown".to_owned());
    let mut indices: Vec<u32> =
        entries(&folder.join("gids")).into_iter().filter_map(|name| name.parse().ok()).collect();
    indices.sort_unstable();
    let gids: Vec<(u32, String, bool)> = indices
        .into_iter()
        .filter_map(|index| {
            let gid = word(&folder.join(format!("gids/{index}")))?;
            let kind = word(&folder.join(format!("gid_attrs/types/{index}"))).unwrap_or_default();
            let is_set = gid.chars().any(|c| c != '0' && c != ':');
            is_set.then_some((index, gid, kind == ROUTABLE))
        })
        .collect();
    let chosen = gids.iter().find(|(_, _, routable)| *routable).or(gids.first());
    Port {
        number,
        is_active: says("state").contains("ACTIVE"),
        link_layer: says("link_layer"),
        rate: says("rate"),
        gid: chosen.map(|(index, gid, _)| (*index, gid.clone())),
    }
}

fn gpus(root: &Path) -> Vec<String> {
    let folder = root.join("proc/driver/nvidia/gpus");
    let model = |address: String| {
        let text = word(&folder.join(&address).join("information"))?;
        let model = text.lines().find_map(|line| line.strip_prefix("Model:"))?;
        Some(format!("{} at {address}", model.trim()))
    };
    entries(&folder).into_iter().filter_map(model).collect()
}

#[cfg(test)]
mod tests {
    use super::super::files::root_with as machine;
    use super::*;

    fn says(root: &Path) -> String {
        let section = section(root, &read(root));
        section.findings.iter().map(|of| format!("{}: {}\n", of.item, of.detail)).collect()
    }

    #[test]
    fn a_host_without_devices_says_what_it_does_instead() {
        let text = says(machine(&[]).path());
        assert!(text.contains("RDMA: none: other hosts are reached over TCP"), "{text}");
        assert!(text.contains("GPU: none"), "{text}");
    }

    #[test]
    fn the_address_that_is_routed_is_preferred_and_empty_ones_are_passed_over() {
        let port = "sys/class/infiniband/mlx5_0/ports/1";
        let path = |file: &str| format!("{port}/{file}");
        let files = [
            (path("state"), "4: ACTIVE\n"),
            (path("link_layer"), "Ethernet\n"),
            (path("rate"), "100 Gb/sec (4X EDR)\n"),
            (path("gids/0"), "0000:0000:0000:0000:0000:0000:0000:0000\n"),
            (path("gids/2"), "fe80:0000:0000:0000:0000:0000:0000:0001\n"),
            (path("gids/10"), "0000:0000:0000:0000:0000:ffff:0a00:0001\n"),
            (path("gid_attrs/types/2"), "IB/RoCE v1\n"),
            (path("gid_attrs/types/10"), "RoCE v2\n"),
        ];
        let files: Vec<(&str, &str)> =
            files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
        let root = machine(&files);
        let text = says(root.path());
        let expected = "mlx5_0: a software device; port 1 active, Ethernet, 100 Gb/sec (4X EDR), \
                        GID 10 0000:0000:0000:0000:0000:ffff:0a00:0001\n";
        assert!(text.contains(expected), "{text}");
    }

    #[test]
    fn a_gpu_is_named_with_its_driver_and_whether_cards_reach_it() {
        let root = machine(&[
            (
                "proc/driver/nvidia/gpus/0000:3b:00.0/information",
                "Model: \t\t NVIDIA H200\nIRQ: 1\n",
            ),
            ("proc/driver/nvidia/version", "NVRM version: 570\nGCC version: 12\n"),
        ]);
        let text = says(root.path());
        assert!(text.contains("GPU: NVIDIA H200 at 0000:3b:00.0\n"), "{text}");
        assert!(text.contains("GPU driver: NVRM version: 570\n"), "{text}");
    }

    #[test]
    fn the_matrix_is_told_with_its_json_or_that_there_is_none() {
        let none = topology(&Devices::default());
        assert!(none.findings[0].detail.contains("no RDMA devices"), "{none:?}");
        let cards = ["a".to_owned(), "b".to_owned()];
        let matrix = r#"{"cpu:0":{"preferred":["a"],"secondary":["b"]}}"#;
        let topology_read = Topology::from_json(matrix, &cards).unwrap();
        let told = topology(&Devices { topology: topology_read, ..Devices::default() });
        assert_eq!(told.findings[0], Finding::good("cpu:0", "preferred a, else b"));
        assert!(told.findings[1].detail.contains(matrix), "{told:?}");
    }
}
