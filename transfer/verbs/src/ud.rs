//! Datagram queue pairs: one reaches any number of peers, with small messages that may get lost. For
//! handshakes between hosts that have no other way.

use std::ptr::NonNull;

use crate::bindings::{
    IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_QKEY, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QPS_INIT,
    IBV_QPS_RTR, IBV_QPT_UD, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, Zeroed, ibv_ah, ibv_qp_attr,
    ibv_send_wr, ibv_sge, ud_target,
};
use crate::device::LocalPath;
use crate::error::{PostError, VerbsError};
use crate::ids::{Gid, Lid, QKey, QpNum, WorkTag};
use crate::ledger::Side;
use crate::queue::{CompletionQueues, Queue, QueuePairOptions, QueuePairState, Receive};
use crate::region::ProtectionDomain;
use crate::route::{Route, Traffic};
use crate::status::WorkCompletion;
use crate::work::{Bounds, Payload, flags, set_payload};

/// A received datagram lies behind so many bytes, which a receive must have room for.
pub const UD_HEADER_BYTES: usize = 40;

/// The way to a peer's port, for datagrams.
#[derive(Debug)]
pub struct AddressHandle {
    ah: NonNull<ibv_ah>,
    pd: ProtectionDomain,
}

// SAFETY: the handle is only passed to libibverbs, which allows calls from all threads.
unsafe impl Send for AddressHandle {}
// SAFETY: as above.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// # Errors
    /// [`VerbsError::Refused`] when no route leads there, and others.
    pub fn new(
        pd: &ProtectionDomain,
        from: &LocalPath,
        gid: Gid,
        lid: Lid,
        traffic: Traffic,
    ) -> Result<Self, VerbsError> {
        let mut raw = Route { from, gid, lid }.to_raw(traffic);
        // SAFETY: the domain lives, and `raw` is a whole structure.
        let ah = unsafe { (pd.context().api().create_ah)(pd.raw(), &raw mut raw) };
        let ah = NonNull::new(ah).ok_or_else(|| VerbsError::last("ibv_create_ah"))?;
        Ok(AddressHandle { ah, pd: pd.clone() })
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        // SAFETY: made by `ibv_create_ah` and destroyed once. Datagrams under way have it by value, or
        // fail.
        let answer = unsafe { (self.pd.context().api().destroy_ah)(self.ah.as_ptr()) };
        if answer != 0 {
            let device = self.pd.context().name();
            tracing::error!(
                device,
                errno = answer,
                "the verbs library cannot destroy an address handle"
            );
        }
    }
}

/// One message, of at most one MTU.
#[derive(Debug, Clone, Copy)]
pub struct Datagram<'a> {
    pub from: Payload<'a>,
    pub imm: Option<u32>,
    pub to: &'a AddressHandle,
    pub to_number: QpNum,
    pub to_key: QKey,
    pub tag: WorkTag,
}

/// Sends and receives datagrams.
#[derive(Debug)]
pub struct UdQueuePair {
    queue: Queue,
    key: QKey,
}

impl UdQueuePair {
    /// On one port, ready at once. `key` is what senders must name.
    ///
    /// # Errors
    /// As [`RcQueuePair::new`](crate::RcQueuePair::new).
    pub fn new(
        pd: &ProtectionDomain,
        path: &LocalPath,
        queues: CompletionQueues<'_>,
        key: QKey,
        options: QueuePairOptions,
    ) -> Result<Self, VerbsError> {
        let mut queue = Queue::create(pd, IBV_QPT_UD, queues, options)?;
        let mut attributes = ibv_qp_attr::zeroed();
        attributes.qp_state = IBV_QPS_INIT;
        attributes.port_num = path.port.0;
        attributes.qkey = key.0;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
        queue.modify("ibv_modify_qp to initialised", &mut attributes, mask)?;
        attributes.qp_state = IBV_QPS_RTR;
        queue.modify("ibv_modify_qp to receive", &mut attributes, IBV_QP_STATE)?;
        queue.begin_to_send(&mut attributes, IBV_QP_SQ_PSN)?;
        Ok(UdQueuePair { queue, key })
    }

    pub fn number(&self) -> QpNum {
        self.queue.number()
    }

    pub fn key(&self) -> QKey {
        self.key
    }

    /// Posts all datagrams, or none when they do not all fit. A completion says that one was sent, not
    /// that it arrived.
    ///
    /// # Errors
    /// [`PostError`].
    pub fn post(&mut self, datagrams: &[Datagram<'_>]) -> Result<(), PostError> {
        self.queue.post(datagrams, |datagram| datagram.tag, to_raw)
    }

    /// As [`RcQueuePair::post_receives`](crate::RcQueuePair::post_receives), each with
    /// [`UD_HEADER_BYTES`] more than its message. A datagram that finds no receive is lost.
    ///
    /// # Errors
    /// [`PostError`].
    pub fn post_receives(&mut self, receives: &[Receive<'_>]) -> Result<(), PostError> {
        self.queue.post_receives(receives)
    }

    /// How many datagrams can be posted now.
    pub fn send_room(&self) -> usize {
        self.queue.outstanding().sends.room()
    }

    /// How many receives can be posted now.
    pub fn receive_room(&self) -> usize {
        self.queue.outstanding().receives.room()
    }

    /// Work requests whose end is not known.
    pub fn outstanding(&self, side: Side) -> u32 {
        self.queue.outstanding().ledger(side).in_flight()
    }

    /// As [`RcQueuePair::retire`](crate::RcQueuePair::retire).
    ///
    /// # Panics
    /// For a completion of another queue pair.
    pub fn retire(&mut self, completion: &WorkCompletion) -> u32 {
        self.queue.retire(completion)
    }

    pub fn is_broken(&self) -> bool {
        self.queue.outstanding().is_broken()
    }

    /// As [`RcQueuePair::cut_off`](crate::RcQueuePair::cut_off).
    ///
    /// # Errors
    /// [`VerbsError`].
    pub fn cut_off(&mut self) -> Result<(), VerbsError> {
        self.queue.cut_off()
    }

    pub fn is_drained(&self) -> bool {
        self.queue.is_drained()
    }

    /// # Errors
    /// [`VerbsError`] when the device does not answer.
    pub fn state(&self) -> Result<QueuePairState, VerbsError> {
        self.queue.state()
    }
}

fn to_raw(
    datagram: &Datagram<'_>,
    inline: &mut ibv_sge,
    bounds: Bounds,
) -> Result<ibv_send_wr, PostError> {
    let mut raw = ibv_send_wr::zeroed();
    raw.opcode = if datagram.imm.is_some() { IBV_WR_SEND_WITH_IMM } else { IBV_WR_SEND };
    raw.imm_data = datagram.imm.unwrap_or(0).to_be();
    raw.send_flags = flags(true, false, true);
    raw.wr.ud = ud_target {
        ah: datagram.to.ah.as_ptr(),
        remote_qpn: datagram.to_number.get(),
        remote_qkey: datagram.to_key.0,
    };
    set_payload(&mut raw, datagram.from, inline, bounds)?;
    Ok(raw)
}
