//! One attempt at an answer, on instances that are chosen.
//!
//! Shares are allocated on all nodes at once. Then everything that can run beside each other does:
//! the fetch, the naming of the push's targets, and both legs; the nodes and engines order it
//! among themselves. The first token from the decode side is the hand-over: until then the
//! conductor renews, and any failure leads to another attempt; afterwards the engine renews, and a
//! failure ends the answer if it streams. A side whose lease cannot be renewed has failed.

use std::future::pending;
use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use kvasir_proto::Side;
use kvasir_proto::v1::generate_event::Event;
use kvasir_proto::v1::{self, finished::Reason};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::Serving;
use super::arrivals::{Lead, Outcome, Plan, Stage, Turn};
use super::chunks::{self, Brought};
use super::class::CacheClass;
use super::fault::{Failure, Fault, FaultKind, InstanceFault, engine_fault, node_fault};
use super::fetch;
use super::job::{Ended, FinishReason, Job, Prompt};
use super::legs::{self, Leg};
use super::outputs::Outlet;
use super::pace::Pace;
use super::phase::{Phase, PhaseCell};
use super::renewal::Renewal;
use super::reserve::{Computing, pin, reserve};
use super::transaction::{Transaction, within};
use crate::cluster::{Booking, EngineTarget, Placed, PrefillTime, RouteHolder};

/// What an attempt works with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scene<'a> {
    pub serving: &'a Arc<Serving>,
    pub job: &'a Job,
    /// The job's prompt with the keys of the model as it is now.
    pub prompt: &'a Prompt,
    pub phase: &'a PhaseCell,
    pub outlet: &'a Outlet,
    /// From the request's arrival to the first token of the first attempt that had one.
    pub first_token: &'a OnceLock<Duration>,
}

/// After the answer's end, how long the prefill side may take to say what was cached there. It has
/// said so before the hand-over, but on another connection.
const CACHED_WITHIN: Duration = Duration::from_secs(1);
/// After one side said no: for the other side to turn out to be lost, which may be the cause.
const BLAME_WITHIN: Duration = Duration::from_millis(200);

