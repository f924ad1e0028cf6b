//! Objects that are put, kept, got and removed at random on a node without an SSD, over an object store that loses
//! answers, has done what it said it had not, shows lists that are old and leaves some out, and that another node uses
//! too. The node crashes now and then. Whatever happens, what was removed comes back by nothing, and what is kept stays.

use std::collections::{BTreeMap, BTreeSet};

use kvasir_blocks::{
    Action, AttachEpoch, Blocks, BucketOptions, Commit, KeepRequest, Options, ReserveObjects,
    RiseError, SinkError, SsdBlock, Tier, UploadFrom,
};
use kvasir_proto::{BlockKey, Class, Namespace, Share, Side, SlotIndex, Tenant, TxId};

use crate::sim_bucket::{Name, name};
use crate::simulation::Random;
use crate::support::namespace;

const NAMES: usize = 5;
/// Fewer, so that some make room.
const SLOTS: u32 = 3;
const CLIENT: AttachEpoch = AttachEpoch(1 << 31);
const LAYOUT: u64 = 7;
const BYTES: u64 = 10;
/// So many lists after a removal has failed nobody may be surprised by it any more.
const LISTS: u32 = 3;

/// Which bytes a name stands for: others only after it was removed, by whoever put it, for good.
type Version = u32;

#[derive(Debug)]
struct Upload {
    number: u64,
    block: SsdBlock,
    from: UploadFrom,
    version: Option<Version>,
}

#[derive(Debug)]
struct World {
    random: Random,
    blocks: Blocks,
    now_ms: u64,
    serial: u64,
    /// What each name stands for now.
    versions: BTreeMap<BlockKey, Version>,
    slots: BTreeMap<SlotIndex, Version>,
    objects: BTreeMap<Name, (SsdBlock, Version)>,
    uploads: Vec<Upload>,
    downloads: Vec<(u64, SlotIndex, SsdBlock)>,
    discards: Vec<(u64, BlockKey)>,
    /// A list that is under way: what there was when it began, but for what was deleted since, and what was sent.
    list: Option<BTreeMap<Name, SsdBlock>>,
    is_listed: bool,
    keeps: BTreeMap<u64, (BlockKey, Version, u64)>,
    removals: BTreeMap<u64, (BlockKey, Version)>,
    /// Until when what is to be there, in this version or a newer one.
    kept: BTreeMap<BlockKey, (Version, u64)>,
    /// All up to this one are gone for good.
    gone: BTreeMap<BlockKey, Version>,
    /// What another node has put there.
    others: BTreeSet<Name>,
    /// Names whose removal has failed, and how many lists ago.
    failed: BTreeMap<BlockKey, u32>,
    counts: BTreeMap<&'static str, u64>,
    /// What has happened, for who reads of a failure.
    story: Vec<String>,
}

fn options() -> Options {
    let bucket = BucketOptions {
        uploads_max: 2,
        upload_bytes_max: 1_000,
        timeout_ms: 40,
        retry_ms: 5,
        blocks_max: NAMES,
        tenant_bytes_max: 1_000,
    };
    Options {
        slots: SLOTS,
        block_tokens: 4,
        lease_max_ms: 1_000,
        demote_ahead_percent: 0,
        bucket,
        ..Options::default()
    }
}

fn space() -> Namespace {
    namespace("objects")
}

