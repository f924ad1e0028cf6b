//! libfabric's inline functions. Its headers define most calls as inline functions that go through
//! tables in the objects, so that no symbol exports them; here they are in Rust. A call that the
//! provider's table lacks answers as libfabric's own do: `-FI_ENOSYS`.
//!
//! Nothing is checked here. What every function demands of its caller: objects are live and of that
//! kind, pointers are valid for what the call reads or writes, and calls are serialised as far as the
//! domain's threading model asks. What else a call means is in libfabric's manual.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use crate::bindings::*;

/// Small enough for both kinds of results.
const NO_ENTRY: i16 = -(FI_ENOSYS as i16);

/// `through!(object, table => entry(arguments))`: calls the entry of the object's table.
macro_rules! through {
    ($object:expr, $table:ident => $entry:ident($($argument:expr),*)) => {{
        // SAFETY: the object is live, and its tables live as long (see the header).
        let entry = unsafe { (*(*$object).$table).$entry };
        match entry {
            // SAFETY: these are the arguments that the entry takes, and valid (see the header).
            Some(entry) => unsafe { entry($($argument),*) },
            None => NO_ENTRY.into(),
        }
    }};
}

pub(crate) unsafe fn close(object: *mut fid) -> c_int {
    through!(object, ops => close(object))
}

pub(crate) unsafe fn bind(object: *mut fid, to: *mut fid, flags: u64) -> c_int {
    through!(object, ops => bind(object, to, flags))
}

pub(crate) unsafe fn enable(endpoint: *mut fid_ep) -> c_int {
    let object = endpoint.cast::<fid>();
    through!(object, ops => control(object, FI_ENABLE, ptr::null_mut()))
}

/// The descriptor that becomes readable when the queue may have entries.
pub(crate) unsafe fn cq_wait_fd(queue: *mut fid_cq, fd: *mut c_int) -> c_int {
    let object = queue.cast::<fid>();
    through!(object, ops => control(object, FI_GETWAIT, fd.cast()))
}

pub(crate) unsafe fn domain(
    fabric: *mut fid_fabric,
    info: *mut fi_info,
    domain: *mut *mut fid_domain,
) -> c_int {
    through!(fabric, ops => domain(fabric, info, domain, ptr::null_mut()))
}

/// Whether the thread may sleep on the queue's descriptor: 0, or `-FI_EAGAIN` when it must poll first.
pub(crate) unsafe fn trywait(fabric: *mut fid_fabric, queue: *mut fid_cq) -> c_int {
    // SAFETY: see the header; every table begins with its size, and an old one may end early.
    let table_bytes = unsafe { (*(*fabric).ops).size };
    if table_bytes <= offset_of!(fi_ops_fabric, trywait) {
        return -FI_ENOSYS;
    }
    let mut objects = [queue.cast::<fid>()];
    through!(fabric, ops => trywait(fabric, objects.as_mut_ptr(), 1))
}

pub(crate) unsafe fn av_open(
    domain: *mut fid_domain,
    attributes: *mut fi_av_attr,
    vector: *mut *mut fid_av,
) -> c_int {
    through!(domain, ops => av_open(domain, attributes, vector, ptr::null_mut()))
}

/// How many were inserted, of one.
pub(crate) unsafe fn av_insert(
    vector: *mut fid_av,
    name: *const c_void,
    address: *mut u64,
) -> c_int {
    through!(vector, ops => insert(vector, name, 1, address, 0, ptr::null_mut()))
}

pub(crate) unsafe fn av_remove(vector: *mut fid_av, address: *mut u64) -> c_int {
    through!(vector, ops => remove(vector, address, 1, 0))
}

pub(crate) unsafe fn mr_regattr(
    domain: *mut fid_domain,
    attributes: *const fi_mr_attr,
    flags: u64,
    region: *mut *mut fid_mr,
) -> c_int {
    through!(domain, mr => regattr(domain.cast(), attributes, flags, region))
}

pub(crate) unsafe fn cq_open(
    domain: *mut fid_domain,
    attributes: *mut fi_cq_attr,
    queue: *mut *mut fid_cq,
) -> c_int {
    through!(domain, ops => cq_open(domain, attributes, queue, ptr::null_mut()))
}

