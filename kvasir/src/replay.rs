//! `kvasir replay`: reads a trace and a cluster file, replays the one over the other, and prints
//! what came of it. All of the work is in `kvasir_replay`.

use std::error::Error;
use std::path::{Path, PathBuf};

use kvasir_blocks::Eviction;
use kvasir_placement::{Admission, Difference, Objectives, RecordedDecision, Selection};
use kvasir_replay::cluster::Cluster;
use kvasir_replay::coupled::Chunks;
use kvasir_replay::pool::{Classes, Pool};
use kvasir_replay::roles::BalanceFile;
use kvasir_replay::sim::{Options, replay};
use kvasir_replay::trace::Trace;
use kvasir_replay::{coupled, pool, report};
use serde_json::Value;

use crate::output;

/// Flags of `kvasir replay`.
#[derive(Debug, clap::Args)]
pub(crate) struct Flags {
    /// The trace: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` and
    /// `hash_ids`; read as zstd when its name ends in `.zst`.
    #[arg(long, value_name = "FILE", required_unless_present = "decision")]
    trace: Option<PathBuf>,

    /// The cluster: see `configs/clusters/`.
    #[arg(long, value_name = "FILE", required_unless_present = "decision")]
    cluster: Option<PathBuf>,

    /// Takes the decisions in this file again, as a conductor's `/decisions/REQUEST_ID/inputs` answers them,
    /// and compares them field by field; ends with 1 when something is different.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["trace", "cluster"])]
    decision: Option<PathBuf>,

    /// One policy or several: random, least-loaded, longest-match, local, global, kvasir; `all` for
    /// each of them. `kvasir` when it is absent.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    policy: Vec<String>,

    /// Refuses requests whose first token is predicted to come later, and counts those whose does.
    #[arg(long, value_name = "MS")]
    ttft_objective_ms: Option<u64>,

    /// The same for the time between tokens: of a request the mean of its longest tenth of intervals.
    #[arg(long, value_name = "MS")]
    tbt_objective_ms: Option<u64>,

    /// By what load of the decode side requests are refused, one or several: late (what decodes when
    /// their prefill has ended), early (what decodes when they come), predicted (what will decode when
    /// their prefill ends), calibrated (how likely they meet their objective); `all` for each of them.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "calibrated")]
    admission: Vec<String>,

    /// Replays over the same nodes without disaggregation: each prefills and decodes, chooses by the policy
    /// `local` unless `--policy` says otherwise, and computes whole prompts (`whole`) or so many tokens in
    /// each step beside decoding; one or several.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    coupled: Vec<String>,

    /// Prints one JSON object and nothing else. Of several policies it has an object `policies`.
    #[arg(long)]
    json: bool,

    /// Writes what was measured as an SVG: with the same names as in the table, one panel for each measure.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,

    /// Arrivals so many times as fast.
    #[arg(long, value_name = "TIMES", default_value_t = 1.0)]
    speed: f64,

    /// Replays only a part of the trace, as in `0.5..1` for its second half. Caches begin empty.
    #[arg(long, value_name = "FROM..UNTIL")]
    part: Option<String>,

    /// Replays the requests in another order at the same arrival times.
    #[arg(long, value_name = "SEED")]
    shuffle: Option<u64>,

    /// Nodes that prefill, in place of the cluster file's.
    #[arg(long, value_name = "NODES")]
    prefill_nodes: Option<u16>,

    /// Nodes that decode, in place of the cluster file's.
    #[arg(long, value_name = "NODES")]
    decode_nodes: Option<u16>,

    /// Lets nodes change between prefill and decode as a conductor with `balance.mode = "act"` does, by the
    /// cluster file's `[balance]` or, without it, by a conductor's defaults.
    #[arg(long, conflicts_with = "coupled")]
    balance: bool,

    /// Each node's network, in place of the cluster file's; 87 GB/s are 696 Gb/s.
    #[arg(long, value_name = "GBPS")]
    network_gbps: Option<f64>,

    /// Sends all prompts through one cache of so many tokens, or of each of several sizes, and prints its
    /// hit ratio by blocks. Of the cluster only `block_tokens` matters then, and nothing takes time.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    pool_tokens: Vec<u64>,

    /// Which block makes room, in place of the cluster file's; of a pool several: lru, hit-density.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    eviction: Vec<String>,

    /// Adds rows of pools that have an SSD of so many tokens, too.
    #[arg(long, value_name = "TOKENS")]
    pool_ssd_tokens: Option<u64>,

    /// Adds rows of pools whose clients know what comes again: so many percent of the requests, those whose blocks
    /// are used least later, are ephemeral, and so many, whose blocks are used most, context.
    #[arg(long, value_name = "EPHEMERAL,CONTEXT", value_delimiter = ',', num_args = 2)]
    pool_classes: Vec<f64>,

    /// Requests of a pool before this part of the trace only fill it.
    #[arg(long, value_name = "PART", default_value_t = 0.0)]
    count_from: f64,

