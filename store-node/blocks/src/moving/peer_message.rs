//! What two nodes say to each other over the transfer engine: only about pushes that end early.

use super::PushName;

/// See the module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerMessage {
    /// Receiver to writer: issue nothing more of this push, and say when nothing is under way.
    StopPush(PushName),
    /// Writer to receiver: each write of it has landed or failed, and none will follow.
    Stopped(PushName),
    /// Writer to receiver: nothing follows, but a path was lost with writes on it; only the
    /// receiver can make sure that they do not land.
    Unsure(PushName),
    /// Writer to receiver, unasked: not all of it will come.
    Failed(PushName),
    /// Receiver to writer: are you there? That it can be handed over is the answer.
    Probe,
}

impl PeerMessage {
    /// What a writer answers when a push that it was asked to stop has ended.
    pub fn ended(name: PushName, unsure: bool) -> Self {
        if unsure { PeerMessage::Unsure(name) } else { PeerMessage::Stopped(name) }
    }

    /// Whether it comes from the one whom it concerns: a push is stopped by its receiver, and its end
    /// is told by the writer whom the share was given to. `from` and `to` are the incarnations of both
    /// transfer engines; `writer_of` answers with the writer of an immediate that is open here.
    pub fn may_come(self, from: u64, to: u64, writer_of: impl FnOnce(u32) -> Option<u64>) -> bool {
        match self {
            PeerMessage::StopPush(name) => name.receiver == from,
            PeerMessage::Stopped(name) | PeerMessage::Unsure(name) | PeerMessage::Failed(name) => {
                // What has ended, or whose writer was cut off, is nobody's any more.
                name.receiver == to && writer_of(name.imm).is_none_or(|writer| writer == from)
            }
            PeerMessage::Probe => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_whom_a_push_concerns_may_speak_of_it() {
        let name = PushName { receiver: 1, imm: 5 };
        let writer_of = |imm| (imm == 5).then_some(2);
        let stop = PeerMessage::StopPush(name);
        assert!(stop.may_come(1, 2, |_| None) && !stop.may_come(3, 2, |_| None));
        for end in [
            PeerMessage::ended(name, false),
            PeerMessage::ended(name, true),
            PeerMessage::Failed(name),
        ] {
            assert!(end.may_come(2, 1, writer_of), "its writer says so");
            assert!(!end.may_come(3, 1, writer_of), "another node says so");
            assert!(!end.may_come(2, 4, writer_of), "it is not a push to here");
            assert!(end.may_come(3, 1, |_| None), "the push has no writer any more");
        }
        assert!(PeerMessage::Probe.may_come(9, 1, |_| None));
    }
}
