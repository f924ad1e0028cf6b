//! The life of a slot, as one pure function. Who may call which event is the cache's business
//! ([`crate::cache`]); the whole table is `docs/concepts/slot-states.md`.

use kvasir_proto::Share;

/// Who holds a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// Nobody. Becomes allocated.
    Free,
    /// One share, whose one writer (its engine, or its remote writer) may write it. Becomes
    /// committed, quarantined or free.
    Allocated(Share),
    /// One read of the SSD, which writes it, and the holders of its pins, who do not read it yet.
    /// Becomes committed, or free when it is not wanted or the read has failed.
    Rising { pins: u32 },
    /// The index, and the holders of its pins. Its bytes never change. Becomes free when evicted,
    /// leaving when dropped.
    Committed { pins: u32 },
    /// The holders of its pins alone: it is out of the index. Becomes free with the last pin.
    Leaving { pins: u32 },
    /// Nobody, because a write or a read of an aborted share may still be on its way. Becomes free.
    Quarantined(Share),
}

/// What can happen to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotEvent {
    Reserve(Share),
    /// Its block is on the SSD and wanted here.
    Rise,
    /// The read has ended, and its bytes are what they must be.
    Land,
    /// Its bytes are final; the share that wrote them holds the first pin.
    Seal,
    Pin,
    Unpin,
    /// Room is needed.
    Evict,
    /// It, or a block before it, failed its checksum.
    Drop,
    /// Its share was aborted.
    Quarantine,
    /// Nothing can reach it any more.
    GiveBack,
}

impl SlotState {
    /// The next state, or `None` when the event must not happen in this one.
    pub(crate) fn on(self, event: SlotEvent) -> Option<SlotState> {
        use SlotState::{Allocated, Committed, Free, Leaving, Quarantined, Rising};
        match (self, event) {
            (Free, SlotEvent::Reserve(share)) => Some(Allocated(share)),
            (Free, SlotEvent::Rise) => Some(Rising { pins: 0 }),
            (Rising { pins }, SlotEvent::Pin) => Some(Rising { pins: pins.checked_add(1)? }),
            (Rising { pins: 1.. }, SlotEvent::Unpin) => Some(self.with_one_pin_less()),
            (Rising { pins }, SlotEvent::Land) => Some(Committed { pins }),
            (Rising { pins: 0 }, SlotEvent::GiveBack) => Some(Free),
            (Allocated(_), SlotEvent::Seal) => Some(Committed { pins: 1 }),
            (Allocated(share), SlotEvent::Quarantine) => Some(Quarantined(share)),
            (Allocated(_) | Quarantined(_), SlotEvent::GiveBack) => Some(Free),
            (Committed { pins }, SlotEvent::Pin) => Some(Committed { pins: pins.checked_add(1)? }),
            (Committed { pins: 1.. }, SlotEvent::Unpin) => Some(self.with_one_pin_less()),
            (Leaving { pins: 2.. }, SlotEvent::Unpin) => Some(self.with_one_pin_less()),
            (Leaving { pins: 1 }, SlotEvent::Unpin) => Some(Free),
            (Committed { pins: 0 }, SlotEvent::Evict | SlotEvent::Drop) => Some(Free),
            (Committed { pins }, SlotEvent::Drop) => Some(Leaving { pins }),
            _ => None,
        }
    }

    pub(crate) fn pins(self) -> u32 {
        match self {
            SlotState::Rising { pins }
            | SlotState::Committed { pins }
            | SlotState::Leaving { pins } => pins,
            SlotState::Free | SlotState::Allocated(_) | SlotState::Quarantined(_) => 0,
        }
    }

    fn with_one_pin_less(self) -> SlotState {
        match self {
            SlotState::Rising { pins } => SlotState::Rising { pins: pins - 1 },
            SlotState::Committed { pins } => SlotState::Committed { pins: pins - 1 },
            SlotState::Leaving { pins } => SlotState::Leaving { pins: pins - 1 },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use kvasir_proto::{Side, TxId};

    use super::*;

    #[test]
    fn the_table_of_slot_states_is_the_one_in_the_file() {
        let share = Share { tx: TxId { conductor_incarnation: 1, serial: 1 }, side: Side::Prefill };
        let states = [
            ("Free", SlotState::Free),
            ("Allocated", SlotState::Allocated(share)),
            ("Promoting/0", SlotState::Rising { pins: 0 }),
            ("Promoting/1", SlotState::Rising { pins: 1 }),
            ("Promoting/max", SlotState::Rising { pins: u32::MAX }),
            ("Committed/0", SlotState::Committed { pins: 0 }),
            ("Committed/1", SlotState::Committed { pins: 1 }),
            ("Committed/2", SlotState::Committed { pins: 2 }),
            ("Committed/max", SlotState::Committed { pins: u32::MAX }),
            ("Releasing/1", SlotState::Leaving { pins: 1 }),
            ("Releasing/2", SlotState::Leaving { pins: 2 }),
            ("Quarantined", SlotState::Quarantined(share)),
        ];
        let events = [
            ("Reserve", SlotEvent::Reserve(share)),
            ("Promote", SlotEvent::Rise),
            ("Land", SlotEvent::Land),
            ("Seal", SlotEvent::Seal),
            ("Pin", SlotEvent::Pin),
            ("Unpin", SlotEvent::Unpin),
            ("Evict", SlotEvent::Evict),
            ("Drop", SlotEvent::Drop),
            ("Quarantine", SlotEvent::Quarantine),
            ("GiveBack", SlotEvent::GiveBack),
        ];
        let name = |state: SlotState| match state {
            SlotState::Free => "Free".to_owned(),
            SlotState::Allocated(_) => "Allocated".to_owned(),
            SlotState::Rising { pins } => format!("Promoting/{pins}"),
            SlotState::Committed { pins } => format!("Committed/{pins}"),
            SlotState::Leaving { pins } => format!("Releasing/{pins}"),
            SlotState::Quarantined(_) => "Quarantined".to_owned(),
        };
        let mut table = String::new();
        let columns: Vec<&str> = events.iter().map(|(name, _)| *name).collect();
        writeln!(table, "| | {} |", columns.join(" | ")).expect("to a string");
        writeln!(table, "| --- |{}", " --- |".repeat(columns.len())).expect("to a string");
        for (state_name, state) in states {
            let next =
                |(_, event): &(&str, SlotEvent)| state.on(*event).map_or(String::new(), name);
            let cells: Vec<String> = events.iter().map(next).collect();
            writeln!(table, "| **{state_name}** | {} |", cells.join(" | ")).expect("to a string");
        }
        let page = include_str!("../../../docs/concepts/slot-states.md");
        assert!(page.contains(&table), "docs/concepts/slot-states.md must contain:\n{table}");
    }
}
