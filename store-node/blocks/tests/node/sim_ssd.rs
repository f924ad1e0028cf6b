//! The simulation's SSD: what the shell would do with one, in any order, with failures, hangs, losses
//! and restarts. What it holds is what it was given, so whatever rises must be right.
//!
//! Tenants keep contexts, give them other times and drop them, and what is listed must be what they were told.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::{
    Action, ContextName, KeepError, KeepRequest, RiseError, SinkError, SsdBlock, SsdSize,
};
use kvasir_proto::{BlockKey, Mark, Share, Side, SlotIndex, Tenant, TxId};

use crate::checker::Hand;
use crate::simulation::World;

pub(crate) const EXTENT_BYTES: u64 = 10;
pub(crate) const LAYOUT: u64 = 3;
const SIZE: SsdSize = SsdSize { bytes_max: 200, context_bytes_max: 120, tenant_bytes_max: 90 };

/// A block that is written, or one that gets another mark.
#[derive(Debug)]
enum Writing {
    Block(SsdBlock),
    Mark(BlockKey, Option<Mark>),
}

/// What is being written for a tenant.
#[derive(Debug)]
pub(crate) enum Promise {
    Keep(KeepRequest),
    Extend(ContextName, u64),
    Drop(ContextName),
}

#[derive(Debug, Default)]
pub(crate) struct SimSsd {
    pub stored: BTreeMap<BlockKey, SsdBlock>,
    sinks: Vec<(u64, Writing)>,
    rises: Vec<(u64, SlotIndex, BlockKey)>,
    /// What was promised to be durable, by the number of the promise.
    pub keeps: BTreeMap<u64, Promise>,
    pub kept_total: u64,
    pub extended_total: u64,
    pub dropped_total: u64,
    lost: BTreeSet<BlockKey>,
    is_up: bool,
}

impl SimSsd {
    pub(crate) fn is_idle(&self) -> bool {
        self.sinks.is_empty() && self.rises.is_empty()
    }
}

/// Stands for a read or write of the SSD in the checker's books.
fn as_share(incarnation: u64, serial: u64) -> Share {
    Share { tx: TxId { conductor_incarnation: incarnation, serial }, side: Side::Source }
}

impl World {
    pub(crate) fn ssd_begins(&mut self, action: Action) {
        match action {
            Action::Sink { sink, slot, generation, block, .. } => {
                assert_eq!(self.blocks.generation(slot), Some(generation));
                self.checker.held(&[block.key], &[slot]);
                self.checker.read_begin(&self.blocks, as_share(3, sink), &[slot]);
                self.ssd.sinks.push((sink, Writing::Block(block)));
            }
            Action::Rewrite { sink, key, mark } => {
                self.ssd.sinks.push((sink, Writing::Mark(key, mark)));
            }
            Action::Rise { rise, slot, key } => {
                self.checker.hand_out(as_share(2, rise), &[slot]);
                self.checker.may_write(as_share(2, rise), Hand::Remote, &[slot]);
                self.ssd.rises.push((rise, slot, key));
            }
            other => panic!("{other:?} is nothing for the SSD"),
        }
    }

    pub(crate) fn ssd_works(&mut self) {
        if self.random.one_in(2) && !self.ssd.sinks.is_empty() {
            // The log answers in order.
            let (sink, writing) = self.ssd.sinks.remove(0);
            self.checker.reads_end(as_share(3, sink));
            let result = self.end_sink(writing);
            self.blocks.sunk(self.now_ms, sink, result);
        } else if !self.ssd.rises.is_empty() && self.random.one_in(3) {
            let at = self.random.below(self.ssd.rises.len());
            let (rise, slot, key) = self.ssd.rises.swap_remove(at);
            let share = as_share(2, rise);
            let result = if self.random.one_in(8) {
                Err(RiseError::Failed)
            } else if self.ssd.stored.contains_key(&key) {
                self.checker.write(share, Hand::Remote, slot, Some(key));
                Ok(1)
            } else {
                Err(RiseError::Gone)
            };
            self.checker.stopped(share, Hand::Remote);
            self.blocks.risen(self.now_ms, rise, result);
        }
        self.learn_of_aborts();
    }

    fn end_sink(&mut self, writing: Writing) -> Result<(), SinkError> {
        if self.random.one_in(10) {
            return Err(SinkError::Failed);
        }
        match writing {
            Writing::Block(block) => drop(self.ssd.stored.insert(block.key, block)),
            Writing::Mark(key, mark) => {
                self.ssd.stored.get_mut(&key).ok_or(SinkError::Gone)?.mark = mark;
            }
        }
        Ok(())
    }

    /// The disk fails and comes back with what it held, or is there for the first time.
    pub(crate) fn ssd_restarts(&mut self) {
        self.blocks.set_extents(LAYOUT, EXTENT_BYTES);
        self.blocks.ssd_gone();
        if !self.ssd.is_up || !self.random.one_in(8) {
            let there = self.ssd.stored.values().copied().collect();
            self.blocks.ssd_ready(SIZE, there);
            self.blocks.expire(self.now_ms);
            self.ssd.is_up = true;
        } else {
            self.ssd.is_up = false;
        }
    }

