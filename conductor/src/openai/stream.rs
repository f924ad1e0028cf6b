//! A streamed answer: server-sent events from the pieces of all choices, as they come.
//!
//! The body takes from a bounded channel, and only when the connection has room: a slow client
//! slows the engines' streams and nothing else. Dropping the body cancels every choice.

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;

use super::answer::{ChoiceState, Piece};
use super::error::ApiError;
use super::writer::Writer;
use crate::serve::{Failure, Output, Outputs, Progress};

/// Pieces that are there already go out together, up to about this much.
const WRITE_BYTES: usize = 16 << 10;

#[derive(Debug)]
struct Streaming {
    writer: Writer,
    states: Vec<ChoiceState>,
    first: Option<Output>,
    /// Absent once the last event is written.
    outputs: Option<Outputs>,
}

pub(super) fn respond(writer: Writer, first: Output, outputs: Outputs) -> Response {
    let states = (0..outputs.choices()).map(|_| ChoiceState::default()).collect();
    let streaming = Streaming { writer, states, first: Some(first), outputs: Some(outputs) };
    let events = futures::stream::unfold(streaming, |mut streaming| async move {
        let bytes = streaming.next().await?;
        Some((Ok::<Bytes, std::convert::Infallible>(bytes), streaming))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, Body::from_stream(events)).into_response()
}

impl Streaming {
    /// The next bytes of the body; `None` after the last event.
    async fn next(&mut self) -> Option<Bytes> {
        let mut outputs = self.outputs.take()?;
        let mut out = String::new();
        let mut next = match self.first.take() {
            Some(first) => Some(first),
            None => outputs.next().await,
        };
        loop {
            let failed = match next {
                Some(output) => self.write(&mut out, output).err(),
                None => Some(Failure::vanished()),
            };
            if let Some(failure) = failed {
                self.writer.failed(&mut out, &ApiError::from(failure));
                return Some(out.into());
            }
            if self.states.iter().all(|state| state.ended.is_some()) {
                self.writer.end(&mut out, &self.states);
                return Some(out.into());
            }
            next = match outputs.try_next() {
                Some(output) if out.len() < WRITE_BYTES => Some(output),
                Some(output) => {
                    self.first = Some(output);
                    break;
                }
                // Text that is held back makes no event, and an empty chunk would end the body.
                None if out.is_empty() => outputs.next().await,
                None => break,
            };
        }
        self.outputs = Some(outputs);
        Some(out.into())
    }

    fn write(&mut self, out: &mut String, output: Output) -> Result<(), Failure> {
        let state = &mut self.states[output.choice as usize];
        match output.progress {
            // Only what came before the headers could still be told; and no streamed answer is
            // begun again.
            Progress::Placed(_) | Progress::Anew => {}
            Progress::Tokens(tokens) => {
                let piece = Piece { text: &tokens.text, tokens: &tokens.tokens, ended: None };
                self.writer.piece(out, output.choice, state, piece);
            }
            Progress::Ended { text, ended } => {
                let piece = Piece { text: &text, tokens: &[], ended: Some(&ended) };
                self.writer.piece(out, output.choice, state, piece);
                state.ended = Some(ended);
            }
            Progress::Failed(failure) => return Err(failure),
        }
        Ok(())
    }
}
