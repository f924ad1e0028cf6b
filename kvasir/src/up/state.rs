//! `state.json` in the run folder: which processes there are and where they answer, for people,
//! scripts and tests. Replaced whole, so that a reader never sees half of it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::Serialize;

#[derive(Debug, Serialize)]
pub(crate) struct State {
    /// Of `kvasir up` itself.
    pub pid: u32,
    /// The base of the OpenAI API, without a path.
    pub url: String,
    /// Where the conductor shows what it decided, for `kvasir explain`, `kvasir top` and browsers.
    pub monitor: String,
    pub model: String,
    /// Whether the cluster has been ready since it started.
    pub ready: bool,
    pub processes: BTreeMap<String, ProcessState>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ProcessState {
    pub kind: &'static str,
    /// Absent while it waits to be started again.
    pub pid: Option<u32>,
    pub restarts: u32,
    pub address: SocketAddr,
    pub metrics: String,
    /// Other ports that it listens on.
    pub other_addresses: Vec<SocketAddr>,
    pub config: PathBuf,
    pub log: PathBuf,
}

impl State {
    pub(crate) fn path(run_dir: &Path) -> PathBuf {
        run_dir.join("state.json")
    }

    pub(crate) fn write(&self, run_dir: &Path) -> std::io::Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::other)?;
        let unfinished = run_dir.join("state.json.new");
        std::fs::write(&unfinished, text + "\n")?;
        std::fs::rename(unfinished, Self::path(run_dir))
    }
}
