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

/// The object store tier: contexts are stored in it too, and every node with the same settings finds them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectStore {
    /// S3 bucket and prefix of the object names, as in "s3://bucket/kvasir". Without it there is no object store
    /// tier.
    pub url: Option<String>,
    /// Endpoint of the object store, as in `https://minio.example.org:9000`. The default is Amazon S3 in `region`.
    pub endpoint: Option<String>,
    /// Region for which requests are signed.
    pub region: String,
    /// TOML file with `access_key_id`, `secret_access_key` and optionally `session_token`. It is read again every
    /// minute. Without it the node uses AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN of its
    /// environment, and without those the credentials that its cloud assigns to the machine.
    pub credentials_file: Option<PathBuf>,
    /// CA certificates, in PEM, that verify the endpoint's TLS certificate. The default is the CA certificates of
    /// the host.
    pub ca_file: Option<PathBuf>,
    /// Reads and uploads in flight. Half of them are reserved for reads.
    pub in_flight_requests_max: u32,
    /// Bytes of the reads and uploads in flight. Half of them are reserved for reads. One block of each kind may be
    /// larger.
    pub in_flight_bytes_max: u64,
    /// Timeout, in milliseconds, of a read. After it requests recompute their blocks, and the node starts no
    /// operation until the object store answers again.
    pub read_timeout_ms: u64,
    /// Timeout, in milliseconds, of an upload. After it the upload is cancelled.
    pub upload_timeout_ms: u64,
    /// Interval, in milliseconds, at which this node lists the objects of other nodes and deletes expired ones.
    pub list_interval_ms: u64,
    /// Objects that the node tracks. It does not find further objects and uploads none.
    pub blocks_max: u32,
    /// Bytes of one tenant that a node without an SSD uploads. With an SSD `ssd.tenant_bytes_max` applies.
    pub tenant_bytes_max: u64,
    /// Credentials that `main` read from the environment.
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
            credentials_file: None,
            ca_file: None,
            in_flight_requests_max: 16,
            in_flight_bytes_max: 128 << 20,
            read_timeout_ms: 2_000,
            upload_timeout_ms: 30_000,
            list_interval_ms: 300_000,
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
            format!("`object_store.url` is {url:?}; write a bucket as in \"s3://bucket/prefix\"")
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
            ("read_timeout_ms", self.read_timeout_ms),
            ("upload_timeout_ms", self.upload_timeout_ms),
            ("list_interval_ms", self.list_interval_ms),
            ("in_flight_bytes_max", self.in_flight_bytes_max),
            ("blocks_max", self.blocks_max.into()),
        ] {
            if number == 0 {
                return Err(format!("`object_store.{name}` must be above 0"));
            }
        }
        if !(2..=1024).contains(&self.in_flight_requests_max) {
            return Err("`object_store.in_flight_requests_max` must be from 2 to 1024".into());
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
