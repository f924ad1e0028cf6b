//! libfabric's structures and constants, as far as they are used: written down from its headers, and
//! compared with them by `tests/layout`. Fields that libfabric appended over time stand at the end of
//! their structure, so what is here holds for 1.14 up to 2.6; structures that we allocate and a newer
//! library may read or write further are as long as the newest.
//!
//! Names, order and spelling are those of the headers. Enumerations are plain integers, because a
//! library newer than this list may answer with values that it does not have. Table entries that are
//! not called are [`Unused`].
#![allow(non_camel_case_types)] // the names of the C headers

use std::ffi::{c_char, c_int, c_void};

/// A function that is in a table and not called from here.
pub type Unused = Option<unsafe extern "C" fn()>;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct iovec {
    pub iov_base: *mut c_void,
    pub iov_len: usize,
}

// ---- objects in general

/// What every object begins with.
#[repr(C)]
#[derive(Debug)]
pub struct fid {
    pub fclass: usize,
    pub context: *mut c_void,
    pub ops: *const fi_ops,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops {
    pub size: usize,
    pub close: Option<unsafe extern "C" fn(*mut fid) -> c_int>,
    pub bind: Option<unsafe extern "C" fn(*mut fid, *mut fid, u64) -> c_int>,
    pub control: Option<unsafe extern "C" fn(*mut fid, c_int, *mut c_void) -> c_int>,
    pub ops_open: Unused,
    pub tostr: Unused,
    pub ops_set: Unused,
}

/// What an operation's context must offer to the provider with the mode bits [`FI_CONTEXT`] and
/// [`FI_CONTEXT2`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_context2 {
    pub internal: [*mut c_void; 8],
}

// ---- what there is: fi_getinfo

#[repr(C)]
#[derive(Debug)]
pub struct fi_info {
    pub next: *mut fi_info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut fid,
    pub tx_attr: *mut fi_tx_attr,
    pub rx_attr: *mut fi_rx_attr,
    pub ep_attr: *mut fi_ep_attr,
    pub domain_attr: *mut fi_domain_attr,
    pub fabric_attr: *mut fi_fabric_attr,
    pub nic: *mut fid_nic,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_tx_attr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_rx_attr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
    pub iov_limit: usize,
}

/// Only its beginning: libfabric allocates it.
#[repr(C)]
#[derive(Debug)]
pub struct fi_ep_attr {
    pub r#type: u32,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
}

