//! Objects of clients that the object store keeps, and that are removed.

use std::time::Duration;

use kvasir_client::{Class, Client, Error, Key, OpenOptions, Outcome, PutOptions};
use kvasir_store_node::config::Domain;

use crate::common::*;
use crate::s3::{Mode, S3};

const OBJECT_BYTES: usize = 4_000;

async fn start(s3: &S3) -> TestNode {
    let settings = s3.settings();
    let node = TestNode::start_with(Domain::Shm, |config| config.object_store = settings).await;
    until("it is ready", async || {
        node.get("/readyz").await.1.contains("object store: ready").then_some(())
    })
    .await;
    node
}

/// Calls of a client wait.
async fn call<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(call).await.expect("no panic")
}

async fn open(node: &TestNode) -> Client {
    let options = OpenOptions {
        tenant: "tenant".into(),
        object_bytes_max: OBJECT_BYTES as u64,
        ..OpenOptions::new(node.attach_dir())
    };
    call(move || Client::open(&options)).await.expect("a client")
}

async fn keep(client: &Client, key: Key, byte: u8) -> Outcome {
    let client = client.clone();
    let class = Class::Context { ttl: Duration::from_secs(600) };
    let options = PutOptions { class, ..PutOptions::default() };
    let put = move || client.put(&[(key, &[byte; OBJECT_BYTES])], &options);
    call(put).await.expect("room").remove(0)
}

async fn remove(client: &Client, key: Key) -> Result<usize, Error> {
    let client = client.clone();
    call(move || client.remove(&[key])).await
}

async fn exists(client: &Client, key: Key) -> bool {
    let client = client.clone();
    call(move || client.exists(&[key])).await.expect("an answer")[0]
}

/// The first byte of an object, all of which are alike.
async fn get(client: &Client, key: Key) -> Option<u8> {
    let client = client.clone();
    call(move || {
        let got = client.get_verified(&[key]).expect("an answer").remove(0)?;
        assert!(got.iter().all(|byte| *byte == got[0]));
        Some(got[0])
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_was_removed_is_there_under_none_of_its_names_and_nothing_brings_it_back() {
    let s3 = S3::start().await;
    let node = start(&s3).await;
    let client = open(&node).await;
    let (key, other) = (client.key(b"object"), client.key(b"other"));
    assert_eq!(keep(&client, key, 1).await, Outcome::Stored);
    assert_eq!(keep(&client, other, 2).await, Outcome::Stored);
    let names = s3.names();
    let own = names.iter().find(|name| name.contains(&hex(&key))).expect("it is there").clone();
    // A change of its times that was cut short has left a second name.
    let (before, last) = own.rsplit_once('/').expect("a name");
    let mut parts: Vec<&str> = last.split('-').collect();
    let until_unix_ms = u64::from_str_radix(parts[1], 16).expect("a time") - 1;
    let until_unix_ms = format!("{until_unix_ms:x}");
    parts[1] = &until_unix_ms;
    s3.put(&format!("{before}/{}", parts.join("-")), s3.get(&own).expect("it is there"));

    assert_eq!(remove(&client, key).await.expect("an answer"), 1);
    let left: Vec<String> = names.into_iter().filter(|name| *name != own).collect();
    assert_eq!(s3.names(), left, "all is gone when that is said");
    assert!(!exists(&client, key).await);
    // Under its name another one is kept, and found by who comes later.
    assert_eq!(keep(&client, key, 3).await, Outcome::Stored);
    drop(client);
    drop(node);
    let node = start(&s3).await;
    let client = open(&node).await;
    assert_eq!(get(&client, key).await, Some(3));
    assert_eq!(remove(&client, key).await.expect("an answer"), 1);
    let node = start(&s3).await;
    let client = open(&node).await;
    assert!(!exists(&client, key).await);
    assert_eq!(get(&client, other).await, Some(2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removal_that_the_object_store_does_not_take_is_an_error_and_made_good_later() {
    let s3 = S3::start().await;
    let node = start(&s3).await;
    let client = open(&node).await;
    let key = client.key(b"object");
    assert_eq!(keep(&client, key, 1).await, Outcome::Stored);
    s3.set(Mode::Keeps);
    let failed = remove(&client, key).await.expect_err("it is not gone").to_string();
    assert!(failed.contains("a restart may bring back"), "{failed}");
    assert!(!exists(&client, key).await);
    // It does all else.
    assert_eq!(keep(&client, client.key(b"other"), 2).await, Outcome::Stored);
    let lists = s3.served("LIST");
    until("it is listed", async || (s3.served("LIST") > lists + 2).then_some(())).await;
    assert!(!exists(&client, key).await);
    assert_eq!(s3.names().len(), 2);
    s3.set(Mode::Good);
    until("it is gone", async || (s3.names().len() == 1).then_some(())).await;
    assert_eq!(keep(&client, key, 3).await, Outcome::Stored);
    assert_eq!(get(&client, key).await, Some(3));

    s3.set(Mode::Fails);
    until("it is seen to fail", async || {
        let text = node.get("/readyz").await.1;
        text.contains("object store: failed").then_some(())
    })
    .await;
    let refused = remove(&client, key).await.expect_err("it would be there").to_string();
    assert!(refused.contains("does not answer"), "{refused}");
    assert_eq!(get(&client, key).await, Some(3), "nothing was removed");
}

fn hex(key: &Key) -> String {
    key.0.iter().map(|byte| format!("{byte:02x}")).collect()
}
