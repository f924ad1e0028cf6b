//! Whoever is on the fabric can send datagrams to a card that shakes hands by them. What does not belong to a
//! handshake is refused and counted, what comes twice is answered twice, and neighbours go on.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use kvasir_transfer::Handshake;
use kvasir_transfer_verbs::{
    AddressHandle, Buffer, CompletionQueue, CompletionQueues, Gid, Library, Lid, LocalPath, Memory,
    MemoryRegion, Mtu, Payload, ProtectionDomain, Psn, QKey, QpNum, QueuePairAddress,
    QueuePairOptions, Receive, RegionOptions, Side as Of, Traffic, UD_HEADER_BYTES, UdQueuePair,
    WorkCompletion, WorkTag,
};

use crate::engine::counter;
use crate::verbs::{LONG, Side, config, greeting, inline, outcome};

const OWN_TOKEN: [u8; 16] = [0xab; 16];
const SLOT_BYTES: usize = 1024;

/// A stranger with a queue pair of its own.
struct Stranger {
    pd: ProtectionDomain,
    path: LocalPath,
    qp: UdQueuePair,
    queue: CompletionQueue,
    /// What is sent, and behind it what comes.
    buffer: Arc<Buffer>,
    region: MemoryRegion,
}

impl Stranger {
    fn new(device: &str) -> Self {
        let library = Library::open().expect("libibverbs");
        let device = library.device(device).expect("a list").expect("the named device");
        let context = device.open().expect("the device opens");
        let path = context.path().expect("described").expect("an active port");
        let pd = ProtectionDomain::new(&context).expect("a protection domain");
        let queue = CompletionQueue::new(&context, 64, None).expect("a completion queue");
        let queues = CompletionQueues { send: &queue, receive: &queue };
        let options =
            QueuePairOptions { send_depth: 8, receive_depth: 8, ..QueuePairOptions::default() };
        let mut qp = UdQueuePair::new(&pd, &path, queues, QKey(0x2222), options).expect("made");
        let buffer = Arc::new(Buffer::new(9 * SLOT_BYTES).expect("memory"));
        let owner = Arc::clone(&buffer) as Arc<dyn Memory>;
        let region =
            pd.register(owner, 0..9 * SLOT_BYTES, RegionOptions::SHARED).expect("registered");
        for slot in 1..=8 {
            let into = [region.slice(slot * SLOT_BYTES, SLOT_BYTES).expect("inside")];
            qp.post_receives(&[Receive { into: &into, tag: WorkTag(slot as u32) }]).expect("room");
        }
        Stranger { pd, path, qp, queue, buffer, region }
    }

    fn ticket(&self) -> Vec<u8> {
        let number = self.qp.number().get().to_be_bytes();
        let (key, lid) = (self.qp.key().0.to_be_bytes(), self.path.lid.0.to_be_bytes());
        let lanes = 2u16.to_be_bytes();
        [b"KVU1", &number[..], &key, &self.path.gid.0, &lid, &lanes, &OWN_TOKEN].concat()
    }

    fn wait(&mut self, side: Of) -> WorkCompletion {
        let started = Instant::now();
        loop {
            let mut batch = [WorkCompletion::default()];
            if let Some(completion) = self.queue.poll(&mut batch).expect("it polls").first() {
                self.qp.retire(completion);
                assert_eq!(completion.side(), side);
                return *completion;
            }
            assert!(started.elapsed() < LONG, "nothing comes");
            std::thread::yield_now();
        }
    }

    fn send(&mut self, to: &Ticket, bytes: &[u8]) {
        let way = AddressHandle::new(&self.pd, &self.path, to.gid, Lid(0), Traffic::default());
        let way = way.expect("a way");
        self.buffer.write(0, bytes).expect("it fits");
        let slices = [self.region.slice(0, bytes.len()).expect("inside")];
        let datagram = kvasir_transfer_verbs::Datagram {
            from: Payload::Slices(&slices),
            imm: None,
            to: &way,
            to_number: to.number,
            to_key: to.key,
            tag: WorkTag(0),
        };
        self.qp.post(&[datagram]).expect("posted");
        self.wait(Of::Send);
    }

    fn answer(&mut self) -> Vec<u8> {
        let completion = self.wait(Of::Receive);
        let at = completion.tag().expect("a slot").0 as usize * SLOT_BYTES + UD_HEADER_BYTES;
        let bytes = completion.bytes() as usize - UD_HEADER_BYTES;
        self.buffer.read(at, bytes).expect("inside")
    }
}

