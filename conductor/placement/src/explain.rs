//! A decision explained. As text: every candidate with its cost terms and the reason, one line each,
//! for logs, a response header on request, and golden tests. As values, for whoever shows them.

use std::fmt;

use kvasir_proto::{InstanceId, NodeId};
use serde::Serialize;

use crate::attend::Price;
use crate::chunks::PlacedChunk;
use crate::decision::{
    Considered, DecodeCandidate, Placement, PrefillCandidate, Refusal, Refused, Shape, Verdict,
};
use crate::routing::{Attended, RoutePart};
use crate::selection::Selection;

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.considered)?;
        if let Some(asked) = &self.attended {
            match asked.first_block {
                0 => write!(f, "prefix of {} blocks on ", asked.blocks())?,
                first => write!(f, "blocks [{first}, {}) on ", asked.end_block())?,
            }
            for (at, part) in asked.parts.iter().enumerate() {
                let (_, node) = self.considered.name(part.source);
                write!(f, "{}{node}", if at > 0 { ", " } else { "" })?;
            }
            writeln!(f, "\n{}", asked.decision)?;
        }
        for chunk in &self.chunks {
            let PlacedChunk { first_position, blocks, .. } = chunk;
            write!(f, "chunk of {blocks} blocks at {first_position}: {}", chunk.way())?;
            if let Some(source) = chunk.source() {
                write!(f, ", {} has it", source.node_id)?;
            }
            writeln!(f)?;
            if let Some(decision) = &chunk.decision {
                writeln!(f, "{decision}")?;
            }
        }
        match &self.shape {
            Shape::Whole(chosen) => write!(f, "full on {}", chosen.instance_id)?,
            Shape::Split { prefill, decode } => {
                write!(f, "split {} -> {}", prefill.instance_id, decode.instance_id)?;
            }
        }
        if let Some(fetch) = &self.fetch {
            let (from, until) = (fetch.from_block, fetch.until_block);
            write!(f, ", fetch [{from}, {until}) from {}", fetch.source.node_id)?;
        }
        let mut from = self.route.as_ref().map_or(0, |route| route.first_block);
        for RoutePart { source, blocks, .. } in self.route.iter().flat_map(|route| &route.parts) {
            write!(f, ", [{from}, {}) stay on {}", from + blocks, source.node_id)?;
            from += blocks;
        }
        let (ttft, tbt) = (self.predicted_ttft_us, self.predicted_tbt_us);
        write!(f, ", first token in {ttft} us, then every {tbt} us")?;
        f.write_str(if self.probe { ", a probe: not within the objectives" } else { "" })
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}refused: {}", self.considered, self.refusal)
    }
}

/// A line each.
impl fmt::Display for Considered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "prompt of {} tokens in {} blocks", self.prompt_tokens, self.prompt_blocks)?;
        self.prefill_candidates.iter().try_for_each(|candidate| self.prefill_line(f, candidate))?;
        self.decode_candidates.iter().try_for_each(|candidate| self.decode_line(f, candidate))
    }
}

impl Considered {
    /// An instance and its node.
    fn name(&self, at: u32) -> &(InstanceId, NodeId) {
        &self.names.rows[at as usize]
    }

    fn prefill_line(
        &self,
        f: &mut fmt::Formatter<'_>,
        candidate: &PrefillCandidate,
    ) -> fmt::Result {
        let (instance, node) = self.name(candidate.at);
        write!(f, "prefill {instance}@{node}: cached {}", candidate.cached_blocks)?;
        if let Some(source) = candidate.fetch_from {
            let (_, source) = self.name(source);
            write!(f, ", fetch to {} from {source}", candidate.used_blocks)?;
        }
        let PrefillCandidate { queue_us, transfer_us, compute_us, ttft_us, cost_us, .. } =
            candidate;
        match self.selection {
            Selection::KvcacheCentric => write!(f, ", queue {queue_us} + transfer {transfer_us}")?,
            _ => write!(f, ", max(queue {queue_us}, transfer {transfer_us})")?,
        }
        write!(f, " + compute {compute_us} = {ttft_us} us")?;
        if cost_us != ttft_us {
            write!(f, ", cost {cost_us}")?;
        }
        writeln!(f, ": {}", candidate.verdict)
    }

