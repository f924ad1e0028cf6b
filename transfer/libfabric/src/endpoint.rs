//! Endpoints over reliable datagrams: what posts operations. One endpoint reaches every peer.
//!
//! Nothing is ordered: not operations to one peer, not arrivals, not completions. What holds is: a
//! write's immediate is told when all of that write has landed, and a write is complete when it has
//! landed. `FI_FENCE` and `FI_RMA_EVENT` are not used: the providers that matter have neither.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::address::{AddressVector, EndpointName, NAME_BYTES_MAX, Peer};
use crate::bindings::*;
use crate::completion::{Immediate, Operation, Token};
use crate::domain::{Domain, DomainInner, opened};
use crate::error::{Busy, OpenError, PostError, is_peer_gone};
use crate::info::{EFA, SHM};
use crate::library::Version;
use crate::neighbours;
use crate::ops::{self, Transfer};
use crate::queue::CompletionQueue;
use crate::region::{RemotePlace, Span};
use crate::slab::Held;

/// A write into a peer's memory.
#[derive(Debug, Clone)]
pub struct Write {
    pub peer: Peer,
    /// What is written. It may be empty, and then only the immediate travels; a region is needed all
    /// the same, because `efa` wants a valid descriptor with every write.
    pub local: Span,
    /// Where to. An empty write needs a valid place too.
    pub remote: RemotePlace,
    /// Told to the peer when the write has landed.
    pub immediate: Option<Immediate>,
    pub token: Token,
}

/// A write whose bytes are copied at once, so that they need no registered memory.
#[derive(Debug, Clone)]
pub struct Inject<'a> {
    pub peer: Peer,
    /// At most [`Endpoint::inject_bytes_max`].
    pub bytes: &'a [u8],
    pub remote: RemotePlace,
    pub immediate: Option<Immediate>,
    pub token: Token,
}

/// A read from a peer's memory.
#[derive(Debug, Clone)]
pub struct Read {
    pub peer: Peer,
    /// Where the bytes go; needs [`local_write`](crate::region::Access::local_write).
    pub local: Span,
    pub remote: RemotePlace,
    pub token: Token,
}

/// A message to a peer.
#[derive(Debug, Clone)]
pub struct Message {
    pub peer: Peer,
    pub local: Span,
    pub token: Token,
}

/// A buffer for the next message of any peer.
#[derive(Debug, Clone)]
pub struct Receive {
    /// Needs [`local_write`](crate::region::Access::local_write).
    pub local: Span,
    pub token: Token,
}

/// Who puts a peer's write into memory here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// The device, which checks every access.
    Hardware,
    /// Code of the provider, when the queue is polled; it checks when a write begins.
    Software,
}

/// An endpoint. Closed when dropped: what it had under way is over then and is not told any more, and
/// lets go of its memory. One of provider `shm` that has met another of the same process is left open
/// instead (see `neighbours`): then nothing moves through it as long as its queue is not polled, and what it
/// had under way is held until the process ends.
pub struct Endpoint {
    raw: NonNull<fid_ep>,
    domain: Arc<DomainInner>,
    queue: CompletionQueue,
    vector: AddressVector,
    number: u64,
    name: EndpointName,
    placement: Placement,
    write_bytes_max: usize,
    inject_bytes_max: usize,
    /// Provider `shm` (seen with 1.17) never completes an empty write that is to complete on
    /// delivery. There it completes when it is posted, which says as much: nothing is delivered.
    leaves_empty_writes_open: bool,
    has_ended: bool,
}

// SAFETY: calls are serialised (see `DomainInner`).
unsafe impl Send for Endpoint {}
// SAFETY: as above.
unsafe impl Sync for Endpoint {}

