//! The command line. The flags of each command are next to its code.

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
    /// Log filter, as in `info` or `warn,kvasir_conductor=debug`. The default is the variable
    /// RUST_LOG; without that, `info` for daemons and `warn` for other commands.
    #[arg(long, global = true, value_name = "FILTER")]
    pub log: Option<String>,

    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Run a cluster on this machine, with a process for each component.
    Up(Box<UpFlags>),
    /// Run a conductor: the scheduler and the OpenAI-compatible front door.
    Conductor(DaemonFlags),
    /// Run a store node: the daemon that owns the cache of one host.
    StoreNode(DaemonFlags),
    /// Run a reference engine, which computes a DeepSeek-V2 model on the CPU.
    Engine(DaemonFlags),
    /// Print the reference configuration of a daemon: every key with its meaning and default.
    Config(ConfigFlags),
    /// Report the hardware of this host and the transports that Kvasir would use, and measure them.
    Doctor(DoctorFlags),
    /// Start a cluster and compare the decisions of the conductor with measurements.
    Demo {
        #[command(subcommand)]
        demo: Demo,
    },
    /// Simulate a trace of requests on a cluster that a file describes, in virtual time, and report latencies
    /// and hit ratios.
    Replay(Box<ReplayFlags>),
    /// Explain the placement of requests and their cache misses.
    Explain(ExplainFlags),
    /// Show nodes, engines, queues and the latest decisions, and refresh them.
    Top(TopFlags),
    /// Inspect a running store node, pin and evict blocks, and drain it.
    Admin(AdminFlags),
}

#[derive(Debug, clap::Args)]
pub(crate) struct DaemonFlags {
    /// The configuration file. `kvasir config` prints all keys.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,

    /// Exit when standard input is closed, so that no process outlives `up`.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ConfigFlags {
    /// The daemon. The default is all of them.
    pub daemon: Option<daemon::Kind>,

    /// Write `DIR/conductor.toml`, `DIR/store-node.toml` and `DIR/engine.toml` instead of
    /// printing them.
    #[arg(long, value_name = "DIR")]
    pub write: Option<PathBuf>,
}
