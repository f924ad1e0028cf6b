//! A cluster that serves for long: nothing grows, and nothing is left over whenever it comes to rest.
//!
//! Rounds of load: new prompts that make old blocks leave memory, some for the SSD; conversations that find
//! theirs again; clients that go away in the middle of an answer; contexts that are kept for seconds, extended and
//! dropped; clients of objects that open a node, get objects from it and from the other one, and go while they hold some. After each round the cluster comes to rest (no
//! pin, share, quarantined slot, counter or operation anywhere), and each process is looked at: private memory,
//! descriptors, threads. A minute at most by default; twenty are
//! `KVASIR_SOAK_S=1200 cargo test --release -p kvasir --test e2e -- --nocapture soak::`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::support::cluster::Cluster;
use crate::support::rest::comes_to_rest;
use futures::StreamExt;
use kvasir_client::{Class, Client, Error, Key, OpenOptions, PutOptions};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::json;

/// In the time that is asked for; with those until the SSDs are clean it takes longer.
const ROUNDS: usize = ROUNDS_SEEN + ROUNDS_WARM;
/// What is looked at, and how many before that are not: caches fill, pools of threads and connections come up, and
/// buffers for bursts of writes. They are counted from when every node's SSD was full and has been cleaned, with a
/// buffer of a whole segment.
const ROUNDS_SEEN: usize = 8;
const ROUNDS_WARM: usize = 4;
const ROUNDS_WARM_MAX: usize = 40;
const CLIENTS: u64 = 4;
const CONVERSATIONS: usize = 16;
const CONVERSATION_TOKENS_MAX: usize = 1_500;
/// A client of objects holds so many of the last ones, puts so many at once, and opens its node anew after so many
/// calls.
const OBJECTS_HELD: usize = 8;
const OBJECTS_AT_ONCE: u64 = 4;
const OBJECTS_OF_ONE_OPENING: u64 = 20;
/// What a node has ended it remembers for an hour, so that what arrives late is told so (a quarter of a million at most,
/// some 30 MiB): few enough that it is not taken for growth.
const OBJECTS_EVERY: Duration = Duration::from_millis(100);
const REST_WITHIN: Duration = Duration::from_secs(30);

/// What the last rounds may have more of than those before them.
const GROWTH_KIB_MAX: u64 = 6 << 10;
const GROWTH_DESCRIPTORS_MAX: u64 = 8;
const GROWTH_THREADS_MAX: u64 = 4;

fn soak() -> Duration {
    #[allow(clippy::disallowed_methods, reason = "a test, and how long it runs, is set by hand")]
    let text = std::env::var("KVASIR_SOAK_S").ok();
    Duration::from_secs(text.map_or(24, |text| text.parse().expect("a number of seconds")))
}

/// What one process has.
#[derive(Debug, Clone, Copy)]
struct Held {
    /// Memory of its own: what is shared has a size that is configured.
    private_kib: u64,
    descriptors: u64,
    threads: u64,
}

impl Held {
    fn of(pid: u32) -> Held {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let word = line.and_then(|line| line.split_whitespace().next());
            word.and_then(|word| word.parse().ok()).expect("a number")
        };
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("it is ours");
        Held {
            private_kib: number("RssAnon:"),
            descriptors: descriptors.count() as u64,
            threads: number("Threads:"),
        }
    }
}

/// The median of some rounds: what is there for a moment is not what is kept, and what is away for a moment was not
/// given back. The allocator takes and returns pages of 4 MiB, whenever one comes to be empty.
fn median(held: &[Held]) -> Held {
    let of = |value: fn(&Held) -> u64| {
        let mut values: Vec<u64> = held.iter().map(value).collect();
        values.sort_unstable();
        u64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2])
    };
    Held {
        private_kib: of(|held| held.private_kib),
        descriptors: of(|held| held.descriptors),
        threads: of(|held| held.threads),
    }
}

fn tokens(random: &mut ChaCha8Rng, count: usize) -> Vec<u32> {
    (0..count).map(|_| 3 + random.next_u32() % 1_000).collect()
}

/// What clients came to.
#[derive(Debug, Clone, Copy, Default)]
struct Came {
    answered: u64,
    kept: u64,
    /// Contexts that could not be kept.
    gone: u64,
}

impl Came {
    fn and(self, other: Came) -> Came {
        Came {
            answered: self.answered + other.answered,
            kept: self.kept + other.kept,
            gone: self.gone + other.gone,
        }
    }
}

