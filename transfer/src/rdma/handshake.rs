//! How two cards tell each other the numbers of their queue pairs by datagrams, with `verbs.handshake =
//! "ud"`. What is said, and who believes what of it; no device and no time here.
//!
//! Both ends give each other a [`Ticket`] in the greeting: where their datagrams go, and a token that nobody else
//! knows. Then the writer *offers* its queue pairs, again and again until it hears the *answer* with the
//! target's. Datagrams get lost, come twice, and come from anybody. So what is believed names the tokens of both
//! ends, comes from the queue pair that the ticket names, and is the first of its kind; an offer that comes
//! again is answered again, with the same. Everything else is refused and counted, and costs nobody anything.

use std::collections::BTreeMap;

use kvasir_transfer_verbs::{Gid, Lid, QKey, QpNum, QueuePairAddress};

use super::config::WRITE_QUEUE_PAIRS_MAX;
use super::nic::{CardError, PipeId};

pub(crate) const LANES_MAX: usize = 1 + WRITE_QUEUE_PAIRS_MAX;
const TICKET_MAGIC: [u8; 4] = *b"KVU1";
const OFFER_MAGIC: [u8; 4] = *b"KVUO";
const ANSWER_MAGIC: [u8; 4] = *b"KVUA";
const HEAD_BYTES: usize = 4 + 2 * TOKEN_BYTES;
const TOKEN_BYTES: usize = 16;
/// Of a datagram: smaller than any MTU.
pub(crate) const DATAGRAM_BYTES_MAX: usize = HEAD_BYTES + LANES_MAX * QueuePairAddress::BYTES;

/// Names one end of one pipe. Drawn by chance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Token(pub(crate) [u8; TOKEN_BYTES]);

/// Where an end of a pipe is reached by datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) number: QpNum,
    pub(crate) key: QKey,
    pub(crate) gid: Gid,
    pub(crate) lid: Lid,
    /// Its queue pairs.
    pub(crate) lanes: usize,
    pub(crate) token: Token,
}

impl Ticket {
    pub(crate) const BYTES: usize = 48;

    /// Big endian: magic, number, key, GID, LID, lanes (2 bytes each), token.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend(TICKET_MAGIC);
        bytes.extend(self.number.get().to_be_bytes());
        bytes.extend(self.key.0.to_be_bytes());
        bytes.extend(self.gid.0);
        bytes.extend(self.lid.0.to_be_bytes());
        bytes.extend((self.lanes as u16).to_be_bytes());
        bytes.extend(self.token.0);
        bytes
    }

    /// Whether the one who says so shakes hands by datagrams. A list of queue pairs never looks so.
    pub(crate) fn is_one(bytes: &[u8]) -> bool {
        bytes.len() == Self::BYTES && bytes.starts_with(&TICKET_MAGIC)
    }

    /// `None` for what [`Ticket::to_bytes`] cannot have made.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        if bytes[..4] != TICKET_MAGIC {
            return None;
        }
        let word = |at: usize| {
            u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let half = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let field = |at: usize| {
            let mut field = [0; 16];
            field.copy_from_slice(&bytes[at..at + 16]);
            field
        };
        let lanes = usize::from(half(30));
        Some(Ticket {
            number: QpNum::new(word(4))?,
            key: QKey(word(8)),
            gid: Gid(field(12)),
            lid: Lid(half(28)),
            lanes: (2..=LANES_MAX).contains(&lanes).then_some(lanes)?,
            token: Token(field(32)),
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// By the writer: these are mine.
    Offer,
    /// By the target: I am connected to them, and these are mine.
    Answer,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Datagram {
    pub(crate) kind: Kind,
    /// Of the one that it is for.
    pub(crate) to: Token,
    pub(crate) from: Token,
    pub(crate) lanes: Vec<QueuePairAddress>,
}

impl Datagram {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let magic = match self.kind {
            Kind::Offer => OFFER_MAGIC,
            Kind::Answer => ANSWER_MAGIC,
        };
        let lanes: Vec<u8> = self.lanes.iter().flat_map(QueuePairAddress::to_bytes).collect();
        [magic.as_slice(), &self.to.0, &self.from.0, &lanes].concat()
    }

    /// `None` for what [`Datagram::encode`] cannot have made.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let kind = match *magic {
            OFFER_MAGIC => Kind::Offer,
            ANSWER_MAGIC => Kind::Answer,
            _ => return None,
        };
        let (to, rest) = rest.split_first_chunk::<TOKEN_BYTES>()?;
        let (from, rest) = rest.split_first_chunk::<TOKEN_BYTES>()?;
        let (addresses, rest) = rest.as_chunks::<{ QueuePairAddress::BYTES }>();
        if !rest.is_empty() || !(2..=LANES_MAX).contains(&addresses.len()) {
            return None;
        }
        let lanes = addresses.iter().map(|bytes| QueuePairAddress::from_bytes(bytes).ok());
        Some(Datagram {
            kind,
            to: Token(*to),
            from: Token(*from),
            lanes: lanes.collect::<Option<_>>()?,
        })
    }
}

