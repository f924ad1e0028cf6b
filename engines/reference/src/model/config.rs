//! config.json of a Hugging Face folder: what it says, checked, or a sentence on why the model is
//! not one that this engine runs.

#![forbid(unsafe_code)]

use std::path::Path;

use kvasir_proto::{SlotLayout, SlotRun};
use serde::Deserialize;
use serde_json::Value;

use super::moe::GROUPS_MAX;
use super::rope::{RopeConfig, Yarn};
use super::{KvDtype, ModelError};

/// What config.json says, checked: sizes are positive and bounded, and everything that shapes the
/// arithmetic is supported.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub vocab: usize,
    pub hidden: usize,
    pub layers: usize,
    pub heads: usize,
    /// Dimensions of a query head: without and with rotation.
    pub nope: usize,
    pub rope_dims: usize,
    /// Dimensions of a value head.
    pub value: usize,
    /// Width of the latent (`kv_lora_rank`).
    pub rank: usize,
    /// Width of the query's low-rank form, when there is one.
    pub query_rank: Option<usize>,
    /// Present when each token attends only the rows that score best.
    pub indexer: Option<IndexerConfig>,
    /// Width of the dense MLP.
    pub intermediate: usize,
    /// The first layers, which have a dense MLP; the others are mixtures of experts.
    pub dense_layers: usize,
    /// Present when any layer is a mixture.
    pub experts: Option<ExpertsConfig>,
    pub norm_epsilon: f32,
    pub rope: RopeConfig,
    /// The output matrix is the embedding.
    pub tied: bool,
    pub positions_max: u32,
    /// End-of-sequence tokens, of config.json and generation_config.json.
    pub eos: Vec<u32>,
}

/// What chooses the rows that a token attends, in every layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexerConfig {
    pub heads: usize,
    /// Of a head, and of the key that they share; the first of it are rotated.
    pub width: usize,
    /// Rows that a token attends, or all before it and itself where there are no more.
    pub topk: usize,
}

/// The mixture-of-experts layers.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsConfig {
    pub experts: usize,
    pub experts_per_token: usize,
    /// Width of one expert's MLP.
    pub intermediate: usize,
    /// Width of the shared experts' MLP; 0 when there is none.
    pub shared_intermediate: usize,
    pub groups: Option<Groups>,
    pub weighting: Weighting,
}

/// `group_limited_greedy`: experts are chosen only in the groups with the best single expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    pub groups: usize,
    pub groups_used: usize,
}

/// What becomes of the chosen experts' probabilities.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weighting {
    Scaled(f32),
    /// They sum to one, unscaled: as the model's own code has it.
    Normalised,
}

impl ModelConfig {
    /// Values of one cached row: the latent and the rotated key.
    pub fn row_width(&self) -> usize {
        self.rank + self.rope_dims
    }

    /// Values of one query head.
    pub fn query_width(&self) -> usize {
        self.nope + self.rope_dims
    }

    /// How a block of this model lies in a slot: layers one after another, a row for each token, and behind
    /// the rows of a layer its indexer's keys.
    ///
    /// # Panics
    /// When `block_tokens` is 0.
    pub fn layout(&self, block_tokens: u32, dtype: KvDtype) -> SlotLayout {
        let page_bytes = |width: usize| (width * dtype.bytes()) as u64 * u64::from(block_tokens);
        let rows = page_bytes(self.row_width());
        let keys = page_bytes(self.indexer.map_or(0, |indexer| indexer.width));
        let layer = |layer: u64| {
            let at = layer * (rows + keys);
            let rows = [SlotRun { offset_bytes: at, length_bytes: rows }];
            let keys = SlotRun { offset_bytes: at + rows[0].length_bytes, length_bytes: keys };
            rows.into_iter().chain(self.indexer.map(|_| keys)).collect()
        };
        let layers = self.layers as u64;
        SlotLayout::new(block_tokens, layers * (rows + keys), (0..layers).map(layer).collect())
            .expect("a model has layers and rows, and a block has tokens")
    }

