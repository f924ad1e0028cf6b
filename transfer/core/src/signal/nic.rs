//! A NIC and the thread that posts to it, in virtual time: executes a plan and says when each request
//! started, landed and was acknowledged. It is for comparing plans and for checking their order, not a
//! forecast for some hardware. Same model, same plan, same run.
//!
//! One thread posts, request after request, with one doorbell for up to `chain_max` requests in a row
//! to one queue pair. The wire serves one request at a time, taking the queue pairs in turn; a queue
//! pair is served in the order of posting. A request lands half a round trip after its last byte left
//! and is acknowledged half a round trip later. Not modelled: packets (a signal waits behind a whole
//! put of another queue pair), headers (2 % at 4 KiB, for all plans alike), congestion, the receiver's
//! PCIe, a pace of their own for queue pairs.

use std::collections::{BTreeMap, VecDeque};

use super::{Ordering, Peer, Plan, QueuePair, Request, Step, Work};

const PS_PER_NS: u64 = 1_000;

/// The defaults and where they are from:
///
/// - round trip and wire: the constants under which put-with-signal is compared;
/// - `post_ns`, `doorbell_ns`: from two figures of *fabric-lib* (arXiv 2510.27656) on ConnectX-7: a
///   scatter to 56 peers is posted in 8.5 us, 152 ns for a request with a doorbell; paged writes of
///   1 KiB go at 11.1 M/s, 90 ns for a request with a quarter of one, as up to four are chained. So a
///   doorbell is 82 and a request 69;
/// - `poll_ns`: what its worker takes from being told to acting, .86 us;
/// - `nic_request_ns`: the product brief of ConnectX-6, a NIC of 200 Gb/s, promises 215 M messages/s.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NicModel {
    pub round_trip_ns: u64,
    /// At least 1.
    pub wire_gbps: u64,
    /// Posting thread, for each request.
    pub post_ns: u64,
    /// Posting thread, for each chain.
    pub doorbell_ns: u64,
    pub chain_max: usize,
    /// NIC, for each request: the least that one occupies it.
    pub nic_request_ns: u64,
    /// From the acknowledgement that ends a wait to posting again.
    pub poll_ns: u64,
    /// The rules of delivery and the meaning of the fence. On [`Ordering::RcQueuePair`] a fence waits
    /// for reads and atomics, of which a plan has none; on [`Ordering::FencePerPeer`] it stalls the
    /// queue pair until what went to its peer is acknowledged; elsewhere it is ignored.
    pub ordering: Ordering,
    /// Each request is under way for up to this much longer, by `seed`.
    pub jitter_ns: u64,
    pub seed: u64,
}

impl Default for NicModel {
    fn default() -> NicModel {
        NicModel {
            round_trip_ns: 5_000,
            wire_gbps: 200,
            post_ns: 70,
            doorbell_ns: 80,
            chain_max: 4,
            nic_request_ns: 5,
            poll_ns: 860,
            ordering: Ordering::FencePerPeer,
            jitter_ns: 0,
            seed: 0,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    pub request: Request,
    /// When the doorbell was rung.
    pub posted_ps: u64,
    /// When its first byte left.
    pub started_ps: u64,
    /// When all of it is in the peer's memory.
    pub landed_ps: u64,
    pub acknowledged_ps: u64,
}

/// What was sent, in the order of starting.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Run {
    pub sent: Vec<Sent>,
}

impl Run {
    /// When the last acknowledgement is back.
    pub fn finished_ps(&self) -> u64 {
        self.sent.iter().map(|sent| sent.acknowledged_ps).max().unwrap_or(0)
    }

    /// When a consumer is told, on average; none if there are no signals.
    pub fn mean_signal_ps(&self) -> Option<u64> {
        let landed = self.sent.iter().filter(|sent| matches!(sent.request.work, Work::Signal(_)));
        let landed: Vec<u64> = landed.map(|sent| sent.landed_ps).collect();
        landed.iter().sum::<u64>().checked_div(landed.len() as u64)
    }
}

impl NicModel {
    pub fn run(&self, plan: &Plan) -> Run {
        let mut machine = Machine::new(self);
        for step in &plan.steps {
            match step {
                Step::Post(request) => machine.post(*request),
                Step::Wait => machine.wait(),
            }
        }
        machine.ring();
        while machine.serve() {}
        Run { sent: machine.sent }
    }

    fn half_way_ps(&self) -> u64 {
        self.round_trip_ns * PS_PER_NS / 2
    }

    fn occupies_ps(&self, work: Work) -> u64 {
        let bytes = match work {
            Work::Put { bytes, .. } => bytes,
            Work::Signal(_) => 8,
        };
        let wire_ps = bytes.saturating_mul(8 * PS_PER_NS) / self.wire_gbps.max(1);
        wire_ps.max(self.nic_request_ns * PS_PER_NS)
    }

