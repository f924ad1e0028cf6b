//! Which instances attend what for which others, as it is booked.

use super::{ClusterView, InstanceRef};
use crate::decision::Placement;

/// Who attends chunks of a request, once for each.
pub(super) fn of_chunks(placement: &Placement) -> Vec<InstanceRef> {
    let routed = placement.chunks.iter().filter(|chunk| chunk.is_routed());
    routed.filter_map(|chunk| Some(chunk.source()?.instance)).collect()
}

impl ClusterView {
    /// Answers with how many requests of that instance the source attends prefixes for already.
    pub(super) fn begin_route(&mut self, source: InstanceRef, requester: InstanceRef) -> u32 {
        if let Some(requester) = self.find(requester) {
            requester.routes_in += 1;
        }
        let Some(source) = self.find(source) else { return 0 };
        match source.routes_out.iter_mut().find(|(of, _)| *of == requester) {
            Some((_, count)) => {
                *count += 1;
                *count - 1
            }
            None => {
                source.routes_out.push((requester, 1));
                0
            }
        }
    }

    pub(super) fn end_route(&mut self, source: InstanceRef, requester: InstanceRef) {
        if let Some(requester) = self.find(requester) {
            requester.routes_in = requester.routes_in.saturating_sub(1);
        }
        let Some(source) = self.find(source) else { return };
        for (of, count) in &mut source.routes_out {
            *count -= u32::from(*of == requester);
        }
        source.routes_out.retain(|(_, count)| *count > 0);
    }
}
