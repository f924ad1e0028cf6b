//! What the node knows of the bytes of one share's pages: which layers are written, and the
//! checksum of each run. The truth about who owns a slot is with the block core; this is only about
//! what may be sent and what it must hash to.
//!
//! Of a page that was there before only the fold of its checksums is known. Those of its runs follow as it
//! is sent over a wire that needs them ([`Pages::hash`]), layer by layer, and with the last one it is seen
//! whether they are what was folded.

use std::ops::Range;
use std::sync::Arc;

use kvasir_checksum::fold;
use kvasir_proto::{SlotIndex, SlotLayout, SlotRun};

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
    /// One for each run of the leading layers that were hashed, layer by layer.
    checksums: Vec<u64>,
    /// Of a page that was there before: its checksum.
    stored: Option<u64>,
}

impl Pages {
    pub fn new(layout: Arc<SlotLayout>, slots: &[SlotIndex]) -> Self {
        let mut run_starts = vec![0];
        for layer in 0..layout.layers() {
            run_starts.push(run_starts[layer] + layout.runs(layer).len());
        }
        let page = |slot: &SlotIndex| Page {
            slot: *slot,
            layers_done: 0,
            step: None,
            checksums: vec![],
            stored: None,
        };
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

    /// The checksum of a whole page.
    pub fn checksum(&self, page: u32) -> Option<u64> {
        let of = &self.pages[page as usize];
        let is_hashed = of.checksums.len() == self.layout.runs_per_page();
        of.stored.or_else(|| is_hashed.then(|| fold(&of.checksums)))
    }

    /// The checksums of one layer's runs; `None` while it was not hashed.
    pub fn layer_checksums(&self, page: u32, layer: u16) -> Option<&[u64]> {
        let runs = self.run_starts[layer as usize]..self.run_starts[layer as usize + 1];
        self.pages[page as usize].checksums.get(runs)
    }

    /// The page was there, whole, with this checksum.
    pub fn set_whole(&mut self, page: u32, slot: SlotIndex, checksum: u64) {
        // Of one run it is the run's own.
        let checksums = match self.layout.runs_per_page() {
            1 => vec![checksum],
            _ => Vec::new(),
        };
        let (layers_done, stored) = (self.layers(), Some(checksum));
        self.pages[page as usize] = Page { slot, layers_done, step: None, checksums, stored };
    }

    /// The checksums of these layers' runs, and of those before them, are needed: `hash` is asked for those
    /// that are not known. False when all of the page is hashed and it is not what it was.
    pub fn hash(
        &mut self,
        page: u32,
        layers: &Range<u16>,
        mut hash: impl FnMut(SlotIndex, SlotRun) -> u64,
    ) -> bool {
        let Pages { layout, pages, run_starts } = self;
        let page = &mut pages[page as usize];
        for layer in 0..layers.end {
            if page.checksums.len() == run_starts[layer as usize] {
                let runs = layout.runs(layer as usize).iter();
                page.checksums.extend(runs.map(|run| hash(page.slot, *run)));
            }
        }
        let is_hashed = page.checksums.len() == layout.runs_per_page();
        let fits = |stored: u64| !is_hashed || fold(&page.checksums) == stored;
        page.stored.is_none_or(fits)
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

    /// Layers of a page have been copied into its slot, with these checksums of their runs. False when they are not the
    /// next ones, or the checksums are not one for each run.
    pub fn take_layers(
        &mut self,
        page: u32,
        step: u32,
        layers: Range<u16>,
        checksums: &[u64],
    ) -> bool {
        let run_starts = &self.run_starts;
        let runs = run_starts[usize::from(layers.end)] - run_starts[usize::from(layers.start)];
        let page = &mut self.pages[page as usize];
        if page.layers_done != layers.start || checksums.len() != runs {
            return false;
        }
        page.checksums.extend_from_slice(checksums);
        page.layers_done = layers.end;
        page.step = Some(step);
        true
    }

    /// Layers of a page are written; `hash` answers with the checksum of a run in a slot. Layers
    /// that are known already are left as they are. False when layers before them are missing.
    pub fn finish_layers(
        &mut self,
        page: u32,
        step: u32,
        layers: Range<u16>,
        mut hash: impl FnMut(SlotIndex, SlotRun) -> u64,
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

    fn pages() -> Pages {
        let run = |offset_bytes| SlotRun { offset_bytes, length_bytes: 8 };
        let layers = vec![vec![run(0), run(8)], vec![run(16)], vec![run(24), run(32)]];
        let layout = SlotLayout::new(64, 64, layers).expect("a layout");
        Pages::new(Arc::new(layout), &[SlotIndex(3), SlotIndex(9)])
    }

    #[test]
    fn each_run_is_hashed_once_and_found_by_layer() {
        let mut pages = pages();
        let hash = |slot: SlotIndex, run: SlotRun| u64::from(slot.0) * 100 + run.offset_bytes;
        assert!(pages.finish_layers(1, 5, 0..2, hash));
        assert!(!pages.finish_layers(0, 5, 1..2, hash), "layer 0 of page 0 is missing");
        assert!(!pages.is_whole(1));
        assert!(pages.finish_layers(1, 5, 0..3, |slot, run| {
            assert!(run.offset_bytes >= 24, "hashed twice");
            hash(slot, run)
        }));
        assert!(pages.is_whole(1));
        assert_eq!(pages.checksum(1), Some(fold(&[900, 908, 916, 924, 932])));
        assert_eq!(pages.checksum(0), None);
        let of_layer = |layer| pages.layer_checksums(1, layer).expect("it was hashed");
        assert_eq!(of_layer(0), [900, 908]);
        assert_eq!(of_layer(1), [916]);
        assert_eq!(of_layer(2), [924, 932]);
        assert_eq!(pages.layer_checksums(0, 0), None);
        assert!(pages.hash(1, &(0..3), |_, _| panic!("hashed twice")));
        assert_eq!((pages.step(0), pages.step(1)), (None, Some(5)));
    }

    #[test]
    fn copied_layers_follow_each_other() {
        let mut pages = pages();
        assert!(pages.take_layers(0, 3, 0..1, &[1, 2]));
        assert!(!pages.take_layers(0, 3, 0..1, &[1, 2]), "they are there");
        assert!(!pages.take_layers(0, 3, 2..3, &[4, 5]), "one is missing");
        assert!(!pages.take_layers(0, 3, 1..3, &[3, 4]), "one is not hashed");
        assert!(pages.take_layers(0, 4, 1..3, &[3, 4, 5]));
        assert_eq!((pages.checksum(0), pages.step(0)), (Some(fold(&[1, 2, 3, 4, 5])), Some(4)));
        assert!(pages.is_whole(0));
    }

    #[test]
    fn a_stored_page_is_hashed_layer_by_layer_and_is_what_it_was_or_not() {
        let check = |rotten: Option<u64>, want: [bool; 3]| {
            let mut pages = pages();
            pages.set_whole(0, SlotIndex(4), fold(&[0, 8, 16, 24, 32]));
            assert_eq!((pages.slot(0), pages.is_whole(0)), (SlotIndex(4), true));
            assert_eq!(pages.layer_checksums(0, 0), None);
            let mut hashed = Vec::new();
            let got = [0..1, 1..2, 2..3].map(|layers: Range<u16>| {
                pages.hash(0, &layers, |slot, run| {
                    assert_eq!(slot, SlotIndex(4));
                    hashed.push(run.offset_bytes);
                    run.offset_bytes + u64::from(rotten == Some(run.offset_bytes))
                })
            });
            assert_eq!(got, want, "{rotten:?}");
            assert_eq!(hashed, [0, 8, 16, 24, 32], "each once");
            assert_eq!(pages.checksum(0), Some(fold(&[0, 8, 16, 24, 32])), "as it was given");
        };
        check(None, [true, true, true]);
        check(Some(0), [true, true, false]);
        check(Some(32), [true, true, false]);
    }

    #[test]
    fn the_checksum_of_a_stored_page_of_one_run_is_the_runs() {
        let run = SlotRun { offset_bytes: 0, length_bytes: 64 };
        let layout = SlotLayout::new(64, 64, vec![vec![run]]).expect("a layout");
        let mut pages = Pages::new(Arc::new(layout), &[SlotIndex(3)]);
        pages.set_whole(0, SlotIndex(3), 7);
        assert_eq!(pages.layer_checksums(0, 0), Some(&[7][..]));
        assert!(pages.hash(0, &(0..1), |_, _| panic!("it is known")));
    }
}
