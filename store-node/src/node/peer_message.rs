//! What two nodes say to each other, as it goes over the transfer engine. The pair (receiver's transfer
//! incarnation, immediate) names one push. The rest is about objects, which one node orders from another.

use kvasir_blocks::moving::PushName;
use kvasir_blocks::moving::peer_message::PeerMessage;
use kvasir_proto::v1;
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
    #[prost(message, optional, tag = "4")]
    send: Option<v1::SendObjects>,
    #[prost(message, optional, tag = "5")]
    not_sent: Option<v1::ObjectsNotSent>,
}

/// Whatever a peer may say.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Heard {
    OfPush(PeerMessage),
    OfObjects(Box<ObjectsMessage>),
}

/// What one node orders from another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ObjectsMessage {
    Send(v1::SendObjects),
    NotSent(v1::ObjectsNotSent),
}

impl ObjectsMessage {
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        let wire = match self {
            ObjectsMessage::Send(send) => Wire { kind: 6, send: Some(send), ..Wire::default() },
            ObjectsMessage::NotSent(not_sent) => {
                Wire { kind: 7, not_sent: Some(not_sent), ..Wire::default() }
            }
        };
        wire.encode_to_vec()
    }
}

pub(crate) fn to_bytes(message: PeerMessage) -> Vec<u8> {
    let nameless = PushName { receiver: 0, imm: 0 };
    let (kind, name) = match message {
        PeerMessage::StopPush(name) => (1, name),
        PeerMessage::Stopped(name) => (2, name),
        PeerMessage::Unsure(name) => (3, name),
        PeerMessage::Failed(name) => (4, name),
        PeerMessage::Probe => (5, nameless),
    };
    Wire { kind, receiver: name.receiver, imm: name.imm, ..Wire::default() }.encode_to_vec()
}

/// # Errors
/// [`WireError`] when it is none of the messages known here.
pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Heard, WireError> {
    let Wire { kind, receiver, imm, send, not_sent } = Wire::decode(bytes)?;
    let name = PushName { receiver, imm };
    Ok(match kind {
        1 => Heard::OfPush(PeerMessage::StopPush(name)),
        2 => Heard::OfPush(PeerMessage::Stopped(name)),
        3 => Heard::OfPush(PeerMessage::Unsure(name)),
        4 => Heard::OfPush(PeerMessage::Failed(name)),
        5 => Heard::OfPush(PeerMessage::Probe),
        6 => {
            let send = send.ok_or(WireError::Field("send"))?;
            Heard::OfObjects(Box::new(ObjectsMessage::Send(send)))
        }
        7 => {
            let not_sent = not_sent.ok_or(WireError::Field("not_sent"))?;
            Heard::OfObjects(Box::new(ObjectsMessage::NotSent(not_sent)))
        }
        _ => return Err(WireError::Field("kind")),
    })
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
            assert_eq!(back.expect("a message"), Heard::OfPush(message));
        }
        let tx = v1::TxId { conductor_incarnation: 1, serial: 2 };
        let send = v1::SendObjects { lease_ms: 5, ..v1::SendObjects::default() };
        let not_sent = v1::ObjectsNotSent { txs: vec![tx], ..v1::ObjectsNotSent::default() };
        for message in [ObjectsMessage::Send(send), ObjectsMessage::NotSent(not_sent)] {
            let back = from_bytes(&message.clone().into_bytes());
            assert_eq!(back.expect("a message"), Heard::OfObjects(Box::new(message)));
        }
        assert!(from_bytes(&Wire { kind: 6, ..Wire::default() }.encode_to_vec()).is_err());
        assert!(from_bytes(&[]).is_err());
        assert!(from_bytes(&[0xff; 9]).is_err());
    }
}