impl Endpoint {
    /// Opens and enables an endpoint. `queue` and `peers` must be of the same domain (this panics
    /// otherwise), and may serve other endpoints too.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        domain: &Domain,
        queue: &CompletionQueue,
        peers: &AddressVector,
    ) -> Result<Self, OpenError> {
        let domain = domain.0.clone();
        assert!(Arc::ptr_eq(&domain, &queue.0.domain), "the queue is of this domain");
        assert!(Arc::ptr_eq(&domain, peers.0.domain()), "the address vector is of this domain");
        let details = domain.info.details();
        let mut endpoint = Endpoint {
            raw: open_raw(&domain)?,
            queue: queue.clone(),
            vector: peers.clone(),
            number: queue.0.number_endpoint(),
            name: EndpointName(Vec::new()),
            placement: Placement::Software,
            write_bytes_max: details.message_bytes_max,
            inject_bytes_max: details.inject_bytes_max,
            leaves_empty_writes_open: details.provider == SHM,
            has_ended: false,
            domain,
        };
        // From here on dropping it closes it.
        endpoint.domain.software_endpoint_opened();
        endpoint.enable()?;
        endpoint.read_limits();
        endpoint.name = endpoint.read_name()?;
        if endpoint.is_shm() {
            neighbours::opened(&endpoint.name.0, peers.0.place());
        }
        if endpoint.places_in_hardware() {
            endpoint.domain.software_endpoint_closed();
            endpoint.placement = Placement::Hardware;
        }
        Ok(endpoint)
    }

    /// What peers insert to reach this endpoint.
    pub fn name(&self) -> &EndpointName {
        &self.name
    }

    pub fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    /// Who puts peers' writes into memory: what closing a region is worth depends on it.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    pub fn write_bytes_max(&self) -> usize {
        self.write_bytes_max
    }

    pub fn inject_bytes_max(&self) -> usize {
        self.inject_bytes_max
    }

    /// Posts a write. It completes when all of it is in the peer's memory.
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    pub fn write(&self, write: &Write) -> Result<(), PostError> {
        let remote = write.remote;
        let post = Post {
            operation: Operation::Write,
            call: "fi_write",
            span: Some(&write.local),
            peer: Some(&write.peer),
            bytes: write.local.bytes(),
            bytes_max: self.write_bytes_max,
            token: write.token,
        };
        if post.bytes == 0 && self.leaves_empty_writes_open {
            return self.post(post, |endpoint, it| {
                // SAFETY: `post` says what it passes.
                unsafe { write_message(endpoint, it, remote, write.immediate, FI_COMPLETION) }
            });
        }
        self.post(post, |endpoint, it| match write.immediate {
            // SAFETY: `post` says what it passes.
            Some(Immediate(data)) => unsafe {
                ops::writedata(endpoint, it, data.into(), remote.address, remote.key.0)
            },
            // SAFETY: as above.
            None => unsafe { ops::write(endpoint, it, remote.address, remote.key.0) },
        })
    }

    /// Posts a write whose bytes may change as soon as this returns. It completes like any other.
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    pub fn inject(&self, inject: &Inject<'_>) -> Result<(), PostError> {
        let post = Post {
            operation: Operation::Write,
            call: "fi_writemsg(FI_INJECT)",
            span: None,
            peer: Some(&inject.peer),
            bytes: inject.bytes.len(),
            bytes_max: self.inject_bytes_max,
            token: inject.token,
        };
        self.post(post, |endpoint, it| {
            let it = Transfer { buffer: inject.bytes.as_ptr().cast_mut().cast(), ..it };
            let flags = FI_INJECT | FI_COMPLETION | FI_DELIVERY_COMPLETE;
            // SAFETY: as `post` says; the bytes live through the call, after which the provider does
            // not look at them (`FI_INJECT`).
            unsafe { write_message(endpoint, it, inject.remote, inject.immediate, flags) }
        })
    }

    /// Posts a read.
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    pub fn read(&self, read: &Read) -> Result<(), PostError> {
        if !read.local.allows_local_write() {
            return Err(PostError::Access);
        }
        let remote = read.remote;
        let post = Post {
            operation: Operation::Read,
            call: "fi_read",
            span: Some(&read.local),
            peer: Some(&read.peer),
            bytes: read.local.bytes(),
            bytes_max: self.write_bytes_max,
            token: read.token,
        };
        self.post(post, |endpoint, it| {
            // SAFETY: `post` says what it passes.
            unsafe { ops::read(endpoint, it, remote.address, remote.key.0) }
        })
    }

    /// Posts a message.
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    pub fn send(&self, message: &Message) -> Result<(), PostError> {
        let post = Post {
            operation: Operation::Send,
            call: "fi_send",
            span: Some(&message.local),
            peer: Some(&message.peer),
            bytes: message.local.bytes(),
            bytes_max: self.domain.info.details().message_bytes_max,
            token: message.token,
        };
        self.post(post, |endpoint, it| {
            // SAFETY: `post` says what it passes.
            unsafe { ops::send(endpoint, it) }
        })
    }

    /// Posts a buffer for a message. Messages that find none wait at the sender or here, as the
    /// provider does it.
    ///
    /// # Errors
    /// [`PostError`]; then nothing was posted.
    pub fn receive(&self, receive: &Receive) -> Result<(), PostError> {
        if !receive.local.allows_local_write() {
            return Err(PostError::Access);
        }
        let post = Post {
            operation: Operation::Receive,
            call: "fi_recv",
            span: Some(&receive.local),
            peer: None,
            bytes: receive.local.bytes(),
            bytes_max: usize::MAX,
            token: receive.token,
        };
        self.post(post, |endpoint, it| {
            // SAFETY: `post` says what it passes.
            unsafe { ops::recv(endpoint, it) }
        })
    }

    /// Checks a post, gives it a place among the operations under way, and calls the provider with a
    /// [`Transfer`] whose buffer, descriptor, peer and context all live until the operation ends: the
    /// place holds them. An operation without a span has no buffer in it.
    fn post(
        &self,
        post: Post<'_>,
        call: impl FnOnce(*mut fid_ep, Transfer) -> isize,
    ) -> Result<(), PostError> {
        if post.bytes > post.bytes_max {
            return Err(PostError::TooLong { bytes: post.bytes, bytes_max: post.bytes_max });
        }
        if let Some(span) = post.span {
            assert!(Arc::ptr_eq(&span.region.domain, &self.domain), "the region is of this domain");
        }
        if let Some(peer) = post.peer {
            assert!(Arc::ptr_eq(&peer.0.vector, &self.vector.0), "the peer is of this endpoint");
        }
        let held = Held {
            token: post.token,
            operation: post.operation,
            bytes: post.bytes,
            endpoint: self.number,
            _span: post.span.cloned(),
            _peer: post.peer.cloned(),
        };
        let slab = &self.queue.0.slab;
        let Ok(context) = slab.take(held) else {
            self.queue.0.count_busy();
            return Err(PostError::Busy(Busy::Outstanding));
        };
        let transfer = Transfer {
            buffer: post.span.map_or(ptr::null_mut(), Span::as_ptr),
            bytes: post.bytes,
            descriptor: post.span.map_or(ptr::null_mut(), |span| span.region.descriptor),
            peer: post.peer.map_or(FI_ADDR_UNSPEC, |peer| peer.0.address),
            context,
        };
        let result = {
            let _serial = self.domain.enter();
            call(self.raw.as_ptr(), transfer)
        };
        if result == 0 {
            return Ok(());
        }
        // The provider did not take it, and will not use the context.
        drop(slab.finish(context));
        Err(self.post_error(post.call, result))
    }

    fn post_error(&self, call: &'static str, result: isize) -> PostError {
        let failure = self.domain.failure(call, result as i64);
        match failure.errno {
            FI_EAGAIN | FI_EINTR | FI_ENOMEM => {
                self.queue.0.count_busy();
                PostError::Busy(Busy::Provider)
            }
            errno if is_peer_gone(errno) => PostError::PeerGone(failure),
            _ => PostError::Refused(failure),
        }
    }

    fn enable(&self) -> Result<(), OpenError> {
        let _serial = self.domain.enter();
        let (endpoint, object) = (self.raw.as_ptr(), self.raw.as_ptr().cast::<fid>());
        if self.is_efa() && self.domain.library().version() >= Version::new(1, 21) {
            // Peers on this host go through the device too: the other way is provider `shm`, which
            // has no descriptor to wait on, and places in software. An older one keeps its ways.
            let permitted = false;
            // SAFETY: the endpoint is live, and the value is one bool.
            unsafe {
                ops::setopt(
                    endpoint,
                    FI_OPT_SHARED_MEMORY_PERMITTED,
                    (&raw const permitted).cast(),
                    size_of::<bool>(),
                );
            }
        }
        let queue = self.queue.0.raw.as_ptr().cast();
        let vector = self.vector.0.raw.as_ptr().cast();
        // SAFETY: all three are live, of one domain, and held by the endpoint.
        let steps = unsafe {
            [
                ("fi_ep_bind(av)", ops::bind(object, vector, 0)),
                ("fi_ep_bind(cq)", ops::bind(object, queue, FI_TRANSMIT | FI_RECV)),
                ("fi_enable", ops::enable(endpoint)),
            ]
        };
        match steps.into_iter().find(|(_, result)| *result != 0) {
            Some((call, result)) => Err(self.domain.failure(call, result).into()),
            None => Ok(()),
        }
    }

    fn read_name(&self) -> Result<EndpointName, OpenError> {
        let mut name = vec![0; NAME_BYTES_MAX];
        let mut bytes = name.len();
        let result = {
            let _serial = self.domain.enter();
            // SAFETY: the endpoint is live, and the room is told.
            unsafe { ops::getname(self.raw.as_ptr(), name.as_mut_ptr().cast(), &mut bytes) }
        };
        if result != 0 {
            return Err(self.domain.failure("fi_getname", result).into());
        }
        name.truncate(bytes);
        Ok(EndpointName(name))
    }

    /// Newer libraries have limits per kind of operation.
    fn read_limits(&mut self) {
        if self.domain.library().version() < Version::new(2, 0) {
            return;
        }
        self.write_bytes_max =
            self.option(FI_OPT_MAX_RMA_SIZE, 0_usize).unwrap_or(self.write_bytes_max);
        self.inject_bytes_max =
            self.option(FI_OPT_INJECT_RMA_SIZE, 0_usize).unwrap_or(self.inject_bytes_max);
    }

    fn is_shm(&self) -> bool {
        self.domain.info.details().provider == SHM
    }

    fn is_efa(&self) -> bool {
        self.domain.info.details().provider == EFA
    }

    /// Only where the provider says so. Without `FI_MR_LOCAL` it would keep registrations in a cache,
    /// and closing a region would not end its own.
    fn places_in_hardware(&self) -> bool {
        self.is_efa()
            && self.domain.library().version() >= Version::new(1, 18)
            && self.domain.info.details().memory_mode.local()
            && self.option(FI_OPT_EFA_EMULATED_WRITE, true) == Some(false)
    }

    /// An option's value; `None` where the provider does not know it.
    fn option<T: Copy>(&self, option: c_int, start: T) -> Option<T> {
        let mut value = start;
        let mut bytes = size_of::<T>();
        let _serial = self.domain.enter();
        // SAFETY: the endpoint is live, and the room is told. `T` is what the option holds.
        let result = unsafe {
            let room = (&raw mut value).cast::<c_void>();
            ops::getopt(self.raw.as_ptr(), option, room, &mut bytes)
        };
        (result == 0 && bytes == size_of::<T>()).then_some(value)
    }
}

