//! The log: appending, reading and removing, as operations on a disk.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Namespace};

use crate::buffer::{PAGE_BYTES, PageBuf};
use crate::clean::Cleaning;
use crate::disk::{DiskDone, DiskError, DiskOp, Span};
use crate::format::{
    Entry, ExtentBuf, Place, Record, SUPER_PAGES, encode_footer, encode_segment_header,
    footer_pages,
};
use crate::graves::Graves;
use crate::index::{IndexError, KeyIndex, Location};
use crate::read::{ReadError, ReadExtent, whole};
use crate::segments::{Phase, Segments};

/// Free segments without which only cleaning may append: what it moves always has a place. One takes what is left of a
/// segment; the other is for the next try when an error of the disk has left the first half full.
pub(crate) const SPARE_SEGMENTS: u32 = 2;
/// Cleaning begins when no more than so many are free.
const CLEAN_BELOW: u32 = 3;
/// Of what may be live, the part that removals may take that are kept for what could not be read.
const REMOVALS_PART: u64 = 8;
/// So many extents are not made to wait for others that are being written.
const SYNC_TOGETHER: usize = 32;

/// Why nothing counts of an append. A part of it may be on the disk, though, and all of it be found by the next start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// Cleaning frees no segment now: remove blocks first.
    #[error("the SSD log has no free segment")]
    Full,
    /// Each removal takes a page for as long as a segment that could not be read may have what was removed.
    #[error("too many removals are pending for a part of the disk that was unreadable at startup")]
    TooManyRemovals,
    /// It fits no segment, and never will.
    #[error("an extent of {pages} pages does not fit in a segment")]
    TooLarge { pages: usize },
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// What came of something.
#[derive(Debug)]
pub enum Output {
    /// An append is durable and can be read, also after a crash; or nothing of it counts, until the next start. Appends
    /// that succeed are answered in their order.
    Appended {
        ticket: u64,
        key: BlockKey,
        result: Result<(), AppendError>,
    },
    Read {
        ticket: u64,
        key: BlockKey,
        result: Result<ReadExtent, ReadError>,
    },
    /// The payload is where it was to be, and intact; or what is there is of no use, and nothing more is written there.
    Placed {
        ticket: u64,
        key: BlockKey,
        result: Result<Record, ReadError>,
    },
    /// An extent that nobody asked for was found rotten, and is forgotten.
    Lost {
        key: BlockKey,
    },
    /// The index is of no use any more; nothing will work until the log is recovered.
    IndexFailed(IndexError),
}

/// What there is, and what was counted since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub segments: u32,
    pub segments_free: u32,
    /// Could not be read whole at the start, and are left as they are until the next one.
    pub segments_withheld: u32,
    pub live_bytes: u64,
    /// Of these, extents that are found no more and stay because of what they take away.
    pub buried_bytes: u64,
    /// Operations handed out or waiting.
    pub operations: u64,
    /// Appends that wait until there is room.
    pub waiting: u64,
    /// Full segments whose footers are due when nothing uses them any more.
    pub unsealed: u64,
    pub appended_total: u64,
    pub appended_bytes_total: u64,
    pub moved_total: u64,
    pub cleaned_segments_total: u64,
    pub rotten_total: u64,
    pub disk_errors_total: u64,
}

/// Who an append is for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum For {
    User {
        ticket: u64,
    },
    /// Of what has this generation, and only as long as its key still has it.
    Cleaning {
        generation: u64,
    },
}

#[derive(Debug)]
pub(crate) struct Append {
    /// In the order of appends; copies have new ones too.
    number: u64,
    whose: For,
    entry: Entry,
    at: Location,
    /// The checksum of a payload that is written from where it lies.
    placed: Option<u64>,
}

