//! What the transfer engine would use, and why: the same order of preference as the engine's own.

use super::devices::Devices;
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
    let usable = found.rdma.iter().any(|device| device.ports.iter().any(|port| port.is_active));
    if usable {
        return Finding::advice(
            "other hosts",
            "tcp: the transfer engine does not use RDMA devices yet, though there is an active one",
        );
    }
    Finding::good("other hosts", "tcp: there is no RDMA device with an active port")
}
