//! Devices, connected pairs and memory for the tests.

use std::io::Write;
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

use kvasir_transfer_verbs::{
    Buffer, CompletionQueue, CompletionQueues, ConnectOptions, Context, Library, LocalPath,
    LocalSlice, MemoryRegion, ProtectionDomain, Psn, QueuePairOptions, RcQueuePair, Receive,
    RegionOptions, RemoteAddress, Side, WorkCompletion, WorkTag,
};

/// Only a broken device takes as long.
const PATIENCE: Duration = Duration::from_secs(30);

#[expect(clippy::disallowed_methods, reason = "how whoever runs the tests names their devices")]
fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// A device with all that is made once on it.
pub(crate) struct Lab {
    pub context: Context,
    pub pd: ProtectionDomain,
    pub path: LocalPath,
}

impl Lab {
    /// `None`, with a sentence, where there is no device. A device that was named must be there.
    pub(crate) fn open() -> Option<Lab> {
        if let Some(name) = setting("KVASIR_VERBS_LOOPBACK") {
            return Some(Lab::named(&name));
        }
        let devices = match Library::open() {
            Ok(library) => library.devices().expect("a list of devices"),
            Err(unavailable) => return skip(&unavailable.to_string()),
        };
        let contexts = devices.iter().filter_map(|device| device.open().ok());
        match contexts.filter_map(Lab::on).next() {
            Some(lab) => Some(lab),
            None => skip("no RDMA device of this host has an active port"),
        }
    }

    fn named(name: &str) -> Lab {
        let library = Library::open().expect("libibverbs, as a device of it is named");
        let device = library.device(name).expect("a list of devices").expect("the named device");
        Lab::on(device.open().expect("the named device opens")).expect("its port is active")
    }

    fn on(context: Context) -> Option<Lab> {
        let path = context.path().expect("a device describes itself")?;
        let pd = ProtectionDomain::new(&context).expect("a protection domain");
        Some(Lab { context, pd, path })
    }

    pub(crate) fn queue(&self, completions: u32) -> CompletionQueue {
        CompletionQueue::new(&self.context, completions, None).expect("a completion queue")
    }

    pub(crate) fn memory(&self, bytes: usize) -> Registered {
        let buffer = Arc::new(Buffer::new(bytes).expect("memory"));
        let owner = Arc::clone(&buffer);
        let region = self.pd.register(owner, 0..bytes, RegionOptions::SHARED).expect("a region");
        Registered { buffer, region }
    }
}

/// Says so once, for the first test of many.
fn skip<T>(why: &str) -> Option<T> {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let what = "tests of RDMA devices are skipped";
        let remedy = "`tests/verbs-vm/run` runs them in a virtual machine";
        writeln!(std::io::stderr(), "{what}: {why}; {remedy}").ok();
    });
    None
}

/// Two devices with a wire between them.
pub(crate) fn wire() -> Option<(Lab, Lab)> {
    let Some(names) = setting("KVASIR_VERBS_WIRE") else {
        // Where there is no device at all, that is the reason to give.
        Lab::open()?;
        return skip("KVASIR_VERBS_WIRE does not name two devices that are connected");
    };
    let (a, b) = names.split_once(',').expect("two devices: `rxe1,rxe2`");
    Some((Lab::named(a), Lab::named(b)))
}

pub(crate) fn wire_is_slow() -> bool {
    setting("KVASIR_VERBS_WIRE_IS_SLOW").as_deref() == Some("1")
}

/// A buffer and its registration.
pub(crate) struct Registered {
    pub buffer: Arc<Buffer>,
    pub region: MemoryRegion,
}

impl Registered {
    pub(crate) fn slice(&self, offset: usize, bytes: usize) -> LocalSlice {
        self.region.slice(offset, bytes).expect("within the region")
    }

    pub(crate) fn at(&self, offset: usize, bytes: usize) -> RemoteAddress {
        self.region.remote().at(offset as u64, bytes as u64).expect("within the region")
    }

