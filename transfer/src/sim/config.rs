//! How a simulated network behaves, and how it fails.

use std::num::NonZeroU32;

use kvasir_transfer_core::signal::Ordering;

/// How the network behaves.
#[derive(Debug, Clone)]
pub struct SimConfig {
    pub seed: u64,
    pub latency_us: u64,
    /// Each frame takes up to so much longer: they overtake each other.
    pub jitter_us: u64,
    /// Of each path.
    pub bytes_per_s: u64,
    pub peer_timeout_us: u64,
    /// A session without any path is given up after so long.
    pub grace_us: u64,
    pub slice_bytes: usize,
    /// Each session has one path for each of these; for none it has one that is as said above.
    pub lanes: Vec<SimLane>,
    /// Each write prefers some of the lanes, drawn by chance, as writes prefer cards that are near.
    pub writes_prefer_lanes: bool,
    /// Only the first lane takes every region; each of the others refuses some, as cards do.
    pub lanes_refuse_regions: bool,
    pub faults: SimFaults,
    /// Different immediates on one path, before it is replaced.
    pub path_imms_max: usize,
    pub heartbeat_interval_us: u64,
    pub heartbeat_timeout_us: u64,
    /// In every session, wanted or not.
    pub heartbeat_always: bool,
    pub operations_max: usize,
    pub message_bytes_max: usize,
    /// Messages that each engine's application may hold.
    pub message_buffers: usize,
    pub send_bytes_per_s_max: u64,
    /// Whether receivers verify checksums.
    pub verify: bool,
}

/// What one path of each session is like.
#[derive(Debug, Clone, Copy)]
pub struct SimLane {
    pub latency_us: u64,
    pub jitter_us: u64,
    pub bytes_per_s: u64,
    pub slice_bytes: usize,
    /// Frames that wait for their acknowledgement.
    pub frames_max: usize,
    pub order: SimOrder,
}

/// What a path keeps in order, and what its acknowledgements say.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SimOrder {
    /// Frames overtake each other; what is acknowledged is in memory.
    #[default]
    WhenPlaced,
    /// Frames with a pin keep their order on one of so many queue pairs, as on reliable ones, where one
    /// that is refused ends the path.
    QueuePairs(NonZeroU32),
    /// As with a card that writes to memory in any order: who polls memory sees what was acknowledged later,
    /// and perhaps after what came behind it. Who is told by a count finds everything.
    Relaxed,
}

/// How paths fail by themselves. Nothing fails by default.
#[derive(Debug, Clone, Copy, Default)]
pub struct SimFaults {
    /// A path lasts up to so long; 0: for ever.
    pub path_life_us: u64,
    /// How many of a hundred paths that fail carry frames on for a while and bring no answer back.
    pub deaf_percent: u64,
    /// How long that is at most. The sender may give such a path up earlier.
    pub deaf_us: u64,
    /// What a failed path still carries, and what is sent where nothing gets through now, may arrive up to so
    /// much later: it lies in somebody's buffer, or is sent again and again. 0: the latter never does.
    pub linger_us: u64,
    /// How many of a hundred receivers notice the end of a path by themselves.
    pub notice_percent: u64,
    /// Until a path that has failed is connected anew, at most.
    pub outage_us: u64,
    /// A receiver takes up to so long to close a path, and takes what comes through it meanwhile.
    pub drain_us: u64,
    /// Of so many writes one arrives with a wrong byte; 0 for none. Those without a checksum are spared.
    pub wrong_one_in: u64,
}

impl Default for SimConfig {
    fn default() -> Self {
        SimConfig {
            seed: 0,
            latency_us: 10,
            jitter_us: 100,
            bytes_per_s: 10_000_000_000,
            peer_timeout_us: 1_000_000,
            grace_us: 1_000_000,
            slice_bytes: 1 << 20,
            lanes: Vec::new(),
            writes_prefer_lanes: false,
            lanes_refuse_regions: false,
            faults: SimFaults::default(),
            path_imms_max: 65_536,
            heartbeat_interval_us: 100_000,
            heartbeat_timeout_us: 300_000,
            heartbeat_always: false,
            operations_max: 65_536,
            message_bytes_max: 64 << 10,
            message_buffers: 1024,
            send_bytes_per_s_max: 0,
            verify: true,
        }
    }
}

const FRAMES_MAX: usize = 1024;

impl SimConfig {
    /// Whether paths of the lane carry a region.
    pub(super) fn carries(&self, lane: usize, key: u64) -> bool {
        !self.lanes_refuse_regions || lane == 0 || !(key + lane as u64).is_multiple_of(2)
    }

    pub(super) fn lanes(&self) -> usize {
        self.lanes.len().max(1)
    }

    pub(super) fn lane(&self, at: usize) -> SimLane {
        self.lanes.get(at).copied().unwrap_or(SimLane {
            latency_us: self.latency_us,
            jitter_us: self.jitter_us,
            bytes_per_s: self.bytes_per_s,
            slice_bytes: self.slice_bytes,
            frames_max: FRAMES_MAX,
            order: SimOrder::default(),
        })
    }
}

impl SimOrder {
    pub(super) fn ordering(self) -> Ordering {
        match self {
            SimOrder::WhenPlaced => Ordering::WhenPlaced,
            SimOrder::QueuePairs(_) => Ordering::RcQueuePair,
            SimOrder::Relaxed => Ordering::None,
        }
    }

    pub(super) fn queue_pairs(self) -> NonZeroU32 {
        match self {
            SimOrder::QueuePairs(queue_pairs) => queue_pairs,
            SimOrder::WhenPlaced | SimOrder::Relaxed => NonZeroU32::MIN,
        }
    }

    pub(super) fn keeps_pins(self) -> bool {
        matches!(self, SimOrder::QueuePairs(_))
    }
}
