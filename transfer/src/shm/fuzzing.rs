//! The shm domain's parsers as targets; see [`crate::fuzzing`]. Its ring has a target of its own.

use kvasir_fuzzing::within;
use kvasir_transfer_core::{Refusal, Settled};

use super::{Record, RegionAnswer, RegionPlace, RegionQuestion, Taken, directory};
use crate::memory::{Prefault, SharedMemory};

/// A record in the ring.
pub fn shm_record(bytes: &[u8]) -> bool {
    match within(0, || Record::decode(bytes)) {
        Some(Record::Landed { imm }) => assert_eq!(Record::landed(imm), bytes),
        Some(Record::Message { sequence, id, bytes: body }) => {
            assert_eq!(Record::message(sequence, id, body), bytes);
        }
        None => return false,
    }
    true
}

/// What became of messages.
pub fn shm_taken(bytes: &[u8]) -> bool {
    let Some(taken) = within(0, || Taken::decode(bytes).last()).flatten() else { return false };
    assert!(bytes.ends_with(&taken.encode()));
    true
}

/// Asks for the descriptor of a region.
pub fn shm_region_question(bytes: &[u8]) -> bool {
    let Some(question) = within(0, || RegionQuestion::decode(bytes)) else { return false };
    assert_eq!(question.encode(), bytes);
    true
}

/// Says where a region stands.
pub fn shm_region_answer(bytes: &[u8]) -> bool {
    let Some(answer) = within(0, || RegionAnswer::decode(bytes)) else { return false };
    assert_eq!(RegionAnswer::decode(&answer.encode()), Some(answer));
    true
}

/// A look into a directory that its owner has filled as it likes: the slot, the key and how much of
/// the region is mapped here, eight bytes each, then the directory. Accepted is what was found.
pub fn shm_directory(bytes: &[u8]) -> bool {
    let Some((words, image)) = bytes.split_first_chunk::<24>() else { return false };
    if image.is_empty() {
        return false;
    }
    let word = |at: usize| u64::from_le_bytes(words.as_chunks().0[at]);
    let (key, mapped_bytes) = (word(1), word(2));
    let Ok(slot) = usize::try_from(word(0)) else { return false };
    let memory = SharedMemory::create("fuzzed-directory", image.len(), Prefault::No);
    let memory = memory.expect("memory for a test");
    memory.copy_from(0, image).expect("it was made for it");

    let found = within(0, || directory::lookup(&memory, slot, key, mapped_bytes));
    // What stands there, read without the directory's code.
    let at = slot.checked_mul(16).and_then(|at| at.checked_add(64));
    let entry = at.and_then(|at| image.get(at..)?.first_chunk::<16>());
    let entry = entry.map(|entry| {
        [0, 8].map(|at| u64::from_le_bytes(*entry[at..].first_chunk().expect("8 bytes")))
    });
    let expected = entry.filter(|[known, _]| *known == key).map(|[_, length]| length);
    assert_eq!(found, expected.map(|length| length.min(mapped_bytes)));
    found.is_some()
}

// ---- what is accepted ----

pub(crate) fn records() -> Vec<Vec<u8>> {
    let message = Record::message(3, 9, b"hello");
    vec![Record::landed(7).to_vec(), message, Record::message(0, u64::MAX, &[])]
}

pub(crate) fn taken() -> Vec<Vec<u8>> {
    let refused = Settled::Refused(Refusal::TooLong);
    let told = [(7, Settled::Landed), (u64::MAX, refused)]
        .map(|(sequence, settled)| Taken { sequence, settled }.encode());
    vec![told[0].to_vec(), told.as_flattened().to_vec()]
}

pub(crate) fn region_questions() -> Vec<Vec<u8>> {
    vec![RegionQuestion { key: 3 }.encode().to_vec()]
}

pub(crate) fn region_answers() -> Vec<Vec<u8>> {
    let place = RegionPlace { slot: 2, length_bytes: 4096 };
    let places = [Ok(place), Err(Refusal::Revoked)];
    places.map(|place| RegionAnswer { key: 5, place }.encode()).to_vec()
}

pub(crate) fn directories() -> Vec<Vec<u8>> {
    let mut image = vec![0; 64 + 4 * 16];
    image[64 + 2 * 16..][..8].copy_from_slice(&5u64.to_le_bytes());
    image[64 + 2 * 16 + 8..][..8].copy_from_slice(&4096u64.to_le_bytes());
    let looked = |words: [u64; 3]| [words.map(u64::to_le_bytes).as_flattened(), &image].concat();
    vec![looked([2, 5, 4096]), looked([2, 5, 100])]
}
