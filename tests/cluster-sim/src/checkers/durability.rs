//! I7: never is an acknowledged context lost by a crash, before its time is over or somebody asks for less;
//! and never does one come back that was dropped, or the time that it had before.
//!
//! Nor is one lost by a node that was taken away after it had said that it has drained: then another node has
//! promised it, for as long at least, and is held to that.
//!
//! And a context of which a tenant was told that it is on two nodes outlives the loss of one's disk: then the
//! other has promised it, for as long, and is held to that.
//!
//! What a disk has done to a block by itself is known here, since it was the run that did it: then the
//! block and those after it are excused (a lost disk takes two replicas), and nothing else is. What lies
//! on a disk is looked up in its bytes, and in the end every block that was kept is asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kvasir_proto::{BlockKey, Share};

use super::Checker;
use crate::calls::CALL_US;
use crate::content::{PageBytes, Truth};
use crate::seen::{Life, ListedContext, Seen};

/// What may be found of a context, by the node's calendar.
#[derive(Debug, Clone, Copy, Default)]
struct Promise {
    /// It is there until then at least. 0: it may be gone.
    least_ms: u64,
    /// And until then at most. 0: it is in no list.
    most_ms: u64,
    /// The longest that anybody has asked for.
    ever_ms: u64,
    /// An object, in this version or a newer one.
    version: u32,
}

impl Promise {
    fn at_most(&mut self, until_ms: u64) {
        self.most_ms = self.most_ms.max(until_ms);
        self.ever_ms = self.ever_ms.max(until_ms);
    }
}

#[derive(Debug)]
pub(super) struct Durability {
    truth: Rc<Truth>,
    /// By its last block.
    contexts: BTreeMap<(usize, BlockKey), Promise>,
    /// For how long a node has said that it keeps a context, whatever has become of that since; and (the longest
    /// time there is) those that were to be changed there afterwards.
    told_ms: BTreeMap<(usize, BlockKey), u64>,
    /// The same of nodes that have lost their disks, and when that was.
    told_before_loss: BTreeMap<(usize, BlockKey), (u64, u64)>,
    /// Blocks of which a disk has changed an extent.
    rotted: BTreeSet<(usize, BlockKey)>,
    /// Nodes whose disks have lied: what was not written may be all that is known of a block.
    lied_to: BTreeSet<usize>,
    /// Until when contexts are on two nodes, as tenants were told.
    copied_ms: BTreeMap<BlockKey, u64>,
    /// Nodes that drain, with what has moved to others that are gone since: no promise of theirs any more.
    draining: BTreeMap<usize, BTreeMap<BlockKey, u64>>,
    /// In which version an object is being kept.
    keeping: BTreeMap<(usize, BlockKey), u32>,
    /// The newest one of which a put was begun.
    begun: BTreeMap<(usize, BlockKey), u32>,
    /// Nodes that could not read all of their disks when they started: what is missing is not lost.
    partial: BTreeSet<usize>,
    /// Contexts of those nodes that are found and listed when all of the disk can be read.
    unreached: BTreeSet<(usize, BlockKey)>,
    /// Which lives of nodes have found out what their disks have.
    started: BTreeMap<usize, Life>,
    /// What was put on a node, under a name of which it is to keep something, before it had found that out.
    put_before: BTreeSet<(Life, BlockKey)>,
    /// Puts that have not ended, and what they put.
    puts: BTreeMap<(Life, Share), Vec<(BlockKey, u32)>>,
    /// Older versions that were being put when the one was kept that counts: one of them may be stored after it.
    beside: BTreeMap<(usize, BlockKey), BTreeSet<u32>>,
    /// A node has drained: what it had of an object may have come to another one that has it too.
    is_mixed: bool,
    /// A node that has left was one of two, and the other one's copy may not be made yet.
    has_left: bool,
}

impl Durability {
    pub(super) fn new(truth: Rc<Truth>) -> Self {
        Durability {
            truth,
            contexts: BTreeMap::new(),
            told_ms: BTreeMap::new(),
            told_before_loss: BTreeMap::new(),
            rotted: BTreeSet::new(),
            lied_to: BTreeSet::new(),
            copied_ms: BTreeMap::new(),
            draining: BTreeMap::new(),
            keeping: BTreeMap::new(),
            begun: BTreeMap::new(),
            partial: BTreeSet::new(),
            unreached: BTreeSet::new(),
            started: BTreeMap::new(),
            put_before: BTreeSet::new(),
            puts: BTreeMap::new(),
            beside: BTreeMap::new(),
            is_mixed: false,
            has_left: false,
        }
    }

