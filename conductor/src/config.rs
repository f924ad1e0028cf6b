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
const REQUEST_TIMEOUT_MS_MAX: u64 = 3_600_000;

/// The conductor: OpenAI-compatible front door and scheduler.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address of the OpenAI-compatible HTTP API, the health endpoints and the metrics.
    pub listen: SocketAddr,
    /// Address of the gRPC scheduler, for callers with a front door of their own. It is not
    /// authenticated.
    pub grpc_listen: SocketAddr,
    /// Address of the read-only monitoring API: placement decisions and cluster state, as a web page
    /// and as JSON for `kvasir explain` and `kvasir top`, and the health endpoints and metrics. It is
    /// not authenticated.
    pub monitor_listen: SocketAddr,
    /// The number of latest placement decisions that the conductor remembers. Each takes about 1 KiB with
    /// one prefill and one decode instance, 72 bytes more for each further prefill instance, and 40 bytes
    /// more for each further decode instance.
    pub decision_history_max: usize,
    /// Memory for the inputs of the latest decisions, which `kvasir replay --decision` reads
    /// (docs/guide/monitor.md). The oldest inputs are discarded first. 0 disables the recording.
    pub decision_inputs_bytes_max: usize,
    /// gRPC addresses of the store nodes, as "host:port".
    pub nodes: Vec<String>,
    /// The models that clients may request.
    pub models: Vec<ModelConfig>,
    /// OpenAI-compatible servers that answer requests for models of their own. Several servers of one
    /// model share its requests. A model must not be in `models` too.
    pub backends: Vec<BackendConfig>,
    /// File of tenants, with the hashes of their API keys and their quotas (docs/operate/secure.md). Without it the
    /// conductor answers every client. The file is read again while the conductor runs.
    pub api_keys_file: Option<PathBuf>,
    /// Interval at which the conductor reads the files of API keys and certificates again. A change takes
    /// effect after two equal reads. At least 10.
    pub reload_interval_ms: u64,
    /// A request that takes longer is cancelled and answered with 504. The default equals the timeout of
    /// OpenAI's client libraries. At most 3600000, because store nodes remember finished transactions
    /// for longer than that.
    pub request_timeout_ms: u64,
    /// A request is refused if its predicted time to first token is longer.
    pub ttft_objective_ms: u64,
    /// A request is refused if its predicted time between tokens is longer.
    pub tbt_objective_ms: u64,
    /// The smallest value that the header `x-llm-d-slo-ttft-ms` may set in place of `ttft_objective_ms`. A
    /// value out of range is refused with 400.
    pub ttft_objective_min_ms: u64,
    /// The largest value that the header may set. At most `request_timeout_ms`. The default is
    /// `ttft_objective_ms`.
    pub ttft_objective_max_ms: Option<u64>,
    /// The smallest value that the header `x-llm-d-slo-tpot-ms` may set in place of `tbt_objective_ms`.
    pub tbt_objective_min_ms: u64,
    /// The largest value that the header may set. The default is `tbt_objective_ms`.
    pub tbt_objective_max_ms: Option<u64>,
    /// How the conductor selects the prefill instance: "random"; "least-loaded", the shortest queue;
    /// "longest-prefix", the longest cached prefix; "cache-aware", the shortest time to first token
    /// without fetches; "kvcache-centric", Algorithm 1 of Mooncake; "least-cost", the lowest cost, with
    /// fetches and recomputation priced against each other.
    pub policy: PlacementPolicy,
    /// With the policy "kvcache-centric", blocks are fetched from another node if the longest cached prefix
    /// is more than this many times as long as the local one (Mooncake, Algorithm 1).
    pub kvcache_balancing_threshold: f64,
    /// Fetch a longer prefix from another node even if recomputing it is predicted to be faster, as in
    /// Algorithm 1 of Mooncake.
    pub always_fetch: bool,
    /// With the policy "least-cost", an engine may run a shorter prompt before a longer one that arrived
    /// earlier, if the difference in arrival is less than this many times the difference in prefill time.
    /// 0 is first come, first served; set it for engines that ignore the order.
    pub shortest_prefill_first_factor: f64,
    /// Time for which a node keeps the slots and pins of a request without a renewal. At least 1000:
    /// engines renew every 250 ms.
    pub lease_ms: u64,
    /// Attempts for one request, including the first. A streamed request is not retried after the first bytes of
    /// its answer were sent.
    pub attempts_max: u32,
    /// Answers that are generated at once: each prompt counts, times `n`. Further requests wait in the
    /// admission queue; without API keys they are refused with 429.
    pub running_choices_max: usize,
    /// The largest number of prompts times `n` of one request.
    pub choices_per_request_max: usize,
    /// Stop strings of one request.
    pub stop_strings_max: usize,
    /// Size of one request body in bytes. A longer body is refused with 413.
    pub body_bytes_max: usize,
    /// Size of all request bodies in memory. Beyond it requests are refused with 503.
    pub buffered_bodies_bytes_max: usize,
    /// A request whose body is not complete after this time is answered with 408.
    pub body_read_timeout_ms: u64,
    /// Open HTTP connections. Further connections wait in the listen queue of the kernel.
    pub connections_max: usize,
    /// A connection is closed if the head of a request is not complete after this time. For the first
    /// request the time starts when the connection opens.
    pub header_read_timeout_ms: u64,
    /// A connection that is idle for this time after an answer is closed. Set it longer than the same timeout
    /// of clients and proxies, so that they close first. At most 3600000.
    pub keep_alive_timeout_ms: u64,
    /// A connection is closed and its request is cancelled if the client reads no byte of the answer for this
    /// time.
    pub write_stall_timeout_ms: u64,
    /// Prompts that are tokenized at once. Further prompts wait.
    pub concurrent_tokenizations_max: usize,
    /// Memory for the tokens of text that was tokenized before, such as a system prompt or the earlier turns of a
    /// conversation. Text is cut in front of the model's special tokens. 0 disables the cache.
    pub tokenizer_cache_bytes_max: u64,
    /// On shutdown, requests in flight may finish for this time. Then they are cancelled.
    pub drain_timeout_ms: u64,
    /// TLS 1.3 for the HTTP API. The files are read again while the conductor runs.
    pub tls: TlsConfig,
    /// Initial costs of instances by their type, until they are measured. Other types start with the costs of a
    /// small model on a few CPU cores.
    pub instance_profiles: Vec<ProfileConfig>,
    /// Distinct blocks in the index, for each 64 nodes. A block takes 21 to 27 bytes, and twice that if it is on
    /// two tiers. The conductor does not see further blocks, and they are recomputed. At least 1024.
    pub index_blocks_max: usize,
    /// Initial cost of fetching blocks from another node, until it is measured.
    pub network: NetworkConfig,
    /// Initial cost of reading blocks from a node's SSD, until it is measured.
    pub ssd: SsdConfig,
    /// Routed attention: queries move to blocks that stay on another node.
    pub routes: RoutesConfig,
    /// Accept the headers `x-kvasir-instance` and `x-kvasir-prefix`, which select the instance and the source of
    /// the prefix (docs/guide/api.md). For experiments: a client can put all load on one engine.
    pub steering_enabled: bool,
    /// Accept `kvasir_chunks`: parts of a prompt that are attended as if each stood alone, so that their cached
    /// blocks can be reused at any position (docs/concepts/chunk-reuse.md). This changes the answers; the size of
    /// the change depends on the model.
    pub chunk_reuse_enabled: bool,
    /// The queue of requests that cannot start at once. Tenants share it fairly. It is used only with
    /// `api_keys_file`. Without API keys a request goes to an engine's own queue, or is refused with 429 if a
    /// prediction misses its objective, no node has space, or `running_choices_max` is reached.
    pub admission_queue: AdmissionQueueConfig,
    /// The number of prefill and decode engines.
    pub balance: BalanceConfig,
    /// Contexts: prompts that stay cached until their expiry (docs/guide/contexts.md).
    pub contexts: ContextsConfig,
}

