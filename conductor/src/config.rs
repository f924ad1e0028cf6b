//! What an operator may set. Parsed once by the binary; the doc comment on each field becomes the
//! configuration reference. Units are in the names; values that make no sense are refused, never
//! rounded.

use std::net::SocketAddr;
use std::path::PathBuf;

use kvasir_placement::Selection;
use kvasir_placement::balance::BalanceOptions;
use kvasir_proto::COPIES_MAX;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What store nodes remember ended shares for is longer (`finished_ms` of `kvasir_blocks::Options`).
const REQUEST_DEADLINE_MS_MAX: u64 = 3_600_000;

/// The conductor: OpenAI-compatible front door and scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address of the OpenAI-compatible HTTP API, the health endpoints and the metrics.
    pub listen: SocketAddr,
    /// Address of the gRPC scheduler, for callers with a front door of their own.
    pub grpc_listen: SocketAddr,
    /// Address for those who run the conductor: why requests went where they went, how the cluster
    /// does, as a page and as JSON for `kvasir explain` and `kvasir top`; health and metrics too. It
    /// asks for no keys and changes nothing.
    pub watch_listen: SocketAddr,
    /// Decisions that are kept for it, the latest ones: about 1 KiB each with one instance for prefill
    /// and one for decode, and 72 bytes more for each further one that prefills, 40 for one that
    /// decodes.
    pub decisions_kept: usize,
    /// Memory for what the latest of them were taken from, so that `kvasir replay --decision` can take them
    /// again (docs/watching.md). 0 keeps nothing of it. The oldest goes first.
    pub decisions_inputs_bytes: usize,
    /// Store nodes, as "host:port". Each is asked for what it holds and for its engine.
    pub nodes: Vec<String>,
    /// The models that clients may ask for.
    pub models: Vec<ModelConfig>,
    /// Plain OpenAI servers that requests are passed on to, for models of their own; several for one
    /// model share its requests. Their names must not be among `models`.
    pub backends: Vec<BackendConfig>,
    /// A file of tenants with the hashes of their API keys and their quotas, as described in
    /// docs/front-door.md. Without it everybody is answered. Read again while the conductor runs.
    pub api_keys_file: Option<PathBuf>,
    /// How often files of keys and certificates are read again. What is new is taken when it was
    /// read twice alike. At least 10.
    pub reload_ms: u64,
    /// A request that takes longer is cancelled and answered with 504. OpenAI's clients wait 10
    /// minutes unless they are told otherwise. At most 3600000: store nodes remember what has ended
    /// for longer than that.
    pub request_deadline_ms: u64,
    /// A request is refused when its first token is predicted to come later than this.
    pub ttft_objective_ms: u64,
    /// A request is refused when the time between its tokens is predicted to be longer than this.
    pub tbt_objective_ms: u64,
    /// The least that a request may ask for with the header `x-llm-d-slo-ttft-ms`, which then holds
    /// for it in place of `ttft_objective_ms`; what is out of bounds is refused with 400.
    pub ttft_objective_ms_min: u64,
    /// The most that it may ask for; `ttft_objective_ms` when it is absent, so that requests may only
    /// ask for less. At most `request_deadline_ms`.
    pub ttft_objective_ms_max: Option<u64>,
    /// The least that a request may ask for with the header `x-llm-d-slo-tpot-ms`, which then holds
    /// for it in place of `tbt_objective_ms`.
    pub tbt_objective_ms_min: u64,
    /// The most that it may ask for; `tbt_objective_ms` when it is absent.
    pub tbt_objective_ms_max: Option<u64>,
    /// By what the instance that prefills is chosen: "random"; "least-loaded", the shortest queue;
    /// "longest-match", the longest prefix; "local", the least time to first token with what each
    /// holds itself; "global", Mooncake's Algorithm 1; "kvasir", the least cost with fetching priced
    /// against computing.
    pub policy: PlacementPolicy,
    /// With the policy "global", blocks are fetched from another node when the best prefix match is
    /// more than this many times as long as the local one (Mooncake, Algorithm 1).
    pub kvcache_balancing_threshold: f64,
    /// Where another node holds more, fetch whatever it costs, as Algorithm 1 is printed; otherwise
    /// only where that is predicted to be faster than computing.
    pub always_fetch: bool,
    /// With the policy "kvasir", engines let shorter prompts pass a longer one that came earlier by
    /// less than so many times what they take less. 0 is first come, first served; it is right for
    /// engines that know no other order.
    pub rank_stretch: f64,
    /// How long a node keeps what a request holds without hearing from anybody. At least 1000:
    /// engines renew every 250 ms.
    pub lease_ms: u64,
    /// Attempts at one request, the first included, as long as nothing of the answer was sent.
    pub attempts_max: u32,
    /// Requests (each prompt and each of `n` counts) that are worked on at once; more wait where
    /// requests wait, and else are refused with 429.
    pub choices_running_max: usize,
    /// Prompts times `n` of one request.
    pub choices_max: usize,
    /// Stop strings of one request.
    pub stop_strings_max: usize,
    /// Bytes of one request body; a longer one is refused with 413.
    pub body_bytes_max: usize,
    /// Bytes of all request bodies that are being read; beyond it requests are refused with 503.
    pub bodies_bytes_max: usize,
    /// A request whose body has not arrived after this long is answered with 408.
    pub body_read_ms: u64,
    /// HTTP connections open at once; more wait in the listen queue.
    pub connections_max: usize,
    /// A connection is closed when the head of a request that has begun (of the first request: since
    /// the connection is there) has not arrived after this long.
    pub header_read_ms: u64,
    /// A connection on which nothing is asked for so long after an answer is closed. Longer than what
    /// clients and proxies in front keep theirs, so that they are the ones who close. At most
    /// 3600000.
    pub keep_alive_ms: u64,
    /// A connection whose client takes no byte of its answer for this long is closed and its
    /// request cancelled.
    pub write_stall_ms: u64,
    /// Prompts that are tokenized at once; more wait.
    pub tokenize_parallel: usize,
    /// Memory for what parts of prompts were tokenized to, in bytes, so that what prompts share (a system
    /// prompt, a conversation so far) is tokenized once; 0 keeps nothing. Texts are cut in front of the model's special
    /// tokens.
    pub tokenize_memo_bytes: u64,
    /// On shutdown, requests in flight may finish for this long; then they are cancelled.
    pub drain_ms: u64,
    /// TLS 1.3 for the HTTP API. The files are read again while the conductor runs.
    pub tls: TlsConfig,
    /// What engines of a type cost until that is measured; those of others begin as a small model on a few
    /// cores does.
    pub profiles: Vec<ProfileConfig>,
    /// Different blocks that are followed at once, for each 64 nodes: 21 to 27 bytes of memory each, twice that when
    /// they are on two tiers. Blocks beyond that are not seen, and computed again. At least 1024.
    pub index_keys_max: usize,
    /// What fetching blocks from another node costs until that is measured.
    pub network: NetworkConfig,
    /// What reading blocks from a node's own SSD costs until that is measured.
    pub ssd: SsdConfig,
    /// Attention over blocks that stay on another node.
    pub routes: RoutesConfig,
    /// Whether requests may name the instance that serves them and say what becomes of their prefix, in headers
    /// (docs/front-door.md). For experiments: who may do so can put all load on one engine.
    pub steering_enabled: bool,
    /// Whether requests may name parts of their prompts that are attended as if each stood alone, so that what was
    /// computed of a document serves wherever it stands (docs/front-door.md). Their answers are others than
    /// without that, and how far off depends on the model.
    pub chunks_enabled: bool,
    /// Where API keys are asked for, requests wait here for their tenant's turn when they cannot go at once
    /// (docs/front-door.md). Without keys they go or are refused.
    pub waiting: WaitingConfig,
    /// How many engines prefill and how many decode.
    pub balance: BalanceConfig,
    /// Prompts that are kept for a time (docs/front-door.md).
    pub contexts: ContextsConfig,
}

