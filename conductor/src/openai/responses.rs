//! Requests to `/v1/responses`: a chat in other words. Nothing is stored: what would need the answers
//! of before is refused, and so is to be asked to keep one.

use serde_json::{Map, Value};

use super::chat::{ChatRequest, MESSAGES_MAX, ROLES};
use super::common::{Common, Limits, take_cache_salt, take_sampling, take_seed};
use super::error::{ApiError, shown};
use super::fields::{Fields, kind_of, neutral};

/// A request for a response, checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ResponseRequest {
    pub chat: ChatRequest,
    pub echo: Echo,
}

/// What a response repeats of its request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Echo {
    pub instructions: Option<String>,
    pub metadata: Map<String, Value>,
    pub user: Option<String>,
    pub max_output_tokens: Option<u32>,
    pub temperature: f32,
    pub top_p: f32,
}

/// As OpenAI's: a response repeats them in each of its events that has it whole.
const METADATA_MAX: usize = 16;
const METADATA_NAME_CHARS_MAX: usize = 64;
const METADATA_VALUE_CHARS_MAX: usize = 512;
const USER_CHARS_MAX: usize = 512;

impl ResponseRequest {
    pub(super) fn parse(body: &[u8], limits: &Limits) -> Result<ResponseRequest, ApiError> {
        let mut fields = Fields::parse(body)?;
        let model = match fields.required("model")? {
            Value::String(model) => model,
            other => return Err(fields.wrong_kind("model", "a string", &other)),
        };
        let stream = fields.flag("stream")?;
        take_stream_options(&mut fields, stream)?;
        let max_output_tokens = fields.integer("max_output_tokens", 1..=i64::from(u32::MAX))?;
        let max_output_tokens = max_output_tokens.map(|tokens| tokens as u32);
        let seed = take_seed(&mut fields)?;
        let sampling = take_sampling(&mut fields, limits)?;
        let instructions = fields.string("instructions")?;
        let mut messages = Vec::new();
        messages.extend(instructions.as_ref().map(|text| message("system", text)));
        match fields.required("input")? {
            Value::String(text) => messages.push(message("user", &text)),
            Value::Array(items) => messages.extend(take_items(items)?),
            other => return Err(fields.wrong_kind("input", "a string or a list", &other)),
        }
        let metadata = take_metadata(&mut fields)?;
        let user = take_user(&mut fields)?;
        let cache_salt = take_cache_salt(&mut fields)?;
        take_unsupported(&mut fields)?;
        fields.finish()?;
        let (temperature, top_p) = (sampling.temperature, sampling.top_p);
        let common = Common {
            model,
            stream,
            include_usage: false,
            n: 1,
            max_tokens: max_output_tokens,
            seed,
            sampling,
            return_token_ids: false,
            add_special_tokens: None,
            chunks: Vec::new(),
            cache_salt,
        };
        let chat = ChatRequest {
            common,
            messages,
            add_generation_prompt: true,
            template_arguments: Map::new(),
        };
        let echo = Echo { instructions, metadata, user, max_output_tokens, temperature, top_p };
        Ok(ResponseRequest { chat, echo })
    }
}

fn message(role: &str, content: &str) -> Value {
    serde_json::json!({"role": role, "content": content})
}

fn take_stream_options(fields: &mut Fields, stream: bool) -> Result<(), ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok(()) };
    if !stream {
        let message = "`stream_options` is only allowed when `stream` is true.";
        return Err(ApiError::invalid("stream_options", message));
    }
    let mut options = Fields::nested(options, "stream_options");
    options.ignore(&["include_obfuscation"]);
    options.finish()
}

fn take_metadata(fields: &mut Fields) -> Result<Map<String, Value>, ApiError> {
    let metadata = fields.object("metadata")?.unwrap_or_default();
    if metadata.len() > METADATA_MAX || !metadata.values().all(Value::is_string) {
        let message = format!("`metadata` must have at most {METADATA_MAX} members, all strings.");
        return Err(ApiError::invalid("metadata", message));
    }
    let names_fit = metadata.keys().all(|name| fits(name, METADATA_NAME_CHARS_MAX));
    let mut values = metadata.values().filter_map(Value::as_str);
    if !names_fit || !values.all(|value| fits(value, METADATA_VALUE_CHARS_MAX)) {
        let message = format!(
            "`metadata` may have names of up to {METADATA_NAME_CHARS_MAX} and values of up to {METADATA_VALUE_CHARS_MAX} characters."
        );
        return Err(ApiError::invalid("metadata", message));
    }
    Ok(metadata)
}

fn take_user(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let user = fields.string("user")?;
    if user.as_ref().is_some_and(|user| !fits(user, USER_CHARS_MAX)) {
        let message = format!("`user` may have at most {USER_CHARS_MAX} characters.");
        return Err(ApiError::invalid("user", message));
    }
    Ok(user)
}

