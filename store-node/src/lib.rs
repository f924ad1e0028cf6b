//! The daemon that owns a host's part of the cache
