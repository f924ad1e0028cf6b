//! Work requests that are built once: a chain of writes of which only addresses, lengths, immediates
//! and tags change from post to post. Each has one slice, or none, which is what pages need.

use crate::bindings::{
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, Zeroed, ibv_send_wr, ibv_sge,
};
use crate::ids::WorkTag;
use crate::region::{LocalSlice, RemoteAddress};
use crate::work::{flags, set_target};

/// What one request of a template is, for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TemplateRequest {
    /// The peer is told; it must have a receive posted.
    pub has_imm: bool,
    /// As in [`Request`](crate::Request).
    pub is_signalled: bool,
    /// As in [`Request`](crate::Request).
    pub is_fenced: bool,
}

/// A chain of writes, ready to be filled in and posted with
/// [`RcQueuePair::post_template`](crate::RcQueuePair::post_template), again and again, on any queue
/// pair of the device. After a post it may be changed at once.
pub struct Template {
    requests: Box<[ibv_send_wr]>,
    /// One for each request, at the place that it points to.
    slices: Box<[ibv_sge]>,
    wanted: Box<[Wanted]>,
}

/// What posting overwrites in a request.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    tag: WorkTag,
    flags: u32,
}

// SAFETY: the pointers in the requests lead into `slices`, which is of the same owner and never moves.
unsafe impl Send for Template {}
// SAFETY: as above; nothing changes through `&self`.
unsafe impl Sync for Template {}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Template({} requests)", self.requests.len())
    }
}

impl Template {
    /// In this order, none of them set yet.
    pub fn new(requests: &[TemplateRequest]) -> Self {
        let wanted = requests.iter().map(|request| Wanted {
            tag: WorkTag(0),
            flags: flags(request.is_signalled, request.is_fenced, false),
        });
        let raw = requests.iter().map(|request| {
            let mut raw = ibv_send_wr::zeroed();
            raw.opcode =
                if request.has_imm { IBV_WR_RDMA_WRITE_WITH_IMM } else { IBV_WR_RDMA_WRITE };
            raw
        });
        Template {
            wanted: wanted.collect(),
            requests: raw.collect(),
            slices: requests.iter().map(|_| ibv_sge { addr: 0, length: 0, lkey: 0 }).collect(),
        }
    }

    /// How many requests it has.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Sets what request `index` moves: nothing for a write that is only an immediate.
    ///
    /// # Panics
    /// When the template has no such request.
    pub fn set(&mut self, index: usize, from: Option<LocalSlice>, to: RemoteAddress) {
        let request = &mut self.requests[index];
        set_target(request, to);
        // Some devices take a slice of no bytes for one of 2 GiB.
        match from.filter(|slice| slice.bytes() > 0) {
            Some(slice) => {
                self.slices[index] = slice.0;
                request.num_sge = 1;
            }
            None => request.num_sge = 0,
        }
    }

    /// Means something only for a request that has an immediate.
    ///
    /// # Panics
    /// When the template has no such request.
    pub fn set_imm(&mut self, index: usize, imm: u32) {
        self.requests[index].imm_data = imm.to_be();
    }

    /// # Panics
    /// When the template has no such request.
    pub fn set_tag(&mut self, index: usize, tag: WorkTag) {
        self.wanted[index].tag = tag;
    }

    /// The first `count` requests as [`Queue::post_raw`](crate::queue::Queue::post_raw) takes them.
    /// Their slices lie in the template.
    pub(crate) fn prepare(&mut self, count: usize) -> &mut [ibv_send_wr] {
        let slices = self.slices.as_mut_ptr();
        let requests = &mut self.requests[..count];
        for (index, (request, wanted)) in requests.iter_mut().zip(&self.wanted).enumerate() {
            request.wr_id = u64::from(wanted.tag.0);
            request.send_flags = wanted.flags;
            request.sg_list = slices.wrapping_add(index);
        }
        requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RKey;

    #[test]
    fn a_template_is_as_it_was_set_up_whatever_posting_did_to_it() {
        let request = TemplateRequest { has_imm: true, is_signalled: false, is_fenced: true };
        let mut template = Template::new(&[request; 2]);
        let slice = LocalSlice(ibv_sge { addr: 64, length: 8, lkey: 3 });
        let to = RemoteAddress { address: 4096, rkey: RKey(9) };
        template.set(0, Some(slice), to);
        template.set(1, None, to);
        template.set_imm(1, 7);
        template.set_tag(1, WorkTag(5));
        for _ in 0..2 {
            let raw = template.prepare(2);
            assert_eq!((raw[0].num_sge, raw[1].num_sge), (1, 0));
            assert_eq!((raw[1].wr_id, raw[1].imm_data), (5, 7_u32.to_be()));
            assert_eq!(raw[0].send_flags, flags(false, true, false));
            // As a post does.
            raw[0].send_flags = u32::MAX;
            raw[0].wr_id = u64::MAX;
        }
        assert_eq!(template.prepare(1).len(), 1);
    }
}
