//! The task that talks to the object store: it takes jobs of the node's thread, carries each out by its deadline,
//! and reports. It finds out by itself whether the object store answers, and says so.
//!
//! After something has failed that the object store is to blame for, nothing is begun: what waits is refused at
//! once, and now and then, ever more seldom, it is asked for something that is not there. When that is answered
//! as it should be, all goes on.
//!
//! It also lists what is there, again and again: so a node finds what it sent before it was started anew and what
//! other nodes have sent, and what nobody wants any more is deleted, whoever had sent it.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use kvasir_blocks::{RiseError, SinkError, SsdBlock};
use kvasir_proto::{BlockKey, Class, Namespace, SlotIndex};
use kvasir_transfer::fold;
use kvasir_transfer::memory::SharedMemory;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::jobs::{BucketTask, JOBS_MAX, Job, Report, Reports, Source};
use super::name::Names;
use super::object::{self, Wrong};
use super::open::Opened;
use crate::clock;
use crate::config::ObjectStore;
use crate::ssd::thread::{ReadBlock, Shape};

/// Names whose time is over that wait to be deleted; others are found by a later list.
const DELETES_MAX: usize = 16_384;
/// Objects that are removed at once.
const DISCARDS_AT_ONCE: usize = 16;
/// Names that are deleted one after the other before others get their turn.
const DELETE_BATCH: usize = 64;
/// Between two questions whether the object store answers again.
const ASK_MIN: Duration = Duration::from_secs(1);
const ASK_MAX: Duration = Duration::from_secs(30);
/// Who fails again so soon after it has answered is asked as seldom as before.
const SOON: Duration = Duration::from_secs(10);
/// Clocks of hosts differ: what is over for less long is not deleted.
const GRACE_MS: u64 = 60_000;
/// A part of bytes in flight, so that they can be counted in 32 bits.
const KIB: u64 = 1024;

/// Starts the task on `runtime`.
pub(super) fn start(
    runtime: &Handle,
    config: ObjectStore,
    opened: Opened,
    slots: Arc<SharedMemory>,
    reports: Reports,
) -> BucketTask {
    let (task, jobs) = BucketTask::to_task(JOBS_MAX);
    runtime.spawn(Task::new(config, opened, slots, jobs, reports).run());
    task
}

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("the block to upload failed its checksum")]
    Corrupt,
    /// What was asked for is not there, or is something else.
    #[error("{0}")]
    Gone(String),
    /// The object store did not do it.
    #[error("{0}")]
    Failed(String),
    /// It came to nothing, and the object store had no part in that.
    #[error("{0}")]
    Elsewhere(String),
}

/// What a part of the task has done.
#[derive(Debug)]
enum Done {
    Uploaded {
        upload: u64,
        block: SsdBlock,
        /// Whose place it has taken.
        former: Option<Path>,
        result: Result<(), Failure>,
    },
    Risen {
        rise: u64,
        result: Result<u64, Failure>,
    },
    Listed(Result<Listing, Failure>),
    Deleted {
        names: Vec<Path>,
        deleted: u64,
        failure: Option<Failure>,
    },
    Discarded {
        discard: u64,
        of: (Namespace, BlockKey),
        names: Vec<Path>,
        failure: Option<Failure>,
    },
    Asked(Result<(), Failure>),
}

/// What a part that has died was to do.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    Upload(u64),
    Rise(u64),
    Discard(u64, (Namespace, BlockKey)),
    Control,
}

#[derive(Debug, Default)]
struct Listing {
    blocks: Vec<SsdBlock>,
    left_out: u64,
    foreign: u64,
    over: Vec<Path>,
    layouts: BTreeSet<u64>,
}

#[derive(Debug)]
enum Health {
    Opening,
    Good { since: Instant },
    Bad { why: String },
}

struct Task {
    config: ObjectStore,
    bucket: Bucket,
    jobs: mpsc::Receiver<Job>,
    reports: Reports,
    running: JoinSet<Done>,
    purposes: HashMap<Id, Purpose>,
    health: Health,
    /// Whether it answers is asked then, and later each time.
    ask_at: Instant,
    ask_wait: Duration,
    list_at: Instant,
    /// It was listed once, so that what is there is known.
    is_listed: bool,
    /// A list, a question or a deletion is under way: one at a time.
    is_controlled: bool,
    deletes: VecDeque<Path>,
    /// Objects that wait to be removed, and how many are being removed.
    discards: VecDeque<(u64, Namespace, BlockKey)>,
    discarding: usize,
    /// All that was ever listed or sent.
    layouts: BTreeSet<u64>,
    /// What was sent and deleted since the list that is under way was begun.
    sent: HashMap<Path, SsdBlock>,
    deleted: HashSet<Path>,
    /// Objects that were gone at some time since then.
    discarded: HashSet<(Namespace, BlockKey)>,
}

