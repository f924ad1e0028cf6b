//! Mutation points. A guard asks [`mutated`] whether it is switched off; a test must then fail.
//!
//! Only a mutation build, which is compiled with `--cfg kvasir_mutations`, contains mutations. It reads the
//! name of the one mutation to apply from the environment variable `KVASIR_MUTATION`. In every other build
//! [`mutated`] is the constant `false`. A `--cfg` is used and not a Cargo feature, because Cargo unifies
//! features and would compile the mutations into the tested binary as well.
//!
//! [`points`] lists every mutation with the test that must find it. `README.md` describes the runner.

#![forbid(unsafe_code)]

mod points;

pub use points::{Finder, Mutation, POINTS, Point};

/// Whether `mutation` is applied. A constant `false` unless this is a mutation build.
#[cfg(not(kvasir_mutations))]
#[inline(always)]
pub const fn mutated(_: Mutation) -> bool {
    false
}

/// Whether `mutation` is applied: whether `KVASIR_MUTATION` names it.
///
/// # Panics
///
/// If `KVASIR_MUTATION` names no mutation.
#[cfg(kvasir_mutations)]
pub fn mutated(mutation: Mutation) -> bool {
    static SELECTED: std::sync::OnceLock<Option<Mutation>> = std::sync::OnceLock::new();
    *SELECTED.get_or_init(selected) == Some(mutation)
}

#[cfg(kvasir_mutations)]
fn selected() -> Option<Mutation> {
    #[allow(clippy::disallowed_methods, reason = "only a mutation build reads it, for its tests")]
    let name = std::env::var("KVASIR_MUTATION").ok().filter(|name| !name.is_empty())?;
    let point = Point::find(&name);
    assert!(point.is_some(), "KVASIR_MUTATION={name}: no mutation has this name");
    point.map(|point| point.mutation)
}
