//! The trace that a request belongs to (W3C Trace Context): what the caller says of it is passed on,
//! with a span of its own for each call.

use std::sync::Arc;

use axum::http::HeaderMap;
use rand::Rng;

const HEADER: &str = "traceparent";

/// A trace that a caller named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Trace {
    /// 32 hexadecimal digits.
    id: Arc<str>,
    /// Two hexadecimal digits: whether the trace is recorded.
    flags: Arc<str>,
}

impl Trace {
    /// What is not of the form of version 00 counts as absent, as the standard has it. Of later
    /// versions the parts that 00 knows are read.
    pub(super) fn of(headers: &HeaderMap) -> Option<Trace> {
        let text = headers.get(HEADER)?.to_str().ok()?;
        let mut parts = text.trim().split('-');
        let (version, id) = (parts.next()?, parts.next()?);
        let (parent, flags) = (parts.next()?, parts.next()?);
        let known = version != "ff" && (version != "00" || parts.next().is_none());
        let hex = is_hex(version, 2) && is_hex(id, 32) && is_hex(parent, 16) && is_hex(flags, 2);
        let named = id.bytes().any(|digit| digit != b'0') && parent.bytes().any(|d| d != b'0');
        (known && hex && named).then(|| Trace { id: id.into(), flags: flags.into() })
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    /// The header for one call that is made for this request: a new span.
    pub(crate) fn child(&self) -> String {
        let span = rand::rng().random_range(1..=u64::MAX);
        format!("00-{}-{span:016x}-{}", self.id, self.flags)
    }
}

fn is_hex(text: &str, digits: usize) -> bool {
    let lower = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == digits && text.bytes().all(lower)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, want: Option<&str>) {
        let mut headers = HeaderMap::new();
        headers.insert(HEADER, text.parse().expect("a header"));
        let trace = Trace::of(&headers);
        assert_eq!(trace.as_ref().map(Trace::id), want, "{text}");
        let Some(trace) = trace else { return };
        let (one, other) = (trace.child(), trace.child());
        assert_ne!(one, other, "each call is a span of its own");
        headers.insert(HEADER, one.parse().expect("a header"));
        assert_eq!(Trace::of(&headers), Some(trace), "and of the same trace");
    }

    #[test]
    fn a_trace_is_named_as_the_standard_says_or_not_at_all() {
        let id = "4bf92f3577b34da6a3ce929d0e0e4736";
        let (parent, zeros) = ("00f067aa0ba902b7", "0".repeat(32));
        check(&format!("00-{id}-{parent}-01"), Some(id));
        check(&format!("01-{id}-{parent}-00-more"), Some(id));
        check(&format!("00-{id}-{parent}-01-more"), None);
        check(&format!("ff-{id}-{parent}-01"), None);
        check(&format!("00-{}-{parent}-01", id.to_uppercase()), None);
        check(&format!("00-{zeros}-{parent}-01"), None);
        check(&format!("00-{id}-{}-01", &zeros[..16]), None);
        check(&format!("00-{id}-{parent}"), None);
        check("", None);
    }
}
