//! The latent cache: rows of positions in slot memory that a store node made. This file is the rim
//! where the shared memory's address becomes rows; everything else in the model is safe code.

use std::ptr::NonNull;

use half::bf16;
use kvasir_attention::{PageList, PageSpec, RowDtype};
use kvasir_proto::{SlotIndex, SlotLayout};
use serde::{Deserialize, Serialize};

use super::ModelConfig;

/// How the cache holds its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F32,
    /// Rounded after the norm and after rotation.
    Bf16,
}

impl KvDtype {
    /// The name in configurations and namespaces: `f32` or `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::Bf16 => "bf16",
        }
    }

    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        self.rows().row_bytes(1)
    }

    fn rows(self) -> RowDtype {
        match self {
            KvDtype::F32 => RowDtype::F32,
            KvDtype::Bf16 => RowDtype::Bf16,
        }
    }
}

/// The slot memory that a [`Cache`] is made over.
#[derive(Debug, Clone)]
pub struct CacheSpec {
    pub base: NonNull<u8>,
    pub len_bytes: usize,
    /// As [`ModelConfig::layout`](super::ModelConfig::layout) gave it; a step refuses another one.
    pub layout: SlotLayout,
    pub dtype: KvDtype,
}

/// Slot memory as the model sees it: rows of positions. It belongs to one thread at a time.
#[derive(Debug)]
pub struct Cache {
    spec: CacheSpec,
    slot_bytes: usize,
    slots: u32,
}

/// The runs of a layer.
const ROWS: usize = 0;
const KEYS: usize = 1;

// SAFETY: the memory outlives the cache and is not tied to a thread (contract of `Cache::new`).
unsafe impl Send for Cache {}

impl Cache {
    /// # Safety
    /// `base` is aligned to 4 and points to `len_bytes` of readable, writable memory for as long as
    /// the cache lives. While a call runs (a step, a splice, a read), nobody else writes the slots
    /// that it names; what a step writes is read by others only after its `on_layer` said that it is
    /// there.
    pub unsafe fn new(spec: CacheSpec) -> Cache {
        let slot_bytes = usize::try_from(spec.layout.slot_bytes()).unwrap_or(usize::MAX);
        let slots = u32::try_from(spec.len_bytes / slot_bytes).unwrap_or(u32::MAX);
        Cache { spec, slot_bytes, slots }
    }

    pub fn dtype(&self) -> KvDtype {
        self.spec.dtype
    }

    pub fn layout(&self) -> &SlotLayout {
        &self.spec.layout
    }

