//! The CUDA kernels' own source, run on the processor: which CTA, warp and lane has what, against the
//! reference vectors and the scalar kernel. See `cuda/emulation.cpp`.

#[path = "support/compiler.rs"]
mod compiler;
#[path = "support/slots.rs"]
mod slots;

use std::convert::Infallible;
use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use kvasir_attention::cuda::plan::{Machine, Plan, Work};
use kvasir_attention::cuda::variant::{Arch, Variant};
use kvasir_attention::cuda::{CudaJob, DeviceJob};
use kvasir_attention::vectors::{Case, Errors};
use kvasir_attention::{
    Attention, AttentionOptions, Kernel, PageList, PageSpec, Partial, Precision, Query, RowDtype,
    Visible,
};
use slots::{Slots, stored};

type Emulate = unsafe extern "C" fn(
    *const DeviceJob,
    u32,
    *const Work,
    u32,
    u32,
    u64,
    u64,
    u64,
    u64,
    u32,
) -> *const c_char;

/// A kernel as the processor's code.
struct Emulated {
    variant: Variant,
    arch: Arch,
    library: libloading::Library,
}

/// One query: its rows, what it selects and what it sees.
#[derive(Clone, Copy)]
struct Ask<'a> {
    query: &'a [f32],
    selected: Option<&'a [u32]>,
    visible: Option<&'a [u32]>,
    scale: f32,
    /// Tiles of rows for each CTA; the planner's choice without it.
    tiles: Option<u32>,
}

impl Emulated {
    /// Nothing, and a sentence, where there is no C++ compiler.
    fn build(dtype: RowDtype, d_qk: usize, d_v: usize, arch: Arch) -> Option<Emulated> {
        let variant = Variant::new(dtype, d_qk, d_v, arch).expect("a kernel");
        let file = compiler::build("emulation.cpp", &variant)?;
        // SAFETY: what was just compiled has no constructors that do anything to this process.
        let library = unsafe { libloading::Library::new(&file) }.expect("what was compiled");
        std::fs::remove_file(&file).expect("it is open, and is not needed by name");
        Some(Emulated { variant, arch, library })
    }

