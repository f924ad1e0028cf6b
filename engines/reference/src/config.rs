//! What an operator can set.

#![forbid(unsafe_code)]

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use kvasir_proto::v1;
use kvasir_transfer::{Domain, TransferTls};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::KvDtype;

/// The requests that an engine accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    Prefill,
    Decode,
    Both,
}

impl Role {
    /// As the wire has it.
    pub fn to_wire(self) -> v1::Role {
        match self {
            Role::Prefill => v1::Role::Prefill,
            Role::Decode => v1::Role::Decode,
            Role::Both => v1::Role::Both,
        }
    }
}

/// Precision to which attention may round its products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    F32,
    Bf16,
}

impl Precision {
    /// Rows that were computed in it are other rows: under what fingerprint they are cached, of one of the model's.
    pub fn fingerprint_of_rows(self, model: [u8; 32]) -> [u8; 32] {
        match self {
            Precision::F32 => model,
            Precision::Bf16 => {
                blake3::derive_key("kvasir 2026 rows of attention in bf16 v1", &model)
            }
        }
    }

    /// As kernels have it.
    pub fn of_kernels(self) -> kvasir_attention::Precision {
        match self {
            Precision::F32 => kvasir_attention::Precision::F32,
            Precision::Bf16 => kvasir_attention::Precision::Bf16,
        }
    }

    /// As the wire has it.
    pub fn to_wire(self) -> v1::Precision {
        match self {
            Precision::F32 => v1::Precision::F32,
            Precision::Bf16 => v1::Precision::Bf16,
        }
    }
}

/// Configuration of the reference engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The engine's name, unique in the cluster.
    pub instance_id: String,
    /// The engine's hardware, as in "h100-tp8", at most 128 bytes, optional. A conductor assumes that engines of
    /// one type are equally fast until it has measured each one. A conductor may have a profile of the type.
    pub instance_type: String,
    /// The requests that the engine accepts: `prefill`, `decode` or `both`.
    pub role: Role,
    /// Directory of the model in Hugging Face format: config.json, tokenizer.json and safetensors.
    pub model_dir: PathBuf,
    /// The model's name in requests.
    pub model_name: String,
    /// The `attach_dir` of the store node on this host.
    pub attach_dir: PathBuf,
    /// Address of gRPC, `/metrics`, `/healthz` and `/readyz`.
    pub listen: SocketAddr,
    /// Address at which conductors reach the engine, as `host:port`. The default is `listen`.
    pub advertise_address: Option<String>,
    /// Prompt tokens of all sequences together that one step computes.
    pub prefill_chunk_tokens: u32,
    /// Tokens of a block, which is also a page and a slot. All engines of a model must agree; the conductor serves
    /// only one of several kinds.
    pub block_tokens: u32,
    /// Number format of the cache: `f32` or `bf16`. All engines of a model must agree; the conductor serves only
    /// one of several kinds.
    pub kv_dtype: KvDtype,
    /// Precision to which attention may round its products, locally and on holders of routed attention: `f32`, or
    /// `bf16`, which is faster on some processors and needs `kv_dtype = "bf16"`. Engines with different precisions
    /// share no cache: they count as different models, and the conductor serves one of them.
    pub attention_precision: Precision,
    /// Threads of the large matrix products.
    pub threads: u32,
    /// Sequences that run in steps at once.
    pub running_requests_max: u32,
    /// Sequences that wait beyond those. Further ones are refused.
    pub waiting_requests_max: u32,
    /// Time, in milliseconds, that a decoding sequence waits for a free slot of the node. After it the youngest
    /// waiting sequence fails.
    pub slot_wait_timeout_ms: u32,
    /// Time, in milliseconds, that requests may run after the engine was told to stop.
    pub drain_timeout_ms: u32,
    /// File to which the engine writes a line of JSON for each step and layer, with the time of completion in
    /// microseconds of CLOCK_MONOTONIC.
    pub layer_log_file: Option<PathBuf>,
    /// Routed attention over blocks on other nodes.
    pub routes: Routes,
    /// TLS for routed queries over TCP. It is on when the three files are set. All nodes must agree.
    pub transfer_tls: TransferTls,
}

/// The transports that routed queries support, which are not all transports.
fn routed_transports(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({ "enum": ["shm", "tcp"] })
}

