//! The simulated network's paths: how they are made, how they fail, and how they are closed.
//!
//! A path that fails goes on for a while. Frames that are on it may land until the receiver has closed
//! it, and the sender learns of none of them.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{
    Asked, CloseRequest, CloseVerdict, PathId, PathIndex, PathLimits, Rail, SessionId, Settled,
    Target,
};

use super::World;
use super::config::SimLane;
use super::flights::Unplaced;
use super::node::{NodeId, Wanted};
use crate::engine::{Loss, PeerEvent};

/// One path, as its sender names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) from: NodeId,
    pub(super) session: SessionId,
    pub(super) index: PathIndex,
}

#[derive(Debug)]
pub(super) struct Link {
    pub(super) lane: usize,
    pub(super) to: NodeId,
    /// As the receiver names it.
    pub(super) path: PathId,
    /// The receiver takes what comes through it.
    pub(super) open: bool,
    state: State,
    /// Nothing comes back to the sender any more.
    pub(super) is_deaf: bool,
    /// Nothing that the sender puts on it from now on gets anywhere.
    pub(super) is_mute: bool,
    /// When it has put out all that it was given.
    pub(super) wire_free_us: u64,
    /// The sender is going to be asked for more.
    pub(super) woken: bool,
    /// When the last frame of each pin is there.
    pub(super) pinned_us: BTreeMap<u32, u64>,
    /// Acknowledged, and on its way through the receiver's host.
    pub(super) unplaced: Vec<Unplaced>,
}

/// On the sender's side.
#[derive(Debug, PartialEq, Eq)]
enum State {
    /// It has been admitted, and does not know it yet.
    Admitted,
    Up,
    Lost,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        self.state == State::Up
    }
}

#[derive(Debug)]
pub(super) enum Event {
    /// The time for a path has come.
    Connect {
        from: NodeId,
        session: SessionId,
        lane: usize,
    },
    /// The hello has arrived.
    Hello {
        key: Key,
        lane: usize,
        cut_offs: u64,
    },
    /// The sender learns that it was admitted.
    Admitted {
        key: Key,
    },
    /// The path has room for more frames.
    Room {
        key: Key,
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
        key: Key,
        sequence: u64,
        settled: Settled,
    },
    /// What has arrived on a relaxed path becomes visible.
    Placed {
        key: Key,
    },
    /// The receiver's end does not have the region of a frame, and says so.
    Untaken {
        key: Key,
        target: Target,
        sequence: u64,
    },
    /// The path fails.
    Break {
        key: Key,
    },
    /// The sender notices that the path has failed.
    Noticed {
        key: Key,
    },
    /// The receiver has closed the path: nothing more comes through it.
    Closed {
        key: Key,
    },
    /// A question has arrived, through the path `key`.
    Ask {
        key: Key,
        close: CloseRequest,
    },
    /// An answer has arrived, through the path `key`.
    Answer {
        key: Key,
        index: PathIndex,
        verdict: CloseVerdict,
    },
    /// The sender learns that there is no hope for the session.
    SessionLost {
        of: NodeId,
        session: SessionId,
        cut_offs: Option<u64>,
        why: Loss,
    },
    /// The receiver is asked for a sign of life.
    Heartbeat {
        key: Key,
    },
    /// The sender has one.
    Alive {
        key: Key,
    },
}

pub(super) fn rail(lane: usize) -> Rail {
    // Runs have a handful of lanes; more than there are rails share them.
    Rail((lane % usize::from(Rail::LAST.0)) as u8)
}

impl World {
    pub(super) fn perform(&mut self, id: NodeId, wanted: Wanted) {
        let now_us = self.now_us;
        match wanted {
            Wanted::Connect(session) => {
                for lane in 0..self.config.lanes() {
                    self.at(now_us, Event::Connect { from: id, session, lane });
                }
            }
            Wanted::GiveUpPath(session, index) => {
                self.path_lost(Key { from: id, session, index });
            }
            Wanted::GiveUpSession(session) => {
                let why = Loss::Silent;
                self.at(now_us, Event::SessionLost { of: id, session, cut_offs: None, why });
            }
            Wanted::Heartbeat(session, index) => {
                let key = Key { from: id, session, index };
                let Some(lane) = self.lane_to_peer(key) else { return };
                let at_us = now_us + lane.latency_us + self.random.upto(lane.jitter_us);
                self.at(at_us, Event::Heartbeat { key });
            }
            Wanted::Ask { session, through, close } => {
                let key = Key { from: id, session, index: through };
                let Some(lane) = self.lane_to_peer(key) else { return };
                let at_us = now_us + lane.latency_us + self.random.upto(lane.jitter_us);
                self.at(at_us, Event::Ask { key, close });
            }
        }
    }

