//! What a run will try: nodes, requests and faults, all drawn from the seed before it begins, so that a
//! failing run can be made smaller by leaving parts out.

use kvasir_proto::{Namespace, keys};

use crate::calls::Kept;
use crate::content::BLOCK_TOKENS;
use crate::random::Random;

/// Tenants, each with a namespace of its own.
pub const TENANTS: u64 = 2;
/// Objects that clients of a tenant put and get.
pub const OBJECTS: u64 = 10;
/// In a run, and in each hour of a long one.
const CLIENTS_MAX: usize = 14;
const CLIENTS_AN_HOUR: u64 = 200;
/// Runs in which two clients have to do with one object besides.
const RIVALS_PERCENT: u64 = 30;
/// Runs in which a host comes back, cannot read its disk, and shall drain, besides.
const BLIND_DRAINS_PERCENT: u64 = 15;
/// Runs in which objects are put anew while a disk cannot be read, besides.
const BLIND_PUTS_PERCENT: u64 = 20;
/// Runs in which a node starts, once or twice, while a part of its disk cannot be read, besides.
const PARTIAL_STARTS_PERCENT: u64 = 20;
const PARTIAL_STARTS: u64 = 0x9a27_1a10;
/// Conversations of each tenant: prompts of one begin alike.
const CONVERSATIONS: u64 = 3;
const PROMPT_BLOCKS_MAX: u64 = 7;
/// Nodes that have two engines.
const SECOND_PERCENT: u64 = 35;
const SECOND_ENGINES: u64 = 0x5ec0_4d00;
/// Of the answers so many are long: their shares are renewed again and again, while others come and go.
const LONG_PERCENT: u64 = 10;

pub const HOUR_US: u64 = 3_600_000_000;
/// Of each hour of a soak.
const ASKED_US: u64 = HOUR_US - 60_000_000;
const FAULTS_AN_HOUR: u64 = 60;

#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub nodes: Vec<NodePlan>,
    pub conductors: usize,
    pub requests: Vec<RequestPlan>,
    pub faults: Vec<FaultPlan>,
    pub clients: Vec<ClientPlan>,
    /// Of a hundred calls between conductors, nodes and engines so many are lost, and so many come twice.
    pub lost_percent: u64,
    pub twice_percent: u64,
    pub network: NetworkPlan,
    /// Requests and faults come in the first so much of a run.
    pub busy_us: u64,
    /// How often a node looks around, and a conductor asks for what is new.
    pub tick_us: u64,
    /// How long a node remembers what has ended.
    pub finished_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RolePlan {
    Prefill,
    Decode,
    Both,
}

#[derive(Debug, Clone)]
pub struct NodePlan {
    pub slots: u32,
    /// What each of its engines does; there is one at least.
    pub engines: Vec<RolePlan>,
    pub has_ssd: bool,
}

/// How paths between nodes fail by themselves.
#[derive(Debug, Clone, Copy, Default)]
pub struct NetworkPlan {
    pub path_life_us: u64,
    pub deaf_percent: u64,
    pub wrong_one_in: u64,
    /// What a failed path still carries comes so much later.
    pub linger_us: u64,
}

#[derive(Debug, Clone)]
pub struct RequestPlan {
    /// Stays the same when others are left out.
    pub id: u64,
    pub at_us: u64,
    pub tenant: u64,
    pub prompt: Vec<u32>,
    pub generated_tokens: u32,
    pub ephemeral: bool,
    /// The client goes away after so long.
    pub abort_after_us: Option<u64>,
    pub deadline_us: u64,
    /// Keep the prompt's blocks for so long.
    pub keep_ms: Option<u64>,
    /// It names another tenant's namespace than its keys were made with.
    pub mislabelled: bool,
    /// It leaves out the first of its keys: what follows is nothing's beginning.
    pub headless: bool,
    /// Each token of its answer takes so long: a long answer.
    pub token_us: u64,
}

impl RequestPlan {
    pub fn namespace(&self) -> Namespace {
        namespace(self.tenant)
    }

    /// The namespace that it names.
    pub fn label(&self) -> Namespace {
        namespace(if self.mislabelled { (self.tenant + 1) % TENANTS } else { self.tenant })
    }
}

