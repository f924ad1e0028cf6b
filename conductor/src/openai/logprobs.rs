//! Log probabilities in the two shapes of the OpenAI API.

use kvasir_proto::v1::{TokenLogprob, TokenOut};
use serde::Serialize;
use serde_json::{Map, Value};

/// JSON has no infinity; this is what vLLM writes for it.
const LOWEST: f32 = -9999.0;

/// The chat shape: a list with one entry for each token.
#[derive(Debug, Serialize)]
pub(crate) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Debug, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    own: Entry,
    top_logprobs: Vec<Entry>,
}

#[derive(Debug, Serialize)]
struct Entry {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    pub(super) fn new(tokens: &[TokenOut]) -> ChatLogprobs {
        let token = |token: &TokenOut| ChatToken {
            own: entry(token.logprob.as_ref().unwrap_or(&TokenLogprob {
                id: token.id,
                logprob: LOWEST,
                bytes: Vec::new(),
            })),
            top_logprobs: token.top.iter().map(entry).collect(),
        };
        ChatLogprobs { content: tokens.iter().map(token).collect(), refusal: None }
    }
}

/// The completions shape: lists side by side.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<Map<String, Value>>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// `offset` is where the first token's text begins, in characters of the whole text; it is
    /// moved behind the last one's.
    pub(super) fn new(tokens: &[TokenOut], offset: &mut usize) -> CompletionLogprobs {
        let mut out = CompletionLogprobs::default();
        for token in tokens {
            let (text, logprob) = match &token.logprob {
                Some(own) => (text_of(&own.bytes), finite(own.logprob)),
                None => (String::new(), LOWEST),
            };
            let best = token.top.iter();
            let mut top: Map<String, Value> =
                best.map(|one| (text_of(&one.bytes), finite(one.logprob).into())).collect();
            // The sampled one is always among them, be it one of the best or not.
            top.insert(text.clone(), logprob.into());
            out.text_offset.push(*offset);
            *offset += text.chars().count();
            out.tokens.push(text);
            out.token_logprobs.push(logprob);
            out.top_logprobs.push(top);
        }
        out
    }
}

fn entry(one: &TokenLogprob) -> Entry {
    Entry { token: text_of(&one.bytes), logprob: finite(one.logprob), bytes: one.bytes.clone() }
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// NaN counts as impossible, too.
fn finite(logprob: f32) -> f32 {
    logprob.max(LOWEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32, logprob: f32, bytes: &[u8], top: &[(f32, &[u8])]) -> TokenOut {
        let one = |logprob, bytes: &[u8]| TokenLogprob { id, logprob, bytes: bytes.to_vec() };
        TokenOut {
            id,
            logprob: Some(one(logprob, bytes)),
            top: top.iter().map(|&(logprob, bytes)| one(logprob, bytes)).collect(),
        }
    }

    #[test]
    fn what_json_cannot_hold_becomes_a_very_small_number() {
        let tokens = [token(1, f32::NEG_INFINITY, b"a", &[(f32::NAN, b"b")])];
        let json = serde_json::to_value(ChatLogprobs::new(&tokens)).expect("serialises");
        assert_eq!(json["content"][0]["logprob"], -9999.0);
        assert_eq!(json["content"][0]["top_logprobs"][0]["logprob"], -9999.0);
    }

    #[test]
    fn offsets_count_characters_and_go_on_from_piece_to_piece() {
        let mut offset = 3;
        let first = [token(1, -1.0, "é".as_bytes(), &[]), token(2, -1.0, b"bc", &[])];
        assert_eq!(CompletionLogprobs::new(&first, &mut offset).text_offset, [3, 4]);
        let second = [token(3, -1.0, b"d", &[(-0.5, b"x")])];
        let logprobs = CompletionLogprobs::new(&second, &mut offset);
        assert_eq!(logprobs.text_offset, [6]);
        let top = &logprobs.top_logprobs[0];
        assert_eq!((top["x"].as_f64(), top["d"].as_f64()), (Some(-0.5), Some(-1.0)));
    }

    #[test]
    fn half_a_character_keeps_its_bytes() {
        let tokens = [token(1, -1.0, &[0xe2, 0x82], &[])];
        let json = serde_json::to_value(ChatLogprobs::new(&tokens)).expect("serialises");
        assert_eq!(json["content"][0]["bytes"], serde_json::json!([0xe2, 0x82]));
        assert_eq!(json["content"][0]["token"], "\u{fffd}");
    }
}
