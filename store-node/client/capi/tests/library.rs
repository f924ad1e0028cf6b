//! The library and its header: a C program is compiled against both and run, and they name the same.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvasir_store_node::config::Config;
use kvasir_store_node::start;

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder that the library was built into: beside this test's, or in it.
fn library_dir() -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    let deps = test.parent().expect("a folder");
    let built = |dir: &&Path| dir.join("libkvasir_client_c.so").exists();
    let folders = [deps, deps.parent().expect("a folder")];
    folders.iter().copied().find(built).expect("the library was built with its tests").into()
}

fn compile(source: &str, dir: &Path) -> PathBuf {
    let program = dir.join("program");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg("-I")
        .arg(here().join("include"))
        .arg(here().join("tests").join(source))
        .arg("-L")
        .arg(library_dir())
        .arg("-lkvasir_client_c")
        .output()
        .expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    program
}

#[test]
fn a_c_program_compiles_against_the_header_and_runs() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = compile("program.c", dir.path());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let mut nodes = Vec::new();
    let mut arguments = Vec::new();
    for name in ["attach", "other"] {
        let any_port = ([127, 0, 0, 1], 0).into();
        let config = Config {
            listen: any_port,
            transfer_listen: any_port,
            attach_dir: dir.path().join(name),
            dram_bytes: 1 << 20,
            tail_bytes: 1 << 20,
            drain_timeout_ms: 500,
            ..Config::default()
        };
        let node = runtime.block_on(start(config)).expect("a node");
        arguments.push(dir.path().join(name).into_os_string());
        arguments.push(node.address().to_string().into());
        nodes.push(node);
    }
    let ran = Command::new(&program)
        .args(&arguments)
        .env("LD_LIBRARY_PATH", library_dir())
        .output()
        .expect("the program was compiled");
    for mut node in nodes {
        runtime.block_on(node.shut_down());
    }
    let (said, complained) =
        (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && said == "ok\n", "{said}{complained}");
}

/// Every name before `(` that begins with `kvasir_`, after this word.
fn functions(text: &str, before: &str) -> BTreeSet<String> {
    text.lines()
        .filter(|line| !line.trim_start().starts_with(['/', '*']))
        .filter(|line| line.contains(before))
        .filter_map(|line| {
            let (head, _) = line.split_once('(')?;
            let at = head.rfind("kvasir_")?;
            Some(head[at..].to_owned())
        })
        .collect()
}

#[test]
fn the_header_and_the_source_name_the_same_functions_and_numbers() {
    let read = |name: &str| std::fs::read_to_string(here().join(name)).expect("a file");
    let (header, source) = (read("include/kvasir.h"), read("src/lib.rs"));
    let engine = (read("include/kvasir_engine.h"), read("src/engine.rs"));
    for (header, source) in [(&header, &source), (&engine.0, &engine.1)] {
        let exported = functions(source, "extern \"C\" fn");
        assert!(exported.len() >= 10, "{exported:?}");
        let declared = functions(header, "kvasir_");
        assert_eq!(declared, exported);
    }
    // The numbers of the status, which the source writes with other names.
    let numbers = |text: &str| -> BTreeSet<(String, String)> {
        let line = |line: &str| {
            let (name, number) = line.trim().trim_end_matches(',').split_once(" = ")?;
            let name = name.strip_prefix("KVASIR_").unwrap_or(name).replace('_', "");
            Some((name.to_lowercase(), number.to_owned()))
        };
        text.lines().filter_map(line).collect()
    };
    let status = header.split("} kvasir_status").next().expect("the first enum");
    let source = source.split("pub enum Status").nth(1).expect("the enum");
    let source = source.split('}').next().expect("its end");
    assert_eq!(numbers(status), numbers(source));
}
