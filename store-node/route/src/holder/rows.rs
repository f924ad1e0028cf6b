//! Slots as a list of rows of one layer, where they lie in the node's slot memory.

use std::ptr::NonNull;

use kvasir_attention::{PageError, PageList, PageSpec, RowDtype};
use kvasir_proto::{SlotIndex, SlotLayout};
use kvasir_transfer::SharedMemory;

/// Why no kernel here reads a model's rows; they can be fetched all the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    #[error("no kernel here reads rows of `{0}`")]
    Dtype(String),
    #[error("layer {layer} lies in {runs} runs; kernels here read layers of one run")]
    Runs { layer: usize, runs: usize },
    #[error("layers are not of one length, or not of whole rows of their values")]
    Length,
}

/// How rows lie in a slot: one run a layer, all of one length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowShape {
    pub dtype: RowDtype,
    /// Values of a row.
    pub width: usize,
    pub block_tokens: usize,
    slot_bytes: usize,
    layer_offsets: Vec<usize>,
}

impl RowShape {
    /// # Errors
    /// [`ShapeError`] when no kernel reads rows that lie so.
    pub fn new(layout: &SlotLayout, kv_dtype: &str) -> Result<Self, ShapeError> {
        let dtype = match kv_dtype {
            "f32" => RowDtype::F32,
            "bf16" => RowDtype::Bf16,
            other => return Err(ShapeError::Dtype(other.into())),
        };
        let block_tokens = layout.block_tokens() as usize;
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let run_bytes = size(layout.runs(0)[0].length_bytes);
        let mut layer_offsets = Vec::with_capacity(layout.layers());
        for layer in 0..layout.layers() {
            let [run] = layout.runs(layer) else {
                return Err(ShapeError::Runs { layer, runs: layout.runs(layer).len() });
            };
            if size(run.length_bytes) != run_bytes {
                return Err(ShapeError::Length);
            }
            layer_offsets.push(size(run.offset_bytes));
        }
        let width = run_bytes / block_tokens / dtype.row_bytes(1);
        if width == 0 || width * block_tokens * dtype.row_bytes(1) != run_bytes {
            return Err(ShapeError::Length);
        }
        let slot_bytes = size(layout.slot_bytes());
        Ok(RowShape { dtype, width, block_tokens, slot_bytes, layer_offsets })
    }

    pub fn layers(&self) -> usize {
        self.layer_offsets.len()
    }

    /// Where each slot's rows of a layer begin, in bytes from the start of the memory.
    pub fn offsets(&self, layer: usize, slots: &[SlotIndex]) -> Vec<usize> {
        let of_layer = self.layer_offsets[layer];
        slots.iter().map(|slot| slot.0 as usize * self.slot_bytes + of_layer).collect()
    }

    /// The first `rows` rows of the pages that begin at `offsets`.
    ///
    /// # Errors
    /// [`PageError`] when they do not lie within the memory.
    ///
    /// # Safety
    /// Nobody writes these rows for all of `'a`.
    pub unsafe fn rows<'a>(
        &self,
        memory: &'a SharedMemory,
        offsets: &'a [usize],
        rows: usize,
    ) -> Result<PageList<'a>, PageError> {
        let spec = PageSpec {
            base: NonNull::new(memory.as_ptr()).expect("mapped memory is not at address 0"),
            len_bytes: memory.len(),
            offsets_bytes: offsets,
            rows_per_page: self.block_tokens,
            row_stride_bytes: self.dtype.row_bytes(self.width),
            rows,
            width: self.width,
            dtype: self.dtype,
        };
        // SAFETY: the memory is mapped for `'a`, `len` bytes long and readable from any thread; that
        // nobody writes the rows is this function's own condition.
        unsafe { PageList::new(spec) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_proto::layout::Run;

    #[test]
    fn rows_that_no_kernel_reads_are_refused_with_the_reason() {
        let good = SlotLayout::layer_major(4, 2, 8 * 4).expect("a layout");
        let shape = RowShape::new(&good, "f32").expect("a shape");
        assert_eq!((shape.width, shape.block_tokens, shape.layers()), (8, 4, 2));
        assert_eq!(shape.offsets(1, &[SlotIndex(0), SlotIndex(3)]), [128, 3 * 256 + 128]);
        assert_eq!(RowShape::new(&good, "bf16").expect("a shape").width, 16);
        let dtype = ShapeError::Dtype("fp8".into());
        assert_eq!(RowShape::new(&good, "fp8"), Err(dtype));
        let run = |offset_bytes, length_bytes| Run { offset_bytes, length_bytes };
        let check = |layers| SlotLayout::new(4, 1024, layers).expect("a layout");
        let split = check(vec![vec![run(0, 64), run(64, 64)]]);
        assert_eq!(RowShape::new(&split, "f32"), Err(ShapeError::Runs { layer: 0, runs: 2 }));
        let uneven = check(vec![vec![run(0, 64)], vec![run(64, 128)]]);
        assert_eq!(RowShape::new(&uneven, "f32"), Err(ShapeError::Length));
        let ragged = check(vec![vec![run(0, 66)]]);
        assert_eq!(RowShape::new(&ragged, "f32"), Err(ShapeError::Length));
    }
}
