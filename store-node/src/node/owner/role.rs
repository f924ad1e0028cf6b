//! Which of the two roles an attached engine plays, where it can do both. Conductors set it and follow
//! it; the engine itself takes whatever comes, so that what runs is finished and a conductor that has not
//! heard yet is served.

use kvasir_proto::v1;

use super::Owner;
use crate::clock;
use crate::node::command::Refused;

impl Owner {
    pub(super) fn set_role(
        &mut self,
        request: &v1::SetRoleRequest,
    ) -> Result<v1::SetRoleReply, Refused> {
        let now_ms = clock::now_ms();
        let incarnation = self.incarnation;
        let session = self.engines.get_mut(kvasir_blocks::AttachEpoch(request.attach_epoch));
        let session = session.filter(|session| {
            incarnation == request.incarnation
                && session.instance.instance_id == request.instance_id
        });
        let Some(session) = session else {
            return Err(Refused::NotFound(format!(
                "engine `{}` is not attached to this node as attachment {}",
                request.instance_id, request.attach_epoch
            )));
        };
        let plays = match v1::Role::try_from(request.role) {
            Ok(role @ (v1::Role::Prefill | v1::Role::Decode)) => role,
            Ok(v1::Role::Both) => v1::Role::Unspecified,
            Ok(v1::Role::Unspecified) | Err(_) => {
                return Err(Refused::Invalid(format!(
                    "field `role` has the unknown value {}",
                    request.role
                )));
            }
        };
        if session.instance.role() != v1::Role::Both {
            return Err(Refused::Precondition(format!(
                "engine `{}` does not support both roles",
                request.instance_id
            )));
        }
        let role_version = session.instance.role_version;
        if role_version != request.expected_version {
            return Err(Refused::Ended(format!(
                "the role has version {role_version}, not {}",
                request.expected_version
            )));
        }
        let age_ms = session.role_set_ms.map_or(u64::MAX, |set_ms| now_ms.saturating_sub(set_ms));
        if age_ms < request.dwell_ms {
            return Err(Refused::Unavailable(format!(
                "the role was set {age_ms} ms ago and stays for {} ms",
                request.dwell_ms
            )));
        }
        session.instance.set_current_role(plays);
        session.instance.role_version += 1;
        session.role_set_ms = Some(now_ms);
        self.report.dirty = true;
        tracing::info!(
            instance = request.instance_id,
            role = plays.as_str_name(),
            "the store node set the role of an engine"
        );
        Ok(v1::SetRoleReply { role_version: role_version + 1 })
    }
}
