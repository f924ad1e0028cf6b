//! What a model's folder may hold, and the sentence for each folder that cannot be used.

use std::fs;
use std::path::Path;

use crate::arena::tiny;
use crate::checkpoint::{Sizes, random_checkpoint};
use kvasir_engine_reference::model::{Groups, KvDtype, LoadOptions, Model, ModelConfig, Weighting};
use serde_json::{Value, json};

fn small() -> Sizes {
    Sizes { layers: 2, dense_layers: 1, hidden: 32, vocab: 64, ..Sizes::default() }
}

/// A good folder, which a test then changes.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    random_checkpoint(dir.path(), 5, &small(), &tiny());
    dir
}

fn edit_config(dir: &Path, edit: impl FnOnce(&mut Value)) {
    let path = dir.join("config.json");
    let mut config = serde_json::from_slice(&fs::read(&path).expect("config")).expect("json");
    edit(&mut config);
    fs::write(&path, config.to_string()).expect("config");
}

/// Both ways of looking at the folder refuse it, with all of these words.
fn check_refused(dir: &Path, words: &[&str]) {
    let described = Model::describe(dir).expect_err("a refusal").to_string();
    let loaded = Model::load(dir, LoadOptions::default()).expect_err("a refusal").to_string();
    assert_eq!(described, loaded);
    for word in words {
        assert!(loaded.contains(word), "{word:?} is not in {loaded:?}");
    }
}

#[test]
fn a_good_folder_is_described_and_loaded() {
    let dir = folder();
    let description = Model::describe(dir.path()).expect("a description");
    let file = fs::metadata(dir.path().join("model.safetensors")).expect("weights").len();
    assert_eq!(description.weights_bytes, file);
    // Two bytes become four; the header is a few percent of these small weights.
    let expected = 2 * file;
    assert!(description.memory_bytes < expected && description.memory_bytes > expected * 8 / 10);
    let model = Model::load(dir.path(), LoadOptions::default()).expect("a model");
    assert_eq!(model.config(), &description.config);
    assert_eq!(Model::memory_needed(dir.path()).expect("bytes"), description.memory_bytes);
    let layout = model.config().layout(32, KvDtype::Bf16);
    assert_eq!((layout.layers(), layout.slot_bytes()), (2, 2 * 32 * 80 * 2));
}

#[test]
fn missing_and_damaged_files_are_named() {
    let dir = tempfile::tempdir().expect("a folder");
    check_refused(dir.path(), &["cannot read", "config.json"]);
    check_refused(&dir.path().join("nowhere"), &["cannot read", "nowhere/config.json"]);

    let dir = folder();
    fs::write(dir.path().join("config.json"), "{\"vocab_size\": ").expect("config");
    check_refused(dir.path(), &["config.json is not usable", "EOF"]);

    let dir = folder();
    fs::write(dir.path().join("generation_config.json"), "[]").expect("config");
    check_refused(dir.path(), &["generation_config.json is not usable"]);

    let dir = folder();
    fs::remove_file(dir.path().join("model.safetensors")).expect("removal");
    check_refused(dir.path(), &["cannot read", "model.safetensors"]);
}

#[test]
fn weight_files_that_are_cut_or_foreign_are_refused() {
    let dir = folder();
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).expect("weights");
    for (length, words) in [
        (whole.len() - 1, "truncated"),
        (whole.len() / 2, "truncated"),
        (100, "header"),
        (5, "truncated"),
        (0, "truncated"),
    ] {
        fs::write(&path, &whole[..length]).expect("weights");
        check_refused(dir.path(), &["model.safetensors is not usable", words]);
    }
    fs::write(&path, [&whole[..], &[0; 8]].concat()).expect("weights");
    check_refused(dir.path(), &["too long"]);
    fs::write(&path, [&u64::MAX.to_le_bytes()[..], &whole[8..]].concat()).expect("weights");
    check_refused(dir.path(), &["header is too long"]);
    let mut foreign = whole;
    foreign[8] = b'!';
    fs::write(&path, foreign).expect("weights");
    check_refused(dir.path(), &["cannot read the header"]);
}

