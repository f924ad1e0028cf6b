//! Clients against a store node in this process.

mod object_store;
mod rude;
#[path = "../../../tests/object_store/s3.rs"]
mod s3;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use kvasir_client::{Class, Client, Error, Key, OpenOptions, Outcome, PutOptions, Tier};
use kvasir_proto::v1;
use kvasir_store_node::config::{Config, Ssd};
use kvasir_store_node::{Running, start};
use kvasir_transfer::Domain;
use tempfile::TempDir;
use tonic::transport::Endpoint;
use v1::admin_client::AdminClient;

#[test]
fn the_integration_guide_shows_the_compiled_example() {
    let guide = include_str!("../../../../docs/integrate/objects.md");
    let example = include_str!("../../examples/objects.rs");
    let (_, program) = example.split_once("\n\nuse ").expect("a header before the program");
    let shown = format!("```rust\nuse {program}```\n");
    assert!(guide.contains(&shown), "copy the program of examples/objects.rs to the guide");
}

/// Long enough that a slow machine never meets it.
const PATIENCE: Duration = Duration::from_secs(30);
const OBJECT_BYTES: usize = 10_000;

struct Node {
    config: Config,
    running: Option<Running>,
    runtime: tokio::runtime::Runtime,
    dir: TempDir,
}

impl Node {
    fn start(change: impl FnOnce(&mut Config, &Path)) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let any_port = ([127, 0, 0, 1], 0).into();
        let mut config = Config {
            node_id: "test".into(),
            listen: any_port,
            transfer_listen: any_port,
            attach_dir: dir.path().join("attach"),
            dram_bytes: 1 << 20,
            tail_bytes: 1 << 20,
            drain_timeout_ms: 500,
            ..Config::default()
        };
        change(&mut config, dir.path());
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let running = runtime.block_on(start(config.clone())).expect("a node");
        Node { config, running: Some(running), runtime, dir }
    }

    /// Its clients have to open anew.
    fn restart(&mut self) {
        self.stop();
        let running = self.runtime.block_on(start(self.config.clone()));
        self.running = Some(running.expect("a node"));
    }

    fn options(&self) -> OpenOptions {
        OpenOptions {
            tenant: "tenant".into(),
            object_bytes_max: OBJECT_BYTES as u64,
            ..OpenOptions::new(self.dir.path().join("attach"))
        }
    }

    /// Where gRPC is served.
    fn address(&self) -> String {
        self.running.as_ref().expect("it runs").address().to_string()
    }

    fn page(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.address()).expect("it listens");
        let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("it listens");
        let mut page = String::new();
        stream.read_to_string(&mut page).expect("a page");
        page
    }

    fn metric(&self, name: &str) -> f64 {
        let page = self.page("/metrics");
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{name} is not in {page}")).parse().expect("a number")
    }

    fn client(&self) -> Client {
        Client::open(&self.options()).expect("a client")
    }

    fn stop(&mut self) {
        if let Some(mut running) = self.running.take() {
            self.runtime.block_on(running.shut_down());
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop();
    }
}

fn plain() -> Node {
    Node::start(|_, _| {})
}

fn bytes(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + at / 256 + seed * 17) as u8).collect()
}

fn keys(client: &Client, count: usize) -> Vec<Key> {
    (0..count).map(|at| client.key(&at.to_le_bytes())).collect()
}

