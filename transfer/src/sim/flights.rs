//! Frames in flight: what lands of them when, and what is answered.

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{Frame, FrameKind, PathId, Refusal, Settled, Target};

use super::config::{SimLane, SimOrder};
use super::node::{NodeId, SimNode};
use super::paths::{Event, Key};
use super::{Landing, World};
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
    has_order: bool,
}

/// What a relaxed path has brought, and nobody sees yet.
#[derive(Debug)]
pub(super) struct Unplaced {
    target: Target,
    offset: u64,
    bytes: Vec<u8>,
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

    /// `false`: the path does not carry its region, which its sender is going to hear of.
    pub(super) fn depart(&mut self, key: Key, frame: Frame<Payload>) -> bool {
        let now_us = self.now_us;
        let parted = self.links.get(&key).is_some_and(|link| self.are_parted(key.from, link.to));
        let Some(link) = self.links.get_mut(&key) else { return true };
        let lane = self.config.lane(link.lane);
        if let Some(target) = target_of(frame.kind)
            && !self.config.carries(link.lane, target.key)
        {
            let at_us = now_us + 2 * lane.latency_us;
            self.at(at_us, Event::Untaken { key, target, sequence: frame.sequence });
            return false;
        }
        let wire_us = frame.bytes.saturating_mul(1_000_000) / lane.bytes_per_s.max(1);
        link.wire_free_us = link.wire_free_us.max(now_us) + wire_us;
        let departed_us = link.wire_free_us;
        let linger_us = self.config.faults.linger_us;
        if link.is_mute || (parted && linger_us == 0) {
            return true;
        }
        let mut arrived_us = departed_us + lane.latency_us + self.random.upto(lane.jitter_us);
        if (link.is_deaf || parted) && linger_us > 0 {
            arrived_us += self.random.upto(linger_us);
        }
        let pin = frame.pin.filter(|_| lane.order.keeps_pins());
        if let Some(pin) = pin {
            let last_us = link.pinned_us.entry(pin).or_default();
            arrived_us = arrived_us.max(*last_us + 1);
            *last_us = arrived_us;
        }
        let bytes = frame.payload.bytes(frame.source_offset as usize, frame.bytes as usize);
        let mut bytes = bytes.to_vec();
        if let FrameKind::Write { checksum: Some(_), .. } = frame.kind {
            self.spoil(&mut bytes);
        }
        let id = self.next_serial;
        self.next_serial += 1;
        let is_relaxed = lane.order == SimOrder::Relaxed;
        if matches!(frame.kind, FrameKind::Write { imm, .. } if imm.is_some() || !is_relaxed) {
            self.schedule_parts(id, bytes.len(), (now_us, arrived_us));
        }
        let (sequence, kind, refused) = (frame.sequence, frame.kind, None);
        let has_order = pin.is_some();
        self.flights.insert(id, Flight { key, sequence, kind, bytes, refused, has_order });
        let is_early = mutated(Mutation::CountBeforeLastByte);
        let arrived_us = if is_early { arrived_us.min(now_us + 1) } else { arrived_us };
        self.at(arrived_us, Event::Arrived { flight: id });
        true
    }

    /// What a path has brought becomes visible.
    pub(super) fn place(&mut self, key: Key) {
        let Some(link) = self.links.get_mut(&key) else { return };
        let (to, unplaced) = (link.to, std::mem::take(&mut link.unplaced));
        self.unplaced -= unplaced.len();
        let Some(node) = self.nodes.get_mut(&to).filter(|node| node.alive) else { return };
        for Unplaced { target, offset, bytes } in unplaced {
            if let Ok(memory) = node.regions.check(target, offset, bytes.len() as u64) {
                let copied = memory.copy_from(offset as usize, &bytes);
                debug_assert!(copied.is_ok(), "checked just now");
                node.counts.received_bytes += bytes.len() as u64;
            }
        }
    }

    fn place_later(&mut self, (key, lane): (Key, SimLane), unplaced: Unplaced) {
        let at_us = self.now_us + self.random.upto(2 * lane.latency_us + lane.jitter_us);
        if let Some(link) = self.links.get_mut(&key) {
            link.unplaced.push(unplaced);
            self.unplaced += 1;
            self.at(at_us, Event::Placed { key });
        }
    }

