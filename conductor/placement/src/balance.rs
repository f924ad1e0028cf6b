//! How many instances prefill and how many decode (*Mooncake* §5.1). The loads of both sides, predicted
//! latency over its objective, are sampled; the ratio of decoding to prefilling instances is to move by
//! `(mean decode load + 1) / (mean prefill load + 1)`, with the top and bottom tenth of the samples
//! dropped.
//!
//! A plan says what to wish for, which autoscalers may read, and which instances that can do both
//! change their role now. It is bounded in three ways:
//!
//! - Nothing changes before a whole window of samples has been seen since the last change, and then at
//!   most `concurrent_role_changes_max` instances do.
//! - An instance changes only when that brings the two loads nearer to each other by a margin, if the
//!   same work is spread over as many more and fewer. Changing back never does, so that a steady load
//!   comes to rest.
//! - Each side keeps its least number.
//!
//! Those that could play either role and play both are divided first, one change after the other, once there is
//! load: each change is to the role that has more to do then. [`roles`] takes all of it from a view.
//!
//! No clock and no I/O: samples carry their time, and whoever changes roles says when it has.

pub mod roles;

use std::collections::VecDeque;

use crate::view::{InstanceRef, Role};

/// Samples that are kept, at most.
const SAMPLES_MAX: usize = 4_096;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BalanceOptions {
    /// How long samples are collected before anything changes, and how old they may be.
    pub window_us: u64,
    /// Instances that change their role after one window.
    pub concurrent_role_changes_max: usize,
    /// A change is worth making when it brings the logarithm of the factor nearer to 0 by so much.
    pub margin: f64,
    pub prefill_instances_min: usize,
    pub decode_instances_min: usize,
    /// More of the loaded side are wished for above this load, fewer of the idle side below that one.
    pub load_high: f64,
    pub load_low: f64,
}

impl Default for BalanceOptions {
    fn default() -> Self {
        BalanceOptions {
            window_us: 60_000_000,
            concurrent_role_changes_max: 1,
            margin: 0.05,
            prefill_instances_min: 1,
            decode_instances_min: 1,
            load_high: 1.0,
            load_low: 0.1,
        }
    }
}

/// One instance, as far as its role matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    pub instance: InstanceRef,
    /// One that does both is on neither side.
    pub role: Role,
    /// It can take another role.
    pub can_change: bool,
    /// Work that it has to end before it does.
    pub open_work: usize,
}

/// An instance that is to take another role.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoleChange {
    pub instance: InstanceRef,
    pub to: Role,
}

/// What would be better.
#[derive(Debug, Clone, PartialEq)]
pub struct RatioPlan {
    /// By what the ratio of decoding to prefilling instances is to move.
    pub factor: f64,
    /// How many of each there should be, with those that an autoscaler may bring or take.
    pub prefills_wished: usize,
    pub decodes_wished: usize,
    /// Of those that do both, what is to stay so.
    pub both_wished: usize,
    /// What to do now.
    pub changes: Vec<RoleChange>,
}

#[derive(Debug, Clone, Copy)]
struct Sample {
    at_us: u64,
    prefill_load: f64,
    decode_load: f64,
}

/// See the module. Sample with [`Self::sample`], ask with [`Self::plan`], and say with
/// [`Self::changed`] when a change has been made.
#[derive(Debug, Clone)]
pub struct Balance {
    options: BalanceOptions,
    samples: VecDeque<Sample>,
    /// Since when the samples are of the present roles.
    since_us: Option<u64>,
}

impl Balance {
    pub fn new(options: BalanceOptions) -> Self {
        Balance { options, samples: VecDeque::new(), since_us: None }
    }

    /// The mean load of each side now. What is no number is left out.
    pub fn sample(&mut self, at_us: u64, prefill_load: f64, decode_load: f64) {
        if !(prefill_load.is_finite() && decode_load.is_finite()) {
            return;
        }
        self.since_us.get_or_insert(at_us);
        let from_us = at_us.saturating_sub(self.options.window_us);
        while self.samples.front().is_some_and(|first| first.at_us < from_us)
            || self.samples.len() >= SAMPLES_MAX
        {
            self.samples.pop_front();
        }
        let (prefill_load, decode_load) = (prefill_load.max(0.0), decode_load.max(0.0));
        self.samples.push_back(Sample { at_us, prefill_load, decode_load });
    }

