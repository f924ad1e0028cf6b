//! What is said to the person who started the cluster once it is ready: how to ask it something,
//! and what to look at next.

use std::fmt::Write;
use std::path::Path;

use super::state::State;

pub(super) fn text(state: &State, run_dir: &Path, seconds: f64) -> String {
    let State { url, model, monitor, .. } = state;
    let mut text = format!(
        r#"
Ready after {seconds:.1} s: {url} serves {model}. Send a request:

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 24, "stream": true}}'

Next steps:

  {monitor}           nodes, engines and live decisions, in a browser
  kvasir top --conductor {monitor}       the same in a terminal
  kvasir explain --conductor {monitor}   the reasons for the placement of the latest requests
  curl {url}/v1/models            the served models
  curl {url}/metrics              metrics of the conductor; each process has its own:
"#
    );
    for (name, process) in &state.processes {
        let pid = process.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let _ = writeln!(text, "    {name:<18} pid {pid:<8} {}", process.metrics);
    }
    let _ = write!(
        text,
        "
  kill -9 one of these pids: `up` restarts the process, and the others continue
  {}   the same information for scripts, beside logs and configurations

Ctrl-C stops all processes.
",
        State::path(run_dir).display()
    );
    text
}
