//! Who may ask, and how much: API keys and the quotas of tenants, from a file that is followed.
//!
//! - [`file`]: what stands in the file, read and checked
//! - [`tenant`]: one tenant's quotas and what it has used of them
//! - [`bucket`]: a number of units a minute; no clock
//!
//! Keys are kept as hashes and appear in no log and no metric. What a presented key's hash is looked
//! up by is blinded with a secret of this process, so that the time of a lookup says nothing about
//! the keys that exist.

mod bucket;
mod file;
mod tenant;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use axum::http::{HeaderMap, StatusCode, header};
use prometheus::IntCounter;
use ring::digest::{SHA256, digest};
use tokio_util::sync::CancellationToken;

use crate::openai::ApiError;
use crate::reload;
use crate::serve::CacheClass;

pub(crate) use file::{FileError, Tenants};
#[cfg(test)]
pub(crate) use tenant::Standing;
pub(crate) use tenant::{Admission, OverQuota, Tenant};

/// The SHA-256 of a key.
type KeyHash = [u8; 32];

/// The keys that are valid now.
#[derive(Debug)]
pub(crate) struct Access {
    path: PathBuf,
    secret: [u8; 32],
    valid: ArcSwap<Valid>,
    /// Requests without a valid key.
    refused: IntCounter,
}

/// Whose key a request carries, and what the file says of that key.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub tenant: Arc<Tenant>,
    /// Of requests that say nothing of it.
    pub cache_class: CacheClass,
}

/// What one reading of the file makes valid.
#[derive(Debug)]
struct Valid {
    tenants: HashMap<Arc<str>, Arc<Tenant>>,
    /// By blinded hash. `blake3::Hash` compares in constant time.
    keys: HashMap<blake3::Hash, Caller>,
}

impl Access {
    /// Reads the file. What is wrong with it keeps the conductor from starting.
    pub(crate) fn load(path: PathBuf, refused: IntCounter) -> Result<(Access, Tenants), FileError> {
        let read = Tenants::read(&path)?;
        let none = Valid { tenants: HashMap::new(), keys: HashMap::new() };
        let secret = rand::random();
        let access = Access { path, secret, valid: ArcSwap::from_pointee(none), refused };
        access.take(&read);
        Ok((access, read))
    }

    /// Reads the file again every `every`, until `shutdown`. Requests in flight go on, and tenants
    /// keep what they have used.
    pub(crate) async fn follow(
        self: Arc<Self>,
        first: Tenants,
        every: Duration,
        reloads: reload::Counters,
        shutdown: CancellationToken,
    ) {
        let path = self.path.clone();
        let follow = reload::follow(
            reload::Followed { what: "API keys", every, counters: reloads },
            first,
            move || Tenants::read(&path),
            |read| {
                self.take(read);
                Ok(())
            },
        );
        shutdown.run_until_cancelled(follow).await;
    }

    /// Whose key a request carries.
    ///
    /// # Errors
    /// 401 when there is none or it is not valid.
    pub(crate) fn caller(&self, headers: &HeaderMap) -> Result<Caller, ApiError> {
        let refuse = |message: &str| {
            self.refused.inc();
            ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
        };
        let Some(key) = bearer(headers) else {
            let message = "An API key is required: send `Authorization: Bearer KEY`.";
            return Err(refuse(message));
        };
        let hash = digest(&SHA256, key);
        let found = self.valid.load().keys.get(&self.blind(hash.as_ref())).cloned();
        found.ok_or_else(|| refuse("The API key is not valid."))
    }

    fn blind(&self, hash: &[u8]) -> blake3::Hash {
        blake3::keyed_hash(&self.secret, hash)
    }

    fn take(&self, read: &Tenants) {
        let before = self.valid.load();
        let mut valid = Valid { tenants: HashMap::new(), keys: HashMap::new() };
        for one in read.iter() {
            let tenant = before.tenants.get(&one.name).map(Arc::clone);
            let tenant = tenant.unwrap_or_else(|| Arc::new(Tenant::new(Arc::clone(&one.name))));
            tenant.set_quotas(one.quotas);
            tenant.set_standing(one.standing);
            for key in &one.keys {
                let caller = Caller { tenant: Arc::clone(&tenant), cache_class: key.cache_class };
                valid.keys.insert(self.blind(&key.hash), caller);
            }
            valid.tenants.insert(Arc::clone(&one.name), tenant);
        }
        self.valid.store(Arc::new(valid));
    }
}

/// The key in `Authorization: Bearer KEY`.
fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !key.is_empty()).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_bearer_has_a_key() {
        let check = |value: &'static str, want: Option<&str>| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().expect("a header"));
            assert_eq!(bearer(&headers), want.map(str::as_bytes), "{value:?}");
        };
        check("Bearer abc", Some("abc"));
        check("bearer  abc ", Some("abc"));
        check("Bearer ", None);
        check("Bearer", None);
        check("Basic abcdef", None);
        check("", None);
        assert_eq!(bearer(&HeaderMap::new()), None);
    }
}
