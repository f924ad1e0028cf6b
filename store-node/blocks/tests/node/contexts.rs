//! Contexts: chains with a time of their own, some of which begin others; dropped, extended, listed and found
//! again. What the core says is compared with a slow model that looks at all marks for each block.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::{
    ContextName, DrainRequest, Evicted, KeepError, KeepRequest, Options, Peer, PeerView,
    PersistedContext, SinkError, SsdBlock, SsdSize,
};
use kvasir_proto::{BlockKey, Class, Mark, Tenant};

use crate::simulation::Random;
use crate::support::{Node, chain, key, namespace, options};

pub(crate) const EXTENT_BYTES: u64 = 10;
pub(crate) const SIZE: SsdSize =
    SsdSize { bytes_max: 400, context_bytes_max: 300, tenant_bytes_max: 200 };

/// So little that it is full now and then.
const SMALL: SsdSize = SsdSize { bytes_max: 150, context_bytes_max: 110, tenant_bytes_max: 40 };

pub(crate) fn node() -> Node {
    let mut node = Node::with(Options { demote_ahead_percent: 100, ..options(32) });
    node.blocks.set_extents(7, EXTENT_BYTES);
    node.blocks.ssd_ready(SIZE, Vec::new());
    node
}

/// Everything that is being written is.
pub(crate) fn write(node: &mut Node) {
    node.actions();
    while !node.sinks.is_empty() {
        for (sink, _) in std::mem::take(&mut node.sinks) {
            node.blocks.sunk(node.now_ms, sink, Ok(()));
        }
        node.actions();
    }
}

pub(crate) fn request(prompt: &str, tenant: u64, expires_unix_ms: u64) -> KeepRequest {
    KeepRequest {
        namespace: namespace(""),
        keys: chain(prompt),
        tenant: Tenant(tenant),
        expires_unix_ms,
        created_unix_ms: Some(1_000),
        copies: 1,
    }
}

pub(crate) fn keep(node: &mut Node, prompt: &str, expires_unix_ms: u64) {
    node.blocks.keep(node.now_ms, &request(prompt, 1, expires_unix_ms)).expect("it can be kept");
    write(node);
}

pub(crate) fn name(prompt: &str, tenant: u64) -> ContextName {
    ContextName { tenant: Tenant(tenant), namespace: namespace(""), last: key(prompt) }
}

fn extend(node: &mut Node, prompt: &str, expires_unix_ms: u64) {
    let name = name(prompt, 1);
    node.blocks.extend_context(node.now_ms, &name, expires_unix_ms).expect("it is there");
    write(node);
}

fn delete_context(node: &mut Node, prompt: &str) {
    node.blocks.delete_context(node.now_ms, &name(prompt, 1)).expect("it is there");
    write(node);
}

/// Until when each of these is kept: 0 for not at all.
pub(crate) fn untils(node: &Node, prompts: &[&str]) -> Vec<u64> {
    let until = |prompt: &&str| match node.blocks.ssd_block(key(prompt)).map(|block| block.class) {
        Some(Class::Context { expires_unix_ms, .. }) => expires_unix_ms,
        Some(Class::Normal) | None => 0,
    };
    prompts.iter().map(until).collect()
}

pub(crate) fn listed(node: &Node, prompts: &[&str]) -> Vec<(u32, u64)> {
    let all = node.blocks.contexts(Tenant(1), None, 100, 0);
    let of = |prompt: &&str| all.iter().find(|context| context.last == key(prompt));
    let found: Vec<_> = prompts.iter().filter_map(of).collect();
    assert_eq!(found.len(), all.len(), "{all:?}");
    found.into_iter().map(|context| (context.blocks, context.expires_unix_ms)).collect()
}

/// The node is started anew, and finds what was written.
fn restarted(node: &Node) -> Node {
    let mut again = self::node();
    again.blocks.ssd_ready(SIZE, restarted_blocks(node));
    again.actions();
    again
}

