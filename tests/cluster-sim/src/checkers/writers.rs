//! I5: never do two transactions write one slot; and nobody writes a block that is committed.

use std::collections::BTreeMap;

use kvasir_proto::Share;

use super::Checker;
use crate::seen::{Life, Owner, Place, Seen};

/// Whose engine may write a slot.
#[derive(Debug, Default)]
pub(super) struct Writers {
    engines: BTreeMap<(Life, u32), Share>,
    /// Slots that copies out of the engines' pools write.
    carries: BTreeMap<(Life, u32), u64>,
    /// Whom a slot was given to last.
    owners: BTreeMap<(Life, u32), Owner>,
}

impl Checker for Writers {
    fn name(&self) -> &'static str {
        "I5 writers"
    }

    fn see(&mut self, _now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::GivenOut { at, place: Place::Slot(slot), to } => {
                if let Some(share) = self.engines.get(&(*at, *slot)) {
                    return Err(format!(
                        "slot {slot} of {at:?} is given to {to:?}, and the engine may still write it \
                         for {share}"
                    ));
                }
                self.owners.insert((*at, *slot), *to);
            }
            Seen::EngineMayWrite { at, share, slots } => {
                for slot in slots {
                    if self.owners.get(&(*at, *slot)) != Some(&Owner::Share(*share)) {
                        return Err(format!(
                            "the engine may write slot {slot} of {at:?} for {share}, which is {:?}'s",
                            self.owners.get(&(*at, *slot))
                        ));
                    }
                    if let Some(other) = self.engines.insert((*at, *slot), *share)
                        && other != *share
                    {
                        return Err(format!(
                            "slot {slot} of {at:?} may be written for {share} and for {other}"
                        ));
                    }
                }
            }
            Seen::PeerMayWrite { at, share, places, .. } => {
                for place in places {
                    let Place::Slot(slot) = place else { continue };
                    if self.owners.get(&(*at, *slot)) != Some(&Owner::Share(*share)) {
                        return Err(format!(
                            "a peer may write slot {slot} of {at:?} for {share}, which is {:?}'s",
                            self.owners.get(&(*at, *slot))
                        ));
                    }
                }
            }
            Seen::CarryBegan { at, copy, slot, .. } => {
                if let Some(share) = self.engines.get(&(*at, *slot)) {
                    return Err(format!(
                        "copy {copy} writes slot {slot} of {at:?}, and the engine may for {share}"
                    ));
                }
                self.carries.insert((*at, *slot), *copy);
            }
            Seen::CarryEnded { at, copy } => {
                self.carries.retain(|(of, _), by| of != at || by != copy);
            }
            Seen::PageSealed { at, slot, .. } => {
                self.engines.remove(&(*at, *slot));
            }
            Seen::EngineStopped { at, share } => {
                self.engines.retain(|(of, _), by| of != at || by != share);
            }
            Seen::Listing { at, blocks } => {
                let mut own = blocks
                    .iter()
                    .filter_map(|block| Some((block.slot, self.engines.get(&(*at, block.slot))?)));
                if let Some((slot, share)) = own.next() {
                    return Err(format!(
                        "slot {slot} of {at:?} is committed, and the engine may write it for {share}"
                    ));
                }
                let mut carried = blocks
                    .iter()
                    .filter_map(|block| Some((block.slot, self.carries.get(&(*at, block.slot))?)));
                if let Some((slot, copy)) = carried.next() {
                    return Err(format!(
                        "slot {slot} of {at:?} is committed, and copy {copy} writes it"
                    ));
                }
            }
            Seen::Crashed { at } => {
                self.engines.retain(|(of, _), _| of != at);
                self.carries.retain(|(of, _), _| of != at);
                self.owners.retain(|(of, _), _| of != at);
            }
            _ => {}
        }
        Ok(())
    }
}