/// What a target has told.
struct Ticket {
    number: QpNum,
    key: QKey,
    gid: Gid,
    token: [u8; 16],
}

impl Ticket {
    fn within(reply: &[u8]) -> Ticket {
        let at = reply.windows(4).position(|bytes| bytes == b"KVU1").expect("a ticket");
        let word = |from: usize| {
            u32::from_be_bytes(reply[at + from..at + from + 4].try_into().expect("4 bytes"))
        };
        let field = |from: usize| reply[at + from..at + from + 16].try_into().expect("16 bytes");
        let number = QpNum::new(word(4)).expect("24 bits");
        Ticket { number, key: QKey(word(8)), gid: Gid(field(12)), token: field(32) }
    }
}

fn offer(to: [u8; 16], from: [u8; 16], gid: Gid, first: u32) -> Vec<u8> {
    let lane = |number| {
        let (number, psn) = (QpNum::new(number).expect("24 bits"), Psn::new(1).expect("24 bits"));
        let mtu = Mtu::from_code(3).expect("1024");
        QueuePairAddress { number, psn, gid, lid: Lid(0), mtu }.to_bytes()
    };
    [b"KVUO".as_slice(), &to, &from, &lane(first), &lane(first + 1)].concat()
}

#[test]
fn datagrams_that_belong_to_no_handshake_are_refused_and_counted() {
    let Some(config) = config(|verbs| verbs.handshake = Handshake::Ud) else { return };
    let verbs = config.verbs.clone().expect("it is the verbs domain's");
    // Only on a device that was named.
    let Some(device) = verbs.devices.first().map(ToString::to_string) else { return };
    let target = Side::new(config.clone());
    let mut stranger = Stranger::new(&device);
    let endpoint = target.engine.endpoint();
    let mut stream = TcpStream::connect(endpoint.tcp.expect("tcp")).expect("taken");
    stream.write_all(&greeting(&endpoint, 3, &stranger.ticket())).expect("sent");
    let mut prefix = [0; 8];
    stream.read_exact(&mut prefix).expect("a reply");
    let length = u32::from_le_bytes(prefix[4..].try_into().expect("4 bytes"));
    let mut reply = vec![0; length as usize];
    stream.read_exact(&mut reply).expect("a reply");
    let ticket = Ticket::within(&reply);
    let gid = stranger.path.gid;

    let refused =
        || counter(&target.registry, "kvasir_transfer_nic_datagrams_refused_total", &["verbs"]);
    let right = offer(ticket.token, OWN_TOKEN, gid, 0x70_0000);
    let mut hostile = vec![
        b"nonsense".to_vec(),
        vec![0xff; 600],
        offer([1; 16], OWN_TOKEN, gid, 0x70_0000),
        offer(ticket.token, [1; 16], gid, 0x70_0000),
        right[..right.len() - 1].to_vec(),
        [b"KVUA", &right[4..]].concat(),
    ];
    for (sent, bytes) in hostile.iter().enumerate() {
        stranger.send(&ticket, bytes);
        let started = Instant::now();
        while refused() < (sent + 1) as f64 {
            assert!(started.elapsed() < LONG, "datagram {sent} is not counted");
            std::thread::yield_now();
        }
    }
    // The right one is answered each time that it comes, with the same; and nobody changes it.
    stranger.send(&ticket, &right);
    let answer = stranger.answer();
    assert_eq!(
        (answer.len(), &answer[..20]),
        (right.len(), [b"KVUA", &OWN_TOKEN[..]].concat().as_slice())
    );
    stranger.send(&ticket, &right);
    assert_eq!(stranger.answer(), answer);
    hostile.push(offer(ticket.token, OWN_TOKEN, gid, 0x70_1000));
    stranger.send(&ticket, &hostile[6]);
    let started = Instant::now();
    while refused() < 7.0 {
        assert!(started.elapsed() < LONG, "another offer is not counted");
    }

    let neighbour = Side::new(config);
    let (region, descriptor) = target.region(64);
    let write = inline(neighbour.peer(&target), descriptor, b"well".to_vec(), 1);
    assert_eq!(outcome(&neighbour.write(write)), Ok(()));
    let mut bytes = [0; 4];
    region.memory().copy_to(0, &mut bytes).expect("it fits");
    assert_eq!(&bytes, b"well");
}
