//! The receiving half: the peers' sessions and paths, and what each path has counted and delivered. It
//! answers what a sender asks about a path that has failed.
//!
//! Call order: `open_path` when a connection is admitted; `arrived` and `message` for what comes through
//! it; `path_ended` when nothing can come through it any more, whatever ended it. When `ask` says
//! `Drain`, end that path so that nothing of it is under way, then call `path_ended`, which has the answer.
//!
//! Memory: paths and sessions are bounded. What was forgotten is said to be forgotten, never guessed.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};

use crate::close::{CloseRequest, CloseVerdict, PathIndex};
use crate::imm::{Fate, ImmTable, Maker, PathId};
use crate::messages::MessageWindow;

#[derive(Debug)]
pub struct Receiver<C> {
    imms: ImmTable<C>,
    /// By incarnation.
    sessions: BTreeMap<u64, PeerSession>,
    /// Those through which something may still come.
    paths: BTreeMap<PathId, Owner>,
    next_path: u64,
    uses: u64,
}

#[derive(Debug, Clone, Copy)]
struct Owner {
    incarnation: u64,
    nonce: u64,
    index: PathIndex,
}

#[derive(Debug)]
struct PeerSession {
    nonce: u64,
    paths: BTreeMap<PathIndex, PathState>,
    /// Indexes below were used and may have been forgotten.
    first_index: PathIndex,
    /// Numbers in the answers that are kept.
    answered: usize,
    messages: MessageWindow,
    last_use: u64,
}

#[derive(Debug)]
enum PathState {
    Open(PathId),
    /// Its sender has asked, through these paths; it is being drained.
    Draining {
        path: PathId,
        request: CloseRequest,
        askers: Vec<PathId>,
    },
    /// Nothing comes through it any more. Its sender has not asked yet, so its counts are still its own.
    Ended(PathId),
    /// The answer, in case it is asked for again.
    Closed(CloseVerdict),
}

/// A path that was opened.
#[derive(Debug, PartialEq, Eq)]
pub struct Opened {
    pub path: PathId,
    /// Paths of the peer's former session: to be ended, each with `path_ended`.
    pub superseded: Vec<PathId>,
}

/// Why a path is not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathRefusal {
    #[error("the peer has begun a later session")]
    StaleSession,
    #[error("the path's index was used before")]
    UsedIndex,
    #[error("the peer has too many paths")]
    TooMany,
}

/// What comes of a question.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked {
    Answer(CloseVerdict),
    /// End this path; `path_ended` then has the answer.
    Drain(PathId),
    /// It is being drained.
    Waiting,
    /// Nobody asks that.
    Malformed,
}

/// The answer to those who have asked.
#[derive(Debug, PartialEq, Eq)]
pub struct Closed {
    pub askers: Vec<PathId>,
    pub index: PathIndex,
    pub verdict: CloseVerdict,
}

const SESSIONS_MAX: usize = 4096;
/// Of one session, in any state.
const PATHS_MAX: usize = 128;
/// Paths through which one answer goes: a sender asks through another one when the one before is lost, and
/// waits for none that is.
const ASKERS_MAX: usize = 8;
/// Immediates, and messages, that one question may name.
const ASKED_MAX: usize = 65_536;
/// Numbers (immediates, ids of messages) in the answers that one session keeps, in case they are asked for
/// again. The longest answer has as many.
const ANSWERED_MAX: usize = 2 * ASKED_MAX;
/// Numbers that all sessions together keep of which no path is left. Whoever may connect may do so under as many
/// names as he likes.
const LEFT_BEHIND_MAX: usize = 8 * ANSWERED_MAX;

impl<C> Receiver<C> {
    pub fn new(imms_idle_max: usize) -> Self {
        Receiver {
            imms: ImmTable::new(imms_idle_max),
            sessions: BTreeMap::new(),
            paths: BTreeMap::new(),
            next_path: 0,
            uses: 0,
        }
    }

