//! A cluster of fakes: each [`pair::Pair`] is a store node and its engine behind one gRPC server,
//! scripted, with everything that happens to it in one [`world::World`]. In front of them a real
//! conductor with the real tokenizer of the tiny model.

pub mod contract;
pub mod harness;
pub mod pair;
pub mod script;
pub mod shelf;
pub mod world;

pub use harness::{Harness, Response, config, prompt_keys};
pub use pair::{BLOCK_TOKENS, Pair, Role};
pub use script::{Leg, Reply, Script};
pub use world::{Happened, World};
