//! A card driven through libfabric: the provider `efa`, whose datagrams are reliable and in no order, and
//! `tcp` and `shm` where there is no such device. A pipe is an endpoint of its own on either side, so that one
//! peer is cut off by closing what it writes to (`pipe`); peers learn of each other's endpoints over the
//! connection beside the pipe (`greeting`).
//!
//! Counts are the immediates of writes, 32 bits, told when all of their write has landed. No fence is used,
//! and no order; every write has a registered source, an empty one too.

mod alarm;
mod config;
pub(crate) mod greeting;
mod line;
mod memory;
mod pipe;

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use kvasir_transfer_core::signal::Ordering;
use kvasir_transfer_libfabric::address::AddressVector;
use kvasir_transfer_libfabric::domain::{Domain, Fabric};
use kvasir_transfer_libfabric::endpoint::Endpoint;
use kvasir_transfer_libfabric::error::QueueError;
use kvasir_transfer_libfabric::info::{Info, InfoRequest};
use kvasir_transfer_libfabric::library::{Library, Version};
use kvasir_transfer_libfabric::memory::Pages;
use kvasir_transfer_libfabric::queue::{CompletionQueue, QueueOptions, Wakeup};
use kvasir_transfer_libfabric::region::{Access, MemoryRegion, RemoteKey, RemotePlace};

use self::alarm::Alarm;
pub use self::config::EfaConfig;
use self::greeting::Greeting;
use self::line::Line;
use self::memory::{Landing, Registration, Registry, place_of};
use self::pipe::{
    End, MESSAGE_DEPTH, MESSAGE_RECEIVES, Pipe, RECEIVE_BYTES, Request, Target, Writer,
};
use super::nic::{
    Bounds, Card, CardError, Event, Failure, From, MESSAGES, Opened, PipeId, Place, Post, To,
};
use super::wire::PIECE_HEADER_BYTES;

/// Of a writer's pipe: messages, and writes. EFA spreads the writes of one endpoint over many ways itself.
const LANES: usize = 2;
/// From here on the provider `tcp` speaks for itself (docs/decisions/0016).
const OWN_TCP: Version = Version::new(1, 18);
/// The longest post, where a provider has no bound.
const POST_BYTES_MAX: u64 = 1 << 30;
const TRIAL_BYTES: usize = 64;

fn refused(what: &'static str, error: impl std::error::Error + Send + Sync + 'static) -> CardError {
    CardError::because(what, error)
}

fn broken(error: QueueError) -> CardError {
    refused("a completion queue failed", error)
}

/// Opens the provider and makes what all pipes share.
///
/// # Errors
/// A sentence for the person who runs the host.
pub(super) fn open(config: &EfaConfig) -> Result<(String, Opened), CardError> {
    let library = Library::open().map_err(|error| CardError::because(error.to_string(), error))?;
    if config.provider == "tcp" && library.version() < OWN_TCP {
        tracing::warn!(
            version = %library.version(),
            "libfabric's provider `tcp` before 1.18 may crash when a peer is cut off while its write arrives; install libfabric 1.18 or later"
        );
    }
    let info = choose(library, config)?;
    let fabric = Fabric::open(&info).map_err(|error| refused("cannot open the fabric", error))?;
    let domain =
        Domain::open(&fabric, &info).map_err(|error| refused("cannot open the domain", error))?;
    let system = |errno| refused("cannot create a descriptor", errno);
    let landing = Arc::new(Landing::new().map_err(system)?);
    let alarm = Alarm::new(landing.bell()).map_err(system)?;
    let host = match config.provider.as_str() {
        "shm" => crate::shm::host_id()
            .map_err(|error| refused("cannot read the id of the host", error))?,
        _ => String::new(),
    };
    let provider = domain.details().provider.clone();
    let trial = domain
        .register(Arc::new(Pages::new(TRIAL_BYTES)), Access::TARGET)
        .map_err(|error| refused("cannot register memory", error))?;
    let registry = Arc::new(Registry::new(domain.clone(), landing));
    let mut card = EfaCard {
        address: greeting::address(&provider, &host),
        bounds: Bounds {
            lanes: LANES,
            inline_bytes: 0,
            post_bytes: 0,
            piece_bytes: RECEIVE_BYTES - PIECE_HEADER_BYTES,
            order: Ordering::WhenPlaced,
            // By `shm` nobody is told, and nothing moves any more.
            tells_refusals: config.provider != "shm",
            // A post that is done has landed: what follows it is seen after it.
            is_relaxed: false,
        },
        config: config.clone(),
        domain,
        trial,
        alarm,
        registry: Arc::clone(&registry),
        regions: BTreeMap::new(),
        pipes: BTreeMap::new(),
        overdue: VecDeque::new(),
        endpoints: 0,
        ticket: 0,
    };
    // What an endpoint can do, only an endpoint says; and whether one can be made at all.
    let first = card.endpoint(1, 1)?.0;
    card.bounds.inline_bytes = (config.inline_bytes as u64).min(first.inject_bytes_max() as u64);
    card.bounds.post_bytes = (first.write_bytes_max() as u64).clamp(4096, POST_BYTES_MAX);
    let placement = first.placement();
    tracing::info!(
        %provider, domain = %card.domain.details().domain, ?placement,
        "the transfer engine opened a libfabric device"
    );
    let name = card.domain.details().domain.clone();
    Ok((name, (Box::new(card), registry)))
}

