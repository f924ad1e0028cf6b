//! Disorder from a seed: stands in for SRD, which orders nothing, where only ordered providers are at
//! hand. For tests.
//!
//! On the way out, posts wait for a few polls and go in any order, and long writes go in pieces that
//! mix with those of others; an immediate goes by itself when its pieces have landed. On the way in,
//! completions and arrivals wait for a few polls and are told in any order. So, as a receiver sees it,
//! the bytes of a later write may be there before an earlier one's are, and an arrival may be told long
//! after later writes have landed. What SRD does promise stays: nothing is lost or doubled, and an
//! immediate is told when all of its own write has landed.
//!
//! What it cannot do: the providers below still order what one piece and its immediate do, so bytes of
//! one piece never become visible in another order than the provider's.

use std::collections::BTreeMap;

use crate::completion::{Completion, Immediate, Operation, Token};
use crate::endpoint::{Inject, Message, Read, Receive, Write};
use crate::error::{Busy, Failure, OperationError, PostError, QueueError};
use crate::region::RemotePlace;
use crate::wire::Wire;

/// How much disorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShuffleOptions {
    /// Same seed, same decisions; what they do still depends on when completions come.
    pub seed: u64,
    /// How many polls a post or a completion waits at most.
    pub delay_polls_max: u32,
    /// How many posts, and how many completions, wait at once; a post beyond it is busy.
    pub waiting_max: usize,
    /// Longer writes go in pieces of this size.
    pub piece_bytes: usize,
}

impl Default for ShuffleOptions {
    fn default() -> Self {
        ShuffleOptions { seed: 0, delay_polls_max: 16, waiting_max: 1024, piece_bytes: 64 << 10 }
    }
}

/// A wire that shuffles what goes over another.
#[derive(Debug)]
pub struct Shuffled<W> {
    wire: W,
    options: ShuffleOptions,
    random: Random,
    polls: u64,
    posts: Pen<Post>,
    told: Pen<Completion>,
    /// Tokens below, which are ours, and what each stands for.
    purposes: BTreeMap<u64, Purpose>,
    splits: BTreeMap<u64, Split>,
    numbers: u64,
    scratch: Vec<Completion>,
}

/// An operation that waits.
#[derive(Debug)]
enum Post {
    Write(Write),
    Inject(Inject<'static>, Vec<u8>),
    Read(Read),
    Message(Message),
}

#[derive(Debug)]
enum Purpose {
    /// An operation of the user's, and how many bytes it is said to have moved, where that is not
    /// what was moved below.
    Whole(Token, Option<usize>),
    /// A piece of a split write.
    Piece(u64),
}

/// A write in pieces.
#[derive(Debug)]
struct Split {
    write: Write,
    pieces_left: usize,
    error: Option<OperationError>,
}

impl<W: Wire> Shuffled<W> {
    pub fn new(wire: W, options: ShuffleOptions) -> Self {
        Shuffled {
            wire,
            options,
            random: Random(options.seed),
            polls: 0,
            posts: Pen::default(),
            told: Pen::default(),
            purposes: BTreeMap::new(),
            splits: BTreeMap::new(),
            numbers: 0,
            scratch: Vec::new(),
        }
    }

    /// The wire below.
    pub fn inner(&self) -> &W {
        &self.wire
    }

    /// The wire below, and what it has told that was held back. What was not posted yet is dropped.
    pub fn into_parts(self) -> (W, Vec<Completion>) {
        (self.wire, self.told.0.into_iter().map(|(_, completion)| completion).collect())
    }

    /// Whether posts or completions wait here: poll again.
    pub fn holds_back(&self) -> bool {
        self.posts.len() + self.told.len() > 0
    }

    fn check_room(&self) -> Result<(), PostError> {
        if self.posts.len() >= self.options.waiting_max {
            return Err(PostError::Busy(Busy::Outstanding));
        }
        Ok(())
    }

    fn number(&mut self, purpose: Purpose) -> Token {
        self.numbers += 1;
        self.purposes.insert(self.numbers, purpose);
        Token(self.numbers)
    }

    fn hold(&mut self, post: Post) {
        let due = self.polls + self.random.up_to(self.options.delay_polls_max);
        self.posts.put(due, post);
    }

    fn tell(&mut self, completion: Completion) {
        let due = self.polls + self.random.up_to(self.options.delay_polls_max);
        self.told.put(due, completion);
    }

