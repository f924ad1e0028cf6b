//! The object store, as the configuration says. Nothing is sent yet: whether anybody answers is found out later.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::{BackoffConfig, RetryConfig, StaticCredentialProvider};

use super::http::Connector;
use super::keys::{KeysOfFile, credential};
use super::name::Names;
use crate::config::ObjectStore;

/// A request that was refused for the moment, or lost, is sent again so often, within its deadline.
const TRIES_MAX: usize = 2;

/// An object store, and the names of its objects that are ours.
#[derive(Debug)]
pub(super) struct Opened {
    pub store: Arc<dyn object_store::ObjectStore>,
    pub names: Names,
}

/// `None` when none is configured.
///
/// # Errors
/// A sentence: the settings do not fit, or a file cannot be read.
pub(super) fn open(config: &ObjectStore) -> Result<Option<Opened>, String> {
    let Some((bucket, prefix)) = config.place()? else { return Ok(None) };
    let connections_max = config.in_flight_requests_max as usize + 1;
    let is_plain = config.endpoint.as_ref().is_some_and(|url| url.starts_with("http://"));
    let connector = match is_plain {
        true => Connector::plain(connections_max),
        false => Connector::tls(config.ca_file.clone(), connections_max)?,
    };
    let deadline = Duration::from_millis(config.upload_timeout_ms.max(config.read_timeout_ms));
    let retry = RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(50),
            max_backoff: Duration::from_secs(1),
            base: 2.0,
        },
        max_retries: TRIES_MAX,
        retry_timeout: deadline,
    };
    let mut builder = AmazonS3Builder::new()
        .with_bucket_name(bucket)
        .with_region(&config.region)
        .with_allow_http(is_plain)
        .with_retry(retry)
        // Some that speak S3 have no calls for many objects.
        .with_disable_bulk_delete(true)
        .with_http_connector(connector);
    if let Some(endpoint) = &config.endpoint {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/'));
    }
    builder = match (&config.credentials_file, &config.keys) {
        (Some(path), _) => builder.with_credentials(Arc::new(KeysOfFile::new(path.clone()))),
        (None, Some(keys)) => {
            let keys = credential(keys.clone());
            builder.with_credentials(Arc::new(StaticCredentialProvider::new(keys)))
        }
        (None, None) => builder,
    };
    let store =
        builder.build().map_err(|error| format!("cannot configure `object_store`: {error}"))?;
    Ok(Some(Opened { store: Arc::new(store), names: Names::new(&prefix) }))
}
