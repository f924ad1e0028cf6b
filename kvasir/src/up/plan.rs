//! What will run: every process with its name, its addresses and its configuration. Made whole
//! before anything starts; nothing here touches a port or a file.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use kvasir_conductor::{
    BalanceConfig, BalanceMode, Config as ConductorConfig, ModelConfig, RoutesConfig,
};
use kvasir_engine_reference::{Config as EngineConfig, Role, Routes};
use kvasir_store_node::config::{Config as NodeConfig, Routes as NodeRoutes, Ssd};
use kvasir_transfer::{Domain, EfaConfig, Verify};

use super::flags::{Engines, Flags, HOST_PAGE_BYTES};
use crate::daemon::Kind;

/// How long each kind may drain. Together under ten seconds, the most that ending may take.
pub(super) const CONDUCTOR_DRAIN_MS: u32 = 4_000;
pub(super) const ENGINE_DRAIN_MS: u32 = 1_500;
pub(super) const NODE_DRAIN_MS: u32 = 1_500;

#[derive(Debug)]
pub(super) struct ClusterPlan {
    /// In the order of starting: nodes, then engines, then the conductor.
    pub processes: Vec<ProcessPlan>,
    pub front_door: SocketAddr,
    /// Where the conductor shows what it decided and how the cluster does.
    pub monitor: SocketAddr,
    pub model_name: String,
}

#[derive(Debug)]
pub(super) struct ProcessPlan {
    pub name: String,
    pub kind: Kind,
    /// Where it answers /healthz, /readyz and /metrics.
    pub address: SocketAddr,
    pub other_addresses: Vec<SocketAddr>,
    /// The text of its configuration file.
    pub config: String,
}

/// What the flags do not say.
#[derive(Debug)]
pub(super) struct Surroundings<'a> {
    pub run_dir: &'a Path,
    pub model: &'a Path,
    pub cores: u32,
}

/// One after another each address that the plan needs; the first is the front door.
pub(super) trait Addresses {
    fn front_door(&mut self) -> Result<SocketAddr, AddressError>;
    fn free(&mut self) -> Result<SocketAddr, AddressError>;
}

#[derive(Debug, thiserror::Error)]
pub(super) enum AddressError {
    #[error("cannot use port {port} of 127.0.0.1 ({source}); choose another one with --port")]
    FrontDoor { port: u16, source: std::io::Error },
    #[error("cannot find a free port on 127.0.0.1: {0}")]
    NoneFree(std::io::Error),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum PlanError {
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error("cannot write a configuration as TOML: {0}")]
    Toml(#[from] toml::ser::Error),
}

pub(super) fn plan(
    flags: &Flags,
    engines: Engines,
    surroundings: &Surroundings<'_>,
    addresses: &mut impl Addresses,
) -> Result<ClusterPlan, PlanError> {
    let front_door = addresses.front_door()?;
    let model_name = model_name(flags, surroundings.model);
    let threads =
        flags.threads.unwrap_or_else(|| (surroundings.cores / engines.total().max(1)).max(1));
    let common = Common { flags, surroundings, model_name: &model_name, threads };

    let (mut configs, mut workers) = (Vec::new(), Vec::new());
    for Host { node: name, engines } in hosts(engines, flags.engines_per_node) {
        configs.push(node(&common, &name, engines.len(), addresses)?);
        for (engine_name, role) in engines {
            workers.push(engine(&common, (&engine_name, role), &name, addresses)?);
        }
    }
    let node_addresses: Vec<String> = configs.iter().map(|node| node.listen.to_string()).collect();
    let peers = if flags.no_replication { &[] } else { &node_addresses[..] };
    let named = configs.into_iter().map(|node| beside(node, peers));
    let nodes: Vec<ProcessPlan> = named.collect::<Result<_, _>>()?;
    let monitor = addresses.free()?;
    let conductor = conductor(&common, front_door, monitor, node_addresses, addresses)?;
    let processes = nodes.into_iter().chain(workers).chain([conductor]).collect();
    Ok(ClusterPlan { processes, front_door, monitor, model_name })
}

struct Common<'a> {
    flags: &'a Flags,
    surroundings: &'a Surroundings<'a>,
    model_name: &'a str,
    threads: u32,
}

/// A store node and its engines.
struct Host {
    node: String,
    engines: Vec<(String, Role)>,
}

