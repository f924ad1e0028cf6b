//! A request as it came in, checked once at the edge: what is wrong is said in a sentence.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;

use kvasir_proto::{CHUNKS_MAX, Namespace, Share, Side, v1};
use tonic::Status;

use crate::config::Role;
use crate::routes::{HOLES_MAX, SpanRequest};
use crate::sampling::Sampling;
use crate::scheduler::answer::AnswerOptions;
use crate::scheduler::sequence::Leg;
use crate::scheduler::{CheckedRequest, ChunkRequest};
use crate::text::{StopStrings, TextOptions};

const STOP_STRINGS_MAX: usize = 64;
const STOP_STRING_BYTES_MAX: usize = 1024;
const STOP_TOKENS_MAX: usize = 1024;
const TOP_LOGPROBS_MAX: u32 = 20;
const REQUEST_ID_BYTES_MAX: usize = 256;

/// What requests are checked against.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub role: Role,
    pub vocab: u32,
    /// The longest prompt plus answer.
    pub context_tokens: u32,
    /// Tokens that end an answer unless they are ignored.
    pub end_tokens: Vec<u32>,
    pub block_tokens: u32,
    /// The model selects the rows that it attends.
    pub selects: bool,
}

impl Limits {
    /// Checks a request. An answer that would exceed the context is cut to it.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT`; `FAILED_PRECONDITION` when this engine does not take such legs.
    pub(crate) fn check(&self, request: v1::GenerateRequest) -> Result<CheckedRequest, Status> {
        let leg = self.leg(request.phase)?;
        let side = if leg == Leg::Decode { Side::Decode } else { Side::Prefill };
        let tx = request.tx.try_into().map_err(|why: kvasir_proto::FieldError| refuse(why))?;
        if request.request_id.len() > REQUEST_ID_BYTES_MAX {
            return Err(refuse(format!("request_id is longer than {REQUEST_ID_BYTES_MAX} bytes")));
        }
        self.check_prompt(&request.prompt)?;
        let params = request.sampling.ok_or_else(|| refuse("`sampling` is missing"))?;
        let answer = self.answer(params, request.prompt.len() as u32)?;
        let namespace = match leg {
            Leg::Prefill => None,
            Leg::Decode | Leg::Whole => {
                Some(Namespace::try_from(request.namespace.as_slice()).map_err(refuse)?)
            }
        };
        let is_plain = request.routed.is_empty() && request.chunks.is_empty();
        if leg != Leg::Whole && !is_plain {
            return Err(refuse("routed blocks and chunks need the phase `full`"));
        }
        let routed = spans(request.routed, None)?;
        let chunks = self.chunks(request.chunks, blocks_of(&routed), request.prompt.len())?;
        self.check_room(&routed, &chunks, request.prompt.len())?;
        Ok(CheckedRequest {
            share: Share { tx, side },
            leg,
            request_id: request.request_id,
            prompt: request.prompt,
            answer,
            namespace,
            priority_delay_us: request.priority_delay_us,
            routed,
            chunks,
        })
    }

    /// Chunks in the order of the prompt, disjoint, and behind `blocks` of it.
    fn chunks(
        &self,
        chunks: Vec<v1::Chunk>,
        blocks: u32,
        prompt_tokens: usize,
    ) -> Result<Vec<ChunkRequest>, Status> {
        if self.selects && !chunks.is_empty() {
            return Err(refuse("a model that selects rows does not support chunks"));
        }
        if chunks.len() > CHUNKS_MAX {
            return Err(refuse(format!("a prompt can have at most {CHUNKS_MAX} chunks")));
        }
        let mut next = u64::from(blocks) * u64::from(self.block_tokens);
        let mut checked = Vec::with_capacity(chunks.len());
        for v1::Chunk { first_position, blocks, routed } in chunks {
            let end = u64::from(first_position) + u64::from(blocks) * u64::from(self.block_tokens);
            if blocks == 0 || first_position == 0 || u64::from(first_position) < next {
                return Err(refuse("chunks are out of order, or one is empty or a prefix"));
            }
            if end >= prompt_tokens as u64 {
                return Err(refuse("at least one token of the prompt must follow its chunks"));
            }
            next = end;
            let routed = spans(routed, Some(0))?;
            if !routed.is_empty() && blocks_of(&routed) != blocks {
                return Err(refuse("a chunk is routed only in part"));
            }
            // Less than a prompt has, which is checked.
            checked.push(ChunkRequest { positions: first_position..end as u32, routed });
        }
        Ok(checked)
    }