/// The queue pairs of the peer, from what it has told.
pub(super) fn lanes_of(peer: &[u8]) -> Result<Vec<QueuePairAddress>, CardError> {
    let (addresses, rest) = peer.as_chunks::<{ QueuePairAddress::BYTES }>();
    if !rest.is_empty() || !(2..=1 + WRITE_QUEUE_PAIRS_MAX).contains(&addresses.len()) {
        return Err(CardError::new("the peer sent no addresses of queue pairs"));
    }
    let read = |bytes: &[u8; QueuePairAddress::BYTES]| QueuePairAddress::from_bytes(bytes);
    let addresses: Result<Vec<_>, _> = addresses.iter().map(read).collect();
    let addresses =
        addresses.map_err(|error| CardError::because("the peer's addresses are invalid", error))?;
    // The way to one of them was looked for, and is the way to all.
    if addresses.iter().any(|address| address.gid != addresses[0].gid) {
        return Err(CardError::new("the peer's queue pairs use different ports"));
    }
    Ok(addresses)
}

/// One end of a pipe that shakes hands, or has.
#[derive(Debug)]
struct Shake {
    pipe: PipeId,
    /// What is waited for: a target for offers, a writer for answers.
    awaits: Kind,
    own: Vec<QueuePairAddress>,
    /// `None` for a writer that has not been told of it.
    peer: Option<Ticket>,
    /// Once it is believed.
    heard: Option<Vec<QueuePairAddress>>,
}

/// What comes of a datagram.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// Connect the pipe to these; where it is a target, answer then.
    Connect {
        pipe: PipeId,
        lanes: Vec<QueuePairAddress>,
    },
    /// It was answered before, and the answer was lost: answer again.
    Again {
        pipe: PipeId,
    },
    /// Nothing new.
    Known,
    Refused,
}

/// All of one card.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    shakes: BTreeMap<Token, Shake>,
    tokens: BTreeMap<PipeId, Token>,
}

impl Handshakes {
    /// A writer's end, which does not know of the other one yet.
    pub(crate) fn offer(&mut self, pipe: PipeId, token: Token, own: Vec<QueuePairAddress>) {
        self.add(pipe, token, Shake { pipe, awaits: Kind::Answer, own, peer: None, heard: None });
    }

    /// A target's end, for the writer with this ticket.
    pub(crate) fn expect(
        &mut self,
        pipe: PipeId,
        token: Token,
        (own, writer): (Vec<QueuePairAddress>, Ticket),
    ) {
        let peer = Some(writer);
        self.add(pipe, token, Shake { pipe, awaits: Kind::Offer, own, peer, heard: None });
    }

    fn add(&mut self, pipe: PipeId, token: Token, shake: Shake) {
        self.shakes.insert(token, shake);
        self.tokens.insert(pipe, token);
    }

    /// The writer learns of the target. `false` when it shakes no hands so, or has as many lanes as not.
    pub(crate) fn meet(&mut self, pipe: PipeId, target: Ticket) -> bool {
        let Some(shake) = self.of(pipe) else { return false };
        let fits = shake.own.len() == target.lanes && shake.peer.is_none();
        if fits {
            shake.peer = Some(target);
        }
        fits
    }

    pub(crate) fn forget(&mut self, pipe: PipeId) {
        if let Some(token) = self.tokens.remove(&pipe) {
            self.shakes.remove(&token);
        }
    }

    /// Whether its hands are still to be shaken.
    pub(crate) fn is_open(&self, pipe: PipeId) -> bool {
        let shake = self.tokens.get(&pipe).and_then(|token| self.shakes.get(token));
        shake.is_some_and(|shake| shake.heard.is_none())
    }

