//! Peers that are gone, noticed by heartbeats or at once, and why.

use std::time::Duration;

use kvasir_transfer::{Loss, SubmitError, WriteError};

use crate::fabric::{Fabric, Kind, whole};

pub(crate) fn a_wanted_peer_that_falls_silent_is_lost(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let peer = a.connect(b);
    assert_eq!(a.set_wanted(peer, true), Ok(()));
    let sent = a.send(peer, b"hello").expect("accepted");
    assert_eq!(fabric.outcome(&sent), Ok(()));
    let since = fabric.now();
    fabric.freeze(b);
    fabric.until("the event", || !a.losses().is_empty());
    assert_eq!(a.losses(), [(peer, Loss::Silent)], "and nothing was under way");
    if fabric.kind == Kind::Sim {
        let bound = Duration::from_millis(20 + 60 + 200 + 1);
        let took = fabric.now() - since;
        assert!(took <= bound, "an interval, a timeout and a grace; it took {took:?}");
    }
    fabric.thaw(b);
    assert!(matches!(a.set_wanted(peer, true), Err(SubmitError::Invalid(_))), "it is over");
    let late = a.send(peer, b"hello").expect("accepted");
    assert_eq!(fabric.outcome(&late), Err(WriteError::PeerGone));
}

pub(crate) fn a_wanted_peer_that_was_never_used_is_lost_too(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let peer = a.connect(b);
    assert_eq!(a.set_wanted(peer, true), Ok(()));
    fabric.pass(Duration::from_millis(5));
    fabric.kill(b);
    fabric.until("the event", || !a.losses().is_empty());
    let [(lost, why)] = a.losses()[..] else { panic!("once") };
    assert_eq!(lost, peer);
    // On a slow machine it may have been gone before it was reached.
    assert!(matches!(why, Loss::Closed | Loss::Unreachable), "{why:?}");
}

pub(crate) fn a_wanted_peer_that_lives_is_kept(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let peer = a.connect(b);
    assert_eq!(a.set_wanted(peer, true), Ok(()));
    // Longer than anyone may be silent who was asked.
    fabric.pass(Duration::from_millis(2_200));
    assert_eq!(a.losses(), []);
    let (source, _) = a.region(100);
    let (_target, descriptor) = b.region(100);
    assert_eq!(fabric.outcome(&a.write(whole(peer, &source, descriptor, 6))), Ok(()));
}

pub(crate) fn a_peer_that_nobody_wants_may_be_silent(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (wanted, peer) = (fabric.node(), a.connect(b));
    for text in [b"one", b"two"] {
        let sent = a.send(peer, text).expect("accepted");
        assert_eq!(fabric.outcome(&sent), Ok(()));
    }
    // And who was wanted and is no more.
    let former = a.connect(&wanted);
    assert_eq!(a.set_wanted(former, true), Ok(()));
    let sent = a.send(former, b"hello").expect("accepted");
    assert_eq!(fabric.outcome(&sent), Ok(()));
    assert_eq!(a.set_wanted(former, false), Ok(()));
    fabric.freeze(b);
    fabric.freeze(&wanted);
    fabric.pass(Duration::from_millis(200));
    assert_eq!(a.losses(), []);
    fabric.thaw(b);
    fabric.thaw(&wanted);
}

pub(crate) fn a_loss_says_why(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let send = |peer, text: &[u8]| fabric.outcome(&a.send(peer, text).expect("accepted"));
    // Cut off: the next session is told.
    let first = a.connect(b);
    assert_eq!(fabric.outcome(&b.cut_off(b.connect(a))), Ok(()));
    assert_eq!(send(first, b"x"), Err(WriteError::PeerGone));
    fabric.until("the first event", || a.losses() == [(first, Loss::CutOff)]);
    let second = a.connect(b);
    assert_eq!(send(second, b"x"), Ok(()));
    fabric.kill(b);
    fabric.until("the second event", || a.losses().len() == 2);
    assert_eq!(a.losses()[1], (second, Loss::Closed));
}
