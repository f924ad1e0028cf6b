//! One query over one list of rows, by addresses of the device.

use super::CudaError;
use super::plan::{JobParts, JobShape};
use super::variant::{ALIGN_BYTES, Variant};

/// An address in memory of the device; 0 is none.
use kvasir_cuda::DeviceAddress;

/// One query over one list of rows. All memory is the device's and the caller's. Queries, pages,
/// rows and their strides begin at multiples of 16 bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CudaJob {
    /// `query_rows × d_qk` values of [`Variant::query_dtype`], rows at a stride.
    pub query: DeviceAddress,
    pub query_rows: u32,
    pub query_stride_bytes: u32,
    /// `u64[]`: the device address of each page, in slots that need not be neighbours.
    pub pages: DeviceAddress,
    /// Rows of all pages together.
    pub page_rows: u32,
    pub rows_per_page: u32,
    pub row_stride_bytes: u32,
    /// `u32[selected_rows]`: which rows of the pages, in which order; all in theirs without it. One
    /// that the pages do not have (such as -1) is not attended.
    pub selected: Option<DeviceAddress>,
    /// Rows of the selection, where there is one.
    pub selected_rows: u32,
    /// `u32[query_rows]`: query row `i` attends the first so many rows of the list; all without it.
    pub visible: Option<DeviceAddress>,
    /// Applied to the dot product in f32; above 0.
    pub scale: f32,
    /// `f32[query_rows × d_v]`: the normalised output.
    pub o: DeviceAddress,
    /// `f32[query_rows]`: the largest logit, `-inf` over an empty set.
    pub m: DeviceAddress,
    /// `f32[query_rows]`: the softmax denominator relative to `m`.
    pub l: DeviceAddress,
}

/// A job as the device reads it. Laid out as `Job` of `layout.cu`.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct DeviceJob {
    query: u64,
    pages: u64,
    selected: u64,
    visible: u64,
    o: u64,
    m: u64,
    l: u64,
    part_row: u64,
    query_rows: u32,
    query_stride_bytes: u32,
    rows: u32,
    page_rows: u32,
    rows_per_page: u32,
    row_stride_bytes: u32,
    splits: u32,
    scale: f32,
}

impl CudaJob {
    pub fn shape(&self) -> JobShape {
        let rows = if self.selected.is_some() { self.selected_rows } else { self.page_rows };
        JobShape { query_rows: self.query_rows, rows }
    }

    /// Refuses what the kernel would read or write wrongly, as far as the host can see it.
    ///
    /// # Errors
    /// [`CudaError::Unaligned`] and [`CudaError::Job`], which name `index`.
    pub fn check(&self, variant: &Variant, index: usize) -> Result<(), CudaError> {
        let wrong = |what| Err(CudaError::Job { job: index, what });
        let row_bytes = variant.dtype().row_bytes(variant.d_qk());
        let query_bytes = variant.query_dtype().row_bytes(variant.d_qk());
        if self.rows_per_page == 0 {
            return wrong("a page has no rows");
        }
        if (self.row_stride_bytes as usize) < row_bytes {
            return wrong("rows overlap at their stride");
        }
        if (self.query_stride_bytes as usize) < query_bytes {
            return wrong("query rows overlap at their stride");
        }
        if !(self.scale > 0.0 && self.scale.is_finite()) {
            return wrong("the scale is not above 0");
        }
        // Lists are walked a tile beyond their end.
        if self.shape().rows > u32::MAX / 2 || self.query_rows > u32::MAX / 2 {
            return wrong("more than 2^31 rows");
        }
        let writes_nothing = self.query_rows == 0;
        if !writes_nothing && [self.query, self.o, self.m, self.l].contains(&0) {
            return wrong("an address of the query or the result is 0");
        }
        if self.pages == 0 && self.shape().rows > 0 {
            return wrong("there are rows but no pages");
        }
        let align = ALIGN_BYTES as u64;
        for (what, value) in [
            ("the query's address", self.query),
            ("the query rows' stride", u64::from(self.query_stride_bytes)),
            ("the rows' stride", u64::from(self.row_stride_bytes)),
            ("the output's address", self.o),
        ] {
            if !value.is_multiple_of(align) {
                return Err(CudaError::Unaligned { job: index, what });
            }
        }
        Ok(())
    }

    /// As the device reads it.
    pub fn for_device(&self, parts: JobParts) -> DeviceJob {
        DeviceJob {
            query: self.query,
            pages: self.pages,
            selected: self.selected.unwrap_or(0),
            visible: self.visible.unwrap_or(0),
            o: self.o,
            m: self.m,
            l: self.l,
            part_row: parts.first,
            query_rows: self.query_rows,
            query_stride_bytes: self.query_stride_bytes,
            rows: self.shape().rows,
            page_rows: self.page_rows,
            rows_per_page: self.rows_per_page,
            row_stride_bytes: self.row_stride_bytes,
            splits: parts.splits,
            scale: self.scale,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::variant::Arch;
    use crate::pages::RowDtype;

    fn good() -> CudaJob {
        CudaJob {
            query: 0x1000,
            query_rows: 16,
            query_stride_bytes: 1152,
            pages: 0x2000,
            page_rows: 100,
            rows_per_page: 64,
            row_stride_bytes: 1152,
            selected: None,
            selected_rows: 0,
            visible: None,
            scale: 0.07,
            o: 0x3000,
            m: 0x4000,
            l: 0x5000,
        }
    }

    #[test]
    fn jobs_that_a_kernel_would_read_wrongly_are_refused() {
        let variant = Variant::new(RowDtype::Bf16, 576, 512, Arch::Sm90).expect("a kernel");
        good().check(&variant, 0).expect("a job");
        let says = |job: CudaJob, part: &str| {
            let error = job.check(&variant, 3).expect_err("a wrong job").to_string();
            assert!(error.contains(part) && error.contains("job 3"), "{error}");
        };
        says(CudaJob { rows_per_page: 0, ..good() }, "no row");
        says(CudaJob { row_stride_bytes: 1136, ..good() }, "rows overlap");
        says(CudaJob { query_stride_bytes: 1136, ..good() }, "query rows overlap");
        says(CudaJob { scale: 0.0, ..good() }, "scale");
        says(CudaJob { scale: f32::NAN, ..good() }, "scale");
        says(CudaJob { o: 0, ..good() }, "is 0");
        says(CudaJob { pages: 0, ..good() }, "no pages");
        says(CudaJob { page_rows: u32::MAX, ..good() }, "2^31");
        says(CudaJob { query: 0x1008, ..good() }, "multiple of 16");
        says(CudaJob { row_stride_bytes: 1154, ..good() }, "multiple of 16");
        let selected = CudaJob { selected: Some(0x6000), selected_rows: 7, ..good() };
        assert_eq!(selected.shape().rows, 7);
    }
}
