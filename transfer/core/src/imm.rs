//! Counters of immediates. Writes may be counted before they are expected (early) and are counted per
//! path, so that the counts of a failed path can be taken back before its writes are sent again.
//!
//! A counter that was reached stays until it is cancelled: writes that come later are excess, not the
//! first of a new count. Counters that nobody waits for (early ones and reached ones) are bounded, and whoever
//! fills the room for them pays for it; see `idle`.
//!
//! What a path has counted for an immediate is remembered until the path is closed, also when the
//! counter is cancelled or forgotten: its writes may be asked about later, and an immediate that is
//! used again must not be mistaken for the former one; see `former`.

mod former;
mod idle;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use kvasir_mutation::{Mutation, mutated};

use self::former::Former;
use self::idle::{Idle, Place};
use crate::close::Counted;

/// A connection through which writes arrive. Given by the receiver, never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PathId(pub u64);

/// To whom something is accounted, so that nobody else has to pay for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Maker {
    /// The one who expects.
    Here,
    /// By incarnation.
    Peer(u64),
}

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
    /// Counters that nobody waits for.
    idle: Idle,
    /// No expectation ends before this, those in `expiring` apart.
    earliest_deadline_us: u64,
    /// Found to have run out; still to be given to the caller.
    expiring: Vec<u32>,
    early_forgotten: u64,
    excess: u64,
    /// Counts of open paths in counters that are no more.
    former: Former,
}

#[derive(Debug)]
struct Counter<C> {
    shares: Vec<Share>,
    state: State<C>,
}

/// What has come of one maker by one path.
#[derive(Debug, Clone, Copy)]
struct Share {
    maker: Maker,
    /// `None`: by those that are closed.
    path: Option<PathId>,
    count: u64,
}

#[derive(Debug)]
enum State<C> {
    /// Nobody expects it yet.
    Early {
        place: Place,
    },
    Waiting {
        count: u64,
        deadline_us: u64,
        waiter: C,
    },
    /// Reached, and not cancelled yet.
    Reached {
        place: Place,
    },
}

/// Makers whose counts by closed paths one counter tells apart. Those of later ones are nobody's.
const SETTLED_MAKERS_MAX: usize = 64;

impl<C> Counter<C> {
    fn total(&self) -> u64 {
        self.shares.iter().map(|share| share.count).sum()
    }

    fn add(&mut self, path: PathId, arrivals: u64, maker: impl FnOnce() -> Maker) {
        match self.shares.iter_mut().find(|share| share.path == Some(path)) {
            Some(share) => share.count += arrivals,
            None => {
                let (maker, path) = (maker(), Some(path));
                self.shares.push(Share { maker, path, count: arrivals });
            }
        }
    }

    fn through(&self, path: PathId) -> u64 {
        let share = self.shares.iter().find(|share| share.path == Some(path));
        share.map_or(0, |share| share.count)
    }

    fn is_reached(&self) -> bool {
        matches!(self.state, State::Reached { .. })
    }

    /// The path's counts are the path's no more; so many of them do not stand.
    fn fold(&mut self, path: PathId, taken_back: u64) {
        let at = self.shares.iter().position(|share| share.path == Some(path));
        let Some(at) = at else { return };
        let Share { maker, count, .. } = self.shares.swap_remove(at);
        if count > taken_back {
            self.settle(maker, count - taken_back);
        }
    }

    fn settle(&mut self, mut maker: Maker, count: u64) {
        let settled = self.shares.iter().filter(|share| share.path.is_none());
        if settled.clone().all(|share| share.maker != maker)
            && settled.count() >= SETTLED_MAKERS_MAX
        {
            maker = Maker::Here;
        }
        let of_maker = |share: &&mut Share| share.path.is_none() && share.maker == maker;
        match self.shares.iter_mut().find(of_maker) {
            Some(share) => share.count += count,
            None => self.shares.push(Share { maker, path: None, count }),
        }
    }
}

