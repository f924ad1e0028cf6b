//! Runs one daemon: reads its configuration, gives it a runtime, and tells it when to end: at
//! SIGINT, SIGTERM or, when `up` started it, at the end of standard input. What a daemon does is
//! not known here.

use std::error::Error;
use std::io::Read;
use std::time::{Duration, Instant};

use kvasir_store_node::config::Keys;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::args::DaemonFlags;
use crate::config;

/// After standard input has closed a daemon may drain for this long; then it is ended. Nobody is
/// left to do that from outside.
const DRAIN_MAX: Duration = Duration::from_secs(10);

/// A second signal within this time is a duplicate of the first: tools often signal a process and its
/// process group.
pub(crate) const DUPLICATE_SIGNAL_WINDOW: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Kind {
    Conductor,
    StoreNode,
    Engine,
}

impl Kind {
    pub(crate) const ALL: [Kind; 3] = [Kind::Conductor, Kind::StoreNode, Kind::Engine];

    /// The subcommand, and the name of the configuration file.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Conductor => "conductor",
            Kind::StoreNode => "store-node",
            Kind::Engine => "engine",
        }
    }
}

pub(crate) fn run(kind: Kind, flags: &DaemonFlags) -> Result<(), Box<dyn Error>> {
    raise_file_limit();
    match kind {
        Kind::Conductor => {
            let config = config::load(&flags.config)?;
            block_on(flags, |shutdown| kvasir_conductor::run(config, shutdown))
        }
        Kind::StoreNode => {
            let mut config: kvasir_store_node::config::Config = config::load(&flags.config)?;
            config.object_store.keys = keys_of_environment();
            block_on(flags, |shutdown| kvasir_store_node::run(config, shutdown))
        }
        Kind::Engine => {
            let config = config::load(&flags.config)?;
            block_on(flags, |shutdown| kvasir_engine_reference::run(config, shutdown))
        }
    }
}

/// What requests to an object store are signed with, as other programs find it too.
#[expect(clippy::disallowed_methods, reason = "here, above all libraries, the environment is read")]
fn keys_of_environment() -> Option<Keys> {
    let value = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    Some(Keys {
        access_key_id: value("AWS_ACCESS_KEY_ID")?,
        secret_access_key: value("AWS_SECRET_ACCESS_KEY")?,
        session_token: value("AWS_SESSION_TOKEN"),
    })
}

/// A connection is a file, and accounts are often given 1,024 where thousands are allowed.
fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, ?limit, "the process cannot raise its limit of open files; raise it with `ulimit -n`");
    }
}

fn block_on<Daemon, Failure>(
    flags: &DaemonFlags,
    start: impl FnOnce(CancellationToken) -> Daemon,
) -> Result<(), Box<dyn Error>>
where
    Daemon: Future<Output = Result<(), Failure>>,
    Failure: Error + 'static,
{
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let shutdown = CancellationToken::new();
        let interrupt = signal(SignalKind::interrupt())?;
        let terminate = signal(SignalKind::terminate())?;
        tokio::spawn(end_at_signal(interrupt, terminate, shutdown.clone()));
        if flags.exit_with_stdin {
            end_with_stdin(shutdown.clone())?;
        }
        start(shutdown).await.map_err(|failure| Box::new(failure) as Box<dyn Error>)
    });
    // Blocking tasks that are still computing must not hold up the end.
    runtime.shutdown_background();
    outcome
}

/// The first signal drains, a later one ends the process at once.
async fn end_at_signal(mut interrupt: Signal, mut terminate: Signal, shutdown: CancellationToken) {
    let mut asked_at: Option<Instant> = None;
    loop {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        match asked_at {
            None => {
                asked_at = Some(Instant::now());
                tracing::info!("the process received a signal; draining");
                shutdown.cancel();
            }
            Some(asked_at) if asked_at.elapsed() < DUPLICATE_SIGNAL_WINDOW => {}
            Some(_) => {
                tracing::warn!("the process received a second signal; exiting without draining");
                std::process::exit(130);
            }
        }
    }
}

fn end_with_stdin(shutdown: CancellationToken) -> std::io::Result<()> {
    std::thread::Builder::new().name("stdin".into()).spawn(move || {
        let mut ignored = [0u8; 64];
        let mut stdin = std::io::stdin().lock();
        loop {
            match stdin.read(&mut ignored) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        tracing::info!("standard input of the process closed; draining");
        shutdown.cancel();
        std::thread::sleep(DRAIN_MAX);
        tracing::error!("the process did not drain in time; exiting");
        std::process::exit(1);
    })?;
    Ok(())
}
