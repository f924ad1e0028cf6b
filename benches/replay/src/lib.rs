//! Replays a trace of requests in virtual time over a cluster that a file describes.
//!
//! What decides is what decides in production: `kvasir-placement` matches, prices, places and
//! refuses, `kvasir-blocks` admits and evicts. What is modelled here is what they decide about:
//! how long GPUs and links take. No clock, no threads, no randomness but from the seed: the same
//! trace, cluster and options give the same numbers.
//!
//! Reading path:
//! 1. [`trace`]: what arrives when; [`cluster`]: the file that describes the cluster
//! 2. [`model`]: how long things take, with their sources
//! 3. [`sim`]: the events, in order; `node`, `link`, `decode`: what happens on one node
//!    [`roles`]: nodes that change what they do
//! 4. [`pool`]: one cache alone, for eviction policies
//! 5. [`colocated`]: the same cluster without disaggregation, to compare with
//! 6. [`summary`]: what is reported of a run; [`report`]: as a table, as JSON and as plots
#![forbid(unsafe_code)]

pub mod cluster;
pub mod colocated;
mod decode;
mod link;
pub mod model;
mod node;
pub mod plot;
pub mod pool;
pub mod report;
pub mod roles;
pub mod sim;
pub mod summary;
pub mod trace;
