//! What goes wrong: [`Fault`] is one attempt's, by what the next attempt should avoid; [`Failure`]
//! is the request's, by what its client can do.

use kvasir_placement::{OverloadReason, Refusal};
use kvasir_proto::InstanceId;
use kvasir_proto::refusal::{DRAINING, REFUSAL, UNROUTED};
use tonic::{Code, Status};

use super::attempt::Scene;
use super::job::Prompt;
use super::phase::Phase;
use crate::cluster::{Cluster, EngineTarget};

/// The limit of requests at once.
pub(super) const TOO_MANY: &str = "too_many_requests";

/// Why a request is not answered, or not to its end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Failure {
    #[error("The model does not exist; GET /v1/models lists the models.")]
    UnknownModel,
    /// Try again after a while. `limit` is the reason as a word: `ttft`, `tbt`, `no_capacity` or `too_many_requests`.
    #[error("The service is overloaded: {reason}.")]
    Overloaded { limit: &'static str, reason: String, retry_after_ms: u64 },
    /// No node could ever hold it.
    #[error("The prompt is too long: {reason}.")]
    TooLong { reason: String },
    /// An engine says that the request itself is wrong.
    #[error("The request was rejected: {reason}.")]
    Rejected { reason: String },
    #[error("The model is not available: {reason}.")]
    NoInstance { reason: String },
    #[error(
        "The request did not end within `request_timeout_ms`; the conductor cancelled it while {phase}."
    )]
    Deadline { phase: &'static str },
    /// The answer had begun.
    #[error("The answer was interrupted: {reason}; send the request again.")]
    Interrupted { reason: String },
    #[error("The server is shutting down; send the request again.")]
    Draining,
    #[error("The client disconnected.")]
    ClientGone,
}

impl Failure {
    /// An instance has no room for it now: as long as what is placed there is predicted to take it.
    pub(crate) fn no_room(
        cluster: &Cluster,
        instance: &InstanceId,
        prompt: &Prompt,
        reason: String,
    ) -> Failure {
        let retry_after_ms = cluster.room_in_ms(instance, prompt.length(), prompt.block_tokens());
        let limit = OverloadReason::NoRoom.label();
        Failure::Overloaded { limit, reason, retry_after_ms }
    }

    /// As many are served, or wait, as may be.
    pub(crate) fn too_many(reason: String, retry_after_ms: u64) -> Failure {
        Failure::Overloaded { limit: TOO_MANY, reason, retry_after_ms }
    }

    /// The task of a choice ended without a last word: it panicked, which is logged there.
    pub(crate) fn vanished() -> Failure {
        Failure::Interrupted {
            reason: "the conductor failed while it served the request".to_owned(),
        }
    }

    /// For the metric of results.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Failure::UnknownModel => "unknown_model",
            Failure::Overloaded { .. } => "refused",
            Failure::TooLong { .. } => "too_long",
            Failure::Rejected { .. } => "rejected",
            Failure::NoInstance { .. } => "no_instance",
            Failure::Deadline { .. } => "timeout",
            Failure::Interrupted { .. } => "interrupted",
            Failure::Draining => "shutdown",
            Failure::ClientGone => "client_disconnected",
        }
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        let reason = refusal.to_string();
        match refusal {
            Refusal::Overloaded { reason: of, retry_after_ms, .. } => {
                Failure::Overloaded { limit: of.label(), reason, retry_after_ms }
            }
            Refusal::NoInstance { .. } => Failure::NoInstance { reason },
            Refusal::UnknownModel { .. } => Failure::UnknownModel,
            Refusal::TooLarge { .. } => Failure::TooLong { reason },
        }
    }
}

/// Why an attempt failed.
#[derive(Debug)]
pub(super) enum Fault {
    /// Another attempt may help.
    Instance(InstanceFault),
    /// It would not.
    Final(Failure),
}

/// One instance (its engine or its node) failed the attempt.
#[derive(Debug, Clone)]
pub(super) struct InstanceFault {
    pub instance: InstanceId,
    pub kind: FaultKind,
    pub phase: Phase,
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultKind {
    /// It has no room now.
    NoRoom,
    /// It cannot be reached, or broke off.
    Lost,
    /// It is there and said no: perhaps because of what its peer did.
    Refused,
    /// It takes no new work: the request goes elsewhere.
    Draining,
    /// The prefix cannot be attended where it is: without that nothing is wrong with the instance.
    Unrouted,
}

impl Fault {
    /// What a failed call to an engine means. It sees parameters that nobody checked before.
    pub(super) fn of_engine(status: &Status, instance: &InstanceId, phase: Phase) -> Fault {
        match status.code() {
            Code::InvalidArgument | Code::OutOfRange if !says(status, UNROUTED) => {
                Fault::Final(Failure::Rejected { reason: status.message().to_owned() })
            }
            _ => Fault::of_node(status, instance, phase),
        }
    }