/// Limits of contexts. The store nodes limit the space that contexts take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ContextsConfig {
    /// Time to live of a context that is created without `ttl_seconds`. At least 1000.
    pub ttl_default_ms: u64,
    /// The longest time to live that a client may request. At least `ttl_default_ms`.
    pub ttl_max_ms: u64,
    /// Number of store nodes that keep a context that is created without `replicas`: 1 to 8. With more than one,
    /// each store node needs `replication.peers`, and the loss of one disk loses no context.
    pub replicas_default: u8,
    /// Contexts that are created at once. Further requests are refused with 429.
    pub concurrent_creates_max: usize,
    /// Calls in flight to store nodes that list, extend and delete contexts. Further calls wait.
    pub concurrent_node_calls_max: usize,
    /// Timeout of such a call, including its wait.
    pub node_call_timeout_ms: u64,
    /// Timeout of a call that makes a store node persist a context.
    pub persist_timeout_ms: u64,
}

impl Default for ContextsConfig {
    fn default() -> Self {
        ContextsConfig {
            ttl_default_ms: 3_600_000,
            ttl_max_ms: 2_592_000_000,
            replicas_default: 1,
            concurrent_creates_max: 64,
            concurrent_node_calls_max: 64,
            node_call_timeout_ms: 5_000,
            persist_timeout_ms: 60_000,
        }
    }
}

