//! Who our peers are: one entry for each incarnation of an engine, with the current session and the
//! generations of cut-offs in both directions.
//!
//! A cut-off must also hold against connections that do not exist yet. So each engine counts the
//! cut-offs of a peer, and the peer names in its hello the count it knows. One that is too old is
//! refused, which ends the session it was made for; the next session knows the new count.
//!
//! The table is bounded: the least recently used peer that we have no connection to is forgotten. Where
//! it had been cut off, everyone who is not known counts as cut off that often from then on: its old
//! connections stay refused, and a stranger loses its first session, in which it learns the count. So
//! neither restarts nor strangers ever fill the table for good.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::SessionId;

use crate::endpoint::Endpoint;
use crate::engine::{ConnectError, PeerId};
use crate::rdma::RdmaAddress;

pub(crate) const PEERS_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// By incarnation.
    peers: BTreeMap<u64, Peer>,
    /// The incarnation of each current session.
    sessions: BTreeMap<u64, u64>,
    /// Sessions are never numbered alike, not even those of a peer that was forgotten between.
    next_session: u64,
    uses: u64,
    /// How often we cut off those that are not known, at most.
    cut_unknown: u64,
}

#[derive(Debug)]
struct Peer {
    endpoint: Endpoint,
    session: u64,
    /// The session has a connection, or is about to.
    connected: bool,
    last_use: u64,
    /// How often we cut it off, or may have.
    cut_here: u64,
    /// How often it cut us off, as far as we know.
    cut_there: u64,
}

impl PeerId {
    pub(crate) fn session_id(self) -> SessionId {
        SessionId(self.session)
    }
}

impl Peers {
    /// The current session with the peer.
    pub(crate) fn session(&mut self, endpoint: &Endpoint) -> Result<PeerId, ConnectError> {
        self.uses += 1;
        let incarnation = endpoint.incarnation;
        if let Some(known) = self.peers.get_mut(&incarnation) {
            known.last_use = self.uses;
            return Ok(PeerId { incarnation, session: known.session });
        }
        if self.peers.len() >= PEERS_MAX {
            self.forget_one()?;
        }
        let session = self.new_session(incarnation);
        let fresh = Peer {
            endpoint: endpoint.clone(),
            session,
            connected: false,
            last_use: self.uses,
            cut_here: self.cut_unknown,
            cut_there: 0,
        };
        self.peers.insert(incarnation, fresh);
        Ok(PeerId { incarnation, session })
    }

    fn new_session(&mut self, incarnation: u64) -> u64 {
        let session = self.next_session;
        self.next_session += 1;
        self.sessions.insert(session, incarnation);
        session
    }

    fn forget_one(&mut self) -> Result<(), ConnectError> {
        let idle = self.peers.iter().filter(|(_, peer)| !peer.connected);
        let oldest =
            idle.min_by_key(|(_, peer)| peer.last_use).map(|(incarnation, _)| *incarnation);
        let oldest = oldest.ok_or(ConnectError::TooMany)?;
        if let Some(peer) = self.peers.remove(&oldest) {
            self.sessions.remove(&peer.session);
            self.cut_unknown = self.cut_unknown.max(peer.cut_here);
        }
        Ok(())
    }

    pub(crate) fn is_current(&self, id: PeerId) -> bool {
        self.sessions.get(&id.session) == Some(&id.incarnation)
    }

    /// A session that has not ended.
    pub(crate) fn of_session(&self, session: SessionId) -> Option<PeerId> {
        let incarnation = *self.sessions.get(&session.0)?;
        Some(PeerId { incarnation, session: session.0 })
    }

    /// The session is about to get its connection: whom to connect to, and what to say about cut-offs.
    /// From now on the peer is not forgotten until the session ends.
    pub(crate) fn connecting(&mut self, id: PeerId) -> Option<(Endpoint, u64)> {
        let peer = self.peers.get_mut(&id.incarnation).filter(|peer| peer.session == id.session)?;
        peer.connected = true;
        Some((peer.endpoint.clone(), peer.cut_there))
    }

    /// The peer's network cards, while it is known.
    pub(crate) fn rdma(&self, id: PeerId) -> Option<RdmaAddress> {
        self.peers.get(&id.incarnation).and_then(|peer| peer.endpoint.rdma.clone())
    }

    /// What admits to the peer, while it is known.
    pub(crate) fn cookie(&self, id: PeerId) -> Option<[u8; 16]> {
        self.peers.get(&id.incarnation).map(|peer| peer.endpoint.cookie)
    }

    /// The session is over; `connect` gives the next one.
    pub(crate) fn end_session(&mut self, id: PeerId) {
        if !self.is_current(id) {
            return;
        }
        self.sessions.remove(&id.session);
        let session = self.new_session(id.incarnation);
        if let Some(peer) = self.peers.get_mut(&id.incarnation) {
            peer.session = session;
            peer.connected = false;
        }
    }

    /// Refuses every connection of the peer that does not know of this cut-off.
    pub(crate) fn cut_off(&mut self, incarnation: u64) {
        match self.peers.get_mut(&incarnation) {
            Some(peer) => peer.cut_here += 1,
            None => self.cut_unknown += 1,
        }
    }

    /// Whether a connection that knows of `cut_offs` may be taken; else how many there were.
    pub(crate) fn admit(&self, incarnation: u64, cut_offs: u64) -> Result<(), u64> {
        let cut_here = self.peers.get(&incarnation).map_or(self.cut_unknown, |peer| peer.cut_here);
        let is_ignored = mutated(Mutation::CutOffIgnoredOnReconnect) && cut_offs < cut_here;
        if cut_offs == cut_here || is_ignored { Ok(()) } else { Err(cut_here) }
    }

