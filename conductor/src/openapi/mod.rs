//! The OpenAPI document of the HTTP API, served at `/openapi.json`. It is written by hand in three
//! files: `document.json` with what is answered where, `requests.json` and `answers.json` with the
//! schemas. Tests hold every request that is read and every answer that is made against it.

use std::sync::LazyLock;

use serde_json::{Map, Value};

/// The document, as JSON.
pub fn openapi_document() -> &'static str {
    static DOCUMENT: LazyLock<String> = LazyLock::new(|| assemble().to_string());
    &DOCUMENT
}

fn assemble() -> Value {
    let parse = |text| serde_json::from_str::<Value>(text).expect("the document is JSON");
    let mut document = parse(include_str!("document.json"));
    let mut schemas = Map::new();
    for part in [include_str!("requests.json"), include_str!("answers.json")] {
        if let Value::Object(part) = parse(part) {
            schemas.extend(part);
        }
    }
    document["info"]["version"] = env!("CARGO_PKG_VERSION").into();
    document["components"]["schemas"] = Value::Object(schemas);
    document
}
