//! One push from the moment its targets are known until its end has been seen to. It ends once, and only
//! when each write that was issued is definite: after a stop or a failure the transfer engine must say
//! what became of those (a *drain*), and when it cannot, whoever asks is told that the end is unsure.

use std::ops::Range;

use kvasir_mutation::{Mutation, mutated};

use super::PushName;
use super::pages::Pages;
use super::push::{Fault, Group, Push};

/// Whether the transfer engine still has writes of a push that failed or was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Drain {
    NotNeeded,
    Asked,
    Done,
}

/// See the module. `P` names a peer.
///
/// Where a method answers that a drain is wanted, the shell asks the transfer engine whether all that
/// was issued has landed or failed, and tells [`Leaving::drained`]. After every call it looks at
/// [`Leaving::take_end`].
#[derive(Debug)]
pub struct Leaving<P> {
    name: PushName,
    /// Pages that the receiver has places for.
    targets: Range<u32>,
    push: Push,
    drain: Drain,
    /// A path was lost with its writes on it.
    unsure: bool,
    /// The block core waits to hear that it has stopped.
    core_waits: bool,
    /// Receivers that asked to stop it.
    stop_asked: Vec<P>,
    settled: bool,
}

/// How a push ended, given once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PushEnd<P> {
    /// Its writes may still land: only the receiver can make sure that they do not.
    pub unsure: bool,
    /// Who is to be told.
    pub stop_asked: Vec<P>,
    /// Every page that has a place, and the tail.
    pub all_landed: bool,
    pub fault: Option<Fault>,
    /// Fewer pages than there were places for.
    pub is_part: bool,
    /// Leading pages that landed intact, and whose checksums did.
    pub good_pages: u32,
    /// The block core is told by `push_stopped`, and otherwise by `read_end`.
    pub core_waits: bool,
}

impl<P> Leaving<P> {
    pub fn new(name: PushName, targets: Range<u32>, mut push: Push) -> Self {
        push.set_places(targets.len());
        Leaving {
            name,
            targets,
            push,
            drain: Drain::NotNeeded,
            unsure: false,
            core_waits: false,
            stop_asked: Vec::new(),
            settled: false,
        }
    }

    pub fn name(&self) -> PushName {
        self.name
    }

    pub fn push(&self) -> &Push {
        &self.push
    }

    /// For what is due of it; its end goes through the methods here.
    pub fn push_mut(&mut self) -> &mut Push {
        &mut self.push
    }

    /// Its end has been seen to.
    pub fn is_settled(&self) -> bool {
        self.settled
    }

    /// A group is definite. Answers whether a drain is wanted: a source that goes on after a corrupt
    /// page wants none, because what it sends next would be taken back, and the fate of that page is
    /// known.
    #[must_use]
    pub fn group_done(&mut self, group: &Group, outcome: Result<(), Fault>) -> bool {
        self.push.group_done(group, outcome);
        outcome.is_err() && self.push.is_stopped() && self.wants_drain()
    }

    /// The tail is definite. Answers whether a drain is wanted.
    #[must_use]
    pub fn tail_done(&mut self, outcome: Result<(), Fault>) -> bool {
        self.push.tail_done(outcome);
        outcome.is_err() && self.wants_drain()
    }

    /// Nothing more is issued. Answers whether a drain is wanted.
    #[must_use]
    pub fn halt(&mut self) -> bool {
        if self.settled {
            return false;
        }
        self.push.stop();
        self.wants_drain()
    }

    /// A receiver asks for it to stop, and is told when it has; [`Leaving::halt`] follows.
    pub fn asked_to_stop(&mut self, by: P) {
        self.stop_asked.push(by);
    }

    /// The block core asks for it to stop; [`Leaving::halt`] follows. False when it had ended.
    #[must_use]
    pub fn core_waits(&mut self) -> bool {
        self.core_waits |= !self.settled;
        !self.settled
    }

    /// The transfer engine has none of its writes any more, and knows what became of each (`sure`), or
    /// could not be asked.
    pub fn drained(&mut self, sure: bool) {
        self.drain = Drain::Done;
        self.unsure |= !sure;
    }

