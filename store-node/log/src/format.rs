//! The bytes on the disk, little-endian, each piece under an XXH3-64 checksum of its own.
//!
//! - The first two pages are the superblock and its copy: which log this is, its segments' size, and how often it
//!   was opened.
//! - A segment: one page of header (its sequence number), extents, and at its very end a footer.
//! - An extent: a head of whole pages, then the payload, padded to whole pages. The head says of which
//!   log, segment and position it is, so that what an earlier use of the place has left is never
//!   taken for it, and carries all that is known of the block.
//! - A removal: an extent without a payload, that says that the block's earlier ones count for nothing.
//! - A footer: the entries of the segment's extents, then one page with their number and checksum.
//!
//! Whatever is read from a disk may be anything: decoding answers `None` and never panics.

use kvasir_checksum::checksum;
use kvasir_proto::{BlockKey, COPIES_MAX, Mark, Namespace, Tenant};

use crate::buffer::{PAGE_BYTES, PageBuf};
use crate::disk::Span;

const SUPER_MAGIC: u64 = u64::from_le_bytes(*b"KVSUPER2");
/// Starts were not counted.
const FORMER_SUPER_MAGIC: u64 = u64::from_le_bytes(*b"KVSUPER1");
const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"KVSEGMT1");
const EXTENT_MAGIC: u64 = u64::from_le_bytes(*b"KVEXTNT1");
const FOOTER_MAGIC: u64 = u64::from_le_bytes(*b"KVFOOTR1");

/// Pages before the first segment.
pub(crate) const SUPER_PAGES: u64 = 2;
/// A head without checksums of runs.
const HEAD_BYTES: usize = 144;
pub(crate) const ENTRY_BYTES: usize = 96;
/// More checksums than any layout has runs; what claims more is not a head.
const CHECKSUMS_MAX: usize = 1 << 16;

/// What is known of a block beside its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub key: BlockKey,
    pub namespace: Namespace,
    /// The block before it.
    pub parent: Option<BlockKey>,
    /// Of the block itself, whatever is kept after it. A time since when is kept to 48 bits.
    pub mark: Option<Mark>,
    /// A hash of how the payload's bytes lie: blocks of another layout are of no use.
    pub layout: u64,
    /// Of the runs of the payload, as the block has them.
    pub checksums: Vec<u64>,
}

/// Pages of an extent with so many checksums and bytes of payload.
pub fn extent_pages(checksums: usize, payload_bytes: usize) -> usize {
    head_pages(checksums) + payload_bytes.div_ceil(PAGE_BYTES)
}

fn head_pages(checksums: usize) -> usize {
    (HEAD_BYTES + 8 * checksums).div_ceil(PAGE_BYTES)
}

/// Room for one extent: the payload is filled in by whoever has it, or stays where it is, and the head is the log's.
#[derive(Debug)]
pub struct ExtentBuf {
    pub(crate) buffer: PageBuf,
    pub(crate) record: Record,
    pub(crate) payload_bytes: usize,
    /// Where the payload is when it is not in the buffer, and its checksum.
    pub(crate) placed: Option<(Span, u64)>,
    pub(crate) is_removal: bool,
}

impl ExtentBuf {
    pub fn new(record: Record, payload_bytes: usize) -> Self {
        let pages = extent_pages(record.checksums.len(), payload_bytes);
        let buffer = PageBuf::zeroed(pages);
        ExtentBuf { buffer, record, payload_bytes, placed: None, is_removal: false }
    }

    /// What is written of a block that was removed and follows no other.
    pub(crate) fn removal(key: BlockKey, namespace: Namespace) -> Self {
        let (parent, mark, layout, checksums) = (None, None, 0, Vec::new());
        let record = Record { key, namespace, parent, mark, layout, checksums };
        ExtentBuf { is_removal: true, ..ExtentBuf::new(record, 0) }
    }

