//! A small node to test with: blocks of four tokens, prompts written as letters (one for each full
//! block), shares written as `7p`, `7d`, `7s`.

use std::fmt::Write;

use kvasir_blocks::{
    Action, Allocate, AllocateError, Allocated, AttachEpoch, Blocks, Commit, Options, Outcome,
    UploadFrom,
};
use kvasir_proto::{BlockKey, Namespace, Share, Side, SlotIndex, TxId, keys};

pub(crate) const BLOCK_TOKENS: u32 = 4;
pub(crate) const LEASE_MS: u64 = 5_000;
pub(crate) const EPOCH: AttachEpoch = AttachEpoch(1);

pub(crate) fn options(slots: u32) -> Options {
    Options { slots, block_tokens: BLOCK_TOKENS, imm_seed: 100, ..Options::default() }
}

/// `"7p"` is the prefill share of transaction 7.
pub(crate) fn share(name: &str) -> Share {
    let (serial, side) = name.split_at(name.len() - 1);
    let side = match side {
        "p" => Side::Prefill,
        "d" => Side::Decode,
        "s" => Side::Source,
        other => panic!("no side is called {other}"),
    };
    let serial = serial.parse().expect("a share's name begins with a number");
    Share { tx: TxId { conductor_incarnation: 1, serial }, side }
}

pub(crate) fn share_name(share: Share) -> String {
    let side = match share.side {
        Side::Prefill => 'p',
        Side::Decode => 'd',
        Side::Source => 's',
    };
    format!("{}{side}", share.tx.serial)
}

pub(crate) fn namespace(tenant: &str) -> Namespace {
    keys::namespace(b"model", "f32", tenant, "")
}

/// The keys of a prompt of full blocks, one for each letter.
pub(crate) fn chain(prompt: &str) -> Vec<BlockKey> {
    chain_in("", prompt)
}

pub(crate) fn chain_in(tenant: &str, prompt: &str) -> Vec<BlockKey> {
    let tokens: Vec<u32> =
        prompt.chars().flat_map(|c| [u32::from(c); BLOCK_TOKENS as usize]).collect();
    keys::chain(namespace(tenant), &tokens, BLOCK_TOKENS as usize)
}

/// The key of a prompt's last block.
pub(crate) fn key(prompt: &str) -> BlockKey {
    *chain(prompt).last().expect("a prompt of at least one block")
}

/// A request for a prompt of full blocks and `rest` tokens more.
pub(crate) fn request(name: &str, prompt: &str, rest: u32) -> Allocate {
    let share = share(name);
    Allocate {
        share,
        namespace: namespace(""),
        keys: chain(prompt),
        prompt_tokens: prompt.len() as u32 * BLOCK_TOKENS + rest,
        lease_ms: LEASE_MS,
        fetch_until_block: 0,
        has_remote_writer: share.side == Side::Decode,
        is_ephemeral: false,
        leaves_ssd: false,
    }
}

pub(crate) fn sums(pages: usize) -> Vec<u64> {
    (0..pages as u64).map(|page| 100 + page).collect()
}

fn say(text: &mut String, what: &str) {
    write!(text, "{}{what}", if text.is_empty() { "" } else { " " }).expect("to a string");
}

#[derive(Debug)]
pub(crate) struct Node {
    pub blocks: Blocks,
    pub now_ms: u64,
    /// What the shell was asked to write, read and forget, by number and key.
    pub sinks: Vec<(u64, BlockKey)>,
    pub rises: Vec<(u64, BlockKey)>,
    pub forgotten: Vec<BlockKey>,
    /// What is to be gone for good.
    pub erased: Vec<(u64, BlockKey)>,
    /// The same of the object store.
    pub uploads: Vec<(u64, BlockKey, UploadFrom)>,
    pub downloads: Vec<(u64, BlockKey)>,
    pub discards: Vec<(u64, BlockKey)>,
    pub kept: Vec<(u64, Option<u32>)>,
    /// Copies of pages into slots (number and page), and of slots into pages.
    pub reads: Vec<(u64, u32)>,
    pub writes: Vec<(u64, u32)>,
    /// Copies of computed layers: number, page of the pool, layers.
    pub carries: Vec<(u64, u32, std::ops::Range<u16>)>,
}

impl Node {
    pub(crate) fn new(slots: u32) -> Self {
        Node::with(options(slots))
    }

    pub(crate) fn with(options: Options) -> Self {
        Node {
            blocks: Blocks::new(options),
            now_ms: 1_000,
            sinks: Vec::new(),
            rises: Vec::new(),
            forgotten: Vec::new(),
            erased: Vec::new(),
            uploads: Vec::new(),
            downloads: Vec::new(),
            discards: Vec::new(),
            kept: Vec::new(),
            reads: Vec::new(),
            writes: Vec::new(),
            carries: Vec::new(),
        }
    }

    pub(crate) fn check(&self) {
        if let Err(broken) = self.blocks.check_invariants() {
            panic!("{broken}");
        }
    }

    pub(crate) fn allocate(&mut self, request: &Allocate) -> Result<Allocated, AllocateError> {
        let result = self.blocks.allocate(self.now_ms, request);
        self.check();
        result
    }