/// What the parts of the task share.
#[derive(Clone)]
struct Bucket {
    store: Arc<dyn object_store::ObjectStore>,
    names: Names,
    slots: Arc<SharedMemory>,
    timeout: Duration,
    upload_timeout: Duration,
    reads: Arc<Semaphore>,
    read_kib: Arc<Semaphore>,
    read_kib_max: u32,
}

impl Task {
    fn new(
        config: ObjectStore,
        Opened { store, names }: Opened,
        slots: Arc<SharedMemory>,
        jobs: mpsc::Receiver<Job>,
        reports: Reports,
    ) -> Self {
        let now = Instant::now();
        let kib = (config.in_flight_bytes_max / 2 / KIB).clamp(1, u64::from(u32::MAX >> 4)) as u32;
        let bucket = Bucket {
            store,
            names,
            slots,
            timeout: Duration::from_millis(config.read_timeout_ms),
            upload_timeout: Duration::from_millis(config.upload_timeout_ms),
            reads: Arc::new(Semaphore::new(config.in_flight_requests_max.div_ceil(2) as usize)),
            read_kib: Arc::new(Semaphore::new(kib as usize)),
            read_kib_max: kib,
        };
        Task {
            config,
            bucket,
            jobs,
            reports,
            running: JoinSet::new(),
            purposes: HashMap::new(),
            health: Health::Opening,
            ask_at: now,
            ask_wait: ASK_MIN,
            list_at: now,
            is_listed: false,
            is_controlled: false,
            deletes: VecDeque::new(),
            discards: VecDeque::new(),
            discarding: 0,
            layouts: BTreeSet::new(),
            sent: HashMap::new(),
            deleted: HashSet::new(),
            discarded: HashSet::new(),
        }
    }

    /// Until the node ends.
    async fn run(mut self) {
        loop {
            self.control();
            let due = match self.health {
                Health::Bad { .. } => self.ask_at,
                Health::Opening | Health::Good { .. } => self.list_at,
            };
            tokio::select! {
                job = self.jobs.recv() => match job {
                    Some(job) => self.begin(job).await,
                    None => return,
                },
                Some(ended) = self.running.join_next_with_id(), if !self.running.is_empty() => {
                    self.ended(ended).await;
                }
                () = sleep_until(due), if !self.is_controlled => {}
            }
        }
    }

    async fn begin(&mut self, job: Job) {
        let bucket = self.bucket.clone();
        let down = match &self.health {
            Health::Bad { why } => Some(why.clone()),
            Health::Opening | Health::Good { .. } => None,
        };
        match (job, down) {
            (Job::Upload { upload, .. }, Some(why)) => {
                let (result, why) = (Err(SinkError::Failed), Some(why));
                self.reports.post(Report::Uploaded { upload, result, why }).await;
            }
            (Job::Download { rise, .. }, Some(why)) => {
                let (result, why) = (Err(RiseError::Failed), Some(why));
                self.reports.post(Report::Risen { rise, result, why }).await;
            }
            (Job::Discard { discard, .. }, Some(why)) => {
                let (deleted, is_gone, why) = (0, false, Some(why));
                self.reports.post(Report::Discarded { discard, deleted, is_gone, why }).await;
            }
            (Job::Upload { upload, block, from }, None) => {
                // It may come there also when it is said to have failed.
                self.layouts.insert(block.layout);
                self.spawn(Purpose::Upload(upload), async move {
                    let former = match &from {
                        Source::Bucket(former) => bucket.names.of(former),
                        Source::Slot { .. } | Source::Ssd(_) => None,
                    };
                    let result = bucket.upload(&block, from).await;
                    Done::Uploaded { upload, block, former, result }
                });
            }
            (Job::Download { rise, slot, block, shape }, None) => {
                self.spawn(Purpose::Rise(rise), async move {
                    Done::Risen { rise, result: bucket.download(slot, &block, &shape).await }
                });
            }
            (Job::Discard { discard, namespace, key }, None) => {
                self.discards.push_back((discard, namespace, key));
                self.discard_more().await;
            }
        }
    }

