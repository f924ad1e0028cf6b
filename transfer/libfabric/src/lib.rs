//! libfabric opened at run time: one-sided writes with immediates over reliable datagrams.

pub mod bindings;
