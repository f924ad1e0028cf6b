//! The bytes of every token of a byte-level tokenizer, as its decoder would join them. Kept as a
//! table, so that a streamed token costs a look-up: decoding a growing window again and again
//! cannot tell a U+FFFD that stays from one that waits for its next byte.

use std::collections::HashMap;
use std::path::Path;

use tokenizers::decoders::DecoderWrapper;
use tokenizers::tokenizer::Tokenizer;

/// Why a tokenizer is of no use here.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VocabularyError {
    #[error("cannot read it: {0}")]
    Read(String),
    #[error("its decoder is not ByteLevel, the only one that is supported")]
    Decoder,
    #[error("it has no tokens")]
    Empty,
    #[error("it has token {id}, but the model has only {vocab} tokens")]
    BeyondModel { id: u32, vocab: u32 },
}

/// All tokens. A token that the tokenizer does not know has no bytes, as in its own decoding.
#[derive(Debug)]
pub(crate) struct Vocabulary {
    /// All bytes, one token after another.
    bytes: Vec<u8>,
    /// Where each token's bytes end.
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl Vocabulary {
    /// Reads a `tokenizer.json` for a model of `vocab` tokens.
    ///
    /// # Errors
    /// [`VocabularyError`], to be said after the name of the file.
    pub(crate) fn load(path: &Path, vocab: u32) -> Result<Self, VocabularyError> {
        let tokenizer =
            Tokenizer::from_file(path).map_err(|why| VocabularyError::Read(why.to_string()))?;
        Vocabulary::of(&tokenizer, vocab)
    }

    /// # Errors
    /// [`VocabularyError`] when its decoder is of another kind or its ids are not the model's.
    pub(crate) fn of(tokenizer: &Tokenizer, vocab: u32) -> Result<Self, VocabularyError> {
        if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return Err(VocabularyError::Decoder);
        }
        let id = tokenizer.get_vocab(true).into_values().max().ok_or(VocabularyError::Empty)?;
        if id >= vocab {
            return Err(VocabularyError::BeyondModel { id, vocab });
        }
        let byte_of = byte_of_char();
        let mut all = Vocabulary { bytes: Vec::new(), ends: Vec::new(), special: Vec::new() };
        for id in 0..=id {
            let token = tokenizer.id_to_token(id).unwrap_or_default();
            all.bytes.extend(token_bytes(&token, &byte_of));
            all.ends.push(all.bytes.len() as u32);
            all.special.push(tokenizer.get_added_vocabulary().is_special_token(&token));
        }
        Ok(all)
    }

    /// Tokens of these bytes, the first one special, for tests without a tokenizer.
    #[cfg(test)]
    pub(crate) fn of_tokens(tokens: &[&[u8]]) -> Self {
        let mut all = Vocabulary { bytes: Vec::new(), ends: Vec::new(), special: Vec::new() };
        for (id, token) in tokens.iter().enumerate() {
            all.bytes.extend(*token);
            all.ends.push(all.bytes.len() as u32);
            all.special.push(id == 0);
        }
        all
    }

    /// What the token adds to the text, before it is read as UTF-8.
    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        let Some(&end) = self.ends.get(token as usize) else { return &[] };
        let start = if token == 0 { 0 } else { self.ends[token as usize - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Whether the token has text only when special tokens are kept.
    pub(crate) fn is_special(&self, token: u32) -> bool {
        self.special.get(token as usize).copied().unwrap_or(false)
    }
}

/// A token whose characters all stand for bytes is those bytes; any other (an added token such as
/// `<｜begin▁of▁sentence｜>`) is its own UTF-8.
fn token_bytes(token: &str, byte_of: &HashMap<char, u8>) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(|c| byte_of.get(&c).copied()).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The alphabet of byte-level BPE: printable bytes of Latin-1 stand for themselves, all others for
/// the characters from U+0100 on, in their order.
fn byte_of_char() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut moved = 0x100;
    let mut alphabet = HashMap::new();
    for byte in 0..=u8::MAX {
        let code = if printable(byte) {
            u32::from(byte)
        } else {
            moved += 1;
            moved - 1
        };
        let c = char::from_u32(code).expect("codes below U+0200 are characters");
        alphabet.insert(c, byte);
    }
    alphabet
}
