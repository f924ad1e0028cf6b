//! Objects that lie on another node, brought here for a client; and the same seen from the node that has them.
//!
//! Each object is a transaction of its own between the two nodes, as a conductor brings the blocks of a prompt.
//! What differs is who orders it: the node that wants them reserves slots and tells the other one where they
//! are, in one message of the transfer engine for a whole batch; that one pins each object, writes it there, and unpins
//! it. What has come whole, with its checksum, is committed; nobody says so. Only what will not come is
//! named. Whatever else fails runs into the end of the leases.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvasir_blocks::AbortReason;
use kvasir_proto::{BlockKey, Namespace, Share, Side, TxId, v1};
use kvasir_transfer::{Completion, Endpoint, Outcome, PeerId};
use v1::ObjectRefusal;

use super::Owner;
use super::objects::Refusal;
use super::pushes::Armed;
use crate::clock;
use crate::node::command::{FetchName, Refused};
use crate::node::inbox::End;
use crate::node::leg::Settling;
use crate::node::peer_message::ObjectsMessage;
use crate::node::sources::Sources;

/// Objects of one message.
const AT_ONCE: usize = 64;
/// How long they may take.
const LEASE_MS: u64 = 20_000;
/// Nodes that are remembered.
const SOURCES_MAX: usize = 256;

/// What is being brought here.
#[derive(Debug)]
pub(super) struct Fetches {
    lookups: Sources,
    /// Of the transactions.
    incarnation: u64,
    next_serial: u64,
    next_fetch: u64,
    /// Where the transfer engine of a node is, by its gRPC address.
    sources: BTreeMap<String, Endpoint>,
    going: BTreeMap<u64, Fetch>,
    /// Which of them a share is for.
    shares: BTreeMap<Share, u64>,
}

/// Objects that a client waits for.
#[derive(Debug)]
struct Fetch {
    name: FetchName,
    namespace: Namespace,
    source: String,
    /// What has not been asked for yet.
    keys: Vec<BlockKey>,
    /// What has been, and has neither come nor ended.
    open: BTreeMap<Share, BlockKey>,
    /// The source is not where it was thought to be, and was looked for anew; this was not to be had since.
    again: Option<Vec<BlockKey>>,
    looked_anew: bool,
    refusal: Option<Refusal>,
}

impl Fetches {
    pub(super) fn new(lookups: Sources) -> Self {
        Fetches {
            lookups,
            incarnation: rand::random(),
            next_serial: 0,
            next_fetch: 0,
            sources: BTreeMap::new(),
            going: BTreeMap::new(),
            shares: BTreeMap::new(),
        }
    }

    fn next_tx(&mut self) -> TxId {
        self.next_serial += 1;
        TxId { conductor_incarnation: self.incarnation, serial: self.next_serial }
    }
}

/// Why nothing can be brought; nothing where this object just is not there, or has no room.
fn refusal(refused: Refused) -> Option<Refusal> {
    let kind = match refused {
        Refused::Invalid(_) => ObjectRefusal::Invalid,
        Refused::Precondition(_) | Refused::Draining(_) => ObjectRefusal::NoExchange,
        Refused::Unavailable(_) => ObjectRefusal::Unreachable,
        Refused::NoSpace(_) | Refused::Ended(_) | Refused::NotFound(_) => return None,
    };
    Some(Refusal(kind, refused.to_string()))
}

/// Here.
impl Owner {
    /// Brings objects here that are not; `objects_fetched` tells of the end.
    pub(super) fn begin_fetch(
        &mut self,
        name: FetchName,
        namespace: Namespace,
        keys: Vec<BlockKey>,
        source: &str,
    ) {
        self.fetches.next_fetch += 1;
        let fetch = Fetch {
            name,
            namespace,
            source: source.to_owned(),
            keys,
            open: BTreeMap::new(),
            again: None,
            looked_anew: false,
            refusal: None,
        };
        let number = self.fetches.next_fetch;
        self.fetches.going.insert(number, fetch);
        self.advance_fetch(number);
    }

