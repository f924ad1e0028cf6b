//! What a request says of its own place, where the configuration lets it.

use axum::http::HeaderMap;
use kvasir_placement::attend::Way;
use kvasir_proto::InstanceId;

use crate::openai::ApiError;
use crate::serve::Steered;

const INSTANCE: &str = "x-kvasir-instance";
const PREFIX: &str = "x-kvasir-prefix";
/// Instances are named by configurations, and no name is nearly as long.
const NAME_BYTES_MAX: usize = 256;
/// What can become of a prefix: rows are gathered by selection alone, which no engine asks for yet.
const WAYS: [(&str, Way); 3] =
    [("route", Way::Route), ("fetch", Way::Fetch), ("recompute", Way::Recompute)];

/// What the headers say.
///
/// # Errors
/// 400 that names the header.
pub(super) fn steered(headers: &HeaderMap, is_enabled: bool) -> Result<Steered, ApiError> {
    let instance = asked(headers, INSTANCE, is_enabled)?;
    let prefix = asked(headers, PREFIX, is_enabled)?;
    let instance = instance.map(|name| match name {
        "" => Err(ApiError::invalid(INSTANCE, format!("`{INSTANCE}` must name an instance."))),
        name => Ok(InstanceId::from(name)),
    });
    let prefix = prefix.map(|name| {
        let found = WAYS.into_iter().find(|(way, _)| *way == name);
        found.map(|(_, way)| way).ok_or_else(|| {
            let message = format!("`{PREFIX}` must be `route`, `fetch` or `recompute`.");
            ApiError::invalid(PREFIX, message)
        })
    });
    Ok(Steered { instance: instance.transpose()?, prefix: prefix.transpose()? })
}

fn asked<'a>(
    headers: &'a HeaderMap,
    name: &'static str,
    is_enabled: bool,
) -> Result<Option<&'a str>, ApiError> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    if !is_enabled {
        let message = format!("`{name}` is not accepted: `steering_enabled` is off.");
        return Err(ApiError::invalid(name, message));
    }
    let value = value.to_str().ok().map(str::trim).filter(|value| value.len() <= NAME_BYTES_MAX);
    let wrong = || {
        ApiError::invalid(
            name,
            format!("`{name}` must have at most {NAME_BYTES_MAX} visible ASCII characters."),
        )
    };
    value.map(Some).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_says_where_it_goes_only_where_that_is_on() {
        let check = |is_enabled, instance: Option<&str>, prefix: Option<&str>| {
            let mut headers = HeaderMap::new();
            for (name, value) in [(INSTANCE, instance), (PREFIX, prefix)] {
                if let Some(value) = value {
                    headers.insert(name, value.parse().expect("a header"));
                }
            }
            steered(&headers, is_enabled).map_err(|error| error.message)
        };
        let steered = |instance: Option<&str>, prefix| {
            Ok(Steered { instance: instance.map(InstanceId::from), prefix })
        };
        assert_eq!(check(false, None, None), steered(None, None));
        assert_eq!(check(true, Some(" both-2 "), None), steered(Some("both-2"), None));
        for (name, way) in WAYS {
            assert_eq!(check(true, None, Some(name)), steered(None, Some(way)));
        }
        assert_eq!(check(true, Some("b"), Some("fetch")), steered(Some("b"), Some(Way::Fetch)));
        for (instance, prefix) in [(Some("b"), None), (None, Some("route"))] {
            let said = check(false, instance, prefix).expect_err("it is off");
            assert!(said.contains("`steering_enabled` is off"), "{said}");
        }
        let long = "b".repeat(NAME_BYTES_MAX + 1);
        for instance in ["", " ", &long] {
            assert!(check(true, Some(instance), None).is_err(), "{instance:?}");
        }
        for prefix in ["", "gather", "Route", "fetch, route"] {
            assert!(check(true, None, Some(prefix)).is_err(), "{prefix:?}");
        }
    }
}