/// Asks one request after the other until then.
async fn client(cluster: &Cluster, seed: u64, until: Instant) -> Came {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut conversations = vec![Vec::new(); CONVERSATIONS];
    let mut came = Came::default();
    while Instant::now() < until {
        let which = random.next_u32() as usize;
        let length = 100 + which % 700;
        let fresh = tokens(&mut random, length);
        match which % 8 {
            0..=3 => {
                let conversation = &mut conversations[which / 8 % CONVERSATIONS];
                if conversation.len() > CONVERSATION_TOKENS_MAX {
                    conversation.clear();
                }
                conversation.extend(&fresh[..100]);
                let prompt = conversation.clone();
                came.answered += complete(cluster, &prompt, 8).await;
            }
            4..=5 => {
                came.answered += complete(cluster, &fresh, 4).await;
            }
            6 => {
                let conversation = &conversations[which / 8 % CONVERSATIONS];
                if !conversation.is_empty() {
                    came = came.and(keep(cluster, conversation, which / 8).await);
                }
            }
            _ => leave(cluster, &fresh).await,
        }
    }
    came
}

/// A context for seconds, which goes by itself, is given more time, or is dropped.
async fn keep(cluster: &Cluster, prompt: &[u32], which: usize) -> Came {
    const PATH: &str = "/v1/contexts";
    let copies = 1 + which / 3 % 2;
    let body =
        json!({"model": cluster.model, "prompt": prompt, "ttl_seconds": 2, "replicas": copies});
    let (status, kept) = cluster.post(PATH, &body).await;
    // Where memory is short its blocks may have made room before they could be kept.
    let gone = status == 503 && kept["error"]["code"] == "context_not_persisted";
    assert!(status == 200 || status == 429 || gone, "{status}: {kept}");
    let Some(id) = kept["id"].as_str().filter(|_| status == 200) else {
        return Came { gone: u64::from(gone), ..Came::default() };
    };
    match which % 3 {
        0 => {
            let url = format!("{}{PATH}/{id}", cluster.url);
            cluster.client.delete(url).send().await.expect("an answer");
        }
        1 => {
            cluster.post(&format!("{PATH}/{id}"), &json!({"ttl_seconds": 4})).await;
        }
        _ => {}
    }
    Came { answered: 1, kept: 1, gone: 0 }
}

/// Puts objects at one node and gets them at the other until then, by one opening after another; answers with how
/// many were got.
fn objects(put_at: &Opened, get_at: &Opened, seed: u64, until: Instant) -> u64 {
    let mut got = 0;
    let mut serial = 0_u64;
    while Instant::now() < until {
        let (there, here) = (put_at.open(), get_at.open());
        let mut held = Vec::new();
        for _ in 0..OBJECTS_OF_ONE_OPENING {
            if Instant::now() >= until {
                break;
            }
            let names = serial..serial + OBJECTS_AT_ONCE;
            serial = names.end;
            let bytes: Vec<u8> = (0..4_000 + serial % 40_000).map(|at| (at ^ seed) as u8).collect();
            let keys: Vec<Key> =
                names.map(|name| there.key(&[seed, name].map(u64::to_le_bytes).concat())).collect();
            let all: Vec<(Key, &[u8])> = keys.iter().map(|key| (*key, &bytes[..])).collect();
            let class = match serial / OBJECTS_AT_ONCE % 3 {
                0 => Class::Normal,
                1 => Class::Ephemeral,
                _ => Class::Context { ttl: Duration::from_secs(1) },
            };
            let _ = unless_full(there.put(&all, &PutOptions { class, ..PutOptions::default() }));
            // A lease that nobody commits.
            let forgotten = [there.key(&serial.to_be_bytes())];
            drop(unless_full(there.reserve(&forgotten, Duration::from_millis(100))));
            let found = unless_full(here.get_from(&keys, &put_at.address));
            for object in found.into_iter().flatten().flatten() {
                assert!(object.is_current() && object[..] == bytes, "other bytes");
                got += 1;
                held.push(object);
            }
            held.drain(..held.len().saturating_sub(OBJECTS_HELD));
            there.remove(&keys[..1]).expect("removed");
            std::thread::sleep(OBJECTS_EVERY);
        }
        // With half of what it holds.
        held.drain(..held.len() / 2);
        drop(here);
    }
    got
}

/// None when there was no room at that moment: engines come first.
fn unless_full<T>(answer: Result<T, Error>) -> Option<T> {
    match answer {
        Ok(answer) => Some(answer),
        Err(Error::NoCapacity(_)) => None,
        Err(error) => panic!("{error}"),
    }
}

/// A node and where it is.
#[derive(Debug, Clone)]
struct Opened {
    attach_dir: PathBuf,
    address: String,
}

impl Opened {
    fn of(cluster: &Cluster, node: &str) -> Opened {
        let state = cluster.state();
        let metrics = state["processes"][node]["metrics"].as_str().expect("a URL");
        let address = metrics.trim_start_matches("http://").trim_end_matches("/metrics");
        Opened { attach_dir: cluster.run_dir().join(node), address: address.to_owned() }
    }

    fn open(&self) -> Client {
        let options = OpenOptions { tenant: "soak".into(), ..OpenOptions::new(&self.attach_dir) };
        Client::open(&options).expect("it is opened")
    }
}

