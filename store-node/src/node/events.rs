//! Subscribers of block events and status. Each has a bounded queue; who falls behind gets changes
//! from the core's log while it reaches back, and a new snapshot after that. Nothing is kept for a
//! slow one but the rest of the snapshot it is being sent.
//!
//! Who is up to date is told the digests of what the node has, with the last changes or, when there
//! are none for a while, without any: at the end of its snapshot, and every few seconds after that.

use crate::node::command::Refused;
use kvasir_blocks::{Blocks, Snapshot};
use kvasir_proto::{BlockKey, v1};
use tokio::sync::mpsc;

/// Keys in one part of a snapshot: 1 MiB.
const SNAPSHOT_KEYS: usize = 65_536;
const CHANGES_MAX: usize = 4096;
/// A subscriber that is up to date is told the digests so often; they take some 70 bytes.
const DIGESTS_MS: u64 = 5_000;
/// Subscribers at once; there is one for each conductor.
pub(crate) const SUBSCRIBERS_MAX: usize = 64;
/// Events that wait for one subscriber.
pub(crate) const QUEUE: usize = 64;

/// All subscribers.
#[derive(Debug)]
pub(crate) struct Events {
    incarnation: u64,
    subscribers: Vec<Subscriber>,
}

#[derive(Debug)]
struct Subscriber {
    queue: mpsc::Sender<v1::NodeEvent>,
    at: At,
    status_sent: bool,
    /// When it is to be told the digests.
    digests_due_ms: u64,
}

#[derive(Debug)]
enum At {
    /// Everything up to this sequence is sent.
    Sequence(u64),
    NoSnapshot,
    /// Keys from this index on are not sent yet.
    InSnapshot(Snapshot, usize),
}

impl Events {
    pub(crate) fn new(incarnation: u64) -> Self {
        Events { incarnation, subscribers: Vec::new() }
    }

    /// Takes a subscriber, beginning after `from_sequence` when it knows this incarnation.
    ///
    /// # Errors
    /// There are as many as there may be.
    pub(crate) fn subscribe(
        &mut self,
        request: &v1::EventsRequest,
        queue: mpsc::Sender<v1::NodeEvent>,
        status: v1::NodeDescription,
    ) -> Result<(), Refused> {
        self.subscribers.retain(|subscriber| !subscriber.queue.is_closed());
        if self.subscribers.len() >= SUBSCRIBERS_MAX {
            let why = format!(
                "this node's events already have {SUBSCRIBERS_MAX} subscribers, the maximum"
            );
            return Err(Refused::NoSpace(why));
        }
        let at = if request.incarnation == self.incarnation {
            At::Sequence(request.from_sequence)
        } else {
            At::NoSnapshot
        };
        self.subscribers.push(Subscriber { queue, at, status_sent: false, digests_due_ms: 0 });
        self.status(&status);
        Ok(())
    }

    /// Sends what subscribers lack and their queues take. Answers whether all are up to date.
    pub(crate) fn advance(&mut self, now_ms: u64, blocks: &Blocks) -> bool {
        let incarnation = self.incarnation;
        self.subscribers.retain(|subscriber| !subscriber.queue.is_closed());
        let advance = |subscriber: &mut Subscriber| subscriber.advance(incarnation, now_ms, blocks);
        // Each is advanced, also after one that is behind.
        self.subscribers.iter_mut().map(advance).fold(true, |all, current| all & current)
    }

    /// Offers the status to everyone; who has no room gets the next one.
    pub(crate) fn status(&mut self, status: &v1::NodeDescription) {
        for subscriber in &mut self.subscribers {
            let event = v1::node_event::Event::Status(status.clone());
            subscriber.status_sent |= subscriber.send(self.incarnation, event).is_ok();
        }
    }

    /// Whether somebody has never had a status.
    pub(crate) fn lacks_status(&self) -> bool {
        self.subscribers.iter().any(|subscriber| !subscriber.status_sent)
    }

    pub(crate) fn count(&self) -> usize {
        self.subscribers.len()
    }
}

