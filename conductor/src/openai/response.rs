//! Answers of `/v1/responses`: a response with one message of one text, whole or as the typed events
//! that lead to it. The events' order is the API's: created, in progress, the item, its part, the
//! text's pieces, and the same backwards; each event has the next number.

use std::sync::Arc;

use serde_json::{Value, json};

use super::answer::{Answer, Collected, Piece};
use super::error::ApiError;
use super::responses::Echo;
use crate::serve::{Ended, FinishReason};

/// See the module.
#[derive(Debug)]
pub(crate) struct ResponseWriter {
    id: String,
    message_id: String,
    created_unix_s: u64,
    model: String,
    prompt: Arc<[u32]>,
    echo: Echo,
    /// Of a stream: the number of the next event, and the text so far.
    sequence: u64,
    text: String,
}

/// How far a response is.
enum Stage<'a> {
    InProgress,
    Ended(&'a str, &'a Ended),
    Failed(&'a ApiError),
}

impl ResponseWriter {
    /// `answer` is of one choice to one prompt.
    pub(super) fn new(answer: Answer, echo: Echo) -> ResponseWriter {
        let serial = answer.id.rsplit('-').next().unwrap_or_default().to_owned();
        ResponseWriter {
            id: format!("resp_{serial}"),
            message_id: format!("msg_{serial}"),
            created_unix_s: answer.created_unix_s,
            model: answer.model,
            prompt: answer.prompts.into_iter().next().unwrap_or_default(),
            echo,
            sequence: 0,
            text: String::new(),
        }
    }

    pub(super) fn whole(&self, choices: &[Collected]) -> String {
        let ended = choices.first().and_then(|one| Some((&one.text, one.state.ended.as_ref()?)));
        match ended {
            Some((text, ended)) => self.response(&Stage::Ended(text, ended)).to_string(),
            None => self.response(&Stage::InProgress).to_string(),
        }
    }

    pub(super) fn write_piece(&mut self, out: &mut String, piece: Piece) {
        self.begin(out);
        if !piece.text.is_empty() {
            self.text.push_str(piece.text);
            let mut event = self.at_part();
            event["delta"] = piece.text.into();
            event["logprobs"] = json!([]);
            self.event(out, "response.output_text.delta", event);
        }
        if let Some(ended) = piece.ended {
            self.end(out, ended);
        }
    }

    pub(super) fn write_failed(&mut self, out: &mut String, error: &ApiError) {
        self.begin(out);
        let response = self.response(&Stage::Failed(error));
        self.event(out, "response.failed", json!({"response": response}));
    }

    fn begin(&mut self, out: &mut String) {
        if self.sequence > 0 {
            return;
        }
        let response = self.response(&Stage::InProgress);
        self.event(out, "response.created", json!({"response": response}));
        self.event(out, "response.in_progress", json!({"response": response}));
        let item = self.message("in_progress", None);
        self.event(out, "response.output_item.added", json!({"output_index": 0, "item": item}));
        let mut event = self.at_part();
        event["part"] = part("");
        self.event(out, "response.content_part.added", event);
    }

    fn end(&mut self, out: &mut String, ended: &Ended) {
        let text = std::mem::take(&mut self.text);
        let mut event = self.at_part();
        event["text"] = text.as_str().into();
        event["logprobs"] = json!([]);
        self.event(out, "response.output_text.done", event);
        let mut event = self.at_part();
        event["part"] = part(&text);
        self.event(out, "response.content_part.done", event);
        let item = self.message(status_of(ended), Some(&text));
        self.event(out, "response.output_item.done", json!({"output_index": 0, "item": item}));
        let response = self.response(&Stage::Ended(&text, ended));
        let kind = match ended.reason {
            FinishReason::Stop => "response.completed",
            FinishReason::Length => "response.incomplete",
        };
        self.event(out, kind, json!({"response": response}));
    }

    fn event(&mut self, out: &mut String, kind: &str, mut event: Value) {
        event["type"] = kind.into();
        event["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        out.push_str("event: ");
        out.push_str(kind);
        out.push_str("\ndata: ");
        out.push_str(&event.to_string());
        out.push_str("\n\n");
    }

    /// Where the one text stands.
    fn at_part(&self) -> Value {
        json!({"item_id": self.message_id, "output_index": 0, "content_index": 0})
    }

    fn message(&self, status: &str, text: Option<&str>) -> Value {
        let content: Vec<Value> = text.map(part).into_iter().collect();
        json!({
            "type": "message",
            "id": self.message_id,
            "status": status,
            "role": "assistant",
            "content": content,
        })
    }

    fn response(&self, stage: &Stage<'_>) -> Value {
        let echo = &self.echo;
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created_unix_s,
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": echo.instructions,
            "max_output_tokens": echo.max_output_tokens,
            "metadata": echo.metadata,
            "model": self.model,
            "output": [],
            "parallel_tool_calls": true,
            "previous_response_id": null,
            "reasoning": {"effort": null, "summary": null},
            "store": false,
            "temperature": as_written(echo.temperature),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": as_written(echo.top_p),
            "truncation": "disabled",
            "usage": null,
            "user": echo.user,
        });
        match stage {
            Stage::InProgress => {}
            Stage::Ended(text, ended) => {
                response["status"] = status_of(ended).into();
                if ended.reason == FinishReason::Length {
                    response["incomplete_details"] = json!({"reason": "max_output_tokens"});
                }
                response["output"] = json!([self.message(status_of(ended), Some(text))]);
                response["usage"] = self.usage(ended);
            }
            Stage::Failed(error) => {
                let code = match error.status.as_u16() {
                    429 => "rate_limit_exceeded",
                    _ => "server_error",
                };
                response["status"] = "failed".into();
                response["error"] = json!({"code": code, "message": error.message});
            }
        }
        response
    }

    fn usage(&self, ended: &Ended) -> Value {
        let (input, output) = (self.prompt.len() as u64, u64::from(ended.generated_tokens));
        json!({
            "input_tokens": input,
            "input_tokens_details": {"cached_tokens": ended.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": input + output,
        })
    }
}

fn status_of(ended: &Ended) -> &'static str {
    match ended.reason {
        FinishReason::Stop => "completed",
        FinishReason::Length => "incomplete",
    }
}

/// The shortest number that is this one: 0.7, not what its 32 bits are in 64.
fn as_written(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}
