//! The tile unit: finding it, configuring it, and the four products that the kernel is made of.
//!
//! Its intrinsics are not stable in Rust, inline assembly is. The compiler uses no tile register
//! itself, so nothing here has to be saved for it.

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count};
use std::sync::OnceLock;

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(super) const LINE_BYTES: usize = 64;
/// Bytes of a tile whose rows lie one after another.
pub(super) const TILE_BYTES: usize = TILE_ROWS * LINE_BYTES;

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

/// Sixteen rows at a stride, an operand as it lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub at: *const u8,
    pub stride: usize,
}

impl Tiles {
    /// Scores of 32 cached rows with two blocks of sixteen query rows: four tiles of
    /// `row × query row` in f32, the second row tile behind the first.
    ///
    /// # Safety
    /// Each of `rows` is sixteen rows of `steps` × 64 readable bytes, each of `queries` `steps`
    /// tiles, each of `scores` two writable tiles.
    pub(super) unsafe fn scores_two_blocks(
        &self,
        rows: [Rows; 2],
        queries: [*const u8; 2],
        steps: usize,
        scores: [*mut u8; 2],
    ) {
        // SAFETY: the loop reads `steps` tiles of each operand and writes four, as the caller says.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a0} + {s0}]",
                "tileloadd tmm6, [{b0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b1} + {line}]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {s1}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a0}, 64", "add {a1}, 64", "add {b0}, 1024", "add {b1}, 1024",
                "dec {n}", "jnz 2b",
                "tilestored [{c0} + {line}], tmm0",
                "tilestored [{c1} + {line}], tmm1",
                "tilestored [{c0} + {line} + 1024], tmm2",
                "tilestored [{c1} + {line} + 1024], tmm3",
                a0 = inout(reg) rows[0].at => _, a1 = inout(reg) rows[1].at => _,
                s0 = in(reg) rows[0].stride, s1 = in(reg) rows[1].stride,
                b0 = inout(reg) queries[0] => _, b1 = inout(reg) queries[1] => _,
                c0 = in(reg) scores[0], c1 = in(reg) scores[1],
                line = in(reg) LINE_BYTES, n = inout(reg) steps => _,
                options(nostack),
            );
        }
    }

    /// Scores of 64 cached rows with one block of query rows: four tiles, one behind another.
    ///
    /// # Safety
    /// As [`Tiles::scores_two_blocks`], with four writable tiles of scores.
    pub(super) unsafe fn scores_one_block(
        &self,
        rows: [Rows; 4],
        queries: *const u8,
        steps: usize,
        scores: *mut u8,
    ) {
        // SAFETY: the loop reads `steps` tiles of each operand and writes four, as the caller says.
        unsafe {
            asm!(
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                "tileloadd tmm6, [{b} + {line}]",
                "tileloadd tmm4, [{a0} + {s0}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm5, [{a1} + {s1}]",
                "tdpbf16ps tmm1, tmm5, tmm6",
                "tileloadd tmm7, [{a2} + {s2}]",
                "tdpbf16ps tmm2, tmm7, tmm6",
                "tileloadd tmm4, [{a3} + {s3}]",
                "tdpbf16ps tmm3, tmm4, tmm6",
                "add {a0}, 64", "add {a1}, 64", "add {a2}, 64", "add {a3}, 64", "add {b}, 1024",
                "dec {n:e}", "jnz 2b",
                "mov {n:e}, 64",
                "tilestored [{c} + {n}], tmm0",
                "tilestored [{c} + {n} + 1024], tmm1",
                "tilestored [{c} + {n} + 2048], tmm2",
                "tilestored [{c} + {n} + 3072], tmm3",
                a0 = inout(reg) rows[0].at => _, a1 = inout(reg) rows[1].at => _,
                a2 = inout(reg) rows[2].at => _, a3 = inout(reg) rows[3].at => _,
                s0 = in(reg) rows[0].stride, s1 = in(reg) rows[1].stride,
                s2 = in(reg) rows[2].stride, s3 = in(reg) rows[3].stride,
                b = inout(reg) queries => _, c = in(reg) scores,
                line = in(reg) LINE_BYTES, n = inout(reg) steps => _,
                options(nostack),
            );
        }
    }

    /// `sums += weights · values`, or `=` when `first`, for two blocks of query rows and 32 columns.
    ///
    /// # Safety
    /// Each of `sums` is two readable and writable tiles, each of `weights` `steps` tiles, `values`
    /// `steps` pairs of tiles.
    pub(super) unsafe fn values_two_blocks(
        &self,
        sums: [*mut u8; 2],
        weights: [*const u8; 2],
        values: *const u8,
        steps: usize,
        first: bool,
    ) {
        // SAFETY: the loop reads `steps` tiles of each operand, as the caller says; the sums are
        // four tiles of the caller's.
        unsafe {
            asm!(
                "test {first:e}, {first:e}", "jnz 3f",
                "tileloadd tmm0, [{c0} + {line}]",
                "tileloadd tmm1, [{c0} + {line} + 1024]",
                "tileloadd tmm2, [{c1} + {line}]",
                "tileloadd tmm3, [{c1} + {line} + 1024]",
                "jmp 2f",
                "3:",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a0} + {line}]",
                "tileloadd tmm6, [{b} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{b} + {line} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{a1} + {line}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a0}, 1024", "add {a1}, 1024", "add {b}, 2048",
                "dec {n}", "jnz 2b",
                "tilestored [{c0} + {line}], tmm0",
                "tilestored [{c0} + {line} + 1024], tmm1",
                "tilestored [{c1} + {line}], tmm2",
                "tilestored [{c1} + {line} + 1024], tmm3",
                c0 = in(reg) sums[0], c1 = in(reg) sums[1],
                a0 = inout(reg) weights[0] => _, a1 = inout(reg) weights[1] => _,
                b = inout(reg) values => _, line = in(reg) LINE_BYTES,
                n = inout(reg) steps => _, first = in(reg) usize::from(first),
                options(nostack),
            );
        }
    }

    /// As [`Tiles::values_two_blocks`] for one block of query rows and 64 columns.
    ///
    /// # Safety
    /// `sums` is four readable and writable tiles, `weights` `steps` tiles, each of `values`
    /// `steps` pairs of tiles.
    pub(super) unsafe fn values_one_block(
        &self,
        sums: *mut u8,
        weights: *const u8,
        values: [*const u8; 2],
        steps: usize,
        first: bool,
    ) {
        // SAFETY: the loop reads `steps` tiles of each operand, as the caller says; the sums are
        // four tiles of the caller's.
        unsafe {
            asm!(
                "test {first:e}, {first:e}", "jnz 3f",
                "tileloadd tmm0, [{c} + {line}]",
                "tileloadd tmm1, [{c} + {line} + 1024]",
                "tileloadd tmm2, [{c} + {line} + 2048]",
                "tileloadd tmm3, [{c} + {line} + 3072]",
                "jmp 2f",
                "3:",
                "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a} + {line}]",
                "tileloadd tmm5, [{b0} + {line}]",
                "tdpbf16ps tmm0, tmm4, tmm5",
                "tileloadd tmm6, [{b0} + {line} + 1024]",
                "tdpbf16ps tmm1, tmm4, tmm6",
                "tileloadd tmm7, [{b1} + {line}]",
                "tdpbf16ps tmm2, tmm4, tmm7",
                "tileloadd tmm5, [{b1} + {line} + 1024]",
                "tdpbf16ps tmm3, tmm4, tmm5",
                "add {a}, 1024", "add {b0}, 2048", "add {b1}, 2048",
                "dec {n}", "jnz 2b",
                "tilestored [{c} + {line}], tmm0",
                "tilestored [{c} + {line} + 1024], tmm1",
                "tilestored [{c} + {line} + 2048], tmm2",
                "tilestored [{c} + {line} + 3072], tmm3",
                c = in(reg) sums, a = inout(reg) weights => _,
                b0 = inout(reg) values[0] => _, b1 = inout(reg) values[1] => _,
                line = in(reg) LINE_BYTES, n = inout(reg) steps => _,
                first = in(reg) usize::from(first),
                options(nostack),
            );
        }
    }
}
