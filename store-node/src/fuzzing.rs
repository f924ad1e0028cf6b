//! The parsers of this package that read bytes of other processes or of an object store, as targets: what must hold
//! of each is said in `kvasir-fuzzing`. They run in the tests, and under libFuzzer in `fuzz` beside the crate.

use bytes::Bytes;
use kvasir_blocks::SsdBlock;
use kvasir_blocks::moving::PushName;
use kvasir_blocks::moving::peer_message::PeerMessage;
use kvasir_fuzzing::{Target, within};
use kvasir_proto::{BlockKey, Class, Mark, Namespace, SlotLayout, SlotRun, Tenant, v1};
use object_store::path::Path;
use prost::Message;

use crate::bucket::name::Names;
use crate::bucket::object;
use crate::node::peer_message::{self, Heard, ObjectsMessage};
use crate::node::{client, session};

/// All of them.
pub const TARGETS: [Target; 5] = [
    Target { name: "node_client_message", run: client_message, seeds: client_messages },
    Target { name: "node_engine_message", run: engine_message, seeds: engine_messages },
    Target { name: "node_object", run: object, seeds: objects },
    Target { name: "node_object_name", run: object_name, seeds: names },
    Target { name: "node_peer_message", run: peer_message, seeds: peer_messages },
];

/// What another node says.
pub fn peer_message(bytes: &[u8]) -> bool {
    let Ok(heard) = within(bytes.len(), || peer_message::from_bytes(bytes)) else { return false };
    let again = match &heard {
        Heard::OfPush(message) => peer_message::to_bytes(*message),
        Heard::OfObjects(message) => (**message).clone().into_bytes(),
    };
    let read = peer_message::from_bytes(&again).expect("an encoded message decodes");
    assert_eq!(read, heard);
    true
}

/// What an engine says.
pub fn engine_message(record: &[u8]) -> bool {
    let Ok(message) = within(record.len(), || session::message(record)) else { return false };
    let again = v1::EngineToNode { message: Some(message) }.encode_to_vec();
    let read = session::message(&again).expect("an encoded message decodes");
    assert_eq!(v1::EngineToNode { message: Some(read) }.encode_to_vec(), again);
    true
}

/// What a client of objects says.
pub fn client_message(record: &[u8]) -> bool {
    let Ok((request, message)) = within(record.len(), || client::message(record)) else {
        return false;
    };
    let again = v1::ClientToNode { request, message: Some(message) }.encode_to_vec();
    let (request, read) = client::message(&again).expect("an encoded message decodes");
    assert_eq!(v1::ClientToNode { request, message: Some(read) }.encode_to_vec(), again);
    true
}

/// The name of an object.
pub fn object_name(bytes: &[u8]) -> bool {
    let Some(name) = std::str::from_utf8(bytes).ok().and_then(|text| Path::parse(text).ok()) else {
        return false;
    };
    let names = Names::new(PREFIX);
    let Some(block) = within(bytes.len(), || names.parse(&name, 7)) else { return false };
    assert_eq!((names.of(&block), block.bytes), (Some(name), 7));
    assert!(matches!(block.class, Class::Context { .. }));
    true
}

/// The bytes of an object, under the name of one block. Also with the checksums that they should have: those must
/// not be all that is checked.
pub fn object(bytes: &[u8]) -> bool {
    let whole = |bytes: Vec<u8>| {
        let (length, object) = (bytes.len(), Bytes::from(bytes));
        let read = within(length, || object::decode(&object, &block(), &layout()));
        let Ok((checksums, payload)) = read else { return false };
        assert_eq!(payload.len() as u64, layout().slot_bytes());
        assert_eq!(object::checksums(&layout(), &payload), checksums);
        true
    };
    let mut sealed = bytes.to_vec();
    if let Some((header, payload)) = sealed.split_at_mut_checked(HEADER_BYTES) {
        header[88..96].copy_from_slice(&kvasir_transfer::checksum(payload).to_le_bytes());
        let sum = kvasir_transfer::checksum(&header[16..]).to_le_bytes();
        header[8..16].copy_from_slice(&sum);
    }
    whole(bytes.to_vec()) | whole(sealed)
}