fn choose(library: Library, config: &EfaConfig) -> Result<Info, CardError> {
    let request = InfoRequest {
        provider: Some(config.provider.clone()),
        source: config.address.clone(),
        ..InfoRequest::default()
    };
    let missing =
        || format!("this host has no device for libfabric's provider `{}`", config.provider);
    let infos = library.infos(&request).map_err(|error| CardError::because(missing(), error))?;
    let wanted = config.device.as_deref();
    let is_it = |info: &Info| {
        let details = info.details();
        let nic = details.nic.as_ref().map(|nic| nic.name.as_str());
        wanted.is_none_or(|wanted| details.domain == wanted || nic == Some(wanted))
    };
    let found = infos.into_iter().find(is_it);
    found.ok_or_else(|| {
        CardError::new(match wanted {
            Some(wanted) => format!("{} with the name `{wanted}`", missing()),
            None => missing(),
        })
    })
}

#[derive(Debug)]
struct EfaCard {
    address: Vec<u8>,
    bounds: Bounds,
    config: EfaConfig,
    domain: Domain,
    /// Where peers' trials go, and what empty writes are said to come from.
    trial: MemoryRegion,
    alarm: Alarm,
    registry: Arc<Registry>,
    regions: BTreeMap<u64, MemoryRegion>,
    pipes: BTreeMap<PipeId, Pipe>,
    /// What pipes told as they were closed.
    overdue: VecDeque<(PipeId, Event)>,
    /// That peers write to, so far.
    endpoints: u64,
    /// The last one that writers were asked about.
    ticket: u64,
}

impl Drop for EfaCard {
    fn drop(&mut self) {
        // Whoever ends a registration waits for these.
        for (_, mut pipe) in std::mem::take(&mut self.pipes) {
            pipe.close(&mut Vec::new());
            self.landed_no_more(&pipe);
        }
    }
}

impl EfaCard {
    /// With a queue and addresses of its own.
    fn endpoint(
        &self,
        operations_max: usize,
        arrivals_max: usize,
    ) -> Result<(Endpoint, AddressVector), CardError> {
        let options = QueueOptions { operations_max, arrivals_max, wakeup: Wakeup::Fd };
        let queue = CompletionQueue::open(&self.domain, options)
            .map_err(|error| refused("cannot create a completion queue", error))?;
        let vector = AddressVector::open(&self.domain, 1)
            .map_err(|error| refused("cannot create an address vector", error))?;
        let endpoint = Endpoint::open(&self.domain, &queue, &vector)
            .map_err(|error| refused("cannot create an endpoint", error))?;
        Ok((endpoint, vector))
    }

    fn keep(
        &mut self,
        id: PipeId,
        (endpoint, vector): (Endpoint, AddressVector),
        end: End,
    ) -> Result<(), CardError> {
        let listened = endpoint.queue().fd().map_or(Ok(()), |fd| self.alarm.listen(fd));
        listened.map_err(|errno| refused("cannot wait for a queue", errno))?;
        let line = Line::new(endpoint, self.config.shuffle_seed.map(|seed| seed ^ id.0));
        self.pipes.insert(id, Pipe::new(line, end, vector));
        Ok(())
    }

    fn landed_no_more(&self, pipe: &Pipe) {
        if let Some(number) = pipe.number {
            self.registry.landing.endpoint_closed(number);
        }
    }

    /// Closes what it writes to, or is written by.
    fn close(&mut self, id: PipeId) {
        let Some(pipe) = self.pipes.get_mut(&id) else { return };
        // One that is left open is not to wake anybody.
        let fd = pipe.line.as_ref().and_then(|line| line.queue().fd());
        fd.into_iter().for_each(|fd| self.alarm.ignore(fd));
        let mut events = Vec::new();
        pipe.close(&mut events);
        if let Some(number) = pipe.number.take() {
            self.registry.landing.endpoint_closed(number);
        }
        self.overdue.extend(events.into_iter().map(|event| (id, event)));
    }