    pub(super) fn happen(&mut self, event: Event) {
        match event {
            Event::Connect { from, session, lane } => self.connect(from, session, lane),
            Event::Hello { key, lane, cut_offs } => self.greet(key, lane, cut_offs),
            Event::Admitted { key } => self.path_up(key),
            Event::Room { key } => {
                if let Some(link) = self.links.get_mut(&key) {
                    link.woken = false;
                }
            }
            Event::Part { flight, start, end } => self.land_part(flight, start, end),
            Event::Arrived { flight } => self.arrive(flight),
            Event::Settled { key, sequence, settled } => {
                let now_us = self.now_us;
                if self.is_heard(key) {
                    let sender = &mut self.node(key.from).sender;
                    sender.settle(key.session, key.index, sequence, settled, now_us);
                }
            }
            Event::Placed { key } => self.place(key),
            Event::Untaken { key, target, sequence } => {
                let now_us = self.now_us;
                if self.is_heard(key) {
                    let node = self.node(key.from);
                    node.counts.untaken += 1;
                    let refused = (target, &[sequence][..]);
                    node.sender.unsuited(key.session, key.index, refused, now_us);
                }
            }
            Event::Break { key } => self.break_path(key),
            Event::Noticed { key } => self.path_lost(key),
            Event::Closed { key } => self.path_closed(key),
            Event::Ask { key, close } => self.ask(key, close),
            Event::Answer { key, index, verdict } => {
                let now_us = self.now_us;
                if self.is_heard(key) {
                    let sender = &mut self.node(key.from).sender;
                    sender.path_closed(key.session, (key.index, index), &verdict, now_us);
                }
            }
            Event::SessionLost { of, session, cut_offs, why } => {
                self.lose((of, session), cut_offs, why);
            }
            Event::Heartbeat { key } => self.answer_heartbeat(key),
            Event::Alive { key } => {
                let now_us = self.now_us;
                if self.is_heard(key) {
                    let sender = &mut self.node(key.from).sender;
                    sender.heartbeat_answered(key.session, key.index, now_us);
                }
            }
        }
    }

    /// The path's lane, when what is put on it gets to the peer.
    fn lane_to_peer(&self, key: Key) -> Option<SimLane> {
        let link = self.links.get(&key).filter(|link| !link.is_mute)?;
        (!self.are_parted(key.from, link.to)).then(|| self.config.lane(link.lane))
    }

    /// Whether what is sent back on the path arrives.
    fn is_heard(&mut self, key: Key) -> bool {
        let link = self.links.get(&key).filter(|link| link.is_up() && !link.is_deaf);
        let heard = link.is_some_and(|link| !self.are_parted(key.from, link.to));
        heard && self.node(key.from).hears
    }

    // ---- how they are made ----

    fn connect(&mut self, from: NodeId, session: SessionId, lane: usize) {
        let node = self.node(from);
        let Some(peer) = node.peers.of_session(session).filter(|_| node.alive) else { return };
        let cut_offs = node.peers.connecting(peer).map_or(0, |(_, cut_offs)| cut_offs);
        let next = self.next_path.entry((from, session)).or_default();
        let index = PathIndex(*next);
        *next += 1;
        let at_us = self.now_us + self.config.lane(lane).latency_us;
        self.at(at_us, Event::Hello { key: Key { from, session, index }, lane, cut_offs });
    }

    fn greet(&mut self, key: Key, lane: usize, cut_offs: u64) {
        let Key { from, session, index } = key;
        let answer_us = self.now_us + self.config.lane(lane).latency_us;
        let incarnation = self.node(from).endpoint.incarnation;
        let peer = self.node(from).peers.of_session(session);
        let to = peer.and_then(|peer| self.find(peer.incarnation));
        if to.is_some_and(|to| self.node(to).has_vanished || self.are_parted(from, to)) {
            return;
        }
        let Some(to) = to.filter(|to| self.node(*to).alive) else {
            let why = Loss::Closed;
            self.at(answer_us, Event::SessionLost { of: from, session, cut_offs: None, why });
            return;
        };
        let node = self.node(to);
        if let Err(cut_offs) = node.peers.admit(incarnation, cut_offs) {
            let (cut_offs, why) = (Some(cut_offs), Loss::CutOff);
            self.at(answer_us, Event::SessionLost { of: from, session, cut_offs, why });
            return;
        }
        // A session that has been followed by another one is not heard of any more.
        let Ok(opened) = node.receiver.open_path(incarnation, session.0, index) else { return };
        let link = Link {
            lane,
            to,
            path: opened.path,
            open: true,
            state: State::Admitted,
            is_deaf: false,
            is_mute: false,
            wire_free_us: 0,
            woken: false,
            pinned_us: BTreeMap::new(),
            unplaced: Vec::new(),
        };
        self.links.insert(key, link);
        for path in opened.superseded {
            let superseded = self.links.iter().find(|(_, link)| (link.to, link.path) == (to, path));
            if let Some(key) = superseded.map(|(key, _)| *key) {
                self.path_closed(key);
            }
        }
        self.at(answer_us, Event::Admitted { key });
    }

