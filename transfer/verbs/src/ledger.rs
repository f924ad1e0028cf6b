//! What is outstanding on one queue of a queue pair, so that a post can never overflow it. Pure
//! counting; it knows neither devices nor time.
//!
//! A work request's id is made here: which queue it is on, whether it is the layer's own, which life of
//! a queue pair it belongs to, its place in the sequence of the queue, and the caller's tag. A
//! completion for a place retires everything up to it, because a queue completes in order; that is how
//! requests without a completion of their own are counted off. The life is there because numbers of
//! queue pairs are used again, while completions of the last bearer may still lie in a completion queue.

use crate::ids::WorkTag;

const RECEIVE: u64 = 1 << 63;
const OWN: u64 = 1 << 62;
const LIFE_BITS: u32 = 12;
const LIFE_MASK: u32 = (1 << LIFE_BITS) - 1;
const LIFE_SHIFT: u32 = 50;
const PLACE_BITS: u32 = 18;
const PLACE_MASK: u32 = (1 << PLACE_BITS) - 1;
const PLACE_SHIFT: u32 = 32;

/// No queue may be deeper, so that places never become ambiguous. Devices have some 32 k.
pub(crate) const DEPTH_MAX: u32 = 1 << 16;

/// Which queue of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    Send,
    Receive,
}

/// A work request's id, as the device carries it from post to completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WorkId(pub(crate) u64);

impl WorkId {
    pub(crate) fn side(self) -> Side {
        if self.0 & RECEIVE == 0 { Side::Send } else { Side::Receive }
    }

    /// `None` for what the layer posted or signalled for its own ends.
    pub(crate) fn tag(self) -> Option<WorkTag> {
        (self.0 & OWN == 0).then_some(WorkTag(self.0 as u32))
    }

    fn life(self) -> u32 {
        (self.0 >> LIFE_SHIFT) as u32 & LIFE_MASK
    }

    fn place(self) -> u32 {
        (self.0 >> PLACE_SHIFT) as u32 & PLACE_MASK
    }
}

/// One queue: how deep it is and what is outstanding on it.
#[derive(Debug)]
pub(crate) struct Ledger {
    side: Side,
    life: u32,
    depth: u32,
    /// The place of the next post.
    next: u32,
    in_flight: u32,
    /// How many posts since the last that has a completion of its own.
    silent: u32,
}

impl Ledger {
    /// `life` differs between queue pairs that are made one after the other.
    pub(crate) fn new(side: Side, life: u32, depth: u32) -> Self {
        assert!(depth <= DEPTH_MAX, "a queue of {depth} work requests");
        Ledger { side, life: life & LIFE_MASK, depth, next: 0, in_flight: 0, silent: 0 }
    }

    pub(crate) fn room(&self) -> usize {
        self.depth.saturating_sub(self.in_flight) as usize
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Whether the last posts have no completion of their own.
    pub(crate) fn is_silent(&self) -> bool {
        self.silent > 0
    }

    /// The plan of a chain of posts; it takes effect by [`Ledger::commit`] alone.
    pub(crate) fn plan(&self) -> Plan<'_> {
        Plan { ledger: self, place: self.next, silent: self.silent }
    }

    /// The first `posted` of the last plan are on the queue, `silent` of them at its end without a
    /// completion of their own.
    pub(crate) fn commit(&mut self, posted: usize, silent: u32) {
        self.in_flight += posted as u32;
        self.next = (self.next + posted as u32) & PLACE_MASK;
        self.silent = silent;
    }

    /// The id of a marker, which takes a place beyond the depth: the queue is made one deeper for it.
    pub(crate) fn marker(&self) -> WorkId {
        let mut id = self.id(self.next, WorkTag(0));
        id.0 |= OWN;
        id
    }

    fn id(&self, place: u32, tag: WorkTag) -> WorkId {
        let queue = if self.side == Side::Receive { RECEIVE } else { 0 };
        let (life, place) = (u64::from(self.life), u64::from(place));
        WorkId(queue | life << LIFE_SHIFT | place << PLACE_SHIFT | u64::from(tag.0))
    }

    /// Whether it was posted in this life.
    pub(crate) fn is_of_this_life(&self, id: WorkId) -> bool {
        id.side() == self.side && id.life() == self.life
    }

    /// Counts off everything up to this place, of this life. How many that were; 0 when the completion
    /// came before.
    pub(crate) fn retire(&mut self, id: WorkId) -> u32 {
        let oldest = self.next.wrapping_sub(self.in_flight) & PLACE_MASK;
        let retired = (id.place().wrapping_sub(oldest) & PLACE_MASK) + 1;
        if retired > self.in_flight {
            return 0;
        }
        self.in_flight -= retired;
        retired
    }
}

/// Hands out ids for a chain of posts.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    ledger: &'a Ledger,
    place: u32,
    silent: u32,
}

