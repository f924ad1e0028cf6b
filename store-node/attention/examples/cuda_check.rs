//! The CUDA kernels on a GPU: correct on files of vectors, and how long they take. Without a GPU it says
//! so in a sentence and does nothing else. `tests/gpu/run` starts it.
//!
//!     cuda_check FOLDER [--nvrtc FILE] [--write FILE] [--short] [--profile]
//!
//! FOLDER has the folders of vectors (`tests/data`). `--write` leaves a case of 2,048 rows with the GPU's
//! answer for `tests/gpu/compare.py`; `--short` measures nothing; `--profile` only launches
//! some shapes, each three times, for a profiler.

#![allow(clippy::print_stdout)] // it is what the example is for

#[path = "../tests/support/device.rs"]
mod device;
#[path = "../tests/support/slots.rs"]
mod slots;

use std::cell::RefCell;
use std::collections::HashMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use device::{DeviceQuery, DeviceRows};
use half::bf16;
use kvasir_attention::RowDtype;
use kvasir_attention::cuda::compile::Nvrtc;
use kvasir_attention::cuda::variant::{Arch, Variant};
use kvasir_attention::cuda::{CudaAttention, CudaError, CudaJob};
use kvasir_attention::vectors::Case;
use kvasir_cuda::{Device, Driver, DriverError, Event, Graph, Stream};
use slots::Slots;

type Done<T> = Result<T, Box<dyn Error>>;

const D_QK: usize = 576;
const D_V: usize = 512;
const SCALE: f32 = 0.072;
const PAGE_ROWS: usize = 64;
/// Sets of rows, queries and results that launches take in turn, so that the second-level cache (60 MB)
/// has none of the 2.4 MB of rows that come next.
const SETS: usize = 48;
const REPEATS: usize = 15;

struct Flags {
    vectors: PathBuf,
    nvrtc: Option<PathBuf>,
    write: Option<PathBuf>,
    short: bool,
    profile: bool,
}

struct Gpu {
    stream: Arc<Stream>,
    nvrtc: Nvrtc,
    /// What was compiled, which takes seconds.
    cubins: RefCell<HashMap<Variant, Rc<[u8]>>>,
}

