//! Starting from what a disk holds, whatever has happened to it: sealed segments by their footers,
//! all others by looking at each of their pages.
//!
//! What cannot be read is not what was never written: a segment where it may hide something is left as it is until the
//! next start, and what was found in it is read there. A page hides nothing that belongs to an extent whose head was
//! read. That extent may be torn; it counts all the same where there is no other one of its block.
//!
//! Payloads of sealed segments are not read here; they are checked when somebody reads them. A segment
//! without a good footer is read whole, so there what is torn is known to be at once.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Mark, Namespace};

use crate::buffer::{PAGE_BYTES, PageBuf};
use crate::disk::{Disk, DiskDone, DiskError, DiskOp};
use crate::format::{
    Entry, FooterTail, Head, SUPER_PAGES, Super, decode_segment_header, footer_pages,
};
use crate::index::{IndexError, KeyIndex, Location};
use crate::log::{Log, Open, offset_bytes};
use crate::segments::Segments;

/// Read with a segment's last page: the whole footer of 640 extents.
const PROBE_PAGES: u32 = 16;
/// Fewer segments leave no room for cleaning.
const SEGMENTS_MIN: u64 = 8;
/// Read at once of a segment that has no footer.
const PIECE_PAGES: u32 = 256;
/// So many in a row that cannot be read, and the rest of their piece is not tried.
const BAD_PAGES_MAX: usize = 8;

/// How to begin a log where there is none.
#[derive(Debug, Clone)]
pub struct Options {
    /// Drawn at random by the shell.
    pub new_log_id: u64,
    /// Of a new log; an old one keeps its own.
    pub segment_bytes: u64,
    /// A disk that answers nothing for so long hangs.
    pub patience: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RecoverError {
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// Try again later.
    #[error("the disk does not answer; check the SSD and the kernel log")]
    Hangs,
    /// Something else is there, or both superblocks are rotten: nothing was changed.
    #[error("the file is not a Kvasir SSD log")]
    Foreign,
    #[error(
        "{bytes} bytes are too few for {SEGMENTS_MIN} segments of {segment_bytes} bytes; raise `ssd.capacity_bytes`"
    )]
    TooSmall { bytes: u64, segment_bytes: u64 },
    /// The disk is good: use another index.
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// A block that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recovered {
    pub key: BlockKey,
    pub namespace: Namespace,
    pub parent: Option<BlockKey>,
    /// Of the block itself, whatever is kept after it.
    pub mark: Option<Mark>,
    pub layout: u64,
    /// Of its extent.
    pub bytes: u64,
}

/// A log that is ready, and what is in it.
#[derive(Debug)]
pub struct Recovery {
    pub log: Log,
    pub blocks: Vec<Recovered>,
    /// Segments that were read whole.
    pub scanned_segments: u32,
    /// Segments that could not be read whole. They are not written until the log is opened again.
    pub unreadable_segments: u32,
    /// There was nothing, and a log was begun.
    pub is_new: bool,
}

