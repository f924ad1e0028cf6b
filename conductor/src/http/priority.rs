//! How urgent a request says that it is, within what its tenant may claim.

use axum::http::HeaderMap;
use kvasir_placement::waiting::Priority;

use crate::access::Tenant;
use crate::openai::ApiError;
use crate::serve::Claim;

const PRIORITY: &str = "x-kvasir-priority";

/// What a tenant's request claims.
///
/// # Errors
/// 400 that names the header.
pub(super) fn claim_of(headers: &HeaderMap, tenant: &Tenant) -> Result<Claim, ApiError> {
    let standing = tenant.standing();
    let most = standing.priority_max;
    let priority = match headers.get(PRIORITY) {
        None => standing.priority,
        Some(value) => {
            let named = value.to_str().ok().and_then(|name| Priority::named(name.trim()));
            named.filter(|priority| *priority >= most).ok_or_else(|| {
                let open = Priority::ALL.into_iter().filter(|priority| *priority >= most);
                let open: Vec<String> = open.map(|one| format!("`{}`", one.name())).collect();
                let message = format!("`{PRIORITY}` must be {} for this key.", open.join(" or "));
                ApiError::invalid(PRIORITY, message)
            })?
        }
    };
    Ok(Claim { tenant: tenant.salt(), weight: standing.weight, priority })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::Standing;

    #[test]
    fn a_request_may_claim_what_its_tenant_may() {
        let check = |priority, priority_max, header: Option<&str>, want: Option<Priority>| {
            let tenant = Tenant::new("t".into());
            tenant.set_standing(Standing { weight: 7, priority, priority_max });
            let mut headers = HeaderMap::new();
            if let Some(header) = header {
                headers.insert(PRIORITY, header.parse().expect("a header"));
            }
            let got = claim_of(&headers, &tenant).ok();
            assert_eq!(got.as_ref().map(|claim| claim.priority), want, "{header:?}");
            assert!(got.is_none_or(|claim| claim.weight == 7 && &*claim.tenant == "t"));
        };
        use Priority::{High, Low, Normal};
        check(Normal, Normal, None, Some(Normal));
        check(Low, Normal, None, Some(Low));
        check(Normal, Normal, Some("low"), Some(Low));
        check(Normal, Normal, Some("high"), None);
        check(Normal, High, Some("high"), Some(High));
        check(Low, Low, Some("normal"), None);
        check(Low, Low, Some("urgent"), None);
    }
}
