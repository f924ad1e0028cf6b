//! The one place where the node reads a clock. Both readings are of the host's monotonic clock, so
//! that times in the layer log compare with those of the engine.

use rustix::time::{ClockId, clock_gettime};

/// Microseconds of `CLOCK_MONOTONIC`.
pub(crate) fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // Neither is negative on a monotonic clock.
    now.tv_sec.unsigned_abs() * 1_000_000 + now.tv_nsec.unsigned_abs() / 1_000
}

/// Milliseconds of `CLOCK_MONOTONIC`, as the block core counts time.
pub(crate) fn now_ms() -> u64 {
    now_us() / 1_000
}

/// Milliseconds since the Unix epoch, for people and for other hosts.
pub(crate) fn unix_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
