//! Starts the planned processes, watches them, starts again what ended, and ends them in order.
//! It is the only owner of the children: nobody else reaps or signals them.

use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use super::backoff::Backoff;
use super::child::{self, ChildSpec};
use super::plan::{CONDUCTOR_DRAIN_MS, ClusterPlan, ENGINE_DRAIN_MS, NODE_DRAIN_MS, ProcessPlan};
use super::state::{ProcessState, State};
use crate::daemon::Kind;
use crate::output::say;

/// What a process may take beyond its own drain before it is killed.
const GRACE: Duration = Duration::from_millis(500);
const POLL: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub(super) enum SuperviseError {
    #[error("cannot write to the run directory {}", path.display())]
    RunDir { path: PathBuf, source: std::io::Error },
    #[error("cannot start {name}")]
    Spawn { name: String, source: std::io::Error },
}

#[derive(Debug)]
pub(super) struct Supervisor {
    run_dir: PathBuf,
    program: PathBuf,
    log_filter: Option<String>,
    /// What state.json says of the cluster as a whole.
    url: String,
    monitor: String,
    model: String,
    ready: bool,
    /// Nothing is said of how it ends.
    pub quiet: bool,
    processes: Vec<Process>,
}

#[derive(Debug)]
struct Process {
    plan: ProcessPlan,
    config: PathBuf,
    log: PathBuf,
    run: Run,
    backoff: Backoff,
    restarts: u32,
}

#[derive(Debug)]
enum Run {
    Running {
        child: Child,
        since: Instant,
    },
    /// Ended; started again at this time.
    Waiting {
        until: Instant,
    },
}

/// A process that ended by itself, as `Supervisor::reap` found it.
#[derive(Debug)]
pub(super) struct Ended {
    pub name: String,
    pub how: String,
    pub log: PathBuf,
    /// Ends in a row, each soon after the start.
    pub ends_in_a_row: u32,
    pub restart_in: Duration,
}

impl Supervisor {
    /// Writes every configuration; starts nothing.
    pub(super) fn new(
        plan: ClusterPlan,
        run_dir: &Path,
        program: PathBuf,
        log_filter: Option<String>,
    ) -> Result<Supervisor, SuperviseError> {
        let unwritable = |source| SuperviseError::RunDir { path: run_dir.into(), source };
        let now = Instant::now();
        let mut processes = Vec::new();
        for plan in plan.processes {
            let config = run_dir.join(format!("{}.toml", plan.name));
            let log = run_dir.join(format!("{}.log", plan.name));
            std::fs::write(&config, &plan.config).map_err(unwritable)?;
            let run = Run::Waiting { until: now };
            let backoff = Backoff::default();
            processes.push(Process { plan, config, log, run, backoff, restarts: 0 });
        }
        let supervisor = Supervisor {
            run_dir: run_dir.into(),
            program,
            log_filter,
            url: format!("http://{}", plan.front_door),
            monitor: format!("http://{}", plan.monitor),
            model: plan.model_name,
            ready: false,
            quiet: false,
            processes,
        };
        supervisor.write_state()?;
        Ok(supervisor)
    }

    /// Starts what is not running and due. Whatever was started stays owned, even on an error.
    pub(super) fn start_due(&mut self) -> Result<Vec<String>, SuperviseError> {
        let now = Instant::now();
        let mut started = Vec::new();
        for process in &mut self.processes {
            let Run::Waiting { until } = process.run else { continue };
            if until > now {
                continue;
            }
            let child = child::spawn(&ChildSpec {
                program: &self.program,
                subcommand: process.plan.kind.name(),
                config: &process.config,
                log: &process.log,
                log_filter: self.log_filter.as_deref(),
            })
            .map_err(|source| SuperviseError::Spawn { name: process.plan.name.clone(), source })?;
            started.push(format!("{} (pid {})", process.plan.name, child.id()));
            process.run = Run::Running { child, since: now };
        }
        if !started.is_empty() {
            self.write_state()?;
        }
        Ok(started)
    }

    /// Finds what has ended and books its next start.
    pub(super) fn reap(&mut self) -> Result<Vec<Ended>, SuperviseError> {
        let now = Instant::now();
        let mut ended = Vec::new();
        for process in &mut self.processes {
            let Run::Running { child, since } = &mut process.run else { continue };
            let Some(status) = exit_status(child) else { continue };
            let lived_ms = u64::try_from((now - *since).as_millis()).unwrap_or(u64::MAX);
            let wait = Duration::from_millis(process.backoff.ended_after(lived_ms));
            process.run = Run::Waiting { until: now + wait };
            process.restarts += 1;
            ended.push(Ended {
                name: process.plan.name.clone(),
                how: child::describe_end(status),
                log: process.log.clone(),
                ends_in_a_row: process.backoff.ends_in_a_row(),
                restart_in: wait,
            });
        }
        if !ended.is_empty() {
            self.write_state()?;
        }
        Ok(ended)
    }

