//! Requests whose answers are known, asked one by one or many at once, and what became of each. An
//! answer that is not the right one, a break that is not explained, and a request without an end
//! are failures wherever they are seen; what may be refused is for the caller to say.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde_json::{Value, json};

use super::cluster::Cluster;
use super::vectors::{Case, ids};

/// What an answer may come late after its deadline on a machine that does other things too.
const LATE: Duration = Duration::from_secs(10);

/// How one request is asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub case: &'a Case,
    pub streamed: bool,
    /// Within which it must have ended, one way or the other.
    pub deadline: Duration,
}

/// How one request ended.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// With the right tokens, all of them.
    Answered,
    /// With an error and not one token.
    Refused { status: u16, code: String },
    /// The right tokens so far, then an error.
    BrokeOff { code: String },
    /// Nobody said a last word: the front door itself is gone.
    Cut,
}

/// Requests by how they ended.
#[derive(Debug, Default, Clone)]
pub(crate) struct Tally(BTreeMap<Outcome, usize>);

impl Tally {
    pub(crate) fn add(&mut self, outcome: Outcome) {
        *self.0.entry(outcome).or_default() += 1;
    }

    pub(crate) fn total(&self) -> usize {
        self.0.values().sum()
    }

    pub(crate) fn answered(&self) -> usize {
        self.0.get(&Outcome::Answered).copied().unwrap_or(0)
    }

    /// Those that ended with this error, before or after their first tokens.
    pub(crate) fn with_code(&self, code: &str) -> usize {
        let has_code = |outcome: &Outcome| match outcome {
            Outcome::Refused { code: has, .. } | Outcome::BrokeOff { code: has } => has == code,
            Outcome::Answered | Outcome::Cut => false,
        };
        self.0.iter().filter(|(outcome, _)| has_code(outcome)).map(|(_, count)| count).sum()
    }

    pub(crate) fn cut(&self) -> usize {
        self.0.get(&Outcome::Cut).copied().unwrap_or(0)
    }
}

/// Asks once and sees the request to its end.
pub(crate) async fn ask(cluster: &Cluster, ask: Ask<'_>) -> Outcome {
    let began = Instant::now();
    let outcome = tokio::time::timeout(ask.deadline + LATE, try_ask(cluster, ask)).await;
    let took = began.elapsed();
    outcome.unwrap_or_else(|_| panic!("a request has no end after {took:?}"))
}

async fn try_ask(cluster: &Cluster, ask: Ask<'_>) -> Outcome {
    let body = completion(cluster, ask.case, ask.streamed);
    let url = format!("{}/v1/completions", cluster.url);
    let Ok(reply) = cluster.client.post(url).json(&body).send().await else {
        return Outcome::Cut;
    };
    let status = reply.status().as_u16();
    if status == 200 && ask.streamed {
        return read_stream(ask.case, reply).await;
    }
    let Ok(answer) = reply.json::<Value>().await else { return Outcome::Cut };
    if status != 200 {
        return Outcome::Refused { status, code: error_code(&answer) };
    }
    let length = ask.case.prompt.len();
    let tokens = ids(&answer["choices"][0]["token_ids"]);
    assert_eq!(tokens, ask.case.greedy, "prompt of {length} tokens");
    Outcome::Answered
}

/// A greedy completion as long as the case's answer.
pub(crate) fn completion(cluster: &Cluster, case: &Case, streamed: bool) -> Value {
    json!({
        "model": cluster.model,
        "prompt": case.prompt,
        "max_tokens": case.greedy.len(),
        "temperature": 0,
        "ignore_eos": true,
        "return_token_ids": true,
        "stream": streamed,
    })
}

async fn read_stream(case: &Case, reply: reqwest::Response) -> Outcome {
    let mut body = reply.bytes_stream();
    let mut unread = Vec::new();
    let mut tokens = Vec::new();
    let mut error = None;
    let mut is_done = false;
    while let Some(Ok(bytes)) = body.next().await {
        unread.extend_from_slice(&bytes);
        while let Some(end) = unread.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = unread.drain(..end + 2).collect();
            let event = String::from_utf8(event).expect("events are UTF-8");
            let data = event.trim_end().strip_prefix("data: ").expect("an event has data");
            assert!(!is_done, "after the end comes {data}");
            if data == "[DONE]" {
                is_done = true;
                continue;
            }
            assert_eq!(error, None, "after the error comes {data}");
            let data: Value = serde_json::from_str(data).expect("events are JSON");
            if data["error"].is_null() {
                tokens.extend(ids(&data["choices"][0]["token_ids"]));
            } else {
                error = Some(error_code(&data));
            }
        }
    }
    let length = case.prompt.len();
    assert!(case.greedy.starts_with(&tokens), "prompt of {length} tokens: {tokens:?}");
    match (error, is_done) {
        (Some(code), true) => Outcome::BrokeOff { code },
        (None, true) => {
            assert_eq!(tokens, case.greedy, "prompt of {length} tokens");
            Outcome::Answered
        }
        (_, false) => Outcome::Cut,
    }
}

/// Of an error as OpenAI's clients know them.
fn error_code(answer: &Value) -> String {
    let error = &answer["error"];
    let is_whole = error["message"].is_string() && error["type"].is_string();
    assert!(is_whole, "an error must say what it is: {answer}");
    error["code"].as_str().unwrap_or_else(|| panic!("an error has a code: {answer}")).to_owned()
}

/// How much is asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amount {
    pub at_once: usize,
    pub total: usize,
    pub deadline: Duration,
}

/// What is done to the cluster when so many requests have ended.
pub(crate) struct Fault<F> {
    pub after: usize,
    pub act: F,
}

/// How the requests of one load ended.
#[derive(Debug, Default)]
pub(crate) struct Tallies {
    /// Those that were under way when the fault came, or had ended by then.
    pub before: Tally,
    /// Those that were asked after the fault.
    pub after: Tally,
}

/// Keeps so many requests under way until all have been asked: every case in turn, streamed and
/// not. The fault comes in the middle of it.
pub(crate) async fn load<F: FnOnce()>(
    cluster: &Cluster,
    cases: &[Case],
    amount: Amount,
    fault: Fault<F>,
) -> Tallies {
    let Amount { at_once, total, deadline } = amount;
    let one = async |serial: usize, is_after: bool| {
        // Every case both ways.
        let (case, streamed) =
            (&cases[serial % cases.len()], (serial / cases.len()).is_multiple_of(2));
        (is_after, ask(cluster, Ask { case, streamed, deadline }).await)
    };
    let Fault { after, act } = fault;
    let mut act = Some(act);
    let mut under_way: FuturesUnordered<_> =
        (0..at_once.min(total)).map(|serial| one(serial, false)).collect();
    let mut asked = under_way.len();
    let mut tallies = Tallies::default();
    while let Some((is_after, outcome)) = under_way.next().await {
        let tally = if is_after { &mut tallies.after } else { &mut tallies.before };
        tally.add(outcome);
        if tallies.before.total() == after
            && let Some(act) = act.take()
        {
            act();
        }
        if asked < total {
            under_way.push(one(asked, act.is_none()));
            asked += 1;
        }
    }
    tallies
}

/// The same without a fault: all must be answered.
pub(crate) async fn all_answered(cluster: &Cluster, cases: &[Case], amount: Amount) {
    let never = Fault { after: usize::MAX, act: || {} };
    let tally = load(cluster, cases, amount, never).await.before;
    assert_eq!(tally.answered(), amount.total, "{tally:?}");
}