/// 1 when it was answered, 0 when it was refused for want of room, for a moment.
async fn complete(cluster: &Cluster, prompt: &[u32], tokens: u32) -> u64 {
    let (status, answer) = cluster.complete(prompt, tokens).await;
    assert!(status == 200 || status == 429, "{status}: {answer}");
    if status == 429 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    u64::from(status == 200)
}

/// Asks for a long answer and goes away after its first events.
async fn leave(cluster: &Cluster, prompt: &[u32]) {
    let body = json!({
        "model": cluster.model, "prompt": prompt, "max_tokens": 500, "stream": true, "ignore_eos": true,
    });
    let url = format!("{}/v1/completions", cluster.url);
    let reply = cluster.client.post(url).json(&body).send().await.expect("an answer");
    if reply.status().as_u16() == 429 {
        return;
    }
    assert_eq!(reply.status().as_u16(), 200);
    let mut events = reply.bytes_stream();
    for _ in 0..3 {
        events.next().await.expect("it goes on").expect("it goes on");
    }
}

/// Whether every node has made room on its SSD.
async fn all_clean(cluster: &Cluster) -> bool {
    for node in ["prefill-1-node", "decode-1-node"] {
        let cleaned = [("event", "segment_cleaned")];
        if cluster.sum(node, "kvasir_store_ssd_log_events_total", &cleaned).await == 0.0 {
            return false;
        }
    }
    true
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_serves_for_long_keeps_nothing_of_what_it_has_served() {
    let cluster = Cluster::start("--dram-bytes 48MiB --ssd-bytes 512MiB").await;
    let round = soak() / ROUNDS as u32;
    let mut held: BTreeMap<String, Vec<Held>> = BTreeMap::new();
    let (mut warm, mut cleans) = (0, false);
    for at in 0.. {
        if cleans && at == warm + ROUNDS_SEEN {
            break;
        }
        let until = Instant::now() + round;
        let clients = (0..CLIENTS).map(|client_at| {
            let seed = at as u64 * CLIENTS + client_at;
            client(&cluster, seed, until)
        });
        let pair = [("prefill-1-node", "decode-1-node"), ("decode-1-node", "prefill-1-node")];
        let of_objects = pair.map(|(put_at, get_at)| {
            let (put_at, get_at) = (Opened::of(&cluster, put_at), Opened::of(&cluster, get_at));
            tokio::task::spawn_blocking(move || objects(&put_at, &get_at, at as u64, until))
        });
        let came =
            futures::future::join_all(clients).await.into_iter().fold(Came::default(), Came::and);
        let Came { answered, kept, gone } = came;
        let mut got = 0;
        for of_objects in of_objects {
            got += of_objects.await.expect("no panic");
        }
        assert!(answered > 0 && got > 0, "{answered} answers, {got} objects");
        assert!(kept >= 4 * gone, "{kept} contexts kept, {gone} not");
        comes_to_rest(&cluster, REST_WITHIN).await;
        let mut line = format!(
            "round {at}: {answered} requests, {kept} contexts kept, {gone} not, {got} objects"
        );
        for name in cluster.process_names() {
            let of = Held::of(cluster.pid(&name).expect("it runs"));
            line += &format!(
                "; {name} {} KiB, {} fds, {} threads",
                of.private_kib, of.descriptors, of.threads
            );
            held.entry(name).or_default().push(of);
        }
        if !cleans {
            (warm, cleans) = (at + 1 + ROUNDS_WARM, all_clean(&cluster).await);
            assert!(warm <= ROUNDS_WARM_MAX, "an SSD does not come to be full");
        }
        #[allow(clippy::print_stdout, reason = "what a long run is like, for whoever started it")]
        {
            println!("{line}");
        }
    }
    let events = async |event: &str| {
        cluster.sum("-node", "kvasir_store_block_events_total", &[("event", event)]).await
    };
    assert!(events("evicted").await > 0.0, "there was room for everything");
    let (sunk, failed) = (events("demoted").await, events("demote_failed").await);
    assert!(failed * 20.0 <= sunk, "of {sunk} blocks for the SSD {failed} more were not written");
    for (name, rounds) in &held {
        let rounds = &rounds[warm..];
        let (before, after) = rounds.split_at(rounds.len() / 2);
        let (before, after) = (median(before), median(after));
        let grew = |value: fn(&Held) -> u64, most: u64| value(&after) > value(&before) + most;
        assert!(!grew(|held| held.private_kib, GROWTH_KIB_MAX), "{name} grows: {rounds:#?}");
        assert!(!grew(|held| held.descriptors, GROWTH_DESCRIPTORS_MAX), "{name}: {rounds:#?}");
        assert!(!grew(|held| held.threads, GROWTH_THREADS_MAX), "{name}: {rounds:#?}");
    }
}
