//! What the end of a connection leads to, without a peer.

use std::net::{SocketAddr, TcpListener};
use std::num::NonZeroU32;
use std::sync::Arc;

use kvasir_transfer_core::signal::{Mode, OrderedBy, Ordering};
use kvasir_transfer_core::{
    Body, Next, Operation, PathLimits, Put, Rail, Rails, Settled, Shape, Signalled,
    SignalledTransfer, Target, Word,
};

use super::*;
use crate::completion::Completion;
use crate::payload::{Payload, Waiter};
use crate::worker::hub;
use crate::worker::link::path_limits;

/// A session with a peer that listens there, with a message for it.
fn begun(tcp: Option<SocketAddr>) -> (Hub, Links, SessionId) {
    let (mut hub, bells) = hub::tests::hub(None);
    let links = Links::new(bells, None, None, &hub.cards).expect("descriptors");
    let there = Endpoint { incarnation: 7, tcp, ..hub.shared.endpoint.clone() };
    let session = hub.shared.peers().session(&there).expect("room").session_id();
    send(session, &mut hub);
    (hub, links, session)
}

fn send(session: SessionId, hub: &mut Hub) {
    let (payload, done) = (Payload::Bytes(Arc::default()), Waiter::new(Completion::Ignore));
    let (body, rails, deadline_us) = (Body::Message { bytes: 0 }, Rails::ANY, u64::MAX);
    let operation = Operation { session, deadline_us, payload, body, rails, done };
    hub.sender.begin(operation, 0);
}

const BY_CARD: Way = Way { domain: Domain::Efa, rail: Rail(0) };
const TARGET: Target = Target { incarnation: 7, key: 5 };

/// What is to be made, and when; from now on nothing is.
fn take_due(links: &mut Links, session: SessionId) -> Vec<(u64, Lack)> {
    let lanes = links.lanes.get_mut(&session).expect("the session");
    lanes.due.drain(..).map(|due| (due.at_us, due.lack)).collect()
}

/// A path by a card comes up, and is seen to be.
fn card_up(links: &mut Links, lane: Lane, hub: &mut Hub) {
    let limits = path_limits((Domain::Efa, BY_CARD.rail), NonZeroU32::MIN, hub);
    card_up_by(links, (lane, limits), hub);
}

fn card_up_by(links: &mut Links, (lane, limits): (Lane, PathLimits), hub: &mut Hub) {
    hub.sender.path_up(lane.session, lane.path, limits, hub.now_us);
    links.came_up(lane.session, BY_CARD, hub);
    links.go_beside_cards(hub);
}

#[test]
fn after_an_outage_cards_get_a_path_beside_them_for_what_they_did_not_take_before_it() {
    let (mut hub, mut links, session) = begun(None);
    links.lanes.insert(session, Lanes::default());
    let [first, second] = [0, 1].map(|path| Lane { session, path: PathIndex(path) });
    card_up(&mut links, first, &mut hub);
    assert_eq!(take_due(&mut links, session), [], "the cards carry everything");
    hub.unsuited(first, (TARGET, &[]));
    links.go_beside_cards(&mut hub);
    let wanted = [(hub.now_us, Lack::WithoutCards)];
    assert_eq!(take_due(&mut links, session), wanted);
    hub.sender.path_lost(session, first.path, hub.now_us);
    card_up(&mut links, second, &mut hub);
    assert_eq!(take_due(&mut links, session), wanted, "nobody says it once more");
}

/// A put, and a signal that is promised when it is planned.
fn put_with_signal(session: SessionId, hub: &mut Hub) {
    let payload = || Payload::Bytes(Arc::new(vec![0; 8]));
    let (source_offset, target_offset, checksum) = (0, 0, None);
    let shape = Shape::Single { source_offset, target_offset, bytes: 8, checksum };
    let put = Put { payload: payload(), shape, target: TARGET };
    let word = Word { target: TARGET, offset: 8, value: 1, payload: payload() };
    let (puts, done) = (vec![put], Waiter::new(Completion::Ignore));
    let signalled = Signalled {
        transfers: vec![SignalledTransfer { session, puts, word, done }],
        mode: Mode::default(),
        ordered_by: OrderedBy::Host,
        counter: 1,
        group: 0,
        deadline_us: u64::MAX,
    };
    hub.sender.begin_signalled(signalled, hub.now_us);
    while hub.sender.poll_action().is_some() {}
}