    fn path_up(&mut self, key: Key) {
        let (now_us, faults) = (self.now_us, self.config.faults);
        let node = self.node(key.from);
        let hears = node.alive && node.hears;
        let is_current = node.peers.of_session(key.session).is_some();
        let Some(link) = self.links.get_mut(&key) else { return };
        if link.state != State::Admitted || !hears || !is_current {
            return;
        }
        link.state = State::Up;
        let lane = self.config.lane(link.lane);
        let limits = PathLimits {
            slice_bytes: lane.slice_bytes as u64,
            frames_max: lane.frames_max,
            ordering: lane.order.ordering(),
            queue_pairs: lane.order.queue_pairs(),
            rail: rail(link.lane),
        };
        self.node(key.from).sender.path_up(key.session, key.index, limits, now_us);
        if faults.path_life_us > 0 {
            let life_us = 1 + self.random.upto(faults.path_life_us);
            self.at(now_us + life_us, Event::Break { key });
        }
    }

    // ---- how they fail ----

    fn break_path(&mut self, key: Key) {
        let (now_us, faults) = (self.now_us, self.config.faults);
        let deaf = self.random.percent(faults.deaf_percent);
        let mute = self.random.percent(50);
        let noticed_us = now_us + if deaf { self.random.upto(faults.deaf_us) } else { 0 };
        let closes = self.random.percent(faults.notice_percent);
        let closed_us = now_us + self.random.upto(faults.deaf_us.max(faults.drain_us));
        let Some(link) = self.links.get_mut(&key).filter(|link| link.is_up()) else { return };
        link.is_deaf = true;
        link.is_mute = mute || !deaf;
        self.at(noticed_us, Event::Noticed { key });
        if closes {
            self.at(closed_us, Event::Closed { key });
        }
    }

    /// The receiver's end has refused what was pinned: nothing behind it lands, and the sender notices.
    pub(super) fn refused_pinned(&mut self, key: Key) {
        let lane = self.links.get(&key).map_or(0, |link| link.lane);
        let noticed_us = self.now_us + self.config.lane(lane).latency_us;
        self.path_closed(key);
        self.at(noticed_us, Event::Noticed { key });
    }

    /// The sender uses the path no more, and makes another.
    fn path_lost(&mut self, key: Key) {
        let now_us = self.now_us;
        let Some(link) = self.links.get_mut(&key).filter(|link| link.is_up()) else { return };
        link.state = State::Lost;
        let lane = link.lane;
        self.forget_if_over(key);
        self.node(key.from).sender.path_lost(key.session, key.index, now_us);
        let again_us = now_us + 1 + self.random.upto(self.config.faults.outage_us);
        self.at(again_us, Event::Connect { from: key.from, session: key.session, lane });
    }

    /// The receiver takes nothing more through the path, nor what is on its way.
    fn path_closed(&mut self, key: Key) {
        self.place(key);
        let Some(link) = self.links.get_mut(&key).filter(|link| link.open) else { return };
        link.open = false;
        let (to, path) = (link.to, link.path);
        self.forget_if_over(key);
        let incarnation = self.node(key.from).endpoint.incarnation;
        let node = self.node(to);
        let closed = node.receiver.path_ended(path);
        if !node.receiver.is_connected(incarnation) {
            let why = Loss::Closed;
            node.calls.peer(PeerEvent::WriterLost { incarnation, domain: None, why });
        }
        let Some(closed) = closed else { return };
        node.count_answer(&closed.verdict);
        for asker in closed.askers {
            let through = self.links.iter().find(|(_, link)| (link.to, link.path) == (to, asker));
            let through = through.map(|(key, _)| *key);
            self.answer(through, closed.index, closed.verdict.clone());
        }
    }

    fn forget_if_over(&mut self, key: Key) {
        if self.links.get(&key).is_some_and(|link| !link.open && link.state == State::Lost) {
            self.links.remove(&key);
        }
    }

