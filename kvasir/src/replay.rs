//! `kvasir replay`: reads a trace and a cluster file, replays the one over the other, and prints
//! what came of it. All of the work is in `kvasir_replay`.

use std::error::Error;
use std::path::PathBuf;

use kvasir_placement::Selection;
use kvasir_replay::{Cluster, Options, Trace, replay, report};

use crate::output;

/// Flags of `kvasir replay`.
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// The trace: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` and
    /// `hash_ids`; read as zstd when its name ends in `.zst`.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,

    /// The cluster: see `configs/clusters/`.
    #[arg(long, value_name = "FILE")]
    cluster: PathBuf,

    /// One policy or several: random, least-loaded, longest-match, local, global, kvasir; `all` for
    /// each of them.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "kvasir")]
    policy: Vec<String>,

    /// Prints one JSON object and nothing else. Of several policies it has an object `policies`.
    #[arg(long)]
    json: bool,

    /// Writes the distribution of the time to first token as an SVG.
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

    /// Each node's network, in place of the cluster file's; 87 GB/s are 696 Gb/s.
    #[arg(long, value_name = "GBPS")]
    network_gbps: Option<f64>,

    /// Of what is random in a policy.
    #[arg(long, value_name = "SEED", default_value_t = 1)]
    seed: u64,
}

pub fn run(flags: &Flags) -> Result<(), Box<dyn Error>> {
    let selections = selections(&flags.policy)?;
    let cluster = cluster(flags)?;
    let trace = trace(flags, &cluster)?;
    let mut summaries = Vec::new();
    for selection in selections {
        let options = Options { seed: flags.seed, ..Options::new(selection) };
        summaries.push(replay(&trace, &cluster, options)?);
    }
    if let Some(path) = &flags.plot {
        std::fs::write(path, report::ttft_plot(&summaries))?;
    }
    match flags.json {
        true => output::say(&report::json(&summaries).to_string()),
        false => output::say(report::table(&summaries).trim_end()),
    }
    Ok(())
}

fn selections(names: &[String]) -> Result<Vec<Selection>, Box<dyn Error>> {
    if names.iter().any(|name| name == "all") {
        return Ok(Selection::ALL.to_vec());
    }
    Ok(names.iter().map(|name| name.parse()).collect::<Result<_, _>>()?)
}

fn cluster(flags: &Flags) -> Result<Cluster, Box<dyn Error>> {
    let mut cluster = Cluster::open(&flags.cluster)?;
    cluster.prefill_nodes = flags.prefill_nodes.unwrap_or(cluster.prefill_nodes);
    cluster.decode_nodes = flags.decode_nodes.unwrap_or(cluster.decode_nodes);
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
    let mut trace = Trace::open(&flags.trace, cluster.block_tokens)?;
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
    }
}