/// Bounds of contexts. Those of the room that they may take are the store nodes'.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ContextsConfig {
    /// How long one is kept that does not say. At least 1000.
    pub ttl_default_ms: u64,
    /// The longest that one may ask for. At least `ttl_default_ms`.
    pub ttl_max_ms: u64,
    /// On how many store nodes one is kept that does not say: 1 to 8. With more than one, each node must know
    /// others (`peers` in `[replicas]` of store-node.toml), and the loss of a disk costs no context.
    pub copies_default: u8,
    /// Contexts that are created at once; more are refused with 429.
    pub creates_running_max: usize,
    /// Calls to store nodes that list, extend and drop contexts, under way at once; more wait.
    pub node_calls_max: usize,
    /// A node that takes longer to list, extend or drop a context, that wait included, does not answer.
    pub node_call_ms: u64,
    /// A node that takes longer to write one does not answer.
    pub keep_ms: u64,
}

impl Default for ContextsConfig {
    fn default() -> Self {
        ContextsConfig {
            ttl_default_ms: 3_600_000,
            ttl_max_ms: 2_592_000_000,
            copies_default: 1,
            creates_running_max: 64,
            node_calls_max: 64,
            node_call_ms: 5_000,
            keep_ms: 60_000,
        }
    }
}

impl ContextsConfig {
    fn check(&self) -> Result<(), String> {
        for (field, value) in [
            ("creates_running_max", self.creates_running_max as u64),
            ("node_calls_max", self.node_calls_max as u64),
            ("node_call_ms", self.node_call_ms),
            ("keep_ms", self.keep_ms),
        ] {
            if value == 0 {
                return Err(format!("`contexts.{field}` must be at least 1"));
            }
        }
        if !(1..=COPIES_MAX).contains(&self.copies_default) {
            return Err(format!("`contexts.copies_default` must be 1 to {COPIES_MAX}"));
        }
        if self.ttl_default_ms < TTL_MS_MIN {
            return Err(format!("`contexts.ttl_default_ms` must be at least {TTL_MS_MIN}"));
        }
        if self.ttl_max_ms < self.ttl_default_ms {
            return Err(
                "`contexts.ttl_max_ms` must be at least `contexts.ttl_default_ms`".to_owned()
            );
        }
        Ok(())
    }
}

