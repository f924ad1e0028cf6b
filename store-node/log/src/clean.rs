//! Reclaiming space: what is still live in a segment is appended again, and the segment is free once
//! that is durable. Nothing that is live is ever dropped here: what shall go is removed by whoever
//! decides what is kept.
//!
//! A segment is read whole; where that fails, what is live in it is read extent by extent, because the page that
//! cannot be read may be of none. When one of them cannot be read the segment stays as it is: nobody has said that
//! it never will be.

use kvasir_proto::{BlockKey, Namespace};

use crate::buffer::{PAGE_BYTES, PageBuf};
use crate::disk::DiskError;
use crate::format::{ExtentBuf, Head};
use crate::index::Location;
use crate::log::{For, Log};
use crate::segments::Phase;

/// Copies under way at once.
const MOVES_MAX: u32 = 8;
/// Cleaning that gains less than such a part of a segment is not worth what it writes.
const GAIN_MIN: u64 = 16;

/// What nobody knows any more of a block that was removed. A removal is of its key alone.
const ANY_NAMESPACE: Namespace = Namespace([0; 16]);

/// One segment being emptied. It counts as in use until that is over: it may be empty before, and whoever was
/// appended to it then would be taken for what could not be moved.
#[derive(Debug)]
pub(crate) struct Cleaning {
    segment: u32,
    /// All of it, from when it was read; or what is live, and zeros.
    bytes: Option<PageBuf>,
    /// Live extents that are yet to be read, where all could not be read at once; and whether one has been.
    unread: Vec<Location>,
    has_read_one: bool,
    next_page: u32,
    /// Whose graves here have bytes that are not their own, from when that is known.
    unknown: Option<Vec<BlockKey>>,
    moving: u32,
    failed: bool,
    /// Pages that could be appended to before it, and all that callers had appended by then.
    space_before: u64,
    appended_before: u64,
}

impl Cleaning {
    pub(crate) fn new(segment: u32, space_before: u64, appended_before: u64) -> Self {
        Cleaning {
            segment,
            bytes: None,
            unread: Vec::new(),
            has_read_one: false,
            next_page: 1,
            unknown: None,
            moving: 0,
            failed: false,
            space_before,
            appended_before,
        }
    }
}

impl Log {
    pub(crate) fn victim_read(&mut self, segment: u32, bytes: Option<PageBuf>) {
        let is_whole = bytes.is_some();
        let unread = match is_whole {
            true => Vec::new(),
            false => match self.index.in_segment(segment) {
                Ok(live) => live.into_iter().map(|(_, at)| at).collect(),
                Err(error) => return self.index_has_failed(error),
            },
        };
        let Some(cleaning) = &mut self.cleaning else { return };
        let zeros = || PageBuf::zeroed(self.segments.segment_pages as usize);
        cleaning.bytes = Some(bytes.unwrap_or_else(zeros));
        cleaning.unread = unread;
        self.read_on();
    }

    /// One of the extents that are read one by one.
    pub(crate) fn victim_extent_read(&mut self, at: Location, read: Option<PageBuf>) {
        let Some(cleaning) = &mut self.cleaning else { return };
        let (Some(read), Some(bytes)) = (read, &mut cleaning.bytes) else {
            return self.is_unread();
        };
        let start = at.first_page as usize * PAGE_BYTES;
        bytes.bytes_mut()[start..start + read.bytes().len()].copy_from_slice(read.bytes());
        cleaning.has_read_one = true;
        self.read_on();
    }

    fn read_on(&mut self) {
        match self.cleaning.as_mut().and_then(|cleaning| cleaning.unread.pop()) {
            Some(at) => self.read_of_victim(at),
            None => self.move_on(),
        }
    }

    /// It would be chosen again and again, and no room be gained any more. When nothing of it can be read it is rather
    /// the disk, and each of the others would cost a look through the whole index.
    fn is_unread(&mut self) {
        let Some(mut cleaning) = self.cleaning.take() else { return };
        self.cleaning_buffer = cleaning.bytes.take();
        self.unread.insert(cleaning.segment, self.counts.cleaned_segments_total);
        self.segments.end_use(cleaning.segment);
        let has_others = self.segments.to_clean(&self.unread).is_some();
        self.cleaning_paused = !(cleaning.has_read_one && has_others);
        self.clean_if_needed();
    }

    /// A copy is durable, or failed.
    pub(crate) fn moved(&mut self, result: Result<(), DiskError>) {
        if let Some(cleaning) = &mut self.cleaning {
            cleaning.moving -= 1;
            cleaning.failed |= result.is_err();
        }
        self.move_on();
    }