    fn decode_line(&self, f: &mut fmt::Formatter<'_>, candidate: &DecodeCandidate) -> fmt::Result {
        let (instance, node) = self.name(candidate.at);
        writeln!(
            f,
            "decode {instance}@{node}: cached {}, load {:.2}, wait {} us, step {} us{}: {}",
            candidate.cached_blocks,
            candidate.load,
            candidate.wait_us,
            candidate.tbt_us,
            candidate.likely.map_or(String::new(), |likely| format!(" (attainment {likely:.2})")),
            candidate.verdict
        )
    }

    fn explain_prefills(&self) -> Vec<PrefillExplanation> {
        let explain = |candidate: &PrefillCandidate| {
            let (instance, node) = self.name(candidate.at);
            PrefillExplanation {
                instance: instance.to_string(),
                node: node.to_string(),
                cached_blocks: candidate.cached_blocks,
                used_blocks: candidate.used_blocks,
                fetch_from: candidate.fetch_from.map(|source| self.name(source).1.to_string()),
                queue_us: candidate.queue_us,
                transfer_us: candidate.transfer_us,
                compute_us: candidate.compute_us,
                ttft_us: candidate.ttft_us,
                cost_us: candidate.cost_us,
                verdict: candidate.verdict,
            }
        };
        self.prefill_candidates.iter().map(explain).collect()
    }

    fn explain_decodes(&self) -> Vec<DecodeExplanation> {
        let explain = |candidate: &DecodeCandidate| {
            let (instance, node) = self.name(candidate.at);
            DecodeExplanation {
                instance: instance.to_string(),
                node: node.to_string(),
                cached_blocks: candidate.cached_blocks,
                load: candidate.load,
                wait_us: candidate.wait_us,
                tbt_us: candidate.tbt_us,
                attainment_probability: candidate.likely,
                verdict: candidate.verdict,
            }
        };
        self.decode_candidates.iter().map(explain).collect()
    }
}

/// A [`Placement`] as values. Times are in microseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Explanation {
    pub prompt_tokens: u32,
    /// The last block may be incomplete.
    pub prompt_blocks: u32,
    /// Tokens of the prompt that are reused: cached at the prefill side, fetched, or attended elsewhere.
    pub reused_tokens: u32,
    pub compute_tokens: u32,
    /// The instance that computes the prompt.
    pub prefill: String,
    /// The instance that decodes, if it is another one.
    pub decode: Option<String>,
    pub fetch: Option<FetchExplanation>,
    /// The decision about a prefix on another node.
    pub prefix: Option<PrefixExplanation>,
    /// The decisions about the request's reusable chunks.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chunks: Vec<ChunkExplanation>,
    pub queue_us: u64,
    pub transfer_us: u64,
    pub compute_us: u64,
    pub decode_wait_us: u64,
    pub predicted_ttft_us: u64,
    pub predicted_tbt_us: u64,
    /// The request misses an objective by estimates alone: no queue, running answer or other
    /// transfer causes the miss. It is placed on an idle engine, so that the estimates are corrected.
    pub probe: bool,
    /// The use of cached blocks, in a sentence.
    pub cache_summary: String,
    pub prefill_candidates: Vec<PrefillExplanation>,
    pub decode_candidates: Vec<DecodeExplanation>,
}

/// Blocks `[from_block, until_block)` that are fetched from another node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FetchExplanation {
    pub from: String,
    pub from_block: u32,
    pub until_block: u32,
    pub bytes: u64,
}

/// Blocks of a prefix that could stay on other nodes and be attended there.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PrefixExplanation {
    /// Each node would attend a part of the prefix, in this order.
    pub nodes: Vec<String>,
    /// Earlier blocks are cached at the prefill side.
    pub first_block: u32,
    pub blocks: u32,
    /// `route`, `fetch` or `recompute`; absent if no action was available.
    pub action: Option<String>,
    pub actions: Vec<ActionExplanation>,
}

/// A reusable chunk of a prompt.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ChunkExplanation {
    pub first_position: u32,
    pub blocks: u32,
    /// `local`, `fetch`, `route` or `recompute`.
    pub action: String,
    /// The other node that holds it.
    pub node: Option<String>,
    /// The alternatives, if there was a choice.
    pub actions: Vec<ActionExplanation>,
}