#[derive(Debug)]
pub(crate) enum Operation {
    Header {
        segment: u32,
    },
    Extent(Append),
    Footer {
        segment: u32,
    },
    Sync {
        covered: Vec<Append>,
    },
    Read {
        ticket: u64,
        key: BlockKey,
        at: Location,
    },
    Place {
        ticket: u64,
        key: BlockKey,
        at: Location,
        payload: Span,
    },
    Victim {
        segment: u32,
    },
    /// One extent of it.
    VictimExtent {
        at: Location,
    },
}

/// The segment that is appended to.
#[derive(Debug)]
pub(crate) struct Open {
    pub(crate) segment: u32,
    pub(crate) next_page: u32,
    /// Extents that got a place, and so need one in the footer.
    pub(crate) placed: usize,
    /// Those that were written.
    pub(crate) entries: Vec<Entry>,
}

/// See the package. Call order: after every call that takes `&mut self`, submit what
/// [`poll_operation`](Self::poll_operation) gives as far as the disk takes it, and act on what
/// [`poll_output`](Self::poll_output) gives; bring each operation's end to
/// [`handle_done`](Self::handle_done).
#[derive(Debug)]
pub struct Log {
    pub(crate) log_id: u64,
    pub(crate) segments: Segments,
    pub(crate) index: Box<dyn KeyIndex>,
    pub(crate) graves: Graves,
    pub(crate) open: Option<Open>,
    pub(crate) next_sequence: u64,
    pub(crate) next_generation: u64,
    next_operation: u64,
    next_append: u64,
    /// Bounded by the callers' appends and reads, one sync, and what cleaning has under way.
    operations: BTreeMap<u64, Operation>,
    ready: VecDeque<DiskOp>,
    pub(crate) outputs: VecDeque<Output>,
    /// Appends that wait until cleaning has made room, in their order.
    waiting: VecDeque<(u64, ExtentBuf)>,
    /// Blocks of which callers append extents, and how many.
    pub(crate) appending: BTreeMap<BlockKey, u32>,
    /// Pages of all extents that callers have appended.
    pub(crate) appended_pages: u64,
    /// Numbers of appends that are being written.
    writing: BTreeSet<u64>,
    /// Written and not yet covered by a sync that was submitted, by their numbers.
    written: BTreeMap<u64, Append>,
    syncing: bool,
    /// Sealed segments whose last writes are under way, with what their footers will list.
    unsealed: BTreeMap<u32, Vec<Entry>>,
    pub(crate) cleaning: Option<Cleaning>,
    /// What segments are read into for it. One is enough, and it is kept: an allocator that gets so much back from
    /// one thread and is asked for it by another holds on to both.
    pub(crate) cleaning_buffer: Option<PageBuf>,
    /// Set when cleaning met an error or gained nothing, until something has changed.
    pub(crate) cleaning_paused: bool,
    /// Sealed segments that could not be read to be cleaned, and how many had been cleaned by then: others have their
    /// turn first.
    pub(crate) unread: BTreeMap<u32, u64>,
    index_failed: bool,
    pub(crate) counts: Counts,
}

impl Log {
    pub(crate) fn new(log_id: u64, segments: Segments, index: Box<dyn KeyIndex>) -> Self {
        Log {
            log_id,
            segments,
            index,
            graves: Graves::default(),
            open: None,
            next_sequence: 1,
            next_generation: 1,
            next_operation: 1,
            next_append: 1,
            operations: BTreeMap::new(),
            ready: VecDeque::new(),
            outputs: VecDeque::new(),
            waiting: VecDeque::new(),
            appending: BTreeMap::new(),
            appended_pages: 0,
            writing: BTreeSet::new(),
            written: BTreeMap::new(),
            syncing: false,
            unsealed: BTreeMap::new(),
            cleaning: None,
            cleaning_buffer: None,
            cleaning_paused: false,
            unread: BTreeMap::new(),
            index_failed: false,
            counts: Counts::default(),
        }
    }

    /// Pages that an extent may have at most.
    pub fn extent_pages_max(&self) -> usize {
        self.segments.segment_pages as usize - 1 - footer_pages(1)
    }

