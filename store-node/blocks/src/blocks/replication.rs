//! Which chains are copied to other nodes, where to and in which order; and draining, which ends when
//! nothing is under way here and all that a tenant was told is kept is kept elsewhere too.
//!
//! Planning takes nothing: a [`CopyPlan`] is carried out by shares like those of any fetch, which pin
//! what they send. A drain never gives a block up: the node still has all of it when it says that it has
//! drained. So whoever is interrupted begins again, and finds most of it where it belongs.

use std::collections::{BinaryHeap, HashMap, HashSet, VecDeque};

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Class, Mark, Namespace, Share, Side, SlotIndex};

use super::{Blocks, as_u32};
use crate::copies::Promise;
use crate::replicas::{
    ChangeReplicaError, CopyCause, CopyError, CopyPlan, Drain, DrainRequest, DrainView, Peer,
    PeerView, Wanted,
};

impl Blocks {
    /// The nodes that could take blocks, as they were found just now.
    pub fn peers_seen(&mut self, now_ms: u64, peers: Vec<PeerView>) {
        self.replicas.peers = peers;
        self.replicas.peers_ms = Some(now_ms);
    }

    /// Whether copies are planned, so that it is of use to know the other nodes.
    pub fn wants_peers(&self) -> bool {
        self.replicas.drain.is_some() || self.replicas.hot.len() > 0 || self.copies.wants()
    }

    /// Another node asks for these blocks, which are here; for what is done about chains that many want.
    pub fn asked_for(&mut self, now_ms: u64, namespace: Namespace, held: &[BlockKey]) {
        if let (Some(last), None) = (held.last(), &self.replicas.drain) {
            let options = &self.options.replicas;
            self.replicas.hot.asked(now_ms, namespace, *last, options);
        }
    }

    /// Another node shall have a copy of the leading blocks of a chain that are here. Answers with the
    /// number under which [`Self::copied`] will be told, and with how many blocks they are.
    ///
    /// # Errors
    /// [`ChangeReplicaError`]; then nothing is planned.
    pub fn change_replica(
        &mut self,
        namespace: Namespace,
        keys: &[BlockKey],
        to: Peer,
    ) -> Result<(u64, u32), ChangeReplicaError> {
        let in_dram = self.cache.index().prefix(Some(namespace), keys).len();
        let here = in_dram.max(self.cache.ssd().prefix(namespace, self.cache.layout(), None, keys));
        if here == 0 {
            return Err(ChangeReplicaError::NotHere);
        }
        if self.replicas.asked.len() >= self.options.replicas.asked_max {
            return Err(ChangeReplicaError::TooMany(self.replicas.asked.len()));
        }
        let keys = keys[..here].to_vec();
        let number = self.want(CopyCause::Asked, namespace, keys, None, Some(to));
        let wanted = number.number;
        self.replicas.asked.push_back(number);
        Ok((wanted, as_u32(here)))
    }

    pub(super) fn want(
        &mut self,
        cause: CopyCause,
        namespace: Namespace,
        keys: Vec<BlockKey>,
        kept: Option<Mark>,
        to: Option<Peer>,
    ) -> Wanted {
        let number = self.replicas.number();
        Wanted { cause, namespace, keys, kept, to, avoid: None, not_before_ms: 0, number }
    }

    /// Begins to drain, or goes on with other targets. From now on no share of the prefill or decode side
    /// is granted but those of copies under way.
    pub fn drain(&mut self, now_ms: u64, request: DrainRequest) {
        if let Some(drain) = &mut self.replicas.drain {
            drain.request.targets = request.targets;
            drain.since_ms = now_ms;
            drain.kept.iter_mut().for_each(|wanted| wanted.not_before_ms = now_ms);
            return;
        }
        let hot_blocks_max = request.hot_blocks_max;
        self.replicas.drain = Some(Drain {
            request,
            since_ms: now_ms,
            kept: Default::default(),
            moved: Default::default(),
            hot: Default::default(),
            hot_moved: 0,
            hot_failed: 0,
            looked_ms: None,
            waiting_for: String::new(),
        });
        self.find_kept(now_ms);
        let hot = self.hottest(hot_blocks_max);
        for (namespace, keys) in hot {
            let wanted = self.want(CopyCause::DrainHot, namespace, keys, None, None);
            if let Some(drain) = &mut self.replicas.drain {
                drain.hot.push_back(wanted);
            }
        }
    }

