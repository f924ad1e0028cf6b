//! What a node should read from its SSD before it is asked: said where a request was decided upon and does not come
//! at once. One that is placed and sent needs no hint: to reserve its slots begins the reads.

use kvasir_proto::NodeId;

use crate::decision::{Considered, Placement, PrefillCandidate, Refusal, Refused, Verdict};

/// This node should have the first blocks of the prompt in memory, of which its SSD has some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ahead<'a> {
    pub node: &'a NodeId,
    pub blocks: u32,
}

impl Placement {
    /// For a request that comes later than its placement: the prefill side's own blocks, or those that it
    /// is to fetch.
    pub fn ahead(&self) -> Option<Ahead<'_>> {
        if self.route.is_some() {
            return None;
        }
        let reads = match &self.fetch {
            Some(fetch) => &fetch.source,
            None if self.leaves_ssd => return None,
            None => self.prefill(),
        };
        let blocks = reads.cached_blocks;
        (reads.memory_blocks < blocks).then_some(Ahead { node: &reads.node_id, blocks })
    }
}

impl Refused {
    /// For a request that is told to come again: what its best prefill side would read then. It is the less
    /// likely to be refused the sooner it can begin.
    pub fn ahead(&self) -> Option<Ahead<'_>> {
        match self.refusal {
            Refusal::Overloaded { .. } => self.considered.ahead(),
            _ => None,
        }
    }
}

impl Considered {
    fn ahead(&self) -> Option<Ahead<'_>> {
        let is_there = |candidate: &&PrefillCandidate| {
            let verdict = candidate.verdict;
            !matches!(
                verdict,
                Verdict::Excluded | Verdict::NotRequested | Verdict::NotFull | Verdict::Draining
            )
        };
        let candidates = self.prefill_candidates.iter().filter(is_there);
        let best = candidates.min_by_key(|candidate| candidate.cost_us)?;
        let reads = best.fetch_from.is_none()
            && !best.leaves_ssd
            && best.memory_blocks < best.cached_blocks;
        let (_, node) = &self.names.rows[best.at as usize];
        reads.then_some(Ahead { node, blocks: best.cached_blocks })
    }
}