#[test]
fn a_context_that_begins_another_has_a_time_of_its_own() {
    let mut node = node();
    node.fill("1p", "abcd");
    keep(&mut node, "abcd", 9_000);
    keep(&mut node, "ab", 5_000);
    let prompts = ["a", "ab", "abc", "abcd"];
    assert_eq!(untils(&node, &prompts), [9_000; 4]);
    assert_eq!(listed(&node, &prompts), [(2, 5_000), (4, 9_000)]);
    delete_context(&mut node, "abcd");
    assert_eq!(untils(&node, &prompts), [5_000, 5_000, 0, 0]);
    assert_eq!(listed(&node, &prompts), [(2, 5_000)]);
    let mut node = restarted(&node);
    assert_eq!(listed(&node, &prompts), [(2, 5_000)]);
    assert_eq!(node.blocks.counts().context_bytes, 20);
    node.blocks.expire(5_000);
    assert_eq!(untils(&node, &prompts), [0; 4]);
    assert_eq!(node.blocks.counts().context_expired_total, 2);
}

#[test]
fn contexts_stay_when_what_goes_through_them_is_kept_in_another_layout() {
    let mut node = node();
    node.fill("1p", "abc");
    keep(&mut node, "ab", 9_000);
    node.blocks.set_extents(8, EXTENT_BYTES);
    keep(&mut node, "abc", 5_000);
    assert_eq!(listed(&node, &["ab", "abc"]), [(2, 9_000), (3, 5_000)]);
    assert_eq!(untils(&node, &["a", "ab", "abc"]), [9_000, 9_000, 5_000]);
}

#[test]
fn the_longer_one_stays_when_the_one_that_begins_it_is_dropped() {
    let mut node = node();
    node.fill("1p", "abcd");
    keep(&mut node, "ab", 9_000);
    keep(&mut node, "abcd", 5_000);
    let prompts = ["a", "ab", "abc", "abcd"];
    assert_eq!(untils(&node, &prompts), [9_000, 9_000, 5_000, 5_000]);
    let sunk = node.blocks.counts().sunk_total;
    delete_context(&mut node, "ab");
    assert_eq!(node.blocks.counts().sunk_total, sunk + 1, "one block is written");
    assert_eq!(untils(&node, &prompts), [5_000; 4]);
    assert_eq!(listed(&restarted(&node), &prompts), [(4, 5_000)]);
}

/// What is read of it then is appended after whatever would be written of the eviction.
#[test]
fn what_is_written_anew_from_the_ssd_is_not_evicted_meanwhile() {
    let mut node = node();
    node.fill("1p", "a");
    keep(&mut node, "a", 9_000);
    node.blocks.admin_evict(node.now_ms, key("a"));
    assert_eq!(node.cached("a"), "");
    node.blocks.delete_context(node.now_ms, &name("a", 1)).expect("it is there");
    // Nothing else holds it any more.
    node.blocks.expire(9_000);
    node.actions();
    let evicted = node.blocks.admin_evict(node.now_ms, key("a"));
    assert_eq!(evicted, Some(Evicted { kept_blocks: 1, ..Evicted::default() }));
    write(&mut node);
    assert!(node.erased.is_empty() && node.forgotten.is_empty());
    let evicted = node.blocks.admin_evict(node.now_ms, key("a"));
    assert_eq!(evicted, Some(Evicted { ssd_blocks: 1, ..Evicted::default() }));
}

#[test]
fn another_time_may_be_earlier_and_keeping_once_more_is_never_shorter() {
    let mut node = node();
    node.fill("1p", "ab");
    keep(&mut node, "ab", 5_000);
    keep(&mut node, "ab", 4_000);
    assert_eq!(untils(&node, &["a", "ab"]), [5_000; 2]);
    extend(&mut node, "ab", 9_000);
    assert_eq!(untils(&node, &["a", "ab"]), [9_000; 2]);
    extend(&mut node, "ab", 3_000);
    assert_eq!(untils(&restarted(&node), &["a", "ab"]), [3_000; 2]);
    let all = node.blocks.contexts(Tenant(1), None, 100, 0);
    let context = PersistedContext {
        namespace: namespace(""),
        last: key("ab"),
        blocks: 2,
        created_unix_ms: 1_000,
        expires_unix_ms: 3_000,
    };
    assert_eq!(all, [context]);
    assert_eq!(node.blocks.contexts(Tenant(1), None, 100, 3_000), [], "its time is over");
}

