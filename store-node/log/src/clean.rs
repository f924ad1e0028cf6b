//! Reclaiming space: what is still live in a segment is appended again, and the segment is free once
//! that is durable. Nothing that is live is ever dropped here: what shall go is removed by whoever
//! decides what is kept.

use kvasir_proto::BlockKey;

use crate::buffer::{PAGE_BYTES, PageBuf};
use crate::disk::DiskError;
use crate::format::{ExtentBuf, Head, Record};
use crate::index::Location;
use crate::log::{For, Log};
use crate::segments::Phase;

/// Copies under way at once.
const MOVES_MAX: u32 = 8;
/// Cleaning that gains less than such a part of a segment is not worth what it writes.
const GAIN_MIN: u64 = 16;

/// One segment being emptied. It counts as in use until that is over: it may be empty before, and whoever was
/// appended to it then would be taken for what could not be moved.
#[derive(Debug)]
pub(crate) struct Cleaning {
    segment: u32,
    /// All of it, from when it was read.
    bytes: Option<PageBuf>,
    next_page: u32,
    moving: u32,
    /// A newer extent of the next block is being appended: what becomes of that is waited for. A copy made
    /// now would come after it in the log, and be taken for the newer one at the next start.
    waits_for: Option<BlockKey>,
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
            next_page: 1,
            moving: 0,
            waits_for: None,
            failed: false,
            space_before,
            appended_before,
        }
    }
}

impl Log {
    pub(crate) fn victim_read(&mut self, segment: u32, bytes: Option<PageBuf>) {
        match (self.cleaning.as_mut().filter(|c| c.segment == segment), bytes) {
            (Some(cleaning), Some(bytes)) => {
                cleaning.bytes = Some(bytes);
                self.move_on();
            }
            _ => {
                // It would be chosen again and again, and no room be gained any more.
                self.cleaning = None;
                self.unread.insert(segment);
                self.segments.end_use(segment);
                self.cleaning_paused = self.segments.to_clean(&self.unread).is_none();
                self.clean_if_needed();
            }
        }
    }

    /// A copy is durable, or failed.
    pub(crate) fn moved(&mut self, result: Result<(), DiskError>) {
        if let Some(cleaning) = &mut self.cleaning {
            cleaning.moving -= 1;
            cleaning.failed |= result.is_err();
        }
        self.move_on();
    }

    /// An append of a caller has ended.
    pub(crate) fn append_ended(&mut self, key: BlockKey) {
        if let Some(cleaning) = self.cleaning.as_mut().filter(|c| c.waits_for == Some(key)) {
            cleaning.waits_for = None;
            self.move_on();
        }
    }

    /// Appends what is live, some at a time, and ends when all of it is durable.
    fn move_on(&mut self) {
        while let Some(mut cleaning) = self.cleaning.take() {
            let stays = cleaning.failed || cleaning.moving >= MOVES_MAX;
            let next = match stays || cleaning.waits_for.is_some() {
                true => None,
                false => self.next_live(&mut cleaning),
            };
            let Some((generation, extent)) = next else {
                let over =
                    cleaning.moving == 0 && (cleaning.failed || cleaning.waits_for.is_none());
                if over {
                    self.cleaned(cleaning);
                } else {
                    self.cleaning = Some(cleaning);
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
            let is_buried = self.graves.get(head.record.key) == Some(location);
            if payload.is_none() && !is_buried {
                cleaning.next_page += 1;
                continue;
            }
            if live && self.appending.contains_key(&head.record.key) {
                cleaning.waits_for = Some(head.record.key);
                return None;
            }
            let Some(payload) = payload else {
                // It is in its grave, for what it takes away: a removal does so in its place.
                cleaning.next_page += 1;
                let Record { key, namespace, .. } = head.record;
                return Some((generation, ExtentBuf::removal(key, namespace)));
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

    /// Everything that could be moved is durable elsewhere. What the index still names here has no
    /// head that can be read.
    fn cleaned(&mut self, mut cleaning: Cleaning) {
        let segment = cleaning.segment;
        self.cleaning_buffer = cleaning.bytes.take();
        if cleaning.failed {
            self.cleaning_paused = true;
            return self.segments.end_use(segment);
        }
        self.counts.cleaned_segments_total += 1;
        self.forget_graves_in(segment);
        if self.segments.get(segment).live_pages > 0 {
            match self.index.in_segment(segment) {
                Ok(rotten) => {
                    for (key, at) in rotten {
                        self.forget_rotten(key, at);
                        self.lost(key);
                    }
                }
                Err(error) => self.index_has_failed(error),
            }
        }
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
