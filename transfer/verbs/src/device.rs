//! What a device and its ports are, as plain values, and the rule by which a port and its address are
//! chosen. Nothing here calls a device.

use std::cmp::Reverse;

use crate::bindings::{
    IBV_GID_TYPE_IB, IBV_GID_TYPE_ROCE_V1, IBV_GID_TYPE_ROCE_V2, IBV_LINK_LAYER_ETHERNET,
    IBV_LINK_LAYER_INFINIBAND, IBV_PORT_ACTIVE, IBV_PORT_ARMED, IBV_PORT_DOWN, IBV_PORT_INIT,
    IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP, ibv_device_attr, ibv_gid_entry, ibv_port_attr,
};
use crate::ids::{Gid, GidIndex, Lid, Mtu, PortNum};

/// A device with its ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    pub name: String,
    pub transport: Transport,
    pub firmware: String,
    pub limits: Limits,
    pub ports: Vec<PortInfo>,
}

/// What carries the packets, roughly. Reliable queue pairs as this crate makes them need
/// [`Transport::InfiniBand`], which includes RoCE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    InfiniBand,
    Iwarp,
    /// EFA among others: not driven by this crate.
    Other(i32),
}

impl Transport {
    pub(crate) fn from_raw(transport: i32) -> Self {
        match transport {
            IBV_TRANSPORT_IB => Transport::InfiniBand,
            IBV_TRANSPORT_IWARP => Transport::Iwarp,
            other => Transport::Other(other),
        }
    }
}

/// How much a device can hold and do. Drivers may grant less in combination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub queue_pairs_max: u32,
    /// Of one queue of a queue pair.
    pub work_requests_max: u32,
    /// Of one work request.
    pub slices_max: u32,
    pub completion_queues_max: u32,
    /// Of one completion queue.
    pub completions_max: u32,
    pub regions_max: u32,
    pub region_bytes_max: u64,
    pub address_handles_max: u32,
    /// READs that one queue pair may have on the way.
    pub reads_out_max: u32,
    /// READs that one queue pair answers at once.
    pub reads_in_max: u32,
}

impl Limits {
    pub(crate) fn from_raw(raw: &ibv_device_attr) -> Self {
        Limits {
            queue_pairs_max: count(raw.max_qp),
            work_requests_max: count(raw.max_qp_wr),
            slices_max: count(raw.max_sge),
            completion_queues_max: count(raw.max_cq),
            completions_max: count(raw.max_cqe),
            regions_max: count(raw.max_mr),
            region_bytes_max: raw.max_mr_size,
            address_handles_max: count(raw.max_ah),
            reads_out_max: count(raw.max_qp_init_rd_atom),
            reads_in_max: count(raw.max_qp_rd_atom),
        }
    }
}

fn count(raw: i32) -> u32 {
    u32::try_from(raw).unwrap_or(0)
}

/// What is found out by trying, once for a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Bytes that a work request of a reliable queue pair can carry within itself.
    pub inline_bytes_max: u32,
    /// The driver accepts regions with relaxed ordering; whether PCIe then reorders is up to the host.
    pub relaxed_ordering: bool,
    /// Device memory can be registered by a dma-buf.
    pub dmabuf: bool,
}

/// One port of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortInfo {
    pub port: PortNum,
    pub state: PortState,
    pub link_layer: LinkLayer,
    pub mtu_max: Mtu,
    pub mtu_active: Mtu,
    pub lid: Lid,
    pub message_bytes_max: u32,
    pub gids: Vec<GidEntry>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortState {
    Down,
    Initialising,
    Armed,
    /// Only then does traffic pass.
    Active,
    Other(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    InfiniBand,
    Ethernet,
    Other(u8),
}

impl PortInfo {
    /// `None` for an MTU that no specification has.
    pub(crate) fn from_raw(port: PortNum, raw: &ibv_port_attr) -> Option<Self> {
        Some(PortInfo {
            port,
            state: match raw.state {
                IBV_PORT_DOWN => PortState::Down,
                IBV_PORT_INIT => PortState::Initialising,
                IBV_PORT_ARMED => PortState::Armed,
                IBV_PORT_ACTIVE => PortState::Active,
                other => PortState::Other(other),
            },
            link_layer: match raw.link_layer {
                IBV_LINK_LAYER_INFINIBAND => LinkLayer::InfiniBand,
                IBV_LINK_LAYER_ETHERNET => LinkLayer::Ethernet,
                other => LinkLayer::Other(other),
            },
            mtu_max: Mtu::from_code(raw.max_mtu)?,
            mtu_active: Mtu::from_code(raw.active_mtu)?,
            lid: Lid(raw.lid),
            message_bytes_max: raw.max_msg_sz,
            gids: Vec::new(),
        })
    }

    /// The address by which peers should reach this port, by rule: on Ethernet RoCE v2 before RoCE v1,
    /// and within each IPv4, then routable IPv6, then link-local; elsewhere the first InfiniBand GID.
    /// Among equals the lowest index.
    pub fn best_gid(&self) -> Option<GidEntry> {
        let ranked = self.gids.iter().filter_map(|entry| Some((rank(entry)?, *entry)));
        let best = ranked.max_by_key(|(rank, entry)| (*rank, Reverse(entry.index)));
        best.map(|(_, entry)| entry)
    }

    /// How this port is reached, when it is active and has an address.
    pub fn path(&self) -> Option<LocalPath> {
        let entry = self.best_gid()?;
        let is_active = self.state == PortState::Active;
        is_active.then_some(LocalPath {
            port: self.port,
            link_layer: self.link_layer,
            lid: self.lid,
            gid: entry.gid,
            gid_index: entry.index,
            mtu: self.mtu_active,
        })
    }
}

impl DeviceInfo {
    /// The first port that has a path.
    pub fn path(&self) -> Option<LocalPath> {
        self.ports.iter().find_map(PortInfo::path)
    }
}

/// One row of a port's table of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidEntry {
    pub index: GidIndex,
    pub gid: Gid,
    pub kind: GidKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    InfiniBand,
    /// Within one Ethernet segment.
    RoceV1,
    /// Over UDP and IP.
    RoceV2,
    Other(u32),
}

