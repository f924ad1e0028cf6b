//! A GPU's memory between processes: what one has allocated another one opens, reads and writes, and how fast copies are
//! between it and memory of the host that is registered, and that is not. Without a GPU it says so in a sentence and
//! does nothing else. `tests/gpu/run` starts it.
//!
//!     cuda_sharing [--driver FILE] [--short]
//!
//! FILE is a driver in place of the system's; `--short` measures nothing. It starts itself as the other process.

#![allow(clippy::print_stdout)] // it is what the example is for

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::time::Instant;

use kvasir_cuda::{
    Device, Driver, DriverError, IpcHandle, Memory, Registered, SharedAllocation, Stream,
};

type Done<T> = Result<T, Box<dyn Error>>;

/// A block of 64 tokens of DeepSeek-V2-Lite has 27 runs of 73,728 bytes.
const RUN_BYTES: usize = 73_728;
const RUNS: usize = 512;
const BYTES: usize = RUN_BYTES * RUNS;
const REPEATS: u32 = 20;

fn main() -> Done<()> {
    let (mut driver, mut short, mut allocates) = (None, false, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--driver" => driver = Some(PathBuf::from(arguments.next().ok_or("--driver FILE")?)),
            "--short" => short = true,
            "--allocate" => allocates = true,
            other => return Err(format!("unknown argument {other}").into()),
        }
    }
    let opened = match &driver {
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
    let stream = Stream::new(&device)?;
    if allocates {
        return allocate(&device, &stream);
    }
    let mut other = Command::new(std::env::current_exe()?);
    other.arg("--allocate").stdin(Stdio::piped()).stdout(Stdio::piped());
    if let Some(file) = &driver {
        other.arg("--driver").arg(file);
    }
    let mut other = other.spawn()?;
    let mut says = BufReader::new(other.stdout.take().ok_or("no output")?);
    let mut told = other.stdin.take().ok_or("no input")?;
    let mut line = String::new();
    says.read_line(&mut line)?;
    let handle = parse(line.trim())?;

    let allocation = SharedAllocation::open(&device, handle)?;
    assert!(allocation.len_bytes() >= BYTES as u64, "{} bytes", allocation.len_bytes());
    let mut host = vec![0u8; BYTES];
    // SAFETY: `host` has as many bytes, and is not touched before the stream was waited for.
    unsafe { allocation.read(0, host.as_mut_ptr(), BYTES as u64, &stream)? };
    stream.wait()?;
    assert!(host.iter().enumerate().all(|(at, byte)| *byte == first(at)), "other bytes");
    for (at, byte) in host.iter_mut().enumerate() {
        *byte = second(at);
    }
    // SAFETY: as above.
    unsafe { allocation.write(0, host.as_ptr(), BYTES as u64, &stream)? };
    stream.wait()?;
    told.write_all(b"written\n")?;
    line.clear();
    says.read_line(&mut line)?;
    assert_eq!(line.trim(), "as written");
    println!("{}: opened by handle, read and written", device.name());
    if !short {
        measure(&allocation, &stream, "not registered", &mut host)?;
        let at = NonNull::new(host.as_mut_ptr()).ok_or("no memory")?;
        // SAFETY: `host` outlives what is made of it.
        let _registered = unsafe { Registered::new(&device, at, BYTES)? };
        measure(&allocation, &stream, "registered", &mut host)?;
    }
    drop(allocation);
    drop(told);
    assert!(other.wait()?.success());
    Ok(())
}

/// The other process: allocates, says the handle, and looks at what was written.
fn allocate(device: &std::sync::Arc<Device>, stream: &Stream) -> Done<()> {
    let memory = Memory::new(device, BYTES)?;
    let bytes: Vec<u8> = (0..BYTES).map(first).collect();
    memory.write(&bytes, stream)?;
    stream.wait()?;
    println!("{}", memory.ipc_handle()?.0.map(|byte| format!("{byte:02x}")).concat());
    let mut input = std::io::stdin().lock();
    let mut line = String::new();
    input.read_line(&mut line)?;
    let mut there = vec![0f32; BYTES / 4];
    memory.read(&mut there, stream)?;
    let there = there.iter().flat_map(|value| value.to_le_bytes());
    let is_written = there.enumerate().all(|(at, byte)| byte == second(at));
    println!("{}", if is_written { "as written" } else { "other bytes" });
    // Its memory stays until the one who has opened it has closed it.
    input.read_to_string(&mut line)?;
    Ok(())
}

fn first(at: usize) -> u8 {
    (at % 251) as u8
}

fn second(at: usize) -> u8 {
    (at % 241) as u8 ^ 0x55
}

fn parse(text: &str) -> Done<IpcHandle> {
    let byte = |at: usize| u8::from_str_radix(text.get(at..at + 2).unwrap_or(""), 16);
    let bytes: Result<Vec<u8>, _> = (0..64).map(|at| byte(2 * at)).collect();
    Ok(IpcHandle(bytes?.try_into().map_err(|_| "64 bytes")?))
}

/// Runs of pages, each a copy of its own, and all of them waited for together.
fn measure(
    allocation: &SharedAllocation,
    stream: &Stream,
    what: &str,
    host: &mut [u8],
) -> Done<()> {
    for is_read in [true, false] {
        let begin = Instant::now();
        for _ in 0..REPEATS {
            for at in (0..RUNS).map(|run| run * RUN_BYTES) {
                let (offset, bytes) = (at as u64, RUN_BYTES as u64);
                // SAFETY: as many bytes are there, and nobody touches them before the stream was waited for.
                unsafe {
                    match is_read {
                        true => {
                            allocation.read(offset, host[at..].as_mut_ptr(), bytes, stream)?;
                        }
                        false => allocation.write(offset, host[at..].as_ptr(), bytes, stream)?,
                    }
                }
            }
            stream.wait()?;
        }
        let gb_per_s = f64::from(REPEATS) * BYTES as f64 / begin.elapsed().as_secs_f64() / 1e9;
        let way = if is_read { "from the GPU" } else { "to the GPU" };
        println!("host memory {what}, {way}: {gb_per_s:.2} GB/s in runs of {RUN_BYTES} bytes");
    }
    Ok(())
}
