//! Models that plain OpenAI servers answer: requests are passed on as they are, answers come back as
//! they come. What this adds is the choice of a server, and what the front door does for all requests:
//! keys, quotas, limits, deadlines.
//!
//! - [`backend`]: one server: whether it answers, what is under way there
//! - [`affinity`]: which server has probably seen the beginning of a prompt
//! - [`forward`]: one request; [`fields`]: its members, as they were written
//! - [`upstream`]: connections to a server
//! - [`passing`]: an answer on its way back

mod affinity;
mod backend;
mod fields;
mod forward;
mod passing;
mod upstream;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use prometheus::{IntCounterVec, IntGaugeVec};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::config::BackendConfig;
use crate::serve::{PassedOn, ServerSeen, ServerState, Why};
use affinity::{Affinity, Beginning, Near};
use backend::{Backend, Flight};

pub(crate) use forward::{Endpoint, forward, model_of};

/// How often it is seen which servers answer.
const PROBE_EVERY: Duration = Duration::from_secs(2);
/// A server that has so many more under way than twice the least busy one is not asked for the sake of
/// what it may have cached.
const SLACK: usize = 4;

/// All models that are passed on.
#[derive(Debug)]
pub(crate) struct Proxies {
    models: BTreeMap<String, Pool>,
    counts: ProxyMetrics,
}

/// Counters of [`Proxies`].
#[derive(Debug, Clone)]
pub(crate) struct ProxyMetrics {
    /// Requests by model and by how the server answered.
    pub requests: IntCounterVec,
    /// Servers that answer, by model.
    pub alive: IntGaugeVec,
}

/// The servers of one model.
#[derive(Debug)]
struct Pool {
    backends: Vec<Arc<Backend>>,
    affinity: Affinity,
}

/// One server, for people.
#[derive(Debug, Serialize)]
pub(crate) struct BackendOverview {
    model: String,
    url: String,
    healthy: bool,
    running_requests: usize,
}

/// A server, with a place there.
#[derive(Debug)]
struct Chosen {
    at: usize,
    flight: Flight,
    why: Why,
    /// Who had seen most of the beginning, whether or not it is that.
    near: Option<usize>,
}

/// Why no server is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Nobody {
    /// All that answer have as much under way as they may.
    Full,
    NoneAnswers,
}

impl Proxies {
    /// Reads the keys for the servers.
    ///
    /// # Errors
    /// A sentence that names what is wrong.
    pub(crate) fn load(configs: &[BackendConfig], counts: ProxyMetrics) -> Result<Proxies, String> {
        let mut models: BTreeMap<String, Pool> = BTreeMap::new();
        for config in configs {
            let backend = Backend::load(config)?;
            let pool = models
                .entry(config.model.clone())
                .or_insert_with(|| Pool { backends: Vec::new(), affinity: Affinity::default() });
            pool.backends.push(Arc::new(backend));
        }
        Ok(Proxies { models, counts })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.models.is_empty()
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.models.keys().map(String::as_str)
    }

    pub(crate) fn has(&self, model: &str) -> bool {
        self.models.contains_key(model)
    }

    /// Some server of some model answers.
    pub(crate) fn is_ready(&self) -> bool {
        self.models.values().flat_map(|pool| &pool.backends).any(|backend| backend.is_alive())
    }

    pub(crate) fn overview(&self) -> Vec<BackendOverview> {
        let of = |(model, pool): (&String, &Pool)| {
            let one = |backend: &Arc<Backend>| BackendOverview {
                model: model.clone(),
                url: backend.url().to_owned(),
                healthy: backend.is_alive(),
                running_requests: backend.in_flight(),
            };
            pool.backends.iter().map(one).collect::<Vec<_>>()
        };
        self.models.iter().flat_map(of).collect()
    }

    /// Sees again and again who answers, until `until`.
    pub(crate) async fn follow(self: Arc<Self>, until: CancellationToken) {
        let _ = until.run_until_cancelled(self.probe_for_ever()).await;
    }

