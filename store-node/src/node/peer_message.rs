//! What two nodes say to each other, as it goes over the transfer engine. The pair (receiver's transfer
//! incarnation, immediate) names one push.

use kvasir_blocks::moving::PushName;
use kvasir_blocks::moving::peer_message::PeerMessage;
use kvasir_transfer::WireError;
use prost::Message;

#[derive(Clone, PartialEq, Message)]
struct Wire {
    #[prost(uint32, tag = "1")]
    kind: u32,
    #[prost(fixed64, tag = "2")]
    receiver: u64,
    #[prost(uint32, tag = "3")]
    imm: u32,
}

pub fn to_bytes(message: PeerMessage) -> Vec<u8> {
    let nameless = PushName { receiver: 0, imm: 0 };
    let (kind, name) = match message {
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
pub fn from_bytes(bytes: &[u8]) -> Result<PeerMessage, WireError> {
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
            let back = from_bytes(&to_bytes(message));
            assert_eq!(back.expect("a message"), message);
        }
        assert!(from_bytes(&[]).is_err());
        assert!(from_bytes(&[0xff; 9]).is_err());
    }
}
