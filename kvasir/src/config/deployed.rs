//! What `deploy/kubernetes` gives to the daemons is what they take, and fits what else stands there.

use std::path::Path;

use super::parse;

const CONFIG_MAP: &str = include_str!("../../../deploy/kubernetes/config.yaml");
const STORE_NODE: &str = include_str!("../../../deploy/kubernetes/store-node.yaml");
/// What is filled in on each host, and an example of it.
const FILLED_IN: [(&str, &str); 3] =
    [("NODE_NAME", "host-1"), ("HOST_IP", "10.0.0.7"), ("ROLE", "prefill")];

/// The lines of the ConfigMap below `name: |`, without their indentation.
fn embedded(name: &str) -> String {
    let head = format!("  {name}: |");
    let lines = CONFIG_MAP.lines().skip_while(|line| **line != head).skip(1);
    let lines = lines.take_while(|line| line.is_empty() || line.starts_with("    "));
    let text: String = lines.map(|line| format!("{}\n", line.trim_start())).collect();
    assert!(!text.is_empty(), "{name} is not in the ConfigMap");
    text
}

/// As the pod does it: once a line.
fn filled_in(text: &str) -> String {
    let fill = |line: &str| {
        FILLED_IN.iter().fold(line.to_owned(), |line, (name, with)| line.replacen(name, with, 1))
    };
    text.lines().map(|line| fill(line) + "\n").collect()
}

fn store_node() -> kvasir_store_node::config::Config {
    let text = filled_in(&embedded("store-node.toml"));
    parse(Path::new("store-node.toml"), &text).unwrap()
}

fn engine() -> kvasir_engine_reference::Config {
    parse(Path::new("engine.toml"), &filled_in(&embedded("engine.toml"))).unwrap()
}

/// The number after `what` in the manifest of the store node.
fn number(what: &str) -> u64 {
    let (_, rest) = STORE_NODE.split_once(what).unwrap_or_else(|| panic!("no {what}"));
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[test]
fn every_daemon_takes_its_configuration() {
    let conductor = embedded("conductor.toml");
    let conductor: kvasir_conductor::Config =
        parse(Path::new("conductor.toml"), &conductor).unwrap();
    let node = store_node();
    node.check().unwrap();
    assert_eq!(node.node_id, "host-1");
    assert_eq!(engine().attach_dir, node.attach_dir);
    assert_eq!(
        node.replication.peers, conductor.nodes,
        "any of them may take what another one leaves"
    );
}

#[test]
fn what_the_configurations_leave_open_is_filled_in() {
    for (name, _) in FILLED_IN {
        assert!(STORE_NODE.contains(&format!("s/{name}/${name}/")), "{name}");
    }
    let text = filled_in(&(embedded("store-node.toml") + &embedded("engine.toml")));
    assert!(FILLED_IN.iter().all(|(name, _)| !text.contains(name)), "{text}");
}

#[test]
fn probes_and_volumes_are_those_of_the_configurations() {
    for listen in [store_node().listen, engine().listen] {
        for probe in ["/readyz", "/healthz"] {
            let asked = format!("{{path: {probe}, port: {}}}", listen.port());
            assert!(STORE_NODE.contains(&asked), "{asked}");
        }
    }
    let ssd = store_node().ssd.dir.unwrap();
    let volume = ssd.parent().unwrap().display().to_string();
    assert!(STORE_NODE.contains(&format!("{{name: ssd, mountPath: {volume}}}")), "{volume}");
    assert!(STORE_NODE.contains(&format!("mkdir -p {}", ssd.display())));
}

#[test]
fn a_pod_that_ends_has_time_to_drain() {
    let node = store_node();
    let drain =
        format!("--node \"$HOST_IP:{}\" drain --wait --timeout-seconds ", node.listen.port());
    let afterwards_ms = node.drain_timeout_ms.max(engine().drain_timeout_ms.into());
    let grace_s = number("terminationGracePeriodSeconds: ");
    // Some more, for connections to end.
    assert!(grace_s >= number(&drain) + afterwards_ms.div_ceil(1_000) + 10, "{grace_s} s");
}