/// A client of objects: a process on a node's host.
#[derive(Debug, Clone)]
pub struct ClientPlan {
    /// Stays the same when others are left out.
    pub id: u64,
    pub at_us: u64,
    pub node: usize,
    pub tenant: u64,
    /// It asks for what another tenant has put.
    pub curious: bool,
    pub ops: Vec<ObjectOp>,
    /// Each of its steps takes so long.
    pub pace_us: u64,
    pub lease_ms: u64,
    /// It ends in the middle of this one, after so many steps.
    pub dies_at_op: Option<usize>,
    pub dies_at_step: u32,
    /// Of what it has reserved the last object is not written.
    pub leaves_last: bool,
}

/// What a client does with some objects.
#[derive(Debug, Clone)]
pub enum ObjectOp {
    Put { objects: Vec<u64>, kept: Kept },
    Get { objects: Vec<u64> },
    Find { objects: Vec<u64> },
    Remove { objects: Vec<u64> },
}

impl ObjectOp {
    pub fn objects(&self) -> &[u64] {
        match self {
            ObjectOp::Put { objects, .. }
            | ObjectOp::Get { objects }
            | ObjectOp::Find { objects }
            | ObjectOp::Remove { objects } => objects,
        }
    }

    pub fn kept(&self) -> Option<Kept> {
        match self {
            ObjectOp::Put { kept, .. } => Some(*kept),
            _ => None,
        }
    }
}

impl ClientPlan {
    pub fn namespace(&self) -> Namespace {
        namespace(self.tenant)
    }

    pub fn tenant_of_keys(&self) -> u64 {
        if self.curious { (self.tenant + 1) % TENANTS } else { self.tenant }
    }
}

/// One has put an object for as long as it lives; meanwhile the other one removes it and puts it anew, or has it
/// kept.
fn rivals(random: &mut Random, id: u64, nodes: usize, busy_us: u64) -> [ClientPlan; 2] {
    let objects = vec![random.draw() % OBJECTS];
    let put = |kept| ObjectOp::Put { objects: objects.clone(), kept };
    let find = || ObjectOp::Find { objects: objects.clone() };
    let mut first = ClientPlan {
        curious: false,
        pace_us: random.between(50, 2_000),
        lease_ms: 1_500,
        dies_at_op: None,
        leaves_last: false,
        ops: vec![put(Kept::Ephemeral)],
        ..client(random, id, nodes, busy_us)
    };
    first.ops.extend((0..random.between(2, 12)).map(|_| find()));
    let mut second = ClientPlan {
        id: id + 1,
        at_us: first.at_us + random.between(4, 12) * first.pace_us,
        ops: match random.below(10) {
            0..=3 => vec![ObjectOp::Remove { objects: objects.clone() }, put(Kept::Normal)],
            4..=5 => {
                let kept = Kept::For { ttl_ms: random.between(200, 100_000) };
                vec![ObjectOp::Remove { objects: objects.clone() }, put(kept)]
            }
            _ => vec![put(Kept::For { ttl_ms: random.between(200, 100_000) })],
        },
        ..first.clone()
    };
    second.ops.extend((0..random.between(0, 4)).map(|_| find()));
    [first, second]
}

fn client(random: &mut Random, id: u64, nodes: usize, busy_us: u64) -> ClientPlan {
    let curious = random.percent(15);
    let op = |random: &mut Random| {
        let first = random.draw() % OBJECTS;
        let count = random.between(1, 4);
        let objects: Vec<u64> = (first..first + count).map(|object| object % OBJECTS).collect();
        let what = random.below(20);
        let kept = match random.below(10) {
            0..=3 => Kept::Normal,
            4..=6 => Kept::Ephemeral,
            _ => Kept::For { ttl_ms: random.between(200, 100_000) },
        };
        match what {
            0..=8 if !curious => ObjectOp::Put { objects, kept },
            0..=15 => ObjectOp::Get { objects },
            16..=18 => ObjectOp::Find { objects },
            _ => ObjectOp::Remove { objects: objects[..1].to_vec() },
        }
    };
    let slow = random.percent(12);
    let ops: Vec<ObjectOp> = (0..random.between(2, 8)).map(|_| op(random)).collect();
    ClientPlan {
        id,
        at_us: random.between(0, busy_us),
        node: random.below(nodes),
        tenant: random.draw() % TENANTS,
        curious,
        pace_us: if slow { random.between(30_000, 400_000) } else { random.between(20, 4_000) },
        lease_ms: if random.percent(if slow { 60 } else { 15 }) {
            random.between(3, 60)
        } else {
            1_500
        },
        dies_at_op: random.percent(40).then(|| random.below(ops.len())),
        dies_at_step: random.below(4) as u32,
        leaves_last: random.percent(15),
        ops,
    }
}

