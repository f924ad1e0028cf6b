//! How the `verbs` domain is set up. What the device cannot do is lowered to what it can.

/// RDMA verbs: an InfiniBand or RoCE device.
#[derive(
    Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields, default)]
pub struct VerbsConfig {
    /// The name of the device, as `ibv_devices` and `kvasir doctor` show it. Without one the first that
    /// has an active port.
    pub device: Option<String>,
    /// Queue pairs for writes, to each peer; one more is for messages.
    pub write_queue_pairs: usize,
    /// Writes that one queue pair may have under way.
    pub send_depth: u32,
    /// Counted writes of a peer that one queue pair takes before this process has looked at them. Beyond
    /// it the peer's device waits and tries again.
    pub receive_depth: u32,
    /// Writes of up to so many bytes are copied into their work request.
    pub inline_bytes: u32,
    /// Registered memory through which go sources that are not registered themselves.
    pub bounce_bytes: usize,
    /// Lets PCIe reorder writes into regions, where the device knows it. Counts stay exact.
    pub relaxed_ordering: bool,
    /// How long the device waits for an acknowledgement before it sends again. Devices round it up.
    pub ack_timeout_ms: u64,
    /// How often it sends again before the connection has failed; at most 7.
    pub retries: u8,
    /// Of the packets: on RoCE v2 the DSCP in the upper six bits.
    pub traffic_class: u8,
    /// 0 to 15.
    pub service_level: u8,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        VerbsConfig {
            device: None,
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
