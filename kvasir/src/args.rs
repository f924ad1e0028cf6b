//! The command line, without the flags of `up` and `doctor`, which stand beside their
//! meaning.

use std::path::PathBuf;

use crate::admin::Flags as AdminFlags;
use crate::daemon;
use crate::demo::Demo;
use crate::doctor::Flags as DoctorFlags;
use crate::replay::Flags as ReplayFlags;
use crate::up::flags::Flags as UpFlags;
use crate::watch::{ExplainFlags, TopFlags};

/// Disaggregated KV-cache serving for large language models.
#[derive(Debug, clap::Parser)]
#[command(name = "kvasir", version, after_help = "Start with `kvasir up`.")]
pub(crate) struct Cli {
    /// What to log, as in `info` or `warn,kvasir_conductor=debug`. Without it the variable
    /// RUST_LOG is read; without that it is `info`, or `warn` where a command prints an
    /// answer.
    #[arg(long, global = true, value_name = "FILTER")]
    pub log: Option<String>,

    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Runs a whole cluster on this machine, each part a process of its own.
    Up(Box<UpFlags>),
    /// Runs a conductor: the scheduler and the OpenAI-compatible front door.
    Conductor(DaemonFlags),
    /// Runs a store node: the daemon that owns a host's part of the cache.
    StoreNode(DaemonFlags),
    /// Runs a reference engine, which computes a DeepSeek-V2 model on the CPU.
    Engine(DaemonFlags),
    /// Prints the reference configuration of a daemon: every key with its meaning and default.
    Config(ConfigFlags),
    /// Says what this host offers, what the transfer engine would choose, and measures it.
    Doctor(DoctorFlags),
    /// Shows on a cluster of its own what is decided, beside what is measured.
    Demo {
        #[command(subcommand)]
        demo: Demo,
    },
    /// Replays a trace of requests over a cluster that a file describes, in virtual time, and says
    /// how its users would have fared.
    Replay(Box<ReplayFlags>),
    /// Says why requests went where they went, and why they missed their cache.
    Explain(ExplainFlags),
    /// Shows nodes, engines, queues and the latest decisions, again and again.
    Top(TopFlags),
    /// Looks into a running store node, pins and evicts blocks, and drains it.
    Admin(AdminFlags),
}

#[derive(Debug, clap::Args)]
pub(crate) struct DaemonFlags {
    /// The configuration file; `kvasir config` prints what may stand in it.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,

    /// Ends when standard input is closed: how `up` makes sure that nothing outlives it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ConfigFlags {
    /// Which daemon; all of them when left out.
    pub daemon: Option<daemon::Kind>,

    /// Writes `DIR/conductor.toml`, `DIR/store-node.toml` and `DIR/engine.toml` instead of
    /// printing.
    #[arg(long, value_name = "DIR")]
    pub write: Option<PathBuf>,
}