/// The predicted cost of one action for a prefix or a chunk.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ActionExplanation {
    pub action: String,
    /// Before the first step, in each step, and over all steps.
    pub setup_us: f64,
    pub step_us: f64,
    pub total_us: f64,
    pub transferred_bytes: u64,
    /// The reason why the action was not available.
    pub unavailable_reason: Option<String>,
}

/// The predicted cost of one instance as the prefill side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PrefillExplanation {
    pub instance: String,
    pub node: String,
    pub cached_blocks: u32,
    /// Cached, or cached and fetched.
    pub used_blocks: u32,
    /// The node that the instance would fetch from.
    pub fetch_from: Option<String>,
    pub queue_us: u64,
    pub transfer_us: u64,
    pub compute_us: u64,
    pub ttft_us: u64,
    /// The cost that the policy compares.
    pub cost_us: u64,
    pub verdict: Verdict,
}

/// The predictions for one instance as the decode side.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecodeExplanation {
    pub instance: String,
    pub node: String,
    pub cached_blocks: u32,
    /// Sequences divided by the largest number that it decodes at once.
    pub load: f64,
    pub wait_us: u64,
    pub tbt_us: u64,
    /// Probability that the request meets its objective between tokens, once it is learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attainment_probability: Option<f64>,
    pub verdict: Verdict,
}

/// A [`Refused`] as values.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RefusalExplanation {
    pub prompt_tokens: u32,
    pub prompt_blocks: u32,
    /// `ttft`, `tbt`, `no_capacity`, `no_instance`, `unknown_model` or `too_long`.
    pub reason: &'static str,
    /// The reason in a sentence.
    pub message: String,
    /// Prediction for the best pair, if the refusal is temporary.
    pub predicted_ttft_us: Option<u64>,
    /// Time after which a retry is useful.
    pub retry_after_ms: Option<u64>,
    pub prefill_candidates: Vec<PrefillExplanation>,
    pub decode_candidates: Vec<DecodeExplanation>,
}

impl Refused {
    /// The refusal as values.
    pub fn explain(&self) -> RefusalExplanation {
        let now = match self.refusal {
            Refusal::Overloaded { predicted_ttft_us, retry_after_ms, .. } => {
                Some((predicted_ttft_us, retry_after_ms))
            }
            _ => None,
        };
        RefusalExplanation {
            prompt_tokens: self.considered.prompt_tokens,
            prompt_blocks: self.considered.prompt_blocks,
            reason: self.refusal.label(),
            message: self.refusal.to_string(),
            predicted_ttft_us: now.map(|(predicted_ttft_us, _)| predicted_ttft_us),
            retry_after_ms: now.map(|(_, retry_after_ms)| retry_after_ms),
            prefill_candidates: self.considered.explain_prefills(),
            decode_candidates: self.considered.explain_decodes(),
        }
    }
}

impl Placement {
    /// The decision as values.
    pub fn explain(&self) -> Explanation {
        Explanation {
            prompt_tokens: self.considered.prompt_tokens,
            prompt_blocks: self.considered.prompt_blocks,
            reused_tokens: self.reused_tokens,
            compute_tokens: self.compute_tokens,
            prefill: self.prefill().instance_id.to_string(),
            decode: (!self.is_whole()).then(|| self.decode().instance_id.to_string()),
            fetch: self.fetch.as_ref().map(|fetch| FetchExplanation {
                from: fetch.source.node_id.to_string(),
                from_block: fetch.from_block,
                until_block: fetch.until_block,
                bytes: fetch.bytes,
            }),
            prefix: self.attended.as_ref().map(|asked| self.prefix(asked)),
            chunks: self.chunks.iter().map(explain_chunk).collect(),
            queue_us: self.queue_us,
            transfer_us: self.transfer_us,
            compute_us: self.compute_us,
            decode_wait_us: self.decode_wait_us,
            predicted_ttft_us: self.predicted_ttft_us,
            predicted_tbt_us: self.predicted_tbt_us,
            probe: self.probe,
            cache_summary: self.cache_sentence(),
            prefill_candidates: self.considered.explain_prefills(),
            decode_candidates: self.considered.explain_decodes(),
        }
    }

    fn prefix(&self, asked: &Attended) -> PrefixExplanation {
        PrefixExplanation {
            nodes: (asked.parts.iter())
                .map(|part| self.considered.name(part.source).1.to_string())
                .collect(),
            first_block: asked.first_block,
            blocks: asked.blocks(),
            action: asked.decision.chosen.map(|way| way.to_string()),
            actions: asked.decision.prices.iter().map(explain_way).collect(),
        }
    }

