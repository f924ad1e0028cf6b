//! Who may depend on whom. The arrows run downward: a package uses what stands left of it in the
//! table, and nothing uses `kvasir` or the tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use kvasir_tests_repository::{assert_none, read, root};
use serde_json::Value;

/// Package, and the packages of this workspace that it may depend on. All that is not here is
/// refused, a new package too: its place is part of the design.
const MAY_USE: [(&str, &[&str]); 23] = [
    ("kvasir-proto", &[]),
    // What parsers are tried with: in tests, and under the fuzzer.
    ("kvasir-fuzzing", &[]),
    ("kvasir-checksum", &[]),
    ("kvasir-transfer-core", &[]),
    ("kvasir-transfer-verbs", &[]),
    ("kvasir-transfer-libfabric", &[]),
    ("kvasir-blocks", &["kvasir-checksum", "kvasir-proto", "kvasir-fuzzing"]),
    ("kvasir-log", &["kvasir-checksum", "kvasir-proto", "kvasir-fuzzing"]),
    ("kvasir-placement", &["kvasir-proto"]),
    ("kvasir-cuda", &[]),
    ("kvasir-attention", &["kvasir-cuda"]),
    (
        "kvasir-transfer",
        &[
            "kvasir-proto",
            "kvasir-checksum",
            "kvasir-transfer-core",
            "kvasir-transfer-libfabric",
            "kvasir-transfer-verbs",
            "kvasir-fuzzing",
        ],
    ),
    ("kvasir-attach", &["kvasir-proto", "kvasir-transfer", "kvasir-blocks", "kvasir-fuzzing"]),
    ("kvasir-route", &["kvasir-proto", "kvasir-transfer", "kvasir-attention", "kvasir-fuzzing"]),
    (
        "kvasir-store-node",
        &[
            "kvasir-route",
            "kvasir-proto",
            "kvasir-transfer",
            "kvasir-attach",
            "kvasir-blocks",
            "kvasir-log",
            "kvasir-cuda",
            "kvasir-attention",
            "kvasir-fuzzing",
        ],
    ),
    // A client links the line and nothing of the daemon; its tests start one.
    ("kvasir-client", &["kvasir-proto", "kvasir-transfer", "kvasir-attach", "kvasir-store-node"]),
    ("kvasir-client-c", &["kvasir-client", "kvasir-attach", "kvasir-proto", "kvasir-store-node"]),
    ("kvasir-conductor", &["kvasir-proto", "kvasir-placement"]),
    ("kvasir-replay", &["kvasir-proto", "kvasir-blocks", "kvasir-placement"]),
    (
        "kvasir-engine-reference",
        &["kvasir-proto", "kvasir-store-node", "kvasir-attention", "kvasir-route"],
    ),
    (
        "kvasir",
        &[
            "kvasir-proto",
            "kvasir-conductor",
            "kvasir-placement",
            "kvasir-store-node",
            // Its soak is also a client's.
            "kvasir-client",
            "kvasir-blocks",
            "kvasir-log",
            "kvasir-cuda",
            "kvasir-attention",
            "kvasir-route",
            "kvasir-transfer",
            "kvasir-transfer-core",
            "kvasir-transfer-libfabric",
            "kvasir-transfer-verbs",
            "kvasir-engine-reference",
            "kvasir-replay",
        ],
    ),
    (
        "kvasir-cluster-sim",
        &[
            "kvasir-proto",
            "kvasir-blocks",
            "kvasir-log",
            "kvasir-placement",
            "kvasir-route",
            "kvasir-transfer",
        ],
    ),
    ("kvasir-tests-repository", &[]),
];

const CORES: [&str; 5] =
    ["kvasir-checksum", "kvasir-transfer-core", "kvasir-blocks", "kvasir-log", "kvasir-placement"];

/// What only some packages may bring in, at any depth, and why.
const ONLY_IN: [(&str, &[&str], &str); 2] = [
    (
        "object_store",
        &["kvasir-store-node", "kvasir-engine-reference", "kvasir"],
        "bytes of the cache leave a host through its store node alone",
    ),
    // The default features of a library of object stores, or of reqwest, would bring it.
    ("aws-lc-sys", &[], "there is one cryptography, ring, and it needs no CMake"),
];

/// Time, randomness, threads and the outside world are passed into a core.
const NOT_IN_A_CORE: [&str; 8] =
    ["tokio", "axum", "tonic", "nix", "libc", "rand", "reqwest", "mio"];

/// Libraries that must be opened at run time, because a host may lack them.
const NEVER_LINKED: [&str; 4] = ["openssl-sys", "native-tls", "rdma-sys", "cudarc"];

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        .current_dir(root())
        .output()
        .expect("cargo, which runs this test, can be started");
    assert!(
        output.status.success(),
        "cargo {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).expect("cargo writes UTF-8")
}

