//! An open device: what it says about itself, and what it reports on its own.

use std::ffi::CStr;
use std::io;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use crate::bindings::{
    IBV_EVENT_CLIENT_REREGISTER, IBV_EVENT_CQ_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_GID_CHANGE,
    IBV_EVENT_LID_CHANGE, IBV_EVENT_PKEY_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR,
    IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SM_CHANGE, Zeroed,
    ibv_async_event, ibv_context, ibv_device_attr, ibv_gid_entry, ibv_port_attr,
};
use crate::completion::CqId;
use crate::device::{DeviceInfo, GidEntry, Limits, LocalPath, PortInfo, Transport};
use crate::error::VerbsError;
use crate::ids::{PortNum, QpNum};
use crate::library::Api;

/// Rows of all ports together that are read; empty ones do not count. Devices have up to 256 for a port.
/// The kernel takes no list of 64 KiB, which would be 2,048 rows.
const GIDS_MAX: usize = 1024;

/// An open device. Cheap to clone; everything made on it holds it, and it is closed after all that.
#[derive(Debug, Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    context: NonNull<ibv_context>,
    name: String,
    transport: Transport,
    api: Arc<Api>,
}

// SAFETY: libibverbs allows calls on one context from all threads.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: everything made on the context held it, so nothing of that is left.
        let answer = unsafe { (self.api.close_device)(self.context.as_ptr()) };
        if answer != 0 {
            tracing::error!(device = %self.name, errno = answer, "the verbs library cannot close an RDMA device");
        }
    }
}

impl Context {
    pub(crate) fn new(
        api: Arc<Api>,
        context: NonNull<ibv_context>,
        name: String,
        transport: i32,
    ) -> Result<Self, VerbsError> {
        let transport = Transport::from_raw(transport);
        let context = Context { inner: Arc::new(Inner { context, name, transport, api }) };
        make_non_blocking(context.events_fd())?;
        Ok(context)
    }

    pub(crate) fn api(&self) -> &Api {
        &self.inner.api
    }

    pub(crate) fn raw(&self) -> *mut ibv_context {
        self.inner.context.as_ptr()
    }

    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Reads what the device and its ports are now.
    ///
    /// # Errors
    /// [`VerbsError`] when the device does not answer.
    pub fn describe(&self) -> Result<DeviceInfo, VerbsError> {
        let raw = self.attributes()?;
        let mut ports = Vec::new();
        for port in 1..=raw.phys_port_cnt {
            ports.extend(self.port(PortNum(port))?);
        }
        for (port, entry) in self.gids()? {
            if let Some(info) = ports.iter_mut().find(|info| info.port == port) {
                info.gids.push(entry);
            }
        }
        Ok(DeviceInfo {
            name: self.inner.name.clone(),
            transport: self.inner.transport,
            firmware: text(&raw.fw_ver),
            limits: Limits::from_raw(&raw),
            ports,
        })
    }

    /// The first port that is active and has an address; `None` when there is none now.
    ///
    /// # Errors
    /// As [`Context::describe`].
    pub fn path(&self) -> Result<Option<LocalPath>, VerbsError> {
        Ok(self.describe()?.path())
    }

    fn attributes(&self) -> Result<ibv_device_attr, VerbsError> {
        let mut raw = ibv_device_attr::zeroed();
        // SAFETY: the context is open, and `raw` is a whole structure that outlives the call.
        let answer = unsafe { (self.api().query_device)(self.raw(), &raw mut raw) };
        VerbsError::check("ibv_query_device", answer)?;
        Ok(raw)
    }

    fn port(&self, port: PortNum) -> Result<Option<PortInfo>, VerbsError> {
        let mut raw = ibv_port_attr::zeroed();
        // SAFETY: as above. The library fills at most this structure, of which older ones know less.
        let answer = unsafe { (self.api().query_port)(self.raw(), port.0, &raw mut raw) };
        VerbsError::check("ibv_query_port", answer)?;
        Ok(PortInfo::from_raw(port, &raw))
    }

    fn gids(&self) -> Result<Vec<(PortNum, GidEntry)>, VerbsError> {
        let mut rows = vec![ibv_gid_entry::zeroed(); GIDS_MAX];
        let row_bytes = mem::size_of::<ibv_gid_entry>();
        // SAFETY: `rows` has room for as many rows of that size as are asked for.
        let count = unsafe {
            (self.api().query_gid_table)(self.raw(), rows.as_mut_ptr(), rows.len(), 0, row_bytes)
        };
        let errno = i32::try_from(count.unsigned_abs()).unwrap_or(i32::MAX);
        let count = usize::try_from(count).map_err(|_| {
            VerbsError::new("ibv_query_gid_table", io::Error::from_raw_os_error(errno))
        })?;
        Ok(rows.iter().take(count).filter_map(GidEntry::from_raw).collect())
    }

    /// Readable while [`Context::next_event`] has something to tell; for `epoll`.
    pub fn events_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open while `self` lives, and its descriptor with it.
        unsafe { BorrowedFd::borrow_raw((*self.raw()).async_fd) }
    }

    /// What the device reports on its own. Never waits.
    ///
    /// # Errors
    /// [`VerbsError::DeviceLost`] when it reports nothing any more.
    pub fn next_event(&self) -> Result<Option<DeviceEvent>, VerbsError> {
        let mut raw = mem::MaybeUninit::<ibv_async_event>::uninit();
        // SAFETY: the context is open; the call fills `raw` when it answers 0.
        let answer = unsafe { (self.api().get_async_event)(self.raw(), raw.as_mut_ptr()) };
        if answer != 0 {
            return nothing_yet("ibv_get_async_event");
        }
        // SAFETY: filled, as the answer says.
        let mut raw = unsafe { raw.assume_init() };
        // SAFETY: the object that the event names is not destroyed before the event is acknowledged,
        // which happens below.
        let event = unsafe { DeviceEvent::from_raw(&raw) };
        // SAFETY: each event is acknowledged once.
        unsafe { (self.api().ack_async_event)(&raw mut raw) };
        Ok(Some(event))
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.events_fd()
    }
}

