//! What the conductor knows of the cluster at one moment: the instances and their nodes, what they last reported,
//! and what this conductor has booked on them since. One owner applies reports and bookings;
//! [`crate::place()`] only reads. Names are resolved once, so that a decision compares numbers.

mod decoding;
mod fetches;
mod hosts;
mod members;
mod recorded;
mod roles;
mod routes;

use std::collections::BTreeMap;
use std::sync::Arc;

use kvasir_proto::{InstanceId, NodeId};
use serde::{Deserialize, Serialize};

use crate::attend::RouteModel;
use crate::chunks::routed_blocks;
use crate::cost::{DecodeLoad, DecodeModel, InstanceProfile, PrefillModel, Profile, TbtModel};
use crate::decision::{Placement, Policy};
use crate::growth::Growth;
use crate::index::NodeIndex;
use crate::queue::{DecodeBookings, PrefillBooking, PrefillQueue, left_share};
use crate::routing::{Route, RoutedRows};

pub(crate) use decoding::Sent;
use fetches::{BookedFetch, Ways};
pub(crate) use hosts::HostRef;
use hosts::{Host, Taken};
pub use recorded::{Difference, Inputs, RecordedDecision, RecordedError};
use routes::BookedRoute;

/// Models that are remembered, at most. When there are more, those that nobody serves go first.
const MODELS_MAX: usize = 256;

/// A model that some instance serves or has served: everything that two instances must agree on
/// to work on one request, and what queries of one of them are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSpec {
    pub name: Arc<str>,
    pub fingerprint: [u8; 32],
    pub kv_dtype: Arc<str>,
    pub vocab_size: u32,
    pub context_tokens: u32,
    pub block_tokens: u32,
    /// Bytes of one block, all layers.
    pub block_bytes: u64,
    /// A hash of the whole slot layout: pages are exchanged only between equals.
    pub layout_hash: u64,
    /// Absent when its engines attend no blocks elsewhere. Each instance has its own: they may have different
    /// numbers of ranks.
    pub routed: Option<RoutedRows>,
}

impl ModelSpec {
    /// Instances of the two may work on one request.
    fn agrees_with(&self, other: &ModelSpec) -> bool {
        *self == ModelSpec { routed: self.routed, ..other.clone() }
    }
}

/// A model as this view numbers it. Numbers are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelIndex(pub u32);

/// One attachment of an instance, as this view numbers it. Numbers are never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceRef(pub u64);

/// One booked request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BookingId(pub u64);

/// What an instance does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    Prefill,
    Decode,
    Both,
}

impl Role {
    pub fn prefills(self) -> bool {
        matches!(self, Role::Prefill | Role::Both)
    }

    pub fn decodes(self) -> bool {
        matches!(self, Role::Decode | Role::Both)
    }

    /// As configurations and people have it.
    pub fn name(self) -> &'static str {
        match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "both",
        }
    }
}

/// What an engine said of itself last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReportedLoad {
    pub running: u32,
    pub waiting: u32,
    /// Prompt tokens accepted and not yet computed.
    pub waiting_prompt_tokens: u64,
}

/// Blocks that a node has read from its SSD into memory since it was started, as far as that tells how fast it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SsdReads {
    pub bytes_total: u64,
    /// In which there was always one to read.
    pub us_total: u64,
}

/// One attached engine, as a status of its node has it. All of a node are reported together.
#[derive(Debug, Clone, PartialEq)]
pub struct InstanceReport {
    pub instance_id: InstanceId,
    /// What it runs on, as its operator calls it; empty when nobody said.
    pub instance_type: Arc<str>,
    pub node: NodeIndex,
    pub node_id: NodeId,
    /// Differs between any two attachments of this instance to this node.
    pub attachment: (u64, u32),
    /// What it can do.
    pub role: Role,
    /// What it plays of that, where that was set: see [`Instance::role`].
    pub current_role: Option<Role>,
    pub model: ModelSpec,
    pub running_requests_max: u32,
    /// Of the node.
    pub slots_total: u32,
    pub slots_available: u32,
    pub ssd_reads: SsdReads,
    pub draining: bool,
    pub load: ReportedLoad,
}

/// The work of one instance that this conductor knows of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenWork {
    /// Prompts that it computes or will compute.
    pub prefills: usize,
    /// Answers that it decodes or will decode.
    pub decodes: usize,
    /// Until a prompt that comes now and ranks last would begin.
    pub queue_us: u64,
}

