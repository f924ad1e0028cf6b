//! The one binary. `up` runs a whole cluster on this machine; `conductor`, `store-node` and
//! `engine` are the daemons it starts, each also for use alone; `config` prints the reference
//! configuration of a daemon, `doctor` says what a host offers, `admin` looks into a store node and
//! drains it, `explain` and `top` ask a conductor what it did and does, `replay` says what a cluster
//! would do with a trace, `demo` shows on a cluster of its own what it decides beside what it measures. Nothing below this file reads the environment.
#![forbid(unsafe_code)]

mod admin;
mod args;
mod config;
mod daemon;
mod demo;
mod doctor;
mod http;
mod memory;
mod output;
mod replay;
mod up;
mod watch;

use std::error::Error;
use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use args::{Cli, Command};

/// Why: docs/decisions/0040-the-binary-uses-mimalloc.md.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// What is logged when neither `--log` nor `RUST_LOG` says otherwise: of daemons, and of commands whose
/// answer is what they print.
const LOG_DEFAULT: &str = "info";
const LOG_DEFAULT_OF_ANSWERS: &str = "warn";

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Err(sentence) = start_logging(cli.log.as_deref(), default_filter(&cli.command)) {
        output::complain(&sentence);
        return ExitCode::from(2);
    }
    let outcome = match cli.command {
        Command::Up(flags) => setting(cli.log).and_then(|setting| up::run(&flags, setting)),
        Command::Demo { demo } => setting(cli.log).and_then(|setting| demo::run(&demo, &setting)),
        Command::Conductor(flags) => daemon::run(daemon::Kind::Conductor, &flags),
        Command::StoreNode(flags) => daemon::run(daemon::Kind::StoreNode, &flags),
        Command::Engine(flags) => daemon::run(daemon::Kind::Engine, &flags),
        Command::Config(flags) => config::print(&flags),
        Command::Doctor(flags) => doctor::run(&flags, &std::env::temp_dir()),
        Command::Replay(flags) => replay::run(&flags),
        Command::Admin(flags) => admin::run(&flags),
        Command::Explain(flags) => watch::explain(&flags),
        Command::Top(flags) => watch::top(&flags),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::complain(&output::sentence(failure.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn setting(log_filter: Option<String>) -> Result<up::Setting, Box<dyn Error>> {
    let (temporary, program) = (std::env::temp_dir(), std::env::current_exe()?);
    Ok(up::Setting { log_filter, temporary, program, quiet: false })
}

fn default_filter(command: &Command) -> &'static str {
    match command {
        Command::Up(_) | Command::Conductor(_) | Command::StoreNode(_) | Command::Engine(_) => {
            LOG_DEFAULT
        }
        _ => LOG_DEFAULT_OF_ANSWERS,
    }
}

fn start_logging(flag: Option<&str>, default: &str) -> Result<(), String> {
    let filter = match flag {
        Some(directives) => EnvFilter::try_new(directives)
            .map_err(|error| format!("--log {directives:?} is not a log filter: {error}"))?,
        None => EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default)),
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}
