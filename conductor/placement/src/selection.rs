//! Policies that select the prefill instance, and the differences between them. [`crate::place()`] prices
//! the candidates of all policies.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Which instance prefills a request.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Selection {
    /// A random instance.
    Random,
    /// The shortest queue; among idle instances the one that has been idle for longest.
    LeastLoaded,
    /// The longest prefix, then the shortest queue.
    LongestPrefix,
    /// The shortest time to first token with the blocks that each instance's node holds (*Mooncake* §4.1,
    /// cache-aware scheduling).
    CacheAware,
    /// *Mooncake* Algorithm 1: the least time to first token; an instance whose own prefix is
    /// shorter than the best one by more than the threshold fetches the difference.
    KvcacheCentric,
    /// The least cost, with fetch priced against recomputation on each instance.
    #[default]
    LeastCost,
}

impl Selection {
    pub const ALL: [Selection; 6] = [
        Selection::Random,
        Selection::LeastLoaded,
        Selection::LongestPrefix,
        Selection::CacheAware,
        Selection::KvcacheCentric,
        Selection::LeastCost,
    ];

    /// The name in configurations and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Selection::Random => "random",
            Selection::LeastLoaded => "least-loaded",
            Selection::LongestPrefix => "longest-prefix",
            Selection::CacheAware => "cache-aware",
            Selection::KvcacheCentric => "kvcache-centric",
            Selection::LeastCost => "least-cost",
        }
    }

    /// Queue, transfer and computing together. Blocks travel while the queue is worked on, so
    /// that the longer of the two counts; Algorithm 1, as it is printed, adds them.
    pub(crate) fn ttft_us(self, queue_us: u64, transfer_us: u64, compute_us: u64) -> u64 {
        match self {
            Selection::KvcacheCentric => queue_us + transfer_us + compute_us,
            _ => queue_us.max(transfer_us) + compute_us,
        }
    }

    pub(crate) fn fetches(self) -> bool {
        matches!(self, Selection::KvcacheCentric | Selection::LeastCost)
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An unknown name of a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown policy `{0}`; use one of random, least-loaded, longest-prefix, cache-aware, kvcache-centric, least-cost"
)]
pub struct UnknownSelection(String);

impl FromStr for Selection {
    type Err = UnknownSelection;

    fn from_str(name: &str) -> Result<Self, UnknownSelection> {
        let named = Selection::ALL.into_iter().find(|selection| selection.name() == name);
        named.ok_or_else(|| UnknownSelection(name.to_string()))
    }
}