    /// The number of cached blocks that the decision uses, and the reason if a node holds more.
    fn cache_sentence(&self) -> String {
        let considered = &self.considered;
        let blocks = considered.prompt_blocks;
        let chosen = self.prefill();
        if let Some(route) = &self.route {
            let nodes: Vec<&str> = route.parts.iter().map(|part| &*part.source.node_id.0).collect();
            let (routed, nodes) = (route.blocks(), nodes.join(", "));
            let before = match route.first_block {
                0 => format!("{routed} of {blocks} blocks"),
                first => format!("{first} of {blocks} blocks are local, and {routed}"),
            };
            return format!("{before} stay on {nodes}, which attend them");
        }
        let held = if self.leaves_ssd { chosen.memory_blocks } else { chosen.cached_blocks };
        let used = self.fetch.as_ref().map_or(held, |fetch| fetch.until_block);
        let prefill = considered.prefill_candidates.iter().map(|c| (c.cached_blocks, c.at));
        let decode = considered.decode_candidates.iter().map(|c| (c.cached_blocks, c.at));
        let Some((most, at)) = prefill.chain(decode).max_by_key(|(held, _)| *held) else {
            return format!("{used} of {blocks} blocks are reused");
        };
        let (instance, node) = considered.name(at);
        if most == 0 && used == 0 {
            return format!(
                "no node holds any of its {blocks} blocks (only whole blocks are cached)"
            );
        }
        if used >= most {
            let source = match &self.fetch {
                Some(fetch) => format!("some are fetched from {}", fetch.source.node_id),
                None => format!("cached at {}", chosen.node_id),
            };
            return format!("{used} of {blocks} blocks are reused, {source}; no node holds more");
        }
        let own = considered.prefill_candidates.iter().find(|candidate| candidate.at == at);
        let why = match own.map(|candidate| candidate.verdict) {
            None => {
                format!(
                    "{instance} is not a prefill instance, and a fetch costs more than recomputing"
                )
            }
            Some(Verdict::HigherCost) => {
                format!("a prefill on {instance} costs more, and so does a fetch")
            }
            Some(Verdict::Chosen) if !self.leaves_ssd => {
                "the last token is always computed, to get the first token of the answer".to_owned()
            }
            Some(Verdict::Chosen) => {
                format!(
                    "reading the others from the SSD of {node} costs more than recomputing them"
                )
            }
            Some(verdict) => {
                format!("{instance}: {verdict}; a fetch costs more than recomputing")
            }
        };
        format!("{used} of {blocks} blocks are reused, and {node} holds {most}: {why}")
    }
}

fn explain_way(price: &Price) -> ActionExplanation {
    ActionExplanation {
        action: price.way.to_string(),
        setup_us: price.once_us,
        step_us: price.step_us,
        total_us: price.total_us,
        transferred_bytes: price.moved_bytes,
        unavailable_reason: price.closed.map(|closed| closed.to_string()),
    }
}

fn explain_chunk(chunk: &PlacedChunk) -> ChunkExplanation {
    let prices = chunk.decision.iter().flat_map(|decision| &decision.prices);
    ChunkExplanation {
        first_position: chunk.first_position,
        blocks: chunk.blocks,
        action: chunk.way().to_owned(),
        node: chunk.source().map(|source| source.node_id.to_string()),
        actions: prices.map(explain_way).collect(),
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Chosen => "chosen",
            Verdict::HigherCost => "higher cost",
            Verdict::MissesTtft => "misses the TTFT objective",
            Verdict::MissesTbt => "misses the TBT objective",
            Verdict::NoCapacity => "no capacity",
            Verdict::Excluded => "failed this request",
            Verdict::NotRequested => "another instance was requested",
            Verdict::Unhealthy => "unhealthy",
            Verdict::RoutedOnly => "capacity for a routed prompt only",
            Verdict::CapacityUnknown => "idle, capacity not reported yet",
            Verdict::Draining => "draining",
            Verdict::NotFull => "reusable chunks need an instance with both roles",
            Verdict::NoDecode => "no decode instance",
            Verdict::NoPrefill => "no prefill instance in time",
        })
    }
}
