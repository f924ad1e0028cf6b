//! The simulated network: connections, frames in flight, and what happens to them when.

use kvasir_transfer_core::{Frame, FrameKind, PathId, Refusal, SessionId, Settled};

use super::World;
use super::node::{NodeId, Wanted};
use crate::engine::PeerEvent;
use crate::payload::Payload;

/// A payload lands in up to so many parts.
const PARTS_MAX: u64 = 4;

/// A connection, from the sender's side.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) up: bool,
    to: NodeId,
    path: PathId,
    /// The receiver takes nothing more from it.
    cut: bool,
}

/// A frame on its way.
#[derive(Debug)]
pub(super) struct Flight {
    from: NodeId,
    to: NodeId,
    session: SessionId,
    path: PathId,
    sequence: u64,
    kind: FrameKind,
    bytes: Vec<u8>,
    refused: Option<Refusal>,
    cut: bool,
}

#[derive(Debug)]
pub(super) enum Event {
    /// The hello has arrived.
    Hello {
        from: NodeId,
        session: SessionId,
        cut_offs: u64,
    },
    /// A part of a frame's payload lands.
    Part {
        flight: u64,
        start: usize,
        end: usize,
    },
    /// The whole frame is there.
    Arrived {
        flight: u64,
    },
    Settled {
        to: NodeId,
        session: SessionId,
        sequence: u64,
        settled: Settled,
    },
    /// The sender learns that its connection is gone.
    SessionLost {
        of: NodeId,
        session: SessionId,
        cut_offs: Option<u64>,
    },
    /// The receiver learns that a writer is gone.
    WriterLost {
        at: NodeId,
        incarnation: u64,
    },
}

impl World {
    pub(super) fn perform(&mut self, id: NodeId, wanted: Wanted) {
        let latency_us = self.config.latency_us;
        match wanted {
            Wanted::Connect(session) => {
                let peers = &mut self.node(id).peers;
                let peer = peers.of_session(session).and_then(|peer| peers.connecting(peer));
                let cut_offs = peer.map_or(0, |(_, cut_offs)| cut_offs);
                let at_us = self.now_us + latency_us;
                self.at(at_us, Event::Hello { from: id, session, cut_offs });
            }
            Wanted::GiveUp(session) => {
                let now_us = self.now_us;
                self.at(now_us, Event::SessionLost { of: id, session, cut_offs: None });
            }
        }
    }

    pub(super) fn kill(&mut self, id: NodeId) {
        self.node(id).alive = false;
        let incarnation = self.node(id).endpoint.incarnation;
        let at_us = self.now_us + self.config.latency_us + self.config.jitter_us;
        let ends: Vec<_> =
            self.links.iter().map(|((from, session), link)| (*from, *session, link.to)).collect();
        for (from, session, to) in ends {
            if to == id {
                self.at(at_us, Event::SessionLost { of: from, session, cut_offs: None });
            }
            if from == id {
                self.at(at_us, Event::WriterLost { at: to, incarnation });
            }
        }
    }

    /// The receiver takes nothing more from the sender's connections, nor from what is on its way.
    pub(super) fn cut_links(&mut self, incarnation: u64, receiver: NodeId) {
        let Some(sender) = self.find(incarnation) else { return };
        let at_us = self.now_us + self.config.latency_us;
        let mut lost = Vec::new();
        for ((from, session), link) in &mut self.links {
            if *from == sender && link.to == receiver {
                link.cut = true;
                lost.push(*session);
            }
        }
        for flight in self.flights.values_mut() {
            flight.cut |= flight.from == sender && flight.to == receiver;
        }
        for session in lost {
            self.at(at_us, Event::SessionLost { of: sender, session, cut_offs: None });
        }
    }

    pub(super) fn depart(&mut self, from: NodeId, session: SessionId, frame: Frame<Payload>) {
        let Some(link) = self.links.get(&(from, session)) else { return };
        let (to, path, cut) = (link.to, link.path, link.cut);
        let wire_us = frame.bytes.saturating_mul(1_000_000) / self.config.bytes_per_s.max(1);
        let now_us = self.now_us;
        let node = self.node(from);
        node.wire_free_us = node.wire_free_us.max(now_us) + wire_us;
        let departed_us = node.wire_free_us;
        let delay_us = self.config.latency_us + self.random.upto(self.config.jitter_us);
        let arrived_us = departed_us + delay_us;

        let bytes = frame.payload.bytes(frame.source_offset as usize, frame.bytes as usize);
        let bytes = bytes.to_vec();
        let id = self.next_serial;
        self.next_serial += 1;
        if matches!(frame.kind, FrameKind::Write { .. }) {
            self.schedule_parts(id, bytes.len(), (now_us, arrived_us));
        }
        let (sequence, kind, refused) = (frame.sequence, frame.kind, None);
        let flight = Flight { from, to, session, path, sequence, kind, bytes, refused, cut };
        self.flights.insert(id, flight);
        self.at(arrived_us, Event::Arrived { flight: id });
    }

    /// Parts land at any time before the whole is there.
    fn schedule_parts(&mut self, flight: u64, bytes: usize, (from_us, until_us): (u64, u64)) {
        let parts = 1 + self.random.upto(PARTS_MAX - 1) as usize;
        let part_bytes = bytes.div_ceil(parts).max(1);
        for start in (0..bytes).step_by(part_bytes) {
            let at_us = from_us + self.random.upto(until_us - from_us);
            let end = bytes.min(start + part_bytes);
            self.at(at_us, Event::Part { flight, start, end });
        }
    }

