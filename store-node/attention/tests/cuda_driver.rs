//! What launches the CUDA kernels, through a driver whose GPU is the processor: `cuda/driver.cpp`.

#[path = "support/compiler.rs"]
mod compiler;
#[path = "support/device.rs"]
mod device;
#[path = "support/slots.rs"]
mod slots;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use device::{DeviceQuery, DeviceRows};
use kvasir_attention::cuda::variant::{Arch, Variant};
use kvasir_attention::cuda::{CudaAttention, CudaError, CudaJob};
use kvasir_attention::vectors::Case;
use kvasir_attention::{Partial, RowDtype};
use kvasir_cuda::{Device, Driver, DriverError, Event, Graph, Stream};
use slots::Slots;

/// The driver, which also counts what nobody has destroyed.
struct Emulated {
    driver: Driver,
    library: libloading::Library,
    variant: Variant,
}

impl Emulated {
    fn build(dtype: RowDtype, d_qk: usize, d_v: usize) -> Option<Emulated> {
        let variant = Variant::new(dtype, d_qk, d_v, Arch::Sm90).expect("a kernel");
        let file = compiler::build("driver.cpp", &variant)?;
        let driver = Driver::open_file(&file).expect("what was compiled");
        // SAFETY: it is open already, and has no constructors.
        let library = unsafe { libloading::Library::new(&file) }.expect("what was compiled");
        std::fs::remove_file(&file).expect("it is open, and is not needed by name");
        Some(Emulated { driver, library, variant })
    }

    fn live(&self) -> i64 {
        // SAFETY: a function of `driver.cpp` of this type.
        unsafe {
            let live = self.library.get::<unsafe extern "C" fn() -> i64>("live_handles");
            live.expect("a function")()
        }
    }

    fn attention(&self) -> (Arc<Stream>, CudaAttention) {
        let device = Device::open(self.driver, 0).expect("a GPU");
        let stream = Arc::new(Stream::new(&device).expect("a stream"));
        let loaded = CudaAttention::from_cubin(self.variant, b"code\0", stream.clone());
        (stream, loaded.expect("a kernel"))
    }
}

fn case(name: &str) -> Case {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let path: PathBuf = data.join(name).with_extension("safetensors");
    Case::parse(&std::fs::read(path).expect("test data")).expect("a case")
}

#[test]
fn jobs_are_uploaded_launched_and_merged_and_everything_is_given_back() {
    for name in ["mla_partial/narrow_model", "mla_partial_types/f16_selected"] {
        let case = case(name);
        let (d_qk, d_v, dtype) = (case.d_qk(), case.d_v(), case.dtype());
        let Some(emulated) = Emulated::build(dtype, d_qk, d_v) else { return };
        {
            let (stream, mut attention) = emulated.attention();
            assert_eq!(stream.device().name(), "a processor");
            let slots = Slots::new(case.rows(), dtype.row_bytes(d_qk), 16);
            let rows = DeviceRows::of(&stream, &slots).expect("memory");
            let verdict = case.check_by(CudaAttention::PRECISION, |values, selected| {
                let query = Slots::queries(values, d_qk, attention.variant().query_dtype());
                let query = DeviceQuery::new(&stream, &rows, &query, selected, d_v, case.scale())?;
                // SAFETY: all of the job lives until its result is read.
                unsafe { attention.attend(&[query.job])? };
                query.read(&stream, d_v)
            });
            let verdict: Result<_, CudaError> = verdict;
            let verdict = verdict.expect("launches");
            assert!(verdict.passed, "{name}: {verdict:?}");
            assert!(emulated.live() > 0);
        }
        assert_eq!(emulated.live(), 0, "what is dropped is destroyed");
    }
}

/// A query of two rows over 300, and its memory.
fn small(stream: &Stream, rows: &DeviceRows, seed: f32) -> DeviceQuery {
    let values: Vec<f32> = (0..2 * 80).map(|i| ((i as f32 + seed) * 0.37).sin()).collect();
    let query = Slots::queries(&values, 80, RowDtype::Bf16);
    DeviceQuery::new(stream, rows, &query, None, 64, 0.3).expect("memory")
}

