//! I9: never is a slot written or given out while a read of it is unfinished.

use std::collections::BTreeMap;

use super::Checker;
use crate::content::PageBytes;
use crate::seen::{Life, Place, Reader, Seen};

#[derive(Debug, Default)]
pub struct Reads {
    open: BTreeMap<(Life, Reader), BTreeMap<u32, Option<PageBytes>>>,
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
            Seen::Crashed { at } => self.open.retain(|(of, _), _| of != at),
            _ => {}
        }
        Ok(())
    }
}