    fn split(&mut self, write: &Write) {
        self.numbers += 1;
        let number = self.numbers;
        let (bytes, step) = (write.local.bytes(), self.options.piece_bytes.max(1));
        let offsets: Vec<usize> = (0..bytes).step_by(step).collect();
        for offset in &offsets {
            let piece = Write {
                peer: write.peer.clone(),
                local: write.local.part(*offset, step.min(bytes - offset)).expect("a part of it"),
                remote: RemotePlace {
                    address: write.remote.address.wrapping_add(*offset as u64),
                    key: write.remote.key,
                },
                immediate: None,
                token: self.number(Purpose::Piece(number)),
            };
            self.hold(Post::Write(piece));
        }
        let split = Split { write: write.clone(), pieces_left: offsets.len(), error: None };
        self.splits.insert(number, split);
    }

    fn piece_ended(&mut self, number: u64, error: Option<OperationError>) {
        let split = self.splits.get_mut(&number).expect("a piece's write is known till its last");
        split.pieces_left -= 1;
        split.error = split.error.take().or(error);
        if split.pieces_left > 0 {
            return;
        }
        let Split { write, error, .. } = self.splits.remove(&number).expect("just seen");
        let (token, bytes) = (write.token, write.local.bytes());
        let operation = Operation::Write;
        match (error, write.immediate) {
            (Some(error), _) => self.tell(Completion::Failed { token, operation, error }),
            (None, None) => self.tell(Completion::Done { token, operation, bytes }),
            (None, Some(immediate)) => self.signal(&write, immediate),
        }
    }

    /// The immediate of a write whose pieces have landed.
    fn signal(&mut self, write: &Write, immediate: Immediate) {
        let token = self.number(Purpose::Whole(write.token, Some(write.local.bytes())));
        let local = write.local.part(0, 0).expect("nothing is a part of anything");
        self.hold(Post::Write(Write { local, immediate: Some(immediate), token, ..write.clone() }));
    }

    fn forward(&mut self, post: Post) {
        let (result, token) = match &post {
            Post::Write(write) => (self.wire.write(write), write.token),
            Post::Inject(inject, bytes) => {
                (self.wire.inject(&Inject { bytes, ..inject.clone() }), inject.token)
            }
            Post::Read(read) => (self.wire.read(read), read.token),
            Post::Message(message) => (self.wire.send(message), message.token),
        };
        match result {
            Ok(()) => {}
            Err(PostError::Busy(_)) => self.posts.put(self.polls + 1, post),
            Err(error) => {
                let error = into_operation_error(error);
                let operation = match post {
                    Post::Write(_) | Post::Inject(..) => Operation::Write,
                    Post::Read(_) => Operation::Read,
                    Post::Message(_) => Operation::Send,
                };
                self.ended(Completion::Failed { token, operation, error });
            }
        }
    }

    /// Translates a completion from below, and lets it wait.
    fn ended(&mut self, completion: Completion) {
        match completion {
            Completion::Done { token, operation, bytes } => match self.purposes.remove(&token.0) {
                Some(Purpose::Whole(token, said)) => {
                    let bytes = said.unwrap_or(bytes);
                    self.tell(Completion::Done { token, operation, bytes });
                }
                Some(Purpose::Piece(number)) => self.piece_ended(number, None),
                None => {}
            },
            Completion::Failed { token, operation, error } => {
                match self.purposes.remove(&token.0) {
                    Some(Purpose::Whole(token, _)) => {
                        self.tell(Completion::Failed { token, operation, error });
                    }
                    Some(Purpose::Piece(number)) => self.piece_ended(number, Some(error)),
                    None => {}
                }
            }
            other => self.tell(other),
        }
    }
}

impl<W: Wire> Wire for Shuffled<W> {
    fn write(&mut self, write: &Write) -> Result<(), PostError> {
        self.check_room()?;
        if write.local.bytes() > self.options.piece_bytes {
            self.split(write);
        } else {
            let token = self.number(Purpose::Whole(write.token, None));
            self.hold(Post::Write(Write { token, ..write.clone() }));
        }
        Ok(())
    }

    fn inject(&mut self, inject: &Inject<'_>) -> Result<(), PostError> {
        self.check_room()?;
        let token = self.number(Purpose::Whole(inject.token, None));
        let bytes = inject.bytes.to_vec();
        let (peer, remote, immediate) = (inject.peer.clone(), inject.remote, inject.immediate);
        self.hold(Post::Inject(Inject { peer, bytes: &[], remote, immediate, token }, bytes));
        Ok(())
    }

    fn read(&mut self, read: &Read) -> Result<(), PostError> {
        self.check_room()?;
        let token = self.number(Purpose::Whole(read.token, None));
        self.hold(Post::Read(Read { token, ..read.clone() }));
        Ok(())
    }