    async fn discard_more(&mut self) {
        if let Health::Bad { why } = &self.health {
            let why = why.clone();
            for (discard, ..) in std::mem::take(&mut self.discards) {
                let (deleted, is_gone, why) = (0, false, Some(why.clone()));
                self.reports.post(Report::Discarded { discard, deleted, is_gone, why }).await;
            }
        }
        while self.discarding < DISCARDS_AT_ONCE
            && let Some((discard, namespace, key)) = self.discards.pop_front()
        {
            self.discarding += 1;
            let (bucket, layouts) = (self.bucket.clone(), self.layouts.clone());
            self.spawn(Purpose::Discard(discard, (namespace, key)), async move {
                let (names, failure) = bucket.discard(&layouts, namespace, key).await;
                Done::Discarded { discard, of: (namespace, key), names, failure }
            });
        }
    }

    fn delete_later(&mut self, names: impl IntoIterator<Item = Path>) {
        for name in names {
            if self.deletes.len() < DELETES_MAX {
                self.deletes.push_back(name);
            }
        }
    }

    fn spawn(&mut self, purpose: Purpose, part: impl Future<Output = Done> + Send + 'static) {
        let id = self.running.spawn(part).id();
        self.purposes.insert(id, purpose);
    }

    /// Begins to list, to ask or to delete, when it is time.
    fn control(&mut self) {
        if self.is_controlled {
            return;
        }
        let (bucket, now) = (self.bucket.clone(), Instant::now());
        let is_bad = matches!(self.health, Health::Bad { .. });
        if is_bad && now < self.ask_at {
            return;
        }
        if is_bad && self.is_listed {
            self.is_controlled = true;
            self.spawn(Purpose::Control, async move { Done::Asked(bucket.ask().await) });
        } else if is_bad || now >= self.list_at {
            self.is_controlled = true;
            self.sent.clear();
            self.deleted.clear();
            self.discarded.clear();
            let blocks_max = self.config.blocks_max as usize;
            self.spawn(
                Purpose::Control,
                async move { Done::Listed(bucket.list(blocks_max).await) },
            );
        } else if !self.deletes.is_empty() {
            self.is_controlled = true;
            let batch = self.deletes.len().min(DELETE_BATCH);
            let names: Vec<Path> = self.deletes.drain(..batch).collect();
            self.spawn(Purpose::Control, async move { bucket.delete(names).await });
        }
    }

