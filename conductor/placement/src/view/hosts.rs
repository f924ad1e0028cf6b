//! Nodes with instances, and what all instances of a node share: its slots, its way in and out, and its holder of
//! routed queries. It is counted once, however many instances there are.

use super::{ClusterView, Instance, InstanceRef, InstanceReport, SsdReads};
use crate::cost::{LinkModel, SsdModel};

/// One stay of a node in this view, as the view numbers it. Numbers are never used again; 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct HostRef(pub(crate) u64);

/// See the module.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) reference: HostRef,
    pub(super) slots_total: u32,
    pub(super) slots_available: u32,
    /// Of the way to the node.
    pub(crate) link: LinkModel,
    pub(crate) ssd: SsdModel,
    /// Those that the SSD's model has been told of.
    pub(super) ssd_reads: SsdReads,
    /// Of fetches under way.
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
    /// That have begun, ever.
    pub(super) fetches_in: u64,
    pub(super) fetches_out: u64,
    /// Instances for which the node attends prefixes, each with for how many requests.
    pub(crate) routes_out: Vec<(InstanceRef, u32)>,
    /// When the node's way in and out are predicted to be free of what was given to them, each
    /// serving what came first.
    pub(crate) in_free_us: u64,
    pub(crate) out_free_us: u64,
    /// Pushes are counted in `out_free_us`.
    pub(super) pushes: bool,
    /// Reports of its instances.
    pub(super) reports: u64,
    /// Slots that were booked, or that answers grew into, since the last report, less those given
    /// back.
    pub(super) slots_booked: u32,
    /// Slots that the booked answers are expected to grow into yet.
    pub(super) slots_expected: u32,
    /// There are instances of other models, which are busy: only of a view that was restored from what one decision
    /// has read, where those are not.
    pub(super) others_busy: bool,
}

/// Slots that one booking has taken on one node since that node's latest report: they end
/// with it, long before the next report says so.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Taken {
    report: u64,
    slots: u32,
}

impl Host {
    pub(super) fn new(
        reference: HostRef,
        (slots_total, slots_available): (u32, u32),
        (link, ssd): (LinkModel, SsdModel),
    ) -> Host {
        Host {
            reference,
            slots_total,
            slots_available,
            link,
            ssd,
            ssd_reads: SsdReads::default(),
            bytes_in: 0,
            bytes_out: 0,
            fetches_in: 0,
            fetches_out: 0,
            routes_out: Vec::new(),
            in_free_us: 0,
            out_free_us: 0,
            pushes: false,
            reports: 0,
            slots_booked: 0,
            slots_expected: 0,
            others_busy: false,
        }
    }

    /// Requests of an instance whose prefix the node attends.
    pub(crate) fn routes_of(&self, requester: InstanceRef) -> u32 {
        let of = self.routes_out.iter().find(|(of, _)| *of == requester);
        of.map_or(0, |(_, count)| *count)
    }

    /// Other instances for which it attends anything.
    pub(crate) fn flows_beside(&self, requester: InstanceRef) -> u32 {
        self.routes_out.iter().filter(|(of, _)| *of != requester).count() as u32
    }

    /// Their requests.
    pub(crate) fn requests_beside(&self, requester: InstanceRef) -> u32 {
        let others = self.routes_out.iter().filter(|(of, _)| *of != requester);
        others.fold(0, |sum, (_, count)| sum.saturating_add(*count))
    }

    pub(crate) fn slots_total(&self) -> u32 {
        self.slots_total
    }

    pub(crate) fn slots_left(&self) -> u32 {
        let taken = self.slots_booked.saturating_add(self.slots_expected);
        self.slots_available.saturating_sub(taken)
    }

    /// How long a fetch to it waits for others, beside those at its source.
    pub(crate) fn in_waits_us(&self, now_us: u64) -> u64 {
        let predicted_us = self.in_free_us.saturating_sub(now_us);
        predicted_us.min(self.link.occupied_us(self.bytes_in))
    }

    /// How long a fetch from it waits for what else it sends.
    pub(crate) fn out_waits_us(&self, now_us: u64) -> u64 {
        let predicted_us = self.out_free_us.saturating_sub(now_us);
        match self.pushes {
            // Fetches that have arrived are in nobody's way, whatever was predicted.
            false => predicted_us.min(self.link.occupied_us(self.bytes_out)),
            true => predicted_us,
        }
    }

