//! Renders the reference configuration of a daemon from what its code says: the fields in the
//! order of their declaration, their doc comments, their types and their defaults. Every line
//! that is not a comment sets a default, so the file as it stands changes nothing.

use std::fmt::Write;

use schemars::Schema;
use serde::de::value::Error as CapturedError;
use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};
use serde_json::Value as Json;

use super::keys::alternatives;
use crate::daemon::Kind;

const WIDTH: usize = 98;

pub(super) fn render(kind: Kind, schema: &Schema, defaults: &Json, fields: &[&str]) -> String {
    let root = schema.as_value();
    let mut text = String::new();
    comment(
        &mut text,
        &format!(
            "Reference configuration of `kvasir {0}`: every key with its meaning and default. Generated \
             from the code by `kvasir config {0}`; do not edit.",
            kind.name()
        ),
    );
    // A table ends the keys before it, so tables come last.
    let (tables, keys): (Vec<&str>, Vec<&str>) =
        fields.iter().partition(|name| defaults.get(name).is_some_and(Json::is_object));
    for name in keys {
        text.push('\n');
        render_key(&mut text, root, root, name, defaults.get(name));
    }
    for name in tables {
        text.push('\n');
        render_table(&mut text, root, name, defaults.get(name));
    }
    text
}

fn render_key(text: &mut String, root: &Json, parent: &Json, name: &str, default: Option<&Json>) {
    let Some(schema) = property(root, parent, name) else { return };
    comment(text, &description(root, schema));
    let kind = type_of(root, schema);
    match default {
        None | Some(Json::Null) => {
            comment(text, &format!("{kind}; not set by default."));
            let _ = writeln!(text, "# {name} =");
        }
        Some(value) => {
            comment(text, &format!("{kind}."));
            render_elements(text, root, schema, name);
            let _ = writeln!(text, "{name} = {}", toml_value(value));
        }
    }
}

fn render_table(text: &mut String, root: &Json, name: &str, default: Option<&Json>) {
    let Some(schema) = property(root, root, name) else { return };
    comment(text, &description(root, schema));
    let _ = writeln!(text, "[{name}]");
    for inner in sorted_properties(root, schema) {
        render_key(text, root, schema, &inner, default.and_then(|values| values.get(&inner)));
    }
}

/// What stands in each element of a list of tables.
fn render_elements(text: &mut String, root: &Json, schema: &Json, name: &str) {
    let Some(items) = alternatives(root, schema).into_iter().find_map(|s| s.get("items")) else {
        return;
    };
    let inner = sorted_properties(root, items);
    if inner.is_empty() {
        return;
    }
    let _ = writeln!(text, "#\n# [[{name}]]");
    for key in inner {
        if let Some(schema) = property(root, items, &key) {
            let about = format!("{key} ({}): {}", type_of(root, schema), description(root, schema));
            comment(text, &about);
        }
    }
}

fn property<'a>(root: &'a Json, schema: &'a Json, name: &str) -> Option<&'a Json> {
    alternatives(root, schema).into_iter().find_map(|s| s.get("properties")?.get(name))
}

/// Sorted here, because the order of a JSON map depends on how its library was built.
fn sorted_properties(root: &Json, schema: &Json) -> Vec<String> {
    let mut names: Vec<String> = alternatives(root, schema)
        .into_iter()
        .filter_map(|s| s.get("properties")?.as_object())
        .flat_map(|properties| properties.keys().cloned())
        .collect();
    names.sort();
    names
}

/// A field's own words before those of its type.
fn description(root: &Json, schema: &Json) -> String {
    alternatives(root, schema)
        .into_iter()
        .find_map(|s| s.get("description")?.as_str())
        .unwrap_or_default()
        .to_owned()
}