#[test]
fn a_drop_frees_quota_and_room_at_once() {
    let mut node = node();
    node.fill("1p", "abcdefghijklmnopqrst");
    node.fill("2p", "ABC");
    keep(&mut node, "abcdefghijklmnopqrst", 9_000);
    let over = node.blocks.keep(node.now_ms, &request("ABC", 1, 9_000));
    assert!(matches!(over, Err(KeepError::OverQuota { .. })), "{over:?}");
    delete_context(&mut node, "abcdefghijklmnopqrst");
    assert_eq!(node.blocks.counts().context_bytes, 0);
    keep(&mut node, "ABC", 9_000);
}

#[test]
fn what_is_being_kept_counts_as_kept_and_what_fails_does_not() {
    let mut node = node();
    node.fill("1p", "ab");
    node.blocks.sink_ahead(node.now_ms);
    write(&mut node);
    // All of it is there: one extent is written, and both blocks count from now on.
    node.blocks.keep(node.now_ms, &request("ab", 1, 9_000)).expect("it can be kept");
    node.actions();
    assert_eq!((node.sinks.len(), node.blocks.counts().context_bytes), (1, 20));
    assert_eq!(listed(&node, &["ab"]), [], "it is not acknowledged");
    let other = node.blocks.keep(node.now_ms, &request("a", 2, 9_000));
    assert_eq!(other, Err(KeepError::OtherTenant));
    let (sink, _) = node.sinks.remove(0);
    node.blocks.sunk(node.now_ms, sink, Err(SinkError::Failed));
    node.actions();
    assert_eq!(node.blocks.counts().context_bytes, 0);
    // A drop that fails leaves what there was.
    node.now_ms += 10_000;
    keep(&mut node, "ab", 9_000);
    node.blocks.delete_context(node.now_ms, &name("ab", 1)).expect("it is there");
    let again = node.blocks.delete_context(node.now_ms, &name("ab", 1));
    assert_eq!(again, Err(KeepError::Busy));
    node.actions();
    let (sink, _) = node.sinks.remove(0);
    node.blocks.sunk(node.now_ms, sink, Err(SinkError::Failed));
    node.actions();
    assert_eq!(listed(&node, &["ab"]), [(2, 9_000)]);
}

#[test]
fn only_a_tenants_own_contexts_can_be_changed_and_no_objects() {
    let mut node = node();
    node.fill("1p", "ab");
    node.fill("2p", "X");
    keep(&mut node, "ab", 9_000);
    let object = KeepRequest { created_unix_ms: None, ..request("X", 1, 9_000) };
    node.blocks.keep(node.now_ms, &object).expect("it can be kept");
    write(&mut node);
    assert_eq!(listed(&node, &["ab"]), [(2, 9_000)], "an object is no context");
    assert_eq!(untils(&node, &["X"]), [9_000]);
    let mut check = |name: ContextName| {
        let dropped = node.blocks.delete_context(node.now_ms, &name);
        assert_eq!(dropped, Err(KeepError::NoContext), "{name:?}");
        let extended = node.blocks.extend_context(node.now_ms, &name, 9_500);
        assert_eq!(extended, Err(KeepError::NoContext), "{name:?}");
    };
    check(name("ab", 2));
    check(name("a", 1));
    check(name("abc", 1));
    check(name("X", 1));
    check(ContextName { namespace: namespace("other"), ..name("ab", 1) });
    assert_eq!(node.blocks.contexts(Tenant(2), None, 100, 0), []);
}

