//! The core of the transfer engine: what is counted, checked, split, paced and given up, as state
//! machines without I/O. Time (microseconds of any steady clock) is passed in; what has to be done
//! comes back. The shells are the worker of `kvasir-transfer` and its simulated domain.
//!
//! Reading path: [`outcome`] (how things end), [`regions`] (what may be written), [`imm`] (what is
//! counted), [`plan`] (how a write is cut into frames), [`rails`] (which paths suit it); then [`sender`], which ties [`op`]erations,
//! [`groups`], [`session`]s, their [`path`]s and the [`throttle`] together, with `issue` (what goes next)
//! `failover` (what becomes of a lost path's frames, in the words of [`close`]) [`heartbeat`] (signs of
//! life where nothing is under way), `waiting` (what waits for which paths) and `unsuited` (what a path does not
//! carry); then [`receiver`],
//! the other half of that conversation. Apart from these, [`sieve`] (which endpoint goes when there is room
//! for no more), [`avoid`] (ways that have failed) and [`signal`]: words that must not overtake data, as they
//! are planned; [`signalled`] has the sender execute the plans.

#![forbid(unsafe_code)]

mod avoid;
mod close;
mod failover;
pub mod groups;
mod heartbeat;
mod imm;
mod issue;
mod messages;
mod op;
mod outcome;
mod path;
mod plan;
mod rails;
mod receiver;
mod regions;
mod sender;
mod session;
mod sieve;
pub mod signal;
mod signalled;
pub mod throttle;
mod unsuited;
mod waiting;

pub use avoid::{Avoided, Failed, Patience};
pub use close::{CloseRequest, CloseVerdict, Counted, PathIndex};
pub use heartbeat::Heartbeats;
pub use imm::{Expectation, ImmTable, Maker, PathId};
pub use op::{Body, OpId, Operation};
pub use outcome::{Outcome, Refusal, WriteError};
pub use path::PathLimits;
pub use plan::{Pages, Piece, Shape};
pub use rails::{RAILS_MAX, Rail, Rails};
pub use receiver::{Asked, Closed, Opened, PathRefusal, Receiver};
pub use regions::{RegionTable, Target, check_bounds};
pub use sender::{Action, Frame, FrameKind, GivenUp, Limits, Next, Sender, Settled};
pub use session::SessionId;
pub use sieve::Sieve;
pub use signalled::{Put, Signalled, SignalledTransfer, Told, Word};
