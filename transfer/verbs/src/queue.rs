//! What reliable and datagram queue pairs have in common: the object itself, its two queues with what
//! is outstanding on them, posting, and the cut-off.

use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::bindings::{
    IBV_QP_STATE, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD,
    IBV_QPS_SQE, IBV_QPT_RC, IBV_SEND_SIGNALED, IBV_WR_RDMA_WRITE, Zeroed, ibv_qp, ibv_qp_attr,
    ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_sge,
};
use crate::completion::CompletionQueue;
use crate::error::{PostError, VerbsError};
use crate::ids::{QpNum, WorkTag};
use crate::ledger::{DEPTH_MAX, Side, WorkId};
use crate::outstanding::Outstanding;
use crate::region::{LocalSlice, ProtectionDomain};
use crate::status::WorkCompletion;
use crate::work::{Bounds, link};

/// How large a queue pair is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueuePairOptions {
    /// Sends, writes and READs that may be outstanding.
    pub send_depth: u32,
    /// Receives that may be posted. Peers' writes with an immediate use them up too.
    pub receive_depth: u32,
    /// Slices of one request.
    pub send_slices_max: u32,
    pub receive_slices_max: u32,
    /// The queue pair may take more; see `inline_bytes_max`.
    pub inline_bytes: u32,
    /// The peer may write through it into regions that take writes. Without, the card refuses it.
    pub is_written_to: bool,
    /// The peer may read through it from regions that may be read.
    pub is_read_from: bool,
}

impl Default for QueuePairOptions {
    fn default() -> Self {
        QueuePairOptions {
            send_depth: 256,
            receive_depth: 256,
            send_slices_max: 1,
            receive_slices_max: 1,
            inline_bytes: 0,
            is_written_to: true,
            is_read_from: true,
        }
    }
}

/// The state of a queue pair as its device has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueuePairState {
    Reset,
    /// Receives can be posted, nothing moves.
    Initialised,
    ReadyToReceive,
    ReadyToSend,
    /// Nothing moves any more, in either direction.
    Error,
    Other(u32),
}

impl QueuePairState {
    fn from_raw(raw: u32) -> Self {
        match raw {
            IBV_QPS_RESET => QueuePairState::Reset,
            IBV_QPS_INIT => QueuePairState::Initialised,
            IBV_QPS_RTR => QueuePairState::ReadyToReceive,
            IBV_QPS_RTS => QueuePairState::ReadyToSend,
            IBV_QPS_ERR => QueuePairState::Error,
            // Draining of sends, and the error of sends alone, which reliable queue pairs never have.
            IBV_QPS_SQD | IBV_QPS_SQE => QueuePairState::Other(raw),
            other => QueuePairState::Other(other),
        }
    }
}

/// One receive: where a message is put. One without slices serves writes with an immediate.
#[derive(Debug, Clone, Copy)]
pub struct Receive<'a> {
    /// Filled one after the other.
    pub into: &'a [LocalSlice],
    /// Comes back with the completion.
    pub tag: WorkTag,
}

/// Where the completions of a queue pair go; both may be the same.
#[derive(Debug, Clone, Copy)]
pub struct CompletionQueues<'a> {
    /// For what this host posts to be sent, written or READ.
    pub send: &'a CompletionQueue,
    /// For receives.
    pub receive: &'a CompletionQueue,
}

/// The send queue is one deeper than the caller sees: for the marker of a cut-off. Receives need none,
/// because each has a completion of its own; and some drivers do not flush what is posted to a receive
/// queue that is in error already.
const MARKERS: u32 = 1;

/// Counts the queue pairs of this process; see `ledger`.
static LIVES: AtomicU32 = AtomicU32::new(0);

#[derive(Debug)]
pub(crate) struct Queue {
    qp: NonNull<ibv_qp>,
    number: QpNum,
    pd: ProtectionDomain,
    send_cq: CompletionQueue,
    receive_cq: CompletionQueue,
    options: QueuePairOptions,
    bounds: Bounds,
    outstanding: Outstanding,
    is_cut_off: bool,
    /// Built anew by each post, kept for their memory.
    scratch: Scratch,
}

#[derive(Default)]
struct Scratch {
    sends: Vec<ibv_send_wr>,
    inlines: Vec<ibv_sge>,
    receives: Vec<ibv_recv_wr>,
}

