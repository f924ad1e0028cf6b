//! The handle: opening, and the calls.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kvasir_attach::line::{self, Line, LineDescriptors};
use kvasir_proto::{BlockKey, Namespace, SlotLayout, objects, v1};
use kvasir_transfer::fold;
use kvasir_transfer::memory::{Access, MemoryError, SharedMemory};
use v1::client_to_node::Message as ToNode;
use v1::node_to_client::Message as FromNode;

use crate::calls::Calls;
use crate::error::Error;
use crate::object::{Object, Pins};
use crate::write::Shape;

/// Stands for "no slot" on the wire.
const NO_SLOT: u32 = u32::MAX;

/// How a client opens its node.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The node's `attach_dir`, with `attach.sock` in it.
    pub attach_dir: PathBuf,
    /// For the node's log.
    pub client: String,
    /// Whose objects they are. It also owns the quota of what is kept as [`Class::Context`].
    pub tenant: String,
    /// Objects of one tenant under different names do not see each other.
    pub namespace: String,
    /// The longest object that will be put, in bytes. Where nobody has said yet how large the node's
    /// slots are, they are made to hold it; 0 takes them as they are.
    pub object_bytes_max: u64,
    /// How long a call looks for its answer before it sleeps. The node does the same after each
    /// request, so that calls in close succession cost no system call on either side. Zero sleeps at once. Calls that name
    /// another node sleep at once on hosts of at most four cores, whatever this says.
    pub polling: Duration,
}

impl OpenOptions {
    /// The node of this directory; no tenant, no namespace, slots as they are, polling for 50 µs.
    pub fn new(attach_dir: impl AsRef<Path>) -> Self {
        OpenOptions {
            attach_dir: attach_dir.as_ref().into(),
            client: format!("process {}", std::process::id()),
            tenant: String::new(),
            namespace: String::new(),
            object_bytes_max: 0,
            polling: Duration::from_micros(50),
        }
    }
}

/// How long objects are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Class {
    /// As long as there is room; on the SSD too, where the node has one.
    #[default]
    Normal,
    /// In memory, until it is removed or the client that put it closes or dies. Never on the SSD,
    /// unless somebody has it kept for a tenant meanwhile: then it stays for that. Each counts as one
    /// that the client holds; one too many is [`Outcome::NotPersisted`].
    Ephemeral,
    /// On the SSD, for the tenant, until so much time has passed. The put is answered when it is
    /// durable.
    Context { ttl: Duration },
}

/// How objects are put.
#[derive(Debug, Clone)]
pub struct PutOptions {
    pub class: Class,
    /// How long the slots are this client's while it writes them.
    pub lease: Duration,
}

impl Default for PutOptions {
    /// Normal; the lease is ten seconds.
    fn default() -> Self {
        PutOptions { class: Class::Normal, lease: Duration::from_secs(10) }
    }
}

/// What became of an object that was put.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Stored,
    /// It was there before, and stays as it is.
    Exists,
    /// It is not there: the lease was over, or it had been there and made room meanwhile. Put it again.
    Lost,
    /// It is there as a normal object, but is not kept, and why.
    NotPersisted(String),
    /// Its key is that of a block of another namespace.
    Refused,
}

/// Where an object can be had fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tier {
    Dram,
    Ssd,
}

/// What all handles and objects of one opening share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) calls: Calls,
    pub(crate) slots: SharedMemory,
    pub(crate) generations: SharedMemory,
    pub(crate) shape: Shape,
    namespace: Namespace,
    objects_max: usize,
    keys_max: usize,
    lease_max: Duration,
}

/// A store node that is open. Cheap to clone; any thread may use it.
#[derive(Debug, Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

fn unmapped(error: MemoryError) -> Error {
    Error::Protocol(format!("cannot map memory: {error}"))
}

fn unexpected(answer: &FromNode) -> Error {
    Error::Protocol(format!("unexpected answer: {answer:?}"))
}

