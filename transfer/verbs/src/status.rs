//! What one completion says, and what a caller can do about a failure.

use std::fmt;

use crate::bindings::{
    IBV_WC_BAD_RESP_ERR, IBV_WC_FATAL_ERR, IBV_WC_GENERAL_ERR, IBV_WC_GRH, IBV_WC_LOC_ACCESS_ERR,
    IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_RDMA_READ,
    IBV_WC_RDMA_WRITE, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ABORT_ERR,
    IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RESP_TIMEOUT_ERR,
    IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SEND, IBV_WC_SUCCESS, IBV_WC_WITH_IMM,
    IBV_WC_WR_FLUSH_ERR, Zeroed, ibv_wc,
};
use crate::ids::{QpNum, WorkTag};
use crate::ledger::{Side, WorkId};

/// How a work request ended. After any failure its queue pair is in error: everything else on it comes
/// back as [`WcStatus::Flushed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WcStatus {
    Success,
    /// What arrived does not fit the receive, or a message is longer than the path allows.
    LocalLength,
    /// The queue pair cannot do what was asked of it.
    LocalOperation,
    /// A slice does not lie in a region that is registered now and allows it.
    LocalProtection,
    /// The queue pair was in error before this was begun, or was cut off.
    Flushed,
    /// The peer's answer makes no sense.
    BadResponse,
    /// This host's region does not allow what a peer or a READ did to it.
    LocalAccess,
    /// The peer does not support the request, or its receive was too short.
    RemoteInvalidRequest,
    /// The peer's region does not allow it: wrong key, out of range, revoked.
    RemoteAccess,
    /// The peer failed while it carried the request out.
    RemoteOperation,
    /// The peer did not answer, for all retries.
    RetriesExceeded,
    /// The peer had no receive posted, for all retries.
    ReceiverNotReady,
    /// The peer gave up.
    RemoteAborted,
    /// The device failed.
    Fatal,
    ResponseTimeout,
    General,
    /// By its number in `libibverbs`.
    Other(u32),
}

/// What a caller can do about a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Remedy {
    /// Nothing: look at the completion that failed first, or at who cut the queue pair off.
    LookAtTheFirst,
    /// Whether the last requests arrived is not known. Make new queue pairs, perhaps on another path.
    Reconnect,
    /// The peer is there but slow to post receives: give it time, or the queue pair more retries.
    WaitForPeer,
    /// The peer refuses this memory: ask it for its regions again.
    AskPeerAgain,
    /// A mistake in this process: the same request would fail again.
    MendRequest,
    /// The device is of no use any more.
    LeaveDevice,
}

impl WcStatus {
    pub(crate) fn from_raw(raw: u32) -> Self {
        match raw {
            IBV_WC_SUCCESS => WcStatus::Success,
            IBV_WC_LOC_LEN_ERR => WcStatus::LocalLength,
            IBV_WC_LOC_QP_OP_ERR => WcStatus::LocalOperation,
            IBV_WC_LOC_PROT_ERR => WcStatus::LocalProtection,
            IBV_WC_WR_FLUSH_ERR => WcStatus::Flushed,
            IBV_WC_BAD_RESP_ERR => WcStatus::BadResponse,
            IBV_WC_LOC_ACCESS_ERR => WcStatus::LocalAccess,
            IBV_WC_REM_INV_REQ_ERR => WcStatus::RemoteInvalidRequest,
            IBV_WC_REM_ACCESS_ERR => WcStatus::RemoteAccess,
            IBV_WC_REM_OP_ERR => WcStatus::RemoteOperation,
            IBV_WC_RETRY_EXC_ERR => WcStatus::RetriesExceeded,
            IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::ReceiverNotReady,
            IBV_WC_REM_ABORT_ERR => WcStatus::RemoteAborted,
            IBV_WC_FATAL_ERR => WcStatus::Fatal,
            IBV_WC_RESP_TIMEOUT_ERR => WcStatus::ResponseTimeout,
            IBV_WC_GENERAL_ERR => WcStatus::General,
            other => WcStatus::Other(other),
        }
    }

    pub fn is_success(self) -> bool {
        self == WcStatus::Success
    }

    /// `None` for success.
    pub fn remedy(self) -> Option<Remedy> {
        match self {
            WcStatus::Success => None,
            WcStatus::Flushed => Some(Remedy::LookAtTheFirst),
            WcStatus::RetriesExceeded
            | WcStatus::RemoteOperation
            | WcStatus::RemoteAborted
            | WcStatus::ResponseTimeout
            | WcStatus::BadResponse => Some(Remedy::Reconnect),
            WcStatus::ReceiverNotReady => Some(Remedy::WaitForPeer),
            WcStatus::RemoteAccess | WcStatus::RemoteInvalidRequest => Some(Remedy::AskPeerAgain),
            WcStatus::LocalLength
            | WcStatus::LocalOperation
            | WcStatus::LocalProtection
            | WcStatus::LocalAccess => Some(Remedy::MendRequest),
            WcStatus::Fatal | WcStatus::General | WcStatus::Other(_) => Some(Remedy::LeaveDevice),
        }
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            WcStatus::Success => "done",
            WcStatus::LocalLength => "a message does not fit its receive buffer or its path",
            WcStatus::LocalOperation => "the queue pair cannot do this",
            WcStatus::LocalProtection => "no registered region allows access to a slice",
            WcStatus::Flushed => "the queue pair was already in the error state",
            WcStatus::BadResponse => "the peer's response is invalid",
            WcStatus::LocalAccess => "the local region does not allow this access",
            WcStatus::RemoteInvalidRequest => "the peer does not accept such a request",
            WcStatus::RemoteAccess => "the peer's region does not allow this access",
            WcStatus::RemoteOperation => "the peer failed to execute the request",
            WcStatus::RetriesExceeded => "the peer did not answer",
            WcStatus::ReceiverNotReady => "the peer had no receive posted",
            WcStatus::RemoteAborted => "the peer aborted the request",
            WcStatus::Fatal => "the device failed",
            WcStatus::ResponseTimeout => "the peer did not respond in time",
            WcStatus::General => "the device reported a general error",
            WcStatus::Other(code) => return write!(f, "the device reported status {code}"),
        };
        f.write_str(text)
    }
}

