//! The slots that one answer takes beyond its prompt's, as far as they can be foreseen.
//!
//! An answer may end long before `max_tokens`, and clients that name none mean the whole context:
//! reserving the longest answer would leave most of a node unused. Reserving nothing admits more
//! answers than can finish, and then some are given up half-way. So an answer is expected to be as
//! long as answers were in the mean, or `max_tokens` when that is less; the sum over many answers
//! keeps near that. One that outlives its expectation is expected to take one more block, always.

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Growth {
    prompt_tokens: u32,
    block_tokens: u32,
    generated_tokens: u32,
    generated_tokens_max: u32,
    grown_blocks: u32,
    left_blocks: u32,
}

impl Growth {
    pub(crate) fn new(
        prompt_tokens: u32,
        block_tokens: u32,
        generated_tokens_max: u32,
        answer_tokens_mean: u32,
    ) -> Self {
        let mut growth = Growth {
            prompt_tokens,
            block_tokens: block_tokens.max(1),
            generated_tokens: 0,
            generated_tokens_max,
            grown_blocks: 0,
            left_blocks: 0,
        };
        // Engines ask a little ahead, but never for more than the longest answer takes.
        let expected = growth.blocks_at(answer_tokens_mean.min(generated_tokens_max));
        growth.left_blocks = expected.max(1).min(growth.blocks_at(generated_tokens_max));
        growth
    }

    /// Tokens that it has.
    pub(crate) fn generated_tokens(&self) -> u32 {
        self.generated_tokens
    }

    /// Blocks that it has taken.
    pub(crate) fn grown_blocks(&self) -> u32 {
        self.grown_blocks
    }

    /// Blocks that it is expected to take yet.
    pub(crate) fn left_blocks(&self) -> u32 {
        self.left_blocks
    }

    /// It has so many tokens more.
    pub(crate) fn advance(&mut self, tokens: u32) {
        self.generated_tokens = self.generated_tokens.saturating_add(tokens);
        let grown_blocks = self.blocks_at(self.generated_tokens).max(self.grown_blocks);
        let taken = grown_blocks - self.grown_blocks;
        self.grown_blocks = grown_blocks;
        let possible = self.blocks_at(self.generated_tokens_max).saturating_sub(grown_blocks);
        self.left_blocks = self.left_blocks.saturating_sub(taken).max(1).min(possible);
    }

    /// Blocks beyond the prompt's that so many tokens of the answer lie in.
    fn blocks_at(&self, generated_tokens: u32) -> u32 {
        let end = self.prompt_tokens.saturating_add(generated_tokens);
        end.div_ceil(self.block_tokens) - self.prompt_tokens.div_ceil(self.block_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks expected at first, and then after each piece of the answer.
    fn check(prompt_tokens: u32, max: u32, mean: u32, pieces: &[u32], want: &[(u32, u32)]) {
        let mut growth = Growth::new(prompt_tokens, 64, max, mean);
        let mut got = vec![(growth.grown_blocks(), growth.left_blocks())];
        for tokens in pieces {
            growth.advance(*tokens);
            got.push((growth.grown_blocks(), growth.left_blocks()));
        }
        assert_eq!(got, want, "{prompt_tokens} + {max}, mean {mean}");
    }

    #[test]
    fn an_answer_is_expected_to_be_as_long_as_the_mean_or_its_limit() {
        check(64, 1_000, 200, &[], &[(0, 4)]);
        check(64, 100, 200, &[], &[(0, 2)]);
        check(60, 4, 200, &[], &[(0, 0)]);
        check(60, 5, 200, &[], &[(0, 1)]);
        check(60, 500, 2, &[], &[(0, 1)]);
        check(u32::MAX, u32::MAX, 200, &[u32::MAX], &[(0, 0), (0, 0)]);
    }

    #[test]
    fn what_has_grown_is_not_expected_again_and_one_that_goes_on_takes_one_more() {
        check(
            64,
            256,
            100,
            &[1, 64, 63, 64, 64],
            &[(0, 2), (1, 1), (2, 1), (2, 1), (3, 1), (4, 0)],
        );
        check(100, 20, 100, &[20], &[(0, 0), (0, 0)]);
    }
}
