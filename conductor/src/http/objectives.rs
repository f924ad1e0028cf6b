//! What a request asks for of its own times, in the headers that llm-d's gateways use, within the
//! bounds of the configuration.

use std::ops::RangeInclusive;

use axum::http::HeaderMap;
use kvasir_placement::Objectives;

use crate::openai::ApiError;

const TTFT: &str = "x-llm-d-slo-ttft-ms";
const TPOT: &str = "x-llm-d-slo-tpot-ms";

/// What holds for requests that ask for nothing, and what the others may ask for.
#[derive(Debug, Clone)]
pub(crate) struct ObjectiveBounds {
    pub default: Objectives,
    pub ttft_ms: RangeInclusive<u64>,
    /// Of the time between tokens.
    pub tpot_ms: RangeInclusive<u64>,
}

impl ObjectiveBounds {
    /// The objectives of a request with these headers.
    ///
    /// # Errors
    /// 400 that names the header.
    pub(super) fn of(&self, headers: &HeaderMap) -> Result<Objectives, ApiError> {
        let ttft_us = asked(headers, TTFT, &self.ttft_ms)?.unwrap_or(self.default.ttft_us);
        let tbt_us = asked(headers, TPOT, &self.tpot_ms)?.unwrap_or(self.default.tbt_us);
        Ok(Objectives { ttft_us, tbt_us })
    }
}

fn asked(
    headers: &HeaderMap,
    name: &'static str,
    range: &RangeInclusive<u64>,
) -> Result<Option<u64>, ApiError> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let ms = value.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok());
    match ms.filter(|ms| range.contains(ms)) {
        Some(ms) => Ok(Some(ms.saturating_mul(1_000))),
        None => {
            let (low, high) = (range.start(), range.end());
            let message = format!("`{name}` must be whole milliseconds between {low} and {high}.");
            Err(ApiError::invalid(name, message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_header_stands_in_for_its_default() {
        let bounds = ObjectiveBounds {
            default: Objectives { ttft_us: 7, tbt_us: 8 },
            ttft_ms: 10..=20,
            tpot_ms: 1..=2,
        };
        let check = |ttft: Option<&str>, tpot: Option<&str>, want: Option<(u64, u64)>| {
            let mut headers = HeaderMap::new();
            for (name, value) in [(TTFT, ttft), (TPOT, tpot)] {
                if let Some(value) = value {
                    headers.insert(name, value.parse().expect("a header"));
                }
            }
            let got = bounds.of(&headers).ok();
            assert_eq!(got.map(|got| (got.ttft_us, got.tbt_us)), want, "{ttft:?} {tpot:?}");
        };
        check(None, None, Some((7, 8)));
        check(Some("10"), None, Some((10_000, 8)));
        check(Some("20"), Some("2"), Some((20_000, 2_000)));
        check(None, Some("1"), Some((7, 1_000)));
        check(Some("9"), None, None);
        check(Some("21"), None, None);
        check(Some("20"), Some("3"), None);
    }
}
