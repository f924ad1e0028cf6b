//! A request's turn: it waits in its line, and is placed when it is called and can go.
//!
//! What keeps it is what may pass: too many requests under way, instances whose queues are long enough,
//! no room, answers that would be too slow beside what was sent a moment ago. It waits for as long as its
//! first token can come in time; the time that it has waited is taken off its objective.

use std::sync::Arc;
use std::time::Duration;

use kvasir_placement::waiting::Aside;
use kvasir_placement::{Objectives, OverloadReason, Refusal};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::sleep_until;

use super::Serving;
use super::fault::{Failure, TOO_MANY};
use super::job::Job;
use super::line::Ticket;
use super::recorder::Trail;
use crate::cluster::{Expected, NotNow, PlaceQuery, Placed};

/// Waits until it is placed, and counts it among those that are worked on.
pub(super) async fn wait(
    serving: &Serving,
    job: &Job,
    trail: &Trail<'_>,
    mut ticket: Ticket,
) -> Result<(Placed, OwnedSemaphorePermit), Failure> {
    // What does not fit into a clock's range ends with the request's deadline.
    let in_time = job.arrived.checked_add(Duration::from_micros(job.objectives.ttft_us));
    let too_late = in_time.map_or(job.deadline, |in_time| in_time.min(job.deadline));
    let mut is_hinted = false;
    loop {
        tokio::select! {
            turn = ticket.turn() => turn.map_err(|_| {
                let reason = "the admission queue is full, and other tenants use less of it";
                serving.refused_turn(&job.model, TOO_MANY, reason.to_owned())
            })?,
            () = sleep_until(too_late) => {
                ticket.refused();
                let reason = "the request missed its TTFT objective in the admission queue";
                let limit = OverloadReason::Ttft.label();
                return Err(serving.refused_turn(&job.model, limit, reason.to_owned()));
            }
        }
        let Ok(permit) = Arc::clone(&serving.permits).try_acquire_owned() else {
            ticket.set_aside(Aside::Nobody);
            continue;
        };
        let model = serving.cluster.models().into_iter().find(|model| *model.name == *job.model);
        let Some(model) = model else {
            ticket.refused();
            return Err(Failure::UnknownModel);
        };
        let prompt = job.prompt.keyed(&model);
        let query = PlaceQuery {
            model: &model,
            keys: prompt.keys(),
            prompt_tokens: prompt.length(),
            max_tokens: job.sampling.max_tokens,
            objectives: objectives_left(job),
            exclude: &[],
            may_route: !job.lies_together,
            is_endless: job.is_endless(),
            steering: job.steering.borrow(),
            chunks: prompt.chunks(),
        };
        // While it waits what it will need can be read; once, since it may be called often.
        let mut hint = |expected: &Expected<'_>| {
            if !std::mem::replace(&mut is_hinted, true) {
                serving.cluster.hint(expected, prompt.namespace(), prompt.keys());
            }
        };
        match serving.cluster.place_within(&query, ticket.ahead_us()) {
            Ok(placed) => {
                ticket.go();
                return Ok((placed, permit));
            }
            Err(NotNow::Queues { placement }) => {
                hint(&Expected::Planned(&placement));
                // The instance that is best for this one is busy; for others another one may be.
                ticket.set_aside(Aside::NoRoom);
            }
            Err(NotNow::Refused(none)) => match none.refused.refusal {
                Refusal::Overloaded { reason: OverloadReason::NoRoom, .. } => {
                    hint(&Expected::Refused(&none.refused));
                    ticket.set_aside(Aside::NoRoom);
                }
                Refusal::Overloaded { reason: OverloadReason::Tbt, .. } => {
                    hint(&Expected::Refused(&none.refused));
                    ticket.set_aside(Aside::Unfit);
                }
                _ => {
                    ticket.refused();
                    serving.cluster.count_refused(&none.refused.refusal);
                    return Err(trail.refused(none).into());
                }
            },
        }
    }
}

/// What has been waited for is not left for the first token.
fn objectives_left(job: &Job) -> Objectives {
    let Objectives { ttft_us, tbt_us } = job.objectives;
    let waited_us = u64::try_from(job.arrived.elapsed().as_micros()).unwrap_or(u64::MAX);
    let ttft_us = if ttft_us == u64::MAX { ttft_us } else { ttft_us.saturating_sub(waited_us) };
    Objectives { ttft_us, tbt_us }
}
