//! What arrives, and what is said of it.

use kvasir_transfer_verbs::{
    Operation, Payload, PostError, QueuePairOptions, Receive, Request, Side, Template,
    TemplateRequest, WorkKind, WorkTag,
};

use crate::support::{Lab, assert_success, pair, pattern, tags};

const KIB: usize = 1024;

#[test]
fn a_write_with_an_immediate_arrives_whole_and_is_told_once() {
    let Some(lab) = Lab::open() else { return };
    let (mut a, mut b) = pair(&lab, &lab, QueuePairOptions::default());
    let bytes = 64 * KIB;
    let (source, target) = (lab.memory(bytes), lab.memory(bytes));
    source.write(0, &pattern(bytes));
    b.expect_imms(1);
    let slices = [source.slice(0, bytes)];
    let from = Payload::Slices(&slices);
    let write = Operation::WriteImm { from, to: target.at(0, bytes), imm: 0xdead_beef };
    a.qp.post(&[Request::new(write, WorkTag(7))]).expect("posted");

    let received = b.wait(Side::Receive, 1);
    assert_success(&received);
    assert_eq!(received[0].kind(), Some(WorkKind::ReceiveWriteImm));
    assert_eq!((received[0].imm(), received[0].bytes()), (Some(0xdead_beef), bytes as u32));
    assert_eq!(received[0].qp_num(), b.qp.number());
    assert_eq!(target.all(), pattern(bytes));

    let sent = a.wait(Side::Send, 1);
    assert_success(&sent);
    assert_eq!((sent[0].kind(), sent[0].imm()), (Some(WorkKind::Write), None));
    assert_eq!(tags(&sent), [Some(7)]);
    assert_eq!((a.qp.outstanding(Side::Send), b.qp.outstanding(Side::Receive)), (0, 0));
}

#[test]
fn an_immediate_of_no_bytes_names_no_memory() {
    let Some(lab) = Lab::open() else { return };
    let (mut a, mut b) = pair(&lab, &lab, QueuePairOptions::default());
    b.expect_imms(2);
    let source = lab.memory(64);
    let nothing = [source.slice(64, 0)];
    let empty =
        Operation::WriteImm { from: Payload::Slices(&nothing), to: source.at(0, 0), imm: u32::MAX };
    let requests = [Operation::Imm { imm: 0 }, empty].map(|op| Request::new(op, WorkTag(1)));
    a.qp.post(&requests).expect("posted");
    let received = b.wait(Side::Receive, 2);
    assert_success(&received);
    let told: Vec<_> = received.iter().map(|told| (told.imm(), told.bytes())).collect();
    assert_eq!(told, [(Some(0), 0), (Some(u32::MAX), 0)]);
    assert_success(&a.wait(Side::Send, 2));
}

#[test]
fn inline_bytes_need_no_region_and_may_change_once_posted() {
    let Some(lab) = Lab::open() else { return };
    let options = QueuePairOptions { inline_bytes: 128, ..QueuePairOptions::default() };
    let (mut a, mut b) = pair(&lab, &lab, options);
    assert!(a.qp.inline_bytes_max() >= 128);
    let target = lab.memory(256);
    b.expect_imms(2);
    let mut bytes = vec![0xab; 128];
    for (at, imm) in [(0, 1), (128, 2)] {
        let from = Payload::Inline(&bytes);
        let write = Operation::WriteImm { from, to: target.at(at, 128), imm };
        a.qp.post(&[Request::new(write, WorkTag(imm))]).expect("posted");
        bytes.fill(0xcd);
    }
    assert_success(&b.wait(Side::Receive, 2));
    assert_eq!(target.read(0, 128), [0xab; 128]);
    assert_eq!(target.read(128, 128), [0xcd; 128]);

    let too_long = vec![0; a.qp.inline_bytes_max() + 1];
    let send = Operation::Send { from: Payload::Inline(&too_long), imm: None };
    let refused = a.qp.post(&[Request::new(send, WorkTag(3))]);
    assert!(matches!(refused, Err(PostError::InlineTooLong { .. })), "{refused:?}");
}

#[test]
fn nobody_writes_through_a_queue_pair_that_is_not_written_to() {
    let Some(lab) = Lab::open() else { return };
    let options = QueuePairOptions { is_written_to: false, ..QueuePairOptions::default() };
    let (mut a, _b) = pair(&lab, &lab, options);
    let (source, target) = (lab.memory(64), lab.memory(64));
    source.write(0, &[0xee; 64]);
    let from = [source.slice(0, 64)];
    let write = Operation::Write { from: Payload::Slices(&from), to: target.at(0, 64) };
    a.qp.post(&[Request::new(write, WorkTag(1))]).expect("posted");
    let sent = a.wait(Side::Send, 1);
    assert!(!sent[0].is_success(), "though the region itself may be written");
    assert_eq!(target.all(), [0; 64]);
}