    /// Answers all asks in one launch, with copies that land late and early.
    fn attend(&self, asks: &[Ask<'_>], rows: &Slots) -> Vec<Partial> {
        let late = self.attend_once(asks, rows, 1, false).expect("a launch");
        let early = self.attend_once(asks, rows, 2, true).expect("a launch");
        // Nothing of what a GPU may order as it likes shows.
        assert_eq!(late, early);
        late
    }

    fn attend_once(
        &self,
        asks: &[Ask<'_>],
        rows: &Slots,
        seed: u64,
        copies_land_early: bool,
    ) -> Result<Vec<Partial>, String> {
        let (d_qk, d_v) = (self.variant.d_qk(), self.variant.d_v());
        // SAFETY: the functions of these names in `emulation.cpp`, of these types.
        let (name_memory, forget, emulate) = unsafe {
            let get = |name: &str| -> libloading::Symbol<'_, unsafe extern "C" fn(u64, u64)> {
                self.library.get(name).expect("a function")
            };
            let emulate = self.library.get::<Emulate>("emulate").expect("a function");
            (get("emulate_memory"), get("emulate_forget"), emulate)
        };
        let pages = rows.pages(address_of(rows.memory()));
        let queries: Vec<Slots> = asks
            .iter()
            .map(|ask| Slots::queries(ask.query, d_qk, self.variant.query_dtype()))
            .collect();
        let mut out: Vec<Partial> = queries
            .iter()
            .map(|query| {
                let rows = query.rows as usize;
                // What was there before must not matter.
                Partial { o: vec![f32::NAN; rows * d_v], m: vec![7.0; rows], l: vec![7.0; rows] }
            })
            .collect();
        let mut memories = vec![bytes_of(rows.memory()), bytes_of(&pages)];
        let mut jobs = Vec::new();
        for ((ask, query), out) in asks.iter().zip(&queries).zip(&mut out) {
            let (selected, visible) = (ask.selected.unwrap_or(&[]), ask.visible.unwrap_or(&[]));
            memories.extend([bytes_of(query.memory()), bytes_of(selected), bytes_of(visible)]);
            memories.extend([bytes_of(&out.o), bytes_of(&out.m), bytes_of(&out.l)]);
            let address = |values: &[u32]| Some(address_of(values));
            let job = CudaJob {
                query: query.pages(address_of(query.memory())).first().copied().unwrap_or(0),
                query_rows: query.rows,
                query_stride_bytes: query.row_stride_bytes,
                pages: address_of(&pages),
                page_rows: rows.rows,
                rows_per_page: rows.rows_per_page,
                row_stride_bytes: rows.row_stride_bytes,
                selected: ask.selected.and_then(address),
                selected_rows: selected.len() as u32,
                visible: ask.visible.and_then(address),
                scale: ask.scale,
                o: address_of_mut(&mut out.o),
                m: address_of_mut(&mut out.m),
                l: address_of_mut(&mut out.l),
            };
            job.check(&self.variant, jobs.len()).map_err(|error| error.to_string())?;
            jobs.push(job);
        }
        let shapes: Vec<_> = jobs.iter().map(CudaJob::shape).collect();
        let tile_rows = self.arch.tile_rows() as u32;
        let machine = Machine { tile_rows, multiprocessors: 132 };
        let plan = match asks.first().and_then(|ask| ask.tiles) {
            Some(tiles) => Plan::with_tiles(&shapes, machine, tiles),
            None => Plan::new(&shapes, machine),
        };
        let for_device: Vec<DeviceJob> =
            jobs.iter().zip(&plan.jobs).map(|(job, parts)| job.for_device(*parts)).collect();
        let part_rows = plan.part_rows as usize;
        let mut part_o = vec![f32::NAN; part_rows * d_v];
        let (mut part_m, mut part_l) = (vec![f32::NAN; part_rows], vec![f32::NAN; part_rows]);
        memories.extend([bytes_of(&part_o), bytes_of(&part_m), bytes_of(&part_l)]);
        // SAFETY: jobs and works are as the source has them; all that they name lives through the
        // call, and the emulation checks that nothing else is reached.
        let said = unsafe {
            forget(0, 0);
            memories.iter().for_each(|&(from, bytes)| name_memory(from, bytes));
            let said = emulate(
                for_device.as_ptr(),
                for_device.len() as u32,
                plan.works.as_ptr(),
                plan.works.len() as u32,
                plan.query_rows_max,
                address_of_mut(&mut part_o),
                address_of_mut(&mut part_m),
                address_of_mut(&mut part_l),
                seed,
                u32::from(copies_land_early),
            );
            (!said.is_null()).then(|| CStr::from_ptr(said).to_string_lossy().into_owned())
        };
        match said {
            Some(said) => Err(said),
            None => Ok(out),
        }
    }
}

fn bytes_of<T>(memory: &[T]) -> (u64, u64) {
    (address_of(memory), size_of_val(memory) as u64)
}

/// For another language, which makes a pointer of it again.
fn address_of<T>(memory: &[T]) -> u64 {
    memory.as_ptr().expose_provenance() as u64
}

fn address_of_mut<T>(memory: &mut [T]) -> u64 {
    memory.as_mut_ptr().expose_provenance() as u64
}

/// What the scalar kernel makes of it, from the values as they are stored.
fn reference(ask: &Ask<'_>, rows: &Slots, variant: &Variant) -> Partial {
    let base = NonNull::from(rows.memory()).cast::<u8>();
    let offsets: Vec<usize> = rows.pages(0).into_iter().map(|offset| offset as usize).collect();
    let spec = PageSpec {
        base,
        len_bytes: size_of_val(rows.memory()),
        offsets_bytes: &offsets,
        rows_per_page: rows.rows_per_page as usize,
        row_stride_bytes: rows.row_stride_bytes as usize,
        rows: rows.rows as usize,
        width: variant.d_qk(),
        dtype: variant.dtype(),
    };
    // SAFETY: the memory is borrowed for as long as the list is used.
    let pages = unsafe { PageList::new(spec) }.expect("pages");
    let pages = ask.selected.map_or(pages, |rows| pages.select(rows).expect("rows"));
    let counts: Vec<usize> =
        ask.visible.unwrap_or(&[]).iter().map(|count| *count as usize).collect();
    let visible = ask.visible.map_or(Visible::All, |_| Visible::First(&counts));
    let (d_qk, d_v, scale) = (variant.d_qk(), variant.d_v(), ask.scale);
    let query = Query { values: ask.query, d_qk, d_v, scale, visible };
    let mut out = Partial::empty(query.rows(), d_v);
    let options = AttentionOptions { kernel: Kernel::Scalar, ..Default::default() };
    Attention::new(options).attend(&query, &pages, out.as_mut());
    out
}

fn check(emulated: &Emulated, asks: &[Ask<'_>], rows: &Slots, what: &str) {
    for (ask, got) in asks.iter().zip(emulated.attend(asks, rows)) {
        let errors = Errors::between(&got, &reference(ask, rows, &emulated.variant));
        assert!(errors.are_within(Precision::Bf16), "{what}: {errors:?}");
    }
}

fn files() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    let folders = ["mla_partial", "mla_partial_types"].map(|folder| data.join(folder));
    let mut files: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).expect("test data"))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    files.sort();
    files
}

