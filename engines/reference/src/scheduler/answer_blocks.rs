//! Keys of the blocks that an answer fills: the chain goes on where the prompt's full blocks end.

use kvasir_proto::{BlockKey, Namespace, keys};

/// The chain behind a prompt.
#[derive(Debug)]
pub(crate) struct AnswerBlocks {
    namespace: Namespace,
    block_tokens: u32,
    /// The first block that was not given out.
    next_block: u32,
    /// The key of the block before; known once the first block was asked for.
    parent: Option<BlockKey>,
    prompt_hashed: bool,
}

/// Blocks that have been filled since the last time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FilledBlocks {
    pub first_page: u32,
    pub keys: Vec<BlockKey>,
}

impl AnswerBlocks {
    pub(crate) fn new(namespace: Namespace, prompt_tokens: u32, block_tokens: u32) -> Self {
        let next_block = prompt_tokens / block_tokens;
        AnswerBlocks { namespace, block_tokens, next_block, parent: None, prompt_hashed: false }
    }

    /// Blocks behind the prompt's full ones that `rows` rows of `tokens` fill and that were not
    /// given out before. The prompt is hashed when its first block is asked for, since most answers
    /// fill none.
    pub(crate) fn filled(&mut self, tokens: &[u32], rows: u32) -> Option<FilledBlocks> {
        let filled = rows / self.block_tokens;
        if filled <= self.next_block {
            return None;
        }
        let size = self.block_tokens as usize;
        let first_page = self.next_block;
        if !self.prompt_hashed {
            let prompt = &tokens[..first_page as usize * size];
            self.parent = keys::chain(self.namespace, prompt, size).last().copied();
            self.prompt_hashed = true;
        }
        let mut filled_keys = Vec::new();
        for block in tokens[..filled as usize * size].chunks_exact(size).skip(first_page as usize) {
            let key = keys::block_key(self.namespace, self.parent, block, &[]);
            self.parent = Some(key);
            filled_keys.push(key);
        }
        self.next_block = filled;
        Some(FilledBlocks { first_page, keys: filled_keys })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_are_those_of_a_prompt_of_the_same_tokens() {
        let root = Namespace([5; 16]);
        let tokens: Vec<u32> = (0..100).collect();
        let whole = keys::chain(root, &tokens, 8);
        for prompt_tokens in [1u32, 7, 8, 9, 40] {
            let mut blocks = AnswerBlocks::new(root, prompt_tokens, 8);
            let first = (prompt_tokens / 8) as usize;
            let mut given = Vec::new();
            for rows in prompt_tokens..=100 {
                if let Some(filled) = blocks.filled(&tokens[..rows as usize], rows) {
                    assert_eq!(filled.first_page as usize, first + given.len());
                    assert_eq!(rows % 8, 0, "as soon as the last row is there");
                    given.extend(filled.keys);
                }
            }
            assert_eq!(given, whole[first..]);
        }
    }

    #[test]
    fn a_row_that_is_not_there_fills_no_block() {
        let mut blocks = AnswerBlocks::new(Namespace([5; 16]), 4, 8);
        assert_eq!(blocks.filled(&[1; 8], 7), None);
        assert_eq!(blocks.filled(&[1; 9], 8).map(|filled| filled.keys.len()), Some(1));
        assert_eq!(blocks.filled(&[1; 9], 8), None);
    }
}
