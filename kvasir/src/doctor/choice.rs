//! What the transfer engine would use, and why: the same order of preference as the engine's own.

use kvasir_transfer_libfabric::library::Library as Libfabric;
use kvasir_transfer_verbs::Library;

use super::devices::{Devices, RdmaDevice};
use super::report::{Finding, Section};

pub fn section(found: &Devices) -> Section {
    let mut findings = vec![Finding::good(
        "same host",
        "shm: the peer's memory is mapped, a write is one copy; falls back to tcp where processes do \
         not share a file system and a boot of the kernel",
    )];
    findings.push(other_hosts(found));
    Section { title: "what the transfer engine would choose", findings }
}

fn other_hosts(found: &Devices) -> Finding {
    let active = found.rdma.iter().filter(|device| device.ports.iter().any(|port| port.is_active));
    // EFA is no device for reliable queue pairs.
    let (efa, others): (Vec<&RdmaDevice>, Vec<_>) =
        active.partition(|device| device.driver == "efa");
    let usable: Vec<&str> = others.iter().map(|device| device.name.as_str()).collect();
    if let (true, Some(first)) = (usable.is_empty(), efa.first()) {
        return by_efa(&first.name);
    }
    match usable.first().map(|first| (first, Library::open())) {
        Some((_, Err(unavailable))) => {
            Finding::advice("other hosts", format!("tcp, though there is a device: {unavailable}"))
        }
        Some((first, Ok(_))) => {
            let others = match usable.len() {
                1 => String::new(),
                all => format!(
                    "; by all {all} ({}) with `devices = [\"all\"]` below `[verbs]`, each write by \
                     those that are near to its memory",
                    usable.join(", ")
                ),
            };
            Finding::advice(
                "other hosts",
                format!(
                    "verbs, by {first}, when a store node's `domain` is \"verbs\" (`kvasir up --domain \
                     verbs`){others}; otherwise, and to peers that it does not reach, tcp",
                ),
            )
        }
        None => Finding::good("other hosts", "tcp: there is no RDMA device with an active port"),
    }
}

fn by_efa(device: &str) -> Finding {
    match Libfabric::open() {
        Err(unavailable) => {
            Finding::advice("other hosts", format!("tcp, though there is {device}: {unavailable}"))
        }
        Ok(_) => Finding::advice(
            "other hosts",
            format!(
                "efa, by {device}, when a store node's `domain` is \"efa\"; otherwise, and to peers that \
                 it does not reach, tcp"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::devices::Port;

    fn chosen(driver: &str, is_active: bool) -> String {
        let (link_layer, rate) = ("Ethernet".to_owned(), "100 Gb/sec".to_owned());
        let port = Port { number: 1, is_active, link_layer, rate, gid: None };
        let (name, driver) = ("card_0".to_owned(), driver.to_owned());
        let device = RdmaDevice { name, driver, ports: vec![port] };
        other_hosts(&Devices { rdma: vec![device], ..Devices::default() }).says
    }

    #[test]
    fn an_active_device_is_chosen_or_it_is_said_what_is_missing() {
        let says = chosen("mlx5_core", true);
        let is_chosen = says.starts_with("verbs, by card_0");
        assert!(is_chosen || says.contains("libibverbs"), "{says}");
        let says = chosen("efa", true);
        let is_chosen = says.starts_with("efa, by card_0");
        assert!(is_chosen || says.starts_with("tcp, though there is card_0"), "{says}");
        for driver in ["mlx5_core", "efa"] {
            let says = chosen(driver, false);
            assert!(says.starts_with("tcp: there is no RDMA device"), "{says}");
        }
    }
}
