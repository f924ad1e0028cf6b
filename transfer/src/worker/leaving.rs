//! Writers whose connection has ended here while something of theirs was under way. The connection is cut,
//! so nothing more begins, but a shm sender copies with its own hands, and a network card may have placed
//! what is not counted yet. Until that is over their path has not ended, and nobody is told that nothing
//! more lands.

use std::collections::BTreeSet;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::PathId;

use crate::config::Domain;
use crate::engine::{Loss, PeerEvent};
use crate::rdma::incoming::Draining;
use crate::shm::Copying;

use super::hub::Hub;
use super::quiesce::UnderWay;

#[derive(Debug, Default)]
pub(super) struct Leaving(Vec<Writer>);

/// What is left of a connection.
#[derive(Debug)]
pub(super) enum Rest {
    Copying {
        copying: Copying,
        /// Keys of the regions that the copy may go to.
        given: BTreeSet<u64>,
    },
    Draining(Box<Draining>),
}

impl Rest {
    fn under_way(&self) -> UnderWay {
        match self {
            Rest::Copying { copying, .. } => UnderWay::Copy(copying.clone()),
            Rest::Draining(draining) => UnderWay::Card(draining.over()),
        }
    }

    fn may_land_in(&self, key: u64) -> bool {
        match self {
            Rest::Copying { given, .. } => given.contains(&key),
            // Which regions a card knows is the card's to say.
            Rest::Draining(_) => true,
        }
    }

    fn is_over(&mut self, hub: &mut Hub) -> bool {
        match self {
            Rest::Copying { copying, .. } => {
                mutated(Mutation::CutOffIgnoresCopies) || copying.is_over()
            }
            Rest::Draining(draining) => draining.look(hub),
        }
    }
}

#[derive(Debug)]
struct Writer {
    rest: Rest,
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
    /// One of which the end is counted.
    pub(super) fn add(&mut self, ended: Ended, mut rest: Rest) {
        if let Rest::Draining(draining) = &mut rest {
            draining.hang_up();
        }
        self.0.push(Writer { rest, ended });
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Whatever may still land in the region.
    pub(super) fn bound_for(&self, key: u64) -> Vec<UnderWay> {
        let into_it = self.0.iter().filter(|writer| writer.rest.may_land_in(key));
        into_it.map(|writer| writer.rest.under_way()).collect()
    }

    /// Of one peer.
    pub(super) fn of(&self, incarnation: u64) -> Vec<UnderWay> {
        let of_peer = self.0.iter().filter(|writer| writer.ended.incarnation == incarnation);
        of_peer.map(|writer| writer.rest.under_way()).collect()
    }

    /// Ends the paths of which nothing is left. Whether there was one.
    pub(super) fn look(&mut self, hub: &mut Hub) -> bool {
        let over: Vec<Ended> = self
            .0
            .extract_if(.., |writer| writer.rest.is_over(hub))
            .map(|writer| writer.ended)
            .collect();
        for ended in &over {
            ended.take_effect(hub);
        }
        !over.is_empty()
    }
}
