//! The cluster as a client meets it: completions at the front door, what was decided for them, and counters.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::http::{self, Limits};
use crate::up::State;

/// A process that takes longer hangs.
const LIMITS: Limits =
    Limits { connect: Duration::from_secs(10), answer: Duration::from_secs(600) };
/// Engines are started together, and each takes as long as it takes to read the model.
const ATTACHED: Duration = Duration::from_secs(120);
/// A conductor hears of new blocks within a moment.
const HEARD: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_millis(20);
const BLOCK_TOKENS: u32 = 64;
/// Tokens below are special ones.
const TOKEN_MIN: u32 = 5;

/// What becomes of a document that another node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Route,
    Fetch,
    Recompute,
}

impl Way {
    pub(super) const ALL: [Way; 3] = [Way::Route, Way::Fetch, Way::Recompute];

    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Route => "route",
            Way::Fetch => "fetch",
            Way::Recompute => "recompute",
        }
    }
}

/// What went wrong, as a sentence.
pub(super) type Failed = Box<dyn std::error::Error>;

/// One answer.
#[derive(Debug)]
pub(super) struct Answered {
    pub tokens: Vec<u32>,
    request_id: String,
}

/// See the module.
pub(super) struct Asking {
    url: String,
    monitor: String,
    model: String,
    /// Where nodes and engines show their counters.
    metrics: Vec<String>,
    draws: StdRng,
    vocab: u32,
    serial: u64,
}

/// One completion, apart from who asks for it.
struct Question<'a> {
    prompt: &'a [u32],
    generated_tokens: u32,
    instance: String,
    way: Option<Way>,
    request_id: String,
}

impl Asking {
    /// Documents and questions are the same in each run.
    pub(super) fn new(cluster: &State, vocab: u32) -> Result<Asking, Failed> {
        let nodes = cluster.processes.iter().filter(|(name, _)| name.ends_with("-node"));
        Ok(Asking {
            url: cluster.url.clone(),
            monitor: cluster.monitor.clone(),
            model: cluster.model.clone(),
            metrics: nodes.map(|(_, node)| node.metrics.clone()).collect(),
            draws: StdRng::seed_from_u64(1),
            vocab,
            serial: 0,
        })
    }

    pub(super) fn tokens(&mut self, count: u32) -> Vec<u32> {
        (0..count).map(|_| self.draws.random_range(TOKEN_MIN..self.vocab)).collect()
    }

    fn next_id(&mut self) -> String {
        self.serial += 1;
        format!("demo-{}", self.serial)
    }

    /// Waits until every engine can be asked: a cluster is ready when some of them are there.
    pub(super) async fn wait_for_engines(&mut self, count: u32) -> Result<(), Failed> {
        let began = Instant::now();
        for engine in 1..=count {
            let prompt = self.tokens(1);
            while let Err(failed) = self.ask(&prompt, 1, engine, None).await {
                if began.elapsed() > ATTACHED {
                    return Err(failed);
                }
                tokio::time::sleep(AGAIN).await;
            }
        }
        Ok(())
    }

    /// Has a document computed where `engine` is, and waits until the conductor knows of it.
    pub(super) async fn place_document(
        &mut self,
        document: &[u32],
        engine: u32,
    ) -> Result<(), Failed> {
        let mut prompt = document.to_vec();
        prompt.extend(self.tokens(1));
        let blocks = document.len() as u32 / BLOCK_TOKENS;
        let began = Instant::now();
        while began.elapsed() < HEARD {
            let answered = self.ask(&prompt, 1, engine, None).await?;
            let placement = self.placement(&answered).await?;
            let holds = |candidate: &Value| {
                candidate["instance"].as_str() == Some(&name(engine))
                    && candidate["cached_blocks"].as_u64() == Some(blocks.into())
            };
            if placement["prefill_candidates"].as_array().is_some_and(|all| all.iter().any(holds)) {
                return Ok(());
            }
            tokio::time::sleep(AGAIN).await;
        }
        Err("the conductor did not report the blocks of the document in time".into())
    }

    async fn ask(
        &mut self,
        prompt: &[u32],
        generated_tokens: u32,
        engine: u32,
        way: Option<Way>,
    ) -> Result<Answered, Failed> {
        let (instance, request_id) = (name(engine), self.next_id());
        self.complete(Question { prompt, generated_tokens, instance, way, request_id }).await
    }

    /// All prompts at once. Answers with how long it took until the last one had its answer.
    pub(super) async fn ask_all(
        &mut self,
        prompts: &[Vec<u32>],
        generated_tokens: u32,
        engine: u32,
        way: Option<Way>,
    ) -> Result<(Vec<Answered>, Duration), Failed> {
        let ids: Vec<String> = prompts.iter().map(|_| self.next_id()).collect();
        let asking = &*self;
        let began = Instant::now();
        let questions = prompts.iter().zip(ids).map(|(prompt, request_id)| {
            let instance = name(engine);
            asking.complete(Question { prompt, generated_tokens, instance, way, request_id })
        });
        let answers = futures::future::try_join_all(questions).await?;
        Ok((answers, began.elapsed()))
    }