/// Runs it to the end of the answer; all tokens have then been passed on.
pub(super) async fn run(scene: Scene<'_>, placed: Placed) -> Result<(String, Ended), Fault> {
    let Scene { serving, job, phase, .. } = scene;
    let lead = begin(scene, &placed).await;
    let Placed { placement, prefill, decode, fetch, route, chunks, booking, .. } = placed;
    let (priority_delay_us, skip_promotion) = (placement.priority_delay_us, placement.leaves_ssd);
    phase.set(Phase::Allocating);
    let mut shares = vec![(prefill.node.clone(), Side::Prefill)];
    shares.extend(decode.iter().map(|decode| (decode.node.clone(), Side::Decode)));
    shares.extend(fetch.iter().map(|fetch| (fetch.node.clone(), Side::Source)));
    shares.extend(route.iter().map(|route| (route.node.clone(), Side::Source)));
    let mut transaction = Transaction::begin(serving, phase, shares);
    let tx = transaction.tx;
    tracing::Span::current().record("tx", tracing::field::display(tx));

    // What cannot stay where it is is computed.
    let route = match pin(scene, &mut transaction, &route).await {
        true => route,
        false => {
            booking.unrouted();
            Vec::new()
        }
    };
    let first_routed = route.first().map_or(0, |holder| holder.first_block);
    let routed_blocks = route.iter().map(|holder| holder.blocks).sum();
    let brought = chunks::bring(scene, &chunks, &prefill, &booking).await;
    let chunk_tokens_elsewhere = brought.tokens_elsewhere;
    let computing = Computing {
        target: &prefill,
        first_routed,
        routed_blocks,
        chunk_tokens_elsewhere,
        skip_promotion,
    };
    let reserved = reserve(scene, &transaction, computing, decode.as_ref(), fetch.as_ref()).await?;
    if !reserved.has_before(first_routed) {
        return Err(not_before(scene, &prefill));
    }
    let reused = reserved.reused_blocks().saturating_mul(scene.prompt.block_tokens());
    let reused = reused.saturating_add(brought.tokens_reused);
    booking.revise(reused.min(scene.prompt.length().saturating_sub(1)));
    phase.set(if reserved.fetch.is_some() { Phase::Fetching } else { Phase::Prefilling });

    let cached = OnceLock::new();
    let accepted = |tokens: u32| {
        let _ = cached.set(tokens);
        lead.iter().for_each(|lead| lead.reached(Stage::Fetched));
    };
    let (answering, leg) = match &decode {
        Some(decode) => (decode, v1::Phase::Decode),
        None => (&prefill, v1::Phase::Full),
    };
    let renewal = Some(transaction.renew());
    let (pace, routed) = (Pace::new(), !route.is_empty() || !brought.wire.is_empty());
    let mut course = Course {
        scene,
        transaction,
        booking,
        renewal,
        pace,
        cached: &cached,
        lead: lead.as_ref(),
        routed,
        brought,
        prefill: None,
    };
    let source_lost = CancellationToken::new();
    let lost = source_lost.clone();
    let mut fetching = pin!(fetch::run(serving, job, tx, &prefill, reserved.fetch, lost));
    let mut fetching_done = fetch.is_none();
    let mut pushing = pin!(push(serving, tx, &prefill, reserved.decode_targets));
    let mut pushing_done = decode.is_none();
    let trace = job.trace.as_ref();
    let prefill_leg = Leg::new(
        &prefill,
        generate_request(scene, tx, v1::Phase::Prefill, priority_delay_us),
        trace,
    );
    let mut prefilling = pin!(legs::prefill(prefill_leg, accepted));
    let mut prefilling_done = decode.is_none();
    let request = v1::GenerateRequest {
        routed: route.iter().map(|holder| routed_span(scene, tx, holder)).collect(),
        chunks: course.brought.wire.clone(),
        ..generate_request(scene, tx, leg, priority_delay_us)
    };
    let mut answer = Leg::new(answering, request, trace);

    let finished = loop {
        tokio::select! {
            fetched = &mut fetching, if !fetching_done => {
                fetching_done = true;
                course.fetched(fetched, &prefill)?;
            }
            pushed = &mut pushing, if !pushing_done => {
                pushing_done = true;
                course.pushed(pushed, &prefill)?;
            }
            prefilled = &mut prefilling, if !prefilling_done => {
                prefilling_done = true;
                if let Err(fault) = course.prefilled(prefilled, &prefill) {
                    return Err(blame(fault, fault_of(&mut answer, scene, answering)).await);
                }
            }
            side = course.lost() => match side {
                // What it would have sent is computed then.
                Side::Source => source_lost.cancel(),
                Side::Prefill => return Err(not_renewed(scene, &prefill)),
                Side::Decode => return Err(not_renewed(scene, answering)),
            },
            event = answer.next() => match event {
                Ok(Event::Accepted(event)) if decode.is_none() => accepted(event.cached_tokens),
                Ok(Event::Accepted(_)) => {}
                Ok(Event::Tokens(tokens)) => {
                    if !course.is_handed_over() {
                        let served = [&prefill.instance_id, &answering.instance_id];
                        serving.cluster.mark_served(&served);
                    }
                    course.tokens(tokens).await?;
                }
                Ok(Event::Finished(finished)) => break finished,
                Err(status) => {
                    let fault = engine_fault(scene, &status, answering);
                    let other = async {
                        let failed = prefilling.await.err()?;
                        Some(engine_fault(scene, &failed, &prefill))
                    };
                    return Err(if prefilling_done { fault } else { blame(fault, other).await });
                }
            },
        }
    };
    if !prefilling_done && cached.get().is_none() {
        let _ = tokio::time::timeout(CACHED_WITHIN, prefilling).await;
    }
    let (text, mut ended) = course.finish(finished, decode.is_none());
    ended.lies_at.extend([&prefill].into_iter().chain(&decode).map(|at| at.node.node_id.clone()));
    Ok((text, ended))
}