pub(crate) unsafe fn cq_read(
    queue: *mut fid_cq,
    entries: *mut fi_cq_data_entry,
    count: usize,
) -> isize {
    through!(queue, ops => read(queue, entries.cast(), count))
}

/// As [`cq_read`], and says where each entry's operation came from.
pub(crate) unsafe fn cq_readfrom(
    queue: *mut fid_cq,
    entries: *mut fi_cq_data_entry,
    sources: *mut u64,
    count: usize,
) -> isize {
    through!(queue, ops => readfrom(queue, entries.cast(), count, sources))
}

pub(crate) unsafe fn cq_readerr(queue: *mut fid_cq, entry: *mut fi_cq_err_entry) -> isize {
    through!(queue, ops => readerr(queue, entry, 0))
}

/// The provider's text for its own error number; null where it has none.
pub(crate) unsafe fn cq_strerror(
    queue: *mut fid_cq,
    number: c_int,
    data: *const c_void,
    buffer: *mut c_char,
    bytes: usize,
) -> *const c_char {
    // SAFETY: see the header.
    let entry = unsafe { (*(*queue).ops).strerror };
    match entry {
        // SAFETY: see the header.
        Some(strerror) => unsafe { strerror(queue, number, data, buffer, bytes) },
        None => ptr::null(),
    }
}

pub(crate) unsafe fn endpoint(
    domain: *mut fid_domain,
    info: *mut fi_info,
    endpoint: *mut *mut fid_ep,
) -> c_int {
    through!(domain, ops => endpoint(domain, info, endpoint, ptr::null_mut()))
}

pub(crate) unsafe fn getopt(
    endpoint: *mut fid_ep,
    option: c_int,
    value: *mut c_void,
    bytes: *mut usize,
) -> c_int {
    through!(endpoint, ops => getopt(endpoint.cast(), FI_OPT_ENDPOINT, option, value, bytes))
}

pub(crate) unsafe fn setopt(
    endpoint: *mut fid_ep,
    option: c_int,
    value: *const c_void,
    bytes: usize,
) -> c_int {
    through!(endpoint, ops => setopt(endpoint.cast(), FI_OPT_ENDPOINT, option, value, bytes))
}

pub(crate) unsafe fn getname(endpoint: *mut fid_ep, name: *mut c_void, bytes: *mut usize) -> c_int {
    through!(endpoint, cm => getname(endpoint.cast(), name, bytes))
}

/// One run of local memory and what it is for; `context` comes back with the completion.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Transfer {
    pub buffer: *mut c_void,
    pub bytes: usize,
    pub descriptor: *mut c_void,
    /// The peer; any, for a receive.
    pub peer: u64,
    pub context: *mut c_void,
}

pub(crate) unsafe fn recv(endpoint: *mut fid_ep, it: Transfer) -> isize {
    through!(endpoint, msg => recv(
        endpoint, it.buffer, it.bytes, it.descriptor, it.peer, it.context
    ))
}

pub(crate) unsafe fn send(endpoint: *mut fid_ep, it: Transfer) -> isize {
    through!(endpoint, msg => send(
        endpoint, it.buffer, it.bytes, it.descriptor, it.peer, it.context
    ))
}

pub(crate) unsafe fn read(endpoint: *mut fid_ep, it: Transfer, address: u64, key: u64) -> isize {
    through!(endpoint, rma => read(
        endpoint, it.buffer, it.bytes, it.descriptor, it.peer, address, key, it.context
    ))
}

pub(crate) unsafe fn write(endpoint: *mut fid_ep, it: Transfer, address: u64, key: u64) -> isize {
    through!(endpoint, rma => write(
        endpoint, it.buffer, it.bytes, it.descriptor, it.peer, address, key, it.context
    ))
}

pub(crate) unsafe fn writedata(
    endpoint: *mut fid_ep,
    it: Transfer,
    data: u64,
    address: u64,
    key: u64,
) -> isize {
    through!(endpoint, rma => writedata(
        endpoint, it.buffer, it.bytes, it.descriptor, data, it.peer, address, key, it.context
    ))
}

pub(crate) unsafe fn writemsg(
    endpoint: *mut fid_ep,
    message: *mut fi_msg_rma,
    flags: u64,
) -> isize {
    through!(endpoint, rma => writemsg(endpoint, message, flags))
}