    /// These are removed, and with them what is on its way: it is not asked for any more either.
    pub(super) fn fetch_no_more(&mut self, namespace: Namespace, removed: &[BlockKey]) {
        let removed: BTreeSet<BlockKey> = removed.iter().copied().collect();
        let stays = |key: &BlockKey| !removed.contains(key);
        let going = self.fetches.going.values_mut().filter(|fetch| fetch.namespace == namespace);
        for fetch in going {
            fetch.keys.retain(stays);
            fetch.again.iter_mut().for_each(|again| again.retain(stays));
        }
    }

    /// Asks for what comes next, or ends the fetch. To be called while nothing of it is open.
    fn advance_fetch(&mut self, number: u64) {
        while let Some(fetch) = self.fetches.going.get_mut(&number) {
            if fetch.refusal.is_none()
                && let Some(keys) = fetch.again.take()
            {
                fetch.keys.extend(keys);
            }
            if fetch.keys.is_empty() || fetch.refusal.is_some() {
                let Some(Fetch { name, refusal, .. }) = self.fetches.going.remove(&number) else {
                    return;
                };
                return self.objects_fetched(name, refusal.map_or(Ok(()), Err));
            }
            let Some(source) = self.fetches.sources.get(&fetch.source) else {
                // Several may ask for one address: each answer serves all that wait.
                return self.fetches.lookups.look(fetch.source.clone());
            };
            let (source, namespace) = (source.clone(), fetch.namespace);
            let rest = fetch.keys.split_off(fetch.keys.len().min(AT_ONCE));
            let keys = std::mem::replace(&mut fetch.keys, rest);
            if self.ask_for(number, &source, namespace, keys) {
                return;
            }
        }
    }

    /// Reserves room and says where it is. Answers whether anything is on its way.
    fn ask_for(
        &mut self,
        number: u64,
        source: &Endpoint,
        namespace: Namespace,
        keys: Vec<BlockKey>,
    ) -> bool {
        let lease_ms = LEASE_MS.min(self.config.lease_max_ms);
        let (mut common, mut objects) = (None, Vec::with_capacity(keys.len()));
        for key in keys {
            let tx = self.fetches.next_tx();
            let targets = match self.allocate(self.fetch_of(tx, namespace, key, source, lease_ms)) {
                Ok(v1::TxAllocateReply { targets, .. }) => targets,
                Err(refused) => {
                    let fetch = self.fetches.going.get_mut(&number);
                    if let Some((fetch, refusal)) = fetch.zip(refusal(refused)) {
                        fetch.refusal.get_or_insert(refusal);
                    }
                    continue;
                }
            };
            // It has come meanwhile.
            let Some(targets) = targets else { continue };
            let share = Share { tx, side: Side::Prefill };
            // Committed when it is whole.
            let incoming = self.legs.get_mut(&share).and_then(|leg| leg.incoming.as_mut());
            if let Some(incoming) = incoming {
                incoming.settling = Some(Settling { good_pages: 1, replies: Vec::new() });
            }
            self.fetches.shares.insert(share, number);
            if let Some(fetch) = self.fetches.going.get_mut(&number) {
                fetch.open.insert(share, key);
            }
            objects.push(v1::SendObject {
                tx: Some(tx.into()),
                key: key.0.to_vec(),
                slot: targets.slots.first().copied().unwrap_or_default(),
                imm: targets.imm,
                tail_offset_bytes: targets.tail_offset_bytes,
            });
            common.get_or_insert(targets);
        }
        let Some(targets) = common else { return false };
        let targets =
            v1::WriteTargets { slots: Vec::new(), imm: 0, tail_offset_bytes: 0, ..targets };
        let message = v1::SendObjects {
            namespace: namespace.0.to_vec(),
            lease_ms,
            targets: Some(targets),
            objects,
        };
        if let Err(why) = self.order(number, source, message, lease_ms) {
            tracing::debug!(reason = %why, "the store node cannot request objects from another node");
            self.source_lost(number);
        }
        true
    }

    /// To the node it is the first block of a prompt that goes on for one token more.
    fn fetch_of(
        &self,
        tx: TxId,
        namespace: Namespace,
        key: BlockKey,
        source: &Endpoint,
        lease_ms: u64,
    ) -> v1::TxAllocateRequest {
        let block_tokens = self.cache.as_ref().map_or(1, |cache| cache.layout.block_tokens());
        let prompt_tokens = block_tokens.saturating_add(1);
        let mut keys = key.0.to_vec();
        keys.resize(16 * (prompt_tokens / block_tokens) as usize, 0);
        v1::TxAllocateRequest {
            tx: Some(tx.into()),
            side: Side::Prefill.to_wire(),
            namespace: namespace.0.to_vec(),
            keys,
            prompt_tokens,
            lease_ms,
            fetch_until_block: 1,
            writer_endpoint: source.to_bytes(),
            replica: true,
            ..v1::TxAllocateRequest::default()
        }
    }

