//! What two engines that are connected and idle use of a core: `idle shm|tcp|verbs|efa SECONDS`. `verbs` takes the
//! first device that works, `efa` libfabric's `tcp` provider, which needs no hardware. `benches/idle/run` runs it.

#![allow(clippy::print_stdout)] // a program that speaks through its output

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use kvasir_transfer::memory::{Prefault, SharedMemory};
use kvasir_transfer::{
    Completion, Domain, EfaConfig, Handlers, Source, TransferConfig, TransferEngine, VerbsConfig,
    Write,
};
use rustix::time::{ClockId, clock_gettime};

const BYTES: usize = 4096;
/// For what follows the last write: acknowledgements, and the time that workers poll after work.
const CALM: Duration = Duration::from_secs(2);

fn main() -> Result<(), Box<dyn Error>> {
    let usage = "usage: idle shm|tcp|verbs|efa SECONDS";
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, seconds] = &arguments[..] else { return Err(usage.into()) };
    let domain = match name.as_str() {
        "shm" => Domain::Shm,
        "tcp" => Domain::Tcp,
        "verbs" => Domain::Verbs,
        "efa" => Domain::Efa,
        _ => return Err(usage.into()),
    };
    let watched = Duration::from_secs(seconds.parse()?);

    let run_dir = tempfile::tempdir()?;
    let engine = || {
        let config = TransferConfig {
            preferred: domain,
            run_dir: (domain == Domain::Shm).then(|| run_dir.path().to_owned()),
            tcp_listen: (domain != Domain::Shm).then_some(([127, 0, 0, 1], 0).into()),
            verbs: (domain == Domain::Verbs).then(VerbsConfig::default),
            efa: (domain == Domain::Efa).then(|| EfaConfig {
                provider: "tcp".to_owned(),
                address: Some("127.0.0.1".to_owned()),
                ..EfaConfig::default()
            }),
            ..TransferConfig::default()
        };
        TransferEngine::start(config, Handlers::default(), &prometheus::Registry::new())
    };
    let (sender, receiver) = (engine()?, engine()?);
    let memory = || SharedMemory::create("idle", BYTES, Prefault::Yes).map(Arc::new);
    let (source, _) = sender.register(memory()?)?;
    let (_target, target) = receiver.register(memory()?)?;
    let peer = sender.connect(&receiver.endpoint())?;
    for _ in 0..100 {
        let (done, outcome) = Completion::future();
        let source = Source::Region { handle: source.clone(), offset: 0, bytes: BYTES };
        let (target_offset, imm, checksum, group) = (0, Some(7), None, 0);
        let deadline = Duration::from_secs(30);
        let write = Write { peer, source, target, target_offset, imm, checksum, group, deadline };
        sender.write(write, done)?;
        outcome.wait()?;
    }

    std::thread::sleep(CALM);
    let before = used();
    std::thread::sleep(watched);
    let percent = (used() - before).as_secs_f64() / watched.as_secs_f64() * 100.0;
    println!("| two engines over {name} | idle | {percent:.3} |");
    Ok(())
}

/// The time on a core of all threads so far.
fn used() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}