    /// The mixture of a layer, or `None` when its MLP is dense.
    pub fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|_| layer >= self.dense_layers)
    }

    /// Reads config.json, and generation_config.json when there is one.
    ///
    /// # Errors
    /// [`ModelError`]
    pub fn read(dir: &Path) -> Result<Self, ModelError> {
        let path = dir.join("config.json");
        let text = std::fs::read(&path)
            .map_err(|source| ModelError::Read { path: path.clone(), source })?;
        let raw: Raw = serde_json::from_slice(&text)
            .map_err(|e| ModelError::Damaged { path: path.clone(), why: e.to_string() })?;
        let mut config = match raw.check() {
            Ok(config) => config,
            Err(Refusal::Unsupported(why)) => return Err(ModelError::Unsupported { path, why }),
            Err(Refusal::Damaged(why)) => return Err(ModelError::Damaged { path, why }),
        };
        config.eos.extend(generation_eos(dir)?);
        config.eos.sort_unstable();
        config.eos.dedup();
        Ok(config)
    }
}

fn generation_eos(dir: &Path) -> Result<Vec<u32>, ModelError> {
    #[derive(Deserialize)]
    struct Generation {
        eos_token_id: Option<OneOrMany>,
    }
    let path = dir.join("generation_config.json");
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ModelError::Read { path, source }),
    };
    let generation: Generation = serde_json::from_slice(&text)
        .map_err(|e| ModelError::Damaged { path, why: e.to_string() })?;
    Ok(OneOrMany::list(generation.eos_token_id))
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl OneOrMany {
    fn list(this: Option<Self>) -> Vec<u32> {
        match this {
            None => Vec::new(),
            Some(OneOrMany::One(id)) => vec![id],
            Some(OneOrMany::Many(ids)) => ids,
        }
    }
}

enum Refusal {
    Unsupported(String),
    Damaged(String),
}

/// config.json as it is written; unknown keys are other libraries' business.
#[derive(Debug, Deserialize)]
struct Raw {
    architectures: Option<Vec<String>>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    moe_intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    n_shared_experts: Option<usize>,
    n_routed_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    first_k_dense_replace: Option<usize>,
    moe_layer_freq: Option<usize>,
    kv_lora_rank: Option<usize>,
    q_lora_rank: Option<usize>,
    qk_nope_head_dim: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    v_head_dim: Option<usize>,
    index_n_heads: Option<usize>,
    index_head_dim: Option<usize>,
    index_topk: Option<usize>,
    topk_method: Option<String>,
    scoring_func: Option<String>,
    n_group: Option<usize>,
    topk_group: Option<usize>,
    #[serde(default)]
    norm_topk_prob: bool,
    routed_scaling_factor: Option<f64>,
    rms_norm_eps: Option<f64>,
    max_position_embeddings: Option<u32>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    hidden_act: Option<String>,
    #[serde(default)]
    tie_word_embeddings: bool,
    eos_token_id: Option<OneOrMany>,
    quantization_config: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct RawRope {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<u32>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    attention_factor: Option<f64>,
    truncate: Option<bool>,
}

/// Far above any model, far below where products of two sizes overflow.
const SIZE_MAX: usize = 1 << 24;

fn size(value: Option<usize>, key: &str) -> Result<usize, Refusal> {
    match value {
        Some(value) if (1..=SIZE_MAX).contains(&value) => Ok(value),
        Some(value) => {
            Err(Refusal::Damaged(format!("`{key}` is {value}; it must be 1 to {SIZE_MAX}")))
        }
        None => Err(Refusal::Damaged(format!("`{key}` is missing"))),
    }
}

/// A number that must be above 0.
fn positive(value: f64, key: &str) -> Result<f64, Refusal> {
    let good = value.is_finite() && value > 0.0;
    good.then_some(value)
        .ok_or_else(|| Refusal::Damaged(format!("`{key}` is {value}; it must be above 0")))
}

fn unless(supported: bool, why: impl FnOnce() -> String) -> Result<(), Refusal> {
    if supported { Ok(()) } else { Err(Refusal::Unsupported(why())) }
}

impl Raw {
    fn check(self) -> Result<ModelConfig, Refusal> {
        self.check_kind()?;
        let layers = size(self.num_hidden_layers, "num_hidden_layers")?;
        let dense_layers = match self.n_routed_experts {
            Some(_) => self.first_k_dense_replace.unwrap_or(0).min(layers),
            None => layers,
        };
        let rope_dims = size(self.qk_rope_head_dim, "qk_rope_head_dim")?;
        if !rope_dims.is_multiple_of(2) {
            return Err(Refusal::Damaged(format!(
                "`qk_rope_head_dim` is {rope_dims}; it must be even"
            )));
        }
        let positions_max = self.max_position_embeddings.filter(|&max| max > 0);
        let positions_max = positions_max
            .ok_or_else(|| Refusal::Damaged("`max_position_embeddings` is missing or 0".into()))?;
        Ok(ModelConfig {
            vocab: size(self.vocab_size, "vocab_size")?,
            hidden: size(self.hidden_size, "hidden_size")?,
            layers,
            heads: size(self.num_attention_heads, "num_attention_heads")?,
            nope: size(self.qk_nope_head_dim, "qk_nope_head_dim")?,
            rope_dims,
            value: size(self.v_head_dim, "v_head_dim")?,
            rank: size(self.kv_lora_rank, "kv_lora_rank")?,
            query_rank: match self.q_lora_rank {
                None => None,
                rank => Some(size(rank, "q_lora_rank")?),
            },
            indexer: self.indexer(rope_dims)?,
            intermediate: match dense_layers {
                0 => 0,
                _ => size(self.intermediate_size, "intermediate_size")?,
            },
            dense_layers,
            experts: if dense_layers < layers { Some(self.experts()?) } else { None },
            norm_epsilon: positive(self.rms_norm_eps.unwrap_or(1e-6), "rms_norm_eps")? as f32,
            rope: self.rope(positions_max)?,
            tied: self.tie_word_embeddings,
            positions_max,
            eos: OneOrMany::list(self.eos_token_id),
        })
    }

