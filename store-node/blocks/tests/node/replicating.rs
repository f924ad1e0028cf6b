//! Copies on other nodes: which, where to and when; and drains, which end when what was promised is
//! kept elsewhere, whatever fails on the way.

use std::collections::BTreeMap;

use kvasir_blocks::{
    AllocateError, ChangeReplicaError, CopyCause, CopyError, CopyPlan, DrainRequest, DrainView,
    KeepError, KeepRequest, Options, Peer, PeerView, ReplicaOptions, SsdSize,
};
use kvasir_proto::{BlockKey, Class, Mark, Tenant};

use crate::simulation::Random;
use crate::support::{Node, chain, key, namespace, options, request};

const SIZE: SsdSize =
    SsdSize { bytes_max: 10_000, context_bytes_max: 10_000, tenant_bytes_max: 10_000 };

fn node(slots: u32) -> Node {
    let replicas =
        ReplicaOptions { hot_requests_min: 3, hot_pushes_min: 2, ..ReplicaOptions::default() };
    let mut node = Node::with(Options { demote_ahead_percent: 0, replicas, ..options(slots) });
    node.blocks.set_extents(7, 10);
    node.blocks.ssd_ready(SIZE, Vec::new());
    node
}

fn peer(name: &str) -> Peer {
    Peer(name.into())
}

fn sees(node: &mut Node, peers: &[(&str, u32, bool)]) {
    let view = |&(name, available, keeps): &(&str, u32, bool)| PeerView {
        peer: peer(name),
        available,
        keeps,
    };
    node.blocks.peers_seen(node.now_ms, peers.iter().map(view).collect());
}

fn keep(node: &mut Node, prompt: &str, expires_unix_ms: u64) -> Result<(), KeepError> {
    let (namespace, keys) = (namespace(""), chain(prompt));
    let request = KeepRequest {
        namespace,
        keys,
        tenant: Tenant(1),
        expires_unix_ms,
        created_unix_ms: None,
        copies: 1,
    };
    node.blocks.keep(node.now_ms, &request)?;
    write(node);
    Ok(())
}

/// Whatever is to be written is.
fn write(node: &mut Node) {
    loop {
        node.actions();
        if node.sinks.is_empty() {
            return;
        }
        for (sink, _) in std::mem::take(&mut node.sinks) {
            node.blocks.sunk(node.now_ms, sink, Ok(()));
        }
    }
}

fn drain(node: &mut Node, hot_blocks_max: u32) {
    let request = DrainRequest { targets: Vec::new(), hot_blocks_max, has_ssd: true };
    node.blocks.drain(node.now_ms, request);
    node.check();
}

fn view(node: &Node) -> DrainView {
    node.blocks.drain_view(|_| false)
}

fn polled(node: &mut Node) -> Vec<CopyPlan> {
    std::iter::from_fn(|| node.blocks.poll_copy(node.now_ms)).collect()
}

fn lost(name: &str) -> CopyError {
    CopyError::PeerLost { peer: peer(name), why: "no route".into() }
}

#[test]
fn a_node_that_drains_takes_no_work_and_lets_others_read() {
    let mut node = node(8);
    node.fill("1p", "ab");
    drain(&mut node, 0);
    for share in ["2p", "2d"] {
        let refused = node.allocate(&request(share, "ab", 1));
        assert_eq!(refused, Err(AllocateError::Draining), "{share}");
    }
    assert_eq!(keep(&mut node, "ab", 9_000), Err(KeepError::Draining));
    let read = node.allocate(&request("3s", "ab", 0)).expect("others may read");
    assert_eq!(read.held_blocks, 2);
    assert!(!view(&node).drained, "somebody reads");
    node.release("3s");
    sees(&mut node, &[]);
    assert_eq!(polled(&mut node), []);
    assert!(view(&node).drained);
    node.blocks.stop_draining();
    assert_eq!(view(&node), DrainView::default());
    node.allocate(&request("4p", "ab", 1)).expect("it serves again");
}

