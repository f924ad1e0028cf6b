//! Beginnings of prompts that are on their way to a node, so that requests that begin alike do not each bring
//! their own: the first one fetches or computes it, and those that are placed beside it meanwhile wait for that,
//! as long as it is predicted to be there no later than what they would bring themselves.
//!
//! Whoever waits holds nothing on any node, and is told at once when the one it waits for has failed: the next one
//! then brings it. What is known here is only what this conductor serves itself, and may be wrong: a node says what
//! it has when slots are allocated, and what it has not is fetched or computed as was planned.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvasir_proto::{BlockKey, Incarnation, NodeId};
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Arrivals {
    under_way: Mutex<UnderWay>,
}

#[derive(Debug, Default)]
struct UnderWay {
    next_id: u64,
    by_node: HashMap<NodeId, Vec<Arrival>>,
}

/// How far a beginning has come. The order is that of time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    UnderWay,
    /// What was to be fetched is there.
    Fetched,
    /// All of it is.
    Computed,
}

/// What a request is about to bring to a node.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub node: NodeId,
    pub incarnation: Incarnation,
    /// Of the whole prompt.
    pub keys: Arc<[BlockKey]>,
    /// Leading blocks that are there already, as far as is known.
    pub cached_blocks: usize,
    /// Those up to here are fetched; 0 when none are.
    pub fetched_blocks: usize,
    /// From now on.
    pub fetched_in: Duration,
    pub computed_in: Duration,
    /// Others find it there when it is.
    pub is_kept: bool,
}

impl Plan {
    /// When so many leading blocks are there.
    pub(super) fn there_in(&self, blocks: usize) -> Duration {
        if blocks <= self.cached_blocks {
            Duration::ZERO
        } else if blocks <= self.fetched_blocks {
            self.fetched_in
        } else {
            let fetched = self.fetched_blocks.max(self.cached_blocks);
            let (computed, all) = (blocks.saturating_sub(fetched), self.keys.len());
            let share = computed as f64 / all.saturating_sub(fetched).max(1) as f64;
            let computing = self.computed_in.saturating_sub(self.fetched_in);
            self.fetched_in + computing.mul_f64(share.min(1.0))
        }
    }
}

#[derive(Debug)]
struct Arrival {
    id: u64,
    incarnation: Incarnation,
    keys: Arc<[BlockKey]>,
    fetched_blocks: usize,
    fetched_at: Instant,
    computed_at: Instant,
    stage: watch::Receiver<Stage>,
}

impl Arrival {
    /// Leading blocks that a prompt with these keys shares with it.
    fn shared(&self, keys: &[BlockKey]) -> usize {
        self.keys.iter().zip(keys).take_while(|(one, other)| one == other).count()
    }
}

/// What a request does about the beginning of its prompt.
#[derive(Debug)]
pub(super) enum Turn<'a> {
    /// It brings it, and tells others how far it is.
    Leads(Lead<'a>),
    /// Another one does.
    Follows(Awaited),
}

/// How waiting ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    There,
    /// The one that was to bring it failed, or went.
    Failed,
    /// It took too long.
    Late,
}

impl Outcome {
    pub(super) fn name(self) -> &'static str {
        match self {
            Outcome::There => "hit",
            Outcome::Failed => "failed",
            Outcome::Late => "timeout",
        }
    }
}

