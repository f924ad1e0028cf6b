//! What strangers send: nothing panics, nothing leaks, and nobody else waits for it.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::rest::comes_to_rest;
use crate::support::vectors::{Case, Variant, ids};
use rustix::net::sockopt::set_socket_recv_buffer_size;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};

const CONNECTIONS: usize = 1_000;
const SILENT_READERS: usize = 2;
/// Longer than the conductor waits for a client that takes nothing.
const REST_WITHIN: Duration = Duration::from_secs(60);

async fn answers_right(cluster: &Cluster, case: &Case) {
    let max_tokens = u32::try_from(case.greedy.len()).expect("a few");
    let (status, answer) = cluster.complete(&case.prompt, max_tokens).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(ids(&answer["choices"][0]["token_ids"]), case.greedy);
}

fn with(mut body: Value, key: &str, value: Value) -> Vec<u8> {
    body[key] = value;
    body.to_string().into_bytes()
}

/// What is sent, where, and the status that must come back.
fn bad_requests(model: &str) -> Vec<(&'static str, Vec<u8>, u16)> {
    let completions = "/v1/completions";
    let chat = "/v1/chat/completions";
    let ask = json!({"model": model, "prompt": [0, 5, 6], "max_tokens": 4});
    let say = json!({"model": model, "messages": [{"role": "user", "content": "Hi"}]});
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    vec![
        (completions, Vec::new(), 400),
        (completions, b"{\"model\": ".to_vec(), 400),
        (completions, deep.clone().into_bytes(), 400),
        (completions, format!("{{\"prompt\": {deep}}}").into_bytes(), 400),
        (completions, b"{\"model\": \"\xff\xfe\", \"prompt\": \"x\"}".to_vec(), 400),
        (chat, b"[1, 2, 3]".to_vec(), 400),
        (completions, with(ask.clone(), "model", json!("no-such-model")), 404),
        (chat, with(say.clone(), "model", json!("../../etc/passwd")), 404),
        (completions, with(ask.clone(), "prompt", json!(vec![7; 5_000])), 400),
        (completions, with(ask.clone(), "prompt", json!("word ".repeat(50_000))), 400),
        (completions, with(ask.clone(), "prompt", json!([0, 4_000_000_000_u64])), 400),
        (completions, with(ask.clone(), "prompt", json!([0, 1_024])), 400),
        (completions, with(ask.clone(), "prompt", json!([-1])), 400),
        (completions, with(ask.clone(), "prompt", json!([])), 400),
        (completions, with(ask.clone(), "max_tokens", json!(-1)), 400),
        (completions, with(ask.clone(), "max_tokens", json!(1e30)), 400),
        (completions, with(ask.clone(), "temperature", json!(-0.1)), 400),
        (completions, with(ask.clone(), "temperature", json!(1e300)), 400),
        (completions, with(ask.clone(), "top_p", json!(0)), 400),
        (completions, with(ask.clone(), "top_k", json!(-7)), 400),
        (completions, with(ask.clone(), "n", json!(0)), 400),
        (completions, with(ask.clone(), "n", json!(1_000_000)), 400),
        (completions, with(ask.clone(), "stop", json!(vec!["x"; 1_000])), 400),
        (completions, with(ask, "logprobs", json!(1_000)), 400),
        (chat, with(say.clone(), "messages", json!([])), 400),
        (chat, with(say.clone(), "messages", json!("Hello")), 400),
        (chat, with(say, "messages", json!([{"role": "user"}])), 400),
        (completions, vec![b' '; 20_000_000], 413),
        (completions, format!("{{\"prompt\": \"{}\"}}", "x".repeat(20_000_000)).into(), 413),
    ]
}

/// Sends the body whole if it is let. `None` when the connection is closed without an answer.
async fn post(cluster: &Cluster, path: &str, body: Vec<u8>) -> Option<(u16, Value)> {
    let request = cluster.client.post(format!("{}{path}", cluster.url));
    let request = request.header("content-type", "application/json").body(body);
    let reply = request.send().await.ok()?;
    let status = reply.status().as_u16();
    Some((status, reply.json().await.unwrap_or(Value::Null)))
}

