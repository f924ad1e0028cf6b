//! The object-store tier's shell: a task that accesses a shared object store over the S3 protocol.
//!
//! - [`jobs`]: the jobs of the node's thread, and the reports that come back
//! - [`worker`]: takes jobs, carries them out with deadlines, and says whether the object store answers
//! - [`object`]: the bytes of an object; [`name`]: its name, which says all that is known of a block
//! - [`open`]: the object store, as the configuration says; [`keys`]: what requests are signed with; [`http`]: how
//!   they are sent
//!
//! The block core decides which blocks are uploaded, indexed and promoted.
//!
//! The client of S3 and everything around it are behind the feature `object-store`. Without it there are only the
//! types that the node's thread uses, and a configuration with an object store is refused.

#[cfg_attr(not(feature = "object-store"), expect(dead_code, reason = "no task takes jobs"))]
pub(crate) mod jobs;

#[cfg(feature = "object-store")]
mod http;
#[cfg(feature = "object-store")]
mod keys;
#[cfg(feature = "object-store")]
pub(crate) mod name;
#[cfg(feature = "object-store")]
pub(crate) mod object;
#[cfg(feature = "object-store")]
mod open;
#[cfg(feature = "object-store")]
mod worker;

use std::sync::Arc;

use kvasir_transfer::memory::SharedMemory;
use tokio::runtime::Handle;

use self::jobs::{BucketTask, Reports};
use crate::config::ObjectStore;

/// Starts the task on `runtime`, if an object store is configured. The task finds out later whether the object store
/// answers.
///
/// # Errors
/// A sentence: this program has no client for the object store, the settings are invalid, or a file cannot be read.
#[cfg_attr(
    not(feature = "object-store"),
    expect(unused_variables, reason = "only the task uses them")
)]
pub(crate) fn start(
    runtime: &Handle,
    config: &ObjectStore,
    slots: Arc<SharedMemory>,
    reports: Reports,
) -> Result<Option<BucketTask>, String> {
    require_client(config, cfg!(feature = "object-store"))?;
    #[cfg(feature = "object-store")]
    if let Some(opened) = open::open(config)? {
        return Ok(Some(worker::start(runtime, config.clone(), opened, slots, reports)));
    }
    Ok(None)
}

/// Refuses an object store that this program cannot talk to.
fn require_client(config: &ObjectStore, has_client: bool) -> Result<(), String> {
    if config.place()?.is_none() || has_client {
        return Ok(());
    }
    Err("`object_store.url` is set, but this program was built without the object store's client: build it with \
         `cargo build --release -p kvasir --features object-store`"
        .into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_store_is_refused_by_a_program_without_its_client() {
        let config = |url: Option<&str>| ObjectStore {
            url: url.map(str::to_owned),
            ..ObjectStore::default()
        };
        let (none, some) = (config(None), config(Some("s3://blocks/cluster")));
        assert_eq!(require_client(&none, false), Ok(()));
        assert_eq!(require_client(&some, true), Ok(()));
        let error = require_client(&some, false).expect_err("there is no client");
        assert!(error.contains("`object_store.url`"), "{error}");
        assert!(error.contains("--features object-store"), "{error}");
        assert!(require_client(&config(Some("ftp://x")), true).is_err());
    }
}