    pub fn imms(&self) -> &ImmTable<C> {
        &self.imms
    }

    pub fn imms_mut(&mut self) -> &mut ImmTable<C> {
        &mut self.imms
    }

    // ---- paths ----

    /// A peer opens a path of its session `nonce`; later sessions of one incarnation have higher ones.
    ///
    /// # Errors
    /// [`PathRefusal`].
    pub fn open_path(
        &mut self,
        incarnation: u64,
        nonce: u64,
        index: PathIndex,
    ) -> Result<Opened, PathRefusal> {
        let superseded = match self.sessions.get(&incarnation).map(|session| session.nonce) {
            Some(known) if known > nonce => return Err(PathRefusal::StaleSession),
            Some(known) if known == nonce => Vec::new(),
            Some(_) => self.end_session(incarnation),
            None => {
                self.make_room()?;
                Vec::new()
            }
        };
        self.uses += 1;
        let session = self.sessions.entry(incarnation).or_insert_with(|| PeerSession {
            nonce,
            paths: BTreeMap::new(),
            first_index: PathIndex(0),
            answered: 0,
            messages: MessageWindow::default(),
            last_use: 0,
        });
        session.last_use = self.uses;
        if index < session.first_index || session.paths.contains_key(&index) {
            return Err(PathRefusal::UsedIndex);
        }
        if session.paths.len() >= PATHS_MAX {
            session.forget_one(&mut self.imms)?;
        }
        let path = PathId(self.next_path);
        self.next_path += 1;
        session.paths.insert(index, PathState::Open(path));
        self.paths.insert(path, Owner { incarnation, nonce, index });
        Ok(Opened { path, superseded })
    }

    /// Nothing comes through the path any more. Where its sender has asked about it, this is the answer.
    pub fn path_ended(&mut self, path: PathId) -> Option<Closed> {
        let Owner { incarnation, nonce, index } = self.paths.remove(&path)?;
        let session = self.sessions.get_mut(&incarnation).filter(|session| session.nonce == nonce);
        let Some(session) = session else {
            // Its session is over: nobody will ask.
            self.imms.close_path(path, &[]);
            return None;
        };
        match session.paths.insert(index, PathState::Ended(path)) {
            Some(PathState::Draining { request, askers, .. }) => {
                let verdict = session.close(path, &request, &mut self.imms);
                self.forget_left_behind();
                Some(Closed { askers, index, verdict })
            }
            _ => {
                if mutated(Mutation::EndedPathClosedAtOnce) {
                    self.imms.close_path(path, &[]);
                }
                self.forget_left_behind();
                None
            }
        }
    }

    /// The sessions that were used longest ago go first, of those that nobody is connected for.
    fn forget_left_behind(&mut self) {
        let gone = self.sessions.iter().filter(|(_, session)| !session.is_open());
        let mut gone: Vec<(u64, u64, usize)> = gone
            .map(|(incarnation, session)| (session.last_use, *incarnation, session.numbers()))
            .collect();
        let mut numbers: usize = gone.iter().map(|(_, _, numbers)| numbers).sum();
        if numbers <= LEFT_BEHIND_MAX || mutated(Mutation::DisconnectedSessionsUnbounded) {
            return;
        }
        gone.sort_unstable();
        for (_, incarnation, of_session) in gone {
            if numbers <= LEFT_BEHIND_MAX {
                break;
            }
            numbers -= of_session;
            self.end_session(incarnation);
        }
    }

    /// The peer's session is over, and nothing of it is asked about any more. Returns the paths that are
    /// to be ended.
    pub fn end_session(&mut self, incarnation: u64) -> Vec<PathId> {
        let Some(session) = self.sessions.remove(&incarnation) else { return Vec::new() };
        let mut open = Vec::new();
        for state in session.paths.into_values() {
            match state {
                PathState::Open(path) | PathState::Draining { path, .. } => open.push(path),
                PathState::Ended(path) => {
                    self.imms.close_path(path, &[]);
                }
                PathState::Closed(_) => {}
            }
        }
        open
    }

