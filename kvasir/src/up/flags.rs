//! The flags of `up`, and what a combination of them means: how many engines of which role.

use std::path::PathBuf;

use kvasir_engine_reference::Precision;
use kvasir_engine_reference::model::KvDtype;

/// Memory is taken in whole pages of the host.
pub(crate) const HOST_PAGE_BYTES: u64 = 4096;
/// As many segments as a log needs, each with room for a few blocks of a small model.
const SSD_BYTES_MIN: u64 = 64 << 20;
/// Ten samples.
const BALANCE_WINDOW_MS_MIN: u64 = 100;
/// Every engine is a process with threads of its own; more on one machine is a mistake.
const ENGINES_MAX: u32 = 64;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Flags {
    /// Number of engines that compute prompts. The default is 1.
    #[arg(long, value_name = "N", conflicts_with = "both")]
    pub prefill: Option<u32>,

    /// Number of engines that generate tokens. The default is 1.
    #[arg(long, value_name = "M", conflicts_with = "both")]
    pub decode: Option<u32>,

    /// Number of engines that do both, instead of separate prefill and decode engines.
    #[arg(long, value_name = "N")]
    pub both: Option<u32>,

    /// Number of engines that share one store node and its cache. Prefill and decode engines alternate. The last
    /// node may have fewer.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub engines_per_node: u32,

    /// Directory of a DeepSeek-V2 model in Hugging Face format. The default is the bundled model, which has random
    /// weights.
    #[arg(long, value_name = "DIR")]
    pub model_dir: Option<PathBuf>,

    /// The model's name in requests. The default is the name of its directory.
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,

    /// Port of the HTTP API on 127.0.0.1. All other ports are free ones.
    #[arg(long, value_name = "P", default_value_t = 8000)]
    pub port: u16,

    /// DRAM for the cache of each store node, in bytes or as in 512MiB or 1GiB.
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = parse_bytes)]
    pub dram_bytes: u64,

    /// Disk space for demoted blocks and contexts of each store node. The default is no SSD tier.
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub ssd_bytes: Option<u64>,

    /// Directory of the SSD tier on a local disk, with a subdirectory for each node. The default is the run directory.
    #[arg(long, value_name = "DIR", requires = "ssd_bytes")]
    pub ssd_dir: Option<PathBuf>,

    /// Prompt tokens that an engine computes in one step.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub prefill_chunk_tokens: u32,

    /// Number format of the cache.
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = ["f32", "bf16"])]
    pub kv_dtype: String,

    /// Precision to which attention may round its products. "bf16" needs `--kv-dtype bf16`.
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = ["f32", "bf16"])]
    pub attention_precision: String,

    /// Transport between store nodes: shared memory; TCP, as between hosts; the first RDMA device of this host; or
    /// EFA.
    #[arg(long, value_name = "TRANSPORT", default_value = "shm", value_parser = ["shm", "tcp", "verbs", "efa"])]
    pub transport: String,

    /// libfabric's provider for `--transport efa`. "tcp" and "shm" need no device and are for development.
    #[arg(long, value_name = "PROVIDER", default_value = "efa", value_parser = ["efa", "tcp", "shm"])]
    pub efa_provider: String,

    /// Compute threads of each engine. By default the engines share the cores evenly.
    #[arg(long, value_name = "N")]
    pub threads: Option<u32>,

    /// Directory of configurations, logs and state.json. The default is a temporary directory that is removed at
    /// the end; a given directory is kept.
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,

    /// Timeout of a request.
    #[arg(long, value_name = "MS", default_value_t = 600_000)]
    pub request_timeout_ms: u64,

    /// A request is refused if its predicted time to first token is longer.
    #[arg(long, value_name = "MS", default_value_t = 30_000)]
    pub ttft_objective_ms: u64,

    /// A request is refused if its predicted time between tokens is longer.
    #[arg(long, value_name = "MS", default_value_t = 1_000)]
    pub tbt_objective_ms: u64,

    /// Time for which a node keeps the slots and pins of a request without a renewal.
    #[arg(long, value_name = "MS", default_value_t = 5_000)]
    pub lease_ms: u64,

    /// With `--both`: route queries to a prefix on another node if that is predicted to be cheaper than fetching or
    /// recomputing it.
    #[arg(long, requires = "both")]
    pub routes: bool,

    /// The balancer of prefill and decode engines: off; recommend the numbers in a metric; or, with `--both`, also
    /// change the roles of engines.
    #[arg(long, value_name = "MODE", default_value = "recommend", value_parser = ["off", "recommend", "auto"])]
    pub balance: String,

    /// For experiments: time over which the balancer averages loads. Engines keep a role for twice as long.
    #[arg(long, hide = true, value_name = "MS")]
    pub balance_window_ms: Option<u64>,

    /// For experiments: headers of a request may select its engine and the source of its prefix.
    #[arg(long)]
    pub steering: bool,

    /// With `--both`: requests may mark parts of their prompts whose cached blocks are reused at any position. This
    /// changes the answers.
    #[arg(long, requires = "both")]
    pub chunk_reuse: bool,

    /// For experiments: always route queries to a prefix on another node, at any cost.
    #[arg(long, hide = true, requires = "routes")]
    pub always_route: bool,

    /// For experiments: nodes replicate no hot blocks.
    #[arg(long, hide = true)]
    pub no_replication: bool,

    /// For experiments: time that an engine waits for the partial results of another node.
    #[arg(long, hide = true, value_name = "MS", requires = "routes")]
    pub route_timeout_ms: Option<u32>,

    /// For experiments: query messages that a node computes at once.
    #[arg(long, hide = true, value_name = "COUNT", requires = "routes")]
    pub route_concurrent_messages_max: Option<u32>,

    /// For experiments: prefill shares push no pages.
    #[arg(long, hide = true)]
    pub no_push: bool,

    /// For experiments: limit of the bytes that each node and engine sends per second.
    #[arg(long, hide = true, value_name = "SIZE", value_parser = parse_bytes)]
    pub send_bytes_per_s_max: Option<u64>,

    /// For experiments: directory to which engines and nodes write the times at which each layer was computed and
    /// sent.
    #[arg(long, hide = true, value_name = "DIR")]
    pub layer_log_dir: Option<PathBuf>,

    /// For experiments: checksums of received pages are not verified.
    #[arg(long, hide = true)]
    pub no_verify: bool,

    /// For experiments: each node injects the disk faults that the file NODE.faults in the run directory names.
    #[arg(long, hide = true, requires = "ssd_bytes")]
    pub ssd_faults: bool,

    /// For experiments: memory of the conductor for the inputs of its latest decisions.
    #[arg(long, hide = true, value_name = "SIZE", value_parser = parse_bytes)]
    pub decision_inputs_bytes_max: Option<u64>,

    /// For experiments: fetch a longer prefix from another node even if recomputing it is faster.
    #[arg(long, hide = true)]
    pub always_fetch: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Engines {
    pub prefill: u32,
    pub decode: u32,
    pub both: u32,
}