fn packages() -> Vec<Value> {
    let text = cargo(&["metadata", "--offline", "--format-version", "1", "--no-deps"]);
    let metadata: Value = serde_json::from_str(&text).expect("cargo writes JSON");
    metadata["packages"].as_array().expect("a list of packages").clone()
}

fn name(package: &Value) -> &str {
    package["name"].as_str().expect("a package has a name")
}

/// Every package that is built into this one, at any depth.
fn built_into(package: &str) -> BTreeSet<String> {
    let tree = cargo(&["tree", "--offline", "-p", package, "-e", "normal", "--prefix", "none"]);
    tree.lines().filter_map(|line| line.split_whitespace().next()).map(String::from).collect()
}

#[test]
fn dependencies_between_packages_run_downward() {
    let table: BTreeMap<&str, &[&str]> = MAY_USE.into_iter().collect();
    let packages = packages();
    let ours: BTreeSet<&str> = packages.iter().map(name).collect();
    let mut complaints = Vec::new();
    for package in &packages {
        let from = name(package);
        let Some(allowed) = table.get(from) else {
            complaints.push(format!("{from} has no place in the table"));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let to = name(dependency);
            // How a package turns features on for its own tests.
            let is_itself = to == from && dependency["kind"] == "dev";
            if ours.contains(to) && !is_itself && !allowed.contains(&to) {
                complaints.push(format!("{from} must not depend on {to}"));
            }
        }
    }
    for gone in table.keys().filter(|name| !ours.contains(*name)) {
        complaints.push(format!("{gone} is in the table and not in the workspace"));
    }
    assert_none("dependency direction", &complaints);
}

#[test]
fn cores_depend_on_nothing_that_reaches_outside() {
    let mut complaints = Vec::new();
    for core in CORES {
        let built = built_into(core);
        assert!(built.contains(core), "the tree of {core} was read");
        for forbidden in NOT_IN_A_CORE.iter().filter(|name| built.contains(**name)) {
            complaints.push(format!("{core} depends on {forbidden}; see `cargo tree -p {core}`"));
        }
    }
    assert_none("cores", &complaints);
}

#[test]
fn some_libraries_are_brought_in_where_there_is_a_reason_for_them() {
    let mut complaints = Vec::new();
    for (package, _) in MAY_USE {
        let built = built_into(package);
        for (library, allowed, why) in ONLY_IN {
            if built.contains(library) && !allowed.contains(&package) {
                complaints.push(format!("{package} is built with {library}: {why}"));
            }
        }
    }
    assert!(built_into("kvasir-store-node").contains("object_store"), "the trees were read");
    assert_none("libraries", &complaints);
}

#[test]
fn the_conductor_never_links_what_touches_cache_bytes() {
    let built = built_into("kvasir-conductor");
    let complaints: Vec<String> = ["kvasir-transfer", "kvasir-attention", "kvasir-store-node"]
        .into_iter()
        .filter(|name| built.contains(*name))
        .map(|name| format!("kvasir-conductor is built with {name}"))
        .collect();
    assert_none("conductor", &complaints);
}

#[test]
fn a_client_of_objects_does_not_link_the_daemon() {
    for client in ["kvasir-client", "kvasir-client-c"] {
        let built = built_into(client);
        assert!(built.contains("kvasir-attach"), "the tree of {client} was read");
        assert!(!built.contains("kvasir-store-node"), "{client} is built with the daemon");
    }
}

#[test]
fn nothing_is_linked_that_a_host_may_lack() {
    let built = built_into("kvasir");
    let complaints: Vec<String> = NEVER_LINKED
        .into_iter()
        .filter(|name| built.contains(*name))
        .map(|name| format!("the binary is built with {name}"))
        .collect();
    assert_none("libraries", &complaints);
}

#[test]
fn every_package_uses_the_one_lint_table_and_licence() {
    let mut complaints = Vec::new();
    for package in packages() {
        let manifest = package["manifest_path"].as_str().expect("a package has a manifest");
        let text = read(Path::new(manifest));
        let table: toml::Table = toml::from_str(&text).expect("a manifest is TOML");
        let lints = table.get("lints").and_then(|lints| lints.get("workspace"));
        if lints.and_then(toml::Value::as_bool) != Some(true) {
            complaints.push(format!("{} does not say lints.workspace = true", name(&package)));
        }
        if package["license"].as_str() != Some("Apache-2.0") {
            complaints.push(format!("{} is not under Apache-2.0", name(&package)));
        }
    }
    assert_none("manifests", &complaints);
}
