//! `kvasir doctor`: what this host offers, what the transfer engine would choose and why, and what
//! the chosen ways really carry.
//!
//! 1. [`host`] with its [`pages`], [`devices`], [`libraries`]: facts, each read from the system or asked of a library that is
//!    opened at run time
//! 2. [`choice`]: what the engine would use to reach a peer, from those facts
//! 3. [`probe`]: measured, on this host alone or between two ([`pair`])
//! 4. [`report`]: how it is told, as text or JSON
//! 5. [`attention`]: another question altogether, whether attention kernels compute what they should
//!
//! What is missing is a sentence that says what it is good for and how to get it, never a failure:
//! only a probe that was asked for and could not be made ends in an error.

mod attention;
mod choice;
mod devices;
mod files;
mod host;
mod libraries;
mod pages;
mod pair;
mod probe;
mod report;

use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use kvasir_transfer::EfaConfig;

use crate::output::{print, say};
use report::Report;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Flags {
    /// Print JSON instead of text.
    #[arg(long)]
    pub json: bool,

    /// Do not measure.
    #[arg(long, conflicts_with_all = ["serve", "peer"])]
    pub no_probe: bool,

    /// Wait at this address for the other half of a measurement between two hosts, which `--peer` starts. Every
    /// process that reaches the port can measure, one after another. The port serves no other purpose.
    #[arg(long, value_name = "ADDRESS:PORT", conflicts_with_all = ["peer", "json"])]
    pub serve: Option<SocketAddr>,

    /// Measure the connection to the host on which `kvasir doctor --serve` waits.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub peer: Option<SocketAddr>,

    /// libfabric's provider for the measurement of EFA. "tcp" and "shm" need no EFA device.
    #[arg(long, value_name = "NAME", default_value = "efa")]
    pub efa_provider: String,

    /// Only check the attention kernels of this processor against files of reference vectors, which
    /// `tests/data/mla_partial/generate.py` creates. The command fails if a kernel exceeds its tolerance.
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["json", "no_probe", "serve", "peer"])]
    pub attention: Vec<PathBuf>,
}

impl Flags {
    fn efa(&self) -> EfaConfig {
        EfaConfig { provider: self.efa_provider.clone(), ..EfaConfig::default() }
    }
}

pub(crate) fn run(flags: &Flags, temporary: &Path) -> Result<(), Box<dyn Error>> {
    if !flags.attention.is_empty() {
        return attention::run(&flags.attention);
    }
    let efa = flags.efa();
    if let Some(address) = flags.serve {
        return pair::serve(address, &efa, temporary);
    }
    let root = Path::new("/");
    let found = devices::read(root);
    let mut report = Report::default();
    report.sections.push(host::section(root));
    report.sections.push(devices::section(root, &found));
    report.sections.push(devices::topology(&found));
    report.sections.push(libraries::section(&found));
    report.sections.push(choice::section(&found));
    if let Some(peer) = flags.peer {
        let mut measured = pair::probe(peer, &efa, temporary)?;
        report.sections.extend(measured.section());
        report.probes.extend(measured.probes);
    } else if !flags.no_probe {
        if !flags.json {
            say("measuring for a few seconds …\n");
        }
        report.probes.extend(probe::loopback(&efa, temporary)?);
    }
    if flags.json {
        say(&serde_json::to_string_pretty(&report)?);
    } else {
        print(&report.to_string());
    }
    Ok(())
}
