//! The C interface of libibverbs (`infiniband/verbs.h`, ABI `libibverbs.so.1`), as far as this crate
//! uses it. Written by hand, because the generated form of the whole header is twenty times as long;
//! `layout.txt`, which is made from the C header, proves sizes, offsets and constants.
//!
//! Structures that only libibverbs allocates are declared up to the last field that is read here.
//! Nothing in this file links anything: functions are looked up in `library.rs`.
#![allow(non_camel_case_types, reason = "the names of the C header")]
#![allow(dead_code, reason = "fields that only libibverbs reads still have their place")]

use std::ffi::{c_char, c_int, c_uint, c_void};

#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_device {
    pub ops: [*mut c_void; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
}

type Unused = Option<unsafe extern "C" fn()>;

pub(crate) type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub(crate) type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
pub(crate) type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub(crate) type PostRecv =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// What the header calls through, rather than through exported functions.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_context_ops {
    pub unused_to_create_cq: [Unused; 11],
    pub poll_cq: Option<PollCq>,
    pub req_notify_cq: Option<ReqNotifyCq>,
    pub unused_to_modify_srq: [Unused; 7],
    pub post_srq_recv: Unused,
    pub unused_to_destroy_qp: [Unused; 4],
    pub post_send: Option<PostSend>,
    pub post_recv: Option<PostRecv>,
    pub unused_to_async_event: [Unused; 5],
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_context {
    pub device: *mut ibv_device,
    pub ops: ibv_context_ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_pd {
    pub context: *mut ibv_context,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_mr {
    pub context: *mut ibv_context,
    pub pd: *mut ibv_pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_comp_channel {
    pub context: *mut ibv_context,
    pub fd: c_int,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_cq {
    pub context: *mut ibv_context,
    pub channel: *mut ibv_comp_channel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: c_int,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_srq {
    pub context: *mut ibv_context,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_ah {
    pub context: *mut ibv_context,
}

#[repr(C)]
#[derive(Debug)]
pub(crate) struct ibv_qp {
    pub context: *mut ibv_context,
    pub qp_context: *mut c_void,
    pub pd: *mut ibv_pd,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: c_uint,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_device_attr {
    pub fw_ver: [c_char; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_uint,
    pub max_ee: c_int,
    pub max_rdd: c_int,
    pub max_mw: c_int,
    pub max_raw_ipv6_qp: c_int,
    pub max_raw_ethy_qp: c_int,
    pub max_mcast_grp: c_int,
    pub max_mcast_qp_attach: c_int,
    pub max_total_mcast_qp_attach: c_int,
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_port_attr {
    pub state: c_uint,
    pub max_mtu: c_uint,
    pub active_mtu: c_uint,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
    pub active_speed_ex: u32,
}

/// A union in C, aligned as its pair of 64-bit halves.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_gid {
    pub raw: [u8; 16],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_gid_entry {
    pub gid: ibv_gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_global_route {
    pub dgid: ibv_gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_ah_attr {
    pub grh: ibv_global_route,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_qp_cap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_qp_init_attr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub cap: ibv_qp_cap,
    pub qp_type: c_uint,
    pub sq_sig_all: c_int,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_qp_attr {
    pub qp_state: c_uint,
    pub cur_qp_state: c_uint,
    pub path_mtu: c_uint,
    pub path_mig_state: c_uint,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: c_uint,
    pub cap: ibv_qp_cap,
    pub ah_attr: ibv_ah_attr,
    pub alt_ah_attr: ibv_ah_attr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct rdma_target {
    pub remote_addr: u64,
    pub rkey: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ud_target {
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
}

/// `wr` in C; its longest member, atomics, is not used here but gives the size.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union send_target {
    pub rdma: rdma_target,
    pub ud: ud_target,
    pub atomic: [u64; 4],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_send_wr {
    pub wr_id: u64,
    pub next: *mut ibv_send_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub opcode: c_uint,
    pub send_flags: c_uint,
    /// Big endian.
    pub imm_data: u32,
    pub wr: send_target,
    pub remote_srqn: u32,
    /// `bind_mw` and `tso` in C.
    pub unused: [u64; 6],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_recv_wr {
    pub wr_id: u64,
    pub next: *mut ibv_recv_wr,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ibv_wc {
    pub wr_id: u64,
    pub status: c_uint,
    pub opcode: c_uint,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Big endian.
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: c_uint,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union event_element {
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
    pub port_num: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_async_event {
    pub element: event_element,
    pub event_type: c_uint,
}

pub(crate) const IBV_TRANSPORT_IB: c_int = 0;
pub(crate) const IBV_TRANSPORT_IWARP: c_int = 1;

pub(crate) const IBV_PORT_DOWN: c_uint = 1;
pub(crate) const IBV_PORT_INIT: c_uint = 2;
pub(crate) const IBV_PORT_ARMED: c_uint = 3;
pub(crate) const IBV_PORT_ACTIVE: c_uint = 4;

pub(crate) const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
pub(crate) const IBV_LINK_LAYER_ETHERNET: u8 = 2;

pub(crate) const IBV_GID_TYPE_IB: u32 = 0;
pub(crate) const IBV_GID_TYPE_ROCE_V1: u32 = 1;
pub(crate) const IBV_GID_TYPE_ROCE_V2: u32 = 2;

pub(crate) const IBV_ACCESS_LOCAL_WRITE: c_uint = 1;
pub(crate) const IBV_ACCESS_REMOTE_WRITE: c_uint = 2;
pub(crate) const IBV_ACCESS_REMOTE_READ: c_uint = 4;
pub(crate) const IBV_ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;

pub(crate) const IBV_QPT_RC: c_uint = 2;
pub(crate) const IBV_QPT_UD: c_uint = 4;

pub(crate) const IBV_QPS_RESET: c_uint = 0;
pub(crate) const IBV_QPS_INIT: c_uint = 1;
pub(crate) const IBV_QPS_RTR: c_uint = 2;
pub(crate) const IBV_QPS_RTS: c_uint = 3;
pub(crate) const IBV_QPS_SQD: c_uint = 4;
pub(crate) const IBV_QPS_SQE: c_uint = 5;
pub(crate) const IBV_QPS_ERR: c_uint = 6;

pub(crate) const IBV_QP_STATE: c_uint = 1;
pub(crate) const IBV_QP_ACCESS_FLAGS: c_uint = 1 << 3;
pub(crate) const IBV_QP_PKEY_INDEX: c_uint = 1 << 4;
pub(crate) const IBV_QP_PORT: c_uint = 1 << 5;
pub(crate) const IBV_QP_QKEY: c_uint = 1 << 6;
pub(crate) const IBV_QP_AV: c_uint = 1 << 7;
pub(crate) const IBV_QP_PATH_MTU: c_uint = 1 << 8;
pub(crate) const IBV_QP_TIMEOUT: c_uint = 1 << 9;
pub(crate) const IBV_QP_RETRY_CNT: c_uint = 1 << 10;
pub(crate) const IBV_QP_RNR_RETRY: c_uint = 1 << 11;
pub(crate) const IBV_QP_RQ_PSN: c_uint = 1 << 12;
pub(crate) const IBV_QP_MAX_QP_RD_ATOMIC: c_uint = 1 << 13;
pub(crate) const IBV_QP_MIN_RNR_TIMER: c_uint = 1 << 15;
pub(crate) const IBV_QP_SQ_PSN: c_uint = 1 << 16;
pub(crate) const IBV_QP_MAX_DEST_RD_ATOMIC: c_uint = 1 << 17;
pub(crate) const IBV_QP_DEST_QPN: c_uint = 1 << 20;

pub(crate) const IBV_WR_RDMA_WRITE: c_uint = 0;
pub(crate) const IBV_WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
pub(crate) const IBV_WR_SEND: c_uint = 2;
pub(crate) const IBV_WR_SEND_WITH_IMM: c_uint = 3;
pub(crate) const IBV_WR_RDMA_READ: c_uint = 4;

pub(crate) const IBV_SEND_FENCE: c_uint = 1;
pub(crate) const IBV_SEND_SIGNALED: c_uint = 2;
pub(crate) const IBV_SEND_SOLICITED: c_uint = 4;
pub(crate) const IBV_SEND_INLINE: c_uint = 8;

pub(crate) const IBV_WC_SUCCESS: c_uint = 0;
pub(crate) const IBV_WC_LOC_LEN_ERR: c_uint = 1;
pub(crate) const IBV_WC_LOC_QP_OP_ERR: c_uint = 2;
pub(crate) const IBV_WC_LOC_PROT_ERR: c_uint = 4;
pub(crate) const IBV_WC_WR_FLUSH_ERR: c_uint = 5;
pub(crate) const IBV_WC_BAD_RESP_ERR: c_uint = 7;
pub(crate) const IBV_WC_LOC_ACCESS_ERR: c_uint = 8;
pub(crate) const IBV_WC_REM_INV_REQ_ERR: c_uint = 9;
pub(crate) const IBV_WC_REM_ACCESS_ERR: c_uint = 10;
pub(crate) const IBV_WC_REM_OP_ERR: c_uint = 11;
pub(crate) const IBV_WC_RETRY_EXC_ERR: c_uint = 12;
pub(crate) const IBV_WC_RNR_RETRY_EXC_ERR: c_uint = 13;
pub(crate) const IBV_WC_REM_ABORT_ERR: c_uint = 16;
pub(crate) const IBV_WC_FATAL_ERR: c_uint = 19;
pub(crate) const IBV_WC_RESP_TIMEOUT_ERR: c_uint = 20;
pub(crate) const IBV_WC_GENERAL_ERR: c_uint = 21;

pub(crate) const IBV_WC_SEND: c_uint = 0;
pub(crate) const IBV_WC_RDMA_WRITE: c_uint = 1;
pub(crate) const IBV_WC_RDMA_READ: c_uint = 2;
pub(crate) const IBV_WC_RECV: c_uint = 128;
pub(crate) const IBV_WC_RECV_RDMA_WITH_IMM: c_uint = 129;

pub(crate) const IBV_WC_GRH: c_uint = 1;
pub(crate) const IBV_WC_WITH_IMM: c_uint = 2;

pub(crate) const IBV_EVENT_CQ_ERR: c_uint = 0;
pub(crate) const IBV_EVENT_QP_FATAL: c_uint = 1;
pub(crate) const IBV_EVENT_QP_REQ_ERR: c_uint = 2;
pub(crate) const IBV_EVENT_QP_ACCESS_ERR: c_uint = 3;
pub(crate) const IBV_EVENT_DEVICE_FATAL: c_uint = 8;
pub(crate) const IBV_EVENT_PORT_ACTIVE: c_uint = 9;
pub(crate) const IBV_EVENT_PORT_ERR: c_uint = 10;
pub(crate) const IBV_EVENT_LID_CHANGE: c_uint = 11;
pub(crate) const IBV_EVENT_PKEY_CHANGE: c_uint = 12;
pub(crate) const IBV_EVENT_SM_CHANGE: c_uint = 13;
pub(crate) const IBV_EVENT_CLIENT_REREGISTER: c_uint = 17;
pub(crate) const IBV_EVENT_GID_CHANGE: c_uint = 18;

// SAFETY: every type below consists of integers, arrays of integers and raw pointers, for which
// zero is a valid value; the C interface itself asks for zeroed structures.
unsafe impl Zeroed for ibv_device_attr {}
// SAFETY: as above.
unsafe impl Zeroed for ibv_port_attr {}
// SAFETY: as above.
unsafe impl Zeroed for ibv_gid_entry {}
// SAFETY: as above.
unsafe impl Zeroed for ibv_ah_attr {}
// SAFETY: as above.
unsafe impl Zeroed for ibv_qp_init_attr {}
// SAFETY: as above.
unsafe impl Zeroed for ibv_qp_attr {}
// SAFETY: as above.
unsafe impl Zeroed for ibv_send_wr {}
// SAFETY: as above.
unsafe impl Zeroed for ibv_recv_wr {}
// SAFETY: as above.
unsafe impl Zeroed for ibv_wc {}
// SAFETY: as above.
unsafe impl Zeroed for ibv_async_event {}

/// Structures of C that begin as zeros.
///
/// # Safety
/// All-zero bytes are a valid value of the type.
pub(crate) unsafe trait Zeroed: Sized {
    fn zeroed() -> Self {
        // SAFETY: the implementor of the trait answers for it.
        unsafe { std::mem::zeroed() }
    }
}
