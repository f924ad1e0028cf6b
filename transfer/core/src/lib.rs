//! The core of the transfer engine: what is counted, checked, split, paced and given up, as state
//! machines without I/O. Time (microseconds of any steady clock) is passed in; what has to be done
//! comes back. The shells are the worker of `kvasir-transfer` and its simulated domain.
//!
//! Reading path: [`outcome`] (how things end), [`regions`] (what may be written), [`imm`] (what is
//! counted), [`plan`] (how a write is cut into frames), then [`sender`], which ties operations,
//! [`groups`], [`session`]s and the [`throttle`] together.

#![forbid(unsafe_code)]

pub mod groups;
pub mod imm;
pub mod outcome;
pub mod plan;
pub mod regions;
pub mod sender;
pub mod session;
pub mod throttle;

pub use imm::{Expectation, ImmTable, PathCounts, PathId};
pub use outcome::{Outcome, Refusal, WriteError};
pub use plan::{Pages, Shape};
pub use regions::{RegionTable, Target};
pub use sender::{Action, Body, Frame, FrameKind, Limits, Next, OpId, Operation, Sender, Settled};
pub use session::SessionId;