    pub(super) fn set_ready(&mut self) -> Result<(), SuperviseError> {
        self.ready = true;
        self.write_state()
    }

    pub(super) fn state(&self) -> State {
        let processes = self.processes.iter().map(|p| (p.plan.name.clone(), p.state())).collect();
        State {
            pid: std::process::id(),
            url: self.url.clone(),
            monitor: self.monitor.clone(),
            model: self.model.clone(),
            ready: self.ready,
            processes,
        }
    }

    fn write_state(&self) -> Result<(), SuperviseError> {
        self.state()
            .write(&self.run_dir)
            .map_err(|source| SuperviseError::RunDir { path: self.run_dir.clone(), source })
    }

    /// Ends everything: the conductor first, so that no request is left; then the engines, which
    /// then have nothing to do; the nodes last, so that what they hold outlives its users. What
    /// does not end in its time is killed. `hurry` ends the waiting.
    pub(super) async fn shut_down(&mut self, hurry: &mut (impl Future<Output = ()> + Unpin)) {
        let stages = [
            (Kind::Conductor, CONDUCTOR_DRAIN_MS),
            (Kind::Engine, ENGINE_DRAIN_MS),
            (Kind::StoreNode, NODE_DRAIN_MS),
        ];
        for (kind, drain_timeout_ms) in stages {
            let patience = Duration::from_millis(drain_timeout_ms.into()) + GRACE;
            tokio::select! {
                () = self.end_kind(kind, patience) => {}
                () = &mut *hurry => {
                    if !self.quiet {
                        say("received a second signal; killing the remaining processes");
                    }
                    break;
                }
            }
        }
        self.kill_all();
    }

    async fn end_kind(&mut self, kind: Kind, patience: Duration) {
        let deadline = Instant::now() + patience;
        for process in self.processes.iter().filter(|process| process.plan.kind == kind) {
            if let Run::Running { child, .. } = &process.run {
                child::terminate(child);
            }
        }
        while self.count_running(kind) > 0 && Instant::now() < deadline {
            tokio::time::sleep(POLL).await;
        }
        for process in self.processes.iter_mut().filter(|process| process.plan.kind == kind) {
            if let Run::Running { child, .. } = &mut process.run
                && exit_status(child).is_none()
            {
                if !self.quiet {
                    say(&format!("{} did not exit in time; killing it", process.plan.name));
                }
                kill(child);
            }
        }
    }

    fn count_running(&mut self, kind: Kind) -> usize {
        self.processes
            .iter_mut()
            .filter(|process| process.plan.kind == kind)
            .filter_map(Process::running)
            .count()
    }

    /// At once, whatever they are doing.
    pub(super) fn kill_all(&mut self) {
        for process in &mut self.processes {
            if let Run::Running { child, .. } = &mut process.run {
                kill(child);
            }
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.kill_all();
    }
}

impl Process {
    fn running(&mut self) -> Option<&mut Child> {
        match &mut self.run {
            Run::Running { child, .. } => match exit_status(child) {
                None => Some(child),
                Some(_) => None,
            },
            Run::Waiting { .. } => None,
        }
    }

    fn state(&self) -> ProcessState {
        ProcessState {
            kind: self.plan.kind.name(),
            pid: match &self.run {
                Run::Running { child, .. } => Some(child.id()),
                Run::Waiting { .. } => None,
            },
            restarts: self.restarts,
            address: self.plan.address,
            metrics: format!("http://{}/metrics", self.plan.address),
            other_addresses: self.plan.other_addresses.clone(),
            config: self.config.clone(),
            log: self.log.clone(),
        }
    }
}

/// None while it runs. A child of our own can always be waited for; were it not so, it would be
/// taken as ended without a status.
fn exit_status(child: &mut Child) -> Option<ExitStatus> {
    match child.try_wait() {
        Ok(status) => status,
        Err(_) => Some(ExitStatus::default()),
    }
}

fn kill(child: &mut Child) {
    // Both fail only when it has ended already.
    let _ = child.kill();
    let _ = child.wait();
}