    /// One whose payload is written from where it lies, and has this checksum. Nobody may change it until the append
    /// is answered; if it does not fit the checksum after it was written, the append fails.
    pub fn placed(record: Record, payload: Span, payload_checksum: u64) -> Self {
        ExtentBuf {
            buffer: PageBuf::zeroed(head_pages(record.checksums.len())),
            record,
            payload_bytes: payload.length_bytes,
            placed: Some((payload, payload_checksum)),
            is_removal: false,
        }
    }

    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Those that are there only once the payload is: as many as the record had before.
    ///
    /// # Panics
    /// When they are not.
    pub fn set_checksums(&mut self, checksums: Vec<u64>) {
        assert_eq!(checksums.len(), self.record.checksums.len(), "the head has room for as many");
        self.record.checksums = checksums;
    }

    pub fn pages(&self) -> usize {
        extent_pages(self.record.checksums.len(), self.payload_bytes)
    }

    /// Of one whose payload is in the buffer.
    pub fn payload(&self) -> &[u8] {
        let start = head_pages(self.record.checksums.len()) * PAGE_BYTES;
        &self.buffer.bytes()[start..start + self.payload_bytes]
    }

    pub fn payload_mut(&mut self) -> &mut [u8] {
        let start = head_pages(self.record.checksums.len()) * PAGE_BYTES;
        &mut self.buffer.bytes_mut()[start..start + self.payload_bytes]
    }

    /// Writes the head; only then may the buffer go to the disk.
    pub(crate) fn seal(&mut self, place: Place) {
        let payload_checksum = match self.placed {
            Some((_, payload_checksum)) => payload_checksum,
            None => checksum(self.payload()),
        };
        let record = &self.record;
        let (marked, tenant, expires_unix_ms) = mark_fields(record.mark);
        let mut head = Writer::new(self.buffer.bytes_mut());
        head.u64(EXTENT_MAGIC);
        head.u64(0);
        head.u64(place.log_id);
        head.u64(place.segment_sequence);
        head.u64(place.log_page);
        head.u64(place.generation);
        head.bytes(&record.key.0);
        head.bytes(&record.namespace.0);
        head.bytes(&record.parent.map_or([0; 16], |parent| parent.0));
        head.u64(flags(record.parent.is_some(), self.is_removal) | marked);
        head.u64(tenant);
        head.u64(expires_unix_ms);
        head.u64(record.layout);
        head.u32(self.payload_bytes as u32);
        head.u32(record.checksums.len() as u32);
        head.u64(payload_checksum);
        record.checksums.iter().for_each(|checksum| head.u64(*checksum));
        let end = head.at;
        put_checksum(&mut self.buffer.bytes_mut()[..end]);
    }
}

/// Where an extent lies, as its head says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) log_id: u64,
    pub(crate) segment_sequence: u64,
    /// From the start of the disk.
    pub(crate) log_page: u64,
    pub(crate) generation: u64,
}

/// A head that was read.
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub(crate) place: Place,
    pub(crate) record: Record,
    pub(crate) payload_bytes: usize,
    pub(crate) payload_checksum: u64,
    pub(crate) is_removal: bool,
}

impl Head {
    /// The head at the start of these bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Head> {
        let mut fields = Reader::new(bytes);
        if fields.u64()? != EXTENT_MAGIC {
            return None;
        }
        let _checksum = fields.u64()?;
        let place = Place {
            log_id: fields.u64()?,
            segment_sequence: fields.u64()?,
            log_page: fields.u64()?,
            generation: fields.u64()?,
        };
        let (key, namespace) = (BlockKey(fields.key()?), Namespace(fields.key()?));
        let parent = BlockKey(fields.key()?);
        let flags = fields.array::<8>()?;
        let mark = mark_of(flags, fields.u64()?, fields.u64()?)?;
        let layout = fields.u64()?;
        let (payload_bytes, count) = (fields.u32()? as usize, fields.u32()? as usize);
        let payload_checksum = fields.u64()?;
        if count > CHECKSUMS_MAX {
            return None;
        }
        let checksums = (0..count).map(|_| fields.u64()).collect::<Option<Vec<u64>>>()?;
        if !has_checksum(&bytes[..fields.at]) {
            return None;
        }
        let (has_parent, is_removal) = of_flags(flags);
        let parent = has_parent.then_some(parent);
        let record = Record { key, namespace, parent, mark, layout, checksums };
        Some(Head { place, record, payload_bytes, payload_checksum, is_removal })
    }

    pub(crate) fn pages(&self) -> usize {
        extent_pages(self.record.checksums.len(), self.payload_bytes)
    }

    pub(crate) fn payload_start(&self) -> usize {
        head_pages(self.record.checksums.len()) * PAGE_BYTES
    }

    /// The payload of the extent that begins with these bytes; `None` when it is not all there or
    /// not as it was written.
    pub(crate) fn payload<'a>(&self, extent: &'a [u8]) -> Option<&'a [u8]> {
        let start = self.payload_start();
        let payload = extent.get(start..start.checked_add(self.payload_bytes)?)?;
        (checksum(payload) == self.payload_checksum).then_some(payload)
    }
}

