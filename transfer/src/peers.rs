//! Who our peers are: one entry for each incarnation of an engine, with the current session and the
//! generations of cut-offs in both directions.
//!
//! A cut-off must also hold against connections that do not exist yet. So each engine counts the
//! cut-offs of a peer, and the peer names in its hello the count it knows. One that is too old is
//! refused, which ends the session it was made for; the next session knows the new count.

use std::collections::BTreeMap;

use kvasir_transfer_core::SessionId;

use crate::endpoint::Endpoint;
use crate::engine::{ConnectError, PeerId};

/// Beyond it, peers that need not be remembered are forgotten, the least recently used first.
const PEERS_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Peers {
    by_incarnation: BTreeMap<u64, u32>,
    peers: BTreeMap<u32, Peer>,
    next_peer: u32,
    uses: u64,
}

#[derive(Debug)]
struct Peer {
    endpoint: Endpoint,
    session: u32,
    last_use: u64,
    /// How often we cut it off.
    cut_here: u64,
    /// How often it cut us off, as far as we know.
    cut_there: u64,
}

impl PeerId {
    pub(crate) fn session_id(self) -> SessionId {
        SessionId(u64::from(self.peer) << 32 | u64::from(self.session))
    }

    pub(crate) fn from_session(session: SessionId) -> Self {
        PeerId { peer: (session.0 >> 32) as u32, session: session.0 as u32 }
    }
}

impl Peers {
    /// The current session with the peer.
    pub(crate) fn session(&mut self, endpoint: &Endpoint) -> Result<PeerId, ConnectError> {
        self.uses += 1;
        if let Some(peer) = self.by_incarnation.get(&endpoint.incarnation).copied()
            && let Some(known) = self.peers.get_mut(&peer)
        {
            known.last_use = self.uses;
            return Ok(PeerId { peer, session: known.session });
        }
        if self.peers.len() >= PEERS_MAX {
            self.forget_one()?;
        }
        let peer = self.next_peer;
        self.next_peer = peer.checked_add(1).ok_or(ConnectError::TooMany)?;
        self.by_incarnation.insert(endpoint.incarnation, peer);
        let endpoint = endpoint.clone();
        let fresh = Peer { endpoint, session: 0, last_use: self.uses, cut_here: 0, cut_there: 0 };
        self.peers.insert(peer, fresh);
        Ok(PeerId { peer, session: 0 })
    }

    /// A peer that was cut off is kept: its old connections must stay refused.
    fn forget_one(&mut self) -> Result<(), ConnectError> {
        let forgettable = self.peers.iter().filter(|(_, peer)| peer.cut_here == 0);
        let oldest = forgettable.min_by_key(|(_, peer)| peer.last_use).map(|(peer, _)| *peer);
        let oldest = oldest.ok_or(ConnectError::TooMany)?;
        if let Some(peer) = self.peers.remove(&oldest) {
            self.by_incarnation.remove(&peer.endpoint.incarnation);
        }
        Ok(())
    }

    pub(crate) fn is_current(&self, id: PeerId) -> bool {
        self.peers.get(&id.peer).is_some_and(|peer| peer.session == id.session)
    }

    pub(crate) fn endpoint(&self, id: PeerId) -> Option<&Endpoint> {
        self.peers.get(&id.peer).map(|peer| &peer.endpoint)
    }

    /// The session is over; `connect` gives the next one.
    pub(crate) fn end_session(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id.peer)
            && peer.session == id.session
        {
            peer.session = peer.session.wrapping_add(1);
        }
    }

    /// Refuses every connection of the peer that does not know of this cut-off. Returns the peer's
    /// incarnation.
    pub(crate) fn cut_off(&mut self, id: PeerId) -> Option<u64> {
        let peer = self.peers.get_mut(&id.peer)?;
        peer.cut_here += 1;
        Some(peer.endpoint.incarnation)
    }

    /// Whether a connection that knows of `cut_offs` may be taken; else how many there were.
    pub(crate) fn admit(&self, incarnation: u64, cut_offs: u64) -> Result<(), u64> {
        let peer = self.by_incarnation.get(&incarnation).and_then(|peer| self.peers.get(peer));
        let cut_here = peer.map_or(0, |peer| peer.cut_here);
        if cut_offs == cut_here { Ok(()) } else { Err(cut_here) }
    }

    /// What a connection to the peer says about cut-offs.
    pub(crate) fn cut_offs_known(&self, id: PeerId) -> u64 {
        self.peers.get(&id.peer).map_or(0, |peer| peer.cut_there)
    }

    pub(crate) fn learn_cut_offs(&mut self, id: PeerId, cut_offs: u64) {
        if let Some(peer) = self.peers.get_mut(&id.peer) {
            peer.cut_there = cut_offs;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(incarnation: u64) -> Endpoint {
        Endpoint { incarnation, cookie: [0; 16], shm: None, tcp: None }
    }

    #[test]
    fn a_session_lasts_until_it_is_ended() {
        let mut peers = Peers::default();
        let first = peers.session(&endpoint(1)).expect("room");
        assert_eq!(peers.session(&endpoint(1)), Ok(first));
        assert_ne!(peers.session(&endpoint(2)), Ok(first));
        assert_eq!(PeerId::from_session(first.session_id()), first);
        peers.end_session(first);
        let second = peers.session(&endpoint(1)).expect("room");
        assert!(!peers.is_current(first) && peers.is_current(second));
        peers.end_session(first);
        assert!(peers.is_current(second), "an old end does not end a later session");
    }

    #[test]
    fn a_cut_off_refuses_connections_that_do_not_know_of_it() {
        let mut peers = Peers::default();
        let peer = peers.session(&endpoint(1)).expect("room");
        assert_eq!(peers.admit(1, 0), Ok(()));
        assert_eq!(peers.cut_off(peer), Some(1));
        assert_eq!(peers.admit(1, 0), Err(1));
        assert_eq!(peers.admit(1, 1), Ok(()));
        peers.end_session(peer);
        assert_eq!(peers.cut_off(peer), Some(1), "also for a session that has ended");
        assert_eq!(peers.admit(1, 1), Err(2));
    }

    #[test]
    fn the_least_recently_used_peer_is_forgotten_unless_it_was_cut_off() {
        let mut peers = Peers::default();
        let first = peers.session(&endpoint(0)).expect("room");
        peers.cut_off(first);
        for incarnation in 1..=PEERS_MAX as u64 {
            peers.session(&endpoint(incarnation)).expect("one is forgotten");
        }
        assert_eq!(peers.admit(0, 0), Err(1), "0 is remembered");
        assert!(!peers.by_incarnation.contains_key(&1), "1 was the oldest of the others");
    }
}
