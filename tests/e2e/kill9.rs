//! A store node that is killed with SIGKILL under load, again and again: whatever context block it has
//! acknowledged is there after the restart, with the right bytes.
//!
//! After each restart the node lists every chain that was ever acknowledged, with all of its blocks; those that were
//! acknowledged since the last one, and a sample of the older ones, are read and compared. In the end all are.
//!
//! A few kills by default; `tests/kill9/run` does 500 with 100,000 blocks, and then also holds the
//! node to being ready in two seconds.

#[path = "../../store-node/tests/common/mod.rs"]
#[allow(unused_imports, reason = "made for nodes in one process, too")]
mod common;

use std::collections::HashMap;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::*;
use kvasir_attach::EngineAttachment;
use kvasir_proto::{BlockKey, Share, Side, v1};
use kvasir_store_node::config::{Config, Ssd};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use tonic::transport::Channel;
use v1::node_to_engine::Message as FromNode;
use v1::store_node_client::StoreNodeClient;

const TENANT: &str = "tenant";
const KVASIR: &str = env!("CARGO_BIN_EXE_kvasir");

/// Blocks of a chain that is kept under load.
const CHAIN_BLOCKS: u32 = 10;
/// Chains that are kept before each kill, at most: what comes then is load that nobody is promised.
const CHAINS_MAX: usize = 8;
/// Blocks of the chains that are there from the beginning.
const LONG_BLOCKS: u32 = 1_000;
/// Older chains whose bytes are looked at after each kill; all are in the end.
const SAMPLE: usize = 12;
/// What the command holds the node to.
const READY_WITHIN: Duration = Duration::from_secs(2);

fn number(name: &str, default: u64) -> u64 {
    #[allow(clippy::disallowed_methods, reason = "a test, and how often it kills, is set by hand")]
    let text = std::env::var(name).ok();
    text.map_or(default, |text| text.parse().expect("a number"))
}

/// A node's process and what talks to it.
struct Node {
    process: Child,
    client: StoreNodeClient<Channel>,
    engine: FakeEngine,
    serial: u64,
    ready_after: Duration,
}

impl Node {
    async fn start(config: &Path, address: SocketAddr, attach_dir: &Path, life: u64) -> Node {
        let began = Instant::now();
        let process = Command::new(KVASIR)
            .args(["--log", "warn", "store-node", "--exit-with-stdin", "--config"])
            .arg(config)
            .stdin(Stdio::piped())
            .spawn()
            .expect("the binary can be started");
        let mut client = until("the node answers", async || {
            StoreNodeClient::connect(format!("http://{address}")).await.ok()
        })
        .await;
        until("the SSD is ready", async || {
            let description = client.describe(v1::DescribeRequest {}).await.ok()?.into_inner();
            description.ssd.is_some_and(|ssd| ssd.usable).then_some(())
        })
        .await;
        let ready_after = began.elapsed();
        let attached = EngineAttachment::connect(engine_options(attach_dir, layout())).await;
        let engine = FakeEngine::new(attached.expect("attached"));
        Node { process, client, engine, serial: life << 32, ready_after }
    }

