//! Whose turn it is, where requests wait: a line of requests of several tenants, in order of priority and,
//! among equals, by deficit round robin over what they cost in tokens.
//!
//! - *Tenants.* In a round each tenant that waits may use its quantum, so many tokens times its weight. One whose
//!   quantum, with what it has left from rounds before, covers its next request is served, in the order of a ring;
//!   when nobody's does, a new round begins. Between two moments at which two tenants waited all the time,
//!   what they were served over their weights differs by less than `2 quantum + c / weight + c / weight'`, where
//!   `c` is the dearest request.
//! - *Priorities.* There are three, and the highest that waits has its turn. Who has waited for `aging_us` counts as of
//!   the next higher one beside those that are of it. So a request is passed by others of a higher priority only
//!   until it is as old as the priorities between them times `aging_us`, and from then on its tenant has its share:
//!   nobody waits for ever. Where no higher priority waits, age makes no difference between tenants. Among a
//!   tenant's own requests a priority is worth the same time.
//! - *Bounds.* So many requests wait, at most. When the line is full, one that comes takes the place of the
//!   latest of the tenant that has most waiting for its weight; where that is its own, of the latest that is less
//!   urgent. A tenant's share of those that are set aside is bounded too.
//!
//! Who cannot go although it is its turn is set aside until [`Line::resume`], and others pass it. One that lacks
//! room is passed until it has waited for `passed_us`, and then by nobody.
//!
//! No clock and no I/O: the time is passed in. Call [`Line::next`] for whose turn it is, and then
//! [`Line::take`], [`Line::set_aside`] or [`Line::remove`] for that one.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// How urgent a request is.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum Priority {
    High,
    #[default]
    Normal,
    Low,
}

impl Priority {
    /// The most urgent one first.
    pub const ALL: [Priority; 3] = [Priority::High, Priority::Normal, Priority::Low];

    /// As configurations and requests have it.
    pub fn name(self) -> &'static str {
        match self {
            Priority::High => "high",
            Priority::Normal => "normal",
            Priority::Low => "low",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Priority> {
        Priority::ALL.into_iter().find(|priority| priority.name() == name)
    }

    fn steps(self) -> u64 {
        self as u64
    }
}

/// One request that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaiterId(pub u64);

/// What its turn depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiter {
    pub tenant: Arc<str>,
    /// Of its tenant; at least 1.
    pub weight: u32,
    pub priority: Priority,
    /// What it is expected to take, prompt and answer.
    pub cost_tokens: u64,
    pub arrived_us: u64,
}

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LineOptions {
    pub requests_max: usize,
    /// Tokens of a round for each weight.
    pub quantum_tokens: u64,
    pub aging_us: u64,
    /// Who could not go when it was its turn is passed by others for so long.
    pub passed_us: u64,
    /// Requests that are set aside at once, at most: then nobody else is tried.
    pub aside_max: usize,
}

impl Default for LineOptions {
    fn default() -> Self {
        LineOptions {
            requests_max: 1_024,
            quantum_tokens: 2_048,
            aging_us: 10_000_000,
            passed_us: 10_000_000,
            aside_max: 32,
        }
    }
}

/// Why somebody cannot go although it is its turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Aside {
    /// Nobody could: all stop until [`Line::resume`].
    Nobody,
    /// It wants more room than there is, which others may not: they pass, for a while.
    NoRoom,
    /// By what it is itself: others may pass it as long as it waits.
    Unfit,
}

/// The line is full, and the tenant has its share of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the admission queue is full: {waiting} requests are waiting")]
pub struct LineFull {
    pub waiting: usize,
}

#[derive(Debug, Clone)]
struct Waiting {
    waiter: Waiter,
    is_aside: bool,
}

/// What one tenant has waiting, and what it may use before the next round.
#[derive(Debug, Clone)]
struct Tenant {
    weight: u32,
    /// By when each came, later by `aging_us` for each priority below the highest.
    waiting: BTreeMap<(u64, WaiterId), Waiting>,
    deficit_tokens: u64,
    /// Its place in the ring: the least is next.
    turn: u64,
    aside: usize,
    /// Of those that are not set aside, by priority.
    ready: [usize; Priority::ALL.len()],
}

impl Tenant {
    /// The first that is not set aside.
    fn first(&self) -> Option<((u64, WaiterId), u64)> {
        let first = self.waiting.iter().find(|(_, waiting)| !waiting.is_aside);
        first.map(|(key, waiting)| (*key, waiting.waiter.cost_tokens))
    }

