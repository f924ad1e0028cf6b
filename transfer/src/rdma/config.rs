//! How the `verbs` domain is set up. What the device cannot do is lowered to what it can.

use std::fmt;
use std::str::FromStr;

/// RDMA verbs: InfiniBand and RoCE devices.
#[derive(
    Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields, default)]
pub struct VerbsConfig {
    /// The devices, with the names that `ibv_devices` and `kvasir doctor` print: `mlx5_0`, `mlx5_0:1` with a port,
    /// or `mlx5_0:1:3` with a port and a GID index. `all` stands for every device with an active port. The default
    /// is the first such device. Each device is a path to each peer, and writes are spread over the paths.
    #[schemars(with = "Vec<String>")]
    pub devices: Vec<DeviceSpec>,
    /// How queue pairs exchange their addresses: `tcp`, in the greeting of the TCP connection; `ud`, by datagrams
    /// between the NICs, which takes one more round trip and verifies that the NICs reach each other. Peers accept
    /// both.
    pub handshake: Handshake,
    /// Queue pairs for writes to each peer. One more is for messages.
    pub write_queue_pairs: usize,
    /// Writes in flight on one queue pair.
    pub send_depth: u32,
    /// Counted writes of a peer that one queue pair accepts before this process polls them. After that the peer's
    /// device waits and retries.
    pub receive_depth: u32,
    /// Writes up to this size are copied into their work request.
    pub inline_bytes: u32,
    /// Registered memory for sources that are not registered themselves.
    pub bounce_bytes: usize,
    /// Allow PCIe to reorder writes into regions, if the device supports it and is the only one. Counts stay exact.
    /// A consumer that polls memory could see a signal before its data, so peers count instead of signalling.
    pub relaxed_ordering: bool,
    /// Time that the device waits for an acknowledgement before it retransmits. Devices round it up.
    pub ack_timeout_ms: u64,
    /// Retransmissions before the connection fails. At most 7.
    pub retries: u8,
    /// Traffic class of the packets. On RoCE v2 the upper six bits are the DSCP.
    pub traffic_class: u8,
    /// InfiniBand service level, 0 to 15.
    pub service_level: u8,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        VerbsConfig {
            devices: Vec::new(),
            handshake: Handshake::Tcp,
            write_queue_pairs: 1,
            send_depth: 256,
            receive_depth: 1024,
            inline_bytes: 128,
            bounce_bytes: 4 << 20,
            relaxed_ordering: true,
            ack_timeout_ms: 67,
            retries: 7,
            traffic_class: 0,
            service_level: 0,
        }
    }
}

/// How the numbers of queue pairs are exchanged.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Handshake {
    Tcp,
    Ud,
}

/// Which device is meant.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceSpec {
    /// Every one that has an active port.
    All,
    /// What is not said is the first that will do.
    One { name: String, port: Option<u8>, gid_index: Option<u8> },
}

/// What was written is no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not an RDMA device: write all, mlx5_0, mlx5_0:1 (with a port) or mlx5_0:1:3 (with a \
     GID index)"
)]
pub struct DeviceSpecError(String);

impl FromStr for DeviceSpec {
    type Err = DeviceSpecError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || DeviceSpecError(text.to_owned());
        let number = |part: &str| part.parse::<u8>().map_err(|_| wrong());
        let parts: Vec<&str> = text.split(':').collect();
        let (name, port, gid_index) = match parts.as_slice() {
            ["all"] => return Ok(DeviceSpec::All),
            [name] => (*name, None, None),
            [name, port] => (*name, Some(number(port)?), None),
            [name, port, gid_index] => (*name, Some(number(port)?), Some(number(gid_index)?)),
            _ => return Err(wrong()),
        };
        if name.is_empty() || name.contains(char::is_whitespace) {
            return Err(wrong());
        }
        Ok(DeviceSpec::One { name: name.to_owned(), port, gid_index })
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceSpec::One { name, port, gid_index } = self else { return f.write_str("all") };
        f.write_str(name)?;
        for number in port.iter().chain(gid_index) {
            write!(f, ":{number}")?;
        }
        Ok(())
    }
}

impl TryFrom<String> for DeviceSpec {
    type Error = DeviceSpecError;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<DeviceSpec> for String {
    fn from(device: DeviceSpec) -> String {
        device.to_string()
    }
}

pub(crate) const WRITE_QUEUE_PAIRS_MAX: usize = 16;

impl VerbsConfig {
    /// The name of the first field that is out of range.
    pub(crate) fn out_of_range(&self) -> Option<&'static str> {
        let checks = [
            (
                "verbs.write_queue_pairs",
                (1..=WRITE_QUEUE_PAIRS_MAX).contains(&self.write_queue_pairs),
            ),
            ("verbs.send_depth", (2..=32_768).contains(&self.send_depth)),
            ("verbs.receive_depth", (2..=32_768).contains(&self.receive_depth)),
            ("verbs.inline_bytes", self.inline_bytes <= 4096),
            ("verbs.bounce_bytes", (256 << 10..=1 << 30).contains(&self.bounce_bytes)),
            ("verbs.ack_timeout_ms", (1..=60_000).contains(&self.ack_timeout_ms)),
            ("verbs.retries", self.retries <= 7),
            ("verbs.service_level", self.service_level <= 15),
        ];
        checks.iter().find(|(_, fits)| !fits).map(|(name, _)| *name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_written_with_or_without_port_and_gid() {
        let one = |port, gid_index| DeviceSpec::One { name: "mlx5_0".into(), port, gid_index };
        for (text, device) in [
            ("all", DeviceSpec::All),
            ("mlx5_0", one(None, None)),
            ("mlx5_0:1", one(Some(1), None)),
            ("mlx5_0:1:3", one(Some(1), Some(3))),
        ] {
            assert_eq!(text.parse(), Ok(device.clone()));
            assert_eq!(device.to_string(), text);
        }
        for text in ["", ":1", "mlx5_0:", "mlx5_0:x", "mlx5_0:1:3:4", "mlx5_0:256", "a b"] {
            let error = text.parse::<DeviceSpec>().expect_err("no device").to_string();
            assert!(error.contains("mlx5_0:1:3"), "{error}");
        }
    }
}
