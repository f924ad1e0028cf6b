//! The conductor from outside: HTTP on one side, scripted store nodes and engines on the other.
//! One binary, so that it is linked once.

mod answers;
mod cancelling;
mod chunks;
mod contexts;
mod document;
mod errors;
mod failures;
mod fetching;
mod headers;
mod keys;
mod life;
mod limits;
mod proxying;
mod responses;
mod support;
mod tls;
mod turns;
mod watching;
