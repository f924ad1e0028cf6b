//! The HTTP front door: connections with bounds, bodies with bounds, routes.
//!
//! - [`accept`]: the listening socket, one task a connection, draining
//! - [`places`]: room for connections
//! - [`stall`]: a socket that fails when its client takes nothing for too long
//! - [`tls`]: handshakes, and certificates that may change
//! - [`patience`]: how long a connection waits to be asked
//! - [`body`]: reads a request body within its limits
//! - [`identity`]: request ids, the span and the counters of each request
//! - [`class`], [`objectives`], [`priority`], [`steering`], [`trace`]: what else headers say
//! - [`routes`]: what is answered where

mod accept;
mod body;
mod class;
mod identity;
mod objectives;
mod patience;
mod places;
mod priority;
mod routes;
mod stall;
mod steering;
mod tls;
mod trace;

pub(crate) use accept::{Door, HttpOptions, serve};
pub(crate) use body::Bodies;
pub(crate) use identity::RequestId;
pub(crate) use objectives::ObjectiveBounds;
pub(crate) use routes::{Front, router};
pub(crate) use tls::{Tls, TlsBytes, TlsFiles};
pub(crate) use trace::Trace;
