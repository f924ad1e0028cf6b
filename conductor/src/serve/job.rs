//! What is to be served, and what comes out of it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvasir_placement::attend::Way;
use kvasir_placement::{Objectives, Steering};
use kvasir_proto::{BlockKey, InstanceId, Namespace, NodeId, keys, v1};
use tokio::time::Instant;

use super::class::CacheClass;
use super::line::Claim;
use crate::access::Admission;
use crate::cluster::{PrefillTime, QueriedChunk, ServedModel};
use crate::http::Trace;

/// A prompt with the keys of its blocks; made once, shared by its choices and attempts.
#[derive(Debug, Clone)]
pub(crate) struct Prompt {
    pub tokens: Arc<[u32]>,
    salt: Arc<str>,
    namespace: Namespace,
    block_tokens: u32,
    keys: Arc<[BlockKey]>,
    /// Parts that the client named, and what of each is used as if it stood alone: its whole blocks, as long as a
    /// token of the prompt follows.
    named: Arc<[Range<u32>]>,
    chunks: Arc<[QueriedChunk]>,
}

impl Prompt {
    /// Hashes the blocks: about a microsecond for each.
    pub(crate) fn new(
        tokens: Arc<[u32]>,
        named: Arc<[Range<u32>]>,
        model: &ServedModel,
        salt: Arc<str>,
    ) -> Prompt {
        let (namespace, block_tokens) = (model.namespace(&salt), model.block_tokens);
        let used: Vec<Range<u32>> =
            named.iter().filter_map(|named| used(named, tokens.len(), block_tokens)).collect();
        let size = block_tokens as usize;
        let chunk = |chunk: &Range<u32>| QueriedChunk {
            first_position: chunk.start,
            keys: {
                let alone = &tokens[chunk.start as usize..chunk.end as usize];
                keys::chain(namespace, alone, size).into()
            },
        };
        let chunks = used.iter().map(chunk).collect();
        // What is behind a chunk is not what a prompt has there that is computed whole.
        let keys = keys::chain_with_chunks(namespace, &tokens, size, &used).into();
        Prompt { tokens, salt, namespace, block_tokens, keys, named, chunks }
    }

    /// Parts that are used as if each stood alone.
    pub(crate) fn chunks(&self) -> &[QueriedChunk] {
        &self.chunks
    }

    /// The keys in the model's namespace as it is now: it may have been replaced since.
    pub(crate) fn keyed(&self, model: &ServedModel) -> Prompt {
        let namespace = model.namespace(&self.salt);
        if self.namespace == namespace && self.block_tokens == model.block_tokens {
            return self.clone();
        }
        let (tokens, named) = (Arc::clone(&self.tokens), Arc::clone(&self.named));
        Prompt::new(tokens, named, model, Arc::clone(&self.salt))
    }

    pub(crate) fn keys(&self) -> &Arc<[BlockKey]> {
        &self.keys
    }

    pub(crate) fn namespace(&self) -> Namespace {
        self.namespace
    }

    pub(crate) fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Prompts longer than this are refused before they are made.
    pub(crate) fn length(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap_or(u32::MAX)
    }
}

/// What of a part that was named is used; nothing of one that begins the prompt, whose rows are those of any
/// prompt that begins so.
fn used(named: &Range<u32>, prompt_tokens: usize, block_tokens: u32) -> Option<Range<u32>> {
    let last = u32::try_from(prompt_tokens).unwrap_or(u32::MAX).saturating_sub(1);
    let tokens = named.end.min(last).saturating_sub(named.start);
    let whole = tokens / block_tokens.max(1) * block_tokens;
    (named.start > 0 && whole > 0).then(|| named.start..named.start + whole)
}

/// Counts the tokens of one answer for its tenant, where there are tenants. While it is there the
/// tenant's request runs.
#[derive(Debug)]
pub(crate) struct Meter {
    admission: Option<Arc<Admission>>,
    tokens: AtomicU64,
}

impl Meter {
    pub(crate) fn new(admission: Option<Arc<Admission>>) -> Meter {
        Meter { admission, tokens: AtomicU64::new(0) }
    }

    pub(crate) fn came(&self, tokens: usize) {
        if let Some(admission) = &self.admission {
            self.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
            admission.spend(tokens as u64);
        }
    }

    /// What came before is void, and not the tenant's doing.
    pub(crate) fn begins_anew(&self) {
        if let Some(admission) = &self.admission {
            admission.give_back(self.tokens.swap(0, Ordering::Relaxed));
        }
    }
}

/// One answer to make.
#[derive(Debug)]
pub(crate) struct Job {
    pub model: Arc<str>,
    pub prompt: Prompt,
    pub sampling: v1::SamplingParams,
    pub request_id: Arc<str>,
    /// What comes is sent on at once, so that an answer that has begun cannot be begun again.
    pub streamed: bool,
    /// The client wants to know why it went where it went.
    pub explain: bool,
    pub objectives: Objectives,
    pub steering: Steered,
    /// What becomes of its blocks when it is over.
    pub cache: CacheClass,
    /// Its blocks are to lie together: none of its prefix stays on another node.
    pub lies_together: bool,
    pub trace: Option<Trace>,
    pub meter: Meter,
    /// Absent where nobody waits for a turn.
    pub claim: Option<Claim>,
    pub arrived: Instant,
    pub deadline: Instant,
}

impl Job {
    /// Nothing ends its answer before `max_tokens`.
    pub(crate) fn is_endless(&self) -> bool {
        let v1::SamplingParams { ignore_eos, stop, stop_token_ids, .. } = &self.sampling;
        *ignore_eos && stop.is_empty() && stop_token_ids.is_empty()
    }
}

/// What a request says of its own place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Steered {
    pub instance: Option<InstanceId>,
    pub prefix: Option<Way>,
}

impl Steered {
    pub(crate) fn borrow(&self) -> Steering<'_> {
        Steering { instance: self.instance.as_ref(), prefix: self.prefix }
    }
}

/// What happens to an answer. `Ended` and `Failed` come once and last; `Anew` only when the job is
/// not streamed.
#[derive(Debug)]
pub(crate) enum Progress {
    /// Where an attempt goes and why; only when it is asked for.
    Placed(String),
    Tokens(v1::Tokens),
    /// All that came before is void: it comes once more, from another attempt.
    Anew,
    Ended {
        /// Text that was still held back.
        text: String,
        ended: Ended,
    },
    Failed(super::Failure),
}

/// How an answer ended.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ended {
    pub reason: FinishReason,
    pub stop_matched: Option<String>,
    /// Tokens of the prompt that were not computed for it.
    pub cached_tokens: u32,
    pub generated_tokens: u32,
    /// Between its tokens: the mean of the longest tenth of the intervals. Absent where there was none.
    pub tbt_us: Option<u64>,
    /// Absent where its engine did not say.
    pub prefill: Option<PrefillTime>,
    /// The nodes that had the prompt's blocks at its end: of the prefill, then of the decode.
    pub lies_at: Vec<NodeId>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum FinishReason {
    #[default]
    Stop,
    Length,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_part_that_is_named_whole_blocks_are_used_and_a_token_follows() {
        for (named, prompt_tokens, want) in [
            (10..74, 100, Some(10..74)),
            (10..80, 100, Some(10..74)),
            (10..73, 100, None),
            (10..74, 74, None),
            (10..140, 138, Some(10..74)),
            (10..140, 200, Some(10..138)),
            (0..128, 200, None),
            (1..u32::MAX, 200, Some(1..193)),
        ] {
            assert_eq!(used(&named, prompt_tokens, 64), want, "{named:?} of {prompt_tokens}");
        }
    }
}
