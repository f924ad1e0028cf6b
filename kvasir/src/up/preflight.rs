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
    #[error("the model {} is not a directory; set --model-dir to the directory of a model", path.display())]
    NoModel { path: PathBuf },
    #[error(
        "cannot find the bundled model in {}; choose a model with --model-dir DIR",
        looked_in.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" or ")
    )]
    NoBundledModel { looked_in: Vec<PathBuf> },
    #[error("cannot serve the model in {}: {reason}", path.display())]
    Unsupported { path: PathBuf, reason: String },
    #[error(
        "{engines} engines on {nodes} store nodes with --dram-bytes {dram_bytes} need about \
         {needed_mib} MiB of memory, but only {available_mib} MiB are available; use a smaller \
         --dram-bytes or fewer engines"
    )]
    TooLittleMemory {
        engines: u32,
        nodes: u32,
        dram_bytes: u64,
        needed_mib: u64,
        available_mib: u64,
    },
    #[error(
        "--dram-bytes {dram_bytes} has room for {slots} blocks of this model, but an engine needs \
         at least {ARENA_SLOTS_MIN}; use {wanted} or more"
    )]
    SmallArena { dram_bytes: u64, slots: u64, wanted: u64 },
}

/// The model to serve, as an absolute path.
pub(super) fn find_model(flags: &Flags) -> Result<PathBuf, PreflightError> {
    match &flags.model_dir {
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
        engines: engines.total(),
        nodes: engines.nodes(flags.engines_per_node),
        dram_bytes: flags.dram_bytes,
        tail_bytes: NodeConfig::default().tail_bytes,
        weights_bytes: description.memory_bytes,
    };
    let (needed, available) = (need.total(reserved_bytes()), available_bytes());
    if needed > available {
        return Err(PreflightError::TooLittleMemory {
            engines: need.engines,
            nodes: need.nodes,
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

/// The memory that a cluster needs, by its parts.
#[derive(Debug, Clone, Copy)]
struct Need {
    engines: u32,
    nodes: u32,
    /// The arena of one node.
    dram_bytes: u64,
    /// The tail space of one node.
    tail_bytes: u64,
    /// The weights that one engine loads.
    weights_bytes: u64,
}

impl Need {
    /// Bytes, without the arenas that fit into reserved huge pages.
    fn total(self, reserved_bytes: u64) -> u64 {
        let (engines, nodes) = (u64::from(self.engines), u64::from(self.nodes));
        let in_reserved = reserved_bytes / self.dram_bytes.max(1);
        let conductor = 1;
        let processes = conductor + engines + nodes;
        (self.weights_bytes.saturating_mul(engines))
            .saturating_add(self.tail_bytes.saturating_mul(nodes))
            .saturating_add(self.dram_bytes.saturating_mul(nodes.saturating_sub(in_reserved)))
            .saturating_add(MEMORY_PER_PROCESS_BYTES.saturating_mul(processes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_need_counts_arenas_per_node_and_weights_per_engine_and_never_wraps() {
        let need = Need { engines: 2, nodes: 2, dram_bytes: 100, tail_bytes: 7, weights_bytes: 10 };
        let process = MEMORY_PER_PROCESS_BYTES;
        assert_eq!(need.total(0), 2 * 117 + 5 * process);
        assert_eq!(Need { engines: 3, nodes: 3, ..need }.total(0), 3 * 117 + 7 * process);
        assert_eq!(Need { engines: 4, ..need }.total(0), 2 * 107 + 4 * 10 + 7 * process);
        assert_eq!(Need { dram_bytes: u64::MAX, ..need }.total(0), u64::MAX);
        assert_eq!(need.total(199), 100 + 2 * 17 + 5 * process);
        assert_eq!(need.total(1_000), 2 * 17 + 5 * process);
    }

    #[test]
    fn an_arena_holds_as_many_blocks_as_an_engine_needs() {
        let slots = u64::from(ARENA_SLOTS_MIN);
        assert!(check_arena(slots * 1000, 1000).is_ok());
        let error = check_arena(slots * 1000 - 1, 1000).unwrap_err().to_string();
        assert!(error.contains(&(slots * 1000).next_multiple_of(4096).to_string()), "{error}");
    }
}
