//! What the reference checkpoints must generate, computed by the transformers library (see
//! `tests/data/deepseek_v2`).

use std::path::{Path, PathBuf};

use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    Plain,
    YarnQlora,
}

#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub prompt: Vec<u32>,
    pub greedy: Vec<u32>,
}

/// One cached row, and what a block of 64 of them takes in float32 over the 3 layers of both
/// variants.
pub(crate) const ROW_VALUES: usize = 576;
pub(crate) const BLOCK_TOKENS: usize = 64;
pub(crate) const BLOCK_BYTES: usize = BLOCK_TOKENS * ROW_VALUES * 4 * 3;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

impl Variant {
    pub(crate) fn model(self) -> PathBuf {
        match self {
            Variant::Plain => root().join("configs/models/tiny-deepseek-v2"),
            Variant::YarnQlora => root().join("tests/data/deepseek_v2/yarn_qlora/model"),
        }
    }

    pub(crate) fn cases(self) -> Vec<Case> {
        let name = match self {
            Variant::Plain => "plain",
            Variant::YarnQlora => "yarn_qlora",
        };
        let path = root().join("tests/data/deepseek_v2").join(name).join("expected.json");
        let text = std::fs::read_to_string(path).expect("the vectors are part of the repository");
        let file: Value = serde_json::from_str(&text).expect("they are JSON");
        let cases = file["cases"].as_array().expect("a list").iter();
        cases
            .map(|case| Case { prompt: ids(&case["prompt"]), greedy: ids(&case["greedy"]) })
            .collect()
    }

    /// The longest prompt: several blocks and chunks of every size.
    pub(crate) fn longest(self) -> Case {
        let cases = self.cases().into_iter();
        cases.max_by_key(|case| case.prompt.len()).expect("there are cases")
    }
}

impl Case {
    pub(crate) fn prompt_pages(&self) -> usize {
        self.prompt.len().div_ceil(BLOCK_TOKENS)
    }
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().into_iter().flatten();
    ids.filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}