    /// A registration has ended, and what was being written to it may still land: writers are asked.
    fn settle(&mut self) {
        let ticket = self.registry.landing.ticket();
        if ticket == self.ticket {
            return;
        }
        self.ticket = ticket;
        let targets = self.pipes.iter().filter(|(_, pipe)| pipe.number.is_some());
        self.overdue.extend(targets.map(|(id, _)| (*id, Event::Settle { ticket })));
    }

    fn span(
        &self,
        key: u64,
        (offset, bytes): (u64, u64),
    ) -> Result<kvasir_transfer_libfabric::region::Span, CardError> {
        let region =
            self.regions.get(&key).ok_or_else(|| CardError::new("a region no longer exists"))?;
        let span = region.span(offset as usize, bytes as usize);
        span.map_err(|error| refused("a source is outside its region", error))
    }

    fn request(&self, post: &Post, trial: RemotePlace) -> Result<Request, CardError> {
        let imm = post.imm;
        let remote = match post.to {
            To::Memory(Place { address, key }) => RemotePlace { address, key: RemoteKey(key) },
            // One byte, because nothing at all does not travel everywhere.
            To::Nowhere => {
                let local = self.trial.span(0, 1);
                let local =
                    local.map_err(|error| refused("the trial region has no byte", error))?;
                return Ok(Request::Write { local, remote: trial, imm: None });
            }
            To::Message => {
                let From::Region { key, offset, bytes } = &post.from else {
                    return Err(CardError::new("the source of a message is not registered"));
                };
                return Ok(Request::Send { local: self.span(*key, (*offset, *bytes))? });
            }
        };
        Ok(match &post.from {
            From::Nothing => {
                let local = self.trial.span(0, 0);
                let local =
                    local.map_err(|error| refused("the trial region has no empty range", error))?;
                Request::Write { local, remote, imm }
            }
            From::Region { key, offset, bytes } => {
                Request::Write { local: self.span(*key, (*offset, *bytes))?, remote, imm }
            }
            From::Inline { payload, offset, bytes } => {
                let bytes = payload.bytes(*offset as usize, *bytes as usize).to_vec();
                Request::Inject { bytes, remote, imm }
            }
        })
    }
}

impl Card for EfaCard {
    fn address(&self) -> Vec<u8> {
        self.address.clone()
    }

    fn may_reach(&self, peer: &[u8]) -> bool {
        peer == self.address
    }

    fn bounds(&self) -> Bounds {
        self.bounds
    }

    fn adopt(&mut self, key: u64) {
        let region = self.registry.take(key);
        self.regions.extend(region.map(|region| (key, region)));
    }

    fn place(&self, key: u64) -> Option<Place> {
        self.regions.get(&key).map(|region| place_of(region.remote()))
    }

    fn forget(&mut self, key: u64) -> Option<Box<dyn Send>> {
        self.adopt(key);
        let region = self.regions.remove(&key)?;
        let landing = Arc::clone(&self.registry.landing);
        Some(Box::new(Registration { region: Some(region), landing }))
    }

    fn open(&mut self, pipe: PipeId) -> Result<Vec<u8>, CardError> {
        let depth = self.config.send_depth as usize + MESSAGE_DEPTH;
        let made = self.endpoint(depth, MESSAGE_RECEIVES)?;
        self.keep(pipe, made, End::Writer(Writer::default()))?;
        // Whom it writes to it learns later; nobody writes to it, so nobody is told its name.
        Ok(Vec::new())
    }

    fn accept(&mut self, pipe: PipeId, _writer: &[u8]) -> Result<Vec<u8>, CardError> {
        let made = self.endpoint(MESSAGE_RECEIVES, self.config.receive_depth as usize)?;
        let target = Target::new(&self.domain)?;
        let greeting = Greeting { name: made.0.name().clone(), trial: self.trial.remote() };
        self.keep(pipe, made, End::Target(target))?;
        let number = self.endpoints;
        self.endpoints += 1;
        self.registry.landing.endpoint_opened(number);
        if let Some(pipe) = self.pipes.get_mut(&pipe) {
            pipe.number = Some(number);
        }
        Ok(greeting.to_bytes())
    }

    fn connect(&mut self, pipe: PipeId, target: &[u8]) -> Result<(), CardError> {
        let greeting = Greeting::from_bytes(target).ok_or_else(|| {
            CardError::new(
                "the peer sent no endpoint; run the same version of Kvasir on both nodes",
            )
        })?;
        let Some(pipe) = self.pipes.get_mut(&pipe) else {
            return Err(CardError::new(
                "the connection to the peer was closed before it was established",
            ));
        };
        let End::Writer(writer) = &mut pipe.end else {
            return Err(CardError::new("the pipe does not belong to a writer"));
        };
        let peer = pipe.vector.insert(&greeting.name);
        let peer = peer.map_err(|error| refused("cannot use the peer's endpoint", error))?;
        let trial = greeting.trial.at(0, 1);
        let trial = trial.map_err(|error| refused("the peer's memory range is invalid", error))?;
        writer.to = Some((peer, trial));
        Ok(())
    }

