//! How packets find the other end: on Ethernet by its GID, on InfiniBand by its LID, and by its GID too
//! when it is in another subnet.

use crate::bindings::{Zeroed, ibv_ah_attr, ibv_gid};
use crate::device::{LinkLayer, LocalPath};
use crate::ids::{Gid, Lid};

/// How the network treats the packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// On RoCE v2 the DSCP, in the upper six bits, and ECN. Switches tell lossless traffic by it.
    pub class: u8,
    /// 0 to 15; on RoCE the Ethernet priority, where no traffic class decides.
    pub service_level: u8,
    /// Routers on the way, and one.
    pub hop_limit: u8,
}

impl Default for Traffic {
    fn default() -> Self {
        Traffic { class: 0, service_level: 0, hop_limit: 64 }
    }
}

/// From a port of this host to a port of a peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Route<'a> {
    pub(crate) from: &'a LocalPath,
    pub(crate) gid: Gid,
    pub(crate) lid: Lid,
}

impl Route<'_> {
    fn needs_gid(&self) -> bool {
        self.from.link_layer == LinkLayer::Ethernet
            || self.gid.subnet_prefix() != self.from.gid.subnet_prefix()
    }

    pub(crate) fn to_raw(self, traffic: Traffic) -> ibv_ah_attr {
        let mut raw = ibv_ah_attr::zeroed();
        raw.port_num = self.from.port.0;
        raw.dlid = self.lid.0;
        raw.sl = traffic.service_level;
        if self.needs_gid() {
            raw.is_global = 1;
            raw.grh.dgid = ibv_gid { raw: self.gid.0 };
            raw.grh.sgid_index = self.from.gid_index.0;
            raw.grh.hop_limit = traffic.hop_limit;
            raw.grh.traffic_class = traffic.class;
        }
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{GidIndex, Mtu, PortNum};

    fn is_global(link_layer: LinkLayer, from: &str, to: &str) -> bool {
        let path = LocalPath {
            port: PortNum(2),
            link_layer,
            lid: Lid(1),
            gid: from.parse().expect("a GID"),
            gid_index: GidIndex(3),
            mtu: Mtu::Bytes4096,
        };
        let route = Route { from: &path, gid: to.parse().expect("a GID"), lid: Lid(7) };
        let raw = route.to_raw(Traffic::default());
        assert_eq!((raw.port_num, raw.dlid), (2, 7));
        assert_eq!(raw.grh.sgid_index, if raw.is_global == 1 { 3 } else { 0 });
        raw.is_global == 1
    }

    #[test]
    fn ethernet_always_and_infiniband_across_subnets_go_by_gid() {
        assert!(is_global(LinkLayer::Ethernet, "10.0.0.1", "10.0.0.2"));
        assert!(!is_global(LinkLayer::InfiniBand, "fe80::1", "fe80::2"));
        assert!(is_global(LinkLayer::InfiniBand, "fe80::1", "fec0::2"));
    }
}
