//! A model's weights: their published names and shapes, checked before anything large is read.

#![forbid(unsafe_code)]

use std::path::Path;

use kvasir_attention::Precision;

use super::attention::{Attention, QueryProjection};
use super::config::{ExpertsConfig, IndexerConfig};
use super::files::WeightFiles;
use super::fingerprint::fingerprint;
use super::indexer::Indexer;
use super::math::Matrix;
use super::mlp::Mlp;
use super::moe::Moe;
use super::rope::Rope;
use super::{ModelConfig, ModelError};

/// How a model is loaded and runs.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// Threads of the large products; 1 starts none.
    pub threads: usize,
    /// What products of attention may be rounded to.
    pub precision: Precision,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions { threads: 1, precision: Precision::F32 }
    }
}

/// What a folder holds, known without reading the weights.
#[derive(Debug, Clone)]
pub struct ModelDescription {
    pub config: ModelConfig,
    /// Bytes of the weight files.
    pub weights_bytes: u64,
    /// Bytes of memory that the loaded weights take: 4 for each number.
    pub memory_bytes: u64,
}

/// Loaded weights. Shared by reference; a step changes only its workspace and the cache.
#[derive(Debug)]
pub struct Model {
    pub(super) config: ModelConfig,
    pub(super) threads: usize,
    pub(super) precision: Precision,
    pub(super) rope: Rope,
    pub(super) embedding: Matrix,
    pub(super) layers: Vec<Layer>,
    pub(super) norm: Vec<f32>,
    /// `None` when the embedding is used again.
    pub(super) head: Option<Matrix>,
    fingerprint: [u8; 32],
}

#[derive(Debug)]
pub(super) struct Layer {
    pub attention_norm: Vec<f32>,
    pub attention: Attention,
    pub feed_norm: Vec<f32>,
    pub feed: Feed,
}

#[derive(Debug)]
pub(super) enum Feed {
    Dense(Mlp),
    Experts(Moe),
}

impl Model {
    /// Loads a folder as Hugging Face publishes it: config.json and safetensors.
    ///
    /// # Errors
    /// [`ModelError`], one sentence that names the file and what is wrong with it.
    pub fn load(dir: &Path, options: LoadOptions) -> Result<Model, ModelError> {
        let config = ModelConfig::read(dir)?;
        let files = WeightFiles::open(dir)?;
        let mut plan = Plan { files: &files, read: false, values: 0 };
        build(&mut plan, &config)?;
        plan.read = true;
        let parts = build(&mut plan, &config)?;
        Ok(Model {
            threads: options.threads.max(1),
            precision: options.precision,
            rope: Rope::new(&config.rope, config.rope_dims),
            fingerprint: fingerprint(dir, &files)?,
            embedding: parts.embedding,
            layers: parts.layers,
            norm: parts.norm,
            head: parts.head,
            config,
        })
    }

    /// Checks the configuration, and names, shapes, types and file lengths of all weights, without
    /// reading the weights.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn describe(dir: &Path) -> Result<ModelDescription, ModelError> {
        let config = ModelConfig::read(dir)?;
        let files = WeightFiles::open(dir)?;
        let mut plan = Plan { files: &files, read: false, values: 0 };
        build(&mut plan, &config)?;
        let memory_bytes = plan.values * size_of::<f32>() as u64;
        let weights_bytes = files.files().iter().map(|file| file.bytes).sum();
        Ok(ModelDescription { config, weights_bytes, memory_bytes })
    }

    /// Bytes of memory that loading takes.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn memory_needed(dir: &Path) -> Result<u64, ModelError> {
        Model::describe(dir).map(|description| description.memory_bytes)
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// BLAKE3 over config.json and the weight files, in full up to 1 GiB and sampled beyond.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }
}

/// Goes through all weights: first only to check and count them, then to read them.
struct Plan<'a> {
    files: &'a WeightFiles,
    read: bool,
    values: u64,
}

impl Plan<'_> {
    fn tensor(
        &mut self,
        name: &str,
        shape: &[usize],
        into: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        if self.read {
            return self.files.read(name, shape, into);
        }
        self.values += shape.iter().product::<usize>() as u64;
        self.files.check(name, shape)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let mut values = Vec::new();
        self.tensor(name, &[len], &mut values)?;
        Ok(values)
    }

    fn matrix(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Matrix, ModelError> {
        let mut values = Vec::new();
        self.tensor(name, &[outputs, inputs], &mut values)?;
        Ok(Matrix { values, outputs, inputs })
    }

    fn mlp(&mut self, at: &str, hidden: usize, width: usize) -> Result<Mlp, ModelError> {
        let mut gate_up = Matrix { values: Vec::new(), outputs: 2 * width, inputs: hidden };
        if self.read {
            gate_up.values.reserve_exact(2 * width * hidden);
        }
        for part in ["gate_proj", "up_proj"] {
            let name = format!("{at}.{part}.weight");
            self.tensor(&name, &[width, hidden], &mut gate_up.values)?;
        }
        let down = self.matrix(&format!("{at}.down_proj.weight"), hidden, width)?;
        Ok(Mlp { gate_up, down })
    }
}