/// What cards may reorder in memory is never signalled, so what is promised would wait until its deadline.
#[test]
fn after_an_outage_cards_that_place_nothing_get_a_path_beside_them_for_signals_promised_before() {
    for is_promised in [false, true] {
        let (mut hub, mut links, session) = begun(None);
        links.lanes.insert(session, Lanes::default());
        let [first, second] = [0, 1].map(|path| Lane { session, path: PathIndex(path) });
        let tcp = path_limits((Domain::Tcp, Rail::LAST), NonZeroU32::MIN, &hub);
        hub.sender.path_up(session, first.path, tcp, hub.now_us);
        if is_promised {
            put_with_signal(session, &mut hub);
        }
        hub.sender.path_lost(session, first.path, hub.now_us);
        let card = path_limits((Domain::Efa, BY_CARD.rail), NonZeroU32::MIN, &hub);
        let relaxed = PathLimits { ordering: Ordering::None, ..card };
        card_up_by(&mut links, (second, relaxed), &mut hub);
        let wanted = is_promised.then_some((hub.now_us, Lack::WithoutCards));
        assert_eq!(take_due(&mut links, session), Vec::from_iter(wanted));
    }
}

/// It comes up each time, something lands, and it ends.
#[test]
fn a_way_that_is_of_use_for_a_moment_each_time_is_tried_again_after_pauses_that_grow() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (mut hub, mut links, session) = begun(listener.local_addr().ok());
    // So many that it is never idle.
    (0..40).for_each(|_| send(session, &mut hub));
    let mut pause_us = |works_us: u64, hub: &mut Hub| {
        let attempt =
            || Attempt { candidates: vec![Way::by(Domain::Tcp)], hope: false, lack: Lack::Any };
        if links.lanes.is_empty() {
            links.connect(session, hub);
        } else {
            links.connect_by(session, attempt(), hub);
        }
        let (lane, out) = links.outgoing.last_key_value().expect("it is made");
        let lane = *lane;
        assert_eq!(out.link.way(), Way::by(Domain::Tcp));
        let limits = path_limits((Domain::Tcp, Rail::LAST), NonZeroU32::MIN, hub);
        hub.sender.path_up(session, lane.path, limits, hub.now_us);
        links.outgoing.get_mut(&lane).expect("it is made").up_us = Some(hub.now_us);
        hub.now_us += works_us;
        let next = hub.sender.next_frame(session, lane.path, hub.now_us);
        let Next::Frame(frame) = next else { panic!("a message") };
        let now_us = hub.now_us;
        let landed = Settled::Landed;
        assert!(hub.sender.settle(session, lane.path, frame.sequence, landed, now_us));
        links.end_outgoing(lane, LinkEnd::Lost, hub);
        let due = take_due(&mut links, session);
        let [(at_us, Lack::Any)] = due[..] else { panic!("{due:?}") };
        hub.now_us = at_us;
        at_us - now_us
    };
    let pauses: Vec<u64> = (0..12).map(|_| pause_us(100, &mut hub)).collect();
    let grown = (0..).map(|times| 1_000 << times).take_while(|us| *us < AGAIN_US_MAX);
    let wanted: Vec<u64> = [0].into_iter().chain(grown).chain([AGAIN_US_MAX; 2]).collect();
    assert_eq!(pauses, wanted);
    assert_eq!(pause_us(60_000_000, &mut hub), 0, "it has worked for a while");
    assert_eq!(pause_us(100, &mut hub), 1_000);
    assert_eq!(hub.metrics.of(Domain::Tcp).paused.get(), 12);
}

/// As where a card that acknowledges in no order has given a post to the peer that this one refuses.
#[test]
fn a_way_is_not_left_alone_for_what_the_peer_refuses() {
    let (mut hub, mut links, session) = begun(None);
    links.lanes.insert(session, Lanes::default());
    let was = |hub: &Hub| Was { up: true, up_us: hub.now_us, idle: false, of_use: true };
    for (is_refused, keys) in [(true, 0..4), (false, 10..14)] {
        for key in keys {
            let (now_us, ended) = (hub.now_us, (LinkEnd::Lost, was(&hub)));
            links.learn_of_way((session, BY_CARD), ended, &[key], &hub);
            if is_refused {
                assert!(links.pause_us(session, BY_CARD, &hub) <= now_us);
                hub.refused_regions.push((TARGET.incarnation, key));
                links.excuse(&mut hub);
            }
            hub.now_us += 100;
        }
        let is_paused = links.pause_us(session, BY_CARD, &hub) > hub.now_us;
        assert_eq!(is_paused, !is_refused);
    }
    // Another way, of which nothing is known.
    let (mut hub, mut links, session) = begun(None);
    let unused = Was { of_use: false, ..was(&hub) };
    for _ in 0..2 {
        links.learn_of_way((session, BY_CARD), (LinkEnd::Lost, unused), &[TARGET.key], &hub);
    }
    assert!(links.avoided.is_avoided((7, BY_CARD), hub.now_us));
    hub.refused_regions.push((TARGET.incarnation, TARGET.key));
    links.excuse(&mut hub);
    assert!(!links.avoided.is_avoided((7, BY_CARD), hub.now_us));
}

