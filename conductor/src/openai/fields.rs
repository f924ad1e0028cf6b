//! Takes the members of a request's JSON object out one by one, each checked for kind and range,
//! so that every refusal names its parameter. What is left at the end is unknown and refused: a
//! client that misspells a parameter must not get an answer made without it.

use std::ops::RangeInclusive;

use axum::http::StatusCode;
use serde_json::{Map, Value};

use super::error::{ApiError, shown};

/// The members that have not been taken yet.
#[derive(Debug)]
pub(crate) struct Fields {
    rest: Map<String, Value>,
    /// Where this object stands in the request, with a dot after it; empty at the top.
    path: String,
}

impl Fields {
    /// Parses a whole body.
    pub(crate) fn parse(body: &[u8]) -> Result<Fields, ApiError> {
        let refuse = |message| ApiError::new(StatusCode::BAD_REQUEST, "invalid_json", message);
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| refuse(format!("The body is not valid JSON: {error}.")))?;
        match value {
            Value::Object(rest) => Ok(Fields { rest, path: String::new() }),
            other => {
                Err(refuse(format!("The body must be a JSON object, not {}.", kind_of(&other))))
            }
        }
    }

    /// An object inside the request, named for errors.
    pub(crate) fn nested(rest: Map<String, Value>, name: &str) -> Fields {
        Fields { rest, path: format!("{name}.") }
    }

    /// The full name of a member, for errors.
    pub(crate) fn name(&self, member: &str) -> String {
        format!("{}{member}", self.path)
    }

    /// Takes a member; `null` counts as absent.
    pub(crate) fn value(&mut self, member: &str) -> Option<Value> {
        #[cfg(test)]
        asked::note(self.name(member));
        self.rest.remove(member).filter(|value| !value.is_null())
    }

    pub(crate) fn required(&mut self, member: &str) -> Result<Value, ApiError> {
        let name = self.name(member);
        self.value(member).ok_or_else(|| ApiError {
            code: "missing_required_parameter",
            ..ApiError::invalid(&name, format!("`{name}` is required."))
        })
    }

    pub(crate) fn string(&mut self, member: &str) -> Result<Option<String>, ApiError> {
        match self.value(member) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong_kind(member, "a string", &other)),
        }
    }

    pub(crate) fn boolean(&mut self, member: &str) -> Result<Option<bool>, ApiError> {
        match self.value(member) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong_kind(member, "true or false", &other)),
        }
    }

    pub(crate) fn flag(&mut self, member: &str) -> Result<bool, ApiError> {
        Ok(self.boolean(member)?.unwrap_or(false))
    }

    pub(crate) fn number(
        &mut self,
        member: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.value(member) else { return Ok(None) };
        let Some(number) = value.as_f64() else {
            return Err(self.wrong_kind(member, "a number", &value));
        };
        if !range.contains(&number) {
            let (low, high) = (range.start(), range.end());
            return Err(self.out_of_range(member, &format!("between {low} and {high}"), &value));
        }
        Ok(Some(number as f32))
    }

    pub(crate) fn integer(
        &mut self,
        member: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.value(member) else { return Ok(None) };
        // JSON has one kind of number: 1.0 is an integer too, and 2^64 is one out of range.
        let integer = match value.as_i64() {
            Some(integer) => Some(integer),
            None if value.is_u64() => Some(i64::MAX),
            None => value.as_f64().filter(|float| float.fract() == 0.0).map(|float| float as i64),
        };
        let Some(integer) = integer else {
            return Err(self.wrong_kind(member, "an integer", &value));
        };
        if !range.contains(&integer) {
            let (low, high) = (range.start(), range.end());
            let range = match *high {
                i64::MAX => format!("at least {low}"),
                _ => format!("between {low} and {high}"),
            };
            return Err(self.out_of_range(member, &range, &value));
        }
        Ok(Some(integer))
    }

    pub(crate) fn object(&mut self, member: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.value(member) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(self.wrong_kind(member, "an object", &other)),
        }
    }

    /// Takes members that have no influence on the answer.
    pub(crate) fn ignore(&mut self, members: &[&str]) {
        for member in members {
            #[cfg(test)]
            asked::note(self.name(member));
            self.rest.remove(*member);
        }
    }

    /// Takes a member that may only have the value that changes nothing.
    pub(crate) fn only_neutral(
        &mut self,
        member: &str,
        neutral: impl FnOnce(&Value) -> bool,
    ) -> Result<(), ApiError> {
        match self.value(member) {
            Some(value) if !neutral(&value) => {
                let name = self.name(member);
                Err(ApiError::unsupported(&name, format!("`{name}` is not supported.")))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what nobody took.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.rest.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((member, _)) => {
                let name = self.name(member);
                let name = shown(&name);
                let message = format!("`{name}` is not a known parameter.");
                Err(ApiError { code: "unknown_parameter", ..ApiError::invalid(&name, message) })
            }
        }
    }

    pub(crate) fn wrong_kind(&self, member: &str, want: &str, got: &Value) -> ApiError {
        let name = self.name(member);
        let message = format!("`{name}` must be {want}, not {}.", kind_of(got));
        ApiError { code: "invalid_type", ..ApiError::invalid(&name, message) }
    }

    fn out_of_range(&self, member: &str, range: &str, got: &Value) -> ApiError {
        let name = self.name(member);
        ApiError::invalid(&name, format!("`{name}` must be {range}, not {got}."))
    }
}

/// Which members were asked for on this thread, for the test that holds them against the document.
#[cfg(test)]
pub(super) mod asked {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    thread_local! {
        static NAMES: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
    }

    pub(in crate::openai) fn note(name: String) {
        NAMES.with_borrow_mut(|names| names.insert(name));
    }

    pub(in crate::openai) fn take() -> BTreeSet<String> {
        NAMES.take()
    }
}

/// A JSON kind in words.
pub(crate) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Neutral values of members that are not supported otherwise.
pub(crate) mod neutral {
    use serde_json::Value;

    /// False, or an empty list, object or string.
    pub(crate) fn empty(value: &Value) -> bool {
        match value {
            Value::Null => true,
            Value::Bool(flag) => !flag,
            Value::String(text) => text.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::Number(_) => false,
        }
    }

    pub(crate) fn number(want: f64) -> impl FnOnce(&Value) -> bool {
        move |value| value.as_f64() == Some(want)
    }

    /// One of these strings.
    pub(crate) fn text(want: &'static [&'static str]) -> impl FnOnce(&Value) -> bool {
        move |value| value.as_str().is_some_and(|text| want.contains(&text))
    }
}