pub fn namespace(tenant: u64) -> Namespace {
    keys::namespace(b"simulated", "u8", &format!("tenant {tenant}"), "")
}

#[derive(Debug, Clone)]
pub struct FaultPlan {
    /// Stays the same when others are left out.
    pub id: u64,
    pub at_us: u64,
    pub for_us: u64,
    pub what: Fault,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The host goes down, which its peers find out by hearing nothing, and comes back with what was on
    /// its disk.
    NodeCrash(usize),
    /// The process alone is killed: its connections are closed, and what it had written lies on the disk.
    NodeKilled(usize),
    /// The node does nothing for a while; what others write into its memory lands all the same.
    NodePause(usize),
    ConductorCrash(usize),
    EngineCrash(usize),
    /// The engine does nothing for a while.
    EngineStall(usize),
    /// Nothing gets from one to the other over the transfer engine.
    Partition(usize, usize),
    /// No call of a conductor gets to a node.
    Unreachable(usize),
    DiskFull(usize),
    DiskHangs(usize),
    DiskSlow(usize),
    DiskReadsFail(usize),
    /// Those of one page or one segment.
    DiskPartFails(usize),
    DiskWritesFail(usize),
    DiskSyncsFail(usize),
    /// One read in four gives a wrong byte.
    DiskLies(usize),
    /// Bits of what lies on the disk flip. What was kept may be lost by that.
    DiskRots(usize),
    /// The calendar clock jumps forward.
    ClockForward(usize),
    /// It jumps back, to where it has been before.
    ClockBack(usize),
    /// Cutting a writer off takes long there, and fails.
    CutOffFails(usize),
    /// A bit flips in a committed block of a node's memory.
    MemoryRots(usize),
    /// The host goes down, and what was on its disk is lost for good: it comes back with an empty one. Once in a
    /// run, because two copies outlive one loss.
    DiskLost(usize),
    /// The node is to drain. When it says that it has, it is taken away with its disk, and at the end another
    /// host with an empty one takes its place; otherwise it stays.
    Drain(usize),
}

impl Fault {
    /// As it is counted, see [`crate::checkers::Books::covers`].
    pub fn name(self) -> &'static str {
        match self {
            Fault::NodeCrash(_) => "a host crashes",
            Fault::NodeKilled(_) => "a node is killed",
            Fault::NodePause(_) => "a node stands still",
            Fault::ConductorCrash(_) => "a conductor crashes",
            Fault::EngineCrash(_) => "an engine crashes",
            Fault::EngineStall(_) => "an engine stands still",
            Fault::Partition(..) => "two nodes are parted",
            Fault::Unreachable(_) => "a node is not reachable",
            Fault::DiskFull(_) => "a disk is full",
            Fault::DiskHangs(_) => "a disk hangs",
            Fault::DiskSlow(_) => "a disk is slow",
            Fault::DiskReadsFail(_) => "reads of a disk fail",
            Fault::DiskPartFails(_) => "a part of a disk cannot be read",
            Fault::DiskWritesFail(_) => "writes of a disk fail",
            Fault::DiskSyncsFail(_) => "syncs of a disk fail",
            Fault::DiskLies(_) => "a disk lies",
            Fault::DiskRots(_) => "a disk rots",
            Fault::ClockForward(_) => "a clock jumps forward",
            Fault::ClockBack(_) => "a clock jumps back",
            Fault::CutOffFails(_) => "cutting off fails",
            Fault::MemoryRots(_) => "memory rots",
            Fault::DiskLost(_) => "a disk is lost",
            Fault::Drain(_) => "a node is drained",
        }
    }
}

