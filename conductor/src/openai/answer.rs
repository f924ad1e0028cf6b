//! How an answer is written: whole, or as the chunks of a stream, in the shape of either endpoint.
//! Only shapes are here; where the pieces come from is in `stream` and `whole`.

use std::sync::Arc;

use kvasir_proto::v1::TokenOut;
use serde::Serialize;

use super::logprobs::{ChatLogprobs, CompletionLogprobs};
use crate::serve::{Ended, FinishReason};

/// What all chunks and choices of one answer share.
#[derive(Debug)]
pub(crate) struct Answer {
    pub id: String,
    pub created_unix_s: u64,
    pub model: String,
    pub style: Style,
    /// Choices of prompt `p` have the indices from `p * n` on.
    pub n: u32,
    pub prompts: Vec<Arc<[u32]>>,
    pub logprobs: bool,
    pub return_token_ids: bool,
    pub include_usage: bool,
}

#[derive(Debug)]
pub(crate) enum Style {
    Chat,
    /// With `echo`, the text that stands before the answers of each prompt.
    Completion {
        echo: Option<Vec<String>>,
    },
}

/// The state of one choice between its pieces.
#[derive(Debug, Default)]
pub(crate) struct ChoiceState {
    begun: bool,
    /// Characters of the text so far, as the tokens spell it.
    text_offset: usize,
    /// What this choice adds to the usage; set when it has ended.
    pub ended: Option<Ended>,
}

/// All of one choice.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub text: String,
    /// Kept when they are asked for.
    pub tokens: Vec<TokenOut>,
    pub state: ChoiceState,
}

/// A piece of one choice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece<'a> {
    pub text: &'a str,
    pub tokens: &'a [TokenOut],
    pub ended: Option<&'a Ended>,
}

#[derive(Serialize)]
struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    /// Outer: whether it is there at all. Inner: `null` in all but the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message<'a>>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

impl Answer {
    /// The events of a stream for one piece of one choice.
    pub(super) fn write_piece(
        &self,
        out: &mut String,
        index: u32,
        state: &mut ChoiceState,
        piece: Piece,
    ) {
        let first = !std::mem::replace(&mut state.begun, true);
        // Nothing to say yet: the text is held back, and nobody wants the tokens.
        let wanted = !piece.tokens.is_empty() && (self.logprobs || self.return_token_ids);
        let silent = piece.text.is_empty() && !wanted && piece.ended.is_none();
        match &self.style {
            Style::Chat => {
                if first {
                    self.write_chat(out, index, Some("assistant"), Piece { text: "", ..EMPTY });
                }
                if !silent {
                    if piece.ended.is_some() && (!piece.text.is_empty() || wanted) {
                        self.write_chat(out, index, None, Piece { ended: None, ..piece });
                        let end = Piece { ended: piece.ended, ..EMPTY };
                        self.write_chat(out, index, None, end);
                    } else {
                        self.write_chat(out, index, None, piece);
                    }
                }
            }
            Style::Completion { echo } => {
                let echo =
                    echo.as_ref().filter(|_| first).map(|texts| &texts[self.prompt_of(index)]);
                match echo {
                    Some(echo) => {
                        let text = format!("{echo}{}", piece.text);
                        self.write_text(out, index, state, first, Piece { text: &text, ..piece });
                    }
                    None if silent && !(first && self.return_token_ids) => {}
                    None => self.write_text(out, index, state, first, piece),
                }
            }
        }
    }

    /// The last chunk of a stream, for clients that asked for it.
    pub(super) fn write_usage(&self, out: &mut String, states: &[ChoiceState]) {
        if self.include_usage {
            let object = self.chunk_object();
            let usage = Some(Some(self.usage(states.iter())));
            self.write_event::<ChatChoice>(out, object, &[], usage, None);
        }
    }

    /// A whole answer.
    pub(super) fn whole(&self, choices: &[Collected]) -> String {
        let states = choices.iter().map(|choice| &choice.state);
        let usage = Some(Some(self.usage(states)));
        let indexed = choices.iter().zip(0..);
        match &self.style {
            Style::Chat => {
                let choices: Vec<_> =
                    indexed.map(|(one, index)| self.whole_chat(one, index)).collect();
                let ids = self.return_token_ids.then(|| &*self.prompts[0]);
                self.envelope("chat.completion", &choices, usage, ids)
            }
            Style::Completion { echo } => {
                let texts: Vec<String> = indexed
                    .clone()
                    .map(|(one, index)| match echo {
                        Some(echo) => format!("{}{}", echo[self.prompt_of(index)], one.text),
                        None => one.text.clone(),
                    })
                    .collect();
                let choices: Vec<_> = indexed
                    .zip(&texts)
                    .map(|((one, index), text)| {
                        let Collected { tokens, state, .. } = one;
                        let piece = Piece { text, tokens, ended: state.ended.as_ref() };
                        self.text_choice(index, &mut 0, true, piece)
                    })
                    .collect();
                self.envelope("text_completion", &choices, usage, None)
            }
        }
    }