    /// Takes work again. Copies under way go on.
    pub fn stop_draining(&mut self) {
        self.replicas.drain = None;
    }

    pub fn is_draining(&self) -> bool {
        self.replicas.drain.is_some()
    }

    /// How far it is. `of_copies` says of an open share that it belongs to a copy.
    pub fn drain_view(&self, of_copies: impl Fn(Share) -> bool) -> DrainView {
        let copies = as_u32(self.replicas.under_way.len());
        let Some(drain) = &self.replicas.drain else {
            return DrainView { copies, ..DrainView::default() };
        };
        let shares = as_u32(self.shares.keys().filter(|share| !of_copies(**share)).count());
        let of = |cause| self.replicas.under_way.values().filter(move |(_, of)| of.cause == cause);
        let kept_left = drain.kept.len() + of(CopyCause::DrainKept).count();
        let hot_left = drain.hot.len() + of(CopyCause::DrainHot).count();
        let idle = (self.shares.is_empty() || mutated(Mutation::DrainedWithOpenShares))
            && self.replicas.under_way.is_empty();
        // What is being kept just now is kept here in a moment, and was not looked at.
        let drained = idle
            && self.replicas.asked.is_empty()
            && self.sinks.keeps.is_empty()
            && drain.looked_ms.is_some()
            && hot_left == 0
            && (kept_left == 0 || mutated(Mutation::DrainedBeforeContextsMoved))
            && self.knows_kept(drain);
        DrainView {
            draining: true,
            drained,
            shares,
            kept_moved: as_u32(drain.moved.len()),
            kept_left: as_u32(kept_left),
            hot_moved: drain.hot_moved,
            hot_left: as_u32(hot_left),
            hot_failed: drain.hot_failed,
            copies,
            waiting_for: if drained { String::new() } else { drain.waiting_for.clone() },
        }
    }

    /// An SSD that cannot be used has blocks that nobody can name.
    fn knows_kept(&self, drain: &Drain) -> bool {
        !drain.request.has_ssd
            || self.ssd_size.bytes_max > 0
            || mutated(Mutation::DrainedWithUnusableSsd)
    }

    /// The next copy to make. To be called now and then, and after whatever may have made one due, until
    /// it answers `None`; each is answered by [`Self::copied`].
    pub fn poll_copy(&mut self, now_ms: u64) -> Option<CopyPlan> {
        if self.replicas.under_way.len() >= self.options.replicas.concurrent_copies_max {
            return None;
        }
        if let Some(wanted) = self.replicas.asked.pop_front() {
            let to = wanted.to.clone()?;
            return Some(self.begin_copy(wanted, to));
        }
        match self.replicas.drain.is_some() {
            true => self.poll_drain(now_ms),
            false => self.poll_copies(now_ms).or_else(|| self.poll_hot(now_ms)),
        }
    }

    pub(super) fn begin_copy(&mut self, wanted: Wanted, to: Peer) -> CopyPlan {
        let plan = CopyPlan {
            copy: wanted.number,
            cause: wanted.cause,
            namespace: wanted.namespace,
            keys: wanted.keys.clone(),
            to: to.clone(),
            kept: wanted.kept,
        };
        self.replicas.under_way.insert(wanted.number, (to, wanted));
        plan
    }

    fn poll_hot(&mut self, now_ms: u64) -> Option<CopyPlan> {
        self.replicas.hot.forget(now_ms, &self.options.replicas);
        let pushes = self
            .shares
            .iter()
            .filter(|(share, of)| share.side == Side::Source && !of.is_hint && !of.is_fill)
            .count();
        if pushes < self.options.replicas.hot_pushes_min || self.replicas.peers.is_empty() {
            return None;
        }
        let (namespace, last) = self.replicas.hot.take(now_ms, &self.options.replicas)?;
        let keys = self.chain_in_memory(self.cache.index().find(last)?);
        let wanted = self.want(CopyCause::Hot, namespace, keys, None, None);
        let to = self.replicas.choose(&wanted, &[], &[]).ok()?;
        Some(self.begin_copy(wanted, to))
    }

