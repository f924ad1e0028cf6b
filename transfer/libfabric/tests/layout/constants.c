/* Prints, as Rust, the sizes and offsets of libfabric's structures and the values of its constants, as
 * the C compiler sees them, for `main.rs` beside this file to compare with `src/bindings.rs`.
 *
 * To run it again, with the headers of the version that is meant (here those that are installed):
 *
 *     cc -w -I /usr/include constants.c -o /tmp/constants && /tmp/constants > v1_17.rs && rustfmt v1_17.rs
 *
 * It needs headers only: nothing is linked with libfabric. With headers older than 1.20 the names that
 * came later are left out.
 */
#include <stddef.h>
#include <stdbool.h>
#include <stdio.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_ext.h>
#include <rdma/fi_rma.h>

#define BEGIN(type) printf("    (\"%s\", %zu, &[", #type, sizeof(struct type))
#define AT(type, field) printf("(\"%s\", %zu), ", #field, offsetof(struct type, field))
#define END() printf("]),\n")
#define IS(name) printf("    (\"%s\", 0x%llx),\n", #name, (unsigned long long)(name))

int main(void)
{
	printf("//! Printed by `constants.c` from the headers of libfabric %d.%d: see there.\n\n",
	       FI_MAJOR_VERSION, FI_MINOR_VERSION);
	printf("/// Structure, its size, and its fields with their offsets.\n");
	printf("pub const STRUCTURES: &[super::Structure] = &[\n");
	BEGIN(fid); AT(fid, fclass); AT(fid, context); AT(fid, ops); END();
	BEGIN(fi_ops); AT(fi_ops, size); AT(fi_ops, close); AT(fi_ops, bind); AT(fi_ops, control); END();
	BEGIN(fi_info); AT(fi_info, next); AT(fi_info, caps); AT(fi_info, mode); AT(fi_info, addr_format);
	AT(fi_info, src_addrlen); AT(fi_info, dest_addrlen); AT(fi_info, src_addr); AT(fi_info, dest_addr);
	AT(fi_info, handle); AT(fi_info, tx_attr); AT(fi_info, rx_attr); AT(fi_info, ep_attr);
	AT(fi_info, domain_attr); AT(fi_info, fabric_attr); AT(fi_info, nic); END();
	BEGIN(fi_tx_attr); AT(fi_tx_attr, caps); AT(fi_tx_attr, mode); AT(fi_tx_attr, op_flags);
	AT(fi_tx_attr, msg_order); AT(fi_tx_attr, comp_order); AT(fi_tx_attr, inject_size);
	AT(fi_tx_attr, size); AT(fi_tx_attr, iov_limit); AT(fi_tx_attr, rma_iov_limit); END();
	BEGIN(fi_rx_attr); AT(fi_rx_attr, caps); AT(fi_rx_attr, mode); AT(fi_rx_attr, op_flags);
	AT(fi_rx_attr, msg_order); AT(fi_rx_attr, comp_order); AT(fi_rx_attr, total_buffered_recv);
	AT(fi_rx_attr, size); AT(fi_rx_attr, iov_limit); END();
	/* `type` is a word of Rust: its place is the beginning. */
	BEGIN(fi_ep_attr); AT(fi_ep_attr, protocol); AT(fi_ep_attr, protocol_version);
	AT(fi_ep_attr, max_msg_size); AT(fi_ep_attr, msg_prefix_size); END();
	BEGIN(fi_domain_attr); AT(fi_domain_attr, domain); AT(fi_domain_attr, name);
	AT(fi_domain_attr, threading); AT(fi_domain_attr, control_progress);
	AT(fi_domain_attr, data_progress); AT(fi_domain_attr, resource_mgmt); AT(fi_domain_attr, av_type);
	AT(fi_domain_attr, mr_mode); AT(fi_domain_attr, mr_key_size); AT(fi_domain_attr, cq_data_size);
	AT(fi_domain_attr, cq_cnt); END();
	BEGIN(fi_fabric_attr); AT(fi_fabric_attr, fabric); AT(fi_fabric_attr, name);
	AT(fi_fabric_attr, prov_name); AT(fi_fabric_attr, prov_version); AT(fi_fabric_attr, api_version); END();
	BEGIN(fid_nic); AT(fid_nic, fid); AT(fid_nic, device_attr); AT(fid_nic, bus_attr);
	AT(fid_nic, link_attr); AT(fid_nic, prov_attr); END();
	BEGIN(fi_device_attr); AT(fi_device_attr, name); AT(fi_device_attr, device_id);
	AT(fi_device_attr, device_version); AT(fi_device_attr, vendor_id); AT(fi_device_attr, driver);
	AT(fi_device_attr, firmware); END();
	BEGIN(fi_pci_attr); AT(fi_pci_attr, domain_id); AT(fi_pci_attr, bus_id); AT(fi_pci_attr, device_id);
	AT(fi_pci_attr, function_id); END();
	BEGIN(fi_bus_attr); AT(fi_bus_attr, bus_type);
	printf("(\"pci\", %zu), ", offsetof(struct fi_bus_attr, attr.pci)); END();
	BEGIN(fi_link_attr); AT(fi_link_attr, address); AT(fi_link_attr, mtu); AT(fi_link_attr, speed);
	AT(fi_link_attr, state); AT(fi_link_attr, network_type); END();
	BEGIN(fid_fabric); AT(fid_fabric, fid); AT(fid_fabric, ops); AT(fid_fabric, api_version); END();
	BEGIN(fi_ops_fabric); AT(fi_ops_fabric, size); AT(fi_ops_fabric, domain); AT(fi_ops_fabric, trywait); END();
	BEGIN(fid_domain); AT(fid_domain, fid); AT(fid_domain, ops); AT(fid_domain, mr); END();
	BEGIN(fi_ops_domain); AT(fi_ops_domain, size); AT(fi_ops_domain, av_open); AT(fi_ops_domain, cq_open);
	AT(fi_ops_domain, endpoint); END();
	BEGIN(fi_ops_mr); AT(fi_ops_mr, size); AT(fi_ops_mr, regattr); END();
	BEGIN(fid_mr); AT(fid_mr, fid); AT(fid_mr, mem_desc); AT(fid_mr, key); END();
	BEGIN(fi_mr_attr); AT(fi_mr_attr, mr_iov); AT(fi_mr_attr, iov_count); AT(fi_mr_attr, access);
	AT(fi_mr_attr, offset); AT(fi_mr_attr, requested_key); AT(fi_mr_attr, context);
	AT(fi_mr_attr, auth_key_size); AT(fi_mr_attr, auth_key); AT(fi_mr_attr, iface); AT(fi_mr_attr, device);
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(1, 20)
	AT(fi_mr_attr, hmem_data);
#endif
	END();
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(1, 20)
	BEGIN(fi_mr_dmabuf); AT(fi_mr_dmabuf, fd); AT(fi_mr_dmabuf, offset); AT(fi_mr_dmabuf, len);
	AT(fi_mr_dmabuf, base_addr); END();
#endif
	BEGIN(fid_av); AT(fid_av, fid); AT(fid_av, ops); END();
	BEGIN(fi_av_attr); AT(fi_av_attr, rx_ctx_bits); AT(fi_av_attr, count); AT(fi_av_attr, ep_per_node);
	AT(fi_av_attr, name); AT(fi_av_attr, map_addr); AT(fi_av_attr, flags); END();
	BEGIN(fi_ops_av); AT(fi_ops_av, size); AT(fi_ops_av, insert); AT(fi_ops_av, remove); END();
	BEGIN(fid_cq); AT(fid_cq, fid); AT(fid_cq, ops); END();
	BEGIN(fi_cq_attr); AT(fi_cq_attr, size); AT(fi_cq_attr, flags); AT(fi_cq_attr, format);
	AT(fi_cq_attr, wait_obj); AT(fi_cq_attr, signaling_vector); AT(fi_cq_attr, wait_cond);
	AT(fi_cq_attr, wait_set); END();
	BEGIN(fi_ops_cq); AT(fi_ops_cq, size); AT(fi_ops_cq, read); AT(fi_ops_cq, readfrom); AT(fi_ops_cq, readerr);
	AT(fi_ops_cq, strerror); END();
	BEGIN(fi_cq_data_entry); AT(fi_cq_data_entry, op_context); AT(fi_cq_data_entry, flags);
	AT(fi_cq_data_entry, len); AT(fi_cq_data_entry, buf); AT(fi_cq_data_entry, data); END();
	BEGIN(fi_cq_err_entry); AT(fi_cq_err_entry, op_context); AT(fi_cq_err_entry, flags);
	AT(fi_cq_err_entry, len); AT(fi_cq_err_entry, buf); AT(fi_cq_err_entry, data); AT(fi_cq_err_entry, tag);
	AT(fi_cq_err_entry, olen); AT(fi_cq_err_entry, err); AT(fi_cq_err_entry, prov_errno);
	AT(fi_cq_err_entry, err_data); AT(fi_cq_err_entry, err_data_size);
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(1, 20)
	AT(fi_cq_err_entry, src_addr);
#endif
	END();
	BEGIN(fid_ep); AT(fid_ep, fid); AT(fid_ep, ops); AT(fid_ep, cm); AT(fid_ep, msg); AT(fid_ep, rma); END();
	BEGIN(fi_ops_ep); AT(fi_ops_ep, size); AT(fi_ops_ep, getopt); AT(fi_ops_ep, setopt); END();
	BEGIN(fi_ops_cm); AT(fi_ops_cm, size); AT(fi_ops_cm, getname); END();
	BEGIN(fi_ops_msg); AT(fi_ops_msg, size); AT(fi_ops_msg, recv); AT(fi_ops_msg, send); END();
	BEGIN(fi_ops_rma); AT(fi_ops_rma, size); AT(fi_ops_rma, read); AT(fi_ops_rma, write);
	AT(fi_ops_rma, writemsg); AT(fi_ops_rma, writedata); END();
	BEGIN(fi_rma_iov); AT(fi_rma_iov, addr); AT(fi_rma_iov, len); AT(fi_rma_iov, key); END();
	BEGIN(fi_msg_rma); AT(fi_msg_rma, msg_iov); AT(fi_msg_rma, desc); AT(fi_msg_rma, iov_count);
	AT(fi_msg_rma, addr); AT(fi_msg_rma, rma_iov); AT(fi_msg_rma, rma_iov_count); AT(fi_msg_rma, context);
	AT(fi_msg_rma, data); END();
	BEGIN(fi_context2); AT(fi_context2, internal); END();
	BEGIN(iovec); AT(iovec, iov_base); AT(iovec, iov_len); END();
	printf("];\n\n/// Constant and its value.\npub const VALUES: &[(&str, u64)] = &[\n");
	IS(FI_MSG); IS(FI_RMA); IS(FI_READ); IS(FI_WRITE); IS(FI_RECV); IS(FI_SEND); IS(FI_TRANSMIT);
	IS(FI_REMOTE_READ); IS(FI_REMOTE_WRITE); IS(FI_REMOTE_CQ_DATA); IS(FI_COMPLETION); IS(FI_INJECT);
	IS(FI_DELIVERY_COMPLETE); IS(FI_HMEM); IS(FI_SOURCE); IS(FI_CONTEXT); IS(FI_CONTEXT2);
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(1, 20)
	IS(FI_MR_DMABUF);
#endif
	IS(FI_ADDR_UNSPEC); IS(FI_SOCKADDR); IS(FI_SOCKADDR_IN); IS(FI_SOCKADDR_IN6); IS(FI_ADDR_STR);
	IS(FI_ADDR_EFA); IS(FI_AV_MAP); IS(FI_AV_TABLE);
	IS(FI_MR_LOCAL); IS(FI_MR_VIRT_ADDR); IS(FI_MR_ALLOCATED); IS(FI_MR_PROV_KEY); IS(FI_MR_HMEM);
	IS(FI_PROGRESS_AUTO); IS(FI_PROGRESS_MANUAL); IS(FI_THREAD_SAFE); IS(FI_THREAD_DOMAIN);
	IS(FI_EP_RDM); IS(FI_BUS_PCI); IS(FI_GETWAIT); IS(FI_ENABLE); IS(FI_WAIT_NONE); IS(FI_WAIT_FD);
	IS(FI_CQ_FORMAT_DATA); IS(FI_CQ_COND_NONE); IS(FI_OPT_ENDPOINT);
	IS(FI_HMEM_SYSTEM); IS(FI_HMEM_CUDA); IS(FI_HMEM_ROCR); IS(FI_HMEM_ZE); IS(FI_HMEM_NEURON); IS(FI_HMEM_SYNAPSEAI);
#if FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION) >= FI_VERSION(2, 0)
	IS(FI_OPT_SHARED_MEMORY_PERMITTED); IS(FI_OPT_INJECT_RMA_SIZE); IS(FI_OPT_MAX_RMA_SIZE);
	printf("    (\"FI_OPT_EFA_EMULATED_WRITE\", 0x%x),\n", (unsigned)FI_OPT_EFA_EMULATED_WRITE);
#endif
	IS(FI_EINTR); IS(FI_EIO); IS(FI_EBADF); IS(FI_EAGAIN); IS(FI_ENOMEM); IS(FI_EACCES); IS(FI_EBUSY);
	IS(FI_ENODEV); IS(FI_EINVAL); IS(FI_ENOSYS); IS(FI_ENODATA); IS(FI_EMSGSIZE); IS(FI_ENOPROTOOPT);
	IS(FI_EOPNOTSUPP); IS(FI_ENETDOWN); IS(FI_ENETUNREACH); IS(FI_ECONNABORTED); IS(FI_ECONNRESET);
	IS(FI_ENOTCONN); IS(FI_ESHUTDOWN); IS(FI_ETIMEDOUT); IS(FI_ECONNREFUSED); IS(FI_EHOSTDOWN);
	IS(FI_EHOSTUNREACH); IS(FI_EREMOTEIO); IS(FI_ECANCELED); IS(FI_EKEYREJECTED); IS(FI_ETOOSMALL);
	IS(FI_EAVAIL); IS(FI_ETRUNC); IS(FI_EADDRNOTAVAIL); IS(FI_ENOENT); IS(FI_EPERM);
	IS(FI_EFAULT); IS(FI_EMFILE); IS(FI_ENOSPC);
	printf("];\n");
	return 0;
}
