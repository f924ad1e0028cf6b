//! What an object is: how its namespace and key are made, and how its bytes lie in a slot.
//!
//! An object is a block that follows no other. Its bytes stand at the start of a slot, and a footer of
//! 16 bytes at the end of the slot's runs says how many they are; what is between is zero. So objects of
//! any length up to [`capacity`] lie in slots of one size, and every byte of the runs is under their
//! checksums.

use crate::ids::{BlockKey, Namespace};
use crate::layout::{SlotLayout, SlotRun};

/// Bytes of the footer.
pub const FOOTER_BYTES: u64 = 16;
/// Slots that are made for objects are a multiple of it, so that every object begins on a cache line.
const SLOT_STEP_BYTES: u64 = 64;
/// Where that is no more than a part in 64, of it: disks read and write such memory without a copy.
const SECTOR_BYTES: u64 = 512;
const MAGIC: [u8; 8] = *b"kvasir-o";

/// The namespace of objects that a tenant calls so. No engine's namespace is equal to it.
pub fn namespace(tenant: &str, name: &str) -> Namespace {
    let mut hasher = blake3::Hasher::new_derive_key("kvasir 2026 object namespace v1");
    for part in [tenant, name] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let mut out = [0; 16];
    hasher.finalize_xof().fill(&mut out);
    Namespace(out)
}

/// The block key of an object: a hash of its namespace and of what its owner calls it.
pub fn key(namespace: Namespace, name: &[u8]) -> BlockKey {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&namespace.0);
    hasher.update(name);
    let mut out = [0; 16];
    hasher.finalize_xof().fill(&mut out);
    BlockKey(out)
}

/// Slots for objects of up to so many bytes; `None` when a slot cannot be so large.
pub fn layout(object_bytes_max: u64) -> Option<SlotLayout> {
    let bytes = object_bytes_max.checked_add(FOOTER_BYTES)?;
    let step = if bytes >= 64 * SECTOR_BYTES { SECTOR_BYTES } else { SLOT_STEP_BYTES };
    let bytes = bytes.checked_next_multiple_of(step)?;
    let run = SlotRun { offset_bytes: 0, length_bytes: bytes };
    SlotLayout::new(1, bytes, vec![vec![run]]).ok()
}

/// The longest object that a slot of this layout holds; `None` when its runs leave gaps, so that no
/// object lies there in one piece.
pub fn capacity(layout: &SlotLayout) -> Option<u64> {
    runs_bytes(layout)?.checked_sub(FOOTER_BYTES)
}

/// The runs of a layout by their place in the slot, when they follow one another from its start on.
pub fn runs_in_place(layout: &SlotLayout) -> Option<Vec<SlotRun>> {
    let mut runs: Vec<SlotRun> =
        (0..layout.layers()).flat_map(|layer| layout.runs(layer)).copied().collect();
    runs.sort();
    let mut end = 0;
    for run in &runs {
        if run.offset_bytes != end {
            return None;
        }
        end += run.length_bytes;
    }
    Some(runs)
}

fn runs_bytes(layout: &SlotLayout) -> Option<u64> {
    let last = *runs_in_place(layout)?.last()?;
    Some(last.offset_bytes + last.length_bytes)
}

/// What stands at the end of the runs of an object of so many bytes.
pub fn footer(object_bytes: u64) -> [u8; FOOTER_BYTES as usize] {
    let mut footer = [0; FOOTER_BYTES as usize];
    footer[..8].copy_from_slice(&object_bytes.to_le_bytes());
    footer[8..].copy_from_slice(&MAGIC);
    footer
}

/// The bytes of the object before this footer; `None` when it is no footer of one in such a slot.
pub fn object_bytes(footer: &[u8; FOOTER_BYTES as usize], capacity: u64) -> Option<u64> {
    let (length, magic) = footer.split_first_chunk::<8>()?;
    let bytes = u64::from_le_bytes(*length);
    (magic == MAGIC && bytes <= capacity).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_and_keys_differ_in_every_part() {
        let base = namespace("tenant", "name");
        for other in [namespace("tenan", "tname"), namespace("tenant", ""), namespace("", "name")] {
            assert_ne!(base, other);
            assert_ne!(key(base, b"a"), key(other, b"a"));
        }
        assert_ne!(key(base, b"a"), key(base, b"b"));
    }

    #[test]
    fn a_slot_holds_what_it_was_made_for() {
        for bytes in [0, 1, 48, 49, 4096, 32 << 10, 128 << 10, (1 << 20) - 16, 4 << 20] {
            let layout = layout(bytes).expect("a layout");
            assert!(capacity(&layout).is_some_and(|capacity| capacity >= bytes));
            let step = if bytes < 32 << 10 { 64 } else { 512 };
            assert_eq!(layout.slot_bytes() % step, 0, "of {bytes} bytes");
            assert!(layout.slot_bytes() - bytes < step + FOOTER_BYTES, "of {bytes} bytes");
        }
        assert_eq!(layout(u64::MAX), None);
    }

    #[test]
    fn runs_in_any_order_hold_an_object_and_runs_with_gaps_none() {
        let run = |offset_bytes, length_bytes| SlotRun { offset_bytes, length_bytes };
        let whole = SlotLayout::new(1, 64, vec![vec![run(32, 32)], vec![run(0, 32)]]);
        let whole = whole.expect("a layout");
        assert_eq!(capacity(&whole), Some(48));
        assert_eq!(runs_in_place(&whole), Some(vec![run(0, 32), run(32, 32)]));
        let gap = SlotLayout::new(1, 64, vec![vec![run(0, 16)], vec![run(32, 32)]]);
        assert_eq!(capacity(&gap.expect("a layout")), None);
        let small = SlotLayout::new(1, 8, vec![vec![run(0, 8)]]).expect("a layout");
        assert_eq!(capacity(&small), None);
    }

    #[test]
    fn a_footer_comes_back_and_another_one_does_not() {
        assert_eq!(object_bytes(&footer(7), 7), Some(7));
        assert_eq!(object_bytes(&footer(8), 7), None);
        let mut wrong = footer(7);
        wrong[15] ^= 1;
        assert_eq!(object_bytes(&wrong, 7), None);
    }
}
