//! The parsers of this package that read bytes of other processes, as targets: what must hold of each
//! is said in `kvasir-fuzzing`. They run in the tests, and under libFuzzer in `store-node/fuzz`. The rings that carry
//! them are the transfer engine's, and have their target there.

use kvasir_fuzzing::{Target, within};
use kvasir_proto::v1;
use prost::Message;
use v1::node_to_engine::Message as ToEngine;

/// All of them.
pub const TARGETS: [Target; 1] = [Target { name: "attach_message", run: message, seeds: messages }];

/// What a node says to an engine.
pub fn message(record: &[u8]) -> bool {
    let Ok(message) = within(record.len(), || crate::engine::message(record)) else { return false };
    let again = v1::NodeToEngine { message: Some(message) }.encode_to_vec();
    let read = crate::engine::message(&again).expect("an encoded message decodes");
    assert_eq!(v1::NodeToEngine { message: Some(read) }.encode_to_vec(), again);
    true
}

fn messages() -> Vec<Vec<u8>> {
    let tx = Some(v1::TxId { conductor_incarnation: 1, serial: 2 });
    let bound = v1::Bound { tx, slots: vec![5, 6, 7], cached_tokens: 64, ..v1::Bound::default() };
    let said = [ToEngine::Bound(bound), ToEngine::Stop(v1::Stop { tx, ..v1::Stop::default() })];
    let encoded = |message| v1::NodeToEngine { message: Some(message) }.encode_to_vec();
    said.map(encoded).to_vec()
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
        kvasir_fuzzing::has_its_file(&TARGETS, &folder, |name| name.starts_with("attach_"));
    }
}
