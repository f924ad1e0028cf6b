//! Settings of the object store that nodes share.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The keys of an account. They are never printed.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Keys {
    pub access_key_id: String,
    pub secret_access_key: String,
    pub session_token: Option<String>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(not shown)")
    }
}

/// Where the context cache is also kept, and where every node with the same settings finds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectStore {
    /// A bucket of an object store that speaks S3's protocol, and what the names of its objects begin with, as
    /// in "s3://bucket/kvasir". Without it there is no such tier.
    pub url: Option<String>,
    /// Where the object store is reached, as in `https://minio.example.org:9000`. Without it that is Amazon's
    /// S3 of the region.
    pub endpoint: Option<String>,
    /// The region that requests are signed for.
    pub region: String,
    /// A file of TOML with `access_key_id`, `secret_access_key` and, if there is one, `session_token`. It is read
    /// again every minute. Without it they are AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN of
    /// the environment, and without those the ones that the machine gets from the cloud it runs in.
    pub credentials: Option<PathBuf>,
    /// Certificates, in PEM, of the authorities that may vouch for an endpoint over TLS. Without it those of the
    /// host.
    pub authority: Option<PathBuf>,
    /// Blocks that are read and sent at once: half of them are for reading.
    pub requests_max: u32,
    /// Bytes of those blocks; half of them are for reading. One block of each kind may be larger.
    pub bytes_in_flight_max: u64,
    /// A read that takes longer, in milliseconds, is not waited for: requests compute what they lack, and nothing
    /// is begun with the object store until it answers again.
    pub timeout_ms: u64,
    /// Blocks that take longer to send, in milliseconds, are given up for then.
    pub upload_timeout_ms: u64,
    /// How often, in milliseconds, this node looks for blocks of other nodes, and deletes those whose time is over.
    pub list_every_ms: u64,
    /// Blocks there that are known at once. More are not found, and none is sent.
    pub blocks_max: u32,
    /// Bytes there of one tenant that this node adds when it has no SSD; with one, the SSD's bound counts.
    pub tenant_bytes_max: u64,
    /// What `main` has found in the environment.
    #[serde(skip)]
    #[schemars(skip)]
    pub keys: Option<Keys>,
}

impl Default for ObjectStore {
    fn default() -> Self {
        ObjectStore {
            url: None,
            endpoint: None,
            region: "us-east-1".into(),
            credentials: None,
            authority: None,
            requests_max: 16,
            bytes_in_flight_max: 128 << 20,
            timeout_ms: 2_000,
            upload_timeout_ms: 30_000,
            list_every_ms: 300_000,
            blocks_max: 262_144,
            tenant_bytes_max: 1 << 30,
            keys: None,
        }
    }
}

impl ObjectStore {
    /// The bucket, and what the names of its objects begin with; `None` without a URL.
    ///
    /// # Errors
    /// A sentence, when the URL is none of a bucket.
    pub fn place(&self) -> Result<Option<(String, String)>, String> {
        let Some(url) = &self.url else { return Ok(None) };
        let wrong = || {
            format!(
                "`object_store.url` is {url:?}; it must name a bucket as \"s3://bucket/prefix\""
            )
        };
        let rest = url.strip_prefix("s3://").ok_or_else(wrong)?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_end_matches('/');
        let is_plain = |text: &str| {
            text.chars().all(|c| c.is_ascii_alphanumeric() || "-._/".contains(c))
                && !text.contains("//")
        };
        if bucket.is_empty() || prefix.starts_with('/') || !is_plain(bucket) || !is_plain(prefix) {
            return Err(wrong());
        }
        Ok(Some((bucket.to_owned(), prefix.to_owned())))
    }

    pub(super) fn check(&self) -> Result<(), String> {
        self.place()?;
        for (name, number) in [
            ("timeout_ms", self.timeout_ms),
            ("upload_timeout_ms", self.upload_timeout_ms),
            ("list_every_ms", self.list_every_ms),
            ("bytes_in_flight_max", self.bytes_in_flight_max),
            ("blocks_max", self.blocks_max.into()),
        ] {
            if number == 0 {
                return Err(format!("`object_store.{name}` must be above zero"));
            }
        }
        if !(2..=1024).contains(&self.requests_max) {
            return Err("`object_store.requests_max` must be from 2 to 1024".into());
        }
        match &self.endpoint {
            Some(endpoint)
                if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") =>
            {
                Err(format!(
                    "`object_store.endpoint` is {endpoint:?}; it must begin with http:// or https://"
                ))
            }
            _ => Ok(()),
        }
    }
}