impl std::fmt::Debug for Scratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scratch")
    }
}

// SAFETY: libibverbs allows calls on one queue pair from all threads, and what changes here takes
// `&mut self`. The pointers in `scratch` are set and used within one call.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

impl Drop for Queue {
    fn drop(&mut self) {
        // SAFETY: made by `ibv_create_qp` and destroyed once. The kernel returns when the device has
        // ended all work of the queue pair.
        let answer = unsafe { (self.pd.context().api().destroy_qp)(self.qp.as_ptr()) };
        if answer != 0 {
            let (device, qp) = (self.pd.context().name(), self.number.get());
            tracing::error!(
                device,
                qp,
                errno = answer,
                "the verbs library cannot destroy a queue pair"
            );
            return;
        }
        let Room { send, receive } = Room::of(&self.options);
        self.send_cq.leave_behind(send);
        self.receive_cq.leave_behind(receive);
    }
}

/// What a queue pair may have in its completion queues at once.
struct Room {
    send: u32,
    receive: u32,
}

impl Room {
    fn of(options: &QueuePairOptions) -> Self {
        Room { send: options.send_depth + MARKERS, receive: options.receive_depth }
    }

    fn reserve(&self, queues: CompletionQueues<'_>) -> Result<(), VerbsError> {
        queues.send.reserve(self.send)?;
        let receive = queues.receive.reserve(self.receive);
        receive.inspect_err(|_| queues.send.cancel(self.send))
    }

    fn cancel(&self, queues: CompletionQueues<'_>) {
        queues.send.cancel(self.send);
        queues.receive.cancel(self.receive);
    }
}

fn check_depths(options: QueuePairOptions) -> Result<QueuePairOptions, VerbsError> {
    let fits = |depth: u32| (1..=DEPTH_MAX).contains(&depth);
    if fits(options.send_depth) && fits(options.receive_depth) {
        return Ok(options);
    }
    let source = std::io::Error::from(rustix::io::Errno::INVAL);
    Err(VerbsError::Refused { call: "the depth of a queue pair", source })
}

fn create_raw(
    pd: &ProtectionDomain,
    kind: u32,
    queues: CompletionQueues<'_>,
    options: &QueuePairOptions,
) -> Result<(NonNull<ibv_qp>, ibv_qp_cap), VerbsError> {
    let mut attributes = ibv_qp_init_attr::zeroed();
    attributes.send_cq = queues.send.raw();
    attributes.recv_cq = queues.receive.raw();
    attributes.qp_type = kind;
    attributes.cap = ibv_qp_cap {
        max_send_wr: options.send_depth + MARKERS,
        max_recv_wr: options.receive_depth,
        max_send_sge: options.send_slices_max,
        max_recv_sge: options.receive_slices_max,
        max_inline_data: options.inline_bytes,
    };
    // SAFETY: the domain and both queues live, and the queue pair will hold them.
    let qp = unsafe { (pd.context().api().create_qp)(pd.raw(), &raw mut attributes) };
    let qp = NonNull::new(qp).ok_or_else(|| VerbsError::last("ibv_create_qp"))?;
    Ok((qp, attributes.cap))
}

