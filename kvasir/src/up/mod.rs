//! `kvasir up`: a whole cluster on this machine, each part a process of its own.
//!
//! 1. [`flags`]: what was asked for
//! 2. [`preflight`]: what can be known to fail before anything starts, and [`run_dir`]
//! 3. [`plan`]: every process with its addresses ([`ports`]) and configuration
//! 4. [`supervise`]: starts, watches and ends the processes ([`child`], [`backoff`])
//! 5. this file: the order of it all, and what is said to the person at the terminal
//!
//! What must hold: nothing is half up, and nothing outlives `up`.

mod backoff;
mod child;
pub(crate) mod flags;
mod plan;
mod ports;
mod preflight;
mod run_dir;
mod state;
mod supervise;
mod welcome;

use std::error::Error;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use crate::daemon::{DUPLICATE_SIGNAL_WINDOW, Kind};
use crate::http::{self, Limits};
use crate::output::{self, say};
use flags::Flags;
use plan::{AddressError, Addresses, Surroundings};
use ports::HeldPorts;
use run_dir::RunDir;
pub(crate) use state::State;
use supervise::{Ended, Supervisor};

/// How often children are looked at.
const TICK: Duration = Duration::from_millis(50);
/// A child that ends this often in a row before the cluster has been ready will not come up.
const ENDS_BEFORE_GIVING_UP: u32 = 5;
/// A readiness probe that takes longer has failed.
const READY_LIMITS: Limits =
    Limits { connect: Duration::from_secs(1), answer: Duration::from_secs(1) };
/// When the person is told what is being waited for, and how often again.
const STILL_WAITING: Duration = Duration::from_secs(15);

/// What `main` knows beside the flags of `up`.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    /// Handed on to every child.
    pub log_filter: Option<String>,
    /// Where a run folder is made when none was asked for.
    pub temporary: PathBuf,
    /// The program that runs, which is also that of the children.
    pub program: PathBuf,
    /// The person at the terminal is told nothing of it.
    pub quiet: bool,
}

/// A cluster that is ready.
#[derive(Debug)]
pub(crate) struct Ready {
    pub state: State,
    /// The folder of its model.
    pub model: PathBuf,
}

pub(crate) fn run(flags: &Flags, setting: Setting) -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let watch = async |_| std::future::pending().await;
    runtime.block_on(Box::pin(run_for(flags, setting, watch))).map(|_: Option<()>| ())
}

/// Runs a cluster while there is something to do, from when it is ready. `None` when somebody ended it before.
pub(crate) async fn run_for<T>(
    flags: &Flags,
    setting: Setting,
    work: impl AsyncFnOnce(Ready) -> Result<T, Box<dyn Error>>,
) -> Result<Option<T>, Box<dyn Error>> {
    let Setting { log_filter, temporary, program, quiet } = setting;
    let say = |line: &str| {
        if !quiet {
            output::say(line);
        }
    };
    let began = Instant::now();
    // Before anything starts, so that no signal is missed.
    let mut signals = Signals::new()?;
    let engines = flags.engines()?;
    flags.check_ranges()?;
    let model = preflight::find_model(flags)?;
    preflight::check_model(flags, engines, &model)?;
    let mut ports = CheckedPorts { port: flags.port, held: HeldPorts::default() };
    let mut run_dir = RunDir::open(flags.run_dir.as_deref(), &temporary)?;
    if let Some(folder) = &flags.layer_log_dir {
        std::fs::create_dir_all(folder)?;
    }
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let surroundings = Surroundings {
        run_dir: run_dir.path(),
        model: &model,
        cores: u32::try_from(cores).unwrap_or(u32::MAX),
    };
    let plan = plan::plan(flags, engines, &surroundings, &mut ports)?;

    say(&format!(
        "starting {} processes: {}",
        plan.processes.len(),
        plan.processes.iter().map(|p| p.name.as_str()).collect::<Vec<_>>().join(", ")
    ));
    say(&format!("serving {} from {}", plan.model_name, model.display()));
    say(&format!("run directory {}", run_dir.path().display()));
    let engines = plan.processes.iter().filter(|process| process.kind == Kind::Engine);
    // The front door serves when some engines are there, the cluster is whole when all are.
    let parts: Vec<SocketAddr> =
        engines.map(|engine| engine.address).chain([plan.front_door]).collect();
    let mut supervisor = Supervisor::new(plan, run_dir.path(), program, log_filter)?;
    supervisor.quiet = quiet;
    let _reserved = ports.held.release();

    let outcome = {
        let (is_ready, ready) = oneshot::channel();
        let is_ready = Some(is_ready);
        let mut cluster = Watch { parts, began, run_dir: run_dir.path(), quiet, is_ready };
        let work = async {
            match ready.await {
                Ok(state) => work(Ready { state, model: model.clone() }).await,
                // Whoever would have said so has an error.
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            outcome = cluster.keep_running(&mut supervisor) => outcome.map(|never| match never {}),
            () = signals.next() => Ok(None),
            done = work => done.map(Some),
        }
    };
    let ending = Instant::now();
    say("stopping the conductor, then the engines, then the store nodes");
    let mut hurry = Box::pin(signals.next_after(ending, DUPLICATE_SIGNAL_WINDOW));
    supervisor.shut_down(&mut hurry).await;
    if outcome.is_err() {
        run_dir.keep();
        say(&format!("the logs remain in {}", run_dir.path().display()));
    }
    say(&format!("stopped after {:.1} s", ending.elapsed().as_secs_f64()));
    outcome
}

/// What [`Watch::keep_running`] returns instead of a value: it ends only in an error.
enum Never {}

struct Watch<'a> {
    /// What has to be ready.
    parts: Vec<SocketAddr>,
    began: Instant,
    run_dir: &'a Path,
    quiet: bool,
    /// Hears of it, once.
    is_ready: Option<oneshot::Sender<State>>,
}

