//! One step, from plan to tokens.

use std::sync::Arc;

use kvasir_proto::v1;
use kvasir_proto::v1::engine_to_node::Message;
use kvasir_proto::v1::finished::Reason;
use kvasir_proto::v1::generate_event::Event;

use super::plan::{Candidate, Part, finished_pages, plan_step};
use super::sequence::{Leg, Sequence, State};
use super::{ALIVE_EVERY_US, End, Scheduler, alive_message};
use crate::layer_log::ShareInStep;
use crate::model::SequenceStep;
use crate::ports::{CachePort, Compute, PortLost};
use crate::routes::RoutedHoles;
use crate::tail::EngineTail;

impl<P: CachePort, C: Compute> Scheduler<P, C> {
    /// Computes one step if there is anything to compute; says whether there was.
    ///
    /// # Errors
    /// [`PortLost`]; also when the model refuses the step, since the node was told of it and must
    /// not take a later step's progress for this one's.
    pub(crate) fn step(&mut self) -> Result<bool, PortLost> {
        self.begin_answers()?;
        self.ask_for_room()?;
        self.fill_gaps()?;
        let parts = plan_step(&self.candidates(), self.options.prefill_chunk_tokens);
        if parts.is_empty() {
            return Ok(false);
        }
        self.step = self.step.wrapping_add(1);
        let shares = self.announce(&parts)?;
        let begun_us = self.shared.clock.now_us();
        let tokens = self.compute(&parts, &shares)?;
        let taken_us = self.shared.clock.now_us().saturating_sub(begun_us);
        self.shared.metrics.steps.inc();
        self.shared.metrics.step_seconds.observe(taken_us as f64 / 1e6);
        for id in self.seated().collect::<Vec<_>>() {
            if !parts.iter().any(|part| part.sequence == id)
                && let Some(sequence) = self.sequences.get_mut(&id)
            {
                sequence.was_passed(taken_us);
            }
        }
        let failed = self.compute.failed().to_vec();
        let exchanged = self.compute.exchanged();
        let asks = |part: &&Part| self.sequences[&part.sequence].away.routed().is_some();
        let asking = parts.iter().filter(asks).count();
        let mut tokens = tokens.into_iter();
        for (index, part) in parts.iter().enumerate() {
            let token = part.samples.then(|| tokens.next().expect("one for each that samples"));
            if failed.contains(&index) {
                self.recall(part.sequence);
                continue;
            }
            let sequence = self.sequences.get_mut(&part.sequence).expect("parts are of sequences");
            match sequence.state {
                State::Decoding => sequence.away.exchange(exchanged),
                State::Prefilling { computed } if asking == 1 => {
                    sequence.away.exchange_prompt(computed, exchanged);
                }
                _ => {}
            }
            self.advance(part, token, begun_us)?;
        }
        Ok(true)
    }

    /// A holder did not give what the step needed: what it would have meant is forgotten, and the sequence
    /// gets the holders' blocks here.
    fn recall(&mut self, id: u64) {
        let sequence = self.sequences.get_mut(&id).expect("parts are of sequences that are there");
        tracing::warn!(share = %sequence.share, "the engine lost routed blocks; recomputing them");
        sequence.recall();
        self.shared.metrics.recalls.inc();
    }

    /// Adds the first tokens of those that have a seat by now. One may end its answer, by a stop
    /// string, and its seat goes to the next.
    fn begin_answers(&mut self) -> Result<(), PortLost> {
        loop {
            let waits = |id: &u64| self.sequences[id].first_token.is_some();
            let next = self.seated().find(waits);
            let Some(id) = next else { return Ok(()) };
            self.begin_answer(id)?;
        }
    }

    /// Adds the token that was handed over, if it was not yet.
    pub(super) fn begin_answer(&mut self, id: u64) -> Result<(), PortLost> {
        let now_us = self.shared.clock.now_us();
        let sequence = self.sequences.get_mut(&id).expect("looked up by the caller");
        let Some(first) = sequence.first_token.take() else { return Ok(()) };
        sequence.times.started_us = Some(now_us);
        self.add_token(id, first)
    }

