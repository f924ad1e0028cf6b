//! Errors as OpenAI's clients know them: `{"error": {"message", "type", "param", "code"}}`; one of a limit has also
//! `reason`, a word for which it is.

use std::borrow::Cow;
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::access::OverQuota;
use crate::serve::Failure;
use crate::text::TextError;

/// Characters of what a client wrote that an error repeats.
const SHOWN_CHARS_MAX: usize = 200;

/// What a client wrote, as far as an error repeats it.
pub(crate) fn shown(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        None => Cow::Borrowed(text),
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
    }
}

/// An error on its way to a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// The parameter of the request that is to blame.
    pub param: Option<String>,
    pub code: &'static str,
    /// Which limit it is about.
    pub reason: Option<&'static str>,
    /// When it is worth trying again.
    pub retry_after_s: Option<u64>,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

impl ApiError {
    pub(crate) fn new(
        status: StatusCode,
        code: &'static str,
        message: impl Into<String>,
    ) -> ApiError {
        let message = message.into();
        ApiError { status, message, param: None, code, reason: None, retry_after_s: None }
    }

    /// 400 that blames a parameter.
    pub(crate) fn invalid(param: &str, message: impl Into<String>) -> ApiError {
        ApiError {
            param: Some(param.to_owned()),
            ..ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message)
        }
    }

    /// The same with another name for the prompt.
    pub(crate) fn blaming(mut self, prompt: &str) -> ApiError {
        if let Some(param) = self.param.as_mut().filter(|param| param.as_str() == "prompt") {
            prompt.clone_into(param);
        }
        self
    }

    /// 400 for what is known but not offered here.
    pub(crate) fn unsupported(param: &str, message: impl Into<String>) -> ApiError {
        ApiError { code: "unsupported_parameter", ..ApiError::invalid(param, message) }
    }

    pub(crate) fn model_not_found(model: &str) -> ApiError {
        ApiError {
            param: Some("model".to_owned()),
            ..ApiError::new(
                StatusCode::NOT_FOUND,
                "model_not_found",
                format!(
                    "The model {:?} does not exist; GET /v1/models lists the models.",
                    shown(model)
                ),
            )
        }
    }

    /// 429: a tenant has used up a quota. `retry_after_ms` is when one of its requests is predicted
    /// to end.
    pub(crate) fn over_quota(over: &OverQuota, retry_after_ms: u64) -> ApiError {
        let (reason, message, wait_ms) = match over {
            OverQuota::Requests { per_minute, wait } => (
                "quota_requests_per_minute",
                format!("You exceeded your quota of {per_minute} requests per minute."),
                ms(*wait),
            ),
            OverQuota::Tokens { per_minute, wait } => (
                "quota_tokens_per_minute",
                format!("You exceeded your quota of {per_minute} tokens per minute."),
                ms(*wait),
            ),
            OverQuota::Running { max } => (
                "quota_running_requests",
                format!("You exceeded your quota of {max} running requests."),
                retry_after_ms,
            ),
        };
        ApiError {
            reason: Some(reason),
            retry_after_s: Some(wait_ms.div_ceil(1_000)),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message)
        }
    }

    /// 503: nobody can serve it now.
    pub(crate) fn unavailable(message: impl Into<String>) -> ApiError {
        ApiError {
            retry_after_s: Some(1),
            ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "no_instance", message)
        }
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// The JSON body, as it stands in a response and in an event of a stream.
    pub(crate) fn json(&self) -> String {
        let body = Body {
            error: Inner {
                message: &self.message,
                kind: self.kind(),
                param: self.param.as_deref(),
                code: self.code,
                reason: self.reason,
            },
        };
        serde_json::to_string(&body).expect("strings always serialise")
    }
}

/// Rounded up: a client that waits so long is let in.
fn ms(wait: Duration) -> u64 {
    u64::try_from(wait.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response =
            (self.status, [(header::CONTENT_TYPE, json)], self.json()).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds.max(1)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> ApiError {
        match error {
            TextError::NoTemplate | TextError::Template(_) => {
                ApiError::invalid("prompt", error.to_string())
            }
            TextError::Chunk { .. } => ApiError::invalid(super::chunks::MEMBER, error.to_string()),
            TextError::Tokenize(_) => ApiError::invalid("prompt", error.to_string()),
            TextError::TooLong { .. } => ApiError {
                code: "context_length_exceeded",
                ..ApiError::invalid("prompt", error.to_string())
            },
            TextError::Interrupted => ApiError::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "internal_error",
                error.to_string(),
            ),
        }
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> ApiError {
        let message = failure.to_string();
        match failure {
            Failure::UnknownModel => ApiError {
                param: Some("model".to_owned()),
                ..ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message)
            },
            Failure::Overloaded { limit, retry_after_ms, .. } => ApiError {
                reason: Some(limit),
                retry_after_s: Some(retry_after_ms.div_ceil(1000).max(1)),
                ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message)
            },
            Failure::TooLong { .. } => ApiError {
                param: Some("prompt".to_owned()),
                ..ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message)
            },
            Failure::Rejected { .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message)
            }
            Failure::NoInstance { .. } => ApiError::unavailable(message),
            Failure::Deadline { .. } => {
                ApiError::new(StatusCode::GATEWAY_TIMEOUT, "request_timeout", message)
            }
            Failure::Interrupted { .. } => {
                ApiError::new(StatusCode::BAD_GATEWAY, "instance_failed", message)
            }
            Failure::Draining => ApiError {
                retry_after_s: Some(1),
                ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", message)
            },
            // Nobody is there to read it.
            Failure::ClientGone => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "cancelled", message)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_repeats_no_more_than_a_little_of_what_a_client_wrote() {
        assert_eq!(shown("short"), "short");
        assert_eq!(shown(&"ä".repeat(200)), "ä".repeat(200));
        assert_eq!(shown(&"ä".repeat(201)), format!("{}…", "ä".repeat(200)));
    }

    #[test]
    fn a_client_is_told_to_wait_whole_seconds_and_at_least_one() {
        let check = |retry_after_ms, want: &str| {
            let reason = "no room".to_owned();
            let error = ApiError::from(Failure::too_many(reason, retry_after_ms));
            let response = error.into_response();
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(response.headers()[header::RETRY_AFTER], want);
        };
        check(0, "1");
        check(1_000, "1");
        check(1_001, "2");
        check(59_999, "60");
    }
}
