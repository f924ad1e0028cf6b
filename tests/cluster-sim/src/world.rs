//! A whole cluster under one seed: what happens next, who it happens to, and what goes wrong.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use kvasir_log::sim_disk::Faults;
use kvasir_mutation::{Mutation, mutated};
use kvasir_transfer::sim::{SimConfig, SimFaults, SimNetwork};

use crate::calls::{Call, Caller, Party, Reply};
use crate::checkers::Violation;
use crate::client;
use crate::conductor::Conductor;
use crate::context::{Context, Event};
use crate::engine;
use crate::node::{Node, Running};
use crate::plan::{Fault, Plan};
use crate::seen::{Life, Seen};

/// After the last request and fault: leases run out, writers are cut off, transfers are given up.
const QUIET_US: u64 = 5_000_000;
/// What a block takes to come from the SSD, when nothing goes wrong.
const ASKED_US: u64 = 20_000;
/// Writes of disks that may come one after the other when nothing is asked any more.
const WRITES_MAX: usize = 50;
/// A part of a run that takes more than this goes round in circles.
const STEPS_MAX: u64 = 30_000_000;

/// What a run was like, so that one that does nothing any more is noticed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    pub steps: u64,
    pub seen: u64,
    /// Of everything that the network did, and of what was drawn.
    pub trace: u64,
    pub answered: u64,
    pub committed: u64,
    pub evicted: u64,
    /// Of SSDs, to make room there.
    pub ssd_evicted: u64,
    /// Extents that were written again so that their segment is free.
    pub moved: u64,
    pub risen: u64,
    pub kept: u64,
    pub leases_over: u64,
    pub fetched: u64,
    pub cut_off: u64,
    pub crashes: u64,
    /// How often what has happened that a run is to meet.
    pub covered: BTreeMap<&'static str, u64>,
}

impl Summary {
    pub fn add(&mut self, other: &Summary) {
        self.steps += other.steps;
        self.seen += other.seen;
        self.trace ^= other.trace;
        self.answered += other.answered;
        self.committed += other.committed;
        self.evicted += other.evicted;
        self.ssd_evicted += other.ssd_evicted;
        self.moved += other.moved;
        self.risen += other.risen;
        self.kept += other.kept;
        self.leases_over += other.leases_over;
        self.fetched += other.fetched;
        self.cut_off += other.cut_off;
        self.crashes += other.crashes;
        for (what, times) in &other.covered {
            *self.covered.entry(what).or_insert(0) += times;
        }
    }
}

#[derive(Debug)]
pub struct World {
    pub context: Context,
    network: SimNetwork,
    pub nodes: Vec<Node>,
    pub conductors: Vec<Conductor>,
    steps: u64,
}

impl World {
    pub fn new(plan: Plan) -> Self {
        let plan = Rc::new(plan);
        let mut context = Context::new(Rc::clone(&plan));
        let network = SimNetwork::new(SimConfig {
            seed: plan.seed,
            latency_us: 10,
            jitter_us: 120,
            bytes_per_s: 50_000_000,
            peer_timeout_us: 60_000,
            grace_us: 80_000,
            heartbeat_interval_us: 30_000,
            heartbeat_timeout_us: 90_000,
            faults: SimFaults {
                path_life_us: plan.network.path_life_us,
                deaf_percent: plan.network.deaf_percent,
                deaf_us: 20_000,
                linger_us: plan.network.linger_us,
                notice_percent: 50,
                outage_us: 5_000,
                drain_us: 2_000,
                wrong_one_in: plan.network.wrong_one_in,
            },
            verify: !mutated(Mutation::ArrivalChecksumIgnored),
            ..SimConfig::default()
        });
        let nodes = plan.nodes.iter().enumerate();
        let nodes = nodes.map(|(index, node)| Node::new(index, node.clone(), plan.seed)).collect();
        let conductors = (0..plan.conductors).map(Conductor::new).collect();
        for (index, request) in plan.requests.iter().enumerate() {
            context.at(request.at_us, Event::Request(index));
        }
        for (index, client) in plan.clients.iter().enumerate() {
            context.at(client.at_us, Event::Client(index));
        }
        for (index, fault) in plan.faults.iter().enumerate() {
            context.at(fault.at_us, Event::FaultBegins(index));
        }
        // From now on it remembers what lands.
        let _ = network.take_landings();
        let mut world = World { context, network, nodes, conductors, steps: 0 };
        for node in &mut world.nodes {
            node.start(&mut world.context, &world.network);
        }
        for conductor in &mut world.conductors {
            conductor.start(&mut world.context);
        }
        world
    }

