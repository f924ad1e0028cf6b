//! I6: never does a lost conductor, engine or peer leave a lock or a pin for longer than its lease. What
//! is in quarantine lasts until its writer is cut off, and that comes to an end too.
//!
//! What is held is not asked of the node: from when to when it may hold a share follows from what it was
//! asked and has answered, and at the end a prompt as long as its memory must find room.

use std::collections::BTreeMap;

use kvasir_proto::Share;

use super::Checker;
use crate::plan::Plan;
use crate::seen::{Held, Life, Seen};

/// After the lease, and after the node and its engine stood still: a tick, a stop that is not answered, a
/// cut-off that takes its time, a transfer that is given up.
const STOPPED_US: u64 = 900_000;
/// While cutting off fails.
const CUTS_FAIL_US: u64 = 900_000;
/// After the lease of a share that nobody has to be stopped for, beside two ticks.
const ALONE_US: u64 = 20_000;

#[derive(Debug)]
pub(super) struct Leases {
    shares: BTreeMap<(Life, Share), Lease>,
    stands_still_until_us: BTreeMap<usize, u64>,
    looked_us: u64,
    tick_us: u64,
}

#[derive(Debug)]
struct Lease {
    until_us: u64,
    /// An engine, a writer or a push has to be stopped first.
    waits_for_others: bool,
}

impl Leases {
    pub(super) fn new(plan: &Plan) -> Self {
        Leases {
            shares: BTreeMap::new(),
            stands_still_until_us: BTreeMap::new(),
            looked_us: 0,
            tick_us: plan.tick_us,
        }
    }

    fn renewed(&mut self, at: Life, share: Share, until_us: u64) {
        if let Some(lease) = self.shares.get_mut(&(at, share)) {
            lease.until_us = lease.until_us.max(until_us);
        }
    }

    fn is_late(&self, now_us: u64, (at, _): &(Life, Share), lease: &Lease) -> bool {
        let stood_us = self.stands_still_until_us.get(&at.node).copied().unwrap_or(0);
        let more_us = match lease.waits_for_others {
            true => STOPPED_US + CUTS_FAIL_US,
            false => 2 * self.tick_us + ALONE_US,
        };
        now_us > lease.until_us.max(stood_us) + more_us
    }
}

impl Checker for Leases {
    fn name(&self) -> &'static str {
        "I6 leases"
    }

    fn see(&mut self, now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::Allocated { at, share, lease_ms, waits_for_others } => {
                let lease = Lease {
                    until_us: now_us + lease_ms * 1_000,
                    waits_for_others: *waits_for_others,
                };
                self.shares.insert((*at, *share), lease);
            }
            Seen::Renewed { at, share, lease_ms } => {
                self.renewed(*at, *share, now_us + lease_ms * 1_000);
            }
            Seen::TakenUp { at, share } => {
                if let Some(lease) = self.shares.get_mut(&(*at, *share)) {
                    lease.waits_for_others = true;
                }
            }
            Seen::Ended { at, share } => {
                self.shares.remove(&(*at, *share));
            }
            Seen::StandsStill { node, until_us } => {
                let until = self.stands_still_until_us.entry(*node).or_insert(0);
                *until = (*until).max(*until_us);
            }
            Seen::Crashed { at } => self.shares.retain(|(of, _), _| of != at),
            Seen::AtRest { at, has_room: Err(why), says } => {
                return Err(format!(
                    "nothing is under way, and {at:?} has no room for a prompt as long as its memory \
                     ({why}); it says that it holds {says:?}"
                ));
            }
            Seen::AtRest { at, says, .. } if *says != Held::default() => {
                return Err(format!("nothing is under way, and {at:?} holds {says:?}"));
            }
            _ => {}
        }
        if now_us < self.looked_us + self.tick_us {
            return Ok(());
        }
        self.looked_us = now_us;
        let late = self.shares.iter().find(|(key, lease)| self.is_late(now_us, key, lease));
        match late {
            Some(((at, share), lease)) => Err(format!(
                "{share} is held by {at:?}, and its lease was over at {} us",
                lease.until_us
            )),
            None => Ok(()),
        }
    }
}
