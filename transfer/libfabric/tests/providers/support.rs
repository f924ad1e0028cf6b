//! Endpoints to test with, over providers that need no hardware. Where libfabric or a provider is
//! missing, a test says so in one sentence and passes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_transfer_libfabric::address::{AddressVector, Peer};
use kvasir_transfer_libfabric::completion::{Completion, Immediate, Token};
use kvasir_transfer_libfabric::domain::{Domain, Fabric};
use kvasir_transfer_libfabric::endpoint::{Endpoint, Write};
use kvasir_transfer_libfabric::error::PostError;
use kvasir_transfer_libfabric::info::{InfoRequest, Threading};
use kvasir_transfer_libfabric::library::Library;
use kvasir_transfer_libfabric::memory::Pages;
use kvasir_transfer_libfabric::queue::{CompletionQueue, QueueOptions};
use kvasir_transfer_libfabric::region::{Access, MemoryRegion, RemoteRegion};

/// After this long something hangs; nothing is measured with it.
pub(crate) const HANGS: Duration = Duration::from_secs(30);

/// Which provider, and how.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setting {
    pub provider: &'static str,
    /// Where sockets listen.
    pub source: Option<&'static str>,
    pub threading: Threading,
    /// The provider tells the sender of a write that was refused.
    pub tells_of_refusals: bool,
    /// The provider tells when a peer is gone.
    pub tells_of_lost_peers: bool,
    pub has_fd: bool,
    pub arrival_sources: bool,
}

pub(crate) const TCP: Setting = Setting {
    provider: "tcp",
    source: Some("127.0.0.1"),
    threading: Threading::Safe,
    tells_of_refusals: true,
    tells_of_lost_peers: true,
    has_fd: true,
    arrival_sources: false,
};

/// The sender of a write that is refused is told nothing, and its way to that peer stays jammed (1.17),
/// or it is told that the write is done (2.6). What counts is told by the receiver, who counts right.
/// Nothing watches peers: the deadline is the caller's.
pub(crate) const SHM: Setting = Setting {
    provider: "shm",
    source: None,
    threading: Threading::Safe,
    tells_of_refusals: false,
    tells_of_lost_peers: false,
    has_fd: false,
    arrival_sources: false,
};

#[allow(clippy::print_stderr)] // the one sentence of a skipped test
fn skipped(why: &dyn std::fmt::Display) {
    eprintln!("skipped: {why}");
}

/// One process's end.
pub(crate) struct Side {
    pub domain: Domain,
    pub queue: CompletionQueue,
    pub peers: AddressVector,
    pub endpoint: Endpoint,
    /// What was told and not asked for yet.
    pub told: Vec<Completion>,
}

/// Two that know each other; `None` where there is no libfabric or no such provider.
pub(crate) fn pair(setting: Setting) -> Option<(Side, Side)> {
    Some((side(setting, QueueOptions::default())?, side(setting, QueueOptions::default())?))
}

pub(crate) fn side(setting: Setting, options: QueueOptions) -> Option<Side> {
    let library = Library::open().inspect_err(|error| skipped(error)).ok()?;
    let request = InfoRequest {
        provider: Some(setting.provider.into()),
        source: setting.source.map(String::from),
        threading: setting.threading,
        device_memory: false,
        arrival_sources: setting.arrival_sources,
    };
    let infos = library.infos(&request).inspect_err(|error| skipped(error)).ok()?;
    let info = infos.first().expect("a list that is not refused is not empty");
    let fabric = Fabric::open(info).expect("the fabric opens");
    let domain = Domain::open(&fabric, info).expect("the domain opens");
    let queue = CompletionQueue::open(&domain, options).expect("the queue opens");
    let peers = AddressVector::open(&domain, 64).expect("the address vector opens");
    let endpoint = Endpoint::open(&domain, &queue, &peers).expect("the endpoint opens");
    Some(Side { domain, queue, peers, endpoint, told: Vec::new() })
}

/// Registered pages.
pub(crate) struct Buffer {
    pub pages: Arc<Pages>,
    pub region: MemoryRegion,
}

impl Side {
    pub(crate) fn buffer(&self, bytes: usize) -> Buffer {
        self.buffer_for(bytes, Access::ALL)
    }

    pub(crate) fn buffer_for(&self, bytes: usize, access: Access) -> Buffer {
        let pages = Arc::new(Pages::new(bytes));
        let region = self.domain.register_range(pages.clone(), 0, bytes, access);
        Buffer { pages, region: region.expect("memory is registered") }
    }

    pub(crate) fn peer(&self, other: &Side) -> Peer {
        self.peers.insert(other.endpoint.name()).expect("the peer is inserted")
    }

    pub(crate) fn poll(&mut self) {
        self.queue.poll(&mut self.told, 256).expect("the queue works");
    }

    /// Whether this operation succeeded.
    pub(crate) fn is_done(&self, token: u64) -> bool {
        self.told.iter().any(|told| match told {
            Completion::Done { token: Token(done), .. } => *done == token,
            _ => false,
        })
    }

    pub(crate) fn has_failed(&self, token: u64) -> bool {
        self.told.iter().any(|told| {
            matches!(told, Completion::Failed { token: Token(failed), .. } if *failed == token)
        })
    }

    /// How many writes with this immediate have arrived.
    pub(crate) fn arrivals(&self, immediate: u32) -> usize {
        let is_it = |told: &&Completion| matches!(told, Completion::Arrived { immediate: Immediate(it), .. } if *it == immediate);
        self.told.iter().filter(is_it).count()
    }

    pub(crate) fn post(&self, write: &Write) -> Result<(), PostError> {
        self.endpoint.write(write)
    }
}

/// Polls both until it is so.
pub(crate) fn until(a: &mut Side, b: &mut Side, what: &str, is_so: impl Fn(&Side, &Side) -> bool) {
    let started = Instant::now();
    while !is_so(a, b) {
        a.poll();
        b.poll();
        assert!(
            started.elapsed() < HANGS,
            "hangs, waiting until {what}; told {:?} and {:?}",
            a.told,
            b.told
        );
    }
}

/// Posts, polling both for as long as it is busy: connections are made on first use.
pub(crate) fn post(a: &mut Side, b: &mut Side, mut it: impl FnMut(&Side) -> Result<(), PostError>) {
    let started = Instant::now();
    loop {
        match it(a) {
            Ok(()) => return,
            Err(PostError::Busy(_)) => {
                a.poll();
                b.poll();
            }
            Err(error) => panic!("not posted: {error:?}"),
        }
        assert!(started.elapsed() < HANGS, "busy for ever");
    }
}

/// Polls both so often that whatever could still happen has happened, where nothing says so.
pub(crate) fn settle(a: &mut Side, b: &mut Side) {
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(200) {
        a.poll();
        b.poll();
    }
}

/// A write of the beginning of `from` to `to` at `offset`.
pub(crate) fn write_of(
    peer: &Peer,
    from: &Buffer,
    bytes: usize,
    to: RemoteRegion,
    (offset, immediate, token): (u64, Option<u32>, u64),
) -> Write {
    Write {
        peer: peer.clone(),
        local: from.region.span(0, bytes).expect("inside"),
        remote: to.at(offset, bytes as u64).expect("inside"),
        immediate: immediate.map(Immediate),
        token: Token(token),
    }
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8) ^ seed).collect()
}
