//! A model's fingerprint: what requests must agree on to share cached rows.

#![forbid(unsafe_code)]

use std::path::Path;

use super::ModelError;
use super::files::WeightFiles;

/// Up to this size every byte of the weight files counts.
const WHOLE_BYTES_MAX: u64 = 1 << 30;
/// Beyond it, of every 16 MiB the first 64 KiB: some 4 MB of each GB, and every header.
const SAMPLE_EVERY_BYTES: u64 = 16 << 20;
const SAMPLE_BYTES: u64 = 64 << 10;

/// BLAKE3 over config.json and the weight files in order of their names, each with its name and
/// length. Weights of more than 1 GiB together are sampled: two fine-tunings of one model differ
/// all over, while a file that was changed in a few places by hand could pass for another.
pub(super) fn fingerprint(dir: &Path, weights: &WeightFiles) -> Result<[u8; 32], ModelError> {
    let mut hasher = blake3::Hasher::new_derive_key("kvasir 2026 model fingerprint v1");
    let path = dir.join("config.json");
    let config = std::fs::read(&path).map_err(|source| ModelError::Read { path, source })?;
    hasher.update(&(config.len() as u64).to_le_bytes()).update(&config);

    let total: u64 = weights.files().iter().map(|file| file.bytes).sum();
    let (every, sample) = if total <= WHOLE_BYTES_MAX {
        (SAMPLE_BYTES, SAMPLE_BYTES)
    } else {
        (SAMPLE_EVERY_BYTES, SAMPLE_BYTES)
    };
    let mut buffer = vec![0; sample as usize];
    for file in weights.files() {
        let name = file.path.file_name().unwrap_or_default().as_encoded_bytes();
        hasher.update(&(name.len() as u64).to_le_bytes()).update(name);
        hasher.update(&file.bytes.to_le_bytes());
        let mut hash = |from: u64, to: u64| -> Result<(), ModelError> {
            let buffer = &mut buffer[..(to - from) as usize];
            file.read_at(buffer, from)?;
            hasher.update(buffer);
            Ok(())
        };
        for from in (0..file.data_at).step_by(sample as usize) {
            hash(from, (from + sample).min(file.data_at))?;
        }
        for from in (file.data_at..file.bytes).step_by(every as usize) {
            hash(from, (from + sample).min(file.bytes))?;
        }
    }
    Ok(hasher.finalize().into())
}
