//! A client of the store node on the same host: it puts objects into the node's memory, and reads them
//! there without a copy.
//!
//! An object is bytes of any length up to what a slot holds, under a name, in the namespace of a tenant.
//! Once put it never changes. Where it is kept, and for how long, is its [`Class`].
//!
//! ```no_run
//! use kvasir_client::{Client, OpenOptions, PutOptions};
//!
//! # fn main() -> Result<(), kvasir_client::Error> {
//! let client = Client::open(&OpenOptions {
//!     tenant: "me".into(),
//!     namespace: "drafts".into(),
//!     object_bytes_max: 128 << 10,
//!     ..OpenOptions::new("/run/kvasir/node")
//! })?;
//! let key = client.key(b"first");
//! client.put(&[(key, b"some bytes")], &PutOptions::default())?;
//! for object in client.get(&[key])?.into_iter().flatten() {
//!     assert_eq!(&object[..], b"some bytes"); // in the node's memory, pinned while `object` lives
//! }
//! # Ok(()) }
//! ```
//!
//! # What is shared
//! The node's slots are mapped into the process. A put reserves slots, writes them directly and commits;
//! an object that is not complete is never found. A get pins slots and answers with their place; it costs
//! one message over a ring in shared memory, and no system call while both sides are awake
//! ([`OpenOptions::polling`]).
//!
//! # Trust
//! Whoever can open the node's directory can map its memory, and writes it when putting: processes that
//! use one node trust one another not to spoil memory. Messages, on the other hand, are not trusted: a
//! client that asks for what cannot be is expelled, and nobody finds objects of another namespace.
//!
//! # Threads and processes
//! A [`Client`] may be used by many threads at once and cloned; a process that forks opens it anew. When a
//! process ends, however it ends, its pins and its unfinished puts end with it.
//!
//! Reading path: [`client`] (the handle), `calls` (requests and answers over the line), [`object`] (what
//! a get gives), `write` (how an object is laid into a slot, and its checksums).

mod calls;
mod client;
mod error;
mod object;
mod write;

pub use client::{Class, Client, OpenOptions, Outcome, PutOptions, Reservation, Tier};
pub use error::Error;
pub use kvasir_proto::BlockKey as Key;
pub use object::Object;
