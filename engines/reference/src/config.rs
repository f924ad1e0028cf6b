//! What an operator can set.

#![forbid(unsafe_code)]

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;

use kvasir_proto::v1;
use kvasir_transfer::{Domain, TransferTls};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::KvDtype;

/// Which legs of a request the engine takes.
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

/// What products of attention may be rounded to.
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
    /// The engine's name; unique in the cluster.
    pub instance_id: String,
    /// What it runs on, as in "h100-tp8", at most 128 bytes; may be empty. A conductor takes engines of one type to
    /// be equally fast until it has measured each, and may have a profile of the type.
    pub instance_type: String,
    /// The legs of requests that it takes: `prefill`, `decode` or `both`.
    pub role: Role,
    /// The folder of the model, as Hugging Face publishes it: config.json, tokenizer.json and
    /// safetensors.
    pub model: PathBuf,
    /// The name that clients ask for.
    pub model_name: String,
    /// The `attach_dir` of the store node on this host that the engine attaches to.
    pub attach_dir: PathBuf,
    /// Where the engine answers gRPC, `/metrics`, `/healthz` and `/readyz`.
    pub listen: SocketAddr,
    /// Where conductors reach the engine, as `host:port`, when that is not `listen`.
    pub advertise: Option<String>,
    /// Prompt tokens that one step computes at most, over all sequences.
    pub chunk_tokens: u32,
    /// Tokens of a block, which is a page and a slot. All engines of a cluster agree on it.
    pub block_tokens: u32,
    /// How the cache holds its numbers: `f32` or `bf16`. All engines of a cluster agree on it.
    pub kv_dtype: KvDtype,
    /// What products of attention may be rounded to, here and where rows are attended elsewhere: `f32`, or `bf16` where
    /// that is faster, which `kv_dtype` must be then. Engines that differ in it share no cache: the model of one is
    /// another model than that of the other, and one of them is served.
    pub attention_precision: Precision,
    /// Threads of the large matrix products.
    pub threads: u32,
    /// Sequences that take part in steps at once, at most.
    pub max_running: u32,
    /// Sequences that wait beyond those, at most; more are refused.
    pub max_waiting: u32,
    /// How long a decoding sequence waits for a slot when the node has none, in milliseconds, before
    /// the youngest one that waits is given up.
    pub grow_wait_ms: u32,
    /// How long requests may go on after the engine was told to stop, in milliseconds.
    pub drain_ms: u32,
    /// A file that gets a line of JSON for each step and layer, with the time on CLOCK_MONOTONIC in
    /// microseconds at which the layer was computed.
    pub layer_log: Option<PathBuf>,
    /// Attention over blocks that other nodes hold.
    pub routes: Routes,
    /// TLS for routed queries over TCP: on when its three files are set, and then it must be on at every node.
    pub transfer_tls: TransferTls,
}

/// How queries go to nodes that hold blocks, and partial results come back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Routes {
    /// How nodes are reached where they can be: `shm`, through shared memory on one host, or `tcp`.
    /// Otherwise it is tcp.
    pub domain: Domain,
    /// Where partial results come in over TCP; port 0 takes any free port.
    pub listen: SocketAddr,
    /// How long one layer waits for the partial results of its holders, in milliseconds. When one has not
    /// come by then, the blocks are computed here.
    pub deadline_ms: u32,
    /// A holder that does not answer a call for so long, in milliseconds, is not used.
    pub call_timeout_ms: u32,
    /// Bytes of queries that are sent in a second at most; 0 for no limit.
    pub throttle_bytes_per_s: u64,
    /// Tensor-parallel ranks that the heads are divided among, equally: each sends the query rows of its own to
    /// the holder's rank of its number (`routes.ranks` there). This engine computes all of them itself.
    pub ranks: u32,
}

impl Default for Routes {
    fn default() -> Self {
        Routes {
            domain: Domain::Shm,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            deadline_ms: 1_000,
            call_timeout_ms: 5_000,
            throttle_bytes_per_s: 0,
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
            model: PathBuf::from("configs/models/tiny-deepseek-v2"),
            model_name: "tiny-deepseek-v2".to_owned(),
            attach_dir: PathBuf::from("run/node-0"),
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 7300)),
            advertise: None,
            chunk_tokens: 512,
            block_tokens: 64,
            kv_dtype: KvDtype::F32,
            attention_precision: Precision::F32,
            threads: 1,
            max_running: 32,
            max_waiting: 256,
            grow_wait_ms: 2_000,
            drain_ms: 5_000,
            layer_log: None,
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
            (self.chunk_tokens == 0, "`chunk_tokens` is 0; a step must compute something"),
            (self.block_tokens == 0, "`block_tokens` is 0; a block has at least one token"),
            (
                self.attention_precision == Precision::Bf16 && self.kv_dtype != KvDtype::Bf16,
                "`attention_precision` is `bf16`, which is for rows of bf16: set `kv_dtype` to `bf16` too",
            ),
            (self.threads == 0, "`threads` is 0; at least one thread computes"),
            (
                self.listen.ip().is_unspecified() && self.advertise.is_none(),
                "`listen` is on all addresses, so `advertise` must say which one conductors reach",
            ),
            (
                !matches!(self.routes.domain, Domain::Shm | Domain::Tcp),
                "`routes.domain` is neither `shm` nor `tcp`",
            ),
            (
                self.transfer_tls.files().is_err(),
                "`transfer_tls` needs `certificate`, `key` and `authority`, or none of them",
            ),
            (self.routes.ranks == 0, "`routes.ranks` is 0; at least one rank sends queries"),
            (
                self.routes.call_timeout_ms == 0,
                "`routes.call_timeout_ms` is 0; no holder could ever answer",
            ),
            (self.max_running == 0, "`max_running` is 0; no request could ever run"),
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