    pub(super) fn take_slots(&mut self, taken: &mut Taken, slots: u32) {
        if taken.report != self.reports {
            // The node has counted them itself.
            *taken = Taken { report: self.reports, slots: 0 };
        }
        taken.slots = taken.slots.saturating_add(slots);
        self.slots_booked = self.slots_booked.saturating_add(slots);
    }

    pub(super) fn give_slots_back(&mut self, taken: Taken) {
        if taken.report == self.reports {
            self.slots_booked = self.slots_booked.saturating_sub(taken.slots);
        }
    }

    /// What one of its instances has reported. All of a node report together, so that what is here is what the
    /// node has said last.
    pub(super) fn take_report(&mut self, report: &InstanceReport) {
        self.slots_total = report.slots_total;
        self.slots_available = report.slots_available;
        self.slots_booked = 0;
        self.reports += 1;
        let before = std::mem::replace(&mut self.ssd_reads, report.ssd_reads);
        let SsdReads { bytes_total, us_total } = report.ssd_reads;
        // One that was started anew begins at nothing.
        let is_anew = bytes_total < before.bytes_total || us_total < before.us_total;
        let before = if is_anew { SsdReads::default() } else { before };
        self.ssd.observe(bytes_total - before.bytes_total, us_total - before.us_total);
    }
}

impl Instance {
    /// The prefill at the head of the queue begins, and with it its push.
    pub(super) fn count_push(&mut self, host: &mut Host) {
        let Some((id, first, begins_us)) = self.prefills.first() else { return };
        if self.pushes != Some(id) {
            self.pushes = Some(id);
            host.pushes = true;
            let occupied_us = host.link.occupied_us(first.push_bytes);
            host.out_free_us = host.out_free_us.max(begins_us).saturating_add(occupied_us);
        }
    }
}

impl ClusterView {
    /// The node of an instance of this view.
    pub(crate) fn host(&self, instance: &Instance) -> &Host {
        &self.hosts[instance.host_at]
    }

    /// Slots of the instance's node that are left by what is known here: all instances of the node share them.
    pub fn slots_left(&self, instance: &Instance) -> u32 {
        self.host(instance).slots_left()
    }

    /// Nothing is queued or runs on any instance of the node, as far as is known here.
    pub(crate) fn host_is_idle(&self, instance: &Instance) -> bool {
        let of_host = |other: &&Instance| other.host_at == instance.host_at;
        !self.host(instance).others_busy
            && self.instances.iter().filter(of_host).all(Instance::is_idle)
    }

    pub(super) fn seen_host(&self, reference: HostRef) -> Option<&Host> {
        self.hosts.iter().find(|host| host.reference == reference)
    }

    pub(super) fn find_host(&mut self, reference: HostRef) -> Option<&mut Host> {
        self.hosts.iter_mut().find(|host| host.reference == reference)
    }

    /// An instance with its node.
    pub(super) fn find_with_host(
        &mut self,
        reference: InstanceRef,
    ) -> Option<(&mut Instance, &mut Host)> {
        let instance = self.instances.iter_mut().find(|one| one.reference == reference)?;
        let host = &mut self.hosts[instance.host_at];
        Some((instance, host))
    }

    /// The node that an instance has; none, when the instance is not there.
    pub(super) fn host_of(&self, reference: InstanceRef) -> HostRef {
        let instance = self.instances.iter().find(|one| one.reference == reference);
        instance.map(|one| self.hosts[one.host_at].reference).unwrap_or_default()
    }

    /// Where the node of this report is among the hosts: from now on it is there.
    pub(super) fn host_at(&mut self, report: &InstanceReport) -> usize {
        if let Some(known) = self.instances.iter().find(|one| one.report.node == report.node) {
            return known.host_at;
        }
        self.next_host += 1;
        let reference = HostRef(self.next_host);
        let ways = (LinkModel::new(self.profile.link), SsdModel::new(self.profile.ssd));
        let slots = (report.slots_total, report.slots_available);
        self.hosts.push(Host::new(reference, slots, ways));
        self.hosts.len() - 1
    }

    /// Nodes without instances are gone: nothing is known of their ways any more.
    pub(super) fn forget_hosts(&mut self) {
        let mut at = 0;
        while at < self.hosts.len() {
            if self.instances.iter().any(|instance| instance.host_at == at) {
                at += 1;
                continue;
            }
            let last = self.hosts.len() - 1;
            self.hosts.swap_remove(at);
            for instance in self.instances.iter_mut().filter(|one| one.host_at == last) {
                instance.host_at = at;
            }
        }
    }
}
