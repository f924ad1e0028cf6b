//! What clients of objects ask for, as `store-node/src/node/owner/objects.rs` and `clients.rs` carry it out.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvasir_blocks::{AttachEpoch, Commit, KeepRequest, ObjectAt, ReserveObjects, Tier};
use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Generation, Namespace, Share, Side, SlotIndex, Tenant, TxId};

use super::{LEASE_MS_MAX, Running};
use crate::calls::{FromClient, Kept, ToClient};
use crate::client::Client;
use crate::context::{Context, Event};
use crate::seen::{Owner, Reader, Seen};

/// Where an engine is attached, so much of the slots stays for it: one in so many.
const ENGINE_PART: u32 = 8;
/// What a client has to let go of a put that it is told to stop.
const STOP_TIMEOUT_MS: u64 = 300;
/// So many names that are not found are given other bytes.
const OTHER_BYTES_PERCENT: u64 = 30;
/// Where the serials of clients begin.
const SERIALS: u64 = 2 << 32;

#[derive(Debug, Default)]
pub(super) struct Clients {
    list: BTreeMap<AttachEpoch, Attached>,
    /// What is put and what is read from the SSD: for whom, and for which of its requests.
    shares: BTreeMap<Share, (AttachEpoch, u64)>,
    /// What is being kept: for whom, which request, and what.
    keeps: BTreeMap<u64, (AttachEpoch, u64, BlockKey, u64)>,
    /// What was removed, and waits until no restart brings it back: for whom.
    removals: BTreeMap<u64, (AttachEpoch, Vec<BlockKey>)>,
    next: u64,
    /// Of every slot, in memory that clients read.
    generations: Vec<Generation>,
    /// Blocks that were found rotten, when it was last looked whether clients hold some of them.
    dropped: u64,
}

#[derive(Debug)]
struct Attached {
    client: Client,
    namespace: Namespace,
    tenant: Tenant,
    puts: BTreeMap<u64, Put>,
    gets: BTreeMap<u64, Get>,
    /// How many of a commit's objects are being kept.
    commits: BTreeMap<u64, usize>,
    /// What goes with it, and the names of the pins.
    ephemeral: BTreeMap<BlockKey, (ObjectAt, u64)>,
    stopping: BTreeMap<Share, u64>,
    expelled: bool,
}

#[derive(Debug)]
struct Put {
    share: Option<Share>,
    keys: Vec<BlockKey>,
    /// The page of the share for each, where it was not there already.
    pages: Vec<Option<u32>>,
}

#[derive(Debug)]
struct Get {
    keys: Vec<BlockKey>,
    is_held: bool,
    rising: BTreeSet<Share>,
    risen: Vec<Share>,
}

impl Clients {
    pub(super) fn count(&self) -> usize {
        let held: usize = self.list.values().map(|of| of.ephemeral.len()).sum();
        self.list.len() + self.shares.len() + self.keeps.len() + self.removals.len() + held
    }
}

impl Running {
    pub fn client(&mut self, epoch: AttachEpoch) -> Option<&mut Client> {
        self.clients.list.get_mut(&epoch).map(|of| &mut of.client)
    }

    /// What clients read of the generations of slots.
    pub fn share_generations(&mut self) {
        self.blocks.note_freed();
        let slots = (0..self.blocks.counts().slots).map(SlotIndex);
        self.clients.generations = slots.filter_map(|slot| self.blocks.generation(slot)).collect();
    }

    /// Slots have come free, and whoever was told of them with their generation sees that.
    pub(super) fn publish_freed(&mut self) {
        while let Some((slot, generation)) = self.blocks.poll_freed() {
            self.clients.generations[slot.0 as usize] = generation;
        }
    }

    /// As a client reads it.
    pub fn generation_word(&self, slot: SlotIndex) -> Generation {
        self.clients.generations[slot.0 as usize]
    }

    pub fn is_expelled(&self, epoch: AttachEpoch) -> bool {
        self.clients.list.get(&epoch).is_some_and(|of| of.expelled)
    }

