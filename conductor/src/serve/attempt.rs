//! One attempt at an answer, on instances that are chosen.
//!
//! Shares are allocated on all nodes at once. Then everything that can run beside each other does:
//! the fetch, the naming of the push's targets, and both legs; the nodes and engines order it
//! among themselves. The first token from the decode side is the hand-over: until then the
//! conductor renews, and any failure leads to another attempt; afterwards the engine renews, and a
//! failure ends the answer.

use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::v1::{self, finished::Reason};
use kvasir_proto::{BlockKey, InstanceId, Side};
use tonic::Status;

use super::Serving;
use super::fault::{Failure, Fault, FaultKind, InstanceFault};
use super::fetch::{self, Fetch};
use super::job::{Ended, FinishReason, Job, Prompt};
use super::legs::{self, Leg};
use super::outputs::Outlet;
use super::pace::Pace;
use super::phase::{Phase, PhaseCell};
use super::transaction::{Transaction, within};
use crate::cluster::{EngineTarget, Placed};

/// What an attempt works with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scene<'a> {
    pub serving: &'a Arc<Serving>,
    pub job: &'a Job,
    /// The job's prompt with the keys of the model as it is now.
    pub prompt: &'a Prompt,
    pub phase: &'a PhaseCell,
    pub outlet: &'a Outlet,
}

/// After the answer's end, how long the prefill side may take to say what was cached there. It has
/// said so before the hand-over, but on another connection.
const CACHED_WITHIN: Duration = Duration::from_secs(1);

/// Runs it to the end of the answer; all tokens have then been passed on.
pub(super) async fn run(scene: Scene<'_>, placed: Placed) -> Result<(String, Ended), Fault> {
    let Scene { serving, job, phase, .. } = scene;
    let Placed { prefill, decode, fetch, mut booking, .. } = placed;
    phase.set(Phase::Allocating);
    let mut shares = vec![(prefill.node.clone(), Side::Prefill)];
    shares.extend(decode.iter().map(|decode| (decode.node.clone(), Side::Decode)));
    shares.extend(fetch.iter().map(|fetch| (fetch.node.clone(), Side::Source)));
    let mut transaction = Transaction::begin(serving, phase, shares);
    tracing::Span::current().record("tx", tracing::field::display(transaction.tx));

    let reserved = allocate(scene, &transaction, &prefill, decode.as_ref(), fetch.as_ref()).await?;
    let (fetched_until, held) = (fetch.as_ref().map_or(0, |f| f.until_block), reserved.held_blocks);
    let reused = held.max(fetched_until).saturating_mul(scene.prompt.block_tokens());
    booking.revise(reused.min(scene.prompt.length().saturating_sub(1)));
    let mut renewal = Some(transaction.renew());
    phase.set(if reserved.fetch.is_some() { Phase::Fetching } else { Phase::Prefilling });

    let tx = transaction.tx;
    let mut fetching = pin!(fetch::run(serving, job, tx, &prefill, reserved.fetch));
    let mut fetching_done = false;
    let mut pushing = pin!(push(serving, tx, &prefill, reserved.decode_targets));
    let mut pushing_done = decode.is_none();
    let cached = OnceLock::new();
    let request = |leg| generate_request(scene, tx, leg);
    let prefill_leg = Leg::new(&prefill, request(v1::Leg::Prefill));
    let mut prefilling = pin!(legs::prefill(prefill_leg, &cached));
    let mut prefilling_done = decode.is_none();
    let (answering, leg) = match &decode {
        Some(decode) => (decode, v1::Leg::Decode),
        None => (&prefill, v1::Leg::Whole),
    };
    let mut answer = Leg::new(answering, request(leg));
    let mut pace = Pace::new();

    let finished = loop {
        tokio::select! {
            fetched = &mut fetching, if !fetching_done => {
                fetching_done = true;
                let moved = fetched.map_err(|status| fault(scene, &status, &prefill.instance_id))?;
                if fetch.is_some() {
                    booking.fetched(moved);
                    match moved {
                        Some(_) => transaction.share_ended(Side::Source),
                        None => transaction.abort_share(Side::Source, "fetch"),
                    }
                    phase.set(Phase::Prefilling);
                }
            }
            pushed = &mut pushing, if !pushing_done => {
                pushing_done = true;
                pushed.map_err(|status| fault(scene, &status, &prefill.instance_id))?;
            }
            prefilled = &mut prefilling, if !prefilling_done => {
                prefilling_done = true;
                match prefilled {
                    Ok(done) => booking.prefilled(measured(&done)),
                    // The decode side has all it needs.
                    Err(_) if phase.get() == Phase::Decoding => {}
                    Err(status) => return Err(fault(scene, &status, &prefill.instance_id)),
                }
            }
            event = answer.next() => match event {
                Ok(Event::Accepted(accepted)) => {
                    if decode.is_none() {
                        let _ = cached.set(accepted.cached_tokens);
                    }
                }
                Ok(Event::Tokens(tokens)) => {
                    if phase.get() != Phase::Decoding {
                        phase.set(Phase::Decoding);
                        renewal = None;
                        booking.first_token();
                        booking.prefilled(None);
                        serving.metrics.ttft.observe(job.arrived.elapsed().as_secs_f64());
                    }
                    let count = tokens.tokens.len();
                    if let Some(interval_us) = pace.came(count, &serving.metrics) {
                        booking.stepped(interval_us);
                    }
                    scene.outlet.tokens(tokens).await?;
                    pace.passed_on();
                }
                Ok(Event::Finished(finished)) => break finished,
                Err(status) => return Err(fault(scene, &status, &answering.instance_id)),
            },
        }
    };
    drop(renewal);
    if decode.is_none() {
        booking.prefilled(measured(&finished));
    } else if cached.get().is_none() && !prefilling_done {
        let _ = tokio::time::timeout(CACHED_WITHIN, prefilling).await;
    }
    // The engines have released their shares, or do so as their calls end.
    transaction.finish();
    booking.complete();
    Ok(ending(finished, cached.get().copied().unwrap_or(0)))
}

