//! One request in the engine and the states it goes through.
//!
//! | leg | states |
//! | --- | --- |
//! | prefill | Binding, Prefilling; ends when it is handed over |
//! | decode | Binding, Arriving, Decoding |
//! | whole | Binding, Prefilling, Decoding |
//!
//! A whole leg with chunks that nobody attends elsewhere is Filling before it is Prefilling, and one that has
//! lost what was attended elsewhere is Filling, and then again in the state that it was in.
//!
//! From every state it may also end: cancelled, stopped by the node, or failed.

use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::{Namespace, Share, SlotIndex, v1};

use super::answer::Answer;
use super::answer_blocks::AnswerBlocks;
use super::away::{Away, Next};
use super::growth::{Growth, Room};
use super::plan::{Part, PromptPages, Work};
use crate::admission::Admitted;
use crate::events::EventSink;
use crate::model::SequenceStep;

/// What the engine does for a request; what the wire leaves unspecified was refused before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leg {
    Prefill,
    Decode,
    Whole,
}

/// A sequence is in exactly one of these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// `Bind` was sent. Becomes Arriving or Prefilling when `Bound` comes.
    Binding,
    /// Decode leg: the slots are known, rows and tail are on their way. Becomes Decoding when
    /// `Ready` comes.
    Arriving,
    /// Rows before `computed` are in the cache. Becomes Decoding, or ends handed over.
    Prefilling { computed: u32 },
    /// Rows of all tokens but the last are in the cache. On a decode leg the first token is not
    /// among the tokens until there is a seat.
    Decoding,
    /// Its gaps get the rows that are not computed in their place (see [`super::away`]).
    Filling { resume: Resume },
}

/// What a sequence goes on with when its gaps are filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Resume {
    Prefilling { computed: u32 },
    Decoding,
}

/// When things happened, in microseconds of the engine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Times {
    pub received_us: u64,
    /// The first step that it took part in; on a decode leg, when it had a seat.
    pub started_us: Option<u64>,
    pub prefilled_us: Option<u64>,
    /// Between its first step and the end of its prompt, steps that it took no part in.
    pub passed_us: u64,
}

/// A part of a prompt that is computed in slots of its own: from where on, and how many positions further back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alone {
    pub first: u32,
    pub moved: u32,
}

/// A request in the engine.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub share: Share,
    pub leg: Leg,
    pub state: State,
    /// The prompt, then the answer.
    pub tokens: Vec<u32>,
    pub prompt_tokens: u32,
    /// Of its rows one after another, without those of gaps.
    pub slots: Vec<SlotIndex>,
    pub away: Away,
    pub answer: Answer,
    /// Absent on a prefill leg.
    pub namespace: Option<Namespace>,
    /// Absent on a prefill leg, which fills no block beyond the prompt, and where not all of the prompt is
    /// computed in its place: nobody could find a block without those before it, and what is behind a chunk
    /// is another block than that of a prompt that was computed whole.
    pub answer_blocks: Option<AnswerBlocks>,
    /// Decode leg: what was handed over, from `Ready` until there is a seat. The caller hears of
    /// the first token when the others follow, and not a long wait before the second.
    pub first_token: Option<v1::TokenOut>,
    pub growth: Growth,
    pub events: EventSink,
    pub admitted: Admitted,
    pub times: Times,
    /// By how much it counts as having come later, while nothing of it is computed.
    pub priority_delay_us: u64,
    pub computed_prompt_tokens: u32,
    /// Prompt tokens whose rows were somewhere, and whether the caller was told.
    pub cached_tokens: u32,
    pub accepted: bool,
    pub page_tokens: u32,
}

impl Sequence {
    /// What it would do in a step, if it could take part in one now.
    pub(crate) fn work(&self) -> Option<Work> {
        match self.state {
            State::Binding | State::Arriving => None,
            State::Prefilling { computed } => {
                let prompt_tokens = self.prompt_tokens;
                let until = self.away.until(computed, prompt_tokens);
                let queries = self.away.holes_before(computed).max(1);
                Some(Work::Prefill { computed, until, prompt_tokens, queries })
            }
            State::Filling { .. } => match self.away.next(self.page_tokens) {
                Next::Compute { positions, computed, .. } => {
                    Some(Work::Alone { computed, until: positions.end - positions.start })
                }
                _ => None,
            },
            State::Decoding if self.first_token.is_some() || self.room().is_short() => None,
            State::Decoding => Some(Work::Decode { position: self.tokens.len() as u32 - 1 }),
        }
    }

    /// Prompts are computed in this order: when it came, and later by what is left of its delay.
    pub(crate) fn rank_us(&self) -> u64 {
        let State::Prefilling { computed } = self.state else { return self.times.received_us };
        let left = u128::from(self.prompt_tokens - computed);
        let all = (left + u128::from(self.computed_prompt_tokens)).max(1);
        let delay_us = (u128::from(self.priority_delay_us) * left / all) as u64;
        self.times.received_us.saturating_add(delay_us)
    }