/// What changes while an attempt runs.
struct Course<'a> {
    scene: Scene<'a>,
    transaction: Transaction<'a>,
    booking: Booking,
    /// Until the hand-over.
    renewal: Option<Renewal>,
    pace: Pace,
    cached: &'a OnceLock<u32>,
    /// Absent where others do not find what it brings.
    lead: Option<&'a Lead<'a>>,
    /// A part of the prompt is attended elsewhere, or not computed in its place.
    routed: bool,
    brought: Brought<'a>,
    prefill: Option<PrefillTime>,
}

impl Course<'_> {
    /// A side whose lease could not be renewed.
    async fn lost(&mut self) -> Side {
        match &mut self.renewal {
            Some(renewal) => renewal.lost().await,
            None => pending().await,
        }
    }

    /// The decode side has all it needs: what still fails elsewhere does not matter.
    fn is_handed_over(&self) -> bool {
        self.scene.phase.get() == Phase::Decoding
    }

    fn fetched(
        &mut self,
        fetched: Result<fetch::Moved, Status>,
        prefill: &EngineTarget,
    ) -> Result<(), Fault> {
        match fetched {
            Ok(Some(moved)) => {
                self.booking.fetched(Some(moved));
                self.transaction.share_ended(Side::Source);
            }
            Ok(None) => {
                self.booking.fetched(None);
                self.transaction.abort_share(Side::Source, "fetch");
            }
            Err(_) if self.is_handed_over() => {}
            Err(status) => return Err(node_fault(self.scene, &status, prefill)),
        }
        // Its answer may come after the first token.
        if self.scene.phase.get() == Phase::Fetching {
            self.scene.phase.set(Phase::Prefilling);
        }
        Ok(())
    }

    fn pushed(&self, pushed: Result<(), Status>, prefill: &EngineTarget) -> Result<(), Fault> {
        match pushed {
            Err(status) if !self.is_handed_over() => Err(node_fault(self.scene, &status, prefill)),
            _ => Ok(()),
        }
    }

    fn prefilled(
        &mut self,
        prefilled: Result<v1::Finished, Status>,
        prefill: &EngineTarget,
    ) -> Result<(), Fault> {
        match prefilled {
            Ok(finished) => {
                self.is_computed();
                self.booking.queued(finished.queue_us.saturating_sub(finished.route_opening_us));
                self.prefill = self.booking.prefilled(measured(&finished));
            }
            Err(_) if self.is_handed_over() => {}
            Err(status) => return Err(engine_fault(self.scene, &status, prefill)),
        }
        Ok(())
    }

    /// The prompt is: others find it.
    fn is_computed(&self) {
        self.lead.iter().for_each(|lead| lead.reached(Stage::Computed));
    }

    /// Waits while the client takes nothing.
    async fn tokens(&mut self, tokens: v1::Tokens) -> Result<(), Failure> {
        let Scene { serving, job, phase, outlet, .. } = self.scene;
        if !self.is_handed_over() {
            self.is_computed();
            phase.set(Phase::Decoding);
            self.renewal = None;
            self.brought.hand_over();
            self.booking.first_token();
            self.booking.prefilled(None);
            let ttft = job.arrived.elapsed();
            if self.scene.first_token.set(ttft).is_ok() {
                serving.metrics.ttft.observe(ttft.as_secs_f64());
            }
        }
        self.booking.grew(tokens.tokens.len());
        if let Some(interval_us) = self.pace.came(tokens.tokens.len(), &serving.metrics) {
            self.booking.stepped(interval_us);
        }
        job.meter.came(tokens.tokens.len());
        outlet.tokens(tokens).await?;
        self.pace.passed_on();
        Ok(())
    }

    /// The engines have released their shares, or do so as their calls end.
    fn finish(mut self, finished: v1::Finished, whole: bool) -> (String, Ended) {
        // A first connection says nothing of those that follow.
        if finished.route_opening_us > 0 && !finished.route_connection_opened {
            self.booking.opened(finished.route_opening_us);
        }
        if finished.routed_layers > 0 {
            self.booking.routed(finished.routed_layers, finished.routed_us);
        }
        if let layers @ 1.. = finished.routed_prompt_layers {
            let (queries, us) = (finished.routed_prompt_queries, finished.routed_prompt_us);
            self.booking.prompt_routed(layers, queries, us);
        }
        if whole {
            self.booking.queued(finished.queue_us.saturating_sub(finished.route_opening_us));
            // What was attended elsewhere says nothing of prefills.
            let measured = measured(&finished).filter(|_| !self.routed);
            self.prefill = self.booking.prefilled(measured);
        }
        if let Some(interval_us) = self.pace.rest() {
            self.booking.stepped(interval_us);
        }
        let tbt_us = self.pace.seen_us();
        // Where it was routed, what others do where it decodes is not all that it waited for.
        if let Some(tbt_us) = tbt_us.filter(|_| !self.routed) {
            self.booking.paced(tbt_us, finished.generated_tokens);
        }
        self.transaction.finish();
        self.brought.finish();
        self.booking.complete(finished.generated_tokens);
        let (text, ended) = ending(finished, self.cached.get().copied().unwrap_or(0));
        (text, Ended { tbt_us, prefill: self.prefill, ..ended })
    }
}

