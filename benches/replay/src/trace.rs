//! Traces: one JSON object a line, plain or as zstd. A line has `timestamp` (ms), `input_length`
//! and `output_length` (tokens) and `hash_ids`, one id for each block of the prompt, the last of
//! which may be partial; an id always has the same predecessor. The format is Mooncake's.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use kvasir_proto::BlockKey;
use serde::Deserialize;

/// No line of a sane trace is longer.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot read the trace")]
    Read(#[from] io::Error),
    #[error("cannot decompress the trace with zstd: {0}")]
    Zstd(String),
    #[error(
        "line {line} of the trace is not a request; write one JSON object with `timestamp`, `input_length`, `output_length` and `hash_ids`"
    )]
    Line { line: usize, source: serde_json::Error },
    #[error(
        "line {line}: block {id} follows a different block than before; an id must stand for a block and the whole \
         prompt before it, as a hash of a prefix does"
    )]
    Predecessor { line: usize, id: u64 },
    #[error(
        "line {line} has {got} hash ids for {tokens} tokens in blocks of {block_tokens}; set `block_tokens` of the cluster file to the block size of the trace"
    )]
    Blocks { line: usize, got: usize, tokens: u32, block_tokens: u32 },
    #[error("line {line} of the trace is longer than 16 MiB, the maximum")]
    LongLine { line: usize },
    #[error("the trace is empty; it needs at least one request")]
    Empty,
}

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub arrival_us: u64,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// Of all blocks of the prompt, a partial last one too.
    pub keys: Vec<BlockKey>,
}

/// Requests in the order of their arrival.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Trace {
    pub requests: Vec<Request>,
}

/// A request whose prompt is an earlier one's with its answer, and more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Continuation {
    pub(crate) request: usize,
    /// Of its blocks, those that are full when that answer ends.
    pub(crate) blocks: usize,
}

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// For each request the first one that continues it, where the answer completes a block. A trace does not say who
    /// continues whom: taken for it is who begins with all full blocks of a prompt, of those the latest longest one, and has room for
    /// its answer.
    pub(crate) fn continuations(&self, block_tokens: u32) -> Vec<Option<Continuation>> {
        let full = |tokens: u32| (tokens / block_tokens) as usize;
        let mut found = vec![None; self.requests.len()];
        let mut latest: HashMap<BlockKey, usize> = HashMap::new();
        for (at, request) in self.requests.iter().enumerate() {
            let blocks = &request.keys[..full(request.prompt_tokens).min(request.keys.len())];
            if let Some(before) = blocks.iter().rev().find_map(|key| latest.get(key).copied()) {
                let earlier = &self.requests[before];
                let tokens = earlier.prompt_tokens + earlier.output_tokens;
                let completes = full(tokens) > full(earlier.prompt_tokens);
                if request.prompt_tokens >= tokens && completes && found[before].is_none() {
                    let blocks = full(tokens).min(blocks.len());
                    found[before] = Some(Continuation { request: at, blocks });
                }
            }
            if let Some(last) = blocks.last() {
                latest.insert(*last, at);
            }
        }
        found
    }

    /// Reads a file; one whose name ends in `.zst` is decompressed.
    ///
    /// # Errors
    /// [`TraceError`] when it is not a trace of blocks of `block_tokens`.
    pub fn open(path: &Path, block_tokens: u32) -> Result<Trace, TraceError> {
        let file = BufReader::new(File::open(path)?);
        if path.extension().is_some_and(|extension| extension == "zst") {
            let plain = ruzstd::decoding::StreamingDecoder::new(file)
                .map_err(|error| TraceError::Zstd(error.to_string()))?;
            return Trace::read(BufReader::new(plain), block_tokens);
        }
        Trace::read(file, block_tokens)
    }

    /// Reads lines until the end. Requests that are not in the order of their arrival are sorted.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn read(mut lines: impl BufRead, block_tokens: u32) -> Result<Trace, TraceError> {
        let mut requests = Vec::new();
        // Of each block, the one before it.
        let mut predecessors: HashMap<u64, Option<u64>> = HashMap::new();
        let mut text = Vec::new();
        for line in 1.. {
            text.clear();
            let read = lines.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut text)?;
            if read == 0 {
                break;
            }
            if read as u64 == LINE_BYTES_MAX {
                return Err(TraceError::LongLine { line });
            }
            if text.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let parsed: Line = serde_json::from_slice(&text)
                .map_err(|source| TraceError::Line { line, source })?;
            let (tokens, got) = (parsed.input_length.max(1), parsed.hash_ids.len());
            if got != tokens.div_ceil(block_tokens) as usize {
                return Err(TraceError::Blocks { line, got, tokens, block_tokens });
            }
            let before = std::iter::once(None).chain(parsed.hash_ids.iter().copied().map(Some));
            for (&id, before) in parsed.hash_ids.iter().zip(before) {
                if *predecessors.entry(id).or_insert(before) != before {
                    return Err(TraceError::Predecessor { line, id });
                }
            }
            requests.push(Request {
                arrival_us: parsed.timestamp.saturating_mul(1_000),
                prompt_tokens: tokens,
                output_tokens: parsed.output_length.max(1),
                keys: parsed.hash_ids.iter().map(|id| key(*id)).collect(),
            });
        }
        if requests.is_empty() {
            return Err(TraceError::Empty);
        }
        requests.sort_by_key(|request| request.arrival_us);
        Ok(Trace { requests })
    }

    /// The requests from one share of the trace to another, as 0.5 to 1 for the second half.
    pub fn part(&self, from: f64, until: f64) -> Trace {
        let at = |share: f64| (share.clamp(0.0, 1.0) * self.requests.len() as f64) as usize;
        let requests = self.requests.get(at(from)..at(until)).unwrap_or_default().to_vec();
        Trace { requests }
    }

    /// Arrivals so many times as fast.
    pub fn sped_up(mut self, speed: f64) -> Trace {
        for request in &mut self.requests {
            request.arrival_us = (request.arrival_us as f64 / speed) as u64;
        }
        self
    }

    /// The same requests at the same arrival times, in another order.
    pub fn shuffled(mut self, seed: u64) -> Trace {
        let arrivals: Vec<u64> = self.requests.iter().map(|r| r.arrival_us).collect();
        let mut numbers = 0..;
        self.requests.sort_by_cached_key(|_| mix(seed ^ mix(numbers.next().unwrap_or(0))));
        for (request, arrival_us) in self.requests.iter_mut().zip(arrivals) {
            request.arrival_us = arrival_us;
        }
        self
    }
}

