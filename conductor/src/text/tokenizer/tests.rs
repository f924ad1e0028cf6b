//! Tokens with and without a memo, of tokenizers that make it hard.

use prometheus::Registry;
use proptest::prelude::*;

use super::*;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/models/tiny-deepseek-v2");

fn tiny() -> PromptTokenizer {
    PromptTokenizer::load(Path::new(TINY)).expect("the files are there").0
}

fn memo(bytes: u64) -> Memo {
    Memo::new(bytes, &Registry::new()).expect("a new registry")
}

fn with(memo: &Memo) -> Remembered<'_> {
    Remembered { memo, model: "tiny", salt: b"" }
}

/// A tokenizer that does something else at the beginning of a text, that strips and normalizes, and that puts
/// tokens before and behind every text. Its added tokens overlap.
fn peculiar(single_word: bool) -> PromptTokenizer {
    let added = |id: u32, content: &str, (lstrip, rstrip, normalized): (bool, bool, bool)| {
        serde_json::json!({
            "id": id, "content": content, "single_word": single_word && id == 103, "lstrip": lstrip,
            "rstrip": rstrip, "normalized": normalized, "special": true
        })
    };
    let mut vocab: serde_json::Map<String, Value> =
        (' '..='~').zip(0..).map(|(c, id)| (c.to_string(), (id as u32).into())).collect();
    vocab.insert("\u{2581}".to_owned(), 95.into());
    vocab.insert("\u{2581}a".to_owned(), 96.into());
    vocab.insert("<unk>".to_owned(), 97.into());
    let plain = (false, false, false);
    let file = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            added(100, "<s>", plain), added(101, "</s>", plain), added(102, "<s><s>", plain),
            added(103, "<l>", (true, false, false)), added(104, "<r>", (false, true, false)),
            added(105, "<n>", (false, false, true)), added(106, " <w>", plain),
        ],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {
            "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "</s>", "type_id": 0}}
            ],
            "pair": [
                {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
            ],
            "special_tokens": {
                "<s>": {"id": "<s>", "ids": [100], "tokens": ["<s>"]},
                "</s>": {"id": "</s>", "ids": [101], "tokens": ["</s>"]}
            }
        },
        "decoder": null,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "fuse_unk": false,
            "byte_fallback": false, "vocab": vocab, "merges": [["\u{2581}", "a"]]
        }
    });
    let directory = tempfile::tempdir().expect("a folder");
    std::fs::write(directory.path().join("tokenizer.json"), file.to_string()).expect("written");
    PromptTokenizer::load(directory.path()).expect("a tokenizer").0
}

/// What texts are made of: words that are long enough for texts to be cut, and what may be cut at.
const PARTS: [&str; 14] = [
    "<s>",
    "</s>",
    "<l>",
    "<r>",
    "<n>",
    " <w>",
    " ",
    "\n",
    "a",
    "<",
    "<|user|>",
    "<|assistant|>",
    "Some words, so many that a text of a few of them is longer than what is not worth a look at the memo. ",
    "Another text; it is as long as that one and of other letters, with \u{e9}\u{4e16}\u{1f600} in the midst of it.",
];

proptest! {
    #[test]
    fn what_is_remembered_is_what_would_be_made(
        texts in prop::collection::vec(prop::collection::vec(0..PARTS.len(), 1..30), 1..6),
        add_special_tokens: bool,
    ) {
        let memo = memo(1 << 20);
        for (model, tokenizer) in
            [("tiny", tiny()), ("peculiar", peculiar(false)), ("uncut", peculiar(true))]
        {
            // Each text goes on where the last ended, as conversations do.
            let mut text = String::new();
            for parts in &texts {
                text.extend(parts.iter().map(|part| PARTS[*part]));
                let whole = tokenizer.tokens(&text, add_special_tokens).expect("tokens");
                for _ in 0..2 {
                    let remembered = Remembered { model, ..with(&memo) };
                    let tokens = tokenizer.encode(&text, add_special_tokens, 1 << 20, remembered);
                    prop_assert_eq!(tokens.as_ref(), Ok(&whole), "{:?}", text);
                }
            }
        }
    }
}

#[test]
fn a_conversation_is_tokenized_once() {
    let (tiny, memo) = (tiny(), memo(1 << 20));
    let turn = |n: usize| format!("<|user|>{}<|assistant|>{}", PARTS[12].repeat(4), n);
    let mut text = PARTS[13].repeat(20);
    let mut tokenized = 0;
    for n in 0..10 {
        text += &turn(n);
        let tokens = tiny.encode(&text, true, 1 << 20, with(&memo)).expect("tokens");
        assert_eq!(tokens, tiny.tokens(&text, true).expect("tokens"));
        let (before, now) = (tokenized, memo.counted("miss"));
        // The last piece ends where the text does.
        assert!(n == 0 || now - before <= 2 * turn(n).len() as u64, "turn {n}: {before} to {now}");
        tokenized = now;
    }
    assert!(memo.counted("hit") > 5 * tokenized);

    // Somebody else's are not found, and nothing is found where nothing is kept.
    let other = Remembered { memo: &memo, model: "tiny", salt: b"other" };
    let remembered = memo.counted("hit");
    tiny.encode(&text, true, 1 << 20, other).expect("tokens");
    assert_eq!(memo.counted("hit"), remembered);
    let none = Memo::none();
    for _ in 0..2 {
        tiny.encode(&text, true, 1 << 20, with(&none)).expect("tokens");
    }
    assert_eq!((none.counted("hit"), none.counted("miss")), (0, 2 * text.len() as u64));
}

#[test]
fn what_is_put_around_texts_is_known() {
    let frame = Frame { before: vec![100], behind: vec![101] };
    assert_eq!(peculiar(false).frame, Some(frame));
    assert_eq!(tiny().frame, Some(Frame::NONE));
    assert!(peculiar(false).cuts.is_some());
    assert!(peculiar(true).cuts.is_none(), "whether it counts depends on what lies around it");
}

#[test]
fn text_that_cannot_fit_is_refused_unread_and_other_text_never() {
    let (tiny, memo) = (tiny(), Memo::none());
    let bytes = tiny.token_bytes_max.expect("byte-level");
    let long = "a".repeat(bytes * 4);
    assert!(tiny.encode(&long, true, 4, with(&memo)).is_ok_and(|ids| ids.len() > 4), "it is read");
    let refused = tiny.encode(&(long + "a"), true, 4, with(&memo));
    assert_eq!(refused, Err(TextError::TooLong { at_least: 5 }));
    // The longest token there is fits into one.
    let vocab = tiny.tokenizer.get_vocab(true);
    let longest = vocab.iter().max_by_key(|(text, _)| text.len()).expect("tokens");
    let text = tiny.tokenizer.decode(&[*longest.1], false).expect("decodes");
    assert_eq!(tiny.encode(&text, true, 1, with(&memo)), Ok(vec![*longest.1]));
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
