//! Slots as a list of rows of one layer, where they lie in the node's slot memory.

use std::ptr::NonNull;

use kvasir_attention::{PageError, PageList, PageSpec, RowDtype};
use kvasir_proto::{SlotIndex, SlotLayout};
use kvasir_transfer::memory::SharedMemory;

/// Why no kernel here reads a model's rows; they can be fetched all the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    #[error("no kernel supports rows of type `{0}`")]
    Dtype(String),
    #[error("layer {layer} has {runs} runs; kernels support one run of rows and one of index keys")]
    Runs { layer: usize, runs: usize },
    #[error("the layers differ in length, or a layer is not a whole number of rows")]
    Length,
}

/// How rows lie in a slot: in each layer a run of rows, and perhaps one of an indexer's keys behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowShape {
    pub dtype: RowDtype,
    /// Values of a row.
    pub width: usize,
    pub block_tokens: usize,
    slot_bytes: usize,
    layer_offsets: Vec<usize>,
    keys: Option<Keys>,
}

/// An indexer's keys, in every layer.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Keys {
    width: usize,
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
        let runs = layout.runs(0).len();
        let uneven = (0..layout.layers()).find(|&layer| layout.runs(layer).len() != runs);
        if let Some(layer) = uneven.or((runs > 2).then_some(0)) {
            return Err(ShapeError::Runs { layer, runs: layout.runs(layer).len() });
        }
        let (width, layer_offsets) = run(layout, 0, dtype)?;
        let keys = match runs {
            1 => None,
            _ => Some(run(layout, 1, dtype)?),
        };
        Ok(RowShape {
            dtype,
            width,
            block_tokens: layout.block_tokens() as usize,
            slot_bytes: size(layout.slot_bytes()),
            layer_offsets,
            keys: keys.map(|(width, layer_offsets)| Keys { width, layer_offsets }),
        })
    }

    pub fn layers(&self) -> usize {
        self.layer_offsets.len()
    }

    /// Values of an indexer's key, where there are keys.
    pub fn key_width(&self) -> Option<usize> {
        self.keys.as_ref().map(|keys| keys.width)
    }

    /// Where each slot's rows of a layer begin, in bytes from the start of the memory.
    pub fn offsets(&self, layer: usize, slots: &[SlotIndex]) -> Vec<usize> {
        self.in_slots(self.layer_offsets[layer], slots)
    }

    /// The same of an indexer's keys; none where there are none.
    pub fn key_offsets(&self, layer: usize, slots: &[SlotIndex]) -> Vec<usize> {
        let of_layer = |keys: &Keys| self.in_slots(keys.layer_offsets[layer], slots);
        self.keys.as_ref().map_or_else(Vec::new, of_layer)
    }

    fn in_slots(&self, at: usize, slots: &[SlotIndex]) -> Vec<usize> {
        slots.iter().map(|slot| slot.0 as usize * self.slot_bytes + at).collect()
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
        // SAFETY: this function's own condition.
        unsafe { self.list(memory, offsets, rows, self.width) }
    }

    /// The first `rows` of an indexer's keys in the pages that begin at `offsets`.
    ///
    /// # Errors
    /// [`PageError`] when they do not lie within the memory, or there are none.
    ///
    /// # Safety
    /// Nobody writes these keys for all of `'a`.
    pub unsafe fn keys<'a>(
        &self,
        memory: &'a SharedMemory,
        offsets: &'a [usize],
        rows: usize,
    ) -> Result<PageList<'a>, PageError> {
        // SAFETY: this function's own condition.
        unsafe { self.list(memory, offsets, rows, self.key_width().unwrap_or(0)) }
    }

    /// # Safety
    /// Nobody writes these rows for all of `'a`.
    unsafe fn list<'a>(
        &self,
        memory: &'a SharedMemory,
        offsets: &'a [usize],
        rows: usize,
        width: usize,
    ) -> Result<PageList<'a>, PageError> {
        let spec = PageSpec {
            base: NonNull::new(memory.as_ptr()).expect("mapped memory is not at address 0"),
            len_bytes: memory.len(),
            offsets_bytes: offsets,
            rows_per_page: self.block_tokens,
            row_stride_bytes: self.dtype.row_bytes(width),
            rows,
            width,
            dtype: self.dtype,
        };
        // SAFETY: the memory is mapped for `'a`, `len` bytes long and readable from any thread; that
        // nobody writes the rows is this function's own condition.
        unsafe { PageList::new(spec) }
    }
}

