//! Reliable queue pairs: one end of a connection to one peer. What is written or sent arrives once and
//! in order, or the connection breaks.

use std::time::Duration;

use crate::address::QueuePairAddress;
use crate::bindings::{
    IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QP_ACCESS_FLAGS, IBV_QP_AV,
    IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER,
    IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY,
    IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_QPS_INIT, IBV_QPS_RTR,
    IBV_QPT_RC, Zeroed, ibv_qp_attr,
};
use crate::device::LocalPath;
use crate::error::{PostError, VerbsError};
use crate::ids::{Psn, QpNum};
use crate::ledger::Side;
use crate::queue::{CompletionQueues, Queue, QueuePairOptions, QueuePairState, Receive};
use crate::region::ProtectionDomain;
use crate::route::{Route, Traffic};
use crate::status::WorkCompletion;
use crate::template::Template;
use crate::work::{Request, to_raw};

/// How long a device waits for an acknowledgement before it sends again: 4.096 µs times a power of two.
/// Devices round it up, some to tens of milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AckTimeout(u8);

impl AckTimeout {
    /// From 1 (8.2 µs) to 31 (2.4 hours). 0, which waits for ever, is refused: everything here ends.
    pub fn from_code(code: u8) -> Option<Self> {
        (1..=31).contains(&code).then_some(AckTimeout(code))
    }

    /// The shortest that is at least as long; `None` beyond 2.4 hours.
    pub fn at_least(wait: Duration) -> Option<Self> {
        (1..=31).map(AckTimeout).find(|timeout| timeout.duration() >= wait)
    }

    pub fn duration(self) -> Duration {
        Duration::from_nanos(4096 << self.0)
    }
}

/// How often a device tries again when a peer has no receive posted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiverRetries {
    /// At most 6 times.
    Times(u8),
    /// The peer's slowness is no reason to fail; its death is noticed all the same.
    Forever,
}

impl ReceiverRetries {
    fn code(self) -> u8 {
        match self {
            ReceiverRetries::Times(times) => times,
            ReceiverRetries::Forever => 7,
        }
    }
}

/// How a connection behaves. Both ends should be given the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectOptions {
    /// How long the device waits before it sends again.
    pub ack_timeout: AckTimeout,
    /// 0 to 7 times after the first. A dead peer is noticed after about `ack_timeout` times one more
    /// than this; devices may take up to four times as long.
    pub retries: u8,
    /// How often a peer that has no receive posted is tried again.
    pub receiver_retries: ReceiverRetries,
    /// How long a peer that has come too early waits before it tries again, as a code of the InfiniBand
    /// specification: 1 is 10 µs, 12 is 640 µs, 31 is 491 ms, 0 is 655 ms.
    pub receiver_not_ready_code: u8,
    /// READs on the way at once; the rest wait. No more than the peer's `reads_in`.
    pub reads_out: u8,
    /// READs of the peer that are answered at once.
    pub reads_in: u8,
    pub traffic: Traffic,
}

impl Default for ConnectOptions {
    /// 67 ms, 7 times: a dead peer is noticed within about half a second, or two.
    fn default() -> Self {
        ConnectOptions {
            ack_timeout: AckTimeout(14),
            retries: 7,
            receiver_retries: ReceiverRetries::Forever,
            receiver_not_ready_code: 12,
            reads_out: 16,
            reads_in: 16,
            traffic: Traffic::default(),
        }
    }
}

impl ConnectOptions {
    /// Fields of so many bits, which not every driver checks.
    fn check(&self) -> Result<(), VerbsError> {
        let times_fit = match self.receiver_retries {
            ReceiverRetries::Times(times) => times <= 6,
            ReceiverRetries::Forever => true,
        };
        if self.retries <= 7 && times_fit && self.receiver_not_ready_code <= 31 {
            return Ok(());
        }
        let source = std::io::Error::from(rustix::io::Errno::INVAL);
        Err(VerbsError::Refused { call: "the retries of a connection", source })
    }
}

