//! One copy of a chain on another node: what is asked of that node and of this one, in which order, and
//! when the copy counts. Whoever carries it out makes the calls, and tells what came of each.
//!
//! A copy is a transaction like any fetch. The share of the prefill side there reserves what it lacks,
//! the share of the source side here pins what is sent and pushes it, and the other side commits. A long
//! chain goes in pieces, each a transaction of its own, so that what has arrived stays when the next
//! piece fails.

use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::Mark;

use crate::replicas::{CopyError, CopyPlan, Peer};

/// What is to be done next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyStep {
    /// There: a share of the prefill side of a new transaction, for the first `blocks` of the chain; what it
    /// lacks of them is fetched. The prompt has one token more, since one is never reused.
    Reserve { blocks: u32, prompt_tokens: u32 },
    /// Here: a share of the source side of that transaction, for as many.
    Pin { blocks: u32 },
    /// Here: send what was reserved there. The leases of both sides are renewed meanwhile.
    Push,
    /// There: so many of the blocks that were reserved have landed intact.
    Commit { valid_blocks: u32 },
    /// There: keep all of the chain.
    Keep(Mark),
    /// Here and there: the transaction is aborted, as well as it can be.
    Abort,
    /// Nothing: it is over.
    End(Result<(), CopyError>),
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyAnswer {
    /// Blocks that it lacks; none when it has them all, or will in a moment.
    Reserved {
        targets: Option<u32>,
    },
    Pinned,
    Pushed {
        valid_blocks: u32,
    },
    Committed {
        held_blocks: u32,
    },
    Kept {
        kept_blocks: u32,
    },
    Aborted,
    Failed(CopyError),
}

/// One copy. [`step`](Self::step) says what to do, and [`answer`](Self::answer) is told what came of it,
/// until the step is [`CopyStep::End`].
#[derive(Debug)]
pub struct Copying {
    to: Peer,
    kept: Option<Mark>,
    block_tokens: u32,
    piece_blocks: u32,
    blocks: u32,
    /// The end of the piece that is being copied, and what of it is lacking there.
    until: u32,
    wanted: u32,
    step: CopyStep,
    /// Why it is being aborted.
    failed: Option<CopyError>,
}

impl Copying {
    /// `piece_blocks`: blocks that one transaction copies at most, beside those that the other node has.
    pub fn new(plan: &CopyPlan, block_tokens: u32, piece_blocks: u32) -> Self {
        let mut copying = Copying {
            to: plan.to.clone(),
            kept: plan.kept,
            block_tokens,
            piece_blocks: piece_blocks.max(1),
            blocks: u32::try_from(plan.keys.len()).unwrap_or(u32::MAX),
            until: 0,
            wanted: 0,
            step: CopyStep::End(Ok(())),
            failed: None,
        };
        copying.next_piece();
        copying
    }

    pub fn step(&self) -> CopyStep {
        self.step.clone()
    }

    /// What is no answer to the step changes nothing.
    pub fn answer(&mut self, answer: CopyAnswer) {
        match (&self.step, answer) {
            (CopyStep::Reserve { .. }, CopyAnswer::Reserved { targets: None }) => self.next_piece(),
            (CopyStep::Reserve { blocks, .. }, CopyAnswer::Reserved { targets: Some(wanted) }) => {
                self.wanted = wanted;
                self.step = CopyStep::Pin { blocks: *blocks };
            }
            (CopyStep::Pin { .. }, CopyAnswer::Pinned) => self.step = CopyStep::Push,
            (CopyStep::Push, CopyAnswer::Pushed { valid_blocks }) => {
                self.step = CopyStep::Commit { valid_blocks };
            }
            (CopyStep::Commit { valid_blocks }, CopyAnswer::Committed { held_blocks }) => {
                let valid_blocks = *valid_blocks;
                self.committed(valid_blocks, held_blocks);
            }
            (CopyStep::Keep(_), CopyAnswer::Kept { kept_blocks }) => self.kept(kept_blocks),
            (CopyStep::Keep(_), CopyAnswer::Failed(error)) => {
                self.step = CopyStep::End(Err(error));
            }
            (
                CopyStep::Reserve { .. }
                | CopyStep::Pin { .. }
                | CopyStep::Push
                | CopyStep::Commit { .. },
                CopyAnswer::Failed(error),
            ) => self.fail(error),
            (CopyStep::Abort, CopyAnswer::Aborted | CopyAnswer::Failed(_)) => {
                self.step = CopyStep::End(self.failed.take().map_or(Ok(()), Err));
            }
            _ => {}
        }
    }

    fn next_piece(&mut self) {
        if self.until < self.blocks {
            self.until = self.until.saturating_add(self.piece_blocks).min(self.blocks);
            let blocks = self.until;
            let prompt_tokens = blocks.saturating_mul(self.block_tokens).saturating_add(1);
            self.step = CopyStep::Reserve { blocks, prompt_tokens };
        } else {
            let kept = self.kept.filter(|_| !mutated(Mutation::ReplicaCountedBeforeKeep));
            self.step = kept.map_or(CopyStep::End(Ok(())), CopyStep::Keep);
        }
    }

    fn fail(&mut self, error: CopyError) {
        self.failed = Some(error);
        self.step = CopyStep::Abort;
    }