    // ---- how they are closed ----

    fn ask(&mut self, key: Key, close: CloseRequest) {
        let Some(link) = self.links.get(&key).filter(|link| link.open) else { return };
        let (to, path) = (link.to, link.path);
        let index = close.path;
        let node = self.node(to);
        if !node.alive {
            return;
        }
        match node.receiver.ask(path, close) {
            Asked::Answer(verdict) => {
                node.count_answer(&verdict);
                self.answer(Some(key), index, verdict);
            }
            Asked::Drain(_) => {
                let closed_us = self.now_us + self.random.upto(self.config.faults.drain_us);
                self.at(closed_us, Event::Closed { key: Key { index, ..key } });
            }
            Asked::Waiting => {}
            Asked::Malformed => debug_assert!(false, "our own sender asks sensibly"),
        }
    }

    fn answer(&mut self, through: Option<Key>, index: PathIndex, verdict: CloseVerdict) {
        let Some(key) = through else { return };
        let Some(link) = self.links.get(&key).filter(|link| link.open) else { return };
        let lane = self.config.lane(link.lane);
        let at_us = self.now_us + lane.latency_us + self.random.upto(lane.jitter_us);
        self.at(at_us, Event::Answer { key, index, verdict });
    }

    fn answer_heartbeat(&mut self, key: Key) {
        let Some(link) = self.links.get(&key).filter(|link| link.open) else { return };
        let (to, lane) = (link.to, self.config.lane(link.lane));
        if self.node(to).alive {
            let at_us = self.now_us + lane.latency_us + self.random.upto(lane.jitter_us);
            self.at(at_us, Event::Alive { key });
        }
    }

    // ---- how sessions end ----

    /// The engine's host is gone, and nobody says so.
    pub(super) fn vanish(&mut self, id: NodeId) {
        let node = self.node(id);
        (node.alive, node.has_vanished) = (false, true);
    }

    pub(super) fn kill(&mut self, id: NodeId) {
        self.node(id).alive = false;
        let at_us = self.now_us + self.config.latency_us + self.config.jitter_us;
        let ends: Vec<(Key, NodeId)> =
            self.links.iter().map(|(key, link)| (*key, link.to)).collect();
        for (key, to) in ends {
            if to == id {
                let (of, session) = (key.from, key.session);
                let why = Loss::Closed;
                self.at(at_us, Event::SessionLost { of, session, cut_offs: None, why });
            }
            if key.from == id {
                self.at(at_us, Event::Closed { key });
            }
        }
    }

    /// The receiver takes nothing more from the sender's paths, nor from what is on its way.
    pub(super) fn cut_links(&mut self, incarnation: u64, receiver: NodeId) {
        self.place_all(receiver);
        let at_us = self.now_us + self.config.latency_us;
        let cut = self.node(receiver).receiver.end_session(incarnation);
        for path in cut {
            self.node(receiver).receiver.path_ended(path);
            let link = self.links.iter_mut().find(|(_, l)| (l.to, l.path) == (receiver, path));
            let Some((key, link)) = link else { continue };
            let key = *key;
            link.open = mutated(Mutation::CutOffLeavesPathsOpen);
            self.forget_if_over(key);
            let (of, session) = (key.from, key.session);
            let why = Loss::Closed;
            self.at(at_us, Event::SessionLost { of, session, cut_offs: None, why });
        }
    }

    fn lose(&mut self, (of, session): (NodeId, SessionId), cut_offs: Option<u64>, why: Loss) {
        let now_us = self.now_us;
        let node = self.node(of);
        let Some(peer) = node.peers.of_session(session) else { return };
        if let Some(cut_offs) = cut_offs {
            node.peers.learn_cut_offs(peer, cut_offs);
        }
        node.peers.end_session(peer);
        let incarnation = peer.incarnation;
        node.sender.session_lost(session);
        node.calls.peer(PeerEvent::SessionLost { peer, incarnation, domain: None, why });
        // What the sender gave up by itself, the receiver learns a little later.
        let of_session = self.links.iter_mut();
        let own = of_session.filter(|(key, _)| (key.from, key.session) == (of, session));
        let lost: Vec<(Key, usize)> = own
            .map(|(key, link)| {
                link.state = State::Lost;
                (*key, link.lane)
            })
            .collect();
        for (key, lane) in lost {
            self.forget_if_over(key);
            let closed_us = now_us + self.config.lane(lane).latency_us;
            self.at(closed_us, Event::Closed { key });
        }
    }
}