/// One end of a reliable connection. It begins unconnected, but takes receives at once.
#[derive(Debug)]
pub struct RcQueuePair {
    queue: Queue,
    path: LocalPath,
    psn: Psn,
}

impl RcQueuePair {
    /// On one port; `psn` is best drawn at random.
    ///
    /// # Errors
    /// [`VerbsError::CompletionQueueTooSmall`], [`VerbsError::Refused`] beyond the device's limits, and
    /// others.
    pub fn new(
        pd: &ProtectionDomain,
        path: &LocalPath,
        queues: CompletionQueues<'_>,
        psn: Psn,
        options: QueuePairOptions,
    ) -> Result<Self, VerbsError> {
        let queue = Queue::create(pd, IBV_QPT_RC, queues, options)?;
        let mut attributes = ibv_qp_attr::zeroed();
        attributes.qp_state = IBV_QPS_INIT;
        attributes.port_num = path.port.0;
        let allowed = [
            (options.is_written_to, IBV_ACCESS_REMOTE_WRITE),
            (options.is_read_from, IBV_ACCESS_REMOTE_READ),
        ];
        let flags = allowed.into_iter().filter_map(|(is_allowed, flag)| is_allowed.then_some(flag));
        attributes.qp_access_flags = flags.fold(0, |all, flag| all | flag);
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        queue.modify("ibv_modify_qp to initialised", &mut attributes, mask)?;
        Ok(RcQueuePair { queue, path: *path, psn })
    }

    /// What the peer must be told.
    pub fn address(&self) -> QueuePairAddress {
        QueuePairAddress {
            number: self.queue.number(),
            psn: self.psn,
            gid: self.path.gid,
            lid: self.path.lid,
            mtu: self.path.mtu,
        }
    }

    /// As completions name it.
    pub fn number(&self) -> QpNum {
        self.queue.number()
    }

    /// Connects to a peer that connects to this. Nothing is sent, so it succeeds whether the peer is
    /// there or not; a request tells.
    ///
    /// # Errors
    /// [`VerbsError::Refused`] when it is connected already or the options exceed the device's limits,
    /// and others.
    pub fn connect(
        &mut self,
        peer: &QueuePairAddress,
        options: &ConnectOptions,
    ) -> Result<(), VerbsError> {
        options.check()?;
        let mut attributes = ibv_qp_attr::zeroed();
        attributes.qp_state = IBV_QPS_RTR;
        attributes.path_mtu = self.path.mtu.min(peer.mtu).code().into();
        attributes.dest_qp_num = peer.number.get();
        attributes.rq_psn = peer.psn.get();
        attributes.max_dest_rd_atomic = options.reads_in;
        attributes.min_rnr_timer = options.receiver_not_ready_code;
        let route = Route { from: &self.path, gid: peer.gid, lid: peer.lid };
        attributes.ah_attr = route.to_raw(options.traffic);
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.queue.modify("ibv_modify_qp to receive", &mut attributes, mask)?;
        self.begin_to_send(options)
    }

    fn begin_to_send(&mut self, options: &ConnectOptions) -> Result<(), VerbsError> {
        let mut attributes = ibv_qp_attr::zeroed();
        attributes.sq_psn = self.psn.get();
        attributes.timeout = options.ack_timeout.0;
        attributes.retry_cnt = options.retries;
        attributes.rnr_retry = options.receiver_retries.code();
        attributes.max_rd_atomic = options.reads_out;
        let mask = IBV_QP_SQ_PSN
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.queue.begin_to_send(&mut attributes, mask)
    }