    /// A block is found rotten.
    pub(crate) fn ssd_loses(&mut self) {
        let nth = self.random.below(24);
        let Some(key) = self.ssd.stored.keys().nth(nth).copied() else { return };
        self.ssd.stored.remove(&key);
        self.ssd.lost.insert(key);
        self.blocks.ssd_lost(key);
    }

    pub(crate) fn keep(&mut self) {
        let (namespace, keys) = self.keys(4);
        let tenant = Tenant(self.random.below(2) as u64);
        let expires_unix_ms = self.now_ms + self.random.below(400) as u64;
        let created_unix_ms = Some(self.now_ms).filter(|_| !self.random.one_in(4));
        let request =
            KeepRequest { namespace, keys, tenant, expires_unix_ms, created_unix_ms, copies: 1 };
        if let Ok(number) = self.blocks.keep(self.now_ms, &request) {
            self.ssd.keeps.insert(number, Promise::Keep(request));
        }
    }

    /// A context gets another time, or is dropped: one that is listed, or one that may not be there.
    pub(crate) fn change_context(&mut self) {
        // A shell that has an SSD which cannot be used does not know what is there.
        if !self.ssd.is_up && !self.ssd.stored.is_empty() {
            return;
        }
        let tenant = Tenant(self.random.below(2) as u64);
        let all = self.blocks.contexts(tenant, None, 100, self.now_ms);
        let context = match all.get(self.random.below(all.len() + 1)) {
            Some(context) => {
                ContextName { tenant, namespace: context.namespace, last: context.last }
            }
            None => {
                let (namespace, keys) = self.keys(4);
                let last = keys[self.random.below(keys.len())];
                ContextName { tenant, namespace, last }
            }
        };
        let is_there =
            all.iter().any(|of| (of.namespace, of.last) == (context.namespace, context.last));
        let expires_unix_ms = self.now_ms + self.random.below(400) as u64;
        let (promise, begun) = match self.random.one_in(2) {
            true => {
                let begun = self.blocks.extend_context(self.now_ms, &context, expires_unix_ms);
                (Promise::Extend(context, expires_unix_ms), begun)
            }
            false => (Promise::Drop(context), self.blocks.delete_context(self.now_ms, &context)),
        };
        match begun {
            Ok(number) => drop(self.ssd.keeps.insert(number, promise)),
            Err(KeepError::NoContext) => assert!(!is_there, "{context:?} is listed"),
            Err(_) => {}
        }
    }

    pub(crate) fn kept(&mut self, keep: u64, blocks: Option<u32>, mark: Option<Mark>) {
        let promise = self.ssd.keeps.remove(&keep).expect("a promise");
        let Some(blocks) = blocks else { return };
        let now_ms = self.now_ms;
        let until = |world: &World, of: &ContextName| {
            let all = world.blocks.contexts(of.tenant, None, 100, now_ms);
            let found = all.iter().find(|it| (it.namespace, it.last) == (of.namespace, of.last));
            found.map(|context| context.expires_unix_ms)
        };
        let request = match promise {
            Promise::Keep(request) => request,
            Promise::Extend(context, expires_unix_ms) => {
                self.ssd.extended_total += 1;
                let want = Some(expires_unix_ms).filter(|until_ms| *until_ms > now_ms);
                // It may have been lost meanwhile, and others' may be in the object store.
                let got = until(self, &context);
                assert!(
                    got == want || got.is_none() || !self.ssd.lost.is_empty(),
                    "{got:?} {want:?}"
                );
                return;
            }
            Promise::Drop(context) => {
                self.ssd.dropped_total += 1;
                // What the object store has beyond what a node may know comes to light later.
                let got = until(self, &context);
                let is_other = got.is_some() && self.bucket.has_marked(context.last);
                assert!(got.is_none() || is_other, "{context:?} was dropped: {got:?}");
                return;
            }
        };
        if let (Some(mark), Some(&last)) = (mark, request.keys[..blocks as usize].last()) {
            let name = ContextName { tenant: request.tenant, namespace: request.namespace, last };
            assert!(mark.expires_unix_ms >= request.expires_unix_ms, "{mark:?} of {request:?}");
            let is_promised = mark.created_unix_ms.is_some() && mark.expires_unix_ms > now_ms;
            if is_promised && self.ssd.lost.is_empty() {
                assert!(until(self, &name) >= Some(mark.expires_unix_ms), "{name:?} is not listed");
            }
        }
        self.ssd.kept_total += u64::from(blocks > 0);
        let counts = self.blocks.counts();
        assert!(counts.ssd_bytes <= SIZE.bytes_max, "{counts:?}");
        assert!(counts.context_bytes <= SIZE.context_bytes_max, "{counts:?}");
        // What is promised is on the disk or in the object store, from the first block on, or its time is over
        // already.
        for key in &request.keys[..blocks as usize] {
            let is_promised = request.expires_unix_ms > self.now_ms && self.ssd.lost.is_empty();
            let stored = self.ssd.stored.contains_key(key) || self.bucket.has(*key);
            assert!(stored || !is_promised, "a block is kept and not stored");
        }
    }
}
