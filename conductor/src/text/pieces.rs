//! Where a text may be cut so that the tokens of its pieces, one after another, are those of the whole.
//!
//! A tokenizer takes added tokens (`<|user|>`) out of a text before anything else, and works on what lies between
//! two of them by itself. So a text may be cut in front of any of them. What some tokenizers do only at
//! the beginning of a text they do there too: every piece but the first begins with an added token.

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Tokenizer;

/// Below it a piece is not worth a look at the memo: tokenizing it takes microseconds.
pub(super) const PIECE_BYTES_MIN: usize = 256;

/// The added tokens of one tokenizer.
#[derive(Debug)]
pub(super) struct Cuts {
    tokens: AhoCorasick,
    /// For each of them: a text may be cut in front of it.
    may_cut: Vec<bool>,
}

impl Cuts {
    /// Nothing for a tokenizer whose texts are not to be cut.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Cuts> {
        let mut added: Vec<_> = tokenizer.get_added_tokens_decoder().into_values().collect();
        // Those that are looked for in normalized text are looked for between the others.
        added.retain(|token| !token.normalized);
        // Whether it counts depends on what lies around it.
        if added.is_empty() || added.iter().any(|token| token.single_word) {
            return None;
        }
        let tokens = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(added.iter().map(|token| &token.content))
            .ok()?;
        // Space in front of it may belong to it, or to the one before.
        let may_cut = |token: &tokenizers::AddedToken| {
            !token.lstrip && !token.content.starts_with(char::is_whitespace)
        };
        Some(Cuts { tokens, may_cut: added.iter().map(may_cut).collect() })
    }

    /// The pieces of a text, in order: each of [`PIECE_BYTES_MIN`] at least but the last. Texts that begin alike
    /// are cut alike as far as both are whole.
    pub(super) fn pieces<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let mut pieces = Vec::new();
        let mut from = 0;
        for token in self.tokens.find_iter(text) {
            let at = token.start();
            if at >= from + PIECE_BYTES_MIN && self.may_cut[token.pattern().as_usize()] {
                pieces.push(&text[from..at]);
                from = at;
            }
        }
        pieces.push(&text[from..]);
        pieces
    }
}

/// What a tokenizer puts before and behind every text when it is asked for special tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub before: Vec<u32>,
    pub behind: Vec<u32>,
}

impl Frame {
    pub(crate) const NONE: Frame = Frame { before: Vec::new(), behind: Vec::new() };

    /// Nothing where it does not put the same around all texts.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Frame> {
        let ids = |text: &str, special| {
            let encoding = tokenizer.encode_fast(text, special).ok()?;
            Some(encoding.get_ids().to_vec())
        };
        let of = |text: &str| {
            let (plain, framed) = (ids(text, false)?, ids(text, true)?);
            let around = framed.len().checked_sub(plain.len())?;
            let at = (0..=around).find(|at| framed[*at..].starts_with(&plain))?;
            let behind = framed[at + plain.len()..].to_vec();
            Some(Frame { before: framed[..at].to_vec(), behind })
        };
        let frame = of("a text")?;
        (!ids("a text", false)?.is_empty() && of("Another, 2 of them.")? == frame).then_some(frame)
    }
}
