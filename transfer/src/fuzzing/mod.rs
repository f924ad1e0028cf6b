//! The parsers of the transfer engine as targets; what must hold of each is said in `kvasir-fuzzing`.
//!
//! They run in this crate's tests, and under libFuzzer in the folder `fuzz` beside the crate. Compiled only for
//! these: with `cfg(test)` or the feature `fuzzing`. Nothing here is a second parser: what decodes is what the
//! engine runs.

mod rings;
#[cfg(test)]
mod tests;

use kvasir_fuzzing::{Target, within};
use kvasir_transfer_core::{CloseRequest, CloseVerdict, Counted, PathIndex, SessionId};
use prost::Message;

pub use self::rings::ring;
use crate::closing::{self, CLOSING_BYTES_MAX};
use crate::config::Domain;
use crate::endpoint::{Endpoint, ShmAddress};
use crate::hello::{self, Admission, HELLO_BYTES_MAX, Hello, HelloReply, Verdict};
use crate::identity::{Identity, is_signed};
pub use crate::rdma::fuzzing::{
    efa_greeting, rdma_assembly, rdma_datagram, rdma_piece, rdma_said, rdma_ticket,
};
use crate::rdma::{CardAddress, Named, Place, Places, RdmaAddress, RdmaPlace};
use crate::region::RegionDesc;
pub use crate::shm::fuzzing::{
    shm_directory, shm_record, shm_region_answer, shm_region_question, shm_taken,
};
pub use crate::tcp::fuzzing::{tcp_ack, tcp_greeting, tcp_header};
use crate::topology::{Location, Nearness, Topology};

/// All of them.
pub const TARGETS: [Target; 22] = [
    Target { name: "closing_answer", run: closing_answer, seeds: answers },
    Target { name: "closing_question", run: closing_question, seeds: questions },
    Target { name: "efa_greeting", run: efa_greeting, seeds: crate::rdma::fuzzing::ends },
    Target { name: "endpoint", run: endpoint, seeds: endpoints },
    Target { name: "hello", run: hello, seeds: hellos },
    Target { name: "hello_reply", run: hello_reply, seeds: replies },
    Target { name: "rdma_assembly", run: rdma_assembly, seeds: crate::rdma::fuzzing::assemblies },
    Target { name: "rdma_datagram", run: rdma_datagram, seeds: crate::rdma::fuzzing::datagrams },
    Target { name: "rdma_piece", run: rdma_piece, seeds: crate::rdma::fuzzing::pieces },
    Target { name: "rdma_said", run: rdma_said, seeds: crate::rdma::fuzzing::said },
    Target { name: "rdma_ticket", run: rdma_ticket, seeds: crate::rdma::fuzzing::tickets },
    Target { name: "region", run: region, seeds: regions },
    Target { name: "ring", run: ring, seeds: rings::scripts },
    Target { name: "shm_directory", run: shm_directory, seeds: crate::shm::fuzzing::directories },
    Target { name: "shm_record", run: shm_record, seeds: crate::shm::fuzzing::records },
    Target {
        name: "shm_region_answer",
        run: shm_region_answer,
        seeds: crate::shm::fuzzing::region_answers,
    },
    Target {
        name: "shm_region_question",
        run: shm_region_question,
        seeds: crate::shm::fuzzing::region_questions,
    },
    Target { name: "shm_taken", run: shm_taken, seeds: crate::shm::fuzzing::taken },
    Target { name: "tcp_ack", run: tcp_ack, seeds: crate::tcp::fuzzing::acks },
    Target { name: "tcp_greeting", run: tcp_greeting, seeds: crate::tcp::fuzzing::greetings },
    Target { name: "tcp_header", run: tcp_header, seeds: crate::tcp::fuzzing::headers },
    Target { name: "topology", run: topology, seeds: topologies },
];

/// An endpoint, as a control plane hands it on.
pub fn endpoint(bytes: &[u8]) -> bool {
    let Ok(endpoint) = within(bytes.len(), || Endpoint::from_bytes(bytes)) else { return false };
    assert_eq!(Endpoint::from_bytes(&endpoint.to_bytes()).ok(), Some(endpoint));
    true
}