    async fn complete(&self, question: Question<'_>) -> Result<Answered, Failed> {
        let Question { prompt, generated_tokens, instance, way, request_id } = question;
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": generated_tokens, "temperature": 0,
            "ignore_eos": true, "return_token_ids": true,
        });
        let mut headers = vec![("x-kvasir-instance", &*instance), ("x-request-id", &*request_id)];
        headers.extend(way.map(|way| ("x-kvasir-prefix", way.name())));
        let reply = http::post_json(&self.completions(), &headers, &body, LIMITS).await?;
        let (is_ok, answer) = (reply.status.is_success(), reply.json()?);
        let ids = answer["choices"][0]["token_ids"].as_array();
        let Some(ids) = ids.filter(|ids| is_ok && ids.len() == generated_tokens as usize) else {
            return Err(format!("a request failed: {answer}").into());
        };
        let tokens = ids.iter().filter_map(|id| Some(id.as_u64()? as u32)).collect();
        Ok(Answered { tokens, request_id })
    }

    fn completions(&self) -> String {
        format!("{}/v1/completions", self.url)
    }

    /// By how much, in its logarithm, the likeliest next token leads the second.
    pub(super) async fn lead(&self, prompt: &[u32]) -> Result<f64, Failed> {
        let body = json!({
            "model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 2,
        });
        let answer = http::post_json(&self.completions(), &[], &body, LIMITS).await?.json()?;
        let likeliest = &answer["choices"][0]["logprobs"]["top_logprobs"][0];
        let mut logprobs: Vec<f64> = match likeliest.as_object() {
            Some(likeliest) => likeliest.values().filter_map(Value::as_f64).collect(),
            None => return Err(format!("the answer contains no logprobs: {answer}").into()),
        };
        logprobs.sort_by(|a, b| b.total_cmp(a));
        // Two tokens of one text are told as one.
        Ok(logprobs.first().zip(logprobs.get(1)).map_or(f64::INFINITY, |(a, b)| a - b))
    }

    /// What was decided for it, with all prices.
    pub(super) async fn placement(&self, answered: &Answered) -> Result<Value, Failed> {
        let url = format!("{}/decisions/{}", self.monitor, answered.request_id);
        let mut decisions = http::get(&url, LIMITS).await?.json()?;
        let last = decisions["decisions"].as_array_mut().and_then(Vec::pop);
        last.map(|mut decision| decision["placement"].take())
            .filter(Value::is_object)
            .ok_or_else(|| "the conductor returned no decision for a request".into())
    }

    /// A counter summed over all store nodes.
    pub(super) async fn counted(&self, counter: &str) -> Result<f64, Failed> {
        let mut sum = 0.0;
        for url in &self.metrics {
            sum += total(&http::get(url, LIMITS).await?.text(), counter);
        }
        Ok(sum)
    }
}

/// What a placement does about the document; `None` where its own node had it.
pub(super) fn way_of(placement: &Value) -> Option<Way> {
    // What was fetched is named; what stays is only told by what was asked about it.
    let reused = placement["reused_tokens"].as_u64().unwrap_or(0);
    let chosen = placement["prefix"]["action"].as_str();
    match (placement["fetch"].is_object(), reused) {
        (true, _) => Some(Way::Fetch),
        (false, 0) => Some(Way::Recompute),
        (false, _) if chosen == Some("route") => Some(Way::Route),
        _ => None,
    }
}

fn name(engine: u32) -> String {
    format!("both-{engine}")
}

/// Over all labels.
fn total(page: &str, counter: &str) -> f64 {
    let value = |line: &str| {
        let rest = line.strip_prefix(counter).filter(|rest| rest.starts_with(['{', ' ']))?;
        rest.rsplit(' ').next()?.parse::<f64>().ok()
    };
    page.lines().filter_map(value).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_over_their_labels_and_no_others() {
        let page = "# HELP a_total x\na_total{of=\"1\"} 2\na_total{of=\"2\"} 3\na_total_more 9\nb_total 4\n";
        assert_eq!(
            [total(page, "a_total"), total(page, "b_total"), total(page, "c")],
            [5.0, 4.0, 0.0]
        );
    }

    #[test]
    fn a_placement_says_what_becomes_of_the_document() {
        let check = |placement: Value, want| assert_eq!(way_of(&placement), want, "{placement}");
        let prefix = json!({"action": "route"});
        check(json!({"fetch": null, "reused_tokens": 64, "prefix": prefix}), Some(Way::Route));
        check(json!({"fetch": {"from": "n"}, "reused_tokens": 64}), Some(Way::Fetch));
        check(json!({"fetch": null, "reused_tokens": 0, "prefix": null}), Some(Way::Recompute));
        check(json!({"fetch": null, "reused_tokens": 64, "prefix": null}), None);
    }
}
