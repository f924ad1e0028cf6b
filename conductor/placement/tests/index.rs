//! The shadow index against a naive one: every question asked of every block.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_placement::{IndexLimits, NodeIndex, ShadowIndex, Tier};
use kvasir_proto::{BlockKey, BlockSetDigest, TierDigests};
use proptest::prelude::*;

/// Block `at` of chain `chain`. Chains that are multiples of 16 crowd on a few places of the
/// table, the way that real keys do only by bad luck.
fn key(chain: u64, at: u32) -> BlockKey {
    let number = chain << 32 | u64::from(at);
    let mut x = number.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 32;
    // What places a key are its high bits.
    let place = if chain.is_multiple_of(16) { number + 2 } else { x };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&place.to_le_bytes());
    bytes[8..].copy_from_slice(&number.to_le_bytes());
    BlockKey(bytes)
}

fn chain(chain: u64, blocks: u32) -> Vec<BlockKey> {
    (0..blocks).map(|at| key(chain, at)).collect()
}

const CHAINS: u64 = 20;
const BLOCKS_MAX: u32 = 200;

#[derive(Debug, Clone)]
enum Op {
    AddNode,
    RetireNode(usize),
    /// The node now holds this much of the chain.
    Hold(usize, u64, u32),
    Sweep,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => Just(Op::AddNode),
        1 => any::<usize>().prop_map(Op::RetireNode),
        12 => (any::<usize>(), 0..CHAINS, 0..=BLOCKS_MAX)
            .prop_map(|(node, chain, blocks)| Op::Hold(node, chain, blocks)),
        2 => Just(Op::Sweep),
    ]
}

#[derive(Default)]
struct Naive {
    nodes: BTreeMap<NodeIndex, BTreeMap<u64, u32>>,
}

impl Naive {
    fn pick(&self, number: usize) -> Option<NodeIndex> {
        let at = number.checked_rem(self.nodes.len())?;
        self.nodes.keys().nth(at).copied()
    }
}

fn run(ops: &[Op], first_nodes: usize) {
    let mut index = ShadowIndex::new(IndexLimits::default());
    let mut naive = Naive::default();
    for op in std::iter::repeat_n(&Op::AddNode, first_nodes).chain(ops) {
        match *op {
            Op::AddNode => {
                let node = index.add_node().expect("room for a node");
                assert!(naive.nodes.insert(node, BTreeMap::new()).is_none(), "in use");
            }
            Op::RetireNode(number) => {
                if let Some(node) = naive.pick(number) {
                    index.retire_node(node);
                    naive.nodes.remove(&node);
                }
            }
            Op::Hold(number, of, blocks) => {
                let Some(node) = naive.pick(number) else { continue };
                let held = naive.nodes.get_mut(&node).expect("picked").entry(of).or_default();
                let whole = chain(of, BLOCKS_MAX);
                let (less, more) = ((*held).min(blocks) as usize, (*held).max(blocks) as usize);
                if blocks > *held {
                    assert_eq!(index.insert(node, Tier::Dram, &whole[less..more]), 0);
                } else {
                    index.remove(node, &whole[less..more]);
                }
                *held = blocks;
            }
            Op::Sweep => {
                index.sweep_step();
            }
        }
    }
    compare(&index, &naive);
    while index.sweep_step() {}
    compare(&index, &naive);
}

