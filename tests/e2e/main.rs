//! End to end: real clusters of the binary, started as a user starts them. One program, so that what all of them share is
//! compiled and linked once; `cargo test -p kvasir --test e2e tokens::` runs the tests of one file.

#[path = "../../engines/reference/tests/support/checkpoint.rs"]
#[allow(dead_code, reason = "made for more tests than this one")]
mod checkpoint;
mod support;

mod agents;
mod balance;
mod beginnings;
mod chunks;
mod classes;
mod conductors;
mod contexts;
mod doctor;
mod drain;
mod faults;
mod fetch;
mod generated;
mod hangs;
mod hostile;
mod integrity;
mod kill9;
mod leaving;
mod push;
mod replay;
mod routed;
mod shared;
mod soak;
mod ssd;
mod tokens;
mod up;