impl Subscriber {
    fn advance(&mut self, incarnation: u64, now_ms: u64, blocks: &Blocks) -> bool {
        while self.queue.capacity() > 0 {
            let digests_due = now_ms >= self.digests_due_ms;
            match &mut self.at {
                At::Sequence(at) if *at == blocks.sequence() && !digests_due => return true,
                At::Sequence(at) => match blocks.changes_since(*at, CHANGES_MAX) {
                    None => self.at = At::NoSnapshot,
                    Some(changes) => {
                        *at = changes.first_sequence + changes.changes.len() as u64 - 1;
                        // They are exact after the last change, and known for no earlier one.
                        let told = digests_due && *at == blocks.sequence();
                        if told {
                            self.digests_due_ms = now_ms + DIGESTS_MS;
                        }
                        let change = |change: &kvasir_blocks::BlockChange| v1::BlockChange {
                            removed: change.removed,
                            key: change.key.0.to_vec(),
                            tier: tier(change.tier).into(),
                        };
                        let event = v1::node_event::Event::Changes(v1::BlockChanges {
                            sequence: changes.first_sequence,
                            changes: changes.changes.iter().map(change).collect(),
                            digests: told.then(|| blocks.digests().to_wire()),
                        });
                        // There is room: this thread is the only sender.
                        let _ = self.send(incarnation, event);
                    }
                },
                At::NoSnapshot => self.at = At::InSnapshot(blocks.snapshot(), 0),
                At::InSnapshot(snapshot, sent) => {
                    let (start, all) = (*sent, snapshot.keys.len());
                    // A part has keys of one tier.
                    let (vram, memory) =
                        (snapshot.vram_keys, snapshot.vram_keys + snapshot.dram_keys);
                    let (all_of_tier, tier) = match start {
                        at if at < vram => (vram, v1::Tier::Vram),
                        at if at < memory => (memory, v1::Tier::Dram),
                        _ => (all, v1::Tier::Ssd),
                    };
                    let end = all_of_tier.min(start + SNAPSHOT_KEYS);
                    let event = v1::node_event::Event::Snapshot(v1::Snapshot {
                        sequence: snapshot.sequence,
                        first: start == 0,
                        last: end == all,
                        keys: BlockKey::concat(&snapshot.keys[start..end]),
                        tier: tier.into(),
                    });
                    *sent = end;
                    let done = (end == all).then_some(snapshot.sequence);
                    let _ = self.send(incarnation, event);
                    if let Some(sequence) = done {
                        self.at = At::Sequence(sequence);
                    }
                }
            }
        }
        let current = matches!(self.at, At::Sequence(at) if at == blocks.sequence());
        current || self.queue.is_closed()
    }

    fn send(&self, incarnation: u64, event: v1::node_event::Event) -> Result<(), ()> {
        let event = v1::NodeEvent { incarnation, event: Some(event) };
        self.queue.try_send(event).map_err(|_| ())
    }
}

