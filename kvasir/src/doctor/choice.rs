//! What the transfer engine would use, and why: the same order of preference as the engine's own.

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
    // EFA is no device for reliable queue pairs.
    let is_usable = |device: &&RdmaDevice| {
        device.driver != "efa" && device.ports.iter().any(|port| port.is_active)
    };
    match found.rdma.iter().find(is_usable) {
        Some(device) => Finding::advice(
            "other hosts",
            format!(
                "verbs, by {}, when a store node's `domain` is \"verbs\" (`kvasir up --domain verbs`); \
                 otherwise, and to peers that it does not reach, tcp",
                device.name
            ),
        ),
        None => Finding::good("other hosts", "tcp: there is no RDMA device with an active port"),
    }
}