fn main() -> Done<()> {
    let flags = flags()?;
    let device = match Driver::open().and_then(|driver| Device::open(driver, 0)) {
        Ok(device) => device,
        Err(error @ (DriverError::Missing { .. } | DriverError::NoSuchDevice { .. })) => {
            println!("skipped: no GPU: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    println!(
        "{}, {} multiprocessors, {}",
        device.name(),
        device.multiprocessors(),
        Arch::of_device(&device)?.name()
    );
    let nvrtc = match &flags.nvrtc {
        Some(file) => Nvrtc::open_file(file)?,
        None => Nvrtc::open()?,
    };
    let stream = Arc::new(Stream::new(&device)?);
    let gpu = Gpu { stream, nvrtc, cubins: RefCell::default() };
    if flags.profile {
        return profile(&gpu);
    }
    let failed = check_vectors(&gpu, &flags.vectors)?;
    if let Some(file) = &flags.write {
        write_case(&gpu, file)?;
    }
    if !flags.short {
        measure(&gpu)?;
    }
    if failed > 0 { Err(format!("{failed} vectors failed").into()) } else { Ok(()) }
}

fn flags() -> Done<Flags> {
    let mut flags =
        Flags { vectors: PathBuf::new(), nvrtc: None, write: None, short: false, profile: false };
    let mut arguments = std::env::args_os().skip(1);
    while let Some(argument) = arguments.next() {
        let mut file = || arguments.next().map(PathBuf::from).ok_or("a file's name is missing");
        match argument.to_str() {
            Some("--nvrtc") => flags.nvrtc = Some(file()?),
            Some("--write") => flags.write = Some(file()?),
            Some("--short") => flags.short = true,
            Some("--profile") => flags.profile = true,
            _ => flags.vectors = PathBuf::from(argument),
        }
    }
    if flags.vectors.as_os_str().is_empty() {
        return Err("cuda_check FOLDER [--nvrtc FILE] [--write FILE] [--short] [--profile]".into());
    }
    Ok(flags)
}

impl Gpu {
    fn attention(
        &self,
        dtype: RowDtype,
        d_qk: usize,
        d_v: usize,
    ) -> Result<CudaAttention, CudaError> {
        let arch = Arch::of_device(self.stream.device())?;
        let variant = Variant::new(dtype, d_qk, d_v, arch)?;
        let compiled = self.cubins.borrow().get(&variant).cloned();
        let cubin = match compiled {
            Some(cubin) => cubin,
            None => {
                let cubin = Rc::from(self.nvrtc.compile(&variant, arch)?.cubin);
                self.cubins.borrow_mut().entry(variant).or_insert(cubin).clone()
            }
        };
        CudaAttention::from_cubin(variant, &cubin, self.stream.clone())
    }
}

/// All files of vectors, in pages of three sizes; returns how many failed.
fn check_vectors(gpu: &Gpu, folder: &Path) -> Done<usize> {
    let mut files = Vec::new();
    for name in ["mla_partial", "mla_partial_types"] {
        for entry in std::fs::read_dir(folder.join(name))? {
            files.push(entry?.path());
        }
    }
    files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    files.sort();
    let mut failed = 0;
    println!("\n| case | o, relative | m | ln l | |\n| --- | ---: | ---: | ---: | --- |");
    for path in files {
        let case = Case::parse(&std::fs::read(&path)?)?;
        let (d_qk, d_v, dtype) = (case.d_qk(), case.d_v(), case.dtype());
        let mut attention = gpu.attention(dtype, d_qk, d_v)?;
        for rows_per_page in [64, 16, 1] {
            let slots = Slots::new(case.rows(), dtype.row_bytes(d_qk), rows_per_page);
            let rows = DeviceRows::of(&gpu.stream, &slots)?;
            let verdict = case.check_by(CudaAttention::PRECISION, |values, selected| {
                let query = Slots::queries(values, d_qk, attention.variant().query_dtype());
                let query =
                    DeviceQuery::new(&gpu.stream, &rows, &query, selected, d_v, case.scale())?;
                // SAFETY: all of the job is this process's memory of the device, and lives until its
                // result is read, which waits.
                unsafe { attention.attend(&[query.job])? };
                query.read(&gpu.stream, d_v)
            })?;
            let errors = verdict.errors;
            println!(
                "| {} by {rows_per_page} | {:.1e} | {:.1e} | {:.1e} | {} |",
                path.file_stem().unwrap_or_default().display(),
                errors.o_norm,
                errors.m,
                errors.l,
                if verdict.passed { "passed" } else { "FAILED" },
            );
            failed += usize::from(!verdict.passed);
        }
    }
    Ok(failed)
}

/// Values in -1..1 from a seed.
fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0).to_f32()
    };
    (0..count).map(|_| next()).collect()
}

/// Rows of a type from a seed, as memory has them.
fn slots_of(seed: u64, rows: usize, dtype: RowDtype) -> Slots {
    let row_bytes = dtype.row_bytes(D_QK);
    let rows: Vec<Vec<u8>> = values(seed, rows * D_QK)
        .chunks_exact(D_QK)
        .map(|row| match dtype {
            // Any bytes but those of no number, scales of 1/256 and zeros where the rotated values are.
            RowDtype::Fp8Latent => {
                let latent = row[..512].iter().map(|v| ((v + 1.0) * 100.0) as u8 & 0x77);
                let scales = [1.0f32 / 256.0; 4].into_iter().flat_map(f32::to_le_bytes);
                latent.chain(scales).chain([0; 128]).collect()
            }
            _ => slots::stored(row, dtype),
        })
        .collect();
    Slots::new(rows.iter().map(Vec::as_slice), row_bytes, PAGE_ROWS)
}