/// An attached instance with everything that its price depends on.
#[derive(Debug, Clone)]
pub struct Instance {
    pub(crate) reference: InstanceRef,
    /// Its node's place among the hosts of the view.
    host_at: usize,
    pub(crate) model: ModelIndex,
    pub(crate) report: InstanceReport,
    pub(crate) role: Role,
    pub(crate) prefill_model: PrefillModel,
    pub(crate) decode_model: DecodeModel,
    pub(crate) tbt_model: TbtModel,
    /// Tokens of all prompts whose answers began there.
    joined_tokens: u64,
    sent: Sent,
    /// When an answer that it decoded last said what it saw.
    paced_us: u64,
    /// Its own requests whose prefix is attended elsewhere.
    routes_in: u32,
    /// The prefill whose push is counted among what its node sends already.
    pushes: Option<BookingId>,
    pub(crate) prefills: PrefillQueue,
    pub(crate) decodes: DecodeBookings,
    /// What the last report holds beyond what was booked here then: the work of others. It is
    /// fixed when the report comes, so that own work that ends later is not taken for theirs.
    other_tokens: u64,
    pub(crate) other_answers: u32,
    /// Others are preferred until a report that comes after this time.
    avoid_until_us: Option<u64>,
}

impl Instance {
    pub fn reference(&self) -> InstanceRef {
        self.reference
    }

    pub fn model(&self) -> ModelIndex {
        self.model
    }

    pub fn report(&self) -> &InstanceReport {
        &self.report
    }

    /// What it is given to do now.
    pub fn role(&self) -> Role {
        self.role
    }

    /// What it has learned of its prefills.
    pub fn prefill_model(&self) -> &PrefillModel {
        &self.prefill_model
    }

    /// What is booked on it.
    pub fn open_work(&self, now_us: u64) -> OpenWork {
        OpenWork {
            prefills: self.prefills.len(),
            decodes: self.decodes.len(),
            queue_us: self.queue_us(u64::MAX, now_us),
        }
    }

    /// It failed a moment ago, and others are preferred.
    pub fn avoided(&self) -> bool {
        self.avoid_until_us.is_some()
    }

    /// Work ahead of a prefill of this rank that comes now.
    pub(crate) fn queue_us(&self, rank_us: u64, now_us: u64) -> u64 {
        const STRETCH_TOKENS: u64 = 512;
        let mut queue_us = self.prefills.ahead_us(rank_us, now_us);
        if self.other_tokens > 0 {
            // Others' prompts are a number of tokens of unknown lengths: priced by the stretch.
            let stretch_us = self.prefill_model.predict_us(STRETCH_TOKENS, 0);
            queue_us += (self.other_tokens * stretch_us) / STRETCH_TOKENS;
        }
        queue_us
    }

    /// Answers that it will be decoding at `at_us`.
    pub(crate) fn answers_at(&self, at_us: u64, now_us: u64) -> f64 {
        let answer_us = self.decode_model.answer_us();
        let own = self.decodes.remaining_at(at_us, now_us, answer_us);
        let share = left_share(at_us, now_us, answer_us);
        own + f64::from(self.other_answers) * share
    }

    /// Nothing is queued or runs there, as far as is known here.
    pub(crate) fn is_idle(&self) -> bool {
        self.prefills.is_empty()
            && self.decodes.is_empty()
            && self.other_tokens == 0
            && self.other_answers == 0
    }

    /// Prompts wait or are computed there.
    pub(crate) fn has_prefills(&self) -> bool {
        self.has_prompts() || self.other_tokens > 0
    }

    /// The same of those that were placed here.
    pub(crate) fn has_prompts(&self) -> bool {
        !self.prefills.is_empty()
    }

    /// Answers that were placed here are or will be decoded there.
    pub(crate) fn has_answers(&self) -> bool {
        !self.decodes.is_empty()
    }

    fn take_report(&mut self, report: InstanceReport, now_us: u64) {
        self.other_tokens =
            report.load.waiting_prompt_tokens.saturating_sub(self.prefills.tokens());
        // No load of a sane engine is near this; it keeps a wild one from overflowing a price.
        self.other_tokens = self.other_tokens.min(1 << 30);
        let answers = report.load.running.saturating_add(report.load.waiting);
        let booked =
            self.decodes.len() + if self.role == Role::Prefill { self.prefills.len() } else { 0 };
        self.other_answers = answers.saturating_sub(u32::try_from(booked).unwrap_or(u32::MAX));
        if self.avoid_until_us.is_some_and(|until_us| now_us >= until_us) {
            self.avoid_until_us = None;
        }
        self.report = report;
    }
}