impl Arrivals {
    /// Whether to wait for somebody, decided and noted as one step: of many that come at once one leads.
    pub(super) fn enter(&self, plan: &Plan, now: Instant) -> Turn<'_> {
        let mut under_way = self.lock();
        let beside = under_way.by_node.get(&plan.node).into_iter().flatten();
        let worth = beside.filter_map(|arrival| {
            let shared = arrival.shared(&plan.keys);
            let is_fetched = shared <= arrival.fetched_blocks;
            let (needed, at) = match is_fetched {
                true => (Stage::Fetched, arrival.fetched_at),
                false => (Stage::Computed, arrival.computed_at),
            };
            let is_sooner = at.saturating_duration_since(now) <= plan.there_in(shared);
            let is_it = arrival.incarnation == plan.incarnation
                && shared > plan.cached_blocks
                && *arrival.stage.borrow() < needed
                && is_sooner;
            is_it
                .then(|| (shared, Awaited { stage: arrival.stage.clone(), needed, blocks: shared }))
        });
        if let Some((_, awaited)) = worth.max_by_key(|(shared, _)| *shared) {
            return Turn::Follows(awaited);
        }
        let (tell, stage) = watch::channel(Stage::UnderWay);
        let id = under_way.next_id;
        under_way.next_id += 1;
        if plan.is_kept && plan.keys.len() > plan.cached_blocks {
            under_way.by_node.entry(plan.node.clone()).or_default().push(Arrival {
                id,
                incarnation: plan.incarnation,
                keys: Arc::clone(&plan.keys),
                fetched_blocks: plan.fetched_blocks,
                fetched_at: now + plan.fetched_in,
                computed_at: now + plan.computed_in,
                stage,
            });
        }
        Turn::Leads(Lead { arrivals: self, node: plan.node.clone(), id, stage: tell })
    }

    fn lock(&self) -> MutexGuard<'_, UnderWay> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The one that brings a beginning. Dropped before it is there, it has failed.
#[derive(Debug)]
pub(super) struct Lead<'a> {
    arrivals: &'a Arrivals,
    node: NodeId,
    id: u64,
    stage: watch::Sender<Stage>,
}

