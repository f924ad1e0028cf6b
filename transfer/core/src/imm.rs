//! Counters of immediates. Writes may be counted before they are expected (early) and are counted per
//! path, so that the counts of a failed path can be taken back before its writes are sent again.
//!
//! A counter that was reached stays until it is cancelled: writes that come later are excess, not the
//! first of a new count. Counters that nobody waits for (early ones and reached ones) are bounded: the
//! oldest is forgotten.
//!
//! What a path has counted for an immediate is remembered until the path is closed, also when the
//! counter is cancelled or forgotten: its writes may be asked about later, and an immediate that is
//! used again must not be mistaken for the former one.

use std::collections::{BTreeMap, BTreeSet};

use crate::close::Counted;

/// A connection through which writes arrive. Given by the receiver, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PathId(pub u64);

/// What an expectation led to.
#[derive(Debug, PartialEq, Eq)]
pub enum Expectation<C> {
    Waiting,
    /// The writes had arrived already.
    Reached(C),
    /// Someone expects this immediate already.
    Taken(C),
}

/// What has become of the undecided counts of one immediate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// All of them stand.
    Landed,
    /// None of them stands: they are to be sent again.
    TakenBack,
    /// Some have landed, and it cannot be told which use of the immediate they belong to.
    Unknown,
}

#[derive(Debug)]
pub struct ImmTable<C> {
    counters: BTreeMap<u32, Counter<C>>,
    /// Counters that nobody waits for, oldest first.
    idle: BTreeMap<u64, u32>,
    idle_max: usize,
    next_serial: u64,
    /// No expectation ends before this, those in `expiring` apart.
    earliest_deadline_us: u64,
    /// Found to have run out; still to be given to the caller.
    expiring: Vec<u32>,
    early_forgotten: u64,
    excess: u64,
    /// Counts of open paths in counters that are no more.
    former: BTreeMap<(PathId, u32), u64>,
    former_max: usize,
    /// Paths of which something in `former` is missing.
    overflowed: BTreeSet<PathId>,
}

#[derive(Debug)]
struct Counter<C> {
    /// Counts of paths that are closed.
    settled: u64,
    by_path: Vec<(PathId, u64)>,
    state: State<C>,
}

#[derive(Debug)]
enum State<C> {
    /// Nobody expects it yet.
    Early {
        serial: u64,
    },
    Waiting {
        count: u64,
        deadline_us: u64,
        waiter: C,
    },
    /// Reached, and not cancelled yet.
    Reached {
        serial: u64,
    },
}

impl<C> Counter<C> {
    fn total(&self) -> u64 {
        self.settled + self.by_path.iter().map(|(_, count)| count).sum::<u64>()
    }

    fn add(&mut self, path: PathId, arrivals: u64) {
        match self.by_path.iter_mut().find(|(of, _)| *of == path) {
            Some((_, count)) => *count += arrivals,
            None => self.by_path.push((path, arrivals)),
        }
    }

    fn through(&self, path: PathId) -> u64 {
        self.by_path.iter().find(|(of, _)| *of == path).map_or(0, |(_, count)| *count)
    }

    fn is_reached(&self) -> bool {
        matches!(self.state, State::Reached { .. })
    }

    /// The path's counts are the path's no more; so many of them do not stand.
    fn fold(&mut self, path: PathId, taken_back: u64) {
        let Some(at) = self.by_path.iter().position(|(of, _)| *of == path) else { return };
        let (_, count) = self.by_path.swap_remove(at);
        self.settled += count - taken_back;
    }
}

/// Entries of `former`: one for each immediate and path, some 30 MiB in all.
const FORMER_MAX: usize = 1 << 20;

impl<C> ImmTable<C> {
    pub fn new(idle_max: usize) -> Self {
        ImmTable {
            counters: BTreeMap::new(),
            idle: BTreeMap::new(),
            idle_max,
            next_serial: 0,
            earliest_deadline_us: u64::MAX,
            expiring: Vec::new(),
            early_forgotten: 0,
            excess: 0,
            former: BTreeMap::new(),
            former_max: FORMER_MAX,
            overflowed: BTreeSet::new(),
        }
    }