    async fn ended(&mut self, ended: Result<(Id, Done), JoinError>) {
        let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
        let purpose = self.purposes.remove(&id);
        let done = match (ended, purpose) {
            (Ok((_, done)), _) => done,
            (Err(error), purpose) => {
                tracing::error!(
                    %error, ?purpose,
                    "the store node failed to run a request to the object store"
                );
                let failure = Failure::Elsewhere("the task of the request failed".into());
                match purpose {
                    Some(Purpose::Upload(upload)) => {
                        let (result, why) = (Err(SinkError::Failed), None);
                        return self.reports.post(Report::Uploaded { upload, result, why }).await;
                    }
                    Some(Purpose::Rise(rise)) => Done::Risen { rise, result: Err(failure) },
                    Some(Purpose::Discard(discard, of)) => {
                        Done::Discarded { discard, of, names: Vec::new(), failure: Some(failure) }
                    }
                    Some(Purpose::Control) | None => Done::Asked(Err(Failure::Failed(
                        "the task of a request to the object store failed".into(),
                    ))),
                }
            }
        };
        match done {
            Done::Uploaded { upload, block, former, result } => {
                if result.is_ok() {
                    let names = &self.bucket.names;
                    if let Some(name) = names.of(&block) {
                        // It may have been deleted earlier in this list, or wait for that.
                        self.deleted.remove(&name);
                        self.deletes.retain(|waits| *waits != name);
                    }
                    if let Some(former) = former {
                        self.sent.remove(&former);
                        self.deleted.insert(former);
                        self.reports.post(Report::Deleted { deleted: 1, failed: 0 }).await;
                    }
                    if let Some(name) = self.bucket.names.of(&block) {
                        self.sent.insert(name, block);
                    }
                }
                let result = self.judge(result).await;
                let (result, why) = match result {
                    Ok(()) => (Ok(()), None),
                    Err(Failure::Corrupt) => (Err(SinkError::Corrupt), None),
                    Err(Failure::Gone(why)) => (Err(SinkError::Gone), Some(why)),
                    Err(Failure::Failed(why) | Failure::Elsewhere(why)) => {
                        (Err(SinkError::Failed), Some(why))
                    }
                };
                self.reports.post(Report::Uploaded { upload, result, why }).await;
            }
            Done::Risen { rise, result } => {
                let result = self.judge(result).await;
                let (result, why) = match result {
                    Ok(checksum) => (Ok(checksum), None),
                    Err(Failure::Gone(why)) => (Err(RiseError::Gone), Some(why)),
                    Err(Failure::Failed(why) | Failure::Elsewhere(why)) => {
                        (Err(RiseError::Failed), Some(why))
                    }
                    Err(Failure::Corrupt) => (Err(RiseError::Failed), None),
                };
                self.reports.post(Report::Risen { rise, result, why }).await;
            }
            Done::Listed(result) => {
                self.is_controlled = false;
                if let Ok(listing) = self.judge(result).await {
                    self.listed(listing).await;
                }
            }
            Done::Deleted { names, deleted, failure } => {
                self.is_controlled = false;
                let failed = names.len() as u64 - deleted;
                // The others are found by the next list. Not sooner: a store that deletes nothing would be taken for one
                // that fails, again and again.
                self.deleted.extend(names.into_iter().take(deleted as usize));
                self.reports.post(Report::Deleted { deleted, failed }).await;
                if let Some(failure) = failure {
                    let _ = self.judge::<()>(Err(failure)).await;
                }
            }
            Done::Discarded { discard, of, names, failure } => {
                self.discarding -= 1;
                let (deleted, is_gone) = (names.len() as u64, failure.is_none());
                for name in &names {
                    self.sent.remove(name);
                }
                self.deleted.extend(names);
                if is_gone {
                    // Also what an earlier try has deleted whose answer was lost.
                    self.sent.retain(|_, block| (block.namespace, block.key) != of);
                    if self.is_controlled {
                        self.discarded.insert(of);
                    }
                }
                // Of the object store it says nothing: one that deletes nothing may do all else.
                let why = failure.map(|failure| failure.to_string());
                self.reports.post(Report::Discarded { discard, deleted, is_gone, why }).await;
                self.discard_more().await;
            }
            Done::Asked(result) => {
                self.is_controlled = false;
                if self.judge(result).await.is_ok() {
                    self.is_good().await;
                }
            }
        }
    }

    /// What an outcome says of the object store.
    async fn judge<T>(&mut self, result: Result<T, Failure>) -> Result<T, Failure> {
        if let Err(Failure::Failed(why)) = &result {
            let soon = match self.health {
                Health::Good { since } => since.elapsed() < SOON,
                Health::Opening => false,
                // Of what was begun before; or the question, which is asked again later.
                Health::Bad { .. } => Instant::now() >= self.ask_at,
            };
            self.ask_wait = if soon { (self.ask_wait * 2).min(ASK_MAX) } else { self.ask_wait };
            if !matches!(self.health, Health::Bad { .. }) || soon {
                self.ask_at = Instant::now() + self.ask_wait;
            }
            if !matches!(self.health, Health::Bad { .. }) {
                tracing::warn!(
                    reason = why,
                    "a request of the store node to the object store failed; checking it until it answers again"
                );
            }
            self.health = Health::Bad { why: why.clone() };
            self.reports
                .post(Report::State { usable: false, state: format!("failed: {why}") })
                .await;
        } else if let Health::Good { since } = self.health
            && since.elapsed() >= SOON
        {
            self.ask_wait = ASK_MIN;
        }
        result
    }

    async fn listed(&mut self, listing: Listing) {
        self.list_at = Instant::now() + Duration::from_millis(self.config.list_interval_ms);
        self.is_listed = true;
        let Listing { mut blocks, left_out, foreign, over, mut layouts } = listing;
        self.layouts.append(&mut layouts);
        blocks.retain(|block| !self.discarded.contains(&(block.namespace, block.key)));
        blocks.extend(self.sent.drain().map(|(_, block)| block));
        let names = &self.bucket.names;
        let is_there =
            |block: &SsdBlock| names.of(block).is_some_and(|name| !self.deleted.contains(&name));
        blocks.retain(is_there);
        let known: HashSet<Path> = self.deletes.iter().cloned().collect();
        self.delete_later(over.into_iter().filter(|name| !known.contains(name)));
        self.reports.post(Report::Listed { blocks, left_out, foreign }).await;
        self.is_good().await;
    }