/// By trying: drivers round up what they are asked for and do not say how far they go.
pub(crate) fn inline_bytes_max(pd: &ProtectionDomain) -> Result<u32, VerbsError> {
    let cq = CompletionQueue::new(pd.context(), 4, None)?;
    let queues = CompletionQueues { send: &cq, receive: &cq };
    let mut refused = None;
    for inline_bytes in [1024, 512, 256, 220, 128, 64, 32, 0] {
        let options = QueuePairOptions {
            send_depth: 1,
            receive_depth: 1,
            inline_bytes,
            ..QueuePairOptions::default()
        };
        match create_raw(pd, IBV_QPT_RC, queues, &options) {
            Ok((qp, cap)) => {
                // SAFETY: just made, never used.
                unsafe { (pd.context().api().destroy_qp)(qp.as_ptr()) };
                return Ok(cap.max_inline_data);
            }
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.expect("at least one size was tried"))
}

impl Queue {
    pub(crate) fn create(
        pd: &ProtectionDomain,
        kind: u32,
        queues: CompletionQueues<'_>,
        options: QueuePairOptions,
    ) -> Result<Self, VerbsError> {
        let options = check_depths(options)?;
        let room = Room::of(&options);
        if queues.send.is_same(queues.receive) {
            // Together, so that the error names what both need.
            queues.send.reserve(room.send + room.receive)?;
        } else {
            room.reserve(queues)?;
        }
        let life = LIVES.fetch_add(1, Ordering::Relaxed);
        let made = create_raw(pd, kind, queues, &options);
        let (qp, cap) = made.inspect_err(|_| room.cancel(queues))?;
        // SAFETY: just made.
        let number = unsafe { qp.as_ref().qp_num };
        Ok(Queue {
            qp,
            number: QpNum::new(number & 0xff_ffff).expect("masked to 24 bits"),
            pd: pd.clone(),
            send_cq: queues.send.clone(),
            receive_cq: queues.receive.clone(),
            options,
            bounds: Bounds {
                slices_max: options.send_slices_max as usize,
                inline_bytes_max: cap.max_inline_data as usize,
            },
            outstanding: Outstanding::new(life, options.send_depth, options.receive_depth),
            is_cut_off: false,
            scratch: Scratch::default(),
        })
    }

    pub(crate) fn number(&self) -> QpNum {
        self.number
    }

    pub(crate) fn bounds(&self) -> Bounds {
        self.bounds
    }

    pub(crate) fn outstanding(&self) -> &Outstanding {
        &self.outstanding
    }

    pub(crate) fn modify(
        &self,
        call: &'static str,
        attributes: &mut ibv_qp_attr,
        mask: u32,
    ) -> Result<(), VerbsError> {
        // SAFETY: the queue pair lives, and `attributes` is a whole structure.
        let answer = unsafe {
            (self.pd.context().api().modify_qp)(self.qp.as_ptr(), attributes, mask as c_int)
        };
        VerbsError::check(call, answer)
    }

    /// To the state in which it sends, with what that state needs.
    pub(crate) fn begin_to_send(
        &mut self,
        attributes: &mut ibv_qp_attr,
        mask: u32,
    ) -> Result<(), VerbsError> {
        attributes.qp_state = IBV_QPS_RTS;
        self.modify("ibv_modify_qp to send", attributes, mask | IBV_QP_STATE)?;
        self.outstanding.begin_to_send();
        Ok(())
    }

    pub(crate) fn state(&self) -> Result<QueuePairState, VerbsError> {
        let mut attributes = ibv_qp_attr::zeroed();
        let mut init = ibv_qp_init_attr::zeroed();
        // SAFETY: the queue pair lives, and both structures are whole.
        let answer = unsafe {
            (self.pd.context().api().query_qp)(
                self.qp.as_ptr(),
                &raw mut attributes,
                IBV_QP_STATE as c_int,
                &raw mut init,
            )
        };
        VerbsError::check("ibv_query_qp", answer)?;
        Ok(QueuePairState::from_raw(attributes.qp_state))
    }

    /// Builds a chain with `build`, which is given the place for inline bytes of each, and posts it.
    pub(crate) fn post<T>(
        &mut self,
        items: &[T],
        tag: impl Fn(&T) -> WorkTag,
        build: impl Fn(&T, &mut ibv_sge, Bounds) -> Result<ibv_send_wr, PostError>,
    ) -> Result<(), PostError> {
        self.outstanding.admit(Side::Send, items.len())?;
        let mut scratch = std::mem::take(&mut self.scratch);
        let result = self.post_built(items, &mut scratch, tag, build);
        self.scratch = scratch;
        result
    }

    fn post_built<T>(
        &mut self,
        items: &[T],
        scratch: &mut Scratch,
        tag: impl Fn(&T) -> WorkTag,
        build: impl Fn(&T, &mut ibv_sge, Bounds) -> Result<ibv_send_wr, PostError>,
    ) -> Result<(), PostError> {
        let Scratch { sends, inlines, .. } = scratch;
        sends.clear();
        // Sized first: requests point into it, so it must not move while they are built.
        inlines.resize(items.len(), ibv_sge { addr: 0, length: 0, lkey: 0 });
        for (item, inline) in items.iter().zip(inlines.iter_mut()) {
            let mut raw = build(item, inline, self.bounds)?;
            raw.wr_id = u64::from(tag(item).0);
            sends.push(raw);
        }
        // SAFETY: the slices and inline bytes that the requests point to are borrowed by `items`, or lie
        // in `inlines`, and outlive the call.
        unsafe { self.post_raw(sends) }
    }

    /// Posts requests whose ids hold the callers' tags and whose flags say what the caller wants
    /// signalled. Ids, flags and links are overwritten.
    ///
    /// # Safety
    /// What the slices of the requests point to outlives the call: the list itself, and inline bytes.
    pub(crate) unsafe fn post_raw(&mut self, raw: &mut [ibv_send_wr]) -> Result<(), PostError> {
        self.outstanding.admit(Side::Send, raw.len())?;
        if raw.is_empty() {
            return Ok(());
        }
        let mut plan = self.outstanding.sends.plan();
        for request in raw.iter_mut() {
            let wants_signal = request.send_flags & IBV_SEND_SIGNALED != 0;
            let (id, is_signalled) = plan.next(WorkTag(request.wr_id as u32), wants_signal);
            request.wr_id = id.0;
            if is_signalled {
                request.send_flags |= IBV_SEND_SIGNALED;
            }
        }
        let silent = plan.silent();
        let first = link(raw);
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives; the chain is linked within `raw`, and the caller answers for what
        // it points to. The header calls through the same table.
        let answer = unsafe {
            let post_send = (*self.qp.as_ref().context).ops.post_send;
            post_send.expect("every driver can send")(self.qp.as_ptr(), first, &raw mut bad)
        };
        let Err(source) = VerbsError::check("ibv_post_send", answer) else {
            self.outstanding.sends.commit(raw.len(), silent);
            return Ok(());
        };
        let posted = raw.iter().position(|request| ptr::eq(request, bad)).unwrap_or(0);
        let silent = silent_tail(&raw[..posted], self.outstanding.sends.plan().silent());
        self.outstanding.sends.commit(posted, silent);
        Err(PostError::Refused { posted, source })
    }

    pub(crate) fn post_receives(&mut self, receives: &[Receive<'_>]) -> Result<(), PostError> {
        self.outstanding.admit(Side::Receive, receives.len())?;
        let slices_max = self.options.receive_slices_max as usize;
        if let Some(slices) = receives.iter().map(|r| r.into.len()).find(|len| *len > slices_max) {
            return Err(PostError::TooManySlices { slices, slices_max });
        }
        let mut raw = std::mem::take(&mut self.scratch.receives);
        raw.clear();
        let mut plan = self.outstanding.receives.plan();
        raw.extend(receives.iter().map(|receive| {
            let (id, _) = plan.next(receive.tag, true);
            raw_receive(id, receive.into)
        }));
        // SAFETY: the slices are borrowed by `receives` and outlive the call.
        let result = unsafe { self.post_raw_receives(&mut raw) };
        self.scratch.receives = raw;
        result
    }

    /// # Safety
    /// What the receives point to outlives the call.
    unsafe fn post_raw_receives(&mut self, raw: &mut [ibv_recv_wr]) -> Result<(), PostError> {
        if raw.is_empty() {
            return Ok(());
        }
        let first = link_receives(raw);
        let mut bad = ptr::null_mut();
        // SAFETY: as in `post_raw`.
        let answer = unsafe {
            let post_recv = (*self.qp.as_ref().context).ops.post_recv;
            post_recv.expect("every driver can receive")(self.qp.as_ptr(), first, &raw mut bad)
        };
        let Err(source) = VerbsError::check("ibv_post_recv", answer) else {
            self.outstanding.receives.commit(raw.len(), 0);
            return Ok(());
        };
        let posted = raw.iter().position(|receive| ptr::eq(receive, bad)).unwrap_or(0);
        self.outstanding.receives.commit(posted, 0);
        Err(PostError::Refused { posted, source })
    }

    pub(crate) fn retire(&mut self, completion: &WorkCompletion) -> u32 {
        assert_eq!(completion.qp_num(), self.number, "a completion of another queue pair");
        self.outstanding.retire(completion)
    }

    /// Into error; then everything that has a completion of its own comes back.
    pub(crate) fn cut_off(&mut self) -> Result<(), VerbsError> {
        if self.is_cut_off {
            return Ok(());
        }
        self.outstanding.break_off();
        let mut attributes = ibv_qp_attr::zeroed();
        attributes.qp_state = IBV_QPS_ERR;
        self.modify("ibv_modify_qp to error", &mut attributes, IBV_QP_STATE)?;
        if self.outstanding.sends.is_silent() {
            self.post_marker()?;
        }
        self.is_cut_off = true;
        Ok(())
    }

    /// The last requests may have ended well before the error, and then nothing tells. Behind the marker
    /// nothing is left. Datagrams always have a completion, so this is of a reliable queue pair.
    fn post_marker(&mut self) -> Result<(), VerbsError> {
        let mut marker = ibv_send_wr::zeroed();
        marker.wr_id = self.outstanding.sends.marker().0;
        marker.opcode = IBV_WR_RDMA_WRITE;
        marker.send_flags = IBV_SEND_SIGNALED;
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair lives, and the request names no memory. It finds room, because the queue
        // is one deeper than what may be posted otherwise.
        let answer = unsafe {
            let post_send = (*self.qp.as_ref().context).ops.post_send;
            let post_send = post_send.expect("every driver can send");
            post_send(self.qp.as_ptr(), &raw mut marker, &raw mut bad)
        };
        VerbsError::check("ibv_post_send of a marker", answer)?;
        self.outstanding.sends.commit(1, 0);
        Ok(())
    }

    pub(crate) fn is_drained(&self) -> bool {
        self.is_cut_off && self.outstanding.is_empty()
    }
}

/// As `work::link` does for requests.
fn link_receives(receives: &mut [ibv_recv_wr]) -> *mut ibv_recv_wr {
    let first = receives.as_mut_ptr();
    for (index, receive) in receives.iter_mut().enumerate() {
        receive.next = first.wrapping_add(index + 1);
    }
    if let Some(last) = receives.last_mut() {
        last.next = ptr::null_mut();
    }
    receives.as_mut_ptr()
}

fn raw_receive(id: WorkId, into: &[LocalSlice]) -> ibv_recv_wr {
    let mut raw = ibv_recv_wr::zeroed();
    raw.wr_id = id.0;
    if !into.is_empty() {
        raw.sg_list = into.as_ptr().cast::<ibv_sge>().cast_mut();
        raw.num_sge = into.len() as c_int;
    }
    raw
}

/// How many requests at the end of what was taken have no completion of their own.
fn silent_tail(taken: &[ibv_send_wr], before: u32) -> u32 {
    let is_silent = |request: &&ibv_send_wr| request.send_flags & IBV_SEND_SIGNALED == 0;
    let tail = taken.iter().rev().take_while(is_silent).count();
    if tail == taken.len() { before + tail as u32 } else { tail as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_holds_nothing_or_more_than_places_tell_apart_is_refused() {
        let fits = |send_depth, receive_depth| {
            let rest = QueuePairOptions::default();
            check_depths(QueuePairOptions { send_depth, receive_depth, ..rest }).is_ok()
        };
        assert!(fits(1, 1) && fits(DEPTH_MAX, DEPTH_MAX));
        assert!(!fits(0, 1) && !fits(1, 0));
        assert!(!fits(DEPTH_MAX + 1, 1) && !fits(1, DEPTH_MAX + 1));
    }

    #[test]
    fn silence_at_the_end_of_what_was_taken_is_counted() {
        let chain = |signals: &[bool]| -> Vec<ibv_send_wr> {
            let flags = |is_signalled: &bool| if *is_signalled { IBV_SEND_SIGNALED } else { 0 };
            let raw = |is_signalled| ibv_send_wr {
                send_flags: flags(is_signalled),
                ..ibv_send_wr::zeroed()
            };
            signals.iter().map(raw).collect()
        };
        assert_eq!(silent_tail(&chain(&[]), 3), 3);
        assert_eq!(silent_tail(&chain(&[false, false]), 3), 5);
        assert_eq!(silent_tail(&chain(&[true, false]), 3), 1);
        assert_eq!(silent_tail(&chain(&[false, true]), 3), 0);
    }
}
