//! Writes to many peers in one submission. A [`PeerGroup`] is registered once and then named by its
//! handle; a [`Scatter`] sends a slice of one source to each of its members, a [`Barrier`] only an
//! immediate. Either completes once, when the last part has ended; how each part ended is in its
//! [`PartOutcomes`]. (fabric-lib, arXiv 2510.27656, section 3.)
//!
//! A part is a write like any other: it is sent again after a failover, refused, counted and cancelled
//! for itself. A member that is lost fails its own parts only. It stays lost in the group, as its session
//! does: who connects anew registers a new group.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use kvasir_transfer::memory::{Prefault, SharedMemory};
//! use kvasir_transfer::scatter::{Barrier, GroupMember, Scatter, ScatterSlice};
//! use kvasir_transfer::{Completion, Expect, Handlers, TransferConfig, TransferEngine};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let start = || {
//! #     let tcp_listen = Some(([127, 0, 0, 1], 0).into());
//! #     let config = TransferConfig { tcp_listen, ..TransferConfig::default() };
//! #     TransferEngine::start(config, Handlers::default(), &prometheus::Registry::new())
//! # };
//! # let region = |engine: &TransferEngine, name| -> Result<_, Box<dyn std::error::Error>> {
//! #     Ok(engine.register(Arc::new(SharedMemory::create(name, 4096, Prefault::No)?))?)
//! # };
//! let (sender, receivers) = (start()?, [start()?, start()?]);
//! let (source, _) = region(&sender, "source")?;
//! source.memory().copy_from(0, b"onetwo")?;
//!
//! // A region of each receiver. The group is registered once.
//! let (mut targets, mut members) = (Vec::new(), Vec::new());
//! for receiver in &receivers {
//!     let (handle, target) = region(receiver, "target")?;
//!     targets.push(handle);
//!     members.push(GroupMember { peer: sender.connect(&receiver.endpoint())?, target });
//! }
//! let peers = sender.register_group(members)?;
//!
//! // Three bytes for each: the first three for the first one, and so on.
//! let slice = |member| ScatterSlice {
//!     member,
//!     source_offset: 3 * member as u64,
//!     target_offset: 0,
//!     bytes: 3,
//!     imm: Some(7),
//! };
//! let (slices, group, deadline) = (vec![slice(0), slice(1)], 0, Duration::from_secs(5));
//! let scatter = Scatter { peers: peers.clone(), source, slices, group, deadline };
//! let (done, landed) = Completion::future();
//! let outcomes = sender.scatter(scatter, done)?;
//! landed.wait()?;
//! assert_eq!([outcomes.get(0), outcomes.get(1)], [Some(Ok(())); 2]);
//! let mut bytes = [0; 3];
//! targets[1].memory().copy_to(0, &mut bytes)?;
//! assert_eq!(&bytes, b"two");
//!
//! // And a word to both of them, without data.
//! let (done, told) = Completion::future();
//! receivers[0].expect_imm(Expect { imm: 8, count: 1, deadline: Some(deadline) }, done)?;
//! sender.barrier(&Barrier { peers, imm: 8, group, deadline }, Completion::Ignore)?;
//! told.wait()?;
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kvasir_transfer_core::{Body, Shape, Target};

use crate::completion::Completion;
use crate::engine::{PeerId, SubmitError};
use crate::parts::Join;
pub use crate::parts::PartOutcomes;
use crate::payload::{Payload, Permit, Waiter};
use crate::region::{RegionDesc, RegionHandle};

/// Members of one group.
pub const GROUP_MEMBERS_MAX: usize = 4096;

/// A peer, and the region there that this group's slices go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupMember {
    pub peer: PeerId,
    pub target: RegionDesc,
}

/// Why a group was not registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum GroupError {
    #[error("a group must have at least one member")]
    Empty,
    #[error("a group of {0} members exceeds the maximum of {GROUP_MEMBERS_MAX}")]
    TooLarge(usize),
}

/// Peers that are written to together. Cheap to clone; it lasts as long as a clone of it.
#[derive(Clone)]
pub struct PeerGroup(Arc<Members>);

