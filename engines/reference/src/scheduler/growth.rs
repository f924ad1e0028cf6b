//! Room for the tokens that decoding adds: a sequence asks its node for slots before it needs them,
//! and stands still, for a bounded time, when there are none.

/// Rows ahead of the next one for which there should be slots: the node answers within a step or
/// two, and one page is rarely asked for earlier than it is used.
const AHEAD_ROWS: u32 = 16;
/// How long after a refusal the node is asked again.
const RETRY_US: u64 = 20_000;

/// How far the rows of a sequence reach.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Rows needed for the next step.
    pub rows_next: u32,
    /// Rows of the longest answer.
    pub rows_max: u32,
    /// Slots that are there.
    pub pages: u32,
    pub page_tokens: u32,
}

impl Room {
    /// The next step has no place for its row.
    pub(crate) fn is_short(self) -> bool {
        self.pages * self.page_tokens < self.rows_next
    }

    fn pages_wanted(self) -> u32 {
        let rows = self.rows_max.min(self.rows_next.saturating_add(AHEAD_ROWS));
        rows.div_ceil(self.page_tokens).saturating_sub(self.pages)
    }
}

/// One sequence's growth.
#[derive(Debug, Default)]
pub(crate) struct Growth {
    asked: bool,
    retry_at_us: u64,
    short_since_us: Option<u64>,
}

impl Growth {
    /// Pages to ask the node for now; 0 when there is room, or an answer or a retry is waited for.
    pub(crate) fn poll(&mut self, room: Room, now_us: u64) -> u32 {
        self.short_since_us = room.is_short().then(|| self.short_since_us.unwrap_or(now_us));
        let wanted = room.pages_wanted();
        if wanted == 0 || self.asked || now_us < self.retry_at_us {
            return 0;
        }
        self.asked = true;
        wanted
    }

    /// The node has answered.
    pub(crate) fn handle_grown(&mut self, granted: bool, now_us: u64) {
        self.asked = false;
        self.retry_at_us = if granted { 0 } else { now_us + RETRY_US };
    }

    /// Since when the sequence has stood still for want of a slot.
    pub(crate) fn short_since_us(&self) -> Option<u64> {
        self.short_since_us
    }

    /// Another sequence has given its slots back: the wait begins anew.
    pub(crate) fn wait_anew(&mut self, now_us: u64) {
        if self.short_since_us.is_some() {
            self.short_since_us = Some(now_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: Room = Room { rows_next: 60, rows_max: 1000, pages: 1, page_tokens: 64 };

    #[test]
    fn slots_are_asked_for_ahead_of_need_once_and_never_beyond_the_answer() {
        let ask = |room: Room| Growth::default().poll(room, 0);
        assert_eq!(ask(Room { rows_next: 48, ..ROOM }), 0);
        assert_eq!(ask(Room { rows_next: 49, ..ROOM }), 1);
        assert_eq!(ask(Room { rows_next: 49, rows_max: 64, ..ROOM }), 0);
        assert_eq!(ask(Room { rows_next: 10, page_tokens: 4, ..ROOM }), 6);
        let mut growth = Growth::default();
        assert_eq!((growth.poll(ROOM, 0), growth.poll(ROOM, 1)), (1, 0));
    }

    #[test]
    fn a_refusal_is_followed_by_a_pause_and_another_try() {
        let mut growth = Growth::default();
        assert_eq!(growth.poll(ROOM, 0), 1);
        growth.handle_grown(false, 100);
        assert_eq!(growth.poll(ROOM, 101), 0);
        assert_eq!(growth.poll(ROOM, 100 + RETRY_US), 1);
        growth.handle_grown(true, 200);
        assert_eq!(growth.poll(Room { pages: 2, ..ROOM }, 201), 0);
    }

    #[test]
    fn the_wait_counts_from_the_first_step_without_room() {
        let short = Room { rows_next: 65, ..ROOM };
        assert!(short.is_short() && !Room { rows_next: 64, ..ROOM }.is_short());
        let mut growth = Growth::default();
        growth.poll(ROOM, 5);
        assert_eq!(growth.short_since_us(), None);
        growth.poll(short, 10);
        growth.poll(short, 20);
        assert_eq!(growth.short_since_us(), Some(10));
        growth.wait_anew(30);
        assert_eq!(growth.short_since_us(), Some(30));
        growth.poll(Room { pages: 2, ..short }, 40);
        assert_eq!(growth.short_since_us(), None);
    }
}
