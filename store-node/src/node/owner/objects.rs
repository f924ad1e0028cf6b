//! What clients of objects ask for: reserve and commit, get and unpin, find, remove.

use std::collections::BTreeSet;

use kvasir_blocks::{
    AllocateError, Commit as Committed, GetError, KeepRequest, ReserveObjects, ShareError, Tier,
};
use kvasir_proto::{BlockKey, Generation, Share, Side, SlotIndex, v1};
use kvasir_transfer::fold;
use v1::client_to_node::Message as FromClient;
use v1::node_to_client::Message as ToClient;
use v1::{ObjectClass, ObjectOutcome, ObjectRefusal};

use super::Owner;
use super::clients::{KeepOf, RemovalOf, ShareOf};
use crate::clock;
use crate::node::client::{Commit, Ephemeral, Fetch, Get, OWN_NUMBERS, Put, WAITING_MAX};
use crate::node::command::FetchName;
use crate::node::line::Broken;

/// Objects of one reserve, get or remove.
pub(super) const OBJECTS_MAX: usize = 4_096;
/// Keys of one find: what a message in a ring has room for, four times over.
pub(super) const KEYS_MAX: usize = 16_384;
/// Where an engine is attached, so much of the slots stays for it: one in so many.
const ENGINE_PART: u32 = 8;
/// Objects that may be on their way to being kept at once, for all clients together.
const KEEPS_MAX: usize = 4_096;
/// Removals on their way to the SSD or the object store, beyond which no more are taken.
const REMOVALS_MAX: u32 = 1 << 16;
/// Reservations of one client that are open at once.
const PUTS_MAX: usize = 4_096;
/// Stands for "no slot".
const NO_SLOT: u32 = u32::MAX;

/// A request that was not carried out.
#[derive(Debug)]
pub(super) struct Refusal(pub(super) ObjectRefusal, pub(super) String);

fn refused(kind: ObjectRefusal, why: impl Into<String>) -> Refusal {
    Refusal(kind, why.into())
}

impl From<AllocateError> for Refusal {
    fn from(error: AllocateError) -> Self {
        let kind = match error {
            AllocateError::NoSpace { .. } | AllocateError::TooManyShares(_) => {
                ObjectRefusal::NoCapacity
            }
            AllocateError::Draining => ObjectRefusal::Unavailable,
            AllocateError::TooLarge { .. }
            | AllocateError::Tombstoned
            | AllocateError::Finished
            | AllocateError::BadRequest(_) => ObjectRefusal::Invalid,
        };
        refused(kind, error.to_string())
    }
}

impl From<GetError> for Refusal {
    fn from(error: GetError) -> Self {
        let kind = match error {
            GetError::TooManyPins(_) => ObjectRefusal::NoCapacity,
            GetError::HandleInUse => ObjectRefusal::Invalid,
        };
        refused(kind, error.to_string())
    }
}

fn keys(bytes: &[u8], keys_max: usize) -> Result<Vec<BlockKey>, Broken> {
    let keys = BlockKey::list(bytes)?;
    if keys.is_empty() || keys.len() > keys_max {
        return Err(Broken(format!(
            "the request has {} keys; it must have 1 to {keys_max}",
            keys.len()
        )));
    }
    Ok(keys)
}

