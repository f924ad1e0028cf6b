//! One answer: its tokens, its text and its end.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvasir_proto::v1;
use kvasir_proto::v1::finished::Reason;

use crate::sampling::logprobs::{Logprob, logprobs};
use crate::sampling::{AnswerCounts, Choice, Sampler, Sampling};
use crate::text::{Piece, TextOptions, TextStream, Vocabulary};

/// What the caller asked for; checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AnswerOptions {
    pub sampling: Sampling,
    /// At least 1.
    pub max_tokens: u32,
    /// Tokens that end the answer, those of the model among them unless they are ignored.
    pub stop_tokens: BTreeSet<u32>,
    /// Log probabilities are wanted, with so many of the likeliest.
    pub logprobs: Option<usize>,
    pub text: TextOptions,
}

/// The answer so far.
#[derive(Debug)]
pub(crate) struct Answer {
    options: AnswerOptions,
    vocabulary: Arc<Vocabulary>,
    text: TextStream,
    counts: AnswerCounts,
    tokens: u32,
}

/// How the answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ending {
    pub reason: Reason,
    /// Text that was still held back.
    pub text: String,
    /// Empty when no stop string ended it.
    pub stop_matched: String,
}

impl Answer {
    pub(crate) fn new(options: AnswerOptions, vocabulary: Arc<Vocabulary>) -> Self {
        let text = TextStream::new(Arc::clone(&vocabulary), options.text.clone());
        Answer { options, vocabulary, text, counts: AnswerCounts::default(), tokens: 0 }
    }

    pub(crate) fn tokens(&self) -> u32 {
        self.tokens
    }

    pub(crate) fn max_tokens(&self) -> u32 {
        self.options.max_tokens
    }

    /// Chooses the next token. It is not part of the answer until it is added: on a prefill leg the
    /// decode side adds it.
    pub(crate) fn choose(&self, sampler: &mut Sampler, logits: &[f32]) -> v1::TokenOut {
        let Answer { options, counts, tokens: index, .. } = self;
        let choice = Choice { sampling: &options.sampling, counts, index: *index };
        let id = sampler.choose(logits, choice);
        let Some(top) = options.logprobs else {
            return v1::TokenOut { id, logprob: None, top: Vec::new() };
        };
        let (chosen, top) = logprobs(logits, id, top);
        v1::TokenOut {
            id,
            logprob: Some(self.logprob(chosen)),
            top: top.into_iter().map(|logprob| self.logprob(logprob)).collect(),
        }
    }

    /// Whether it would end with this token, whatever its text.
    pub(crate) fn ends_with(&self, token: &v1::TokenOut) -> bool {
        self.tokens + 1 >= self.options.max_tokens || self.options.stop_tokens.contains(&token.id)
    }

    /// Adds a token: what the caller hears of it, and whether it is the last.
    pub(crate) fn add(&mut self, token: v1::TokenOut) -> (v1::Tokens, Option<Ending>) {
        let id = token.id;
        self.tokens += 1;
        self.counts.add(id);
        let stops = self.options.stop_tokens.contains(&id);
        let silent = stops && !self.options.text.stop.include_in_output;
        let piece = if silent { Piece::default() } else { self.text.push(id) };
        let ending = match piece.stopped_by {
            Some(stop_matched) => {
                Some(Ending { reason: Reason::Stop, text: String::new(), stop_matched })
            }
            None if stops => Some(self.finish(Reason::Stop)),
            None if self.tokens >= self.options.max_tokens => Some(self.finish(Reason::Length)),
            None => None,
        };
        (v1::Tokens { tokens: vec![token], text: piece.text }, ending)
    }

    fn finish(&mut self, reason: Reason) -> Ending {
        let Piece { text, stopped_by } = self.text.finish();
        let reason = if stopped_by.is_some() { Reason::Stop } else { reason };
        Ending { reason, text, stop_matched: stopped_by.unwrap_or_default() }
    }

    fn logprob(&self, Logprob { id, logprob }: Logprob) -> v1::TokenLogprob {
        v1::TokenLogprob { id, logprob, bytes: self.vocabulary.bytes(id).to_vec() }
    }
}