    async fn is_good(&mut self) {
        if !matches!(self.health, Health::Good { .. }) {
            tracing::info!("the object store is available");
            self.health = Health::Good { since: Instant::now() };
            self.reports.post(Report::State { usable: true, state: "ready".into() }).await;
        }
    }
}

impl Bucket {
    async fn upload(&self, block: &SsdBlock, from: Source) -> Result<(), Failure> {
        let name = self.name(block)?;
        let (checksums, payload) = match from {
            Source::Bucket(former) => {
                let former = self.name(&former)?;
                if former == name {
                    return Ok(());
                }
                let copied = within(self.upload_timeout, self.store.copy(&former, &name)).await;
                if let Err(failure) = copied {
                    return Err(self.of_object(failure).await);
                }
                // Before anybody is told: a mark that is taken away is gone when that is acknowledged.
                return self.remove(&former).await;
            }
            Source::Slot { slot, checksum, shape } => {
                let layout = &shape.layout;
                let mut payload = vec![0; layout.slot_bytes() as usize];
                let copied = self.slots.copy_to(slot.0 as usize * payload.len(), &mut payload);
                copied.expect("slots of a checked layout are inside the arena");
                let checksums = object::checksums(layout, &payload);
                if checksum != Some(fold(&checksums)) {
                    return Err(Failure::Corrupt);
                }
                (checksums, Bytes::from(payload))
            }
            Source::Ssd(reading) => {
                let late =
                    |_| Failure::Elsewhere("the SSD did not return the block in time".into());
                let read = timeout(self.upload_timeout, reading).await.map_err(late)?;
                match read {
                    Ok(Ok(ReadBlock { checksums, payload })) => (checksums, payload),
                    Ok(Err(SinkError::Gone)) => {
                        return Err(Failure::Gone("the SSD does not hold the block".into()));
                    }
                    Ok(Err(_)) | Err(_) => {
                        return Err(Failure::Elsewhere("the SSD cannot read the block".into()));
                    }
                }
            }
        };
        let header = object::header(block, &checksums, &payload);
        let object: PutPayload = [header, payload].into_iter().collect();
        let put = async { self.store.put(&name, object).await.map(drop) };
        within(self.upload_timeout, put).await.map_err(of_bucket)
    }

    async fn download(
        &self,
        slot: SlotIndex,
        block: &SsdBlock,
        shape: &Shape,
    ) -> Result<u64, Failure> {
        let name = self.name(block)?;
        let layout = &shape.layout;
        if block.layout != shape.hash {
            return Err(Failure::Elsewhere("the block layout of this node has changed".into()));
        }
        let wanted_bytes = object::object_bytes(layout);
        let kib = wanted_bytes.div_ceil(KIB).min(self.read_kib_max.into()) as u32;
        let deadline = Instant::now() + self.timeout;
        let turn = async {
            let read = self.reads.acquire().await.ok()?;
            Some((read, self.read_kib.acquire_many(kib).await.ok()?))
        };
        let busy =
            || Failure::Elsewhere("too many reads from the object store are in flight".into());
        let _turn = timeout(self.timeout, turn).await.ok().flatten().ok_or_else(busy)?;
        let left = deadline.saturating_duration_since(Instant::now());
        let read = within(left, async {
            let found = self.store.get(&name).await?;
            match found.meta.size == wanted_bytes {
                true => found.bytes().await.map(Some),
                false => Ok(None),
            }
        });
        let read = match read.await {
            Ok(read) => read,
            Err(failure) => return Err(self.of_object(failure).await),
        };
        let decoded = match read {
            Some(object) => object::decode(&object, block, layout),
            None => Err(Wrong::Shape),
        };
        match decoded {
            Ok((checksums, payload)) => {
                let copied = self.slots.copy_from(slot.0 as usize * payload.len(), &payload);
                copied.expect("slots of a checked layout are inside the arena");
                Ok(fold(&checksums))
            }
            Err(wrong) => {
                tracing::warn!(%name, reason = %wrong, "the store node deletes an invalid object from the object store");
                // It is a miss whether or not it can be deleted: then it is met again.
                let _ = within(self.timeout, self.store.delete(&name)).await;
                Err(Failure::Gone(wrong.to_string()))
            }
        }
    }

