//! RDMA verbs for the transfer engine: libibverbs, opened at run time, and a layer over it that is as
//! safe as RDMA can be. It knows queue pairs, regions and completions, and nothing of transfers, peers
//! or cache blocks.
//!
//! Nothing is linked, and nothing is needed to build: a host without libibverbs is told so in a sentence
//! by [`Library::open`], and one without devices has an empty list of them.
//!
//! # What is safe, and how
//!
//! - **Lifetimes.** Everything holds what it needs: a queue pair its protection domain and completion
//!   queues, those their device, a region the owner of its memory. Objects may be dropped in any order.
//! - **Memory.** A device reaches only what is registered. A [`MemoryRegion`] holds the [`Memory`] it is
//!   made of until the device has let go of it, so a request that outlives its region fails instead of
//!   touching memory that is something else by now. That bytes change under the program's feet is what
//!   [`Memory`]'s implementors promise to bear.
//! - **Bounds.** A queue pair counts what is outstanding and refuses what does not fit
//!   ([`PostError::Full`]); a completion queue has room for all that its queue pairs may have outstanding,
//!   or they are not made on it. So neither overflows. Every completion must be given to its queue pair's
//!   `retire`: what is not counted off takes up room for good.
//! - **Order.** What one queue pair writes and sends arrives in order. A READ is not ordered with what
//!   follows it, unless that is fenced ([`Request::fenced`]).
//! - **Ends.** There is no timeout that never ends. [`RcQueuePair::cut_off`] ends all traffic of a
//!   connection, and [`RcQueuePair::is_drained`] says when nothing can arrive any more.
//!
//! What is not checked: what a peer does with memory that it was given the key of, and whether bytes
//! are read before the completion that announces them.
//!
//! A child made by `fork` must not use what its parent made; `exec` is fine. Kernels from 5.12 keep the
//! parent's memory in place.
//!
//! # Reading path
//!
//! [`Library`] and `library.rs`; [`Context`] and [`DeviceInfo`]; [`ProtectionDomain`],
//! [`MemoryRegion`] and [`Memory`]; [`CompletionQueue`] and [`WorkCompletion`]; [`RcQueuePair`] with
//! [`Request`] and [`Template`]; [`UdQueuePair`]. Inside: `queue` (what both kinds of queue pair share),
//! `outstanding` and `ledger` (what is posted and has not ended). `bindings` declares the C interface, and `layout` proves it.
//! `examples/ping.rs` uses it all.

mod address;
mod bindings;
mod completion;
mod context;
mod device;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod ids;
#[cfg(test)]
mod layout;
mod ledger;
mod library;
mod memory;
mod outstanding;
mod queue;
mod rc;
mod region;
mod room;
mod route;
mod status;
mod sync;
mod template;
mod ud;
mod work;

pub use address::{AddressError, QueuePairAddress};
pub use completion::{CompletionChannel, CompletionQueue, CqId, Wake};
pub use context::{Context, DeviceEvent};
pub use device::{
    Capabilities, DeviceInfo, GidEntry, GidKind, Limits, LinkLayer, LocalPath, PortInfo, PortState,
    Transport,
};
pub use error::{PostError, RangeError, VerbsError};
pub use ids::{Gid, GidError, GidIndex, LKey, Lid, Mtu, PortNum, Psn, QKey, QpNum, RKey, WorkTag};
pub use ledger::Side;
pub use library::{Device, Library, Unavailable};
pub use memory::{Buffer, Memory};
pub use queue::{CompletionQueues, QueuePairOptions, QueuePairState, Receive};
pub use rc::{AckTimeout, ConnectOptions, RcQueuePair, ReceiverRetries};
pub use region::{
    DmaBuf, LocalSlice, MESSAGE_BYTES_MAX, MemoryRegion, ProtectionDomain, RegionOptions,
    RemoteAddress, RemoteRegion,
};
pub use route::Traffic;
pub use status::{Remedy, WcStatus, WorkCompletion, WorkKind};
pub use template::{Template, TemplateRequest};
pub use ud::{AddressHandle, Datagram, UD_HEADER_BYTES, UdQueuePair};
pub use work::{Operation, Payload, Request};
