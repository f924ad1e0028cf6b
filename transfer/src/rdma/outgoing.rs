//! The end of a path that writes. It checks each frame against what it knows of the target region, asks the
//! target's engine about regions that it knows nothing of, and posts what may be written; the card does the
//! rest, and says when it is done.
//!
//! The card reads sources after a frame was posted. So an operation that has to let go of its source before
//! its frames are done ends the path ([`RdmaOut::is_reading`]): the queue pairs are destroyed, and then
//! nobody reads.

mod coming_up;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{
    CloseRequest, Frame, FrameKind, Next, OpId, Rail, Refusal, Settled, Target, check_bounds,
};

use super::bounce::{BOUNCE_KEY, CHUNK_BYTES, Chunk};
use super::cards::CardId;
use super::control::Control;
use super::known::Known;
use super::nic::{Bounds, Event, Failure, From, MESSAGES, PipeId, Place, Post, To};
use super::seek::Sought;
use super::wire::{PieceHeader, Said};
use super::{CardError, CardPair, Rdma};
use crate::closing;
use crate::config::Domain;
use crate::hello::Hello;
use crate::payload::Payload;
use crate::worker::hub::{Hub, take_answer};
use crate::worker::link::{Lane, LinkEnd, Readiness, Turn};

/// Frames that are checked and wait for room.
const WAITING_MAX: usize = 64;
/// Frames that wait to hear what their region is.
const PARKED_MAX: usize = 256;
/// Frames that are checked in one turn: checking may read their bytes.
const FRAMES_PER_TURN: usize = 128;
/// What the cards tell each other may get lost: it is said again after so long.
const SHAKE_AGAIN_US: u64 = 20_000;
/// Questions of a target that wait for what is under way.
const SETTLING_MAX: usize = 4096;
/// Bytes whose checksums are computed in one turn, more or less.
const HASHED_PER_TURN: u64 = 2 << 20;

#[derive(Debug)]
pub(crate) struct RdmaOut {
    control: Control,
    lane: Lane,
    domain: Domain,
    card: CardId,
    /// The peer's.
    to_card: CardId,
    rail: Rail,
    pipe: PipeId,
    bounds: Bounds,
    peer_incarnation: u64,
    state: State,
    /// Regions of the peer, as it has said.
    regions: BTreeMap<u64, Known>,
    asked: BTreeSet<u64>,
    parked: Vec<Frame<Payload>>,
    /// Sequences of messages that were posted in full, by their ids: the peer tells what it made of them.
    messages: BTreeMap<u64, u64>,
    waiting: VecDeque<Waiting>,
    /// Frames that are posted in several pieces where nothing is in order, by their sequences.
    pieces: BTreeMap<u64, Pieces>,
    /// By lane of the pipe, in the order in which they were posted.
    posted: Vec<VecDeque<Posted>>,
    /// By lane of the pipe: one of its posts has failed. What is told of later ones says nothing of those
    /// before them any more.
    is_broken: Vec<bool>,
    /// Keys of the regions of which one may have been refused, when posts have failed and it is not known why.
    doubted: Vec<u64>,
    next_tag: u32,
    /// What the peer's card places may become visible in any order.
    is_relaxed: bool,
    /// What the target waits for: that all posts before this tag are done.
    settling: VecDeque<(u64, u32)>,
}

#[derive(Debug)]
enum State {
    Connecting {
        hello: Vec<u8>,
    },
    AwaitingReply,
    /// The way to the peer's card is looked for, before this is told to ours.
    Seeking {
        target: Vec<u8>,
        sought: Sought,
    },
    /// The cards tell each other of their queue pairs.
    Shaking {
        again_us: u64,
    },
    /// Lanes of which it is not known yet whether they reach the peer.
    Trying {
        lanes: usize,
    },
    Up,
}

/// A frame that may be posted, and how much of it was.
#[derive(Debug)]
struct Waiting {
    frame: Frame<Payload>,
    /// Where its first byte goes; `None` for a message.
    place: Option<Place>,
    /// Its posts are all on one.
    lane: Option<usize>,
    done_bytes: u64,
    /// All of its bytes have landed, and it is to be counted.
    has_landed: bool,
}

