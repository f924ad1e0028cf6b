//! Nodes in one process, with engines and clients that attach to them. One program, so that it is linked once;
//! `cargo test -p kvasir-store-node --test node pools::` runs the tests of one file.

mod common;
#[path = "../cuda/tests/emulated/mod.rs"]
mod emulated;
mod object_store;

mod admin;
mod computed;
mod contexts;
mod endings;
mod engine;
mod engines;
mod events;
mod failures;
mod fetch;
mod pools;
mod push;
mod replicas;
mod ssd;
mod strangers;