// ---- what is accepted ----

const PREFIX: &str = "p";
/// Of an object with two runs.
const HEADER_BYTES: usize = 128;
const PAYLOAD: &[u8] = b"two runs of a block.";

fn layout() -> SlotLayout {
    let run = |offset_bytes, length_bytes| vec![SlotRun { offset_bytes, length_bytes }];
    SlotLayout::new(4, 20, vec![run(0, 8), run(8, 10)]).expect("a layout")
}

fn block() -> SsdBlock {
    let expires_unix_ms = 0x018b_cfe5_6800;
    SsdBlock {
        key: BlockKey([1; 16]),
        namespace: Namespace([2; 16]),
        parent: Some(BlockKey([3; 16])),
        class: Class::Context { tenant: Tenant(1), expires_unix_ms },
        mark: Some(Mark {
            tenant: Tenant(1),
            expires_unix_ms,
            created_unix_ms: Some(3),
            copies: 2,
        }),
        layout: 4,
        bytes: 0,
    }
}

fn objects() -> Vec<Vec<u8>> {
    let sums = [&PAYLOAD[..8], &PAYLOAD[8..18]].map(kvasir_transfer::checksum);
    vec![[&object::header(&block(), &sums, PAYLOAD)[..], PAYLOAD].concat()]
}

fn names() -> Vec<Vec<u8>> {
    let blocks = [block(), SsdBlock { parent: None, mark: None, ..block() }];
    let name = |block: &SsdBlock| Names::new(PREFIX).of(block).expect("a name").to_string();
    blocks.iter().map(|block| name(block).into_bytes()).collect()
}

fn peer_messages() -> Vec<Vec<u8>> {
    let name = PushName { receiver: u64::MAX, imm: 7 };
    let tx = v1::TxId { conductor_incarnation: 1, serial: 2 };
    let send = v1::SendObjects { lease_ms: 5, ..v1::SendObjects::default() };
    let not_sent = v1::ObjectsNotSent { txs: vec![tx], ..v1::ObjectsNotSent::default() };
    vec![
        peer_message::to_bytes(PeerMessage::Failed(name)),
        peer_message::to_bytes(PeerMessage::Probe),
        ObjectsMessage::Send(send).into_bytes(),
        ObjectsMessage::NotSent(not_sent).into_bytes(),
    ]
}

fn engine_messages() -> Vec<Vec<u8>> {
    use v1::engine_to_node::Message as ToNode;
    let tx = Some(v1::TxId { conductor_incarnation: 1, serial: 2 });
    let said = [
        ToNode::Bind(v1::Bind { tx, ..v1::Bind::default() }),
        ToNode::Grow(v1::Grow { tx, ..v1::Grow::default() }),
        ToNode::Plan(v1::StepPlan { step: 7, ..v1::StepPlan::default() }),
    ];
    said.map(|message| v1::EngineToNode { message: Some(message) }.encode_to_vec()).to_vec()
}

fn client_messages() -> Vec<Vec<u8>> {
    use v1::client_to_node::Message as ToNode;
    let (keys, objects, checksums) = (vec![9; 32], vec![0, 1], vec![1, 2, 3, 4]);
    let commit = v1::CommitObjects { reserve: 4, objects, checksums, ..Default::default() };
    let said = [
        ToNode::Reserve(v1::ReserveObjects { keys, lease_ms: 100 }),
        ToNode::Commit(commit),
        ToNode::Unpin(v1::UnpinObjects { get: 3 }),
    ];
    said.map(|message| v1::ClientToNode { request: 5, message: Some(message) }.encode_to_vec())
        .to_vec()
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
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
        kvasir_fuzzing::has_its_file(&TARGETS, &folder, |name| name.starts_with("node_"));
    }
}
