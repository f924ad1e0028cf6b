//! `kvasir.v1.Scheduler`: decisions for callers with a front door of their own. Plans only;
//! nothing is booked or reserved, but a node that has to read from its SSD for a plan is told to begin. They are recorded like all others, under the call's `x-request-id`.

use std::sync::Arc;

use kvasir_placement::{Chosen, Objectives, Refusal, Steering};
use kvasir_proto::v1::scheduler_server::{Scheduler, SchedulerServer};
use kvasir_proto::{BlockKey, keys, v1};
use tonic::metadata::{Ascii, MetadataValue};
use tonic::{Code, Request, Response, Status};

use super::class::CacheClass;
use super::recorder::{Asked, Recorder};
use crate::cluster::{Cluster, EngineTarget, Expected, PlaceQuery, Plan};
use crate::http::RequestId;

/// As in HTTP: the caller's own id, and in the answer the one by which the decision is found.
const REQUEST_ID: &str = "x-request-id";

/// The service, ready to be added to a gRPC server.
pub(crate) fn scheduler_service(
    cluster: Cluster,
    recorder: Arc<Recorder>,
) -> SchedulerServer<impl Scheduler> {
    SchedulerServer::new(SchedulerService { cluster, recorder })
}

struct SchedulerService {
    cluster: Cluster,
    recorder: Arc<Recorder>,
}

#[tonic::async_trait]
impl Scheduler for SchedulerService {
    async fn schedule(
        &self,
        request: Request<v1::ScheduleRequest>,
    ) -> Result<Response<v1::ScheduleReply>, Status> {
        let (cluster, recorder) = (self.cluster.clone(), Arc::clone(&self.recorder));
        let id = request.metadata().get(REQUEST_ID).and_then(|id| id.to_str().ok());
        let RequestId(id) = RequestId::of(id);
        let header = MetadataValue::<Ascii>::try_from(&*id).ok();
        // Hashing a long prompt takes milliseconds: not on the reactor.
        let schedule = move || schedule(&cluster, &recorder, id, &request.into_inner());
        let mut reply = match tokio::task::spawn_blocking(schedule).await {
            Ok(reply) => reply.map(Response::new),
            Err(error) => {
                tracing::error!(%error, "the conductor failed to answer a schedule call");
                Err(Status::internal("the schedule call failed"))
            }
        };
        if let Some(header) = header {
            let metadata = match &mut reply {
                Ok(reply) => reply.metadata_mut(),
                Err(status) => status.metadata_mut(),
            };
            metadata.insert(REQUEST_ID, header);
        }
        reply
    }
}

fn schedule(
    cluster: &Cluster,
    recorder: &Recorder,
    request_id: Arc<str>,
    request: &v1::ScheduleRequest,
) -> Result<v1::ScheduleReply, Status> {
    let model = cluster.model(&request.model).map_err(|refusal| status(&refusal))?;
    let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
    if prompt_tokens == 0 {
        return Err(Status::invalid_argument("the prompt is empty"));
    }
    if prompt_tokens.saturating_add(request.max_tokens) > model.context_tokens {
        return Err(Status::invalid_argument(format!(
            "{prompt_tokens} prompt tokens and {} generated tokens exceed the context of {} tokens",
            request.max_tokens, model.context_tokens
        )));
    }
    let cache = CacheClass::from_wire(request.cache_class).ok_or_else(|| {
        let names = CacheClass::ALL.map(|class| class.to_wire().as_str_name());
        Status::invalid_argument(format!("`cache_class` must be {}", names.join(" or ")))
    })?;
    let keys = keys::chain(model.namespace(""), &request.prompt, model.block_tokens as usize);
    let query = PlaceQuery {
        model: &model,
        keys: &keys,
        prompt_tokens,
        max_tokens: request.max_tokens,
        objectives: Objectives {
            ttft_us: objective_us(request.ttft_objective_ms),
            tbt_us: objective_us(request.tbt_objective_ms),
        },
        exclude: &[],
        // The reply has no place for it.
        may_route: false,
        is_endless: false,
        steering: Steering::default(),
        chunks: &[],
    };
    let model_name = Arc::clone(&model.name);
    let asked =
        Asked { request_id, model: model_name, prompt_tokens, cache, is_schedule_only: true };
    let trail = recorder.trail(asked);
    match cluster.plan(&query) {
        Ok(mut plan) => {
            trail.placed(&plan.placement, plan.inputs.take());
            cluster.hint(&Expected::Planned(&plan.placement), model.namespace(""), &keys);
            Ok(v1::ScheduleReply {
                cache_class: cache.to_wire().into(),
                ..reply(&plan, model.block_tokens, &keys)
            })
        }
        Err(none) => {
            cluster.hint(&Expected::Refused(&none.refused), model.namespace(""), &keys);
            Err(status(&trail.refused(none)))
        }
    }
}

/// 0 on the wire is no objective.
fn objective_us(ms: u64) -> u64 {
    if ms == 0 { u64::MAX } else { ms.saturating_mul(1_000) }
}

fn reply(plan: &Plan, block_tokens: u32, keys: &[BlockKey]) -> v1::ScheduleReply {
    let decode = plan.decode.as_ref().unwrap_or(&plan.prefill);
    let fetch = plan.fetch.as_ref();
    v1::ScheduleReply {
        prefill: Some(instance(&plan.prefill, plan.placement.prefill())),
        decode: Some(instance(decode, plan.placement.decode())),
        fetch_from_node_id: fetch.map(|fetch| fetch.node.node_id.to_string()).unwrap_or_default(),
        fetch_until_block: fetch.map_or(0, |fetch| fetch.until_block),
        block_tokens,
        keys: BlockKey::concat(keys),
        predicted_ttft_us: plan.placement.predicted_ttft_us,
        explanation: plan.placement.to_string(),
        ..v1::ScheduleReply::default()
    }
}

fn instance(target: &EngineTarget, chosen: &Chosen) -> v1::InstancePlacement {
    v1::InstancePlacement {
        node_id: target.node.node_id.to_string(),
        instance_id: target.instance_id.to_string(),
        engine_address: target.engine_address.to_string(),
        node_address: target.node.address.to_string(),
        cached_blocks: chosen.cached_blocks,
    }
}

fn status(refusal: &Refusal) -> Status {
    match refusal {
        Refusal::Overloaded { retry_after_ms, .. } => {
            let mut status = Status::resource_exhausted(refusal.to_string());
            status.metadata_mut().insert("retry-after-ms", (*retry_after_ms).into());
            status
        }
        Refusal::NoInstance { .. } => Status::new(Code::Unavailable, refusal.to_string()),
        Refusal::UnknownModel { .. } => Status::new(Code::NotFound, refusal.to_string()),
        Refusal::TooLarge { .. } => Status::invalid_argument(refusal.to_string()),
    }
}
