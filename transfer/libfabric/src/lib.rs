//! libfabric opened at run time: one-sided writes with immediates over reliable datagrams.

pub mod address;
pub mod bindings;
pub mod completion;
pub mod domain;
pub mod endpoint;
pub mod error;
pub mod info;
pub mod library;
pub mod memory;
mod ops;
pub mod queue;
pub mod region;
pub mod shuffle;
mod slab;
pub mod wire;