/// The descriptor of a region.
pub fn region(bytes: &[u8]) -> bool {
    let Ok(region) = within(bytes.len(), || RegionDesc::from_bytes(bytes)) else { return false };
    assert_eq!(RegionDesc::from_bytes(&region.to_bytes()).ok(), Some(region));
    true
}

/// The first words of whoever connects. Nobody is admitted without the cookie, or for somebody else.
pub fn hello(bytes: &[u8]) -> bool {
    // A changed one would not get beyond its signature: it is signed anew, too.
    let signed = Hello::decode(bytes).map(|hello| hello.signed(&Identity::from_seed(&IDENTITY)));
    if let Ok(signed) = signed
        && signed.len() <= HELLO_BYTES_MAX
    {
        signed_hello(&signed);
    }
    signed_hello(bytes)
}

fn signed_hello(bytes: &[u8]) -> bool {
    let here = here();
    let admit = |_, cut_offs| if cut_offs == CUT_OFFS { Ok(()) } else { Err(CUT_OFFS) };
    match within(bytes.len(), || Hello::judge(bytes, &here, admit)) {
        Verdict::Admit(newcomer) => {
            let hello = Hello::decode(bytes).expect("it was read before");
            assert_eq!((hello.version, hello.to_incarnation), (hello::VERSION, here.incarnation));
            assert_eq!((hello.cookie.as_slice(), hello.cut_offs), (&here.cookie[..], CUT_OFFS));
            let (key, signature) = (hello.key.clone(), hello.signature.clone());
            let unsigned = Hello { signature: Vec::new(), ..hello.clone() }.encode_to_vec();
            assert!(is_signed(newcomer.peer.incarnation, &key, &unsigned, &signature));
            assert_eq!((newcomer.session, newcomer.path), (hello.session, PathIndex(hello.path)));
            assert_eq!(Endpoint::from_bytes(&newcomer.peer.to_bytes()).ok(), Some(newcomer.peer));
            true
        }
        Verdict::Decline(reply) => {
            let told = reply.encode_to_vec();
            assert!(told.len() <= HELLO_BYTES_MAX && reply.admission() != Admission::Admitted);
            assert_eq!(HelloReply::decode(told.as_slice()), Ok(reply));
            false
        }
        Verdict::Reject => false,
    }
}

/// What the one who connected is told.
pub fn hello_reply(bytes: &[u8]) -> bool {
    let Ok(reply) = within(bytes.len(), || HelloReply::decode(bytes)) else { return false };
    assert_eq!(HelloReply::decode(reply.encode_to_vec().as_slice()), Ok(reply.clone()));
    reply.admission() == Admission::Admitted
}

/// A question about a path that has failed. Whatever it asks, the answer is one that can be sent.
pub fn closing_question(bytes: &[u8]) -> bool {
    // Read from a connection, it is never longer.
    let bytes = &bytes[..bytes.len().min(CLOSING_BYTES_MAX)];
    let request = within(bytes.len(), || closing::read_question(bytes));
    let Some(request) = request else { return false };
    assert_eq!(closing::read_question(&closing::question(&request)).as_ref(), Some(&request));
    let longest = CloseVerdict {
        forgotten: true,
        landed: Vec::new(),
        unknown: request.counted.iter().map(|counted| counted.imm).collect(),
        delivered: request.messages,
    };
    assert!(closing::answer(request.path, longest).len() <= CLOSING_BYTES_MAX);
    true
}

/// What has become of a path that has failed.
pub fn closing_answer(bytes: &[u8]) -> bool {
    let bytes = &bytes[..bytes.len().min(CLOSING_BYTES_MAX)];
    let read = within(bytes.len(), || closing::read_answer(bytes));
    let Some((path, verdict)) = read else { return false };
    let again = closing::read_answer(&closing::answer(path, verdict.clone()));
    assert_eq!(again, Some((path, verdict)));
    true
}

/// A matrix of devices that somebody wrote.
pub fn topology(bytes: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(bytes) else { return false };
    let known = ["mlx5_0", "mlx5_1"].map(str::to_owned);
    let read = within(bytes.len(), || Topology::from_json(text, &known));
    let Ok(topology) = read else { return false };
    assert!(topology.devices().iter().all(|device| known.contains(device)));
    assert_eq!(Topology::from_json(&topology.to_json(), &known).ok(), Some(topology));
    true
}

