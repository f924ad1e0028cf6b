//! The four products that the kernel is made of, whatever computes them.
//!
//! All operands lie as tiles want them: lines of 64 bytes, sixteen to a tile, a line of bf16 being
//! sixteen pairs of values. A product may do other work between its steps, `beside`, where what it
//! computes with would be idle otherwise.

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;
/// Bytes of a row of a tile.
pub(super) const LINE_BYTES: usize = 64;
/// Bytes of a tile whose rows lie one after another.
pub(super) const TILE_BYTES: usize = TILE_ROWS * LINE_BYTES;

/// Sixteen rows at a stride, an operand as it lies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub at: *const u8,
    pub stride: usize,
}

/// 32 columns of a step's rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Values<'a> {
    /// Row tiles as they lie, an even number of them; 64 bytes of each row are readable from `column` on.
    pub rows: &'a [Rows],
    /// Where the columns begin in a row, in bytes.
    pub column: usize,
    /// The same with rows interleaved two by two: two tiles for each two row tiles. It is there for units
    /// that read it.
    pub panel: *const u8,
}

impl Values<'_> {
    /// Products over 32 rows that it takes.
    pub(super) fn steps(&self) -> usize {
        self.rows.len() / 2
    }
}

/// What multiplies pairs of bf16 and adds them up in f32.
///
/// # Safety
/// A value exists only where the processor has AVX-512 F, BW and BF16.
pub(super) unsafe trait Unit {
    /// Cached rows of one step of a single block of query rows, which keeps little.
    const STEP_ROWS_OF_ONE: usize;
    /// Whether [`Values::panel`] is what the second product reads, so that somebody has to lay it out.
    const READS_PANELS: bool;

    /// Scores of 32 cached rows with two blocks of sixteen query rows: four tiles of
    /// `row × query row` in f32, the second row tile behind the first. Calls
    /// `beside` with each step and row tile, in order.
    ///
    /// # Safety
    /// Each of `rows` is sixteen rows of `steps` × 64 readable bytes, each of `queries` `steps`
    /// tiles, each of `scores` two writable tiles.
    unsafe fn scores_two_blocks(
        &self,
        rows: [Rows; 2],
        queries: [*const u8; 2],
        steps: usize,
        scores: [*mut u8; 2],
        beside: impl FnMut(usize, usize),
    );

    /// Scores of 64 cached rows with one block of query rows: four tiles, one behind another. Calls
    /// `beside` with each step and row tile.
    ///
    /// # Safety
    /// As [`Unit::scores_two_blocks`], with four writable tiles of scores.
    unsafe fn scores_one_block(
        &self,
        rows: [Rows; 4],
        queries: *const u8,
        steps: usize,
        scores: *mut u8,
        beside: impl FnMut(usize, usize),
    );

    /// `sums += weights · values`, or `=` when `first`, for two blocks of query rows and 32 columns.
    /// Calls `beside` once a step.
    ///
    /// # Safety
    /// Each of `sums` is two readable and writable tiles, each of `weights` a tile for each two of the
    /// row tiles, which are a step each; `values` are as [`Values`] says.
    unsafe fn values_two_blocks(
        &self,
        sums: [*mut u8; 2],
        weights: [*const u8; 2],
        values: Values<'_>,
        first: bool,
        beside: impl FnMut(),
    );

    /// As [`Unit::values_two_blocks`] for one block of query rows and 64 columns.
    ///
    /// # Safety
    /// `sums` is four readable and writable tiles, one of two for each of `values`.
    unsafe fn values_one_block(
        &self,
        sums: *mut u8,
        weights: *const u8,
        values: [Values<'_>; 2],
        first: bool,
        beside: impl FnMut(),
    );
}