    /// Bytes that may be live: what is kept beyond it leaves cleaning nothing to gain. Segments that are not written until
    /// the next start give no room, whatever is in them: what takes its place is written elsewhere.
    pub fn live_bytes_max(&self) -> u64 {
        let written = self.segments.count() - self.segments.withheld();
        // None at all would be no log.
        live_bytes_max(written, self.segments.segment_pages).max(PAGE_BYTES as u64)
    }

    pub fn counts(&self) -> Counts {
        Counts {
            segments: self.segments.count(),
            segments_free: self.segments.free(),
            segments_withheld: self.segments.withheld(),
            live_bytes: self.segments.live_pages() * PAGE_BYTES as u64,
            buried_bytes: self.graves.pages() * PAGE_BYTES as u64,
            operations: self.operations.len() as u64,
            waiting: self.waiting.len() as u64,
            unsealed: self.unsealed.len() as u64,
            ..self.counts
        }
    }

    /// Appends an extent, after those that wait for room; [`Output::Appended`] follows. It replaces an earlier one of
    /// the same key once it is durable.
    pub fn append(&mut self, ticket: u64, extent: ExtentBuf) {
        let pages = extent.pages();
        if pages > self.extent_pages_max() {
            return self.not_appended(ticket, extent.record.key, AppendError::TooLarge { pages });
        }
        if self.waiting.is_empty() && !self.has_room(pages as u32, SPARE_SEGMENTS) {
            self.clean_again();
        }
        self.waiting.push_back((ticket, extent));
        self.append_waiting();
    }

    /// Appends what there is room for. What no room comes for fails.
    fn append_waiting(&mut self) {
        while let Some((ticket, extent)) = self.waiting.pop_front() {
            let has_room = self.has_room(extent.pages() as u32, SPARE_SEGMENTS);
            if !has_room && self.makes_room() {
                return self.waiting.push_front((ticket, extent));
            }
            let key = extent.record.key;
            match self.append_for(For::User { ticket }, extent, SPARE_SEGMENTS) {
                Ok(()) => self.clean_again(),
                Err(error) => self.not_appended(ticket, key, error),
            }
        }
    }

    /// Whether room may come of what is under way.
    fn makes_room(&self) -> bool {
        let is_idle = self.operations.is_empty() && self.written.is_empty();
        !self.cleaning_paused && (self.cleaning.is_some() || !is_idle)
    }

    fn not_appended(&mut self, ticket: u64, key: BlockKey, error: AppendError) {
        self.outputs.push_back(Output::Appended { ticket, key, result: Err(error) });
    }

    /// Segments whose room is not gained because they cannot be read.
    pub fn unread_segments(&self) -> usize {
        self.unread.len()
    }

    /// Tries again what an error has stopped; to be called now and then. A segment that could not be read has its next
    /// turn when as many others were cleaned as there are, or no other can be.
    pub fn retry(&mut self) {
        let cleaned = self.counts.cleaned_segments_total;
        let count = u64::from(self.segments.count());
        self.unread.retain(|_, by_then| cleaned < *by_then + count);
        if self.segments.to_clean(&self.unread).is_none() {
            self.unread.clear();
        }
        self.clean_again();
    }

    /// Something has changed since cleaning has gained nothing.
    fn clean_again(&mut self) {
        self.cleaning_paused = false;
        self.clean_if_needed();
    }

    /// Forgets an extent. A crash may bring it back, and none that was written before it. One that follows no other
    /// (`follows_none`) is remembered while it may: see [`Self::erase`].
    pub fn remove(&mut self, key: BlockKey, follows_none: bool) {
        match self.index.remove(key) {
            Ok(Some(at)) => {
                self.bury(key, at, follows_none);
                self.cleaning_paused = false;
            }
            Ok(None) => {}
            Err(error) => self.index_has_failed(error),
        }
    }