impl Plan {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let nodes = 2 + random.below(3);
        let roles = |node: usize, random: &mut Random| match (node, random.below(3)) {
            (0, _) => RolePlan::Prefill,
            (1, _) => RolePlan::Decode,
            (_, 0) => RolePlan::Prefill,
            (_, 1) => RolePlan::Decode,
            _ => RolePlan::Both,
        };
        let node = |node| NodePlan {
            slots: random.between(18, 48) as u32,
            engines: vec![roles(node, &mut random)],
            has_ssd: random.percent(75),
        };
        let mut nodes: Vec<NodePlan> = (0..nodes).map(node).collect();
        second_engines(seed, &mut nodes);
        let conductors = 1 + random.below(2);
        let busy_us = 1_500_000;
        let requests = 25 + random.below(40);
        let requests = (0..requests as u64).map(|id| request(seed, id, busy_us, &mut random));
        let mut requests: Vec<RequestPlan> = requests.collect();
        requests.sort_by_key(|request| request.at_us);
        let mut faults = faults(&mut random, nodes.len(), conductors, busy_us);
        faults.extend(disk_loss(seed, nodes.len(), busy_us));
        faults.sort_by_key(|fault| fault.at_us);
        let calm = random.percent(20);
        let network = NetworkPlan {
            path_life_us: if random.percent(50) { random.between(5_000, 200_000) } else { 0 },
            deaf_percent: random.between(0, 80),
            wrong_one_in: if random.percent(30) { random.between(20, 200) } else { 0 },
            linger_us: if random.percent(50) { random.between(1_000, 400_000) } else { 0 },
        };
        Plan {
            seed,
            nodes,
            conductors,
            requests,
            faults: if calm { Vec::new() } else { faults },
            lost_percent: if random.percent(50) { random.between(0, 8) } else { 0 },
            twice_percent: random.between(0, 8),
            network,
            busy_us,
            tick_us: 5_000,
            finished_ms: 6_000,
            clients: Vec::new(),
        }
        .with_clients(&mut random)
        .with_blind_drain(&mut random)
        .with_blind_puts(&mut random)
        .with_partial_start()
    }

    /// Drawn apart, so that all else of a seed stays as it is.
    fn with_partial_start(mut self) -> Self {
        let mut random = Random::new(self.seed ^ PARTIAL_STARTS);
        let has_ssd = |node: &usize| self.nodes[*node].has_ssd;
        let with_ssd: Vec<usize> = (0..self.nodes.len()).filter(has_ssd).collect();
        if with_ssd.is_empty() || !random.percent(PARTIAL_STARTS_PERCENT) {
            return self;
        }
        let node = with_ssd[random.below(with_ssd.len())];
        let crash_us = random.between(self.busy_us / 2, self.busy_us * 3 / 4);
        let (down_us, bad_us) = (random.between(1_000, 5_000), random.between(50_000, 800_000));
        let again_us = crash_us + random.between(50_000, 1_200_000);
        let faults = [
            (crash_us, down_us, Fault::NodeKilled(node)),
            (crash_us, bad_us, Fault::DiskPartFails(node)),
            (again_us, down_us, Fault::NodeCrash(node)),
        ];
        let ids = self.faults.iter().map(|fault| fault.id + 1).max().unwrap_or(0)..;
        let faults = faults.into_iter().zip(ids);
        self.faults.extend(faults.map(|((at_us, for_us, what), id)| FaultPlan {
            id,
            at_us,
            for_us,
            what,
        }));
        self.faults.sort_by_key(|fault| fault.at_us);
        // What was put before is removed then, though nobody may know it, and put anew or not.
        let (first, tenant) = (random.draw() % OBJECTS, random.draw() % TENANTS);
        let objects: Vec<u64> = (first..first + 4).map(|object| object % OBJECTS).collect();
        let put = || ObjectOp::Put { objects: objects.clone(), kept: Kept::Normal };
        let mut removes: Vec<ObjectOp> =
            objects.iter().map(|object| ObjectOp::Remove { objects: vec![*object] }).collect();
        if random.percent(30) {
            removes.push(put());
        }
        let before_us = random.between(0, self.busy_us / 4);
        let after_us = crash_us + down_us + random.between(5_000, 30_000);
        for (at_us, ops) in [(before_us, vec![put()]), (after_us, removes)] {
            let id = self.clients.len() as u64;
            let client = client(&mut random, id, self.nodes.len(), self.busy_us);
            let (pace_us, lease_ms) = (500, 1_500);
            self.clients.push(ClientPlan {
                at_us,
                node,
                tenant,
                curious: false,
                pace_us,
                lease_ms,
                dies_at_op: None,
                leaves_last: false,
                ops,
                ..client
            });
        }
        self
    }

    /// Objects are put, sink, and are put again by who does not find them, since the disk cannot be read.
    fn with_blind_puts(mut self, random: &mut Random) -> Self {
        let has_ssd = |node: &usize| self.nodes[*node].has_ssd;
        let with_ssd: Vec<usize> = (0..self.nodes.len()).filter(has_ssd).collect();
        if with_ssd.is_empty() || !random.percent(BLIND_PUTS_PERCENT) {
            return self;
        }
        let node = with_ssd[random.below(with_ssd.len())];
        let crash_us = random.between(self.busy_us / 3, self.busy_us * 2 / 3);
        let (down_us, blind_us) = (random.between(1_000, 5_000), random.between(20_000, 60_000));
        let ids = self.faults.iter().map(|fault| fault.id + 1).max().unwrap_or(0)..;
        let faults = [
            (crash_us, down_us, Fault::NodeKilled(node)),
            (crash_us, blind_us, Fault::DiskReadsFail(node)),
        ];
        self.faults.extend(
            faults.into_iter().zip(ids).map(|((at_us, for_us, what), id)| FaultPlan {
                id,
                at_us,
                for_us,
                what,
            }),
        );
        self.faults.sort_by_key(|fault| fault.at_us);
        let (first, tenant) = (random.draw() % OBJECTS, random.draw() % TENANTS);
        let objects: Vec<u64> = (first..first + 4).map(|object| object % OBJECTS).collect();
        let put = || ObjectOp::Put { objects: objects.clone(), kept: Kept::Normal };
        let of = |random: &mut Random, id, at_us, pace_us, ops| ClientPlan {
            id,
            at_us,
            node,
            tenant,
            curious: false,
            pace_us,
            lease_ms: 1_500,
            dies_at_op: None,
            leaves_last: false,
            ops,
            ..client(random, id, self.nodes.len(), self.busy_us)
        };
        let id = self.clients.len() as u64;
        let before_us = crash_us - random.between(100_000, crash_us);
        let before = of(random, id, before_us, 500, vec![put()]);
        let after_us = crash_us + down_us + random.between(5_000, 15_000);
        let after = of(random, id + 1, after_us, 500, vec![put()]);
        // What was put has made room for others by then, or not.
        let gets = (0..4).map(|_| ObjectOp::Get { objects: objects.clone() }).collect();
        let later_us = after_us + random.between(100_000, 600_000);
        let later = of(random, id + 2, later_us, 20_000, gets);
        self.clients.extend([before, after, later]);
        self
    }

    /// What is kept on a disk that its node cannot read has no names there.
    fn with_blind_drain(mut self, random: &mut Random) -> Self {
        let has_ssd = |node: &usize| self.nodes[*node].has_ssd;
        let with_ssd: Vec<usize> = (0..self.nodes.len()).filter(has_ssd).collect();
        if with_ssd.is_empty() || !random.percent(BLIND_DRAINS_PERCENT) {
            return self;
        }
        let node = with_ssd[random.below(with_ssd.len())];
        let crash_us = random.between(self.busy_us / 3, self.busy_us);
        let (down_us, blind_us) = (random.between(1_000, 20_000), random.between(300_000, 700_000));
        let drain_us = crash_us + down_us + random.between(1_000, 50_000);
        let faults = [
            (crash_us, down_us, Fault::NodeCrash(node)),
            (crash_us, blind_us, Fault::DiskReadsFail(node)),
            (drain_us, blind_us, Fault::Drain(node)),
        ];
        let ids = self.faults.iter().map(|fault| fault.id + 1).max().unwrap_or(0)..;
        let faults = faults.into_iter().zip(ids);
        self.faults.extend(faults.map(|((at_us, for_us, what), id)| FaultPlan {
            id,
            at_us,
            for_us,
            what,
        }));
        self.faults.sort_by_key(|fault| fault.at_us);
        self
    }

    fn with_clients(mut self, random: &mut Random) -> Self {
        let (nodes, busy_us) = (self.nodes.len(), self.busy_us);
        let clients = 0..random.below(CLIENTS_MAX) as u64;
        self.clients = clients.map(|id| client(random, id, nodes, busy_us)).collect();
        if random.percent(RIVALS_PERCENT) {
            let id = self.clients.len() as u64;
            self.clients.extend(rivals(random, id, nodes, busy_us));
        }
        self
    }
}

