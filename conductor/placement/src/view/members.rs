//! A new instance: what it is taken to be like until it has been measured.

use std::sync::Arc;

use super::{ClusterView, Instance, InstanceRef, InstanceReport, ModelIndex, Sent};
use crate::cost::{
    DecodeModel, DecodeProfile, InstanceProfile, PrefillModel, Profile, StepProfile, TbtModel,
};
use crate::queue::{DecodeBookings, PrefillQueue};

impl ClusterView {
    pub(super) fn member(
        &mut self,
        (model, host_at): (ModelIndex, usize),
        report: InstanceReport,
        learned: Option<Instance>,
        now_us: u64,
    ) -> Instance {
        let (prefill_model, decode_model, tbt_model) = match learned {
            Some(old) => (old.prefill_model, old.decode_model, old.tbt_model),
            None => self.models_of(model, &report.instance_type),
        };
        let reference = InstanceRef(self.next_instance);
        self.next_instance += 1;
        let mut member = Instance {
            reference,
            host_at,
            model,
            role: report.playing(),
            report: report.clone(),
            prefill_model,
            decode_model,
            tbt_model,
            joined_tokens: 0,
            sent: Sent::default(),
            paced_us: now_us,
            routes_in: 0,
            pushes: None,
            prefills: PrefillQueue::default(),
            decodes: DecodeBookings::default(),
            other_tokens: 0,
            other_answers: 0,
            avoid_until_us: None,
        };
        member.take_report(report, now_us);
        member
    }

    /// Where the models of one start of which nothing is known but its type: as those are that have most to
    /// tell of the others of this type, or by its profile.
    fn models_of(
        &self,
        model: ModelIndex,
        instance_type: &Arc<str>,
    ) -> (PrefillModel, DecodeModel, TbtModel) {
        let Profile { prefill, decode, link: _, ssd: _ } = self.profile;
        let (prefill, decode) = match self.profiles.get(instance_type) {
            Some(InstanceProfile { prefill, decode: step }) => {
                let StepProfile { base_us, sequence_us, token_us } = *step;
                (*prefill, DecodeProfile { base_us, sequence_us, token_us, ..decode })
            }
            None => (prefill, decode),
        };
        let is_like = |i: &&Instance| {
            !instance_type.is_empty()
                && i.model == model
                && i.report.instance_type == *instance_type
        };
        let alike = || self.instances.iter().filter(is_like);
        let prefills = alike().map(|i| &i.prefill_model).max_by_key(|model| model.samples());
        let decodes = alike().max_by_key(|i| i.decode_model.samples());
        (
            prefills.map_or_else(|| PrefillModel::new(prefill), Clone::clone),
            decodes.map_or_else(|| DecodeModel::new(decode), |i| i.decode_model.clone()),
            decodes.map_or_else(|| TbtModel::new(decode), |i| i.tbt_model.clone()),
        )
    }
}
