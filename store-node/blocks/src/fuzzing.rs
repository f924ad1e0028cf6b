//! The parsers of this package that read bytes of other processes, as targets: what must hold of each
//! is said in `kvasir-fuzzing`. They run in the tests, and under libFuzzer in `store-node/fuzz`.

use kvasir_fuzzing::{Target, within};
use kvasir_proto::TxId;

use crate::moving::tail;

/// All of them.
pub const TARGETS: [Target; 2] = [
    Target { name: "blocks_tail", run: tail, seeds: tails },
    Target { name: "blocks_tail_part", run: tail_part, seeds: parts },
];

const TX: TxId = TxId { conductor_incarnation: 1, serial: 2 };
/// One for each page.
const CHECKSUMS: usize = 4;

/// The tail of a push of which all pages have landed.
pub fn tail(bytes: &[u8]) -> bool {
    let Ok(tail) = within(bytes.len(), || tail::decode(bytes, TX, CHECKSUMS)) else { return false };
    assert_eq!((tail.tx, tail.checksums.len()), (Some(TX.into()), CHECKSUMS));
    let again =
        tail::encode(TX, tail.checksums.clone(), tail.engine.clone(), tail.whole_blocks_only);
    assert_eq!(tail::decode(&again, TX, CHECKSUMS), Ok(tail));
    true
}

/// The tail of a push that has ended early.
pub fn tail_part(bytes: &[u8]) -> bool {
    let Ok(pages) = within(bytes.len(), || tail::decode_part(bytes, TX)) else { return false };
    let again = tail::encode(TX, pages.clone(), Vec::new(), false);
    assert_eq!(tail::decode_part(&again, TX), Ok(pages));
    true
}

fn tails() -> Vec<Vec<u8>> {
    let checksums = || vec![1, 2, 3, u64::MAX];
    let mut roomy = tail::encode(TX, checksums(), Vec::new(), true);
    roomy.resize(200, 0xee);
    vec![tail::encode(TX, checksums(), b"tail".to_vec(), false), roomy]
}

fn parts() -> Vec<Vec<u8>> {
    let part = |checksums| tail::encode(TX, checksums, Vec::new(), false);
    vec![part(vec![1, 2]), part(vec![5; 12]), part(Vec::new())]
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
        kvasir_fuzzing::has_its_file(&TARGETS, &folder, |name| name.starts_with("blocks_"));
    }
}
