//! Requests to `/v1/completions`.

use serde_json::Value;

use super::common::{Common, Limits, TOP_LOGPROBS_MAX, token_id};
use super::error::ApiError;
use super::fields::{Fields, neutral};

/// One prompt as a client may give it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

impl Prompt {
    /// How many ids it has, or more than any number when they have to be made.
    pub(crate) fn ids(&self) -> usize {
        match self {
            Prompt::Text(_) => usize::MAX / 2,
            Prompt::Ids(ids) => ids.len(),
        }
    }
}

/// A completion request, checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct CompletionRequest {
    pub common: Common,
    /// At least one; prompts times `n` are within the limit.
    pub prompts: Vec<Prompt>,
    /// The prompt's text stands before the answer's.
    pub echo: bool,
}

impl CompletionRequest {
    pub(crate) fn parse(body: &[u8], limits: &Limits) -> Result<CompletionRequest, ApiError> {
        let mut fields = Fields::parse(body)?;
        let mut common = Common::take(&mut fields, limits)?;
        let prompt = fields.required("prompt")?;
        let prompts = take_prompts(prompt, &fields)?;
        let choices = prompts.len().saturating_mul(common.n as usize);
        if choices > limits.choices_per_request_max {
            let max = limits.choices_per_request_max;
            let message =
                format!("The number of prompts times `n` must be at most {max}, not {choices}.");
            return Err(ApiError::invalid("prompt", message));
        }
        if let Some(top) = fields.integer("logprobs", 0..=TOP_LOGPROBS_MAX)? {
            common.sampling.logprobs = true;
            common.sampling.top_logprobs = top as u32;
        }
        if !common.chunks.is_empty() && prompts.len() > 1 {
            let message = "A request with reusable chunks must have exactly one prompt.";
            return Err(ApiError::invalid(super::chunks::MEMBER, message));
        }
        let echo = fields.flag("echo")?;
        if echo && common.sampling.logprobs {
            let message = "`echo` with `logprobs` is not supported.";
            return Err(ApiError::unsupported("echo", message));
        }
        fields.only_neutral("suffix", neutral::empty)?;
        fields.only_neutral("response_format", |format| format["type"] == "text")?;
        fields.finish()?;
        Ok(CompletionRequest { common, prompts, echo })
    }
}

fn take_prompts(prompt: Value, fields: &Fields) -> Result<Vec<Prompt>, ApiError> {
    let list = match prompt {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(list) => list,
        other => return Err(fields.wrong_kind("prompt", "a string or a list", &other)),
    };
    match list.first() {
        None => Err(ApiError::invalid("prompt", "`prompt` must not be empty.")),
        Some(Value::Number(_)) => Ok(vec![Prompt::Ids(ids("prompt", &list)?)]),
        Some(_) => list.into_iter().enumerate().map(|(index, one)| take_one(index, one)).collect(),
    }
}

/// A prompt that is alone: text or token ids.
pub(super) fn take_one_prompt(prompt: Value, fields: &Fields) -> Result<Prompt, ApiError> {
    match prompt {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) => Ok(Prompt::Ids(ids("prompt", &list)?)),
        other => Err(fields.wrong_kind("prompt", "a string or a list of token ids", &other)),
    }
}

fn take_one(index: usize, prompt: Value) -> Result<Prompt, ApiError> {
    let name = format!("prompt[{index}]");
    match prompt {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) => Ok(Prompt::Ids(ids(&name, &list)?)),
        _ => {
            let message = "`prompt` must be a string, a list of strings, a list of token ids or a list of such lists.";
            Err(ApiError { code: "invalid_type", ..ApiError::invalid(&name, message) })
        }
    }
}

fn ids(name: &str, list: &[Value]) -> Result<Vec<u32>, ApiError> {
    list.iter().map(|value| token_id(name, value)).collect()
}