    fn check_kind(&self) -> Result<(), Refusal> {
        const KIND: &str = "DeepseekV2ForCausalLM";
        let kinds = self.architectures.as_deref().unwrap_or_default();
        unless(kinds.iter().any(|kind| kind == KIND), || match kinds {
            [] => {
                format!("`architectures` does not contain {KIND}, the only one that is supported")
            }
            _ => format!("the architecture is {}; only {KIND} is supported", kinds.join(", ")),
        })?;
        let activation = self.hidden_act.as_deref().unwrap_or("silu");
        unless(activation == "silu", || {
            format!("`hidden_act` is {activation}; only silu is supported")
        })?;
        unless(!self.attention_bias && !self.mlp_bias, || "the projections have biases".into())?;
        unless(self.quantization_config.as_ref().is_none_or(Value::is_null), || {
            "the weights are quantised; only f32, f16 and bf16 are supported".into()
        })?;
        let frequency = self.moe_layer_freq.unwrap_or(1);
        unless(frequency == 1, || format!("`moe_layer_freq` is {frequency}; only 1 is supported"))?;
        let scoring = self.scoring_func.as_deref().unwrap_or("softmax");
        unless(scoring == "softmax", || {
            format!("`scoring_func` is {scoring}; only softmax is supported")
        })
    }

    /// Three numbers, all or none of them.
    fn indexer(&self, rope_dims: usize) -> Result<Option<IndexerConfig>, Refusal> {
        if [self.index_n_heads, self.index_head_dim, self.index_topk] == [None; 3] {
            return Ok(None);
        }
        let heads = size(self.index_n_heads, "index_n_heads")?;
        let width = size(self.index_head_dim, "index_head_dim")?;
        let topk = size(self.index_topk, "index_topk")?;
        if width < rope_dims {
            let why = format!(
                "`index_head_dim` is {width}; it must be at least `qk_rope_head_dim`, {rope_dims}"
            );
            return Err(Refusal::Damaged(why));
        }
        Ok(Some(IndexerConfig { heads, width, topk }))
    }