    /// Appends what is live, some at a time, and ends when all of it is durable.
    fn move_on(&mut self) {
        while let Some(mut cleaning) = self.cleaning.take() {
            let next = match cleaning.failed || cleaning.moving >= MOVES_MAX {
                true => None,
                false => self.next_live(&mut cleaning).or_else(|| self.next_unknown(&mut cleaning)),
            };
            let Some((generation, extent)) = next else {
                match cleaning.moving {
                    0 => self.cleaned(cleaning),
                    _ => self.cleaning = Some(cleaning),
                }
                return;
            };
            match self.append_for(For::Cleaning { generation }, extent, 0) {
                Ok(()) => cleaning.moving += 1,
                Err(_) => cleaning.failed = true,
            }
            self.cleaning = Some(cleaning);
        }
    }

    /// The next extent of the segment that the index still names.
    fn next_live(&mut self, cleaning: &mut Cleaning) -> Option<(u64, ExtentBuf)> {
        let bytes = cleaning.bytes.as_ref()?.bytes();
        while cleaning.next_page < self.segments.segment_pages {
            let first_page = cleaning.next_page;
            let at = first_page as usize * PAGE_BYTES;
            let log_page = self.offset_bytes(cleaning.segment, first_page) / PAGE_BYTES as u64;
            let head = Head::decode(&bytes[at..]).filter(|head| head.place.log_page == log_page);
            let Some(head) = head else {
                cleaning.next_page += 1;
                continue;
            };
            let (pages, generation) = (head.pages() as u32, head.place.generation);
            let location = Location { segment: cleaning.segment, first_page, pages, generation };
            let live = match self.index.get(head.record.key) {
                Ok(now) => now.or(self.graves.get(head.record.key)) == Some(location),
                Err(error) => {
                    self.index_has_failed(error);
                    return None;
                }
            };
            let payload = head.payload(&bytes[at..]);
            if payload.is_none() && live && self.graves.get(head.record.key) != Some(location) {
                self.forget_rotten(head.record.key, location);
                self.lost(head.record.key);
            }
            let Some(payload) = payload else {
                cleaning.next_page += 1;
                continue;
            };
            cleaning.next_page += pages;
            if live {
                let mut extent = ExtentBuf::new(head.record, payload.len());
                extent.is_removal = head.is_removal;
                extent.payload_mut().copy_from_slice(payload);
                return Some((generation, extent));
            }
        }
        None
    }

    /// When all that was read is durable elsewhere, what is left has no head or bytes that are its own. What is live
    /// of it is forgotten; a removal comes in place of what is in its grave, for that takes away at least as much.
    fn next_unknown(&mut self, cleaning: &mut Cleaning) -> Option<(u64, ExtentBuf)> {
        let segment = cleaning.segment;
        if self.has_failed() || self.segments.get(segment).live_pages == 0 {
            return None;
        }
        if cleaning.unknown.is_none() {
            if cleaning.moving > 0 {
                return None;
            }
            match self.index.in_segment(segment) {
                Ok(rotten) => {
                    for (key, at) in rotten {
                        self.forget_rotten(key, at);
                        self.lost(key);
                    }
                }
                Err(error) => {
                    self.index_has_failed(error);
                    return None;
                }
            }
            cleaning.unknown = Some(self.graves.all_in(segment));
        }
        let unknown = cleaning.unknown.as_mut()?;
        while let Some(key) = unknown.pop() {
            if let Some(at) = self.graves.get(key).filter(|at| at.segment == segment) {
                return Some((at.generation, ExtentBuf::removal(key, ANY_NAMESPACE)));
            }
        }
        None
    }

    /// Everything is durable elsewhere.
    fn cleaned(&mut self, mut cleaning: Cleaning) {
        let segment = cleaning.segment;
        self.cleaning_buffer = cleaning.bytes.take();
        if cleaning.failed {
            self.cleaning_paused = true;
            return self.segments.end_use(segment);
        }
        self.counts.cleaned_segments_total += 1;
        self.segments.end_use(segment);
        self.cleaning_paused = !self.has_gained(&cleaning);
    }

    /// Moving extents about may gain nothing, since they leave gaps at the ends of segments: it would go on for ever.
    fn has_gained(&self, cleaning: &Cleaning) -> bool {
        let segment_pages = u64::from(self.segments.segment_pages);
        let of = self.segments.get(cleaning.segment);
        // It is free when those who read of it have ended.
        let is_still_read = of.phase == Phase::Sealed && of.live_pages == 0;
        let freed_later = if is_still_read { segment_pages } else { 0 };
        let appended = self.appended_pages - cleaning.appended_before;
        let space = self.space_pages() + freed_later + appended;
        space >= cleaning.space_before + segment_pages / GAIN_MIN
    }
}
