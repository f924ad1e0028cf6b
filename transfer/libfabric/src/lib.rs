//! libfabric, opened at run time, and a layer over it that is as safe as RDMA can be: one-sided writes
//! with immediates over reliable datagrams, for the provider `efa` (SRD), and for `tcp` and `shm` where
//! there is no such hardware. Nothing is linked and nothing is needed to build.
//!
//! What it promises and what it does not:
//!
//! - **Nothing is ordered.** An immediate is told when all of its write has landed, and a write is
//!   complete when it has landed (`FI_DELIVERY_COMPLETE`). Fences and RMA events are not used.
//! - **Everything closes in the right order**, because what is opened on something holds it.
//! - **Memory outlives its use.** An operation under way holds its region, a region holds its memory's
//!   owner, and where a write of a peer may still land after a region was closed, the owner is held
//!   until it cannot. What peers write *when* is for the layers above: see [`memory::Memory`].
//! - **Everything is bounded.** Operations under way by the queue's `operations_max`, peers by the address
//!   vector's `peers_max`; beyond it a typed [`Busy`](error::Busy) or an error.
//! - **Calls from any thread** are right, by the provider's locks or one of this crate's:
//!   [`Threading`](info::Threading).
//!
//! ```no_run
//! use std::sync::Arc;
//! use kvasir_transfer_libfabric::address::{AddressVector, EndpointName};
//! use kvasir_transfer_libfabric::completion::{Immediate, Token};
//! use kvasir_transfer_libfabric::domain::{Domain, Fabric};
//! use kvasir_transfer_libfabric::endpoint::{Endpoint, Write};
//! use kvasir_transfer_libfabric::info::{InfoRequest, choose};
//! use kvasir_transfer_libfabric::library::Library;
//! use kvasir_transfer_libfabric::memory::Pages;
//! use kvasir_transfer_libfabric::queue::{CompletionQueue, QueueOptions};
//! use kvasir_transfer_libfabric::region::{Access, RemoteRegion};
//!
//! # fn handshake(_: &EndpointName) -> (EndpointName, RemoteRegion) { unreachable!() }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let infos = Library::open()?.infos(&InfoRequest::default())?;
//! let info = choose(&infos, "tcp")?; // efa, where there is one
//! let domain = Domain::open(&Fabric::open(info)?, info)?;
//! let queue = CompletionQueue::open(&domain, QueueOptions::default())?;
//! let peers = AddressVector::open(&domain, 64)?;
//! let endpoint = Endpoint::open(&domain, &queue, &peers)?;
//! let region = domain.register(Arc::new(Pages::new(1 << 20)), Access::ALL)?;
//!
//! let (peer_name, peer_region) = handshake(endpoint.name());
//! endpoint.write(&Write {
//!     peer: peers.insert(&peer_name)?,
//!     local: region.span(0, 4096)?,
//!     remote: peer_region.at(0, 4096)?,
//!     immediate: Some(Immediate(7)),
//!     token: Token(1),
//! })?;
//! let mut told = Vec::new();
//! while told.is_empty() {
//!     queue.poll(&mut told, 64)?; // on the other side too: polling is what makes things arrive
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Reading path: [`library`] and [`info`] (what there is), [`domain`], [`memory`] and [`region`] (what
//! peers may reach, and how a peer is cut off), [`address`], [`queue`], [`endpoint`]; then `slab`, which
//! keeps what operations under way need. [`wire`] and [`shuffle`] put disorder in between for tests.
//! [`bindings`] and `ops` are libfabric as C has it.

pub mod address;
pub mod bindings;
pub mod completion;
pub mod domain;
pub mod endpoint;
pub mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod info;
pub mod library;
pub mod memory;
mod neighbours;
mod ops;
pub mod queue;
pub mod region;
pub mod shuffle;
mod slab;
pub mod wire;