fn until(what: &str, mut look: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !look() {
        assert!(begun.elapsed() < PATIENCE, "not in time: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn what_was_put_is_got_as_it_was_whatever_its_length() {
    let node = plain();
    let client = node.client();
    let objects: Vec<(Key, Vec<u8>)> = [0, 1, 63, 64, 4_096, 9_999, OBJECT_BYTES]
        .into_iter()
        .map(|length| (client.key(&length.to_le_bytes()), bytes(length, length)))
        .collect();
    let put: Vec<(Key, &[u8])> = objects.iter().map(|(key, bytes)| (*key, &bytes[..])).collect();
    let outcomes = client.put(&put, &PutOptions::default()).expect("room");
    assert_eq!(outcomes, vec![Outcome::Stored; objects.len()]);
    let mut wanted: Vec<Key> = objects.iter().map(|(key, _)| *key).collect();
    wanted.insert(3, client.key(b"absent"));
    for got in [client.get(&wanted), client.get_verified(&wanted)] {
        let mut got = got.expect("an answer");
        assert!(got.remove(3).is_none());
        for (object, (_, bytes)) in got.iter().zip(&objects) {
            let object = object.as_ref().expect("it was put");
            assert_eq!(object[..], bytes[..]);
            assert!(object.is_current());
        }
    }
    let again = client.put(&put, &PutOptions::default()).expect("an answer");
    assert_eq!(again, vec![Outcome::Exists; objects.len()]);
}

#[test]
fn a_batch_of_a_thousand_keys_is_looked_up_at_once_and_larger_ones_too() {
    let node = Node::start(|config, _| config.dram_bytes = 16 << 20);
    let client = node.client();
    let all = keys(&client, 40_000);
    let there: Vec<(Key, &[u8])> = all.iter().step_by(50).map(|key| (*key, &b"x"[..])).collect();
    assert_eq!(there.len(), 800);
    client.put(&there, &PutOptions::default()).expect("room");
    let exists = client.exists(&all[..1_000]).expect("an answer");
    let expected: Vec<bool> = (0..1_000).map(|at| at % 50 == 0).collect();
    assert_eq!(exists, expected);
    let exists = client.exists(&all).expect("an answer");
    assert_eq!(exists.iter().filter(|there| **there).count(), 800);
}

#[test]
fn objects_of_another_tenant_or_namespace_are_not_found() {
    let node = plain();
    let mine = node.client();
    let key = mine.key(b"secret");
    mine.put(&[(key, b"mine")], &PutOptions::default()).expect("room");
    let theirs = [
        OpenOptions { tenant: "other".into(), ..node.options() },
        OpenOptions { namespace: "other".into(), ..node.options() },
    ];
    for options in theirs {
        let other = Client::open(&options).expect("a client");
        assert_ne!(other.key(b"secret"), key);
        // Even with the very key.
        assert!(other.get(&[key]).expect("an answer")[0].is_none());
        assert_eq!(other.exists(&[key]).expect("an answer"), [false]);
        assert_eq!(other.remove(&[key]).expect("an answer"), 0);
        let outcome = other.put(&[(key, b"theirs")], &PutOptions::default());
        assert_eq!(outcome.expect("an answer"), [Outcome::Refused]);
    }
    assert_eq!(
        &mine.get(&[key]).expect("an answer")[0].as_ref().expect("still there")[..],
        b"mine"
    );
}

#[test]
fn what_is_pinned_stays_while_everything_else_makes_room() {
    let node = plain();
    let client = node.client();
    let first = client.key(b"first");
    let contents = bytes(1, OBJECT_BYTES);
    client.put(&[(first, &contents)], &PutOptions::default()).expect("room");
    let held = client.get(&[first]).expect("an answer").remove(0).expect("it is there");
    let generation = held.generation();
    let filler = bytes(2, OBJECT_BYTES);
    for key in keys(&client, 500) {
        client.put(&[(key, &filler)], &PutOptions::default()).expect("room");
    }
    assert_eq!(held[..], contents[..]);
    assert!(held.is_current());
    assert_eq!(held.generation(), generation);
    let slots = (1 << 20) / (client.object_bytes_max() + 16);
    let all: Vec<Key> = (500..500 + slots).map(|at| client.key(&at.to_le_bytes())).collect();
    let refused = client.reserve(&all, Duration::from_secs(1));
    assert!(matches!(refused, Err(Error::NoCapacity(_))), "one is pinned");
    drop(held);
    drop(client.reserve(&all, Duration::from_secs(1)).expect("none is pinned"));
    assert_eq!(client.exists(&[first]).expect("an answer"), [false]);
}

#[test]
fn nothing_is_found_before_its_commit_and_what_is_dropped_is_given_back() {
    let node = plain();
    let (writer, reader) = (node.client(), node.client());
    let two = keys(&writer, 2);
    let mut reservation = writer.reserve(&two, Duration::from_secs(10)).expect("room");
    reservation.bytes_mut(0, 5).expect("a slot").copy_from_slice(b"whole");
    reservation.fill(1, b"never committed").expect("a slot");
    assert_eq!(reader.exists(&two).expect("an answer"), [false; 2]);
    drop(reservation);
    assert_eq!(reader.exists(&two).expect("an answer"), [false; 2]);
    let mut reservation = writer.reserve(&two, Duration::from_secs(10)).expect("room");
    reservation.bytes_mut(0, 5).expect("a slot").copy_from_slice(b"whole");
    assert!(reservation.bytes_mut(2, 5).is_err());
    let outcomes = reservation.commit(Class::Normal).expect("an answer");
    assert_eq!(outcomes, [Outcome::Stored, Outcome::Lost]);
    let got = reader.get_verified(&two).expect("an answer");
    assert_eq!(&got[0].as_ref().expect("committed")[..], b"whole");
    assert!(got[1].is_none());
}

/// Its shares are no copies of the node's own: a drain counts them, and is over when they are.
#[test]
fn a_drain_waits_for_the_shares_of_clients_and_counts_them() {
    let node = plain();
    let client = node.client();
    let some = keys(&client, 2);
    let reservation = client.reserve(&some[..1], Duration::from_secs(60)).expect("room");
    let mut admin = node.runtime.block_on(async {
        let channel =
            Endpoint::from_shared(format!("http://{}", node.address())).expect("an address");
        AdminClient::new(channel.connect().await.expect("it listens"))
    });
    let status = node.runtime.block_on(admin.drain(v1::DrainRequest::default()));
    let status = status.expect("it drains").into_inner();
    assert_eq!((status.draining, status.drained, status.shares), (true, false, 1), "{status:?}");
    drop(reservation);
    until("it has drained", || {
        let drain = node.runtime.block_on(admin.status(v1::AdminStatusRequest {}));
        let drain = drain.expect("an answer").into_inner().drain.expect("it drains");
        assert!(drain.shares == 0 || !drain.drained, "{drain:?}");
        drain.drained
    });
}

#[test]
fn requests_that_cannot_be_are_errors_that_say_why() {
    let node = plain();
    let client = node.client();
    let capacity = client.object_bytes_max();
    let huge = vec![0; capacity + 1];
    let key = client.key(b"k");
    let error = client.put(&[(key, &huge)], &PutOptions::default()).expect_err("too large");
    assert!(matches!(error, Error::TooLarge { position: 0, .. }), "{error}");
    let many = keys(&client, client.objects_max() + 1);
    assert!(matches!(client.get(&many), Err(Error::TooMany { .. })));
    let all: Vec<Key> = keys(&client, 200);
    let error = client.reserve(&all, Duration::from_secs(1)).expect_err("too many for the arena");
    assert!(error.to_string().contains("this node has"), "{error}");
    let larger = OpenOptions { object_bytes_max: 1 << 19, ..node.options() };
    let error = Client::open(&larger).expect_err("slots are smaller");
    assert!(error.to_string().contains("do not fit the slots"), "{error}");
    drop(client);
    let huge = OpenOptions { object_bytes_max: 1 << 30, ..node.options() };
    until("the former client is gone", || {
        let error = Client::open(&huge).expect_err("never fits").to_string();
        error.contains("`dram_bytes` is 1048576")
    });
    let nowhere = Client::open(&OpenOptions::new("/nonexistent")).expect_err("nobody is there");
    assert!(matches!(nowhere, Error::Unreachable(_)), "{nowhere}");
    let unsaid = plain();
    let options = OpenOptions { object_bytes_max: 0, ..unsaid.options() };
    let error = Client::open(&options).expect_err("nobody said how large");
    assert!(error.to_string().contains("object_bytes_max"), "{error}");
}

#[test]
fn an_ephemeral_object_outlives_pressure_and_goes_with_its_client() {
    let node = plain();
    let (owner, other) = (node.client(), node.client());
    let key = owner.key(b"scratch");
    let options = PutOptions { class: Class::Ephemeral, ..PutOptions::default() };
    owner.put(&[(key, b"for now")], &options).expect("room");
    for filler in keys(&other, 300) {
        other.put(&[(filler, b"filler")], &PutOptions::default()).expect("room");
    }
    let read = other.get(&[key]).expect("an answer").remove(0).expect("it is held");
    drop(owner);
    until("it goes", || other.exists(&[key]).expect("an answer") == [false]);
    assert_eq!(&read[..], b"for now", "whoever reads it may go on");
}

#[test]
fn what_another_client_has_put_since_does_not_go_with_the_client_of_the_former_one() {
    let node = plain();
    let (owner, other) = (node.client(), node.client());
    let (key, last) = (owner.key(b"scratch"), owner.key(b"last"));
    let options = PutOptions { class: Class::Ephemeral, ..PutOptions::default() };
    owner.put(&[(key, b"for now"), (last, b"too")], &options).expect("room");
    assert_eq!(other.remove(&[key]).expect("an answer"), 1);
    other.put(&[(key, b"another's")], &PutOptions::default()).expect("room");
    drop(owner);
    until("what is its own goes", || other.exists(&[last]).expect("an answer") == [false]);
    let read = other.get(&[key]).expect("an answer").remove(0).expect("it is another's");
    assert_eq!(&read[..], b"another's");
}

#[test]
fn an_ephemeral_object_that_another_client_removes_takes_no_room() {
    let node = plain();
    let (owner, other) = (node.client(), node.client());
    let options = PutOptions { class: Class::Ephemeral, ..PutOptions::default() };
    // More than there are slots.
    for key in keys(&owner, 300) {
        let outcomes = owner.put(&[(key, b"for now")], &options).expect("room");
        assert_eq!(outcomes, [Outcome::Stored]);
        assert_eq!(other.remove(&[key]).expect("an answer"), 1);
    }
}

#[test]
fn an_ephemeral_object_that_cannot_be_held_is_a_normal_one_and_its_client_is_told() {
    let node = plain();
    let client = node.client();
    let read = client.key(b"read");
    client.put(&[(read, b"often")], &PutOptions::default()).expect("room");
    // As much as one client may hold.
    let gets = (0..16).map(|_| client.get(&[read; 4_096]).expect("an answer"));
    let held: Vec<_> = gets.collect();
    let key = client.key(b"scratch");
    let options = PutOptions { class: Class::Ephemeral, ..PutOptions::default() };
    let outcomes = client.put(&[(key, b"for now")], &options).expect("room");
    let [Outcome::NotPersisted(why)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert!(why.contains("65536"), "{why}");
    assert_eq!(node.metric("kvasir_store_objects_total{event=\"not_persisted\"}"), 1.0);
    assert_eq!(
        node.metric("kvasir_store_objects_total{event=\"stored\"}"),
        1.0,
        "the one that is read"
    );
    assert_eq!(client.exists(&[key]).expect("an answer"), [true]);
    drop(held);
}

#[test]
fn a_removed_object_is_gone_and_can_be_put_anew() {
    let node = plain();
    let client = node.client();
    let key = client.key(b"k");
    client.put(&[(key, b"one")], &PutOptions::default()).expect("room");
    let held = client.get(&[key]).expect("an answer").remove(0).expect("it is there");
    assert_eq!(client.remove(&[key, key]).expect("an answer"), 1);
    assert!(client.get(&[key]).expect("an answer")[0].is_none());
    client.put(&[(key, b"two")], &PutOptions::default()).expect("room");
    assert_eq!(&held[..], b"one");
    let new = client.get(&[key]).expect("an answer").remove(0).expect("it is there");
    assert_eq!(&new[..], b"two");
}

#[test]
fn threads_share_a_client() {
    let node = Node::start(|config, _| config.dram_bytes = 8 << 20);
    let client = node.client();
    std::thread::scope(|scope| {
        for thread in 0..4usize {
            let client = client.clone();
            scope.spawn(move || {
                for round in 0..100usize {
                    let key = client.key(format!("{thread}/{round}").as_bytes());
                    let contents = bytes(thread * 1_000 + round, 500 + round);
                    client.put(&[(key, &contents)], &PutOptions::default()).expect("room");
                    let got = client.get_verified(&[key]).expect("an answer").remove(0);
                    assert_eq!(got.expect("just put")[..], contents[..]);
                }
            });
        }
    });
}

#[test]
fn what_is_held_may_be_read_after_the_node_has_ended_and_calls_say_so() {
    let mut node = plain();
    let client = node.client();
    let key = client.key(b"k");
    client.put(&[(key, b"bytes")], &PutOptions::default()).expect("room");
    let held = client.get(&[key]).expect("an answer").remove(0).expect("it is there");
    node.stop();
    assert!(!client.is_connected());
    assert!(matches!(client.exists(&[key]), Err(Error::Lost)));
    assert_eq!(&held[..], b"bytes");
}

fn objects_are_fetched(domain: Domain) {
    let node = || Node::start(|config, _| config.transport = domain);
    let (here, there) = (node(), node());
    let (client, other) = (here.client(), there.client());
    let wanted = keys(&client, 20);
    let contents: Vec<Vec<u8>> = (0..20).map(|at| bytes(at, 100 * at)).collect();
    let objects: Vec<(Key, &[u8])> =
        wanted.iter().zip(&contents).map(|(key, bytes)| (*key, &bytes[..])).collect();
    other.put(&objects[..15], &PutOptions::default()).expect("room");
    client.put(&objects[..2], &PutOptions::default()).expect("room");
    let address = there.address();
    assert!(client.get(&wanted[2..]).expect("an answer").iter().all(Option::is_none));
    let got = client.get_from(&wanted, &address).expect("the other node is there");
    for (at, object) in got.iter().enumerate() {
        match object {
            Some(object) => assert_eq!(object[..], contents[at][..]),
            None => assert!(at >= 15, "object {at}"),
        }
    }
    assert_eq!(got.iter().flatten().count(), 15);
    drop(got);
    // Nothing is held on either side any more.
    for (node, client) in [(&here, &client), (&there, &other)] {
        let slots = (1 << 20) / (client.object_bytes_max() + 16);
        let all: Vec<Key> = (500..500 + slots).map(|at| client.key(&at.to_le_bytes())).collect();
        until("nothing is held", || client.reserve(&all, Duration::from_secs(1)).is_ok());
        assert!(node.running.is_some());
    }
}

#[test]
fn objects_are_fetched_over_shared_memory() {
    objects_are_fetched(Domain::Shm);
}

#[test]
fn objects_are_fetched_over_tcp() {
    objects_are_fetched(Domain::Tcp);
}

#[test]
fn an_object_that_is_removed_while_it_is_fetched_does_not_come() {
    let here = Node::start(|config, _| config.transport = Domain::Tcp);
    let there = Node::start(|config, _| {
        config.transport = Domain::Tcp;
        // It takes seconds.
        config.send_bytes_per_s_max = OBJECT_BYTES as u64 / 3;
    });
    let (client, other) = (here.client(), here.client());
    let key = client.key(b"k");
    let content = bytes(1, OBJECT_BYTES);
    there.client().put(&[(key, &content[..])], &PutOptions::default()).expect("room");
    let address = there.address();
    std::thread::scope(|scope| {
        let fetched = scope.spawn(|| client.fetch(&[key], &address));
        until("it is on its way", || here.metric("kvasir_store_shares") == 1.0);
        assert_eq!(other.remove(&[key]).expect("an answer"), 0, "it is not here yet");
        let fetched = fetched.join().expect("no panic").expect("an answer");
        assert_eq!(fetched, [false]);
    });
    until("nothing is on its way", || here.metric("kvasir_store_shares") == 0.0);
    assert_eq!(client.exists(&[key]).expect("an answer"), [false]);
    assert_eq!(client.fetch(&[key], &address).expect("it is there"), [true], "asked for anew");
    let got = client.get(&[key]).expect("an answer").remove(0).expect("it came");
    assert_eq!(got[..], content[..]);
}

#[test]
fn a_source_that_has_started_anew_is_taken_for_what_it_is_now() {
    let (here, mut before) = (plain(), plain());
    let client = here.client();
    let wanted = keys(&client, 30);
    let address = before.address();
    let other = before.client();
    other.put(&[(wanted[0], b"of before")], &PutOptions::default()).expect("room");
    assert_eq!(client.fetch(&wanted[..1], &address).expect("it is there"), [true]);
    drop(other);
    before.stop();
    let listen = address.parse().expect("an address");
    let now = Node::start(|config, _| config.listen = listen);
    let objects: Vec<(Key, &[u8])> = wanted[1..].iter().map(|key| (*key, &b"of now"[..])).collect();
    now.client().put(&objects, &PutOptions::default()).expect("room");
    // Who does not find it where it was looks for it anew.
    let fetched = client.fetch(&wanted, &address).expect("it is there again");
    assert_eq!(fetched, [true; 30]);
    let got = client.get(&wanted[29..]).expect("an answer").remove(0).expect("it came");
    assert_eq!(&got[..], b"of now");
}

#[test]
fn a_fetch_that_cannot_be_says_why() {
    let (here, there) = (plain(), plain());
    let client = here.client();
    let other = OpenOptions { object_bytes_max: 500, ..there.options() };
    let other = Client::open(&other).expect("a client");
    let key = client.key(b"k");
    let error = client.fetch(&[key], "127.0.0.1:1").expect_err("nobody is there");
    assert!(matches!(error, Error::Unreachable(_)), "{error}");
    let error = client.fetch(&[key], "no address").expect_err("nonsense");
    assert!(matches!(error, Error::Invalid(_)), "{error}");
    assert_eq!(client.fetch(&[key], &there.address()).expect("an answer"), [false]);
    other.put(&[(key, b"bytes")], &PutOptions::default()).expect("room");
    let error = client.fetch(&[key], &there.address()).expect_err("slots of another size");
    assert!(matches!(error, Error::Refused(_)), "{error}");
    assert_eq!(client.exists(&[key]).expect("an answer"), [false]);
}

fn small_ssd(dir: &Path) -> Ssd {
    Ssd {
        dir: Some(dir.join("ssd")),
        capacity_bytes: 16 << 20,
        segment_bytes: 1 << 20,
        demote_ahead_percent: 100,
        ..Ssd::default()
    }
}

fn with_ssd() -> Node {
    Node::start(|config, dir| config.ssd = small_ssd(dir))
}

/// The SSD is opened beside the node; until then nothing is kept.
fn put_context(client: &Client, objects: &[(Key, &[u8])]) {
    let class = Class::Context { ttl: Duration::from_secs(600) };
    let options = PutOptions { class, ..PutOptions::default() };
    until("objects are kept", || {
        let outcomes = client.put(objects, &options).expect("room");
        outcomes.iter().all(|outcome| matches!(outcome, Outcome::Stored | Outcome::Exists))
    });
}

#[test]
fn objects_sink_and_rise_and_context_objects_are_durable_when_their_put_is_answered() {
    let node = with_ssd();
    let client = node.client();
    let kept = keys(&client, 10);
    let contents: Vec<Vec<u8>> = (0..10).map(|at| bytes(at, OBJECT_BYTES)).collect();
    let objects: Vec<(Key, &[u8])> =
        kept.iter().zip(&contents).map(|(key, bytes)| (*key, &bytes[..])).collect();
    put_context(&client, &objects);
    // More than memory holds.
    let filler = bytes(99, OBJECT_BYTES);
    for at in 100..400usize {
        let key = client.key(&at.to_le_bytes());
        client.put(&[(key, &filler)], &PutOptions::default()).expect("room");
    }
    let tiers = client.find(&kept).expect("an answer");
    assert!(tiers.contains(&Some(Tier::Ssd)), "{tiers:?}");
    let got = client.get_verified(&kept).expect("an answer");
    for (object, contents) in got.iter().zip(&contents) {
        assert_eq!(object.as_ref().expect("it was kept")[..], contents[..]);
    }
    assert_eq!(client.remove(&kept).expect("an answer"), kept.len());
    assert_eq!(client.exists(&kept).expect("an answer"), [false; 10]);
}

#[test]
fn a_copy_that_is_rotten_in_memory_is_a_miss_and_what_the_ssd_has_is_got_then() {
    let node = with_ssd();
    let (owner, other) = (node.client(), node.client());
    put_context(&other, &[(other.key(b"first"), b"bytes")]);
    let key = owner.key(b"kept");
    let mut reservation = owner.reserve(&[key], Duration::from_secs(60)).expect("room");
    let place = reservation.bytes_mut(0, 5).expect("a slot");
    place.copy_from_slice(b"whole");
    let first = place.as_mut_ptr();
    let class = Class::Context { ttl: Duration::from_secs(600) };
    assert_eq!(reservation.commit(class).expect("an answer"), [Outcome::Stored]);
    let held = owner.get(&[key]).expect("an answer").remove(0).expect("it is there");
    // SAFETY: the slot is mapped as long as the client is, and pinned by what was got.
    unsafe { first.write_volatile(!first.read_volatile()) };
    assert!(other.get_verified(&[key]).expect("an answer")[0].is_none(), "it is rotten");
    assert_eq!(node.metric("kvasir_store_corrupt_blocks_total"), 1.0);
    drop(held);
    assert_eq!(other.find(&[key]).expect("an answer"), [Some(Tier::Ssd)]);
    let got = other.get_verified(&[key]).expect("an answer").remove(0).expect("it was kept");
    assert_eq!(&got[..], b"whole");
}

#[test]
fn what_was_removed_does_not_come_back_with_a_restart() {
    let mut node = with_ssd();
    let client = node.client();
    let all = keys(&client, 20);
    let contents: Vec<Vec<u8>> = (0..20).map(|at| bytes(at, OBJECT_BYTES)).collect();
    let objects: Vec<(Key, &[u8])> =
        all.iter().zip(&contents).map(|(key, bytes)| (*key, &bytes[..])).collect();
    put_context(&client, &objects);
    let (removed, kept) = all.split_at(10);
    assert_eq!(client.remove(removed).expect("an answer"), removed.len());
    assert_eq!(client.remove(removed).expect("an answer"), 0);
    drop(client);
    node.restart();
    let client = node.client();
    until("the SSD is there", || {
        client.exists(kept).expect("an answer").iter().all(|exists| *exists)
    });
    assert_eq!(client.exists(removed).expect("an answer"), [false; 10]);
    let got = client.get_verified(kept).expect("an answer");
    for (object, contents) in got.iter().zip(&contents[10..]) {
        assert_eq!(object.as_ref().expect("it was kept")[..], contents[..]);
    }
}

#[test]
fn what_is_being_made_durable_when_the_node_stops_is_answered_first() {
    const DRAIN: Duration = Duration::from_secs(20);
    let mut node = Node::start(|config, dir| {
        config.drain_timeout_ms = DRAIN.as_millis() as u64;
        config.ssd = Ssd { faults_file: Some(dir.join("faults")), ..small_ssd(dir) };
    });
    let faults = node.dir.path().join("faults");
    let client = node.client();
    put_context(&client, &[(client.key(b"first"), b"bytes")]);
    let removed = client.key(b"removed");
    put_context(&client, &[(removed, b"bytes")]);
    let (kept, class) = (client.key(b"kept"), Class::Context { ttl: Duration::from_secs(600) });
    let options = PutOptions { class, ..PutOptions::default() };
    std::fs::write(&faults, "hang").expect("written");
    // The disk looks at its faults every 20 ms.
    std::thread::sleep(Duration::from_millis(100));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let put = scope.spawn(|| client.put(&[(kept, b"whole")], &options));
        let removal = scope.spawn(|| client.remove(&[removed]));
        std::thread::sleep(Duration::from_millis(300));
        let stop = scope.spawn(|| node.stop());
        std::thread::sleep(Duration::from_millis(300));
        assert!(!stop.is_finished() && !put.is_finished() && !removal.is_finished());
        std::fs::write(&faults, "").expect("written");
        assert_eq!(put.join().expect("no panic").expect("an answer"), [Outcome::Stored]);
        assert_eq!(removal.join().expect("no panic").expect("an answer"), 1);
        stop.join().expect("no panic");
    });
    assert!(begun.elapsed() < DRAIN, "it waits for nothing else");
    drop(client);
    node.restart();
    let client = node.client();
    until("the SSD is there", || client.exists(&[kept]).expect("an answer") == [true]);
    assert_eq!(client.exists(&[removed]).expect("an answer"), [false]);
}

/// Room for what is read from the SSD is not made of what the same call finds in memory.
#[test]
fn an_ephemeral_object_that_is_found_rotten_takes_no_room() {
    let node = with_ssd();
    let (owner, other) = (node.client(), node.client());
    put_context(&other, &[(other.key(b"first"), b"bytes")]);
    let class = Class::Context { ttl: Duration::from_secs(600) };
    let options = PutOptions { class, ..PutOptions::default() };
    // More than there are slots.
    for key in keys(&owner, 150) {
        let mut reserved = None;
        until("there is room", || {
            reserved = owner.reserve(&[key], Duration::from_secs(60)).ok();
            reserved.is_some()
        });
        let mut reservation = reserved.expect("room");
        let first = reservation.bytes_mut(0, 8).expect("a slot").as_mut_ptr();
        assert_eq!(reservation.commit(Class::Ephemeral).expect("an answer"), [Outcome::Stored]);
        // SAFETY: the slot is mapped as long as the client is, which pins it, and nobody writes it but this.
        unsafe { first.write_volatile(!first.read_volatile()) };
        // Whoever writes it to the SSD sees that.
        let outcomes = other.put(&[(key, b"")], &options).expect("an answer");
        assert!(matches!(outcomes[..], [Outcome::NotPersisted(_)]), "{outcomes:?}");
        assert_eq!(other.exists(&[key]).expect("an answer"), [false]);
    }
}

#[test]
fn a_get_of_many_objects_finds_those_in_memory_and_those_on_the_ssd() {
    let node = with_ssd();
    let client = node.client();
    // Memory has room for about a hundred.
    let kept = keys(&client, 160);
    let contents: Vec<Vec<u8>> = (0..160).map(|at| bytes(at, OBJECT_BYTES)).collect();
    let objects: Vec<(Key, &[u8])> =
        kept.iter().zip(&contents).map(|(key, bytes)| (*key, &bytes[..])).collect();
    objects.chunks(10).for_each(|some| put_context(&client, some));
    let all_found = |keys: &[Key]| {
        let got = client.get_verified(keys).expect("an answer");
        got.iter().filter(|object| object.is_some()).count()
    };
    // The first ones were used longest ago.
    assert_eq!(all_found(&kept[..50]), 50);
    assert_eq!(all_found(&kept[50..100]), 50);
    let in_memory = |key: &Key| client.find(&[*key]).expect("an answer")[0] == Some(Tier::Dram);
    let both: Vec<Key> = kept[..50].iter().chain(&kept[130..]).copied().collect();
    let there = both.iter().filter(|key| in_memory(key)).count();
    assert!((1..both.len()).contains(&there), "{there} are in memory");
    assert_eq!(all_found(&both), both.len());
}

#[test]
fn without_an_ssd_a_context_object_is_stored_and_not_kept() {
    let node = plain();
    let client = node.client();
    let key = client.key(b"k");
    let class = Class::Context { ttl: Duration::from_secs(60) };
    let options = PutOptions { class, ..PutOptions::default() };
    let outcomes = client.put(&[(key, b"bytes")], &options).expect("an answer");
    let [Outcome::NotPersisted(why)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert!(why.contains("neither a usable SSD nor"), "{why}");
    assert_eq!(client.exists(&[key]).expect("an answer"), [true]);
}

#[test]
fn a_client_reserves_as_much_as_it_may_and_is_told_to_end_some() {
    const PUTS_MAX: usize = 4_096;
    let node = Node::start(|config, _| config.dram_bytes = 8 << 20);
    let options = OpenOptions { object_bytes_max: 64, ..node.options() };
    let client = Client::open(&options).expect("a client");
    let reserve = |key| client.reserve(std::slice::from_ref(key), Duration::from_secs(60));
    let all = keys(&client, PUTS_MAX + 1);
    let mut open: Vec<_> = all[..PUTS_MAX].iter().map(|key| reserve(key).expect("room")).collect();
    let error = reserve(&all[PUTS_MAX]).expect_err("one too many");
    assert!(error.to_string().contains("commit or drop one"), "{error}");
    open.pop();
    reserve(&all[PUTS_MAX]).expect("room again");
}

#[test]
fn a_lease_that_is_over_loses_the_put_and_frees_its_slots() {
    let node = plain();
    let client = node.client();
    let key = client.key(b"slow");
    let mut reservation = client.reserve(&[key], Duration::from_millis(1)).expect("room");
    reservation.fill(0, b"late").expect("a slot");
    let held = std::cell::RefCell::new(Some(reservation));
    // Another client takes the place once the lease is over.
    until("the lease is over", || {
        let mut reservation = client.reserve(&[key], Duration::from_millis(1)).expect("room");
        reservation.fill(0, b"late").expect("a slot");
        let before = held.replace(Some(reservation)).expect("the former one");
        std::thread::sleep(Duration::from_millis(20));
        let outcome = before.commit(Class::Normal).expect("an answer");
        if outcome == [Outcome::Stored] {
            client.remove(&[key]).expect("an answer");
        }
        outcome == [Outcome::Lost]
    });
    drop(held.take());
    let all: Vec<Key> = keys(&client, 80);
    drop(client.reserve(&all, Duration::from_secs(1)).expect("no slot is lost"));
}

/// Not a test: a client in a process of its own, for the test below. It holds what it can until it is
/// killed.
#[test]
#[ignore = "is started by another test"]
fn client_process() {
    if !Path::new("attach.sock").exists() {
        return;
    }
    let options = OpenOptions { tenant: "tenant".into(), ..OpenOptions::new(".") };
    let client = Client::open(&options).expect("a client");
    let pinned = client.get(&[client.key(b"pinned")]).expect("an answer");
    assert!(pinned[0].is_some());
    let reserved = client.reserve(&keys(&client, 50), Duration::from_secs(60)).expect("room");
    let scratch = PutOptions { class: Class::Ephemeral, ..PutOptions::default() };
    client.put(&[(client.key(b"scratch"), b"x")], &scratch).expect("room");
    std::fs::write("ready", b"").expect("written");
    std::thread::sleep(Duration::from_secs(600));
    drop((pinned, reserved));
}

#[test]
fn a_client_that_is_killed_loses_its_pins_its_unfinished_puts_and_what_was_for_it_alone() {
    let node = plain();
    let client = node.client();
    client.put(&[(client.key(b"pinned"), b"bytes")], &PutOptions::default()).expect("room");
    let dir = node.dir.path().join("attach");
    let mut process = std::process::Command::new(std::env::current_exe().expect("this test"))
        .args(["--ignored", "--exact", "client_process"])
        .current_dir(&dir)
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("a process");
    until("the client holds", || dir.join("ready").exists());
    let scratch = client.key(b"scratch");
    assert_eq!(client.exists(&[scratch]).expect("an answer"), [true]);
    let all: Vec<Key> = (1_000..1_100).map(|at: usize| client.key(&at.to_le_bytes())).collect();
    assert!(matches!(client.reserve(&all, Duration::from_secs(1)), Err(Error::NoCapacity(_))));
    process.kill().expect("killed");
    process.wait().expect("its end");
    until("all slots come free", || client.reserve(&all, Duration::from_secs(1)).is_ok());
    assert_eq!(client.exists(&[scratch]).expect("an answer"), [false]);
}