#[test]
fn a_chain_is_complete_when_its_last_request_is() {
    let Some(lab) = Lab::open() else { return };
    let (mut a, mut b) = pair(&lab, &lab, QueuePairOptions::default());
    let (source, target) = (lab.memory(12 * KIB), lab.memory(12 * KIB));
    source.write(0, &pattern(12 * KIB));
    b.expect_imms(1);
    let halves = [[source.slice(0, 8 * KIB)], [source.slice(8 * KIB, 4 * KIB)]];
    let targets = [target.at(0, 8 * KIB), target.at(8 * KIB, 4 * KIB)];
    let writes = [0, 1].map(|half: usize| {
        let from = Payload::Slices(&halves[half]);
        let write = Operation::Write { from, to: targets[half] };
        Request::new(write, WorkTag(half as u32)).unsignalled()
    });
    let last = Request::new(Operation::Imm { imm: 42 }, WorkTag(2)).fenced();
    a.qp.post(&[writes[0], writes[1], last]).expect("posted");

    let received = b.wait(Side::Receive, 1);
    assert_success(&received);
    assert_eq!(received[0].imm(), Some(42));
    assert_eq!(target.all(), pattern(12 * KIB), "writes arrive before the immediate behind them");
    assert_eq!(a.qp.outstanding(Side::Send), 3);
    let sent = a.wait(Side::Send, 1);
    assert_success(&sent);
    assert_eq!(tags(&sent), [Some(2)], "the others have no completion");
    assert_eq!(a.qp.outstanding(Side::Send), 0);
}

#[test]
fn a_template_is_filled_in_and_posted_again_and_again() {
    let Some(lab) = Lab::open() else { return };
    let (mut a, mut b) = pair(&lab, &lab, QueuePairOptions::default());
    let (pages, page) = (8, 512);
    let (source, target) = (lab.memory(pages * page), lab.memory(pages * page));
    source.write(0, &pattern(pages * page));
    let silent = TemplateRequest { has_imm: false, is_signalled: false, is_fenced: false };
    let told = TemplateRequest { has_imm: true, is_signalled: true, is_fenced: false };
    let mut template = Template::new(&[silent, told]);
    // Two pages a post, to mirrored places.
    for round in 0..pages / 2 {
        b.expect_imms(1);
        for (index, from) in [2 * round, 2 * round + 1].into_iter().enumerate() {
            let to = target.at((pages - 1 - from) * page, page);
            template.set(index, Some(source.slice(from * page, page)), to);
        }
        template.set_imm(1, round as u32);
        template.set_tag(1, WorkTag(100 + round as u32));
        a.qp.post_template(&mut template, 2).expect("posted");
        let received = b.wait(Side::Receive, 1);
        assert_success(&received);
        assert_eq!(received[0].imm(), Some(round as u32));
        assert_eq!(tags(&a.wait(Side::Send, 1)), [Some(100 + round as u32)]);
    }
    for from in 0..pages {
        let arrived = target.read((pages - 1 - from) * page, page);
        assert_eq!(arrived, source.read(from * page, page), "page {from}");
    }

    // Its beginning alone, which is silent and ends the chain.
    target.fill(0);
    let from = source.slice(0, page);
    template.set(0, Some(from), target.at(0, page));
    a.qp.post_template(&mut template, 1).expect("posted");
    // And as nothing but an immediate.
    b.expect_imms(1);
    template.set(1, None, target.at(0, 0));
    a.qp.post_template(&mut template, 2).expect("posted");
    let received = b.wait(Side::Receive, 1);
    assert_eq!(received[0].bytes(), 0);
    assert_eq!(target.read(0, page), source.read(0, page));
    assert_eq!(a.wait(Side::Send, 1).len(), 1);
    assert_eq!(a.qp.outstanding(Side::Send), 0);
}