/// What all posts have in common.
struct Post<'a> {
    operation: Operation,
    call: &'static str,
    span: Option<&'a Span>,
    peer: Option<&'a Peer>,
    bytes: usize,
    bytes_max: usize,
    token: Token,
}

/// A write with flags of its own, instead of those that the endpoint was opened with.
///
/// # Safety
/// As [`ops::writemsg`]: the endpoint is live, and what `it` names is valid until the operation ends.
unsafe fn write_message(
    endpoint: *mut fid_ep,
    it: Transfer,
    remote: RemotePlace,
    immediate: Option<Immediate>,
    flags: u64,
) -> isize {
    let from = iovec { iov_base: it.buffer, iov_len: it.bytes };
    let to = fi_rma_iov { addr: remote.address, len: it.bytes, key: remote.key.0 };
    let mut descriptor = it.descriptor;
    // Some providers change it while they work.
    let mut message = fi_msg_rma {
        msg_iov: &raw const from,
        desc: &raw mut descriptor,
        iov_count: 1,
        addr: it.peer,
        rma_iov: &raw const to,
        rma_iov_count: 1,
        context: it.context,
        data: immediate.map_or(0, |immediate| immediate.0.into()),
    };
    let flags = if immediate.is_some() { flags | FI_REMOTE_CQ_DATA } else { flags };
    // SAFETY: the caller's promise; the message itself is needed only during the call.
    unsafe { ops::writemsg(endpoint, &raw mut message, flags) }
}