/// What is done about the ratio of engines that prefill to engines that decode (docs/balance.md).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BalanceConfig {
    /// "off": nothing; "wish": how many of each there should be is a metric, for autoscalers; "act": engines
    /// that can do both are also told what to do, which every conductor follows.
    pub mode: BalanceMode,
    /// How often loads are looked at. At least 10.
    pub sample_ms: u64,
    /// What loads are averaged over, and the least time between two changes. At least `sample_ms`, at most 4096
    /// times as much.
    pub window_ms: u64,
    /// An engine keeps a role for so long at least.
    pub dwell_ms: u64,
    /// Engines of one model that change their role at once, at most. At least 1.
    pub changes_max: usize,
    /// A change is made when it brings the logarithm of the ratio of the loads nearer to 0 by so much.
    pub margin: f64,
    /// Engines of one model that stay with prefill, at least, as far as there are enough. At least 1.
    pub prefills_min: usize,
    /// The same with decode.
    pub decodes_min: usize,
    /// Above this load one engine more is wished for on the loaded side.
    pub load_high: f64,
    /// Below it one fewer on the idle side, and engines that do both are not divided.
    pub load_low: f64,
}

/// What is done about the ratio.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BalanceMode {
    Off,
    #[default]
    Wish,
    Act,
}

impl Default for BalanceConfig {
    fn default() -> Self {
        let BalanceOptions {
            window_us,
            changes_max,
            margin,
            prefills_min,
            decodes_min,
            load_high,
            load_low,
        } = BalanceOptions::default();
        BalanceConfig {
            mode: BalanceMode::Wish,
            sample_ms: 500,
            window_ms: window_us / 1_000,
            dwell_ms: 120_000,
            changes_max,
            margin,
            prefills_min,
            decodes_min,
            load_high,
            load_low,
        }
    }
}