    fn poll_drain(&mut self, now_ms: u64) -> Option<CopyPlan> {
        let drain = self.replicas.drain.as_ref()?;
        // What was found of the others before is of no use to decide that nobody is there.
        let looked = self.replicas.peers_ms.is_some_and(|at_ms| at_ms >= drain.since_ms);
        let retry_ms = self.options.replicas.retry_ms;
        if drain.looked_ms.is_none_or(|at_ms| now_ms.saturating_sub(at_ms) >= retry_ms) {
            self.find_kept(now_ms);
        }
        let drain = self.replicas.drain.as_ref()?;
        if !self.knows_kept(drain) {
            return self.drain_waits("the SSD is unavailable and its contexts are unknown");
        }
        if !looked {
            return self.drain_waits_if_any("replies of the other nodes");
        }
        self.poll_kept(now_ms).or_else(|| self.poll_drain_hot())
    }

    fn poll_kept(&mut self, now_ms: u64) -> Option<CopyPlan> {
        let drain = self.replicas.drain.as_ref()?;
        let due = drain.kept.iter().position(|wanted| wanted.not_before_ms <= now_ms)?;
        let wanted = &drain.kept[due];
        let name = wanted.last().map(|last| (wanted.namespace, last));
        let named = name.zip(wanted.kept.as_ref().map(Promise::of)).into_iter();
        let holders = named.flat_map(|(name, promise)| self.copies.holders(name, promise));
        let holders: Vec<Peer> = holders.cloned().collect();
        let choice = self.replicas.choose(wanted, &drain.request.targets, &holders);
        match choice {
            Ok(to) => {
                let wanted = self.replicas.drain.as_mut()?.kept.remove(due)?;
                Some(self.begin_copy(wanted, to))
            }
            Err(why) => self.drain_waits(why),
        }
    }

    /// Nobody was promised these: where nobody takes them they are left.
    fn poll_drain_hot(&mut self) -> Option<CopyPlan> {
        while let Some(mut wanted) = self.replicas.drain.as_mut()?.hot.pop_front() {
            let here = self.cache.index().prefix(Some(wanted.namespace), &wanted.keys).len();
            wanted.keys.truncate(here);
            let targets = &self.replicas.drain.as_ref()?.request.targets;
            if let (true, Ok(to)) = (here > 0, self.replicas.choose(&wanted, targets, &[])) {
                return Some(self.begin_copy(wanted, to));
            }
            self.replicas.drain.as_mut()?.hot_failed += 1;
        }
        None
    }

    fn drain_waits(&mut self, why: &str) -> Option<CopyPlan> {
        why.clone_into(&mut self.replicas.drain.as_mut()?.waiting_for);
        None
    }

    fn drain_waits_if_any(&mut self, why: &str) -> Option<CopyPlan> {
        let drain = self.replicas.drain.as_ref()?;
        if drain.kept.is_empty() && drain.hot.is_empty() {
            return None;
        }
        self.drain_waits(why)
    }

    /// A copy has ended: all of the chain is there, durable if it is kept; or why not.
    pub fn copied(&mut self, now_ms: u64, copy: u64, result: Result<(), CopyError>) {
        let Some((to, mut wanted)) = self.replicas.under_way.remove(&copy) else { return };
        if let (Some(last), Some(mark)) = (wanted.last(), wanted.kept) {
            self.context_copied(now_ms, (wanted.namespace, last), mark, &to, result.is_ok());
        }
        let retry_at_ms = now_ms.saturating_add(self.options.replicas.retry_ms);
        let Some(drain) = &mut self.replicas.drain else { return };
        match (wanted.cause, result) {
            (CopyCause::DrainKept, Ok(())) => {
                if let (Some(last), Some(kept)) = (wanted.last(), wanted.kept) {
                    drain.moved.insert(last, kept);
                }
                drain.waiting_for.clear();
            }
            (CopyCause::DrainKept, Err(error)) => {
                wanted.failed(&error, retry_at_ms);
                drain.waiting_for = error.to_string();
                drain.kept.push_back(wanted);
            }
            (CopyCause::DrainHot, Ok(())) => drain.hot_moved += 1,
            (CopyCause::DrainHot, Err(error)) => {
                // Once more, elsewhere if there is an elsewhere.
                if wanted.avoid.is_none() && !matches!(error, CopyError::NotHere(_)) {
                    wanted.failed(&error, 0);
                    drain.hot.push_back(wanted);
                } else {
                    drain.hot_failed += 1;
                }
            }
            (CopyCause::Asked | CopyCause::Hot | CopyCause::Context, _) => {}
        }
    }