/// What the nodes answered.
struct Reserved {
    held_blocks: u32,
    decode_targets: v1::WriteTargets,
    /// Absent when nothing is to be fetched.
    fetch: Option<Fetch>,
}

async fn allocate(
    scene: Scene<'_>,
    transaction: &Transaction<'_>,
    prefill: &EngineTarget,
    decode: Option<&EngineTarget>,
    source: Option<&crate::cluster::FetchSource>,
) -> Result<Reserved, Fault> {
    let max_tokens = scene.job.sampling.max_tokens;
    let keys = BlockKey::concat(scene.prompt.keys());
    let until = source.map_or(0, |source| source.until_block);
    let request = |side: Side| v1::TxAllocateRequest {
        tx: Some(transaction.tx.into()),
        side: side.to_wire(),
        namespace: scene.prompt.namespace().0.to_vec(),
        keys: keys.clone(),
        prompt_tokens: scene.prompt.length(),
        lease_ms: u64::try_from(scene.serving.options.lease.as_millis()).unwrap_or(u64::MAX),
        ..v1::TxAllocateRequest::default()
    };
    let on_prefill = async {
        let request = v1::TxAllocateRequest {
            fetch_until_block: until,
            writer_endpoint: source.map_or_else(Vec::new, |s| s.node.endpoint.to_vec()),
            answer_tokens_max: if decode.is_none() { max_tokens } else { 0 },
            ..request(Side::Prefill)
        };
        let reply = transaction.allocate(&prefill.node, request).await;
        reply.map_err(|status| fault(scene, &status, &prefill.instance_id))
    };
    let on_decode = async {
        let Some(decode) = decode else { return Ok(v1::WriteTargets::default()) };
        let request = v1::TxAllocateRequest {
            writer_endpoint: prefill.node.endpoint.to_vec(),
            answer_tokens_max: max_tokens,
            ..request(Side::Decode)
        };
        let reply = transaction.allocate(&decode.node, request).await;
        let targets = reply.and_then(|reply| {
            reply.targets.ok_or_else(|| Status::internal("the node named no place to write to"))
        });
        targets.map_err(|status| fault(scene, &status, &decode.instance_id))
    };
    // A source that has nothing costs time, not the request: the prompt is computed then.
    let on_source = async {
        let Some(source) = source else { return Ok(false) };
        let mut request = request(Side::Source);
        request.keys.truncate(until as usize * 16);
        request.fetch_until_block = until;
        let reply = transaction.allocate(&source.node, request).await;
        if let Err(status) = &reply {
            tracing::info!(node = %source.node.node_id, %status, "the source of a fetch declined");
        }
        Ok(reply.is_ok())
    };
    let (prefill_reply, decode_targets, pinned) =
        tokio::try_join!(on_prefill, on_decode, on_source)?;
    let held_blocks = prefill_reply.held_blocks;
    let fetch = source.zip(prefill_reply.targets).map(|(source, targets)| Fetch {
        source: source.clone(),
        targets,
        pinned,
    });
    Ok(Reserved { held_blocks, decode_targets, fetch })
}