impl Lead<'_> {
    /// It has come so far.
    pub(super) fn reached(&self, stage: Stage) {
        let is_further = |now: &mut Stage| {
            *now < stage && {
                *now = stage;
                true
            }
        };
        if self.stage.send_if_modified(is_further) && stage == Stage::Computed {
            self.leave();
        }
    }

    fn leave(&self) {
        let mut under_way = self.arrivals.lock();
        if let Some(there) = under_way.by_node.get_mut(&self.node) {
            there.retain(|arrival| arrival.id != self.id);
            if there.is_empty() {
                under_way.by_node.remove(&self.node);
            }
        }
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A beginning that another request brings.
#[derive(Debug)]
pub(super) struct Awaited {
    stage: watch::Receiver<Stage>,
    needed: Stage,
    pub blocks: usize,
}

impl Awaited {
    pub(super) async fn there(mut self, until: Instant) -> Outcome {
        let needed = self.needed;
        match timeout_at(until, self.stage.wait_for(|stage| *stage >= needed)).await {
            Ok(Ok(_)) => Outcome::There,
            Ok(Err(_)) => Outcome::Failed,
            Err(_) => Outcome::Late,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(tokens: &[u8]) -> Arc<[BlockKey]> {
        // Like a chain: a key says all that is before it.
        let mut key = [0_u8; 16];
        let mut next = |token: &u8| {
            key = std::array::from_fn(|at| key[at].wrapping_mul(31).wrapping_add(*token));
            BlockKey(key)
        };
        tokens.iter().map(&mut next).collect()
    }

    /// Fetched in 10 ms up to the third block, computed in 50 ms.
    fn plan(tokens: &[u8]) -> Plan {
        Plan {
            node: "a".into(),
            incarnation: Incarnation(1),
            keys: keys(tokens),
            cached_blocks: 0,
            fetched_blocks: 3,
            fetched_in: Duration::from_millis(10),
            computed_in: Duration::from_millis(50),
            is_kept: true,
        }
    }

    fn lead<'a>(arrivals: &'a Arrivals, plan: &Plan, now: Instant) -> Lead<'a> {
        match arrivals.enter(plan, now) {
            Turn::Leads(lead) => lead,
            Turn::Follows(awaited) => panic!("{awaited:?}"),
        }
    }

    fn follow(arrivals: &Arrivals, plan: &Plan, now: Instant) -> Awaited {
        match arrivals.enter(plan, now) {
            Turn::Follows(awaited) => awaited,
            Turn::Leads(lead) => panic!("{lead:?}"),
        }
    }

    #[tokio::test]
    async fn what_is_fetched_is_waited_for_until_then_and_no_longer() {
        let (arrivals, now) = (Arrivals::default(), Instant::now());
        let first = lead(&arrivals, &plan(&[1, 2, 3, 4]), now);
        let awaited = follow(&arrivals, &plan(&[1, 2, 3, 9]), now);
        assert_eq!((awaited.blocks, awaited.needed), (3, Stage::Fetched));
        first.reached(Stage::Fetched);
        assert_eq!(awaited.there(now).await, Outcome::There);
        // It is there: nobody waits for it any more, but for what is computed behind it.
        drop(lead(&arrivals, &plan(&[1, 2, 3, 9]), now));
        let longer = Plan { computed_in: Duration::from_millis(90), ..plan(&[1, 2, 3, 4, 5]) };
        let awaited = follow(&arrivals, &longer, now);
        assert_eq!((awaited.blocks, awaited.needed), (4, Stage::Computed));
        first.reached(Stage::Computed);
        assert_eq!(awaited.there(now).await, Outcome::There);
        drop(lead(&arrivals, &longer, now));
    }

    #[tokio::test]
    async fn of_those_that_waited_for_one_that_failed_one_leads() {
        let (arrivals, now) = (Arrivals::default(), Instant::now());
        let first = lead(&arrivals, &plan(&[1, 2, 3, 4]), now);
        let others = [plan(&[1, 2, 3, 4]), plan(&[1, 2, 3, 4])];
        let awaited = others.each_ref().map(|plan| follow(&arrivals, plan, now));
        drop(first);
        for awaited in awaited {
            assert_eq!(awaited.there(now).await, Outcome::Failed);
        }
        let second = lead(&arrivals, &others[0], now);
        let late = follow(&arrivals, &others[1], now);
        assert_eq!(late.there(now).await, Outcome::Late);
        drop(second);
        assert!(arrivals.lock().by_node.is_empty(), "nothing is left");
    }

    #[test]
    fn nobody_waits_for_what_is_elsewhere_or_there_or_later_than_its_own_or_not_kept() {
        let (arrivals, now) = (Arrivals::default(), Instant::now());
        let _first = lead(&arrivals, &plan(&[1, 2, 3, 4]), now);
        for other in [
            Plan { node: "b".into(), ..plan(&[1, 2, 3, 4]) },
            Plan { incarnation: Incarnation(2), ..plan(&[1, 2, 3, 4]) },
            Plan { cached_blocks: 3, ..plan(&[1, 2, 3, 9]) },
            Plan { fetched_in: Duration::from_millis(9), ..plan(&[1, 2, 3, 9]) },
            plan(&[7, 2, 3, 4]),
        ] {
            let other = Plan { is_kept: false, ..other };
            drop(lead(&arrivals, &other, now));
        }
        // Some time later it is nearer.
        let other = Plan { fetched_in: Duration::from_millis(9), ..plan(&[1, 2, 3, 9]) };
        follow(&arrivals, &other, now + Duration::from_millis(1));

        let private = Plan { is_kept: false, ..plan(&[8, 8, 8, 8]) };
        let _private = lead(&arrivals, &private, now);
        drop(lead(&arrivals, &plan(&[8, 8, 8, 8]), now));
    }

    #[test]
    fn what_is_computed_takes_its_share_of_the_time() {
        let plan = plan(&[1, 2, 3, 4, 5, 6, 7]);
        let there_in = |blocks| plan.there_in(blocks).as_millis();
        assert_eq!([0, 1, 3, 4, 5, 7].map(there_in), [0, 10, 10, 20, 30, 50]);
    }
}
