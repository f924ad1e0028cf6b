//! A decode node is drained under load: nobody notices, what was kept there is kept by the other, and it
//! serves again when it is told to.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support::answers::{cached_tokens, check_case, reusable_tokens};
use crate::support::cluster::{Cluster, KVASIR};
use crate::support::load::{Amount, Fault, all_answered, load};
use crate::support::stored::Stored;
use crate::support::vectors::{BLOCK_TOKENS, Case, Variant};
use crate::support::{eventually, lose_cache};
use serde_json::Value;

const DECODE: [&str; 2] = ["decode-1-node", "decode-2-node"];
const GENERATED: &str = "kvasir_engine_generated_tokens_total";

fn address(cluster: &Cluster, node: &str) -> String {
    let state = cluster.state();
    let metrics = state["processes"][node]["metrics"].as_str().expect("a URL");
    let address = metrics.strip_prefix("http://").and_then(|url| url.strip_suffix("/metrics"));
    address.expect("of HTTP").to_owned()
}

fn admin(cluster: &Cluster, node: &str, words: &str) -> Command {
    let mut command = Command::new(KVASIR);
    command.args(["--log", "warn", "admin", "--node", &address(cluster, node)]);
    command.args(words.split_whitespace()).stdin(Stdio::null());
    command
}

fn output(mut command: Command) -> Output {
    command.output().expect("the binary can be started")
}

/// What it says, one object a line.
fn asked(cluster: &Cluster, node: &str, words: &str) -> Vec<Value> {
    let output = output(admin(cluster, node, &format!("{words} --json")));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{words}: {output:?}");
    said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// A case, and the nodes of the two decode engines: the one that has decoded it, which keeps its blocks, and
/// the other.
async fn kept_case(cluster: &Cluster) -> (Case, [&'static str; 2]) {
    let case = Variant::Plain.longest();
    let blocks = case.prompt.len() / BLOCK_TOKENS;
    check_case(cluster, &case).await;
    let keys = Stored::of(cluster, DECODE[0]).await.keys(&case.prompt).await;
    let has =
        async |node: &str| Stored::of(cluster, node).await.blocks(&keys).await.len() == blocks;
    eventually("one of them has decoded it", async || has(DECODE[0]).await || has(DECODE[1]).await)
        .await;
    let nodes = if has(DECODE[0]).await { DECODE } else { [DECODE[1], DECODE[0]] };
    let kept = Stored::of(cluster, nodes[0]).await.keep(&case.prompt).await.expect("kept");
    assert_eq!(kept, blocks as u32);
    (case, nodes)
}

async fn ends_well(child: &mut Child) {
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("it is our child") {
            break status;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "the command does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(status.success(), "{status}");
}

#[tokio::test]
async fn a_drained_decode_node_is_not_missed_and_what_it_kept_is_answered_from_the_other() {
    let flags = "--prefill 1 --decode 2 --always-fetch --ssd-bytes 256MiB";
    let cluster = Cluster::start(flags).await;
    for node in DECODE {
        eventually("the SSD is ready", async || {
            Stored::of(&cluster, node).await.ssd().await.usable
        })
        .await;
    }
    let (case, [drained, other]) = kept_case(&cluster).await;
    let idle_engine = drained.strip_suffix("-node").expect("named after its engine");
    let blocks = case.prompt.len() / BLOCK_TOKENS;

    let amount = Amount { at_once: 4, total: 40, deadline: Duration::from_secs(60) };
    let to = address(&cluster, other);
    let mut drain = None;
    let act = || {
        let words = format!("drain --wait --to {to}");
        let child = admin(&cluster, drained, &words).stdout(Stdio::null()).spawn();
        drain = Some(child.expect("the binary can be started"));
    };
    let cases = Variant::Plain.cases();
    let tallies = load(&cluster, &cases, amount, Fault { after: 10, act }).await;
    let answered = tallies.before.answered() + tallies.after.answered();
    assert_eq!(answered, amount.total, "{tallies:?}");
    ends_well(drain.as_mut().expect("it was begun")).await;

    let status = asked(&cluster, drained, "status").remove(0);
    assert_eq!((&status["drain"]["drained"], &status["shares"]), (&true.into(), &0.into()));
    assert_eq!(status["drain"]["context_chains_copied"], 1, "{status}");
    assert_eq!(cluster.ready_of(drained).await, (503, "draining\n".into()));
    // As many blocks, kept for the same tenant until the same time.
    let mut kept = [drained, other].map(|node| asked(&cluster, node, "list --block-class context"));
    for of in &mut kept {
        of.iter_mut().for_each(|block| block["dram"] = Value::Null);
        of.sort_by_key(|block| block["key"].to_string());
    }
    assert_eq!(kept[0].len(), blocks);
    assert_eq!(kept[0], kept[1]);

    // The prefill side has nothing of it any more, and the drained node is asked for nothing.
    lose_cache(&cluster, "prefill-1-node").await;
    let sent = "kvasir_store_pushed_bytes_total";
    let before =
        (cluster.sum(drained, sent, &[]).await, cluster.sum(idle_engine, GENERATED, &[]).await);
    let answer = check_case(&cluster, &case).await;
    assert_eq!(cached_tokens(&answer), reusable_tokens(case.prompt.len()));
    assert!(cluster.sum(other, sent, &[]).await > 0.0, "it came from the other");
    let after =
        (cluster.sum(drained, sent, &[]).await, cluster.sum(idle_engine, GENERATED, &[]).await);
    assert_eq!(before, after, "the drained node and its engine had work");

    asked(&cluster, drained, "drain --cancel");
    assert_eq!(cluster.ready_of(drained).await.0, 200);
    all_answered(&cluster, &cases, Amount { total: 10, ..amount }).await;

    // An administrator names the last block, and all of the chain goes where it shall.
    lose_cache(&cluster, "prefill-1-node").await;
    let keys = Stored::of(&cluster, other).await.keys(&case.prompt).await;
    let last: String = keys[blocks - 1].0.iter().map(|byte| format!("{byte:02x}")).collect();
    let to = address(&cluster, "prefill-1-node");
    let copied = asked(&cluster, other, &format!("replicate {last} --to {to}")).remove(0);
    assert_eq!(copied["blocks"], blocks, "{copied}");
    let there = Stored::of(&cluster, "prefill-1-node").await.blocks(&keys).await;
    assert_eq!(there.len(), blocks);
}

#[test]
fn an_administrator_is_told_what_to_do() {
    let check = |words: &str, told: &str| {
        let mut command = Command::new(KVASIR);
        command.arg("admin").args(words.split_whitespace()).stdin(Stdio::null());
        let output = output(command);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(told), "{words}: {said}");
    };
    check("--node 127.0.0.1:1 status", "`listen` in its configuration");
    check("--node nowhere status", "`listen` in its configuration");
    check("status", "--node");
    check("--node 127.0.0.1:1 evict", "--key");
    check("--node 127.0.0.1:1 drain --cancel --wait", "cannot be used with");
}