/// What a placement calls its candidates: shared by all placements until the members change.
#[derive(Debug, PartialEq, Eq, Default)]
pub(crate) struct Names {
    pub(crate) rows: Vec<(InstanceId, NodeId)>,
}

/// What an instance did when an answer began there.
#[derive(Debug, Clone, Copy)]
struct Begun {
    joined_tokens: u64,
    running: usize,
    others: u32,
}

#[derive(Debug, Clone)]
pub(crate) struct Booked {
    pub(crate) prefill: InstanceRef,
    pub(crate) decode: InstanceRef,
    /// Their nodes, which may be one.
    pub(crate) prefill_host: HostRef,
    pub(crate) decode_host: HostRef,
    prompt_tokens: u32,
    /// Copies under way, and parts that are attended elsewhere.
    fetches: Vec<BookedFetch>,
    ways: Ways,
    routes: Vec<BookedRoute>,
    /// When the prompt is predicted to be computed, and then the answer to end.
    pub(crate) prefill_end_us: u64,
    pub(crate) end_us: u64,
    pub(crate) handed_over_us: Option<u64>,
    /// What its answer was expected to be decoded beside.
    decode_load: Option<DecodeLoad>,
    /// What was there when its answer began.
    begun: Option<Begun>,
    /// Slots of the prompt on an instance that only prefills, until the hand-over.
    pub(crate) prefill_slots: u32,
    /// Slots of the prompt on the instance that decodes.
    pub(crate) decode_slots: u32,
    prefill_taken: Taken,
    decode_taken: Taken,
    pub(crate) growth: Growth,
}

/// See the module.
#[derive(Debug)]
pub struct ClusterView {
    profile: Profile,
    /// By the name of the type.
    profiles: BTreeMap<Arc<str>, InstanceProfile>,
    policy: Policy,
    instances: Vec<Instance>,
    hosts: Vec<Host>,
    names: Arc<Names>,
    models: BTreeMap<ModelIndex, ModelSpec>,
    next_model: u32,
    next_instance: u64,
    next_host: u64,
    /// Absent where nothing is routed.
    pub(crate) routes: Option<RouteModel>,
    pub(crate) bookings: BTreeMap<BookingId, Booked>,
    /// In this time half of what is known is forgotten of how far predictions were off.
    half_life_us: Option<u64>,
}

impl ClusterView {
    pub fn new(policy: Policy, profile: Profile) -> Self {
        ClusterView {
            profile,
            profiles: BTreeMap::new(),
            policy,
            instances: Vec::new(),
            hosts: Vec::new(),
            names: Arc::default(),
            models: BTreeMap::new(),
            next_model: 0,
            next_instance: 0,
            next_host: 0,
            routes: policy.routing.map(|routing| RouteModel::new(&routing.constants)),
            bookings: BTreeMap::new(),
            half_life_us: None,
        }
    }

    /// Where the models of instances of this type start that come from now on.
    pub fn know(&mut self, instance_type: &str, profile: InstanceProfile) {
        self.profiles.insert(instance_type.into(), profile);
    }

    /// What is known of how far predictions of the time between tokens were off is forgotten with time, half
    /// of it in this one. Where little is let in little is learned, and what a machine that stood still for
    /// a moment has taught would be believed for long.
    pub fn forget_in(&mut self, half_life_us: u64) {
        self.half_life_us = Some(half_life_us.max(1));
    }

    /// An instance as it is now. A new attachment, role or model makes a new member: what was
    /// booked on the old one is void, what was learned of its speed stays if the model did.
    pub fn report(&mut self, report: InstanceReport, now_us: u64) -> InstanceRef {
        let model = self.intern(&report.model);
        let same = |instance: &Instance| {
            instance.report.node == report.node && instance.report.instance_id == report.instance_id
        };
        if let Some(old) = self.instances.iter_mut().find(|instance| same(instance)) {
            let unchanged = old.report.attachment == report.attachment
                && old.report.role == report.role
                && old.model == model;
            if unchanged {
                let reference = old.reference;
                self.hosts[old.host_at].take_report(&report);
                old.take_report(report, now_us);
                self.settle_roles(model);
                return reference;
            }
        }
        let host_at = self.host_at(&report);
        self.hosts[host_at].take_report(&report);
        let old = self.instances.iter().position(same).map(|at| self.instances.remove(at));
        let learned = old
            .filter(|old| old.model == model && old.report.instance_type == report.instance_type);
        let member = self.member((model, host_at), report, learned, now_us);
        let reference = member.reference;
        self.instances.push(member);
        self.instances.sort_by(|a, b| {
            let order = |i: &Instance| (i.report.instance_id.clone(), i.report.node_id.clone());
            order(a).cmp(&order(b))
        });
        self.members_changed();
        self.settle_roles(model);
        reference
    }