/// Finds out what a disk holds, and fills the index with it.
///
/// # Errors
/// [`RecoverError`].
pub fn recover(
    disk: &mut dyn Disk,
    mut index: Box<dyn KeyIndex>,
    options: &Options,
) -> Result<Recovery, RecoverError> {
    let mut reader = Reader { disk, patience: options.patience };
    let (superblock, is_new) = reader.superblock(options)?;
    let segment_pages =
        u32::try_from(superblock.segment_pages).map_err(|_| RecoverError::Foreign)?;
    let segment_bytes = u64::from(segment_pages) * PAGE_BYTES as u64;
    let bytes = reader.disk.len_bytes();
    let count = bytes.saturating_sub(SUPER_PAGES * PAGE_BYTES as u64) / segment_bytes;
    if count < SEGMENTS_MIN || u64::from(PROBE_PAGES) > superblock.segment_pages {
        return Err(RecoverError::TooSmall { bytes, segment_bytes });
    }
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    let found = match is_new {
        true => Vec::new(),
        false => reader.segments(superblock.log_id, count, segment_pages)?,
    };
    let found = decide_unsure(found);
    let goes_on = goes_on(&found);
    if let Some(segment) = goes_on {
        // A part of a footer may be there that was being written when it ended. With parts of the one that comes
        // when there is more in the segment it could be taken for a whole one, of what was there before.
        let end = offset_bytes(segment, segment_pages - 1, segment_pages);
        let buffer = PageBuf::zeroed(1);
        reader.run(DiskOp::Write { id: 0, offset_bytes: end, buffer, rest: None })?;
    }
    // What was found counts from now on, also what its writer had not made durable yet.
    reader.run(DiskOp::Sync { id: 0 })?;
    let scanned_segments = found.iter().filter(|found| !found.has_footer).count() as u32;
    let newest = newest(&found);
    let (removed, kept): (BTreeMap<_, _>, BTreeMap<_, _>) =
        newest.into_iter().partition(|(_, (_, entry))| entry.is_removal);
    let locations = kept.iter().map(|(key, (at, _))| (*key, *at)).collect();
    index.load(&locations)?;

    let mut log = Log::new(superblock.log_id, Segments::new(count, segment_pages), index);
    log.next_sequence = u64::from(superblock.starts) << 32;
    find_shadows(&mut log, &found, &kept);
    if found.iter().any(|found| !found.is_whole) {
        let entries = found.iter().flat_map(|found| &found.entries);
        let removals = entries.filter(|entry| entry.is_removal);
        log.graves.is_partial(removals.map(|entry| entry.key).collect());
    }
    let needed = |(key, (at, _)): (&BlockKey, &(Location, &Entry))| {
        log.graves.found_removal(*key, *at).then_some(*at)
    };
    let removals: Vec<Location> = removed.iter().filter_map(needed).collect();
    resume(&mut log, &found, goes_on, locations.values().chain(&removals));
    log.clean_if_needed();
    let recovered = |(_, entry): &(Location, &Entry)| Recovered {
        key: entry.key,
        namespace: entry.namespace,
        parent: entry.parent,
        mark: entry.mark,
        layout: entry.layout,
        bytes: u64::from(entry.pages) * PAGE_BYTES as u64,
    };
    let blocks = kept.values().map(recovered).collect();
    let unreadable_segments = found.iter().filter(|found| !found.is_whole).count() as u32;
    Ok(Recovery { log, blocks, scanned_segments, unreadable_segments, is_new })
}

/// What was read of one place. What could not be read is zeros: as good as rotten.
struct Piece {
    buffer: PageBuf,
    /// Pages that could not be read.
    bad: Vec<u32>,
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        self.buffer.bytes()
    }

    fn is_whole(&self) -> bool {
        self.bad.is_empty()
    }
}

/// A segment that holds something, or may.
struct Found {
    segment: u32,
    sequence: u64,
    has_header: bool,
    has_footer: bool,
    /// Nothing is in it that is not known.
    is_whole: bool,
    /// It has pages that cannot be read.
    has_bad_pages: bool,
    /// After the last extent.
    end_page: u32,
    entries: Vec<Entry>,
    /// Extents whose heads were read and the rest was not.
    unsure: Vec<Entry>,
}

/// Nothing of this log was ever acknowledged here: the header was never written, and is not only
/// unreadable.
fn is_unused(log_id: u64, header: &[u8], first: &[u8]) -> bool {
    let blank = header.iter().all(|byte| *byte == 0);
    blank && Head::decode(first).is_none_or(|head| head.place.log_id != log_id)
}

/// Of each key the extent that was appended last.
fn newest(found: &[Found]) -> BTreeMap<BlockKey, (Location, &Entry)> {
    let mut kept: BTreeMap<BlockKey, (Location, &Entry)> = BTreeMap::new();
    // Of copies the one that was made last: what it is a copy of may have been given up.
    let mut by_use: Vec<&Found> = found.iter().collect();
    by_use.sort_by_key(|found| found.sequence);
    for Found { segment, entries, .. } in by_use {
        for entry in entries {
            let at = Location {
                segment: *segment,
                first_page: entry.first_page,
                pages: entry.pages,
                generation: entry.generation,
            };
            // A removal may stand for what it is a copy of, which was never removed: it may count again, where it can be
            // read.
            let age = |entry: &Entry| (entry.generation, !entry.is_removal);
            let older = kept.get(&entry.key).is_some_and(|(_, other)| {
                age(other) > age(entry)
                    || mutated(Mutation::RecoveryKeepsFirstExtent) && age(other) < age(entry)
            });
            if !older {
                kept.insert(entry.key, (at, entry));
            }
        }
    }
    kept
}