impl Plan {
    /// Hours of requests and faults, as they would come to a small cluster. Each hour ends with a minute
    /// in which nothing is asked and nothing goes wrong.
    pub fn soak(seed: u64, hours: u64, requests_an_hour: u64) -> Self {
        let mut random = Random::new(seed);
        let mut plan = Plan::new(seed);
        let node = |role, has_ssd| NodePlan { slots: 40, engines: vec![role], has_ssd };
        plan.nodes = vec![
            node(RolePlan::Prefill, true),
            node(RolePlan::Decode, true),
            node(RolePlan::Both, false),
        ];
        // One of them has two.
        plan.nodes[2].engines.push(RolePlan::Prefill);
        plan.conductors = 2;
        (plan.lost_percent, plan.twice_percent) = (1, 2);
        plan.network = NetworkPlan {
            path_life_us: 30_000_000,
            deaf_percent: 30,
            wrong_one_in: 50_000,
            linger_us: 50_000,
        };
        (plan.tick_us, plan.busy_us) = (100_000, hours * HOUR_US);
        (plan.requests, plan.faults, plan.clients) = (Vec::new(), Vec::new(), Vec::new());
        for hour in 0..hours {
            for _ in 0..requests_an_hour {
                let id = plan.requests.len() as u64;
                let mut request = request(seed, id, ASKED_US, &mut random);
                request.at_us += hour * HOUR_US;
                plan.requests.push(request);
            }
            for _ in 0..CLIENTS_AN_HOUR {
                let id = plan.clients.len() as u64;
                let mut client = client(&mut random, id, plan.nodes.len(), ASKED_US);
                client.at_us += hour * HOUR_US;
                plan.clients.push(client);
            }
            for _ in 0..FAULTS_AN_HOUR {
                let id = plan.faults.len() as u64;
                let cluster = (plan.nodes.len(), plan.conductors);
                let mut fault = fault(&mut random, id, cluster, ASKED_US);
                fault.at_us += hour * HOUR_US;
                plan.faults.push(fault);
            }
        }
        plan.requests.sort_by_key(|request| request.at_us);
        plan.faults.sort_by_key(|fault| fault.at_us);
        plan
    }

