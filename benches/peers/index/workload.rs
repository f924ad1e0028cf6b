//! The chains: the first 30 % of each is one of 64 shared prefixes, the rest its own; four of five
//! are on one node, most others on two, a few on four. Queries: half are whole chains, four in ten
//! leave a chain on the way, one in ten is unknown.

use std::collections::HashSet;

pub struct Workload {
    pub nodes: u64,
    pub chains: Vec<Vec<u64>>,
    /// (node, chain, first block, end): what each node tells of, in order, 32 blocks at a time.
    pub events: Vec<(u64, usize, usize, usize)>,
    pub entries: usize,
    pub queries: Vec<Vec<u64>>,
    /// Chains of one event each, which nobody asks for: they come and go while others are looked up.
    pub passing: Vec<Vec<u64>>,
}

pub struct Numbers(u64);

impl Numbers {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

const PREFIXES: u64 = 64;
const EVENT_BLOCKS: usize = 32;
const PASSING: usize = 8_192;

impl Workload {
    pub fn new(nodes: u64, entries_min: usize, blocks: usize) -> Workload {
        let mut numbers = Numbers(42);
        let shared = blocks * 3 / 10;
        let own = |numbers: &mut Numbers, count| -> Vec<u64> {
            std::iter::repeat_with(|| numbers.next()).take(count).collect()
        };
        let prefixes: Vec<_> = (0..PREFIXES).map(|_| own(&mut numbers, shared)).collect();
        let mut held = HashSet::new();
        let (mut chains, mut events, mut entries) = (Vec::new(), Vec::new(), 0);
        while entries < entries_min {
            let prefix = numbers.below(PREFIXES) * numbers.below(PREFIXES) / PREFIXES;
            let mut chain = prefixes[prefix as usize].clone();
            chain.extend(own(&mut numbers, blocks - shared));
            let copies = match numbers.below(100) {
                0..=79 => 1,
                80..=94 => 2,
                _ => 4,
            };
            let first = numbers.below(nodes);
            for copy in 0..copies.min(nodes) {
                let node = (first + copy * 7 % nodes) % nodes;
                let from = if held.insert((node, prefix)) { 0 } else { shared };
                for at in (from..blocks).step_by(EVENT_BLOCKS) {
                    let end = (at + EVENT_BLOCKS).min(blocks);
                    events.push((node, chains.len(), at, end));
                    entries += end - at;
                }
            }
            chains.push(chain);
        }
        let count = if blocks > 500 { 4_000 } else { 20_000 };
        let queries = (0..count).map(|_| {
            let chain = &chains[numbers.below(chains.len() as u64) as usize];
            let kept = match numbers.below(10) {
                0..=4 => blocks,
                5..=8 => shared + numbers.below((blocks - shared) as u64 / 2 + 1) as usize,
                _ => 0,
            };
            let mut query = chain[..kept].to_vec();
            query.extend(own(&mut numbers, blocks - kept));
            query
        });
        let queries = queries.collect();
        let passing = (0..PASSING).map(|_| own(&mut numbers, EVENT_BLOCKS)).collect();
        Workload { nodes, chains, events, entries, queries, passing }
    }
}
