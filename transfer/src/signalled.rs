//! Put-with-signal: data for a peer, and then a 64-bit word there, which must never be seen before the
//! data. For consumers that poll memory and ask nobody, a kernel on a device for example. (Perseus.)
//!
//! What keeps a signal behind its data is a matter of the domain, and of who is asked to:
//!
//! - [`OrderedBy::Host`]: the signal is sent when the data is acknowledged. Every domain can. A
//!   [`SignalMode`] says how many transfers share one wait.
//! - [`OrderedBy::Nic`]: nobody waits. All that goes to one peer takes one queue pair (the session's number
//!   modulo the queue pairs), which lands in order, and the first signal of a group carries the fence flag. Only
//!   some domains can, see [`crate::Domain::traits`]. Where one cannot, no signal is sent: the data is counted under
//!   [`PutWithSignal::counter`], the consumer's host has to act on the counter, and the caller is told so
//!   by [`SignalOutcomes::told`]. [`crate::DomainTraits::signals`] answers the question beforehand.
//!
//! A peer whose card may reorder on PCIe (`VerbsConfig::relaxed_ordering`, on by default) orders nothing for who
//! polls its memory, not even by waiting: it is counted, and the caller told.
//!
//! A transfer of which a put fails gets no signal; the others get theirs. When a path has failed, what was on
//! it is sent again only after its receiver has closed it, and signals wait for acknowledgements then, whoever
//! was to order them. Nothing orders two of these calls: who raises one word twice waits for the first
//! to end. Until a transfer has ended its data and its word may be written again with the same bytes, so
//! they are used for something else only then.
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::Ordering;
//! use std::time::Duration;
//!
//! use kvasir_transfer::memory::{Prefault, SharedMemory};
//! use kvasir_transfer::signalled::{
//!     OrderedBy, Put, PutWithSignal, Signal, SignalMode, SignalledPut,
//! };
//! use kvasir_transfer::{Completion, Handlers, Source, TransferConfig, TransferEngine};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let start = || {
//! #     let tcp_listen = Some(([127, 0, 0, 1], 0).into());
//! #     let config = TransferConfig { tcp_listen, ..TransferConfig::default() };
//! #     TransferEngine::start(config, Handlers::default(), &prometheus::Registry::new())
//! # };
//! let (sender, receiver) = (start()?, start()?);
//! let memory = Arc::new(SharedMemory::create("target", 8192, Prefault::Yes)?);
//! let (_region, target) = receiver.register(Arc::clone(&memory))?;
//!
//! let put = Put { source: Source::Inline(b"hello".to_vec()), target, target_offset: 0 };
//! let transfer = SignalledPut {
//!     peer: sender.connect(&receiver.endpoint())?,
//!     puts: vec![put],
//!     signal: Signal { target, offset: 4096, value: 7 },
//! };
//! let (done, _) = Completion::future();
//! let outcomes = sender.put_with_signal(
//!     PutWithSignal {
//!         transfers: vec![transfer],
//!         mode: SignalMode::default(),
//!         ordered_by: OrderedBy::Host,
//!         counter: 1,
//!         group: 0,
//!         deadline: Duration::from_secs(5),
//!     },
//!     done,
//! )?;
//!
//! // The consumer.
//! while memory.atomic_u64(4096)?.load(Ordering::Acquire) != 7 {
//!     std::thread::yield_now();
//! }
//! let mut bytes = [0; 5];
//! memory.copy_to(0, &mut bytes)?;
//! assert_eq!(&bytes, b"hello");
//! # while outcomes.get(0).is_none() {}
//! assert_eq!(outcomes.told(0), Some(Ok(())), "by its signal");
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

pub use kvasir_transfer_core::signal::{
    Fallback, Group as SignalGroup, Mode as SignalMode, OrderedBy, TRANSFERS_MAX,
};
use kvasir_transfer_core::{Outcome, Shape, Signalled, SignalledTransfer, Told, Word, WriteError};

use crate::completion::Completion;
use crate::engine::{PeerId, SubmitError};
use crate::parts::{Join, PartOutcomes};
use crate::payload::{Payload, Permit, Waiter};
use crate::rdma::{Named, RdmaPlace};
use crate::region::RegionDesc;
use crate::submit;
use crate::write::Source;

/// Puts of one transfer.
pub const PUTS_MAX: usize = 1024;

