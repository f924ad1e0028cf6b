//! How chunks of a prompt get their places among a sequence's rows: the node looks their blocks up, and what it
//! has is copied from there; what it has not is computed alone first. Either way the rows are those of a prompt
//! that is the chunk alone, so that answers do not depend on who had them.

use kvasir_proto::v1::engine_to_node::Message;
use kvasir_proto::{BlockKey, SlotIndex, keys, v1};
use tonic::{Code, Status};

use super::away::Next;
use super::sequence::State;
use super::{End, Scheduler};
use crate::model::SpliceError;
use crate::ports::{CachePort, Compute, PortLost};

impl<P: CachePort, C: Compute> Scheduler<P, C> {
    /// Takes all gaps as far as they get without a step.
    pub(super) fn fill_gaps(&mut self) -> Result<(), PortLost> {
        for id in self.seated().collect::<Vec<_>>() {
            self.fill(id)?;
        }
        Ok(())
    }

    /// Takes one sequence's gaps as far as they get without a step.
    pub(super) fn fill(&mut self, id: u64) -> Result<(), PortLost> {
        loop {
            let Some(sequence) = self.sequences.get_mut(&id) else { return Ok(()) };
            if !matches!(sequence.state, State::Filling { .. }) {
                return Ok(());
            }
            match sequence.away.next(sequence.page_tokens) {
                Next::Filled => {
                    if !sequence.accepted {
                        let cached = sequence.cached_tokens;
                        self.shared.metrics.prompt_tokens_cached.inc_by(cached.into());
                    }
                    sequence.accept();
                    sequence.resume();
                    return Ok(());
                }
                Next::Computed => self.put(id, None)?,
                Next::LookUp { positions } => {
                    self.lookups += 1;
                    let handle = self.lookups;
                    let chunk = &sequence.tokens[positions.start as usize..positions.end as usize];
                    // Only whole legs have chunks, and they have a namespace.
                    let Some(root) = sequence.namespace else { return Ok(()) };
                    let keys = keys::chain(root, chunk, sequence.page_tokens as usize);
                    sequence.away.asked(handle);
                    let keys = BlockKey::concat(&keys);
                    // What is not in memory is computed at once: nobody would use what is read.
                    let get = v1::GetBlocks { handle, keys, skip_promotion: true };
                    self.port.send(Message::Get(get))?;
                }
                Next::Waits | Next::Compute { .. } => return Ok(()),
            }
        }
    }

    /// The node has looked a chunk up. What is there is pinned only while it is copied.
    pub(super) fn handle_got(&mut self, got: &v1::GotBlocks) -> Result<(), PortLost> {
        let v1::GotBlocks { handle, ref slots, .. } = *got;
        let asked = |(&id, sequence): (&u64, &super::Sequence)| {
            sequence.away.is_asked(handle).then_some(id)
        };
        // Who asked may have ended meanwhile.
        if let Some(id) = self.sequences.iter().find_map(asked) {
            match self.checked(slots) {
                Ok(slots) => self.got(id, &slots)?,
                Err(why) => self.broken(id, why)?,
            }
        }
        self.port.send(Message::Unpin(v1::UnpinBlocks { handle }))
    }

    fn got(&mut self, id: u64, slots: &[SlotIndex]) -> Result<(), PortLost> {
        let sequence = self.sequences.get_mut(&id).expect("looked up by the caller");
        if slots.len() == sequence.away.pages_alone().len() {
            return self.put(id, Some(slots));
        }
        // A part of it would be the beginning of the same rows; to compute all of them is simple and right.
        sequence.away.computed(0);
        Ok(())
    }

    /// Puts the rows of the first chunk that nobody attends where they belong.
    fn put(&mut self, id: u64, chunk: Option<&[SlotIndex]>) -> Result<(), PortLost> {
        let Scheduler { sequences, compute, .. } = self;
        let sequence = sequences.get_mut(&id).expect("looked up by the caller");
        let fill = |splice: &crate::model::Splice<'_>| compute.fill(splice);
        let filled: Result<u32, SpliceError> =
            sequence.away.fill(chunk, &mut sequence.slots, sequence.page_tokens, fill);
        match filled {
            Ok(tokens) => {
                if chunk.is_some() {
                    self.shared.metrics.prompt_tokens_spliced.inc_by(tokens.into());
                    if !sequence.accepted {
                        sequence.cached_tokens += tokens;
                        sequence.admitted.settle(tokens);
                    }
                }
                Ok(())
            }
            Err(error) => {
                tracing::error!(share = %sequence.share, %error, "the engine cannot copy a chunk into the prompt");
                let status = Status::new(
                    Code::Internal,
                    format!("cannot copy a chunk into the prompt: {error}"),
                );
                self.end(id, End::Failed { status, label: "failed" })
            }
        }
    }
}