    /// Forgets a block that follows no other, so that no crash brings it back; [`Output::Appended`] follows when that
    /// is so. What is appended of it later counts.
    pub fn erase(&mut self, ticket: u64, key: BlockKey, namespace: Namespace) {
        // Where next to nothing can be written there is room for some all the same.
        let pages = self.live_bytes_max() / PAGE_BYTES as u64;
        let pages_max = pages.max(self.segments.segment_pages.into()) / REMOVALS_PART;
        if self.graves.are_too_many(pages_max) {
            return self.not_appended(ticket, key, AppendError::TooManyRemovals);
        }
        let is_indexed = match self.index.get(key) {
            Ok(at) => at.is_some(),
            Err(error) => {
                self.index_has_failed(error);
                true
            }
        };
        let is_coming = self.appending.contains_key(&key)
            || self.waiting.iter().any(|(_, extent)| extent.record.key == key);
        if mutated(Mutation::RemovalRecordOmitted) {
            self.remove(key, true);
            self.outputs.push_back(Output::Appended { ticket, key, result: Ok(()) });
        } else if is_indexed || is_coming || self.graves.may_come_back(key) {
            self.append(ticket, ExtentBuf::removal(key, namespace));
        } else {
            self.outputs.push_back(Output::Appended { ticket, key, result: Ok(()) });
        }
    }

    /// The next operation for the disk.
    pub fn poll_operation(&mut self) -> Option<DiskOp> {
        self.ready.pop_front()
    }

    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Nothing is under way or waiting.
    pub fn is_idle(&self) -> bool {
        self.operations.is_empty() && self.written.is_empty() && self.waiting.is_empty()
    }

    /// An operation has ended.
    pub fn handle_done(&mut self, done: DiskDone) {
        let DiskDone { id, result, buffer, rest_sum } = done;
        let Some(operation) = self.operations.remove(&id) else { return };
        self.counts.disk_errors_total += u64::from(result.is_err());
        match operation {
            Operation::Header { segment } => {
                match result {
                    Ok(()) => self.segments.get_mut(segment).has_header = true,
                    Err(error) => self.abandon(segment, error),
                }
                self.end_use(segment);
            }
            Operation::Footer { segment } => self.segments.end_use(segment),
            Operation::Extent(append) => {
                let is_as_said = append.placed.is_none_or(|sum| rest_sum == Some(sum));
                let result = match result {
                    Ok(()) if !is_as_said => Err(DiskError::Changed),
                    result => result,
                };
                self.extent_done(append, result);
            }
            Operation::Sync { covered } => self.sync_done(covered, result),
            Operation::Read { ticket, key, at } => {
                let result = whole(result, buffer).and_then(|buffer| self.check(key, at, buffer));
                self.end_read(at.segment);
                self.read_done(ticket, key, result);
            }
            Operation::Place { ticket, key, at, payload } => {
                let result = whole(result, buffer)
                    .and_then(|buffer| self.check_placed(key, at, &buffer, payload, rest_sum));
                self.end_read(at.segment);
                self.outputs.push_back(Output::Placed { ticket, key, result });
            }
            Operation::Victim { segment } => self.victim_read(segment, result.ok().and(buffer)),
            Operation::VictimExtent { at } => {
                self.victim_extent_read(at, result.ok().and(buffer));
            }
        }
        self.sync_if_needed();
        self.clean_if_needed();
        self.append_waiting();
    }