/// What a footer says of an extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) key: BlockKey,
    pub(crate) namespace: Namespace,
    pub(crate) parent: Option<BlockKey>,
    pub(crate) mark: Option<Mark>,
    pub(crate) layout: u64,
    pub(crate) generation: u64,
    pub(crate) first_page: u32,
    pub(crate) pages: u32,
    pub(crate) is_removal: bool,
}

impl Entry {
    pub(crate) fn new(
        record: &Record,
        is_removal: bool,
        generation: u64,
        (first_page, pages): (u32, u32),
    ) -> Self {
        let Record { key, namespace, parent, mark, layout, checksums: _ } = *record;
        Entry { key, namespace, parent, mark, layout, generation, first_page, pages, is_removal }
    }

    fn encode(&self, to: &mut Writer<'_>) {
        let (marked, tenant, expires_unix_ms) = mark_fields(self.mark);
        to.bytes(&self.key.0);
        to.bytes(&self.namespace.0);
        to.bytes(&self.parent.map_or([0; 16], |parent| parent.0));
        to.u64(self.generation);
        to.u64(tenant);
        to.u64(expires_unix_ms);
        to.u64(self.layout);
        to.u32(self.first_page);
        to.u32(self.pages);
        to.u64(flags(self.parent.is_some(), self.is_removal) | marked);
    }

    fn decode(fields: &mut Reader<'_>) -> Option<Entry> {
        let (key, namespace) = (BlockKey(fields.key()?), Namespace(fields.key()?));
        let parent = BlockKey(fields.key()?);
        let (generation, tenant, until) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let (layout, first_page, pages) = (fields.u64()?, fields.u32()?, fields.u32()?);
        let flags = fields.array::<8>()?;
        let mark = mark_of(flags, tenant, until)?;
        let (has_parent, is_removal) = of_flags(flags);
        let parent = has_parent.then_some(parent);
        Some(Entry {
            key,
            namespace,
            parent,
            mark,
            layout,
            generation,
            first_page,
            pages,
            is_removal,
        })
    }
}

/// Pages of a footer with so many entries.
pub(crate) fn footer_pages(entries: usize) -> usize {
    (entries * ENTRY_BYTES).div_ceil(PAGE_BYTES) + 1
}

pub(crate) fn encode_footer(log_id: u64, sequence: u64, entries: &[Entry]) -> PageBuf {
    let mut buffer = PageBuf::zeroed(footer_pages(entries.len()));
    let last = (buffer.pages() - 1) * PAGE_BYTES;
    let mut list = Writer::new(buffer.bytes_mut());
    entries.iter().for_each(|entry| entry.encode(&mut list));
    let end = list.at;
    let list_checksum = checksum(&buffer.bytes()[..end]);
    let mut tail = Writer::new(&mut buffer.bytes_mut()[last..]);
    tail.u64(FOOTER_MAGIC);
    tail.u64(0);
    tail.u64(log_id);
    tail.u64(sequence);
    tail.u64(entries.len() as u64);
    tail.u64(list_checksum);
    let end = tail.at;
    put_checksum(&mut buffer.bytes_mut()[last..last + end]);
    buffer
}

/// The last page of a footer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FooterTail {
    pub(crate) sequence: u64,
    pub(crate) entries: usize,
    list_checksum: u64,
}

