//! Partials of many jobs on one GPU, in order on one stream.

use std::sync::Arc;

use kvasir_cuda::{Device, Kernel, Memory, Module, Stream};

use super::CudaError;
use super::compile::Nvrtc;
use super::job::{CudaJob, DeviceJob};
use super::plan::{Machine, Plan};
use super::variant::{Arch, MERGE_THREADS, Variant};
use crate::attend::Precision;
use crate::pages::RowDtype;

/// Jobs are the second dimension of a grid.
const JOBS_MAX: usize = 65_535;

/// One kernel with the device memory that it reuses, for one stream.
#[derive(Debug)]
pub struct CudaAttention {
    variant: Variant,
    partial: Kernel,
    /// By how many parts one has on their way at a time.
    merges: [(u32, Kernel); 3],
    stream: Arc<Stream>,
    machine: Machine,
    jobs: Growing,
    works: Growing,
    part_o: Growing,
    part_m: Growing,
    part_l: Growing,
    prepared: Option<Prepared>,
}

/// What the next launch does, as far as it is not in device memory.
#[derive(Debug, Clone, Copy)]
struct Prepared {
    works: u32,
    jobs: u32,
    query_rows_max: u32,
    splits_max: u32,
}

impl CudaAttention {
    /// Products are rounded to bf16 or f16.
    pub const PRECISION: Precision = Precision::Bf16;

    /// Whether there is a kernel for rows of this type. There is none for f32: tensor cores would
    /// round it.
    pub fn takes(dtype: RowDtype) -> bool {
        dtype != RowDtype::F32
    }