impl ContextsConfig {
    fn check(&self) -> Result<(), String> {
        for (field, value) in [
            ("concurrent_creates_max", self.concurrent_creates_max as u64),
            ("concurrent_node_calls_max", self.concurrent_node_calls_max as u64),
            ("node_call_timeout_ms", self.node_call_timeout_ms),
            ("persist_timeout_ms", self.persist_timeout_ms),
        ] {
            if value == 0 {
                return Err(format!("`contexts.{field}` must be at least 1"));
            }
        }
        if !(1..=COPIES_MAX).contains(&self.replicas_default) {
            return Err(format!("`contexts.replicas_default` must be 1 to {COPIES_MAX}"));
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

/// The ratio of prefill engines to decode engines (docs/concepts/balance.md).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct BalanceConfig {
    /// "off": no balancing; "recommend": a metric recommends the number of engines of each role, for
    /// autoscalers; "auto": the conductor also changes the role of engines that support both roles.
    pub mode: BalanceMode,
    /// Interval at which the loads are sampled. At least 10.
    pub sample_interval_ms: u64,
    /// Time over which loads are averaged, and the shortest time between two changes. At least
    /// `sample_interval_ms`, at most 4096 times as long.
    pub window_ms: u64,
    /// The shortest time for which an engine keeps a role.
    pub dwell_ms: u64,
    /// Engines of one model that change their role at once. At least 1.
    pub concurrent_role_changes_max: usize,
    /// A change must move the logarithm of the ratio of the loads this much nearer to 0.
    pub margin: f64,
    /// Engines of one model that keep the prefill role, if there are enough engines. At least 1.
    pub prefill_instances_min: usize,
    /// Engines of one model that keep the decode role, if there are enough engines. At least 1.
    pub decode_instances_min: usize,
    /// Above this load one more engine is recommended for the loaded role.
    pub load_high: f64,
    /// Below this load one engine fewer is recommended for the idle role, and engines with both roles are not
    /// divided.
    pub load_low: f64,
}

/// Effect of the balancer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BalanceMode {
    Off,
    #[default]
    Recommend,
    Auto,
}

impl Default for BalanceConfig {
    fn default() -> Self {
        let BalanceOptions {
            window_us,
            concurrent_role_changes_max,
            margin,
            prefill_instances_min,
            decode_instances_min,
            load_high,
            load_low,
        } = BalanceOptions::default();
        BalanceConfig {
            mode: BalanceMode::Recommend,
            sample_interval_ms: 500,
            window_ms: window_us / 1_000,
            dwell_ms: 120_000,
            concurrent_role_changes_max,
            margin,
            prefill_instances_min,
            decode_instances_min,
            load_high,
            load_low,
        }
    }
}

impl BalanceConfig {
    fn check(&self) -> Result<(), String> {
        if self.sample_interval_ms < BALANCE_SAMPLE_MS_MIN {
            return Err(format!(
                "`balance.sample_interval_ms` must be at least {BALANCE_SAMPLE_MS_MIN}"
            ));
        }
        let windows =
            self.sample_interval_ms..=self.sample_interval_ms.saturating_mul(BALANCE_SAMPLES_MAX);
        if !windows.contains(&self.window_ms) {
            return Err(format!(
                "`balance.window_ms` must be between `balance.sample_interval_ms` and {BALANCE_SAMPLES_MAX} times that"
            ));
        }
        for (field, value) in [
            ("concurrent_role_changes_max", self.concurrent_role_changes_max),
            ("prefill_instances_min", self.prefill_instances_min),
            ("decode_instances_min", self.decode_instances_min),
        ] {
            if value == 0 {
                return Err(format!("`balance.{field}` must be at least 1"));
            }
        }
        for (field, value) in
            [("margin", self.margin), ("load_high", self.load_high), ("load_low", self.load_low)]
        {
            if !value.is_finite() || value < 0.0 {
                return Err(format!("`balance.{field}` must be a number of at least 0"));
            }
        }
        if self.load_low > self.load_high {
            return Err("`balance.load_low` must be at most `balance.load_high`".into());
        }
        Ok(())
    }
}

/// The queue of requests that cannot start at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct AdmissionQueueConfig {
    /// Queued answers of one model: each prompt counts, times `n`. If the queue is full, the latest request of the
    /// tenant with the most queued requests for its weight is refused with 429. 0 disables the queue.
    pub choices_max: usize,
    /// A request leaves the queue when its prefill is predicted to start within this time, or within an eighth of the
    /// time that it has waited. A larger value keeps engines busier; a smaller value gives a newly
    /// arriving tenant its share sooner.
    pub dispatch_ahead_ms: u64,
    /// Tokens of prompts and expected answers that a tenant of weight 1 may use in a round of the deficit round
    /// robin. At least 1.
    pub quantum_tokens: u64,
    /// A request that has waited this long counts as one priority higher. At least 1.
    pub aging_ms: u64,
}

