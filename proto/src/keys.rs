//! What a block key is: BLAKE3 over (parent key, token ids as little-endian `u32`, extras), cut
//! to 16 bytes and chained from a root that hashes the namespace. Two blocks have one key exactly
//! when all the tokens up to their end and everything else that shapes their rows agree.

use std::ops::Range;

use crate::ids::{BlockKey, Namespace};

/// Hashes everything that requests must agree on to share blocks.
///
/// Each part is preceded by its length, so that no two lists of parts read alike.
pub fn namespace(
    fingerprint: &[u8],
    kv_dtype: &str,
    tenant_salt: &str,
    adapter: &str,
) -> Namespace {
    let mut hasher = blake3::Hasher::new_derive_key("kvasir 2026 namespace v1");
    for part in [fingerprint, kv_dtype.as_bytes(), tenant_salt.as_bytes(), adapter.as_bytes()] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    Namespace(first_16(&hasher))
}

/// The key of the block that holds `tokens` after `parent`. `None` is the first block of the
/// namespace. `extras` names what else is in the block (media hashes); empty for text.
pub fn block_key(
    namespace: Namespace,
    parent: Option<BlockKey>,
    tokens: &[u32],
    extras: &[u8],
) -> BlockKey {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&parent.map_or(namespace.0, |key| key.0));
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    hasher.update(extras);
    BlockKey(first_16(&hasher))
}

/// The keys of all full blocks of a text prompt, in chain order.
pub fn chain(namespace: Namespace, tokens: &[u32], block_tokens: usize) -> Vec<BlockKey> {
    let mut parent = None;
    tokens
        .chunks_exact(block_tokens)
        .map(|block| {
            let key = block_key(namespace, parent, block, &[]);
            parent = Some(key);
            key
        })
        .collect()
}

/// As [`chain`], for a prompt with chunks that are attended as if each stood alone. Blocks before the first
/// of them are those of any prompt; the others are not, and neither are their keys: they name the chunks.
pub fn chain_with_chunks(
    namespace: Namespace,
    tokens: &[u32],
    block_tokens: usize,
    chunks: &[Range<u32>],
) -> Vec<BlockKey> {
    let first = chunks.iter().map(|chunk| chunk.start as usize).min().unwrap_or(tokens.len());
    let mut extras = b"chunks".to_vec();
    for Range { start, end } in chunks {
        extras.extend(start.to_le_bytes());
        extras.extend(end.to_le_bytes());
    }
    let mut parent = None;
    let blocks = tokens.chunks_exact(block_tokens).enumerate();
    blocks
        .map(|(at, block)| {
            let is_exact = (at + 1) * block_tokens <= first;
            let extras: &[u8] = if is_exact { &[] } else { &extras };
            let key = block_key(namespace, parent, block, extras);
            parent = Some(key);
            key
        })
        .collect()
}

fn first_16(hasher: &blake3::Hasher) -> [u8; 16] {
    let mut out = [0; 16];
    hasher.finalize_xof().fill(&mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_depends_on_every_token_before_its_end() {
        let root = namespace(b"model", "f32", "", "");
        let tokens: Vec<u32> = (0..256).collect();
        let keys = chain(root, &tokens, 64);
        assert_eq!(keys.len(), 4);
        for changed in 0..256 {
            let mut other = tokens.clone();
            other[changed] += 1000;
            let other = chain(root, &other, 64);
            for block in 0..4 {
                assert_eq!(keys[block] == other[block], block < changed / 64);
            }
        }
    }

    #[test]
    fn what_is_behind_a_chunk_has_no_key_of_a_prompt_that_was_computed_whole() {
        let root = namespace(b"model", "f32", "", "");
        let tokens: Vec<u32> = (0..256).collect();
        let exact = chain(root, &tokens, 64);
        let keys = |chunks: &[Range<u32>]| chain_with_chunks(root, &tokens, 64, chunks);
        assert_eq!(keys(&[]), exact);
        for (start, same) in [(1, 0), (63, 0), (64, 1), (100, 1), (191, 2), (192, 3)] {
            let end = start + 64;
            let with = keys(std::slice::from_ref(&(start..end)));
            for block in 0..4 {
                assert_eq!(with[block] == exact[block], block < same, "{start}, block {block}");
            }
            assert_ne!(with[3], keys(&[start..end, end..end + 64])[3]);
            assert_ne!(with[3], keys(std::slice::from_ref(&(start..end + 64)))[3]);
        }
    }

    #[test]
    fn a_partial_block_has_no_key() {
        let root = namespace(b"model", "f32", "", "");
        assert_eq!(chain(root, &[7; 63], 64).len(), 0);
        assert_eq!(chain(root, &[7; 127], 64).len(), 1);
    }

    #[test]
    fn namespaces_differ_in_every_part_and_in_where_parts_end() {
        let base = namespace(b"model", "f32", "salt", "lora");
        for other in [
            namespace(b"modem", "f32", "salt", "lora"),
            namespace(b"model", "bf16", "salt", "lora"),
            namespace(b"model", "f32", "sal", "tlora"),
            namespace(b"model", "f32", "salt", ""),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn the_hash_is_the_documented_one() {
        let root = Namespace([3; 16]);
        let key = block_key(root, None, &[1, 2], b"x");
        let mut bytes = vec![3u8; 16];
        bytes.extend([1, 0, 0, 0, 2, 0, 0, 0, b'x']);
        assert_eq!(key.0, blake3::hash(&bytes).as_bytes()[..16]);
    }
}
