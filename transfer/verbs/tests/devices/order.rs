//! A fence orders what follows it with the READs before it. On one device nothing shows when it is
//! missing, so this needs a wire, and a slow one to show that the fence does it.

use kvasir_transfer_verbs::{Operation, Payload, QueuePairOptions, Request, Side, WorkTag};

use crate::support::{End, Lab, Registered, assert_success, pair, wire, wire_is_slow};

const BYTES: usize = 8192;
const ROUNDS: u8 = 20;

struct Relay {
    a: End,
    b: End,
    /// At b, read by a.
    source: Registered,
    /// At a.
    between: Registered,
    /// At b, written by a out of `between`.
    target: Registered,
}

impl Relay {
    fn new(left: &Lab, right: &Lab) -> Relay {
        let (a, b) = pair(left, right, QueuePairOptions::default());
        let (source, target) = (right.memory(BYTES), right.memory(BYTES));
        Relay { a, b, source, between: left.memory(BYTES), target }
    }

    /// Whether the write carried what the READ before it had fetched.
    fn is_fresh(&mut self, round: u8, is_fenced: bool) -> bool {
        self.source.fill(round);
        self.b.expect_imms(1);
        let between = [self.between.slice(0, BYTES)];
        let read = Operation::Read { from: self.source.at(0, BYTES), into: &between };
        let from = Payload::Slices(&between);
        let write = Operation::WriteImm { from, to: self.target.at(0, BYTES), imm: round.into() };
        let write = Request::new(write, WorkTag(2));
        let write = if is_fenced { write.fenced() } else { write };
        self.a.qp.post(&[Request::new(read, WorkTag(1)), write]).expect("posted");
        assert_success(&self.b.wait(Side::Receive, 1));
        assert_success(&self.a.wait(Side::Send, 2));
        self.target.all() == [round; BYTES]
    }

    fn stale(&mut self, is_fenced: bool) -> usize {
        (1..=ROUNDS).filter(|round| !self.is_fresh(*round, is_fenced)).count()
    }
}

#[test]
fn a_fenced_write_carries_what_was_read_before_it() {
    let Some((left, right)) = wire() else { return };
    let mut relay = Relay::new(&left, &right);
    assert_eq!(relay.stale(true), 0);
}

#[test]
fn a_write_that_is_not_fenced_overtakes_the_read_before_it() {
    let Some((left, right)) = wire() else { return };
    if !wire_is_slow() {
        return;
    }
    let mut relay = Relay::new(&left, &right);
    assert!(
        relay.stale(false) > 0,
        "the fence makes no difference, so the test above proves nothing"
    );
}

#[test]
fn what_crosses_a_wire_arrives_whole_and_in_order() {
    let Some((left, right)) = wire() else { return };
    let (mut a, mut b) = pair(&left, &right, QueuePairOptions::default());
    let bytes = 256 * 1024;
    let (source, target) = (left.memory(bytes), right.memory(bytes));
    source.write(0, &crate::support::pattern(bytes));
    let slices = [source.slice(0, bytes)];
    b.expect_imms(4);
    let requests = [0, 1, 2, 3].map(|imm| {
        let from = Payload::Slices(&slices);
        Request::new(Operation::WriteImm { from, to: target.at(0, bytes), imm }, WorkTag(imm))
    });
    a.qp.post(&requests).expect("posted");
    let received = b.wait(Side::Receive, 4);
    assert_success(&received);
    let imms: Vec<_> = received.iter().filter_map(|told| told.imm()).collect();
    assert_eq!(imms, [0, 1, 2, 3]);
    assert_eq!(target.all(), source.all());
    assert_success(&a.wait(Side::Send, 4));
}
