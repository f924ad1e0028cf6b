//! The members of a JSON object in their order, their values as they were written: what is passed on
//! must not be changed by being read. The order of a schema's properties means something to servers that
//! generate by it.

use std::fmt;

use bytes::Bytes;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;

/// See the module.
#[derive(Debug)]
pub(super) struct Fields(Vec<(String, Box<RawValue>)>);

impl Fields {
    /// The text of a member's value; of several of one name the last one, as readers of JSON have it.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|(known, _)| known == name).map(|(_, value)| value.get())
    }

    /// A member that is there and not null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| value != "null")
    }

    /// In the place of what had the name, or at the end.
    pub(super) fn set(&mut self, name: &str, value: &impl serde::Serialize) {
        // Text, numbers and the like always serialise.
        let Ok(value) = serde_json::value::to_raw_value(value) else { return };
        match self.0.iter().position(|(known, _)| known == name) {
            None => self.0.push((name.to_owned(), value)),
            Some(at) => {
                self.0[at].1 = value;
                let mut before = 0;
                self.0.retain(|(known, _)| {
                    before += usize::from(known == name);
                    known != name || before == 1
                });
            }
        }
    }

    /// The object as text.
    pub(super) fn to_bytes(&self) -> Bytes {
        let values = self.0.iter().map(|(name, value)| name.len() + value.get().len() + 8);
        let mut text = String::with_capacity(2 + values.sum::<usize>());
        text.push('{');
        for (at, (name, value)) in self.0.iter().enumerate() {
            if at > 0 {
                text.push(',');
            }
            text += &serde_json::Value::from(name.as_str()).to_string();
            text.push(':');
            text += value.get();
        }
        text.push('}');
        text.into()
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;

        impl<'de> Visitor<'de> for Members {
            type Value = Fields;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Fields, M::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Fields(members))
            }
        }

        deserializer.deserialize_map(Members)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_what_is_set_changes() {
        let text = r#"{"z":{"b":1.50,"a":[ 1 ]},"model":"m","n":123456789012345678901,"model":"k","é\"":null}"#;
        let mut fields: Fields = serde_json::from_str(text).expect("an object");
        assert_eq!(fields.get("model"), Some("\"k\""));
        assert!(fields.has("n") && !fields.has("é\"") && !fields.has("nothing"));
        fields.set("model", &"up");
        fields.set("salt", &"s");
        assert_eq!(
            fields.to_bytes(),
            r#"{"z":{"b":1.50,"a":[ 1 ]},"model":"up","n":123456789012345678901,"é\"":null,"salt":"s"}"#
        );
        assert!(serde_json::from_str::<Fields>("[]").is_err());
    }
}
