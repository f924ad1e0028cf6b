//! An answer on its way back, as it comes. What the client does not take is not read; a client that has
//! gone ends the request at the server.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body::{Body as HttpBody, Frame, SizeHint};
use serde::Deserialize;
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::backend::Flight;
use super::upstream::Pieces;
use crate::access::Admission;
use crate::serve::{Failure, Record};

/// What is kept of an answer to find its usage in it: all of one that is no longer, else its end.
const KEPT_BYTES: usize = 256 << 10;
/// Pieces that come one upon the other go out together, up to about this much.
const WRITE_BYTES: usize = 16 << 10;

/// What an answer holds until it has been passed on.
#[derive(Debug)]
pub(super) struct Held {
    pub _flight: Flight,
    pub usage: Usage,
    pub told: Told,
    /// The conductor does not end before it.
    pub _running: TaskTrackerToken,
}

/// The body of an answer. It breaks off at the deadline, so that the client sees that it is not whole.
pub(super) fn body(pieces: Pieces, held: Held, deadline: Instant) -> Body {
    let deadline = Box::pin(sleep_until(deadline));
    let left = pieces.length();
    Body::new(Passing { pieces, left, joined: Joined::default(), end: None, deadline, held })
}

/// See [`body`].
struct Passing {
    pieces: Pieces,
    /// What is still to come of a length that is known.
    left: Option<u64>,
    joined: Joined,
    end: Option<io::Result<()>>,
    deadline: Pin<Box<Sleep>>,
    held: Held,
}

impl Passing {
    /// Takes what is there. Ready when it is to go out: nothing more is there now, there is enough of it, or it
    /// was the last.
    fn poll_pieces(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // What has come whole is read to its end, so that its connection is for others.
        let has_room = |of: &Passing| of.joined.len() < WRITE_BYTES || of.left == Some(0);
        while self.end.is_none() && has_room(self) {
            match self.pieces.poll_next(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    self.held.usage.read(&piece);
                    self.held.told.piece();
                    self.left = self.left.map(|left| left.saturating_sub(piece.len() as u64));
                    self.joined.push(piece);
                }
                Poll::Ready(Some(Err(error))) => {
                    self.held.told.ended(&error.to_string());
                    self.end = Some(Err(io::Error::other(error)));
                }
                Poll::Ready(None) => {
                    self.held.told.ended("ok");
                    self.end = Some(Ok(()));
                }
                Poll::Pending if self.deadline.as_mut().poll(cx).is_ready() => {
                    self.held.told.ended(Failure::Deadline { phase: "" }.label());
                    self.end = Some(Err(io::Error::other("the request's deadline passed")));
                }
                Poll::Pending if self.joined.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready(())
    }
}

impl HttpBody for Passing {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        ready!(self.poll_pieces(cx));
        if !self.joined.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(self.joined.take()))));
        }
        // Asked again after an error, it has ended.
        let end = self.end.replace(Ok(()));
        Poll::Ready(end.and_then(Result::err).map(Err))
    }

    fn is_end_stream(&self) -> bool {
        self.left == Some(0) && self.joined.is_empty() && self.end.is_some()
    }

    fn size_hint(&self) -> SizeHint {
        let exact = |left| SizeHint::with_exact(left + self.joined.len() as u64);
        self.left.map_or_else(SizeHint::default, exact)
    }
}

/// Pieces in their order. One that is alone is not copied.
#[derive(Debug, Default)]
struct Joined {
    first: Bytes,
    more: BytesMut,
}