/// Of the time that a request has left, what it may wait for others; and so many times what it would take itself,
/// with an allowance for predictions that know little yet. Whoever hangs is not waited for.
const AWAIT_SHARE: u32 = 4;
const AWAIT_TIMES: u32 = 4;
const AWAIT_LEAST: Duration = Duration::from_secs(2);

/// Waits for others that bring the beginning of the same prompt to the same node, and says from then on that this
/// one does. `None` where there is nothing to bring that others could find, or to find that others bring.
async fn begin<'a>(scene: Scene<'a>, placed: &Placed) -> Option<Lead<'a>> {
    let Scene { serving, job, prompt, phase, .. } = scene;
    let Placed { placement, prefill, fetch, route, booking, .. } = placed;
    if !route.is_empty() || !prompt.chunks().is_empty() {
        return None;
    }
    let us = Duration::from_micros;
    let mut plan = Plan {
        node: prefill.node.node_id.clone(),
        incarnation: prefill.node.incarnation,
        keys: Arc::clone(prompt.keys()),
        cached_blocks: prefill.cached_blocks as usize,
        fetched_blocks: fetch.as_ref().map_or(0, |fetch| fetch.until_block as usize),
        fetched_in: us(placement.transfer_us),
        computed_in: us(placement.queue_us.max(placement.transfer_us) + placement.compute_us),
        is_kept: job.cache != CacheClass::Ephemeral,
    };
    let remaining = job.deadline.saturating_duration_since(Instant::now());
    let mut until = Instant::now() + remaining / AWAIT_SHARE;
    loop {
        match serving.arrivals.enter(&plan, Instant::now()) {
            Turn::Leads(lead) => return Some(lead),
            Turn::Follows(awaited) if Instant::now() < until => {
                phase.set(Phase::Awaiting);
                let awaited_blocks = awaited.blocks;
                let tokens = awaited_blocks * prompt.block_tokens() as usize;
                let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
                booking.revise(tokens.min(prompt.length().saturating_sub(1)));
                let patience = AWAIT_LEAST + plan.there_in(awaited_blocks) * AWAIT_TIMES;
                let outcome = awaited.there(until.min(Instant::now() + patience)).await;
                serving.metrics.awaited.with_label_values(&[outcome.name()]).inc();
                match outcome {
                    Outcome::There => plan.cached_blocks = awaited_blocks,
                    Outcome::Failed => {}
                    Outcome::Late => until = Instant::now(),
                }
            }
            Turn::Follows(_) => return None,
        }
    }
}

/// A node hangs or cannot be reached. Its engine may go on, and its peer may wait for it until the
/// request's deadline.
fn not_renewed(scene: Scene<'_>, target: &EngineTarget) -> Fault {
    let node = &target.node.node_id;
    let status = Status::unavailable(format!("store node {node} did not renew the lease"));
    node_fault(scene, &status, target)
}

/// It has let go of blocks that others' would follow: with all of them computed nothing is wrong with it.
fn not_before(scene: Scene<'_>, prefill: &EngineTarget) -> Fault {
    Fault::Instance(InstanceFault {
        instance: prefill.instance_id.clone(),
        kind: FaultKind::Unrouted,
        phase: scene.phase.get(),
        message: "the blocks before the routed prefix are not cached any more".to_owned(),
    })
}

