//! One cell: each alternative by force, then the conductor's own decision, all over one document.

use std::time::Duration;

use kvasir_engine_reference::model::ModelConfig;
use serde_json::Value;

use super::asking::{Answered, Asking, Failed, Way, way_of};
use super::grid::{Cell, QUESTION_TOKENS};
use super::report::median;
use crate::output::complain;

/// Who has the document first.
const HOLDER: u32 = 1;
/// Engines of agents: 2 and those after it.
const FIRST: u32 = 2;
const PUSHED: &str = "kvasir_store_pushed_bytes_total";
const QUERIES: &str = "kvasir_route_query_bytes_total";
const PARTIALS: &str = "kvasir_route_partial_bytes_total";
const BLOCK_TOKENS: u32 = 64;
/// Logarithms of probabilities were measured to differ by up to 7e-5 with where rows are attended: two of them change
/// places where they are no further apart than twice that.
const TIE: f64 = 2e-4;
/// Longer than a group of pages takes on the slowest wire that is measured.
const CALM_FOR: Duration = Duration::from_millis(250);
const CALM_LOOKS_MAX: u32 = 40;

/// What the bytes of routed queries follow from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Model {
    pub vocab: u32,
    heads: u64,
    layers: u64,
    /// Of one row, in f32: a query, and its partial with maximum and denominator.
    query_bytes: u64,
    partial_bytes: u64,
}

impl Model {
    pub(super) fn of(config: &ModelConfig) -> Model {
        Model {
            vocab: config.vocab as u32,
            heads: config.heads as u64,
            layers: config.layers as u64,
            query_bytes: 4 * config.row_width() as u64,
            partial_bytes: 4 * config.rank as u64 + 8,
        }
    }

    /// Bytes of queries and of partials, where all agents together ask so many holders: for each row what it has, in
    /// each layer, for each token that is computed. The last layer computes of a prompt what the first token needs
    /// alone.
    fn routed_bytes(&self, cell: &Cell, holders: u64) -> (u64, u64) {
        let prompt = cell.document_tokens + QUESTION_TOKENS;
        let after = u64::from(prompt - (prompt - 1) / BLOCK_TOKENS * BLOCK_TOKENS);
        let steps = u64::from(cell.generated_tokens) - 1;
        let layers = (self.layers - 1) * after + 1 + self.layers * steps;
        let rows = holders * self.heads * layers;
        (rows * self.query_bytes, rows * self.partial_bytes)
    }
}

/// Bytes that moved while one alternative was measured.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Bytes {
    pub queries: f64,
    pub partials: f64,
    /// Of the cache.
    pub cached: f64,
}

/// One cell, measured.
#[derive(Debug)]
pub(super) struct Measured {
    pub cell: Cell,
    /// Until the last agent has its answer, by [`Way::ALL`]: the median.
    pub forced_ms: [f64; 3],
    /// The same, as it was decided.
    pub decided_ms: f64,
    /// How many agents, over all repeats, by [`Way::ALL`].
    pub decided: [u32; 3],
    /// Predicted for one agent that comes first, by [`Way::ALL`].
    pub predicted_ms: [Option<f64>; 3],
    /// Of what was routed by force, and what its bytes should be.
    pub routed: Bytes,
    pub expected: Bytes,
    pub fetched: Bytes,
    pub same_tokens: bool,
}

