//! Contexts that are kept on several nodes: which of them lack copies, who makes those, and where.

use kvasir_blocks::{
    ContextName, CopiedContext, CopyCause, CopyError, CopyPlan, HeldCopies, KeepRequest, Options,
    Peer, PeerCopies, PeerView, SsdSize,
};
use kvasir_proto::{BlockKey, Tenant};

use crate::support::{Node, chain, key, namespace, options};

const SIZE: SsdSize =
    SsdSize { bytes_max: 10_000, context_bytes_max: 10_000, tenant_bytes_max: 10_000 };
const TENANT: Tenant = Tenant(1);
const UNTIL: u64 = 9_000;
/// This node's incarnation.
const OWN: u64 = 5;

fn node() -> Node {
    let mut node = Node::with(Options { demote_ahead_percent: 0, ..options(16) });
    node.blocks.set_extents(7, 10);
    node.blocks.ssd_ready(SIZE, Vec::new());
    node.fill("1p", "ab");
    node
}

/// With a context "ab" on so many nodes, of which this is the first.
fn keeper(copies: u8) -> Node {
    let mut node = node();
    keep(&mut node, copies, UNTIL);
    node
}

fn keep(node: &mut Node, copies: u8, expires_unix_ms: u64) {
    keep_chain(node, "ab", copies, expires_unix_ms);
}