impl BalanceConfig {
    fn check(&self) -> Result<(), String> {
        if self.sample_ms < BALANCE_SAMPLE_MS_MIN {
            return Err(format!("`balance.sample_ms` must be at least {BALANCE_SAMPLE_MS_MIN}"));
        }
        let windows = self.sample_ms..=self.sample_ms.saturating_mul(BALANCE_SAMPLES_MAX);
        if !windows.contains(&self.window_ms) {
            return Err(format!(
                "`balance.window_ms` must be between `balance.sample_ms` and {BALANCE_SAMPLES_MAX} times that"
            ));
        }
        for (field, value) in [
            ("changes_max", self.changes_max),
            ("prefills_min", self.prefills_min),
            ("decodes_min", self.decodes_min),
        ] {
            if value == 0 {
                return Err(format!("`balance.{field}` must be at least 1"));
            }
        }
        for (field, value) in
            [("margin", self.margin), ("load_high", self.load_high), ("load_low", self.load_low)]
        {
            if !value.is_finite() || value < 0.0 {
                return Err(format!("`balance.{field}` must be a number from 0 on"));
            }
        }
        if self.load_low > self.load_high {
            return Err("`balance.load_low` must be at most `balance.load_high`".into());
        }
        Ok(())
    }
}

/// How tenants take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct WaitingConfig {
    /// Requests (each prompt and each of `n` counts) that wait for one model; beyond it those of the tenant
    /// that has most waiting for its weight are refused with 429. With 0 nobody waits and nobody takes turns.
    pub requests_max: usize,
    /// A request goes to an engine when its prefill is predicted to begin there within so long, or within an
    /// eighth of the time that it has waited. More keeps engines busier, less lets a tenant that comes have
    /// its turn sooner.
    pub ahead_ms: u64,
    /// Tokens, of prompts and expected answers, that a tenant of weight 1 may use in a round. At least 1.
    pub quantum_tokens: u64,
    /// A request that has waited for so long counts as of the next higher priority. At least 1.
    pub aging_ms: u64,
}

impl Default for WaitingConfig {
    fn default() -> Self {
        WaitingConfig {
            requests_max: 1_024,
            ahead_ms: 1_000,
            quantum_tokens: 2_048,
            aging_ms: 10_000,
        }
    }
}

/// When the prefix of a prompt stays where it is: the engine then sends its queries there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RoutesConfig {
    /// Whether a prefix that another node has may stay there, where that is predicted to be cheaper than
    /// fetching or computing it. Only engines that do both, and that say that they can, are asked.
    pub enabled: bool,
    /// Let it stay wherever that is possible, whatever it costs.
    pub always: bool,
    /// What queries cost on their way until that is measured: a file like those of configs/fabrics. By
    /// default one of shared memory on one host.
    pub fabric_file: Option<PathBuf>,
    /// What a layer costs at the node until that is measured: a file like those of configs/kernels. By
    /// default one of a server core with AVX-512.
    pub kernel_file: Option<PathBuf>,
}

/// Where certificate and key of the HTTP API lie: both or neither.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// The certificate in PEM, followed by those that lead to an authority. Without it HTTP is spoken
    /// in the clear.
    pub certificate: Option<PathBuf>,
    /// The certificate's key in PEM.
    pub key: Option<PathBuf>,
    /// A connection whose handshake takes longer is closed.
    pub handshake_ms: u64,
}