impl Measured {
    pub(super) fn best_ms(&self) -> f64 {
        self.forced_ms.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(super) fn best(&self) -> Way {
        let (at, _) =
            (0..).zip(self.forced_ms).min_by(|a, b| a.1.total_cmp(&b.1)).unwrap_or((0, 0.0));
        Way::ALL[at]
    }

    /// What all agents were given, where that is one.
    pub(super) fn chosen(&self) -> Option<Way> {
        let mut taken = Way::ALL.into_iter().filter(|way| self.decided[*way as usize] > 0);
        taken.next().filter(|_| taken.next().is_none())
    }

    /// Of what was decided over the best: what was measured by force, or of several ways side by side what was
    /// measured as it was decided.
    pub(super) fn regret(&self) -> f64 {
        let took_ms = self.chosen().map_or(self.decided_ms, |way| self.forced_ms[way as usize]);
        took_ms / self.best_ms()
    }

    /// Queries and partials over what they should be, less one: the larger.
    pub(super) fn bytes_off(&self) -> f64 {
        let off = |got: f64, want: f64| (got / want - 1.0).abs();
        let (got, want) = (&self.routed, &self.expected);
        off(got.queries, want.queries).max(off(got.partials, want.partials))
    }
}

/// Lets every engine meet every alternative, so that lines are open and prices are measured ones.
pub(super) async fn warm_up(asking: &mut Asking, model: &Model) -> Result<(), Failed> {
    for (document_tokens, agents, generated_tokens) in [(256, 1, 8), (1_024, 2, 16), (512, 1, 16)] {
        let cell = Cell { wire: String::new(), document_tokens, agents, generated_tokens };
        self::cell(asking, model, &cell, 3).await?;
    }
    Ok(())
}

/// Each repeat has a document of its own. What is fetched or computed stays with its engine, and what is routed
/// does not: so the two that leave nothing share one, and the engines change places with each repeat.
pub(super) async fn cell(
    asking: &mut Asking,
    model: &Model,
    cell: &Cell,
    repeats: u32,
) -> Result<Measured, Failed> {
    let mut forced = [const { Vec::new() }; 3];
    let mut measured = Measured {
        cell: cell.clone(),
        forced_ms: [0.0; 3],
        decided_ms: 0.0,
        decided: [0; 3],
        predicted_ms: [None; 3],
        routed: Bytes::default(),
        expected: Bytes::default(),
        fetched: Bytes::default(),
        same_tokens: true,
    };
    let mut decided = Vec::new();
    for repeat in 0..repeats {
        let document = asking.tokens(cell.document_tokens);
        let prompts: Vec<Vec<u32>> = (0..cell.agents)
            .map(|_| [&document[..], &asking.tokens(QUESTION_TOKENS)].concat())
            .collect();
        asking.place_document(&document, HOLDER).await?;
        let engine = |way: Way| FIRST + (way as u32 + repeat) % 3;
        // Whatever comes first meets colder caches of the processor: it is not always the same.
        let order = match repeat % 2 {
            0 => [Some(Way::Route), None, Some(Way::Fetch), Some(Way::Recompute)],
            _ => [Some(Way::Recompute), Some(Way::Fetch), Some(Way::Route), None],
        };
        let mut answers: Option<Vec<Vec<u32>>> = None;
        for way in order {
            let at = engine(way.unwrap_or(Way::Route));
            let before = calm(asking).await?;
            let (got, took) = asking.ask_all(&prompts, cell.generated_tokens, at, way).await?;
            let moved = bytes(asking).await?.less(before);
            let took_ms = took.as_secs_f64() * 1e3;
            let tokens: Vec<Vec<u32>> = got.iter().map(|one| one.tokens.clone()).collect();
            let first = answers.get_or_insert_with(|| tokens.clone());
            measured.same_tokens &= agree(asking, &prompts, first, &tokens).await?;
            match way {
                Some(way) => {
                    forced[way as usize].push(took_ms);
                    let placements = check_forced(asking, &got, way).await?;
                    match way {
                        Way::Route => {
                            let holders = placements.iter().map(holders_of).sum();
                            let (queries, partials) = model.routed_bytes(cell, holders);
                            measured.expected.queries += queries as f64;
                            measured.expected.partials += partials as f64;
                            measured.routed.add(moved);
                        }
                        Way::Fetch => measured.fetched.add(moved),
                        Way::Recompute => {}
                    }
                }
                None => {
                    decided.push(took_ms);
                    count_decisions(asking, &got, &mut measured).await?;
                }
            }
        }
    }
    measured.forced_ms = forced.map(median);
    measured.decided_ms = median(decided);
    Ok(measured)
}

/// Whether answers are the same up to where two tokens are as good as equally likely, of which rounding then takes
/// the one or the other.
async fn agree(
    asking: &Asking,
    prompts: &[Vec<u32>],
    some: &[Vec<u32>],
    others: &[Vec<u32>],
) -> Result<bool, Failed> {
    for ((prompt, some), other) in prompts.iter().zip(some).zip(others) {
        let Some(at) = some.iter().zip(other).position(|(a, b)| a != b) else { continue };
        let lead = asking.lead(&[prompt, &some[..at]].concat()).await?;
        if lead > TIE {
            complain(&format!(
                "two answers differ at token {at}, where the log-probabilities of the two likeliest tokens \
                 differ by {lead:.1e}"
            ));
            return Ok(false);
        }
    }
    Ok(true)
}

/// What was decided for each of them. Who comes when a sibling has brought the document, or has computed it, finds
/// it on its own node: that is the sibling's way.
async fn ways(asking: &Asking, answers: &[Answered]) -> Result<Vec<(Way, Value)>, Failed> {
    let mut placements = Vec::with_capacity(answers.len());
    for answered in answers {
        placements.push(asking.placement(answered).await?);
    }
    let brought = placements.iter().filter_map(way_of).find(|way| *way != Way::Route);
    let way = |placement: Value| match way_of(&placement).or(brought) {
        Some(way) => Ok((way, placement)),
        None => {
            let cache = placement["cache_summary"].as_str().unwrap_or("no explanation");
            Err(format!("the agents' own node already had the document: {cache}").into())
        }
    };
    placements.into_iter().map(way).collect()
}

/// Nodes that attend a part of what a placement leaves elsewhere.
fn holders_of(placement: &Value) -> u64 {
    placement["prefix"]["nodes"].as_array().map_or(1, |nodes| nodes.len() as u64)
}

async fn check_forced(
    asking: &Asking,
    answers: &[Answered],
    way: Way,
) -> Result<Vec<Value>, Failed> {
    let mut placements = Vec::with_capacity(answers.len());
    for (came, placement) in ways(asking, answers).await? {
        if came != way {
            let cache = placement["cache_summary"].as_str().unwrap_or("no explanation");
            return Err(
                format!("the requested action {} was not taken: {cache}", way.name()).into()
            );
        }
        placements.push(placement);
    }
    Ok(placements)
}

async fn count_decisions(
    asking: &Asking,
    answers: &[Answered],
    measured: &mut Measured,
) -> Result<(), Failed> {
    for (way, placement) in ways(asking, answers).await? {
        measured.decided[way as usize] += 1;
        let Some(ways) = placement["prefix"]["actions"].as_array() else { continue };
        if measured.predicted_ms.iter().any(Option::is_some) {
            continue;
        }
        measured.predicted_ms = Way::ALL.map(|way| {
            let priced =
                ways.iter().find(|priced| priced["action"].as_str() == Some(way.name()))?;
            Some(priced["total_us"].as_f64()? / 1e3)
        });
    }
    Ok(())
}

async fn bytes(asking: &Asking) -> Result<Bytes, Failed> {
    Ok(Bytes {
        queries: asking.counted(QUERIES).await?,
        partials: asking.counted(PARTIALS).await?,
        cached: asking.counted(PUSHED).await?,
    })
}

/// When nothing moves any more, or after ten seconds: a fetch that a sibling made needless may still be on a slow wire, beside whose bytes
/// the next way would be slow and would count them as its own.
async fn calm(asking: &Asking) -> Result<Bytes, Failed> {
    let mut before = bytes(asking).await?;
    for _ in 0..CALM_LOOKS_MAX {
        tokio::time::sleep(CALM_FOR).await;
        let now = bytes(asking).await?;
        if now == before {
            return Ok(now);
        }
        before = now;
    }
    Ok(before)
}

impl Bytes {
    fn less(self, before: Bytes) -> Bytes {
        Bytes {
            queries: self.queries - before.queries,
            partials: self.partials - before.partials,
            cached: self.cached - before.cached,
        }
    }

    fn add(&mut self, more: Bytes) {
        self.queries += more.queries;
        self.partials += more.partials;
        self.cached += more.cached;
    }
}
