//! Numbers of the wire and of devices, each as a type of its own. None of them is checked against a
//! device here; only their width is.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

const BITS_24_MAX: u32 = (1 << 24) - 1;

/// Names a queue pair at its device: 24 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QpNum(u32);

impl QpNum {
    /// `None` for what does not fit 24 bits.
    pub fn new(number: u32) -> Option<Self> {
        (number <= BITS_24_MAX).then_some(QpNum(number))
    }

    pub fn get(self) -> u32 {
        self.0
    }
}

/// Where the sequence of packets of a queue pair begins: 24 bits. It should differ each time, so that
/// packets of an earlier connection between the same numbers are not taken for packets of this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// `None` for what does not fit 24 bits.
    pub fn new(number: u32) -> Option<Self> {
        (number <= BITS_24_MAX).then_some(Psn(number))
    }

    /// The low 24 bits of a number that the caller drew.
    pub fn from_random(bits: u32) -> Self {
        Psn(bits & BITS_24_MAX)
    }

    pub fn get(self) -> u32 {
        self.0
    }
}

/// Allows this host's device to use a region in requests of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LKey(pub u32);

/// Allows a peer to name a region in its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RKey(pub u32);

/// Guards a datagram queue pair: both sides must name the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct QKey(pub u32);

/// A port's address within an InfiniBand subnet; 0 on Ethernet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lid(pub u16);

/// Ports of a device are counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortNum(pub u8);

/// A place in a port's table of GIDs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GidIndex(pub u8);

/// The caller's mark on a work request; its completion bears it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct WorkTag(pub u32);

/// A port's global address: an IPv6 address, in form and on RoCE v2 also in fact.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// An empty row of a port's table.
    pub const ZERO: Gid = Gid([0; 16]);

    pub fn ipv6(self) -> Ipv6Addr {
        Ipv6Addr::from(self.0)
    }

    /// The IPv4 address that this GID stands for, if it does.
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        self.ipv6().to_ipv4_mapped()
    }

    pub fn is_link_local(self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }

    /// The first half: which subnet a port of InfiniBand is in.
    pub fn subnet_prefix(self) -> [u8; 8] {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        [a, b, c, d, e, f, g, h]
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.ipv6().fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// A text that names no GID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a GID: give an IPv6 address, or an IPv4 address for RoCE v2")]
pub struct GidError(String);

impl FromStr for Gid {
    type Err = GidError;

    /// IPv6 as such, IPv4 in its mapped form, which is how RoCE v2 writes it.
    fn from_str(text: &str) -> Result<Self, GidError> {
        if let Ok(address) = text.parse::<Ipv6Addr>() {
            return Ok(Gid(address.octets()));
        }
        let address = text.parse::<Ipv4Addr>().map_err(|_| GidError(text.to_owned()))?;
        Ok(Gid(address.to_ipv6_mapped().octets()))
    }
}

/// Payload bytes of one packet. Both ends of a connection must use the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mtu {
    Bytes256,
    Bytes512,
    Bytes1024,
    Bytes2048,
    Bytes4096,
}

impl Mtu {
    pub const ALL: [Mtu; 5] =
        [Mtu::Bytes256, Mtu::Bytes512, Mtu::Bytes1024, Mtu::Bytes2048, Mtu::Bytes4096];

    pub fn bytes(self) -> u32 {
        128 << self.code()
    }

    /// As packets and `libibverbs` count: 1 to 5.
    pub fn code(self) -> u8 {
        match self {
            Mtu::Bytes256 => 1,
            Mtu::Bytes512 => 2,
            Mtu::Bytes1024 => 3,
            Mtu::Bytes2048 => 4,
            Mtu::Bytes4096 => 5,
        }
    }

    pub fn from_code(code: u32) -> Option<Self> {
        Mtu::ALL.into_iter().find(|mtu| u32::from(mtu.code()) == code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_do_not_fit_24_bits_are_refused() {
        assert_eq!(QpNum::new(0xff_ffff).map(QpNum::get), Some(0xff_ffff));
        assert_eq!(QpNum::new(0x100_0000), None);
        assert_eq!(Psn::new(0x100_0000), None);
        assert_eq!(Psn::from_random(0xabcd_ef01).get(), 0xcd_ef01);
    }

    fn check_gid(text: &str, shown: &str, ipv4: Option<[u8; 4]>) {
        let gid: Gid = text.parse().expect("a GID");
        assert_eq!(gid.to_string(), shown);
        assert_eq!(gid.ipv4(), ipv4.map(Ipv4Addr::from), "{text}");
    }

    #[test]
    fn a_gid_is_written_as_the_address_it_is() {
        check_gid("10.0.1.2", "::ffff:10.0.1.2", Some([10, 0, 1, 2]));
        check_gid("::ffff:10.0.1.2", "::ffff:10.0.1.2", Some([10, 0, 1, 2]));
        check_gid("fe80::1", "fe80::1", None);
        check_gid("2001:db8::7", "2001:db8::7", None);
        for text in ["", "mlx5_0", "10.0.1", "10.0.1.256", "fe80:::1"] {
            assert_eq!(text.parse::<Gid>(), Err(GidError(text.to_owned())));
        }
        assert!("fe80::1".parse::<Gid>().is_ok_and(Gid::is_link_local));
        assert!(!"10.0.1.2".parse::<Gid>().is_ok_and(Gid::is_link_local));
    }

    #[test]
    fn an_mtu_has_the_code_and_the_bytes_of_the_specification() {
        let all: Vec<(u8, u32)> = Mtu::ALL.into_iter().map(|m| (m.code(), m.bytes())).collect();
        assert_eq!(all, [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)]);
        assert!(Mtu::ALL.into_iter().all(|m| Mtu::from_code(m.code().into()) == Some(m)));
        assert_eq!((Mtu::from_code(0), Mtu::from_code(6)), (None, None));
    }
}