    fn send(&mut self, message: &Message) -> Result<(), PostError> {
        self.check_room()?;
        let token = self.number(Purpose::Whole(message.token, None));
        self.hold(Post::Message(Message { token, ..message.clone() }));
        Ok(())
    }

    fn receive(&mut self, receive: &Receive) -> Result<(), PostError> {
        let token = self.number(Purpose::Whole(receive.token, None));
        let posted = self.wire.receive(&Receive { token, ..receive.clone() });
        if posted.is_err() {
            self.purposes.remove(&token.0);
        }
        posted
    }

    fn poll(&mut self, out: &mut Vec<Completion>, max: usize) -> Result<usize, QueueError> {
        self.polls += 1;
        for post in self.posts.take_due(self.polls, usize::MAX, &mut self.random) {
            self.forward(post);
        }
        // Polled even when there is no room for more: it is what moves the wire on.
        let room = self.options.waiting_max.saturating_sub(self.told.len()).max(1);
        let mut fresh = std::mem::take(&mut self.scratch);
        let polled = self.wire.poll(&mut fresh, room);
        for completion in fresh.drain(..) {
            self.ended(completion);
        }
        self.scratch = fresh;
        polled?;
        let before = out.len();
        out.extend(self.told.take_due(self.polls, max, &mut self.random));
        Ok(out.len() - before)
    }

    fn may_sleep(&mut self) -> Result<bool, QueueError> {
        if self.holds_back() {
            return Ok(false);
        }
        self.wire.may_sleep()
    }
}

/// An operation that was refused when its time came.
fn into_operation_error(error: PostError) -> OperationError {
    match error {
        PostError::PeerGone(failure) => OperationError::PeerGone(failure),
        PostError::Refused(failure) => OperationError::Other(failure),
        other => OperationError::Other(Failure {
            call: "post",
            errno: crate::bindings::FI_EINVAL,
            text: other.to_string(),
            provider: None,
        }),
    }
}

/// Things that wait until they are due, and leave in any order.
#[derive(Debug)]
struct Pen<T>(Vec<(u64, T)>);

impl<T> Default for Pen<T> {
    fn default() -> Self {
        Pen(Vec::new())
    }
}

impl<T> Pen<T> {
    fn len(&self) -> usize {
        self.0.len()
    }

    fn put(&mut self, due: u64, item: T) {
        self.0.push((due, item));
    }

    /// Up to `max` of those that are due at `now`, in any order.
    fn take_due(&mut self, now: u64, max: usize, random: &mut Random) -> Vec<T> {
        let mut due: Vec<T> = Vec::new();
        let mut at = 0;
        while at < self.0.len() {
            if self.0[at].0 <= now && due.len() < max {
                due.push(self.0.swap_remove(at).1);
            } else {
                at += 1;
            }
        }
        for last in (1..due.len()).rev() {
            let other = random.up_to(last as u32) as usize;
            due.swap(last, other);
        }
        due
    }
}

/// SplitMix64: small, and good enough to shuffle with.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to `max`, both possible.
    fn up_to(&mut self, max: u32) -> u64 {
        self.next() % (u64::from(max) + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts 100 in, polls until all are out, and says in which order they came and after how many
    /// polls the last.
    fn order(seed: u64, delay: u32) -> (Vec<usize>, u64) {
        let mut random = Random(seed);
        let mut pen = Pen::default();
        for item in 0..100 {
            let due = random.up_to(delay);
            pen.put(due, item);
        }
        let mut out = Vec::new();
        let mut polls = 0;
        while pen.len() > 0 {
            out.extend(pen.take_due(polls, 7, &mut random));
            polls += 1;
        }
        (out, polls)
    }

    #[test]
    fn a_pen_loses_and_doubles_nothing_and_keeps_no_order() {
        let (mut out, _) = order(1, 8);
        assert_ne!(out, (0..100).collect::<Vec<_>>());
        out.sort_unstable();
        assert_eq!(out, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn the_same_seed_gives_the_same_order_and_another_another() {
        assert_eq!(order(1, 8), order(1, 8));
        assert_ne!(order(1, 8).0, order(2, 8).0);
    }

    #[test]
    fn nothing_waits_longer_than_it_must() {
        // All are due after four polls, and seven leave at each.
        assert!(order(3, 4).1 <= 4 + 100 / 7 + 1);
        assert_eq!(order(3, 0).1, 100_u64.div_ceil(7));
    }
}
