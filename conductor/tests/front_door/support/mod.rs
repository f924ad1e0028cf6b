//! A cluster of fakes: each [`pair::Pair`] is a store node and its engine behind one gRPC server,
//! scripted, with everything that happens to it in one [`world::World`]. In front of them a real
//! conductor with the real tokenizer of the tiny model.

pub(crate) mod contract;
mod harness;
mod pair;
mod script;
pub(crate) mod shelf;
mod world;

pub(crate) use harness::{Harness, Response, config, prompt_keys};
pub(crate) use pair::{BLOCK_TOKENS, Pair, Role};
pub(crate) use script::{Leg, Reply, Script};
pub(crate) use world::{Happened, World, shares_aborted, shares_asked};