    /// What is kept here is not what it was.
    pub(super) fn kept_changed(&mut self) {
        if let Some(drain) = &mut self.replicas.drain {
            drain.looked_ms = None;
        }
    }

    /// Looks for kept chains that have not moved: each ends with a block that is marked, and moves with its
    /// own mark, also one that others go on from. Those that are on their way are not among them.
    fn find_kept(&mut self, now_ms: u64) {
        let Some(drain) = &self.replicas.drain else { return };
        let under_way = self.replicas.under_way.values().map(|(_, wanted)| wanted);
        let is_under_way = |key: BlockKey, of: Mark| {
            let moves = |wanted: &&Wanted| wanted.cause == CopyCause::DrainKept;
            let is_it = |wanted: &Wanted| wanted.last() == Some(key) && wanted.kept == Some(of);
            under_way.clone().filter(moves).any(is_it)
        };
        let ssd = self.cache.ssd();
        let mut ends = Vec::new();
        for block in ssd.ends() {
            let Some(of) = block.mark else { continue };
            // What is no context, and is kept as long by what follows it, goes with that.
            let as_long = |class: Class| match class {
                Class::Context { tenant, expires_unix_ms } => {
                    tenant == of.tenant && expires_unix_ms >= of.expires_unix_ms
                }
                Class::Normal => false,
            };
            if of.created_unix_ms.is_none() && ssd.classes_after(block.key).any(as_long) {
                continue;
            }
            if drain.moved.get(&block.key) != Some(&of) && !is_under_way(block.key, of) {
                ends.push((block.namespace, ssd.chain(block.key), of));
            }
        }
        let found: Vec<Wanted> = ends
            .into_iter()
            .map(|(namespace, keys, kept)| {
                self.want(CopyCause::DrainKept, namespace, keys, Some(kept), None)
            })
            .collect();
        let Some(drain) = &mut self.replicas.drain else { return };
        let known: HashMap<Option<BlockKey>, &Wanted> =
            drain.kept.iter().map(|wanted| (wanted.last(), wanted)).collect();
        let known_of = |mut wanted: Wanted| {
            if let Some(known) = known.get(&wanted.last()) {
                (wanted.avoid, wanted.not_before_ms) = (known.avoid.clone(), known.not_before_ms);
            }
            wanted
        };
        let found: VecDeque<Wanted> = found.into_iter().map(known_of).collect();
        drain.kept = found;
        drain.looked_ms = Some(now_ms);
    }

    pub(super) fn chain_in_memory(&self, last: SlotIndex) -> Vec<BlockKey> {
        let key = |slot: &SlotIndex| self.cache.index().entry(*slot).map(|entry| entry.key);
        self.cache.index().path(last).iter().filter_map(key).collect()
    }

    /// Chains of memory, those first that are most likely to be used again, until so many blocks are in
    /// them.
    fn hottest(&self, blocks_max: u32) -> Vec<(Namespace, Vec<BlockKey>)> {
        let mut leaves: BinaryHeap<_> = self.cache.index().leaves_by_worth().collect();
        let (mut chains, mut counted) = (Vec::new(), HashSet::new());
        while let Some(leaf) = leaves.pop() {
            let path = self.cache.index().path(leaf.slot);
            let new = path.iter().filter(|slot| !counted.contains(*slot)).count();
            if counted.len() + new > blocks_max as usize {
                break;
            }
            counted.extend(path);
            if let Some(entry) = self.cache.index().entry(leaf.slot) {
                chains.push((entry.namespace, self.chain_in_memory(leaf.slot)));
            }
        }
        chains
    }
}