// ---- what is accepted ----

const CUT_OFFS: u64 = 3;
/// Whose hellos are tried.
const IDENTITY: [u8; 32] = [1; 32];

fn here() -> Endpoint {
    let shm = ShmAddress { host_id: "host".to_owned(), socket: "/run/kvasir/shm.sock".into() };
    let tcp = "192.0.2.1:7000".parse().expect("an address");
    let names = ["mlx5_0".to_owned(), "mlx5_1".to_owned()];
    let card = |name: &String| CardAddress::new(Domain::Verbs, name, vec![2; 17]);
    let matrix = r#"{"cpu:0":{"preferred":["mlx5_0"],"secondary":["mlx5_1"]}}"#;
    let topology = Topology::from_json(matrix, &names).expect("a matrix");
    let nearness = Nearness::of(&topology, &names);
    let rdma = RdmaAddress { cards: names.iter().map(card).collect(), nearness };
    Endpoint { incarnation: 2, cookie: [7; 16], shm: Some(shm), tcp: Some(tcp), rdma: Some(rdma) }
}

fn endpoints() -> Vec<Vec<u8>> {
    let ipv6 = "[fe80::1%3]:7000".parse().expect("an address");
    let other = Endpoint { shm: None, tcp: Some(ipv6), rdma: None, ..here() };
    vec![here().to_bytes(), other.to_bytes(), Endpoint { tcp: None, ..other }.to_bytes()]
}

fn regions() -> Vec<Vec<u8>> {
    let place = Place { address: 1 << 40, key: 7 };
    let named = Named { incarnation: 9, key: 1, length_bytes: 64 };
    let mut places = Places::default();
    places.set(0, place);
    places.set(7, place);
    let placed = RdmaPlace::sealed(places, Some(Location::Gpu { index: 1 }), named, &[7; 16]);
    let region =
        |length_bytes, rdma| RegionDesc { incarnation: 9, key: 1, length_bytes, rdma }.to_bytes();
    vec![region(0, None), region(4096, Some(placed)), region(u64::MAX, None)]
}

fn hellos() -> Vec<Vec<u8>> {
    let identity = Identity::from_seed(&IDENTITY);
    let from = Endpoint { incarnation: identity.incarnation(), ..here() };
    let lane = (SessionId(4), PathIndex(5));
    let hello = Hello::new(&from, &here(), CUT_OFFS, lane);
    let by_card = Hello { domain: Domain::Verbs.code(), card: vec![1; 56], ..hello.clone() };
    vec![hello.signed(&identity), by_card.signed(&identity)]
}

fn replies() -> Vec<Vec<u8>> {
    let sized = HelloReply { link_bytes: 1 << 18, ..HelloReply::admitting() };
    let by_card = HelloReply { card: vec![1; 56], ..HelloReply::admitting() };
    let replies = [HelloReply::admitting(), sized, by_card];
    replies.iter().map(HelloReply::encode_to_vec).collect()
}

fn questions() -> Vec<Vec<u8>> {
    let counted = Counted { imm: 7, landed: 1, undecided: 2 };
    let ask = |counted, messages| {
        closing::question(&CloseRequest { path: PathIndex(1), counted, messages })
    };
    vec![ask(vec![counted; 3], Vec::new()), ask(Vec::new(), vec![5, 1 << 40])]
}

fn answers() -> Vec<Vec<u8>> {
    let (landed, unknown, delivered) = (vec![1, 2], vec![3], vec![4, 1 << 40]);
    let verdict = CloseVerdict { forgotten: false, landed, unknown, delivered };
    let forgotten = CloseVerdict { forgotten: true, ..CloseVerdict::default() };
    vec![closing::answer(PathIndex(1), verdict), closing::answer(PathIndex(2), forgotten)]
}

fn topologies() -> Vec<Vec<u8>> {
    let texts = [
        r#"{"cpu:0":{"preferred":["mlx5_0"],"secondary":["mlx5_1"]}}"#,
        r#"{"cuda:0":{"preferred":["mlx5_1"]},"cpu:1":{}}"#,
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}