    /// Whether anything can come from the peer.
    pub fn is_connected(&self, incarnation: u64) -> bool {
        self.paths.values().any(|owner| owner.incarnation == incarnation)
    }

    fn make_room(&mut self) -> Result<(), PathRefusal> {
        if self.sessions.len() < SESSIONS_MAX {
            return Ok(());
        }
        let gone = self.sessions.iter().filter(|(_, session)| !session.is_open());
        let oldest = gone.min_by_key(|(_, session)| session.last_use);
        let oldest = oldest.map(|(incarnation, _)| *incarnation).ok_or(PathRefusal::TooMany)?;
        self.end_session(oldest);
        Ok(())
    }

    // ---- questions ----

    /// A sender asks, through the path `asker`, about another path of its session.
    pub fn ask(&mut self, asker: PathId, request: CloseRequest) -> Asked {
        let Some(Owner { incarnation, nonce, index }) = self.paths.get(&asker).copied() else {
            return Asked::Malformed;
        };
        let too_long = request.counted.len() > ASKED_MAX || request.messages.len() > ASKED_MAX;
        let session = self.sessions.get_mut(&incarnation).filter(|session| session.nonce == nonce);
        let Some(session) = session.filter(|_| request.path != index && !too_long) else {
            return Asked::Malformed;
        };
        match session.paths.get_mut(&request.path) {
            Some(PathState::Open(path)) => {
                let (path, index) = (*path, request.path);
                if mutated(Mutation::NoDrainBeforeDiscard) {
                    return Asked::Answer(session.close(path, &request, &mut self.imms));
                }
                let draining = PathState::Draining { path, request, askers: vec![asker] };
                session.paths.insert(index, draining);
                Asked::Drain(path)
            }
            Some(PathState::Draining { askers, .. }) => {
                if !askers.contains(&asker) {
                    if askers.len() >= ASKERS_MAX {
                        askers.remove(0);
                    }
                    askers.push(asker);
                }
                Asked::Waiting
            }
            Some(PathState::Ended(path)) => {
                let path = *path;
                Asked::Answer(session.close(path, &request, &mut self.imms))
            }
            Some(PathState::Closed(verdict)) => Asked::Answer(verdict.clone()),
            None => {
                // Whatever it was: nothing may come through it after this answer.
                let verdict = CloseVerdict { forgotten: true, ..CloseVerdict::default() };
                let is_old = request.path < session.first_index;
                if !is_old && session.paths.len() < PATHS_MAX {
                    session.paths.insert(request.path, PathState::Closed(verdict.clone()));
                } else if !is_old {
                    return Asked::Malformed;
                }
                Asked::Answer(verdict)
            }
        }
    }

    // ---- arrivals ----

    /// Counts what has landed. Returns the waiter whose count is reached.
    pub fn arrived(&mut self, path: PathId, imm: u32) -> Option<C> {
        let owner = || self.paths.get(&path).map(|owner| owner.incarnation);
        self.imms.arrived(path, imm, 1, || owner().map_or(Maker::Here, Maker::Peer))
    }

    /// Whether the message was delivered before. Asked before one that cannot be delivered is refused.
    pub fn has_message(&self, path: PathId, id: u64) -> bool {
        let Some(Owner { incarnation, nonce, .. }) = self.paths.get(&path) else { return false };
        let session = self.sessions.get(incarnation).filter(|session| session.nonce == *nonce);
        session.is_some_and(|session| session.messages.has(id))
    }

    /// Whether the message is to be delivered: it was not before.
    pub fn message(&mut self, path: PathId, id: u64) -> bool {
        let Some(Owner { incarnation, nonce, .. }) = self.paths.get(&path) else { return false };
        let session = self.sessions.get_mut(incarnation).filter(|session| session.nonce == *nonce);
        session.is_some_and(|session| session.messages.is_new(id))
    }
}

