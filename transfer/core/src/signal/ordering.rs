//! What a domain promises about order, and what is refused for want of it. A fact about a wire, stated
//! by the domain; nothing here finds it out.

use kvasir_mutation::{Mutation, mutated};

use super::OrderedBy;

/// | domain | orders |
/// | --- | --- |
/// | verbs, reliable connection; shm, where one thread copies in the order of posting | [`RcQueuePair`](Ordering::RcQueuePair) |
/// | libfabric, a provider with `FI_FENCE` | [`FencePerPeer`](Ordering::FencePerPeer) |
/// | libfabric with `FI_DELIVERY_COMPLETE` (EFA's SRD), tcp, sim | [`WhenPlaced`](Ordering::WhenPlaced) |
/// | libfabric with completions on transmission only | [`None`](Ordering::None) |
///
/// A greater one orders less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ordering {
    /// Writes on one queue pair land in the order of posting; nothing holds between two. The fence
    /// (`IBV_SEND_FENCE`) adds that prior reads and atomics are done: what a put sends may have been
    /// read from elsewhere by the request before it.
    RcQueuePair,
    /// Nothing is in order, except that a fenced request starts when everything that went to its peer
    /// on its queue pair is acknowledged.
    FencePerPeer,
    /// Nothing is in order and there is no fence, but an acknowledgement says that the bytes are in
    /// the target's memory. A poster that waits can order.
    WhenPlaced,
    /// An acknowledgement does not say so either. Only counters at the receiver do.
    None,
}

/// Why a plan counts instead of signalling.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fallback {
    #[error("the transport has no fence: order by waiting, or consume by the counter")]
    NoFence,
    #[error(
        "an acknowledgement of this transport does not confirm that data is in place: consume by \
         the counter"
    )]
    NotPlaced,
}

impl Ordering {
    /// Why signals cannot be ordered so. `None`: they can.
    pub fn refuses(self, ordered_by: OrderedBy) -> Option<Fallback> {
        match (self, ordered_by) {
            (Ordering::RcQueuePair | Ordering::FencePerPeer, _)
            | (Ordering::WhenPlaced, OrderedBy::Host) => None,
            (Ordering::WhenPlaced, OrderedBy::Nic) => Some(Fallback::NoFence),
            (Ordering::None, OrderedBy::Host) if mutated(Mutation::SignalWithoutPlacement) => None,
            (Ordering::None, _) => Some(Fallback::NotPlaced),
        }
    }

    /// Whether an acknowledgement speaks for what was posted before on its queue pair.
    pub fn acknowledges_in_order(self) -> bool {
        self == Ordering::RcQueuePair
    }
}
