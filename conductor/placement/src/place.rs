//! The decision: *Mooncake* Algorithm 1, KVCache-centric scheduling, as a pure function. It books
//! nothing and changes nothing; the same view, match and request give the same placement.
//!
//! As in the paper, each prefill instance is priced with its own prefix, or, when the best prefix
//! is longer by more than `kvcache_balancing_threshold`, with the best one and the transfer of the
//! difference; the least time to first token wins, the decode instance follows load, and a request
//! that no pair can serve within its objectives is refused. Three things differ, for a reason:
//!
//! - Queue and transfer overlap, so the price is `max(queue, transfer) + compute`; the algorithm
//!   as printed adds them.
//! - Above the threshold the cheaper of fetching and computing is taken, unless the policy says
//!   `always_fetch`, since both are measured here.
//! - An instance that does both serves a request whole. It competes with the pairs.

use crate::decision::{
    Chosen, DecodeCandidate, Fetch, Missing, OverloadReason, PlaceRequest, Placement,
    PrefillCandidate, Refusal, Shape, Verdict,
};
use crate::index::PrefixMatch;
use crate::view::{ClusterView, Instance, ModelSpec, Role};

/// Chooses where a request goes.
///
/// # Errors
/// [`Refusal`] when nobody can serve it, now or at all.
pub fn place(
    view: &ClusterView,
    matched: &PrefixMatch,
    request: &PlaceRequest<'_>,
) -> Result<Placement, Refusal> {
    let spec = view
        .model_spec(request.model)
        .ok_or_else(|| Refusal::UnknownModel { model: format!("number {}", request.model.0) })?;
    Planner::new(view, spec, matched, request).plan()
}

struct Planner<'a> {
    view: &'a ClusterView,
    spec: &'a ModelSpec,
    matched: &'a PrefixMatch,
    request: &'a PlaceRequest<'a>,
    prompt_tokens: u32,
    prompt_blocks: u32,
    /// At least one token is always computed.
    reusable_blocks: u32,
    /// The longest prefix anywhere and the instance to fetch it from.
    best: Option<(u32, usize)>,
}

/// A prefill side with a decode side and what they promise together.
#[derive(Clone, Copy)]
struct Pair {
    prefill: usize,
    decode: usize,
    ttft_us: u64,
    tbt_us: u64,
    held_blocks: u32,
}

impl<'a> Planner<'a> {
    fn new(
        view: &'a ClusterView,
        spec: &'a ModelSpec,
        matched: &'a PrefixMatch,
        request: &'a PlaceRequest<'a>,
    ) -> Self {
        let prompt_tokens = request.prompt_tokens.max(1);
        let mut planner = Planner {
            view,
            spec,
            matched,
            request,
            prompt_tokens,
            prompt_blocks: prompt_tokens.div_ceil(spec.block_tokens.max(1)),
            reusable_blocks: (prompt_tokens - 1) / spec.block_tokens.max(1),
            best: None,
        };
        planner.best = planner.best_holder();
        planner
    }

    fn plan(&self) -> Result<Placement, Refusal> {
        self.check_size()?;
        let mut prefills = self.price_prefills();
        let best_split = least(&prefills, |candidate| {
            self.at(candidate.at).report.role == Role::Prefill && eligible(candidate.verdict)
        })
        .map(|at| &prefills[at]);
        // The decode side is looked at as it will be when this request's prefill ends.
        let split_ready_us = self.request.now_us + best_split.map_or(0, |best| best.ttft_us);
        let mut decodes = self.price_decodes(split_ready_us, &prefills);
        let split_decode = best_split.and_then(|_| self.choose_decode(&decodes));
        let pairs = self.pairs(&mut prefills, &mut decodes, split_decode);
        let Some(winner) = self.winner(&pairs, &prefills) else {
            return Err(self.refusal(&pairs, &prefills, &decodes));
        };
        Ok(self.placement(winner, prefills, decodes))
    }

