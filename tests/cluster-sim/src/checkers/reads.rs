//! I9: never is a slot written or given out while a read of it is unfinished, nor does a page of an engine's pool go back
//! to it while one of that is.

use std::collections::BTreeMap;

use kvasir_blocks::AttachEpoch;

use super::Checker;
use crate::content::PageBytes;
use crate::seen::{Life, Place, Reader, Seen};

#[derive(Debug, Default)]
pub(super) struct Reads {
    open: BTreeMap<(Life, Reader), BTreeMap<u32, Option<PageBytes>>>,
    /// Pages of pools that copies read.
    of_pools: BTreeMap<(Life, u64), (AttachEpoch, u32)>,
}

impl Checker for Reads {
    fn name(&self) -> &'static str {
        "I9 reads"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::ReadBegan { at, reader, slots } => {
                let open = self.open.entry((*at, *reader)).or_default();
                open.extend(slots.iter().map(|slot| (*slot, None)));
            }
            Seen::ReadEnded { at, reader } => {
                self.open.remove(&(*at, *reader));
            }
            Seen::ClientGone { at, epoch } => {
                let is_its =
                    |reader: &Reader| matches!(reader, Reader::Client(of, _) if of == epoch);
                self.open.retain(|(of, reader), _| of != at || !is_its(reader));
            }
            Seen::GivenOut { at, place: Place::Slot(slot), to } => {
                let of_node = self.open.iter().filter(|((of, _), _)| of == at);
                for ((_, reader), slots) in of_node {
                    if slots.contains_key(slot) {
                        return Err(format!(
                            "slot {slot} of {at:?} is given to {to:?} while {reader:?} reads it"
                        ));
                    }
                }
            }
            Seen::Memory { at, slots } => {
                let now: BTreeMap<u32, &PageBytes> =
                    slots.iter().map(|(slot, bytes)| (*slot, bytes)).collect();
                for ((of, reader), open) in &mut self.open {
                    // An engine reads what it writes, too.
                    if of != at || matches!(reader, Reader::Push(..)) {
                        continue;
                    }
                    for (slot, first) in open {
                        let Some(bytes) = now.get(slot) else { continue };
                        if *first.get_or_insert(**bytes) != **bytes {
                            return Err(format!(
                                "slot {slot} of {at:?} has changed while {reader:?} reads it"
                            ));
                        }
                    }
                }
            }
            Seen::CarryBegan { at, copy, epoch, page, .. } => {
                self.of_pools.insert((*at, *copy), (*epoch, *page));
            }
            Seen::CarryEnded { at, copy } => {
                self.of_pools.remove(&(*at, *copy));
            }
            Seen::PoolPagesBack { at, epoch, pages } => {
                let read = |((of, _), (by, page)): &(&(Life, u64), &(AttachEpoch, u32))| {
                    of == at && by == epoch && pages.contains(page)
                };
                if let Some(((_, copy), (_, page))) = self.of_pools.iter().find(read) {
                    return Err(format!(
                        "page {page} of a pool of {at:?} goes back to its engine while copy {copy} \
                         reads it"
                    ));
                }
            }
            Seen::Crashed { at } => {
                self.open.retain(|(of, _), _| of != at);
                self.of_pools.retain(|(of, _), _| of != at);
            }
            _ => {}
        }
        Ok(())
    }
}
