//! Completion queues, the channels that wake a thread for them, and what a completion says.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::bindings::{ibv_comp_channel, ibv_cq, ibv_wc};
use crate::context::{Context, make_non_blocking, nothing_yet};
use crate::error::VerbsError;
use crate::room::Room;
use crate::status::WorkCompletion;

/// Wakes a thread that sleeps in `epoll` when a completion queue that was armed has something. Cheap to
/// clone.
#[derive(Debug, Clone)]
pub struct CompletionChannel {
    inner: Arc<ChannelInner>,
}

#[derive(Debug)]
struct ChannelInner {
    channel: NonNull<ibv_comp_channel>,
    context: Context,
}

// SAFETY: libibverbs allows calls on one channel from all threads.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: completion queues hold their channel, so none is left.
        let answer = unsafe { (self.context.api().destroy_comp_channel)(self.channel.as_ptr()) };
        if answer != 0 {
            let device = self.context.name();
            tracing::error!(
                device,
                errno = answer,
                "the verbs library cannot destroy a completion channel"
            );
        }
    }
}

impl CompletionChannel {
    /// # Errors
    /// [`VerbsError::Exhausted`] and others.
    pub fn new(context: &Context) -> Result<Self, VerbsError> {
        // SAFETY: the context is open.
        let channel = unsafe { (context.api().create_comp_channel)(context.raw()) };
        let channel =
            NonNull::new(channel).ok_or_else(|| VerbsError::last("ibv_create_comp_channel"))?;
        let inner = Arc::new(ChannelInner { channel, context: context.clone() });
        make_non_blocking(CompletionChannel { inner: Arc::clone(&inner) }.as_fd())?;
        Ok(CompletionChannel { inner })
    }

    /// The next queue that has something, already acknowledged. Never waits; `None` when there is no
    /// event, and then the descriptor is not readable until the next.
    ///
    /// # Errors
    /// [`VerbsError::DeviceLost`] and others.
    pub fn next_event(&self) -> Result<Option<CqId>, VerbsError> {
        let mut cq = ptr::null_mut();
        let mut cq_context = ptr::null_mut();
        // SAFETY: the channel lives, and both places outlive the call.
        let answer = unsafe {
            (self.inner.context.api().get_cq_event)(
                self.inner.channel.as_ptr(),
                &raw mut cq,
                &raw mut cq_context,
            )
        };
        if answer != 0 {
            return nothing_yet("ibv_get_cq_event");
        }
        // SAFETY: a queue is not destroyed while an event of it is not acknowledged, and each is once.
        unsafe { (self.inner.context.api().ack_cq_events)(cq, 1) };
        Ok(Some(CqId::from_raw(cq_context)))
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel lives while `self` does, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw(self.inner.channel.as_ref().fd) }
    }
}

/// Names a completion queue of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CqId(usize);

impl CqId {
    fn next() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(1);
        CqId(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// An id travels through libibverbs where a pointer would.
    pub(crate) fn from_raw(raw: *mut c_void) -> Self {
        CqId(raw.addr())
    }

    fn to_raw(self) -> *mut c_void {
        ptr::without_provenance_mut(self.0)
    }
}

/// What wakes a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    Any,
    /// Errors, and what the sender marked as solicited.
    Solicited,
}

/// Where completions wait to be polled. Cheap to clone. It cannot overflow: a queue pair is only made
/// on it when there is room for the completions of all that the queue pair may have outstanding.
#[derive(Debug, Clone)]
pub struct CompletionQueue {
    inner: Arc<CqInner>,
}

#[derive(Debug)]
struct CqInner {
    cq: NonNull<ibv_cq>,
    id: CqId,
    room: Room,
    /// Held for its lifetime only.
    _channel: Option<CompletionChannel>,
    context: Context,
}

// SAFETY: libibverbs allows calls on one completion queue from all threads.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}

impl Drop for CqInner {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold their completion queues, so none is left. All events that were
        // fetched have been acknowledged, for which this call waits.
        let answer = unsafe { (self.context.api().destroy_cq)(self.cq.as_ptr()) };
        if answer != 0 {
            let device = self.context.name();
            tracing::error!(
                device,
                errno = answer,
                "the verbs library cannot destroy a completion queue"
            );
        }
    }
}