#[test]
fn what_was_kept_before_there_were_marks_is_kept_and_not_listed() {
    let mark = |expires_unix_ms| {
        Some(Mark { tenant: Tenant(1), expires_unix_ms, created_unix_ms: None, copies: 1 })
    };
    let block = |prompt: &str, expires_unix_ms| SsdBlock {
        key: key(prompt),
        namespace: namespace(""),
        parent: (prompt.len() > 1).then(|| key(&prompt[..prompt.len() - 1])),
        class: Class::Normal,
        mark: mark(expires_unix_ms),
        layout: 7,
        bytes: EXTENT_BYTES,
    };
    let mut node = node();
    let former = vec![block("a", 9_000), block("ab", 9_000), block("abc", 5_000)];
    node.blocks.ssd_ready(SIZE, former);
    let prompts = ["a", "ab", "abc"];
    assert_eq!(untils(&node, &prompts), [9_000, 9_000, 5_000]);
    assert_eq!(listed(&node, &prompts), []);
    // A context is made of it, and dropped: what was promised before stays.
    keep(&mut node, "abc", 9_500);
    assert_eq!(listed(&node, &prompts), [(3, 9_500)]);
    delete_context(&mut node, "abc");
    assert_eq!(untils(&node, &prompts), [9_000, 9_000, 0]);
}

fn begin_drain(node: &mut Node) {
    let request = DrainRequest { has_ssd: true, ..DrainRequest::default() };
    node.blocks.drain(node.now_ms, request);
    let peer = PeerView { peer: Peer("peer".into()), available: 50, keeps: true };
    node.blocks.peers_seen(node.now_ms, vec![peer]);
}

#[test]
fn a_drain_moves_each_context_with_its_own_mark() {
    let mut node = node();
    node.fill("1p", "abcd");
    keep(&mut node, "abcd", 9_000);
    keep(&mut node, "ab", 9_000);
    keep(&mut node, "abc", 5_000);
    begin_drain(&mut node);
    let mut moved = BTreeMap::new();
    while let Some(plan) = node.blocks.poll_copy(node.now_ms) {
        let mark = plan.kept.expect("nothing else moves");
        assert_eq!(mark.created_unix_ms, Some(1_000));
        assert_eq!(
            node.blocks.delete_context(node.now_ms, &name_of(&plan.keys)),
            Err(KeepError::Busy)
        );
        moved.insert(plan.keys.len(), mark.expires_unix_ms);
        node.blocks.copied(node.now_ms, plan.copy, Ok(()));
    }
    assert_eq!(moved, BTreeMap::from([(2, 9_000), (3, 5_000), (4, 9_000)]));
    assert!(node.blocks.drain_view(|_| true).drained);
    assert_eq!(
        node.blocks.extend_context(node.now_ms, &name("ab", 1), 9_500),
        Err(KeepError::Draining),
        "whoever drains it has seen that all has moved"
    );
    delete_context(&mut node, "ab");
    assert!(node.blocks.poll_copy(node.now_ms).is_none());
}

fn name_of(keys: &[BlockKey]) -> ContextName {
    ContextName { last: *keys.last().expect("a chain"), ..name("a", 1) }
}

/// What was promised, and nothing cleverer.
#[derive(Debug, Default)]
struct Model {
    /// By last block: (tenant, since, until).
    marks: BTreeMap<BlockKey, (u64, Option<u64>, u64)>,
    parents: BTreeMap<BlockKey, Option<BlockKey>>,
}

impl Model {
    fn chain(&self, last: BlockKey) -> Vec<BlockKey> {
        let before = |key: &BlockKey| self.parents[key];
        let mut keys: Vec<BlockKey> = std::iter::successors(Some(last), before).collect();
        keys.reverse();
        keys
    }

