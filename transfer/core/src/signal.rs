//! Put-with-signal: data for a peer, and then a word that a consumer there polls, which must never be
//! seen before the data. This is the planner: transfers go in, an ordered list of work requests and
//! waits comes out, a value to be printed, compared and replayed. Planning posts nothing; who executes
//! a plan chooses nothing. What a domain can order is its [`Ordering`]; where that does not suffice the
//! plan counts arrivals instead, and [`Planned`] says so. Engines execute plans in [`crate::signalled`].
//!
//! What must hold: a signal is posted after its put, on the same queue pair, with a wait or a fence
//! between them. [`nic`] executes plans in virtual time; [`check`] says what landed too early.
//!
//! One put is one work request here. Whoever cuts a put into slices posts all of them to the queue pair
//! of the plan before going on.

pub mod check;
pub mod nic;
mod ordering;

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroUsize};

use kvasir_mutation::{Mutation, mutated};

pub use ordering::{Fallback, Ordering};

/// Transfers of one plan, at most: what is planned at once is one layer or one step, not a queue.
pub const TRANSFERS_MAX: usize = 1 << 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Peer(pub u32);

/// Of a domain without connections, one of its endpoints, which peers share. Of a connected domain, one
/// of the queue pairs that it has with the request's peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueuePair(pub u32);

/// The word that the consumer polls. What it means is the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SignalWord(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    pub peer: Peer,
    pub bytes: u64,
    pub signal: SignalWord,
}

/// Which puts share one fence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Put, fence, signal, and the next.
    Coupled,
    /// The puts of a group, one fence (for each peer in it), the signals of the group.
    Decoupled { group: Group },
}