struct Parts {
    embedding: Matrix,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    head: Option<Matrix>,
}

fn build(plan: &mut Plan<'_>, config: &ModelConfig) -> Result<Parts, ModelError> {
    let (vocab, hidden) = (config.vocab, config.hidden);
    Ok(Parts {
        embedding: plan.matrix("model.embed_tokens.weight", vocab, hidden)?,
        layers: (0..config.layers)
            .map(|layer| build_layer(plan, config, layer))
            .collect::<Result<_, _>>()?,
        norm: plan.vector("model.norm.weight", hidden)?,
        head: match config.tied {
            true => None,
            false => Some(plan.matrix("lm_head.weight", vocab, hidden)?),
        },
    })
}

fn build_layer(
    plan: &mut Plan<'_>,
    config: &ModelConfig,
    layer: usize,
) -> Result<Layer, ModelError> {
    let at = format!("model.layers.{layer}");
    let hidden = config.hidden;
    Ok(Layer {
        attention_norm: plan.vector(&format!("{at}.input_layernorm.weight"), hidden)?,
        attention: build_attention(plan, config, &format!("{at}.self_attn"))?,
        feed_norm: plan.vector(&format!("{at}.post_attention_layernorm.weight"), hidden)?,
        feed: match config.experts_of(layer) {
            None => Feed::Dense(plan.mlp(&format!("{at}.mlp"), hidden, config.intermediate)?),
            Some(experts) => {
                Feed::Experts(build_experts(plan, hidden, experts, &format!("{at}.mlp"))?)
            }
        },
    })
}

fn build_attention(
    plan: &mut Plan<'_>,
    config: &ModelConfig,
    at: &str,
) -> Result<Attention, ModelError> {
    let (hidden, heads, rank) = (config.hidden, config.heads, config.rank);
    let queries = heads * config.query_width();
    let query = match config.query_rank {
        None => {
            QueryProjection::Full(plan.matrix(&format!("{at}.q_proj.weight"), queries, hidden)?)
        }
        Some(low) => QueryProjection::LowRank {
            down: plan.matrix(&format!("{at}.q_a_proj.weight"), low, hidden)?,
            norm: plan.vector(&format!("{at}.q_a_layernorm.weight"), low)?,
            up: plan.matrix(&format!("{at}.q_b_proj.weight"), queries, low)?,
        },
    };
    let row = config.row_width();
    Ok(Attention {
        query,
        latent: plan.matrix(&format!("{at}.kv_a_proj_with_mqa.weight"), row, hidden)?,
        latent_norm: plan.vector(&format!("{at}.kv_a_layernorm.weight"), rank)?,
        expand: plan.matrix(
            &format!("{at}.kv_b_proj.weight"),
            heads * (config.nope + config.value),
            rank,
        )?,
        output: plan.matrix(&format!("{at}.o_proj.weight"), hidden, heads * config.value)?,
        indexer: match config.indexer {
            None => None,
            Some(sizes) => Some(build_indexer(plan, config, sizes, &format!("{at}.indexer"))?),
        },
    })
}

fn build_indexer(
    plan: &mut Plan<'_>,
    config: &ModelConfig,
    sizes: IndexerConfig,
    at: &str,
) -> Result<Indexer, ModelError> {
    let IndexerConfig { heads, width, .. } = sizes;
    let low = config.query_rank.unwrap_or(config.hidden);
    Ok(Indexer {
        sizes,
        rope_dims: config.rope_dims,
        query: plan.matrix(&format!("{at}.wq_b.weight"), heads * width, low)?,
        key: plan.matrix(&format!("{at}.wk.weight"), width, config.hidden)?,
        key_norm: plan.vector(&format!("{at}.k_norm.weight"), width)?,
        key_bias: plan.vector(&format!("{at}.k_norm.bias"), width)?,
        weights: plan.matrix(&format!("{at}.weights_proj.weight"), heads, config.hidden)?,
    })
}

fn build_experts(
    plan: &mut Plan<'_>,
    hidden: usize,
    config: &ExpertsConfig,
    at: &str,
) -> Result<Moe, ModelError> {
    Ok(Moe {
        gate: plan.matrix(&format!("{at}.gate.weight"), config.experts, hidden)?,
        experts: (0..config.experts)
            .map(|e| plan.mlp(&format!("{at}.experts.{e}"), hidden, config.intermediate))
            .collect::<Result<_, _>>()?,
        shared: match config.shared_intermediate {
            0 => None,
            width => Some(plan.mlp(&format!("{at}.shared_experts"), hidden, width)?),
        },
        config: config.clone(),
    })
}
