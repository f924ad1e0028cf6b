//! `tokenizer.json` and the special tokens of `tokenizer_config.json`.

use std::path::Path;

use serde_json::Value;
use tokenizers::Tokenizer;

use super::TextError;

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
}

impl PromptTokenizer {
    /// Reads the two files of the model's directory. `tokenizer_config.json` may be missing.
    pub fn load(directory: &Path) -> Result<(PromptTokenizer, SpecialTokens), String> {
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
        Ok((PromptTokenizer { tokenizer, token_bytes_max }, special))
    }

    /// `add_special_tokens`: what the tokenizer's post-processor adds (a begin token, mostly).
    /// Rendered chats carry theirs already. Text that cannot fit into `tokens_max` is refused
    /// unread where that can be told: tokenizing takes some fifty times its bytes of memory.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        tokens_max: u32,
    ) -> Result<Vec<u32>, TextError> {
        let at_least = self.token_bytes_max.map_or(0, |bytes| text.len().div_ceil(bytes));
        if at_least > tokens_max as usize {
            return Err(TextError::TooLong { at_least });
        }
        let encoding = self
            .tokenizer
            .encode_fast(text, add_special_tokens)
            .map_err(|error| TextError::Tokenize(error.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of a prompt given as ids.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
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
mod tests {
    use super::*;

    fn tiny() -> PromptTokenizer {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/models/tiny-deepseek-v2");
        PromptTokenizer::load(Path::new(path)).expect("the files are there").0
    }

    #[test]
    fn text_that_cannot_fit_is_refused_unread_and_other_text_never() {
        let tiny = tiny();
        let bytes = tiny.token_bytes_max.expect("byte-level");
        let long = "a".repeat(bytes * 4);
        assert!(tiny.encode(&long, true, 4).is_ok_and(|ids| ids.len() > 4), "it is read");
        let refused = tiny.encode(&(long + "a"), true, 4);
        assert_eq!(refused, Err(TextError::TooLong { at_least: 5 }));
        // The longest token there is fits into one.
        let vocab = tiny.tokenizer.get_vocab(true);
        let longest = vocab.iter().max_by_key(|(text, _)| text.len()).expect("tokens");
        let text = tiny.tokenizer.decode(&[*longest.1], false).expect("decodes");
        assert_eq!(tiny.encode(&text, true, 1), Ok(vec![*longest.1]));
    }

    #[test]
    fn special_tokens_may_be_strings_or_objects() {
        let config = serde_json::json!({
            "bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false}, "pad_token": null
        });
        assert_eq!(token_text(&config, "bos_token").as_deref(), Some("<s>"));
        assert_eq!(token_text(&config, "eos_token").as_deref(), Some("</s>"));
        assert_eq!(token_text(&config, "pad_token"), None);
        assert_eq!(token_text(&config, "unk_token"), None);
    }
}
