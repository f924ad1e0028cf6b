//! Point-to-point transfer engine: regions, one-sided writes, immediate counters, small messages and
//! progress words, over shared memory (`shm`), TCP (`tcp`) and RDMA (`verbs`, and `efa`, whose wire is in no order), and
//! simulated (`sim`). It knows nothing of blocks, tokens or models.
//!
//! What it promises: writes are reliable and **unordered**; a receiver learns of them only through
//! the counter of their immediate; one logical write is one count; every operation reaches a definite
//! state by its deadline; a write outside its region, with a wrong key or to a revoked region is
//! refused.
//!
//! Reading path: [`engine`] (the handle that callers hold), [`write`](mod@write), [`scatter`] and
//! [`signalled`] (what they submit), [`completion`], [`driver`] (an engine without a thread of its own); then [`memory`], [`ring`] and [`doorbell`], which are useful on their own. Inside:
//! `shared` (between handles and worker), `worker` (which owns everything and has one thread at a time; its `hub` is
//! what all connections share), `identity`, `hello` and `peers` (who may connect, and cut-offs), then the domains
//! `shm`, `tcp` and `rdma`, each with an outgoing and an incoming end. [`topology`] says which network cards
//! are near which memory. [`sim`] drives the same core under virtual time. What threads share (`ring`,
//! `sleeping`, `shm/gate`, `shm/entry`, `parts`, `outcome`) is also compiled by
//! `tests/models`, over loom's model of memory. What reads bytes of others is a target in `fuzzing`,
//! run by the tests and by the fuzzer in `fuzz`.

mod calls;
mod closing;
mod completion;
mod config;
pub mod descriptors;
pub mod doorbell;
mod driver;
mod endpoint;
mod engine;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod hello;
mod hooks;
mod identity;
pub mod memory;
mod messages;
mod metrics;
mod outcome;
mod parts;
mod payload;
mod peers;
pub mod process;
mod progress;
mod rdma;
mod region;
pub mod ring;
pub mod scatter;
mod shared;
mod shm;
pub mod signalled;
pub mod sim;
mod sleeping;
pub mod spin;
mod start;
mod submit;
mod sync;
mod tcp;
pub mod topology;
mod traits;
mod worker;
mod write;

pub use completion::{Completion, CompletionFlag, CompletionFuture, FlagSetter, OutcomeSender};
pub use config::{
    Domain, EfaConfig, Handshake, TlsError, TlsFiles, TransferConfig, TransferTls, VerbsConfig,
    Verify,
};
pub use driver::Driver;
pub use endpoint::{Endpoint, ShmAddress, WireError};
pub use engine::{
    ConnectError, Expect, Handlers, Loss, PeerEvent, PeerId, RegisterError, StartError,
    SubmitError, TransferEngine,
};
pub use kvasir_transfer_core::{Outcome, Refusal, WriteError};
pub use messages::{MESSAGE_BYTES_MAX, Message};
pub use progress::{Mirror, OnProgress, POLL_EVERY_MIN, Raised, Watch, WatchId, WordMemory};
pub use rdma::{
    CardAddress, DeviceSpec, DeviceSpecError, RdmaAddress, RdmaDevices, RdmaPlace, rdma_devices,
};
pub use region::{RegionDesc, RegionHandle};
pub use submit::INLINE_BYTES_MAX;
pub use traits::{DomainTraits, Poster, Visible};
pub use write::{PageSide, Source, Write, WritePaged};

/// The checksum that writes carry and receivers verify.
pub use kvasir_checksum::{Checksum, Stores, checksum, fold};

/// Compiles and runs the examples of the integration guide.
#[cfg(doctest)]
#[doc = include_str!("../../docs/integrate/transfer.md")]
struct IntegrationGuide;