    fn check(&self, node: &Node, unix_ms: u64) {
        let blocks: BTreeMap<BlockKey, SsdBlock> =
            node.blocks.ssd_blocks().map(|block| (block.key, block)).collect();
        let mut untils: BTreeMap<BlockKey, (u64, u64)> = BTreeMap::new();
        for (last, &(tenant, _, expires_unix_ms)) in &self.marks {
            for key in self.chain(*last) {
                assert!(blocks.contains_key(&key), "a block of {last:?} is not there");
                let of = untils.entry(key).or_insert((expires_unix_ms, tenant));
                *of = (*of).max((expires_unix_ms, tenant));
            }
        }
        for (key, block) in &blocks {
            let want = match untils.get(key) {
                Some(&(expires_unix_ms, tenant)) => {
                    Class::Context { tenant: Tenant(tenant), expires_unix_ms }
                }
                None => Class::Normal,
            };
            assert_eq!(block.class, want, "{key:?}");
        }
        let counts = node.blocks.counts();
        assert_eq!(counts.context_blocks as usize, untils.len());
        assert_eq!(counts.context_bytes, untils.len() as u64 * EXTENT_BYTES);
        for tenant in 0..3 {
            let of_tenant = |(_, (of, since, _)): &(_, &(u64, Option<u64>, u64))| {
                *of == tenant && since.is_some()
            };
            let mut want: Vec<PersistedContext> = self
                .marks
                .iter()
                .filter(of_tenant)
                .map(|(last, &(_, since, expires_unix_ms))| PersistedContext {
                    namespace: namespace(""),
                    last: *last,
                    blocks: self.chain(*last).len() as u32,
                    created_unix_ms: since.expect("it was filtered"),
                    expires_unix_ms,
                })
                .collect();
            want.sort_by_key(|context| (context.namespace, context.last));
            // In pages of three.
            let mut got: Vec<PersistedContext> = Vec::new();
            loop {
                let after = got.last().map(|context| (context.namespace, context.last));
                let page = node.blocks.contexts(Tenant(tenant), after, 3, unix_ms);
                if page.is_empty() {
                    break;
                }
                got.extend(page);
            }
            assert_eq!(got, want, "of tenant {tenant}");
        }
    }

    fn bytes_of(&self, tenant: u64) -> u64 {
        let of_tenant = |(_, (of, ..)): &(&BlockKey, &(u64, Option<u64>, u64))| *of == tenant;
        let marks = self.marks.iter().filter(of_tenant);
        let keys: BTreeSet<BlockKey> = marks.flat_map(|(last, _)| self.chain(*last)).collect();
        keys.len() as u64 * EXTENT_BYTES
    }
}

/// A chain of few letters; the first says whose it is.
fn prompt(random: &mut Random) -> (String, u64) {
    let tenant = random.below(3);
    let mut prompt = ["x", "y", "z"][tenant].to_owned();
    for _ in 0..random.below(5) {
        prompt.push(['a', 'b'][random.below(2)]);
    }
    (prompt, tenant as u64)
}

