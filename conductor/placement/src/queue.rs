//! The work that this conductor has booked on one instance: prefills in order, and the answers
//! that it decodes or will. Known at once, long before the instance reports it.

use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};

use serde::{Deserialize, Serialize};

use crate::view::BookingId;

/// One prefill that is booked and not finished.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillBooking {
    pub computed_tokens: u32,
    pub reused_tokens: u32,
    pub predicted_us: u64,
    /// Of those that wait the one with the least goes first, and one that runs stops for it at the
    /// end of a chunk.
    pub rank_us: u64,
    /// How much its rank falls with each microsecond that is done of it.
    pub shortest_prefill_first_factor: f64,
    /// When the blocks that it waits for are predicted to be there; it does not begin earlier.
    pub ready_us: u64,
    /// What it sends to the decode side while it runs.
    pub push_bytes: u64,
}

/// Prefills of one instance: the one that runs or is next, and then the others by rank.
#[derive(Debug, Clone, Default)]
pub struct PrefillQueue {
    first: Option<(BookingId, PrefillBooking)>,
    waiting: BTreeMap<(u64, BookingId), PrefillBooking>,
    /// By id, of those that wait.
    ranks: BTreeMap<BookingId, u64>,
    tokens: u64,
    /// Since when the first one runs, or from when on if it waits for blocks; with none, since
    /// when there is none.
    first_since_us: u64,
}

/// What a decision reads of a queue: ranks and times.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QueueParts {
    first: Option<QueuePart>,
    first_since_us: u64,
    waiting: Vec<QueuePart>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueuePart {
    rank_us: u64,
    predicted_us: u64,
}

impl QueueParts {
    /// Memory beside its own.
    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.waiting)
    }

    pub(crate) fn times_us(&self) -> impl Iterator<Item = u64> {
        let parts = self.first.iter().chain(&self.waiting);
        let times = parts.flat_map(|part| [part.rank_us, part.predicted_us]);
        times.chain([self.first_since_us])
    }
}

impl PrefillQueue {
    pub(crate) fn parts(&self) -> QueueParts {
        let part = |booking: &PrefillBooking| QueuePart {
            rank_us: booking.rank_us,
            predicted_us: booking.predicted_us,
        };
        QueueParts {
            first: self.first.as_ref().map(|(_, first)| part(first)),
            first_since_us: self.first_since_us,
            waiting: self.waiting.values().map(part).collect(),
        }
    }

    /// A queue that a decision cannot tell from the one that the parts are of.
    pub(crate) fn from_parts(
        parts: &QueueParts,
        shortest_prefill_first_factor: f64,
    ) -> PrefillQueue {
        let booking = |part: &QueuePart| PrefillBooking {
            computed_tokens: 0,
            reused_tokens: 0,
            predicted_us: part.predicted_us,
            rank_us: part.rank_us,
            shortest_prefill_first_factor,
            ready_us: 0,
            push_bytes: 0,
        };
        let waiting = parts.waiting.iter().zip(1..);
        PrefillQueue {
            first: parts.first.as_ref().map(|first| (BookingId(0), booking(first))),
            waiting: waiting.map(|(w, id)| ((w.rank_us, BookingId(id)), booking(w))).collect(),
            ranks: BTreeMap::new(),
            tokens: 0,
            first_since_us: parts.first_since_us,
        }
    }

    /// Books a prefill. An id that is booked already is replaced.
    pub fn book(&mut self, id: BookingId, booking: PrefillBooking, now_us: u64) {
        self.remove(id, now_us);
        self.tokens += u64::from(booking.computed_tokens);
        let mut later = Some((id, booking));
        if self.first_rank_us(now_us).is_none_or(|first_us| booking.rank_us < first_us) {
            later = self.first.replace((id, booking)).map(|(id, mut stopped)| {
                let done_us = now_us.saturating_sub(self.first_since_us).min(stopped.predicted_us);
                stopped.rank_us = stopped.rank_after(done_us);
                stopped.predicted_us -= done_us;
                (id, stopped)
            });
            self.first_since_us = now_us.max(booking.ready_us);
        }
        if let Some((id, booking)) = later {
            self.ranks.insert(id, booking.rank_us);
            self.waiting.insert((booking.rank_us, id), booking);
        }
    }

