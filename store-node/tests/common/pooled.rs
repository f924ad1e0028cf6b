//! An engine with pages of its own, in memory of the host or of an emulated GPU.

use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;

use kvasir_attach::{AttachError, EngineAttachment};
use kvasir_proto::{BlockKey, PoolLayout, Share, v1};
use kvasir_transfer::memory::{Prefault, SharedMemory};
use v1::engine_to_node::Message as ToNode;
use v1::node_to_engine::Message as FromNode;

use super::{
    BLOCK_TOKENS, FakeEngine, LAYERS, TestNode, chain, engine_options, layout, namespace,
    page_bytes,
};

pub(crate) const PAGES: u32 = 32;
pub(crate) const LAYER_BYTES: u64 = 1024;

/// Layer by layer, as vLLM lays its cache out; slots have a block's layers beside each other.
pub(crate) fn description() -> v1::PoolDescription {
    let layer = |layer: u64| v1::PoolLayer {
        runs: vec![v1::PoolRun {
            base_bytes: layer * u64::from(PAGES) * LAYER_BYTES,
            stride_bytes: LAYER_BYTES,
            length_bytes: LAYER_BYTES,
        }],
    };
    let bytes = u64::from(PAGES) * u64::from(LAYERS) * LAYER_BYTES;
    v1::PoolDescription {
        memory: Some(v1::pool_description::Memory::Host(v1::HostPool { bytes })),
        pages: PAGES,
        layers: (0..LAYERS.into()).map(layer).collect(),
    }
}

/// An engine with a pool.
pub(crate) struct Pooled {
    pub engine: FakeEngine,
    /// Where its pages are.
    pub memory: Arc<SharedMemory>,
    pub layout: PoolLayout,
}

impl Pooled {
    pub(crate) async fn attach(node: &TestNode) -> Self {
        Pooled::try_attach(node, description()).await.expect("attached")
    }

    pub(crate) async fn try_attach(
        node: &TestNode,
        pool: v1::PoolDescription,
    ) -> Result<Self, AttachError> {
        Pooled::attach_in(&node.attach_dir(), pool).await
    }

    pub(crate) async fn attach_in(
        dir: &Path,
        pool: v1::PoolDescription,
    ) -> Result<Self, AttachError> {
        let engine = Pooled::connect(dir, pool.clone()).await?;
        let memory = Arc::clone(engine.attachment.link().pool_memory().expect("a pool"));
        Ok(Pooled::new(engine, memory, &pool))
    }

    pub(crate) async fn connect(
        dir: &Path,
        pool: v1::PoolDescription,
    ) -> Result<FakeEngine, AttachError> {
        let mut options = engine_options(dir, layout());
        options.pool = Some(pool);
        Ok(FakeEngine::new(EngineAttachment::connect(options).await?))
    }

    pub(crate) fn new(
        engine: FakeEngine,
        memory: Arc<SharedMemory>,
        pool: &v1::PoolDescription,
    ) -> Self {
        let layout = PoolLayout::from_wire(PAGES, memory.len() as u64, &pool.layers, &layout());
        Pooled { engine, memory, layout: layout.expect("the node took it") }
    }

    /// Writes pages of a prompt from this page of the pool on.
    pub(crate) fn write(&self, prompt: &[u32], blocks: Range<u32>, page: u32) {
        for (page, block) in (page..).zip(blocks) {
            for (layer, (offset, _)) in (0..).zip(self.layout.runs(page)) {
                let bytes = page_bytes(prompt, block, layer);
                self.memory.copy_from(offset as usize, &bytes).expect("inside the pool");
            }
        }
    }

    /// Computes one layer of pages of a prompt in pages of the pool from this one on.
    pub(crate) fn write_layer(&self, prompt: &[u32], pages: Range<u32>, layer: u16, page: u32) {
        for (page, of) in (page..).zip(pages) {
            let (offset, _) =
                self.layout.runs(page).nth(layer.into()).expect("a run for each layer");
            let bytes = page_bytes(prompt, of, layer);
            self.memory.copy_from(offset as usize, &bytes).expect("inside the pool");
        }
    }

    /// Computes pages of a prompt in one step, layer by layer, in pages of the pool from this one on.
    pub(crate) fn compute(&mut self, share: Share, prompt: &[u32], pages: Range<u32>, page: u32) {
        let step = self.engine.plan_in_pool(&[(share, pages.clone(), page)]);
        for layer in 0..LAYERS {
            self.write_layer(prompt, pages.clone(), layer, page);
            self.engine.attachment.progress(step, layer + 1);
        }
    }