/// A frame of several posts, where none of them says anything of the others: it has landed when each one
/// has, and only then is its count posted.
#[derive(Debug, Default)]
struct Pieces {
    under_way: usize,
    /// Set when the last one was posted.
    posted: Option<Waiting>,
}

/// One post that the card has not reported yet.
#[derive(Debug)]
struct Posted {
    tag: u32,
    op: OpId,
    sequence: u64,
    /// The last one of its frame.
    ends: Option<Sent>,
    /// One of several, of which each has to be waited for.
    is_piece: bool,
    chunk: Option<Chunk>,
    /// The card reads the source of the caller.
    reads_source: bool,
    target: Option<Target>,
}

/// What is counted when a frame is done.
#[derive(Debug, Clone, Copy)]
enum Sent {
    Write { bytes: u64, is_counted: bool },
    Message,
}

/// What is known of a frame before it is posted.
enum Judged {
    Place(Place),
    Settled(Settled),
    Ask { key: u64 },
}

impl RdmaOut {
    /// Begins to connect; `hello` gets what the peer must know of the pipe.
    ///
    /// # Errors
    /// This way to the peer is not open.
    pub(crate) fn connect(
        lane: Lane,
        address: SocketAddr,
        mut hello: Hello,
        ((rail, CardPair { here, there }), hub): ((Rail, CardPair), &mut Hub),
    ) -> Result<Self, CardError> {
        let Hub { cards, tls, .. } = hub;
        let missing =
            || CardError::new("this node has no NIC of the requested index and transport");
        let rdma = cards.get_mut(here).ok_or_else(missing)?;
        let control = Control::connect(address, tls.as_ref())?;
        let (pipe, card) = rdma.open()?;
        let bounds = rdma.bounds;
        hello.domain = rdma.domain.code();
        hello.card = card;
        hello.to_card = there.0.into();
        Ok(RdmaOut {
            control,
            lane,
            domain: rdma.domain,
            card: here,
            to_card: there,
            rail,
            pipe,
            bounds,
            peer_incarnation: hello.to_incarnation,
            state: State::Connecting { hello: hello.signed(&hub.shared.identity) },
            regions: BTreeMap::new(),
            asked: BTreeSet::new(),
            parked: Vec::new(),
            messages: BTreeMap::new(),
            waiting: VecDeque::new(),
            pieces: BTreeMap::new(),
            posted: (0..bounds.lanes).map(|_| VecDeque::new()).collect(),
            is_broken: vec![false; bounds.lanes],
            doubted: Vec::new(),
            next_tag: 0,
            is_relaxed: false,
            settling: VecDeque::new(),
        })
    }

    pub(crate) fn rail(&self) -> Rail {
        self.rail
    }

    pub(crate) fn domain(&self) -> Domain {
        self.domain
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.control.fd()
    }

    /// Keys of the regions of which the peer may have refused one, which has ended it.
    pub(crate) fn doubted(&self) -> &[u64] {
        &self.doubted
    }

