//! Why a request went to one of the plain OpenAI servers of its model and not to another. Which that is,
//! [`crate::proxy`] decides.

use std::fmt;

use serde::Serialize;

/// One choice among the servers of a model.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct PassedOn {
    /// `None` when it went to none of them.
    pub to: Option<String>,
    pub reason: Why,
    /// Of the prompt, as it is written.
    pub prompt_bytes: usize,
    pub servers: Vec<ServerSeen>,
}

/// What decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Why {
    /// It was last sent what begins alike, for so many bytes.
    Alike {
        bytes: usize,
    },
    /// It was last sent a prompt of the same `prompt_cache_key`.
    SameKey,
    /// Nobody is known to have seen the beginning, or who has is far busier.
    LeastBusy,
    /// All that answer have as much under way as they may.
    AllFull,
    NoneAnswers,
}

/// A server when the choice was made.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ServerSeen {
    pub url: String,
    /// Requests under way there, without this one, and how many may be.
    pub in_flight: usize,
    pub in_flight_max: usize,
    pub state: ServerState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ServerState {
    Chosen,
    /// It has seen the beginning.
    FarBusier,
    /// Another one was better.
    Passed,
    Full,
    /// For this request, before.
    HasFailed,
    DoesNotAnswer,
}

impl fmt::Display for PassedOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for server in &self.servers {
            let ServerSeen { url, in_flight, in_flight_max, state } = server;
            write!(f, "backend {url}: {in_flight} of at most {in_flight_max} requests running: ")?;
            f.write_str(match state {
                ServerState::Chosen => "chosen",
                ServerState::FarBusier => "has seen the prefix, but is far busier",
                ServerState::Passed => "not preferred",
                ServerState::Full => "full",
                ServerState::HasFailed => "failed this request",
                ServerState::DoesNotAnswer => "does not answer",
            })?;
            writeln!(f)?;
        }
        match &self.to {
            Some(to) => write!(f, "forwarded to {to}: {}", self.reason()),
            None => write!(f, "not forwarded: {}", self.reason()),
        }
    }
}

impl PassedOn {
    /// In a few words.
    pub(crate) fn reason(&self) -> String {
        match self.reason {
            Why::Alike { bytes } => format!(
                "it has seen the longest common prefix, {bytes} of {} bytes",
                self.prompt_bytes
            ),
            Why::SameKey => "it has seen a prompt with the same `prompt_cache_key`".into(),
            Why::LeastBusy => "it has the fewest running requests".into(),
            Why::AllFull => "all healthy backends are at `running_requests_max`".into(),
            Why::NoneAnswers => "no backend of the model answers".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_reads_as_its_servers_and_then_why() {
        let server = |url: &str, in_flight, state| ServerSeen {
            url: url.into(),
            in_flight,
            in_flight_max: 8,
            state,
        };
        let passed = PassedOn {
            to: Some("http://a".into()),
            reason: Why::Alike { bytes: 512 },
            prompt_bytes: 700,
            servers: vec![
                server("http://a", 3, ServerState::Chosen),
                server("http://b", 0, ServerState::DoesNotAnswer),
            ],
        };
        assert_eq!(
            passed.to_string(),
            "backend http://a: 3 of at most 8 requests running: chosen\n\
             backend http://b: 0 of at most 8 requests running: does not answer\n\
             forwarded to http://a: it has seen the longest common prefix, 512 of 700 bytes"
        );
        let nobody =
            PassedOn { to: None, reason: Why::NoneAnswers, prompt_bytes: 0, servers: vec![] };
        assert_eq!(nobody.to_string(), "not forwarded: no backend of the model answers");
    }
}
