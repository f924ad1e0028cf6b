//! The store node's core: block states, transactions, leases, eviction; no I/O
