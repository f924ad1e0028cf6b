//! What a prefix costs that another node has and that could stay there: see [`crate::routing`].

use arrayvec::ArrayVec;

use super::Planner;
use crate::attend::Way;
use crate::decision::{DecodeCandidate, PrefillCandidate, Verdict};
use crate::routing::{Asked, Attended, HOLDERS_MAX, Question};
use crate::view::{Instance, Role};

impl Planner<'_> {
    /// The prefill of what follows a prefix that is attended elsewhere.
    pub(super) fn routed_compute_us(&self, prefill: &PrefillCandidate, asked: &Attended) -> u64 {
        let (first, end) = (asked.first_block, asked.end_block());
        let rest_us = self.rest_beside_us(self.at(prefill.at), first, end);
        rest_us.saturating_add(asked.prefill_us)
    }

    /// Of that what is computed here: the tokens from `end_block` on attend these and the blocks before `first_block`.
    fn rest_beside_us(&self, instance: &Instance, first_block: u32, end_block: u32) -> u64 {
        let tokens = |blocks: u32| u64::from(blocks) * u64::from(self.spec.block_tokens);
        let rest = u64::from(self.prompt_tokens).saturating_sub(tokens(end_block));
        instance.prefill_model.predict_us(rest, tokens(first_block))
    }

    /// Nothing is fetched first.
    pub(super) fn routed_ttft_us(
        &self,
        prefill: &PrefillCandidate,
        decode: &DecodeCandidate,
        asked: &Attended,
    ) -> u64 {
        let compute_us = self.routed_compute_us(prefill, asked);
        compute_us.saturating_add(prefill.queue_us).saturating_add(decode.wait_us)
    }

    /// Of those that have as much in memory as the best, one of each node, those first that attend for the fewest
    /// others: a copy that was fetched since a holder had its limit takes what comes next.
    fn least_asked(&self, best: usize, requester: &Instance) -> ArrayVec<Asked, HOLDERS_MAX> {
        let blocks = self.memory_blocks(self.at(best as u32));
        let as_good = self.members().filter(|(_, instance)| {
            self.memory_blocks(instance) == blocks
                && !instance.report.draining
                && !self.excluded(instance)
        });
        // Its own requests there go in one message.
        let order = |asked: &Asked| {
            let tie = self.tie(self.at(asked.source));
            (asked.flows, std::cmp::Reverse(asked.companions), tie)
        };
        let mut holders = ArrayVec::<Asked, HOLDERS_MAX>::new();
        for (at, _) in as_good {
            let asked = self.asked(at, requester);
            // One of each node; where there is no room for all, the last one makes it.
            let weakest = match holders.iter().position(|there| there.host == asked.host) {
                None if holders.try_push(asked).is_ok() => continue,
                None => (0..holders.len()).max_by_key(|&at| order(&holders[at])).unwrap_or(0),
                Some(there) => there,
            };
            if order(&asked) < order(&holders[weakest]) {
                holders[weakest] = asked;
            }
        }
        if holders.is_empty() {
            holders.push(self.asked(best, requester));
        }
        holders.sort_unstable_by_key(order);
        holders
    }

    fn asked(&self, source: usize, requester: &Instance) -> Asked {
        let holder = self.view.host(self.at(source as u32));
        Asked {
            source: source as u32,
            host: holder.reference,
            flows: holder.flows_beside(requester.reference),
            beside: holder.requests_beside(requester.reference),
            companions: holder.routes_of(requester.reference),
        }
    }

    /// What the ways to a prefix that lies elsewhere cost, where it could stay there.
    pub(super) fn attended(
        &self,
        prefill: &PrefillCandidate,
        decode: &DecodeCandidate,
    ) -> Option<Attended> {
        let routing = self.view.policy().routing.as_ref()?;
        let instance = self.at(prefill.at);
        let rows = instance.report.model.routed?;
        let blocks = self.routable_blocks(instance);
        let (_, best) = self.best_in_memory.or(self.best)?;
        if prefill.at != decode.at || blocks == 0 {
            return None;
        }
        let first_block = prefill.memory_blocks;
        let end_block = first_block + blocks;
        let holders = self.least_asked(best, instance);
        let prefix_tokens = end_block * self.spec.block_tokens;
        let beside_us = self.rest_beside_us(instance, first_block, end_block);
        let question = Question {
            rows,
            block_bytes: self.spec.block_bytes,
            block_tokens: self.spec.block_tokens,
            first_block,
            blocks,
            is_moved: false,
            is_opened: false,
            prefill_tokens: self.prompt_tokens - prefix_tokens,
            generated_tokens: match self.request.is_endless {
                true => self.request.max_tokens,
                false => self.request.max_tokens.min(instance.decode_model.generated_tokens()),
            },
            always: routing.always || self.request.steering.prefix.is_some(),
            step_us: decode.tbt_us,
            step_max_us: self.objectives.tbt_us,
            // Beside what it takes in any case.
            free_slots: self
                .view
                .slots_left(instance)
                .saturating_sub(self.prefill_slots(instance, first_block).saturating_sub(blocks)),
            fetch_us: self.transfer_us(best, instance, blocks),
            recompute_us: self.compute_us(instance, first_block).saturating_sub(beside_us),
            attend_us: self.compute_us(instance, end_block).saturating_sub(beside_us),
        };
        Some(question.answer_over(&holders, routing, self.view.routes.as_ref()?))
    }

    /// Blocks of the prompt that could stay elsewhere, were this instance to serve it: behind those that its node
    /// has in memory. What its SSD has would be read, or left there.
    pub(super) fn routable_blocks(&self, instance: &Instance) -> u32 {
        let request = self.request;
        let may = self.view.policy().routing.is_some()
            && instance.report.model.routed.is_some()
            && instance.role == Role::Both
            && request.may_route
            && request.chunks.is_empty()
            && request.steering.prefix.is_none_or(|way| way == Way::Route);
        let own = self.memory_blocks(instance);
        let best = self.best_in_memory.or(self.best);
        match best.filter(|_| may && self.cached_blocks(instance) == own) {
            Some((_, best)) => self.memory_blocks(self.at(best as u32)).saturating_sub(own),
            None => 0,
        }
    }

    /// The candidate that has no room for all of the prompt, as it is when a part of that stays elsewhere: if there is
    /// room for the rest, and that is the cheapest of what is open.
    pub(super) fn without_room(
        &self,
        prefill: &PrefillCandidate,
        decode: &DecodeCandidate,
    ) -> Option<PrefillCandidate> {
        let instance = self.at(prefill.at);
        let routable_blocks = self.routable_blocks(instance);
        let slots = self.prefill_slots(instance, prefill.memory_blocks);
        // Looked at first: most of those that are full are full for this too.
        if routable_blocks == 0 || !self.has_room(instance, slots.saturating_sub(routable_blocks)) {
            return None;
        }
        let asked = self.attended(prefill, decode).filter(|_| !instance.avoided())?;
        if asked.decision.chosen != Some(Way::Route) {
            return None;
        }
        let compute_us = self.routed_compute_us(prefill, &asked);
        let ttft_us = prefill.queue_us.saturating_add(compute_us);
        let times = (prefill.rank_us, ttft_us, compute_us);
        let (latest_ttft_us, cost_us) = self.latest_and_cost_us(instance, times);
        Some(PrefillCandidate {
            used_blocks: asked.end_block(),
            fetch_from: None,
            transfer_us: 0,
            compute_us,
            ttft_us,
            latest_ttft_us,
            cost_us,
            verdict: Verdict::RoutedOnly,
            ..*prefill
        })
    }
}
