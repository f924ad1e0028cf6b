//! The tile unit (AMX): finding it, configuring it, and the products in it.
//!
//! Its intrinsics are not stable in Rust, inline assembly is. The compiler uses no tile register
//! itself, so nothing here has to be saved for it, and what an instruction leaves in a tile is there
//! for the next one.
//!
//! Each product loads the operands of its next step as soon as the last use of a tile is issued, and
//! calls `beside` between its instructions: vector work and prefetches are done there while the unit
//! multiplies, for sixteen cycles each pair of tiles.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

use super::STEP_ROWS_MAX;
use super::unit::{LINE_BYTES, Rows, TILE_BYTES, TILE_ROWS, Unit, Values};

/// The processor has tiles of bf16 and this process may use them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Amx(());

impl Amx {
    /// Looks once, and asks Linux for the permission that a process needs.
    pub(crate) fn detect() -> Option<Self> {
        static FOUND: OnceLock<bool> = OnceLock::new();
        FOUND.get_or_init(|| has_instructions() && may_use_tiles()).then_some(Amx(()))
    }

    /// Configures all eight tiles at their full size until the guard is dropped.
    pub(super) fn configure(self) -> Tiles {
        let mut config = TileConfig {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        config.row_bytes[..8].fill(LINE_BYTES as u16);
        config.rows[..8].fill(TILE_ROWS as u8);
        // SAFETY: the token says that the instruction exists and is permitted; the configuration is
        // 64 bytes in the form that palette 1 asks for.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        Tiles(())
    }
}

fn has_instructions() -> bool {
    let vectors = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512bf16");
    if !vectors || __cpuid(0).eax < 7 {
        return false;
    }
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const OS_SAVES_EXTENDED: u32 = 1 << 27;
    let features = __cpuid_count(7, 0).edx;
    if features & (AMX_BF16 | AMX_TILE) != AMX_BF16 | AMX_TILE
        || __cpuid(1).ecx & OS_SAVES_EXTENDED == 0
    {
        return false;
    }
    const TILE_STATE: u32 = 3 << 17;
    let enabled: u32;
    // SAFETY: OSXSAVE is set, so the instruction exists; it only reads a register.
    unsafe {
        asm!("xgetbv", in("ecx") 0, out("eax") enabled, out("edx") _, options(nomem, nostack, preserves_flags));
    }
    enabled & TILE_STATE == TILE_STATE
}

/// Linux lets a process use tiles only after it has asked: `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)`.
#[cfg(target_os = "linux")]
fn may_use_tiles() -> bool {
    const ARCH_PRCTL: usize = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let result: isize;
    // SAFETY: a system call of two numbers, which touches no memory of this process.
    unsafe {
        asm!("syscall", inlateout("rax") ARCH_PRCTL => result, in("rdi") REQUEST_PERMISSION,
            in("rsi") TILE_DATA, out("rcx") _, out("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn may_use_tiles() -> bool {
    false
}

#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The tiles of this thread are configured.
#[derive(Debug)]
pub(super) struct Tiles(());

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: a guard exists only where the instruction does.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Loads sixteen lines into a tile.
///
/// # Safety
/// The lines are readable; tiles are configured.
#[inline(always)]
unsafe fn load<const TILE: u8>(at: *const u8, stride: usize) {
    // SAFETY: as the caller says.
    unsafe {
        asm!("tileloadd tmm{t}, [{at} + {stride}]", t = const TILE, at = in(reg) at,
            stride = in(reg) stride, options(nostack, preserves_flags, readonly));
    }
}

/// Stores a tile as lines one after another.
///
/// # Safety
/// A tile is writable at `at`; tiles are configured.
#[inline(always)]
unsafe fn store<const TILE: u8>(at: *mut u8) {
    // SAFETY: as the caller says.
    unsafe {
        asm!("tilestored [{at} + {line}], tmm{t}", t = const TILE, at = in(reg) at,
            line = in(reg) LINE_BYTES, options(nostack, preserves_flags));
    }
}

/// # Safety
/// Tiles are configured.
#[inline(always)]
unsafe fn zero<const TILE: u8>() {
    // SAFETY: as the caller says.
    unsafe { asm!("tilezero tmm{t}", t = const TILE, options(nostack, preserves_flags, nomem)) }
}

/// `sum += left · right`.
///
/// # Safety
/// Tiles are configured.
#[inline(always)]
unsafe fn multiply<const SUM: u8, const LEFT: u8, const RIGHT: u8>() {
    // SAFETY: as the caller says.
    unsafe {
        asm!("tdpbf16ps tmm{s}, tmm{l}, tmm{r}", s = const SUM, l = const LEFT, r = const RIGHT,
            options(nostack, preserves_flags, nomem));
    }
}

/// Four tiles of sums: as they lie at `at`, or zero when `first`.
///
/// # Safety
/// The tiles at `at` are readable; tiles are configured.
#[inline(always)]
unsafe fn begin(at: [*const u8; 4], first: bool) {
    // SAFETY: as the caller says.
    unsafe {
        if first {
            zero::<0>();
            zero::<1>();
            zero::<2>();
            zero::<3>();
        } else {
            load::<0>(at[0], LINE_BYTES);
            load::<1>(at[1], LINE_BYTES);
            load::<2>(at[2], LINE_BYTES);
            load::<3>(at[3], LINE_BYTES);
        }
    }
}

/// Stores the four tiles of sums.
///
/// # Safety
/// Tiles are writable at `at`; tiles are configured.
#[inline(always)]
unsafe fn end(at: [*mut u8; 4]) {
    // SAFETY: as the caller says.
    unsafe {
        store::<0>(at[0]);
        store::<1>(at[1]);
        store::<2>(at[2]);
        store::<3>(at[3]);
    }
}

// SAFETY: tiles are configured only where `Amx::detect` saw the instructions.
unsafe impl Unit for Tiles {
    // Sums go through memory between steps.
    const STEP_ROWS_OF_ONE: usize = STEP_ROWS_MAX;
    const READS_PANELS: bool = true;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scores_two_blocks(
        &self,
        rows: [Rows; 2],
        queries: [*const u8; 2],
        steps: usize,
        scores: [*mut u8; 2],
        mut beside: impl FnMut(usize, usize),
    ) {
        let [upper, lower] = rows;
        // SAFETY: what is read lies in step `next`, which is below `steps`; four tiles are written,
        // as the caller says.
        unsafe {
            begin([std::ptr::null(); 4], true);
            load::<4>(upper.at, upper.stride);
            load::<6>(queries[0], LINE_BYTES);
            load::<7>(queries[1], LINE_BYTES);
            load::<5>(lower.at, lower.stride);
            for step in 0..steps {
                let next = (step + 1).min(steps - 1);
                multiply::<0, 4, 6>();
                multiply::<1, 4, 7>();
                load::<4>(upper.at.add(next * LINE_BYTES), upper.stride);
                beside(step, 0);
                multiply::<3, 5, 7>();
                load::<7>(queries[1].add(next * TILE_BYTES), LINE_BYTES);
                multiply::<2, 5, 6>();
                load::<6>(queries[0].add(next * TILE_BYTES), LINE_BYTES);
                load::<5>(lower.at.add(next * LINE_BYTES), lower.stride);
                beside(step, 1);
            }
            let [first, second] = scores;
            end([first, second, first.add(TILE_BYTES), second.add(TILE_BYTES)]);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn scores_one_block(
        &self,
        rows: [Rows; 4],
        queries: *const u8,
        steps: usize,
        scores: *mut u8,
        mut beside: impl FnMut(usize, usize),
    ) {
        // SAFETY: as for two blocks.
        unsafe {
            begin([std::ptr::null(); 4], true);
            load::<6>(queries, LINE_BYTES);
            load::<4>(rows[0].at, rows[0].stride);
            load::<5>(rows[1].at, rows[1].stride);
            for step in 0..steps {
                let next = (step + 1).min(steps - 1);
                load::<7>(rows[2].at.add(step * LINE_BYTES), rows[2].stride);
                multiply::<0, 4, 6>();
                beside(step, 0);
                load::<4>(rows[3].at.add(step * LINE_BYTES), rows[3].stride);
                multiply::<1, 5, 6>();
                beside(step, 1);
                load::<5>(rows[1].at.add(next * LINE_BYTES), rows[1].stride);
                multiply::<2, 7, 6>();
                beside(step, 2);
                multiply::<3, 4, 6>();
                load::<6>(queries.add(next * TILE_BYTES), LINE_BYTES);
                load::<4>(rows[0].at.add(next * LINE_BYTES), rows[0].stride);
                beside(step, 3);
            }
            end(std::array::from_fn(|tile| scores.add(tile * TILE_BYTES)));
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn values_two_blocks(
        &self,
        sums: [*mut u8; 2],
        weights: [*const u8; 2],
        values: Values<'_>,
        first: bool,
        mut beside: impl FnMut(),
    ) {
        let (values, steps) = (values.panel, values.steps());
        // SAFETY: what is read lies in step `next`, which is below `steps`; the sums are four tiles
        // of the caller's.
        unsafe {
            let sums = [sums[0], sums[0].add(TILE_BYTES), sums[1], sums[1].add(TILE_BYTES)];
            begin(sums.map(<*mut u8>::cast_const), first);
            load::<4>(weights[0], LINE_BYTES);
            load::<6>(values, LINE_BYTES);
            load::<7>(values.add(TILE_BYTES), LINE_BYTES);
            load::<5>(weights[1], LINE_BYTES);
            for step in 0..steps {
                let next = (step + 1).min(steps - 1);
                multiply::<0, 4, 6>();
                multiply::<1, 4, 7>();
                load::<4>(weights[0].add(next * TILE_BYTES), LINE_BYTES);
                multiply::<3, 5, 7>();
                load::<7>(values.add((2 * next + 1) * TILE_BYTES), LINE_BYTES);
                beside();
                multiply::<2, 5, 6>();
                load::<5>(weights[1].add(next * TILE_BYTES), LINE_BYTES);
                load::<6>(values.add(2 * next * TILE_BYTES), LINE_BYTES);
            }
            end(sums);
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn values_one_block(
        &self,
        sums: *mut u8,
        weights: *const u8,
        values: [Values<'_>; 2],
        first: bool,
        mut beside: impl FnMut(),
    ) {
        let (steps, values) = (values[0].steps(), values.map(|values| values.panel));
        // SAFETY: as for two blocks.
        unsafe {
            let sums: [*mut u8; 4] = std::array::from_fn(|tile| sums.add(tile * TILE_BYTES));
            begin(sums.map(<*mut u8>::cast_const), first);
            load::<4>(weights, LINE_BYTES);
            load::<5>(values[0], LINE_BYTES);
            load::<6>(values[0].add(TILE_BYTES), LINE_BYTES);
            for step in 0..steps {
                let next = (step + 1).min(steps - 1);
                load::<7>(values[1].add(2 * step * TILE_BYTES), LINE_BYTES);
                multiply::<0, 4, 5>();
                load::<5>(values[1].add((2 * step + 1) * TILE_BYTES), LINE_BYTES);
                multiply::<1, 4, 6>();
                load::<6>(values[0].add((2 * next + 1) * TILE_BYTES), LINE_BYTES);
                beside();
                multiply::<2, 4, 7>();
                multiply::<3, 4, 5>();
                load::<4>(weights.add(next * TILE_BYTES), LINE_BYTES);
                load::<5>(values[0].add(2 * next * TILE_BYTES), LINE_BYTES);
            }
            end(sums);
        }
    }
}
