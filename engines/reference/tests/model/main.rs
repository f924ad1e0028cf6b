//! The model against its reference vectors and an independent implementation, and what it says of
//! folders and steps that cannot be.

#[path = "../support/arena.rs"]
mod arena;
#[path = "../support/checkpoint.rs"]
mod checkpoint;
#[path = "../support/naive.rs"]
mod naive;

mod folders;
mod naive_model;
mod reuse;
mod selection;
mod splice;
mod steps;
mod vectors;