/// One group for each destination.
impl Default for Mode {
    fn default() -> Self {
        Mode::Decoupled { group: Group::default() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Group {
    /// What goes to one peer, peers in the order in which they first appear.
    #[default]
    PerDestination,
    /// So many in the order given, wherever they go. Of one: coupled.
    Size(NonZeroUsize),
    All,
}

/// Who keeps a signal behind its puts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderedBy {
    /// The poster, by waiting until the puts are acknowledged.
    Host,
    /// The NIC, by a fence on the first signal to a peer. Nobody waits.
    Nic,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    pub mode: Mode,
    pub ordered_by: OrderedBy,
    /// What the domain offers.
    pub ordering: Ordering,
    pub queue_pairs: NonZeroU32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// `counted`: carries an immediate, one count at the receiver.
    Put {
        bytes: u64,
        counted: bool,
    },
    Signal(SignalWord),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Index into what was planned.
    pub transfer: usize,
    pub peer: Peer,
    pub queue_pair: QueuePair,
    pub work: Work,
    /// Not before what went to this peer on this queue pair is acknowledged, nor anything behind it. A
    /// flag, for there is no fence without a request in verbs nor in libfabric.
    pub fenced: bool,
    /// The next wait is for this one's completion, so it has to ask for one.
    pub awaited: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Post(Request),
    /// Nothing further is posted until every request that is `awaited` so far is acknowledged.
    Wait,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    pub steps: Vec<Step>,
}

/// What came of the wish for signals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Planned {
    Signals(Plan),
    /// The plan has no signals. Its puts are counted, and the receiver's host has to act on the counter
    /// where a consumer would have polled.
    Counters {
        plan: Plan,
        reason: Fallback,
    },
}

impl Planned {
    pub fn plan(&self) -> &Plan {
        match self {
            Planned::Signals(plan) | Planned::Counters { plan, .. } => plan,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{transfers} transfers exceed the maximum of {TRANSFERS_MAX} per plan")]
pub struct TooMany {
    pub transfers: usize,
}

/// # Errors
/// More than [`TRANSFERS_MAX`]; plan them in parts.
pub fn plan(transfers: &[Transfer], options: Options) -> Result<Planned, TooMany> {
    if transfers.len() > TRANSFERS_MAX {
        return Err(TooMany { transfers: transfers.len() });
    }
    Ok(plan_grouped(transfers, &groups(transfers, options.mode), options))
}

/// The plan for some of the transfers of a larger plan, such as those to one peer: `group_of` says which group
/// of [`group_numbers`] each is of. They are ordered as there, but nothing of them waits for any other transfer.
///
/// # Panics
/// When the two are not of the same length.
pub fn plan_apart(transfers: &[Transfer], group_of: &[usize], options: Options) -> Planned {
    assert_eq!(transfers.len(), group_of.len(), "each is of one group");
    let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (at, group) in group_of.iter().enumerate() {
        groups.entry(*group).or_default().push(at);
    }
    let groups: Vec<Vec<usize>> = groups.into_values().collect();
    plan_grouped(transfers, &groups, options)
}

/// The group of each transfer. Groups are numbered in the order of their turns.
pub fn group_numbers(transfers: &[Transfer], mode: Mode) -> Vec<usize> {
    let mut numbers = vec![0; transfers.len()];
    for (number, group) in groups(transfers, mode).into_iter().enumerate() {
        group.into_iter().for_each(|at| numbers[at] = number);
    }
    numbers
}

fn plan_grouped(transfers: &[Transfer], groups: &[Vec<usize>], options: Options) -> Planned {
    match options.ordering.refuses(options.ordered_by) {
        Some(reason) => {
            Planned::Counters { plan: puts(transfers, options.queue_pairs, true), reason }
        }
        None => Planned::Signals(with_signals(transfers, groups, options)),
    }
}

/// The same puts in the order given, and no signal: what signals are measured against.
///
/// # Errors
/// More than [`TRANSFERS_MAX`].
pub fn plan_puts_only(transfers: &[Transfer], queue_pairs: NonZeroU32) -> Result<Plan, TooMany> {
    if transfers.len() > TRANSFERS_MAX {
        return Err(TooMany { transfers: transfers.len() });
    }
    Ok(puts(transfers, queue_pairs, false))
}

impl Plan {
    /// Every request in the order of posting.
    pub fn requests(&self) -> impl Iterator<Item = &Request> {
        self.steps.iter().filter_map(|step| match step {
            Step::Post(request) => Some(request),
            Step::Wait => None,
        })
    }

    /// What one queue pair is given.
    pub fn queue(&self, queue_pair: QueuePair) -> impl Iterator<Item = &Request> {
        self.requests().filter(move |request| request.queue_pair == queue_pair)
    }

    pub fn waits(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Wait)).count()
    }

    pub fn fences(&self) -> usize {
        self.requests().filter(|request| request.fenced).count()
    }
}

fn puts(transfers: &[Transfer], queue_pairs: NonZeroU32, counted: bool) -> Plan {
    let steps = transfers.iter().enumerate().map(|(index, transfer)| {
        let work = Work::Put { bytes: transfer.bytes, counted };
        Step::Post(request(index, transfer.peer, queue_pairs, work))
    });
    Plan { steps: steps.collect() }
}

fn with_signals(transfers: &[Transfer], groups: &[Vec<usize>], options: Options) -> Plan {
    let mut plan = Plan::default();
    for group in groups {
        push_puts(&mut plan, transfers, group, options);
        if options.ordered_by == OrderedBy::Host {
            plan.steps.push(Step::Wait);
        }
        push_signals(&mut plan, transfers, group, options);
    }
    plan
}

fn groups(transfers: &[Transfer], mode: Mode) -> Vec<Vec<usize>> {
    let all: Vec<usize> = (0..transfers.len()).collect();
    let size = match mode {
        Mode::Coupled => 1,
        Mode::Decoupled { group: Group::Size(size) } => size.get(),
        Mode::Decoupled { group: Group::All } => all.len().max(1),
        Mode::Decoupled { group: Group::PerDestination } => return by_destination(transfers),
    };
    all.chunks(size).map(<[usize]>::to_vec).collect()
}

fn by_destination(transfers: &[Transfer]) -> Vec<Vec<usize>> {
    let mut place: BTreeMap<Peer, usize> = BTreeMap::new();
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (index, transfer) in transfers.iter().enumerate() {
        let at = *place.entry(transfer.peer).or_insert(groups.len());
        if at == groups.len() {
            groups.push(Vec::new());
        }
        groups[at].push(index);
    }
    groups
}

fn push_puts(plan: &mut Plan, transfers: &[Transfer], group: &[usize], options: Options) {
    let waits = options.ordered_by == OrderedBy::Host;
    // From the back, so that the last on its queue pair is met first.
    let mut last: BTreeSet<QueuePair> = BTreeSet::new();
    let mut steps: Vec<Step> = Vec::with_capacity(group.len());
    for &index in group.iter().rev() {
        let Transfer { peer, bytes, .. } = transfers[index];
        let work = Work::Put { bytes, counted: false };
        let mut request = request(index, peer, options.queue_pairs, work);
        let is_last = last.insert(request.queue_pair);
        // Where acknowledgements come in order, the last one speaks for those before it.
        request.awaited = waits && (is_last || !options.ordering.acknowledges_in_order());
        steps.push(Step::Post(request));
    }
    plan.steps.extend(steps.into_iter().rev());
}

fn push_signals(plan: &mut Plan, transfers: &[Transfer], group: &[usize], options: Options) {
    // A fence is for one peer (`FI_FENCE` is defined so), also where peers share a queue pair. What is
    // behind it to the same peer starts after it and needs none.
    let mut fenced: BTreeSet<Peer> = BTreeSet::new();
    for &index in group {
        let Transfer { peer, signal, .. } = transfers[index];
        let mut request = request(index, peer, options.queue_pairs, Work::Signal(signal));
        let is_fenced = options.ordered_by == OrderedBy::Nic && fenced.insert(peer);
        request.fenced = is_fenced && !mutated(Mutation::SignalFenceOmitted);
        plan.steps.push(Step::Post(request));
    }
}

/// Pinned: all that goes to one peer takes one queue pair, since no NIC orders two. Plans whose host
/// waits are pinned as well, for a signal then follows its puts through the same queue of the
/// receiving NIC, and plans differ in their fences only.
fn request(transfer: usize, peer: Peer, queue_pairs: NonZeroU32, work: Work) -> Request {
    let is_moved = mutated(Mutation::PeerOnTwoQueuePairs) && matches!(work, Work::Signal(_));
    let queue_pair = QueuePair((peer.0 + u32::from(is_moved)) % queue_pairs);
    Request { transfer, peer, queue_pair, work, fenced: false, awaited: false }
}