    fn order(
        &self,
        number: u64,
        source: &Endpoint,
        message: v1::SendObjects,
        lease_ms: u64,
    ) -> Result<(), String> {
        let peer = self.transfer.connect(source).map_err(|error| error.to_string())?;
        let bytes = ObjectsMessage::Send(message).into_bytes();
        let post = self.post.clone();
        let done =
            Completion::callback(move |outcome| post.end(End::Ordered { fetch: number, outcome }));
        let deadline = Duration::from_millis(lease_ms);
        self.transfer.send(peer, bytes, deadline, done).map_err(|error| error.to_string())
    }

    pub(super) fn ordered(&mut self, number: u64, outcome: Outcome) {
        if let Err(error) = outcome {
            tracing::debug!(%error, "the store node cannot reach the node that holds the objects");
            self.source_lost(number);
        }
    }

    /// The source is not where it was thought to be: what it was asked for is given up.
    fn source_lost(&mut self, number: u64) {
        let Some(fetch) = self.fetches.going.get_mut(&number) else { return };
        self.fetches.sources.remove(&fetch.source);
        let shares: Vec<Share> = fetch.open.keys().copied().collect();
        if fetch.looked_anew {
            let why = format!("cannot reach {} for its objects", fetch.source);
            fetch.refusal.get_or_insert(Refusal(ObjectRefusal::Unreachable, why));
        } else {
            fetch.looked_anew = true;
            // What ends already is not wanted any more.
            let is_wanted =
                |share: &Share| self.blocks.share(*share).is_some_and(|of| !of.aborting);
            let wanted = fetch.open.iter().filter(|(share, _)| is_wanted(share));
            fetch.again = Some(wanted.map(|(_, key)| *key).collect());
        }
        let now_ms = clock::now_ms();
        for share in shares {
            self.blocks.abort(now_ms, share, AbortReason::PeerLost);
        }
    }

    pub(super) fn source_seen(&mut self, address: &str, seen: Result<Endpoint, Refused>) {
        match &seen {
            Ok(endpoint) => {
                if self.fetches.sources.len() >= SOURCES_MAX {
                    self.fetches.sources.clear();
                }
                self.fetches.sources.insert(address.to_owned(), endpoint.clone());
            }
            Err(_) => drop(self.fetches.sources.remove(address)),
        }
        let waits = |fetch: &Fetch| fetch.source == address && fetch.open.is_empty();
        let waiting: Vec<u64> = self
            .fetches
            .going
            .iter()
            .filter(|(_, fetch)| waits(fetch))
            .map(|(number, _)| *number)
            .collect();
        for number in waiting {
            if let Err(refused) = &seen
                && let Some(fetch) = self.fetches.going.get_mut(&number)
            {
                fetch.refusal = refusal(refused.clone());
            }
            self.advance_fetch(number);
        }
    }

    /// The source has said what will not come.
    fn not_sent(&mut self, peer: PeerId, message: &v1::ObjectsNotSent) {
        let now_ms = clock::now_ms();
        for tx in &message.txs {
            let share = Share { tx: TxId::from(*tx), side: Side::Prefill };
            let leg = self.legs.get(&share);
            let incoming = leg.and_then(|leg| leg.incoming.as_ref());
            // A peer speaks of what it was to write.
            if incoming.and_then(|incoming| incoming.writer) != Some(peer.incarnation()) {
                continue;
            }
            let Some(number) = self.fetches.shares.get(&share) else { continue };
            if message.refusal() != ObjectRefusal::Unspecified
                && let Some(fetch) = self.fetches.going.get_mut(number)
            {
                let refusal = Refusal(message.refusal(), message.reason.clone());
                fetch.refusal.get_or_insert(refusal);
            }
            self.blocks.abort(now_ms, share, AbortReason::PeerLost);
        }
    }