/// One range of bytes.
#[derive(Debug, Clone)]
pub struct Put {
    pub source: Source,
    pub target: RegionDesc,
    /// In the target region, in bytes.
    pub target_offset: u64,
}

/// A word at the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal {
    pub target: RegionDesc,
    /// In the target region, in bytes; a multiple of 8.
    pub offset: u64,
    /// Stored at once, little-endian. What it means is the consumer's.
    pub value: u64,
}

/// Data for one peer, and the word that tells of all of it.
#[derive(Debug, Clone)]
pub struct SignalledPut {
    pub peer: PeerId,
    /// At least one, and at most [`PUTS_MAX`]. They land in any order.
    pub puts: Vec<Put>,
    pub signal: Signal,
}

/// Transfers that are submitted, ordered and completed together.
#[derive(Debug, Clone)]
pub struct PutWithSignal {
    /// At most [`TRANSFERS_MAX`], to one peer or to many. None at all is done at once. What goes to one peer begins
    /// when that one is connected, and waits for no other peer.
    pub transfers: Vec<SignalledPut>,
    /// Which of them share one wait, or one fence, as far as they go to the same peer.
    pub mode: SignalMode,
    pub ordered_by: OrderedBy,
    /// The immediate of puts whose signals cannot be ordered: each put is one count at its peer.
    pub counter: u32,
    /// Names what can be drained together (see `TransferEngine::drain_group`).
    pub group: u64,
    /// From now, for all of them.
    pub deadline: Duration,
}

/// How the transfers of one call have ended, in its order, and how their peers are told.
#[derive(Debug)]
pub struct SignalOutcomes {
    parts: Arc<PartOutcomes>,
    told: Box<[AtomicU8]>,
}

const TOLD_UNKNOWN: u8 = 0;
const TOLD_BY_SIGNAL: u8 = 1;
const COUNTED_NO_FENCE: u8 = 2;
const COUNTED_NOT_PLACED: u8 = 3;

impl SignalOutcomes {
    #[allow(clippy::len_without_is_empty)] // `get` and `told` say so
    pub fn len(&self) -> usize {
        self.told.len()
    }

    /// `None` while the transfer is under way, and beyond the last one. `Ok`: its signal has landed behind its data, or
    /// its data was counted.
    pub fn get(&self, transfer: usize) -> Option<Outcome> {
        self.parts.get(transfer)
    }

    /// How the peer learns of the data: `Ok` by the signal, otherwise by the counter, and why. Known when the
    /// transfer has ended; `None` before that, and for one that has ended before it could be ordered.
    pub fn told(&self, transfer: usize) -> Option<Result<(), Fallback>> {
        match self.told.get(transfer)?.load(Ordering::Acquire) {
            TOLD_BY_SIGNAL => Some(Ok(())),
            COUNTED_NO_FENCE => Some(Err(Fallback::NoFence)),
            COUNTED_NOT_PLACED => Some(Err(Fallback::NotPlaced)),
            _ => None,
        }
    }

    /// Transfers that have failed so far, and why.
    pub fn failed(&self) -> impl Iterator<Item = (usize, WriteError)> {
        self.parts.failed()
    }

    pub(crate) fn note(&self, transfer: u32, told: Option<Told>) {
        let code = match told {
            None => TOLD_UNKNOWN,
            Some(Ok(())) => TOLD_BY_SIGNAL,
            Some(Err(Fallback::NoFence)) => COUNTED_NO_FENCE,
            Some(Err(Fallback::NotPlaced)) => COUNTED_NOT_PLACED,
        };
        self.told[transfer as usize].store(code, Ordering::Release);
    }
}

/// What descriptors of a batch say to RDMA, each with the peer whose region it is.
pub(crate) type Described = Vec<(PeerId, Box<(Named, RdmaPlace)>)>;

/// A batch that was checked. Its transfers name their peers until the worker knows whether those are current.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) peers: Vec<PeerId>,
    pub(crate) described: Described,
    pub(crate) signalled: Signalled<Payload, Waiter>,
}

/// A batch that nobody waits for yet.
#[derive(Debug)]
pub(crate) struct Unjoined {
    transfers: Vec<(PeerId, Vec<kvasir_transfer_core::Put<Payload>>, Word<Payload>)>,
    described: Described,
    call: PutWithSignal,
}

