//! Work requests as callers write them, and as the device takes them.

use std::ffi::c_int;
use std::ptr;

use crate::bindings::{
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, Zeroed,
    ibv_send_wr, ibv_sge, rdma_target,
};
use crate::error::PostError;
use crate::ids::WorkTag;
use crate::region::{LocalSlice, RemoteAddress};

/// What a request on a reliable queue pair does.
#[derive(Debug, Clone, Copy)]
pub enum Operation<'a> {
    /// The peer learns nothing of it.
    Write { from: Payload<'a>, to: RemoteAddress },
    /// The peer gets a completion with the immediate, for which it must have a receive posted, once all
    /// bytes have arrived and all earlier writes of this queue pair too.
    WriteImm { from: Payload<'a>, to: RemoteAddress, imm: u32 },
    /// As a write with an immediate, of no bytes: it names no memory.
    Imm { imm: u32 },
    /// Out of the peer's region, which must allow it. What follows does not wait for it unless fenced.
    Read { from: RemoteAddress, into: &'a [LocalSlice] },
    /// Into the receive that the peer has posted, with or without an immediate.
    Send { from: Payload<'a>, imm: Option<u32> },
}

/// The bytes that a request carries to the peer.
#[derive(Debug, Clone, Copy)]
pub enum Payload<'a> {
    /// One after the other. They must not change before the completion.
    Slices(&'a [LocalSlice]),
    /// Copied while posting: they need no region and may change at once. Up to `inline_bytes_max`.
    Inline(&'a [u8]),
}

/// One work request.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    pub operation: Operation<'a>,
    /// Comes back with the completion.
    pub tag: WorkTag,
    /// Has a completion also when it succeeds.
    pub is_signalled: bool,
    /// Begins only when all earlier READs of its queue pair have ended. Writes and sends of one queue
    /// pair are in order without it.
    pub is_fenced: bool,
    /// Wakes a peer that armed its completion queue for solicited completions.
    pub is_solicited: bool,
}

impl<'a> Request<'a> {
    /// Signalled, not fenced, not solicited.
    pub fn new(operation: Operation<'a>, tag: WorkTag) -> Self {
        Request { operation, tag, is_signalled: true, is_fenced: false, is_solicited: false }
    }

    /// Without a completion when it succeeds: the next that has one stands for it too.
    #[must_use]
    pub fn unsignalled(self) -> Self {
        Request { is_signalled: false, ..self }
    }

    /// After all earlier READs of its queue pair.
    #[must_use]
    pub fn fenced(self) -> Self {
        Request { is_fenced: true, ..self }
    }

    /// Wakes also a peer that sleeps for solicited completions only.
    #[must_use]
    pub fn solicited(self) -> Self {
        Request { is_solicited: true, ..self }
    }
}

/// What a queue pair takes in one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) slices_max: usize,
    pub(crate) inline_bytes_max: usize,
}

/// A request as the device takes it. For inline bytes `inline` becomes its one slice. Neither its id nor
/// its successor is set yet.
pub(crate) fn to_raw(
    request: &Request<'_>,
    inline: &mut ibv_sge,
    bounds: Bounds,
) -> Result<ibv_send_wr, PostError> {
    let mut raw = ibv_send_wr::zeroed();
    raw.send_flags = flags(request.is_signalled, request.is_fenced, request.is_solicited);
    match request.operation {
        Operation::Write { from, to } => {
            raw.opcode = IBV_WR_RDMA_WRITE;
            set_target(&mut raw, to);
            set_payload(&mut raw, from, inline, bounds)?;
        }
        Operation::WriteImm { from, to, imm } => {
            raw.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            raw.imm_data = imm.to_be();
            set_target(&mut raw, to);
            set_payload(&mut raw, from, inline, bounds)?;
        }
        Operation::Imm { imm } => {
            raw.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            raw.imm_data = imm.to_be();
        }
        Operation::Read { from, into } => {
            raw.opcode = IBV_WR_RDMA_READ;
            set_target(&mut raw, from);
            set_slices(&mut raw, into, bounds)?;
        }
        Operation::Send { from, imm } => {
            raw.opcode = if imm.is_some() { IBV_WR_SEND_WITH_IMM } else { IBV_WR_SEND };
            raw.imm_data = imm.unwrap_or(0).to_be();
            set_payload(&mut raw, from, inline, bounds)?;
        }
    }
    Ok(raw)
}

pub(crate) fn flags(is_signalled: bool, is_fenced: bool, is_solicited: bool) -> u32 {
    let bit = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
    bit(is_signalled, IBV_SEND_SIGNALED)
        | bit(is_fenced, IBV_SEND_FENCE)
        | bit(is_solicited, IBV_SEND_SOLICITED)
}

pub(crate) fn set_target(raw: &mut ibv_send_wr, to: RemoteAddress) {
    raw.wr.rdma = rdma_target { remote_addr: to.address, rkey: to.rkey.0 };
}

pub(crate) fn set_payload(
    raw: &mut ibv_send_wr,
    payload: Payload<'_>,
    inline: &mut ibv_sge,
    bounds: Bounds,
) -> Result<(), PostError> {
    let bytes = match payload {
        Payload::Slices(slices) => return set_slices(raw, slices, bounds),
        Payload::Inline(bytes) => bytes,
    };
    let bytes_max = bounds.inline_bytes_max;
    if bytes.len() > bytes_max {
        return Err(PostError::InlineTooLong { bytes: bytes.len(), bytes_max });
    }
    if bytes.is_empty() {
        return Ok(());
    }
    *inline = ibv_sge {
        addr: bytes.as_ptr().expose_provenance() as u64,
        length: bytes.len() as u32,
        lkey: 0,
    };
    raw.send_flags |= IBV_SEND_INLINE;
    raw.sg_list = inline;
    raw.num_sge = 1;
    Ok(())
}

/// Some devices take a slice of no bytes for one of 2 GiB, so a request of none has no slice.
fn set_slices(
    raw: &mut ibv_send_wr,
    slices: &[LocalSlice],
    bounds: Bounds,
) -> Result<(), PostError> {
    if slices.len() > bounds.slices_max {
        let slices_max = bounds.slices_max;
        return Err(PostError::TooManySlices { slices: slices.len(), slices_max });
    }
    if slices.iter().any(|slice| slice.bytes() > 0) {
        raw.sg_list = slices.as_ptr().cast::<ibv_sge>().cast_mut();
        raw.num_sge = slices.len() as c_int;
    }
    Ok(())
}

/// Each points to the next; the first is returned. The requests must not move before they are posted.
pub(crate) fn link(requests: &mut [ibv_send_wr]) -> *mut ibv_send_wr {
    let first = requests.as_mut_ptr();
    for (index, request) in requests.iter_mut().enumerate() {
        request.next = first.wrapping_add(index + 1);
    }
    if let Some(last) = requests.last_mut() {
        last.next = ptr::null_mut();
    }
    requests.as_mut_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::RKey;

    const BOUNDS: Bounds = Bounds { slices_max: 2, inline_bytes_max: 8 };

    fn raw(operation: Operation<'_>) -> Result<ibv_send_wr, PostError> {
        let mut inline = ibv_sge { addr: 0, length: 0, lkey: 0 };
        to_raw(&Request::new(operation, WorkTag(1)), &mut inline, BOUNDS)
    }

    fn slice(bytes: u32) -> LocalSlice {
        LocalSlice(ibv_sge { addr: 64, length: bytes, lkey: 3 })
    }

    fn to() -> RemoteAddress {
        RemoteAddress { address: 4096, rkey: RKey(9) }
    }

    #[test]
    fn a_request_beyond_the_bounds_of_its_queue_pair_is_refused() {
        let three = [slice(1); 3];
        let error = raw(Operation::Write { from: Payload::Slices(&three), to: to() });
        assert!(matches!(error, Err(PostError::TooManySlices { slices: 3, slices_max: 2 })));
        let error = raw(Operation::Send { from: Payload::Inline(&[0; 9]), imm: None });
        assert!(matches!(error, Err(PostError::InlineTooLong { bytes: 9, bytes_max: 8 })));
        assert!(raw(Operation::Send { from: Payload::Inline(&[0; 8]), imm: None }).is_ok());
    }

    #[test]
    fn a_request_of_no_bytes_has_no_slice() {
        let none = [slice(0)];
        for from in [Payload::Slices(&[]), Payload::Slices(&none), Payload::Inline(&[])] {
            let raw = raw(Operation::WriteImm { from, to: to(), imm: 5 }).expect("within bounds");
            assert_eq!((raw.num_sge, raw.sg_list.is_null()), (0, true));
            assert_eq!(raw.send_flags & IBV_SEND_INLINE, 0);
        }
    }

    #[test]
    fn an_immediate_travels_big_endian() {
        let raw = raw(Operation::Imm { imm: 0x0102_0304 }).expect("within bounds");
        assert_eq!(raw.imm_data.to_ne_bytes(), [1, 2, 3, 4]);
        assert_eq!(raw.opcode, IBV_WR_RDMA_WRITE_WITH_IMM);
    }

    #[test]
    fn a_chain_ends_with_its_last_request() {
        let mut chain = [ibv_send_wr::zeroed(); 3];
        assert_eq!(link(&mut chain), chain.as_mut_ptr());
        let second: *mut ibv_send_wr = &raw mut chain[1];
        assert_eq!(chain[0].next, second);
        assert!(chain[2].next.is_null());
    }
}
