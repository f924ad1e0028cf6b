//! What the handles and the worker of an engine share: the queue of commands, the peers' sessions, and
//! how the worker is woken.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use kvasir_transfer_core::Outcome;

use crate::completion::Completion;
use crate::config::TransferConfig;
use crate::doorbell::{self, Bell, Ringer};
use crate::endpoint::Endpoint;
use crate::engine::{PeerId, SubmitError};
use crate::hooks::Hooks;
use crate::identity::Identity;
use crate::memory::SharedMemory;
use crate::payload::{Payload, Permit, Waiter};
use crate::peers::Peers;
use crate::progress::{Watch, WatchId};
use crate::rdma::{Memories, Named, RdmaPlace};
use crate::scatter::Part;
use crate::signalled::Batch;
use crate::submit::Submission;
use crate::topology::{self, Location};

/// What callers ask of the worker.
#[derive(Debug)]
pub(crate) enum Command {
    Begin {
        submission: Submission,
        deadline_us: u64,
        done: Waiter,
    },
    BeginAll {
        parts: Vec<Part>,
        payload: Payload,
        deadline_us: u64,
    },
    PutWithSignal(Box<Batch>),
    /// Only to be told.
    Tell {
        done: Waiter,
    },
    Expect {
        imm: u32,
        count: u64,
        deadline_us: u64,
        done: Waiter,
    },
    CancelImm {
        imm: u32,
        done: Waiter,
    },
    DrainGroup {
        group: u64,
        done: Waiter,
    },
    Revoke {
        key: u64,
        done: Waiter,
    },
    CutOff {
        peer: PeerId,
        done: Waiter,
    },
    Want {
        peer: PeerId,
        wanted: bool,
    },
    Watch {
        id: WatchId,
        watch: Watch,
        seen: u64,
        permit: Permit,
    },
    Unwatch {
        id: WatchId,
        done: Waiter,
    },
}

/// Commands that are not operations, beyond the bound of operations.
const CONTROL_COMMANDS_MAX: usize = 65_536;
pub(crate) const REGIONS_MAX: usize = 1024;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: TransferConfig,
    pub(crate) endpoint: Endpoint,
    pub(crate) identity: Identity,
    /// Operations under way.
    pub(crate) in_flight: Arc<AtomicUsize>,
    /// Expectations that wait.
    pub(crate) expecting: Arc<AtomicUsize>,
    /// Words that are watched.
    pub(crate) watching: Arc<AtomicUsize>,
    wake: Ringer,
    /// For those outside who raise words that are watched.
    pub(crate) outside: Ringer,
    pub(crate) stop: AtomicBool,
    end: Mutex<End>,
    started: Instant,
    queue: Mutex<VecDeque<Command>>,
    queued: AtomicUsize,
    sleeping: AtomicU32,
    peers: Mutex<Peers>,
    /// Registers memory with the network cards, where there are any.
    memories: Memories,
    fresh_regions: Mutex<Vec<(u64, Arc<SharedMemory>)>>,
    any_fresh_regions: AtomicBool,
    regions: AtomicUsize,
    next_watch: AtomicU64,
    pub(crate) hooks: Hooks,
}

/// Whether the worker has ended, and who wants to know.
#[derive(Debug)]
enum End {
    NotYet(Vec<Completion>),
    Over(Outcome),
}

/// What the worker hears while it sleeps.
#[derive(Debug)]
pub(crate) struct Bells {
    pub(crate) own: Bell,
    pub(crate) outside: Bell,
}

impl Shared {
    /// # Errors
    /// When the process has no descriptors left.
    pub(crate) fn new(
        config: TransferConfig,
        (endpoint, identity): (Endpoint, Identity),
        memories: Memories,
    ) -> std::io::Result<(Self, Bells)> {
        let ((own, wake), (outside_bell, outside)) = (doorbell::pair()?, doorbell::pair()?);
        let shared = Shared {
            config,
            endpoint,
            identity,
            in_flight: Arc::default(),
            expecting: Arc::default(),
            watching: Arc::default(),
            wake,
            outside,
            stop: AtomicBool::new(false),
            end: Mutex::new(End::NotYet(Vec::new())),
            started: Instant::now(),
            queue: Mutex::default(),
            queued: AtomicUsize::new(0),
            sleeping: AtomicU32::new(0),
            peers: Mutex::default(),
            memories,
            fresh_regions: Mutex::default(),
            any_fresh_regions: AtomicBool::new(false),
            regions: AtomicUsize::new(0),
            next_watch: AtomicU64::new(0),
            hooks: Hooks::default(),
        };
        Ok((shared, Bells { own, outside: outside_bell }))
    }

    /// Microseconds since the engine started.
    pub(crate) fn now_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    pub(crate) fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- commands ----

