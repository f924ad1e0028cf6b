//! What moves between two nodes, as far as it is decided and not done: which writes of a push are due,
//! how a push ends, and when a receiver may believe that nobody writes there any more. No I/O, like all
//! of this package: a shell issues the writes, asks and answers, and tells what became of it.
//!
//! Reading path: [`pages`] (what is known of one share's bytes), [`push`] (what is due), [`leaving`]
//! (a push until its end is seen to), [`tail`] (what follows the pages) and [`tail_space`] (where),
//! [`sent_pushes`] (what is remembered of it afterwards), [`peer_message`] (what two nodes say to each
//! other), [`writer_stops`] and [`writers`] (the receiver's side of an end), [`engine_stops`] (the end of
//! what an engine writes), [`copying`] (a chain that one node gives to another).

pub mod copying;
pub mod engine_stops;
pub mod leaving;
pub mod pages;
pub mod peer_message;
pub mod push;
pub mod sent_pushes;
pub mod tail;
pub mod tail_space;
pub mod writer_stops;
pub mod writers;

/// Names one push to one receiver: the incarnation of the receiver's transfer engine, and the immediate
/// that it gave out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PushName {
    pub receiver: u64,
    pub imm: u32,
}
