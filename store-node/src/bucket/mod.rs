//! The object-store tier's shell: one task that talks to an object store which several nodes share, over S3's
//! protocol, and what it stands on.
//!
//! - [`jobs`]: the jobs of the node's thread, and the reports that come back
//! - [`worker`]: takes jobs, carries them out with deadlines, and says whether the object store answers
//! - [`object`]: the bytes of an object; [`name`]: its name, which says all that is known of a block
//! - [`open`]: the object store, as the configuration says; [`keys`]: what requests are signed with; [`http`]: how
//!   they are sent
//!
//! What is sent there, what is known to be there and what rises from there is decided by the block core.
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

use kvasir_transfer::SharedMemory;
use tokio::runtime::Handle;

use self::jobs::{BucketTask, Reports};
use crate::config::ObjectStore;

/// Starts the task on `runtime`, if an object store is configured. Whether it answers is found out later.
///
/// # Errors
/// A sentence: the settings do not fit, or a file cannot be read.
#[cfg(feature = "object-store")]
pub(crate) fn start(
    runtime: &Handle,
    config: &ObjectStore,
    slots: Arc<SharedMemory>,
    reports: Reports,
) -> Result<Option<BucketTask>, String> {
    let Some(opened) = open::open(config)? else { return Ok(None) };
    Ok(Some(worker::start(runtime, config.clone(), opened, slots, reports)))
}

/// Without the feature `object-store` there is nothing to start.
///
/// # Errors
/// A sentence with the command that builds what is missing, if an object store is configured.
#[cfg(not(feature = "object-store"))]
pub(crate) fn start(
    _: &Handle,
    config: &ObjectStore,
    _: Arc<SharedMemory>,
    _: Reports,
) -> Result<Option<BucketTask>, String> {
    match config.place()? {
        None => Ok(None),
        Some(_) => Err("`object_store.url` is set, but this program was built without the object store's client: \
                        build it with `cargo build --release -p kvasir --features object-store`"
            .into()),
    }
}