fn type_of(root: &Json, schema: &Json) -> String {
    let alternatives = alternatives(root, schema);
    let mut choices: Vec<String> = Vec::new();
    for schema in &alternatives {
        let constants = schema.get("enum").and_then(Json::as_array).into_iter().flatten();
        choices.extend(constants.chain(schema.get("const")).filter_map(|v| match v {
            Json::Null => None,
            value => Some(toml_value(value)),
        }));
    }
    if !choices.is_empty() {
        choices.dedup();
        return format!("One of {}", choices.join(", "));
    }
    let mut names: Vec<&str> = Vec::new();
    for schema in &alternatives {
        match schema.get("type") {
            Some(Json::String(name)) => names.push(name),
            Some(Json::Array(several)) => names.extend(several.iter().filter_map(Json::as_str)),
            _ => {}
        }
    }
    match names.into_iter().find(|name| *name != "null") {
        Some("integer") => "Integer".into(),
        Some("number") => "Number".into(),
        Some("boolean") => "true or false".into(),
        Some("array") => "List".into(),
        Some("object") => "Table".into(),
        _ => "Text".into(),
    }
}

fn toml_value(value: &Json) -> String {
    match value {
        Json::Null => "\"\"".into(),
        Json::Array(values) => {
            format!("[{}]", values.iter().map(toml_value).collect::<Vec<_>>().join(", "))
        }
        Json::Object(fields) => {
            let mut pairs: Vec<String> = fields
                .iter()
                .map(|(key, value)| format!("{key} = {}", toml_value(value)))
                .collect();
            pairs.sort();
            format!("{{ {} }}", pairs.join(", "))
        }
        Json::String(text) => toml::Value::String(text.clone()).to_string(),
        other => other.to_string(),
    }
}

fn comment(text: &mut String, words: &str) {
    for paragraph in words.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()) {
        let mut line = String::from("#");
        for word in paragraph.split_whitespace() {
            if line.len() + 1 + word.len() > WIDTH {
                let _ = writeln!(text, "{line}");
                line = String::from("#");
            }
            line.push(' ');
            line.push_str(word);
        }
        let _ = writeln!(text, "{line}");
    }
}

/// The fields of a struct in the order of their declaration, as its derived `Deserialize` names
/// them: a schema does not keep the order, and serialising leaves out what is not set.
pub(super) fn declared_fields<T: DeserializeOwned>() -> Vec<&'static str> {
    let mut fields: &'static [&'static str] = &[];
    let _ = T::deserialize(FieldNames(&mut fields));
    fields.to_vec()
}

struct FieldNames<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for FieldNames<'_> {
    type Error = CapturedError;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, CapturedError> {
        Err(CapturedError::custom("not a struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, CapturedError> {
        *self.0 = fields;
        Err(CapturedError::custom("only the field names are needed"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use schemars::JsonSchema;
    use serde::{Deserialize, Serialize};

    #[derive(JsonSchema, Serialize, Deserialize)]
    struct Sample {
        /// How long
        /// it lasts.
        lease_ms: u64,
        inner: Inner,
        role: Role,
        /// Off without it.
        log: Option<String>,
        models: Vec<Inner>,
    }

    /// A part.
    #[derive(JsonSchema, Serialize, Deserialize)]
    struct Inner {
        /// Whether.
        on: bool,
    }

    /// The role.
    #[derive(JsonSchema, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Role {
        Both,
        Decode,
    }

    #[test]
    fn a_struct_becomes_a_commented_file_in_the_order_of_its_fields() {
        let defaults = serde_json::to_value(Sample {
            lease_ms: 5,
            inner: Inner { on: true },
            role: Role::Both,
            log: None,
            models: vec![],
        })
        .unwrap();
        let schema = schemars::schema_for!(Sample);
        let text = render(Kind::Engine, &schema, &defaults, &declared_fields::<Sample>());
        let expected = r#"
# How long it lasts.
# Integer.
lease_ms = 5

# The role.
# One of "both", "decode".
role = "both"

# Off without it.
# Text; not set by default.
# log =

# List.
#
# [[models]]
# on (true or false): Whether.
models = []

# A part.
[inner]
# Whether.
# true or false.
on = true
"#;
        let body = text.split_once('\n').unwrap().1.split_once('\n').unwrap().1;
        assert_eq!(format!("\n{}", body.trim_start()), expected);
    }
}
