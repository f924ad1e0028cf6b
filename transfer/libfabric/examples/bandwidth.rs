//! How fast 1 MiB writes with an immediate go, over libfabric's providers `tcp` and `shm`, both ends in
//! this one process and driven by one thread:
//!
//! ```text
//! cargo run --release -p kvasir-transfer-libfabric --example bandwidth
//! ```
//!
//! What to expect of a virtual machine with two cores of the Sapphire Rapids class: tcp 2.4 GB/s (the
//! bytes pass the kernel's sockets), shm 9.9 GB/s (one copy).

use std::error::Error;
use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_transfer_libfabric::address::AddressVector;
use kvasir_transfer_libfabric::completion::{Completion, Immediate, Token};
use kvasir_transfer_libfabric::domain::{Domain, Fabric};
use kvasir_transfer_libfabric::endpoint::{Endpoint, Write};
use kvasir_transfer_libfabric::error::PostError;
use kvasir_transfer_libfabric::info::InfoRequest;
use kvasir_transfer_libfabric::library::Library;
use kvasir_transfer_libfabric::memory::Pages;
use kvasir_transfer_libfabric::queue::{CompletionQueue, QueueOptions};
use kvasir_transfer_libfabric::region::Access;

const WRITE_BYTES: usize = 1 << 20;
/// Writes under way at once, each to a place of its own.
const DEPTH: usize = 8;
const RUN: Duration = Duration::from_secs(2);

struct End {
    domain: Domain,
    queue: CompletionQueue,
    peers: AddressVector,
    endpoint: Endpoint,
}

fn open(library: Library, provider: &str) -> Result<End, Box<dyn Error>> {
    let source = (provider == "tcp").then(|| "127.0.0.1".into());
    let request = InfoRequest { provider: Some(provider.into()), source, ..InfoRequest::default() };
    let infos = library.infos(&request)?;
    let info = infos.first().ok_or("nothing is listed")?;
    let domain = Domain::open(&Fabric::open(info)?, info)?;
    let queue = CompletionQueue::open(&domain, QueueOptions::default())?;
    let peers = AddressVector::open(&domain, 16)?;
    let endpoint = Endpoint::open(&domain, &queue, &peers)?;
    Ok(End { domain, queue, peers, endpoint })
}

/// Bytes that arrived, and in how long.
fn run(library: Library, provider: &str) -> Result<(u64, Duration), Box<dyn Error>> {
    let (sender, receiver) = (open(library, provider)?, open(library, provider)?);
    let bytes = WRITE_BYTES * DEPTH;
    let source = sender.domain.register(Arc::new(Pages::new(bytes)), Access::SOURCE)?;
    let target = receiver.domain.register(Arc::new(Pages::new(bytes)), Access::TARGET)?;
    let peer = sender.peers.insert(receiver.endpoint.name())?;
    let write = |place: usize| -> Result<Write, Box<dyn Error>> {
        Ok(Write {
            peer: peer.clone(),
            local: source.span(place * WRITE_BYTES, WRITE_BYTES)?,
            remote: target.remote().at((place * WRITE_BYTES) as u64, WRITE_BYTES as u64)?,
            immediate: Some(Immediate(place as u32)),
            token: Token(place as u64),
        })
    };
    let mut idle: Vec<usize> = (0..DEPTH).collect();
    let (mut told, mut arrived) = (Vec::new(), 0);
    let started = Instant::now();
    while started.elapsed() < RUN {
        while let Some(place) = idle.pop() {
            match sender.endpoint.write(&write(place)?) {
                Ok(()) => {}
                Err(PostError::Busy(_)) => {
                    idle.push(place);
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        sender.queue.poll(&mut told, DEPTH)?;
        receiver.queue.poll(&mut told, DEPTH)?;
        for completion in told.drain(..) {
            match completion {
                Completion::Done { token, .. } => idle.push(token.0 as usize),
                Completion::Arrived { .. } => arrived += WRITE_BYTES as u64,
                other => return Err(format!("{other:?}").into()),
            }
        }
    }
    Ok((arrived, started.elapsed()))
}

fn main() -> Result<(), Box<dyn Error>> {
    let library = Library::open()?;
    let mut out = std::io::stdout();
    writeln!(out, "libfabric {} at {}", library.version(), library.path().display())?;
    for provider in ["tcp", "shm"] {
        let (bytes, took) = run(library, provider)?;
        let gb_per_s = bytes as f64 / took.as_secs_f64() / 1e9;
        writeln!(out, "{provider}: {gb_per_s:.2} GB/s of 1 MiB writes that counted")?;
    }
    Ok(())
}