    /// Whatever has arrived at the node, by any lane: relaxed ones are those of one card.
    pub(super) fn place_all(&mut self, to: NodeId) {
        if self.unplaced == 0 {
            return;
        }
        let brought = self.links.iter().filter(|(_, link)| link.to == to);
        let brought = brought.filter(|(_, link)| !link.unplaced.is_empty());
        let keys: Vec<Key> = brought.map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.place(key));
    }

    /// A wire that flips a bit now and then.
    fn spoil(&mut self, bytes: &mut [u8]) {
        let one_in = self.config.faults.wrong_one_in;
        if one_in > 0 && !bytes.is_empty() && self.random.upto(one_in - 1) == 0 {
            let at = self.random.upto(bytes.len() as u64 - 1) as usize;
            bytes[at] ^= 1 << self.random.upto(7);
        }
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
                if let Some(landings) = &mut self.landings {
                    let incarnation = node.endpoint.incarnation;
                    let FrameKind::Write { imm, .. } = flight.kind else { return };
                    let offset_bytes = offset + start as u64;
                    let (region, length_bytes) = (target.key, (end - start) as u64);
                    landings.push(Landing { incarnation, region, offset_bytes, length_bytes, imm });
                }
            }
            Err(refusal) => flight.refused = Some(refusal),
        }
    }

    pub(super) fn arrive(&mut self, id: u64) {
        let Some(flight) = self.flights.remove(&id) else { return };
        let verify = self.config.verify;
        let Flight { key, sequence, kind, bytes, refused, has_order } = flight;
        let Some(link) = self.links.get(&key).filter(|link| link.open) else { return };
        let (to, path, lane) = (link.to, link.path, self.config.lane(link.lane));
        let is_counted = match kind {
            FrameKind::Write { imm, .. } => imm.is_some(),
            FrameKind::Seal { .. } | FrameKind::Message { .. } => true,
            FrameKind::Signal { .. } => false,
        };
        // What a card tells comes behind all that it has brought; what others tell does not.
        if is_counted && lane.order == SimOrder::Relaxed {
            self.place_all(to);
        }
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
                let settled = node.count(path, imm, checked, intact);
                if lane.order == SimOrder::Relaxed && !is_counted && settled == Settled::Landed {
                    self.place_later((key, lane), Unplaced { target, offset, bytes });
                }
                settled
            }
            FrameKind::Signal { target, offset, value, .. } => {
                node.store_word(target, offset, value)
            }
            FrameKind::Seal { target, offset, whole_bytes, imm, checksum } => {
                let mut whole = Vec::new();
                let checked = node.regions.check(target, offset, whole_bytes).map(|memory| {
                    whole.resize(whole_bytes as usize, 0);
                    let copied = memory.copy_to(offset as usize, &mut whole);
                    debug_assert!(copied.is_ok(), "checked just now");
                });
                let intact = !verify
                    || mutated(Mutation::ChecksumsNotVerified)
                    || checksum.is_none_or(|wanted| crate::checksum(&whole) == wanted);
                node.count(path, imm, checked, intact)
            }
        };
        if has_order && matches!(settled, Settled::Refused(_)) {
            self.refused_pinned(key);
            return;
        }
        let answer_us = self.now_us + lane.latency_us;
        self.at(answer_us, Event::Settled { key, sequence, settled });
    }
}

fn target_of(kind: FrameKind) -> Option<Target> {
    match kind {
        FrameKind::Write { target, .. }
        | FrameKind::Seal { target, .. }
        | FrameKind::Signal { target, .. } => Some(target),
        FrameKind::Message { .. } => None,
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

    fn store_word(&mut self, target: Target, offset: u64, value: u64) -> Settled {
        let stored = self.regions.check(target, offset, 8).and_then(|memory| {
            memory.store_word(offset as usize, value).map_err(|_| Refusal::OutOfBounds)
        });
        if let Err(refusal) = stored {
            self.counts.refused += 1;
            return Settled::Refused(refusal);
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
