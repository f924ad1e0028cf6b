//! Engines that can do both are told what to do as the load moves from long prompts to long answers. Two
//! conductors serve, both follow, and no request notices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::cluster::Cluster;
use crate::support::eventually;
use crate::support::second::Second;
use crate::support::vectors::Variant;
use futures::future::join_all;
use serde_json::{Value, json};

/// A bound for a broken system, not something that is measured.
const MOVED_WITHIN: Duration = Duration::from_secs(120);

/// What each engine does, as a conductor sees it.
async fn roles(cluster: &Cluster, watch: &str) -> Vec<(String, String)> {
    let reply = cluster.client.get(format!("{watch}/state")).send().await.expect("it answers");
    let state: Value = reply.json().await.expect("JSON");
    let nodes = state["cluster"]["nodes"].as_array().expect("nodes").iter();
    let engines = nodes.flat_map(|node| node["instances"].as_array().expect("instances"));
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let mut roles: Vec<_> =
        engines.map(|engine| (text(&engine["instance"]), text(&engine["current_role"]))).collect();
    roles.sort();
    roles
}

fn count(roles: &[(String, String)], role: &str) -> usize {
    roles.iter().filter(|(_, plays)| plays == role).count()
}

/// What is asked again and again.
#[derive(Debug, Clone, Copy)]
struct Shape {
    prompt_tokens: usize,
    generated_tokens: u32,
    at_once: u32,
}

/// Asks both conductors until it is told to end. Every answer must be there, whole. Answers with their number.
async fn asks(cluster: &Cluster, urls: &[&str], shape: Shape, ends: &AtomicBool) -> usize {
    let longest = Variant::Plain.longest().prompt;
    let one = async |asker: u32| {
        let mut answered = 0;
        while !ends.load(Ordering::Relaxed) {
            // No two have a block in common.
            let mut prompt = longest[..shape.prompt_tokens].to_vec();
            (prompt[1], prompt[2]) = (5 + asker, 5 + answered % 500);
            let body = json!({
                "model": cluster.model, "prompt": prompt, "max_tokens": shape.generated_tokens,
                "temperature": 0, "ignore_eos": true, "return_token_ids": true,
            });
            let url = format!("{}/v1/completions", urls[asker as usize % urls.len()]);
            let reply = cluster.client.post(url).json(&body).send().await.expect("an answer");
            let (status, answer) = (reply.status(), reply.json::<Value>().await.expect("JSON"));
            assert_eq!(status, 200, "{answer}");
            let tokens = answer["choices"][0]["token_ids"].as_array().expect("tokens").len();
            assert_eq!(tokens, shape.generated_tokens as usize);
            answered += 1;
        }
        answered as usize
    };
    join_all((0..shape.at_once).map(one)).await.into_iter().sum()
}

/// Asks until both conductors see what is wanted, and alike.
async fn asks_until(
    cluster: &Cluster,
    second: &Second,
    shape: Shape,
    wanted: impl Fn(&[(String, String)]) -> bool,
) -> usize {
    let state = cluster.state();
    let watch = state["monitor"].as_str().expect("a URL");
    let ends = AtomicBool::new(false);
    let began = Instant::now();
    let watches = async {
        loop {
            let seen = [roles(cluster, watch).await, roles(cluster, &second.watch).await];
            if seen[0] == seen[1] && wanted(&seen[0]) {
                break;
            }
            assert!(began.elapsed() < MOVED_WITHIN, "{shape:?} has come to {seen:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        ends.store(true, Ordering::Relaxed);
    };
    let urls = [&*cluster.url, &*second.url];
    tokio::join!(asks(cluster, &urls, shape, &ends), watches).0
}

#[tokio::test]
async fn roles_follow_the_load_and_no_request_notices() {
    let cluster = Cluster::start(
        "--both 3 --balance auto --balance-window-ms 1000 --prefill-chunk-tokens 64 --dram-bytes 128MiB \
         --ttft-objective-ms 600000 --tbt-objective-ms 600000",
    )
    .await;
    let second = Second::start(&cluster).await;
    let state = cluster.state();
    let watch = state["monitor"].as_str().expect("a URL");
    assert_eq!(count(&roles(&cluster, watch).await, "both"), 3, "nobody has said anything yet");

    let prompts = Shape { prompt_tokens: 1_500, generated_tokens: 2, at_once: 6 };
    let asked = asks_until(&cluster, &second, prompts, |seen| {
        count(seen, "prefill") == 2 && count(seen, "decode") == 1
    })
    .await;
    assert!(asked > 0);

    let answers = Shape { prompt_tokens: 20, generated_tokens: 200, at_once: 48 };
    let asked = asks_until(&cluster, &second, answers, |seen| {
        count(seen, "prefill") == 1 && count(seen, "decode") == 2
    })
    .await;
    assert!(asked > 0);
    let told = "kvasir_conductor_role_changes_total";
    let here = cluster.sum("conductor", told, &[("outcome", "changed")]).await;
    let failed = cluster.sum("conductor", told, &[("outcome", "failed")]).await;
    assert!(here <= 8.0 && failed == 0.0, "{here} changes, {failed} failed");

    // The one that prefills is lost: its node comes back with an engine that does both, and until then
    // the others do both.
    let seen = roles(&cluster, watch).await;
    let (lost, _) = seen.iter().find(|(_, role)| role == "prefill").expect("one prefills");
    cluster.kill(&format!("{lost}-node"));
    eventually("another one prefills", async || {
        let (status, _) = cluster.complete(&[1, 2, 3], 2).await;
        status == 200
    })
    .await;
    eventually("all are back", async || roles(&cluster, watch).await.len() == 3).await;
}
