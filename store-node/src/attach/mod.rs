//! How an engine on the same host attaches: slot memory, control memory and the descriptors that
//! carry them.
//!
//! 1. [`client`]: what an engine links
//! 2. [`control`]: the control memory of one attach: header, progress word, load, two rings of
//!    [`kvasir_transfer::ring`]
//! 3. [`doorbell`] of the transfer engine: waking a sleeping side without system calls while both
//!    are awake, and without trusting it
//! 4. [`handover`]: descriptors over a Unix socket
//!
//! The node's end is in `crate::node::session`; nothing an engine writes is trusted there.

pub mod client;
pub mod control;
pub mod handover;

pub use client::{AttachError, AttachOptions, EngineAttachment, Link, Receiver, Sender};
pub use kvasir_transfer::{SharedMemory, doorbell};

/// The most an engine may give to `FinishPrefill`: a first token with its log probabilities, many
/// times over. The receiving node reserves as much for each share.
pub const TAIL_BYTES_MAX: usize = 8 << 10;