impl Default for TlsConfig {
    fn default() -> Self {
        TlsConfig { certificate: None, key: None, handshake_ms: 10_000 }
    }
}

/// By what the instance that prefills is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementPolicy {
    Random,
    LeastLoaded,
    LongestMatch,
    Local,
    Global,
    #[default]
    Kvasir,
}

impl From<PlacementPolicy> for Selection {
    fn from(policy: PlacementPolicy) -> Selection {
        match policy {
            PlacementPolicy::Random => Selection::Random,
            PlacementPolicy::LeastLoaded => Selection::LeastLoaded,
            PlacementPolicy::LongestMatch => Selection::LongestMatch,
            PlacementPolicy::Local => Selection::Local,
            PlacementPolicy::Global => Selection::Global,
            PlacementPolicy::Kvasir => Selection::Kvasir,
        }
    }
}

/// A model that clients may ask for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The name in requests; engines that serve it attach with the same name.
    pub name: String,
    /// Directory with `tokenizer.json`, `tokenizer_config.json` and perhaps `chat_template.jinja`.
    pub path: PathBuf,
}

/// The network between nodes: a fetch takes its latency and its bytes over the bandwidth. Each node's bandwidth
/// is learned from what is fetched to it; where it begins too low, fetches seem dear and few are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkConfig {
    /// Until the first byte comes, with the calls that ask for it.
    pub latency_us: u64,
    /// To one node. By default what one TCP stream on loopback was measured to carry; 100 Gb/s are 12500000000.
    pub bytes_per_s: u64,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        NetworkConfig { latency_us: 1_000, bytes_per_s: 1_000_000_000 }
    }
}

/// A node's SSD: reading from it takes its latency and the bytes over the bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SsdConfig {
    /// Until the first byte is read.
    pub latency_us: u64,
    /// By default what one ordinary NVMe device reads.
    pub bytes_per_s: u64,
}

impl Default for SsdConfig {
    fn default() -> Self {
        SsdConfig { latency_us: 200, bytes_per_s: 2_000_000_000 }
    }
}

/// What engines of one type cost.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfileConfig {
    /// As the engines' `instance_type` has it.
    pub instance_type: String,
    /// A file like those of configs/instances.
    pub file: PathBuf,
}

/// An OpenAI server that requests for a model are passed on to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BackendConfig {
    /// The name in requests.
    pub model: String,
    /// Where the server is, as in "http://host:8000", without /v1.
    pub url: String,
    /// What the server calls the model; the same when it is absent.
    #[serde(default)]
    pub upstream_model: Option<String>,
    /// A file with the key that the server asks for.
    #[serde(default)]
    pub api_key_file: Option<PathBuf>,
    /// Requests under way there, at most.
    #[serde(default = "backend_requests_running_max")]
    pub requests_running_max: usize,
}

fn backend_requests_running_max() -> usize {
    1_024
}

impl Default for Config {
    fn default() -> Self {
        Config {
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            grpc_listen: SocketAddr::from(([127, 0, 0, 1], 8001)),
            watch_listen: SocketAddr::from(([127, 0, 0, 1], 8002)),
            decisions_kept: 1_000,
            decisions_inputs_bytes: 0,
            nodes: Vec::new(),
            models: Vec::new(),
            backends: Vec::new(),
            api_keys_file: None,
            reload_ms: 1_000,
            request_deadline_ms: 600_000,
            ttft_objective_ms: 30_000,
            tbt_objective_ms: 1_000,
            ttft_objective_ms_min: 1,
            ttft_objective_ms_max: None,
            tbt_objective_ms_min: 1,
            tbt_objective_ms_max: None,
            policy: PlacementPolicy::default(),
            kvcache_balancing_threshold: 1.5,
            always_fetch: false,
            rank_stretch: 5.0,
            lease_ms: 5_000,
            attempts_max: 3,
            choices_running_max: 4_096,
            choices_max: 64,
            stop_strings_max: 16,
            body_bytes_max: 8 << 20,
            bodies_bytes_max: 512 << 20,
            body_read_ms: 30_000,
            connections_max: 4_096,
            header_read_ms: 10_000,
            keep_alive_ms: 75_000,
            write_stall_ms: 20_000,
            tokenize_parallel: 4,
            tokenize_memo_bytes: 64 << 20,
            drain_ms: 10_000,
            tls: TlsConfig::default(),
            profiles: Vec::new(),
            index_keys_max: 16 << 20,
            network: NetworkConfig::default(),
            ssd: SsdConfig::default(),
            routes: RoutesConfig::default(),
            steering_enabled: false,
            chunks_enabled: false,
            waiting: WaitingConfig::default(),
            balance: BalanceConfig::default(),
            contexts: ContextsConfig::default(),
        }
    }
}

