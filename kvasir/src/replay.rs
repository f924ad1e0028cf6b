//! `kvasir replay`: reads a trace and a cluster file, replays the one over the other, and prints
//! what came of it. All of the work is in `kvasir_replay`.

use std::error::Error;
use std::path::{Path, PathBuf};

use kvasir_blocks::Eviction;
use kvasir_placement::{Admission, Difference, Objectives, RecordedDecision, Selection};
use kvasir_replay::cluster::Cluster;
use kvasir_replay::colocated::Chunks;
use kvasir_replay::pool::{Classes, Pool};
use kvasir_replay::roles::BalanceFile;
use kvasir_replay::sim::{Options, replay};
use kvasir_replay::trace::Trace;
use kvasir_replay::{colocated, pool, report};
use serde_json::Value;

use crate::output;

/// Flags of `kvasir replay`.
#[derive(Debug, clap::Args)]
pub(crate) struct Flags {
    /// The trace: one JSON object per line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`. A
    /// name that ends in `.zst` is read as zstd.
    #[arg(long, value_name = "FILE", required_unless_present = "decision")]
    trace: Option<PathBuf>,

    /// The cluster file; see `configs/clusters/`.
    #[arg(long, value_name = "FILE", required_unless_present = "decision")]
    cluster: Option<PathBuf>,

    /// Repeat the decisions in this file, which a conductor answers at `/decisions/REQUEST_ID/inputs`, and compare
    /// them field by field. The exit status is 1 if a field differs.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["trace", "cluster"])]
    decision: Option<PathBuf>,

    /// Policies: random, least-loaded, longest-prefix, cache-aware, kvcache-centric, least-cost, or `all`. One or
    /// several. The default is least-cost.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    policy: Vec<String>,

    /// Refuse requests whose predicted time to first token is longer, and count those whose measured one is.
    #[arg(long, value_name = "MS")]
    ttft_objective_ms: Option<u64>,

    /// The same for the time between tokens: the mean of the longest tenth of a request's intervals.
    #[arg(long, value_name = "MS")]
    tbt_objective_ms: Option<u64>,

    /// The decode load that admission control uses: late (the load when the prefill has ended), early (the load at
    /// arrival), predicted (the predicted load at the end of the prefill), calibrated (the probability that
    /// requests meet their objective), or `all`. One or several.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "calibrated")]
    admission: Vec<String>,

    /// Simulate the same nodes without disaggregation: each node prefills and decodes, with the policy cache-aware
    /// unless `--policy` is set. `whole` computes whole prompts; a number computes this many tokens in each step
    /// beside decoding. One or several.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    colocated: Vec<String>,

    /// Print only one JSON object. With several policies it contains the object `policies`.
    #[arg(long)]
    json: bool,

    /// Write the results to an SVG file, one panel for each measure.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,

    /// Factor by which arrivals are faster.
    #[arg(long, value_name = "TIMES", default_value_t = 1.0)]
    speed: f64,

    /// Replay only a part of the trace, as in `0.5..1` for the second half. The caches are empty at its start.
    #[arg(long, value_name = "FROM..UNTIL")]
    part: Option<String>,

    /// Replay the requests in another order at the same arrival times.
    #[arg(long, value_name = "SEED")]
    shuffle: Option<u64>,

    /// Number of prefill nodes, in place of the cluster file's.
    #[arg(long, value_name = "NODES")]
    prefill_nodes: Option<u16>,

    /// Number of decode nodes, in place of the cluster file's.
    #[arg(long, value_name = "NODES")]
    decode_nodes: Option<u16>,

    /// Nodes change between prefill and decode as with a conductor's `balance.mode = "auto"`. The cluster file's
    /// `[balance]` sets the parameters; without it the defaults apply.
    #[arg(long, conflicts_with = "colocated")]
    balance: bool,

    /// Bandwidth of each node's network in Gb/s, in place of the cluster file's. 696 Gb/s are 87 GB/s.
    #[arg(long, value_name = "GBPS")]
    network_gbps: Option<f64>,

