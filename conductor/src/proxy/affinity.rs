//! Which server has probably seen the beginning of a prompt: the one that was last sent a prompt that
//! begins alike. Servers that keep a prefix cache compute less then. It is a guess, of bounded size, and
//! costs nothing but time when it is wrong.

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

/// Pieces by the server that was sent them last. When the young ones are many, they become the old
/// ones, and the old ones are forgotten.
#[derive(Debug, Default)]
struct Seen {
    young: HashMap<u64, usize>,
    old: HashMap<u64, usize>,
}

impl Affinity {
    /// Each piece stands for itself and all before it.
    pub fn pieces(&self, tenant: &str, prompt: &[u8]) -> Vec<u64> {
        let mut before = self.hasher.hash_one(tenant);
        let whole = prompt.chunks_exact(PIECE_BYTES).take(PIECES_MAX);
        let piece = |text: &[u8]| {
            before = self.hasher.hash_one((before, text));
            before
        };
        whole.map(piece).collect()
    }

    /// Who was sent the longest beginning of these.
    pub fn seen_by(&self, pieces: &[u64]) -> Option<usize> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |piece: &u64| seen.young.get(piece).or_else(|| seen.old.get(piece)).copied();
        pieces.iter().map_while(of).last()
    }

    pub fn remember(&self, pieces: &[u64], at: usize) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.young.extend(pieces.iter().map(|piece| (*piece, at)));
        if seen.young.len() >= GENERATION {
            seen.old = std::mem::take(&mut seen.young);
        }
    }

    /// Another number each time, so that equals take turns.
    pub fn turn(&self) -> usize {
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
        let pieces = affinity.pieces("a", &text);
        assert_eq!(pieces.len(), 4);
        affinity.remember(&pieces[..2], 1);
        affinity.remember(&pieces[..1], 0);
        assert_eq!(affinity.seen_by(&pieces), Some(1));
        assert_eq!(affinity.seen_by(&pieces[..1]), Some(0));
        assert_eq!(affinity.seen_by(&affinity.pieces("b", &text)), None);
        assert_eq!(affinity.pieces("a", &text[..PIECE_BYTES - 1]), [0u64; 0]);
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let affinity = Affinity::default();
        for first in (0..GENERATION as u64 * 3).step_by(1_000) {
            affinity.remember(&(first..first + 1_000).collect::<Vec<_>>(), 0);
        }
        let seen = affinity.seen.lock().expect("no panic");
        assert!(seen.young.len() + seen.old.len() < GENERATION * 2 + 2_000);
    }
}
