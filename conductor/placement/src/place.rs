//! The decision: KVCache-centric scheduling (*Mooncake* §4) as a pure function. It books nothing and
//! changes nothing; the same view, match and request give the same placement.
//!
//! Each prefill instance is priced with its own prefix and, where the policy fetches, with the best
//! prefix and the transfer of the difference; the least cost wins, the decode instance follows
//! load, and a request that no pair can serve within its objectives is refused. By what instances
//! are compared is the policy's ([`crate::selection`]); *Mooncake* Algorithm 1 is one of them. In
//! all of them:
//!
//! - An instance that does both serves a request whole. It competes with the pairs.
//! - Instances of one node share its slots and its ways. A pair on one node needs slots for both sides, until the pages
//!   have been copied within it; nothing is sent then.
//! - A request that nobody can serve in time by estimates alone is a probe of them (see [`place`]).

mod chunks;
mod refusal;
mod room;
mod routed;

use crate::attend::Way;
use crate::decision::{
    Admission, Chosen, Considered, DecodeCandidate, Fetch, Missing, Objectives, PlaceRequest,
    Placement, Policy, PrefillCandidate, Refusal, Refused, Shape, Verdict,
};
use crate::growth::Growth;
use crate::index::PrefixMatch;
use crate::routing::{Attended, AttendedPart, Route, RoutePart};
use crate::selection::Selection;
use crate::view::{ClusterView, Instance, ModelSpec, Role};

/// Chooses where a request goes.
///
/// A refusal must rest on work that is there: a queue, answers that run, slots that are taken. It
/// then ends as that work does. What an idle instance takes is only an estimate, learned from what
/// ran before, and would stay as it is while all is refused. So when no pair meets the objectives,
/// a pair that misses one of them by such estimates alone is taken as a *probe*:
///
/// - It may miss the time to first token when its prefill side is idle (nothing is queued or runs
///   there, as far as is known here), its decode side has a place at once, and nothing else is
///   sent by the node it fetches from.
/// - It may miss the time between tokens when its decode side is idle.
/// - What is predicted of queues is never doubted.
///
/// A probe is booked like any request, and while it is booked the instance is not idle: there is
/// one at a time on each instance. It is served however slow it turns out to be, so that a request
/// whose own size misses the objectives even on an idle cluster is served, alone, and not refused
/// for ever.
///
/// # Errors
/// [`Refused`] when nobody can serve it, now or at all.
pub fn place(
    view: &ClusterView,
    matched: &PrefixMatch,
    request: &PlaceRequest<'_>,
) -> Result<Placement, Refused> {
    let Some(spec) = view.model_spec(request.model) else {
        return Err(refusal::unknown(view, request));
    };
    Planner::new(view, spec, matched, request).plan()
}

struct Planner<'a> {
    view: &'a ClusterView,
    spec: &'a ModelSpec,
    matched: &'a PrefixMatch,
    request: &'a PlaceRequest<'a>,
    /// What is looked at of the request's own.
    objectives: Objectives,
    prompt_tokens: u32,
    prompt_blocks: u32,
    /// At least one token is always computed.
    reusable_blocks: u32,
    /// The longest prefix anywhere and the instance to fetch it from.
    best: Option<(u32, usize)>,
    /// The longest one in memory, where that is another: it is shorter, and need not be read first.
    best_in_memory: Option<(u32, usize)>,
}

/// What of a prompt would not be computed, and what that costs before computing begins.
struct Reuse {
    used_blocks: u32,
    fetch_from: Option<u32>,
    transfer_us: u64,
    /// What the instance's own SSD has is read.
    reads_ssd: bool,
}

impl Reuse {
    fn held(used_blocks: u32, transfer_us: u64, reads_ssd: bool) -> Self {
        Reuse { used_blocks, fetch_from: None, transfer_us, reads_ssd }
    }
}

/// A prefill side with a decode side and what they promise together.
#[derive(Clone, Copy)]
struct Pair {
    prefill: usize,
    decode: usize,
    ttft_us: u64,
    /// When others that come later have passed it: what the objective is held against.
    latest_ttft_us: u64,
    tbt_us: u64,
    misses_tbt: bool,
    decode_wait_us: u64,
}

