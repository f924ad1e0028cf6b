//! Latent rows in pages, read where they lie.
//!
//! The memory belongs to somebody else (slot memory that processes share); this file is the rim
//! where raw addresses become a checked list of rows. No Rust reference to the memory is made.

use std::marker::PhantomData;
use std::ptr::NonNull;

use half::{bf16, f16};

use crate::fp8;

/// How a row holds its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowDtype {
    F32,
    Bf16,
    F16,
    /// As DeepSeek ships it: see [`fp8`]. A row has 576 values in 656 bytes.
    Fp8Latent,
}

impl RowDtype {
    pub const ALL: [RowDtype; 4] =
        [RowDtype::F32, RowDtype::Bf16, RowDtype::F16, RowDtype::Fp8Latent];

    /// Bytes of a row of `width` values.
    pub fn row_bytes(self, width: usize) -> usize {
        match self {
            RowDtype::F32 => width.saturating_mul(size_of::<f32>()),
            RowDtype::Bf16 | RowDtype::F16 => width.saturating_mul(size_of::<bf16>()),
            RowDtype::Fp8Latent => fp8::ROW_BYTES,
        }
    }

    /// What every row's address is a multiple of.
    pub fn align_bytes(self) -> usize {
        match self {
            RowDtype::F32 | RowDtype::Fp8Latent => size_of::<f32>(),
            RowDtype::Bf16 | RowDtype::F16 => size_of::<bf16>(),
        }
    }
}

/// Where the rows lie. Row `i` is row `i % rows_per_page` of page `i / rows_per_page`; a list of
/// single rows has one row a page.
#[derive(Debug, Clone, Copy)]
pub struct PageSpec<'a> {
    pub base: NonNull<u8>,
    pub len_bytes: usize,
    /// Where each page begins, in bytes from `base`.
    pub offsets_bytes: &'a [usize],
    pub rows_per_page: usize,
    pub row_stride_bytes: usize,
    /// Rows in all pages together; the last page may hold fewer than the others.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
    pub dtype: RowDtype,
}

/// Why a description of pages was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    #[error("{rows} rows need {needed} pages, but {got} are given")]
    Count { rows: usize, needed: usize, got: usize },
    #[error("page {page} ends at byte {end}, beyond the {len_bytes} bytes of the memory")]
    OutOfMemory { page: usize, end: usize, len_bytes: usize },
    #[error("rows of {row_bytes} bytes do not fit a stride of {stride_bytes}")]
    Stride { row_bytes: usize, stride_bytes: usize },
    #[error("a page has no rows, or a row has no values")]
    Empty,
    #[error("an address is not aligned to the values' size")]
    Unaligned,
    #[error("a row of fp8 latents has {} values, not {width}", fp8::WIDTH)]
    Width { width: usize },
    #[error("row {row} is selected, but there are {rows} rows")]
    Selected { row: u32, rows: usize },
}

/// A checked list of rows: those of the pages in their order, or some of them.
#[derive(Debug, Clone, Copy)]
pub struct PageList<'a> {
    spec: PageSpec<'a>,
    /// Which rows of the pages, and in which order; all of them in theirs without it.
    selected: Option<&'a [u32]>,
    memory: PhantomData<&'a [u8]>,
}

// SAFETY: the list only reads, and `PageList::new` demands memory that nobody writes meanwhile.
unsafe impl Send for PageList<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for PageList<'_> {}