    /// What the next connection to the peer says about cut-offs.
    pub(crate) fn learn_cut_offs(&mut self, id: PeerId, cut_offs: u64) {
        if let Some(peer) = self.peers.get_mut(&id.incarnation) {
            peer.cut_there = cut_offs;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(incarnation: u64) -> Endpoint {
        Endpoint { incarnation, cookie: [0; 16], shm: None, tcp: None, rdma: None }
    }

    fn use_all(peers: &mut Peers, incarnations: std::ops::Range<u64>) {
        for incarnation in incarnations {
            peers.session(&endpoint(incarnation)).expect("one is forgotten");
        }
    }

    #[test]
    fn a_session_lasts_until_it_is_ended() {
        let mut peers = Peers::default();
        let first = peers.session(&endpoint(1)).expect("room");
        assert_eq!(peers.session(&endpoint(1)), Ok(first));
        assert_ne!(peers.session(&endpoint(2)), Ok(first));
        assert_eq!(peers.of_session(first.session_id()), Some(first));
        peers.end_session(first);
        let second = peers.session(&endpoint(1)).expect("room");
        assert!(!peers.is_current(first) && peers.is_current(second));
        assert_eq!(peers.of_session(first.session_id()), None);
        peers.end_session(first);
        assert!(peers.is_current(second), "an old end does not end a later session");
    }

    #[test]
    fn a_cut_off_refuses_connections_that_do_not_know_of_it() {
        let mut peers = Peers::default();
        let peer = peers.session(&endpoint(1)).expect("room");
        assert_eq!(peers.admit(1, 0), Ok(()));
        peers.cut_off(1);
        assert_eq!(peers.admit(1, 0), Err(1));
        assert_eq!(peers.admit(1, 1), Ok(()));
        peers.end_session(peer);
        peers.cut_off(1);
        assert_eq!(peers.admit(1, 1), Err(2), "also for a session that has ended");
    }

    #[test]
    fn the_least_recently_used_peer_is_forgotten_unless_it_is_connected() {
        let mut peers = Peers::default();
        let connected = peers.session(&endpoint(0)).expect("room");
        assert!(peers.connecting(connected).is_some());
        let idle = peers.session(&endpoint(1)).expect("room");
        use_all(&mut peers, 2..PEERS_MAX as u64 + 1);
        assert_eq!(peers.peers.len(), PEERS_MAX);
        assert!(peers.is_current(connected) && !peers.is_current(idle));
        assert_eq!(peers.sessions.len(), PEERS_MAX, "sessions are forgotten with their peers");
        assert_ne!(peers.session(&endpoint(1)), Ok(idle), "its old session never comes back");
        assert!(peers.connecting(idle).is_none());
        peers.end_session(connected);
        use_all(&mut peers, 5000..5000 + PEERS_MAX as u64);
        assert!(!peers.is_current(connected));
        assert_eq!(peers.admit(9999, 0), Ok(()), "no peer was cut off");
    }

    #[test]
    fn while_every_peer_is_connected_there_is_no_room_and_afterwards_there_is() {
        let mut peers = Peers::default();
        let mut all = Vec::new();
        for incarnation in 0..PEERS_MAX as u64 {
            let peer = peers.session(&endpoint(incarnation)).expect("room");
            assert!(peers.connecting(peer).is_some());
            all.push(peer);
        }
        assert_eq!(peers.session(&endpoint(9999)), Err(ConnectError::TooMany));
        peers.end_session(all[7]);
        assert!(peers.session(&endpoint(9999)).is_ok());
    }

    #[test]
    fn cut_off_peers_make_room_and_their_old_connections_stay_refused() {
        let mut peers = Peers::default();
        for incarnation in 0..3 * PEERS_MAX as u64 {
            peers.session(&endpoint(incarnation)).expect("one is forgotten");
            let known = peers.admit(incarnation, 0).err().unwrap_or(0);
            assert_eq!(peers.admit(incarnation, known), Ok(()));
            peers.cut_off(incarnation);
            assert!(peers.admit(incarnation, known).is_err());
        }
        assert_eq!(peers.peers.len(), PEERS_MAX);
        assert!(!peers.peers.contains_key(&1));
        let cut_unknown = peers.cut_unknown;
        for before in 0..cut_unknown {
            assert_eq!(peers.admit(1, before), Err(cut_unknown), "an earlier session");
        }
        assert_eq!(peers.admit(1, cut_unknown), Ok(()), "it has learned of it");
        // A stranger is told the count, and knows it in its next session.
        assert_eq!(peers.admit(77_777, 0), Err(cut_unknown));
        assert_eq!(peers.admit(77_777, cut_unknown), Ok(()));
        peers.session(&endpoint(77_777)).expect("room");
        let cut_unknown = peers.cut_unknown;
        assert_eq!(peers.admit(77_777, cut_unknown), Ok(()), "it goes on from there");
    }

    #[test]
    fn a_cut_off_of_a_forgotten_peer_holds_too() {
        let mut peers = Peers::default();
        peers.session(&endpoint(1)).expect("room");
        use_all(&mut peers, 2..PEERS_MAX as u64 + 2);
        assert_eq!(peers.admit(1, 0), Ok(()));
        peers.cut_off(1);
        assert_eq!(peers.admit(1, 0), Err(1));
        assert_eq!(peers.admit(2, 0), Ok(()), "those that are known are not meant");
    }
}
