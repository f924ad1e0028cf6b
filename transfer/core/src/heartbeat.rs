//! Heartbeats of a sending session. A peer that owes nothing says nothing, and so nobody would notice that
//! it is gone. Where somebody wants to know, a path that was silent for an interval is asked for a sign of
//! life, and given up when none comes in time.
//!
//! A wanted session whose peer has vanished is so given up after an interval and a timeout; where it has
//! several paths, or its peer's host still takes connections, after the grace of a session without paths
//! besides (see [`crate::sender::Limits`]).

use kvasir_mutation::{Mutation, mutated};

use crate::close::PathIndex;
use crate::path::Path;
use crate::sender::{Action, Sender};
use crate::session::{Session, SessionId};

/// When heartbeats are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeats {
    /// How long a path may be silent before it is asked.
    pub interval_us: u64,
    /// How long a sign of life may take then.
    pub timeout_us: u64,
    /// In every session that has a path; otherwise only in those that are wanted.
    pub always: bool,
}

impl<P: Clone, C> Sender<P, C> {
    /// Whether the peer's loss is to be noticed while nothing is under way, too. A session that is
    /// wanted is connected, and stays wanted until it is lost.
    pub fn set_wanted(&mut self, id: SessionId, wanted: bool, now_us: u64) {
        if wanted {
            self.session(id, now_us).wanted = true;
        } else if let Some(session) = self.sessions.get_mut(&id) {
            session.wanted = false;
        }
    }

    pub fn is_wanted(&self, id: SessionId) -> bool {
        self.sessions.get(&id).is_some_and(|session| session.wanted)
    }

    /// The peer has answered a heartbeat. `false` when it was not asked for one.
    pub fn heartbeat_answered(&mut self, id: SessionId, index: PathIndex, now_us: u64) -> bool {
        let path = self.sessions.get_mut(&id).and_then(|session| session.paths.get_mut(&index));
        let Some(path) = path else { return false };
        path.heard(now_us);
        path.asked_us.take().is_some()
    }

    /// Asks those that were silent for long enough.
    pub(crate) fn ask_for_heartbeats(&mut self, now_us: u64) {
        let heartbeats = self.limits.heartbeats;
        for (id, session) in &mut self.sessions {
            if !(session.wanted || heartbeats.always) {
                continue;
            }
            for (index, path) in &mut session.paths {
                if now_us >= path.next_heartbeat_us(heartbeats) {
                    path.asked_us = Some(now_us);
                    self.actions.push_back(Action::Heartbeat { session: *id, path: *index });
                }
            }
        }
    }

    /// When the next one is to be asked for.
    pub(crate) fn next_heartbeat_us(&self, session: &Session) -> u64 {
        let heartbeats = self.limits.heartbeats;
        if !(session.wanted || heartbeats.always) {
            return u64::MAX;
        }
        let next = session.paths.values().map(|path| path.next_heartbeat_us(heartbeats));
        next.min().unwrap_or(u64::MAX)
    }
}

impl Path {
    fn next_heartbeat_us(&self, heartbeats: Heartbeats) -> u64 {
        if self.given_up || self.asked_us.is_some() {
            return u64::MAX;
        }
        self.alive_us.saturating_add(heartbeats.interval_us)
    }

    /// When it is given up, unless the peer shows life before.
    pub(crate) fn silent_us(&self, is_owed: bool, peer_timeout_us: u64, beats: Heartbeats) -> u64 {
        let is_owed = is_owed && !mutated(Mutation::SilentPathKept);
        let owed_us =
            if is_owed { self.heard_us.saturating_add(peer_timeout_us) } else { u64::MAX };
        let asked_us = self.asked_us.map_or(u64::MAX, |asked_us| {
            asked_us.max(self.alive_us).saturating_add(beats.timeout_us)
        });
        owed_us.min(asked_us)
    }
}