    fn of(&mut self, pipe: PipeId) -> Option<&mut Shake> {
        self.shakes.get_mut(self.tokens.get(&pipe)?)
    }

    /// What the end says, and to whom.
    pub(crate) fn say(&self, pipe: PipeId) -> Option<(Ticket, Datagram)> {
        let token = *self.tokens.get(&pipe)?;
        let shake = self.shakes.get(&token)?;
        let peer = shake.peer?;
        let kind = match shake.awaits {
            Kind::Answer => Kind::Offer,
            Kind::Offer => Kind::Answer,
        };
        Some((peer, Datagram { kind, to: peer.token, from: token, lanes: shake.own.clone() }))
    }

    pub(crate) fn hear(&mut self, from: Option<QpNum>, bytes: &[u8]) -> Heard {
        let Some(datagram) = Datagram::decode(bytes) else { return Heard::Refused };
        let Datagram { kind, to, from: token, lanes } = datagram;
        let Some(shake) = self.shakes.get_mut(&to) else { return Heard::Refused };
        let is_peer = |peer: &Ticket| peer.token == token && Some(peer.number) == from;
        let is_for_it = shake.awaits == kind && shake.peer.as_ref().is_some_and(is_peer);
        // The way to the ticket's port was looked for, and leads to all of them.
        let is_there =
            |lane: &QueuePairAddress| shake.peer.as_ref().is_some_and(|peer| peer.gid == lane.gid);
        if !is_for_it || lanes.len() != shake.own.len() || !lanes.iter().all(is_there) {
            return Heard::Refused;
        }
        let pipe = shake.pipe;
        match (&shake.heard, kind) {
            (None, _) => {
                shake.heard = Some(lanes.clone());
                Heard::Connect { pipe, lanes }
            }
            (Some(heard), _) if *heard != lanes => Heard::Refused,
            (Some(_), Kind::Offer) => Heard::Again { pipe },
            (Some(_), Kind::Answer) => Heard::Known,
        }
    }
}

#[cfg(test)]
mod tests {
    use kvasir_transfer_verbs::{Mtu, Psn};

    use super::*;

    fn lanes(first: u32, count: u32) -> Vec<QueuePairAddress> {
        let lane = |number| QueuePairAddress {
            number: QpNum::new(number).expect("24 bits"),
            psn: Psn::new(9).expect("24 bits"),
            gid: Gid([7; 16]),
            lid: Lid(0),
            mtu: Mtu::from_code(5).expect("4096"),
        };
        (first..first + count).map(lane).collect()
    }

    fn ticket(number: u32, token: u8, lanes: usize) -> Ticket {
        Ticket {
            number: QpNum::new(number).expect("24 bits"),
            key: QKey(0x1234_5678),
            gid: Gid([7; 16]),
            lid: Lid(3),
            lanes,
            token: Token([token; 16]),
        }
    }

    const W: PipeId = PipeId(1);
    const T: PipeId = PipeId(2);

    /// A writer and a target that have exchanged their tickets.
    fn met() -> (Handshakes, Handshakes) {
        let (mut writer, mut target) = (Handshakes::default(), Handshakes::default());
        writer.offer(W, Token([1; 16]), lanes(100, 3));
        target.expect(T, Token([2; 16]), (lanes(200, 3), ticket(11, 1, 3)));
        assert!(writer.say(W).is_none(), "the peer is not known yet");
        assert!(writer.meet(W, ticket(22, 2, 3)));
        (writer, target)
    }

    fn number(of: u32) -> Option<QpNum> {
        QpNum::new(of)
    }

    #[test]
    fn tickets_and_datagrams_survive_the_wire() {
        for count in [2, LANES_MAX] {
            let ticket = ticket(5, 9, count);
            let bytes = ticket.to_bytes();
            assert_eq!((bytes.len(), Ticket::is_one(&bytes)), (Ticket::BYTES, true));
            assert_eq!(Ticket::from_bytes(&bytes), Some(ticket));
            for kind in [Kind::Offer, Kind::Answer] {
                let (to, from) = (Token([1; 16]), Token([2; 16]));
                let datagram = Datagram { kind, to, from, lanes: lanes(7, count as u32) };
                let bytes = datagram.encode();
                assert!(bytes.len() <= DATAGRAM_BYTES_MAX);
                assert_eq!(Datagram::decode(&bytes), Some(datagram));
            }
        }
        // The greeting of who shakes hands by TCP is no ticket.
        for count in 2..=LANES_MAX {
            assert!(!Ticket::is_one(&vec![0; count * QueuePairAddress::BYTES]));
        }
    }