    /// Whether pages from this one on have these blocks.
    pub(crate) fn has(&self, prompt: &[u32], blocks: Range<u32>, page: u32) -> bool {
        (page..).zip(blocks).all(|(page, block)| {
            (0..).zip(self.layout.runs(page)).all(|(layer, (offset, bytes))| {
                let mut there = vec![0; bytes as usize];
                self.memory.copy_to(offset as usize, &mut there).expect("inside the pool");
                there == page_bytes(prompt, block, layer)
            })
        })
    }

    pub(crate) fn hold(&mut self, prompt: &[u32], blocks: Range<u32>, page: u32) {
        let keys = chain(prompt);
        let parent = blocks.start.checked_sub(1).map(|before| keys[before as usize]);
        self.engine.send(ToNode::HoldPages(v1::HoldPages {
            namespace: namespace().0.to_vec(),
            parent: BlockKey::concat(parent.as_slice()),
            pages: (page..).take(blocks.len()).collect(),
            keys: BlockKey::concat(&keys[blocks.start as usize..blocks.end as usize]),
        }));
    }

    pub(crate) fn write_and_hold(&mut self, prompt: &[u32], page: u32) {
        let blocks = prompt.len() as u32 / BLOCK_TOKENS;
        self.write(prompt, 0..blocks, page);
        self.hold(prompt, 0..blocks, page);
    }

    pub(crate) async fn drop_pages(&mut self, handle: u64, pages: Range<u32>) {
        self.ask_drop(handle, pages);
        self.dropped(handle).await;
    }

    pub(crate) fn ask_drop(&mut self, handle: u64, pages: Range<u32>) {
        let pages = pages.collect();
        self.engine.send(ToNode::DropPages(v1::DropPages { handle, pages }));
    }

    pub(crate) async fn dropped(&mut self, handle: u64) {
        let dropped = |message: &FromNode| match message {
            FromNode::PagesDropped(dropped) => (dropped.handle == handle).then_some(()),
            _ => None,
        };
        self.engine.wait("pages are dropped", dropped).await;
    }

    /// Fills pages from this one on with the last blocks of a prompt.
    pub(crate) async fn fill(&mut self, handle: u64, prompt: &[u32], pages: Range<u32>) -> u32 {
        let keys = BlockKey::concat(&chain(prompt));
        let pages = pages.collect();
        let fill = v1::FillPages { handle, keys, pages, of_share: None };
        self.engine.send(ToNode::FillPages(fill));
        self.filled(handle).await
    }

    /// Fills these pages with pages of a share from this one on, when they are there.
    pub(crate) fn ask_fill_of(
        &mut self,
        handle: u64,
        share: Share,
        first_page: u32,
        pages: Range<u32>,
    ) {
        let (tx, side) = (Some(share.tx.into()), share.side.to_wire());
        let of_share = Some(v1::SharePages { tx, side, first_page });
        let (keys, pages) = (Vec::new(), pages.collect());
        self.engine.send(ToNode::FillPages(v1::FillPages { handle, keys, pages, of_share }));
    }

    pub(crate) async fn filled(&mut self, handle: u64) -> u32 {
        let filled = |message: &FromNode| match message {
            FromNode::PagesFilled(filled) => (filled.handle == handle).then_some(filled.blocks),
            _ => None,
        };
        self.engine.wait("pages are filled", filled).await
    }
}

/// Memory of an emulated GPU, in two allocations: half of the layers in each.
pub(crate) fn on_gpu(memory: &SharedMemory) -> v1::PoolDescription {
    let half = memory.len() as u64 / 2;
    let allocation = |at: u64| {
        // See `driver.cpp`.
        let file = memory.fd().as_raw_fd();
        let numbers = [std::process::id().into(), file as u64, at * half, half, 0, 0, 0];
        let numbers = numbers.iter().flat_map(|number: &u64| number.to_le_bytes());
        let ipc_handle = b"KVSRGPU1".iter().copied().chain(numbers).collect();
        v1::CudaAllocation { ipc_handle, bytes: half }
    };
    // The second GPU.
    let device_uuid = (41..57).collect();
    let cuda = v1::CudaPool { device_uuid, allocations: vec![allocation(0), allocation(1)] };
    v1::PoolDescription { memory: Some(v1::pool_description::Memory::Cuda(cuda)), ..description() }
}

pub(crate) fn gpu_memory() -> Arc<SharedMemory> {
    let bytes = PAGES as usize * LAYERS as usize * LAYER_BYTES as usize;
    Arc::new(SharedMemory::create("kvasir-test-gpu", bytes, Prefault::No).expect("memory"))
}
