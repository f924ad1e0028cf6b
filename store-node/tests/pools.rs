//! Engines with pages of their own: what lies there is announced, copied into slots and below, and pages are filled.

// Names of shares that read like those of the block core's tests.
#![allow(non_snake_case)]

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::pooled::{LAYER_BYTES, Pooled, description, gpu_memory, on_gpu};
use crate::common::*;
use crate::emulated::Emulated;
use futures::StreamExt;
use kvasir_proto::{BlockKey, Share, Side, v1};
use v1::engine_to_node::Message as ToNode;

fn P(serial: u64) -> Share {
    share(serial, Side::Prefill)
}

/// What a subscriber of events knows.
struct Known {
    events: tonic::Streaming<v1::NodeEvent>,
    tiers: BTreeMap<BlockKey, v1::Tier>,
}

impl Known {
    async fn subscribe(node: &mut TestNode) -> Self {
        let request = v1::EventsRequest { incarnation: 0, from_sequence: 0 };
        let events = node.client.events(request).await.expect("a stream").into_inner();
        Known { events, tiers: BTreeMap::new() }
    }

    fn take(&mut self, event: v1::NodeEvent) {
        match event.event.expect("an event") {
            v1::node_event::Event::Snapshot(part) => {
                let tier = part.tier();
                let keys = BlockKey::list(&part.keys).expect("keys");
                self.tiers.extend(keys.into_iter().map(|key| (key, tier)));
            }
            v1::node_event::Event::Changes(changes) => {
                for change in changes.changes {
                    let key = BlockKey::list(&change.key).expect("a key")[0];
                    match change.removed {
                        true => self.tiers.remove(&key),
                        false => self.tiers.insert(key, change.tier()),
                    };
                }
            }
            v1::node_event::Event::Status(_) => {}
        }
    }

    /// Waits until these blocks are in this tier, or nowhere.
    async fn sees(&mut self, keys: &[BlockKey], tier: Option<v1::Tier>) {
        while !keys.iter().all(|key| self.tiers.get(key).copied() == tier) {
            let event = tokio::time::timeout(PATIENCE, self.events.next()).await;
            let event = event.unwrap_or_else(|_| panic!("never {tier:?}: {:?}", self.tiers));
            self.take(event.expect("not over").expect("no error"));
        }
    }
}

