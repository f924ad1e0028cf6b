//! The parsers of this package that read bytes of other processes or of a disk, as targets: what must hold of each
//! is said in `kvasir-fuzzing`. They run in the tests, and under libFuzzer in `store-node/fuzz`.

use kvasir_checksum::checksum;
use kvasir_fuzzing::{Target, within};
use kvasir_proto::{BlockKey, Mark, Namespace, Tenant};

use crate::buffer::PAGE_BYTES;
use crate::format::{
    Entry, ExtentBuf, FooterTail, Head, Place, Record, Super, decode_segment_header, encode_footer,
    encode_segment_header,
};

/// All of them.
pub const TARGETS: [Target; 4] = [
    Target { name: "log_extent", run: extent, seeds: extents },
    Target { name: "log_footer", run: footer, seeds: footers },
    Target { name: "log_segment_header", run: segment_header, seeds: segment_headers },
    Target { name: "log_superblock", run: superblock, seeds: superblocks },
];

const LOG_ID: u64 = 5;

/// The bytes, and the same with the checksum that they should have: it must not be all that is checked.
fn pieces(bytes: &[u8], end: usize) -> Vec<Vec<u8>> {
    let mut sealed = bytes.to_vec();
    let end = end.min(sealed.len());
    if end >= 16 {
        let sum = checksum(&sealed[16..end]).to_le_bytes();
        sealed[8..16].copy_from_slice(&sum);
    }
    vec![bytes.to_vec(), sealed]
}

/// An extent: its head, which says how long it is, and its payload.
pub fn extent(bytes: &[u8]) -> bool {
    // Where the head ends is what its number of checksums says.
    let count = bytes.get(132..136).and_then(|bytes| bytes.try_into().ok());
    let count = count.map_or(0, u32::from_le_bytes) as usize;
    let end = 144_usize.saturating_add(count.saturating_mul(8));
    pieces(bytes, end).iter().map(|bytes| whole_extent(bytes)).fold(false, |any, one| any | one)
}

fn whole_extent(bytes: &[u8]) -> bool {
    let Some(head) = within(bytes.len(), || Head::decode(bytes)) else { return false };
    let payload = within(bytes.len(), || head.payload(bytes));
    let Some(payload) = payload else { return false };
    assert!(head.payload_start() + payload.len() <= bytes.len());
    assert!(head.pages() * PAGE_BYTES >= head.payload_start() + payload.len());
    let mut again = ExtentBuf::new(head.record.clone(), payload.len());
    again.payload_mut().copy_from_slice(payload);
    again.seal(head.place);
    let read = Head::decode(again.buffer.bytes()).expect("an encoded value decodes");
    assert_eq!((read.place, &read.record), (head.place, &head.record));
    assert_eq!(read.payload(again.buffer.bytes()), Some(payload));
    true
}

/// The end of a segment.
pub fn footer(bytes: &[u8]) -> bool {
    let pages = bytes.len() / PAGE_BYTES;
    let Some(last) = pages.checked_sub(1).map(|last| last * PAGE_BYTES) else { return false };
    let bytes = &bytes[..pages * PAGE_BYTES];
    let tails = pieces(&bytes[last..], 48);
    let one = |tail: &Vec<u8>| whole_footer(&[&bytes[..last], tail].concat(), last);
    tails.iter().map(one).fold(false, |any, one| any | one)
}

fn whole_footer(bytes: &[u8], last: usize) -> bool {
    let tail = within(bytes.len(), || FooterTail::decode(LOG_ID, &bytes[last..]));
    let Some(tail) = tail else { return false };
    let Some(entries) = within(bytes.len(), || tail.list(bytes)) else { return false };
    assert_eq!(entries.len(), tail.entries);
    let again = encode_footer(LOG_ID, tail.sequence, &entries);
    let last = again.bytes().len() - PAGE_BYTES;
    let read = FooterTail::decode(LOG_ID, &again.bytes()[last..]).expect("a tail");
    assert_eq!(read.list(again.bytes()), Some(entries));
    true
}

/// The first page of a segment.
pub fn segment_header(bytes: &[u8]) -> bool {
    let one = |bytes: &Vec<u8>| {
        let sequence = within(bytes.len(), || decode_segment_header(LOG_ID, bytes));
        let Some(sequence) = sequence else { return false };
        let again = encode_segment_header(LOG_ID, sequence);
        assert_eq!(decode_segment_header(LOG_ID, again.bytes()), Some(sequence));
        true
    };
    pieces(bytes, 32).iter().map(one).fold(false, |any, one| any | one)
}

/// Which log it is.
pub fn superblock(bytes: &[u8]) -> bool {
    let one = |bytes: &Vec<u8>| {
        let Some(read) = within(bytes.len(), || Super::decode(bytes)) else { return false };
        assert!(read.segment_pages > 0);
        assert_eq!(Super::decode(read.encode().bytes()), Some(read));
        true
    };
    pieces(bytes, 40).iter().map(one).fold(false, |any, one| any | one)
}

// ---- what is accepted ----

fn record(parent: Option<BlockKey>, mark: Option<Mark>, checksums: usize) -> Record {
    let (key, namespace) = (BlockKey([1; 16]), Namespace([2; 16]));
    Record { key, namespace, parent, mark, layout: 3, checksums: vec![4; checksums] }
}

fn marks() -> [Option<Mark>; 4] {
    let mark = |created_unix_ms, copies| {
        Some(Mark { tenant: Tenant(7), expires_unix_ms: 9, created_unix_ms, copies })
    };
    [None, mark(None, 1), mark(Some(8), 1), mark(Some(8), 3)]
}

fn extents() -> Vec<Vec<u8>> {
    let place = Place { log_id: LOG_ID, segment_sequence: 6, log_page: 7, generation: 8 };
    let of = |(mark, checksums)| {
        let mut extent = ExtentBuf::new(record(Some(BlockKey([9; 16])), mark, checksums), 100);
        extent.payload_mut().fill(0xab);
        extent.seal(place);
        extent.buffer.bytes().to_vec()
    };
    marks().into_iter().zip([0, 2, 600]).map(of).collect()
}

fn footers() -> Vec<Vec<u8>> {
    let entry = |mark| Entry::new(&record(None, mark, 0), mark.is_none(), 1, (2, 3));
    let many = vec![entry(None); 50];
    let lists = [Vec::new(), marks().map(entry).to_vec(), many];
    lists.map(|list| encode_footer(LOG_ID, 6, &list).bytes().to_vec()).to_vec()
}

fn segment_headers() -> Vec<Vec<u8>> {
    [1, u64::MAX].map(|at| encode_segment_header(LOG_ID, at).bytes().to_vec()).to_vec()
}

fn superblocks() -> Vec<Vec<u8>> {
    let of = |starts| Super { log_id: LOG_ID, segment_pages: 32, starts }.encode();
    [0, u32::MAX].map(|starts| of(starts).bytes().to_vec()).to_vec()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_parser_bears_arbitrary_bytes_and_valid_ones_that_were_changed() {
        kvasir_fuzzing::bear(&TARGETS);
    }

    #[test]
    fn every_target_has_its_file_for_the_fuzzer() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/fuzz_targets");
        kvasir_fuzzing::has_its_file(&TARGETS, &folder, |name| name.starts_with("log_"));
    }
}