/// Four of the engines' renewals.
const LEASE_MS_MIN: u64 = 1_000;
/// So that reading files does not keep a core busy.
const RELOAD_MS_MIN: u64 = 10;
/// So that looking at loads keeps nobody busy.
const BALANCE_SAMPLE_MS_MIN: u64 = 10;
/// As many are kept (`kvasir_placement::balance`).
const BALANCE_SAMPLES_MAX: u64 = 4_096;
/// What clients ask for is in seconds.
const TTL_MS_MIN: u64 = 1_000;
/// An hour.
const KEEP_ALIVE_MS_MAX: u64 = 3_600_000;
/// Fewer are not worth a conductor.
const INDEX_KEYS_MIN: usize = 1_024;
/// Slower ones are not told apart (`kvasir_placement::LinkModel`).
const BYTES_PER_S_MIN: u64 = 100_000;
/// A minute.
const LATENCY_US_MAX: u64 = 60_000_000;

impl Config {
    /// The longest time to first token that a request may ask for.
    pub(crate) fn ttft_ms_max(&self) -> u64 {
        self.ttft_objective_ms_max.unwrap_or(self.ttft_objective_ms)
    }

    /// The longest time between tokens that a request may ask for.
    pub(crate) fn tbt_ms_max(&self) -> u64 {
        self.tbt_objective_ms_max.unwrap_or(self.tbt_objective_ms)
    }

