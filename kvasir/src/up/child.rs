//! One child process: this program again, with a daemon's subcommand. It is in a process group
//! of its own, so that a Ctrl-C in the terminal reaches `up` alone, which then ends the parts in
//! their order. Its standard input is a pipe that `up` holds open and never writes: when `up`
//! dies, however it dies, the pipe closes and the child ends.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, kill_process};

const TAIL_BYTES: u64 = 4096;
const TAIL_LINES: usize = 8;

#[derive(Debug)]
pub(super) struct ChildSpec<'a> {
    pub program: &'a Path,
    pub subcommand: &'static str,
    pub config: &'a Path,
    pub log: &'a Path,
    pub log_filter: Option<&'a str>,
}

pub(super) fn spawn(spec: &ChildSpec<'_>) -> std::io::Result<Child> {
    let log = OpenOptions::new().create(true).append(true).open(spec.log)?;
    let mut command = Command::new(spec.program);
    if let Some(filter) = spec.log_filter {
        command.arg("--log").arg(filter);
    }
    command
        .arg(spec.subcommand)
        .arg("--config")
        .arg(spec.config)
        .arg("--exit-with-stdin")
        .stdin(Stdio::piped())
        .stdout(log.try_clone()?)
        .stderr(log)
        .process_group(0)
        .spawn()
}

/// Asks the child to drain.
pub(super) fn terminate(child: &Child) {
    // Not reaped yet (only `try_wait` of its owner does that), so the id is still its own.
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    if let Some(pid) = pid {
        let _ = kill_process(pid, Signal::TERM);
    }
}

/// How it ended, as in "exited with status 1" or "was killed by signal 9".
pub(super) fn describe_end(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "exited".into(),
    }
}

/// The last lines of a log, for a person.
pub(super) fn tail(log: &Path) -> Vec<String> {
    read_tail(log.to_path_buf()).unwrap_or_default()
}

fn read_tail(log: PathBuf) -> std::io::Result<Vec<String>> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(TAIL_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(TAIL_LINES)..].iter().map(|line| (*line).into()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_told_by_status_or_signal() {
        assert_eq!(describe_end(ExitStatus::from_raw(1 << 8)), "exited with status 1");
        assert_eq!(describe_end(ExitStatus::from_raw(9)), "was killed by signal 9");
    }

    #[test]
    fn the_tail_is_the_last_lines_of_a_long_log() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let text: String = (0..10_000).map(|i| format!("line {i}\n")).collect();
        std::fs::write(&log, text).unwrap();
        let lines = tail(&log);
        assert_eq!(lines.len(), TAIL_LINES);
        assert_eq!(lines.last().map(String::as_str), Some("line 9999"));
        assert!(tail(Path::new("no such file")).is_empty());
    }
}
