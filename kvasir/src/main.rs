//! The `kvasir` binary. `up` runs a whole cluster on this machine. `conductor`, `store-node` and `engine` are its daemons.
//! `config` prints the reference configuration of a daemon, `doctor` checks a host, `admin` inspects and drains a store
//! node, `explain` and `top` show the decisions and the load of a conductor, `replay` simulates a cluster with a trace, and
//! `demo` compares a cluster's decisions with measurements. No module below this file reads the environment.
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
use std::process::ExitCode;

use clap::Parser;
use kvasir_process::start_logging;

use args::{Cli, Command};

/// The log filter if neither `--log` nor `RUST_LOG` sets one: of daemons, and of commands that print their result.
const LOG_DEFAULT: &str = "info";
const LOG_DEFAULT_OF_ANSWERS: &str = "warn";

fn main() -> ExitCode {
    let cli = Cli::parse();
    #[expect(clippy::disallowed_methods, reason = "only this function reads the environment")]
    let environment = std::env::var("RUST_LOG").ok();
    let (source, filter) = match (&cli.log, &environment) {
        (Some(flag), _) => ("--log", flag.as_str()),
        (None, Some(variable)) => ("RUST_LOG", variable.as_str()),
        (None, None) => ("the default", default_filter(&cli.command)),
    };
    if let Err(sentence) = start_logging(source, filter) {
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
