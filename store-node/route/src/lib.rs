//! Routed attention: the query moves to the node that has the cached rows, and the partial `(o, m, l)`
//! moves back. No cached row leaves its node.
//!
//! Reading path:
//! 1. [`wire`]: what a query and an answer are
//! 2. [`requester`]: who owns the query. One message goes to each holder, all at once; an answer is taken
//!    whole or not at all, and its room is not used again before it has come
//! 3. [`holder`]: who has the rows. What arrives together for the same rows is computed together
//! 4. [`grouping`]: which queries those are
//! 5. `turns`: who takes the turns of the transfer engine at either end
//!
//! This package knows slots, rows and memory. Who may read which slots, and for how long, is the store
//! node's: it opens a route over slots that a lease pins, and closes it before the pins go.

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod grouping;
pub mod holder;
pub mod metrics;
pub mod requester;
mod sync;
mod turns;
pub mod wire;