    fn at(&self, at: u32) -> &'a Instance {
        &self.view.instances()[at as usize]
    }

    fn members(&self) -> impl Iterator<Item = (usize, &'a Instance)> {
        let model = self.request.model;
        self.view.instances().iter().enumerate().filter(move |(_, i)| i.model() == model)
    }

    fn held_blocks(&self, instance: &Instance) -> u32 {
        self.matched.held_blocks(instance.report.node).min(self.reusable_blocks)
    }

    /// Whom to fetch from: the longest prefix, of equals the one that sends least now.
    fn best_holder(&self) -> Option<(u32, usize)> {
        self.members()
            .map(|(at, instance)| (self.held_blocks(instance), at, instance))
            .filter(|(held_blocks, _, instance)| {
                *held_blocks > 0 && !instance.report.draining && !self.excluded(instance)
            })
            .max_by_key(|(held_blocks, _, instance)| {
                (*held_blocks, std::cmp::Reverse((instance.bytes_out, self.tie(instance))))
            })
            .map(|(held_blocks, at, _)| (held_blocks, at))
    }

    fn excluded(&self, instance: &Instance) -> bool {
        self.request.exclude.contains(&instance.report.instance_id)
    }

    /// A number that orders equals, differently for each request.
    fn tie(&self, instance: &Instance) -> u64 {
        let mut x = self.request.tie_seed ^ (instance.reference.0 + 1).wrapping_mul(GOLDEN);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn check_size(&self) -> Result<(), Refusal> {
        let largest = |does: fn(Role) -> bool, missing| {
            self.members()
                .filter(|(_, instance)| does(instance.report.role))
                .map(|(_, instance)| instance.report.slots_total)
                .max()
                .ok_or_else(|| self.no_instance(missing))
        };
        let slots_max = largest(Role::prefills, Missing::Prefill)?
            .min(largest(Role::decodes, Missing::Decode)?);
        if self.prompt_blocks > slots_max {
            return Err(Refusal::TooLarge { prompt_blocks: self.prompt_blocks, slots_max });
        }
        Ok(())
    }

    fn no_instance(&self, missing: Missing) -> Refusal {
        Refusal::NoInstance { model: self.spec.name.to_string(), missing }
    }

    /// What keeps an instance out before any price is looked at.
    fn gate(&self, instance: &Instance, slots: u32) -> Verdict {
        if self.excluded(instance) {
            Verdict::Excluded
        } else if instance.report.draining {
            Verdict::Draining
        } else if slots > instance.slots_left() {
            Verdict::NoRoom
        } else if instance.avoided() {
            Verdict::Avoided
        } else {
            Verdict::Worse
        }
    }

    fn price_prefills(&self) -> Vec<PrefillCandidate> {
        let mut prefills = Vec::with_capacity(self.view.instances().len());
        let members = self.members().filter(|(_, instance)| instance.report.role.prefills());
        prefills.extend(members.map(|(at, instance)| self.price_prefill(at, instance)));
        prefills
    }

    fn price_prefill(&self, at: usize, instance: &Instance) -> PrefillCandidate {
        let held_blocks = self.held_blocks(instance);
        let queue_us = instance.queue_us(self.request.now_us);
        let compute_us = self.compute_us(instance, held_blocks);
        // An answer begins with one more block on an instance that also decodes.
        let slots = self.prompt_blocks - held_blocks + u32::from(instance.report.role.decodes());
        let own = PrefillCandidate {
            at: at as u32,
            held_blocks,
            used_blocks: held_blocks,
            fetch_from: None,
            queue_us,
            transfer_us: 0,
            compute_us,
            ttft_us: queue_us + compute_us,
            verdict: self.gate(instance, slots),
        };
        let Some((best_blocks, source)) = self.fetch_worth_pricing(at, held_blocks) else {
            return own;
        };
        let transfer_us = self.transfer_us(source, instance, best_blocks - held_blocks);
        let compute_us = self.compute_us(instance, best_blocks);
        let fetched = PrefillCandidate {
            used_blocks: best_blocks,
            fetch_from: Some(source as u32),
            transfer_us,
            compute_us,
            ttft_us: queue_us.max(transfer_us) + compute_us,
            ..own
        };
        let fetch = self.view.policy().always_fetch || fetched.ttft_us < own.ttft_us;
        if fetch { fetched } else { own }
    }

    /// Algorithm 1's test: the best prefix is longer by more than the threshold.
    fn fetch_worth_pricing(&self, at: usize, held_blocks: u32) -> Option<(u32, usize)> {
        let (best_blocks, source) = self.best?;
        let threshold = self.view.policy().kvcache_balancing_threshold;
        let above = f64::from(best_blocks) > threshold * f64::from(held_blocks);
        (above && best_blocks > held_blocks && source != at).then_some((best_blocks, source))
    }

    fn compute_us(&self, instance: &Instance, reused_blocks: u32) -> u64 {
        let reused = u64::from(reused_blocks) * u64::from(self.spec.block_tokens);
        instance.prefill_model.predict_us(u64::from(self.prompt_tokens) - reused, reused)
    }

    fn fetch_bytes(&self, blocks: u32) -> u64 {
        u64::from(blocks).saturating_mul(self.spec.block_bytes)
    }

    fn transfer_us(&self, source: usize, target: &Instance, blocks: u32) -> u64 {
        let in_flight = target.bytes_in.max(self.view.instances()[source].bytes_out);
        target.link.predict_us(self.fetch_bytes(blocks), in_flight)
    }

    fn price_decodes(
        &self,
        split_ready_us: u64,
        prefills: &[PrefillCandidate],
    ) -> Vec<DecodeCandidate> {
        let mut decodes = Vec::with_capacity(self.view.instances().len());
        let members = self.members().filter(|(_, instance)| instance.report.role.decodes());
        decodes.extend(members.map(|(at, instance)| {
            // One that does both decodes what it prefilled itself.
            let ready_us = match instance.report.role {
                Role::Both => self.request.now_us + own_ttft_us(prefills, at as u32),
                Role::Prefill | Role::Decode => split_ready_us,
            };
            self.price_decode(at, instance, ready_us)
        }));
        decodes
    }

    fn price_decode(&self, at: usize, instance: &Instance, ready_us: u64) -> DecodeCandidate {
        let held_blocks = self.matched.held_blocks(instance.report.node).min(self.prompt_blocks);
        let running_max = f64::from(instance.report.max_running.max(1));
        let running = instance.answers_at(ready_us, self.request.now_us) + 1.0;
        let over = (running - running_max).max(0.0);
        let wait_us = over * instance.decode_model.answer_us() as f64 / running_max;
        let at_once = running.min(running_max).ceil() as u32;
        DecodeCandidate {
            at: at as u32,
            held_blocks,
            load: running / running_max,
            wait_us: wait_us as u64,
            tbt_us: instance.decode_model.predict_step_us(at_once),
            verdict: self.gate(instance, self.prompt_blocks - held_blocks + 1),
        }
    }

    /// The decode side of a pair: within the objective, then least load; of those nearly as idle,
    /// one with room for the whole answer, then the longest prefix, then most room.
    fn choose_decode(&self, decodes: &[DecodeCandidate]) -> Option<usize> {
        let usable = |avoided: bool| {
            decodes.iter().enumerate().filter(move |(_, candidate)| {
                eligible(candidate.verdict) && (avoided || candidate.verdict != Verdict::Avoided)
            })
        };
        let avoided = usable(false).next().is_none();
        let misses =
            |candidate: &DecodeCandidate| candidate.tbt_us > self.request.objectives.tbt_us;
        let all_miss = usable(avoided).all(|(_, candidate)| misses(candidate));
        let in_time = || usable(avoided).filter(|(_, candidate)| all_miss || !misses(candidate));
        let least = in_time().map(|(_, candidate)| candidate.load).min_by(f64::total_cmp)?;
        let near = least + self.view.policy().decode_load_margin;
        in_time()
            .filter(|(_, candidate)| candidate.load <= near)
            .max_by_key(|(_, candidate)| {
                let instance = self.at(candidate.at);
                let slots = instance.slots_left();
                (slots >= self.answer_blocks(), candidate.held_blocks, slots, self.tie(instance))
            })
            .map(|(at, _)| at)
    }

    /// Blocks of the prompt and the longest answer. Slots for the answer are taken as it grows,
    /// so that an instance without that many is only liked less.
    fn answer_blocks(&self) -> u32 {
        self.prompt_tokens
            .saturating_add(self.request.max_tokens)
            .div_ceil(self.spec.block_tokens.max(1))
    }

    /// Every way to serve the request, and a verdict on each prefill candidate that has none.
    fn pairs(
        &self,
        prefills: &mut [PrefillCandidate],
        decodes: &mut [DecodeCandidate],
        split_decode: Option<usize>,
    ) -> Vec<Pair> {
        let objectives = self.request.objectives;
        let mut pairs = Vec::with_capacity(prefills.len());
        for (prefill, candidate) in prefills.iter_mut().enumerate() {
            if !eligible(candidate.verdict) {
                continue;
            }
            let decode = match self.at(candidate.at).report.role {
                Role::Both => decodes.binary_search_by_key(&candidate.at, |decode| decode.at).ok(),
                Role::Prefill | Role::Decode => split_decode,
            };
            let Some(decode) = decode else {
                candidate.verdict = Verdict::NoDecode;
                continue;
            };
            let pair = Pair {
                prefill,
                decode,
                ttft_us: candidate.ttft_us + decodes[decode].wait_us,
                tbt_us: decodes[decode].tbt_us,
                held_blocks: candidate.held_blocks,
            };
            if pair.ttft_us > objectives.ttft_us {
                candidate.verdict = Verdict::MissesTtft;
            } else if pair.tbt_us > objectives.tbt_us {
                candidate.verdict = Verdict::MissesTbt;
            }
            pairs.push(pair);
        }
        for decode in decodes.iter_mut() {
            if eligible(decode.verdict) && decode.tbt_us > objectives.tbt_us {
                decode.verdict = Verdict::MissesTbt;
            }
        }
        pairs
    }

    /// The least time to first token among those that meet the objectives; instances that failed
    /// a moment ago only when there are no others.
    fn winner(&self, pairs: &[Pair], prefills: &[PrefillCandidate]) -> Option<Pair> {
        let with = |verdict: Verdict| {
            pairs
                .iter()
                .filter(move |pair| prefills[pair.prefill].verdict == verdict)
                .min_by_key(|pair| self.order(pair, prefills))
        };
        with(Verdict::Worse).or_else(|| with(Verdict::Avoided)).copied()
    }

    fn order(&self, pair: &Pair, prefills: &[PrefillCandidate]) -> impl Ord + use<> {
        let tie = self.tie(self.at(prefills[pair.prefill].at));
        (pair.ttft_us, std::cmp::Reverse(pair.held_blocks), tie)
    }

    fn placement(
        &self,
        winner: Pair,
        mut prefills: Vec<PrefillCandidate>,
        mut decodes: Vec<DecodeCandidate>,
    ) -> Placement {
        prefills[winner.prefill].verdict = Verdict::Chosen;
        decodes[winner.decode].verdict = Verdict::Chosen;
        let prefill = &prefills[winner.prefill];
        let decode = &decodes[winner.decode];
        let reused_tokens = prefill.used_blocks * self.spec.block_tokens;
        let chosen_prefill = self.chosen(prefill.at, prefill.held_blocks);
        let shape = if prefill.at == decode.at {
            Shape::Whole(chosen_prefill)
        } else {
            let decode = self.chosen(decode.at, decode.held_blocks);
            Shape::Split { prefill: chosen_prefill, decode }
        };
        let fetch = prefill.fetch_from.map(|source| Fetch {
            source: self.chosen(source, prefill.used_blocks),
            from_block: prefill.held_blocks,
            until_block: prefill.used_blocks,
            bytes: self.fetch_bytes(prefill.used_blocks - prefill.held_blocks),
        });
        Placement {
            shape,
            fetch,
            compute_tokens: self.prompt_tokens - reused_tokens,
            reused_tokens,
            queue_us: prefill.queue_us,
            transfer_us: prefill.transfer_us,
            compute_us: prefill.compute_us,
            decode_wait_us: decode.wait_us,
            predicted_ttft_us: winner.ttft_us,
            predicted_tbt_us: winner.tbt_us,
            names: self.view.names().clone(),
            prompt_tokens: self.prompt_tokens,
            prompt_blocks: self.prompt_blocks,
            prefill_candidates: prefills,
            decode_candidates: decodes,
        }
    }

    fn chosen(&self, at: u32, held_blocks: u32) -> Chosen {
        let instance = self.at(at);
        Chosen {
            instance: instance.reference,
            instance_id: instance.report.instance_id.clone(),
            node: instance.report.node,
            node_id: instance.report.node_id.clone(),
            held_blocks,
        }
    }

    fn refusal(
        &self,
        pairs: &[Pair],
        prefills: &[PrefillCandidate],
        decodes: &[DecodeCandidate],
    ) -> Refusal {
        if let Some(best) = pairs.iter().min_by_key(|pair| self.order(pair, prefills)) {
            let over_us = best.ttft_us.saturating_sub(self.request.objectives.ttft_us);
            let (reason, drain_us) = match over_us {
                0 => (OverloadReason::Tbt, self.one_answer_us()),
                _ => (OverloadReason::Ttft, over_us),
            };
            return self.overloaded(reason, best.ttft_us, drain_us);
        }
        let no_room = |verdict: Verdict| verdict == Verdict::NoRoom;
        let prefill_full = prefills.iter().any(|candidate| no_room(candidate.verdict));
        let decode_full = decodes.iter().any(|candidate| no_room(candidate.verdict));
        if prefill_full || decode_full {
            let least_us = prefills.iter().map(|candidate| candidate.ttft_us).min().unwrap_or(0);
            return self.overloaded(OverloadReason::NoRoom, least_us, self.one_answer_us());
        }
        let prefill = prefills.iter().any(|candidate| candidate.verdict == Verdict::NoDecode);
        self.no_instance(if prefill { Missing::Decode } else { Missing::Prefill })
    }

    fn overloaded(&self, reason: OverloadReason, ttft_us: u64, drain_us: u64) -> Refusal {
        let policy = self.view.policy();
        let least = policy.retry_after_ms_min.min(policy.retry_after_ms_max);
        let retry_after_ms = drain_us.div_ceil(1_000).clamp(least, policy.retry_after_ms_max);
        Refusal::Overloaded { predicted_ttft_us: ttft_us, retry_after_ms, reason }
    }

    /// How long until the next answer ends somewhere, in the mean: one goes and makes room.
    fn one_answer_us(&self) -> u64 {
        let now_us = self.request.now_us;
        self.members()
            .filter(|(_, instance)| instance.report.role.decodes())
            .map(|(_, instance)| {
                let answers = instance.answers_at(now_us, now_us).max(1.0);
                (instance.decode_model.answer_us() as f64 / answers) as u64
            })
            .min()
            .unwrap_or(0)
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Whether a candidate may be taken: nothing speaks against it, or only a failure of late.
fn eligible(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Worse | Verdict::Avoided)
}

/// Candidates are in the order of the view.
fn own_ttft_us(prefills: &[PrefillCandidate], at: u32) -> u64 {
    prefills.binary_search_by_key(&at, |own| own.at).map_or(0, |own| prefills[own].ttft_us)
}

fn least(
    prefills: &[PrefillCandidate],
    wanted: impl Fn(&PrefillCandidate) -> bool,
) -> Option<usize> {
    let order =
        |candidate: &PrefillCandidate| (candidate.verdict == Verdict::Avoided, candidate.ttft_us);
    prefills
        .iter()
        .enumerate()
        .filter(|(_, candidate)| wanted(candidate))
        .min_by_key(|(_, candidate)| order(candidate))
        .map(|(at, _)| at)
}
