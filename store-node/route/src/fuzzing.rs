//! The parsers of this package that read bytes of other processes, as targets: what must hold of each
//! is said in `kvasir-fuzzing`. They run in the tests, and under libFuzzer in `store-node/fuzz`.

use kvasir_attention::Partial;
use kvasir_attention::index::Candidate;
use kvasir_fuzzing::{Target, within};

use crate::wire::{
    Answer, Asked, Best, BestShape, Dispatch, Kind, MessageStatus, Part, PartBody, PartStatus,
    PartialShape, Query, QueryHead, Reply, WireDtype, query_length, read_answer, read_query,
    write_answer, write_query,
};

/// All of them.
pub const TARGETS: [Target; 4] = [
    Target { name: "route_best", run: best, seeds: bests },
    Target { name: "route_partials", run: partials, seeds: partial_answers },
    Target { name: "route_query", run: query, seeds: queries },
    Target { name: "route_query_length", run: length, seeds: queries },
];

/// What an engine asks of a holder.
pub fn query(bytes: &[u8]) -> bool {
    let Ok(query) = within(bytes.len(), || read_query(bytes)) else { return false };
    let rows: usize = query.parts.iter().map(|part| part.query_rows as usize).sum();
    assert_eq!(query.values.len(), rows * query.head.d_qk as usize);
    assert!(query.parts.len() <= bytes.len() && query.bytes() <= bytes.len());
    assert_eq!(query.rows_of(query.parts.len() - 1).end, rows);
    let (_, _) = (query.work(), query.answer_room());
    let again = written(&query);
    assert_eq!(query_length(&again), Ok(again.len()));
    // What is no number is not equal to itself: the bytes are.
    assert_eq!(read_query(&again).map(|query| written(&query)), Ok(again));
    true
}

/// A query as it is written.
fn written(query: &Query) -> Vec<u8> {
    let Query { head, parts, values, weights, selected } = query;
    let tokens = match head.kind {
        Kind::Selected { heads, .. } => heads as usize,
        Kind::Dense | Kind::Scores { .. } => usize::MAX,
    };
    let rows = |part: usize| query.rows_of(part);
    let lists = |part: usize| {
        let (first, end) = (rows(part).start / tokens, rows(part).end / tokens);
        (first..end).map(|token| selected.of(token)).collect::<Vec<&[u32]>>()
    };
    let lists: Vec<Vec<&[u32]>> = (0..parts.len()).map(lists).collect();
    let mut bodies = Vec::new();
    for (part, selected) in lists.iter().enumerate() {
        let (d_qk, rows) = (head.d_qk as usize, rows(part));
        let weights = if weights.is_empty() { &[][..] } else { &weights[rows.clone()] };
        let values = &values[rows.start * d_qk..rows.end * d_qk];
        bodies.push(PartBody { values, weights, selected });
    }
    let mut bytes = Vec::new();
    write_query(&mut bytes, head, parts, &bodies);
    bytes
}

/// How long a query says that it is.
pub fn length(bytes: &[u8]) -> bool {
    within(0, || query_length(bytes)).is_ok()
}

/// What a holder answers with.
pub fn partials(bytes: &[u8]) -> bool {
    answer(bytes, &asked_partials())
}

/// The rows that score best.
pub fn best(bytes: &[u8]) -> bool {
    answer(bytes, &asked_best())
}

fn answer<R: Reply + PartialEq + std::fmt::Debug>(bytes: &[u8], asked: &Asked<R>) -> bool {
    // Its shape is what was asked for, whatever is answered.
    let most = asked.room().max(bytes.len());
    let Ok(answer) = within(most, || read_answer(bytes, asked)) else { return false };
    let mut again = Vec::new();
    write_answer(&mut again, &answer, WireDtype::F32);
    assert!(again.len() <= asked.room());
    assert_eq!(read_answer(&again, asked).as_ref(), Ok(&answer));
    answer.status == MessageStatus::Taken
}

// ---- what is accepted ----

const DISPATCH: Dispatch = Dispatch { serial: 9, step: 4, layer: 2 };

fn asked_partials() -> Asked<Partial> {
    let shape = |rows| PartialShape { rows, d_v: 2, dtype: WireDtype::F32 };
    Asked { dispatch: DISPATCH, parts: vec![shape(1), shape(2)] }
}

fn asked_best() -> Asked<Best> {
    let shape = BestShape { tokens: 2, cached_rows: 7, topk: 2 };
    Asked { dispatch: DISPATCH, parts: vec![shape, shape] }
}

fn encoded<R: Reply>(parts: Vec<Result<R, PartStatus>>) -> Vec<u8> {
    let answer = Answer { dispatch: DISPATCH, status: MessageStatus::Taken, parts };
    let mut bytes = Vec::new();
    write_answer(&mut bytes, &answer, WireDtype::F32);
    bytes
}

fn partial_answers() -> Vec<Vec<u8>> {
    let partial = |rows: usize| {
        Ok(Partial { o: vec![0.5; 2 * rows], m: vec![-1.0; rows], l: vec![3.0; rows] })
    };
    let refused = vec![Err(PartStatus::NoRoute), Err(PartStatus::OtherPins)];
    vec![encoded(vec![partial(1), partial(2)]), encoded::<Partial>(refused)]
}

fn bests() -> Vec<Vec<u8>> {
    let token = |rows: [u32; 2]| rows.map(|row| Candidate { row, score: 0.25 }).to_vec();
    let part = || Ok(Best(vec![token([0, 6]), token([3, 4])]));
    vec![encoded(vec![part(), part()]), encoded(vec![part(), Err(PartStatus::OutOfRange)])]
}

fn queries() -> Vec<Vec<u8>> {
    let part = |query_rows| Part { route: 1, pins: 2, first_block: 3, cached_rows: 5, query_rows };
    let values = [0.5; 9];
    let of = |dtype, kind, bodies: &[PartBody<'_>]| {
        let head =
            QueryHead { session: 7, dispatch: DISPATCH, dtype, d_qk: 3, d_v: 2, scale: 0.5, kind };
        let mut bytes = Vec::new();
        write_query(&mut bytes, &head, &[part(1), part(2)], bodies);
        bytes
    };
    let dense =
        [&values[..3], &values[3..]].map(|values| PartBody { values, ..PartBody::default() });
    let weights = [0.25; 3];
    let scores = [
        PartBody { weights: &weights[..1], ..dense[0] },
        PartBody { weights: &weights[1..], ..dense[1] },
    ];
    let lists: [&[u32]; 3] = [&[0], &[1, 4], &[2]];
    let selected = [
        PartBody { selected: &lists[..1], ..dense[0] },
        PartBody { selected: &lists[1..], ..dense[1] },
    ];
    vec![
        of(WireDtype::F32, Kind::Dense, &dense),
        of(WireDtype::Bf16, Kind::Dense, &dense),
        of(WireDtype::F32, Kind::Scores { heads: 1, topk: 4 }, &scores),
        of(WireDtype::Bf16, Kind::Selected { heads: 1, named: 4 }, &selected),
    ]
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
        kvasir_fuzzing::has_its_file(&TARGETS, &folder, |name| name.starts_with("route_"));
    }
}
