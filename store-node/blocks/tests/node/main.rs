//! The core as its shell sees it. Every step of every test is followed by a check of all
//! invariants (see `support`).

mod administering;
mod allocating;
mod arriving;
mod bucket;
mod carrying;
mod checker;
mod committing;
mod contexts;
mod copies;
mod ending;
mod objects;
mod partial;
mod pools;
mod prefetching;
mod replicating;
mod serving;
mod sim_bucket;
mod sim_objects;
mod sim_pool;
mod sim_ssd;
mod simulation;
mod support;
mod tiers;
mod two_pools;
mod unseen;
