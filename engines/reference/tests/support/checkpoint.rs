//! Random DeepSeek-V2 checkpoints of any size, under the published tensor names.
//!
//! Self-contained, so that other test packages can take it in by path.

use std::path::Path;

use half::bf16;
use serde_json::{Value, json};

/// A random checkpoint's sizes.
#[derive(Debug, Clone)]
pub(crate) struct Sizes {
    pub hidden: usize,
    pub layers: usize,
    pub dense_layers: usize,
    pub heads: usize,
    pub nope: usize,
    pub rope: usize,
    pub value: usize,
    pub rank: usize,
    pub query_rank: Option<usize>,
    pub indexer: Option<IndexerSizes>,
    pub intermediate: usize,
    pub experts: usize,
    pub experts_per_token: usize,
    pub expert_intermediate: usize,
    pub shared_experts: usize,
    /// Groups, and how many of them are used.
    pub groups: Option<(usize, usize)>,
    pub yarn: bool,
    pub tied: bool,
    /// The tiny model's tokenizer has 1,024 tokens.
    pub vocab: usize,
    pub positions_max: usize,
    /// Files that the weights are spread over.
    pub files: usize,
}

/// An indexer's heads, their width, and how many rows a token attends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IndexerSizes {
    pub heads: usize,
    pub width: usize,
    pub topk: usize,
}

impl Default for Sizes {
    /// Unlike the tiny models in every number.
    fn default() -> Self {
        Sizes {
            hidden: 96,
            layers: 5,
            dense_layers: 2,
            heads: 3,
            nope: 24,
            rope: 16,
            value: 20,
            rank: 64,
            query_rank: Some(40),
            indexer: None,
            intermediate: 160,
            experts: 6,
            experts_per_token: 3,
            expert_intermediate: 56,
            shared_experts: 1,
            groups: Some((3, 2)),
            yarn: true,
            tied: false,
            vocab: 1024,
            positions_max: 2048,
            files: 1,
        }
    }
}

/// Writes a checkpoint with random bf16 weights under the published tensor names, and the
/// tokenizer of another model.
pub(crate) fn random_checkpoint(dir: &Path, seed: u64, sizes: &Sizes, tokenizer_from: &Path) {
    std::fs::create_dir_all(dir).expect("a folder");
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tokenizer_from.join(name), dir.join(name)).expect("a tokenizer");
    }
    let config = serde_json::to_string_pretty(&config_of(sizes)).expect("json");
    std::fs::write(dir.join("config.json"), config).expect("config.json");
    let mut random = Random(seed);
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = shapes(sizes)
        .into_iter()
        .map(|(name, shape)| {
            let values = random.tensor(&name, &shape);
            (name, shape, values)
        })
        .collect();
    let mut weight_map = serde_json::Map::new();
    for file in 0..sizes.files {
        let name = match sizes.files {
            1 => "model.safetensors".to_string(),
            n => format!("model-{:05}-of-{n:05}.safetensors", file + 1),
        };
        let own: Vec<_> = tensors.iter().skip(file).step_by(sizes.files).collect();
        for (tensor, _, _) in &own {
            weight_map.insert(tensor.clone(), json!(name));
        }
        std::fs::write(dir.join(name), safetensors_bytes(&own)).expect("weights");
    }
    if sizes.files > 1 {
        let index = json!({ "metadata": {}, "weight_map": weight_map }).to_string();
        std::fs::write(dir.join("model.safetensors.index.json"), index).expect("an index");
    }
}

fn config_of(sizes: &Sizes) -> Value {
    let yarn = json!({
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.8, "mscale_all_dim": 0.6,
    });
    let mut config = json!({
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": false,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "first_k_dense_replace": sizes.dense_layers,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "kv_lora_rank": sizes.rank,
        "max_position_embeddings": sizes.positions_max,
        "moe_intermediate_size": sizes.expert_intermediate,
        "moe_layer_freq": 1,
        "n_group": sizes.groups.map_or(1, |(groups, _)| groups),
        "topk_group": sizes.groups.map_or(1, |(_, used)| used),
        "topk_method": if sizes.groups.is_some() { "group_limited_greedy" } else { "greedy" },
        "n_routed_experts": sizes.experts,
        "n_shared_experts": sizes.shared_experts,
        "norm_topk_prob": false,
        "num_attention_heads": sizes.heads,
        "num_experts_per_tok": sizes.experts_per_token,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.query_rank,
        "qk_nope_head_dim": sizes.nope,
        "qk_rope_head_dim": sizes.rope,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": if sizes.yarn { yarn } else { Value::Null },
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": sizes.tied,
        "torch_dtype": "bfloat16",
        "v_head_dim": sizes.value,
        "vocab_size": sizes.vocab,
    });
    if let Some(IndexerSizes { heads, width, topk }) = sizes.indexer {
        config["index_n_heads"] = json!(heads);
        config["index_head_dim"] = json!(width);
        config["index_topk"] = json!(topk);
    }
    config
}