    pub(crate) fn append_for(
        &mut self,
        whose: For,
        mut extent: ExtentBuf,
        spare: u32,
    ) -> Result<(), AppendError> {
        let pages = extent.pages() as u32;
        let (segment, first_page) = self.room(pages, spare)?;
        let number = self.next_append;
        self.next_append += 1;
        let generation = match whose {
            For::Cleaning { generation } if !mutated(Mutation::CleaningRenewsGeneration) => {
                generation
            }
            For::Cleaning { .. } | For::User { .. } => {
                self.next_generation += 1;
                self.next_generation - 1
            }
        };
        let at = Location { segment, first_page, pages, generation };
        extent.seal(Place {
            log_id: self.log_id,
            segment_sequence: self.segments.get(segment).sequence,
            log_page: self.offset_bytes(segment, first_page) / PAGE_BYTES as u64,
            generation,
        });
        let entry = Entry::new(&extent.record, extent.is_removal, generation, (first_page, pages));
        if let For::User { .. } = whose {
            *self.appending.entry(entry.key).or_insert(0) += 1;
            self.appended_pages += u64::from(pages);
        }
        self.writing.insert(number);
        self.segments.begin_use(segment);
        let offset_bytes = self.offset_bytes(segment, first_page);
        let ExtentBuf { buffer, placed, .. } = extent;
        let (rest, placed) = placed.unzip();
        let append = Append { number, whose, entry, at, placed };
        self.submit(Operation::Extent(append), |id| DiskOp::Write {
            id,
            offset_bytes,
            buffer,
            rest,
        });
        Ok(())
    }

    fn fits(&self, open: &Open, pages: u32) -> bool {
        let footer = footer_pages(open.placed + 1) as u32;
        open.next_page + pages + footer <= self.segments.segment_pages
    }

    fn has_room(&self, pages: u32, spare: u32) -> bool {
        let free = self.segments.free();
        // With fewer the open segment is one of the spare ones.
        let into_open = self.open.as_ref().is_some_and(|open| self.fits(open, pages));
        free > spare || free == spare && into_open
    }

    /// A place for so many pages, in the open segment or a new one.
    fn room(&mut self, pages: u32, spare: u32) -> Result<(u32, u32), AppendError> {
        if !self.has_room(pages, spare) {
            return Err(AppendError::Full);
        }
        if self.open.as_ref().is_some_and(|open| !self.fits(open, pages)) {
            self.seal_open();
        }
        if self.open.is_none() {
            let sequence = self.next_sequence;
            let segment = self.segments.open(sequence, spare).ok_or(AppendError::Full)?;
            self.unread.remove(&segment);
            self.next_sequence += 1;
            self.open = Some(Open { segment, next_page: 1, placed: 0, entries: Vec::new() });
            self.write_header(segment);
        }
        let open = self.open.as_mut().expect("it was just opened");
        let first_page = open.next_page;
        open.next_page += pages;
        open.placed += 1;
        Ok((open.segment, first_page))
    }

    pub(crate) fn write_header(&mut self, segment: u32) {
        let buffer = encode_segment_header(self.log_id, self.segments.get(segment).sequence);
        let offset_bytes = self.offset_bytes(segment, 0);
        self.segments.begin_use(segment);
        self.submit_write(Operation::Header { segment }, offset_bytes, buffer);
    }

    /// The open segment gets no more extents, and a footer when its last write has ended.
    fn seal_open(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.unsealed.insert(open.segment, open.entries);
        self.write_footer_if_due(open.segment);
    }

    /// Writes the footer of a segment whose writes have all ended.
    pub(crate) fn write_footer_if_due(&mut self, segment: u32) {
        if self.segments.get(segment).in_use > 0 || !self.unsealed.contains_key(&segment) {
            return;
        }
        let entries = self.unsealed.remove(&segment).unwrap_or_default();
        self.write_footer(segment, &entries);
    }

    pub(crate) fn write_footer(&mut self, segment: u32, entries: &[Entry]) {
        let buffer = encode_footer(self.log_id, self.segments.get(segment).sequence, entries);
        let first_page = self.segments.segment_pages - buffer.pages() as u32;
        let offset_bytes = self.offset_bytes(segment, first_page);
        self.segments.begin_use(segment);
        self.segments.seal(segment);
        self.submit_write(Operation::Footer { segment }, offset_bytes, buffer);
    }