    /// Roles have changed: what was sampled before says nothing any more.
    pub fn changed(&mut self, now_us: u64) {
        self.samples.clear();
        self.since_us = Some(now_us);
    }

    /// What to wish for and what to do; nothing before a window is full.
    pub fn plan(&self, members: &[Member], now_us: u64) -> Option<RatioPlan> {
        let seen_us = now_us.saturating_sub(self.since_us?);
        if seen_us < self.options.window_us || self.samples.is_empty() {
            return None;
        }
        let prefill_load = trimmed_mean(self.samples.iter().map(|s| s.prefill_load));
        let decode_load = trimmed_mean(self.samples.iter().map(|s| s.decode_load));
        let count = |role| members.iter().filter(|member| member.role == role).count();
        let both = count(Role::Both);
        let sides = Sides {
            prefill_load,
            decode_load,
            prefills: count(Role::Prefill),
            decodes: count(Role::Decode),
        };
        if let Some((divided, changes)) = self.divide(members, &sides) {
            let (prefills_wished, decodes_wished) = self.with_tide(&divided);
            let factor = sides.factor();
            let both_wished = both - free(members).count();
            return Some(RatioPlan {
                factor,
                prefills_wished,
                decodes_wished,
                both_wished,
                changes,
            });
        }
        let (to, moves) = self.moves(&sides);
        let moved = sides.moved(to, moves);
        let (prefills_wished, decodes_wished) = self.with_tide(&moved);
        Some(RatioPlan {
            factor: sides.factor(),
            prefills_wished,
            decodes_wished,
            both_wished: both,
            changes: self.changes(members, to, moves),
        })
    }

    /// How those that play both and could play either are divided, when there is load and there are enough
    /// for both sides.
    fn divide(&self, members: &[Member], sides: &Sides) -> Option<(Sides, Vec<RoleChange>)> {
        let BalanceOptions {
            prefill_instances_min,
            decode_instances_min,
            load_low,
            concurrent_role_changes_max,
            ..
        } = self.options;
        let Sides { prefill_load, decode_load, prefills, decodes } = *sides;
        let both = free(members).count();
        if both == 0 || prefill_load.max(decode_load) < load_low {
            return None;
        }
        let divided = |to_prefill: usize| Sides {
            prefill_load: spread(prefill_load, prefills + both, prefills + to_prefill),
            decode_load: spread(decode_load, decodes + both, decodes + both - to_prefill),
            prefills: prefills + to_prefill,
            decodes: decodes + both - to_prefill,
        };
        let is_served = |sides: &Sides| {
            sides.prefills >= prefill_instances_min.max(1)
                && sides.decodes >= decode_instances_min.max(1)
        };
        let apart = |sides: &Sides| sides.factor().ln().abs();
        let ways = (0..=both).map(divided).filter(is_served);
        let divided = ways.min_by(|a, b| apart(a).total_cmp(&apart(b)))?;
        // The side that has more to do gains first, and the other one when that has all of its own.
        let mut roles = vec![Role::Prefill; divided.prefills - prefills];
        roles.resize(both, Role::Decode);
        if sides.factor() > 1.0 {
            roles.reverse();
        }
        let mut able: Vec<&Member> = free(members).collect();
        able.sort_by_key(|member| member.open_work);
        let changes = able.into_iter().zip(roles).take(concurrent_role_changes_max);
        let changes = changes.map(|(member, to)| RoleChange { instance: member.instance, to });
        Some((divided, changes.collect()))
    }