    fn whole_chat<'a>(&self, one: &'a Collected, index: u32) -> ChatChoice<'a> {
        let message = Message { role: "assistant", content: &one.text, refusal: None };
        ChatChoice {
            message: Some(message),
            ..self.chat_choice(index, &one.tokens, one.state.ended.as_ref())
        }
    }

    pub(super) fn prompt_of(&self, index: u32) -> usize {
        (index / self.n) as usize
    }

    /// A prompt counts once however many answers it gets, and so does what was cached of it.
    fn usage<'a>(&self, states: impl Iterator<Item = &'a ChoiceState>) -> Usage {
        let prompt_tokens = self.prompts.iter().map(|prompt| prompt.len() as u64).sum();
        let (mut completion_tokens, mut cached_tokens) = (0, 0);
        for (index, ended) in states.map(|state| state.ended.as_ref()).enumerate() {
            let Some(ended) = ended else { continue };
            completion_tokens += u64::from(ended.generated_tokens);
            if index % self.n as usize == 0 {
                cached_tokens += u64::from(ended.cached_tokens);
            }
        }
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens },
        }
    }

    fn chunk_object(&self) -> &'static str {
        match self.style {
            Style::Chat => "chat.completion.chunk",
            Style::Completion { .. } => "text_completion",
        }
    }

    fn write_chat(&self, out: &mut String, index: u32, role: Option<&'static str>, piece: Piece) {
        let content = (piece.ended.is_none() || !piece.text.is_empty()).then_some(piece.text);
        let mut choice = ChatChoice {
            delta: Some(Delta { role, content }),
            ..self.chat_choice(index, piece.tokens, piece.ended)
        };
        if piece.tokens.is_empty() {
            (choice.logprobs, choice.token_ids) = (None, None);
        }
        // As in vLLM, the prompt's ids come with the chunk that opens the choice.
        let ids = (self.return_token_ids && role.is_some()).then(|| &*self.prompts[0]);
        let usage = self.include_usage.then_some(None);
        self.write_event(out, self.chunk_object(), &[choice], usage, ids);
    }

    fn write_text(
        &self,
        out: &mut String,
        index: u32,
        state: &mut ChoiceState,
        first: bool,
        piece: Piece,
    ) {
        let mut choice = self.text_choice(index, &mut state.text_offset, first, piece);
        if piece.tokens.is_empty() {
            (choice.logprobs, choice.token_ids) = (None, None);
        }
        let usage = self.include_usage.then_some(None);
        self.write_event(out, self.chunk_object(), &[choice], usage, None);
    }

    fn chat_choice<'a>(
        &self,
        index: u32,
        tokens: &[TokenOut],
        ended: Option<&'a Ended>,
    ) -> ChatChoice<'a> {
        ChatChoice {
            index,
            delta: None,
            message: None,
            logprobs: self.logprobs.then(|| ChatLogprobs::new(tokens)),
            finish_reason: finish_reason(ended),
            stop_reason: stop_reason(ended),
            token_ids: self.return_token_ids.then(|| ids(tokens)),
        }
    }

    fn text_choice<'a>(
        &'a self,
        index: u32,
        text_offset: &mut usize,
        first: bool,
        piece: Piece<'a>,
    ) -> TextChoice<'a> {
        let prompt = || &*self.prompts[self.prompt_of(index)];
        TextChoice {
            index,
            text: piece.text,
            logprobs: self.logprobs.then(|| CompletionLogprobs::new(piece.tokens, text_offset)),
            finish_reason: finish_reason(piece.ended),
            stop_reason: stop_reason(piece.ended),
            token_ids: self.return_token_ids.then(|| ids(piece.tokens)),
            prompt_token_ids: (self.return_token_ids && first).then(prompt),
        }
    }

    fn write_event<C: Serialize>(
        &self,
        out: &mut String,
        object: &'static str,
        choices: &[C],
        usage: Option<Option<Usage>>,
        prompt_token_ids: Option<&[u32]>,
    ) {
        out.push_str("data: ");
        out.push_str(&self.envelope(object, choices, usage, prompt_token_ids));
        out.push_str("\n\n");
    }

    fn envelope<C: Serialize>(
        &self,
        object: &'static str,
        choices: &[C],
        usage: Option<Option<Usage>>,
        prompt_token_ids: Option<&[u32]>,
    ) -> String {
        let envelope = Envelope {
            id: &self.id,
            object,
            created: self.created_unix_s,
            model: &self.model,
            choices,
            usage,
            prompt_token_ids,
        };
        serde_json::to_string(&envelope).expect("these types always serialise")
    }
}

const EMPTY: Piece<'static> = Piece { text: "", tokens: &[], ended: None };

fn ids(tokens: &[TokenOut]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

fn finish_reason(ended: Option<&Ended>) -> Option<&'static str> {
    ended.map(|ended| match ended.reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    })
}

fn stop_reason(ended: Option<&Ended>) -> Option<&str> {
    ended.and_then(|ended| ended.stop_matched.as_deref())
}