impl FooterTail {
    /// From a segment's last page.
    pub(crate) fn decode(log_id: u64, page: &[u8]) -> Option<FooterTail> {
        let mut fields = Reader::new(page);
        let [magic, _, id, sequence, entries, list_checksum] = fields.words()?;
        let good = magic == FOOTER_MAGIC && id == log_id && has_checksum(&page[..fields.at]);
        let entries = usize::try_from(entries).ok().filter(|entries| *entries <= 1 << 24)?;
        good.then_some(FooterTail { sequence, entries, list_checksum })
    }

    pub(crate) fn pages(&self) -> usize {
        footer_pages(self.entries)
    }

    /// From the last pages of a segment, this one among them.
    pub(crate) fn list(&self, pages: &[u8]) -> Option<Vec<Entry>> {
        let start = pages.len().checked_sub(self.pages() * PAGE_BYTES)?;
        let list = &pages[start..start + self.entries * ENTRY_BYTES];
        if checksum(list) != self.list_checksum {
            return None;
        }
        let mut fields = Reader::new(list);
        (0..self.entries).map(|_| Entry::decode(&mut fields)).collect()
    }
}

pub(crate) fn encode_segment_header(log_id: u64, sequence: u64) -> PageBuf {
    one_page(&[SEGMENT_MAGIC, 0, log_id, sequence])
}

/// A segment's sequence number.
pub(crate) fn decode_segment_header(log_id: u64, page: &[u8]) -> Option<u64> {
    let mut fields = Reader::new(page);
    let [magic, _, id, sequence] = fields.words()?;
    let good = magic == SEGMENT_MAGIC && id == log_id && has_checksum(&page[..fields.at]);
    good.then_some(sequence)
}

/// Which log this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Super {
    pub(crate) log_id: u64,
    pub(crate) segment_pages: u64,
    /// How often the log was opened.
    pub(crate) starts: u32,
}

impl Super {
    pub(crate) fn encode(self) -> PageBuf {
        let Super { log_id, segment_pages, starts } = self;
        one_page(&[SUPER_MAGIC, 0, log_id, segment_pages, starts.into()])
    }

    pub(crate) fn decode(page: &[u8]) -> Option<Super> {
        let mut fields = Reader::new(page);
        let [magic, _, log_id, segment_pages] = fields.words()?;
        let [starts] = match magic {
            SUPER_MAGIC => fields.words()?,
            FORMER_SUPER_MAGIC => [0],
            _ => return None,
        };
        let good = has_checksum(&page[..fields.at]) && segment_pages > 0;
        let starts = u32::try_from(starts).ok()?;
        good.then_some(Super { log_id, segment_pages, starts })
    }
}

fn one_page(words: &[u64]) -> PageBuf {
    let mut buffer = PageBuf::zeroed(1);
    let mut page = Writer::new(buffer.bytes_mut());
    words.iter().for_each(|word| page.u64(*word));
    let end = page.at;
    put_checksum(&mut buffer.bytes_mut()[..end]);
    buffer
}

/// The second word of each piece is the checksum of what follows it.
fn put_checksum(piece: &mut [u8]) {
    let checksum = checksum(&piece[16..]);
    piece[8..16].copy_from_slice(&checksum.to_le_bytes());
}

fn has_checksum(piece: &[u8]) -> bool {
    piece[8..16] == checksum(&piece[16..]).to_le_bytes()
}

/// The second byte of the flags says what there is of a mark: nothing, one of no context (as extents have it
/// that were written before there were others), or one of a context, with the time since when in the six
/// bytes that follow. Of contexts with more copies than one there is a kind for each number.
const NO_MARK: u8 = 0;
const UNLISTED_MARK: u8 = 1;
const CONTEXT_MARK: u8 = 2;
const CONTEXT_MARKS_END: u8 = CONTEXT_MARK + COPIES_MAX;
const SINCE_MAX: u64 = (1 << 48) - 1;

/// The flags beside the parent's, and two fields.
const HAS_PARENT: u8 = 1;
const IS_REMOVAL: u8 = 2;

fn flags(has_parent: bool, is_removal: bool) -> u64 {
    u64::from(if has_parent { HAS_PARENT } else { 0 } | if is_removal { IS_REMOVAL } else { 0 })
}

