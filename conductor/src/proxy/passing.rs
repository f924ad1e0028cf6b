//! An answer on its way back, as it comes. What the client does not take is not read; a client that has
//! gone ends the request at the server.

use std::sync::Arc;

use axum::body::Body;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use tokio::time::Instant;

use super::backend::Flight;
use crate::access::Admission;

/// Usage stands at the end of an answer.
const TAIL_BYTES: usize = 4 << 10;

/// The body of an answer. It breaks off at the deadline, so that the client sees that it is not whole.
pub(super) fn body(
    bytes: impl Stream<Item = reqwest::Result<Bytes>> + Send + 'static,
    flight: Flight,
    admission: Option<Arc<Admission>>,
    deadline: Instant,
) -> Body {
    let passing = Passing { _flight: flight, usage: Usage::new(admission) };
    let state = (Box::pin(bytes), passing);
    Body::from_stream(futures::stream::try_unfold(
        state,
        move |(mut bytes, mut passing)| async move {
            match tokio::time::timeout_at(deadline, bytes.next()).await {
                Ok(None) => Ok(None),
                Ok(Some(Ok(piece))) => {
                    passing.usage.read(&piece);
                    Ok(Some((piece, (bytes, passing))))
                }
                Ok(Some(Err(error))) => Err(std::io::Error::other(error.without_url())),
                Err(_) => Err(std::io::Error::other("the request's deadline passed")),
            }
        },
    ))
}

struct Passing {
    _flight: Flight,
    usage: Usage,
}

/// What an answer costs its tenant: what it says itself, or else its events, each about a token. Counted
/// when it has ended, in whatever way.
struct Usage {
    admission: Option<Arc<Admission>>,
    tail: Vec<u8>,
    events: u64,
}

impl Usage {
    fn new(admission: Option<Arc<Admission>>) -> Usage {
        Usage { admission, tail: Vec::new(), events: 0 }
    }

    fn read(&mut self, piece: &[u8]) {
        if self.admission.is_none() {
            return;
        }
        // An event that lies in two pieces may be missed: it is an estimate.
        self.events += piece.windows(6).filter(|window| *window == b"data: ").count() as u64;
        self.tail.extend_from_slice(&piece[piece.len().saturating_sub(TAIL_BYTES)..]);
        let over = self.tail.len().saturating_sub(TAIL_BYTES);
        self.tail.drain(..over);
    }

    fn tokens(&self) -> u64 {
        total_tokens(&String::from_utf8_lossy(&self.tail)).unwrap_or(self.events)
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        if let Some(admission) = &self.admission {
            admission.spend(self.tokens());
        }
    }
}

/// The last `"total_tokens": N` of a text.
fn total_tokens(text: &str) -> Option<u64> {
    let (_, after) = text.rsplit_once("\"total_tokens\"")?;
    let number = after.trim_start().strip_prefix(':')?.trim_start();
    let end = number.find(|c: char| !c.is_ascii_digit()).unwrap_or(number.len());
    number[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_says_what_it_cost_wherever_pieces_of_it_end() {
        let text = br#"data: {"usage":{"total_tokens": 7}} data: {"usage":{"total_tokens" : 19}}"#;
        for cut in 0..text.len() {
            let mut usage = Usage { admission: None, tail: Vec::new(), events: 3 };
            for piece in [&text[..cut], &text[cut..]] {
                usage.tail.extend_from_slice(piece);
            }
            assert_eq!(usage.tokens(), 19);
        }
        assert_eq!(total_tokens("no usage"), None);
        assert_eq!(total_tokens("\"total_tokens\": x"), None);
    }
}
