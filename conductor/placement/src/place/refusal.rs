//! Why a request is refused, and when it is worth trying again. A cluster that is overloaded refuses most of
//! what comes, so that refusing must stay cheap: what was considered is handed on as it is, and nothing
//! else is looked at for it.

use super::{Pair, Planner, eligible, prompt_blocks_max};
use crate::decision::{
    Considered, DecodeCandidate, Missing, OverloadReason, PlaceRequest, PrefillCandidate, Refusal,
    Refused, Verdict,
};
use crate::view::{ClusterView, Instance};

/// No instance has ever served the model.
pub(super) fn unknown(view: &ClusterView, request: &PlaceRequest<'_>) -> Refused {
    let considered = Considered {
        prompt_tokens: request.prompt_tokens,
        prompt_blocks: 0,
        prefill_candidates: Vec::new(),
        decode_candidates: Vec::new(),
        selection: view.policy().selection,
        names: view.names().clone(),
    };
    let model = format!("number {}", request.model.0);
    Refused { refusal: Refusal::UnknownModel { model }, considered }
}

impl Planner<'_> {
    /// Nobody could serve it were all idle.
    pub(super) fn refuse_at_all(&self, refusal: Refusal) -> Refused {
        let mut prefills = self.price_prefills();
        let mut decodes = self.price_decodes(self.request.now_us, &prefills);
        let verdict = |at, alone| {
            let fits = self.prompt_blocks <= prompt_blocks_max(self.at(at));
            if fits { alone } else { Verdict::NoCapacity }
        };
        for prefill in prefills.iter_mut().filter(|prefill| eligible(prefill.verdict)) {
            prefill.verdict = verdict(prefill.at, Verdict::NoDecode);
        }
        for decode in decodes.iter_mut().filter(|decode| eligible(decode.verdict)) {
            decode.verdict = verdict(decode.at, Verdict::NoPrefill);
        }
        Refused { refusal, considered: self.considered(prefills, decodes) }
    }

    /// No pair serves it in time. All that were eligible as prefill sides have a verdict by now.
    pub(super) fn refuse(
        &self,
        pairs: &[Pair],
        prefills: Vec<PrefillCandidate>,
        mut decodes: Vec<DecodeCandidate>,
    ) -> Refused {
        let refusal = self.refusal(pairs, &prefills, &decodes);
        for decode in decodes.iter_mut().filter(|decode| eligible(decode.verdict)) {
            decode.verdict = Verdict::NoPrefill;
        }
        Refused { refusal, considered: self.considered(prefills, decodes) }
    }

    fn refusal(
        &self,
        pairs: &[Pair],
        prefills: &[PrefillCandidate],
        decodes: &[DecodeCandidate],
    ) -> Refusal {
        if let Some(best) = pairs.iter().min_by_key(|pair| self.pair_order(pair, prefills)) {
            let over_us = best.latest_ttft_us.saturating_sub(self.objectives.ttft_us);
            let decode = &decodes[best.decode];
            let (reason, drain_us) = match over_us {
                0 => (OverloadReason::Tbt, self.in_step_in_us(decode.at)),
                // When all that is queued has ended it is a probe, if no earlier.
                _ => {
                    let queued_us = prefills[best.prefill].queue_us.saturating_add(decode.wait_us);
                    (OverloadReason::Ttft, over_us.min(queued_us))
                }
            };
            return self.overloaded(reason, best.latest_ttft_us, drain_us);
        }
        if let Some(drain_us) = self.room_in_us(prefills, decodes) {
            let least_us = prefills.iter().map(|candidate| candidate.ttft_us).min().unwrap_or(0);
            return self.overloaded(OverloadReason::NoRoom, least_us, drain_us);
        }
        let prefill = prefills.iter().any(|candidate| candidate.verdict == Verdict::NoDecode);
        self.no_instance(if prefill { Missing::Decode } else { Missing::Prefill })
    }

    fn overloaded(&self, reason: OverloadReason, ttft_us: u64, drain_us: u64) -> Refusal {
        let retry_after_ms = self.view.policy().retry_after_ms(drain_us);
        Refusal::Overloaded { predicted_ttft_us: ttft_us, retry_after_ms, reason }
    }

    fn in_step_in_us(&self, decode: u32) -> u64 {
        let admission = self.view.policy().admission;
        let (tbt_us, now_us) = (self.objectives.tbt_us, self.request.now_us);
        self.at(decode).in_step_in_us(admission, self.prompt_tokens, tbt_us, now_us)
    }

    /// How long until both sides have room, when that is what one of them lacks. Of each side only
    /// the instance that has most is looked at, since refusing must stay cheap.
    fn room_in_us(
        &self,
        prefills: &[PrefillCandidate],
        decodes: &[DecodeCandidate],
    ) -> Option<u64> {
        let prefills = prefills.iter().map(|candidate| {
            let slots = self.prefill_slots(self.at(candidate.at), candidate.memory_blocks);
            (candidate.at, candidate.verdict, slots)
        });
        let decodes = decodes.iter().map(|candidate| {
            let slots = self.decode_slots(self.at(candidate.at), candidate.cached_blocks);
            (candidate.at, candidate.verdict, slots)
        });
        match (self.side_in_us(prefills), self.side_in_us(decodes)) {
            (None, None) => None,
            (prefill_us, decode_us) => Some(prefill_us.max(decode_us).unwrap_or(0)),
        }
    }

    /// How long until one side has room; `None` when there is somebody who has, or nobody at all.
    fn side_in_us(&self, side: impl Iterator<Item = (u32, Verdict, u32)>) -> Option<u64> {
        let mut most: Option<(&Instance, u32)> = None;
        for (at, verdict, slots) in side {
            match verdict {
                Verdict::Excluded
                | Verdict::NotRequested
                | Verdict::NotFull
                | Verdict::Draining => {}
                Verdict::NoCapacity => {
                    let instance = self.at(at);
                    let left = |(instance, slots): (&Instance, u32)| {
                        i64::from(self.view.slots_left(instance)) - i64::from(slots)
                    };
                    if most.is_none_or(|best| left(best) < left((instance, slots))) {
                        most = Some((instance, slots));
                    }
                }
                _ => return None,
            }
        }
        let (instance, slots) = most?;
        Some(self.view.slots_left_in_us(instance, slots, self.request.now_us))
    }
}