struct Members {
    /// Of the engine whose sessions they are.
    incarnation: u64,
    members: Vec<GroupMember>,
}

impl fmt::Debug for PeerGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PeerGroup").field(&self.0.members.len()).finish()
    }
}

impl PeerGroup {
    pub(crate) fn new(incarnation: u64, members: Vec<GroupMember>) -> Result<Self, GroupError> {
        match members.len() {
            0 => Err(GroupError::Empty),
            large if large > GROUP_MEMBERS_MAX => Err(GroupError::TooLarge(large)),
            _ => Ok(PeerGroup(Arc::new(Members { incarnation, members }))),
        }
    }

    /// In the order in which they were registered, by which slices name them.
    pub fn members(&self) -> &[GroupMember] {
        &self.0.members
    }
}

/// What goes to one member. A member may be named by several slices, or by none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScatterSlice {
    /// Its place in the group.
    pub member: usize,
    /// In the source region, in bytes.
    pub source_offset: u64,
    /// In the member's region, in bytes.
    pub target_offset: u64,
    pub bytes: u64,
    /// Counted at that member when the slice has landed. All may have the same, or each its own.
    pub imm: Option<u32>,
}

/// One slice of a source for each of many peers.
#[derive(Debug, Clone)]
pub struct Scatter {
    pub peers: PeerGroup,
    /// As in [`crate::Source::Region`]: what slices name must not change until the scatter has ended.
    pub source: RegionHandle,
    /// Each is an operation of its own in `operations_max`. None at all is done at once.
    pub slices: Vec<ScatterSlice>,
    /// Names what can be drained together (see `TransferEngine::drain_group`).
    pub group: u64,
    /// From now, for all slices.
    pub deadline: Duration,
}

/// An immediate for every member of a group, and no data. It is not ordered behind other writes: whoever
/// wants it to stand for them submits it when they have ended, or counts them.
#[derive(Debug, Clone)]
pub struct Barrier {
    pub peers: PeerGroup,
    /// Counted once at every member.
    pub imm: u32,
    /// Names what can be drained together (see `TransferEngine::drain_group`).
    pub group: u64,
    /// From now, for all members.
    pub deadline: Duration,
}

/// One write of a scatter or barrier.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) peer: PeerId,
    pub(crate) body: Body,
    pub(crate) done: Waiter,
}

/// Parts that may be begun, and how they will have ended.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) parts: Vec<Part>,
    pub(crate) payload: Payload,
    /// Told at once where there is no part that could end.
    pub(crate) nothing_to_do: Option<Waiter>,
    pub(crate) deadline: Duration,
    pub(crate) outcomes: Arc<PartOutcomes>,
}

/// A submission that was checked.
#[derive(Debug)]
pub(crate) struct Unjoined {
    bodies: Vec<(PeerId, Body)>,
    payload: Payload,
    deadline: Duration,
}

impl Unjoined {
    pub(crate) fn scatter(scatter: Scatter, incarnation: u64) -> Result<Self, SubmitError> {
        let Scatter { peers, source, slices, group, deadline } = scatter;
        check_group(&peers, incarnation)?;
        let payload = Payload::from(source);
        let mut bodies = Vec::with_capacity(slices.len());
        for slice in slices {
            let ScatterSlice { member, source_offset, target_offset, bytes, imm } = slice;
            let member = peers.members().get(member);
            let member =
                member.ok_or(SubmitError::Invalid("a slice names a member that does not exist"))?;
            let shape = Shape::Single { source_offset, target_offset, bytes, checksum: None };
            shape.check(payload.len() as u64).map_err(SubmitError::Invalid)?;
            bodies.push((member.peer, body(shape, member, imm, group)));
        }
        Ok(Unjoined { bodies, payload, deadline })
    }

    pub(crate) fn barrier(barrier: &Barrier, incarnation: u64) -> Result<Self, SubmitError> {
        let Barrier { peers, imm, group, deadline } = barrier;
        check_group(peers, incarnation)?;
        let (source_offset, target_offset, bytes, checksum) = (0, 0, 0, None);
        let bodies = peers.members().iter().map(|member| {
            let shape = Shape::Single { source_offset, target_offset, bytes, checksum };
            (member.peer, body(shape, member, Some(*imm), *group))
        });
        let payload = Payload::Bytes(Arc::new(Vec::new()));
        Ok(Unjoined { bodies: bodies.collect(), payload, deadline: *deadline })
    }