impl CompletionQueue {
    /// With room for at least so many completions, and with a channel when a thread is to sleep for it.
    ///
    /// # Errors
    /// [`VerbsError::Refused`] beyond the device's limit, and others.
    pub fn new(
        context: &Context,
        completions: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Self, VerbsError> {
        let id = CqId::next();
        let wanted = i32::try_from(completions).unwrap_or(i32::MAX);
        let raw_channel = channel.map_or(ptr::null_mut(), |channel| channel.inner.channel.as_ptr());
        // SAFETY: the context is open, and the channel, if any, is held below. Both are of one device, or
        // the kernel refuses.
        let cq = unsafe {
            (context.api().create_cq)(context.raw(), wanted, id.to_raw(), raw_channel, 0)
        };
        let cq = NonNull::new(cq).ok_or_else(|| VerbsError::last("ibv_create_cq"))?;
        // SAFETY: just made. The driver may have rounded up.
        let capacity = u32::try_from(unsafe { cq.as_ref().cqe }).unwrap_or(0);
        let inner = CqInner {
            cq,
            id,
            room: Room::new(capacity),
            _channel: channel.cloned(),
            context: context.clone(),
        };
        Ok(CompletionQueue { inner: Arc::new(inner) })
    }

    /// As [`CompletionChannel::next_event`] names it.
    pub fn id(&self) -> CqId {
        self.inner.id
    }

    pub fn capacity(&self) -> u32 {
        self.inner.room.capacity()
    }

    /// Room for the completions of so many more work requests. Queue pairs that are destroyed give theirs
    /// back once the queue was polled empty.
    pub fn free(&self) -> u32 {
        self.inner.room.free()
    }

    pub(crate) fn raw(&self) -> *mut ibv_cq {
        self.inner.cq.as_ptr()
    }

    pub(crate) fn is_same(&self, other: &CompletionQueue) -> bool {
        self.inner.id == other.inner.id
    }

    /// Takes room for a queue pair's completions.
    pub(crate) fn reserve(&self, wanted: u32) -> Result<(), VerbsError> {
        let reserved = self.inner.room.reserve(wanted);
        reserved.map_err(|free| VerbsError::CompletionQueueTooSmall { wanted, free })
    }

    /// Gives room back at once: its queue pair was never made.
    pub(crate) fn cancel(&self, wanted: u32) {
        self.inner.room.cancel(wanted);
    }

    /// Gives room back once the queue has been seen empty: its queue pair is destroyed, and drivers
    /// leave its completions here.
    pub(crate) fn leave_behind(&self, room: u32) {
        self.inner.room.leave_behind(room);
    }

    /// Takes completions, as many as there are and as fit. Never waits.
    ///
    /// # Errors
    /// [`VerbsError::DeviceLost`]: the queue is dead, and so are its queue pairs.
    pub fn poll<'a>(
        &self,
        into: &'a mut [WorkCompletion],
    ) -> Result<&'a [WorkCompletion], VerbsError> {
        let left = self.inner.room.left();
        let wanted = i32::try_from(into.len()).unwrap_or(i32::MAX);
        // SAFETY: the queue lives, and `WorkCompletion` is an `ibv_wc` in layout, of which `into` has as
        // many as asked for. The header calls through the same table.
        let count = unsafe {
            let poll_cq = (*self.inner.cq.as_ref().context).ops.poll_cq;
            let poll_cq = poll_cq.expect("every driver can poll");
            poll_cq(self.raw(), wanted, into.as_mut_ptr().cast::<ibv_wc>())
        };
        let Ok(count) = usize::try_from(count) else {
            let source = std::io::Error::from(rustix::io::Errno::IO);
            return Err(VerbsError::DeviceLost { call: "ibv_poll_cq", source });
        };
        if count < into.len() {
            self.inner.room.seen_empty(left);
        }
        Ok(into.get(..count).unwrap_or_default())
    }

    /// Asks for one event on the channel for the next completion. What has come before does not count:
    /// poll once more after arming, and only then sleep.
    ///
    /// # Errors
    /// [`VerbsError::DeviceLost`] and others.
    pub fn arm(&self, wake: Wake) -> Result<(), VerbsError> {
        let solicited_only = i32::from(wake == Wake::Solicited);
        // SAFETY: the queue lives. The header calls through the same table.
        let answer = unsafe {
            let req_notify_cq = (*self.inner.cq.as_ref().context).ops.req_notify_cq;
            req_notify_cq.expect("every driver can notify")(self.raw(), solicited_only)
        };
        VerbsError::check("ibv_req_notify_cq", answer)
    }
}