#[test]
fn what_is_kept_moves_with_the_time_it_was_promised_for() {
    let mut node = node(16);
    node.fill("1p", "abcd");
    node.fill("2p", "abX");
    // Of one chain the first block is promised for longer than what follows it.
    keep(&mut node, "abcd", 5_000).expect("kept");
    keep(&mut node, "abX", 9_000).expect("kept");
    drain(&mut node, 0);
    sees(&mut node, &[("small", 10, true), ("large", 20, true), ("no-ssd", 99, false)]);
    let mut plans = polled(&mut node);
    plans.sort_by_key(|plan| plan.keys.len());
    let until = |expires_unix_ms| {
        Some(Mark { tenant: Tenant(1), expires_unix_ms, created_unix_ms: None, copies: 1 })
    };
    let found: Vec<_> = plans.iter().map(|plan| (&plan.keys[..], plan.kept)).collect();
    assert_eq!(found, [(&chain("abX")[..], until(9_000)), (&chain("abcd")[..], until(5_000))]);
    assert!(plans.iter().all(|plan| plan.to == peer("large")), "{plans:?}");
    assert_eq!((view(&node).kept_left, view(&node).drained), (2, false));
    for plan in &plans {
        node.blocks.copied(node.now_ms, plan.copy, Ok(()));
    }
    assert_eq!(polled(&mut node), []);
    let end = view(&node);
    assert_eq!((end.kept_moved, end.kept_left, end.drained), (2, 0, true));
    assert!(node.blocks.ssd_block(key("abcd")).is_some(), "it is still here");
}

#[test]
fn a_copy_that_failed_is_made_elsewhere_after_a_while() {
    let mut node = node(8);
    node.fill("1p", "ab");
    keep(&mut node, "ab", 9_000).expect("kept");
    drain(&mut node, 0);
    sees(&mut node, &[("near", 90, true), ("far", 10, true)]);
    let plan = node.blocks.poll_copy(node.now_ms).expect("a copy");
    assert_eq!(plan.to, peer("near"));
    node.blocks.copied(node.now_ms, plan.copy, Err(lost("near")));
    assert_eq!(polled(&mut node), [], "not at once");
    assert_eq!(view(&node).waiting_for, "the target node near does not answer: no route");
    node.now_ms += 1_000;
    let plan = node.blocks.poll_copy(node.now_ms).expect("a copy");
    assert_eq!((&plan.to, plan.kept.map(|kept| kept.expires_unix_ms)), (&peer("far"), Some(9_000)));
    node.blocks.copied(node.now_ms, plan.copy, Ok(()));
    assert!(view(&node).drained);
}

#[test]
fn a_drain_with_nowhere_to_go_says_so_and_does_not_end() {
    let mut node = node(8);
    node.fill("1p", "ab");
    keep(&mut node, "ab", 9_000).expect("kept");
    drain(&mut node, 0);
    let mut check = |peers: Option<&[(&str, u32, bool)]>, why: &str| {
        if let Some(peers) = peers {
            sees(&mut node, peers);
        }
        assert_eq!(polled(&mut node), []);
        let view = view(&node);
        assert!(view.waiting_for.contains(why) && !view.drained, "{view:?}");
    };
    check(None, "replies of the other nodes");
    check(Some(&[]), "no other node is known");
    check(Some(&[("peer", 9, false)]), "no other node has a usable SSD");
    // Its disk is gone, and with it the knowledge of what is kept.
    node.blocks.ssd_gone();
    node.now_ms += 1_000;
    sees(&mut node, &[("peer", 9, true)]);
    assert_eq!(polled(&mut node), []);
    assert!(view(&node).waiting_for.contains("the SSD is unavailable") && !view(&node).drained);
    // Time itself may solve it.
    let kept = chain("ab").into_iter().zip([None, Some(key("a"))]).map(|(key, parent)| {
        let (namespace, layout, bytes) = (namespace(""), 7, 10);
        let mark = Some(Mark {
            tenant: Tenant(1),
            expires_unix_ms: 9_000,
            created_unix_ms: None,
            copies: 1,
        });
        let class = Class::Normal;
        kvasir_blocks::SsdBlock { key, namespace, parent, class, mark, layout, bytes }
    });
    node.blocks.ssd_ready(SIZE, kept.collect());
    assert!(!view(&node).drained, "it was not looked");
    node.blocks.expire(9_000);
    node.now_ms += 1_000;
    assert_eq!(polled(&mut node), []);
    assert!(view(&node).drained);
}

#[test]
fn what_becomes_kept_while_it_drains_moves_too() {
    let mut node = node(8);
    node.fill("1p", "ab");
    let request = KeepRequest {
        namespace: namespace(""),
        keys: chain("ab"),
        tenant: Tenant(1),
        expires_unix_ms: 9_000,
        created_unix_ms: None,
        copies: 1,
    };
    node.blocks.keep(node.now_ms, &request).expect("begun");
    node.actions();
    drain(&mut node, 0);
    sees(&mut node, &[("peer", 9, true)]);
    assert_eq!(polled(&mut node), []);
    assert!(!view(&node).drained, "a tenant waits for an answer");
    write(&mut node);
    assert!(!view(&node).drained, "what was just kept has not moved");
    let plans = polled(&mut node);
    assert_eq!(plans.iter().map(|plan| plan.keys.len()).collect::<Vec<_>>(), [2]);
    node.blocks.copied(node.now_ms, plans[0].copy, Ok(()));
    assert!(view(&node).drained);
}

