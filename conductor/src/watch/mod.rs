//! What a conductor shows of itself to those who run it: why requests went where they went, and how
//! the cluster is doing. Served on an address of its own, which asks for no keys and changes nothing.
//!
//! - [`recent`]: what the recorded decisions say of the last minute
//! - [`routes`]: what is answered where, and the page

mod recent;
mod routes;

pub(crate) use routes::{Watch, router};