#[test]
fn classes_quotas_and_lists_are_those_of_the_marks() {
    let mut met = [0_u32; 8];
    for seed in 0..120 {
        let mut random = Random::seeded(seed);
        let (mut node, mut model) = (node(), Model::default());
        node.blocks.ssd_ready(SMALL, Vec::new());
        let mut unix_ms = 1_000;
        for step in 0..400 {
            let (prompt, tenant) = prompt(&mut random);
            let keys = chain(&prompt);
            let before = std::iter::once(None).chain(keys.iter().copied().map(Some));
            model.parents.extend(keys.iter().copied().zip(before));
            let last = key(&prompt);
            let expires_unix_ms = unix_ms + 1 + random.below(900) as u64;
            node.now_ms += 2_000;
            node.blocks.handle_timeout(node.now_ms);
            let fails = random.one_in(8);
            let finish = |node: &mut Node| {
                node.kept.clear();
                node.actions();
                while !node.sinks.is_empty() {
                    let (sink, _) = node.sinks.remove(0);
                    let result = if fails { Err(SinkError::Failed) } else { Ok(()) };
                    node.blocks.sunk(node.now_ms, sink, result);
                    node.actions();
                }
                matches!(node.kept[..], [(_, Some(_))])
            };
            match random.below(10) {
                0 | 1 => {
                    // What only the SSD has would be waited for.
                    let is_below = |end: usize| {
                        let key = key(&prompt[..end]);
                        node.blocks.ssd_block(key).is_some() && node.blocks.block(key).is_none()
                    };
                    if (1..=prompt.len()).any(is_below) {
                        continue;
                    }
                    node.fill(&format!("{}p", seed * 1_000 + step + 1), &prompt);
                    node.blocks.sink_ahead(node.now_ms);
                    write(&mut node);
                    met[5] += u32::from(node.blocks.counts().ssd_evicted_total > 0);
                }
                2..=4 => {
                    let since = Some(unix_ms).filter(|_| !random.one_in(5));
                    let request = KeepRequest {
                        created_unix_ms: since,
                        ..request(&prompt, tenant, expires_unix_ms)
                    };
                    let taken = model.bytes_of(tenant);
                    match node.blocks.keep(node.now_ms, &request) {
                        Ok(_) => {
                            // Of what is here, which may not be all of it.
                            let in_dram =
                                (1..=prompt.len()).take_while(|end| node.has(&prompt[..*end]));
                            let on_ssd = (1..=prompt.len()).take_while(|end| {
                                node.blocks.ssd_block(key(&prompt[..*end])).is_some()
                            });
                            let blocks = in_dram.count().max(on_ssd.count());
                            let last = key(&prompt[..blocks]);
                            if finish(&mut node) {
                                let known = model.marks.get(&last).copied();
                                let since = known.and_then(|(_, since, _)| since).or(since);
                                let until =
                                    known.map_or(0, |(.., until)| until).max(expires_unix_ms);
                                model.marks.insert(last, (tenant, since, until));
                                met[0] += 1;
                            }
                        }
                        Err(KeepError::OverQuota { taken_bytes, .. }) => {
                            assert_eq!(taken_bytes, taken);
                            met[1] += 1;
                        }
                        Err(KeepError::NotHere | KeepError::NoRoom) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
                5 | 6 => {
                    let name = name(&prompt, tenant);
                    match node.blocks.extend_context(node.now_ms, &name, expires_unix_ms) {
                        Ok(_) if finish(&mut node) => {
                            model.marks.get_mut(&last).expect("it was promised").2 =
                                expires_unix_ms;
                            met[2] += 1;
                        }
                        Ok(_) => {}
                        Err(error) => {
                            assert_eq!(error, KeepError::NoContext);
                            let known = model.marks.get(&last);
                            assert!(known.is_none_or(|(_, since, _)| since.is_none()));
                        }
                    }
                }
                7 => match node.blocks.delete_context(node.now_ms, &name(&prompt, tenant)) {
                    Ok(_) if finish(&mut node) => {
                        model.marks.remove(&last).expect("it was promised");
                        met[3] += 1;
                    }
                    Ok(_) => {}
                    Err(error) => assert_eq!(error, KeepError::NoContext),
                },
                8 => {
                    unix_ms += random.below(300) as u64;
                    node.blocks.expire(unix_ms);
                    let before = model.marks.len();
                    model.marks.retain(|_, (.., until)| *until > unix_ms);
                    met[4] += u32::from(model.marks.len() < before);
                }
                _ => {
                    met[6] += u32::from(node.blocks.counts().sinks_failed_total > 0);
                    let mut found: Vec<SsdBlock> = restarted_blocks(&node);
                    for at in (1..found.len()).rev() {
                        found.swap(at, random.below(at + 1));
                    }
                    let now_ms = node.now_ms;
                    node = self::node();
                    node.now_ms = now_ms;
                    node.blocks.ssd_ready(SMALL, found);
                    node.blocks.expire(unix_ms);
                    met[7] += 1;
                }
            }
            node.actions();
            model.check(&node, unix_ms);
        }
    }
    assert!(met.iter().all(|&met| met > 20), "hardly anything happened: {met:?}");
}

pub(crate) fn restarted_blocks(node: &Node) -> Vec<SsdBlock> {
    let found = |block| SsdBlock { class: Class::Normal, ..block };
    node.blocks.ssd_blocks().map(found).collect()
}