#[test]
fn of_what_nobody_was_promised_the_hottest_moves_within_its_bound() {
    let mut node = node(16);
    for (at, prompt) in ["abc", "X", "YZ"].iter().enumerate() {
        node.fill(&format!("{at}p"), prompt);
        node.now_ms += 10_000;
    }
    node.fill("9p", "abc");
    drain(&mut node, 5);
    sees(&mut node, &[("peer", 90, false)]);
    let plans = polled(&mut node);
    let keys: Vec<&[BlockKey]> = plans.iter().map(|plan| &plan.keys[..]).collect();
    assert_eq!(keys, [&chain("abc")[..], &chain("YZ")[..]], "two more than five with the third");
    assert!(plans.iter().all(|plan| plan.cause == CopyCause::DrainHot && plan.kept.is_none()));
    node.blocks.copied(node.now_ms, plans[0].copy, Ok(()));
    // Tried once more, and then left: nobody was promised it.
    node.blocks.copied(node.now_ms, plans[1].copy, Err(lost("peer")));
    let again = node.blocks.poll_copy(node.now_ms).expect("once more");
    node.blocks.copied(node.now_ms, again.copy, Err(lost("peer")));
    let end = view(&node);
    assert_eq!((end.hot_moved, end.hot_failed, end.drained), (1, 1, true));
}

#[test]
fn where_nobody_is_only_what_was_promised_is_waited_for() {
    let mut node = node(16);
    node.fill("1p", "abc");
    drain(&mut node, 16);
    sees(&mut node, &[]);
    assert_eq!(polled(&mut node), []);
    assert_eq!((view(&node).hot_failed, view(&node).drained), (1, true));
}

#[test]
fn a_chain_that_many_want_is_copied_when_the_node_is_loaded_and_not_again_soon() {
    let mut node = node(16);
    node.fill("1p", "abc");
    sees(&mut node, &[("peer", 90, false)]);
    let (namespace, keys) = (namespace(""), chain("ab"));
    let ask = |node: &mut Node, times: u32| {
        (0..times).for_each(|_| node.blocks.asked_for(node.now_ms, namespace, &keys));
    };
    ask(&mut node, 3);
    assert_eq!(polled(&mut node), [], "it has nothing to do");
    node.open("2s", "ab", 0);
    node.open("3s", "ab", 0);
    let plans = polled(&mut node);
    assert_eq!(plans.len(), 1);
    assert_eq!(
        (plans[0].cause, &plans[0].keys, &plans[0].to),
        (CopyCause::Hot, &keys, &peer("peer"))
    );
    node.blocks.copied(node.now_ms, plans[0].copy, Ok(()));
    ask(&mut node, 9);
    assert_eq!(polled(&mut node), [], "it has just been copied");
    node.now_ms += 60_000;
    ask(&mut node, 2);
    assert_eq!(polled(&mut node), [], "too few asked lately");
    ask(&mut node, 1);
    assert_eq!(polled(&mut node).len(), 1);
}

#[test]
fn of_many_chains_only_so_many_are_counted() {
    let replicas = ReplicaOptions {
        hot_requests_min: 2,
        hot_pushes_min: 0,
        hot_chains_max: 2,
        ..ReplicaOptions::default()
    };
    let mut node = Node::with(Options { replicas, ..options(16) });
    for (share, prompt) in [("1p", "a"), ("2p", "b"), ("3p", "c")] {
        node.fill(share, prompt);
    }
    sees(&mut node, &[("peer", 9, false)]);
    // `a` is forgotten for `c`, so that its second ask is its first.
    for prompt in ["a", "b", "c", "b", "a"] {
        node.now_ms += 1;
        node.blocks.asked_for(node.now_ms, namespace(""), &chain(prompt));
    }
    let keys: Vec<_> = polled(&mut node).into_iter().map(|plan| plan.keys).collect();
    assert_eq!(keys, [chain("b")]);
}

