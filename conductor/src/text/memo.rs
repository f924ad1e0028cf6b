//! What pieces of prompts were tokenized to, so that what prompts share is tokenized once: system prompts, documents, the
//! turns of a conversation before the newest. Bounded in bytes; what is used goes last.

use std::sync::Arc;

use prometheus::{IntCounterVec, Opts, Registry};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

/// Of one entry, beside its tokens.
const ENTRY_BYTES: u64 = 128;
/// For the first guess of how many entries there may be; not a bound.
const ENTRY_BYTES_LIKELY: u64 = 2 << 10;

/// Stands for a piece: hash of the model, the tenant's salt and the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PieceKey([u8; 16]);

impl PieceKey {
    /// Tenants do not share pieces: how long a prompt takes tells nobody what others have asked.
    pub(super) fn new(model: &str, salt: &[u8], text: &str) -> PieceKey {
        let mut hasher = blake3::Hasher::new();
        for part in [model.as_bytes(), salt] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        hasher.update(text.as_bytes());
        let mut key = [0; 16];
        key.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        PieceKey(key)
    }
}

#[derive(Debug, Clone)]
struct Bytes;

impl Weighter<PieceKey, Arc<[u32]>> for Bytes {
    fn weight(&self, _: &PieceKey, tokens: &Arc<[u32]>) -> u64 {
        ENTRY_BYTES + size_of_val::<[u32]>(tokens) as u64
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Memo {
    pieces: Option<Cache<PieceKey, Arc<[u32]>, Bytes>>,
    /// Bytes of text by whether their tokens were there.
    bytes: IntCounterVec,
}

impl Memo {
    /// 0 bytes keep nothing.
    ///
    /// # Errors
    /// When the registry has a counter of this name.
    pub(crate) fn new(bytes_max: u64, registry: &Registry) -> Result<Memo, prometheus::Error> {
        let help = "Bytes of prompts by the outcome of their lookup in the tokenizer cache.";
        let counted = Opts::new("kvasir_conductor_tokenizer_cache_bytes_total", help);
        let bytes = IntCounterVec::new(counted, &["outcome"])?;
        registry.register(Box::new(bytes.clone()))?;
        let entries = (bytes_max / ENTRY_BYTES_LIKELY).max(1) as usize;
        let pieces = (bytes_max > 0).then(|| Cache::with_weighter(entries, bytes_max, Bytes));
        Ok(Memo { pieces, bytes })
    }

    /// One that keeps nothing.
    #[cfg(test)]
    pub(crate) fn none() -> Memo {
        Memo::new(0, &Registry::new()).expect("a new registry")
    }

    pub(super) fn keeps(&self) -> bool {
        self.pieces.is_some()
    }

    /// The tokens of a piece of so many bytes.
    pub(super) fn find(&self, key: &PieceKey, bytes: usize) -> Option<Arc<[u32]>> {
        let found = self.pieces.as_ref()?.get(key)?;
        self.bytes.with_label_values(&["hit"]).inc_by(bytes as u64);
        Some(found)
    }

    /// So many bytes were tokenized.
    pub(super) fn tokenized(&self, bytes: usize) {
        self.bytes.with_label_values(&["miss"]).inc_by(bytes as u64);
    }

    pub(super) fn keep(&self, key: PieceKey, tokens: &[u32]) {
        if let Some(pieces) = &self.pieces {
            pieces.insert(key, tokens.into());
        }
    }

    #[cfg(test)]
    pub(super) fn counted(&self, outcome: &str) -> u64 {
        self.bytes.with_label_values(&[outcome]).get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_bounded_in_bytes_and_pieces_of_others_are_not_found() {
        let memo = Memo::new(64 << 10, &Registry::new()).expect("a new registry");
        let key = |n: u32| PieceKey::new("model", b"salt", &n.to_string());
        for n in 0..1_000 {
            memo.keep(key(n), &[n; 256]);
        }
        let kept = (0..1_000).filter(|n| memo.find(&key(*n), 1).is_some()).count();
        assert!((1..=(64 << 10) / (4 * 256)).contains(&kept), "{kept} are kept");

        let (model, salt, text) = ("model", b"salt".as_slice(), "a text");
        let own = PieceKey::new(model, salt, text);
        for other in [
            PieceKey::new("other", salt, text),
            PieceKey::new(model, b"", text),
            PieceKey::new(model, salt, "another"),
            PieceKey::new("models", b"alt", text),
        ] {
            assert_ne!(own, other);
        }
    }
}