    /// Compiles the kernel for the stream's GPU and loads it.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn new(
        variant: Variant,
        nvrtc: &Nvrtc,
        stream: Arc<Stream>,
    ) -> Result<CudaAttention, CudaError> {
        let compiled = nvrtc.compile(&variant, Arch::of_device(stream.device())?)?;
        CudaAttention::from_cubin(variant, &compiled.cubin, stream)
    }

    /// Loads a kernel that was compiled elsewhere, by [`Nvrtc::compile`] of the same variant.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn from_cubin(
        variant: Variant,
        cubin: &[u8],
        stream: Arc<Stream>,
    ) -> Result<CudaAttention, CudaError> {
        let device: &Arc<Device> = stream.device();
        let module = Arc::new(Module::load(device, cubin)?);
        let partial =
            module.kernel(c"kvasir_partial", variant.threads(), variant.shared_bytes())?;
        let merge = |name| module.kernel(name, MERGE_THREADS, 0);
        let merges = [
            (4, merge(c"kvasir_merge_4")?),
            (8, merge(c"kvasir_merge_8")?),
            (16, merge(c"kvasir_merge_16")?),
        ];
        let machine = Machine {
            tile_rows: variant.tile_rows() as u32,
            multiprocessors: device.multiprocessors(),
        };
        Ok(CudaAttention {
            variant,
            partial,
            merges,
            stream,
            machine,
            jobs: Growing::default(),
            works: Growing::default(),
            part_o: Growing::default(),
            part_m: Growing::default(),
            part_l: Growing::default(),
            prepared: None,
        })
    }

    pub fn variant(&self) -> &Variant {
        &self.variant
    }

    /// The partials of all jobs, each into its own memory, when the stream has come so far.
    ///
    /// # Errors
    /// [`CudaError`]; then nothing was launched, or the stream has failed.
    ///
    /// # Safety
    /// As [`CudaAttention::launch`].
    pub unsafe fn attend(&mut self, jobs: &[CudaJob]) -> Result<(), CudaError> {
        self.prepare(jobs)?;
        // SAFETY: the caller's promise.
        unsafe { self.launch() }
    }

    /// Plans the jobs and sends what the kernels read of them, in the stream's order.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn prepare(&mut self, jobs: &[CudaJob]) -> Result<(), CudaError> {
        let shapes: Vec<_> = jobs.iter().map(CudaJob::shape).collect();
        self.prepare_with(jobs, &Plan::new(&shapes, self.machine))
    }

    /// As [`CudaAttention::prepare`], with at most so many tiles of rows for each CTA: for measuring.
    ///
    /// # Errors
    /// [`CudaError`].
    pub fn prepare_tiles(&mut self, jobs: &[CudaJob], tiles: u32) -> Result<(), CudaError> {
        let shapes: Vec<_> = jobs.iter().map(CudaJob::shape).collect();
        self.prepare_with(jobs, &Plan::with_tiles(&shapes, self.machine, tiles))
    }

    fn prepare_with(&mut self, jobs: &[CudaJob], plan: &Plan) -> Result<(), CudaError> {
        self.prepared = None;
        if jobs.len() > JOBS_MAX {
            return Err(CudaError::Job { job: JOBS_MAX, what: "one launch must have fewer jobs" });
        }
        for (index, job) in jobs.iter().enumerate() {
            job.check(&self.variant, index)?;
        }
        let for_device: Vec<DeviceJob> =
            jobs.iter().zip(&plan.jobs).map(|(job, parts)| job.for_device(*parts)).collect();
        let stream = &self.stream;
        self.jobs.hold(size_of_val(for_device.as_slice()), stream)?.write(&for_device, stream)?;
        self.works.hold(size_of_val(plan.works.as_slice()), stream)?.write(&plan.works, stream)?;
        let rows = plan.part_rows as usize;
        self.part_o.hold(rows * self.variant.d_v() * size_of::<f32>(), stream)?;
        self.part_m.hold(rows * size_of::<f32>(), stream)?;
        self.part_l.hold(rows * size_of::<f32>(), stream)?;
        self.prepared = Some(Prepared {
            works: plan.works.len() as u32,
            jobs: jobs.len() as u32,
            query_rows_max: plan.query_rows_max,
            splits_max: plan.splits_max(),
        });
        Ok(())
    }

    /// Launches what was prepared last, again and again if need be. Only launches: it may be recorded
    /// into a [`Graph`](kvasir_cuda::Graph), which is good until the next preparation.
    ///
    /// # Errors
    /// [`CudaError`].
    ///
    /// # Safety
    /// Until the stream has done it, all that the prepared jobs name is memory of this device and of
    /// the sizes that [`CudaJob`] says, the pages' addresses are those of rows, nobody writes what is
    /// read, and nobody else reads or writes what is written.
    pub unsafe fn launch(&self) -> Result<(), CudaError> {
        let Some(prepared) = self.prepared else { return Ok(()) };
        if prepared.works == 0 {
            return Ok(());
        }
        let (jobs, works) = (self.jobs.address(), self.works.address());
        let (o, m, l) = (self.part_o.address(), self.part_m.address(), self.part_l.address());
        let grid = (prepared.works, 1);
        // SAFETY: five arguments as `kvasir_partial` has them; the memory of jobs, works and parts is
        // this value's and as large as the plan asks, the rest is the caller's promise.
        unsafe { self.partial.launch(grid, &mut [jobs, works, o, m, l], &self.stream)? };
        if prepared.splits_max > 1 {
            let fits = |of: &&(u32, Kernel)| prepared.splits_max <= of.0;
            let [.., many] = &self.merges;
            let (_, merge) = self.merges.iter().find(fits).unwrap_or(many);
            let grid = (prepared.query_rows_max, prepared.jobs);
            let arguments = &mut [jobs, o, m, l];
            // SAFETY: as above, with four arguments; where launches may overlap, the merge waits.
            unsafe {
                if self.variant.overlaps() {
                    merge.launch_overlapping(grid, arguments, &self.stream)?;
                } else {
                    merge.launch(grid, arguments, &self.stream)?;
                }
            }
        }
        Ok(())
    }
}

/// Memory that grows, and is never given back before its owner goes.
#[derive(Debug, Default)]
struct Growing(Option<Memory>);

impl Growing {
    fn address(&self) -> u64 {
        self.0.as_ref().map_or(0, Memory::address)
    }

    /// Memory of at least so many bytes; what it held is lost when it grows.
    fn hold(&mut self, len_bytes: usize, stream: &Stream) -> Result<&Memory, CudaError> {
        let fits = self.0.as_ref().is_some_and(|memory| memory.len_bytes() >= len_bytes);
        if !fits {
            if self.0.is_some() {
                // A launch may still use what goes.
                stream.wait()?;
            }
            self.0 = None;
        }
        match &mut self.0 {
            Some(memory) => Ok(memory),
            none => Ok(none.insert(Memory::new(stream.device(), len_bytes.next_power_of_two())?)),
        }
    }
}
