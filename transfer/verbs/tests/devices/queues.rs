//! Completion queues: shared, bounded, and waking a thread.

use kvasir_transfer_verbs::{
    CompletionChannel, CompletionQueue, CompletionQueues, ConnectOptions, Operation, Payload, Psn,
    QueuePairOptions, RcQueuePair, Receive, Request, Side, VerbsError, Wake, WorkCompletion,
    WorkKind, WorkTag,
};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::support::{End, Lab, assert_success, poll};

fn on_one_queue(lab: &Lab, queue: &CompletionQueue, depth: u32) -> Result<RcQueuePair, VerbsError> {
    let queues = CompletionQueues { send: queue, receive: queue };
    let options =
        QueuePairOptions { send_depth: depth, receive_depth: depth, ..QueuePairOptions::default() };
    let psn = Psn::from_random(std::process::id());
    RcQueuePair::new(&lab.pd, &lab.path, queues, psn, options)
}

#[test]
fn many_queue_pairs_share_a_completion_queue_and_each_stays_in_order() {
    let Some(lab) = Lab::open() else { return };
    let (pairs, writes, bytes) = (6_usize, 16_u32, 512_usize);
    let queue = lab.queue(1024);
    let mut ends: Vec<RcQueuePair> =
        (0..2 * pairs).map(|_| on_one_queue(&lab, &queue, 32).expect("a queue pair")).collect();
    for [a, b] in ends.as_chunks_mut().0 {
        let (to_a, to_b) = (a.address(), b.address());
        a.connect(&to_b, &ConnectOptions::default()).expect("connected");
        b.connect(&to_a, &ConnectOptions::default()).expect("connected");
        let receive = Receive { into: &[], tag: WorkTag(0) };
        b.post_receives(&vec![receive; writes as usize]).expect("posted");
    }
    let (source, target) = (lab.memory(bytes), lab.memory(bytes * pairs));
    let slices = [source.slice(0, bytes)];
    for imm in 0..writes {
        for (number, [a, _]) in ends.as_chunks_mut().0.iter_mut().enumerate() {
            let from = Payload::Slices(&slices);
            let to = target.at(number * bytes, bytes);
            let write = Operation::WriteImm { from, to, imm };
            a.post(&[Request::new(write, WorkTag(imm))]).expect("posted");
        }
    }
    let told = poll(&queue, 2 * pairs * writes as usize);
    assert_success(&told);
    for end in &mut ends {
        let mine: Vec<_> = told.iter().filter(|told| told.qp_num() == end.number()).collect();
        assert_eq!(mine.len(), writes as usize);
        let numbers: Vec<u32> = mine
            .iter()
            .filter_map(|told| match told.kind() {
                Some(WorkKind::Write) => told.tag().map(|tag| tag.0),
                _ => told.imm(),
            })
            .collect();
        assert_eq!(numbers, (0..writes).collect::<Vec<u32>>());
        for completion in mine {
            end.retire(completion);
        }
        assert_eq!((end.outstanding(Side::Send), end.outstanding(Side::Receive)), (0, 0));
    }
}