    /// What a failed call to an instance's node means. All it is sent is the conductor's own, so
    /// nothing it refuses is the client's doing.
    pub(super) fn of_node(status: &Status, instance: &InstanceId, phase: Phase) -> Fault {
        let kind = match status.code() {
            _ if says(status, UNROUTED) => FaultKind::Unrouted,
            Code::ResourceExhausted => FaultKind::NoRoom,
            Code::Unavailable
            | Code::Unknown
            | Code::Cancelled
            | Code::DeadlineExceeded
            | Code::Internal
            | Code::DataLoss => FaultKind::Lost,
            _ if says(status, DRAINING) => FaultKind::Draining,
            _ => FaultKind::Refused,
        };
        let message = format!("{:?}: {}", status.code(), status.message());
        Fault::Instance(InstanceFault { instance: instance.clone(), kind, phase, message })
    }
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Fault {
        Fault::Final(failure)
    }
}

fn says(status: &Status, refusal: &str) -> bool {
    status.metadata().get(REFUSAL).is_some_and(|why| why == refusal)
}

/// A call to a node of this attempt failed.
pub(super) fn node_fault(scene: Scene<'_>, status: &Status, target: &EngineTarget) -> Fault {
    in_scene(scene, Fault::of_node(status, &target.instance_id, scene.phase.get()))
}

/// A call to an engine of this attempt failed.
pub(super) fn engine_fault(scene: Scene<'_>, status: &Status, target: &EngineTarget) -> Fault {
    in_scene(scene, Fault::of_engine(status, &target.instance_id, scene.phase.get()))
}

/// What it means for the request. An answer that streams cannot be begun again once it has begun.
/// One that is collected can: nothing of it was sent, and its seed was drawn with the request, so
/// that another instance makes the same answer.
fn in_scene(scene: Scene<'_>, fault: Fault) -> Fault {
    let Fault::Instance(fault) = fault else { return fault };
    let Scene { serving, job, prompt, .. } = scene;
    if fault.kind == FaultKind::Lost {
        serving.cluster.mark_failed(&fault.instance);
    }
    if fault.phase != Phase::Decoding || !job.streamed {
        return Fault::Instance(fault);
    }
    let InstanceFault { instance, kind, message, .. } = fault;
    tracing::warn!(%instance, error = message, "an instance failed and interrupted an answer");
    Fault::Final(match kind {
        FaultKind::NoRoom => {
            let reason = format!("instance {instance} has no capacity for the rest of the answer");
            Failure::no_room(&serving.cluster, &instance, prompt, reason)
        }
        FaultKind::Lost | FaultKind::Refused | FaultKind::Draining | FaultKind::Unrouted => {
            Failure::Interrupted { reason: format!("instance {instance} failed") }
        }
    })
}

#[cfg(test)]
mod tests {
    use tonic::metadata::MetadataValue;

    use super::*;

    #[test]
    fn what_a_status_says_of_itself_decides_what_is_avoided() {
        let check = |status: &Status, want: FaultKind| {
            let fault = Fault::of_node(status, &InstanceId::from("i"), Phase::Placing);
            let kind = match fault {
                Fault::Instance(fault) => fault.kind,
                Fault::Final(failure) => panic!("{failure}"),
            };
            assert_eq!(kind, want, "{status}");
        };
        let mut status = Status::failed_precondition("the node is draining");
        check(&status, FaultKind::Refused);
        status.metadata_mut().insert(REFUSAL, MetadataValue::from_static("other"));
        check(&status, FaultKind::Refused);
        status.metadata_mut().insert(REFUSAL, MetadataValue::from_static(DRAINING));
        check(&status, FaultKind::Draining);
        check(&Status::resource_exhausted("full"), FaultKind::NoRoom);
        let mut status = Status::unavailable("the node n1 cannot be asked");
        check(&status, FaultKind::Lost);
        status.metadata_mut().insert(REFUSAL, MetadataValue::from_static(UNROUTED));
        check(&status, FaultKind::Unrouted);
    }
}
