//! The HTTP front door: connections with bounds, bodies with bounds, routes.
//!
//! - [`accept`]: the listening socket, one task a connection, draining
//! - [`stall`]: a socket that fails when its client takes nothing for too long
//! - [`body`]: reads a request body within its limits
//! - [`identity`]: request ids, the span and the counters of each request
//! - [`routes`]: what is answered where

mod accept;
mod body;
mod identity;
mod routes;
mod stall;

pub(crate) use accept::{HttpOptions, serve};
pub(crate) use body::Bodies;
pub(crate) use routes::{Front, router};
