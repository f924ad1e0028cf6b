//! Reading extents, and comparing what was read with what must be there.

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::BlockKey;

use crate::buffer::{PAGE_BYTES, PageBuf};
use crate::disk::{DiskError, DiskOp, Span};
use crate::format::{Head, Record};
use crate::index::{IndexError, Location};
use crate::log::{Log, Operation, Output};

/// Why a read gave nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    #[error("the SSD log has no such block")]
    Missing,
    /// The bytes are not those that were written. The extent is forgotten.
    #[error("the extent of the block on the SSD failed its checksum")]
    Rotten,
    /// It does not fit the place that was given for it.
    #[error("the extent of the block on the SSD has another layout")]
    OtherSize,
    #[error(transparent)]
    Disk(DiskError),
    /// Recover the log anew.
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// An extent that was read and is intact.
#[derive(Debug)]
pub struct ReadExtent {
    pub record: Record,
    /// Of this append.
    pub generation: u64,
    payload_bytes: usize,
    payload_start: usize,
    buffer: PageBuf,
}

impl ReadExtent {
    pub fn payload(&self) -> &[u8] {
        &self.buffer.bytes()[self.payload_start..self.payload_start + self.payload_bytes]
    }
}

impl Log {
    /// Reads an extent; [`Output::Read`] follows.
    pub fn read(&mut self, ticket: u64, key: BlockKey) {
        let at = match self.find(key) {
            Ok(at) => at,
            Err(error) => return self.read_done(ticket, key, Err(error)),
        };
        let (buffer, rest) = (PageBuf::zeroed(at.pages as usize), None);
        self.submit_read(Operation::Read { ticket, key, at }, at, buffer, rest);
    }

    /// Reads an extent, its payload into a place of the same length, of which nobody may rely on anything before
    /// [`Output::Placed`] follows.
    pub fn read_into(&mut self, ticket: u64, key: BlockKey, payload: Span) {
        let payload_pages = payload.length_bytes.div_ceil(PAGE_BYTES);
        let head_pages = |at: &Location| (at.pages as usize).checked_sub(payload_pages);
        let found = self.find(key).and_then(|at| match head_pages(&at) {
            None | Some(0) => Err(ReadError::OtherSize),
            Some(head_pages) => Ok((at, head_pages)),
        });
        match found {
            Ok((at, head_pages)) => {
                let (buffer, rest) = (PageBuf::zeroed(head_pages), Some(payload));
                self.submit_read(Operation::Place { ticket, key, at, payload }, at, buffer, rest);
            }
            Err(error) => {
                self.outputs.push_back(Output::Placed { ticket, key, result: Err(error) });
            }
        }
    }

    fn find(&mut self, key: BlockKey) -> Result<Location, ReadError> {
        match self.index.get(key) {
            Ok(at) => at.ok_or(ReadError::Missing),
            Err(error) => {
                self.index_has_failed(error.clone());
                Err(error.into())
            }
        }
    }

    fn submit_read(
        &mut self,
        operation: Operation,
        at: Location,
        buffer: PageBuf,
        rest: Option<Span>,
    ) {
        self.segments.begin_use(at.segment);
        let offset_bytes = self.offset_bytes(at.segment, at.first_page);
        self.submit(operation, |id| DiskOp::Read { id, offset_bytes, buffer, rest });
    }

    /// Compares what was read with what must be there.
    pub(crate) fn check(
        &mut self,
        key: BlockKey,
        at: Location,
        buffer: PageBuf,
    ) -> Result<ReadExtent, ReadError> {
        let head = head_of(key, at, &buffer);
        let Some(head) = head.filter(|head| head.payload(buffer.bytes()).is_some()) else {
            self.forget_rotten(key, at);
            return Err(ReadError::Rotten);
        };
        Ok(ReadExtent {
            generation: at.generation,
            payload_bytes: head.payload_bytes,
            payload_start: head.payload_start(),
            record: head.record,
            buffer,
        })
    }

    /// The same of a payload that was read into its place, by its checksum there.
    pub(crate) fn check_placed(
        &mut self,
        key: BlockKey,
        at: Location,
        buffer: &PageBuf,
        payload: Span,
        sum: Option<u64>,
    ) -> Result<Record, ReadError> {
        let is_unchecked = mutated(Mutation::ExtentChecksumIgnored) && sum.is_some();
        match head_of(key, at, buffer) {
            // Its checksum is of other bytes.
            Some(head) if head.payload_bytes != payload.length_bytes => Err(ReadError::OtherSize),
            Some(head) if sum == Some(head.payload_checksum) || is_unchecked => Ok(head.record),
            _ => {
                self.forget_rotten(key, at);
                Err(ReadError::Rotten)
            }
        }
    }

    pub(crate) fn read_done(
        &mut self,
        ticket: u64,
        key: BlockKey,
        result: Result<ReadExtent, ReadError>,
    ) {
        self.outputs.push_back(Output::Read { ticket, key, result });
    }
}

/// What a read that has ended well has brought.
pub(crate) fn whole(
    result: Result<(), DiskError>,
    buffer: Option<PageBuf>,
) -> Result<PageBuf, ReadError> {
    result.and(buffer.ok_or(DiskError::Short)).map_err(ReadError::Disk)
}

/// The head of an extent that was read, when it is the one that must be there.
fn head_of(key: BlockKey, at: Location, buffer: &PageBuf) -> Option<Head> {
    Head::decode(buffer.bytes()).filter(|head| {
        head.record.key == key
            && head.place.generation == at.generation
            && head.pages() == at.pages as usize
    })
}
