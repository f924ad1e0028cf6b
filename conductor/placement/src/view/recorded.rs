//! A decision with all that it was taken from, as plain values: they can be written down and taken to another
//! machine, where the same [`crate::place()`] takes the decision again, and every field is compared.
//!
//! What is written is what the decision reads and nothing else: of the view the instances of its model and their
//! nodes with what is booked on them, of the match how much each node holds, of the request its lengths and objectives.
//! No token, no key, no tenant and no id of a request is among it.
//!
//! Numbers are written so that they come back bit by bit.

mod form;

use std::collections::BTreeMap;
use std::fmt;
use std::mem::size_of;
use std::sync::Arc;

use kvasir_proto::{InstanceId, NodeId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    Booked, BookingId, ClusterView, Host, HostRef, Instance, InstanceRef, InstanceReport,
    ModelIndex, ModelSpec, Names, ReportedLoad, Role, Sent, SsdReads, Taken, Ways,
};
use crate::attend::{LearnedRoutes, RouteModel, Way};
use crate::chunks::AskedChunk;
use crate::cost::{
    BINS, DecodeModel, LearnedDecode, LearnedTbt, LinkModel, LinkProfile, PrefillModel,
    PrefillProfile, Profile, SsdModel, SsdProfile, TbtModel,
};
use crate::decision::{
    Chosen, Fetch, Objectives, PlaceRequest, Placement, Policy, Refused, Shape, Steering,
};
use crate::growth::Growth;
use crate::index::{NodeIndex, PrefixMatch};
use crate::place::place;
use crate::queue::{DecodeBookings, PrefillQueue, QueueParts};
use crate::routing::{RoutePart, RoutedRows};

/// The form in which decisions are written. Another one is refused, not guessed at.
const FORM: u32 = 12;
/// No time that is read back may be later than this, so that sums of times stay numbers: thirty years.
const US_MAX: u64 = 1_000_000_000_000_000;
/// Nor may any other number be larger.
const VALUE_MAX: f64 = 1e12;
const RUNNING_MAX: u32 = 1 << 20;

/// One decision, and what it was taken from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedDecision {
    format_version: u32,
    inputs: Inputs,
    /// Every field of it and its value.
    decision: BTreeMap<String, String>,
}

/// All that one decision reads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inputs {
    #[serde(with = "form::PolicyForm")]
    policy: Policy,
    model: ModelInputs,
    /// What routed layers take, and steps over rows that are here, where that is asked.
    routes: Option<RouteInputs>,
    request: RequestInputs,
    /// Nodes of the instances, each once.
    hosts: Vec<HostInputs>,
    /// Those of the model, in the order of the view.
    instances: Vec<InstanceInputs>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelInputs {
    #[serde(with = "form::text")]
    name: Arc<str>,
    block_tokens: u32,
    block_bytes: u64,
}