/// Decides on extents of which nobody knows whether they are torn. One that is older than another of its block counts for
/// nothing, and one that is the only one of its block is as good as any. All others may be what was to replace another: the
/// segment is not whole.
fn decide_unsure(mut found: Vec<Found>) -> Vec<Found> {
    let keys: BTreeSet<BlockKey> =
        found.iter().flat_map(|found| &found.unsure).map(|entry| entry.key).collect();
    if keys.is_empty() {
        return found;
    }
    // Of each the newest extent that is whole, and how many there are of both kinds.
    let mut newest: BTreeMap<BlockKey, (u64, u32)> = BTreeMap::new();
    for Found { entries, unsure, .. } in &found {
        for entry in entries.iter().filter(|entry| keys.contains(&entry.key)) {
            let (generation, count) = newest.entry(entry.key).or_default();
            (*generation, *count) = (entry.generation.max(*generation), *count + 1);
        }
        unsure.iter().for_each(|entry| newest.entry(entry.key).or_default().1 += 1);
    }
    let all_whole = found.iter().all(|found| found.is_whole);
    for found in &mut found {
        for entry in std::mem::take(&mut found.unsure) {
            let (generation, count) = newest[&entry.key];
            let is_only = count == 1;
            // With a footer that lists it, it would be believed when another one can be read.
            found.is_whole &= generation > entry.generation || is_only && all_whole;
            if is_only || generation > entry.generation {
                found.entries.push(entry);
            }
        }
    }
    found
}

/// The segment that the last process was appending to: the newest one, unless it has a footer or pages of it are bad. An
/// older one is not gone on with: a copy there would be taken for older than what it is a copy of.
fn goes_on(found: &[Found]) -> Option<u32> {
    let last = found.iter().max_by_key(|found| found.sequence)?;
    let is_good = last.has_header && last.is_whole && !last.has_bad_pages;
    (is_good && !last.has_footer).then_some(last.segment)
}

/// Goes on where the last process stopped: that segment is appended to, the others get their footers, but for what
/// could not be read.
fn resume<'a>(
    log: &mut Log,
    found: &[Found],
    last: Option<u32>,
    live: impl Iterator<Item = &'a Location>,
) {
    let entries = || found.iter().flat_map(|found| &found.entries);
    // Above what is in segments that cannot be read, too.
    let newest = entries().map(|entry| entry.generation).max().unwrap_or(0);
    log.next_generation = log.next_sequence.max(newest + 1);
    for found in found {
        log.segments.found(found.segment, found.sequence);
    }
    live.for_each(|at| log.segments.add_live(*at));
    for found in found.iter().filter(|found| !found.is_whole) {
        log.segments.withhold(found.segment);
    }
    for found in found.iter().filter(|found| !found.has_footer && found.is_whole) {
        let Found { segment, end_page, entries, .. } = found;
        if last == Some(*segment) {
            log.segments.reopen(*segment);
            let (next_page, entries) = (*end_page, entries.clone());
            log.open = Some(Open { segment: *segment, next_page, placed: entries.len(), entries });
        } else if log.segments.get(*segment).live_pages > 0 {
            if !found.has_header {
                log.write_header(*segment);
            }
            log.write_footer(*segment, entries);
        }
    }
    log.segments.free_what_is_empty();
}

/// What the older extents of a block say must not come back.
fn find_shadows(log: &mut Log, found: &[Found], kept: &BTreeMap<BlockKey, (Location, &Entry)>) {
    for Found { segment, sequence, entries, .. } in found {
        for entry in entries {
            match kept.get(&entry.key) {
                Some((at, _)) if (at.segment, at.first_page) == (*segment, entry.first_page) => {
                    log.graves.found_live(entry.key, entry.mark);
                }
                _ => log.graves.shadow(entry, (*segment, *sequence)),
            }
        }
    }
}

/// Reads and writes one after the other, some at a time.
struct Reader<'a> {
    disk: &'a mut dyn Disk,
    patience: Duration,
}