    pub(crate) fn submit(&self, command: Command) -> Result<(), SubmitError> {
        {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            // Under the lock, so that nothing is queued behind the worker's last look.
            if self.stop.load(Ordering::Acquire) {
                return Err(SubmitError::Stopped);
            }
            if queue.len() >= self.config.operations_max + CONTROL_COMMANDS_MAX {
                return Err(SubmitError::Full);
            }
            queue.push_back(command);
            self.queued.store(queue.len(), Ordering::Release);
        }
        self.wake_if_asleep();
        Ok(())
    }

    pub(crate) fn has_commands(&self) -> bool {
        self.queued.load(Ordering::Acquire) > 0
    }

    /// Swaps the queue for an empty one, unless somebody has it at this moment.
    pub(crate) fn try_take_commands(&self, into: &mut VecDeque<Command>) {
        match self.queue.try_lock() {
            Ok(queue) => self.swap_commands(queue, into),
            Err(TryLockError::Poisoned(poisoned)) => {
                self.swap_commands(poisoned.into_inner(), into);
            }
            Err(TryLockError::WouldBlock) => {}
        }
    }

    pub(crate) fn take_commands(&self, into: &mut VecDeque<Command>) {
        self.swap_commands(self.queue.lock().unwrap_or_else(PoisonError::into_inner), into);
    }

    fn swap_commands(
        &self,
        mut queue: MutexGuard<'_, VecDeque<Command>>,
        into: &mut VecDeque<Command>,
    ) {
        std::mem::swap(&mut *queue, into);
        self.queued.store(0, Ordering::Release);
    }

    /// Nothing is accepted from now on, and what waits ends with `Cancelled`.
    pub(crate) fn close(&self) {
        self.stop.store(true, Ordering::Release);
        let mut left = VecDeque::new();
        self.take_commands(&mut left);
    }

    /// Ends the worker.
    pub(crate) fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake.ring();
    }

    // ---- the worker's end ----

    /// Completes `done` when the worker has ended; at once when it has.
    pub(crate) fn when_ended(&self, done: Completion) {
        let over = {
            let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *end {
                End::NotYet(waiting) => {
                    waiting.push(done);
                    return;
                }
                End::Over(outcome) => *outcome,
            }
        };
        done.complete(over);
    }

    pub(crate) fn ended(&self, outcome: Outcome) {
        let former = {
            let mut end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *end, End::Over(outcome))
        };
        if let End::NotYet(waiting) = former {
            waiting.into_iter().for_each(|done| done.complete(outcome));
        }
    }

    // ---- regions ----

    /// Its key, and where it lies for RDMA. `None` when there are too many.
    /// Where the memory lies is found out when it is not said.
    pub(crate) fn add_region(
        &self,
        memory: Arc<SharedMemory>,
        location: Option<Location>,
    ) -> Option<(u64, Option<RdmaPlace>)> {
        if self.regions.fetch_add(1, Ordering::Relaxed) >= REGIONS_MAX {
            self.region_gone();
            return None;
        }
        // Whoever was given one region's key learns nothing of another's. That two are alike is as
        // unlikely as that one is guessed; 0 is never a key.
        let key = rand::random::<u64>().max(1);
        // Before the worker hears of it: it takes the registration over.
        let place = self.register_with_cards(key, &memory, location);
        let mut fresh = self.fresh_regions.lock().unwrap_or_else(PoisonError::into_inner);
        fresh.push((key, memory));
        self.any_fresh_regions.store(true, Ordering::Release);
        Some((key, place))
    }

    /// `None` where no card takes it.
    fn register_with_cards(
        &self,
        key: u64,
        memory: &Arc<SharedMemory>,
        location: Option<Location>,
    ) -> Option<RdmaPlace> {
        if self.memories.is_empty() || self.hooks.regions_withheld() {
            return None;
        }
        let places = self.memories.register(&self.config.name, key, memory);
        if places.is_empty() {
            return None;
        }
        // Registering has made its pages present.
        let location = location.or_else(|| topology::location_of(memory));
        let (incarnation, length_bytes) = (self.endpoint.incarnation, memory.len() as u64);
        let named = Named { incarnation, key, length_bytes };
        Some(RdmaPlace::sealed(places, location, named, &self.endpoint.cookie))
    }

    pub(crate) fn take_fresh_regions(&self) -> Vec<(u64, Arc<SharedMemory>)> {
        if !self.any_fresh_regions.load(Ordering::Acquire) {
            return Vec::new();
        }
        let mut fresh = self.fresh_regions.lock().unwrap_or_else(PoisonError::into_inner);
        self.any_fresh_regions.store(false, Ordering::Release);
        std::mem::take(&mut fresh)
    }

    pub(crate) fn region_gone(&self) {
        self.regions.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn next_watch(&self) -> WatchId {
        WatchId(self.next_watch.fetch_add(1, Ordering::Relaxed))
    }

    // ---- sleeping and waking ----

    fn wake_if_asleep(&self) {
        self.wake.ring_if(&self.sleeping);
    }

    /// See [`crate::sleeping`].
    pub(crate) fn sleeping(&self) -> &AtomicU32 {
        &self.sleeping
    }
}