    /// Of what is random in a policy.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
}

pub(crate) fn run(flags: &Flags) -> Result<(), Box<dyn Error>> {
    if let Some(path) = &flags.decision {
        return run_decisions(path);
    }
    let cluster = cluster(flags)?;
    let trace = trace(flags, &cluster)?;
    if !flags.pool_tokens.is_empty() {
        return run_pools(flags, &cluster, &trace);
    }
    let default = if flags.coupled.is_empty() { Selection::Kvasir } else { Selection::Local };
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
    let coupled = coupled_chunks(&flags.coupled)?;
    for selection in selections {
        for &chunks in &coupled {
            let options = Options { seed: flags.seed, objectives, ..Options::new(selection) };
            summaries.push(coupled::replay(&trace, &cluster, chunks, options)?);
        }
        for &admission in admissions.iter().filter(|_| coupled.is_empty()) {
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
        _ => return Err(format!("{}: there is no list `decisions` in it", path.display()).into()),
    };
    let mut differing = 0;
    for (at, decision) in (1..).zip(decisions) {
        let recorded = RecordedDecision::read(decision)
            .map_err(|error| format!("decision {at}: {}", named(&error)))?;
        let differences = recorded.replay();
        output::say(&recorded.explain());
        let fields = recorded.fields();
        if differences.is_empty() {
            output::say(&format!("decision {at}: all {fields} fields as recorded"));
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
        _ => Err(format!("{differing} of the decisions came out differently").into()),
    }
}

fn run_pools(flags: &Flags, cluster: &Cluster, trace: &Trace) -> Result<(), Box<dyn Error>> {
    if !(0.0..1.0).contains(&flags.count_from) {
        return Err("--count-from must be at least 0 and less than 1".into());
    }
    let mut evictions = evictions(&flags.eviction)?;
    if evictions.is_empty() {
        evictions = vec![Eviction::Lru, Eviction::HitDensity];
    }
    let classes = match flags.pool_classes[..] {
        [ephemeral_percent, context_percent]
            if ephemeral_percent >= 0.0
                && context_percent >= 0.0
                && ephemeral_percent + context_percent <= 100.0 =>
        {
            Some(Classes { ephemeral_percent, context_percent })
        }
        [] => None,
        _ => return Err("--pool-classes are two parts of a hundred, as in 62,8".into()),
    };
    let mut kinds = vec![(None, 0)];
    kinds.extend(classes.map(|classes| (Some(classes), 0)));
    kinds.extend(flags.pool_ssd_tokens.map(|ssd_tokens| (None, ssd_tokens)));
    kinds.extend(classes.and_then(|classes| Some((Some(classes), flags.pool_ssd_tokens?))));
    let mut hits = Vec::new();
    for eviction in evictions {
        for &(classes, ssd_tokens) in &kinds {
            for &tokens in &flags.pool_tokens {
                let pool = Pool {
                    block_tokens: cluster.block_tokens,
                    tokens,
                    eviction,
                    ssd_tokens,
                    classes,
                    count_from: flags.count_from,
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
        _ => Err(format!("--eviction {name}: there are lru and hit-density").into()),
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
            format!("--admission {name}: there are {all}").into()
        })
    };
    names.iter().map(named).collect()
}

fn coupled_chunks(names: &[String]) -> Result<Vec<Chunks>, Box<dyn Error>> {
    let named = |name: &String| match (name.as_str(), name.parse()) {
        ("whole", _) => Ok(Chunks::Whole),
        (_, Ok(tokens)) if tokens > 0 => Ok(Chunks::Tokens(tokens)),
        _ => Err(format!("--coupled {name}: it is `whole` or a number of tokens").into()),
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
    match evictions(&flags.eviction)?[..] {
        [] => {}
        [eviction] => cluster.eviction = eviction,
        _ if flags.pool_tokens.is_empty() => {
            return Err("several --eviction are compared with --pool-tokens only".into());
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
        return Err("--speed must be more than zero".into());
    }
    let mut trace = Trace::open(given(&flags.trace, "--trace")?, cluster.block_tokens)?;
    if let Some(part) = &flags.part {
        let (from, until) = bounds(part)
            .ok_or_else(|| format!("--part {part:?} must read as in 0.5..1, within 0 and 1"))?;
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
        assert_eq!(read(&["local", "kvasir"]).ok(), Some(2));
        assert_eq!(read(&["all"]).ok(), Some(6));
        assert!(read(&["best"]).is_err());
        let read = |name: &str| admissions(&[name.to_owned()]).map(|read| read.len());
        assert_eq!((read("late").ok(), read("all").ok()), (Some(1), Some(4)));
        assert!(read("never").is_err());
        let read = |name: &str| coupled_chunks(&[name.to_owned()]).ok();
        assert_eq!(read("512"), Some(vec![Chunks::Tokens(512)]));
        assert_eq!(read("whole"), Some(vec![Chunks::Whole]));
        assert_eq!((read("0"), read("half")), (None, None));
    }
}