    fn extent_done(&mut self, append: Append, result: Result<(), DiskError>) {
        let segment = append.at.segment;
        self.writing.remove(&append.number);
        let of = self.segments.get(segment);
        // Its segment was abandoned meanwhile, and nobody would look for it there.
        let orphaned = of.phase == Phase::Sealed && !of.has_header;
        match if orphaned { result.and(Err(DiskError::Short)) } else { result } {
            Ok(()) => {
                self.list(segment, append.entry.clone());
                if mutated(Mutation::AppendReportedBeforeSync) {
                    self.segments.get_mut(segment).header_durable = true;
                    return self.durable(append);
                }
                self.written.insert(append.number, append);
            }
            Err(error) => {
                self.end_use(segment);
                self.appended(append, Err(error));
            }
        }
    }

    /// An operation on a segment has ended; the last one of a full segment brings its footer.
    pub(crate) fn end_use(&mut self, segment: u32) {
        self.segments.end_use(segment);
        self.write_footer_if_due(segment);
    }

    /// A read of a segment has ended.
    fn end_read(&mut self, segment: u32) {
        self.segments.end_use(segment);
        if !mutated(Mutation::FooterOmittedAfterRead) {
            self.write_footer_if_due(segment);
        }
    }

    /// Puts what was written on the list that becomes the segment's footer.
    fn list(&mut self, segment: u32, entry: Entry) {
        match &mut self.open {
            Some(open) if open.segment == segment => open.entries.push(entry),
            _ => {
                if let Some(entries) = self.unsealed.get_mut(&segment) {
                    entries.push(entry);
                }
            }
        }
    }

    /// One sync at a time covers all that was written before it. It waits for what is being written, as long as that
    /// is not a lot: each makes the disk empty its cache, which takes it as long as many extents.
    fn sync_if_needed(&mut self) {
        if self.syncing {
            return;
        }
        let has_header = |append: &&Append| self.segments.get(append.at.segment).has_header;
        // In order, so that a block is never answered for before the one appended before it.
        let first_writing = self.writing.first().copied();
        let headless = self.written.values().find(|append| !has_header(append));
        let end = first_writing.into_iter().chain(headless.map(|append| append.number)).min();
        let due = end.map_or(self.written.len(), |end| self.written.range(..end).count());
        if due < SYNC_TOGETHER && !self.writing.is_empty() {
            return;
        }
        let rest = end.map_or_else(BTreeMap::new, |end| self.written.split_off(&end));
        let covered = std::mem::replace(&mut self.written, rest);
        let covered: Vec<Append> = covered.into_values().collect();
        if !covered.is_empty() {
            self.syncing = true;
            self.submit(Operation::Sync { covered }, |id| DiskOp::Sync { id });
        }
    }

    fn sync_done(&mut self, covered: Vec<Append>, result: Result<(), DiskError>) {
        self.syncing = false;
        let Err(error) = result else {
            for append in &covered {
                self.header_is_durable(append.at.segment);
            }
            return covered.into_iter().for_each(|append| self.durable(append));
        };
        // Nobody knows what of it is there, nor of what was written meanwhile.
        let meanwhile = std::mem::take(&mut self.written).into_values();
        for append in covered.into_iter().chain(meanwhile) {
            self.unlist(&append);
            let segment = append.at.segment;
            self.end_use(segment);
            self.appended(append, Err(error));
        }
        // Their headers may be lost as well.
        let unfinished = self.open.iter().map(|open| open.segment);
        for segment in unfinished.chain(self.unsealed.keys().copied()).collect::<Vec<u32>>() {
            let of = self.segments.get_mut(segment);
            of.has_header = of.header_durable;
            self.abandon(segment, error);
        }
    }

    fn unlist(&mut self, append: &Append) {
        let of = |entry: &Entry| (entry.generation, entry.first_page);
        let lists = self.open.iter_mut().map(|open| &mut open.entries);
        for list in lists.chain(self.unsealed.values_mut()) {
            list.retain(|entry| of(entry) != of(&append.entry));
        }
    }

