//! Contexts on real clusters: what was promised outlives conductors and store nodes, and ends when it is
//! dropped.

use std::process::{Command, Stdio};

use crate::support::answers::{cached_tokens, check_case, reusable_tokens};
use crate::support::cluster::{Cluster, KVASIR};
use crate::support::keyed::Keyed;
use crate::support::vectors::{BLOCK_TOKENS, Case, Variant};
use crate::support::{eventually, lose_cache};
use serde_json::{Value, json};

const CONTEXTS: &str = "/v1/contexts";
const TTL_S: u64 = 5_000;

fn case() -> Case {
    Variant::Plain.longest()
}

async fn create(cluster: &Cluster, prompt: &[u32]) -> Value {
    let body = json!({"model": cluster.model, "prompt": prompt, "ttl_seconds": TTL_S});
    let (status, created) = cluster.post(CONTEXTS, &body).await;
    assert_eq!(status, 200, "{created}");
    created
}

async fn get(cluster: &Cluster, path: &str) -> (u16, Value) {
    let (status, text) = cluster.get(path).await;
    (status, serde_json::from_str(&text).unwrap_or_default())
}

/// The ids of all that is kept, once every node has said so.
async fn ids(cluster: &Cluster) -> Vec<String> {
    let list = async || get(cluster, CONTEXTS).await.1;
    eventually("all nodes say what they keep", async || list().await["complete"] == true).await;
    let listed = list().await;
    assert_eq!(listed["complete"], true, "{listed}");
    let data = listed["data"].as_array().expect("a list").iter();
    data.map(|one| one["id"].as_str().expect("an id").to_owned()).collect()
}

async fn delete(cluster: &Cluster, id: &str) -> u16 {
    let url = format!("{}{CONTEXTS}/{id}", cluster.url);
    let answer = cluster.client.delete(url).send().await.expect("an answer");
    answer.status().as_u16()
}