impl Owner {
    pub(super) fn take_client_message(
        &mut self,
        at: usize,
        request: u64,
        message: FromClient,
    ) -> Result<(), Broken> {
        let answer = match message {
            FromClient::Reserve(reserve) => {
                self.reserve_objects(at, request, &reserve)?.map(ToClient::Reserved)
            }
            FromClient::Commit(commit) => return self.commit_objects(at, request, &commit),
            FromClient::Get(get) => return self.bring_and_get_objects(at, request, get),
            FromClient::Fetch(v1::FetchObjects { keys: wanted, source }) => {
                let wanted = keys(&wanted, OBJECTS_MAX)?;
                return self.fetch_objects(at, request, &source, Fetch::Only(wanted));
            }
            FromClient::Unpin(v1::UnpinObjects { get }) if get >= OWN_NUMBERS => {
                return Err(Broken(format!(
                    "the client unpins {get}, which is not a request number"
                )));
            }
            FromClient::Unpin(v1::UnpinObjects { get }) => {
                let epoch = self.clients.list[at].line.epoch();
                self.blocks.unpin(epoch, get);
                return Ok(());
            }
            FromClient::Find(find) => {
                let namespace = self.clients.list[at].namespace;
                let tier = |key: &BlockKey| match self.blocks.find_object(namespace, *key) {
                    None => 0,
                    Some(Tier::Dram | Tier::Vram) => v1::Tier::Dram as u8,
                    Some(Tier::Ssd) => v1::Tier::Ssd as u8,
                };
                let tiers = keys(&find.keys, KEYS_MAX)?.iter().map(tier).collect();
                Ok(ToClient::Found(v1::FoundObjects { tiers }))
            }
            FromClient::Remove(remove) => {
                let keys = keys(&remove.keys, OBJECTS_MAX)?;
                match self.remove_objects(at, request, &keys) {
                    Ok(None) => return Ok(()),
                    Ok(Some(count)) => Ok(ToClient::Removed(v1::RemovedObjects { count })),
                    Err(refusal) => Err(refusal),
                }
            }
            FromClient::Corrupt(v1::CorruptObjects { slots, generations }) => {
                if slots.len() != generations.len() || slots.len() > OBJECTS_MAX {
                    return Err(Broken(
                        "the client reports too many corrupt slots, or slots without generations"
                            .into(),
                    ));
                }
                let copies =
                    slots.into_iter().map(SlotIndex).zip(generations.into_iter().map(Generation));
                let count = self.drop_rotten_objects(at, copies);
                Ok(ToClient::Removed(v1::RemovedObjects { count }))
            }
        };
        self.answer_client(at, request, answer)
    }

    /// A client has found copies in memory rotten. It can have its own namespace's objects dropped, as it can
    /// remove them.
    fn drop_rotten_objects(
        &mut self,
        at: usize,
        copies: impl Iterator<Item = (SlotIndex, Generation)>,
    ) -> u32 {
        let namespace = self.clients.list[at].namespace;
        let mut count = 0;
        for (slot, generation) in copies {
            if !self.blocks.is_object_of(namespace, slot, generation) {
                continue;
            }
            if self.blocks.drop_corrupt(clock::now_ms(), slot, generation) > 0 {
                count += 1;
                self.end_routes_over(slot);
                self.metrics.corrupt_blocks.inc();
                tracing::error!(
                    slot = slot.0,
                    "an object client found a corrupt object in memory; the store node dropped it"
                );
            }
        }
        count
    }

    fn answer_client(
        &mut self,
        at: usize,
        request: u64,
        answer: Result<ToClient, Refusal>,
    ) -> Result<(), Broken> {
        let message = answer.unwrap_or_else(|Refusal(refusal, why)| {
            self.metrics.object_requests_refused.inc();
            ToClient::Refused(v1::RefusedObjects { refusal: refusal.into(), reason: why })
        });
        self.clients.list[at].answer(request, message)
    }

    /// Engines go first: where one is attached, clients leave it a part of the slots.
    fn leaves_room(&self, wanted: usize) -> Result<(), Refusal> {
        if self.engines.is_empty() {
            return Ok(());
        }
        let (available, slots) = (self.blocks.available(), self.blocks.counts().slots);
        let left = slots / ENGINE_PART;
        if (available as usize) < wanted + left as usize {
            let why = format!(
                "{wanted} slots are needed and {available} are available, of which {left} are \
                 reserved for the engine"
            );
            return Err(refused(ObjectRefusal::NoCapacity, why));
        }
        Ok(())
    }

