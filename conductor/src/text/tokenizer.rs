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
        Ok((PromptTokenizer { tokenizer }, special))
    }

    /// `add_special_tokens`: what the tokenizer's post-processor adds (a begin token, mostly).
    /// Rendered chats carry theirs already.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
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

/// A special token is a string or an object with its `content`.
fn token_text(config: &Value, name: &str) -> Option<String> {
    let token = config.get(name)?;
    token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

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