    /// At least one token is not elsewhere, and no more parts are than queries have room for.
    fn check_room(
        &self,
        routed: &[SpanRequest],
        chunks: &[ChunkRequest],
        prompt_tokens: usize,
    ) -> Result<(), Status> {
        if u64::from(blocks_of(routed)) * u64::from(self.block_tokens) >= prompt_tokens as u64 {
            return Err(refuse("at least one token of the prompt must not be routed"));
        }
        let elsewhere = chunks.iter().filter(|chunk| !chunk.routed.is_empty()).count();
        if elsewhere + usize::from(!routed.is_empty()) > HOLES_MAX {
            return Err(refuse(format!("a prompt can have at most {HOLES_MAX} routed parts")));
        }
        Ok(())
    }

    fn leg(&self, leg: i32) -> Result<Leg, Status> {
        let leg = match v1::Phase::try_from(leg) {
            Ok(v1::Phase::Prefill) => Leg::Prefill,
            Ok(v1::Phase::Decode) => Leg::Decode,
            Ok(v1::Phase::Full) => Leg::Whole,
            Ok(v1::Phase::Unspecified) | Err(_) => {
                return Err(refuse("`phase` must be prefill, decode or full"));
            }
        };
        let takes = match self.role {
            Role::Both => true,
            Role::Prefill => leg == Leg::Prefill,
            Role::Decode => leg == Leg::Decode,
        };
        if takes {
            return Ok(leg);
        }
        let why =
            format!("an engine with the role {:?} does not accept the phase {leg:?}", self.role);
        Err(Status::failed_precondition(why.to_lowercase()))
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<(), Status> {
        if prompt.is_empty() {
            return Err(refuse("the prompt is empty"));
        }
        let (tokens, context) = (prompt.len(), self.context_tokens);
        if tokens >= context as usize {
            return Err(refuse(format!(
                "the prompt has {tokens} tokens; with at least one generated token it must \
                 fit into {context}"
            )));
        }
        if let Some(token) = prompt.iter().find(|&&token| token >= self.vocab) {
            let vocab = self.vocab;
            return Err(refuse(format!("token {token} is not in the vocabulary of {vocab}")));
        }
        Ok(())
    }

    fn answer(&self, params: v1::SamplingParams, prompt: u32) -> Result<AnswerOptions, Status> {
        if params.max_tokens == 0 {
            return Err(refuse("max_tokens must be at least 1"));
        }
        if params.top_logprobs > TOP_LOGPROBS_MAX {
            return Err(refuse(format!("top_logprobs must be at most {TOP_LOGPROBS_MAX}")));
        }
        check_stops(&params)?;
        let sampling = Sampling {
            temperature: in_range("temperature", params.temperature, 0.0, f32::MAX)?,
            top_p: in_range("top_p", params.top_p, f32::MIN_POSITIVE, 1.0)?,
            top_k: params.top_k,
            seed: params.seed,
            frequency_penalty: finite("frequency_penalty", params.frequency_penalty)?,
            presence_penalty: finite("presence_penalty", params.presence_penalty)?,
        };
        let mut stop_tokens: BTreeSet<u32> = params.stop_token_ids.into_iter().collect();
        if !params.ignore_eos {
            stop_tokens.extend(&self.end_tokens);
        }
        let stop = StopStrings {
            strings: params.stop,
            include_in_output: params.include_stop_str_in_output,
        };
        Ok(AnswerOptions {
            sampling,
            max_tokens: params.max_tokens.min(self.context_tokens - prompt),
            stop_tokens,
            logprobs: params.logprobs.then_some(params.top_logprobs as usize),
            text: TextOptions { stop, keep_special_tokens: params.keep_special_tokens },
        })
    }
}

/// In order and without gaps from this block on, or from wherever the first one begins.
fn spans(spans: Vec<v1::RoutedSpan>, from: Option<u32>) -> Result<Vec<SpanRequest>, Status> {
    let first = spans.first().map_or(0, |span| span.first_block);
    let mut next = from.unwrap_or(first);
    let mut checked = Vec::with_capacity(spans.len());
    for span in spans {
        let v1::RoutedSpan { node_address: node, tx, lease_ms, first_block, blocks } = span;
        let tx = tx.try_into().map_err(|why: kvasir_proto::FieldError| refuse(why))?;
        if first_block != next || blocks == 0 {
            return Err(refuse("routed blocks have a gap, or a span is empty"));
        }
        if lease_ms == 0 || node.is_empty() {
            return Err(refuse("a routed span needs a node and a lease"));
        }
        next = next.checked_add(blocks).ok_or_else(|| refuse("too many routed blocks"))?;
        checked.push(SpanRequest { node, tx, lease_ms, first_block, blocks });
    }
    Ok(checked)
}

/// Up to their end, with what is before them.
fn blocks_of(spans: &[SpanRequest]) -> u32 {
    spans.last().map_or(0, |span| span.first_block + span.blocks)
}

fn check_stops(params: &v1::SamplingParams) -> Result<(), Status> {
    if params.stop.len() > STOP_STRINGS_MAX {
        return Err(refuse(format!("a request can have at most {STOP_STRINGS_MAX} stop strings")));
    }
    if params.stop.iter().any(|text| text.is_empty() || text.len() > STOP_STRING_BYTES_MAX) {
        let max = STOP_STRING_BYTES_MAX;
        return Err(refuse(format!("a stop string must have 1 to {max} bytes")));
    }
    if params.stop_token_ids.len() > STOP_TOKENS_MAX {
        return Err(refuse(format!("a request can have at most {STOP_TOKENS_MAX} stop tokens")));
    }
    Ok(())
}

fn in_range(name: &str, value: f32, min: f32, max: f32) -> Result<f32, Status> {
    if (min..=max).contains(&value) {
        return Ok(value);
    }
    let range = if max == f32::MAX { "at least 0".to_owned() } else { format!("in (0, {max}]") };
    Err(refuse(format!("{name} is {value}; it must be {range}")))
}

fn finite(name: &str, value: f32) -> Result<f32, Status> {
    if value.is_finite() {
        Ok(value)
    } else {
        Err(refuse(format!("{name} must be a finite number")))
    }
}

fn refuse(why: impl ToString) -> Status {
    Status::invalid_argument(why.to_string())
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    fn limits(role: Role) -> Limits {
        let (end_tokens, selects) = (vec![1], false);
        Limits { role, vocab: 100, context_tokens: 32, end_tokens, block_tokens: 8, selects }
    }

    fn request() -> v1::GenerateRequest {
        v1::GenerateRequest {
            tx: Some(v1::TxId { conductor_incarnation: 1, serial: 2 }),
            phase: v1::Phase::Full.into(),
            request_id: "r".into(),
            prompt: vec![5; 20],
            sampling: Some(v1::SamplingParams {
                top_p: 1.0,
                max_tokens: 8,
                ..v1::SamplingParams::default()
            }),
            namespace: vec![0; 16],
            priority_delay_us: 0,
            routed: Vec::new(),
            chunks: Vec::new(),
        }
    }

    fn check(change: impl FnOnce(&mut v1::GenerateRequest)) -> Result<CheckedRequest, String> {
        let mut request = request();
        change(&mut request);
        limits(Role::Both).check(request).map_err(|status| {
            assert_eq!(status.code(), Code::InvalidArgument);
            status.message().to_owned()
        })
    }

    fn check_sampling(
        change: impl FnOnce(&mut v1::SamplingParams),
    ) -> Result<CheckedRequest, String> {
        check(|request| change(request.sampling.as_mut().expect("set above")))
    }

    fn span(first_block: u32, blocks: u32) -> v1::RoutedSpan {
        let tx = Some(v1::TxId { conductor_incarnation: 1, serial: 3 });
        v1::RoutedSpan { node_address: "n:1".into(), tx, lease_ms: 100, first_block, blocks }
    }

    #[test]
    fn routed_blocks_follow_one_another_up_to_the_last_token() {
        let routed = check(|r| r.routed = vec![span(0, 1), span(1, 1)]).expect("taken").routed;
        let places: Vec<(u32, u32)> = routed.iter().map(|s| (s.first_block, s.blocks)).collect();
        assert_eq!(places, [(0, 1), (1, 1)]);
        // What is before them is here.
        let later = |r: &mut v1::GenerateRequest| {
            (r.prompt, r.routed) = (vec![5; 27], vec![span(1, 1), span(2, 1)]);
        };
        let places = check(later).expect("taken").places(8).into_iter();
        let places: Vec<_> = places.map(|p| (p.positions, p.moved, p.elsewhere)).collect();
        assert_eq!(places, [(8..24, 0, true)]);
    }

    fn chunk(first_position: u32, blocks: u32) -> v1::Chunk {
        v1::Chunk { first_position, blocks, routed: Vec::new() }
    }

    #[test]
    fn chunks_follow_one_another_anywhere_behind_what_is_routed() {
        let checked = check(|r| {
            r.prompt = vec![5; 27];
            r.routed = vec![span(0, 1)];
            r.chunks = vec![chunk(9, 1), v1::Chunk { routed: vec![span(0, 1)], ..chunk(18, 1) }];
        });
        let mut checked = checked.expect("taken");
        let places: Vec<_> =
            checked.places(8).into_iter().map(|p| (p.positions, p.elsewhere)).collect();
        assert_eq!(places, [(0..8, true), (9..17, false), (18..26, true)]);
        assert_eq!(checked.take_routed().len(), 2);
    }

    #[test]
    fn what_is_wrong_of_chunks_is_said() {
        let wrong = |change: &dyn Fn(&mut v1::GenerateRequest), part: &str| {
            let why = check(change).expect_err("refused");
            assert!(why.contains(part), "{why:?} does not say {part:?}");
        };
        wrong(&|r| r.chunks = vec![chunk(0, 1)], "a prefix");
        wrong(&|r| r.chunks = vec![chunk(3, 0)], "empty");
        wrong(&|r| r.chunks = vec![chunk(10, 1), chunk(1, 1)], "order");
        wrong(&|r| r.chunks = vec![chunk(1, 1), chunk(8, 1)], "order");
        wrong(&|r| (r.routed, r.chunks) = (vec![span(0, 1)], vec![chunk(7, 1)]), "order");
        wrong(&|r| r.chunks = vec![chunk(4, 2)], "must follow");
        wrong(&|r| r.chunks = vec![chunk(u32::MAX, u32::MAX)], "must follow");
        wrong(
            &|r| (r.phase, r.chunks) = (v1::Phase::Decode.into(), vec![chunk(1, 1)]),
            "phase `full`",
        );
        let half = v1::Chunk { routed: vec![span(0, 1)], ..chunk(1, 2) };
        wrong(&move |r| r.chunks = vec![half.clone()], "only in part");
        let rest = v1::Chunk { routed: vec![span(1, 1)], ..chunk(1, 2) };
        let without_its_beginning = move |r: &mut v1::GenerateRequest| {
            (r.prompt, r.chunks) = (vec![5; 27], vec![rest.clone()]);
        };
        wrong(&without_its_beginning, "gap");
        let many = |r: &mut v1::GenerateRequest| {
            r.prompt = vec![5; 31];
            let one = |at| v1::Chunk { routed: vec![span(0, 1)], ..chunk(at, 1) };
            r.chunks = [1, 9, 17].map(one).to_vec();
        };
        assert!(check(many).is_ok());
        wrong(
            &|r| r.chunks = vec![chunk(1, 1); CHUNKS_MAX + 1],
            &format!("at most {CHUNKS_MAX} chunks"),
        );
        let chosen = v1::GenerateRequest { chunks: vec![chunk(1, 1)], ..request() };
        assert!(limits(Role::Both).check(chosen.clone()).is_ok());
        let selects = Limits { selects: true, ..limits(Role::Both) };
        let why = selects.check(chosen).expect_err("never under selection");
        assert!(why.message().contains("selects"), "{why}");
    }

    #[test]
    fn what_is_wrong_is_said() {
        let wrong = |answer: Result<CheckedRequest, String>, part: &str| {
            let why = answer.expect_err("refused");
            assert!(why.contains(part), "{why:?} does not say {part:?}");
        };
        wrong(check(|r| r.tx = None), "`tx`");
        wrong(check(|r| r.phase = 0), "`phase`");
        wrong(check(|r| r.phase = 9), "`phase`");
        wrong(check(|r| r.prompt.clear()), "empty");
        wrong(check(|r| r.prompt = vec![5; 32]), "32 tokens");
        wrong(check(|r| r.prompt[3] = 100), "token 100");
        wrong(check(|r| r.sampling = None), "`sampling`");
        wrong(check(|r| r.namespace.clear()), "namespace");
        wrong(check(|r| r.routed = vec![span(0, 1), span(2, 1)]), "gap");
        wrong(check(|r| r.routed = vec![span(1, 1), span(1, 1)]), "gap");
        wrong(check(|r| r.routed = vec![span(1, u32::MAX)]), "too many");
        wrong(check(|r| r.routed = vec![span(0, 0)]), "gap");
        wrong(check(|r| r.routed = vec![span(0, 3)]), "must not be routed");
        wrong(
            check(|r| (r.prompt, r.routed) = (vec![5; 16], vec![span(1, 1)])),
            "must not be routed",
        );
        wrong(
            check(|r| (r.prompt, r.routed) = (vec![5; 16], vec![span(0, 2)])),
            "must not be routed",
        );
        wrong(check(|r| r.routed = vec![v1::RoutedSpan { tx: None, ..span(0, 1) }]), "`tx`");
        wrong(check(|r| r.routed = vec![v1::RoutedSpan { lease_ms: 0, ..span(0, 1) }]), "lease");
        wrong(
            check(|r| (r.phase, r.routed) = (v1::Phase::Decode.into(), vec![span(0, 1)])),
            "phase `full`",
        );
        wrong(check(|r| r.request_id = "x".repeat(257)), "request_id");
        wrong(check_sampling(|s| s.max_tokens = 0), "max_tokens");
        wrong(check_sampling(|s| s.temperature = -1.0), "temperature");
        wrong(check_sampling(|s| s.temperature = f32::NAN), "temperature");
        wrong(check_sampling(|s| s.temperature = f32::INFINITY), "temperature");
        wrong(check_sampling(|s| s.top_p = 0.0), "top_p");
        wrong(check_sampling(|s| s.top_p = 1.1), "top_p");
        wrong(check_sampling(|s| s.presence_penalty = f32::NAN), "presence_penalty");
        wrong(check_sampling(|s| s.frequency_penalty = f32::INFINITY), "frequency_penalty");
        wrong(check_sampling(|s| s.stop = vec![String::new()]), "stop string");
        wrong(check_sampling(|s| s.stop = vec!["x".repeat(1025)]), "stop string");
        wrong(check_sampling(|s| s.stop = vec!["x".into(); 65]), "stop strings");
        wrong(check_sampling(|s| s.stop_token_ids = vec![0; 1025]), "stop tokens");
        wrong(check_sampling(|s| s.top_logprobs = 21), "top_logprobs");
    }

    #[test]
    fn an_answer_is_cut_to_the_context() {
        let max_tokens = |r: Result<CheckedRequest, String>| r.expect("taken").answer.max_tokens;
        assert_eq!(max_tokens(check(|_| ())), 8);
        assert_eq!(max_tokens(check_sampling(|s| s.max_tokens = u32::MAX)), 12);
        assert_eq!(max_tokens(check(|r| r.prompt = vec![5; 31])), 1);
    }

    #[test]
    fn the_model_s_end_tokens_end_an_answer_unless_they_are_ignored() {
        let stops = |r: Result<CheckedRequest, String>| r.expect("taken").answer.stop_tokens;
        let with = stops(check_sampling(|s| s.stop_token_ids = vec![7]));
        assert!(with.contains(&1) && with.contains(&7));
        let without = stops(check_sampling(|s| {
            s.stop_token_ids = vec![7];
            s.ignore_eos = true;
        }));
        assert!(!without.contains(&1) && without.contains(&7));
    }

    #[test]
    fn an_engine_takes_the_legs_of_its_role_only() {
        for (role, taken) in [
            (Role::Both, &[v1::Phase::Prefill, v1::Phase::Decode, v1::Phase::Full][..]),
            (Role::Prefill, &[v1::Phase::Prefill]),
            (Role::Decode, &[v1::Phase::Decode]),
        ] {
            for leg in [v1::Phase::Prefill, v1::Phase::Decode, v1::Phase::Full] {
                let request = v1::GenerateRequest { phase: leg.into(), ..request() };
                match limits(role).check(request) {
                    Ok(checked) => {
                        assert!(taken.contains(&leg), "{role:?} {leg:?}");
                        let side =
                            if leg == v1::Phase::Decode { Side::Decode } else { Side::Prefill };
                        assert_eq!(checked.share.side, side);
                    }
                    Err(status) => {
                        assert!(!taken.contains(&leg), "{role:?} {leg:?}");
                        assert_eq!(status.code(), Code::FailedPrecondition);
                    }
                }
            }
        }
    }
}