/// `q`, `ckv`, the GPU's `o`, `m`, `l`: raw f32, one after another, for `compare.py`.
fn write_case(gpu: &Gpu, file: &Path) -> Done<()> {
    let (query_rows, rows) = (4 * 128, 2048);
    let query_values = values(7, query_rows * D_QK);
    let slots = slots_of(8, rows, RowDtype::Bf16);
    let on_device = DeviceRows::of(&gpu.stream, &slots)?;
    let mut attention = gpu.attention(RowDtype::Bf16, D_QK, D_V)?;
    let query = Slots::queries(&query_values, D_QK, RowDtype::Bf16);
    let query = DeviceQuery::new(&gpu.stream, &on_device, &query, None, D_V, SCALE)?;
    // SAFETY: as in `check_vectors`.
    unsafe { attention.attend(&[query.job])? };
    let out = query.read(&gpu.stream, D_V)?;
    let all = [query_values, values(8, rows * D_QK), out.o, out.m, out.l].concat();
    std::fs::write(file, all.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())?;
    println!("\nwrote {query_rows} query rows over {rows} rows to {}", file.display());
    Ok(())
}

/// What is measured: requesters with `heads` query rows each.
#[derive(Clone, Copy)]
struct Cell {
    dtype: RowDtype,
    heads: usize,
    requesters: usize,
    /// Rows of the store.
    rows: usize,
    /// Each requester's own selection; else all attend all rows, as one job.
    selected: Option<usize>,
}

/// One set of memory: jobs that a launch takes, and the kernel with its parts.
struct Set {
    attention: CudaAttention,
    jobs: Vec<CudaJob>,
    _rows: DeviceRows,
    queries: Vec<DeviceQuery>,
}

/// Rows, queries and selections of a cell, before they are on a device.
struct Host {
    rows: Slots,
    queries: Vec<(Slots, Option<Vec<u32>>)>,
}

impl Host {
    fn new(cell: Cell) -> Host {
        let (jobs, query_rows) = match cell.selected {
            None => (1, cell.heads * cell.requesters),
            Some(_) => (cell.requesters, cell.heads),
        };
        let query_dtype = if cell.dtype == RowDtype::F16 { RowDtype::F16 } else { RowDtype::Bf16 };
        let query = |job: usize| {
            let query = values(job as u64 + 1, query_rows * D_QK);
            let selected = cell.selected.map(|k| {
                // Odd steps name no row twice in stores of a power of two.
                let step = (cell.rows as u32 / 3 + job as u32 * 10) | 1;
                (0..k as u32).map(|i| i.wrapping_mul(step) % cell.rows as u32).collect()
            });
            (Slots::queries(&query, D_QK, query_dtype), selected)
        };
        let rows = slots_of(99, cell.rows, cell.dtype);
        Host { rows, queries: (0..jobs).map(query).collect() }
    }
}

impl Set {
    fn new(gpu: &Gpu, dtype: RowDtype, host: &Host) -> Result<Set, CudaError> {
        let attention = gpu.attention(dtype, D_QK, D_V)?;
        let rows = DeviceRows::of(&gpu.stream, &host.rows)?;
        let queries: Result<Vec<DeviceQuery>, CudaError> = host
            .queries
            .iter()
            .map(|(query, selected)| {
                DeviceQuery::new(&gpu.stream, &rows, query, selected.as_deref(), D_V, SCALE)
            })
            .collect();
        let queries = queries?;
        let jobs = queries.iter().map(|query| query.job).collect();
        Ok(Set { attention, jobs, _rows: rows, queries })
    }
}