impl Watch<'_> {
    fn say(&self, line: &str) {
        if !self.quiet {
            output::say(line);
        }
    }

    async fn keep_running(&mut self, supervisor: &mut Supervisor) -> Result<Never, Box<dyn Error>> {
        let mut is_ready = false;
        let mut remind_at = self.began + STILL_WAITING;
        loop {
            let started = supervisor.start_due()?;
            if is_ready && !started.is_empty() {
                self.say(&format!("restarted {}", started.join(", ")));
            } else if !started.is_empty() {
                self.say(&format!("started {}", started.join(", ")));
            }
            if !is_ready {
                is_ready = self.greet_when_ready(supervisor, &mut remind_at).await?;
            }
            tokio::time::sleep(TICK).await;
            for ended in supervisor.reap()? {
                if !self.quiet {
                    tell(&ended);
                }
                if !is_ready && ended.ends_in_a_row >= ENDS_BEFORE_GIVING_UP {
                    let Ended { name, ends_in_a_row, .. } = ended;
                    return Err(
                        format!("{name} exited {ends_in_a_row} times in a row; giving up").into()
                    );
                }
            }
        }
    }

    async fn greet_when_ready(
        &mut self,
        supervisor: &mut Supervisor,
        remind_at: &mut Instant,
    ) -> Result<bool, Box<dyn Error>> {
        let mut waited_for = None;
        for &part in &self.parts {
            let answer = http::get(&format!("http://{part}/readyz"), READY_LIMITS).await;
            if answer.as_ref().map_or(true, |answer| answer.status != StatusCode::OK) {
                waited_for = Some((part, answer));
                break;
            }
        }
        let Some((part, answer)) = waited_for else {
            let seconds = self.began.elapsed().as_secs_f64();
            self.say(&welcome::text(&supervisor.state(), self.run_dir, seconds));
            supervisor.set_ready()?;
            if let Some(is_ready) = self.is_ready.take() {
                // Nobody waits for it who has not got it.
                let _ = is_ready.send(supervisor.state());
            }
            return Ok(true);
        };
        if Instant::now() >= *remind_at {
            let reason = match answer {
                Ok(answer) => answer.text().trim().to_owned(),
                Err(error) => format!("no answer ({error})"),
            };
            self.say(&format!("not ready yet: http://{part}/readyz reports: {reason}"));
            *remind_at = Instant::now() + STILL_WAITING;
        }
        Ok(false)
    }
}

fn tell(ended: &Ended) {
    let seconds = ended.restart_in.as_secs_f64();
    say(&format!(
        "{} {}; restarting it on the same ports in {seconds:.1} s. Last lines of {}:",
        ended.name,
        ended.how,
        ended.log.display()
    ));
    for line in child::tail(&ended.log) {
        say(&format!("    {line}"));
    }
}

/// The front door's port is the one that was asked for, all others are free ones.
struct CheckedPorts {
    port: u16,
    held: HeldPorts,
}

impl Addresses for CheckedPorts {
    fn front_door(&mut self) -> Result<SocketAddr, AddressError> {
        let port = self.port;
        if port == 0 {
            return self.free();
        }
        self.held.take(port).map_err(|source| AddressError::FrontDoor { port, source })
    }

    fn free(&mut self) -> Result<SocketAddr, AddressError> {
        self.held.take_free().map_err(AddressError::NoneFree)
    }
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }

    /// The next signal later than `window` after `since`; ignores earlier ones.
    async fn next_after(&mut self, since: Instant, window: Duration) {
        loop {
            self.next().await;
            if since.elapsed() >= window {
                return;
            }
        }
    }
}