    /// SplitMix64 of the seed and the request's place in the plan.
    fn jitter_ps(&self, index: usize) -> u64 {
        let mut x = self.seed ^ (index as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % (self.jitter_ns * PS_PER_NS + 1)
    }
}

#[derive(Debug, Clone, Copy)]
struct Posted {
    index: usize,
    request: Request,
    posted_ps: u64,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Posted>,
    landed_ps: u64,
    acknowledged_ps: BTreeMap<Peer, u64>,
}

#[derive(Debug)]
struct Machine<'a> {
    model: &'a NicModel,
    /// The posting thread's time.
    host_ps: u64,
    posted: usize,
    chain: Vec<Request>,
    queues: BTreeMap<QueuePair, Queue>,
    wire_free_ps: u64,
    served_last: Option<QueuePair>,
    /// Awaited requests that have not started, and when the latest that has is acknowledged.
    awaited: usize,
    awaited_ps: u64,
    sent: Vec<Sent>,
}

impl<'a> Machine<'a> {
    fn new(model: &'a NicModel) -> Machine<'a> {
        Machine {
            model,
            host_ps: 0,
            posted: 0,
            chain: Vec::new(),
            queues: BTreeMap::new(),
            wire_free_ps: 0,
            served_last: None,
            awaited: 0,
            awaited_ps: 0,
            sent: Vec::new(),
        }
    }

    fn post(&mut self, request: Request) {
        let breaks = |first: &Request| first.queue_pair != request.queue_pair;
        if self.chain.len() >= self.model.chain_max || self.chain.first().is_some_and(breaks) {
            self.ring();
        }
        self.host_ps += self.model.post_ns * PS_PER_NS;
        self.chain.push(request);
    }

    fn ring(&mut self) {
        if self.chain.is_empty() {
            return;
        }
        self.host_ps += self.model.doorbell_ns * PS_PER_NS;
        for request in std::mem::take(&mut self.chain) {
            self.awaited += usize::from(request.awaited);
            let posted = Posted { index: self.posted, request, posted_ps: self.host_ps };
            self.posted += 1;
            self.queues.entry(request.queue_pair).or_default().waiting.push_back(posted);
        }
    }

    /// Serves no more than it must: what starts later may have to compete with what is posted after
    /// the wait.
    fn wait(&mut self) {
        self.ring();
        while self.awaited > 0 && self.serve() {}
        self.host_ps = self.host_ps.max(self.awaited_ps) + self.model.poll_ns * PS_PER_NS;
    }

    /// Sends the next request; false when there is none.
    fn serve(&mut self) -> bool {
        let Some((queue_pair, started_ps)) = self.choose() else { return false };
        let model = self.model;
        let queue = self.queues.entry(queue_pair).or_default();
        let Some(Posted { index, request, posted_ps }) = queue.waiting.pop_front() else {
            return false;
        };
        let left_ps = started_ps + model.occupies_ps(request.work);
        let mut landed_ps = left_ps + model.half_way_ps() + model.jitter_ps(index);
        if model.ordering == Ordering::RcQueuePair {
            landed_ps = landed_ps.max(queue.landed_ps + 1);
        }
        let acknowledged_ps = match model.ordering {
            Ordering::None => left_ps + 2 * model.half_way_ps(),
            _ => landed_ps + model.half_way_ps(),
        };
        queue.landed_ps = landed_ps;
        let latest = queue.acknowledged_ps.entry(request.peer).or_default();
        *latest = acknowledged_ps.max(*latest);
        self.wire_free_ps = left_ps;
        self.served_last = Some(queue_pair);
        if request.awaited {
            self.awaited -= 1;
            self.awaited_ps = self.awaited_ps.max(acknowledged_ps);
        }
        self.sent.push(Sent { request, posted_ps, started_ps, landed_ps, acknowledged_ps });
        true
    }

    /// The first queue pair in turn of those that can start when the first of all can.
    fn choose(&self) -> Option<(QueuePair, u64)> {
        let ready: Vec<(QueuePair, u64)> = self
            .queues
            .iter()
            .filter_map(|(at, queue)| Some((*at, self.ready_ps(queue)?)))
            .collect();
        let start_ps = ready.iter().map(|(_, ps)| *ps).min()?.max(self.wire_free_ps);
        let can = |at: &&(QueuePair, u64)| at.1 <= start_ps;
        let after = |at: &&(QueuePair, u64)| Some(at.0) > self.served_last;
        let next = ready.iter().filter(can).find(after).or_else(|| ready.iter().find(can))?;
        Some((next.0, start_ps))
    }

    fn ready_ps(&self, queue: &Queue) -> Option<u64> {
        let Posted { request, posted_ps, .. } = queue.waiting.front()?;
        if !request.fenced || self.model.ordering != Ordering::FencePerPeer {
            return Some(*posted_ps);
        }
        let acknowledged_ps = queue.acknowledged_ps.get(&request.peer).copied().unwrap_or(0);
        Some(acknowledged_ps.max(*posted_ps))
    }
}
