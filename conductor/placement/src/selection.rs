//! By what a prefill instance is chosen: the policies that can be selected, and where they differ.
//! All of them are priced by one and the same [`crate::place()`]; here is only what it asks them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Which instance prefills a request.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Selection {
    /// Any, whatever it holds and does.
    Random,
    /// The shortest queue; of idle ones the one that has been so for longest.
    LeastLoaded,
    /// The longest prefix, then the shortest queue.
    LongestMatch,
    /// The least time to first token with what each instance holds itself (*Mooncake* §4.1,
    /// cache-aware scheduling).
    Local,
    /// *Mooncake* Algorithm 1: the least time to first token; an instance whose own prefix is
    /// shorter than the best one by more than the threshold fetches the difference.
    Global,
    /// The least cost, with fetch priced against recomputation on each instance.
    #[default]
    Kvasir,
}

impl Selection {
    pub const ALL: [Selection; 6] = [
        Selection::Random,
        Selection::LeastLoaded,
        Selection::LongestMatch,
        Selection::Local,
        Selection::Global,
        Selection::Kvasir,
    ];

    /// As it is written in configurations and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Selection::Random => "random",
            Selection::LeastLoaded => "least-loaded",
            Selection::LongestMatch => "longest-match",
            Selection::Local => "local",
            Selection::Global => "global",
            Selection::Kvasir => "kvasir",
        }
    }

    /// Queue, transfer and computing together. Blocks travel while the queue is worked on, so
    /// that the longer of the two counts; Algorithm 1, as it is printed, adds them.
    pub(crate) fn ttft_us(self, queue_us: u64, transfer_us: u64, compute_us: u64) -> u64 {
        match self {
            Selection::Global => queue_us + transfer_us + compute_us,
            _ => queue_us.max(transfer_us) + compute_us,
        }
    }

    pub(crate) fn fetches(self) -> bool {
        matches!(self, Selection::Global | Selection::Kvasir)
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No policy has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no policy: it is one of random, least-loaded, longest-match, local, global, kvasir"
)]
pub struct UnknownSelection(String);

impl FromStr for Selection {
    type Err = UnknownSelection;

    fn from_str(name: &str) -> Result<Self, UnknownSelection> {
        let named = Selection::ALL.into_iter().find(|selection| selection.name() == name);
        named.ok_or_else(|| UnknownSelection(name.to_string()))
    }
}
