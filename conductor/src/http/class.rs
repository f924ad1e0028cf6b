//! What a request says of its blocks: whether they are worth keeping.

use axum::http::HeaderMap;

use crate::openai::ApiError;
use crate::serve::CacheClass;

const CACHE: &str = "x-kvasir-cache-class";

/// What the header says, or else `default`, which is what its key says.
///
/// # Errors
/// 400 that names the header.
pub(super) fn class_of(headers: &HeaderMap, default: CacheClass) -> Result<CacheClass, ApiError> {
    let Some(value) = headers.get(CACHE) else { return Ok(default) };
    let named = value.to_str().ok().and_then(|name| CacheClass::named(name.trim()));
    named.ok_or_else(|| {
        let names = CacheClass::ALL.map(|class| format!("`{}`", class.name()));
        ApiError::invalid(CACHE, format!("`{CACHE}` must be {}.", names.join(" or ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_stands_in_for_what_the_key_says() {
        use CacheClass::{Ephemeral, Normal};
        let check = |header: Option<&str>, default, want: Option<CacheClass>| {
            let mut headers = HeaderMap::new();
            if let Some(header) = header {
                headers.insert(CACHE, header.parse().expect("a header"));
            }
            let got = class_of(&headers, default);
            if let Err(error) = &got {
                assert_eq!(
                    error.message,
                    "`x-kvasir-cache-class` must be `normal` or `ephemeral`."
                );
            }
            assert_eq!(got.ok(), want, "{header:?} {default:?}");
        };
        check(None, Normal, Some(Normal));
        check(None, Ephemeral, Some(Ephemeral));
        check(Some("ephemeral"), Normal, Some(Ephemeral));
        check(Some(" ephemeral "), Normal, Some(Ephemeral));
        check(Some("normal"), Ephemeral, Some(Normal));
        for wrong in ["", "Ephemeral", "context", "ephemeral, normal", "no-store"] {
            check(Some(wrong), Normal, None);
        }
    }
}
