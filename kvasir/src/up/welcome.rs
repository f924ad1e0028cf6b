//! What is said to the person who started the cluster once it is ready: how to ask it something,
//! and what to look at next.

use std::fmt::Write;
use std::path::Path;

use super::state::State;

pub(super) fn text(state: &State, run_dir: &Path, seconds: f64) -> String {
    let State { url, model, watch, .. } = state;
    let mut text = format!(
        r#"
Ready after {seconds:.1} s: {url} serves {model}. Ask it something:

  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}], "max_tokens": 24, "stream": true}}'

What to look at next:

  {watch}           nodes, engines and decisions as they come, for a browser
  kvasir top --conductor {watch}       the same in the terminal
  kvasir explain --conductor {watch}   why the latest requests went where they went
  curl {url}/v1/models            what is served
  curl {url}/metrics              what the conductor counts; each process has its own:
"#
    );
    for (name, process) in &state.processes {
        let pid = process.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        let _ = writeln!(text, "    {name:<18} pid {pid:<8} {}", process.metrics);
    }
    let _ = write!(
        text,
        "
  kill -9 any of these pids: it is started again, and the others go on
  {}   all of this for scripts; logs and configurations lie beside it

Ctrl-C ends everything.
",
        State::path(run_dir).display()
    );
    text
}