    pub fn get(&self, id: BookingId) -> Option<&PrefillBooking> {
        match &self.first {
            Some((first, booking)) if *first == id => Some(booking),
            _ => self.waiting.get(&(*self.ranks.get(&id)?, id)),
        }
    }

    /// Replaces what is predicted of a prefill, which keeps its place.
    pub fn revise(&mut self, id: BookingId, booking: PrefillBooking) {
        let known = match &mut self.first {
            Some((first, known)) if *first == id => Some(known),
            _ => self.ranks.get(&id).and_then(|rank| self.waiting.get_mut(&(*rank, id))),
        };
        if let Some(known) = known {
            let (old, new) = (known.computed_tokens, booking.computed_tokens);
            self.tokens = self.tokens - u64::from(old) + u64::from(new);
            *known = booking;
        }
    }

    /// The prefill is finished or given up.
    pub fn remove(&mut self, id: BookingId, now_us: u64) -> Option<PrefillBooking> {
        let removed = match self.first {
            Some((first, booking)) if first == id => {
                self.first = self.waiting.pop_first().map(|((_, id), booking)| (id, booking));
                let ready_us = self.first.map_or(0, |(next, booking)| {
                    self.ranks.remove(&next);
                    booking.ready_us
                });
                self.first_since_us = now_us.max(ready_us);
                booking
            }
            _ => self.waiting.remove(&(self.ranks.remove(&id)?, id))?,
        };
        self.tokens -= u64::from(removed.computed_tokens);
        Some(removed)
    }

    /// The one that runs, and since when, or from when on if it waits for blocks.
    pub fn first(&self) -> Option<(BookingId, &PrefillBooking, u64)> {
        self.first.as_ref().map(|(id, first)| (*id, first, self.first_since_us))
    }

    /// When the last one ended, while there is none.
    pub fn idle_since_us(&self) -> u64 {
        if self.is_empty() { self.first_since_us } else { 0 }
    }

    /// What is left of all of them.
    pub fn remaining_us(&self, now_us: u64) -> u64 {
        self.ahead_us(u64::MAX, now_us)
    }

    /// What is left of those that go before one of this rank that comes now.
    pub fn ahead_us(&self, rank_us: u64, now_us: u64) -> u64 {
        let Some((_, first)) = &self.first else { return 0 };
        let mut ahead_us = 0;
        if first.rank_after(now_us.saturating_sub(self.first_since_us)) <= rank_us {
            let done_us = now_us.saturating_sub(self.first_since_us).min(first.predicted_us);
            let waits_us = self.first_since_us.saturating_sub(now_us);
            ahead_us = waits_us + first.predicted_us - done_us;
        }
        let before = self.waiting.range(..=(rank_us, BookingId(u64::MAX)));
        ahead_us + before.map(|(_, booking)| booking.predicted_us).sum::<u64>()
    }

    /// How many would wait for one of this rank that comes now.
    pub fn behind(&self, rank_us: u64, now_us: u64) -> usize {
        let first = self.first_rank_us(now_us).is_some_and(|first_us| first_us > rank_us);
        let after = (Excluded((rank_us, BookingId(u64::MAX))), Unbounded);
        self.waiting.range(after).count() + usize::from(first)
    }

    /// Prompt tokens that they compute, the running one's included.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn len(&self) -> usize {
        self.waiting.len() + usize::from(self.first.is_some())
    }

    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    fn first_rank_us(&self, now_us: u64) -> Option<u64> {
        let (_, first) = self.first.as_ref()?;
        Some(first.rank_after(now_us.saturating_sub(self.first_since_us)))
    }
}

impl PrefillBooking {
    /// Its rank when so much of it is done.
    pub fn rank_after(&self, done_us: u64) -> u64 {
        let done_us = done_us.min(self.predicted_us) as f64;
        self.rank_us.saturating_sub((done_us * self.shortest_prefill_first_factor) as u64)
    }
}