    /// Last blocks of what a node has to keep.
    fn lasts(&self, node: usize) -> impl Iterator<Item = BlockKey> + '_ {
        let of_node = self.contexts.range((node, BlockKey([0; 16]))..);
        let of_node = of_node.take_while(move |((of, _), _)| *of == node);
        of_node.filter(|(_, promise)| promise.least_ms > 0).map(|((_, last), _)| *last)
    }

    /// Everything that a node has to keep.
    pub(super) fn kept(&self, node: usize) -> impl Iterator<Item = BlockKey> + '_ {
        let blocks = self.lasts(node).flat_map(|last| self.truth.chain(last));
        blocks.collect::<BTreeSet<BlockKey>>().into_iter()
    }

    fn keeps(&self, node: usize, key: BlockKey) -> bool {
        self.kept(node).any(|kept| kept == key)
    }

    fn expire(&mut self, node: usize, unix_ms: u64) {
        let is_over = |promise: &Promise| promise.least_ms <= unix_ms;
        let of_node = self.contexts.iter_mut().filter(|((of, _), _)| *of == node);
        of_node.filter(|(_, promise)| is_over(promise)).for_each(|(_, of)| of.least_ms = 0);
    }

    fn missing(&self, node: usize, there: &BTreeSet<BlockKey>) -> Vec<BlockKey> {
        self.kept(node).filter(|key| !there.contains(key)).collect()
    }

    /// A block that the disk has lost by itself is not expected any more, nor are those after it.
    fn excuse(&mut self, node: usize, lost: BlockKey) {
        let truth = Rc::clone(&self.truth);
        let follows = |key: &BlockKey| truth.chain(*key).contains(&lost);
        let of_node =
            self.contexts.iter_mut().filter(|((of, last), _)| *of == node && follows(last));
        of_node.for_each(|(_, promise)| promise.least_ms = 0);
    }

    /// A context of which a disk has spoiled a block is kept for as long as it is listed: its last block, which says for how
    /// long, was not found, or an older extent of it that says otherwise.
    fn excuse_rotted(&mut self, node: usize, there: &BTreeSet<BlockKey>, listed: &[ListedContext]) {
        let has_rotted = |last: &BlockKey| self.has_rotted(node, *last);
        for last in self.lasts(node).filter(has_rotted).collect::<Vec<BlockKey>>() {
            let context = listed.iter().find(|context| context.last == last);
            let is_there = self.truth.is_object(last) && there.contains(&last);
            let until_ms = context.map_or(0, |context| context.expires_unix_ms);
            let promise = self.contexts.entry((node, last)).or_default();
            if !is_there {
                promise.least_ms = promise.least_ms.min(until_ms);
            }
        }
    }

    /// A start that could not read all of a disk may have found what was before. That counts again when it is written anew
    /// meanwhile, as does what is computed anew of what was not found; and it is listed as long as it says itself. Of an
    /// object that was not found, and is not put meanwhile, nothing is written anew.
    ///
    /// What is kept and follows what could not be read is found later, when nothing of its chain may make room until then:
    /// of what is before that, nothing says that it is kept.
    fn excuse_unread(
        &mut self,
        node: usize,
        there: &BTreeSet<BlockKey>,
        (read, unreached): (&BTreeSet<BlockKey>, &BTreeSet<BlockKey>),
        listed: &[ListedContext],
    ) {
        for last in self.lasts(node).collect::<Vec<BlockKey>>() {
            let may_go = |key: &BlockKey| read.contains(key) && !unreached.contains(key);
            if unreached.contains(&last) && !self.truth.chain(last).iter().any(may_go) {
                self.unreached.insert((node, last));
                continue;
            }
            let is_missing_object = self.truth.is_object(last) && !there.contains(&last);
            let context = listed.iter().find(|context| context.last == last);
            let until_ms = context.map_or(0, |context| context.expires_unix_ms);
            if let Some(promise) = self.contexts.get_mut(&(node, last))
                && !is_missing_object
            {
                promise.least_ms = promise.least_ms.min(until_ms);
                promise.version = 0;
            }
        }
        // What has the shorter time, or none, may make room before what has the longer one can be read; so may what is
        // changed until then.
        let of_node = self.contexts.iter_mut().filter(|((of, _), _)| *of == node);
        of_node.for_each(|(_, promise)| promise.most_ms = promise.ever_ms);
    }

    /// What may have had its former time again has it now, or never.
    fn is_whole_again(&mut self, node: usize, listed: &[ListedContext]) {
        let of_node = self.contexts.iter_mut().filter(|((of, _), _)| *of == node);
        for ((_, last), promise) in of_node {
            let context = listed.iter().find(|context| context.last == *last);
            let until_ms = context.map_or(0, |context| context.expires_unix_ms);
            promise.most_ms = promise.most_ms.min(until_ms).max(promise.least_ms);
        }
    }

    /// This version of an object is kept. Of two that were put at the same time the one counts that was stored last.
    fn keeps_version(&mut self, of: (usize, BlockKey), version: u32) {
        let is_beside = self.beside.get(&of).is_some_and(|beside| beside.contains(&version));
        let promise = self.contexts.entry(of).or_default();
        if version < promise.version && !is_beside {
            return;
        }
        promise.version = version;
        let of_node = self.puts.iter().filter(|((at, _), _)| at.node == of.0);
        let open = of_node.flat_map(|(_, puts)| puts).filter(|(key, _)| *key == of.1);
        let older = open.map(|(_, open)| *open).filter(|open| *open < version);
        self.beside.insert(of, older.collect());
    }

    /// What a block that is kept may be: of an object the version that was kept or a newer one.
    fn may_be_kept(&self, node: usize, key: BlockKey, bytes: &PageBytes) -> bool {
        let of = (node, key);
        let kept = self.contexts.get(&of).map_or(0, |promise| promise.version);
        let is_unsure = self.is_mixed || self.lied_to.contains(&node);
        let begun = self.begun.get(&of).copied().unwrap_or(0);
        let version = self.truth.version_of(key, bytes, begun);
        self.truth.may_be(key, bytes)
            && (is_unsure || version.is_none_or(|version| version >= kept))
    }

    /// A node was taken away with its disk, after it had said that it has drained.
    fn leave(&mut self, node: usize, unix_ms: u64) -> Result<(), String> {
        self.expire(node, unix_ms);
        // What its disk has spoiled by itself was lost before, whether somebody has found that out or not.
        let is_expected =
            |last: &BlockKey| !self.has_rotted(node, *last) && !self.partial.contains(&node);
        for last in self.lasts(node).filter(is_expected) {
            let least_ms = self.contexts[&(node, last)].least_ms;
            let of_other = |((of, key), until_ms): (&(usize, BlockKey), &u64)| {
                *of != node && *key == last && *until_ms >= least_ms
            };
            let moved_ms = self.draining.get(&node).and_then(|moved| moved.get(&last)).copied();
            let has_moved = moved_ms.is_some_and(|until_ms| until_ms >= least_ms);
            if !has_moved && !self.told_ms.iter().any(of_other) {
                return Err(format!(
                    "node {node} was to keep the context of {last:?} until {least_ms} and has left, and \
                     no other node has said that it keeps it as long"
                ));
            }
        }
        self.forget(node);
        self.has_left = true;
        Ok(())
    }

    fn forget(&mut self, node: usize) {
        self.contexts.retain(|(of, _), _| *of != node);
        self.rotted.retain(|(of, _)| *of != node);
        self.beside.retain(|(of, _), _| *of != node);
        self.lied_to.remove(&node);
        self.partial.remove(&node);
        self.unreached.retain(|(of, _)| *of != node);
        // What it had promised is no other's promise any more, nor that of who was done with it.
        self.draining.remove(&node);
        for moved in self.draining.values_mut() {
            for ((_, last), told_ms) in self.told_ms.iter().filter(|((of, _), _)| *of == node) {
                let moved_ms = moved.entry(*last).or_insert(0);
                *moved_ms = (*moved_ms).max(*told_ms);
            }
        }
        self.told_ms.retain(|(of, _), _| *of != node);
    }

    /// Who lists a context says that it keeps it, also when it had crashed before it could answer.
    fn tell_listed(&mut self, node: usize, listed: &[ListedContext]) {
        for context in listed {
            let told_ms = self.told_ms.entry((node, context.last)).or_insert(0);
            *told_ms = (*told_ms).max(context.expires_unix_ms);
        }
    }

    /// Nodes that have said that they keep a context so long.
    fn told(&self, last: BlockKey, until_ms: u64) -> impl Iterator<Item = usize> + '_ {
        let is_it = move |((_, key), told_ms): &(&(usize, BlockKey), &u64)| {
            *key == last && **told_ms >= until_ms
        };
        self.told_ms.iter().filter(is_it).map(|((node, _), _)| *node)
    }

    /// Nodes whose word for it may be relied on yet, though they have lost their disks since: who asks several at
    /// once uses the first one's answer when it has the last one's, or has given that up.
    fn told_before_loss(
        &self,
        now_us: u64,
        last: BlockKey,
        until_ms: u64,
    ) -> impl Iterator<Item = usize> + '_ {
        let of_last = self.told_before_loss.iter().filter(move |((_, of), _)| *of == last);
        let counts = move |(told_ms, lost_us): (u64, u64)| {
            told_ms >= until_ms && now_us <= lost_us + CALL_US
        };
        of_last.filter(move |(_, told)| counts(**told)).map(|((node, _), _)| *node)
    }

    /// A disk is lost for good: what was told to be on two nodes is on the other one.
    fn lose(&mut self, now_us: u64, node: usize, unix_ms: u64) -> Result<(), String> {
        self.expire(node, unix_ms);
        for last in self.lasts(node).filter(|last| self.copied_ms.contains_key(last)) {
            let least_ms = self.contexts[&(node, last)].least_ms.min(self.copied_ms[&last]);
            let is_elsewhere = self.told(last, least_ms).any(|of| of != node);
            if !is_elsewhere && !self.has_left {
                return Err(format!(
                    "the context of {last:?} was to be on two nodes until {least_ms}, of which node {node} has \
                     lost its disk, and no other has said that it keeps it"
                ));
            }
        }
        let of_node = self.told_ms.iter().filter(|((of, _), _)| *of == node);
        self.told_before_loss.extend(of_node.map(|(key, told_ms)| (*key, (*told_ms, now_us))));
        self.forget(node);
        self.copied_ms.clear();
        Ok(())
    }

    fn has_rotted(&self, node: usize, key: BlockKey) -> bool {
        self.truth.chain(key).iter().any(|of| self.rotted.contains(&(node, *of)))
    }

    fn look(&self, node: usize, there: &BTreeSet<BlockKey>) -> Result<(), String> {
        if self.partial.contains(&node) {
            return Ok(());
        }
        // One that has rotted is found out by whoever reads it; those after it go with it.
        match self.missing(node, there).into_iter().find(|key| !self.has_rotted(node, *key)) {
            Some(key) => Err(format!("node {node} was to keep {key:?} and has lost it")),
            None => Ok(()),
        }
    }

    /// The contexts that a node lists are those that it was told of, and no others.
    fn look_at_list(
        &self,
        node: usize,
        unix_ms: u64,
        listed: &[ListedContext],
    ) -> Result<(), String> {
        let listed: BTreeMap<BlockKey, u64> =
            listed.iter().map(|context| (context.last, context.expires_unix_ms)).collect();
        let is_context = |last: &BlockKey| {
            !self.has_rotted(node, *last)
                && !self.truth.is_object(*last)
                && !self.unreached.contains(&(node, *last))
        };
        for last in self.lasts(node).filter(is_context) {
            let Promise { least_ms, .. } = self.contexts[&(node, last)];
            let until_ms = listed.get(&last).copied().unwrap_or(0);
            if until_ms < least_ms {
                return Err(format!(
                    "node {node} was to keep the context of {last:?} until {least_ms}, and lists it until \
                     {until_ms}, at {unix_ms}"
                ));
            }
        }
        if self.lied_to.contains(&node) {
            return Ok(());
        }
        for (last, until_ms) in listed {
            let most_ms = self.contexts.get(&(node, last)).map_or(0, |promise| promise.most_ms);
            if until_ms > most_ms && !self.has_rotted(node, last) {
                return Err(format!(
                    "node {node} lists the context of {last:?} until {until_ms}, and was told {most_ms} at \
                     most (0: that it is dropped)"
                ));
            }
        }
        Ok(())
    }
}