/// The median time of one launch in a recorded row of launches, in microseconds.
fn graph_us(gpu: &Gpu, sets: &[&Set]) -> Result<f64, CudaError> {
    let graph = Graph::record(&gpu.stream, || {
        sets.iter().try_for_each(|set| {
            // SAFETY: the sets live until the stream is waited for, and only it uses them.
            unsafe { set.attention.launch() }
        })
    })?;
    let device = gpu.stream.device();
    let mut times = Vec::new();
    for repeat in 0..REPEATS + 3 {
        let (begin, end) = (Event::new(device)?, Event::new(device)?);
        begin.record(&gpu.stream)?;
        // SAFETY: as above.
        unsafe { graph.launch(&gpu.stream)? };
        end.record(&gpu.stream)?;
        let ms = end.ms_after(&begin)?;
        if repeat >= 3 {
            times.push(f64::from(ms) * 1e3 / sets.len() as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// The median time from a call on the host until its result is there, in microseconds.
fn host_us(gpu: &Gpu, set: &mut Set) -> Result<f64, CudaError> {
    let mut times = Vec::new();
    for _ in 0..REPEATS * 4 {
        let begin = Instant::now();
        // SAFETY: as in `graph_us`.
        unsafe { set.attention.attend(&set.jobs)? };
        gpu.stream.wait()?;
        times.push(begin.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Requesters that attend all of 2,048 rows.
fn dense(dtype: RowDtype, heads: usize, requesters: usize) -> Cell {
    Cell { dtype, heads, requesters, rows: 2048, selected: None }
}

fn profile(gpu: &Gpu) -> Done<()> {
    for (heads, requesters) in [(16, 1), (128, 1), (16, 16), (128, 16), (128, 256)] {
        let cell = dense(RowDtype::Bf16, heads, requesters);
        let mut set = Set::new(gpu, cell.dtype, &Host::new(cell))?;
        for _ in 0..3 {
            // SAFETY: as in `graph_us`.
            unsafe { set.attention.attend(&set.jobs)? };
            gpu.stream.wait()?;
        }
    }
    Ok(())
}

fn measure(gpu: &Gpu) -> Done<()> {
    let mut cells = Vec::new();
    for heads in [16, 128] {
        for requesters in [1, 2, 4, 8, 16, 32, 64, 256] {
            cells.push(dense(RowDtype::Bf16, heads, requesters));
        }
    }
    for (heads, requesters) in [(16, 16), (128, 1), (128, 16)] {
        cells.push(dense(RowDtype::Fp8Latent, heads, requesters));
        cells.push(dense(RowDtype::F16, heads, requesters));
    }
    for k in [512, 2048] {
        for requesters in [1, 16] {
            for rows in [2048, 4096, 8192, 16384, 32768] {
                let dtype = RowDtype::Bf16;
                cells.push(Cell { dtype, heads: 128, requesters, rows, selected: Some(k) });
            }
        }
    }
    println!(
        "\nMicroseconds, medians. Cold: rows from memory. Tiles: of rows for each CTA, tried by hand.\n"
    );
    println!(
        "| rows of | heads | requesters | rows | selected | cold | warm | from the host | TFLOP/s, warm | best tiles, warm |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    cells.into_iter().try_for_each(|cell| measure_cell(gpu, cell))
}

fn measure_cell(gpu: &Gpu, cell: Cell) -> Done<()> {
    // Large stores and many requesters flush the cache with fewer sets, which take long to make.
    let query_rows = cell.heads * cell.requesters;
    let count = (SETS * 2048 / cell.rows.max(query_rows)).clamp(4, SETS);
    let host = Host::new(cell);
    let mut sets =
        (0..count).map(|_| Set::new(gpu, cell.dtype, &host)).collect::<Result<Vec<_>, _>>()?;
    for set in &mut sets {
        set.attention.prepare(&set.jobs)?;
    }
    let cold = graph_us(gpu, &sets.iter().collect::<Vec<_>>())?;
    let warm = graph_us(gpu, &[&sets[0]; 20])?;
    let called = host_us(gpu, &mut sets[0])?;
    let mut best = (0, f64::INFINITY);
    for tiles in [1, 2, 3, 4, 6, 8, 12, 16, 32] {
        let set = &mut sets[0];
        set.attention.prepare_tiles(&set.jobs, tiles)?;
        let us = graph_us(gpu, &[&*set; 20])?;
        if us < best.1 {
            best = (tiles, us);
        }
    }
    let attended = cell.selected.unwrap_or(cell.rows);
    let operations = 2.0 * (query_rows * attended * (D_QK + D_V)) as f64;
    println!(
        "| {:?} | {} | {} | {} | {} | {cold:.1} | {warm:.1} | {called:.1} | {:.0} | {}: {:.1} |",
        cell.dtype,
        cell.heads,
        cell.requesters,
        cell.rows,
        cell.selected.map_or_else(|| "all".into(), |k| k.to_string()),
        operations / warm / 1e6,
        best.0,
        best.1,
    );
    // Nothing that was measured may be wrong in a way that shows at once.
    let out = sets[0].queries[0].read(&gpu.stream, D_V)?;
    assert!(out.o.iter().all(|value| value.is_finite()), "an output that is no number");
    Ok(())
}