impl Pair {
    fn new(
        prefill: usize,
        prefill_side: &PrefillCandidate,
        decode: usize,
        decode_side: &DecodeCandidate,
    ) -> Self {
        Pair {
            prefill,
            decode,
            ttft_us: prefill_side.ttft_us + decode_side.wait_us,
            latest_ttft_us: prefill_side.latest_ttft_us + decode_side.wait_us,
            tbt_us: decode_side.tbt_us,
            misses_tbt: decode_side.misses_tbt,
            decode_wait_us: decode_side.wait_us,
        }
    }
}

impl<'a> Planner<'a> {
    fn new(
        view: &'a ClusterView,
        spec: &'a ModelSpec,
        matched: &'a PrefixMatch,
        request: &'a PlaceRequest<'a>,
    ) -> Self {
        let prompt_tokens = request.prompt_tokens.max(1);
        let tbt_us = match view.policy().admission {
            Admission::Late => u64::MAX,
            _ => request.objectives.tbt_us,
        };
        let mut planner = Planner {
            view,
            spec,
            matched,
            request,
            objectives: Objectives { tbt_us, ..request.objectives },
            prompt_tokens,
            prompt_blocks: prompt_tokens.div_ceil(spec.block_tokens.max(1)),
            reusable_blocks: (prompt_tokens - 1) / spec.block_tokens.max(1),
            best: None,
            best_in_memory: None,
        };
        if request.steering.prefix == Some(Way::Recompute) {
            return planner;
        }
        planner.best = planner.best_holder(|instance| planner.cached_blocks(instance));
        planner.best_in_memory = match planner.best {
            // Nothing is better than all of it from memory.
            Some((blocks, at)) if planner.memory_blocks(planner.at(at as u32)) == blocks => None,
            _ => planner.best_holder(|instance| planner.memory_blocks(instance)),
        };
        planner
    }

    fn plan(&self) -> Result<Placement, Refused> {
        let fits = self.check_named().and_then(|()| self.check_size());
        let fits = fits.and_then(|()| self.check_whole());
        fits.map_err(|refusal| self.refuse_at_all(refusal))?;
        let mut prefills = self.price_prefills();
        let best_split = prefills
            .iter()
            .filter(|candidate| self.at(candidate.at).role == Role::Prefill)
            .filter(|candidate| eligible(candidate.verdict))
            .min_by_key(|candidate| (last_resort(candidate.verdict), self.order(candidate, 0)));
        // The decode side is looked at as it will be when this request's prefill ends.
        let split_ready_us = self.request.now_us + best_split.map_or(0, |best| best.ttft_us);
        let mut decodes = self.price_decodes(split_ready_us, &prefills);
        let split_decode = best_split.and_then(|_| self.choose_decode(&decodes, |_| true));
        let pairs = self.pairs(&mut prefills, &mut decodes, split_decode);
        if let Some(winner) = self.winner(&pairs, &prefills) {
            return Ok(self.placement(winner, prefills, decodes));
        }
        if let Some(probe) = self.probe(&pairs, &prefills, &decodes) {
            return Ok(Placement { probe: true, ..self.placement(probe, prefills, decodes) });
        }
        Err(self.refuse(&pairs, prefills, decodes))
    }

