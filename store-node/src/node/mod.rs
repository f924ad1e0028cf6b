//! The node: one thread that owns the block core, the attached engine and every push.
//!
//! Reading path: [`owner`] (the switchboard), then what it holds: [`leg`] for each share with its
//! [`pages`] and its [`push`], [`session`] and [`steps`] for the engine, [`writers`] and
//! [`sent_pushes`] for the other nodes, [`events`] for conductors. What comes in goes through
//! [`inbox`].

pub mod arena;
pub mod command;
pub mod events;
pub mod inbox;
pub mod leg;
pub mod owner;
pub mod pages;
pub mod peer_message;
pub mod push;
pub mod sent_pushes;
pub mod session;
pub mod steps;
pub mod tail;
pub mod tail_space;
pub mod writers;

/// Shares that may be open at once.
pub const SHARES_MAX: usize = 4096;
/// Writes (one run of one page) under way at once, all pushes together. With the counters and
/// messages of all shares they stay under what the transfer engine takes, so it is never full.
pub const WRITES_MAX: usize = 32_768;
/// What the transfer engine must take at once.
pub const OPERATIONS_MAX: usize = WRITES_MAX + 8 * SHARES_MAX;