impl Reader<'_> {
    /// Reads pieces (offset, pages), all of them or none. Where one cannot be read, its pages are tried one by one.
    fn read_all(&mut self, pieces: &[(u64, u32)]) -> Result<Vec<Piece>, RecoverError> {
        let read = self.try_all(pieces)?;
        let mut all = Vec::with_capacity(pieces.len());
        for (buffer, (offset_bytes, pages)) in read.into_iter().zip(pieces) {
            let piece = match buffer {
                Some(buffer) => Piece { buffer, bad: Vec::new() },
                None => self.page_by_page(*offset_bytes, *pages)?,
            };
            all.push(piece);
        }
        Ok(all)
    }

    fn page_by_page(&mut self, offset_bytes: u64, pages: u32) -> Result<Piece, RecoverError> {
        let at = |page: u32| (offset_bytes + u64::from(page) * PAGE_BYTES as u64, 1);
        let pages: Vec<(u64, u32)> = (0..pages).map(at).collect();
        let mut buffer = PageBuf::zeroed(pages.len());
        let mut places = (0..).zip(buffer.bytes_mut().chunks_mut(PAGE_BYTES));
        let mut bad = Vec::new();
        for pages in pages.chunks(BAD_PAGES_MAX) {
            let read = self.try_all(pages)?;
            let is_any = read.iter().any(Option::is_some);
            for (page, (at, into)) in read.iter().zip(&mut places) {
                match page {
                    Some(page) => into.copy_from_slice(page.bytes()),
                    None => bad.push(at),
                }
            }
            if !is_any {
                // What comes after them is left to the next start: each failure may take seconds.
                bad.extend(places.map(|(at, _)| at));
                break;
            }
        }
        Ok(Piece { buffer, bad })
    }

    /// Of each piece what was read, if it was.
    fn try_all(&mut self, pieces: &[(u64, u32)]) -> Result<Vec<Option<PageBuf>>, RecoverError> {
        let mut read: Vec<Option<PageBuf>> = pieces.iter().map(|_| None).collect();
        let (mut next, mut under_way) = (0, 0);
        while next < pieces.len() || under_way > 0 {
            while next < pieces.len() && under_way < self.disk.depth() {
                let (offset_bytes, pages) = pieces[next];
                let buffer = PageBuf::zeroed(pages as usize);
                let (id, rest) = (next as u64, None);
                self.disk.submit(DiskOp::Read { id, offset_bytes, buffer, rest });
                (next, under_way) = (next + 1, under_way + 1);
            }
            for DiskDone { id, result, buffer, .. } in self.wait()? {
                under_way -= 1;
                read[id as usize] = buffer.filter(|_| result.is_ok());
            }
        }
        Ok(read)
    }

    fn wait(&mut self) -> Result<Vec<DiskDone>, RecoverError> {
        let done = self.disk.complete(self.patience);
        if done.is_empty() { Err(RecoverError::Hangs) } else { Ok(done) }
    }

    /// One operation that must succeed.
    fn run(&mut self, op: DiskOp) -> Result<Option<PageBuf>, RecoverError> {
        self.disk.submit(op);
        let done = self.wait()?.pop().ok_or(RecoverError::Hangs)?;
        done.result?;
        Ok(done.buffer)
    }

    /// Counts this start: what an earlier one has left in a segment whose header was lost is never taken for
    /// what a later one writes there, because no two starts give the uses of segments the same numbers.
    fn superblock(&mut self, options: &Options) -> Result<(Super, bool), RecoverError> {
        let (mut blank, mut unreadable) = (true, None);
        let mut copies: Vec<(u64, Option<Super>)> = Vec::new();
        for page in 0..SUPER_PAGES {
            let (offset_bytes, buffer) = (page * PAGE_BYTES as u64, PageBuf::zeroed(1));
            let read = match self.run(DiskOp::Read { id: 0, offset_bytes, buffer, rest: None }) {
                // A copy that cannot be read is written anew, where the other one can.
                Err(RecoverError::Disk(error)) => {
                    unreadable = Some(error);
                    None
                }
                read => read?,
            };
            blank &= read.as_ref().is_none_or(|read| read.bytes().iter().all(|byte| *byte == 0));
            copies.push((page, read.and_then(|read| Super::decode(read.bytes()))));
        }
        // The one that counts comes last.
        copies.sort_by_key(|(_, copy)| copy.map(|copy| copy.starts));
        let newest = copies.last().and_then(|(_, copy)| *copy);
        let segment_pages = options.segment_bytes / PAGE_BYTES as u64;
        let (former, is_new) = match (newest, unreadable) {
            (Some(newest), _) => (newest, false),
            (None, Some(error)) => return Err(error.into()),
            (None, None) if blank => {
                (Super { log_id: options.new_log_id, segment_pages, starts: 0 }, true)
            }
            (None, None) => return Err(RecoverError::Foreign),
        };
        let starts = former.starts.checked_add(1).ok_or(RecoverError::Foreign)?;
        let superblock = Super { starts, ..former };
        for (page, _) in copies {
            let (offset_bytes, buffer) = (page * PAGE_BYTES as u64, superblock.encode());
            self.run(DiskOp::Write { id: 0, offset_bytes, buffer, rest: None })?;
            // One that is whole is not touched before the other one is.
            self.run(DiskOp::Sync { id: 0 })?;
        }
        Ok((superblock, is_new))
    }

    fn segments(
        &mut self,
        log_id: u64,
        count: u32,
        segment_pages: u32,
    ) -> Result<Vec<Found>, RecoverError> {
        let probe = |segment| {
            let first = segment_pages - PROBE_PAGES;
            // With the head of the first extent.
            let header = (offset_bytes(segment, 0, segment_pages), 2);
            [header, (offset_bytes(segment, first, segment_pages), PROBE_PAGES)]
        };
        let pieces: Vec<(u64, u32)> = (0..count).flat_map(probe).collect();
        let mut found = Vec::new();
        // Some hundred at a time, so that a large disk needs little memory for it.
        for (batch, pieces) in (0..).zip(pieces.chunks(1024)) {
            let read = self.read_all(pieces)?;
            for (pair, segment) in read.chunks(2).zip(batch * 512..) {
                let (header, first) = pair[0].bytes().split_at(PAGE_BYTES);
                let sequence = decode_segment_header(log_id, header);
                let is_unused = pair[0].is_whole() && is_unused(log_id, header, first);
                if sequence.is_none() && is_unused {
                    continue;
                }
                let pages = pair[1].bytes();
                let tail = FooterTail::decode(log_id, &pages[pages.len() - PAGE_BYTES..]);
                let tail = tail.filter(|tail| sequence == Some(tail.sequence));
                let entries = match tail {
                    Some(tail) => self.footer(segment, segment_pages, &tail, pages)?,
                    None => None,
                };
                let whole = sequence.zip(entries).map(|(sequence, entries)| Found {
                    segment,
                    sequence,
                    has_header: true,
                    has_footer: true,
                    is_whole: true,
                    has_bad_pages: false,
                    end_page: segment_pages,
                    entries,
                    unsure: Vec::new(),
                });
                let whole = match whole {
                    Some(whole) => Some(whole),
                    None => self.scan(log_id, segment, segment_pages, sequence)?,
                };
                found.extend(whole);
            }
        }
        Ok(found)
    }

    fn footer(
        &mut self,
        segment: u32,
        segment_pages: u32,
        tail: &FooterTail,
        probed: &[u8],
    ) -> Result<Option<Vec<Entry>>, RecoverError> {
        let pages = tail.pages() as u32;
        let entries = if pages <= PROBE_PAGES {
            tail.list(probed)
        } else if pages < segment_pages {
            let offset = offset_bytes(segment, segment_pages - pages, segment_pages);
            let read = self.read_all(&[(offset, pages)])?;
            read.first().and_then(|read| tail.list(read.bytes()))
        } else {
            None
        };
        let inside = |entry: &Entry| {
            let end = entry.first_page.checked_add(entry.pages);
            entry.first_page > 0 && end.is_some_and(|end| end < segment_pages)
        };
        Ok(entries.filter(|entries| entries.iter().all(inside)))
    }

    /// Looks at every page of a segment for extents. Those of an earlier use are left out: where the header is not there to say which use this is, the newest one that is seen counts.
    /// Nothing of an earlier use is live, and what was never acknowledged must not come back long after.
    fn scan(
        &mut self,
        log_id: u64,
        segment: u32,
        segment_pages: u32,
        sequence: Option<u64>,
    ) -> Result<Option<Found>, RecoverError> {
        let offset = |page| offset_bytes(segment, page, segment_pages);
        let starts = (0..segment_pages).step_by(PIECE_PAGES as usize);
        let pieces: Vec<(u64, u32)> =
            starts.map(|page| (offset(page), PIECE_PAGES.min(segment_pages - page))).collect();
        let read = self.read_all(&pieces)?;
        let pages_of = |(piece, start): (&Piece, usize)| {
            piece.bad.iter().map(move |page| start as u32 + page).collect::<Vec<u32>>()
        };
        let starts = (0..).step_by(PIECE_PAGES as usize);
        let mut bad: BTreeSet<u32> = read.iter().zip(starts).flat_map(pages_of).collect();
        let mut bytes = Vec::with_capacity(segment_pages as usize * PAGE_BYTES);
        read.iter().for_each(|piece| bytes.extend_from_slice(piece.bytes()));
        let mut found = Found {
            segment,
            sequence: sequence.unwrap_or(0),
            has_header: sequence.is_some(),
            has_footer: false,
            is_whole: bad.is_empty(),
            has_bad_pages: !bad.is_empty(),
            end_page: 1,
            entries: Vec::new(),
            unsure: Vec::new(),
        };
        let mut uses = Vec::new();
        let mut page = 1;
        while page < segment_pages {
            let extent = &bytes[page as usize * PAGE_BYTES..];
            let head = Head::decode(extent).filter(|head| {
                let place = head.place;
                let of_this_use =
                    sequence.is_none_or(|sequence| sequence == place.segment_sequence);
                let here = place.log_page == offset(page) / PAGE_BYTES as u64;
                place.log_id == log_id && of_this_use && here
            });
            let Some(head) = head else {
                page += 1;
                continue;
            };
            let pages = head.pages() as u32;
            if sequence.is_none() {
                found.sequence = found.sequence.max(head.place.segment_sequence);
            }
            // Of an earlier use it says nothing.
            let is_sure = sequence.is_some();
            let within = |bad: &BTreeSet<u32>| bad.range(page..page + pages).count() > 0;
            let is_unread = is_sure && within(&bad);
            if is_unread {
                bad.retain(|of| !(page..page + pages).contains(of));
            } else if head.payload(extent).is_none() {
                // Torn. What comes next was placed behind all of it, or never written.
                found.end_page = found.end_page.max((page + pages).min(segment_pages));
                page += 1;
                continue;
            }
            let (record, generation) = (&head.record, head.place.generation);
            let entry = Entry::new(record, head.is_removal, generation, (page, pages));
            if is_unread {
                found.unsure.push(entry);
            } else {
                found.entries.push(entry);
                uses.push(head.place.segment_sequence);
            }
            page += pages;
            found.end_page = found.end_page.max(page);
        }
        let mut uses = uses.into_iter();
        found.entries.retain(|_| uses.next() == Some(found.sequence));
        let room = footer_pages(found.entries.len() + found.unsure.len()) as u32;
        let is_empty = found.entries.is_empty() && found.end_page == 1;
        found.end_page = found.end_page.min(segment_pages - room);
        // No extent is on a segment's last page, nor on its first one.
        if found.has_header {
            bad.remove(&(segment_pages - 1));
        } else if is_empty {
            bad.remove(&0);
        }
        found.is_whole = bad.is_empty();
        let may_hold = found.has_header || !found.entries.is_empty() || !found.is_whole;
        Ok(may_hold.then_some(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(segment: u32, entries: Vec<Entry>) -> Found {
        Found {
            segment,
            sequence: u64::from(segment),
            has_header: true,
            has_footer: true,
            is_whole: true,
            has_bad_pages: false,
            end_page: 32,
            entries,
            unsure: Vec::new(),
        }
    }

    fn entry(generation: u64, is_removal: bool) -> Entry {
        Entry {
            key: BlockKey([1; 16]),
            namespace: Namespace([2; 16]),
            parent: None,
            mark: None,
            layout: 3,
            generation,
            first_page: 1,
            pages: 2,
            is_removal,
        }
    }

    /// Which segment counts.
    fn counts(all: &[Found]) -> u32 {
        newest(all)[&BlockKey([1; 16])].0.segment
    }

    #[test]
    fn a_removal_is_newer_than_what_came_before_it_and_not_than_what_it_is_a_copy_of() {
        let removal = |segment, generation| found(segment, vec![entry(generation, true)]);
        let extent = |segment, generation| found(segment, vec![entry(generation, false)]);
        assert_eq!(counts(&[extent(1, 5), removal(2, 6)]), 2);
        assert_eq!(counts(&[removal(1, 6), extent(2, 5)]), 1, "it is a copy that was made later");
        assert_eq!(counts(&[removal(1, 6), extent(2, 7)]), 2);
        // It was written when that was rotten, or could not be read; it was never removed.
        assert_eq!(counts(&[extent(1, 5), removal(2, 5)]), 1);
        assert_eq!(counts(&[removal(1, 5), extent(2, 5)]), 2);
        assert_eq!(counts(&[extent(2, 5), extent(1, 5)]), 2, "the copy that was made last");
    }
}
