//! What can be known to fail before anything is started: a model that is not there or not of a
//! kind that the engine computes, a machine with too little memory, folders that cannot be used.
//! Each answer is one sentence.

use std::path::{Path, PathBuf};

use kvasir_engine_reference::Config as EngineConfig;
use kvasir_engine_reference::model::Model;
use kvasir_store_node::config::{ARENA_SLOTS_MIN, Config as NodeConfig};

use super::flags::{Engines, Flags, HOST_PAGE_BYTES};
use crate::memory::{available_bytes, reserved_bytes};
use crate::output::sentence;

const BUNDLED_MODEL: &str = "configs/models/tiny-deepseek-v2";

/// A daemon without its arena and its model.
const MEMORY_PER_PROCESS_BYTES: u64 = 32 << 20;

#[derive(Debug, thiserror::Error)]
pub(super) enum PreflightError {
    #[error("the model {} is not a directory; set --model to the directory of a model", path.display())]
    NoModel { path: PathBuf },
    #[error(
        "cannot find the bundled model in {}; choose a model with --model DIR",
        looked_in.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" or ")
    )]
    NoBundledModel { looked_in: Vec<PathBuf> },
    #[error("cannot serve the model in {}: {reason}", path.display())]
    Unsupported { path: PathBuf, reason: String },
    #[error(
        "{engines} engines with --dram-bytes {dram_bytes} need about {needed_mib} MiB of memory, \
         but only {available_mib} MiB are available; use a smaller --dram-bytes or fewer engines"
    )]
    TooLittleMemory { engines: u32, dram_bytes: u64, needed_mib: u64, available_mib: u64 },
    #[error(
        "--dram-bytes {dram_bytes} has room for {slots} blocks of this model, but an engine needs \
         at least {ARENA_SLOTS_MIN}; use {wanted} or more"
    )]
    SmallArena { dram_bytes: u64, slots: u64, wanted: u64 },
}

/// The model to serve, as an absolute path.
pub(super) fn find_model(flags: &Flags) -> Result<PathBuf, PreflightError> {
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

/// Whether the engines can compute the model, whether an arena holds enough of its blocks, and
/// whether there is memory for all of them.
pub(super) fn check_model(
    flags: &Flags,
    engines: Engines,
    model: &Path,
) -> Result<(), PreflightError> {
    let description = Model::describe(model).map_err(|error| PreflightError::Unsupported {
        path: model.into(),
        reason: sentence(&error),
    })?;
    let block_tokens = EngineConfig::default().block_tokens;
    let slot_bytes = description.config.layout(block_tokens, flags.kv_dtype()).slot_bytes();
    check_arena(flags.dram_bytes, slot_bytes)?;
    let need = Need {
        dram_bytes: flags.dram_bytes,
        tail_bytes: NodeConfig::default().tail_bytes,
        weights_bytes: description.memory_bytes,
    };
    let (needed, available) = (need.total(engines, reserved_bytes()), available_bytes());
    if needed > available {
        return Err(PreflightError::TooLittleMemory {
            engines: engines.total(),
            dram_bytes: flags.dram_bytes,
            needed_mib: needed >> 20,
            available_mib: available >> 20,
        });
    }
    Ok(())
}

fn check_arena(dram_bytes: u64, slot_bytes: u64) -> Result<(), PreflightError> {
    let slots = dram_bytes / slot_bytes;
    if slots >= u64::from(ARENA_SLOTS_MIN) {
        return Ok(());
    }
    let wanted =
        slot_bytes.saturating_mul(ARENA_SLOTS_MIN.into()).next_multiple_of(HOST_PAGE_BYTES);
    Err(PreflightError::SmallArena { dram_bytes, slots, wanted })
}

/// What one engine and its node take.
#[derive(Debug, Clone, Copy)]
struct Need {
    dram_bytes: u64,
    tail_bytes: u64,
    weights_bytes: u64,
}

impl Need {
    /// Beside arenas that find room in reserved pages.
    fn total(self, engines: Engines, reserved_bytes: u64) -> u64 {
        let arenas = u64::from(engines.total());
        let in_reserved = reserved_bytes / self.dram_bytes.max(1);
        self.tail_bytes
            .saturating_add(self.weights_bytes)
            .saturating_add(2 * MEMORY_PER_PROCESS_BYTES)
            .saturating_mul(arenas)
            .saturating_add(self.dram_bytes.saturating_mul(arenas.saturating_sub(in_reserved)))
            .saturating_add(MEMORY_PER_PROCESS_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_need_grows_with_arena_weights_and_engines_and_never_wraps() {
        let engines = |prefill| Engines { prefill, decode: 1, both: 0 };
        let need = Need { dram_bytes: 100, tail_bytes: 7, weights_bytes: 10 };
        let process = MEMORY_PER_PROCESS_BYTES;
        assert_eq!(need.total(engines(1), 0), 2 * 117 + 5 * process);
        assert_eq!(need.total(engines(2), 0), 3 * 117 + 7 * process);
        assert_eq!(Need { dram_bytes: u64::MAX, ..need }.total(engines(1), 0), u64::MAX);
        assert_eq!(need.total(engines(2), 199), 2 * 100 + 3 * 17 + 7 * process);
        assert_eq!(need.total(engines(2), 1_000), 3 * 17 + 7 * process);
    }

    #[test]
    fn an_arena_holds_as_many_blocks_as_an_engine_needs() {
        let slots = u64::from(ARENA_SLOTS_MIN);
        assert!(check_arena(slots * 1000, 1000).is_ok());
        let error = check_arena(slots * 1000 - 1, 1000).unwrap_err().to_string();
        assert!(error.contains(&(slots * 1000).next_multiple_of(4096).to_string()), "{error}");
    }
}