fn shapes(sizes: &Sizes) -> Vec<(String, Vec<usize>)> {
    let mut all: Vec<(String, Vec<usize>)> = Vec::new();
    let mut push = |name: String, shape: &[usize]| all.push((name, shape.to_vec()));
    let hidden = sizes.hidden;
    let width = sizes.nope + sizes.rope;
    push("model.embed_tokens.weight".into(), &[sizes.vocab, hidden]);
    push("model.norm.weight".into(), &[hidden]);
    if !sizes.tied {
        push("lm_head.weight".into(), &[sizes.vocab, hidden]);
    }
    for layer in 0..sizes.layers {
        let at = format!("model.layers.{layer}");
        push(format!("{at}.input_layernorm.weight"), &[hidden]);
        push(format!("{at}.post_attention_layernorm.weight"), &[hidden]);
        let attention = format!("{at}.self_attn");
        match sizes.query_rank {
            None => push(format!("{attention}.q_proj.weight"), &[sizes.heads * width, hidden]),
            Some(low) => {
                push(format!("{attention}.q_a_proj.weight"), &[low, hidden]);
                push(format!("{attention}.q_a_layernorm.weight"), &[low]);
                push(format!("{attention}.q_b_proj.weight"), &[sizes.heads * width, low]);
            }
        }
        let row = sizes.rank + sizes.rope;
        push(format!("{attention}.kv_a_proj_with_mqa.weight"), &[row, hidden]);
        push(format!("{attention}.kv_a_layernorm.weight"), &[sizes.rank]);
        let expanded = sizes.heads * (sizes.nope + sizes.value);
        push(format!("{attention}.kv_b_proj.weight"), &[expanded, sizes.rank]);
        push(format!("{attention}.o_proj.weight"), &[hidden, sizes.heads * sizes.value]);
        if let Some(IndexerSizes { heads, width, .. }) = sizes.indexer {
            let at = format!("{attention}.indexer");
            let low = sizes.query_rank.unwrap_or(hidden);
            push(format!("{at}.wq_b.weight"), &[heads * width, low]);
            push(format!("{at}.wk.weight"), &[width, hidden]);
            push(format!("{at}.k_norm.weight"), &[width]);
            push(format!("{at}.k_norm.bias"), &[width]);
            push(format!("{at}.weights_proj.weight"), &[heads, hidden]);
        }
        let mut mlp = |at: &str, width: usize| {
            push(format!("{at}.gate_proj.weight"), &[width, hidden]);
            push(format!("{at}.up_proj.weight"), &[width, hidden]);
            push(format!("{at}.down_proj.weight"), &[hidden, width]);
        };
        if layer < sizes.dense_layers {
            mlp(&format!("{at}.mlp"), sizes.intermediate);
            continue;
        }
        for expert in 0..sizes.experts {
            mlp(&format!("{at}.mlp.experts.{expert}"), sizes.expert_intermediate);
        }
        let shared = sizes.shared_experts * sizes.expert_intermediate;
        mlp(&format!("{at}.mlp.shared_experts"), shared);
        push(format!("{at}.mlp.gate.weight"), &[sizes.experts, hidden]);
    }
    all
}

fn safetensors_bytes(tensors: &[&(String, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, shape, values) in tensors {
        let from = data.len();
        data.extend(values);
        let info = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [from, data.len()] });
        header.insert(name.clone(), info);
    }
    let header = Value::Object(header).to_string().into_bytes();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    file
}

/// SplitMix64, and normal values by Box and Muller.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        let (a, b) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }

    /// Gains that keep the residual stream alive and the logits well apart.
    fn tensor(&mut self, name: &str, shape: &[usize]) -> Vec<u8> {
        let count: usize = shape.iter().product();
        let mut bytes = Vec::with_capacity(2 * count);
        for _ in 0..count {
            let value = match shape {
                [_] if name.ends_with("bias") => 0.2 * self.normal(),
                [_] => 1.0 + 0.2 * self.normal(),
                [_, inputs] => {
                    let gain = if name.contains("lm_head") { 12.0 } else { 1.6 };
                    let scale =
                        if name.contains("embed") { 1.0 } else { gain / (*inputs as f64).sqrt() };
                    scale * self.normal()
                }
                _ => unreachable!("weights are vectors and matrices"),
            };
            bytes.extend(bf16::from_f64(value).to_le_bytes());
        }
        bytes
    }
}