    pub(crate) fn ready(&mut self, ready: Readiness) {
        self.control.ready(ready);
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, State::Up)
    }

    /// Asks about another path of the session.
    pub(crate) fn ask(&mut self, close: &CloseRequest) {
        self.control.say(Said::Closing(closing::question(close)));
    }

    pub(crate) fn ask_for_heartbeat(&mut self) {
        self.control.say(Said::Heartbeat);
    }

    pub(crate) fn turn(&mut self, hub: &mut Hub) -> Result<Turn, LinkEnd> {
        let mut turn = Turn::default();
        turn.busy |= self.take_events(hub)?;
        match &self.state {
            State::Connecting { .. } => turn.busy |= self.greet()?,
            State::AwaitingReply => turn.busy |= self.read_reply(hub)?,
            State::Seeking { .. } => turn.busy |= self.seek(hub, &mut turn)?,
            State::Shaking { .. } => turn.busy |= self.shake(hub, &mut turn)?,
            State::Trying { .. } | State::Up => {
                turn.busy |= self.control.read()?;
                while let Some(said) = self.control.heard()? {
                    self.hear(said, hub)?;
                }
            }
        }
        self.settle_what_is_done();
        if self.is_up() {
            self.take_frames(hub, &mut turn);
            turn.busy |= self.post(hub)?;
        }
        turn.busy |= self.control.flush()?;
        Ok(turn)
    }

    /// Ends it: when this returns the card reads nothing for it any more. What was done is settled.
    pub(crate) fn close(mut self, hub: &mut Hub) {
        if let Some(rdma) = hub.cards.get_mut(self.card) {
            rdma.poll();
        }
        // One that is not up by now never will be.
        if self.is_up() {
            let _ = self.take_events(hub);
        }
        let Some(rdma) = hub.cards.get_mut(self.card) else { return };
        rdma.discard(self.pipe);
        let posted = self.posted.into_iter().flatten();
        posted.filter_map(|posted| posted.chunk).for_each(|chunk| rdma.bounce.release(chunk));
    }

    // ---- what the card and the peer say ----

    fn take_events(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        let Some(rdma) = hub.cards.get_mut(self.card) else { return Err(LinkEnd::Lost) };
        let events = rdma.take_events(self.pipe);
        let any = !events.is_empty();
        let mut end = Ok(());
        for event in events {
            match event {
                Event::Done { .. } if matches!(self.state, State::Trying { .. }) => {
                    self.lane_reached(hub);
                }
                Event::Done { lane, tag } if !self.is_broken[lane] => {
                    self.done_through(lane, tag, hub);
                }
                Event::Done { .. } => {}
                // Which of several failures was first, and has the reason, the card may not know.
                Event::Failed { lane, tag, failure } => {
                    self.failed(lane, tag, failure, hub);
                    // What the peer refuses is no fault of the way to it. Where there is no order, what it
                    // refuses may look like anything.
                    let is_ordered = self.bounds.order.acknowledges_in_order();
                    if failure == Failure::Refused {
                        end = Err(LinkEnd::Spent);
                    } else if end.is_ok() {
                        end = Err(if is_ordered { LinkEnd::Broken } else { LinkEnd::Lost });
                    }
                }
                // A peer that writes to a writer.
                Event::Landed { .. } | Event::Piece(_) | Event::Settle { .. } => {
                    return Err(LinkEnd::Malformed);
                }
            }
        }
        end.map(|()| any)
    }

    fn done_through(&mut self, lane: usize, tag: u32, hub: &mut Hub) {
        if !self.bounds.order.acknowledges_in_order() {
            // It speaks for itself alone.
            let at = self.posted[lane].iter().position(|posted| posted.tag == tag);
            if let Some(posted) = at.and_then(|at| self.posted[lane].remove(at)) {
                self.done(posted, hub);
            }
            return;
        }
        while let Some(posted) = self.posted[lane].pop_front() {
            let is_it = posted.tag == tag;
            self.done(posted, hub);
            if is_it {
                break;
            }
        }
    }

    fn done(&mut self, posted: Posted, hub: &mut Hub) {
        if let (Some(chunk), Some(rdma)) = (posted.chunk, hub.cards.get_mut(self.card)) {
            rdma.bounce.release(chunk);
        }
        if posted.is_piece {
            self.piece_done(posted.sequence, hub);
            return;
        }
        let Some(sent) = posted.ends else { return };
        self.sent(posted.sequence, sent, hub);
    }

    fn sent(&self, sequence: u64, sent: Sent, hub: &mut Hub) {
        if let (Sent::Write { bytes, .. }, Some(rdma)) = (sent, hub.cards.get(self.card)) {
            rdma.sent_bytes.inc_by(bytes);
        }
        let metrics = hub.metrics.of(self.domain);
        match sent {
            Sent::Write { bytes, is_counted } => {
                metrics.sent_bytes.inc_by(bytes);
                metrics.sent_writes.inc_by(u64::from(is_counted));
            }
            // Its peer has it, and says what it makes of it.
            Sent::Message => {
                metrics.sent_messages.inc();
                return;
            }
        }
        self.settle(sequence, Settled::Landed, hub);
    }

    /// The last one of a frame lets it be counted; one that is not counted has landed.
    fn piece_done(&mut self, sequence: u64, hub: &mut Hub) {
        let Some(pieces) = self.pieces.get_mut(&sequence) else { return };
        pieces.under_way -= 1;
        if pieces.under_way > 0 || pieces.posted.is_none() {
            return;
        }
        let Some(waiting) = self.pieces.remove(&sequence).and_then(|pieces| pieces.posted) else {
            return;
        };
        match sent_of(&waiting.frame) {
            Sent::Write { is_counted: true, .. } => {
                self.waiting.push_front(Waiting { has_landed: true, ..waiting });
            }
            sent => self.sent(sequence, sent, hub),
        }
    }

    /// Tells the target what it waits for.
    fn settle_what_is_done(&mut self) {
        while let Some((ticket, before)) = self.settling.front().copied() {
            // Each lane's are in the order in which they were posted.
            let oldest = self.posted.iter().filter_map(VecDeque::front);
            if oldest.map(|posted| posted.tag).any(|tag| is_before(tag, before)) {
                return;
            }
            self.settling.pop_front();
            self.control.say(Said::Settled { ticket });
        }
    }

    fn settle(&self, sequence: u64, settled: Settled, hub: &mut Hub) {
        let Lane { session, path } = self.lane;
        hub.sender.settle(session, path, sequence, settled, hub.now_us);
    }

    /// Where there is order, what was posted before it on its lane is done. It, and whatever else is not, is
    /// asked about.
    fn failed(&mut self, lane: usize, tag: Option<u32>, failure: Failure, hub: &mut Hub) {
        if std::mem::replace(&mut self.is_broken[lane], true) {
            return;
        }
        let Some(tag) = tag else { return };
        if !self.posted[lane].iter().any(|posted| posted.tag == tag) {
            return;
        }
        if !self.bounds.order.acknowledges_in_order() {
            // Which of them the peer has refused, and took the others with it, nobody may know.
            let targets = self.posted[lane].iter().filter_map(|posted| posted.target);
            let targets: BTreeSet<Target> = targets.collect();
            targets.iter().for_each(|target| self.doubt(*target, hub));
            self.doubted.extend(targets.iter().map(|target| target.key));
            return;
        }
        while let Some(posted) = self.posted[lane].pop_front() {
            if posted.tag != tag {
                self.done(posted, hub);
                continue;
            }
            // It is sent again, and its region is asked for first: the answer has the reason.
            if let (Failure::Refused, Some(target)) = (failure, posted.target) {
                self.doubt(target, hub);
            }
            self.posted[lane].push_front(posted);
            return;
        }
    }

    fn doubt(&self, target: Target, hub: &mut Hub) {
        hub.cards.doubt((target.incarnation, target.key));
    }

    fn hear(&mut self, said: Said, hub: &mut Hub) -> Result<(), LinkEnd> {
        match said {
            Said::Closing(answer) => take_answer(self.lane, &answer, hub),
            Said::Region { key, found } => self.learn(key, found, hub),
            Said::Revoked { key } => {
                self.regions.remove(&key);
                self.doubt(Target { incarnation: self.peer_incarnation, key }, hub);
                hub.refused_regions.push((self.peer_incarnation, key));
                Ok(())
            }
            Said::Taken { id, taken } => {
                // Before its pieces are known to be done: both say so, by ways of their own.
                let sequence = self.messages.remove(&id).ok_or(LinkEnd::Malformed)?;
                self.settle(
                    sequence,
                    taken.map_or_else(Settled::Refused, |()| Settled::Landed),
                    hub,
                );
                Ok(())
            }
            Said::Alive => {
                let Lane { session, path } = self.lane;
                let was_asked = hub.sender.heartbeat_answered(session, path, hub.now_us);
                if was_asked { Ok(()) } else { Err(LinkEnd::Malformed) }
            }
            Said::Settle { ticket } => {
                if self.settling.len() >= SETTLING_MAX {
                    return Err(LinkEnd::Malformed);
                }
                self.settling.push_back((ticket, self.next_tag));
                Ok(())
            }
            Said::Ask { .. } | Said::Heartbeat | Said::Settled { .. } => Err(LinkEnd::Malformed),
        }
    }

    /// What the peer says of a region. One that its card does not have goes by other paths.
    fn learn(
        &mut self,
        key: u64,
        found: Result<Option<Known>, Refusal>,
        hub: &mut Hub,
    ) -> Result<(), LinkEnd> {
        if !self.asked.remove(&key) {
            return Err(LinkEnd::Malformed);
        }
        match found {
            Ok(Some(known)) => drop(self.regions.insert(key, known)),
            Ok(None) => {}
            Err(_) => hub.refused_regions.push((self.peer_incarnation, key)),
        }
        let of_key = |frame: &mut Frame<Payload>| {
            target_of(frame.kind).is_some_and(|target| target.key == key)
        };
        let frames: Vec<_> = self.parked.extract_if(.., of_key).collect();
        if let Ok(None) = found {
            let target = Target { incarnation: self.peer_incarnation, key };
            let sequences: Vec<u64> = frames.iter().map(|frame| frame.sequence).collect();
            hub.unsuited(self.lane, (target, &sequences));
            let is_closed = mutated(Mutation::RailNotUsedForOtherRegions);
            return if is_closed { Err(LinkEnd::Lost) } else { Ok(()) };
        }
        for frame in frames {
            match found {
                Err(refusal) => self.refuse(&frame, refusal, hub),
                Ok(_) => self.admit(frame, hub),
            }
        }
        Ok(())
    }

    // ---- frames ----

    fn take_frames(&mut self, hub: &mut Hub, turn: &mut Turn) {
        let Lane { session, path } = self.lane;
        let mut hashed_bytes = 0;
        for _ in 0..FRAMES_PER_TURN {
            let is_full = self.waiting.len() >= WAITING_MAX || self.parked.len() >= PARKED_MAX;
            if is_full || hashed_bytes >= HASHED_PER_TURN {
                return;
            }
            match hub.sender.next_frame(session, path, hub.now_us) {
                Next::Frame(frame) => {
                    turn.busy = true;
                    if hub.shared.config.verify.by(self.domain) && checksum_of(frame.kind).is_some()
                    {
                        hashed_bytes += frame.bytes;
                    }
                    self.admit(frame, hub);
                }
                Next::Wait { until_us } => {
                    turn.wait_until_us = turn.wait_until_us.min(until_us);
                    return;
                }
                Next::Nothing => return,
            }
        }
    }

    fn admit(&mut self, frame: Frame<Payload>, hub: &mut Hub) {
        let judged = match self.judge(&frame, hub) {
            None => return self.wait(frame, None),
            Some(judged) => judged,
        };
        match judged {
            Judged::Place(place) => self.wait(frame, Some(place)),
            Judged::Settled(Settled::Refused(refusal)) => self.refuse(&frame, refusal, hub),
            Judged::Settled(settled) => {
                if settled == Settled::Corrupt {
                    hub.metrics.of(self.domain).corrupt.inc();
                }
                self.settle(frame.sequence, settled, hub);
            }
            Judged::Ask { key } => {
                if self.asked.insert(key) {
                    self.control.say(Said::Ask { key });
                }
                self.parked.push(frame);
            }
        }
    }

    fn wait(&mut self, frame: Frame<Payload>, place: Option<Place>) {
        let (lane, done_bytes, has_landed) = (None, 0, false);
        self.waiting.push_back(Waiting { frame, place, lane, done_bytes, has_landed });
    }

    fn refuse(&self, frame: &Frame<Payload>, refusal: Refusal, hub: &mut Hub) {
        hub.metrics.of(self.domain).refused(refusal).inc();
        self.settle(frame.sequence, Settled::Refused(refusal), hub);
    }

    /// `None` for a message, which needs no place.
    fn judge(&self, frame: &Frame<Payload>, hub: &Hub) -> Option<Judged> {
        let target = target_of(frame.kind)?;
        let refused = |refusal| Some(Judged::Settled(Settled::Refused(refusal)));
        if target.incarnation != self.peer_incarnation {
            return refused(Refusal::StaleIncarnation);
        }
        let named = (target.incarnation, target.key);
        let is_believed = self.bounds.tells_refusals;
        let described = || hub.cards.described(named, self.to_card).filter(|_| is_believed);
        let known = self.regions.get(&target.key).copied().or_else(described);
        let Some(known) = known else { return Some(Judged::Ask { key: target.key }) };
        let (offset, bytes, imm) = match frame.kind {
            FrameKind::Write { offset, imm, .. } => (offset, frame.bytes, imm),
            FrameKind::Seal { offset, whole_bytes, imm, .. } => (offset, whole_bytes, imm),
            FrameKind::Signal { offset, .. } => (offset, frame.bytes, None),
            FrameKind::Message { .. } => return None,
        };
        if let Err(refusal) = check_bounds(known.length_bytes, offset, bytes) {
            return refused(refusal);
        }
        let wanted = checksum_of(frame.kind).filter(|_| hub.shared.config.verify.by(self.domain));
        let source = |bytes| frame.payload.bytes(frame.source_offset as usize, bytes as usize);
        if wanted.is_some_and(|wanted| crate::checksum(source(bytes)) != wanted) {
            return Some(Judged::Settled(Settled::Corrupt));
        }
        if frame.bytes == 0 && imm.is_none() {
            return Some(Judged::Settled(Settled::Landed));
        }
        // What a peer claims of its own memory may lead anywhere; its card knows better.
        let Place { address, key } = known.place;
        Some(Judged::Place(Place { address: address.wrapping_add(offset), key }))
    }

    /// Whether the card may be reading the operation's source.
    pub(crate) fn is_reading(&self, op: OpId) -> bool {
        self.posted.iter().flatten().any(|posted| posted.op == op && posted.reads_source)
    }

    /// Copies what is left of the operation's frames, so that its source is not read any more. Not for
    /// one that [`RdmaOut::is_reading`] names.
    pub(crate) fn detach(&mut self, op: OpId) {
        let waiting = self.waiting.iter_mut().map(|waiting| &mut waiting.frame);
        for frame in waiting.chain(&mut self.parked).filter(|frame| frame.op == op) {
            // The checksum of a whole may still have to be looked at.
            let bytes = match frame.kind {
                FrameKind::Seal { whole_bytes, checksum: Some(_), .. } => whole_bytes,
                _ => frame.bytes,
            };
            let at = frame.source_offset as usize;
            let copy = frame.payload.bytes(at, bytes as usize).to_vec();
            frame.payload = Payload::Bytes(Arc::new(copy));
            frame.source_offset = 0;
        }
    }

    // ---- posting ----

    /// Posts what there is room for, each lane's with one doorbell.
    fn post(&mut self, hub: &mut Hub) -> Result<bool, LinkEnd> {
        if self.waiting.is_empty() {
            return Ok(false);
        }
        let incarnation = hub.shared.endpoint.incarnation;
        let is_unpinned = hub.shared.hooks.signals_unpinned();
        let Some(rdma) = hub.cards.get_mut(self.card) else { return Err(LinkEnd::Lost) };
        let mut pinned = Vec::new();
        let room = |lane| rdma.card.room(self.pipe, lane);
        let mut room: Vec<usize> = (0..self.bounds.lanes).map(room).collect();
        let mut chains: Vec<Vec<Post>> = vec![Vec::new(); self.bounds.lanes];
        while let Some(mut waiting) = self.waiting.pop_front() {
            let pin = waiting.frame.pin.filter(|_| !is_unpinned);
            let lane = waiting.lane.unwrap_or_else(|| match (waiting.place, pin) {
                (None, _) => MESSAGES,
                (Some(_), Some(pin)) => 1 + (pin % self.write_lanes()) as usize,
                (Some(_), None) => widest(&room),
            });
            waiting.lane = Some(lane);
            let mut is_whole = false;
            while !is_whole && room[lane] > 0 {
                let Some((post, posted)) = self.next_post(&mut waiting, rdma, incarnation) else {
                    break;
                };
                is_whole = waiting.done_bytes == waiting.frame.bytes;
                if let (true, FrameKind::Message { id }) = (is_whole, waiting.frame.kind) {
                    self.messages.insert(id, waiting.frame.sequence);
                }
                room[lane] -= 1;
                chains[lane].push(post);
                self.posted[lane].push_back(posted);
            }
            if !is_whole {
                // No room on its lane, or nothing to bounce through: those behind it wait, too.
                self.waiting.push_front(waiting);
                break;
            }
            if waiting.frame.pin.is_some() {
                pinned.push(waiting.frame.sequence);
            }
            if let Some(pieces) = self.pieces.get_mut(&waiting.frame.sequence) {
                pieces.posted = Some(waiting);
            }
        }
        let mut any = false;
        for (lane, mut chain) in chains.into_iter().enumerate() {
            let Some(last) = chain.last_mut() else { continue };
            last.is_told = true;
            any = true;
            if let Err(error) = rdma.post(self.pipe, lane, &chain) {
                tracing::warn!(engine = %hub.shared.config.name, %error, "the transfer engine cannot post writes on an RDMA connection; the connection ends");
                return Err(LinkEnd::Lost);
            }
        }
        let Lane { session, path } = self.lane;
        for sequence in pinned {
            hub.sender.posted(session, path, sequence);
        }
        Ok(any)
    }

    /// The next post of a frame. `None` when there is nothing to bounce through now.
    fn next_post(
        &mut self,
        waiting: &mut Waiting,
        rdma: &mut Rdma,
        incarnation: u64,
    ) -> Option<(Post, Posted)> {
        let before_bytes = waiting.done_bytes;
        let (from, to, bytes, chunk) = match waiting.place {
            None => self.message_piece(waiting, rdma)?,
            Some(place) => {
                // A count alone goes where its write began: that place is one.
                let done_bytes = if waiting.has_landed { 0 } else { waiting.done_bytes };
                let at = place.address.wrapping_add(done_bytes);
                let to = To::Memory(Place { address: at, ..place });
                let (from, bytes, chunk) = self.source(waiting, rdma, incarnation)?;
                (from, to, bytes, chunk)
            }
        };
        waiting.done_bytes += bytes;
        let frame = &waiting.frame;
        let is_last = waiting.done_bytes == frame.bytes;
        let is_only = (before_bytes == 0 && is_last) || waiting.has_landed;
        // A message's pieces are put together by who receives them.
        let is_ordered = self.bounds.order.acknowledges_in_order();
        let is_whole = is_only || (is_last && mutated(Mutation::EfaCountWithLastPiece));
        let is_piece = !is_ordered && !is_whole && waiting.place.is_some();
        if is_piece {
            self.pieces.entry(frame.sequence).or_default().under_way += 1;
        }
        let imm = imm_of(frame.kind).filter(|_| is_last && !is_piece);
        let is_fenced = matches!(frame.kind, FrameKind::Signal { is_fenced: true, .. });
        let tag = self.next_tag;
        self.next_tag = self.next_tag.wrapping_add(1);
        let posted = Posted {
            tag,
            op: frame.op,
            sequence: frame.sequence,
            ends: is_last.then(|| sent_of(frame)),
            is_piece,
            reads_source: matches!(from, From::Region { key, .. } if key != BOUNCE_KEY),
            chunk,
            target: target_of(frame.kind),
        };
        Some((Post { from, to, imm, tag, is_fenced, is_told: !is_ordered }, posted))
    }

    /// What the next post of a write carries.
    fn source(
        &self,
        waiting: &Waiting,
        rdma: &mut Rdma,
        incarnation: u64,
    ) -> Option<(From, u64, Option<Chunk>)> {
        let frame = &waiting.frame;
        let left = frame.bytes - waiting.done_bytes;
        let offset = frame.source_offset + waiting.done_bytes;
        if left == 0 {
            return Some((From::Nothing, 0, None));
        }
        if left <= self.bounds.inline_bytes {
            let payload = frame.payload.clone();
            return Some((From::Inline { payload, offset, bytes: left }, left, None));
        }
        if let Payload::Memory { region, .. } = &frame.payload
            && region.incarnation == incarnation
            && rdma.place(region.key).is_some()
        {
            let bytes = left.min(self.bounds.post_bytes);
            return Some((From::Region { key: region.key, offset, bytes }, bytes, None));
        }
        let bytes = left.min(CHUNK_BYTES as u64).min(self.bounds.post_bytes);
        let chunk = rdma.bounce.fill(&[frame.payload.bytes(offset as usize, bytes as usize)])?;
        let from = From::Region { key: BOUNCE_KEY, offset: chunk.offset() as u64, bytes };
        Some((from, bytes, Some(chunk)))
    }

    fn message_piece(
        &self,
        waiting: &Waiting,
        rdma: &mut Rdma,
    ) -> Option<(From, To, u64, Option<Chunk>)> {
        let frame = &waiting.frame;
        let FrameKind::Message { id } = frame.kind else { return None };
        let done = waiting.done_bytes;
        let bytes = (frame.bytes - done).min(self.bounds.piece_bytes as u64);
        let header = PieceHeader { id, bytes: frame.bytes as u32, offset: done as u32 }.encode();
        let at = (frame.source_offset + done) as usize;
        let piece = frame.payload.bytes(at, bytes as usize);
        let chunk = rdma.bounce.fill(&[&header, piece])?;
        let (offset, whole) = (chunk.offset() as u64, (header.len() + piece.len()) as u64);
        let from = From::Region { key: BOUNCE_KEY, offset, bytes: whole };
        Some((from, To::Message, bytes, Some(chunk)))
    }
}