#[test]
fn an_index_must_name_files_of_the_folder() {
    let dir = tempfile::tempdir().expect("a folder");
    random_checkpoint(dir.path(), 5, &Sizes { files: 2, ..small() }, &tiny());
    assert!(Model::describe(dir.path()).is_ok());
    let index = dir.path().join("model.safetensors.index.json");
    for outside in ["../model-00001-of-00002.safetensors", "/etc/passwd", "..", ""] {
        let text = json!({ "weight_map": { "model.norm.weight": outside } }).to_string();
        fs::write(&index, text).expect("an index");
        check_refused(dir.path(), &["index.json is not usable", "not a file of this directory"]);
    }
    fs::write(&index, json!({ "weight_map": {} }).to_string()).expect("an index");
    check_refused(dir.path(), &["contains no file names"]);
    let text = json!({ "weight_map": { "a": "model-00001-of-00002.safetensors" } }).to_string();
    fs::write(&index, text).expect("an index");
    check_refused(dir.path(), &["tensor model.", ".weight is missing"]);
}

#[test]
fn tensors_that_are_missing_or_of_another_shape_or_type_are_named() {
    for (key, value, tensor) in [
        ("num_hidden_layers", json!(3), "tensor model.layers.2.input_layernorm.weight is missing"),
        ("n_routed_experts", json!(9), "model.layers.1.mlp.gate.weight has shape [6, 32]"),
        ("vocab_size", json!(65), "model.embed_tokens.weight has shape [64, 32]"),
        ("kv_lora_rank", json!(60), "config.json requires [76, 32]"),
        ("q_lora_rank", json!(null), "tensor model.layers.0.self_attn.q_proj.weight is missing"),
        ("moe_intermediate_size", json!(57), "model.layers.1.mlp.experts.0.gate_proj.weight"),
    ] {
        let dir = folder();
        edit_config(dir.path(), |config| config[key] = value);
        // With nine experts, groups of three still divide them.
        check_refused(dir.path(), &["model.safetensors is not usable", tensor]);
    }
    let dir = folder();
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).expect("weights");
    let at = whole.windows(4).position(|bytes| bytes == b"BF16").expect("a type");
    let mut other = whole;
    other[at..at + 4].copy_from_slice(b"I16 ");
    let at = other.windows(6).position(|bytes| bytes == b"\"I16 \"").expect("a type");
    other[at..at + 6].copy_from_slice(b"\"I16\" ");
    fs::write(&path, other).expect("weights");
    check_refused(dir.path(), &["not supported", "type I16", "only F32, F16 and BF16 are"]);
}

#[test]
fn models_of_other_kinds_are_refused_with_the_reason() {
    let unsupported: [(&str, Value, &str); 11] = [
        ("architectures", json!(["LlamaForCausalLM"]), "LlamaForCausalLM; only DeepseekV2"),
        ("architectures", json!(null), "`architectures` does not contain DeepseekV2ForCausalLM"),
        ("hidden_act", json!("gelu"), "gelu; only silu"),
        ("attention_bias", json!(true), "biases"),
        ("quantization_config", json!({ "bits": 8 }), "quantised"),
        ("moe_layer_freq", json!(2), "`moe_layer_freq` is 2"),
        ("scoring_func", json!("sigmoid"), "sigmoid; only softmax"),
        ("topk_method", json!("noaux_tc"), "noaux_tc; only greedy"),
        ("rope_scaling", json!({ "type": "linear", "factor": 2.0 }), "rope type is linear"),
        ("rope_scaling", json!({ "type": "yarn", "factor": 2.0, "truncate": false }), "truncated"),
        ("n_group", json!(66), "experts into 66 equal groups"),
    ];
    for (key, value, words) in unsupported {
        let dir = folder();
        edit_config(dir.path(), |config| config[key] = value);
        check_refused(dir.path(), &["config.json", words]);
    }
    for (key, value, words) in [
        ("hidden_size", json!(null), "`hidden_size` is missing"),
        ("hidden_size", json!(0), "`hidden_size` is 0"),
        ("hidden_size", json!(1u64 << 40), "`hidden_size` is 1099511627776"),
        ("hidden_size", json!("many"), "invalid type"),
        ("qk_rope_head_dim", json!(15), "15; it must be even"),
        ("num_experts_per_tok", json!(7), "only 6 experts"),
        ("topk_group", json!(4), "4 used"),
        ("max_position_embeddings", json!(0), "`max_position_embeddings`"),
        ("rms_norm_eps", json!(0.0), "`rms_norm_eps` is 0"),
        ("rope_scaling", json!({ "type": "yarn" }), "needs a `factor`"),
    ] {
        let dir = folder();
        edit_config(dir.path(), |config| config[key] = value);
        check_refused(dir.path(), &["config.json is not usable", words]);
    }
}

