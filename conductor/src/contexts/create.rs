//! Makes a context. Its steps are those of [`create`]: the prompt is read, whoever has it already is
//! asked to keep it, and otherwise it is served like any request and kept where it then lies.

use std::time::Duration;

use axum::http::StatusCode;
use axum::response::Response;
use bytes::Bytes;
use kvasir_proto::NodeId;
use tokio::time::{Instant, sleep};

use super::id::ContextId;
use super::nodes::{Chain, Kept, NotKept};
use super::shape::{Models, Shape};
use super::{json, tenant_of};
use crate::cluster::NodeHandle;
use crate::http::Front;
use crate::openai::{self, ApiError, Arrival, AskedContext};
use crate::serve::{Failure, Job, Progress, Prompt};

/// An answer is there a moment before all blocks of its prompt have come to rest; and a chain that is
/// kept just now can be kept again when that is done.
const LANDS_WITHIN: Duration = Duration::from_secs(2);
const LANDS_POLL: Duration = Duration::from_millis(20);

/// Answers `POST /v1/contexts`.
pub(crate) async fn create(
    front: &Front,
    arrival: Arrival,
    body: Bytes,
) -> Result<Response, ApiError> {
    let _place = front.contexts.place()?;
    let _running = front.serving.running();
    let reading = openai::ask_context(front, &arrival, body);
    let asked = openai::before_deadline(front, &arrival, openai::READING, reading).await?;
    if front.cluster.keepers().are_none() {
        return Err(nothing_keeps(front));
    }
    let prompt_tokens = asked.prompt.length();
    let creation = Creation { front, arrival: &arrival, asked };
    // On the heap, like the other requests that are computed.
    let creating = Box::pin(creation.run());
    let (id, kept) =
        openai::before_deadline(front, &arrival, "persisting the context", creating).await?;
    front.contexts.did("created");
    tracing::debug!(%id, context = ?kept, "the conductor persisted a context");
    let models = Models::of(&front.cluster, &arrival.tenant_salt);
    Ok(json(&Shape::new(id, kept, &models).made_of(prompt_tokens)))
}

struct Creation<'a> {
    front: &'a Front,
    arrival: &'a Arrival,
    asked: AskedContext,
}

