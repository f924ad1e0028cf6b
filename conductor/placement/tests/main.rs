//! The core's tests as one program, so that it is linked once. `cargo test -p kvasir-placement --test core index::` runs
//! those of one file.

mod support;

mod admission;
mod attend;
mod balance;
mod bookings;
mod chunks;
mod chunks_together;
mod cost;
mod index;
mod instances;
mod place;
mod properties;
mod recorded;
mod roles;
mod routing;
mod selection;
mod shared_nodes;
mod steering;
mod waiting;
