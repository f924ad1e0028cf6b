//! The constants of the prices: what a fabric carries, what a kernel takes, what a splice and a merge
//! cost. They start from a file of `configs/fabrics` and are refined by what is measured.
//!
//! All times in microseconds, all sizes in bytes.

use serde::Deserialize;

/// How queries, partials and cached rows travel between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FabricProfile {
    /// The round trip of nothing (*Move the Query*, table 2).
    pub probe_us: f64,
    /// What every dispatch waits for beside it: posting, noticing, answering.
    pub turnaround_us: f64,
    pub bytes_per_us: f64,
    pub congestion: Congestion,
    /// Answers that a holder stages side by side; it refuses more (*Move the Query* §6.2).
    pub concurrent_messages_max: u32,
    pub splice: SpliceProfile,
    pub gather: GatherProfile,
    pub merge: MergeProfile,
}

/// What flows that share a link do to each other: nothing up to `flat_messages`, then each one more
/// prolongs every transport by `message_factor` of what it takes alone.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Congestion {
    pub flat_messages: u32,
    pub message_factor: f64,
}

/// Rotating fetched rows to another offset, all layers: launches, and a little for each token.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SpliceProfile {
    pub base_us: f64,
    pub token_us: f64,
}

/// Collecting selected rows of one layer: a line over the holders that have some.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatherProfile {
    pub base_us: f64,
    pub holder_us: f64,
    /// The rows with which the line was measured; more or fewer take their share of it.
    pub rows: u32,
}

/// Joining the partials of one layer: two of them, and each one more.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeProfile {
    pub base_us: f64,
    pub part_us: f64,
}

/// Partial attention of one layer on one device.
///
/// `launch_us + token_us * tokens`, flat up to `flat_rows` query rows; beyond them each row adds
/// `row_token_us * tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelProfile {
    pub launch_us: f64,
    pub token_us: f64,
    pub flat_rows: u64,
    pub row_token_us: f64,
    pub selected: SelectedProfile,
}

/// What reading rows by index costs, relative to as many in a row:
/// `max(1, base_factor + token_factor * selected)`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SelectedProfile {
    pub base_factor: f64,
    pub token_factor: f64,
}

impl FabricProfile {
    /// There and back: `T_probe + T_turn + bytes / BW` beside `flows` others on the way.
    pub fn transport_us(&self, bytes: u64, flows: u32) -> f64 {
        let alone = self.probe_us + self.turnaround_us + bytes as f64 / self.bytes_per_us;
        alone * self.congestion.factor(flows)
    }

    /// One way, in bulk.
    pub fn pull_us(&self, bytes: u64, flows: u32) -> f64 {
        bytes as f64 / self.bytes_per_us * self.congestion.factor(flows)
    }
}

impl Congestion {
    pub fn factor(&self, flows: u32) -> f64 {
        1.0 + self.message_factor * f64::from(flows.saturating_sub(self.flat_messages))
    }
}

impl SpliceProfile {
    pub fn us(&self, tokens: u64) -> f64 {
        self.base_us + self.token_us * tokens as f64
    }
}

impl GatherProfile {
    pub fn us(&self, holders: usize, rows: u64) -> f64 {
        let line = self.base_us + self.holder_us * holders as f64;
        line * rows as f64 / f64::from(self.rows.max(1))
    }
}

impl MergeProfile {
    pub fn us(&self, parts: usize) -> f64 {
        match parts {
            0 | 1 => 0.0,
            _ => self.base_us + self.part_us * (parts - 2) as f64,
        }
    }
}

impl KernelProfile {
    /// Of `rows` query rows over `tokens` cached ones.
    pub fn dense_us(&self, rows: u64, tokens: u64) -> f64 {
        let tokens = tokens as f64;
        let beyond = rows.saturating_sub(self.flat_rows) as f64;
        self.launch_us + self.token_us * tokens + self.row_token_us * tokens * beyond
    }

    /// The same over `selected` tokens by their index: however many are stored beside them.
    pub fn selected_us(&self, rows: u64, selected: u64) -> f64 {
        let SelectedProfile { base_factor, token_factor } = self.selected;
        let factor = (base_factor + token_factor * selected as f64).max(1.0);
        self.dense_us(rows, selected) * factor
    }
}
