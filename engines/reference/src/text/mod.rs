//! Tokens to text, piece by piece. The pieces join to exactly what decoding all tokens at once
//! gives, cut at a stop string if there is one.
//!
//! - [`vocabulary`]: the bytes of every token
//! - [`utf8`]: bytes to text, incomplete characters held back
//! - [`stop`]: stop strings, possible beginnings of one held back

#![forbid(unsafe_code)]

mod stop;
mod utf8;
mod vocabulary;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use stop::StopMatcher;
pub(crate) use stop::StopStrings;
use utf8::Utf8Stream;
pub(crate) use vocabulary::Vocabulary;

/// How the text of one answer is made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TextOptions {
    pub stop: StopStrings,
    /// Special tokens have text too.
    pub keep_special_tokens: bool,
}

/// The text of one answer as its tokens come. Call `push` for each token, `finish` once at the end;
/// nothing after a stop string was matched.
#[derive(Debug)]
pub(crate) struct TextStream {
    vocabulary: Arc<Vocabulary>,
    keep_special_tokens: bool,
    utf8: Utf8Stream,
    stop: StopMatcher,
}

/// Text that is settled, and the stop string that ended it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Piece {
    pub text: String,
    pub stopped_by: Option<String>,
}

impl TextStream {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, options: TextOptions) -> Self {
        TextStream {
            vocabulary,
            keep_special_tokens: options.keep_special_tokens,
            utf8: Utf8Stream::default(),
            stop: StopMatcher::new(options.stop),
        }
    }

    /// Adds a token. What it gives may be empty: a character may be incomplete, or the text may be
    /// the beginning of a stop string.
    pub(crate) fn push(&mut self, token: u32) -> Piece {
        if self.vocabulary.is_special(token) && !self.keep_special_tokens {
            return Piece::default();
        }
        let mut settled = String::new();
        self.utf8.push(self.vocabulary.bytes(token), &mut settled);
        self.stop.push(&settled)
    }

    /// What was still held back. An incomplete character becomes U+FFFD, which may complete a stop
    /// string.
    pub(crate) fn finish(&mut self) -> Piece {
        let mut settled = String::new();
        self.utf8.finish(&mut settled);
        let mut piece = self.stop.push(&settled);
        if piece.stopped_by.is_none() {
            piece.text.push_str(&self.stop.take_held());
        }
        piece
    }
}
