//! What the node knows of the bytes of one share's pages: which layers are written, and the
//! checksum of each run. The truth about who owns a slot is with the block core; this is only about
//! what may be sent and what it must hash to.

use std::ops::Range;
use std::sync::Arc;

use kvasir_proto::{SlotIndex, SlotLayout};

/// The prompt's pages of one share.
#[derive(Debug)]
pub struct Pages {
    layout: Arc<SlotLayout>,
    pages: Vec<Page>,
    /// Index of each layer's first run among the runs of a page, and the end.
    run_starts: Vec<usize>,
}

#[derive(Debug)]
struct Page {
    slot: SlotIndex,
    layers_done: u16,
    /// The step that finished it; `None` when it was there before.
    step: Option<u32>,
    /// One for each run of the layers done, layer by layer.
    checksums: Vec<u64>,
}

impl Pages {
    pub fn new(layout: Arc<SlotLayout>, slots: &[SlotIndex]) -> Self {
        let mut run_starts = vec![0];
        for layer in 0..layout.layers() {
            run_starts.push(run_starts[layer] + layout.runs(layer).len());
        }
        let page =
            |slot: &SlotIndex| Page { slot: *slot, layers_done: 0, step: None, checksums: vec![] };
        Pages { layout, pages: slots.iter().map(page).collect(), run_starts }
    }

    pub fn layout(&self) -> &Arc<SlotLayout> {
        &self.layout
    }

    pub fn layers(&self) -> u16 {
        // A layout of more layers is refused when an engine attaches.
        self.layout.layers() as u16
    }

    pub fn count(&self) -> u32 {
        self.pages.len() as u32
    }

    pub fn slot(&self, page: u32) -> SlotIndex {
        self.pages[page as usize].slot
    }

    pub fn layers_done(&self, page: u32) -> u16 {
        self.pages[page as usize].layers_done
    }

    pub fn is_whole(&self, page: u32) -> bool {
        self.layers_done(page) == self.layers()
    }

    pub fn step(&self, page: u32) -> Option<u32> {
        self.pages[page as usize].step
    }

    /// All checksums so far.
    pub fn checksums(&self, page: u32) -> &[u64] {
        &self.pages[page as usize].checksums
    }

    /// The checksums of one finished layer's runs.
    pub fn layer_checksums(&self, page: u32, layer: u16) -> &[u64] {
        let runs = self.run_starts[layer as usize]..self.run_starts[layer as usize + 1];
        &self.pages[page as usize].checksums[runs]
    }

    /// The page was there, whole, with these checksums. False when they are not one for each run.
    pub fn set_whole(&mut self, page: u32, slot: SlotIndex, checksums: &[u64]) -> bool {
        if checksums.len() != self.layout.runs_per_page() {
            return false;
        }
        let layers_done = self.layers();
        self.pages[page as usize] =
            Page { slot, layers_done, step: None, checksums: checksums.to_vec() };
        true
    }

    /// The slots are settled: pages that are not whole may lie elsewhere than was said first.
    pub fn set_slots(&mut self, slots: &[SlotIndex]) {
        let layers = self.layers();
        for (page, slot) in self.pages.iter_mut().zip(slots) {
            if page.layers_done < layers {
                page.slot = *slot;
            }
        }
    }

    /// Layers of a page are written; `hash` answers with the checksum of a run in a slot. Layers
    /// that are known already are left as they are. False when layers before them are missing.
    pub fn finish_layers(
        &mut self,
        page: u32,
        step: u32,
        layers: Range<u16>,
        mut hash: impl FnMut(SlotIndex, kvasir_proto::layout::Run) -> u64,
    ) -> bool {
        let Pages { layout, pages, .. } = self;
        let page = &mut pages[page as usize];
        if page.layers_done < layers.start {
            return false;
        }
        for layer in page.layers_done.max(layers.start)..layers.end {
            page.checksums
                .extend(layout.runs(layer as usize).iter().map(|run| hash(page.slot, *run)));
            page.layers_done = layer + 1;
            page.step = Some(step);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvasir_proto::layout::Run;

    fn pages() -> Pages {
        let run = |offset_bytes| Run { offset_bytes, length_bytes: 8 };
        let layers = vec![vec![run(0), run(8)], vec![run(16)], vec![run(24), run(32)]];
        let layout = SlotLayout::new(64, 64, layers).expect("a layout");
        Pages::new(Arc::new(layout), &[SlotIndex(3), SlotIndex(9)])
    }

    #[test]
    fn each_run_is_hashed_once_and_found_by_layer() {
        let mut pages = pages();
        let hash = |slot: SlotIndex, run: Run| u64::from(slot.0) * 100 + run.offset_bytes;
        assert!(pages.finish_layers(1, 5, 0..2, hash));
        assert!(!pages.finish_layers(0, 5, 1..2, hash), "layer 0 of page 0 is missing");
        assert!(!pages.is_whole(1));
        assert!(pages.finish_layers(1, 5, 0..3, |slot, run| {
            assert!(run.offset_bytes >= 24, "hashed twice");
            hash(slot, run)
        }));
        assert!(pages.is_whole(1));
        assert_eq!(pages.checksums(1), [900, 908, 916, 924, 932]);
        assert_eq!(pages.layer_checksums(1, 0), [900, 908]);
        assert_eq!(pages.layer_checksums(1, 1), [916]);
        assert_eq!(pages.layer_checksums(1, 2), [924, 932]);
        assert_eq!((pages.step(0), pages.step(1)), (None, Some(5)));
    }

    #[test]
    fn a_stored_page_needs_a_checksum_for_each_run() {
        let mut pages = pages();
        assert!(!pages.set_whole(0, SlotIndex(3), &[1, 2]));
        assert!(pages.set_whole(0, SlotIndex(4), &[1, 2, 3, 4, 5]));
        assert_eq!((pages.slot(0), pages.is_whole(0)), (SlotIndex(4), true));
    }
}
