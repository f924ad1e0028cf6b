//! The object-store tier's shell: one task that talks to an object store which several nodes share, over S3's
//! protocol, and what it stands on.
//!
//! - [`worker`]: takes jobs of the node's thread, carries them out with deadlines, and says whether the object
//!   store answers
//! - [`object`]: the bytes of an object; [`name`]: its name, which says all that is known of a block
//! - [`open`]: the object store, as the configuration says; [`keys`]: what requests are signed with; [`http`]: how
//!   they are sent
//!
//! What is sent there, what is known to be there and what rises from there is decided by the block core.

pub mod http;
pub mod keys;
pub mod name;
pub mod object;
pub mod open;
pub mod worker;