fn compare(index: &ShadowIndex, naive: &Naive) {
    assert_eq!(index.nodes(), naive.nodes.len());
    for of in 0..CHAINS {
        for length in [1, 2, 9, 100, BLOCKS_MAX] {
            let matched = index.match_prefix(&chain(of, length));
            for (node, held) in &naive.nodes {
                let want = held.get(&of).copied().unwrap_or(0).min(length);
                assert_eq!(matched.cached_blocks(*node), want, "node {node}, chain {of}, {length}");
            }
        }
    }
    let count = |held: &BTreeMap<u64, u32>| held.values().sum::<u32>() as usize;
    assert_eq!(index.entries(), naive.nodes.values().map(count).sum::<usize>());
    for (node, held) in &naive.nodes {
        assert_eq!(index.entries_of(*node), count(held));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..Default::default() })]

    #[test]
    fn any_history_of_a_few_nodes_gives_the_naive_answer(ops in prop::collection::vec(op(), 0..150)) {
        run(&ops, 0);
    }

    #[test]
    fn any_history_of_many_nodes_gives_the_naive_answer(ops in prop::collection::vec(op(), 0..150)) {
        run(&ops, 100);
    }

    /// Sets with holes: what a node says while its events are on their way.
    #[test]
    fn a_length_always_ends_between_a_held_block_and_one_that_is_not(
        held in prop::collection::vec(prop::collection::btree_set(0u32..60, 0..60), 3),
    ) {
        let mut index = ShadowIndex::new(IndexLimits::default());
        let keys = chain(1, 60);
        for (number, held) in held.iter().enumerate() {
            let node = index.add_node().expect("room");
            prop_assert_eq!(node, NodeIndex(number as u16));
            let held: Vec<BlockKey> = held.iter().map(|&at| key(1, at)).collect();
            index.insert(node, Tier::Dram, &held);
        }
        let matched = index.match_prefix(&keys);
        for (number, held) in held.iter().enumerate() {
            let length = matched.cached_blocks(NodeIndex(number as u16));
            prop_assert!(length == 0 || held.contains(&(length - 1)));
            prop_assert!(length == 60 || !held.contains(&length));
        }
    }
}

#[test]
fn a_retired_node_is_gone_at_once_and_its_number_comes_back_clean() {
    let limits = IndexLimits { nodes_max: 2, ..IndexLimits::default() };
    let mut index = ShadowIndex::new(limits);
    let (a, b) = (index.add_node().expect("room"), index.add_node().expect("room"));
    assert!(index.add_node().is_err(), "two at most");
    let keys = chain(1, 50);
    index.insert(a, Tier::Dram, &keys);
    index.insert(b, Tier::Dram, &keys[..10]);
    index.retire_node(a);
    let matched = index.match_prefix(&keys);
    assert_eq!((matched.cached_blocks(a), matched.cached_blocks(b)), (0, 10));
    assert_eq!(index.entries(), 10);
    assert_eq!(index.insert(a, Tier::Dram, &keys), 50, "nothing is taken for a node that is gone");
    let mut numbers = BTreeSet::new();
    for _ in 0..200 {
        let node = index.add_node().expect("room again");
        numbers.insert(node);
        assert_eq!(index.match_prefix(&keys).cached_blocks(node), 0);
        index.insert(node, Tier::Dram, &keys);
        index.retire_node(node);
    }
    assert_eq!(numbers.len(), 63, "numbers come back, and not too soon");
}

#[test]
fn memory_is_bounded_and_comes_back() {
    let limits = IndexLimits { keys_max: 1_000, ..IndexLimits::default() };
    let mut index = ShadowIndex::new(limits);
    let (a, b) = (index.add_node().expect("room"), index.add_node().expect("room"));
    let keys = chain(1, 1_500);
    assert_eq!(index.insert(a, Tier::Dram, &keys), 500);
    assert_eq!(index.match_prefix(&keys).cached_blocks(a), 1_000);
    let bytes = index.bytes();
    assert_eq!(index.insert(b, Tier::Dram, &keys), 500, "blocks that are known cost nothing more");
    assert_eq!(index.bytes(), bytes);
    assert_eq!(index.entries(), 2_000);
    index.remove(a, &keys);
    index.remove(b, &keys);
    assert_eq!((index.entries(), index.bytes()), (0, 0));
    assert_eq!(index.insert(a, Tier::Dram, &keys[500..]), 0, "there is room again");
}

#[test]
fn an_entry_takes_less_than_28_bytes_at_any_size() {
    let mut index = ShadowIndex::new(IndexLimits::default());
    let node = index.add_node().expect("room");
    for at in 0..300 {
        index.insert(node, Tier::Dram, &chain(1_000_001 + at, 1_000));
        let entries = index.entries();
        assert!(entries < 20_000 || index.bytes() < 28 * entries, "{} of {entries}", index.bytes());
    }
    assert_eq!(index.entries(), 300_000);
}

#[test]
fn nothing_matches_nothing() {
    let mut index = ShadowIndex::new(IndexLimits::default());
    assert_eq!(index.match_prefix(&chain(1, 5)).cached_blocks(NodeIndex(0)), 0);
    let node = index.add_node().expect("room");
    index.insert(node, Tier::Dram, &chain(1, 5));
    assert_eq!(index.match_prefix(&[]).cached_blocks(node), 0);
    assert_eq!(index.match_prefix(&chain(2, 5)).cached_blocks(node), 0);
    assert_eq!(index.match_prefix(&chain(1, 5)).cached_blocks(NodeIndex(999)), 0);
}