/// An engine that is alone on its node is called as the node is without `-node`; nodes of more are numbered.
fn hosts(engines: Engines, per_node: u32) -> Vec<Host> {
    let names = names(engines);
    if per_node == 1 {
        let alone = |engine: (String, Role)| Host {
            node: format!("{}-node", engine.0),
            engines: vec![engine],
        };
        return names.into_iter().map(alone).collect();
    }
    // Prefill and decode in turn, so that a node has both where there are both.
    let of_role = |wanted: Role| names.iter().filter(move |(_, role)| *role == wanted);
    let mut in_turn = Vec::new();
    let (mut prefills, mut decodes) = (of_role(Role::Prefill), of_role(Role::Decode));
    loop {
        let next: Vec<_> = prefills.next().into_iter().chain(decodes.next()).cloned().collect();
        if next.is_empty() {
            break;
        }
        in_turn.extend(next);
    }
    in_turn.extend(of_role(Role::Both).cloned());
    let node = |(number, engines): (u32, &[(String, Role)])| Host {
        node: format!("host-{number}-node"),
        engines: engines.to_vec(),
    };
    (1..).zip(in_turn.chunks(per_node as usize)).map(node).collect()
}

/// `prefill-1`, `prefill-2`, …: an engine's name.
fn names(engines: Engines) -> Vec<(String, Role)> {
    let roles = [
        (engines.prefill, "prefill", Role::Prefill),
        (engines.decode, "decode", Role::Decode),
        (engines.both, "both", Role::Both),
    ];
    roles
        .into_iter()
        .flat_map(|(count, word, role)| (1..=count).map(move |i| (format!("{word}-{i}"), role)))
        .collect()
}

/// Short, because a Unix socket's path has 108 bytes.
fn attach_dir(run_dir: &Path, node: &str) -> PathBuf {
    run_dir.join(node)
}

fn node(
    common: &Common<'_>,
    name: &str,
    engines: usize,
    addresses: &mut impl Addresses,
) -> Result<NodeConfig, PlanError> {
    let flags = common.flags;
    let (listen, transfer_listen) = (addresses.free()?, addresses.free()?);
    Ok(NodeConfig {
        node_id: name.to_owned(),
        listen,
        attach_dir: attach_dir(common.surroundings.run_dir, name),
        engines_max: NodeConfig::default().engines_max.max(engines as u32),
        dram_bytes: flags.dram_bytes,
        transport: match flags.transport.as_str() {
            "tcp" => Domain::Tcp,
            "verbs" => Domain::Verbs,
            "efa" => Domain::Efa,
            _ => Domain::Shm,
        },
        transfer_listen,
        lease_max_ms: NodeConfig::default().lease_max_ms.max(flags.lease_ms),
        push_enabled: !flags.no_push,
        verify: if flags.no_verify {
            Verify { tcp: false, shm: false, verbs: false, efa: false }
        } else {
            Verify::default()
        },
        send_bytes_per_s_max: flags.send_bytes_per_s_max.unwrap_or(0),
        layer_log_file: layer_log(flags, name),
        ssd: ssd(common, name),
        routes: NodeRoutes {
            concurrent_messages_max: flags
                .route_concurrent_messages_max
                .unwrap_or(NodeRoutes::default().concurrent_messages_max),
            ..NodeRoutes::default()
        },
        efa: efa(&flags.efa_provider),
        drain_timeout_ms: NODE_DRAIN_MS.into(),
        ..NodeConfig::default()
    })
}

/// The node may copy blocks to every other of these.
fn beside(mut config: NodeConfig, nodes: &[String]) -> Result<ProcessPlan, PlanError> {
    let own = config.listen.to_string();
    config.replication.peers = nodes.iter().filter(|node| **node != own).cloned().collect();
    Ok(ProcessPlan {
        name: config.node_id.clone(),
        kind: Kind::StoreNode,
        address: config.listen,
        other_addresses: vec![config.transfer_listen],
        config: toml::to_string(&config)?,
    })
}

/// All of its nodes are on this host.
fn efa(provider: &str) -> EfaConfig {
    let address = (provider == "tcp").then(|| Ipv4Addr::LOCALHOST.to_string());
    EfaConfig { provider: provider.to_owned(), address, ..EfaConfig::default() }
}

