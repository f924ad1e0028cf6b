//! Two hosts write into each other's memory by turns, and count how long a turn takes.
//!
//! On one: `cargo run --release -p kvasir-transfer-verbs --example ping -- serve 0.0.0.0:7000`;
//! on the other: `... --example ping -- call HOST:7000`. Both take the first port that is active. One
//! process can do both, over the loopback of its device: `... --example ping -- alone`.

#![allow(clippy::print_stdout, reason = "a program that prints its findings")]

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvasir_transfer_verbs::{
    Buffer, CompletionQueue, CompletionQueues, ConnectOptions, Library, MemoryRegion, Operation,
    Payload, ProtectionDomain, Psn, QueuePairAddress, QueuePairOptions, RKey, RcQueuePair, Receive,
    RegionOptions, RemoteRegion, Request, Side, WorkCompletion, WorkTag,
};

const TURNS: u32 = 1000;
const BYTES: usize = 64;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve", listen] => play(TcpListener::bind(listen)?.accept()?.0, false),
        ["call", host] => play(TcpStream::connect(host)?, true),
        ["alone"] => alone(),
        _ => Err("say `serve ADDRESS:PORT`, `call HOST:PORT` or `alone`".into()),
    }
}

fn alone() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let server = std::thread::spawn(move || play(listener.accept()?.0, false));
    play(TcpStream::connect(address)?, true)?;
    server.join().map_err(|_| "the other end panicked")?
}

fn play(wire: TcpStream, begins: bool) -> Result<()> {
    let mut end = End::connect(wire)?;
    let started = Instant::now();
    for turn in 0..TURNS {
        if begins {
            end.write(turn)?;
            end.expect(turn)?;
        } else {
            end.expect(turn)?;
            end.write(turn)?;
        }
    }
    if begins {
        let turn = started.elapsed() / TURNS;
        println!("{TURNS} turns of {BYTES} bytes there and back, {turn:?} each");
    }
    // The peer may still wait for the acknowledgement of its last write.
    end.part()
}

struct End {
    wire: TcpStream,
    queue: CompletionQueue,
    qp: RcQueuePair,
    memory: MemoryRegion,
    peer: RemoteRegion,
    imms: Vec<u32>,
}

impl End {
    fn connect(mut wire: TcpStream) -> Result<End> {
        let devices = Library::open()?.devices()?;
        let contexts = devices.iter().filter_map(|device| device.open().ok());
        let mut paths = contexts.filter_map(|context| Some((context.path().ok()??, context)));
        let (path, context) = paths.next().ok_or("no RDMA device has an active port")?;
        let pd = ProtectionDomain::new(&context)?;
        let queue = CompletionQueue::new(&context, 64, None)?;
        let queues = CompletionQueues { send: &queue, receive: &queue };
        let options =
            QueuePairOptions { send_depth: 8, receive_depth: 8, ..QueuePairOptions::default() };
        let psn = Psn::from_random(std::process::id());
        let mut qp = RcQueuePair::new(&pd, &path, queues, psn, options)?;
        // Before the peer can know of us, so that it never finds none.
        qp.post_receives(&[Receive { into: &[], tag: WorkTag(0) }; 8])?;
        let owner = Arc::new(Buffer::new(2 * BYTES)?);
        let memory = pd.register(owner, 0..2 * BYTES, RegionOptions::SHARED)?;

        wire.write_all(&qp.address().to_bytes())?;
        wire.write_all(&memory.address().to_be_bytes())?;
        wire.write_all(&memory.rkey().0.to_be_bytes())?;
        let (mut address, mut at, mut key) = ([0; QueuePairAddress::BYTES], [0; 8], [0; 4]);
        wire.read_exact(&mut address)?;
        wire.read_exact(&mut at)?;
        wire.read_exact(&mut key)?;
        let peer = RemoteRegion {
            address: u64::from_be_bytes(at),
            bytes: 2 * BYTES as u64,
            rkey: RKey(u32::from_be_bytes(key)),
        };
        qp.connect(&QueuePairAddress::from_bytes(&address)?, &ConnectOptions::default())?;
        let mut end = End { wire, queue, qp, memory, peer, imms: Vec::new() };
        // A write before the peer is connected would be lost until it is sent again.
        end.meet()?;
        Ok(end)
    }

    fn meet(&mut self) -> Result<()> {
        self.wire.write_all(&[1])?;
        Ok(self.wire.read_exact(&mut [0])?)
    }

    /// From the first half of the own memory into the second half of the peer's.
    fn write(&mut self, imm: u32) -> Result<()> {
        while self.qp.send_room() == 0 {
            self.poll()?;
        }
        let slices = [self.memory.slice(0, BYTES)?];
        let to = self.peer.at(BYTES as u64, BYTES as u64)?;
        let write = Operation::WriteImm { from: Payload::Slices(&slices), to, imm };
        Ok(self.qp.post(&[Request::new(write, WorkTag(imm))])?)
    }

    fn expect(&mut self, imm: u32) -> Result<()> {
        let patience = Instant::now();
        while !self.imms.contains(&imm) {
            self.poll()?;
            if patience.elapsed() > Duration::from_secs(10) {
                return Err("the peer is silent".into());
            }
        }
        self.imms.retain(|told| *told != imm);
        Ok(())
    }

    fn poll(&mut self) -> Result<()> {
        let mut batch = [WorkCompletion::default(); 8];
        for completion in self.queue.poll(&mut batch)? {
            self.qp.retire(completion);
            if !completion.is_success() {
                return Err(completion.status().to_string().into());
            }
            if completion.side() == Side::Receive {
                self.imms.extend(completion.imm());
                self.qp.post_receives(&[Receive { into: &[], tag: WorkTag(0) }])?;
            }
        }
        Ok(())
    }

    fn part(&mut self) -> Result<()> {
        while self.qp.outstanding(Side::Send) > 0 {
            self.poll()?;
        }
        self.meet()?;
        self.qp.cut_off()?;
        let mut batch = [WorkCompletion::default(); 8];
        while !self.qp.is_drained() {
            for completion in self.queue.poll(&mut batch)? {
                self.qp.retire(completion);
            }
        }
        Ok(())
    }
}