/// Whether it has a parent, and whether it is a removal.
fn of_flags(flags: [u8; 8]) -> (bool, bool) {
    (flags[0] & HAS_PARENT != 0, flags[0] & IS_REMOVAL != 0)
}

fn mark_fields(mark: Option<Mark>) -> (u64, u64, u64) {
    let Some(Mark { tenant, expires_unix_ms, created_unix_ms, copies }) = mark else {
        return (u64::from(NO_MARK) << 8, 0, 0);
    };
    let flags = match created_unix_ms {
        None => u64::from(UNLISTED_MARK) << 8,
        Some(since) => {
            let more = copies.clamp(1, COPIES_MAX) - 1;
            u64::from(CONTEXT_MARK + more) << 8 | since.min(SINCE_MAX) << 16
        }
    };
    (flags, tenant.0, expires_unix_ms)
}

/// The outer `None`: that is no extent.
fn mark_of(flags: [u8; 8], tenant: u64, expires_unix_ms: u64) -> Option<Option<Mark>> {
    let (created_unix_ms, copies) = match flags[1] {
        NO_MARK => return Some(None),
        UNLISTED_MARK => (None, 1),
        kind @ CONTEXT_MARK..CONTEXT_MARKS_END => {
            (Some(u64::from_le_bytes(flags) >> 16), kind - CONTEXT_MARK + 1)
        }
        _ => return None,
    };
    Some(Some(Mark { tenant: Tenant(tenant), expires_unix_ms, created_unix_ms, copies }))
}

