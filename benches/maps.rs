//! A map that several threads share: one lock around it, or `dashmap`.
//!
//! `cargo bench -p kvasir-route --bench maps` prints nanoseconds of wall time for each request of one thread, as the
//! median of `ROUNDS`, for two patterns:
//!
//! - one key for each request: the sessions of a requester and the holders of an engine's router;
//! - a batch of keys for each request, which are looked up and then written: the prompt pieces that the conductor's
//!   proxy remembers ([`PIECES`] pieces are a prompt of 16 KiB).
#![allow(clippy::print_stdout, reason = "its output is its purpose")]

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use dashmap::DashMap;

const ROUNDS: usize = 5;
/// Lookups of each thread in a round. Starting a thread takes a negligible part of that.
const LOOKUPS: u64 = 4_000_000;
const KEYS: u64 = 1_000;
const PIECES: u64 = 64;

/// A map that any thread may use.
trait Shared: Default + Sync {
    fn get_all(&self, keys: &[u64]) -> usize;
    fn set_all(&self, keys: &[u64]);
}

#[derive(Default)]
struct Locked(Mutex<HashMap<u64, u64>>);

impl Shared for Locked {
    fn get_all(&self, keys: &[u64]) -> usize {
        let map = self.0.lock().expect("no thread panics");
        keys.iter().filter(|key| map.contains_key(key)).count()
    }

    fn set_all(&self, keys: &[u64]) {
        self.0.lock().expect("no thread panics").extend(keys.iter().map(|key| (*key, 1)));
    }
}

#[derive(Default)]
struct Sharded(DashMap<u64, u64>);

impl Shared for Sharded {
    fn get_all(&self, keys: &[u64]) -> usize {
        keys.iter().filter(|key| self.0.contains_key(key)).count()
    }

    fn set_all(&self, keys: &[u64]) {
        for key in keys {
            self.0.insert(*key, 1);
        }
    }
}

/// The keys of a request, among `KEYS` different ones.
fn keys(request: u64, count: u64) -> impl Iterator<Item = u64> {
    let first = request.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    (0..count).map(move |at| (first + at) % KEYS)
}

/// Nanoseconds for each request of one thread.
fn round<M: Shared>(threads: u64, keys_each: u64, writes: bool) -> u64 {
    let requests = LOOKUPS / keys_each;
    let map = M::default();
    map.set_all(&(0..KEYS).collect::<Vec<_>>());
    let began = Instant::now();
    thread::scope(|scope| {
        for thread in 0..threads {
            let map = &map;
            scope.spawn(move || {
                let mut wanted = Vec::new();
                for request in 0..requests {
                    wanted.clear();
                    wanted.extend(keys(request * threads + thread, keys_each));
                    black_box(map.get_all(&wanted));
                    if writes {
                        map.set_all(&wanted);
                    }
                }
            });
        }
    });
    began.elapsed().as_nanos() as u64 / requests
}

fn median<M: Shared>(threads: u64, keys_each: u64, writes: bool) -> u64 {
    let mut rounds = [0; ROUNDS].map(|_| round::<M>(threads, keys_each, writes));
    rounds.sort_unstable();
    rounds[ROUNDS / 2]
}

fn main() {
    println!("| keys of a request | threads | lock, ns | dashmap, ns |");
    println!("| --- | ---: | ---: | ---: |");
    for (what, keys_each, writes) in
        [("1, looked up", 1, false), ("64, looked up and written", PIECES, true)]
    {
        for threads in [1, 2, 4, 8] {
            let locked = median::<Locked>(threads, keys_each, writes);
            let sharded = median::<Sharded>(threads, keys_each, writes);
            println!("| {what} | {threads} | {locked} | {sharded} |");
        }
    }
}
