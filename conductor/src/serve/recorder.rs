//! The latest decisions with what came of them, in a ring of fixed length: the oldest goes first.
//! Neither prompts nor answers are kept.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kvasir_placement::{Inputs, Placement, RecordedDecision, Refusal, Refused};
use serde::Serialize;
use serde_json::{Value, json};

use super::class::CacheClass;
use super::job::Ended;
use super::passed_on::PassedOn;
use crate::cluster::NotPlaced;

/// See the module.
#[derive(Debug)]
pub(crate) struct Recorder {
    kept: usize,
    inputs_bytes_max: usize,
    ring: Mutex<Ring>,
}

#[derive(Debug, Default)]
struct Ring {
    records: VecDeque<Arc<Record>>,
    /// Of them, those that have their inputs yet.
    with_inputs: VecDeque<Arc<Record>>,
    inputs_bytes: usize,
}

impl Recorder {
    /// Keeps so many decisions, with 0 none, and so much of what they were taken from.
    pub(crate) fn new(kept: usize, inputs_bytes_max: usize) -> Recorder {
        Recorder { kept, inputs_bytes_max, ring: Mutex::default() }
    }

    /// Where the decisions for one answer go.
    pub(crate) fn trail(&self, asked: Asked) -> Trail<'_> {
        Trail { recorder: self, asked, first_token: Arc::default(), latest: Mutex::default() }
    }

    /// How many, at most.
    pub(crate) fn kept(&self) -> usize {
        self.kept
    }

    /// The latest first.
    pub(crate) fn latest(&self) -> Vec<Arc<Record>> {
        self.lock().records.iter().rev().cloned().collect()
    }

    fn push(&self, record: Arc<Record>) {
        let mut ring = self.lock();
        // What goes is freed after the lock.
        let full = ring.records.len() >= self.kept;
        let oldest = if full { ring.records.pop_front() } else { None };
        if record.inputs_bytes > 0 {
            ring.inputs_bytes += record.inputs_bytes;
            ring.with_inputs.push_back(Arc::clone(&record));
        }
        ring.records.push_back(record);
        let mut forgotten = Vec::new();
        let is_oldest =
            |first: &Arc<Record>| oldest.as_ref().is_some_and(|o| Arc::ptr_eq(o, first));
        while let Some(first) = ring.with_inputs.front()
            && (ring.inputs_bytes > self.inputs_bytes_max || is_oldest(first))
        {
            ring.inputs_bytes -= first.inputs_bytes;
            forgotten.extend(ring.with_inputs.pop_front());
        }
        drop(ring);
        for record in forgotten {
            record.inputs().take();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What decisions are taken for.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub request_id: Arc<str>,
    pub model: Arc<str>,
    pub prompt_tokens: u32,
    pub cache: CacheClass,
    /// By a caller with a front door of its own: nothing is booked, and nobody here hears what comes of it.
    pub is_schedule_only: bool,
}

/// The decisions for one answer: one for each attempt at it.
#[derive(Debug)]
pub(crate) struct Trail<'a> {
    recorder: &'a Recorder,
    asked: Asked,
    first_token: Arc<OnceLock<Duration>>,
    latest: Mutex<Option<Arc<Record>>>,
}

impl Trail<'_> {
    /// When, after its arrival, the request had its first token.
    pub(crate) fn first_token(&self) -> &OnceLock<Duration> {
        &self.first_token
    }

    /// One more decision.
    pub(crate) fn placed(&self, placement: &Placement, inputs: Option<Box<Inputs>>) {
        if self.recorder.kept > 0 {
            self.record(Decision::Placed(Box::new(placement.clone())), inputs);
        }
    }

    /// There is no place for it. Answers with why, and keeps the rest: a cluster that refuses much copies
    /// nothing for it.
    pub(crate) fn refused(&self, none: NotPlaced) -> Refusal {
        let NotPlaced { refused, inputs } = none;
        let refusal = refused.refusal.clone();
        if self.recorder.kept > 0 {
            self.record(Decision::Refused(Box::new(refused)), inputs);
        }
        refusal
    }

    /// It was passed on to a server that is none of ours, or to none. `what` is not asked where nothing is kept.
    pub(crate) fn passed_on(&self, what: impl FnOnce() -> PassedOn) {
        if self.recorder.kept > 0 {
            self.record(Decision::PassedOn(Box::new(what())), None);
        }
    }

    fn record(&self, decision: Decision, inputs: Option<Box<Inputs>>) {
        let record = Arc::new(Record {
            at_unix_ms: unix_ms(),
            asked: self.asked.clone(),
            decision,
            inputs_bytes: inputs.as_ref().map_or(0, |inputs| inputs.bytes()),
            inputs: Mutex::new(inputs),
            first_token: Arc::clone(&self.first_token),
            outcome: OnceLock::new(),
        });
        *self.latest() = Some(Arc::clone(&record));
        self.recorder.push(record);
    }

    /// How the latest decision ended: "ok", or in a word or a sentence why not.
    pub(crate) fn ended(&self, result: &str, ended: Option<&Ended>) {
        if let Some(record) = &*self.latest() {
            record.ended(result, ended);
        }
    }

    /// The latest decision, for whoever goes on with the answer.
    pub(crate) fn latest_record(&self) -> Option<Arc<Record>> {
        self.latest().clone()
    }

    fn latest(&self) -> MutexGuard<'_, Option<Arc<Record>>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One decision.