    /// How many operations it is.
    pub(crate) fn operations(&self) -> usize {
        self.bodies.len()
    }

    pub(crate) fn join(self, done: Completion, permit: Permit) -> Parts {
        let Unjoined { bodies, payload, deadline } = self;
        let outcomes = Arc::new(PartOutcomes::new(bodies.len()));
        let done = Waiter::with_permit(done, permit);
        if bodies.is_empty() {
            let nothing_to_do = Some(done);
            return Parts { parts: Vec::new(), payload, nothing_to_do, deadline, outcomes };
        }
        let join = Join::new(&outcomes, done);
        let parts = (0u32..).zip(bodies).map(|(part, (peer, body))| {
            let done = Waiter::of_part(Arc::clone(&join), part);
            Part { peer, body, done }
        });
        Parts { parts: parts.collect(), payload, nothing_to_do: None, deadline, outcomes }
    }
}

fn check_group(peers: &PeerGroup, incarnation: u64) -> Result<(), SubmitError> {
    if peers.0.incarnation == incarnation {
        Ok(())
    } else {
        Err(SubmitError::Invalid("the peer group belongs to another engine"))
    }
}

fn body(shape: Shape, member: &GroupMember, imm: Option<u32>, group: u64) -> Body {
    let target: Target = member.target.target();
    Body::Write { shape, target, imm, group }
}

#[cfg(test)]
mod tests {
    use kvasir_transfer_core::{Refusal, WriteError};

    use super::*;

    #[test]
    fn every_outcome_is_kept_as_it_is() {
        let mut all = vec![
            Ok(()),
            Err(WriteError::Corrupt),
            Err(WriteError::PeerGone),
            Err(WriteError::DeadlineExceeded),
            Err(WriteError::Cancelled),
        ];
        all.extend(Refusal::ALL.map(|entry| Err(WriteError::Refused(entry.0))));
        let outcomes = Arc::new(PartOutcomes::new(all.len()));
        let join = Join::new(&outcomes, Waiter::new(Completion::Ignore));
        for (part, outcome) in (0u32..).zip(all) {
            assert_eq!(outcomes.get(part as usize), None);
            join.part_ended(part, outcome);
            assert_eq!(outcomes.get(part as usize), Some(outcome));
        }
    }

    #[test]
    fn the_whole_is_told_once_when_the_last_part_has_ended_with_the_first_error() {
        let outcomes = Arc::new(PartOutcomes::new(3));
        let (done, flag) = Completion::flag();
        let join = Join::new(&outcomes, Waiter::new(done));
        join.part_ended(1, Err(WriteError::PeerGone));
        join.part_ended(2, Err(WriteError::Corrupt));
        assert_eq!((flag.get(), outcomes.get(0)), (None, None));
        join.part_ended(0, Ok(()));
        assert_eq!(flag.get(), Some(Err(WriteError::PeerGone)));
        assert_eq!(outcomes.get(0), Some(Ok(())));
        let failed: Vec<_> = outcomes.failed().collect();
        assert_eq!(failed, [(1, WriteError::PeerGone), (2, WriteError::Corrupt)]);
        assert_eq!(outcomes.get(3), None);
    }

    #[test]
    fn groups_are_neither_empty_nor_endless() {
        let incarnation = 1;
        let peer = PeerId { incarnation: 2, session: 0 };
        let target = RegionDesc { incarnation: 2, key: 1, length_bytes: 1, rdma: None };
        let of = |members| PeerGroup::new(incarnation, vec![GroupMember { peer, target }; members]);
        assert_eq!(of(0).err(), Some(GroupError::Empty));
        assert!(of(GROUP_MEMBERS_MAX).is_ok());
        let large = GROUP_MEMBERS_MAX + 1;
        assert_eq!(of(large).err(), Some(GroupError::TooLarge(large)));
    }
}
