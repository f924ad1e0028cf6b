//! A store node whose engine has its pages in memory of a GPU: they are copied into slots, dropped, and filled again. Node and
//! engine are two processes, as they are in production. Without a GPU it says so in a sentence and does nothing else.
//! `tests/gpu/run` starts it; the ordinary tests do so with an emulated driver.
//!
//!     cuda_pool [--driver FILE]
//!
//! FILE is a driver in place of the system's. It starts itself as the node.

#![allow(clippy::print_stdout)] // it is what the example is for

#[path = "../tests/common/mod.rs"]
#[allow(unused_imports, reason = "made for tests, too")]
mod common;

use std::error::Error;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::pooled::{LAYER_BYTES, PAGES, Pooled, description};
use common::{BLOCK_TOKENS, Domain, LAYERS, TestNode, chain, prompt};
use kvasir_cuda::{Device, Driver, DriverError, Memory, Stream};
use kvasir_proto::{BlockKey, v1};
use kvasir_transfer::memory::{Prefault, SharedMemory};
use v1::engine_to_node::Message as ToNode;

type Done<T> = Result<T, Box<dyn Error>>;

/// Smaller ones share one that is opened from its beginning.
const ALLOCATION_BYTES: usize = 2 << 20;
const BLOCKS: u32 = 5;

fn main() -> Done<()> {
    let (mut file, mut is_node) = (None, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--driver" => file = Some(PathBuf::from(arguments.next().ok_or("--driver FILE")?)),
            "--node" => is_node = true,
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    if is_node {
        return runtime.block_on(node(file));
    }
    let opened = match &file {
        Some(file) => Driver::open_file(file),
        None => Driver::open(),
    };
    let device = match opened.and_then(|driver| Device::open(driver, 0)) {
        Ok(device) => device,
        Err(error @ (DriverError::Missing { .. } | DriverError::NoSuchDevice { .. })) => {
            println!("skipped: no GPU: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let mut other = Command::new(std::env::current_exe()?);
    other.arg("--node").stdin(Stdio::piped()).stdout(Stdio::piped());
    if let Some(file) = &file {
        other.arg("--driver").arg(file);
    }
    let mut other = other.spawn()?;
    let mut says = String::new();
    BufReader::new(other.stdout.take().ok_or("no output")?).read_line(&mut says)?;
    let checked = runtime.block_on(engine(&device, Path::new(says.trim())));
    // It ends with its input.
    drop(other.stdin.take());
    let ended = other.wait()?;
    checked?;
    if !ended.success() {
        return Err(format!("the node: {ended}").into());
    }
    println!("{}: pages were copied into slots and filled from them", device.name());
    Ok(())
}

/// The other process.
async fn node(file: Option<PathBuf>) -> Done<()> {
    let node = TestNode::start_with(Domain::Shm, |config| config.cuda_library = file).await;
    println!("{}", node.attach_dir().display());
    tokio::task::spawn_blocking(|| std::io::stdin().lock().read_to_end(&mut Vec::new())).await??;
    node.shut_down().await;
    Ok(())
}

/// Memory of the GPU, and what is to be in it.
struct Pages {
    allocations: [Memory; 2],
    image: Arc<SharedMemory>,
    stream: Stream,
}

impl Pages {
    fn new(device: &Arc<Device>) -> Done<Pages> {
        let allocation = || Memory::new(device, ALLOCATION_BYTES);
        let image = SharedMemory::create("kvasir-pages", 2 * ALLOCATION_BYTES, Prefault::No)?;
        Ok(Pages {
            allocations: [allocation()?, allocation()?],
            image: Arc::new(image),
            stream: Stream::new(device)?,
        })
    }

    /// Half of the layers in each allocation.
    fn description(&self, device: &Device) -> Done<v1::PoolDescription> {
        let allocation = |memory: &Memory| -> Done<v1::CudaAllocation> {
            let ipc_handle = memory.ipc_handle()?.0.to_vec();
            Ok(v1::CudaAllocation { ipc_handle, bytes: memory.len_bytes() as u64 })
        };
        let allocations = self.allocations.iter().map(allocation).collect::<Done<Vec<_>>>()?;
        let cuda = v1::CudaPool { device_uuid: device.uuid()?.to_vec(), allocations };
        let half = u64::from(LAYERS) / 2;
        let layer = |layer: u64| v1::PoolLayer {
            runs: vec![v1::PoolRun {
                base_bytes: layer / half * ALLOCATION_BYTES as u64
                    + layer % half * u64::from(PAGES) * LAYER_BYTES,
                stride_bytes: LAYER_BYTES,
                length_bytes: LAYER_BYTES,
            }],
        };
        Ok(v1::PoolDescription {
            memory: Some(v1::pool_description::Memory::Cuda(cuda)),
            layers: (0..LAYERS.into()).map(layer).collect(),
            ..description()
        })
    }

    fn upload(&self) -> Done<()> {
        let mut bytes = vec![0u8; ALLOCATION_BYTES];
        for (at, memory) in self.allocations.iter().enumerate() {
            self.image.copy_to(at * ALLOCATION_BYTES, &mut bytes)?;
            memory.write(&bytes, &self.stream)?;
            self.stream.wait()?;
        }
        Ok(())
    }

    fn download(&self) -> Done<()> {
        let mut values = vec![0f32; ALLOCATION_BYTES / 4];
        for (at, memory) in self.allocations.iter().enumerate() {
            memory.read(&mut values, &self.stream)?;
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.image.copy_from(at * ALLOCATION_BYTES, &bytes)?;
        }
        Ok(())
    }
}

async fn engine(device: &Arc<Device>, attach_dir: &Path) -> Done<()> {
    let pages = Pages::new(device)?;
    let pool = pages.description(device)?;
    let engine = Pooled::connect(attach_dir, pool.clone()).await?;
    let mut pooled = Pooled::new(engine, Arc::clone(&pages.image), &pool);

    let of = prompt(1, BLOCKS * BLOCK_TOKENS);
    pooled.write(&of, 0..BLOCKS, 7);
    pages.upload()?;
    pooled.hold(&of, 0..BLOCKS, 7);
    // They come to slots meanwhile.
    let mut handle = 0;
    let slots = loop {
        handle += 1;
        if handle > 2_000 {
            return Err("the pages were not copied to slots".into());
        }
        let keys = BlockKey::concat(&chain(&of));
        pooled.engine.send(ToNode::Get(v1::GetBlocks { handle, keys, skip_promotion: false }));
        let got = pooled.engine.got(handle).await;
        if got.slots.len() == BLOCKS as usize {
            break got.slots;
        }
        pooled.engine.send(ToNode::Unpin(v1::UnpinBlocks { handle }));
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    pooled.engine.holds(&of, &slots, 0..BLOCKS);
    pooled.engine.send(ToNode::Unpin(v1::UnpinBlocks { handle }));

    // Their pages get other bytes, and other pages get theirs.
    pooled.drop_pages(1, 7..7 + BLOCKS).await;
    pooled.write(&prompt(9, 13 * BLOCK_TOKENS), 0..13, 7);
    pages.upload()?;
    let filled = pooled.fill(2, &of, 20..20 + BLOCKS).await;
    if filled != BLOCKS {
        return Err(format!("{filled} of {BLOCKS} pages were filled").into());
    }
    pages.download()?;
    match pooled.has(&of, 0..BLOCKS, 20) {
        true => Ok(()),
        false => Err("pages were filled with other bytes".into()),
    }
}
