//! The file that describes a cluster: its nodes, the model they serve, how fast they are, and the
//! constants of the policy. Unknown keys are refused; units are in the names.

use std::path::Path;

use kvasir_blocks::Eviction;
use kvasir_placement::{
    Admission, DecodeProfile, LinkProfile, Policy, PrefillProfile, Profile, Selection, SsdProfile,
};
use serde::{Deserialize, Serialize};

use crate::model::{DecodeTime, PrefillTime};
use crate::roles::BalanceFile;

/// Why a cluster file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    #[error("cannot read the cluster file")]
    Read(#[from] std::io::Error),
    #[error("invalid cluster file: {0}")]
    Parse(String),
    #[error("invalid cluster file: `{0}` must be above 0")]
    NotPositive(&'static str),
    #[error(
        "invalid cluster file: `balance.window_ms` must be 1 to 4096 times `balance.sample_interval_ms`"
    )]
    Window,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cluster {
    pub prefill_nodes: u16,
    pub decode_nodes: u16,
    /// Tokens of a block, in the trace and in the caches.
    pub block_tokens: u32,
    pub model: Model,
    pub prefill: Prefill,
    pub decode: Decode,
    pub network: Network,
    /// Which block makes room in a cache: `lru` or `hit-density`.
    #[serde(default)]
    pub eviction_policy: Eviction,
    #[serde(default)]
    pub policy: PolicyConstants,
    /// With it every node can prefill and decode, and changes between the two: see [`crate::roles`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance: Option<BalanceFile>,
}

/// The model that is served, as far as time depends on it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    pub name: String,
    pub layers: u32,
    /// `d` of Mooncake's cost of prefill, `l (a n^2 d + b n d^2)` FLOP, with its `a` and `b`.
    pub hidden: u32,
    pub attention_flop: f64,
    pub linear_flop: f64,
    /// Of the cache, all layers.
    pub token_bytes: u64,
    pub weight_bytes: f64,
    /// To decode one token, without attention.
    pub token_flop: f64,
}

/// A node that prefills.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prefill {
    pub base_ms: f64,
    pub flop_per_s: f64,
    /// From the node's memory to where it is attended.
    pub load_bytes_per_s: f64,
    /// What its cache holds.
    pub cache_tokens: u64,
    /// Prefills are computed in chunks that take so long; between two of them one may stop for
    /// another.
    pub chunk_ms: f64,
}

/// A node that decodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decode {
    pub step_base_ms: f64,
    pub flop_per_s: f64,
    pub hbm_bytes_per_s: f64,
    /// Sequences at once.
    pub running_requests_max: u32,
    /// What its cache holds of the prompts that were sent to it; only the policy `kvasir` looks
    /// there.
    pub cache_tokens: u64,
    /// A sequence that joins stalls the running ones by so many times what its cache takes to load
    /// at `join_bytes_per_s`; 0 for a node that takes it in beside its work.
    pub join_stall: f64,
    pub join_bytes_per_s: f64,
}

/// The network between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// Of each node, each way.
    pub bytes_per_s: f64,
}

/// Constants of the policies: see [`Policy`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PolicyConstants {
    /// Of the policy `global`.
    pub kvcache_balancing_threshold: f64,
    /// Of the policy `kvasir`.
    pub shortest_prefill_first_factor: f64,
}

impl Default for PolicyConstants {
    fn default() -> Self {
        let Policy { kvcache_balancing_threshold, shortest_prefill_first_factor, .. } =
            Policy::default();
        PolicyConstants { kvcache_balancing_threshold, shortest_prefill_first_factor }
    }
}

impl Cluster {
    /// Reads a cluster file.
    ///
    /// # Errors
    /// [`ClusterError`] when it says what cannot be.
    pub fn open(path: &Path) -> Result<Cluster, ClusterError> {
        Cluster::parse(&std::fs::read_to_string(path)?)
    }

