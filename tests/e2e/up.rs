//! `kvasir up` as a user meets it: what it refuses, what it promises of its processes.

use std::net::TcpListener;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::support::cluster::{Cluster, KVASIR, is_alive};
use crate::support::eventually;
use crate::support::vectors::{Variant, ids};

fn kvasir(arguments: &[&str]) -> Output {
    Command::new(KVASIR).args(arguments).stdin(Stdio::null()).output().expect("it can be started")
}

/// Refused at once, with one sentence that has these words, and nothing said to be starting.
fn check_refused(arguments: &[&str], words: &[&str]) {
    let output = kvasir(arguments);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {complaint}");
    assert_eq!(complaint.lines().count(), 1, "{arguments:?}: {complaint}");
    for word in words {
        assert!(complaint.contains(word), "{arguments:?}: {complaint}");
    }
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
}

async fn check_answers(cluster: &Cluster) {
    let case = &Variant::Plain.cases()[4];
    let (status, answer) = cluster.complete(&case.prompt, 24).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(ids(&answer["choices"][0]["token_ids"]), case.greedy);
}

async fn all_gone(pids: &[u32]) {
    eventually("every process has ended", || {
        let gone = pids.iter().all(|pid| !is_alive(*pid));
        std::future::ready(gone)
    })
    .await;
}

#[test]
fn what_cannot_work_is_refused_in_one_sentence_before_anything_starts() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    check_refused(&["up", "--port", &port], &[&port, "--port"]);

    check_refused(&["up", "--model-dir", "no/such/folder"], &["no/such/folder"]);

    let empty = tempfile::tempdir().expect("a folder");
    let folder = empty.path().to_str().expect("UTF-8");
    check_refused(&["up", "--model-dir", folder], &[folder]);

    std::fs::write(empty.path().join("config.json"), r#"{"model_type": "llama"}"#)
        .expect("written");
    check_refused(&["up", "--model-dir", folder], &[folder]);

    check_refused(&["up", "--dram-bytes", "900TiB"], &["--dram-bytes", "MiB", "available"]);
    check_refused(&["up", "--dram-bytes", "5000"], &["--dram-bytes", "4096"]);
    check_refused(&["up", "--dram-bytes", "8192"], &["--dram-bytes 8192", "blocks", "or more"]);
    check_refused(&["up", "--prefill", "0"], &["--prefill must be at least 1"]);
    check_refused(&["up", "--both", "0"], &["--both must be at least 1"]);
    check_refused(&["up", "--decode", "1000"], &["64"]);
    check_refused(&["up", "--prefill-chunk-tokens", "0"], &["--prefill-chunk-tokens"]);
}