impl Default for AdmissionQueueConfig {
    fn default() -> Self {
        AdmissionQueueConfig {
            choices_max: 1_024,
            dispatch_ahead_ms: 1_000,
            quantum_tokens: 2_048,
            aging_ms: 10_000,
        }
    }
}

/// Routed attention: the engine sends its queries to the node that holds the prefix.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RoutesConfig {
    /// Leave a prefix on another node if routing queries is predicted to be cheaper than fetching or recomputing the
    /// prefix. This needs engines with the role "both" that support routed attention.
    pub enabled: bool,
    /// Route whenever it is possible, at any cost. For experiments.
    pub always: bool,
    /// Initial cost of moving queries, until it is measured: a file like those in configs/fabrics. The default
    /// describes shared memory on one host.
    pub fabric_file: Option<PathBuf>,
    /// Initial cost of attention at the holder, until it is measured: a file like those in configs/kernels. The
    /// default describes a server core with AVX-512.
    pub kernel_file: Option<PathBuf>,
}

/// Certificate and key of the HTTP API: both or neither.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// Certificate chain in PEM: the certificate, then its intermediates. Without it the HTTP API is not
    /// encrypted.
    pub certificate_file: Option<PathBuf>,
    /// Private key of the certificate in PEM.
    pub key_file: Option<PathBuf>,
    /// A connection whose handshake takes longer is closed.
    pub handshake_timeout_ms: u64,
}

impl Default for TlsConfig {
    fn default() -> Self {
        TlsConfig { certificate_file: None, key_file: None, handshake_timeout_ms: 10_000 }
    }
}

/// How the prefill instance is selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementPolicy {
    Random,
    LeastLoaded,
    LongestPrefix,
    CacheAware,
    KvcacheCentric,
    #[default]
    LeastCost,
}

