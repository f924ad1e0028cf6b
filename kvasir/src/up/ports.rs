//! Ports of the cluster. Each is held open from its choice until just before its process starts, and reserved
//! under a name of its own among all `up` of this host for as long as the cluster runs: so two clusters do not choose the same
//! ones, also while a process has not bound its port yet.
//!
//! They are chosen below the kernel's range for outgoing connections where there is room: a
//! child that died is started again on its port, and until then no connection of somebody else
//! may have taken it.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener};

use rand::Rng;

/// Below lie ports that people give to services.
const LOWEST: u16 = 10_000;
/// With fewer ports than this to choose from, the kernel chooses.
const RANGE_MIN: usize = 2_000;
const ATTEMPTS_MAX: usize = 64;

/// Ports that nobody else can take before they are released.
#[derive(Debug, Default)]
pub(super) struct HeldPorts {
    held: Vec<TcpListener>,
    reserved: Vec<UnixListener>,
}

/// Ports that no other `up` takes until this is dropped.
#[derive(Debug)]
pub(super) struct ReservedPorts {
    _reserved: Vec<UnixListener>,
}

impl HeldPorts {
    /// Exactly this port.
    pub(super) fn take(&mut self, port: u16) -> std::io::Result<SocketAddr> {
        self.hold(TcpListener::bind((Ipv4Addr::LOCALHOST, port))?)
    }

    pub(super) fn take_free(&mut self) -> std::io::Result<SocketAddr> {
        let range = LOWEST..lowest_outgoing_port();
        if range.len() >= RANGE_MIN {
            for _ in 0..ATTEMPTS_MAX {
                let port = rand::rng().random_range(range.clone());
                if let Ok(address) = self.take(port) {
                    return Ok(address);
                }
            }
        }
        // The kernel knows nothing of what is reserved and not bound.
        let chosen = (1..ATTEMPTS_MAX).find_map(|_| self.take(0).ok());
        chosen.map_or_else(|| self.take(0), Ok)
    }

    /// From here on the processes they are meant for must bind them soon.
    pub(super) fn release(self) -> ReservedPorts {
        ReservedPorts { _reserved: self.reserved }
    }

    fn hold(&mut self, listener: TcpListener) -> std::io::Result<SocketAddr> {
        let address = listener.local_addr()?;
        // Nobody connects there: who has bound the name has the port.
        let name = UnixAddr::from_abstract_name(format!("kvasir-up-port-{}", address.port()))?;
        self.reserved.push(UnixListener::bind_addr(&name)?);
        self.held.push(listener);
        Ok(address)
    }
}

fn lowest_outgoing_port() -> u16 {
    std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_port_is_nobody_elses_until_it_is_released() {
        let mut ports = HeldPorts::default();
        let first = ports.take_free().unwrap();
        let second = ports.take_free().unwrap();
        assert_ne!(first, second);
        assert!(HeldPorts::default().take(first.port()).is_err());
        let reserved = ports.release();
        let others = HeldPorts::default().take(first.port());
        assert!(others.is_err(), "its process has not bound it yet");
        assert!(TcpListener::bind(first).is_ok(), "and may now");
        drop(reserved);
        assert!(HeldPorts::default().take(first.port()).is_ok());
    }
}
