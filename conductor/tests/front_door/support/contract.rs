//! Holds answers against the OpenAPI document: each that [`super::Harness`] reads goes through here,
//! so that every test of the front door is also a test of the document.

use std::sync::LazyLock;

use serde_json::Value;

static DOCUMENT: LazyLock<Value> =
    LazyLock::new(|| serde_json::from_str(kvasir_conductor::openapi_document()).expect("JSON"));

pub(crate) fn document() -> &'static Value {
    &DOCUMENT
}

/// The path of the document that this one is an example of.
fn template(path: &str) -> Option<&'static str> {
    let path = path.split('?').next().unwrap_or(path);
    let paths = DOCUMENT["paths"].as_object().expect("paths");
    paths.keys().map(String::as_str).find(|one| match one.split_once('{') {
        None => *one == path,
        Some((before, _)) => path.starts_with(before) && path.len() > before.len(),
    })
}

/// Panics when an answer is not as the document says.
pub(crate) fn check(method: &str, path: &str, status: u16, kind: &str, text: &str) {
    let at = format!("{method} {path}: {status}");
    let error = || match_json(&DOCUMENT["components"]["schemas"]["Error"], text, &at);
    let Some(template) = template(path) else {
        assert_eq!(status, 404, "{at} is not in the document");
        return error();
    };
    let operation = &DOCUMENT["paths"][template][method.to_lowercase()];
    if operation.is_null() {
        assert_eq!(status, 405, "{at} is not in the document");
        return error();
    }
    let answer = &operation["responses"][status.to_string()];
    assert!(!answer.is_null(), "{at} is not in the document: {text}");
    let kind = kind.split(';').next().unwrap_or(kind);
    let schema = &answer["content"][kind]["schema"];
    assert!(!schema.is_null(), "{at}: {kind:?} is not in the document");
    match kind {
        "application/json" => match_json(schema, text, &at),
        "text/event-stream" => match_events(schema, text, &at),
        _ => {}
    }
}

fn match_json(schema: &Value, text: &str, at: &str) {
    let value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{at}: {error}: {text}"));
    if let Err(why) = matches(schema, &value, "") {
        panic!("{at}: {why}, in {text}");
    }
}

fn match_events(schema: &Value, text: &str, at: &str) {
    for event in text.split("\n\n").filter(|event| !event.is_empty()) {
        let data = event.lines().find_map(|line| line.strip_prefix("data: ")).expect("data");
        if data == "[DONE]" {
            continue;
        }
        let value: Value = serde_json::from_str(data).expect("JSON in an event");
        if let Some(name) = event.lines().find_map(|line| line.strip_prefix("event: ")) {
            assert_eq!(value["type"], name, "{at}");
        }
        let is_error = value.as_object().is_some_and(|map| map.contains_key("error"));
        let schema = if is_error { &DOCUMENT["components"]["schemas"]["Error"] } else { schema };
        if let Err(why) = matches(schema, &value, "") {
            panic!("{at}: {why}, in {data}");
        }
    }
}

/// The part of JSON Schema that the document uses.
pub(crate) fn matches(schema: &Value, value: &Value, path: &str) -> Result<(), String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = DOCUMENT.pointer(reference.trim_start_matches('#')).expect("a reference");
        return matches(target, value, path);
    }
    let types = match &schema["type"] {
        Value::String(one) => vec![one.as_str()],
        Value::Array(some) => some.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if !types.is_empty() && !types.iter().any(|one| is_of(one, value)) {
        return Err(format!("{path} is {value}, not {types:?}"));
    }
    if schema.get("const").is_some_and(|only| only != value) {
        return Err(format!("{path} is {value}, not {}", schema["const"]));
    }
    if schema["enum"].as_array().is_some_and(|some| !some.contains(value)) {
        return Err(format!("{path} is {value}, none of {}", schema["enum"]));
    }
    for choice in ["anyOf", "oneOf"] {
        let Some(some) = schema[choice].as_array() else { continue };
        let failed: Vec<String> =
            some.iter().filter_map(|one| matches(one, value, path).err()).collect();
        if failed.len() == some.len() {
            return Err(failed.join("; or "));
        }
    }
    if let Some(map) = value.as_object() {
        for name in schema["required"].as_array().into_iter().flatten() {
            let name = name.as_str().expect("a name");
            if !map.contains_key(name) {
                return Err(format!("{path}.{name} is missing"));
            }
        }
        for (name, inner) in map {
            let here = format!("{path}.{name}");
            match (&schema["properties"][name], &schema["additionalProperties"]) {
                (Value::Null, Value::Bool(false)) => return Err(format!("{here} is unknown")),
                (Value::Null, Value::Object(_)) => {
                    matches(&schema["additionalProperties"], inner, &here)?;
                }
                (Value::Null, _) => {}
                (known, _) => matches(known, inner, &here)?,
            }
        }
    }
    if let Some(list) = value.as_array() {
        if schema["maxItems"].as_u64().is_some_and(|max| list.len() as u64 > max) {
            return Err(format!("{path} is too long"));
        }
        if schema["items"].is_object() {
            for (index, inner) in list.iter().enumerate() {
                matches(&schema["items"], inner, &format!("{path}[{index}]"))?;
            }
        }
    }
    Ok(())
}

fn is_of(kind: &str, value: &Value) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("the document has the type {other:?}"),
    }
}
