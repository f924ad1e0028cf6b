//! What one step computes: a pure function of who could take part. One token for each sequence that
//! decodes, and prompt tokens up to a budget that the sequences share in their order, so that one
//! long prompt does not hold up those that decode and several short ones fill a step.

use std::ops::Range;

/// A sequence that has a seat and could take part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub sequence: u64,
    pub work: Work,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// The last token, at this position.
    Decode { position: u32 },
    /// Prompt tokens from `computed` on, up to and without `until` in one step. Each has so many queries for
    /// what is elsewhere, or one.
    Prefill { computed: u32, until: u32, prompt_tokens: u32, queries: u32 },
    /// Tokens of a chunk from `computed` on, up to and without `until`, and no token after them.
    Alone { computed: u32, until: u32 },
}

/// What one sequence does in the step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    pub sequence: u64,
    /// Positions whose rows are computed.
    pub positions: Range<u32>,
    /// A token follows the last position.
    pub samples: bool,
}

/// Plans a step over candidates in the order in which prompts are computed.
pub(crate) fn plan_step(candidates: &[Candidate], prefill_chunk_tokens: u32) -> Vec<Part> {
    let mut budget = prefill_chunk_tokens;
    let mut parts = Vec::new();
    for &Candidate { sequence, work } in candidates {
        match work {
            Work::Decode { position } => {
                parts.push(Part { sequence, positions: position..position + 1, samples: true });
            }
            Work::Alone { computed, until } => {
                let tokens = budget.min(until - computed);
                budget -= tokens;
                if tokens > 0 {
                    let positions = computed..computed + tokens;
                    parts.push(Part { sequence, positions, samples: false });
                }
            }
            Work::Prefill { computed, until, prompt_tokens, queries } => {
                // As many rows as the budget has, whatever they are turned to; and one token at least.
                let tokens = (budget / queries).max(budget.min(1)).min(until - computed);
                budget = budget.saturating_sub(tokens * queries);
                let end = computed + tokens;
                if tokens > 0 {
                    let samples = end == prompt_tokens;
                    parts.push(Part { sequence, positions: computed..end, samples });
                }
            }
        }
    }
    parts
}

/// How a prompt lies in pages.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromptPages {
    pub prompt_tokens: u32,
    pub page_tokens: u32,
    /// The prompt's end is the end of what is written: its last page, partial or not, is finished
    /// with it. Otherwise decoding goes on in that page.
    pub prompt_only: bool,
}

/// The pages that computing these positions finishes: those it fills, and the last one of a prompt
/// that nothing is added to. Each page is finished exactly once.
pub(crate) fn finished_pages(positions: &Range<u32>, pages: PromptPages) -> Range<u32> {
    let first = positions.start / pages.page_tokens;
    let ends_prompt = positions.end == pages.prompt_tokens;
    let end = if ends_prompt && pages.prompt_only {
        positions.end.div_ceil(pages.page_tokens)
    } else {
        positions.end / pages.page_tokens
    };
    first..end.max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefill(sequence: u64, computed: u32, prompt_tokens: u32) -> Candidate {
        let work = Work::Prefill { computed, until: prompt_tokens, prompt_tokens, queries: 1 };
        Candidate { sequence, work }
    }

    fn decode(sequence: u64, position: u32) -> Candidate {
        Candidate { sequence, work: Work::Decode { position } }
    }

    /// (sequence, positions, samples) of a step.
    fn check(candidates: &[Candidate], prefill_chunk_tokens: u32) -> Vec<(u64, Range<u32>, bool)> {
        plan_step(candidates, prefill_chunk_tokens)
            .into_iter()
            .map(|part| (part.sequence, part.positions, part.samples))
            .collect()
    }

    #[test]
    fn every_decoding_sequence_takes_part_whatever_the_prompts_take() {
        let candidates = [prefill(1, 0, 1000), decode(2, 70), prefill(3, 0, 5), decode(4, 9)];
        let expected = vec![(1, 0..100, false), (2, 70..71, true), (4, 9..10, true)];
        assert_eq!(check(&candidates, 100), expected);
    }

    #[test]
    fn prompts_share_the_budget_in_their_order() {
        let candidates = [prefill(1, 90, 100), prefill(2, 0, 60), prefill(3, 64, 200)];
        let expected = vec![(1, 90..100, true), (2, 0..60, true), (3, 64..94, false)];
        assert_eq!(check(&candidates, 100), expected);
        assert_eq!(check(&candidates, 10), vec![(1, 90..100, true)]);
        assert_eq!(check(&[], 10), vec![]);
    }

    #[test]
    fn a_prompt_goes_up_to_a_chunk_and_counts_for_each_part_that_is_elsewhere() {
        let step = |computed, queries, budget| {
            let (until, prompt_tokens) = (100, 200);
            let work = Work::Prefill { computed, until, prompt_tokens, queries };
            check(&[Candidate { sequence: 1, work }, prefill(2, 0, 60)], budget)
        };
        assert_eq!(step(90, 1, 50), vec![(1, 90..100, false), (2, 0..40, false)]);
        assert_eq!(step(90, 3, 50), vec![(1, 90..100, false), (2, 0..20, false)]);
        assert_eq!(step(0, 3, 50), vec![(1, 0..16, false), (2, 0..2, false)]);
        assert_eq!(step(0, 3, 2), vec![(1, 0..1, false)]);
        assert_eq!(step(0, 3, 0), vec![]);
    }

    #[test]
    fn what_is_computed_alone_shares_the_budget_and_gives_no_token() {
        let work = Work::Alone { computed: 64, until: 128 };
        let candidates = [Candidate { sequence: 1, work }, prefill(2, 0, 60)];
        let expected = vec![(1, 64..128, false), (2, 0..36, false)];
        assert_eq!(check(&candidates, 100), expected);
        assert_eq!(check(&candidates, 30), vec![(1, 64..94, false)]);
    }

    #[test]
    fn every_page_is_finished_once_by_the_chunk_that_fills_it_or_the_last() {
        for page_tokens in [16, 64] {
            for chunk in [1, 16, 63, 64, 100, 512] {
                for prompt_tokens in [1, 15, 16, 63, 64, 65, 128, 200, 512, 700] {
                    for cached in (0..prompt_tokens).step_by(page_tokens as usize) {
                        check_pages(page_tokens, chunk, prompt_tokens, cached);
                    }
                }
            }
        }
    }

    fn check_pages(page_tokens: u32, chunk: u32, prompt_tokens: u32, cached: u32) {
        for prompt_only in [true, false] {
            let pages = PromptPages { prompt_tokens, page_tokens, prompt_only };
            let mut next_page = cached / page_tokens;
            let mut computed = cached;
            while computed < prompt_tokens {
                let end = prompt_tokens.min(computed + chunk);
                for page in finished_pages(&(computed..end), pages) {
                    assert_eq!(page, next_page, "in order, once: {pages:?} chunk {chunk}");
                    let page_end = (page + 1) * page_tokens;
                    assert!(page_end <= end || end == prompt_tokens, "{page} is not filled");
                    assert!(page_end > computed, "{page} was filled before");
                    next_page += 1;
                }
                computed = end;
            }
            let whole = prompt_tokens / page_tokens;
            let all = if prompt_only { prompt_tokens.div_ceil(page_tokens) } else { whole };
            assert_eq!(next_page, all, "{pages:?} chunk {chunk}");
        }
    }
}
