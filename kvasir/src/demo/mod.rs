//! `kvasir demo`: shows on one machine what the cluster decides, beside what was measured.
//!
//! `agents`: a document is cached on one node, and agents on another one fork it, each with a question of its
//! own. Attending the document where it is, fetching it and computing it again are each measured by force, and
//! then the conductor decides. All of it goes through the front door of a cluster that `up` starts.
//!
//! 1. [`grid`]: what is varied
//! 2. [`asking`]: the cluster as a client meets it
//! 3. [`measure`]: one cell of the grid
//! 4. [`report`]: the table, the plot and the JSON object

mod asking;
mod grid;
mod measure;
mod report;

use std::error::Error;
use std::path::PathBuf;

use clap::Parser;
use kvasir_engine_reference::model::ModelConfig;

use crate::output::{complain, print, say};
use crate::up;
use asking::Asking;
use grid::{Grid, Wire};
use measure::{Measured, Model};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Demo {
    /// Agents fork a long document that is cached on another node: route queries to it, fetch it, or recompute it.
    Agents(Box<AgentsFlags>),
}

#[derive(Debug, clap::Args)]
pub(crate) struct AgentsFlags {
    /// Measure a few small cases, once each.
    #[arg(long)]
    quick: bool,

    /// Transports between nodes: shm, tcp, or tcp with a limit of the bytes that each side sends per second, as in
    /// tcp:20MiB. One or several.
    #[arg(long, value_name = "TRANSPORT", value_delimiter = ',')]
    transport: Vec<Wire>,

    /// Length of the document in tokens.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    document: Vec<u32>,

    /// Number of concurrent agents.
    #[arg(long, value_name = "N", value_delimiter = ',')]
    agents: Vec<u32>,

    /// Length of each answer in tokens.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    answer: Vec<u32>,

    /// Repetitions of each case; the medians are reported. The default is 3.
    #[arg(long, value_name = "TIMES")]
    repeat: Option<u32>,

    /// Directory of a model in Hugging Face format. The default is the bundled model.
    #[arg(long, value_name = "DIR")]
    model_dir: Option<PathBuf>,

    /// Print only one JSON object.
    #[arg(long)]
    json: bool,

    /// Write the measured times to an SVG file.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// The engine whose node has the document, and those of the agents: each alternative needs one that has
/// nothing of the document.
const ENGINES: u32 = 4;

pub(crate) fn run(demo: &Demo, setting: &up::Setting) -> Result<(), Box<dyn Error>> {
    let Demo::Agents(flags) = demo;
    let grid = Grid::of(flags)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut cells = Vec::new();
    for wire in &grid.wires {
        let measured = runtime.block_on(Box::pin(run_wire(flags, &grid, wire, setting)))?;
        cells.extend(measured);
    }
    if let Some(path) = &flags.plot {
        std::fs::write(path, report::plot(&cells))
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    }
    match flags.json {
        true => say(&serde_json::to_string_pretty(&report::json(&cells))?),
        false => print(&report::text(&cells)),
    }
    report::check(&cells).map_err(Into::into)
}

/// All cells of one wire, on a cluster of its own.
async fn run_wire(
    flags: &AgentsFlags,
    grid: &Grid,
    wire: &Wire,
    setting: &up::Setting,
) -> Result<Vec<Measured>, Box<dyn Error>> {
    let mut line = ClusterLine::try_parse_from(wire.cluster_flags())?;
    line.flags.model_dir.clone_from(&flags.model_dir);
    let setting = up::Setting { quiet: true, ..setting.clone() };
    let worked = up::run_for(&line.flags, setting, async |cluster| {
        let model = Model::of(&ModelConfig::read(&cluster.model)?);
        let mut asking = Asking::new(&cluster.state, model.vocab)?;
        if !flags.json {
            complain(&format!(
                "{}: {} cases, {} repetitions each",
                wire.name, grid.cells, grid.repeat
            ));
        }
        asking.wait_for_engines(ENGINES).await?;
        measure::warm_up(&mut asking, &model).await?;
        let mut cells = Vec::new();
        for cell in grid.cells_of(wire) {
            let measured = measure::cell(&mut asking, &model, &cell, grid.repeat).await?;
            if !flags.json {
                complain(&report::progress(&measured));
            }
            cells.push(measured);
        }
        Ok(cells)
    });
    worked.await?.ok_or_else(|| "interrupted".into())
}

/// As `up` would be asked for it.
#[derive(Debug, clap::Parser)]
struct ClusterLine {
    #[command(flatten)]
    flags: up::flags::Flags,
}