    /// A share has ended, with its object or without.
    pub(super) fn fetch_share_ended(&mut self, share: Share) {
        let Some(number) = self.fetches.shares.remove(&share) else { return };
        let Some(fetch) = self.fetches.going.get_mut(&number) else { return };
        if let Some(key) = fetch.open.remove(&share) {
            self.blocks.object_has_come(fetch.namespace, key);
        }
        if fetch.open.is_empty() {
            self.advance_fetch(number);
        }
    }
}

/// At the source.
impl Owner {
    /// Sends what another node asks for, as far as it is here.
    fn send_objects(&mut self, peer: PeerId, message: v1::SendObjects) {
        let v1::SendObjects { namespace, lease_ms, targets, objects } = message;
        let targets = targets.unwrap_or_default();
        let is_own = Endpoint::from_bytes(&targets.endpoint)
            .is_ok_and(|endpoint| endpoint.incarnation == peer.incarnation());
        if !is_own || objects.len() > AT_ONCE {
            tracing::warn!(
                %peer, objects = objects.len(),
                "the store node refused an invalid request of a peer for objects"
            );
            self.metrics.messages_refused.inc();
            return;
        }
        let mut lacking = v1::ObjectsNotSent::default();
        for object in objects {
            let tx = object.tx;
            if let Err(refused) =
                self.send_object(peer, namespace.clone(), lease_ms, &targets, object)
            {
                lacking.txs.extend(tx);
                if let Some(Refusal(kind, why)) = refusal(refused) {
                    lacking.set_refusal(kind);
                    lacking.reason = why;
                }
            }
        }
        if !lacking.txs.is_empty() {
            self.tell_not_sent(peer, lacking);
        }
    }

    fn send_object(
        &mut self,
        peer: PeerId,
        namespace: Vec<u8>,
        lease_ms: u64,
        targets: &v1::WriteTargets,
        object: v1::SendObject,
    ) -> Result<(), Refused> {
        let v1::SendObject { tx, key, slot, imm, tail_offset_bytes } = object;
        let side = Side::Source.to_wire();
        let share = Share::from_wire(tx, side)?;
        if self.legs.contains_key(&share) {
            return Err(Refused::Invalid("the transaction is already open".into()));
        }
        let allocated = self.allocate(v1::TxAllocateRequest {
            tx,
            side,
            namespace,
            keys: key,
            lease_ms,
            ..v1::TxAllocateRequest::default()
        })?;
        let targets =
            v1::WriteTargets { slots: vec![slot], imm, tail_offset_bytes, ..targets.clone() };
        let request = v1::TxPushRequest { tx, side, targets: Some(targets) };
        let armed = match allocated.cached_blocks {
            0 => Err(Refused::NotFound("this node does not hold the object".into())),
            _ => self.arm(&request),
        };
        match armed {
            Ok(Armed::Now(share)) => {
                if let Some(leg) = self.legs.get_mut(&share) {
                    leg.ordered_by = Some(peer);
                }
                self.pump(share);
                Ok(())
            }
            Ok(Armed::Nothing) => Ok(()),
            Err(refused) => {
                self.blocks.abort(clock::now_ms(), share, AbortReason::PeerLost);
                Err(refused)
            }
        }
    }

    /// A push that another node had ordered has ended before all had landed.
    pub(super) fn order_failed(&self, peer: PeerId, tx: TxId) {
        let lacking = v1::ObjectsNotSent { txs: vec![tx.into()], ..v1::ObjectsNotSent::default() };
        self.tell_not_sent(peer, lacking);
    }

    /// Whoever does not hear of it waits until its lease is over.
    fn tell_not_sent(&self, peer: PeerId, message: v1::ObjectsNotSent) {
        let bytes = ObjectsMessage::NotSent(message).into_bytes();
        let deadline = Duration::from_millis(self.config.peer_stop_timeout_ms);
        if let Err(error) = self.transfer.send(peer, bytes, deadline, Completion::Ignore) {
            tracing::warn!(%peer, %error, "the store node cannot tell a peer which objects it does not send");
        }
    }
}

/// Either.
impl Owner {
    pub(super) fn take_objects_message(&mut self, peer: PeerId, message: ObjectsMessage) {
        match message {
            ObjectsMessage::Send(message) => self.send_objects(peer, message),
            ObjectsMessage::NotSent(message) => self.not_sent(peer, &message),
        }
    }
}
