//! Latent rows in pages, read where they lie.
//!
//! The memory belongs to somebody else (slot memory that processes share); this file is the rim
//! where raw addresses become a checked list of rows. No Rust reference to the memory is made.

use std::marker::PhantomData;
use std::ptr::NonNull;

use half::bf16;

/// How a row holds its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowDtype {
    F32,
    Bf16,
}

impl RowDtype {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            RowDtype::F32 => size_of::<f32>(),
            RowDtype::Bf16 => size_of::<bf16>(),
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
    #[error("{rows} rows need {needed} pages, and {got} are given")]
    Count { rows: usize, needed: usize, got: usize },
    #[error("page {page} ends at byte {end}, beyond the {len_bytes} of the memory")]
    OutOfMemory { page: usize, end: usize, len_bytes: usize },
    #[error("rows of {row_bytes} bytes do not fit a stride of {stride_bytes}")]
    Stride { row_bytes: usize, stride_bytes: usize },
    #[error("a page holds no row or a row no value")]
    Empty,
    #[error("an address is not aligned to the values' size")]
    Unaligned,
}

/// A checked list of rows.
#[derive(Debug, Clone, Copy)]
pub struct PageList<'a> {
    spec: PageSpec<'a>,
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
        let value_bytes = spec.dtype.bytes();
        let row_bytes = spec.width.saturating_mul(value_bytes);
        let stride_bytes = spec.row_stride_bytes;
        if row_bytes > stride_bytes {
            return Err(PageError::Stride { row_bytes, stride_bytes });
        }
        let aligned = |at: usize| at.is_multiple_of(value_bytes);
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
        Ok(PageList { spec, memory: PhantomData })
    }

    pub fn rows(&self) -> usize {
        self.spec.rows
    }

    pub fn width(&self) -> usize {
        self.spec.width
    }

    pub fn dtype(&self) -> RowDtype {
        self.spec.dtype
    }

    pub(crate) fn rows_per_page(&self) -> usize {
        self.spec.rows_per_page
    }

    pub(crate) fn row_stride_bytes(&self) -> usize {
        self.spec.row_stride_bytes
    }

    /// The address of a row: `width` values, readable for `'a`.
    pub(crate) fn row(&self, row: usize) -> *const u8 {
        let spec = &self.spec;
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
        }
    }
}