/// The peer may say so before its end, or after several ends.
#[test]
fn a_way_is_excused_whatever_comes_first() {
    let (mut hub, mut links, session) = begun(None);
    links.lanes.insert(session, Lanes::default());
    for key in 0..8 {
        let was = Was { up: true, up_us: hub.now_us, idle: false, of_use: true };
        let refuses_first = key % 2 == 0;
        if refuses_first {
            hub.refused_regions.push((TARGET.incarnation, key));
            links.excuse(&mut hub);
        }
        for _ in 0..2 {
            let was = Was { up_us: hub.now_us, ..was };
            links.learn_of_way((session, BY_CARD), (LinkEnd::Lost, was), &[key], &hub);
            hub.now_us += 10;
        }
        if !refuses_first {
            hub.refused_regions.push((TARGET.incarnation, key));
            links.excuse(&mut hub);
        }
        assert_eq!(links.flapping.failed_us((7, BY_CARD)), None, "region {key}");
    }
}

/// Peers have reasons of their own to end a connection that has been of use, or for which there was none.
#[test]
fn a_way_is_avoided_only_for_ends_that_were_of_no_use_to_somebody_who_had_one() {
    for (idle, of_use) in [(false, true), (true, false), (true, true), (false, false)] {
        let (hub, mut links, session) = begun(None);
        links.lanes.insert(session, Lanes::default());
        for end in [LinkEnd::Lost, LinkEnd::Refused, LinkEnd::Lost] {
            let was = Was { up: true, up_us: hub.now_us, idle, of_use };
            links.learn_of_way((session, BY_CARD), (end, was), &[], &hub);
        }
        let is_avoided = links.avoided.is_avoided((7, BY_CARD), hub.now_us);
        assert_eq!(is_avoided, !idle && !of_use, "idle {idle}, of use {of_use}");
    }
}

/// At the limit of connections, and where none of the ways comes up: shm is tried first, and leads to peers on
/// this host only.
#[test]
fn a_path_beside_cards_that_cannot_be_made_now_is_made_by_whichever_way_later() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (mut hub, mut links, session) = begun(listener.local_addr().ok());
    let shared = Arc::get_mut(&mut hub.shared).expect("nobody else has it");
    shared.config.connections_max = 1;
    links.connect(session, &mut hub);
    assert_eq!(links.outgoing.len(), 1);
    let without_cards = |hope| {
        let candidates = ways_without_cards();
        Attempt { candidates, hope, lack: Lack::WithoutCards }
    };
    links.connect_by(session, without_cards(false), &mut hub);
    let later = [(hub.now_us + AGAIN_US_MAX, Lack::WithoutCards)];
    assert_eq!(take_due(&mut links, session), later);
    let shared = Arc::get_mut(&mut hub.shared).expect("nobody else has it");
    shared.config.connections_max = 2;
    links.connect_by(session, without_cards(true), &mut hub);
    let (beside, _) = links.outgoing.last_key_value().expect("both");
    let beside = *beside;
    links.end_outgoing(beside, LinkEnd::Silent, &mut hub);
    let due = take_due(&mut links, session);
    assert!(matches!(due[..], [(_, Lack::WithoutCards)]), "{due:?}");
}

#[test]
fn a_way_that_alone_carries_what_cards_did_not_take_does_not_wait_until_it_is_avoided_no_more() {
    let (mut hub, mut links, session) = begun(None);
    links.lanes.insert(session, Lanes::default());
    let first = Lane { session, path: PathIndex(0) };
    card_up(&mut links, first, &mut hub);
    let tcp = Way::by(Domain::Tcp);
    for way in [tcp, BY_CARD] {
        (0..5).for_each(|_| links.avoided.failed((7, way), hub.now_us));
    }
    let until_us = links.avoided.until_us((7, tcp));
    assert!(until_us > hub.now_us + AGAIN_US_MAX);
    let mut due = |way, hub: &Hub| {
        links.make_due(session, way, hub.now_us, hub);
        let lack = Lack::This(way);
        let due = take_due(&mut links, session);
        due.into_iter().find(|(_, due)| *due == lack).expect("it is due").0
    };
    assert_eq!(due(tcp, &hub), until_us, "the cards carry everything");
    hub.unsuited(first, (TARGET, &[]));
    assert_eq!(due(tcp, &hub), hub.now_us + AGAIN_US_MAX);
    assert_eq!(due(BY_CARD, &hub), until_us, "it carries no more than they do");
}