fn keep_chain(node: &mut Node, of: &str, copies: u8, expires_unix_ms: u64) {
    let request = KeepRequest {
        namespace: namespace(""),
        keys: chain(of),
        tenant: TENANT,
        expires_unix_ms,
        created_unix_ms: Some(1_000),
        copies,
    };
    node.blocks.keep(node.now_ms, &request).expect("kept");
    write(node);
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

fn name() -> ContextName {
    name_of(key("ab"))
}

fn name_of(last: BlockKey) -> ContextName {
    ContextName { tenant: TENANT, namespace: namespace(""), last }
}

/// Three contexts of which two copies are wanted, in the order in which they are looked at.
fn three() -> (Node, Vec<BlockKey>) {
    let mut node = node();
    node.fill("2p", "cd");
    node.fill("3p", "ef");
    for of in ["ab", "cd", "ef"] {
        keep_chain(&mut node, of, 2, UNTIL);
    }
    let mut all = vec![key("ab"), key("cd"), key("ef")];
    all.sort();
    (node, all)
}

fn peer(name: &str) -> Peer {
    Peer(name.into())
}

/// Nodes that could take it, with the room that each has.
fn sees(node: &mut Node, peers: &[(&str, u32)]) {
    let view =
        |&(name, available): &(&str, u32)| PeerView { peer: peer(name), available, keeps: true };
    node.blocks.peers_seen(node.now_ms, peers.iter().map(view).collect());
}

/// What the others answer: their incarnations, and whether they have it.
fn look(node: &mut Node, answers: &[(&str, Option<(u64, bool)>)]) {
    let contexts = node.blocks.copied_contexts(10);
    see(node, &contexts, answers);
}

/// The same, of what they were asked for before.
fn see(node: &mut Node, contexts: &[CopiedContext], answers: &[(&str, Option<(u64, bool)>)]) {
    let seen = answers.iter().map(|(name, answer)| PeerCopies {
        peer: peer(name),
        answer: answer
            .map(|(incarnation, has)| HeldCopies { incarnation, holds: vec![has; contexts.len()] }),
    });
    let seen: Vec<PeerCopies> = seen.collect();
    node.blocks.copies_seen(node.now_ms, OWN, contexts, &seen);
    node.check();
}

const HAS_NONE: Option<(u64, bool)> = Some((9, false));
const HAS_IT: Option<(u64, bool)> = Some((9, true));

fn polled(node: &mut Node) -> Vec<CopyPlan> {
    std::iter::from_fn(|| node.blocks.poll_copy(node.now_ms)).collect()
}

fn targets(node: &mut Node) -> Vec<(u64, Peer)> {
    polled(node).into_iter().map(|plan| (plan.copy, plan.to)).collect()
}

/// The one copy that is planned, to this node.
fn planned(node: &mut Node, to: &str) -> u64 {
    match &targets(node)[..] {
        [(copy, target)] if *target == peer(to) => *copy,
        other => panic!("{other:?}, and not one to {to}"),
    }
}

fn refuses(node: &mut Node, copy: u64, name: &str) {
    let why = "quota".into();
    node.blocks.copied(node.now_ms, copy, Err(CopyError::Refused { peer: peer(name), why }));
}

#[test]
fn a_context_that_has_too_few_copies_gets_one_where_there_is_most_room() {
    let mut node = keeper(2);
    assert_eq!(node.blocks.copies_lacking(&name()), 1);
    sees(&mut node, &[("small", 10), ("large", 20)]);
    look(&mut node, &[("small", HAS_NONE), ("large", HAS_NONE)]);
    assert_eq!(node.blocks.contexts_short_of_copies(), 1);
    let plans = polled(&mut node);
    let [CopyPlan { copy, cause: CopyCause::Context, keys, to, kept: Some(mark), .. }] = &plans[..]
    else {
        panic!("{plans:?}");
    };
    assert_eq!((&keys[..], to), (&chain("ab")[..], &peer("large")));
    assert_eq!((mark.tenant, mark.expires_unix_ms, mark.copies), (TENANT, UNTIL, 2));
    node.blocks.copied(node.now_ms, *copy, Ok(()));
    assert_eq!(node.blocks.copies_lacking(&name()), 0);
    look(&mut node, &[("small", HAS_NONE), ("large", HAS_IT)]);
    assert_eq!((targets(&mut node), node.blocks.contexts_short_of_copies()), (Vec::new(), 0));
}

#[test]
fn of_those_that_keep_it_the_one_of_the_smallest_incarnation_makes_the_copy() {
    for (other, acts) in [(OWN - 1, false), (OWN + 1, true)] {
        let mut node = keeper(3);
        sees(&mut node, &[("other", 10), ("new", 10)]);
        look(&mut node, &[("other", Some((other, true))), ("new", HAS_NONE)]);
        let to: Vec<Peer> = targets(&mut node).into_iter().map(|(_, to)| to).collect();
        assert_eq!(to, if acts { vec![peer("new")] } else { Vec::new() }, "beside {other}");
        assert_eq!(node.blocks.contexts_short_of_copies(), 1);
    }
}

#[test]
fn a_node_that_does_not_answer_has_lost_what_it_kept_after_a_time_and_not_before() {
    let mut node = keeper(2);
    let node_lost_after_ms = Options::default().replicas.node_lost_after_ms;
    sees(&mut node, &[("new", 10)]);
    look(&mut node, &[("holder", HAS_IT), ("new", HAS_NONE)]);
    node.now_ms += node_lost_after_ms - 1;
    look(&mut node, &[("holder", None), ("new", HAS_NONE)]);
    assert_eq!(targets(&mut node), []);
    // Whoever asks for it is told what is known, and not what may be.
    assert_eq!(node.blocks.copies_lacking(&name()), 1);
    node.now_ms += 1;
    look(&mut node, &[("holder", None), ("new", HAS_NONE)]);
    planned(&mut node, "new");
}

#[test]
fn a_copy_that_one_node_refuses_is_made_on_another_one() {
    let mut node = keeper(2);
    sees(&mut node, &[("full", 20), ("other", 10)]);
    look(&mut node, &[("full", HAS_NONE), ("other", HAS_NONE)]);
    let copy = planned(&mut node, "full");
    refuses(&mut node, copy, "full");
    node.blocks.make_copies(&name());
    let copy = planned(&mut node, "other");
    node.blocks.copied(node.now_ms, copy, Ok(()));
    assert_eq!(node.blocks.copies_lacking(&name()), 0);
}

#[test]
fn where_every_node_has_refused_a_copy_they_are_asked_again_after_a_time() {
    let mut node = keeper(2);
    let retry_ms = Options::default().replicas.retry_ms;
    sees(&mut node, &[("first", 20), ("second", 10)]);
    look(&mut node, &[("first", HAS_NONE), ("second", HAS_NONE)]);
    for _ in 0..3 {
        for name_of in ["first", "second"] {
            let copy = planned(&mut node, name_of);
            refuses(&mut node, copy, name_of);
            node.blocks.make_copies(&name());
        }
        node.now_ms += retry_ms - 1;
        node.blocks.make_copies(&name());
        assert_eq!(targets(&mut node), [], "it waits");
        node.now_ms += 1;
        node.blocks.make_copies(&name());
    }
    planned(&mut node, "first");
}

/// Each try is a transaction at the node that refuses it, which remembers it for a while.
#[test]
fn the_tries_of_a_copy_that_nobody_takes_become_rarer_until_somebody_waits_for_it() {
    let mut node = keeper(2);
    let retry_ms = Options::default().replicas.retry_ms;
    sees(&mut node, &[("full", 10)]);
    look(&mut node, &[("full", HAS_NONE)]);
    for times in [1, 2, 4, 8, 16, 32, 32, 32] {
        let copy = planned(&mut node, "full");
        refuses(&mut node, copy, "full");
        node.now_ms += times * retry_ms - 1;
        look(&mut node, &[("full", HAS_NONE)]);
        assert_eq!(targets(&mut node), [], "{times}");
        node.now_ms += 1;
        look(&mut node, &[("full", HAS_NONE)]);
    }
    let copy = planned(&mut node, "full");
    refuses(&mut node, copy, "full");
    node.now_ms += retry_ms;
    node.blocks.make_copies(&name());
    planned(&mut node, "full");
}

#[test]
fn one_that_keeps_it_for_less_long_gets_the_time_before_another_one_gets_a_copy() {
    let mut node = keeper(2);
    sees(&mut node, &[("holder", 10), ("larger", 20)]);
    look(&mut node, &[("holder", HAS_IT), ("larger", HAS_NONE)]);
    keep(&mut node, 2, UNTIL + 1);
    assert_eq!(node.blocks.copies_lacking(&name()), 1);
    look(&mut node, &[("holder", HAS_NONE), ("larger", HAS_NONE)]);
    planned(&mut node, "holder");
}

/// Otherwise it would see to fewer, and the others would wait for it.
#[test]
fn one_that_would_see_to_fewer_copies_is_told_of_more() {
    let mut node = keeper(2);
    sees(&mut node, &[("holder", 10), ("larger", 20)]);
    look(&mut node, &[("holder", HAS_IT), ("larger", HAS_NONE)]);
    assert_eq!(node.blocks.copies_lacking(&name()), 0);
    let asked = |copies| CopiedContext {
        tenant: TENANT,
        namespace: namespace(""),
        last: key("ab"),
        expires_unix_ms: UNTIL,
        copies,
    };
    assert!(node.blocks.keeps_copy(&asked(2)) && !node.blocks.keeps_copy(&asked(3)));
    keep(&mut node, 3, UNTIL);
    assert_eq!(node.blocks.copied_contexts(10), [asked(3)]);
    assert_eq!(node.blocks.copies_lacking(&name()), 2);
    node.blocks.make_copies(&name());
    let copy = planned(&mut node, "holder");
    node.blocks.copied(node.now_ms, copy, Ok(()));
    assert_eq!(node.blocks.copies_lacking(&name()), 1);
    node.blocks.make_copies(&name());
    planned(&mut node, "larger");
}

#[test]
fn only_a_tenants_own_context_counts_as_a_copy_of_it() {
    let node = keeper(2);
    let asked = CopiedContext {
        tenant: TENANT,
        namespace: namespace(""),
        last: key("ab"),
        expires_unix_ms: UNTIL,
        copies: 2,
    };
    assert!(node.blocks.keeps_copy(&asked));
    for wrong in [
        CopiedContext { tenant: Tenant(2), ..asked },
        CopiedContext { namespace: namespace("other"), ..asked },
        CopiedContext { last: key("a"), ..asked },
        CopiedContext { expires_unix_ms: UNTIL + 1, ..asked },
    ] {
        assert!(!node.blocks.keeps_copy(&wrong), "{wrong:?}");
    }
}

#[test]
fn of_a_context_that_has_ended_nothing_is_remembered() {
    let mut node = keeper(2);
    sees(&mut node, &[]);
    // Nobody has ever had a copy.
    look(&mut node, &[]);
    assert_eq!((node.blocks.contexts_short_of_copies(), targets(&mut node)), (1, Vec::new()));
    node.blocks.delete_context(node.now_ms, &name()).expect("dropped");
    write(&mut node);
    assert_eq!(node.blocks.copied_contexts(10), []);
    assert_eq!(node.blocks.contexts_short_of_copies(), 0);
}

#[test]
fn contexts_are_looked_at_in_rounds() {
    let (mut node, all) = three();
    let mut lasts = |count| {
        let next = node.blocks.copied_contexts(count);
        next.into_iter().map(|of| of.last).collect::<Vec<_>>()
    };
    let mut round = lasts(2);
    round.extend(lasts(2));
    assert_eq!(round, all);
    assert_eq!(lasts(3), all, "and from the first on again");
}

#[test]
fn a_copy_that_somebody_waits_for_is_not_behind_all_that_was_lost() {
    let (mut node, all) = three();
    sees(&mut node, &[("new", 10)]);
    look(&mut node, &[("new", HAS_NONE)]);
    node.blocks.make_copies(&name_of(all[2]));
    let mut next = || {
        let plan = node.blocks.poll_copy(node.now_ms).expect("a copy");
        node.blocks.copied(node.now_ms, plan.copy, Ok(()));
        plan.keys.last().copied().expect("a block")
    };
    assert_eq!([next(), next(), next()], [all[2], all[0], all[1]]);
    assert_eq!(targets(&mut node), []);
}

#[test]
fn those_that_somebody_waits_for_and_those_that_were_lost_have_their_turns() {
    let (mut node, all) = three();
    sees(&mut node, &[("new", 10)]);
    look(&mut node, &[("new", HAS_NONE)]);
    node.blocks.make_copies(&name_of(all[1]));
    node.blocks.make_copies(&name_of(all[2]));
    let mut next = || {
        let plan = node.blocks.poll_copy(node.now_ms).expect("a copy");
        node.blocks.copied(node.now_ms, plan.copy, Ok(()));
        plan.keys.last().copied().expect("a block")
    };
    assert_eq!([next(), next(), next()], [all[1], all[0], all[2]]);
}

#[test]
fn that_a_node_has_none_is_from_before_it_got_one() {
    let mut node = keeper(2);
    sees(&mut node, &[("new", 10), ("other", 20)]);
    look(&mut node, &[("new", HAS_NONE), ("other", HAS_NONE)]);
    let copy = planned(&mut node, "other");
    let asked = node.blocks.copied_contexts(10);
    node.blocks.copied(node.now_ms, copy, Ok(()));
    see(&mut node, &asked, &[("new", HAS_NONE), ("other", HAS_NONE)]);
    assert_eq!((targets(&mut node), node.blocks.copies_lacking(&name())), (Vec::new(), 0));
    // It has lost it meanwhile.
    look(&mut node, &[("new", HAS_NONE), ("other", HAS_NONE)]);
    planned(&mut node, "other");
}

#[test]
fn one_that_was_away_gets_the_time_before_another_one_gets_a_copy() {
    let mut node = keeper(2);
    sees(&mut node, &[("holder", 10), ("larger", 20)]);
    look(&mut node, &[("holder", HAS_IT), ("larger", HAS_NONE)]);
    keep(&mut node, 2, UNTIL + 1);
    look(&mut node, &[("holder", None), ("larger", HAS_NONE)]);
    assert_eq!(node.blocks.copies_lacking(&name()), 1);
    look(&mut node, &[("holder", HAS_NONE), ("larger", HAS_NONE)]);
    planned(&mut node, "holder");
}
