//! The question about a path that has failed, and its answer, as they go over the wire. They travel on
//! another path of the same session; `kvasir_transfer_core::CloseRequest` explains them.

use kvasir_transfer_core::{CloseRequest, CloseVerdict, Counted, PathIndex};
use prost::Message;

/// Of an encoded question or answer. A path has at most [`FRAMES_MAX`] frames under way, each of which
/// names at most one immediate or one message.
pub(crate) const CLOSING_BYTES_MAX: usize = 128 << 10;
/// Frames of one path that may wait for their acknowledgement.
pub(crate) const FRAMES_MAX: usize = 4096;

#[derive(Clone, PartialEq, Message)]
struct Question {
    #[prost(uint32, tag = "1")]
    path: u32,
    #[prost(message, repeated, tag = "2")]
    counted: Vec<CountedWire>,
    #[prost(uint64, repeated, tag = "3")]
    messages: Vec<u64>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct CountedWire {
    #[prost(fixed32, tag = "1")]
    imm: u32,
    #[prost(uint64, tag = "2")]
    landed: u64,
    #[prost(uint64, tag = "3")]
    undecided: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Answer {
    #[prost(uint32, tag = "1")]
    path: u32,
    #[prost(bool, tag = "2")]
    forgotten: bool,
    #[prost(fixed32, repeated, tag = "3")]
    landed: Vec<u32>,
    #[prost(fixed32, repeated, tag = "4")]
    unknown: Vec<u32>,
    #[prost(uint64, repeated, tag = "5")]
    delivered: Vec<u64>,
}

pub(crate) fn question(request: &CloseRequest) -> Vec<u8> {
    let counted = request.counted.iter().map(|counted| {
        let Counted { imm, landed, undecided } = *counted;
        CountedWire { imm, landed, undecided }
    });
    let (counted, messages) = (counted.collect(), request.messages.clone());
    Question { path: request.path.0, counted, messages }.encode_to_vec()
}

/// `None` when these bytes are no question.
pub(crate) fn read_question(bytes: &[u8]) -> Option<CloseRequest> {
    let Question { path, counted, messages } = Question::decode(bytes).ok()?;
    // More than a path has frames: the answer might be longer than can be sent, and is remembered.
    if counted.len() + messages.len() > FRAMES_MAX {
        return None;
    }
    let counted = counted.into_iter().map(|counted| {
        let CountedWire { imm, landed, undecided } = counted;
        Counted { imm, landed, undecided }
    });
    Some(CloseRequest { path: PathIndex(path), counted: counted.collect(), messages })
}

pub(crate) fn answer(path: PathIndex, verdict: CloseVerdict) -> Vec<u8> {
    let CloseVerdict { forgotten, landed, unknown, delivered } = verdict;
    Answer { path: path.0, forgotten, landed, unknown, delivered }.encode_to_vec()
}

/// `None` when these bytes are no answer.
pub(crate) fn read_answer(bytes: &[u8]) -> Option<(PathIndex, CloseVerdict)> {
    let Answer { path, forgotten, landed, unknown, delivered } = Answer::decode(bytes).ok()?;
    Some((PathIndex(path), CloseVerdict { forgotten, landed, unknown, delivered }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_longest_question_fits() {
        let counted = Counted { imm: u32::MAX, landed: u64::MAX, undecided: u64::MAX };
        let path = PathIndex(u32::MAX);
        let counted = vec![counted; FRAMES_MAX];
        let longest = CloseRequest { path, counted, messages: Vec::new() };
        assert!(question(&longest).len() <= CLOSING_BYTES_MAX);
        let messages = vec![u64::MAX; FRAMES_MAX];
        let longest = CloseRequest { path, counted: Vec::new(), messages };
        assert!(question(&longest).len() <= CLOSING_BYTES_MAX);
    }

    #[test]
    fn a_question_about_more_than_a_path_carries_is_none() {
        let asked = |messages: usize| {
            let counted = vec![Counted { imm: 1, landed: 0, undecided: 1 }];
            let messages = vec![8; messages];
            read_question(&question(&CloseRequest { path: PathIndex(1), counted, messages }))
        };
        assert!(asked(FRAMES_MAX - 1).is_some());
        assert!(asked(FRAMES_MAX).is_none());
    }

    proptest! {
        #[test]
        fn questions_and_answers_survive_the_wire(
            path: u32,
            counted in prop::collection::vec(any::<(u32, u64, u64)>(), 0..5),
            ids in prop::collection::vec(any::<u64>(), 0..5),
            imms in prop::collection::vec(any::<u32>(), 0..5),
            forgotten: bool,
        ) {
            let path = PathIndex(path);
            let counted = counted.into_iter().map(|(imm, landed, undecided)| {
                Counted { imm, landed, undecided }
            });
            let request =
                CloseRequest { path, counted: counted.collect(), messages: ids.clone() };
            prop_assert_eq!(read_question(&question(&request)), Some(request));
            let (landed, unknown, delivered) = (imms.clone(), imms, ids);
            let verdict = CloseVerdict { forgotten, landed, unknown, delivered };
            prop_assert_eq!(read_answer(&answer(path, verdict.clone())), Some((path, verdict)));
        }

        #[test]
        fn any_bytes_are_read_or_nothing(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
            let _ = read_question(&bytes);
            let _ = read_answer(&bytes);
        }
    }
}
