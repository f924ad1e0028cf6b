//! What the requests' parsers read is what the OpenAPI document says, member by member, and the
//! reverse.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::chat::ChatRequest;
use super::common::Limits;
use super::completions::CompletionRequest;
use super::contexts::{ContextRequest, ExtendRequest, TtlLimits};
use super::fields::asked;
use super::responses::ResponseRequest;
use crate::openapi::openapi_document;

const LIMITS: Limits = Limits { choices_per_request_max: 8, stop_strings_max: 4 };

/// All members of a schema, those of members included: `messages[].role`.
fn documented(document: &Value, schema: &Value, path: &str, names: &mut BTreeSet<String>) {
    if let Some(name) = schema["$ref"].as_str() {
        let target = document.pointer(name.trim_start_matches('#')).expect("a reference");
        return documented(document, target, path, names);
    }
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        let dot = if path.is_empty() { "" } else { "." };
        let here = format!("{path}{dot}{name}");
        documented(document, inner, &here, names);
        names.insert(here);
    }
    if schema["items"].is_object() {
        documented(document, &schema["items"], &format!("{path}[]"), names);
    }
    for choice in ["anyOf", "oneOf"] {
        for one in schema[choice].as_array().into_iter().flatten() {
            documented(document, one, path, names);
        }
    }
}

/// `body` has every object that a request can have.
fn check<T>(schema: &str, body: Value, parse: impl Fn(&[u8]) -> Result<T, super::ApiError>) {
    let document: Value = serde_json::from_str(openapi_document()).expect("JSON");
    let mut want = BTreeSet::new();
    let of = json!({"$ref": format!("#/components/schemas/{schema}")});
    documented(&document, &of, "", &mut want);
    asked::take();
    if let Err(error) = parse(body.to_string().as_bytes()) {
        panic!("{schema}: {error:?}");
    }
    let read: BTreeSet<String> =
        asked::take().into_iter().map(|name| name.replace("[0]", "[]")).collect();
    let only = |one: &BTreeSet<String>, other: &BTreeSet<String>| -> Vec<String> {
        one.difference(other).cloned().collect()
    };
    assert_eq!(only(&read, &want), [""; 0], "{schema}: read, and not in the document");
    assert_eq!(only(&want, &read), [""; 0], "{schema}: in the document, and not read");
}

#[test]
fn every_member_of_a_request_is_in_the_document_and_the_reverse() {
    let stream = json!({"include_obfuscation": false});
    let message = |kind: &str| json!([{"role": "user", "content": [{"type": kind, "text": "x"}]}]);
    let chunks = json!([{"text": "x"}]);
    let chat = json!({"model": "m", "stream": true, "stream_options": stream,
        "messages": message("text"), "kvasir_chunks": chunks});
    check("ChatRequest", chat, |body| ChatRequest::parse(body, &LIMITS));
    let completion = json!({"model": "m", "stream": true, "stream_options": stream, "prompt": "x",
        "kvasir_chunks": chunks});
    check("CompletionRequest", completion, |body| CompletionRequest::parse(body, &LIMITS));
    let response = json!({"model": "m", "stream": true, "stream_options": stream,
        "input": message("input_text"), "reasoning": {}, "text": {}});
    check("ResponseRequest", response, |body| ResponseRequest::parse(body, &LIMITS));
    let ttl = TtlLimits { default_ms: 1_000, ms_max: 1_000, replicas_default: 1 };
    let context = json!({"model": "m", "messages": message("text")});
    check("ContextRequest", context, |body| ContextRequest::parse(body, ttl));
    let extend = json!({"ttl_seconds": 1});
    check("ExtendContextRequest", extend, |body| ExtendRequest::parse(body, ttl));
}