#[test]
fn a_sweep_leaves_no_trace_also_of_a_node_that_retires_meanwhile() {
    let mut index = ShadowIndex::new(IndexLimits::default());
    let nodes: Vec<_> = (0..3).map(|_| index.add_node().expect("room")).collect();
    // All on a few places of one table, and elsewhere.
    let (crowded, spread) = (chain(16, 120), chain(1, 500));
    for node in &nodes[..2] {
        index.insert(*node, Tier::Dram, &crowded);
        index.insert(*node, Tier::Dram, &spread);
    }
    index.insert(nodes[2], Tier::Dram, &crowded[..60]);
    index.retire_node(nodes[0]);
    for _ in 0..30 {
        assert!(index.sweep_step());
    }
    index.retire_node(nodes[1]);
    while index.sweep_step() {}
    for _ in 0..2 {
        let node = index.add_node().expect("room");
        assert!(nodes[..2].contains(&node), "numbers come back");
        for key in crowded.iter().chain(&spread) {
            assert_eq!(index.match_prefix(&[*key]).cached_blocks(node), 0);
        }
    }
    assert_eq!(index.match_prefix(&crowded).cached_blocks(nodes[2]), 60);
}

/// Tier of a block, of a few nodes: what the index is told and what it says.
#[derive(Debug, Clone)]
struct Told {
    node: usize,
    chain: u64,
    from: u32,
    until: u32,
    tier: Option<Tier>,
}

