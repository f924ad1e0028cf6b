//! The bindings are laid out as C lays them out: every structure's size and fields, and every
//! constant, against what `constants.c` printed from the headers of libfabric 1.17 and 2.6. Nothing
//! of libfabric is needed to run it.

mod v1_17;
mod v2_6;

use std::collections::BTreeMap;
use std::mem::{offset_of, size_of};

use kvasir_transfer_libfabric::bindings::*;

/// Name, size, and fields with their offsets.
pub type Structure = (&'static str, usize, &'static [(&'static str, usize)]);

/// How a structure of ours may differ in size from that of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Length {
    /// Equal: in arrays, or embedded in others.
    Same,
    /// libfabric allocates it: only its beginning is written down.
    AtMost,
    /// We allocate it, and libraries of other versions use more of it.
    AtLeast,
}

struct Ours {
    size: usize,
    length: Length,
    fields: BTreeMap<&'static str, usize>,
}

macro_rules! ours {
    ($table:ident, $length:ident, $name:ident: $($field:ident),+) => {
        $table.insert(stringify!($name), Ours {
            size: size_of::<$name>(),
            length: Length::$length,
            fields: BTreeMap::from([$((stringify!($field), offset_of!($name, $field))),+]),
        });
    };
}

fn ours() -> BTreeMap<&'static str, Ours> {
    let mut t = BTreeMap::new();
    ours!(t, Same, fid: fclass, context, ops);
    ours!(t, AtMost, fi_ops: size, close, bind, control);
    ours!(t, Same, fi_info: next, caps, mode, addr_format, src_addrlen, dest_addrlen, src_addr,
        dest_addr, handle, tx_attr, rx_attr, ep_attr, domain_attr, fabric_attr, nic);
    ours!(t, AtMost, fi_tx_attr: caps, mode, op_flags, msg_order, comp_order, inject_size, size,
        iov_limit, rma_iov_limit);
    ours!(t, AtMost, fi_rx_attr: caps, mode, op_flags, msg_order, comp_order, total_buffered_recv,
        size, iov_limit);
    ours!(t, AtMost, fi_ep_attr: protocol, protocol_version, max_msg_size, msg_prefix_size);
    ours!(t, AtMost, fi_domain_attr: domain, name, threading, control_progress, data_progress,
        resource_mgmt, av_type, mr_mode, mr_key_size, cq_data_size, cq_cnt);
    ours!(t, AtMost, fi_fabric_attr: fabric, name, prov_name, prov_version, api_version);
    ours!(t, AtMost, fid_nic: fid, device_attr, bus_attr, link_attr, prov_attr);
    ours!(t, AtMost, fi_device_attr: name, device_id, device_version, vendor_id, driver, firmware);
    ours!(t, Same, fi_pci_attr: domain_id, bus_id, device_id, function_id);
    ours!(t, Same, fi_bus_attr: bus_type, pci);
    ours!(t, AtMost, fi_link_attr: address, mtu, speed, state, network_type);
    ours!(t, AtMost, fid_fabric: fid, ops, api_version);
    ours!(t, AtMost, fi_ops_fabric: size, domain, trywait);
    ours!(t, AtMost, fid_domain: fid, ops, mr);
    ours!(t, AtMost, fi_ops_domain: size, av_open, cq_open, endpoint);
    ours!(t, AtMost, fi_ops_mr: size, regattr);
    ours!(t, AtMost, fid_mr: fid, mem_desc, key);
    ours!(t, AtLeast, fi_mr_attr: mr_iov, iov_count, access, offset, requested_key, context,
        auth_key_size, auth_key, iface, device, hmem_data);
    ours!(t, Same, fi_mr_dmabuf: fd, offset, len, base_addr);
    ours!(t, AtMost, fid_av: fid, ops);
    ours!(t, Same, fi_av_attr: rx_ctx_bits, count, ep_per_node, name, map_addr, flags);
    ours!(t, AtMost, fi_ops_av: size, insert, remove);
    ours!(t, AtMost, fid_cq: fid, ops);
    ours!(t, Same, fi_cq_attr: size, flags, format, wait_obj, signaling_vector, wait_cond, wait_set);
    ours!(t, AtMost, fi_ops_cq: size, read, readfrom, readerr, strerror);
    ours!(t, Same, fi_cq_data_entry: op_context, flags, len, buf, data);
    ours!(t, AtLeast, fi_cq_err_entry: op_context, flags, len, buf, data, tag, olen, err, prov_errno,
        err_data, err_data_size, src_addr);
    ours!(t, AtMost, fid_ep: fid, ops, cm, msg, rma);
    ours!(t, AtMost, fi_ops_ep: size, getopt, setopt);
    ours!(t, AtMost, fi_ops_cm: size, getname);
    ours!(t, AtMost, fi_ops_msg: size, recv, send);
    ours!(t, AtMost, fi_ops_rma: size, read, write, writemsg, writedata);
    ours!(t, Same, fi_rma_iov: addr, len, key);
    ours!(t, Same, fi_msg_rma: msg_iov, desc, iov_count, addr, rma_iov, rma_iov_count, context, data);
    ours!(t, Same, fi_context2: internal);
    ours!(t, Same, iovec: iov_base, iov_len);
    t
}

macro_rules! values {
    ($($name:ident),+ $(,)?) => { BTreeMap::from([$((stringify!($name), $name as u64)),+]) };
}

fn our_values() -> BTreeMap<&'static str, u64> {
    values![
        FI_MSG,
        FI_RMA,
        FI_READ,
        FI_WRITE,
        FI_RECV,
        FI_SEND,
        FI_TRANSMIT,
        FI_REMOTE_READ,
        FI_REMOTE_WRITE,
        FI_REMOTE_CQ_DATA,
        FI_COMPLETION,
        FI_INJECT,
        FI_DELIVERY_COMPLETE,
        FI_HMEM,
        FI_SOURCE,
        FI_CONTEXT,
        FI_CONTEXT2,
        FI_MR_DMABUF,
        FI_ADDR_UNSPEC,
        FI_SOCKADDR,
        FI_SOCKADDR_IN,
        FI_SOCKADDR_IN6,
        FI_ADDR_STR,
        FI_ADDR_EFA,
        FI_AV_MAP,
        FI_AV_TABLE,
        FI_MR_LOCAL,
        FI_MR_VIRT_ADDR,
        FI_MR_ALLOCATED,
        FI_MR_PROV_KEY,
        FI_MR_HMEM,
        FI_PROGRESS_AUTO,
        FI_PROGRESS_MANUAL,
        FI_THREAD_SAFE,
        FI_THREAD_DOMAIN,
        FI_EP_RDM,
        FI_BUS_PCI,
        FI_GETWAIT,
        FI_ENABLE,
        FI_WAIT_NONE,
        FI_WAIT_FD,
        FI_CQ_FORMAT_DATA,
        FI_CQ_COND_NONE,
        FI_OPT_ENDPOINT,
        FI_HMEM_SYSTEM,
        FI_HMEM_CUDA,
        FI_HMEM_ROCR,
        FI_HMEM_ZE,
        FI_HMEM_NEURON,
        FI_HMEM_SYNAPSEAI,
        FI_OPT_SHARED_MEMORY_PERMITTED,
        FI_OPT_INJECT_RMA_SIZE,
        FI_OPT_MAX_RMA_SIZE,
        FI_EINTR,
        FI_EIO,
        FI_EBADF,
        FI_EAGAIN,
        FI_ENOMEM,
        FI_EACCES,
        FI_EBUSY,
        FI_ENODEV,
        FI_EINVAL,
        FI_ENOSYS,
        FI_ENODATA,
        FI_EMSGSIZE,
        FI_ENOPROTOOPT,
        FI_EOPNOTSUPP,
        FI_ENETDOWN,
        FI_ENETUNREACH,
        FI_ECONNABORTED,
        FI_ECONNRESET,
        FI_ENOTCONN,
        FI_ESHUTDOWN,
        FI_ETIMEDOUT,
        FI_ECONNREFUSED,
        FI_EHOSTDOWN,
        FI_EHOSTUNREACH,
        FI_EREMOTEIO,
        FI_ECANCELED,
        FI_EKEYREJECTED,
        FI_ETOOSMALL,
        FI_EAVAIL,
        FI_ETRUNC,
        FI_EADDRNOTAVAIL,
        FI_ENOENT,
        FI_EPERM,
        FI_EFAULT,
        FI_EMFILE,
        FI_ENOSPC,
    ]
}