/// Writes into a buffer that has room for all of it.
struct Writer<'a> {
    to: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    fn new(to: &'a mut [u8]) -> Self {
        Writer { to, at: 0 }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.to[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    fn u64(&mut self, word: u64) {
        self.bytes(&word.to_le_bytes());
    }

    fn u32(&mut self, word: u32) {
        self.bytes(&word.to_le_bytes());
    }
}

struct Reader<'a> {
    from: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn new(from: &'a [u8]) -> Self {
        Reader { from, at: 0 }
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let array = *self.from.get(self.at..)?.first_chunk::<N>()?;
        self.at += N;
        Some(array)
    }

    fn key(&mut self) -> Option<[u8; 16]> {
        self.array()
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn words<const N: usize>(&mut self) -> Option<[u64; N]> {
        let mut words = [0; N];
        for word in &mut words {
            *word = self.u64()?;
        }
        Some(words)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const UNLISTED: Mark =
        Mark { tenant: Tenant(7), expires_unix_ms: 9, created_unix_ms: None, copies: 1 };

    fn record(n: u8, checksums: usize) -> Record {
        Record {
            key: BlockKey([n; 16]),
            namespace: Namespace([n + 1; 16]),
            parent: (n > 1).then_some(BlockKey([n - 1; 16])),
            mark: match n % 3 {
                0 => None,
                1 => Some(UNLISTED),
                _ => {
                    Some(Mark { created_unix_ms: Some(8), copies: n % COPIES_MAX + 1, ..UNLISTED })
                }
            },
            layout: 42,
            checksums: (0..checksums as u64).collect(),
        }
    }

    const PLACE: Place = Place { log_id: 1, segment_sequence: 2, log_page: 3, generation: 4 };

    fn sealed(n: u8, checksums: usize, payload_bytes: usize) -> ExtentBuf {
        let mut extent = ExtentBuf::new(record(n, checksums), payload_bytes);
        extent.payload_mut().iter_mut().zip(0u32..).for_each(|(byte, at)| *byte = at as u8);
        extent.seal(PLACE);
        extent
    }

    #[test]
    fn an_extent_comes_back_as_it_was_written() {
        for (n, checksums, payload_bytes) in [(1, 0, 1), (2, 4, 4096), (3, 600, 5000), (4, 5, 0)] {
            let extent = sealed(n, checksums, payload_bytes);
            let head = Head::decode(extent.buffer.bytes()).expect("a head");
            assert_eq!((head.place, &head.record), (PLACE, &record(n, checksums)));
            assert_eq!(head.pages(), extent.pages());
            assert_eq!(head.payload(extent.buffer.bytes()), Some(extent.payload()));
        }
    }

    /// Heads (without their checksums of runs) and entries as they were written before contexts were marked:
    /// of a context block without a parent, and of a normal one.
    const FORMER_HEADS: [&str; 2] = [
        "4b564558544e543194550988e23d58a701000000000000000200000000000000030000000000000004000000000000000\
         101010101010101010101010101010102020202020202020202020202020202000000000000000000000000000000000\
         001000000000000070000000000000009000000000000002a00000000000000030000000200000050392f89945faf780\
         0000000000000000100000000000000",
        "4b564558544e543118fc90f13f6fe2d401000000000000000200000000000000030000000000000004000000000000000\
         202020202020202020202020202020203030303030303030303030303030303010101010101010101010101010101010\
         100000000000000000000000000000000000000000000002a00000000000000030000000200000050392f89945faf780\
         0000000000000000100000000000000",
    ];
    const FORMER_ENTRIES: [&str; 2] = [
        "010101010101010101010101010101010202020202020202020202020202020200000000000000000000000000000000\
         0300000000000000070000000000000009000000000000002a0000000000000004000000020000000001000000000000",
        "020202020202020202020202020202020303030303030303030303030303030301010101010101010101010101010101\
         0300000000000000000000000000000000000000000000002a0000000000000004000000020000000100000000000000",
    ];

    fn bytes(hex: &str) -> Vec<u8> {
        let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
        (0..hex.len()).step_by(2).map(digit).collect()
    }

    #[test]
    fn what_was_written_before_there_were_contexts_is_read_as_ends_of_their_own() {
        for (n, mark) in [(1, Some(UNLISTED)), (2, None)] {
            let want = Record { mark, ..record(n, 2) };
            let head = Head::decode(&bytes(FORMER_HEADS[usize::from(n) - 1])).expect("a head");
            assert_eq!((head.place, head.record), (PLACE, want));
            let entry = bytes(FORMER_ENTRIES[usize::from(n) - 1]);
            let want = Entry::new(&Record { mark, ..record(n, 0) }, false, 3, (4, 2));
            assert_eq!(Entry::decode(&mut Reader::new(&entry)), Some(want));
        }
    }

    #[test]
    fn a_context_that_was_written_before_there_were_copies_is_on_one_node() {
        let context = Mark { created_unix_ms: Some(8), ..UNLISTED };
        assert_eq!(mark_of([1, 2, 8, 0, 0, 0, 0, 0], 7, 9), Some(Some(context)));
        assert_eq!(mark_fields(Some(context)), (8 << 16 | 2 << 8, 7, 9));
        let most = mark_of([0, 9, 8, 0, 0, 0, 0, 0], 7, 9);
        assert_eq!(most, Some(Some(Mark { copies: COPIES_MAX, ..context })));
        assert_eq!(mark_of([0, 10, 8, 0, 0, 0, 0, 0], 7, 9), None);
    }

    proptest! {
        #[test]
        fn any_record_comes_back_from_a_head_and_a_footer(
            keys in any::<[[u8; 16]; 3]>(),
            has_parent in any::<bool>(),
            mark in prop::option::of((any::<u64>(), any::<u64>(), prop::option::of(0..=SINCE_MAX))),
            copies in 1..=COPIES_MAX,
            layout in any::<u64>(),
            checksums in prop::collection::vec(any::<u64>(), 0..20),
        ) {
            let [key, namespace, parent] = keys;
            let mark = mark.map(|(tenant, expires_unix_ms, created_unix_ms)| Mark {
                tenant: Tenant(tenant),
                expires_unix_ms,
                created_unix_ms,
                copies: created_unix_ms.map_or(1, |_| copies),
            });
            let record = Record {
                key: BlockKey(key),
                namespace: Namespace(namespace),
                parent: has_parent.then_some(BlockKey(parent)),
                mark,
                layout,
                checksums,
            };
            let mut extent = ExtentBuf::new(record.clone(), 9);
            extent.seal(PLACE);
            let head = Head::decode(extent.buffer.bytes()).expect("a head");
            prop_assert_eq!(&head.record, &record);
            let entry = Entry::new(&record, false, 1, (2, 3));
            let footer = encode_footer(5, 6, std::slice::from_ref(&entry));
            let last = &footer.bytes()[footer.bytes().len() - PAGE_BYTES..];
            let tail = FooterTail::decode(5, last).expect("a tail");
            prop_assert_eq!(tail.list(footer.bytes()), Some(vec![entry]));
        }

        /// Also those whose checksum is good: whoever wrote them was no version of this program.
        #[test]
        fn damaged_bytes_are_refused_or_read_and_never_panic(
            garbage in prop::collection::vec((0..HEAD_BYTES + 32, any::<u8>()), 0..12),
            is_summed in any::<bool>(),
        ) {
            let mut bytes = sealed(2, 4, 40).buffer.bytes().to_vec();
            for (at, byte) in garbage {
                bytes[at] = byte;
            }
            if is_summed {
                put_checksum(&mut bytes[..HEAD_BYTES + 32]);
            }
            let payload = Head::decode(&bytes).and_then(|head| head.payload(&bytes).map(<[u8]>::len));
            prop_assert!(payload.is_none_or(|bytes| bytes <= PAGE_BYTES));
            let _ = Entry::decode(&mut Reader::new(&bytes[16..]));
        }
    }

    #[test]
    fn any_flipped_bit_of_an_extent_is_seen() {
        let extent = sealed(2, 4, 40);
        let whole = extent.buffer.bytes().to_vec();
        let used = (0..HEAD_BYTES + 32).chain(PAGE_BYTES..PAGE_BYTES + 40);
        for bit in used.flat_map(|byte| (0..8).map(move |bit| (byte, bit))) {
            let mut bytes = whole.clone();
            bytes[bit.0] ^= 1 << bit.1;
            let head = Head::decode(&bytes);
            let intact = head.is_some_and(|head| head.payload(&bytes).is_some());
            assert!(!intact, "byte {} bit {}", bit.0, bit.1);
        }
    }

    #[test]
    fn a_footer_lists_its_entries_and_a_changed_one_is_none() {
        for count in [0, 1, 42, 43, 200u8] {
            let entries: Vec<Entry> = (0..count)
                .map(|n| Entry::new(&record(n % 100 + 1, 0), false, n.into(), (n.into(), 2)))
                .collect();
            let footer = encode_footer(5, 6, &entries);
            let pages = footer.bytes();
            let tail = FooterTail::decode(5, &pages[pages.len() - PAGE_BYTES..]).expect("a tail");
            assert_eq!((tail.sequence, tail.pages()), (6, footer.pages()));
            assert_eq!(tail.list(pages), Some(entries));
            assert!(FooterTail::decode(9, &pages[pages.len() - PAGE_BYTES..]).is_none());
            if count > 0 {
                let mut changed = pages.to_vec();
                changed[usize::from(count - 1) * ENTRY_BYTES + 3] ^= 1;
                assert_eq!(tail.list(&changed), None);
            }
        }
    }

    #[test]
    fn what_is_no_piece_of_a_log_is_refused() {
        for bytes in [vec![], vec![0; 17], vec![0xff; PAGE_BYTES], vec![0; PAGE_BYTES]] {
            assert!(Head::decode(&bytes).is_none());
            assert!(FooterTail::decode(0, &bytes).is_none());
            assert!(decode_segment_header(0, &bytes).is_none());
            assert!(Super::decode(&bytes).is_none());
        }
        let header = encode_segment_header(1, 2);
        assert_eq!(decode_segment_header(1, header.bytes()), Some(2));
        assert_eq!(decode_segment_header(2, header.bytes()), None);
        let superblock = Super { log_id: 3, segment_pages: 4, starts: 5 };
        assert_eq!(Super::decode(superblock.encode().bytes()), Some(superblock));
        let former = one_page(&[FORMER_SUPER_MAGIC, 0, 3, 4]);
        assert_eq!(Super::decode(former.bytes()), Some(Super { starts: 0, ..superblock }));
    }
}