    /// Send all prompts through one cache of this many tokens, or through caches of several sizes, and print the
    /// hit ratio by blocks. Only `block_tokens` of the cluster file matters, and no time passes.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    cache_tokens: Vec<u64>,

    /// Eviction policy, in place of the cluster file's: lru or hit-density. With `--cache-tokens` several are
    /// allowed.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    eviction_policy: Vec<String>,

    /// With `--cache-tokens`: add results of caches with an SSD of this many tokens.
    #[arg(long, value_name = "TOKENS")]
    cache_ssd_tokens: Option<u64>,

    /// With `--cache-tokens`: add results of caches whose clients know the reuse in advance. The first number is
    /// the percentage of requests with the least reuse, which are ephemeral; the second is the percentage with the
    /// most reuse, which are contexts.
    #[arg(long, value_name = "EPHEMERAL,CONTEXT", value_delimiter = ',', num_args = 2)]
    cache_classes: Vec<f64>,

    /// With `--cache-tokens`: fraction of the trace that only fills the cache.
    #[arg(long, value_name = "FRACTION", default_value_t = 0.0)]
    warm_up: f64,

    /// Seed of random policies.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
}

pub(crate) fn run(flags: &Flags) -> Result<(), Box<dyn Error>> {
    if let Some(path) = &flags.decision {
        return run_decisions(path);
    }
    let cluster = cluster(flags)?;
    let trace = trace(flags, &cluster)?;
    if !flags.cache_tokens.is_empty() {
        return run_pools(flags, &cluster, &trace);
    }
    let default =
        if flags.colocated.is_empty() { Selection::LeastCost } else { Selection::CacheAware };
    let selections = match selections(&flags.policy)? {
        named if named.is_empty() => vec![default],
        named => named,
    };
    let objective_us = |ms: Option<u64>| ms.map_or(u64::MAX, |ms| ms.saturating_mul(1_000));
    let objectives = Objectives {
        ttft_us: objective_us(flags.ttft_objective_ms),
        tbt_us: objective_us(flags.tbt_objective_ms),
    };
    let admissions = admissions(&flags.admission)?;
    let mut summaries = Vec::new();
    let colocated = colocated_chunks(&flags.colocated)?;
    for selection in selections {
        for &chunks in &colocated {
            let options = Options { seed: flags.seed, objectives, ..Options::new(selection) };
            summaries.push(colocated::replay(&trace, &cluster, chunks, options)?);
        }
        for &admission in admissions.iter().filter(|_| colocated.is_empty()) {
            let options =
                Options { seed: flags.seed, objectives, admission, ..Options::new(selection) };
            summaries.push(replay(&trace, &cluster, options)?);
        }
    }
    if let Some(path) = &flags.plot {
        std::fs::write(path, report::plot(&summaries))?;
    }
    match flags.json {
        true => output::say(&report::json(&summaries).to_string()),
        false => {
            output::say(report::table(&summaries).trim_end());
            let effects = report::effects(&summaries);
            if !effects.is_empty() {
                output::say(&format!("\n{}", effects.trim_end()));
            }
            let roles = report::roles(&summaries);
            if !roles.is_empty() {
                output::say(&format!("\n{}", roles.trim_end()));
            }
        }
    }
    Ok(())
}