    fn wants_drain(&mut self) -> bool {
        let wanted = self.drain != Drain::Asked;
        self.drain = Drain::Asked;
        wanted
    }

    /// Its end, once each of its writes is definite and none will follow.
    pub fn take_end(&mut self, pages: &Pages) -> Option<PushEnd<P>> {
        let over = self.push.is_over()
            && (self.drain != Drain::Asked || mutated(Mutation::StoppedPushEndsEarly));
        if !over || std::mem::replace(&mut self.settled, true) {
            return None;
        }
        Some(PushEnd {
            unsure: self.unsure,
            stop_asked: std::mem::take(&mut self.stop_asked),
            all_landed: self.push.all_landed(),
            fault: self.push.fault(),
            is_part: self.push.pages() != self.targets,
            good_pages: self.push.good_pages(pages),
            core_waits: self.core_waits,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvasir_proto::{SlotIndex, SlotLayout};

    use super::*;
    use crate::moving::push::Grouping;

    const NAME: PushName = PushName { receiver: 1, imm: 2 };

    /// A push of one whole page of two layers, with its two groups issued.
    fn leaving() -> (Leaving<&'static str>, Pages, Vec<Group>) {
        let layout = SlotLayout::layer_major(4, 2, 16).expect("a layout");
        let mut pages = Pages::new(Arc::new(layout), &[SlotIndex(0)]);
        pages.set_whole(0, SlotIndex(0), 7);
        let mut leaving = Leaving::new(NAME, 0..1, Push::new(Grouping::Layers, 0..1));
        let next = || leaving.push_mut().next_group(&pages);
        let groups = std::iter::from_fn(next).collect();
        (leaving, pages, groups)
    }

    #[test]
    fn a_push_that_landed_ends_once_and_without_a_drain() {
        let (mut leaving, pages, groups) = leaving();
        leaving.push_mut().give_tail(Vec::new());
        assert!(leaving.push_mut().take_due_tail(&pages).is_some());
        assert!(groups.iter().all(|group| !leaving.group_done(group, Ok(()))));
        assert_eq!(leaving.take_end(&pages), None, "the tail is under way");
        assert!(!leaving.tail_done(Ok(())));
        let end = leaving.take_end(&pages).expect("the end");
        assert!(end.all_landed && !end.unsure && !end.is_part && end.good_pages == 1);
        assert_eq!(leaving.take_end(&pages), None, "it was given");
        assert!(!leaving.halt(), "there is nothing to stop");
    }

    #[test]
    fn a_stop_waits_for_the_drain_and_for_what_was_issued() {
        let (mut leaving, pages, groups) = leaving();
        leaving.asked_to_stop("peer");
        assert!(leaving.halt());
        assert!(!leaving.halt(), "one drain is enough");
        let _ = leaving.group_done(&groups[0], Ok(()));
        leaving.drained(true);
        assert_eq!(leaving.take_end(&pages), None, "a group is under way");
        // What was taken back is a failure of a stopped push: its end is asked for again.
        assert!(leaving.group_done(&groups[1], Err(Fault::NotSent)));
        assert_eq!(leaving.take_end(&pages), None, "the drain is under way");
        leaving.drained(true);
        let end = leaving.take_end(&pages).expect("the end");
        assert_eq!((end.stop_asked, end.unsure, end.fault), (vec!["peer"], false, None));
    }

    #[test]
    fn an_end_that_nobody_knows_is_unsure() {
        let (mut leaving, pages, groups) = leaving();
        assert!(leaving.core_waits());
        assert!(leaving.group_done(&groups[0], Err(Fault::PeerLost)));
        let _ = leaving.group_done(&groups[1], Err(Fault::PeerLost));
        leaving.drained(false);
        let end = leaving.take_end(&pages).expect("the end");
        assert!(end.unsure && end.core_waits);
        assert_eq!(end.fault, Some(Fault::PeerLost));
        assert!(!leaving.core_waits(), "it has ended");
    }
}
