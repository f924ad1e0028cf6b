//! Requests to `/v1/contexts`: the prompt to keep, and for how long.

use kvasir_proto::COPIES_MAX;
use serde_json::{Map, Value};

use super::chat::take_messages;
use super::completions::{Prompt, take_one_prompt};
use super::error::ApiError;
use super::fields::Fields;

/// How long contexts may be kept, and on how many nodes, from the configuration.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TtlLimits {
    pub default_ms: u64,
    pub ms_max: u64,
    /// On how many nodes, where that is not said.
    pub replicas_default: u8,
}

/// A context to keep, checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ContextRequest {
    pub model: String,
    pub source: Source,
    pub ttl_ms: u64,
    /// On how many nodes it is to be kept.
    pub replicas: u8,
    pub add_special_tokens: Option<bool>,
}

/// What its prompt is made of.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Source {
    Messages { messages: Vec<Value>, template_arguments: Map<String, Value> },
    Prompt(Prompt),
}

impl Source {
    /// The request's name for it.
    pub(crate) fn param(&self) -> &'static str {
        match self {
            Source::Messages { .. } => "messages",
            Source::Prompt(_) => "prompt",
        }
    }
}

impl ContextRequest {
    pub(crate) fn parse(body: &[u8], limits: TtlLimits) -> Result<ContextRequest, ApiError> {
        let mut fields = Fields::parse(body)?;
        let model = match fields.required("model")? {
            Value::String(model) => model,
            other => return Err(fields.wrong_kind("model", "a string", &other)),
        };
        let template_arguments = fields.object("chat_template_kwargs")?;
        let source = match (fields.value("messages"), fields.value("prompt")) {
            (Some(Value::Array(list)), None) => Source::Messages {
                messages: take_messages(list)?,
                template_arguments: template_arguments.unwrap_or_default(),
            },
            (Some(other), None) => return Err(fields.wrong_kind("messages", "a list", &other)),
            (None, Some(_)) if template_arguments.is_some() => {
                let message = "`chat_template_kwargs` requires `messages`.";
                return Err(ApiError::invalid("chat_template_kwargs", message));
            }
            (None, Some(prompt)) => Source::Prompt(take_one_prompt(prompt, &fields)?),
            (Some(_), Some(_)) => {
                let message = "A context has `messages` or a `prompt`, not both.";
                return Err(ApiError::invalid("prompt", message));
            }
            (None, None) => {
                let message = "`messages` or `prompt` is required.";
                return Err(ApiError {
                    code: "missing_required_parameter",
                    ..ApiError::invalid("messages", message)
                });
            }
        };
        let ttl_ms = take_ttl(&mut fields, limits)?.unwrap_or(limits.default_ms);
        let replicas = fields.integer("replicas", 1..=i64::from(COPIES_MAX))?;
        let replicas = replicas.and_then(|replicas| u8::try_from(replicas).ok());
        let replicas = replicas.unwrap_or(limits.replicas_default);
        let add_special_tokens = fields.boolean("add_special_tokens")?;
        fields.finish()?;
        Ok(ContextRequest { model, source, ttl_ms, replicas, add_special_tokens })
    }
}

/// A context's new time, counted from now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExtendRequest {
    pub ttl_ms: u64,
}

impl ExtendRequest {
    pub(crate) fn parse(body: &[u8], limits: TtlLimits) -> Result<ExtendRequest, ApiError> {
        let mut fields = Fields::parse(body)?;
        let ttl_ms = take_ttl(&mut fields, limits)?.ok_or_else(|| ApiError {
            code: "missing_required_parameter",
            ..ApiError::invalid("ttl_seconds", "`ttl_seconds` is required.")
        })?;
        fields.finish()?;
        Ok(ExtendRequest { ttl_ms })
    }
}

fn take_ttl(fields: &mut Fields, limits: TtlLimits) -> Result<Option<u64>, ApiError> {
    let seconds_max = i64::try_from(limits.ms_max / 1_000).unwrap_or(i64::MAX);
    let ttl_s = fields.integer("ttl_seconds", 1..=seconds_max)?;
    Ok(ttl_s.map(|seconds| seconds.unsigned_abs().saturating_mul(1_000)))
}