    /// A segment without a header that can be relied on is not appended to any more, and has no
    /// footer: what is durable in it is found by looking at all of it.
    fn abandon(&mut self, segment: u32, error: DiskError) {
        if self.open.as_ref().is_some_and(|open| open.segment == segment) {
            self.open = None;
        }
        self.unsealed.remove(&segment);
        if !self.segments.get(segment).has_header {
            let of = |append: &Append| append.at.segment == segment;
            let lost: Vec<u64> =
                self.written.iter().filter(|(_, append)| of(append)).map(|(n, _)| *n).collect();
            for number in lost {
                let append = self.written.remove(&number).expect("it was just listed");
                self.segments.end_use(segment);
                self.appended(append, Err(error));
            }
        }
        if self.segments.get(segment).phase == Phase::Open {
            self.segments.seal(segment);
        }
    }

    /// An append can be relied on.
    fn durable(&mut self, append: Append) {
        let Append { whose, entry, at, .. } = &append;
        let wanted = match whose {
            For::User { .. } => Ok(true),
            For::Cleaning { .. } if mutated(Mutation::RemovedBlockReturnsAfterCleaning) => Ok(true),
            // Unless it was removed or replaced.
            For::Cleaning { generation } => {
                let now = self.index.get(entry.key);
                now.map(|now| now.is_some_and(|now| now.generation == *generation))
            }
        };
        if entry.is_removal && matches!(whose, For::User { .. }) {
            match self.index.remove(entry.key) {
                Ok(former) => self.removed(entry, *at, former),
                Err(error) => self.index_has_failed(error),
            }
            let segment = at.segment;
            self.end_use(segment);
            return self.appended(append, Ok(()));
        }
        let indexed = match wanted {
            Ok(true) => self.index.insert(entry.key, *at).map(|former| (true, former)),
            Ok(false) => Ok((false, None)),
            Err(error) => Err(error),
        };
        let (segment, bytes) = (at.segment, u64::from(at.pages) * PAGE_BYTES as u64);
        let key = entry.key;
        let use_of = |of: u32| (of, self.segments.get(of).sequence);
        match indexed {
            Ok((true, former)) => {
                self.graves.replaced(entry, former.map(|former| use_of(former.segment)));
                self.segments.add_live(*at);
                if let Some(former) = former {
                    self.segments.remove_live(former);
                }
                self.unbury(key);
            }
            Ok((false, _)) => {
                let copied = match whose {
                    For::User { .. } => None,
                    For::Cleaning { generation } => Some(*generation),
                };
                match self.graves.get(key) {
                    Some(grave) if copied == Some(grave.generation) => self.rebury(key, *at),
                    _ => self.graves.shadow(entry, use_of(segment)),
                }
            }
            Err(error) => self.index_has_failed(error),
        }
        self.end_use(segment);
        self.counts.appended_total += 1;
        self.counts.appended_bytes_total += bytes;
        self.appended(append, Ok(()));
    }

    fn appended(&mut self, append: Append, result: Result<(), DiskError>) {
        if result.is_err() {
            // It may be on the disk all the same.
            let Append { entry, at, .. } = &append;
            let sequence = self.segments.get(at.segment).sequence;
            self.graves.shadow(entry, (at.segment, sequence));
        }
        match append.whose {
            For::User { ticket } => {
                let (key, result) = (append.entry.key, result.map_err(AppendError::from));
                self.outputs.push_back(Output::Appended { ticket, key, result });
                if let Some(count) = self.appending.get_mut(&key) {
                    *count -= 1;
                    if *count == 0 {
                        self.appending.remove(&key);
                    }
                }
            }
            For::Cleaning { .. } => {
                self.counts.moved_total += u64::from(result.is_ok());
                self.moved(result);
            }
        }
    }

