//! Messages, and the buffers in which they are received.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kvasir_transfer::{Refusal, WriteError};

use crate::fabric::{Fabric, Options, pattern};

fn refused(refusal: Refusal) -> Result<(), WriteError> {
    Err(WriteError::Refused(refusal))
}

pub(crate) fn a_message_longer_than_the_receivers_buffers_is_refused(fabric: &Fabric) {
    let small = fabric.node_with(Options { message_bytes_max: 1000, ..Options::default() });
    let peer = fabric.a.connect(&small);
    let send = |bytes| fabric.outcome(&fabric.a.send(peer, &vec![1; bytes]).expect("accepted"));
    assert_eq!(send(1000), Ok(()));
    for (counted, bytes) in [(1, 1001), (2, 60_000)] {
        assert_eq!(send(bytes), refused(Refusal::TooLong), "{bytes}");
        let both = small.refused_and_corrupt().0 + fabric.a.refused_and_corrupt().0;
        assert_eq!(both, counted, "it is counted, once");
    }
    assert_eq!(send(1000), Ok(()), "the connection still works");
    fabric.until("both", || small.messages.lock().expect("messages").len() == 2);
    let heard = small.messages.lock().expect("messages").clone();
    assert!(heard.iter().all(|(_, message)| message.len() == 1000));
}

pub(crate) fn while_the_application_holds_every_buffer_messages_are_refused(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let peer = a.connect(b);
    let send = |text: &str| fabric.outcome(&a.send(peer, text.as_bytes()).expect("accepted"));
    b.holds.store(true, Ordering::Release);
    let held = || b.held.lock().expect("held");
    for (at, text) in ["one", "two", "three", "four"].iter().enumerate() {
        assert_eq!(send(text), Ok(()));
        fabric.until("it is held", || held().len() == at + 1);
    }
    for counted in 1..3 {
        assert_eq!(send("five"), refused(Refusal::NoRoom));
        assert_eq!(fabric.refused_and_corrupt().0, counted);
    }
    // Writes are not held up.
    let (source, _) = a.region(100);
    let (_target, descriptor) = b.region(100);
    let written = a.write(crate::fabric::whole(peer, &source, descriptor, 6));
    assert_eq!(fabric.outcome(&written), Ok(()));
    assert_eq!(&*held()[1], b"two", "what is held stays as it is");
    held().remove(0);
    assert_eq!(send("six"), Ok(()), "the buffer of the first one has gone round");
    fabric.until("it is held", || held().len() == 4);
    assert_eq!(send("seven"), refused(Refusal::NoRoom));
    let mut heard: Vec<_> = b.messages.lock().expect("messages").clone();
    heard.sort();
    let mut heard: Vec<_> = heard.into_iter().map(|(_, text)| text).collect();
    heard.sort();
    let expected: [&[u8]; 5] = [b"four", b"one", b"six", b"three", b"two"];
    assert_eq!(heard, expected, "each that was taken, once, and none that was refused");
}

pub(crate) fn buffers_that_are_given_back_at_once_are_enough_for_any_burst(fabric: &Fabric) {
    // Four buffers, and hundreds of messages at a time.
    let (a, b) = (&fabric.a, &fabric.b);
    let peer = a.connect(b);
    let sent: Vec<_> = (0..600u32)
        .map(|at| {
            let length = (at as usize * 37) % 3000;
            a.send(peer, &pattern(at as u8, length)).expect("accepted")
        })
        .collect();
    for flag in &sent {
        assert_eq!(fabric.outcome(flag), Ok(()));
    }
    fabric.until("all", || b.messages.lock().expect("messages").len() == 600);
    fabric.pass(Duration::from_millis(2));
    let mut heard: Vec<_> =
        b.messages.lock().expect("messages").iter().map(|m| m.1.clone()).collect();
    let mut expected: Vec<_> =
        (0..600u32).map(|at| pattern(at as u8, (at as usize * 37) % 3000)).collect();
    heard.sort();
    expected.sort();
    assert!(heard == expected, "each once, whole");
}