impl From<PlacementPolicy> for Selection {
    fn from(policy: PlacementPolicy) -> Selection {
        match policy {
            PlacementPolicy::Random => Selection::Random,
            PlacementPolicy::LeastLoaded => Selection::LeastLoaded,
            PlacementPolicy::LongestPrefix => Selection::LongestPrefix,
            PlacementPolicy::CacheAware => Selection::CacheAware,
            PlacementPolicy::KvcacheCentric => Selection::KvcacheCentric,
            PlacementPolicy::LeastCost => Selection::LeastCost,
        }
    }
}

/// A model that clients may request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// The model's name in requests. Engines that serve it attach with the same name.
    pub name: String,
    /// Directory with `tokenizer.json`, `tokenizer_config.json` and optionally `chat_template.jinja`.
    pub tokenizer_dir: PathBuf,
}

/// The network between nodes. A fetch takes the latency plus its size over the bandwidth. The bandwidth of each node is
/// learned from fetches to it. If the initial value is too low, fetches seem expensive and few are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct NetworkConfig {
    /// Time until the first byte, including the calls that request the fetch.
    pub latency_us: u64,
    /// Bandwidth to one node. The default is that of one TCP stream on loopback; 100 Gb/s are 12500000000.
    pub bytes_per_s: u64,
}

impl Default for NetworkConfig {
    fn default() -> Self {
        NetworkConfig { latency_us: 1_000, bytes_per_s: 1_000_000_000 }
    }
}

/// A node's SSD. A read takes the latency plus its size over the bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SsdConfig {
    /// Time until the first byte.
    pub latency_us: u64,
    /// Read bandwidth. The default is that of a common NVMe device.
    pub bytes_per_s: u64,
}

impl Default for SsdConfig {
    fn default() -> Self {
        SsdConfig { latency_us: 200, bytes_per_s: 2_000_000_000 }
    }
}

/// Initial costs of the instances of one type.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProfileConfig {
    /// The `instance_type` of the engines.
    pub instance_type: String,
    /// A file like those in configs/instances.
    pub file: PathBuf,
}

/// An OpenAI-compatible server that answers requests for a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BackendConfig {
    /// The model's name in requests.
    pub model: String,
    /// The server's address without /v1, as in "http://host:8000".
    pub url: String,
    /// The server's own name for the model. The default is `model`.
    #[serde(default)]
    pub upstream_model: Option<String>,
    /// A file with the API key of the server.
    #[serde(default)]
    pub api_key_file: Option<PathBuf>,
    /// Requests in flight to this server.
    #[serde(default = "backend_running_requests_max")]
    pub running_requests_max: usize,
}

fn backend_running_requests_max() -> usize {
    1_024
}