    /// What is not there as it was written is not there. A newer extent of the same key stays.
    pub(crate) fn forget_rotten(&mut self, key: BlockKey, at: Location) {
        self.counts.rotten_total += 1;
        match self.index.get(key) {
            // It may be of an object.
            Ok(Some(now)) if now == at => self.remove(key, true),
            Ok(_) => {}
            Err(error) => self.index_has_failed(error),
        }
    }

    pub(crate) fn lost(&mut self, key: BlockKey) {
        self.outputs.push_back(Output::Lost { key });
    }

    pub(crate) fn index_has_failed(&mut self, error: IndexError) {
        if !std::mem::replace(&mut self.index_failed, true) {
            self.outputs.push_back(Output::IndexFailed(error));
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.index_failed
    }

    /// Reads one extent of the segment that is cleaned.
    pub(crate) fn read_of_victim(&mut self, at: Location) {
        let (buffer, rest) = (PageBuf::zeroed(at.pages as usize), None);
        let offset_bytes = self.offset_bytes(at.segment, at.first_page);
        let read = |id| DiskOp::Read { id, offset_bytes, buffer, rest };
        self.submit(Operation::VictimExtent { at }, read);
    }

    pub(crate) fn clean_if_needed(&mut self) {
        let enough = self.segments.free() > CLEAN_BELOW;
        if enough || self.cleaning.is_some() || self.cleaning_paused || self.index_failed {
            return;
        }
        let Some(segment) = self.segments.to_clean(&self.unread) else { return };
        debug_assert_eq!(self.segments.get(segment).phase, Phase::Sealed);
        self.cleaning = Some(Cleaning::new(segment, self.space_pages(), self.appended_pages));
        self.segments.begin_use(segment);
        let fresh = || PageBuf::zeroed(self.segments.segment_pages as usize);
        let buffer = self.cleaning_buffer.take().unwrap_or_else(fresh);
        let offset_bytes = self.offset_bytes(segment, 0);
        self.submit(Operation::Victim { segment }, |id| DiskOp::Read {
            id,
            offset_bytes,
            buffer,
            rest: None,
        });
    }

    /// Pages that can be appended to, in free segments and what is left of the open one.
    pub(crate) fn space_pages(&self) -> u64 {
        let segment_pages = self.segments.segment_pages;
        let left = self.open.as_ref().map_or(0, |open| segment_pages - open.next_page);
        u64::from(self.segments.free()) * u64::from(segment_pages) + u64::from(left)
    }

    pub(crate) fn offset_bytes(&self, segment: u32, page: u32) -> u64 {
        offset_bytes(segment, page, self.segments.segment_pages)
    }

    fn submit_write(&mut self, operation: Operation, offset_bytes: u64, buffer: PageBuf) {
        self.submit(operation, |id| DiskOp::Write { id, offset_bytes, buffer, rest: None });
    }

    pub(crate) fn submit(&mut self, operation: Operation, op: impl FnOnce(u64) -> DiskOp) {
        let id = self.next_operation;
        self.next_operation += 1;
        self.operations.insert(id, operation);
        self.ready.push_back(op(id));
    }
}

/// Where a page of a segment lies.
pub(crate) fn offset_bytes(segment: u32, page: u32, segment_pages: u32) -> u64 {
    let pages = SUPER_PAGES + u64::from(segment) * u64::from(segment_pages) + u64::from(page);
    pages * PAGE_BYTES as u64
}

/// Three quarters of what is beside some free and the open segment: cleaning comes to an end, though
/// extents leave gaps at the ends of segments, and moves at most
/// about three extents to gain one.
pub(crate) fn live_bytes_max(segments: u32, segment_pages: u32) -> u64 {
    let usable = u64::from(segments.saturating_sub(CLEAN_BELOW + 2));
    usable * u64::from(segment_pages) * PAGE_BYTES as u64 * 3 / 4
}