    /// Posts all requests, in order, with one doorbell; or none, when they do not all fit.
    ///
    /// # Errors
    /// [`PostError`].
    pub fn post(&mut self, requests: &[Request<'_>]) -> Result<(), PostError> {
        self.queue.post(requests, |request| request.tag, to_raw)
    }

    /// Posts the first `count` requests of a template, as [`RcQueuePair::post`] does.
    ///
    /// # Errors
    /// [`PostError`].
    ///
    /// # Panics
    /// When the template has fewer requests.
    pub fn post_template(
        &mut self,
        template: &mut Template,
        count: usize,
    ) -> Result<(), PostError> {
        // SAFETY: the slices lie in the template, which is borrowed for the call, and name regions by key.
        unsafe { self.queue.post_raw(template.prepare(count)) }
    }

    /// Posts receives, in order; or none, when they do not all fit. A peer's write with an immediate
    /// uses up one, of whatever size.
    ///
    /// # Errors
    /// [`PostError`].
    pub fn post_receives(&mut self, receives: &[Receive<'_>]) -> Result<(), PostError> {
        self.queue.post_receives(receives)
    }

    /// How many requests can be posted now.
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

    pub fn inline_bytes_max(&self) -> usize {
        self.queue.bounds().inline_bytes_max
    }

    /// Must be given every completion of this queue pair: counts off what has ended, and notices
    /// failures. How many work requests ended with it; 0 for a completion of an earlier queue pair of
    /// the same number, which is to be ignored.
    ///
    /// # Panics
    /// For a completion of another queue pair, which is a mistake of the caller.
    pub fn retire(&mut self, completion: &WorkCompletion) -> u32 {
        self.queue.retire(completion)
    }

    /// A request has failed, or the queue pair was cut off: it takes no more work and cannot be mended.
    pub fn is_broken(&self) -> bool {
        self.queue.outstanding().is_broken()
    }

    /// Ends all traffic with the peer, in both directions: the device drops what still arrives and
    /// flushes what is outstanding. Poll and [`retire`](RcQueuePair::retire) until
    /// [`is_drained`](RcQueuePair::is_drained); then neither end of this connection will touch memory of
    /// this host again. It may be called again, to no effect.
    ///
    /// # Errors
    /// [`VerbsError`]; then only dropping the queue pair ends its traffic for certain.
    pub fn cut_off(&mut self) -> Result<(), VerbsError> {
        self.queue.cut_off()
    }

    /// Everything that was posted before [`RcQueuePair::cut_off`] has come back.
    pub fn is_drained(&self) -> bool {
        self.queue.is_drained()
    }

    /// Asks the device, which takes a system call.
    ///
    /// # Errors
    /// [`VerbsError`] when the device does not answer.
    pub fn state(&self) -> Result<QueuePairState, VerbsError> {
        self.queue.state()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_at_least_as_long_as_was_asked_for() {
        let timeout = AckTimeout::at_least(Duration::from_millis(60)).expect("in range");
        assert_eq!(timeout, AckTimeout(14));
        assert_eq!(timeout.duration(), Duration::from_nanos(67_108_864));
        assert_eq!(AckTimeout::at_least(Duration::ZERO), Some(AckTimeout(1)));
        assert_eq!(AckTimeout::at_least(Duration::from_secs(9000)), None);
    }

    #[test]
    fn retries_that_the_wire_cannot_express_are_refused() {
        let fine = ConnectOptions::default();
        assert!(fine.check().is_ok());
        assert!(ConnectOptions { retries: 8, ..fine }.check().is_err());
        let times = |times| ReceiverRetries::Times(times);
        assert!(ConnectOptions { receiver_retries: times(6), ..fine }.check().is_ok());
        assert!(ConnectOptions { receiver_retries: times(7), ..fine }.check().is_err());
        assert!(ConnectOptions { receiver_not_ready_code: 32, ..fine }.check().is_err());
    }

    #[test]
    fn a_timeout_that_never_ends_is_refused() {
        assert_eq!((AckTimeout::from_code(0), AckTimeout::from_code(32)), (None, None));
        assert_eq!(AckTimeout::from_code(31), Some(AckTimeout(31)));
    }
}
