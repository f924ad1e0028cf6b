//! What can be known to fail before anything is started: a model that is not there or not of a
//! kind that the engine computes, a machine with too little memory, folders that cannot be used.
//! Each answer is one sentence.

use std::path::{Path, PathBuf};

use kvasir_engine_reference::model::Model;
use kvasir_store_node::Config as NodeConfig;

use super::flags::{Engines, Flags};
use crate::output::sentence;

const BUNDLED_MODEL: &str = "configs/models/tiny-deepseek-v2";

/// A daemon without its arena and its model.
const MEMORY_PER_PROCESS_BYTES: u64 = 32 << 20;

#[derive(Debug, thiserror::Error)]
pub enum PreflightError {
    #[error("there is no model folder {}", path.display())]
    NoModel { path: PathBuf },
    #[error(
        "the bundled model was not found in {}; say which model to serve with --model DIR",
        looked_in.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" or ")
    )]
    NoBundledModel { looked_in: Vec<PathBuf> },
    #[error("the model in {} cannot be served: {reason}", path.display())]
    Unsupported { path: PathBuf, reason: String },
    #[error(
        "{engines} engines with --arena-bytes {arena_bytes} need about {needed_mib} MiB of memory, \
         and {available_mib} MiB are available: take a smaller --arena-bytes or fewer engines"
    )]
    TooLittleMemory { engines: u32, arena_bytes: u64, needed_mib: u64, available_mib: u64 },
}

/// The model to serve, as an absolute path.
pub fn find_model(flags: &Flags) -> Result<PathBuf, PreflightError> {
    match &flags.model {
        Some(path) => {
            absolute_folder(path).ok_or_else(|| PreflightError::NoModel { path: path.clone() })
        }
        None => {
            let looked_in = vec![
                Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(BUNDLED_MODEL),
                PathBuf::from(BUNDLED_MODEL),
            ];
            looked_in
                .iter()
                .find_map(|path| absolute_folder(path))
                .ok_or(PreflightError::NoBundledModel { looked_in })
        }
    }
}

fn absolute_folder(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok().filter(|path| path.is_dir())
}

/// Whether the engines can compute the model, and whether there is memory for all of them.
pub fn check_model(flags: &Flags, engines: Engines, model: &Path) -> Result<(), PreflightError> {
    let description = Model::describe(model).map_err(|error| PreflightError::Unsupported {
        path: model.into(),
        reason: sentence(&error),
    })?;
    let need = Need {
        arena_bytes: flags.arena_bytes,
        tail_bytes: NodeConfig::default().tail_bytes,
        weights_bytes: description.memory_bytes,
    };
    let (needed, available) = (need.total(engines), available_bytes());
    if needed > available {
        return Err(PreflightError::TooLittleMemory {
            engines: engines.total(),
            arena_bytes: flags.arena_bytes,
            needed_mib: needed >> 20,
            available_mib: available >> 20,
        });
    }
    Ok(())
}

/// What one engine and its node take.
#[derive(Debug, Clone, Copy)]
struct Need {
    arena_bytes: u64,
    tail_bytes: u64,
    weights_bytes: u64,
}

impl Need {
    fn total(self, engines: Engines) -> u64 {
        self.arena_bytes
            .saturating_add(self.tail_bytes)
            .saturating_add(self.weights_bytes)
            .saturating_add(2 * MEMORY_PER_PROCESS_BYTES)
            .saturating_mul(u64::from(engines.total()))
            .saturating_add(MEMORY_PER_PROCESS_BYTES)
    }
}

/// The lesser of what the machine and what the control group has left. A machine that does not
/// say has enough: the arena is touched at the start and its failure is said there.
fn available_bytes() -> u64 {
    let machine = std::fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| meminfo_bytes(&text, "MemAvailable:"));
    let read = |name: &str| std::fs::read_to_string(Path::new("/sys/fs/cgroup").join(name)).ok();
    let group = read("memory.max")
        .and_then(|limit| limit.trim().parse::<u64>().ok())
        .zip(read("memory.current").and_then(|used| used.trim().parse::<u64>().ok()))
        .map(|(limit, used)| limit.saturating_sub(used));
    [machine, group].into_iter().flatten().min().unwrap_or(u64::MAX)
}

fn meminfo_bytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_need_grows_with_arena_weights_and_engines_and_never_wraps() {
        let engines = |prefill| Engines { prefill, decode: 1, both: 0 };
        let need = Need { arena_bytes: 100, tail_bytes: 7, weights_bytes: 10 };
        let process = MEMORY_PER_PROCESS_BYTES;
        assert_eq!(need.total(engines(1)), 2 * 117 + 5 * process);
        assert_eq!(need.total(engines(2)), 3 * 117 + 7 * process);
        assert_eq!(Need { arena_bytes: u64::MAX, ..need }.total(engines(1)), u64::MAX);
    }

    #[test]
    fn available_memory_is_read_from_meminfo() {
        let text = "MemTotal:       24 kB\nMemAvailable:       12 kB\n";
        assert_eq!(meminfo_bytes(text, "MemAvailable:"), Some(12 * 1024));
        assert_eq!(meminfo_bytes("", "MemAvailable:"), None);
    }
}