    /// Refuses values that cannot work, naming the field.
    pub(crate) fn check(&self) -> Result<(), String> {
        let positive = [
            ("request_deadline_ms", self.request_deadline_ms),
            ("ttft_objective_ms", self.ttft_objective_ms),
            ("tbt_objective_ms", self.tbt_objective_ms),
            ("attempts_max", u64::from(self.attempts_max)),
            ("choices_running_max", self.choices_running_max as u64),
            ("choices_max", self.choices_max as u64),
            ("body_bytes_max", self.body_bytes_max as u64),
            ("body_read_ms", self.body_read_ms),
            ("connections_max", self.connections_max as u64),
            ("header_read_ms", self.header_read_ms),
            ("keep_alive_ms", self.keep_alive_ms),
            ("write_stall_ms", self.write_stall_ms),
            ("tls.handshake_ms", self.tls.handshake_ms),
            ("tokenize_parallel", self.tokenize_parallel as u64),
            ("waiting.quantum_tokens", self.waiting.quantum_tokens),
            ("waiting.aging_ms", self.waiting.aging_ms),
        ];
        for (field, value) in positive {
            if value == 0 {
                return Err(format!("`{field}` must be at least 1"));
            }
        }
        if self.request_deadline_ms > REQUEST_DEADLINE_MS_MAX {
            return Err(format!("`request_deadline_ms` must be at most {REQUEST_DEADLINE_MS_MAX}"));
        }
        for backend in &self.backends {
            let model = &backend.model;
            if self.models.iter().any(|own| own.name == *model) {
                return Err(format!("`backends`: {model:?} is among `models` too"));
            }
            if backend.requests_running_max == 0 {
                return Err(format!(
                    "`backends`: `requests_running_max` of {model:?} must be at least 1"
                ));
            }
        }
        for (field, min, max) in [
            ("ttft_objective_ms", self.ttft_objective_ms_min, self.ttft_ms_max()),
            ("tbt_objective_ms", self.tbt_objective_ms_min, self.tbt_ms_max()),
        ] {
            if min == 0 || min > max {
                return Err(format!("`{field}_min` must be between 1 and `{field}_max`"));
            }
        }
        if self.ttft_objective_ms_max.is_some_and(|max| max > self.request_deadline_ms) {
            return Err(format!(
                "`ttft_objective_ms_max` must be at most `request_deadline_ms`, {}: a request ends \
                 then, with or without its first token",
                self.request_deadline_ms
            ));
        }
        if self.tls.certificate.is_some() != self.tls.key.is_some() {
            return Err("`tls.certificate` and `tls.key` go together: set both or neither".into());
        }
        if self.reload_ms < RELOAD_MS_MIN {
            return Err(format!(
                "`reload_ms` must be at least {RELOAD_MS_MIN}, not {}",
                self.reload_ms
            ));
        }
        if self.keep_alive_ms > KEEP_ALIVE_MS_MAX {
            return Err(format!(
                "`keep_alive_ms` must be at most {KEEP_ALIVE_MS_MAX}, not {}: idle connections count \
                 among `connections_max`",
                self.keep_alive_ms
            ));
        }
        if self.lease_ms < LEASE_MS_MIN {
            return Err(format!(
                "`lease_ms` must be at least {LEASE_MS_MIN}, not {}: engines renew every 250 ms, and \
                 one late renewal must not end a request",
                self.lease_ms
            ));
        }
        let threshold = self.kvcache_balancing_threshold;
        if !threshold.is_finite() || threshold <= 0.0 {
            return Err("`kvcache_balancing_threshold` must be a positive number".into());
        }
        if !self.rank_stretch.is_finite() || self.rank_stretch < 0.0 {
            return Err("`rank_stretch` must be a number from 0 on".into());
        }
        if self.index_keys_max < INDEX_KEYS_MIN {
            return Err(format!(
                "`index_keys_max` must be at least {INDEX_KEYS_MIN}, not {}",
                self.index_keys_max
            ));
        }
        let NetworkConfig { latency_us, bytes_per_s } = self.network;
        check_way("network", latency_us, bytes_per_s)?;
        check_way("ssd", self.ssd.latency_us, self.ssd.bytes_per_s)?;
        self.balance.check()?;
        self.contexts.check()?;
        if self.bodies_bytes_max < self.body_bytes_max {
            return Err("`bodies_bytes_max` must be at least `body_bytes_max`".into());
        }
        for (index, model) in self.models.iter().enumerate() {
            if model.name.is_empty() {
                return Err(format!("`models[{index}].name` must not be empty"));
            }
            if self.models[..index].iter().any(|other| other.name == model.name) {
                return Err(format!("`models` names \"{}\" twice", model.name));
            }
        }
        Ok(())
    }
}