/// Tags go round; far fewer than half of them are in use at once.
fn is_before(tag: u32, other: u32) -> bool {
    tag.wrapping_sub(other) > u32::MAX / 2
}

/// Of the lanes for writes.
fn widest(room: &[usize]) -> usize {
    let writes = room.iter().enumerate().skip(1);
    writes.max_by_key(|(_, room)| **room).map_or(1, |(lane, _)| lane)
}

fn target_of(kind: FrameKind) -> Option<Target> {
    match kind {
        FrameKind::Write { target, .. }
        | FrameKind::Seal { target, .. }
        | FrameKind::Signal { target, .. } => Some(target),
        FrameKind::Message { .. } => None,
    }
}

fn imm_of(kind: FrameKind) -> Option<u32> {
    match kind {
        FrameKind::Write { imm, .. } | FrameKind::Seal { imm, .. } => imm,
        FrameKind::Signal { .. } | FrameKind::Message { .. } => None,
    }
}

fn sent_of(frame: &Frame<Payload>) -> Sent {
    match frame.kind {
        FrameKind::Message { .. } => Sent::Message,
        FrameKind::Write { imm, .. } | FrameKind::Seal { imm, .. } => {
            Sent::Write { bytes: frame.bytes, is_counted: imm.is_some() }
        }
        FrameKind::Signal { .. } => Sent::Write { bytes: frame.bytes, is_counted: false },
    }
}

fn checksum_of(kind: FrameKind) -> Option<u64> {
    match kind {
        FrameKind::Write { checksum, .. } | FrameKind::Seal { checksum, .. } => checksum,
        FrameKind::Message { .. } | FrameKind::Signal { .. } => None,
    }
}