    /// Reads the text of a cluster file.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn parse(text: &str) -> Result<Cluster, ClusterError> {
        let cluster: Cluster =
            toml::from_str(text).map_err(|error| ClusterError::Parse(error.to_string()))?;
        cluster.check()?;
        Ok(cluster)
    }

    /// Whether it can be replayed on.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn check(&self) -> Result<(), ClusterError> {
        let Cluster { model, prefill, decode, network, .. } = self;
        let positive = [
            ("prefill_nodes", f64::from(self.prefill_nodes)),
            ("decode_nodes", f64::from(self.decode_nodes)),
            ("block_tokens", f64::from(self.block_tokens)),
            ("model.token_bytes", model.token_bytes as f64),
            ("prefill.flop_per_s", prefill.flop_per_s),
            ("prefill.load_bytes_per_s", prefill.load_bytes_per_s),
            ("prefill.chunk_ms", prefill.chunk_ms),
            ("prefill.cache_tokens", prefill.cache_tokens as f64),
            ("decode.flop_per_s", decode.flop_per_s),
            ("decode.hbm_bytes_per_s", decode.hbm_bytes_per_s),
            ("decode.running_requests_max", f64::from(decode.running_requests_max)),
            ("decode.join_bytes_per_s", decode.join_bytes_per_s),
            ("network.bytes_per_s", network.bytes_per_s),
        ];
        if let Some(BalanceFile { sample_interval_ms, window_ms, .. }) = self.balance
            && (sample_interval_ms == 0
                || !(sample_interval_ms..=sample_interval_ms.saturating_mul(4_096))
                    .contains(&window_ms))
        {
            return Err(ClusterError::Window);
        }
        match positive.into_iter().find(|(_, value)| !value.is_finite() || *value <= 0.0) {
            Some((name, _)) => Err(ClusterError::NotPositive(name)),
            None => Ok(()),
        }
    }

    /// How long its prefills take.
    pub fn prefill_time(&self) -> PrefillTime {
        let Model { layers, hidden, attention_flop, linear_flop, token_bytes, .. } = self.model;
        let (l, d) = (f64::from(layers), f64::from(hidden));
        let us = 1e6 / self.prefill.flop_per_s;
        PrefillTime {
            base_us: self.prefill.base_ms * 1e3,
            token_us: l * linear_flop * d * d * us,
            pair_us: l * attention_flop * d * us,
            reused_us: token_bytes as f64 / self.prefill.load_bytes_per_s * 1e6,
        }
    }

    /// How long its decode steps take.
    pub fn decode_time(&self) -> DecodeTime {
        let (model, decode) = (&self.model, &self.decode);
        let token_bytes = model.token_bytes as f64;
        DecodeTime {
            base_us: decode.step_base_ms * 1e3,
            weights_us: model.weight_bytes / decode.hbm_bytes_per_s * 1e6,
            sequence_us: model.token_flop / decode.flop_per_s * 1e6,
            context_us: token_bytes / decode.hbm_bytes_per_s * 1e6,
            join_us: decode.join_stall * token_bytes / decode.join_bytes_per_s * 1e6,
        }
    }

    /// Blocks of a cache of so many tokens.
    pub fn blocks_of(&self, cache_tokens: u64) -> u32 {
        u32::try_from(cache_tokens / u64::from(self.block_tokens)).unwrap_or(u32::MAX)
    }

    pub fn block_bytes(&self) -> u64 {
        self.model.token_bytes * u64::from(self.block_tokens)
    }

    /// What the placement is told of speeds before it has seen any.
    pub fn profile(&self) -> Profile {
        let PrefillTime { base_us, token_us, pair_us, reused_us } = self.prefill_time();
        let decode = self.decode_time();
        Profile {
            prefill: PrefillProfile { base_us, token_us, pair_us, reused_us },
            decode: DecodeProfile {
                base_us: decode.base_us + decode.weights_us,
                sequence_us: decode.sequence_us,
                ..DecodeProfile::default()
            },
            link: LinkProfile { base_us: 0.0, bytes_per_us: self.network.bytes_per_s / 1e6 },
            ssd: SsdProfile::default(),
        }
    }

    /// The policy of this name with the file's constants. Algorithm 1 as it is printed fetches
    /// above its threshold whatever that costs.
    pub fn policy(&self, selection: Selection, admission: Admission) -> Policy {
        Policy {
            selection,
            admission,
            kvcache_balancing_threshold: self.policy.kvcache_balancing_threshold,
            always_fetch: selection == Selection::KvcacheCentric,
            shortest_prefill_first_factor: self.policy.shortest_prefill_first_factor,
            decode_load_margin: 0.0,
            ..Policy::default()
        }
    }
}
