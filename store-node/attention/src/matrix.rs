//! Products of strided matrices in the caller's memory: a safe interface to the kernels of the `gemm` crates.
//!
//! Only the crate of the f32 kernels is a dependency: `gemm` itself also compiles the kernels of four more types.

use gemm_common::Parallelism;

/// A matrix to read.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

/// A matrix to write; rows are contiguous and do not overlap.
#[derive(Debug)]
pub struct ViewMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
}

/// Whether a product replaces what the target holds or is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Into {
    Replace,
    Add,
}

fn check(len: usize, rows: usize, cols: usize, row_stride: usize) {
    assert!(row_stride >= cols, "rows of {cols} values overlap at stride {row_stride}");
    let needed = if rows == 0 { 0 } else { (rows - 1) * row_stride + cols };
    assert!(len >= needed, "a matrix of {rows} × {cols} at stride {row_stride} in {len} values");
}

impl<'a> View<'a> {
    /// A matrix whose rows begin `row_stride` values apart.
    pub fn new(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        View { data, rows, cols, row_stride, col_stride: 1 }
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The first columns alone.
    pub fn first_cols(self, cols: usize) -> Self {
        assert!(cols <= self.cols, "{cols} of {} columns", self.cols);
        View { cols, ..self }
    }

    /// The same values, rows read as columns.
    pub fn transposed(self) -> Self {
        View {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }
}

impl<'a> ViewMut<'a> {
    /// A matrix whose rows begin `row_stride` values apart; what lies between rows is not touched.
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        ViewMut { data, rows, cols, row_stride }
    }
}

/// `target = lhs · rhs`, or `target += lhs · rhs`.
pub fn multiply(target: ViewMut<'_>, into: Into, lhs: View<'_>, rhs: View<'_>, threads: usize) {
    assert!(
        lhs.rows == target.rows && lhs.cols == rhs.rows && rhs.cols == target.cols,
        "{} × {} times {} × {} into {} × {}",
        lhs.rows,
        lhs.cols,
        rhs.rows,
        rhs.cols,
        target.rows,
        target.cols,
    );
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    let stride = |values: usize| values as isize;
    let target_row = stride(target.row_stride);
    let left = (lhs.data.as_ptr(), stride(lhs.col_stride), stride(lhs.row_stride));
    let right = (rhs.data.as_ptr(), stride(rhs.col_stride), stride(rhs.row_stride));
    // The kernels want the values of a column of the target beside each other. Those of a row are, so the
    // transpose is computed: targetᵀ = rhsᵀ · lhsᵀ.
    let is_transposed = target_row > 1;
    let (m, n, column, row) = match is_transposed {
        true => (target.cols, target.rows, target_row, 1),
        false => (target.rows, target.cols, 1, target_row),
    };
    let ((lhs_data, lhs_column, lhs_row), (rhs_data, rhs_column, rhs_row)) = match is_transposed {
        true => ((right.0, right.2, right.1), (left.0, left.2, left.1)),
        false => (left, right),
    };
    // SAFETY: the views' constructors checked that every element of each matrix lies in its slice;
    // the target is borrowed alone, and its elements do not overlap. A target that is not read may
    // hold anything.
    unsafe {
        gemm_f32::gemm::f32::get_gemm_fn()(
            m,
            n,
            lhs.cols,
            target.data.as_mut_ptr(),
            column,
            row,
            into == Into::Add,
            lhs_data,
            lhs_column,
            lhs_row,
            rhs_data,
            rhs_column,
            rhs_row,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}
