//! Refuses keys that a configuration's schema does not know, and names the nearest one that it
//! does. Types and values are left to deserialisation.

use std::fmt;

use schemars::Schema;
use serde_json::Value as Json;
use toml::Value;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnknownKey {
    /// As in `verify.tcp` or `models[2].name`.
    path: String,
    nearest: Option<String>,
}

impl fmt::Display for UnknownKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unknown key `{}`", self.path)?;
        match &self.nearest {
            Some(nearest) => write!(f, "; did you mean `{nearest}`?"),
            None => Ok(()),
        }
    }
}

pub(super) fn check(schema: &Schema, table: &toml::Table) -> Result<(), UnknownKey> {
    let root = schema.as_value();
    check_table(root, root, table, "")
}

fn check_table(
    root: &Json,
    schema: &Json,
    table: &toml::Table,
    path: &str,
) -> Result<(), UnknownKey> {
    let alternatives = alternatives(root, schema);
    let known = |key: &str| {
        alternatives.iter().find_map(|schema| {
            schema
                .get("properties")
                .and_then(|properties| properties.get(key))
                .or_else(|| schema.get("additionalProperties").filter(|others| others.is_object()))
        })
    };
    // A place without named properties (a map, a free value) takes every key.
    let is_closed = alternatives.iter().any(|schema| schema.get("properties").is_some());
    for (key, value) in table {
        let here = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match known(key) {
            Some(inner) => check_value(root, inner, value, &here)?,
            None if is_closed => {
                return Err(UnknownKey { nearest: nearest(&alternatives, key), path: here });
            }
            None => {}
        }
    }
    Ok(())
}

fn check_value(root: &Json, schema: &Json, value: &Value, path: &str) -> Result<(), UnknownKey> {
    match value {
        Value::Table(table) => check_table(root, schema, table, path),
        Value::Array(values) => {
            let Some(items) =
                alternatives(root, schema).into_iter().find_map(|schema| schema.get("items"))
            else {
                return Ok(());
            };
            values.iter().enumerate().try_for_each(|(index, value)| {
                check_value(root, items, value, &format!("{path}[{index}]"))
            })
        }
        _ => Ok(()),
    }
}

/// A schema with its references followed and its choices (an option, an enum) laid out flat.
pub(super) fn alternatives<'a>(root: &'a Json, schema: &'a Json) -> Vec<&'a Json> {
    let mut found = vec![schema];
    if let Some(target) = schema.get("$ref").and_then(Json::as_str) {
        let pointer = target.strip_prefix('#').unwrap_or(target);
        if let Some(target) = root.pointer(pointer) {
            found.extend(alternatives(root, target));
        }
    }
    for choice in ["anyOf", "oneOf", "allOf"] {
        for inner in schema.get(choice).and_then(Json::as_array).into_iter().flatten() {
            found.extend(alternatives(root, inner));
        }
    }
    found
}

/// The known key that was most likely meant; none when nothing is near.
fn nearest(alternatives: &[&Json], key: &str) -> Option<String> {
    alternatives
        .iter()
        .filter_map(|schema| schema.get("properties")?.as_object())
        .flat_map(|properties| properties.keys())
        .map(|known| (strsim::damerau_levenshtein(known, key), known))
        .min()
        .filter(|(distance, known)| *distance <= known.len().max(key.len()) / 2)
        .map(|(_, known)| known.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use schemars::JsonSchema;
    use std::collections::BTreeMap;

    #[derive(JsonSchema)]
    #[allow(dead_code, reason = "only its schema is used")]
    struct Sample {
        lease_ms: u64,
        verify: Verify,
        models: Vec<Model>,
        maybe: Option<Verify>,
        free: BTreeMap<String, u32>,
    }

    #[derive(JsonSchema)]
    #[allow(dead_code, reason = "only its schema is used")]
    struct Verify {
        tcp: bool,
    }

    #[derive(JsonSchema)]
    #[allow(dead_code, reason = "only its schema is used")]
    struct Model {
        name: String,
    }

    fn check_text(text: &str, expected: Result<(), &str>) {
        let table: toml::Table = toml::from_str(text).unwrap();
        let outcome = check(&schemars::schema_for!(Sample), &table);
        assert_eq!(outcome.map_err(|unknown| unknown.to_string()), expected.map_err(String::from));
    }

    #[test]
    fn known_keys_pass_and_unknown_ones_are_answered_with_the_nearest() {
        check_text("lease_ms = 5", Ok(()));
        check_text("verify.tcp = true\nmaybe.tcp = false\nfree.anything = 1", Ok(()));
        check_text("[[models]]\nname = 'a'", Ok(()));
        check_text("leese_ms = 5", Err("unknown key `leese_ms`; did you mean `lease_ms`?"));
        check_text("colour = 5", Err("unknown key `colour`"));
        check_text("verify.tpc = 1", Err("unknown key `verify.tpc`; did you mean `tcp`?"));
        check_text("maybe.tpc = 1", Err("unknown key `maybe.tpc`; did you mean `tcp`?"));
        check_text(
            "[[models]]\nname = 'a'\n[[models]]\nnam = 'a'",
            Err("unknown key `models[1].nam`; did you mean `name`?"),
        );
    }
}