/// At most a 32nd of it is reclaimed at once, so that a small one has enough segments.
fn ssd(common: &Common<'_>, node: &str) -> Ssd {
    let flags = common.flags;
    let Some(bytes) = flags.ssd_bytes else { return Ssd::default() };
    let run_dir = common.surroundings.run_dir;
    let dir = flags.ssd_dir.as_deref().map(|dir| dir.join(node));
    let page = HOST_PAGE_BYTES;
    // Seven blocks have to fit in one.
    let segment_bytes = (bytes / 32).max(4 << 20);
    Ssd {
        dir: Some(dir.unwrap_or_else(|| run_dir.join(format!("{node}.ssd")))),
        capacity_bytes: bytes / page * page,
        segment_bytes: segment_bytes.min(Ssd::default().segment_bytes) / page * page,
        tenant_bytes_max: bytes,
        faults_file: flags.ssd_faults.then(|| run_dir.join(format!("{node}.faults"))),
        ..Ssd::default()
    }
}

fn engine(
    common: &Common<'_>,
    (name, role): (&str, Role),
    node: &str,
    addresses: &mut impl Addresses,
) -> Result<ProcessPlan, PlanError> {
    let flags = common.flags;
    let listen = addresses.free()?;
    let config = EngineConfig {
        instance_id: name.to_owned(),
        role,
        model_dir: common.surroundings.model.to_owned(),
        model_name: common.model_name.to_owned(),
        attach_dir: attach_dir(common.surroundings.run_dir, node),
        listen,
        prefill_chunk_tokens: flags.prefill_chunk_tokens,
        kv_dtype: flags.kv_dtype(),
        attention_precision: flags.attention_precision(),
        threads: common.threads,
        routes: routes(flags),
        drain_timeout_ms: ENGINE_DRAIN_MS,
        layer_log_file: layer_log(flags, name),
        ..EngineConfig::default()
    };
    Ok(ProcessPlan {
        name: name.to_owned(),
        kind: Kind::Engine,
        address: listen,
        other_addresses: Vec::new(),
        config: toml::to_string(&config)?,
    })
}

/// All nodes are on this host.
fn routes(flags: &Flags) -> Routes {
    let routes = Routes::default();
    let transport = if flags.transport == "tcp" { Domain::Tcp } else { Domain::Shm };
    Routes {
        transport,
        answer_timeout_ms: flags.route_timeout_ms.unwrap_or(routes.answer_timeout_ms),
        send_bytes_per_s_max: flags.send_bytes_per_s_max.unwrap_or(0),
        ..routes
    }
}

fn conductor(
    common: &Common<'_>,
    listen: SocketAddr,
    monitor_listen: SocketAddr,
    nodes: Vec<String>,
    addresses: &mut impl Addresses,
) -> Result<ProcessPlan, PlanError> {
    let flags = common.flags;
    let grpc_listen = addresses.free()?;
    let config = ConductorConfig {
        listen,
        grpc_listen,
        monitor_listen,
        nodes,
        models: vec![ModelConfig {
            name: common.model_name.to_owned(),
            tokenizer_dir: common.surroundings.model.to_owned(),
        }],
        request_timeout_ms: flags.request_timeout_ms,
        ttft_objective_ms: flags.ttft_objective_ms,
        tbt_objective_ms: flags.tbt_objective_ms,
        always_fetch: flags.always_fetch,
        decision_inputs_bytes_max: flags.decision_inputs_bytes_max.unwrap_or(0) as usize,
        routes: RoutesConfig {
            enabled: flags.routes,
            always: flags.always_route,
            ..RoutesConfig::default()
        },
        steering_enabled: flags.steering,
        chunk_reuse_enabled: flags.chunk_reuse,
        balance: balance(flags),
        lease_ms: flags.lease_ms,
        drain_timeout_ms: CONDUCTOR_DRAIN_MS.into(),
        ..ConductorConfig::default()
    };
    Ok(ProcessPlan {
        name: "conductor".to_owned(),
        kind: Kind::Conductor,
        address: listen,
        other_addresses: vec![grpc_listen, monitor_listen],
        config: toml::to_string(&config)?,
    })
}