/// Values in -1..1 from a seed, as bf16 holds them.
fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        half::bf16::from_f32((state >> 40) as f32 / (1 << 23) as f32 - 1.0).to_f32()
    };
    (0..count).map(|_| next()).collect()
}

fn rows_of(seed: u64, rows: usize, variant: &Variant, rows_per_page: usize) -> Slots {
    let (d_qk, dtype) = (variant.d_qk(), variant.dtype());
    let values = values(seed, rows * d_qk);
    let rows: Vec<Vec<u8>> = values.chunks_exact(d_qk).map(|row| stored(row, dtype)).collect();
    Slots::new(rows.iter().map(Vec::as_slice), dtype.row_bytes(d_qk), rows_per_page)
}

#[test]
fn every_vector_agrees_whole_split_selected_and_merged() {
    let mut built: Vec<Emulated> = Vec::new();
    let files = files();
    assert_eq!(files.len(), 13, "cases");
    for (at, path) in files.into_iter().enumerate() {
        let case = Case::parse(&std::fs::read(&path).expect("test data")).expect("a case");
        // Each generation has half of the cases, and they take turns at the sizes of pages.
        let arch = Arch::ALL[at % 2];
        let of = |emulated: &Emulated| {
            let variant = &emulated.variant;
            emulated.arch == arch
                && (variant.dtype(), variant.d_qk()) == (case.dtype(), case.d_qk())
        };
        if !built.iter().any(of) {
            match Emulated::build(case.dtype(), case.d_qk(), case.d_v(), arch) {
                Some(emulated) => built.push(emulated),
                None => return,
            }
        }
        let emulated = built.iter().find(|emulated| of(emulated)).expect("built above");
        let row_bytes = case.dtype().row_bytes(case.d_qk());
        let rows = Slots::new(case.rows(), row_bytes, [64, 16, 1][at % 3]);
        let verdict = case.check_by(Precision::Bf16, |query, selected| {
            let scale = case.scale();
            let tiles = Some(1 + at as u32 % 2);
            let ask = Ask { query, selected, visible: None, scale, tiles };
            Ok::<_, Infallible>(emulated.attend(&[ask], &rows).remove(0))
        });
        let Ok(verdict) = verdict;
        assert!(verdict.passed, "{}: {verdict:?}", path.display());
    }
}