    pub(super) fn happen(&mut self, event: Event) {
        match event {
            Event::Hello { from, session, cut_offs } => self.greet(from, session, cut_offs),
            Event::Part { flight, start, end } => self.land_part(flight, start, end),
            Event::Arrived { flight } => self.arrive(flight),
            Event::Settled { to, session, sequence, settled } => {
                let now_us = self.now_us;
                if self.node(to).hears {
                    self.node(to).sender.settle(session, sequence, settled, now_us);
                }
            }
            Event::SessionLost { of, session, cut_offs } => self.lose(of, session, cut_offs),
            Event::WriterLost { at, incarnation } => {
                self.node(at).calls.peer(PeerEvent::WriterLost { incarnation, domain: None });
            }
        }
    }

    fn greet(&mut self, from: NodeId, session: SessionId, cut_offs: u64) {
        let now_us = self.now_us;
        let answer_us = now_us + self.config.latency_us;
        let incarnation = self.node(from).endpoint.incarnation;
        let peer = self.node(from).peers.of_session(session);
        let to = peer.and_then(|peer| self.find(peer.incarnation));
        let Some(to) = to.filter(|to| self.node(*to).alive) else {
            self.at(answer_us, Event::SessionLost { of: from, session, cut_offs: None });
            return;
        };
        match self.node(to).peers.admit(incarnation, cut_offs) {
            Ok(()) => {
                let path = PathId(self.next_serial);
                self.next_serial += 1;
                self.links.insert((from, session), Link { up: true, to, path, cut: false });
                self.node(from).sender.session_up(session, now_us);
            }
            Err(cut_offs) => {
                let cut_offs = Some(cut_offs);
                self.at(answer_us, Event::SessionLost { of: from, session, cut_offs });
            }
        }
    }

    fn lose(&mut self, of: NodeId, session: SessionId, cut_offs: Option<u64>) {
        let link = self.links.remove(&(of, session));
        let node = self.node(of);
        let Some(peer) = node.peers.of_session(session) else { return };
        if let Some(cut_offs) = cut_offs {
            node.peers.learn_cut_offs(peer, cut_offs);
        }
        node.peers.end_session(peer);
        let incarnation = peer.incarnation;
        node.sender.session_lost(session);
        node.calls.peer(PeerEvent::SessionLost { peer, incarnation, domain: None });
        // What the sender gave up by itself, the receiver learns a little later.
        if let Some(link) = link.filter(|link| !link.cut) {
            let incarnation = self.node(of).endpoint.incarnation;
            let at_us = self.now_us + self.config.latency_us;
            self.at(at_us, Event::WriterLost { at: link.to, incarnation });
        }
    }

    fn land_part(&mut self, id: u64, start: usize, end: usize) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        let FrameKind::Write { target, offset, .. } = flight.kind else { return };
        let Some(node) = self.nodes.get_mut(&flight.to) else { return };
        if flight.cut || !node.alive || flight.refused.is_some() {
            return;
        }
        match node.regions.check(target, offset, flight.bytes.len() as u64) {
            Ok(memory) => {
                let copied = memory.copy_from(offset as usize + start, &flight.bytes[start..end]);
                debug_assert!(copied.is_ok(), "checked just now");
                node.counts.received_bytes += (end - start) as u64;
            }
            Err(refusal) => flight.refused = Some(refusal),
        }
    }

    fn arrive(&mut self, id: u64) {
        let Some(flight) = self.flights.remove(&id) else { return };
        let verify = self.config.verify;
        let answer_us = self.now_us + self.config.latency_us;
        let from = self.node(flight.from).endpoint.clone();
        let node = self.node(flight.to);
        if flight.cut || !node.alive {
            return;
        }
        let settled = match flight.kind {
            FrameKind::Message => {
                if let Ok(peer) = node.peers.session(&from) {
                    node.calls.message(peer, flight.bytes);
                }
                Settled::Landed
            }
            FrameKind::Write { target, offset, imm, checksum } => {
                let bytes = flight.bytes.len() as u64;
                let refused = flight.refused;
                let checked = refused
                    .map_or_else(|| node.regions.check(target, offset, bytes).map(|_| ()), Err);
                let intact = !verify
                    || checksum.is_none_or(|wanted| crate::checksum(&flight.bytes) == wanted);
                node.count(flight.path, imm, checked, intact)
            }
            FrameKind::Seal { target, offset, whole_bytes, imm, checksum } => {
                let mut whole = Vec::new();
                let checked = node.regions.check(target, offset, whole_bytes).map(|memory| {
                    whole.resize(whole_bytes as usize, 0);
                    let copied = memory.copy_to(offset as usize, &mut whole);
                    debug_assert!(copied.is_ok(), "checked just now");
                });
                let intact =
                    !verify || checksum.is_none_or(|wanted| crate::checksum(&whole) == wanted);
                node.count(flight.path, imm, checked, intact)
            }
        };
        let (to, session, sequence) = (flight.from, flight.session, flight.sequence);
        self.at(answer_us, Event::Settled { to, session, sequence, settled });
    }
}

impl super::node::SimNode {
    fn count(
        &mut self,
        path: PathId,
        imm: Option<u32>,
        checked: Result<(), Refusal>,
        intact: bool,
    ) -> Settled {
        if let Err(refusal) = checked {
            self.counts.refused += 1;
            return Settled::Refused(refusal);
        }
        if !intact {
            self.counts.corrupt += 1;
            return Settled::Corrupt;
        }
        if let Some(imm) = imm {
            self.landed(path, imm);
        }
        Settled::Landed
    }
}