/// What of `headers` our bindings have differently, or not at all.
fn differences(headers: &[Structure]) -> Vec<String> {
    let ours = ours();
    let mut found = Vec::new();
    for (name, size, fields) in headers {
        let Some(mine) = ours.get(name) else {
            found.push(format!("{name} is not compared"));
            continue;
        };
        let fits = match mine.length {
            Length::Same => mine.size == *size,
            Length::AtMost => mine.size <= *size,
            Length::AtLeast => mine.size >= *size,
        };
        if !fits {
            found.push(format!("{name} has {} bytes, {size} in C", mine.size));
        }
        for (field, offset) in *fields {
            match mine.fields.get(field) {
                Some(at) if at == offset => {}
                at => found.push(format!("{name}.{field} at {at:?}, {offset} in C")),
            }
        }
    }
    found
}

fn different_values(headers: &[(&'static str, u64)]) -> Vec<String> {
    let ours = our_values();
    headers
        .iter()
        // Negative, and printed as 32 bits.
        .filter(|(name, _)| *name != "FI_OPT_EFA_EMULATED_WRITE")
        .filter(|(name, value)| ours.get(name) != Some(value))
        .map(|(name, value)| format!("{name} is {:?}, {value} in C", ours.get(name)))
        .collect()
}

#[test]
fn structures_are_laid_out_as_in_libfabric_1_17() {
    assert_eq!(differences(v1_17::STRUCTURES), Vec::<String>::new());
}

#[test]
fn structures_are_laid_out_as_in_libfabric_2_6() {
    assert_eq!(differences(v2_6::STRUCTURES), Vec::<String>::new());
}

#[test]
fn constants_are_those_of_libfabric_1_17_and_2_6() {
    assert_eq!(different_values(v1_17::VALUES), Vec::<String>::new());
    assert_eq!(different_values(v2_6::VALUES), Vec::<String>::new());
    let emulated = v2_6::VALUES.iter().find(|(name, _)| *name == "FI_OPT_EFA_EMULATED_WRITE");
    let (_, printed) = emulated.expect("printed from the headers of 2.6");
    assert_eq!(u64::from(FI_OPT_EFA_EMULATED_WRITE as u32), *printed);
}

#[test]
fn every_structure_of_the_bindings_is_compared() {
    let printed: Vec<&str> = v2_6::STRUCTURES.iter().map(|(name, ..)| *name).collect();
    let missing: Vec<&str> = ours().into_keys().filter(|name| !printed.contains(name)).collect();
    assert_eq!(missing, Vec::<&str>::new());
}

#[test]
fn a_wrong_offset_or_size_would_be_found() {
    let wrong: &[Structure] = &[("fid", 32, &[("fclass", 8)]), ("fi_new", 8, &[])];
    assert_eq!(
        differences(wrong),
        ["fid has 24 bytes, 32 in C", "fid.fclass at Some(0), 8 in C", "fi_new is not compared"]
    );
}