    pub fn open_client(&mut self, context: &mut Context, index: usize) {
        self.next_epoch += 1;
        let epoch = AttachEpoch(self.next_epoch);
        let plan = &context.plan.clients[index];
        let attached = Attached {
            client: Client::new(epoch, index, context.now_us),
            namespace: plan.namespace(),
            tenant: Tenant(plan.tenant),
            puts: BTreeMap::new(),
            gets: BTreeMap::new(),
            commits: BTreeMap::new(),
            ephemeral: BTreeMap::new(),
            stopping: BTreeMap::new(),
            expelled: false,
        };
        self.clients.list.insert(epoch, attached);
        context.after(1, Event::ClientStep { at: self.at, epoch });
    }

    /// All processes of clients on this host end.
    pub fn kill_clients(&mut self, context: &mut Context) {
        for of in self.clients.list.values_mut() {
            of.client.end(context, self.at);
        }
    }

    pub fn take_client(
        &mut self,
        context: &mut Context,
        unix_ms: u64,
        (epoch, request): (AttachEpoch, u64),
        message: FromClient,
    ) {
        let Some(of) = self.clients.list.get(&epoch) else { return };
        if of.expelled && !matches!(message, FromClient::Gone) {
            return;
        }
        let namespace = of.namespace;
        match message {
            FromClient::Reserve { keys, lease_ms } => {
                let answer = self.reserve_objects(context, (epoch, request), keys, lease_ms);
                self.tell_client(context, epoch, answer);
            }
            FromClient::Commit { reserve, objects, checksums, kept } => {
                let put = (reserve, objects, checksums);
                self.commit_objects(context, (epoch, request), put, (kept, unix_ms));
            }
            FromClient::Get { keys } => self.bring_objects(context, (epoch, request), keys),
            FromClient::Unpin { get } => {
                let reader = Reader::Client(epoch, get);
                context.see(Seen::ReadEnded { at: self.at, reader });
                self.blocks.unpin(epoch, get);
            }
            FromClient::Find { keys } => {
                let found = |key: &BlockKey| self.blocks.find_object(namespace, *key).is_some();
                let keys = keys.into_iter().filter(found).collect();
                context.see(Seen::Found { at: self.at, namespace, keys });
                self.tell_client(context, epoch, ToClient::Found);
            }
            FromClient::Remove { keys } => {
                if let Some(answer) = self.remove_objects(context, epoch, namespace, keys) {
                    self.tell_client(context, epoch, answer);
                }
            }
            FromClient::Gone => self.client_gone(context, epoch),
        }
        self.run_actions(context);
    }

    fn tell_client(&mut self, context: &mut Context, epoch: AttachEpoch, message: ToClient) {
        if let Some(of) = self.clients.list.get_mut(&epoch) {
            of.client.tell(context, self.at, message);
        }
    }

    /// Engines go first: where one is attached, clients leave it a part of the slots.
    fn leaves_room(&self, wanted: usize) -> bool {
        let left = match self.engines.is_empty() {
            true => 0,
            false => self.blocks.counts().slots / ENGINE_PART,
        };
        self.blocks.available() as usize >= wanted + left as usize
    }

    fn next_share(&mut self, side: Side) -> Share {
        self.clients.next += 1;
        let serial = SERIALS + self.clients.next;
        Share { tx: TxId { conductor_incarnation: self.incarnation, serial }, side }
    }

    // ---- put ----