/// What has succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkKind {
    Send,
    Write,
    Read,
    Receive,
    /// A peer's write with an immediate used up this receive.
    ReceiveWriteImm,
    Other(u32),
}

/// One completion.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct WorkCompletion(ibv_wc);

impl Default for WorkCompletion {
    /// For the array that is polled into.
    fn default() -> Self {
        WorkCompletion(ibv_wc::zeroed())
    }
}

impl WorkCompletion {
    pub fn status(&self) -> WcStatus {
        WcStatus::from_raw(self.0.status)
    }

    pub fn is_success(&self) -> bool {
        self.0.status == IBV_WC_SUCCESS
    }

    /// Which queue pair of this host it is about. It must be told, by its `retire`.
    pub fn qp_num(&self) -> QpNum {
        QpNum::new(self.0.qp_num & 0xff_ffff).expect("masked to 24 bits")
    }

    /// Which of its queues it was on; known for failures too.
    pub fn side(&self) -> Side {
        self.id().side()
    }

    /// What the caller gave with the work request; `None` for what the layer posted or signalled for
    /// its own ends. A request without a signal has a completion too when it fails.
    pub fn tag(&self) -> Option<WorkTag> {
        self.id().tag()
    }

    #[cfg(test)]
    pub(crate) fn forged(id: WorkId, status: u32) -> Self {
        WorkCompletion(ibv_wc { wr_id: id.0, status, ..ibv_wc::zeroed() })
    }

    pub(crate) fn id(&self) -> WorkId {
        WorkId(self.0.wr_id)
    }

    /// `None` for a failure, which does not say what it was.
    pub fn kind(&self) -> Option<WorkKind> {
        self.is_success().then_some(match self.0.opcode {
            IBV_WC_SEND => WorkKind::Send,
            IBV_WC_RDMA_WRITE => WorkKind::Write,
            IBV_WC_RDMA_READ => WorkKind::Read,
            IBV_WC_RECV => WorkKind::Receive,
            IBV_WC_RECV_RDMA_WITH_IMM => WorkKind::ReceiveWriteImm,
            other => WorkKind::Other(other),
        })
    }

    /// The immediate that came with a message or a write.
    pub fn imm(&self) -> Option<u32> {
        let has_imm = self.is_success() && self.0.wc_flags & IBV_WC_WITH_IMM != 0;
        // Some drivers set the flag for who has sent it too, without the immediate.
        let is_here = has_imm && self.side() == Side::Receive;
        is_here.then(|| u32::from_be(self.0.imm_data))
    }

    /// Bytes that were received, read, or written by the peer; of a datagram with the 40 of its header.
    pub fn bytes(&self) -> u32 {
        if self.is_success() { self.0.byte_len } else { 0 }
    }

    /// Who sent a datagram. Means nothing for other receives.
    pub fn source_qp(&self) -> Option<QpNum> {
        if self.is_success() { QpNum::new(self.0.src_qp) } else { None }
    }

    /// Whether the 40 bytes before a datagram hold its header; on RoCE they always do.
    pub fn has_route_header(&self) -> bool {
        self.is_success() && self.0.wc_flags & IBV_WC_GRH != 0
    }

    /// The device's own code for a failure, for its vendor.
    pub fn vendor_error(&self) -> u32 {
        self.0.vendor_err
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Ledger;

    #[test]
    fn every_failure_has_a_remedy_and_a_sentence_of_its_own() {
        let mut sentences = std::collections::BTreeSet::new();
        for raw in 0..24 {
            let status = WcStatus::from_raw(raw);
            assert_eq!(status.remedy().is_none(), raw == 0, "{status:?}");
            assert!(sentences.insert(status.to_string()), "{status}");
        }
    }

    #[test]
    fn a_failure_tells_nothing_that_only_a_success_knows() {
        let mut raw = ibv_wc::zeroed();
        raw.status = IBV_WC_WR_FLUSH_ERR;
        raw.wc_flags = IBV_WC_WITH_IMM;
        raw.byte_len = 9;
        let failure = WorkCompletion(raw);
        assert_eq!((failure.kind(), failure.imm(), failure.bytes()), (None, None, 0));
        raw.status = IBV_WC_SUCCESS;
        raw.imm_data = 7_u32.to_be();
        assert_eq!(WorkCompletion(raw).imm(), None, "the side that sent it");
        raw.wr_id = Ledger::new(Side::Receive, 0, 1).plan().next(WorkTag(0), true).0.0;
        let success = WorkCompletion(raw);
        assert_eq!((success.imm(), success.bytes()), (Some(7), 9));
    }
}