fn run_decisions(path: &Path) -> Result<(), Box<dyn Error>> {
    let named = |why: &dyn Error| format!("{}: {}", path.display(), output::sentence(why));
    let text = std::fs::read_to_string(path).map_err(|error| named(&error))?;
    let mut file: Value = serde_json::from_str(&text).map_err(|error| named(&error))?;
    let decisions = match file["decisions"].take() {
        Value::Array(decisions) if !decisions.is_empty() => decisions,
        _ => {
            return Err(
                format!("{}: the list `decisions` is missing or empty", path.display()).into()
            );
        }
    };
    let mut differing = 0;
    for (at, decision) in (1..).zip(decisions) {
        let recorded = RecordedDecision::read(decision)
            .map_err(|error| format!("decision {at}: {}", named(&error)))?;
        let differences = recorded.replay();
        output::say(&recorded.explain());
        let fields = recorded.fields();
        if differences.is_empty() {
            output::say(&format!("decision {at}: all {fields} fields equal the recorded ones"));
        } else {
            differing += 1;
        }
        for Difference { field, recorded, replayed } in differences {
            let [recorded, replayed] =
                [recorded, replayed].map(|value| value.unwrap_or_else(|| "nothing".to_owned()));
            output::say(&format!(
                "decision {at}: {field}: recorded {recorded}, replayed {replayed}"
            ));
        }
    }
    match differing {
        0 => Ok(()),
        _ => Err(format!("{differing} of the decisions differ from the recorded ones").into()),
    }
}

fn run_pools(flags: &Flags, cluster: &Cluster, trace: &Trace) -> Result<(), Box<dyn Error>> {
    if !(0.0..1.0).contains(&flags.warm_up) {
        return Err("--warm-up must be at least 0 and less than 1".into());
    }
    let mut evictions = evictions(&flags.eviction_policy)?;
    if evictions.is_empty() {
        evictions = vec![Eviction::Lru, Eviction::HitDensity];
    }
    let classes = match flags.cache_classes[..] {
        [ephemeral_percent, context_percent]
            if ephemeral_percent >= 0.0
                && context_percent >= 0.0
                && ephemeral_percent + context_percent <= 100.0 =>
        {
            Some(Classes { ephemeral_percent, context_percent })
        }
        [] => None,
        _ => {
            return Err(
                "--cache-classes takes two percentages with a sum of at most 100, as in 62,8"
                    .into(),
            );
        }
    };
    let mut kinds = vec![(None, 0)];
    kinds.extend(classes.map(|classes| (Some(classes), 0)));
    kinds.extend(flags.cache_ssd_tokens.map(|ssd_tokens| (None, ssd_tokens)));
    kinds.extend(classes.and_then(|classes| Some((Some(classes), flags.cache_ssd_tokens?))));
    let mut hits = Vec::new();
    for eviction in evictions {
        for &(classes, ssd_tokens) in &kinds {
            for &tokens in &flags.cache_tokens {
                let pool = Pool {
                    block_tokens: cluster.block_tokens,
                    tokens,
                    eviction,
                    ssd_tokens,
                    classes,
                    count_from: flags.warm_up,
                };
                hits.push(pool::hit_ratio(trace, &pool));
            }
        }
    }
    if let Some(path) = &flags.plot {
        std::fs::write(path, pool::plot(&hits))?;
    }
    match flags.json {
        true => output::say(&pool::json(&hits).to_string()),
        false => output::say(pool::table(&hits).trim_end()),
    }
    Ok(())
}

/// The line is checked for it before.
fn given<'a>(path: &'a Option<PathBuf>, flag: &str) -> Result<&'a Path, String> {
    path.as_deref().ok_or_else(|| format!("{flag} is missing"))
}

fn evictions(names: &[String]) -> Result<Vec<Eviction>, Box<dyn Error>> {
    let named = |name: &String| match name.as_str() {
        "lru" => Ok(Eviction::Lru),
        "hit-density" => Ok(Eviction::HitDensity),
        _ => Err(format!("--eviction-policy {name}: use lru or hit-density").into()),
    };
    names.iter().map(named).collect()
}

fn selections(names: &[String]) -> Result<Vec<Selection>, Box<dyn Error>> {
    if names.iter().any(|name| name == "all") {
        return Ok(Selection::ALL.to_vec());
    }
    Ok(names.iter().map(|name| name.parse()).collect::<Result<_, _>>()?)
}