/// Answers of one instance, each with the time at which it is predicted to end.
#[derive(Debug, Clone, Default)]
pub struct DecodeBookings {
    ends_us: Vec<u64>,
    /// When those that have not begun are predicted to.
    begins_us: Vec<u64>,
    /// Of all their prompts, and of the prompts of those that have begun.
    tokens: u64,
    begun_tokens: u64,
}

/// One answer that is booked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeBooking {
    /// When it is predicted to begin; nothing once it has begun.
    pub begins_us: Option<u64>,
    pub end_us: u64,
    pub prompt_tokens: u32,
}

impl DecodeBookings {
    /// Answers with these ends and beginnings, the earliest first.
    pub(crate) fn from_parts(
        ends_us: Vec<u64>,
        begins_us: Vec<u64>,
        tokens: u64,
        begun_tokens: u64,
    ) -> DecodeBookings {
        DecodeBookings { ends_us, begins_us, tokens, begun_tokens }
    }

    /// When those that have not begun are predicted to, the earliest first.
    pub(crate) fn begins_us(&self) -> &[u64] {
        &self.begins_us
    }

    /// Of all their prompts.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn book(&mut self, booking: DecodeBooking) {
        let DecodeBooking { begins_us, end_us, prompt_tokens } = booking;
        insert(&mut self.ends_us, end_us);
        self.tokens += u64::from(prompt_tokens);
        match begins_us {
            Some(begins_us) => insert(&mut self.begins_us, begins_us),
            None => self.begun_tokens += u64::from(prompt_tokens),
        }
    }

    /// Takes back what was booked so.
    pub fn remove(&mut self, booking: DecodeBooking) {
        let DecodeBooking { begins_us, end_us, prompt_tokens } = booking;
        if !remove(&mut self.ends_us, end_us) {
            return;
        }
        self.tokens -= u64::from(prompt_tokens);
        match begins_us {
            Some(begins_us) => _ = remove(&mut self.begins_us, begins_us),
            None => self.begun_tokens -= u64::from(prompt_tokens),
        }
    }

    /// Those that have begun, and the tokens of their prompts.
    pub fn begun(&self) -> (usize, u64) {
        (self.ends_us.len() - self.begins_us.len(), self.begun_tokens)
    }

    /// How many will not have begun at `at_us`.
    pub fn begin_after(&self, at_us: u64) -> usize {
        self.begins_us.len() - self.begins_us.partition_point(|&begin| begin <= at_us)
    }

    /// Of their prompts in the mean.
    pub fn mean_tokens(&self) -> Option<f64> {
        (!self.is_empty()).then(|| self.tokens as f64 / self.len() as f64)
    }

    pub fn len(&self) -> usize {
        self.ends_us.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends_us.is_empty()
    }

    /// When each of them is predicted to end, the earliest first.
    pub fn ends_us(&self) -> &[u64] {
        &self.ends_us
    }

    /// How many will be there at `at_us`: those that end later, and of those that should have
    /// ended by now and have not, the share that a uniform answer time leaves.
    pub fn remaining_at(&self, at_us: u64, now_us: u64, answer_us: u64) -> f64 {
        let overdue = self.ends_us.partition_point(|&end| end <= now_us);
        let ended = self.ends_us.partition_point(|&end| end <= at_us.max(now_us));
        (self.ends_us.len() - ended) as f64 + overdue as f64 * left_share(at_us, now_us, answer_us)
    }
}

fn insert(times_us: &mut Vec<u64>, time_us: u64) {
    times_us.insert(times_us.partition_point(|&time| time < time_us), time_us);
}

fn remove(times_us: &mut Vec<u64>, time_us: u64) -> bool {
    let at = times_us.binary_search(&time_us);
    at.map(|at| times_us.remove(at)).is_ok()
}

/// Of answers that began at unknown times and all take `answer_us`, the share that is left at
/// `at_us` (*Mooncake* §4.3).
pub fn left_share(at_us: u64, now_us: u64, answer_us: u64) -> f64 {
    let ahead_us = at_us.saturating_sub(now_us) as f64;
    (1.0 - ahead_us / (answer_us as f64).max(1.0)).clamp(0.0, 1.0)
}