    fn ask_for_room(&mut self) -> Result<(), PortLost> {
        let now_us = self.shared.clock.now_us();
        for id in self.seated().collect::<Vec<_>>() {
            let sequence = self.sequences.get_mut(&id).expect("runnable sequences are there");
            if sequence.leg == Leg::Prefill {
                continue;
            }
            let page_count = sequence.growth.poll(sequence.room(), now_us);
            if page_count > 0 {
                let (tx, side) = (sequence.share.tx.into(), sequence.share.side.to_wire());
                self.port.send(Message::Grow(v1::Grow { tx: Some(tx), side, page_count }))?;
            }
        }
        Ok(())
    }

    fn candidates(&self) -> Vec<Candidate> {
        let candidate = |sequence: u64| {
            let work = self.sequences[&sequence].work()?;
            Some(Candidate { sequence, work })
        };
        let mut candidates: Vec<Candidate> = self.seated().filter_map(candidate).collect();
        candidates.sort_by_key(|candidate| self.sequences[&candidate.sequence].rank_us());
        candidates
    }

    /// Tells the node which pages the step finishes, if it finishes any.
    fn announce(&mut self, parts: &[Part]) -> Result<Arc<[ShareInStep]>, PortLost> {
        let in_step = |part: &Part| share_in_step(&self.sequences[&part.sequence], part);
        let shares: Arc<[ShareInStep]> = parts.iter().map(in_step).collect();
        let pages: Vec<v1::StepPages> = shares
            .iter()
            .filter(|share| share.page_count > 0)
            .map(|share| v1::StepPages {
                tx: Some(share.share.tx.into()),
                side: share.share.side.to_wire(),
                first_page: share.first_page,
                page_count: share.page_count,
                pool_pages: Vec::new(),
            })
            .collect();
        if !pages.is_empty() {
            self.port.send(Message::Plan(v1::StepPlan { step: self.step, pages }))?;
        }
        Ok(shares)
    }

    /// Runs the model and chooses a token for each part that samples.
    fn compute(
        &mut self,
        parts: &[Part],
        shares: &Arc<[ShareInStep]>,
    ) -> Result<Vec<v1::TokenOut>, PortLost> {
        let running = self.seated().count() as u32;
        let Scheduler { sequences, port, compute, shared, step, alive_at_us, sampler, .. } = self;
        let batch: Vec<SequenceStep<'_>> =
            parts.iter().map(|part| sequences[&part.sequence].batch_part(part)).collect();
        let away = |part: &Part| sequences[&part.sequence].away.routed();
        let routed: Vec<Option<&RoutedHoles>> = parts.iter().map(away).collect();
        let mut lost = None;
        let mut on_layer = |layers_done: usize| {
            // The time comes first: as soon as the word is stored the layer may leave.
            let now_us = shared.clock.now_us();
            port.progress(*step, layers_done as u16);
            if let Some(log) = &shared.layer_log {
                log.record(*step, layers_done - 1, now_us, shares);
            }
            // A long step must neither hide what came in meanwhile nor let leases run out.
            port.publish_load(&shared.load(running));
            if now_us >= *alive_at_us {
                *alive_at_us = now_us + ALIVE_EVERY_US;
                let alive = alive_message(sequences);
                if !alive.shares.is_empty() {
                    lost = port.send(Message::KeepAlive(alive)).err();
                }
            }
        };
        let logits = compute.forward(&batch, &routed, &mut on_layer).map_err(|why| {
            tracing::error!(step, reason = %why, "the model of the engine rejected a step");
            PortLost(format!("the model rejected a step: {why}"))
        })?;
        if let Some(lost) = lost {
            return Err(lost);
        }
        let sampling = parts.iter().filter(|part| part.samples);
        let choose = |(part, logits): (&Part, &[f32])| {
            sequences[&part.sequence].answer.choose(sampler, logits)
        };
        Ok(sampling.zip(logits).map(choose).collect())
    }

