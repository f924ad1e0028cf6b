//! When room comes back, by what is booked: what a refused caller is told to wait. Nothing is
//! decided here.
//!
//! Each booking has a predicted end. One that should have ended and has not ends at some time
//! within the next answer time, like the work of others, of which only the number is known: `k` of
//! such are taken to end evenly spread over it.

use kvasir_proto::InstanceId;

use crate::view::{Booked, ClusterView, HostRef, Instance};

/// Answers of others that are looked at, at most: beyond it a report is wild.
const OTHERS_MAX: u32 = 4_096;

impl ClusterView {
    /// How long until so many of the booked requests have ended, whatever they are; the last of them when
    /// fewer are booked.
    pub fn requests_end_in_us(&self, count: usize, now_us: u64) -> u64 {
        let ends = self.bookings.values().map(|booked| (booked.end_us, 1));
        let answer_us = self.instances().iter().map(|i| i.decode_model.answer_us()).min();
        let drain = Drain::new(ends, 0, now_us, answer_us.unwrap_or(0));
        drain.until(count as u64).unwrap_or_else(|| drain.last_us())
    }

    /// How long until what ends on this instance's node has freed so many slots, when it has said that it
    /// has none: what was known of its free ones is out of date.
    pub fn slots_free_in_us(&self, instance: &InstanceId, slots: u32, now_us: u64) -> u64 {
        let found = self.instances().iter().find(|i| i.report().instance_id == *instance);
        found.map_or(0, |instance| self.slots_end_in_us(instance, slots, now_us))
    }

    /// How long until the instance's node has so many slots left.
    pub(crate) fn slots_left_in_us(&self, instance: &Instance, slots: u32, now_us: u64) -> u64 {
        self.slots_end_in_us(instance, slots.saturating_sub(self.slots_left(instance)), now_us)
    }

    fn slots_end_in_us(&self, instance: &Instance, slots: u32, now_us: u64) -> u64 {
        let answer_us = instance.decode_model.answer_us();
        let ends = self.slots_held(self.host(instance).reference);
        // When what is booked does not suffice, others hold the rest: in the time of one answer
        // all that run now have ended.
        let drain = Drain::new(ends, 0, now_us, answer_us);
        drain.until(slots.into()).unwrap_or_else(|| answer_us.max(drain.last_us()))
    }

    /// `(end, slots)` of what is booked on one node.
    fn slots_held(&self, host: HostRef) -> impl Iterator<Item = (u64, u32)> {
        let held = self.bookings.values().flat_map(Booked::slots_held);
        held.filter_map(move |(at, end_us, slots)| (at == host).then_some((end_us, slots)))
    }
}

impl Booked {
    /// `(node, end, slots)` of what it holds.
    pub(crate) fn slots_held(&self) -> impl Iterator<Item = (HostRef, u64, u32)> {
        let prefills = self.handed_over_us.is_none();
        let prefill =
            prefills.then_some((self.prefill_host, self.prefill_end_us, self.prefill_slots));
        let growth = self.growth.grown_blocks() + self.growth.left_blocks();
        let decode = (self.decode_host, self.end_us, self.decode_slots.saturating_add(growth));
        prefill.into_iter().chain([decode])
    }
}

impl Instance {
    /// How long until at most so many answers are left of those that it decodes or will.
    pub(crate) fn answers_left_in_us(&self, answers: u32, now_us: u64) -> u64 {
        let others = self.other_answers.min(OTHERS_MAX);
        let all = self.decodes.len() as u64 + u64::from(others);
        let ends = self.decodes.ends_us().iter().map(|end_us| (*end_us, 1));
        let drain = Drain::new(ends, others, now_us, self.decode_model.answer_us());
        drain.until(all.saturating_sub(answers.into())).unwrap_or(0)
    }
}

/// What ends when: how far ahead, and how much comes free with it.
struct Drain {
    ends: Vec<(u64, u32)>,
}

impl Drain {
    fn new(
        ends: impl Iterator<Item = (u64, u32)>,
        others: u32,
        now_us: u64,
        answer_us: u64,
    ) -> Self {
        let mut ends: Vec<(u64, u32)> = ends.collect();
        let overdue = ends.iter().filter(|(end_us, _)| *end_us <= now_us).count() as u64;
        let spread =
            |k: u64, of: u64| (u128::from(answer_us) * u128::from(k) / u128::from(of + 1)) as u64;
        let mut late = 0;
        for (end_us, _) in &mut ends {
            *end_us = match end_us.saturating_sub(now_us) {
                0 => {
                    late += 1;
                    spread(late, overdue)
                }
                in_us => in_us,
            };
        }
        ends.extend((1..=others).map(|k| (spread(k.into(), others.into()), 1)));
        ends.sort_unstable();
        Drain { ends }
    }

    fn last_us(&self) -> u64 {
        self.ends.last().map_or(0, |(in_us, _)| *in_us)
    }

    /// How long until so much is free; `None` when it never is.
    fn until(&self, wanted: u64) -> Option<u64> {
        let mut free = 0;
        if wanted == 0 {
            return Some(0);
        }
        self.ends.iter().find_map(|(in_us, slots)| {
            free += u64::from(*slots);
            (free >= wanted).then_some(*in_us)
        })
    }
}