/// After a call that would have had to wait: no event. After any other failure: the error.
pub(crate) fn nothing_yet<T>(call: &'static str) -> Result<Option<T>, VerbsError> {
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(None),
        _ => Err(VerbsError::new(call, error)),
    }
}

pub(crate) fn make_non_blocking(fd: BorrowedFd<'_>) -> Result<(), VerbsError> {
    let flags = fcntl_getfl(fd).map_err(|errno| VerbsError::new("fcntl", errno.into()))?;
    fcntl_setfl(fd, flags | OFlags::NONBLOCK)
        .map_err(|errno| VerbsError::new("fcntl", errno.into()))
}

fn text(raw: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = raw.iter().map(|c| *c as u8).collect();
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or(c"");
    text.to_string_lossy().into_owned()
}

/// What a device reports on its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceEvent {
    /// Everything on it is dead: close it all.
    DeviceFailed,
    /// The completion queue overflowed or failed: destroy it and the queue pairs on it.
    CompletionQueueFailed(CqId),
    /// The queue pair is in error; what is on it comes back flushed.
    QueuePairFailed(QpNum),
    /// Traffic passes again.
    PortActive(PortNum),
    /// Nothing gets through; queue pairs fail when their retries are used up.
    PortDown(PortNum),
    /// Addresses or keys of the port have changed: describe it again, and connect anew.
    PortChanged(PortNum),
    /// Of no consequence here, by its number in `libibverbs`.
    Other(u32),
}

impl DeviceEvent {
    /// # Safety
    /// What the event names has not been destroyed.
    unsafe fn from_raw(raw: &ibv_async_event) -> Self {
        // SAFETY: which member of the union is meant follows from the type of the event.
        let port = || unsafe { PortNum(raw.element.port_num as u8) };
        match raw.event_type {
            IBV_EVENT_DEVICE_FATAL => DeviceEvent::DeviceFailed,
            IBV_EVENT_CQ_ERR => {
                // SAFETY: as above; the caller answers for the queue.
                let cq_context = unsafe { (*raw.element.cq).cq_context };
                DeviceEvent::CompletionQueueFailed(CqId::from_raw(cq_context))
            }
            IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => {
                // SAFETY: as above; the caller answers for the queue pair.
                let number = unsafe { (*raw.element.qp).qp_num };
                QpNum::new(number)
                    .map_or(DeviceEvent::Other(raw.event_type), DeviceEvent::QueuePairFailed)
            }
            IBV_EVENT_PORT_ACTIVE => DeviceEvent::PortActive(port()),
            IBV_EVENT_PORT_ERR => DeviceEvent::PortDown(port()),
            IBV_EVENT_LID_CHANGE
            | IBV_EVENT_PKEY_CHANGE
            | IBV_EVENT_SM_CHANGE
            | IBV_EVENT_CLIENT_REREGISTER
            | IBV_EVENT_GID_CHANGE => DeviceEvent::PortChanged(port()),
            other => DeviceEvent::Other(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bindings::{event_element, ibv_cq, ibv_qp};

    fn event(event_type: u32, element: event_element) -> DeviceEvent {
        // SAFETY: the tests below name what they have on their stacks.
        unsafe { DeviceEvent::from_raw(&ibv_async_event { element, event_type }) }
    }

    #[test]
    fn an_event_of_a_port_names_it() {
        let port = |event_type| event(event_type, event_element { port_num: 2 });
        assert_eq!(port(IBV_EVENT_PORT_ERR), DeviceEvent::PortDown(PortNum(2)));
        assert_eq!(port(IBV_EVENT_PORT_ACTIVE), DeviceEvent::PortActive(PortNum(2)));
        assert_eq!(port(IBV_EVENT_GID_CHANGE), DeviceEvent::PortChanged(PortNum(2)));
        assert_eq!(port(IBV_EVENT_DEVICE_FATAL), DeviceEvent::DeviceFailed);
        assert_eq!(port(99), DeviceEvent::Other(99));
    }

    #[test]
    fn an_event_of_a_queue_names_it() {
        // SAFETY: both consist of integers and raw pointers, for which zero is a valid value.
        let (mut qp, mut cq) = unsafe { (mem::zeroed::<ibv_qp>(), mem::zeroed::<ibv_cq>()) };
        qp.qp_num = 17;
        cq.cq_context = std::ptr::without_provenance_mut(5);
        let of_pair = event(IBV_EVENT_QP_FATAL, event_element { qp: &raw mut qp });
        assert_eq!(Some(of_pair), QpNum::new(17).map(DeviceEvent::QueuePairFailed));
        let of_queue = event(IBV_EVENT_CQ_ERR, event_element { cq: &raw mut cq });
        let id = CqId::from_raw(cq.cq_context);
        assert_eq!(of_queue, DeviceEvent::CompletionQueueFailed(id));
    }
}