/// Ids are dense numbers; keys are hashes.
fn key(id: u64) -> BlockKey {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&mix(id).to_le_bytes());
    bytes[8..].copy_from_slice(&mix(!id).to_le_bytes());
    BlockKey(bytes)
}

/// SplitMix64.
pub(crate) fn mix(number: u64) -> u64 {
    let mut x = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TWO: &str = r#"{"timestamp": 5, "input_length": 600, "output_length": 2, "hash_ids": [7, 8]}

{"timestamp": 3, "input_length": 1, "output_length": 0, "hash_ids": [7]}"#;

    #[test]
    fn requests_are_sorted_and_equal_ids_are_equal_keys() {
        let trace = Trace::read(TWO.as_bytes(), 512).expect("a trace");
        let [early, late] = &trace.requests[..] else { panic!("two") };
        assert_eq!((early.arrival_us, late.arrival_us), (3_000, 5_000));
        assert_eq!((early.output_tokens, late.output_tokens), (1, 2), "an answer has a token");
        assert_eq!(early.keys[0], late.keys[0]);
        assert_ne!(late.keys[0], late.keys[1]);
    }

    #[test]
    fn who_begins_with_all_of_a_prompt_and_has_room_for_its_answer_continues_it() {
        let line = |prompt: u32, output: u32, ids: &str| {
            format!(
                "{{\"timestamp\":0,\"input_length\":{prompt},\"output_length\":{output},\"hash_ids\":[{ids}]}}\n"
            )
        };
        let text = [
            line(1_100, 600, "1,2,3"),
            // The same beginning, but shorter than with the answer.
            line(1_600, 10, "1,2,4,5"),
            line(2_000, 10, "1,2,6,7"),
            // It continues the one before. That answer completes no block.
            line(2_100, 10, "1,2,6,7,8"),
        ];
        let trace = Trace::read(text.concat().as_bytes(), 512).expect("a trace");
        let first = Continuation { request: 2, blocks: 3 };
        assert_eq!(trace.continuations(512), [Some(first), None, None, None]);
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        let check = |text: &str, want: &str| {
            let error = Trace::read(text.as_bytes(), 512).expect_err("refused").to_string();
            assert!(error.contains(want), "{error}");
        };
        check("", "empty");
        check("\n{}", "line 2");
        let request = |ids: &str| {
            format!(
                "{{\"timestamp\":0,\"input_length\":1024,\"output_length\":1,\"hash_ids\":[{ids}]}}\n"
            )
        };
        check(&(request("1,2") + &request("3,2")), "line 2: block 2");
        check(&request("4,4"), "line 1: block 4");
        check(
            "{\"timestamp\":0,\"input_length\":513,\"output_length\":1,\"hash_ids\":[1]}",
            "1 hash ids",
        );
    }

    #[test]
    fn a_shuffle_keeps_requests_and_arrivals_and_follows_its_seed() {
        let request = |n: u64| Request {
            arrival_us: n,
            prompt_tokens: n as u32 + 1,
            output_tokens: 1,
            keys: vec![key(n)],
        };
        let trace = Trace { requests: (0..100).map(request).collect() };
        let shuffled = trace.clone().shuffled(1);
        assert_eq!(shuffled, trace.clone().shuffled(1));
        assert_ne!(shuffled, trace.clone().shuffled(2));
        let mut lengths: Vec<u32> = shuffled.requests.iter().map(|r| r.prompt_tokens).collect();
        assert_ne!(lengths, (1..=100).collect::<Vec<_>>());
        lengths.sort_unstable();
        assert_eq!(lengths, (1..=100).collect::<Vec<_>>());
        let arrivals = shuffled.requests.iter().map(|r| r.arrival_us);
        assert!(arrivals.eq(0..100));
        assert_eq!(trace.part(0.5, 1.0).requests, trace.requests[50..]);
        assert_eq!(trace.sped_up(2.0).requests[10].arrival_us, 5);
    }
}