    fn at(&self, at: u32) -> &'a Instance {
        &self.view.instances()[at as usize]
    }

    fn members(&self) -> impl Iterator<Item = (usize, &'a Instance)> {
        let model = self.request.model;
        self.view.instances().iter().enumerate().filter(move |(_, i)| i.model() == model)
    }

    fn cached_blocks(&self, instance: &Instance) -> u32 {
        self.matched.cached_blocks(instance.report.node).min(self.reusable_blocks)
    }

    /// Whom to fetch from: the longest prefix, of equals the one that has most of it in memory, then the one
    /// that sends least now.
    fn best_holder(&self, blocks: impl Fn(&Instance) -> u32) -> Option<(u32, usize)> {
        self.members()
            .map(|(at, instance)| (blocks(instance), at, instance))
            .filter(|(blocks, _, instance)| {
                *blocks > 0 && !instance.report.draining && !self.excluded(instance)
            })
            .max_by_key(|(blocks, _, instance)| {
                let busy_us = self.view.host(instance).out_waits_us(self.request.now_us);
                let idle = std::cmp::Reverse((busy_us, self.tie(instance)));
                (*blocks, self.memory_blocks(instance), idle)
            })
            .map(|(blocks, at, _)| (blocks, at))
    }

    /// Leading blocks that this node has in memory: others take slots there, also those that are on its SSD.
    fn memory_blocks(&self, instance: &Instance) -> u32 {
        self.matched.memory_blocks(instance.report.node).min(self.reusable_blocks)
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

    /// Whether the instance that it names, if it names one, is there.
    fn check_named(&self) -> Result<(), Refusal> {
        let Some(named) = self.request.steering.instance else { return Ok(()) };
        let is_there =
            |instance: &Instance| instance.role.prefills() && instance.report.instance_id == *named;
        match self.members().any(|(_, instance)| is_there(instance)) {
            true => Ok(()),
            false => Err(self.no_instance(Missing::Named)),
        }
    }

    /// Whether somebody does both, where a request needs that.
    fn check_whole(&self) -> Result<(), Refusal> {
        match self.members().all(|(_, instance)| self.lacks_a_role(instance)) {
            true => Err(self.no_instance(Missing::Whole)),
            false => Ok(()),
        }
    }

    /// Whether any pair could hold it were both empty.
    fn check_size(&self) -> Result<(), Refusal> {
        let largest = |does: fn(Role) -> bool, missing| {
            self.members()
                .map(|(_, instance)| instance)
                .filter(|instance| does(instance.role))
                .map(prompt_blocks_max)
                .max()
                .ok_or_else(|| self.no_instance(missing))
        };
        let blocks_max = largest(Role::prefills, Missing::Prefill)?
            .min(largest(Role::decodes, Missing::Decode)?);
        let fits_routed = |(_, instance): (usize, &Instance)| {
            let rest = self.prompt_blocks - self.routable_blocks(instance);
            rest < self.prompt_blocks && rest <= prompt_blocks_max(instance)
        };
        if self.prompt_blocks > blocks_max && !self.members().any(fits_routed) {
            return Err(Refusal::TooLarge { prompt_blocks: self.prompt_blocks, blocks_max });
        }
        Ok(())
    }

    fn no_instance(&self, missing: Missing) -> Refusal {
        Refusal::NoInstance { model: self.spec.name.to_string(), missing }
    }

    fn growth(&self, instance: &Instance) -> Growth {
        let (max_tokens, mean_tokens) =
            (self.request.max_tokens, instance.decode_model.generated_tokens());
        Growth::new(self.prompt_tokens, self.spec.block_tokens, max_tokens, mean_tokens)
    }

    fn price_prefills(&self) -> Vec<PrefillCandidate> {
        let mut prefills = Vec::with_capacity(self.view.instances().len());
        let members = self.members().filter(|(_, instance)| instance.role.prefills());
        prefills.extend(members.map(|(at, instance)| self.price_prefill(at, instance)));
        prefills
    }

    fn price_prefill(&self, at: usize, instance: &Instance) -> PrefillCandidate {
        let cached_blocks = self.cached_blocks(instance);
        let memory_blocks = self.memory_blocks(instance);
        let selection = self.view.policy().selection;
        let own_ssd_us = self.ssd_us(instance, cached_blocks - memory_blocks);
        let own = self.priced(at, instance, Reuse::held(cached_blocks, own_ssd_us, true));
        if self.request.steering.prefix == Some(Way::Fetch)
            && let Some(best) = self.best.filter(|(blocks, _)| *blocks > cached_blocks)
            && let Some(reuse) = self.fetch_from(best, at, instance)
        {
            return self.priced(at, instance, reuse);
        }
        if selection != Selection::LeastCost {
            let fetched = self.fetch_above_threshold(at, instance, cached_blocks);
            return fetched
                .map(|reuse| self.priced(at, instance, reuse))
                .filter(|fetched| self.view.policy().always_fetch || fetched.ttft_us < own.ttft_us)
                .unwrap_or(own);
        }
        // What lies on the node's own SSD may be dearer to read than to compute, or to fetch.
        let in_memory =
            (memory_blocks < cached_blocks).then(|| Reuse::held(memory_blocks, 0, false));
        if self.view.policy().always_fetch
            && let Some(best) = self.best.filter(|(blocks, _)| *blocks > cached_blocks)
            && let Some(reuse) = self.fetch_from(best, at, instance)
        {
            return self.priced(at, instance, reuse);
        }
        let best = self.best.and_then(|best| self.fetch_from(best, at, instance));
        let best_in_memory =
            self.best_in_memory.and_then(|best| self.fetch_from(best, at, instance));
        let others = [in_memory, best, best_in_memory].into_iter().flatten();
        others
            .map(|reuse| self.priced(at, instance, reuse))
            .fold(own, |best, other| if other.cost_us < best.cost_us { other } else { best })
    }

    fn priced(&self, at: usize, instance: &Instance, reuse: Reuse) -> PrefillCandidate {
        let Policy { selection, shortest_prefill_first_factor, .. } = *self.view.policy();
        let now_us = self.request.now_us;
        let cached_blocks = self.cached_blocks(instance);
        let memory_blocks = self.memory_blocks(instance);
        let compute_us = self.compute_us(instance, reuse.used_blocks);
        let rank_us = match selection {
            Selection::LeastCost if shortest_prefill_first_factor > 0.0 => {
                now_us
                    + reuse.transfer_us
                    + (compute_us as f64 * shortest_prefill_first_factor) as u64
            }
            _ => now_us,
        };
        let queue_us = instance.queue_us(rank_us, now_us);
        let ttft_us = selection.ttft_us(queue_us, reuse.transfer_us, compute_us);
        let times = (rank_us, ttft_us, compute_us);
        let (latest_ttft_us, cost_us) = self.latest_and_cost_us(instance, times);
        PrefillCandidate {
            at: at as u32,
            latest_ttft_us,
            cached_blocks,
            memory_blocks,
            used_blocks: reuse.used_blocks,
            leaves_ssd: !reuse.reads_ssd && memory_blocks < cached_blocks,
            fetch_from: reuse.fetch_from,
            queue_us,
            transfer_us: reuse.transfer_us,
            compute_us,
            ttft_us,
            cost_us,
            rank_us,
            verdict: match self.request.steering.instance {
                Some(named) if *named != instance.report.instance_id => Verdict::NotRequested,
                _ if self.lacks_a_role(instance) => Verdict::NotFull,
                _ => self.gate(instance, self.prefill_slots(instance, memory_blocks)),
            },
        }
    }

    /// Of a prefill of this rank, when its first token comes if others pass it, and what it costs all.
    fn latest_and_cost_us(
        &self,
        instance: &Instance,
        (rank_us, ttft_us, compute_us): (u64, u64, u64),
    ) -> (u64, u64) {
        let Policy { selection, admission, .. } = *self.view.policy();
        let now_us = self.request.now_us;
        // Those that it passes wait for it.
        let passed = match selection {
            Selection::LeastCost => instance.prefills.behind(rank_us, now_us) as u64,
            _ => 0,
        };
        // While there is work that ranks later, what comes may go before it until its rank has come.
        let passed_us = match admission {
            Admission::Calibrated => (rank_us - now_us).min(instance.queue_us(u64::MAX, now_us)),
            _ => 0,
        };
        (ttft_us.max(passed_us + compute_us), ttft_us + passed * compute_us)
    }

    /// Algorithm 1's test: the best prefix is longer by more than the threshold.
    fn fetch_above_threshold(
        &self,
        at: usize,
        instance: &Instance,
        cached_blocks: u32,
    ) -> Option<Reuse> {
        let Policy { selection, kvcache_balancing_threshold: threshold, .. } = *self.view.policy();
        let (best_blocks, _) = self.best.filter(|_| selection.fetches())?;
        let above = f64::from(best_blocks) > threshold * f64::from(cached_blocks);
        let above = above && best_blocks > cached_blocks;
        self.best.filter(|_| above).and_then(|best| self.fetch_from(best, at, instance))
    }

    /// What another node has, on this instance. That node reads from its SSD what it has not in memory, also
    /// of what is held here, and sends while it reads; what is on the SSD here is left there.
    fn fetch_from(
        &self,
        (blocks, source): (u32, usize),
        at: usize,
        instance: &Instance,
    ) -> Option<Reuse> {
        let memory_blocks = self.memory_blocks(instance);
        let is_elsewhere = !self.share_a_node(source as u32, at as u32);
        (blocks > memory_blocks && is_elsewhere).then(|| {
            let holder = self.at(source as u32);
            let from_memory = self.memory_blocks(holder).min(blocks);
            let ssd_us = self.ssd_us(holder, blocks - from_memory);
            let way_us = self.transfer_us(source, instance, blocks - memory_blocks);
            Reuse {
                used_blocks: blocks,
                fetch_from: Some(source as u32),
                transfer_us: way_us.max(ssd_us),
                reads_ssd: false,
            }
        })
    }

    fn compute_us(&self, instance: &Instance, reused_blocks: u32) -> u64 {
        let reused = u64::from(reused_blocks) * u64::from(self.spec.block_tokens);
        self.rest_us(instance, reused + self.chunk_tokens_here(instance))
    }

    fn rest_us(&self, instance: &Instance, reused: u64) -> u64 {
        let rest = u64::from(self.prompt_tokens).saturating_sub(reused);
        instance.prefill_model.predict_us(rest, reused)
    }

    fn block_bytes(&self, blocks: u32) -> u64 {
        u64::from(blocks).saturating_mul(self.spec.block_bytes)
    }

    /// Behind what is under way from the one and to the other.
    fn transfer_us(&self, source: usize, target: &Instance, blocks: u32) -> u64 {
        let now_us = self.request.now_us;
        let (source, target) = (self.view.host(self.at(source as u32)), self.view.host(target));
        let waits_us = target.in_waits_us(now_us).max(source.out_waits_us(now_us));
        waits_us.saturating_add(target.link.predict_us(self.block_bytes(blocks)))
    }

    /// From the SSD of the instance's node.
    fn ssd_us(&self, instance: &Instance, blocks: u32) -> u64 {
        self.view.host(instance).ssd.predict_us(self.block_bytes(blocks))
    }

    fn price_decodes(
        &self,
        split_ready_us: u64,
        prefills: &[PrefillCandidate],
    ) -> Vec<DecodeCandidate> {
        let mut decodes = Vec::with_capacity(self.view.instances().len());
        let members = self.members().filter(|(_, instance)| instance.role.decodes());
        decodes.extend(members.map(|(at, instance)| {
            // One that does both decodes what it prefilled itself.
            let ready_us = match instance.role {
                Role::Both => self.request.now_us + own_ttft_us(prefills, at as u32),
                Role::Prefill | Role::Decode => split_ready_us,
            };
            self.price_decode(at, instance, ready_us)
        }));
        decodes
    }

    fn price_decode(&self, at: usize, instance: &Instance, ready_us: u64) -> DecodeCandidate {
        // The decode side does not wait for its SSD: what it lacks in memory is sent to it.
        let cached_blocks =
            self.matched.memory_blocks(instance.report.node).min(self.prompt_blocks);
        let running_max = f64::from(instance.report.running_requests_max.max(1));
        let running = instance.answers_at(ready_us, self.request.now_us) + 1.0;
        let over = (running - running_max).max(0.0);
        let wait_us = over * instance.decode_model.answer_us() as f64 / running_max;
        let admission = self.view.policy().admission;
        let decode_load =
            instance.decode_load(admission, self.prompt_tokens, ready_us, self.request.now_us);
        DecodeCandidate {
            at: at as u32,
            cached_blocks,
            load: running / running_max,
            wait_us: wait_us as u64,
            tbt_us: instance.predict_tbt_us(decode_load),
            likely: instance.in_time(decode_load, self.objectives.tbt_us),
            misses_tbt: instance.misses_tbt(admission, decode_load, self.objectives.tbt_us),
            decode_load,
            verdict: self.gate(instance, self.decode_slots(instance, cached_blocks)),
        }
    }

    /// The decode side of a pair: within the objective, then least load; of those nearly as idle,
    /// one with room for the whole answer, then the longest prefix, then most room.
    fn choose_decode(
        &self,
        decodes: &[DecodeCandidate],
        may_be: impl Fn(&DecodeCandidate) -> bool,
    ) -> Option<usize> {
        let may_be = &may_be;
        let usable = |rank: u8| {
            let taken = move |candidate: &DecodeCandidate| {
                let is_usable = eligible(candidate.verdict) && may_be(candidate);
                is_usable && last_resort(candidate.verdict) == rank
            };
            decodes.iter().enumerate().filter(move |(_, candidate)| taken(candidate))
        };
        let rank = (0..=LAST_RESORT).find(|rank| usable(*rank).next().is_some())?;
        let misses = |candidate: &DecodeCandidate| candidate.misses_tbt;
        let all_miss = usable(rank).all(|(_, candidate)| misses(candidate));
        let in_time = || usable(rank).filter(|(_, candidate)| all_miss || !misses(candidate));
        let load = |candidate: &DecodeCandidate| match self.view.policy().admission {
            // What decides is what is refused by, and where all are far from it how many run there.
            Admission::Calibrated if candidate.likely.is_some() => {
                let slow = candidate.tbt_us as f64 / self.objectives.tbt_us.max(1) as f64;
                slow.max(candidate.load)
            }
            _ => candidate.load,
        };
        let least = in_time().map(|(_, candidate)| load(candidate)).min_by(f64::total_cmp)?;
        let near = least + self.view.policy().decode_load_margin;
        in_time()
            .filter(|(_, candidate)| load(candidate) <= near)
            .max_by_key(|(_, candidate)| {
                let instance = self.at(candidate.at);
                let slots = self.view.slots_left(instance);
                (slots >= self.answer_blocks(), candidate.cached_blocks, slots, self.tie(instance))
            })
            .map(|(at, _)| at)
    }

    /// Blocks of the prompt and the longest answer. Few answers are that long, so that an instance
    /// without that many is only liked less.
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
        let objectives = self.objectives;
        let mut pairs = Vec::with_capacity(prefills.len());
        for (prefill, candidate) in prefills.iter_mut().enumerate() {
            let is_full = candidate.verdict == Verdict::NoCapacity;
            if !eligible(candidate.verdict) && !is_full {
                continue;
            }
            let decode = match self.at(candidate.at).role {
                Role::Both => decodes.binary_search_by_key(&candidate.at, |decode| decode.at).ok(),
                Role::Prefill | Role::Decode => split_decode.filter(|_| !is_full),
            };
            if is_full {
                let decode = decode.map(|decode| &decodes[decode]);
                match decode.and_then(|decode| self.without_room(candidate, decode)) {
                    Some(routed) => *candidate = routed,
                    None => continue,
                }
            }
            let Some(decode) = decode else {
                candidate.verdict = Verdict::NoDecode;
                continue;
            };
            let fits = |decode: &DecodeCandidate| self.fit_together(candidate, decode);
            let decode = match fits(&decodes[decode]) {
                true => Some(decode),
                false => self.choose_decode(decodes, fits),
            };
            let Some(decode) = decode else {
                candidate.verdict = Verdict::NoCapacity;
                continue;
            };
            let pair = Pair::new(prefill, candidate, decode, &decodes[decode]);
            if pair.latest_ttft_us > objectives.ttft_us {
                candidate.verdict = Verdict::MissesTtft;
            } else if pair.misses_tbt {
                candidate.verdict = Verdict::MissesTbt;
            }
            pairs.push(pair);
        }
        for decode in decodes.iter_mut() {
            if eligible(decode.verdict) && decode.misses_tbt {
                decode.verdict = Verdict::MissesTbt;
            }
        }
        pairs
    }

    /// The least time to first token among those that meet the objectives; instances whose room
    /// is not reported, or that failed a moment ago, only when there are no others.
    fn winner(&self, pairs: &[Pair], prefills: &[PrefillCandidate]) -> Option<Pair> {
        let rank = |pair: &Pair| last_resort(prefills[pair.prefill].verdict);
        let in_time = pairs.iter().filter(|pair| eligible(prefills[pair.prefill].verdict));
        in_time.min_by_key(|pair| (rank(pair), self.pair_order(pair, prefills))).copied()
    }

    /// The best of those that miss an objective by estimates alone. See [`place`].
    fn probe(
        &self,
        pairs: &[Pair],
        prefills: &[PrefillCandidate],
        decodes: &[DecodeCandidate],
    ) -> Option<Pair> {
        // The pairs have the decode side that is best by the estimates: an idle one may not be it.
        let idle = self.idle_decode(decodes);
        let with_idle = pairs.iter().filter_map(|pair| {
            let candidate = &prefills[pair.prefill];
            let splits = self.at(candidate.at).role == Role::Prefill;
            let fits = |decode: &usize| self.fit_together(candidate, &decodes[*decode]);
            let decode = idle.filter(|_| splits).filter(fits)?;
            Some(Pair::new(pair.prefill, candidate, decode, &decodes[decode]))
        });
        let avoided = |pair: &Pair| {
            let sides = [prefills[pair.prefill].at, decodes[pair.decode].at];
            sides.iter().any(|at| self.at(*at).avoided())
        };
        pairs
            .iter()
            .copied()
            .chain(with_idle)
            .filter(|pair| self.misses_by_estimates(pair, prefills, decodes))
            .min_by_key(|pair| (avoided(pair), self.pair_order(pair, prefills)))
    }

    fn misses_by_estimates(
        &self,
        pair: &Pair,
        prefills: &[PrefillCandidate],
        decodes: &[DecodeCandidate],
    ) -> bool {
        let (prefill, decode) = (&prefills[pair.prefill], &decodes[pair.decode]);
        let sends = |at: u32| self.view.host(self.at(at)).bytes_out > 0;
        let unqueued = self.at(prefill.at).is_idle()
            && decode.wait_us == 0
            && !prefill.fetch_from.is_some_and(sends);
        let objectives = self.objectives;
        (pair.latest_ttft_us <= objectives.ttft_us || unqueued)
            && (!pair.misses_tbt || self.at(decode.at).is_idle())
    }

    fn idle_decode(&self, decodes: &[DecodeCandidate]) -> Option<usize> {
        let idle = |candidate: &DecodeCandidate| {
            let usable = eligible(candidate.verdict) || candidate.verdict == Verdict::MissesTbt;
            usable && self.at(candidate.at).is_idle()
        };
        let best = |candidate: &DecodeCandidate| {
            let instance = self.at(candidate.at);
            let tbt_us = std::cmp::Reverse(candidate.tbt_us);
            (!instance.avoided(), tbt_us, candidate.cached_blocks, self.tie(instance))
        };
        let idle = decodes.iter().enumerate().filter(|(_, candidate)| idle(candidate));
        idle.max_by_key(|(_, candidate)| best(candidate)).map(|(at, _)| at)
    }

    fn pair_order(&self, pair: &Pair, prefills: &[PrefillCandidate]) -> (u64, u64, u64) {
        self.order(&prefills[pair.prefill], pair.decode_wait_us)
    }

    /// What is compared; the least is taken. Equals go by number in the baselines, as their
    /// sources have it, and are spread by the request's seed in ours.
    fn order(&self, candidate: &PrefillCandidate, decode_wait_us: u64) -> (u64, u64, u64) {
        let tie = self.tie(self.at(candidate.at));
        let (number, shorter) =
            (candidate.at.into(), u64::from(u32::MAX - candidate.cached_blocks));
        match self.view.policy().selection {
            Selection::Random => (tie, 0, number),
            Selection::LeastLoaded => {
                let idle_since_us = self.at(candidate.at).prefills.idle_since_us();
                (candidate.queue_us, idle_since_us, number)
            }
            Selection::LongestPrefix => (shorter, candidate.queue_us, number),
            Selection::CacheAware | Selection::KvcacheCentric => {
                (candidate.ttft_us + decode_wait_us, 0, number)
            }
            Selection::LeastCost => (candidate.cost_us + decode_wait_us, shorter, tie),
        }
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
        let chosen_prefill = self.chosen(prefill.at, prefill.cached_blocks, prefill.memory_blocks);
        let shape = if prefill.at == decode.at {
            Shape::Whole(chosen_prefill)
        } else {
            let chosen_decode = self.chosen(decode.at, decode.cached_blocks, decode.cached_blocks);
            Shape::Split { prefill: chosen_prefill, decode: chosen_decode }
        };
        let attended = self.attended(prefill, decode);
        // Attending the prefix elsewhere misses no objective that would be met otherwise.
        let ttft_max_us = self.objectives.ttft_us.max(winner.ttft_us);
        let stays = |asked: &&Attended| {
            asked.decision.chosen == Some(Way::Route)
                && self.routed_ttft_us(prefill, decode, asked) <= ttft_max_us
        };
        let routed = attended.as_ref().filter(stays);
        let route = routed.map(|asked| {
            let end_block = asked.end_block();
            let part = |part: &AttendedPart| RoutePart {
                source: self.chosen(part.source, end_block, end_block),
                blocks: part.blocks,
                layer: part.layer,
            };
            let parts = asked.parts.iter().map(part).collect();
            Route { first_block: asked.first_block, parts }
        });
        let (used_blocks, transfer_us, compute_us) = match routed {
            Some(asked) => (asked.end_block(), 0, self.routed_compute_us(prefill, asked)),
            None => (prefill.used_blocks, prefill.transfer_us, prefill.compute_us),
        };
        let chunks = self.placed_chunks(prefill, decode);
        let used = chunks.iter().filter(|chunk| !chunk.is_computed()).map(|chunk| chunk.blocks);
        let used_blocks = used.fold(used_blocks, u32::saturating_add);
        let (predicted_ttft_us, added_step_us) = match routed {
            Some(asked) => (
                self.routed_ttft_us(prefill, decode, asked),
                asked.decision.price(Way::Route).step_us as u64,
            ),
            None => (winner.ttft_us, 0),
        };
        let reused_tokens = used_blocks.saturating_mul(self.spec.block_tokens);
        // What of chunks comes from elsewhere is not computed, and waited for.
        let (compute_us, chunks_us, chunks_step_us) = match chunks.is_empty() {
            true => (compute_us, 0, 0),
            false => (
                self.rest_us(self.at(prefill.at), reused_tokens.into()),
                chunks.iter().map(|chunk| chunk.once_us).sum::<u64>(),
                chunks.iter().map(|chunk| chunk.step_us).sum(),
            ),
        };
        let predicted_ttft_us = match chunks.is_empty() {
            true => predicted_ttft_us,
            false => {
                (predicted_ttft_us + compute_us + chunks_us).saturating_sub(prefill.compute_us)
            }
        };
        let fetch = prefill.fetch_from.filter(|_| routed.is_none()).map(|source| {
            let in_memory = self.memory_blocks(self.at(source)).min(prefill.used_blocks);
            Fetch {
                source: self.chosen(source, prefill.used_blocks, in_memory),
                from_block: prefill.memory_blocks,
                until_block: prefill.used_blocks,
                bytes: self.block_bytes(prefill.used_blocks - prefill.memory_blocks),
            }
        });
        Placement {
            shape,
            fetch,
            route,
            leaves_ssd: prefill.leaves_ssd,
            attended,
            chunks,
            compute_tokens: self.prompt_tokens.saturating_sub(reused_tokens),
            reused_tokens,
            queue_us: prefill.queue_us,
            transfer_us,
            compute_us,
            decode_wait_us: decode.wait_us,
            predicted_ttft_us,
            predicted_tbt_us: winner.tbt_us + added_step_us + chunks_step_us,
            probe: false,
            rank_us: prefill.rank_us,
            priority_delay_us: prefill.rank_us - self.request.now_us,
            // What stays on a node is in nobody's way.
            push_bytes: match self.share_a_node(prefill.at, decode.at) {
                true => 0,
                false => self.block_bytes(self.prompt_blocks.saturating_sub(decode.cached_blocks)),
            },
            growth: self.growth(self.at(decode.at)),
            decode_load: decode.decode_load,
            considered: self.considered(prefills, decodes),
        }
    }

    fn considered(
        &self,
        prefills: Vec<PrefillCandidate>,
        decodes: Vec<DecodeCandidate>,
    ) -> Considered {
        Considered {
            prompt_tokens: self.prompt_tokens,
            prompt_blocks: self.prompt_blocks,
            prefill_candidates: prefills,
            decode_candidates: decodes,
            selection: self.view.policy().selection,
            names: self.view.names().clone(),
        }
    }

    fn chosen(&self, at: u32, cached_blocks: u32, memory_blocks: u32) -> Chosen {
        let instance = self.at(at);
        Chosen {
            instance: instance.reference,
            instance_id: instance.report.instance_id.clone(),
            node: instance.report.node,
            node_id: instance.report.node_id.clone(),
            cached_blocks,
            memory_blocks,
        }
    }
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The longest prompt that it could hold were it idle. Where an answer is decoded, one more block
/// than the prompt's is needed for it.
fn prompt_blocks_max(instance: &Instance) -> u32 {
    instance.report.slots_total.saturating_sub(instance.role.decodes().into())
}

/// Whether a candidate may be taken: nothing speaks against it, or nothing that is certain.
fn eligible(verdict: Verdict) -> bool {
    matches!(
        verdict,
        Verdict::HigherCost | Verdict::RoutedOnly | Verdict::CapacityUnknown | Verdict::Unhealthy
    )
}

/// The order in which eligible candidates are fallen back on.
fn last_resort(verdict: Verdict) -> u8 {
    match verdict {
        Verdict::RoutedOnly => 1,
        Verdict::CapacityUnknown => 2,
        Verdict::Unhealthy => LAST_RESORT,
        _ => 0,
    }
}

const LAST_RESORT: u8 = 3;

/// Candidates are in the order of the view.
fn own_ttft_us(prefills: &[PrefillCandidate], at: u32) -> u64 {
    prefills.binary_search_by_key(&at, |own| own.at).map_or(0, |own| prefills[own].ttft_us)
}
