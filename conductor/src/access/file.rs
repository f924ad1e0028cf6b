//! The file of tenants, read and checked. A key stands in it as its SHA-256, or in a file of its own
//! as it is.
//!
//! ```toml
//! [[tenants]]
//! name = "research"
//! requests_per_minute = 600
//! tokens_per_minute = 200000
//! running_requests_max = 32
//! weight = 2
//! priority = "normal"
//! priority_max = "high"
//! keys = [{ sha256 = "<64 hex digits>", cache_class = "normal" }]
//! ```

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvasir_placement::waiting::Priority;
use ring::digest::{SHA256, digest};
use serde::Deserialize;

use super::KeyHash;
use super::tenant::{Quotas, Standing};
use crate::contexts::ANONYMOUS;
use crate::reload::{ReadError, read_bounded};
use crate::serve::CacheClass;

/// Bytes of the file; also bounds how many keys there are.
const FILE_BYTES_MAX: u64 = 4 << 20;
const KEY_BYTES_MAX: u64 = 4 << 10;
const NAME_BYTES_MAX: usize = 128;
const WEIGHT_MAX: u32 = 1_000;
/// Keys that are examples or accidents; their hashes are known to everybody.
const KEYS_OF_EVERYBODY: [&str; 3] = ["", "secret", "test"];

/// Why a file of tenants is not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error(transparent)]
    Unreadable(#[from] ReadError),
    #[error("{} is invalid: {reason}", path.display())]
    Wrong { path: PathBuf, reason: String },
}

