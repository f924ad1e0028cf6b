//! Whether there is room for a request: on each node, for all that it takes there.

use super::Planner;
use crate::decision::{DecodeCandidate, PrefillCandidate, Verdict};
use crate::view::{Instance, Role};

impl Planner<'_> {
    /// What keeps an instance out before any price is looked at.
    pub(super) fn gate(&self, instance: &Instance, slots: u32) -> Verdict {
        if self.excluded(instance) {
            Verdict::Excluded
        } else if instance.report.draining {
            Verdict::Draining
        } else if !self.has_room(instance, slots) && !self.could_hold_idle(instance, slots) {
            Verdict::NoCapacity
        } else if instance.avoided() {
            Verdict::Unhealthy
        } else if !self.has_room(instance, slots) {
            Verdict::CapacityUnknown
        } else {
            Verdict::HigherCost
        }
    }

    pub(super) fn has_room(&self, instance: &Instance, slots: u32) -> bool {
        slots <= self.view.slots_left(instance)
    }

    /// Slots that a report counts as taken end with the work that took them, and where none is left
    /// nothing would be refused rightly: a refusal must rest on work that is there.
    fn could_hold_idle(&self, instance: &Instance, slots: u32) -> bool {
        slots <= self.view.host(instance).slots_total() && self.view.host_is_idle(instance)
    }

    /// They are attached to one node.
    pub(super) fn share_a_node(&self, one: u32, other: u32) -> bool {
        self.at(one).report.node == self.at(other).report.node
    }

    /// A node has room for both sides of a pair, where they share one.
    pub(super) fn fit_together(
        &self,
        prefill: &PrefillCandidate,
        decode: &DecodeCandidate,
    ) -> bool {
        if prefill.at == decode.at || !self.share_a_node(prefill.at, decode.at) {
            return true;
        }
        let (prefills, decodes) = (self.at(prefill.at), self.at(decode.at));
        let slots = self
            .prefill_slots(prefills, prefill.memory_blocks)
            .saturating_add(self.decode_slots(decodes, decode.cached_blocks));
        self.has_room(prefills, slots) || self.could_hold_idle(prefills, slots)
    }

    /// Slots that the request takes on an instance that prefills it, and perhaps decodes it too.
    pub(super) fn prefill_slots(&self, instance: &Instance, memory_blocks: u32) -> u32 {
        match instance.role {
            Role::Both => self.decode_slots(instance, memory_blocks),
            Role::Prefill | Role::Decode => self.prompt_blocks - memory_blocks,
        }
    }

    pub(super) fn decode_slots(&self, instance: &Instance, memory_blocks: u32) -> u32 {
        // An answer that is alone has all the room there is, and may well be shorter than others.
        let growth_blocks = match self.view.host_is_idle(instance) {
            true => 1,
            false => self.growth(instance).left_blocks(),
        };
        (self.prompt_blocks - memory_blocks).saturating_add(growth_blocks)
    }
}