fn balance(flags: &Flags) -> BalanceConfig {
    let mode = match flags.balance.as_str() {
        "off" => BalanceMode::Off,
        "auto" => BalanceMode::Auto,
        _ => BalanceMode::Recommend,
    };
    let balance = BalanceConfig { mode, ..BalanceConfig::default() };
    let Some(window_ms) = flags.balance_window_ms else { return balance };
    BalanceConfig {
        sample_interval_ms: window_ms / 10,
        window_ms,
        dwell_ms: 2 * window_ms,
        ..balance
    }
}

fn layer_log(flags: &Flags, process: &str) -> Option<PathBuf> {
    flags.layer_log_dir.as_ref().map(|folder| folder.join(format!("{process}.log")))
}

fn model_name(flags: &Flags, model: &Path) -> String {
    flags
        .model_name
        .clone()
        .or_else(|| Some(model.file_name()?.to_str()?.to_owned()))
        .unwrap_or_else(|| "model".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use kvasir_engine_reference::Precision;
    use kvasir_engine_reference::model::KvDtype;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    struct Counted(u16);

    impl Addresses for Counted {
        fn front_door(&mut self) -> Result<SocketAddr, AddressError> {
            Ok(([127, 0, 0, 1], 8000).into())
        }

        fn free(&mut self) -> Result<SocketAddr, AddressError> {
            self.0 += 1;
            Ok(([127, 0, 0, 1], self.0).into())
        }
    }

    fn planned(line: &str) -> ClusterPlan {
        let words = std::iter::once("up").chain(line.split_whitespace());
        let flags = Line::try_parse_from(words).unwrap().flags;
        let surroundings =
            Surroundings { run_dir: Path::new("/run"), model: Path::new("/m/tiny"), cores: 4 };
        plan(&flags, flags.engines().unwrap(), &surroundings, &mut Counted(100)).unwrap()
    }

    fn config<T: serde::de::DeserializeOwned>(plan: &ClusterPlan, name: &str) -> T {
        let process = plan.processes.iter().find(|process| process.name == name).unwrap();
        toml::from_str(&process.config).unwrap()
    }

    #[test]
    fn every_engine_has_a_node_and_the_conductor_knows_all_nodes() {
        let plan = planned("--prefill 2 --decode 1");
        let names: Vec<&str> = plan.processes.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "prefill-1-node",
                "prefill-2-node",
                "decode-1-node",
                "prefill-1",
                "prefill-2",
                "decode-1",
                "conductor"
            ]
        );
        let conductor: ConductorConfig = config(&plan, "conductor");
        let nodes: Vec<String> =
            plan.processes[..3].iter().map(|node| node.address.to_string()).collect();
        assert_eq!(conductor.nodes, nodes);
        assert_eq!(conductor.models[0].name, "tiny");
        for engine in ["prefill-1", "prefill-2", "decode-1"] {
            let node: NodeConfig = config(&plan, &format!("{engine}-node"));
            let mut known = node.replication.peers.clone();
            known.push(node.listen.to_string());
            known.sort();
            assert_eq!(known, nodes, "it knows the others");
            assert_eq!(config::<EngineConfig>(&plan, engine).attach_dir, node.attach_dir);
        }
        let plan = planned("--prefill 2 --no-replication");
        assert_eq!(config::<NodeConfig>(&plan, "prefill-1-node").replication.peers, [""; 0]);
    }

    #[test]
    fn engines_that_share_a_node_are_dealt_out_in_turn() {
        let check = |line: &str, want: &[(&str, &[&str])]| {
            let plan = planned(line);
            let words = std::iter::once("up").chain(line.split_whitespace());
            let flags = Line::try_parse_from(words).unwrap().flags;
            let counted = flags.engines().unwrap().nodes(flags.engines_per_node);
            assert_eq!(counted as usize, want.len(), "the memory check counts the same nodes");
            let nodes = plan.processes.iter().filter(|p| p.kind == Kind::StoreNode);
            let nodes: Vec<&str> = nodes.map(|node| node.name.as_str()).collect();
            assert_eq!(nodes, want.iter().map(|(node, _)| *node).collect::<Vec<_>>(), "{line}");
            for (node, engines) in want {
                let attach_dir = config::<NodeConfig>(&plan, node).attach_dir;
                for engine in *engines {
                    let engine: EngineConfig = config(&plan, engine);
                    assert_eq!(engine.attach_dir, attach_dir, "{line}");
                }
            }
            let conductor: ConductorConfig = config(&plan, "conductor");
            assert_eq!(conductor.nodes.len(), nodes.len());
        };
        check(
            "--prefill 1 --decode 2 --engines-per-node 2",
            &[("host-1-node", &["prefill-1", "decode-1"]), ("host-2-node", &["decode-2"])],
        );
        check("--both 2 --engines-per-node 2", &[("host-1-node", &["both-1", "both-2"])]);
        check("--engines-per-node 8", &[("host-1-node", &["prefill-1", "decode-1"])]);
        let many = planned("--both 20 --engines-per-node 20");
        assert_eq!(config::<NodeConfig>(&many, "host-1-node").engines_max, 20);
    }

    #[test]
    fn no_address_is_given_twice() {
        let plan = planned("--prefill 2 --decode 2");
        let mut all: Vec<SocketAddr> = plan
            .processes
            .iter()
            .flat_map(|process| {
                std::iter::once(process.address).chain(process.other_addresses.clone())
            })
            .collect();
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
        assert_eq!(count, 4 * 3 + 3);
    }

    #[test]
    fn flags_land_in_the_configurations_they_are_about() {
        let plan = planned(
            "--both 1 --dram-bytes 64MiB --prefill-chunk-tokens 16 --kv-dtype bf16 --attention-precision bf16 --transport tcp --threads 3 \
             --no-push --send-bytes-per-s-max 1000 --layer-log-dir /logs --no-verify --lease-ms 70000 \
             --request-timeout-ms 900 --ttft-objective-ms 800 --tbt-objective-ms 70 --always-fetch --model-name other \
             --ssd-bytes 64MiB --ssd-dir /disk --ssd-faults --steering --chunk-reuse --balance auto --balance-window-ms 1000",
        );
        let node: NodeConfig = config(&plan, "both-1-node");
        assert_eq!(node.dram_bytes, 64 << 20);
        assert_eq!(node.transport, Domain::Tcp);
        assert_eq!((node.push_enabled, node.send_bytes_per_s_max), (false, 1000));
        assert_eq!(node.verify, Verify { tcp: false, shm: false, verbs: false, efa: false });
        assert_eq!(node.layer_log_file, Some("/logs/both-1-node.log".into()));
        assert!(node.lease_max_ms >= 70_000);
        assert_eq!(node.ssd.dir, Some("/disk/both-1-node".into()));
        assert_eq!((node.ssd.capacity_bytes, node.ssd.segment_bytes), (64 << 20, 4 << 20));
        assert_eq!(node.ssd.faults_file, Some("/run/both-1-node.faults".into()));
        assert_eq!(node.check(), Ok(()));
        let engine: EngineConfig = config(&plan, "both-1");
        assert_eq!((engine.prefill_chunk_tokens, engine.threads), (16, 3));
        assert_eq!(engine.routes.send_bytes_per_s_max, 1000);
        assert_eq!((engine.kv_dtype, engine.role), (KvDtype::Bf16, Role::Both));
        assert_eq!(engine.attention_precision, Precision::Bf16);
        assert_eq!(engine.layer_log_file, Some("/logs/both-1.log".into()));
        assert_eq!(engine.model_name, "other");
        let conductor: ConductorConfig = config(&plan, "conductor");
        assert_eq!((conductor.request_timeout_ms, conductor.lease_ms), (900, 70_000));
        assert_eq!((conductor.ttft_objective_ms, conductor.tbt_objective_ms), (800, 70));
        assert!(
            conductor.always_fetch && conductor.steering_enabled && conductor.chunk_reuse_enabled
        );
        let BalanceConfig { mode, sample_interval_ms, window_ms, dwell_ms, .. } = conductor.balance;
        assert_eq!((mode, sample_interval_ms), (BalanceMode::Auto, 100));
        assert_eq!((window_ms, dwell_ms), (1_000, 2_000));
        assert_eq!(conductor.models[0].name, "other");
    }

    #[test]
    fn cores_are_shared_out_and_nobody_gets_none() {
        let threads = |line| config::<EngineConfig>(&planned(line), "prefill-1").threads;
        assert_eq!(threads("--prefill 1 --decode 1"), 2);
        assert_eq!(threads("--prefill 3 --decode 3"), 1);
    }
}