    pub fn len(&self) -> usize {
        self.counters.len()
    }

    pub fn is_empty(&self) -> bool {
        self.counters.is_empty()
    }

    /// Early counts that were forgotten for lack of room.
    pub fn early_forgotten(&self) -> u64 {
        self.early_forgotten
    }

    /// Arrivals beyond what was expected.
    pub fn excess(&self) -> u64 {
        self.excess
    }

    /// Waits for `count` arrivals, the early ones included, until `deadline_us`.
    pub fn expect(&mut self, imm: u32, count: u64, deadline_us: u64, waiter: C) -> Expectation<C> {
        let counter = self.counters.entry(imm).or_insert_with(|| Counter {
            settled: 0,
            by_path: Vec::new(),
            state: State::Early { serial: u64::MAX },
        });
        match counter.state {
            State::Early { serial } => {
                self.idle.remove(&serial);
                counter.state = State::Waiting { count, deadline_us, waiter };
                self.earliest_deadline_us = self.earliest_deadline_us.min(deadline_us);
                self.take_reached(imm).map_or(Expectation::Waiting, Expectation::Reached)
            }
            State::Waiting { .. } | State::Reached { .. } => Expectation::Taken(waiter),
        }
    }

    /// Counts arrivals. Returns the waiter whose count they complete.
    pub fn arrived(&mut self, path: PathId, imm: u32, arrivals: u64) -> Option<C> {
        match self.counters.get_mut(&imm) {
            None => {
                let serial = self.idle_serial(imm);
                let by_path = vec![(path, arrivals)];
                let state = State::Early { serial };
                self.counters.insert(imm, Counter { settled: 0, by_path, state });
                self.forget_beyond_bound();
                None
            }
            Some(counter) if counter.is_reached() => {
                counter.add(path, arrivals);
                self.excess += arrivals;
                None
            }
            Some(counter) => {
                counter.add(path, arrivals);
                self.take_reached(imm)
            }
        }
    }

    /// Forgets a counter in any state. Returns who waited.
    pub fn cancel(&mut self, imm: u32) -> Option<C> {
        let counter = self.counters.remove(&imm)?;
        self.remember(imm, &counter.by_path);
        match counter.state {
            State::Waiting { waiter, .. } => Some(waiter),
            State::Early { serial } | State::Reached { serial } => {
                self.idle.remove(&serial);
                None
            }
        }
    }

    /// Nothing arrives through this path any more. Says what has become of the counts that are asked
    /// about; what is not asked about stands.
    pub(crate) fn close_path(&mut self, path: PathId, asked: &[Counted]) -> Vec<(u32, Fate)> {
        let mut fates = Vec::with_capacity(asked.len());
        for counted in asked {
            let (fate, surplus) = self.fate(path, counted);
            if let (Fate::TakenBack, Some(counter)) = (fate, self.counters.get_mut(&counted.imm)) {
                counter.fold(path, surplus.min(counter.through(path)));
            }
            fates.push((counted.imm, fate));
        }
        for counter in self.counters.values_mut() {
            counter.fold(path, 0);
        }
        let of_path = self.former.range((path, 0)..=(path, u32::MAX));
        let imms: Vec<u32> = of_path.map(|((_, imm), _)| *imm).collect();
        for imm in imms {
            self.former.remove(&(path, imm));
        }
        self.overflowed.remove(&path);
        fates
    }

    /// And how many have landed beyond those that are known to have.
    fn fate(&self, path: PathId, counted: &Counted) -> (Fate, u64) {
        let counter = self.counters.get(&counted.imm);
        if counter.is_some_and(Counter::is_reached) {
            return (Fate::Landed, 0);
        }
        if self.overflowed.contains(&path) {
            return (Fate::Unknown, 0);
        }
        let former = self.former.get(&(path, counted.imm)).copied().unwrap_or(0);
        let arrived = former + counter.map_or(0, |counter| counter.through(path));
        let surplus = arrived.saturating_sub(counted.landed);
        match surplus {
            0 => (Fate::TakenBack, 0),
            all if all == counted.undecided => (Fate::Landed, all),
            _ if former > 0 => (Fate::Unknown, 0),
            some => (Fate::TakenBack, some),
        }
    }

