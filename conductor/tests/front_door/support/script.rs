//! What a fake does when it is called. May be changed while it runs; a call looks when it begins.

use kvasir_proto::Side;
use tonic::Code;

/// What a node does with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reply {
    Do,
    Fail(Code),
    /// Never answers.
    Hang,
    /// Answers when the script says something else.
    Hold,
}

/// What an engine does with a leg.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Leg {
    Do,
    /// Fails before anything is sent.
    Fail(Code),
    /// Is accepted and then silent.
    Hang,
    /// Is silent until the script says something else.
    Hold,
    /// After so many tokens, fails.
    FailAfter(u32, Code),
    /// After so many tokens, is silent.
    HangAfter(u32),
    /// After so many tokens, is silent until the script says something else.
    HoldAfter(u32),
    /// Fails the first call; does the others.
    FailFirst(Code),
    /// Ends without a last word.
    End,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Script {
    pub allocate: Reply,
    /// Of allocations of the source side, what follows.
    pub pin: Reply,
    pub replicate: Reply,
    /// Its engine can have blocks attended elsewhere.
    pub routes: bool,
    pub push: Reply,
    pub commit: Reply,
    /// Renewals of shares of this side are never answered.
    pub unrenewed: Option<Side>,
    /// What becomes of the next renewals, the first one first; those after them are done.
    pub renewals: Vec<Reply>,
    /// So many calls of TxAbort fail before one succeeds.
    pub aborts_to_fail: u32,
    /// It has an SSD.
    pub keeps: bool,
    pub keep: Reply,
    /// What becomes of the next calls to keep something, the first one first.
    pub keeps_next: Vec<Reply>,
    /// Blocks that it finds of a chain that it is to keep, at most.
    pub keep_blocks_max: usize,
    pub list: Reply,
    pub drop: Reply,
    /// Somebody else has all its slots.
    pub full: bool,
    /// Of its node.
    pub slots: u32,
    /// Its events end, and it does not describe itself: it cannot be followed.
    pub away: bool,
    /// It describes itself, and does not say what it holds.
    pub silent: bool,
    /// Answers as another incarnation than the one it described itself as.
    pub restarted: bool,
    /// Another number is another model under the same name.
    pub fingerprint: u8,
    pub context_tokens: u32,
    pub prefill: Leg,
    pub decode: Leg,
    /// Source side: blocks that land, at most.
    pub good_blocks_max: u32,
    /// What the prefill side says is cached, in blocks.
    pub cached_blocks: u32,
    /// Blocks it says it holds, in its events.
    pub keys: Vec<u8>,
    /// What stands in each token's text, besides its number.
    pub padding: String,
    /// Text that only comes with the last event.
    pub held_back: &'static str,
    pub stop_matched: &'static str,
    /// How long opening a route took, in microseconds, and whether a first connection was made for it.
    pub opening: (u64, bool),
    /// Layers of its prompt that were attended elsewhere, how long they took, and the queries of all.
    pub prompt_routed: (u32, u64, u64),
}

impl Default for Script {
    fn default() -> Self {
        Script {
            allocate: Reply::Do,
            pin: Reply::Do,
            replicate: Reply::Do,
            routes: false,
            push: Reply::Do,
            commit: Reply::Do,
            unrenewed: None,
            renewals: Vec::new(),
            aborts_to_fail: 0,
            keeps: false,
            keep: Reply::Do,
            keeps_next: Vec::new(),
            keep_blocks_max: usize::MAX,
            list: Reply::Do,
            drop: Reply::Do,
            full: false,
            slots: 100_000,
            away: false,
            silent: false,
            restarted: false,
            fingerprint: 7,
            context_tokens: 512,
            prefill: Leg::Do,
            decode: Leg::Do,
            good_blocks_max: u32::MAX,
            cached_blocks: 0,
            keys: Vec::new(),
            padding: String::new(),
            held_back: "",
            stop_matched: "",
            opening: (0, false),
            prompt_routed: (0, 0, 0),
        }
    }
}