    fn reserve_objects(
        &mut self,
        context: &mut Context,
        (epoch, request): (AttachEpoch, u64),
        keys: Vec<BlockKey>,
        lease_ms: u64,
    ) -> ToClient {
        let namespace = self.clients.list[&epoch].namespace;
        let (mut pages, mut wanted) = (Vec::new(), Vec::new());
        for key in &keys {
            let lacks = self.blocks.find_object(namespace, *key).is_none();
            let page = lacks.then_some(wanted.len() as u32);
            pages.push(page);
            wanted.extend(page.map(|_| *key));
        }
        let (mut share, mut taken) = (None, Vec::new());
        if !wanted.is_empty() {
            let (at, new) = (self.at, self.next_share(Side::Prefill));
            let reserve = ReserveObjects { share: new, epoch, namespace, keys: wanted, lease_ms };
            let reserved = match self.leaves_room(reserve.keys.len()) {
                true => self.blocks.reserve_objects(context.now_ms(), &reserve).ok(),
                false => None,
            };
            self.publish_freed();
            let Some(slots) = reserved else {
                context.covers("a put is refused");
                return ToClient::Refused;
            };
            (share, taken) = (Some(new), slots);
            self.clients.shares.insert(new, (epoch, request));
            context.see(Seen::Allocated { at, share: new, lease_ms, waits_for_others: true });
            let keys = reserve.keys.clone();
            let mut chance = context.chance("other bytes", at.node as u64, epoch.0.into());
            for key in &keys {
                // Who does not find it may put others there without removing it.
                let version = context.versions.entry((at.node, *key)).or_insert(0);
                *version += u32::from(chance.percent(OTHER_BYTES_PERCENT));
            }
            let versions: Vec<u32> =
                keys.iter().map(|key| context.version(at.node, *key)).collect();
            if versions.iter().any(|version| *version > 0) {
                context.covers("a name stands for other bytes");
            }
            context.see(Seen::PutBegan { at, share: new, epoch, keys, versions });
            for slot in &taken {
                self.give_out(context, *slot, Owner::Share(new));
            }
            let slots = taken.iter().map(|slot| slot.0).collect();
            context.see(Seen::EngineMayWrite { at, share: new, slots });
        }
        let slots = pages.iter().map(|page| page.map(|page| taken[page as usize])).collect();
        let versions = keys.iter().map(|key| context.version(self.at.node, *key)).collect();
        if let Some(of) = self.clients.list.get_mut(&epoch) {
            of.puts.insert(request, Put { share, keys, pages });
        }
        ToClient::Reserved { slots, versions }
    }

    fn commit_objects(
        &mut self,
        context: &mut Context,
        (epoch, request): (AttachEpoch, u64),
        (reserve, objects, checksums): (u64, Vec<u32>, Vec<Vec<u64>>),
        (kept, unix_ms): (Kept, u64),
    ) {
        let Some(of) = self.clients.list.get_mut(&epoch) else { return };
        let Some(put) = of.puts.remove(&reserve) else { return };
        let (at, namespace, tenant) = (self.at, of.namespace, of.tenant);
        let (mut stored, mut there) = (Vec::new(), Vec::new());
        for (object, sums) in objects.into_iter().zip(checksums) {
            let (key, page) = (put.keys[object as usize], put.pages[object as usize]);
            let (Some(share), Some(page)) = (put.share, page) else {
                there.extend(self.blocks.find_object(namespace, key).map(|_| key));
                continue;
            };
            if let Some((slot, _)) = self.blocks.page_slot(share, page) {
                context.see(Seen::PageSealed { at, share, slot: slot.0 });
            }
            match self.blocks.commit_page(share, page, kvasir_transfer::fold(&sums)) {
                Ok(Commit::Indexed) => {
                    stored.push(key);
                    there.push(key);
                }
                Ok(Commit::Duplicate { .. }) => {
                    context.covers("an object is put twice");
                    there.push(key);
                }
                Ok(Commit::OnSsd) => {
                    context.covers("an object is found on the SSD while it is put");
                    there.push(key);
                }
                Ok(_) | Err(_) => context.covers("a put has lost its lease"),
            }
        }
        context.see(Seen::ObjectsStored { at, namespace, keys: stored.clone() });
        if kept == Kept::Ephemeral {
            stored.iter().for_each(|key| self.hold_ephemeral(context, epoch, *key));
        }
        let mut keeping = 0;
        if let Kept::For { ttl_ms } = kept {
            let expires_unix_ms = unix_ms + ttl_ms;
            for key in there {
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
                if let Ok(keep) = self.blocks.keep(context.now_ms(), &wanted) {
                    let (node, keys) = (at.node, vec![key]);
                    let version = self.version_in_memory(context, namespace, key);
                    context.see(Seen::KeepAsked { node, keys, expires_unix_ms, version });
                    self.clients.keeps.insert(keep, (epoch, request, key, expires_unix_ms));
                    keeping += 1;
                }
            }
        }
        // What was committed is pinned until here.
        if let Some(share) = put.share {
            self.clients.shares.remove(&share);
            if let Some(of) = self.clients.list.get_mut(&epoch) {
                of.stopping.remove(&share);
            }
            context.see(Seen::EngineStopped { at, share });
            // It may have been aborted: then this is what its slots wait for.
            let _ = self.blocks.release(context.now_ms(), share);
        }
        match self.clients.list.get_mut(&epoch) {
            Some(of) if keeping > 0 => drop(of.commits.insert(request, keeping)),
            _ => self.tell_client(context, epoch, ToClient::Committed),
        }
    }