    fn quantum(&self, options: &LineOptions) -> u64 {
        options.quantum_tokens.max(1).saturating_mul(u64::from(self.weight.max(1)))
    }

    /// Rounds until it may be served.
    fn rounds(&self, cost_tokens: u64, options: &LineOptions) -> u64 {
        cost_tokens.saturating_sub(self.deficit_tokens).div_ceil(self.quantum(options))
    }
}

/// See the module.
#[derive(Debug, Clone)]
pub struct Line {
    options: LineOptions,
    tenants: BTreeMap<Arc<str>, Tenant>,
    /// Where each waits.
    keys: BTreeMap<WaiterId, (Arc<str>, u64)>,
    turns: u64,
    aside: usize,
    is_stopped: bool,
}

impl Line {
    pub fn new(options: LineOptions) -> Line {
        Line {
            options,
            tenants: BTreeMap::new(),
            keys: BTreeMap::new(),
            turns: 0,
            aside: 0,
            is_stopped: false,
        }
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// It waits and has not been taken or removed.
    pub fn contains(&self, id: WaiterId) -> bool {
        self.keys.contains_key(&id)
    }

    /// One more waits. Answers with whom it has displaced. An id that waits already is left as it is.
    ///
    /// # Errors
    /// [`LineFull`] when there is no place for it.
    pub fn push(&mut self, id: WaiterId, waiter: Waiter) -> Result<Option<WaiterId>, LineFull> {
        if self.keys.contains_key(&id) {
            return Ok(None);
        }
        let mut displaced = None;
        if self.keys.len() >= self.options.requests_max {
            let waiting = self.keys.len();
            let less = self.latest_of_most(&waiter).or_else(|| self.later_of_own(&waiter));
            displaced = Some(less.ok_or(LineFull { waiting })?);
        }
        if let Some(displaced) = displaced {
            self.remove(displaced);
        }
        let key_us = self.key_us(&waiter);
        self.keys.insert(id, (Arc::clone(&waiter.tenant), key_us));
        let turns = &mut self.turns;
        let tenant = self.tenants.entry(Arc::clone(&waiter.tenant)).or_insert_with(|| {
            *turns += 1;
            Tenant {
                weight: 1,
                waiting: BTreeMap::new(),
                deficit_tokens: 0,
                turn: *turns,
                aside: 0,
                ready: [0; Priority::ALL.len()],
            }
        });
        tenant.weight = waiter.weight.max(1);
        tenant.ready[waiter.priority as usize] += 1;
        tenant.waiting.insert((key_us, id), Waiting { waiter, is_aside: false });
        Ok(displaced)
    }

    /// Whose turn it is; nobody's while all that wait are set aside.
    pub fn next(&mut self, now_us: u64) -> Option<WaiterId> {
        if self.is_stopped || self.aside >= self.options.aside_max {
            return None;
        }
        let Line { options, tenants, .. } = self;
        // One whose requests cannot go leaves tries for the others.
        let aside_of_one = (options.aside_max / tenants.len().max(1)).max(1);
        let may_try = |tenant: &&mut Tenant| tenant.aside < aside_of_one;
        let mut tried: Vec<&mut Tenant> = tenants.values_mut().filter(may_try).collect();
        let highest = |tenant: &&mut Tenant| tenant.ready.iter().position(|ready| *ready > 0);
        let highest = tried.iter().filter_map(highest).min()? as u64;
        // Whose key this is has been here for as long as it takes to count as of the highest.
        let latest_us = now_us.saturating_add(highest.saturating_mul(options.aging_us));
        // Whatever the clock says, it is somebody's turn while anybody may be tried.
        let firsts = tried.iter().filter_map(|tenant| tenant.first());
        let latest_us = latest_us.max(firsts.map(|((key_us, _), _)| key_us).min()?);
        let mut turns: Vec<(&mut Tenant, WaiterId, u64)> = Vec::new();
        for tenant in tried.drain(..) {
            if let Some(((key_us, id), cost)) = tenant.first()
                && key_us <= latest_us
            {
                turns.push((tenant, id, cost));
            }
        }
        let needed = turns.iter().map(|(tenant, _, cost)| tenant.rounds(*cost, options)).min()?;
        for (tenant, _, _) in &mut turns {
            let gained = tenant.quantum(options).saturating_mul(needed);
            tenant.deficit_tokens = tenant.deficit_tokens.saturating_add(gained);
        }
        let covered = turns.iter().filter(|(tenant, _, cost)| tenant.deficit_tokens >= *cost);
        covered.min_by_key(|(tenant, _, _)| tenant.turn).map(|(_, id, _)| *id)
    }

    /// It goes: its tenant has used what it costs.
    pub fn take(&mut self, id: WaiterId) -> Option<Waiter> {
        let (name, _) = self.keys.get(&id)?.clone();
        let waiter = self.remove(id)?;
        if let Some(tenant) = self.tenants.get_mut(&name) {
            tenant.deficit_tokens = tenant.deficit_tokens.saturating_sub(waiter.cost_tokens);
            let goes_on = tenant.first().is_some_and(|(_, cost)| cost <= tenant.deficit_tokens);
            if !goes_on {
                self.turns += 1;
                tenant.turn = self.turns;
            }
        }
        Some(waiter)
    }

    /// It cannot go now, and others may be able to.
    pub fn set_aside(&mut self, id: WaiterId, why: Aside, now_us: u64) {
        let Some((name, key_us)) = self.keys.get(&id) else { return };
        let Some(tenant) = self.tenants.get_mut(name) else { return };
        let Some(waiting) = tenant.waiting.get_mut(&(*key_us, id)) else { return };
        let waited_us = now_us.saturating_sub(waiting.waiter.arrived_us);
        self.is_stopped |= match why {
            Aside::Nobody => true,
            Aside::NoRoom => waited_us > self.options.passed_us,
            Aside::Unfit => false,
        };
        if !waiting.is_aside {
            waiting.is_aside = true;
            self.aside += 1;
            tenant.aside += 1;
            tenant.ready[waiting.waiter.priority as usize] -= 1;
        }
    }

    /// Things have changed: who was set aside may try again.
    pub fn resume(&mut self) {
        self.is_stopped = false;
        if self.aside > 0 {
            self.aside = 0;
            for tenant in self.tenants.values_mut() {
                tenant.aside = 0;
                for waiting in tenant.waiting.values_mut().filter(|waiting| waiting.is_aside) {
                    waiting.is_aside = false;
                    tenant.ready[waiting.waiter.priority as usize] += 1;
                }
            }
        }
    }

    /// It waits no more. Nothing is used by it.
    pub fn remove(&mut self, id: WaiterId) -> Option<Waiter> {
        let (name, key_us) = self.keys.remove(&id)?;
        let tenant = self.tenants.get_mut(&name)?;
        let Waiting { waiter, is_aside } = tenant.waiting.remove(&(key_us, id))?;
        match is_aside {
            true => {
                self.aside -= 1;
                tenant.aside -= 1;
            }
            false => tenant.ready[waiter.priority as usize] -= 1,
        }
        if tenant.waiting.is_empty() {
            // Who comes back begins anew: what was not used is not saved up.
            self.tenants.remove(&name);
        }
        Some(waiter)
    }

    /// When it came, later by `aging_us` for each priority below the highest.
    fn key_us(&self, waiter: &Waiter) -> u64 {
        let steps_us = waiter.priority.steps().saturating_mul(self.options.aging_us);
        waiter.arrived_us.saturating_add(steps_us)
    }

    /// The last one of its own tenant, if that one's turn would come later: what is urgent to a tenant is not
    /// refused for what is not.
    fn later_of_own(&self, comes: &Waiter) -> Option<WaiterId> {
        let ((key_us, id), _) = self.tenants.get(&comes.tenant)?.waiting.last_key_value()?;
        (*key_us > self.key_us(comes)).then_some(*id)
    }

    /// The last one of the tenant that has most waiting for its weight, if that is more than the one that
    /// comes would have.
    fn latest_of_most(&self, comes: &Waiter) -> Option<WaiterId> {
        // Compared as fractions: so many over such a weight.
        let held = |tenant: &Tenant| (tenant.waiting.len() as u64, u64::from(tenant.weight.max(1)));
        let most = self.tenants.values().max_by(|a, b| {
            let ((a, of_a), (b, of_b)) = (held(a), held(b));
            (a * of_b).cmp(&(b * of_a))
        })?;
        let own = self.tenants.get(&comes.tenant).map_or(0, |own| own.waiting.len() as u64) + 1;
        let (most_held, of_most) = held(most);
        let is_more = most_held * u64::from(comes.weight.max(1)) > own * of_most;
        is_more.then(|| most.waiting.last_key_value().map(|((_, id), _)| *id)).flatten()
    }
}