#[tokio::test]
async fn requests_that_are_wrong_get_errors_that_say_so() {
    let cluster = Cluster::start("").await;
    let case = &Variant::Plain.cases()[1];
    for (path, body, want) in bad_requests(&cluster.model) {
        let shown = String::from_utf8_lossy(&body[..body.len().min(120)]).into_owned();
        let Some((status, answer)) = post(&cluster, path, body).await else {
            // A body that is refused while it is still being sent may cost its connection.
            assert_eq!(want, 413, "no answer to {path} {shown}");
            continue;
        };
        assert_eq!(status, want, "{path} {shown}: {answer}");
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(message.len() > 10, "{path} {shown}: {answer}");
        assert!(answer["error"]["type"].is_string(), "{path} {shown}: {answer}");
    }
    answers_right(&cluster, case).await;
    comes_to_rest(&cluster, REST_WITHIN).await;
    nothing_broke(&cluster);
}

#[tokio::test]
async fn a_thousand_open_connections_do_not_keep_others_waiting() {
    // This process has one end of each connection.
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).expect("it may be raised");
    let cluster = Cluster::start("").await;
    let case = &Variant::Plain.cases()[1];
    answers_right(&cluster, case).await;
    let conductor = cluster.pid("conductor").expect("it runs");
    let before = open_files(conductor);
    let address = cluster.url.strip_prefix("http://").expect("an address");
    let mut connections: Vec<TcpStream> =
        (0..CONNECTIONS).map(|_| TcpStream::connect(address).expect("it is accepted")).collect();
    // Some say nothing, some begin a request and stop.
    for connection in connections.iter_mut().step_by(2) {
        connection.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n").expect("it is sent");
    }
    eventually("all are open at once", async || open_files(conductor) > before + CONNECTIONS / 2)
        .await;
    for case in Variant::Plain.cases().iter().take(4) {
        answers_right(&cluster, case).await;
    }
    drop(connections);
    eventually("all are closed", async || open_files(conductor) < before + 20).await;
    nothing_broke(&cluster);
}

#[tokio::test]
async fn clients_that_read_nothing_cost_only_themselves() {
    let cluster = Cluster::start("--dram-bytes 384MiB --request-timeout-ms 20000").await;
    let address = cluster.url.strip_prefix("http://").expect("an address").to_owned();
    let silent: Vec<TcpStream> = (0..SILENT_READERS)
        .map(|reader| {
            // Some 8 MB, more than all buffers on the way hold.
            let body = json!({
                "model": cluster.model, "prompt": [0, 5 + reader], "max_tokens": 2_000, "n": 8,
                "temperature": 1, "ignore_eos": true, "stream": true, "logprobs": 5,
            })
            .to_string();
            let mut stream = TcpStream::connect(&address).expect("it is accepted");
            set_socket_recv_buffer_size(&stream, 4096).expect("it can be small");
            write!(
                stream,
                "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
                 content-length: {}\r\n\r\n{body}",
                body.len()
            )
            .expect("it is sent");
            stream
        })
        .collect();
    for case in Variant::Plain.cases().iter().take(6) {
        answers_right(&cluster, case).await;
    }
    // They are given up without doing anything themselves, and all they held is given back.
    comes_to_rest(&cluster, REST_WITHIN).await;
    drop(silent);
    nothing_broke(&cluster);
}

fn open_files(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// No process panicked or had to be started again.
fn nothing_broke(cluster: &Cluster) {
    for process in cluster.process_names() {
        assert_eq!(cluster.restarts(&process), 0, "{process} was started again");
        let log = cluster.run_dir().join(format!("{process}.log"));
        let log = std::fs::read_to_string(log).unwrap_or_default();
        assert!(!log.contains("panicked"), "{process}:\n{log}");
    }
}