    /// Leaves a node out, if the others can do without it.
    pub fn drop_node(&mut self, node: usize) {
        let concerns = |what: &Fault| match *what {
            Fault::ConductorCrash(_) => false,
            Fault::Partition(one, other) => one >= node || other >= node,
            Fault::NodeCrash(of)
            | Fault::NodeKilled(of)
            | Fault::CutOffFails(of)
            | Fault::NodePause(of)
            | Fault::EngineCrash(of)
            | Fault::EngineStall(of)
            | Fault::Unreachable(of)
            | Fault::DiskFull(of)
            | Fault::DiskHangs(of)
            | Fault::DiskSlow(of)
            | Fault::DiskReadsFail(of)
            | Fault::DiskPartFails(of)
            | Fault::DiskWritesFail(of)
            | Fault::DiskSyncsFail(of)
            | Fault::DiskLies(of)
            | Fault::DiskRots(of)
            | Fault::ClockForward(of)
            | Fault::ClockBack(of)
            | Fault::MemoryRots(of)
            | Fault::DiskLost(of)
            | Fault::Drain(of) => of >= node,
        };
        self.nodes.truncate(node);
        self.faults.retain(|fault| !concerns(&fault.what));
        self.clients.retain(|client| client.node < node);
    }
}

/// Some nodes have two engines, of one role or of two. Drawn apart, so that all else of a seed stays as it is.
fn second_engines(seed: u64, nodes: &mut [NodePlan]) {
    let mut random = Random::new(seed ^ SECOND_ENGINES);
    for node in nodes {
        let role = match random.below(3) {
            0 => RolePlan::Prefill,
            1 => RolePlan::Decode,
            _ => node.engines[0],
        };
        if random.percent(SECOND_PERCENT) {
            node.engines.push(role);
        }
    }
}

