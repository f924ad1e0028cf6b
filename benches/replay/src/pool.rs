//! The hit ratio of one cache that all prompts of a trace go through, one after another: what an eviction
//! policy, classes of requests and an SSD are worth, apart from placing and time.

use std::collections::HashMap;
use std::fmt::Write;

use kvasir_blocks::Eviction;
use kvasir_proto::BlockKey;
use serde::Serialize;
use serde_json::{Value, json};

use crate::node::{NodeCache, RequestClass};
use crate::plot;
use crate::trace::Trace;

/// A cache, and what is counted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pool {
    pub block_tokens: u32,
    /// That memory holds.
    pub tokens: u64,
    pub eviction: Eviction,
    /// That the SSD holds; 0 for none.
    pub ssd_tokens: u64,
    /// What clients say of their requests; without it all are normal.
    pub classes: Option<Classes>,
    /// Requests before this part of the trace only fill the cache.
    pub count_from: f64,
}

/// Clients that know what comes again: the requests whose new blocks are used least later are ephemeral, those
/// whose new blocks are used most are context, as many of each as is said.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Classes {
    pub ephemeral_percent: f64,
    pub context_percent: f64,
}

/// What came of one pool.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PoolHits {
    pub eviction_policy: Eviction,
    pub tokens: u64,
    pub ssd_tokens: u64,
    pub has_classes: bool,
    /// Blocks that were found, of all blocks of the prompts that are counted.
    pub block_hit_ratio: f64,
}

/// Sends the prompts of a trace through a pool.
pub fn hit_ratio(trace: &Trace, pool: &Pool) -> PoolHits {
    let blocks_of = |tokens: u64| tokens / u64::from(pool.block_tokens);
    let slots = u32::try_from(blocks_of(pool.tokens)).unwrap_or(u32::MAX - 1).max(1);
    let mut cache = NodeCache::new(slots, pool.block_tokens, pool.eviction);
    if pool.ssd_tokens > 0 {
        cache = cache.with_ssd(blocks_of(pool.ssd_tokens));
    }
    let classes = pool.classes.map(|classes| classes.of(trace));
    let counted_from = (trace.requests.len() as f64 * pool.count_from) as usize;
    let (mut hits, mut blocks) = (0, 0);
    for (at, request) in trace.requests.iter().enumerate() {
        if at >= counted_from {
            hits += cache.held_anywhere(&request.keys);
            blocks += request.keys.len();
        }
        let class = classes.as_ref().map_or(RequestClass::Normal, |classes| classes[at]);
        cache.commit_as(request.arrival_us, &request.keys, class);
    }
    PoolHits {
        eviction_policy: pool.eviction,
        tokens: pool.tokens,
        ssd_tokens: pool.ssd_tokens,
        has_classes: pool.classes.is_some(),
        block_hit_ratio: hits as f64 / blocks.max(1) as f64,
    }
}

impl Classes {
    /// The class of each request.
    fn of(self, trace: &Trace) -> Vec<RequestClass> {
        let mut brought_by: HashMap<BlockKey, usize> = HashMap::new();
        let mut uses = vec![0_u64; trace.requests.len()];
        for (at, request) in trace.requests.iter().enumerate() {
            for key in &request.keys {
                match brought_by.get(key) {
                    Some(&before) => uses[before] += 1,
                    None => _ = brought_by.insert(*key, at),
                }
            }
        }
        let mut order: Vec<usize> = (0..uses.len()).collect();
        order.sort_by_key(|at| (uses[*at], *at));
        let share = |percent: f64| (uses.len() as f64 * percent / 100.0).round() as usize;
        let mut classes = vec![RequestClass::Normal; uses.len()];
        for &at in order.iter().take(share(self.ephemeral_percent)) {
            classes[at] = RequestClass::Ephemeral;
        }
        for &at in order.iter().rev().take(share(self.context_percent)) {
            classes[at] = RequestClass::Context;
        }
        classes
    }
}

/// One row for each kind of pool, one column for each size; in parentheses what a ratio is relative to the
/// first row's.
pub fn table(hits: &[PoolHits]) -> String {
    let mut sizes: Vec<u64> = hits.iter().map(|hits| hits.tokens).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut text = String::from("| cache |");
    sizes.iter().for_each(|tokens| _ = write!(text, " {} M tokens |", *tokens as f64 / 1e6));
    let _ = writeln!(text, "\n| --- |{}", " --- |".repeat(sizes.len()));
    let mut rows: Vec<String> = hits.iter().map(row).collect();
    rows.dedup();
    let of = |name: &str, tokens: u64| {
        let found = hits.iter().find(|hits| row(hits) == name && hits.tokens == tokens);
        found.map(|hits| hits.block_hit_ratio)
    };
    for name in &rows {
        let _ = write!(text, "| {name} |");
        for &tokens in &sizes {
            match (of(name, tokens), of(&rows[0], tokens)) {
                (Some(ratio), Some(base)) if *name != rows[0] => {
                    let _ = write!(text, " {ratio:.4} ({:+.2} %) |", (ratio / base - 1.0) * 100.0);
                }
                (Some(ratio), _) => _ = write!(text, " {ratio:.4} |"),
                (None, _) => text.push_str(" |"),
            }
        }
        text.push('\n');
    }
    text
}