fn open_raw(domain: &DomainInner) -> Result<NonNull<fid_ep>, OpenError> {
    let Some(info) = domain.info.duplicate() else {
        return Err(domain.failure("fi_dupinfo", -FI_ENOMEM).into());
    };
    let mut raw = ptr::null_mut();
    let result = {
        let _serial = domain.enter();
        // SAFETY: domain and info are live; `raw` is written on success.
        unsafe { ops::endpoint(domain.raw.as_ptr(), info.as_ptr(), &mut raw) }
    };
    opened(domain.library(), "fi_endpoint", result, raw)
}

impl Endpoint {
    /// Closes it, as dropping it does. `false` where it was left open, unpolled, for the rest of the process:
    /// its queue must not be polled any more, or what peers write goes on landing.
    pub fn close(mut self) -> bool {
        self.end()
    }

    fn end(&mut self) -> bool {
        if std::mem::replace(&mut self.has_ended, true) {
            return true;
        }
        let stays = self.is_shm() && !neighbours::may_close(&self.name.0);
        let is_closed = !stays && {
            let _serial = self.domain.enter();
            self.queue.0.endpoint_closes();
            // SAFETY: ours, and nothing is bound to it.
            let is_closed = unsafe { ops::close(self.raw.as_ptr().cast()) == 0 };
            if !is_closed {
                self.queue.0.endpoint_stays();
            }
            is_closed
        };
        if !is_closed {
            // The provider may go on using what its operations hold: they keep it, with the queue and
            // the addresses that they are bound to, for the rest of the process.
            Box::leak(Box::new((self.queue.clone(), self.vector.clone())));
            return false;
        }
        // From here on the provider touches no buffer of these operations, nor their contexts.
        drop(self.queue.0.slab.orphan(self.number));
        if self.placement == Placement::Software {
            self.domain.software_endpoint_closed();
        }
        true
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("name", &self.name)
            .field("placement", &self.placement)
            .finish_non_exhaustive()
    }
}