    pub(crate) fn fill(&self, byte: u8) {
        self.write(0, &vec![byte; self.region.bytes()]);
    }

    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        self.buffer.write(offset, bytes).expect("within the buffer");
    }

    pub(crate) fn read(&self, offset: usize, bytes: usize) -> Vec<u8> {
        self.buffer.read(offset, bytes).expect("within the buffer")
    }

    pub(crate) fn all(&self) -> Vec<u8> {
        self.read(0, self.region.bytes())
    }
}

/// Bytes that do not repeat soon.
pub(crate) fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i * 31 + i / 251) as u8).collect()
}

/// One end of a connection with completion queues of its own.
pub(crate) struct End {
    pub qp: RcQueuePair,
    pub sends: CompletionQueue,
    pub receives: CompletionQueue,
}

impl End {
    pub(crate) fn new(lab: &Lab, options: QueuePairOptions) -> End {
        let (sends, receives) = (lab.queue(512), lab.queue(512));
        let queues = CompletionQueues { send: &sends, receive: &receives };
        let psn = Psn::from_random(std::process::id() * 7919);
        let qp = RcQueuePair::new(&lab.pd, &lab.path, queues, psn, options);
        End { qp: qp.expect("a queue pair"), sends, receives }
    }

    /// The next `count` completions of one side, retired.
    pub(crate) fn wait(&mut self, side: Side, count: usize) -> Vec<WorkCompletion> {
        let queue = match side {
            Side::Send => &self.sends,
            Side::Receive => &self.receives,
        };
        let found = poll(queue, count);
        for completion in &found {
            assert_eq!(completion.side(), side);
            self.qp.retire(completion);
        }
        found
    }

    /// Completions of both sides until the cut-off is complete.
    pub(crate) fn drain(&mut self) -> Vec<WorkCompletion> {
        let mut all = Vec::new();
        let started = Instant::now();
        while !self.qp.is_drained() {
            assert!(started.elapsed() < PATIENCE, "the queue pair is not drained");
            for queue in [&self.sends, &self.receives] {
                let mut batch = [WorkCompletion::default(); 16];
                for completion in queue.poll(&mut batch).expect("a completion queue polls") {
                    self.qp.retire(completion);
                    all.push(*completion);
                }
            }
        }
        all
    }

    /// Receives that only take the immediates of writes.
    pub(crate) fn expect_imms(&mut self, count: usize) {
        let receive = Receive { into: &[], tag: WorkTag(0) };
        self.qp.post_receives(&vec![receive; count]).expect("room for receives");
    }
}

/// The next `count` completions, however long they take.
pub(crate) fn poll(queue: &CompletionQueue, count: usize) -> Vec<WorkCompletion> {
    let mut found = Vec::new();
    let started = Instant::now();
    while found.len() < count {
        let mut batch = [WorkCompletion::default(); 16];
        let wanted = batch.len().min(count - found.len());
        let batch = queue.poll(&mut batch[..wanted]).expect("a completion queue polls");
        found.extend_from_slice(batch);
        let waited = started.elapsed();
        assert!(waited < PATIENCE, "{} of {count} completions came", found.len());
        std::thread::yield_now();
    }
    found
}

/// Two connected ends, on one device or two.
pub(crate) fn pair(a: &Lab, b: &Lab, options: QueuePairOptions) -> (End, End) {
    let (mut left, mut right) = (End::new(a, options), End::new(b, options));
    let (to_left, to_right) = (left.qp.address(), right.qp.address());
    left.qp.connect(&to_right, &ConnectOptions::default()).expect("connected");
    right.qp.connect(&to_left, &ConnectOptions::default()).expect("connected");
    (left, right)
}

pub(crate) fn tags(completions: &[WorkCompletion]) -> Vec<Option<u32>> {
    completions.iter().map(|completion| completion.tag().map(|tag| tag.0)).collect()
}

pub(crate) fn assert_success(completions: &[WorkCompletion]) {
    for completion in completions {
        let vendor = completion.vendor_error();
        assert!(completion.is_success(), "{} (vendor {vendor})", completion.status());
    }
}
