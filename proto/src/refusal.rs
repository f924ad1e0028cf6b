//! Why a call was refused, where the code of its status does not say enough: one word in the metadata of
//! the status.

/// The name under which it stands there.
pub const REFUSAL: &str = "kvasir-refusal";

/// The node takes no new work: another one does, and it is of no use to ask this one again.
pub const DRAINING: &str = "draining";

/// Blocks that were to be attended elsewhere cannot be: fetched or computed again they can.
pub const UNROUTED: &str = "unrouted";