impl Checker for Durability {
    fn name(&self) -> &'static str {
        "I7 durability"
    }

    fn see(&mut self, now_us: u64, seen: &Seen) -> Result<(), String> {
        match seen {
            Seen::ContextAsked { node, last, expires_unix_ms } => {
                let promise = self.contexts.entry((*node, *last)).or_default();
                let until_ms = expires_unix_ms.unwrap_or(0);
                promise.at_most(until_ms);
                promise.least_ms = promise.least_ms.min(until_ms);
                if let Some(told_ms) = self.told_ms.get_mut(&(*node, *last)) {
                    *told_ms = u64::MAX;
                }
            }
            // Never for less long than before.
            Seen::KeepAsked { node, keys, expires_unix_ms, version } => {
                for last in keys {
                    let promise = self.contexts.entry((*node, *last)).or_default();
                    promise.at_most(*expires_unix_ms);
                    match version {
                        Some(version) => self.keeping.insert((*node, *last), *version),
                        None => self.keeping.remove(&(*node, *last)),
                    };
                }
            }
            Seen::PutBegan { at, share, keys, versions, .. } => {
                self.puts.retain(|(of, _), _| of.node != at.node || of == at);
                let put = keys.iter().copied().zip(versions.iter().copied()).collect();
                self.puts.insert((*at, *share), put);
                for (key, version) in keys.iter().zip(versions) {
                    if self.partial.contains(&at.node) {
                        self.excuse(at.node, *key);
                    }
                    let is_kept =
                        self.contexts.get(&(at.node, *key)).is_some_and(|of| of.least_ms > 0);
                    if is_kept && self.started.get(&at.node) != Some(at) {
                        self.put_before.insert((*at, *key));
                    }
                    let begun = self.begun.entry((at.node, *key)).or_insert(0);
                    *begun = (*begun).max(*version);
                }
            }
            Seen::Kept { node, keys, expires_unix_ms } => {
                if let Some(last) = keys.last() {
                    let told_ms = self.told_ms.entry((*node, *last)).or_insert(0);
                    *told_ms = (*told_ms).max(*expires_unix_ms);
                    let promise = self.contexts.entry((*node, *last)).or_default();
                    promise.least_ms = promise.least_ms.max(*expires_unix_ms);
                    promise.at_most(*expires_unix_ms);
                    if let Some(version) = self.keeping.get(&(*node, *last)).copied() {
                        self.keeps_version((*node, *last), version);
                    }
                }
            }
            Seen::Ended { at, share } => drop(self.puts.remove(&(*at, *share))),
            // By somebody of its own namespace; anybody else's does not count.
            Seen::ObjectRemoved { node, namespace, key }
                if self.truth.blocks.get(key).is_some_and(|of| of.namespace == *namespace) =>
            {
                if let Some(promise) = self.contexts.get_mut(&(*node, *key)) {
                    (promise.least_ms, promise.version) = (0, 0);
                }
                self.keeping.remove(&(*node, *key));
                self.beside.remove(&(*node, *key));
                if let Some(told_ms) = self.told_ms.get_mut(&(*node, *key)) {
                    *told_ms = u64::MAX;
                }
            }
            Seen::ContextChanged { node, last, expires_unix_ms } => {
                let until_ms = expires_unix_ms.unwrap_or(0);
                let promise = self.contexts.entry((*node, *last)).or_default();
                (promise.least_ms, promise.most_ms, promise.version) = (until_ms, until_ms, 0);
                promise.ever_ms = promise.ever_ms.max(until_ms);
                if self.partial.contains(node) {
                    promise.most_ms = promise.ever_ms;
                }
            }
            // Begun again, after a crash too, it looks anew at what it has.
            Seen::DrainBegan { at } => {
                self.is_mixed = true;
                self.draining.insert(at.node, BTreeMap::new());
            }
            Seen::DrainStopped { at } => drop(self.draining.remove(&at.node)),
            Seen::Left { node, unix_ms } => self.leave(*node, *unix_ms)?,
            Seen::DiskLost { node, unix_ms } => self.lose(now_us, *node, *unix_ms)?,
            Seen::CopiesKept { node, last, expires_unix_ms } => {
                let nodes: BTreeSet<usize> = self.told(*last, *expires_unix_ms).collect();
                let before_loss = self.told_before_loss(now_us, *last, *expires_unix_ms);
                let or_were = before_loss.chain(nodes.iter().copied()).collect::<BTreeSet<_>>();
                if or_were.len() < 2 && !self.has_left {
                    return Err(format!(
                        "node {node} says that the context of {last:?} is on two nodes until \
                         {expires_unix_ms}, and only {nodes:?} have said that they keep it"
                    ));
                }
                if nodes.len() >= 2 || self.has_left {
                    self.copied_ms.insert(*last, *expires_unix_ms);
                }
            }
            Seen::DiskRotted { node, keys } => {
                self.rotted.extend(keys.iter().map(|key| (*node, *key)));
            }
            Seen::DiskGone { node, key, disk_lies } => {
                let excused = *disk_lies || self.rotted.contains(&(*node, *key));
                if !excused && self.keeps(*node, *key) {
                    return Err(format!(
                        "node {node} was to keep {key:?} and says that its extent is rotten, which \
                         the disk has not touched"
                    ));
                }
                self.excuse(*node, *key);
            }
            Seen::OnDisk { node, keys } => {
                let rotted = |key: &BlockKey| self.rotted.contains(&(*node, *key));
                if let Some(key) = self.missing(*node, keys).iter().find(|key| !rotted(key)) {
                    return Err(format!(
                        "node {node} was to keep {key:?}, and its bytes are nowhere on the disk"
                    ));
                }
            }
            Seen::Started {
                at,
                on_ssd,
                contexts,
                unix_ms,
                disk_lies,
                is_partial,
                read,
                unreached,
            } => {
                self.unreached.retain(|(of, _)| *of != at.node);
                self.expire(at.node, *unix_ms);
                let there: BTreeSet<BlockKey> = on_ssd.iter().copied().collect();
                self.excuse_rotted(at.node, &there, contexts);
                self.started.insert(at.node, *at);
                let put_before = std::mem::take(&mut self.put_before);
                let (put, others) = put_before.into_iter().partition(|(of, _)| of.node == at.node);
                self.put_before = others;
                match is_partial {
                    true => {
                        self.partial.insert(at.node);
                        self.excuse_unread(at.node, &there, (read, unreached), contexts);
                        // What was found under the name is removed, for nobody can know that it was promised.
                        let put: BTreeSet<(Life, BlockKey)> = put;
                        put.iter()
                            .filter(|(of, _)| of == at)
                            .for_each(|(_, key)| self.excuse(at.node, *key));
                    }
                    false if self.partial.remove(&at.node) => {
                        self.is_whole_again(at.node, contexts);
                    }
                    false => {}
                }
                if *disk_lies {
                    self.lied_to.insert(at.node);
                    for key in self.missing(at.node, &there) {
                        self.excuse(at.node, key);
                    }
                }
                self.look(at.node, &there)?;
                self.look_at_list(at.node, *unix_ms, contexts)?;
                self.tell_listed(at.node, contexts);
            }
            Seen::OnSsd { node, unix_ms, keys, contexts } => {
                self.expire(*node, *unix_ms);
                self.look(*node, &keys.iter().copied().collect())?;
                self.look_at_list(*node, *unix_ms, contexts)?;
                self.tell_listed(*node, contexts);
            }
            Seen::AskedFor { at, key, bytes }
                if self.keeps(at.node, *key) && !self.partial.contains(&at.node) =>
            {
                let is_right = bytes.is_some_and(|bytes| self.may_be_kept(at.node, *key, &bytes));
                if !is_right && !self.has_rotted(at.node, *key) {
                    let what = if bytes.is_some() { "others" } else { "nothing" };
                    return Err(format!("{at:?} was to keep {key:?}, and gives {what} for it"));
                }
            }
            _ => {}
        }
        Ok(())
    }
}