    fn remember(&mut self, imm: u32, by_path: &[(PathId, u64)]) {
        for (path, count) in by_path {
            if self.former.len() < self.former_max || self.former.contains_key(&(*path, imm)) {
                *self.former.entry((*path, imm)).or_default() += count;
            } else {
                self.overflowed.insert(*path);
            }
        }
    }

    /// An expectation that has run out; its counter is forgotten. To be called until `None`.
    pub fn poll_expired(&mut self, now_us: u64) -> Option<C> {
        if now_us >= self.earliest_deadline_us {
            self.find_expired(now_us);
        }
        while let Some(imm) = self.expiring.pop() {
            if self.deadline_us(imm).is_some_and(|deadline_us| deadline_us <= now_us) {
                return self.cancel(imm);
            }
        }
        None
    }

    fn find_expired(&mut self, now_us: u64) {
        self.earliest_deadline_us = u64::MAX;
        for (imm, counter) in &self.counters {
            let State::Waiting { deadline_us, .. } = counter.state else { continue };
            if deadline_us <= now_us {
                self.expiring.push(*imm);
            } else {
                self.earliest_deadline_us = self.earliest_deadline_us.min(deadline_us);
            }
        }
    }

    fn deadline_us(&self, imm: u32) -> Option<u64> {
        match self.counters.get(&imm)?.state {
            State::Waiting { deadline_us, .. } => Some(deadline_us),
            State::Early { .. } | State::Reached { .. } => None,
        }
    }

    /// When [`ImmTable::poll_expired`] should be called at the latest; `u64::MAX` for never.
    pub fn next_deadline_us(&self) -> u64 {
        self.earliest_deadline_us
    }

    /// Everyone who waits, when the engine stops.
    pub fn drain_waiters(&mut self) -> Vec<C> {
        let counters = std::mem::take(&mut self.counters);
        self.idle.clear();
        let waiter = |counter: Counter<C>| match counter.state {
            State::Waiting { waiter, .. } => Some(waiter),
            State::Early { .. } | State::Reached { .. } => None,
        };
        counters.into_values().filter_map(waiter).collect()
    }

    fn take_reached(&mut self, imm: u32) -> Option<C> {
        let counter = self.counters.get_mut(&imm)?;
        let total = counter.total();
        let State::Waiting { count, .. } = counter.state else { return None };
        if total < count {
            return None;
        }
        self.excess += total - count;
        let serial = self.idle_serial(imm);
        let counter = self.counters.get_mut(&imm)?;
        let former = std::mem::replace(&mut counter.state, State::Reached { serial });
        self.forget_beyond_bound();
        match former {
            State::Waiting { waiter, .. } => Some(waiter),
            State::Early { .. } | State::Reached { .. } => None,
        }
    }

    fn idle_serial(&mut self, imm: u32) -> u64 {
        let serial = self.next_serial;
        self.next_serial += 1;
        self.idle.insert(serial, imm);
        serial
    }