impl Creation<'_> {
    async fn run(&self) -> Result<(ContextId, Kept), ApiError> {
        let AskedContext { prompt, .. } = &self.asked;
        self.check_length(prompt)?;
        let holders = self.front.cluster.holders(prompt.keys());
        let mut answer = self.keep(prompt, &holders, Duration::ZERO).await;
        if answer.as_ref().is_err_and(|not| !matches!(not, NotKept::Full(_))) {
            openai::take_prompt(self.front, self.arrival, prompt)?;
            answer = self.compute_and_keep().await?;
        }
        answer.map_err(|not| self.refused(not))
    }

    /// Only whole blocks are kept.
    fn check_length(&self, prompt: &Prompt) -> Result<(), ApiError> {
        if !prompt.keys().is_empty() {
            return Ok(());
        }
        let (got, needed) = (prompt.length(), prompt.block_tokens());
        let message = format!(
            "The prompt has {got} tokens; a context needs at least one block of {needed} tokens."
        );
        let error = ApiError::invalid(self.asked.param, message);
        let error = ApiError { code: "context_too_short", ..error };
        Err(self.front.contexts.refused("too_short", error))
    }

    /// Serves the prompt and keeps it, as often as a request is attempted.
    async fn compute_and_keep(&self) -> Result<Result<(ContextId, Kept), NotKept>, ApiError> {
        let mut answer = Err(NotKept::Unanswered);
        for _ in 0..self.front.serving.attempts_max() {
            let lies_at = self.serve().await?;
            self.arrival.is_worked_for();
            // The model may have been replaced meanwhile, and with it the keys.
            let prompt = openai::keyed_now(self.front, &self.asked)?;
            let nodes = self.front.cluster.keepers_among(&lies_at);
            answer = self.keep(&prompt, &nodes, LANDS_WITHIN).await;
            match &answer {
                Ok(_) | Err(NotKept::Full(_) | NotKept::Refused(_) | NotKept::Nowhere) => break,
                Err(not) => {
                    tracing::info!(reason = ?not, "the conductor computed a context, but no store node persisted it");
                }
            }
        }
        Ok(answer)
    }

    /// As any request is served; of the answer nothing is wanted but where the prompt now lies.
    async fn serve(&self) -> Result<Vec<NodeId>, ApiError> {
        let job: Job = openai::context_job(self.front, self.arrival, &self.asked);
        let mut outputs = self.front.serving.start(vec![job])?;
        loop {
            match outputs.next().await.ok_or_else(Failure::vanished)?.progress {
                Progress::Ended { ended, .. } => return Ok(ended.lies_at),
                Progress::Failed(failure) => return Err(failure.into()),
                Progress::Placed(_) | Progress::Tokens(_) | Progress::Anew => {}
            }
        }
    }

    /// Asks one of these nodes after the other, until one has kept all of it. What may be done in a moment
    /// is asked for again.
    async fn keep(
        &self,
        prompt: &Prompt,
        nodes: &[NodeHandle],
        patience: Duration,
    ) -> Result<(ContextId, Kept), NotKept> {
        let (Some(last_key), namespace) = (prompt.keys().last(), prompt.namespace()) else {
            return Err(NotKept::Lacking);
        };
        let id = ContextId { namespace, last_key: *last_key };
        let tenant = tenant_of(&self.arrival.tenant_salt);
        let AskedContext { ttl_ms, replicas, .. } = self.asked;
        let chain = Chain { tenant, namespace, keys: prompt.keys(), ttl_ms, replicas };
        let until = Instant::now() + patience;
        loop {
            let mut worst = NotKept::Nowhere;
            for node in nodes {
                match self.front.contexts.keep(node, chain).await {
                    Ok(kept) => return Ok((id, kept)),
                    Err(not) => worst = worst.max(not),
                }
            }
            let may_pass = matches!(worst, NotKept::Lacking | NotKept::Busy);
            if !may_pass || Instant::now() >= until {
                return Err(worst);
            }
            sleep(LANDS_POLL).await;
        }
    }

    fn refused(&self, not: NotKept) -> ApiError {
        let not_kept = |reason: &str| ApiError {
            code: "context_not_persisted",
            ..ApiError::unavailable(format!("The context could not be persisted: {reason}."))
        };
        let (label, error) = match not {
            NotKept::Full(reason) => {
                let message = format!("The context exceeds your quota: {reason}.");
                let status = StatusCode::TOO_MANY_REQUESTS;
                let error = ApiError::new(status, "context_quota_exceeded", message);
                ("quota", ApiError { reason: Some("quota_contexts"), ..error })
            }
            NotKept::Busy => {
                ("not_persisted", not_kept("a store node is busy or failed to write it"))
            }
            NotKept::Lacking => (
                "not_persisted",
                not_kept("its blocks were evicted before they could be persisted"),
            ),
            NotKept::Unanswered => (
                "node_unavailable",
                ApiError { code: "node_unavailable", ..not_kept("a store node does not answer") },
            ),
            NotKept::Refused(reason) => ("not_persisted", not_kept(&reason)),
            NotKept::Nowhere => {
                let reason = "the node that computed it has no durable tier";
                ("not_persisted", not_kept(reason))
            }
        };
        self.front.contexts.refused(label, error)
    }
}

fn nothing_keeps(front: &Front) -> ApiError {
    let message = "No store node has a durable tier, which contexts need: set `dir` in `[ssd]` of \
                   store-node.toml, or configure an object store.";
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "no_durable_tier", message);
    front.contexts.refused("no_durable_tier", error)
}