impl PeerSession {
    fn is_open(&self) -> bool {
        let open =
            |state: &PathState| matches!(state, PathState::Open(_) | PathState::Draining { .. });
        self.paths.values().any(open)
    }

    /// The oldest one that is over.
    fn forget_one<C>(&mut self, imms: &mut ImmTable<C>) -> Result<(), PathRefusal> {
        let over = self
            .paths
            .iter()
            .find(|(_, state)| matches!(state, PathState::Ended(_) | PathState::Closed(_)));
        let index = over.map(|(index, _)| *index).ok_or(PathRefusal::TooMany)?;
        match self.paths.remove(&index) {
            Some(PathState::Ended(path)) => {
                imms.close_path(path, &[]);
            }
            Some(PathState::Closed(verdict)) => self.answered -= numbers_in(&verdict),
            _ => {}
        }
        self.first_index = self.first_index.max(PathIndex(index.0.saturating_add(1)));
        Ok(())
    }

    fn close<C>(
        &mut self,
        path: PathId,
        request: &CloseRequest,
        imms: &mut ImmTable<C>,
    ) -> CloseVerdict {
        let mut verdict = CloseVerdict::default();
        for (imm, fate) in imms.close_path(path, &request.counted) {
            match fate {
                Fate::Landed => verdict.landed.push(imm),
                Fate::Unknown => verdict.unknown.push(imm),
                Fate::TakenBack => {}
            }
        }
        let delivered = request.messages.iter().copied().filter(|id| self.messages.has(*id));
        verdict.delivered = delivered.collect();
        // One that is named twice was delivered once.
        verdict.delivered.sort_unstable();
        if !mutated(Mutation::DeliveredNotDeduplicated) {
            verdict.delivered.dedup();
        }
        self.answered += numbers_in(&verdict);
        let closed = PathState::Closed(verdict.clone());
        let is_forgotten = mutated(Mutation::VerdictNotRemembered);
        self.paths.insert(request.path, if is_forgotten { PathState::Ended(path) } else { closed });
        while !mutated(Mutation::AnswersUnbounded)
            && self.answered > ANSWERED_MAX
            && self.forget_one(imms).is_ok()
        {}
        verdict
    }

    /// In the answers that are kept, and those of messages that came out of turn.
    fn numbers(&self) -> usize {
        self.answered + self.messages.out_of_turn()
    }
}