    /// The step's rows of this part are in the cache.
    fn advance(
        &mut self,
        part: &Part,
        token: Option<v1::TokenOut>,
        begun_us: u64,
    ) -> Result<(), PortLost> {
        let id = part.sequence;
        let sequence = self.sequences.get_mut(&id).expect("parts are of sequences that are there");
        sequence.times.started_us.get_or_insert(begun_us);
        if let State::Filling { .. } = sequence.state {
            let computed = part.positions.end - part.positions.start;
            sequence.computed_prompt_tokens += computed;
            if !sequence.accepted {
                sequence.admitted.settle(computed);
            }
            self.shared.metrics.computed_prompt_tokens.inc_by(computed.into());
            sequence.away.computed(part.positions.end);
            return Ok(());
        }
        if let State::Prefilling { .. } = sequence.state {
            let computed = part.positions.end - part.positions.start;
            sequence.state = State::Prefilling { computed: sequence.away.skip(part.positions.end) };
            sequence.computed_prompt_tokens += computed;
            sequence.admitted.settle(computed);
            self.shared.metrics.computed_prompt_tokens.inc_by(computed.into());
            let Some(token) = token else { return Ok(()) };
            sequence.times.prefilled_us = Some(self.shared.clock.now_us());
            if sequence.leg == Leg::Prefill {
                return self.hand_over(id, token);
            }
            sequence.state = State::Decoding;
            return self.add_token(id, token);
        }
        self.commit_blocks(id, part.positions.end)?;
        self.add_token(id, token.expect("decoding samples in every step"))
    }

    fn hand_over(&mut self, id: u64, first_token: v1::TokenOut) -> Result<(), PortLost> {
        let sequence = &self.sequences[&id];
        let tail = EngineTail::to_bytes(first_token);
        let finish = v1::FinishPrefill { tx: Some(sequence.share.tx.into()), tail };
        let finished = sequence.finished(Reason::HandedOver);
        self.port.send(Message::FinishPrefill(finish))?;
        self.end(id, End::Finished(finished))
    }

    /// Gives the node the keys of blocks that the answer has filled.
    fn commit_blocks(&mut self, id: u64, rows: u32) -> Result<(), PortLost> {
        let sequence = self.sequences.get_mut(&id).expect("looked up by the caller");
        let Sequence { answer_blocks, tokens, share, .. } = sequence;
        let filled = answer_blocks.as_mut().and_then(|blocks| blocks.filled(tokens, rows));
        let Some(filled) = filled else { return Ok(()) };
        let commit = v1::CommitBlocks {
            tx: Some(share.tx.into()),
            side: share.side.to_wire(),
            first_page: filled.first_page,
            keys: kvasir_proto::BlockKey::concat(&filled.keys),
        };
        self.port.send(Message::Commit(commit))
    }

    /// Adds a token to an answer, tells the caller, and ends the sequence if it was the last.
    fn add_token(&mut self, id: u64, token: v1::TokenOut) -> Result<(), PortLost> {
        let sequence = self.sequences.get_mut(&id).expect("looked up by the caller");
        sequence.tokens.push(token.id);
        let (tokens, ending) = sequence.answer.add(token);
        sequence.events.send(Event::Tokens(tokens));
        self.shared.metrics.generated_tokens.inc();
        let Some(ending) = ending else { return Ok(()) };
        let finished = sequence.finished(ending.reason);
        let (text, stop_matched) = (ending.text, ending.stop_matched);
        self.end(id, End::Finished(v1::Finished { text, stop_matched, ..finished }))
    }
}

fn share_in_step(sequence: &Sequence, part: &Part) -> ShareInStep {
    // Pages that decoding fills are committed by `CommitBlocks`; those behind blocks that are elsewhere are
    // for nobody else.
    let prefills = matches!(sequence.state, State::Prefilling { .. }) && sequence.shares_blocks();
    let pages =
        if prefills { finished_pages(&part.positions, sequence.prompt_pages()) } else { 0..0 };
    ShareInStep {
        share: sequence.share,
        first_position: part.positions.start,
        positions: part.positions.end - part.positions.start,
        first_page: pages.start,
        page_count: pages.end - pages.start,
    }
}