    /// Takes a share over; `None` when the node is gone.
    async fn bind(&mut self, share: Share) -> Option<v1::Bound> {
        self.engine.ask_bind(share);
        let began = Instant::now();
        loop {
            while let Some(message) = self.engine.attachment.try_recv().ok()? {
                if let FromNode::Bound(bound) = message
                    && bound.tx == Some(share.tx.into())
                {
                    return Some(bound);
                }
            }
            if !self.engine.attachment.is_connected() {
                return None;
            }
            assert!(began.elapsed() < PATIENCE, "{share} is not bound");
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    }

    /// Computes a prompt (or finds it); answers with the blocks that were found, which are right.
    /// `None` when the node is gone.
    async fn prefill(&mut self, prompt: &[u32]) -> Option<u32> {
        self.serial += 1;
        let share = share(self.serial, Side::Prefill);
        while let Err(status) = self.client.tx_allocate(allocate(share, prompt)).await {
            if status.code() != tonic::Code::ResourceExhausted {
                return None;
            }
            // What sinks is pinned for a moment.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let bound = self.bind(share).await?;
        let cached = bound.cached_tokens / BLOCK_TOKENS;
        self.engine.holds(prompt, &bound.slots, 0..cached);
        let pages = prompt.len().div_ceil(BLOCK_TOKENS as usize) as u32;
        self.engine.compute(share, prompt, &bound.slots, cached..pages);
        self.engine.release(share);
        self.has_blocks(&chain(prompt)).await?;
        Some(cached)
    }

    async fn has_blocks(&mut self, keys: &[BlockKey]) -> Option<()> {
        // The last one comes last.
        let last = keys.last().map(|key| key.0.to_vec()).unwrap_or_default();
        loop {
            let request = v1::ListBlocksRequest { keys: last.clone() };
            if !self.client.list_blocks(request).await.ok()?.into_inner().blocks.is_empty() {
                return Some(());
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn kill(mut self) {
        self.process.kill().expect("it runs");
        self.process.wait().expect("it is our child");
    }
}

async fn keep(mut client: StoreNodeClient<Channel>, prompt: Vec<u32>) -> Option<Vec<u32>> {
    let keys = chain(&prompt);
    let request = v1::PersistContextRequest {
        namespace: namespace().0.to_vec(),
        keys: BlockKey::concat(&keys),
        tenant: TENANT.into(),
        ttl_ms: 24 * 3_600_000,
        ..v1::PersistContextRequest::default()
    };
    let kept = client.persist_context(request).await.ok()?.into_inner().persisted_blocks;
    // All or fewer: those are promised.
    Some(prompt[..(kept * BLOCK_TOKENS) as usize].to_vec())
}

/// A kept chain and a little more, so that all of it can be reused.
fn and_more(chain: &[u32]) -> Vec<u32> {
    chain.iter().copied().chain([1; 9]).collect()
}

async fn is_there(node: &mut Node, kept: &[u32], what: &str) {
    let cached = node.prefill(&and_more(kept)).await.expect("the node answers");
    let blocks = kept.len() as u32 / BLOCK_TOKENS;
    assert_eq!(cached, blocks, "{what}: the chain of token {} is not all there", kept[0]);
}

const CONTEXTS_MAX: u32 = 1_000;

/// Every chain that was acknowledged is one of the contexts that the node lists, as long as it was.
async fn are_listed(node: &mut Node, kept: &[Vec<u32>], what: &str) {
    let (mut listed, mut from) = (HashMap::new(), Vec::new());
    loop {
        let tenant = TENANT.to_owned();
        let request =
            v1::ListContextsRequest { tenant, contexts_max: CONTEXTS_MAX, start_at: from };
        let page = node.client.list_contexts(request).await.expect("a list").into_inner();
        listed.extend(page.contexts.into_iter().map(|of| (of.last_key, of.blocks)));
        if page.next.is_empty() {
            break;
        }
        from = page.next;
    }
    for kept in kept {
        let keys = chain(kept);
        let Some(last) = keys.last() else { continue };
        let blocks = listed.get(last.0.as_slice()).copied();
        assert_eq!(blocks, Some(keys.len() as u32), "{what}: the chain of token {}", kept[0]);
    }
}

/// Load until the node is gone. What was acknowledged goes into `kept`.
async fn load(node: &mut Node, first_seed: u32, kept: &mut Vec<Vec<u32>>) {
    let mut keeps = tokio::task::JoinSet::new();
    for seed in first_seed.. {
        let prompt = prompt(seed, CHAIN_BLOCKS * BLOCK_TOKENS);
        if node.prefill(&prompt).await.is_none() {
            break;
        }
        if (seed - first_seed) < CHAINS_MAX as u32 {
            keeps.spawn(keep(node.client.clone(), prompt));
        }
    }
    while let Some(done) = keeps.join_next().await {
        kept.extend(done.ok().flatten());
    }
}

fn config(dir: &Path, address: SocketAddr, blocks: u64) -> PathBuf {
    // Each block takes two pages of 4 KiB; three times as much, and room for the chains under load.
    let bytes = (blocks * 3 * 8192 + (128 << 20)) / 4096 * 4096;
    let config = Config {
        node_id: "killed".into(),
        listen: address,
        attach_dir: dir.join("attach"),
        dram_bytes: 4_096 * 4_096,
        tail_bytes: 1 << 20,
        ssd: Ssd {
            dir: Some(dir.join("ssd")),
            capacity_bytes: bytes,
            segment_bytes: if blocks > 20_000 { 32 << 20 } else { 2 << 20 },
            context_percent: 100,
            tenant_bytes_max: bytes,
            ..Ssd::default()
        },
        ..Config::default()
    };
    let path = dir.join("store-node.toml");
    std::fs::write(&path, toml::to_string(&config).expect("a configuration")).expect("written");
    path
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_acknowledged_outlives_kill_9() {
    let (kills, blocks) = (number("KVASIR_KILLS", 3), number("KVASIR_KILL_BLOCKS", 2_000));
    let seed = number("KVASIR_SIM_SEED", 1);
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let dir = tempfile::tempdir().expect("a folder");
    // Of its own in the loopback network (all of 127.0.0.0/8): nobody else gets its port while it
    // is dead.
    let [a, b, c] = rand::random::<[u8; 3]>();
    let address = SocketAddr::from(([127, 1 + a % 127, b, c], 7000));
    let (config, attach_dir) = (config(dir.path(), address, blocks), dir.path().join("attach"));
    let mut node = Node::start(&config, address, &attach_dir, 1).await;

    let mut kept = Vec::new();
    for seed in 0..blocks.div_ceil(LONG_BLOCKS.into()) as u32 {
        let prompt = prompt(1 + seed, LONG_BLOCKS * BLOCK_TOKENS);
        node.prefill(&prompt).await.expect("the node answers");
        kept.push(keep(node.client.clone(), prompt).await.expect("kept"));
    }
    let (long, mut slowest) = (kept.len(), Duration::ZERO);
    for kill in 0..kills {
        let delay = Duration::from_micros(10_000 + random.next_u64() % 400_000);
        let pid = node.process.id();
        let killer = tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            let pid = rustix::process::Pid::from_raw(pid as i32).expect("a pid");
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("killed");
        });
        let first_seed = 1_000 + (kill as u32 % 3_000) * 14;
        let known = kept.len();
        load(&mut node, first_seed, &mut kept).await;
        killer.await.expect("it was killed");
        node.kill();
        node = Node::start(&config, address, &attach_dir, kill + 2).await;
        slowest = slowest.max(node.ready_after);
        let what = format!("seed {seed}, kill {kill}");
        are_listed(&mut node, &kept, &what).await;
        for chain in &kept[known..] {
            is_there(&mut node, chain, &what).await;
        }
        for _ in 0..SAMPLE.min(known) {
            // Mostly short ones: the long ones take a quarter of a second each.
            let at = match (random.next_u64() % 16, known - long) {
                (0, _) | (_, 0) => random.next_u64() as usize % long,
                (_, short) => long + random.next_u64() as usize % short,
            };
            is_there(&mut node, &kept[at], &what).await;
        }
        if kill % 10 == 9 || kill + 1 == kills {
            let said = format!(
                "{} kills, {} chains acknowledged, ready within {} ms at the latest",
                kill + 1,
                kept.len(),
                slowest.as_millis()
            );
            writeln!(std::io::stderr(), "{said}").expect("written");
        }
    }
    for chain in &kept {
        is_there(&mut node, chain, "in the end").await;
    }
    assert!(kept.len() > long, "something was acknowledged under load");
    if kills >= 100 {
        assert!(slowest < READY_WITHIN, "ready only after {slowest:?}");
    }
    node.kill();
}