    /// Allocates and binds a share that must fit.
    pub(crate) fn open(&mut self, name: &str, prompt: &str, rest: u32) -> Allocated {
        let allocated = self.allocate(&request(name, prompt, rest)).expect("there is room");
        if share(name).side != Side::Source {
            self.blocks.bind(share(name), EPOCH).expect("nobody bound it before");
        }
        self.check();
        allocated
    }

    /// Commits a page of the prompt.
    pub(crate) fn commit(&mut self, name: &str, page: u32) -> Commit {
        let commit = self.blocks.commit_page(share(name), page, u64::from(page));
        self.check();
        commit.expect("a page to commit")
    }

    pub(crate) fn release(&mut self, name: &str) {
        self.blocks.release(self.now_ms, share(name)).expect("a share to release");
        self.check();
    }

    /// A whole prefill, after which the prompt's blocks are cached.
    pub(crate) fn fill(&mut self, name: &str, prompt: &str) {
        self.open(name, prompt, 1);
        for page in 0..prompt.len() as u32 {
            self.commit(name, page);
        }
        self.release(name);
        self.actions();
    }

    /// Removes an object; false when there was none.
    pub(crate) fn remove(&mut self, namespace: Namespace, key: BlockKey) -> bool {
        let removed = self.blocks.remove_objects(self.now_ms, namespace, &[key]);
        self.check();
        removed.expect("nothing of it is written anew").0 == 1
    }

    pub(crate) fn has(&self, prompt: &str) -> bool {
        self.blocks.block(key(prompt)).is_some()
    }

    pub(crate) fn slot(&self, prompt: &str) -> SlotIndex {
        self.blocks.block(key(prompt)).expect("a cached block").slot
    }

    /// Which of the prompts (`"a ab abc"`) are cached, space for space.
    pub(crate) fn cached(&self, prompts: &str) -> String {
        prompts.split(' ').filter(|prompt| self.has(prompt)).collect::<Vec<_>>().join(" ")
    }

    /// What the shell is to do, as text.
    pub(crate) fn actions(&mut self) -> String {
        self.blocks.copy_pages(self.now_ms);
        self.check();
        let mut text = String::new();
        while let Some(action) = self.blocks.poll_action() {
            let (what, share) = match action {
                Action::Bound { share, epoch: _, bound } => {
                    (format!("Bound/{}", bound.cached_tokens), share)
                }
                Action::StopEngine { share, .. } => ("StopEngine".to_owned(), share),
                Action::StopWriter { share } => ("StopWriter".to_owned(), share),
                Action::StopPush { share } => ("StopPush".to_owned(), share),
                Action::CancelImm { share, .. } => ("CancelImm".to_owned(), share),
                Action::Sink { sink, ref block, .. } => {
                    self.sinks.push((sink, block.key));
                    continue;
                }
                Action::Rewrite { sink, key, .. } => {
                    self.sinks.push((sink, key));
                    continue;
                }
                Action::Rise { rise, key, .. } => {
                    self.rises.push((rise, key));
                    continue;
                }
                Action::Forget { key, .. } => {
                    self.forgotten.push(key);
                    continue;
                }
                Action::Erase { sink, key, .. } => {
                    self.erased.push((sink, key));
                    continue;
                }
                Action::Upload { upload, block, from, .. } => {
                    self.uploads.push((upload, block.key, from));
                    continue;
                }
                Action::Download { rise, block, .. } => {
                    self.downloads.push((rise, block.key));
                    continue;
                }
                Action::Discard { discard, key, .. } => {
                    self.discards.push((discard, key));
                    continue;
                }
                Action::Kept { keep, blocks, mark: _ } => {
                    self.kept.push((keep, blocks));
                    continue;
                }
                Action::ReadPage { rise, page, .. } => {
                    self.reads.push((rise, page));
                    continue;
                }
                Action::WritePage { copy, page, .. } => {
                    self.writes.push((copy, page));
                    continue;
                }
                Action::CarryLayers { copy, page, layers, .. } => {
                    self.carries.push((copy, page, layers));
                    continue;
                }
                Action::PagesDropped { handle, .. } => {
                    say(&mut text, &format!("Dropped({handle})"));
                    continue;
                }
                Action::PagesFilled { handle, blocks, .. } => {
                    say(&mut text, &format!("Filled/{blocks}({handle})"));
                    continue;
                }
                Action::Risen { share, blocks, is_all: false } => {
                    (format!("Rises/{blocks}"), share)
                }
                Action::Risen { share, blocks, is_all: true } => (format!("Risen/{blocks}"), share),
                Action::Ended { share, outcome: Outcome::Released, .. } => {
                    ("Released".to_owned(), share)
                }
                Action::Ended { share, outcome: Outcome::Aborted, .. } => {
                    ("Aborted".to_owned(), share)
                }
            };
            say(&mut text, &format!("{what}({})", share_name(share)));
        }
        text
    }

    /// Nothing is held: no share, pin, lock, immediate or quarantined slot.
    pub(crate) fn assert_idle(&self) {
        self.check();
        let c = self.blocks.counts();
        let held = [c.shares, c.aborting, c.allocated, c.leaving, c.quarantined, c.pins];
        assert_eq!(held, [0; 6], "{c:?}");
        assert_eq!((c.get_pins, c.imms, c.aborting_since_ms), (0, 0, None), "{c:?}");
        assert_eq!(c.free + c.committed, c.slots, "{c:?}");
        assert_eq!(c.evictable, c.committed, "{c:?}");
    }
}
