//! Allowed dependencies between packages, and one path for each public item. In the table a package depends only on
//! packages above it, and no package depends on `kvasir` or the tests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use kvasir_tests_repository::modules::{Declaration, DeclarationKind, declarations};
use kvasir_tests_repository::{assert_none, files, read, root};
use serde_json::Value;

/// Package, and the packages of this workspace that it may depend on. All that is not here is
/// refused, a new package too: its place is part of the design.
const MAY_USE: [(&str, &[&str]); 25] = [
    ("kvasir-proto", &[]),
    // What parsers are tried with: in tests, and under the fuzzer.
    ("kvasir-fuzzing", &[]),
    // Mutation points of guards; a constant `false` in all but mutation builds.
    ("kvasir-mutation", &[]),
    ("kvasir-checksum", &[]),
    ("kvasir-transfer-core", &["kvasir-mutation"]),
    ("kvasir-transfer-verbs", &["kvasir-mutation"]),
    ("kvasir-transfer-libfabric", &[]),
    ("kvasir-blocks", &["kvasir-checksum", "kvasir-proto", "kvasir-fuzzing", "kvasir-mutation"]),
    ("kvasir-log", &["kvasir-checksum", "kvasir-proto", "kvasir-fuzzing", "kvasir-mutation"]),
    ("kvasir-placement", &["kvasir-proto"]),
    ("kvasir-cuda", &[]),
    ("kvasir-attention", &["kvasir-cuda"]),
    (
        "kvasir-transfer",
        &[
            "kvasir-checksum",
            "kvasir-transfer-core",
            "kvasir-transfer-libfabric",
            "kvasir-transfer-verbs",
            "kvasir-fuzzing",
            "kvasir-mutation",
        ],
    ),
    (
        "kvasir-attach",
        &["kvasir-proto", "kvasir-transfer", "kvasir-blocks", "kvasir-fuzzing", "kvasir-mutation"],
    ),
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
        // Only its tests start a store node.
        &[
            "kvasir-proto",
            "kvasir-attach",
            "kvasir-transfer",
            "kvasir-store-node",
            "kvasir-attention",
            "kvasir-route",
        ],
    ),
    ("kvasir-process", &[]),
    (
        "kvasir",
        &[
            "kvasir-proto",
            "kvasir-process",
            "kvasir-conductor",
            "kvasir-placement",
            "kvasir-store-node",
            // Its soak is also a client's.
            "kvasir-client",
            "kvasir-mutation",
            "kvasir-attach",
            "kvasir-blocks",
            "kvasir-cuda",
            "kvasir-attention",
            "kvasir-transfer",
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
            "kvasir-mutation",
            "kvasir-placement",
            "kvasir-route",
            "kvasir-transfer",
        ],
    ),
    ("kvasir-tests-repository", &["kvasir-mutation"]),
];

const CORES: [&str; 5] =
    ["kvasir-checksum", "kvasir-transfer-core", "kvasir-blocks", "kvasir-log", "kvasir-placement"];

/// Libraries that no package is built with unless a feature or a cfg is selected, and why.
const NEVER_BY_DEFAULT: [(&str, &str); 5] = [
    ("object_store", "the quick start does without it; the feature `object-store` selects it"),
    ("reqwest", "the quick start would compile a second HTTP client; tests may use it"),
    ("gemm", "it compiles the kernels of four types that are not used; `gemm-f32` is enough"),
    ("aws-lc-sys", "there is one cryptography, ring, and it needs no CMake"),
    ("cudarc", "only `--cfg kvasir_cudarc` selects it (decision 62)"),
];

/// Time, randomness, threads and the outside world are passed into a core.
const NOT_IN_A_CORE: [&str; 9] =
    ["tokio", "axum", "tonic", "nix", "libc", "rand", "reqwest", "mio", "dashmap"];

/// Folders of packages, and packages of which they may re-export items: their users need no dependency on the second.
const FACADES: [(&str, &str); 4] = [
    // Outcomes and signals of the transfer engine, and the checksum that its writes carry.
    ("transfer", "kvasir_transfer_core"),
    ("transfer", "kvasir_checksum"),
    // The key of an object.
    ("store-node/client", "kvasir_proto"),
    // A limit on messages of engines, which must not know the node's core.
    ("store-node/attach", "kvasir_blocks"),
];

/// Libraries that must be opened at run time, because a host may lack them, or that need more tools to build than a
/// host may have.
const NEVER_LINKED: [&str; 4] = ["openssl-sys", "native-tls", "rdma-sys", "aws-lc-sys"];