/// A request of some conversation, with a few tokens of its own at the end.
pub fn request(seed: u64, id: u64, busy_us: u64, random: &mut Random) -> RequestPlan {
    let tenant = random.draw() % TENANTS;
    let conversation = random.draw() % CONVERSATIONS;
    let shared = random.between(0, PROMPT_BLOCKS_MAX) * u64::from(BLOCK_TOKENS);
    let own = random.between(u64::from(shared == 0), 2 * u64::from(BLOCK_TOKENS));
    let mut words = Random::new(seed ^ (tenant << 32) ^ (conversation << 40));
    let mut prompt: Vec<u32> = (0..shared).map(|_| words.draw() as u32).collect();
    prompt.extend((0..own).map(|_| random.draw() as u32));
    let is_long = random.percent(LONG_PERCENT);
    RequestPlan {
        id,
        at_us: random.between(0, busy_us),
        tenant,
        prompt,
        generated_tokens: random.between(1, 9) as u32 + if is_long { 6 } else { 0 },
        token_us: if is_long { random.between(20_000, 150_000) } else { 0 },
        ephemeral: random.percent(15),
        abort_after_us: random.percent(20).then(|| random.between(100, 60_000)),
        deadline_us: random.between(200_000, 900_000) + if is_long { 1_600_000 } else { 0 },
        keep_ms: random.percent(30).then(|| random.between(200, 100_000)),
        mislabelled: random.percent(6),
        headless: random.percent(6),
    }
}

fn faults(random: &mut Random, nodes: usize, conductors: usize, busy_us: u64) -> Vec<FaultPlan> {
    let count = random.below(14) as u64;
    let faults = (0..count).map(|id| fault(random, id, (nodes, conductors), busy_us));
    let mut faults: Vec<FaultPlan> = faults.collect();
    faults.sort_by_key(|fault| fault.at_us);
    faults
}

/// Drawn apart, in a part of the runs.
fn disk_loss(seed: u64, nodes: usize, busy_us: u64) -> Option<FaultPlan> {
    let mut random = Random::new(seed ^ 0x6c6f_7373);
    random.percent(25).then(|| FaultPlan {
        id: 1 << 32,
        at_us: random.between(busy_us / 3, busy_us),
        for_us: random.between(1_000, 300_000),
        what: Fault::DiskLost(random.below(nodes)),
    })
}

fn fault(
    random: &mut Random,
    id: u64,
    (nodes, conductors): (usize, usize),
    busy_us: u64,
) -> FaultPlan {
    let node = random.below(nodes);
    let other = (node + 1 + random.below(nodes - 1)) % nodes;
    let what = match random.below(28) {
        0 | 1 => Fault::NodeCrash(node),
        2 => Fault::NodePause(node),
        3 | 20 | 21 => Fault::ConductorCrash(random.below(conductors)),
        4 => Fault::EngineCrash(node),
        5 => Fault::EngineStall(node),
        6 | 7 => Fault::Partition(node, other),
        8 => Fault::Unreachable(node),
        9 => Fault::DiskFull(node),
        10 => Fault::DiskHangs(node),
        11 => Fault::DiskSlow(node),
        12 => Fault::DiskReadsFail(node),
        13 => Fault::DiskWritesFail(node),
        14 => Fault::DiskSyncsFail(node),
        15 => Fault::DiskLies(node),
        16 => Fault::DiskRots(node),
        17 => Fault::ClockForward(node),
        18 => Fault::ClockBack(node),
        22 => Fault::NodeKilled(node),
        23 | 24 => Fault::CutOffFails(node),
        25..=27 => Fault::Drain(node),
        _ => Fault::MemoryRots(node),
    };
    FaultPlan {
        id,
        at_us: random.between(10_000, busy_us),
        for_us: random.between(1_000, 600_000),
        what,
    }
}