fn small_rows(stream: &Stream) -> DeviceRows {
    let values: Vec<f32> = (0..300 * 80).map(|i| (i as f32 * 0.11).cos()).collect();
    DeviceRows::of(stream, &Slots::queries(&values, 80, RowDtype::Bf16)).expect("memory")
}

#[test]
fn what_was_prepared_is_recorded_and_replayed() {
    let Some(emulated) = Emulated::build(RowDtype::Bf16, 80, 64) else { return };
    let (stream, mut attention) = emulated.attention();
    let rows = small_rows(&stream);
    let queries = [small(&stream, &rows, 0.0), small(&stream, &rows, 9.0)];
    let jobs: Vec<CudaJob> = queries.iter().map(|query| query.job).collect();
    // SAFETY: here and below, the jobs' memory lives to the end.
    unsafe { attention.attend(&jobs) }.expect("a launch");
    let read = |query: &DeviceQuery| query.read(&stream, 64).expect("a result");
    let want: Vec<Partial> = queries.iter().map(read).collect();
    assert_ne!(want[0], want[1]);

    for tiles in [1, 2, 5] {
        let queries = [small(&stream, &rows, 0.0), small(&stream, &rows, 9.0)];
        let jobs: Vec<CudaJob> = queries.iter().map(|query| query.job).collect();
        attention.prepare_tiles(&jobs, tiles).expect("a plan");
        // SAFETY: what is recorded is launched while these queries live.
        let graph = Graph::record(&stream, || unsafe { attention.launch() }).expect("a graph");
        assert!(read(&queries[0]).o[0].is_nan(), "nothing has run");
        let (begin, end) = (Event::new(stream.device()), Event::new(stream.device()));
        let (begin, end) = (begin.expect("an event"), end.expect("an event"));
        begin.record(&stream).expect("a moment");
        // SAFETY: as above.
        unsafe { graph.launch(&stream) }.expect("a launch");
        end.record(&stream).expect("a moment");
        assert!(end.ms_after(&begin).expect("a time") > 0.0);
        for (query, want) in queries.iter().zip(&want) {
            let got = read(query);
            let off = |(a, b): (&f32, &f32)| (a - b).abs();
            let off = got.o.iter().zip(&want.o).map(off).fold(0.0, f32::max);
            assert!(off < 1e-2, "{tiles} tiles: {off}");
        }
    }
    // Nothing but launches can be recorded, and the stream is free again after a failure.
    let refused = Graph::record(&stream, || attention.prepare(&jobs)).expect_err("copies");
    let CudaError::Driver(DriverError::Failed { call, .. }) = refused else { panic!("{refused}") };
    assert_eq!(call, "cuMemcpyHtoDAsync");
    // SAFETY: as above.
    unsafe { attention.attend(&jobs) }.expect("a launch");
}

#[test]
fn what_a_device_lacks_or_refuses_is_an_error_that_says_so() {
    let Some(emulated) = Emulated::build(RowDtype::Bf16, 80, 64) else { return };
    let none = Device::open(emulated.driver, 1).expect_err("one GPU");
    assert!(matches!(none, DriverError::NoSuchDevice { index: 1, count: 1 }));
    let (stream, mut attention) = emulated.attention();
    let rows = small_rows(&stream);
    let query = small(&stream, &rows, 0.0);
    // SAFETY: it is refused on the host.
    let wrong = unsafe { attention.attend(&[query.job, CudaJob { scale: -1.0, ..query.job }]) };
    assert!(matches!(wrong, Err(CudaError::Job { job: 1, .. })), "{wrong:?}");
    // A refused preparation leaves nothing to launch.
    // SAFETY: as above.
    unsafe { attention.launch() }.expect("nothing");
    let o = query.read(&stream, 64).expect("a result").o;
    assert!(o.iter().all(|value| value.is_nan()), "nothing has run");
    // What fails on the device is told with the driver's words.
    // SAFETY: the emulation reaches no memory that is not allocated.
    let failed = unsafe { attention.attend(&[CudaJob { o: 4096, ..query.job }]) };
    let said = failed.expect_err("no memory").to_string();
    assert!(said.contains("memory that nobody gave"), "{said}");
    let missing = Driver::open_file(Path::new("/nonexistent/libcuda.so.1")).expect_err("no file");
    assert!(missing.to_string().contains("install NVIDIA's driver"), "{missing}");
}