    /// To which role how many changes are each worth making, or needed for the least numbers.
    fn moves(&self, sides: &Sides) -> (Role, usize) {
        let BalanceOptions { margin, prefill_instances_min, decode_instances_min, .. } =
            self.options;
        let lacks_prefills = prefill_instances_min.saturating_sub(sides.prefills);
        let lacks_decodes = decode_instances_min.saturating_sub(sides.decodes);
        let to = match (lacks_prefills, lacks_decodes) {
            (0, 0) if sides.factor() > 1.0 => Role::Decode,
            (0, 1..) => Role::Decode,
            _ => Role::Prefill,
        };
        let (giving, least, lacking) = match to {
            Role::Decode => (sides.prefills, prefill_instances_min, lacks_decodes),
            Role::Prefill | Role::Both => (sides.decodes, decode_instances_min, lacks_prefills),
        };
        // The last of a side has nobody to leave its work to.
        let most = giving.saturating_sub(least.max(1));
        let apart = |moves| sides.moved(to, moves).factor().ln().abs();
        let worth = |&moves: &usize| apart(moves + 1) + margin.max(0.0) < apart(moves);
        let moves =
            if lacking > 0 { lacking.min(most) } else { (0..most).take_while(worth).count() };
        (to, moves)
    }

    /// Out on the loaded side first, in on the idle side first, one at a time.
    fn with_tide(&self, sides: &Sides) -> (usize, usize) {
        let BalanceOptions {
            load_high, load_low, prefill_instances_min, decode_instances_min, ..
        } = self.options;
        let Sides { prefill_load, decode_load, prefills, decodes } = *sides;
        if prefill_load.max(decode_load) > load_high {
            return match prefill_load >= decode_load {
                true => (prefills + 1, decodes),
                false => (prefills, decodes + 1),
            };
        }
        let prefills_less = prefills.saturating_sub(1).max(prefill_instances_min).min(prefills);
        let decodes_less = decodes.saturating_sub(1).max(decode_instances_min).min(decodes);
        match prefill_load.max(decode_load) < load_low {
            true if prefill_load <= decode_load => (prefills_less, decodes),
            true => (prefills, decodes_less),
            false => (prefills, decodes),
        }
    }

    /// Those with the least work to end first, of equals the one that is named first.
    fn changes(&self, members: &[Member], to: Role, moves: usize) -> Vec<RoleChange> {
        let from = if to == Role::Decode { Role::Prefill } else { Role::Decode };
        let mut able: Vec<&Member> =
            members.iter().filter(|member| member.role == from && member.can_change).collect();
        able.sort_by_key(|member| member.open_work);
        let chosen = able.into_iter().take(moves.min(self.options.concurrent_role_changes_max));
        chosen.map(|member| RoleChange { instance: member.instance, to }).collect()
    }
}

/// The mean loads, and over how many instances each is spread.
#[derive(Debug, Clone, Copy)]
struct Sides {
    prefill_load: f64,
    decode_load: f64,
    prefills: usize,
    decodes: usize,
}

impl Sides {
    fn factor(&self) -> f64 {
        (self.decode_load + 1.0) / (self.prefill_load + 1.0)
    }

    /// The same work after so many instances have changed.
    fn moved(&self, to: Role, moves: usize) -> Sides {
        let (prefills, decodes) = match to {
            Role::Decode => (self.prefills - moves, self.decodes + moves),
            Role::Prefill | Role::Both => (self.prefills + moves, self.decodes - moves),
        };
        Sides {
            prefill_load: spread(self.prefill_load, self.prefills, prefills),
            decode_load: spread(self.decode_load, self.decodes, decodes),
            prefills,
            decodes,
        }
    }
}

/// The load of each when as many have the same work as `after` says.
fn spread(load: f64, before: usize, after: usize) -> f64 {
    load * before as f64 / after.max(1) as f64
}

/// Those that could play either role and play both.
fn free(members: &[Member]) -> impl Iterator<Item = &Member> {
    members.iter().filter(|member| member.role == Role::Both && member.can_change)
}

/// Without the top and bottom tenth.
fn trimmed_mean(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let tenth = values.len() / 10;
    let kept = &values[tenth..values.len() - tenth];
    kept.iter().sum::<f64>() / kept.len().max(1) as f64
}