    /// A step took so long and did nothing for it.
    pub(crate) fn was_passed(&mut self, step_us: u64) {
        if self.times.started_us.is_some() && matches!(self.state, State::Prefilling { .. }) {
            self.times.passed_us += step_us;
        }
    }

    /// Its part of the model's batch.
    pub(crate) fn batch_part(&self, part: &Part) -> SequenceStep<'_> {
        let (start, end) = (part.positions.start, part.positions.end);
        if let Some(Alone { first, moved }) = self.alone() {
            return SequenceStep {
                tokens: &self.tokens[(first + start) as usize..(first + end) as usize],
                start: first - moved + start,
                holes: &[],
                pages: self.away.pages_alone(),
                logits: false,
            };
        }
        SequenceStep {
            tokens: &self.tokens[start as usize..end as usize],
            start,
            holes: self.away.holes(),
            pages: &self.slots,
            logits: part.samples,
        }
    }

    /// What it computes in slots of its own, if it does that.
    pub(crate) fn alone(&self) -> Option<Alone> {
        match (self.state, self.away.next(self.page_tokens)) {
            (State::Filling { .. }, Next::Compute { positions, moved, .. }) => {
                Some(Alone { first: positions.start, moved })
            }
            _ => None,
        }
    }

    /// How far its rows reach. The last token of an answer needs no row.
    pub(crate) fn room(&self) -> Room {
        // What is elsewhere needs room from when it is given up.
        let away = self.away.tokens_elsewhere();
        Room {
            rows_next: self.tokens.len() as u32 - away,
            rows_max: self.prompt_tokens + self.answer.max_tokens() - 1 - away,
            pages: self.slots.len() as u32 + self.away.pages(),
            page_tokens: self.page_tokens,
        }
    }

    /// Others find the blocks that it fills: all of it is computed in its place.
    pub(crate) fn shares_blocks(&self) -> bool {
        (self.leg == Leg::Prefill || self.answer_blocks.is_some()) && self.away.is_nothing()
    }

    pub(crate) fn prompt_pages(&self) -> PromptPages {
        PromptPages {
            prompt_tokens: self.prompt_tokens,
            page_tokens: self.page_tokens,
            prompt_only: self.leg == Leg::Prefill,
        }
    }

    /// Its lease is this engine's to renew: the conductor does so until the hand-over.
    pub(crate) fn renews_lease(&self) -> bool {
        matches!(self.state, State::Decoding | State::Filling { resume: Resume::Decoding })
    }

    /// Nothing of it is attended elsewhere any more: it will be here.
    pub(crate) fn recall(&mut self) {
        let resume = match self.state {
            State::Prefilling { computed } => Resume::Prefilling { computed },
            State::Decoding => Resume::Decoding,
            State::Binding | State::Arriving | State::Filling { .. } => return,
        };
        self.away.give_up(&self.slots, self.page_tokens);
        self.state = State::Filling { resume };
    }

    /// Tells the caller what of the prompt was there.
    pub(crate) fn accept(&mut self) {
        if !self.accepted {
            self.accepted = true;
            let cached_tokens = self.cached_tokens;
            self.events.send(Event::Accepted(v1::Accepted { cached_tokens }));
        }
    }

    /// Goes on when its gaps are filled.
    pub(crate) fn resume(&mut self) {
        let State::Filling { resume } = self.state else { return };
        self.state = match resume {
            Resume::Prefilling { computed } => State::Prefilling { computed },
            Resume::Decoding => State::Decoding,
        };
    }

    pub(crate) fn add_slots(&mut self, granted: Vec<SlotIndex>) {
        self.away.take(granted, &mut self.slots, self.page_tokens);
    }

    /// What the caller hears last.
    pub(crate) fn finished(&self, reason: v1::finished::Reason) -> v1::Finished {
        let since = |at: Option<u64>| at.map_or(0, |at| at.saturating_sub(self.times.received_us));
        v1::Finished {
            reason: reason.into(),
            text: String::new(),
            computed_prompt_tokens: self.computed_prompt_tokens,
            generated_tokens: self.answer.tokens(),
            stop_matched: String::new(),
            queue_us: since(self.times.started_us) + self.times.passed_us,
            prefill_us: since(self.times.prefilled_us),
            routed_layers: self.away.exchanged().layers,
            routed_us: self.away.exchanged().us,
            routed_prompt_layers: self.away.prompt_exchanged().layers,
            routed_prompt_us: self.away.prompt_exchanged().us,
            routed_prompt_queries: self.away.prompt_exchanged().queries,
            route_opening_us: self.away.opening().0,
            route_connection_opened: self.away.opening().1,
        }
    }
}