fn size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// The values of a row of one of the runs, which all layers have alike, and where it lies in each.
fn run(
    layout: &SlotLayout,
    run: usize,
    dtype: RowDtype,
) -> Result<(usize, Vec<usize>), ShapeError> {
    let block_tokens = layout.block_tokens() as usize;
    let run_bytes = size(layout.runs(0)[run].length_bytes);
    let runs = || (0..layout.layers()).map(|layer| &layout.runs(layer)[run]);
    if runs().any(|run| size(run.length_bytes) != run_bytes) {
        return Err(ShapeError::Length);
    }
    let width = run_bytes / block_tokens / dtype.row_bytes(1);
    if width == 0 || width * block_tokens * dtype.row_bytes(1) != run_bytes {
        return Err(ShapeError::Length);
    }
    Ok((width, runs().map(|run| size(run.offset_bytes)).collect()))
}

#[cfg(test)]
mod tests {
    use kvasir_proto::SlotRun;

    use super::*;

    #[test]
    fn rows_that_no_kernel_reads_are_refused_with_the_reason() {
        let good = SlotLayout::layer_major(4, 2, 8 * 4).expect("a layout");
        let shape = RowShape::new(&good, "f32").expect("a shape");
        assert_eq!((shape.width, shape.block_tokens, shape.layers()), (8, 4, 2));
        assert_eq!(shape.offsets(1, &[SlotIndex(0), SlotIndex(3)]), [128, 3 * 256 + 128]);
        assert_eq!(RowShape::new(&good, "bf16").expect("a shape").width, 16);
        let dtype = ShapeError::Dtype("fp8".into());
        assert_eq!(RowShape::new(&good, "fp8"), Err(dtype));
        let run = |offset_bytes, length_bytes| SlotRun { offset_bytes, length_bytes };
        let check = |layers| SlotLayout::new(4, 1024, layers).expect("a layout");
        let split = check(vec![vec![run(0, 64), run(64, 64), run(128, 64)]]);
        assert_eq!(RowShape::new(&split, "f32"), Err(ShapeError::Runs { layer: 0, runs: 3 }));
        let some = check(vec![vec![run(0, 64), run(64, 64)], vec![run(128, 64)]]);
        assert_eq!(RowShape::new(&some, "f32"), Err(ShapeError::Runs { layer: 1, runs: 1 }));
        let uneven = check(vec![vec![run(0, 64), run(64, 64)], vec![run(128, 64), run(192, 32)]]);
        assert_eq!(RowShape::new(&uneven, "f32"), Err(ShapeError::Length));
        let uneven = check(vec![vec![run(0, 64)], vec![run(64, 128)]]);
        assert_eq!(RowShape::new(&uneven, "f32"), Err(ShapeError::Length));
        let ragged = check(vec![vec![run(0, 66)]]);
        assert_eq!(RowShape::new(&ragged, "f32"), Err(ShapeError::Length));
    }

    #[test]
    fn keys_of_an_indexer_are_a_second_run_of_each_layer() {
        let run = |offset_bytes, length_bytes| SlotRun { offset_bytes, length_bytes };
        let layers = vec![vec![run(0, 128), run(128, 48)], vec![run(176, 128), run(304, 48)]];
        let layout = SlotLayout::new(4, 352, layers).expect("a layout");
        let shape = RowShape::new(&layout, "f32").expect("a shape");
        assert_eq!((shape.width, shape.key_width(), shape.layers()), (8, Some(3), 2));
        assert_eq!(shape.offsets(1, &[SlotIndex(2)]), [2 * 352 + 176]);
        assert_eq!(shape.key_offsets(1, &[SlotIndex(0), SlotIndex(2)]), [304, 2 * 352 + 304]);
        let plain = SlotLayout::layer_major(4, 2, 8 * 4).expect("a layout");
        let plain = RowShape::new(&plain, "f32").expect("a shape");
        assert_eq!((plain.key_width(), plain.key_offsets(0, &[SlotIndex(0)])), (None, vec![]));
    }
}
