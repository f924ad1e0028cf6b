//! How a connection begins, in every domain: the one who connects says who it is and shows the cookie
//! of the endpoint it was given, signed by its own [identity](crate::identity); the other one admits it or says
//! why not.

use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer_core::{PathIndex, SessionId};
use prost::Message;

use crate::config::Domain;
use crate::endpoint::{Endpoint, WireError};
use crate::identity::{Identity, is_signed};

/// A hello is never longer.
pub(crate) const HELLO_BYTES_MAX: usize = 8192;

/// 2: connections are paths of a session; messages have ids.
/// 3: messages are acknowledged in shared memory too, and may be refused.
/// 4: words are stored over tcp.
/// 5: engines have several cards.
/// 6: hellos are signed.
pub(crate) const VERSION: u32 = 6;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Hello {
    #[prost(uint32, tag = "1")]
    pub(crate) version: u32,
    /// Of the endpoint that is connected to.
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) cookie: Vec<u8>,
    #[prost(fixed64, tag = "3")]
    pub(crate) to_incarnation: u64,
    /// The endpoint of the one who connects.
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) from_endpoint: Vec<u8>,
    /// How often it knows to have been cut off.
    #[prost(uint64, tag = "5")]
    pub(crate) cut_offs: u64,
    /// Of the one who connects. Later ones have higher numbers.
    #[prost(uint64, tag = "6")]
    pub(crate) session: u64,
    /// Which path of the session the connection is. None is used twice.
    #[prost(uint32, tag = "7")]
    pub(crate) path: u32,
    /// The code of the domain whose card shall place the writes; 0: they come through the connection.
    #[prost(uint32, tag = "8")]
    pub(crate) domain: u32,
    /// How the writer's card is reached, as that domain says it.
    #[prost(bytes = "vec", tag = "9")]
    pub(crate) card: Vec<u8>,
    /// Which card of the endpoint that is connected to, by its index there.
    #[prost(uint32, tag = "10")]
    pub(crate) to_card: u32,
    /// The public key of the one who connects. Its digest is the incarnation of `from_endpoint`.
    #[prost(bytes = "vec", tag = "11")]
    pub(crate) key: Vec<u8>,
    /// Of all the other fields. Since `path` is used once, it is of no use to whoever gets hold of it.
    #[prost(bytes = "vec", tag = "12")]
    pub(crate) signature: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Admission {
    Unspecified = 0,
    Admitted = 1,
    /// Another incarnation listens here now.
    OtherIncarnation = 2,
    /// See `cut_offs` of the reply.
    CutOff = 3,
    OtherVersion = 4,
    /// The session is over, or it has too many paths.
    NoSuchPath = 5,
    /// The domain that was asked for is not here, or cannot take one more.
    NoCard = 6,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct HelloReply {
    #[prost(enumeration = "Admission", tag = "1")]
    pub(crate) admission: i32,
    #[prost(uint64, tag = "2")]
    pub(crate) cut_offs: u64,
    /// shm: bytes of the link's memory and of the region directory.
    #[prost(uint64, tag = "3")]
    pub(crate) link_bytes: u64,
    #[prost(uint64, tag = "4")]
    pub(crate) directory_bytes: u64,
    /// shm: the longest message that is taken.
    #[prost(uint64, tag = "5")]
    pub(crate) message_bytes_max: u64,
    /// RDMA: how the card that is written to is reached.
    #[prost(bytes = "vec", tag = "6")]
    pub(crate) card: Vec<u8>,
    /// RDMA: what it places may become visible in any order, until it is counted.
    #[prost(bool, tag = "7")]
    pub(crate) is_relaxed: bool,
}

/// Who connects, and what the connection is to be.
#[derive(Debug)]
pub(crate) struct Newcomer {
    pub(crate) peer: Endpoint,
    pub(crate) session: u64,
    pub(crate) path: PathIndex,
    /// The card that shall place what it writes.
    pub(crate) card: Option<WantedCard>,
}

/// The card here that a writer wants, and how its own is reached.
#[derive(Debug)]
pub(crate) struct WantedCard {
    pub(crate) domain: Domain,
    /// By its index in the endpoint here.
    pub(crate) index: u32,
    pub(crate) writer: Vec<u8>,
}

/// What a hello leads to.
#[derive(Debug)]
pub(crate) enum Verdict {
    Admit(Newcomer),
    /// Tell it why, then close.
    Decline(HelloReply),
    /// It has no business here: close without a word.
    Reject,
}

impl Hello {
    pub(crate) fn new(
        from: &Endpoint,
        to: &Endpoint,
        cut_offs: u64,
        (session, path): (SessionId, PathIndex),
    ) -> Self {
        Hello {
            version: VERSION,
            cookie: to.cookie.to_vec(),
            to_incarnation: to.incarnation,
            from_endpoint: from.to_bytes(),
            cut_offs,
            session: session.0,
            path: path.0,
            domain: 0,
            card: Vec::new(),
            to_card: 0,
            key: Vec::new(),
            signature: Vec::new(),
        }
    }

    /// As it is sent.
    pub(crate) fn signed(mut self, identity: &Identity) -> Vec<u8> {
        self.key = identity.public_key().to_vec();
        self.signature.clear();
        self.signature = identity.sign(&self.encode_to_vec());
        self.encode_to_vec()
    }

    fn is_signed_by(&mut self, incarnation: u64) -> bool {
        let signature = std::mem::take(&mut self.signature);
        is_signed(incarnation, &self.key, &self.encode_to_vec(), &signature)
    }

    /// `admit` says whether a peer that knows of so many cut-offs may connect, or how many there were.
    pub(crate) fn judge(
        bytes: &[u8],
        here: &Endpoint,
        admit: impl FnOnce(u64, u64) -> Result<(), u64>,
    ) -> Verdict {
        let Ok(mut hello) = Hello::decode(bytes) else { return Verdict::Reject };
        if hello.version != VERSION {
            return Verdict::Decline(HelloReply::declining(Admission::OtherVersion, 0));
        }
        // An engine that was started anew has another cookie: its former peers are told, not shunned.
        if hello.to_incarnation != here.incarnation {
            return Verdict::Decline(HelloReply::declining(Admission::OtherIncarnation, 0));
        }
        if !same_cookie(&hello.cookie, &here.cookie) {
            return Verdict::Reject;
        }
        let from: Result<Endpoint, WireError> = Endpoint::from_bytes(&hello.from_endpoint);
        let Ok(from) = from else { return Verdict::Reject };
        // After the cookie, since it costs more: strangers do not get so far.
        if !hello.is_signed_by(from.incarnation) && !mutated(Mutation::SignatureNotChecked) {
            return Verdict::Reject;
        }
        match admit(from.incarnation, hello.cut_offs) {
            Ok(()) => {
                let (session, path) = (hello.session, PathIndex(hello.path));
                let card = match hello.domain {
                    0 => None,
                    code => match Domain::from_code(code) {
                        Some(domain) => {
                            let (index, writer) = (hello.to_card, hello.card);
                            Some(WantedCard { domain, index, writer })
                        }
                        None => {
                            let reply = HelloReply::declining(Admission::NoCard, 0);
                            return Verdict::Decline(reply);
                        }
                    },
                };
                Verdict::Admit(Newcomer { peer: from, session, path, card })
            }
            Err(cut_offs) => Verdict::Decline(HelloReply::declining(Admission::CutOff, cut_offs)),
        }
    }
}

impl HelloReply {
    pub(crate) fn admitting() -> Self {
        HelloReply { admission: Admission::Admitted.into(), ..HelloReply::default() }
    }

    pub(crate) fn declining(admission: Admission, cut_offs: u64) -> Self {
        HelloReply { admission: admission.into(), cut_offs, ..HelloReply::default() }
    }
}

/// Takes the same time wherever they differ.
fn same_cookie(given: &[u8], own: &[u8; 16]) -> bool {
    let differing = given.iter().zip(own).fold(0, |differing, (a, b)| differing | (a ^ b));
    given.len() == own.len() && (differing == 0 || mutated(Mutation::CookieNotChecked))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(incarnation: u64) -> Endpoint {
        Endpoint { incarnation, cookie: [incarnation as u8; 16], shm: None, tcp: None, rdma: None }
    }

    fn judge(change: impl FnOnce(&mut Hello)) -> Verdict {
        let identity = Identity::from_seed(&[1; 32]);
        let mut hello = hello(&identity);
        change(&mut hello);
        judge_bytes(&hello.signed(&identity))
    }

    fn hello(from: &Identity) -> Hello {
        let from = endpoint(from.incarnation());
        Hello::new(&from, &endpoint(2), 3, (SessionId(4), PathIndex(5)))
    }

    fn judge_bytes(hello: &[u8]) -> Verdict {
        let admit = |_, cut_offs| if cut_offs == 3 { Ok(()) } else { Err(9) };
        Hello::judge(hello, &endpoint(2), admit)
    }

    fn admission(verdict: &Verdict) -> Option<Admission> {
        match verdict {
            Verdict::Admit(_) => Some(Admission::Admitted),
            Verdict::Decline(reply) => Some(reply.admission()),
            Verdict::Reject => None,
        }
    }

    #[test]
    fn only_who_has_the_cookie_and_knows_of_the_cut_offs_is_admitted() {
        assert_eq!(admission(&judge(|_| {})), Some(Admission::Admitted));
        assert_eq!(admission(&judge(|hello| hello.cookie[0] ^= 1)), None);
        assert_eq!(admission(&judge(|hello| hello.cookie.clear())), None);
        assert_eq!(admission(&judge(|hello| hello.from_endpoint.clear())), None);
        let cut_off = judge(|hello| hello.cut_offs = 2);
        assert_eq!(admission(&cut_off), Some(Admission::CutOff));
        assert!(matches!(cut_off, Verdict::Decline(HelloReply { cut_offs: 9, .. })));
        let stale = judge(|hello| hello.to_incarnation = 7);
        assert_eq!(admission(&stale), Some(Admission::OtherIncarnation));
        let unheard_of = judge(|hello| hello.domain = 99);
        assert_eq!(admission(&unheard_of), Some(Admission::NoCard));
        let version = judge(|hello| hello.version = 1);
        assert_eq!(admission(&version), Some(Admission::OtherVersion));
    }

    /// Whoever has been given the cookie may not speak for another one who has it too.
    #[test]
    fn nobody_connects_in_the_name_of_another_one() {
        let (victim, other) = (Identity::from_seed(&[1; 32]), Identity::from_seed(&[2; 32]));
        let admitted = |hello: &[u8]| admission(&judge_bytes(hello)) == Some(Admission::Admitted);
        assert!(
            admitted(&hello(&victim).signed(&victim)) && admitted(&hello(&other).signed(&other))
        );
        assert!(!admitted(&hello(&victim).signed(&other)), "by its own key");
        assert!(!admitted(&hello(&victim).encode_to_vec()), "by none");
        let signed = Hello::decode(&*hello(&victim).signed(&victim)).expect("a hello");
        let changes: [fn(&mut Hello); 5] = [
            |hello| hello.session = u64::MAX,
            |hello| hello.path += 1,
            |hello| hello.domain = Domain::Verbs.code(),
            |hello| hello.card = vec![1],
            |hello| hello.signature[63] ^= 1,
        ];
        for change in changes {
            let mut changed = signed.clone();
            change(&mut changed);
            assert!(!admitted(&changed.encode_to_vec()), "{changed:?}");
        }
        // With another one's key, and what that one has signed elsewhere.
        let key = other.public_key().to_vec();
        let signature =
            other.sign(&Hello { signature: Vec::new(), ..signed.clone() }.encode_to_vec());
        assert!(!admitted(&Hello { key, signature, ..signed }.encode_to_vec()));
    }

    #[test]
    fn bytes_that_are_no_hello_are_rejected() {
        let verdict = Hello::judge(&[0xff; 40], &endpoint(2), |_, _| Ok(()));
        assert_eq!(admission(&verdict), None);
    }
}
