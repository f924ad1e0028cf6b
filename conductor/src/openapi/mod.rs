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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fmt;

    use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};

    /// JSON in which no object has two members of one name. `serde_json::Value` keeps the last of them.
    struct Unique;

    impl<'de> Deserialize<'de> for Unique {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Unique, D::Error> {
            deserializer.deserialize_any(Unique)
        }
    }

    impl<'de> Visitor<'de> for Unique {
        type Value = Unique;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("JSON")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unique, A::Error> {
            let mut names = HashSet::new();
            while let Some((name, Unique)) = map.next_entry::<String, Unique>()? {
                if let Some(twice) = names.replace(name) {
                    return Err(A::Error::custom(format!("two members `{twice}`")));
                }
            }
            Ok(Unique)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Unique, A::Error> {
            while let Some(Unique) = items.next_element()? {}
            Ok(Unique)
        }

        fn visit_bool<E>(self, _: bool) -> Result<Unique, E> {
            Ok(Unique)
        }

        fn visit_i64<E>(self, _: i64) -> Result<Unique, E> {
            Ok(Unique)
        }

        fn visit_u64<E>(self, _: u64) -> Result<Unique, E> {
            Ok(Unique)
        }

        fn visit_f64<E>(self, _: f64) -> Result<Unique, E> {
            Ok(Unique)
        }

        fn visit_str<E>(self, _: &str) -> Result<Unique, E> {
            Ok(Unique)
        }

        fn visit_unit<E>(self) -> Result<Unique, E> {
            Ok(Unique)
        }
    }

    #[test]
    fn no_member_is_documented_twice() {
        let parts = [
            include_str!("document.json"),
            include_str!("requests.json"),
            include_str!("answers.json"),
        ];
        for part in parts {
            if let Err(error) = serde_json::from_str::<Unique>(part) {
                panic!("{error}");
            }
        }
        assert!(serde_json::from_str::<Unique>(r#"{"a": {"b": 1, "b": 2}}"#).is_err());
    }
}