/// Names the decode side's targets to the prefill side's node.
async fn push(
    serving: &Serving,
    tx: kvasir_proto::TxId,
    prefill: &EngineTarget,
    targets: v1::WriteTargets,
) -> Result<(), Status> {
    let side = Side::Prefill.to_wire();
    let request = v1::TxPushRequest { tx: Some(tx.into()), side, targets: Some(targets) };
    let mut client = prefill.node.client.clone();
    within(serving.options.lease, client.tx_push(request)).await.map(drop)
}

fn generate_request(scene: Scene<'_>, tx: kvasir_proto::TxId, leg: v1::Leg) -> v1::GenerateRequest {
    v1::GenerateRequest {
        tx: Some(tx.into()),
        leg: leg as i32,
        request_id: scene.job.request_id.to_string(),
        prompt: scene.prompt.tokens.to_vec(),
        sampling: Some(scene.job.sampling.clone()),
        namespace: scene.prompt.namespace().0.to_vec(),
    }
}

/// What a failed call means here: after the hand-over there is no other attempt.
fn fault(scene: Scene<'_>, status: &Status, instance: &InstanceId) -> Fault {
    let phase = scene.phase.get();
    match Fault::of(status, instance, phase) {
        Fault::Instance(InstanceFault { instance, message, .. }) if phase == Phase::Decoding => {
            tracing::warn!(%instance, message, "an answer broke off");
            Fault::Final(Failure::Interrupted { reason: format!("instance {instance} failed") })
        }
        Fault::Instance(fault) if fault.kind == FaultKind::Lost => {
            scene.serving.cluster.mark_failed(&fault.instance);
            Fault::Instance(fault)
        }
        fault => fault,
    }
}

/// Tokens computed and microseconds they took, when the engine says so.
fn measured(finished: &v1::Finished) -> Option<(u32, u64)> {
    let (tokens, us) = (finished.prompt_tokens_computed, finished.prefill_us);
    (tokens > 0 && us > 0).then_some((tokens, us))
}

fn ending(finished: v1::Finished, cached_tokens: u32) -> (String, Ended) {
    let reason = match finished.reason() {
        Reason::Length => FinishReason::Length,
        Reason::Stop | Reason::HandedOver | Reason::Unspecified => FinishReason::Stop,
    };
    let stop_matched = Some(finished.stop_matched).filter(|stop| !stop.is_empty());
    let answer_tokens = finished.answer_tokens;
    (finished.text, Ended { reason, stop_matched, cached_tokens, answer_tokens })
}
