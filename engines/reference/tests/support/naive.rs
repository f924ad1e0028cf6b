//! An independent DeepSeek-V2: float64, one token at a time, keys and values of every head
//! expanded, no cache of latents, no batching; written from the conventions alone and sharing no
//! code with the engine. And random checkpoints of any size for both to run.
//!
//! Self-contained, so that other test packages can take it in by path.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

/// The model, weights widened to f64.
pub struct Naive {
    config: Value,
    tensors: BTreeMap<String, Vec<f64>>,
    /// Round latents and rotated keys to bf16, as a cache of that type holds them.
    pub round_cache: bool,
}

/// What a sequence has behind it: for each layer and head the keys and values so far.
#[derive(Default, Clone)]
pub struct Sequence {
    position: usize,
    keys: BTreeMap<(usize, usize), Vec<Vec<f64>>>,
    values: BTreeMap<(usize, usize), Vec<Vec<f64>>>,
}

impl Naive {
    pub fn load(dir: &Path) -> Naive {
        let config = std::fs::read(dir.join("config.json")).expect("config.json");
        let mut tensors = BTreeMap::new();
        for entry in std::fs::read_dir(dir).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let bytes = std::fs::read(path).expect("weights");
            for (name, tensor) in SafeTensors::deserialize(&bytes).expect("weights").iter() {
                assert_eq!(tensor.dtype(), Dtype::BF16);
                let (values, _) = tensor.data().as_chunks::<2>();
                let values = values.iter().map(|b| bf16::from_le_bytes(*b).to_f64()).collect();
                tensors.insert(name.to_string(), values);
            }
        }
        let config = serde_json::from_slice(&config).expect("config.json");
        Naive { config, tensors, round_cache: false }
    }

    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().expect("a size") as usize
    }

    fn number(&self, key: &str) -> f64 {
        self.config[key].as_f64().expect("a number")
    }

    fn tensor(&self, name: &str) -> &[f64] {
        self.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    /// W x, for W of the given name.
    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        matrix_vector(self.tensor(name), x)
    }

    fn norm(&self, name: &str, x: &[f64], epsilon: f64) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + epsilon).sqrt();
        x.iter().zip(self.tensor(name)).map(|(x, w)| x * scale * w).collect()
    }

    /// Feeds one token; returns the logits after it.
    pub fn feed(&self, sequence: &mut Sequence, token: u32) -> Vec<f64> {
        let hidden = self.size("hidden_size");
        let epsilon = self.number("rms_norm_eps");
        let embedding = self.tensor("model.embed_tokens.weight");
        let mut x = embedding[token as usize * hidden..][..hidden].to_vec();
        for layer in 0..self.size("num_hidden_layers") {
            let at = format!("model.layers.{layer}");
            let normed = self.norm(&format!("{at}.input_layernorm.weight"), &x, epsilon);
            add(&mut x, &self.attention(sequence, layer, &normed), 1.0);
            let normed = self.norm(&format!("{at}.post_attention_layernorm.weight"), &x, epsilon);
            let out = if layer < self.size("first_k_dense_replace") {
                self.mlp(&format!("{at}.mlp"), &normed)
            } else {
                self.mixture(&format!("{at}.mlp"), &normed)
            };
            add(&mut x, &out, 1.0);
        }
        sequence.position += 1;
        let x = self.norm("model.norm.weight", &x, epsilon);
        match self.config["tie_word_embeddings"].as_bool() {
            Some(true) => self.linear("model.embed_tokens.weight", &x),
            _ => self.linear("lm_head.weight", &x),
        }
    }

    fn attention(&self, sequence: &mut Sequence, layer: usize, x: &[f64]) -> Vec<f64> {
        let at = format!("model.layers.{layer}.self_attn");
        let (nope, rope) = (self.size("qk_nope_head_dim"), self.size("qk_rope_head_dim"));
        let (value, rank) = (self.size("v_head_dim"), self.size("kv_lora_rank"));
        let q = if self.config["q_lora_rank"].is_null() {
            self.linear(&format!("{at}.q_proj.weight"), x)
        } else {
            let low = self.linear(&format!("{at}.q_a_proj.weight"), x);
            let low = self.norm(&format!("{at}.q_a_layernorm.weight"), &low, 1e-6);
            self.linear(&format!("{at}.q_b_proj.weight"), &low)
        };
        let latent = self.linear(&format!("{at}.kv_a_proj_with_mqa.weight"), x);
        let mut key_rope = latent[rank..].to_vec();
        let mut latent = self.norm(&format!("{at}.kv_a_layernorm.weight"), &latent[..rank], 1e-6);
        self.rotate(&mut key_rope, sequence.position);
        if self.round_cache {
            for value in latent.iter_mut().chain(&mut key_rope) {
                *value = bf16::from_f64(*value).to_f64();
            }
        }
        let expanded = self.linear(&format!("{at}.kv_b_proj.weight"), &latent);
        let mut out = Vec::new();
        for head in 0..self.size("num_attention_heads") {
            let mut q = q[head * (nope + rope)..][..nope + rope].to_vec();
            self.rotate(&mut q[nope..], sequence.position);
            let expanded = &expanded[head * (nope + value)..][..nope + value];
            let keys = sequence.keys.entry((layer, head)).or_default();
            keys.push([&expanded[..nope], &key_rope].concat());
            let values = sequence.values.entry((layer, head)).or_default();
            values.push(expanded[nope..].to_vec());
            let scores: Vec<f64> = keys.iter().map(|key| dot(&q, key) * self.scale()).collect();
            let mut head_out = vec![0.0; value];
            for (weight, value) in softmax(&scores).iter().zip(values.iter()) {
                add(&mut head_out, value, *weight);
            }
            out.extend(head_out);
        }
        self.linear(&format!("{at}.o_proj.weight"), &out)
    }

    fn scale(&self) -> f64 {
        let width = self.size("qk_nope_head_dim") + self.size("qk_rope_head_dim");
        let plain = (width as f64).powf(-0.5);
        let scaling = &self.config["rope_scaling"];
        match (scaling["factor"].as_f64(), scaling["mscale_all_dim"].as_f64()) {
            (Some(factor), Some(all)) if all != 0.0 => plain * mscale(factor, all).powi(2),
            _ => plain,
        }
    }

    /// Interleaved rotation of all of `x` for a position.
    fn rotate(&self, x: &mut [f64], position: usize) {
        let d = x.len() as f64;
        let theta = self.number("rope_theta");
        let yarn = &self.config["rope_scaling"];
        for i in 0..x.len() / 2 {
            let mut frequency = theta.powf(-2.0 * i as f64 / d);
            let mut amplitude = 1.0;
            if !yarn.is_null() {
                let number = |key: &str| yarn[key].as_f64().expect("a number");
                let factor = number("factor");
                let original = number("original_max_position_embeddings");
                let pi = std::f64::consts::PI;
                let cd = |r: f64| d * (original / (2.0 * pi * r)).ln() / (2.0 * theta.ln());
                let low = cd(number("beta_fast")).floor().max(0.0);
                let mut high = cd(number("beta_slow")).ceil().min(d - 1.0);
                if low == high {
                    high += 0.001;
                }
                let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency *= ramp / factor + 1.0 - ramp;
                let (m, all) = (number("mscale"), number("mscale_all_dim"));
                amplitude = if m != 0.0 && all != 0.0 {
                    mscale(factor, m) / mscale(factor, all)
                } else {
                    mscale(factor, 1.0)
                };
            }
            let angle = position as f64 * frequency;
            let (a, b) = (x[2 * i], x[2 * i + 1]);
            x[2 * i] = (a * angle.cos() - b * angle.sin()) * amplitude;
            x[2 * i + 1] = (a * angle.sin() + b * angle.cos()) * amplitude;
        }
    }

    fn mlp(&self, at: &str, x: &[f64]) -> Vec<f64> {
        let gate = self.linear(&format!("{at}.gate_proj.weight"), x);
        let up = self.linear(&format!("{at}.up_proj.weight"), x);
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let hidden: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| silu(*g) * u).collect();
        self.linear(&format!("{at}.down_proj.weight"), &hidden)
    }

    fn mixture(&self, at: &str, x: &[f64]) -> Vec<f64> {
        let mut scores = softmax(&self.linear(&format!("{at}.gate.weight"), x));
        if self.config["topk_method"] == "group_limited_greedy" {
            let size = scores.len() / self.size("n_group");
            let best = |group: &[f64]| group.iter().copied().fold(0.0, f64::max);
            let mut groups: Vec<(f64, usize)> =
                scores.chunks(size).enumerate().map(|(g, group)| (best(group), g)).collect();
            groups.sort_by(|a, b| b.0.total_cmp(&a.0));
            for (_, group) in &groups[self.size("topk_group")..] {
                scores[group * size..(group + 1) * size].fill(0.0);
            }
        }
        let mut ranked: Vec<(f64, usize)> =
            scores.iter().copied().enumerate().map(|(e, score)| (score, e)).collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut out = self.mlp(&format!("{at}.shared_experts"), x);
        for (score, expert) in &ranked[..self.size("num_experts_per_tok")] {
            let weight = score * self.number("routed_scaling_factor");
            add(&mut out, &self.mlp(&format!("{at}.experts.{expert}"), x), weight);
        }
        out
    }
}

fn matrix_vector(matrix: &[f64], x: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(x.len()).map(|row| dot(row, x)).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], from: &[f64], weight: f64) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += weight * from);
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / sum).collect()
}

fn mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// The place of the largest logit, and how far the second is below it.
pub fn best(logits: &[f64]) -> (u32, f64) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    (order[0] as u32, logits[order[0]] - logits[order[1]])
}

/// A random checkpoint's sizes.
#[derive(Debug, Clone)]
pub struct Sizes {
    pub hidden: usize,
    pub layers: usize,
    pub dense_layers: usize,
    pub heads: usize,
    pub nope: usize,
    pub rope: usize,
    pub value: usize,
    pub rank: usize,
    pub query_rank: Option<usize>,
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
pub fn random_checkpoint(dir: &Path, seed: u64, sizes: &Sizes, tokenizer_from: &Path) {
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
    json!({
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
    })
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
