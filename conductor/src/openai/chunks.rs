//! Chunks of a prompt, as a client names them: parts that are attended as if each stood alone, so that rows of
//! them that were computed at another offset can be used (docs/concepts/chunk-reuse.md). Token ranges of a prompt that is
//! given as ids, or texts of one that is not.

use std::ops::Range;

use kvasir_proto::CHUNKS_MAX;
use serde_json::Value;

use super::error::ApiError;
use super::fields::{Fields, kind_of};
use crate::text::{Frame, TextError};

pub(super) const MEMBER: &str = "kvasir_chunks";

/// One chunk as a client names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NamedChunk {
    Tokens(Range<u32>),
    Text(String),
}

/// Takes them out of a request; none where it has none.
pub(super) fn take(fields: &mut Fields) -> Result<Vec<NamedChunk>, ApiError> {
    let list = match fields.value(MEMBER) {
        None => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(fields.wrong_kind(MEMBER, "a list", &other)),
    };
    if list.len() > CHUNKS_MAX {
        let message = format!("`{MEMBER}` may have at most {CHUNKS_MAX} entries.");
        return Err(ApiError::invalid(MEMBER, message));
    }
    let one = |(index, chunk)| take_one(chunk, &format!("{MEMBER}[{index}]"));
    list.into_iter().enumerate().map(one).collect()
}

fn take_one(chunk: Value, name: &str) -> Result<NamedChunk, ApiError> {
    let Value::Object(map) = chunk else {
        let message = format!("`{name}` must be an object, not {}.", kind_of(&chunk));
        return Err(ApiError { code: "invalid_type", ..ApiError::invalid(name, message) });
    };
    let mut fields = Fields::nested(map, name);
    let text = fields.string("text")?;
    let start = fields.integer("start", 0..=u32::MAX.into())?;
    let end = fields.integer("end", 1..=u32::MAX.into())?;
    fields.finish()?;
    match (text, start, end) {
        (Some(text), None, None) if !text.is_empty() => Ok(NamedChunk::Text(text)),
        (None, Some(start), Some(end)) if start < end => {
            Ok(NamedChunk::Tokens(start as u32..end as u32))
        }
        _ => {
            let message = format!("`{name}` must have a `text`, or a `start` before its `end`.");
            Err(ApiError::invalid(name, message))
        }
    }
}

/// Checks ranges against the prompt of ids that they are of.
pub(super) fn ranges(
    chunks: &[NamedChunk],
    prompt_tokens: usize,
) -> Result<Vec<Range<u32>>, TextError> {
    let mut next = 0;
    let mut ranges = Vec::with_capacity(chunks.len());
    for (index, chunk) in chunks.iter().enumerate() {
        let wrong = |why: &str| TextError::Chunk { why: format!("`{MEMBER}[{index}]` {why}.") };
        let NamedChunk::Tokens(range) = chunk else {
            return Err(wrong("has a `text`, but the prompt is token ids; use `start` and `end`"));
        };
        if range.start < next || range.end as usize > prompt_tokens {
            return Err(wrong("must start after the previous entry and end within the prompt"));
        }
        next = range.end;
        ranges.push(range.clone());
    }
    Ok(ranges)
}

