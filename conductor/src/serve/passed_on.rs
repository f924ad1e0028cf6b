//! Why a request went to one of the plain OpenAI servers of its model and not to another. Which that is,
//! [`crate::proxy`] decides.

use std::fmt;

use serde::Serialize;

/// One choice among the servers of a model.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PassedOn {
    /// `None` when it went to none of them.
    pub forwarded_to: Option<String>,
    #[serde(flatten)]
    pub why: Why,
    /// Of the prompt, as it is written.
    pub prompt_bytes: usize,
    pub backends: Vec<ServerSeen>,
}

/// What decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "reason", rename_all = "snake_case")]
pub(crate) enum Why {
    /// It was last sent what begins alike, for so many bytes.
    LongestPrefix {
        #[serde(rename = "matched_prefix_bytes")]
        bytes: usize,
    },
    /// It was last sent a prompt of the same `prompt_cache_key`.
    SameCacheKey,
    /// Nobody is known to have seen the beginning, or who has is far busier.
    LeastBusy,
    /// All that answer have as much under way as they may.
    AllFull,
    NoneHealthy,
}

/// A server when the choice was made.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ServerSeen {
    pub url: String,
    /// Requests under way there, without this one, and how many may be.
    pub running_requests: usize,
    pub running_requests_max: usize,
    pub state: ServerState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ServerState {
    Chosen,
    /// It has seen the beginning.
    TooBusy,
    /// Another one was better.
    NotPreferred,
    Full,
    /// For this request, before.
    Failed,
    Unhealthy,
}

impl fmt::Display for PassedOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for server in &self.backends {
            let ServerSeen { url, running_requests, running_requests_max, state } = server;
            write!(
                f,
                "backend {url}: {running_requests} of at most {running_requests_max} requests running: "
            )?;
            f.write_str(match state {
                ServerState::Chosen => "chosen",
                ServerState::TooBusy => "has seen the prefix, but is too busy",
                ServerState::NotPreferred => "not preferred",
                ServerState::Full => "full",
                ServerState::Failed => "failed this request",
                ServerState::Unhealthy => "unhealthy",
            })?;
            writeln!(f)?;
        }
        match &self.forwarded_to {
            Some(to) => write!(f, "forwarded to {to}: {}", self.reason()),
            None => write!(f, "not forwarded: {}", self.reason()),
        }
    }
}

impl PassedOn {
    /// In a few words.
    pub(crate) fn reason(&self) -> String {
        match self.why {
            Why::LongestPrefix { bytes } => format!(
                "it has seen the longest common prefix, {bytes} of {} bytes",
                self.prompt_bytes
            ),
            Why::SameCacheKey => "it has seen a prompt with the same `prompt_cache_key`".into(),
            Why::LeastBusy => "it has the fewest running requests".into(),
            Why::AllFull => "all healthy backends are at `running_requests_max`".into(),
            Why::NoneHealthy => "no backend of the model is healthy".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_reads_as_its_servers_and_then_why() {
        let server = |url: &str, running_requests, state| ServerSeen {
            url: url.into(),
            running_requests,
            running_requests_max: 8,
            state,
        };
        let passed = PassedOn {
            forwarded_to: Some("http://a".into()),
            why: Why::LongestPrefix { bytes: 512 },
            prompt_bytes: 700,
            backends: vec![
                server("http://a", 3, ServerState::Chosen),
                server("http://b", 0, ServerState::Unhealthy),
            ],
        };
        assert_eq!(
            passed.to_string(),
            "backend http://a: 3 of at most 8 requests running: chosen\n\
             backend http://b: 0 of at most 8 requests running: unhealthy\n\
             forwarded to http://a: it has seen the longest common prefix, 512 of 700 bytes"
        );
        let nobody = PassedOn {
            forwarded_to: None,
            why: Why::NoneHealthy,
            prompt_bytes: 0,
            backends: vec![],
        };
        assert_eq!(nobody.to_string(), "not forwarded: no backend of the model is healthy");
    }
}
