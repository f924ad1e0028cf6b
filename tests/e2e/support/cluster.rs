//! A cluster of real processes, started by `kvasir up` on free ports and ended with the test.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::metrics::Metrics;

/// The binary under test.
pub(crate) const KVASIR: &str = env!("CARGO_BIN_EXE_kvasir");

/// The promise of `up`, with room for a machine that runs other tests at the same time.
const READY_WITHIN: Duration = Duration::from_secs(240);
/// For a process that does not answer at all.
const METRICS_WITHIN: Duration = Duration::from_secs(10);
const TAIL_LINES: usize = 40;
/// A connection that nobody used for so long is not used again. Whoever listens closes idle ones some
/// day, and a request that is sent just then breaks off; the conductor does after `keep_alive_timeout_ms`.
const IDLE_MAX: Duration = Duration::from_secs(5);

fn client() -> reqwest::Client {
    let builder = reqwest::Client::builder().pool_idle_timeout(IDLE_MAX);
    builder.build().expect("a client can be made")
}

#[derive(Debug)]
pub(crate) struct Cluster {
    up: Child,
    run_dir: tempfile::TempDir,
    pub url: String,
    pub model: String,
    pub client: reqwest::Client,
}

/// The flags that keep a test's cluster small, then those of the test.
fn command(run_dir: &Path, flags: &str) -> Command {
    let mut command = Command::new(KVASIR);
    command.args(["up", "--port", "0", "--run-dir"]).arg(run_dir);
    if !flags.contains("--dram-bytes") {
        command.args(["--dram-bytes", "64MiB"]);
    }
    command.args(flags.split_whitespace());
    command
}

