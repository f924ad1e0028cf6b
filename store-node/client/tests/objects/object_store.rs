//! Objects that an object store keeps, and that are removed.

use std::time::Duration;

use kvasir_client::{Class, Client, Key, Outcome, PutOptions};

use crate::s3::{Mode, S3};
use crate::{Node, bytes, until};

const OBJECT_BYTES: usize = 4_000;

/// A runtime on which an object store is served, and that.
fn object_store() -> (tokio::runtime::Runtime, S3) {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let s3 = runtime.block_on(S3::start());
    (runtime, s3)
}

/// One without an SSD.
fn start(s3: &S3) -> Node {
    let node = Node::start(|config, _| config.object_store = s3.settings());
    says(&node, "object store: ready");
    node
}

fn says(node: &Node, words: &str) {
    until(words, || node.page("/readyz").contains(words));
}

fn keep(client: &Client, key: Key, seed: usize) -> Outcome {
    let class = Class::Context { ttl: Duration::from_secs(600) };
    let options = PutOptions { class, ..PutOptions::default() };
    client.put(&[(key, &bytes(seed, OBJECT_BYTES))], &options).expect("room").remove(0)
}

fn exists(client: &Client, key: Key) -> bool {
    client.exists(&[key]).expect("an answer")[0]
}

fn is_got(client: &Client, key: Key, seed: usize) -> bool {
    let got = client.get_verified(&[key]).expect("an answer").remove(0);
    got.is_some_and(|object| object[..] == bytes(seed, OBJECT_BYTES)[..])
}

#[test]
fn an_object_that_was_removed_is_there_under_none_of_its_names_and_nothing_brings_it_back() {
    let (_runtime, s3) = object_store();
    let node = start(&s3);
    let client = node.client();
    let (key, other) = (client.key(b"object"), client.key(b"other"));
    assert_eq!(keep(&client, key, 1), Outcome::Stored);
    assert_eq!(keep(&client, other, 2), Outcome::Stored);
    let names = s3.names();
    let hex: String = key.0.iter().map(|byte| format!("{byte:02x}")).collect();
    let own = names.iter().find(|name| name.contains(&hex)).expect("it is there").clone();
    // A change of its times that was cut short has left a second name.
    let (before, last) = own.rsplit_once('/').expect("a name");
    let mut parts: Vec<&str> = last.split('-').collect();
    let expires_unix_ms = u64::from_str_radix(parts[1], 16).expect("a time") - 1;
    let expires_unix_ms = format!("{expires_unix_ms:x}");
    parts[1] = &expires_unix_ms;
    s3.put(&format!("{before}/{}", parts.join("-")), s3.get(&own).expect("it is there"));

    assert_eq!(client.remove(&[key]).expect("an answer"), 1);
    let left: Vec<String> = names.into_iter().filter(|name| *name != own).collect();
    assert_eq!(s3.names(), left, "all is gone when that is said");
    assert!(!exists(&client, key));
    // Under its name another one is kept, and found by who comes later.
    assert_eq!(keep(&client, key, 3), Outcome::Stored);
    drop((client, node));
    let node = start(&s3);
    let client = node.client();
    assert!(is_got(&client, key, 3));
    assert_eq!(client.remove(&[key]).expect("an answer"), 1);
    drop((client, node));
    let node = start(&s3);
    let client = node.client();
    assert!(!exists(&client, key));
    assert!(is_got(&client, other, 2));
}

#[test]
fn a_removal_that_the_object_store_does_not_take_is_an_error_and_made_good_later() {
    let (_runtime, s3) = object_store();
    let node = start(&s3);
    let client = node.client();
    let key = client.key(b"object");
    assert_eq!(keep(&client, key, 1), Outcome::Stored);
    s3.set(Mode::Keeps);
    let failed = client.remove(&[key]).expect_err("it is not gone").to_string();
    assert!(failed.contains("a restart may restore the objects"), "{failed}");
    assert!(!exists(&client, key));
    // It does all else.
    assert_eq!(keep(&client, client.key(b"other"), 2), Outcome::Stored);
    let lists = s3.served("LIST");
    until("it is listed", || s3.served("LIST") > lists + 2);
    assert!(!exists(&client, key));
    assert_eq!(s3.names().len(), 2);
    s3.set(Mode::Good);
    until("it is gone", || s3.names().len() == 1);
    assert_eq!(keep(&client, key, 3), Outcome::Stored);
    assert!(is_got(&client, key, 3));

    s3.set(Mode::Fails);
    says(&node, "object store: failed");
    let refused = client.remove(&[key]).expect_err("it would be there").to_string();
    assert!(refused.contains("does not answer"), "{refused}");
    assert!(is_got(&client, key, 3), "nothing was removed");
}