/// A line for each row of [`table`], as SVG.
pub fn plot(hits: &[PoolHits]) -> String {
    let mut lines: Vec<(String, Vec<(f64, f64)>)> = Vec::new();
    for one in hits {
        let (name, point) = (row(one), (one.tokens as f64 / 1e6, one.block_hit_ratio));
        match lines.iter_mut().find(|(line, _)| *line == name) {
            Some((_, points)) => points.push(point),
            None => lines.push((name, vec![point])),
        }
    }
    lines.iter_mut().for_each(|(_, points)| points.sort_by(|a, b| a.0.total_cmp(&b.0)));
    plot::page(&[plot::lines("block hit ratio by millions of tokens in DRAM", &lines)])
}

/// An object with the list `caches`.
pub fn json(hits: &[PoolHits]) -> Value {
    json!({ "caches": hits })
}

fn row(hits: &PoolHits) -> String {
    let mut name = String::from(match hits.eviction_policy {
        Eviction::Lru => "lru",
        Eviction::HitDensity => "hit-density",
    });
    if hits.has_classes {
        name.push_str(", classes");
    }
    if hits.ssd_tokens > 0 {
        let _ = write!(name, ", SSD of {} M", hits.ssd_tokens as f64 / 1e6);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(prompts: &[&str]) -> Trace {
        let line = |(at, ids): (usize, &&str)| {
            let tokens = 512 * ids.split(',').count();
            format!(
                "{{\"timestamp\": {at}, \"input_length\": {tokens}, \"output_length\": 1, \"hash_ids\": [{ids}]}}\n"
            )
        };
        let lines: String = prompts.iter().enumerate().map(line).collect();
        Trace::read(lines.as_bytes(), 512).expect("a trace")
    }

    fn pool(blocks: u64) -> Pool {
        Pool {
            block_tokens: 512,
            tokens: 512 * blocks,
            eviction: Eviction::Lru,
            ssd_tokens: 0,
            classes: None,
            count_from: 0.0,
        }
    }

    #[test]
    fn a_prompt_that_comes_again_hits_where_there_is_room_for_it() {
        let trace = trace(&["1,2", "3,4", "1,2"]);
        let ratio = |pool: Pool| hit_ratio(&trace, &pool).block_hit_ratio;
        assert_eq!(ratio(pool(4)), 2.0 / 6.0);
        assert_eq!(ratio(Pool { count_from: 0.7, ..pool(4) }), 1.0, "only the last one counts");
        assert_eq!(ratio(pool(3)), 1.0 / 6.0, "a tail made room");
        assert_eq!(ratio(pool(2)), 0.0);
    }

    #[test]
    fn what_memory_has_no_room_for_is_found_on_the_ssd() {
        let prompts: Vec<String> =
            (0..20).map(|n| n % 10).map(|n| format!("{},{}", 2 * n, 2 * n + 1)).collect();
        let trace = trace(&prompts.iter().map(String::as_str).collect::<Vec<_>>());
        let ratio = |ssd_blocks: u64| {
            let pool = Pool { ssd_tokens: 512 * ssd_blocks, ..pool(16) };
            hit_ratio(&trace, &pool).block_hit_ratio
        };
        assert_eq!(ratio(0), 0.0);
        assert_eq!(ratio(20), 0.5);
    }

    #[test]
    fn clients_that_know_keep_what_comes_again() {
        let prompts = ["1,2", "3,4", "5,6", "7,8", "1,2", "9,10", "1,2"];
        let classes = Classes { ephemeral_percent: 60.0, context_percent: 10.0 };
        let of = classes.of(&trace(&prompts));
        assert_eq!(of[0], RequestClass::Context);
        let ephemeral = of.iter().filter(|class| **class == RequestClass::Ephemeral).count();
        assert_eq!(ephemeral, 4);
        let ratio = |classes| {
            hit_ratio(&trace(&prompts), &Pool { classes, ssd_tokens: 0, ..pool(4) }).block_hit_ratio
        };
        assert_eq!(ratio(None), 2.0 / 14.0);
        assert_eq!(ratio(Some(classes)), 4.0 / 14.0);
    }
}
