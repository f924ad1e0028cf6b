//! Requests to `/v1/chat/completions`.

use serde_json::{Map, Value};

use super::common::{Common, Limits, TOP_LOGPROBS_MAX};
use super::error::{ApiError, shown};
use super::fields::{Fields, kind_of, neutral};

/// A chat, checked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ChatRequest {
    pub common: Common,
    /// As templates want them: `role`, `content` as one string, and what else the client gave.
    pub messages: Vec<Value>,
    pub add_generation_prompt: bool,
    pub template_arguments: Map<String, Value>,
}

pub(crate) const ROLES: [&str; 4] = ["system", "developer", "user", "assistant"];
pub(crate) const MESSAGES_MAX: usize = 4096;

impl ChatRequest {
    pub(crate) fn parse(body: &[u8], limits: &Limits) -> Result<ChatRequest, ApiError> {
        let mut fields = Fields::parse(body)?;
        let mut common = Common::take(&mut fields, limits)?;
        let messages = match fields.required("messages")? {
            Value::Array(list) => take_messages(list)?,
            other => return Err(fields.wrong_kind("messages", "a list", &other)),
        };
        take_logprobs(&mut fields, &mut common)?;
        take_unsupported(&mut fields)?;
        let add_generation_prompt = fields.boolean("add_generation_prompt")?.unwrap_or(true);
        let template_arguments = fields.object("chat_template_kwargs")?.unwrap_or_default();
        fields.finish()?;
        Ok(ChatRequest { common, messages, add_generation_prompt, template_arguments })
    }
}

fn take_logprobs(fields: &mut Fields, common: &mut Common) -> Result<(), ApiError> {
    let logprobs = fields.flag("logprobs")?;
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS_MAX)?;
    if top.is_some_and(|top| top > 0) && !logprobs {
        let message = "`top_logprobs` needs `logprobs` to be true.";
        return Err(ApiError::invalid("top_logprobs", message));
    }
    common.sampling.logprobs = logprobs;
    common.sampling.top_logprobs = top.unwrap_or(0) as u32;
    Ok(())
}

fn take_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    for empty in [
        "tools",
        "functions",
        "audio",
        "web_search_options",
        "documents",
        "echo",
        "chat_template",
        "continue_final_message",
        "mm_processor_kwargs",
    ] {
        fields.only_neutral(empty, neutral::empty)?;
    }
    // Without tools there is nothing to choose from.
    fields.only_neutral("tool_choice", neutral::text(&["none", "auto"]))?;
    fields.only_neutral("function_call", neutral::text(&["none", "auto"]))?;
    fields.ignore(&["parallel_tool_calls", "prediction"]);
    fields.only_neutral("reasoning_effort", neutral::text(&["none"]))?;
    fields.only_neutral("verbosity", neutral::text(&["medium"]))?;
    fields.only_neutral("response_format", |format| {
        format
            .as_object()
            .is_some_and(|map| map.len() == 1 && map.get("type") == Some(&"text".into()))
    })?;
    fields.only_neutral("modalities", |list| *list == serde_json::json!(["text"]))
}

pub(super) fn take_messages(list: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    if list.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` must not be empty."));
    }
    if list.len() > MESSAGES_MAX {
        let message = format!("`messages` may have at most {MESSAGES_MAX} entries.");
        return Err(ApiError::invalid("messages", message));
    }
    let one = |(index, message)| take_message(message, &format!("messages[{index}]"));
    list.into_iter().enumerate().map(one).collect()
}

fn take_message(message: Value, name: &str) -> Result<Value, ApiError> {
    let Value::Object(map) = message else {
        let message = format!("`{name}` must be an object, not {}.", kind_of(&message));
        return Err(ApiError { code: "invalid_type", ..ApiError::invalid(name, message) });
    };
    let mut fields = Fields::nested(map, name);
    let role = match fields.required("role")? {
        Value::String(role) => role,
        other => return Err(fields.wrong_kind("role", "a string", &other)),
    };
    let role_name = fields.name("role");
    if role == "tool" || role == "function" {
        return Err(ApiError::unsupported(&role_name, "Tools are not supported."));
    }
    if !ROLES.contains(&role.as_str()) {
        let message = format!("`{role_name}` must be one of {ROLES:?}, not {:?}.", shown(&role));
        return Err(ApiError::invalid(&role_name, message));
    }
    let content = take_content(&mut fields, &role)?;
    for unsupported in ["tool_calls", "function_call", "audio", "tool_call_id"] {
        fields.only_neutral(unsupported, neutral::empty)?;
    }
    // Clients send back what an answer of the assistant had.
    fields.ignore(&["refusal", "annotations"]);
    let mut out = Map::new();
    for member in ["name", "reasoning_content"] {
        if let Some(text) = fields.string(member)? {
            out.insert(member.to_owned(), Value::String(text));
        }
    }
    fields.finish()?;
    out.insert("role".to_owned(), Value::String(role));
    out.insert("content".to_owned(), Value::String(content));
    Ok(Value::Object(out))
}

/// A string, or a list of text parts, which are joined by newlines (as vLLM does).
fn take_content(fields: &mut Fields, role: &str) -> Result<String, ApiError> {
    let name = fields.name("content");
    match fields.value("content") {
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let one = |(index, part)| take_part(part, &format!("{name}[{index}]"));
            let texts: Vec<String> =
                parts.into_iter().enumerate().map(one).collect::<Result<_, _>>()?;
            Ok(texts.join("\n"))
        }
        None if role == "assistant" => Ok(String::new()),
        None => Err(ApiError {
            code: "missing_required_parameter",
            ..ApiError::invalid(&name, format!("`{name}` is required."))
        }),
        Some(other) => Err(fields.wrong_kind("content", "a string or a list of parts", &other)),
    }
}

fn take_part(part: Value, name: &str) -> Result<String, ApiError> {
    let Value::Object(map) = part else {
        let message = format!("`{name}` must be an object, not {}.", kind_of(&part));
        return Err(ApiError { code: "invalid_type", ..ApiError::invalid(name, message) });
    };
    let mut fields = Fields::nested(map, name);
    let kind = fields.string("type")?.unwrap_or_default();
    if kind != "text" {
        let name = fields.name("type");
        let message =
            format!("`{name}` must be \"text\": only text is supported, not {:?}.", shown(&kind));
        return Err(ApiError::unsupported(&name, message));
    }
    let text = match fields.required("text")? {
        Value::String(text) => text,
        other => return Err(fields.wrong_kind("text", "a string", &other)),
    };
    fields.finish()?;
    Ok(text)
}
