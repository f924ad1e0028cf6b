//! I2: never is a slot, an immediate or room for a tail given out while a write may still land in it.
//! A write may land from the moment that somebody is told where to write until it was said, to whoever
//! waits for that, that nothing of it is under way and nothing follows. Whoever says so is not believed:
//! what lands in memory is seen there, and a byte that lands after it is a violation, as is one in a place
//! that its writer was not given.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_proto::Share;

use super::Checker;
use crate::seen::{Life, Owner, Place, Seen};

/// Writers that may still write: in a node's places, by what they were told.
#[derive(Debug, Default)]
pub(super) struct Reuse {
    remote: BTreeMap<(Life, u32), Remote>,
    /// Slots that a read of the SSD writes.
    rises: BTreeMap<(Life, u32), u64>,
    /// The same of copies out of engines' pools, by slot.
    carries: BTreeMap<(Life, u32), u64>,
    /// Writes under way.
    open: BTreeSet<(Life, u32, (u64, u64))>,
    /// Pushes that were said to be over, and when.
    over: BTreeMap<(Life, u32), u64>,
    /// Whose each place is.
    owners: BTreeMap<(Life, Place), Owner>,
}

/// Longer than a call is under way that could begin a push that is over.
const LOOKED_AT_US: u64 = 10_000_000;

#[derive(Debug)]
struct Remote {
    share: Share,
    places: Vec<Place>,
}

impl Reuse {
    fn writer_of(&self, at: Life, place: Place) -> Option<String> {
        if let Place::Slot(slot) = place
            && let Some(rise) = self.rises.get(&(at, slot))
        {
            return Some(format!("read {rise} of the SSD"));
        }
        if let Place::Slot(slot) = place
            && let Some(copy) = self.carries.get(&(at, slot))
        {
            return Some(format!("copy {copy} out of a pool"));
        }
        let mut remote = self.remote.range((at, 0)..=(at, u32::MAX));
        let (key, writer) = remote.find(|((_, imm), writer)| {
            place == Place::Imm(*imm) || writer.places.contains(&place)
        })?;
        Some(format!("the writer of {} with immediate {}", writer.share, key.1))
    }

    /// Nothing of this writer lands any more. Its immediate is used by nobody else for long.
    fn end(&mut self, at: Life, imm: u32) -> Option<Remote> {
        self.owners.remove(&(at, Place::Imm(imm)));
        self.remote.remove(&(at, imm))
    }
}

impl Checker for Reuse {
    fn name(&self) -> &'static str {
        "I2 reuse"
    }

    fn see(&mut self, now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::Landed { at, imm, place } => {
                let Some(writer) = self.remote.get(&(*at, *imm)) else {
                    return Err(format!(
                        "bytes with immediate {imm} land in {place:?} of {at:?}, and their writer was \
                         said to have ended"
                    ));
                };
                let owner = self.owners.get(&(*at, *place));
                if !writer.places.contains(place) || owner != Some(&Owner::Share(writer.share)) {
                    return Err(format!(
                        "bytes with immediate {imm} land in {place:?} of {at:?}, which is {owner:?}'s"
                    ));
                }
            }
            Seen::GivenOut { at, place, to } => {
                self.owners.insert((*at, *place), *to);
                if let Some(writer) = self.writer_of(*at, *place) {
                    return Err(format!(
                        "{place:?} of {at:?} is given to {to:?}, and {writer} may still write there"
                    ));
                }
                if let (Owner::Rise(rise), Place::Slot(slot)) = (to, place) {
                    self.rises.insert((*at, *slot), *rise);
                }
            }
            Seen::EngineMayWrite { at, share, slots } => {
                let written = |slot: &u32| Some((*slot, self.writer_of(*at, Place::Slot(*slot))?));
                if let Some((slot, writer)) = slots.iter().find_map(written) {
                    return Err(format!(
                        "the engine may write slot {slot} of {at:?} for {share}, and {writer} may \
                         still write there"
                    ));
                }
            }
            Seen::PeerMayWrite { at, share, imm, places } => {
                let writer = Remote { share: *share, places: places.clone() };
                self.remote.insert((*at, *imm), writer);
                self.over.remove(&(*at, *imm));
            }
            Seen::WriteBegan { to, imm, write } => {
                if self.over.contains_key(&(*to, *imm)) {
                    return Err(format!(
                        "write {write:?} to {to:?} with immediate {imm} begins after the push was over"
                    ));
                }
                self.open.insert((*to, *imm, *write));
            }
            Seen::WriteEnded { to, imm, write } => {
                self.open.remove(&(*to, *imm, *write));
            }
            Seen::Counted { at, imm } => drop(self.end(*at, *imm)),
            Seen::PushOver { to, imm } => {
                let all = (*to, *imm, (0, 0))..=(*to, *imm, (u64::MAX, u64::MAX));
                if let Some((.., write)) = self.open.range(all).next() {
                    return Err(format!(
                        "the push to {to:?} with immediate {imm} is said to be over, and write \
                         {write:?} is under way"
                    ));
                }
                // A writer that is asked about what it never began says so of any immediate.
                if self.end(*to, *imm).is_some() {
                    self.over.insert((*to, *imm), now_us);
                    self.over.retain(|_, since_us| *since_us + LOOKED_AT_US > now_us);
                }
            }
            Seen::CutOff { at, imms } => {
                imms.iter().for_each(|imm| drop(self.end(*at, *imm)));
            }
            Seen::CarryBegan { at, copy, slot, .. } => {
                if let Some(writer) = self.writer_of(*at, Place::Slot(*slot)) {
                    return Err(format!(
                        "copy {copy} writes slot {slot} of {at:?}, and {writer} may still write there"
                    ));
                }
                self.carries.insert((*at, *slot), *copy);
            }
            Seen::CarryEnded { at, copy } => {
                self.carries.retain(|(of, _), by| of != at || by != copy);
            }
            Seen::RiseOver { at, rise } => self.rises.retain(|(of, _), by| of != at || by != rise),
            Seen::Crashed { at } => {
                self.remote.retain(|(of, _), _| of != at);
                self.rises.retain(|(of, _), _| of != at);
                self.carries.retain(|(of, _), _| of != at);
                self.owners.retain(|(of, _), _| of != at);
                self.open.retain(|(of, ..)| of != at);
                self.over.retain(|(of, _), _| of != at);
            }
            _ => {}
        }
        Ok(())
    }
}