    fn version_in_memory(
        &self,
        context: &Context,
        namespace: Namespace,
        key: BlockKey,
    ) -> Option<u32> {
        let bytes = self.read_slot(self.blocks.object_at(namespace, key)?.slot);
        context.truth.version_of(key, &bytes, context.version(self.at.node, key))
    }

    fn hold_ephemeral(&mut self, context: &mut Context, epoch: AttachEpoch, key: BlockKey) {
        self.clients.next += 1;
        // Never the number of a request.
        let number = SERIALS + self.clients.next;
        let Some(of) = self.clients.list.get_mut(&epoch) else { return };
        let Some(object) = self.blocks.object_at(of.namespace, key) else { return };
        if let Ok(slots) = self.blocks.get_objects(epoch, number, of.namespace, &[key]) {
            let former = of.ephemeral.insert(key, (object, number));
            former.into_iter().for_each(|(_, pin)| self.let_go(context, epoch, pin));
            if mutated(Mutation::EphemeralObjectNotPinned) {
                self.blocks.unpin(epoch, number);
            } else {
                let slots = slots.iter().flatten().map(|slot| slot.0).collect();
                let reader = Reader::Client(epoch, number);
                context.see(Seen::ReadBegan { at: self.at, reader, slots });
            }
            context.see(Seen::Ephemeral { at: self.at, epoch, key });
        }
    }

    /// Keeping has ended. False when it was nothing of a client's.
    pub(super) fn object_kept(
        &mut self,
        context: &mut Context,
        keep: u64,
        blocks: Option<u32>,
    ) -> bool {
        if let Some((epoch, keys)) = self.clients.removals.remove(&keep) {
            if blocks.is_some() {
                context.covers("an object is gone for good");
                self.erased(context, epoch, keys);
            }
            let answer = if blocks.is_some() { ToClient::Removed } else { ToClient::Refused };
            self.tell_client(context, epoch, answer);
            return true;
        }
        let Some(of) = self.clients.keeps.remove(&keep) else { return false };
        let (epoch, request, key, expires_unix_ms) = of;
        context.see(Seen::KeepEnded { node: self.at.node, keys: vec![key], blocks });
        if blocks.is_some() && self.clients.list.contains_key(&epoch) {
            context.covers("an object is kept");
            let (node, keys) = (self.at.node, vec![key]);
            context.see(Seen::Kept { node, keys, expires_unix_ms });
        }
        let Some(of) = self.clients.list.get_mut(&epoch) else { return true };
        let Some(keeping) = of.commits.get_mut(&request) else { return true };
        *keeping -= 1;
        if *keeping == 0 {
            of.commits.remove(&request);
            self.tell_client(context, epoch, ToClient::Committed);
        }
        true
    }

    // ---- get ----

    fn bring_objects(
        &mut self,
        context: &mut Context,
        (epoch, request): (AttachEpoch, u64),
        keys: Vec<BlockKey>,
    ) {
        let namespace = self.clients.list[&epoch].namespace;
        let below = |key: &&BlockKey| {
            self.blocks.find_object(namespace, **key) == Some(Tier::Ssd) && self.ssd.is_some()
        };
        let below: Vec<BlockKey> = keys.iter().filter(below).copied().collect();
        let (mut is_held, mut rising) = (false, BTreeSet::new());
        if !below.is_empty() && self.leaves_room(keys.len()) {
            // What is here stays while room is made for the others. A refusal comes again below.
            is_held = self.blocks.get_objects(epoch, request, namespace, &keys).is_ok();
            for key in below {
                let share = self.next_share(Side::Source);
                let (lease_ms, keys) = (LEASE_MS_MAX, vec![key]);
                let wanted = ReserveObjects { share, epoch, namespace, keys, lease_ms };
                if self.blocks.raise_object(context.now_ms(), &wanted) {
                    let (at, waits_for_others) = (self.at, false);
                    context.see(Seen::Allocated { at, share, lease_ms, waits_for_others });
                    context.covers("an object is read from the SSD");
                    self.clients.shares.insert(share, (epoch, request));
                    rising.insert(share);
                }
            }
        }
        let get = Get { keys, is_held, rising, risen: Vec::new() };
        match self.clients.list.get_mut(&epoch) {
            Some(of) if !get.rising.is_empty() => drop(of.gets.insert(request, get)),
            _ => self.answer_get(context, (epoch, request), get),
        }
    }

