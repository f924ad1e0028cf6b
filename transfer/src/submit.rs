//! From what callers submit to what the core takes, with the checks that need no state. Shared by the
//! engine and the simulated domain.

use std::sync::Arc;
use std::time::Duration;

use kvasir_transfer_core::{Body, Pages, Shape, Target};

use crate::engine::{PeerId, SubmitError};
use crate::payload::Payload;
use crate::rdma::{Named, RdmaPlace};
use crate::region::RegionDesc;
use crate::write::{PageSide, Source, Write, WritePaged};

/// An inline source is copied into the engine's own memory until it is sent.
pub const INLINE_BYTES_MAX: usize = 64 << 20;

/// An operation that may be begun.
#[derive(Debug)]
pub(crate) struct Submission {
    pub(crate) peer: PeerId,
    pub(crate) deadline: Duration,
    pub(crate) payload: Payload,
    pub(crate) body: Body,
    /// What the target's descriptor says to RDMA.
    pub(crate) described: Option<Box<(Named, RdmaPlace)>>,
}

impl RegionDesc {
    pub(crate) fn target(&self) -> Target {
        Target { incarnation: self.incarnation, key: self.key }
    }

    pub(crate) fn described(&self) -> Option<Box<(Named, RdmaPlace)>> {
        let RegionDesc { incarnation, key, length_bytes, rdma } = *self;
        rdma.map(|place| Box::new((Named { incarnation, key, length_bytes }, place)))
    }
}

impl From<PageSide> for Pages {
    fn from(PageSide { offset, stride, indices }: PageSide) -> Self {
        Pages { offset, stride, indices }
    }
}

impl Submission {
    pub(crate) fn write(write: Write) -> Result<Self, SubmitError> {
        let Write { peer, source, target, target_offset, imm, checksum, group, deadline } = write;
        let (payload, source_offset, bytes) = self::source(source)?;
        let shape = Shape::Single { source_offset, target_offset, bytes, checksum };
        Self::checked(peer, deadline, payload, shape, (target, imm, group))
    }

    pub(crate) fn write_paged(write: WritePaged) -> Result<Self, SubmitError> {
        let WritePaged {
            peer,
            source,
            source_pages,
            target,
            target_pages,
            page_bytes,
            imm,
            checksums,
            group,
            deadline,
        } = write;
        let shape = Shape::Paged {
            source: source_pages.into(),
            target: target_pages.into(),
            page_bytes: page_bytes as u64,
            checksums,
        };
        let payload = Payload::from(source);
        Self::checked(peer, deadline, payload, shape, (target, imm, group))
    }

    fn checked(
        peer: PeerId,
        deadline: Duration,
        payload: Payload,
        shape: Shape,
        (target, imm, group): (RegionDesc, Option<u32>, u64),
    ) -> Result<Self, SubmitError> {
        shape.check(payload.len() as u64).map_err(SubmitError::Invalid)?;
        let body = Body::Write { shape, target: target.target(), imm, group };
        Ok(Submission { peer, deadline, payload, body, described: target.described() })
    }

    pub(crate) fn message(
        peer: PeerId,
        message: Vec<u8>,
        deadline: Duration,
        message_bytes_max: usize,
    ) -> Result<Self, SubmitError> {
        if message.len() > message_bytes_max {
            return Err(SubmitError::Invalid("the message is longer than `message_bytes_max`"));
        }
        let body = Body::Message { bytes: message.len() as u64 };
        let payload = Payload::Bytes(Arc::new(message));
        Ok(Submission { peer, deadline, payload, body, described: None })
    }
}

/// Where its bytes lie, from which offset, and how many they are.
pub(crate) fn source(source: Source) -> Result<(Payload, u64, u64), SubmitError> {
    match source {
        Source::Region { handle, offset, bytes } => {
            Ok((Payload::from(handle), offset as u64, bytes as u64))
        }
        Source::Inline(bytes) if bytes.len() > INLINE_BYTES_MAX => {
            Err(SubmitError::Invalid("an inline source must have at most 64 MiB"))
        }
        Source::Inline(bytes) => {
            let length = bytes.len() as u64;
            Ok((Payload::Bytes(Arc::new(bytes)), 0, length))
        }
    }
}

/// When a deadline that lies `from_now` ahead is over.
pub(crate) fn deadline_us(now_us: u64, from_now: Duration) -> u64 {
    now_us.saturating_add(u64::try_from(from_now.as_micros()).unwrap_or(u64::MAX))
}