fn until(block: &SsdBlock) -> u64 {
    match block.class {
        Class::Context { expires_unix_ms, .. } => expires_unix_ms,
        Class::Normal => 0,
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = World {
            random: Random::seeded(seed),
            blocks: Blocks::new(options()),
            now_ms: 0,
            serial: 0,
            versions: BTreeMap::new(),
            slots: BTreeMap::new(),
            objects: BTreeMap::new(),
            uploads: Vec::new(),
            downloads: Vec::new(),
            discards: Vec::new(),
            list: None,
            is_listed: false,
            keeps: BTreeMap::new(),
            removals: BTreeMap::new(),
            kept: BTreeMap::new(),
            gone: BTreeMap::new(),
            others: BTreeSet::new(),
            failed: BTreeMap::new(),
            counts: BTreeMap::new(),
            story: Vec::new(),
        };
        world.blocks.set_extents(LAYOUT, BYTES);
        world
    }

    fn saw(&mut self, what: &'static str) {
        *self.counts.entry(what).or_insert(0) += 1;
    }

    fn tell(&mut self, what: String) {
        self.story.push(format!("{:5} {what}", self.now_ms));
    }

    fn told(&self) -> String {
        self.story[self.story.len().saturating_sub(60)..].join("\n")
    }

    fn a_name(&mut self) -> BlockKey {
        BlockKey([1 + self.random.below(NAMES) as u8; 16])
    }

    fn a_share(&mut self, side: Side, key: BlockKey) -> ReserveObjects {
        self.serial += 1;
        let tx = TxId { conductor_incarnation: 9, serial: self.serial };
        let (share, namespace, keys) = (Share { tx, side }, space(), vec![key]);
        ReserveObjects { share, epoch: CLIENT, namespace, keys, lease_ms: 1_000 }
    }

    fn step(&mut self) {
        match self.random.below(40) {
            0..8 => self.put(),
            8..12 => self.keep(),
            12..15 => self.remove(),
            15..18 => self.raise(),
            18..24 => self.end_upload(),
            24..28 => self.end_discard(),
            28..31 => self.end_download(),
            31..33 => self.begin_list(),
            33..36 => self.end_list(),
            36 => self.change_usable(),
            37 if self.random.one_in(3) => self.others_keep(),
            38 if self.random.one_in(6) => self.crash(),
            _ => {
                self.now_ms += self.random.below(12) as u64;
                self.blocks.handle_timeout(self.now_ms);
                self.blocks.expire(self.now_ms);
            }
        }
        self.settle();
        self.check();
    }

    fn settle(&mut self) {
        self.blocks.upload_ahead(self.now_ms);
        while let Some(action) = self.blocks.poll_action() {
            match action {
                Action::Upload { upload: number, block, from, .. } => {
                    let version = match from {
                        UploadFrom::Slot { slot, .. } => self.slots.get(&slot).copied(),
                        UploadFrom::Bucket(_) | UploadFrom::Ssd => None,
                    };
                    self.uploads.push(Upload { number, block, from, version });
                }
                Action::Download { rise, slot, block } => self.downloads.push((rise, slot, block)),
                Action::Discard { discard, key, .. } => self.discards.push((discard, key)),
                Action::Kept { keep, blocks, .. } => self.answered(keep, blocks.is_some()),
                Action::Risen { share, .. } => {
                    self.blocks.release(self.now_ms, share).expect("an open share");
                }
                _ => {}
            }
        }
        self.blocks.check_invariants().expect("they hold");
    }

    fn answered(&mut self, number: u64, is_done: bool) {
        self.tell(format!("answered {number}: {is_done}"));
        if let Some((key, version, until_ms)) = self.keeps.remove(&number) {
            if is_done {
                self.saw("kept");
                let kept = self.kept.entry(key).or_insert((version, until_ms));
                if version >= kept.0 {
                    *kept = (version, until_ms);
                }
            }
        } else if let Some((key, before)) = self.removals.remove(&number) {
            if is_done {
                self.saw("removed there");
                self.removed(key, before);
            } else {
                self.saw("not removed");
            }
        }
    }

    /// What can be had under the name now.
    fn version_of(&self, key: BlockKey) -> Option<Version> {
        match self.blocks.find_object(space(), key)? {
            Tier::Dram => {
                let slot = self.blocks.object_at(space(), key)?.slot;
                self.slots.get(&slot).copied()
            }
            _ => {
                let block = self.blocks.bucket_block(key)?;
                self.objects.get(&name(&block)).map(|(_, version)| *version)
            }
        }
    }

    fn check(&self) {
        for key in (1..=NAMES as u8).map(|name| BlockKey([name; 16])) {
            let (version, gone) = (self.version_of(key), self.gone.get(&key));
            assert!(
                version.is_none_or(|version| Some(&version) > gone),
                "{key:?} is {version:?}, and all up to {gone:?} were removed for good:\n{}",
                self.told()
            );
        }
        for (key, (kept, until_ms)) in &self.kept {
            let is_it = |(block, version): &(SsdBlock, Version)| {
                block.key == *key && version >= kept && until(block) >= *until_ms
            };
            assert!(
                *until_ms <= self.now_ms || self.objects.values().any(is_it),
                "{key:?} was to be kept until {until_ms} as {kept}:\n{}",
                self.told()
            );
        }
    }

    fn removed(&mut self, key: BlockKey, version: Version) {
        self.gone.insert(key, version);
        self.versions.insert(key, version + 1);
    }

    fn current(&self, key: BlockKey) -> Version {
        self.versions.get(&key).copied().unwrap_or(1)
    }

    fn is_being_removed(&self, key: BlockKey) -> bool {
        self.removals.values().any(|(of, _)| *of == key)
    }

    fn put(&mut self) {
        let key = self.a_name();
        if self.blocks.find_object(space(), key).is_some() || self.is_being_removed(key) {
            return;
        }
        let request = self.a_share(Side::Prefill, key);
        let Ok(slots) = self.blocks.reserve_objects(self.now_ms, &request) else { return };
        if self.blocks.commit_page(request.share, 0, 7) == Ok(Commit::Indexed) {
            let version = self.current(key);
            self.slots.insert(slots[0], version);
            self.tell(format!("put {} as {version}", key.0[0]));
            self.saw("put");
        }
        self.blocks.release(self.now_ms, request.share).expect("an open share");
    }

    fn keep(&mut self) {
        let key = self.a_name();
        let Some(version) = self.version_of(key) else { return };
        let expires_unix_ms = self.now_ms + 20 + self.random.below(300) as u64;
        let wanted = KeepRequest {
            namespace: space(),
            keys: vec![key],
            tenant: Tenant(1),
            expires_unix_ms,
            created_unix_ms: None,
            copies: 1,
        };
        if let Ok(keep) = self.blocks.keep(self.now_ms, &wanted) {
            self.tell(format!("keep {} as {version} until {expires_unix_ms}: {keep}", key.0[0]));
            self.keeps.insert(keep, (key, version, expires_unix_ms));
        }
    }

    fn remove(&mut self) {
        let key = self.a_name();
        let before = self.current(key);
        let Ok((_, keep)) = self.blocks.remove_objects(self.now_ms, space(), &[key]) else {
            return self.saw("removal refused");
        };
        self.tell(format!("remove {} up to {before}: {keep:?}", key.0[0]));
        // Whoever removes it removes it elsewhere too, where no list is under way that shows it still: what this node is
        // told to keep would count as kept until the next one.
        let others = std::mem::take(&mut self.others);
        let (theirs, others) = others.into_iter().partition(|(of, ..)| *of == key);
        self.others = others;
        for of in &theirs as &BTreeSet<Name> {
            self.deleted(of, true);
        }
        self.kept.remove(&key);
        self.keeps.retain(|_, (of, ..)| *of != key);
        match keep {
            Some(keep) => drop(self.removals.insert(keep, (key, before))),
            None => {
                self.saw("removed");
                self.removed(key, before);
            }
        }
    }

    fn raise(&mut self) {
        let key = self.a_name();
        let request = self.a_share(Side::Source, key);
        self.blocks.raise_object(self.now_ms, &request);
    }

    fn sent(&mut self, block: SsdBlock, version: Version, is_known: bool) {
        self.objects.insert(name(&block), (block, version));
        if let Some(list) = self.list.as_mut().filter(|_| is_known) {
            list.insert(name(&block), block);
        }
    }

    fn deleted(&mut self, of: &Name, is_known: bool) {
        self.objects.remove(of);
        if let Some(list) = self.list.as_mut().filter(|_| is_known) {
            list.remove(of);
        }
    }

    fn end_upload(&mut self) {
        if self.uploads.is_empty() {
            return;
        }
        let at = self.random.below(self.uploads.len());
        let Upload { number, block, from, version } = self.uploads.swap_remove(at);
        let version = match from {
            UploadFrom::Bucket(former) => {
                self.objects.get(&name(&former)).map(|(_, version)| *version)
            }
            UploadFrom::Slot { .. } | UploadFrom::Ssd => version,
        };
        let what = self.random.below(10);
        let result = match version {
            None => Err(SinkError::Gone),
            // It has come there all the same, or a copy of it has and the former one stays.
            Some(version) if what == 0 => {
                self.sent(block, version, false);
                self.saw("sent unknown");
                Err(SinkError::Failed)
            }
            Some(_) if what < 3 => Err(SinkError::Failed),
            Some(version) => {
                self.sent(block, version, true);
                if let UploadFrom::Bucket(former) = from
                    && name(&former) != name(&block)
                {
                    self.deleted(&name(&former), true);
                }
                Ok(())
            }
        };
        self.tell(format!("sent {:?} as {version:?} ({what}): {result:?}", name(&block)));
        self.blocks.uploaded(self.now_ms, number, result);
    }

    fn end_discard(&mut self) {
        if self.discards.is_empty() {
            return;
        }
        let at = self.random.below(self.discards.len());
        let (discard, key) = self.discards.swap_remove(at);
        let (is_done, is_known) = match self.random.below(6) {
            0 => (false, false),
            1 => (true, false),
            _ => (true, true),
        };
        if is_done {
            let all: Vec<Name> =
                self.objects.keys().filter(|(of, ..)| *of == key).copied().collect();
            all.iter().for_each(|of| self.deleted(of, is_known));
            if let Some(list) = self.list.as_mut().filter(|_| is_known) {
                list.retain(|(of, ..), _| *of != key);
            }
        }
        if !is_known {
            self.failed.insert(key, 0);
        }
        self.tell(format!("discard of {}: done {is_done}, known {is_known}", key.0[0]));
        self.blocks.discarded(self.now_ms, discard, is_known);
    }

    fn end_download(&mut self) {
        if self.downloads.is_empty() {
            return;
        }
        let at = self.random.below(self.downloads.len());
        let (rise, slot, block) = self.downloads.swap_remove(at);
        let there = self.objects.get(&name(&block)).map(|(_, version)| *version);
        let result = match there {
            _ if self.random.one_in(8) => Err(RiseError::Failed),
            Some(version) => {
                self.slots.insert(slot, version);
                Ok(7)
            }
            None => Err(RiseError::Gone),
        };
        self.tell(format!("read {:?} as {there:?}: {result:?}", name(&block)));
        self.blocks.risen(self.now_ms, rise, result);
    }

    fn begin_list(&mut self) {
        if self.list.is_none() {
            let all = self.objects.iter().map(|(of, (block, _))| (*of, *block));
            self.list = Some(all.collect());
            self.tell("begins to list".into());
        }
    }

    fn end_list(&mut self) {
        let Some(list) = self.list.take() else { return };
        let now_ms = self.now_ms;
        let mut blocks: Vec<SsdBlock> =
            list.into_values().filter(|block| until(block) > now_ms).collect();
        let is_all = !self.random.one_in(4);
        if !is_all && !blocks.is_empty() {
            let at = self.random.below(blocks.len());
            blocks.swap_remove(at);
        }
        let names: Vec<Name> = blocks.iter().map(name).collect();
        self.tell(format!("listed, all {is_all}: {names:?}"));
        self.blocks.bucket_listed(blocks, is_all);
        self.is_listed = true;
        self.failed.values_mut().for_each(|lists| *lists += 1);
        self.failed.retain(|_, lists| *lists < LISTS);
        self.saw("listed");
    }

    fn change_usable(&mut self) {
        let is_usable = self.is_listed && !self.random.one_in(4);
        self.blocks.set_bucket_usable(is_usable);
    }

    /// Another node keeps something under a name. What this one is removing there, or has tried to, may go with it.
    fn others_keep(&mut self) {
        let key = self.a_name();
        let is_removed = self.failed.contains_key(&key)
            || self.discards.iter().any(|(_, of)| *of == key)
            || self.is_being_removed(key);
        if is_removed || self.kept.contains_key(&key) {
            return;
        }
        let expires_unix_ms = self.now_ms + 50 + self.random.below(200) as u64;
        let block = SsdBlock {
            key,
            namespace: space(),
            parent: None,
            class: Class::Context { tenant: Tenant(1), expires_unix_ms },
            mark: None,
            layout: LAYOUT,
            bytes: BYTES,
        };
        let version = self.current(key);
        self.others.insert(name(&block));
        self.sent(block, version, false);
        self.kept.insert(key, (version, expires_unix_ms));
        self.tell(format!("others keep {} as {version} until {expires_unix_ms}", key.0[0]));
        self.saw("kept by others");
    }

    fn crash(&mut self) {
        for Upload { block, version, .. } in std::mem::take(&mut self.uploads) {
            if let Some(version) = version.filter(|_| self.random.one_in(2)) {
                self.objects.insert(name(&block), (block, version));
            }
        }
        for (_, key) in std::mem::take(&mut self.discards) {
            if self.random.one_in(2) {
                self.objects.retain(|(of, ..), _| *of != key);
            }
        }
        self.downloads.clear();
        self.slots.clear();
        self.keeps.clear();
        self.removals.clear();
        self.failed.clear();
        (self.list, self.is_listed) = (None, false);
        self.blocks = Blocks::new(options());
        self.blocks.set_extents(LAYOUT, BYTES);
        self.tell("crashes".into());
        self.saw("crashes");
    }
}

#[test]
fn objects_in_an_object_store_stay_removed_and_kept_whatever_it_answers() {
    let mut sum: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 0..400 {
        let mut world = World::new(seed);
        (0..600).for_each(|_| world.step());
        world.counts.iter().for_each(|(what, count)| *sum.entry(what).or_insert(0) += count);
    }
    let met: BTreeSet<&str> =
        sum.iter().filter(|(_, count)| **count > 100).map(|(what, _)| *what).collect();
    let all = [
        "crashes",
        "kept",
        "kept by others",
        "listed",
        "not removed",
        "put",
        "removal refused",
        "removed",
        "removed there",
        "sent unknown",
    ];
    assert_eq!(met, all.into_iter().collect(), "{sum:?}");
}