impl Default for Config {
    fn default() -> Self {
        Config {
            listen: SocketAddr::from(([127, 0, 0, 1], 8000)),
            grpc_listen: SocketAddr::from(([127, 0, 0, 1], 8001)),
            monitor_listen: SocketAddr::from(([127, 0, 0, 1], 8002)),
            decision_history_max: 1_000,
            decision_inputs_bytes_max: 0,
            nodes: Vec::new(),
            models: Vec::new(),
            backends: Vec::new(),
            api_keys_file: None,
            reload_interval_ms: 1_000,
            request_timeout_ms: 600_000,
            ttft_objective_ms: 30_000,
            tbt_objective_ms: 1_000,
            ttft_objective_min_ms: 1,
            ttft_objective_max_ms: None,
            tbt_objective_min_ms: 1,
            tbt_objective_max_ms: None,
            policy: PlacementPolicy::default(),
            kvcache_balancing_threshold: 1.5,
            always_fetch: false,
            shortest_prefill_first_factor: 5.0,
            lease_ms: 5_000,
            attempts_max: 3,
            running_choices_max: 4_096,
            choices_per_request_max: 64,
            stop_strings_max: 16,
            body_bytes_max: 8 << 20,
            buffered_bodies_bytes_max: 512 << 20,
            body_read_timeout_ms: 30_000,
            connections_max: 4_096,
            header_read_timeout_ms: 10_000,
            keep_alive_timeout_ms: 75_000,
            write_stall_timeout_ms: 20_000,
            concurrent_tokenizations_max: 4,
            tokenizer_cache_bytes_max: 64 << 20,
            drain_timeout_ms: 10_000,
            tls: TlsConfig::default(),
            instance_profiles: Vec::new(),
            index_blocks_max: 16 << 20,
            network: NetworkConfig::default(),
            ssd: SsdConfig::default(),
            routes: RoutesConfig::default(),
            steering_enabled: false,
            chunk_reuse_enabled: false,
            admission_queue: AdmissionQueueConfig::default(),
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
const INDEX_BLOCKS_MIN: usize = 1_024;
/// Slower ones are not told apart (`kvasir_placement::LinkModel`).
const BYTES_PER_S_MIN: u64 = 100_000;
/// A minute.
const LATENCY_US_MAX: u64 = 60_000_000;

impl Config {
    /// The longest time to first token that a request may ask for.
    pub(crate) fn ttft_ms_max(&self) -> u64 {
        self.ttft_objective_max_ms.unwrap_or(self.ttft_objective_ms)
    }

    /// The longest time between tokens that a request may ask for.
    pub(crate) fn tbt_ms_max(&self) -> u64 {
        self.tbt_objective_max_ms.unwrap_or(self.tbt_objective_ms)
    }

    /// Refuses values that cannot work, naming the field.
    pub(crate) fn check(&self) -> Result<(), String> {
        let positive = [
            ("request_timeout_ms", self.request_timeout_ms),
            ("ttft_objective_ms", self.ttft_objective_ms),
            ("tbt_objective_ms", self.tbt_objective_ms),
            ("attempts_max", u64::from(self.attempts_max)),
            ("running_choices_max", self.running_choices_max as u64),
            ("choices_per_request_max", self.choices_per_request_max as u64),
            ("body_bytes_max", self.body_bytes_max as u64),
            ("body_read_timeout_ms", self.body_read_timeout_ms),
            ("connections_max", self.connections_max as u64),
            ("header_read_timeout_ms", self.header_read_timeout_ms),
            ("keep_alive_timeout_ms", self.keep_alive_timeout_ms),
            ("write_stall_timeout_ms", self.write_stall_timeout_ms),
            ("tls.handshake_timeout_ms", self.tls.handshake_timeout_ms),
            ("concurrent_tokenizations_max", self.concurrent_tokenizations_max as u64),
            ("admission_queue.quantum_tokens", self.admission_queue.quantum_tokens),
            ("admission_queue.aging_ms", self.admission_queue.aging_ms),
        ];
        for (field, value) in positive {
            if value == 0 {
                return Err(format!("`{field}` must be at least 1"));
            }
        }
        if self.request_timeout_ms > REQUEST_TIMEOUT_MS_MAX {
            return Err(format!("`request_timeout_ms` must be at most {REQUEST_TIMEOUT_MS_MAX}"));
        }
        for backend in &self.backends {
            let model = &backend.model;
            if self.models.iter().any(|own| own.name == *model) {
                return Err(format!(
                    "`backends`: {model:?} is also in `models`; remove one of the two"
                ));
            }
            if backend.running_requests_max == 0 {
                return Err(format!(
                    "`backends`: `running_requests_max` of {model:?} must be at least 1"
                ));
            }
        }
        for (field, min, max) in [
            ("ttft_objective", self.ttft_objective_min_ms, self.ttft_ms_max()),
            ("tbt_objective", self.tbt_objective_min_ms, self.tbt_ms_max()),
        ] {
            if min == 0 || min > max {
                return Err(format!("`{field}_min_ms` must be between 1 and `{field}_max_ms`"));
            }
        }
        if self.ttft_objective_max_ms.is_some_and(|max| max > self.request_timeout_ms) {
            return Err(format!(
                "`ttft_objective_max_ms` must be at most `request_timeout_ms`, which is {}: a request \
                 ends after that time",
                self.request_timeout_ms
            ));
        }
        if self.tls.certificate_file.is_some() != self.tls.key_file.is_some() {
            return Err("set both `tls.certificate_file` and `tls.key_file`, or neither".into());
        }
        if self.reload_interval_ms < RELOAD_MS_MIN {
            return Err(format!(
                "`reload_interval_ms` must be at least {RELOAD_MS_MIN}, not {}",
                self.reload_interval_ms
            ));
        }
        if self.keep_alive_timeout_ms > KEEP_ALIVE_MS_MAX {
            return Err(format!(
                "`keep_alive_timeout_ms` must be at most {KEEP_ALIVE_MS_MAX}, not {}: idle connections count \
                 towards `connections_max`",
                self.keep_alive_timeout_ms
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
        if !self.shortest_prefill_first_factor.is_finite()
            || self.shortest_prefill_first_factor < 0.0
        {
            return Err("`shortest_prefill_first_factor` must be a number of at least 0".into());
        }
        if self.index_blocks_max < INDEX_BLOCKS_MIN {
            return Err(format!(
                "`index_blocks_max` must be at least {INDEX_BLOCKS_MIN}, not {}",
                self.index_blocks_max
            ));
        }
        let NetworkConfig { latency_us, bytes_per_s } = self.network;
        check_way("network", latency_us, bytes_per_s)?;
        check_way("ssd", self.ssd.latency_us, self.ssd.bytes_per_s)?;
        self.balance.check()?;
        self.contexts.check()?;
        if self.buffered_bodies_bytes_max < self.body_bytes_max {
            return Err("`buffered_bodies_bytes_max` must be at least `body_bytes_max`".into());
        }
        for (index, model) in self.models.iter().enumerate() {
            if model.name.is_empty() {
                return Err(format!("`models[{index}].name` must not be empty"));
            }
            if self.models[..index].iter().any(|other| other.name == model.name) {
                return Err(format!("`models` contains \"{}\" twice", model.name));
            }
        }
        Ok(())
    }
}

fn check_way(name: &str, latency_us: u64, bytes_per_s: u64) -> Result<(), String> {
    if bytes_per_s < BYTES_PER_S_MIN {
        return Err(format!(
            "`{name}.bytes_per_s` must be at least {BYTES_PER_S_MIN}, not {bytes_per_s}: the unit is bytes \
             per second"
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
        refused(|balance| balance.sample_interval_ms = 9, "`balance.sample_interval_ms`");
        refused(|balance| balance.window_ms = 499, "`balance.window_ms`");
        refused(|balance| balance.window_ms = 500 * 4_096 + 1, "`balance.window_ms`");
        refused(
            |balance| balance.concurrent_role_changes_max = 0,
            "`balance.concurrent_role_changes_max`",
        );
        refused(|balance| balance.prefill_instances_min = 0, "`balance.prefill_instances_min`");
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
        refused(
            |contexts| contexts.concurrent_creates_max = 0,
            "`contexts.concurrent_creates_max`",
        );
        refused(
            |contexts| contexts.concurrent_node_calls_max = 0,
            "`contexts.concurrent_node_calls_max`",
        );
        refused(|contexts| contexts.node_call_timeout_ms = 0, "`contexts.node_call_timeout_ms`");
        refused(|contexts| contexts.persist_timeout_ms = 0, "`contexts.persist_timeout_ms`");
        refused(|contexts| contexts.replicas_default = 0, "`contexts.replicas_default`");
        refused(|contexts| contexts.replicas_default = 9, "`contexts.replicas_default`");
    }

    #[test]
    fn requests_may_only_ask_for_less_unless_it_is_said() {
        let config = Config { ttft_objective_ms: 700, tbt_objective_ms: 30, ..Config::default() };
        assert_eq!((config.ttft_ms_max(), config.tbt_ms_max()), (700, 30));
        assert_eq!(config.check(), Ok(()));
        let wider = Config {
            ttft_objective_max_ms: Some(5_000),
            tbt_objective_max_ms: Some(60),
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
        refused(|config| config.ttft_objective_max_ms = Some(600_001), "`request_timeout_ms`");
        refused(|config| config.request_timeout_ms = 3_600_001, "`request_timeout_ms`");
        refused(|config| config.ttft_objective_min_ms = 701, "`ttft_objective_min_ms`");
        refused(|config| config.tbt_objective_min_ms = 31, "`tbt_objective_min_ms`");
    }
}
