//! The transfer engine's core: sharding, immediate counters, endpoints, retry; no I/O
