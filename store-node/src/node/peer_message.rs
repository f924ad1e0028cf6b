//! What two nodes say to each other over the transfer engine: only about pushes that end early. The
//! pair (receiver's transfer incarnation, immediate) names one push.

use kvasir_transfer::WireError;
use prost::Message;

/// Names one push to one receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PushName {
    pub receiver: u64,
    pub imm: u32,
}

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

#[derive(Clone, PartialEq, Message)]
struct Wire {
    #[prost(uint32, tag = "1")]
    kind: u32,
    #[prost(fixed64, tag = "2")]
    receiver: u64,
    #[prost(uint32, tag = "3")]
    imm: u32,
}

impl PeerMessage {
    pub fn to_bytes(self) -> Vec<u8> {
        let nameless = PushName { receiver: 0, imm: 0 };
        let (kind, name) = match self {
            PeerMessage::StopPush(name) => (1, name),
            PeerMessage::Stopped(name) => (2, name),
            PeerMessage::Unsure(name) => (3, name),
            PeerMessage::Failed(name) => (4, name),
            PeerMessage::Probe => (5, nameless),
        };
        Wire { kind, receiver: name.receiver, imm: name.imm }.encode_to_vec()
    }

    /// # Errors
    /// [`WireError`] when it is none of the messages known here.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, WireError> {
        let Wire { kind, receiver, imm } = Wire::decode(bytes)?;
        let name = PushName { receiver, imm };
        match kind {
            1 => Ok(PeerMessage::StopPush(name)),
            2 => Ok(PeerMessage::Stopped(name)),
            3 => Ok(PeerMessage::Unsure(name)),
            4 => Ok(PeerMessage::Failed(name)),
            5 => Ok(PeerMessage::Probe),
            _ => Err(WireError::Field("kind")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_and_others_are_refused() {
        let name = PushName { receiver: u64::MAX, imm: 7 };
        for message in [
            PeerMessage::StopPush(name),
            PeerMessage::Stopped(name),
            PeerMessage::Unsure(name),
            PeerMessage::Failed(name),
            PeerMessage::Probe,
        ] {
            let back = PeerMessage::from_bytes(&message.to_bytes());
            assert_eq!(back.expect("a message"), message);
        }
        assert!(PeerMessage::from_bytes(&[]).is_err());
        assert!(PeerMessage::from_bytes(&[0xff; 9]).is_err());
    }
}