/// How queries reach the nodes that hold blocks, and how partial results return.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Routes {
    /// Preferred transport to holders: `shm`, shared memory on one host, or `tcp`. For peers that it does not
    /// reach, the engine uses TCP.
    #[schemars(schema_with = "routed_transports")]
    pub transport: Domain,
    /// Address for partial results over TCP. Port 0 takes any free port.
    pub listen: SocketAddr,
    /// Time, in milliseconds, that one layer waits for the partial results of its holders. After it the engine
    /// recomputes the blocks.
    pub answer_timeout_ms: u32,
    /// Timeout, in milliseconds, of a call to a holder. After it the engine does not use the holder.
    pub call_timeout_ms: u32,
    /// Limit of the bytes of queries per second. 0 is no limit.
    pub send_bytes_per_s_max: u64,
    /// Tensor-parallel ranks among which the heads are divided equally. Each rank sends the query rows of its heads
    /// to the rank of the same number at the holder (`routes.ranks` there). This engine computes all ranks itself.
    pub ranks: u32,
}

impl Default for Routes {
    fn default() -> Self {
        Routes {
            transport: Domain::Shm,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            answer_timeout_ms: 1_000,
            call_timeout_ms: 5_000,
            send_bytes_per_s_max: 0,
            ranks: 1,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            instance_id: "engine-0".to_owned(),
            instance_type: String::new(),
            role: Role::Both,
            model_dir: PathBuf::from("configs/models/tiny-deepseek-v2"),
            model_name: "tiny-deepseek-v2".to_owned(),
            attach_dir: PathBuf::from("/run/kvasir/node"),
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 7300)),
            advertise_address: None,
            prefill_chunk_tokens: 512,
            block_tokens: 64,
            kv_dtype: KvDtype::F32,
            attention_precision: Precision::F32,
            threads: 1,
            running_requests_max: 32,
            waiting_requests_max: 256,
            slot_wait_timeout_ms: 2_000,
            drain_timeout_ms: 5_000,
            layer_log_file: None,
            routes: Routes::default(),
            transfer_tls: TransferTls::default(),
        }
    }
}

impl Config {
    /// What is wrong with it, in a sentence, if something is.
    pub(crate) fn flaw(&self) -> Option<&'static str> {
        let flaws = [
            (self.instance_id.is_empty(), "`instance_id` is empty"),
            (self.model_name.is_empty(), "`model_name` is empty"),
            (self.prefill_chunk_tokens == 0, "`prefill_chunk_tokens` must be at least 1"),
            (self.block_tokens == 0, "`block_tokens` must be at least 1"),
            (
                self.attention_precision == Precision::Bf16 && self.kv_dtype != KvDtype::Bf16,
                "`attention_precision` is `bf16`: set `kv_dtype` to `bf16` too",
            ),
            (self.threads == 0, "`threads` must be at least 1"),
            (
                self.listen.ip().is_unspecified() && self.advertise_address.is_none(),
                "`listen` is an unspecified address: set `advertise_address` to an address that conductors reach",
            ),
            (
                !matches!(self.routes.transport, Domain::Shm | Domain::Tcp),
                "`routes.transport` must be `shm` or `tcp`",
            ),
            (
                self.transfer_tls.files().is_err(),
                "`transfer_tls` needs all of `certificate_file`, `key_file` and `ca_file`, or none of them",
            ),
            (self.routes.ranks == 0, "`routes.ranks` must be at least 1"),
            (self.routes.call_timeout_ms == 0, "`routes.call_timeout_ms` must be at least 1"),
            (self.running_requests_max == 0, "`running_requests_max` must be at least 1"),
        ];
        flaws.into_iter().find_map(|(wrong, flaw)| wrong.then_some(flaw))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_rounded_only_where_rows_are() {
        let flaw = |attention_precision, kv_dtype| {
            Config { attention_precision, kv_dtype, ..Config::default() }.flaw()
        };
        let why = flaw(Precision::Bf16, KvDtype::F32).expect("rows of f32 keep their bits");
        assert!(why.contains("set `kv_dtype` to `bf16` too"), "{why}");
        assert_eq!(flaw(Precision::Bf16, KvDtype::Bf16), None);
        assert_eq!(flaw(Precision::F32, KvDtype::F32), None);
    }

    #[test]
    fn rows_of_another_precision_are_not_shared() {
        let of = |precision: Precision| precision.fingerprint_of_rows([7; 32]);
        assert_eq!(of(Precision::F32), [7; 32]);
        assert_ne!(of(Precision::Bf16), of(Precision::F32));
        assert_ne!(of(Precision::Bf16), Precision::Bf16.fingerprint_of_rows([8; 32]));
    }
}
