//! What a queue pair has outstanding on both its queues, and whether it takes more. Pure: it is told what
//! was posted and what has completed.

use crate::error::PostError;
use crate::ledger::{Ledger, Side};
use crate::status::WorkCompletion;

#[derive(Debug)]
pub(crate) struct Outstanding {
    pub(crate) sends: Ledger,
    pub(crate) receives: Ledger,
    /// It has been brought up for sending.
    can_send: bool,
    /// A request has failed, or the queue pair was cut off: it takes no more.
    is_broken: bool,
}

impl Outstanding {
    /// `life` differs between queue pairs that are made one after the other.
    pub(crate) fn new(life: u32, send_depth: u32, receive_depth: u32) -> Self {
        Outstanding {
            sends: Ledger::new(Side::Send, life, send_depth),
            receives: Ledger::new(Side::Receive, life, receive_depth),
            can_send: false,
            is_broken: false,
        }
    }

    pub(crate) fn ledger(&self, side: Side) -> &Ledger {
        match side {
            Side::Send => &self.sends,
            Side::Receive => &self.receives,
        }
    }

    pub(crate) fn begin_to_send(&mut self) {
        self.can_send = true;
    }

    pub(crate) fn break_off(&mut self) {
        self.is_broken = true;
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.sends.in_flight() == 0 && self.receives.in_flight() == 0
    }

    /// Refuses what cannot be posted as a whole.
    pub(crate) fn admit(&self, side: Side, wanted: usize) -> Result<(), PostError> {
        if self.is_broken {
            return Err(PostError::Broken);
        }
        if side == Side::Send && !self.can_send {
            return Err(PostError::NotConnected);
        }
        let room = self.ledger(side).room();
        if wanted > room { Err(PostError::Full { wanted, room }) } else { Ok(()) }
    }

    /// How many work requests ended with this completion; 0 when it is of an earlier life.
    pub(crate) fn retire(&mut self, completion: &WorkCompletion) -> u32 {
        let id = completion.id();
        if !self.ledger(id.side()).is_of_this_life(id) {
            return 0;
        }
        if !completion.is_success() {
            self.is_broken = true;
        }
        match id.side() {
            Side::Send => self.sends.retire(id),
            Side::Receive => self.receives.retire(id),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bindings::{IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR};
    use crate::ids::WorkTag;
    use crate::ledger::WorkId;

    fn post(outstanding: &mut Outstanding, side: Side) -> WorkId {
        outstanding.admit(side, 1).expect("there is room");
        let ledger = match side {
            Side::Send => &mut outstanding.sends,
            Side::Receive => &mut outstanding.receives,
        };
        let (id, _) = ledger.plan().next(WorkTag(0), true);
        ledger.commit(1, 0);
        id
    }

    fn connected(life: u32) -> Outstanding {
        let mut outstanding = Outstanding::new(life, 2, 2);
        outstanding.begin_to_send();
        outstanding
    }

    #[test]
    fn a_completion_of_an_earlier_queue_pair_of_the_same_number_counts_for_nothing() {
        let (mut earlier, mut later) = (connected(1), connected(2));
        for side in [Side::Send, Side::Receive] {
            let stale = post(&mut earlier, side);
            post(&mut later, side);
            for status in [IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR] {
                assert_eq!(later.retire(&WorkCompletion::forged(stale, status)), 0);
                assert_eq!(later.ledger(side).in_flight(), 1);
                assert!(!later.is_broken());
            }
        }
        assert!(!later.is_empty());
    }

    #[test]
    fn a_failure_breaks_the_queue_pair_and_a_success_does_not() {
        let mut outstanding = connected(1);
        let (first, second) =
            (post(&mut outstanding, Side::Send), post(&mut outstanding, Side::Receive));
        assert_eq!(outstanding.retire(&WorkCompletion::forged(first, IBV_WC_SUCCESS)), 1);
        assert!(outstanding.admit(Side::Send, 2).is_ok());
        assert_eq!(outstanding.retire(&WorkCompletion::forged(second, IBV_WC_WR_FLUSH_ERR)), 1);
        assert!(outstanding.is_empty());
        for side in [Side::Send, Side::Receive] {
            assert!(matches!(outstanding.admit(side, 1), Err(PostError::Broken)));
        }
    }

    #[test]
    fn a_queue_pair_without_a_peer_takes_receives_only() {
        let outstanding = Outstanding::new(1, 2, 2);
        assert!(matches!(outstanding.admit(Side::Send, 1), Err(PostError::NotConnected)));
        assert!(outstanding.admit(Side::Receive, 2).is_ok());
        let refused = outstanding.admit(Side::Receive, 3);
        assert!(matches!(refused, Err(PostError::Full { wanted: 3, room: 2 })));
    }
}