impl<'a> PageList<'a> {
    /// Checks a description against the memory's bounds.
    ///
    /// # Errors
    /// [`PageError`] names the first rule that is broken.
    ///
    /// # Safety
    /// For all of `'a`, `len_bytes` bytes from `base` are mapped and readable from any thread, and
    /// nobody, in this process or another, writes the rows that the list names.
    pub unsafe fn new(spec: PageSpec<'a>) -> Result<Self, PageError> {
        if spec.rows_per_page == 0 || spec.width == 0 {
            return Err(PageError::Empty);
        }
        let needed = spec.rows.div_ceil(spec.rows_per_page);
        let got = spec.offsets_bytes.len();
        if needed != got {
            return Err(PageError::Count { rows: spec.rows, needed, got });
        }
        if spec.dtype == RowDtype::Fp8Latent && spec.width != fp8::WIDTH {
            return Err(PageError::Width { width: spec.width });
        }
        let row_bytes = spec.dtype.row_bytes(spec.width);
        let stride_bytes = spec.row_stride_bytes;
        if row_bytes > stride_bytes {
            return Err(PageError::Stride { row_bytes, stride_bytes });
        }
        let aligned = |at: usize| at.is_multiple_of(spec.dtype.align_bytes());
        if !aligned(stride_bytes) || !aligned(spec.base.addr().get()) {
            return Err(PageError::Unaligned);
        }
        for (page, &offset) in spec.offsets_bytes.iter().enumerate() {
            let rows = (spec.rows - page * spec.rows_per_page).min(spec.rows_per_page);
            let end = offset
                .saturating_add((rows - 1).saturating_mul(stride_bytes))
                .saturating_add(row_bytes);
            if end > spec.len_bytes {
                return Err(PageError::OutOfMemory { page, end, len_bytes: spec.len_bytes });
            }
            if !aligned(offset) {
                return Err(PageError::Unaligned);
            }
        }
        Ok(PageList { spec, selected: None, memory: PhantomData })
    }

    /// The rows of these pages that `rows` names, in its order, read where they lie: what a top-k
    /// selection attends, or one holder's share. A row that is named twice counts twice.
    ///
    /// # Errors
    /// [`PageError::Selected`] when the pages have no such row.
    pub fn select(&self, rows: &'a [u32]) -> Result<Self, PageError> {
        let beyond = rows.iter().find(|&&row| row as usize >= self.spec.rows);
        match beyond {
            Some(&row) => Err(PageError::Selected { row, rows: self.spec.rows }),
            None => Ok(PageList { selected: Some(rows), ..*self }),
        }
    }

    /// Rows of the list: of all pages, or those selected.
    pub fn rows(&self) -> usize {
        self.selected.map_or(self.spec.rows, <[u32]>::len)
    }

    pub fn width(&self) -> usize {
        self.spec.width
    }

    pub fn dtype(&self) -> RowDtype {
        self.spec.dtype
    }

    /// Rows that follow one another at the stride wherever a multiple of so many begins.
    pub(crate) fn rows_in_line(&self) -> usize {
        if self.selected.is_some() { 1 } else { self.spec.rows_per_page }
    }

    pub(crate) fn row_stride_bytes(&self) -> usize {
        self.spec.row_stride_bytes
    }

    /// The address of a row: `row_bytes` of its dtype, readable for `'a`.
    pub(crate) fn row(&self, row: usize) -> *const u8 {
        let spec = &self.spec;
        let row = self.selected.map_or(row, |selected| selected[row] as usize);
        assert!(row < spec.rows, "row {row} of {}", spec.rows);
        let page = row / spec.rows_per_page;
        let offset = spec.offsets_bytes[page] + row % spec.rows_per_page * spec.row_stride_bytes;
        // SAFETY: `new` checked that every row of every page lies within the memory.
        unsafe { spec.base.as_ptr().add(offset) }
    }

    /// Copies a row's values out, as `f32`.
    pub fn read_row(&self, row: usize, into: &mut [f32]) {
        assert_eq!(into.len(), self.spec.width, "a row has another width");
        let from = self.row(row);
        match self.spec.dtype {
            RowDtype::F32 => {
                // SAFETY: `row` gave the address of `width` aligned values; `into` is another
                // memory of that length.
                unsafe { from.cast::<f32>().copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) }
            }
            RowDtype::Bf16 => {
                for (i, value) in into.iter_mut().enumerate() {
                    // SAFETY: `i` is below `width`; the address is aligned to two bytes.
                    *value = unsafe { from.cast::<bf16>().add(i).read() }.to_f32();
                }
            }
            RowDtype::F16 => {
                for (i, value) in into.iter_mut().enumerate() {
                    // SAFETY: `i` is below `width`; the address is aligned to two bytes.
                    *value = unsafe { from.cast::<f16>().add(i).read() }.to_f32();
                }
            }
            RowDtype::Fp8Latent => {
                let mut bytes = [0; fp8::ROW_BYTES];
                // SAFETY: a row of this dtype has so many readable bytes.
                unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), fp8::ROW_BYTES) };
                fp8::widen(&bytes, into);
            }
        }
    }
}