    fn forget_beyond_bound(&mut self) {
        while self.idle.len() > self.idle_max {
            let Some((_, imm)) = self.idle.pop_first() else { return };
            let Some(counter) = self.counters.remove(&imm) else { continue };
            self.remember(imm, &counter.by_path);
            if matches!(counter.state, State::Early { .. }) {
                self.early_forgotten += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: u64 = u64::MAX;
    const A: PathId = PathId(1);
    const B: PathId = PathId(2);

    fn table() -> ImmTable<char> {
        ImmTable::new(4)
    }

    #[test]
    fn arrivals_before_and_after_the_expectation_count_alike() {
        let mut table = table();
        assert_eq!(table.arrived(A, 5, 2), None);
        assert_eq!(table.expect(5, 3, NEVER, 'w'), Expectation::Waiting);
        assert_eq!(table.arrived(B, 5, 1), Some('w'));
        assert_eq!(table.arrived(A, 6, 3), None);
        assert_eq!(table.expect(6, 3, NEVER, 'x'), Expectation::Reached('x'));
        assert_eq!(table.excess(), 0);
    }

    #[test]
    fn an_immediate_has_one_waiter_until_it_is_cancelled() {
        let mut table = table();
        assert_eq!(table.expect(5, 1, NEVER, 'a'), Expectation::Waiting);
        assert_eq!(table.expect(5, 1, NEVER, 'b'), Expectation::Taken('b'));
        assert_eq!(table.arrived(A, 5, 1), Some('a'));
        assert_eq!(table.expect(5, 1, NEVER, 'c'), Expectation::Taken('c'));
        assert_eq!(table.cancel(5), None);
        assert_eq!(table.expect(5, 1, NEVER, 'd'), Expectation::Waiting);
        assert_eq!(table.cancel(5), Some('d'));
        assert!(table.is_empty());
    }

    #[test]
    fn a_cancelled_counter_starts_from_nothing() {
        let mut table = table();
        table.arrived(A, 5, 2);
        table.cancel(5);
        assert_eq!(table.expect(5, 2, NEVER, 'a'), Expectation::Waiting);
        assert_eq!(table.arrived(A, 5, 1), None);
        assert_eq!(table.arrived(A, 5, 1), Some('a'));
    }

    #[test]
    fn what_arrives_after_the_count_was_reached_is_excess() {
        let mut table = table();
        table.expect(5, 1, NEVER, 'a');
        assert_eq!(table.arrived(A, 5, 3), Some('a'));
        assert_eq!(table.arrived(A, 5, 4), None);
        assert_eq!(table.excess(), 6);
    }

    /// What is asked about one immediate, and what comes of it.
    fn close(table: &mut ImmTable<char>, path: PathId, asked: (u32, u64, u64)) -> Fate {
        let (imm, landed, undecided) = asked;
        let fates = table.close_path(path, &[Counted { imm, landed, undecided }]);
        assert_eq!(fates.len(), 1);
        fates[0].1
    }

    #[test]
    fn a_closed_path_keeps_what_is_not_asked_about() {
        let mut table = table();
        table.expect(5, 4, NEVER, 'a');
        table.arrived(A, 5, 2);
        assert_eq!(table.close_path(A, &[]), []);
        assert_eq!(table.arrived(B, 5, 1), None);
        assert_eq!(table.arrived(B, 5, 1), Some('a'));
    }

    #[test]
    fn undecided_counts_are_taken_back_down_to_those_that_are_known() {
        for (arrived, known, undecided, fate, standing) in [
            (0, 0, 3, Fate::TakenBack, 0),
            (2, 2, 3, Fate::TakenBack, 2),
            (3, 1, 4, Fate::TakenBack, 1),
            (3, 0, 4, Fate::TakenBack, 0),
            (3, 1, 2, Fate::Landed, 3),
            (3, 0, 3, Fate::Landed, 3),
            // More than has arrived is claimed: there is nothing to take back.
            (1, 5, 2, Fate::TakenBack, 1),
            (5, 0, 2, Fate::TakenBack, 0),
            (5, u64::MAX, u64::MAX, Fate::TakenBack, 5),
        ] {
            let mut table = table();
            table.expect(5, 10, NEVER, 'a');
            table.arrived(B, 5, 1);
            table.arrived(A, 5, arrived);
            assert_eq!(close(&mut table, A, (5, known, undecided)), fate, "{arrived} of {known}");
            let left = 10 - 1 - standing;
            assert_eq!(table.arrived(B, 5, left - 1), None, "{arrived} arrived, {known} known");
            assert_eq!(table.arrived(B, 5, 1), Some('a'), "{arrived} arrived, {known} known");
        }
    }

    #[test]
    fn nothing_is_taken_back_from_a_count_that_was_reached() {
        let mut table = table();
        table.expect(5, 2, NEVER, 'a');
        assert_eq!(table.arrived(A, 5, 2), Some('a'));
        assert_eq!(close(&mut table, A, (5, 0, 7)), Fate::Landed);
        assert_eq!(table.expect(5, 1, NEVER, 'b'), Expectation::Taken('b'), "it stays finished");
    }

    #[test]
    fn a_count_that_was_reached_is_remembered_after_it_is_cancelled() {
        let mut table = table();
        table.expect(5, 2, NEVER, 'a');
        table.arrived(A, 5, 2);
        table.cancel(5);
        assert_eq!(close(&mut table, A, (5, 0, 2)), Fate::Landed, "not to be sent again");
        table.arrived(B, 5, 2);
        assert_eq!(close(&mut table, A, (5, 0, 2)), Fate::TakenBack, "a closed path is forgotten");
    }

    #[test]
    fn an_immediate_that_is_used_again_is_not_mistaken_for_the_former_one() {
        // Three counts of the former use, then one of the present: asked with so many known.
        for (known, undecided, fate) in [
            (3, 2, Fate::Unknown),
            (4, 2, Fate::TakenBack),
            (3, 1, Fate::Landed),
            (0, 4, Fate::Landed),
            (0, 5, Fate::Unknown),
        ] {
            let mut table = table();
            table.expect(5, 3, NEVER, 'a');
            assert_eq!(table.arrived(A, 5, 3), Some('a'));
            table.cancel(5);
            table.expect(5, 3, NEVER, 'b');
            assert_eq!(table.arrived(A, 5, 1), None);
            assert_eq!(close(&mut table, A, (5, known, undecided)), fate, "{known} known");
            assert_eq!(table.arrived(B, 5, 1), None, "nothing is counted for the former use");
            assert_eq!(table.arrived(B, 5, 1), Some('b'), "what has arrived stands");
        }
    }

    #[test]
    fn a_path_of_which_too_much_would_have_to_be_remembered_is_asked_in_vain() {
        let mut table = table();
        table.former_max = 2;
        for imm in 0..3 {
            table.arrived(A, imm, 1);
            table.cancel(imm);
        }
        table.arrived(B, 0, 1);
        assert_eq!(table.former.len(), 2);
        assert_eq!(close(&mut table, B, (0, 0, 2)), Fate::TakenBack);
        assert_eq!(close(&mut table, A, (1, 1, 1)), Fate::Unknown);
        assert!(table.former.is_empty() && table.overflowed.is_empty());
    }

    #[test]
    fn counters_that_nobody_waits_for_are_bounded_oldest_first() {
        let mut table = table();
        table.expect(100, 2, NEVER, 'w');
        for imm in 0..5 {
            table.arrived(A, imm, 1);
        }
        assert_eq!(table.early_forgotten(), 1);
        assert_eq!(table.expect(0, 1, NEVER, 'a'), Expectation::Waiting, "0 was the oldest");
        assert_eq!(table.expect(1, 1, NEVER, 'b'), Expectation::Reached('b'));
        table.arrived(A, 100, 1);
        assert_eq!(table.arrived(A, 100, 1), Some('w'), "a waiter is never forgotten");
    }

    #[test]
    fn an_expectation_ends_at_its_deadline_and_not_before() {
        let mut table = table();
        table.expect(1, 1, 50, 'a');
        table.expect(2, 1, 70, 'b');
        table.expect(3, 1, NEVER, 'c');
        assert_eq!(table.poll_expired(49), None);
        assert_eq!(table.next_deadline_us(), 50);
        assert_eq!(table.poll_expired(50), Some('a'));
        assert_eq!(table.poll_expired(50), None);
        assert_eq!(table.next_deadline_us(), 70);
        assert_eq!(table.arrived(A, 2, 1), Some('b'));
        assert_eq!(table.poll_expired(70), None);
        assert_eq!(table.next_deadline_us(), NEVER);
        assert_eq!(table.drain_waiters(), ['c']);
    }
}