    /// Runs until nothing is left to do, or something happens that must not.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn run(&mut self) -> Result<Summary, Violation> {
        let busy_us = self.context.plan.busy_us + 700_000;
        self.run_until(busy_us)?;
        self.calm_down();
        self.run_until(busy_us + QUIET_US / 2)?;
        // What an engine holds by a handle goes with it; and nobody begins anything any more.
        for node in &mut self.nodes {
            if let Some(running) = &mut node.running {
                running.kill_engines(&mut self.context);
                running.kill_clients(&mut self.context);
            }
        }
        self.run_until(busy_us + QUIET_US)?;
        self.let_disks_rest()?;
        self.show_at_rest()?;
        let mut summary = self.summary();
        self.ask_for_what_was_kept()?;
        summary.covered = self.context.books.covered().clone();
        Ok(summary)
    }

    /// All calendar clocks show the same again. Until then nodes do not agree about what is over, and one goes
    /// on asking for copies of what others take for over.
    pub fn set_clocks(&mut self) {
        for node in &mut self.nodes {
            node.clock_ahead_ms = 0;
        }
    }

    /// Contexts that have fewer copies than were promised, as their nodes know: they go on asking for them.
    pub fn contexts_short(&self) -> usize {
        let nodes = self.nodes.iter().filter_map(|node| node.running.as_ref());
        nodes.map(|running| running.blocks.contexts_short_of_copies()).sum()
    }

    /// What is no longer kept makes room on a disk, whenever that is, and what is written there then is
    /// waited for: it is no longer than any write.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn let_disks_rest(&mut self) -> Result<(), Violation> {
        for _ in 0..WRITES_MAX {
            let mut nodes = self.nodes.iter().filter_map(|node| node.running.as_ref());
            if nodes.all(|running| running.blocks.counts().sinking == 0) {
                break;
            }
            self.run_until(self.context.now_us + 1_000)?;
        }
        Ok(())
    }

    /// Shows what nodes hold when nothing is under way.
    ///
    /// # Errors
    /// [`Violation`].
    pub fn show_at_rest(&mut self) -> Result<(), Violation> {
        for node in &mut self.nodes {
            let unix_ms = node.unix_ms(&self.context);
            if let Some(running) = &mut node.running {
                running.show(&mut self.context);
                running.show_ssd(&mut self.context, unix_ms);
                running.show_at_rest(&mut self.context);
                running.show(&mut self.context);
            }
        }
        self.verdict()
    }

    /// The hosts crash once more, and every block that was kept is asked for.
    fn ask_for_what_was_kept(&mut self) -> Result<(), Violation> {
        for index in 0..self.nodes.len() {
            let node = &mut self.nodes[index];
            if !node.plan.has_ssd {
                continue;
            }
            node.crash(&mut self.context, &self.network);
            node.start(&mut self.context, &self.network);
            self.run_until(self.context.now_us + ASKED_US)?;
            for key in self.context.books.kept(index) {
                if let Some(running) = &mut self.nodes[index].running {
                    running.ask_for(&mut self.context, key);
                }
                self.run_until(self.context.now_us + ASKED_US)?;
                if let Some(running) = &mut self.nodes[index].running {
                    running.show_asked_for(&mut self.context, key);
                }
                self.verdict()?;
            }
        }
        self.verdict()
    }

    /// How much of everything is kept, by name, all nodes and conductors together.
    pub fn kept(&self) -> BTreeMap<&'static str, usize> {
        let mut kept = BTreeMap::from([("events", self.context.waiting())]);
        let nodes = self.nodes.iter().filter_map(|node| node.running.as_ref());
        let parts = nodes.map(Running::kept).chain(self.conductors.iter().map(Conductor::kept));
        for (name, count) in parts.flatten() {
            *kept.entry(name).or_insert(0) += count;
        }
        kept
    }

    fn verdict(&self) -> Result<(), Violation> {
        self.context.books.violation().map_or(Ok(()), |violation| Err(violation.clone()))
    }

    /// From now on nothing goes wrong any more.
    fn calm_down(&mut self) {
        self.context.calm = true;
        self.network.end_faults();
        for index in 0..self.context.plan.faults.len() {
            self.end_fault(index);
        }
        for conductor in &mut self.conductors {
            conductor.start(&mut self.context);
        }
        for node in &mut self.nodes {
            node.start(&mut self.context, &self.network);
            node.paused_until_us = 0;
            if let Some(disk) = node.disk_mut() {
                disk.faults = Faults::default();
                disk.set_latency(Duration::from_micros(100));
            }
        }
    }

    /// # Errors
    /// [`Violation`].
    pub fn run_until(&mut self, until_us: u64) -> Result<(), Violation> {
        let steps_max = self.steps + STEPS_MAX;
        loop {
            let own_us = self.context.next_us().unwrap_or(u64::MAX);
            let network_us = self.network.next_us().unwrap_or(u64::MAX);
            let next_us = own_us.min(network_us);
            if next_us > until_us {
                self.advance(until_us);
                return self.verdict();
            }
            self.advance(next_us);
            self.verdict()?;
            if self.take_ends() {
                self.verdict()?;
            }
            if let Some(event) = self.context.pop_due() {
                self.happen(event);
                self.network.advance(0);
                self.see_landings();
                self.take_ends();
                self.verdict()?;
            }
            self.steps += 1;
            assert!(self.steps < steps_max, "the run goes round in circles");
        }
    }

    fn advance(&mut self, to_us: u64) {
        self.network.advance(to_us.saturating_sub(self.network.now_us()));
        self.context.now_us = self.context.now_us.max(to_us);
        self.see_landings();
    }

    /// Shows what has come to lie in the memory of nodes.
    fn see_landings(&mut self) {
        for landing in self.network.take_landings() {
            let Some(at) = self.context.life_of(landing.incarnation) else { continue };
            let running = self.nodes[at.node].running.as_ref();
            if let Some(running) = running.filter(|running| running.at == at) {
                running.landed(&mut self.context, &landing);
            }
        }
    }

    /// Hands what the transfer engines have told to their nodes.
    fn take_ends(&mut self) -> bool {
        let mut any = false;
        loop {
            let mut more = false;
            for node in &mut self.nodes {
                if node.paused_until_us > self.context.now_us {
                    continue;
                }
                let Some(running) = &mut node.running else { continue };
                if running.has_ends() {
                    running.take_ends(&mut self.context);
                    running.show(&mut self.context);
                    more = true;
                }
            }
            if !more {
                return any;
            }
            any = true;
            self.network.advance(0);
            self.see_landings();
        }
    }

    fn happen(&mut self, event: Event) {
        if self.put_off(&event) {
            return;
        }
        match event {
            Event::Request(index) => {
                let conductor =
                    self.context.plan.requests[index].id as usize % self.conductors.len();
                let conductor = &mut self.conductors[conductor];
                if conductor.up {
                    conductor.request(&mut self.context, index, &self.nodes);
                }
            }
            Event::GiveUp { conductor, incarnation, serial } => {
                if let Some(conductor) = self.conductor(conductor, incarnation) {
                    conductor.0.give_up(conductor.1, serial);
                }
            }
            Event::Renew { conductor, incarnation, serial } => {
                if let Some(conductor) = self.conductor(conductor, incarnation) {
                    conductor.0.renew(conductor.1, serial);
                }
            }
            Event::Unanswered { caller } => match caller.who {
                Party::Conductor(conductor) => {
                    if let Some(conductor) = self.conductor(conductor, caller.incarnation) {
                        conductor.0.unanswered(conductor.1, caller.call);
                    }
                }
                Party::Node(node) => self.reply_to_node(node, caller, None),
            },
            Event::Reply { to, reply } => match to.who {
                Party::Conductor(conductor) => {
                    if let Some(conductor) = self.conductor(conductor, to.incarnation) {
                        conductor.0.take_reply(conductor.1, to.call, reply);
                    }
                }
                Party::Node(node) => self.reply_to_node(node, to, Some(reply)),
            },
            Event::Leaves { at } => self.leave(at),
            Event::Client(index) => {
                let node = self.context.plan.clients[index].node;
                if let Some(running) = &mut self.nodes[node].running {
                    running.open_client(&mut self.context, index);
                }
            }
            Event::Poll { conductor, incarnation } => {
                let conductor = &mut self.conductors[conductor];
                if conductor.up && conductor.incarnation == incarnation {
                    conductor.poll(&mut self.context, &self.nodes);
                }
            }
            Event::FaultBegins(index) => self.begin_fault(index),
            Event::FaultEnds(index) => self.end_fault(index),
            Event::Call { to, from, call } => self.call(to, from, call),
            other => self.at_node(other),
        }
    }

    /// What a node or an engine that stands still does later.
    fn put_off(&mut self, event: &Event) -> bool {
        let (at, of_engine) = match event {
            Event::FromEngine { at, .. }
            | Event::Call { to: at, .. }
            | Event::Tick { at }
            | Event::Job { at }
            | Event::Disk { at }
            | Event::Cut { at, .. }
            | Event::CarryEnds { at, .. }
            | Event::RenewCopy { at, .. }
            | Event::FromClient { at, .. }
            | Event::EngineStarts { at, .. } => (at.node, None),
            Event::Reply { to: Caller { who: Party::Node(node), .. }, .. }
            | Event::Unanswered { caller: Caller { who: Party::Node(node), .. } } => (*node, None),
            Event::ToEngine { at, epoch, .. } | Event::EngineStep { at, epoch } => {
                (at.node, Some(*epoch))
            }
            _ => return false,
        };
        let node = &self.nodes[at];
        let until_us = match of_engine {
            Some(epoch) => {
                let engine = node.running.as_ref().and_then(|running| running.engine(epoch));
                engine.map_or(0, |engine| engine.stalled_until_us)
            }
            None => node.paused_until_us,
        };
        let waits = until_us > self.context.now_us;
        if waits {
            self.context.at(until_us, event.clone());
        }
        waits
    }

    fn conductor(
        &mut self,
        index: usize,
        incarnation: u64,
    ) -> Option<(&mut Conductor, &mut Context)> {
        let conductor = &mut self.conductors[index];
        let same = conductor.up && conductor.incarnation == incarnation;
        same.then_some((conductor, &mut self.context))
    }

    fn reply_to_node(&mut self, node: usize, to: Caller, reply: Option<Reply>) {
        let running = self.nodes[node].running.as_mut();
        if let Some(running) = running.filter(|running| running.incarnation == to.incarnation) {
            running.take_reply(&mut self.context, to.call, reply);
            running.show(&mut self.context);
        }
    }

    /// A node that has drained is taken away; when nobody wants it to be gone any more another host comes
    /// in its place at once.
    fn leave(&mut self, at: Life) {
        let node = &mut self.nodes[at.node];
        if node.running.is_some() && node.at() == at {
            node.leave_for_good(&mut self.context, &self.network);
            if self.context.now_us >= node.drains_until_us {
                node.start(&mut self.context, &self.network);
            }
        }
    }

    fn call(&mut self, to: Life, from: Caller, call: Call) {
        let node = &mut self.nodes[to.node];
        if node.unreachable {
            return;
        }
        let unix_ms = node.unix_ms(&self.context);
        if let Some(running) = node.running.as_mut().filter(|running| running.at == to) {
            running.take_call(&mut self.context, unix_ms, from, call);
            running.show(&mut self.context);
        }
    }

    fn at_node(&mut self, event: Event) {
        let at = match &event {
            Event::ToEngine { at, .. }
            | Event::FromEngine { at, .. }
            | Event::EngineStep { at, .. }
            | Event::EngineStarts { at, .. }
            | Event::Tick { at }
            | Event::Disk { at }
            | Event::Cut { at, .. }
            | Event::CarryEnds { at, .. }
            | Event::RenewCopy { at, .. }
            | Event::ToClient { at, .. }
            | Event::FromClient { at, .. }
            | Event::ClientStep { at, .. }
            | Event::Job { at } => *at,
            _ => return,
        };
        let node = &mut self.nodes[at.node];
        let unix_ms = node.unix_ms(&self.context);
        let context = &mut self.context;
        if matches!(event, Event::Tick { .. }) && node.at() == at {
            node.look_after_drain(context);
        }
        let Some(running) = node.running.as_mut().filter(|running| running.at == at) else {
            return;
        };
        match event {
            Event::ToEngine { epoch, message, .. } if running.engine(epoch).is_some() => {
                engine::hear(running, context, epoch, message);
            }
            Event::EngineStep { epoch, .. } if running.engine(epoch).is_some() => {
                engine::step(running, context, epoch);
            }
            Event::FromEngine { epoch, message, .. } => {
                running.take_engine(context, epoch, message);
            }
            Event::EngineStarts { index, .. } => running.engine_starts(context, index),
            Event::ToClient { epoch, message, .. } => {
                client::hear(running, context, epoch, message);
            }
            Event::FromClient { epoch, request, message, .. } => {
                running.take_client(context, unix_ms, (epoch, request), message);
            }
            Event::ClientStep { epoch, .. } => client::step(running, context, epoch),
            Event::Tick { .. } => {
                running.tick(context, unix_ms);
                running.show_ssd(context, unix_ms);
                context.after(context.plan.tick_us, Event::Tick { at });
            }
            Event::Disk { .. } => running.disk_moves(context),
            Event::CarryEnds { copy, .. } => running.carry_ends(context, copy),
            Event::Job { .. } => running.take_jobs(context),
            Event::RenewCopy { copy, tx, .. } => running.renew_copy(context, copy, tx),
            Event::Cut { writer, round, part, .. } => {
                running.cut_part(context, (writer, round, part));
            }
            _ => return,
        }
        running.show(context);
    }

    // ---- faults ----

    fn begin_fault(&mut self, index: usize) {
        let fault = self.context.plan.faults[index].clone();
        let (now_us, until_us) = (self.context.now_us, self.context.now_us + fault.for_us);
        self.context.after(fault.for_us, Event::FaultEnds(index));
        self.context.covers(fault.what.name());
        match fault.what {
            Fault::NodeCrash(node) => self.nodes[node].crash(&mut self.context, &self.network),
            Fault::NodeKilled(node) => self.nodes[node].kill(&mut self.context, &self.network),
            Fault::CutOffFails(node) => self.nodes[node].set_cuts_fail(true),
            Fault::NodePause(node) => {
                // Short of what its peers put up with, most of the time.
                let until_us = now_us + fault.for_us / 4;
                self.nodes[node].paused_until_us = until_us;
                self.context.see(Seen::StandsStill { node, until_us });
            }
            Fault::ConductorCrash(conductor) => self.conductors[conductor].crash(),
            Fault::EngineCrash(node) => {
                if let Some(running) = &mut self.nodes[node].running
                    && let Some(epoch) = running.one_of_engines(fault.id)
                {
                    if running.engines.len() > 1 {
                        self.context.covers("an engine dies beside another one");
                    }
                    running.kill_engine(&mut self.context, epoch);
                }
            }
            Fault::EngineStall(node) => {
                if let Some(running) = &mut self.nodes[node].running
                    && let Some(epoch) = running.one_of_engines(fault.id)
                    && let Some(engine) = running.engine_mut(epoch)
                {
                    engine.stalled_until_us = until_us;
                }
                self.context.see(Seen::StandsStill { node, until_us });
            }
            Fault::Partition(one, other) => self.part(one, other, true),
            Fault::Unreachable(node) => self.nodes[node].unreachable = true,
            // By up to ten minutes: more than anything is kept for.
            Fault::ClockForward(node) => self.nodes[node].clock_ahead_ms += fault.for_us as i64,
            Fault::ClockBack(node) => self.nodes[node].clock_ahead_ms -= fault.for_us as i64,
            Fault::MemoryRots(node) => {
                let random = self.context.chance("flip", node as u64, fault.id);
                if let Some(running) = &mut self.nodes[node].running {
                    running.flip(random);
                }
            }
            Fault::DiskFull(node) => self.disk_fault(node, |faults| faults.is_full = true),
            Fault::DiskHangs(node) => self.disk_fault(node, |faults| faults.hangs = true),
            Fault::DiskReadsFail(node) => self.disk_fault(node, |faults| faults.reads_fail = true),
            Fault::DiskPartFails(node) => {
                let mut random = self.context.chance("part", node as u64, fault.id);
                let part = crate::node::disk::a_part(&mut random);
                self.disk_fault(node, |faults| faults.unreadable = part);
            }
            Fault::DiskWritesFail(node) => {
                self.disk_fault(node, |faults| faults.writes_fail = true);
            }
            Fault::DiskSyncsFail(node) => self.disk_fault(node, |faults| faults.syncs_fail = true),
            Fault::DiskLies(node) => {
                // What was read until then is believed a little later.
                self.nodes[node].disk_lies_until(until_us + 400_000);
                self.disk_fault(node, |faults| faults.wrong_one_in = 4);
            }
            Fault::DiskSlow(node) => {
                if let Some(disk) = self.nodes[node].disk_mut() {
                    disk.set_latency(Duration::from_millis(20));
                }
            }
            Fault::DiskRots(node) => self.nodes[node].rot(&mut self.context, fault.id),
            Fault::DiskLost(node) => {
                self.nodes[node].lose_disk(&mut self.context, &self.network);
            }
            Fault::Drain(node) => self.nodes[node].drains_until_us = until_us,
        }
    }

    fn disk_fault(&mut self, node: usize, change: impl FnOnce(&mut Faults)) {
        if let Some(disk) = self.nodes[node].disk_mut() {
            change(&mut disk.faults);
        }
    }

    fn part(&mut self, one: usize, other: usize, parted: bool) {
        let engine = |node: &Node| node.running.as_ref().map(|running| running.transfer.clone());
        let (one, other) = (engine(&self.nodes[one]), engine(&self.nodes[other]));
        if let (Some(one), Some(other)) = (one, other) {
            self.network.part(&one, &other, parted);
        }
    }

    fn end_fault(&mut self, index: usize) {
        let fault = self.context.plan.faults[index].clone();
        if self.context.now_us < fault.at_us {
            return;
        }
        match fault.what {
            Fault::NodeCrash(node) | Fault::NodeKilled(node) | Fault::DiskLost(node) => {
                self.nodes[node].start(&mut self.context, &self.network);
            }
            Fault::CutOffFails(node) => self.nodes[node].set_cuts_fail(false),
            Fault::ConductorCrash(conductor) => self.conductors[conductor].start(&mut self.context),
            Fault::Partition(one, other) => self.part(one, other, false),
            Fault::Unreachable(node) => self.nodes[node].unreachable = false,
            Fault::MemoryRots(node) => {
                if let Some(running) = &mut self.nodes[node].running {
                    running.flip_back();
                }
            }
            Fault::DiskSlow(node) => {
                if let Some(disk) = self.nodes[node].disk_mut() {
                    disk.set_latency(Duration::from_micros(100));
                }
            }
            Fault::DiskFull(node) => self.disk_fault(node, |faults| faults.is_full = false),
            Fault::DiskHangs(node) => {
                self.disk_fault(node, |faults| faults.hangs = false);
                self.wake_disk(node);
            }
            Fault::DiskReadsFail(node) => self.disk_fault(node, |faults| faults.reads_fail = false),
            Fault::DiskPartFails(node) => {
                self.disk_fault(node, |faults| faults.unreadable = (0, 0));
            }
            Fault::DiskWritesFail(node) => {
                self.disk_fault(node, |faults| faults.writes_fail = false);
            }
            Fault::DiskSyncsFail(node) => self.disk_fault(node, |faults| faults.syncs_fail = false),
            Fault::DiskLies(node) => self.disk_fault(node, |faults| faults.wrong_one_in = 0),
            Fault::Drain(node) => {
                self.nodes[node].cancel_drain(&mut self.context, &self.network);
            }
            Fault::NodePause(_)
            | Fault::EngineCrash(_)
            | Fault::EngineStall(_)
            | Fault::ClockForward(_)
            | Fault::ClockBack(_)
            | Fault::DiskRots(_) => {}
        }
    }

    fn wake_disk(&mut self, node: usize) {
        let at = Life { node, life: self.nodes[node].life };
        self.context.after(1, Event::Disk { at });
    }

    pub fn summary(&self) -> Summary {
        let mut summary = Summary {
            steps: self.steps,
            seen: self.context.books.seen_total,
            trace: self.network.trace() ^ self.context.books.seen_total,
            covered: self.context.books.covered().clone(),
            ..Summary::default()
        };
        for running in self.nodes.iter().filter_map(|node| node.running.as_ref()) {
            let counts = running.blocks.counts();
            summary.committed += counts.committed_total;
            summary.evicted += counts.evicted_total;
            summary.ssd_evicted += counts.ssd_evicted_total;
            summary.moved += running.ssd.as_ref().map_or(0, |ssd| ssd.moved());
            summary.risen += counts.risen_total;
            summary.leases_over += counts.leases_over_total;
        }
        let tally = self.context.books.tally();
        summary.answered = tally.answered;
        summary.kept = tally.kept;
        summary.cut_off = tally.cut_off;
        summary.crashes = tally.crashes;
        summary.fetched = tally.fetched;
        summary
    }
}

/// Callbacks hold the network, which holds them.
impl Drop for World {
    fn drop(&mut self) {
        self.network.stop();
    }
}