impl Unjoined {
    pub(crate) fn new(mut call: PutWithSignal) -> Result<Self, SubmitError> {
        if call.transfers.len() > TRANSFERS_MAX {
            return Err(SubmitError::Invalid("more transfers than `TRANSFERS_MAX`"));
        }
        let mut described = Vec::new();
        let mut transfers = Vec::with_capacity(call.transfers.len());
        for SignalledPut { peer, puts, signal } in std::mem::take(&mut call.transfers) {
            if !(1..=PUTS_MAX).contains(&puts.len()) {
                return Err(SubmitError::Invalid("a transfer must have 1 to `PUTS_MAX` puts"));
            }
            if !signal.offset.is_multiple_of(8) || signal.offset.checked_add(8).is_none() {
                return Err(SubmitError::Invalid("the offset of a signal must be a multiple of 8"));
            }
            let targets = puts.iter().map(|put| put.target).chain([signal.target]);
            described.extend(targets.filter_map(|of| Some((peer, of.described()?))));
            let puts: Result<Vec<_>, _> = puts.into_iter().map(checked).collect();
            let Signal { target, offset, value } = signal;
            let payload = Payload::Bytes(Arc::new(value.to_le_bytes().to_vec()));
            transfers.push((peer, puts?, Word { target: target.target(), offset, value, payload }));
        }
        // Most name the same regions over and over.
        described.sort_by_key(|(peer, described)| (*peer, described.0.key));
        described.dedup_by_key(|(peer, described)| (*peer, described.0));
        Ok(Unjoined { transfers, described, call })
    }

    /// How many operations it is: each put and each signal.
    pub(crate) fn operations(&self) -> usize {
        self.transfers.iter().map(|(_, puts, _)| puts.len() + 1).sum()
    }

    pub(crate) fn deadline(&self) -> Duration {
        self.call.deadline
    }

    /// `Err`: there is no transfer that could end.
    pub(crate) fn join(
        self,
        done: Completion,
        permit: Permit,
        deadline_us: u64,
    ) -> (Arc<SignalOutcomes>, Result<Batch, Waiter>) {
        let Unjoined { transfers, described, call } = self;
        let PutWithSignal { mode, ordered_by, counter, group, .. } = call;
        let parts = Arc::new(PartOutcomes::new(transfers.len()));
        let told = (0..transfers.len()).map(|_| AtomicU8::new(TOLD_UNKNOWN)).collect();
        let outcomes = Arc::new(SignalOutcomes { parts: Arc::clone(&parts), told });
        let done = Waiter::with_permit(done, permit);
        if transfers.is_empty() {
            return (outcomes, Err(done));
        }
        let join = Join::new(&parts, done);
        let peers = transfers.iter().map(|(peer, _, _)| *peer).collect();
        let transfers = (0u32..).zip(transfers).map(|(at, (peer, puts, word))| {
            let done = Waiter::of_signal(Arc::clone(&join), Arc::clone(&outcomes), at);
            SignalledTransfer { session: peer.session_id(), puts, word, done }
        });
        let transfers = transfers.collect();
        let signalled = Signalled { transfers, mode, ordered_by, counter, group, deadline_us };
        (outcomes, Ok(Batch { peers, described, signalled }))
    }
}

impl Batch {
    /// Takes out those whose session is over, and says who is to be told.
    pub(crate) fn without(&mut self, is_current: impl Fn(PeerId) -> bool) -> Vec<Waiter> {
        let peers = std::mem::take(&mut self.peers);
        let transfers = std::mem::take(&mut self.signalled.transfers);
        let (current, over): (Vec<_>, Vec<_>) =
            peers.into_iter().zip(transfers).partition(|(peer, _)| is_current(*peer));
        self.signalled.transfers = current.into_iter().map(|(_, transfer)| transfer).collect();
        over.into_iter().map(|(_, transfer)| transfer.done).collect()
    }
}

fn checked(put: Put) -> Result<kvasir_transfer_core::Put<Payload>, SubmitError> {
    let Put { source, target, target_offset } = put;
    let (payload, source_offset, bytes) = submit::source(source)?;
    let shape = Shape::Single { source_offset, target_offset, bytes, checksum: None };
    shape.check(payload.len() as u64).map_err(SubmitError::Invalid)?;
    Ok(kvasir_transfer_core::Put { payload, shape, target: target.target() })
}