    /// Slots that the memory holds.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    pub(super) fn block_tokens(&self) -> usize {
        self.spec.layout.block_tokens() as usize
    }

    /// Whether the slots hold rows of this model, and keys where it has an indexer.
    pub(super) fn fits(&self, config: &ModelConfig) -> bool {
        let layout = &self.spec.layout;
        self.spec.base.addr().get().is_multiple_of(size_of::<f32>())
            && *layout == config.layout(layout.block_tokens(), self.spec.dtype)
    }

    /// Where a slot begins, in bytes; the slot must be one of the memory's.
    pub(super) fn slot_offset(&self, slot: SlotIndex) -> usize {
        assert!(slot.0 < self.slots, "slot {slot} of {}", self.slots);
        slot.0 as usize * self.slot_bytes
    }

    /// Where a run of a layer begins in a slot, and the bytes of each of its rows.
    fn run(&self, layer: usize, run: usize) -> (usize, usize) {
        let run = self.spec.layout.runs(layer)[run];
        // Within a slot, which is within the memory.
        (run.offset_bytes as usize, run.length_bytes as usize / self.block_tokens())
    }

    /// Where the row of one token of a slot begins in a run of a layer, in bytes; it has room for `values`.
    fn row_offset(
        &self,
        slot: SlotIndex,
        (layer, run): (usize, usize),
        token: usize,
        values: usize,
    ) -> usize {
        let (run_at, row_bytes) = self.run(layer, run);
        assert_eq!(values * self.spec.dtype.bytes(), row_bytes, "a row has another width");
        assert!(token < self.block_tokens());
        self.slot_offset(slot) + run_at + token * row_bytes
    }

    /// Copies the row of one token of a slot out, as `f32`.
    ///
    /// # Panics
    /// When there is no such row, or `row` has another width.
    pub fn read_row(&self, slot: SlotIndex, layer: usize, token: usize, row: &mut [f32]) {
        self.read(slot, (layer, ROWS), token, row);
    }

    /// Copies an indexer's key of one token of a slot out, as `f32`.
    ///
    /// # Panics
    /// When there is no such key, or `key` has another width.
    pub fn read_key(&self, slot: SlotIndex, layer: usize, token: usize, key: &mut [f32]) {
        self.read(slot, (layer, KEYS), token, key);
    }

    fn read(&self, slot: SlotIndex, place: (usize, usize), token: usize, row: &mut [f32]) {
        let at = self.row_offset(slot, place, token, row.len());
        // SAFETY: slot, layer and token are within the memory, so the row is.
        let from = unsafe { self.spec.base.as_ptr().add(at) };
        match self.spec.dtype {
            KvDtype::F32 => {
                assert!(from.cast::<f32>().is_aligned(), "rows of f32 are aligned");
                // SAFETY: as many values are readable at `from`, aligned as was just checked;
                // nobody writes the slot, and `row` is the caller's own memory.
                unsafe { from.cast::<f32>().copy_to_nonoverlapping(row.as_mut_ptr(), row.len()) };
            }
            KvDtype::Bf16 => {
                for (i, value) in row.iter_mut().enumerate() {
                    // SAFETY: as above, `i` values of two bytes on; nothing asks for alignment.
                    let stored = unsafe { from.cast::<bf16>().add(i).read_unaligned() };
                    *value = stored.to_f32();
                }
            }
        }
    }

    /// Writes the row of one token of a slot, rounded to the cache's type.
    pub(super) fn write_row(&mut self, slot: SlotIndex, layer: usize, token: usize, row: &[f32]) {
        self.write(slot, (layer, ROWS), token, row);
    }

    /// Writes an indexer's key of one token of a slot, rounded to the cache's type.
    pub(super) fn write_key(&mut self, slot: SlotIndex, layer: usize, token: usize, key: &[f32]) {
        self.write(slot, (layer, KEYS), token, key);
    }

    fn write(&mut self, slot: SlotIndex, place: (usize, usize), token: usize, row: &[f32]) {
        let at = self.row_offset(slot, place, token, row.len());
        // SAFETY: slot, layer and token are within the memory, so the row is; the call alone
        // writes this slot, and `&mut self` says that no list of rows is being read.
        let to = unsafe { self.spec.base.as_ptr().add(at) };
        match self.spec.dtype {
            KvDtype::F32 => {
                // SAFETY: as many values are writable at `to`, aligned as `fits` checked; `row` is
                // the caller's own memory.
                unsafe { to.cast::<f32>().copy_from_nonoverlapping(row.as_ptr(), row.len()) };
            }
            KvDtype::Bf16 => {
                for (i, value) in row.iter().enumerate() {
                    // SAFETY: as above, `i` values of two bytes on.
                    unsafe { to.cast::<bf16>().add(i).write(bf16::from_f32(*value)) };
                }
            }
        }
    }

    /// The first `rows` rows of one layer, in the slots that begin at `slot_offsets`.
    pub(super) fn rows<'a>(
        &'a self,
        layer: usize,
        slot_offsets: &'a [usize],
        rows: usize,
    ) -> PageList<'a> {
        self.list((layer, ROWS), slot_offsets, rows)
    }

    /// The same of an indexer's keys.
    pub(super) fn keys<'a>(
        &'a self,
        layer: usize,
        slot_offsets: &'a [usize],
        rows: usize,
    ) -> PageList<'a> {
        self.list((layer, KEYS), slot_offsets, rows)
    }

    fn list<'a>(
        &'a self,
        (layer, run): (usize, usize),
        slot_offsets: &'a [usize],
        rows: usize,
    ) -> PageList<'a> {
        let (run_at, row_stride_bytes) = self.run(layer, run);
        assert!(run_at < self.spec.len_bytes, "the memory holds a slot");
        // SAFETY: `run_at` is within the memory.
        let base = unsafe { self.spec.base.add(run_at) };
        let spec = PageSpec {
            base,
            len_bytes: self.spec.len_bytes - run_at,
            offsets_bytes: &slot_offsets[..rows.div_ceil(self.block_tokens())],
            rows_per_page: self.block_tokens(),
            row_stride_bytes,
            rows,
            width: row_stride_bytes / self.spec.dtype.bytes(),
            dtype: self.spec.dtype.rows(),
        };
        // SAFETY: the memory is readable while the cache lives; others do not write the batch's
        // slots while a step runs, and this side writes them through `&mut self` only.
        unsafe { PageList::new(spec) }.expect("slots are within the memory")
    }
}
