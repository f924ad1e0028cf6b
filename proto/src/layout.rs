//! How a block lies in a slot, checked once at the edge.

use crate::v1;

/// The layout of a slot: where each layer's runs lie. Guaranteed by construction: at least one
/// layer, every layer has at least one run, runs are not empty, lie within the slot and do not
/// overlap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotLayout {
    block_tokens: u32,
    slot_bytes: u64,
    layers: Vec<Vec<SlotRun>>,
}

/// A run of bytes within a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SlotRun {
    pub offset_bytes: u64,
    pub length_bytes: u64,
}

/// Why a layout was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    #[error("a block must have at least one token and a slot at least one byte")]
    Empty,
    #[error("layer {layer} has no bytes; every layer needs at least one run")]
    EmptyLayer { layer: usize },
    #[error("a run of layer {layer} ends at byte {end}, beyond the {slot_bytes} bytes of the slot")]
    OutOfSlot { layer: usize, end: u64, slot_bytes: u64 },
    #[error("two runs overlap at byte {at}")]
    Overlap { at: u64 },
}

impl SlotLayout {
    /// Checks and makes a layout.
    ///
    /// # Errors
    /// [`LayoutError`] names the first rule that is broken.
    pub fn new(
        block_tokens: u32,
        slot_bytes: u64,
        layers: Vec<Vec<SlotRun>>,
    ) -> Result<Self, LayoutError> {
        if block_tokens == 0 || slot_bytes == 0 || layers.is_empty() {
            return Err(LayoutError::Empty);
        }
        for (layer, runs) in layers.iter().enumerate() {
            if runs.is_empty() || runs.iter().any(|run| run.length_bytes == 0) {
                return Err(LayoutError::EmptyLayer { layer });
            }
            for run in runs {
                let end = run.offset_bytes.saturating_add(run.length_bytes);
                if end > slot_bytes {
                    return Err(LayoutError::OutOfSlot { layer, end, slot_bytes });
                }
            }
        }
        let mut all: Vec<SlotRun> = layers.iter().flatten().copied().collect();
        all.sort();
        for pair in all.windows(2) {
            if pair[0].offset_bytes + pair[0].length_bytes > pair[1].offset_bytes {
                return Err(LayoutError::Overlap { at: pair[1].offset_bytes });
            }
        }
        Ok(SlotLayout { block_tokens, slot_bytes, layers })
    }

    /// One run a layer, layers one after another: rows of `row_bytes` for each token.
    ///
    /// # Errors
    /// [`LayoutError::Empty`] when any number is zero.
    pub fn layer_major(
        block_tokens: u32,
        layers: usize,
        row_bytes: u64,
    ) -> Result<Self, LayoutError> {
        let page_bytes = u64::from(block_tokens) * row_bytes;
        let runs = (0..layers as u64)
            .map(|layer| {
                vec![SlotRun { offset_bytes: layer * page_bytes, length_bytes: page_bytes }]
            })
            .collect();
        SlotLayout::new(block_tokens, layers as u64 * page_bytes, runs)
    }

    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The runs of one layer; panics when there is no such layer.
    pub fn runs(&self, layer: usize) -> &[SlotRun] {
        &self.layers[layer]
    }

    /// Runs of all layers together: the number of writes that move one page.
    pub fn runs_per_page(&self) -> usize {
        self.layers.iter().map(Vec::len).sum()
    }

    /// Pages (and blocks, the last perhaps partial) that hold this many tokens.
    pub fn pages_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_tokens)
    }
}

impl From<&SlotLayout> for v1::SlotLayout {
    fn from(layout: &SlotLayout) -> Self {
        let run = |run: &SlotRun| v1::Run {
            offset_bytes: run.offset_bytes,
            length_bytes: run.length_bytes,
        };
        v1::SlotLayout {
            block_tokens: layout.block_tokens,
            slot_bytes: layout.slot_bytes,
            layers: layout
                .layers
                .iter()
                .map(|runs| v1::LayerLayout { runs: runs.iter().map(run).collect() })
                .collect(),
        }
    }
}

impl TryFrom<&v1::SlotLayout> for SlotLayout {
    type Error = LayoutError;

    fn try_from(layout: &v1::SlotLayout) -> Result<Self, LayoutError> {
        let run = |run: &v1::Run| SlotRun {
            offset_bytes: run.offset_bytes,
            length_bytes: run.length_bytes,
        };
        SlotLayout::new(
            layout.block_tokens,
            layout.slot_bytes,
            layout.layers.iter().map(|layer| layer.runs.iter().map(run).collect()).collect(),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(slot_bytes: u64, layers: &[&[(u64, u64)]]) -> Result<SlotLayout, LayoutError> {
        let layers = layers
            .iter()
            .map(|runs| {
                runs.iter()
                    .map(|&(offset_bytes, length_bytes)| SlotRun { offset_bytes, length_bytes })
            })
            .map(Iterator::collect)
            .collect();
        SlotLayout::new(64, slot_bytes, layers)
    }

    #[test]
    fn layouts_that_could_spoil_a_neighbour_are_refused() {
        assert!(check(20, &[&[(0, 10)], &[(10, 10)]]).is_ok());
        assert_eq!(check(20, &[]), Err(LayoutError::Empty));
        assert_eq!(check(20, &[&[(0, 10)], &[]]), Err(LayoutError::EmptyLayer { layer: 1 }));
        assert_eq!(check(20, &[&[(0, 0)]]), Err(LayoutError::EmptyLayer { layer: 0 }));
        let out = LayoutError::OutOfSlot { layer: 0, end: 21, slot_bytes: 20 };
        assert_eq!(check(20, &[&[(11, 10)]]), Err(out));
        let out = LayoutError::OutOfSlot { layer: 0, end: u64::MAX, slot_bytes: 20 };
        assert_eq!(check(20, &[&[(u64::MAX, 2)]]), Err(out));
        assert_eq!(check(20, &[&[(5, 10), (0, 6)]]), Err(LayoutError::Overlap { at: 5 }));
    }

    #[test]
    fn the_wire_form_comes_back_as_it_was() {
        let layout = SlotLayout::layer_major(64, 3, 2304).expect("a layout");
        assert_eq!(layout.slot_bytes(), 3 * 64 * 2304);
        assert_eq!(SlotLayout::try_from(&v1::SlotLayout::from(&layout)), Ok(layout));
    }
}
