//! What the transfer engine would use, and why. Of RDMA devices it is asked itself.

use kvasir_transfer::{RdmaDevices, rdma_devices};
use kvasir_transfer_libfabric::library::Library as Libfabric;

use super::devices::Devices;
use super::report::{Finding, Section};

pub(super) fn section(found: &Devices) -> Section {
    let mut findings = vec![Finding::good(
        "same host",
        "shm: maps the peer's memory and copies once per write; falls back to tcp if the processes do \
         not share a file system and a kernel boot",
    )];
    findings.push(other_hosts(found, &rdma_devices()));
    Section { title: "transports that the transfer engine would use", findings }
}

fn other_hosts(found: &Devices, by_verbs: &Result<RdmaDevices, String>) -> Finding {
    let mut active =
        found.rdma.iter().filter(|device| device.ports.iter().any(|port| port.is_active));
    let efa = active.clone().find(|device| device.driver == "efa");
    let what = "other hosts";
    match (by_verbs, efa) {
        (Ok(RdmaDevices { usable, .. }), _) if !usable.is_empty() => {
            let others = match usable.len() {
                1 => String::new(),
                all => format!(
                    "; with `devices = [\"all\"]` in `[verbs]` it uses all {all} ({}), and each write uses \
                     those near its memory",
                    usable.join(", ")
                ),
            };
            let first = &usable[0];
            Finding::advice(
                what,
                format!(
                    "verbs over {first} if a store node's `transport` is \"verbs\" (`kvasir up --transport \
                     verbs`){others}; otherwise, and to peers that verbs does not reach, tcp",
                ),
            )
        }
        (_, Some(efa)) => by_efa(&efa.name),
        (Ok(RdmaDevices { unusable, .. }), None) if !unusable.is_empty() => {
            Finding::good(what, format!("tcp: {}", unusable.join("; ")))
        }
        (Err(unavailable), None) if active.next().is_some() => Finding::advice(
            what,
            format!("tcp, although this host has an RDMA device: {unavailable}"),
        ),
        _ => Finding::good(what, "tcp: no RDMA device has an active port"),
    }
}

fn by_efa(device: &str) -> Finding {
    match Libfabric::open() {
        Err(unavailable) => Finding::advice(
            "other hosts",
            format!("tcp, although this host has {device}: {unavailable}"),
        ),
        Ok(_) => Finding::advice(
            "other hosts",
            format!(
                "efa over {device} if a store node's `transport` is \"efa\"; otherwise, and to peers that \
                 efa does not reach, tcp"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::devices::{Port, RdmaDevice};

    fn host(driver: &str, is_active: bool) -> Devices {
        let (link_layer, rate) = ("Ethernet".to_owned(), "100 Gb/sec".to_owned());
        let port = Port { number: 1, is_active, link_layer, rate, gid: None };
        let (name, driver) = ("card_0".to_owned(), driver.to_owned());
        let device = RdmaDevice { name, driver, ports: vec![port] };
        Devices { rdma: vec![device], ..Devices::default() }
    }

    fn verbs(usable: &[&str], unusable: &[&str]) -> Result<RdmaDevices, String> {
        let all = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Ok(RdmaDevices { usable: all(usable), unusable: all(unusable) })
    }

    #[test]
    fn what_the_engine_would_take_is_named_and_how_to_have_all() {
        let one = other_hosts(&host("mlx5_core", true), &verbs(&["card_1"], &[])).detail;
        assert!(one.starts_with("verbs over card_1 if a") && !one.contains("all"), "{one}");
        let two = other_hosts(&host("mlx5_core", true), &verbs(&["card_1", "card_0"], &[])).detail;
        assert!(two.starts_with("verbs over card_1 if a"), "{two}");
        assert!(two.contains("it uses all 2 (card_1, card_0)"), "{two}");
    }

    #[test]
    fn where_it_would_take_none_it_is_said_why() {
        let no_library = || Err("libibverbs.so.1 is missing".to_owned());
        let says = |driver, is_active, verbs| other_hosts(&host(driver, is_active), &verbs).detail;
        let iwarp = says("siw", true, verbs(&[], &["siw0 is not an InfiniBand or RoCE device"]));
        assert_eq!(iwarp, "tcp: siw0 is not an InfiniBand or RoCE device");
        let missing = says("mlx5_core", true, no_library());
        assert_eq!(
            missing,
            "tcp, although this host has an RDMA device: libibverbs.so.1 is missing"
        );
        for nothing in [no_library(), verbs(&[], &[])] {
            let down = says("mlx5_core", false, nothing);
            assert!(down.starts_with("tcp: no RDMA device"), "{down}");
        }
        for by_verbs in [no_library(), verbs(&[], &["card_0 is not an InfiniBand or RoCE device"])]
        {
            let efa = says("efa", true, by_verbs);
            let is_chosen = efa.starts_with("efa over card_0 if a");
            assert!(is_chosen || efa.starts_with("tcp, although this host has card_0"), "{efa}");
        }
    }
}