impl Cluster {
    /// Returns when it is ready.
    pub(crate) async fn start(flags: &str) -> Cluster {
        let run_dir = tempfile::Builder::new().prefix("kvasir-e2e-").tempdir().expect("a folder");
        let output = File::create(run_dir.path().join("up.out")).expect("a file for the output");
        let up = command(run_dir.path(), flags)
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("a second handle"))
            .stderr(output)
            .spawn()
            .expect("the binary can be started");
        let mut cluster =
            Cluster { up, run_dir, url: String::new(), model: String::new(), client: client() };
        cluster.wait_until_up(flags).await;
        cluster
    }

    async fn wait_until_up(&mut self, flags: &str) {
        let began = Instant::now();
        loop {
            if let Some(state) = self.try_state().filter(|state| state["ready"] == true) {
                self.url = state["url"].as_str().expect("a URL").to_owned();
                self.model = state["model"].as_str().expect("a name").to_owned();
                return;
            }
            if let Some(status) = self.up.try_wait().expect("it is our child") {
                panic!("`up {flags}` ended with {status}:\n{}", self.logs());
            }
            assert!(began.elapsed() < READY_WITHIN, "`up {flags}` is not ready:\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }

    fn try_state(&self) -> Option<Value> {
        let text = std::fs::read_to_string(self.run_dir.path().join("state.json")).ok()?;
        serde_json::from_str(&text).ok()
    }

    pub(crate) fn state(&self) -> Value {
        self.try_state().expect("state.json is there once a cluster is ready")
    }

    pub(crate) fn run_dir(&self) -> &Path {
        self.run_dir.path()
    }

    pub(crate) fn up_pid(&self) -> u32 {
        self.up.id()
    }

    pub(crate) fn process_names(&self) -> Vec<String> {
        let state = self.state();
        state["processes"].as_object().expect("an object").keys().cloned().collect()
    }

    /// None while it waits to be started again.
    pub(crate) fn pid(&self, process: &str) -> Option<u32> {
        let pid = self.state()["processes"][process]["pid"].as_u64()?;
        u32::try_from(pid).ok()
    }

    pub(crate) fn pids(&self) -> Vec<u32> {
        self.process_names().iter().filter_map(|name| self.pid(name)).collect()
    }

    pub(crate) fn restarts(&self, process: &str) -> u64 {
        self.state()["processes"][process]["restarts"].as_u64().expect("a count")
    }

    pub(crate) fn kill(&self, process: &str) {
        self.signal(process, Signal::KILL);
    }

    pub(crate) fn signal(&self, process: &str, what: Signal) {
        signal(self.pid(process).expect("it runs"), what);
    }

    pub(crate) async fn metrics(&self, process: &str) -> Metrics {
        self.try_metrics(process).await.expect("metrics are served")
    }

    /// None while the process does not answer.
    pub(crate) async fn try_metrics(&self, process: &str) -> Option<Metrics> {
        let state = self.state();
        let url = state["processes"][process]["metrics"].as_str().expect("a URL");
        let reply = self.client.get(url).timeout(METRICS_WITHIN).send().await.ok()?;
        Some(Metrics::parse(&reply.text().await.ok()?))
    }

    /// A metric summed over all processes whose name ends so.
    pub(crate) async fn sum(&self, processes: &str, metric: &str, labels: &[(&str, &str)]) -> f64 {
        let mut sum = 0.0;
        for name in self.process_names().iter().filter(|name| name.ends_with(processes)) {
            sum += self.metrics(name).await.sum(metric, labels);
        }
        sum
    }

    pub(crate) async fn get(&self, path: &str) -> (u16, String) {
        match self.client.get(format!("{}{path}", self.url)).send().await {
            Ok(reply) => (reply.status().as_u16(), reply.text().await.unwrap_or_default()),
            Err(_) => (0, String::new()),
        }
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.try_post(path, body).await.unwrap_or_else(|| panic!("no answer:\n{}", self.logs()))
    }

    /// None when the connection fails.
    pub(crate) async fn try_post(&self, path: &str, body: &Value) -> Option<(u16, Value)> {
        let url = format!("{}{path}", self.url);
        let reply = self.client.post(url).json(body).send().await.ok()?;
        let status = reply.status().as_u16();
        Some((status, reply.json().await.ok()?))
    }

    /// A greedy completion of token ids, `max_tokens` long whatever comes.
    pub(crate) async fn complete(&self, prompt: &[u32], max_tokens: u32) -> (u16, Value) {
        self.post("/v1/completions", &self.completion(prompt, max_tokens)).await
    }

    /// None when the connection fails.
    pub(crate) async fn try_complete(
        &self,
        prompt: &[u32],
        max_tokens: u32,
    ) -> Option<(u16, Value)> {
        self.try_post("/v1/completions", &self.completion(prompt, max_tokens)).await
    }

    fn completion(&self, prompt: &[u32], max_tokens: u32) -> Value {
        json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": true,
            "return_token_ids": true,
        })
    }

    pub(crate) async fn is_ready(&self) -> bool {
        self.get("/readyz").await.0 == 200
    }

    /// What a process of the cluster answers when it is asked whether it is ready.
    pub(crate) async fn ready_of(&self, process: &str) -> (u16, String) {
        let state = self.state();
        let metrics = state["processes"][process]["metrics"].as_str().expect("a URL").to_owned();
        let url = metrics.replace("/metrics", "/readyz");
        let reply = self.client.get(url).send().await.expect("it answers");
        (reply.status().as_u16(), reply.text().await.expect("a text"))
    }

    /// Sends SIGINT to `up`, without waiting for its end.
    pub(crate) fn send_interrupt(&self) {
        signal(self.up.id(), Signal::INT);
    }

    /// Ends it as Ctrl-C does.
    pub(crate) async fn interrupt(&mut self) -> (ExitStatus, Duration) {
        let began = Instant::now();
        self.send_interrupt();
        loop {
            if let Some(status) = self.up.try_wait().expect("it is our child") {
                return (status, began.elapsed());
            }
            assert!(began.elapsed() < Duration::from_secs(30), "it does not end:\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Kills `up` alone, and reaps it.
    pub(crate) fn kill_up(&mut self) {
        self.up.kill().expect("it runs");
        self.up.wait().expect("it is our child");
    }

    /// What `up` said.
    pub(crate) fn output(&self) -> String {
        std::fs::read_to_string(self.run_dir.path().join("up.out")).unwrap_or_default()
    }

    /// The last lines of everything, for a test that has failed.
    pub(crate) fn logs(&self) -> String {
        let mut logs: Vec<PathBuf> = std::fs::read_dir(self.run_dir.path())
            .into_iter()
            .flatten()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|end| end == "log" || end == "out"))
            .collect();
        logs.sort();
        logs.iter().map(|log| format!("--- {}\n{}\n", log.display(), tail(log))).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Straight to the stream: a panicking test loses nothing of it.
            let _ = writeln!(std::io::stderr(), "{}", self.logs());
        }
        // The children end with the pipe that `up` holds; nothing of theirs is needed any more.
        let pids = self.try_state().map(|_| self.pids()).unwrap_or_default();
        let _ = self.up.kill();
        let _ = self.up.wait();
        for pid in pids.into_iter().filter(|pid| is_alive(*pid)) {
            signal(pid, Signal::KILL);
        }
    }
}

fn tail(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

/// A process that has ended meanwhile is as good as signalled.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
    let _ = kill_process(pid, signal);
}

/// Running, and not only waiting to be reaped.
pub(crate) fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|text| text.rsplit_once(") ").map(|(_, rest)| !rest.starts_with('Z')))
        .unwrap_or(false)
}
