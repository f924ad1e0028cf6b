//! A client of objects, as a model: a process on a node's host that puts, gets and looks for objects, and ends,
//! sometimes in the middle of it. It is the workload; what it reads is shown to the checkers.

use kvasir_blocks::AttachEpoch;
use kvasir_mutation::{Mutation, mutated};
use kvasir_proto::{BlockKey, Generation, Namespace, Share, Side, SlotIndex, TxId};

use crate::calls::{FromClient, Kept, ToClient};
use crate::content::{self, PageBytes, SLOT_BYTES};
use crate::context::{Context, Event};
use crate::node::Running;
use crate::plan::{ClientPlan, ObjectOp};
use crate::seen::{Life, Seen};

/// Parts in which an object is written.
const PARTS: usize = 2;
/// Of one that was expelled: so often it looks at what it had got, before it ends.
const LOOKS: u32 = 4;

#[derive(Debug)]
pub struct Client {
    pub epoch: AttachEpoch,
    /// Among those of the plan.
    pub index: usize,
    op: usize,
    /// Of what it does now.
    steps: u32,
    doing: Doing,
    request: u64,
    /// What it got last, and reads on when it has let go of it.
    got: Vec<(BlockKey, SlotIndex, Generation)>,
    looks: u32,
    /// Shared memory keeps the order of what is said, either way.
    heard_until_us: u64,
    said_until_us: u64,
    pub ended: bool,
}

#[derive(Debug)]
enum Doing {
    Nothing,
    /// For an answer.
    Waits,
    Writes {
        reserve: u64,
        slots: Vec<Option<SlotIndex>>,
        versions: Vec<u32>,
        part: usize,
    },
    Reads {
        get: u64,
        slots: Vec<Option<(SlotIndex, Generation)>>,
        times: u32,
    },
}

impl Client {
    pub fn new(epoch: AttachEpoch, index: usize, now_us: u64) -> Self {
        Client {
            epoch,
            index,
            op: 0,
            steps: 0,
            doing: Doing::Nothing,
            request: 0,
            got: Vec::new(),
            looks: LOOKS,
            heard_until_us: now_us,
            said_until_us: now_us,
            ended: false,
        }
    }

    /// The node says something to it.
    pub fn tell(&mut self, context: &mut Context, at: Life, message: ToClient) {
        let mut chance = context.chance("tell a client", at.node as u64, self.epoch.0.into());
        let us = context.now_us + chance.between(1, 20);
        self.heard_until_us = self.heard_until_us.max(us);
        context.at(self.heard_until_us, Event::ToClient { at, epoch: self.epoch, message });
    }

    pub fn say(&mut self, context: &mut Context, at: Life, message: FromClient) {
        self.request += 1;
        let mut chance = context.chance("a client says", at.node as u64, self.epoch.0.into());
        let us = context.now_us + chance.between(1, 20);
        self.said_until_us = self.said_until_us.max(us);
        let (epoch, request) = (self.epoch, self.request);
        context.at(self.said_until_us, Event::FromClient { at, epoch, request, message });
    }

    /// It says no more. What it has said still counts.
    pub fn end(&mut self, context: &mut Context, at: Life) {
        if !std::mem::replace(&mut self.ended, true) {
            self.say(context, at, FromClient::Gone);
        }
    }

    fn goes_on(&self, context: &mut Context, at: Life) {
        let pace_us = context.plan.clients[self.index].pace_us;
        context.after(pace_us, Event::ClientStep { at, epoch: self.epoch });
    }

    fn plan(&self, context: &Context) -> ClientPlan {
        context.plan.clients[self.index].clone()
    }
}

fn keys(context: &Context, plan: &ClientPlan, op: &ObjectOp) -> (Namespace, Vec<BlockKey>) {
    // One that is curious asks for what others have put.
    let key = |object: &u64| context.truth.object(plan.tenant_of_keys(), *object);
    (plan.namespace(), op.objects().iter().map(key).collect())
}

/// Something that names what a client reads, for the checkers.
pub fn reading(epoch: AttachEpoch) -> Share {
    let tx = TxId { conductor_incarnation: 1, serial: epoch.0.into() };
    Share { tx, side: Side::Decode }
}

/// What a client hears.
pub fn hear(node: &mut Running, context: &mut Context, epoch: AttachEpoch, message: ToClient) {
    let at = node.at;
    let Some(client) = node.client(epoch) else { return };
    if client.ended {
        return;
    }
    let request = client.request;
    client.doing = match message {
        ToClient::Reserved { slots, versions } => {
            Doing::Writes { reserve: request, slots, versions, part: 0 }
        }
        ToClient::Got { slots } if slots.iter().any(Option::is_some) => {
            Doing::Reads { get: request, slots, times: 2 }
        }
        ToClient::Got { .. }
        | ToClient::Committed
        | ToClient::Found
        | ToClient::Removed
        | ToClient::Refused => {
            (client.op, client.steps) = (client.op + 1, 0);
            Doing::Nothing
        }
    };
    client.goes_on(context, at);
}