impl Plan<'_> {
    /// The next request's id, and whether it must be signalled. Half a queue of requests without a
    /// completion is enough: if nothing were ever signalled, nothing could be counted off, and the queue
    /// would be full for good.
    pub(crate) fn next(&mut self, tag: WorkTag, wants_signal: bool) -> (WorkId, bool) {
        let mut id = self.ledger.id(self.place, tag);
        self.place = (self.place + 1) & PLACE_MASK;
        self.silent += 1;
        let must_signal = self.silent >= self.ledger.depth.div_ceil(2);
        if must_signal && !wants_signal {
            id.0 |= OWN;
        }
        if must_signal || wants_signal {
            self.silent = 0;
        }
        (id, must_signal || wants_signal)
    }

    pub(crate) fn silent(&self) -> u32 {
        self.silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn post(ledger: &mut Ledger, signalled: &[bool]) -> Vec<(WorkId, bool)> {
        let mut plan = ledger.plan();
        let tagged = (0_u32..).zip(signalled);
        let ids = tagged.map(|(tag, signal)| plan.next(WorkTag(tag), *signal)).collect();
        let silent = plan.silent();
        ledger.commit(signalled.len(), silent);
        ids
    }

    #[test]
    fn an_id_carries_its_queue_and_the_callers_tag() {
        for side in [Side::Send, Side::Receive] {
            let ledger = Ledger::new(side, 1, 4);
            let (id, _) = ledger.plan().next(WorkTag(0xffff_ffff), true);
            assert_eq!((id.side(), id.tag()), (side, Some(WorkTag(0xffff_ffff))));
            assert_eq!(ledger.marker().tag(), None);
            assert_eq!(ledger.marker().side(), side);
        }
    }

    #[test]
    fn a_completion_counts_off_the_silent_requests_before_it() {
        let mut ledger = Ledger::new(Side::Send, 1, 8);
        let ids = post(&mut ledger, &[false, false, true]);
        assert_eq!(ledger.room(), 5);
        assert_eq!(ledger.retire(ids[2].0), 3);
        assert_eq!(ledger.room(), 8);
    }

    #[test]
    fn an_error_of_a_silent_request_counts_off_only_up_to_it() {
        let mut ledger = Ledger::new(Side::Send, 1, 8);
        let ids = post(&mut ledger, &[false, false, true]);
        assert_eq!(ledger.retire(ids[1].0), 2);
        assert_eq!(ledger.in_flight(), 1);
        assert_eq!(ledger.retire(ids[2].0), 1);
    }

    #[test]
    fn a_completion_that_came_before_counts_off_nothing() {
        let mut ledger = Ledger::new(Side::Send, 1, 4);
        let ids = post(&mut ledger, &[true, true, true]);
        assert_eq!(ledger.retire(ids[1].0), 2);
        assert_eq!(ledger.retire(ids[1].0), 0);
        assert_eq!(ledger.retire(ids[0].0), 0);
        assert_eq!(ledger.in_flight(), 1);
    }

    #[test]
    fn a_completion_of_an_earlier_life_is_known_as_such() {
        let mut earlier = Ledger::new(Side::Send, 4095, 4);
        let later = Ledger::new(Side::Send, 4096, 4);
        let ids = post(&mut earlier, &[true]);
        assert!(earlier.is_of_this_life(ids[0].0) && !later.is_of_this_life(ids[0].0));
        let receives = Ledger::new(Side::Receive, 4095, 4);
        assert!(!receives.is_of_this_life(ids[0].0));
        assert_eq!(ids[0].0.tag(), Some(WorkTag(0)), "a long life does not spill into the flags");
    }

    #[test]
    fn a_queue_of_silent_requests_is_signalled_before_it_is_full_for_good() {
        let mut ledger = Ledger::new(Side::Send, 1, 8);
        let ids = post(&mut ledger, &[false; 8]);
        let signalled: Vec<bool> = ids.iter().map(|(_, signalled)| *signalled).collect();
        assert_eq!(signalled, [false, false, false, true, false, false, false, true]);
        assert_eq!(ids[3].0.tag(), None, "the caller did not ask for it");
        assert_eq!(ids[2].0.tag(), Some(WorkTag(2)));
        assert_eq!(ledger.room(), 0);
        assert_eq!(ledger.retire(ids[7].0), 8);
    }

    #[test]
    fn silence_is_counted_across_posts() {
        let mut ledger = Ledger::new(Side::Send, 1, 8);
        post(&mut ledger, &[false, false, false]);
        assert!(post(&mut ledger, &[false])[0].1);
        assert!(!post(&mut ledger, &[false])[0].1);
    }

    #[test]
    fn a_queue_of_one_is_always_signalled() {
        let mut ledger = Ledger::new(Side::Send, 1, 1);
        assert!(post(&mut ledger, &[false])[0].1);
    }

    #[test]
    fn places_wrap_around() {
        let mut ledger = Ledger::new(Side::Receive, 1, 3);
        ledger.next = PLACE_MASK - 1;
        let ids = post(&mut ledger, &[true, true, true]);
        assert_eq!(ids[2].0.place(), 0);
        assert_eq!(ledger.retire(ids[0].0), 1);
        assert_eq!(ledger.retire(ids[2].0), 2);
        assert_eq!(ledger.room(), 3);
    }

    #[test]
    fn only_what_the_device_took_is_counted() {
        let mut ledger = Ledger::new(Side::Send, 1, 4);
        ledger.commit(1, 1);
        assert_eq!(ledger.room(), 3);
        ledger.commit(3, 0);
        assert_eq!(ledger.room(), 0);
    }

    #[test]
    fn a_marker_fits_a_full_queue_and_counts_off_everything() {
        let mut ledger = Ledger::new(Side::Send, 1, 2);
        post(&mut ledger, &[true, true]);
        let marker = ledger.marker();
        ledger.commit(1, 0);
        assert_eq!(ledger.room(), 0);
        assert_eq!(ledger.retire(marker), 3);
    }
}
