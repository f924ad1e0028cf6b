//! What those are given to do that can do both. Somebody may have said what such an instance plays; that is
//! how a cluster is divided, and no more than that: while nobody is there who plays the other role, it
//! does both, so that no lost instance leaves a model unserved.

use super::{ClusterView, InstanceReport, ModelIndex, Role};

impl InstanceReport {
    /// What it plays while others fill the other role.
    pub fn playing(&self) -> Role {
        self.current_role.filter(|_| self.role == Role::Both).unwrap_or(self.role)
    }
}

impl ClusterView {
    /// To be called when an instance of the model has come, gone or reported.
    pub(super) fn settle_roles(&mut self, model: ModelIndex) {
        let plays = |does: fn(Role) -> bool| {
            let mut takes = self.instances.iter().filter(|i| i.model == model);
            takes.any(|i| !i.report.draining && does(i.report.playing()))
        };
        let is_divided = plays(Role::prefills) && plays(Role::decodes);
        for instance in self.instances.iter_mut().filter(|i| i.model == model) {
            let InstanceReport { role, .. } = instance.report;
            instance.role = if is_divided { instance.report.playing() } else { role };
        }
    }
}
