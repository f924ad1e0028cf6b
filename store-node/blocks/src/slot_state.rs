//! The life of a slot, as one pure function. Who may call which event is the cache's business
//! ([`crate::cache`]); the whole table is `tests/golden/slot_states.txt`.

use kvasir_proto::Share;

/// Who holds a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SlotState {
    /// Nobody. Becomes allocated.
    Free,
    /// One share, whose one writer (its engine, or its remote writer) may write it. Becomes
    /// committed, quarantined or free.
    Allocated(Share),
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
        use SlotState::{Allocated, Committed, Free, Leaving, Quarantined};
        match (self, event) {
            (Free, SlotEvent::Reserve(share)) => Some(Allocated(share)),
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
            SlotState::Committed { pins } | SlotState::Leaving { pins } => pins,
            SlotState::Free | SlotState::Allocated(_) | SlotState::Quarantined(_) => 0,
        }
    }

    fn with_one_pin_less(self) -> SlotState {
        match self {
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
            ("Committed/0", SlotState::Committed { pins: 0 }),
            ("Committed/1", SlotState::Committed { pins: 1 }),
            ("Committed/2", SlotState::Committed { pins: 2 }),
            ("Committed/max", SlotState::Committed { pins: u32::MAX }),
            ("Leaving/1", SlotState::Leaving { pins: 1 }),
            ("Leaving/2", SlotState::Leaving { pins: 2 }),
            ("Quarantined", SlotState::Quarantined(share)),
        ];
        let events = [
            ("Reserve", SlotEvent::Reserve(share)),
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
            SlotState::Committed { pins } => format!("Committed/{pins}"),
            SlotState::Leaving { pins } => format!("Leaving/{pins}"),
            SlotState::Quarantined(_) => "Quarantined".to_owned(),
        };
        let mut table = String::new();
        for (state_name, state) in states {
            for (event_name, event) in events {
                let next = state.on(event).map_or("refused".to_owned(), name);
                writeln!(table, "{state_name:<14}{event_name:<11}{next}").expect("to a string");
            }
        }
        let golden = include_str!("../tests/golden/slot_states.txt");
        assert!(table == golden, "the table is now:\n{table}");
    }
}