/// How much room a queue has, when it has none for a queue pair of that depth, which needs twice as much
/// and a place for the marker of a cut-off.
fn free(lab: &Lab, queue: &CompletionQueue, depth: u32) -> u32 {
    match on_one_queue(lab, queue, depth) {
        Err(VerbsError::CompletionQueueTooSmall { wanted, free }) if wanted == 2 * depth + 1 => {
            free
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_completion_queue_takes_no_queue_pair_that_could_overflow_it() {
    let Some(lab) = Lab::open() else { return };
    let queue = lab.queue(63);
    let capacity = queue.capacity();
    let held: Vec<RcQueuePair> =
        (0..capacity / 15).map(|_| on_one_queue(&lab, &queue, 7).expect("there is room")).collect();
    assert_eq!(free(&lab, &queue, 7), capacity % 15);
    // One that fails for another reason takes no room.
    let queues = CompletionQueues { send: &lab.queue(63), receive: &queue };
    let psn = Psn::from_random(1);
    let options =
        QueuePairOptions { receive_depth: 1, send_depth: 1, ..QueuePairOptions::default() };
    let too_many = QueuePairOptions { send_slices_max: u32::MAX, ..options };
    if capacity % 15 > 0 {
        RcQueuePair::new(&lab.pd, &lab.path, queues, psn, too_many).expect_err("too many slices");
    }
    assert_eq!(free(&lab, &queue, 7), capacity % 15);
    drop(held);
}

#[test]
fn a_completion_queue_has_room_again_once_it_was_seen_empty() {
    let Some(lab) = Lab::open() else { return };
    let queue = lab.queue(63);
    let mut b = on_one_queue(&lab, &queue, queue.capacity() / 2 - 1).expect("it fills the queue");
    let before = free(&lab, &queue, 7);
    let mut a = End::new(&lab, QueuePairOptions::default());
    let (to_a, to_b) = (a.qp.address(), b.address());
    a.qp.connect(&to_b, &ConnectOptions::default()).expect("connected");
    b.connect(&to_a, &ConnectOptions::default()).expect("connected");
    b.post_receives(&[Receive { into: &[], tag: WorkTag(0) }; 2]).expect("posted");
    a.qp.post(&[Request::new(Operation::Imm { imm: 1 }, WorkTag(1)); 2]).expect("posted");
    assert_success(&a.wait(Side::Send, 2));

    drop(b);
    for _ in 0..2 {
        assert_eq!(free(&lab, &queue, 7), before, "completions of it are still there");
        let left = queue.poll(&mut [WorkCompletion::default()]).expect("polls").len();
        assert_eq!(left, 1);
    }
    assert_eq!(free(&lab, &queue, 7), before, "there might be more");
    let left = queue.poll(&mut [WorkCompletion::default()]).expect("polls").len();
    assert_eq!(left, 0);
    on_one_queue(&lab, &queue, 7).expect("it has been seen empty");
}

fn is_readable(channel: &CompletionChannel, wait_ms: u32) -> bool {
    let mut fds = [PollFd::new(channel, PollFlags::IN)];
    let wait = Timespec { tv_sec: i64::from(wait_ms) / 1000, tv_nsec: 0 };
    rustix::event::poll(&mut fds, Some(&wait)).expect("a poll") > 0
}

#[test]
fn an_armed_queue_wakes_a_sleeping_thread_once() {
    let Some(lab) = Lab::open() else { return };
    let channel = CompletionChannel::new(&lab.context).expect("a channel");
    let queue = CompletionQueue::new(&lab.context, 64, Some(&channel)).expect("a queue");
    let mut b = on_one_queue(&lab, &queue, 8).expect("a queue pair");
    let mut a = End::new(&lab, QueuePairOptions::default());
    let (to_a, to_b) = (a.qp.address(), b.address());
    a.qp.connect(&to_b, &ConnectOptions::default()).expect("connected");
    b.connect(&to_a, &ConnectOptions::default()).expect("connected");
    b.post_receives(&[Receive { into: &[], tag: WorkTag(0) }; 4]).expect("posted");

    assert!(channel.next_event().expect("no waiting").is_none());
    queue.arm(Wake::Any).expect("armed");
    let imm = Request::new(Operation::Imm { imm: 1 }, WorkTag(1));
    a.qp.post(&[imm]).expect("posted");
    assert!(is_readable(&channel, 60_000), "the descriptor wakes");
    assert_eq!(channel.next_event().expect("an event"), Some(queue.id()));
    assert!(channel.next_event().expect("no waiting").is_none(), "one event for one arming");
    assert_success(&poll(&queue, 1));

    // Not armed: nothing wakes, though a completion comes.
    a.qp.post(&[imm]).expect("posted");
    assert_success(&poll(&queue, 1));
    assert!(!is_readable(&channel, 0));

    // Armed for what the sender marks only.
    queue.arm(Wake::Solicited).expect("armed");
    a.qp.post(&[imm]).expect("posted");
    assert_success(&poll(&queue, 1));
    assert!(channel.next_event().expect("no waiting").is_none());
    a.qp.post(&[imm.solicited()]).expect("posted");
    assert!(is_readable(&channel, 60_000));
    assert_eq!(channel.next_event().expect("an event"), Some(queue.id()));
}

#[test]
fn objects_may_be_dropped_in_any_order() {
    let Some(lab) = Lab::open() else { return };
    let channel = CompletionChannel::new(&lab.context).expect("a channel");
    let queue = CompletionQueue::new(&lab.context, 64, Some(&channel)).expect("a queue");
    let memory = lab.memory(4096);
    let pair = on_one_queue(&lab, &queue, 8).expect("a queue pair");
    drop(lab);
    drop(channel);
    drop(queue);
    assert_eq!(pair.state().expect("alive"), kvasir_transfer_verbs::QueuePairState::Initialised);
    assert_eq!(memory.all(), [0; 4096]);
    drop(memory);
    drop(pair);
}
