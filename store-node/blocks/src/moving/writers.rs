//! The nodes that write here: who may begin, who is being cut off, and when nothing of one can land any
//! more. Cutting off is [`PARTS`] operations of the transfer engine, each of which is confirmed later or
//! fails. When one fails all of them begin again, as another round: a confirmation of a round that was
//! given up says nothing about the one that followed.

use std::collections::BTreeMap;

use kvasir_mutation::{Mutation, mutated};

/// Cutting off is: paths, slots region, tails region.
pub const PARTS: u32 = 3;

/// Names one try to cut a writer off, among all tries of this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct CutRound(u64);

/// See the module. Writers are named by the incarnation of their transfer engine; `W` is what a shell
/// keeps of one (its session, the regions that it may write).
#[derive(Debug)]
pub struct Writers<W> {
    writers: BTreeMap<u64, Writer<W>>,
    count_max: usize,
    rounds: u64,
}

#[derive(Debug)]
struct Writer<W> {
    kept: W,
    /// Shares that it may write.
    shares: u32,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// Confirmations that are missing.
    Cutting {
        round: CutRound,
        missing: u32,
    },
    /// A part failed; it is tried again.
    Again,
}

/// Whether a writer may begin with another share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Known,
    /// It is to be connected to and inserted first.
    Unknown,
    /// It comes back as an unknown one when that is over.
    BeingCutOff,
    /// As many as may write here do; the one that has nothing to write here, if any, is to be cut off.
    Full {
        idle: Option<u64>,
    },
}

impl<W> Writers<W> {
    pub fn new(count_max: usize) -> Self {
        Writers { writers: BTreeMap::new(), count_max, rounds: 0 }
    }

    pub fn admission(&self, name: u64) -> Admission {
        match self.writers.get(&name) {
            Some(writer) if writer.state == State::Open => Admission::Known,
            Some(_) => Admission::BeingCutOff,
            None if self.writers.len() < self.count_max => Admission::Unknown,
            None => {
                let is_idle =
                    |writer: &Writer<W>| writer.shares == 0 && writer.state == State::Open;
                let idle = self.writers.iter().find(|(_, writer)| is_idle(writer));
                Admission::Full { idle: idle.map(|(name, _)| *name) }
            }
        }
    }

    pub fn insert(&mut self, name: u64, kept: W) {
        self.writers.insert(name, Writer { kept, shares: 0, state: State::Open });
    }

    /// One more share that it may write. Absent unless it is known and not being cut off.
    pub fn open(&mut self, name: u64) -> Option<&W> {
        let writer = self.writers.get_mut(&name).filter(|w| w.state == State::Open)?;
        writer.shares += 1;
        Some(&writer.kept)
    }

    /// One share less.
    pub fn close(&mut self, name: u64) {
        if let Some(writer) = self.writers.get_mut(&name) {
            writer.shares = writer.shares.saturating_sub(1);
        }
    }

    /// What it may be given; absent when it is being cut off, or has been.
    pub fn granted(&self, name: u64) -> Option<&W> {
        self.writers.get(&name).filter(|w| w.state == State::Open).map(|w| &w.kept)
    }

    /// Absent when it has been cut off: nothing of it can land.
    pub fn get(&self, name: u64) -> Option<&W> {
        self.writers.get(&name).map(|writer| &writer.kept)
    }

    /// Begins to cut it off: each of the [`PARTS`] is to be begun, and its end to be told to
    /// [`Writers::cut_done`]. Absent when there is no such writer, or that is under way.
    pub fn begin_cut(&mut self, name: u64) -> Option<(CutRound, &W)> {
        let writer = self.writers.get_mut(&name)?;
        if matches!(writer.state, State::Cutting { .. }) {
            return None;
        }
        self.rounds += 1;
        let round = CutRound(self.rounds);
        writer.state = State::Cutting { round, missing: PARTS };
        Some((round, &writer.kept))
    }

    /// One part has ended. True when it was the last that was missing: the writer is forgotten, and
    /// nothing of it can land any more.
    pub fn cut_done(&mut self, name: u64, round: CutRound, confirmed: bool) -> bool {
        let Some(writer) = self.writers.get_mut(&name) else { return false };
        let State::Cutting { round: current, missing } = writer.state else { return false };
        if round != current && !mutated(Mutation::StaleCutConfirmationCounts) {
            return false;
        }
        match (confirmed, missing) {
            (false, _) => writer.state = State::Again,
            (true, 1) => {
                self.writers.remove(&name);
                return true;
            }
            (true, _) => writer.state = State::Cutting { round, missing: missing - 1 },
        }
        false
    }

    /// Those whose cutting off must begin again.
    pub fn unfinished(&self) -> Vec<u64> {
        let again =
            |(name, writer): (&u64, &Writer<W>)| (writer.state == State::Again).then_some(*name);
        self.writers.iter().filter_map(again).collect()
    }

    pub fn count(&self) -> usize {
        self.writers.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writers() -> Writers<&'static str> {
        let mut writers = Writers::new(2);
        writers.insert(7, "regions");
        writers
    }

    #[test]
    fn a_writer_is_cut_off_with_the_last_confirmation() {
        let mut writers = writers();
        assert_eq!(writers.open(7), Some(&"regions"));
        let (round, _) = writers.begin_cut(7).expect("it begins");
        assert!(writers.begin_cut(7).is_none(), "it is under way");
        assert!(writers.open(7).is_none() && writers.granted(7).is_none());
        assert_eq!(writers.admission(7), Admission::BeingCutOff);
        let ends: Vec<bool> = (0..PARTS).map(|_| writers.cut_done(7, round, true)).collect();
        assert_eq!(ends, [false, false, true]);
        assert_eq!((writers.get(7), writers.admission(7)), (None, Admission::Unknown));
    }

    #[test]
    fn what_a_failed_try_confirms_late_is_not_counted_for_the_next_one() {
        let mut writers = writers();
        let (first, _) = writers.begin_cut(7).expect("it begins");
        assert!(!writers.cut_done(7, first, false));
        assert_eq!(writers.unfinished(), [7]);
        let (second, _) = writers.begin_cut(7).expect("again");
        assert!(!writers.cut_done(7, first, true) && !writers.cut_done(7, first, true));
        assert!(!writers.cut_done(7, second, true) && !writers.cut_done(7, second, true));
        assert!(writers.get(7).is_some(), "one part of the second try is missing");
        assert!(writers.cut_done(7, second, true));
        // It comes back, and the first try still says something.
        writers.insert(7, "others");
        let (third, _) = writers.begin_cut(7).expect("it begins");
        assert!(!writers.cut_done(7, first, false) && !writers.cut_done(7, second, true));
        assert!(writers.unfinished().is_empty() && third > second);
    }

    #[test]
    fn a_writer_without_shares_makes_room() {
        let mut writers = writers();
        writers.insert(8, "other regions");
        assert!(writers.open(7).is_some());
        assert_eq!(writers.admission(9), Admission::Full { idle: Some(8) });
        assert!(writers.open(8).is_some());
        assert_eq!(writers.admission(9), Admission::Full { idle: None });
        writers.close(7);
        assert_eq!(writers.admission(9), Admission::Full { idle: Some(7) });
        assert_eq!(writers.admission(8), Admission::Known);
    }
}