/// Makes tokens of a text with chunks: each chunk has those that it has alone, and so has what is between them.
pub(super) fn encode(
    text: &str,
    chunks: &[NamedChunk],
    (add_special_tokens, tokens_max): (bool, u32),
    frame: Option<&Frame>,
    encode: impl Fn(&str, bool) -> Result<Vec<u32>, TextError>,
) -> Result<(Vec<u32>, Vec<Range<u32>>), TextError> {
    if chunks.is_empty() {
        return Ok((encode(text, add_special_tokens)?, Vec::new()));
    }
    let frame = if add_special_tokens { frame } else { Some(&Frame::NONE) };
    let Some(Frame { before, behind }) = frame else {
        let why = format!(
            "`{MEMBER}`: set `add_special_tokens` to false, or send the prompt as token ids."
        );
        return Err(TextError::Chunk { why });
    };
    let (mut tokens, mut ranges) = (before.clone(), Vec::with_capacity(chunks.len()));
    let mut rest = text;
    for (index, chunk) in chunks.iter().enumerate() {
        let wrong = |why: &str| TextError::Chunk { why: format!("`{MEMBER}[{index}]` {why}.") };
        let NamedChunk::Text(chunk) = chunk else {
            return Err(wrong("has `start` and `end`, but the prompt is text; use `text`"));
        };
        let Some(at) = rest.find(chunk.as_str()) else {
            return Err(wrong("does not occur in the prompt after the previous entry"));
        };
        tokens.extend(encode(&rest[..at], false)?);
        let start = tokens.len() as u32;
        tokens.extend(encode(chunk, false)?);
        ranges.push(start..tokens.len() as u32);
        rest = &rest[at + chunk.len()..];
    }
    tokens.extend(encode(rest, false)?);
    tokens.extend(behind);
    if tokens.len() > tokens_max as usize {
        return Err(TextError::TooLong { at_least: tokens.len() });
    }
    Ok((tokens, ranges))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::text::PromptTokenizer;

    fn parse(chunks: Value) -> Result<Vec<NamedChunk>, String> {
        let body = json!({ MEMBER: chunks }).to_string();
        let mut fields = Fields::parse(body.as_bytes()).expect("an object");
        take(&mut fields).map_err(|error| error.message)
    }

    #[test]
    fn chunks_are_ranges_or_texts_and_nothing_else() {
        let both = parse(json!([{"start": 3, "end": 70}, {"text": "a"}]));
        assert_eq!(both, Ok(vec![NamedChunk::Tokens(3..70), NamedChunk::Text("a".into())]));
        assert_eq!(parse(json!(null)), Ok(vec![]));
        for wrong in [
            json!({"text": "a"}),
            json!(["a"]),
            json!([{}]),
            json!([{"text": ""}]),
            json!([{"start": 3}]),
            json!([{"start": 3, "end": 3}]),
            json!([{"start": -1, "end": 3}]),
            json!([{"start": 3, "end": 4, "text": "a"}]),
            json!([{"text": "a", "txt": "b"}]),
            json!(vec![json!({"text": "a"}); CHUNKS_MAX + 1]),
        ] {
            let said = parse(wrong.clone()).expect_err("refused");
            assert!(said.contains(MEMBER), "{wrong}: {said}");
        }
    }

    #[test]
    fn ranges_are_disjoint_in_order_and_within_the_prompt() {
        let check = |chunks: &[Range<u32>]| {
            let chunks: Vec<_> = chunks.iter().cloned().map(NamedChunk::Tokens).collect();
            ranges(&chunks, 100)
        };
        assert_eq!(check(&[0..10, 10..100]), Ok(vec![0..10, 10..100]));
        for wrong in [&[10..20, 19..30][..], &[20..30, 5..6], std::slice::from_ref(&(90..101))] {
            assert!(matches!(check(wrong), Err(TextError::Chunk { .. })), "{wrong:?}");
        }
        let text = [NamedChunk::Text("a".into())];
        assert!(matches!(ranges(&text, 100), Err(TextError::Chunk { .. })));
    }

    #[test]
    fn a_chunk_of_text_has_the_tokens_that_it_has_alone() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/models/tiny-deepseek-v2");
        let (tiny, _) = PromptTokenizer::load(Path::new(path)).expect("the files are there");
        let (one, two) = ("The first document.", " And another one");
        let text = format!("Read these:{one}, then{two}! Compare them.");
        // As another tokenizer would put around every text.
        let frame = Frame { before: vec![0], behind: vec![1] };
        let named = [one, two].map(|text| NamedChunk::Text(text.to_owned()));
        let (tokens, ranges) =
            encode(&text, &named, (true, 1000), Some(&frame), |part, special| {
                tiny.encode_anew(part, special, 1000)
            })
            .expect("tokens");
        for (text, range) in [one, two].into_iter().zip(&ranges) {
            let alone = tiny.encode_anew(text, false, 1000).expect("tokens");
            assert_eq!(tokens[range.start as usize..range.end as usize], alone);
        }
        assert_eq!((tokens[0], tokens[tokens.len() - 1]), (0, 1), "around all of it, and once");
        assert_eq!(tiny.decode(&tokens).expect("text"), text);
        let unknown = encode(&text, &named, (true, 1000), None, |part, special| {
            tiny.encode_anew(part, special, 1000)
        });
        assert!(matches!(unknown, Err(TextError::Chunk { .. })), "{unknown:?}");
        let whole = tiny.encode_anew(&text, true, 1000).expect("tokens");
        let none = encode(&text, &[], (true, 1000), Some(&frame), |part, special| {
            tiny.encode_anew(part, special, 1000)
        })
        .expect("tokens");
        assert_eq!(none, (whole, vec![]));
        let swapped = [named[1].clone(), named[0].clone()];
        let refused = encode(&text, &swapped, (true, 1000), Some(&frame), |part, special| {
            tiny.encode_anew(part, special, 1000)
        });
        assert!(matches!(refused, Err(TextError::Chunk { .. })));
        let long = encode(&text, &named, (true, 3), Some(&frame), |part, special| {
            tiny.encode_anew(part, special, 1000)
        });
        assert!(matches!(long, Err(TextError::TooLong { .. })), "{long:?}");
    }
}
