//! `kvasir explain` and `kvasir top`: a terminal view of a conductor's monitoring API.

mod decisions;
mod state;
mod table;

use std::error::Error;
use std::io::IsTerminal;
use std::time::Duration;

use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use crate::http::{self, HttpError, Limits};
use crate::output;

const LIMITS: Limits = Limits { connect: Duration::from_secs(5), answer: Duration::from_secs(10) };
/// Decisions below the picture of `top`.
const TOP_DECISIONS: usize = 12;
/// The cursor to the upper left corner, and all below it cleared.
const CLEAR: &str = "\x1b[H\x1b[J";

/// Which conductor.
#[derive(Debug, clap::Args)]
struct Conductor {
    /// The conductor's `monitor_listen`, as a URL or as "host:port".
    #[arg(long = "conductor", value_name = "URL", default_value = "http://127.0.0.1:8002")]
    url: String,

    /// Print only the conductor's JSON.
    #[arg(long)]
    json: bool,
}

/// Flags of `kvasir explain`.
#[derive(Debug, clap::Args)]
pub(crate) struct ExplainFlags {
    /// The request's id from the header `x-request-id` of its answer. Shows each decision for it, with the cost of
    /// every candidate. Without an id: the latest decisions, one per line.
    request_id: Option<String>,

    /// Number of latest decisions.
    #[arg(long, value_name = "N", default_value_t = 20, conflicts_with = "request_id")]
    last: usize,

    #[command(flatten)]
    conductor: Conductor,
}

/// Flags of `kvasir top`.
#[derive(Debug, clap::Args)]
pub(crate) struct TopFlags {
    /// Seconds between two refreshes.
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    interval_seconds: f64,

    /// Print the state once and exit.
    #[arg(long)]
    once: bool,

    #[command(flatten)]
    conductor: Conductor,
}

/// Errors of `kvasir explain` and `kvasir top`.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error("--conductor {url:?} is not an address: write one as in http://127.0.0.1:8002")]
    Url { url: String },
    #[error(
        "no conductor answers at {url} ({why}); set --conductor to `monitor_listen` in its configuration, \
         which `kvasir up` prints"
    )]
    NoAnswer { url: String, why: String },
    #[error(
        "the server at {url} is not the monitoring API of a conductor: set --conductor to its `monitor_listen`, \
         not to the address of its HTTP API"
    )]
    NotIt { url: String },
    #[error("{0}")]
    Refused(String),
    #[error("--interval-seconds {0} is out of range; use 0.1 to 3600 seconds")]
    Interval(f64),
}

/// `kvasir explain`.
pub(crate) fn explain(flags: &ExplainFlags) -> Result<(), Box<dyn Error>> {
    Ok(runtime()?.block_on(explain_in_time(flags))?)
}

/// `kvasir top`.
pub(crate) fn top(flags: &TopFlags) -> Result<(), Box<dyn Error>> {
    if !(0.1..=3_600.0).contains(&flags.interval_seconds) {
        return Err(WatchError::Interval(flags.interval_seconds).into());
    }
    Ok(runtime()?.block_on(top_in_time(flags))?)
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

async fn explain_in_time(flags: &ExplainFlags) -> Result<(), WatchError> {
    let session = Session::new(&flags.conductor)?;
    let answer = match &flags.request_id {
        Some(id) => session.ask(&["decisions", id], &[]).await?,
        None => session.ask(&["decisions"], &[("last", flags.last.to_string())]).await?,
    };
    let decisions = session.list(&answer)?;
    match (flags.conductor.json, &flags.request_id) {
        (true, _) => output::say(&answer.to_string()),
        (false, Some(_)) => output::print(&decisions::whole(decisions)),
        (false, None) if decisions.is_empty() => output::say("no requests yet"),
        (false, None) => output::print(&decisions::list(decisions)),
    }
    Ok(())
}

async fn top_in_time(flags: &TopFlags) -> Result<(), WatchError> {
    let session = Session::new(&flags.conductor)?;
    let in_place = !flags.once && !flags.conductor.json && std::io::stdout().is_terminal();
    loop {
        let state = session.ask(&["state"], &[]).await?;
        if flags.conductor.json {
            output::say(&state.to_string());
        } else {
            let last = [("last", TOP_DECISIONS.to_string())];
            let decisions = session.ask(&["decisions"], &last).await?;
            let lines = decisions::list(session.list(&decisions)?);
            let clear = if in_place { CLEAR } else { "" };
            output::print(&format!("{clear}{}\n{lines}", state::text(&state)));
        }
        if flags.once {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_secs_f64(flags.interval_seconds)).await;
    }
}

/// A conductor that is asked.
struct Session {
    /// Without a slash at its end.
    base: String,
}

impl Session {
    fn new(conductor: &Conductor) -> Result<Session, WatchError> {
        let url = &conductor.url;
        let full = if url.contains("://") { url.clone() } else { format!("http://{url}") };
        let authority = http::authority(&full);
        let authority = authority.ok_or_else(|| WatchError::Url { url: url.clone() })?;
        Ok(Session { base: format!("http://{authority}") })
    }

    async fn ask(&self, path: &[&str], query: &[(&str, String)]) -> Result<Value, WatchError> {
        let mut url = self.base.clone();
        for segment in path {
            url += &format!("/{}", utf8_percent_encode(segment, NON_ALPHANUMERIC));
        }
        for (at, (key, value)) in query.iter().enumerate() {
            let mark = if at == 0 { '?' } else { '&' };
            url += &format!("{mark}{key}={}", utf8_percent_encode(value, NON_ALPHANUMERIC));
        }
        let answer = http::get(&url, LIMITS).await.map_err(|error| self.no_answer(&error))?;
        let ok = answer.status.is_success();
        let json = answer.json().map_err(|_| self.not_it())?;
        match (ok, json["error"].as_str()) {
            (true, _) => Ok(json),
            (false, Some(why)) => Err(WatchError::Refused(why.to_owned())),
            (false, None) => Err(self.not_it()),
        }
    }

    fn list<'a>(&self, answer: &'a Value) -> Result<&'a [Value], WatchError> {
        answer["decisions"].as_array().map(Vec::as_slice).ok_or_else(|| self.not_it())
    }

    fn not_it(&self) -> WatchError {
        WatchError::NotIt { url: self.base.clone() }
    }

    fn no_answer(&self, error: &HttpError) -> WatchError {
        WatchError::NoAnswer { url: self.base.clone(), why: output::sentence(error) }
    }
}
