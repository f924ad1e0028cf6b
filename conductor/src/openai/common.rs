//! What both endpoints share: the parameters of sampling, streaming and counting, with the limits
//! and the defaults of the OpenAI API and the extensions of vLLM that engines here can honour.

use std::sync::Arc;

use kvasir_proto::v1;
use serde_json::Value;

use super::chunks::{self, NamedChunk};
use super::error::ApiError;
use super::fields::{Fields, kind_of, neutral};

/// Bounds that come from the configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    pub choices_per_request_max: usize,
    pub stop_strings_max: usize,
}

/// Beyond it a stop string is no stop string; it also bounds what an engine holds back.
const STOP_STRING_BYTES_MAX: usize = 1024;
const STOP_TOKEN_IDS_MAX: usize = 64;
/// A tenant's name and a salt of its own have room in it, should another conductor be asked.
const CACHE_SALT_BYTES_MAX: usize = 1024;
/// Logits are divided by it; less would leave the range of f32.
const TEMPERATURE_MIN: f32 = 1e-5;
pub(crate) const TOP_LOGPROBS_MAX: i64 = 20;

/// The parameters that both endpoints have.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Common {
    pub model: String,
    pub stream: bool,
    /// Streams end with a chunk that carries the usage.
    pub include_usage: bool,
    /// Answers to each prompt.
    pub n: u32,
    /// Absent when the client leaves it to the endpoint's default.
    pub max_tokens: Option<u32>,
    /// Drawn by the conductor when absent.
    pub seed: Option<u64>,
    /// `max_tokens` and `seed` are filled in for each choice.
    pub sampling: v1::SamplingParams,
    pub return_token_ids: bool,
    pub add_special_tokens: Option<bool>,
    /// Parts of the prompt that are attended as if each stood alone.
    pub chunks: Vec<NamedChunk>,
    /// Keeps its blocks apart from those of its tenant's other requests, as vLLM's does.
    pub cache_salt: Option<String>,
}

impl Common {
    /// Takes them out of the request.
    pub(crate) fn take(fields: &mut Fields, limits: &Limits) -> Result<Common, ApiError> {
        let model = match fields.required("model")? {
            Value::String(model) => model,
            other => return Err(fields.wrong_kind("model", "a string", &other)),
        };
        let stream = fields.flag("stream")?;
        let include_usage = take_stream_options(fields, stream)?;
        let n_max = i64::try_from(limits.choices_per_request_max).unwrap_or(i64::MAX);
        let n = fields.integer("n", 1..=n_max)?.unwrap_or(1) as u32;
        let max_tokens = take_max_tokens(fields)?;
        let seed = take_seed(fields)?;
        let sampling = take_sampling(fields, limits)?;
        take_neutral(fields, n, max_tokens, &sampling)?;
        let return_token_ids = fields.flag("return_token_ids")?;
        let add_special_tokens = fields.boolean("add_special_tokens")?;
        let chunks = chunks::take(fields)?;
        let cache_salt = take_cache_salt(fields)?;
        fields.ignore(&[
            "user",
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "request_id",
            "spaces_between_special_tokens",
        ]);
        Ok(Common {
            model,
            stream,
            include_usage,
            n,
            max_tokens,
            seed,
            sampling,
            return_token_ids,
            add_special_tokens,
            chunks,
            cache_salt,
        })
    }
}

pub(crate) fn take_cache_salt(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let salt = fields.string("cache_salt")?;
    if salt.as_ref().is_some_and(|salt| salt.is_empty() || salt.len() > CACHE_SALT_BYTES_MAX) {
        let message = format!("`cache_salt` must have 1 to {CACHE_SALT_BYTES_MAX} bytes.");
        return Err(ApiError::invalid("cache_salt", message));
    }
    Ok(salt)
}

/// What blocks are salted with: the tenant's part has no such character, so that nobody meets another one's.
pub(crate) fn salted(tenant_salt: &Arc<str>, cache_salt: Option<&str>) -> Arc<str> {
    match cache_salt {
        None => Arc::clone(tenant_salt),
        Some(own) => format!("{tenant_salt}\0{own}").into(),
    }
}

/// Only its 64 bits matter: any integer is a seed, and below zero it wraps.
pub(crate) fn take_seed(fields: &mut Fields) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.value("seed") else { return Ok(None) };
    let seed = value.as_u64().or_else(|| value.as_i64().map(|seed| seed as u64));
    seed.map(Some).ok_or_else(|| fields.wrong_kind("seed", "a 64-bit integer", &value))
}

fn take_stream_options(fields: &mut Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok(false) };
    if !stream {
        let message = "`stream_options` is only allowed when `stream` is true.";
        return Err(ApiError::invalid("stream_options", message));
    }
    let mut options = Fields::nested(options, "stream_options");
    let include_usage = options.flag("include_usage")?;
    options.ignore(&["include_obfuscation"]);
    options.only_neutral("continuous_usage_stats", neutral::empty)?;
    options.finish()?;
    Ok(include_usage)
}

