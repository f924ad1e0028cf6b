//! A cluster in a few words, with prices that are easy to add up in one's head: a prefill takes
//! 1,000 us and 10 us a token, a fetch 100 us and 100 us a block.

use std::sync::Arc;

use kvasir_placement::{
    BookingId, ClusterView, DecodeProfile, InstanceReport, LinkProfile, ModelIndex, ModelSpec,
    NodeIndex, Objectives, PlaceRequest, Placement, Policy, PrefillProfile, PrefixMatch, Profile,
    Refusal, Refused, ReportedLoad, Role, SsdProfile, SsdReads, Steering, place,
};
use kvasir_proto::{InstanceId, NodeId};

pub(crate) const BLOCK_TOKENS: u32 = 64;

const NO_COST: PrefillProfile =
    PrefillProfile { base_us: 0.0, token_us: 0.0, pair_us: 0.0, reused_us: 0.0 };

pub(crate) fn profile() -> Profile {
    Profile {
        prefill: PrefillProfile { base_us: 1_000.0, token_us: 10.0, ..NO_COST },
        decode: DecodeProfile {
            base_us: 1_000.0,
            sequence_us: 100.0,
            token_us: 0.0,
            answer_us: 1_000_000.0,
            generated_tokens: 256.0,
        },
        link: LinkProfile { base_us: 100.0, bytes_per_us: 1_000.0 },
        ssd: SsdProfile { base_us: 0.0, bytes_per_us: 200.0 },
    }
}

pub(crate) fn model(name: &str) -> ModelSpec {
    ModelSpec {
        name: Arc::from(name),
        fingerprint: [7; 32],
        kv_dtype: Arc::from("f32"),
        vocab_size: 1_000,
        context_tokens: 100_000,
        block_tokens: BLOCK_TOKENS,
        block_bytes: 100_000,
        layout_hash: 1,
        routed: None,
    }
}

/// An idle instance `name` on the node of that number, called `n<number>`.
pub(crate) fn report(name: &str, node: u16, role: Role) -> InstanceReport {
    InstanceReport {
        instance_id: InstanceId::from(name),
        instance_type: "".into(),
        node: NodeIndex(node),
        node_id: NodeId::from(format!("n{node}").as_str()),
        attachment: (1, 1),
        role,
        current_role: None,
        model: model("tiny"),
        running_requests_max: 10,
        slots_total: 1_000,
        slots_available: 1_000,
        ssd_reads: SsdReads::default(),
        draining: false,
        load: ReportedLoad::default(),
    }
}

/// Instances on the nodes 0, 1, ... in this order. "p0" prefills, "d0" decodes, "b0" does both.
pub(crate) struct World {
    pub view: ClusterView,
    pub matched: PrefixMatch,
    pub model: ModelIndex,
    bookings: u64,
}

impl World {
    pub(crate) fn new(names: &[&str]) -> Self {
        World::with_policy(names, Policy::default())
    }

    pub(crate) fn with_policy(names: &[&str], policy: Policy) -> Self {
        World::shared(names, 1, policy)
    }

    /// So many of them, one after another, are on one node.
    pub(crate) fn shared(names: &[&str], per_node: usize, policy: Policy) -> Self {
        World::with_profile(names, per_node, policy, profile())
    }

    /// That begins with these prices.
    pub(crate) fn with_profile(
        names: &[&str],
        per_node: usize,
        policy: Policy,
        profile: Profile,
    ) -> Self {
        let mut view = ClusterView::new(policy, profile);
        for (at, name) in names.iter().enumerate() {
            view.report(report(name, (at / per_node) as u16, role_of(name)), 0);
        }
        World { view, matched: PrefixMatch::default(), model: ModelIndex(0), bookings: 0 }
    }

    /// What the nodes hold of the prompt, by number.
    pub(crate) fn held(mut self, held: &[(u16, u32)]) -> Self {
        let pairs: Vec<_> = held.iter().map(|&(node, blocks)| (NodeIndex(node), blocks)).collect();
        self.matched = PrefixMatch::from_pairs(&pairs);
        self
    }

    /// The same, and how many of these are in memory.
    pub(crate) fn held_in_memory(mut self, held: &[(u16, u32, u32)]) -> Self {
        let pairs: Vec<_> =
            held.iter().map(|&(node, all, fast)| (NodeIndex(node), all, fast)).collect();
        self.matched = PrefixMatch::from_memory_and_all(&pairs);
        self
    }

    /// A new report of an instance, changed by `change`.
    pub(crate) fn reports(mut self, name: &str, change: impl FnOnce(&mut InstanceReport)) -> Self {
        let instances = self.view.instances().iter();
        let known = instances.map(|i| i.report()).find(|report| &*report.instance_id.0 == name);
        let mut report = known.expect("the instance is there").clone();
        change(&mut report);
        self.view.report(report, 0);
        self
    }

    pub(crate) fn place<'a>(
        &self,
        change: impl FnOnce(&mut PlaceRequest<'a>),
    ) -> Result<Placement, Refusal> {
        self.decide(change).map_err(|refused| refused.refusal)
    }

    /// The same, with who was considered before a refusal.
    pub(crate) fn decide<'a>(
        &self,
        change: impl FnOnce(&mut PlaceRequest<'a>),
    ) -> Result<Placement, Refused> {
        let mut request = PlaceRequest {
            model: self.model,
            prompt_tokens: 1_000,
            max_tokens: 100,
            objectives: Objectives::NONE,
            exclude: &[],
            tie_seed: 1,
            now_us: 0,
            may_route: true,
            is_endless: false,
            steering: Steering::default(),
            chunks: &[],
        };
        change(&mut request);
        place(&self.view, &self.matched, &request)
    }

    /// Places and books.
    pub(crate) fn book(&mut self, now_us: u64) -> (BookingId, Placement) {
        self.bookings += 1;
        let tie_seed = self.bookings;
        let placement = self.place(|request| {
            request.now_us = now_us;
            request.tie_seed = tie_seed;
        });
        let placement = placement.expect("a placement");
        self.view.book(BookingId(self.bookings), &placement, now_us);
        (BookingId(self.bookings), placement)
    }
}

fn role_of(name: &str) -> Role {
    match name.as_bytes()[0] {
        b'p' => Role::Prefill,
        b'd' => Role::Decode,
        _ => Role::Both,
    }
}