/// A step of a client.
pub fn step(node: &mut Running, context: &mut Context, epoch: AttachEpoch) {
    let at = node.at;
    let expelled = node.is_expelled(epoch);
    let Some(client) = node.client(epoch) else { return };
    if client.ended || matches!(client.doing, Doing::Waits) {
        return;
    }
    let plan = client.plan(context);
    let dies = plan.dies_at_op == Some(client.op) && client.steps >= plan.dies_at_step;
    client.steps += 1;
    if dies {
        context.covers(match client.doing {
            Doing::Writes { part: 1.., .. } => "a client dies with a half-written object",
            Doing::Reads { .. } => "a client dies while it reads",
            _ => "a client dies",
        });
    }
    let Some(op) = plan.ops.get(client.op).filter(|_| !expelled && !dies) else {
        if expelled && client.looks > 0 {
            client.looks -= 1;
            client.goes_on(context, at);
            return read_on(node, context, epoch);
        }
        return client.end(context, at);
    };
    let (_, keys) = keys(context, &plan, op);
    let doing = std::mem::replace(&mut client.doing, Doing::Waits);
    if !matches!(doing, Doing::Reads { .. }) {
        read_on(node, context, epoch);
    }
    let Some(client) = node.client(epoch) else { return };
    match doing {
        Doing::Waits => {}
        Doing::Nothing => {
            let lease_ms = plan.lease_ms;
            client.say(
                context,
                at,
                match op {
                    ObjectOp::Put { .. } => FromClient::Reserve { keys, lease_ms },
                    ObjectOp::Get { .. } => FromClient::Get { keys },
                    ObjectOp::Find { .. } => FromClient::Find { keys },
                    ObjectOp::Remove { .. } => FromClient::Remove { keys },
                },
            );
        }
        Doing::Writes { reserve, slots, versions, part } if part < PARTS => {
            let (of, to) = (versions.clone(), slots.clone());
            client.doing = Doing::Writes { reserve, slots, versions, part: part + 1 };
            client.goes_on(context, at);
            write(node, context, (&keys, &of), &to, part);
        }
        Doing::Writes { reserve, versions, .. } => {
            // The last one is left out by some.
            let count = keys.len() as u32 - u32::from(plan.leaves_last && keys.len() > 1);
            let sums = |at: u32| {
                let (key, version) = (keys[at as usize], versions[at as usize]);
                content::checksums(context.truth.version(key, version))
            };
            let checksums = (0..count).map(sums).collect();
            let (kept, objects) = (op.kept().unwrap_or(Kept::Normal), (0..count).collect());
            client.say(context, at, FromClient::Commit { reserve, objects, checksums, kept });
        }
        Doing::Reads { get, slots, times } => {
            if times > 1 {
                client.doing = Doing::Reads { get, slots: slots.clone(), times: times - 1 };
                client.goes_on(context, at);
            } else {
                client.say(context, at, FromClient::Unpin { get });
                (client.op, client.steps) = (client.op + 1, 0);
                client.doing = Doing::Nothing;
                client.goes_on(context, at);
            }
            let of = |(key, slot): (&BlockKey, &Option<_>)| slot.map(|(slot, of)| (*key, slot, of));
            client.got = keys.iter().zip(&slots).filter_map(of).collect();
            for (key, slot, _) in client.got.clone() {
                let (bytes, share) = (node.read_slot(slot), reading(epoch));
                context.see(Seen::PageRead { at, share, key, bytes });
            }
        }
    }
}

/// It reads what it had got, though it may have let go of it, and then asks whether that was there still.
fn read_on(node: &mut Running, context: &mut Context, epoch: AttachEpoch) {
    let Some(client) = node.client(epoch) else { return };
    for (key, slot, generation) in client.got.clone() {
        let (at, bytes, share) = (node.at, node.read_slot(slot), reading(epoch));
        let is_current =
            node.generation_word(slot) == generation || mutated(Mutation::UnpinnedReadNotChecked);
        if is_current {
            context.covers("an object is read on without a pin");
            context.see(Seen::PageRead { at, share, key, bytes });
        } else {
            context.covers("an object that was read on had gone");
        }
    }
}

/// A part of each object that is not there yet.
fn write(
    node: &mut Running,
    context: &Context,
    (keys, versions): (&[BlockKey], &[u32]),
    slots: &[Option<SlotIndex>],
    part: usize,
) {
    let (start, end) = (part * SLOT_BYTES / PARTS, (part + 1) * SLOT_BYTES / PARTS);
    for ((key, version), slot) in keys.iter().zip(versions).zip(slots) {
        let bytes: &PageBytes = context.truth.version(*key, *version);
        if let Some(slot) = slot {
            node.write_slot(*slot, start, &bytes[start..end]);
        }
    }
}