    /// A piece counts when all that was lacking was sent whole and is held there.
    fn committed(&mut self, valid_blocks: u32, held_blocks: u32) {
        let (wanted, until) = (self.wanted, self.until);
        if valid_blocks < wanted {
            let why = format!("only {valid_blocks} of {wanted} blocks were sent intact");
            self.fail(CopyError::NotHere(why));
        } else if held_blocks < until {
            let why = format!("the node holds only {held_blocks} of {until} sent blocks");
            self.fail(CopyError::Refused { peer: self.to.clone(), why });
        } else {
            self.next_piece();
        }
    }

    /// What was promised here is promised there when all of it is durable.
    fn kept(&mut self, kept_blocks: u32) {
        let blocks = self.blocks;
        self.step = CopyStep::End(match kept_blocks < blocks {
            true => {
                let why = format!("the node persisted only {kept_blocks} of {blocks} blocks");
                Err(CopyError::NoRoom { peer: self.to.clone(), why })
            }
            false => Ok(()),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replicas::CopyCause;
    use kvasir_proto::{BlockKey, Namespace, Tenant};

    const MARK: Mark =
        Mark { tenant: Tenant(1), expires_unix_ms: 9_000, created_unix_ms: None, copies: 1 };

    fn copying(blocks: u8, kept: Option<Mark>) -> Copying {
        let plan = CopyPlan {
            copy: 1,
            cause: CopyCause::Asked,
            namespace: Namespace([7; 16]),
            keys: (0..blocks).map(|at| BlockKey([at; 16])).collect(),
            to: Peer("peer".into()),
            kept,
        };
        Copying::new(&plan, 4, 2)
    }

    fn lost() -> CopyError {
        CopyError::PeerLost { peer: Peer("peer".into()), why: "no route".into() }
    }

    /// Answers one after the other; what is to be done after each.
    fn check(copying: &mut Copying, answers: &[(CopyAnswer, CopyStep)]) {
        for (answer, step) in answers {
            copying.answer(answer.clone());
            assert_eq!(copying.step(), *step, "after {answer:?}");
        }
    }

    #[test]
    fn a_long_chain_goes_in_pieces_and_counts_when_it_is_kept() {
        let mut copying = copying(3, Some(MARK));
        assert_eq!(copying.step(), CopyStep::Reserve { blocks: 2, prompt_tokens: 9 });
        check(
            &mut copying,
            &[
                (CopyAnswer::Reserved { targets: Some(1) }, CopyStep::Pin { blocks: 2 }),
                (CopyAnswer::Pinned, CopyStep::Push),
                (CopyAnswer::Pushed { valid_blocks: 1 }, CopyStep::Commit { valid_blocks: 1 }),
                (
                    CopyAnswer::Committed { held_blocks: 2 },
                    CopyStep::Reserve { blocks: 3, prompt_tokens: 13 },
                ),
                (CopyAnswer::Reserved { targets: None }, CopyStep::Keep(MARK)),
                (CopyAnswer::Kept { kept_blocks: 3 }, CopyStep::End(Ok(()))),
            ],
        );
    }

    #[test]
    fn what_is_kept_in_part_does_not_count() {
        let mut copying = copying(1, Some(MARK));
        check(&mut copying, &[(CopyAnswer::Reserved { targets: None }, CopyStep::Keep(MARK))]);
        copying.answer(CopyAnswer::Kept { kept_blocks: 0 });
        assert!(matches!(copying.step(), CopyStep::End(Err(CopyError::NoRoom { .. }))));
    }

    #[test]
    fn less_than_all_of_a_piece_is_a_failure_of_whoever_had_it() {
        let after = |valid_blocks, held_blocks| {
            let mut copying = copying(2, None);
            let answers = [
                CopyAnswer::Reserved { targets: Some(2) },
                CopyAnswer::Pinned,
                CopyAnswer::Pushed { valid_blocks },
                CopyAnswer::Committed { held_blocks },
            ];
            answers.into_iter().for_each(|answer| copying.answer(answer));
            if copying.step() == CopyStep::Abort {
                copying.answer(CopyAnswer::Aborted);
            }
            copying.step()
        };
        assert!(matches!(after(1, 1), CopyStep::End(Err(CopyError::NotHere(_)))));
        assert!(matches!(after(2, 1), CopyStep::End(Err(CopyError::Refused { .. }))));
        assert_eq!(after(2, 2), CopyStep::End(Ok(())));
    }

    #[test]
    fn whatever_fails_both_sides_are_told_and_late_answers_change_nothing() {
        let begun = [
            CopyAnswer::Reserved { targets: Some(2) },
            CopyAnswer::Pinned,
            CopyAnswer::Pushed { valid_blocks: 2 },
        ];
        for answered in 0..=begun.len() {
            let mut copying = copying(2, Some(MARK));
            begun[..answered].iter().for_each(|answer| copying.answer(answer.clone()));
            check(
                &mut copying,
                &[
                    (CopyAnswer::Failed(lost()), CopyStep::Abort),
                    (CopyAnswer::Committed { held_blocks: 2 }, CopyStep::Abort),
                    (CopyAnswer::Failed(lost()), CopyStep::End(Err(lost()))),
                    (CopyAnswer::Pinned, CopyStep::End(Err(lost()))),
                ],
            );
        }
    }
}