/// Only its beginning: libfabric allocates it.
#[repr(C)]
#[derive(Debug)]
pub struct fi_domain_attr {
    pub domain: *mut fid_domain,
    pub name: *mut c_char,
    pub threading: u32,
    pub control_progress: u32,
    pub data_progress: u32,
    pub resource_mgmt: u32,
    pub av_type: u32,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_fabric_attr {
    pub fabric: *mut fid_fabric,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct fid_nic {
    pub fid: fid,
    pub device_attr: *mut fi_device_attr,
    pub bus_attr: *mut fi_bus_attr,
    pub link_attr: *mut fi_link_attr,
    pub prov_attr: *mut c_void,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_device_attr {
    pub name: *mut c_char,
    pub device_id: *mut c_char,
    pub device_version: *mut c_char,
    pub vendor_id: *mut c_char,
    pub driver: *mut c_char,
    pub firmware: *mut c_char,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_pci_attr {
    pub domain_id: u16,
    pub bus_id: u8,
    pub device_id: u8,
    pub function_id: u8,
}

/// `pci` is the only member of a union in the header.
#[repr(C)]
#[derive(Debug)]
pub struct fi_bus_attr {
    pub bus_type: u32,
    pub pci: fi_pci_attr,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_link_attr {
    pub address: *mut c_char,
    pub mtu: usize,
    pub speed: usize,
    pub state: u32,
    pub network_type: *mut c_char,
}

// ---- fabric and domain

#[repr(C)]
#[derive(Debug)]
pub struct fid_fabric {
    pub fid: fid,
    pub ops: *const fi_ops_fabric,
    pub api_version: u32,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_fabric {
    pub size: usize,
    pub domain: Option<
        unsafe extern "C" fn(
            *mut fid_fabric,
            *mut fi_info,
            *mut *mut fid_domain,
            *mut c_void,
        ) -> c_int,
    >,
    pub passive_ep: Unused,
    pub eq_open: Unused,
    pub wait_open: Unused,
    pub trywait: Option<unsafe extern "C" fn(*mut fid_fabric, *mut *mut fid, c_int) -> c_int>,
}

#[repr(C)]
#[derive(Debug)]
pub struct fid_domain {
    pub fid: fid,
    pub ops: *const fi_ops_domain,
    pub mr: *const fi_ops_mr,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_domain {
    pub size: usize,
    pub av_open: Option<
        unsafe extern "C" fn(
            *mut fid_domain,
            *mut fi_av_attr,
            *mut *mut fid_av,
            *mut c_void,
        ) -> c_int,
    >,
    pub cq_open: Option<
        unsafe extern "C" fn(
            *mut fid_domain,
            *mut fi_cq_attr,
            *mut *mut fid_cq,
            *mut c_void,
        ) -> c_int,
    >,
    pub endpoint: Option<
        unsafe extern "C" fn(*mut fid_domain, *mut fi_info, *mut *mut fid_ep, *mut c_void) -> c_int,
    >,
}

// ---- memory

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_mr {
    pub size: usize,
    pub reg: Unused,
    pub regv: Unused,
    pub regattr:
        Option<unsafe extern "C" fn(*mut fid, *const fi_mr_attr, u64, *mut *mut fid_mr) -> c_int>,
}

#[repr(C)]
#[derive(Debug)]
pub struct fid_mr {
    pub fid: fid,
    pub mem_desc: *mut c_void,
    pub key: u64,
}

/// As long as in libfabric 2.6; an older one reads less of it. `mr_iov` is a union in the header, and
/// points to a [`fi_mr_dmabuf`] with the flag [`FI_MR_DMABUF`]; `device` is one of plain integers.
#[repr(C)]
#[derive(Debug)]
pub struct fi_mr_attr {
    pub mr_iov: *const iovec,
    pub iov_count: usize,
    pub access: u64,
    pub offset: u64,
    pub requested_key: u64,
    pub context: *mut c_void,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
    pub iface: u32,
    pub device: u64,
    pub hmem_data: *mut c_void,
    pub page_size: usize,
    pub base_mr: *const fid_mr,
    pub sub_mr_cnt: usize,
}

/// From libfabric 1.20 on.
#[repr(C)]
#[derive(Debug)]
pub struct fi_mr_dmabuf {
    pub fd: c_int,
    pub offset: u64,
    pub len: usize,
    pub base_addr: *mut c_void,
}

// ---- addresses

#[repr(C)]
#[derive(Debug)]
pub struct fid_av {
    pub fid: fid,
    pub ops: *const fi_ops_av,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_av_attr {
    pub r#type: u32,
    pub rx_ctx_bits: c_int,
    pub count: usize,
    pub ep_per_node: usize,
    pub name: *const c_char,
    pub map_addr: *mut c_void,
    pub flags: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_av {
    pub size: usize,
    pub insert: Option<
        unsafe extern "C" fn(
            *mut fid_av,
            *const c_void,
            usize,
            *mut u64,
            u64,
            *mut c_void,
        ) -> c_int,
    >,
    pub insertsvc: Unused,
    pub insertsym: Unused,
    pub remove: Option<unsafe extern "C" fn(*mut fid_av, *mut u64, usize, u64) -> c_int>,
}

// ---- completions

#[repr(C)]
#[derive(Debug)]
pub struct fid_cq {
    pub fid: fid,
    pub ops: *const fi_ops_cq,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_cq_attr {
    pub size: usize,
    pub flags: u64,
    pub format: u32,
    pub wait_obj: u32,
    pub signaling_vector: c_int,
    pub wait_cond: u32,
    pub wait_set: *mut c_void,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_cq {
    pub size: usize,
    pub read: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize) -> isize>,
    pub readfrom: Option<unsafe extern "C" fn(*mut fid_cq, *mut c_void, usize, *mut u64) -> isize>,
    pub readerr: Option<unsafe extern "C" fn(*mut fid_cq, *mut fi_cq_err_entry, u64) -> isize>,
    pub sread: Unused,
    pub sreadfrom: Unused,
    pub signal: Unused,
    pub strerror: Option<
        unsafe extern "C" fn(
            *mut fid_cq,
            c_int,
            *const c_void,
            *mut c_char,
            usize,
        ) -> *const c_char,
    >,
}

/// An entry of a queue opened with [`FI_CQ_FORMAT_DATA`].
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct fi_cq_data_entry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
}

/// As long as in libfabric 2.6; one that is older, or was asked for an older interface, writes less.
#[repr(C)]
#[derive(Debug)]
pub struct fi_cq_err_entry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
    pub src_addr: u64,
}

// ---- endpoints

#[repr(C)]
#[derive(Debug)]
pub struct fid_ep {
    pub fid: fid,
    pub ops: *const fi_ops_ep,
    pub cm: *const fi_ops_cm,
    pub msg: *const fi_ops_msg,
    pub rma: *const fi_ops_rma,
    pub tagged: *const c_void,
    pub atomic: *const c_void,
    pub collective: *const c_void,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_ep {
    pub size: usize,
    pub cancel: Unused,
    pub getopt:
        Option<unsafe extern "C" fn(*mut fid, c_int, c_int, *mut c_void, *mut usize) -> c_int>,
    pub setopt: Option<unsafe extern "C" fn(*mut fid, c_int, c_int, *const c_void, usize) -> c_int>,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_cm {
    pub size: usize,
    pub setname: Unused,
    pub getname: Option<unsafe extern "C" fn(*mut fid, *mut c_void, *mut usize) -> c_int>,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_msg {
    pub size: usize,
    pub recv: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *mut c_void,
            usize,
            *mut c_void,
            u64,
            *mut c_void,
        ) -> isize,
    >,
    pub recvv: Unused,
    pub recvmsg: Unused,
    pub send: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *const c_void,
            usize,
            *mut c_void,
            u64,
            *mut c_void,
        ) -> isize,
    >,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_ops_rma {
    pub size: usize,
    pub read: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *mut c_void,
            usize,
            *mut c_void,
            u64,
            u64,
            u64,
            *mut c_void,
        ) -> isize,
    >,
    pub readv: Unused,
    pub readmsg: Unused,
    pub write: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *const c_void,
            usize,
            *mut c_void,
            u64,
            u64,
            u64,
            *mut c_void,
        ) -> isize,
    >,
    pub writev: Unused,
    pub writemsg: Option<unsafe extern "C" fn(*mut fid_ep, *const fi_msg_rma, u64) -> isize>,
    pub inject: Unused,
    pub writedata: Option<
        unsafe extern "C" fn(
            *mut fid_ep,
            *const c_void,
            usize,
            *mut c_void,
            u64,
            u64,
            u64,
            u64,
            *mut c_void,
        ) -> isize,
    >,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_rma_iov {
    pub addr: u64,
    pub len: usize,
    pub key: u64,
}

#[repr(C)]
#[derive(Debug)]
pub struct fi_msg_rma {
    pub msg_iov: *const iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: u64,
    pub rma_iov: *const fi_rma_iov,
    pub rma_iov_count: usize,
    pub context: *mut c_void,
    pub data: u64,
}

// ---- functions that the library exports

pub type fi_version_fn = unsafe extern "C" fn() -> u32;
pub type fi_getinfo_fn = unsafe extern "C" fn(
    u32,
    *const c_char,
    *const c_char,
    u64,
    *const fi_info,
    *mut *mut fi_info,
) -> c_int;
pub type fi_freeinfo_fn = unsafe extern "C" fn(*mut fi_info);
pub type fi_dupinfo_fn = unsafe extern "C" fn(*const fi_info) -> *mut fi_info;
pub type fi_fabric_fn =
    unsafe extern "C" fn(*mut fi_fabric_attr, *mut *mut fid_fabric, *mut c_void) -> c_int;
pub type fi_strerror_fn = unsafe extern "C" fn(c_int) -> *const c_char;

// ---- capabilities and flags

pub const FI_MSG: u64 = 1 << 1;
pub const FI_RMA: u64 = 1 << 2;
pub const FI_READ: u64 = 1 << 8;
pub const FI_WRITE: u64 = 1 << 9;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_SEND: u64 = 1 << 11;
pub const FI_TRANSMIT: u64 = FI_SEND;
pub const FI_REMOTE_READ: u64 = 1 << 12;
pub const FI_REMOTE_WRITE: u64 = 1 << 13;
pub const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub const FI_COMPLETION: u64 = 1 << 24;
pub const FI_INJECT: u64 = 1 << 25;
pub const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
pub const FI_MR_DMABUF: u64 = 1 << 40;
pub const FI_HMEM: u64 = 1 << 47;
pub const FI_SOURCE: u64 = 1 << 57;
/// Mode bits.
pub const FI_CONTEXT: u64 = 1 << 59;
pub const FI_CONTEXT2: u64 = 1 << 52;

pub const FI_ADDR_UNSPEC: u64 = u64::MAX;
pub const FI_SOCKADDR: u32 = 1;
pub const FI_SOCKADDR_IN: u32 = 2;
pub const FI_SOCKADDR_IN6: u32 = 3;
pub const FI_ADDR_STR: u32 = 9;
pub const FI_ADDR_EFA: u32 = 12;

pub const FI_AV_MAP: u32 = 1;
pub const FI_AV_TABLE: u32 = 2;

pub const FI_MR_LOCAL: u32 = 1 << 2;
pub const FI_MR_VIRT_ADDR: u32 = 1 << 4;
pub const FI_MR_ALLOCATED: u32 = 1 << 5;
pub const FI_MR_PROV_KEY: u32 = 1 << 6;
pub const FI_MR_HMEM: u32 = 1 << 10;

pub const FI_PROGRESS_AUTO: u32 = 1;
pub const FI_PROGRESS_MANUAL: u32 = 2;

pub const FI_THREAD_SAFE: u32 = 1;
pub const FI_THREAD_DOMAIN: u32 = 3;

pub const FI_EP_RDM: u32 = 3;

pub const FI_BUS_PCI: u32 = 1;

pub const FI_HMEM_SYSTEM: u32 = 0;
pub const FI_HMEM_CUDA: u32 = 1;
pub const FI_HMEM_ROCR: u32 = 2;
pub const FI_HMEM_ZE: u32 = 3;
pub const FI_HMEM_NEURON: u32 = 4;
pub const FI_HMEM_SYNAPSEAI: u32 = 5;

// ---- commands, wait objects, options

pub const FI_GETWAIT: c_int = 5;
pub const FI_ENABLE: c_int = 6;

pub const FI_WAIT_NONE: u32 = 0;
pub const FI_WAIT_FD: u32 = 3;

pub const FI_CQ_FORMAT_DATA: u32 = 3;
pub const FI_CQ_COND_NONE: u32 = 0;

pub const FI_OPT_ENDPOINT: c_int = 0;
/// From libfabric 1.21 on.
pub const FI_OPT_SHARED_MEMORY_PERMITTED: c_int = 11;
/// From libfabric 2.0 on, as the next one.
pub const FI_OPT_MAX_RMA_SIZE: c_int = 14;
pub const FI_OPT_INJECT_RMA_SIZE: c_int = 18;
/// `-(0xefa << 16) + 2`, from libfabric 1.18 on.
pub const FI_OPT_EFA_EMULATED_WRITE: c_int = -(0xefa << 16) + 2;

// ---- error numbers: those of Linux, and libfabric's own from 256 on

pub const FI_EPERM: i32 = 1;
pub const FI_ENOENT: i32 = 2;
pub const FI_EINTR: i32 = 4;
pub const FI_EIO: i32 = 5;
pub const FI_EBADF: i32 = 9;
pub const FI_EAGAIN: i32 = 11;
pub const FI_ENOMEM: i32 = 12;
pub const FI_EACCES: i32 = 13;
pub const FI_EFAULT: i32 = 14;
pub const FI_EBUSY: i32 = 16;
pub const FI_ENODEV: i32 = 19;
pub const FI_EINVAL: i32 = 22;
pub const FI_EMFILE: i32 = 24;
pub const FI_ENOSPC: i32 = 28;
pub const FI_ENOSYS: i32 = 38;
pub const FI_ENODATA: i32 = 61;
pub const FI_EMSGSIZE: i32 = 90;
pub const FI_ENOPROTOOPT: i32 = 92;
pub const FI_EOPNOTSUPP: i32 = 95;
pub const FI_EADDRNOTAVAIL: i32 = 99;
pub const FI_ENETDOWN: i32 = 100;
pub const FI_ENETUNREACH: i32 = 101;
pub const FI_ECONNABORTED: i32 = 103;
pub const FI_ECONNRESET: i32 = 104;
pub const FI_ENOTCONN: i32 = 107;
pub const FI_ESHUTDOWN: i32 = 108;
pub const FI_ETIMEDOUT: i32 = 110;
pub const FI_ECONNREFUSED: i32 = 111;
pub const FI_EHOSTDOWN: i32 = 112;
pub const FI_EHOSTUNREACH: i32 = 113;
pub const FI_EREMOTEIO: i32 = 121;
pub const FI_ECANCELED: i32 = 125;
pub const FI_EKEYREJECTED: i32 = 129;
pub const FI_ETOOSMALL: i32 = 257;
pub const FI_EAVAIL: i32 = 259;
pub const FI_ETRUNC: i32 = 265;

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("these bindings are for 64-bit Linux");