fn cargo(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO"))
        .args(arguments)
        // The trees are those of an ordinary build, even if a cfg selects other packages for this one.
        .env_remove("RUSTFLAGS")
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

/// Every package that is built into this one, at any depth, with its default features and these.
fn built_with(package: &str, features: &str) -> BTreeSet<String> {
    let what = ["-p", package, "--features", features];
    let form = ["-e", "normal", "--prefix", "none"];
    let tree = cargo(&[&["tree", "--offline"], &what[..], &form[..]].concat());
    tree.lines().filter_map(|line| line.split_whitespace().next()).map(String::from).collect()
}

fn built_into(package: &str) -> BTreeSet<String> {
    built_with(package, "")
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
    for (from, allowed) in MAY_USE {
        let package = packages.iter().find(|package| name(package) == from);
        let declared = package.and_then(|package| package["dependencies"].as_array());
        let declared: BTreeSet<&str> = declared.into_iter().flatten().map(name).collect();
        let unused = allowed.iter().filter(|to| !declared.contains(*to));
        complaints.extend(unused.map(|to| format!("{from} may use {to} and does not declare it")));
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
fn heavy_libraries_are_built_only_if_they_are_selected() {
    let mut complaints = Vec::new();
    for (package, _) in MAY_USE {
        let built = built_into(package);
        assert!(built.contains(package), "the tree of {package} was read");
        for (library, why) in NEVER_BY_DEFAULT {
            if built.contains(library) {
                complaints.push(format!("{package} is built with {library}: {why}"));
            }
        }
    }
    assert_none("libraries", &complaints);
}

/// The binary's own package has `opt-level = 0`, so its code is not optimised: an allocator there made each token
/// 5 % more expensive (decision 63).
#[test]
fn the_binary_leaves_the_allocator_and_the_log_writer_to_an_optimised_package() {
    let packages = packages();
    let binary = packages.iter().find(|package| name(package) == "kvasir");
    let declared = binary.and_then(|package| package["dependencies"].as_array());
    let declared: BTreeSet<&str> = declared.into_iter().flatten().map(name).collect();
    assert!(declared.contains("kvasir-process"), "the manifest was read");
    let misplaced = ["mimalloc", "tracing-subscriber"].into_iter();
    let misplaced = misplaced.filter(|library| declared.contains(library));
    let mut complaints: Vec<String> =
        misplaced.map(|library| format!("kvasir declares {library}; use kvasir-process")).collect();
    let sources = files(&[".rs"]).into_iter().filter(|file| file.starts_with("kvasir/src"));
    complaints.extend(
        sources
            .filter(|file| read(file).contains("#[global_allocator]"))
            .map(|file| format!("{} defines an allocator; kvasir-process has it", file.display())),
    );
    assert_none("unoptimised code", &complaints);
}

/// The names that a source may use as crates: those before `::` and those that `use` names, outside comments.
fn crates_named(text: &str) -> BTreeSet<&str> {
    let is_word = |it: char| it.is_alphanumeric() || it == '_';
    let mut named = BTreeSet::new();
    for line in text.lines().map(|line| line.split("//").next().unwrap_or_default()) {
        for (at, _) in line.match_indices("::") {
            named.extend(line[..at].rsplit(|it: char| !is_word(it)).next());
        }
        let used = line.trim_start().trim_start_matches("pub ").strip_prefix("use ");
        named.extend(used.and_then(|rest| rest.split(|it: char| !is_word(it)).next()));
    }
    named
}

/// The files that a file has as modules by `#[path]`.
fn included(file: &Path) -> Vec<PathBuf> {
    let folder = root().join(file).parent().expect("a folder").to_owned();
    let text = read(file);
    let paths = text.lines().filter_map(|line| line.trim().strip_prefix("#[path = \""));
    let paths = paths.filter_map(|rest| rest.strip_suffix("\"]"));
    paths.map(|path| folder.join(path)).collect()
}

/// The sources of a target: the files below the folder of its first file, except those of other packages.
fn sources_of(target: &Value, folders: &[PathBuf], sources: &[PathBuf]) -> Vec<String> {
    let path = Path::new(target["src_path"].as_str().expect("a path"));
    let path = path.canonicalize().expect("a target has a file");
    let is_alone =
        path.parent().is_some_and(|it| it.ends_with("benches") || it.ends_with("examples"));
    let of = if is_alone { path.as_path() } else { path.parent().expect("a folder") };
    let is_other =
        |file: &Path| folders.iter().any(|it| file.starts_with(it) && !of.starts_with(it));
    let mut texts = Vec::new();
    for file in sources {
        let whole = root().join(file);
        if whole.starts_with(of) && !is_other(&whole) {
            texts.push(read(file));
            texts.extend(included(file).iter().map(|file| read(file)));
        }
    }
    texts
}

#[test]
fn every_dependency_is_used() {
    let (sources, packages) = (files(&[".rs"]), packages());
    let folder = |package: &Value| {
        let manifest = Path::new(package["manifest_path"].as_str().expect("a manifest"));
        manifest.parent().expect("a folder").to_owned()
    };
    let folders: Vec<PathBuf> = packages.iter().map(folder).collect();
    let mut complaints = Vec::new();
    for package in &packages {
        // By the library and the programs, by the build script, and by all targets.
        let (mut product, mut build, mut all) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        for target in package["targets"].as_array().into_iter().flatten() {
            let named: BTreeSet<String> = sources_of(target, &folders, &sources)
                .iter()
                .flat_map(|text| crates_named(text))
                .map(str::to_owned)
                .collect();
            let kind = target["kind"][0].as_str().expect("a target has a kind");
            match kind {
                "test" | "bench" | "example" => {}
                "custom-build" => build.extend(named.iter().cloned()),
                _ => product.extend(named.iter().cloned()),
            }
            all.extend(named);
        }
        assert!(!all.is_empty(), "{} has sources", name(package));
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let (from, to) = (name(package), name(dependency));
            let renamed = dependency["rename"].as_str().unwrap_or(to).replace('-', "_");
            let (kind, used) = match dependency["kind"].as_str() {
                None => ("", &product),
                Some("build") => ("build-", &build),
                Some(_) => ("dev-", &all),
            };
            if from != to && !used.contains(&renamed) {
                complaints.push(format!("{from} does not use its {kind}dependency {to}"));
            }
        }
    }
    assert_none("unused dependencies", &complaints);
}

/// Decision 62: until `tests/gpu` has passed with it, only one package may declare cudarc, under its cfg.
#[test]
fn cudarc_is_declared_by_one_package_and_under_its_cfg_alone() {
    let mut complaints = Vec::new();
    let mut declared = 0;
    for package in packages() {
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        for dependency in dependencies.filter(|dependency| name(dependency) == "cudarc") {
            let from = name(&package);
            if from != "kvasir-cuda" || dependency["target"] != "cfg(kvasir_cudarc)" {
                complaints.push(format!("{from} declares cudarc for {}", dependency["target"]));
            }
            if dependency["uses_default_features"] != false {
                complaints.push(format!("{from} takes cudarc's default features"));
            }
            declared += 1;
        }
    }
    assert_eq!(declared, 1, "the manifests were read");
    assert_none("cudarc", &complaints);
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
fn clients_and_engines_do_not_link_the_daemon() {
    for client in ["kvasir-client", "kvasir-client-c", "kvasir-engine-reference"] {
        let built = built_into(client);
        assert!(built.contains("kvasir-attach"), "the tree of {client} was read");
        assert!(!built.contains("kvasir-store-node"), "{client} is built with the daemon");
    }
}

#[test]
fn nothing_is_linked_that_a_host_may_lack() {
    // The binary of containers, which has all of them.
    let built = built_with("kvasir", "full");
    assert!(built.contains("object_store"), "the tree was read");
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

/// A file's declarations.
struct FileDeclarations {
    file: PathBuf,
    /// The path of its module in its package.
    module: Vec<String>,
    declarations: Vec<Declaration>,
}

/// The folder of a file's package, and the path of its module. A file that is not below `src` counts as a package.
fn module_of(file: &Path) -> (PathBuf, Vec<String>) {
    let parts: Vec<String> = file.iter().map(|it| it.to_string_lossy().into_owned()).collect();
    let Some(at) = parts.iter().rposition(|part| part == "src") else {
        return (file.to_owned(), Vec::new());
    };
    let mut module = parts[at + 1..].to_vec();
    let name = module.pop().expect("a file has a name");
    if !matches!(name.as_str(), "lib.rs" | "main.rs" | "mod.rs") {
        module.push(name.trim_end_matches(".rs").to_owned());
    }
    (parts[..at].iter().collect(), module)
}

fn declarations_by_package() -> BTreeMap<PathBuf, Vec<FileDeclarations>> {
    let mut packages: BTreeMap<PathBuf, Vec<FileDeclarations>> = BTreeMap::new();
    for file in files(&[".rs"]) {
        let (package, module) = module_of(&file);
        let declarations = declarations(&read(&file))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        packages.entry(package).or_default().push(FileDeclarations { file, module, declarations });
    }
    packages
}

/// The path from the root of the package, as far as it is one of this package.
fn absolute(scope: &[String], path: &[String]) -> Vec<String> {
    let (mut from, mut rest) = (scope.to_vec(), path);
    while let Some((first, after)) = rest.split_first() {
        match first.as_str() {
            "crate" => from.clear(),
            "self" => {}
            "super" => from.truncate(from.len().saturating_sub(1)),
            _ => break,
        }
        rest = after;
    }
    [&from, rest].concat()
}

/// Re-exports of a package that give an item a second path.
fn second_paths(files: &[FileDeclarations]) -> Vec<String> {
    // Modules that are visible where they are declared, and those that are public.
    let (mut visible, mut public) = (BTreeSet::new(), BTreeSet::from([Vec::new()]));
    for FileDeclarations { module, declarations, .. } in files {
        for it in declarations {
            if let DeclarationKind::Module(name) = &it.kind {
                let path = [module, &it.scope, std::slice::from_ref(name)].concat();
                if it.is_public {
                    public.insert(path.clone());
                }
                visible.insert(path);
            }
        }
    }
    let is_reachable =
        |module: &[String]| (0..=module.len()).all(|end| public.contains(&module[..end]));
    let mut complaints = Vec::new();
    for FileDeclarations { file, module, declarations } in files {
        for it in declarations {
            let DeclarationKind::Reexport(path) = &it.kind else { continue };
            let scope = [module.as_slice(), &it.scope].concat();
            let item = absolute(&scope, path);
            let is_below = item.len() > scope.len() && item.starts_with(&scope);
            let of_visible = is_below && visible.contains(&item[..=scope.len()]);
            let (_, parent) = item.split_last().expect("a path has a name");
            let of_public =
                it.is_public && is_reachable(&scope) && !parent.is_empty() && is_reachable(parent);
            if of_visible || of_public {
                let (file, path) = (file.display(), path.join("::"));
                complaints.push(format!("{file}: `{path}` has another path"));
            }
        }
    }
    complaints
}

#[test]
fn each_public_item_has_one_path_in_its_package() {
    let packages = declarations_by_package();
    assert!(packages.contains_key(Path::new("transfer/core")), "the packages were read");
    let complaints: Vec<String> = packages.values().flat_map(|it| second_paths(it)).collect();
    assert_none("make the module private, or name the item by it", &complaints);
}

#[test]
fn a_second_path_is_found() {
    let package = |texts: &[(&str, &str)]| -> Vec<FileDeclarations> {
        let file = |(name, text): &(&str, &str)| {
            let (_, module) = module_of(&Path::new("a/src").join(name));
            let declarations = declarations(text).expect("it is Rust");
            FileDeclarations { file: name.into(), module, declarations }
        };
        texts.iter().map(file).collect()
    };
    let faults: [&[(&str, &str)]; 7] = [
        &[("lib.rs", "pub mod m; pub use m::Item;")],
        &[("lib.rs", "pub mod m; pub use {other::A, self::m::{n::B, C as D}};")],
        &[("lib.rs", "pub mod m; pub use m as n;")],
        &[("a/mod.rs", "pub(crate) mod m; pub(super) use crate::a::m::*;")],
        &[("a.rs", "mod b { pub mod m {} pub use super::b::m::Item; }")],
        &[("lib.rs", "mod m; pub mod a; pub mod n;"), ("a.rs", "pub use crate::n::Item;")],
        &[("lib.rs", "pub mod n; pub use crate::n::a::Item;"), ("n.rs", "pub mod a;")],
    ];
    for files in faults {
        assert!(!second_paths(&package(files)).is_empty(), "{files:?}");
    }
    let good: [&[(&str, &str)]; 5] = [
        &[("lib.rs", "mod m; pub use m::Item;")],
        &[("lib.rs", "pub mod m; use m::Item; pub use ::m::Other; pub use n::m::Third;")],
        &[("lib.rs", "mod a; pub use a::b::Item;"), ("a.rs", "pub mod b;")],
        &[("lib.rs", "pub mod n; mod a;"), ("a.rs", "pub(crate) use crate::n::Item;")],
        &[("lib.rs", "pub mod a; mod n;"), ("a.rs", "pub use crate::n::Item;")],
    ];
    for files in good {
        assert_eq!(second_paths(&package(files)), Vec::<String>::new(), "{files:?}");
    }
}

#[test]
fn only_facades_re_export_items_of_other_packages() {
    let (mut complaints, mut used) = (Vec::new(), BTreeSet::new());
    for (package, files) in declarations_by_package() {
        for FileDeclarations { file, declarations, .. } in files {
            for it in declarations.iter().filter(|it| it.is_public) {
                let DeclarationKind::Reexport(path) = &it.kind else { continue };
                let Some(of) = path.iter().find(|it| !it.is_empty()) else { continue };
                if !of.starts_with("kvasir_") {
                    continue;
                }
                let facade = FACADES
                    .iter()
                    .find(|(outer, inner)| Path::new(outer) == package && inner == of);
                match facade {
                    Some(facade) => drop(used.insert(facade)),
                    None => complaints.push(format!("{}: of {of}", file.display())),
                }
            }
        }
    }
    let unused = FACADES.iter().filter(|facade| !used.contains(facade));
    complaints
        .extend(unused.map(|(outer, inner)| format!("{outer} re-exports nothing of {inner}")));
    assert_none("re-exports", &complaints);
}