#[test]
fn flags_that_exclude_each_other_are_refused() {
    let output = kvasir(&["up", "--both", "1", "--prefill", "1"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot be used with"));
}

#[test]
fn an_unknown_key_is_refused_with_the_nearest_known_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let check = |daemon: &str, text: &str, words: &[&str]| {
        let file = folder.path().join("config.toml");
        std::fs::write(&file, text).expect("written");
        check_refused(&[daemon, "--config", file.to_str().expect("UTF-8")], words);
    };
    check("store-node", "dram_byte = 1", &["`dram_byte`", "`dram_bytes`"]);
    check("store-node", "verify.tpc = true", &["`verify.tpc`", "`tcp`"]);
    check(
        "engine",
        "prefill_chunk_token = 1",
        &["`prefill_chunk_token`", "`prefill_chunk_tokens`"],
    );
    check("conductor", "lisen = 1", &["`lisen`", "`listen`"]);
    check("conductor", "lease_ms = 1", &["`lease_ms`"]);
}

#[tokio::test]
async fn a_killed_child_is_started_again_on_the_same_ports_and_that_is_said() {
    let cluster = Cluster::start("--prefill 1 --decode 1").await;
    check_answers(&cluster).await;
    for name in cluster.process_names() {
        let before = cluster.state()["processes"][&name].clone();
        cluster.kill(&name);
        eventually(&format!("{name} runs again"), || {
            let again = cluster.restarts(&name) == 1 && cluster.pid(&name).is_some();
            std::future::ready(again)
        })
        .await;
        let after = cluster.state()["processes"][&name].clone();
        assert_ne!(before["pid"], after["pid"]);
        assert_eq!(before["address"], after["address"]);
        let said = format!("{name} was killed by signal 9");
        assert!(cluster.output().contains(&said), "{}", cluster.output());
        eventually("it is ready again", || cluster.is_ready()).await;
        eventually(&format!("it answers after {name} was killed"), || async {
            cluster.complete(&[0, 964], 2).await.0 == 200
        })
        .await;
        check_answers(&cluster).await;
    }
}

#[tokio::test]
async fn an_interrupt_ends_everything_within_ten_seconds() {
    let mut cluster = Cluster::start("--prefill 1 --decode 1").await;
    let pids = cluster.pids();
    assert_eq!(pids.len(), 5);
    let (status, took) = cluster.interrupt().await;
    assert!(status.success(), "{status}: {}", cluster.logs());
    assert!(took < Duration::from_secs(10), "it took {took:?}");
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
}

#[tokio::test]
async fn an_interrupt_during_requests_ends_everything_within_ten_seconds() {
    let mut cluster = Cluster::start("--both 1").await;
    let pids = cluster.pids();
    let client = cluster.client.clone();
    let url = format!("{}/v1/completions", cluster.url);
    let body = serde_json::json!({
        "model": cluster.model, "prompt": [0, 964], "max_tokens": 4000, "ignore_eos": true,
    });
    let request = tokio::spawn(async move { client.post(url).json(&body).send().await.is_ok() });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let (_, took) = cluster.interrupt().await;
    assert!(took < Duration::from_secs(10), "it took {took:?}: {}", cluster.output());
    assert!(pids.iter().all(|pid| !is_alive(*pid)));
    // Answered or cut off, but not left hanging.
    request.await.expect("the request has ended");
}

#[tokio::test]
async fn an_interrupt_that_is_sent_twice_does_not_cut_the_drain_short() {
    let mut cluster = Cluster::start("--both 1").await;
    let (client, url) = (cluster.client.clone(), format!("{}/v1/completions", cluster.url));
    // Longer than the conductor drains, so that its drain takes several seconds.
    let body = serde_json::json!({
        "model": cluster.model, "prompt": [0, 964], "max_tokens": 4000, "ignore_eos": true,
    });
    let request = tokio::spawn(async move { client.post(url).json(&body).send().await.is_ok() });
    tokio::time::sleep(Duration::from_millis(200)).await;
    cluster.send_interrupt();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let (status, _) = cluster.interrupt().await;
    assert!(status.success(), "{status}: {}", cluster.logs());
    let output = cluster.output();
    assert!(!output.contains("second signal"), "{output}");
    request.await.expect("the request has ended");
}

#[tokio::test]
async fn nothing_outlives_a_killed_up() {
    let mut cluster = Cluster::start("--both 1").await;
    let pids = cluster.pids();
    assert!(pids.iter().all(|pid| is_alive(*pid)));
    cluster.kill_up();
    all_gone(&pids).await;
}

#[tokio::test]
async fn two_clusters_run_side_by_side() {
    let (one, two) = tokio::join!(Cluster::start("--both 1"), Cluster::start("--both 1"));
    assert_ne!(one.url, two.url);
    tokio::join!(check_answers(&one), check_answers(&two));
}

#[tokio::test]
async fn what_is_said_at_the_start_can_be_used() {
    let cluster = Cluster::start("--both 1").await;
    let said = cluster.output();
    assert!(said.contains(&format!("curl -N {}/v1/chat/completions", cluster.url)), "{said}");
    assert!(said.contains("state.json"), "{said}");
    for name in cluster.process_names() {
        assert!(said.contains(&name), "{said}");
        cluster.metrics(&name).await;
    }
    assert_eq!(cluster.get("/healthz").await.0, 200);
    let (status, models) = cluster.get("/v1/models").await;
    assert_eq!(status, 200);
    assert!(models.contains("tiny-deepseek-v2"), "{models}");
}
