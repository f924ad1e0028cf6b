//! The node: one thread that owns the block core, the attached engines and every push.
//!
//! Reading path: [`owner`] (the switchboard), then what it holds: [`leg`] for each share,
//! [`session`] and [`steps`] for each engine, [`client`] for each client of objects, [`writers`] for the other nodes, [`events`] for
//! conductors, [`copier`] for copies on other nodes. What is decided of pushes and their ends is the core's ([`kvasir_blocks::moving`]).
//! What comes in goes through [`inbox`].

pub(crate) mod arena;
pub(crate) mod client;
pub(crate) mod command;
pub(crate) mod copier;
pub(crate) mod events;
pub(crate) mod generations;
pub(crate) mod inbox;
pub(crate) mod leg;
pub(crate) mod line;
pub(crate) mod owner;
pub(crate) mod peer_message;
pub(crate) mod session;
pub(crate) mod sources;
pub(crate) mod steps;
pub(crate) mod watch;
pub(crate) mod writers;

/// Where the serials of transactions begin that the node begins itself, so that none meets another: copies,
/// objects that clients read from the SSD, hints, and fills of pages.
pub(crate) const SERIALS_OF_COPIES: u64 = 1;
pub(crate) const SERIALS_OF_CLIENTS: u64 = 1 << 62;
pub(crate) const SERIALS_OF_HINTS: u64 = 2 << 62;
pub(crate) const SERIALS_OF_FILLS: u64 = 3 << 62;

/// Shares that may be open at once.
pub(crate) const SHARES_MAX: usize = 4096;
/// Writes (one run of one page) under way at once, all pushes together. With the counters and
/// messages of all shares they stay under what the transfer engine takes, so it is never full.
pub(crate) const WRITES_MAX: usize = 32_768;
/// What the transfer engine must take at once.
pub(crate) const OPERATIONS_MAX: usize = WRITES_MAX + 8 * SHARES_MAX;