fn fits(text: &str, chars_max: usize) -> bool {
    text.chars().nth(chars_max).is_none()
}

fn take_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    if fields.flag("store")? {
        let message = "Responses are not stored: omit `store` or set it to false.";
        return Err(ApiError::unsupported("store", message));
    }
    for needs_storage in ["previous_response_id", "conversation", "background", "prompt"] {
        fields.only_neutral(needs_storage, neutral::empty)?;
    }
    for empty in ["tools", "include", "context_management", "moderation"] {
        fields.only_neutral(empty, neutral::empty)?;
    }
    fields.only_neutral("tool_choice", neutral::text(&["none", "auto"]))?;
    fields.only_neutral("truncation", neutral::text(&["disabled"]))?;
    fields.only_neutral("top_logprobs", neutral::number(0.0))?;
    fields.ignore(&[
        "parallel_tool_calls",
        "max_tool_calls",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    ]);
    if let Some(reasoning) = fields.object("reasoning")? {
        let mut reasoning = Fields::nested(reasoning, "reasoning");
        reasoning.only_neutral("effort", neutral::text(&["none"]))?;
        for unsupported in ["summary", "generate_summary"] {
            reasoning.only_neutral(unsupported, neutral::empty)?;
        }
        reasoning.finish()?;
    }
    if let Some(text) = fields.object("text")? {
        let mut text = Fields::nested(text, "text");
        text.only_neutral("format", |format| {
            format
                .as_object()
                .is_some_and(|map| map.len() == 1 && map.get("type") == Some(&"text".into()))
        })?;
        text.only_neutral("verbosity", neutral::text(&["medium"]))?;
        text.finish()?;
    }
    Ok(())
}

fn take_items(items: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    if items.is_empty() {
        return Err(ApiError::invalid("input", "`input` must not be empty."));
    }
    if items.len() > MESSAGES_MAX {
        let message = format!("`input` may have at most {MESSAGES_MAX} items.");
        return Err(ApiError::invalid("input", message));
    }
    let one = |(index, item)| take_item(item, &format!("input[{index}]"));
    items.into_iter().enumerate().map(one).collect()
}

/// A message, as a client writes it or as an answer had it.
fn take_item(item: Value, name: &str) -> Result<Value, ApiError> {
    let mut fields = nested(item, name)?;
    let kind = fields.string("type")?.unwrap_or_else(|| "message".to_owned());
    if kind != "message" {
        let name = fields.name("type");
        let message = format!("`{name}` must be \"message\": {:?} is not supported.", shown(&kind));
        return Err(ApiError::unsupported(&name, message));
    }
    let role_name = fields.name("role");
    let role = match fields.required("role")? {
        Value::String(role) => role,
        other => return Err(fields.wrong_kind("role", "a string", &other)),
    };
    if !ROLES.contains(&role.as_str()) {
        let message = format!("`{role_name}` must be one of {ROLES:?}, not {:?}.", shown(&role));
        return Err(ApiError::invalid(&role_name, message));
    }
    let content_name = fields.name("content");
    let content = match fields.required("content")? {
        Value::String(text) => text,
        Value::Array(parts) => {
            let one = |(index, part)| take_part(part, &format!("{content_name}[{index}]"));
            let texts: Result<Vec<String>, _> = parts.into_iter().enumerate().map(one).collect();
            texts?.join("\n")
        }
        other => return Err(fields.wrong_kind("content", "a string or a list of parts", &other)),
    };
    // Clients send back what an answer had.
    fields.ignore(&["id", "status", "phase"]);
    fields.finish()?;
    Ok(message(&role, &content))
}

fn take_part(part: Value, name: &str) -> Result<String, ApiError> {
    let mut fields = nested(part, name)?;
    let kind = fields.string("type")?.unwrap_or_default();
    if kind != "input_text" && kind != "output_text" {
        let name = fields.name("type");
        let message = format!(
            "`{name}` must be \"input_text\" or \"output_text\": only text is supported, not {:?}.",
            shown(&kind)
        );
        return Err(ApiError::unsupported(&name, message));
    }
    let text = match fields.required("text")? {
        Value::String(text) => text,
        other => return Err(fields.wrong_kind("text", "a string", &other)),
    };
    fields.ignore(&["annotations", "logprobs"]);
    fields.finish()?;
    Ok(text)
}

fn nested(value: Value, name: &str) -> Result<Fields, ApiError> {
    match value {
        Value::Object(map) => Ok(Fields::nested(map, name)),
        other => {
            let message = format!("`{name}` must be an object, not {}.", kind_of(&other));
            Err(ApiError { code: "invalid_type", ..ApiError::invalid(name, message) })
        }
    }
}