impl Client {
    /// Opens the node of this host. Blocks.
    ///
    /// # Errors
    /// [`Error::Unreachable`] and [`Error::Refused`] say what to do.
    pub fn open(options: &OpenOptions) -> Result<Client, Error> {
        // On a thread of its own: the caller's may belong to an async runtime.
        let reply = std::thread::scope(|scope| {
            let asked = scope.spawn(|| Client::ask_open(options)).join();
            asked.unwrap_or_else(|_| Err(Error::Protocol("the opening thread panicked".into())))
        })?;
        Client::take(options, &reply)
    }

    fn ask_open(options: &OpenOptions) -> Result<v1::OpenReply, Error> {
        let socket = options.attach_dir.join("attach.sock");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| Error::Unreachable(error.to_string()))?;
        let reply = runtime.block_on(async {
            let channel = line::channel(&socket).await?;
            let request = v1::OpenRequest {
                client: options.client.clone(),
                tenant: options.tenant.clone(),
                namespace: options.namespace.clone(),
                object_bytes_max: options.object_bytes_max,
            };
            let reply = v1::objects_client::ObjectsClient::new(channel).open(request).await;
            reply.map_err(|status| line::refused(&socket, &status))
        })?;
        Ok(reply.into_inner())
    }

    fn take(options: &OpenOptions, reply: &v1::OpenReply) -> Result<Client, Error> {
        let bad = |what: &str| Error::Protocol(what.into());
        let layout = reply.layout.as_ref().ok_or_else(|| bad("the reply has no layout"))?;
        let layout = SlotLayout::try_from(layout).map_err(|error| bad(&error.to_string()))?;
        let shape = Shape::new(&layout).ok_or_else(|| bad("the slots have gaps"))?;
        let namespace = Namespace::try_from(reply.namespace.as_slice())
            .map_err(|error| bad(&error.to_string()))?;
        let socket = options.attach_dir.join(&reply.descriptor_socket);
        let (connection, [slots, generations, control, node_ringer, bell]) =
            line::take_descriptors(&socket, &reply.token)?;
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (slot_bytes, generation_bytes) =
            (bytes(reply.slot_memory_bytes), bytes(reply.generations_bytes));
        let slots = SharedMemory::from_fd(slots, slot_bytes, Access::ReadWrite);
        let slots = slots.map_err(unmapped)?;
        slots.populate();
        let generations = SharedMemory::from_fd(generations, generation_bytes, Access::ReadOnly);
        let descriptors = LineDescriptors { control, node_ringer, bell };
        let (sender, receiver) = Line::open(reply.attach_epoch, descriptors, connection)?;
        Ok(Client {
            shared: Arc::new(Shared {
                calls: Calls::new(sender, receiver, options.polling),
                slots,
                generations: generations.map_err(unmapped)?,
                shape,
                namespace,
                objects_max: reply.objects_max as usize,
                keys_max: reply.keys_max as usize,
                lease_max: Duration::from_millis(reply.lease_max_ms),
            }),
        })
    }

    /// The key of what its owner calls so, in this client's namespace.
    pub fn key(&self, name: &[u8]) -> BlockKey {
        objects::key(self.shared.namespace, name)
    }

    /// The longest object that a slot of this node holds, in bytes.
    pub fn object_bytes_max(&self) -> usize {
        self.shared.shape.capacity
    }

    /// The most objects of one put, get or remove.
    pub fn objects_max(&self) -> usize {
        self.shared.objects_max
    }

    /// False once the node is gone or has expelled this client.
    pub fn is_connected(&self) -> bool {
        self.shared.calls.is_connected()
    }

    fn check_count(&self, count: usize, count_max: usize) -> Result<(), Error> {
        match count <= count_max {
            true => Ok(()),
            false => Err(Error::TooMany { count, count_max }),
        }
    }

    /// Puts objects: copies each into a slot that was reserved for it, with its checksum, and makes them
    /// findable, each by itself. Answers for each, in order. One that is there already is not copied.
    ///
    /// A name stands for one content until it is removed: who gives it another one calls [`Self::remove`] first, or
    /// may be given the former bytes after a crash of the node.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::TooMany`] and [`Error::NoCapacity`] (for all of them together) put
    /// nothing.
    pub fn put(
        &self,
        objects: &[(BlockKey, &[u8])],
        options: &PutOptions,
    ) -> Result<Vec<Outcome>, Error> {
        let bytes_max = self.object_bytes_max();
        let too_large = |object: &(BlockKey, &[u8])| object.1.len() > bytes_max;
        if let Some(position) = objects.iter().position(too_large) {
            let bytes = objects[position].1.len();
            return Err(Error::TooLarge { position, bytes, bytes_max });
        }
        let keys: Vec<BlockKey> = objects.iter().map(|(key, _)| *key).collect();
        let mut reservation = self.reserve(&keys, options.lease)?;
        for (position, (_, bytes)) in objects.iter().enumerate() {
            reservation.fill(position, bytes)?;
        }
        reservation.commit(options.class)
    }

    /// Reserves a slot for each object that is not there yet, to be written in place; whole or not at
    /// all. The lease is cut to what the node grants.
    ///
    /// # Errors
    /// [`Error::TooMany`] and [`Error::NoCapacity`]; then nothing is reserved.
    pub fn reserve(&self, keys: &[BlockKey], lease: Duration) -> Result<Reservation, Error> {
        self.check_count(keys.len(), self.shared.objects_max)?;
        let shared = Arc::clone(&self.shared);
        if keys.is_empty() {
            return Ok(Reservation::none(shared));
        }
        let lease_ms = lease.min(shared.lease_max).as_millis().max(1) as u64;
        let reserve = v1::ReserveObjects { keys: BlockKey::concat(keys), lease_ms };
        match shared.calls.ask(ToNode::Reserve(reserve))? {
            (request, FromNode::Reserved(v1::ReservedObjects { slots })) => {
                let places = slots.iter().map(|&slot| Place::at(slot)).collect();
                let reservation = Reservation { shared, request: Some(request), places };
                let wrong = slots.len() != keys.len();
                if wrong {
                    return Err(Error::Protocol(
                        "the number of slots differs from the number of keys".into(),
                    ));
                }
                Ok(reservation)
            }
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Gets objects: answers with each that is there, pinned, and `None` for the others. What lies on
    /// the SSD is read first, as far as there is room and the SSD answers in time.
    ///
    /// # Errors
    /// [`Error::TooMany`], and [`Error::NoCapacity`] when too much is pinned already.
    pub fn get(&self, keys: &[BlockKey]) -> Result<Vec<Option<Object>>, Error> {
        self.get_with(keys, false, "")
    }

    /// The same, and computes each object's checksum: one that has another is removed from the node, and
    /// a miss.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub fn get_verified(&self, keys: &[BlockKey]) -> Result<Vec<Option<Object>>, Error> {
        self.get_with(keys, true, "")
    }

    fn get_with(
        &self,
        keys: &[BlockKey],
        verified: bool,
        source: &str,
    ) -> Result<Vec<Option<Object>>, Error> {
        self.check_count(keys.len(), self.shared.objects_max)?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let keys_bytes = BlockKey::concat(keys);
        let source = source.to_owned();
        let is_far = !source.is_empty();
        let get = ToNode::Get(v1::GetObjects { keys: keys_bytes, checksums: verified, source });
        let calls = &self.shared.calls;
        let asked = if is_far { calls.ask_far(get) } else { calls.ask(get) };
        let (get, got) = match asked? {
            (request, FromNode::Got(got)) => (request, got),
            (_, other) => return Err(unexpected(&other)),
        };
        if got.slots.iter().all(|&slot| slot == NO_SLOT) {
            return Ok(vec![None; keys.len()]);
        }
        // From here on the pins go with it, whatever else the answer holds.
        let pins = Arc::new(Pins { shared: Arc::clone(&self.shared), get });
        if got.slots.len() != keys.len() || got.generations.len() != keys.len() {
            return Err(Error::Protocol(
                "the number of slots differs from the number of keys".into(),
            ));
        }
        let mut checksums = got.checksums.iter();
        let mut rotten = Vec::new();
        let mut objects = Vec::with_capacity(keys.len());
        for (&slot, &generation) in got.slots.iter().zip(&got.generations) {
            if slot == NO_SLOT {
                objects.push(None);
                continue;
            }
            let expected = if verified { checksums.next().copied() } else { None };
            let object = self.object(&pins, slot, generation)?;
            let sound = !verified || self.is_sound(slot, expected);
            if !sound {
                rotten.push((slot, generation));
            }
            objects.push(object.filter(|_| sound));
        }
        if !rotten.is_empty() {
            self.drop_rotten(rotten)?;
        }
        Ok(objects)
    }

    /// Has the copies in memory dropped; on the SSD they may be as they were.
    fn drop_rotten(&self, rotten: Vec<(u32, u32)>) -> Result<(), Error> {
        let (slots, generations) = rotten.into_iter().unzip();
        let rotten = v1::CorruptObjects { slots, generations };
        match self.shared.calls.ask(ToNode::Corrupt(rotten))? {
            (_, FromNode::Removed(_)) => Ok(()),
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// Brings objects to this node from another one, whose gRPC address is given as "host:port"; answers
    /// of each whether it is here now. One that neither node has is not, and neither is one for which
    /// there is no room, or that fails its checksum on arrival. It needs room for two for each object that
    /// is under way.
    ///
    /// # Errors
    /// [`Error::Unreachable`] when the other node does not answer, [`Error::Refused`] when the two nodes
    /// cannot exchange objects (their slots are not alike) and [`Error::TooMany`].
    pub fn fetch(&self, keys: &[BlockKey], from: &str) -> Result<Vec<bool>, Error> {
        self.check_count(keys.len(), self.shared.objects_max)?;
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let fetch = v1::FetchObjects { keys: BlockKey::concat(keys), source: from.into() };
        match self.shared.calls.ask_far(ToNode::Fetch(fetch))? {
            (_, FromNode::Fetched(v1::FetchedObjects { present: here }))
                if here.len() == keys.len() =>
            {
                Ok(here.into_iter().map(|here| here != 0).collect())
            }
            (_, other) => Err(unexpected(&other)),
        }
    }

    /// [`Self::get`], after what is not here was fetched from another node.
    ///
    /// # Errors
    /// As [`Self::get`] and [`Self::fetch`].
    pub fn get_from(&self, keys: &[BlockKey], from: &str) -> Result<Vec<Option<Object>>, Error> {
        self.get_with(keys, false, from)
    }

    /// `None` when what is there is no object, or the slot is of another generation.
    fn object(
        &self,
        pins: &Arc<Pins>,
        slot: u32,
        generation: u32,
    ) -> Result<Option<Object>, Error> {
        let shape = &self.shared.shape;
        let mut footer = [0; objects::FOOTER_BYTES as usize];
        let at = (slot as usize).saturating_mul(shape.slot_bytes).saturating_add(shape.footer_at());
        let read = self.shared.slots.copy_to(at, &mut footer);
        read.map_err(|error| Error::Protocol(error.to_string()))?;
        let Some(bytes) = objects::object_bytes(&footer, shape.capacity as u64) else {
            return Ok(None);
        };
        let object = Object::new(Arc::clone(pins), slot, generation, bytes as usize);
        Ok(object.is_current().then_some(object))
    }

    fn is_sound(&self, slot: u32, expected: Option<u64>) -> bool {
        let computed = self.shared.shape.checksums(&self.shared.slots, slot);
        computed.is_ok_and(|computed| Some(fold(&computed)) == expected)
    }

    /// Where each of these objects can be had fastest; `None` where it is not on this node. More keys
    /// than fit one message are asked for in several.
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn find(&self, keys: &[BlockKey]) -> Result<Vec<Option<Tier>>, Error> {
        let mut found = Vec::with_capacity(keys.len());
        for part in keys.chunks(self.shared.keys_max.max(1)) {
            let find = v1::FindObjects { keys: BlockKey::concat(part) };
            let tiers = match self.shared.calls.ask(ToNode::Find(find))? {
                (_, FromNode::Found(v1::FoundObjects { tiers })) if tiers.len() == part.len() => {
                    tiers
                }
                (_, other) => return Err(unexpected(&other)),
            };
            found.extend(tiers.iter().map(|&tier| match v1::Tier::try_from(i32::from(tier)) {
                Ok(v1::Tier::Dram | v1::Tier::Vram) => Some(Tier::Dram),
                Ok(v1::Tier::Ssd) => Some(Tier::Ssd),
                Ok(v1::Tier::Unspecified) | Err(_) => None,
            }));
        }
        Ok(found)
    }

    /// Whether each of these objects is on this node. See [`Self::find`].
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn exists(&self, keys: &[BlockKey]) -> Result<Vec<bool>, Error> {
        Ok(self.find(keys)?.iter().map(Option::is_some).collect())
    }

    /// Forgets objects, on the SSD and in the object store too; answers how many were there, when no restart of the
    /// node brings one back. Who holds one may read it on.
    ///
    /// # Errors
    /// [`Error::TooMany`], and [`Error::NoCapacity`] where that cannot be written now: try again later.
    pub fn remove(&self, keys: &[BlockKey]) -> Result<usize, Error> {
        self.check_count(keys.len(), self.shared.objects_max)?;
        if keys.is_empty() {
            return Ok(0);
        }
        let remove = v1::RemoveObjects { keys: BlockKey::concat(keys) };
        match self.shared.calls.ask(ToNode::Remove(remove))? {
            (_, FromNode::Removed(v1::RemovedObjects { count })) => Ok(count as usize),
            (_, other) => Err(unexpected(&other)),
        }
    }
}

/// One object of a reservation.
#[derive(Debug)]
enum Place {
    /// It was there already.
    There,
    /// Nothing is written.
    Empty(u32),
    /// So many bytes were written in place.
    Begun(u32, usize),
    /// It is complete; its checksums.
    Written(Vec<u64>),
}

impl Place {
    fn at(slot: u32) -> Self {
        if slot == NO_SLOT { Place::There } else { Place::Empty(slot) }
    }
}

/// Slots that are this client's to write. Dropped without [`commit`](Self::commit) they are given back.
#[derive(Debug)]
pub struct Reservation {
    shared: Arc<Shared>,
    /// `None` when there is nothing to give back.
    request: Option<u64>,
    places: Vec<Place>,
}

impl Reservation {
    fn none(shared: Arc<Shared>) -> Self {
        Reservation { shared, request: None, places: Vec::new() }
    }

    /// How many objects it is for.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether this object was there already: nothing is to be written then.
    pub fn is_there(&self, position: usize) -> bool {
        matches!(self.places.get(position), Some(Place::There))
    }

    /// Copies an object into its slot. Nothing happens where it is there already.
    ///
    /// # Errors
    /// [`Error::TooLarge`], and [`Error::Invalid`] for a position that is not in the reservation.
    pub fn fill(&mut self, position: usize, bytes: &[u8]) -> Result<(), Error> {
        let bytes_max = self.shared.shape.capacity;
        if bytes.len() > bytes_max {
            return Err(Error::TooLarge { position, bytes: bytes.len(), bytes_max });
        }
        let slot = match self.places.get(position) {
            Some(Place::There) => return Ok(()),
            Some(&(Place::Empty(slot) | Place::Begun(slot, _))) => slot,
            Some(Place::Written(_)) | None => return Err(no_such(position)),
        };
        let Shared { shape, slots, .. } = &*self.shared;
        let mut checksums = Vec::with_capacity(shape.runs());
        let written = shape.write(slots, slot, bytes, &mut checksums);
        written.map_err(|error| Error::Protocol(error.to_string()))?;
        self.places[position] = Place::Written(checksums);
        Ok(())
    }

    /// The first `bytes` of an object's slot, to be written in place. What they hold before is
    /// undefined. The object will have that many bytes.
    ///
    /// # Errors
    /// As [`Self::fill`], and [`Error::Invalid`] where the object is there already.
    pub fn bytes_mut(&mut self, position: usize, bytes: usize) -> Result<&mut [u8], Error> {
        let bytes_max = self.shared.shape.capacity;
        if bytes > bytes_max {
            return Err(Error::TooLarge { position, bytes, bytes_max });
        }
        let slot = match self.places.get(position) {
            Some(&(Place::Empty(slot) | Place::Begun(slot, _))) => slot,
            Some(Place::There | Place::Written(_)) | None => return Err(no_such(position)),
        };
        self.places[position] = Place::Begun(slot, bytes);
        let offset = slot as usize * self.shared.shape.slot_bytes;
        // SAFETY: the node gave the slot to this reservation alone, and gives it to nobody else before
        // the reservation is committed or dropped; `self` is borrowed for as long as the slice lives.
        let slice = unsafe { self.shared.slots.slice_mut(offset, bytes) };
        slice.map_err(|error| Error::Protocol(error.to_string()))
    }

    /// Makes what was written findable, each object by itself; what was not is given back. Answers for
    /// each object of the reservation; one that was not written is [`Outcome::Lost`].
    ///
    /// # Errors
    /// [`Error::Lost`].
    pub fn commit(mut self, class: Class) -> Result<Vec<Outcome>, Error> {
        let mut outcomes = vec![Outcome::Lost; self.places.len()];
        let (mut objects, mut checksums) = (Vec::new(), Vec::new());
        let Shared { shape, slots, .. } = &*self.shared;
        for (position, place) in self.places.iter().enumerate() {
            match place {
                Place::There => {}
                Place::Empty(_) => continue,
                Place::Begun(slot, bytes) => {
                    let sealed = shape.seal(slots, *slot, *bytes, &mut checksums);
                    sealed.map_err(|error| Error::Protocol(error.to_string()))?;
                }
                Place::Written(sums) => checksums.extend(sums),
            }
            objects.push(position as u32);
        }
        let Some(reserve) = self.request.take() else { return Ok(outcomes) };
        let (class, ttl_ms) = match class {
            Class::Normal => (v1::ObjectClass::Normal, 0),
            Class::Ephemeral => (v1::ObjectClass::Ephemeral, 0),
            Class::Context { ttl } => {
                let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
                (v1::ObjectClass::Context, ttl_ms)
            }
        };
        let class = class.into();
        let positions = objects.clone();
        let commit = v1::CommitObjects { reserve, objects, checksums, class, ttl_ms };
        match self.shared.calls.ask(ToNode::Commit(commit))? {
            (_, FromNode::Committed(done)) if done.outcomes.len() == positions.len() => {
                for (&position, outcome) in positions.iter().zip(done.outcomes()) {
                    outcomes[position as usize] = outcome_of(outcome, &done.reason)?;
                }
                Ok(outcomes)
            }
            (_, other) => Err(unexpected(&other)),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(reserve) = self.request.take() {
            let commit = v1::CommitObjects { reserve, ..v1::CommitObjects::default() };
            // Where the node is gone there is nothing to give back.
            let _ = self.shared.calls.ask(ToNode::Commit(commit));
        }
    }
}

fn no_such(position: usize) -> Error {
    Error::Invalid(format!("object {position} is not reserved for a write"))
}

fn outcome_of(outcome: v1::ObjectOutcome, why: &str) -> Result<Outcome, Error> {
    match outcome {
        v1::ObjectOutcome::Stored => Ok(Outcome::Stored),
        v1::ObjectOutcome::Exists => Ok(Outcome::Exists),
        v1::ObjectOutcome::Lost => Ok(Outcome::Lost),
        v1::ObjectOutcome::NotPersisted => Ok(Outcome::NotPersisted(why.into())),
        v1::ObjectOutcome::Refused => Ok(Outcome::Refused),
        v1::ObjectOutcome::Unspecified => Err(Error::Protocol("unknown outcome".into())),
    }
}
