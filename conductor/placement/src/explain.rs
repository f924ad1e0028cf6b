//! A decision as text: every candidate with its cost terms and the reason, one line each. Used in
//! logs, in a response header on request, and in golden tests.

use std::fmt;

use crate::decision::{DecodeCandidate, Placement, PrefillCandidate, Shape, Verdict};
use crate::selection::Selection;

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "prompt of {} tokens in {} blocks", self.prompt_tokens, self.prompt_blocks)?;
        self.prefill_candidates.iter().try_for_each(|candidate| self.prefill_line(f, candidate))?;
        self.decode_candidates.iter().try_for_each(|candidate| self.decode_line(f, candidate))?;
        match &self.shape {
            Shape::Whole(chosen) => write!(f, "whole on {}", chosen.instance_id)?,
            Shape::Split { prefill, decode } => {
                write!(f, "split {} -> {}", prefill.instance_id, decode.instance_id)?;
            }
        }
        if let Some(fetch) = &self.fetch {
            let (from, until) = (fetch.from_block, fetch.until_block);
            write!(f, ", fetch [{from}, {until}) from {}", fetch.source.node_id)?;
        }
        let (ttft, tbt) = (self.predicted_ttft_us, self.predicted_tbt_us);
        write!(f, ", first token in {ttft} us, then every {tbt} us")?;
        f.write_str(if self.probe { ", a probe: not within the objectives" } else { "" })
    }
}

impl Placement {
    fn prefill_line(
        &self,
        f: &mut fmt::Formatter<'_>,
        candidate: &PrefillCandidate,
    ) -> fmt::Result {
        let (instance, node) = &self.names.rows[candidate.at as usize];
        write!(f, "prefill {instance}@{node}: held {}", candidate.held_blocks)?;
        if let Some(source) = candidate.fetch_from {
            let (_, source) = &self.names.rows[source as usize];
            write!(f, ", fetch to {} from {source}", candidate.used_blocks)?;
        }
        let PrefillCandidate { queue_us, transfer_us, compute_us, ttft_us, cost_us, .. } =
            candidate;
        match self.selection {
            Selection::Global => write!(f, ", queue {queue_us} + transfer {transfer_us}")?,
            _ => write!(f, ", max(queue {queue_us}, transfer {transfer_us})")?,
        }
        write!(f, " + compute {compute_us} = {ttft_us} us")?;
        if cost_us != ttft_us {
            write!(f, ", cost {cost_us}")?;
        }
        writeln!(f, ": {}", candidate.verdict)
    }

    fn decode_line(&self, f: &mut fmt::Formatter<'_>, candidate: &DecodeCandidate) -> fmt::Result {
        let (instance, node) = &self.names.rows[candidate.at as usize];
        writeln!(
            f,
            "decode {instance}@{node}: held {}, load {:.2}, wait {} us, step {} us: {}",
            candidate.held_blocks,
            candidate.load,
            candidate.wait_us,
            candidate.tbt_us,
            candidate.verdict
        )
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::Chosen => "chosen",
            Verdict::Worse => "not the best",
            Verdict::MissesTtft => "misses the objective for the first token",
            Verdict::MissesTbt => "misses the objective between tokens",
            Verdict::NoRoom => "no room",
            Verdict::Excluded => "failed this request",
            Verdict::Avoided => "failed a moment ago",
            Verdict::RoomUnreported => "idle, and its room is not reported yet",
            Verdict::Draining => "draining",
            Verdict::NoDecode => "nobody to decode",
        })
    }
}
