//! What becomes of a request's chunks, once it is known which instance serves it: see [`crate::chunks`].

use super::Planner;
use crate::attend::Way;
use crate::chunks::{AskedChunk, ChunkUse, PlacedChunk, ROUTED_MAX, cheapest};
use crate::decision::{DecodeCandidate, PrefillCandidate};
use crate::routing::{Asked, Attended, Question};
use crate::view::{Instance, Role};

impl Planner<'_> {
    /// It has chunks: who serves it does both.
    pub(super) fn lacks_a_role(&self, instance: &Instance) -> bool {
        !self.request.chunks.is_empty() && instance.role != Role::Both
    }

    /// Tokens of chunks that this instance's node has in memory.
    pub(super) fn chunk_tokens_here(&self, instance: &Instance) -> u64 {
        let here = self.request.chunks.iter().filter(|chunk| is_with(chunk, instance));
        here.map(|chunk| self.tokens(chunk.blocks)).sum()
    }

    fn tokens(&self, blocks: u32) -> u64 {
        u64::from(blocks) * u64::from(self.spec.block_tokens)
    }

    pub(super) fn placed_chunks(
        &self,
        prefill: &PrefillCandidate,
        decode: &DecodeCandidate,
    ) -> Vec<PlacedChunk> {
        let mut placed: Vec<PlacedChunk> = Vec::with_capacity(self.request.chunks.len());
        for chunk in self.request.chunks {
            placed.push(self.placed_chunk(chunk, prefill, decode, &placed));
        }
        placed
    }

    fn placed_chunk(
        &self,
        chunk: &AskedChunk,
        prefill: &PrefillCandidate,
        decode: &DecodeCandidate,
        before: &[PlacedChunk],
    ) -> PlacedChunk {
        let AskedChunk { first_position, blocks, .. } = *chunk;
        let placed = |becomes, decision, once_us, step_us| PlacedChunk {
            first_position,
            blocks,
            becomes,
            decision,
            once_us,
            step_us,
            layer: None,
            fetched_bytes: 0,
        };
        let instance = self.at(prefill.at);
        if is_with(chunk, instance) {
            return placed(ChunkUse::Here, None, 0, 0);
        }
        // Rows in memory only: whoever has them on an SSD would have to read them first.
        let Some((_, source)) = self
            .best_holder(|other| chunk.matched.memory_blocks(other.report.node))
            .filter(|(held, _)| *held >= blocks)
        else {
            return placed(ChunkUse::Computed, None, 0, 0);
        };
        let chosen = || self.chosen(source as u32, blocks, blocks);
        // What is here of it is not sent.
        let fetched_blocks = blocks - chunk.matched.memory_blocks(instance.report.node);
        let fetch_us = self.transfer_us(source, instance, fetched_blocks);
        let recompute_us = instance.prefill_model.predict_us(self.tokens(blocks), 0);
        let asked = self.asked_of_chunk(
            (chunk, before),
            source,
            (prefill, decode),
            (fetch_us, recompute_us),
        );
        let part = |asked: Attended| Some((asked.decision, asked.parts.first()?.layer));
        let (decision, layer) = asked.and_then(part).unzip();
        let routed = before.iter().filter(|chunk| chunk.is_routed()).count();
        let may_route = routed < ROUTED_MAX && self.request.may_route && decision.is_some();
        let is_open = |way: Way| match way {
            Way::Route => may_route,
            Way::Fetch | Way::Recompute => true,
            Way::Gather => false,
        };
        let open = |way: Way| match &decision {
            Some(decision) => is_open(way) && decision.price(way).closed.is_none(),
            None => is_open(way),
        };
        let always = self.view.policy().routing.is_some_and(|routing| routing.always);
        let asked_for = self.request.steering.prefix.or(always.then_some(Way::Route));
        let way = asked_for.filter(|way| open(*way)).or_else(|| match &decision {
            Some(decision) => cheapest(decision, is_open),
            None if fetch_us < recompute_us => Some(Way::Fetch),
            None => None,
        });
        let price = |way: Way| decision.as_ref().map(|decision| *decision.price(way));
        match way {
            Some(Way::Route) => {
                let (once_us, step_us) =
                    price(Way::Route).map_or((0.0, 0.0), |price| (price.once_us, price.step_us));
                let becomes = ChunkUse::Routed(chosen());
                PlacedChunk { layer, ..placed(becomes, decision, once_us as u64, step_us as u64) }
            }
            Some(Way::Fetch) => {
                let once_us = price(Way::Fetch).map_or(fetch_us, |price| price.once_us as u64);
                let fetched_bytes = self.block_bytes(fetched_blocks);
                let becomes = ChunkUse::Fetched(chosen());
                PlacedChunk { fetched_bytes, ..placed(becomes, decision, once_us, 0) }
            }
            _ => placed(ChunkUse::Computed, decision, 0, 0),
        }
    }

    /// What the ways cost, where there are prices of routing. The chunks before it are under way with it: it has
    /// what they leave of a step and of the room here.
    fn asked_of_chunk(
        &self,
        (chunk, before): (&AskedChunk, &[PlacedChunk]),
        source: usize,
        (prefill, decode): (&PrefillCandidate, &DecodeCandidate),
        (fetch_us, recompute_us): (u64, u64),
    ) -> Option<Attended> {
        let routing = self.view.policy().routing.as_ref()?;
        let (instance, source_side) = (self.at(prefill.at), self.at(source as u32));
        let (rows, routes) = (instance.report.model.routed?, self.view.routes.as_ref()?);
        let holder = self.view.host(source_side);
        let tokens = self.tokens(chunk.blocks);
        let splice_us = routing.constants.fabric.splice.us(tokens) as u64;
        let behind = u64::from(chunk.first_position).saturating_add(tokens);
        let is_there = |chunk: &&PlacedChunk| {
            let at = chunk.source().map(|source| source.node);
            chunk.is_routed() && at == Some(source_side.report.node)
        };
        let beside = before.iter().filter(is_there).count() as u32;
        let question = Question {
            first_block: 0,
            rows,
            block_bytes: self.spec.block_bytes,
            block_tokens: self.spec.block_tokens,
            blocks: chunk.blocks,
            is_moved: true,
            is_opened: before.iter().any(PlacedChunk::is_routed),
            prefill_tokens: u64::from(self.prompt_tokens).saturating_sub(behind) as u32,
            generated_tokens: match self.request.is_endless {
                true => self.request.max_tokens,
                false => self.request.max_tokens.min(instance.decode_model.generated_tokens()),
            },
            always: false,
            step_us: before
                .iter()
                .fold(decode.tbt_us, |step_us, chunk| step_us.saturating_add(chunk.step_us)),
            step_max_us: self.objectives.tbt_us,
            free_slots: before.iter().fold(self.view.slots_left(instance), |left, chunk| {
                left.saturating_sub(chunk.slots())
            }),
            fetch_us: fetch_us.saturating_add(splice_us),
            recompute_us,
            attend_us: 0,
        };
        let asked = Asked {
            source: source as u32,
            host: holder.reference,
            flows: holder.flows_beside(instance.reference),
            beside: holder.requests_beside(instance.reference),
            companions: holder.routes_of(instance.reference) + beside,
        };
        Some(question.answer(&[asked], routing, routes))
    }
}

fn is_with(chunk: &AskedChunk, instance: &Instance) -> bool {
    chunk.matched.memory_blocks(instance.report.node) >= chunk.blocks
}
