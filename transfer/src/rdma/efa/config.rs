//! How the `efa` domain is set up. What the provider cannot do is lowered to what it can.

/// EFA through libfabric.
#[derive(
    Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema,
)]
#[serde(deny_unknown_fields, default)]
pub struct EfaConfig {
    /// libfabric's provider: "efa"; or "tcp" or "shm", which need no EFA device. The latter two are for
    /// development: they place data in software and trust their peers.
    pub provider: String,
    /// Network interface, with the name that `fi_info` and `kvasir doctor` print. The default is the provider's
    /// first one.
    pub device: Option<String>,
    /// Local address for the provider "tcp". By default libfabric selects it.
    pub address: Option<String>,
    /// Writes in flight to one peer.
    pub send_depth: u32,
    /// Counted writes of a peer that are accepted before this process polls them. The provider determines the
    /// effect of further writes: a device may fail.
    pub receive_depth: u32,
    /// Writes up to this size are copied when they are posted.
    pub inline_bytes: u32,
    /// Registered memory for sources that are not registered themselves.
    pub bounce_bytes: usize,
    /// Puts disorder from this seed between the engine and libfabric, which stands in for EFA's where only
    /// ordered providers are at hand. For tests.
    #[serde(skip)]
    #[schemars(skip)]
    pub shuffle_seed: Option<u64>,
}

impl Default for EfaConfig {
    fn default() -> Self {
        EfaConfig {
            provider: "efa".to_owned(),
            device: None,
            address: None,
            send_depth: 256,
            receive_depth: 8192,
            inline_bytes: 128,
            bounce_bytes: 4 << 20,
            shuffle_seed: None,
        }
    }
}

impl EfaConfig {
    /// The name of the first field that is out of range.
    pub(crate) fn out_of_range(&self) -> Option<&'static str> {
        let checks = [
            ("efa.provider", ["efa", "tcp", "shm"].contains(&self.provider.as_str())),
            ("efa.send_depth", (2..=32_768).contains(&self.send_depth)),
            ("efa.receive_depth", (2..=32_768).contains(&self.receive_depth)),
            ("efa.inline_bytes", self.inline_bytes <= 4096),
            ("efa.bounce_bytes", (256 << 10..=1 << 30).contains(&self.bounce_bytes)),
        ];
        checks.iter().find(|(_, fits)| !fits).map(|(name, _)| *name)
    }
}