#[test]
fn a_send_lands_in_the_receive_that_was_posted_for_it() {
    let Some(lab) = Lab::open() else { return };
    let options = QueuePairOptions {
        send_slices_max: 2,
        receive_slices_max: 2,
        ..QueuePairOptions::default()
    };
    let (mut a, mut b) = pair(&lab, &lab, options);
    let (source, target) = (lab.memory(1024), lab.memory(1024));
    source.write(0, &pattern(1024));
    // Gathered from two slices, scattered into two others.
    let into = [target.slice(0, 100), target.slice(512, 500)];
    b.qp.post_receives(&[Receive { into: &into, tag: WorkTag(9) }]).expect("posted");
    let slices = [source.slice(0, 200), source.slice(400, 300)];
    let send = Operation::Send { from: Payload::Slices(&slices), imm: Some(5) };
    a.qp.post(&[Request::new(send, WorkTag(1)).solicited()]).expect("posted");
    let received = b.wait(Side::Receive, 1);
    assert_success(&received);
    assert_eq!(received[0].kind(), Some(WorkKind::Receive));
    assert_eq!((received[0].bytes(), received[0].imm()), (500, Some(5)));
    assert_eq!(tags(&received), [Some(9)]);
    let sent = [source.read(0, 200), source.read(400, 300)].concat();
    assert_eq!([target.read(0, 100), target.read(512, 400)].concat(), sent);

    let three = [slices[0], slices[0], slices[0]];
    let send = Operation::Send { from: Payload::Slices(&three), imm: None };
    let refused = a.qp.post(&[Request::new(send, WorkTag(2))]);
    assert!(matches!(refused, Err(PostError::TooManySlices { slices: 3, slices_max: 2 })));
    let into = [target.slice(0, 1); 3];
    let refused = b.qp.post_receives(&[Receive { into: &into, tag: WorkTag(2) }]);
    assert!(matches!(refused, Err(PostError::TooManySlices { slices: 3, slices_max: 2 })));
}

#[test]
fn a_read_fetches_what_the_peer_has() {
    let Some(lab) = Lab::open() else { return };
    let (mut a, _b) = pair(&lab, &lab, QueuePairOptions::default());
    let (here, there) = (lab.memory(32 * KIB), lab.memory(32 * KIB));
    there.write(0, &pattern(32 * KIB));
    let into = [here.slice(0, 32 * KIB)];
    let read = Operation::Read { from: there.at(0, 32 * KIB), into: &into };
    a.qp.post(&[Request::new(read, WorkTag(1))]).expect("posted");
    let done = a.wait(Side::Send, 1);
    assert_success(&done);
    assert_eq!(done[0].kind(), Some(WorkKind::Read));
    assert_eq!(here.all(), pattern(32 * KIB));
}

#[test]
fn a_full_queue_refuses_the_whole_post_and_has_room_after_completions() {
    let Some(lab) = Lab::open() else { return };
    let options =
        QueuePairOptions { send_depth: 4, receive_depth: 8, ..QueuePairOptions::default() };
    let (mut a, mut b) = pair(&lab, &lab, options);
    b.expect_imms(8);
    let refused = b.qp.post_receives(&[Receive { into: &[], tag: WorkTag(0) }]);
    assert!(matches!(refused, Err(PostError::Full { wanted: 1, room: 0 })), "{refused:?}");

    let imm = Request::new(Operation::Imm { imm: 1 }, WorkTag(1));
    a.qp.post(&[imm; 3]).expect("posted");
    let refused = a.qp.post(&[imm; 2]);
    assert!(matches!(refused, Err(PostError::Full { wanted: 2, room: 1 })), "{refused:?}");
    assert_eq!(a.qp.outstanding(Side::Send), 3, "nothing of it was posted");
    assert_success(&a.wait(Side::Send, 3));
    a.qp.post(&[imm; 4]).expect("there is room again");
    assert_success(&a.wait(Side::Send, 4));
    assert_success(&b.wait(Side::Receive, 7));
}

#[test]
fn silent_requests_do_not_fill_the_queue_for_good() {
    let Some(lab) = Lab::open() else { return };
    let options = QueuePairOptions { send_depth: 4, ..QueuePairOptions::default() };
    let (mut a, _b) = pair(&lab, &lab, options);
    let (source, target) = (lab.memory(64), lab.memory(64));
    let slices = [source.slice(0, 64)];
    let write = Operation::Write { from: Payload::Slices(&slices), to: target.at(0, 64) };
    for _ in 0..10 {
        while a.qp.send_room() > 0 {
            a.qp.post(&[Request::new(write, WorkTag(1)).unsignalled()]).expect("there is room");
        }
        let done = a.wait(Side::Send, 1);
        assert_success(&done);
        assert_eq!(tags(&done), [None], "the layer asked for it, not the caller");
    }
}