    fn room(&self, pipe: PipeId, lane: usize) -> usize {
        let depth = if lane == MESSAGES { MESSAGE_DEPTH } else { self.config.send_depth as usize };
        match self.pipes.get(&pipe).map(|pipe| &pipe.end) {
            Some(End::Writer(writer)) => depth.saturating_sub(writer.under_way(lane)),
            Some(End::Target(_)) | None => 0,
        }
    }

    fn post(&mut self, id: PipeId, lane: usize, posts: &[Post]) -> Result<(), CardError> {
        let to = self.pipes.get(&id).and_then(|pipe| match &pipe.end {
            End::Writer(writer) => writer.to.as_ref().map(|(_, trial)| *trial),
            End::Target(_) => None,
        });
        let trial = to.ok_or_else(|| CardError::new("the pipe is not connected"))?;
        let requests: Result<Vec<Request>, CardError> =
            posts.iter().map(|post| self.request(post, trial)).collect();
        let Some(pipe) = self.pipes.get_mut(&id) else { return Ok(()) };
        if let End::Writer(writer) = &mut pipe.end {
            for (post, request) in posts.iter().zip(requests?) {
                writer.add(lane, post.tag, request);
            }
        }
        let mut events = Vec::new();
        pipe.poll(&mut events)?;
        self.overdue.extend(events.into_iter().map(|event| (id, event)));
        Ok(())
    }

    fn settled(&mut self, pipe: PipeId, ticket: u64) {
        if let Some(number) = self.pipes.get(&pipe).and_then(|pipe| pipe.number) {
            self.registry.landing.endpoint_settled(number, ticket);
        }
    }

    fn cut(&mut self, pipe: PipeId) {
        self.close(pipe);
    }

    fn is_drained(&self, pipe: PipeId) -> bool {
        let is_closed = self.pipes.get(&pipe).is_none_or(|pipe| pipe.line.is_none());
        is_closed && !self.overdue.iter().any(|(of, _)| *of == pipe)
    }

    fn discard(&mut self, pipe: PipeId) {
        self.close(pipe);
        self.pipes.remove(&pipe);
        self.overdue.retain(|(of, _)| *of != pipe);
    }

    fn poll(&mut self, events: &mut Vec<(PipeId, Event)>) -> Result<bool, CardError> {
        if self.registry.landing.has_failed() {
            let ids: Vec<PipeId> = self.pipes.keys().copied().collect();
            ids.into_iter().for_each(|id| self.close(id));
            return Err(CardError::new(
                "the device could not deregister a memory region, so its connections were closed; restart the node",
            ));
        }
        self.settle();
        let mut any = !self.overdue.is_empty();
        events.extend(self.overdue.drain(..));
        let mut of_pipe = Vec::new();
        for (id, pipe) in &mut self.pipes {
            // One whose queue has failed, or that takes no work, fails by itself.
            match pipe.poll(&mut of_pipe) {
                Ok(found) => any |= found,
                Err(error) => {
                    tracing::warn!(
                        error = error.sentence(),
                        "the connection of the transfer engine to a peer over libfabric failed"
                    );
                    let (lane, failure) = (MESSAGES, Failure::Broken);
                    of_pipe.push(Event::Failed { lane, tag: None, failure });
                }
            }
            events.extend(of_pipe.drain(..).map(|event| (*id, event)));
        }
        if any {
            self.alarm.busy();
        }
        Ok(any)
    }

    fn holds_back(&self) -> bool {
        let mut lines = self.pipes.values().filter_map(|pipe| pipe.line.as_ref());
        lines.any(Line::holds_back)
    }

    fn arm(&mut self) -> Result<(), CardError> {
        let mut must_nap = false;
        let mut is_waiting = false;
        for pipe in self.pipes.values_mut() {
            must_nap |= !pipe.may_sleep()?;
            is_waiting |= pipe.is_waiting();
        }
        if is_waiting {
            self.alarm.hurry();
        }
        let set = self.alarm.set_nap(must_nap || is_waiting);
        set.map_err(|errno| refused("cannot set a timer", errno))
    }

    fn wake_fd(&self) -> BorrowedFd<'_> {
        self.alarm.fd()
    }

    fn clear_wake(&mut self) {
        self.alarm.clear();
        self.registry.landing.silence();
    }

    fn report_fd(&self) -> BorrowedFd<'_> {
        self.alarm.silent_fd()
    }

    fn look_at_reports(&mut self) -> Result<(), CardError> {
        Ok(())
    }
}
