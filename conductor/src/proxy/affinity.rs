//! Which server has probably seen the beginning of a prompt: the one that was last sent a prompt that
//! begins alike, or else one of the same `prompt_cache_key`. Servers that keep a prefix cache compute less then. It is
//! a guess, of bounded size, and costs nothing but time when it is wrong.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Text of one piece.
const PIECE_BYTES: usize = 256;
/// Pieces of one prompt that are looked at.
const PIECES_MAX: usize = 1_024;
/// Pieces of one generation; two are kept.
const GENERATION: usize = 1 << 17;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Affinity {
    seen: Mutex<Seen>,
    turns: AtomicUsize,
    /// Drawn when it is made: nobody can make prompts that collide.
    hasher: RandomState,
}

/// What is known of a prompt here.
#[derive(Debug)]
pub(super) struct Beginning {
    /// Each piece stands for itself and all before it.
    pieces: Vec<u64>,
    /// By what the client says that belongs together: of use where a prompt begins with what nobody has seen.
    key: Option<u64>,
}

/// A server that has probably seen a prompt's beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Near {
    pub at: usize,
    /// Of the prompt, alike; `None` where only the key is the same.
    pub bytes: Option<usize>,
}

/// Pieces by the server that was sent them last. When the young ones are many, they become the old
/// ones, and the old ones are forgotten.
#[derive(Debug, Default)]
struct Seen {
    young: HashMap<u64, usize>,
    old: HashMap<u64, usize>,
}

impl Affinity {
    /// Of the prompt's text, and of its `prompt_cache_key` if it has one.
    pub(super) fn beginning(&self, tenant: &str, prompt: &[u8], key: Option<&str>) -> Beginning {
        let mut before = self.hasher.hash_one(tenant);
        let whole = prompt.chunks_exact(PIECE_BYTES).take(PIECES_MAX);
        let piece = |text: &[u8]| {
            before = self.hasher.hash_one((before, text));
            before
        };
        let pieces = whole.map(piece).collect();
        Beginning { pieces, key: key.map(|key| self.hasher.hash_one((tenant, "key", key))) }
    }

    /// Who was sent the longest beginning like this one.
    pub(super) fn seen_by(&self, beginning: &Beginning) -> Option<Near> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |piece: &u64| seen.young.get(piece).or_else(|| seen.old.get(piece)).copied();
        let alike = beginning.pieces.iter().map_while(of).zip(1..).last();
        let alike = alike.map(|(at, pieces)| Near { at, bytes: Some(pieces * PIECE_BYTES) });
        alike.or_else(|| of(&beginning.key?).map(|at| Near { at, bytes: None }))
    }

    pub(super) fn remember(&self, beginning: &Beginning, at: usize) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.young.extend(beginning.pieces.iter().chain(&beginning.key).map(|piece| (*piece, at)));
        if seen.young.len() >= GENERATION {
            seen.old = std::mem::take(&mut seen.young);
        }
    }

    /// Another number each time, so that equals take turns.
    pub(super) fn turn(&self) -> usize {
        self.turns.fetch_add(1, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_known_beginning_decides_and_tenants_share_nothing() {
        let affinity = Affinity::default();
        let text: Vec<u8> = (0..PIECE_BYTES * 4).map(|at| at as u8 ^ (at >> 8) as u8).collect();
        let of =
            |tenant, pieces: usize| affinity.beginning(tenant, &text[..pieces * PIECE_BYTES], None);
        assert_eq!(of("a", 4).pieces.len(), 4);
        affinity.remember(&of("a", 2), 1);
        affinity.remember(&of("a", 1), 0);
        let near = |at, pieces: usize| Some(Near { at, bytes: Some(pieces * PIECE_BYTES) });
        assert_eq!(affinity.seen_by(&of("a", 4)), near(1, 2));
        assert_eq!(affinity.seen_by(&of("a", 1)), near(0, 1));
        assert_eq!(affinity.seen_by(&of("b", 4)), None);
        let short = affinity.beginning("a", &text[..PIECE_BYTES - 1], None);
        assert_eq!(short.pieces, [0u64; 0]);
    }

    #[test]
    fn a_key_decides_where_no_beginning_is_known() {
        let affinity = Affinity::default();
        let (long, short) = (vec![b'a'; PIECE_BYTES], vec![b'b'; 10]);
        affinity.remember(&affinity.beginning("a", &long, Some("\"k\"")), 1);
        let of =
            |tenant, prompt: &[u8], key| affinity.seen_by(&affinity.beginning(tenant, prompt, key));
        let by_key = |at| Some(Near { at, bytes: None });
        assert_eq!(of("a", &short, Some("\"k\"")), by_key(1));
        assert_eq!(of("a", &short, None), None);
        assert_eq!(of("a", &short, Some("\"other\"")), None);
        assert_eq!(of("b", &short, Some("\"k\"")), None, "tenants share nothing");
        affinity.remember(&affinity.beginning("a", &short, Some("\"k\"")), 2);
        let alike = Some(Near { at: 1, bytes: Some(PIECE_BYTES) });
        assert_eq!(of("a", &long, Some("\"k\"")), alike, "what begins alike comes first");
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let affinity = Affinity::default();
        for first in (0..GENERATION as u64 * 3).step_by(1_000) {
            let pieces = (first..first + 1_000).collect();
            affinity.remember(&Beginning { pieces, key: None }, 0);
        }
        let seen = affinity.seen.lock().expect("no panic");
        assert!(seen.young.len() + seen.old.len() < GENERATION * 2 + 2_000);
    }
}