    async fn probe_for_ever(&self) {
        loop {
            let all = self.models.values().flat_map(|pool| &pool.backends);
            futures::future::join_all(all.map(|backend| backend.probe())).await;
            for (model, pool) in &self.models {
                let alive = pool.backends.iter().filter(|backend| backend.is_alive()).count();
                self.counts.alive.with_label_values(&[model]).set(alive as i64);
            }
            tokio::time::sleep(PROBE_EVERY).await;
        }
    }
}

impl Pool {
    /// The server for a prompt with this beginning, and a place there; `tried` have failed already. The one
    /// that saw most of the beginning, or its key last, unless it is much busier than the others; else the
    /// least busy one.
    fn choose(&self, beginning: &Beginning, tried: &[usize]) -> Result<Chosen, Nobody> {
        let mut passed_over = tried.to_vec();
        loop {
            let open = |at: &usize| !passed_over.contains(at) && self.backends[*at].is_alive();
            let alive: Vec<usize> = (0..self.backends.len()).filter(open).collect();
            let least = alive.iter().map(|&at| self.backends[at].in_flight()).min();
            let Some(least) = least else {
                let full = passed_over.len() > tried.len();
                return Err(if full { Nobody::Full } else { Nobody::NoneAnswers });
            };
            let near = self.affinity.seen_by(beginning);
            let is_open = |near: &Near| {
                let in_flight = || self.backends[near.at].in_flight();
                alive.contains(&near.at) && in_flight() <= 2 * least + SLACK
            };
            let (at, why) = match near.filter(is_open) {
                Some(Near { at, bytes: Some(bytes) }) => (at, Why::LongestPrefix { bytes }),
                Some(Near { at, bytes: None }) => (at, Why::SameCacheKey),
                None => {
                    let first = self.affinity.turn();
                    let of = |&at: &usize| {
                        let turn = (at + first) % self.backends.len();
                        (self.backends[at].in_flight(), turn)
                    };
                    let least = alive.iter().copied().min_by_key(of);
                    (least.unwrap_or_default(), Why::LeastBusy)
                }
            };
            if let Some(flight) = self.backends[at].begin() {
                self.affinity.remember(beginning, at);
                return Ok(Chosen { at, flight, why, near: near.map(|near| near.at) });
            }
            passed_over.push(at);
        }
    }

    /// A choice in words. `tried` had failed before.
    fn explain(
        &self,
        chosen: Result<&Chosen, Nobody>,
        tried: &[usize],
        prompt_bytes: usize,
    ) -> PassedOn {
        let to = chosen.ok().map(|chosen| chosen.at);
        let near = chosen.ok().and_then(|chosen| chosen.near);
        let server = |(at, backend): (usize, &Arc<Backend>)| {
            let is_chosen = to == Some(at);
            let in_flight = backend.in_flight().saturating_sub(usize::from(is_chosen));
            let state = if is_chosen {
                ServerState::Chosen
            } else if tried.contains(&at) {
                ServerState::Failed
            } else if !backend.is_alive() {
                ServerState::Unhealthy
            } else if in_flight >= backend.in_flight_max() {
                ServerState::Full
            } else if near == Some(at) {
                ServerState::TooBusy
            } else {
                ServerState::NotPreferred
            };
            ServerSeen {
                url: backend.url().to_owned(),
                running_requests: in_flight,
                running_requests_max: backend.in_flight_max(),
                state,
            }
        };
        PassedOn {
            forwarded_to: to.map(|at| self.backends[at].url().to_owned()),
            why: match chosen {
                Ok(chosen) => chosen.why,
                Err(Nobody::Full) => Why::AllFull,
                Err(Nobody::NoneAnswers) => Why::NoneHealthy,
            },
            prompt_bytes,
            backends: self.backends.iter().enumerate().map(server).collect(),
        }
    }
}