/// Of two sides, the one that is lost; the other may only have said no because of it.
async fn blame(first: Fault, other: impl Future<Output = Option<Fault>>) -> Fault {
    if !matches!(&first, Fault::Instance(fault) if fault.kind == FaultKind::Refused) {
        return first;
    }
    match tokio::time::timeout(BLAME_WITHIN, other).await {
        Ok(Some(Fault::Instance(other))) if other.kind == FaultKind::Lost => Fault::Instance(other),
        _ => first,
    }
}

/// How a leg fails, if it does.
async fn fault_of(leg: &mut Leg, scene: Scene<'_>, target: &EngineTarget) -> Option<Fault> {
    loop {
        match leg.next().await {
            Ok(Event::Accepted(_)) => {}
            Ok(_) => return None,
            Err(status) => return Some(engine_fault(scene, &status, target)),
        }
    }
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

fn generate_request(
    scene: Scene<'_>,
    tx: kvasir_proto::TxId,
    leg: v1::Phase,
    priority_delay_us: u64,
) -> v1::GenerateRequest {
    v1::GenerateRequest {
        tx: Some(tx.into()),
        phase: leg as i32,
        request_id: scene.job.request_id.to_string(),
        prompt: scene.prompt.tokens.to_vec(),
        sampling: Some(scene.job.sampling.clone()),
        namespace: scene.prompt.namespace().0.to_vec(),
        priority_delay_us,
        routed: Vec::new(),
        chunks: Vec::new(),
    }
}

fn routed_span(scene: Scene<'_>, tx: kvasir_proto::TxId, holder: &RouteHolder) -> v1::RoutedSpan {
    v1::RoutedSpan {
        node_address: holder.node.address.to_string(),
        tx: Some(tx.into()),
        lease_ms: scene.serving.options.lease_ms(),
        first_block: holder.first_block,
        blocks: holder.blocks,
    }
}

/// Tokens computed and microseconds they took, when the engine says so.
fn measured(finished: &v1::Finished) -> Option<(u32, u64)> {
    // Both count from the start of the call.
    let us = finished.prefill_us.saturating_sub(finished.queue_us);
    let tokens = finished.computed_prompt_tokens;
    (tokens > 0 && us > 0).then_some((tokens, us))
}

fn ending(finished: v1::Finished, cached_tokens: u32) -> (String, Ended) {
    let reason = match finished.reason() {
        Reason::Length => FinishReason::Length,
        Reason::Stop | Reason::HandedOver | Reason::Unspecified => FinishReason::Stop,
    };
    let stop_matched = Some(finished.stop_matched).filter(|stop| !stop.is_empty());
    let generated_tokens = finished.generated_tokens;
    let ended = Ended { reason, stop_matched, cached_tokens, generated_tokens, ..Ended::default() };
    (finished.text, ended)
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    fn fault(instance: &str, kind: FaultKind) -> Fault {
        let (phase, message) = (Phase::Prefilling, String::new());
        Fault::Instance(InstanceFault { instance: instance.into(), kind, phase, message })
    }

    async fn check(first: FaultKind, other: impl Future<Output = Option<Fault>>, want: &str) {
        match blame(fault("first", first), other).await {
            Fault::Instance(fault) => assert_eq!(&*fault.instance.0, want),
            Fault::Final(failure) => panic!("{failure}"),
        }
    }

    #[tokio::test]
    async fn the_lost_side_is_blamed_and_not_the_one_that_said_no_because_of_it() {
        let other = |kind| ready(Some(fault("other", kind)));
        check(FaultKind::Refused, other(FaultKind::Lost), "other").await;
        check(FaultKind::Refused, other(FaultKind::Refused), "first").await;
        check(FaultKind::Refused, ready(None), "first").await;
        check(FaultKind::Refused, pending(), "first").await;
        check(FaultKind::Lost, other(FaultKind::Lost), "first").await;
        check(FaultKind::NoRoom, other(FaultKind::Lost), "first").await;
    }
}
