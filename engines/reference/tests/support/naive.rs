//! An independent DeepSeek-V2: float64, one token at a time, keys and values of every head
//! expanded, no cache of latents, no batching; written from the conventions alone and sharing no
//! code with the engine.
//!
//! Self-contained, so that other test packages can take it in by path.

use std::collections::BTreeMap;
use std::path::Path;

use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// The model, weights widened to f64.
pub(super) struct Naive {
    config: Value,
    tensors: BTreeMap<String, Vec<f64>>,
    /// Round latents and rotated keys to bf16, as a cache of that type holds them.
    pub round_cache: bool,
}

/// What a sequence has behind it: for each layer and head the keys and values so far.
#[derive(Default, Clone)]
pub(super) struct Sequence {
    position: usize,
    /// What is fed attends nothing before this position.
    pub attends_from: usize,
    keys: BTreeMap<(usize, usize), Vec<Vec<f64>>>,
    values: BTreeMap<(usize, usize), Vec<Vec<f64>>>,
    /// Of each layer an indexer's keys.
    index_keys: BTreeMap<usize, Vec<Vec<f64>>>,
    /// Of all choices of rows so far, how near the first that was not taken came to the last that was.
    pub choices: Vec<f64>,
}

impl Naive {
    pub(super) fn load(dir: &Path) -> Naive {
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
    pub(super) fn feed(&self, sequence: &mut Sequence, token: u32) -> Vec<f64> {
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
        let (q, low) = if self.config["q_lora_rank"].is_null() {
            (self.linear(&format!("{at}.q_proj.weight"), x), x.to_vec())
        } else {
            let low = self.linear(&format!("{at}.q_a_proj.weight"), x);
            let low = self.norm(&format!("{at}.q_a_layernorm.weight"), &low, 1e-6);
            (self.linear(&format!("{at}.q_b_proj.weight"), &low), low)
        };
        let is_attended = self.choose(sequence, layer, x, &low);
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
            let (keys, values) = (&keys[sequence.attends_from..], &values[sequence.attends_from..]);
            let mut scores: Vec<f64> = keys.iter().map(|key| dot(&q, key) * self.scale()).collect();
            for (score, is_attended) in scores.iter_mut().zip(&is_attended[sequence.attends_from..])
            {
                *score = if *is_attended { *score } else { f64::NEG_INFINITY };
            }
            let mut head_out = vec![0.0; value];
            for (weight, value) in softmax(&scores).iter().zip(values) {
                add(&mut head_out, value, *weight);
            }
            out.extend(head_out);
        }
        self.linear(&format!("{at}.o_proj.weight"), &out)
    }

    /// Which positions a token attends: with an indexer the best ones, else all.
    fn choose(&self, sequence: &mut Sequence, layer: usize, x: &[f64], low: &[f64]) -> Vec<bool> {
        let position = sequence.position;
        let Some(topk) = self.config["index_topk"].as_u64() else {
            return vec![true; position + 1];
        };
        let (heads, width) = (self.size("index_n_heads"), self.size("index_head_dim"));
        let rope = self.size("qk_rope_head_dim");
        let at = format!("model.layers.{layer}.self_attn.indexer");
        let mut key = self.linear(&format!("{at}.wk.weight"), x);
        let mean = key.iter().sum::<f64>() / width as f64;
        let variance = key.iter().map(|k| (k - mean).powi(2)).sum::<f64>() / width as f64;
        let (gain, bias) = (format!("{at}.k_norm.weight"), format!("{at}.k_norm.bias"));
        for ((k, gain), bias) in key.iter_mut().zip(self.tensor(&gain)).zip(self.tensor(&bias)) {
            *k = (*k - mean) / (variance + 1e-6).sqrt() * gain + bias;
        }
        self.rotate_halves(&mut key[..rope], position);
        if self.round_cache {
            key.iter_mut().for_each(|k| *k = bf16::from_f64(*k).to_f64());
        }
        let keys = sequence.index_keys.entry(layer).or_default();
        keys.push(key);
        let mut queries = self.linear(&format!("{at}.wq_b.weight"), low);
        for query in queries.chunks_exact_mut(width) {
            self.rotate_halves(&mut query[..rope], position);
        }
        let weights = self.linear(&format!("{at}.weights_proj.weight"), x);
        let factor = (heads as f64).powf(-0.5) * (width as f64).powf(-0.5);
        let score = |key: &Vec<f64>| -> f64 {
            let of_head = |(query, weight): (&[f64], &f64)| weight * dot(query, key).max(0.0);
            queries.chunks_exact(width).zip(&weights).map(of_head).sum::<f64>() * factor
        };
        let mut ranked: Vec<(f64, usize)> =
            keys.iter().enumerate().map(|(position, key)| (score(key), position)).collect();
        ranked.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut is_attended = vec![false; ranked.len()];
        let taken = ranked.len().min(topk as usize);
        ranked[..taken].iter().for_each(|(_, position)| is_attended[*position] = true);
        if taken < ranked.len() {
            sequence.choices.push(ranked[taken - 1].0 - ranked[taken].0);
        }
        is_attended
    }

    /// As [`Naive::rotate`], of the pairs (i, i + half).
    fn rotate_halves(&self, x: &mut [f64], position: usize) {
        let half = x.len() / 2;
        let mut pairs: Vec<f64> = (0..half).flat_map(|i| [x[i], x[half + i]]).collect();
        self.rotate(&mut pairs, position);
        for (i, pair) in pairs.chunks_exact(2).enumerate() {
            (x[i], x[half + i]) = (pair[0], pair[1]);
        }
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
pub(super) fn best(logits: &[f64]) -> (u32, f64) {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
    (order[0] as u32, logits[order[0]] - logits[order[1]])
}