#[derive(Debug)]
pub(crate) struct Record {
    pub at_unix_ms: u64,
    pub asked: Asked,
    pub decision: Decision,
    /// What it was taken from, where that is captured and not forgotten since.
    inputs: Mutex<Option<Box<Inputs>>>,
    inputs_bytes: usize,
    /// Of the request, whichever attempt it came from.
    first_token: Arc<OnceLock<Duration>>,
    /// Absent while it runs.
    outcome: OnceLock<Outcome>,
}

#[derive(Debug)]
pub(crate) enum Decision {
    Placed(Box<Placement>),
    Refused(Box<Refused>),
    PassedOn(Box<PassedOn>),
}

/// What came of a decision.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Outcome {
    /// "ok", or why not.
    pub result: String,
    /// From the decision on.
    pub duration_ms: u64,
    pub cached_tokens: Option<u32>,
    pub generated_tokens: Option<u32>,
    /// What became of what was predicted: of the time between tokens the mean of the longest tenth, and what
    /// the prefill took by its engine's word beside what was predicted for what it really computed.
    pub tbt_us: Option<u64>,
    pub prefill_us: Option<u64>,
    pub predicted_prefill_us: Option<u64>,
}

impl Record {
    /// From the request's arrival.
    pub(crate) fn ttft_ms(&self) -> Option<f64> {
        self.first_token.get().map(|ttft| ttft.as_secs_f64() * 1e3)
    }

    /// So long after the request's arrival it had its first token; what is said later of it counts for nothing.
    pub(crate) fn first_token(&self, after: Duration) {
        let _ = self.first_token.set(after);
    }

    /// As [`Trail::ended`]; what is said later of it counts for nothing.
    pub(crate) fn ended(&self, result: &str, ended: Option<&Ended>) {
        let prefill = ended.and_then(|ended| ended.prefill);
        let _ = self.outcome.set(Outcome {
            result: result.to_owned(),
            duration_ms: unix_ms().saturating_sub(self.at_unix_ms),
            cached_tokens: ended.map(|ended| ended.cached_tokens),
            generated_tokens: ended.map(|ended| ended.generated_tokens),
            tbt_us: ended.and_then(|ended| ended.tbt_us),
            prefill_us: prefill.map(|prefill| prefill.measured_us),
            predicted_prefill_us: prefill.map(|prefill| prefill.predicted_us),
        });
    }

    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        self.outcome.get()
    }

    /// With what it was taken from, to be taken again elsewhere.
    pub(crate) fn recorded(&self) -> Option<RecordedDecision> {
        let decided = match &self.decision {
            Decision::Placed(placement) => Ok(&**placement),
            Decision::Refused(refused) => Err(&**refused),
            Decision::PassedOn(_) => return None,
        };
        self.inputs().as_ref().map(|inputs| RecordedDecision::new(inputs, decided))
    }

    fn inputs(&self) -> MutexGuard<'_, Option<Box<Inputs>>> {
        self.inputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In one line of a list.
    pub(crate) fn summary(&self) -> Value {
        let mut line = self.head();
        match &self.decision {
            Decision::Placed(placement) => {
                let explained = placement.explain();
                line["prefill"] = json!(explained.prefill);
                line["decode"] = json!(explained.decode);
                line["fetch_from"] = json!(explained.fetch.map(|fetch| fetch.from));
                line["reused_tokens"] = json!(explained.reused_tokens);
                line["predicted_ttft_ms"] = json!(explained.predicted_ttft_us as f64 / 1e3);
                line["cache_summary"] = json!(explained.cache_summary);
            }
            Decision::Refused(refused) => line["refused"] = json!(refused.refusal.to_string()),
            Decision::PassedOn(passed) => match &passed.forwarded_to {
                Some(to) => {
                    line["forwarded_to"] = json!(to);
                    line["message"] = json!(passed.reason());
                }
                None => line["refused"] = json!(passed.reason()),
            },
        }
        line
    }

    /// With all candidates and the text of the decision.
    pub(crate) fn full(&self) -> Value {
        let mut record = self.head();
        match &self.decision {
            Decision::Placed(placement) => {
                record["placement"] = json!(placement.explain());
                record["text"] = json!(placement.to_string());
            }
            Decision::Refused(refused) => {
                record["refused"] = json!(refused.refusal.to_string());
                record["refusal"] = json!(refused.explain());
                record["text"] = json!(refused.to_string());
            }
            Decision::PassedOn(passed) => {
                if passed.forwarded_to.is_none() {
                    record["refused"] = json!(passed.reason());
                }
                record["backend_choice"] = json!(passed);
                record["text"] = json!(passed.to_string());
            }
        }
        record
    }

    fn head(&self) -> Value {
        json!({
            "at_unix_ms": self.at_unix_ms,
            "request_id": &*self.asked.request_id,
            "model": &*self.asked.model,
            "prompt_tokens": self.asked.prompt_tokens,
            "cache_class": self.asked.cache.name(),
            "is_schedule_only": self.asked.is_schedule_only,
            "ttft_ms": self.ttft_ms(),
            "outcome": self.outcome(),
        })
    }
}

/// Milliseconds since the Unix epoch.
pub(crate) fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
