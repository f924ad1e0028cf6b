//! What tests ask of an engine to see that what they look for is there to be seen. Only with the feature
//! `test-hooks`, which is for dev-dependencies: without it nothing here can be asked for.

#[cfg(feature = "test-hooks")]
use std::sync::atomic::{AtomicBool, Ordering};

#[cfg(feature = "test-hooks")]
use kvasir_transfer_core::{PathIndex, SessionId};

#[cfg(feature = "test-hooks")]
use crate::endpoint::Endpoint;
#[cfg(feature = "test-hooks")]
use crate::engine::TransferEngine;
#[cfg(feature = "test-hooks")]
use crate::hello::Hello;
#[cfg(feature = "test-hooks")]
use crate::shared::Shared;

#[derive(Debug, Default)]
pub(crate) struct Hooks {
    #[cfg(feature = "test-hooks")]
    signals_unpinned: AtomicBool,
    #[cfg(feature = "test-hooks")]
    regions_withheld: AtomicBool,
}

#[cfg(feature = "test-hooks")]
impl Hooks {
    pub(crate) fn signals_unpinned(&self) -> bool {
        self.signals_unpinned.load(Ordering::Acquire)
    }

    pub(crate) fn regions_withheld(&self) -> bool {
        self.regions_withheld.load(Ordering::Acquire)
    }
}

#[cfg(not(feature = "test-hooks"))]
#[allow(clippy::unused_self, reason = "as they are with the feature")]
impl Hooks {
    pub(crate) fn signals_unpinned(&self) -> bool {
        false
    }

    pub(crate) fn regions_withheld(&self) -> bool {
        false
    }
}

#[cfg(feature = "test-hooks")]
impl TransferEngine {
    /// From now on puts and their signals take any queue pair, so that nothing keeps a signal behind its data
    /// where the card was to. What is wrong then must be seen.
    pub fn unpin_signals(&self) {
        self.shared().hooks.signals_unpinned.store(true, Ordering::Release);
    }

    /// Whether no card takes the regions that are registered from now on, as for want of locked memory.
    pub fn withhold_regions_from_cards(&self, withhold: bool) {
        self.shared().hooks.regions_withheld.store(withhold, Ordering::Release);
    }

    /// What this engine would say first to another one over tcp, to have a card place its writes. It is not
    /// sent.
    pub fn greeting(&self, to: &Endpoint, domain: u32, card: Vec<u8>) -> Vec<u8> {
        let Shared { endpoint, identity, .. } = self.shared();
        let hello = Hello::new(endpoint, to, 0, (SessionId(1), PathIndex(0)));
        crate::tcp::greeting(&Hello { domain, card, ..hello }.signed(identity))
    }
}
