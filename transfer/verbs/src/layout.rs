//! That the declarations in `bindings.rs` lie in memory as the C header has them. `layout.txt` says how
//! that is, and is made from the header by `tests/verbs-vm/layout`. What only libibverbs allocates is
//! declared in part, so its size is not compared; nor is that of `ibv_port_attr`, which has grown by a
//! last field since the header of Debian 12, and of which a library fills what it knows.

use std::mem::{offset_of, size_of};

use crate::bindings::*;

fn declared() -> String {
    let mut lines = Vec::new();
    macro_rules! sizes {
        ($($of:ident)*) => { $(lines.push(format!("{} {}", stringify!($of), size_of::<$of>()));)* };
    }
    macro_rules! offsets {
        ($($of:ident: $($($field:ident).+),*;)*) => { $($(
            let field = [$(stringify!($field)),+].join(".");
            lines.push(format!("{}.{field} {}", stringify!($of), offset_of!($of, $($field).+)));
        )*)* };
    }
    macro_rules! constants {
        ($($name:ident)*) => { $(lines.push(format!("{} {}", stringify!($name), $name));)* };
    }
    sizes! {
        ibv_device_attr ibv_gid ibv_gid_entry ibv_global_route ibv_ah_attr ibv_qp_cap
        ibv_qp_init_attr ibv_qp_attr ibv_sge ibv_send_wr ibv_recv_wr ibv_wc ibv_async_event
    }
    offsets! {
        ibv_device: node_type, transport_type;
        ibv_context: device, ops.poll_cq, ops.req_notify_cq, ops.post_srq_recv, ops.post_send,
            ops.post_recv, cmd_fd, async_fd, num_comp_vectors;
        ibv_pd: context;
        ibv_mr: context, pd, addr, length, handle, lkey, rkey;
        ibv_comp_channel: context, fd;
        ibv_cq: context, channel, cq_context, handle, cqe;
        ibv_srq: context;
        ibv_ah: context;
        ibv_qp: context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state;
        ibv_device_attr: fw_ver, node_guid, max_mr_size, vendor_id, max_qp, max_qp_wr, max_sge,
            max_sge_rd, max_cq, max_cqe, max_mr, max_qp_rd_atom, max_qp_init_rd_atom, atomic_cap,
            max_ah, max_srq, max_pkeys, local_ca_ack_delay, phys_port_cnt;
        ibv_port_attr: state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz, pkey_tbl_len, lid, sm_lid,
            phys_state, link_layer, flags, port_cap_flags2;
        ibv_gid_entry: gid, gid_index, port_num, gid_type, ndev_ifindex;
        ibv_global_route: dgid, flow_label, sgid_index, hop_limit, traffic_class;
        ibv_ah_attr: grh, dlid, sl, src_path_bits, static_rate, is_global, port_num;
        ibv_qp_cap: max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
        ibv_qp_init_attr: qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all;
        ibv_qp_attr: qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn,
            dest_qp_num, qp_access_flags, cap, ah_attr, alt_ah_attr, pkey_index, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, alt_timeout,
            rate_limit;
        ibv_sge: addr, length, lkey;
        ibv_send_wr: wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data,
            wr.rdma.remote_addr, wr.rdma.rkey, wr.ud.ah, wr.ud.remote_qpn, wr.ud.remote_qkey;
        ibv_recv_wr: wr_id, next, sg_list, num_sge;
        ibv_wc: wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags,
            pkey_index, slid, sl, dlid_path_bits;
        ibv_async_event: element.cq, element.qp, element.port_num, event_type;
    }
    constants! {
        IBV_TRANSPORT_IB IBV_TRANSPORT_IWARP
        IBV_PORT_DOWN IBV_PORT_INIT IBV_PORT_ARMED IBV_PORT_ACTIVE
        IBV_LINK_LAYER_INFINIBAND IBV_LINK_LAYER_ETHERNET
        IBV_GID_TYPE_IB IBV_GID_TYPE_ROCE_V1 IBV_GID_TYPE_ROCE_V2
        IBV_ACCESS_LOCAL_WRITE IBV_ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_READ
        IBV_ACCESS_RELAXED_ORDERING
        IBV_QPT_RC IBV_QPT_UD
        IBV_QPS_RESET IBV_QPS_INIT IBV_QPS_RTR IBV_QPS_RTS IBV_QPS_SQD IBV_QPS_SQE IBV_QPS_ERR
        IBV_QP_STATE IBV_QP_ACCESS_FLAGS IBV_QP_PKEY_INDEX IBV_QP_PORT IBV_QP_QKEY IBV_QP_AV
        IBV_QP_PATH_MTU IBV_QP_TIMEOUT IBV_QP_RETRY_CNT IBV_QP_RNR_RETRY IBV_QP_RQ_PSN
        IBV_QP_MAX_QP_RD_ATOMIC IBV_QP_MIN_RNR_TIMER IBV_QP_SQ_PSN IBV_QP_MAX_DEST_RD_ATOMIC
        IBV_QP_DEST_QPN
        IBV_WR_RDMA_WRITE IBV_WR_RDMA_WRITE_WITH_IMM IBV_WR_SEND IBV_WR_SEND_WITH_IMM
        IBV_WR_RDMA_READ
        IBV_SEND_FENCE IBV_SEND_SIGNALED IBV_SEND_SOLICITED IBV_SEND_INLINE
        IBV_WC_SUCCESS IBV_WC_LOC_LEN_ERR IBV_WC_LOC_QP_OP_ERR IBV_WC_LOC_PROT_ERR
        IBV_WC_WR_FLUSH_ERR IBV_WC_BAD_RESP_ERR IBV_WC_LOC_ACCESS_ERR IBV_WC_REM_INV_REQ_ERR
        IBV_WC_REM_ACCESS_ERR IBV_WC_REM_OP_ERR IBV_WC_RETRY_EXC_ERR IBV_WC_RNR_RETRY_EXC_ERR
        IBV_WC_REM_ABORT_ERR IBV_WC_FATAL_ERR IBV_WC_RESP_TIMEOUT_ERR IBV_WC_GENERAL_ERR
        IBV_WC_SEND IBV_WC_RDMA_WRITE IBV_WC_RDMA_READ IBV_WC_RECV IBV_WC_RECV_RDMA_WITH_IMM
        IBV_WC_GRH IBV_WC_WITH_IMM
        IBV_EVENT_CQ_ERR IBV_EVENT_QP_FATAL IBV_EVENT_QP_REQ_ERR IBV_EVENT_QP_ACCESS_ERR
        IBV_EVENT_DEVICE_FATAL IBV_EVENT_PORT_ACTIVE IBV_EVENT_PORT_ERR IBV_EVENT_LID_CHANGE
        IBV_EVENT_PKEY_CHANGE IBV_EVENT_SM_CHANGE IBV_EVENT_CLIENT_REREGISTER IBV_EVENT_GID_CHANGE
    }
    lines.join("\n") + "\n"
}

#[test]
fn declarations_lie_in_memory_as_the_c_header_has_them() {
    let header = include_str!("layout.txt");
    for (declared, header) in declared().lines().zip(header.lines()) {
        assert_eq!(declared, header, "left: bindings.rs; right: infiniband/verbs.h");
    }
    assert_eq!(declared().lines().count(), header.lines().count());
}