fn numbers_in(verdict: &CloseVerdict) -> usize {
    let CloseVerdict { landed, unknown, delivered, forgotten: _ } = verdict;
    landed.len() + unknown.len() + delivered.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::close::Counted;
    use crate::imm::Expectation;

    const PEER: u64 = 77;
    const NEVER: u64 = u64::MAX;

    fn open(receiver: &mut Receiver<char>, nonce: u64, index: u32) -> PathId {
        let opened = receiver.open_path(PEER, nonce, PathIndex(index)).expect("it is taken");
        assert_eq!(opened.superseded, []);
        opened.path
    }

    fn ask(index: u32, imm: u32, landed: u64, undecided: u64) -> CloseRequest {
        let counted = vec![Counted { imm, landed, undecided }];
        CloseRequest { path: PathIndex(index), counted, messages: vec![8, 9] }
    }

    #[test]
    fn a_path_is_drained_before_its_counts_are_taken_back() {
        let mut receiver = Receiver::new(8);
        let (failed, other) = (open(&mut receiver, 1, 0), open(&mut receiver, 1, 1));
        receiver.imms_mut().expect(5, 3, NEVER, 'w');
        assert_eq!(receiver.arrived(failed, 5), None);
        assert!(!receiver.has_message(failed, 8));
        assert!(receiver.message(failed, 8));
        assert!(receiver.has_message(failed, 8) && !receiver.has_message(failed, 9));
        let request = ask(0, 5, 0, 3);
        assert_eq!(receiver.ask(other, request.clone()), Asked::Drain(failed));
        assert_eq!(receiver.ask(other, request.clone()), Asked::Waiting);
        // It still comes through, and is seen.
        assert_eq!(receiver.arrived(failed, 5), None);
        let verdict = CloseVerdict { delivered: vec![8], ..CloseVerdict::default() };
        let closed = Closed { askers: vec![other], index: PathIndex(0), verdict: verdict.clone() };
        assert_eq!(receiver.path_ended(failed), Some(closed));
        assert_eq!(receiver.ask(other, request), Asked::Answer(verdict), "the same answer again");
        for _ in 0..2 {
            assert_eq!(receiver.arrived(other, 5), None);
        }
        assert_eq!(receiver.arrived(other, 5), Some('w'), "three that were sent again");
        assert!(!receiver.message(other, 8) && receiver.message(other, 9));
    }

    #[test]
    fn an_answer_goes_to_the_last_few_who_asked_for_it() {
        let mut receiver = Receiver::<char>::new(8);
        let failed = open(&mut receiver, 1, 0);
        let others: Vec<PathId> = (1..100).map(|index| open(&mut receiver, 1, index)).collect();
        assert_eq!(receiver.ask(others[0], ask(0, 5, 0, 1)), Asked::Drain(failed));
        for other in &others {
            assert_eq!(receiver.ask(*other, ask(0, 5, 0, 1)), Asked::Waiting);
        }
        let closed = receiver.path_ended(failed).expect("it was asked about");
        assert_eq!(closed.askers, others[others.len() - ASKERS_MAX..]);
    }

    #[test]
    fn a_path_that_ended_by_itself_keeps_its_counts_until_it_is_asked_about() {
        let mut receiver = Receiver::new(8);
        let (failed, other) = (open(&mut receiver, 1, 0), open(&mut receiver, 1, 1));
        receiver.arrived(failed, 5);
        receiver.arrived(failed, 6);
        assert_eq!(receiver.path_ended(failed), None);
        let Asked::Answer(verdict) = receiver.ask(other, ask(0, 5, 0, 2)) else { panic!() };
        assert_eq!(verdict.landed, []);
        assert_eq!(receiver.imms_mut().expect(5, 1, NEVER, 'a'), Expectation::Waiting);
        assert_eq!(receiver.imms_mut().expect(6, 1, NEVER, 'b'), Expectation::Reached('b'));
    }

    #[test]
    fn a_new_session_ends_the_former_one_and_a_former_one_is_refused() {
        let mut receiver = Receiver::new(8);
        let former = open(&mut receiver, 3, 0);
        assert!(receiver.message(former, 1));
        let opened = receiver.open_path(PEER, 4, PathIndex(0)).expect("it is taken");
        assert_eq!(opened.superseded, [former]);
        assert!(!receiver.message(former, 2), "nothing of a session that is over is delivered");
        assert!(receiver.message(opened.path, 1), "ids are a session's own");
        let stale = receiver.open_path(PEER, 3, PathIndex(7));
        assert_eq!(stale, Err(PathRefusal::StaleSession));
        assert_eq!(receiver.path_ended(former), None);
        assert_eq!(receiver.ask(former, ask(1, 5, 0, 1)), Asked::Malformed);
    }

    #[test]
    fn a_peer_asks_only_about_other_paths_of_its_own() {
        let mut receiver = Receiver::new(8);
        let own = open(&mut receiver, 1, 0);
        let foreign = receiver.open_path(99, 1, PathIndex(5)).expect("it is taken").path;
        assert_eq!(receiver.ask(own, ask(0, 5, 0, 1)), Asked::Malformed, "about itself");
        let Asked::Answer(verdict) = receiver.ask(own, ask(5, 5, 0, 1)) else { panic!() };
        assert!(verdict.forgotten, "it has no path 5");
        assert!(receiver.paths.contains_key(&foreign));
        let late = receiver.open_path(PEER, 1, PathIndex(5));
        assert_eq!(late, Err(PathRefusal::UsedIndex), "it was said that nothing comes through it");
        let used = receiver.open_path(PEER, 1, PathIndex(0));
        assert_eq!(used, Err(PathRefusal::UsedIndex));
        assert_eq!(receiver.ask(PathId(1 << 40), ask(0, 5, 0, 1)), Asked::Malformed);
        let counted = vec![Counted { imm: 1, landed: 0, undecided: 1 }; ASKED_MAX + 1];
        let flood = CloseRequest { path: PathIndex(3), counted, messages: Vec::new() };
        assert_eq!(receiver.ask(own, flood), Asked::Malformed);
    }

    #[test]
    fn paths_that_are_over_are_bounded_and_forgotten_ones_are_said_to_be() {
        let mut receiver = Receiver::new(8);
        let asker = open(&mut receiver, 1, 0);
        for index in 1..1000 {
            let path = open(&mut receiver, 1, index);
            receiver.arrived(path, 5);
            receiver.path_ended(path);
            assert!(receiver.sessions[&PEER].paths.len() <= PATHS_MAX);
        }
        let verdict = |receiver: &mut Receiver<char>, index, undecided| match receiver
            .ask(asker, ask(index, 5, 0, undecided))
        {
            Asked::Answer(verdict) => verdict,
            other => panic!("{other:?}"),
        };
        assert!(verdict(&mut receiver, 1, 1).forgotten);
        assert_eq!(verdict(&mut receiver, 999, 1).landed, [5]);
        let reused = receiver.open_path(PEER, 1, PathIndex(1));
        assert_eq!(reused, Err(PathRefusal::UsedIndex));
        // What was forgotten stands: 999 have landed.
        assert_eq!(receiver.imms_mut().expect(5, 999, NEVER, 'a'), Expectation::Reached('a'));
    }

    /// As many messages as one question may name, each delivered.
    fn deliver(receiver: &mut Receiver<char>, path: PathId, step: usize) -> Vec<u64> {
        let ids: Vec<u64> = (0..ASKED_MAX as u64).step_by(step).collect();
        ids.iter().for_each(|id| assert!(receiver.message(path, *id)));
        ids
    }

    #[test]
    fn the_answers_that_a_session_keeps_are_bounded_in_numbers() {
        let mut receiver = Receiver::<char>::new(8);
        let asker = open(&mut receiver, 1, 0);
        let ids = deliver(&mut receiver, asker, 1);
        let ask = |receiver: &mut Receiver<char>, index, messages| {
            receiver.ask(asker, CloseRequest { path: PathIndex(index), counted: vec![], messages })
        };
        for index in 1..20 {
            let path = open(&mut receiver, 1, index);
            receiver.path_ended(path);
            let Asked::Answer(verdict) = ask(&mut receiver, index, ids.clone()) else { panic!() };
            assert_eq!(verdict.delivered, ids, "it is told all the same");
            assert!(receiver.sessions[&PEER].answered <= ANSWERED_MAX);
        }
        let Asked::Answer(again) = ask(&mut receiver, 19, ids.clone()) else { panic!() };
        assert_eq!(again.delivered, ids, "the last ones are kept");
        let Asked::Answer(oldest) = ask(&mut receiver, 1, ids) else { panic!() };
        assert!(oldest.forgotten);
        let path = open(&mut receiver, 1, 20);
        receiver.path_ended(path);
        let Asked::Answer(once) = ask(&mut receiver, 20, vec![7; ASKED_MAX]) else { panic!() };
        assert_eq!(once.delivered, [7], "one that is named often was delivered once");
    }

    #[test]
    fn what_peers_leave_behind_is_bounded_and_who_is_connected_loses_nothing() {
        let mut receiver = Receiver::<char>::new(8);
        let stays = receiver.open_path(1, 1, PathIndex(0)).expect("it is taken").path;
        deliver(&mut receiver, stays, 2);
        for incarnation in 100..160 {
            let path = receiver.open_path(incarnation, 1, PathIndex(0)).expect("it is taken").path;
            deliver(&mut receiver, path, 2);
            receiver.path_ended(path);
            let gone = receiver.sessions.values().filter(|session| !session.is_open());
            assert!(gone.map(PeerSession::numbers).sum::<usize>() <= LEFT_BEHIND_MAX);
        }
        assert!(receiver.sessions.contains_key(&159), "the latest is remembered");
        assert!(!receiver.sessions.contains_key(&100), "the first is not");
        assert!(receiver.has_message(stays, 2) && !receiver.has_message(stays, 3));
    }

    #[test]
    fn early_counts_are_a_peers_own_however_often_it_connects() {
        let mut receiver = Receiver::new(10);
        let neighbour = receiver.open_path(99, 1, PathIndex(0)).expect("it is taken").path;
        (0..5).for_each(|imm| assert_eq!(receiver.arrived(neighbour, imm), None));
        for index in 0..20 {
            let nonce = 1 + u64::from(index / 10);
            let opened = receiver.open_path(PEER, nonce, PathIndex(index)).expect("it is taken");
            for imm in 100 * index + 100..100 * index + 200 {
                assert_eq!(receiver.arrived(opened.path, imm), None);
            }
            receiver.path_ended(opened.path);
        }
        assert_eq!(receiver.imms().len(), 10);
        for imm in 0..5 {
            let expected = receiver.imms_mut().expect(imm, 1, NEVER, 'w');
            assert_eq!(expected, Expectation::Reached('w'), "{imm} had arrived");
        }
    }

    #[test]
    fn paths_that_are_open_are_bounded() {
        let mut receiver = Receiver::<char>::new(8);
        for index in 0..PATHS_MAX as u32 {
            open(&mut receiver, 1, index);
        }
        let more = receiver.open_path(PEER, 1, PathIndex(PATHS_MAX as u32));
        assert_eq!(more, Err(PathRefusal::TooMany));
        let asker = PathId(0);
        assert_eq!(
            receiver.ask(asker, ask(5000, 5, 0, 1)),
            Asked::Malformed,
            "an impossible request is refused"
        );
    }

    #[test]
    fn peers_without_paths_make_room_for_others() {
        let mut receiver = Receiver::<char>::new(8);
        for peer in 0..2 * SESSIONS_MAX as u64 {
            let path = receiver.open_path(peer, 1, PathIndex(0)).expect("room").path;
            receiver.path_ended(path);
        }
        assert_eq!(receiver.sessions.len(), SESSIONS_MAX);
        for peer in 0..SESSIONS_MAX as u64 {
            receiver.open_path(peer, 2, PathIndex(1)).expect("room");
        }
        let more = receiver.open_path(9_999_999, 1, PathIndex(0));
        assert_eq!(more, Err(PathRefusal::TooMany));
    }

    #[test]
    fn an_ended_session_leaves_its_paths_to_be_ended_and_its_counts_standing() {
        let mut receiver = Receiver::new(8);
        let (ended, open_one) = (open(&mut receiver, 1, 0), open(&mut receiver, 1, 1));
        receiver.arrived(ended, 5);
        receiver.arrived(open_one, 5);
        receiver.path_ended(ended);
        assert_eq!(receiver.end_session(PEER), [open_one]);
        assert!(receiver.is_connected(PEER));
        assert_eq!(receiver.path_ended(open_one), None);
        assert!(!receiver.is_connected(PEER));
        assert_eq!(receiver.imms_mut().expect(5, 2, NEVER, 'a'), Expectation::Reached('a'));
    }
}
