//! Which messages of a session have been delivered, so that one that is sent again is delivered once.

use std::collections::BTreeSet;

use kvasir_mutation::{Mutation, mutated};

/// A sender has no message under way whose id is so far behind its newest. So much is remembered here.
pub(crate) const WINDOW: u64 = 65_536;

#[derive(Debug, Default)]
pub(crate) struct MessageWindow {
    /// Everything before it is decided.
    floor: u64,
    delivered: BTreeSet<u64>,
}

impl MessageWindow {
    /// Whether the message is to be delivered: it was not before.
    pub(crate) fn is_new(&mut self, id: u64) -> bool {
        if self.has(id) {
            return false;
        }
        if !mutated(Mutation::MessageDeliveredTwice) {
            self.delivered.insert(id);
        }
        let newest_floor = id.saturating_sub(WINDOW - 1);
        if newest_floor > self.floor {
            self.floor = newest_floor;
            self.delivered = self.delivered.split_off(&newest_floor);
        }
        while self.delivered.first() == Some(&self.floor) {
            self.delivered.pop_first();
            self.floor = self.floor.saturating_add(1);
        }
        true
    }

    /// How many are remembered one by one.
    pub(crate) fn out_of_turn(&self) -> usize {
        self.delivered.len()
    }

    pub(crate) fn has(&self, id: u64) -> bool {
        id < self.floor || self.delivered.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_message_is_new_once_in_any_order() {
        let mut window = MessageWindow::default();
        for id in [3, 0, 2, 1, 5] {
            assert!(!window.has(id));
            assert!(window.is_new(id));
            assert!(!window.is_new(id));
        }
        assert!(!window.has(4));
        assert_eq!(window.delivered.len(), 1, "contiguous ids take no memory");
    }

    #[test]
    fn what_is_remembered_is_bounded_by_the_window() {
        let mut window = MessageWindow::default();
        for id in (0..4 * WINDOW).step_by(2) {
            assert!(window.is_new(id));
            assert!(window.delivered.len() as u64 <= WINDOW);
        }
        let newest = 4 * WINDOW - 2;
        assert!(window.is_new(newest - 1));
        assert!(!window.is_new(newest - WINDOW), "no sender sends it any more");
        assert!(window.is_new(u64::MAX));
        assert!(!window.is_new(u64::MAX));
    }
}