    /// Who hears that an object is not there may have no bucket.
    async fn of_object(&self, failure: Failure) -> Failure {
        match failure {
            Failure::Gone(_) => self.ask().await.err().unwrap_or(failure),
            other => other,
        }
    }

    /// Lists what is not there.
    async fn ask(&self) -> Result<(), Failure> {
        let nothing = self.names.nothing();
        let mut names = self.store.list(Some(&nothing));
        let listed = async { names.next().await.transpose().map(drop) };
        within(self.timeout, listed).await.map_err(of_bucket)
    }

    async fn list(&self, blocks_max: usize) -> Result<Listing, Failure> {
        let now_ms = clock::unix_ms();
        let mut listing = Listing::default();
        let mut names = self.store.list(Some(self.names.root()));
        loop {
            let next = async { names.next().await.transpose() };
            let next = within(self.upload_timeout, next).await.map_err(of_bucket);
            let Some(meta) = next? else { return Ok(listing) };
            let Some(block) = self.names.parse(&meta.location, meta.size) else {
                listing.foreign += 1;
                continue;
            };
            listing.layouts.insert(block.layout);
            let Class::Context { expires_unix_ms, .. } = block.class else { continue };
            if expires_unix_ms.saturating_add(GRACE_MS) <= now_ms {
                if listing.over.len() < DELETES_MAX {
                    listing.over.push(meta.location);
                }
            } else if expires_unix_ms > now_ms {
                match listing.blocks.len() < blocks_max {
                    true => listing.blocks.push(block),
                    false => listing.left_out += 1,
                }
            }
        }
    }

    /// Deletes all that is there of an object, and answers with the names: a block whose times were changed may have
    /// more than one.
    async fn discard(
        &self,
        layouts: &BTreeSet<u64>,
        namespace: Namespace,
        key: BlockKey,
    ) -> (Vec<Path>, Option<Failure>) {
        let mut deleted = Vec::new();
        for layout in layouts {
            let under = self.names.under(*layout, namespace, key);
            let listing = async { self.store.list(Some(&under)).try_collect::<Vec<_>>().await };
            let found = match within(self.timeout, listing).await {
                Ok(found) => found,
                Err(failure) => return (deleted, Some(failure)),
            };
            for meta in found {
                match self.remove(&meta.location).await {
                    Ok(()) => deleted.push(meta.location),
                    Err(failure) => return (deleted, Some(failure)),
                }
            }
        }
        (deleted, None)
    }

    /// Deletes what may have gone already.
    async fn remove(&self, name: &Path) -> Result<(), Failure> {
        let Err(failure) = within(self.timeout, self.store.delete(name)).await else {
            return Ok(());
        };
        match self.of_object(failure).await {
            Failure::Gone(_) => Ok(()),
            failure => Err(failure),
        }
    }

    /// Deletes one after the other, until one cannot be.
    async fn delete(&self, names: Vec<Path>) -> Done {
        let mut deleted = 0;
        for name in &names {
            match self.remove(name).await {
                Ok(()) => deleted += 1,
                Err(failure) => return Done::Deleted { names, deleted, failure: Some(failure) },
            }
        }
        Done::Deleted { names, deleted, failure: None }
    }

    fn name(&self, block: &SsdBlock) -> Result<Path, Failure> {
        self.names
            .of(block)
            .ok_or_else(|| Failure::Elsewhere("the block belongs to no context".into()))
    }
}

/// Who asks for no object and hears that it is not there has no bucket, or something between that answers for it: that
/// says nothing of any block.
fn of_bucket(failure: Failure) -> Failure {
    match failure {
        Failure::Gone(why) => Failure::Failed(why),
        other => other,
    }
}

/// What comes of a request by its deadline.
async fn within<T>(
    time: Duration,
    request: impl Future<Output = object_store::Result<T>>,
) -> Result<T, Failure> {
    match timeout(time, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error @ object_store::Error::NotFound { .. })) => {
            Err(Failure::Gone(error.to_string()))
        }
        Ok(Err(error)) => Err(Failure::Failed(error.to_string())),
        Err(_) => {
            Err(Failure::Failed(format!("a request did not finish within {} ms", time.as_millis())))
        }
    }
}