fn config_with(edit: impl FnOnce(&mut Value)) -> ModelConfig {
    let dir = folder();
    edit_config(dir.path(), edit);
    ModelConfig::read(dir.path()).expect("a configuration")
}

#[test]
fn both_ways_of_writing_rope_mean_the_same() {
    let published = config_with(|_| ());
    let newer = config_with(|config| {
        let mut rope = config["rope_scaling"].take();
        rope["rope_type"] = rope["type"].take();
        rope.as_object_mut().expect("an object").remove("type");
        rope["rope_theta"] = config["rope_theta"].take();
        config["rope_parameters"] = rope;
    });
    assert_eq!(published.rope, newer.rope);
    assert!(published.rope.yarn.is_some());
    let plain = config_with(|config| {
        config["rope_scaling"] = Value::Null;
        config["rope_theta"] = json!(5e5);
    });
    assert_eq!((plain.rope.theta, plain.rope.yarn), (5e5, None));
}

#[test]
fn options_of_the_mixture_are_read() {
    let experts = |edit: fn(&mut Value)| config_with(edit).experts.expect("experts");
    let grouped = experts(|_| ());
    assert_eq!(grouped.groups, Some(Groups { groups: 3, groups_used: 2 }));
    assert_eq!(grouped.weighting, Weighting::Scaled(1.5));
    let greedy = experts(|config| {
        config["topk_method"] = json!("greedy");
        config["norm_topk_prob"] = json!(true);
        config["n_shared_experts"] = Value::Null;
    });
    assert_eq!((greedy.groups, greedy.shared_intermediate), (None, 0));
    assert_eq!(greedy.weighting, Weighting::Normalised);
    assert!(config_with(|config| config["n_routed_experts"] = Value::Null).experts.is_none());
}

#[test]
fn end_of_sequence_comes_from_both_files_as_number_or_list() {
    let dir = folder();
    let eos = || ModelConfig::read(dir.path()).expect("a configuration").eos;
    assert_eq!(eos(), [1]);
    fs::write(dir.path().join("generation_config.json"), "{\"eos_token_id\": [7, 1]}").expect("ok");
    assert_eq!(eos(), [1, 7]);
    edit_config(dir.path(), |config| config["eos_token_id"] = json!([9, 8]));
    assert_eq!(eos(), [1, 7, 8, 9]);
    fs::write(dir.path().join("generation_config.json"), "{}").expect("ok");
    edit_config(dir.path(), |config| config["eos_token_id"] = Value::Null);
    assert_eq!(eos(), [0u32; 0]);
}

#[test]
fn a_fingerprint_depends_on_every_byte_of_weights_and_configuration() {
    let fingerprint =
        |dir: &Path| Model::load(dir, LoadOptions::default()).expect("a model").fingerprint();
    let dir = folder();
    let first = fingerprint(dir.path());
    assert_eq!(first, fingerprint(folder().path()), "an equal folder elsewhere");
    let path = dir.path().join("model.safetensors");
    let whole = fs::read(&path).expect("weights");
    for at in [whole.len() - 1, whole.len() / 2] {
        let mut other = whole.clone();
        other[at] ^= 1;
        fs::write(&path, other).expect("weights");
        assert_ne!(first, fingerprint(dir.path()), "byte {at}");
    }
    fs::write(&path, whole).expect("weights");
    assert_eq!(first, fingerprint(dir.path()));
    edit_config(dir.path(), |config| config["rms_norm_eps"] = json!(2e-5));
    assert_ne!(first, fingerprint(dir.path()));
}