    /// Instances of this node whose id is not among `keep` are gone.
    pub fn remove_instances(&mut self, node: NodeIndex, keep: &[InstanceId]) {
        let stays = |i: &Instance| i.report.node != node || keep.contains(&i.report.instance_id);
        if !self.instances.iter().all(stays) {
            let gone: Vec<_> =
                self.instances.iter().filter(|i| !stays(i)).map(|i| i.model).collect();
            self.instances.retain(stays);
            self.members_changed();
            gone.into_iter().for_each(|model| self.settle_roles(model));
        }
    }

    /// The index knows this node by another number from now on.
    pub fn renumber_node(&mut self, old: NodeIndex, new: NodeIndex) {
        for instance in self.instances.iter_mut().filter(|i| i.report.node == old) {
            instance.report.node = new;
        }
    }

    /// Prefer others to this instance until it reports again, at `until_us` or later.
    pub fn mark_failed(&mut self, instance: &InstanceId, until_us: u64) {
        for member in self.instances.iter_mut().filter(|i| i.report.instance_id == *instance) {
            member.avoid_until_us = Some(until_us);
        }
    }

    /// The instances, by name.
    pub fn instances(&self) -> &[Instance] {
        &self.instances
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    pub fn model_spec(&self, model: ModelIndex) -> Option<&ModelSpec> {
        self.models.get(&model)
    }

    /// Models in the order in which they were first seen.
    pub fn models(&self) -> impl Iterator<Item = (ModelIndex, &ModelSpec)> {
        self.models.iter().map(|(index, spec)| (*index, spec))
    }

    /// Whether a request for this model could be served from prompt to answer.
    pub fn serves(&self, model: ModelIndex) -> bool {
        let has = |does: fn(Role) -> bool| {
            self.instances.iter().any(|i| i.model == model && does(i.role))
        };
        has(Role::prefills) && has(Role::decodes)
    }

    /// Counts a placed request in from now on. An id that is booked already is left as it is.
    pub fn book(&mut self, id: BookingId, placement: &Placement, now_us: u64) {
        if self.bookings.contains_key(&id) {
            return;
        }
        let (prefill, decode) = (placement.prefill(), placement.decode());
        let prompt_blocks = placement.considered.prompt_blocks;
        let prefill_end_us = now_us.saturating_add(placement.predicted_ttft_us);
        // What is here already takes no slots, nor does what is attended elsewhere: those are other blocks.
        let routed_blocks =
            placement.route.as_ref().map_or(0, Route::blocks) + routed_blocks(&placement.chunks);
        let taken_blocks = decode.memory_blocks.saturating_add(routed_blocks);
        let prefill_slots = prompt_blocks.saturating_sub(prefill.memory_blocks);
        let prefill_host = self.host_of(prefill.instance);
        let decode_host = self.host_of(decode.instance);
        let mut booked = Booked {
            prefill: prefill.instance,
            decode: decode.instance,
            prefill_host,
            decode_host,
            prompt_tokens: placement.considered.prompt_tokens,
            fetches: self.fetches_of(placement),
            ways: Ways::default(),
            prefill_end_us,
            end_us: prefill_end_us,
            handed_over_us: None,
            decode_load: Some(placement.decode_load),
            begun: None,
            prefill_slots: if placement.is_whole() { 0 } else { prefill_slots },
            decode_slots: prompt_blocks.saturating_sub(taken_blocks),
            routes: self.routes_of(placement),
            prefill_taken: Taken::default(),
            decode_taken: Taken::default(),
            growth: placement.growth,
        };
        let fetches = (&booked.fetches[..], prefill_host);
        let (ready_us, ways) = self.begin_fetches(placement, fetches, now_us);
        booked.ways = ways;
        for route in &mut booked.routes {
            route.companions = self.begin_route(route.source, decode.instance);
        }
        let shortest_prefill_first_factor = self.policy.shortest_prefill_first_factor;
        if let Some((instance, host)) = self.find_with_host(prefill.instance) {
            let work = PrefillBooking {
                computed_tokens: placement.compute_tokens,
                reused_tokens: placement.reused_tokens,
                predicted_us: placement.compute_us,
                rank_us: placement.rank_us,
                shortest_prefill_first_factor,
                ready_us,
                push_bytes: placement.push_bytes,
            };
            instance.prefills.book(id, work, now_us);
            instance.count_push(host);
            host.take_slots(&mut booked.prefill_taken, booked.prefill_slots);
        }
        if let Some((instance, host)) = self.find_with_host(decode.instance) {
            booked.end_us = booked.end_us.saturating_add(instance.decode_model.answer_us());
            instance.decodes.book(booked.decode_booking());
            instance.is_sent(booked.prompt_tokens, now_us);
            host.take_slots(&mut booked.decode_taken, booked.decode_slots);
            host.slots_expected += booked.growth.left_blocks();
        }
        self.bookings.insert(id, booked);
    }

    /// The node really holds, or will have fetched, this many leading tokens: the rest is to be
    /// computed. Corrects what is booked.
    pub fn revise(&mut self, id: BookingId, reused_tokens: u32) {
        let Some(booked) = self.bookings.get(&id).cloned() else { return };
        let computed_tokens = booked.prompt_tokens.saturating_sub(reused_tokens).max(1);
        let Some(instance) = self.find(booked.prefill) else { return };
        let predicted_us =
            instance.prefill_model.predict_us(computed_tokens.into(), reused_tokens.into());
        let Some(known) = instance.prefills.get(id) else { return };
        let work = PrefillBooking { computed_tokens, reused_tokens, predicted_us, ..*known };
        instance.prefills.revise(id, work);
    }

    /// The prompt is computed and handed over. `measured` is what the engine said: computed
    /// tokens and its time for them. Answers with what that was predicted to be.
    pub fn prefilled(
        &mut self,
        id: BookingId,
        measured: Option<(u32, u64)>,
        now_us: u64,
    ) -> Option<u64> {
        self.end_fetches(id);
        let booked = self.bookings.get_mut(&id)?;
        let first_time = booked.handed_over_us.is_none();
        booked.handed_over_us = Some(booked.handed_over_us.unwrap_or(now_us));
        let prefill_taken = std::mem::take(&mut booked.prefill_taken);
        let booked = booked.clone();
        let mut predicted_us = None;
        if let Some(host) = self.find_host(booked.prefill_host) {
            host.give_slots_back(prefill_taken);
        }
        if let Some((instance, host)) = self.find_with_host(booked.prefill) {
            instance.prefills.remove(id, now_us);
            instance.count_push(host);
            if let Some((computed_tokens, prefill_us)) = measured {
                let reused = booked.prompt_tokens.saturating_sub(computed_tokens);
                let model = &mut instance.prefill_model;
                predicted_us = Some(model.predict_us(computed_tokens.into(), reused.into()));
                model.observe(computed_tokens.into(), reused.into(), prefill_us);
            }
        }
        if first_time && let Some(instance) = self.find(booked.decode) {
            let begun = Booked { handed_over_us: None, ..booked.clone() };
            instance.decodes.remove(begun.decode_booking());
            let end_us = now_us.saturating_add(instance.decode_model.answer_us());
            instance.decodes.book(Booked { end_us, ..booked }.decode_booking());
            instance.joined_tokens += u64::from(booked.prompt_tokens);
            let begun = Begun {
                joined_tokens: instance.joined_tokens,
                running: instance.decodes.begun().0,
                others: instance.other_answers,
            };
            if let Some(booked) = self.bookings.get_mut(&id) {
                booked.end_us = end_us;
                booked.begun = Some(begun);
            }
        }
        predicted_us
    }

    /// A step of an instance took so long. It says what rows here cost where all rows are here and nothing but
    /// answers is computed.
    fn observe_local_step(&mut self, decode: InstanceRef, interval_us: u64) {
        let Some(routes) = &mut self.routes else { return };
        let Some(instance) = self.instances.iter().find(|one| one.reference == decode) else {
            return;
        };
        let Some(RoutedRows { layers, .. }) = instance.report.model.routed else { return };
        let is_alone = instance.routes_in == 0
            && instance.prefills.is_empty()
            && instance.decodes.begins_us().is_empty()
            && instance.other_answers == 0;
        let (sequences, tokens) = instance.decodes.begun();
        if is_alone && sequences > 0 {
            let row_layers = tokens as f64 * f64::from(layers);
            routes.observe_step(sequences as f64, row_layers, interval_us);
        }
    }

    /// The answer has so many tokens more.
    pub fn grew(&mut self, id: BookingId, tokens: u32) {
        let Some(booked) = self.bookings.get_mut(&id) else { return };
        let before = booked.growth;
        booked.growth.advance(tokens);
        let after = booked.growth;
        let decode = booked.decode_host;
        if let Some(host) = self.hosts.iter_mut().find(|host| host.reference == decode) {
            let grown_blocks = after.grown_blocks() - before.grown_blocks();
            host.take_slots(&mut booked.decode_taken, grown_blocks);
            host.slots_expected -= before.left_blocks();
            host.slots_expected += after.left_blocks();
        }
    }

    /// The mean time between tokens that this request saw lately.
    pub fn stepped(&mut self, id: BookingId, interval_us: u64, now_us: u64) {
        let Some(decode) = self.bookings.get(&id).map(|booked| booked.decode) else { return };
        if let Some(instance) = self.find(decode) {
            let running = instance.answers_at(now_us, now_us).round();
            let context_tokens = running * instance.decodes.mean_tokens().unwrap_or(0.0);
            instance.decode_model.observe_step(running as u32, context_tokens, interval_us);
        }
        self.observe_local_step(decode, interval_us);
    }

    /// The request is over. When its answer reached its end, `completed` is how many tokens it has;
    /// otherwise it broke off, by a deadline or since its client has gone.
    pub fn unbook(&mut self, id: BookingId, completed: Option<u32>, now_us: u64) {
        self.end_fetches(id);
        let Some(booked) = self.bookings.remove(&id) else { return };
        for route in &booked.routes {
            self.end_route(route.source, booked.decode);
        }
        if let Some(host) = self.find_host(booked.prefill_host) {
            host.give_slots_back(booked.prefill_taken);
        }
        if let Some((instance, host)) = self.find_with_host(booked.prefill) {
            instance.prefills.remove(id, now_us);
            instance.count_push(host);
        }
        if let Some(host) = self.find_host(booked.decode_host) {
            host.give_slots_back(booked.decode_taken);
            host.slots_expected -= booked.growth.left_blocks();
        }
        if let Some(instance) = self.find(booked.decode) {
            instance.decodes.remove(booked.decode_booking());
            if let Some(since_us) = booked.handed_over_us {
                let lasted_us = now_us.saturating_sub(since_us);
                let model = &mut instance.decode_model;
                match completed {
                    Some(tokens) => model.observe_answer(lasted_us, tokens),
                    None => model.observe_broken_off(lasted_us, booked.growth.generated_tokens()),
                }
            }
        }
    }

    /// How many tokens an answer of this model has, in the mean of those that decode it.
    pub fn generated_tokens(&self, model: &str) -> u32 {
        let decodes = |i: &&Instance| i.role.decodes() && *i.report.model.name == *model;
        let all = || self.instances.iter().filter(decodes);
        let sum: u64 = all().map(|i| u64::from(i.decode_model.generated_tokens())).sum();
        (sum / all().count().max(1) as u64) as u32
    }

    /// Requests that are booked.
    pub fn bookings(&self) -> usize {
        self.bookings.len()
    }

    pub(crate) fn names(&self) -> &Arc<Names> {
        &self.names
    }

    fn find(&mut self, reference: InstanceRef) -> Option<&mut Instance> {
        self.instances.iter_mut().find(|instance| instance.reference == reference)
    }

    fn intern(&mut self, spec: &ModelSpec) -> ModelIndex {
        if let Some((index, _)) = self.models.iter().find(|(_, known)| known.agrees_with(spec)) {
            return *index;
        }
        if self.models.len() >= MODELS_MAX {
            let served = |index: &ModelIndex| self.instances.iter().any(|i| i.model == *index);
            let unserved = self.models.keys().find(|index| !served(index)).copied();
            if let Some(index) = unserved {
                self.models.remove(&index);
            }
        }
        let index = ModelIndex(self.next_model);
        self.next_model += 1;
        self.models.insert(index, spec.clone());
        index
    }

    fn members_changed(&mut self) {
        self.forget_hosts();
        let row = |i: &Instance| (i.report.instance_id.clone(), i.report.node_id.clone());
        self.names = Arc::new(Names { rows: self.instances.iter().map(row).collect() });
    }
}