/// What has been learned of the time between tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TbtInputs {
    #[serde(with = "form::exacts")]
    coefficients: [f64; 4],
    #[serde(with = "form::exacts")]
    off: [f64; BINS],
    #[serde(with = "form::exact")]
    slowest_us: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteInputs {
    #[serde(with = "form::exacts")]
    layer: [f64; 4],
    #[serde(with = "form::exacts")]
    step: [f64; 3],
    #[serde(with = "form::exact")]
    open_us: f64,
    has_steps: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestInputs {
    prompt_tokens: u32,
    max_tokens: u32,
    ttft_objective_us: u64,
    tbt_objective_us: u64,
    exclude: Vec<String>,
    tie_seed: u64,
    now_us: u64,
    may_route: bool,
    #[serde(default)]
    has_fixed_length: bool,
    /// What it says of its own place.
    #[serde(default)]
    instance: Option<String>,
    #[serde(default)]
    prefix: Option<Way>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    chunks: Vec<ChunkInputs>,
}

/// A chunk, and how much of it each node holds, in all and in memory, in their order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChunkInputs {
    first_position: u32,
    blocks: u32,
    cached_blocks: Vec<(u32, u32)>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HostInputs {
    node_index: u16,
    #[serde(with = "form::text")]
    node: Arc<str>,
    /// Leading blocks of the prompt, and those of them that are not on an SSD.
    cached_blocks: u32,
    dram_blocks: u32,
    slots_total: u32,
    slots_available: u32,
    slots_booked: u32,
    slots_expected: u32,
    /// It has busy instances of other models.
    others_busy: bool,
    #[serde(with = "form::LinkForm")]
    link: LinkProfile,
    #[serde(with = "form::SsdForm")]
    ssd: SsdProfile,
    bytes_in: u64,
    bytes_out: u64,
    /// Instances for which it attends prefixes, by their references, each with for how many requests.
    routes_out: Vec<(u64, u32)>,
    in_free_us: u64,
    out_free_us: u64,
    /// Pushes are counted in `out_free_us`.
    pushes: bool,
    /// When what is booked on it is predicted to end, and the slots that come free then.
    slots_end_us: Vec<(u64, u32)>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct InstanceInputs {
    reference: u64,
    #[serde(with = "form::text")]
    instance: Arc<str>,
    /// Which of the nodes is its own.
    host: u32,
    role: Role,
    running_requests_max: u32,
    /// What its queries are, where it sends some.
    routed: Option<RoutedRows>,
    draining: bool,
    healthy: bool,
    #[serde(with = "form::PrefillForm")]
    prefill: PrefillProfile,
    #[serde(with = "form::DecodeForm")]
    decode: LearnedDecode,
    /// Absent until enough answers have taught it.
    tbt: Option<Box<TbtInputs>>,
    #[serde(with = "form::exact")]
    sent_tokens: f64,
    sent_at_us: u64,
    other_tokens: u64,
    other_answers: u32,
    prefills: QueueParts,
    /// When each of its answers is predicted to end.
    answers_end_us: Vec<u64>,
    /// When those of them that have not begun are predicted to.
    answers_begin_us: Vec<u64>,
    /// Of all their prompts, and of those that have begun.
    answers_tokens: u64,
    answers_begun_tokens: u64,
}

/// A field that came out differently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    pub field: String,
    /// Absent where the decision has no such field.
    pub recorded: Option<String>,
    pub replayed: Option<String>,
}

/// Why a recorded decision cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordedError {
    #[error("not a recorded decision: {0}")]
    Malformed(#[from] serde_json::Error),
    #[error("the decision has format {found}; this version reads format {FORM}")]
    Form { found: Value },
    #[error("the recorded decision is invalid: `{field}` is out of range")]
    OutOfBounds { field: &'static str },
}

impl RecordedDecision {
    pub fn new(inputs: &Inputs, decided: Result<&Placement, &Refused>) -> RecordedDecision {
        RecordedDecision { format_version: FORM, inputs: inputs.clone(), decision: fields(decided) }
    }

    /// Reads what was written.
    ///
    /// # Errors
    /// [`RecordedError`] when it is something else, of another form, or beyond all bounds.
    pub fn read(value: Value) -> Result<RecordedDecision, RecordedError> {
        if let Some(found) = value.get("format_version").filter(|form| **form != FORM) {
            return Err(RecordedError::Form { found: found.clone() });
        }
        let recorded: RecordedDecision = serde_json::from_value(value)?;
        recorded.inputs.check().map_err(|field| RecordedError::OutOfBounds { field })?;
        Ok(recorded)
    }

    /// Takes the decision again, and says what is different. Nothing, where nothing has changed.
    pub fn replay(&self) -> Vec<Difference> {
        let again = self.inputs.decide();
        let (recorded, replayed) = (&self.decision, fields(again.as_ref()));
        let mut names: Vec<&String> = recorded.keys().chain(replayed.keys()).collect();
        names.sort_unstable();
        names.dedup();
        let values = names.into_iter().map(|name| (name, recorded.get(name), replayed.get(name)));
        let differ = values.filter(|(_, recorded, replayed)| recorded != replayed);
        differ
            .map(|(field, recorded, replayed)| Difference {
                field: field.clone(),
                recorded: recorded.cloned(),
                replayed: replayed.cloned(),
            })
            .collect()
    }

    /// The decision as it is taken again: its own words.
    pub fn explain(&self) -> String {
        match self.inputs.decide() {
            Ok(placement) => placement.to_string(),
            Err(refused) => refused.to_string(),
        }
    }

    /// How many fields are compared.
    pub fn fields(&self) -> usize {
        self.decision.len()
    }
}

impl Inputs {
    /// What a decision about this request reads now; nothing when its model is not known.
    pub fn capture(
        view: &ClusterView,
        matched: &PrefixMatch,
        request: &PlaceRequest<'_>,
    ) -> Option<Inputs> {
        let spec = view.model_spec(request.model)?;
        let mut slots: BTreeMap<HostRef, Vec<(u64, u32)>> = BTreeMap::new();
        for (host, end_us, count) in view.bookings.values().flat_map(Booked::slots_held) {
            slots.entry(host).or_default().push((end_us, count));
        }
        // Of each node the first of its instances, and the number of the node here.
        let mut of_hosts: Vec<&Instance> = Vec::new();
        let mut numbers: BTreeMap<usize, u32> = BTreeMap::new();
        let mut instances = Vec::new();
        for instance in view.instances.iter().filter(|one| one.model == request.model) {
            let host = *numbers.entry(instance.host_at).or_insert_with(|| {
                of_hosts.push(instance);
                of_hosts.len() as u32 - 1
            });
            instances.push(InstanceInputs::capture(instance, host));
        }
        let hosts = of_hosts.iter().map(|instance| {
            let slots_end_us = slots.remove(&view.host(instance).reference).unwrap_or_default();
            HostInputs::capture(view, instance, matched, slots_end_us)
        });
        let chunk = |chunk: &AskedChunk| {
            let held = |instance: &&Instance| {
                let (matched, node) = (&chunk.matched, instance.report.node);
                (matched.cached_blocks(node), matched.memory_blocks(node))
            };
            let (first_position, blocks) = (chunk.first_position, chunk.blocks);
            ChunkInputs {
                first_position,
                blocks,
                cached_blocks: of_hosts.iter().map(held).collect(),
            }
        };
        Some(Inputs {
            policy: view.policy,
            model: ModelInputs {
                name: Arc::clone(&spec.name),
                block_tokens: spec.block_tokens,
                block_bytes: spec.block_bytes,
            },
            routes: view.routes.as_ref().map(|routes| {
                let LearnedRoutes { layer, step, open_us, has_steps } = routes.profile();
                RouteInputs { layer, step, open_us, has_steps }
            }),
            request: RequestInputs {
                prompt_tokens: request.prompt_tokens,
                max_tokens: request.max_tokens,
                ttft_objective_us: request.objectives.ttft_us,
                tbt_objective_us: request.objectives.tbt_us,
                exclude: request.exclude.iter().map(ToString::to_string).collect(),
                tie_seed: request.tie_seed,
                now_us: request.now_us,
                may_route: request.may_route,
                has_fixed_length: request.is_endless,
                instance: request.steering.instance.map(ToString::to_string),
                prefix: request.steering.prefix,
                chunks: request.chunks.iter().map(chunk).collect(),
            },
            hosts: hosts.collect(),
            instances,
        })
    }

    /// Memory that it takes, but for names, which all decisions share.
    pub fn bytes(&self) -> usize {
        let exclude = self.request.exclude.iter().map(|id| size_of::<String>() + id.len());
        let instances = self.instances.iter().map(|instance| {
            size_of::<InstanceInputs>()
                + instance.tbt.as_deref().map_or(0, size_of_val)
                + instance.prefills.bytes()
                + size_of_val(&*instance.answers_end_us)
                + size_of_val(&*instance.answers_begin_us)
        });
        let hosts = self.hosts.iter().map(|host| {
            size_of::<HostInputs>()
                + size_of_val(&*host.slots_end_us)
                + size_of_val(&*host.routes_out)
        });
        let chunk = |chunk: &ChunkInputs| size_of_val(chunk) + size_of_val(&*chunk.cached_blocks);
        let chunks = self.request.chunks.iter().map(chunk).sum::<usize>();
        let members = instances.chain(hosts).sum::<usize>();
        size_of::<Inputs>() + chunks + exclude.sum::<usize>() + members
    }

    fn decide(&self) -> Result<Placement, Refused> {
        let RequestInputs { prompt_tokens, max_tokens, tie_seed, now_us, .. } = self.request;
        let named = self.request.instance.as_deref().map(InstanceId::from);
        let exclude: Vec<InstanceId> =
            self.request.exclude.iter().map(|id| InstanceId::from(&**id)).collect();
        let chunk = |chunk: &ChunkInputs| {
            let held = self.hosts.iter().zip(&chunk.cached_blocks);
            let held =
                held.map(|(host, (all, memory))| (NodeIndex(host.node_index), *all, *memory));
            let matched = PrefixMatch::from_memory_and_all(&held.collect::<Vec<_>>());
            AskedChunk { first_position: chunk.first_position, blocks: chunk.blocks, matched }
        };
        let chunks: Vec<AskedChunk> = self.request.chunks.iter().map(chunk).collect();
        let request = PlaceRequest {
            model: ModelIndex(0),
            prompt_tokens,
            max_tokens,
            objectives: Objectives {
                ttft_us: self.request.ttft_objective_us,
                tbt_us: self.request.tbt_objective_us,
            },
            exclude: &exclude,
            tie_seed,
            now_us,
            may_route: self.request.may_route,
            is_endless: self.request.has_fixed_length,
            steering: Steering { instance: named.as_ref(), prefix: self.request.prefix },
            chunks: &chunks,
        };
        let held = self
            .hosts
            .iter()
            .map(|host| (NodeIndex(host.node_index), host.cached_blocks, host.dram_blocks));
        let matched = PrefixMatch::from_memory_and_all(&held.collect::<Vec<_>>());
        place(&self.view(), &matched, &request)
    }

    fn view(&self) -> ClusterView {
        let ModelInputs { name, block_tokens, block_bytes } = &self.model;
        let spec = ModelSpec {
            name: Arc::clone(name),
            fingerprint: [0; 32],
            kv_dtype: Arc::from(""),
            vocab_size: 0,
            context_tokens: 0,
            block_tokens: *block_tokens,
            block_bytes: *block_bytes,
            layout_hash: 0,
            routed: None,
        };
        let mut view = ClusterView::new(self.policy, Profile::default());
        view.routes = self.routes.as_ref().zip(self.policy.routing).map(|(routes, routing)| {
            let RouteInputs { layer, step, open_us, has_steps } = *routes;
            let learned = LearnedRoutes { layer, step, open_us, has_steps };
            RouteModel::learned(&routing.constants, learned)
        });
        for (number, host) in (1..).zip(&self.hosts) {
            for &(end_us, slots) in &host.slots_end_us {
                let booked = held_until(HostRef(number), end_us, slots);
                view.bookings.insert(BookingId(view.bookings.len() as u64), booked);
            }
            view.hosts.push(host.restore(HostRef(number)));
        }
        // An instance without a node was never written: what is read is checked.
        let with_host = |instance: &InstanceInputs| {
            let host = self.hosts.get(instance.host as usize)?;
            Some(instance.restore((host, &spec), self.policy.shortest_prefill_first_factor))
        };
        view.instances = self.instances.iter().filter_map(with_host).collect();
        let row = |one: &Instance| (one.report.instance_id.clone(), one.report.node_id.clone());
        view.names = Arc::new(Names { rows: view.instances.iter().map(row).collect() });
        view.models.insert(ModelIndex(0), spec);
        view
    }

    /// What is beyond all bounds, if anything: sums of what is within them are numbers.
    fn check(&self) -> Result<(), &'static str> {
        let Policy { kvcache_balancing_threshold, shortest_prefill_first_factor, .. } = self.policy;
        let within = |field, values: &[f64]| {
            let is_within = |value: &f64| value.is_finite() && value.abs() <= VALUE_MAX;
            if values.iter().all(is_within) { Ok(()) } else { Err(field) }
        };
        within("policy", &[kvcache_balancing_threshold])?;
        if !(0.0..=1e3).contains(&shortest_prefill_first_factor) {
            return Err("shortest_prefill_first_factor");
        }
        if let Some(RouteInputs { layer, step, open_us, .. }) = &self.routes {
            within("routes", layer)?;
            within("routes", step)?;
            within("routes", &[*open_us])?;
        }
        early("now_us", [self.request.now_us])?;
        let tokens =
            |chunk: &ChunkInputs| u64::from(chunk.blocks) * u64::from(self.model.block_tokens);
        let chunk_tokens = self.request.chunks.iter().map(tokens).fold(0, u64::saturating_add);
        if chunk_tokens > u64::from(self.request.prompt_tokens) {
            return Err("chunks");
        }
        for host in &self.hosts {
            within("link", &[host.link.base_us, host.link.bytes_per_us])?;
            within("ssd", &[host.ssd.base_us, host.ssd.bytes_per_us])?;
            early("in_free_us", [host.in_free_us])?;
            early("out_free_us", [host.out_free_us])?;
            early("slots_end_us", host.slots_end_us.iter().map(|(end_us, _)| *end_us))?;
        }
        for instance in &self.instances {
            if instance.host as usize >= self.hosts.len() {
                return Err("host");
            }
            let PrefillProfile { base_us, token_us, pair_us, reused_us } = instance.prefill;
            within("prefill", &[base_us, token_us, pair_us, reused_us])?;
            let LearnedDecode {
                base_us,
                sequence_us,
                token_us,
                scale,
                answer_us,
                generated_tokens,
            } = instance.decode;
            let decode = [base_us, sequence_us, token_us, scale, answer_us, generated_tokens];
            within("decode", &decode)?;
            if let Some(TbtInputs { coefficients, off, slowest_us }) = instance.tbt.as_deref() {
                within("tbt", &[*slowest_us])?;
                within("tbt", coefficients)?;
                within("tbt", off)?;
            }
            within("sent_tokens", &[instance.sent_tokens])?;
            early("sent_at_us", [instance.sent_at_us])?;
            early("prefills", instance.prefills.times_us())?;
            early("answers_end_us", instance.answers_end_us.iter().copied())?;
            early("answers_begin_us", instance.answers_begin_us.iter().copied())?;
            early("answers_tokens", [instance.answers_tokens, instance.answers_begun_tokens])?;
            if instance.running_requests_max > RUNNING_MAX {
                return Err("running_requests_max");
            }
            if instance.other_tokens > 1 << 30 {
                return Err("other_tokens");
            }
            if !instance.answers_end_us.is_sorted() {
                return Err("answers_end_us");
            }
            if !instance.answers_begin_us.is_sorted()
                || instance.answers_begin_us.len() > instance.answers_end_us.len()
            {
                return Err("answers_begin_us");
            }
        }
        Ok(())
    }
}

fn early(field: &'static str, times_us: impl IntoIterator<Item = u64>) -> Result<(), &'static str> {
    if times_us.into_iter().all(|us| us <= US_MAX) { Ok(()) } else { Err(field) }
}

impl HostInputs {
    /// The node of this instance.
    fn capture(
        view: &ClusterView,
        instance: &Instance,
        matched: &PrefixMatch,
        slots_end_us: Vec<(u64, u32)>,
    ) -> HostInputs {
        let (host, report) = (view.host(instance), &instance.report);
        let is_beside =
            |one: &&Instance| one.host_at == instance.host_at && one.model != instance.model;
        let mut beside = view.instances.iter().filter(is_beside);
        HostInputs {
            node_index: report.node.0,
            node: Arc::clone(&report.node_id.0),
            cached_blocks: matched.cached_blocks(report.node),
            dram_blocks: matched.memory_blocks(report.node),
            slots_total: host.slots_total,
            slots_available: host.slots_available,
            slots_booked: host.slots_booked,
            slots_expected: host.slots_expected,
            others_busy: beside.any(|one| !one.is_idle()),
            link: host.link.profile(),
            ssd: host.ssd.profile(),
            bytes_in: host.bytes_in,
            bytes_out: host.bytes_out,
            routes_out: host.routes_out.iter().map(|(of, count)| (of.0, *count)).collect(),
            in_free_us: host.in_free_us,
            out_free_us: host.out_free_us,
            pushes: host.pushes,
            slots_end_us,
        }
    }

    fn restore(&self, reference: HostRef) -> Host {
        Host {
            slots_booked: self.slots_booked,
            slots_expected: self.slots_expected,
            others_busy: self.others_busy,
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
            routes_out: (self.routes_out.iter())
                .map(|(of, count)| (InstanceRef(*of), *count))
                .collect(),
            in_free_us: self.in_free_us,
            out_free_us: self.out_free_us,
            pushes: self.pushes,
            ..Host::new(
                reference,
                (self.slots_total, self.slots_available),
                (LinkModel::learned(self.link), SsdModel::learned(self.ssd)),
            )
        }
    }
}

impl InstanceInputs {
    fn capture(instance: &Instance, host: u32) -> InstanceInputs {
        let report = &instance.report;
        InstanceInputs {
            reference: instance.reference.0,
            instance: Arc::clone(&report.instance_id.0),
            host,
            role: instance.role,
            running_requests_max: report.running_requests_max,
            routed: report.model.routed,
            draining: report.draining,
            healthy: !instance.avoided(),
            prefill: instance.prefill_model.profile(),
            decode: instance.decode_model.learned(),
            tbt: instance.tbt_model.learned().map(|learned| {
                let LearnedTbt { coefficients, off, slowest_us } = learned;
                Box::new(TbtInputs { coefficients, off, slowest_us })
            }),
            sent_tokens: instance.sent.tokens,
            sent_at_us: instance.sent.at_us,
            other_tokens: instance.other_tokens,
            other_answers: instance.other_answers,
            prefills: instance.prefills.parts(),
            answers_end_us: instance.decodes.ends_us().to_vec(),
            answers_begin_us: instance.decodes.begins_us().to_vec(),
            answers_tokens: instance.decodes.tokens(),
            answers_begun_tokens: instance.decodes.begun().1,
        }
    }

    fn restore(
        &self,
        (host, spec): (&HostInputs, &ModelSpec),
        shortest_prefill_first_factor: f64,
    ) -> Instance {
        Instance {
            reference: InstanceRef(self.reference),
            host_at: self.host as usize,
            model: ModelIndex(0),
            role: self.role,
            report: InstanceReport {
                instance_id: InstanceId(Arc::clone(&self.instance)),
                instance_type: "".into(),
                node: NodeIndex(host.node_index),
                node_id: NodeId(Arc::clone(&host.node)),
                attachment: (0, 0),
                role: self.role,
                current_role: None,
                model: ModelSpec { routed: self.routed, ..spec.clone() },
                running_requests_max: self.running_requests_max,
                slots_total: host.slots_total,
                slots_available: host.slots_available,
                ssd_reads: SsdReads::default(),
                draining: self.draining,
                load: ReportedLoad::default(),
            },
            prefill_model: PrefillModel::learned(self.prefill),
            decode_model: DecodeModel::from_learned(self.decode),
            joined_tokens: 0,
            sent: Sent { tokens: self.sent_tokens, at_us: self.sent_at_us },
            paced_us: 0,
            tbt_model: TbtModel::from_learned(self.tbt.as_ref().map(|tbt| {
                let TbtInputs { coefficients, off, slowest_us } = **tbt;
                LearnedTbt { coefficients, off, slowest_us }
            })),
            routes_in: 0,
            pushes: None,
            prefills: PrefillQueue::from_parts(&self.prefills, shortest_prefill_first_factor),
            decodes: DecodeBookings::from_parts(
                self.answers_end_us.clone(),
                self.answers_begin_us.clone(),
                self.answers_tokens,
                self.answers_begun_tokens,
            ),
            other_tokens: self.other_tokens,
            other_answers: self.other_answers,
            avoid_until_us: (!self.healthy).then_some(0),
        }
    }
}

/// Something that holds so many slots of the node until then.
fn held_until(host: HostRef, end_us: u64, slots: u32) -> Booked {
    let nobody = InstanceRef(u64::MAX);
    Booked {
        prefill: nobody,
        decode: nobody,
        prefill_host: host,
        decode_host: host,
        prompt_tokens: 0,
        fetches: Vec::new(),
        ways: Ways::default(),
        routes: Vec::new(),
        prefill_end_us: end_us,
        end_us,
        handed_over_us: Some(0),
        decode_load: None,
        begun: None,
        prefill_slots: 0,
        decode_slots: slots,
        prefill_taken: Taken::default(),
        decode_taken: Taken::default(),
        growth: Growth::new(0, 1, 0, 0),
    }
}

/// What an explanation leaves out, since nobody reads it who looks at one.
#[derive(Serialize)]
struct Unexplained {
    prefill_instance: u64,
    decode_instance: u64,
    fetch_instance: Option<u64>,
    route_first_block: Option<u32>,
    route_instances: Vec<u64>,
    route_blocks: Vec<u32>,
    route_layers: Vec<[f64; 3]>,
    route_prefill_us: Option<u64>,
    chunk_instances: Vec<Option<u64>>,
    chunk_setup_us: Vec<u64>,
    chunk_step_us: Vec<u64>,
    chunk_layers: Vec<Option<[f64; 3]>>,
    chunk_bytes: Vec<u64>,
    skip_promotion: bool,
    priority_us: u64,
    priority_delay_us: u64,
    push_bytes: u64,
    generated_blocks: u32,
    decode_running: f64,
    decode_joining: f64,
    candidates_priority_us: Vec<u64>,
}

impl Unexplained {
    /// By name, so that a field that a placement gains is not forgotten here.
    fn of(placement: &Placement) -> Unexplained {
        let Placement {
            shape,
            fetch,
            route,
            leaves_ssd,
            attended,
            chunks,
            rank_us,
            priority_delay_us,
            push_bytes,
            growth,
            decode_load,
            considered,
            // These are explained.
            compute_tokens: _,
            reused_tokens: _,
            queue_us: _,
            transfer_us: _,
            compute_us: _,
            decode_wait_us: _,
            predicted_ttft_us: _,
            predicted_tbt_us: _,
            probe: _,
        } = placement;
        let (prefill, decode): (&Chosen, &Chosen) = match shape {
            Shape::Whole(chosen) => (chosen, chosen),
            Shape::Split { prefill, decode } => (prefill, decode),
        };
        let parts = || route.iter().flat_map(|route| &route.parts);
        Unexplained {
            prefill_instance: prefill.instance.0,
            decode_instance: decode.instance.0,
            fetch_instance: fetch.as_ref().map(|Fetch { source, .. }| source.instance.0),
            route_first_block: route.as_ref().map(|route| route.first_block),
            route_instances: parts().map(|RoutePart { source, .. }| source.instance.0).collect(),
            route_blocks: parts().map(|part| part.blocks).collect(),
            route_layers: parts().map(|part| part.layer.numbers()).collect(),
            route_prefill_us: attended.as_ref().map(|attended| attended.prefill_us),
            chunk_instances: (chunks.iter())
                .map(|chunk| chunk.source().map(|source| source.instance.0))
                .collect(),
            chunk_setup_us: chunks.iter().map(|chunk| chunk.once_us).collect(),
            chunk_step_us: chunks.iter().map(|chunk| chunk.step_us).collect(),
            chunk_layers: (chunks.iter())
                .map(|chunk| chunk.layer.map(|layer| layer.numbers()))
                .collect(),
            chunk_bytes: chunks.iter().map(|chunk| chunk.fetched_bytes).collect(),
            skip_promotion: *leaves_ssd,
            priority_us: *rank_us,
            priority_delay_us: *priority_delay_us,
            push_bytes: *push_bytes,
            generated_blocks: growth.left_blocks(),
            decode_running: decode_load.running,
            decode_joining: decode_load.joining,
            candidates_priority_us: considered
                .prefill_candidates
                .iter()
                .map(|c| c.rank_us)
                .collect(),
        }
    }
}

/// Every field of a decision with its value, as in `prefill_candidates.0.queue_us`.
fn fields(decided: Result<&Placement, &Refused>) -> BTreeMap<String, String> {
    let mut fields = BTreeMap::new();
    // These structs have nothing that JSON lacks.
    let value = |value: Result<Value, _>| value.unwrap_or(Value::Null);
    match decided {
        Ok(placement) => {
            flatten("", value(serde_json::to_value(placement.explain())), &mut fields);
            flatten("", value(serde_json::to_value(Unexplained::of(placement))), &mut fields);
        }
        Err(refused) => {
            flatten("refused", value(serde_json::to_value(refused.explain())), &mut fields);
        }
    }
    fields
}

fn flatten(path: &str, value: Value, fields: &mut BTreeMap<String, String>) {
    let below = |name: &dyn fmt::Display| match path {
        "" => name.to_string(),
        path => format!("{path}.{name}"),
    };
    match value {
        Value::Object(members) => {
            members.into_iter().for_each(|(name, value)| flatten(&below(&name), value, fields));
        }
        Value::Array(values) => {
            let values = values.into_iter().enumerate();
            values.for_each(|(at, value)| flatten(&below(&at), value, fields));
        }
        Value::String(text) => {
            fields.insert(path.to_owned(), text);
        }
        value => {
            fields.insert(path.to_owned(), value.to_string());
        }
    }
}
