//! DESIGN §3: an abort of an unknown transaction leaves a tombstone, so that a late `Allocate` finds it;
//! what has ended does not begin anew.

use std::collections::BTreeMap;

use kvasir_proto::Share;

use super::Checker;
use crate::seen::{Life, Seen};

/// Longer than any call is under way, and less than a node remembers what has ended.
const LOOKED_AT_US: u64 = 4_000_000;

#[derive(Debug, Default)]
pub(super) struct Transactions {
    /// Since when.
    over: BTreeMap<(Life, Share), u64>,
    cleaned_us: u64,
}

impl Checker for Transactions {
    fn name(&self) -> &'static str {
        "transactions"
    }

    fn see(&mut self, now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::Ended { at, share } | Seen::Tombstoned { at, share } => {
                self.over.insert((*at, *share), now_us);
            }
            Seen::Allocated { at, share, .. } if self.over.contains_key(&(*at, *share)) => {
                return Err(format!("{share} is over on {at:?}, and was allocated again"));
            }
            Seen::Crashed { at } => self.over.retain(|(of, _), _| of != at),
            _ => {}
        }
        if now_us > self.cleaned_us + LOOKED_AT_US {
            self.cleaned_us = now_us;
            self.over.retain(|_, since_us| *since_us + LOOKED_AT_US > now_us);
        }
        Ok(())
    }
}