#[test]
fn rows_end_are_limited_and_are_left_out_where_they_should_be() {
    let many = [(1, 1), (64, 64), (65, 63), (33, 200), (130, 129), (3, 0)];
    for (dtype, d_qk, d_v, arch, sizes) in [
        (RowDtype::Bf16, 80, 64, Arch::Sm90, &many[..]),
        (RowDtype::F16, 80, 64, Arch::Sm80, &many),
        // By warpgroups.
        (RowDtype::Bf16, 576, 512, Arch::Sm90, &[(65, 130), (3, 0)]),
        (RowDtype::F16, 530, 512, Arch::Sm90, &[(17, 65)]),
    ] {
        let Some(emulated) = Emulated::build(dtype, d_qk, d_v, arch) else { return };
        assert_eq!(emulated.variant.by_warpgroups(), d_v == 512);
        for &(query_rows, rows) in sizes {
            for tiles in [None, Some(1), Some(3)] {
                let query = values(query_rows as u64, query_rows * d_qk);
                let slots = rows_of(rows as u64 + 99, rows, &emulated.variant, 48);
                let scale = 3.5 / d_qk as f32;
                let all = Ask { query: &query, selected: None, visible: None, scale, tiles };
                let visible: Vec<u32> =
                    (0..query_rows as u32).map(|row| row * 37 % (rows as u32 + 2)).collect();
                let some: Vec<u32> =
                    (0..rows as u32 / 2).map(|row| row * 7 % rows as u32).collect();
                let asks = [
                    all,
                    Ask { visible: Some(&visible), ..all },
                    Ask { selected: Some(&some), visible: Some(&visible), ..all },
                ];
                let what = format!("{dtype:?}, {query_rows} over {rows}, {tiles:?}");
                check(&emulated, &asks, &slots, &what);
            }
        }
    }
}

/// Tiles take each other's place many times, where copies are slow and where products are.
#[test]
fn many_tiles_go_through_the_room_of_two() {
    let Some(emulated) = Emulated::build(RowDtype::Bf16, 576, 512, Arch::Sm90) else { return };
    // The second query tile begins with another tile of rows.
    let query = values(3, 70 * 576);
    let slots = rows_of(4, 400, &emulated.variant, 64);
    let tiles = Some(8);
    let ask = Ask { query: &query, selected: None, visible: None, scale: 0.01, tiles };
    check(&emulated, &[ask], &slots, "seven tiles");
}

/// Each merge has the parts of so many splits on their way at a time, and lanes know of 32.
#[test]
fn any_number_of_parts_is_merged() {
    let Some(emulated) = Emulated::build(RowDtype::Bf16, 80, 64, Arch::Sm90) else { return };
    let query = values(5, 2 * 80);
    for splits in [2, 4, 5, 8, 9, 16, 17, 32, 33, 70] {
        let slots = rows_of(6, splits * 64, &emulated.variant, 64);
        let tiles = Some(1);
        let ask = Ask { query: &query, selected: None, visible: None, scale: 0.4, tiles };
        check(&emulated, &[ask], &slots, &format!("{splits} splits"));
    }
}

#[test]
fn a_selected_row_that_no_page_has_is_not_attended() {
    let Some(emulated) = Emulated::build(RowDtype::Bf16, 80, 64, Arch::Sm90) else { return };
    let query = values(5, 20 * 80);
    let slots = rows_of(6, 100, &emulated.variant, 32);
    let rows: Vec<u32> = (0..90).map(|row| row * 3 % 100).collect();
    let with_none: Vec<u32> =
        rows.iter().flat_map(|&row| [row, if row % 2 == 0 { u32::MAX } else { 100 }]).collect();
    let ask = Ask { query: &query, selected: Some(&rows), visible: None, scale: 0.4, tiles: None };
    let with_none = Ask { selected: Some(&with_none), ..ask };
    let errors = Errors::between(
        &emulated.attend(&[with_none], &slots)[0],
        &reference(&ask, &slots, &emulated.variant),
    );
    assert!(errors.are_within(Precision::Bf16), "{errors:?}");
}

/// What the emulation is there to find, it finds.
#[test]
fn memory_that_nobody_gave_is_not_reached() {
    let Some(emulated) = Emulated::build(RowDtype::Bf16, 80, 64, Arch::Sm90) else { return };
    let query = values(5, 80);
    let mut slots = rows_of(6, 40, &emulated.variant, 8);
    slots.rows_per_page = 7;
    let ask = Ask { query: &query, selected: None, visible: None, scale: 0.4, tiles: None };
    let said = emulated.attend_once(&[ask], &slots, 1, false).expect_err("a page beyond the list");
    assert!(said.contains("memory that nobody gave"), "{said}");
}
