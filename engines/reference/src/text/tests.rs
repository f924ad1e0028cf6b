//! Streams of tokens against decoding all of them at once with the tokenizers crate.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use proptest::prelude::*;
use tokenizers::tokenizer::Tokenizer;

use super::vocabulary::VocabularyError;
use super::*;

struct Fixture {
    tokenizer: Tokenizer,
    vocabulary: Arc<Vocabulary>,
}

static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../configs/models/tiny-deepseek-v2/tokenizer.json");
    let tokenizer = Tokenizer::from_file(path).expect("the default model's tokenizer");
    let vocabulary = Arc::new(Vocabulary::of(&tokenizer, 1024).expect("a byte-level tokenizer"));
    Fixture { tokenizer, vocabulary }
});

fn stream(keep_special_tokens: bool, stop: &[&str], include_in_output: bool) -> TextStream {
    let strings = stop.iter().map(|&text| text.to_owned()).collect();
    let stop = StopStrings { strings, include_in_output };
    TextStream::new(Arc::clone(&FIXTURE.vocabulary), TextOptions { stop, keep_special_tokens })
}

/// All pieces, the last one from `finish`, and the stop string.
fn run(mut text: TextStream, tokens: &[u32]) -> (Vec<String>, Option<String>) {
    let mut pieces = Vec::new();
    for &token in tokens {
        let piece = text.push(token);
        pieces.push(piece.text);
        if piece.stopped_by.is_some() {
            return (pieces, piece.stopped_by);
        }
    }
    let piece = text.finish();
    pieces.push(piece.text);
    (pieces, piece.stopped_by)
}

/// The token of a single byte.
fn byte(byte: u8) -> u32 {
    (0..1024)
        .find(|&id| FIXTURE.vocabulary.bytes(id) == [byte] && !FIXTURE.vocabulary.is_special(id))
        .expect("byte-level vocabularies have every byte")
}

fn bytes(text: &[u8]) -> Vec<u32> {
    text.iter().map(|&b| byte(b)).collect()
}

proptest! {
    #[test]
    fn pieces_join_to_the_decoding_of_the_whole(
        tokens in prop::collection::vec(0u32..1024, 0..60),
        keep in any::<bool>(),
    ) {
        let whole = FIXTURE.tokenizer.decode(&tokens, !keep).expect("decoding");
        let (pieces, _) = run(stream(keep, &[], false), &tokens);
        prop_assert_eq!(pieces.concat(), whole);
    }

    #[test]
    fn pieces_of_single_bytes_join_to_the_decoding_of_the_whole(
        text in prop::collection::vec(
            prop_oneof![Just(0xF0u8), Just(0x9F), Just(0x98), Just(0x80), Just(0xE2), Just(0x82),
                Just(0xED), Just(0xA0), Just(0xC3), Just(0xFF), Just(b'a')],
            0..40,
        ),
    ) {
        let tokens = bytes(&text);
        let whole = FIXTURE.tokenizer.decode(&tokens, true).expect("decoding");
        let (pieces, _) = run(stream(false, &[], false), &tokens);
        prop_assert_eq!(pieces.concat(), whole);
    }

    #[test]
    fn every_prefix_streams_to_a_prefix_of_its_decoding_and_holds_back_one_character_at_most(
        tokens in prop::collection::vec(0u32..1024, 1..40),
    ) {
        let mut text = stream(false, &[], false);
        let mut so_far = String::new();
        for end in 1..=tokens.len() {
            so_far.push_str(&text.push(tokens[end - 1]).text);
            let whole = FIXTURE.tokenizer.decode(&tokens[..end], true).expect("decoding");
            let rest = whole.strip_prefix(so_far.as_str()).expect("a prefix");
            prop_assert!(rest.is_empty() || rest == "\u{FFFD}", "held back {rest:?}");
        }
    }

    #[test]
    fn a_stop_string_cuts_at_the_same_place_however_the_text_is_cut(
        text in "[ab]{0,24}",
        cuts in prop::collection::vec(1usize..4, 24),
        stops in prop::collection::vec("[ab]{1,4}", 1..4),
        include in any::<bool>(),
    ) {
        let stop = StopStrings { strings: stops.clone(), include_in_output: include };
        let mut matcher = StopMatcher::new(stop);
        let mut out = String::new();
        let mut stopped_by = None;
        let mut rest = text.as_str();
        for cut in cuts {
            let (piece, after) = rest.split_at(cut.min(rest.len()));
            rest = after;
            let piece = matcher.push(piece);
            out.push_str(&piece.text);
            stopped_by = piece.stopped_by;
            if stopped_by.is_some() { break; }
        }
        if stopped_by.is_none() { out.push_str(&matcher.take_held()); }
        // Letter by letter: the first end at which any stop string stands, the longest of them.
        let expected = (1..=text.len()).find_map(|end| {
            stops.iter().filter(|s| text[..end].ends_with(s.as_str())).max_by_key(|s| s.len())
                .map(|s| (end, s.clone()))
        });
        match expected {
            None => { prop_assert_eq!(out, text); prop_assert_eq!(stopped_by, None); }
            Some((end, stop)) => {
                let kept = if include { end } else { end - stop.len() };
                prop_assert_eq!(out, &text[..kept]);
                prop_assert_eq!(stopped_by, Some(stop));
            }
        }
    }
}