    #[test]
    fn what_cannot_have_been_said_is_not_read() {
        let whole = ticket(5, 9, 2).to_bytes();
        let check = |at: usize, byte: u8| {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            assert_eq!(Ticket::from_bytes(&bytes), None, "byte {at}");
        };
        check(0, 0);
        check(4, 0xff); // a number of 32 bits
        check(31, 1); // lanes
        check(31, LANES_MAX as u8 + 1);
        assert_eq!(Ticket::from_bytes(&whole[1..]), None);
        let of = |count| {
            let (kind, to, from) = (Kind::Offer, Token([1; 16]), Token([2; 16]));
            Datagram { kind, to, from, lanes: lanes(1, count) }.encode()
        };
        for bytes in [of(1), of(LANES_MAX as u32 + 1), of(2)[..60].to_vec(), Vec::new()] {
            assert_eq!(Datagram::decode(&bytes), None, "{} bytes", bytes.len());
        }
    }

    #[test]
    fn both_ends_learn_of_each_other_whatever_is_lost_or_comes_twice() {
        let (mut writer, mut target) = met();
        let (to, offer) = writer.say(W).expect("an offer");
        assert_eq!((to.number, offer.kind), (QpNum::new(22).expect("24 bits"), Kind::Offer));
        // The first one is lost. The second comes, and its answer is lost. The third is answered again.
        let offer = offer.encode();
        let connect = Heard::Connect { pipe: T, lanes: lanes(100, 3) };
        assert_eq!(target.hear(number(11), &offer), connect);
        assert!(!target.is_open(T) && writer.is_open(W));
        assert_eq!(target.hear(number(11), &offer), Heard::Again { pipe: T });
        let (to, answer) = target.say(T).expect("an answer");
        assert_eq!(to.number, QpNum::new(11).expect("24 bits"));
        let connect = Heard::Connect { pipe: W, lanes: lanes(200, 3) };
        assert_eq!(writer.hear(number(22), &answer.encode()), connect);
        assert_eq!(writer.hear(number(22), &answer.encode()), Heard::Known);
        assert!(!writer.is_open(W));
        writer.forget(W);
        assert_eq!(writer.hear(number(22), &answer.encode()), Heard::Refused, "it is gone");
    }

    #[test]
    fn datagrams_of_strangers_are_refused_and_change_nothing() {
        let (writer, mut target) = met();
        let (_, offer) = writer.say(W).expect("an offer");
        let with = |change: fn(&mut Datagram)| {
            let mut changed = offer.clone();
            change(&mut changed);
            changed.encode()
        };
        let hostile = [
            (number(11), with(|of| of.to = Token([3; 16]))),
            (number(11), with(|of| of.from = Token([3; 16]))),
            (number(11), with(|of| of.kind = Kind::Answer)),
            (number(11), with(|of| of.lanes.truncate(2))),
            (number(11), with(|of| of.lanes[1].gid = Gid([8; 16]))),
            (number(12), offer.encode()),
            (None, offer.encode()),
            (number(11), b"nonsense".to_vec()),
        ];
        for (from, bytes) in &hostile {
            assert_eq!(target.hear(*from, bytes), Heard::Refused);
            assert!(target.is_open(T));
        }
        let connect = Heard::Connect { pipe: T, lanes: lanes(100, 3) };
        assert_eq!(target.hear(number(11), &offer.encode()), connect, "the right one still counts");
        let other = with(|of| of.lanes = lanes(300, 3));
        assert_eq!(
            target.hear(number(11), &other),
            Heard::Refused,
            "a later offer does not change it"
        );
        for (from, bytes) in &hostile {
            assert_eq!(target.hear(*from, bytes), Heard::Refused);
        }
    }

    #[test]
    fn a_target_with_another_number_of_queue_pairs_is_none() {
        let mut writer = Handshakes::default();
        writer.offer(W, Token([1; 16]), lanes(100, 3));
        assert!(!writer.meet(W, ticket(22, 2, 4)));
        assert!(!writer.meet(T, ticket(22, 2, 3)), "the target makes no offer");
        assert!(writer.meet(W, ticket(22, 2, 3)));
        assert!(!writer.meet(W, ticket(22, 2, 3)), "once");
    }
}
