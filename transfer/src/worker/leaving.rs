//! Writers whose shm connection has ended here while a copy of theirs was under way. The connection is
//! cut, so no further copy begins, but the sender copies with its own hands: its bytes may still land
//! until that copy has ended or its process has. Until then its path has not ended, and nobody is told
//! that nothing more lands.

use kvasir_transfer_core::PathId;

use crate::config::Domain;
use crate::engine::{Loss, PeerEvent};
use crate::shm::Copying;

use super::hub::Hub;

#[derive(Debug, Default)]
pub(super) struct Leaving(Vec<Writer>);

#[derive(Debug)]
struct Writer {
    copying: Copying,
    ended: Ended,
}

/// A connection that has ended, with what follows when nothing of it is under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ended {
    pub(super) incarnation: u64,
    pub(super) path: PathId,
    pub(super) domain: Domain,
    pub(super) tell: Tell,
    pub(super) why: Loss,
}

/// Whether the peer's loss is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tell {
    /// We have ended it ourselves.
    Nothing,
    /// It is, if this was its last connection.
    IfLast,
    /// Its session is over, and with it what came through its connections.
    Loss,
}

impl Ended {
    pub(super) fn take_effect(self, hub: &mut Hub) {
        let Ended { incarnation, path, domain, tell, why } = self;
        hub.path_ended(path);
        let is_lost = match tell {
            Tell::Nothing => false,
            Tell::IfLast => !hub.receiver.is_connected(incarnation),
            Tell::Loss => true,
        };
        if is_lost {
            let domain = Some(domain);
            hub.calls.peer(PeerEvent::WriterLost { incarnation, domain, why });
        }
    }
}

impl Leaving {
    pub(super) fn add(&mut self, ended: Ended, copying: Copying) {
        self.0.push(Writer { copying, ended });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Copies into any region.
    pub(super) fn all(&self) -> Vec<Copying> {
        self.0.iter().map(|writer| writer.copying.clone()).collect()
    }

    /// Copies of one peer.
    pub(super) fn of(&self, incarnation: u64) -> Vec<Copying> {
        let of_peer = self.0.iter().filter(|writer| writer.ended.incarnation == incarnation);
        of_peer.map(|writer| writer.copying.clone()).collect()
    }

    /// Ends the paths whose copies are over. Whether there was one.
    pub(super) fn look(&mut self, hub: &mut Hub) -> bool {
        let over: Vec<Ended> = self
            .0
            .extract_if(.., |writer| writer.copying.is_over())
            .map(|writer| writer.ended)
            .collect();
        for ended in &over {
            ended.take_effect(hub);
        }
        !over.is_empty()
    }
}
