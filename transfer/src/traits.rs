//! What callers may rely on of a domain, beyond what all of them promise.

use kvasir_transfer_core::signal::{self, Fallback, OrderedBy};

use crate::config::Domain;

/// See [`Domain::traits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DomainTraits {
    /// What keeps a signal behind its data; see [`crate::signalled`].
    pub orders: signal::Ordering,
    pub posts: Poster,
    /// When an arrival is counted, its bytes are in the memory of the host that counts. In the memory of a device, the
    /// host has to act on the device first, or mirror the count to it (see [`crate::Mirror`]).
    pub visible_to: Visible,
}

/// Who gives a domain's writes to the wire. Nothing assumes that a processor does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Poster {
    /// A thread of the host, for whoever computes: the worker of the engine. Every domain of today.
    HostProxy,
    /// The device that computes.
    Device,
}

/// To whom what has landed is visible when it is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Visible {
    /// The processors of the host. A device sees it after the host has acted on the device.
    Host,
}

impl Domain {
    /// | domain | orders | who posts |
    /// | --- | --- | --- |
    /// | `shm` | by the order of the copies, which one thread makes | the host |
    /// | `tcp` | by waiting only: a put that is refused does not stop what is behind it on its connection | the host |
    /// | `verbs` | by its queue pairs, and by the fence flag; not at all at a peer with `relaxed_ordering`, where PCIe does not | the host, for the card |
    /// | `efa` | by waiting only: nothing is in order, and an acknowledgement says that the bytes are in place | the host, for the card |
    ///
    /// The simulated domain ([`crate::sim`]) orders by waiting only.
    pub fn traits(self) -> DomainTraits {
        let orders = match self {
            Domain::Shm | Domain::Verbs => signal::Ordering::RcQueuePair,
            Domain::Tcp | Domain::Efa => signal::Ordering::WhenPlaced,
        };
        DomainTraits { orders, posts: Poster::HostProxy, visible_to: Visible::Host }
    }
}

impl DomainTraits {
    /// Whether this domain can order signals so. If not, its data is counted instead.
    ///
    /// # Errors
    /// The reason, which [`crate::signalled::SignalOutcomes::told`] will give.
    pub fn signals(&self, ordered_by: OrderedBy) -> Result<(), Fallback> {
        self.orders.refuses(ordered_by).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_domain_says_what_it_orders() {
        let check = |domain: Domain, by_nic| {
            assert_eq!(domain.traits().signals(OrderedBy::Host), Ok(()), "{domain:?}");
            assert_eq!(domain.traits().signals(OrderedBy::Nic), by_nic, "{domain:?}");
        };
        check(Domain::Shm, Ok(()));
        check(Domain::Verbs, Ok(()));
        check(Domain::Tcp, Err(Fallback::NoFence));
        check(Domain::Efa, Err(Fallback::NoFence));
    }
}