    fn experts(&self) -> Result<ExpertsConfig, Refusal> {
        let experts = size(self.n_routed_experts, "n_routed_experts")?;
        let experts_per_token = size(self.num_experts_per_tok, "num_experts_per_tok")?;
        if experts_per_token > experts {
            return Err(Refusal::Damaged(format!(
                "`num_experts_per_tok` is {experts_per_token}; the model has only {experts} experts"
            )));
        }
        let intermediate = size(self.moe_intermediate_size, "moe_intermediate_size")?;
        let shared = self.n_shared_experts.unwrap_or(0);
        let shared_intermediate = shared.saturating_mul(intermediate);
        if shared_intermediate > SIZE_MAX {
            return Err(Refusal::Damaged(format!(
                "`n_shared_experts` is {shared}; it is too large"
            )));
        }
        let groups = match self.topk_method.as_deref().unwrap_or("greedy") {
            "greedy" => None,
            "group_limited_greedy" => Some(self.groups(experts)?),
            other => {
                let only = "only greedy and group_limited_greedy are supported";
                return Err(Refusal::Unsupported(format!("`topk_method` is {other}; {only}")));
            }
        };
        // With one expert a token there is nothing to normalise among, and the model's own code
        // scales instead.
        let weighting = if self.norm_topk_prob && experts_per_token > 1 {
            Weighting::Normalised
        } else {
            let scaling = self.routed_scaling_factor.unwrap_or(1.0);
            Weighting::Scaled(positive(scaling, "routed_scaling_factor")? as f32)
        };
        Ok(ExpertsConfig {
            experts,
            experts_per_token,
            intermediate,
            shared_intermediate,
            groups,
            weighting,
        })
    }

    fn groups(&self, experts: usize) -> Result<Groups, Refusal> {
        let groups = size(self.n_group, "n_group")?;
        let groups_used = size(self.topk_group, "topk_group")?;
        if !experts.is_multiple_of(groups) || groups_used > groups {
            return Err(Refusal::Damaged(format!(
                "cannot divide {experts} experts into {groups} equal groups with {groups_used} used"
            )));
        }
        unless(groups <= GROUPS_MAX, || {
            format!("`n_group` is {groups}; at most {GROUPS_MAX} are supported")
        })?;
        Ok(Groups { groups, groups_used })
    }

    /// `rope_theta` and `rope_scaling` as published; newer files carry `rope_parameters` instead.
    fn rope(&self, positions_max: u32) -> Result<RopeConfig, Refusal> {
        let raw = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let theta = raw.and_then(|raw| raw.rope_theta).or(self.rope_theta).unwrap_or(10_000.0);
        let theta = positive(theta, "rope_theta")?;
        let kind = raw.and_then(|raw| raw.rope_type.as_deref()).unwrap_or("default");
        let yarn = match (kind, raw) {
            ("yarn", Some(raw)) => Some(raw.yarn(positions_max)?),
            ("default", _) => None,
            _ => {
                let only = "only default and yarn are supported";
                return Err(Refusal::Unsupported(format!("the rope type is {kind}; {only}")));
            }
        };
        Ok(RopeConfig { theta, yarn })
    }
}

impl RawRope {
    fn yarn(&self, positions_max: u32) -> Result<Yarn, Refusal> {
        unless(self.truncate != Some(false), || {
            "the yarn ramp is not truncated; only `truncate` = true is supported".into()
        })?;
        let factor = self.factor.ok_or_else(|| Refusal::Damaged("yarn needs a `factor`".into()))?;
        let original = self.original_max_position_embeddings.unwrap_or(positions_max);
        let nonzero = |value: Option<f64>| value.filter(|&value| value != 0.0);
        Ok(Yarn {
            factor: positive(factor, "factor")?,
            original_positions: positive(f64::from(original), "original_max_position_embeddings")?,
            beta_fast: positive(self.beta_fast.unwrap_or(32.0), "beta_fast")?,
            beta_slow: positive(self.beta_slow.unwrap_or(1.0), "beta_slow")?,
            mscale: nonzero(self.mscale),
            mscale_all_dims: nonzero(self.mscale_all_dim),
            attention_factor: self.attention_factor,
        })
    }
}