    fn answer_get(
        &mut self,
        context: &mut Context,
        (epoch, request): (AttachEpoch, u64),
        get: Get,
    ) {
        let (at, namespace) = (self.at, self.clients.list[&epoch].namespace);
        if get.is_held {
            self.blocks.unget_objects(epoch, request);
        }
        let got = match self.leaves_room(get.keys.len()) {
            true => self.blocks.get_objects(epoch, request, namespace, &get.keys).ok(),
            false => None,
        };
        for share in get.risen {
            self.clients.shares.remove(&share);
            let _ = self.blocks.release(context.now_ms(), share);
        }
        let Some(slots) = got else {
            return self.tell_client(context, epoch, ToClient::Refused);
        };
        let hits = get.keys.iter().zip(&slots).filter(|(_, slot)| slot.is_some());
        let keys: Vec<BlockKey> = hits.map(|(key, _)| *key).collect();
        if !keys.is_empty() {
            context.covers("an object is got");
            let slots = slots.iter().flatten().map(|slot: &SlotIndex| slot.0).collect();
            let reader = Reader::Client(epoch, request);
            context.see(Seen::ReadBegan { at, reader, slots });
        }
        context.see(Seen::Found { at, namespace, keys });
        let of = |slot: SlotIndex| Some((slot, self.blocks.generation(slot)?));
        let slots = slots.into_iter().map(|slot| slot.and_then(of)).collect();
        self.tell_client(context, epoch, ToClient::Got { slots });
    }

    /// A read of the SSD has ended, well or not. False when the share is nothing of a client's.
    pub(super) fn object_risen(&mut self, context: &mut Context, share: Share) -> bool {
        let Some(&(epoch, request)) = self.clients.shares.get(&share) else { return false };
        let Some(of) = self.clients.list.get_mut(&epoch) else { return true };
        let Some(get) = of.gets.get_mut(&request) else { return true };
        if get.rising.remove(&share) {
            get.risen.push(share);
        }
        if get.rising.is_empty()
            && let Some(get) = of.gets.remove(&request)
        {
            self.answer_get(context, (epoch, request), get);
        }
        true
    }

    /// Without an answer, that waits until what was removed is gone for good.
    fn remove_objects(
        &mut self,
        context: &mut Context,
        epoch: AttachEpoch,
        namespace: Namespace,
        keys: Vec<BlockKey>,
    ) -> Option<ToClient> {
        let (now_ms, node) = (context.now_ms(), self.at.node);
        if self.ssd.is_some() && !self.blocks.ssd_is_usable(now_ms) {
            return Some(ToClient::Refused);
        }
        let Ok((_, keep)) = self.blocks.remove_objects(now_ms, namespace, &keys) else {
            return Some(ToClient::Refused);
        };
        for &key in &keys {
            context.see(Seen::ObjectRemoved { node, namespace, key });
        }
        // Whoever had put it may be another client.
        let is_it = |object: &ObjectAt| object.namespace == namespace && keys.contains(&object.key);
        if self.let_go_of_gone(context, is_it).iter().any(|of| *of != epoch) {
            context.covers("an ephemeral object is removed by another client");
        }
        let Some(keep) = keep else {
            self.erased(context, epoch, keys);
            return Some(ToClient::Removed);
        };
        self.clients.removals.insert(keep, (epoch, keys));
        None
    }