/// All tenants of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tenants(Vec<OneTenant>);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct OneTenant {
    pub name: Arc<str>,
    pub keys: Vec<OneKey>,
    pub quotas: Quotas,
    pub standing: Standing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OneKey {
    pub hash: KeyHash,
    /// Of its requests that say nothing of it.
    pub cache_class: CacheClass,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    tenants: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    keys: Vec<Key>,
    requests_per_minute: Option<u64>,
    tokens_per_minute: Option<u64>,
    running_requests_max: Option<u32>,
    weight: Option<u32>,
    priority: Option<Priority>,
    priority_max: Option<Priority>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Key {
    sha256: Option<String>,
    file: Option<PathBuf>,
    #[serde(default)]
    cache_class: CacheClass,
}

impl Tenants {
    /// Blocks while it reads.
    pub(crate) fn read(path: &Path) -> Result<Tenants, FileError> {
        let wrong = |reason: String| FileError::Wrong { path: path.to_owned(), reason };
        let bytes = read_bounded(path, FILE_BYTES_MAX)?;
        let text = str::from_utf8(&bytes).map_err(|error| wrong(error.to_string()))?;
        let document: Document =
            toml::from_str(text).map_err(|error| wrong(blame(text, &error)))?;
        let folder = path.parent().unwrap_or(Path::new("."));
        let (mut names, mut hashes) = (HashSet::new(), HashSet::new());
        let mut tenants = Vec::with_capacity(document.tenants.len());
        for entry in document.tenants {
            let name = entry.name.clone();
            let one = check(entry, folder, &mut hashes)
                .map_err(|reason| wrong(format!("tenant {name:?}: {reason}")))?;
            if !names.insert(Arc::clone(&one.name)) {
                return Err(wrong(format!("tenant {name:?} is defined twice")));
            }
            tenants.push(one);
        }
        Ok(Tenants(tenants))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &OneTenant> {
        self.0.iter()
    }
}

/// Where and what, without names and values that the file has: each may be a key that somebody put
/// into the wrong place.
fn blame(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let what = error.message().split(':').next().unwrap_or_default();
    // What is missing is a name of ours.
    let cut = if what.starts_with("missing field") { what } else { before_quote(what) };
    format!("line {line}: {cut}")
}

fn before_quote(text: &str) -> &str {
    text.split('`').next().unwrap_or_default().trim_end()
}

fn check(entry: Entry, folder: &Path, seen: &mut HashSet<KeyHash>) -> Result<OneTenant, String> {
    if entry.name.is_empty() || entry.name.len() > NAME_BYTES_MAX {
        return Err(format!("`name` must have 1 to {NAME_BYTES_MAX} bytes"));
    }
    if entry.name.chars().any(char::is_control) {
        return Err("`name` must not contain control characters".to_owned());
    }
    if entry.name == ANONYMOUS {
        return Err("`name` is reserved for callers without a key; choose another one".to_owned());
    }
    let limits = [
        ("requests_per_minute", entry.requests_per_minute),
        ("tokens_per_minute", entry.tokens_per_minute),
        ("running_requests_max", entry.running_requests_max.map(u64::from)),
    ];
    if let Some((field, _)) = limits.iter().find(|(_, limit)| *limit == Some(0)) {
        return Err(format!("`{field}` must be at least 1; to block a tenant, remove its keys"));
    }
    let standing = standing(&entry)?;
    let mut keys = Vec::with_capacity(entry.keys.len());
    for (index, key) in entry.keys.iter().enumerate() {
        let hash = hash_of(key, folder).map_err(|reason| format!("`keys[{index}]`: {reason}"))?;
        if KEYS_OF_EVERYBODY.iter().any(|key| hash_key(key.as_bytes()) == hash) {
            return Err(format!("`keys[{index}]` is a well-known key; generate a new one"));
        }
        if !seen.insert(hash) {
            return Err(format!(
                "`keys[{index}]` is already defined for this tenant or another one"
            ));
        }
        keys.push(OneKey { hash, cache_class: key.cache_class });
    }
    let Entry { name, requests_per_minute, tokens_per_minute, running_requests_max, .. } = entry;
    let quotas = Quotas { requests_per_minute, tokens_per_minute, running_requests_max };
    Ok(OneTenant { name: name.into(), keys, quotas, standing })
}

fn standing(entry: &Entry) -> Result<Standing, String> {
    let default = Standing::default();
    let weight = entry.weight.unwrap_or(default.weight);
    if !(1..=WEIGHT_MAX).contains(&weight) {
        return Err(format!("`weight` must be between 1 and {WEIGHT_MAX}"));
    }
    let priority = entry.priority.unwrap_or(default.priority);
    let priority_max = entry.priority_max.unwrap_or(priority);
    if priority_max > priority {
        let (most, own) = (priority_max.name(), priority.name());
        return Err(format!("`priority_max` ({most}) must not be lower than `priority` ({own})"));
    }
    Ok(Standing { weight, priority, priority_max })
}

fn hash_of(key: &Key, folder: &Path) -> Result<KeyHash, String> {
    match (&key.sha256, &key.file) {
        (Some(hex), None) => {
            parse_hex(hex).ok_or_else(|| "`sha256` must have 64 hexadecimal digits".to_owned())
        }
        (None, Some(file)) => {
            let bytes = read_bounded(&folder.join(file), KEY_BYTES_MAX).map_err(blame_file)?;
            let key = bytes.trim_ascii();
            if key.is_empty() || !key.iter().all(u8::is_ascii_graphic) {
                return Err("the file must contain one key of visible ASCII characters".to_owned());
            }
            Ok(hash_key(key))
        }
        _ => Err("set either `sha256` or `file`".to_owned()),
    }
}

/// Without the path: it may be a key.
fn blame_file(error: ReadError) -> String {
    match error {
        ReadError::Io { source, .. } => format!("cannot read the file: {}", source.kind()),
        ReadError::TooLarge { bytes_max, .. } => {
            format!("the file has more than {bytes_max} bytes")
        }
    }
}

fn hash_key(key: &[u8]) -> KeyHash {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest(&SHA256, key).as_ref());
    hash
}

fn parse_hex(text: &str) -> Option<KeyHash> {
    let digits = text.as_bytes();
    if digits.len() != 64 || !digits.is_ascii() {
        return None;
    }
    let mut hash = [0; 32];
    for (byte, pair) in hash.iter_mut().zip(text.as_bytes().chunks(2)) {
        let pair = str::from_utf8(pair).ok()?;
        if !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return None;
        }
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    Some(hash)
}