fn tier(tier: kvasir_blocks::Tier) -> v1::Tier {
    match tier {
        kvasir_blocks::Tier::Vram => v1::Tier::Vram,
        kvasir_blocks::Tier::Dram => v1::Tier::Dram,
        kvasir_blocks::Tier::Ssd => v1::Tier::Ssd,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use kvasir_blocks::{Allocate, AttachEpoch, Options};
    use kvasir_proto::{Namespace, Share, Side, TierDigests, TxId};

    use super::*;

    const LOG: usize = 4;

    fn blocks() -> Blocks {
        let options =
            Options { slots: 256, block_tokens: 1, event_log_max: LOG, ..Options::default() };
        Blocks::new(options)
    }

    fn key(serial: u64) -> BlockKey {
        BlockKey(u128::from(serial).to_le_bytes())
    }

    /// Commits one block that stands alone.
    fn commit(blocks: &mut Blocks, serial: u64) {
        let tx = TxId { conductor_incarnation: 1, serial };
        let share = Share { tx, side: Side::Prefill };
        let request = Allocate {
            share,
            namespace: Namespace([1; 16]),
            keys: vec![key(serial)],
            prompt_tokens: 1,
            lease_ms: 1000,
            fetch_until_block: 0,
            has_remote_writer: false,
            is_ephemeral: false,
            leaves_ssd: false,
        };
        blocks.allocate(0, &request).expect("room");
        blocks.bind(share, AttachEpoch(1)).expect("bound");
        blocks.commit_page(share, 0, 1).expect("committed");
        blocks.release(0, share).expect("released");
        while blocks.poll_action().is_some() {}
    }

    /// Applies what waits in the queue to a copy; answers with the number of snapshots begun.
    fn take(queue: &mut mpsc::Receiver<v1::NodeEvent>, copy: &mut BTreeSet<BlockKey>) -> u32 {
        let mut snapshots = 0;
        while let Ok(event) = queue.try_recv() {
            match event.event.expect("an event") {
                v1::node_event::Event::Snapshot(part) => {
                    if part.first {
                        snapshots += 1;
                        copy.clear();
                    }
                    copy.extend(BlockKey::list(&part.keys).expect("keys"));
                }
                v1::node_event::Event::Changes(changes) => {
                    for change in changes.changes {
                        copy.extend(BlockKey::list(&change.key).expect("a key"));
                    }
                }
                v1::node_event::Event::Status(_) => {}
            }
        }
        snapshots
    }

    #[test]
    fn a_slow_subscriber_costs_no_memory_and_gets_a_snapshot_when_the_log_has_moved_on() {
        let (mut blocks, mut events) = (blocks(), Events::new(9));
        let (queue, mut receiver) = mpsc::channel(2);
        let request = v1::EventsRequest { incarnation: 0, from_sequence: 0 };
        events.subscribe(&request, queue, v1::NodeDescription::default()).expect("a place");
        assert!(events.advance(0, &blocks));
        let mut copy = BTreeSet::new();
        assert_eq!(take(&mut receiver, &mut copy), 1);
        // It reads in time: changes only.
        for serial in 0..3 {
            commit(&mut blocks, serial);
            assert!(events.advance(0, &blocks));
            assert_eq!(take(&mut receiver, &mut copy), 0);
        }
        // It reads nothing while much happens: its queue stays as long as it is.
        for serial in 3..50 {
            commit(&mut blocks, serial);
            events.advance(0, &blocks);
        }
        assert!(!events.advance(0, &blocks), "it is behind");
        assert_eq!(receiver.len(), 2);
        let mut snapshots = take(&mut receiver, &mut copy);
        while !events.advance(0, &blocks) {
            snapshots += take(&mut receiver, &mut copy);
        }
        snapshots += take(&mut receiver, &mut copy);
        assert_eq!(snapshots, 1);
        assert_eq!(copy, (0..50).map(key).collect());
    }

    /// What waits in the queue: how many changes each batch has, and the digests that it carries.
    fn batches(
        queue: &mut mpsc::Receiver<v1::NodeEvent>,
    ) -> Vec<(u64, usize, Option<TierDigests>)> {
        let mut batches = Vec::new();
        while let Ok(event) = queue.try_recv() {
            if let Some(v1::node_event::Event::Changes(batch)) = event.event {
                let digests = batch.digests.as_ref();
                let digests = digests.map(|of| TierDigests::from_wire(of).expect("digests"));
                batches.push((batch.sequence, batch.changes.len(), digests));
            }
        }
        batches
    }

    #[test]
    fn digests_come_now_and_then_and_only_where_they_are_exact() {
        let (mut blocks, mut events) = (blocks(), Events::new(9));
        let (queue, mut receiver) = mpsc::channel(8);
        events
            .subscribe(&v1::EventsRequest::default(), queue, v1::NodeDescription::default())
            .expect("a place");
        let upto = |serials: u64| {
            let keys: Vec<BlockKey> = (0..serials).map(key).collect();
            Some(TierDigests { dram: keys.iter().collect(), ..TierDigests::default() })
        };
        events.advance(1_000, &blocks);
        assert_eq!(batches(&mut receiver), [(1, 0, upto(0))], "after the snapshot");
        commit(&mut blocks, 0);
        events.advance(1_001, &blocks);
        assert_eq!(batches(&mut receiver), [(1, 1, None)], "not with every change");
        events.advance(1_000 + DIGESTS_MS - 1, &blocks);
        assert_eq!(batches(&mut receiver), []);
        events.advance(1_000 + DIGESTS_MS, &blocks);
        assert_eq!(batches(&mut receiver), [(2, 0, upto(1))], "in a quiet moment");
        for serial in 1..4 {
            commit(&mut blocks, serial);
        }
        events.advance(1_000 + 2 * DIGESTS_MS, &blocks);
        assert_eq!(batches(&mut receiver), [(2, 3, upto(4))], "with changes");
    }

    #[test]
    fn who_leaves_is_forgotten_and_too_many_are_refused() {
        let (blocks, mut events) = (blocks(), Events::new(9));
        let request = v1::EventsRequest::default();
        let subscribe = |events: &mut Events| {
            let (queue, receiver) = mpsc::channel(2);
            let status = v1::NodeDescription::default();
            events.subscribe(&request, queue, status).map(|()| receiver)
        };
        let receivers: Vec<_> =
            (0..SUBSCRIBERS_MAX).map(|_| subscribe(&mut events).expect("a place")).collect();
        assert!(matches!(subscribe(&mut events), Err(Refused::NoSpace(_))));
        assert_eq!(events.count(), SUBSCRIBERS_MAX);
        drop(receivers);
        assert!(subscribe(&mut events).is_ok());
        events.advance(0, &blocks);
        assert_eq!(events.count(), 0);
    }
}