#[test]
fn a_copy_that_is_asked_for_goes_where_it_shall_and_waits_for_its_turn() {
    let mut node = node(16);
    node.fill("1p", "abc");
    let longer = chain("abcX");
    let ask =
        |node: &mut Node, to: &str| node.blocks.change_replica(namespace(""), &longer, peer(to));
    let numbers: Vec<_> = ["p", "q", "r"].map(|to| ask(&mut node, to).expect("it is here")).into();
    assert!(numbers.iter().all(|(_, blocks)| *blocks == 3), "{numbers:?}");
    let plans = polled(&mut node);
    let to: Vec<&str> = plans.iter().map(|plan| &*plan.to.0).collect();
    assert_eq!(to, ["p", "q"], "two at once");
    assert_eq!(plans[0].keys, chain("abc"));
    node.blocks.copied(node.now_ms, plans[1].copy, Err(lost("q")));
    assert_eq!(polled(&mut node).len(), 1);
    let nothing = node.blocks.change_replica(namespace(""), &chain("X"), peer("p"));
    assert_eq!(nothing, Err(ChangeReplicaError::NotHere));
    for _ in 0..64 {
        ask(&mut node, "p").expect("there is room");
    }
    assert_eq!(ask(&mut node, "p"), Err(ChangeReplicaError::TooMany(64)));
}

/// Drains with copies that fail, nodes that come and go, and a node that is stopped and drained again:
/// when it says that it has drained, each promise is known elsewhere for as long as it was made.
#[test]
fn whenever_it_has_drained_every_promise_is_kept_elsewhere() {
    let (mut drained, mut failed) = (0, 0);
    for seed in 0..100 {
        let mut random = Random::seeded(seed);
        let mut node = node(64);
        let mut there: BTreeMap<(BlockKey, String), u64> = BTreeMap::new();
        for serial in 0..6 {
            let letter = |random: &mut Random| ["a", "b", "c"][random.below(3)];
            let prompt: String = (0..1 + random.below(4)).map(|_| letter(&mut random)).collect();
            node.fill(&format!("{serial}p"), &prompt);
            if random.one_in(2) {
                let until = 2_000 + 1_000 * random.below(3) as u64;
                keep(&mut node, &prompt, until).expect("there is room");
            }
        }
        drain(&mut node, random.below(20) as u32);
        let mut under_way: Vec<CopyPlan> = Vec::new();
        for step in 0..400 {
            match random.below(8) {
                0 => {
                    let peers = [("p", 9, true), ("q", 30, true), ("r", 50, false)];
                    let seen = peers.into_iter().filter(|_| !random.one_in(3));
                    sees(&mut node, &seen.collect::<Vec<_>>());
                }
                1 => node.now_ms += 400,
                2 if random.one_in(8) => {
                    node.blocks.stop_draining();
                    drain(&mut node, 4);
                }
                2 if random.one_in(4) => node.blocks.expire(random.below(3_000) as u64),
                3..6 if !under_way.is_empty() => {
                    let plan = under_way.swap_remove(random.below(under_way.len()));
                    let to = plan.to.clone();
                    let result = match random.below(5) {
                        0 => Err(CopyError::PeerLost { peer: to, why: String::new() }),
                        1 => Err(CopyError::NoRoom { peer: to, why: String::new() }),
                        2 => Err(CopyError::NotHere(String::new())),
                        _ => {
                            if let (Some(last), Some(kept)) = (plan.keys.last(), plan.kept) {
                                there.insert((*last, to.to_string()), kept.expires_unix_ms);
                            }
                            Ok(())
                        }
                    };
                    failed += u32::from(result.is_err());
                    node.blocks.copied(node.now_ms, plan.copy, result);
                }
                _ => under_way.extend(node.blocks.poll_copy(node.now_ms)),
            }
            node.check();
            assert!(under_way.len() <= 2);
            if !view(&node).drained {
                continue;
            }
            drained += 1;
            for block in node.blocks.ssd_blocks() {
                let Class::Context { expires_unix_ms, .. } = block.class else { continue };
                // With it, or with one after it.
                let follows = |last: BlockKey| {
                    let before = |key: &BlockKey| node.blocks.ssd_block(*key)?.parent;
                    std::iter::successors(Some(last), before).any(|key| key == block.key)
                };
                let is_kept = there
                    .iter()
                    .any(|((last, _), until)| *until >= expires_unix_ms && follows(*last));
                assert!(is_kept, "seed {seed}, step {step}: {:?} is kept here alone", block.key);
            }
        }
    }
    assert!(drained > 400 && failed > 400, "{drained} {failed}");
}