fn admissions(names: &[String]) -> Result<Vec<Admission>, Box<dyn Error>> {
    if names.iter().any(|name| name == "all") {
        return Ok(Admission::ALL.to_vec());
    }
    let named = |name: &String| {
        let found = Admission::ALL.into_iter().find(|admission| admission.name() == name);
        found.ok_or_else(|| {
            let all = Admission::ALL.map(Admission::name).join(", ");
            format!("--admission {name}: use one of {all}").into()
        })
    };
    names.iter().map(named).collect()
}

fn colocated_chunks(names: &[String]) -> Result<Vec<Chunks>, Box<dyn Error>> {
    let named = |name: &String| match (name.as_str(), name.parse()) {
        ("whole", _) => Ok(Chunks::Whole),
        (_, Ok(tokens)) if tokens > 0 => Ok(Chunks::Tokens(tokens)),
        _ => Err(format!("--colocated {name}: use `whole` or a number of tokens").into()),
    };
    names.iter().map(named).collect()
}

fn cluster(flags: &Flags) -> Result<Cluster, Box<dyn Error>> {
    let mut cluster = Cluster::open(given(&flags.cluster, "--cluster")?)?;
    cluster.prefill_nodes = flags.prefill_nodes.unwrap_or(cluster.prefill_nodes);
    cluster.decode_nodes = flags.decode_nodes.unwrap_or(cluster.decode_nodes);
    if flags.balance && cluster.balance.is_none() {
        cluster.balance = Some(BalanceFile::default());
    }
    match evictions(&flags.eviction_policy)?[..] {
        [] => {}
        [eviction] => cluster.eviction_policy = eviction,
        _ if flags.cache_tokens.is_empty() => {
            return Err("several values of --eviction-policy need --cache-tokens".into());
        }
        _ => {}
    }
    if let Some(gbps) = flags.network_gbps {
        cluster.network.bytes_per_s = gbps * 1e9 / 8.0;
    }
    cluster.check()?;
    Ok(cluster)
}

fn trace(flags: &Flags, cluster: &Cluster) -> Result<Trace, Box<dyn Error>> {
    if !flags.speed.is_finite() || flags.speed <= 0.0 {
        return Err("--speed must be above 0".into());
    }
    let mut trace = Trace::open(given(&flags.trace, "--trace")?, cluster.block_tokens)?;
    if let Some(part) = &flags.part {
        let (from, until) = bounds(part).ok_or_else(|| {
            format!("--part {part:?} is invalid: use a range within 0..1, as in 0.5..1")
        })?;
        trace = trace.part(from, until);
    }
    if let Some(seed) = flags.shuffle {
        trace = trace.shuffled(seed);
    }
    Ok(trace.sped_up(flags.speed))
}

fn bounds(part: &str) -> Option<(f64, f64)> {
    let (from, until) = part.split_once("..")?;
    let (from, until) = (from.parse::<f64>().ok()?, until.parse::<f64>().ok()?);
    (0.0 <= from && from < until && until <= 1.0).then_some((from, until))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_and_policies_are_read_or_refused() {
        assert_eq!(bounds("0.5..1"), Some((0.5, 1.0)));
        for wrong in ["", "0.5", "1..0.5", "0..2", "a..b", "-1..1"] {
            assert_eq!(bounds(wrong), None, "{wrong}");
        }
        let read = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            selections(&names).map(|selections| selections.len())
        };
        assert_eq!(read(&["cache-aware", "least-cost"]).ok(), Some(2));
        assert_eq!(read(&["all"]).ok(), Some(6));
        assert!(read(&["best"]).is_err());
        let read = |name: &str| admissions(&[name.to_owned()]).map(|read| read.len());
        assert_eq!((read("late").ok(), read("all").ok()), (Some(1), Some(4)));
        assert!(read("never").is_err());
        let read = |name: &str| colocated_chunks(&[name.to_owned()]).ok();
        assert_eq!(read("512"), Some(vec![Chunks::Tokens(512)]));
        assert_eq!(read("whole"), Some(vec![Chunks::Whole]));
        assert_eq!((read("0"), read("half")), (None, None));
    }
}
