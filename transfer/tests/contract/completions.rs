//! Every operation is told by a callback, by a flag and by a future, each exactly once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use kvasir_transfer::scatter::{Barrier, GroupMember, Scatter, ScatterSlice};
use kvasir_transfer::{Completion, Outcome};

use crate::cases::pages;
use crate::fabric::{Fabric, LONG, fill, whole};

/// Submits with each kind of completion, and waits for its `Ok`.
fn told(fabric: &Fabric, what: &str, mut submit: impl FnMut(Completion)) {
    let (done, flag) = Completion::flag();
    submit(done);
    assert_eq!(fabric.outcome(&flag), Ok(()), "{what}: the flag");

    let (done, future) = Completion::future();
    submit(done);
    fabric.until(what, || future.wait_timeout(Duration::ZERO).is_some());
    assert_eq!(future.wait(), Ok(()), "{what}: the future");

    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    submit(Completion::callback(move |outcome: Outcome| {
        assert_eq!(outcome, Ok(()));
        counted.fetch_add(1, Ordering::Release);
    }));
    fabric.until(what, || calls.load(Ordering::Acquire) > 0);
    fabric.pass(Duration::from_micros(200));
    assert_eq!(calls.load(Ordering::Acquire), 1, "{what}: the callback, once");
    submit(Completion::Ignore);
}

pub(crate) fn every_operation_is_told_by_callback_flag_and_future(fabric: &Fabric) {
    let (a, b) = (&fabric.a, &fabric.b);
    let (source, _) = a.region(1000);
    let (_target, target) = b.region(1000);
    fill(&source, 1);
    let peer = a.connect(b);
    told(fabric, "write", |done| a.write_then(whole(peer, &source, target, 6), done));
    let paged = pages(fabric, [vec![0, 1], vec![3, 2]], 800);
    told(fabric, "write_paged", |done| a.write_paged_then(paged.clone(), done));
    let peers = a.group(vec![GroupMember { peer, target }]);
    let slice =
        ScatterSlice { member: 0, source_offset: 0, target_offset: 0, bytes: 10, imm: Some(6) };
    let (slices, group, deadline) = (vec![slice; 2], 3, LONG);
    let scatter = Scatter { peers: peers.clone(), source, slices, group, deadline };
    told(fabric, "scatter", |done| {
        a.try_scatter(scatter.clone(), done).expect("accepted");
    });
    let barrier = Barrier { peers, imm: 6, group, deadline };
    told(fabric, "barrier", |done| {
        a.barrier_then(&barrier, done);
    });
    told(fabric, "send", |done| a.send_then(peer, b"hello", done));
    told(fabric, "drain_group", |done| a.drain_group_then(3, done));
    let mut imm = 100;
    told(fabric, "expect_imm", |done| {
        imm += 1;
        b.expect_then(imm, 1, done);
        a.barrier(&Barrier { imm, ..barrier.clone() });
    });
    told(fabric, "cancel_imm", |done| b.cancel_imm_then(6, done));
    told(fabric, "revoke", |done| b.revoke_then(&b.region(100).0, done));
    told(fabric, "cut_off", |done| b.cut_off_then(b.connect(a), done));
}
