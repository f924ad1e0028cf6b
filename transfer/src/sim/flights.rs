//! Frames in flight: what lands of them when, and what is answered.

use kvasir_transfer_core::{Frame, FrameKind, PathId, Refusal, Settled};

use super::World;
use super::node::SimNode;
use super::paths::{Event, Key};
use crate::endpoint::Endpoint;
use crate::payload::Payload;

/// A payload lands in up to so many parts.
const PARTS_MAX: u64 = 4;
/// A path takes another frame when what it was given takes no longer than this.
const QUEUE_US: u64 = 50;

/// A frame on its way.
#[derive(Debug)]
pub(super) struct Flight {
    key: Key,
    sequence: u64,
    kind: FrameKind,
    bytes: Vec<u8>,
    refused: Option<Refusal>,
}

impl World {
    /// Whether the path can put out a frame soon. If not, it is asked again when it can.
    pub(super) fn has_room(&mut self, key: Key) -> bool {
        let now_us = self.now_us;
        let Some(link) = self.links.get_mut(&key) else { return false };
        let free_us = link.wire_free_us;
        if free_us <= now_us + QUEUE_US {
            return true;
        }
        if !link.woken {
            link.woken = true;
            self.at(free_us - QUEUE_US, Event::Room { key });
        }
        false
    }

    pub(super) fn depart(&mut self, key: Key, frame: Frame<Payload>) {
        let now_us = self.now_us;
        let Some(link) = self.links.get_mut(&key) else { return };
        let lane = self.config.lane(link.lane);
        let wire_us = frame.bytes.saturating_mul(1_000_000) / lane.bytes_per_s.max(1);
        link.wire_free_us = link.wire_free_us.max(now_us) + wire_us;
        let departed_us = link.wire_free_us;
        if link.is_mute {
            return;
        }
        let arrived_us = departed_us + lane.latency_us + self.random.upto(lane.jitter_us);
        let bytes = frame.payload.bytes(frame.source_offset as usize, frame.bytes as usize);
        let bytes = bytes.to_vec();
        let id = self.next_serial;
        self.next_serial += 1;
        if matches!(frame.kind, FrameKind::Write { .. }) {
            self.schedule_parts(id, bytes.len(), (now_us, arrived_us));
        }
        let (sequence, kind, refused) = (frame.sequence, frame.kind, None);
        self.flights.insert(id, Flight { key, sequence, kind, bytes, refused });
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

    pub(super) fn land_part(&mut self, id: u64, start: usize, end: usize) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        let FrameKind::Write { target, offset, .. } = flight.kind else { return };
        let Some(link) = self.links.get(&flight.key).filter(|link| link.open) else { return };
        let Some(node) = self.nodes.get_mut(&link.to) else { return };
        if !node.alive || flight.refused.is_some() {
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

    pub(super) fn arrive(&mut self, id: u64) {
        let Some(flight) = self.flights.remove(&id) else { return };
        let verify = self.config.verify;
        let Flight { key, sequence, kind, bytes, refused } = flight;
        let Some(link) = self.links.get(&key).filter(|link| link.open) else { return };
        let (to, path, lane) = (link.to, link.path, link.lane);
        let from = self.node(key.from).endpoint.clone();
        let node = self.node(to);
        if !node.alive {
            return;
        }
        let settled = match kind {
            FrameKind::Message { id } => node.message((&from, path), id, bytes),
            FrameKind::Write { target, offset, imm, checksum } => {
                let length = bytes.len() as u64;
                let checked = refused
                    .map_or_else(|| node.regions.check(target, offset, length).map(|_| ()), Err);
                let intact =
                    !verify || checksum.is_none_or(|wanted| crate::checksum(&bytes) == wanted);
                node.count(path, imm, checked, intact)
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
                node.count(path, imm, checked, intact)
            }
        };
        let answer_us = self.now_us + self.config.lane(lane).latency_us;
        self.at(answer_us, Event::Settled { key, sequence, settled });
    }
}

impl SimNode {
    fn message(
        &mut self,
        (from, path): (&Endpoint, PathId),
        id: u64,
        mut bytes: Vec<u8>,
    ) -> Settled {
        if self.receiver.has_message(path, id) {
            return Settled::Landed;
        }
        if bytes.len() > self.message_bytes_max {
            self.counts.refused += 1;
            return Settled::Refused(Refusal::TooLong);
        }
        let lent = self.peers.session(from).ok().zip(self.messages.lend(&mut bytes));
        let Some((peer, message)) = lent else {
            self.counts.refused += 1;
            return Settled::Refused(Refusal::NoRoom);
        };
        if self.receiver.message(path, id) {
            self.calls.message(peer, message);
        }
        Settled::Landed
    }

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