    /// Whoever puts them next writes other bytes.
    fn erased(&self, context: &mut Context, epoch: AttachEpoch, keys: Vec<BlockKey>) {
        let node = self.at.node;
        if let Some(of) = self.clients.list.get(&epoch) {
            let truth = Rc::clone(&context.truth);
            let own = keys.iter().filter(|key| truth.blocks[key].namespace == of.namespace);
            own.for_each(|key| *context.versions.entry((node, *key)).or_insert(0) += 1);
        }
        context.see(Seen::ObjectsErased { node, keys });
    }

    /// Of these objects, those that go with their clients and have gone before them: their slots come free.
    /// Answers with the clients.
    fn let_go_of_gone(
        &mut self,
        context: &mut Context,
        of_them: impl Fn(&ObjectAt) -> bool,
    ) -> Vec<AttachEpoch> {
        let mut gone = Vec::new();
        for (epoch, of) in &mut self.clients.list {
            let is_gone = |_: &BlockKey, held: &mut (ObjectAt, u64)| {
                of_them(&held.0) && !self.blocks.is_there(&held.0)
            };
            gone.extend(of.ephemeral.extract_if(.., is_gone).map(|(_, held)| (*epoch, held.1)));
        }
        gone.iter().for_each(|(epoch, pin)| self.let_go(context, *epoch, *pin));
        gone.into_iter().map(|(epoch, _)| epoch).collect()
    }

    fn let_go(&mut self, context: &mut Context, epoch: AttachEpoch, pin: u64) {
        context.see(Seen::ReadEnded { at: self.at, reader: Reader::Client(epoch, pin) });
        self.blocks.unpin(epoch, pin);
    }

    // ---- its end ----

    /// A client is to write no more of a share. False when it is nothing of a client's.
    pub(super) fn stop_client(&mut self, context: &Context, share: Share) -> bool {
        let Some((epoch, _)) = self.clients.shares.get(&share) else { return false };
        if let Some(of) = self.clients.list.get_mut(epoch) {
            // It learns of it when it commits, which is also how it lets go.
            of.stopping.insert(share, context.now_ms());
        }
        true
    }

    /// Whoever does not let go in time is not listened to any more, and ends when it sees that.
    pub(super) fn look_after_clients(&mut self, context: &mut Context) {
        let (now_ms, at) = (context.now_ms(), self.at);
        for (epoch, of) in &mut self.clients.list {
            let late = of.stopping.values().any(|since_ms| now_ms > since_ms + STOP_TIMEOUT_MS);
            if late && !std::mem::replace(&mut of.expelled, true) {
                context.covers("a client is expelled");
                context.after(1, Event::ClientStep { at, epoch: *epoch });
            }
        }
        let dropped = self.blocks.counts().dropped_total;
        if std::mem::replace(&mut self.clients.dropped, dropped) != dropped {
            self.let_go_of_gone(context, |_| true);
        }
    }

    fn client_gone(&mut self, context: &mut Context, epoch: AttachEpoch) {
        let Some(of) = self.clients.list.remove(&epoch) else { return };
        let (at, now_ms) = (self.at, context.now_ms());
        for put in of.puts.values().filter_map(|put| put.share) {
            self.clients.shares.remove(&put);
            context.see(Seen::EngineStopped { at, share: put });
        }
        for share in of.gets.into_values().flat_map(|get| get.rising.into_iter().chain(get.risen)) {
            self.clients.shares.remove(&share);
            let _ = self.blocks.release(now_ms, share);
        }
        self.clients.keeps.retain(|_, keep| keep.0 != epoch);
        self.clients.removals.retain(|_, removal| removal.0 != epoch);
        context.see(Seen::ClientGone { at, epoch });
        for (object, _) in of.ephemeral.values() {
            let (namespace, key) = (object.namespace, object.key);
            let was_there = self.blocks.find_object(namespace, key).is_some();
            self.blocks.end_object(now_ms, object);
            if was_there && self.blocks.find_object(namespace, key).is_none() {
                context.covers("an ephemeral object goes with its client");
                context.see(Seen::ObjectWent { at, epoch, key });
            }
        }
        self.blocks.engine_gone(now_ms, epoch);
    }
}