async fn counted(node: &TestNode, event: &str, blocks: f64) {
    node.shows(&format!("pool_blocks_total{{event=\"{event}\"}}"), blocks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_a_pool_are_announced_copied_and_found_by_others() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut pooled = Pooled::attach(&node).await;
    let mut known = Known::subscribe(&mut node).await;
    let prompt = prompt(1, 5 * BLOCK_TOKENS);
    let keys = chain(&prompt);
    pooled.write(&prompt, 0..5, 7);
    pooled.hold(&prompt, 0..2, 7);
    known.sees(&keys[..2], Some(v1::Tier::Vram)).await;
    pooled.hold(&prompt, 2..5, 9);
    known.sees(&keys, Some(v1::Tier::Vram)).await;
    node.has_blocks(&keys).await;
    counted(&node, "demoted", 5.0).await;
    // The engine finds them in slots, as it would find any others; so does a share of a transaction.
    pooled.engine.send(ToNode::Get(v1::GetBlocks {
        handle: 1,
        keys: BlockKey::concat(&keys),
        skip_promotion: false,
    }));
    let got = pooled.engine.got(1).await;
    pooled.engine.holds(&prompt, &got.slots, 0..5);
    let reply = node.allocate(allocate(P(1), &prompt)).await.expect("room");
    assert_eq!(reply.cached_blocks, 4, "and the last one is computed");
    // They outlive their pages.
    pooled.drop_pages(2, 7..12).await;
    known.sees(&keys, Some(v1::Tier::Dram)).await;
    pooled.write(&crate::common::prompt(9, 5 * BLOCK_TOKENS), 0..5, 7);
    pooled.engine.holds(&prompt, &got.slots, 0..5);
    counted(&node, "dropped_not_demoted", 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_may_be_dropped_while_they_are_copied() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut pooled = Pooled::attach(&node).await;
    for round in 0..20 {
        let prompt = prompt(round, 3 * BLOCK_TOKENS);
        pooled.write_and_hold(&prompt, 3);
        pooled.drop_pages(round.into(), 3..6).await;
        // The engine may write them now, and what was copied is what was there before.
        pooled.write(&crate::common::prompt(1_000 + round, 3 * BLOCK_TOKENS), 0..3, 3);
        node.has_blocks(&chain(&prompt)).await;
        let handle = 100 + u64::from(round);
        let keys = BlockKey::concat(&chain(&prompt));
        pooled.engine.send(ToNode::Get(v1::GetBlocks { handle, keys, skip_promotion: false }));
        let got = pooled.engine.got(handle).await;
        pooled.engine.holds(&prompt, &got.slots, 0..3);
        pooled.engine.send(ToNode::Unpin(v1::UnpinBlocks { handle }));
    }
    node.is_quiet().await;
    node.shows("pool_pages{state=\"dropping\"}", 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_are_filled_from_slots() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut pooled = Pooled::attach(&node).await;
    let prompt = prompt(3, 4 * BLOCK_TOKENS);
    // Computed in slots, as engines without pools do.
    node.allocate(allocate(P(1), &prompt)).await.expect("room");
    let slots = pooled.engine.bind(P(1)).await.slots;
    pooled.engine.compute(P(1), &prompt, &slots, 0..4);
    pooled.engine.release(P(1));
    node.has_blocks(&chain(&prompt)).await;
    assert_eq!(pooled.fill(1, &prompt, 10..14).await, 4);
    assert!(pooled.has(&prompt, 0..4, 10));
    // The last two only, and a block that is nowhere.
    assert_eq!(pooled.fill(2, &prompt, 20..22).await, 2);
    assert!(pooled.has(&prompt, 2..4, 20));
    let longer: Vec<u32> = prompt.iter().copied().chain(0..BLOCK_TOKENS).collect();
    assert_eq!(pooled.fill(3, &longer, 24..26).await, 1);
    assert!(pooled.has(&prompt, 3..4, 24));
    assert_eq!(pooled.fill(4, &crate::common::prompt(4, BLOCK_TOKENS), 30..31).await, 0);
    node.is_quiet().await;
    // Whoever says so holds them then.
    let mut known = Known::subscribe(&mut node).await;
    pooled.hold(&prompt, 0..4, 10);
    known.sees(&chain(&prompt), Some(v1::Tier::Vram)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_for_a_share_are_named_when_it_is_there() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut pooled = Pooled::attach(&node).await;
    let prompt = prompt(6, 4 * BLOCK_TOKENS + 9);
    node.allocate(allocate(P(1), &prompt)).await.expect("room");
    let slots = pooled.engine.bind(P(1)).await.slots;
    pooled.engine.compute(P(1), &prompt, &slots, 0..5);
    pooled.engine.release(P(1));
    node.has_blocks(&chain(&prompt)).await;
    node.allocate(allocate(P(2), &prompt)).await.expect("room");
    assert_eq!(pooled.engine.bind(P(2)).await.cached_tokens, 4 * BLOCK_TOKENS);
    pooled.ask_fill_of(1, P(2), 1, 20..24);
    assert_eq!(pooled.filled(1).await, 3, "the last one is to be computed");
    assert!(pooled.has(&prompt, 1..4, 20));
    pooled.engine.release(P(2));
    node.is_quiet().await;
    pooled.ask_fill_of(2, P(2), 0, 0..1);
    assert_eq!(pooled.filled(2).await, 0, "it has ended");
    assert!(pooled.engine.attachment.is_connected());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotten_slot_is_a_miss_and_never_wrong_bytes() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut pooled = Pooled::attach(&node).await;
    let prompt = prompt(5, 3 * BLOCK_TOKENS);
    let keys = chain(&prompt);
    pooled.write_and_hold(&prompt, 0);
    node.has_blocks(&keys).await;
    pooled.drop_pages(1, 0..3).await;
    let second = node.blocks(&keys[1..2]).await.remove(0);
    pooled.engine.write(second.slot, 2, &[7; LAYER_BYTES as usize]);
    assert_eq!(pooled.fill(2, &prompt, 4..7).await, 1);
    assert!(pooled.has(&prompt, 0..1, 4));
    assert_eq!(node.blocks(&keys).await.len(), 1, "it is gone, and what follows it");
    node.shows("corrupt_blocks_total", 1.0).await;
    node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_sink_to_the_ssd_and_are_filled_from_there() {
    let dir = tempfile::tempdir().expect("a folder");
    let ssd = dir.path().to_owned();
    let mut node = TestNode::start_with(Domain::Shm, move |config| {
        config.ssd.dir = Some(ssd);
        config.ssd.segment_bytes = 128 << 10;
        config.ssd.capacity_bytes = 64 * (128 << 10) + 8192;
        config.ssd.demote_ahead_percent = 60;
    })
    .await;
    let mut pooled = Pooled::attach(&node).await;
    until("the SSD is ready", async || {
        node.describe().await.ssd.is_some_and(|ssd| ssd.usable).then_some(())
    })
    .await;
    let mut known = Known::subscribe(&mut node).await;
    let first = prompt(1, 4 * BLOCK_TOKENS);
    pooled.write_and_hold(&first, 0);
    node.has_blocks(&chain(&first)).await;
    pooled.drop_pages(1, 0..4).await;
    // Others, until the first ones are in no slot any more.
    for seed in 2..40 {
        let other = prompt(seed, 4 * BLOCK_TOKENS);
        pooled.write_and_hold(&other, 8);
        node.has_blocks(&chain(&other)).await;
        pooled.drop_pages(seed.into(), 8..12).await;
        until("what shall sink has", async || {
            (node.metric("ssd_demoting_blocks").await == 0.0).then_some(())
        })
        .await;
    }
    known.sees(&chain(&first), Some(v1::Tier::Ssd)).await;
    assert_eq!(pooled.fill(100, &first, 20..24).await, 4);
    assert!(pooled.has(&first, 0..4, 20));
    node.is_quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn descriptions_that_cannot_be_are_refused_in_a_sentence() {
    let node =
        TestNode::start_with(Domain::Shm, |config| config.engine_pool_bytes_max = 1 << 20).await;
    let host = |bytes| Some(v1::pool_description::Memory::Host(v1::HostPool { bytes }));
    let good = description();
    let mut short = good.clone();
    short.layers[2].runs[0].length_bytes -= 1;
    let mut overlap = good.clone();
    overlap.layers[2].runs[0].base_bytes -= 1;
    let cases = [
        (v1::PoolDescription { memory: None, ..good.clone() }, "`pool.memory` is missing"),
        (v1::PoolDescription { pages: 0, ..good.clone() }, "at least one page"),
        (v1::PoolDescription { layers: good.layers[1..].to_vec(), ..good.clone() }, "3 layers"),
        (short, "run 0 of layer 2 has 1023 bytes in the pool, but 1024 in a slot"),
        (overlap, "overlap"),
        (v1::PoolDescription { memory: host(131_071), ..good.clone() }, "beyond the 131071"),
        (v1::PoolDescription { memory: host(2 << 20), ..good.clone() }, "`engine_pool_bytes_max`"),
    ];
    for (description, why) in cases {
        let refused = Pooled::try_attach(&node, description).await.map(|_| ());
        let refused = refused.expect_err(why).to_string();
        assert!(refused.contains(why), "{refused} should say {why}");
    }
    // And then one that can be.
    Pooled::attach(&node).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_names_pages_which_are_not_its_own_is_detached() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut pooled = Pooled::attach(&node).await;
    let mut known = Known::subscribe(&mut node).await;
    let prompt = prompt(1, BLOCK_TOKENS);
    pooled.write_and_hold(&prompt, 5);
    known.sees(&chain(&prompt), Some(v1::Tier::Vram)).await;
    node.has_blocks(&chain(&prompt)).await;
    // Held already.
    pooled.write_and_hold(&crate::common::prompt(2, BLOCK_TOKENS), 5);
    until("it is detached", async || (!pooled.engine.attachment.is_connected()).then_some(()))
        .await;
    known.sees(&chain(&prompt), Some(v1::Tier::Dram)).await;
    node.shows("forced_detaches_total{kind=\"engine\"}", 1.0).await;
    // Without a pool there is nothing to hold.
    drop(pooled);
    let mut engine = FakeEngine::attach(&node).await;
    engine.send(ToNode::DropPages(v1::DropPages { handle: 1, pages: vec![0] }));
    until("it is detached", async || (!engine.attachment.is_connected()).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_in_memory_of_a_gpu_is_a_tier_as_any_other() {
    let Some(gpu) = Emulated::build() else { return };
    let library = gpu.file().to_owned();
    let mut node =
        TestNode::start_with(Domain::Shm, |config| config.cuda_library = Some(library)).await;
    let memory = gpu_memory();
    let description = on_gpu(&memory);
    let engine = Pooled::connect(&node.attach_dir(), description.clone()).await.expect("attached");
    assert!(engine.attachment.link().pool_memory().is_none(), "the engine has it already");
    let mut pooled = Pooled::new(engine, memory, &description);
    assert_eq!(gpu.registered_bytes(), 64 * 4096, "the GPU copies from and to slots by itself");
    let mut known = Known::subscribe(&mut node).await;
    let first = prompt(1, 5 * BLOCK_TOKENS);
    let keys = chain(&first);
    pooled.write_and_hold(&first, 7);
    known.sees(&keys, Some(v1::Tier::Vram)).await;
    node.has_blocks(&keys).await;
    pooled.drop_pages(1, 7..12).await;
    known.sees(&keys, Some(v1::Tier::Dram)).await;
    pooled.write(&prompt(9, 5 * BLOCK_TOKENS), 0..5, 7);
    pooled.engine.send(ToNode::Get(v1::GetBlocks {
        handle: 1,
        keys: BlockKey::concat(&keys),
        skip_promotion: false,
    }));
    let got = pooled.engine.got(1).await;
    pooled.engine.holds(&first, &got.slots, 0..5);
    pooled.engine.send(ToNode::Unpin(v1::UnpinBlocks { handle: 1 }));
    // And back, to other pages.
    assert_eq!(pooled.fill(2, &first, 20..25).await, 5);
    assert!(pooled.has(&first, 0..5, 20));
    // What the GPU fails to copy is not there, and nothing else is wrong.
    gpu.set_copies_fail(true);
    assert_eq!(pooled.fill(3, &first, 26..31).await, 0);
    let second = prompt(2, 2 * BLOCK_TOKENS);
    pooled.write_and_hold(&second, 0);
    pooled.drop_pages(4, 0..2).await;
    gpu.set_copies_fail(false);
    known.sees(&chain(&second), None).await;
    assert_eq!(pooled.fill(5, &first, 26..31).await, 5);
    node.is_quiet().await;
    // The allocations are closed with the engine; the slots stay registered until the node ends.
    drop(pooled);
    until("all is closed", async || (gpu.live() == 2).then_some(())).await;
    node.shut_down().await;
    assert_eq!((gpu.live(), gpu.registered_bytes()), (0, 0));
}

/// What is started where there is a GPU does all that it says.
#[test]
fn a_node_and_an_engine_in_two_processes_share_memory_of_a_gpu() {
    let Some(gpu) = Emulated::build() else { return };
    let tests = std::env::current_exe().expect("this test");
    let example = tests.ancestors().nth(2).expect("a folder").join("examples/cuda_pool");
    if !example.exists() {
        let skipped = "skipped: examples/cuda_pool is missing: cargo build --workspace --examples";
        writeln!(std::io::stderr(), "{skipped}").ok();
        return;
    }
    let output = Command::new(example).arg("--driver").arg(gpu.file()).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let wrong = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{wrong}");
    assert!(said.ends_with("pages were copied into slots and filled from them\n"), "{said}{wrong}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_a_gpu_that_cannot_be_is_refused_in_a_sentence() {
    let Some(gpu) = Emulated::build() else { return };
    let library = gpu.file().to_owned();
    let node =
        TestNode::start_with(Domain::Shm, |config| config.cuda_library = Some(library)).await;
    let memory = gpu_memory();
    let good = on_gpu(&memory);
    let changed = |change: &dyn Fn(&mut v1::CudaPool)| {
        let mut changed = good.clone();
        let Some(v1::pool_description::Memory::Cuda(cuda)) = &mut changed.memory else {
            unreachable!("a pool on a GPU")
        };
        change(cuda);
        changed
    };
    let cases = [
        (changed(&|cuda| cuda.device_uuid.truncate(15)), "has 15 bytes"),
        (changed(&|cuda| cuda.device_uuid[0] = 9), "no GPU of this host has the UUID 092a"),
        (changed(&|cuda| cuda.allocations.clear()), "has 0 allocations"),
        (changed(&|cuda| cuda.allocations[1].ipc_handle.push(0)), "allocation 1 has 65 bytes"),
        (changed(&|cuda| cuda.allocations[1].ipc_handle[0] = 0), "allocation 1: `cuIpcOpen"),
        (
            changed(&|cuda| cuda.allocations[1] = cuda.allocations[0].clone()),
            "allocations 0 and 1 are the same",
        ),
        (
            changed(&|cuda| cuda.allocations[1].bytes += 1),
            "allocation 1 has 65536 bytes, but 65537 are described",
        ),
        (changed(&|cuda| cuda.allocations[1].bytes -= 1), "beyond the 131071"),
        (
            changed(&|cuda| {
                // Its last 4,096 bytes as an allocation of their own.
                let mut last = cuda.allocations[0].clone();
                (cuda.allocations[0].bytes, last.bytes) = (last.bytes - 4096, 4096);
                last.ipc_handle[24..32].copy_from_slice(&cuda.allocations[0].bytes.to_le_bytes());
                last.ipc_handle[32..40].copy_from_slice(&last.bytes.to_le_bytes());
                cuda.allocations.insert(1, last);
            }),
            "the pages of run 1 are not all in one allocation",
        ),
    ];
    for (description, why) in cases {
        let refused = Pooled::connect(&node.attach_dir(), description).await.map(|_| ());
        let refused = refused.expect_err(why).to_string();
        assert!(refused.contains(why), "{refused} should say {why}");
    }
    assert_eq!(gpu.live(), 0, "nothing is left open");
    Pooled::connect(&node.attach_dir(), good.clone()).await.expect("attached");
    // A node without the driver says what is missing.
    let library = Some("/nonexistent/libcuda.so.1".into());
    let node = TestNode::start_with(Domain::Shm, |config| config.cuda_library = library).await;
    let refused = Pooled::connect(&node.attach_dir(), good).await.map(|_| ());
    let refused = refused.expect_err("no driver").to_string();
    assert!(refused.contains("install NVIDIA's driver on a host with a GPU"), "{refused}");
}

/// Not a test: an engine in a process of its own, for the test below. It attaches to the node in the current
/// directory, and holds blocks until it is killed.
#[test]
#[ignore = "is started by another test"]
fn pooled_process() {
    if !Path::new("attach.sock").exists() {
        return;
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let mut pooled = Pooled::attach_in(Path::new("."), description()).await.expect("attached");
        let (kept, lost) = (prompt(1, 2 * BLOCK_TOKENS), prompt(2, 3 * BLOCK_TOKENS));
        pooled.write_and_hold(&kept, 0);
        pooled.write(&lost, 1..3, 4);
        pooled.hold(&lost, 1..3, 4);
        tokio::time::sleep(std::time::Duration::from_secs(600)).await;
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_killed_leaves_nothing_announced() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut known = Known::subscribe(&mut node).await;
    let mut engine = Command::new(std::env::current_exe().expect("this test"))
        .args(["--ignored", "--exact", "pools::pooled_process"])
        .current_dir(node.attach_dir())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("a process");
    let (kept, lost) = (prompt(1, 2 * BLOCK_TOKENS), prompt(2, 3 * BLOCK_TOKENS));
    known.sees(&chain(&lost)[1..], Some(v1::Tier::Vram)).await;
    node.has_blocks(&chain(&kept)).await;
    engine.kill().expect("killed");
    engine.wait().expect("its end");
    known.sees(&chain(&lost)[1..], None).await;
    known.sees(&chain(&kept), Some(v1::Tier::Dram)).await;
    node.is_quiet().await;
    let mut pooled = Pooled::attach(&node).await;
    assert_eq!(pooled.fill(1, &kept, 0..2).await, 2);
    assert!(pooled.has(&kept, 0..2, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_engine_leaves_behind_is_announced_no_more_and_the_next_one_begins_anew() {
    let mut node = TestNode::start(Domain::Shm).await;
    let mut known = Known::subscribe(&mut node).await;
    let (kept, lost) = (prompt(1, 2 * BLOCK_TOKENS), prompt(2, 3 * BLOCK_TOKENS));
    let mut pooled = Pooled::attach(&node).await;
    pooled.write_and_hold(&kept, 0);
    node.has_blocks(&chain(&kept)).await;
    // These follow a block that is nowhere, so no slot can have them.
    pooled.write(&lost, 1..3, 4);
    pooled.hold(&lost, 1..3, 4);
    known.sees(&chain(&lost)[1..], Some(v1::Tier::Vram)).await;
    drop(pooled);
    known.sees(&chain(&lost)[1..], None).await;
    known.sees(&chain(&kept), Some(v1::Tier::Dram)).await;
    node.shows("pool_pages{state=\"free\"}", 0.0).await;
    let mut pooled = Pooled::attach(&node).await;
    assert_eq!(pooled.fill(1, &kept, 0..2).await, 2);
    assert!(pooled.has(&kept, 0..2, 0));
    node.is_quiet().await;
}
