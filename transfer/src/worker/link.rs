//! What the worker knows of any connection, whatever its domain.

use std::num::NonZeroU32;

use kvasir_transfer_core::{PathIndex, PathLimits, Rail, SessionId};
use rustix::event::epoll::EventFlags;

use super::hub::Hub;
use crate::closing::FRAMES_MAX;
use crate::config::Domain;
use crate::engine::Loss;

/// Which path of which session a connection is, as its sender names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lane {
    pub(crate) session: SessionId,
    pub(crate) path: PathIndex,
}

/// `queue_pairs`: those for writes, where what the domain orders it orders on each for itself.
pub(crate) fn path_limits(
    (domain, rail): (Domain, Rail),
    queue_pairs: NonZeroU32,
    hub: &Hub,
) -> PathLimits {
    let config = &hub.shared.config;
    let slice_bytes = config.slice_bytes_of.get(&domain).copied().unwrap_or(config.slice_bytes);
    let (slice_bytes, ordering) = (slice_bytes as u64, domain.traits().orders);
    PathLimits { slice_bytes, frames_max: FRAMES_MAX, ordering, queue_pairs, rail }
}

/// What a socket is ready for. Edges set it, a call that would have blocked clears it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Readiness {
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

impl Readiness {
    pub(crate) fn of(flags: EventFlags) -> Self {
        let over = flags.intersects(EventFlags::HUP | EventFlags::ERR | EventFlags::RDHUP);
        Readiness {
            readable: over || flags.contains(EventFlags::IN),
            writable: over || flags.contains(EventFlags::OUT),
        }
    }

    pub(crate) fn add(&mut self, more: Readiness) {
        self.readable |= more.readable;
        self.writable |= more.writable;
    }
}

/// What came of giving a link its turn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Turn {
    /// Something was done, so there may be more to do.
    pub(crate) busy: bool,
    /// It has something to do then, though nothing will wake it.
    pub(crate) wait_until_us: u64,
}

impl Default for Turn {
    fn default() -> Self {
        Turn { busy: false, wait_until_us: u64::MAX }
    }
}

impl Turn {
    pub(crate) fn add(&mut self, other: Turn) {
        self.busy |= other.busy;
        self.wait_until_us = self.wait_until_us.min(other.wait_until_us);
    }
}

/// Why a link is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkEnd {
    /// The other side or the way to it is gone, or the other side wants no more of it.
    Lost,
    /// The card says that the way to the peer is broken.
    Broken,
    /// We have done with it, through no fault of its way: another one takes its place.
    Spent,
    /// It showed no life for too long.
    Silent,
    /// Another incarnation listens there.
    Replaced,
    /// Nobody listens there.
    Refused,
    /// The other side has sent what cannot be.
    Malformed,
    /// We were not admitted; perhaps because of cut-offs that we did not know of.
    Declined { cut_offs: Option<u64> },
    /// We did not admit it.
    Rejected,
    /// It has no certificate that we accept, or does not accept ours, or speaks no TLS.
    Untrusted,
    /// Nothing has come or gone for long, and there are others who want its place.
    Idle,
}

impl From<rustix::io::Errno> for LinkEnd {
    fn from(errno: rustix::io::Errno) -> Self {
        match errno {
            rustix::io::Errno::TIMEDOUT | rustix::io::Errno::HOSTUNREACH => LinkEnd::Silent,
            _ => LinkEnd::Lost,
        }
    }
}

impl LinkEnd {
    /// Whether the other side may well be there again in a moment.
    pub(crate) fn is_hopeful(self) -> bool {
        matches!(self, LinkEnd::Lost | LinkEnd::Broken | LinkEnd::Silent | LinkEnd::Spent)
    }

    /// What it means for a peer of which it was the last link.
    pub(crate) fn loss(self) -> Loss {
        match self {
            LinkEnd::Lost | LinkEnd::Broken | LinkEnd::Spent | LinkEnd::Refused => Loss::Closed,
            LinkEnd::Silent => Loss::Silent,
            LinkEnd::Replaced => Loss::Replaced,
            LinkEnd::Malformed
            | LinkEnd::Rejected
            | LinkEnd::Untrusted
            | LinkEnd::Declined { cut_offs: None } => Loss::Misbehaved,
            LinkEnd::Declined { cut_offs: Some(_) } => Loss::CutOff,
            LinkEnd::Idle => Loss::Idle,
        }
    }
}