    fn reserve_objects(
        &mut self,
        at: usize,
        request: u64,
        reserve: &v1::ReserveObjects,
    ) -> Result<Result<v1::ReservedObjects, Refusal>, Broken> {
        let keys = keys(&reserve.keys, OBJECTS_MAX)?;
        let client = &self.clients.list[at];
        if client.puts.contains_key(&request) {
            return Err(Broken(format!(
                "the client used request number {request} for two reservations"
            )));
        }
        if client.puts.len() >= PUTS_MAX {
            let why =
                format!("{PUTS_MAX} reservations of this client are open: commit or drop one");
            return Ok(Err(refused(ObjectRefusal::NoCapacity, why)));
        }
        let (namespace, epoch) = (client.namespace, client.line.epoch());
        let lacking = |key: &BlockKey| self.blocks.find_object(namespace, *key).is_none();
        let (mut pages, mut wanted) = (Vec::with_capacity(keys.len()), Vec::new());
        for key in &keys {
            let page = lacking(key).then_some(wanted.len() as u32);
            pages.push(page);
            wanted.extend(page.map(|_| *key));
        }
        let taken = match wanted.is_empty() {
            true => Ok((None, Vec::new())),
            false => self.take_slots(epoch, request, at, wanted, reserve.lease_ms),
        };
        let (share, slots) = match taken {
            Ok(taken) => taken,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let slot = |page: &Option<u32>| page.map_or(NO_SLOT, |page| slots[page as usize].0);
        let reserved = v1::ReservedObjects { slots: pages.iter().map(slot).collect() };
        self.clients.list[at].puts.insert(request, Put { share, keys, pages });
        Ok(Ok(reserved))
    }

    fn take_slots(
        &mut self,
        epoch: kvasir_blocks::AttachEpoch,
        request: u64,
        at: usize,
        keys: Vec<BlockKey>,
        lease_ms: u64,
    ) -> Result<(Option<Share>, Vec<SlotIndex>), Refusal> {
        if self.drain_until_ms.is_some() {
            return Err(refused(ObjectRefusal::Unavailable, "the node is draining"));
        }
        self.leaves_room(keys.len())?;
        let tx = self.clients.next_tx(self.incarnation);
        let share = Share { tx, side: Side::Prefill };
        let namespace = self.clients.list[at].namespace;
        let wanted = ReserveObjects { share, epoch, namespace, keys, lease_ms };
        let slots = self.blocks.reserve_objects(clock::now_ms(), &wanted)?;
        self.publish_freed();
        self.clients.shares.insert(share, ShareOf { epoch, request });
        Ok((Some(share), slots))
    }

    fn commit_objects(
        &mut self,
        at: usize,
        request: u64,
        commit: &v1::CommitObjects,
    ) -> Result<(), Broken> {
        let wrong = |what: &str| Broken(format!("invalid commit: {what}"));
        if self.clients.list[at].commits.contains_key(&request) {
            return Err(Broken(format!(
                "the client used request number {request} for two commits"
            )));
        }
        let Some(put) = self.clients.list[at].puts.remove(&commit.reserve) else {
            return Err(wrong("the reservation does not exist"));
        };
        if !commit.objects.is_sorted_by(|one, next| one < next) {
            return Err(wrong("the objects are not in ascending order"));
        }
        let runs = self.cache.as_ref().map_or(0, |cache| cache.layout.runs_per_page());
        let mut checksums = commit.checksums.chunks_exact(runs.max(1));
        let mut outcomes = Vec::with_capacity(commit.objects.len());
        for &object in &commit.objects {
            let page = put
                .pages
                .get(object as usize)
                .ok_or_else(|| wrong("an object is not part of the reservation"))?;
            let key = put.keys[object as usize];
            let outcome = match (put.share, page) {
                (Some(share), Some(page)) => {
                    let sums = checksums.next().ok_or_else(|| wrong("a checksum is missing"))?;
                    self.commit_object(share, *page, fold(sums))
                }
                _ => {
                    let namespace = self.clients.list[at].namespace;
                    let there = self.blocks.find_object(namespace, key).is_some();
                    if there { ObjectOutcome::Exists } else { ObjectOutcome::Lost }
                }
            };
            outcomes.push(outcome);
        }
        let class = ObjectClass::try_from(commit.class).unwrap_or(ObjectClass::Unspecified);
        let stored = |(position, outcome): (usize, &ObjectOutcome)| {
            let key = put.keys[commit.objects[position] as usize];
            match outcome {
                ObjectOutcome::Stored | ObjectOutcome::Exists => Some((position, key)),
                _ => None,
            }
        };
        let there: Vec<(usize, BlockKey)> =
            outcomes.iter().enumerate().filter_map(stored).collect();
        let mut waiting = Commit { outcomes, why: String::new(), keeping: 0 };
        if class == ObjectClass::Ephemeral {
            for &(position, key) in &there {
                if waiting.outcomes[position] == ObjectOutcome::Stored
                    && let Err(why) = self.hold_ephemeral(at, key)
                {
                    waiting.outcomes[position] = ObjectOutcome::NotPersisted;
                    waiting.why = why;
                }
            }
        }
        if class == ObjectClass::Context {
            for (position, key) in there {
                self.keep_object(at, request, position, key, commit.ttl_ms, &mut waiting);
            }
        }
        // What was committed is pinned until here.
        self.give_up_put(at, put.share);
        if waiting.keeping > 0 {
            self.clients.list[at].commits.insert(request, waiting);
            return Ok(());
        }
        self.answer_commit(at, request, waiting)
    }

    fn commit_object(&mut self, share: Share, page: u32, checksum: u64) -> ObjectOutcome {
        match self.blocks.commit_page(share, page, checksum) {
            Ok(Committed::Indexed) => ObjectOutcome::Stored,
            Ok(Committed::Duplicate { .. } | Committed::OnSsd) => ObjectOutcome::Exists,
            Ok(Committed::Ephemeral | Committed::NoParent) | Err(ShareError::Refused(_)) => {
                ObjectOutcome::Refused
            }
            Err(ShareError::Unknown | ShareError::Finished | ShareError::Ending) => {
                ObjectOutcome::Lost
            }
        }
    }

    /// The client writes no more of it.
    fn give_up_put(&mut self, at: usize, share: Option<Share>) {
        let Some(share) = share else { return };
        self.clients.shares.remove(&share);
        self.clients.list[at].stopping.remove(&share);
        // It may have been aborted: then this is what its slots wait for.
        let _ = self.blocks.release(clock::now_ms(), share);
    }

    fn answer_commit(&mut self, at: usize, request: u64, commit: Commit) -> Result<(), Broken> {
        for outcome in &commit.outcomes {
            self.metrics.objects.with_label_values(&[name_of(*outcome)]).inc();
        }
        let outcomes = commit.outcomes.into_iter().map(i32::from).collect();
        let committed = v1::CommittedObjects { outcomes, reason: commit.why };
        self.answer_client(at, request, Ok(ToClient::Committed(committed)))
    }

    /// One that cannot be held is a normal object, as is answered then.
    fn hold_ephemeral(&mut self, at: usize, key: BlockKey) -> Result<(), String> {
        let pin = self.clients.next_number();
        let client = &mut self.clients.list[at];
        let (epoch, namespace) = (client.line.epoch(), client.namespace);
        let object = self.blocks.object_at(namespace, key).ok_or("the object no longer exists")?;
        let pinned = self.blocks.get_objects(epoch, pin, namespace, &[key]);
        pinned.map_err(|error| error.to_string())?;
        if let Some(former) = client.ephemeral.insert(key, Ephemeral { object, pin }) {
            self.blocks.unpin(epoch, former.pin);
        }
        Ok(())
    }

    fn keep_object(
        &mut self,
        at: usize,
        request: u64,
        position: usize,
        key: BlockKey,
        ttl_ms: u64,
        commit: &mut Commit,
    ) {
        let client = &self.clients.list[at];
        let (namespace, epoch) = (client.namespace, client.line.epoch());
        let expires_unix_ms = clock::unix_ms().saturating_add(ttl_ms);
        let kept = match client.tenant {
            None => Err("the client has no tenant".to_owned()),
            Some(_) if ttl_ms == 0 => Err("the TTL is 0".to_owned()),
            Some(_) if self.clients.keeps.len() >= KEEPS_MAX => {
                Err("too many objects are being persisted; try again later".to_owned())
            }
            Some(tenant) => {
                let keys = vec![key];
                let created_unix_ms = None;
                let wanted = KeepRequest {
                    namespace,
                    keys,
                    tenant,
                    expires_unix_ms,
                    created_unix_ms,
                    copies: 1,
                };
                let keep = self.blocks.keep(clock::now_ms(), &wanted);
                keep.map_err(|error| error.to_string())
            }
        };
        match kept {
            Ok(keep) => {
                self.clients.keeps.insert(keep, KeepOf { epoch, request, position });
                commit.keeping += 1;
            }
            Err(why) => {
                commit.outcomes[position] = ObjectOutcome::NotPersisted;
                commit.why = why;
            }
        }
    }

    /// Keeping has ended. False when it was nothing of a client's.
    pub(super) fn object_kept(&mut self, keep: u64, blocks: Option<u32>) -> bool {
        let Some(KeepOf { epoch, request, position }) = self.clients.keeps.remove(&keep) else {
            return self.objects_removed(keep, blocks.is_some());
        };
        let Some(at) = self.clients.at(epoch) else { return true };
        let client = &mut self.clients.list[at];
        let Some(commit) = client.commits.get_mut(&request) else { return true };
        commit.keeping -= 1;
        if blocks.is_none() {
            if let Some(outcome) = commit.outcomes.get_mut(position) {
                *outcome = ObjectOutcome::NotPersisted;
            }
            commit.why = "the object was not persisted; try again".into();
        }
        if commit.keeping == 0
            && let Some(commit) = client.commits.remove(&request)
            && let Err(broken) = self.answer_commit(at, request, commit)
        {
            self.expel_client(at, &broken);
        }
        true
    }

    fn bring_and_get_objects(
        &mut self,
        at: usize,
        request: u64,
        get: v1::GetObjects,
    ) -> Result<(), Broken> {
        let namespace = self.clients.list[at].namespace;
        let is_here = |key: &BlockKey| self.blocks.find_object(namespace, *key).is_some();
        if get.source.is_empty() || keys(&get.keys, OBJECTS_MAX)?.iter().all(is_here) {
            return self.get_objects(at, request, &get);
        }
        let source = get.source.clone();
        self.fetch_objects(at, request, &source, Fetch::Get(get))
    }

    /// Answered by `objects_fetched`.
    fn fetch_objects(
        &mut self,
        at: usize,
        request: u64,
        source: &str,
        fetch: Fetch,
    ) -> Result<(), Broken> {
        let client = &self.clients.list[at];
        if client.fetches.contains_key(&request) {
            return Err(Broken(format!(
                "the client used request number {request} for two fetches"
            )));
        }
        if client.fetches.len() >= WAITING_MAX {
            let why = format!("{WAITING_MAX} fetches of this client are already queued");
            let refusal = refused(ObjectRefusal::NoCapacity, why);
            return self.answer_client(at, request, Err(refusal));
        }
        let mut lacking = match &fetch {
            Fetch::Only(keys) => keys.clone(),
            Fetch::Get(get) => keys(&get.keys, OBJECTS_MAX)?,
        };
        lacking.retain(|key| self.blocks.find_object(client.namespace, *key).is_none());
        let (name, namespace) =
            (FetchName { epoch: client.line.epoch(), request }, client.namespace);
        self.clients.list[at].fetches.insert(request, fetch);
        self.begin_fetch(name, namespace, lacking, source);
        Ok(())
    }

    /// What came of a fetch.
    pub(super) fn objects_fetched(
        &mut self,
        FetchName { epoch, request }: FetchName,
        result: Result<(), Refusal>,
    ) {
        let Some(at) = self.clients.at(epoch) else { return };
        let Some(fetch) = self.clients.list[at].fetches.remove(&request) else { return };
        let namespace = self.clients.list[at].namespace;
        let answered = match (result, fetch) {
            (Err(refusal), _) => self.answer_client(at, request, Err(refusal)),
            (Ok(()), Fetch::Only(keys)) => {
                let is_here = |key| self.blocks.find_object(namespace, key).is_some();
                let here = keys.into_iter().map(|key| u8::from(is_here(key))).collect();
                let fetched = ToClient::Fetched(v1::FetchedObjects { present: here });
                self.answer_client(at, request, Ok(fetched))
            }
            (Ok(()), Fetch::Get(get)) => self.get_objects(at, request, &get),
        };
        if let Err(broken) = answered {
            self.expel_client(at, &broken);
        }
    }

    fn get_objects(&mut self, at: usize, request: u64, get: &v1::GetObjects) -> Result<(), Broken> {
        let keys = keys(&get.keys, OBJECTS_MAX)?;
        let client = &self.clients.list[at];
        if client.gets.contains_key(&request) {
            return Err(Broken(format!("the client used request number {request} for two gets")));
        }
        let (namespace, epoch) = (client.namespace, client.line.epoch());
        let (mut is_held, mut rising) = (false, BTreeSet::new());
        let may_rise = self.tiers.are_any() && client.gets.len() < WAITING_MAX;
        let is_below =
            |key: &&BlockKey| self.blocks.find_object(namespace, **key) == Some(Tier::Ssd);
        let below: Vec<BlockKey> = match may_rise {
            true => keys.iter().filter(is_below).copied().collect(),
            false => Vec::new(),
        };
        if !below.is_empty() && self.leaves_room(keys.len()).is_ok() {
            // What is here stays while room is made for the others. A refusal comes again below.
            is_held = self.blocks.get_objects(epoch, request, namespace, &keys).is_ok();
            let now_ms = clock::now_ms();
            let lease_ms = self.config.lease_max_ms;
            for key in below {
                let tx = self.clients.next_tx(self.incarnation);
                let share = Share { tx, side: Side::Source };
                let wanted = ReserveObjects { share, epoch, namespace, keys: vec![key], lease_ms };
                if self.blocks.raise_object(now_ms, &wanted) {
                    self.clients.shares.insert(share, ShareOf { epoch, request });
                    rising.insert(share);
                }
            }
        }
        let checksums = get.checksums;
        let get = Get { keys, checksums, is_held, rising, risen: Vec::new() };
        if get.rising.is_empty() {
            return self.answer_get(at, request, get);
        }
        self.clients.list[at].gets.insert(request, get);
        Ok(())
    }

    fn answer_get(&mut self, at: usize, request: u64, get: Get) -> Result<(), Broken> {
        let client = &self.clients.list[at];
        let (namespace, epoch) = (client.namespace, client.line.epoch());
        if get.is_held {
            self.blocks.unget_objects(epoch, request);
        }
        let got = match self.leaves_room(get.keys.len()) {
            Ok(()) => {
                self.blocks.get_objects(epoch, request, namespace, &get.keys).map_err(Refusal::from)
            }
            Err(refusal) => Err(refusal),
        };
        let now_ms = clock::now_ms();
        for share in get.risen {
            self.clients.shares.remove(&share);
            let _ = self.blocks.release(now_ms, share);
        }
        let answer = got.map(|slots| {
            let hits = slots.iter().flatten().count() as u64;
            let count = |what: &str, by| self.metrics.objects.with_label_values(&[what]).inc_by(by);
            count("hit", hits);
            count("miss", slots.len() as u64 - hits);
            let generation = |slot: &Option<SlotIndex>| {
                slot.and_then(|slot| self.blocks.generation(slot)).unwrap_or_default().0
            };
            let sums = slots.iter().flatten().filter(|_| get.checksums);
            let sums = sums.filter_map(|slot| self.blocks.checksum_of(*slot));
            ToClient::Got(v1::GotObjects {
                generations: slots.iter().map(generation).collect(),
                checksums: sums.collect(),
                slots: slots.iter().map(|slot| slot.map_or(NO_SLOT, |slot| slot.0)).collect(),
            })
        });
        self.answer_client(at, request, answer)
    }

    /// A read of the SSD has ended, well or not. False when the share is nothing of a client's.
    pub(super) fn object_risen(&mut self, share: Share) -> bool {
        let Some(&ShareOf { epoch, request }) = self.clients.shares.get(&share) else {
            return false;
        };
        let Some(at) = self.clients.at(epoch) else { return true };
        let client = &mut self.clients.list[at];
        let Some(get) = client.gets.get_mut(&request) else { return true };
        if get.rising.remove(&share) {
            get.risen.push(share);
        }
        if get.rising.is_empty()
            && let Some(get) = client.gets.remove(&request)
            && let Err(broken) = self.answer_get(at, request, get)
        {
            self.expel_client(at, &broken);
        }
        true
    }

    /// A client is to write no more of a share. False when it is nothing of a client's.
    pub(super) fn stop_client(&mut self, share: Share) -> bool {
        let Some(of) = self.clients.shares.get(&share) else { return false };
        if let Some(at) = self.clients.at(of.epoch) {
            // It learns of it when it commits, which is also how it lets go.
            self.clients.list[at].stopping.insert(share, clock::now_ms());
        }
        true
    }

    /// Answers how many there were; without, when the answer waits until no restart brings one back.
    fn remove_objects(
        &mut self,
        at: usize,
        request: u64,
        keys: &[BlockKey],
    ) -> Result<Option<u32>, Refusal> {
        let (now_ms, client) = (clock::now_ms(), &self.clients.list[at]);
        let (namespace, epoch) = (client.namespace, client.line.epoch());
        if self.tiers.has_ssd() && !self.blocks.ssd_is_usable(now_ms) {
            let why = "the SSD is unavailable and may hold the objects: try again later";
            return Err(refused(ObjectRefusal::NoCapacity, why));
        }
        let counts = self.blocks.counts();
        if counts.sinking.max(counts.discarding) >= REMOVALS_MAX {
            let why = "too many objects are being removed; try again later";
            return Err(refused(ObjectRefusal::NoCapacity, why));
        }
        let removed = self.blocks.remove_objects(now_ms, namespace, keys);
        let (count, keep) =
            removed.map_err(|error| refused(ObjectRefusal::NoCapacity, error.to_string()))?;
        // Whoever had put one may be another client.
        for client in self.clients.list.iter_mut().filter(|of| of.namespace == namespace) {
            for key in keys {
                let held = client.ephemeral.get(key);
                if held.is_some_and(|held| !self.blocks.is_there(&held.object))
                    && let Some(Ephemeral { pin, .. }) = client.ephemeral.remove(key)
                {
                    self.blocks.unpin(client.line.epoch(), pin);
                }
            }
        }
        if let Some(keep) = keep {
            self.clients.removals.insert(keep, RemovalOf { epoch, request, count });
        }
        self.fetch_no_more(namespace, keys);
        Ok(keep.is_none().then_some(count))
    }

    /// A removal is durable, or is not. False when it was none.
    fn objects_removed(&mut self, keep: u64, is_durable: bool) -> bool {
        let Some(RemovalOf { epoch, request, count }) = self.clients.removals.remove(&keep) else {
            return false;
        };
        let Some(at) = self.clients.at(epoch) else { return true };
        let answer = match is_durable {
            true => Ok(ToClient::Removed(v1::RemovedObjects { count })),
            false => {
                let why = "the SSD or the object store did not store the removal: a restart may \
                           restore the objects; try again";
                Err(refused(ObjectRefusal::NoCapacity, why))
            }
        };
        if let Err(broken) = self.answer_client(at, request, answer) {
            self.expel_client(at, &broken);
        }
        true
    }

    /// Objects that go with their clients have gone before them: their slots come free.
    pub(super) fn let_go_of_dropped(&mut self) {
        for client in &mut self.clients.list {
            let epoch = client.line.epoch();
            let is_gone = |_: &BlockKey, held: &mut Ephemeral| !self.blocks.is_there(&held.object);
            let gone: Vec<u64> =
                client.ephemeral.extract_if(.., is_gone).map(|(_, held)| held.pin).collect();
            for pin in gone {
                self.blocks.unpin(epoch, pin);
            }
        }
    }
}

fn name_of(outcome: ObjectOutcome) -> &'static str {
    match outcome {
        ObjectOutcome::Stored => "stored",
        ObjectOutcome::Exists => "exists",
        ObjectOutcome::Lost => "lost",
        ObjectOutcome::NotPersisted => "not_persisted",
        ObjectOutcome::Refused | ObjectOutcome::Unspecified => "refused",
    }
}
