//! Nodes that change what they do. Each can prefill and decode, has one cache for both, and plays one of the
//! two; the balance of `kvasir-placement` says when one changes, as it does for a live conductor. What was
//! placed on a node in its former role is finished there. While a node does both, each takes twice as long.

use kvasir_placement::balance::BalanceOptions;
use kvasir_placement::balance::roles::{Roles, RolesOptions};
use kvasir_placement::{ClusterView, InstanceReport, ModelIndex, Objectives, OverloadReason, Role};
use serde::{Deserialize, Serialize};

use crate::trace::mix;

/// The table `[balance]` of a cluster file: as in a conductor's configuration.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BalanceFile {
    pub sample_interval_ms: u64,
    pub window_ms: u64,
    pub dwell_ms: u64,
    pub concurrent_role_changes_max: usize,
    pub margin: f64,
    pub prefill_instances_min: usize,
    pub decode_instances_min: usize,
    pub load_high: f64,
    pub load_low: f64,
}

impl Default for BalanceFile {
    fn default() -> Self {
        let BalanceOptions {
            window_us,
            concurrent_role_changes_max,
            margin,
            prefill_instances_min,
            decode_instances_min,
            load_high,
            load_low,
        } = BalanceOptions::default();
        BalanceFile {
            sample_interval_ms: 500,
            window_ms: window_us / 1_000,
            dwell_ms: 120_000,
            concurrent_role_changes_max,
            margin,
            prefill_instances_min,
            decode_instances_min,
            load_high,
            load_low,
        }
    }
}

impl BalanceFile {
    fn options(&self, objectives: Objectives) -> RolesOptions {
        let balance = BalanceOptions {
            window_us: self.window_ms.saturating_mul(1_000),
            concurrent_role_changes_max: self.concurrent_role_changes_max,
            margin: self.margin,
            prefill_instances_min: self.prefill_instances_min,
            decode_instances_min: self.decode_instances_min,
            load_high: self.load_high,
            load_low: self.load_low,
        };
        RolesOptions { balance, objectives, dwell_us: self.dwell_ms.saturating_mul(1_000) }
    }
}

/// What came of roles that change.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct RolesTold {
    pub changes: usize,
    /// Seconds from the first arrival, nodes that prefill and nodes that decode from then on.
    pub steps: Vec<(f64, usize, usize)>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Changing {
    roles: Roles,
    sample_us: u64,
    looked: u64,
    pub(crate) told: RolesTold,
}

impl Changing {
    pub(crate) fn new(
        file: &BalanceFile,
        objectives: Objectives,
        prefills: usize,
        decodes: usize,
    ) -> Self {
        Changing {
            roles: Roles::new(file.options(objectives)),
            sample_us: file.sample_interval_ms.max(1) * 1_000,
            looked: 0,
            told: RolesTold { changes: 0, steps: vec![(0.0, prefills, decodes)] },
        }
    }

    /// Until it is to look again: uneven, so that arrivals in step with it are not seen more often than they
    /// are.
    pub(crate) fn next_in_us(&mut self) -> u64 {
        self.looked += 1;
        self.sample_us / 2 + mix(self.looked) % self.sample_us
    }

    pub(crate) fn decided(&mut self, model: ModelIndex, refused: Option<OverloadReason>) {
        self.roles.decided(model, refused);
    }

    /// Looks at the loads, and changes what is to be changed. `since_us` is the first arrival.
    pub(crate) fn look(&mut self, view: &mut ClusterView, since_us: u64, now_us: u64) {
        self.roles.sample(view, now_us);
        let plans = self.roles.plan(view, now_us);
        for change in plans.iter().flat_map(|(_, plan)| &plan.changes) {
            let found = view.instances().iter().find(|i| i.reference() == change.instance);
            let Some(report) = found.map(|i| i.report().clone()) else { continue };
            view.report(InstanceReport { current_role: Some(change.to), ..report }, now_us);
            let count = |role| view.instances().iter().filter(|i| i.role() == role).count();
            let at_s = now_us.saturating_sub(since_us) as f64 / 1e6;
            self.told.changes += 1;
            self.told.steps.push((at_s, count(Role::Prefill), count(Role::Decode)));
        }
    }
}