/// `max_completion_tokens` is the newer name; both may be there when they agree.
fn take_max_tokens(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let range = || 1..=i64::from(u32::MAX);
    let old = fields.integer("max_tokens", range())?;
    let new = fields.integer("max_completion_tokens", range())?;
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(ApiError::invalid(
            "max_completion_tokens",
            "`max_tokens` and `max_completion_tokens` contradict each other.",
        )),
        _ => Ok(new.or(old).map(|tokens| tokens as u32)),
    }
}

pub(crate) fn take_sampling(
    fields: &mut Fields,
    limits: &Limits,
) -> Result<v1::SamplingParams, ApiError> {
    let temperature = fields.number("temperature", 0.0..=2.0)?.unwrap_or(1.0);
    if temperature > 0.0 && temperature < TEMPERATURE_MIN {
        let message = format!("`temperature` must be 0 or at least {TEMPERATURE_MIN}.");
        return Err(ApiError::invalid("temperature", message));
    }
    let top_p = fields.number("top_p", 0.0..=1.0)?.unwrap_or(1.0);
    if top_p <= 0.0 {
        return Err(ApiError::invalid("top_p", "`top_p` must be greater than 0."));
    }
    // -1 is vLLM's way to say "off".
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0).max(0) as u32;
    let frequency_penalty = fields.number("frequency_penalty", -2.0..=2.0)?.unwrap_or(0.0);
    let presence_penalty = fields.number("presence_penalty", -2.0..=2.0)?.unwrap_or(0.0);
    Ok(v1::SamplingParams {
        temperature,
        top_p,
        top_k,
        stop: take_stop(fields, limits)?,
        ignore_eos: fields.flag("ignore_eos")?,
        keep_special_tokens: !fields.boolean("skip_special_tokens")?.unwrap_or(true),
        stop_token_ids: take_stop_token_ids(fields)?,
        frequency_penalty,
        presence_penalty,
        include_stop_str_in_output: fields.flag("include_stop_str_in_output")?,
        ..v1::SamplingParams::default()
    })
}

fn take_stop(fields: &mut Fields, limits: &Limits) -> Result<Vec<String>, ApiError> {
    let list = match fields.value("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(one)) => vec![Value::String(one)],
        Some(Value::Array(list)) => list,
        Some(other) => {
            return Err(fields.wrong_kind("stop", "a string or a list of strings", &other));
        }
    };
    let max = limits.stop_strings_max;
    if list.len() > max {
        let message = format!("`stop` may have at most {max} strings, not {}.", list.len());
        return Err(ApiError::invalid("stop", message));
    }
    let check = |value: Value| match value {
        Value::String(text) if text.is_empty() => {
            Err(ApiError::invalid("stop", "A stop string must not be empty."))
        }
        Value::String(text) if text.len() > STOP_STRING_BYTES_MAX => {
            let message = format!("A stop string may have at most {STOP_STRING_BYTES_MAX} bytes.");
            Err(ApiError::invalid("stop", message))
        }
        Value::String(text) => Ok(text),
        other => Err(fields.wrong_kind("stop", "a string or a list of strings", &other)),
    };
    list.into_iter().map(check).collect()
}

fn take_stop_token_ids(fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    match fields.value("stop_token_ids") {
        None => Ok(Vec::new()),
        Some(Value::Array(list)) if list.len() > STOP_TOKEN_IDS_MAX => {
            let message = format!("`stop_token_ids` may have at most {STOP_TOKEN_IDS_MAX} ids.");
            Err(ApiError::invalid("stop_token_ids", message))
        }
        Some(Value::Array(list)) => {
            list.iter().map(|value| token_id("stop_token_ids", value)).collect()
        }
        Some(other) => Err(fields.wrong_kind("stop_token_ids", "a list of token ids", &other)),
    }
}

/// One token id of a list.
pub(crate) fn token_id(param: &str, value: &Value) -> Result<u32, ApiError> {
    value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
        let got = match value {
            Value::Number(number) => number.to_string(),
            other => kind_of(other).to_owned(),
        };
        ApiError::invalid(param, format!("`{param}` must hold token ids, not {got}."))
    })
}

/// What would change the answer and cannot be honoured: only its neutral value may be there.
fn take_neutral(
    fields: &mut Fields,
    n: u32,
    max_tokens: Option<u32>,
    sampling: &v1::SamplingParams,
) -> Result<(), ApiError> {
    for empty in [
        "logit_bias",
        "use_beam_search",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "bad_words",
        "allowed_token_ids",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "return_tokens_as_token_ids",
        "kv_transfer_params",
        "logits_processors",
    ] {
        fields.only_neutral(empty, neutral::empty)?;
    }
    for (number, neutral) in
        [("min_p", 0.0), ("repetition_penalty", 1.0), ("length_penalty", 1.0), ("priority", 0.0)]
    {
        fields.only_neutral(number, neutral::number(neutral))?;
    }
    fields.only_neutral("best_of", neutral::number(f64::from(n)))?;
    // Load generators send it with `ignore_eos`: then every answer has `max_tokens` anyway.
    let endless = sampling.ignore_eos && sampling.stop.is_empty();
    let endless = endless && sampling.stop_token_ids.is_empty();
    fields.only_neutral("min_tokens", |value| {
        let min = value.as_u64();
        min == Some(0)
            || (endless && min.is_some_and(|min| min <= u64::from(max_tokens.unwrap_or(0))))
    })
}