impl Engines {
    pub(crate) fn total(self) -> u32 {
        self.prefill + self.decode + self.both
    }

    /// Store nodes, each with this many engines; the last one may have fewer.
    pub(crate) fn nodes(self, engines_per_node: u32) -> u32 {
        self.total().div_ceil(engines_per_node)
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FlagError {
    #[error("--{0} must be at least 1")]
    NoEngine(&'static str),
    #[error("{asked} engines are too many: `up` runs at most {ENGINES_MAX} on one machine")]
    TooManyEngines { asked: u64 },
    #[error("--{flag} {value} is out of range; use {range}")]
    OutOfRange { flag: &'static str, value: u64, range: &'static str },
    #[error("--attention-precision bf16 needs a cache in bf16: add --kv-dtype bf16")]
    Precision,
}

impl Flags {
    pub(crate) fn kv_dtype(&self) -> KvDtype {
        if self.kv_dtype == "bf16" { KvDtype::Bf16 } else { KvDtype::F32 }
    }

    pub(crate) fn attention_precision(&self) -> Precision {
        if self.attention_precision == "bf16" { Precision::Bf16 } else { Precision::F32 }
    }

    pub(crate) fn engines(&self) -> Result<Engines, FlagError> {
        let engines = match self.both {
            Some(both) => Engines { prefill: 0, decode: 0, both },
            None => Engines {
                prefill: self.prefill.unwrap_or(1),
                decode: self.decode.unwrap_or(1),
                both: 0,
            },
        };
        if self.both == Some(0) {
            return Err(FlagError::NoEngine("both"));
        }
        if self.both.is_none() && engines.prefill == 0 {
            return Err(FlagError::NoEngine("prefill"));
        }
        if self.both.is_none() && engines.decode == 0 {
            return Err(FlagError::NoEngine("decode"));
        }
        let asked = [engines.prefill, engines.decode, engines.both].map(u64::from).iter().sum();
        if asked > u64::from(ENGINES_MAX) {
            return Err(FlagError::TooManyEngines { asked });
        }
        Ok(engines)
    }

    /// Numbers that no daemon could do anything with.
    pub(crate) fn check_ranges(&self) -> Result<(), FlagError> {
        if self.attention_precision() == Precision::Bf16 && self.kv_dtype() != KvDtype::Bf16 {
            return Err(FlagError::Precision);
        }
        let chunk = u64::from(self.prefill_chunk_tokens);
        let threads = u64::from(self.threads.unwrap_or(1));
        let per_node = self.engines_per_node;
        let checks = [
            ("prefill-chunk-tokens", chunk, (1..=65_536).contains(&chunk), "1 to 65536"),
            (
                "dram-bytes",
                self.dram_bytes,
                self.dram_bytes > 0 && self.dram_bytes.is_multiple_of(HOST_PAGE_BYTES),
                "a multiple of 4096 above 0",
            ),
            (
                "ssd-bytes",
                self.ssd_bytes.unwrap_or(SSD_BYTES_MIN),
                self.ssd_bytes.is_none_or(|bytes| bytes >= SSD_BYTES_MIN),
                "64MiB and more",
            ),
            ("engines-per-node", per_node.into(), (1..=ENGINES_MAX).contains(&per_node), "1 to 64"),
            ("threads", threads, (1..=1024).contains(&threads), "1 to 1024"),
            (
                "request-timeout-ms",
                self.request_timeout_ms,
                (100..=3_600_000).contains(&self.request_timeout_ms),
                "100 to 3600000",
            ),
            (
                "ttft-objective-ms",
                self.ttft_objective_ms,
                (1..=3_600_000).contains(&self.ttft_objective_ms),
                "1 to 3600000",
            ),
            (
                "tbt-objective-ms",
                self.tbt_objective_ms,
                (1..=3_600_000).contains(&self.tbt_objective_ms),
                "1 to 3600000",
            ),
            (
                "balance-window-ms",
                self.balance_window_ms.unwrap_or(BALANCE_WINDOW_MS_MIN),
                (BALANCE_WINDOW_MS_MIN..=3_600_000)
                    .contains(&self.balance_window_ms.unwrap_or(BALANCE_WINDOW_MS_MIN)),
                "100 to 3600000",
            ),
            // The reference engine renews every 250 ms.
            (
                "lease-ms",
                self.lease_ms,
                (1_000..=600_000).contains(&self.lease_ms),
                "1000 to 600000",
            ),
        ];
        match checks.into_iter().find(|(_, _, is_right, _)| !is_right) {
            None => Ok(()),
            Some((flag, value, _, range)) => Err(FlagError::OutOfRange { flag, value, range }),
        }
    }
}

/// Bytes as a plain number or with one of the units B, KiB, MiB, GiB and TiB.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => {
            return Err(format!(
                "{text:?} is not a size: write bytes, or a unit as in 512MiB or 1GiB"
            ));
        }
    };
    number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)).ok_or_else(|| {
        format!("{text:?} is not a size: write bytes, or a unit as in 512MiB or 1GiB")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    fn flags(line: &str) -> Flags {
        Line::try_parse_from(std::iter::once("up").chain(line.split_whitespace())).unwrap().flags
    }

    fn check_engines(line: &str, expected: Result<(u32, u32, u32), &str>) {
        let outcome = flags(line).engines().map(|e| (e.prefill, e.decode, e.both));
        assert_eq!(outcome.map_err(|e| e.to_string()), expected.map_err(String::from), "{line}");
    }

    #[test]
    fn roles_are_counted_and_an_empty_role_is_refused() {
        check_engines("", Ok((1, 1, 0)));
        check_engines("--prefill 2 --decode 3", Ok((2, 3, 0)));
        check_engines("--both 2", Ok((0, 0, 2)));
        check_engines("--prefill 0", Err("--prefill must be at least 1"));
        check_engines("--decode 0", Err("--decode must be at least 1"));
        check_engines("--both 0", Err("--both must be at least 1"));
        check_engines(
            "--prefill 4294967295",
            Err("4294967296 engines are too many: `up` runs at most 64 on one machine"),
        );
    }

    #[test]
    fn both_excludes_prefill_and_decode() {
        assert!(Line::try_parse_from(["up", "--both", "1", "--decode", "1"]).is_err());
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        for line in [
            "--dram-bytes 4097",
            "--attention-precision bf16",
            "--dram-bytes 0",
            "--prefill-chunk-tokens 0",
            "--ssd-bytes 63MiB",
            "--threads 0",
            "--engines-per-node 0",
            "--engines-per-node 65",
            "--lease-ms 999",
            "--request-timeout-ms 0",
            "--ttft-objective-ms 0",
            "--tbt-objective-ms 0",
        ] {
            assert!(flags(line).check_ranges().is_err(), "{line}");
        }
        assert_eq!(flags("").check_ranges(), Ok(()));
    }

    #[test]
    fn sizes_are_bytes_or_carry_a_unit() {
        let check = |text: &str, expected| assert_eq!(parse_bytes(text).ok(), expected, "{text}");
        check("4096", Some(4096));
        check("64MiB", Some(64 << 20));
        check("1 GiB", Some(1 << 30));
        check("1GB", None);
        check("-1", None);
        check("GiB", None);
        check("99999999999TiB", None);
    }
}
