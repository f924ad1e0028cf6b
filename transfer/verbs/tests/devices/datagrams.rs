//! Datagram queue pairs.

use kvasir_transfer_verbs::{
    AddressHandle, CompletionQueues, Datagram, Payload, PostError, QKey, QueuePairOptions, Receive,
    Side, Traffic, UD_HEADER_BYTES, UdQueuePair, WcStatus, WorkKind, WorkTag,
};

use crate::support::{Lab, assert_success, pattern, poll};

const KEY: QKey = QKey(0x1111_1111);

#[test]
fn a_datagram_arrives_behind_its_header_and_says_who_sent_it() {
    let Some(lab) = Lab::open() else { return };
    let (sends, receives) = (lab.queue(256), lab.queue(256));
    let queues = CompletionQueues { send: &sends, receive: &receives };
    let options = QueuePairOptions {
        send_depth: 16,
        receive_depth: 16,
        inline_bytes: 64,
        ..QueuePairOptions::default()
    };
    let mut a = UdQueuePair::new(&lab.pd, &lab.path, queues, KEY, options).expect("a queue pair");
    let mut b = UdQueuePair::new(&lab.pd, &lab.path, queues, KEY, options).expect("a queue pair");
    let way =
        AddressHandle::new(&lab.pd, &lab.path, lab.path.gid, lab.path.lid, Traffic::default());
    let way = way.expect("a way to the own port");

    let (source, target) = (lab.memory(512), lab.memory(2048));
    source.write(0, &pattern(512));
    let into = [[target.slice(0, 1024)], [target.slice(1024, 1024)]];
    let receive = |at: usize| Receive { into: &into[at], tag: WorkTag(at as u32) };
    b.post_receives(&[receive(0), receive(1)]).expect("posted");
    let slices = [source.slice(0, 512)];
    let registered = Datagram {
        from: Payload::Slices(&slices),
        imm: Some(8),
        to: &way,
        to_number: b.number(),
        to_key: b.key(),
        tag: WorkTag(1),
    };
    let inline = Datagram { from: Payload::Inline(b"hello"), imm: None, ..registered };
    a.post(&[registered, inline]).expect("posted");

    let received = poll(&receives, 2);
    assert_success(&received);
    for (at, completion) in received.iter().enumerate() {
        assert_eq!(completion.tag(), Some(WorkTag(at as u32)));
        assert_eq!(completion.kind(), Some(WorkKind::Receive));
        assert_eq!(completion.source_qp(), Some(a.number()));
        assert!(completion.has_route_header());
        b.retire(completion);
    }
    let header = UD_HEADER_BYTES as u32;
    assert_eq!((received[0].bytes(), received[0].imm()), (header + 512, Some(8)));
    assert_eq!((received[1].bytes(), received[1].imm()), (header + 5, None));
    assert_eq!(target.read(UD_HEADER_BYTES, 512), pattern(512));
    assert_eq!(target.read(1024 + UD_HEADER_BYTES, 5), b"hello");
    let sent = poll(&sends, 2);
    assert_success(&sent);
    for completion in &sent {
        a.retire(completion);
    }
    assert_eq!((a.outstanding(Side::Send), b.outstanding(Side::Receive)), (0, 0));

    let refused = a.post(&[registered; 17]);
    assert!(matches!(refused, Err(PostError::Full { wanted: 17, room: 16 })), "{refused:?}");

    b.post_receives(&[receive(0), receive(1)]).expect("posted");
    b.cut_off().expect("cut off");
    let flushed = poll(&receives, 2);
    for completion in &flushed {
        assert_eq!(completion.status(), WcStatus::Flushed);
        assert!(!b.is_drained());
        b.retire(completion);
    }
    assert!(b.is_drained());
    a.cut_off().expect("cut off");
    assert!(a.is_drained(), "nothing was outstanding");
}