fn check_way(name: &str, latency_us: u64, bytes_per_s: u64) -> Result<(), String> {
    if bytes_per_s < BYTES_PER_S_MIN {
        return Err(format!(
            "`{name}.bytes_per_s` must be at least {BYTES_PER_S_MIN}, not {bytes_per_s}: it is in bytes, \
             and in one second"
        ));
    }
    if latency_us > LATENCY_US_MAX {
        return Err(format!(
            "`{name}.latency_us` must be at most {LATENCY_US_MAX}, a minute, not {latency_us}"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_that_cannot_be_priced_are_refused() {
        let refused = |change: fn(&mut Config), want: &str| {
            let mut config = Config::default();
            change(&mut config);
            let said = config.check().expect_err("it cannot work");
            assert!(said.contains(want), "{said:?} lacks {want:?}");
        };
        refused(|config| config.network.bytes_per_s = 99_999, "`network.bytes_per_s`");
        refused(|config| config.network.latency_us = 60_000_001, "`network.latency_us`");
        refused(|config| config.ssd.bytes_per_s = 0, "`ssd.bytes_per_s`");
        refused(|config| config.ssd.latency_us = u64::MAX, "`ssd.latency_us`");
    }

    #[test]
    fn a_balance_that_cannot_work_is_refused() {
        let refused = |change: fn(&mut BalanceConfig), want: &str| {
            let mut config = Config::default();
            change(&mut config.balance);
            let said = config.check().expect_err("it cannot work");
            assert!(said.contains(want), "{said:?} lacks {want:?}");
        };
        assert_eq!(Config::default().check(), Ok(()));
        refused(|balance| balance.sample_ms = 9, "`balance.sample_ms`");
        refused(|balance| balance.window_ms = 499, "`balance.window_ms`");
        refused(|balance| balance.window_ms = 500 * 4_096 + 1, "`balance.window_ms`");
        refused(|balance| balance.changes_max = 0, "`balance.changes_max`");
        refused(|balance| balance.prefills_min = 0, "`balance.prefills_min`");
        refused(|balance| balance.margin = f64::NAN, "`balance.margin`");
        refused(|balance| balance.load_low = 1.1, "`balance.load_low`");
    }

    #[test]
    fn bounds_of_contexts_that_cannot_work_are_refused() {
        let refused = |change: fn(&mut ContextsConfig), want: &str| {
            let mut config = Config::default();
            change(&mut config.contexts);
            let said = config.check().expect_err("it cannot work");
            assert!(said.contains(want), "{said:?} lacks {want:?}");
        };
        refused(|contexts| contexts.ttl_default_ms = 999, "`contexts.ttl_default_ms`");
        refused(|contexts| contexts.ttl_max_ms = 3_599_999, "`contexts.ttl_max_ms`");
        refused(|contexts| contexts.creates_running_max = 0, "`contexts.creates_running_max`");
        refused(|contexts| contexts.node_calls_max = 0, "`contexts.node_calls_max`");
        refused(|contexts| contexts.node_call_ms = 0, "`contexts.node_call_ms`");
        refused(|contexts| contexts.keep_ms = 0, "`contexts.keep_ms`");
        refused(|contexts| contexts.copies_default = 0, "`contexts.copies_default`");
        refused(|contexts| contexts.copies_default = 9, "`contexts.copies_default`");
    }

    #[test]
    fn requests_may_only_ask_for_less_unless_it_is_said() {
        let config = Config { ttft_objective_ms: 700, tbt_objective_ms: 30, ..Config::default() };
        assert_eq!((config.ttft_ms_max(), config.tbt_ms_max()), (700, 30));
        assert_eq!(config.check(), Ok(()));
        let wider = Config {
            ttft_objective_ms_max: Some(5_000),
            tbt_objective_ms_max: Some(60),
            ..config.clone()
        };
        assert_eq!((wider.ttft_ms_max(), wider.tbt_ms_max()), (5_000, 60));
        assert_eq!(wider.check(), Ok(()));
        let refused = |change: fn(&mut Config), want: &str| {
            let mut config = config.clone();
            change(&mut config);
            let said = config.check().expect_err("it cannot work");
            assert!(said.contains(want), "{said:?} lacks {want:?}");
        };
        refused(|config| config.ttft_objective_ms_max = Some(600_001), "`request_deadline_ms`");
        refused(|config| config.request_deadline_ms = 3_600_001, "`request_deadline_ms`");
        refused(|config| config.ttft_objective_ms_min = 701, "`ttft_objective_ms_min`");
        refused(|config| config.tbt_objective_ms_min = 31, "`tbt_objective_ms_min`");
    }
}