impl<C> ImmTable<C> {
    pub fn new(idle_max: usize) -> Self {
        ImmTable {
            counters: BTreeMap::new(),
            idle: Idle::new(idle_max),
            earliest_deadline_us: u64::MAX,
            expiring: Vec::new(),
            early_forgotten: 0,
            excess: 0,
            former: Former::default(),
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
        let was_early = match self.counters.entry(imm) {
            Entry::Vacant(entry) => {
                let state = State::Waiting { count, deadline_us, waiter };
                entry.insert(Counter { shares: Vec::new(), state });
                None
            }
            Entry::Occupied(mut entry) => {
                let counter = entry.get_mut();
                let State::Early { place } = counter.state else {
                    return Expectation::Taken(waiter);
                };
                counter.state = State::Waiting { count, deadline_us, waiter };
                Some(place)
            }
        };
        if let Some(place) = was_early {
            self.idle.remove(place);
        }
        self.earliest_deadline_us = self.earliest_deadline_us.min(deadline_us);
        self.take_reached(imm).map_or(Expectation::Waiting, Expectation::Reached)
    }

    /// Counts arrivals; `maker` says whose the path is. Returns the waiter whose count they complete.
    pub fn arrived(
        &mut self,
        path: PathId,
        imm: u32,
        arrivals: u64,
        maker: impl FnOnce() -> Maker,
    ) -> Option<C> {
        match self.counters.get_mut(&imm) {
            None => {
                let maker = maker();
                let state = State::Early { place: self.idle.add(maker, imm) };
                let shares = vec![Share { maker, path: Some(path), count: arrivals }];
                self.counters.insert(imm, Counter { shares, state });
                self.forget_beyond_bound(maker);
                None
            }
            Some(counter) if counter.is_reached() => {
                counter.add(path, arrivals, maker);
                self.excess += arrivals;
                None
            }
            Some(counter) => {
                counter.add(path, arrivals, maker);
                self.take_reached(imm)
            }
        }
    }

    /// Forgets a counter in any state. Returns who waited.
    pub fn cancel(&mut self, imm: u32) -> Option<C> {
        if mutated(Mutation::ReachedAfterCancel)
            && matches!(self.counters.get(&imm)?.state, State::Waiting { .. })
        {
            return None;
        }
        let counter = self.counters.remove(&imm)?;
        for share in &counter.shares {
            if !mutated(Mutation::CancelledCountsForgotten) {
                self.former.remember(share, imm);
            }
        }
        match counter.state {
            State::Waiting { waiter, .. } => Some(waiter),
            State::Early { place } | State::Reached { place } => {
                self.idle.remove(place);
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
                let is_kept = mutated(Mutation::DiscardOmitted);
                counter.fold(path, if is_kept { 0 } else { surplus.min(counter.through(path)) });
            }
            fates.push((counted.imm, fate));
        }
        for counter in self.counters.values_mut() {
            counter.fold(path, 0);
        }
        self.former.close(path);
        fates
    }

    /// And how many have landed beyond those that are known to have.
    fn fate(&self, path: PathId, counted: &Counted) -> (Fate, u64) {
        let counter = self.counters.get(&counted.imm);
        if counter.is_some_and(Counter::is_reached) {
            let is_discarded = mutated(Mutation::DiscardAfterReached);
            return (if is_discarded { Fate::TakenBack } else { Fate::Landed }, 0);
        }
        let Some(former) = self.former.count(path, counted.imm) else { return (Fate::Unknown, 0) };
        let arrived = former + counter.map_or(0, |counter| counter.through(path));
        let surplus = arrived.saturating_sub(counted.landed);
        match surplus {
            0 => (Fate::TakenBack, 0),
            all if all == counted.undecided => (Fate::Landed, all),
            _ if former > 0 => (Fate::Unknown, 0),
            some => (Fate::TakenBack, some),
        }
    }

    /// An expectation that has run out; its counter is forgotten. To be called until `None`.
    pub fn poll_expired(&mut self, now_us: u64) -> Option<C> {
        if now_us >= self.earliest_deadline_us && !mutated(Mutation::ExpectationsNotExpired) {
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
        // It stands until the one who expected it cancels it.
        let place = self.idle.add(Maker::Here, imm);
        let former = std::mem::replace(&mut counter.state, State::Reached { place });
        self.forget_beyond_bound(Maker::Here);
        match former {
            State::Waiting { waiter, .. } => Some(waiter),
            State::Early { .. } | State::Reached { .. } => None,
        }
    }

    /// `maker` has made the last one.
    fn forget_beyond_bound(&mut self, maker: Maker) {
        while let Some((payer, imm)) = self.idle.pop_beyond_bound(maker) {
            let Entry::Occupied(mut entry) = self.counters.entry(imm) else { continue };
            let counter = entry.get_mut();
            let is_reached = counter.is_reached();
            // What others have put into an early counter is not its maker's to lose.
            let lost = |share: &mut Share| {
                is_reached || share.maker == payer || mutated(Mutation::CountsOfOthersForgotten)
            };
            for share in counter.shares.extract_if(.., lost) {
                self.former.remember(&share, imm);
            }
            self.early_forgotten += u64::from(!is_reached);
            match counter.shares.first() {
                Some(Share { maker: heir, .. }) => {
                    counter.state = State::Early { place: self.idle.add(*heir, imm) };
                }
                None => drop(entry.remove()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;

    const NEVER: u64 = u64::MAX;
    const A: PathId = PathId(1);
    const B: PathId = PathId(2);
    /// The second path of A's maker.
    const A2: PathId = PathId(3);

    fn table() -> ImmTable<char> {
        ImmTable::new(4)
    }

    fn maker(path: PathId) -> Maker {
        Maker::Peer(if path == A2 { A.0 } else { path.0 })
    }

    fn land<C>(table: &mut ImmTable<C>, path: PathId, imm: u32, arrivals: u64) -> Option<C> {
        table.arrived(path, imm, arrivals, || maker(path))
    }

    fn land_each(table: &mut ImmTable<char>, path: PathId, imms: Range<u32>) {
        for imm in imms {
            land(table, path, imm, 1);
        }
    }

    #[test]
    fn arrivals_before_and_after_the_expectation_count_alike() {
        let mut table = table();
        assert_eq!(land(&mut table, A, 5, 2), None);
        assert_eq!(table.expect(5, 3, NEVER, 'w'), Expectation::Waiting);
        assert_eq!(land(&mut table, B, 5, 1), Some('w'));
        assert_eq!(land(&mut table, A, 6, 3), None);
        assert_eq!(table.expect(6, 3, NEVER, 'x'), Expectation::Reached('x'));
        assert_eq!(table.excess(), 0);
    }

    #[test]
    fn an_immediate_has_one_waiter_until_it_is_cancelled() {
        let mut table = table();
        assert_eq!(table.expect(5, 1, NEVER, 'a'), Expectation::Waiting);
        assert_eq!(table.expect(5, 1, NEVER, 'b'), Expectation::Taken('b'));
        assert_eq!(land(&mut table, A, 5, 1), Some('a'));
        assert_eq!(table.expect(5, 1, NEVER, 'c'), Expectation::Taken('c'));
        assert_eq!(table.cancel(5), None);
        assert_eq!(table.expect(5, 1, NEVER, 'd'), Expectation::Waiting);
        assert_eq!(table.cancel(5), Some('d'));
        assert!(table.is_empty());
    }

    #[test]
    fn a_cancelled_counter_starts_from_nothing() {
        let mut table = table();
        land(&mut table, A, 5, 2);
        table.cancel(5);
        assert_eq!(table.expect(5, 2, NEVER, 'a'), Expectation::Waiting);
        assert_eq!(land(&mut table, A, 5, 1), None);
        assert_eq!(land(&mut table, A, 5, 1), Some('a'));
    }

    #[test]
    fn what_arrives_after_the_count_was_reached_is_excess() {
        let mut table = table();
        table.expect(5, 1, NEVER, 'a');
        assert_eq!(land(&mut table, A, 5, 3), Some('a'));
        assert_eq!(land(&mut table, A, 5, 4), None);
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
        land(&mut table, A, 5, 2);
        assert_eq!(table.close_path(A, &[]), []);
        assert_eq!(land(&mut table, B, 5, 1), None);
        assert_eq!(land(&mut table, B, 5, 1), Some('a'));
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
            land(&mut table, B, 5, 1);
            land(&mut table, A, 5, arrived);
            assert_eq!(close(&mut table, A, (5, known, undecided)), fate, "{arrived} of {known}");
            let left = 10 - 1 - standing;
            assert_eq!(land(&mut table, B, 5, left - 1), None, "{arrived} arrived, {known} known");
            assert_eq!(land(&mut table, B, 5, 1), Some('a'), "{arrived} arrived, {known} known");
        }
    }

    #[test]
    fn nothing_is_taken_back_from_a_count_that_was_reached() {
        let mut table = table();
        table.expect(5, 2, NEVER, 'a');
        assert_eq!(land(&mut table, A, 5, 2), Some('a'));
        assert_eq!(close(&mut table, A, (5, 0, 7)), Fate::Landed);
        assert_eq!(table.expect(5, 1, NEVER, 'b'), Expectation::Taken('b'), "it stays finished");
    }

    #[test]
    fn a_count_that_was_reached_is_remembered_after_it_is_cancelled() {
        let mut table = table();
        table.expect(5, 2, NEVER, 'a');
        land(&mut table, A, 5, 2);
        table.cancel(5);
        assert_eq!(close(&mut table, A, (5, 0, 2)), Fate::Landed, "not to be sent again");
        land(&mut table, B, 5, 2);
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
            assert_eq!(land(&mut table, A, 5, 3), Some('a'));
            table.cancel(5);
            table.expect(5, 3, NEVER, 'b');
            assert_eq!(land(&mut table, A, 5, 1), None);
            assert_eq!(close(&mut table, A, (5, known, undecided)), fate, "{known} known");
            assert_eq!(land(&mut table, B, 5, 1), None, "nothing is counted for the former use");
            assert_eq!(land(&mut table, B, 5, 1), Some('b'), "arrivals are kept");
        }
    }

    #[test]
    fn a_path_of_which_too_much_would_have_to_be_remembered_is_asked_in_vain() {
        let mut table = table();
        table.former.max = 2;
        for imm in 0..3 {
            land(&mut table, A, imm, 1);
            table.cancel(imm);
        }
        assert_eq!(table.former.len, 0);
        land(&mut table, A, 3, 1);
        table.cancel(3);
        assert_eq!(table.former.len, 0, "unregistered counts take no space");
        land(&mut table, B, 0, 1);
        assert_eq!(close(&mut table, B, (0, 0, 2)), Fate::TakenBack);
        assert_eq!(close(&mut table, A, (1, 1, 1)), Fate::Unknown);
        assert_eq!(close(&mut table, A, (1, 1, 1)), Fate::TakenBack, "a closed path is forgotten");
    }

    #[test]
    fn who_fills_what_is_remembered_of_paths_is_asked_in_vain_and_nobody_else() {
        let mut table = table();
        table.former.max = 100;
        let cancelled = |table: &mut ImmTable<char>, path, imm| {
            land(table, path, imm, 1);
            table.cancel(imm);
            assert!(table.former.len <= 100);
        };
        // While nobody else needs room, all of it is A's.
        (0..99).for_each(|imm| cancelled(&mut table, A, imm));
        assert_eq!(close(&mut table, A2, (0, 0, 1)), Fate::TakenBack);
        (0..50).for_each(|imm| cancelled(&mut table, B, imm));
        assert_eq!(table.former.len, 50, "A had the most, and B is within its share");
        (0..1000).for_each(|imm| cancelled(&mut table, A2, imm));
        (0..1000).for_each(|imm| cancelled(&mut table, A, imm));
        assert_eq!(close(&mut table, B, (3, 0, 1)), Fate::Landed);
        assert_eq!(close(&mut table, A, (3, 0, 1)), Fate::Unknown);
        assert_eq!(close(&mut table, A2, (3, 0, 1)), Fate::Unknown);
        assert_eq!(table.former.len, 0);
    }

    #[test]
    fn who_makes_too_many_early_counts_loses_its_own_oldest_and_nobody_elses() {
        let mut table = ImmTable::new(10);
        land_each(&mut table, B, 0..3);
        land_each(&mut table, A, 100..200);
        // Connecting anew makes no difference.
        land_each(&mut table, A2, 200..300);
        assert_eq!((table.len(), table.early_forgotten()), (10, 193));
        // Those within their share take the room that they need from the one that is not.
        land_each(&mut table, B, 3..5);
        for imm in (0..5).chain(295..300) {
            let expected = table.expect(imm, 1, NEVER, 'w');
            assert_eq!(expected, Expectation::Reached('w'), "{imm} had arrived");
        }
        assert_eq!(table.expect(294, 1, NEVER, 'w'), Expectation::Waiting);
    }

    #[test]
    fn counts_that_were_reached_and_let_stand_take_no_room_from_peers() {
        let mut table = ImmTable::new(10);
        land_each(&mut table, B, 0..3);
        for imm in 100..200 {
            table.expect(imm, 1, NEVER, 'w');
            assert_eq!(land(&mut table, A, imm, 1), Some('w'));
        }
        for imm in 0..3 {
            assert_eq!(table.expect(imm, 1, NEVER, 'w'), Expectation::Reached('w'));
        }
    }

    #[test]
    fn who_loses_an_early_count_loses_what_others_have_put_into_it_for_nobody() {
        for is_closed in [false, true] {
            let mut table = table();
            // A was first, and is to lose it.
            land(&mut table, A, 5, 7);
            land(&mut table, B, 5, 2);
            if is_closed {
                table.close_path(B, &[]);
            }
            land_each(&mut table, A, 100..200);
            assert_eq!(table.expect(5, 3, NEVER, 'w'), Expectation::Waiting, "A's are forgotten");
            assert_eq!(land(&mut table, A, 5, 1), Some('w'), "B's are not");
            let closed = close(&mut table, A, (5, 7, 1));
            assert_eq!(closed, Fate::Landed, "A's former count is remembered");
        }
    }

    #[test]
    fn one_counter_tells_so_many_makers_apart_and_forgets_nothing_of_more() {
        let mut table = table();
        for peer in 0..1000 {
            table.arrived(PathId(peer), 5, 1, || Maker::Peer(peer));
            table.close_path(PathId(peer), &[]);
        }
        assert!(table.counters[&5].shares.len() <= SETTLED_MAKERS_MAX + 1);
        assert_eq!(table.expect(5, 1000, NEVER, 'w'), Expectation::Reached('w'));
    }

    #[test]
    fn counters_that_nobody_waits_for_are_bounded_oldest_first() {
        let mut table = table();
        table.expect(100, 2, NEVER, 'w');
        for imm in 0..5 {
            land(&mut table, A, imm, 1);
        }
        assert_eq!(table.early_forgotten(), 1);
        assert_eq!(table.expect(0, 1, NEVER, 'a'), Expectation::Waiting, "0 was the oldest");
        assert_eq!(table.expect(1, 1, NEVER, 'b'), Expectation::Reached('b'));
        land(&mut table, A, 100, 1);
        assert_eq!(land(&mut table, A, 100, 1), Some('w'), "a waiter is never forgotten");
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
        assert_eq!(land(&mut table, A, 2, 1), Some('b'));
        assert_eq!(table.poll_expired(70), None);
        assert_eq!(table.next_deadline_us(), NEVER);
        assert_eq!(table.drain_waiters(), ['c']);
    }
}
