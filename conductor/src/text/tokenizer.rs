//! `tokenizer.json` and the special tokens of `tokenizer_config.json`.

use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer;

use super::TextError;
use super::memo::{Memo, PieceKey};
use super::pieces::{Cuts, Frame, PIECE_BYTES_MIN};

/// Texts of the special tokens that chat templates ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SpecialTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
    pub pad: Option<String>,
    pub unk: Option<String>,
}

/// Text to token ids, and back for `echo`.
#[derive(Debug)]
pub(crate) struct PromptTokenizer {
    tokenizer: Tokenizer,
    /// Bytes of text that one token covers at most; absent when that cannot be known.
    token_bytes_max: Option<usize>,
    /// Absent when texts are not to be cut.
    cuts: Option<Cuts>,
    /// Absent when special tokens are not the same around every text.
    frame: Option<Frame>,
}

/// What is remembered of prompts, and for whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Remembered<'a> {
    pub memo: &'a Memo,
    pub model: &'a str,
    pub salt: &'a [u8],
}

impl PromptTokenizer {
    /// Reads the two files of the model's directory. `tokenizer_config.json` may be missing.
    pub(crate) fn load(directory: &Path) -> Result<(PromptTokenizer, SpecialTokens), String> {
        let path = directory.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|e| format!("cannot read {path:?}: {e}"))?;
        let mut tokenizer =
            Tokenizer::from_bytes(&bytes).map_err(|e| format!("cannot parse {path:?}: {e}"))?;
        // Settings for training batches: a prompt is never cut or filled up here.
        tokenizer.with_padding(None);
        tokenizer
            .with_truncation(None)
            .map_err(|e| format!("cannot use {path:?} without truncation: {e}"))?;
        let special = match super::template::read_json(&directory.join("tokenizer_config.json"))? {
            Some(config) => SpecialTokens {
                bos: token_text(&config, "bos_token"),
                eos: token_text(&config, "eos_token"),
                pad: token_text(&config, "pad_token"),
                unk: token_text(&config, "unk_token"),
            },
            None => SpecialTokens::default(),
        };
        let token_bytes_max = token_bytes_max(&bytes, &tokenizer);
        let (cuts, frame) = (Cuts::of(&tokenizer), Frame::of(&tokenizer));
        Ok((PromptTokenizer { tokenizer, token_bytes_max, cuts, frame }, special))
    }

    /// `add_special_tokens`: what the tokenizer's post-processor adds (a begin token, mostly).
    /// Rendered chats carry theirs already. Text that cannot fit into `tokens_max` is refused
    /// unread where that can be told: tokenizing takes some fifty times its bytes of memory. Tokens of
    /// pieces that are remembered are not made again, and are the same.
    pub(crate) fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        tokens_max: u32,
        remembered: Remembered<'_>,
    ) -> Result<Vec<u32>, TextError> {
        let at_least = self.token_bytes_max.map_or(0, |bytes| text.len().div_ceil(bytes));
        if at_least > tokens_max as usize {
            return Err(TextError::TooLong { at_least });
        }
        let memo = remembered.memo;
        let frame = if add_special_tokens { self.frame.as_ref() } else { Some(&Frame::NONE) };
        let (true, Some(frame)) = (memo.keeps() && text.len() >= PIECE_BYTES_MIN, frame) else {
            memo.tokenized(text.len());
            return self.tokens(text, add_special_tokens);
        };
        let whole = || vec![text];
        let pieces = self.cuts.as_ref().map_or_else(whole, |cuts| cuts.pieces(text));
        let mut tokens = frame.before.clone();
        for piece in pieces {
            if piece.len() < PIECE_BYTES_MIN {
                memo.tokenized(piece.len());
                tokens.extend(self.tokens(piece, false)?);
                continue;
            }
            let key = PieceKey::new(remembered.model, remembered.salt, piece);
            if let Some(found) = memo.find(&key, piece.len()) {
                tokens.extend_from_slice(&found);
                continue;
            }
            memo.tokenized(piece.len());
            let made = self.tokens(piece, false)?;
            memo.keep(key, &made);
            tokens.extend(made);
        }
        tokens.extend_from_slice(&frame.behind);
        Ok(tokens)
    }

    /// The same where nothing is remembered.
    #[cfg(test)]
    pub(crate) fn encode_anew(
        &self,
        text: &str,
        add_special_tokens: bool,
        tokens_max: u32,
    ) -> Result<Vec<u32>, TextError> {
        let remembered = Remembered { memo: &Memo::none(), model: "", salt: b"" };
        self.encode(text, add_special_tokens, tokens_max, remembered)
    }

    fn tokens(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self
            .tokenizer
            .encode_fast(text, add_special_tokens)
            .map_err(|error| TextError::Tokenize(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    pub(crate) fn frame(&self) -> Option<&Frame> {
        self.frame.as_ref()
    }

    /// The text of a prompt given as ids.
    pub(crate) fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.tokenizer.decode(ids, true).map_err(|error| TextError::Tokenize(error.to_string()))
    }
}

/// With byte-level tokens and no normalizer a token covers just the bytes that it spells.
fn token_bytes_max(file: &[u8], tokenizer: &Tokenizer) -> Option<usize> {
    let file: Value = serde_json::from_slice(file).ok()?;
    let normalizer = &file["normalizer"];
    let unchanged = normalizer.is_null() || normalizer["normalizers"] == serde_json::json!([]);
    let byte_level = |part: &Value| part["type"] == "ByteLevel";
    let splits = &file["pre_tokenizer"];
    let sequence = splits["pretokenizers"].as_array();
    let spelled = byte_level(splits) || sequence.is_some_and(|all| all.iter().any(byte_level));
    if !unchanged || !spelled {
        return None;
    }
    // In the vocabulary each byte is one character; added tokens stand there as they are.
    tokenizer.get_vocab(true).keys().map(String::len).max().filter(|bytes| *bytes > 0)
}

/// A special token is a string or an object with its `content`.
fn token_text(config: &Value, name: &str) -> Option<String> {
    let token = config.get(name)?;
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
}

#[cfg(test)]
mod tests;
