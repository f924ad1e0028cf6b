//! What the end-to-end tests share: a cluster started by the real binary as a user starts it, its
//! metrics, the reference vectors, load and rest. Each test file uses its part of it.
#![allow(dead_code, reason = "every test file is built with all of it")]

pub mod cluster;
pub mod load;
pub mod metrics;
pub mod rest;
pub mod vectors;

use std::time::{Duration, Instant};

/// Asks again and again until it is so; panics with `what` when it has not become so in time. The
/// time is a bound for a broken system, not something that is measured.
pub async fn eventually<F>(what: &str, mut is_so: impl FnMut() -> F)
where
    F: Future<Output = bool>,
{
    let deadline = Instant::now() + Duration::from_secs(30);
    while !is_so().await {
        assert!(Instant::now() < deadline, "it did not come about that {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