impl GidEntry {
    /// With the port that the row belongs to; `None` when its numbers are out of range.
    pub(crate) fn from_raw(raw: &ibv_gid_entry) -> Option<(PortNum, Self)> {
        let kind = match raw.gid_type {
            IBV_GID_TYPE_IB => GidKind::InfiniBand,
            IBV_GID_TYPE_ROCE_V1 => GidKind::RoceV1,
            IBV_GID_TYPE_ROCE_V2 => GidKind::RoceV2,
            other => GidKind::Other(other),
        };
        let index = GidIndex(u8::try_from(raw.gid_index).ok()?);
        let port = PortNum(u8::try_from(raw.port_num).ok()?);
        Some((port, GidEntry { index, gid: Gid(raw.gid.raw), kind }))
    }
}

fn rank(entry: &GidEntry) -> Option<u8> {
    if entry.gid == Gid::ZERO {
        return None;
    }
    let reach = match entry.gid {
        gid if gid.ipv4().is_some() => 2,
        gid if !gid.is_link_local() => 1,
        _ => 0,
    };
    match entry.kind {
        GidKind::RoceV2 => Some(20 + reach),
        GidKind::RoceV1 => Some(10 + reach),
        // A port of InfiniBand always has its first one, which is link-local.
        GidKind::InfiniBand => Some(0),
        GidKind::Other(_) => None,
    }
}

/// A port of this host with the address that queue pairs on it use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalPath {
    pub port: PortNum,
    pub link_layer: LinkLayer,
    pub lid: Lid,
    pub gid: Gid,
    pub gid_index: GidIndex,
    pub mtu: Mtu,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(gids: &[(u8, &str, GidKind)]) -> PortInfo {
        let gids = gids.iter().map(|(index, gid, kind)| GidEntry {
            index: GidIndex(*index),
            gid: gid.parse().expect("a GID"),
            kind: *kind,
        });
        PortInfo {
            port: PortNum(1),
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            mtu_max: Mtu::Bytes4096,
            mtu_active: Mtu::Bytes1024,
            lid: Lid(0),
            message_bytes_max: 1 << 31,
            gids: gids.collect(),
        }
    }

    fn check(gids: &[(u8, &str, GidKind)], chosen: Option<u8>) {
        let best = port(gids).best_gid().map(|entry| entry.index.0);
        assert_eq!(best, chosen, "{gids:?}");
    }

    #[test]
    fn the_address_is_chosen_by_rule() {
        use GidKind::{InfiniBand, Other, RoceV1, RoceV2};
        check(&[], None);
        check(&[(0, "fe80::1", RoceV1), (1, "fe80::1", RoceV2)], Some(1));
        check(&[(0, "10.0.0.1", RoceV1), (1, "fe80::1", RoceV2)], Some(1));
        check(
            &[(1, "fe80::1", RoceV2), (3, "2001:db8::1", RoceV2), (5, "10.0.0.1", RoceV2)],
            Some(5),
        );
        check(&[(1, "fe80::1", RoceV2), (3, "2001:db8::1", RoceV2)], Some(3));
        check(&[(7, "10.0.0.2", RoceV2), (4, "10.0.0.1", RoceV2)], Some(4));
        check(&[(2, "fe80::2", InfiniBand), (0, "fe80::1", InfiniBand)], Some(0));
        check(&[(0, "::", RoceV2)], None);
        check(&[(0, "10.0.0.1", Other(9))], None);
    }

    #[test]
    fn a_port_that_is_not_active_has_no_path() {
        let mut port = port(&[(1, "10.0.0.1", GidKind::RoceV2)]);
        assert_eq!(port.path().map(|path| path.gid_index), Some(GidIndex(1)));
        port.state = PortState::Down;
        assert_eq!(port.path(), None);
    }
}