impl Joined {
    fn len(&self) -> usize {
        self.first.len() + self.more.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn push(&mut self, piece: Bytes) {
        if self.is_empty() {
            self.first = piece;
            return;
        }
        if !self.first.is_empty() {
            self.more.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.more.extend_from_slice(&piece);
    }

    fn take(&mut self) -> Bytes {
        if self.more.is_empty() {
            std::mem::take(&mut self.first)
        } else {
            self.more.split().freeze()
        }
    }
}

/// What is written down of an answer, where that is asked for. One that is let go before its end was not taken
/// by its client.
#[derive(Debug)]
pub(super) struct Told {
    record: Option<Arc<Record>>,
    /// Of the request, for a stream that has no piece yet.
    waits_since: Option<Instant>,
}

impl Told {
    pub(super) fn new(record: Option<Arc<Record>>, arrived: Instant, is_stream: bool) -> Told {
        Told { record, waits_since: is_stream.then_some(arrived) }
    }

    fn piece(&mut self) {
        if let (Some(since), Some(record)) = (self.waits_since.take(), &self.record) {
            record.first_token(since.elapsed());
        }
    }

    fn ended(&self, how: &str) {
        if let Some(record) = &self.record {
            record.ended(how, None);
        }
    }
}

impl Drop for Told {
    fn drop(&mut self) {
        self.ended(Failure::ClientGone.label());
    }
}

/// What an answer costs its tenant, beyond what was taken for the prompt beforehand. Counted when it has
/// ended, in whatever way: what it says itself, or else its events, each about a token.
#[derive(Debug)]
pub(super) struct Usage {
    admission: Option<Arc<Admission>>,
    /// Taken beforehand.
    prompt_tokens: u64,
    kept: Vec<u8>,
    events: u64,
    bytes: u64,
}

impl Usage {
    pub(super) fn new(admission: Option<Arc<Admission>>, prompt_tokens: u64) -> Usage {
        Usage { admission, prompt_tokens, kept: Vec::new(), events: 0, bytes: 0 }
    }

    fn read(&mut self, piece: &[u8]) {
        if self.admission.is_none() {
            return;
        }
        // An event that lies in two pieces may be missed: it is an estimate.
        self.events += piece.windows(6).filter(|window| *window == b"data: ").count() as u64;
        self.bytes += piece.len() as u64;
        self.kept.extend_from_slice(piece);
        if self.kept.len() > 2 * KEPT_BYTES {
            self.kept.drain(..self.kept.len() - KEPT_BYTES);
        }
    }

    /// Prompt and answer.
    fn tokens(&self) -> u64 {
        let said = std::str::from_utf8(&self.kept).ok().and_then(total_tokens);
        let guess = match self.events {
            0 => tokens_of_bytes(self.bytes),
            events => events,
        };
        said.unwrap_or(self.prompt_tokens + guess)
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        if let Some(admission) = &self.admission {
            let tokens = self.tokens();
            admission.spend(tokens.saturating_sub(self.prompt_tokens));
            admission.give_back(self.prompt_tokens.saturating_sub(tokens));
        }
    }
}

/// About as many as such a text has.
pub(super) fn tokens_of_bytes(bytes: u64) -> u64 {
    bytes.div_ceil(4)
}

/// What an answer says at its own level, or in the `response` of an event; never what stands deeper in it,
/// which may be the client's.
#[derive(Deserialize)]
struct Answer {
    usage: Option<TotalTokens>,
    response: Option<Response>,
}

#[derive(Deserialize)]
struct Response {
    usage: Option<TotalTokens>,
}

#[derive(Deserialize)]
struct TotalTokens {
    total_tokens: u64,
}

/// Of the whole answer, or of the last event that says it.
fn total_tokens(text: &str) -> Option<u64> {
    let one = |text: &str| {
        let answer: Answer = serde_json::from_str(text).ok()?;
        let of_response = || answer.response.and_then(|response| response.usage);
        Some(answer.usage.or_else(of_response)?.total_tokens)
    };
    one(text)
        .or_else(|| text.lines().rev().filter_map(|line| line.strip_prefix("data: ")).find_map(one))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, want: u64) {
        let mut usage = Usage::new(None, 100);
        usage.kept = text.into();
        usage.events = 3;
        assert_eq!(usage.tokens(), want, "{text}");
    }

    #[test]
    fn an_answer_says_what_it_cost_and_a_client_cannot_say_it_for_it() {
        check(r#"{"usage":{"total_tokens":7},"metadata":{"usage":{"total_tokens":1}}}"#, 7);
        check(r#"{"metadata":{"\"total_tokens\"":"x"},"usage":{"total_tokens":7}}"#, 7);
        let stream =
            "data: {\"usage\":null}\n\ndata: {\"usage\":{\"total_tokens\":9}}\n\ndata: [DONE]\n\n";
        check(stream, 9);
        check("data: {\"type\":\"x\",\"response\":{\"usage\":{\"total_tokens\":11}}}\n\n", 11);
        check("data: {}\n\ndata: {}\n\ndata: [DONE]\n\n", 103);
        check("{\"text\":\"usage\"}", 103);
    }
}