#[test]
fn an_incomplete_character_is_held_back_until_it_is_complete_or_wrong() {
    let pieces = |text: &[u8]| run(stream(false, &[], false), &bytes(text)).0;
    assert_eq!(pieces("😀".as_bytes()), ["", "", "", "😀", ""]);
    assert_eq!(pieces(b"\xF0\x9Fa"), ["", "", "\u{FFFD}a", ""]);
    assert_eq!(pieces(b"\xF0\x9F"), ["", "", "\u{FFFD}"]);
    assert_eq!(pieces(b"\x80\x80b"), ["\u{FFFD}", "\u{FFFD}", "b", ""]);
}

#[test]
fn a_genuine_replacement_character_is_text_like_any_other() {
    let tokens = bytes("a\u{FFFD}b".as_bytes());
    let (pieces, _) = run(stream(false, &[], false), &tokens);
    assert_eq!(pieces, ["a", "", "", "\u{FFFD}", "b", ""]);
}

#[test]
fn special_tokens_have_text_only_when_asked_for() {
    let tokens = [byte(b'a'), 2, byte(b'b')];
    assert_eq!(run(stream(false, &[], false), &tokens).0.concat(), "ab");
    assert_eq!(run(stream(true, &[], false), &tokens).0.concat(), "a<|user|>b");
}

#[test]
fn a_stop_string_is_found_across_tokens_and_its_beginning_is_held_back() {
    let tokens = bytes(b"12STOP34");
    let (pieces, stopped_by) = run(stream(false, &["STOP"], false), &tokens);
    assert_eq!(pieces, ["1", "2", "", "", "", ""]);
    assert_eq!(stopped_by.as_deref(), Some("STOP"));
    let (pieces, _) = run(stream(false, &["STOP"], true), &tokens);
    assert_eq!(pieces.concat(), "12STOP");
}

#[test]
fn a_beginning_that_comes_to_nothing_is_given_out() {
    let (pieces, stopped_by) = run(stream(false, &["STOP", "TOW"], false), &bytes(b"STOX STO"));
    assert_eq!(pieces, ["", "", "", "STOX", " ", "", "", "", "STO"]);
    assert_eq!(stopped_by, None);
}

#[test]
fn the_replacement_of_a_last_incomplete_character_can_complete_a_stop_string() {
    let (pieces, stopped_by) = run(stream(false, &["x\u{FFFD}"], false), &bytes(b"ax\xE2"));
    assert_eq!(pieces.concat(), "a");
    assert_eq!(stopped_by.as_deref(), Some("x\u{FFFD}"));
}

#[test]
fn a_tokenizer_that_this_engine_would_misread_is_refused() {
    let check = |decoder: &str, vocab: u32| {
        let json = format!(
            r#"{{"version":"1.0","added_tokens":[],"decoder":{decoder},"model":{{"type":"BPE",
               "vocab":{{"a":0,"b":1}},"merges":[]}}}}"#
        );
        Vocabulary::of(&json.parse().expect("a tokenizer"), vocab).map(|_| ())
    };
    let byte_level =
        r#"{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#;
    assert!(check(byte_level, 2).is_ok());
    assert!(matches!(check(byte_level, 1), Err(VocabularyError::BeyondModel { id: 1, vocab: 1 })));
    assert!(matches!(check("null", 2), Err(VocabularyError::Decoder)));
    let fallback = r#"{"type":"ByteFallback"}"#;
    assert!(matches!(check(fallback, 2), Err(VocabularyError::Decoder)));
}