fn told() -> impl Strategy<Value = Told> {
    let tier = prop_oneof![
        3 => Just(Some(Tier::Dram)),
        1 => Just(Some(Tier::Vram)),
        2 => Just(Some(Tier::Ssd)),
        2 => Just(None),
    ];
    (0usize..70, 0u64..3, 0u32..40, 0u32..40, tier).prop_map(|(node, chain, a, b, tier)| Told {
        node,
        chain,
        from: a.min(b),
        until: a.max(b),
        tier,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    /// Block by block, where lengths are certain whatever the sets: chains of one key.
    #[test]
    fn tiers_and_digests_are_those_of_the_last_word_on_each_block(
        told in prop::collection::vec(told(), 0..60),
    ) {
        let mut index = ShadowIndex::new(IndexLimits::default());
        let nodes: Vec<_> = (0..70).map(|_| index.add_node().expect("room")).collect();
        let mut naive: BTreeMap<(usize, u64, u32), Tier> = BTreeMap::new();
        for Told { node, chain: of, from, until, tier } in told {
            let keys = &chain(of, 40)[from as usize..until as usize];
            match tier {
                Some(tier) => _ = index.insert(nodes[node], tier, keys),
                None => index.remove(nodes[node], keys),
            }
            for at in from..until {
                match tier {
                    Some(tier) => _ = naive.insert((node, of, at), tier),
                    None => _ = naive.remove(&(node, of, at)),
                }
            }
        }
        for of in 0..3 {
            for at in 0..40 {
                let matched = index.match_prefix(&[key(of, at)]);
                for (number, &node) in nodes.iter().enumerate() {
                    let tier = naive.get(&(number, of, at)).copied();
                    let (memory, vram) = (matched.memory_blocks(node), matched.vram_blocks(node));
                    let want = match tier {
                        None => (0, 0, 0),
                        Some(Tier::Ssd) => (1, 0, 0),
                        Some(Tier::Dram) => (1, 1, 0),
                        Some(Tier::Vram) => (1, 1, 1),
                    };
                    prop_assert_eq!((matched.cached_blocks(node), memory, vram), want, "node {}", node);
                }
            }
        }
        for (number, node) in nodes.iter().enumerate() {
            let [vram, dram, ssd] = [Tier::Vram, Tier::Dram, Tier::Ssd].map(|tier| {
                let held = naive.iter().filter(|((node, ..), its)| *node == number && **its == tier);
                let held: Vec<BlockKey> = held.map(|(&(_, of, at), _)| key(of, at)).collect();
                held.iter().collect::<BlockSetDigest>()
            });
            prop_assert_eq!(index.digests(*node), Some(TierDigests { vram, dram, ssd }));
        }
    }
}

#[test]
fn a_chain_that_sinks_from_its_end_is_priced_by_where_its_tiers_end() {
    let mut index = ShadowIndex::new(IndexLimits::default());
    let nodes: Vec<_> = (0..65).map(|_| index.add_node().expect("room")).collect();
    let keys = chain(1, 100);
    index.insert(nodes[0], Tier::Dram, &keys);
    index.insert(nodes[64], Tier::Vram, &keys[..30]);
    index.insert(nodes[64], Tier::Dram, &keys[30..60]);
    index.insert(nodes[64], Tier::Ssd, &keys[60..90]);
    let matched = index.match_prefix(&keys);
    let lengths = |node| {
        (matched.cached_blocks(node), matched.memory_blocks(node), matched.vram_blocks(node))
    };
    assert_eq!(lengths(nodes[0]), (100, 100, 0));
    assert_eq!(lengths(nodes[64]), (90, 60, 30));
    assert_eq!(lengths(nodes[1]), (0, 0, 0));
}

#[test]
fn a_digest_differs_when_an_event_is_lost_and_not_by_their_order() {
    let mut index = ShadowIndex::new(IndexLimits::default());
    let (a, b) = (index.add_node().expect("room"), index.add_node().expect("room"));
    let keys = chain(1, 20);
    index.insert(a, Tier::Dram, &keys);
    index.insert(b, Tier::Dram, &keys[10..]);
    index.insert(b, Tier::Ssd, &keys[..10]);
    index.insert(b, Tier::Dram, &keys[3..7]);
    assert_ne!(index.digests(a), index.digests(b), "some are in another tier");
    index.insert(b, Tier::Dram, &keys[..10]);
    assert_eq!(index.digests(a), index.digests(b));
    index.remove(b, &keys[19..]);
    assert_ne!(index.digests(a), index.digests(b));
    index.retire_node(a);
    assert_eq!(index.digests(a), Some(TierDigests::default()));
}

#[test]
fn of_a_node_of_which_something_was_left_out_there_is_no_digest() {
    let limits = IndexLimits { keys_max: 10, ..IndexLimits::default() };
    let mut index = ShadowIndex::new(limits);
    let (a, b) = (index.add_node().expect("room"), index.add_node().expect("room"));
    let keys = chain(1, 11);
    assert_eq!(index.insert(a, Tier::Dram, &keys[..10]), 0);
    assert_eq!(index.insert(b, Tier::Ssd, &keys), 1);
    let dram = keys[..10].iter().collect();
    assert_eq!(index.digests(a), Some(TierDigests { dram, ..TierDigests::default() }));
    assert_eq!(index.digests(b), None);
    index.remove(b, &keys);
    assert_eq!(index.digests(b), None, "what else was left out is not known");
    index.retire_node(b);
    let anew = index.add_node().expect("room");
    assert_eq!(index.digests(anew), Some(TierDigests::default()));
}

/// What never changes is always found, whatever is written beside it, and what was never there is
/// never found: places move while tables grow, shrink and close their holes.
#[test]
fn readers_see_what_stays_while_the_writer_works() {
    let mut index = ShadowIndex::new(IndexLimits::default());
    let (stays, changes) = (index.add_node().expect("room"), index.add_node().expect("room"));
    let (chain_that_stays, never) = (chain(1, 200), chain(2, 200));
    index.insert(stays, Tier::Dram, &chain_that_stays);
    let reader = index.reader();
    let done = std::sync::atomic::AtomicBool::new(false);
    let (found, missed) = std::thread::scope(|scope| {
        let done = &done;
        let watcher = scope.spawn(move || {
            let (mut found, mut missed) = (0u64, 0u64);
            while !done.load(std::sync::atomic::Ordering::Relaxed) || found == 0 {
                let matched = reader.match_prefix(&chain_that_stays);
                assert_eq!(matched.cached_blocks(changes), 0);
                match matched.cached_blocks(stays) {
                    200 => found += 1,
                    // It had passed the new place of a key that moved back just then.
                    _ => missed += 1,
                }
                assert_eq!(reader.match_prefix(&never).cached_blocks(stays), 0);
            }
            (found, missed)
        });
        for round in 0..40 {
            let keys = chain(3 + round, 3_000);
            index.insert(changes, Tier::Dram, &keys);
            index.remove(changes, &keys[..2_000]);
            index.remove(changes, &keys[2_000..]);
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        watcher.join().expect("the watcher ends well")
    });
    assert!(missed * 100 <= found, "{missed} of {found} were missed");
}