/// What `kvasir admin` says of one node, one object a line.
fn admin(cluster: &Cluster, node: &str, words: &[&str]) -> Vec<Value> {
    let state = cluster.state();
    let metrics = state["processes"][node]["metrics"].as_str().expect("a URL");
    let address = metrics.trim_start_matches("http://").trim_end_matches("/metrics");
    let mut command = Command::new(KVASIR);
    command.args(["--log", "warn", "admin", "--node", address, "--json"]).args(words);
    let output = command.stdin(Stdio::null()).output().expect("it can be started");
    assert!(output.status.success(), "{words:?}: {output:?}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Both nodes lose what they have in memory; what they kept has been found again.
async fn lose_all(cluster: &Cluster) {
    for node in ["decode-1-node", "prefill-1-node"] {
        lose_cache(cluster, node).await;
    }
}

#[tokio::test]
async fn a_context_outlives_everybody_and_ends_when_it_is_dropped() {
    let cluster = Cluster::start("--ssd-bytes 256MiB").await;
    let case = case();
    let blocks = case.prompt.len() / BLOCK_TOKENS;
    let created = create(&cluster, &case.prompt).await;
    let id = created["id"].as_str().expect("an id").to_owned();
    assert_eq!(created["tokens"], blocks * BLOCK_TOKENS);
    assert_eq!(created["prompt_tokens"], case.prompt.len());
    let path = format!("{CONTEXTS}/{id}");
    let time = |of: &Value, name: &str| of[name].as_u64().expect("a time");
    assert_eq!(time(&created, "expires_at") - time(&created, "created_at"), TTL_S);
    // A beginning of it, kept from what is there: a context of its own.
    let shorter = create(&cluster, &case.prompt[..(blocks - 1) * BLOCK_TOKENS]).await;
    let shorter = shorter["id"].as_str().expect("an id").to_owned();
    let mut both = vec![id.clone(), shorter.clone()];
    both.sort();

    // Who begins with it finds it.
    let answer = check_case(&cluster, &case).await;
    assert_eq!(cached_tokens(&answer), reusable_tokens(case.prompt.len()));
    let (status, found) = get(&cluster, &path).await;
    assert_eq!((status, &found["expires_at"]), (200, &created["expires_at"]));
    assert_eq!(ids(&cluster).await, both);

    // Another conductor knows as much, and gives it more time.
    cluster.kill("conductor");
    eventually("the conductor is another one", async || {
        cluster.restarts("conductor") == 1 && cluster.is_ready().await
    })
    .await;
    assert_eq!(ids(&cluster).await, both);
    let (status, extended) = cluster.post(&path, &json!({"ttl_seconds": 2 * TTL_S})).await;
    assert_eq!(status, 200, "{extended}");
    assert!(time(&extended, "expires_at") > time(&created, "expires_at"));
    assert_eq!(extended["created_at"], created["created_at"]);

    // So do the nodes that come after those which promised.
    lose_all(&cluster).await;
    assert_eq!(ids(&cluster).await, both);
    let (status, found) = get(&cluster, &path).await;
    assert_eq!((status, &found), (200, &extended));
    let answer = check_case(&cluster, &case).await;
    assert_eq!(cached_tokens(&answer), reusable_tokens(case.prompt.len()));
    let risen = ("kvasir_store_block_events_total", [("event", "promoted")]);
    assert!(cluster.sum("node", risen.0, &risen.1).await > 0.0, "they came from the SSD");

    // What is dropped is gone, and stays gone; what it went through stays.
    assert_eq!(delete(&cluster, &id).await, 200);
    assert_eq!(get(&cluster, &path).await.0, 404);
    assert_eq!(delete(&cluster, &id).await, 404);
    assert_eq!(cluster.post(&path, &json!({"ttl_seconds": 1})).await.0, 404);
    assert_eq!(ids(&cluster).await, [shorter.as_str()]);
    lose_all(&cluster).await;
    assert_eq!(ids(&cluster).await, [shorter.as_str()]);
    assert_eq!(get(&cluster, &path).await.0, 404);

    // An administrator sees what is left, node by node, and ends it.
    let mut ended = 0;
    for node in ["decode-1-node", "prefill-1-node"] {
        for context in admin(&cluster, node, &["contexts"]) {
            assert_eq!(context["blocks"], blocks - 1);
            let (namespace, key) = (&context["namespace"], &context["last_key"]);
            let (namespace, key) = (namespace.as_str().expect("hex"), key.as_str().expect("hex"));
            let of = ["--namespace", namespace, "--key", key];
            admin(&cluster, node, &[&["delete-context"][..], &of].concat());
            assert!(admin(&cluster, node, &["contexts"]).is_empty());
            ended += 1;
        }
    }
    assert!(ended > 0);
    assert!(ids(&cluster).await.is_empty());
}

#[tokio::test]
async fn tenants_have_contexts_of_their_own_at_real_nodes() {
    let cluster = Cluster::start("--ssd-bytes 256MiB").await;
    let keyed = Keyed::start(&cluster).await;
    let prompt = case().prompt;
    let body = json!({"model": cluster.model, "prompt": prompt, "ttl_seconds": TTL_S});
    let (status, of_a) = keyed.send("POST", CONTEXTS, "a", Some(body)).await;
    assert_eq!(status, 200, "{of_a}");
    let path = format!("{CONTEXTS}/{}", of_a["id"].as_str().expect("an id"));
    let of_nobody = create(&cluster, &prompt).await;
    assert_ne!(of_nobody["id"], of_a["id"]);
    for method in ["GET", "DELETE"] {
        assert_eq!(keyed.send(method, &path, "b", None).await.0, 404, "{method} by b");
    }
    assert_eq!(keyed.send("POST", &path, "b", Some(json!({"ttl_seconds": 1}))).await.0, 404);
    assert_eq!(get(&cluster, &path).await.0, 404);
    assert_eq!(keyed.send("GET", CONTEXTS, "b", None).await.1["data"], json!([]));
    assert_eq!(ids(&cluster).await, [of_nobody["id"].as_str().expect("an id")]);
    let listed = keyed.send("GET", CONTEXTS, "a", None).await.1;
    assert_eq!(listed["data"][0]["id"], of_a["id"]);
    assert_eq!(listed["data"].as_array().expect("a list").len(), 1);
    assert_eq!(keyed.send("DELETE", &path, "a", None).await.0, 200);
    assert_eq!(ids(&cluster).await.len(), 1, "nobody's is there still");
}
