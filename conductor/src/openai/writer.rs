//! One way to write an answer for [`super::stream`] and [`super::whole`], whatever the endpoint.

use super::answer::{Answer, ChoiceState, Collected, Piece};
use super::error::ApiError;
use super::response::ResponseWriter;

/// Writes answers in the shape of their endpoint.
#[derive(Debug)]
pub(crate) enum Writer {
    /// Of chats and completions.
    Choices(Answer),
    Response(Box<ResponseWriter>),
}

impl Writer {
    /// The tokens are part of the answer, not only their text.
    pub(super) fn keeps_tokens(&self) -> bool {
        match self {
            Writer::Choices(answer) => answer.logprobs || answer.return_token_ids,
            Writer::Response(_) => false,
        }
    }

    /// The events for one piece of one choice.
    pub(super) fn piece(
        &mut self,
        out: &mut String,
        index: u32,
        state: &mut ChoiceState,
        piece: Piece,
    ) {
        match self {
            Writer::Choices(answer) => answer.write_piece(out, index, state, piece),
            Writer::Response(response) => response.write_piece(out, piece),
        }
    }

    /// The last events, after all choices have ended.
    pub(super) fn end(&mut self, out: &mut String, states: &[ChoiceState]) {
        match self {
            Writer::Choices(answer) => {
                answer.write_usage(out, states);
                out.push_str("data: [DONE]\n\n");
            }
            // The piece that ended it said so.
            Writer::Response(_) => {}
        }
    }

    /// The status is sent already: the error is an event.
    pub(super) fn failed(&mut self, out: &mut String, error: &ApiError) {
        match self {
            Writer::Choices(_) => {
                out.push_str("data: ");
                out.push_str(&error.json());
                out.push_str("\n\ndata: [DONE]\n\n");
            }
            Writer::Response(response) => response.write_failed(out, error),
        }
    }

    /// A whole answer.
    pub(super) fn whole(&self, choices: &[Collected]) -> String {
        match self {
            Writer::Choices(answer) => answer.whole(choices),
            Writer::Response(response) => response.whole(choices),
        }
    }
}
